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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Hashable, Iterator, Protocol, Sequence

import numpy as np

from ..data.vtab import Task
from ..engine.checkpoints import write_text
from ..engine.config import ConfigError, as_dict, nearest
from ..engine.files import write_atomically
from ..engine.runs import RESULT, finished, read_json
from .finetune import Job
from .finetune_build import arm_settings, model_of, weights
from .protocol_table import choose_lr

__all__ = ['PREDICTIONS', 'Plan', 'Source', 'check', 'folder_of', 'record']

PREDICTIONS = 'predictions.npy'
# Settings that leave a run's result what it is: those that say which runs there are, where they go, how many at a time.
HARMLESS = frozenset(
    """
    data_dir tasks only arms baselines lrs tune_seeds final_seeds jobs threads dry_run table_only workers save_models
    output experiment validation_batch_size device_modules model model_kwargs dataset_download beta_range alpha_std
    mask_lr_scale
    """.split()  # noqa: SIM905, quotes and commas are harder to read
)


class Source(Protocol):
    """Where the images of a protocol come from."""

    tasks: Sequence[Task]

    def open(self, task: Task, stage: str, seed: int) -> tuple[Any, Any]:
        """Data sets of PIL images and labels: to learn from, and to measure on; `stage` is `tune` or `final`."""

    def key(self, task: Task, stage: str, seed: int) -> Hashable:
        """What the two depend on: runs with equal keys see the same images."""


@dataclass(frozen=True)
class Plan:
    """All runs of a protocol, and which of them may be started now."""

    args: Namespace
    tasks: tuple[Task, ...]
    arms: tuple[str, ...]

    @property
    def root(self) -> Path:
        """Folder of the protocol."""
        return Path(self.args.output) / self.args.experiment

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
        results = [read_json(folder_of(self, job) / RESULT) for job in self.tuning(task, arm)]
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
        found = (read_json(folder_of(self, job) / RESULT) for job in self.ready())
        return [result for result in found if result]

    def predictions(self, arm: str, task: str, seed: int) -> np.ndarray | None:
        """Classes that a final run predicted, `[N]`, or None while there is none."""
        known = next(known for known in self.tasks if known.name == task)
        lr = self.lr(known, arm)
        path = folder_of(self, Job(task, arm, 'final', lr, seed)) / PREDICTIONS if lr is not None else None
        return np.load(path) if path and path.exists() and finished(path.parent) else None


def folder_of(plan: Plan, job: Job) -> Path:
    """Folder of a run."""
    name = f'{job.stage}-lr{job.lr:g}-seed{job.seed}'
    return plan.root / 'runs' / job.task / job.arm.replace(' ', '_') / name


def identity(args: Namespace, arm: str) -> dict[str, Any]:
    """The settings that make the results of an arm what they are."""
    settings, mask_lr_scale = arm_settings(args, arm)
    name, kwargs = model_of(args)
    values = {key: value for key, value in as_dict(args).items() if key not in HARMLESS}
    values.update(model=name, model_kwargs=kwargs, masks_of_arm=settings, mask_lr_scale=mask_lr_scale)
    return json.loads(json.dumps(values))


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
        if not name or set(name) & set('/\\\0') or name.startswith('.'):
            raise ConfigError(f'arms: got the name {name!r}; it becomes the name of a folder')
    for name in ('lrs', 'tune_seeds', 'final_seeds', 'only', 'tasks'):
        values = getattr(args, name, [])
        if len(set(values)) < len(values):
            raise ConfigError(f'{name}: got {values}, in which one is there twice')
    if not 0 <= args.warmup_part < 1:
        raise ConfigError(f'warmup_part: got {args.warmup_part}; expected a part of the updates, below 1')
    if args.pretrained_path:
        weights(args.pretrained_path)
    model_of(args)
    _check_same(plan)


def _check_same(plan: Plan) -> None:
    """Results are only ever compared with those of the same settings."""
    for arm in plan.arms:
        now = identity(plan.args, arm)
        for job in plan.ready():
            before = read_json(folder_of(plan, job) / RESULT) if job.arm == arm else None
            for key, value in now.items() if before else ():
                if before['settings'].get(key, value) != value:
                    raise ConfigError(
                        f'output: {folder_of(plan, job)} was run with {key}={before["settings"][key]!r}, and now it '
                        f'is {value!r}; take another --experiment, or delete that folder'
                    )


def record(plan: Plan, job: Job, result: dict[str, Any], predictions: np.ndarray) -> None:
    """Leave a run's files, `result.json` as the last."""
    folder = folder_of(plan, job)
    if job.stage == 'final':
        write_atomically(folder / PREDICTIONS, lambda file: np.save(file, predictions))
    full = {'model': model_of(plan.args)[0], **result, 'settings': identity(plan.args, job.arm)}
    write_text(folder / RESULT, json.dumps(full, indent=1) + '\n')
