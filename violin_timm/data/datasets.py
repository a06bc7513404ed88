"""From the data flags to data sets, and from those to batches, through timm's loaders."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any, Callable, Iterable, Iterator

import torch
from PIL import Image
from timm import data as timm_data
from timm.data import auto_augment

from ..engine.config import ConfigError
from ..engine.distributed import World
from ..engine.logging import log
from .digits import Digits
from .fashion import Fashion

# Sets of our own by name: a function of (split, split_seed, PIL mode). Everything else is timm's.
EMBEDDED: dict[str, Callable[..., Any]] = {'digits': Digits, 'fashion': Fashion}


def create_dataset(args: Namespace, split: str, channels: int, training: bool = False) -> Any:
    """The data set of `--dataset`, without a transform.

    Args:
        args: Settings of the run.
        split: Name of the split.
        channels: Image channels of the model; one makes grey images, unless `input_img_mode` says otherwise.
        training: Whether it is the training split.

    Raises:
        ConfigError: The data set, its folder or its split is not there.
    """
    mode = args.input_img_mode or ('RGB' if channels == 3 else 'L')
    if args.dataset in EMBEDDED:
        try:
            return EMBEDDED[args.dataset](split, split_seed=args.split_seed, input_img_mode=mode)
        except (ValueError, ImportError) as err:
            raise ConfigError(str(err)) from err
    if '/' not in args.dataset:
        _check_folder(args)
    extra = {'seed': args.seed, 'repeats': args.epoch_repeats} if training else {}
    return timm_data.create_dataset(
        args.dataset,
        root=args.data_dir,
        split=split,
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


def _check_folder(args: Namespace) -> None:
    if args.dataset not in ('', 'folder', 'image_folder'):
        raise ConfigError(
            f"dataset: got {args.dataset!r}; choose from {', '.join(EMBEDDED)}, timm's "
            '<type>/<name> (torch/, hfds/, hfids/, tfds/, wds/), or nothing for a folder of images'
        )
    if not args.data_dir or not os.path.exists(args.data_dir):
        raise ConfigError(f'data_dir: got {args.data_dir!r}; expected the folder of the data set')


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
        self.mixup, self.mixup_off_epoch, self.channels_last = mixup, mixup_off_epoch, channels_last
        sampler = getattr(loader, 'sampler', None)
        if hasattr(sampler, 'set_epoch') and hasattr(sampler, 'seed'):
            sampler.seed = seed  # timm leaves torch's 0: runs of different seeds would see one order

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the epoch, in samplers and data sets that need to be told, and switch mixing."""
        for part in (self.loader.dataset, self.loader.sampler):
            if hasattr(part, 'set_epoch'):
                part.set_epoch(epoch)
        if self.mixup is not None:
            self.mixup.mixup_enabled = not self.mixup_off_epoch or epoch < self.mixup_off_epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, targets in self.loader:
            if not self.prefetched:
                images, targets = images.to(self.device), targets.to(self.device)
                if self.mixup is not None:
                    images, targets = self.mixup(images, targets)
            if self.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            yield images, targets


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


def _repeats(args: Namespace, world: World) -> float:
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
