"""How masked attention is computed. All backends have one signature; `masked_attention` is the place that chooses.

A mask on the logits, under timm's switch and with neither `attn_mask` nor dropout:

- CPU: `sliced`; inference inside torch.compile `flex`, training inside torch.compile `eager`, which compiles.
- CUDA: `flex` from `flex.CUDA_MIN_TOKENS` tokens, and for any number inside torch.compile, if Triton is there.

Everything else, and whatever is traced or exported, is `eager`.
"""

from typing import Optional

import torch

from .eager import eager_attention
from .flex import fits_flex, flex_attention
from .sliced import OPERATIONS, sliced_attention

__all__ = ['masked_attention']

# torch 2.6 cannot tell an export from torch.compile: every graph counts as one
_is_exporting = getattr(torch.compiler, 'is_exporting', torch.compiler.is_compiling)


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    operation: str,
    after_softmax: bool,
    attn_mask: Optional[torch.Tensor] = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    fused: bool = True,
) -> torch.Tensor:
    """Attention whose scores meet a mask, by the backend that fits; the arguments are those of `eager_attention`.

    Args:
        fused: timm's switch (``TIMM_FUSED_ATTN``, ``set_fused_attn``); False computes in plain operations.
    """
    if torch.jit.is_scripting():
        return eager_attention(q, k, v, mask, scale, operation, after_softmax, attn_mask, is_causal, dropout_p)
    else:
        return _choose(q, k, v, mask, scale, operation, after_softmax, attn_mask, is_causal, dropout_p, fused)


@torch.jit.unused
def _choose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    operation: str,
    after_softmax: bool,
    attn_mask: Optional[torch.Tensor],
    is_causal: bool,
    dropout_p: float,
    fused: bool,
) -> torch.Tensor:
    # exporters and tracers see through plain operations alone
    exporting = _is_exporting()
    compiling = torch.compiler.is_compiling() and not exporting
    graph = torch.jit.is_tracing() or exporting
    logits_only = not after_softmax and operation in OPERATIONS
    if fused and not graph and logits_only and attn_mask is None and not is_causal and not dropout_p:
        if fits_flex(q, k, v, mask, compiling):
            return flex_attention(q, k, v, mask, scale, operation)
        if q.device.type == 'cpu' and not compiling:
            return sliced_attention(q, k, v, mask, scale, operation)
    return eager_attention(q, k, v, mask, scale, operation, after_softmax, attn_mask, is_causal, dropout_p)
