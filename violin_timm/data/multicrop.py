"""DINO's multi-crop: several random views of every image, of any sizes and numbers, and their batches.

What is drawn for an image depends on seed, epoch and its index alone: neither on the number of processes and loader
workers, nor on whether the run was resumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Sequence

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from ..engine.config import ConfigError
from ..engine.distributed import World


@dataclass(frozen=True)
class Crop:
    """One view.

    Attributes:
        size: Height and width in pixels.
        scale: Range of the part of the image's area that is cut out.
        blur_prob: Probability of a Gaussian blur.
        solarize_prob: Probability of inverting all values from 128 on.
    """

    size: tuple[int, int]
    scale: tuple[float, float]
    blur_prob: float = 0.0
    solarize_prob: float = 0.0


@dataclass(frozen=True)
class Colour:
    """What happens to the pixels of every view.

    Attributes:
        hflip: Probability of a horizontal flip.
        jitter: Strengths of brightness, contrast, saturation and hue.
        jitter_prob: Probability of the jitter.
        grayscale_prob: Probability of dropping the colour.
        blur_radius: Range of the blur's radius in pixels.
        interpolation: Of the resizing: timm's name of it.
    """

    hflip: float = 0.5
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)
    jitter_prob: float = 0.8
    grayscale_prob: float = 0.2
    blur_radius: tuple[float, float] = (0.1, 2.0)
    interpolation: str = 'bicubic'


class Blur:
    """PIL's Gaussian blur with a random radius, in pixels."""

    def __init__(self, radius: tuple[float, float]) -> None:
        self.radius = radius

    def __call__(self, image: Image.Image) -> Image.Image:
        low, high = self.radius
        return image.filter(ImageFilter.GaussianBlur(low + (high - low) * torch.rand(()).item()))


def _sometimes(transform: Any, probability: float) -> list[Any]:
    """`transform` with `probability`, as a list that is empty where that is never."""
    return [transforms.RandomApply([transform], p=probability)] if probability else []


def view_transform(crop: Crop, colour: Colour) -> transforms.Compose:
    """PIL image -> one view `[C, H, W]`, uint8."""
    steps = [
        transforms.RandomResizedCrop(
            crop.size, scale=crop.scale, interpolation=InterpolationMode(colour.interpolation), antialias=True
        ),
        transforms.RandomHorizontalFlip(colour.hflip),
        *(_sometimes(transforms.ColorJitter(*colour.jitter), colour.jitter_prob) if any(colour.jitter) else []),
        *([transforms.RandomGrayscale(colour.grayscale_prob)] if colour.grayscale_prob else []),
        *_sometimes(Blur(colour.blur_radius), crop.blur_prob),
        *([transforms.RandomSolarize(128, crop.solarize_prob)] if crop.solarize_prob else []),
        transforms.PILToTensor(),
    ]
    return transforms.Compose(steps)


class MultiCrop(Dataset):
    """A data set of PIL images and labels as one of views: `[C, H, W]` uint8, one for each crop."""

    def __init__(self, dataset: Any, crops: Sequence[Crop], colour: Colour, seed: int) -> None:
        """
        Args:
            dataset: Of a known length, without a transform.
            crops: The views, those of the teacher first.
            colour: Of all views.
            seed: What is drawn follows from it, the epoch and the index.

        Raises:
            ConfigError: The data set has no length: it is a stream.
        """
        if not hasattr(dataset, '__len__') or not hasattr(dataset, '__getitem__'):
            raise ConfigError('dataset: got a stream; multi-crop needs a data set of known length')
        self.dataset, self.seed, self.epoch = dataset, seed, 0
        self.views = [view_transform(crop, colour) for crop in crops]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        image = self.dataset[index][0]
        draw = np.random.SeedSequence([self.seed, self.epoch, index]).generate_state(1, np.uint64)[0]
        generator = torch.default_generator  # that of torchvision; torch.manual_seed would also seed devices
        before = generator.get_state()
        try:
            generator.manual_seed(int(draw >> np.uint64(1)))
            return [view(image) for view in self.views]
        finally:
            generator.set_state(before)


class _Order:
    """Indices of a process's batches: slices of one shuffled order that all processes share."""

    def __init__(self, images: int, batch_size: int, world: World, seed: int) -> None:
        self.images, self.batch_size, self.world, self.seed = images, batch_size, world, seed
        self.epoch, self.done = 0, 0

    def __len__(self) -> int:
        return self.images // (self.batch_size * self.world.size)

    def __iter__(self) -> Iterator[list[int]]:
        # RandomState's stream is frozen for good, default_rng's is not.
        seeds = np.random.SeedSequence([self.seed, self.epoch]).generate_state(4)
        order = np.random.RandomState(seeds).permutation(self.images)
        together = self.batch_size * self.world.size
        for batch in range(self.done, len(self)):
            mine = order[batch * together + self.world.rank : (batch + 1) * together : self.world.size]
            yield mine.tolist()


class CropBatches:
    """Batches of views, normalised and on the device: a list with one `[B, C, H, W]` float32 for each crop.

    The last images of an epoch, too few for a batch, are left out; another epoch has others. The same images make up an
    update whatever the number of processes, as long as the batches of all are as large together.
    """

    def __init__(
        self,
        dataset: MultiCrop,
        batch_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        world: World,
        workers: int = 0,
        pin_mem: bool = False,
    ) -> None:
        """
        Args:
            dataset: The views.
            batch_size: Images for each process.
            mean: Pixel mean of each channel, of values in 0..1.
            std: Their deviation.
            world: This process.
            workers: Loader processes.
            pin_mem: Pin host memory.

        Raises:
            ConfigError: There is less than one batch.
        """
        self.dataset, self.world = dataset, world
        self.order = _Order(len(dataset), batch_size, world, dataset.seed)
        if not len(self.order):
            raise ConfigError(
                f'batch_size: got {batch_size} for each of {world.size} process(es), more than the {len(dataset)} '
                f'images of the training split'
            )
        self.mean, self.std = (torch.tensor(values, device=world.device).view(-1, 1, 1) * 255 for values in (mean, std))
        # Workers are started anew each epoch, or they would not learn of it.
        self.loader = DataLoader(dataset, batch_sampler=self.order, num_workers=workers, pin_memory=pin_mem)

    def __len__(self) -> int:
        return len(self.order)

    def set_epoch(self, epoch: int, done: int = 0) -> None:
        """Choose the order and the draws of the epoch, and leave out the batches of it that are done."""
        self.order.epoch = self.dataset.epoch = epoch
        self.order.done = done

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for views in self.loader:
            moved = [view.to(self.world.device, non_blocking=True).float() for view in views]
            yield [view.sub_(self.mean).div_(self.std) for view in moved]


def check_sizes(crops: Sequence[Crop], patch: tuple[int, int], dynamic: bool, image: tuple[int, int]) -> None:
    """Refuse views that a backbone cannot take.

    Args:
        crops: The views.
        patch: Height and width of a patch.
        dynamic: Whether the backbone takes other sizes than its own.
        image: Its own size.

    Raises:
        ConfigError: The side of one is no multiple of the patch's, or not the backbone's own.
    """
    for crop in crops:
        if any(side % unit for side, unit in zip(crop.size, patch)):
            raise ConfigError(f'crop size: got {crop.size}; expected multiples of the patch size {patch}')
        if not dynamic and crop.size != image:
            raise ConfigError(f'crop size: got {crop.size}; without dynamic_img_size the model takes {image} alone')
