"""DINO: recorded numbers, the pieces, and whole runs on the digits with models of a few thousand weights."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

from violin_timm.engine.checkpoints import LAST
from violin_timm.engine.config import PACKAGE, ConfigError, parse, settings
from violin_timm.engine.distributed import World
from violin_timm.models import bank, files
from violin_timm.recipes import dino, dino_build, dino_loss, dino_parts
from violin_timm.recipes.tables import DINO

TINY = {
    'patch_size': 2, 'embed_dim': 16, 'depth': 2, 'num_heads': 2, 'dynamic_img_size': True,
    'pos_embed_resample': 'dino',
}  # fmt: skip
BASE = {
    'model': 'violin_dino_small', 'model_kwargs': TINY, 'img_size': 8, 'in_chans': 1, 'mean': [0.3], 'std': [0.4],
    'dataset': 'digits', 'device': 'cpu', 'workers': 0, 'batch_size': 125, 'crop_pct': 1.0, 'local_size': [4],
    'local_number': [2], 'out_dim': 32, 'head_hidden_dim': 16, 'head_bottleneck_dim': 8, 'lr': 2e-3, 'epochs': 2,
    'warmup_epochs': 0, 'blur_prob': [0, 0, 0], 'jitter': [0, 0, 0, 0], 'drop_path': 0.1, 'freeze_last_layer': 0,
}  # fmt: skip


@pytest.fixture
def make(tmp_path):
    """Settings of a short run."""

    def _make(experiment='run', **values):
        return settings(DINO, **{**BASE, 'output': str(tmp_path), 'experiment': experiment, **values})

    return _make


@pytest.fixture(scope='module')
def recorded():
    folder = Path(__file__).parents[1] / 'golden'
    tensors = load_file(folder / 'dino_training_authors.safetensors')
    return tensors, json.loads((folder / 'dino_training_authors.json').read_text())


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


# recorded numbers


def test_recorded_losses_centres_and_gradient(recorded, close):
    tensors, about = recorded
    about = about['loss']
    loss = dino_loss.DinoLoss(about['out_dim'], about['student_temp'], about['center_momentum'])
    temps = dino_loss.temperature_schedule(
        about['warmup_teacher_temp'], about['teacher_temp'], about['warmup_teacher_temp_epochs'], about['epochs']
    )
    np.testing.assert_allclose(temps, about['teacher_temp_schedule'], rtol=1e-12)
    student = tensors['student'].clone().requires_grad_()
    for call, (epoch, expected) in enumerate(zip(about['evaluated_at_epochs'], about['losses'])):
        value = loss(student, loss.targets(tensors['teacher'], temps[epoch]), about['ncrops'], 2)
        loss.update_center(tensors['teacher'])
        assert value.item() == pytest.approx(expected, rel=1e-5)
        close(loss.center, tensors[f'center_after_{call + 1}'], 1e-5)
    loss(student, loss.targets(tensors['teacher'], temps[1]), about['ncrops'], 2).backward()
    close(student.grad, tensors['student_grad_epoch1_after4'], 1e-5)


def test_recorded_head(recorded, close):
    tensors, _ = recorded
    head = dino_parts.DinoHead(24, 32, hidden_dim=40, bottleneck_dim=16)
    head.load_state_dict({k.removeprefix('head/param/'): v for k, v in tensors.items() if k.startswith('head/param/')})
    close(head(tensors['head/x']), tensors['head/y'], 1e-5)


@pytest.mark.parametrize('name', ['cosine_scheduler', 'momentum_schedule'])
def test_recorded_schedules(recorded, name):
    about = recorded[1][name]
    a = {'warmup_epochs': 0, 'start_warmup_value': 0, **about['args']}
    values = dino_loss.cosine_schedule(
        a['base_value'], a['final_value'], a['epochs'], a['niter_per_ep'], a['warmup_epochs'], a['start_warmup_value']
    )
    np.testing.assert_allclose(values, about['values'], rtol=1e-12)


def test_recorded_clipping(recorded, close):
    tensors, about = recorded
    parameters = []
    for name in ('weight', 'bias'):
        parameters.append(nn.Parameter(torch.zeros_like(tensors[f'clip/{name}_before'])))
        parameters[-1].grad = tensors[f'clip/{name}_before'].clone()
    dino_loss.clip_each([*parameters, nn.Parameter(torch.zeros(1))], about['clip']['clip'])  # one without a gradient
    close(parameters[0].grad, tensors['clip/weight_after'], 1e-6)
    assert torch.equal(parameters[1].grad, tensors['clip/bias_after'])  # short enough: untouched


def test_recorded_backbone_on_crops_of_two_sizes(golden, close):
    tensors = load_file(golden('dino_model_authors.safetensors'))
    about = json.loads(golden('dino_model_authors.json').read_text())
    state = {k.removeprefix('param/'): v for k, v in tensors.items() if k.startswith('param/')}
    keys = ('img_size', 'patch_size', 'embed_dim', 'num_heads', 'depth')
    model, _ = files.build_and_load(
        {'teacher': {f'backbone.{key}': value for key, value in state.items()}}, 'violin_dino_small',
        **{key: about[key] for key in keys}, dynamic_img_size=True, pos_embed_resample='dino',
    )  # fmt: skip
    network = dino_parts.CropNetwork(model, nn.Identity())
    features, _ = network([tensors['x'], tensors['crop'], tensors['x']])
    for part, name in zip(features.chunk(3), ('y', 'y_crop', 'y_again')):
        close(part, tensors[name], 1e-5, name)


# pieces


def test_loss_is_the_mean_over_pairs():
    """Against the double loop of its definition, with one, two and three views of the teacher."""
    student, teacher = torch.randn(4 * 3, 5), torch.randn(3 * 3, 5)
    loss = dino_loss.DinoLoss(5)
    for views in (1, 2, 3):
        q = loss.targets(teacher[: views * 3], 0.05)
        log_p = (student / 0.1).log_softmax(-1).chunk(4)
        pairs = [-(a * b).sum(-1).mean() for i, a in enumerate(q.chunk(views)) for j, b in enumerate(log_p) if i != j]
        assert loss(student, q, 4, views).item() == pytest.approx((sum(pairs) / len(pairs)).item(), rel=1e-5)
    with pytest.raises(ValueError, match='got 1 with 1'):
        loss(student, q, 1, 1)


def test_temperature_warmup_longer_than_the_run_keeps_its_slope():
    long = dino_loss.temperature_schedule(0.04, 0.07, 30, 40)
    np.testing.assert_array_equal(dino_loss.temperature_schedule(0.04, 0.07, 30, 10), long[:10])
    with pytest.raises(ValueError, match='warmup_epochs: got 3, more than the 2'):
        dino_loss.cosine_schedule(1, 0, 2, 5, 3)


def test_each_size_is_one_batch():
    seen = []

    class Backbone(nn.Module):
        def forward(self, x):
            seen.append(tuple(x.shape))
            return x.mean((2, 3))

    views = [torch.full((2, 1, *size), float(i)) for i, size in enumerate([(8, 8), (8, 8), (4, 4), (4, 6), (4, 6)])]
    features, _ = dino_parts.CropNetwork(Backbone(), nn.Identity())(views)
    assert seen == [(4, 1, 8, 8), (2, 1, 4, 4), (4, 1, 4, 6)]
    assert features[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_teacher_follows_parameters_and_buffers():
    student, teacher = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2))
    student(torch.randn(8, 2))
    before = [p.clone() for p in teacher.parameters()]
    dino_loss.follow(teacher, student, 0.9)
    for old, new, goal in zip(before, teacher.parameters(), student.parameters()):
        assert torch.allclose(new, 0.9 * old + 0.1 * goal)
    for new, goal in zip(teacher.buffers(), student.buffers()):
        assert torch.equal(new, goal)
    assert teacher[1].num_batches_tracked == 1


def prepared(args):
    return dino.prepare(args, World(torch.device('cpu')))


def test_teacher_moves_with_its_masks(make):
    """And its outputs change with them: no mask of before is kept."""
    task = prepared(make()).task
    image = torch.randn(2, 1, 8, 8)
    for network in (task.student, task.teacher):  # of weights that make masks felt
        for block in network.backbone.blocks:
            block.attn.qkv.weight.data.mul_(30)
    before = task.teacher.backbone(image)
    with torch.no_grad():
        for name, parameter in task.student.backbone.named_parameters():
            if name.endswith('beta'):
                parameter.sub_(8)
    task.follow(0.5)
    after = task.teacher.backbone(image)
    assert not torch.allclose(before, after, atol=1e-3)
    fresh = timm.create_model('violin_dino_small', num_classes=0, img_size=8, in_chans=1, **TINY).eval()
    fresh.load_state_dict(task.teacher.backbone.state_dict())
    assert torch.equal(after, fresh(image))


def test_weight_decay_is_for_its_group_alone(make):
    args = make(weight_decay=0.04, weight_decay_end=0.4, norm_last_layer=False)
    parts = prepared(args)
    names = {id(p): name for name, p in parts.task.student.named_parameters()}
    parts.schedules.apply(len(parts.schedules.lr) - 1)
    decayed, free = set(), set()
    for group in parts.stepper.optimizer.param_groups:
        found = {names[id(p)] for p in group['params']}
        (decayed if group['weight_decay'] else free).update(found)
        assert group['weight_decay'] in (0.0, pytest.approx(0.4, abs=0.02))
    assert decayed | free == set(names.values()) and not decayed & free
    tokens = {'backbone.pos_embed', 'backbone.cls_token'}
    masks = {name for name in names.values() if '.decay.' in name}
    assert len(masks) == 4 and masks | tokens <= free
    assert {'backbone.patch_embed.proj.weight', 'head.mlp.0.weight', 'head.last_layer.weight_v'} <= decayed
    assert {name for name in free if not name.endswith('bias') and 'norm' not in name} == masks | tokens


def test_zero_weight_decay_at_the_start_still_grows(make):
    parts = prepared(make(weight_decay=0.0))
    parts.schedules.apply(len(parts.schedules.lr) - 1)
    assert {bool(group['weight_decay']) for group in parts.stepper.optimizer.param_groups} == {True, False}


def views_of(parts):
    parts.train.set_epoch(0)
    return next(iter(parts.train))


def test_masks_are_built_once_for_each_size(make, monkeypatch):
    parts = prepared(make(local_number=[2, 1], local_size=[4, 6], global_number=2))
    built, real = [], bank._build
    monkeypatch.setattr(bank, '_build', lambda *args: built.append(args[1].shape[1]) or real(*args))
    parts.task.trainable_module.train()
    parts.task(views_of(parts), 0.04)
    assert sorted(built) == [4, 9, 16, 16]  # the student's three grids, the teacher's one
    parts.task(views_of(parts), 0.04)
    assert sorted(built[4:]) == [4, 9, 16]  # the teacher has not moved


def test_activation_checkpointing_leaves_the_gradients(make):
    gradients = []
    for checkpointing in (False, True):
        parts = prepared(make(grad_checkpointing=checkpointing, drop_path=0.0, local_size=[4, 6], local_number=[1, 1]))
        parts.task.trainable_module.train()
        parts.task(views_of(parts), 0.04)['loss'].backward()
        gradients.append([p.grad for p in parts.task.student.parameters() if p.requires_grad])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients))
    assert all(gradient.abs().max() > 0 for gradient in gradients[0][:4])


def test_frozen_parameters_stay(make):
    parts = prepared(make(norm_last_layer=False))
    parts.schedules.apply(5)
    last = parts.task.student.head.last_layer
    before = [p.clone() for p in last.parameters()]
    parts.stepper.step(parts.task(views_of(parts), 0.04)['loss'], list(last.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, last.parameters()))
    parts.stepper.step(parts.task(views_of(parts), 0.04)['loss'])
    assert not any(torch.equal(a, b) for a, b in zip(before, last.parameters()))


def test_collapse_is_told():
    uniform = torch.full((6, 50), 1 / 50)
    same = torch.zeros(6, 50).index_fill(1, torch.tensor([3]), 1.0)
    varied = torch.eye(50)
    features = torch.randn(6, 16)
    for targets, found, part in ((uniform, features, 'uniform'), (same, features, 'all but one')):
        warnings = dino_loss.collapse_warnings(*dino_loss.entropies(targets).tolist(), dino_loss.spread(found), 50)
        assert len(warnings) == 1 and part in warnings[0]
    warnings = dino_loss.collapse_warnings(
        *dino_loss.entropies(varied).tolist(), dino_loss.spread(features * 0 + 1), 50
    )
    assert len(warnings) == 1 and 'nearly the same' in warnings[0]
    assert dino_loss.collapse_warnings(*dino_loss.entropies(varied).tolist(), dino_loss.spread(features), 50) == []


# runs


def test_run_leaves_everything_and_timm_loads_the_teacher(make):
    result = dino.run(make(val_split='validation', evaluators=['knn', 'logistic'], k=[5], eval_interval=2))
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


def test_resume_is_exact(make, monkeypatch):
    values = {'epochs': 3, 'freeze_last_layer': 2, 'jitter': [0.4, 0.4, 0, 0], 'norm_last_layer': False}
    whole = dino.run(make('whole', **values))['folder']
    real, calls = dino_parts.DinoStepper.step, []

    def interrupt(self, *args):
        calls.append(1)
        if len(calls) == 12:  # within the second of epochs of 8 updates
            raise KeyboardInterrupt
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(dino_parts.DinoStepper, 'step', interrupt)
        with pytest.raises(KeyboardInterrupt):
            dino.run(make('cut', resume='auto', **values))
    cut = whole.parent / 'cut'
    assert load(cut)['epoch'] == 0
    torch.rand(7)  # another process would have other random numbers behind it
    dino.run(make('cut', resume='auto', **values))
    assert_same_run(whole, cut)
    other = dino.run(make('other', seed=1, **values))['folder']
    with pytest.raises(AssertionError):
        assert_same_run(whole, other)


def test_baselines_and_result_survive_a_resume(make):
    values = {'val_split': 'validation', 'eval_interval': 1}
    first = dino.run(make(stop_epoch=1, **values))
    second = dino.run(make(resume='auto', **values))
    assert second['untrained'] == first['untrained'] and second['pixels'] == first['pixels']
    again = dino.run(make(resume='auto', **values))
    assert again['teacher'] == second['teacher'] and len(rows(again['folder'])) == 2


def test_a_checkpoint_without_heads_is_no_run(make, tmp_path):
    model = timm.create_model('violin_dino_small', num_classes=0, img_size=8, in_chans=1, **TINY)
    torch.save({'state_dict': model.state_dict()}, tmp_path / 'bare.pth')
    with pytest.raises(ConfigError, match='no projection head'):
        dino.run(make(resume=str(tmp_path / 'bare.pth')))
    assert prepared(make(initial_checkpoint=str(tmp_path / 'bare.pth'))).task.student.backbone


@pytest.mark.parametrize('processes', [2])
def test_two_processes_make_the_same_run(make, tmp_path, processes):
    """Three updates on the same 1000 images, an epoch each; on the way DDP, the centre's exchange and k-NN's."""
    values = {
        'epochs': 3, 'batch_size': 1000 // processes, 'drop_path': 0.0, 'val_split': 'validation', 'eval_interval': 3,
        'model_kwargs': [f'{key}={value}' for key, value in TINY.items()],
    }  # fmt: skip
    argv = []
    for key, value in {**BASE, **values, 'output': tmp_path, 'experiment': 'many'}.items():
        argv += ['--' + key.replace('_', '-'), *map(str, value if isinstance(value, list) else [value])]
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', str(processes)]
    done = subprocess.run(
        [*command, '-m', 'violin_timm', 'dino', *argv], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    values.update(model_kwargs=TINY, batch_size=1000)
    one = dino.run(make('one', **values))
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
def test_variants_train(make, values):
    folder = dino.run(make(**values))['folder']
    state = load(folder)
    assert state['epoch'] == 1 and all(value.isfinite().all() for value in state['state_dict'].values())
    assert len(rows(folder)) == 2


def test_a_loss_that_is_no_number_stops_the_run(make, monkeypatch):
    real, calls = dino_loss.DinoLoss.forward, []

    def forward(self, *args):
        calls.append(1)
        return real(self, *args) * (math.nan if len(calls) == 10 else 1)

    monkeypatch.setattr(dino_loss.DinoLoss, 'forward', forward)
    with pytest.raises(dino.TrainingError, match=r'nan in epoch 2, update 10; stopped\. Last good checkpoint: .*last'):
        dino.run(make())


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ({'warmup_epochs': 3}, 'warmup_epochs: got 3; the run has 2 epochs'),
        ({'stop_epoch': 3}, 'stop_epoch: got 3'),
        ({'local_number': [1, 1]}, 'local_number: got'),
        ({'local_number': [0], 'global_number': 1}, 'got one view'),
        ({'local_scale': [0.5, 0.1]}, 'local_scale: got'),
        ({'blur_prob': [2.0, 0, 0]}, 'blur_prob: got'),
        ({'val_split': 'train'}, "val_split: got 'train', which is train_split"),
        ({'batch_size': 1001}, 'batch_size: got 1001 for each of 1 process.* the 1000 images'),
        ({'local_size': [5]}, 'crop size: got .5, 5.; expected multiples of the patch size'),
        ({'model_kwargs': {**TINY, 'dynamic_img_size': False}}, 'without dynamic_img_size'),
        ({'train_split': 'valid'}, "split: got 'valid'"),
    ],
)
def test_refused_before_any_work(make, tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        dino.run(make(**values))
    assert list(tmp_path.iterdir()) == []


def test_what_is_cut_short_is_said(make, caplog):
    dino_build.check(make(warmup_teacher_temp_epochs=30, freeze_last_layer=2))
    assert 'cut off by the end of the run after 2' in caplog.text and 'last layer never learns' in caplog.text


CONFIGS = sorted((PACKAGE.parent / 'configs').glob('dino/*.yaml'))


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_settings_and_twins(path):
    args = parse(['--config', str(path)], DINO)
    dino_build.check(args)
    assert args.model_kwargs['pos_embed_resample'] == 'dino'
    twin = path.with_name(path.stem + '_plain.yaml')
    if not path.stem.endswith('_plain'):
        other = parse(['--config', str(twin)], DINO)
        kwargs = {**args.model_kwargs, 'mask': 'none', 'alpha': 'none'}
        assert {**vars(args), 'model_kwargs': kwargs} == vars(other)
    assert len(CONFIGS) == 6


def test_quick_config_trains(tmp_path, monkeypatch):
    from violin_timm.data import fashion

    monkeypatch.setattr(fashion, '_load', lambda name: None)  # wherever this runs: the digits
    argv = ['--config', 'quick/dino_fashion.yaml', '--epochs', '1', '--warmup-epochs', '0', '--output', str(tmp_path)]
    result = dino.run(parse([*argv, '--train-split', 'train[:128]', '--val-split', 'validation[:64]'], DINO))
    assert set(result['teacher']) == set(result['pixels']) == {'knn20'}
