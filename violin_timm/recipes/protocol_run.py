"""A protocol from its first look at the settings to its table."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any, Callable

import torch

from ..engine.build import import_modules
from ..engine.checkpoints import write_text
from ..engine.config import ConfigError, as_yaml
from ..engine.logging import log
from ..engine.stopping import Interrupted, TrainingError
from ..evals.statistics import require_scipy
from .protocol import Plan, Source
from .protocol_check import check, look
from .protocol_table import as_csv, markdown
from .protocol_workers import device_of, run_all

__all__ = ['run_protocol']


def run_protocol(args: Namespace, prepare: Callable[[Namespace], tuple[Plan, Source]]) -> dict[str, Any]:
    """Check, run what is not done, and write the table.

    Args:
        args: Settings of the protocol.
        prepare: A module's function that makes plan and source from them.

    Returns:
        `folder`, and `failed`, the number of runs that failed.

    Raises:
        ConfigError: A setting that cannot be, or data that are not there; nothing was run.
        TrainingError: Some runs failed; the table has the others.
        Interrupted: Ctrl-C or SIGTERM.
    """
    import_modules(args)
    try:
        require_scipy()
    except ImportError as err:
        raise ConfigError(str(err)) from err
    plan, source = prepare(args)
    check(plan)
    if args.dry_run:
        _show(plan)
        return {'folder': plan.root, 'failed': 0}
    failed = 0
    if not args.table_only:
        device_of(args)
        look(plan, source)
        plan.root.mkdir(parents=True, exist_ok=True)
        write_text(plan.root / 'args.yaml', as_yaml(args))
        try:
            failed = run_all(plan, source, prepare)
        except KeyboardInterrupt:
            raise Interrupted('interrupted; the same command goes on from here') from None
    page = write_table(plan)
    print(f'\n{page}')
    log.info('written to %s', plan.root)
    if failed:
        raise TrainingError(f'{failed} runs failed; see failure.txt in their folders, and run the same command again')
    return {'folder': plan.root, 'failed': failed}


def write_table(plan: Plan) -> str:
    """Write `table.md` and `table.csv` of what has ended, and return the former."""
    args, results = plan.args, plan.results()
    what = (args.lrs, args.tune_seeds, args.final_seeds)
    baselines = [arm for arm in args.baselines if arm in plan.arms]
    page = markdown(
        results,
        plan.arms,
        plan.tasks,
        *what,
        baselines=baselines,
        predictions=plan.predictions,
        title=args.experiment,
        facts=facts(args),
    )
    plan.root.mkdir(parents=True, exist_ok=True)
    write_text(plan.root / 'table.md', page)
    write_text(plan.root / 'table.csv', as_csv(results, plan.arms, plan.tasks, *what, baselines=baselines))
    return page


def facts(args: Namespace) -> list[str]:
    """What a reader of the table needs to know."""
    weights = args.pretrained_path or (f"timm's weights of {args.model}" if args.pretrained else 'none: random weights')
    how = json.dumps(args.peft) if args.peft else 'all weights are trained'
    return [
        f'Model: {args.model or "as the weights have it"}; weights: {weights}; masks: {args.masks}; {how}.',
        f'{args.epochs} epochs, batch {args.batch_size}, layer decay {args.layer_decay}, factor on the rate of masks '
        f'{args.mask_lr_scale:g}; torch {torch.__version__}.',
    ]


def _show(plan: Plan) -> None:
    for job in plan.ready():
        print(f'{plan.folder(job)}  {"done" if plan.result(job) else "to do"}')
    print(f'{plan.total()} runs, {len(plan.results())} done; final runs are listed once their rate is chosen')
