"""Frozen features of a data set: the backbone of a checkpoint, its features, and those of raw pixels beside them."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any, Callable

import torch
import torch.distributed as dist
from timm.models import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn
from timm.utils import random_seed
from torch import nn

from ..data.datasets import Batches, create_dataset, evaluation_batches
from ..engine import build
from ..engine.config import ConfigError, completed
from ..engine.distributed import World
from ..models import files
from ..models.load import unwrap

# what the evaluation of a checkpoint takes over from its training, where the command line says nothing
INHERITED = ('dataset', 'data_dir', 'input_img_mode', 'class_map', 'in_chans', 'img_size', 'mean', 'std', 'crop_pct')
CROP_PCT = 0.875  # resize to 256, crop to 224


def inherit(args: Namespace) -> dict[str, Any]:
    """Read `args.checkpoint`, and fill in what the command line left open: `args.model`, its arguments, `INHERITED`.

    Returns:
        The checkpoint, without the weights that `args.weights` does not mean; empty if that is `untrained`, or none is
        named.

    Raises:
        ConfigError: It cannot be read, or no model is named.
    """
    checkpoint: dict[str, Any] = {}
    if args.checkpoint:
        try:
            checkpoint = files.read_checkpoint(args.checkpoint)
        except ValueError as err:
            raise ConfigError(str(err)) from err
        others = ('state_dict_ema', 'teacher') if args.weights == 'student' else ('student',)
        checkpoint = {key: value for key, value in checkpoint.items() if key not in others}
        _take_over(args, checkpoint)
        if args.weights == 'untrained':
            checkpoint = {}
    if not args.model:
        raise ConfigError('model: the checkpoint names none; give --model' if checkpoint else 'model: none is given')
    if args.crop_pct is None:
        args.crop_pct = CROP_PCT
    return checkpoint


def _take_over(args: Namespace, checkpoint: dict[str, Any]) -> None:
    name, kwargs = files.saved_model(checkpoint)
    args.model = args.model or name
    recorded = checkpoint.get('args') or {}
    recorded = recorded if isinstance(recorded, dict) else vars(recorded)
    if name != args.model:
        return
    own = ('in_chans', 'img_size')  # flags, for models that do not take them as arguments
    args.model_kwargs = {**{k: v for k, v in kwargs.items() if k not in own}, **args.model_kwargs}
    for key in INHERITED:
        if getattr(args, key) in (None, ''):
            setattr(args, key, recorded.get(key))
    if args.weights == 'untrained':
        args.seed = recorded.get('seed', args.seed)  # the weights that its training began with


def load_backbone(args: Namespace, checkpoint: dict[str, Any], world: World) -> nn.Module:
    """The model without its classifier, in evaluation mode on its device, with every weight of the checkpoint.

    Args:
        args: After `inherit`.
        checkpoint: From `inherit`; empty leaves the model as `--pretrained` has it, or untrained.
        world: This process.

    Raises:
        ConfigError: Checkpoint and model do not fit.
    """
    build.import_modules(args)
    random_seed(args.seed, 0)
    if checkpoint and 'violin' in args.model:
        sizes = {key: getattr(args, key) for key in ('in_chans', 'img_size') if getattr(args, key)}
        try:
            model, _ = files.build_and_load(checkpoint, args.model, **{**args.model_kwargs, **sizes, 'num_classes': 0})
        except (ValueError, RuntimeError) as err:
            raise ConfigError(str(err)) from err
    else:
        model = build.build_model(completed(args, num_classes=0))
        if checkpoint:
            _load_plain(model, checkpoint)
    return model.to(world.device).eval().requires_grad_(False)


def _load_plain(model: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Strictly, but for the classifier."""
    state = unwrap(checkpoint)
    if isinstance(model, VisionTransformer):
        state = checkpoint_filter_fn(state, model)
    heads = model.pretrained_cfg.get('classifier') or ()
    heads = (heads,) if isinstance(heads, str) else tuple(heads)
    state = {key: value for key, value in state.items() if not key.startswith(tuple(f'{head}.' for head in heads))}
    try:
        model.load_state_dict(state)
    except RuntimeError as err:
        lines = [line.strip() for line in str(err).splitlines()]
        raise ConfigError(f'checkpoint: {"; ".join(lines[:4])}') from err


def split_batches(args: Namespace, split: str, data_config: dict, world: World) -> Batches:
    """A split in order, resized and centre-cropped.

    Args:
        args: Settings; of another table than `violin train`'s, too.
        split: Its name.
        data_config: From `build.data_config`.
        world: This process.
    """
    full = completed(args)
    return evaluation_batches(full, create_dataset(full, split, data_config['input_size'][0]), data_config, world)


class Features(nn.Module):
    """Images `[B, C, H, W]` -> features `[B, D]` of a frozen backbone.

    The class tokens of the last blocks, each after the final norm; of a backbone without one, their mean patches. Of a
    backbone that is no ViT, its own pooled output.
    """

    def __init__(self, backbone: nn.Module, blocks: int = 1, patch_mean: bool = False) -> None:
        """
        Args:
            backbone: Without classifier.
            blocks: How many of the last blocks.
            patch_mean: Append the mean patch token of the last block.

        Raises:
            ConfigError: The backbone has fewer blocks, or no blocks where more than its output is asked for.
        """
        super().__init__()
        depth = len(getattr(backbone, 'blocks', ()))
        if (blocks > 1 or patch_mean) and not 1 <= blocks <= depth:
            raise ConfigError(f'blocks: got {blocks}; {type(backbone).__name__} has {depth}')
        self.backbone, self.blocks, self.patch_mean = backbone, blocks, patch_mean

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.blocks == 1 and not self.patch_mean:
            return self.backbone(images)
        taken = self.backbone.forward_intermediates(
            images, indices=self.blocks, norm=True, output_fmt='NLC', return_prefix_tokens=True, intermediates_only=True
        )
        taken = [item if isinstance(item, tuple) else (item, None) for item in taken]
        with_token = getattr(self.backbone, 'has_class_token', False)
        parts = [prefix[:, 0] if with_token else patches.mean(1) for patches, prefix in taken]
        if self.patch_mean and with_token:
            parts.append(taken[-1][0].mean(1))
        return torch.cat(parts, dim=-1)


class Pixels(nn.Module):
    """Images `[B, C, H, W]`, normalised -> their pixels in 0..1, `[B, C * H * W]`: what any features must beat."""

    def __init__(self, data_config: dict) -> None:
        super().__init__()
        for key in ('mean', 'std'):
            self.register_buffer(key, torch.tensor(data_config[key]).view(-1, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images * self.std.to(images) + self.mean.to(images)).flatten(1)


@torch.no_grad()
def extract(
    features: Callable, batches: Batches, world: World, autocast: Callable | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of a whole split, in its order, on every process.

    Args:
        features: Images to `[B, D]`.
        batches: The split.
        world: This process.
        autocast: Makes the context in which the features are computed.

    Returns:
        `[N, D]` float32 and labels `[N]`, on the CPU.
    """
    found, labels = [], []
    for images, targets in batches:
        if autocast is None:
            output = features(images)
        else:
            with autocast():
                output = features(images)
        found.append(output.float().cpu())
        labels.append(targets.cpu())
    count = len(batches.loader.dataset)
    return tuple(_in_order(torch.cat(part), count, world) for part in (found, labels))


def _in_order(part: torch.Tensor, count: int, world: World) -> torch.Tensor:
    """Rows of all processes `[count, ...]`; process r of R has rows r, r + R, ... and perhaps repeats to fill up."""
    if not world.distributed:
        return part[:count]
    size = math.ceil(count / world.size)
    mine = part.new_zeros(size, *part.shape[1:])
    mine[: len(part)] = part[:size]
    mine = mine.to(world.device)
    parts = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(parts, mine)
    return torch.stack(parts, dim=1).flatten(0, 1)[:count].cpu()
