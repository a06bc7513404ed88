"""DeiT with decay masks: the paper's supervised models.

The paper pretrains with global average pooling (GAP) and fine-tunes with the class token kept, so the variants are GAP
models unless they load weights: timm's plain DeiT weights come with a class token.
"""

from timm.models import generate_default_cfgs, register_model

from .load import build_violin, plain_cfg
from .vit import ViolinVisionTransformer

__all__ = []

default_cfgs = generate_default_cfgs(
    {
        'violin_deit_tiny.fb_in1k': plain_cfg('deit_tiny_patch16_224.fb_in1k'),
        'violin_deit_small.fb_in1k': plain_cfg('deit_small_patch16_224.fb_in1k'),
        'violin_deit_base.fb_in1k': plain_cfg('deit_base_patch16_224.fb_in1k'),
        'violin_deit_base.fb_in1k_384': plain_cfg('deit_base_patch16_384.fb_in1k'),
    }
)


def _create(variant: str, pretrained: bool, kwargs: dict, **model_args) -> ViolinVisionTransformer:
    return build_violin(
        variant, pretrained, class_token_default=pretrained, **dict(patch_size=16, depth=12, **model_args) | kwargs
    )


@register_model
def violin_deit_tiny(pretrained: bool = False, **kwargs) -> ViolinVisionTransformer:
    """Violin DeiT-Tiny: 14x14 patches, 3 heads, 5.7 M parameters."""
    return _create('violin_deit_tiny', pretrained, kwargs, embed_dim=192, num_heads=3)


@register_model
def violin_deit_small(pretrained: bool = False, **kwargs) -> ViolinVisionTransformer:
    """Violin DeiT-Small: 14x14 patches, 6 heads, 22.1 M parameters."""
    return _create('violin_deit_small', pretrained, kwargs, embed_dim=384, num_heads=6)


@register_model
def violin_deit_base(pretrained: bool = False, **kwargs) -> ViolinVisionTransformer:
    """Violin DeiT-Base: 14x14 patches, 12 heads, 86.6 M parameters."""
    return _create('violin_deit_base', pretrained, kwargs, embed_dim=768, num_heads=12)
