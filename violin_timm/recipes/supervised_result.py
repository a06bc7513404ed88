"""What a supervised run comes to: its best checkpoint on the test split, and `result.json`."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from timm.utils import unwrap_model
from torch import nn

from ..engine import distributed
from ..engine.checkpoints import BEST, load_checkpoint, write_text
from ..engine.evaluation import shown
from ..engine.logging import log
from .interruption import saving

Run = Any  # supervised.Run, which imports this module


def finish(parts: Run) -> dict[str, Any]:
    """Measure the best checkpoint on the test split, once, and write `result.json`."""
    args, folder = parts.args, parts.folder
    result = {
        'model': args.model,
        'dataset': args.dataset,
        'seed': args.seed,
        'epochs': parts.schedule.last,
        'parameters': count_parameters(parts.model),
        'validation': parts.metrics,
    }
    if parts.saver:
        result.update(
            best_epoch=parts.saver.best_epoch,
            best_metric=parts.saver.best_metric,
            best_by=ranking(args),
            seconds=round(parts.saver.seconds, 1),
        )
    result['test'] = test_metrics(parts)
    if folder:
        if args.dataset == 'digits' and args.test_split == 'test':
            from ..data.digits import baselines

            result['baselines'] = baselines(args.split_seed)
            log.info('raw pixels  %s', shown(result['baselines']))
        with saving(parts, 'after the last epoch'):
            write_text(folder / 'result.json', json.dumps(result, indent=2) + '\n')
        if args.figure:
            from ..viz import training_figure

            training_figure(parts.model, folder / 'figure.png')
        log.info('written to %s', folder)
    return {**result, 'folder': folder}


def test_metrics(parts: Run) -> dict[str, float]:
    """Metrics on the test split of the run's best checkpoint, with whose weights the model is left."""
    if parts.test is None:
        return {}
    if parts.folder:
        best = load_checkpoint(parts.folder / BEST)
        weights = best['state_dict_ema' if parts.args.best_by == 'ema' else 'state_dict']
        unwrap_model(parts.model).load_state_dict(weights)
    distributed.broadcast(unwrap_model(parts.model), parts.world)
    metrics = parts.evaluate(parts.model, parts.test)
    if parts.world.primary:
        log.info('test  %s', shown(metrics))
    return metrics


def ranking(args: Namespace) -> str:
    """The metric that ranks checkpoints."""
    if not args.val_split:
        return 'train_loss'
    return ('ema_' if args.best_by == 'ema' else '') + args.eval_metric


def count_parameters(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())
