"""Structured tasks that are drawn: how many objects, how far apart, where, and turned which way.

They ask what Clevr-count, Clevr-distance, dSprites-location and dSprites-orientation ask in VTAB-1K, on pictures of our
own. A picture follows from task, seed, split and index alone. Its size is only how finely it is drawn.

A task is a function that arranges things for a label, and one row of `SHAPES`. Lengths are in sides of the picture:
it is the unit square, with x to the right and y down.
"""

from __future__ import annotations

import colorsys
import zlib
from dataclasses import dataclass
from typing import Callable, Sequence

import numpy as np
from numpy.random import RandomState
from PIL import Image, ImageDraw

from ..engine.config import ConfigError, nearest

Colour = tuple[int, int, int]
SPLITS = ('train800', 'val200', 'test')  # those that have pictures of their own
GRAIN = 28  # rows and columns of the grain over a picture, whatever its size
APART = 120.0  # distance in RGB, 0..255, at which colours are told apart


@dataclass(frozen=True)
class Thing:
    """A filled polygon.

    Attributes:
        outline: Its name in `OUTLINES`.
        x: Of its centre.
        y: Of its centre.
        radius: Of a disc of the same area.
        colour: RGB, 0..255.
        angle: Turn in radians, clockwise.
    """

    outline: str
    x: float
    y: float
    radius: float
    colour: Colour
    angle: float = 0.0


@dataclass(frozen=True)
class Shapes:
    """A task.

    Attributes:
        classes: How many labels.
        arrange: Things for a label, from back to front, given a generator and the colour of the ground.
    """

    classes: int
    arrange: Callable[[RandomState, int, Colour], list[Thing]]


def _outline(points: Sequence[Sequence[float]]) -> np.ndarray:
    """Corners `[K, 2]` of a polygon, moved to its centroid and scaled to the area of the unit disc."""
    here = np.asarray(points, float)
    there = np.roll(here, -1, axis=0)
    cross = here[:, 0] * there[:, 1] - there[:, 0] * here[:, 1]
    area = cross.sum() / 2
    centroid = ((here + there) * cross[:, None]).sum(0) / (6 * area)
    return (here - centroid) * np.sqrt(np.pi / abs(area))


def _polar(*radii: float, start: float = 0.0, end: float = 360.0) -> list[tuple[float, float]]:
    """Points at equal steps of the angle, in degrees."""
    angles = np.deg2rad(start + (end - start) * np.arange(len(radii)) / len(radii))
    return [(radius * np.cos(angle), radius * np.sin(angle)) for radius, angle in zip(radii, angles)]


OUTLINES = {
    name: _outline(points)
    for name, points in {
        'disc': _polar(*[1] * 48),
        'ellipse': [(1.5 * x, y) for x, y in _polar(*[1] * 48)],
        'square': _polar(*[1] * 4),
        'triangle': _polar(*[1] * 3),
        'hexagon': _polar(*[1] * 6),
        'star': _polar(*[1, 0.5] * 5),
        'cross': _polar(*[1, 0.45] * 4),
        # these point to the right
        'wedge': [(2.0, 0), (-1, 1), (-1, -1)],
        'dart': [(2.4, 0), (-1, 1), (-0.4, 0), (-1, -1)],
        'drop': [(2.2, 0), *_polar(*[1] * 32, start=60, end=308)],
    }.items()
}
POINTED = ('wedge', 'dart', 'drop')
PLAIN = tuple(name for name in OUTLINES if name not in POINTED)


def _colour(
    rng: RandomState,
    others: Sequence[Colour],
    saturation: tuple[float, float] = (0, 1),
    value: tuple[float, float] = (0, 1),
    apart: float = APART,
) -> Colour:
    """A random colour that is told apart from others, as far as twenty draws find one."""

    def distance(colour: Colour) -> float:
        return min((sum((a - b) ** 2 for a, b in zip(colour, other)) ** 0.5 for other in others), default=apart)

    best: Colour = (0, 0, 0)
    for number in range(20):
        hue, part, light = rng.uniform(), rng.uniform(*saturation), rng.uniform(*value)
        red, green, blue = (round(255 * channel) for channel in colorsys.hsv_to_rgb(hue, part, light))
        if not number or distance((red, green, blue)) > distance(best):
            best = red, green, blue
        if distance(best) >= apart:
            break
    return best


def _scatter(
    rng: RandomState, radii: Sequence[float], kept: Sequence[Thing] = (), overlap: float = 0.2
) -> list[tuple[float, float]]:
    """Random centres of discs that lie within the picture, hide none that is kept, and overlap little.

    Args:
        rng: Draws them.
        radii: Of the discs.
        kept: Things to stay clear of.
        overlap: Part of the sum of two radii by which their discs may overlap.
    """
    while True:  # begun anew where the first ones leave no room
        taken = [(thing.x, thing.y, 1.3 * thing.radius, 0.0) for thing in kept]
        for radius in radii:
            for _ in range(50):
                x, y = rng.uniform(radius, 1 - radius, 2)
                if all(np.hypot(x - a, y - b) >= (radius + r) * (1 - part) for a, b, r, part in taken):
                    taken.append((x, y, radius, overlap))
                    break
        if len(taken) == len(kept) + len(radii):
            return [(x, y) for x, y, _, _ in taken[len(kept) :]]


def _pick(rng: RandomState, names: Sequence[str]) -> str:
    return names[rng.randint(len(names))]


def _count(rng: RandomState, label: int, ground: Colour) -> list[Thing]:
    """One to eight things apart from each other. Neither their areas together nor the colours say how many they are."""
    shares = rng.uniform(0.6, 1.4, label + 1)
    radii = np.sqrt(rng.uniform(0.08, 0.18) * shares / shares.sum() / np.pi)
    colours = [_colour(rng, [ground]) for _ in range(2)]
    return [
        Thing(_pick(rng, PLAIN), x, y, radius, colours[rng.randint(2)], rng.uniform(0, 2 * np.pi))
        for (x, y), radius in zip(_scatter(rng, radii, overlap=-0.25), radii)
    ]


def _pale(rng: RandomState, counts: tuple[int, int], ground: Colour, kept: Sequence[Thing]) -> list[Thing]:
    """Grey or nearly grey things to be told from those that are asked for."""
    radii = rng.uniform(0.04, 0.1, rng.randint(*counts))
    return [
        Thing(_pick(rng, PLAIN), x, y, radius, _colour(rng, [ground], (0, 0.2)), rng.uniform(0, 2 * np.pi))
        for (x, y), radius in zip(_scatter(rng, radii, kept), radii)
    ]


def _distance(rng: RandomState, label: int, ground: Colour) -> list[Thing]:
    """How far a thing of a bright colour is from the other of that colour, one in the middle, in six equal steps."""
    edges = np.linspace(0.15, 0.57, 7)
    length = rng.uniform(edges[label], edges[label + 1])
    while True:
        angle = rng.uniform(0, 2 * np.pi)
        here = rng.uniform(0.42, 0.58, 2)
        there = here + length * np.array([np.cos(angle), np.sin(angle)])
        if there.min() > 0.06 and there.max() < 0.94:
            break
    colour = _colour(rng, [ground], (0.8, 1), (0.7, 1))
    pair = [
        Thing(_pick(rng, PLAIN), x, y, rng.uniform(0.055, 0.08), colour, rng.uniform(0, 2 * np.pi))
        for x, y in (here, there)
    ]
    return _pale(rng, (1, 5), ground, pair) + pair


def _location(rng: RandomState, label: int, ground: Colour) -> list[Thing]:
    """In which of 4x4 cells the centre of the one thing of a bright colour is."""
    row, column = divmod(label, 4)
    x, y = 0.06 + 0.22 * (np.array([column, row]) + rng.uniform(0.03, 0.97, 2))
    colour = _colour(rng, [ground], (0.55, 1), (0.55, 1))
    thing = Thing(_pick(rng, PLAIN), x, y, rng.uniform(0.045, 0.09), colour, rng.uniform(0, 2 * np.pi))
    return [*_pale(rng, (4, 9), ground, [thing]), thing]


def _orientation(rng: RandomState, label: int, ground: Colour) -> list[Thing]:
    """Which of eight ways the one pointed thing points: right, then on by clockwise steps of 45 degrees."""
    angle = (label + rng.uniform(-0.45, 0.45)) * np.pi / 4
    x, y = rng.uniform(0.33, 0.67, 2)
    thing = Thing(_pick(rng, POINTED), x, y, rng.uniform(0.12, 0.165), _colour(rng, [ground]), angle)
    radii = rng.uniform(0.03, 0.07, rng.randint(0, 5))
    discs = [
        Thing(_pick(rng, ('disc', 'hexagon')), x, y, radius, _colour(rng, [ground]))
        for (x, y), radius in zip(_scatter(rng, radii, [thing]), radii)
    ]
    return [*discs, thing]


SHAPES = {
    'shapes_count': Shapes(8, _count),
    'shapes_distance': Shapes(6, _distance),
    'shapes_location': Shapes(16, _location),
    'shapes_orientation': Shapes(8, _orientation),
}


def _generator(*numbers: int) -> RandomState:
    # RandomState's stream is frozen for good, default_rng's is not.
    return RandomState(np.random.SeedSequence(numbers).generate_state(4))


def _paint(rng: RandomState, things: Sequence[Thing], ground: Colour, size: int) -> Image.Image:
    """Things on uneven ground, under a grain. What is drawn at random does not depend on the size."""
    cells = rng.randint(2, 9)
    uneven = np.array(ground) + rng.uniform(0, 24) * rng.uniform(-1, 1, (cells, cells, 3))
    grain = rng.uniform(2, 10) * rng.uniform(-1, 1, (GRAIN, GRAIN))
    side = size * (4 if size <= 64 else 2)
    texture = Image.fromarray(uneven.round().clip(0, 255).astype(np.uint8))
    canvas = texture.resize((side, side), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(canvas)
    for thing in things:
        cos, sin = np.cos(thing.angle), np.sin(thing.angle)
        corners = OUTLINES[thing.outline] @ np.array([[cos, sin], [-sin, cos]]) * thing.radius + (thing.x, thing.y)
        pen.polygon([tuple(corner) for corner in (corners * side).tolist()], fill=thing.colour)
    pixels = np.asarray(canvas.resize((size, size), Image.Resampling.BOX), float)
    over = Image.fromarray(grain.astype(np.float32)).resize((size, size), Image.Resampling.BICUBIC)
    return Image.fromarray((pixels + np.asarray(over)[..., None]).round().clip(0, 255).astype(np.uint8))


def draw(name: str, seed: int, index: int, size: int, split: str) -> tuple[Image.Image, int]:
    """A picture, RGB, and its label.

    Args:
        name: One of `SHAPES`.
        seed: Of the task: another one has other pictures.
        index: Of the picture in its split, from 0. Indices from k * classes to below (k + 1) * classes have each label
            once.
        size: Side in pixels, at least 8.
        split: One of `SPLITS`.

    Raises:
        ConfigError: One of them is not what it may be.
    """
    if name not in SHAPES:
        raise ConfigError(f'task: got {name!r}{nearest(name, SHAPES)}')
    if split not in SPLITS:
        raise ConfigError(f'split: got {split!r}; choose from {", ".join(SPLITS)}')
    for key, value, least in (('seed', seed, 0), ('index', index, 0), ('size', size, 8)):
        if value < least:
            raise ConfigError(f'{key}: got {value}; expected at least {least}')
    task, origin = SHAPES[name], (zlib.crc32(name.encode()), seed, SPLITS.index(split))
    block, place = divmod(index, task.classes)
    label = int(_generator(*origin, 0, block).permutation(task.classes)[place])
    rng = _generator(*origin, 1, index)
    ground = _colour(rng, (), (0, 0.25), (0.15, 0.9))
    return _paint(rng, task.arrange(rng, label, ground), ground, size), label
