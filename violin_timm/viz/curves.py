"""Curves as paths over the grid of patches."""

from typing import Sequence, Tuple

import numpy as np

from ..curves import curve_order
from ..geometry import MANHATTAN, positions

__all__ = ['CURVE_COLOURS', 'centre_patch', 'draw_curve', 'draw_curves', 'frame']

CURVE_COLOURS = 'viridis'


def centre_patch(height: int, width: int) -> Tuple[int, int]:
    """Row and column of the patch at the centre, or below and right of it."""
    return height // 2, width // 2


def frame(ax, height: int, width: int) -> None:
    """Give the axes the extent of a grid of patches, row 0 on top, without ticks."""
    ax.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xticks=[], yticks=[], aspect='equal')
    for spine in ax.spines.values():
        spine.set(color='0.6', linewidth=0.8)


def draw_curve(ax, name: str, height: int, width: int):
    """Draw a curve as a path from patch to patch, coloured by step.

    Steps to a patch that is no neighbour are thin, so that jumps do not hide the path. A dot marks the start.
    ``manhattan``, which is no curve, is drawn as the distance of every patch from the central one.

    Args:
        ax: Axes of matplotlib.
        name: A curve, as `violin_timm.curves.curve_order` takes it, or ``manhattan``.
        height: Rows of the grid, in patches.
        width: Columns of the grid, in patches.

    Returns:
        What was coloured, for a colour bar: steps in 0 .. height * width - 1.

    Raises:
        ValueError: If no curve has that name or a side is not a positive integer.
    """
    if name == MANHATTAN:
        return _draw_distance(ax, height, width)
    y, x = np.divmod(curve_order(name, height, width), width)
    frame(ax, height, width)
    return _draw_path(ax, x, y)


def _draw_path(ax, x: np.ndarray, y: np.ndarray):
    """The patches ``(x[t], y[t])`` joined up, as a collection of lines that knows its colours."""
    from matplotlib.collections import LineCollection

    points = np.stack([x, y], axis=1)
    if len(points) == 1:  # a path that stays
        points = points.repeat(2, axis=0)
    jump = np.abs(np.diff(points, axis=0)).max(axis=1) > 1
    width = _line_width(ax)
    if 2 * jump.sum() > len(jump):  # a random order: few neighbours, which are nothing to stress
        width, jump = 0.5 * width, np.zeros_like(jump)
    path = LineCollection(
        np.stack([points[:-1], points[1:]], axis=1),
        cmap=CURVE_COLOURS,
        capstyle='round',
        linewidths=np.where(jump, 0.35 * width, width),
        alpha=np.where(jump, 0.7, 1.0),
    )
    path.set_array(np.arange(len(points) - 1))
    path.set_clim(0, len(points) - 1)
    ax.add_collection(path, autolim=False)
    ax.plot(x[0], y[0], 'o', color=path.cmap(0.0), markersize=2 * width + 1.5, clip_on=False)
    return path


def _line_width(ax) -> float:
    """In points, so that a line covers about a fifth of a patch of a panel two inches wide."""
    patches = max(abs(np.subtract(*ax.get_xlim())), abs(np.subtract(*ax.get_ylim())))
    return float(np.clip(28 / patches, 0.5, 2.5))


def _draw_distance(ax, height: int, width: int):
    row, column = centre_patch(height, width)
    places = positions((MANHATTAN,), height, width)[0]
    distance = np.abs(places - (row, column)).sum(axis=1).reshape(height, width)
    image = ax.imshow(distance, cmap=CURVE_COLOURS, vmin=0, vmax=max(distance.max(), 1))
    frame(ax, height, width)
    return image


def draw_curves(figure, names: Sequence[str], height: int, width: int, columns: int = 8) -> None:
    """Draw curves side by side on a figure or subfigure, each titled by its name, with one colour bar.

    Args:
        figure: Figure or subfigure of matplotlib.
        names: Curves, or ``manhattan``.
        height: Rows of the grid, in patches.
        width: Columns of the grid, in patches.
        columns: Panels in a row; rows are filled up with empty ones.
    """
    rows = -(-len(names) // columns)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    for ax, name in zip(axes.flat, names):
        drawn = draw_curve(ax, name, height, width)
        ax.set_title(name)
    label = 'distance from\nthe centre (patches)' if tuple(names) == (MANHATTAN,) else 'step along\nthe curve'
    # beside the panels in use, not at the end of empty ones
    used = axes[:, : min(len(names), columns)]
    bar = figure.colorbar(drawn, ax=used, label=label, aspect=12 * rows, shrink=0.86, fraction=0.05, pad=0.02)
    bar.ax.locator_params(nbins=4)
