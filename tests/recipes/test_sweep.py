"""Sweeps: files into points, points into runs that survive kills, runs into a table.

Most runs here are of `FAKE`, which trains nothing; the last tests run `violin train` itself.
"""

import csv
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import timm
import yaml
from scipy import stats

from violin_timm import cli
from violin_timm.engine.config import ConfigError
from violin_timm.engine.runs import finished
from violin_timm.recipes import sweep as sweeps
from violin_timm.recipes.sweep_draws import DISTRIBUTIONS, draw, grid_values
from violin_timm.recipes.sweep_points import KEYS, folder_name, read_sweep
from violin_timm.recipes.sweep_runs import Runner, check_same, outcome
from violin_timm.recipes.sweep_table import Outcome, as_csv, as_markdown, rows

CONFIGS = sorted((Path(__file__).parents[2] / 'configs' / 'sweeps').glob('*.yaml'))
ARMS = {'plain': 'mask=none alpha=none', 'both': 'mask=learned'}

# Leaves one line in starts.txt for each start. Its seed says what becomes of it: 7 fails, 8 is killed, 9 leaves half a
# result and then waits for the file `go` two folders up.
FAKE = """
import json, os, pathlib, sys, time
args = sys.argv[1:]
get = lambda flag: next(a.split('=')[1] for a in args if a.startswith(flag + '='))
seed, folder = int(get('--seed')), pathlib.Path(args[args.index('--output') + 1]) / args[args.index('--experiment') + 1]
with open(folder / 'starts.txt', 'a') as file:
    file.write(' '.join(args) + ' OMP=' + os.environ['OMP_NUM_THREADS'] + chr(10))
if seed == 7:
    sys.exit('no luck' + chr(10) + 'today')
if seed == 8:
    os.kill(os.getpid(), 9)
if seed == 9:
    (folder / 'result.json').write_text('{"model": "x", "best_me')
    end = time.monotonic() + 120
    while not (folder.parent.parent / 'go').exists() and time.monotonic() < end:
        time.sleep(0.02)
value = 50 + 10 * float(get('--lr')) * (1 + seed % 3) + ('mask=none' not in args) * 2
result = {'model': 'x', 'best_metric': value, 'test': {'top1': 100 - value}}
(folder / 'tmp').write_text(json.dumps(result))
os.replace(folder / 'tmp', folder / 'result.json')
"""


@pytest.fixture
def write(tmp_path):
    """Write a sweep file of 2 arms x lr x seeds; keyword arguments replace its keys, None drops them."""

    def _write(seeds=(0, 1), table=None, **keys):
        section = {'arms': ARMS, 'baseline': 'plain', 'report': ['best_metric', 'test.top1'], **(table or {})}
        content = {
            'program': 'scripts/train.py',
            'method': 'grid',
            'metric': {'name': 'eval_top1', 'goal': 'maximize'},
            'description': 'Some arms.\n' + yaml.safe_dump({'table': section}),
            'parameters': {
                'config': {'value': 'configs/quick/digits.yaml'},
                'model-kwargs': {'values': list(ARMS.values())},
                'lr': {'value': 0.1},
                'seed': {'values': list(seeds)},
            },
        } | keys
        path = tmp_path / 'file.yaml'
        content = {key: value for key, value in content.items() if value is not None}
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return _write


@pytest.fixture
def fake(tmp_path):
    path = tmp_path / 'fake.py'
    path.write_text(FAKE)
    return [sys.executable, '-S', str(path)]


def lr(*values):
    return {'lr': {'values': list(values)}, 'seed': {'values': [0, 1, 2]}, 'model-kwargs': {'values': [*ARMS.values()]}}


def starts(folder):
    path = folder / 'starts.txt'
    return path.read_text().splitlines() if path.exists() else []


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'waited in vain'
        time.sleep(0.02)


# ---------------------------------------------------------------- files into points


def test_points_of_a_grid(write):
    sweep = read_sweep(write())
    assert [(point.arm, point.seed) for point in sweep.points] == [
        ('plain', '0'), ('both', '0'), ('plain', '1'), ('both', '1')]  # fmt: skip
    first = sweep.points[0]
    assert first.name == 'model-kwargs=mask=none+alpha=none__seed=0'
    assert first.settings['model_kwargs'] == {'mask': 'none', 'alpha': 'none'}
    assert (first.settings['lr'], first.settings['model']) == (0.1, 'violin_pixel_nano')
    assert sweep.maximize


def test_an_empty_value_of_pairs_is_no_pair(write):
    parameters = {'model-kwargs': {'values': ['', 'mask=none']}}
    sweep = read_sweep(write(parameters=parameters, description='no table'))
    assert [point.settings['model_kwargs'] for point in sweep.points] == [{}, {'mask': 'none'}]
    assert [point.arm for point in sweep.points] == ['default', 'mask=none']


def test_arms_of_several_parameters_and_without_names(write):
    parameters = lr(0.1, 0.2) | {'epochs': {'values': [1, 2]}}
    table = {'arms': {'plain': {'model-kwargs': ARMS['plain']}}, 'select': 'lr', 'baseline': 'plain epochs=1'}
    sweep = read_sweep(write(parameters=parameters, table=table))
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


def test_run_cap_and_random_draws(write):
    parameters = {
        'lr': {'distribution': 'log_uniform_values', 'min': 0.001, 'max': 0.1},
        'seed': {'min': 0, 'max': 3},
        'drop-path': {'distribution': 'q_uniform', 'min': 0, 'max': 0.5, 'q': 0.1},
    }
    draws = []
    for cap in (8, 8, 12):
        path = write(method='random', run_cap=cap, parameters=parameters, description='')
        draws.append([point.parameters for point in read_sweep(path).points])
    assert draws[0] == draws[1] == draws[2][:8] and len(draws[2]) == 12
    for point in draws[2]:
        assert 0.001 <= point['lr'] <= 0.1 and point['seed'] in range(4)
        assert point['drop-path'] in (0, 0.1, 0.2, 0.3, 0.4, 0.5)
    assert len(read_sweep(write(run_cap=3)).points) == 3


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


def test_command_of_the_file(write):
    command = ['${env}', '${interpreter}', '-m', 'violin_timm', 'train', '--log-wandb', '--epochs=2', '${args}']
    path = write(command=command, program='violin')
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
def test_a_bad_file_ends_with_status_2_and_starts_nothing(write, keys, message, capsys, tmp_path):
    assert cli.main(['sweep', str(write(**keys)), '--output', str(tmp_path / 'out')]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count('\n') == 1
    assert not (tmp_path / 'out').exists()


# ---------------------------------------------------------------- points into runs


def test_runs_and_then_skips(write, fake, tmp_path, capsys):
    sweep = read_sweep(write())
    Runner(sweep, tmp_path, 2, 3, fake).run()
    assert '[4/4] 0 before, 0 failed, 0 to go, left 0:00:00  done' in capsys.readouterr().out
    folders = [tmp_path / 'runs' / point.name for point in sweep.points]
    assert all(finished(folder) for folder in folders)
    line = starts(folders[0])[0]
    assert '--model-kwargs mask=none alpha=none --lr=0.1 --seed=0' in line
    assert line.endswith('--resume auto OMP=3')

    (folders[2] / 'result.json').write_text('{"model": "x", "best_me')  # as a full disk may leave it
    (folders[3] / 'result.json').write_text('[]')
    Runner(sweep, tmp_path, 1, 1, fake).run()
    assert [len(starts(folder)) for folder in folders] == [1, 1, 2, 2]
    assert '[2/4] 2 before' in capsys.readouterr().out


def test_failures_are_recorded_shown_and_tried_again(write, fake, tmp_path, capsys):
    sweep = read_sweep(write(seeds=(0, 7, 8)))
    Runner(sweep, tmp_path, 3, 1, fake).run()
    assert 'FAILED (exit status 1: today)' in capsys.readouterr().out
    record = json.loads((tmp_path / 'runs' / sweep.points[2].name / 'failure.json').read_text())
    assert record == {'status': 'exit status 1', 'code': 1, 'log': ['no luck', 'today']}

    assert sweeps.write_table(sweep, tmp_path) == 1
    text = (tmp_path / 'table.md').read_text()
    assert '2 of 6 runs finished' in text
    assert '- `model-kwargs=mask=none+alpha=none__seed=7`: exit status 1: today' in text
    assert '- `model-kwargs=mask=learned__seed=8`: killed by SIGKILL: no output' in text
    table = list(csv.DictReader((tmp_path / 'table.csv').open()))
    assert [(row['arm'], row['seeds'], row['failed'], row['missing']) for row in table] == [
        ('plain', '1', '2', '0'), ('both', '1', '2', '0')]  # fmt: skip

    Runner(sweep, tmp_path, 3, 1, fake).run()
    assert [len(starts(tmp_path / 'runs' / point.name)) for point in sweep.points] == [1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize('victim', ['sweep', 'sweep and run'])
def test_kill_of_the_sweep(write, fake, tmp_path, victim):
    """A run that outlives its sweep is waited for, not doubled; one killed with it is started again."""
    parameters = {'seed': {'values': [0, 9, 1]}, 'lr': {'value': 0.1}}
    sweep = read_sweep(write(parameters=parameters, description=''))
    done, orphan, last = (tmp_path / 'runs' / point.name for point in sweep.points)
    fork = multiprocessing.get_context('fork')

    first = fork.Process(target=Runner(sweep, tmp_path, 1, 1, fake).run)
    first.start()
    wait_for(lambda: (orphan / 'result.json').exists())
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    assert finished(done) and not finished(orphan) and not last.exists()
    before = (done / 'result.json').stat().st_mtime_ns
    if victim == 'sweep and run':
        os.kill(_process_of(orphan), signal.SIGKILL)

    second = fork.Process(target=Runner(sweep, tmp_path, 1, 1, fake).run)
    second.start()
    if victim == 'sweep':
        wait_for(lambda: finished(last))
        assert second.is_alive() and not finished(orphan)
    else:
        wait_for(lambda: len(starts(orphan)) == 2)
    (tmp_path / 'go').touch()
    second.join(60)
    assert second.exitcode == 0 and all(map(finished, (done, orphan, last)))
    assert len(starts(orphan)) == (1 if victim == 'sweep' else 2)
    assert len(starts(done)) == 1 and (done / 'result.json').stat().st_mtime_ns == before


def _process_of(folder):
    """Id of the one process whose arguments name the folder."""
    found = []
    for path in Path('/proc').glob('[0-9]*/cmdline'):
        try:
            arguments = path.read_bytes().split(b'\0')
        except OSError:
            continue
        if folder.name.encode() in arguments and str(folder.parent).encode() in arguments:
            found.append(int(path.parent.name))
    (process,) = found
    return process


def test_interruption_stops_the_runs(write, fake, tmp_path):
    sweep = read_sweep(write(parameters={'seed': {'values': [9]}, 'lr': {'value': 0.1}}, description=''))
    folder = tmp_path / 'runs' / sweep.points[0].name
    process = multiprocessing.get_context('fork').Process(target=Runner(sweep, tmp_path, 1, 1, fake).run)
    process.start()
    wait_for(lambda: (folder / 'result.json').exists())
    child = _process_of(folder)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode not in (0, None) and not Path(f'/proc/{child}').exists()
    assert outcome(folder, ()) == Outcome()  # neither done nor failed


def test_another_setting_does_not_pass_for_the_same_run(write, fake, tmp_path, capsys):
    sweep = read_sweep(write())
    Runner(sweep, tmp_path, 2, 1, fake).run()
    parameters = lr() | {'lr': {'value': 0.2}, 'config': {'value': 'configs/quick/digits.yaml'}}
    path = write(parameters=parameters)
    with pytest.raises(ConfigError, match=r'was run with lr=0\.1, and is now to have 0\.2'):
        check_same(read_sweep(path).points[0], tmp_path / 'runs' / sweep.points[0].name)
    assert cli.main(['sweep', str(path), '--output', str(tmp_path)]) == 2
    assert 'take another --output' in capsys.readouterr().err


def test_dry_run_and_table_only_start_nothing(write, fake, tmp_path, capsys):
    path = write()
    assert cli.main(['sweep', str(path), '--output', str(tmp_path / 'out'), '--dry-run']) == 0
    out = capsys.readouterr().out
    assert '4 points, 0 done' in out and 'violin train --config=configs/quick/digits.yaml --model-kwargs mask' in out
    assert not (tmp_path / 'out').exists()
    assert cli.main(['sweep', str(path), '--output', str(tmp_path / 'out'), '--table-only']) == 0
    assert '0 of 4 runs finished' in capsys.readouterr().out
    assert not (tmp_path / 'out' / 'runs').exists()


def test_a_result_without_a_reported_number_is_a_failure_with_its_keys(tmp_path):
    (tmp_path / 'result.json').write_text('{"model": "x", "test": {}}')
    assert outcome(tmp_path, ['model']).failure == "result.json has no number 'model'; its keys are model, test"
    assert 'test.top1' in outcome(tmp_path, ['test.top1']).failure


# ---------------------------------------------------------------- runs into a table


def test_table_against_numpy_and_scipy(write):
    sweep = read_sweep(write(parameters=lr(0.1, 0.2), table={'select': 'lr'}))
    generator = np.random.default_rng(0)
    values = {point.name: generator.normal(90, 2, 2) for point in sweep.points}
    outcomes = {name: Outcome({'best_metric': v, 'test.top1': t}) for name, (v, t) in values.items()}

    def of(arm, choice):
        return np.array([values[p.name] for p in sweep.points if (p.arm, p.choice) == (arm, choice)])

    best = {arm: max(('0.1', '0.2'), key=lambda choice: of(arm, choice)[:, 0].mean()) for arm in ARMS}
    one, other = (of(arm, best[arm])[:, 1] for arm in ('both', 'plain'))
    interval = stats.ttest_rel(one, other).confidence_interval(0.95)

    table = list(csv.DictReader(as_csv(sweep, rows(sweep, outcomes)).splitlines()))
    assert len(table) == 4
    assert {row['arm']: row['choice'] for row in table if row['chosen'] == 'yes'} == best
    row = next(row for row in table if row['arm'] == 'both' and row['chosen'] == 'yes')
    expected = [one.mean(), one.std(ddof=1), one.min(), (one - other).mean(), interval.low, interval.high, 3]
    names = ['mean', 'std', 'min', 'difference', 'low', 'high', 'pairs']
    assert [float(row[f'test.top1 {name}']) for name in names] == pytest.approx(expected)
    text = as_markdown(sweep, rows(sweep, outcomes), outcomes)
    assert f'{(one - other).mean():+.2f} [{interval.low:+.2f}, {interval.high:+.2f}], 3' in text
    assert '## All values of lr' in text and f'{best["both"]} *' in text


def _chosen(sweep, numbers):
    """Choice of each arm for `numbers[choice]`: validation values by seed, None for a failure; the test is reversed."""
    outcomes = {}
    for point in sweep.points:
        value = numbers[point.choice][int(point.seed)]
        outcomes[point.name] = (
            Outcome(failure='exit status 1: x')
            if value is None
            else Outcome({'best_metric': value, 'test.top1': -value})
        )
    return {row.choice for row in rows(sweep, outcomes) if row.chosen}


def test_selection_reads_validation_alone_and_the_goal(write):
    numbers = {'0.1': [1, 2, 3], '0.2': [2, 3, 4]}
    table = {'select': 'lr'}
    assert _chosen(read_sweep(write(parameters=lr(0.1, 0.2), table=table)), numbers) == {'0.2'}
    low = {'name': 'loss', 'goal': 'minimize'}
    assert _chosen(read_sweep(write(parameters=lr(0.1, 0.2), table=table, metric=low)), numbers) == {'0.1'}


def test_selection_passes_over_values_that_fail_for_a_seed(write):
    sweep = read_sweep(write(parameters=lr(0.1, 0.2), table={'select': 'lr'}))
    assert _chosen(sweep, {'0.1': [1, 2, 3], '0.2': [9, 9, None]}) == {'0.1'}
    assert _chosen(sweep, {'0.1': [None] * 3, '0.2': [None] * 3}) == set()


# ---------------------------------------------------------------- the configs, and real runs


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_configs(path):
    """Every point is named, builds its model, and the file has only keys that wandb knows."""
    assert set(yaml.safe_load(path.read_text())) <= set(KEYS)
    head = path.read_text().split('name:')[0]
    assert f'violin sweep configs/sweeps/{path.name}' in head and 'Duration:' in head and 'paper' in head
    sweep = read_sweep(path)
    arms = {point.arm: point.settings['model_kwargs'] for point in sweep.points}
    assert set(arms) == set(sweep.table.arms)
    assert len({json.dumps(kwargs, sort_keys=True) for kwargs in arms.values()}) == len(arms)
    for kwargs in arms.values():
        timm.create_model('violin_pixel_nano', img_size=8, in_chans=1, **kwargs)


def test_curve_subsets_are_all_of_them():
    path = next(path for path in CONFIGS if path.stem == 'curve_subsets')
    kwargs = [point.settings['model_kwargs'] for point in read_sweep(path).points if point.seed == '0']
    subsets = {tuple(sorted(entry['curves'].split(','))) for entry in kwargs if 'curves' in entry}
    assert len(subsets) == 3 * 15 and len(kwargs) == 3 * 15 + 4
    assert sum(all(name.endswith('_T') for name in names) for names in subsets) == 15
    assert sum(not any(name.endswith('_T') for name in names) for names in subsets) == 15


def test_real_runs(write, tmp_path, capsys):
    """Two arms, two seeds: trained, tabulated, and after damage only the damaged one goes on from its checkpoint."""
    tiny = 'embed_dim=16 depth=1 num_heads=2'
    arms = {'plain': f'{tiny} mask=none alpha=none', 'both': tiny}
    parameters = {
        'config': {'value': 'configs/quick/digits.yaml'},
        'epochs': {'value': 1},
        'warmup-epochs': {'value': 0},
        'batch-size': {'value': 100},
        'test-split': {'value': 'validation'},  # spares the baselines of the digits' test split
        'sched': {'value': 'constant'},
        'model-kwargs': {'values': list(arms.values())},
        'seed': {'values': [0, 1]},
    }
    path, output = write(parameters=parameters, table={'arms': arms}), tmp_path / 'out'
    argv = ['sweep', str(path), '--output', str(output), '--jobs', '2', '--threads', '1']
    assert cli.main(argv) == 0
    sweep = read_sweep(path)
    folders = [output / 'runs' / point.name for point in sweep.points]
    results = [json.loads((folder / 'result.json').read_text()) for folder in folders]
    assert [result['seed'] for result in results] == [0, 0, 1, 1]
    table = {row['arm']: row for row in csv.DictReader((output / 'table.csv').open())}
    plain, both = (np.array([result['test']['top1'] for result in results[start::2]]) for start in (0, 1))
    assert float(table['both']['test.top1 mean']) == pytest.approx(both.mean())
    assert float(table['both']['test.top1 difference']) == pytest.approx((both - plain).mean())

    times = [(folder / 'summary.csv').stat().st_mtime_ns for folder in folders]
    (folders[1] / 'result.json').write_text('{"model": ')
    assert cli.main(argv) == 0
    assert json.loads((folders[1] / 'result.json').read_text())['test'] == results[1]['test']
    assert 'continuing' in (folders[1] / 'log.txt').read_text()
    assert [times[i] == (folders[i] / 'summary.csv').stat().st_mtime_ns for i in (0, 2, 3)] == [True] * 3


def test_a_real_run_that_fails(write, tmp_path, capsys):
    parameters = {'config': {'value': 'configs/quick/digits.yaml'}, 'model-kwargs': {'value': 'curves=hilbrt'}}
    path = write(parameters=parameters, description='', command=['violin', 'train', '${args}'])
    assert cli.main(['sweep', str(path), '--output', str(tmp_path / 'out'), '--threads', '1']) == 1
    out = capsys.readouterr().out
    assert '- `run`: exit status 2: ' in out and 'hilbrt' in out
