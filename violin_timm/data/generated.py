"""Tasks that need no download, written in the folders of VTAB-1K: those of shapes, and scikit-learn's digits."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Iterator

import numpy as np
from PIL import Image

from ..engine.config import ConfigError, nearest
from . import digits
from .shapes import SHAPES, draw
from .vtab import LENGTHS, TASKS, Task

FORMAT = 1  # to be raised with any change of what is written for the same numbers
DIGITS_TEST = 797  # what 1000 of the 1797 leave

GENERATED = {
    **{name: Task(name, 'structured', shapes.classes, None) for name, shapes in SHAPES.items()},
    'digits': Task('digits', 'natural', digits.CLASSES, DIGITS_TEST),
}


def find_task(name: str) -> Task:
    """The task of that name, of VTAB-1K or generated.

    Raises:
        ConfigError: There is none.
    """
    tasks = {**TASKS, **GENERATED}
    if name not in tasks:
        raise ConfigError(f'task: got {name!r}{nearest(name, tasks, "; choose from " + ", ".join(tasks))}')
    return tasks[name]


def ensure(root: Path, name: str, size: int, seed: int = 0, test: int = 2000) -> None:
    """Write a generated task below `root`, if it is not there. Several processes may do so at once.

    Args:
        root: Folder of the task's folder; made if need be.
        name: One of `GENERATED`.
        size: Side of the images in pixels.
        seed: Of what is drawn, and of the digits' permutation.
        test: Images of the test split; the digits have 797 whatever it says.

    Raises:
        ConfigError: There is no such task or number, `root` cannot be written to, or the task is there with others.
        ImportError: scikit-learn, for the digits, is missing.
    """
    if name not in GENERATED:
        raise ConfigError(f'task: got {name!r}{nearest(name, GENERATED)}')
    for key, value, least in (('size', size, 8), ('seed', seed, 0), ('test', test, 1)):
        if value < least:
            raise ConfigError(f'{key}: got {value}; expected at least {least}')
    spec = {'name': name, 'size': size, 'seed': seed, 'test': GENERATED[name].test or test, 'format': FORMAT}
    folder = Path(root) / name
    if not folder.exists():
        _write_aside(folder, spec)
    _compare(folder, spec)


def _write_aside(folder: Path, spec: dict) -> None:
    """Write the task into a folder beside its own, which it becomes when it is whole."""
    aside = folder.with_name(f'.{folder.name}.{secrets.token_hex(8)}')
    try:
        aside.mkdir(parents=True)
        _write(aside, spec)
        os.rename(aside, folder)
    except OSError as err:
        if not folder.exists():  # or another process was quicker
            raise ConfigError(f'data_dir: {folder} cannot be written: {err}') from err
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(folder: Path, spec: dict) -> None:
    lists: dict[str, list[str]] = {}
    for split, length in {**LENGTHS, 'test': spec['test']}.items():
        if split == 'train800val200':
            continue
        (folder / 'images' / split).mkdir(parents=True)
        lists[split] = []
        for index, (image, label) in enumerate(_images(spec, split, length)):
            path = f'images/{split}/{index:05d}.png'
            image.save(folder / path)
            lists[split].append(f'{path} {label}\n')
    lists['train800val200'] = lists['train800'] + lists['val200']
    for split, lines in lists.items():
        (folder / f'{split}.txt').write_text(''.join(lines), encoding='utf-8')
    (folder / 'task.json').write_text(json.dumps(spec, indent=2) + '\n', encoding='utf-8')


def _images(spec: dict, split: str, length: int) -> Iterator[tuple[Image.Image, int]]:
    """Images of a split, RGB, and their labels."""
    if spec['name'] != 'digits':
        for index in range(length):
            yield draw(spec['name'], spec['seed'], index, spec['size'], split)
        return
    # the three splits of the package's own are one permutation of all digits, cut elsewhere
    parts = [digits.arrays(part, spec['seed']) for part in digits.SPLITS]
    images, labels = (np.concatenate(kind) for kind in zip(*parts))
    first = {'train800': 0, 'val200': 800, 'test': 1000}[split]
    for index in range(first, first + length):
        image = Image.fromarray(images[index]).resize((spec['size'],) * 2, Image.Resampling.BICUBIC)
        yield image.convert('RGB'), int(labels[index])


def _compare(folder: Path, spec: dict) -> None:
    """Refuse a folder that holds another task than the one wanted."""
    file = folder / 'task.json'
    try:
        there = json.loads(file.read_text(encoding='utf-8'))
        there = {key: there[key] for key in spec}
    except (OSError, ValueError, LookupError, TypeError) as err:
        raise ConfigError(
            f'data_dir: {folder} is there, but {file.name} does not say what it holds ({type(err).__name__}); '
            'take another folder'
        ) from err
    differing = [f'{key} {there[key]!r}, not {spec[key]!r}' for key in spec if there[key] != spec[key]]
    if differing:
        raise ConfigError(f'data_dir: {folder} has {", ".join(differing)}; take another folder')
