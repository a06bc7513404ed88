"""Few-shot draws: how many of each class, which of them validate, and what cannot be."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Subset as TorchSubset

from violin_timm.data.digits import Digits
from violin_timm.data.few_shot import Subset, choose
from violin_timm.engine.config import ConfigError

LABELS = np.random.RandomState(0).permutation([0] * 50 + [1] * 20 + [2] * 7 + [5] * 2 + [6]).tolist()
SIZES = {0: 50, 1: 20, 2: 7, 5: 2, 6: 1}


def counts(indices):
    return dict(sorted(Counter(LABELS[index] for index in indices).items()))


@pytest.mark.parametrize('val_part', [0.0, 0.1, 0.2, 0.5, 0.99])
@pytest.mark.parametrize('seed', [0, 1])
@pytest.mark.parametrize(('shots', 'train_images'), [(None, None), (1, None), (None, 5), (None, 33), (None, 80)])
def test_every_class_trains_and_validates(shots, train_images, seed, val_part):
    train, validation = choose(LABELS, seed, shots, train_images, val_part)
    assert not set(train) & set(validation) and train == sorted(set(train)) and validation == sorted(set(validation))
    assert len(train) + len(validation) == (shots * 5 if shots else train_images or 80)
    together = counts(train + validation)
    assert counts(train).keys() == SIZES.keys()
    for label, count in together.items():
        validating = counts(validation).get(label, 0)
        assert count <= SIZES[label] and (validating >= 1 if val_part and count >= 2 else validating == 0)
        assert validating in (0, 1, count - 1) or abs(validating - val_part * count) <= 0.5


def test_a_total_is_shared_in_proportion():
    train, _ = choose(LABELS, 0, None, 40, 0.0)
    assert counts(train) == {0: 25, 1: 10, 2: 3, 5: 1, 6: 1}  # 25, 10, 3.5, 1 and 0.5 are due
    train, _ = choose([0] * 97 + [1, 2, 3], 0, None, 10, 0.0)
    assert Counter(([0] * 97 + [1, 2, 3])[index] for index in train) == {0: 7, 1: 1, 2: 1, 3: 1}


def test_the_draw_is_the_seeds_and_of_indices():
    labels = [0, 1] * 50
    np.random.seed(1)
    one = choose(labels, 0, 10, None, 0.2)
    np.random.seed(2)
    assert one == choose(np.array(labels), 0, 10, None, 0.2)
    assert one != choose(labels, 1, 10, None, 0.2)
    more = choose(labels, 0, 20, None, 0.2)
    assert set(one[0] + one[1]) < set(more[0] + more[1])
    drawn = Counter(index for seed in range(300) for part in choose(labels, seed, 10, None, 0.2) for index in part)
    assert len(drawn) == 100 and all(30 < count < 95 for count in drawn.values())  # 60 each, on average


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ((0, 3, None, 0.2), 'shots: got 3; class 5 has 2 images'),
        ((0, 0, None, 0.2), 'shots: got 0; expected at least 1'),
        ((0, None, 4, 0.2), 'train_images: got 4; expected 5, the number of classes, to 80, all images'),
        ((0, None, 81, 0.2), 'train_images: got 81; expected 5, .* to 80'),
        ((0, 1, 5, 0.2), 'shots, train_images: got 1 and 5; expected one of the two'),
        ((0, None, None, 1.0), 'val_part: got 1; expected a part from 0 to below 1'),
        ((0, None, None, -0.1), r'val_part: got -0\.1'),
    ],
)
def test_draws_that_cannot_be(values, message):
    with pytest.raises(ConfigError, match=message):
        choose(LABELS, *values)


def test_no_labels():
    with pytest.raises(ConfigError, match='labels: got none'):
        choose([], 0, None, None, 0.2)


def test_a_subset_applies_a_transform_of_its_own():
    data = Digits('validation')
    one, other = Subset(data, [5, 3]), Subset(data, [3])
    one.transform = lambda image: image.size
    assert len(one) == 2 and one[0] == ((8, 8), int(data.labels[5])) and one[1][1] == other[0][1] == data.labels[3]
    assert isinstance(other[0][0], Image.Image)
    torchs = TorchSubset(data, [5])
    torchs.transform = lambda image: image.size
    assert isinstance(torchs[0][0], Image.Image)  # why there is one of our own
