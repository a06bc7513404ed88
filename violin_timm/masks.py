"""Positions and decay rates -> the mask that multiplies attention scores.

    M_h[i, j] = sum_c w_{h,c} gamma_{h,c} ** d_c(i, j),    gamma = sigmoid(beta),    w = 1 / C unless learned

computed as ``exp(-d * softplus(-beta))`` in float32 or better: where fine-tuning starts (beta in 15..20), most of
``sigmoid(beta)`` is exactly 1 in float32, so its power and its gradient are useless (paper section 3.2, appendix D.1).

Distances are small integers, so a mask is a sum of rows of the table ``[C * N, H]`` of all powers, looked up for every
pair of patches; symmetry halves the pairs. The backward sums gradients by distance. Neither keeps masks or distances of
single curves: what is stored is one ``[H, L, L]`` per layer, whatever the number of curves.
"""

from typing import Iterator, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F

__all__ = ['Pairs', 'decay_mask', 'decay_rates']

BLOCK_BYTES = 32 * 2**20  # of distances at a time, where layers do not share them


def decay_rates(beta: torch.Tensor) -> torch.Tensor:
    """``-log(sigmoid(beta))`` in float32, or float64 if `beta` is."""
    if beta.dtype != torch.float64:
        beta = beta.float()
    return F.softplus(-beta)


def _distances(positions: torch.Tensor) -> torch.Tensor:
    """Pairwise L1 distances ``[N, N]`` of the positions ``[N, D]`` of one component."""
    return (positions[:, None, :] - positions[None, :, :]).abs().sum(-1)


class Pairs(NamedTuple):
    """Distances of all pairs of patches ``i <= j`` of one grid, T = N (N + 1) / 2 of them, shared by all layers.

    Args:
        rows: int32 ``[T, C]``, ``c * N + d_c(i, j)``: rows of a table of powers.
        pair: int64 ``[N * N]``, the pair that two patches are.
    """

    rows: torch.Tensor
    pair: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor) -> 'Pairs':
        """From integer positions ``[C, N, D]``."""
        num_components, num_patches, _ = positions.shape
        device = positions.device
        i, j = torch.triu_indices(num_patches, num_patches, dtype=torch.int32, device=device)
        rows = torch.arange(0, num_components * num_patches, num_patches, dtype=torch.int32, device=device)
        for coordinate in positions.to(torch.int32).permute(2, 1, 0).contiguous():  # [N, C]
            rows = coordinate.index_select(0, i).sub_(coordinate.index_select(0, j)).abs_().add_(rows)
        patch = torch.arange(num_patches, device=device)
        first = patch * num_patches - patch * (patch + 1) // 2  # pair (i, j) is first[i] + j
        smaller, larger = torch.minimum(patch[:, None], patch), torch.maximum(patch[:, None], patch)
        return cls(rows, (first[smaller] + larger).flatten())


class _DecayMask(torch.autograd.Function):
    """The mask with a backward that recomputes: it saves rates, weights and positions alone."""

    @staticmethod
    def forward(ctx, rates, weights, prefix, positions, num_prefix, shared):
        ctx.save_for_backward(rates, weights, positions)
        ctx.num_prefix, ctx.shared = num_prefix, shared
        num_heads, num_patches = len(rates), positions.shape[1]
        length = num_prefix + num_patches
        mask = rates.new_empty(num_heads, length, length)
        if num_prefix:
            mask[:] = 1.0 if prefix is None else prefix[:, None, None]
        patches = mask[:, num_prefix:, num_prefix:]
        table = (weights[..., None] * _powers(rates, num_patches)).flatten(1).t().contiguous()
        if shared is None:
            for lines, rows in _blocks(positions):
                patches[:, lines] = (
                    F.embedding_bag(rows, table, mode='sum').view(-1, num_patches, num_heads).permute(2, 0, 1)
                )
            return mask
        values = F.embedding_bag(shared.rows, table, mode='sum').t().contiguous()  # [H, T]
        for head, value in zip(patches, values):
            if head.is_contiguous():
                torch.index_select(value, 0, shared.pair, out=head.view(-1))
            else:
                head.copy_(value.index_select(0, shared.pair).view(num_patches, num_patches))
        return mask

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        rates, weights, positions = ctx.saved_tensors
        num_heads, num_patches = len(rates), positions.shape[1]
        patches = grad[:, ctx.num_prefix :, ctx.num_prefix :]
        by_distance = grad.new_zeros(num_heads, rates.shape[1] * num_patches)
        if ctx.shared is None:
            for lines, rows in _blocks(positions):
                _sum_by_row(by_distance, rows, patches[:, lines].flatten(1))
        else:
            rows, pair = ctx.shared
            by_pair = grad.new_zeros(num_heads, len(rows))
            by_pair.scatter_add_(1, pair.expand(num_heads, -1), patches.flatten(1))
            _sum_by_row(by_distance, rows, by_pair)
        steps = torch.arange(num_patches, device=rates.device, dtype=rates.dtype)
        by_distance = by_distance.view(*rates.shape, num_patches) * _powers(rates, num_patches)
        grad_rates = -weights * (by_distance * steps).sum(-1)
        # whatever is not between two patches
        grad_prefix = grad.sum((1, 2)) - patches.sum((1, 2)) if ctx.needs_input_grad[2] else None
        return grad_rates, by_distance.sum(-1), grad_prefix, None, None, None


def _blocks(positions: torch.Tensor) -> Iterator[Tuple[slice, torch.Tensor]]:
    """`Pairs.rows` of whole lines of the mask, int32 ``[lines * N, C]``, as many at a time as fit `BLOCK_BYTES`."""
    num_components, num_patches, _ = positions.shape
    size = max(1, BLOCK_BYTES // (4 * num_components * num_patches))
    offset = torch.arange(0, num_components * num_patches, num_patches, dtype=torch.int32, device=positions.device)
    coordinates = positions.to(torch.int32).permute(2, 1, 0).contiguous()  # [D, N, C]
    for start in range(0, num_patches, size):
        lines = slice(start, min(start + size, num_patches))
        rows = sum((c[lines, None] - c).abs_() for c in coordinates).add_(offset)
        yield lines, rows.flatten(0, 1)


def _sum_by_row(total: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Add values ``[H, T]`` to ``total [H, C * N]`` at rows ``[T, C]``."""
    for component in rows.unbind(1):
        total.scatter_add_(1, component.long().expand(len(values), -1), values)


def _powers(rates: torch.Tensor, num_patches: int) -> torch.Tensor:
    """gamma ** d for every distance that can occur on the grid: ``[H, C, N]``."""
    steps = torch.arange(num_patches, device=rates.device, dtype=rates.dtype)
    return torch.exp(-rates[..., None] * steps)


def _plain_mask(
    rates: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    num_prefix: int,
    prefix: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """The same mask in differentiable operations, for tracers and compilers, which look into no custom backward."""
    num_patches = positions.shape[1]
    patches = torch.zeros(rates.shape[0], num_patches, num_patches, dtype=rates.dtype, device=rates.device)
    for c in range(positions.shape[0]):
        distance = _distances(positions[c]).to(rates.dtype)
        patches = patches + weights[:, c, None, None] * torch.exp(-rates[:, c, None, None] * distance)
    if num_prefix == 0:
        return patches
    if prefix is None:
        prefix = torch.ones_like(rates[:, 0])
    top = prefix[:, None, None].expand(-1, num_prefix, num_prefix + num_patches)
    left = prefix[:, None, None].expand(-1, num_patches, num_prefix)
    return torch.cat([top, torch.cat([left, patches], dim=2)], dim=1)


def decay_mask(
    rates: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    num_prefix: int = 0,
    prefix: Optional[torch.Tensor] = None,
    pairs: Optional[Pairs] = None,
) -> torch.Tensor:
    """Mask of one attention layer.

    Args:
        rates: Decay rates ``-log(gamma)``, float32 or float64 ``[H, C]``.
        weights: Weight of every component, ``[H, C]``, of the same dtype; they sum to 1, or to alpha.
        positions: Integer coordinates ``[C, N, D]`` from `geometry.positions`.
        num_prefix: Number P of prefix tokens, which come first; their rows and columns are `prefix`.
        prefix: ``[H]``, alpha where the weights sum to it; 1 by default.
        pairs: `Pairs.of` the positions, where a caller has them already.

    Returns:
        ``[H, P + N, P + N]`` of the dtype of `rates`.
    """
    if torch.jit.is_scripting():
        return _plain_mask(rates, weights, positions, num_prefix, prefix)
    else:
        return _unscripted_mask(rates, weights, positions, num_prefix, prefix, pairs)


@torch.jit.unused
def _unscripted_mask(
    rates: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    num_prefix: int,
    prefix: Optional[torch.Tensor],
    pairs: Optional[Pairs],
) -> torch.Tensor:
    if torch.jit.is_tracing() or torch.compiler.is_compiling():
        return _plain_mask(rates, weights, positions, num_prefix, prefix)
    return _DecayMask.apply(rates, weights, prefix, positions, num_prefix, pairs)
