"""A few images of each class, and which of them validate."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import numpy as np
from torch.utils.data import Dataset

from ..engine.config import ConfigError


class Subset(Dataset):
    """Some items of a data set, with a `transform` of its own to set; torch's `Subset` would not apply it."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        """
        Args:
            dataset: Items are images and labels; without a transform.
            indices: Of the items, in the order wanted.
        """
        self.dataset, self.indices = dataset, list(indices)
        self.transform: Callable | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, label = self.dataset[self.indices[index]]
        return (image if self.transform is None else self.transform(image)), label


def choose(
    labels: Sequence[int], seed: int, shots: int | None, train_images: int | None, val_part: float
) -> tuple[list[int], list[int]]:
    """Draw images at random, class by class, and split them into those that train and those that validate.

    The draw is of indices: it follows from the seed and the order of the labels. With one seed, more images of a class
    include the fewer.

    Args:
        labels: Of all images.
        seed: Of the draw.
        shots: Images of each class.
        train_images: Images of all classes together, shared among them as the labels are, each with at least one. With
            neither of the two, all images are taken.
        val_part: Part of each class that validates, in 0..1; 0 for none. Otherwise it is rounded, but to at least one
            image of a class that has two, and so that one is left to train on.

    Returns:
        Indices to train on and to validate on, each ascending, without a common one.

    Raises:
        ConfigError: Both numbers are given, or one that the labels cannot fill, or `val_part` is no such part.
    """
    if not 0 <= val_part < 1:
        raise ConfigError(f'val_part: got {val_part:g}; expected a part from 0 to below 1')
    if shots is not None and train_images is not None:
        raise ConfigError(f'shots, train_images: got {shots} and {train_images}; expected one of the two, or neither')
    if not len(labels):
        raise ConfigError('labels: got none')
    indices = {int(label): np.flatnonzero(np.asarray(labels) == label) for label in np.unique(labels)}
    there = {label: len(found) for label, found in indices.items()}
    takes = there if train_images is None and shots is None else _takes(there, shots, train_images)
    parts: tuple[list[int], list[int]] = ([], [])
    for label, found in indices.items():
        seeds = np.random.SeedSequence([seed, label]).generate_state(4)
        chosen = np.random.RandomState(seeds).permutation(found)[: takes[label]]
        validating = min(max(1, int(val_part * len(chosen) + 0.5)), len(chosen) - 1) if val_part else 0
        parts[0].extend(chosen[validating:].tolist())
        parts[1].extend(chosen[:validating].tolist())
    return sorted(parts[0]), sorted(parts[1])


def _takes(there: Mapping[int, int], shots: int | None, train_images: int | None) -> dict[int, int]:
    """How many images of each class to take, by the number that are there."""
    if shots is None:
        return _shares(there, train_images)
    if shots < 1:
        raise ConfigError(f'shots: got {shots}; expected at least 1')
    for label, count in there.items():
        if count < shots:
            raise ConfigError(f'shots: got {shots}; class {label} has {count} images')
    return dict.fromkeys(there, shots)


def _shares(there: Mapping[int, int], train_images: int) -> dict[int, int]:
    """`train_images` shared out in proportion, each class with at least one and none with more than it has."""
    images = sum(there.values())
    if not len(there) <= train_images <= images:
        raise ConfigError(
            f'train_images: got {train_images}; expected {len(there)}, the number of classes, to {images}, all images'
        )
    due = {label: train_images * count / images for label, count in there.items()}
    takes = {label: max(1, int(share)) for label, share in due.items()}
    while sum(takes.values()) < train_images:  # to those that the rounding took most from
        takes[max(takes, key=lambda label: due[label] - takes[label])] += 1
    while sum(takes.values()) > train_images:  # from those that the least of one gave most to, if they can do without
        takes[max((label for label in takes if takes[label] > 1), key=lambda label: takes[label] - due[label])] -= 1
    return takes
