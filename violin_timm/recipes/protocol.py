"""The protocol of a fine-tuning comparison: every arm gets the same grid, the same seeds and the same budget.

For each task and arm the learning rate with the best mean accuracy over the tuning seeds is chosen on held-out images;
the final runs learn from all training images with that rate, one for each final seed, and meet the test split once.

A run's folder is `<output>/<experiment>/runs/<task>/<arm>/<stage>-<rate>-<seed>`. It counts by its whole `result.json`
alone, so the same command goes on wherever it was stopped: what is finished is not run again, what was cut short starts
anew. Several processes, on one machine or on many that share the folder, take runs from it at the same time.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Hashable, Iterator, Protocol, Sequence

import numpy as np

from ..data.vtab import Task
from ..engine.runs import RESULT, read_json
from .finetune import Job
from .protocol_table import choose_lr

__all__ = ['PREDICTIONS', 'Plan', 'Source', 'folder_of_arm']

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
        return self.root / 'runs' / job.task / folder_of_arm(job.arm) / name

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


def folder_of_arm(arm: str) -> str:
    """Name of the folder of an arm's runs."""
    return arm.replace(' ', '_')
