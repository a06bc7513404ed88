"""`violin finetune`: one's own images, or a timm data set, by the protocol of `violin vtab`.

    violin finetune --data-dir FOLDER --shots 100 --model violin_deit_small.fb_in1k
    violin finetune --data-dir FOLDER --pretrained-path mine.pth.tar --peft method=lora rank=8

`FOLDER/train` holds a folder of images for each class, and `FOLDER/test` (or `val`) the images to test on; without the
latter, the images that were not drawn to learn from are tested on. Leaves `runs/`, with the models of the final runs,
`table.md` and `table.csv`.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any, Hashable, Iterator

import numpy as np
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from ..data.datasets import EMBEDDED, create_dataset
from ..data.few_shot import Subset, choose
from ..data.images import Images
from ..data.vtab import Task
from ..engine.config import ConfigError, completed
from ..engine.logging import log
from ..engine.stopping import TrainingError
from .finetune import UNREADABLE
from .finetune_build import channels_of, weights
from .protocol import Plan
from .protocol_flags import FINETUNE
from .protocol_run import run_protocol

__all__ = ['OwnSource', 'prepare', 'run', 'test_split']

DOWNLOADED = ('hfds', 'hfids', 'tfds')  # to a place of their own, unless data_dir names one
TEST_FOLDERS = ('test', 'val', 'valid', 'validation')


class Readable(Subset):
    """Some images of a data set; one that cannot be read comes with the label `UNREADABLE`, and no other in its place.

    What `violin train` does, the next image instead, would have images of one split in another.
    """

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        try:
            return super().__getitem__(index)
        except TrainingError as err:
            log.warning('left out: %s', str(err).split(';')[0])
            blank = Image.new(self.dataset.mode, (8, 8))
            return (blank if self.transform is None else self.transform(blank)), UNREADABLE


class OwnSource:
    """A training split, from which the images to learn from are drawn, and a test split, or what is left."""

    def __init__(self, args: Namespace) -> None:
        """
        Raises:
            ConfigError: The data are not there, or no class can be told.
        """
        self.args = args
        self.train = _open(args, args.train_split, training=True)
        self.labels = self.train.labels() if isinstance(self.train, Images) else self.train.labels.tolist()
        names = getattr(self.train, 'classes', None)
        self.split = test_split(args)
        if self.split == args.train_split:
            raise ConfigError(f'test_split: got {self.split!r}, which is what is learned from; name another split')
        if not self.split and args.draw_per_seed and len(args.lrs) > 1:
            raise ConfigError(
                'draw_per_seed: got true without a test split: the images on which one seed chooses a rate are tested '
                'on by another; name a test split, or one rate in lrs'
            )
        self.test = _open(args, self.split, classes=names) if self.split else None
        classes = max(len(names or ()), max(self.labels) + 1)
        name = args.dataset.replace('/', '_') or Path(args.data_dir).resolve().name
        if classes < 2:
            raise ConfigError(
                f'data_dir: got one class, {", ".join(names or ())}; expected a folder for each of several'
            )
        self.tasks = (Task(name, 'own', classes, None),)
        self.subset = Readable if args.bad_images == 'skip' and isinstance(self.train, Images) else Subset

    def key(self, task: Task, stage: str, seed: int) -> Hashable:
        return stage, seed if self.args.draw_per_seed else 0

    def open(self, task: Task, stage: str, seed: int) -> tuple[Dataset, Dataset]:
        args = self.args
        draw = args.draw_seed + (seed if args.draw_per_seed else 0)
        learned, held_out = choose(self.labels, draw, args.shots, args.train_images, args.val_part)
        if stage == 'tune':
            if not held_out:
                raise ConfigError(f'val_part: got {args.val_part}; tuning needs held-out images, or one rate in lrs')
            return self.subset(self.train, learned), self.subset(self.train, held_out)
        both = sorted([*learned, *held_out])
        if self.test is not None:
            return self.subset(self.train, both), self.subset(self.test, range(len(self.test)))
        rest = np.setdiff1d(np.arange(len(self.labels)), both).tolist()
        if not rest:
            raise ConfigError(
                'test_split: got nothing, and no image is left to test on; name a split, or learn from fewer images '
                'with --shots or --train-images'
            )
        return self.subset(self.train, both), self.subset(self.train, rest)

    def listed(self, split: Subset) -> Iterator[str]:
        """Of files their paths, which hold the names of their classes; else their numbers."""
        for index in split.indices:
            path = split.dataset.path(index) if isinstance(split.dataset, Images) else str(index)
            yield os.path.relpath(path, self.args.data_dir) if os.sep in path else path


def test_split(args: Namespace) -> str:
    """The split to test on; '' for the images that are not drawn."""
    if args.test_split or args.dataset or os.path.normpath(args.train_split) == '.':
        return args.test_split
    return next((name for name in TEST_FOLDERS if (Path(args.data_dir or '.') / name).is_dir()), '')


def _open(args: Namespace, split: str, training: bool = False, classes: Any = None) -> Dataset:
    dataset = create_dataset(
        completed(args, bad_images='stop'), split, channels_of(args), training=training, classes=classes
    )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, '__len__'):
        raise ConfigError(f'dataset: {args.dataset!r} is a stream; expected one whose images have numbers')
    return dataset


def prepare(args: Namespace) -> tuple[Plan, OwnSource]:
    """Plan and source."""
    source = OwnSource(args)
    return Plan(args, source.tasks, tuple(args.only or args.arms)), source


def run(args: Namespace) -> dict[str, Any]:
    """The whole protocol; as `vtab.run`, with `protocol_flags.FINETUNE`."""
    if not args.data_dir and args.dataset not in EMBEDDED and args.dataset.split('/')[0] not in DOWNLOADED:
        raise ConfigError('data_dir: got nothing; expected a folder of images')
    if (
        args.pretrained_path
        and args.model == FINETUNE.flags['model'].default
        and weights(args.pretrained_path).get('args')
    ):
        args.model = ''  # the default is for those who bring no weights; these record theirs
    if not args.experiment:
        args.experiment = args.dataset.replace('/', '_') or Path(args.data_dir).resolve().name
    if not args.test_split and not args.dataset and test_split(args):
        log.info('testing on %s', Path(args.data_dir) / test_split(args))
    return run_protocol(args, prepare)
