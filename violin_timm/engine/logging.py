"""What a run says: progress lines, and wandb where it is asked for."""

from __future__ import annotations

import logging
import sys
import time
from argparse import Namespace

from timm.utils import AverageMeter

from .config import ConfigError, as_dict
from .distributed import World

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

    def begin(self, epoch: int) -> None:
        """An epoch begins."""
        self.epoch, self.update, self.loss, self.images, self.waited = epoch, 0, AverageMeter(), 0, 0.0
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
    """Takes each epoch's numbers and does nothing with them."""

    def log(self, epoch: int, loss: float, metrics: dict[str, float], lr: float) -> None:
        """An epoch's training loss, validation metrics and learning rate."""

    def finish(self) -> None:
        """The run is over."""


class WandbTracker(Tracker):
    """Sends them to wandb."""

    def __init__(self, args: Namespace, name: str) -> None:
        import wandb

        self.run = wandb.init(
            project=args.wandb_project,
            name=name,
            config=as_dict(args),
            tags=args.wandb_tags,
            resume='must' if args.wandb_resume_id else None,
            id=args.wandb_resume_id or None,
        )

    def log(self, epoch: int, loss: float, metrics: dict[str, float], lr: float) -> None:
        evaluated = {f'eval_{name}': value for name, value in metrics.items()}
        self.run.log({'epoch': epoch, 'train_loss': loss, 'lr': lr, **evaluated})

    def finish(self) -> None:
        self.run.finish()


def create_tracker(args: Namespace, name: str) -> Tracker:
    """The tracker that the flags ask for.

    Args:
        args: Settings of the run.
        name: Name of the run there.

    Raises:
        ConfigError: wandb is asked for and missing.
    """
    if not args.log_wandb:
        return Tracker()
    try:
        return WandbTracker(args, name)
    except ImportError as err:
        raise ConfigError("log_wandb: wandb is not installed; pip install 'violin-timm[wandb]'") from err
