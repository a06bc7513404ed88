"""Sections of a protocol's page beside accuracy: how far masks moved, how predictions changed, what was trained."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING, Callable, Mapping, Sequence

from . import markdown as md
from .protocol_statistics import Protocol, Run

if TYPE_CHECKING:
    import numpy as np

    Predictions = Callable[[str, str, int], np.ndarray | None]

__all__ = ['movement', 'parameters', 'predicted']

_MOVEMENT = {
    'mask_before': '1 - M before',
    'mask_after': 'after',
    'mask_after_max': 'largest after',
    'mask_change': 'change of M',
    'beta_change_max': 'largest change of beta',
    'alpha_before': 'alpha from 1 before',
    'alpha_after': 'alpha from 1 after',
}
_PARAMETERS = ('total', 'trainable', 'adapter', 'mask', 'head', 'other')


def movement(protocol: Protocol) -> list[str]:
    """Table of each arm whose runs tell of a mask or of alpha: a line for each layer, means over the final runs."""
    blocks = []
    for arm in protocol.arms:
        runs = [run for task in protocol.tasks for run in _sound(protocol, arm, task.name).values()]
        layers = max((len(run['movement']) for run in runs), default=0)
        means = [{key: _layer_mean(runs, layer, key) for key in _MOVEMENT} for layer in range(layers)]
        keys = [key for key in _MOVEMENT if any(layer[key] is not None for layer in means)]
        if keys:
            lines = [[str(index), *(_short(layer[key]) for key in keys)] for index, layer in enumerate(means)]
            blocks += [f'### {arm}', md.table(['layer', *(_MOVEMENT[key] for key in keys)], lines)]
    if not blocks:
        return []
    text = (
        'How far the final runs ended from "no mask, no temperature", where M and alpha are 1. Each column is a mean'
        ' over the final runs of all tasks that did not diverge, of: 1 - M, averaged over heads and pairs of different'
        ' patches, before and after training; its largest value after; the mean |M after - M before|; the largest'
        ' |beta after - beta before|; |alpha - 1|, averaged over heads, before and after.'
    )
    return ['## Movement of the masks', text, *blocks]


def _layer_mean(runs: Sequence[Run], layer: int, key: str) -> float | None:
    values = [run['movement'][layer][key] for run in runs if key in (run['movement'][layer : layer + 1] or [{}])[0]]
    return statistics.fmean(values) if values else None


def _short(value: float | None) -> str:
    if value is None:
        return '-'
    return f'{value:.4f}' if 1e-3 <= abs(value) < 1e4 else f'{value:.1e}' if value else '0'


def predicted(protocol: Protocol, baseline: str, predictions: Predictions) -> list[str]:
    """How many predicted classes differ from the baseline's, by task and arm, beside the baseline's own noise.

    Args:
        protocol: The results.
        baseline: Arm to compare with.
        predictions: (arm, task, seed) to classes `[N]`, or None.

    Raises:
        ValueError: Two runs of a task predict different numbers of images.
    """
    others = [arm for arm in protocol.arms if arm != baseline]
    planned = len(protocol.final_seeds)
    pairs = planned * (planned - 1) // 2
    lines = []
    for task in protocol.tasks:
        own, *rest = (_classes(protocol, arm, task.name, predictions) for arm in (baseline, *others))
        noise = [_differing(own[a], own[b], task.name) for a, b in itertools.combinations(own, 2)]
        cells = [[_differing(own[s], of[s], task.name) for s in own if s in of] for of in rest]
        lines.append([task.name, *(_range(values, planned) for values in cells), _range(noise, pairs)])
    if all(cell == '-' for line in lines for cell in line[1:]):
        return []
    text = (
        f'Percent of test images whose predicted class is not that of {baseline} with the same seed: mean (smallest -'
        f' largest) over the final seeds. The last column is the yardstick of noise: how much {baseline} differs from'
        ' itself between two seeds, over all pairs of seeds. Runs that diverged are left out.'
    )
    return ['## Changed predictions', text, md.table(['task', *others, f'{baseline}, other seeds'], lines)]


def _classes(protocol: Protocol, arm: str, task: str, predictions: Predictions) -> dict[int, np.ndarray]:
    found = {seed: predictions(arm, task, seed) for seed in _sound(protocol, arm, task)}
    return {seed: classes for seed, classes in found.items() if classes is not None}


def _differing(one: np.ndarray, other: np.ndarray, task: str) -> float:
    """Percent of entries that differ."""
    if one.shape != other.shape:
        raise ValueError(
            f'predictions of {task}: got shapes {one.shape} and {other.shape}; runs of one task predict the same'
        )
    return 100 * float((one != other).mean())


def _range(values: Sequence[float], planned: int) -> str:
    if not values:
        return '-'
    text = f'{statistics.fmean(values):.2f}'
    text += f' ({min(values):.2f} - {max(values):.2f})' if len(values) > 1 else ''
    return text + (f', {len(values)} of {planned}' if len(values) < planned else '')


def parameters(protocol: Protocol) -> list[str]:
    """Numbers of parameters of each arm, on the first task of which it has a run."""
    counted: dict[str, tuple[str, Mapping[str, int]]] = {}
    for task in reversed(protocol.tasks):
        counted |= {key[0]: (task.name, run['parameters']) for key, run in protocol.runs.items() if key[1] == task.name}
    lines = [
        [arm, counted[arm][0], *(f'{counted[arm][1][part]:,}' for part in _PARAMETERS)]
        for arm in protocol.arms
        if arm in counted
    ]
    if not lines:
        return []
    text = 'All parameters, those that are trained, and what these belong to: adapter, mask (with alpha), head, other.'
    if len(protocol.tasks) > 1:
        text += ' Counted on one task; the head of another has as many outputs as that task has classes.'
    return ['## Parameters', text, md.table(['arm', 'task', *_PARAMETERS], lines)]


def _sound(protocol: Protocol, arm: str, task: str) -> dict[int, Run]:
    """Final runs by seed that did not diverge."""
    finals = protocol.finals(arm, task)
    return {seed: run for seed, run in finals.items() if not run['diverged'] and math.isfinite(run['top1'])}
