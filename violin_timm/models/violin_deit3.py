"""DeiT-III with decay masks: class token without a position of its own, layer scale."""

from timm.models import generate_default_cfgs, register_model

from .load import build_violin, plain_cfg
from .vit import ViolinVisionTransformer

__all__ = []

default_cfgs = generate_default_cfgs(
    {
        'violin_deit3_small.fb_in1k': plain_cfg('deit3_small_patch16_224.fb_in1k'),
        'violin_deit3_small.fb_in1k_384': plain_cfg('deit3_small_patch16_384.fb_in1k'),
        'violin_deit3_small.fb_in22k_ft_in1k': plain_cfg('deit3_small_patch16_224.fb_in22k_ft_in1k'),
        'violin_deit3_small.fb_in22k_ft_in1k_384': plain_cfg('deit3_small_patch16_384.fb_in22k_ft_in1k'),
        'violin_deit3_base.fb_in1k': plain_cfg('deit3_base_patch16_224.fb_in1k'),
        'violin_deit3_base.fb_in1k_384': plain_cfg('deit3_base_patch16_384.fb_in1k'),
        'violin_deit3_base.fb_in22k_ft_in1k': plain_cfg('deit3_base_patch16_224.fb_in22k_ft_in1k'),
        'violin_deit3_base.fb_in22k_ft_in1k_384': plain_cfg('deit3_base_patch16_384.fb_in22k_ft_in1k'),
        'violin_deit3_large.fb_in1k': plain_cfg('deit3_large_patch16_224.fb_in1k'),
        'violin_deit3_large.fb_in1k_384': plain_cfg('deit3_large_patch16_384.fb_in1k'),
        'violin_deit3_large.fb_in22k_ft_in1k': plain_cfg('deit3_large_patch16_224.fb_in22k_ft_in1k'),
        'violin_deit3_large.fb_in22k_ft_in1k_384': plain_cfg('deit3_large_patch16_384.fb_in22k_ft_in1k'),
        'violin_deit3_huge.fb_in1k': plain_cfg('deit3_huge_patch14_224.fb_in1k'),
        'violin_deit3_huge.fb_in22k_ft_in1k': plain_cfg('deit3_huge_patch14_224.fb_in22k_ft_in1k'),
    }
)


def _create(variant: str, pretrained: bool, kwargs: dict, **model_args) -> ViolinVisionTransformer:
    model_args = dict(patch_size=16, no_embed_class=True, init_values=1e-6) | model_args
    return build_violin(variant, pretrained, **model_args | kwargs)


@register_model
def violin_deit3_small(pretrained: bool = False, **kwargs) -> ViolinVisionTransformer:
    """Violin DeiT-III Small: 14x14 patches, 6 heads."""
    return _create('violin_deit3_small', pretrained, kwargs, embed_dim=384, depth=12, num_heads=6)


@register_model
def violin_deit3_base(pretrained: bool = False, **kwargs) -> ViolinVisionTransformer:
    """Violin DeiT-III Base: 14x14 patches, 12 heads."""
    return _create('violin_deit3_base', pretrained, kwargs, embed_dim=768, depth=12, num_heads=12)


@register_model
def violin_deit3_large(pretrained: bool = False, **kwargs) -> ViolinVisionTransformer:
    """Violin DeiT-III Large: 14x14 patches, 16 heads, 24 layers."""
    return _create('violin_deit3_large', pretrained, kwargs, embed_dim=1024, depth=24, num_heads=16)


@register_model
def violin_deit3_huge(pretrained: bool = False, **kwargs) -> ViolinVisionTransformer:
    """Violin DeiT-III Huge: 16x16 patches of 14 pixels, 16 heads, 32 layers."""
    return _create('violin_deit3_huge', pretrained, kwargs, patch_size=14, embed_dim=1280, depth=32, num_heads=16)
