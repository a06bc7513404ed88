"""The page of a fine-tuning protocol, in Markdown and in CSV.

`markdown` writes all sections, `rows` and `as_csv` every final number in full. They are pure functions of the results.
A protocol that is not finished gives a page that says what is missing: no average stands for fewer tasks than it names.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from ..engine.config import ConfigError
from ..evals.statistics import Difference, paired_difference, summarise
from . import markdown as md
from .protocol_details import movement, parameters, predicted
from .protocol_statistics import BEST, STAGES, Line, Protocol, Run, choose_lr, score

if TYPE_CHECKING:
    import numpy as np

    from ..data.vtab import Task

__all__ = ['as_csv', 'choose_lr', 'markdown', 'rows']


def markdown(
    results: Sequence[Run],
    arms: Sequence[str],
    tasks: Sequence[Task],
    lrs: Sequence[float],
    tune_seeds: Sequence[int],
    final_seeds: Sequence[int],
    baselines: Sequence[str],
    predictions: Callable[[str, str, int], np.ndarray | None] | None,
    title: str,
    facts: Sequence[str] = (),
) -> str:
    """The whole page; a section without content is left out.

    Args:
        results: Of the runs, each as its `result.json` has it.
        arms: Names, in the order of the columns.
        tasks: With `name` and `group`, in the order of the lines.
        lrs: Learning rates to choose from.
        tune_seeds: Seeds of each rate; a single rate is not tuned.
        final_seeds: Seeds of the chosen rate.
        baselines: Arms that the others are compared with; predictions are compared with the first.
        predictions: (arm, task, final seed) to the predicted classes of the test images `[N]`, or to None.
        title: Heading.
        facts: Paragraphs below it: the command, the machine.

    Raises:
        ConfigError: A baseline is no arm, or what `Protocol` refuses.
        ImportError: Seeds are compared, and scipy is not installed.
    """
    protocol = Protocol(results, arms, tasks, lrs, tune_seeds, final_seeds)
    _check_baselines(protocol, baselines)
    blocks = [f'# {title}', *facts, *_runs(protocol), *_accuracy(protocol), *_differences(protocol, baselines)]
    blocks += [*_best(protocol), *_rates(protocol), *movement(protocol)]
    if predictions and baselines:
        blocks += predicted(protocol, baselines[0], predictions)
    return '\n\n'.join([*blocks, *parameters(protocol)]) + '\n'


def rows(
    results: Sequence[Run],
    arms: Sequence[str],
    tasks: Sequence[Task],
    lrs: Sequence[float],
    tune_seeds: Sequence[int],
    final_seeds: Sequence[int],
    baselines: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """One line for each arm and task, and for each arm and average. Arguments and errors are those of `markdown`.

    Columns: arm, task (or the average's name), group and lr (None for an average), seeds (how many are in the mean),
    missing and diverged (runs), mean, std, with more than three seeds `best 3 mean`, for each baseline `minus NAME`
    and, after it, ` low`, ` high`, ` pairs`, and `seed N` for each seed. None where there is no number.
    """
    protocol = Protocol(results, arms, tasks, lrs, tune_seeds, final_seeds)
    _check_baselines(protocol, baselines)
    return [_row(protocol, arm, line, baselines) for arm in arms for line in protocol.lines]


def as_csv(
    results: Sequence[Run],
    arms: Sequence[str],
    tasks: Sequence[Task],
    lrs: Sequence[float],
    tune_seeds: Sequence[int],
    final_seeds: Sequence[int],
    baselines: Sequence[str] = (),
) -> str:
    """`rows` as CSV with a head; an empty cell for None."""
    table = rows(results, arms, tasks, lrs, tune_seeds, final_seeds, baselines)
    file = io.StringIO()
    writer = csv.DictWriter(file, list(table[0]), lineterminator='\n')
    writer.writeheader()
    writer.writerows(table)
    return file.getvalue()


def _row(protocol: Protocol, arm: str, line: Line, baselines: Sequence[str]) -> dict[str, Any]:
    values, runs = protocol.values(arm, line), protocol.line_finals(arm, line)
    summary = summarise([*values.values()]) if values else None
    row: dict[str, Any] = {
        'arm': arm,
        'task': line.name,
        'group': line.group,
        'lr': None if line.group is None else protocol.choices[arm, line.name],
        'seeds': len(values),
        'missing': len(protocol.final_seeds) * sum(map(len, line.parts)) - len(runs),
        'diverged': _diverged(runs),
        'mean': getattr(summary, 'mean', None),
        'std': getattr(summary, 'std', None),
    }
    if len(protocol.final_seeds) > BEST:
        row[f'best {BEST} mean'] = protocol.best(arm, line)
    for baseline in baselines:
        against = None if arm == baseline else _difference(protocol, arm, baseline, line)
        names = {f'minus {baseline}': 'mean'} | {f'minus {baseline} {part}': part for part in ('low', 'high', 'pairs')}
        row |= {name: getattr(against, part, None) for name, part in names.items()}
    return row | {f'seed {seed}': values.get(seed) for seed in protocol.final_seeds}


def _runs(protocol: Protocol) -> list[str]:
    """How many runs there are, are missing and diverged."""
    tasks = [(arm, task.name) for arm in protocol.arms for task in protocol.tasks]
    tune = [run for of in tasks for lr in protocol.lrs for run in protocol.tuning(*of, lr).values()]
    final = [run for of in tasks for run in protocol.finals(*of).values()]
    rates = len(protocol.lrs) if len(protocol.lrs) > 1 else 0
    planned = (rates * len(protocol.tune_seeds) * len(tasks), len(protocol.final_seeds) * len(tasks))
    lines = [
        [stage, str(count), str(len(runs)), str(count - len(runs)), str(_diverged(runs))]
        for stage, count, runs in zip(STAGES, planned, (tune, final))
    ]
    done, missing = len(tune) + len(final), sum(planned) - len(tune) - len(final)
    text = f'{done} of {sum(planned)} runs finished'
    text += f'; {missing} {_are(missing)} missing, and this page is partial.' if missing else '.'
    if diverged := _diverged(tune + final):
        text += f' {diverged} diverged: such a run counts with an accuracy of 0, when a rate is chosen and in the test.'
    if other := len(protocol.runs) - done:
        text += (
            f' {other} more {_are(other)} left out: of arms, tasks, rates or seeds that are not named here, or final at'
            ' a rate that is not the chosen one.'
        )
    return [text, md.table(['stage', 'runs', 'finished', 'missing', 'diverged'], lines)]


def _accuracy(protocol: Protocol) -> list[str]:
    lines = [
        [line.name, line.group or '', *(_final_cell(protocol, arm, line) for arm in protocol.arms)]
        for line in protocol.lines
    ]
    if not _any_number(lines, 2):
        return []
    rate = 'the rate chosen by tuning' if len(protocol.lrs) > 1 else f'a rate of {protocol.lrs[0]:g}'
    text = (
        f'Top-1 in percent, at {rate}: mean (standard deviation) over the final seeds. The deviation'
        " of an average is that of the seeds' averages. In means of tasks each task weighs alike, in the mean of groups"
        ' each group. An average is given where all of its runs have finished, and is `-` elsewhere.'
    )
    return ['## Test accuracy', text, md.table(['task', 'group', *protocol.arms], lines)]


def _final_cell(protocol: Protocol, arm: str, line: Line) -> str:
    values = protocol.values(arm, line)
    return _cell([*values.values()], len(protocol.final_seeds), _diverged(protocol.line_finals(arm, line)))


def _cell(values: Sequence[float], planned: int, diverged: int = 0) -> str:
    """`mean (std)`, and what there is to say of the runs behind it."""
    if not values:
        return '-'
    of = summarise(values)
    text = f'{of.mean:.2f}' if of.std is None else f'{of.mean:.2f} ({of.std:.2f})'
    text += f', {of.count} of {planned}' if of.count < planned else ''
    return text + (f', {diverged} diverged' if diverged else '')


def _differences(protocol: Protocol, baselines: Sequence[str]) -> list[str]:
    """A section for each baseline. How many intervals the page has is known once all are computed."""
    tables = {}
    for baseline in baselines:
        others = [arm for arm in protocol.arms if arm != baseline]
        of = [[_difference(protocol, arm, baseline, line) for arm in others] for line in protocol.lines]
        if any(difference for line in of for difference in line):
            tables[baseline] = others, of
    counts = {baseline: _intervals(of) for baseline, (_, of) in tables.items()}
    blocks = []
    for baseline, (others, of) in tables.items():
        lines = [[line.name, *(md.difference(cell, 2) for cell in cells)] for line, cells in zip(protocol.lines, of)]
        text = 'Points of top-1: mean of the differences between runs of one seed, [95 % t interval], number of pairs.'
        if counts[baseline]:
            text += (
                ' Intervals are over training seeds, with the data and their split fixed: they say nothing of another'
                f' draw of images. Intervals here: {counts[baseline]}, on this page: {sum(counts.values())},'
                ' uncorrected for their number; without any effect one in twenty would exclude zero.'
            )
        blocks += [f'## Difference from {baseline}', text, md.table(['task', *others], lines)]
    return blocks


def _difference(protocol: Protocol, arm: str, baseline: str, line: Line) -> Difference | None:
    return paired_difference(protocol.values(arm, line), protocol.values(baseline, line))


def _intervals(of: Sequence[Sequence[Difference | None]]) -> int:
    return sum(cell is not None and cell.low is not None for line in of for cell in line)


def _best(protocol: Protocol) -> list[str]:
    if len(protocol.final_seeds) <= BEST:
        return []
    shown = [line for line in protocol.lines if line.group is not None or line.name == 'mean over tasks']
    of = [[protocol.best(arm, line) for arm in protocol.arms] for line in shown]
    lines = [[line.name, *('-' if value is None else f'{value:.2f}' for value in row)] for line, row in zip(shown, of)]
    if not _any_number(lines, 1):
        return []
    text = (
        'As the paper averages. The seeds are those with the highest test accuracy, for each arm and task separately:'
        ' the numbers are too high, and by more for an arm that varies more. `-` where a seed is missing.'
    )
    heading = f'## Mean of the best {BEST} of {len(protocol.final_seeds)} seeds (chosen on the test set)'
    return [heading, text, md.table(['task', *protocol.arms], lines)]


def _rates(protocol: Protocol) -> list[str]:
    """Every rate of every arm and task, with the chosen one marked."""
    lines = []
    for task in protocol.tasks:
        for arm in protocol.arms:
            lines.append([task.name, arm, *(_rate_cell(protocol, arm, task.name, lr) for lr in protocol.lrs)])
    if not _any_number(lines, 2):
        return []
    text = (
        'Top-1 in percent on the tuning images: mean (standard deviation) over the tuning seeds. `*` marks the chosen'
        ' rate, the best mean; `(edge)` a choice at an end of the grid, beyond which a better one may lie.'
    )
    return ['## Learning rates', text, md.table(['task', 'arm', *(f'{lr:g}' for lr in protocol.lrs)], lines)]


def _rate_cell(protocol: Protocol, arm: str, task: str, lr: float) -> str:
    runs = [*protocol.tuning(arm, task, lr).values()]
    text = _cell([score(run) for run in runs], len(protocol.tune_seeds), _diverged(runs))
    if not runs or protocol.choices[arm, task] != lr:
        return text
    edge = len(protocol.lrs) > 1 and lr in (min(protocol.lrs), max(protocol.lrs))
    return f'{text} * (edge)' if edge else f'{text} *'


def _check_baselines(protocol: Protocol, baselines: Sequence[str]) -> None:
    for baseline in baselines:
        if baseline not in protocol.arms:
            raise ConfigError(f'baselines: got {baseline!r}; choose from {", ".join(protocol.arms)}')


def _diverged(runs: Sequence[Mapping[str, Any]]) -> int:
    return sum(bool(run['diverged']) for run in runs)


def _are(count: int) -> str:
    return 'is' if count == 1 else 'are'


def _any_number(lines: Sequence[Sequence[str]], first: int) -> bool:
    return any(cell != '-' for line in lines for cell in line[first:])
