"""Weights in: timm's, the authors' and our own checkpoints into a Violin, through timm's own loading.

timm switches strict loading off whenever the head is new, so that a file of something else would load without a word.
The filter here therefore checks keys itself: only mask parameters may be missing, and they are freshly drawn.
"""

import logging
import math
from typing import Any, Dict, List, Mapping, Sequence, Set

import torch
from timm.models import build_model_with_cfg, get_pretrained_cfg
from timm.models.vision_transformer import checkpoint_filter_fn as timm_filter_fn

from . import authors
from .vit import ViolinVisionTransformer, pooling, resample_pos_embed_dino

__all__ = [
    'DECAY',
    'build_violin',
    'check_keys',
    'checkpoint_filter_fn',
    'finetune_masks',
    'listed',
    'plain_cfg',
    'translate',
    'unwrap',
]

_logger = logging.getLogger(__name__)

DECAY = '.attn.decay.'  # what the key of a mask parameter contains


def plain_cfg(name: str = '', **overrides) -> Dict[str, Any]:
    """Pretrained cfg that points to the weights of a plain timm model.

    Args:
        name: ``arch.tag`` of timm's model, or nothing for a model without weights.
        overrides: Entries to change.
    """
    if not name:
        return dict(
            url='',
            first_conv='patch_embed.proj',
            classifier='head',
            fixed_input_size=True,
            interpolation='bicubic',
            license='apache-2.0',
            **overrides,
        )
    cfg = get_pretrained_cfg(name, allow_unregistered=False).to_dict()
    for key in ('architecture', 'tag', 'custom_load'):
        cfg.pop(key, None)
    # in full: timm would expand 'timm/' to our own name
    return dict(cfg, hf_hub_id=f'timm/{name}', **overrides)


def build_violin(
    variant: str,
    pretrained: bool = False,
    class_token_default: bool = True,
    **kwargs,
) -> ViolinVisionTransformer:
    """Build a registered variant through timm's builder.

    Args:
        variant: Registered name.
        pretrained: Load the weights of the pretrained cfg.
        class_token_default: Whether the variant has a class token where neither `class_token` nor `global_pool` says.
        kwargs: Arguments of the model class.
    """
    kwargs['class_token'], kwargs['global_pool'] = pooling(
        kwargs.get('class_token'), kwargs.get('global_pool'), class_token_default
    )
    return build_model_with_cfg(
        ViolinVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=kwargs.pop('out_indices', 3), feature_cls='getter'),
        **kwargs,
    )


def checkpoint_filter_fn(state_dict: Dict[str, Any], model: ViolinVisionTransformer) -> Dict[str, torch.Tensor]:
    """Translate a checkpoint into the state dict of a Violin, and see that it fits.

    Takes timm's layouts of DeiT, DeiT-III and DINO, bare or wrapped; the authors'; and our own. Resamples the patch and
    position embeddings, drops the class token for a GAP model, and draws the mask parameters that the file lacks.

    Raises:
        RuntimeError: If a key is missing or left over, with both sides named.
        ValueError: If the file is of the other kind of pooling, or its curves are not the model's.
    """
    state_dict = translate(state_dict, model, tuple(filter(None, model.curve_names.split(','))))
    state_dict = _match_head(state_dict, model)
    wanted = {k for k in model.state_dict() if not (k.startswith('head.') and _new_head(model))}
    check_keys(state_dict, wanted, type(model).__name__)
    return _fill_masks(state_dict, model)


def translate(checkpoint: Dict[str, Any], model, curves: Sequence[str]) -> Dict[str, torch.Tensor]:
    """A checkpoint in the keys of a Violin and, but for its classifier, in its shapes; not yet seen to fit.

    Args:
        checkpoint: Any layout that `checkpoint_filter_fn` or timm's own filter for Vision Transformers takes.
        model: A Violin, registered or made by `add_violin`.
        curves: Those of the columns of beta wanted; only the authors' layout has them in another order.

    Raises:
        ValueError: If the file is of the other kind of pooling, or is the authors' and has other curves.
    """
    state_dict = unwrap(checkpoint)
    if authors.is_authors(state_dict):
        state_dict = authors.to_native(state_dict, tuple(curves))
    state_dict = _match_class_token(state_dict, model)
    state_dict = _match_pos_embed(state_dict, model)
    return timm_filter_fn(state_dict, model, adapt_layer_scale=True)


def unwrap(checkpoint: Dict[str, Any]) -> Dict[str, torch.Tensor]:
    """The flat state dict inside a checkpoint: of the teacher's backbone for DINO, whose heads are left behind."""
    for key in ('state_dict_ema', 'state_dict', 'model', 'teacher', 'student'):
        if isinstance(checkpoint.get(key), dict):
            checkpoint = checkpoint[key]
            break
    flat = {}
    for key, value in checkpoint.items():
        for prefix in ('_orig_mod.', 'module.', '_orig_mod.'):
            key = key.removeprefix(prefix)
        flat[key] = value
    backbone = {k.removeprefix('backbone.'): v for k, v in flat.items() if k.startswith('backbone.')}
    flat = backbone or flat
    return {k: v for k, v in flat.items() if torch.is_tensor(v)}


def _match_class_token(state_dict: Dict[str, torch.Tensor], model) -> Dict[str, torch.Tensor]:
    """Drop the source's class token for a GAP model; refuse the opposite, which would invent one."""
    if not state_dict or 'patch_embed.proj.weight' not in state_dict:
        return state_dict
    has_token = 'cls_token' in state_dict
    if model.has_class_token and not has_token:
        raise ValueError(
            'class_token: got True, but the checkpoint has no class token (it was trained with GAP); '
            'pass class_token=False'
        )
    if has_token and not model.has_class_token:
        state_dict = {k: v for k, v in state_dict.items() if k != 'cls_token'}
        position = state_dict.get('pos_embed')
        # one more than the model's own, or an odd one out, is the class token's; DeiT-III has none
        if position is not None and not model.no_embed_class:
            own = model.patch_embed.num_patches + model.num_prefix_tokens
            if position.shape[1] == own + 1 or not _is_grid(position.shape[1]):
                state_dict['pos_embed'] = position[:, 1:]
        _logger.info('Dropped the class token of the checkpoint: the model pools its patches.')
    return state_dict


def _is_grid(num_tokens: int) -> bool:
    return math.isqrt(num_tokens) ** 2 == num_tokens


def _match_pos_embed(state_dict: Dict[str, torch.Tensor], model) -> Dict[str, torch.Tensor]:
    """Leave out position embeddings that the model has none of; resample as DINO does where that was asked for."""
    position = state_dict.get('pos_embed')
    if position is None:
        return state_dict
    if model.pos_embed is None:
        _logger.info("Dropped the position embedding of the checkpoint: the model has pos_embed='none'.")
        return {k: v for k, v in state_dict.items() if k != 'pos_embed'}
    num_prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    side = math.isqrt(position.shape[1] - num_prefix)
    if model.pos_embed_resample == 'dino' and side**2 == position.shape[1] - num_prefix:
        state_dict = dict(
            state_dict,
            pos_embed=resample_pos_embed_dino(position, model.patch_embed.grid_size, (side, side), num_prefix),
        )
    return state_dict


def _match_head(state_dict: Dict[str, torch.Tensor], model) -> Dict[str, torch.Tensor]:
    """Leave a classifier behind that the model has no place for; timm itself drops one for a new number of classes."""
    if _new_head(model):
        return {k: v for k, v in state_dict.items() if not k.startswith('head.')}
    weight, own = state_dict.get('head.weight'), getattr(model.head, 'weight', None)
    if weight is not None and own is not None and len(weight) != len(own):
        raise ValueError(
            f'num_classes: got {model.num_classes}, but the checkpoint has {len(weight)} classes; pass '
            f'num_classes={len(weight)}, or pretrained_cfg_overlay=dict(num_classes={len(weight)}) for a new head'
        )
    return state_dict


def _new_head(model) -> bool:
    return not model.num_classes or model.num_classes != model.pretrained_cfg.get('num_classes')


def check_keys(state_dict: Mapping[str, torch.Tensor], wanted: Set[str], name: str) -> None:
    """See that a state dict has the keys of a model, of which mask parameters alone may be missing, a kind at a time.

    Args:
        state_dict: In the model's layout.
        wanted: Keys of the model.
        name: What the error calls the model.

    Raises:
        RuntimeError: If a key is missing or left over, with both sides named.
    """
    missing = sorted(k for k in wanted - set(state_dict) if DECAY not in k)
    left_over = sorted(set(state_dict) - wanted)
    for kind in ('alpha', 'beta', 'curve_logits'):  # a kind is there in every layer, or in none
        keys = {k for k in wanted if k.endswith(f'{DECAY}{kind}')}
        if keys & set(state_dict):
            missing += sorted(keys - set(state_dict))
    if not missing and not left_over:
        return
    problem = f'checkpoint does not fit {name}: '
    if not wanted & set(state_dict):
        raise RuntimeError(f'{problem}none of its {len(state_dict)} keys is one of the {len(wanted)} of the model')
    parts = [f'{side}: {listed(keys)}' for side, keys in (('missing', missing), ('left over', left_over)) if keys]
    if any(DECAY in k for k in left_over):
        parts.append('it has masks that this model has no place for; see mask=, alpha= and curves=')
    raise RuntimeError(problem + '; '.join(parts))


def listed(keys: List[str]) -> str:
    """The first of some keys, for a message, and how many more there are."""
    return ', '.join(keys[:8]) + (f' and {len(keys) - 8} more' if len(keys) > 8 else '')


def _fill_masks(state_dict: Dict[str, torch.Tensor], model) -> Dict[str, torch.Tensor]:
    """Draw the mask parameters that the checkpoint lacks, from the fine-tuning initialisation unless told otherwise."""
    missing = [k for k in model.state_dict() if DECAY in k and k not in state_dict]
    if not missing:
        return state_dict
    finetune_masks(model)
    fresh = model.state_dict()
    # a plain checkpoint has no masks at all; one that has some was trained with other settings, which is worth a word
    level = logging.WARNING if any(DECAY in k for k in state_dict) else logging.INFO
    _logger.log(level, f'Initialised {len(missing)} mask parameters that the checkpoint lacks: {listed(missing)}')
    return dict(state_dict, **{k: fresh[k].clone() for k in missing})


def finetune_masks(model) -> None:
    """Draw the masks of a Violin from the fine-tuning initialisation, unless it was built with another."""
    for block in model.blocks:
        decay = block.attn.decay
        if decay is not None and decay.settings.mask_init is None:
            decay.set_mask_init('finetune')
