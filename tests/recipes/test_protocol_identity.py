"""Which results may stand in one folder: those of the same settings, weights and images."""

import json
import shutil
from dataclasses import replace

import pytest
import timm
import torch

import violin_timm  # noqa: F401  registers the models
from violin_timm.engine.config import ConfigError, settings
from violin_timm.recipes import finetune_build
from violin_timm.recipes.protocol import check, record
from violin_timm.recipes.protocol_flags import VTAB
from violin_timm.recipes.vtab import prepare


def weights_at(path, seed):
    """A checkpoint of a small model, as after a training."""
    torch.manual_seed(seed)
    model = timm.create_model('violin_pixel_nano', embed_dim=16, depth=1, num_heads=2)
    recorded = {'model': 'violin_pixel_nano', 'model_kwargs': {'embed_dim': 16, 'depth': 1, 'num_heads': 2}}
    torch.save({'state_dict': model.state_dict(), 'args': recorded, 'optimizer': {'state': torch.zeros(1000)}}, path)
    finetune_build._read.cache_clear()  # as in a new process
    return str(path)


def plan_of(tmp_path, **values):
    base = {'device': 'cpu', 'data_dir': 'data', 'output': str(tmp_path), 'tasks': ['digits'], 'lrs': [1e-3]}
    return prepare(settings(VTAB, **{**base, **values}))[0]


def leave_result(plan):
    """What a run of the first arm leaves."""
    job = next(plan.ready())
    plan.folder(job).mkdir(parents=True)
    record(plan, job, {**vars(job), 'top1': 50.0, 'diverged': False}, torch.zeros(3).numpy())


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
        check(plan_of(tmp_path, model='violin_pixel_nano', model_kwargs=same))


def test_what_weights_are_kept_for_runs_leaves_the_optimizer_out(tmp_path):
    kept = finetune_build.weights(weights_at(tmp_path / 'last.pth.tar', seed=0))
    assert set(kept) == {'state_dict', 'args'} and 'optimizer' not in kept['state_dict']


@pytest.mark.parametrize(
    'changed',
    [{'epochs': 2}, {'amp': True}, {'task_seed': 1}, {'task_test': 9}, {'beta_range': [5, 9]}, {'mean': [0.0]}],
)
def test_another_setting_is_another_experiment(tmp_path, changed):
    leave_result(plan_of(tmp_path, model='violin_pixel_nano', only=['violin']))
    with pytest.raises(ConfigError, match='--experiment'):
        check(plan_of(tmp_path, model='violin_pixel_nano', only=['violin'], **changed))


def test_a_result_is_read_once(tmp_path):
    plan = plan_of(tmp_path, model='violin_pixel_nano')
    job = next(plan.ready())
    assert plan.result(job) is None
    leave_result(plan)
    before = plan.result(job)
    (plan.folder(job) / 'result.json').write_text(json.dumps({'model': 'other'}))
    assert plan.result(job) is before and replace(plan, _ended={}).result(job) == {'model': 'other'}
