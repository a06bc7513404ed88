"""From the flags of `violin dino` to network, crops, optimizer and schedules."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from timm.optim import param_groups_weight_decay
from torch import nn

from ..data.datasets import create_dataset
from ..data.multicrop import Colour, Crop, CropBatches, MultiCrop, check_sizes
from ..engine import build
from ..engine.config import ConfigError, completed
from ..engine.distributed import World
from ..engine.logging import log
from ..engine.optim import create_optimizer, learning_rate
from ..engine.stopping import leave_to_parent
from .dino_loss import cosine_schedule, temperature_schedule
from .dino_parts import CropNetwork, DinoHead


def check(args: Namespace) -> None:
    """Refuse combinations that cannot be, and say what will be cut short.

    Raises:
        ConfigError: One of them.
    """
    epochs = args.epochs
    if args.warmup_epochs > epochs:
        raise ConfigError(f'warmup_epochs: got {args.warmup_epochs}; the run has {epochs} epochs')
    if (args.stop_epoch or 0) > epochs:
        raise ConfigError(f'stop_epoch: got {args.stop_epoch}; the run has {epochs} epochs')
    if len(args.local_size) != len(args.local_number):
        raise ConfigError(f'local_number: got {args.local_number}; expected one for each local_size {args.local_size}')
    if args.global_number + sum(args.local_number) < 2:
        raise ConfigError('global_number, local_number: got one view; at least 2 make a pair')
    if args.val_split and args.val_split == args.train_split:
        raise ConfigError(f'val_split: got {args.val_split!r}, which is train_split; expected a held-out one')
    if args.wandb_resume_id and not args.resume:
        raise ConfigError('wandb_resume_id: needs resume')
    _check_ranges(args)
    if args.warmup_teacher_temp_epochs > epochs:
        log.warning(
            'warmup_teacher_temp_epochs: %d is cut off by the end of the run after %d, short of teacher_temp',
            args.warmup_teacher_temp_epochs, epochs,
        )  # fmt: skip
    if args.freeze_last_layer >= epochs:
        log.warning('freeze_last_layer: %d of %d epochs; the last layer never learns', args.freeze_last_layer, epochs)


def _check_ranges(args: Namespace) -> None:
    for name in ('global_scale', 'local_scale'):
        low, high = getattr(args, name)
        if not 0 < low <= high <= 1:
            raise ConfigError(f'{name}: got {[low, high]}; expected 0 < low <= high <= 1')
    for name in ('hflip', 'color_jitter_prob', 'grayscale_prob', 'blur_prob', 'solarize_prob', 'momentum_teacher',
                 'center_momentum'):  # fmt: skip
        value = getattr(args, name)
        values = value if isinstance(value, list) else [value or 0.0]
        if not all(0 <= one <= 1 for one in values):
            raise ConfigError(f'{name}: got {value}; expected 0 to 1')


def build_network(args: Namespace) -> tuple[CropNetwork, dict[str, Any]]:
    """The student, on the CPU, and timm's data config of its backbone."""
    backbone = build.build_model(completed(args, num_classes=0))
    head = DinoHead(
        backbone.num_features,
        args.out_dim,
        args.head_hidden_dim,
        args.head_bottleneck_dim,
        args.head_layers,
        args.norm_last_layer,
    )
    network = CropNetwork(backbone, head)
    if args.channels_last:
        network.to(memory_format=torch.channels_last)
    return network, build.data_config(completed(args), backbone)


def crop_batches(args: Namespace, config: dict, backbone: nn.Module, world: World) -> CropBatches:
    """Batches of the views that the flags describe.

    Args:
        args: Settings of the run.
        config: timm's data config.
        backbone: Is to take the views.
        world: This process.

    Raises:
        ConfigError: Crops that the backbone does not take, or a data set that cannot be or is too small.
    """
    crops = describe_crops(args, config['input_size'][-2:])
    embed = getattr(backbone, 'patch_embed', None)
    if hasattr(embed, 'patch_size') and getattr(embed, 'img_size', None):
        check_sizes(crops, embed.patch_size, not embed.strict_img_size, embed.img_size)
    colour = Colour(
        hflip=args.hflip,
        jitter=tuple(args.jitter),
        jitter_prob=0.8 if args.color_jitter_prob is None else args.color_jitter_prob,
        grayscale_prob=0.2 if args.grayscale_prob is None else args.grayscale_prob,
        blur_radius=tuple(args.blur_radius),
        interpolation=args.train_interpolation,
    )
    dataset = create_dataset(completed(args), args.train_split, config['input_size'][0])
    views = MultiCrop(dataset, crops, colour, args.seed)
    batches = CropBatches(views, args.batch_size, config['mean'], config['std'], world, args.workers, args.pin_mem)
    batches.loader.worker_init_fn = leave_to_parent
    return batches


def describe_crops(args: Namespace, image_size: tuple[int, int]) -> list[Crop]:
    """The views, those of the teacher first.

    Args:
        args: Settings of the run.
        image_size: The model's height and width in pixels, of the teacher's views unless `global_size` says otherwise.
    """
    size = (args.global_size,) * 2 if args.global_size else tuple(image_size)
    first, later, local = args.blur_prob
    crops = [
        Crop(size, tuple(args.global_scale), later if view else first, args.solarize_prob if view == 1 else 0.0)
        for view in range(args.global_number)
    ]
    for side, number in zip(args.local_size, args.local_number):
        crops += [Crop((side, side), tuple(args.local_scale), local)] * number
    return crops


def build_optimizer(args: Namespace, network: CropNetwork) -> torch.optim.Optimizer:
    """timm's optimizer. The groups that weight decay is for say so under `decayed`, whatever its value is just then."""
    groups = param_groups_weight_decay(network, 1.0, no_weight_decay_list=network.no_weight_decay())
    for group in groups:
        group['decayed'] = group['weight_decay'] > 0
        group['weight_decay'] = args.weight_decay if group['decayed'] else 0.0
    return create_optimizer(completed(args, weight_decay=0.0), groups, lr=0.0)


class Schedules:
    """Learning rate, weight decay and the teacher's momentum of every update, its temperature of every epoch.

    Functions of the update alone, so that nothing is to be saved: a run made longer since a checkpoint goes on along
    the longer schedules.
    """

    def __init__(self, args: Namespace, world: World, optimizer: torch.optim.Optimizer, updates_per_epoch: int) -> None:
        """
        Args:
            args: Settings of the run.
            world: Its processes share a batch.
            optimizer: Its groups are set.
            updates_per_epoch: Optimizer updates in one epoch.
        """
        self.optimizer = optimizer
        self.peak = learning_rate(completed(args), world)
        length = (args.epochs, updates_per_epoch)
        self.lr = cosine_schedule(self.peak, args.min_lr, *length, args.warmup_epochs, args.warmup_lr)
        self.weight_decay = cosine_schedule(args.weight_decay, args.weight_decay_end, *length)
        self.momentum = cosine_schedule(args.momentum_teacher, 1.0, *length)
        self.teacher_temp = temperature_schedule(
            args.warmup_teacher_temp, args.teacher_temp, args.warmup_teacher_temp_epochs, args.epochs
        )

    def apply(self, update: int) -> None:
        """Set the optimizer for the update of this number, from 0."""
        for group in self.optimizer.param_groups:
            group['lr'] = float(self.lr[update])
            if group['decayed']:
                group['weight_decay'] = float(self.weight_decay[update])

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def resume(self, epochs: int, state: dict[str, Any] | None, metric: float | None) -> None:
        """Nothing: `apply` sets everything."""
