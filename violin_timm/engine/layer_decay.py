"""Parameter groups for fine-tuning: learning rates that fall towards the stem, and what takes weight decay.

The rule is that of the VTAB-1K protocol (BenediktAlkin/vtab1k-pytorch), which follows BEiT.
"""

from __future__ import annotations

import math
import re
from typing import Any, Iterable

from torch import nn

from .config import ConfigError

TOKENS = ('cls_token', 'pos_embed', 'reg_token', 'dist_token')
STEM = ('patch_embed', 'norm_pre')
HEADS = ('head', 'head_dist')
TOP = ('norm', 'fc_norm', 'attn_pool', *HEADS)

_OUTER = re.compile(r'^(?:module\.|_orig_mod\.|base_model\.model\.)+')
_INNER = re.compile(r'\.(?:_orig_mod|base_layer|modules_to_save\.[^.]+)(?=\.)')
_ADAPTER = re.compile(r'(\.lora_(?:A|B|magnitude_vector))\.[^.]+')
_BLOCK = re.compile(r'blocks\.(\d+)\.')


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    layer_decay: float | None,
    mask_lr_scale: float = 1.0,
) -> list[dict[str, Any]]:
    """Trainable parameters of a Vision Transformer, grouped for an optimizer of torch's or timm's.

    With L blocks and ``layer_decay`` r, the learning rate of

    - the stem (patch and position embedding, class, register and distillation tokens, ``norm_pre``) is scaled by
      r^(L + 1),
    - block i of 0 to L - 1, with all it holds (mask parameters, adapters), by r^(L - i), so the last block by r,
    - the final norm, ``fc_norm``, the attention pool and the heads by 1.

    timm's `param_groups_layer_decay` counts the final norm to the last block, shifts all scales by one layer where
    there is no head, and leaves position and tokens without weight decay; the protocol does none of that. Nor does it
    see through wrappers: under DDP, torch.compile or peft nothing matches its patterns, and every scale is 1.

    Args:
        model: Bare or wrapped (`plain_name`). Frozen parameters are left out, but frozen blocks count.
        weight_decay: Of all but biases, parameters of one dimension, and mask parameters.
        layer_decay: r, in (0, 1]; None is 1.
        mask_lr_scale: A further factor for mask parameters. With 0 they stay in a group, whose scale is 0, and so do
            not move.

    Returns:
        Groups of ``params``, ``param_names`` (as the model has them), ``weight_decay`` and ``lr_scale``. The scale is
        applied by timm's schedulers; without one it has no effect.

    Raises:
        ConfigError: A number out of range, a model without blocks, a trainable parameter that is none of the above.
    """
    _check(weight_decay, layer_decay, mask_lr_scale)
    rate = 1.0 if layer_decay is None else layer_decay
    depth = _depth(name for name, _ in model.named_parameters())
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = rate ** _distance(name, depth)
        decay = weight_decay
        if is_mask(name):
            scale, decay = scale * mask_lr_scale, 0.0
        elif parameter.ndim <= 1 or name.endswith('.bias'):
            decay = 0.0
        group = groups.setdefault(
            (scale, decay), {'params': [], 'param_names': [], 'weight_decay': decay, 'lr_scale': scale}
        )
        group['params'].append(parameter)
        group['param_names'].append(name)
    return list(groups.values())


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers added: DDP, torch.compile (around the model or a part), and peft.

    An adapter is named after its layer, ``blocks.0.attn.qkv.lora_A.weight``; a module that peft trains in full keeps
    its own name.
    """
    name = _OUTER.sub('', name)
    return _ADAPTER.sub(r'\1', _INNER.sub('', name))


def is_mask(name: str) -> bool:
    """Whether a parameter's name, wrapped or not, is one of `violin_timm.attention.Decay`."""
    return '.attn.decay.' in plain_name(name)


def is_head(name: str) -> bool:
    """Whether a parameter's name, wrapped or not, is one of a classifier."""
    return plain_name(name).split('.')[0] in HEADS


def _distance(name: str, depth: int) -> int:
    """How many layers below the heads a parameter lies."""
    plain = plain_name(name)
    if block := _BLOCK.match(plain):
        return depth - int(block[1])
    first = plain.split('.')[0]
    if plain in TOKENS or first in STEM:
        return depth + 1
    if first in TOP:
        return 0
    raise ConfigError(
        f'layer_decay: got parameter {name!r}, which has no layer; allowed are blocks.<i>, '
        f'{", ".join((*TOKENS, *STEM, *TOP))}, and frozen parameters'
    )


def _depth(names: Iterable[str]) -> int:
    blocks = [int(block[1]) for block in map(_BLOCK.match, map(plain_name, names)) if block]
    if not blocks:
        raise ConfigError('layer_decay: got a model without blocks.<i>; a Vision Transformer is needed')
    return 1 + max(blocks)


def _check(weight_decay: float, layer_decay: float | None, mask_lr_scale: float) -> None:
    # written so that nan, which no comparison holds for, is refused too
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise ConfigError(f'layer_decay: got {layer_decay!r}; expected a number above 0 and at most 1, or none')
    for name, value in (('weight_decay', weight_decay), ('mask_lr_scale', mask_lr_scale)):
        if not 0 <= value < math.inf:
            raise ConfigError(f'{name}: got {value!r}; expected a finite number, at least 0')
