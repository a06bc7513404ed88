"""Views and their batches; Fashion-MNIST's files."""

import gzip

import numpy as np
import pytest
import torch
from PIL import Image

from violin_timm.data import fashion
from violin_timm.data.digits import Digits
from violin_timm.data.multicrop import Blur, Colour, Crop, CropBatches, MultiCrop, check_sizes, view_transform
from violin_timm.engine.config import ConfigError
from violin_timm.engine.distributed import World

PLAIN = Colour(hflip=0.0, jitter=(0, 0, 0, 0), grayscale_prob=0.0)
CROPS = [Crop((8, 8), (0.4, 1.0)), Crop((8, 8), (0.4, 1.0), solarize_prob=0.5), Crop((4, 6), (0.1, 0.4), blur_prob=0.5)]
CPU = torch.device('cpu')


class Numbered:
    """Image i is all i."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return Image.new('L', (8, 8), index), 0


def batches(dataset, batch_size=10, world=None, workers=0, crops=CROPS, colour=None, seed=0):
    views = MultiCrop(dataset, crops, colour or Colour(), seed)
    return CropBatches(views, batch_size, [0.5], [0.25], world or World(CPU), workers)


def all_of(loader, epoch):
    loader.set_epoch(epoch)
    return [torch.cat(views) for views in zip(*loader)]


def test_views_have_their_sizes_and_are_normalised():
    views = next(iter(batches(Numbered(20), crops=CROPS[:1] + CROPS[2:], colour=PLAIN)))
    assert [tuple(view.shape) for view in views] == [(10, 1, 8, 8), (10, 1, 4, 6)]
    assert all(view.dtype == torch.float32 for view in views)
    values = views[0][:, 0, 0, 0] * 0.25 + 0.5
    assert torch.allclose(values * 255, (values * 255).round(), atol=1e-3) and values.max() < 20 / 255


def test_draws_follow_from_seed_epoch_and_index():
    data = Digits('validation')
    first = all_of(batches(data), 3)
    torch.rand(5)
    for same in (all_of(batches(data), 3), all_of(batches(data, workers=2), 3)):
        assert all(torch.equal(a, b) for a, b in zip(first, same))
    for other in (all_of(batches(data), 4), all_of(batches(data, seed=1), 3)):
        assert not any(torch.equal(a, b) for a, b in zip(first, other))
    views = MultiCrop(data, CROPS, Colour(), 0)
    one = views[5]
    views.epoch = 1
    assert not torch.equal(one[0], views[5][0]) and not torch.equal(one[0], one[1])


def test_draws_leave_the_global_stream():
    views = MultiCrop(Digits('validation'), CROPS, Colour(), 0)
    expected = torch.manual_seed(3) and torch.rand(2)
    torch.manual_seed(3)
    views[0]
    assert torch.equal(torch.rand(2), expected)


def test_processes_share_each_update():
    """The images of an update are those of one process with the whole batch, with the same views."""
    data = Digits('validation')
    whole = list(batches(data, 20))
    parts = [list(batches(data, 10, World(CPU, rank, 2))) for rank in range(2)]
    assert len(whole) == len(parts[0]) == len(parts[1]) == 14
    for together, *shares in zip(whole, *parts):
        for view, *share in zip(together, *shares):
            assert torch.equal(view, torch.stack(share, dim=1).flatten(0, 1))


def test_an_epoch_sees_every_image_once():
    loader = batches(Numbered(30), crops=CROPS[:1], colour=PLAIN)
    for epoch in range(2):
        pixels = (all_of(loader, epoch)[0][:, 0, 0, 0] * 0.25 + 0.5) * 255
        assert sorted(pixels.round().int().tolist()) == list(range(30))


def test_too_few_images_and_streams_are_refused():
    with pytest.raises(ConfigError, match=r'got 11 for each of 2 process\(es\), more than the 20 images'):
        batches(Numbered(20), 11, World(CPU, 0, 2))
    with pytest.raises(ConfigError, match='got a stream'):
        batches(iter([]))


@pytest.mark.parametrize('mode', ['L', 'RGB'])
def test_colour_does_what_it_says(mode):
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4).convert(mode)
    whole = Crop((8, 8), (1.0, 1.0))

    def view(crop=whole, **values):
        torch.manual_seed(1)
        transform = view_transform(crop, Colour(**{**vars(PLAIN), **values}))
        transform.transforms[0].ratio = (1.0, 1.0)
        return transform(image).int()

    plain = view()
    assert plain.shape == (len(mode), 8, 8) and torch.equal(plain[0], torch.arange(64).view(8, 8).int() * 4)
    assert torch.equal(view(hflip=1.0), plain.flip(-1))
    solarized = view(Crop((8, 8), (1.0, 1.0), solarize_prob=1.0))
    assert torch.equal(solarized, torch.where(plain >= 128, 255 - plain, plain))
    assert not torch.equal(view(jitter=(0.4, 0.4, 0.2, 0.1), jitter_prob=1.0), plain)
    blurred = view(Crop((8, 8), (1.0, 1.0), blur_prob=1.0))
    assert not torch.equal(blurred, plain) and blurred.float().std() < plain.float().std()


def test_blur_radius_is_random():
    image = Image.fromarray(np.eye(8, dtype=np.uint8) * 255)
    results = {Blur((0.1, 2.0))(image).tobytes() for _ in range(4)}
    assert len(results) == 4 and Blur((0.0, 0.0))(image).tobytes() == image.tobytes()


def test_sizes_must_fit_the_backbone():
    check_sizes([Crop((8, 12), (0.1, 1))], (4, 4), True, (16, 16))
    with pytest.raises(ConfigError, match='expected multiples of the patch size'):
        check_sizes([Crop((8, 10), (0.1, 1))], (4, 4), True, (16, 16))
    with pytest.raises(ConfigError, match='without dynamic_img_size'):
        check_sizes([Crop((8, 8), (0.1, 1))], (4, 4), False, (16, 16))


# Fashion-MNIST


def write_idx(path, array):
    head = b'\x00\x00\x08' + bytes([array.ndim]) + np.array(array.shape, '>i4').tobytes()
    path.write_bytes(gzip.compress(head + array.tobytes()))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A set of the shape of Fashion-MNIST: image i of `train` has i in its first two pixels."""
    for name, count in (('train', 60000), ('t10k', 10000)):
        images = np.zeros((count, 2, 2), np.uint8)
        images[:, 0, 0], images[:, 0, 1] = np.arange(count) // 256, np.arange(count) % 256
        write_idx(tmp_path / f'{name}-images-idx3-ubyte.gz', images)
        write_idx(tmp_path / f'{name}-labels-idx1-ubyte.gz', (np.arange(count) % 10).astype(np.uint8))
    monkeypatch.setattr(fashion, '_folders', lambda: [tmp_path / 'nowhere', tmp_path])
    fashion._load.cache_clear()
    yield tmp_path
    fashion._load.cache_clear()


def test_fashion_splits(folder):
    splits = {}
    for name, size in (('train', 50000), ('validation', 10000), ('trainval', 60000), ('test', 10000)):
        images, labels = fashion.arrays(name)
        number = images[:, 0, 0].astype(int) * 256 + images[:, 0, 1]
        assert len(images) == size and np.array_equal(labels, number % 10)
        splits[name] = number
    assert not set(splits['train']) & set(splits['validation'])
    assert np.array_equal(np.concatenate([splits['train'], splits['validation']]), splits['trainval'])
    assert np.array_equal(splits['test'], np.arange(10000))
    assert np.array_equal(fashion.arrays('train[:7]')[0], fashion.arrays('train')[0][:7])
    assert not np.array_equal(fashion.arrays('train[:7]', 1)[0], fashion.arrays('train[:7]')[0])
    image, label = fashion.Fashion('validation[:5]')[4]
    assert image.mode == 'L' and label == splits['validation'][4] % 10


@pytest.mark.parametrize('split', ['valid', 'train[5:]', 'train[:0]', 'test[:10001]', ''])
def test_fashion_refuses_other_splits(folder, split):
    with pytest.raises(ValueError, match='split: got'):
        fashion.arrays(split)


def test_a_broken_file_is_refused(tmp_path):
    path = tmp_path / 'x.gz'
    write_idx(path, np.zeros((3, 2), np.uint8))
    assert fashion.read_idx(path).shape == (3, 2)
    data = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(data[:-1]))
    with pytest.raises(ValueError, match=r'got 5 values; expected \(3, 2\)'):
        fashion.read_idx(path)
    path.write_bytes(gzip.compress(b'no idx file at all'))
    with pytest.raises(ValueError, match='expected an IDX file'):
        fashion.read_idx(path)


def test_digits_stand_in(tmp_path, monkeypatch, caplog):
    import torchvision

    def offline(*args, **kwargs):
        raise RuntimeError('no connection')

    monkeypatch.setattr(fashion, '_folders', lambda: [tmp_path])
    monkeypatch.setattr(torchvision.datasets, 'FashionMNIST', offline)
    fashion._load.cache_clear()
    assert fashion.arrays('train[:5000]')[0].shape == (1000, 8, 8)  # as many as there are
    assert fashion.arrays('trainval')[0].shape == (1297, 8, 8)
    assert 'no connection' in caplog.text and 'the digits stand in' in caplog.text
    fashion._load.cache_clear()
