"""Attention in slices against plain operations: outputs, every gradient, dtypes, and what is kept for the backward."""

import pytest
import torch

from violin_timm.backends import eager_attention, masked_attention, sliced

NAMES = ('q', 'k', 'v', 'mask')


def inputs(batch=3, heads=2, length=21, width=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(batch, length, heads, width, generator=generator).transpose(1, 2).to(dtype) for _ in range(3)]
    mask = torch.rand(heads, length, length, generator=generator, dtype=torch.promote_types(dtype, torch.float32))
    return [t.requires_grad_() for t in (*qkv, mask)]


def outcome(function, tensors, operation, seed=1):
    """Output, and gradients of all inputs for one gradient of the output."""
    out = function(*tensors, 0.3, operation)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, tensors, grad)


def oracle(q, k, v, mask, scale, operation):
    return eager_attention(q, k, v, mask, scale, operation, after_softmax=False)


# of logits in flight: everything at once, two images, one image, seven rows, one row
@pytest.mark.parametrize('slice_bytes', [2**22, 2 * 4 * 2 * 21**2, 4 * 2 * 21**2, 7 * 4 * 2 * 21, 1])
@pytest.mark.parametrize('operation', sliced.OPERATIONS)
def test_equals_the_oracle(operation, slice_bytes, monkeypatch):
    monkeypatch.setattr(sliced, 'SLICE_BYTES', slice_bytes)
    tensors = inputs()
    got, wanted = (outcome(f, tensors, operation) for f in (sliced.sliced_attention, oracle))
    for name, a, b in zip(('output', *NAMES), got, wanted, strict=True):
        assert b.abs().max() > 1e-3, name
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f'{name}: {text}')
    with torch.inference_mode():
        torch.testing.assert_close(sliced.sliced_attention(*tensors, 0.3, operation), wanted[0])


def test_slices_cover_every_row_once(monkeypatch):
    q = torch.empty(5, 2, 21, 8)
    for slice_bytes in (1, 500, 5000, 20000, 2**22):
        monkeypatch.setattr(sliced, 'SLICE_BYTES', slice_bytes)
        seen = torch.zeros(5, 21, dtype=torch.int64)
        for images, rows in sliced._slices(q, 4):
            seen[images, rows] += 1
            assert 4 * 2 * 21 * seen[images, rows].numel() <= max(slice_bytes, 4 * 2 * 21)
        assert torch.equal(seen, torch.ones_like(seen))


def test_gradcheck():
    tensors = inputs(batch=2, length=4, width=3, dtype=torch.float64)
    for operation in sliced.OPERATIONS:
        assert torch.autograd.gradcheck(lambda *t, op=operation: sliced.sliced_attention(*t, 0.5, op), tensors)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision_keeps_mask_and_softmax_in_float32(dtype):
    tensors = inputs(dtype=dtype)
    out, *grads = outcome(sliced.sliced_attention, tensors, 'mul')
    wanted, *wanted_grads = outcome(oracle, [t.detach().float().requires_grad_() for t in tensors], 'mul')
    assert out.dtype == dtype and [g.dtype for g in grads] == [dtype] * 3 + [torch.float32]
    torch.testing.assert_close(out.float(), wanted, rtol=0.02, atol=0.02)
    for name, grad, wanted_grad in zip(NAMES, grads, wanted_grads, strict=True):
        error = (grad.float() - wanted_grad).norm() / wanted_grad.norm()
        assert error < 0.03, name


def test_nothing_of_images_times_tokens_squared_is_kept():
    tensors = inputs()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        masked_attention(*tensors, 0.3, 'mul', False)
    assert kept and max(shape.numel() for shape in kept) < 3 * 2 * 21 * 21


def test_the_switch_of_timm_is_followed(monkeypatch):
    def refuse(*args):
        raise AssertionError('sliced')

    monkeypatch.setattr('violin_timm.backends.sliced_attention', refuse)
    tensors = inputs()
    masked_attention(*tensors, 0.3, 'mul', False, fused=False)
    masked_attention(*tensors, 0.3, 'mul', True)  # after the softmax
    masked_attention(*tensors, 0.3, 'mul', False, dropout_p=0.5)
    with pytest.raises(AssertionError, match='sliced'):
        masked_attention(*tensors, 0.3, 'mul', False)
