"""One process or many: where a run computes, and the random numbers of each epoch.

`torchrun` starts the processes; nothing here does. Folders are on a file system that all of them see.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, Iterator

import numpy as np
import torch
from timm.utils.distributed import init_distributed_device_so
from torch import nn
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from .config import ConfigError


@dataclass(frozen=True)
class World:
    """This process among those of the run: its device, its rank, and how many there are."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among those of this machine

    @property
    def distributed(self) -> bool:
        return self.size > 1

    @property
    def primary(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0


_SCHEME = 'violin-restart'


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[torch.distributed.Store, int, int]]:
    """`env://`, but not among the keys of processes that torchrun had before it restarted them.

    Its agent keeps one store for all of them, in which new processes would find the addresses of dead ones. For several
    machines, whose agents count restarts each for itself, only TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 helps.
    """
    attempt = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
    for store, rank, size in rendezvous(url.replace(_SCHEME, 'env'), **options):
        yield torch.distributed.PrefixStore(f'attempt {attempt}', store), rank, size


register_rendezvous_handler(_SCHEME, _rendezvous)


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
    one_machine = os.environ.get('LOCAL_WORLD_SIZE') == os.environ.get('WORLD_SIZE')
    info = init_distributed_device_so(device, dist_url=f'{_SCHEME}://' if one_machine else None)
    return World(torch.device(info['device']), info['global_rank'], info['world_size'], info['local_rank'])


def stop(world: World) -> None:
    """Leave the process group, so that the next run in this process can start."""
    if world.distributed:
        torch.distributed.destroy_process_group()


def seed_epoch(seed: int, epoch: int, rank: int) -> None:
    """Seed the Python, numpy and torch generators from `(seed, epoch, rank)`.

    Done as each epoch begins, so what an epoch draws (order, augmentation, dropout, and the seeds of loader workers)
    does not depend on how the run got there: a resumed run draws what the uninterrupted one would have drawn.
    """
    _seed(seed, epoch, rank)


def seed_batch(seed: int, epoch: int, rank: int, batch: int) -> None:
    """The same for one batch (from 0) of an epoch, so that an epoch may be resumed in its middle."""
    _seed(seed, epoch, rank, batch)


def _seed(*key: int) -> None:
    for_python, for_numpy, for_torch = np.random.SeedSequence(key).generate_state(3).tolist()
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.manual_seed(for_torch)


def rng_state() -> dict[str, Any]:
    """State of the Python, numpy and torch generators (CPU) as plain lists and tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, next_gauss = random.getstate()
    return {
        'python': [version, list(internal), next_gauss],
        'numpy': [str(kind), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        'torch': torch.get_rng_state(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators back to a state from `rng_state`."""
    version, internal, next_gauss = state['python']
    random.setstate((version, tuple(internal), next_gauss))
    kind, keys, position, has_gauss, gauss = state['numpy']
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state['torch'])


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


def any_of(flags: list[bool], world: World) -> list[bool]:
    """For each flag, whether a process has it set."""
    if not world.distributed:
        return flags
    counts = torch.tensor(flags, dtype=torch.int32, device=world.device)
    torch.distributed.all_reduce(counts)
    return [count > 0 for count in counts.tolist()]


def gather(value: Any, world: World) -> list[Any]:
    """A small value of each process, in the order of their ranks."""
    values = [value] * world.size
    if world.distributed:
        torch.distributed.all_gather_object(values, value)
    return values


def in_turn(make: Callable[[], Any], world: World) -> Any:
    """What `make` returns, called by one process first, then by one on each other machine, then by the rest.

    For what leaves files behind that the later ones find, such as a download: it happens once, or once on each
    machine where these share no disk.
    """
    if not world.distributed:
        return make()
    # of its own, since the usual timeout is shorter than some downloads
    group = torch.distributed.new_group(backend='gloo', timeout=timedelta(days=1))
    mine = 0 if world.rank == 0 else 1 if world.local_rank == 0 else 2
    for turn in range(3):
        if turn == mine:
            result = make()
        torch.distributed.barrier(group)
    torch.distributed.destroy_process_group(group)
    return result
