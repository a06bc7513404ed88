"""What a run says: progress lines, and wandb where it is asked for."""

from __future__ import annotations

import logging
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from timm.utils import AverageMeter

from .config import ConfigError, as_dict
from .distributed import World
from .files import write_text

log = logging.getLogger('violin_timm')


def setup() -> None:
    """Send log lines to standard output. For commands; the library leaves logging to its caller."""
    logging.basicConfig(level=logging.INFO, format='%(message)s', stream=sys.stdout)
    # a list of all checkpoints after each epoch
    logging.getLogger('timm.utils.checkpoint_saver').setLevel(logging.WARNING)


def clock(seconds: float) -> str:
    """`h:mm:ss` of a duration."""
    minutes, seconds = divmod(int(seconds), 60)
    return f'{minutes // 60}:{minutes % 60:02}:{seconds:02}'


class Progress:
    """Lines on a running training: loss, rate, speed, share of the time spent waiting for data, time left."""

    def __init__(self, world: World, epochs: int, updates_per_epoch: int, interval: int, start_epoch: int) -> None:
        """
        Args:
            world: Only its primary process prints.
            epochs: Epochs of the whole run.
            updates_per_epoch: Updates in each.
            interval: Updates between two lines.
            start_epoch: First epoch of this process, which may not be that of the run.
        """
        self.world, self.epochs, self.updates_per_epoch, self.interval = world, epochs, updates_per_epoch, interval
        self.start, self.done, self.left = time.perf_counter(), 0, (epochs - start_epoch) * updates_per_epoch

    def begin(self, epoch: int, update: int = 0, losses: tuple[float, int] = (0.0, 0)) -> None:
        """An epoch begins, or goes on.

        Args:
            epoch: Counted from 0.
            update: Updates of it that another process did.
            losses: Sum and number of the losses of the images in these.
        """
        self.epoch, self.update, self.loss, self.images, self.waited = epoch, update, AverageMeter(), 0, 0.0
        self.left -= update
        self.loss.sum, self.loss.count = losses
        self.loss.avg = self.loss.sum / max(self.loss.count, 1)
        self.begun = self.asked = time.perf_counter()

    def data_came(self) -> None:
        """The loader delivered the batch that was waited for since the last step."""
        self.waited += time.perf_counter() - self.asked

    def step(self, loss: float, images: int, lr: float, updated: bool) -> None:
        """A batch of `images` images is done, with a mean `loss`; print a line where one is due."""
        self.loss.update(loss, images)
        self.images += images * self.world.size
        self.asked = time.perf_counter()
        if not updated:
            return
        self.update, self.done = self.update + 1, self.done + 1
        if self.world.primary and (self.update % self.interval == 0 or self.update == self.updates_per_epoch):
            log.info(self.line(lr))

    def line(self, lr: float) -> str:
        """The current progress line."""
        now = time.perf_counter()
        spent = max(now - self.begun, 1e-9)
        left = (now - self.start) / self.done * (self.left - self.done)
        return (
            f'epoch {self.epoch + 1}/{self.epochs}  update {self.update}/{self.updates_per_epoch}  '
            f'loss {self.loss.avg:.4f}  lr {lr:.3e}  {self.images / spent:.1f} images/s  '
            f'waiting for data {100 * self.waited / spent:.0f}%  left {clock(left)}'
        )


class Tracker:
    """Takes a run's numbers and does nothing with them."""

    def log(self, epoch: int, loss: float, metrics: dict[str, float], lr: float) -> None:
        """An epoch's training loss, validation metrics and learning rate."""

    def finish(self, result: dict[str, Any] | None = None, failed: bool = False) -> None:
        """The run is over, with what is in its `result.json`, or for now."""


class WandbTracker(Tracker):
    """Sends them to wandb: one run there for one run here, through all its resumes.

    Without a network or a login the run is kept in files, which `wandb sync` sends later.
    """

    def __init__(self, args: Namespace, name: str, folder: Path | None) -> None:
        wandb = _import_wandb()
        known = folder / 'wandb.txt' if folder else None
        before = known.read_text().strip() if known and known.exists() else None
        settings = {
            'project': args.wandb_project,
            'name': name,
            'config': as_dict(args),
            'tags': args.wandb_tags,
            'id': args.wandb_resume_id or before,
            'resume': 'must' if args.wandb_resume_id else 'allow' if before else None,
            'dir': str(folder) if folder else None,
        }
        try:
            self.run = wandb.init(**settings)
        except Exception as err:  # no network, no login, no terminal to ask for one: wandb has an error for each
            log.warning('wandb: %s; the run is logged offline, and `wandb sync` sends it later', err)
            self.run = wandb.init(**{**settings, 'mode': 'offline'})
        if known:
            write_text(known, self.run.id)

    def log(self, epoch: int, loss: float, metrics: dict[str, float], lr: float) -> None:
        evaluated = {f'eval_{name}': value for name, value in metrics.items()}
        self.run.log({'epoch': epoch, 'train_loss': loss, 'lr': lr, **evaluated}, step=epoch)

    def finish(self, result: dict[str, Any] | None = None, failed: bool = False) -> None:
        self.run.summary.update(flat(result or {}))
        self.run.finish(exit_code=int(failed))


def flat(values: dict[str, Any], before: str = '') -> dict[str, Any]:
    """Nested dicts as one, with keys such as `test.top1`."""
    result = {}
    for key, value in values.items():
        result.update(flat(value, f'{before}{key}.') if isinstance(value, dict) else {before + key: value})
    return result


def _import_wandb() -> Any:
    try:
        import wandb

        if not hasattr(wandb, 'init'):  # Python makes a package of the folder `wandb` that its runs leave
            raise ImportError
    except ImportError as err:
        raise ConfigError("log_wandb: wandb is not installed; pip install 'violin-timm[wandb]'") from err
    return wandb


def check_tracker(args: Namespace) -> None:
    """See that the tracker can be had.

    Raises:
        ConfigError: wandb is asked for and missing.
    """
    if args.log_wandb:
        _import_wandb()


def create_tracker(args: Namespace, name: str, folder: Path | None = None) -> Tracker:
    """The tracker that the flags ask for.

    Args:
        args: Settings of the run.
        name: Name of the run there.
        folder: Folder of the run, where `wandb.txt` remembers the id there for the next resume.

    Raises:
        ConfigError: wandb is asked for and missing.
    """
    return WandbTracker(args, name, folder) if args.log_wandb else Tracker()
