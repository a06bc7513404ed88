"""What only a GPU can show, in one run of under 8 minutes: CUDA tests, a training on digits, the benchmark on CUDA.

python scripts/gpu_check.py
python scripts/gpu_check.py --wheels .whl --json results/gpu-check.json --steps tests benchmark

Writes one JSON report, also if a step fails or runs out of time. Runs on torch 2.11 or newer and needs no network: of
the wheels in the folder, those that are missing here, and timm's where the installed one is too old, are put into a
temporary folder and on PYTHONPATH. Besides the package's requirements it uses pytest, and scikit-learn for its digits.

Exit status: 0 if all went well, 1 if a step failed, 2 without a GPU or for arguments that cannot be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = {'timm': '1.0.31'}  # what is older gives way to a wheel
SECONDS = 470  # of everything; what is left of it bounds every step
STEPS = {'tests': 170, 'training': 80, 'benchmark': 400}  # name: most seconds it may take


def version_key(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``1.0.31.dev0`` -> ``(1, 0, 31)``."""
    numbers = re.match(r'\d+(\.\d+)*', text)
    return tuple(map(int, numbers.group().split('.'))) if numbers else ()


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def wanted_wheels(folder: Path) -> list[Path]:
    """Wheels of a folder that this environment lacks, or has in a version older than `OLDEST`."""
    wanted = []
    for wheel in sorted(folder.glob('*.whl')):
        name, version = wheel.name.split('-')[:2]
        name = re.sub(r'[-_.]+', '-', name).lower()
        here = installed_version(name)
        oldest = version_key(OLDEST.get(name, ''))
        if here is None or version_key(here) < oldest <= version_key(version):
            wanted.append(wheel)
    return wanted


def install(wheels: list[Path], target: Path) -> None:
    """Install wheels, and nothing that they require, into a folder.

    Raises:
        RuntimeError: pip could not.
    """
    if not wheels:
        return
    # with --target pip overlooks what is installed, so requirements would mean another torch
    options = ['--quiet', '--disable-pip-version-check', '--no-index', '--no-deps', '--target', str(target)]
    command = [sys.executable, '-m', 'pip', 'install', *options, *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f'--wheels: pip cannot install {", ".join(w.name for w in wheels)}: {done.stderr.strip()}')


def check_oldest(wheels: list[Path]) -> None:
    """Refuse an environment that is too old where no wheel helps.

    Raises:
        RuntimeError: Naming what is needed.
    """
    for name, oldest in OLDEST.items():
        here = installed_version(name)
        brought = any(wheel.name.lower().startswith(f'{name}-') for wheel in wheels)
        if not brought and (here is None or version_key(here) < version_key(oldest)):
            raise RuntimeError(f'{name}: got {here or "none"}; {oldest} or newer is needed, as a wheel in --wheels')


def commands(folder: Path) -> dict[str, list[str]]:
    """The command of every step; what they write goes into `folder`."""
    python = sys.executable
    on_gpu = ['--device', 'cuda', '--amp', '--amp-dtype', 'bfloat16', '--channels-last']
    train = ['train', '--config', 'configs/quick/digits.yaml', *on_gpu]
    benchmark = ['benchmark', '--suite', 'gpu', '--device', 'cuda']
    junit = f'--junitxml={folder / "tests.xml"}'
    return {
        'tests': [python, '-m', 'pytest', 'tests/gpu', '-q', '-p', 'no:cacheprovider', junit],
        'training': [python, '-m', 'violin_timm', *train, '--output', str(folder), '--experiment', 'training'],
        'benchmark': [python, '-m', 'violin_timm', *benchmark, '--json', str(folder / 'benchmark.json')],
    }


def run_step(command: list[str], seconds: float, environment: dict[str, str]) -> dict:
    """Run a command within a time; its exit status (124 out of time), seconds and last lines."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            timeout=seconds,
            text=True,
            errors='replace',
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        status, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as stop:
        status, said = 124, stop.stdout or ''
        said = said.decode(errors='replace') if isinstance(said, bytes) else said
    taken = round(time.monotonic() - start, 1)
    return {'command': command[1:], 'status': status, 'seconds': taken, 'tail': said.splitlines()[-40:]}


def collect(name: str, folder: Path) -> dict:
    """What a step left in the folder, as entries for its report."""
    if name == 'tests':
        return read_tests(folder / 'tests.xml')
    if name == 'training':
        return {'result': read_json(folder / 'training' / 'result.json')}
    whole = read_json(folder / 'benchmark.json')
    return {'result': whole or read_json(folder / 'benchmark.partial.json'), 'complete': whole is not None}


def read_json(path: Path) -> dict | None:
    """Contents of a file, or None if it is not there or not whole."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def read_tests(path: Path) -> dict:
    """Counts of a JUnit file and what failed; nothing passed where there is none."""
    result = {'passed': 0, 'skipped': [], 'failed': []}
    if not path.is_file():
        return result
    for case in ElementTree.parse(path).iter('testcase'):
        outcome = {child.tag: child for child in case}
        if 'failure' in outcome or 'error' in outcome:
            message = outcome.get('failure', outcome.get('error')).get('message', '')
            result['failed'].append({'test': case.get('name'), 'message': message[:2000]})
        elif 'skipped' in outcome:
            result['skipped'].append({'test': case.get('name'), 'message': outcome['skipped'].get('message', '')})
        else:
            result['passed'] += 1
    return result


def went_well(name: str, step: dict) -> bool:
    """Whether a step did what it is for."""
    if step['status']:
        return False
    return step['passed'] > 0 if name == 'tests' else step['result'] is not None


def check(steps: list[str], wheels: list[Path], machine: dict, folder: Path, limits: dict[str, int]) -> dict:
    """Run steps, one after the other, and assemble the report.

    Args:
        steps: Names out of `STEPS`.
        wheels: What to install first.
        machine: Facts for the report.
        folder: Room for what steps write.
        limits: Most seconds of every step; `SECONDS` bounds all of them together.
    """
    start = time.monotonic()
    install(wheels, folder / 'packages')
    paths = [str(folder / 'packages'), str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(paths)}
    report = {
        'format': 1,
        'date': datetime.now(timezone.utc).isoformat(timespec='seconds'),
        'machine': machine,
        'wheels': [wheel.name for wheel in wheels],
        'steps': {},
    }
    for name in steps:
        left = SECONDS - (time.monotonic() - start)
        print(f'{name} ...', flush=True)
        step = run_step(commands(folder)[name], max(1.0, min(limits[name], left)), environment)
        step.update(collect(name, folder))
        step['ok'] = went_well(name, step)
        report['steps'][name] = step
        print('\n'.join(step['tail']))
        print(f'{name}: {"ok" if step["ok"] else "FAILED"}, {step["seconds"]} s\n', flush=True)
    report['seconds'] = round(time.monotonic() - start, 1)
    report['ok'] = all(step['ok'] for step in report['steps'].values())
    return report


def find_gpu() -> dict | None:
    """Facts of the first GPU and of the software, or None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return {
        'gpu': torch.cuda.get_device_name(0),
        'capability': list(torch.cuda.get_device_capability(0)),
        'gpus': torch.cuda.device_count(),
        'torch': torch.__version__,
        'cuda': torch.version.cuda,
        'triton': installed_version('triton'),
        'timm': installed_version('timm'),
        'python': sys.version.split()[0],
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--wheels', type=Path, metavar='DIR', help='wheels to fall back on (default: .whl)')
    parser.add_argument('--json', type=Path, metavar='FILE', default=ROOT / 'results' / 'gpu-check.json')
    parser.add_argument('--steps', nargs='+', choices=STEPS, default=list(STEPS), help='what to run (default: all)')
    args = parser.parse_args(argv)
    if args.wheels is not None and not args.wheels.is_dir():
        parser.error(f'--wheels: got {args.wheels}, which is no folder')
    args.wheels = args.wheels or ROOT / '.whl'
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    try:
        args = parse(argv)
    except SystemExit as stop:  # argparse has said what is wrong, or printed the help
        return stop.code
    machine = find_gpu()
    if machine is None:
        print('gpu-check: there is no CUDA device here', file=sys.stderr)
        return 2
    try:
        wheels = wanted_wheels(args.wheels)
        check_oldest(wheels)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            report = check(args.steps, wheels, machine, Path(folder), STEPS)
    except (RuntimeError, OSError) as error:
        print(f'gpu-check: {error}', file=sys.stderr)
        return 2
    args.json.write_text(json.dumps(report, indent=1) + '\n')
    print(f'{"all ok" if report["ok"] else "FAILED"} in {report["seconds"]} s, written to {args.json}')
    return 0 if report['ok'] else 1


if __name__ == '__main__':
    sys.exit(main())
