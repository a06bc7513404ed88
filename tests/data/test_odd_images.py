"""Folders of images as people have them: broken, of any mode, without a class, without a split, too few."""

import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from violin_timm.data import datasets
from violin_timm.engine.config import ConfigError, settings
from violin_timm.engine.distributed import World
from violin_timm.engine.stopping import TrainingError
from violin_timm.recipes import supervised

CPU = World(torch.device('cpu'))
CONFIG = {'input_size': (3, 8, 8), 'mean': (0.5,) * 3, 'std': (0.5,) * 3, 'interpolation': 'nearest', 'crop_pct': 1.0,
          'crop_mode': 'center'}  # fmt: skip
GREY = {**CONFIG, 'input_size': (1, 8, 8), 'mean': (0.5,), 'std': (0.5,)}


def draw(path, mode='RGB', value=100, side=8):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.full((side, side, 3), value, np.uint8))
    (image.quantize(4) if mode == 'P' else image.convert(mode)).save(path)


@pytest.fixture
def folder(tmp_path):
    """Three classes with two images each to train on; `bird` and `dog`, but no `cat`, to validate."""
    for split, classes in (('train', ('bird', 'cat', 'dog')), ('validation', ('bird', 'dog'))):
        for name in classes:
            for number in range(2):
                draw(tmp_path / 'images' / split / name / f'{number}.png')
    return tmp_path / 'images'


def make(folder, **values):
    base = {
        'model': 'violin_pixel_nano', 'model_kwargs': {'depth': 1, 'embed_dim': 16, 'num_heads': 2}, 'in_chans': 3,
        'num_classes': 3, 'data_dir': str(folder), 'device': 'cpu', 'batch_size': 2, 'workers': 0, 'epochs': 1,
        'warmup_epochs': 0, 'opt': 'sgd', 'lr': 0.01, 'output': str(folder.parent / 'output'), 'experiment': 'run',
    }  # fmt: skip
    return settings(**{**base, **values})


def splits(args, channels=3):
    train = datasets.create_dataset(args, 'train', channels, training=True)
    return train, datasets.create_dataset(args, 'validation', channels, classes=train.classes)


def cut(path):
    """A file as an interrupted copy leaves it."""
    Image.fromarray(np.random.RandomState(0).randint(0, 255, (64, 64, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:900])


@pytest.mark.parametrize('suffix', ['png', 'jpg'])
def test_a_truncated_image_is_named_and_replaced(folder, caplog, suffix):
    broken = folder / 'train' / 'cat' / f'0.{suffix}'
    (folder / 'train' / 'cat' / '0.png').unlink()
    cut(broken)
    train, _ = splits(make(folder))
    labels = [train[index][1] for index in range(len(train))]
    assert len(train) == 6 and sorted(labels) == [0, 0, 1, 1, 2, 2]
    assert f'{broken} cannot be read as an image' in caplog.text and caplog.text.count('cannot') == 1


@pytest.mark.parametrize('workers', [0, 1])
def test_a_truncated_image_stops_the_run_where_so_asked(folder, workers):
    broken = folder / 'train' / 'cat' / '0.png'
    cut(broken)
    with pytest.raises(TrainingError, match=f'{broken} cannot be read .*--bad-images skip goes on'):
        supervised.run(make(folder, bad_images='stop', workers=workers, batch_size=6))


def test_nothing_but_broken_images(folder):
    for path in (folder / 'train').rglob('*.png'):
        path.write_bytes(b'')
    with pytest.raises(TrainingError, match=r'10 images in a row cannot be read, the last of them .*\.png'):
        supervised.run(make(folder, batch_size=6))


@pytest.mark.parametrize('dataset', ['', 'torch/image_folder', 'tar'])
def test_a_split_without_a_class_keeps_the_labels(folder, caplog, dataset):
    """On its own it would number its two classes 0 and 1."""
    if dataset == 'tar':
        (folder.parent / 'tars').mkdir()
        for split in ('train', 'validation'):
            with tarfile.open(folder.parent / 'tars' / f'{split}.tar', 'w') as tar:
                tar.add(folder / split, arcname='.')
        folder, dataset = folder.parent / 'tars', ''
    train, validation = splits(make(folder, dataset=dataset))
    assert train.classes == validation.classes == {'bird': 0, 'cat': 1, 'dog': 2}
    assert [validation[index][1] for index in range(4)] == [0, 0, 2, 2]
    assert "split 'validation' has no images of 1 classes, such as 'cat'" in caplog.text


def test_a_split_with_a_class_of_its_own(folder):
    draw(folder / 'validation' / 'zebra' / '0.png')
    with pytest.raises(ConfigError, match="class_map: split 'validation' has the class 'zebra'"):
        splits(make(folder))


def test_a_class_map_decides(folder):
    path = folder.parent / 'classes.txt'
    path.write_text('dog\nbird\n')
    train, validation = splits(make(folder, class_map=str(path)))
    assert [train[index][1] for index in range(len(train))] == [1, 1, 0, 0]  # and the cats are left out
    assert [validation[index][1] for index in range(4)] == [1, 1, 0, 0]
    with pytest.raises(ConfigError, match='Cannot locate specified class map file'):
        splits(make(folder, class_map='none.txt'))


def test_more_classes_than_the_model_has(folder):
    with pytest.raises(ConfigError, match='num_classes: the model has 2, the data set 3'):
        supervised.run(make(folder, num_classes=2))


def test_no_validation_split(folder):
    """timm would validate on the folder above, that is on the training images."""
    for path in sorted((folder / 'validation').rglob('*'), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (folder / 'validation').rmdir()
    with pytest.raises(
        ConfigError, match=r"val_split: got 'validation', but .* only train; .* or --val-split '' for none"
    ):
        supervised.run(make(folder))
    result = supervised.run(make(folder, val_split=''))
    assert result['best_by'] == 'train_loss' and result['best_epoch'] == 0 and result['validation'] == {}


def test_names_of_splits(folder):
    (folder / 'validation').rename(folder / 'val')
    assert len(splits(make(folder))[1]) == 4
    with pytest.raises(ConfigError, match=r"train_split: got 'trian', but .* only train, val; "):
        datasets.create_dataset(make(folder), 'trian', 3, training=True)
    assert len(datasets.create_dataset(make(folder / 'train'), '.', 3, training=True)) == 6
    with tarfile.open(folder / 'one.tar', 'w') as tar:
        tar.add(folder / 'train', arcname='.')
    assert len(datasets.create_dataset(make(folder / 'one.tar'), 'train', 3, training=True)) == 6
    with pytest.raises(ConfigError, match=r'val_split: .* data_dir is one file'):
        datasets.create_dataset(make(folder / 'one.tar'), 'validation', 3)


def test_no_images_at_all(folder):
    (folder / 'test').mkdir()
    with pytest.raises(ConfigError, match="split 'test', cannot be opened: Found 0 images"):
        datasets.create_dataset(make(folder), 'test', 3)


def test_fewer_images_than_a_batch(folder):
    with pytest.raises(ConfigError, match=r'batch_size: got 7 for each of 1 process.*more than the 6 images of split'):
        supervised.run(make(folder, batch_size=7))
    result = supervised.run(make(folder, batch_size=6, validation_batch_size=50))
    assert 0 <= result['validation']['top1'] <= 100


def test_odd_batches_with_mixup(folder):
    with pytest.raises(ConfigError, match='batch_size: got 3; mixup and cutmix pair images, so it must be even'):
        supervised.run(make(folder, batch_size=3, mixup=0.5))
    # five images in batches of two: the fifth is left out, and validation may end in an odd batch
    (folder / 'train' / 'cat' / '0.png').unlink()
    (folder / 'validation' / 'dog' / '0.png').unlink()
    assert supervised.run(make(folder, batch_size=2, mixup=0.5))['validation']['loss'] > 0


@pytest.mark.parametrize('mode', ['L', 'LA', 'P', '1', 'RGBA', 'CMYK', 'I;16', 'RGB'])
def test_images_of_any_mode(folder, mode):
    """All become what the model takes, colour or grey, in one batch; a grey of 200 keeps its value."""
    path = folder / 'train' / 'cat' / ('0.jpg' if mode == 'CMYK' else '0.png')
    (folder / 'train' / 'cat' / '0.png').unlink()
    if mode == 'I;16':
        Image.fromarray(np.full((8, 8), 200 * 257, np.uint16)).save(path)
    else:
        draw(path, mode, 200)
    value = 255 if mode == '1' else 200
    for config, channels in ((CONFIG, 3), (GREY, 1)):
        data = datasets.create_dataset(make(folder), 'train', channels)
        index = next(i for i in range(6) if data.path(i).endswith(f'cat/{path.name}'))
        images, _ = next(iter(datasets.evaluation_batches(make(folder, batch_size=6), data, config, CPU)))
        assert images.shape == (6, channels, 8, 8)
        if mode != '1':  # dithered
            assert ((images[index] * 0.5 + 0.5) * 255 - value).abs().max() <= 2


@pytest.mark.parametrize('channels', [1, 4])
def test_models_of_one_and_of_four_channels_train(folder, channels):
    draw(folder / 'train' / 'cat' / '0.png', 'RGBA')
    result = supervised.run(make(folder, in_chans=channels, batch_size=6, mixup=0.5))
    assert torch.isfinite(torch.tensor(result['validation']['loss']))


def test_torchvisions_grey_sets_and_colour_models(folder):
    """timm leaves those in the mode that they have."""
    for path in folder.rglob('*.png'):
        draw(path, 'L')
    data = datasets.create_dataset(make(folder, dataset='torch/image_folder'), 'train', 1)
    images, _ = next(iter(datasets.evaluation_batches(make(folder), data, GREY, CPU)))
    assert images.shape == (2, 1, 8, 8)


@pytest.mark.parametrize(
    ('channels', 'mode', 'message'),
    [
        (2, None, 'in_chans: the model takes 2 channels'),
        (1, 'RGB', 'images of mode RGB have 3; --in-chans 3'),
        (3, 'rgb', "input_img_mode: got 'rgb'; expected a PIL mode such as L, RGB, RGBA"),
    ],
)
def test_channels_that_images_have_not(folder, channels, mode, message):
    with pytest.raises(ConfigError, match=message):
        datasets.create_dataset(make(folder, input_img_mode=mode), 'train', channels)
