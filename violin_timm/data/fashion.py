"""Fashion-MNIST: 70,000 grey images of 28x28 pixels, ten kinds of clothing.

Read from `share/datasets/fashion-mnist`, where Debian's package `dataset-fashion-mnist` puts it; else downloaded once,
by torchvision, into `$TORCH_HOME/fashion-mnist`; where neither is there, the digits stand in, and a warning says so.

A permutation fixed by `split_seed` cuts the 60,000 training images into 50,000 to train on and 10,000 to validate; the
10,000 test images are those of the set; `trainval` is all 60,000. `train[:5000]` is the first 5000 images of a split.
"""

from __future__ import annotations

import gzip
import re
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from ..engine.logging import log
from . import digits
from .digits import SPLIT_SEED, Digits

SPLITS = {
    'train': slice(0, 50000),
    'validation': slice(50000, 60000),
    'trainval': slice(0, 60000),
    'test': slice(0, 10000),
}
CLASSES = 10

_SLICE = re.compile(r'(\w+)(?:\[:(\d+)\])?')


def _folders() -> list[Path]:
    """Where a system keeps data sets."""
    return [Path(root) / 'share/datasets/fashion-mnist' for root in (sys.prefix, '/usr/local', '/usr')]


def find() -> Path | None:
    """Folder of the four files: the system's, the downloaded, or else None."""
    for folder in _folders():
        if (folder / 'train-images-idx3-ubyte.gz').is_file():
            return folder
    from torchvision.datasets import FashionMNIST

    root = Path(torch.hub.get_dir()).parent / 'fashion-mnist'
    try:
        return Path(FashionMNIST(str(root), download=True).raw_folder)
    except (OSError, RuntimeError) as err:  # torchvision raises either where it cannot reach or check the files
        log.warning('fashion: no %s, and the download failed: %s', ' or '.join(map(str, _folders())), err)
        return None


def read_idx(path: Path) -> np.ndarray:
    """Contents of a gzipped IDX file of unsigned bytes, in its shape; read-only.

    Raises:
        ValueError: It is another kind of file, or cut short.
    """
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b'\x00\x00\x08':
        raise ValueError(f'{path}: got {data[:3]!r} at its start; expected an IDX file of unsigned bytes')
    shape = np.frombuffer(data, '>i4', data[3], 4)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if values.size != np.prod(shape):
        raise ValueError(f'{path}: got {values.size} values; expected {tuple(map(int, shape))}')
    return values.reshape(shape)


@lru_cache
def _load(name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Images `[N, 28, 28]` and labels `[N]` of `train` or `t10k`; None where the set is not to be had."""
    folder = find()
    if folder is None:
        return None
    images, labels = (read_idx(folder / f'{name}-{kind}-ubyte.gz') for kind in ('images-idx3', 'labels-idx1'))
    labels = labels.astype(np.int64)
    labels.flags.writeable = False
    return images, labels


def arrays(split: str, split_seed: int = SPLIT_SEED) -> tuple[np.ndarray, np.ndarray]:
    """Images `[N, 28, 28]` uint8 (of the digits `[N, 8, 8]`) and labels `[N]` of a split.

    Args:
        split: `train`, `validation`, `trainval` or `test`, and perhaps `[:N]`.
        split_seed: Seed of the permutation that is cut into the splits.

    Raises:
        ValueError: There is no such split, or it has fewer images than that.
    """
    found = _SLICE.fullmatch(split)
    if not found or found[1] not in SPLITS:
        raise ValueError(f'split: got {split!r} for fashion; choose from {", ".join(SPLITS)}, each perhaps with [:N]')
    name, count = found[1], int(found[2]) if found[2] else None
    loaded = _load('t10k' if name == 'test' else 'train')
    if loaded is None:
        log.warning('fashion: the digits stand in for Fashion-MNIST; numbers are of that set')
        names = ('train', 'validation') if name == 'trainval' else (name,)
        images, labels = map(np.concatenate, zip(*(digits.arrays(part, split_seed) for part in names)))
        return images[:count], labels[:count]  # a smaller set: as many as there are
    images, labels = loaded
    if name != 'test':
        chosen = np.random.RandomState(split_seed).permutation(len(images))[SPLITS[name]]
        images, labels = images[chosen], labels[chosen]
    if count is not None and not 0 < count <= len(images):
        raise ValueError(f'split: got {split!r} for fashion; {name} has {len(images)} images')
    return images[:count], labels[:count]


class Fashion(Digits):
    """A split of Fashion-MNIST as timm's loaders take it."""

    arrays = staticmethod(arrays)
