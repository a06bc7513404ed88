"""Masked attention by torch's `flex_attention`: one kernel that never stores the scores.

Its kernels exist in compiled code only: on CUDA for inference and training, on CPU (x86 with AVX2) for inference,
where its backward raises. Gradients of a captured mask came with torch 2.6, the oldest torch that this package takes;
they are summed over images by atomic additions, so in no fixed order.

Tested here, on CPU with torch 2.14: compiled inference against `eager_attention`, and the choice. What runs on CUDA is
tested by ``make gpu-check`` (`tests/gpu`), and was not run where this was written.
"""

import functools
import importlib.util
import sys
from typing import Callable

import torch

__all__ = ['fits_flex', 'flex_attention']

# On CUDA outside of torch.compile, calling a compiled kernel costs more than short sequences save. An assumption; the
# cases flex_* of `violin benchmark --device cuda` are there to check it.
CUDA_MIN_TOKENS = 512
MIN_HEAD_DIM = 16  # of the CUDA kernel
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HAS_TRITON = importlib.util.find_spec('triton') is not None
HAS_CPU_KERNEL = sys.platform == 'linux' and torch.backends.cpu.get_cpu_capability() in ('AVX2', 'AVX512')


def flex_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    operation: str,
) -> torch.Tensor:
    """Attention with a mask on its logits; the arguments are those of `eager.eager_attention`.

    Compiles itself on first use where it is not part of a graph that is being compiled.

    Returns:
        ``[B, H, L, D]``.
    """
    from torch.nn.attention.flex_attention import flex_attention as attend  # loads half of torch's compiler

    score_mod = _SCORE_MODS[operation](mask)
    if not torch.compiler.is_compiling():
        attend = _compiled()
    return attend(q, k, v, score_mod=score_mod, scale=scale)


# each reads the mask once: flex_attention cannot sum the gradients of two reads
def _multiplied(mask: torch.Tensor) -> Callable:
    def score_mod(score, b, h, i, j):
        return score * mask[h, i, j]

    return score_mod


def _multiplied_one_plus(mask: torch.Tensor) -> Callable:
    def score_mod(score, b, h, i, j):
        return score * (mask[h, i, j] + 1.0)

    return score_mod


def _added(mask: torch.Tensor) -> Callable:
    def score_mod(score, b, h, i, j):
        return score + mask[h, i, j]

    return score_mod


_SCORE_MODS = {'mul': _multiplied, 'mul_one_plus': _multiplied_one_plus, 'add': _added}


@functools.cache
def _compiled() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention as attend

    return torch.compile(attend)


def fits_flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, compiling: bool) -> bool:
    """Whether `flex_attention` can compute this, and is the faster way.

    Args:
        q: Queries ``[B, H, L, D]``. Keys `k` and values `v` likewise.
        mask: ``[H, L, L]``.
        compiling: Whether torch.compile is recording a graph (and not an export, which knows no kernels).
    """
    if q.dtype not in DTYPES or q.shape[3] < MIN_HEAD_DIM or not q.dtype == k.dtype == v.dtype:
        return False
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or mask.requires_grad)
    if q.device.type == 'cuda':
        repeatable = not (trains and torch.are_deterministic_algorithms_enabled())
        return HAS_TRITON and repeatable and (compiling or q.shape[2] >= CUDA_MIN_TOKENS)
    return q.device.type == 'cpu' and HAS_CPU_KERNEL and compiling and not trains
