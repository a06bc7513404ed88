"""Splits as uint8 tensors, against timm's own transforms and loaders."""

import signal

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from violin_timm.data import tensors
from violin_timm.data.tensors import Streamed, Tensors, load, normalise, order
from violin_timm.engine.config import ConfigError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FIRST = [23, 49, 36, 37]
SIDES = [(40, 30), (16, 16), (9, 50), (33, 7), (120, 90)]


class Odd:
    """Random images of five aspects."""

    def __init__(self, count=7, mode='RGB'):
        self.count, self.mode, self.transform = count, mode, None

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        width, height = SIDES[index % len(SIDES)]
        pixels = np.random.RandomState(index).randint(0, 256, (height, width, 3), np.uint8)
        image = Image.fromarray(pixels).convert(self.mode)
        return (image if self.transform is None else self.transform(image)), index % 3


@pytest.mark.parametrize('interpolation', ['bicubic', 'bilinear'])
@pytest.mark.parametrize('size', [(16, 16), (12, 20)])
@pytest.mark.parametrize('mode', ['RGB', 'L'])
def test_normalised_tensors_are_what_timms_transform_makes(size, interpolation, mode):
    mean, std = (MEAN, STD) if mode == 'RGB' else (MEAN[:1], STD[:1])
    loaded = load(Odd(mode=mode), size, interpolation)
    assert isinstance(loaded, Tensors) and loaded.images.dtype == torch.uint8 and loaded.labels.dtype == torch.int64
    transform = create_transform(
        size, interpolation=interpolation, crop_mode='squash', crop_pct=1.0, mean=mean, std=std
    )
    expected = torch.stack([transform(Odd(mode=mode)[index][0]) for index in range(7)])
    actual = normalise(loaded.images, mean, std, 'cpu')
    assert actual.shape == (7, len(mean), *size) and actual.dtype == torch.float32
    assert (actual - expected).abs().max() <= 1e-6
    assert loaded.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize('workers', [0, 2])
def test_streams_and_tensors_have_the_same_batches(workers):
    data = Odd()
    kept = load(data, (8, 8), 'bicubic', workers, limit=7 * 3 * 64)
    stream = load(data, (8, 8), 'bicubic', workers, limit=7 * 3 * 64 - 1)
    assert isinstance(kept, Tensors) and isinstance(stream, Streamed) and len(kept) == len(stream) == 7
    assert data.transform is None
    for _ in range(2):
        found = [list(split.batches(3)) for split in (kept, stream)]
        assert [len(labels) for _, labels in found[0]] == [3, 3, 1]
        for (images, labels), (others, theirs) in zip(*found, strict=True):
            assert torch.equal(images, others) and torch.equal(labels, theirs)
            assert others.dtype == torch.uint8 and theirs.dtype == torch.int64


def test_more_images_than_are_read_at_a_time(monkeypatch):
    whole = load(Odd(), (8, 8), 'bicubic')
    monkeypatch.setattr(tensors, 'READ', 2)
    parts = load(Odd(), (8, 8), 'bicubic')
    assert torch.equal(whole.images, parts.images) and torch.equal(whole.labels, parts.labels)


@pytest.mark.parametrize('limit', [0, 2**20])
def test_reading_draws_nothing_from_the_global_generator(limit):
    before = torch.get_rng_state()
    for _ in load(Odd(), (8, 8), 'bicubic', limit=limit).batches(2):
        pass
    assert torch.equal(before, torch.get_rng_state())


def test_workers_leave_sigterm_to_the_training_process():
    class Handler(Odd):
        def __getitem__(self, index):
            return torch.tensor([signal.getsignal(signal.SIGTERM) == signal.SIG_IGN]), 0

    (ignored, _), *_ = Streamed(Handler(), 1).batches(7)
    assert ignored.all() and signal.getsignal(signal.SIGTERM) != signal.SIG_IGN


def test_data_sets_that_cannot_be():
    with pytest.raises(ConfigError, match='got one without images'):
        load(Odd(0), (8, 8), 'bicubic')
    with pytest.raises(ConfigError, match="interpolation: got 'cubic'; expected nearest"):
        load(Odd(), (8, 8), 'cubic')
    with pytest.raises(TypeError, match=r'Subset does not apply its transform; .*PIL'):
        load(torch.utils.data.Subset(Odd(), [0]), (8, 8), 'bicubic')


def test_normalise_leaves_the_images_and_refuses_other_channels():
    images = torch.full((2, 1, 4, 4), 255, dtype=torch.uint8)
    assert normalise(images, (0.5,), (0.25,), torch.device('cpu')).unique().tolist() == [2.0]
    assert images.unique().tolist() == [255]
    with pytest.raises(ValueError, match='mean, std: got 3 and 3 values; the images have 1 channels'):
        normalise(images, MEAN, STD, 'cpu')


def test_an_epoch_has_every_image_at_most_once():
    batches = order(1000, 64, seed=3, epoch=2)
    assert [batch.shape for batch in batches] == [(64,)] * 15 and all(b.dtype == torch.int64 for b in batches)
    assert len(torch.cat(batches).unique()) == 960 and set(torch.cat(batches).tolist()) < set(range(1000))
    assert torch.cat(order(12, 4, 0, 0)).sort().values.tolist() == list(range(12))


def test_orders_follow_from_seed_and_epoch_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    drawn = {tuple(torch.cat(order(50, 10, seed, epoch)).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(drawn) == 9
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == np.random.get_state()[1].tolist()
    np.random.seed(5)
    assert torch.equal(torch.cat(order(50, 10, 0, 1)), torch.cat(order(50, 10, 0, 1)))
    # The first of the order, once for all: results are compared across versions.
    assert order(50, 10, 0, 0)[0][:4].tolist() == FIRST


def test_images_are_left_out_alike():
    """Over many epochs no image is left out more than chance has it."""
    seen = np.zeros(10)
    for epoch in range(1000):
        seen[torch.cat(order(10, 4, 0, epoch)).numpy()] += 1
    assert abs(seen - 800).max() < 60  # 4.7 deviations


@pytest.mark.parametrize('batch_size', [11, 0])
def test_less_than_a_batch(batch_size):
    with pytest.raises(ConfigError, match=f'batch_size: got {batch_size}; expected 1 to 10'):
        order(10, batch_size, 0, 0)
