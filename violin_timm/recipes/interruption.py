"""How a run that trains epoch by epoch ends before its time, and finds within the epoch where it was."""

from __future__ import annotations

from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, NoReturn, Protocol, Sized

from ..engine import distributed
from ..engine.checkpoints import LAST, Saver
from ..engine.config import ConfigError
from ..engine.distributed import World
from ..engine.logging import Progress, log
from ..engine.stopping import Interrupted, Terminate, TrainingError


class Run(Protocol):
    """What is needed of a recipe's `Run`."""

    args: Namespace
    world: World
    train: Sized  # its batches
    folder: Path | None  # of the primary process alone, as the saver is
    saver: Saver | None
    terminate: Terminate
    epoch: int
    batches: int  # of the epoch at which the run goes on, those done before
    losses: tuple[float, int]  # their sum, and the number of their images


def find_position(parts: Run, checkpoint: dict[str, Any], start: int) -> dict[str, Any]:
    """Where in the epoch `start` the checkpoint is, if it is of that epoch and its batches are still the same.

    Sets `batches` and `losses` of the run.

    Args:
        parts: The run.
        checkpoint: Its contents; empty for a fresh start.
        start: The first epoch to train.

    Returns:
        What `interrupt` saved; empty if the epoch is to be begun.

    Raises:
        ConfigError: Not all processes have the same checkpoint.
    """
    if len(set(distributed.gather((start, bool(checkpoint)), parts.world))) > 1:
        raise ConfigError(
            'resume: not all processes see the checkpoint; output must be a folder that all machines share'
        )
    position = checkpoint.get('position')
    if not position or position['epoch'] != start:
        return {}
    if position['plan'] != _plan(parts):
        log.warning('seed, batches or processes are not those of the checkpoint: epoch %d starts anew', start + 1)
        return {}
    parts.batches, parts.losses = position['batches'], tuple(position['losses'][parts.world.rank])
    return position


def _plan(parts: Run) -> list[int]:
    """What settles which images are in which batch."""
    args = parts.args
    steps = getattr(args, 'grad_accum_steps', 1)  # not every recipe has them
    return [args.seed, args.batch_size, steps, len(parts.train), parts.world.size]


def interrupt(parts: Run, batches: int, progress: Progress, **sums: list[float]) -> NoReturn:
    """Save within the epoch, and stop.

    Args:
        parts: The run.
        batches: How many of the epoch are done.
        progress: Has the losses so far.
        **sums: What else this process sums up over the epoch; the position has a list of those of all processes.

    Raises:
        Interrupted: It is saved.
        TrainingError: It cannot be.
    """
    sums = {'losses': (progress.loss.sum, progress.loss.count), **sums}
    everyone = {name: distributed.gather(value, parts.world) for name, value in sums.items()}
    if parts.saver:
        parts.saver.count_time()
        with saving(parts, f'batch {batches}', 'SIGTERM, and cannot save'):
            parts.saver.save_position(parts.epoch, {'batches': batches, 'plan': _plan(parts), **everyone})
    where = f'epoch {parts.epoch + 1}, batch {batches}'
    raise Interrupted(f'SIGTERM: stopped in {where}, which is saved; --resume auto goes on')


def interrupt_after_epoch(parts: Run) -> None:
    """Stop if SIGTERM came to any process since the epoch's last update; the epoch is saved.

    Raises:
        Interrupted: It came.
    """
    if distributed.any_of([parts.terminate.received], parts.world)[0]:
        raise Interrupted(f'SIGTERM: stopped after epoch {parts.epoch + 1}, which is saved; --resume auto goes on')


@contextmanager
def saving(parts: Run, where: str, what: str = 'cannot save') -> Iterator[None]:
    """Context of what is written to the run's folder.

    Raises:
        TrainingError: In place of an OSError, such as that of a full disk.
    """
    try:
        yield
    except OSError as err:
        raise TrainingError(broken(parts, f'{what}: {err}', where)) from err


def broken(parts: Run, what: str, where: str) -> str:
    """Message of a run that stops: what happened, where, and what there is to go back to."""
    if not parts.world.primary:
        return f'{what} in epoch {parts.epoch + 1}, {where}; stopped. Process 0 says more'
    last = parts.folder / LAST if parts.folder else None
    good = last if last and last.exists() else 'none'
    return f'{what} in epoch {parts.epoch + 1}, {where}; stopped. Last good checkpoint: {good}'
