"""Accuracies of several commands in one table, kept in a JSON file between them."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from ..engine.checkpoints import write_text

HEADINGS = ('evaluation', 'of', 'on', 'top-1 %', 'top-5 %')

Row = tuple[str, str, str, float, float]


def record(path: str, *row: str | float) -> None:
    """Print a row, and add it to the table in `path`, in place of one of the same evaluation.

    Args:
        path: JSON file; empty for none.
        row: As `HEADINGS` has it.
    """
    print('  '.join(f'{value:.2f}' if isinstance(value, float) else value for value in row))
    if path:
        rows = [old for old in read(path) if old[:3] != tuple(row[:3])] + [tuple(row)]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(rows, indent=1) + '\n')


def read(path: str) -> list[Row]:
    """Rows of a table; none if there is no such file."""
    if not Path(path).exists():
        return []
    return [tuple(row) for row in json.loads(Path(path).read_text())]


def table(rows: list[Row]) -> str:
    """Rows in aligned columns below their headings."""
    cells = [HEADINGS, *((*row[:3], *(f'{value:.2f}' for value in row[3:])) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEADINGS))]
    return '\n'.join(
        '  '.join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in cells
    )


def title(args: Namespace) -> str:
    """What the table calls the model."""
    if args.title:
        return args.title
    return f'{args.checkpoint}, {args.weights}' if args.checkpoint else args.model


def show(args: Namespace) -> None:
    """Print the table in `args.results`, where `args.table` asks for it."""
    if args.table and args.results:
        print(f'\n{table(read(args.results))}')
