"""Pixel-level Violins: every pixel a token, GAP (paper, section 4.4)."""

from timm.models import generate_default_cfgs, register_model

from .load import build_violin, plain_cfg
from .vit import ViolinVisionTransformer

__all__ = []

default_cfgs = generate_default_cfgs(
    {
        'violin_pixel_tiny.untrained': plain_cfg(
            input_size=(3, 32, 32),
            num_classes=100,
            crop_pct=1.0,
            mean=(0.5071, 0.4867, 0.4408),
            std=(0.2675, 0.2565, 0.2761),
        ),
        'violin_pixel_nano.untrained': plain_cfg(
            input_size=(1, 8, 8), num_classes=10, crop_pct=1.0, mean=(0.5,), std=(0.5,)
        ),
    }
)


def _create(variant: str, pretrained: bool, kwargs: dict, **model_args) -> ViolinVisionTransformer:
    return build_violin(variant, pretrained, class_token_default=False, **dict(patch_size=1, **model_args) | kwargs)


@register_model
def violin_pixel_tiny(pretrained: bool = False, **kwargs) -> ViolinVisionTransformer:
    """DeiT-Tiny's width on the 1024 pixels of a CIFAR image."""
    return _create('violin_pixel_tiny', pretrained, kwargs, embed_dim=192, depth=12, num_heads=3)


@register_model
def violin_pixel_nano(pretrained: bool = False, **kwargs) -> ViolinVisionTransformer:
    """The quick start's model: 64 wide, 4 layers, 4 heads, on the 64 pixels of a digit.

    Its weights start by timm's ``weight_init='jax'`` (Xavier): DeiT's deviation of 0.02 is too small at this width.
    """
    return _create('violin_pixel_nano', pretrained, kwargs, embed_dim=64, depth=4, num_heads=4, weight_init='jax')
