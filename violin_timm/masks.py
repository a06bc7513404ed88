"""Positions and decay rates -> the mask that multiplies attention scores.

    M_h[i, j] = sum_c w_{h,c} gamma_{h,c} ** d_c(i, j),    gamma = sigmoid(beta),    w = 1 / C unless learned

computed as ``exp(-d * softplus(-beta))`` in float32 or better: where fine-tuning starts (beta in 15..20), most of
``sigmoid(beta)`` is exactly 1 in float32, and so its power and its gradient are useless (paper section 3.2, appendix D.1).

Distances are small integers, so a mask is a look-up in the table ``[H, C, N]`` of all powers; the backward sums
gradients by distance and keeps neither masks nor distances.
"""
import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function

__all__ = ['decay_mask', 'decay_rates']


def decay_rates(beta: torch.Tensor) -> torch.Tensor:
    """``-log(sigmoid(beta))`` in float32, or float64 if `beta` is."""
    if beta.dtype != torch.float64:
        beta = beta.float()
    return F.softplus(-beta)


def _distances(positions: torch.Tensor) -> torch.Tensor:
    """Pairwise L1 distances ``[N, N]`` of the positions ``[N, D]`` of one component."""
    return (positions[:, None, :] - positions[None, :, :]).abs().sum(-1)


class _DecayMask(torch.autograd.Function):
    """The mask with a backward that recomputes: it saves rates, weights and positions only."""

    @staticmethod
    def forward(ctx, rates, weights, positions, num_prefix):
        ctx.save_for_backward(rates, weights, positions)
        ctx.num_prefix = num_prefix
        num_heads, num_patches = rates.shape[0], positions.shape[1]
        tables = weights[..., None] * _powers(rates, num_patches)
        length = num_prefix + num_patches
        mask = rates.new_ones(num_heads, length, length)
        patches = rates.new_zeros(num_heads, num_patches * num_patches)
        for component, table in zip(positions, tables.unbind(1)):
            patches += table.index_select(1, _distances(component).flatten())
        mask[:, num_prefix:, num_prefix:] = patches.view(num_heads, num_patches, num_patches)
        return mask

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        rates, weights, positions = ctx.saved_tensors
        num_patches = positions.shape[1]
        grad = grad[:, ctx.num_prefix:, ctx.num_prefix:].flatten(1)
        steps = torch.arange(num_patches, device=rates.device, dtype=rates.dtype)
        by_distance = torch.stack([
            grad.new_zeros(len(grad), num_patches).index_add_(1, _distances(component).flatten(), grad)
            for component in positions], dim=1)
        grad_weights = by_distance * _powers(rates, num_patches)  # [H, C, N], before the sum over distances
        grad_rates = -(weights * (grad_weights * steps).sum(-1))
        return grad_rates, grad_weights.sum(-1), None, None


def _powers(rates: torch.Tensor, num_patches: int) -> torch.Tensor:
    """gamma ** d for every distance that can occur on the grid: ``[H, C, N]``."""
    steps = torch.arange(num_patches, device=rates.device, dtype=rates.dtype)
    return torch.exp(-rates[..., None] * steps)


def _plain_mask(rates: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, num_prefix: int) -> torch.Tensor:
    """The same mask in differentiable operations, for tracers and exporters, which cannot hold a custom backward."""
    num_patches = positions.shape[1]
    mask = torch.zeros(rates.shape[0], num_patches, num_patches, dtype=rates.dtype, device=rates.device)
    for c in range(positions.shape[0]):
        distance = _distances(positions[c]).to(rates.dtype)
        mask = mask + weights[:, c, None, None] * torch.exp(-rates[:, c, None, None] * distance)
    return F.pad(mask, [num_prefix, 0, num_prefix, 0], value=1.)


@torch.fx.wrap
@register_notrace_function
def decay_mask(
        rates: torch.Tensor,
        weights: torch.Tensor,
        positions: torch.Tensor,
        num_prefix: int = 0,
) -> torch.Tensor:
    """Mask of one attention layer.

    Args:
        rates: Decay rates ``-log(gamma)``, float32 or float64 ``[H, C]``.
        weights: Weight of every component, ``[H, C]``, of the same dtype.
        positions: Integer coordinates ``[C, N, D]`` from `geometry.positions`.
        num_prefix: Number P of prefix tokens, which come first; their rows and columns are 1.

    Returns:
        ``[H, P + N, P + N]`` of the dtype of `rates`.
    """
    if torch.jit.is_scripting():
        return _plain_mask(rates, weights, positions, num_prefix)
    else:
        return _unscripted_mask(rates, weights, positions, num_prefix)


@torch.jit.unused
def _unscripted_mask(
        rates: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, num_prefix: int) -> torch.Tensor:
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        return _plain_mask(rates, weights, positions, num_prefix)
    return _DecayMask.apply(rates, weights, positions, num_prefix)
