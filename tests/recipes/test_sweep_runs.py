"""A sweep's points into runs that survive failures and kills. The runs are of `FAKE`, which trains nothing."""

import csv
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from violin_timm import cli
from violin_timm.engine.config import ConfigError
from violin_timm.engine.runs import finished
from violin_timm.recipes import sweep as sweeps
from violin_timm.recipes.sweep_points import read_sweep
from violin_timm.recipes.sweep_runs import Runner, check_same, outcome
from violin_timm.recipes.sweep_table import Outcome

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
def fake(tmp_path):
    path = tmp_path / 'fake.py'
    path.write_text(FAKE)
    return [sys.executable, '-S', str(path)]


def starts(folder):
    path = folder / 'starts.txt'
    return path.read_text().splitlines() if path.exists() else []


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'waited in vain'
        time.sleep(0.02)


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


def test_runs_and_then_skips(write_sweep, fake, tmp_path, capsys):
    sweep = read_sweep(write_sweep())
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


def test_failures_are_recorded_shown_and_tried_again(write_sweep, fake, tmp_path, capsys):
    sweep = read_sweep(write_sweep(seeds=(0, 7, 8)))
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
def test_kill_of_the_sweep(write_sweep, fake, tmp_path, victim):
    """A run that outlives its sweep is waited for, not doubled; one killed with it is started again."""
    parameters = {'seed': {'values': [0, 9, 1]}, 'lr': {'value': 0.1}}
    sweep = read_sweep(write_sweep(parameters=parameters, description=''))
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


def test_interruption_stops_the_runs(write_sweep, fake, tmp_path):
    sweep = read_sweep(write_sweep(parameters={'seed': {'values': [9]}, 'lr': {'value': 0.1}}, description=''))
    folder = tmp_path / 'runs' / sweep.points[0].name
    process = multiprocessing.get_context('fork').Process(target=Runner(sweep, tmp_path, 1, 1, fake).run)
    process.start()
    wait_for(lambda: (folder / 'result.json').exists())
    child = _process_of(folder)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode not in (0, None) and not Path(f'/proc/{child}').exists()
    assert outcome(folder, ()) == Outcome()  # neither done nor failed


def test_another_setting_does_not_pass_for_the_same_run(write_sweep, fake, tmp_path, capsys, lr_grid):
    sweep = read_sweep(write_sweep())
    Runner(sweep, tmp_path, 2, 1, fake).run()
    parameters = lr_grid() | {'lr': {'value': 0.2}, 'config': {'value': 'configs/quick/digits.yaml'}}
    path = write_sweep(parameters=parameters)
    with pytest.raises(ConfigError, match=r'was run with lr=0\.1, and is now to have 0\.2'):
        check_same(read_sweep(path).points[0], tmp_path / 'runs' / sweep.points[0].name)
    assert cli.main(['sweep', str(path), '--output', str(tmp_path)]) == 2
    assert 'take another --output' in capsys.readouterr().err


def test_dry_run_and_table_only_start_nothing(write_sweep, fake, tmp_path, capsys):
    path = write_sweep()
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
