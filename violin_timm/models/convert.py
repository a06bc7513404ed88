"""`violin convert`: any checkpoint that a Violin can take becomes one that timm loads strictly.

    violin convert authors.pth violin.safetensors --model violin_deit_tiny
    violin convert deit_tiny.pth violin.pth --model violin_deit_tiny --model-kwargs img_size=384

``timm.create_model(..., checkpoint_path=FILE)`` applies no filter, so it needs our own layout. Read are timm's plain
weights, ours, and the authors' (arXiv 2606.14757), bare or under ``model``, ``teacher`` and the like, with any
wrapper's prefix. Of a training checkpoint of the same model, the recorded arguments of the model are taken over.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import safetensors.torch
import torch

from . import authors, files
from .load import unwrap

__all__ = ['main']


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command.

    Args:
        argv: Arguments (default: the program's).

    Returns:
        Exit status: 0, 1 if the file cannot be written, 2 if arguments and file do not fit.
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said what is wrong, or printed the help
        return stop.code
    try:
        _check_paths(args)
        checkpoint = files.read_checkpoint(args.input)
        recorded, kwargs = files.saved_model(checkpoint)
        kwargs = {**(kwargs if recorded == args.model else {}), **dict(args.model_kwargs)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(args.seed)
            model, kwargs = files.build_and_load(checkpoint, args.model, **kwargs)
        _write(args.output, model.state_dict(), args.model, kwargs)
    except ValueError as error:
        print(f'violin convert: {error}', file=sys.stderr)
        return 2
    except OSError as error:
        print(f'violin convert: {args.output}: {error}', file=sys.stderr)
        return 1
    for name, text in _report(checkpoint, model, args.seed).items():
        print(f'{name:<19}{text}')
    listed = ''.join(f', {name}={value!r}' for name, value in kwargs.items())
    print(f'\ntimm.create_model({args.model!r}, checkpoint_path={str(args.output)!r}{listed})')
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='violin convert', description='Turn a checkpoint into one of our layout, which timm loads strictly.'
    )
    parser.add_argument('input', metavar='IN', type=Path, help='.safetensors, or a file of torch.save')
    parser.add_argument('output', metavar='OUT', type=Path, help='file to write; .safetensors, or else torch.save')
    files.add_model_arguments(parser, required=True)
    parser.add_argument('--seed', type=int, default=0, help='seed of masks that the file lacks (default: 0)')
    parser.add_argument('--overwrite', action='store_true', help='replace OUT if it is there; never IN')
    return parser


def _check_paths(args: argparse.Namespace) -> None:
    if not args.output.parent.is_dir():
        raise ValueError(f'OUT: got {str(args.output)!r}; its folder does not exist')
    if args.output.is_dir():
        raise ValueError(f'OUT: got {str(args.output)!r}, which is a folder; a file is needed')
    if not args.output.exists():
        return
    if args.input.exists() and args.output.samefile(args.input):
        raise ValueError(f'OUT: got {str(args.output)!r}, which is IN; choose another file')
    if not args.overwrite:
        raise ValueError(f'OUT: got {str(args.output)!r}, which is there already; choose another, or pass --overwrite')


def _write(path: Path, state_dict: Dict[str, torch.Tensor], name: str, kwargs: Dict[str, Any]) -> None:
    """Write beside the place and rename into it: under its name there is nothing, or all of it."""
    temporary = path.with_name(f'.{path.name}.tmp')
    state_dict = {key: value.contiguous() for key, value in state_dict.items()}
    try:
        with open(temporary, 'wb') as file:
            if path.suffix == '.safetensors':
                file.write(safetensors.torch.save(state_dict, metadata={'format': 'pt'}))
            else:
                args = {'model': name, 'model_kwargs': kwargs}
                torch.save({'arch': name, 'args': args, 'state_dict': state_dict}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _report(checkpoint: Dict[str, Any], model: torch.nn.Module, seed: int) -> Dict[str, str]:
    """What was found in the file and what was done about it, a line each."""
    source = unwrap(checkpoint)
    classes = len(source['head.weight']) if 'head.weight' in source else None
    dropped = '' if model.has_class_token or 'cls_token' not in source else ', dropped: the model pools its patches'
    return {
        'layout': _layout(checkpoint, source),
        'class token': ('yes' if 'cls_token' in source else 'no') + dropped,
        'classes': f'{classes or "no classifier"}' + (', dropped' if classes and not model.num_classes else ''),
        'position embedding': _positions(source, model),
        'curves': _curves(source, model),
        'masks': _masks(source, model, seed),
    }


def _layout(checkpoint: Dict[str, Any], source: Dict[str, torch.Tensor]) -> str:
    if authors.is_authors(source):
        layout = "the authors'"
    else:
        layout = 'ours' if files.mask_kinds(source) else "timm's, without masks"
    taken = {id(value) for value in source.values()}
    for key, value in checkpoint.items():
        if isinstance(value, dict) and any(id(tensor) in taken for tensor in value.values()):
            return f'{layout}, under {key!r}'
    return f'{layout}, bare'


def _positions(source: Dict[str, torch.Tensor], model: torch.nn.Module) -> str:
    if 'pos_embed' not in source:
        return 'none'
    if model.pos_embed is None:
        return "dropped: the model has pos_embed='none'"
    before, after = source['pos_embed'].shape[1], model.pos_embed.shape[1]
    height, width = model.patch_embed.grid_size
    dropped = 'cls_token' in source and not model.has_class_token
    changed = before not in (after, after + dropped)
    return f'{before} tokens' + (f', resampled to {after} ({height}x{width} patches)' if changed else '')


def _curves(source: Dict[str, torch.Tensor], model: torch.nn.Module) -> str:
    if not model.curve_names:
        return "none: the model has mask='none'"
    names = model.curve_names.replace(',', ', ')
    if authors.is_authors(source) and 'beta' in files.mask_kinds(source):
        return f"{names} (reordered; the authors' zigzag and zigzag_T are our zigzag_T and zigzag)"
    return names


def _masks(source: Dict[str, torch.Tensor], model: torch.nn.Module, seed: int) -> str:
    """Which mask parameters came from the file and which were drawn."""
    own = files.mask_kinds(model.state_dict())
    found = [kind for kind in own if kind in files.mask_kinds(source)]
    fresh = [kind for kind in own if kind not in found]
    parts = [f'{", ".join(found)} from the file'] if found else []
    if fresh:
        settings = model.blocks[0].attn.decay.settings
        parts.append(f'{", ".join(fresh)} fresh, from the {settings.mask_init!r} initialisation with seed {seed}')
    return '; '.join(parts) or 'none'
