"""What a DINO run is measured by: baselines, the teacher's accuracies, signs of collapse, and `result.json`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from torch import nn

from ..engine.checkpoints import write_text
from ..engine.evaluation import shown
from ..engine.logging import log
from ..evals.features import Features, Pixels
from ..evals.probe import probe
from .dino_loss import collapse_warnings
from .interruption import saving

Run = Any  # dino.Run, which imports this module

WATCHED = ('entropy', 'batch_entropy', 'spread')  # of the teacher, means over an epoch


def evaluate(parts: Run, features: nn.Module) -> dict[str, float]:
    """Accuracies of the evaluators on the held-out split; empty without one."""
    if parts.held_out is None:
        return {}
    args = parts.args
    return probe(
        features.eval(), *parts.held_out, parts.world, args.evaluators, args.k, args.temperature, parts.stepper.autocast
    )


def find_baselines(parts: Run, fresh: bool) -> None:
    """Evaluate what training must beat, the untrained network and raw pixels; or read what the run's start wrote.

    Args:
        parts: The run.
        fresh: It goes on from no checkpoint, so that the network is untrained.
    """
    if fresh:
        kinds = {'untrained': Features(parts.task.teacher.backbone), 'pixels': Pixels(parts.data_config)}
        parts.baselines = {kind: evaluate(parts, features) for kind, features in kinds.items()}
    if not parts.folder:
        return
    path = parts.folder / 'baselines.json'
    if fresh:
        with saving(parts, 'at the start'):
            write_text(path, json.dumps(parts.baselines, indent=2) + '\n')
    elif path.exists():
        parts.baselines = json.loads(path.read_text())
    for kind, metrics in parts.baselines.items():
        if metrics:
            log.info('%s  %s', kind, shown(metrics))


def last_watched(summary: Path) -> dict[str, float]:
    """What was watched in the last epoch of a `summary.csv`; empty without one."""
    if not summary.exists():
        return {}
    with open(summary, newline='') as file:
        rows = list(csv.DictReader(file))
    return {name: float(rows[-1][f'train_{name}']) for name in WATCHED} if rows else {}


def say(parts: Run, loss: float) -> None:
    """The epoch in a line, and a warning for whatever looks like collapse."""
    watched = '  '.join(f'{name} {value:.3f}' for name, value in parts.watched.items())
    log.info('epoch %d  loss %.4f  %s  %s', parts.epoch + 1, loss, watched, shown(parts.metrics))
    for warning in collapse_warnings(*parts.watched.values(), parts.args.out_dim):
        log.warning('collapse? %s', warning)


def finish(parts: Run) -> dict[str, Any]:
    """Write `result.json`: the teacher's accuracies after the last epoch, and the baselines."""
    args, folder = parts.args, parts.folder
    result = {
        'model': args.model,
        'dataset': args.dataset,
        'seed': args.seed,
        'epochs': parts.last,
        'parameters': sum(parameter.numel() for parameter in parts.task.student.backbone.parameters()),
        'teacher': parts.metrics or evaluate(parts, Features(parts.task.teacher.backbone)),
        **parts.baselines,
        'watched': parts.watched,
    }
    if folder:
        result['seconds'] = round(parts.saver.seconds, 1)
        with saving(parts, 'after the epoch'):
            write_text(folder / 'result.json', json.dumps(result, indent=2) + '\n')
        log.info('written to %s', folder)
    return {**result, 'folder': folder}
