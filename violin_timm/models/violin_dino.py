"""DINO backbones with decay masks: class token, no classifier."""

from timm.models import generate_default_cfgs, register_model

from .load import build_violin, plain_cfg
from .vit import ViolinVisionTransformer

__all__ = []

default_cfgs = generate_default_cfgs(
    {
        'violin_dino_small.dino': plain_cfg('vit_small_patch16_224.dino'),
        'violin_dino_small_patch8.dino': plain_cfg('vit_small_patch8_224.dino'),
        'violin_dino_base.dino': plain_cfg('vit_base_patch16_224.dino'),
        'violin_dino_base_patch8.dino': plain_cfg('vit_base_patch8_224.dino'),
    }
)


def _create(variant: str, pretrained: bool, kwargs: dict, **model_args) -> ViolinVisionTransformer:
    return build_violin(variant, pretrained, **dict(depth=12, **model_args) | kwargs)


@register_model
def violin_dino_small(pretrained: bool = False, **kwargs) -> ViolinVisionTransformer:
    """Violin DINO ViT-S/16: 14x14 patches, 6 heads."""
    return _create('violin_dino_small', pretrained, kwargs, patch_size=16, embed_dim=384, num_heads=6)


@register_model
def violin_dino_small_patch8(pretrained: bool = False, **kwargs) -> ViolinVisionTransformer:
    """Violin DINO ViT-S/8: 28x28 patches, 6 heads."""
    return _create('violin_dino_small_patch8', pretrained, kwargs, patch_size=8, embed_dim=384, num_heads=6)


@register_model
def violin_dino_base(pretrained: bool = False, **kwargs) -> ViolinVisionTransformer:
    """Violin DINO ViT-B/16: 14x14 patches, 12 heads."""
    return _create('violin_dino_base', pretrained, kwargs, patch_size=16, embed_dim=768, num_heads=12)


@register_model
def violin_dino_base_patch8(pretrained: bool = False, **kwargs) -> ViolinVisionTransformer:
    """Violin DINO ViT-B/8: 28x28 patches, 12 heads."""
    return _create('violin_dino_base_patch8', pretrained, kwargs, patch_size=8, embed_dim=768, num_heads=12)
