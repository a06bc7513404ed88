"""What was learned: masks as seen from a patch, decays as half-lives, alpha."""

import math
from typing import Callable, Optional, Sequence, Tuple

import numpy as np
import torch

from ..geometry import grid_positions
from ..masks import decay_rates
from .curves import centre_patch, frame

__all__ = [
    'draw_alphas',
    'draw_half_lives',
    'draw_mask',
    'draw_masks',
    'draw_weights',
    'half_lives',
    'mean_masks',
    'weights',
]

MASK_COLOURS, HALF_LIFE_COLOURS, ALPHA_COLOURS = 'magma', 'cividis', 'RdBu_r'


@torch.no_grad()
def mean_masks(model, height: int, width: int) -> np.ndarray:
    """Mask of every layer, averaged over heads, as the central patch sees it: ``[layers, height, width]``."""
    row, column = centre_patch(height, width)
    seen = []
    for block in model.blocks:
        decay = block.attn.decay
        positions = grid_positions(','.join(decay.settings.components), height, width, decay.beta)
        seen.append(decay(positions)[:, row * width + column].mean(0).view(height, width).cpu().double().numpy())
    return np.stack(seen)


@torch.no_grad()
def half_lives(model) -> np.ndarray:
    """Steps along a curve in which its mask falls to one half, ``ln 2 / -log(gamma)``: ``[layers, heads, curves]``."""
    rates = torch.stack([decay_rates(block.attn.decay.beta.double()) for block in model.blocks])
    return (math.log(2) / rates.clamp_min(1e-300)).cpu().numpy()


@torch.no_grad()
def weights(model) -> np.ndarray:
    """Learned weights of the curves in the mask: ``[layers, heads, curves]``."""
    logits = torch.stack([block.attn.decay.curve_logits.double() for block in model.blocks])
    return logits.softmax(-1).cpu().numpy()


def draw_mask(ax, mask: np.ndarray, centre: Optional[Tuple[int, int]] = None, **image):
    """Draw the row of a mask that belongs to one patch, as a map of the grid.

    Args:
        ax: Axes of matplotlib.
        mask: Values ``[height, width]``.
        centre: Row and column of the patch, to be outlined.
        image: Arguments of ``Axes.imshow``, such as `vmin` and `vmax`.

    Returns:
        The image, for a colour bar.
    """
    from matplotlib.patches import Rectangle

    height, width = mask.shape
    drawn = ax.imshow(mask, **{'cmap': MASK_COLOURS, **image})
    frame(ax, height, width)
    if centre is not None:
        row, column = centre
        ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor='#1b9e77', linewidth=1.5))
    return drawn


def draw_masks(figure, masks: np.ndarray, columns: int) -> None:
    """Draw the masks ``[layers, height, width]`` of all layers in one scale, with one colour bar.

    Where they have hardly decayed, as at the start of fine-tuning, it is their distance from 1 that is drawn.
    """
    close = bool(masks.min() > 0.99)
    values, label = (1.0 - masks, '1 \N{MINUS SIGN} mask') if close else (masks, 'mask')
    low, high = (0.0, values.max() or 1e-12) if close else (values.min(), 1.0)
    axes = _panels(figure, len(masks), columns)
    for layer, (ax, value) in enumerate(zip(axes.flat, values)):
        drawn = draw_mask(ax, value, centre_patch(*value.shape), vmin=low, vmax=high, cmap=MASK_COLOURS + '_r' * close)
        ax.set_title(f'layer {layer}')
    used = axes[:, : min(len(masks), columns)]
    bar = figure.colorbar(drawn, ax=used, label=label, aspect=16, shrink=0.88, fraction=0.05, pad=0.02)
    if close:
        bar.formatter.set_powerlimits((-2, 2))
    bar.ax.locator_params(nbins=5)


def _panels(figure, count: int, columns: int, **shared) -> np.ndarray:
    axes = figure.subplots(-(-count // columns), columns, squeeze=False, **shared)
    for ax in axes.flat[count:]:
        ax.set_axis_off()
    return axes


def draw_half_lives(figure, values: np.ndarray, names: Sequence[str], columns: int) -> None:
    """Draw half-lives ``[layers, heads, curves]`` in steps, a panel a layer, in one logarithmic scale.

    Those of a single curve are one panel, ``[layers, heads]``.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter, LogLocator

    low, high = values.min(), values.max()
    if high < 1.2 * low:
        low, high = low / 2, high * 2
    colours = {'cmap': HALF_LIFE_COLOURS, 'norm': LogNorm(low, high)}
    if len(names) == 1:
        bar = _draw_table(figure, values[..., 0], _short, 'half-life (steps)', **colours)
    else:
        bar = _draw_layers(figure, values, names, columns, _short, 'half-life (steps)', **colours)
    bar.locator, bar.formatter = LogLocator(subs=(1, 2, 5) if high < 1e3 * low else (1,)), FuncFormatter(_short)
    bar.minorticks_off()


def draw_weights(figure, values: np.ndarray, names: Sequence[str], columns: int) -> None:
    """Draw the learned weights of the curves ``[layers, heads, curves]``, which add up to 1, a panel a layer."""
    _draw_layers(
        figure,
        values,
        names,
        columns,
        '{:.2f}'.format,
        'weight (sum: 1)',
        cmap=HALF_LIFE_COLOURS,
        vmin=0.0,
        vmax=values.max(),
    )


def draw_alphas(figure, alphas: np.ndarray) -> None:
    """Draw alpha ``[layers, heads]``, without a unit, on a scale around 1 or, where signs or sizes differ, around 0."""
    middle = 1.0 if alphas.min() > 0.5 else 0.0
    span = max(np.abs(alphas - middle).max(), 1e-3)
    digits = 2 if middle == 0.0 or span > 0.1 else 3

    def text(value: float) -> str:
        return f'{round(value, digits) + 0.0:.{digits}f}'.replace('-', '\N{MINUS SIGN}')  # no minus before a zero

    _draw_table(figure, alphas, text, 'alpha', cmap=ALPHA_COLOURS, vmin=middle - span, vmax=middle + span)


def _draw_table(figure, values: np.ndarray, text: Callable[[float], str], label: str, **image):
    """One panel of ``[layers, heads]``; returns its colour bar."""
    ax = figure.subplots()
    drawn = ax.imshow(values, aspect='auto', **image)
    step = -(-values.shape[0] // 16)
    ax.set(xlabel='head', ylabel='layer', xticks=range(values.shape[1]), yticks=range(0, values.shape[0], step))
    ax.tick_params(length=0)
    if values.shape[1] <= 12:
        _write_cells(ax, drawn, values, text)
    return figure.colorbar(drawn, ax=ax, label=label, aspect=16, fraction=0.08, pad=0.02)


def _draw_layers(
    figure, values: np.ndarray, names: Sequence[str], columns: int, text: Callable[[float], str], label: str, **image
):
    """A panel ``[heads, curves]`` for every layer; returns their colour bar."""
    axes = _panels(figure, len(values), columns)
    for layer, (ax, value) in enumerate(zip(axes.flat, values)):
        drawn = ax.imshow(value, aspect='auto', **image)
        ax.set_title(f'layer {layer}')
        first, last = layer % columns == 0, layer + columns >= len(values)
        _label_cells(ax, 'head' if first else '', names if last else None, value.shape)
        if values[0].size <= 40 and columns <= 4:
            _write_cells(ax, drawn, value, text)
    return figure.colorbar(drawn, ax=axes, label=label, aspect=20, fraction=0.05, pad=0.02)


def _label_cells(ax, heads: str, names: Optional[Sequence[str]], shape: Tuple[int, int]) -> None:
    ax.set_ylabel(heads)
    step = -(-shape[0] // 6)
    ax.set_yticks(range(0, shape[0], step), labels=None if heads else [])
    ax.set_xticks(range(shape[1]), labels=names or [], rotation=90)
    ax.tick_params(length=0)


def _write_cells(ax, image, values: np.ndarray, text) -> None:
    """Write every value into its cell, in the shade that is readable there."""
    colours = image.cmap(image.norm(values))[..., :3] @ [0.299, 0.587, 0.114]
    size = 8 if values.shape[1] <= 8 else 7
    for (row, column), value in np.ndenumerate(values):
        ax.text(
            column,
            row,
            text(value),
            ha='center',
            va='center',
            fontsize=size,
            color='white' if colours[row, column] < 0.5 else 'black',
        )


def _short(value: float, _position: int = 0) -> str:
    """Three digits at most: 7.1, 142, 3.1k, 45M; a formatter of matplotlib."""
    if value >= 1e12:
        return f'{value:.0e}'.replace('e+', 'e')
    for limit, unit in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if value >= limit:
            return f'{value / limit:.2g}{unit}' if value < 99.5 * limit else f'{value / limit:.0f}{unit}'
    return f'{value:.2g}' if value < 10 else f'{value:.0f}'
