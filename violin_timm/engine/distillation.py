"""Distillation: a task of timm's around the student and a frozen teacher, from the flags of timm's `train.py`."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from timm.task import FeatureDistillationTask, LogitDistillationTask, TokenDistillationTask, TrainingTask
from torch import nn

from .config import ConfigError
from .distributed import World
from .flags import DISTILLATION

_WEIGHTS = {'distill_loss_weight': 'distill_loss_weight', 'task_loss_weight': 'task_loss_weight'}

# kind: (task, its arguments by name and the flags that they come from)
KINDS = {
    'logit': (LogitDistillationTask, {**_WEIGHTS, 'loss_type': 'kd_loss_type', 'temperature': 'kd_temperature'}),
    'feature': (
        FeatureDistillationTask,
        {
            **_WEIGHTS,
            'student_feature_dim': 'kd_student_feature_dim',
            'teacher_feature_dim': 'kd_teacher_feature_dim',
        },
    ),
    'token': (
        TokenDistillationTask,
        {**_WEIGHTS, 'distill_type': 'kd_token_distill_type', 'temperature': 'kd_temperature'},
    ),
}


def check(args: Namespace) -> None:
    """Refuse flags of distillation that would be ignored.

    Raises:
        ConfigError: There is no teacher, or its kind of distillation does not read them.
    """
    read = {'kd_model_name', 'kd_distill_type'}
    if args.kd_model_name:
        read.update(KINDS[args.kd_distill_type][1].values())
        why = f'kd_distill_type {args.kd_distill_type!r} does not use it'
    else:
        read, why = {'kd_model_name'}, 'it needs a teacher, kd_model_name'
    for flag in DISTILLATION:
        value = getattr(args, flag.name)
        if value != flag.default and flag.name not in read:
            raise ConfigError(f'{flag.name}: got {value!r}; {why}')


def create_distillation(
    args: Namespace, world: World, student: nn.Module, loss: nn.Module, config: dict[str, Any]
) -> TrainingTask:
    """The task that `kd_model_name` and its companions ask for.

    Args:
        args: Settings of the run.
        world: This process.
        student: On its device.
        loss: On the labels.
        config: timm's data config of the run; the teacher gets the images in its own normalisation.

    Raises:
        ConfigError: No such teacher, or the two do not go together.
    """
    kind, flags = KINDS[args.kd_distill_type]
    try:
        task = kind(
            student_model=student,
            teacher_model=args.kd_model_name,
            criterion=loss,
            device=world.device,
            verbose=False,
            **{name: getattr(args, flag) for name, flag in flags.items()},
        )
    except (RuntimeError, ValueError, OSError) as err:
        raise ConfigError(f'kd_model_name: {args.kd_model_name} as a {args.kd_distill_type} teacher: {err}') from err
    # timm takes the normalisation of the model's pretrained weights, which --mean and --std may have overruled
    task.student_mean, task.student_std = (
        torch.tensor(config[key], device=world.device).view(1, -1, 1, 1) for key in ('mean', 'std')
    )
    teacher, channels = task.teacher, config['input_size'][0]
    if teacher.mean_kd.numel() != channels:  # made for colour, given grey images
        teacher.mean_kd, teacher.std_kd = (
            values.mean(1, keepdim=True).expand(-1, channels, -1, -1) for values in (teacher.mean_kd, teacher.std_kd)
        )
    return task
