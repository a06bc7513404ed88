"""Whole runs of DINO on the digits, with models of a few thousand weights."""

import csv
import json
import math
import subprocess
import sys

import pytest
import timm
import torch

from violin_timm.engine.checkpoints import LAST
from violin_timm.engine.config import PACKAGE, ConfigError
from violin_timm.engine.distributed import World
from violin_timm.recipes import dino, dino_loss, dino_parts

TINY = {
    'patch_size': 2, 'embed_dim': 16, 'depth': 2, 'num_heads': 2, 'dynamic_img_size': True,
    'pos_embed_resample': 'dino',
}  # fmt: skip


def load(folder):
    return torch.load(folder / LAST, weights_only=True)


def rows(folder):
    with open(folder / 'summary.csv', newline='') as file:
        return list(csv.DictReader(file))


def assert_same_run(one, other):
    """Equal to the last bit: both backbones, heads, centre, optimizer, and the log."""
    states = load(one), load(other)
    for key in ('state_dict', 'state_dict_ema', 'task_state', 'task_state_ema', 'optimizer', 'epoch'):
        flat = [torch.utils._pytree.tree_flatten(state[key])[0] for state in states]
        assert len(flat[0]) == len(flat[1])
        for a, b in zip(*flat):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, key
    assert rows(one) == rows(other)


def prepared(args):
    return dino.prepare(args, World(torch.device('cpu')))


def test_run_leaves_everything_and_timm_loads_the_teacher(dino_args):
    result = dino.run(dino_args(val_split='validation', evaluators=['knn', 'logistic'], k=[5], eval_interval=2))
    folder = result.pop('folder')
    assert json.loads((folder / 'result.json').read_text()) == result
    assert set(result['teacher']) == {'knn5', 'logistic'} == set(result['untrained']) == set(result['pixels'])
    assert result['pixels']['knn5'] > 90 and result['teacher']['knn5'] > 20
    table = rows(folder)
    assert [row['eval_knn5'] != '' for row in table] == [False, True]
    assert all(0 < float(row['train_spread']) < 1 and float(row['train_entropy']) < math.log(32) for row in table)

    state = load(folder)
    model = timm.create_model(
        'violin_dino_small', checkpoint_path=str(folder / LAST), num_classes=0, img_size=8, in_chans=1, **TINY
    )
    assert set(model.state_dict()) == set(state['state_dict_ema']) == set(state['state_dict'])
    for key, value in model.state_dict().items():
        assert torch.equal(value, state['state_dict_ema'][key])
    assert any(not torch.equal(state['state_dict_ema'][key], value) for key, value in state['state_dict'].items())
    assert set(state['task_state_ema']) == {'head', 'center'} and state['task_state_ema']['center'].abs().max() > 0


def test_resume_is_exact(dino_args, monkeypatch):
    values = {'epochs': 3, 'freeze_last_layer': 2, 'jitter': [0.4, 0.4, 0, 0], 'norm_last_layer': False}
    whole = dino.run(dino_args('whole', **values))['folder']
    real, calls = dino_parts.DinoStepper.step, []

    def interrupt(self, *args):
        calls.append(1)
        if len(calls) == 12:  # within the second of epochs of 8 updates
            raise KeyboardInterrupt
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(dino_parts.DinoStepper, 'step', interrupt)
        with pytest.raises(KeyboardInterrupt):
            dino.run(dino_args('cut', resume='auto', **values))
    cut = whole.parent / 'cut'
    assert load(cut)['epoch'] == 0
    torch.rand(7)  # another process would have other random numbers behind it
    dino.run(dino_args('cut', resume='auto', **values))
    assert_same_run(whole, cut)
    other = dino.run(dino_args('other', seed=1, **values))['folder']
    with pytest.raises(AssertionError):
        assert_same_run(whole, other)


def test_baselines_and_result_survive_a_resume(dino_args):
    values = {'val_split': 'validation', 'eval_interval': 1}
    first = dino.run(dino_args(stop_epoch=1, **values))
    second = dino.run(dino_args(resume='auto', **values))
    assert second['untrained'] == first['untrained'] and second['pixels'] == first['pixels']
    again = dino.run(dino_args(resume='auto', **values))
    assert again['teacher'] == second['teacher'] and len(rows(again['folder'])) == 2


def test_a_checkpoint_without_heads_is_no_run(dino_args, tmp_path):
    model = timm.create_model('violin_dino_small', num_classes=0, img_size=8, in_chans=1, **TINY)
    torch.save({'state_dict': model.state_dict()}, tmp_path / 'bare.pth')
    with pytest.raises(ConfigError, match='no projection head'):
        dino.run(dino_args(resume=str(tmp_path / 'bare.pth')))
    assert prepared(dino_args(initial_checkpoint=str(tmp_path / 'bare.pth'))).task.student.backbone


@pytest.mark.parametrize('processes', [2])
def test_two_processes_make_the_same_run(dino_args, tmp_path, processes, dino_base):
    """Three updates on the same 1000 images, an epoch each; on the way DDP, the centre's exchange and k-NN's."""
    values = {
        'epochs': 3, 'batch_size': 1000 // processes, 'drop_path': 0.0, 'val_split': 'validation', 'eval_interval': 3,
        'model_kwargs': [f'{key}={value}' for key, value in TINY.items()],
    }  # fmt: skip
    argv = []
    for key, value in {**dino_base, **values, 'output': tmp_path, 'experiment': 'many'}.items():
        argv += ['--' + key.replace('_', '-'), *map(str, value if isinstance(value, list) else [value])]
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(processes)]
    done = subprocess.run(
        [*command, '-m', 'violin_timm', 'dino', *argv], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    values.update(model_kwargs=TINY, batch_size=1000)
    one = dino.run(dino_args('one', **values))
    many = json.loads((tmp_path / 'many' / 'result.json').read_text())
    for a, b in zip(rows(one['folder']), rows(tmp_path / 'many')):
        assert float(a['train_loss']) == pytest.approx(float(b['train_loss']), abs=1e-4)
    losses = [float(row['train_loss']) for row in rows(one['folder'])]
    assert len(losses) == 3 and len(set(losses)) == 3
    assert many['teacher']['knn10'] == pytest.approx(one['teacher']['knn10'], abs=1)
    states = load(one['folder']), load(tmp_path / 'many')
    for key in ('state_dict', 'state_dict_ema'):
        for name, value in states[0][key].items():
            assert torch.allclose(value, states[1][key][name], atol=2e-3), name
    assert torch.allclose(*(state['task_state_ema']['center'] for state in states), atol=1e-5)


@pytest.mark.parametrize(
    'values',
    [
        {'amp': True, 'amp_dtype': 'bfloat16'},
        {'model': 'vit_small_patch16_224', 'model_kwargs': {k: v for k, v in TINY.items() if 'resample' not in k}},
        {'model_kwargs': {**TINY, 'mask': 'none', 'alpha': 'none'}},
        {'model_kwargs': {**TINY, 'class_token': False}, 'global_number': 3, 'local_number': [0]},
        {'global_number': 1, 'clip_mode': 'norm', 'local_size': [4, 6], 'local_number': [1, 2]},
        {'workers': 1, 'head_layers': 1, 'clip_grad': None, 'warmup_epochs': 1, 'save_epochs': [1]},
    ],
    ids=['amp', 'plain timm', 'plain twin', 'GAP, three global views', 'one global view', 'workers'],
)
def test_variants_train(dino_args, values):
    folder = dino.run(dino_args(**values))['folder']
    state = load(folder)
    assert state['epoch'] == 1 and all(value.isfinite().all() for value in state['state_dict'].values())
    assert len(rows(folder)) == 2


def test_a_loss_that_is_no_number_stops_the_run(dino_args, monkeypatch):
    real, calls = dino_loss.DinoLoss.forward, []

    def forward(self, *args):
        calls.append(1)
        return real(self, *args) * (math.nan if len(calls) == 10 else 1)

    monkeypatch.setattr(dino_loss.DinoLoss, 'forward', forward)
    with pytest.raises(dino.TrainingError, match=r'nan in epoch 2, update 10; stopped\. Last good checkpoint: .*last'):
        dino.run(dino_args())
