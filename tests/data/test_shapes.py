"""Drawn tasks: they repeat, their labels say what is drawn, and no trivial statistic gives the labels away."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from violin_timm.data import shapes
from violin_timm.data.shapes import OUTLINES, SHAPES, SPLITS, draw
from violin_timm.engine.config import ConfigError

GREY = (128, 128, 128)
# The first labels, and the mean colour of the first picture, once for all: results are compared across versions.
FIRST = {
    'shapes_count': ([0, 4, 7, 6], (94.4, 93.3, 96.7)),
    'shapes_distance': ([5, 1, 3, 4], (151.9, 197.6, 166.3)),
    'shapes_location': ([11, 14, 0, 8], (147.6, 151.8, 146.4)),
    'shapes_orientation': ([4, 3, 7, 2], (175.6, 177.3, 175.5)),
}
PARTS = ((480, 'train800'), (240, 'test'))


def arrange(name, label, seed):
    return SHAPES[name].arrange(np.random.RandomState(seed), label, GREY)


def arranged(name, scenes=40):
    """Things of many pictures, with their labels."""
    for label in range(SHAPES[name].classes):
        for seed in range(scenes // 4):
            yield label, arrange(name, label, 1000 * label + seed)


def bright(things):
    return [thing for thing in things if max(thing.colour) - min(thing.colour) > 64]


def pixels(name, count, split='train800', seed=0, size=28):
    drawn = [draw(name, seed, index, size, split) for index in range(count)]
    return np.stack([np.asarray(image) for image, _ in drawn]), np.array([label for _, label in drawn])


@pytest.mark.parametrize('name', SHAPES)
@pytest.mark.parametrize('size', [8, 28, 65])
def test_pictures_are_rgb_of_any_size_and_repeat(name, size):
    image, label = draw(name, 1, 5, size, 'val200')
    assert image.mode == 'RGB' and image.size == (size, size) and type(label) is int
    np.random.seed(9)
    again, same = draw(name, 1, 5, size, 'val200')
    assert np.array_equal(image, again) and label == same


@pytest.mark.parametrize('name', SHAPES)
def test_every_number_makes_another_picture(name):
    drawn = [draw(name, *rest, 28, split)[0].tobytes() for rest in ((0, 0), (0, 1), (1, 0)) for split in SPLITS]
    assert len(set(drawn)) == 9
    assert len({draw(name, 0, 0, 28, 'test')[0].tobytes() for name in SHAPES}) == len(SHAPES)


@pytest.mark.parametrize('name', FIRST)
def test_pictures_stay_what_they_were(name):
    labels, colour = FIRST[name]
    assert [draw(name, 0, index, 8, 'test')[1] for index in range(4)] == labels
    mean = np.asarray(draw(name, 0, 0, 28, 'test')[0]).mean((0, 1))
    assert abs(mean - colour).max() < 1  # a machine may round a corner otherwise


@pytest.mark.parametrize('name', SHAPES)
def test_the_size_is_only_how_finely_it_is_drawn(name):
    for index in range(4):
        (small, label), (large, same) = (draw(name, 0, index, size, 'test') for size in (32, 128))
        shrunk = np.asarray(large.resize((32, 32)), float)
        assert label == same and abs(shrunk - np.asarray(small)).mean() < 6


def test_ground_and_grain_have_no_size():
    apart = []
    for seed in range(6):
        small, large = (shapes._paint(np.random.RandomState(seed), [], GREY, size) for size in (28, 112))
        shrunk = large.resize((28, 28), Image.Resampling.BOX)
        apart.append(abs(np.asarray(shrunk, float) - np.asarray(small)).mean())
    assert np.mean(apart) < 1.5  # twice as much if only the grain is another


@pytest.mark.parametrize('name', SHAPES)
@pytest.mark.parametrize('split', SPLITS)
def test_classes_are_equally_frequent_and_without_order(name, split):
    classes = SHAPES[name].classes
    labels = [draw(name, 0, index, 8, split)[1] for index in range(4 * classes)]
    assert set(Counter(labels).values()) == {4} and len(Counter(labels)) == classes
    assert len({tuple(labels[start : start + classes]) for start in range(0, 4 * classes, classes)}) == 4


def test_outlines_have_the_area_of_a_disc_around_their_centre():
    for name, points in OUTLINES.items():
        x, y = points.T
        there_x, there_y = np.roll(x, -1), np.roll(y, -1)
        fan = x * there_y - there_x * y  # twice the areas of the triangles to the origin
        assert abs(abs(fan.sum()) / 2 - np.pi) < 1e-9, name
        assert abs((fan * (x + there_x)).sum()) < 1e-9 and abs((fan * (y + there_y)).sum()) < 1e-9, name


def test_count():
    areas = []
    for label, things in arranged('shapes_count', 320):
        assert len(things) == label + 1
        areas.append((label, sum(thing.radius**2 for thing in things)))
        for one, other in ((a, b) for a in things for b in things if a is not b):
            assert np.hypot(one.x - other.x, one.y - other.y) > 1.2 * (one.radius + other.radius)
    assert abs(np.corrcoef(np.array(areas).T)[0, 1]) < 0.2


def test_distance():
    lengths = {}
    for label, things in arranged('shapes_distance', 160):
        one, other = bright(things)
        assert one.colour == other.colour
        lengths.setdefault(label, []).append(np.hypot(one.x - other.x, one.y - other.y))
    steps = [(min(some), max(some)) for _, some in sorted(lengths.items())]
    width = (steps[-1][1] - steps[0][0]) / 6
    for (low, high), (next_low, _) in pairwise(steps):
        assert high < next_low and 0.7 * width < high - low < 1.1 * width


def test_location():
    for label, things in arranged('shapes_location'):
        (thing,) = bright(things)
        cells = np.clip(4 * (np.array([thing.x, thing.y]) - 0.06) / 0.88, 0, 3.99).astype(int)
        assert label == 4 * cells[1] + cells[0]


@pytest.mark.parametrize('label', range(8))
@pytest.mark.parametrize('outline', shapes.POINTED)
def test_orientation(outline, label):
    """The tip is the pixel farthest from the centre of what is drawn."""
    angle = arrange('shapes_orientation', label, 3)[-1].angle
    thing = shapes.Thing(outline, 0.5, 0.5, 0.18, (255, 255, 255), angle)
    image = np.asarray(shapes._paint(np.random.RandomState(0), [thing], (0, 0, 0), 64)).mean(2)
    y, x = np.nonzero(image > 128)
    far = np.hypot(x - 31.5, y - 31.5).argmax()
    turned = np.rad2deg(np.arctan2(y[far] - 31.5, x[far] - 31.5)) - 45 * label
    assert abs((turned + 180) % 360 - 180) < 26


@pytest.mark.parametrize('name', [name for name in SHAPES if name != 'shapes_count'])
def test_others_keep_clear_of_what_is_asked_for(name):
    for _, things in arranged(name):
        asked = things[-1:] if name == 'shapes_orientation' else bright(things)
        others = [thing for thing in things if thing not in asked]
        for thing in asked:
            assert 0 < thing.x < 1 and 0 < thing.y < 1 and things.index(thing) >= len(others)
            for other in others:
                assert np.hypot(thing.x - other.x, thing.y - other.y) > 1.1 * thing.radius + other.radius


@pytest.mark.parametrize('name', SHAPES)
def test_brightness_and_its_spread_say_little(name):
    """Correlation of the label with the mean, and with the deviation, of all values."""
    images, labels = pixels(name, 240)
    flat = images.reshape(len(images), -1)
    for statistic in (flat.mean(1), flat.std(1)):
        assert abs(np.corrcoef(statistic, labels)[0, 1]) < 0.3
    found = np.array([images[labels == label].mean() for label in set(labels.tolist())])
    assert found.std() < images.mean((1, 2, 3)).std() / 2


@pytest.mark.parametrize('name', SHAPES)
def test_pixels_alone_do_not_say_it_linearly(name):
    from sklearn.linear_model import RidgeClassifier

    (train, labels), (test, answers) = (pixels(name, count, split, size=16) for count, split in PARTS)
    flat = [images.reshape(len(images), -1) / 255 for images in (train, test)]
    accuracy = RidgeClassifier(100.0).fit(flat[0], labels).score(flat[1], answers)
    assert accuracy < 1 / SHAPES[name].classes + 0.12


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        (('shapes_cuont', 0, 0, 28, 'test'), "task: got 'shapes_cuont'; did you mean shapes_count?"),
        (
            ('shapes_count', 0, 0, 28, 'train800val200'),
            "split: got 'train800val200'; choose from train800, val200, test",
        ),
        (('shapes_count', -1, 0, 28, 'test'), 'seed: got -1; expected at least 0'),
        (('shapes_count', 0, -1, 28, 'test'), 'index: got -1; expected at least 0'),
        (('shapes_count', 0, 0, 7, 'test'), 'size: got 7; expected at least 8'),
    ],
)
def test_pictures_that_cannot_be(values, message):
    with pytest.raises(ConfigError, match=message):
        draw(*values)
