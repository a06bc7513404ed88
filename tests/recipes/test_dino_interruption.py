"""DINO's runs that are terminated or out of disk, and go on as if nothing had been.

The processes that SIGTERM reaches are forks of this one, so that they need not import torch anew.
"""

import contextlib
import csv
import errno
import json
import os
import signal
import socket
import sys

import pytest
import torch

from violin_timm import cli
from violin_timm.engine import checkpoints, distributed
from violin_timm.engine.checkpoints import LAST
from violin_timm.engine.config import as_yaml, settings
from violin_timm.engine.stopping import Terminate
from violin_timm.recipes import dino, dino_result
from violin_timm.recipes.dino_parts import DinoStepper
from violin_timm.recipes.tables import DINO

EPOCHS, BATCHES = 2, 4  # batches of an epoch
LONG = 500  # seconds that a process may take on a busy machine
MODEL = {
    'patch_size': 2, 'embed_dim': 16, 'depth': 2, 'num_heads': 2, 'dynamic_img_size': True,
    'pos_embed_resample': 'dino',
}  # fmt: skip


def make(output, experiment, **values):
    """Two epochs of four batches with an evaluation after each; drop-path draws from the global generator."""
    base = {
        'model': 'violin_dino_small', 'model_kwargs': MODEL, 'img_size': 8, 'in_chans': 1, 'mean': [0.3], 'std': [0.4],
        'dataset': 'digits', 'train_split': 'validation', 'device': 'cpu', 'workers': 0, 'batch_size': 72,
        'crop_pct': 1.0, 'local_size': [4], 'local_number': [1], 'jitter': [0, 0, 0, 0], 'blur_prob': [0, 0, 0],
        'out_dim': 32, 'head_hidden_dim': 16, 'head_bottleneck_dim': 8, 'lr': 2e-3, 'epochs': EPOCHS,
        'warmup_epochs': 0, 'drop_path': 0.1, 'freeze_last_layer': 1, 'weight_decay_end': 0.4, 'momentum_teacher': 0.5,
        'warmup_teacher_temp': 0.03, 'warmup_teacher_temp_epochs': 2, 'val_split': 'test', 'eval_interval': 1, 'k': [5],
        'output': str(output), 'experiment': experiment, 'resume': 'auto',
    }  # fmt: skip
    return settings(DINO, **{**base, **values})


def load(folder):
    return torch.load(folder / LAST, weights_only=True)


def read(folder, name):
    """A JSON file, without the time that the run took."""
    contents = json.loads((folder / name).read_text())
    contents.pop('seconds', None)
    return contents


def assert_same_run(one, other):
    """Equal to the last bit: student, teacher, heads, centre, optimizer, the log, and the results."""
    states = load(one), load(other)
    keys = ('state_dict', 'state_dict_ema', 'task_state', 'task_state_ema', 'optimizer', 'epoch', 'position')
    for key in keys:
        flat = [torch.utils._pytree.tree_flatten(state[key])[0] for state in states]
        assert len(flat[0]) == len(flat[1]) > 0
        for a, b in zip(*flat):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, key
    logs = []
    for folder in (one, other):
        with open(folder / 'summary.csv', newline='') as file:
            logs.append(list(csv.DictReader(file)))
    assert logs[0] == logs[1] and len(logs[0]) == EPOCHS
    for name in ('baselines.json', 'result.json'):
        assert read(one, name) == read(other, name)
    files = [sorted(path.name for path in folder.iterdir()) for folder in (one, other)]
    assert files[0] == files[1]  # and nothing half-written


def at_update(number, act):
    """Let `act` happen within update `number` of this process, counted from 1, before its step."""
    real, calls = DinoStepper.step, []

    def step(self, *args):
        calls.append(1)
        if len(calls) == number:
            act()
        real(self, *args)

    DinoStepper.step = step


def forked(*acts):
    """Exit statuses of processes that call `acts` at the same time: what these return."""
    sys.stdout.flush()
    children = []
    for act in acts:
        child = os.fork()
        if not child:
            status = 99
            signal.alarm(LONG)  # processes that do not stop together wait for each other
            with contextlib.suppress(BaseException):
                os.setsid()
                status = act() or 0
            os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def command(tmp_path, args):
    """`violin dino` with these settings, in this process."""
    path = tmp_path / f'{args.experiment}.yaml'
    path.write_text(as_yaml(args))
    return cli.main(['dino', '--config', str(path), '--resume', 'auto'])


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """Folder of the uninterrupted run."""
    return dino.run(make(tmp_path_factory.mktemp('whole'), 'whole'))['folder']


@pytest.mark.parametrize(
    ('workers', 'update'), [(0, 2), (2, BATCHES + 2), (0, BATCHES - 1), (0, BATCHES), (0, EPOCHS * BATCHES)]
)
def test_terminated(whole, tmp_path, workers, update):
    """SIGTERM, twice, to the process and its loader workers: seen in the next batch, if the epoch has one, which is
    done, saved, and not done again."""
    args = make(tmp_path, 'cut', workers=workers)

    def act():
        at_update(update, lambda: [os.killpg(0, signal.SIGTERM) for _ in range(2)])
        return command(tmp_path, args)

    assert forked(act) == [143]
    state, done = load(tmp_path / 'cut'), update + (update % BATCHES > 0)
    if done == update:
        assert (state['epoch'], state['position']) == (done // BATCHES - 1, None)
    else:
        epoch = update // BATCHES
        assert (state['epoch'], state['position']['batches']) == (epoch - 1, done - epoch * BATCHES)
    torch.rand(3)  # another process has other random numbers behind it
    calls, real, handler = [], DinoStepper.step, signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DinoStepper, 'step', lambda self, *args: calls.append(1) or real(self, *args))
        assert command(tmp_path, args) == 0
    assert len(calls) == EPOCHS * BATCHES - done
    assert signal.getsignal(signal.SIGTERM) is handler
    assert_same_run(tmp_path / 'cut', whole)


def test_without_drop_path_it_is_another_run(whole, tmp_path):
    """What the comparison above is worth: the draws of the global generator are felt."""
    other = dino.run(make(tmp_path, 'other', drop_path=0.0))['folder']
    with pytest.raises(AssertionError, match='state_dict'):
        assert_same_run(whole, other)


@pytest.mark.parametrize('what', ['checkpoint', 'row', 'position', 'result', 'baselines'])
def test_a_full_disk(whole, tmp_path, monkeypatch, capsys, what):
    """It stops the run with exit status 1; what was saved before is still there, and goes on once there is room."""
    args, folder = make(tmp_path, 'cut'), tmp_path / 'cut'
    save, update, write = torch.save, dino.update_summary, dino_result.write_text

    def refuse(real, when):
        def call(first, second, *others, **named):
            if when(first, second):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(first, second, *others, **named)

        return call

    def no_room(contents, file):
        full = contents['epoch'] == 1 if what == 'checkpoint' else contents['position']
        return full and file.write(b'the beginning')

    def no_file(path, text):
        return path.stem == what

    with monkeypatch.context() as patch:
        if what in ('checkpoint', 'position'):
            patch.setattr(checkpoints.torch, 'save', refuse(save, no_room))
        patch.setattr(dino, 'update_summary', refuse(update, lambda epoch, losses: what == 'row' and epoch == 1))
        patch.setattr(dino_result, 'write_text', refuse(write, no_file))
        if what == 'position':
            patch.setattr(DinoStepper, 'step', DinoStepper.step)  # both are put back afterwards
            patch.setattr(Terminate, 'received', False)
            at_update(BATCHES + 2, lambda: setattr(Terminate, 'received', True))
        assert command(tmp_path, args) == 1
    said = capsys.readouterr().err
    where = {'result': 'epoch 2, after', 'baselines': 'epoch 1, at the start', 'position': 'epoch 2, batch 3'}
    assert 'No space left on device' in said and where.get(what, 'epoch 2, after') in said
    last = 'none' if what == 'baselines' else folder / LAST
    assert f'Last good checkpoint: {last}' in said
    if what != 'baselines':
        assert load(folder)['epoch'] == (1 if what == 'result' else 0)
    assert not list(folder.glob('.*'))
    dino.run(args)
    assert_same_run(folder, whole)


def member(rank, port, output):
    """What each of two processes does: a run, and one again that SIGTERM to the other process ends."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', LOCAL_WORLD_SIZE='2', MASTER_ADDR='127.0.0.1',
        MASTER_PORT=str(port),
    )  # fmt: skip
    world, leave = distributed.start('cpu'), distributed.stop
    distributed.start, distributed.stop = lambda device: world, lambda world: None  # one group for all runs
    values = {'batch_size': 36}
    dino.run(make(output, 'whole', **values))
    at_update(BATCHES + 2, (lambda: os.kill(os.getpid(), signal.SIGTERM)) if rank == 1 else lambda: None)
    try:
        dino.run(make(output, 'cut', **values))
    except dino.Interrupted as err:
        (output / f'said{rank}').write_text(str(err))
    dino.run(make(output, 'cut', **values))
    leave(world)


def test_all_processes_stop_at_the_same_update(tmp_path):
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    assert forked(*(lambda rank=rank: member(rank, port, tmp_path) for rank in range(2))) == [0, 0]
    said = [(tmp_path / f'said{rank}').read_text() for rank in range(2)]
    assert said[0] == said[1] and 'epoch 2, batch 3, which is saved' in said[0]
    assert_same_run(tmp_path / 'cut', tmp_path / 'whole')
