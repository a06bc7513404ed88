"""`violin vtab`: the tasks of VTAB-1K, or generated ones of the same layout, arm beside arm.

    violin vtab --config configs/vtab/deit_small.yaml --data-dir /data/vtab --tasks cifar clevr_count
    violin vtab --config configs/quick/vtab_mini.yaml --jobs 2

Leaves `runs/`, `table.md` and `table.csv` in its folder. The same command again goes on.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any, Hashable, Iterator

from ..data import generated
from ..data.images import image_mode
from ..data.vtab import TASKS, Split, Task
from ..engine.config import ConfigError
from .finetune_build import channels_of
from .protocol import Plan
from .protocol_run import run_protocol

__all__ = ['prepare', 'run']

LISTS = {'tune': ('train800', 'val200'), 'final': ('train800val200', 'test')}


class VtabSource:
    """The lists of images below `data_dir`."""

    def __init__(self, args: Namespace) -> None:
        """
        Raises:
            ConfigError: A task is unknown.
        """
        self.args = args
        self.tasks = tuple(generated.find_task(name) for name in args.tasks or TASKS)

    def key(self, task: Task, stage: str, seed: int) -> Hashable:
        return task.name, stage

    def open(self, task: Task, stage: str, seed: int) -> tuple[Split, Split]:
        mode = image_mode(None, channels_of(self.args))
        return tuple(Split(Path(self.args.data_dir), task, split, mode) for split in LISTS[stage])

    def listed(self, split: Split) -> Iterator[str]:
        for path, label in zip(split.paths, split.labels):
            yield f'{os.path.relpath(path, self.args.data_dir)} {label}'


def prepare(args: Namespace) -> tuple[Plan, VtabSource]:
    """Plan and source."""
    source = VtabSource(args)
    return Plan(args, source.tasks, tuple(args.only or args.arms)), source


def run(args: Namespace) -> dict[str, Any]:
    """The whole protocol.

    Args:
        args: From `engine.config.parse` or `settings`, with `protocol_flags.VTAB`.

    Returns:
        See `protocol_run.run_protocol`.

    Raises:
        ConfigError: A setting that cannot be, or data that are not there; nothing was run.
        TrainingError: Some runs failed.
    """
    if not args.data_dir:
        raise ConfigError('data_dir: got nothing; expected the folder of the tasks')
    made = [name for name in args.tasks if name in generated.GENERATED]
    if made and not (args.dry_run or args.table_only):
        size = args.task_size or args.img_size
        if not size:
            raise ConfigError(f'task_size: got nothing; expected the side in pixels of {", ".join(made)}, or img_size')
        for name in made:
            generated.ensure(Path(args.data_dir), name, size, args.task_seed, args.task_test)
    return run_protocol(args, prepare)
