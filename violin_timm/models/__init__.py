"""Violin models; importing this registers them with timm."""

from . import violin_deit, violin_deit3, violin_dino, violin_pixel
from .plug import add_violin
from .vit import ViolinVisionTransformer

__all__ = ['ViolinVisionTransformer', 'add_violin', 'violin_deit', 'violin_deit3', 'violin_dino', 'violin_pixel']
