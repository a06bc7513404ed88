"""The model of a final run as files: a checkpoint that loads by itself, and the adapter where there is one."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..engine.files import write_atomically
from ..peft import merge, save_adapters
from .finetune import Job
from .finetune_build import INITIALISATION, arm_settings, data_config, model_and_masks

__all__ = ['MODEL', 'save_model']

MODEL = 'model.pth.tar'


def save_model(args: Namespace, job: Job, model: nn.Module, folder: Path) -> None:
    """Write `model.pth.tar`, adapters merged into it, and `adapter/`, which peft loads onto the pretrained model.

    `state_dict` has timm's keys; `arch` and `args` name the model and its arguments, so that for a registered Violin
    `timm.create_model(arch, checkpoint_path=..., **args['model_kwargs'])` is the model. For one that `add_violin` made,
    `violin_settings` holds the arguments of that call.
    """
    name, kwargs, own = model_and_masks(args, arm_settings(args, job.arm)[0])
    if args.peft:
        save_adapters(model, folder / 'adapter')
        model = merge(model)
    model, config = model.to('cpu'), data_config(args, model)
    contents: dict[str, Any] = {'arch': name, 'state_dict': model.state_dict()}
    added = getattr(model, 'violin_settings', None)
    if added is None:  # how masks were drawn is of no use to one who loads them
        kwargs.update({key: value for key, value in own.items() if key not in INITIALISATION})
    kwargs.update({key: getattr(args, key) for key in ('img_size', 'in_chans') if getattr(args, key)})
    contents['args'] = {
        'model': name,
        'model_kwargs': {**kwargs, 'num_classes': model.num_classes},
        'img_size': args.img_size,
        'in_chans': args.in_chans,
        'mean': list(config['mean']),  # as it has seen images, whoever said so
        'std': list(config['std']),
    }
    if added is not None:
        contents['violin_settings'] = dict(added)
    write_atomically(folder / MODEL, lambda file: torch.save(contents, file))
