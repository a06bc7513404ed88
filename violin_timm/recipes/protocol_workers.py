"""The processes that do a protocol's runs: each takes the next one that is free, until none is left."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
import traceback
from argparse import Namespace
from typing import Any, Callable, NoReturn

import torch

from ..data.tensors import Streamed, Tensors, load
from ..data.vtab import Task
from ..engine.build import import_modules
from ..engine.checkpoints import write_text
from ..engine.distributed import start
from ..engine.logging import clock, log, setup
from ..engine.runs import cores, lock, unlock
from .finetune import Job, finetune
from .protocol import Plan, Source, record
from .protocol_models import save_model

__all__ = ['jobs_of', 'run_all']

POLL = 0.5  # seconds
FAILURE = 'failure.txt'
Prepare = Callable[[Namespace], tuple[Plan, Source]]


def jobs_of(args: Namespace) -> int:
    """Runs at a time."""
    if args.jobs:
        return args.jobs
    return max(1, torch.cuda.device_count()) if torch.device(args.device).type == 'cuda' else 1


def run_all(args: Namespace, prepare: Prepare) -> int:
    """Do all runs that are not done; progress goes to the log.

    Args:
        args: Settings of the protocol.
        prepare: A module's function that makes plan and source from them, called in each process.

    Returns:
        The number of runs that failed.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the runs under way are lost, all others kept.
    """
    plan, _ = prepare(args)
    for job in plan.ready():
        (plan.folder(job) / FAILURE).unlink(missing_ok=True)
    progress, jobs = Progress(plan), jobs_of(args)
    threads = args.threads or max(1, cores() // jobs)
    if jobs == 1:
        torch.set_num_threads(threads)
        _work(args, prepare, 0, progress.take)
        return progress.failed
    context = multiprocessing.get_context('spawn')
    outcomes = context.Queue()
    workers = [
        context.Process(target=_worker, args=(args, prepare, index, threads, outcomes, os.getpid()))
        for index in range(jobs)
    ]
    usual = signal.signal(signal.SIGTERM, _interrupt)
    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            progress.take_all(outcomes)
        progress.take_all(outcomes)
        crashed = [worker for worker in workers if worker.exitcode]
        return progress.failed + len(crashed)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
        signal.signal(signal.SIGTERM, usual)


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _worker(args: Namespace, prepare: Prepare, index: int, threads: int, outcomes: Any, parent: int) -> None:
    """Body of a process."""
    setup()
    torch.set_num_threads(threads)
    _work(args, prepare, index, lambda *outcome: outcomes.put(outcome), parent)


def _work(
    args: Namespace, prepare: Prepare, index: int, tell: Callable[[Job, str], None], parent: int | None = None
) -> None:
    """Take runs until none is left, or the parent is gone: whoever killed it wants no more of them."""
    import_modules(args)
    device = start(args.device).device
    if device.type == 'cuda' and args.device == 'cuda':
        device = torch.device('cuda', index % torch.cuda.device_count())
        torch.cuda.set_device(device)
    plan, source = prepare(args)
    images = Images(args, source)
    while parent is None or os.getppid() == parent:
        waiting = 0
        for job in plan.ready():
            waiting += _is_open(plan, job)
            if _is_open(plan, job) and _attempt(plan, job, images, device, tell):
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
        record(plan, job, result, predictions)
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

    def get(
        self, task: Task, job: Job, size: tuple[int, int], interpolation: str
    ) -> tuple[Tensors, Tensors | Streamed]:
        """Images to learn from, and to measure on."""
        key = (self.source.key(task, job.stage, job.seed), size, interpolation)
        if key != self.kept[0]:
            self.kept = (None, None)  # make room first
            train, measured = self.source.open(task, job.stage, job.seed)
            limit = len(train) * size[0] * size[1] * 4 + 1  # the training split is always kept
            read = load(train, size, interpolation, self.args.workers, limit)
            self.kept = (key, (read, load(measured, size, interpolation, self.args.workers)))
        return self.kept[1]


class Progress:
    """Lines on a protocol under way; what other machines do in the same folder counts, too."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.failed = plan, 0
        self.before, self.start = len(plan.results()), time.monotonic()
        log.info('%d runs, %d of them done before', plan.total(), self.before)

    def take(self, job: Job, outcome: str) -> None:
        """Note that a run has ended, and say so."""
        self.failed += outcome.startswith('FAILED')
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
