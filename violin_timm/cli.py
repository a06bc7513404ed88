"""The command line: `violin <command> ...`, the same as `python -m violin_timm <command> ...`.

A command is one row of `COMMANDS`; its module is imported when it is called. Exit status: 0, 1 for a run that failed, 2
for a command line or config that cannot be, 143 for a training that SIGTERM ended after saving.
"""

from __future__ import annotations

import importlib
import sys

from .engine.config import ConfigError, nearest, parse
from .engine.flags import TRAIN, Table
from .recipes import protocol_flags, tables

# name: (module, function of the arguments that returns an exit status, help)
COMMANDS = {
    'train': ('violin_timm.cli', 'train', 'train an image classifier'),
    'dino': ('violin_timm.cli', 'dino', 'pretrain a backbone without labels'),
    'vtab': ('violin_timm.cli', 'vtab', 'fine-tune with fresh masks on the tasks of VTAB-1K, arm beside arm'),
    'finetune': ('violin_timm.cli', 'finetune', "the same on one's own images"),
    'knn': ('violin_timm.cli', 'knn', 'measure frozen features by k-NN'),
    'linear': ('violin_timm.cli', 'linear', 'measure frozen features by a linear classifier'),
    'sweep': ('violin_timm.recipes.sweep', 'command', 'train every point of a wandb sweep file, and compare them'),
    'visualize': ('violin_timm.viz.command', 'main', "draw a model's curves, masks, half-lives and alpha"),
    'benchmark': ('violin_timm.evals.benchmark', 'main', "time and memory beside timm's plain models"),
    'check': ('violin_timm.evals.check', 'main', 'compare an attention layer with the formula on this machine'),
    'convert': ('violin_timm.models.convert', 'main', "turn a checkpoint, timm's or the authors', into one of ours"),
}


def train(argv: list[str]) -> int:
    """`violin train`. Like those below: arguments after the command -> exit status."""
    return _run(argv, TRAIN, 'violin_timm.recipes.supervised')


def dino(argv: list[str]) -> int:
    """`violin dino`."""
    return _run(argv, tables.DINO, 'violin_timm.recipes.dino')


def vtab(argv: list[str]) -> int:
    """`violin vtab`."""
    return _run(argv, protocol_flags.VTAB, 'violin_timm.recipes.vtab')


def finetune(argv: list[str]) -> int:
    """`violin finetune`."""
    return _run(argv, protocol_flags.FINETUNE, 'violin_timm.recipes.own_images')


def knn(argv: list[str]) -> int:
    """`violin knn`."""
    return _run(argv, tables.KNN, 'violin_timm.evals.knn')


def linear(argv: list[str]) -> int:
    """`violin linear`."""
    return _run(argv, tables.LINEAR, 'violin_timm.evals.linear')


def _run(argv: list[str], table: Table, module: str) -> int:
    """Settings first, and torch only once they are right; then the module's `run`."""
    failures: tuple = ()
    try:
        args = parse(argv, table)
        recipe = importlib.import_module(module)
        from .engine.logging import setup
        from .engine.stopping import Interrupted, TrainingError

        failures = (TrainingError, Interrupted)
        setup()
        recipe.run(args)
    except ConfigError as err:
        print(f'{table.command}: {err}', file=sys.stderr)
        return 2
    except failures as err:
        print(f'{table.command}: {err}', file=sys.stderr)
        return err.status
    return 0


def usage() -> str:
    """Text of `violin --help`."""
    width = max(map(len, COMMANDS))
    rows = '\n'.join(f'  {name:<{width}}  {text}' for name, (_, _, text) in COMMANDS.items())
    return f'usage: violin <command> ...\n\n{rows}\n\n`violin <command> --help` tells more.'


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments (default: the program's).

    Returns:
        Exit status.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ('-h', '--help'):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name = argv[0]
    if name not in COMMANDS:
        print(f'violin: unknown command {name!r}{nearest(name, COMMANDS)}', file=sys.stderr)
        return 2
    module, function, _ = COMMANDS[name]
    return getattr(importlib.import_module(module), function)(argv[1:])
