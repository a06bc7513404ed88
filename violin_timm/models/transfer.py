"""A checkpoint's backbone into a Violin that is to be fine-tuned, with the checkpoint's masks or fresh ones.

    model = timm.create_model('violin_deit_small', num_classes=37)
    load_backbone(model, read_checkpoint('pretrained.safetensors'))                   # masks of almost all ones
    load_backbone(model, read_checkpoint('violin.pth.tar'), masks='carried')          # masks as they were learned

The paper compares the two in its Table 18. In both, the classifier stays the model's own.
"""

from __future__ import annotations

import logging
from typing import Any, Mapping

import torch

from ..geometry import components
from . import authors
from .files import saved_model
from .load import DECAY, check_keys, finetune_masks, listed, translate, unwrap
from .vit import ViolinMixin

__all__ = ['MASKS', 'load_backbone']

_logger = logging.getLogger(__name__)

MASKS = ('fresh', 'carried')

_CLASSIFIERS = ('head.', 'head_dist.')
_GEOMETRY = ('geometry', 'curves', 'num_random', 'random_seed')


def load_backbone(model: torch.nn.Module, checkpoint: Mapping[str, Any], masks: str = 'fresh') -> None:
    """Load a checkpoint's backbone into a Violin, in place. The classifier stays as the model has it.

    Nothing is changed where an error is raised.

    Args:
        model: A bare Violin, registered or made by `add_violin`.
        checkpoint: From `files.read_checkpoint`; any layout that `load.checkpoint_filter_fn` takes, and those of timm's
            own filter (DINOv2's, CLIP's). Of a DINO checkpoint it is the teacher.
        masks: ``fresh`` leaves the file's mask parameters and keeps those that the model drew, from the fine-tuning
            initialisation if it was built with none. ``carried`` takes the file's. What the model has no place for
            (mask='none', alpha='none') is dropped in both.

    Raises:
        ValueError: On another `masks`; if the model is no bare Violin; if the file is of the other kind of pooling; or
            if masks are to be carried that the file lacks, or that are of other curves than the model's.
        RuntimeError: If anything else is missing, left over or of another shape; the message lists both sides.
    """
    if masks not in MASKS:
        raise ValueError(f'masks: got {masks!r}; choose from {", ".join(MASKS)}')
    if not isinstance(model, ViolinMixin):
        raise ValueError(
            f'model: got {type(model).__name__}; a bare Violin is needed: one of the registered names, or the result '
            f'of add_violin, before it is wrapped'
        )
    own = _without_classifier(model.state_dict())
    state_dict, found = _translated(checkpoint, model, own, carried=masks == 'carried')
    kept = _carried(found, own, checkpoint, model) if masks == 'carried' else {}
    _check_shapes({**state_dict, **kept}, own, type(model).__name__)
    dropped = sorted(found.keys() - kept.keys())
    if dropped:
        _logger.info(f'Dropped {len(dropped)} mask parameters of the checkpoint: {listed(dropped)}')
    if masks == 'fresh':
        finetune_masks(model)
    model.load_state_dict({**model.state_dict(), **state_dict, **kept})


def _without_classifier(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state_dict.items() if not k.startswith(_CLASSIFIERS)}


def _translated(
    checkpoint: Mapping[str, Any], model, own: Mapping[str, torch.Tensor], carried: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Backbone, with the keys of the model's, and mask parameters of a checkpoint.

    Raises:
        RuntimeError: If a key of the backbone is missing or left over.
    """
    # in the order of the model's curves where that matters; else a model of any curves may take the file
    curves = model.curve_names.split(',') if carried and model.curve_names else authors.AUTHORS_CURVES
    wanted, name = {k for k in own if DECAY not in k}, type(model).__name__
    try:
        state_dict = _without_classifier(translate(checkpoint, model, curves))
    except RuntimeError as error:  # timm can resample square grids alone, so prefix tokens may be what is wrong
        raw = _without_classifier(unwrap(checkpoint))
        check_keys({k: v for k, v in raw.items() if DECAY not in k}, wanted, name)
        raise RuntimeError(f'checkpoint does not fit {name}: position embedding: {error}') from error
    backbone = {k: v for k, v in state_dict.items() if DECAY not in k}
    check_keys(backbone, wanted, name)
    return backbone, {k: v for k, v in state_dict.items() if DECAY in k}


def _carried(
    found: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], checkpoint: Mapping[str, Any], model
) -> dict[str, torch.Tensor]:
    """The mask parameters of a checkpoint that the model has, all of them.

    Raises:
        ValueError: If one is missing, or is not of the model's curves.
    """
    wanted = {k for k in own if DECAY in k}
    missing = sorted(wanted - found.keys())
    if missing:
        raise ValueError(
            f"masks: got 'carried', but the checkpoint lacks {len(missing)} of the model's {len(wanted)} mask "
            f"parameters: {listed(missing)}; masks='fresh' draws new ones"
        )
    kept = {k: found[k] for k in wanted}
    if model.curve_names:
        _check_curves(kept, own, _recorded_curves(checkpoint), tuple(model.curve_names.split(',')))
        if any(k.endswith('.curve_logits') for k in found.keys() - wanted):
            raise ValueError(
                "curve_weights: got 'mean' for masks='carried', but the checkpoint has learned weights of its curves, "
                "without which its masks are others; pass curve_weights='learned'"
            )
    return kept


def _check_curves(
    kept: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    recorded: tuple[str, ...] | None,
    names: tuple[str, ...],
) -> None:
    """See that columns of beta are of the same curves: by their names where the file has them, else by their number."""
    if recorded not in (None, names):
        raise ValueError(
            f"curves: got {', '.join(names)} for masks='carried', but those of the checkpoint are "
            f"{', '.join(recorded)}; build the model with these, or pass masks='fresh'"
        )
    for key, value in sorted(kept.items()):
        if value.shape != own[key].shape:
            raise ValueError(
                f"curves: got {', '.join(names)} for masks='carried', so {key} is {list(own[key].shape)}, but the "
                f"checkpoint's is {list(value.shape)}"
            )


def _recorded_curves(checkpoint: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Components that a checkpoint of ours was trained with, in the order of beta; None where it does not say."""
    if authors.is_authors(unwrap(checkpoint)):  # translated by name
        return None
    name, kwargs = saved_model(checkpoint)
    named = {key: kwargs[key] for key in _GEOMETRY if key in kwargs}
    if not named and not (name or '').startswith('violin_'):
        return None
    return components(**named)  # a Violin for which none were named has the default ones


def _check_shapes(state_dict: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], name: str) -> None:
    others = [
        f'{key}: got {list(value.shape)}, the model has {list(own[key].shape)}'
        for key, value in sorted(state_dict.items())
        if value.shape != own[key].shape
    ]
    if others:
        raise RuntimeError(f'checkpoint does not fit {name}: size mismatch: {listed(others)}')
