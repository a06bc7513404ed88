"""Numbers of the fine-tuning protocol: which learning rate, which final runs count, and the averages over tasks.

A protocol has arms, tasks, learning rates, and two stages. Tuning trains each rate with some seeds on 800 images and
reads 200 others; the final stage trains the rate with the best mean of an arm and task on all 1000 and reads the test
images. Nothing here reads a file or starts a run.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Hashable, Mapping, Sequence

from ..engine.config import ConfigError

if TYPE_CHECKING:
    from ..data.vtab import Task

__all__ = ['BEST', 'STAGES', 'Line', 'Protocol', 'Run', 'choose_lr', 'score']

BEST = 3
"""How many of the final seeds the paper averages: its best three of five."""

STAGES = ('tune', 'final')

Run = Mapping[str, Any]
Key = tuple[str, str, str, float, int]


def score(run: Run) -> float:
    """Accuracy in percent with which a run counts: 0 if it diverged, whatever its last weights guess."""
    if run['diverged'] or not math.isfinite(run['top1']):
        return 0.0
    return float(run['top1'])


def choose_lr(results: Sequence[Run], lrs: Sequence[float], seeds: Sequence[int]) -> float | None:
    """The learning rate with the best mean tuning accuracy of one arm on one task.

    Args:
        results: Its runs; those of the final stage, other rates and other seeds are not looked at.
        lrs: Rates to choose from; of equals, the one that comes first.
        seeds: Tuning seeds that each rate must have; not looked at where there is one rate, which needs no tuning.

    Returns:
        None while a run is missing, or where several rates have no seeds to choose by.

    Raises:
        ValueError: The runs are of several arms or tasks.
        ConfigError: A run is there twice.
    """
    if len({(run['arm'], run['task']) for run in results}) > 1:
        raise ValueError('results: got runs of several arms or tasks; a rate is chosen for one arm on one task')
    scores = {key[3:]: score(run) for key, run in _by_key(results).items() if key[2] == 'tune'}
    if len(lrs) == 1:
        return lrs[0]
    if not seeds or any((lr, seed) not in scores for lr in lrs for seed in seeds):
        return None
    # The exact mean: rates whose runs have the same sum tie, in whatever order they are added.
    return max(lrs, key=lambda lr: statistics.mean(scores[lr, seed] for seed in seeds), default=None)


@dataclass(frozen=True)
class Line:
    """What one accuracy stands for: a task, or an average over tasks.

    Attributes:
        name: Of the task, or how it is averaged.
        group: Of the task; None for an average.
        parts: Names of tasks. Parts weigh alike in the mean, and so do the tasks within a part.
    """

    name: str
    group: str | None
    parts: tuple[tuple[str, ...], ...]

    def mean(self, values: Mapping[str, float]) -> float:
        """The average of values by task."""
        return statistics.fmean(statistics.fmean(values[name] for name in part) for part in self.parts)


@dataclass(frozen=True)
class Protocol:
    """Results of a protocol, complete or not, against what was planned.

    Attributes:
        results: Of its runs, each as a run's `result.json` has it.
        arms: Names.
        tasks: With `name` and `group`.
        lrs: Learning rates to choose from.
        tune_seeds: Seeds of each rate; a single rate is not tuned.
        final_seeds: Seeds of the chosen rate.

    Raises:
        ConfigError: Something is named twice, there is no arm, task, rate or final seed, several rates have no seeds
            to choose by, or a result is there twice.
    """

    results: Sequence[Run]
    arms: Sequence[str]
    tasks: Sequence[Task]
    lrs: Sequence[float]
    tune_seeds: Sequence[int]
    final_seeds: Sequence[int]

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        planned = {'arms': self.arms, 'tasks': names, 'lrs': self.lrs, 'final_seeds': self.final_seeds}
        for name, values in planned.items():
            if not values:
                raise ConfigError(f'{name}: got none; a protocol needs at least one')
        for name, values in (planned | {'tune_seeds': self.tune_seeds}).items():
            _check_unique(name, values)
        if not self.tune_seeds and len(self.lrs) > 1:
            raise ConfigError(
                f'tune_seeds: got none; choosing one of {len(self.lrs)} learning rates takes at least one'
            )
        _by_key(self.results)

    @cached_property
    def runs(self) -> dict[Key, Run]:
        """All results by arm, task, stage, rate and seed."""
        return _by_key(self.results)

    @cached_property
    def choices(self) -> dict[tuple[str, str], float | None]:
        """Chosen rate by arm and task; None while it cannot be chosen."""
        of: dict[tuple[str, str], list[Run]] = {(arm, task.name): [] for arm in self.arms for task in self.tasks}
        for (arm, task, *_), run in self.runs.items():
            of.setdefault((arm, task), []).append(run)
        return {key: choose_lr(runs, self.lrs, self.tune_seeds) for key, runs in of.items()}

    @property
    def lines(self) -> list[Line]:
        """The tasks, then the averages; a single task has none."""
        groups: dict[str, list[str]] = {}
        for task in self.tasks:
            groups.setdefault(task.group, []).append(task.name)
        tasks = [Line(task.name, task.group, ((task.name,),)) for task in self.tasks]
        if len(tasks) == 1:
            return tasks
        averages = [Line(f'mean of {group} tasks', None, (tuple(names),)) for group, names in groups.items()]
        averages.append(Line('mean over tasks', None, (tuple(task.name for task in self.tasks),)))
        if len(groups) > 1:
            averages.append(Line('mean of groups', None, tuple(map(tuple, groups.values()))))
        return tasks + averages

    def tuning(self, arm: str, task: str, lr: float) -> dict[int, Run]:
        """Tuning runs of a rate by seed, those that there are."""
        return self._stage(arm, task, 'tune', lr, self.tune_seeds if len(self.lrs) > 1 else ())

    def finals(self, arm: str, task: str) -> dict[int, Run]:
        """Final runs at the chosen rate by seed, those that there are."""
        return self._stage(arm, task, 'final', self.choices[arm, task], self.final_seeds)

    def line_finals(self, arm: str, line: Line) -> list[Run]:
        """Final runs of all tasks of a line."""
        return [run for part in line.parts for task in part for run in self.finals(arm, task).values()]

    def values(self, arm: str, line: Line) -> dict[int, float]:
        """Test accuracy by final seed: of a task, the seeds that there are; of an average, all or none.

        An average is there only where each of its tasks has every seed, so that it never is one over fewer tasks.
        """
        scores = {
            task: {seed: score(run) for seed, run in self.finals(arm, task).items()}
            for part in line.parts
            for task in part
        }
        if line.group is not None:
            return scores[line.name]
        if any(len(of) < len(self.final_seeds) for of in scores.values()):
            return {}
        return {seed: line.mean({task: of[seed] for task, of in scores.items()}) for seed in self.final_seeds}

    def best(self, arm: str, line: Line) -> float | None:
        """The line's mean of each task's best `BEST` final seeds; None while a seed is missing."""
        best: dict[str, float] = {}
        for task in (task for part in line.parts for task in part):
            scores = sorted((score(run) for run in self.finals(arm, task).values()), reverse=True)
            if len(scores) < len(self.final_seeds):
                return None
            best[task] = statistics.fmean(scores[:BEST])
        return line.mean(best)

    def _stage(self, arm: str, task: str, stage: str, lr: float | None, seeds: Sequence[int]) -> dict[int, Run]:
        keys = {seed: (arm, task, stage, lr, seed) for seed in seeds}
        return {seed: self.runs[key] for seed, key in keys.items() if key in self.runs}


def _by_key(results: Sequence[Run]) -> dict[Key, Run]:
    runs: dict[Key, Run] = {}
    for run in results:
        key = (run['arm'], run['task'], run['stage'], run['lr'], run['seed'])
        if run['stage'] not in STAGES:
            raise ConfigError(f'stage: got {run["stage"]!r}; choose from {", ".join(STAGES)}')
        if key in runs:
            arm, task, stage, lr, seed = key
            raise ConfigError(f'results: got two of arm {arm!r}, task {task}, stage {stage}, lr {lr:g}, seed {seed}')
        runs[key] = run
    return runs


def _check_unique(name: str, values: Sequence[Hashable]) -> None:
    twice = next((value for index, value in enumerate(values) if value in values[:index]), None)
    if twice is not None:
        raise ConfigError(f'{name}: got {twice!r} twice')
