"""Sweeps: every point of a wandb sweep file trained as its own process, and one table at the end.

    violin sweep configs/sweeps/digits_arms.yaml --jobs 2
    violin sweep configs/sweeps/digits_arms.yaml --dry-run       # the points, and how far each is
    violin sweep configs/sweeps/digits_arms.yaml --table-only    # the table of what has ended so far
    wandb sweep configs/sweeps/digits_arms.yaml                  # the same file there, then `wandb agent`

A run's folder is `<output>/runs/<its parameters>`, with training's files and `log.txt`. The same command again goes on:
it skips what has a whole `result.json`, continues what was interrupted from its last checkpoint, and tries again what
failed. A run holds a lock on its folder for as long as it lives, so one that outlives a killed sweep is waited for,
and several sweeps may share an output folder.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from ..engine.checkpoints import write_text
from ..engine.config import ConfigError, find_config
from ..engine.runs import cores, finished
from ..evals.statistics import require_scipy
from .sweep_points import Sweep, read_sweep
from .sweep_runs import Runner, check_same, outcome
from .sweep_table import as_csv, as_markdown, rows

__all__ = ['command', 'write_table']


def command(argv: list[str]) -> int:
    """`violin sweep`.

    Args:
        argv: Arguments after the command.

    Returns:
        Exit status: 1 if a run failed, 2 for a file that cannot be, 130 if interrupted.
    """
    args = _parser().parse_args(argv)
    try:
        sweep = read_sweep(find_config(args.sweep), args.log_wandb)
        output = Path(args.output or Path('output/sweeps') / sweep.path.stem)
        for point in sweep.points:
            check_same(point, output / 'runs' / point.name)
        if sweep.table.baseline and not args.dry_run:
            require_scipy()
    except (ConfigError, ImportError) as err:
        print(f'violin sweep: {err}', file=sys.stderr)
        return 2
    if args.dry_run:
        _show(sweep, output)
        return 0
    if not args.table_only:
        threads = args.threads or max(1, cores() // args.jobs)
        try:
            Runner(sweep, output, args.jobs, threads).run()
        except KeyboardInterrupt:
            print('violin sweep: interrupted; the same command goes on from here', file=sys.stderr)
            return 130
    return write_table(sweep, output)


def _parser() -> argparse.ArgumentParser:
    def positive(text: str) -> int:
        if (value := int(text)) < 1:
            raise ValueError
        return value

    parser = argparse.ArgumentParser('violin sweep', description='Train every point of a wandb sweep file.')
    parser.add_argument('sweep', metavar='FILE', help='sweep file (YAML)')
    parser.add_argument('--jobs', type=positive, default=1, metavar='N', help='runs at a time (default: 1)')
    parser.add_argument('--output', metavar='DIR', help='folder of runs and table (default: output/sweeps/<file name>)')
    parser.add_argument('--threads', type=positive, metavar='N', help='CPU threads of a run (default: cores / jobs)')
    parser.add_argument('--log-wandb', action='store_true', help='keep the --log-wandb of the command in the file')
    parser.add_argument('--dry-run', action='store_true', help='list the points and their state, and stop')
    parser.add_argument('--table-only', action='store_true', help='write the table of what has ended, and stop')
    return parser


def _show(sweep: Sweep, output: Path) -> None:
    for point in sweep.points:
        folder = output / 'runs' / point.name
        failure = outcome(folder, ()).failure
        state = 'done' if finished(folder) else f'failed ({failure})' if failure else 'to do'
        print(f'{point.name}  [{point.arm}]  {state}\n    violin train {shlex.join(point.arguments)}')
    print(f'{len(sweep.points)} points, {sum(finished(output / "runs" / p.name) for p in sweep.points)} done')


def write_table(sweep: Sweep, output: Path) -> int:
    """Write `table.csv` and `table.md`, and print the latter.

    Returns:
        1 if a run failed, else 0.
    """
    keys = dict.fromkeys((*sweep.table.report, *([sweep.table.select_by] if sweep.table.select else [])))
    outcomes = {point.name: outcome(output / 'runs' / point.name, list(keys)) for point in sweep.points}
    table = rows(sweep, outcomes)
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / 'table.csv', as_csv(sweep, table))
    write_text(output / 'table.md', text := as_markdown(sweep, table, outcomes))
    print(f'\n{text}\nwritten to {output / "table.csv"} and table.md')
    return int(any(outcome.failure for outcome in outcomes.values()))
