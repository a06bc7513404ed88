"""Pictures of what a Violin is made of and what it has learned. Needs the extra ``[viz]`` (matplotlib).

    from violin_timm.viz import training_figure
    training_figure(model, 'model.png')

Matplotlib is imported when something is drawn, and its global state (pyplot) is left alone.
"""

from .curves import draw_curve
from .figure import draw_figure, training_figure
from .masks import draw_mask

__all__ = ['draw_curve', 'draw_figure', 'draw_mask', 'training_figure']
