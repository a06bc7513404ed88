"""Violin and plain twin, pretrained with DINO for several seeds, compared in pairs by k-NN on held-out images.

python scripts/study_dino.py --seeds 0 1 2 3 4 --results results/dino_fashion

One run at a time, each on one thread; a run that is there already is not made again, and one that was killed goes on.
Leaves RESULTS.json and RESULTS.md. Arguments that are not its own go to `violin dino`.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a clone works without being installed, too

from violin_timm.engine.checkpoints import write_text  # noqa: E402
from violin_timm.evals.statistics import paired_difference, summarise  # noqa: E402

ARMS = ('violin', 'plain')


def arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The script's own settings, and what is left for `violin dino`."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0], allow_abbrev=False)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2, 3, 4])
    parser.add_argument('--config', default='configs/quick/dino_study', help='without .yaml and _plain.yaml')
    parser.add_argument('--output', type=Path, default=ROOT / 'output/dino_study', help='folder of the runs')
    parser.add_argument('--results', type=Path, default=ROOT / 'results/dino_fashion', help='without .json and .md')
    return parser.parse_known_args(argv)


def train(args: argparse.Namespace, rest: list[str], arm: str, seed: int) -> dict:
    """Contents of a run's `result.json`, after the run where need be."""
    name = f'{arm}-{seed}'
    result = args.output / name / 'result.json'
    if not result.exists():
        config = args.config + ('_plain' if arm == 'plain' else '') + '.yaml'
        command = [
            sys.executable,
            '-m',
            'violin_timm',
            'dino',
            '--config',
            config,
            '--seed',
            str(seed),
            '--resume',
            'auto',
        ]
        command += ['--output', str(args.output), '--experiment', name, *rest]
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    return json.loads(result.read_text())


def compare(results: dict[str, dict[int, dict]]) -> dict:
    """Means over seeds, and the paired differences of k-NN accuracies, with 95 % intervals."""
    metrics = sorted(next(iter(results['violin'].values()))['teacher'])
    table = {}
    for metric in metrics:
        values = {arm: {seed: run['teacher'][metric] for seed, run in runs.items()} for arm, runs in results.items()}
        table[metric] = {
            'violin': vars(summarise(list(values['violin'].values()))),
            'plain': vars(summarise(list(values['plain'].values()))),
            'difference': vars(paired_difference(values['violin'], values['plain'])),
            'violin_untrained': [run['untrained'][metric] for run in results['violin'].values()],
            'plain_untrained': [run['untrained'][metric] for run in results['plain'].values()],
            'pixels': next(iter(results['violin'].values()))['pixels'][metric],
            'values': values,
        }
    return table


def markdown(table: dict, seeds: list[int]) -> str:
    """The comparison as a page."""
    lines = [
        '# DINO on Fashion-MNIST: Violin and its plain twin',
        '',
        f'`python scripts/study_dino.py --seeds {" ".join(map(str, seeds))}`; top-1 in per cent on held-out images',
        'after the last epoch: mean and deviation over seeds, and the mean of the paired differences with its 95 % t',
        'interval.',
        '',
        '| evaluation | pixels | Violin | plain | Violin - plain | untrained Violin | untrained plain |',
        '| --- | --- | --- | --- | --- | --- | --- |',
    ]
    for metric, row in table.items():
        violin, plain, difference = row['violin'], row['plain'], row['difference']
        spread = [f'{arm["mean"]:.2f} ± {arm["std"] or 0:.2f}' for arm in (violin, plain)]
        bounds = '' if difference['low'] is None else f' [{difference["low"]:+.2f}, {difference["high"]:+.2f}]'
        untrained = [f'{sum(row[key]) / len(row[key]):.2f}' for key in ('violin_untrained', 'plain_untrained')]
        cells = [metric, f'{row["pixels"]:.2f}', *spread, f'{difference["mean"]:+.2f}{bounds}', *untrained]
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines) + '\n'


def main(argv: list[str] | None = None) -> int:
    """Run the study."""
    args, rest = arguments(argv)
    args.output = args.output.resolve()
    results = {arm: {} for arm in ARMS}
    for seed in args.seeds:
        for arm in ARMS:
            results[arm][seed] = train(args, rest, arm, seed)
    table = compare(results)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.results.with_suffix('.json'), json.dumps(table, indent=1) + '\n')
    write_text(args.results.with_suffix('.md'), page := markdown(table, args.seeds))
    print(page)
    return 0


if __name__ == '__main__':
    sys.exit(main())
