"""Runs that are killed, terminated or out of disk, and go on as if nothing had been.

The processes that die are forks of this one, so that they need not import torch anew; torchrun's are its own.
"""

import contextlib
import csv
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from violin_timm import cli
from violin_timm.engine import checkpoints, distributed
from violin_timm.engine.checkpoints import BEST, LAST, Saver
from violin_timm.engine.config import as_yaml, settings
from violin_timm.engine.optim import Stepper
from violin_timm.recipes import supervised

ROOT = Path(__file__).parents[2]
LONG = 500  # seconds that a process may take on a busy machine
BATCHES = 5  # of an epoch


def make(output, experiment, **values):
    """Three epochs of five batches in which everything that can be drawn at random is."""
    base = {
        'model': 'violin_pixel_nano', 'model_kwargs': {'depth': 1, 'embed_dim': 16, 'num_heads': 2}, 'device': 'cpu',
        'dataset': 'digits', 'batch_size': 200, 'workers': 0, 'epochs': 3, 'warmup_epochs': 1, 'opt': 'adamw',
        'lr': 3e-3, 'drop_path': 0.2, 'drop': 0.1, 'mixup': 0.5, 'reprob': 0.3, 'model_ema': True, 'clip_grad': 1.0,
        'sched_on_updates': True, 'eval_metric': 'loss',
        'output': str(output), 'experiment': experiment, 'resume': 'auto',
    }  # fmt: skip
    return settings(**{**base, **values})


def load(folder, name=LAST):
    return torch.load(folder / name, weights_only=True)


def rows(folder):
    with open(folder / 'summary.csv', newline='') as file:
        return list(csv.DictReader(file))


def assert_same_run(one, other):
    """Equal to the last bit, in what was learnt, logged, and chosen as the best."""
    for name in (LAST, BEST):
        states = load(one, name), load(other, name)
        for key in ('state_dict', 'state_dict_ema', 'optimizer', 'epoch', 'metric'):
            flat = [torch.utils._pytree.tree_flatten(state[key])[0] for state in states]
            assert len(flat[0]) == len(flat[1]) > 0
            for a, b in zip(*flat):
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, (name, key)
    assert rows(one) == rows(other) and len(rows(one)) == 3
    files = [sorted(path.name for path in folder.iterdir()) for folder in (one, other)]
    assert files[0] == files[1]  # the numbered checkpoints, too, and nothing half-written


def at_batch(number, act):
    """Let `act` happen within batch `number` of this process, counted from 1, before its update."""
    real, calls = Stepper.backward, []

    def backward(self, loss, update):
        calls.append(update)
        if len(calls) == number:
            act()
        real(self, loss, update)

    Stepper.backward = backward


def forked(act):
    """Status of a process that calls `act`: what that returns, or the negative of the signal that killed it."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 99
        with contextlib.suppress(BaseException):
            os.setsid()
            status = act() or 0
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def command(tmp_path, args):
    """`violin train` with these settings, in this process."""
    path = tmp_path / f'{args.experiment}.yaml'
    path.write_text(as_yaml(args))
    return cli.main(['train', '--config', str(path), '--resume', 'auto'])


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """Folders of the uninterrupted runs by the number of loader workers."""
    output = tmp_path_factory.mktemp('whole')
    return {workers: supervised.run(make(output, f'{workers}', workers=workers))['folder'] for workers in (0, 2)}


@pytest.mark.parametrize('workers', [0, 2])
def test_killed_within_an_epoch(whole, tmp_path, workers):
    args = make(tmp_path, 'cut', workers=workers)

    def act():
        at_batch(BATCHES + 3, die)
        supervised.run(args)

    assert forked(act) == -signal.SIGKILL
    assert load(tmp_path / 'cut')['epoch'] == 0 and len(rows(tmp_path / 'cut')) == 1
    torch.rand(3)  # another process has other random numbers behind it
    assert_same_run(supervised.run(args)['folder'], whole[workers])


@pytest.mark.parametrize('when', ['while writing', 'before the name', 'before the numbered file', 'before the best'])
def test_killed_within_a_save(whole, tmp_path, when):
    """The second epoch's, of whose checkpoint a half is on disk, or a whole one under some of its names."""
    args = make(tmp_path, 'cut')

    def act():
        save, replace, epochs = torch.save, os.replace, []

        def half(contents, file):
            save(contents, file)
            epochs.append(contents['epoch'])
            if when == 'while writing' and contents['epoch'] == 1:
                file.truncate(file.tell() // 2)
                file.flush()
                die()

        def stop(source, target):
            names = {'before the name': LAST, 'before the numbered file': 'checkpoint-1', 'before the best': BEST}
            if epochs[-1:] == [1] and Path(target).name.startswith(names.get(when, '/')):
                die()
            replace(source, target)

        checkpoints.torch.save, os.replace = half, stop
        supervised.run(args)

    assert forked(act) == -signal.SIGKILL
    before = 0 if when in ('while writing', 'before the name') else 1
    assert load(tmp_path / 'cut')['epoch'] == before and load(tmp_path / 'cut', BEST)['epoch'] == 0
    assert len(rows(tmp_path / 'cut')) == 2  # one of them is that of no checkpoint, where that was lost
    assert_same_run(supervised.run(args)['folder'], whole[0])


@pytest.mark.parametrize(('workers', 'batch'), [(0, 3), (2, BATCHES + 3), (0, 2 * BATCHES - 1), (0, 2 * BATCHES)])
def test_terminated(whole, tmp_path, workers, batch):
    """SIGTERM, twice, to the process and its loader workers within the backward pass: seen in the next batch, if the
    epoch has one, which is done, saved, and not done again."""
    args = make(tmp_path, 'cut', workers=workers)

    def act():
        at_batch(batch, lambda: [os.killpg(0, signal.SIGTERM) for _ in range(2)])
        return command(tmp_path, args)

    assert forked(act) == 143
    state, epochs = load(tmp_path / 'cut'), -(-batch // BATCHES)
    done = batch if batch % BATCHES == 0 else batch + 1
    if done == batch:
        assert (state['epoch'], state['position']) == (epochs - 1, None)
    else:
        assert (state['epoch'], state['position']['batches']) == (epochs - 2, done - (epochs - 1) * BATCHES)
    calls, real = [], Stepper.backward
    Stepper.backward = lambda self, loss, update: calls.append(1) or real(self, loss, update)
    try:
        assert command(tmp_path, args) == 0
    finally:
        Stepper.backward = real
    assert len(calls) == 3 * BATCHES - done
    (tmp_path / 'cut' / 'args.yaml').write_bytes((whole[workers] / 'args.yaml').read_bytes())
    assert_same_run(tmp_path / 'cut', whole[workers])


def test_the_handler_is_the_callers_again(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    supervised.run(make(tmp_path, 'run', epochs=1))
    assert signal.getsignal(signal.SIGTERM) is before


def test_terminated_and_resumed_with_other_batches(tmp_path, caplog):
    """The position means nothing then: the epoch is begun again, which is said."""
    args = make(tmp_path, 'cut', epochs=1, warmup_epochs=0)
    real = Stepper.backward

    def backward(self, loss, update):
        os.kill(os.getpid(), signal.SIGTERM)
        real(self, loss, update)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(supervised.Interrupted, match='epoch 1, batch 2, which'):
        patch.setattr(Stepper, 'backward', backward)
        supervised.run(args)
    result = supervised.run(make(tmp_path, 'cut', epochs=1, warmup_epochs=0, batch_size=100))
    assert 'epoch 1 starts anew' in caplog.text and load(result['folder'])['epoch'] == 0


@pytest.mark.parametrize('what', ['checkpoint', 'row'])
def test_a_full_disk(whole, tmp_path, monkeypatch, capsys, what):
    """It stops the run with exit status 1; what was saved before is still there, and goes on once there is room."""
    args = make(tmp_path, 'cut')
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    save, update = torch.save, supervised.update_summary

    def no_room(contents, file):
        if contents['epoch'] == 1:
            file.write(b'the beginning')
            raise full
        save(contents, file)

    def no_row(epoch, *others, **named):
        if epoch == 1:
            raise full
        update(epoch, *others, **named)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.torch, 'save', no_room) if what == 'checkpoint' else patch.setattr(
            supervised, 'update_summary', no_row
        )
        assert command(tmp_path, args) == 1
    folder = tmp_path / 'cut'
    said = capsys.readouterr().err
    assert 'No space left on device' in said and f'Last good checkpoint: {folder / LAST}' in said
    assert {name: load(folder, name)['epoch'] for name in (LAST, BEST, 'checkpoint-0.pth.tar')} == {
        LAST: 0, BEST: 0, 'checkpoint-0.pth.tar': 0,
    }  # fmt: skip
    assert_same_run(supervised.run(args)['folder'], whole[0])


def test_a_full_disk_without_links_keeps_the_history(tmp_path, monkeypatch):
    """Where a numbered checkpoint is a copy, the worst one goes only when its successor is there."""
    metrics = iter([-1.0, -2.0, -3.0])
    real = Saver.save_checkpoint
    monkeypatch.setattr(Saver, 'save_checkpoint', lambda self, epoch, metric: real(self, epoch, next(metrics)))

    def refuse(*args):
        raise OSError(errno.EPERM, 'no links')

    def copy(source, target):
        if load(tmp_path / 'run')['epoch'] == 2:
            target.write(b'the beginning')
            raise OSError(errno.ENOSPC, 'no space')
        target.write(source.read())

    monkeypatch.setattr(os, 'link', refuse)
    monkeypatch.setattr(checkpoints.shutil, 'copyfileobj', copy)
    with pytest.raises(supervised.TrainingError, match='no space'):
        supervised.run(make(tmp_path, 'run', checkpoint_hist=2))
    found = {path.name: load(tmp_path / 'run', path.name)['epoch'] for path in (tmp_path / 'run').glob('*.pth.tar')}
    assert found == {LAST: 2, BEST: 1, 'checkpoint-0.pth.tar': 0, 'checkpoint-1.pth.tar': 1}
    assert not list((tmp_path / 'run').glob('.*'))


def worker(output):
    """What each of two processes does: a run, the same with a death in it, and again with SIGTERM to one of them."""
    rank, first = int(os.environ['RANK']), os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'
    values = {'batch_size': 100, 'warmup_epochs': 0}
    world = distributed.start('cpu')  # once, for all runs: torchrun's store knows one group per start
    stop, distributed.start, distributed.stop = distributed.stop, lambda device: world, lambda world: None
    supervised.run(make(output, 'whole', **values))
    if first:
        at_batch(BATCHES + 3, die if rank == 1 else lambda: None)
    supervised.run(make(output, 'killed', **values))
    at_batch(BATCHES + 3, (lambda: os.kill(os.getpid(), signal.SIGTERM)) if rank == 1 else lambda: None)
    try:
        supervised.run(make(output, 'terminated', **values))
    except supervised.Interrupted as err:
        (output / f'said{rank}').write_text(str(err))
    supervised.run(make(output, 'terminated', **values))
    stop(world)


def test_torchrun_restarts_after_the_death_of_one_process(tmp_path):
    start = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    start += ['--max-restarts', '1', '--monitor-interval', '0.1', __file__, str(tmp_path)]
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': ''}
    done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(tmp_path / 'killed', tmp_path / 'whole')
    assert_same_run(tmp_path / 'terminated', tmp_path / 'whole')
    said = [(tmp_path / f'said{rank}').read_text() for rank in range(2)]
    assert said[0] == said[1] and 'epoch 2, batch 4, which is saved' in said[0]


if __name__ == '__main__':
    worker(Path(sys.argv[1]))
