"""What makes results comparable: a folder of a protocol holds runs of the same settings, weights and images alone."""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from typing import Any

import numpy as np

from ..data.vtab import Task
from ..engine.checkpoints import write_text
from ..engine.config import ConfigError, as_dict
from ..engine.files import write_atomically
from ..engine.runs import RESULT
from .finetune import Job
from .finetune_build import arm_settings, digest, model_of
from .protocol import PREDICTIONS, Plan, Source

__all__ = ['check_images', 'check_same', 'fingerprint', 'identity', 'record']

# Settings that leave a run's result what it is: those that say which runs there are, where they go, how many at a time.
HARMLESS = frozenset(
    """
    tasks only arms baselines lrs tune_seeds final_seeds jobs threads dry_run table_only workers save_models
    output experiment validation_batch_size device_modules dataset_download
    """.split()  # noqa: SIM905, quotes and commas are harder to read
)
# Those for which `identity` has what they come to: two files of the same weights are one, and two arms may differ.
COVERED = frozenset('pretrained_path model model_kwargs beta_range alpha_std mask_lr_scale'.split())  # noqa: SIM905
# Images are told by their names, wherever they are: `data` in a run's result.
ELSEWHERE = frozenset(['data_dir'])


def identity(args: Namespace, arm: str) -> dict[str, Any]:
    """The settings that make the results of an arm what they are."""
    settings, mask_lr_scale = arm_settings(args, arm)
    name, kwargs = model_of(args)
    hidden = HARMLESS | COVERED | ELSEWHERE
    values = {key: value for key, value in as_dict(args).items() if key not in hidden}
    values.update(model=name, model_kwargs=kwargs, masks_of_arm=settings, mask_lr_scale=mask_lr_scale)
    values['weights'] = digest(args.pretrained_path) if args.pretrained_path else None
    return json.loads(json.dumps(values))


def fingerprint(source: Source, *splits: Any) -> str:
    """What tells the images of splits, as `source.open` gives them, from others: a digest of their lists."""
    content = hashlib.sha256()
    for split in splits:
        content.update('\n'.join([*source.listed(split), '']).encode(errors='surrogateescape'))
    return content.hexdigest()[:16]


def check_images(plan: Plan, task: Task, stage: str, seed: int, data: str) -> None:
    """See that what is in the folder was run with the images of now.

    Args:
        plan: Of the protocol.
        task: Which.
        stage: `tune` or `final`.
        seed: Of the runs.
        data: `fingerprint` of their images.

    Raises:
        ConfigError: It was not.
    """
    for job in plan.ready():
        if (job.task, job.stage, job.seed) == (task.name, stage, seed):
            before = plan.result(job)
            if before and before.get('data', data) != data:
                raise ConfigError(
                    f'data_dir: got {plan.args.data_dir!r}, whose images or labels are not those of '
                    f'{plan.folder(job)}; take another --experiment, or delete that folder'
                )


def check_same(plan: Plan) -> None:
    """See that what is in the folder was run with the settings of now.

    Raises:
        ConfigError: It was not.
    """
    for arm in plan.arms:
        now = identity(plan.args, arm)
        for job in plan.ready():
            before = plan.result(job) if job.arm == arm else None
            for key, value in now.items() if before else ():
                if before['settings'].get(key, value) != value:
                    raise ConfigError(
                        f'output: {plan.folder(job)} was run with {key}={before["settings"][key]!r}, and now it is '
                        f'{value!r}; take another --experiment, or delete that folder'
                    )


def record(plan: Plan, job: Job, result: dict[str, Any], predictions: np.ndarray) -> None:
    """Leave a run's files, `result.json` as the last."""
    folder = plan.folder(job)
    if job.stage == 'final':
        write_atomically(folder / PREDICTIONS, lambda file: np.save(file, predictions))
    full = {'model': model_of(plan.args)[0], **result, 'settings': identity(plan.args, job.arm)}
    write_text(folder / RESULT, json.dumps(full, indent=1) + '\n')
