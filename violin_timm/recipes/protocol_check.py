"""All that can be seen before a first run: names, grids, weights, images, models, and what is in the folder."""

from __future__ import annotations

from typing import Any

from ..data.vtab import Task
from ..engine.config import ConfigError, nearest
from ..engine.layer_decay import parameter_groups
from ..engine.logging import log
from ..peft import count_parameters
from .finetune_build import arm_settings, build_model, model_of, weights
from .protocol import Plan, Source, folder_of_arm
from .protocol_flags import VTAB
from .protocol_identity import check_images, check_same, fingerprint

__all__ = ['check', 'look']


def check(plan: Plan) -> None:
    """Look at everything that can be seen before the first run: names, grids, weights, and what is in the folder.

    Raises:
        ConfigError: It cannot be; or the folder has results of other settings.
    """
    args = plan.args
    for name in plan.arms:
        if name not in args.arms:
            raise ConfigError(f'only: got {name!r}{nearest(name, args.arms)}')
        arm_settings(args, name)
    for name in args.baselines:
        if name not in (*args.arms, *VTAB.flags['baselines'].default):
            raise ConfigError(f'baselines: got {name!r}{nearest(name, args.arms)}')
    for name in args.arms:
        if not name or set(name) & set('/\\\0') or name.startswith('.'):
            raise ConfigError(f'arms: got the name {name!r}; it becomes the name of a folder')
    for name in ('lrs', 'tune_seeds', 'final_seeds', 'only', 'tasks'):
        values = getattr(args, name, [])
        if len(set(values)) < len(values):
            raise ConfigError(f'{name}: got {values}, in which one is there twice')
    folders = {'arms': list(map(folder_of_arm, args.arms)), 'lrs': [f'{lr:g}' for lr in args.lrs]}
    for name, values in folders.items():
        if len(set(values)) < len(values):
            raise ConfigError(f'{name}: got {", ".join(map(str, getattr(args, name)))}; two would share a folder')
    if not 0 <= args.warmup_part < 1:
        raise ConfigError(f'warmup_part: got {args.warmup_part}; expected a part of the updates, below 1')
    if args.pretrained_path:
        weights(args.pretrained_path)
    if not args.pretrained_path and not args.pretrained:
        log.warning('pretrained_path: got nothing; %s starts from random weights', args.model)
    model_of(args)
    check_same(plan)


def look(plan: Plan, source: Source) -> None:
    """Open all splits and build each arm once; the log has their sizes.

    Raises:
        ConfigError: Something is not there, or does not fit; or the folder has results of other images.
    """
    _look_at_data(plan, source)
    _look_at_models(plan, source.tasks[0])


def _look_at_data(plan: Plan, source: Source) -> None:
    args = plan.args
    stages = {'final': args.final_seeds} if len(args.lrs) == 1 else {'tune': args.tune_seeds, 'final': args.final_seeds}
    for task in plan.tasks:
        for stage, seeds in stages.items():
            seen: dict[Any, str] = {}
            for seed in seeds:
                key = source.key(task, stage, seed)
                if key not in seen:
                    train, measured = source.open(task, stage, seed)
                    seen[key] = fingerprint(source, train, measured)
                    if len(train) < args.batch_size:
                        raise ConfigError(
                            f'batch_size: got {args.batch_size}, more than the {len(train)} images that {stage} runs '
                            f'of {task.name} learn from'
                        )
                check_images(plan, task, stage, seed, seen[key])
        log.info(
            '%s: %d classes, %d images to learn from, %d to test on', task.name, task.classes, len(train), len(measured)
        )


def _look_at_models(plan: Plan, task: Task) -> None:
    """Build each arm once: what does not fit ends the command here, and the parameters are counted."""
    for arm in plan.arms:
        settings, mask_lr_scale = arm_settings(plan.args, arm)
        model = build_model(plan.args, settings, task.classes, seed=0)
        parameter_groups(model, plan.args.weight_decay, plan.args.layer_decay, mask_lr_scale)
        counts = count_parameters(model)
        parts = ', '.join(f'{counts[key]} {key}' for key in ('adapter', 'mask', 'head', 'other') if counts[key])
        log.info('%s: %d parameters, %d trained: %s', arm, counts['total'], counts['trainable'], parts)
