"""How far masks moved: what a model has of mask and temperature, before training and after.

    before = snapshot(model)
    ...                                                 # train
    print(summary(movement(model, before)))

Fine-tuning starts from masks of almost all ones and from alpha near 1, so an accuracy alone does not say whether the
prior did anything. Reported is how far each layer is from no mask (``1 - M``) and from no temperature (``alpha - 1``).
It is the mask M itself and alpha by itself that are meant, whatever the strategy makes of them: with ``mul_v2`` or
``add_v1`` a mask of ones is not the absence of a mask.
"""

from __future__ import annotations

from typing import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import ViolinAttention
from ..engine.config import ConfigError
from ..geometry import positions
from ..masks import decay_rates
from ..models.vit import ViolinMixin

__all__ = ['COLUMNS', 'movement', 'snapshot', 'summary']

KINDS = ('beta', 'alpha', 'curve_logits')
CHUNK_PAIRS = 2**17  # pairs of patches at a time

# key of `movement` -> its heading in `summary`; max is short for the largest
COLUMNS = {
    'mask_before': '1-mask before',
    'mask_after': 'after',
    'mask_before_max': 'max before',
    'mask_after_max': 'max after',
    'mask_change': 'change',
    'beta_change': 'beta change',
    'beta_change_max': 'max',
    'alpha_before': '|alpha-1| before',
    'alpha_after': 'after',
    'alpha_after_max': 'max after',
    'alpha_change': 'change',
}


@torch.no_grad()
def snapshot(model: nn.Module) -> list[dict[str, Tensor]]:
    """Copies of the decay parameters of every layer, in order.

    Args:
        model: A Violin, bare or inside what DDP, ``torch.compile`` or peft made of it. Of a module that peft's
            ``modules_to_save`` copied, it is the copy in use.

    Returns:
        For each layer ``beta [H, C]``, ``alpha [H]`` and ``curve_logits [H, C]`` where it has them, in float64 on the
        CPU.

    Raises:
        ConfigError: There is not exactly one Violin in `model`.
    """
    layers = []
    for attention in _attentions(_violin(model)):
        # a wrapper of peft's answers for the module in use
        values = {kind: getattr(attention.decay, kind, None) for kind in KINDS}
        layers.append({k: v.detach().to('cpu', torch.float64, copy=True) for k, v in values.items() if v is not None})
    return layers


@torch.no_grad()
def movement(model: nn.Module, before: Sequence[Mapping[str, Tensor]]) -> list[dict[str, float]]:
    """How far the masks and alphas of every layer are from 1, and from what they were.

    Args:
        model: As for `snapshot`.
        before: Its snapshot from before training.

    Returns:
        For each layer these numbers, without those of a mask or an alpha that it has none of. Masks are those of the
        model's own grid, between two different patches, in float64; prefix tokens, for which the mask is 1, are left
        out. A mean is over heads and pairs.

        - ``mask_before``, ``mask_after``: mean of ``1 - M``; with ``_max``, the largest.
        - ``mask_change``: mean of ``|M_after - M_before|``.
        - ``beta_change``, ``beta_change_max``: mean and largest ``|difference|``.
        - ``alpha_before``, ``alpha_after``, ``alpha_after_max``: mean of ``|alpha - 1|`` over heads, and the largest.
        - ``alpha_change``: mean ``|difference|``.

    Raises:
        ConfigError: There is not exactly one Violin in `model`, or `before` is of another one.
    """
    violin, after = _violin(model), snapshot(model)
    shapes = [[{kind: tuple(v.shape) for kind, v in layer.items()} for layer in layers] for layers in (before, after)]
    if shapes[0] != shapes[1]:
        raise ConfigError(f'before: got a snapshot of {shapes[0]}; the model has {shapes[1]}')
    results: list[dict[str, float]] = [{} for _ in after]
    if violin.curve_names:
        height, width = violin.patch_embed.grid_size
        grid = torch.tensor(positions(tuple(violin.curve_names.split(',')), height, width))
        for result, old, new in zip(results, before, after):
            result.update(_mask_numbers(old, new, grid))
    for result, old, new in zip(results, before, after):
        if 'alpha' in new:
            result.update(_alpha_numbers(old['alpha'], new['alpha']))
    return results


def summary(layers: Sequence[Mapping[str, float]]) -> str:
    """The result of `movement` as an aligned table, a line for each layer.

    Returns:
        Headings as in `COLUMNS`, without those that no layer has: means, and after ``max`` the largest.
    """
    keys = [key for key in COLUMNS if any(key in layer for layer in layers)]
    if not keys:
        return 'no layer has a mask or alpha'
    rows = [['layer', *(COLUMNS[key] for key in keys)]]
    for index, layer in enumerate(layers):
        rows.append([str(index), *(f'{layer[key]:.3g}' if key in layer else '-' for key in keys)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return '\n'.join('  '.join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def _violin(model: nn.Module) -> ViolinMixin:
    found = [module for module in model.modules() if isinstance(module, ViolinMixin)]
    if len(found) != 1:
        raise ConfigError(f'model: got {type(model).__name__} with {len(found)} Violins in it; exactly one is needed')
    return found[0]


def _attentions(violin: ViolinMixin) -> list[ViolinAttention]:
    return [module for module in violin.blocks.modules() if isinstance(module, ViolinAttention)]


def _mask_numbers(old: Mapping[str, Tensor], new: Mapping[str, Tensor], grid: Tensor) -> dict[str, float]:
    """All about the mask of one layer on a grid of positions ``[C, N, D]``."""
    tables = [_deviations(layer, grid.shape[1]) for layer in (old, new)]
    sums, largest, count = torch.zeros(3, dtype=torch.float64), torch.zeros(2, dtype=torch.float64), 0
    for rows in _pairs(grid):
        # 1 - M of both, [pairs, H]
        before, after = (F.embedding_bag(rows, table, mode='sum') for table in tables)
        sums += torch.stack([before.sum(), after.sum(), (after - before).abs().sum()])
        largest = torch.maximum(largest, torch.stack([before.max(), after.max()]))
        count += before.numel()
    means = (sums / max(count, 1)).tolist()  # a grid of one patch has no pairs
    change = (new['beta'] - old['beta']).abs()
    return {
        'mask_before': means[0],
        'mask_after': means[1],
        'mask_before_max': largest[0].item(),
        'mask_after_max': largest[1].item(),
        'mask_change': means[2],
        'beta_change': change.mean().item(),
        'beta_change_max': change.max().item(),
    }


def _deviations(layer: Mapping[str, Tensor], num_patches: int) -> Tensor:
    """``w (1 - gamma ** d)`` for every curve and distance: ``[C * N, H]``; an entry of each curve sums to ``1 - M``."""
    rates = decay_rates(layer['beta'])
    logits = layer.get('curve_logits')
    weights = torch.full_like(rates, 1 / rates.shape[1]) if logits is None else logits.softmax(-1)
    distances = torch.arange(num_patches, dtype=torch.float64)
    # where fine-tuning starts, 1 - exp(-x) would lose half of its digits
    deviations = -torch.expm1(-rates[..., None] * distances) * weights[..., None]
    return deviations.flatten(1).t().contiguous()


def _pairs(grid: Tensor) -> Iterator[Tensor]:
    """Rows ``c * N + d_c(i, j)`` of a table for the pairs of patches ``i < j``, ``[pairs, C]``, some at a time."""
    num_components, num_patches, _ = grid.shape
    first, second = torch.triu_indices(num_patches, num_patches, offset=1)
    offset = torch.arange(num_components) * num_patches
    for i, j in zip(first.split(CHUNK_PAIRS), second.split(CHUNK_PAIRS)):
        if len(i):
            yield (grid[:, i] - grid[:, j]).abs().sum(-1).t() + offset


def _alpha_numbers(old: Tensor, new: Tensor) -> dict[str, float]:
    return {
        'alpha_before': (old - 1).abs().mean().item(),
        'alpha_after': (new - 1).abs().mean().item(),
        'alpha_after_max': (new - 1).abs().max().item(),
        'alpha_change': (new - old).abs().mean().item(),
    }
