"""The supervised recipe, end to end on the digits with a model of a few thousand weights."""

import csv
import json
import math

import pytest
import torch
import yaml
from timm import create_model

from violin_timm.data import datasets
from violin_timm.engine import optim
from violin_timm.engine.checkpoints import BEST, LAST, Saver
from violin_timm.engine.config import ConfigError, parse, settings
from violin_timm.engine.distributed import World, seed_epoch
from violin_timm.recipes import supervised

TINY = {'patch_size': 4, 'embed_dim': 16, 'depth': 1, 'num_heads': 2}


@pytest.fixture
def make(tmp_path):
    """Settings of a short run; a plain timm ViT, so that these tests are about the training alone."""

    def _make(experiment='run', **values):
        base = {
            'model': 'vit_tiny_patch16_224', 'model_kwargs': TINY, 'img_size': 8, 'in_chans': 1, 'num_classes': 10,
            'dataset': 'digits', 'device': 'cpu', 'workers': 0, 'batch_size': 50, 'crop_pct': 1.0, 'opt': 'adamw',
            'lr': 3e-3, 'epochs': 2, 'warmup_epochs': 0, 'gp': 'avg', 'hflip': 0.0, 'train_crop_mode': 'rkrr',
            'scale': [0.8, 1.2], 'output': str(tmp_path), 'experiment': experiment,
        }  # fmt: skip
        return settings(**{**base, **values})

    return _make


def load(folder, name=LAST):
    return torch.load(folder / name, weights_only=True)


def rows(folder):
    with open(folder / 'summary.csv', newline='') as file:
        return list(csv.DictReader(file))


def assert_same_run(one, other):
    """Equal to the last bit: weights, moving average, optimizer, and the log."""
    states = load(one), load(other)
    for key in ('state_dict', 'state_dict_ema', 'optimizer', 'epoch', 'metric'):
        flat = [torch.utils._pytree.tree_flatten(state.get(key))[0] for state in states]
        assert len(flat[0]) == len(flat[1])
        for a, b in zip(*flat):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, key
    assert rows(one) == rows(other)
    assert load(one, BEST)['epoch'] == load(other, BEST)['epoch']


def test_training_learns_and_leaves_everything(make):
    args = make(epochs=4, test_split='test', no_aug=True)
    result = supervised.run(args)
    folder = result.pop('folder')
    names = {path.name for path in folder.iterdir()}
    assert {'args.yaml', 'summary.csv', LAST, BEST, 'result.json'} <= names
    losses = [float(row['train_loss']) for row in rows(folder)]
    assert losses[0] < math.log(10) + 0.1 and losses[-1] < losses[0] - 0.1
    assert json.loads((folder / 'result.json').read_text()) == result
    assert result['test']['top1'] > 25 and result['baselines']['3_nearest_neighbours'] > 95
    assert (result['seed'], result['epochs'], result['best_by']) == (42, 4, 'top1')
    assert result['parameters'] == sum(p.numel() for p in create_model(args.model, **vars_of(args)).parameters())
    assert result['best_metric'] == max(float(row['eval_top1']) for row in rows(folder))


def vars_of(args):
    return {'img_size': 8, 'in_chans': 1, 'num_classes': 10, 'global_pool': 'avg', **args.model_kwargs}


def test_one_epoch_reduces_the_loss(make):
    before = supervised.run(make(eval_only=True))['validation']['loss']
    after = supervised.run(make(epochs=1))['validation']['loss']
    assert after < before - 0.01


def test_test_split_is_measured_on_the_best_checkpoint(make, monkeypatch):
    real = Saver.save_checkpoint
    monkeypatch.setattr(Saver, 'save_checkpoint', lambda self, epoch, metric: real(self, epoch, -float(epoch)))
    result = supervised.run(make(test_split='test'))
    folder = result['folder']
    assert result['best_epoch'] == 0 and load(folder, BEST)['epoch'] == 0
    best, last = (
        supervised.run(make(eval_only=True, resume=str(folder / name), test_split='test')) for name in (BEST, LAST)
    )
    assert best['test'] == result['test'] != last['test']
    assert last['validation'] == result['validation']


def test_each_epoch_is_seeded(make, monkeypatch):
    real, seen = supervised.distributed.seed_epoch, []
    monkeypatch.setattr(supervised.distributed, 'seed_epoch', lambda *key: seen.append(key) or real(*key))
    supervised.run(make(seed=5))
    assert seen == [(5, 0, 0), (5, 1, 0)]


@pytest.mark.parametrize('clip', [None, 0.05])
def test_an_epoch_equals_the_loop_written_out(make, clip):
    """Plain PyTorch on the same batches: forward, backward, clip, step, in that order."""
    args = make(epochs=1, opt='momentum', lr=0.1, weight_decay=0.0, clip_grad=clip)
    folder = supervised.run(args)['folder']

    model = create_model(args.model, **vars_of(args))
    model.load_state_dict(create_state(args))
    data = datasets.create_dataset(args, 'train', 1, training=True)
    world = World(torch.device('cpu'))
    batches = datasets.training_batches(args, data, supervised.build.data_config(args, model), 10, world)
    seed_epoch(args.seed, 0, 0)
    batches.set_epoch(0, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.train()
    for images, targets in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), targets, label_smoothing=0.1).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    for key, value in load(folder)['state_dict'].items():
        assert torch.allclose(value, model.state_dict()[key], atol=1e-5), key


def test_args_yaml_reruns_the_run(make):
    args = make(model_ema=True, mixup=0.5, drop_path=0.1)
    first = supervised.run(args)['folder']
    second = supervised.run(parse(['--config', str(first / 'args.yaml')]))['folder']
    assert second.name == 'run-1'  # beside the first, not over it
    assert_same_run(first, second)
    other = supervised.run(make('other', model_ema=True, mixup=0.5, drop_path=0.1, seed=1))['folder']
    with pytest.raises(AssertionError):
        assert_same_run(first, other)


HARD = {'model_ema': True, 'mixup': 0.5, 'cutmix': 0.5, 'drop_path': 0.1, 'reprob': 0.3, 'grad_accum_steps': 3}


@pytest.mark.parametrize(
    'values',
    [HARD, {'sched_on_updates': True, 'clip_grad': 1.0, 'workers': 1, 'mixup_off_epoch': 1, 'mixup': 0.3}],
    ids=['everything random', 'workers'],
)
def test_resume_is_exact(make, monkeypatch, values):
    values = {**values, 'epochs': 3}
    whole = supervised.run(make('whole', **values))['folder']

    real = optim.Stepper.backward
    calls = []

    def interrupt(self, loss, update):
        calls.append(loss)
        if len(calls) == 25:  # within the second of epochs of 20 batches
            raise KeyboardInterrupt
        real(self, loss, update)

    with monkeypatch.context() as patch:
        patch.setattr(optim.Stepper, 'backward', interrupt)
        with pytest.raises(KeyboardInterrupt):
            supervised.run(make('cut', resume='auto', **values))
    cut = whole.parent / 'cut'
    assert load(cut)['epoch'] == 0
    torch.rand(7)  # another process would have other random numbers behind it
    supervised.run(make('cut', resume='auto', **values))
    assert_same_run(whole, cut)


def test_resume_after_a_row_without_its_checkpoint(make, monkeypatch):
    """Killed between the row in summary.csv and the checkpoint it stands for."""
    whole = supervised.run(make('whole'))['folder']
    real = Saver.save_checkpoint

    def interrupt(self, epoch, metric):
        if epoch == 1:
            raise KeyboardInterrupt
        return real(self, epoch, metric)

    with monkeypatch.context() as patch:
        patch.setattr(Saver, 'save_checkpoint', interrupt)
        with pytest.raises(KeyboardInterrupt):
            supervised.run(make('cut'))
    assert len(rows(whole.parent / 'cut')) == 2
    supervised.run(make('cut', resume='auto'))
    assert_same_run(whole, whole.parent / 'cut')


def test_resuming_a_finished_run_changes_nothing(make):
    first = supervised.run(make(test_split='test'))
    before = load(first['folder'])
    again = supervised.run(make(test_split='test', resume='auto'))
    assert again == first and load(again['folder'])['epoch'] == before['epoch']
    assert len(rows(first['folder'])) == 2


def test_stop_epoch_leaves_the_schedule(make):
    whole = supervised.run(make('whole', epochs=3))['folder']
    part = supervised.run(make('part', epochs=3, stop_epoch=2))['folder']
    assert [row['lr'] for row in rows(part)] == [row['lr'] for row in rows(whole)][:2]
    supervised.run(make('part', epochs=3, resume='auto'))
    assert_same_run(whole, part)


def test_accumulation_equals_the_larger_batch(make):
    """One image more or less per update would show; dropout and mixing are off, so only rounding differs."""
    values = {'epochs': 1, 'no_aug': True, 'opt': 'momentum', 'lr': 0.1}
    large = supervised.run(make('large', batch_size=100, **values))['folder']
    small = supervised.run(make('small', batch_size=25, grad_accum_steps=4, **values))['folder']
    fresh = create_state(make())
    for key, value in load(large)['state_dict'].items():
        assert torch.allclose(value, load(small)['state_dict'][key], atol=1e-5), key
    assert not torch.equal(load(large)['state_dict']['head.weight'], fresh['head.weight'])


def create_state(args):
    torch.manual_seed(args.seed)
    return create_model(args.model, **vars_of(args)).state_dict()


def test_moving_average_is_logged_and_does_not_choose(make):
    args = make(epochs=3, model_ema=True, model_ema_decay=0.9, lr=1e-2)
    folder = supervised.run(args)['folder']
    table = rows(folder)
    assert {'eval_top1', 'eval_ema_top1', 'eval_loss', 'eval_ema_loss'} <= set(table[0])
    assert any(row['eval_top1'] != row['eval_ema_top1'] for row in table)
    plain, average = ([float(row[key]) for row in table] for key in ('eval_top1', 'eval_ema_top1'))
    assert load(folder, BEST)['metric'] == max(plain)
    folder = supervised.run(make('by', epochs=3, model_ema=True, model_ema_decay=0.9, lr=1e-2, best_by='ema'))['folder']
    assert load(folder, BEST)['metric'] == max(average)
    state = load(folder)
    assert any(not torch.equal(state['state_dict'][key], state['state_dict_ema'][key]) for key in state['state_dict'])


def test_weight_decay_groups(make):
    """What the model names, biases and 1-D parameters are not decayed; everything else is, once."""
    args = make(weight_decay=0.1, layer_decay=0.5)
    model = create_model(args.model, **vars_of(args))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for layer_decay in (None, 0.5):
        args.layer_decay = layer_decay
        groups = optim.create_optimizer(args, model, 1e-3).param_groups
        decayed = {names[id(p)] for group in groups if group['weight_decay'] for p in group['params']}
        free = {names[id(p)] for group in groups if not group['weight_decay'] for p in group['params']}
        assert {'pos_embed', 'fc_norm.bias', 'head.bias', 'blocks.0.norm1.weight'} <= free
        assert {'head.weight', 'blocks.0.attn.qkv.weight', 'patch_embed.proj.weight'} <= decayed
        assert not decayed & free and decayed | free == set(names.values())
        assert len({group.get('lr_scale', 1.0) for group in groups}) == (1 if layer_decay is None else 3)


def test_mask_parameters_are_not_decayed(make):
    args = make(model='violin_pixel_nano', model_kwargs={}, weight_decay=0.1)
    model = supervised.build.build_model(args)
    groups = optim.create_optimizer(args, model, 1e-3).param_groups
    free = {id(p) for group in groups if not group['weight_decay'] for p in group['params']}
    masks = [parameter for name, parameter in model.named_parameters() if '.decay.' in name]
    assert masks and all(id(parameter) in free for parameter in masks)


@pytest.mark.parametrize('where', ['training', 'validation'])
def test_a_loss_that_is_no_number_stops_the_run(make, tmp_path, monkeypatch, where):
    if where == 'training':
        real, calls = supervised.build.ClassificationTask.forward, []

        def forward(self, images, targets):
            calls.append(1)
            result = real(self, images, targets)
            return {**result, 'loss': result['loss'] * (math.nan if len(calls) == 28 else 1)}

        monkeypatch.setattr(supervised.build.ClassificationTask, 'forward', forward)
        message = 'loss is nan in epoch 2, update 28, batch 8; stopped. Last good checkpoint: .*last.pth.tar'
    else:
        real, calls = supervised.evaluate, []

        def evaluate(*args):
            calls.append(1)
            return {**real(*args), **({'loss': math.nan} if len(calls) == 2 else {})}

        monkeypatch.setattr(supervised, 'evaluate', evaluate)
        message = 'validation loss is nan in epoch 2.* Last good checkpoint: .*last.pth.tar'
    with pytest.raises(supervised.TrainingError, match=message):
        supervised.run(make(epochs=3))
    state = load(tmp_path / 'run')
    assert state['epoch'] == 0 and all(value.isfinite().all() for value in state['state_dict'].values())


def test_nothing_to_go_back_to(make):
    with pytest.raises(supervised.TrainingError, match='Last good checkpoint: none'):
        supervised.run(make(lr=1e30, opt='sgd'))


@pytest.mark.parametrize(
    'values',
    [
        {'amp': True, 'amp_dtype': 'bfloat16'},
        {'no_prefetcher': True, 'mixup': 0.5},
        {'bce_loss': True, 'smoothing': 0.0, 'mixup': 0.8, 'aa': '3a', 'aug_repeats': 3},
        {'aa': 'rand-m9-mstd0.5-inc1', 'reprob': 0.25},
        {'val_split': ''},
        {'channels_last': True, 'grad_checkpointing': True, 'clip_grad': 0.1, 'clip_mode': 'agc'},
        {'opt': 'lookahead_adamw', 'layer_decay': 0.7},
        {'model_ema': True, 'model_ema_force_cpu': True},
        {'val_interval': 2, 'save_epochs': [1]},
        {'sched': 'none', 'eval_metric': 'loss'},
    ],
    ids=lambda values: next(iter(values)),
)
def test_variants_train(make, values):
    folder = supervised.run(make(**values))['folder']
    state = load(folder)
    assert state['epoch'] == 1 and all(value.isfinite().all() for value in state['state_dict'].values())
    assert len(rows(folder)) == 2
    if 'save_epochs' in values:
        assert (folder / 'milestone-1.pth.tar').exists()


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ({'best_by': 'ema'}, "best_by: got 'ema'"),
        ({'bce_sum': True}, 'need bce_loss'),
        ({'stop_epoch': 3}, 'stop_epoch: got 3; the schedule has 2 epochs'),
        ({'drop_path': 0.1, 'model_kwargs': {'drop_path_rate': 0.2}}, 'model_kwargs: drop_path_rate'),
        ({'initial_checkpoint': '', 'val_split': 'valid'}, "split: got 'valid' for digits"),
        ({'sched': 'wsd', 'decay_epochs': 9.0}, 'sched: wsd schedule requires'),
    ],
)
def test_refused_before_any_work(make, tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        supervised.run(make(**values))
    assert list(tmp_path.iterdir()) == []


def test_continuing_with_other_settings_says_so(make, caplog):
    caplog.set_level('INFO')
    supervised.run(make(stop_epoch=1))
    supervised.run(make(resume='auto', weight_decay=0.5))
    assert 'weight_decay 2e-05 -> 0.5' in caplog.text


def test_progress_lines(make, caplog):
    caplog.set_level('INFO')
    supervised.run(make(epochs=1, log_interval=10))
    lines = [line for line in caplog.messages if 'images/s' in line]
    assert len(lines) == 2 and lines[1].startswith('epoch 1/1  update 20/20  loss ')
    assert all(part in lines[0] for part in ('lr 3.000e-03', 'waiting for data', 'left 0:00:0'))


def test_figure_is_drawn_at_the_end(make, monkeypatch):
    import sys
    import types

    seen = []
    viz = types.ModuleType('violin_timm.viz')
    viz.training_figure = lambda model, path: seen.append((model.training, path.parent.joinpath(BEST).exists()))
    monkeypatch.setitem(sys.modules, 'violin_timm.viz', viz)
    supervised.run(make(epochs=1))
    assert seen == []
    supervised.run(make('drawn', epochs=1, figure=True))
    assert seen == [(False, True)]


def test_shipped_config_trains(tmp_path):
    argv = ['--config', 'quick/digits.yaml', '--epochs', '1', '--warmup-epochs', '0', '--output', str(tmp_path)]
    result = supervised.run(parse(argv))
    assert result['model'] == 'violin_pixel_nano' and set(result['test']) == {'loss', 'top1', 'top5'}
    assert yaml.safe_load((result['folder'] / 'args.yaml').read_text())['epochs'] == 1
