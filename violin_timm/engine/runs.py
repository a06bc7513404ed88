"""Folders of many runs, which several processes fill: what is finished, and who is at it.

A run counts as finished by a whole `result.json` alone, which is written last and at once. While a process works on a
run it holds a lock on the folder, which the system takes back when the process dies, however it dies.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows, where two processes must not share an output folder
    fcntl = None

__all__ = ['cores', 'finished', 'lock', 'read_json', 'unlock']

RESULT = 'result.json'


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None if there is none, or only a part of one."""
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def finished(folder: Path) -> bool:
    """Whether a run has ended well: its `result.json` is there and whole."""
    return 'model' in (read_json(folder / RESULT) or {})


def lock(path: Path) -> tuple[bool, int | None]:
    """Whether the lock is ours, and its descriptor. A child that inherits it keeps the lock while it lives.

    Raises:
        OSError: The file system of `path` has no locks.
    """
    if fcntl is None:
        return True, None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(descriptor)
        if err.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False, None
        raise OSError(err.errno, f'{os.strerror(err.errno)}: no lock to be had on this file system', str(path)) from err
    return True, descriptor


def unlock(descriptor: int | None) -> None:
    """Give a lock back."""
    if descriptor is not None:
        os.close(descriptor)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
