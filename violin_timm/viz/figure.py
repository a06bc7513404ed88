"""One figure of a model: its curves, and what its masks have learned."""

from functools import partial
from pathlib import Path
from typing import Callable, List, NamedTuple, Optional, Union

import numpy as np
import torch
from torch import nn

from ..models.vit import ViolinMixin
from .curves import draw_curves
from .masks import draw_alphas, draw_half_lives, draw_masks, draw_weights, half_lives, mean_masks, weights

__all__ = ['draw_figure', 'find_violin', 'training_figure']

WIDTH, DPI = 16.0, 100  # inches, dots per inch: 1600 pixels
STYLE = {
    'font.family': 'sans-serif',
    'font.size': 11,
    'axes.titlesize': 11,
    'axes.titlepad': 4,
    'axes.labelsize': 11,
    'xtick.labelsize': 10,
    'ytick.labelsize': 10,
    'image.interpolation': 'nearest',
    'axes.facecolor': 'white',
    'savefig.dpi': DPI,
    'savefig.facecolor': 'white',
    'savefig.bbox': None,
}
PANELS = 0.89  # part of a section's width that is left beside its colour bar
HEADING = 0.45  # inches above them, for its title


class Section(NamedTuple):
    """A titled part of the figure."""

    title: str
    share: float  # of the width of its row
    height: float  # in inches
    draw: Callable  # on a subfigure


def training_figure(
    model: nn.Module,
    path: Union[str, Path],
    height: Optional[int] = None,
    width: Optional[int] = None,
) -> Path:
    """Draw a Violin's curves, masks, half-lives and alpha into a file.

    Args:
        model: A Violin, or a module that wraps one (DDP, compiled, PEFT, DINO).
        path: File to write, 1600 pixels wide; its suffix chooses the format (png, pdf, svg).
        height: Rows of the grid, in patches; default: the model's.
        width: Columns of the grid, in patches; default: the model's.

    Returns:
        `path`.

    Raises:
        ImportError: If matplotlib, the extra ``[viz]``, is missing.
        TypeError: If there is no Violin in the model.
        ValueError: If a side is not a positive integer, or the suffix is of no known format.
    """
    figure = draw_figure(model, height, width)
    with _matplotlib().rc_context(STYLE):
        figure.savefig(path)
    return Path(path)


def draw_figure(model: nn.Module, height: Optional[int] = None, width: Optional[int] = None):
    """The figure that `training_figure` writes, as a matplotlib ``Figure``.

    Its sections, as far as the model has them: the curves on the grid, coloured by step; every layer's mask, averaged
    over heads, as the central patch sees it; the half-life of every head and curve in steps, ``ln 2 / -log(gamma)``;
    alpha of every layer and head; and the weights of the curves where they are learned.
    """
    model = find_violin(model)
    matplotlib = _matplotlib()
    size = model.patch_embed.grid_size or (None, None)
    height, width = (own if given is None else given for given, own in zip((height, width), size))
    for side, value in (('height', height), ('width', width)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f'{side}: got {value!r}; a grid of patches needs a positive integer')
    with matplotlib.rc_context(STYLE):
        return _draw(_rows(model, height, width), _headline(model, height, width))


def find_violin(model: nn.Module) -> nn.Module:
    """The Violin in a module that is or wraps one."""
    for module in model.modules():
        if isinstance(module, ViolinMixin):
            return module
    raise TypeError(f'model: got {type(model).__name__}, which has no masks; a Violin is needed (see add_violin)')


def _matplotlib():
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ImportError("matplotlib: not installed; figures need it: pip install 'violin-timm[viz]'") from error
    return matplotlib


def _headline(model: nn.Module, height: int, width: int) -> str:
    name = (getattr(model, 'pretrained_cfg', None) or {}).get('architecture') or type(model).__name__
    heads = model.blocks[0].attn.num_heads
    return f'{name}: {len(model.blocks)} layers, {heads} heads, {height} \N{MULTIPLICATION SIGN} {width} patches'


def _rows(model: nn.Module, height: int, width: int) -> List[List[Section]]:
    """Sections of the figure, row by row: what is wide, or has many panels, has a row of its own."""
    alpha = _alpha(model, WIDTH / 3)
    if not model.curve_names:
        text = f"This model has no mask (mask='none'){'' if alpha else ', and no alpha'}: its attention has no prior."
        return [[_note('Mask', text)], *([part] for part in alpha)]
    names = model.curve_names.split(',')
    beside = WIDTH * (2 / 3 if alpha else 1)
    if len(names) > 3:
        rows = [
            [_curves(names, height, width, WIDTH, 8)],
            [_masks(model, height, width, beside), *alpha],
            [_half_lives(model, names, WIDTH)],
        ]
    else:
        inches = WIDTH * (0.1 + len(names) / 8)
        rows = [
            [_curves(names, height, width, inches, len(names)), _masks(model, height, width, WIDTH - inches)],
            [_half_lives(model, names, beside), *alpha],
        ]
    if model.blocks[0].attn.decay.curve_logits is not None:
        rows.append([_layers('Weight of every curve in the mask', weights(model), names, WIDTH, draw_weights)])
    return rows


def _curves(names: List[str], height: int, width: int, inches: float, columns: int) -> Section:
    title = 'Distance' if names == ['manhattan'] else 'Curves' if len(names) > 1 else 'Curve'
    panel = inches * PANELS / columns * _aspect(height, width) + 0.3
    return Section(
        title,
        inches / WIDTH,
        HEADING + panel * -(-len(names) // columns),
        partial(draw_curves, names=names, height=height, width=width, columns=columns),
    )


def _masks(model: nn.Module, height: int, width: int, inches: float) -> Section:
    count = len(model.blocks)
    least = 1.5 * min(max(width / height, 1.0) ** 0.5, 2.0)
    columns = _columns(count, inches * PANELS, least, most=max(2.8, least))
    panel = inches * PANELS / columns * _aspect(height, width) + 0.3
    return Section(
        'Mask of every layer, mean over heads, as the outlined patch sees it',
        inches / WIDTH,
        HEADING + panel * -(-count // columns),
        partial(draw_masks, masks=mean_masks(model, height, width), columns=columns),
    )


def _half_lives(model: nn.Module, names: List[str], inches: float) -> Section:
    values = half_lives(model)
    if model.blocks[0].attn.decay.settings.mask == 'fixed' and np.ptp(values) <= 1e-3 * values.max():
        value = values.mean()
        return _note(
            'Half-life of the mask',
            f'The mask is fixed: gamma = {0.5 ** (1 / value):.6g} for all layers, '
            f'heads and curves, a half-life of {value:.0f} steps.',
            inches,
        )
    title = r'Half-life of the mask, $\ln 2\,/\,{-}\log\gamma$, in steps along the curve'
    if len(names) > 1:
        return _layers(title, values, names, inches, draw_half_lives)
    if names == ['manhattan']:
        title = title.replace('along the curve', 'of distance')
    return Section(
        title, inches / WIDTH, _table_height(values), partial(draw_half_lives, values=values, names=names, columns=1)
    )


def _layers(title: str, values: np.ndarray, names: List[str], inches: float, draw: Callable) -> Section:
    """A section with a panel ``[heads, curves]`` for every layer."""
    columns = _columns(len(values), inches * PANELS, least=2.0, most=3.8)
    panel = min(max(0.35 * values.shape[1], 1.3), 2.0) + 0.3
    labels = 0.09 * max(map(len, names)) + 0.2
    return Section(
        title,
        inches / WIDTH,
        HEADING + panel * -(-len(values) // columns) + labels,
        partial(draw, values=values, names=names, columns=columns),
    )


def _aspect(height: int, width: int) -> float:
    """Height of a panel by its width; a line of patches needs room for a colour bar beside it all the same."""
    return min(max(height / width, 0.35), 2.0)


def _table_height(values: np.ndarray) -> float:
    return HEADING + min(0.5 * len(values), 3.0) + 0.6


def _alpha(model: nn.Module, inches: float) -> List[Section]:
    decays = [block.attn.decay for block in model.blocks]
    if decays[0] is None or decays[0].alpha is None:
        return []
    values = torch.stack([decay.alpha.detach() for decay in decays]).double().cpu().numpy()
    return [
        Section(
            'Scale alpha of the scores (1: as they are)',
            inches / WIDTH,
            _table_height(values),
            partial(draw_alphas, alphas=values),
        )
    ]


def _columns(count: int, inches: float, least: float, most: float) -> int:
    """Columns for `count` panels no narrower than `least` inches, with rows evenly filled, and no wider than `most`."""
    rows = -(-count // int(inches / least))
    return max(-(-count // rows), round(inches / most))


def _note(title: str, text: str, inches: float = WIDTH) -> Section:
    """A section that is a sentence."""

    def draw(figure) -> None:
        ax = figure.subplots()
        ax.set_axis_off()
        ax.text(0.02, 0.5, text, va='center', fontsize=12)

    return Section(title, inches / WIDTH, HEADING + 0.6, draw)


def _draw(rows: List[List[Section]], headline: str):
    """The figure, laid out row by row, with sections lettered a, b, c, ..."""
    from matplotlib.figure import Figure

    heights = [max(section.height for section in row) for row in rows]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.5), dpi=DPI, layout='constrained')
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    figure.suptitle(headline, fontsize=14)
    letters = iter('abcde')
    strips = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, strip in zip(rows, strips):
        parts = strip.subfigures(1, len(row), squeeze=False, width_ratios=[section.share for section in row])[0]
        for section, part in zip(row, parts):
            section.draw(part)
            part.suptitle(f'{next(letters)}   {section.title}', x=0.01, ha='left', fontsize=12, fontweight='bold')
    return figure
