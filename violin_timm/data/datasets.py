"""From the data flags to data sets, and from those to batches, through timm's loaders."""

from __future__ import annotations

import os
from argparse import Namespace
from functools import partial
from itertools import count
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch
from PIL import Image
from timm import data as timm_data
from timm.data import auto_augment
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import IterableDataset

from ..engine.config import ConfigError
from ..engine.distributed import World, seed_batch
from ..engine.logging import log
from ..engine.stopping import leave_to_parent
from .digits import Digits
from .fashion import Fashion
from .images import Images, find_split, image_mode

# Sets of our own by name: a function of (split, split_seed, PIL mode). Everything else is timm's.
EMBEDDED: dict[str, Callable[..., Any]] = {'digits': Digits, 'fashion': Fashion}


def create_dataset(
    args: Namespace, split: str, channels: int, training: bool = False, classes: Mapping[str, int] | None = None
) -> Any:
    """The data set of `--dataset`, without a transform.

    Args:
        args: Settings of the run.
        split: Name of the split.
        channels: Image channels of the model; `input_img_mode`, if given, must have as many.
        training: Whether it is the training split.
        classes: Labels by class names, those of the training split: a split that lacks a class keeps them.

    Raises:
        ConfigError: The data set, its folder or its split is not there.
    """
    mode = image_mode(args.input_img_mode, channels)
    if args.dataset in EMBEDDED:
        try:
            return EMBEDDED[args.dataset](split, split_seed=args.split_seed, input_img_mode=mode)
        except (ValueError, ImportError) as err:
            raise ConfigError(str(err)) from err
    root = args.data_dir if '/' in args.dataset else _find_folder(args, split, training)
    extra = {'seed': args.seed, 'repeats': args.epoch_repeats} if training else {}
    try:
        dataset = timm_data.create_dataset(
            args.dataset,
            root=root,
            split=split,
            search_split='/' in args.dataset,
            is_training=training,
            class_map=args.class_map,
            download=args.dataset_download,
            batch_size=args.batch_size,
            input_img_mode=mode,
            input_key=args.input_key,
            target_key=args.target_key,
            num_samples=args.train_num_samples if training else args.val_num_samples,
            trust_remote_code=args.dataset_trust_remote_code,
            **extra,
        )
    except (AssertionError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as err:
        name = args.dataset or root
        raise ConfigError(f'dataset: {name!r}, split {split!r}, cannot be opened: {err or type(err).__name__}') from err
    if hasattr(dataset, '__len__') and not isinstance(dataset, IterableDataset):
        return Images(dataset, mode, args.bad_images, split, None if args.class_map else classes)
    return dataset


def _find_folder(args: Namespace, split: str, training: bool) -> str:
    if args.dataset not in ('', 'folder', 'image_folder'):
        raise ConfigError(
            f"dataset: got {args.dataset!r}; choose from {', '.join(EMBEDDED)}, timm's "
            '<type>/<name> (torch/, hfds/, hfids/, tfds/, wds/), or nothing for a folder of images'
        )
    if not args.data_dir or not os.path.exists(args.data_dir):
        raise ConfigError(f'data_dir: got {args.data_dir!r}; expected the folder of the data set')
    flag = 'train_split' if training else 'test_split' if split == args.test_split else 'val_split'
    return find_split(args.data_dir, split, flag)


def leaves_files(args: Namespace) -> bool:
    """Whether opening the data set may download or unpack it."""
    return args.dataset_download or args.dataset == 'fashion' or args.dataset.split('/')[0] in ('torch', 'hfds', 'tfds')


class Batches:
    """Batches `(images [B, C, H, W] float32, targets)` on the device, whichever way timm's loader prepares them.

    Targets are class indices `[B]`, or with mixing distributions `[B, classes]`.
    """

    def __init__(
        self,
        loader: Iterable,
        world: World,
        prefetched: bool,
        mixup: timm_data.Mixup | None = None,
        mixup_off_epoch: int = 0,
        seed: int = 0,
        channels_last: bool = False,
    ) -> None:
        self.loader, self.device, self.prefetched = loader, world.device, prefetched
        self.seed, self.rank, self.replay = seed, world.rank, None
        self.mixup, self.mixup_off_epoch, self.channels_last = mixup, mixup_off_epoch, channels_last
        sampler = getattr(loader, 'sampler', None)
        if hasattr(sampler, 'set_epoch') and hasattr(sampler, 'seed'):
            sampler.seed = seed  # timm leaves torch's 0: runs of different seeds would see one order
        if isinstance(sampler, RepeatAugSampler):
            # timm rounds down to a multiple of 256, which leaves much of a small set out
            sampler.num_selected_samples = -(-len(sampler.dataset) // world.size)

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int, done: int | None = None) -> None:
        """Choose the order of the epoch, in samplers and data sets that need to be told, and switch mixing.

        Args:
            epoch: Counted from 0.
            done: Batches that are not to come, being done before. What they draw is drawn again: the others are those
                of the whole epoch. Given, each batch is drawn from seed, epoch, rank and its number alone, whatever
                the model drew in between.
        """
        for part in (self.loader.dataset, self.loader.sampler):
            if isinstance(part, RepeatAugSampler):
                part.set_epoch(self.seed + epoch)  # as torch's own sampler has it
            elif hasattr(part, 'set_epoch'):
                part.set_epoch(epoch)
        if self.mixup is not None:
            self.mixup.mixup_enabled = not self.mixup_off_epoch or epoch < self.mixup_off_epoch
        self.replay = None if done is None else (epoch, done)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        epoch, done = self.replay or (0, 0)
        batches = iter(self.loader)
        for number in count():
            if self.replay:
                seed_batch(self.seed, epoch, self.rank, number)
            batch = next(batches, None)
            if batch is None:
                return
            prepared = self._prepare(*batch)
            if number >= done:
                yield prepared

    def _prepare(self, images: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.prefetched:
            images, targets = images.to(self.device), targets.to(self.device)
            if self.mixup is not None:
                images, targets = self.mixup(images, targets)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, targets


def training_batches(args: Namespace, dataset: Any, data_config: dict, num_classes: int, world: World) -> Batches:
    """Augmented, shuffled and mixed batches; the incomplete last one of an epoch is left out, as timm does.

    Args:
        args: Settings of the run.
        dataset: From `create_dataset`.
        data_config: timm's data config: input size, mean, std, interpolation.
        num_classes: Classes of the model.
        world: This process.

    Raises:
        ConfigError: There is less than one batch, or mixing meets an odd batch.
    """
    mixup, prefetch = _create_mixup(args, num_classes), not args.no_prefetcher
    if args.aa:
        _mend_posterize()
    interpolation = args.train_interpolation
    if args.no_aug or not interpolation:
        interpolation = data_config['interpolation']
    loader = timm_data.create_loader(
        dataset,
        input_size=data_config['input_size'],
        batch_size=args.batch_size,
        is_training=True,
        no_aug=args.no_aug,
        re_prob=args.reprob,
        re_mode=args.remode,
        re_count=args.recount,
        train_crop_mode=args.train_crop_mode,
        scale=args.scale,
        ratio=args.ratio,
        hflip=args.hflip,
        vflip=args.vflip,
        color_jitter=args.color_jitter,
        color_jitter_prob=args.color_jitter_prob,
        grayscale_prob=args.grayscale_prob,
        gaussian_blur_prob=args.gaussian_blur_prob,
        auto_augment=args.aa,
        num_aug_repeats=_repeats(args, world),
        interpolation=interpolation,
        collate_fn=mixup if prefetch else None,
        **_common(args, data_config, world),
    )
    _shield_workers(loader)
    if not len(loader):
        raise ConfigError(
            f'batch_size: got {args.batch_size} for each of {world.size} process(es), more than the '
            f'{len(dataset)} images of split {args.train_split!r}'
        )
    return Batches(loader, world, prefetch, mixup, args.mixup_off_epoch, args.seed, args.channels_last)


def evaluation_batches(args: Namespace, dataset: Any, data_config: dict, world: World) -> Batches:
    """Every image once, in order, resized and centre-cropped; arguments as those of `training_batches`."""
    loader = timm_data.create_loader(
        dataset,
        input_size=data_config['input_size'],
        batch_size=args.validation_batch_size or args.batch_size,
        is_training=False,
        interpolation=data_config['interpolation'],
        crop_pct=data_config['crop_pct'],
        crop_mode=data_config['crop_mode'],
        **_common(args, data_config, world),
    )
    _shield_workers(loader)
    return Batches(loader, world, not args.no_prefetcher, channels_last=args.channels_last)


def _posterize(image: Image.Image, bits_to_keep: int, **unused: Any) -> Image.Image:
    """timm's op, but with Pillow 13 and later too: no bits make a black image, as they did before it raised on them."""
    return auto_augment.posterize(image, bits_to_keep) if bits_to_keep >= 1 else image.point(lambda value: 0)


def _mend_posterize() -> None:
    # `rand-m9-mstd0.5-inc1`, DeiT's own policy, draws no bits about once in a thousand images.
    for name in ('Posterize', 'PosterizeIncreasing', 'PosterizeOriginal'):
        auto_augment.NAME_TO_OP[name] = _posterize


def _common(args: Namespace, data_config: dict, world: World) -> dict[str, Any]:
    # Workers are started anew each epoch: the state that persistent ones carry over cannot be resumed.
    return dict(
        mean=data_config['mean'],
        std=data_config['std'],
        num_workers=args.workers,
        device=world.device,
        distributed=world.distributed,
        pin_memory=args.pin_mem,
        use_prefetcher=not args.no_prefetcher,
        worker_seeding=args.worker_seeding,
        persistent_workers=False,
    )


def _init_worker(then: Callable[[int], None], worker: int) -> None:
    leave_to_parent(worker)
    then(worker)


def _shield_workers(loader: Any) -> None:
    inner = getattr(loader, 'loader', loader)  # of the prefetcher
    inner.worker_init_fn = partial(_init_worker, inner.worker_init_fn)


def _repeats(args: Namespace, world: World) -> float:
    if 0 < args.aug_repeats < 1:
        raise ConfigError(f'aug_repeats: got {args.aug_repeats:g}; expected 0 for none, or at least 1')
    if args.aug_repeats and not world.distributed:
        log.warning(
            'aug_repeats: %g needs several processes; this one sees each image once per epoch', args.aug_repeats
        )
        return 0
    return args.aug_repeats


def _create_mixup(args: Namespace, num_classes: int) -> timm_data.Mixup | None:
    if not (args.mixup > 0 or args.cutmix > 0 or args.cutmix_minmax):
        return None
    if args.batch_size % 2:
        raise ConfigError(f'batch_size: got {args.batch_size}; mixup and cutmix pair images, so it must be even')
    kind = timm_data.Mixup if args.no_prefetcher else timm_data.FastCollateMixup
    return kind(
        mixup_alpha=args.mixup,
        cutmix_alpha=args.cutmix,
        cutmix_minmax=args.cutmix_minmax,
        prob=args.mixup_prob,
        switch_prob=args.mixup_switch_prob,
        mode=args.mixup_mode,
        label_smoothing=args.smoothing,
        num_classes=num_classes,
    )
