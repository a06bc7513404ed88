"""Where in an epoch a supervised run is: saved when SIGTERM comes, and found again."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from ..engine import distributed
from ..engine.config import ConfigError
from ..engine.logging import Progress, log
from ..engine.stopping import Interrupted, TrainingError
from .supervised_result import broken

Run = Any  # supervised.Run, which imports this module


def find_position(parts: Run, checkpoint: dict[str, Any], start: int) -> None:
    """Where in the epoch `start` the checkpoint is, if it is of that epoch and its batches are still the same."""
    if len(set(distributed.gather(start, parts.world))) > 1:
        raise ConfigError(
            'resume: not all processes see the checkpoint; output must be a folder that all machines share'
        )
    position = checkpoint.get('position')
    if not position or position['epoch'] != start:
        return
    if position['plan'] != _plan(parts):
        log.warning('seed, batches or processes are not those of the checkpoint: epoch %d starts anew', start + 1)
        return
    parts.batches, parts.losses = position['batches'], tuple(position['losses'][parts.world.rank])
    updates = math.ceil(parts.batches / parts.args.grad_accum_steps)
    parts.schedule.after_update(start * parts.schedule.updates_per_epoch + updates)


def _plan(parts: Run) -> list[int]:
    """What settles which images are in which batch."""
    args = parts.args
    return [args.seed, args.batch_size, args.grad_accum_steps, len(parts.train), parts.world.size]


def interrupt(parts: Run, batches: int, progress: Progress) -> NoReturn:
    """Save within the epoch, `batches` of which are done, and stop."""
    where = f'epoch {parts.epoch + 1}, batch {batches}'
    losses = distributed.gather((progress.loss.sum, progress.loss.count), parts.world)
    if parts.saver:
        parts.saver.count_time()
        try:
            parts.saver.save_position(parts.epoch, {'batches': batches, 'losses': losses, 'plan': _plan(parts)})
        except OSError as err:
            raise TrainingError(broken(parts, f'SIGTERM, and cannot save: {err}', f'batch {batches}')) from err
    raise Interrupted(f'SIGTERM: stopped in {where}, which is saved; --resume auto goes on')
