"""Files that are whole at every moment: written beside their place, brought to the disk, and renamed into it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any, Callable


def write_atomically(path: str | Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Create or replace `path` with what `write` puts into a binary file; until that is on disk the old one stays.

    Args:
        path: File to write.
        write: Given the open file. If it raises, `path` is untouched and nothing is left behind.
    """
    path = Path(path)
    temporary = path.with_name(f'.{path.name}.tmp')
    try:
        with open(temporary, 'wb') as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """`write_atomically` for UTF-8 text."""
    write_atomically(path, lambda file: file.write(text.encode()))


def rename(source: Path, target: Path) -> None:
    """Rename over whatever has that name, and see the new name on disk."""
    os.replace(source, target)
    if os.name == 'posix':  # the new name itself must reach the disk, too
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
