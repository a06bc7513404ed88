"""The command line: `violin <command> ...`, the same as `python -m violin_timm <command> ...`.

A command is one row of `COMMANDS`; its module is imported when it is called. Exit status: 0, 1 for a run that failed, 2
for a command line or config that cannot be.
"""

from __future__ import annotations

import importlib
import sys

from .engine.config import ConfigError, nearest, parse

# name: (module, function of the arguments that returns an exit status, help)
COMMANDS = {
    'train': ('violin_timm.cli', 'train', 'train an image classifier'),
    'sweep': ('violin_timm.recipes.sweep', 'command', 'train every point of a wandb sweep file, and compare them'),
    'visualize': ('violin_timm.viz.command', 'main', "draw a model's curves, masks, half-lives and alpha"),
    'benchmark': ('violin_timm.evals.benchmark', 'main', "time and memory beside timm's plain models"),
    'check': ('violin_timm.evals.check', 'main', 'compare an attention layer with the formula on this machine'),
    'convert': ('violin_timm.models.convert', 'main', "turn a checkpoint, timm's or the authors', into one of ours"),
}


def train(argv: list[str]) -> int:
    """`violin train`: settings first, and torch only once they are right.

    Args:
        argv: Arguments after the command.

    Returns:
        Exit status.
    """
    try:
        args = parse(argv)
        from .engine.logging import setup
        from .recipes import supervised

        setup()
        supervised.run(args)
    except ConfigError as err:
        print(f'violin train: {err}', file=sys.stderr)
        return 2
    except supervised.TrainingError as err:
        print(f'violin train: {err}', file=sys.stderr)
        return 1
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
