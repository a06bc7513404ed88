"""How good a classifier is."""

from __future__ import annotations

import torch
from timm.task import TrainingTask, evaluation_sample_limit
from torch import nn

from ..data.datasets import Batches
from .distributed import World
from .optim import Stepper


def evaluate(
    model: nn.Module, batches: Batches, task: TrainingTask, stepper: Stepper, world: World
) -> dict[str, float]:
    """Mean cross entropy and accuracies of a model, each image of the split counted once over all processes.

    Args:
        model: Images `[B, C, H, W]` to logits `[B, classes]`; left in evaluation mode.
        batches: The split.
        task: Makes the evaluator.
        stepper: Its precision is used.
        world: This process.

    Returns:
        `loss`, and `top1` and `top5` in per cent.
    """
    model.eval()
    evaluator = task.create_evaluator(max_samples=evaluation_sample_limit(batches.loader))
    with torch.inference_mode():
        for images, targets in batches:
            with stepper.autocast():
                output = model(images)
            evaluator.update(output, targets)
    return dict(evaluator.compute(world.distributed))


def shown(metrics: dict[str, float]) -> str:
    """One line of named numbers, losses with more digits than percentages."""
    return '  '.join(
        f'{name} {value:.4f}' if 'loss' in name else f'{name} {value:.2f}' for name, value in metrics.items()
    )
