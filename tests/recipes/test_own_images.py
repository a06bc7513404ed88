"""`violin finetune`: splits drawn from a folder or a timm data set, and the protocol on them."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from violin_timm import cli
from violin_timm.data.tensors import Streamed, load
from violin_timm.engine.config import ConfigError, settings
from violin_timm.recipes.finetune import UNREADABLE, Job, finetune
from violin_timm.recipes.finetune_build import model_of
from violin_timm.recipes.own_images import prepare, run
from violin_timm.recipes.own_images import test_split as split_of
from violin_timm.recipes.protocol_flags import FINETUNE
from violin_timm.recipes.protocol_workers import Images as Kept

SMALL = ('--model-kwargs', 'embed_dim=16', 'depth=1', 'num_heads=2', 'patch_size=4', '--img-size', '8')
QUICK = ('--epochs', '1', '--batch-size', '4', '--lrs', '1e-3', '--final-seeds', '0', '1', '--device', 'cpu')


@pytest.fixture
def folder(tmp_path):
    """A folder of three classes with 6, 8 and 10 images to train on, whose red is their class, and a test folder."""
    draw = np.random.default_rng(0)
    for split, counts in (('train', (6, 8, 10)), ('test', (2, 3, 1))):
        for label, count in enumerate(counts):
            place = tmp_path / 'pets' / split / 'abc'[label]
            place.mkdir(parents=True)
            for index in range(count):
                pixels = draw.integers(0, 256, (10, 12, 3), dtype=np.uint8)
                pixels[..., 0] = 100 * label
                Image.fromarray(pixels).save(place / f'{index}.png')
    return tmp_path / 'pets'


def source(folder, **values):
    given = {'data_dir': str(folder), 'model': 'violin_deit_tiny', 'workers': 0, **values}
    return prepare(settings(FINETUNE, **given))[1]


def drawn(folder, stage='final', seed=0, **values):
    """Indices of the two splits, and the labels of all training images."""
    own = source(folder, **values)
    first, second = own.open(own.tasks[0], stage, seed)
    return first.indices, second.indices, own


def test_tuning_holds_out_what_final_runs_learn_from(folder):
    learned, held_out, own = drawn(folder, 'tune', shots=5)
    both, tested, _ = drawn(folder, shots=5)
    assert sorted([*learned, *held_out]) == both and not set(learned) & set(held_out)
    assert Counter(own.labels[i] for i in both) == {0: 5, 1: 5, 2: 5}
    assert Counter(own.labels[i] for i in held_out) == {0: 1, 1: 1, 2: 1}
    assert tested == list(range(6)) and own.test is not None and own.tasks[0].classes == 3


def test_without_a_test_split_the_images_that_are_left_are_tested_on(folder):
    both, rest, own = drawn(folder / 'train', train_split='.', shots=5)
    assert own.test is None and sorted([*both, *rest]) == list(range(24)) and not set(both) & set(rest)
    with pytest.raises(ConfigError, match=r'test_split.*--shots'):
        drawn(folder / 'train', train_split='.')


def test_the_draw_is_the_seeds_and_may_be_each_runs_own(folder):
    first, other = drawn(folder, shots=3)[0], drawn(folder, shots=3, draw_seed=1)[0]
    assert first == drawn(folder, shots=3, seed=4)[0] != other
    assert other == drawn(folder, shots=3, seed=1, draw_per_seed=True)[0]
    one, two = (source(folder, shots=3, draw_per_seed=own) for own in (False, True))
    assert len({one.key(None, 'final', seed) for seed in range(5)}) == 1
    assert len({two.key(None, 'final', seed) for seed in range(5)}) == 5


def test_a_draw_of_each_run_is_not_tuned_on_what_others_test(folder):
    given = {'train_split': '.', 'shots': 3, 'draw_per_seed': True}
    with pytest.raises(ConfigError, match=r'draw_per_seed.*lrs'):
        source(folder / 'train', **given)
    assert source(folder / 'train', **given, lrs=[1e-3]) and source(folder, shots=3, draw_per_seed=True)


def test_an_image_that_cannot_be_read_is_left_out_and_none_takes_its_place(folder, caplog):
    for path in ('train/a/1.png', 'test/c/0.png'):
        (folder / path).write_bytes(b'no image')
    own = source(folder)
    job, images = Job('pets', 'plain', 'final', 1e-3, 0), Kept(own.args, own)
    train, tested = images.get(own.tasks[0], job, (8, 8), 'bicubic')
    assert train.labels.tolist().count(UNREADABLE) == tested.labels.tolist().count(UNREADABLE) == 1
    args = settings(FINETUNE, **{**vars(own.args), 'device': 'cpu', 'epochs': 1, 'batch_size': 4, 'pretrained': False})
    args.model_kwargs = {'embed_dim': 16, 'depth': 1, 'num_heads': 2, 'patch_size': 4, 'img_size': 8}
    result, predictions, _ = finetune(args, job, 3, lambda *size: (train, tested), torch.device('cpu'))
    assert result['images'] == {'train': 23, 'evaluated': 5} and len(predictions) == 5
    assert any('left out' in line and '1.png' in line for line in caplog.messages)
    streamed = Streamed(resized_for_testing(own), 0)
    again, same, _ = finetune(args, job, 3, lambda *size: (train, streamed), torch.device('cpu'))
    assert again['top1'] == result['top1'] and np.array_equal(same, predictions)
    with pytest.raises(ConfigError, match=r'label 2.*2 classes'):
        finetune(args, job, 2, lambda *size: (train, tested), torch.device('cpu'))


def resized_for_testing(own):
    """The test split at 8x8 pixels, as it is read where it is too large for memory."""
    split = own.open(own.tasks[0], 'final', 0)[1]
    return load(split, (8, 8), 'bicubic', limit=0).dataset


def test_labels_are_those_of_the_images(folder):
    own = source(folder)
    assert own.labels == [0] * 6 + [1] * 8 + [2] * 10
    for split in (own.train, own.test):
        for index, label in enumerate(split.labels()):
            image, given = split[index]
            assert given == label and np.asarray(image)[0, 0, 0] == 100 * label


@pytest.mark.parametrize('dataset', ['digits', 'fashion'])
def test_embedded_sets_list_their_labels(dataset):
    own = source(None, dataset=dataset, train_images=50, train_split='train[:200]' if dataset == 'fashion' else 'train')
    assert own.tasks[0].classes == 10 and own.labels == own.train.labels.tolist()


def test_a_class_that_only_the_training_split_has_keeps_its_number(folder):
    for image in (folder / 'test' / 'a').iterdir():
        image.unlink()
    (folder / 'test' / 'a').rmdir()
    own = source(folder)
    assert own.test.labels() == [1, 1, 1, 2] and own.tasks[0].classes == 3


def test_one_command_leaves_table_and_models(folder, tmp_path, capsys):
    argv = ['finetune', '--data-dir', str(folder), '--model', 'violin_deit_tiny', '--pretrained', 'off', *SMALL, *QUICK]
    argv += ['--workers', '0', '--threads', '1', '--output', str(tmp_path / 'out')]
    assert cli.main(argv) == 0
    root = tmp_path / 'out' / 'pets'
    assert (root / 'table.md').read_text() in capsys.readouterr().out
    models = sorted(root.rglob('model.pth.tar'))
    assert len(models) == 3 * 2
    for path in models:
        saved = torch.load(path, weights_only=True)
        model = timm.create_model(
            saved['arch'], checkpoint_path=str(path), **{**saved['args']['model_kwargs'], 'img_size': 8}
        )
        assert model.num_classes == 3
        result = json.loads((path.parent / 'result.json').read_text())
        assert result['images'] == {'train': 24, 'evaluated': 6} and result['task'] == 'pets'


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ({'shots': 7}, r'shots.*7.*6'),
        ({'shots': 3, 'train_images': 9}, 'shots'),
        ({'train_images': 2}, r'train_images.*2.*3'),
        ({'val_part': 1.0}, 'val_part'),
        ({'train_split': 'training_set'}, 'train_split'),
        ({'test_split': 'testing'}, 'test_split'),
        ({'test_split': 'train'}, r'test_split.*learned from'),
        ({'dataset': 'cifer'}, 'cifer'),
    ],
)
def test_a_draw_that_cannot_be_is_named(folder, values, message):
    with pytest.raises(ConfigError, match=message):
        drawn(folder, 'tune', **values)


def test_one_rate_needs_no_held_out_images(folder, tmp_path, capsys):
    argv = ['finetune', '--data-dir', str(folder), '--output', str(tmp_path), '--pretrained', 'off', *SMALL, *QUICK]
    argv += [
        '--model',
        'violin_deit_tiny',
        '--workers',
        '0',
        '--final-seeds',
        '0',
        '--only',
        'plain',
        '--val-part',
        '0',
    ]
    assert cli.main([*argv, '--batch-size', '25']) == 2
    assert '25, more than the 24' in capsys.readouterr().err
    assert cli.main([*argv, '--save-models', 'off']) == 0


def test_one_class_is_no_task(folder):
    (folder / 'one').mkdir()
    (folder / 'train' / 'a').rename(folder / 'one' / 'a')
    with pytest.raises(ConfigError, match='one class, a;'):
        source(folder / 'one', train_split='.')


def test_the_default_model_gives_way_to_the_one_that_weights_record(folder, tmp_path, monkeypatch):
    recorded = {'model': 'violin_deit_tiny', 'model_kwargs': {'depth': 1}}
    torch.save({'state_dict': {'cls_token': torch.zeros(1)}, 'args': recorded}, tmp_path / 'known.pth')
    torch.save({'cls_token': torch.zeros(1)}, tmp_path / 'bare.pth')
    monkeypatch.setattr('violin_timm.recipes.own_images.run_protocol', lambda args, prepare: model_of(args)[0])
    for file, given, expected in (
        ('known.pth', {}, 'violin_deit_tiny'),
        ('bare.pth', {}, 'violin_deit_small.fb_in1k'),
        ('known.pth', {'model': 'violin_deit_base'}, 'violin_deit_base'),
    ):
        assert run(settings(FINETUNE, data_dir=str(folder), pretrained_path=str(tmp_path / file), **given)) == expected


def test_finds_a_folder_to_test_on(folder):
    args = settings(FINETUNE, data_dir=str(folder))
    assert split_of(args) == 'test'
    (folder / 'test').rename(folder / 'val')
    assert split_of(args) == 'val' and split_of(settings(FINETUNE, data_dir=str(folder), test_split='train')) == 'train'
    assert split_of(settings(FINETUNE, dataset='digits')) == ''
    assert split_of(settings(FINETUNE, data_dir=str(folder), train_split='.')) == ''
    assert Path(folder / 'val').is_dir()
