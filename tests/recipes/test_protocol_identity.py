"""Which results may stand in one folder: those of the same settings, weights and images."""

import json
import shutil
from dataclasses import replace

import pytest
import timm
import torch

import violin_timm  # noqa: F401  registers the models
from violin_timm.data import generated
from violin_timm.engine.config import ConfigError, settings
from violin_timm.recipes import finetune_build
from violin_timm.recipes.protocol_check import check
from violin_timm.recipes.protocol_flags import VTAB
from violin_timm.recipes.protocol_identity import check_images, fingerprint, record
from violin_timm.recipes.protocol_workers import device_of, jobs_of
from violin_timm.recipes.vtab import prepare


def weights_at(path, seed):
    """A checkpoint of a small model, as after a training."""
    torch.manual_seed(seed)
    model = timm.create_model('violin_pixel_nano', embed_dim=16, depth=1, num_heads=2)
    recorded = {'model': 'violin_pixel_nano', 'model_kwargs': {'embed_dim': 16, 'depth': 1, 'num_heads': 2}}
    torch.save({'state_dict': model.state_dict(), 'args': recorded, 'optimizer': {'state': torch.zeros(1000)}}, path)
    finetune_build._read.cache_clear()  # as in a new process
    return str(path)


def args_of(tmp_path, **values):
    base = {'device': 'cpu', 'data_dir': 'data', 'output': str(tmp_path), 'tasks': ['digits'], 'lrs': [1e-3]}
    return settings(VTAB, **{**base, 'model': '' if 'pretrained_path' in values else 'violin_pixel_nano', **values})


def plan_of(tmp_path, **values):
    return prepare(args_of(tmp_path, **values))[0]


def leave_result(plan, **more):
    """What a run of the first arm leaves."""
    job = next(plan.ready())
    plan.folder(job).mkdir(parents=True)
    record(plan, job, {**vars(job), 'top1': 50.0, 'diverged': False, **more}, torch.zeros(3).numpy())


def test_weights_are_what_is_in_the_file_not_its_name(tmp_path):
    path = weights_at(tmp_path / 'last.pth.tar', seed=0)
    plan = plan_of(tmp_path, pretrained_path=path)
    leave_result(plan)
    copy = shutil.copy(path, tmp_path / 'copy.pth.tar')
    check(plan_of(tmp_path, pretrained_path=str(copy)))
    weights_at(path, seed=1)
    with pytest.raises(ConfigError, match='was run with weights='):
        check(plan_of(tmp_path, pretrained_path=path))
    same = {'embed_dim': 16, 'depth': 1, 'num_heads': 2, 'class_token': False}
    with pytest.raises(ConfigError, match='and now it is None'):
        check(plan_of(tmp_path, model_kwargs=same))


def test_what_weights_are_kept_for_runs_leaves_the_optimizer_out(tmp_path):
    kept = finetune_build.weights(weights_at(tmp_path / 'last.pth.tar', seed=0))
    assert set(kept) == {'state_dict', 'args'} and 'optimizer' not in kept['state_dict']


@pytest.mark.parametrize(
    'changed',
    [{'epochs': 2}, {'amp': True}, {'task_seed': 1}, {'task_test': 9}, {'beta_range': [5, 9]}, {'mean': [0.0]}],
)
def test_another_setting_is_another_experiment(tmp_path, changed):
    leave_result(plan_of(tmp_path, only=['violin']))
    with pytest.raises(ConfigError, match='--experiment'):
        check(plan_of(tmp_path, only=['violin'], **changed))


def test_a_result_is_read_once(tmp_path):
    plan = plan_of(tmp_path)
    job = next(plan.ready())
    assert plan.result(job) is None
    leave_result(plan)
    before = plan.result(job)
    (plan.folder(job) / 'result.json').write_text(json.dumps({'model': 'other'}))
    assert plan.result(job) is before and replace(plan, _ended={}).result(job) == {'model': 'other'}


def test_images_are_told_by_their_list_not_by_their_folder(tmp_path):
    generated.ensure(tmp_path / 'here', 'digits', 8)
    shutil.copytree(tmp_path / 'here', tmp_path / 'there')

    def look(place, stage='tune'):
        plan, source = prepare(args_of(tmp_path, data_dir=str(tmp_path / place), lrs=[1e-3, 1e-2]))
        found = fingerprint(source, *source.open(source.tasks[0], stage, 0))
        check_images(plan, source.tasks[0], stage, 0, found)
        return plan, found

    plan, data = look('here')
    assert look('here', 'final')[1] != data
    leave_result(plan, data=data)
    assert look('there')[1] == data
    listed = (tmp_path / 'there' / 'digits' / 'val200.txt').read_text().splitlines()
    (tmp_path / 'there' / 'digits' / 'val200.txt').write_text('\n'.join([listed[1], listed[0], *listed[2:]]))
    with pytest.raises(ConfigError, match=r'there.*not those of.*--experiment'):
        look('there')
    look('there', 'final')


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ({'lrs': [1e-3, 1.0000000001e-3]}, 'lrs: got 0.001, 0.0010000000001; two would share a folder'),
        ({'arms': {'a b': {}, 'a_b': {}}}, 'arms: got a b, a_b; two'),
        ({'baselines': ['plian']}, 'did you mean plain'),
        ({'arms': {'a/b': {}}}, 'name of a folder'),
    ],
)
def test_names_that_would_mix_or_lose_results(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        check(plan_of(tmp_path, **values))


def test_one_process_for_each_gpu_and_no_process_group(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 4)
    cuda, second, cpu = (settings(VTAB, device=name) for name in ('cuda', 'cuda:2', 'cpu'))
    assert [jobs_of(args) for args in (cuda, second, cpu)] == [4, 1, 1]
    assert [device_of(cuda, index).index for index in range(5)] == [0, 1, 2, 3, 0]
    assert device_of(second, 3) == torch.device('cuda:2') and device_of(cpu, 3) == torch.device('cpu')
    for name in ('cuda:4', 'gpu'):
        with pytest.raises(ConfigError, match=name):
            device_of(settings(VTAB, device=name))
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    with pytest.raises(ConfigError, match='--device cpu'):
        device_of(cuda)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '2')
    with pytest.raises(ConfigError, match='torchrun'):
        device_of(cpu)
