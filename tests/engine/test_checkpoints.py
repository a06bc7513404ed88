"""Checkpoints: atomic, plain, and ranked on after an interruption as if there had been none."""

import os
import random

import numpy as np
import pytest
import torch
from timm.task import ClassificationTask
from torch import nn

from violin_timm.engine import checkpoints
from violin_timm.engine.checkpoints import BEST, LAST, Saver
from violin_timm.engine.config import ConfigError, settings
from violin_timm.engine.distributed import World, seed_epoch
from violin_timm.engine.optim import Schedule, Stepper, accumulation, create_optimizer, learning_rate

CPU = World(torch.device('cpu'))


def make(folder, **values):
    """A saver of a one-layer model; its weight says which epoch it is of."""
    args = settings(model='tiny', opt='adamw', epochs=9, **values)
    task = ClassificationTask(nn.Linear(2, 2), verbose=False)
    optimizer = create_optimizer(args, task.trainable_module, 0.1)
    stepper, schedule = Stepper(args, CPU, task, optimizer), Schedule(args, optimizer, 1)
    return Saver(args, folder, task, stepper, schedule), task, stepper, schedule


def save(saver, epoch, metric):
    nn.init.constant_(saver.task.trainable_module.weight, epoch)
    return saver.save_checkpoint(epoch, metric)


def epoch_in(path):
    state = torch.load(path, weights_only=True)
    assert (state['state_dict']['weight'] == state['epoch']).all()
    return state['epoch']


def files(folder):
    return {path.name: epoch_in(path) for path in sorted(folder.iterdir())}


def test_keeps_last_best_and_history(tmp_path):
    saver = make(tmp_path, checkpoint_hist=2)[0]
    for epoch, metric in enumerate([1.0, 5.0, 3.0, 2.0]):
        save(saver, epoch, metric)
    assert files(tmp_path) == {'checkpoint-1.pth.tar': 1, 'checkpoint-2.pth.tar': 2, LAST: 3, BEST: 1}
    assert (saver.best_epoch, saver.best_metric) == (1, 5.0)


def test_loads_with_weights_only_and_says_what_it_is(tmp_path):
    saver, task, stepper, _ = make(tmp_path)
    task.trainable_module(torch.ones(1, 2)).sum().backward()
    stepper.optimizer.step()
    saver.save_checkpoint(0, 1.0)
    state = torch.load(tmp_path / LAST, weights_only=True)
    assert type(state['args']) is dict and state['args']['opt'] == 'adamw' and state['arch'] == 'tiny'
    assert (state['epoch'], state['version'], state['metric']) == (0, 2, 1.0)
    assert {'state_dict', 'optimizer', 'lr_scheduler', 'rng', 'saver', 'seconds'} <= set(state)


def test_timm_resumes_from_it(tmp_path):
    from timm.task import resume_task_checkpoint

    saver, _, _, _ = make(tmp_path)
    save(saver, 4, 1.0)
    _, task, stepper, _ = make(tmp_path)
    assert resume_task_checkpoint(task, str(tmp_path / LAST), stepper.optimizer, log_info=False) == 5
    assert (task.trainable_module.weight == 4).all()


@pytest.mark.parametrize('broken', ['torch.save', 'os.fsync', 'os.replace'])
def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch, broken):
    saver = make(tmp_path)[0]
    save(saver, 0, 1.0)
    before = files(tmp_path)

    def fail(*args, **kwargs):
        if broken == 'torch.save':
            args[1].write(b'half a checkpoint')
        raise OSError('disk full')

    module, name = broken.split('.')
    with monkeypatch.context() as patch:
        patch.setattr(torch if module == 'torch' else os, name, fail)
        with pytest.raises(OSError, match='disk full'):
            save(saver, 1, 2.0)
    assert files(tmp_path) == before  # nothing half-written under any name, either


def test_a_file_is_replaced_in_one_step(tmp_path, monkeypatch):
    path, real, seen = tmp_path / 'file', os.replace, []

    def watch(source, target):
        seen.append(path.read_text())
        real(source, target)
        seen.append(path.read_text())

    checkpoints.write_text(path, 'old')
    monkeypatch.setattr(os, 'replace', watch)
    checkpoints.write_text(path, 'new')
    assert seen == ['old', 'new'] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize('links', [True, False])
def test_a_file_is_there_at_every_moment(tmp_path, monkeypatch, links):
    """Nothing is unlinked before its successor has its name."""
    saver = make(tmp_path, checkpoint_hist=1)[0]
    if not links:
        monkeypatch.setattr(os, 'link', lambda *args: (_ for _ in ()).throw(OSError('no links here')))
    save(saver, 0, 1.0)
    real, seen = os.replace, []

    def watch(source, target):
        seen.append((tmp_path / LAST).exists() and (tmp_path / BEST).exists())
        real(source, target)

    monkeypatch.setattr(os, 'replace', watch)
    for epoch in (1, 2):
        save(saver, epoch, float(epoch + 1))
        assert epoch_in(tmp_path / LAST) == epoch_in(tmp_path / BEST) == epoch
    assert len(seen) >= 6 and all(seen)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith('.')]


METRICS = [1.0, 5.0, 3.0, 5.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize('killed_at', range(6))
@pytest.mark.parametrize('moment', ['after the epoch', 'after last', 'after the numbered file'])
def test_history_goes_on_as_if_never_interrupted(tmp_path, monkeypatch, killed_at, moment):
    whole, cut = tmp_path / 'whole', tmp_path / 'cut'
    whole.mkdir()
    cut.mkdir()
    saver = make(whole, checkpoint_hist=3)[0]
    for epoch, metric in enumerate(METRICS):
        save(saver, epoch, metric)

    saver = make(cut, checkpoint_hist=3)[0]
    for epoch in range(killed_at):
        save(saver, epoch, METRICS[epoch])
    with monkeypatch.context() as patch:
        stop = {'after last': '_duplicate', 'after the numbered file': '_track_checkpoint'}.get(moment)
        if stop:
            patch.setattr(Saver, stop, lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
        try:
            save(saver, killed_at, METRICS[killed_at])
        except KeyboardInterrupt:
            assert stop

    saver, task, stepper, schedule = make(cut, checkpoint_hist=3)
    state = checkpoints.load_checkpoint(cut / LAST)
    assert checkpoints.restore(state, task, stepper, schedule) == killed_at + 1
    saver.continue_history(state)
    assert files(cut)[BEST] == METRICS.index(max(METRICS[: killed_at + 1]))
    for epoch in range(killed_at + 1, len(METRICS)):
        save(saver, epoch, METRICS[epoch])
    assert files(cut) == files(whole)


def test_generators_come_back():
    def draw():
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()]

    random.gauss(0, 1)  # leaves a second number in store, as numpy's does
    np.random.randn()
    state = checkpoints.rng_state()
    first = draw()
    assert draw() != first
    checkpoints.set_rng_state(state)
    assert draw() == first


def test_restore_brings_the_generators_back(tmp_path):
    saver, task, stepper, schedule = make(tmp_path)
    save(saver, 0, 1.0)
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    checkpoints.restore(checkpoints.load_checkpoint(tmp_path / LAST), task, stepper, schedule)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn


def test_epoch_seeds_depend_on_all_of_seed_epoch_and_rank():
    def draw(*key):
        seed_epoch(*key)
        return random.random(), np.random.rand(), torch.rand(1).item()

    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    draws = [draw(*key) for key in keys]
    assert len(set(draws)) == 4 and draws == [draw(*key) for key in keys]


def test_plateau_remembers_its_patience(tmp_path):
    values = {'sched': 'plateau', 'patience_epochs': 2, 'warmup_epochs': 0, 'decay_rate': 0.5}
    saver, task, stepper, schedule = make(tmp_path, **values)
    rates = []
    for epoch in range(8):
        save(saver, epoch, 1.0)
        if epoch == 3:
            (tmp_path / LAST).rename(tmp_path / 'fourth')
        schedule.after_epoch(epoch + 1, 1.0)
        rates.append(stepper.mean_rate())
    assert rates[0] == 0.1 and len(set(rates)) > 2

    _, task, stepper, schedule = make(tmp_path, **values)
    checkpoints.restore(checkpoints.load_checkpoint(tmp_path / 'fourth'), task, stepper, schedule)
    again = [stepper.mean_rate()]
    for epoch in range(4, 8):
        schedule.after_epoch(epoch + 1, 1.0)
        again.append(stepper.mean_rate())
    assert again == rates[3:]


def test_a_longer_schedule_takes_effect_on_resume(tmp_path):
    saver, _, _, _ = make(tmp_path, warmup_epochs=0)
    save(saver, 4, 1.0)
    state = checkpoints.load_checkpoint(tmp_path / LAST)
    _, task, stepper, _ = make(tmp_path, warmup_epochs=0)
    longer = Schedule(settings(epochs=10, warmup_epochs=0, min_lr=0.0), stepper.optimizer, 1)
    checkpoints.restore(state, task, stepper, longer)
    assert stepper.mean_rate() == pytest.approx(0.1 / 2)  # half-way down the cosine


def test_resume_refusals(tmp_path):
    (tmp_path / 'junk').write_bytes(b'junk')
    torch.save({'weights': 1}, tmp_path / 'other')
    for name, message in (('junk', 'no checkpoint'), ('other', 'holds no state_dict')):
        with pytest.raises(ConfigError, match=message):
            checkpoints.load_checkpoint(tmp_path / name)
    saver, task, stepper, schedule = make(tmp_path)
    save(saver, 0, 1.0)
    state = checkpoints.load_checkpoint(tmp_path / LAST)
    state['state_dict'] = {'weight': torch.zeros(3, 2)}
    with pytest.raises(ConfigError, match='of another model'):
        checkpoints.restore(state, task, stepper, schedule)


def test_summary_is_trimmed(tmp_path):
    summary = tmp_path / 'summary.csv'
    checkpoints.trim(summary, 3)  # there is none
    summary.write_text('epoch,train_loss\n0,3.0\n1,2.0\n2,1.0\n')
    checkpoints.trim(summary, 2)
    assert summary.read_text().split() == ['epoch,train_loss', '0,3.0', '1,2.0']


def test_folders_never_collide(tmp_path):
    args = settings(output=str(tmp_path), experiment='x')
    folder = tmp_path / 'x'
    assert checkpoints.open_folder(args, '', None) == (folder, False)
    assert checkpoints.open_folder(args, '', None) == (folder, False)  # nothing in it yet
    (folder / LAST).touch()
    assert checkpoints.open_folder(args, '', folder / LAST) == (folder, True)
    assert checkpoints.open_folder(args, '', None) == (tmp_path / 'x-1', False)
    assert checkpoints.open_folder(settings(output=str(tmp_path)), 'now', None) == (tmp_path / 'now', False)


def test_learning_rate_scales_with_the_images_per_update():
    values = {'batch_size': 64, 'grad_accum_steps': 2, 'lr_base': 0.1, 'lr_base_size': 64}
    four = World(torch.device('cpu'), 0, 4)
    assert learning_rate(settings(opt='sgd', **values), four) == pytest.approx(0.8)
    assert learning_rate(settings(opt='adamw', **values), four) == pytest.approx(0.1 * 8**0.5)
    assert learning_rate(settings(opt='adamw', lr_base_scale='linear', **values), four) == pytest.approx(0.8)
    assert learning_rate(settings(lr=0.3, **values), four) == 0.3


def test_accumulation_shares_the_rest():
    assert [accumulation(batch, 5, 2) for batch in range(5)] == [
        (2, False),
        (2, True),
        (2, False),
        (2, True),
        (1, True),
    ]
    assert [accumulation(batch, 2, 1) for batch in range(2)] == [(1, True), (1, True)]


def test_optimizer_refusals():
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="opt: got 'adamv'; did you mean adam"):
        create_optimizer(settings(opt='adamv'), model, 0.1)
    with pytest.raises(ConfigError, match='opt_kwargs: adamw does not take'):
        create_optimizer(settings(opt='adamw', opt_kwargs={'bogus': 1}), model, 0.1)
    with pytest.raises(ConfigError, match='opt: sgd: Nesterov momentum requires'):
        create_optimizer(settings(opt='sgd', momentum=0.0), model, 0.1)
    create_optimizer(settings(opt='lookahead_adamw'), model, 0.1)
