"""DINO: a backbone learns, without labels, to agree with a slow copy of itself on crops of the same image.

    violin dino --config configs/quick/dino_fashion.yaml
    torchrun --nproc-per-node 8 -m violin_timm dino --config configs/dino/small_100.yaml --data-dir IMAGENET

A run leaves `args.yaml`, `summary.csv`, `last.pth.tar`, `baselines.json` and `result.json` in its folder. The teacher
is the result: `timm.create_model(model, checkpoint_path='last.pth.tar', num_classes=0, ...)` loads it.

As facebookresearch/dino does it, but: position embedding, tokens and all else that the model's `no_weight_decay` names
take no weight decay; the draws of an image depend on seed, epoch and its index, so that neither `--resume auto` nor the
number of processes changes a run (drop-path apart, whose draws are each process's own: of seed, epoch, rank and batch).
SIGTERM costs nothing, as in `violin train`: the run saves within the epoch and ends with exit status 143.
"""

from __future__ import annotations

import math
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
from ..engine.checkpoints import Saver, find_resume, open_folder, resume, trim, write_text
from ..engine.config import as_yaml
from ..engine.distributed import World
from ..engine.logging import Progress, Tracker, create_tracker, log
from ..engine.stopping import Interrupted, Terminate, TrainingError
from ..evals.features import Features, split_batches
from .dino_build import Schedules, build_network, build_optimizer, check, crop_batches
from .dino_loss import DinoLoss, entropies, spread
from .dino_parts import DinoStepper, DinoTask
from .dino_result import WATCHED, evaluate, find_baselines, finish, last_watched, say
from .interruption import broken, find_position, interrupt, interrupt_after_epoch, saving

__all__ = ['Interrupted', 'TrainingError', 'run']


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
    tracker: Tracker = field(default_factory=Tracker)
    terminate: Terminate = field(default_factory=Terminate)
    epoch: int = 0
    batches: int = 0  # of the epoch at which the run goes on, those done before
    losses: tuple[float, int] = (0.0, 0)  # their sum, and the number of their images
    sums: list[float] = field(default_factory=lambda: [0.0] * len(WATCHED))  # of what was watched in them
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
        TrainingError: The loss is no number any more, or the disk is full.
        Interrupted: SIGTERM came, and the run is saved.
    """
    check(args)
    find_resume(args)
    build.import_modules(args)
    world = distributed.start(args.device)
    try:
        return fit(prepare(args, world))
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


def fit(parts: Run) -> dict[str, Any]:
    """Train, measure, and tell the tracker how it went.

    Returns:
        As `run`.
    """
    result = None
    start, fresh = _open(parts)
    find_baselines(parts, fresh)
    if parts.folder:
        parts.tracker = create_tracker(parts.args, parts.folder.name, parts.folder)
    try:
        with parts.terminate:
            train_all(parts, start)
        result = finish(parts)
        return result
    finally:
        parts.tracker.finish({k: v for k, v in (result or {}).items() if k != 'folder'}, failed=result is None)


def train_all(parts: Run, start: int) -> None:
    """All epochs from the first, or from the checkpoint, to the last."""
    args, last = parts.args, parts.last
    progress = Progress(parts.world, last, len(parts.train), args.log_interval, start)
    for parts.epoch in range(start, last):
        loss = train_one_epoch(parts, progress)
        done = parts.epoch + 1
        parts.metrics = {}
        if done % args.eval_interval == 0 or done == last:
            parts.metrics = evaluate(parts, Features(parts.task.teacher.backbone))
        if parts.saver:
            say(parts, loss)
            _record(parts, loss)
        interrupt_after_epoch(parts)


def train_one_epoch(parts: Run, progress: Progress) -> float:
    """One pass over the training split.

    Returns:
        The mean loss, over all processes.

    Raises:
        TrainingError: The loss is not finite; the weights are still those before that batch.
        Interrupted: SIGTERM came.
    """
    args, task, schedules, stepper = parts.args, parts.task, parts.schedules, parts.stepper
    distributed.seed_epoch(args.seed, parts.epoch, parts.world.rank)
    parts.train.set_epoch(parts.epoch, parts.batches)
    task.trainable_module.train()
    frozen = list(task.student.head.last_layer.parameters()) if parts.epoch < args.freeze_last_layer else []
    progress.begin(parts.epoch, done := parts.batches, parts.losses)
    watched = torch.tensor(parts.sums, device=parts.world.device)
    parts.batches, parts.losses, parts.sums = 0, (0.0, 0), [0.0] * len(WATCHED)

    for batch, views in enumerate(parts.train, done):
        progress.data_came()
        distributed.seed_batch(args.seed, parts.epoch, parts.world.rank, batch)  # of drop-path's draws
        update = parts.epoch * len(parts.train) + batch
        schedules.apply(update)
        with stepper.autocast():
            result = task(views, schedules.teacher_temp[parts.epoch])
        value = result['loss'].item()
        bad, stop = distributed.any_of([not math.isfinite(value), parts.terminate.received], parts.world)
        if bad:
            raise TrainingError(broken(parts, f'loss is {value}', f'update {update + 1}'))
        stepper.step(result['loss'], frozen)
        task.follow(schedules.momentum[update])
        watched += torch.cat([entropies(result['targets']), spread(result['features'])[None]])
        progress.step(value, len(views[0]), stepper.mean_rate(), True)
        if stop:
            interrupt(parts, batch + 1, progress, watched=watched.tolist())

    means = [distributed.mean(total / len(parts.train), parts.world) for total in watched.tolist()]
    parts.watched = dict(zip(WATCHED, means))
    return distributed.mean(progress.loss.avg, parts.world)


def _open(parts: Run) -> tuple[int, bool]:
    """Restore the checkpoint to continue from, if any, and open the run's folder.

    Returns:
        The first epoch to train, and whether the run is a fresh one.
    """
    args = parts.args
    path, checkpoint, start = resume(args, parts.world, parts.task, parts.stepper, parts.schedules)
    parts.epoch = min(start, parts.last - 1)
    if position := find_position(parts, checkpoint, start):
        parts.sums = position['watched'][parts.world.rank]
    if not parts.world.primary:
        return start, not path
    side = parts.data_config['input_size'][-1]
    name = '-'.join([datetime.now().strftime('%Y%m%d-%H%M%S'), safe_model_name(args.model), str(side)])
    with saving(parts, 'at the start'):
        parts.folder, in_place = open_folder(args, name, path)
        # Of two checkpoints the later is the better: DINO's loss says little, and labels are not to choose.
        parts.saver = Saver(args, parts.folder, parts.task, parts.stepper, parts.schedules, decreasing=False)
        if in_place:
            parts.saver.continue_history(checkpoint)
        trim(parts.folder / 'summary.csv', start)
        write_text(parts.folder / 'args.yaml', as_yaml(args))
    parts.watched = last_watched(parts.folder / 'summary.csv')
    return start, not path


def _record(parts: Run, loss: float) -> None:
    """An epoch's row in `summary.csv`, then its checkpoint: a resume drops the rows no checkpoint stands for."""
    args, done = parts.args, parts.epoch + 1
    names = list(next(iter(parts.baselines.values()), parts.metrics))  # every row has all columns
    evaluated = {name: parts.metrics.get(name, '') for name in names}
    rate, watched = parts.stepper.mean_rate(), parts.watched
    parts.saver.count_time()
    with saving(parts, 'after the epoch'):
        update_summary(parts.epoch, {'loss': loss, **watched}, evaluated, str(parts.folder / 'summary.csv'), lr=rate)
        parts.tracker.log(parts.epoch, loss, {**watched, **parts.metrics}, rate)
        parts.saver.save_checkpoint(parts.epoch, float(done))
        if done in (args.save_epochs or ()):
            parts.saver.save_milestone(done)
