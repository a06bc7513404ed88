"""The protocol of a fine-tuning comparison: every arm gets the same grid, the same seeds and the same budget.

For each task and arm the learning rate with the best mean accuracy over the tuning seeds is chosen on held-out images;
the final runs learn from all training images with that rate, one for each final seed, and meet the test split once.

A run's folder is `<output>/<experiment>/runs/<task>/<arm>/<stage>-<rate>-<seed>`. It counts by its whole `result.json`
alone, so the same command goes on wherever it was stopped: what is finished is not run again, what was cut short starts
anew. Several processes, on one machine or on many that share the folder, take runs from it at the same time.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Hashable, Iterator, Protocol, Sequence

import numpy as np

from ..data.vtab import Task
from ..engine.checkpoints import write_text
from ..engine.config import ConfigError, nearest
from ..engine.files import write_atomically
from ..engine.logging import log
from ..engine.runs import RESULT, read_json
from .finetune import Job
from .finetune_build import arm_settings, model_of, weights
from .protocol_flags import VTAB
from .protocol_identity import check_same, identity
from .protocol_table import choose_lr

__all__ = ['PREDICTIONS', 'Plan', 'Source', 'check', 'record']

PREDICTIONS = 'predictions.npy'


class Source(Protocol):
    """Where the images of a protocol come from."""

    tasks: Sequence[Task]

    def open(self, task: Task, stage: str, seed: int) -> tuple[Any, Any]:
        """Data sets of PIL images and labels: to learn from, and to measure on; `stage` is `tune` or `final`."""

    def key(self, task: Task, stage: str, seed: int) -> Hashable:
        """What the two depend on: runs with equal keys see the same images."""

    def listed(self, split: Any) -> Iterator[str]:
        """A line for each image of one of the two, the same wherever the folder of the data is."""


@dataclass(frozen=True)
class Plan:
    """All runs of a protocol, and which of them may be started now."""

    args: Namespace
    tasks: tuple[Task, ...]
    arms: tuple[str, ...]
    _ended: dict[Path, dict[str, Any]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def root(self) -> Path:
        """Folder of the protocol."""
        return Path(self.args.output) / self.args.experiment

    def folder(self, job: Job) -> Path:
        """Folder of a run."""
        name = f'{job.stage}-lr{job.lr:g}-seed{job.seed}'
        return self.root / 'runs' / job.task / _folder_of_arm(job.arm) / name

    def result(self, job: Job) -> dict[str, Any] | None:
        """What a run has left, None while it has not ended. It is read once: a protocol has thousands."""
        folder = self.folder(job)
        if folder not in self._ended:
            found = read_json(folder / RESULT) or {}
            if 'model' not in found:
                return None
            self._ended[folder] = found
        return self._ended[folder]

    def tuning(self, task: Task, arm: str) -> list[Job]:
        """Runs among which the rate is chosen; none where there is only one rate."""
        if len(self.args.lrs) == 1:
            return []
        return [Job(task.name, arm, 'tune', lr, seed) for lr in self.args.lrs for seed in self.args.tune_seeds]

    def final(self, task: Task, arm: str, lr: float) -> list[Job]:
        """Final runs at a rate."""
        return [Job(task.name, arm, 'final', lr, seed) for seed in self.args.final_seeds]

    def lr(self, task: Task, arm: str) -> float | None:
        """The rate that is chosen for the final runs, once tuning is done."""
        if len(self.args.lrs) == 1:
            return self.args.lrs[0]
        results = [self.result(job) for job in self.tuning(task, arm)]
        if not all(results):
            return None
        return choose_lr(results, self.args.lrs, self.args.tune_seeds)

    def ready(self) -> Iterator[Job]:
        """Runs that are known by now, task by task; the final ones of a task and arm only once its rate is chosen."""
        for task in self.tasks:
            for arm in self.arms:
                yield from self.tuning(task, arm)
            for arm in self.arms:
                lr = self.lr(task, arm)
                if lr is not None:
                    yield from self.final(task, arm, lr)

    def total(self) -> int:
        """Number of runs."""
        tuning = len(self.args.lrs) * len(self.args.tune_seeds) if len(self.args.lrs) > 1 else 0
        return len(self.tasks) * len(self.arms) * (tuning + len(self.args.final_seeds))

    def results(self) -> list[dict[str, Any]]:
        """What has ended so far."""
        found = (self.result(job) for job in self.ready())
        return [result for result in found if result]

    def predictions(self, arm: str, task: str, seed: int) -> np.ndarray | None:
        """Classes that a final run predicted, `[N]`, or None while there is none."""
        known = next(known for known in self.tasks if known.name == task)
        lr = self.lr(known, arm)
        job = Job(task, arm, 'final', lr, seed)
        path = self.folder(job) / PREDICTIONS if lr is not None else None
        return np.load(path) if path and path.exists() and self.result(job) else None


def _folder_of_arm(arm: str) -> str:
    return arm.replace(' ', '_')


def check(plan: Plan) -> None:
    """Look at everything that can be seen before the first run: names, grids, weights, and what is in the folder.

    Raises:
        ConfigError: It cannot be; or the folder has results of other settings.
    """
    args = plan.args
    for name in plan.arms:
        if name not in args.arms:
            raise ConfigError(f'only: got {name!r}{nearest(name, args.arms)}')
        arm_settings(args, name)
    for name in args.baselines:
        if name not in (*args.arms, *VTAB.flags['baselines'].default):
            raise ConfigError(f'baselines: got {name!r}{nearest(name, args.arms)}')
    for name in args.arms:
        if not name or set(name) & set('/\\\0') or name.startswith('.'):
            raise ConfigError(f'arms: got the name {name!r}; it becomes the name of a folder')
    for name in ('lrs', 'tune_seeds', 'final_seeds', 'only', 'tasks'):
        values = getattr(args, name, [])
        if len(set(values)) < len(values):
            raise ConfigError(f'{name}: got {values}, in which one is there twice')
    folders = {'arms': list(map(_folder_of_arm, args.arms)), 'lrs': [f'{lr:g}' for lr in args.lrs]}
    for name, values in folders.items():
        if len(set(values)) < len(values):
            raise ConfigError(f'{name}: got {", ".join(map(str, getattr(args, name)))}; two would share a folder')
    if not 0 <= args.warmup_part < 1:
        raise ConfigError(f'warmup_part: got {args.warmup_part}; expected a part of the updates, below 1')
    if args.pretrained_path:
        weights(args.pretrained_path)
    if not args.pretrained_path and not args.pretrained:
        log.warning('pretrained_path: got nothing; %s starts from random weights', args.model)
    model_of(args)
    check_same(plan)


def record(plan: Plan, job: Job, result: dict[str, Any], predictions: np.ndarray) -> None:
    """Leave a run's files, `result.json` as the last."""
    folder = plan.folder(job)
    if job.stage == 'final':
        write_atomically(folder / PREDICTIONS, lambda file: np.save(file, predictions))
    full = {'model': model_of(plan.args)[0], **result, 'settings': identity(plan.args, job.arm)}
    write_text(folder / RESULT, json.dumps(full, indent=1) + '\n')
