"""Images as people have them: of any mode, some of them broken, with classes that a split may lack."""

from __future__ import annotations

import os
from typing import Any, Callable, Mapping

import numpy as np
from PIL import Image
from timm.data import ImageDataset
from torch.utils.data import Dataset

from ..engine.config import ConfigError
from ..engine.logging import log
from ..engine.stopping import TrainingError

RETRIES = 10  # broken images in a row before a run stops, as in timm
MODES = {1: 'L', 3: 'RGB', 4: 'RGBA'}  # PIL mode by the number of channels
# Other names that timm's users give to the folder of a split.
SYNONYMS = {
    **dict.fromkeys(('train', 'training'), ('train', 'training')),
    **dict.fromkeys(
        ('val', 'valid', 'validation', 'eval', 'evaluation'), ('val', 'valid', 'validation', 'eval', 'evaluation')
    ),
}


def image_mode(given: str | None, channels: int) -> str:
    """The PIL mode of images for a model of so many channels.

    Raises:
        ConfigError: There is none, or the given one has other channels.
    """
    mode = given or MODES.get(channels)
    try:
        bands = len(Image.new(mode, (1, 1)).getbands()) if mode else 0
    except ValueError as err:
        expected = ', '.join(MODES.values())
        raise ConfigError(f'input_img_mode: got {given!r}; expected a PIL mode such as {expected}') from err
    if bands != channels:
        hint = 'images have 1, 3 or 4' if not given else f'--in-chans {bands} makes a model for that mode'
        raise ConfigError(f'in_chans: the model takes {channels} channels, images of mode {mode} have {bands}; {hint}')
    return mode


def convert(image: Image.Image, mode: str) -> Image.Image:
    """An image in another mode; 16 bits become the upper 8, where Pillow makes all above 255 white."""
    if image.mode.startswith('I'):
        image = Image.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
    return image.convert(mode)


def find_split(folder: str, split: str, flag: str) -> str:
    """Path of a split below the folder of a data set: a folder of class folders, or a tar file of them.

    timm falls back to the whole folder, and so may validate on what it trains on.

    Args:
        folder: Folder of the data set, or one tar file, which is all of it.
        split: Name of the split; synonyms such as `val` and `validation` stand for each other; `.` is the whole folder.
        flag: Flag that names the split, for the message.

    Raises:
        ConfigError: There is no such folder or file.
    """
    if os.path.isfile(folder):
        if flag == 'train_split':
            return folder
        raise ConfigError(
            f"{flag}: got {split!r}, but data_dir is one file, {folder}; use --{flag.replace('_', '-')} '' for none"
        )
    name = split.split('[')[0]
    for candidate in dict.fromkeys((name, *SYNONYMS.get(name, ()))):
        for path in (os.path.join(folder, candidate), os.path.join(folder, f'{candidate}.tar')):
            if os.path.exists(path):
                return path
    there = ', '.join(sorted(entry.name for entry in os.scandir(folder) if not entry.name.startswith('.'))[:10])
    option = f'--{flag.replace("_", "-")}'
    none = '' if flag == 'train_split' else f", or {option} '' for none"
    raise ConfigError(
        f'{flag}: got {split!r}, but {folder} has no folder of that name, only {there or "nothing"}; '
        f'name another with {option}, or {option} . for {folder} itself{none}'
    )


class Images(Dataset):
    """A data set of known length whose images all have one mode, and whose broken ones are named.

    Attributes:
        classes: Class names to labels, where the data set knows them.
    """

    def __init__(
        self, dataset: Any, mode: str, broken: str, split: str = '', classes: Mapping[str, int] | None = None
    ) -> None:
        """
        Args:
            dataset: timm's or torchvision's, without a transform.
            mode: PIL mode.
            broken: What to do with an image that cannot be read: `skip` puts the next one into its place and says so.
            split: Its name, for messages.
            classes: Labels by class names, to replace the data set's own (default: keep those).

        Raises:
            ConfigError: The data set has a class that is not among them.
        """
        self.dataset, self.mode, self.broken = dataset, mode, broken
        self.transform: Callable | None = None
        reader = getattr(dataset, 'reader', dataset)
        names = getattr(reader, 'class_to_idx', None) or getattr(reader, 'class_name_to_idx', None)
        self.classes = dict(names) if isinstance(names, dict) else None
        self._new: dict[int, int] | None = None
        if classes and self.classes and classes != self.classes:
            self._relabel(classes, split)

    def _relabel(self, classes: Mapping[str, int], split: str) -> None:
        strange = [name for name in self.classes if name not in classes]
        if strange:
            raise ConfigError(
                f'class_map: split {split!r} has the class {strange[0]!r}, which the training split lacks; '
                'give a --class-map that lists all classes, or the wanted ones'
            )
        absent = [name for name in classes if name not in self.classes]
        log.warning('split %r has no images of %d classes, such as %r', split, len(absent), absent[0])
        self._new = {label: classes[name] for name, label in self.classes.items()}
        self.classes = dict(classes)

    def __len__(self) -> int:
        return len(self.dataset)

    def labels(self) -> list[int]:
        """The label of each image; images are read for them only where the data set does not list them."""
        for owner in (self.dataset, getattr(self.dataset, 'reader', None)):
            for name in ('targets', 'labels', 'samples'):  # torchvision's two names, timm's
                listed = getattr(owner, name, None)
                if listed is not None and len(listed) == len(self):
                    found = [int(item[1] if name == 'samples' else item) for item in listed]
                    return found if self._new is None else [self._new[label] for label in found]
        log.info('reading all %d images for their labels, which this data set does not list', len(self))
        return [int(self[index][1]) for index in range(len(self))]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        for _ in range(RETRIES):
            try:
                image, label = self._read(index)
                break
            except Exception as err:  # Pillow raises some ten kinds
                self._say(index, err)
                index = (index + 1) % len(self)
        else:
            raise TrainingError(f'{RETRIES} images in a row cannot be read, the last of them {self.path(index - 1)}')
        if self._new is not None:
            label = self._new[int(label)]
        return (image if self.transform is None else self.transform(image)), label

    def _read(self, index: int) -> tuple[Image.Image, Any]:
        if not isinstance(self.dataset, ImageDataset):
            image, label = self.dataset[index]
            return convert(image, self.mode), label
        file, label, *_ = self.dataset.reader[index]
        with file:
            return convert(Image.open(file), self.mode), -1 if label is None else label

    def _say(self, index: int, err: Exception) -> None:
        what = f'{self.path(index)} cannot be read as an image ({type(err).__name__}: {err})'
        if self.broken == 'stop':
            raise TrainingError(f'{what}; --bad-images skip goes on without') from err
        log.warning('%s; the next one takes its place', what)

    def path(self, index: int) -> str:
        """Where an image is, as far as the data set tells."""
        try:
            return self.dataset.filename(index, absolute=True)
        except Exception:
            samples = getattr(self.dataset, 'samples', None)
            return str(samples[index][0]) if samples else f'image {index}'
