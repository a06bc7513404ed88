"""The runs of a sweep: their folders, and the processes that fill them.

A point counts as done by a whole `result.json` alone, which training writes last and in one piece. Beside it lie
`point.json` (parameters and settings), `log.txt` (of all attempts) and, after a failure, `failure.json`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, NoReturn, Sequence

from ..engine.checkpoints import write_text
from ..engine.config import PACKAGE, ConfigError
from ..engine.logging import clock
from ..engine.runs import finished, lock, read_json, unlock
from .sweep_points import Point, Sweep
from .sweep_table import Outcome

__all__ = ['Runner', 'check_same', 'outcome']

TRAIN = (sys.executable, '-m', 'violin_timm', 'train')
# Settings that leave a result what it is, and so may differ between a run and its continuation.
HARMLESS = frozenset(
    ('output', 'experiment', 'resume', 'log_wandb', 'wandb_project', 'wandb_tags', 'wandb_resume_id', 'log_interval')
)
TAIL = 2000  # bytes of a failed run's log that are looked at
POLL = 0.1  # seconds


def outcome(folder: Path, keys: Sequence[str]) -> Outcome:
    """What became of the run in `folder`, with the numbers that `keys` name in its result."""
    if not finished(folder):
        failure = read_json(folder / 'failure.json')
        return Outcome(failure=f'{failure["status"]}: {failure["log"][-1]}' if failure else None)
    result, values = read_json(folder / 'result.json'), {}
    for key in keys:
        value: Any = result
        for part in key.split('.'):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return Outcome(failure=f'result.json has no number {key!r}; its keys are {", ".join(result)}')
        values[key] = value
    return Outcome(values)


def _identity(point: Point) -> dict[str, Any]:
    """The settings that make the result what it is."""
    settings = {key: value for key, value in point.settings.items() if key not in HARMLESS}
    return json.loads(json.dumps(settings))


def check_same(point: Point, folder: Path) -> None:
    """Refuse a folder that holds the point with other settings, of an edited config or sweep file.

    Raises:
        ConfigError: It does; the message names the first that differs.
    """
    before = (read_json(folder / 'point.json') or {}).get('settings', {})
    for key, value in _identity(point).items():
        if key in before and before[key] != value:
            raise ConfigError(
                f'output: {folder} was run with {key}={before[key]!r}, and is now to have {value!r}; '
                'take another --output, or delete the folder'
            )


@dataclass
class Child:
    """A running training."""

    point: Point
    folder: Path
    process: subprocess.Popen
    lock: int | None
    log_start: int  # bytes of the log that earlier attempts wrote
    began: float

    def failure(self) -> dict[str, Any]:
        """How it ended, and the last lines of its log."""
        code = self.process.returncode
        status = f'exit status {code}' if code >= 0 else f'killed by {signal.Signals(-code).name}'
        with open(self.folder / 'log.txt', 'rb') as file:
            file.seek(max(self.log_start, os.path.getsize(file.name) - TAIL))
            lines = file.read().decode(errors='replace').split('\n')
        return {'status': status, 'code': code, 'log': [line for line in lines if line.strip()][-10:] or ['no output']}


class Runner:
    """Runs the points of a sweep, some at a time."""

    def __init__(self, sweep: Sweep, output: Path, jobs: int, threads: int, train: Sequence[str] = TRAIN) -> None:
        """
        Args:
            sweep: The sweep.
            output: Folder of its runs.
            jobs: Number of runs at a time.
            threads: CPU threads of each.
            train: Command that trains, given the arguments of `violin train`.
        """
        self.runs, self.jobs, self.threads, self.train = output / 'runs', jobs, threads, train
        self.total = len(sweep.points)
        self.waiting = deque(point for point in sweep.points if not finished(self.runs / point.name))
        self.before = self.total - len(self.waiting)
        self.children: list[Child] = []
        self.durations: list[float] = []
        self.failed, self.elsewhere = 0, 0

    def run(self) -> None:
        """Until no point is left. SIGTERM and Ctrl-C stop the runs, which the next call continues."""
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            self._say('start')
            while self.waiting or self.children:
                self._fill()
                time.sleep(POLL)
                for child in [child for child in self.children if child.process.poll() is not None]:
                    self._end(child)
        finally:
            self._stop()
            signal.signal(signal.SIGTERM, previous)

    def _fill(self) -> None:
        """Start points while there is room; those locked by another process go to the end of the queue."""
        for _ in range(len(self.waiting)):
            if len(self.children) >= self.jobs:
                return
            point = self.waiting.popleft()
            folder = self.runs / point.name
            folder.mkdir(parents=True, exist_ok=True)
            free, held = lock(folder / '.lock')
            if not free:
                self.waiting.append(point)
            elif finished(folder):
                self.elsewhere += 1
                unlock(held)
                self._say(f'done elsewhere  {point.name}')
            else:
                self.children.append(self._start(point, folder, held))

    def _start(self, point: Point, folder: Path, held: int | None) -> Child:
        (folder / 'failure.json').unlink(missing_ok=True)
        record = {'parameters': point.parameters, 'arguments': point.arguments, 'settings': _identity(point)}
        write_text(folder / 'point.json', json.dumps(record, indent=2) + '\n')
        own = ['--output', str(self.runs), '--experiment', point.name, '--resume', 'auto']
        with open(folder / 'log.txt', 'ab') as log:
            start = log.tell()
            process = subprocess.Popen(
                [*self.train, *point.arguments, *own],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(self.threads),
                pass_fds=() if held is None else (held,),
            )
        return Child(point, folder, process, held, start, time.monotonic())

    def _end(self, child: Child) -> None:
        """Record how a run ended, and make room."""
        self.children.remove(child)
        if child.process.returncode == 0 and finished(child.folder):
            self.durations.append(time.monotonic() - child.began)
            what = 'done'
        else:
            failure = child.failure()
            write_text(child.folder / 'failure.json', json.dumps(failure, indent=2) + '\n')
            self.failed += 1
            what = f'FAILED ({failure["status"]}: {failure["log"][-1]})'
        unlock(child.lock)
        self._say(f'{what}  {child.point.name}')

    def _say(self, what: str) -> None:
        """A progress line: counts, time left by the mean duration so far, and what happened."""
        done, left = len(self.durations) + self.before + self.elsewhere, len(self.waiting) + len(self.children)
        mean = sum(self.durations) / len(self.durations) if self.durations else None
        remaining = 'unknown' if mean is None else clock(mean * left / self.jobs)
        print(
            f'[{done}/{self.total}] {self.before} before, {self.failed} failed, {left} to go, left {remaining}  {what}',
            flush=True,
        )

    def _stop(self) -> None:
        """End what still runs, softly first."""
        for child in self.children:
            child.process.terminate()
        for child in self.children:
            try:
                child.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            unlock(child.lock)


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _environment(threads: int) -> dict[str, str]:
    """The environment of a run: its share of the CPU, and this package also where it is not installed."""
    limits = dict.fromkeys(('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS'), str(threads))
    environment = {**os.environ, **limits, 'PYTHONUNBUFFERED': '1'}
    if (PACKAGE.parent / 'pyproject.toml').is_file():
        paths = [str(PACKAGE.parent), os.environ.get('PYTHONPATH', '')]
        environment['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
    return environment
