"""Supervised training: an image classifier by timm's flags, on timm's components.

    violin train --config configs/quick/digits.yaml
    torchrun --nproc-per-node 4 -m violin_timm train --config CONFIG.yaml --data-dir DIR

A run leaves `args.yaml`, `summary.csv`, `last.pth.tar`, `model_best.pth.tar` and `result.json` in its folder. Unlike
timm's script it ranks checkpoints by the plain model where a moving average is kept too (`--best-by ema` for that one),
and draws every epoch's random numbers anew from seed, epoch and rank, so that `--resume auto` changes nothing.
"""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from timm.models import safe_model_name
from timm.task import TrainingTask
from timm.utils import random_seed, unwrap_model, update_summary
from torch import nn

from ..data.datasets import Batches, create_dataset, evaluation_batches, training_batches
from ..engine import build, distributed
from ..engine.checkpoints import BEST, LAST, Saver, find_resume, load_checkpoint, open_folder, resume, trim, write_text
from ..engine.config import as_yaml
from ..engine.distributed import World
from ..engine.evaluation import evaluate, shown
from ..engine.logging import Progress, Tracker, create_tracker, log
from ..engine.optim import Schedule, Stepper, accumulation, create_optimizer, learning_rate

__all__ = ['TrainingError', 'run']


class TrainingError(RuntimeError):
    """Training cannot go on."""


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
    epoch: int = 0
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
        TrainingError: The loss is no number any more.
    """
    build.check(args)
    find_resume(args)
    build.import_modules(args)
    world = distributed.start(args.device)
    try:
        parts = prepare(args, world)
        if args.eval_only:
            resume(args, world, parts.task, parts.stepper, parts.schedule)
            return {'validation': _validate(parts), 'test': _test(parts), 'folder': None}
        fit(parts)
        return finish(parts)
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

    train = training_batches(args, create_dataset(args, args.train_split, channels, True), config, classes, world)
    validation, test = (
        evaluation_batches(args, create_dataset(args, split, channels), config, world) if split else None
        for split in (args.val_split, args.test_split)
    )

    task = build.create_task(args, world, model, train.mixup is not None, config)
    optimizer = create_optimizer(args, task.get_trainable_module(), lr := learning_rate(args, world))
    build.ready_task(args, world, task)
    updates = math.ceil(len(train) / args.grad_accum_steps)
    if world.primary:
        log.info('%s: %d parameters, lr %.3e, %d updates per epoch', args.model, _size(model), lr, updates)
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


def fit(parts: Run) -> None:
    """All epochs from the first, or from the checkpoint, to the last of the schedule."""
    args, schedule = parts.args, parts.schedule
    start = _open(parts)
    tracker = create_tracker(args, parts.folder.name) if parts.folder else None
    progress = Progress(parts.world, schedule.last, parts.schedule.updates_per_epoch, args.log_interval, start)
    began, before = time.perf_counter(), parts.saver.seconds if parts.saver else 0.0

    for parts.epoch in range(start, schedule.last):
        loss = train_one_epoch(parts, progress)
        done = parts.epoch + 1
        if done % args.val_interval and done != schedule.last and done not in (args.save_epochs or ()):
            schedule.after_epoch(done, None)
            continue
        metrics = _validate(parts)
        metric = metrics[_ranking(args)] if metrics else loss
        if parts.saver:
            parts.saver.seconds = before + time.perf_counter() - began
            _record(parts, loss, metric, tracker)
        schedule.after_epoch(done, metric)
    if tracker:
        tracker.finish()


def _open(parts: Run) -> int:
    """Restore the checkpoint to continue from, if any, and open the run's folder.

    Returns:
        The first epoch to train.
    """
    args = parts.args
    path, checkpoint, start = resume(args, parts.world, parts.task, parts.stepper, parts.schedule)
    parts.epoch = start - 1
    if not parts.world.primary:
        return start
    name = '-'.join([datetime.now().strftime('%Y%m%d-%H%M%S'), safe_model_name(args.model), str(parts.image_side)])
    parts.folder, in_place = open_folder(args, name, path)
    parts.saver = Saver(args, parts.folder, parts.task, parts.stepper, parts.schedule)
    if in_place:
        parts.saver.continue_history(checkpoint)
    trim(parts.folder / 'summary.csv', start)
    write_text(parts.folder / 'args.yaml', as_yaml(args))
    return start


def _record(parts: Run, loss: float, metric: float, tracker: Tracker) -> None:
    """An epoch's row in `summary.csv`, then its checkpoints: a resume drops the rows no checkpoint stands for."""
    rate = parts.stepper.mean_rate()
    update_summary(parts.epoch, {'loss': loss}, parts.metrics, str(parts.folder / 'summary.csv'), lr=rate)
    tracker.log(parts.epoch, loss, parts.metrics, rate)
    parts.saver.save_checkpoint(parts.epoch, metric)
    if parts.epoch + 1 in (parts.args.save_epochs or ()):
        parts.saver.save_milestone(parts.epoch + 1)


def train_one_epoch(parts: Run, progress: Progress) -> float:
    """One pass over the training split.

    Returns:
        The mean training loss, over all processes.

    Raises:
        TrainingError: The loss is not finite; the weights are still those before that batch.
    """
    args, task, stepper = parts.args, parts.task, parts.stepper
    distributed.seed_epoch(args.seed, parts.epoch, parts.world.rank)
    parts.train.set_epoch(parts.epoch)
    task.get_trainable_module().train()
    updates = parts.epoch * parts.schedule.updates_per_epoch
    progress.begin(parts.epoch)

    for batch, (images, targets) in enumerate(parts.train):
        progress.data_came()
        share, update = accumulation(batch, len(parts.train), args.grad_accum_steps)
        with stepper.synchronised(update):  # DDP exchanges gradients once per update
            with stepper.autocast():
                loss = task(images, targets)['loss']
            value = loss.item()
            if not math.isfinite(value):
                raise TrainingError(_broken(parts, f'loss is {value}', f'update {updates + 1}, batch {batch + 1}'))
            stepper.backward(loss / share, update)
        if update:
            updates += 1
            task.update_ema(step=updates)
        progress.step(value, len(images), stepper.mean_rate(), update)
        if update:
            parts.schedule.after_update(updates)

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
        raise TrainingError(_broken(parts, f'validation loss is {metrics["loss"]}', 'after the epoch'))
    if parts.world.primary:
        log.info('epoch %d  %s', parts.epoch + 1, shown(metrics))
    parts.metrics = metrics
    return metrics


def finish(parts: Run) -> dict[str, Any]:
    """Measure the best checkpoint on the test split, once, and write `result.json`."""
    args, folder = parts.args, parts.folder
    result = {
        'model': args.model,
        'dataset': args.dataset,
        'seed': args.seed,
        'epochs': parts.schedule.last,
        'parameters': _size(parts.model),
        'validation': parts.metrics or _validate(parts),
    }
    if parts.saver:
        result.update(
            best_epoch=parts.saver.best_epoch,
            best_metric=parts.saver.best_metric,
            best_by=_ranking(args),
            seconds=round(parts.saver.seconds, 1),
        )
    result['test'] = _test(parts)
    if folder:
        if args.dataset == 'digits' and args.test_split == 'test':
            from ..data.digits import baselines

            result['baselines'] = baselines(args.split_seed)
            log.info('raw pixels  %s', shown(result['baselines']))
        write_text(folder / 'result.json', json.dumps(result, indent=2) + '\n')
        if args.figure:
            from ..viz import training_figure

            training_figure(parts.model, folder / 'figure.png')
        log.info('written to %s', folder)
    return {**result, 'folder': folder}


def _test(parts: Run) -> dict[str, float]:
    """Metrics on the test split of the run's best checkpoint, with whose weights the model is left."""
    if parts.test is None:
        return {}
    if parts.folder:
        best = load_checkpoint(parts.folder / BEST)
        weights = best['state_dict_ema' if parts.args.best_by == 'ema' else 'state_dict']
        unwrap_model(parts.model).load_state_dict(weights)
    distributed.broadcast(unwrap_model(parts.model), parts.world)
    metrics = parts.evaluate(parts.model, parts.test)
    if parts.world.primary:
        log.info('test  %s', shown(metrics))
    return metrics


def _ranking(args: Namespace) -> str:
    """The metric that ranks checkpoints."""
    if not args.val_split:
        return 'train_loss'
    return ('ema_' if args.best_by == 'ema' else '') + args.eval_metric


def _broken(parts: Run, what: str, where: str) -> str:
    last = parts.folder / LAST if parts.folder else None
    good = last if last and last.exists() else 'none'
    return f'{what} in epoch {parts.epoch + 1}, {where}; stopped. Last good checkpoint: {good}'


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
