"""Splits as uint8 tensors: without augmentation an image is the same in each epoch, so it is read and resized once."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

import numpy as np
import torch
from timm.data import create_transform
from torch.utils.data import DataLoader

from ..engine.config import ConfigError
from ..engine.stopping import leave_to_parent

READ = 64  # images that are read at a time


@dataclass(frozen=True)
class Tensors:
    """A split in memory.

    Attributes:
        images: `[N, C, H, W]` uint8.
        labels: `[N]` int64.
    """

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Images `[B, C, H, W]` uint8 and labels `[B]`, in order; the last batch may be shorter."""
        yield from zip(self.images.split(batch_size), self.labels.split(batch_size))


@dataclass(frozen=True)
class Streamed:
    """A split too large for memory: its images are read each time anew.

    Attributes:
        dataset: Items are an image `[C, H, W]` uint8 and its label.
        workers: Loader processes.
    """

    dataset: Any
    workers: int = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """As those of `Tensors`."""
        yield from DataLoader(
            self.dataset,
            batch_size,
            num_workers=self.workers,
            worker_init_fn=leave_to_parent,
            generator=torch.Generator(),  # of the workers' seeds; else the training's stream would depend on who reads
        )


def load(
    dataset: Any, size: tuple[int, int], interpolation: str, workers: int = 0, limit: int = 2 * 2**30
) -> Tensors | Streamed:
    """A data set resized to exactly `size`, whatever the aspect of its images.

    Args:
        dataset: Of a known length; items are PIL images, all of one mode, and labels; it has a `transform` to set, and
            stays as it is.
        size: Height and width in pixels.
        interpolation: timm's name of it.
        workers: Loader processes.
        limit: Bytes of images up to which they are kept in memory.

    Raises:
        ConfigError: The data set is empty, or there is no such interpolation.
        TypeError: The data set does not apply its `transform`.
    """
    if not len(dataset):
        raise ConfigError('dataset: got one without images')
    streamed = Streamed(_resized(dataset, size, interpolation), workers)
    first = streamed.dataset[0][0]
    if not isinstance(first, torch.Tensor) or first.dtype != torch.uint8:
        raise TypeError(f'dataset: {type(dataset).__name__} does not apply its transform; its images are {type(first)}')
    count = len(dataset)
    if count * first.numel() > limit:
        return streamed
    images, labels = torch.empty((count, *first.shape), dtype=torch.uint8), torch.empty(count, dtype=torch.int64)
    for number, (some, theirs) in enumerate(streamed.batches(READ)):
        chosen = slice(number * READ, number * READ + len(theirs))
        images[chosen], labels[chosen] = some, theirs
    return Tensors(images, labels)


def _resized(dataset: Any, size: tuple[int, int], interpolation: str) -> Any:
    try:
        transform = create_transform(
            size, interpolation=interpolation, crop_mode='squash', crop_pct=1.0, use_prefetcher=True
        )
    except KeyError as err:
        raise ConfigError(f'interpolation: got {interpolation!r}; expected nearest, bilinear, bicubic, ...') from err
    dataset = copy.copy(dataset)
    dataset.transform = transform
    return dataset


def normalise(
    images: torch.Tensor, mean: Sequence[float], std: Sequence[float], device: torch.device | str
) -> torch.Tensor:
    """Images `[B, C, H, W]` uint8 -> float32 on the device, as timm's transforms make them.

    Args:
        images: Values 0..255.
        mean: Pixel mean of each channel, of values in 0..1.
        std: Their deviation.
        device: Where to.

    Raises:
        ValueError: There is not one mean and one deviation for each channel.
    """
    channels = images.shape[1]
    if not len(mean) == len(std) == channels:
        raise ValueError(f'mean, std: got {len(mean)} and {len(std)} values; the images have {channels} channels')
    mean, std = (torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1) for values in (mean, std))
    return images.to(device, non_blocking=True).float().div(255).sub_(mean).div_(std)


def order(count: int, batch_size: int, seed: int, epoch: int) -> list[torch.Tensor]:
    """Indices of the batches of a shuffled epoch, each `[batch_size]` int64; the incomplete last one is left out.

    They follow from the arguments alone, and draw nothing from a global generator.

    Raises:
        ConfigError: There is less than one batch.
    """
    if not 1 <= batch_size <= count:
        raise ConfigError(f'batch_size: got {batch_size}; expected 1 to {count}, the images of the training split')
    # RandomState's stream is frozen for good, default_rng's is not.
    generator = np.random.RandomState(np.random.SeedSequence([seed, epoch]).generate_state(4))
    batches = torch.from_numpy(generator.permutation(count)).long().split(batch_size)
    return list(batches[: count // batch_size])
