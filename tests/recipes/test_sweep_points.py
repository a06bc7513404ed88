"""Sweep files into points: arms, names, draws and grids; and files that are refused."""

import random

import numpy as np
import pytest

from violin_timm import cli
from violin_timm.recipes.sweep_draws import DISTRIBUTIONS, draw, grid_values
from violin_timm.recipes.sweep_points import folder_name, read_sweep

ARMS = {'plain': 'mask=none alpha=none', 'both': 'mask=learned'}


def test_points_of_a_grid(write_sweep):
    sweep = read_sweep(write_sweep())
    assert [(point.arm, point.seed) for point in sweep.points] == [
        ('plain', '0'), ('both', '0'), ('plain', '1'), ('both', '1')]  # fmt: skip
    first = sweep.points[0]
    assert first.name == 'model-kwargs=mask=none+alpha=none__seed=0'
    assert first.settings['model_kwargs'] == {'mask': 'none', 'alpha': 'none'}
    assert (first.settings['lr'], first.settings['model']) == (0.1, 'violin_pixel_nano')
    assert sweep.maximize


def test_an_empty_value_of_pairs_is_no_pair(write_sweep):
    parameters = {'model-kwargs': {'values': ['', 'mask=none']}}
    sweep = read_sweep(write_sweep(parameters=parameters, description='no table'))
    assert [point.settings['model_kwargs'] for point in sweep.points] == [{}, {'mask': 'none'}]
    assert [point.arm for point in sweep.points] == ['default', 'mask=none']


def test_arms_of_several_parameters_and_without_names(write_sweep, lr_grid):
    parameters = lr_grid(0.1, 0.2) | {'epochs': {'values': [1, 2]}}
    table = {'arms': {'plain': {'model-kwargs': ARMS['plain']}}, 'select': 'lr', 'baseline': 'plain epochs=1'}
    sweep = read_sweep(write_sweep(parameters=parameters, table=table))
    assert {point.arm for point in sweep.points} == {
        'plain epochs=1', 'plain epochs=2', 'model-kwargs=mask=learned epochs=1', 'model-kwargs=mask=learned epochs=2'
    }  # fmt: skip
    assert {point.choice for point in sweep.points} == {'0.1', '0.2'}


def test_folder_names_are_unique_stable_and_short():
    assert folder_name({}) == 'run'
    assert folder_name({'seed': 0, 'lr': 0.1}) == folder_name({'lr': 0.1, 'seed': 0}) == 'lr=0.1__seed=0'
    odd, other = folder_name({'aa': 'a/b'}), folder_name({'aa': 'a_b'})
    assert odd != other == 'aa=a_b' and '/' not in odd
    long = {'model-kwargs': 'curves=' + ','.join('abcdefghij' for _ in range(20))}
    assert len(folder_name(long)) == 100 and folder_name(long) == folder_name(dict(long))
    assert folder_name(long) != folder_name({'model-kwargs': long['model-kwargs'] + 'k'})


def test_run_cap_and_random_draws(write_sweep):
    parameters = {
        'lr': {'distribution': 'log_uniform_values', 'min': 0.001, 'max': 0.1},
        'seed': {'min': 0, 'max': 3},
        'drop-path': {'distribution': 'q_uniform', 'min': 0, 'max': 0.5, 'q': 0.1},
    }
    draws = []
    for cap in (8, 8, 12):
        path = write_sweep(method='random', run_cap=cap, parameters=parameters, description='')
        draws.append([point.parameters for point in read_sweep(path).points])
    assert draws[0] == draws[1] == draws[2][:8] and len(draws[2]) == 12
    for point in draws[2]:
        assert 0.001 <= point['lr'] <= 0.1 and point['seed'] in range(4)
        assert point['drop-path'] in (0, 0.1, 0.2, 0.3, 0.4, 0.5)
    assert len(read_sweep(write_sweep(run_cap=3)).points) == 3


@pytest.mark.parametrize('distribution', DISTRIBUTIONS)
def test_distributions(distribution):
    given = {
        'value': {'value': 3}, 'values': {'values': [1, 2]}, 'min': {'min': 1, 'max': 3},
    }  # fmt: skip
    keys = DISTRIBUTIONS[distribution][0]
    spec = {key: value for name in keys for key, value in given.get(name, {}).items()}
    if 'probabilities' in keys:
        spec['probabilities'] = [0, 1]
    values = np.array([draw('lr', {'distribution': distribution, **spec}, random.Random(i)) for i in range(400)])
    low, high = {'log_uniform': (np.e, np.e**3), 'inv_log_uniform': (np.exp(-3), np.exp(-1))}.get(
        distribution.removeprefix('q_'), (1, 3)
    )
    if 'min' in keys:
        assert values.min() >= low - 0.5 * distribution.startswith('q_') and values.max() <= high + 0.5
        assert values.std() > 0.1 * (high - low)
    if 'mu' in keys:
        log = np.log(values) if distribution == 'log_normal' else values
        assert distribution == 'q_log_normal' or (abs(log.mean()) < 0.2 and abs(log.std() - 1) < 0.2)
    if distribution.startswith('q_'):
        assert all(value == round(value) for value in values)
    if distribution == 'categorical_w_probabilities':
        assert set(values) == {2}


def test_grids_of_ranges():
    assert grid_values('seed', {'min': 2, 'max': 4}) == [2, 3, 4]
    step = {'distribution': 'q_uniform', 'min': 0.1, 'max': 0.5, 'q': 0.1}
    assert grid_values('lr', step) == [0.1, 0.2, 0.3, 0.4]  # the upper bound is excluded, as wandb's is


def test_command_of_the_file(write_sweep):
    command = ['${env}', '${interpreter}', '-m', 'violin_timm', 'train', '--log-wandb', '--epochs=2', '${args}']
    path = write_sweep(command=command, program='violin')
    assert read_sweep(path).points[0].settings['log_wandb'] is False
    assert read_sweep(path).points[0].settings['epochs'] == 2
    assert read_sweep(path, log_wandb=True).points[0].settings['log_wandb'] is True


BAD = [
    ({'methods': 'grid'}, "unknown key 'methods'; did you mean method?"),
    ({'baseline': 'plain'}, "unknown key 'baseline'; it belongs under table:"),
    ({'early_terminate': {'type': 'hyperband'}}, 'early_terminate is a key of wandb'),
    ({'method': 'bayes'}, "method: got 'bayes'; choose from grid, random"),
    ({'method': 'random'}, 'run_cap: got none'),
    ({'run_cap': 0}, 'run_cap: got 0'),
    ({'program': 'other.py'}, "program: got 'other.py'"),
    ({'command': ['${program}']}, 'command: got'),
    ({'command': ['${program}', '${args_json}', '${args}']}, "command: got '${args_json}'"),
    ({'metric': {'goal': 'max'}}, "metric: goal: got 'max'"),
    ({'metric': None, 'table': {'select': 'lr'}}, 'metric: goal: got none; select needs it'),
    ({'parameters': {}}, 'parameters: got {}'),
    ({'parameters': {'lrr': {'value': 1}}}, "parameters: unknown flag 'lrr'; did you mean lr?"),
    ({'parameters': {'output': {'value': 'x'}}}, 'parameters: output is set by violin sweep'),
    ({'parameters': {'lr': {'valeus': [1]}}}, 'parameters: lr: got'),
    ({'parameters': {'lr': {'values': [1, 1]}}}, 'each value may be given once'),
    ({'parameters': {'lr': {'values': []}}}, 'lr: values: got []; expected a list'),
    ({'parameters': {'lr': {'value': 0.1, 'min': 1}}}, "lr: unknown key 'min' of constant"),
    ({'parameters': {'lr': {'min': 0.1, 'max': 1.0}}}, "a grid takes constant"),
    ({'parameters': {'lr': {'min': 2, 'max': 1}}}, 'expected min below max'),
    ({'parameters': {'lr': {'distribution': 'unifrom'}}}, "distribution: got 'unifrom'"),
    ({'parameters': {'lr': {'distribution': 'q_uniform', 'min': '1e-3', 'max': 1}}}, 'write 1.0e-3'),
    ({'parameters': {'lr': {'value': 'fast'}}}, "lr: got 'fast'; expected a number"),
    ({'parameters': {'model-kwargs': {'value': {'mask': 'none'}}}}, 'expected a text'),
    ({'parameters': {'config': {'value': 'configs/quick/digit.yaml'}}}, 'did you mean configs/quick/digits.yaml?'),
    ({'table': {'baslin': 'plain'}}, "table: unknown key 'baslin'; did you mean baseline?"),
    ({'table': {'baseline': 'plan'}}, "table: baseline: got 'plan'; choose from plain, both"),
    ({'table': {'select': 'lr'}}, "table: select: got 'lr'"),
    ({'table': {'arms': {'x': 'mask=fixed'}, 'baseline': None}}, 'table: baseline: got None'),
    ({'table': {'arms': {'x': 'mask=fixed'}}}, "table: arms: 'x' fits no point"),
    ({'description': 'tabel:\n  x: 1'}, "description: unknown section 'tabel:'"),
    ({'description': 'table:\n  report: x\nmore: 1'}, 'table: must come last'),
]  # fmt: skip


@pytest.mark.parametrize(('keys', 'message'), BAD, ids=[message for _, message in BAD])
def test_a_bad_file_ends_with_status_2_and_starts_nothing(write_sweep, keys, message, capsys, tmp_path):
    assert cli.main(['sweep', str(write_sweep(**keys)), '--output', str(tmp_path / 'out')]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count('\n') == 1
    assert not (tmp_path / 'out').exists()
