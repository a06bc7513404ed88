"""The embedded digits and their way through timm's loaders."""

import builtins

import numpy as np
import pytest
import torch
from PIL import Image

from violin_timm.data import datasets, digits
from violin_timm.engine.config import ConfigError, settings
from violin_timm.engine.distributed import World

FIRST = [2, 8, 2, 6, 6, 7, 1, 9]
CPU = World(torch.device('cpu'))
CONFIG = {
    'input_size': (1, 8, 8), 'mean': (0.5,), 'std': (0.5,), 'interpolation': 'bilinear', 'crop_pct': 1.0,
    'crop_mode': 'center',
}  # fmt: skip


def make(**values):
    return settings(dataset='digits', workers=0, device='cpu', **values)


def test_splits_are_disjoint_and_cover_everything():
    parts = [digits.arrays(split)[0] for split in ('train', 'validation', 'test')]
    assert [len(part) for part in parts] == [1000, 297, 500]
    from sklearn.datasets import load_digits

    def in_order(images):
        return sorted(map(bytes, images.reshape(len(images), -1)))

    assert in_order(np.concatenate(parts)) == in_order(np.round(load_digits().images * 255 / 16).astype(np.uint8))


def test_values_and_labels():
    images, labels = digits.arrays('train')
    assert images.dtype == np.uint8 and images.shape == (1000, 8, 8) and images.min() == 0 and images.max() == 255
    assert set(labels.tolist()) == set(range(10))


def test_split_belongs_to_its_own_seed():
    torch.manual_seed(1)
    np.random.seed(1)
    one = digits.arrays('test')[0]
    np.random.seed(2)
    assert np.array_equal(one, digits.arrays('test')[0])
    assert not np.array_equal(one, digits.arrays('test', split_seed=1)[0])
    # The first images of the split, once for all: results are compared across versions.
    assert digits.arrays('train')[1][:8].tolist() == FIRST


def test_items_are_what_timm_expects():
    data = digits.Digits('validation')
    image, label = data[0]
    assert len(data) == 297 and isinstance(image, Image.Image) and image.mode == 'L' and type(label) is int
    data.transform = np.asarray
    data.target_transform = str
    image, label = data[0]
    assert np.array_equal(image, data.images[0]) and label == str(data.labels[0])
    assert digits.Digits('test', input_img_mode='RGB')[0][0].mode == 'RGB'


def test_unknown_split():
    with pytest.raises(ValueError, match="got 'valid' for digits; choose from train, validation, test"):
        digits.Digits('valid')


def test_without_scikit_learn(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith('sklearn'):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    digits._load.cache_clear()
    monkeypatch.setattr(builtins, '__import__', without)
    with pytest.raises(ConfigError, match=r'violin-timm\[digits\]'):
        datasets.create_dataset(make(), 'train', 1)


def test_baselines_are_good_and_repeatable():
    found = digits.baselines()
    assert set(found) == {'logistic_regression', '3_nearest_neighbours'}
    assert all(93 < value <= 100 for value in found.values())
    assert found == digits.baselines()


@pytest.mark.parametrize('no_prefetcher', [False, True])
def test_evaluation_has_every_image_once_and_an_uneven_last_batch(no_prefetcher):
    args = make(batch_size=64, no_prefetcher=no_prefetcher)
    data = datasets.create_dataset(args, 'validation', 1)
    batches = list(datasets.evaluation_batches(args, data, CONFIG, CPU))
    assert [len(images) for images, _ in batches] == [64, 64, 64, 64, 41]
    images = torch.cat([images for images, _ in batches])
    expected = (torch.from_numpy(data.images)[:, None] / 255 - 0.5) / 0.5
    assert torch.allclose(images, expected, atol=1e-6)  # eight pixels to eight pixels: nothing is resampled
    assert torch.cat([targets for _, targets in batches]).tolist() == data.labels.tolist()


def test_training_batches_drop_the_rest_and_are_grey():
    args = make(batch_size=300, train_crop_mode='rkrr', scale=[0.7, 1.3], hflip=0.0)
    batches = datasets.training_batches(args, datasets.create_dataset(args, 'train', 1, True), CONFIG, 10, CPU)
    shapes = [(images.shape, targets.dtype) for images, targets in batches]
    assert len(batches) == 3 and shapes == [((300, 1, 8, 8), torch.int64)] * 3


def test_colour_models_get_colour():
    args = make(batch_size=10, no_aug=True)
    config = {**CONFIG, 'input_size': (3, 8, 8), 'mean': (0.5,) * 3, 'std': (0.5,) * 3}
    data = datasets.create_dataset(args, 'train', 3, True)
    images, _ = next(iter(datasets.training_batches(args, data, config, 10, CPU)))
    assert images.shape == (10, 3, 8, 8) and torch.equal(images[:, 0], images[:, 2])


@pytest.mark.parametrize('no_prefetcher', [False, True])
def test_mixing_makes_distributions_until_it_is_switched_off(no_prefetcher):
    args = make(batch_size=50, mixup=1.0, mixup_off_epoch=1, smoothing=0.0, no_prefetcher=no_prefetcher)
    batches = datasets.training_batches(args, datasets.create_dataset(args, 'train', 1, True), CONFIG, 10, CPU)
    for epoch, mixed in ((0, True), (1, False)):
        batches.set_epoch(epoch)
        targets = torch.cat([targets for _, targets in batches])
        assert targets.shape == (1000, 10) and torch.allclose(targets.sum(1), torch.ones(1000))
        assert bool(((targets > 0.01) & (targets < 0.99)).any()) is mixed


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ({'batch_size': 1001}, "batch_size: got 1001 for each of 1 process.*the 1000 images of split 'train'"),
        ({'batch_size': 25, 'mixup': 0.5}, 'batch_size: got 25; mixup and cutmix pair images'),
    ],
)
def test_batches_that_cannot_be(values, message):
    args = make(**values)
    with pytest.raises(ConfigError, match=message):
        datasets.training_batches(args, datasets.create_dataset(args, 'train', 1, True), CONFIG, 10, CPU)


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ({'dataset': 'digit'}, "dataset: got 'digit'; choose from digits"),
        ({'dataset': ''}, 'data_dir: got None'),
        ({'dataset': '', 'data_dir': '/none'}, "data_dir: got '/none'"),
        ({'dataset': 'digits'}, "split: got 'valid' for digits"),
    ],
)
def test_data_sets_that_cannot_be(values, message):
    with pytest.raises(ConfigError, match=message):
        datasets.create_dataset(settings(**values), 'valid', 1)


def test_other_data_sets_are_timms(monkeypatch):
    seen = {}
    monkeypatch.setattr(datasets.timm_data, 'create_dataset', lambda name, **kwargs: seen.update(kwargs, name=name))
    args = settings(dataset='hfds/x', data_dir='/d', class_map='m', target_key='fine', train_num_samples=7, seed=3)
    datasets.create_dataset(args, 'train', 3, training=True)
    expected = {'name': 'hfds/x', 'root': '/d', 'split': 'train', 'class_map': 'm', 'target_key': 'fine',
                'num_samples': 7, 'seed': 3, 'is_training': True, 'input_img_mode': 'RGB'}  # fmt: skip
    assert {key: seen[key] for key in expected} == expected


def test_repeated_augmentation_in_one_process_says_what_it_does(caplog):
    args = make(batch_size=50, aug_repeats=3)
    batches = datasets.training_batches(args, datasets.create_dataset(args, 'train', 1, True), CONFIG, 10, CPU)
    assert len(batches) == 20 and 'aug_repeats: 3 needs several processes' in caplog.text


@pytest.mark.parametrize('policy', ['rand-m10-inc1', 'rand-m9-mstd0.5-inc1', '3a', 'v0', 'original', 'augmix-m5'])
def test_augmentation_policies_take_grey_images(policy):
    """At magnitude 10 every posterize keeps no bits, at which Pillow raises since version 13."""
    args = make(batch_size=100, aa=policy)
    batches = datasets.training_batches(args, datasets.create_dataset(args, 'train', 1, True), CONFIG, 10, CPU)
    assert sum(len(images) for images, _ in batches) == 1000
