"""What a run says of itself: to wandb, real where that is installed, else a stand-in; and on its progress lines."""

import importlib.machinery
import json
import sys
import types

import pytest
import torch

from violin_timm.engine import logging as engine_logging
from violin_timm.engine.checkpoints import LAST
from violin_timm.engine.config import ConfigError, settings
from violin_timm.engine.distributed import World
from violin_timm.engine.logging import Progress
from violin_timm.engine.optim import Stepper
from violin_timm.recipes import supervised


@pytest.fixture
def make(tmp_path):
    def _make(**values):
        base = {
            'model': 'violin_pixel_nano', 'model_kwargs': {'depth': 1, 'embed_dim': 16, 'num_heads': 2},
            'device': 'cpu', 'dataset': 'digits', 'batch_size': 500, 'workers': 0, 'epochs': 2, 'warmup_epochs': 0,
            'opt': 'adamw', 'lr': 3e-3, 'output': str(tmp_path), 'experiment': 'run', 'log_wandb': True,
            'wandb_project': 'p', 'wandb_tags': ['a', 'b'], 'test_split': 'test',
        }  # fmt: skip
        return settings(**{**base, **values})

    return _make


class StandIn(types.ModuleType):
    """wandb's `init` and what it returns, as far as they are used."""

    def __init__(self, broken=False):
        super().__init__('wandb')
        self.__spec__ = importlib.machinery.ModuleSpec('wandb', None)
        self.broken, self.calls, self.runs = broken, [], {}

    def init(self, **given):
        self.calls.append(given)
        if self.broken and given.get('mode') != 'offline':
            raise RuntimeError('api_key not configured (no-tty)')
        name = given['id'] or f'id{len(self.runs)}'
        assert given['resume'] != 'must' or name in self.runs
        run = self.runs.setdefault(name, types.SimpleNamespace(id=name, rows={}, summary={}, config={}, codes=[]))
        run.config.update(given['config'])
        run.log = lambda row, step: run.rows.update({step: row})
        run.finish = lambda exit_code: run.codes.append(exit_code)
        return run


@pytest.fixture
def wandb(monkeypatch):
    def put(broken=False):
        monkeypatch.setitem(sys.modules, 'wandb', module := StandIn(broken))
        return module

    return put


def test_one_complete_run(make, wandb, tmp_path):
    module = wandb()
    result = supervised.run(args := make())
    (run,) = module.runs.values()
    assert run.config == vars(args) and run.codes == [0]
    assert module.calls[0]['name'] == 'run' and module.calls[0]['project'] == 'p'
    assert module.calls[0]['tags'] == ['a', 'b'] and module.calls[0]['dir'] == str(tmp_path / 'run')
    assert list(run.rows) == [0, 1]
    assert set(run.rows[1]) == {'epoch', 'train_loss', 'lr', 'eval_loss', 'eval_top1', 'eval_top5'}
    assert run.rows[1]['eval_top1'] == result['validation']['top1']
    assert run.summary['test.top1'] == result['test']['top1'] and run.summary['best_epoch'] == result['best_epoch']
    assert {'parameters', 'seconds', 'best_metric', 'validation.loss', 'seed'} <= set(run.summary)
    json.dumps(run.summary)  # no paths


def test_a_resumed_run_is_the_same_run_there(make, wandb, monkeypatch):
    module = wandb()
    real, calls = Stepper.backward, []

    def interrupt(self, loss, update):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        real(self, loss, update)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, 'backward', interrupt)
        with pytest.raises(KeyboardInterrupt):
            supervised.run(make())
    assert list(module.runs) == ['id0'] and module.runs['id0'].codes == [1]
    supervised.run(make(resume='auto'))
    assert list(module.runs) == ['id0'] and module.calls[1]['resume'] == 'allow'
    assert list(module.runs['id0'].rows) == [0, 1] and module.runs['id0'].codes == [1, 0]
    supervised.run(make(epochs=3, resume='auto', wandb_resume_id='id0'))
    assert module.calls[2]['resume'] == 'must' and list(module.runs['id0'].rows) == [0, 1, 2]
    supervised.run(make(epochs=1))  # another run, in another folder
    assert list(module.runs) == ['id0', 'id1']


def test_without_network_or_terminal(make, wandb, caplog, tmp_path):
    module = wandb(broken=True)
    supervised.run(make(epochs=1))
    assert [call.get('mode') for call in module.calls] == [None, 'offline'] and list(module.runs['id0'].rows) == [0]
    assert 'api_key not configured' in caplog.text and 'wandb sync' in caplog.text
    assert (tmp_path / 'run' / LAST).exists()


@pytest.mark.parametrize('left', [None, types.ModuleType('wandb')], ids=['nothing', 'the folder of earlier runs'])
def test_without_wandb(make, monkeypatch, tmp_path, left):
    monkeypatch.setitem(sys.modules, 'wandb', left)
    with pytest.raises(ConfigError, match=r"log_wandb: wandb is not installed; pip install 'violin-timm\[wandb\]'"):
        supervised.run(make())
    assert list(tmp_path.iterdir()) == []  # before any work
    supervised.run(make(log_wandb=False, epochs=1))
    assert not (tmp_path / 'run' / 'wandb.txt').exists()


def test_wandb_itself_offline(make, monkeypatch, tmp_path):
    wandb = pytest.importorskip('wandb')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    supervised.run(make(stop_epoch=1))
    supervised.run(make(resume='auto'))
    known = (tmp_path / 'run' / 'wandb.txt').read_text()
    folders = sorted((tmp_path / 'run' / 'wandb').glob('offline-run-*'))
    assert len(folders) == 2 and all(folder.name.endswith(known) for folder in folders)
    assert all(list(folder.glob('*.wandb')) for folder in folders) and wandb.run is None


def test_progress_lines_add_up(monkeypatch):
    """Two processes of ten images a batch; a batch is waited for one second and computed in three."""
    now = [100.0]
    monkeypatch.setattr(engine_logging.time, 'perf_counter', lambda: now[0])
    progress = Progress(World(torch.device('cpu'), 0, 2), epochs=3, updates_per_epoch=4, interval=4, start_epoch=1)
    progress.begin(1)
    for _ in range(4):
        now[0] += 1
        progress.data_came()
        now[0] += 3
        progress.step(2.0, 10, 0.1, True)
    # 80 images in 16 seconds; four updates of eight are left, at four seconds each
    line = progress.line(0.1)
    assert line == (
        'epoch 2/3  update 4/4  loss 2.0000  lr 1.000e-01  5.0 images/s  waiting for data 25%  left 0:00:16'
    )


def test_progress_within_an_epoch(monkeypatch):
    """Half of the epoch was done by another process: its losses count, its time does not."""
    now = [0.0]
    monkeypatch.setattr(engine_logging.time, 'perf_counter', lambda: now[0])
    progress = Progress(World(torch.device('cpu')), epochs=1, updates_per_epoch=4, interval=1, start_epoch=0)
    progress.begin(0, 2, (60.0, 20))
    now[0] += 5
    progress.step(1.0, 20, 0.1, True)
    assert 'update 3/4  loss 2.0000' in progress.line(0.1) and progress.line(0.1).endswith('left 0:00:05')
