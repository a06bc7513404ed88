"""One fine-tuning run: a pretrained backbone, a fresh mask and classifier, a thousand images.

The protocol of VTAB-1K as BenediktAlkin/vtab1k-pytorch runs it: AdamW with layer decay, a linear rise and a cosine to 0
over the updates, no augmentation, no clipping, no averaging; the last step's model is measured, in float32. Images are
resized to exactly the model's size, so that each is the same in every epoch and is prepared once.

`violin vtab` and `violin finetune` make many such runs (`recipes/protocol.py`).
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
import torch
import torch.nn.functional as F
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

from ..data.tensors import Streamed, Tensors, normalise, order
from ..engine import build
from ..engine.config import ConfigError, completed
from ..engine.distributed import World
from ..engine.layer_decay import parameter_groups
from ..engine.optim import Stepper
from ..evals.movement import movement, snapshot
from ..peft import count_parameters
from .finetune_build import arm_settings, build_model, data_config

__all__ = ['UNREADABLE', 'Job', 'finetune', 'rates']

UNREADABLE = -1  # label of an image that is to be left out

# Split `(train, evaluated)` of a run at a size in pixels and an interpolation.
Open = Callable[[tuple[int, int], str], tuple[Tensors, 'Tensors | Streamed']]


@dataclass(frozen=True)
class Job:
    """What makes a run of a protocol.

    Attributes:
        task: Name of the task.
        arm: Name of the arm.
        stage: `tune` or `final`.
        lr: Learning rate.
        seed: Of masks, classifier, adapters and order.
    """

    task: str
    arm: str
    stage: str
    lr: float
    seed: int


def finetune(
    args: Namespace, job: Job, classes: int, open_splits: Open, device: torch.device
) -> tuple[dict[str, Any], np.ndarray, nn.Module]:
    """Train a model and measure it.

    Args:
        args: Settings of the protocol.
        job: Which run.
        classes: Classes of the task.
        open_splits: Gives the images to learn from, and those to measure on.
        device: Where.

    Returns:
        Contents of `result.json`; the predicted class of each measured image, `[N]`; the model.

    Raises:
        ConfigError: Settings that cannot be.
    """
    settings, mask_lr_scale = arm_settings(args, job.arm)
    start, world = time.perf_counter(), World(device)
    model = build_model(args, settings, classes, job.seed)
    before, flags = snapshot(model), completed(args, drop=0.0, smoothing=0.0, clip_grad=None)
    config = data_config(args, model)
    train, measured = open_splits(config['input_size'][-2:], config['interpolation'])
    train = _readable(train, classes)
    if isinstance(measured, Tensors):  # before training; what is streamed is looked at when it is measured
        measured = _readable(measured, classes)
    model.to(device)
    task = build.create_task(flags, world, model, mixed=False, config=config)
    optimizer = create_optimizer_v2(
        parameter_groups(model, args.weight_decay, args.layer_decay, mask_lr_scale),
        opt=args.opt,
        lr=job.lr,
        weight_decay=args.weight_decay,
        **{key: value for key, value in (('eps', args.opt_eps), ('betas', args.opt_betas)) if value is not None},
    )
    stepper = Stepper(flags, world, task, optimizer)
    loss, updates = _train(args, job, task, stepper, optimizer, train, config, device)
    metrics, predictions = _measure(model, measured, config, args.validation_batch_size or args.batch_size, device)
    diverged = not math.isfinite(loss) or not math.isfinite(metrics['loss'])
    if diverged:
        metrics = {'top1': 0.0, 'loss': None}
    result = {
        **vars(job),
        **metrics,
        'train_loss': loss if math.isfinite(loss) else None,
        'diverged': diverged,
        'updates': updates,
        'images': {'train': len(train), 'evaluated': len(predictions)},
        'parameters': count_parameters(model),
        'movement': movement(model, before),
        'seconds': round(time.perf_counter() - start, 2),
    }
    return result, predictions, model


def _train(
    args: Namespace,
    job: Job,
    task: Any,
    stepper: Stepper,
    optimizer: torch.optim.Optimizer,
    train: Tensors,
    config: dict[str, Any],
    device: torch.device,
) -> tuple[float, int]:
    """All epochs, or until the loss is no number.

    Returns:
        The mean loss of the last epoch, and the number of updates.
    """
    updates = args.epochs * (len(train) // args.batch_size)
    if not updates:
        raise ConfigError(f'batch_size: got {args.batch_size}, more than the {len(train)} images of {job.task!r}')
    schedule, update = rates(optimizer, updates, args.warmup_part), 0
    for epoch in range(args.epochs):
        task.get_trainable_module().train()
        losses = []
        for indices in order(len(train), args.batch_size, job.seed, epoch):
            schedule.step_update(update + 1)  # the first update has a rate, the last has none
            images = normalise(train.images[indices], config['mean'], config['std'], device)
            with stepper.autocast():
                loss = task(images, train.labels[indices].to(device))['loss']
            losses.append(loss.detach())
            stepper.backward(loss, update=True)
            update += 1
        mean = torch.stack(losses).mean().item()
        if not math.isfinite(mean):
            break
    return mean, update


def _readable(split: Tensors, classes: int) -> Tensors:
    """Without the images that could not be read.

    Raises:
        ConfigError: A label is none of the classes.
    """
    if len(split) and int(split.labels.max()) >= classes:
        raise ConfigError(f'dataset: got the label {int(split.labels.max())}; the training split has {classes} classes')
    keep = split.labels != UNREADABLE
    return split if keep.all() else Tensors(split.images[keep], split.labels[keep])


def rates(optimizer: torch.optim.Optimizer, updates: int, warmup_part: float) -> CosineLRScheduler:
    """timm's schedule: `step_update(u)` sets the rate of update `u`, counted from 1.

    It rises by equal steps to the full rate at the last update of the warmup, and falls along a cosine to 0, which it
    has at the last update but one, as in vtab1k-pytorch; a parameter group's `lr_scale` multiplies it.
    """
    warmup = min(int(updates * warmup_part), updates - 1)
    return CosineLRScheduler(
        optimizer,
        t_initial=max(updates - warmup - 1, 1),
        warmup_t=warmup,
        warmup_lr_init=0.0,
        warmup_prefix=True,
        t_in_epochs=False,
    )


@torch.inference_mode()
def _measure(
    model: nn.Module, split: Tensors | Streamed, config: dict[str, Any], batch_size: int, device: torch.device
) -> tuple[dict[str, float], np.ndarray]:
    """Top-1 in per cent and mean cross entropy, and the predicted classes `[N]`."""
    model.eval()
    predictions, correct, loss = [], 0, 0.0
    for batch in split.batches(batch_size):
        read = _readable(Tensors(*batch), model.num_classes)
        if not len(read):
            continue
        logits = model(normalise(read.images, config['mean'], config['std'], device)).float()
        labels = read.labels.to(device)
        loss += F.cross_entropy(logits, labels, reduction='sum').item()
        predicted = logits.argmax(1)
        correct += int((predicted == labels).sum())
        predictions.append(predicted.cpu())
    found = torch.cat(predictions).numpy().astype(np.int16)
    return {'top1': 100 * correct / len(found), 'loss': loss / len(found)}, found
