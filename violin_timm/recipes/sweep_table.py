"""The table of a sweep: what each arm reached over its seeds, how far it is from the baseline, and what failed.

`rows` computes, `as_csv` and `as_markdown` write. Nothing is left out: a failed or missing run is counted beside the
numbers that it is not part of, and the values that were not selected stand below those that were.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from ..evals.statistics import Difference, Summary, paired_difference, summarise
from . import markdown
from .sweep_points import Point, Sweep

__all__ = ['Outcome', 'Row', 'as_csv', 'as_markdown', 'rows']


@dataclass(frozen=True)
class Outcome:
    """What became of a point.

    Attributes:
        values: The numbers of its result, by key; None while there is none.
        failure: Why there is none, if it was tried.
    """

    values: Mapping[str, float] | None = None
    failure: str | None = None


@dataclass
class Row:
    """An arm with one choice of the selected parameters.

    Attributes:
        arm: Its name.
        choice: Values of the selected parameters; empty without selection.
        chosen: Whether this choice stands for the arm.
        values: By key of the report, then by seed.
        failed: Runs that failed.
        missing: Runs that have not ended.
        summaries: By key of the report, where a run has ended.
        differences: From the baseline, by key of the report; of chosen rows other than the baseline's.
    """

    arm: str
    choice: str
    chosen: bool = False
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    failed: int = 0
    missing: int = 0
    summaries: dict[str, Summary] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Runs that ended with a result."""
        return max(map(len, self.values.values()), default=0)

    def add(self, point: Point, outcome: Outcome) -> None:
        """Take in one run."""
        self.failed += outcome.failure is not None
        self.missing += outcome.failure is None and outcome.values is None
        for key, value in (outcome.values or {}).items():
            self.values.setdefault(key, {})[point.seed] = value


def rows(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> list[Row]:
    """The table's rows in the file's order, one for each arm and choice.

    An arm's choice is the one whose mean of `select_by` is best among those with the most finished seeds: a value that
    diverges for some seeds is not preferred for the others.

    Args:
        sweep: The sweep.
        outcomes: By name of the point.
    """
    table: dict[tuple[str, str], Row] = {}
    for point in sweep.points:
        row = table.setdefault((point.arm, point.choice), Row(point.arm, point.choice))
        row.add(point, outcomes[point.name])
    for row in table.values():
        row.summaries = {key: summarise([*seeds.values()]) for key, seeds in row.values.items()}
    for arm in dict.fromkeys(row.arm for row in table.values()):
        if chosen := _choose([row for row in table.values() if row.arm == arm], sweep):
            chosen.chosen = True
    _compare([row for row in table.values() if row.chosen], sweep)
    return list(table.values())


def _choose(candidates: list[Row], sweep: Sweep) -> Row | None:
    """The row that stands for its arm; None if there is more than one and no run has ended."""
    if len(candidates) == 1:
        return candidates[0]
    key, sign = sweep.table.select_by, 1 if sweep.maximize else -1
    most = max(row.count for row in candidates)
    candidates = [row for row in candidates if row.count == most and key in row.summaries]
    return max(candidates, key=lambda row: sign * row.summaries[key].mean, default=None)


def _compare(chosen: list[Row], sweep: Sweep) -> None:
    baseline = next((row for row in chosen if row.arm == sweep.table.baseline), None)
    for row in chosen if baseline else []:
        for key in sweep.table.report if row is not baseline else []:
            difference = paired_difference(row.values.get(key, {}), baseline.values.get(key, {}))
            if difference:
                row.differences[key] = difference


def as_csv(sweep: Sweep, table: Sequence[Row]) -> str:
    """Every row, numbers in full."""
    file = io.StringIO()
    head = ['arm', 'choice', 'chosen', 'seeds', 'failed', 'missing']
    parts = ('mean', 'std', 'min')
    against = ('difference', 'low', 'high', 'pairs') if sweep.table.baseline else ()
    writer = csv.writer(file, lineterminator='\n')
    writer.writerow(head + [f'{key} {part}' for key in sweep.table.report for part in (*parts, *against)])
    for row in table:
        cells: list[Any] = [row.arm, row.choice, 'yes' if row.chosen else 'no', row.count, row.failed, row.missing]
        for key in sweep.table.report:
            cells += [getattr(row.summaries.get(key), part, None) for part in parts]
            if against:
                cells += [getattr(row.differences.get(key), part, None) for part in ('mean', *against[1:])]
        writer.writerow(['' if cell is None else cell for cell in cells])
    return file.getvalue()


def as_markdown(sweep: Sweep, table: Sequence[Row], outcomes: Mapping[str, Outcome]) -> str:
    """The chosen rows, then all values of the selected parameters, then the failures."""
    settings = sweep.table
    done = sum(outcome.values is not None for outcome in outcomes.values())
    text = [f'# {sweep.path.stem}', f'{done} of {len(sweep.points)} runs finished.']
    select = ', '.join(settings.select)
    if select:
        goal = 'highest' if sweep.maximize else 'lowest'
        text.append(f'{select}: for each arm the value with the {goal} mean {settings.select_by} over seeds.')
    if settings.baseline:
        text.append(
            f'Differences: mean over the seeds shared with {settings.baseline}, [95 % t interval], number of pairs.'
        )
    chosen = [row for row in table if row.chosen]
    text.append(_grid(chosen, sweep, bool(settings.baseline)))
    if select:
        text += [f'## All values of {select}', _grid(table, sweep, False)]
    failures = [f'- `{name}`: {outcome.failure}' for name, outcome in outcomes.items() if outcome.failure]
    if failures:
        text += ['## Failed runs', '\n'.join(failures)]
    return '\n\n'.join(text) + '\n'


def _grid(table: Sequence[Row], sweep: Sweep, compare: bool) -> str:
    """A Markdown table, in columns of even width."""
    settings = sweep.table
    head = ['arm', *([', '.join(settings.select)] if settings.select else []), 'seeds', 'failed', 'missing']
    for key in settings.report:
        head += [f'{key} mean', 'std', 'min'] + ([f'minus {settings.baseline}'] if compare else [])
    return markdown.table(head, [_cells(row, sweep, compare) for row in table])


def _cells(row: Row, sweep: Sweep, compare: bool) -> list[str]:
    mark = ' *' if row.chosen and sweep.table.select and not compare else ''
    choice = [row.choice + mark] if sweep.table.select else []
    cells = [row.arm, *choice, str(row.count), str(row.failed), str(row.missing)]
    for key in sweep.table.report:
        summary = row.summaries.get(key)
        places = 2 if summary and abs(summary.mean) >= 10 else 4
        parts = [getattr(summary, part, None) for part in ('mean', 'std', 'min')]
        cells += ['-' if part is None else f'{part:.{places}f}' for part in parts]
        if compare:
            cells.append(markdown.difference(row.differences.get(key), places))
    return cells
