"""`violin visualize`: a picture of a model's curves and of what its masks have learned.

    violin visualize --checkpoint output/train/RUN/model_best.pth.tar --output masks.png
    violin visualize --model violin_deit_small --model-kwargs geometry=random --output initial.png

A checkpoint of `violin train` or `violin convert` names its model; for other files, give ``--model``.
"""

import argparse
import sys
from pathlib import Path
from typing import List, Optional

from torch import nn

from ..models import files

__all__ = ['main']


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command.

    Args:
        argv: Arguments (default: the program's).

    Returns:
        Exit status: 0, 1 if the picture cannot be made or written, 2 for arguments that cannot be.
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said what is wrong, or printed the help
        return stop.code
    from .figure import training_figure

    try:
        path = training_figure(_model(args), args.output, args.height, args.width)
    except ValueError as error:
        print(f'violin visualize: {error}', file=sys.stderr)
        return 2
    except (ImportError, OSError) as error:
        print(f'violin visualize: {error}', file=sys.stderr)
        return 1
    print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='violin visualize', description="Draw a model's curves, and its masks, half-lives and alpha."
    )
    files.add_model_arguments(parser, required=False)
    parser.add_argument('--checkpoint', metavar='FILE', type=Path, help='trained weights; without, initial values')
    parser.add_argument('--height', metavar='N', type=int, help="rows of patches (default: the model's)")
    parser.add_argument('--width', metavar='N', type=int, help="columns of patches (default: the model's)")
    parser.add_argument('--output', metavar='FILE', type=Path, required=True, help='.png, .pdf or .svg to write')
    return parser


def _model(args: argparse.Namespace) -> nn.Module:
    given = dict(args.model_kwargs)
    if args.checkpoint is None:
        if args.model is None:
            raise ValueError('model: got none; name it with --model, or a file with --checkpoint')
        return files.build(args.model, **given)
    checkpoint = files.read_checkpoint(args.checkpoint)
    recorded, kwargs = files.saved_model(checkpoint)
    name = args.model or recorded
    if name is None:
        raise ValueError(f'model: {args.checkpoint} does not name its model; give --model')
    return files.build_and_load(checkpoint, name, **{**kwargs, **given})[0]
