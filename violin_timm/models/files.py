"""Checkpoint files: reading one, and building the model that it fits.

A file says by itself whether it has a class token, a classifier, a position embedding, which mask parameters it holds,
and whether they are fixed; `infer_model_args` reads that off. What it does not say (size of the model, curves in place
of the default ones) is the caller's to give.
"""

import argparse
import ast
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import safetensors.torch
import timm
import torch

from .load import checkpoint_filter_fn, unwrap
from .vit import ViolinMixin

__all__ = [
    'add_model_arguments',
    'build',
    'build_and_load',
    'infer_model_args',
    'mask_kinds',
    'read_checkpoint',
    'saved_model',
]

# parameter of `Decay` -> what its key contains in our layout, and in the authors'
_KINDS = {
    'beta': ('.attn.decay.beta', '.attn.ai_list'),
    'alpha': ('.attn.decay.alpha', '.attn.normalize'),
    'curve_logits': ('.attn.decay.curve_logits', '.attn.curve_logits'),
}


def read_checkpoint(path: Union[str, Path]) -> Dict[str, Any]:
    """Contents of a checkpoint, on the CPU, without running code from it.

    Args:
        path: ``.safetensors``, or a file of ``torch.save`` with any other name.

    Raises:
        ValueError: If there is no such file, or it is not a dict of tensors (and plain values).
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f'checkpoint: got {str(path)!r}; no such file')
    try:
        if path.suffix == '.safetensors':
            return safetensors.torch.load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm's hold their arguments as one
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # on arbitrary bytes, an unpickler may raise anything
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f'checkpoint: got {str(path)!r}; allowed are safetensors, and torch.save of tensors and plain values '
            f'({reason[0]})'
        ) from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f'checkpoint: got {str(path)!r}, which holds a {type(checkpoint).__name__}; allowed is a dict')
    return checkpoint


def saved_model(checkpoint: Dict[str, Any]) -> Tuple[Optional[str], Dict[str, Any]]:
    """Model name and arguments that a training checkpoint (ours, or of timm's script) recorded; None and {} if none."""
    recorded = checkpoint.get('args') or {}
    recorded = vars(recorded) if isinstance(recorded, argparse.Namespace) else recorded
    if not isinstance(recorded, dict):
        return None, {}
    kwargs = dict(recorded.get('model_kwargs') or {})
    size = recorded.get('input_size')
    for name, value in (
        ('in_chans', recorded.get('in_chans') or (size and size[0])),
        ('img_size', recorded.get('img_size') or (size and tuple(size[1:]))),
        ('global_pool', recorded.get('gp')),
    ):
        if value:
            kwargs.setdefault(name, value)
    name = checkpoint.get('arch') or recorded.get('model')
    return (name if isinstance(name, str) else None), kwargs


def mask_kinds(state_dict: Dict[str, torch.Tensor]) -> List[str]:
    """Which parameters of `violin_timm.attention.Decay` a flat state dict holds, in our layout or the authors'."""
    return [kind for kind, marks in _KINDS.items() if any(mark in key for key in state_dict for mark in marks)]


def infer_model_args(state_dict: Dict[str, torch.Tensor]) -> Dict[str, Any]:
    """Model arguments that a flat state dict shows by what it has and lacks."""
    head = state_dict.get('head.weight')
    args: Dict[str, Any] = {'num_classes': 0 if head is None else len(head), 'class_token': 'cls_token' in state_dict}
    if 'pos_embed' not in state_dict:
        args['pos_embed'] = 'none'
    kinds = mask_kinds(state_dict)
    if not kinds:
        return args
    if 'beta' not in kinds:
        args['mask'] = 'none'
    elif any(key.endswith('.attn.ai_list') for key in state_dict):  # gamma itself, stacked
        args['mask'] = 'fixed'
    if 'alpha' not in kinds:
        args['alpha'] = 'none'
    if 'curve_logits' in kinds:
        args['curve_weights'] = 'learned'
    return args


def build(name: str, **kwargs) -> torch.nn.Module:
    """``timm.create_model`` for Violins alone.

    Raises:
        ValueError: On a model that is unknown or no Violin, or arguments that it refuses.
    """
    choices = ', '.join(timm.list_models('violin*'))
    source, plain = timm.models.parse_model_name(name)
    if source is None and not timm.is_model(timm.models.split_model_name_tag(plain)[0]):
        raise ValueError(f'model: got {name!r}; choose from {choices}')
    try:
        model = timm.create_model(name, **kwargs)
    except (TypeError, ValueError, AssertionError) as error:  # timm asserts
        hint = '' if plain.startswith('violin') else f' (Violins are {choices})'
        raise ValueError(f'model: {name!r}: {error}{hint}') from error
    if not isinstance(model, ViolinMixin):
        raise ValueError(f'model: got {name!r}, which is no Violin; choose from {choices}')
    return model


def build_and_load(
    checkpoint: Dict[str, Any],
    name: str,
    **given,
) -> Tuple[torch.nn.Module, Dict[str, Any]]:
    """Build the model that a checkpoint fits, and load it, strictly but for mask parameters that the file lacks.

    Args:
        checkpoint: From `read_checkpoint`; any layout that `load.checkpoint_filter_fn` takes.
        name: Registered name of a Violin.
        given: Model arguments; they win over those that the file shows.

    Returns:
        The model, and the arguments it was built with.

    Raises:
        ValueError: If model and file do not fit; the message names both sides.
    """
    state_dict = unwrap(checkpoint)
    if 'patch_embed.proj.weight' not in state_dict:
        raise ValueError(
            f'checkpoint: got {len(state_dict)} tensors ({", ".join(sorted(state_dict)[:4])}, ...); a Vision '
            f'Transformer with patch_embed.proj.weight is needed, bare or under state_dict, model, teacher or student'
        )
    inferred = infer_model_args(state_dict)
    kwargs = {**inferred, **given}
    if kwargs['num_classes'] not in (0, inferred['num_classes']):
        allowed = f'{inferred["num_classes"]}, or 0 to leave it out' if inferred['num_classes'] else '0'
        raise ValueError(
            f'num_classes: got {kwargs["num_classes"]!r}; with the classifier of this file, allowed is {allowed}'
        )
    if given.get('global_pool', 'token') != 'token' and 'class_token' not in given:
        del kwargs['class_token']  # global_pool alone says, as everywhere
    # without the overlay, a number of classes that is not the variant's means a new head
    model = build(name, pretrained_cfg_overlay=dict(num_classes=kwargs['num_classes']), **kwargs)
    try:
        model.load_state_dict(checkpoint_filter_fn(state_dict, model))
    except RuntimeError as error:  # torch lists one key a line
        lines = [line.strip() for line in str(error).splitlines()]
        raise ValueError('; '.join(lines[:4]) + (f'; and {len(lines) - 4} more' if len(lines) > 4 else '')) from error
    return model, kwargs


def add_model_arguments(parser: argparse.ArgumentParser, required: bool) -> None:
    """Add ``--model`` and ``--model-kwargs`` to a command's parser; the latter arrives as a list of pairs."""
    parser.add_argument('--model', metavar='NAME', required=required, help="one of timm.list_models('violin*')")
    parser.add_argument(
        '--model-kwargs',
        metavar='K=V',
        nargs='*',
        type=_pair,
        default=[],
        help='arguments of the model, as Python literals or text',
    )


def _pair(text: str) -> Tuple[str, Any]:
    name, equals, value = text.partition('=')
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f'got {text!r}; a pair is needed, as in img_size=32')
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
