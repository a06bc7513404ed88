"""LoRA and DoRA on a Violin, through the peft library: ``pip install 'violin-timm[peft]'``.

    model = timm.create_model('violin_deit_base', pretrained=True, num_classes=10)
    adapted = add_adapters(model, Adapter('lora', rank=8))
    ...  # train
    save_adapters(adapted, 'adapters')  # later, load_adapters puts them on a model created alike
    plain = merge(adapted)

The adapters are low-rank updates of every linear layer of the blocks. Mask parameters, classifier and biases are
trained in full, and stored with the adapters; all other weights are frozen, and not stored.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

import safetensors.torch
import torch
from torch import nn

from .engine.config import ConfigError, nearest
from .engine.files import rename
from .engine.layer_decay import HEADS, is_head, is_mask

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

METHODS = ('lora', 'dora')
CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
FILES = (CONFIG, WEIGHTS, 'README.md')  # what peft writes
# fields of peft's configuration that say where it was written, not what it describes
_ORIGIN = ('auto_mapping', 'base_model_name_or_path', 'inference_mode', 'peft_version', 'revision')


@dataclass(frozen=True)
class Adapter:
    """What the adapters are. The defaults are those of the VTAB-1K protocol's pipeline (vtab1k-pytorch).

    Attributes:
        method: ``lora`` (arXiv 2106.09685) or ``dora`` (arXiv 2402.09353).
        rank: Of the update, at least 1.
        alpha: The update is scaled by ``alpha / rank``.
        dropout: On the input of the adapters, in [0, 1).
        biases: Train all biases of the model, too.
    """

    method: str
    rank: int
    alpha: float = 1.0
    dropout: float = 0.0
    biases: bool = True

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: A value of the wrong kind, or out of range.
        """
        if self.method not in METHODS:
            raise ConfigError(f'method: got {self.method!r}; choose from {", ".join(METHODS)}')
        if type(self.rank) is not int or self.rank < 1:
            raise ConfigError(f'rank: got {self.rank!r}; expected a whole number, at least 1')
        if not _is_number(self.alpha) or not 0 < self.alpha < math.inf:
            raise ConfigError(f'alpha: got {self.alpha!r}; expected a number above 0')
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise ConfigError(f'dropout: got {self.dropout!r}; expected a number, at least 0 and below 1')
        if type(self.biases) is not bool:
            raise ConfigError(f'biases: got {self.biases!r}; expected true or false')

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Adapter:
        """From the settings of a file or a command line.

        Raises:
            ConfigError: An unknown or a missing key, or a value that cannot be.
        """
        known = {field.name: field for field in fields(cls)}
        for name in settings:
            if name not in known:
                raise ConfigError(f'adapter: unknown key {name!r}{nearest(str(name), known)}')
        for name, field in known.items():
            if field.default is MISSING and name not in settings:
                raise ConfigError(f'adapter: {name} is missing; got {", ".join(settings) or "nothing"}')
        return cls(**settings)


def add_adapters(model: nn.Module, adapter: Adapter) -> PeftModel:
    """Wrap a Violin so that adapters, masks and classifier are trained, and (if so set) biases; all else is frozen.

    Args:
        model: A registered variant, or one of `add_violin`, masks on or off. It is changed in place.
        adapter: What to add to each linear layer of the blocks. At first the outputs stay those of the model.

    Raises:
        ImportError: peft is not installed.
        ValueError: The model has no blocks, or adapters already.
        RuntimeError: peft has left out a layer, or trains what it should not.
    """
    peft = _peft()
    config = _config(model, adapter)
    layers = _linears(model)
    wrapped = peft.get_peft_model(model, config)
    _check_adapted(wrapped, layers, adapter)
    return wrapped


def count_parameters(model: nn.Module) -> dict[str, int]:
    """Numbers of parameters, adapted or not.

    Returns:
        ``total``, without the copies that peft keeps of what it trains in full; ``trainable``; and of the latter
        ``adapter``, ``mask``, ``head`` and ``other`` (biases, and whatever else of the backbone is trained).
    """
    count = dict.fromkeys(('total', 'trainable', 'adapter', 'mask', 'head', 'other'), 0)
    for name, parameter in model.named_parameters():
        if '.original_module.' in name:
            continue
        count['total'] += parameter.numel()
        if parameter.requires_grad:
            kind = 'adapter' if _is_adapter(name) else 'mask' if is_mask(name) else 'head' if is_head(name) else 'other'
            count['trainable'] += parameter.numel()
            count[kind] += parameter.numel()
    return count


def save_adapters(model: PeftModel, folder: str | Path) -> None:
    """Write adapters, masks, classifier and biases in peft's own layout.

    They are written beside `folder` and renamed into it when whole. What is replaced is for that moment in
    ``.<folder>.old``.

    Raises:
        ConfigError: `folder` holds other files, which would be lost.
    """
    folder = Path(folder)
    others = sorted({p.name for p in folder.iterdir()} - set(FILES)) if folder.is_dir() else []
    if others or folder.is_file():
        what = f'holds {", ".join(others[:4])}' if others else 'is a file'
        raise ConfigError(f'folder: got {str(folder)!r}, which {what}; adapters need a folder of their own')
    temporary, old = (folder.with_name(f'.{folder.name}.{suffix}') for suffix in ('tmp', 'old'))
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
    model.save_pretrained(str(temporary), safe_serialization=True)
    for path in temporary.iterdir():
        with open(path, 'rb') as file:
            os.fsync(file.fileno())
    if folder.is_dir():
        shutil.rmtree(old, ignore_errors=True)
        rename(folder, old)
    rename(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_adapters(base_model: nn.Module, folder: str | Path, trainable: bool = False) -> PeftModel:
    """Put saved adapters on the model that they were trained on.

    The folder does not hold the frozen weights, so it is the caller's to give those they were trained on.

    Args:
        base_model: Built and loaded as it was for `add_adapters`. It is changed in place.
        folder: From `save_adapters`.
        trainable: Go on training; otherwise everything is frozen, and in evaluation mode.

    Raises:
        ConfigError: The folder is not one of `save_adapters`.
        RuntimeError: The folder does not fit the model; the message names both sides.
    """
    peft = _peft()
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():  # peft would ask the network for it
            raise ConfigError(f'folder: got {str(folder)!r}, which has no {name}')
    adapter = _adapter_of(base_model, peft.PeftConfig.from_pretrained(str(folder)), folder)
    saved = safetensors.torch.load_file(folder / WEIGHTS)
    model = add_adapters(base_model, adapter)
    _check_keys(saved, peft.get_peft_model_state_dict(model), folder)
    peft.set_peft_model_state_dict(model, saved)  # returns what it left out of the whole model, which is most
    loaded = peft.get_peft_model_state_dict(model)
    unread = [key for key, value in saved.items() if not torch.equal(value.to(loaded[key]), loaded[key])]
    if unread:
        raise RuntimeError(f'{folder}: peft did not load {_listed(unread)}')
    return model if trainable else model.requires_grad_(False).eval()


def merge(model: PeftModel) -> nn.Module:
    """Fold the adapters into the weights, and give back the Violin without peft, all of it trainable.

    Its state dict has the keys of a model that never had adapters. `model` must not be used afterwards.

    Raises:
        ValueError: Merged weights that are not finite.
        RuntimeError: Something of peft is left.
    """
    plain = model.merge_and_unload(safe_merge=True)
    left = [name for name, module in plain.named_modules() if type(module).__module__.startswith('peft.')]
    if left:
        raise RuntimeError(f'adapters: not merged: {_listed(left)}')
    return plain.requires_grad_(True)


def _peft():
    try:
        import peft
    except ImportError as error:
        raise ImportError("adapters need the peft library: pip install 'violin-timm[peft]'") from error
    return peft


def _config(model: nn.Module, adapter: Adapter) -> LoraConfig:
    """peft's configuration for a model."""
    layers = sorted({name.split('.', 2)[2] for name in _linears(model)})
    if not layers:
        raise ValueError(f'model: got {type(model).__name__}, which has no linear layers in blocks.<i>')
    if any(type(module).__module__.startswith('peft.') for module in model.modules()):
        raise ValueError(f'model: got {type(model).__name__}, which has adapters already; see merge')
    return _peft().LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        use_dora=adapter.method == 'dora',
        bias='all' if adapter.biases else 'none',
        target_modules=rf'blocks\.\d+\.(?:{"|".join(map(re.escape, layers))})',
        modules_to_save=_trained_in_full(model) or None,
    )


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Linear layers of the blocks, by name."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    return {name: m for name, m in found.items() if re.match(r'blocks\.\d+\.(?!attn\.decay\.)', name)}


def _trained_in_full(model: nn.Module) -> list[str]:
    """Names, as peft matches them, of the modules that are trained and stored whole: masks and classifiers."""
    heads = [name for name in HEADS if any(True for _ in getattr(model, name, nn.Identity()).parameters())]
    has_masks = any(name.endswith('.attn.decay') for name, _ in model.named_modules())
    return (['decay'] if has_masks else []) + heads


def _check_adapted(model: PeftModel, layers: Mapping[str, nn.Linear], adapter: Adapter) -> None:
    """See that peft adapted and trains exactly what was asked for; it skips in silence what does not match."""
    from peft.tuners.lora import LoraLayer

    adapted = {name for name, module in model.get_base_model().named_modules() if isinstance(module, LoraLayer)}
    if adapted != set(layers):
        raise RuntimeError(f'adapters: peft adapted, or left out, {_listed(sorted(adapted ^ set(layers)))}')
    for name, parameter in model.named_parameters():
        expected = _is_adapter(name) or is_mask(name) or is_head(name) or (adapter.biases and name.endswith('.bias'))
        if parameter.requires_grad != (expected and '.original_module.' not in name):
            raise RuntimeError(f'adapters: {name} is {"trained" if parameter.requires_grad else "frozen"}')


def _adapter_of(model: nn.Module, found: LoraConfig, folder: Path) -> Adapter:
    """The adapter that a folder holds, if it is one that `add_adapters` would put on this model."""
    if found.peft_type != 'LORA':
        raise ConfigError(f'folder: got {str(folder)!r}, which holds {found.peft_type}; choose from LoRA, DoRA')
    method = 'dora' if found.use_dora else 'lora'
    adapter = Adapter(method, found.r, found.lora_alpha, found.lora_dropout, found.bias == 'all')
    wanted, found = _config(model, adapter).to_dict(), found.to_dict()
    for name in sorted(wanted.keys() - set(_ORIGIN)):
        if found[name] != wanted[name]:
            raise RuntimeError(f'{folder}: {name}: got {found[name]!r}; {type(model).__name__} needs {wanted[name]!r}')
    return adapter


def _check_keys(saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], folder: Path) -> None:
    shapes = [
        f'{key} {list(saved[key].shape)} for {list(own[key].shape)}'
        for key in sorted(saved.keys() & own.keys())
        if saved[key].shape != own[key].shape
    ]
    sides = {'missing': sorted(own.keys() - saved.keys()), 'left over': sorted(saved.keys() - own.keys())}
    problems = [f'{side}: {_listed(keys)}' for side, keys in (sides | {'of another shape': shapes}).items() if keys]
    if problems:
        raise RuntimeError(f'{folder} does not fit the model: {"; ".join(problems)}')


def _is_adapter(name: str) -> bool:
    return '.lora_' in name


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _listed(names: list[str]) -> str:
    return ', '.join(names[:4]) + (f' and {len(names) - 4} more' if len(names) > 4 else '')
