"""Markdown that the tables of sweeps and protocols share."""

from __future__ import annotations

from typing import Sequence

from ..evals.statistics import Difference

__all__ = ['difference', 'table']


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in columns of even width; a pipe within a cell is escaped.

    Args:
        head: Names of the columns.
        lines: Cells of each line, as many as there are columns.
    """
    cells = [[cell.replace('|', r'\|') for cell in line] for line in (head, *lines)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    padded = ['| ' + ' | '.join(cell.ljust(width) for cell, width in zip(line, widths)) + ' |' for line in cells]
    padded.insert(1, '|' + '|'.join('-' * (width + 2) for width in widths) + '|')
    return '\n'.join(padded)


def difference(of: Difference | None, places: int) -> str:
    """`mean [low, high], pairs`; without the interval where there is one pair, and `-` where there is none."""
    if of is None:
        return '-'
    mean, low, high = ('' if number is None else f'{number:+.{places}f}' for number in (of.mean, of.low, of.high))
    return f'{mean} [{low}, {high}], {of.pairs}' if low else f'{mean}, {of.pairs}'
