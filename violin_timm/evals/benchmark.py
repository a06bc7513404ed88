"""`violin benchmark`: what a Violin costs beside timm's plain model with fused attention.

    violin benchmark --suite quick
    violin benchmark --suite issue --threads 2 --json results/benchmark-cpu.json
    violin benchmark --cases inference_224_b8 --rounds 20 --compare results/benchmark-cpu.json

Both models run in one process and take turns, so that what slows the machine slows both; the table shows medians and
quartiles of the ratios of paired rounds. Peak memory is that of a process for each. Time on a busy machine is worth
little even so: the load average is printed before and after.
"""

import argparse
import json
import os
import platform
import sys
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import timm
import torch

from ..version import __version__
from .benchmark_cases import CASES, SUITES, Case
from .benchmark_measure import measure
from .check import _device, _positive

__all__ = ['compare', 'main', 'read_report', 'run', 'suite', 'table']

FORMAT = 1  # of the report


def suite(name: str) -> List[Case]:
    """Cases of a suite; ``full`` is all that are not for GPUs alone."""
    if name == 'full':
        return [case for case in CASES.values() if case.suites != ('gpu',)]
    return [case for case in CASES.values() if name in case.suites]


def run(
    cases: List[Case],
    rounds: Optional[int] = None,
    device: str = 'cpu',
    keep: Callable[[Dict[str, Any]], None] = lambda report: None,
) -> Dict[str, Any]:
    """Measure cases, one after the other. A case that fails is recorded with its error, and the others go on.

    Args:
        cases: What to measure.
        rounds: Timed rounds, or None for as many as fit.
        device: Where models run.
        keep: Called with the unfinished report after every case.

    Returns:
        The report, as written to JSON: ``format``, ``date``, ``command``, ``machine``, ``load`` (average over a minute,
        before and after, and whether it was ``noisy``), and ``cases`` by name: ``settings``, ``target`` (upper bound of
        ``value``), ``met``, and what `benchmark_measure.measure` gives, or ``error``.
    """
    report: Dict[str, Any] = {
        'format': FORMAT,
        'date': datetime.now(timezone.utc).isoformat(timespec='seconds'),
        'command': ['violin', 'benchmark', *(word for word in sys.argv[1:] if word != 'benchmark')],
        'machine': machine(device),
        'load': {'before': _load()},
        'cases': {},
    }
    for index, case in enumerate(cases):
        print(f'{index + 1}/{len(cases)} {case.name}', file=sys.stderr, flush=True)
        entry = {'settings': case.settings(), 'target': case.target, 'met': None}
        try:
            entry.update(measure(case, rounds, device))
            if case.target is not None:
                entry['met'] = entry['value'] <= case.target
        except (RuntimeError, MemoryError) as error:  # out of memory, no compiler, ...
            entry['error'] = f'{type(error).__name__}: {error}'
        report['cases'][case.name] = entry
        keep(report)
    load = report['load']
    load['after'] = _load()
    # the benchmark's own threads are part of the second
    load['noisy'] = max(load['before'], load['after']) > torch.get_num_threads() + 0.5
    return report


def machine(device: str = 'cpu') -> Dict[str, Any]:
    """What the numbers depend on, apart from the cases."""
    facts: Dict[str, Any] = {
        'cpu': _cpu(),
        'cores': os.cpu_count(),
        'threads': torch.get_num_threads(),
        'device': device,
        'system': platform.platform(),
        'python': platform.python_version(),
        'torch': torch.__version__,
        'timm': timm.__version__,
        'violin_timm': __version__,
    }
    if torch.device(device).type == 'cuda':
        facts['gpu'] = torch.cuda.get_device_name(device)
        facts['cuda'] = torch.version.cuda
    return facts


def _cpu() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
        return next(line.split(':', 1)[1].strip() for line in lines if line.startswith('model name'))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _load() -> float:
    return round(os.getloadavg()[0], 2) if hasattr(os, 'getloadavg') else 0.0


def table(report: Dict[str, Any], changes: Optional[Dict[str, str]] = None) -> str:
    """The report as aligned columns; `changes` from `compare` are one more."""
    rows = [['case', 'plain', 'violin', 'value', 'quartiles', 'target', '', 'change' if changes else '', '']]
    for name, entry in report['cases'].items():
        if 'error' in entry:
            rows.append([name, '', '', 'failed', '', '', '', '', entry['error'].splitlines()[0][:100]])
            continue
        target = '' if entry['target'] is None else f'<= {entry["target"]:.4g}'
        met = {None: '', True: 'met', False: 'missed'}[entry['met']]
        plain, violin, quartiles, note = _columns(entry)
        value = f'{entry["value"]:.3f} {entry["unit"]}'
        rows.append([name, plain, violin, value, quartiles, target, met, (changes or {}).get(name, ''), note])
    widths = [max(map(len, column)) for column in zip(*rows)]
    right = (1, 2, 3, 7)
    return '\n'.join(
        '  '.join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
            if width
        ).rstrip()
        for row in rows
    )


def _columns(entry: Dict[str, Any]) -> List[str]:
    """Plain, violin, quartiles and note of one line."""
    if 'seconds' in entry:
        seconds, ratio = entry['seconds'], entry['ratio']
        notes = {
            'mask_share': 'masks of all layers / training step',
            'backend': 'flex / eager',
            'mask': 'against sigmoid(beta) ** d in plain autograd',
            'mask_log': 'against exp(-rate * d) in plain autograd',
            'mask_forward': 'against exp(-rate * d)',
        }
        return [
            *(f'{1e3 * seconds[side]["median"]:.2f} ms' for side in ('plain', 'violin')),
            f'{ratio["q1"]:.3f} .. {ratio["q3"]:.3f}',
            notes.get(entry['settings']['kind'], ''),
        ]
    if 'bytes' in entry:
        heads, length, _ = entry['map_shape']
        return [
            *(f'{entry["bytes"][side] / 2**20:.0f} MiB' for side in ('plain', 'violin')),
            '',
            f'{entry["ratio"]["median"]:.2f} x, {entry["maps"]["violin"]:.2f} float32 maps of '
            f'{heads} x {length} x {length}; plain {entry["maps"]["plain"]:.2f}',
        ]
    work, parameters = entry['multiply_adds'], entry['parameters']
    return [
        f'{work["plain"] / 1e9:.2f} G',
        f'+{(work["mask"] + work["scores"]) / 1e9:.2f} G',
        '',
        f'multiply-adds, {work["percent_mask_kept"]:.3f} % with the mask kept; parameters +{parameters["added"]}, '
        f'{parameters["percent"]:.4f} % (paper, DeiT-B at 384: 0.64 %, 0.0015 %)',
    ]


def compare(report: Dict[str, Any], earlier: Dict[str, Any]) -> Dict[str, str]:
    """Change of the value of every case since an earlier report, such as ``-3.1 %``."""
    changes = {}
    for name, entry in report['cases'].items():
        old = earlier['cases'].get(name, {})
        if 'value' not in entry or 'value' not in old:
            changes[name] = 'new' if 'value' in entry else ''
        elif entry['settings'] != old['settings']:
            changes[name] = 'other settings'
        else:
            changes[name] = f'{100 * (entry["value"] / old["value"] - 1):+.1f} %'
    return changes


def read_report(path: Path) -> Dict[str, Any]:
    """Read an earlier report.

    Raises:
        ValueError: If it cannot be read, or is something else.
    """
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f'--compare: cannot read {path}: {error}') from error
    if not isinstance(report, dict) or report.get('format') != FORMAT or not isinstance(report.get('cases'), dict):
        raise ValueError(f'--compare: {path} is no report of violin benchmark, of format {FORMAT}')
    return report


def write_json(path: Path, report: Dict[str, Any]) -> None:
    """Write a report, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + '.part')
    part.write_text(json.dumps(report, indent=1) + '\n')
    part.replace(path)


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command.

    Args:
        argv: Arguments (default: the program's).

    Returns:
        Exit status: 0, whether targets are met or missed; 1 if a case failed, 2 for arguments that cannot be.
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said what is wrong, or printed the help
        return stop.code
    path = args.json or _default_path(args)
    try:
        earlier = read_report(args.compare) if args.compare else None
        path.parent.mkdir(parents=True, exist_ok=True)  # before minutes of work, not after
    except (ValueError, OSError) as error:
        print(f'violin benchmark: {error}', file=sys.stderr)
        return 2
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads or threads)
    try:
        # a run that is killed leaves what it had, and the earlier report as it was
        unfinished = path.with_suffix('.partial.json')
        cases = args.cases or suite(args.suite or 'quick')
        report = run(cases, args.rounds, args.device, partial(write_json, unfinished))
    finally:
        torch.set_num_threads(threads)
    write_json(path, report)
    unfinished.unlink(missing_ok=True)
    _print(report, earlier)
    print(f'\nwritten to {path}')
    return int(any('error' in entry for entry in report['cases'].values()))


def _print(report: Dict[str, Any], earlier: Optional[Dict[str, Any]]) -> None:
    facts, load = report['machine'], report['load']
    print(
        f'{facts.get("gpu", facts["cpu"])}, {facts["threads"]} threads of {facts["cores"]} cores, '
        f'torch {facts["torch"]}, timm {facts["timm"]}\n'
    )
    print(table(report, compare(report, earlier) if earlier else None))
    print(
        f'\nload average {load["before"]} before, {load["after"]} after'
        + ('; the machine was busy: do not trust these times' if load['noisy'] else '')
    )
    if earlier:
        other = [
            f'{key} {earlier["machine"].get(key)}'
            for key in ('cpu', 'gpu', 'threads', 'torch', 'timm')
            if earlier['machine'].get(key) != facts.get(key)
        ]
        print(f'change since {earlier["date"]}' + (f', when it was {", ".join(other)}' if other else ''))


def _default_path(args: argparse.Namespace) -> Path:
    """Only the suite that answers for the targets writes to the plain name."""
    which = 'cases' if args.cases else args.suite or 'quick'
    return Path('results', f'benchmark-{torch.device(args.device).type}{"" if which == "issue" else "-" + which}.json')


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='violin benchmark',
        description="Time and memory of Violins beside timm's plain models.",
        epilog='cases: ' + ', '.join(CASES),
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument('--cases', metavar='NAME', nargs='+', type=_case, help='cases to measure, see below')
    which.add_argument(
        '--suite',
        type=_suite,
        help=f'{", ".join(SUITES)} (default: quick; issue takes about 10 minutes on two cores)',
    )
    parser.add_argument('--threads', metavar='N', type=_positive, help="CPU threads (default: torch's)")
    parser.add_argument('--rounds', metavar='N', type=_positive, help='timed rounds (default: by duration, 6 to 40)')
    parser.add_argument('--device', type=_device, default='cpu', help='where models run (default: cpu)')
    parser.add_argument(
        '--json', metavar='FILE', type=Path, help='report to write (default: results/benchmark-DEVICE[-SUITE].json)'
    )
    parser.add_argument('--compare', metavar='FILE', type=Path, help='earlier report to show changes from')
    return parser


def _case(text: str) -> Case:
    if text not in CASES:
        raise argparse.ArgumentTypeError(f'got {text!r}; choose from {", ".join(CASES)}')
    return CASES[text]


def _suite(text: str) -> str:
    if text not in SUITES:
        raise argparse.ArgumentTypeError(f'got {text!r}; choose from {", ".join(SUITES)}')
    return text


if __name__ == '__main__':
    sys.exit(main())
