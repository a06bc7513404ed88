"""The digits that come with scikit-learn: 1797 grey images of 8x8 pixels, ten classes, no download.

`SPLIT_SEED` fixes the split once for all, whatever the seed of a training: 1000 images to train on, 297 to validate,
500 to test.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable

import numpy as np
from PIL import Image

SPLIT_SEED = 0
SPLITS = {'train': slice(0, 1000), 'validation': slice(1000, 1297), 'test': slice(1297, 1797)}
CLASSES = 10


@lru_cache
def _load() -> tuple[np.ndarray, np.ndarray]:
    """Images `[1797, 8, 8]` uint8 and labels `[1797]`; read-only, since they are shared."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as err:
        raise ImportError("digits: scikit-learn is not installed; pip install 'violin-timm[digits]'") from err
    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)  # the values are 0..16
    images.flags.writeable = digits.target.flags.writeable = False
    return images, digits.target


def arrays(split: str, split_seed: int = SPLIT_SEED) -> tuple[np.ndarray, np.ndarray]:
    """Images `[N, 8, 8]` uint8 and labels `[N]` of a split.

    Args:
        split: `train`, `validation` or `test`.
        split_seed: Seed of the permutation that is cut into the splits.

    Raises:
        ValueError: There is no such split.
        ImportError: scikit-learn is missing.
    """
    if split not in SPLITS:
        raise ValueError(f'split: got {split!r} for digits; choose from {", ".join(SPLITS)}')
    images, labels = _load()
    # RandomState's stream is frozen for good, default_rng's is not.
    chosen = np.random.RandomState(split_seed).permutation(len(images))[SPLITS[split]]
    return images[chosen], labels[chosen]


class Digits:
    """A split of the digits as timm's loaders take it: `transform` is set from outside."""

    arrays = staticmethod(arrays)  # where a split's images and labels come from

    def __init__(
        self,
        split: str = 'train',
        split_seed: int = SPLIT_SEED,
        input_img_mode: str = 'L',
        transform: Callable | None = None,
        target_transform: Callable | None = None,
    ) -> None:
        """
        Args:
            split: `train`, `validation` or `test`.
            split_seed: See `arrays`.
            input_img_mode: PIL mode the images are converted to.
            transform: Applied to each PIL image.
            target_transform: Applied to each label.

        Raises:
            ValueError: There is no such split.
            ImportError: scikit-learn is missing.
        """
        self.images, self.labels = self.arrays(split, split_seed)
        self.input_img_mode = input_img_mode
        self.transform = transform
        self.target_transform = target_transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image: Any = Image.fromarray(self.images[index]).convert(self.input_img_mode)
        label = int(self.labels[index])
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            label = self.target_transform(label)
        return image, label


def baselines(split_seed: int = SPLIT_SEED) -> dict[str, float]:
    """Test accuracy, in per cent, of two classifiers of raw pixels that learn from the same training split.

    Returns:
        `logistic_regression` and `3_nearest_neighbours`.
    """
    (train, train_labels), (test, test_labels) = arrays('train', split_seed), arrays('test', split_seed)
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    classifiers = {
        'logistic_regression': LogisticRegression(max_iter=5000),
        '3_nearest_neighbours': KNeighborsClassifier(3),
    }
    flat = [split.reshape(len(split), -1) / 255 for split in (train, test)]
    return {
        name: 100 * float(classifier.fit(flat[0], train_labels).score(flat[1], test_labels))
        for name, classifier in classifiers.items()
    }
