"""Masked attention in plain operations, for every strategy: the oracle of all other backends."""

from typing import Optional

import torch
from timm.layers import maybe_add_mask, resolve_self_attn_mask

from ..strategies import combine

__all__ = ['eager_attention']


def eager_attention(
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
) -> torch.Tensor:
    """Attention whose scores, or probabilities, meet a mask.

    Scores are float32 (float64 for float64 inputs) from the product with the mask to the end of the softmax, under any
    dtype of the model or autocast.

    Args:
        q: Queries ``[B, H, L, D]``. Keys `k` and values `v` likewise.
        mask: ``[H, L, L]``, alpha included where the strategy puts it there.
        scale: Scale of the scores, ``D ** -0.5``.
        operation: What `strategies.combine` does with scores and mask.
        after_softmax: Whether it is done to the probabilities.
        attn_mask: timm's attention mask, boolean (False cuts) or additive, broadcastable to ``[B, H, L, L]``; it
            acts on the masked logits.
        is_causal: Cut every key after its query; takes the place of `attn_mask`, as in timm.
        dropout_p: Dropout probability of the attention weights.

    Returns:
        ``[B, H, L, D]`` of the dtype of `v`.
    """
    scores = (q * scale) @ k.transpose(-2, -1)
    if scores.dtype != torch.float64:
        scores = scores.float()
    if not after_softmax:
        scores = combine(operation, scores, mask)
    bias = resolve_self_attn_mask(q.shape[2], scores, attn_mask, is_causal)
    weights = maybe_add_mask(scores, bias).softmax(dim=-1)
    if after_softmax:
        if bias is not None:
            mask = mask * (bias > float('-inf'))  # a key that was cut stays cut
        weights = combine(operation, weights, mask)
    weights = torch.dropout(weights, dropout_p, dropout_p > 0.0)
    return weights.to(v.dtype) @ v
