"""Masked attention in slices whose logits stay in the processor's caches, for CPU.

Logits of a few images, or a few rows of one image, are computed, masked, normalised and multiplied with the values in
one buffer that the next slice reuses. Training keeps inputs, mask and output only, and computes the logits again in the
backward, as fused attention does: memory does not grow with the square of the sequence for every image and layer.
"""

from typing import Iterator, Tuple

import torch

__all__ = ['OPERATIONS', 'sliced_attention']

OPERATIONS = ('mul', 'mul_one_plus', 'add')
SLICE_BYTES = 4 * 2**20  # of logits in flight: about what second-level caches hold


def sliced_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    operation: str,
) -> torch.Tensor:
    """Attention with a mask on its logits; the arguments are those of `eager.eager_attention`.

    Returns:
        ``[B, H, L, D]``, in memory ``[B, L, H, D]``, so that heads merge without a copy.
    """
    if operation == 'mul_one_plus':
        mask, operation = mask + 1.0, 'mul'
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, mask)):
        return _SlicedAttention.apply(q, k, v, mask, scale, operation == 'add')
    return _forward(q, k, v, mask, scale, operation == 'add')


def _slices(q: torch.Tensor, itemsize: int) -> Iterator[Tuple[slice, slice]]:
    """Images and rows of each slice."""
    B, H, L, _ = q.shape
    images = max(1, SLICE_BYTES // (H * L * L * itemsize))
    rows = L if H * L * L * itemsize <= SLICE_BYTES else max(1, SLICE_BYTES // (H * L * itemsize))
    rows = -(-L // -(-L // rows))  # as even as can be
    for i in range(0, B, images):
        for r in range(0, L, rows):
            yield slice(i, min(i + images, B)), slice(r, min(r + rows, L))


def _buffer(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Flat room for the logits of the largest slice."""
    images, rows = next(_slices(q, mask.itemsize))
    return mask.new_empty((images.stop - images.start) * q.shape[1] * (rows.stop - rows.start) * q.shape[2])


def _fold(x: torch.Tensor) -> torch.Tensor:
    """``[b, H, R, D]`` -> ``[b * H, R, D]``, without a copy for one image."""
    return x[0] if len(x) == 1 else x.flatten(0, 1)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, buffer: torch.Tensor) -> torch.Tensor:
    """Scaled scores ``[G, R, L]`` of ``q [G, R, D]`` and ``k [G, L, D]``, in the buffer and its dtype."""
    shape = (len(q), q.shape[1], k.shape[1])
    out = buffer[: shape[0] * shape[1] * shape[2]].view(shape)
    if q.dtype == out.dtype:
        return torch.baddbmm(out, q, k.transpose(1, 2), beta=0, alpha=scale, out=out)
    return out.copy_(torch.bmm(q * scale, k.transpose(1, 2)))


def _meet(scores: torch.Tensor, mask: torch.Tensor, add: bool, out: torch.Tensor) -> torch.Tensor:
    """Mask scores ``[b * H, R, L]`` with a mask ``[H, R, L]`` into `out`, which may be the scores themselves."""
    operation = torch.add if add else torch.mul
    operation(_by_image(scores, mask), mask, out=_by_image(out, mask))
    return out


def _by_image(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.view(-1, *mask.shape)


def _forward(q, k, v, mask, scale, add):
    B, H, L, D = q.shape
    out = v.new_empty(B, L, H, D).transpose(1, 2)
    with torch.autocast(q.device.type, enabled=False):
        buffer = _buffer(q, mask)
        for images, rows in _slices(q, mask.itemsize):
            logits = _scores(_fold(q[images, :, rows]), _fold(k[images]), scale, buffer)
            _meet(logits, mask[:, rows], add, out=logits)
            torch.softmax(logits, -1, out=logits)
            attended = torch.bmm(logits.to(v.dtype), _fold(v[images]))
            out[images, :, rows] = attended.view(-1, H, *attended.shape[1:])
    return out


class _SlicedAttention(torch.autograd.Function):
    """`_forward` with a backward that recomputes the logits, slice by slice."""

    @staticmethod
    def forward(ctx, q, k, v, mask, scale, add):
        out = _forward(q, k, v, mask, scale, add)
        ctx.save_for_backward(q, k, v, mask, out)
        ctx.scale, ctx.add = scale, add
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, mask, out = ctx.saved_tensors
        grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
        grad_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        delta = (grad * out).sum(-1, keepdim=True, dtype=mask.dtype)
        with torch.autocast(q.device.type, enabled=False):
            room = [_buffer(q, mask) for _ in range(3)]
            for images, rows in _slices(q, mask.itemsize):
                part = [_fold(t) for t in (q[images, :, rows], k[images], v[images])]
                into = [_fold_view(t) for t in (grads[0][images, :, rows], grads[1][images], grads[2][images])]
                outer = [_fold(t) for t in (grad[images, :, rows], delta[images, :, rows])]
                whole = None if grad_mask is None else grad_mask[:, rows]
                _slice_backward(part, mask[:, rows], *outer, into, whole, room, ctx.scale, ctx.add)
        return *grads, grad_mask, None, None


def _fold_view(x: torch.Tensor) -> torch.Tensor:
    """`_fold` that never copies: rows are sliced within one image only."""
    return x[0] if len(x) == 1 else x.view(-1, *x.shape[2:])


def _slice_backward(qkv, mask, grad, delta, into, grad_mask, room, scale, add):
    """Gradients of one slice, added to `into` (those of q, k, v) and `grad_mask`.

    Args:
        qkv: ``q [G, R, D]``, ``k`` and ``v [G, L, D]``, with G = images * heads.
        mask: ``[H, R, L]``.
        grad: Of the output, ``[G, R, D]``.
        delta: ``rowsum(grad * output)``, ``[G, R, 1]``.
    """
    q, k, v = qkv
    scores = _scores(q, k, scale, room[0])
    weights = room[1][: scores.numel()].view_as(scores)
    torch.softmax(_meet(scores, mask, add, out=weights), -1, out=weights)
    into[2].baddbmm_(weights.to(v.dtype).transpose(1, 2), grad)
    # through the softmax: dS = P * (dP - rowsum(dO * O))
    grads = _scores(grad, v, 1.0, room[2]).sub_(delta).mul_(weights)
    if grad_mask is not None:
        for image, score in zip(_by_image(grads, mask), _by_image(scores, mask)):
            if add:
                grad_mask.add_(image)
            else:
                grad_mask.addcmul_(image, score)
    if not add:
        _meet(grads, mask, add, out=grads)
    grads = grads.to(q.dtype)
    into[0].baddbmm_(grads, k, alpha=scale)
    into[1].baddbmm_(grads.transpose(1, 2), q, alpha=scale)
