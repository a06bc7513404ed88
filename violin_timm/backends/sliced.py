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


def _meet(scores: torch.Tensor, mask: torch.Tensor, add: bool) -> torch.Tensor:
    """Mask the scores ``[b * H, R, L]`` in place."""
    by_image = scores.view(-1, *mask.shape)
    by_image.add_(mask) if add else by_image.mul_(mask)
    return scores


def _forward(q, k, v, mask, scale, add):
    B, H, L, D = q.shape
    out = v.new_empty(B, L, H, D).transpose(1, 2)
    with torch.autocast(q.device.type, enabled=False):
        buffer = _buffer(q, mask)
        for images, rows in _slices(q, mask.itemsize):
            logits = _meet(_scores(_fold(q[images, :, rows]), _fold(k[images]), scale, buffer), mask[:, rows], add)
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
        scale, add = ctx.scale, ctx.add
        H = q.shape[1]
        grad_q, grad_k, grad_v = (torch.zeros_like(t) for t in (q, k, v))
        grad_mask = torch.zeros_like(mask) if ctx.needs_input_grad[3] else None
        delta = (grad * out).sum(-1, keepdim=True, dtype=mask.dtype)
        with torch.autocast(q.device.type, enabled=False):
            scores_room, weights_room, grads_room = (_buffer(q, mask) for _ in range(3))
            for images, rows in _slices(q, mask.itemsize):
                q_, k_, v_, grad_ = (
                    _fold(t) for t in (q[images, :, rows], k[images], v[images], grad[images, :, rows])
                )
                scores = _scores(q_, k_, scale, scores_room)
                weights = weights_room[: scores.numel()].view_as(scores)
                weights = _meet(weights.copy_(scores), mask[:, rows], add)
                torch.softmax(weights, -1, out=weights)
                grad_v[images] += torch.bmm(weights.to(v.dtype).transpose(1, 2), grad_).view(-1, H, *v.shape[2:])
                # through the softmax: dS = P * (dP - rowsum(dO * O))
                grads = _scores(grad_, v_, 1.0, grads_room)
                grads.sub_(_fold(delta[images, :, rows])).mul_(weights)
                by_image = grads.view(-1, *mask[:, rows].shape)
                if grad_mask is not None:
                    for image, score in zip(by_image, scores.view_as(by_image)):
                        if add:
                            grad_mask[:, rows].add_(image)
                        else:
                            grad_mask[:, rows].addcmul_(image, score)
                if not add:
                    by_image.mul_(mask[:, rows])
                grads = grads.mul_(scale).to(q.dtype)
                grad_q[images, :, rows] = torch.bmm(grads, k_).view(-1, H, *q_.shape[1:])
                grad_k[images] += torch.bmm(grads.transpose(1, 2), q_).view(-1, H, *k.shape[2:])
        return grad_q, grad_k, grad_v, grad_mask, None, None
