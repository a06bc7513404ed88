"""How a run ends before its time: by a failure that it names, or by SIGTERM, once it has saved."""

from __future__ import annotations

import atexit
import multiprocessing.util  # before ours below: what is registered last runs first
import signal
import threading
from types import FrameType, TracebackType

__all__ = ['Interrupted', 'Terminate', 'TrainingError', 'leave_to_parent']


class TrainingError(RuntimeError):
    """Training cannot go on."""

    status = 1  # exit status of a command that it ends


class Interrupted(RuntimeError):
    """SIGTERM ended the run; what it had done is saved."""

    status = 128 + signal.SIGTERM  # as shells have it


class Terminate:
    """Context in which SIGTERM only sets `received`, for the loop to see between two updates.

    Schedulers send SIGTERM before they take a machine away, some twice, and torchrun passes it on.
    """

    received = False

    def __enter__(self) -> Terminate:
        self.usual = None
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
            self.usual = signal.signal(signal.SIGTERM, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.usual is not None:
            signal.signal(signal.SIGTERM, self.usual)


def leave_to_parent(worker: int) -> None:
    """First thing in a loader worker: SIGTERM sent to the whole process group is the training process's to answer."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """Kill loader workers that are left at exit, where Python would send SIGTERM and wait for them for ever."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
