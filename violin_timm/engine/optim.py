"""Learning rate, optimizer, schedule, and the step that joins them, from timm's flags and timm's factories."""

from __future__ import annotations

from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.scheduler.plateau_lr import PlateauLRScheduler
from timm.task import TrainingTask
from timm.utils import NativeScaler, dispatch_clip_grad
from torch import nn

from .config import ConfigError, nearest
from .distributed import World


def learning_rate(args: Namespace, world: World) -> float:
    """`lr`, or `lr_base` scaled to the images per update over all processes.

    The scale is linear, or the square root for optimizers of the ada and lamb families; `lr_base_scale` overrules that.
    """
    if args.lr:
        return args.lr
    ratio = args.batch_size * args.grad_accum_steps * world.size / args.lr_base_size
    rooted = any(family in args.opt.lower() for family in ('ada', 'lamb'))
    scale = args.lr_base_scale or ('sqrt' if rooted else 'linear')
    return args.lr_base * (ratio**0.5 if scale == 'sqrt' else ratio)


def create_optimizer(args: Namespace, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """timm's optimizer on the bare model, which names the parameters without weight decay (`no_weight_decay`).

    Raises:
        ConfigError: Unknown optimizer, or settings it does not take.
    """
    try:
        get_optimizer_info(args.opt.split('_')[-1])
    except ValueError as err:
        raise ConfigError(f'opt: got {args.opt!r}{nearest(args.opt, list_optimizers())}') from err
    try:
        return create_optimizer_v2(model, **{**optimizer_kwargs(args), 'lr': lr, **args.opt_kwargs})
    except TypeError as err:
        raise ConfigError(f'opt_kwargs: {args.opt} does not take {args.opt_kwargs}: {err}') from err
    except ValueError as err:
        raise ConfigError(f'opt: {args.opt}: {err}') from err


class Schedule:
    """timm's scheduler, stepped as timm steps it: after each epoch, and after each update where so configured."""

    def __init__(self, args: Namespace, optimizer: torch.optim.Optimizer, updates_per_epoch: int) -> None:
        """
        Args:
            args: Settings of the run.
            optimizer: Its learning rates are the ones set.
            updates_per_epoch: Optimizer updates in one epoch.
        """
        self.updates_per_epoch = updates_per_epoch
        decreasing = not args.val_split or args.eval_metric == 'loss'
        try:
            self.scheduler, self.epochs = create_scheduler_v2(
                optimizer, **scheduler_kwargs(args, decreasing_metric=decreasing), updates_per_epoch=updates_per_epoch
            )
        except (ValueError, AssertionError) as err:
            raise ConfigError(f'sched: {err}') from err
        if args.stop_epoch and args.stop_epoch > self.epochs:
            raise ConfigError(f'stop_epoch: got {args.stop_epoch}; the schedule has {self.epochs} epochs')
        self.last = args.stop_epoch or self.epochs

    def after_update(self, updates: int) -> None:
        """Set the rates for the next update, `updates` being done since the start of the run."""
        if self.scheduler is not None:
            self.scheduler.step_update(updates)

    def after_epoch(self, epochs: int, metric: float | None) -> None:
        """Set the rates for the next epoch, `epochs` being done; plateau looks at `metric`."""
        if self.scheduler is not None:
            self.scheduler.step(epochs, metric)

    def state_dict(self) -> dict[str, Any]:
        """Plain values. Only plateau has a memory; the others are functions of the epoch."""
        if isinstance(self.scheduler, PlateauLRScheduler):
            inner = self.scheduler.lr_scheduler.state_dict()
            return {'plateau': inner, 'restore_lr': self.scheduler.restore_lr}
        return {}

    def resume(self, epochs: int, state: dict[str, Any] | None, metric: float | None) -> None:
        """Set the rates as after `epochs` epochs. A schedule made longer or shorter since then takes effect."""
        if state and isinstance(self.scheduler, PlateauLRScheduler):
            self.scheduler.lr_scheduler.load_state_dict(state['plateau'])
            self.scheduler.restore_lr = state['restore_lr']
        self.after_epoch(epochs, metric)
        self.after_update(epochs * self.updates_per_epoch)


class Stepper:
    """Mixed precision, gradient accumulation, clipping and the optimizer's step."""

    def __init__(self, args: Namespace, world: World, task: TrainingTask, optimizer: torch.optim.Optimizer) -> None:
        self.task, self.optimizer = task, optimizer
        self.clip, self.clip_mode = args.clip_grad, args.clip_mode
        self.device, self.dtype = world.device.type, getattr(torch, args.amp_dtype) if args.amp else None
        # bfloat16 has float32's range, and timm's scaler is for CUDA: only float16 on CUDA needs and gets one.
        scaled = self.dtype is torch.float16 and self.device == 'cuda'
        self.scaler = NativeScaler(device=self.device) if scaled else None
        self.second_order = getattr(optimizer, 'is_second_order', False)

    def autocast(self) -> AbstractContextManager:
        """Context in which the model runs."""
        return torch.autocast(self.device, self.dtype) if self.dtype else nullcontext()

    def mean_rate(self) -> float:
        """Learning rate, averaged over the parameter groups as timm's summaries have it."""
        rates = [group['lr'] for group in self.optimizer.param_groups]
        return sum(rates) / len(rates)

    def end_epoch(self) -> None:
        """Let lookahead optimizers, which keep two sets of weights, bring them together."""
        if hasattr(self.optimizer, 'sync_lookahead'):
            self.optimizer.sync_lookahead()

    def synchronised(self, update: bool) -> AbstractContextManager:
        """Context of a batch; DDP exchanges gradients only in that which completes the update."""
        return nullcontext() if update else self.task.no_sync()

    def backward(self, loss: torch.Tensor, update: bool) -> None:
        """Add the gradients of `loss`, a scalar already divided by the batches of its update; then maybe step.

        Args:
            loss: Share of this batch in the loss of the update.
            update: Whether this batch completes the update.
        """
        if self.scaler is not None:
            self.scaler(
                loss,
                self.optimizer,
                clip_grad=self.clip,
                clip_mode=self.clip_mode,
                need_update=update,
                parameters=self._clipped(),
                create_graph=self.second_order,
            )
        else:
            loss.backward(create_graph=self.second_order)
            if update:
                if self.clip is not None:
                    dispatch_clip_grad(self._clipped(), self.clip, mode=self.clip_mode)
                self.optimizer.step()
        if update:
            self.optimizer.zero_grad()

    def _clipped(self) -> list[nn.Parameter]:
        # Adaptive clipping leaves the classifier alone, as its paper does.
        return list(self.task.get_clip_parameters(exclude_head=self.clip_mode == 'agc'))


def accumulation(batch: int, batches: int, steps: int) -> tuple[int, bool]:
    """How many batches share the update of batch `batch`, and whether that batch completes it.

    The last update of an epoch has what is left: 5 batches in steps of 2 make updates of 2, 2 and 1.
    """
    first = batch - batch % steps
    size = min(steps, batches - first)
    return size, batch == first + size - 1
