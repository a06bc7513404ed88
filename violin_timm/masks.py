"""Positions and decay rates -> the mask that multiplies attention scores.

    M_h[i, j] = sum_c w_{h,c} gamma_{h,c} ** d_c(i, j),    gamma = sigmoid(beta),    w = 1 / C unless learned

computed as ``exp(-d * softplus(-beta))`` in float32 or better: where fine-tuning starts (beta in 15..20), most of
``sigmoid(beta)`` is exactly 1 in float32, so its power and its gradient are useless (paper section 3.2, appendix D.1).

Distances are small integers, so a mask is a sum of rows of the table ``[C * N, H]`` of all powers, looked up for every
pair of patches; symmetry halves the pairs. The backward sums gradients by distance. Neither keeps masks or distances of
single curves: what is stored is one ``[H, L, L]`` per layer, whatever the number of curves.
"""

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

__all__ = ['Pairs', 'decay_mask', 'decay_rates']


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
        rows: int32 ``[T, C]``, ``c * N + d_c(i, j)``: row of a table of powers.
        upper: int64 ``[T]``, ``i * N + j``.
        expand: int64 ``[N * N]``, the pair of each two patches.
    """

    rows: torch.Tensor
    upper: torch.Tensor
    expand: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor) -> 'Pairs':
        """From integer positions ``[C, N, D]``."""
        num_patches = positions.shape[1]
        i, j = torch.triu_indices(num_patches, num_patches, device=positions.device)
        rows = (positions[:, i] - positions[:, j]).abs().sum(-1)
        rows += torch.arange(len(positions), device=positions.device)[:, None] * num_patches
        expand = torch.empty(num_patches, num_patches, dtype=torch.int64, device=positions.device)
        pair = torch.arange(len(i), device=positions.device)
        expand[i, j] = pair
        expand[j, i] = pair
        return cls(rows.to(torch.int32).t().contiguous(), i * num_patches + j, expand.flatten())


class _DecayMask(torch.autograd.Function):
    """The mask with a backward that recomputes: it saves rates, weights and what all layers share."""

    @staticmethod
    def forward(ctx, rates, weights, prefix, positions, num_prefix, shared):
        ctx.save_for_backward(rates, weights, positions)
        ctx.num_prefix, ctx.shared = num_prefix, shared
        rows, _, expand = shared or Pairs.of(positions)
        num_heads, num_patches = len(rates), positions.shape[1]
        table = (weights[..., None] * _powers(rates, num_patches)).flatten(1).t().contiguous()
        patches = F.embedding_bag(rows, table, mode='sum').t()
        if not num_prefix:
            return patches.index_select(1, expand).view(num_heads, num_patches, num_patches)
        length = num_prefix + num_patches
        mask = rates.new_ones(num_heads, length, length)
        if prefix is not None:
            mask *= prefix[:, None, None]
        mask[:, num_prefix:, num_prefix:] = patches.index_select(1, expand).view(num_heads, num_patches, num_patches)
        return mask

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        rates, weights, positions = ctx.saved_tensors
        rows, upper, _ = ctx.shared or Pairs.of(positions)
        patches = grad[:, ctx.num_prefix :, ctx.num_prefix :]
        num_patches = patches.shape[-1]
        folded = (patches + patches.transpose(1, 2)).flatten(1).index_select(1, upper)
        by_distance = grad.new_zeros(len(rates), rates.shape[1] * num_patches)
        for component in rows.t().contiguous():
            by_distance.index_add_(1, component, folded)
        by_distance = by_distance.view(*rates.shape, num_patches)
        by_distance[..., 0] /= 2  # the diagonal was folded onto itself
        steps = torch.arange(num_patches, device=rates.device, dtype=rates.dtype)
        by_distance *= _powers(rates, num_patches)
        grad_rates = -weights * (by_distance * steps).sum(-1)
        # whatever is not between two patches
        grad_prefix = grad.sum((1, 2)) - patches.sum((1, 2)) if ctx.needs_input_grad[2] else None
        return grad_rates, by_distance.sum(-1), grad_prefix, None, None, None


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
