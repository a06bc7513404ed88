"""Checkpoints that survive a kill at any moment, and load with `torch.load(weights_only=True)`.

A file is written beside its place and renamed into it, so that under its name there is always a whole one. It holds
dicts, lists, numbers and tensors. File names and bookkeeping are timm's: `last`, `model_best`, `checkpoint-<epoch>`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from timm.models import clean_state_dict
from timm.task import TrainingTask
from timm.utils import CheckpointSaver, get_outdir, trim_summary

from .config import ConfigError, as_dict
from .distributed import World, rng_state, set_rng_state
from .files import rename, write_atomically
from .files import write_text as write_text  # for those who write beside checkpoints
from .logging import log
from .optim import Schedule, Stepper

LAST, BEST = 'last.pth.tar', 'model_best.pth.tar'


class Saver(CheckpointSaver):
    """timm's saver with atomic writes, plain contents, and the schedule and generators besides."""

    def __init__(
        self,
        args: Namespace,
        folder: Path,
        task: TrainingTask,
        stepper: Stepper,
        schedule: Schedule,
        decreasing: bool | None = None,
    ) -> None:
        """
        Args:
            args: Settings of the run; `eval_metric` and `checkpoint_hist` decide what is kept.
            folder: Where checkpoints go.
            task: Holds the model and its moving average.
            stepper: Holds the optimizer and the loss scaler.
            schedule: Learning rate schedule.
            decreasing: Whether a lower metric is better (default: as `eval_metric` has it).
        """
        if decreasing is None:
            decreasing = not args.val_split or args.eval_metric == 'loss'
        super().__init__(
            task.get_trainable_module(),
            stepper.optimizer,
            args=args,
            amp_scaler=stepper.scaler,
            task=task,
            checkpoint_dir=str(folder),
            recovery_dir=str(folder),
            max_history=args.checkpoint_hist,
            decreasing=decreasing,
        )
        self.schedule = schedule
        self.seconds = 0.0  # training time so far, over all processes that the run was resumed in
        self.counted = time.perf_counter()

    def contents(
        self, epoch: int, metric: float | None = None, position: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What a checkpoint holds; keys as in timm's.

        Args:
            epoch: The last finished one, from 0; -1 for none.
            metric: Its metric.
            position: How far the next epoch is, where that is begun: plain values.
        """
        state = {
            'epoch': epoch,
            'version': 2,  # timm's mark for "epoch is the finished one"
            'arch': self.args.model,
            'args': as_dict(self.args),
            'metric': metric,
            'optimizer': self.optimizer.state_dict(),
            'lr_scheduler': self.schedule.state_dict(),
            'rng': rng_state(),
            'seconds': self.seconds,
            'position': position,
            'saver': self.state_dict(None, None) if position else self.state_dict(epoch, metric),
            **self.task.get_checkpoint_state(),
            **self.task.get_checkpoint_state(ema=True),
        }
        if self.amp_scaler is not None:
            state[self.amp_scaler.state_dict_key] = self.amp_scaler.state_dict()
        return state

    def _save(self, save_path: str, epoch: int, metric: float | None = None) -> None:
        contents = self.contents(epoch, metric)
        write_atomically(save_path, lambda file: torch.save(contents, file))

    def count_time(self) -> None:
        """Add the time since the last call, or since this saver was made, to `seconds`."""
        now = time.perf_counter()
        self.seconds, self.counted = self.seconds + now - self.counted, now

    def save_position(self, epoch: int, position: dict[str, Any]) -> None:
        """Make `last` a checkpoint from within `epoch`, outside of the ranking."""
        contents = self.contents(epoch - 1, position={'epoch': epoch, **position})
        write_atomically(Path(self.checkpoint_dir) / LAST, lambda file: torch.save(contents, file))

    def save_checkpoint(self, epoch: int, metric: float | None = None) -> tuple[float | None, int | None]:
        """timm's, but for the order: a checkpoint that falls out of the history goes when its successor is there."""
        best = super().save_checkpoint(epoch, metric)
        super()._cleanup_checkpoints()
        return best

    def _cleanup_checkpoints(self, trim: int = 0) -> None:
        if not trim:  # timm makes room before it saves
            super()._cleanup_checkpoints()

    def _replace(self, src: str, dst: str) -> None:
        rename(Path(src), Path(dst))

    def _duplicate(self, src: str, dst: str) -> None:
        temporary = Path(dst).with_name(f'.{Path(dst).name}.tmp')
        temporary.unlink(missing_ok=True)
        try:
            os.link(src, temporary)
        except OSError:  # the file system has no hard links
            with open(src, 'rb') as source:
                write_atomically(dst, lambda file: shutil.copyfileobj(source, file))
            return
        rename(temporary, Path(dst))
        temporary.unlink(missing_ok=True)  # renaming a link onto another of the same file leaves both

    def continue_history(self, checkpoint: dict[str, Any]) -> None:
        """Rank on as if never interrupted, after a resume from this folder's own `last`.

        timm links the numbered and the best file after it wrote `last`; a kill in between is made good here.
        """
        state = checkpoint['saver']
        epoch, metric = state['pending']
        self.seconds = checkpoint.get('seconds', 0.0)
        self.load_state_dict({**state, 'pending': (None, None)})
        if epoch is None:  # from within an epoch
            return
        path = self._checkpoint_path(epoch)
        if path not in [name for name, _ in self.checkpoint_files]:
            self._duplicate(os.path.join(self.checkpoint_dir, LAST), path)
            self._track_checkpoint(path, epoch, metric)
            self._cleanup_checkpoints()


def experiment_folder(args: Namespace) -> Path:
    """Folder of a run that has a name."""
    return Path(args.output or 'output/train') / args.experiment


def open_folder(args: Namespace, name: str, resume: Path | None) -> tuple[Path, bool]:
    """Make the folder of a run. A fresh run never writes over another: it moves on to `<experiment>-1` and so on.

    Args:
        args: Settings of the run.
        name: Name of the folder where no experiment is named.
        resume: Checkpoint that the run continues from.

    Returns:
        The folder, and whether the run continues in it.
    """
    folder = experiment_folder(args) if args.experiment else Path(args.output or 'output/train') / name
    last = folder / LAST
    in_place = resume is not None and last.exists() and os.path.samefile(resume, last)
    if last.exists() and not in_place:
        folder = Path(get_outdir(str(folder), inc=True))
        log.warning('%s holds a run (which --resume auto continues); this one goes to %s', last.parent, folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder, in_place


def find_resume(args: Namespace) -> Path | None:
    """Checkpoint that `--resume` means; None for a fresh start.

    Raises:
        ConfigError: `auto` without an experiment, or no such file.
    """
    if not args.resume:
        return None
    if args.resume == 'auto':
        if not args.experiment:
            raise ConfigError("resume: 'auto' continues the folder of an experiment; name it with --experiment")
        last = experiment_folder(args) / LAST
        return last if last.exists() else None
    if not os.path.isfile(args.resume):
        raise ConfigError(f"resume: got {args.resume!r}; expected a checkpoint file, or 'auto'")
    return Path(args.resume)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint of ours, or of timm's `train.py`, on the CPU.

    Raises:
        ConfigError: It is none, or holds no model.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm's holds its args as one
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except OSError:
        raise
    except Exception as err:  # whatever the bytes of another kind of file happen to mean
        raise ConfigError(f'resume: {path} is no checkpoint that loads with weights_only=True: {err}') from err
    if not isinstance(checkpoint, dict) or 'state_dict' not in checkpoint:
        raise ConfigError(f'resume: {path} holds no state_dict')
    return checkpoint


def restore(
    checkpoint: dict[str, Any], task: TrainingTask, stepper: Stepper, schedule: Schedule, optimizer: bool = True
) -> int:
    """Put a run back to the end of the checkpoint's epoch.

    Args:
        checkpoint: From `load_checkpoint`.
        task: Its model and moving average are overwritten.
        stepper: Its optimizer and loss scaler are.
        schedule: Sets the learning rates of the next epoch.
        optimizer: False leaves the optimizer and the loss scaler fresh.

    Returns:
        The next epoch, counted from 0.

    Raises:
        ConfigError: The checkpoint does not fit.
    """
    weights = clean_state_dict(checkpoint['state_dict'])
    try:
        task.load_checkpoint_state(weights, checkpoint.get('task_state'))
        if task.has_ema():
            average = clean_state_dict(checkpoint.get('state_dict_ema') or weights)
            task.load_checkpoint_state(average, checkpoint.get('task_state_ema'), ema=True)
        if optimizer and 'optimizer' in checkpoint:
            stepper.optimizer.load_state_dict(checkpoint['optimizer'])
    except (RuntimeError, ValueError) as err:
        raise ConfigError(f'resume: the checkpoint is of another model or optimizer: {err}') from err
    if optimizer and stepper.scaler is not None and stepper.scaler.state_dict_key in checkpoint:
        stepper.scaler.load_state_dict(checkpoint[stepper.scaler.state_dict_key])
    if 'rng' in checkpoint:
        set_rng_state(checkpoint['rng'])
    epoch = checkpoint.get('epoch', -1) + (1 if checkpoint.get('version', 1) > 1 else 0)
    schedule.resume(epoch, checkpoint.get('lr_scheduler'), checkpoint.get('metric'))
    return epoch


def resume(
    args: Namespace, world: World, task: TrainingTask, stepper: Stepper, schedule: Schedule
) -> tuple[Path | None, dict[str, Any], int]:
    """Restore what `--resume` means, if anything, and say so.

    Returns:
        The checkpoint's path and contents (None and nothing for a fresh start), and the first epoch to train.

    Raises:
        ConfigError: There is no such checkpoint.
    """
    path, checkpoint, start = find_resume(args), {}, 0
    if path:
        checkpoint = load_checkpoint(path)
        start = restore(checkpoint, task, stepper, schedule, optimizer=not args.no_resume_opt)
    if args.start_epoch is not None:
        start = args.start_epoch
        schedule.resume(start, None, None)
    if path and world.primary:
        before = checkpoint.get('args', {})
        before = before if isinstance(before, dict) else vars(before)
        changed = [
            f'{key} {before[key]} -> {value}'
            for key, value in as_dict(args).items()
            if key in before and before[key] != value and key != 'resume'
        ]
        log.info('continuing %s with epoch %d%s', path, start + 1, f' ({", ".join(changed)})' if changed else '')
    return path, checkpoint, start


def trim(summary: Path, epoch: int) -> None:
    """Drop the rows of `epoch` and later from a `summary.csv`: those of a run that is about to redo them."""
    if summary.exists():
        temporary = summary.with_name('.summary.tmp')
        shutil.copy2(summary, temporary)
        trim_summary(str(temporary), epoch)
        rename(temporary, summary)
