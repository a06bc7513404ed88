"""The protocol as a whole: what is run, in what order, what survives a kill, what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from violin_timm import cli
from violin_timm.data import generated
from violin_timm.engine.config import parse
from violin_timm.engine.runs import finished, lock, unlock
from violin_timm.recipes import vtab
from violin_timm.recipes.finetune import Job
from violin_timm.recipes.protocol_flags import VTAB
from violin_timm.recipes.vtab import prepare

LRS, TUNE, FINAL = [1e-3, 1e-2], [0], [0, 1]


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    """A root with the digits at 8x8 pixels."""
    root = tmp_path_factory.mktemp('tasks')
    generated.ensure(root, 'digits', 8)
    return root


def arguments(data, output):
    """Of a small protocol: two arms, two rates, one tuning and two final seeds, one epoch."""
    return [
        *('--data-dir', str(data), '--tasks', 'digits', '--task-size', '8', '--model', 'violin_pixel_nano'),
        *('--model-kwargs', 'in_chans=3', 'embed_dim=16', 'depth=1', 'num_heads=2', 'patch_size=2', '--img-size', '8'),
        *('--mean', '0.5', '0.5', '0.5', '--std', '0.5', '0.5', '0.5', '--only', 'plain', 'violin'),
        *('--lrs', *map(str, LRS), '--tune-seeds', '0', '--final-seeds', '0', '1', '--epochs', '1'),
        *('--device', 'cpu', '--workers', '0', '--threads', '1', '--output', str(output), '--experiment', 'mine'),
    ]


@pytest.fixture
def argv(data, tmp_path):
    return arguments(data, tmp_path)


@pytest.fixture(scope='module')
def ended(data, tmp_path_factory):
    """Folder of the protocol, done by one process in one go."""
    output = tmp_path_factory.mktemp('ended')
    assert cli.main(['vtab', *arguments(data, output)]) == 0
    return output / 'mine'


@pytest.fixture
def copied(argv, ended):
    """The plan of a copy of it."""
    plan = plan_of(argv)
    shutil.copytree(ended, plan.root)
    return plan


def plan_of(argv):
    return prepare(parse(argv, VTAB))[0]


def written(plan):
    """Every finished run's result, without its duration."""
    return {folder: {**result, 'seconds': None} for folder, result in results_below(plan.root).items()}


def results_below(root):
    return {str(p.parent): json.loads(p.read_text()) for p in sorted((root / 'runs').rglob('result.json'))}


def test_tunes_on_held_out_images_and_tests_the_chosen_rate_alone(argv, capsys, caplog):
    caplog.set_level('INFO')
    assert cli.main(['vtab', *argv]) == 0
    plan = plan_of(argv)
    results = list(results_below(plan.root).values())
    assert len(results) == plan.total() == 2 * (2 + 2)
    for arm in ('plain', 'violin'):
        tuning = {r['lr']: r['top1'] for r in results if r['arm'] == arm and r['stage'] == 'tune'}
        final = [r for r in results if r['arm'] == arm and r['stage'] == 'final']
        assert {r['lr'] for r in final} == {max(LRS, key=tuning.get)} and [r['seed'] for r in final] == FINAL
        assert {r['images']['train'] for r in final} == {1000} and {r['images']['evaluated'] for r in final} == {797}
        assert {r['images']['evaluated'] for r in results if r['stage'] == 'tune'} == {200}
    out = capsys.readouterr().out
    page = (plan.root / 'table.md').read_text()
    assert page in out and '8 of 8 runs finished' in page
    assert 'digits: 10 classes, 1000 images to learn from, 797 to test on' in caplog.messages
    assert any('violin_pixel_nano starts from random weights' in line for line in caplog.messages)
    assert any(line.startswith('violin: ') and ' 18 mask, 170 head, ' in line for line in caplog.messages)
    assert len((plan.root / 'table.csv').read_text().splitlines()) > 2


def test_goes_on_where_it_was_stopped(argv, copied):
    plan = copied
    before = written(plan)
    times = {folder: os.stat(Path(folder) / 'result.json').st_mtime_ns for folder in before}
    gone, half = (plan.folder(Job('digits', arm, 'tune', 1e-3, 0)) for arm in ('plain', 'violin'))
    (gone / 'result.json').unlink()
    (half / 'result.json').write_text((half / 'result.json').read_text()[:200])
    final = plan.folder(next(job for job in plan_of(argv).final(plan.tasks[0], 'plain', LRS[1])))
    again = {str(gone), str(half)}
    for failed in (gone, final):  # the latter's rate is not known when the command starts
        failed.mkdir(exist_ok=True)
        (failed / 'failure.txt').write_text('the disk was full')
    assert not finished(half) and len(plan.results()) < 8
    assert cli.main(['vtab', *argv]) == 0
    assert written(plan) == before and not list(plan.root.rglob('failure.txt'))
    done = {f for f, time_ns in times.items() if os.stat(Path(f) / 'result.json').st_mtime_ns != time_ns}
    assert done == again


def test_a_killed_protocol_with_workers_equals_one_that_was_not(argv, ended):
    command = ['vtab', *argv, '--jobs', '2']
    process = [sys.executable, '-m', 'violin_timm', *command]
    first = subprocess.Popen(process, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    plan = plan_of(argv)
    deadline = time.monotonic() + 120
    while not list((plan.root / 'runs').rglob('result.json')) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert list((plan.root / 'runs').rglob('result.json')), 'no run ended within two minutes'
    assert cli.main(command) == 0
    whole = {folder: {**result, 'seconds': None} for folder, result in results_below(ended).items()}
    assert written(plan) == {str(plan.root) + folder.removeprefix(str(ended)): run for folder, run in whole.items()}
    for path in (ended / 'runs').rglob('predictions.npy'):
        assert np.array_equal(np.load(path), np.load(plan.root / path.relative_to(ended)))


def test_a_run_that_another_process_has_is_left_to_it(argv, copied):
    folder = copied.folder(Job('digits', 'plain', 'tune', 1e-3, 0))
    for stage in ('tune-lr0.001', 'final'):  # those of this arm's final runs wait for the one that is not ours
        for path in folder.parent.glob(f'{stage}*/result.json'):
            path.unlink()
    _, held = lock(folder / '.lock')
    seen = []

    def give_back():
        time.sleep(2)
        seen.extend(results_below(copied.root))
        unlock(held)

    other = threading.Thread(target=give_back)
    other.start()
    assert cli.main(['vtab', *argv]) == 0
    other.join()
    assert len(seen) == 5 and str(folder) not in seen and len(results_below(copied.root)) == 8


def test_other_settings_are_not_mixed_in_but_more_seeds_are(argv, copied, capsys, caplog):
    caplog.set_level('INFO')
    assert cli.main(['vtab', *argv, '--epochs', '2']) == 2
    err = capsys.readouterr().err
    assert 'epochs=1' in err and '2' in err and '--experiment' in err
    arms = ["plain={'mask': 'none', 'alpha': 'none'}", "alpha only={'mask': 'none'}", "violin={'curves': 'snake'}"]
    assert cli.main(['vtab', *argv, '--arms', *arms]) == 2
    assert 'masks_of_arm' in capsys.readouterr().err
    assert cli.main(['vtab', *argv, '--final-seeds', '0', '1', '2']) == 0
    assert any(line.startswith('[9/10]') for line in caplog.messages)


def test_one_rate_needs_no_tuning(argv):
    assert cli.main(['vtab', *argv, '--lrs', '1e-3']) == 0
    results = results_below(plan_of(argv).root).values()
    assert len(results) == 4 and {r['stage'] for r in results} == {'final'}


def test_a_run_that_fails_is_named_and_tried_again(argv, monkeypatch, capsys, caplog):
    caplog.set_level('INFO')
    usual, broken = vtab.VtabSource.open, []

    def read(self, task, stage, seed):
        train, measured = usual(self, task, stage, seed)
        if stage == 'final' and len(broken) == 1:
            raise OSError('the disk is gone')
        broken.extend([1] if stage == 'final' else [])  # the first look is the check's
        return train, measured

    monkeypatch.setattr(vtab.VtabSource, 'open', read)
    assert cli.main(['vtab', *argv]) == 1
    assert any('FAILED OSError: the disk is gone' in line for line in caplog.messages)
    assert 'failure.txt' in capsys.readouterr().err
    plan = plan_of(argv)
    assert len(results_below(plan.root)) == 4 and len(list(plan.root.rglob('failure.txt'))) == 4
    monkeypatch.undo()
    assert cli.main(['vtab', *argv]) == 0
    assert len(results_below(plan.root)) == 8 and not list(plan.root.rglob('failure.txt'))


def test_lists_and_tables_without_running(argv, capsys):
    assert cli.main(['vtab', *argv, '--dry-run']) == 0
    out = capsys.readouterr().out
    assert out.count('to do') == 4 and '8 runs, 0 done' in out
    assert cli.main(['vtab', *argv, '--table-only']) == 0
    assert '0 of 8 runs finished' in capsys.readouterr().out
    assert not list(plan_of(argv).root.rglob('result.json'))


@pytest.mark.parametrize(
    ('more', 'message'),
    [
        (['--tasks', 'digit'], 'did you mean digits'),
        (['--only', 'violn'], 'did you mean violin'),
        (['--lrs', '1e-3', '1e-3'], 'twice'),
        (['--lr', '1e-3'], '--lrs'),
        (['--warmup-part', '1'], 'below 1'),
        (['--pretrained-path', 'no.pth'], 'no.pth'),
        (['--data-dir', '/nowhere', '--tasks', 'cifar'], '/nowhere'),
        (['--tasks', 'cifar'], 'cifar'),
        (['--peft', 'method=lra', 'rank=2'], "'lra'"),
        (['--layer-decay', '1.5'], '1.5'),
        (['--masks', 'kept'], 'carried'),
        (['--batch-size', '801'], '801, more than the 800 images that tune runs of digits'),
        (['--device', 'cuda:99'], 'cuda:99'),
    ],
)
def test_what_cannot_be_stops_before_any_run(argv, more, message, capsys):
    assert cli.main(['vtab', *argv, *more]) == 2
    assert message in capsys.readouterr().err
    assert not list(Path(argv[argv.index('--output') + 1]).rglob('result.json'))
