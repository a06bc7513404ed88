"""From the flags to a model, the data config it wants and its task, through timm's factories."""

from __future__ import annotations

import importlib
import os
from argparse import Namespace
from typing import Any

import torch
from timm.data import resolve_data_config
from timm.layers import set_fast_norm
from timm.loss import create_classification_loss
from timm.models import (
    create_model,
    is_model,
    list_models,
    parse_model_name,
    resolve_model_input_args,
    split_model_name_tag,
)
from timm.task import ClassificationTask, TrainingTask
from torch import nn

from . import distillation
from .config import ConfigError, nearest
from .distributed import World
from .logging import check_tracker, log


def check(args: Namespace) -> None:
    """Refuse combinations that would otherwise end a run late, or be ignored.

    Raises:
        ConfigError: One of them.
    """
    if args.best_by == 'ema' and (not args.model_ema or args.model_ema_force_cpu):
        raise ConfigError("best_by: got 'ema'; that needs model_ema, and not model_ema_force_cpu")
    if not args.val_split and args.eval_metric != 'loss':
        log.warning('val_split is empty: the best checkpoint is that of the least training loss')
    if args.wandb_resume_id and not args.resume:
        raise ConfigError('wandb_resume_id: needs resume')
    check_tracker(args)
    if int(os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)) and not args.resume:
        log.warning('torchrun restarted this run, which begins anew; with --resume auto it would have gone on')
    if args.bce_loss is False and (args.bce_sum or args.bce_target_thresh is not None or args.bce_pos_weight):
        raise ConfigError('bce_sum, bce_target_thresh and bce_pos_weight need bce_loss')
    distillation.check(args)


def import_modules(args: Namespace) -> None:
    """Import `--device-modules`, which may register models.

    Raises:
        ConfigError: One is missing.
    """
    for name in args.device_modules or []:
        try:
            importlib.import_module(name)
        except ImportError as err:
            raise ConfigError(f'device_modules: cannot import {name!r}: {err}') from err


def build_model(args: Namespace) -> nn.Module:
    """timm's `create_model` from the flags, on the CPU.

    Raises:
        ConfigError: Unknown model, or settings that it refuses.
    """
    source, name = parse_model_name(args.model)
    name = split_model_name_tag(name)[0]
    if source is None and not is_model(name):
        raise ConfigError(f'model: got {args.model!r}{nearest(name, list_models(), "; see timm.list_models()")}')
    named = {
        'drop_rate': args.drop or None,
        'drop_path_rate': args.drop_path,
        'global_pool': args.gp,
        'num_classes': args.num_classes,
    }
    if args.pretrained_path:
        # num_classes -1 makes timm adapt the head, whatever the file's
        named['pretrained_cfg_overlay'] = {'file': args.pretrained_path, 'num_classes': -1}
    named = {key: value for key, value in named.items() if value is not None}
    twice = sorted(set(named) & set(args.model_kwargs))
    if twice:
        raise ConfigError(f'model_kwargs: {", ".join(twice)} has a flag of its own, which is given too; keep one')
    if args.fast_norm:
        set_fast_norm()
    try:
        resolved = resolve_model_input_args(args.model, vars(args), **named, **args.model_kwargs)
        model = create_model(pretrained=args.pretrained, checkpoint_path=args.initial_checkpoint, **resolved)
    except (TypeError, ValueError) as err:
        raise ConfigError(f'model: {args.model} with model_kwargs {args.model_kwargs}: {err}') from err
    _init_head(args, model)
    if args.grad_checkpointing:
        model.set_grad_checkpointing(enable=True)
    return model


def _init_head(args: Namespace, model: nn.Module) -> None:
    head = model.get_classifier()
    with torch.no_grad():
        if args.head_init_scale is not None:
            head.weight.mul_(args.head_init_scale)
            head.bias.mul_(args.head_init_scale)
        if args.head_init_bias is not None:
            head.bias.fill_(args.head_init_bias)


def data_config(args: Namespace, model: nn.Module) -> dict:
    """timm's data config of the flags and the model: input_size, mean, std, interpolation, crop_pct, crop_mode."""
    config = resolve_data_config(vars(args), model=model)
    if args.in_chans and not args.input_size:  # which timm forgets where no size is given
        config['input_size'] = (args.in_chans, *config['input_size'][1:])
    channels = config['input_size'][0]
    for key in ('mean', 'std'):
        if len(config[key]) != channels:  # a model made for colour, given grey images
            config[key] = (sum(config[key]) / len(config[key]),) * channels
    return config


def create_task(args: Namespace, world: World, model: nn.Module, mixed: bool, config: dict[str, Any]) -> TrainingTask:
    """timm's task around a model on its device: its loss, and its teacher where one is asked for.

    Args:
        args: Settings of the run.
        world: This process.
        model: What is trained.
        mixed: Whether targets are the distributions that mixing makes, smoothed already, instead of class indices.
        config: From `data_config`.
    """
    kind = {'loss_type': 'ce'}
    if args.bce_loss:
        kind = {
            'loss_type': 'bce',
            'bce_sum': args.bce_sum,
            'bce_target_thresh': args.bce_target_thresh,
            'pos_weight': args.bce_pos_weight,
        }
    loss = create_classification_loss(smoothing=args.smoothing, soft_targets=mixed, **kind)
    if args.kd_model_name:
        return distillation.create_distillation(args, world, model, loss, config)
    return ClassificationTask(model, loss, device=world.device, verbose=False)


def ready_task(args: Namespace, world: World, task: TrainingTask) -> None:
    """Moving average, compilation and DDP, in place; after the optimizer, which may freeze parameters."""
    if args.model_ema:
        place = torch.device('cpu') if args.model_ema_force_cpu else None
        task.setup_ema(decay=args.model_ema_decay, use_warmup=args.model_ema_warmup, device=place)
    if args.torchcompile:
        task.compile(backend=args.torchcompile, mode=args.torchcompile_mode)
        task.compile_ema(backend=args.torchcompile, mode=args.torchcompile_mode)
    if world.distributed:
        devices = None if world.device.type == 'cpu' else [world.device]
        task.prepare_distributed(device_ids=devices, broadcast_buffers=not args.no_ddp_bb)
