"""How masked attention is computed. All backends have one signature; `masked_attention` is the place that chooses."""
from .eager import eager_attention as masked_attention

__all__ = ['masked_attention']
