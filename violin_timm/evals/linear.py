"""`violin linear`: how good frozen features are, by a linear classifier on them.

    violin linear --checkpoint output/dino/RUN/last.pth.tar --data-dir IMAGENET
    violin linear --checkpoint output/dino/RUN/last.pth.tar --closed --val-split test

The first is DINO's protocol: SGD without weight decay on random crops, the class tokens of the last four blocks. The
second computes features once, without augmentation, and fits a logistic regression to them.
"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..data.datasets import Batches, create_dataset, training_batches
from ..engine import build, distributed
from ..engine.config import ConfigError, completed
from ..engine.distributed import World
from ..engine.logging import Progress, log
from ..engine.optim import learning_rate
from .features import Features, extract, inherit, load_backbone, split_batches
from .logistic import logistic_accuracy
from .report import record, show, title

Accuracy = tuple[float, float]  # top-1 and top-5, in per cent


def run(args: Namespace) -> Accuracy:
    """`violin linear`: top-1 and top-5 accuracy, in per cent, on `val_split`.

    Args:
        args: From `engine.config.parse` or `settings`, with `tables.LINEAR`.

    Raises:
        ConfigError: A setting that cannot be.
    """
    checkpoint = inherit(args)
    world = distributed.start(args.device)
    try:
        features = Features(load_backbone(args, checkpoint, world), args.blocks, args.patch_mean).eval()
        config = build.data_config(completed(args), features.backbone)
        found = (closed if args.closed else train)(args, features, config, world)
        if world.primary:
            tokens = f'{args.blocks} block(s)' + (' + patches' if args.patch_mean else '')
            name = f'logistic, {tokens}' if args.closed else f'linear, {tokens}'
            where = f'{args.train_split} -> {args.val_split}'
            record(args.results, name, title(args), where, *found)
            show(args)
        return found
    finally:
        distributed.stop(world)


def closed(args: Namespace, features: Features, config: dict[str, Any], world: World) -> Accuracy:
    """Logistic regression on features computed once."""
    splits = (args.train_split, args.val_split)
    known, asked = (extract(features, split_batches(args, split, config, world), world) for split in splits)
    return logistic_accuracy(known, asked, args.cost, world.device)


def train(args: Namespace, features: Features, config: dict[str, Any], world: World) -> Accuracy:
    """DINO's protocol: SGD on random crops, the rate falling to 0 along a cosine, epoch by epoch.

    Args:
        args: Settings.
        features: Frozen.
        config: timm's data config.
        world: This process.

    Returns:
        Accuracy after the last epoch.
    """
    full = completed(args, smoothing=0.0, color_jitter=None, train_crop_mode='rrc')
    dataset = create_dataset(full, args.train_split, config['input_size'][0], training=True)
    classes = args.num_classes or count_classes(dataset)
    batches = training_batches(full, dataset, config, classes, world)
    held_out = split_batches(args, args.val_split, config, world)
    width = features(torch.zeros(1, *config['input_size'], device=world.device)).shape[1]
    torch.manual_seed(args.seed)  # the same head on every process
    head = create_head(width, classes).to(world.device)
    model = nn.parallel.DistributedDataParallel(head) if world.distributed else head
    peak = learning_rate(full, world)
    optimizer = torch.optim.SGD(head.parameters(), peak, momentum=args.momentum, weight_decay=args.weight_decay)
    progress = Progress(world, args.epochs, len(batches), args.log_interval, 0)

    for epoch in range(args.epochs):
        distributed.seed_epoch(args.seed, epoch, world.rank)
        batches.set_epoch(epoch)
        rate = peak * 0.5 * (1 + math.cos(math.pi * epoch / args.epochs))
        optimizer.param_groups[0]['lr'] = rate
        progress.begin(epoch)
        for images, targets in batches:
            progress.data_came()
            with torch.no_grad():
                inputs = features(images)
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.step(loss.item(), len(images), rate, True)
        if (epoch + 1) % args.val_interval == 0 or epoch + 1 == args.epochs:
            found = accuracy(nn.Sequential(features, head), held_out, world)
            if world.primary:
                log.info('epoch %d  top1 %.2f  top5 %.2f', epoch + 1, *found)
    return found


def create_head(width: int, classes: int) -> nn.Linear:
    """The classifier, its weights drawn from N(0, 0.01), its bias 0."""
    head = nn.Linear(width, classes)
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    return head


def accuracy(classifier: nn.Module, batches: Batches, world: World) -> Accuracy:
    """Top-1 and top-5, in per cent, each image of the split counted once over all processes."""
    logits, labels = extract(classifier, batches, world)
    ranked = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    return 100 * ranked[:, 0].double().mean().item(), 100 * ranked.any(1).double().mean().item()


def count_classes(dataset: Any) -> int:
    """Number of classes of a data set, as embedded, timm's and torchvision's ones tell it.

    Raises:
        ConfigError: This one does not.
    """
    labels = getattr(dataset, 'labels', None)
    if labels is not None:
        return int(max(labels)) + 1
    names = getattr(dataset, 'classes', None) or getattr(getattr(dataset, 'reader', None), 'class_to_idx', None)
    if not names:
        raise ConfigError('num_classes: this data set does not tell; give it')
    return len(names)
