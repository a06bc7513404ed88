"""VIOLIN in timm: Vision Transformers whose attention decays along space-filling curves (arXiv 2606.14757).

    import timm, violin_timm
    model = timm.create_model('violin_deit_small', num_classes=10)

Importing the package registers the models, ``timm.list_models('violin*')``.
"""

from .attention import ViolinAttention
from .curves import CURVES, curve_order, curve_ranks
from .models import add_violin
from .version import __version__

__all__ = ['CURVES', 'ViolinAttention', '__version__', 'add_violin', 'curve_order', 'curve_ranks']
