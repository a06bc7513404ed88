"""The tasks of VTAB-1K and their splits, read from the folders in which the benchmark is handed around.

    <root>/<task>/{train800,val200,train800val200,test}.txt     lines `images/<split>/<file> <label>`

The benchmark: Zhai et al. 2019, "A Large-scale Study of Representation Learning with the Visual Task Adaptation
Benchmark", arXiv 1910.04867. The folders: github.com/BenediktAlkin/vtab1k-pytorch.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from PIL import Image
from torch.utils.data import Dataset

from ..engine.config import ConfigError
from ..engine.stopping import TrainingError
from .images import convert


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: Its folder.
        group: One of `GROUPS`.
        classes: How many.
        test: Images of the test split. None leaves the length of all splits open.
    """

    name: str
    group: str
    classes: int
    test: int | None


GROUPS = ('natural', 'specialized', 'structured')
LENGTHS = {'train800': 800, 'val200': 200, 'train800val200': 1000}  # the test split's is the task's own
SPLITS = (*LENGTHS, 'test')

TASKS = {
    task.name: task
    for task in (
        Task('caltech101', 'natural', 102, 6085),
        Task('cifar', 'natural', 100, 10000),
        Task('dtd', 'natural', 47, 1880),
        Task('oxford_flowers102', 'natural', 102, 6149),
        Task('oxford_iiit_pet', 'natural', 37, 3669),
        Task('svhn', 'natural', 10, 26032),
        Task('sun397', 'natural', 397, 21750),
        Task('patch_camelyon', 'specialized', 2, 32768),
        Task('eurosat', 'specialized', 10, 5400),
        Task('resisc45', 'specialized', 45, 6300),
        Task('diabetic_retinopathy', 'specialized', 5, 42670),
        Task('clevr_count', 'structured', 8, 15000),
        Task('clevr_dist', 'structured', 6, 15000),
        Task('dmlab', 'structured', 6, 22735),
        Task('kitti', 'structured', 4, 711),
        Task('dsprites_loc', 'structured', 16, 73728),
        Task('dsprites_ori', 'structured', 16, 73728),
        Task('smallnorb_azi', 'structured', 18, 12150),
        Task('smallnorb_ele', 'structured', 9, 12150),
    )
}


class Split(Dataset):
    """A split of a task: items are an image and its label, an int. `transform`, if set, is applied to each PIL image.

    Attributes:
        paths: Of the images, in the order of the list.
        labels: Theirs.
    """

    def __init__(self, root: str | Path, task: Task, split: str, mode: str = 'RGB') -> None:
        """
        Args:
            root: Folder of the task's folder.
            task: Which.
            split: One of `SPLITS`.
            mode: PIL mode of the images.

        Raises:
            ConfigError: Folder, list or an image is not there, a line of the list is no image and label of the task,
                or the list has not the length that the benchmark says.
        """
        if split not in SPLITS:
            raise ConfigError(f'split: got {split!r}; choose from {", ".join(SPLITS)}')
        self.task, self.split, self.mode = task, split, mode
        self.transform: Callable | None = None
        folder = _find_folder(Path(root), task.name)
        listed = _read_list(folder, split, task.classes)
        _check_length(folder / f'{split}.txt', len(listed), task)
        _check_files(folder, folder / f'{split}.txt', listed)
        self.paths = [os.path.join(folder, path) for _, path, _ in listed]
        self.labels = [label for _, _, label in listed]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path = self.paths[index]
        try:
            with Image.open(path) as opened:
                image = convert(opened, self.mode)
        except Exception as err:  # Pillow raises some ten kinds
            raise TrainingError(f'{path} cannot be read as an image ({type(err).__name__}: {err})') from err
        return (image if self.transform is None else self.transform(image)), self.labels[index]


def _find_folder(root: Path, name: str) -> Path:
    if not root.is_dir():
        raise ConfigError(f'data_dir: got {str(root)!r}; expected the folder that holds the tasks')
    if not (root / name).is_dir():
        there = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith('.'))
        raise ConfigError(f'task: got {name!r}, but {root} has no such folder, only {", ".join(there) or "none"}')
    return root / name


def _read_list(folder: Path, split: str, classes: int) -> list[tuple[int, str, int]]:
    """Line number, path below the folder, and label of each image of a list."""
    file = folder / f'{split}.txt'
    try:
        # File names are bytes, of whatever encoding.
        lines = file.read_text(encoding='utf-8', errors='surrogateescape').split('\n')
    except OSError as err:
        there = ', '.join(sorted(path.name for path in folder.glob('*.txt')))
        raise ConfigError(f'split: {file} cannot be read; {folder} has the lists {there or "none"}') from err
    listed = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        path, *label = line.rsplit(None, 1)
        if not label:
            raise ConfigError(f'{file}, line {number}: got {line.strip()!r}; expected a path, a blank and a label')
        if not (label[0].isascii() and label[0].isdigit() and int(label[0]) < classes):
            raise ConfigError(f'{file}, line {number}: label: got {label[0]!r}; expected a number in 0..{classes - 1}')
        listed.append((number, path, int(label[0])))
    if not listed:
        raise ConfigError(f'{file} is empty; expected a path and a label on each line')
    return listed


def _check_length(file: Path, length: int, task: Task) -> None:
    expected = None if task.test is None else LENGTHS.get(file.stem, task.test)
    if expected not in (None, length):
        raise ConfigError(f'{file}: got {length} images; {file.stem} of {task.name} has {expected}')


def _check_files(folder: Path, file: Path, listed: list[tuple[int, str, int]]) -> None:
    """Refuse a list some of whose images are not there. To read whole folders is quicker than to ask for each file."""
    names = defaultdict(dict)
    for number, path, _ in listed:
        parent, name = os.path.split(path)
        names[parent][name] = number
    missing = []
    for parent, wanted in names.items():
        try:
            with os.scandir(folder / parent) as entries:
                there = {entry.name for entry in entries if entry.name in wanted and entry.is_file()}
        except OSError:
            there = set()
        missing += [(number, os.path.join(parent, name)) for name, number in wanted.items() if name not in there]
    if missing:
        number, path = min(missing)
        more = f' (nor are {len(missing) - 1} others)' if len(missing) > 1 else ''
        raise ConfigError(f'{file}, line {number}: {folder / path} is not there{more}')
