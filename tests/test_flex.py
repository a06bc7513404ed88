"""flex_attention: where it is chosen, and that compiled inference on CPU agrees with the oracle."""

import shutil
import subprocess
import sys

import pytest
import torch

from violin_timm import backends
from violin_timm.backends import eager_attention, flex
from violin_timm.backends.sliced import OPERATIONS

compiles = pytest.mark.skipif(
    not flex.HAS_CPU_KERNEL or shutil.which('g++') is None, reason='compiling for CPU takes x86 with AVX2, and g++'
)


def inputs(length=20, dim=16, dtype=torch.float32, mask_dtype=torch.float32):
    q, k, v = (torch.randn(2, 3, length, dim).to(dtype) for _ in range(3))
    return q, k, v, torch.rand(3, length, length, dtype=mask_dtype)


def attend(q, k, v, mask, operation='mul', **options):
    return backends.masked_attention(q, k, v, mask, 0.25, operation, False, **options)


@compiles
@pytest.mark.parametrize('operation', OPERATIONS)
def test_compiled_inference_equals_the_oracle(operation, close, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError('eager attention was compiled')

    tensors = inputs()
    expected = eager_attention(*tensors, 0.25, operation, False)
    monkeypatch.setattr(backends, 'eager_attention', refuse)
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: attend(*t, operation), fullgraph=True)
    with torch.inference_mode():
        close(compiled(*tensors), expected, 1e-5)
    assert (expected - eager_attention(*tensors[:3], torch.ones(3, 20, 20), 0.25, 'mul', False)).abs().max() > 1e-2


def test_compiled_training_on_cpu_is_eager(close):
    """flex_attention has no backward there; a backend that only records shows which way was taken."""
    tensors = [t.requires_grad_() for t in inputs()]
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: attend(*t), fullgraph=True, backend='aot_eager')
    expected = torch.autograd.grad(eager_attention(*tensors, 0.25, 'mul', False).square().sum(), tensors)
    for actual, wanted in zip(torch.autograd.grad(compiled(*tensors).square().sum(), tensors), expected):
        assert wanted.abs().max() > 0
        close(actual, wanted, 1e-5)


def test_never_on_cpu_outside_of_a_compiler(monkeypatch):
    monkeypatch.setattr(backends, 'flex_attention', None)  # to call it would be an error
    assert attend(*inputs()).shape == (2, 3, 20, 16)


@pytest.mark.parametrize(
    'options', [{'fused': False}, {'is_causal': True}, {'dropout_p': 0.5}, {'attn_mask': torch.zeros(20, 20)}]
)
def test_not_where_it_cannot(options, monkeypatch):
    monkeypatch.setattr(backends, 'flex_attention', None)
    monkeypatch.setattr(backends, 'fits_flex', lambda *args: True)
    assert attend(*inputs(), **options).shape == (2, 3, 20, 16)


class Pretended:
    """A tensor as far as `fits_flex` looks, on any device."""

    def __init__(self, device='cuda', length=1024, dim=64, dtype=torch.bfloat16, requires_grad=False):
        self.device, self.shape = torch.device(device), (2, 6, length, dim)
        self.dtype, self.requires_grad = dtype, requires_grad


@pytest.mark.parametrize(
    'given, compiling, expected',
    [
        ({}, False, True),
        ({'length': flex.CUDA_MIN_TOKENS - 1}, False, False),
        ({'length': 196}, True, True),
        ({'requires_grad': True}, False, True),
        ({'dtype': torch.float64}, True, False),
        ({'dim': 8}, True, False),
        ({'device': 'cpu'}, False, False),
        ({'device': 'cpu'}, True, True),
        ({'device': 'cpu', 'requires_grad': True}, True, False),
        ({'device': 'mps'}, True, False),
    ],
)
def test_choice(given, compiling, expected, monkeypatch):
    monkeypatch.setattr(flex, 'HAS_TRITON', True)
    monkeypatch.setattr(flex, 'HAS_CPU_KERNEL', True)
    assert flex.fits_flex(*(Pretended(**given) for _ in range(4)), compiling) is expected


def test_choice_without_triton_or_with_deterministic_training(monkeypatch):
    monkeypatch.setattr(flex, 'HAS_TRITON', False)
    assert not flex.fits_flex(*(Pretended() for _ in range(4)), True)
    monkeypatch.setattr(flex, 'HAS_TRITON', True)
    monkeypatch.setattr(torch, 'are_deterministic_algorithms_enabled', lambda: True)
    assert flex.fits_flex(*(Pretended() for _ in range(4)), True)
    assert not flex.fits_flex(*(Pretended(requires_grad=True) for _ in range(4)), True)


def test_import_is_cheap():
    """Neither torch's compiler nor flex_attention is loaded with the package."""
    code = (
        'import torch, timm, sys; before = set(sys.modules); import violin_timm; '
        'print([m for m in set(sys.modules) - before if m.startswith(("torch._inductor", "torch._dynamo", '
        '"triton", "torch.nn.attention.flex"))])'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.stdout.strip() == '[]', done.stderr
