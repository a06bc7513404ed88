"""The model of one fine-tuning run: a pretrained backbone, fresh or carried masks, a fresh classifier."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from dataclasses import fields
from functools import lru_cache
from typing import Any, Mapping

import torch
from timm.models import is_model, list_models, parse_model_name, resolve_model_input_args, split_model_name_tag
from torch import nn

from ..engine import build
from ..engine.config import ConfigError, completed, nearest
from ..models.files import infer_model_args, read_checkpoint, saved_model
from ..models.load import unwrap
from ..models.plug import add_violin
from ..models.transfer import load_backbone
from ..models.vit import ViolinMixin
from ..peft import Adapter, add_adapters
from ..settings import MaskSettings

__all__ = [
    'arm_settings',
    'build_model',
    'channels_of',
    'data_config',
    'digest',
    'model_and_masks',
    'model_of',
    'weights',
]

MASK_FIELDS = tuple(field.name for field in fields(MaskSettings))
GEOMETRY = ('geometry', 'curves', 'num_random', 'random_seed')
INITIALISATION = ('mask_init', 'beta_range', 'beta_std', 'alpha_mean', 'alpha_std')


def arm_settings(args: Namespace, arm: str) -> tuple[dict[str, Any], float]:
    """Mask settings of an arm, with the initialisation of fine-tuning, and the factor on its masks' learning rate.

    Raises:
        ConfigError: There is no such arm, or it has settings that cannot be.
    """
    given = args.arms[arm]
    if not isinstance(given, Mapping):
        raise ConfigError(f'arms: got {given!r} for {arm!r}; expected a mapping of mask settings')
    given = dict(given)
    factor = given.pop('mask_lr_scale', args.mask_lr_scale)
    settings = {'mask_init': 'finetune', **given}
    if given.get('mask', 'learned') == 'learned' and args.beta_range and settings['mask_init'] != 'none':
        settings.setdefault('beta_range', args.beta_range)
    if given.get('alpha', 'learned') == 'learned' and args.alpha_std is not None:
        settings.setdefault('alpha_std', args.alpha_std)
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    for name in settings:
        if name not in MASK_FIELDS:
            allowed = ', '.join((*MASK_FIELDS, 'mask_lr_scale'))
            raise ConfigError(f'arms: {arm!r} has the setting {name!r}; choose from {allowed}')
    try:
        MaskSettings(**settings)
    except (TypeError, ValueError) as err:
        raise ConfigError(f'arms: {arm!r}: {err}') from err
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor >= 0:
        raise ConfigError(f'arms: {arm!r} has mask_lr_scale={factor!r}; expected a number, at least 0')
    return settings, float(factor)


@lru_cache(maxsize=1)
def _read(path: str) -> tuple[dict[str, Any], str]:
    try:
        checkpoint = read_checkpoint(path)
    except ValueError as err:
        raise ConfigError(f'pretrained_path: {err}') from err
    # What optimizers and averages add is several times the model.
    kept = {key: checkpoint[key] for key in ('arch', 'args') if key in checkpoint}
    if added := checkpoint.get('violin_settings'):  # of `add_violin`, in files of `protocol_models`
        kept['args'] = {**kept['args'], 'model_kwargs': {**kept['args']['model_kwargs'], **added}}
    content = hashlib.sha256()
    with open(path, 'rb') as file:
        for part in iter(lambda: file.read(2**20), b''):
            content.update(part)
    return {'state_dict': unwrap(checkpoint), **kept}, content.hexdigest()


def weights(path: str) -> dict[str, Any]:
    """Contents of a checkpoint file, kept for the next run of this process; not to be changed.

    Returns:
        `state_dict` of the backbone that is loaded, and `arch` and `args` where the file records them.

    Raises:
        ConfigError: There is none, or it is no checkpoint.
    """
    return _read(path)[0]


def forget_weights() -> None:
    """Free the memory of what `weights` keeps."""
    _read.cache_clear()


def digest(path: str) -> str:
    """SHA-256 of the file that `weights` read."""
    return _read(path)[1]


def model_of(args: Namespace) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the model: those given, over those that the checkpoint records or shows.

    Raises:
        ConfigError: Neither names a model.
    """
    name, kwargs = args.model, {}
    if args.pretrained_path:
        checkpoint = weights(args.pretrained_path)
        recorded, kwargs = saved_model(checkpoint)
        if name and _bare(name) != _bare(recorded or ''):
            kwargs = {}
        name = name or recorded
        if name and _is_violin(name):
            kwargs.setdefault('class_token', infer_model_args(checkpoint['state_dict'])['class_token'])
    if not name:
        raise ConfigError("model: got ''; expected a name of timm.list_models(), as the checkpoint records none")
    source, plain = parse_model_name(name)
    if source is None and not is_model(split_model_name_tag(plain)[0]):
        raise ConfigError(f'model: got {name!r}{nearest(plain, list_models(), "; see timm.list_models()")}')
    for dropped in ('num_classes', 'drop_path_rate', *(MASK_FIELDS if args.masks == 'fresh' else INITIALISATION)):
        kwargs.pop(dropped, None)
    for flag in ('img_size', 'in_chans'):  # what is given stands over what is recorded
        if getattr(args, flag):
            kwargs.pop(flag, None)
    return name, {**kwargs, **args.model_kwargs}


def _bare(name: str) -> str:
    """A model's name without the tag of its weights."""
    return split_model_name_tag(name)[0]


def model_and_masks(args: Namespace, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Name of the model, its arguments but for those of the masks, and those: the arm's, over those of carried masks.

    Whether there are masks at all is the arm's to say, and one without a mask has no use for curves; an arm of other
    distances has no use for the recorded ones.
    """
    name, kwargs = model_of(args)
    recorded = {key: kwargs.pop(key) for key in MASK_FIELDS if key in kwargs}
    if settings.get('mask') == 'none':
        recorded = {}
    idle = {'mask', 'alpha'} & {key for key, value in recorded.items() if value == 'none'}
    if settings.get('alpha') == 'none':
        idle.add('alpha_on')
    if {'geometry', 'curves'} & settings.keys():
        idle.update(GEOMETRY)
    return name, kwargs, {**{key: value for key, value in recorded.items() if key not in idle}, **settings}


def channels_of(args: Namespace) -> int:
    """Image channels of the model."""
    name, kwargs = model_of(args)
    return args.in_chans or kwargs.get('in_chans') or _resolved(name)['pretrained_cfg']['input_size'][0]


def _resolved(name: str) -> dict[str, Any]:
    """What timm makes of a model's name: of one in a folder or on a hub, what its config says."""
    try:
        return resolve_model_input_args(name)
    except (OSError, RuntimeError, ValueError) as err:
        raise ConfigError(f'model: {name!r} cannot be had: {err}') from err


def data_config(args: Namespace, model: nn.Module) -> dict[str, Any]:
    """timm's data config for the model as it was built: of its own size and channels, which weights may have given it.

    Raises:
        ConfigError: There is not one mean and one deviation for each channel.
    """
    patches = model.patch_embed
    channels = patches.proj.in_channels
    for name in ('mean', 'std'):
        given = getattr(args, name)
        if given is not None and len(given) not in (1, channels):
            raise ConfigError(f'{name}: got {given}; expected one number, or {channels}, the channels of the model')
    values = {'img_size': None, 'in_chans': channels, 'input_size': (channels, *patches.img_size)}
    recorded = weights(args.pretrained_path).get('args') if args.pretrained_path else None
    recorded = vars(recorded) if isinstance(recorded, Namespace) else recorded or {}
    for name in ('mean', 'std'):  # as the weights have seen images
        if getattr(args, name) is None and len(recorded.get(name) or ()) in (1, channels):
            values[name] = recorded[name]
    return build.data_config(completed(args, **values), model)


def _is_violin(name: str) -> bool:
    source, plain = parse_model_name(name)
    return (plain if source is None else _resolved(name)['model_name']).startswith('violin')


def build_model(args: Namespace, settings: Mapping[str, Any], classes: int, seed: int) -> nn.Module:
    """A Violin, on the CPU, as a run starts with it; for one seed the arms differ in their decay parameters alone.

    Args:
        args: Settings of the protocol.
        settings: Of the arm's masks, from `arm_settings`.
        classes: Classes of the task.
        seed: Of everything that is drawn: masks, classifier, adapters.

    Raises:
        ConfigError: The model, its settings and its weights do not fit together.
    """
    torch.manual_seed(seed)
    name, kwargs, own = model_and_masks(args, settings)
    from_timm = args.pretrained and not args.pretrained_path
    violin = _is_violin(name)
    flags = completed(
        args,
        model=name,
        pretrained=from_timm,
        pretrained_path=None,
        num_classes=classes,
        model_kwargs={**kwargs, **own} if violin else kwargs,
    )
    model = _created(flags)
    try:
        if not violin:
            add_violin(model, **own)
        elif from_timm:  # a Violin of a hub's has masks of its own, which are not fresh
            _draw_masks(model)
        if args.pretrained_path:
            load_backbone(model, weights(args.pretrained_path), args.masks)
        elif args.masks == 'carried':
            raise ConfigError("masks: got 'carried'; that needs pretrained_path, timm's weights have no masks")
    except (RuntimeError, TypeError, ValueError) as err:
        raise err if isinstance(err, ConfigError) else ConfigError(f'model: {name}: {err}') from err
    assert isinstance(model, ViolinMixin)
    _fresh_classifier(model, args.head_std, seed)
    if args.peft:
        try:
            model = add_adapters(model, Adapter.of(args.peft))
        except ImportError as err:
            raise ConfigError(f'peft: {err}') from err
    return model


def _created(flags: Namespace) -> nn.Module:
    """`build.build_model`, of weights that may have to be fetched first."""
    try:
        return build.build_model(flags)
    except (OSError, RuntimeError) as err:
        raise ConfigError(f'model: the weights of {flags.model!r} cannot be had: {err}') from err


def _draw_masks(model: nn.Module) -> None:
    for block in model.blocks:
        if block.attn.decay is not None:
            block.attn.decay.reset_parameters()


def _fresh_classifier(model: nn.Module, std: float, seed: int) -> None:
    """Weights ~ N(0, std), biases 0, from a generator of their own: what the masks drew does not matter."""
    generator = torch.Generator().manual_seed(seed)
    heads = model.get_classifier()
    for head in heads if isinstance(heads, (tuple, list)) else (heads,):
        if not isinstance(head, nn.Linear):
            raise ConfigError(f'model: its classifier is {type(head).__name__}; expected Linear')
        nn.init.trunc_normal_(head.weight, std=std, generator=generator)
        nn.init.zeros_(head.bias)
