"""The protocol as a whole: what is run, in what order, what survives a kill, what is refused."""

import json
import os
import signal
import subprocess
import sys
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


@pytest.fixture
def argv(data, tmp_path):
    """Arguments of a small protocol: two arms, two rates, one tuning and two final seeds, one epoch."""
    return [
        *('--data-dir', str(data), '--tasks', 'digits', '--task-size', '8', '--model', 'violin_pixel_nano'),
        *('--model-kwargs', 'in_chans=3', 'embed_dim=16', 'depth=1', 'num_heads=2', 'patch_size=2', '--img-size', '8'),
        *('--mean', '0.5', '0.5', '0.5', '--std', '0.5', '0.5', '0.5', '--only', 'plain', 'violin'),
        *('--lrs', *map(str, LRS), '--tune-seeds', '0', '--final-seeds', '0', '1', '--epochs', '1'),
        *('--device', 'cpu', '--workers', '0', '--threads', '1', '--output', str(tmp_path), '--experiment', 'mine'),
    ]


def plan_of(argv):
    return prepare(parse(argv, VTAB))[0]


def written(plan):
    """Every finished run's result, without its duration."""
    return {folder: {**result, 'seconds': None} for folder, result in all_results(plan).items()}


def all_results(plan):
    return {str(p.parent): json.loads(p.read_text()) for p in sorted((plan.root / 'runs').rglob('result.json'))}


def test_tunes_on_held_out_images_and_tests_the_chosen_rate_alone(argv, capsys, caplog):
    caplog.set_level('INFO')
    assert cli.main(['vtab', *argv]) == 0
    plan = plan_of(argv)
    results = list(all_results(plan).values())
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
    assert any(line.startswith('violin: ') and ' 18 mask, 170 head, ' in line for line in caplog.messages)
    assert len((plan.root / 'table.csv').read_text().splitlines()) > 2


def test_goes_on_where_it_was_stopped(argv):
    cli.main(['vtab', *argv])
    plan = plan_of(argv)
    before = written(plan)
    times = {folder: os.stat(Path(folder) / 'result.json').st_mtime_ns for folder in before}
    gone, half = (plan.folder(Job('digits', arm, 'tune', 1e-3, 0)) for arm in ('plain', 'violin'))
    (gone / 'result.json').unlink()
    (half / 'result.json').write_text((half / 'result.json').read_text()[:200])
    assert not finished(half) and len(plan.results()) < 8
    assert cli.main(['vtab', *argv]) == 0
    assert written(plan) == before
    again = {f for f, time_ns in times.items() if os.stat(Path(f) / 'result.json').st_mtime_ns != time_ns}
    assert again == {str(gone), str(half)}


def test_a_killed_protocol_with_workers_equals_one_that_was_not(argv, tmp_path):
    cli.main(['vtab', *argv, '--experiment', 'whole'])
    command = [sys.executable, '-m', 'violin_timm', 'vtab', *argv, '--jobs', '2']
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    plan = plan_of(argv)
    deadline = time.monotonic() + 120
    while not list((plan.root / 'runs').rglob('result.json')) and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = list((plan.root / 'runs').rglob('result.json'))
    assert done, 'no run ended within two minutes'
    again = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr
    whole = plan_of([*argv, '--experiment', 'whole'])
    expected = {folder.replace('/whole/', '/mine/'): result for folder, result in written(whole).items()}
    assert written(plan) == expected
    for path in (whole.root / 'runs').rglob('predictions.npy'):
        assert np.array_equal(np.load(path), np.load(str(path).replace('/whole/', '/mine/')))


def test_a_run_that_another_process_has_is_left_to_it(argv):
    plan = plan_of(argv)
    folder = plan.folder(Job('digits', 'plain', 'tune', 1e-3, 0))
    folder.mkdir(parents=True)
    _, held = lock(folder / '.lock')
    process = subprocess.Popen([sys.executable, '-m', 'violin_timm', 'vtab', *argv], stdout=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if line.startswith('[5/'):  # all that do not wait for it: the other arm, and this one's other rate
                break
        time.sleep(1)
        assert not finished(folder) and process.poll() is None
        unlock(held)
        process.communicate(timeout=120)
        assert process.returncode == 0 and finished(folder)
    finally:
        process.kill()


def test_other_settings_are_not_mixed_in_but_more_seeds_are(argv, capsys, caplog):
    caplog.set_level('INFO')
    cli.main(['vtab', *argv])
    assert cli.main(['vtab', *argv, '--epochs', '2']) == 2
    err = capsys.readouterr().err
    assert 'epochs=1' in err and '2' in err and '--experiment' in err
    assert (
        cli.main(['vtab', *argv, '--arms', "plain={'mask': 'none', 'alpha': 'none'}", "violin={'curves': 'snake'}"])
        == 2
    )
    assert 'masks_of_arm' in capsys.readouterr().err
    assert cli.main(['vtab', *argv, '--final-seeds', '0', '1', '2']) == 0
    assert any(line.startswith('[9/10]') for line in caplog.messages)


def test_one_rate_needs_no_tuning(argv):
    assert cli.main(['vtab', *argv, '--lrs', '1e-3']) == 0
    results = all_results(plan_of(argv)).values()
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
    assert len(all_results(plan)) == 4 and len(list(plan.root.rglob('failure.txt'))) == 4
    monkeypatch.undo()
    assert cli.main(['vtab', *argv]) == 0
    assert len(all_results(plan)) == 8 and not list(plan.root.rglob('failure.txt'))


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
    ],
)
def test_what_cannot_be_stops_before_any_run(argv, more, message, capsys):
    assert cli.main(['vtab', *argv, *more]) == 2
    assert message in capsys.readouterr().err
    assert not list(Path(argv[argv.index('--output') + 1]).rglob('result.json'))
