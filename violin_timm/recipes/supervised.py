"""Supervised training: an image classifier by timm's flags, on timm's components.

    violin train --config configs/quick/digits.yaml
    torchrun --nproc-per-node 4 -m violin_timm train --config CONFIG.yaml --data-dir DIR

A run leaves `args.yaml`, `summary.csv`, `last.pth.tar`, `model_best.pth.tar` and `result.json` in its folder. Unlike
timm's script it ranks checkpoints by the plain model where a moving average is kept too (`--best-by ema` for that one),
and draws every batch's random numbers anew from seed, epoch, rank and batch, so that `--resume auto` changes nothing:
on the CPU a resumed run is, to the last bit, the one that was never interrupted. SIGKILL costs what was done since the
last epoch's end; SIGTERM costs nothing, the run saves within the epoch and ends with exit status 143.
"""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.models import safe_model_name
from timm.task import TrainingTask
from timm.utils import random_seed, update_summary
from torch import nn

from ..data.datasets import Batches, create_dataset, evaluation_batches, leaves_files, training_batches
from ..engine import build, distributed
from ..engine.checkpoints import Saver, find_resume, open_folder, resume, trim, write_text
from ..engine.config import ConfigError, as_yaml
from ..engine.distributed import World
from ..engine.evaluation import evaluate, shown
from ..engine.logging import Progress, Tracker, create_tracker, log
from ..engine.optim import Schedule, Stepper, accumulation, create_optimizer, learning_rate
from ..engine.stopping import Interrupted, Terminate, TrainingError
from .interruption import broken, find_position, interrupt, interrupt_after_epoch, saving
from .supervised_result import count_parameters, finish, ranking, test_metrics

__all__ = ['Interrupted', 'TrainingError', 'run']


@dataclass
class Run:
    """The parts of a run, as `prepare` puts them together."""

    args: Namespace
    world: World
    model: nn.Module  # what is evaluated: neither DDP nor the task, but compiled where asked for
    task: TrainingTask
    train: Batches
    validation: Batches | None
    test: Batches | None
    stepper: Stepper
    schedule: Schedule
    image_side: int  # pixels
    folder: Path | None = None  # of the primary process alone, as the saver is
    saver: Saver | None = None
    tracker: Tracker = field(default_factory=Tracker)
    terminate: Terminate = field(default_factory=Terminate)
    epoch: int = 0
    batches: int = 0  # of the epoch at which the run goes on, those done before
    losses: tuple[float, int] = (0.0, 0)  # their sum, and the number of their images
    metrics: dict[str, float] = field(default_factory=dict)

    def evaluate(self, model: nn.Module, batches: Batches) -> dict[str, float]:
        return evaluate(model, batches, self.task, self.stepper, self.world)


def run(args: Namespace) -> dict[str, Any]:
    """Train, or only evaluate with `eval_only`.

    Args:
        args: From `engine.config.parse` or `engine.config.settings`.

    Returns:
        The contents of `result.json` (with `eval_only` the metrics), and under `folder` the run's folder, None on all
        but the primary process.

    Raises:
        ConfigError: A setting that cannot be; nothing was written.
        TrainingError: The loss is no number any more, or the disk is full.
        Interrupted: SIGTERM came, and the run is saved.
    """
    build.check(args)
    find_resume(args)
    build.import_modules(args)
    world = distributed.start(args.device)
    try:
        parts = prepare(args, world)
        if args.eval_only:
            resume(args, world, parts.task, parts.stepper, parts.schedule)
            return {'validation': _validate(parts), 'test': test_metrics(parts), 'folder': None}
        return fit(parts)
    finally:
        distributed.stop(world)


def prepare(args: Namespace, world: World) -> Run:
    """Build model, task, data, optimizer and schedule, in timm's order."""
    random_seed(args.seed, world.rank)
    model = build.build_model(args)
    config = build.data_config(args, model)
    channels, classes = config['input_size'][0], model.num_classes
    model.to(world.device)
    if args.channels_last:
        model.to(memory_format=torch.channels_last)

    open_all = partial(_datasets, args, channels, classes)
    data = distributed.in_turn(open_all, world) if leaves_files(args) else open_all()
    train = training_batches(args, data[0], config, classes, world)
    validation, test = (split and evaluation_batches(args, split, config, world) for split in data[1:])

    task = build.create_task(args, world, model, train.mixup is not None, config)
    optimizer = create_optimizer(args, task.get_trainable_module(), lr := learning_rate(args, world))
    build.ready_task(args, world, task)
    updates = math.ceil(len(train) / args.grad_accum_steps)
    if world.primary:
        log.info('%s: %d parameters, lr %.3e, %d updates per epoch', args.model, count_parameters(model), lr, updates)
    return Run(
        args=args,
        world=world,
        model=task.eval_model if args.torchcompile else model,
        task=task,
        train=train,
        validation=validation,
        test=test,
        stepper=Stepper(args, world, task, optimizer),
        schedule=Schedule(args, optimizer, updates),
        image_side=config['input_size'][-1],
    )


def _datasets(args: Namespace, channels: int, classes: int) -> tuple[Any, Any, Any]:
    """Training, validation and test split; None for one that is not asked for."""
    train = create_dataset(args, args.train_split, channels, training=True)
    names = getattr(train, 'classes', None)
    if names and max(names.values()) >= classes:
        raise ConfigError(f'num_classes: the model has {classes}, the data set {max(names.values()) + 1}')
    others = (args.val_split, args.test_split)
    return train, *(create_dataset(args, split, channels, classes=names) if split else None for split in others)


def fit(parts: Run) -> dict[str, Any]:
    """Train, measure, and tell the tracker how it went.

    Returns:
        As `run`.
    """
    args, result = parts.args, None
    start = _open(parts)
    if parts.folder:
        parts.tracker = create_tracker(args, parts.folder.name, parts.folder)
    try:
        with parts.terminate:
            train_all(parts, start)
        parts.metrics = parts.metrics or _validate(parts)
        result = finish(parts)
        return result
    finally:
        parts.tracker.finish({k: v for k, v in (result or {}).items() if k != 'folder'}, failed=result is None)


def train_all(parts: Run, start: int) -> None:
    """All epochs from the first, or from the checkpoint, to the last of the schedule."""
    args, schedule = parts.args, parts.schedule
    progress = Progress(parts.world, schedule.last, parts.schedule.updates_per_epoch, args.log_interval, start)

    for parts.epoch in range(start, schedule.last):
        loss = train_one_epoch(parts, progress)
        done = parts.epoch + 1
        if done % args.val_interval and done != schedule.last and done not in (args.save_epochs or ()):
            schedule.after_epoch(done, None)
            continue
        metrics = _validate(parts)
        metric = metrics[ranking(args)] if metrics else loss
        if parts.saver:
            _record(parts, loss, metric)
        schedule.after_epoch(done, metric)
        interrupt_after_epoch(parts)


def _open(parts: Run) -> int:
    """Restore the checkpoint to continue from, if any, and open the run's folder.

    Returns:
        The first epoch to train.
    """
    args, schedule = parts.args, parts.schedule
    path, checkpoint, start = resume(args, parts.world, parts.task, parts.stepper, schedule)
    parts.epoch = start - 1
    if find_position(parts, checkpoint, start):
        updates = math.ceil(parts.batches / args.grad_accum_steps)
        schedule.after_update(start * schedule.updates_per_epoch + updates)
    if not parts.world.primary:
        return start
    name = '-'.join([datetime.now().strftime('%Y%m%d-%H%M%S'), safe_model_name(args.model), str(parts.image_side)])
    parts.folder, in_place = open_folder(args, name, path)
    parts.saver = Saver(args, parts.folder, parts.task, parts.stepper, schedule)
    if in_place:
        parts.saver.continue_history(checkpoint)
    trim(parts.folder / 'summary.csv', start)
    write_text(parts.folder / 'args.yaml', as_yaml(args))
    return start


def _record(parts: Run, loss: float, metric: float) -> None:
    """An epoch's row in `summary.csv`, then its checkpoints: a resume drops the rows no checkpoint stands for."""
    rate, saver = parts.stepper.mean_rate(), parts.saver
    saver.count_time()
    with saving(parts, 'after the epoch'):
        update_summary(parts.epoch, {'loss': loss}, parts.metrics, str(parts.folder / 'summary.csv'), lr=rate)
        parts.tracker.log(parts.epoch, loss, parts.metrics, rate)
        saver.save_checkpoint(parts.epoch, metric)
        if parts.epoch + 1 in (parts.args.save_epochs or ()):
            saver.save_milestone(parts.epoch + 1)


def train_one_epoch(parts: Run, progress: Progress) -> float:
    """One pass over the training split.

    Returns:
        The mean training loss, over all processes.

    Raises:
        TrainingError: The loss is not finite; the weights are still those before that batch.
        Interrupted: SIGTERM came.
    """
    args, task, stepper = parts.args, parts.task, parts.stepper
    distributed.seed_epoch(args.seed, parts.epoch, parts.world.rank)
    parts.train.set_epoch(parts.epoch, done := parts.batches)
    task.get_trainable_module().train()
    progress.begin(parts.epoch, math.ceil(done / args.grad_accum_steps), parts.losses)
    updates = parts.epoch * parts.schedule.updates_per_epoch + progress.update
    parts.batches, parts.losses = 0, (0.0, 0)

    for batch, (images, targets) in enumerate(parts.train, done):
        progress.data_came()
        share, update = accumulation(batch, len(parts.train), args.grad_accum_steps)
        with stepper.synchronised(update):  # DDP exchanges gradients once per update
            with stepper.autocast():
                loss = task(images, targets)['loss']
            value = loss.item()
            bad, stop = distributed.any_of([not math.isfinite(value), parts.terminate.received], parts.world)
            if bad:
                raise TrainingError(broken(parts, f'loss is {value}', f'update {updates + 1}, batch {batch + 1}'))
            stepper.backward(loss / share, update)
        if update:
            updates += 1
            task.update_ema(step=updates)
        progress.step(value, len(images), stepper.mean_rate(), update)
        if update:
            parts.schedule.after_update(updates)
            if stop:
                interrupt(parts, batch + 1, progress)

    stepper.end_epoch()
    return distributed.mean(progress.loss.avg, parts.world)


def _validate(parts: Run) -> dict[str, float]:
    """Metrics on the validation split, those of the moving average with `ema_` before; empty without a split."""
    if parts.validation is None:
        return {}
    metrics = parts.evaluate(parts.model, parts.validation)
    if parts.task.has_ema() and not parts.args.model_ema_force_cpu:
        average = parts.evaluate(parts.task.get_eval_model(ema=True), parts.validation)
        metrics.update({f'ema_{key}': value for key, value in average.items()})
    if not math.isfinite(metrics['loss']):
        raise TrainingError(broken(parts, f'validation loss is {metrics["loss"]}', 'after the epoch'))
    if parts.world.primary:
        log.info('epoch %d  %s', parts.epoch + 1, shown(metrics))
    parts.metrics = metrics
    return metrics
