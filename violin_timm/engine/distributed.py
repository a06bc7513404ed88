"""One process or many: where a run computes, and the random numbers of each epoch.

`torchrun` starts the processes; nothing here does. Folders are on a file system that all of them see.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from timm.utils.distributed import init_distributed_device_so
from torch import nn

from .config import ConfigError


@dataclass(frozen=True)
class World:
    """This process among those of the run: its device, its rank, and how many there are."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def distributed(self) -> bool:
        return self.size > 1

    @property
    def primary(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0


def start(device: str) -> World:
    """Join the processes that torchrun started, if it did, and pick this process's device.

    Args:
        device: A torch device, such as `cuda` or `cpu`; with many processes `cuda` becomes one GPU for each.

    Raises:
        ConfigError: There is no such device.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError as err:
        raise ConfigError(f'device: got {device!r}; expected a torch device such as cuda, cuda:1, mps or cpu') from err
    if kind == 'cuda' and not torch.cuda.is_available():
        raise ConfigError(f'device: got {device!r}, but there is no CUDA device here; use --device cpu')
    info = init_distributed_device_so(device)
    return World(torch.device(info['device']), info['global_rank'], info['world_size'])


def stop(world: World) -> None:
    """Leave the process group, so that the next run in this process can start."""
    if world.distributed:
        torch.distributed.destroy_process_group()


def seed_epoch(seed: int, epoch: int, rank: int) -> None:
    """Seed the Python, numpy and torch generators from `(seed, epoch, rank)`.

    Done as each epoch begins, so what an epoch draws (order, augmentation, dropout, and the seeds of loader workers)
    does not depend on how the run got there: a resumed run draws what the uninterrupted one would have drawn.
    """
    for_python, for_numpy, for_torch = np.random.SeedSequence([seed, epoch, rank]).generate_state(3).tolist()
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.manual_seed(for_torch)


def broadcast(module: nn.Module, world: World) -> None:
    """Give every process the first one's parameters and buffers, in place."""
    if world.distributed:
        for tensor in module.state_dict().values():
            torch.distributed.broadcast(tensor, src=0)


def mean(value: float, world: World) -> float:
    """Mean of a number over all processes."""
    if not world.distributed:
        return value
    total = torch.tensor(value, dtype=torch.float32, device=world.device)
    torch.distributed.all_reduce(total)
    return total.item() / world.size
