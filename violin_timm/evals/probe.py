"""Evaluations of a backbone while it is pretrained, by features computed once for all evaluators."""

from __future__ import annotations

from typing import Callable, Sequence

import torch
from torch import nn

from ..data.datasets import Batches
from ..engine.distributed import World
from .features import extract
from .knn import knn_accuracy
from .logistic import logistic_accuracy


def probe(
    features: nn.Module,
    gallery: Batches,
    queries: Batches,
    world: World,
    evaluators: Sequence[str] = ('knn',),
    ks: Sequence[int] = (20,),
    temperature: float = 0.07,
    autocast: Callable | None = None,
) -> dict[str, float]:
    """Top-1 accuracies, in per cent, on images held out of the training.

    Args:
        features: Images to `[B, D]`; in evaluation mode.
        gallery: Labelled images.
        queries: Images to classify.
        world: This process.
        evaluators: `knn`, `logistic`.
        ks: Numbers of neighbours.
        temperature: Of their votes.
        autocast: Makes the context in which the features are computed.

    Returns:
        `knn<k>` for each k, and `logistic`.
    """
    known, asked = (extract(features, batches, world, autocast) for batches in (gallery, queries))
    result = {}
    if 'knn' in evaluators:
        found = knn_accuracy(known, asked, ks, temperature, world)
        result.update({f'knn{k}': top1 for k, (top1, _) in found.items()})
    if 'logistic' in evaluators:
        with torch.enable_grad():
            result['logistic'] = logistic_accuracy(known, asked, device=world.device)[0]
    return result
