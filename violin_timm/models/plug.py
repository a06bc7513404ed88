"""Turn an existing timm Vision Transformer into a Violin, in place.

    model = timm.create_model('vit_small_patch14_dinov2.lvd142m', pretrained=True, num_classes=10)
    violin_timm.add_violin(model)

Only classes change and decay parameters are added; weights, hooks and devices stay. To save and rebuild such a model,
keep its state dict, and build it again by the same two calls (without ``pretrained``) before ``load_state_dict``:
`model.violin_settings` holds the arguments of the second.
"""

from dataclasses import asdict

from timm.layers import Attention
from timm.models import VisionTransformer
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, ResPostBlock
from torch import nn

from ..attention import ViolinAttention
from ..settings import MaskSettings
from .vit import ViolinBlock, ViolinMixin, ViolinResPostBlock, ViolinVisionTransformer

__all__ = ['ViolinVisionTransformerDistilled', 'add_violin']


class ViolinVisionTransformerDistilled(ViolinMixin, VisionTransformerDistilled):
    """timm's distilled DeiT with decay masks; made by `add_violin`."""


_MODELS = {VisionTransformer: ViolinVisionTransformer, VisionTransformerDistilled: ViolinVisionTransformerDistilled}
_BLOCKS = {Block: ViolinBlock, ResPostBlock: ViolinResPostBlock}


def add_violin(model: nn.Module, **settings) -> nn.Module:
    """Add fresh decay masks to a timm Vision Transformer, in place.

    Args:
        model: A `VisionTransformer` or `VisionTransformerDistilled` of timm's with plain attention over all patches:
            DeiT, DeiT-III, DINO, DINOv2 (registers too), CLIP and SigLIP image towers, AugReg, MAE, ...
        settings: Fields of `violin_timm.settings.MaskSettings`. `mask_init` defaults to ``finetune`` here: with
            ``alpha_std=0`` the outputs stay, to within 1e-3, those of the plain model.

    Returns:
        The same object, whose class is now a Violin's.

    Raises:
        TypeError: If the model is of another kind; it is left as it was.
        ValueError: On settings that are unknown or without effect.
    """
    names = MaskSettings.__dataclass_fields__
    for name in settings:
        if name not in names:
            raise ValueError(
                f'{name}: got {settings[name]!r}, but add_violin has no such setting; choose from {", ".join(names)}'
            )
    checked = MaskSettings(**{'mask_init': 'finetune', **settings})
    _check(model)
    if checked.mask != 'none':
        ViolinMixin.check_patch_drop(model)
    model.__class__ = _MODELS[type(model)]
    for block in model.blocks:
        block.__class__ = _BLOCKS[type(block)]
        block.attn.__class__ = ViolinAttention
    model.add_masks(checked)
    model.violin_settings = {k: v for k, v in asdict(checked).items() if v != getattr(MaskSettings, k)}
    return model


def _check(model: nn.Module) -> None:
    if isinstance(model, ViolinMixin):
        raise TypeError(f'model: got {type(model).__name__}, which is a Violin already')
    if type(model) not in _MODELS:
        raise TypeError(
            f'model: got {type(model).__module__}.{type(model).__name__}; {_reason(model)} Allowed are '
            f'{" and ".join(m.__name__ for m in _MODELS)} of timm.models'
        )
    for i, block in enumerate(model.blocks):
        if type(block) not in _BLOCKS:
            raise TypeError(
                f"blocks.{i}: got {type(block).__name__}, whose attention is not a layer of its own or not timm's; "
                f'allowed are {" and ".join(b.__name__ for b in _BLOCKS)}'
            )
        if type(block.attn) is not Attention:
            raise TypeError(f'blocks.{i}.attn: got {type(block.attn).__name__}; the mask is defined for Attention')


def _reason(model: nn.Module) -> str:
    if any(hasattr(model, name) for name in ('_orig_mod', 'module', 'model')):
        return 'add masks to the bare model, before it is compiled, wrapped or distributed.'
    if 'NaFlex' in type(model).__name__:
        return 'its batches mix grids of different shapes.'
    if hasattr(model, 'rope') or hasattr(model, 'rel_pos_bias') or hasattr(model, 'shared_rel_pos'):
        return 'its attention has a positional term of its own (rotary or relative), which its forward adds.'
    if hasattr(model, 'blocks'):
        return 'its forward is not that of the Vision Transformer.'
    return 'it has no global attention over one grid of patches.'
