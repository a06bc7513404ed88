"""DINO: a backbone learns, without labels, to agree with a slow copy of itself on crops of the same image.

    violin dino --config configs/quick/dino_fashion.yaml
    torchrun --nproc-per-node 8 -m violin_timm dino --config configs/dino/small_100.yaml --data-dir IMAGENET

A run leaves `args.yaml`, `summary.csv`, `last.pth.tar`, `baselines.json` and `result.json` in its folder. The teacher
is the result: `timm.create_model(model, checkpoint_path='last.pth.tar', num_classes=0, ...)` loads it.

As facebookresearch/dino does it, but: position embedding, tokens and all else that the model's `no_weight_decay` names
take no weight decay; the draws of an image depend on seed, epoch and its index, so that neither `--resume auto` nor the
number of processes changes a run (drop-path apart, whose draws are each process's own).
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
from timm.utils import random_seed, update_summary

from ..data.datasets import Batches
from ..data.multicrop import CropBatches
from ..engine import build, distributed
from ..engine.checkpoints import LAST, Saver, find_resume, open_folder, resume, trim, write_text
from ..engine.config import as_yaml
from ..engine.distributed import World
from ..engine.evaluation import shown
from ..engine.logging import Progress, create_tracker, log
from ..evals.features import Features, Pixels, split_batches
from ..evals.probe import probe
from .dino_build import Schedules, build_network, build_optimizer, check, crop_batches
from .dino_loss import DinoLoss, collapse_warnings, entropies, spread
from .dino_parts import DinoStepper, DinoTask
from .supervised import TrainingError

__all__ = ['TrainingError', 'run']


@dataclass
class Run:
    """The parts of a run, as `prepare` puts them together."""

    args: Namespace
    world: World
    task: DinoTask
    train: CropBatches
    held_out: tuple[Batches, Batches] | None  # gallery and queries
    data_config: dict
    stepper: DinoStepper
    schedules: Schedules
    folder: Path | None = None  # of the primary process alone, as the saver is
    saver: Saver | None = None
    epoch: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    watched: dict[str, float] = field(default_factory=dict)  # of the last epoch
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """Epochs to train."""
        return self.args.stop_epoch or self.args.epochs


def run(args: Namespace) -> dict[str, Any]:
    """Pretrain.

    Args:
        args: From `engine.config.parse` or `settings`, with `tables.DINO`.

    Returns:
        The contents of `result.json`, and under `folder` the run's folder, None on all but the primary process.

    Raises:
        ConfigError: A setting that cannot be; nothing was written.
        TrainingError: The loss is no number any more.
    """
    check(args)
    find_resume(args)
    build.import_modules(args)
    world = distributed.start(args.device)
    try:
        parts = prepare(args, world)
        fit(parts)
        return finish(parts)
    finally:
        distributed.stop(world)


def prepare(args: Namespace, world: World) -> Run:
    """Build student, teacher, data, optimizer and schedules."""
    random_seed(args.seed, 0)  # the same everywhere: DDP equalises students, but nobody the teachers
    network, config = build_network(args)
    network.to(world.device)
    train = crop_batches(args, config, network.backbone, world)
    held_out = None
    if args.val_split:
        splits = (args.gallery_split or args.train_split, args.val_split)
        held_out = tuple(split_batches(args, split, config, world) for split in splits)

    optimizer = build_optimizer(args, network)
    loss = DinoLoss(args.out_dim, args.student_temp, args.center_momentum)
    task = DinoTask(network, loss, args.global_number, world.device)
    if world.distributed:
        task.prepare_distributed(None if world.device.type == 'cpu' else [world.device])
    schedules = Schedules(args, world, optimizer, len(train))
    if world.primary:
        size = sum(parameter.numel() for parameter in network.backbone.parameters())
        log.info('%s: %d parameters, lr %.3e, %d updates per epoch', args.model, size, schedules.peak, len(train))
    return Run(
        args=args,
        world=world,
        task=task,
        train=train,
        held_out=held_out,
        data_config=config,
        stepper=DinoStepper(args, world, task, optimizer),
        schedules=schedules,
    )


def fit(parts: Run) -> None:
    """All epochs from the first, or from the checkpoint, to the last."""
    args = parts.args
    start = _open(parts)
    _baselines(parts, start)
    tracker = create_tracker(args, parts.folder.name, parts.folder) if parts.folder else None
    progress = Progress(parts.world, parts.last, len(parts.train), args.log_interval, start)
    began, before = time.perf_counter(), parts.saver.seconds if parts.saver else 0.0

    for epoch in range(start, parts.last):
        parts.epoch = epoch
        loss = train_one_epoch(parts, progress)
        done = parts.epoch + 1
        parts.metrics = {}
        if done % args.eval_interval == 0 or done == parts.last:
            parts.metrics = evaluate(parts, Features(parts.task.teacher.backbone))
        if parts.saver:
            _say(parts, loss)
            parts.saver.seconds = before + time.perf_counter() - began
            _record(parts, loss)
            tracker.log(parts.epoch, loss, {**parts.watched, **parts.metrics}, parts.stepper.mean_rate())
    if tracker:
        tracker.finish()


def train_one_epoch(parts: Run, progress: Progress) -> float:
    """One pass over the training split.

    Returns:
        The mean loss, over all processes.

    Raises:
        TrainingError: The loss is not finite; the weights are still those before that batch.
    """
    args, task, schedules, stepper = parts.args, parts.task, parts.schedules, parts.stepper
    distributed.seed_epoch(args.seed, parts.epoch, parts.world.rank)
    parts.train.set_epoch(parts.epoch)
    task.trainable_module.train()
    frozen = list(task.student.head.last_layer.parameters()) if parts.epoch < args.freeze_last_layer else []
    watched = torch.zeros(3, device=parts.world.device)
    progress.begin(parts.epoch)

    for batch, views in enumerate(parts.train):
        progress.data_came()
        update = parts.epoch * len(parts.train) + batch
        schedules.apply(update)
        with stepper.autocast():
            result = task(views, schedules.teacher_temp[parts.epoch])
        value = result['loss'].item()
        if not math.isfinite(value):
            raise TrainingError(_broken(parts, value, update))
        stepper.step(result['loss'], frozen)
        task.follow(schedules.momentum[update])
        watched += torch.cat([entropies(result['targets']), spread(result['features'])[None]])
        progress.step(value, len(views[0]), stepper.mean_rate(), True)

    names = ('entropy', 'batch_entropy', 'spread')
    means = [distributed.mean(total / len(parts.train), parts.world) for total in watched.tolist()]
    parts.watched = dict(zip(names, means))
    return distributed.mean(progress.loss.avg, parts.world)


def evaluate(parts: Run, features: torch.nn.Module) -> dict[str, float]:
    """Accuracies of the evaluators on the held-out split; empty without one."""
    if parts.held_out is None:
        return {}
    args = parts.args
    return probe(
        features.eval(), *parts.held_out, parts.world, args.evaluators, args.k, args.temperature, parts.stepper.autocast
    )


def _open(parts: Run) -> int:
    """Restore the checkpoint to continue from, if any, and open the run's folder.

    Returns:
        The first epoch to train.
    """
    args = parts.args
    path, checkpoint, start = resume(args, parts.world, parts.task, parts.stepper, parts.schedules)
    parts.epoch = start - 1
    if not parts.world.primary:
        return start
    side = parts.data_config['input_size'][-1]
    name = '-'.join([datetime.now().strftime('%Y%m%d-%H%M%S'), safe_model_name(args.model), str(side)])
    parts.folder, in_place = open_folder(args, name, path)
    # Of two checkpoints the later is the better: DINO's loss says little, and labels are not to choose.
    parts.saver = Saver(args, parts.folder, parts.task, parts.stepper, parts.schedules, decreasing=False)
    if in_place:
        parts.saver.continue_history(checkpoint)
    trim(parts.folder / 'summary.csv', start)
    write_text(parts.folder / 'args.yaml', as_yaml(args))
    return start


def _baselines(parts: Run, start: int) -> None:
    """Evaluate what training must beat, as it begins: the untrained network, and raw pixels."""
    if start == 0:
        kinds = {'untrained': Features(parts.task.teacher.backbone), 'pixels': Pixels(parts.data_config)}
        parts.baselines = {kind: evaluate(parts, features) for kind, features in kinds.items()}
    if not parts.folder:
        return
    path = parts.folder / 'baselines.json'
    if start == 0:
        write_text(path, json.dumps(parts.baselines, indent=2) + '\n')
    elif path.exists():
        parts.baselines = json.loads(path.read_text())
    for kind, metrics in parts.baselines.items():
        if metrics:
            log.info('%s  %s', kind, shown(metrics))


def _say(parts: Run, loss: float) -> None:
    """The epoch in a line, and a warning for whatever looks like collapse."""
    watched = '  '.join(f'{name} {value:.3f}' for name, value in parts.watched.items())
    log.info('epoch %d  loss %.4f  %s  %s', parts.epoch + 1, loss, watched, shown(parts.metrics))
    for warning in collapse_warnings(*parts.watched.values(), parts.args.out_dim):
        log.warning('collapse? %s', warning)


def _record(parts: Run, loss: float) -> None:
    """An epoch's row in `summary.csv`, then its checkpoint: a resume drops the rows no checkpoint stands for."""
    args, done = parts.args, parts.epoch + 1
    names = list(next(iter(parts.baselines.values()), parts.metrics))  # every row has all columns
    evaluated = {name: parts.metrics.get(name, '') for name in names}
    rate = parts.stepper.mean_rate()
    update_summary(parts.epoch, {'loss': loss, **parts.watched}, evaluated, str(parts.folder / 'summary.csv'), lr=rate)
    parts.saver.save_checkpoint(parts.epoch, float(done))
    if done in (args.save_epochs or ()):
        parts.saver.save_milestone(done)


def finish(parts: Run) -> dict[str, Any]:
    """Write `result.json`: the teacher's accuracies after the last epoch, and the baselines."""
    args, folder = parts.args, parts.folder
    result = {
        'model': args.model,
        'dataset': args.dataset,
        'seed': args.seed,
        'epochs': parts.last,
        'parameters': sum(parameter.numel() for parameter in parts.task.student.backbone.parameters()),
        'teacher': parts.metrics or evaluate(parts, Features(parts.task.teacher.backbone)),
        **parts.baselines,
        'watched': parts.watched,
    }
    if folder:
        result['seconds'] = round(parts.saver.seconds, 1)
        write_text(folder / 'result.json', json.dumps(result, indent=2) + '\n')
        log.info('written to %s', folder)
    return {**result, 'folder': folder}


def _broken(parts: Run, loss: float, update: int) -> str:
    last = parts.folder / LAST if parts.folder else None
    good = last if last and last.exists() else 'none'
    return f'loss is {loss} in epoch {parts.epoch + 1}, update {update + 1}; stopped. Last good checkpoint: {good}'
