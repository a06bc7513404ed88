"""The processes that do a protocol's runs: each takes the next one that is free, until none is left."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
import traceback
from argparse import Namespace
from typing import Any, Callable, NoReturn

import torch

from ..data.tensors import Streamed, Tensors, load
from ..data.vtab import Task
from ..engine.build import import_modules
from ..engine.checkpoints import write_text
from ..engine.config import ConfigError
from ..engine.logging import clock, log, setup
from ..engine.runs import cores, lock, unlock
from .finetune import Job, finetune
from .finetune_build import forget_weights
from .protocol import Plan, Source
from .protocol_identity import fingerprint, record
from .protocol_models import save_model

__all__ = ['device_of', 'jobs_of', 'run_all']

POLL = 0.5  # seconds
FAILURE = 'failure.txt'
Prepare = Callable[[Namespace], tuple[Plan, Source]]


def jobs_of(args: Namespace) -> int:
    """Runs at a time."""
    return args.jobs or (max(1, torch.cuda.device_count()) if args.device == 'cuda' else 1)


def device_of(args: Namespace, index: int = 0) -> torch.device:
    """Where the runs of process `index` are done: `cuda` is a GPU for each.

    Raises:
        ConfigError: There is no such device, or torchrun started several of these.
    """
    if int(os.environ.get('LOCAL_WORLD_SIZE', 1)) > 1:
        raise ConfigError('jobs: got processes from torchrun; start the command once on each machine, with --jobs')
    try:
        device = torch.device(args.device)
    except RuntimeError as err:
        raise ConfigError(f'device: got {args.device!r}; expected a torch device such as cuda, cuda:1 or cpu') from err
    if device.type != 'cuda':
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(f'device: got {args.device!r}, but there are {count} CUDA devices here; use --device cpu')
    return torch.device('cuda', index % count if device.index is None else device.index)


def run_all(plan: Plan, source: Source, prepare: Prepare) -> int:
    """Do all runs that are not done; progress goes to the log.

    Args:
        plan: Of the protocol.
        source: Of its images.
        prepare: A module's function that makes both from settings, called in each other process.

    Returns:
        The number of runs that failed, here or in other processes that fill the folder.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the runs under way are lost, all others kept.
    """
    for failure in (plan.root / 'runs').rglob(FAILURE):
        failure.unlink(missing_ok=True)
    main = threading.current_thread() is threading.main_thread()  # Python lets no other thread set handlers
    usual = signal.signal(signal.SIGTERM, _interrupt) if main else None
    try:
        crashed = _share(plan, source, prepare, Progress(plan))
    finally:
        if main:
            signal.signal(signal.SIGTERM, usual)
    return crashed + sum((plan.folder(job) / FAILURE).exists() for job in plan.ready())


def _share(plan: Plan, source: Source, prepare: Prepare, progress: Progress) -> int:
    """All runs, by this process or by several; how many of these crashed."""
    args, jobs = plan.args, jobs_of(plan.args)
    threads = args.threads or max(1, cores() // jobs)
    if jobs == 1:
        torch.set_num_threads(threads)
        _work(plan, source, 0, progress.take)
        return 0
    forget_weights()  # each process has its own
    context = multiprocessing.get_context('spawn')
    outcomes = context.Queue()
    workers = [
        context.Process(target=_worker, args=(args, prepare, index, threads, outcomes, os.getpid()))
        for index in range(jobs)
    ]
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            progress.take_all(outcomes)
        progress.take_all(outcomes)
        return sum(bool(worker.exitcode) for worker in workers)
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _worker(args: Namespace, prepare: Prepare, index: int, threads: int, outcomes: Any, parent: int) -> None:
    """Body of a process."""
    setup()
    torch.set_num_threads(threads)
    import_modules(args)
    _work(*prepare(args), index, lambda *outcome: outcomes.put(outcome), parent)


def _work(plan: Plan, source: Source, index: int, tell: Callable[[Job, str], None], parent: int | None = None) -> None:
    """Take runs until none is left, or the parent is gone: whoever killed it wants no more of them."""
    device = device_of(plan.args, index)
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    images = Images(plan.args, source)
    while parent is None or os.getppid() == parent:
        waiting = False
        for job in plan.ready():
            if not _is_open(plan, job):
                continue
            waiting = True
            if _attempt(plan, job, images, device, tell):
                break
        else:
            if not waiting:
                return
            time.sleep(POLL)  # other processes have them all


def _is_open(plan: Plan, job: Job) -> bool:
    """Whether a run is still to be tried."""
    return not plan.result(job) and not (plan.folder(job) / FAILURE).exists()


def _attempt(plan: Plan, job: Job, images: Images, device: torch.device, tell: Callable[[Job, str], None]) -> bool:
    """Do a run unless another process has it, or had it; whether it was done or failed here."""
    folder = plan.folder(job)
    folder.mkdir(parents=True, exist_ok=True)
    free, held = lock(folder / '.lock')
    if not free or not _is_open(plan, job):
        unlock(held)
        return False
    try:
        task = next(task for task in plan.tasks if task.name == job.task)
        result, predictions, model = finetune(
            plan.args, job, task.classes, lambda *size: images.get(task, job, *size), device
        )
        if plan.args.save_models and job.stage == 'final':
            save_model(plan.args, job, model, folder)
        record(plan, job, {**result, 'data': images.data}, predictions)
        tell(job, 'DIVERGED' if result['diverged'] else f'{result["top1"]:.2f}')
    except Exception as err:  # one run must not end the others; it is named, kept on file, and tried again next time
        write_text(folder / FAILURE, traceback.format_exc())
        tell(job, f'FAILED {type(err).__name__}: {err}')
    finally:
        unlock(held)
    return True


class Images:
    """The splits of the last run, for the next, which mostly wants the same."""

    def __init__(self, args: Namespace, source: Source) -> None:
        self.args, self.source, self.kept = args, source, (None, None)
        self.data = ''  # what `fingerprint` says of them

    def get(
        self, task: Task, job: Job, size: tuple[int, int], interpolation: str
    ) -> tuple[Tensors, Tensors | Streamed]:
        """Images to learn from, and to measure on."""
        key = (self.source.key(task, job.stage, job.seed), size, interpolation)
        if key != self.kept[0]:
            self.kept = (None, None)  # make room first
            train, measured = self.source.open(task, job.stage, job.seed)
            self.data = fingerprint(self.source, train, measured)
            limit = len(train) * size[0] * size[1] * 4 + 1  # the training split is always kept
            read = load(train, size, interpolation, self.args.workers, limit)
            self.kept = (key, (read, load(measured, size, interpolation, self.args.workers)))
        return self.kept[1]


class Progress:
    """Lines on a protocol under way; what other machines do in the same folder counts, too."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.before, self.start = len(plan.results()), time.monotonic()
        log.info('%d runs, %d of them done before', plan.total(), self.before)

    def take(self, job: Job, outcome: str) -> None:
        """Note that a run has ended, and say so."""
        done, total = len(self.plan.results()), self.plan.total()
        each = (time.monotonic() - self.start) / max(done - self.before, 1)
        run = f'{job.task}, {job.arm}, {job.stage}, lr {job.lr:g}, seed {job.seed}'
        log.info('[%d/%d] left %s  %s: %s', done, total, clock(each * (total - done)), run, outcome)

    def take_all(self, outcomes: Any) -> None:
        """What has come from other processes, waiting a little for the first."""
        try:
            while True:
                self.take(*outcomes.get(timeout=POLL))
        except queue.Empty:
            pass
