"""timm's own model tests, run on the Violins.

    python scripts/test_timm.py                                   # the small variants
    python scripts/test_timm.py --models all                      # base, large and huge too: slow
    python scripts/test_timm.py --models violin_pixel_nano violin_deit_tiny
    python scripts/test_timm.py --list                            # what would run, and what would not
    python scripts/test_timm.py --models small -- -x --durations=10   # the rest goes to pytest

The first run downloads the source distribution of the installed timm into ``.cache/timm-<version>``; later ones need no
network. On the copy of its ``tests/test_models.py`` there, two lists are edited, as for any family of Vision
Transformers: our names join `NON_STD_FILTERS` (no features like a CNN's), and our modules `FEAT_INTER_FILTERS` (they
have a `forward_intermediates`). What of its tests is left out, and why, is `DESELECTED`.

The exit status is pytest's: 0 if all passed; and 4 if a variant that was asked for has no test, or not all it should.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FAMILY = 'violin'
SMALL = 50e6  # parameters up to which a variant is small

# (test, variants, reason)
DESELECTED = (
    ('test_model_load_pretrained', '*', 'needs the network: downloads weights'),
    ('test_model_features_pretrained', '*', 'needs the network: downloads weights'),
    # timm marks it "slow, excluded from CI", and leaves out xcit_large_24_p8 and whatever is huge
    ('test_prune_intermediate_layers_contract', '*_patch8', 'slow: prunes at every layer, on 784 patches'),
)
# that each variant has these shows that both edits have taken
REQUIRED = ('test_model_forward', 'test_model_default_cfgs_non_std', 'test_model_forward_intermediates')


def add_to_list(source: str, name: str, entries: list[str]) -> str:
    """Python source with entries put at the head of a list, which must start as ``name = [`` on one line."""
    added = ''.join(f'\n    {entry!r},' for entry in entries)
    edited, count = re.subn(rf'^{name} = \[$', lambda match: match[0] + added, source, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f'{name}: got {count} lines "{name} = [" in the tests of this timm; exactly one is needed')
    return edited


def edit(source: str, modules: list[str]) -> str:
    """timm's test_models.py with our models counted among the Vision Transformers."""
    source = add_to_list(source, 'NON_STD_FILTERS', [f'{FAMILY}*'])
    return add_to_list(source, 'FEAT_INTER_FILTERS', modules)


def select(wanted: list[str], sizes: dict[str, int], limit: float = SMALL) -> list[str]:
    """Variants to test.

    Args:
        wanted: ``['small']``, ``['all']``, or names.
        sizes: Number of parameters of every variant.
        limit: Largest number of parameters of a small variant.

    Raises:
        ValueError: If a name is none of the variants.
    """
    if wanted == ['all']:
        return list(sizes)
    if wanted == ['small']:
        return [name for name, size in sizes.items() if size <= limit]
    for name in wanted:
        if name not in sizes:
            raise ValueError(f'--models: got {name!r}; choose small, all, or some of {", ".join(sizes)}')
    return list(dict.fromkeys(wanted))


def deselection(test: str, variant: str) -> str | None:
    """Why a test of a variant is left out, or None if it is not."""
    for name, pattern, reason in DESELECTED:
        if test == name and fnmatch.fnmatch(variant, pattern):
            return reason
    return None


class Selection:
    """pytest plugin that keeps the tests of some variants, by exact name, and counts what became of them."""

    def __init__(self, variants: list[str]) -> None:
        self.variants = variants
        self.deselected = Counter()
        self.tests: dict[str, list[str]] = {variant: [] for variant in variants}
        self.owner: dict[str, str] = {}
        self.outcomes: dict[str, Counter] = {variant: Counter() for variant in variants}

    def pytest_collection_modifyitems(self, config, items) -> None:
        kept, others = [], []
        for item in items:
            (kept if self._keeps(item) else others).append(item)
        config.hook.pytest_deselected(items=others)
        items[:] = kept
        for variant, tests in self.tests.items():
            missing = [test for test in REQUIRED if test not in tests]
            if missing:
                raise pytest.UsageError(f"{variant}: timm's suite has no {', '.join(missing)} for it")

    def _keeps(self, item) -> bool:
        name = getattr(item, 'callspec', None) and item.callspec.params.get('model_name')
        variant = str(name).split('.')[0]
        if variant not in self.tests:
            return False
        test = item.originalname
        reason = deselection(test, variant)
        if reason:
            self.deselected[test, reason] += 1
            return False
        self.tests[variant].append(test)
        self.owner[item.nodeid] = variant
        return True

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == 'call' or report.outcome != 'passed':
            self.outcomes[self.owner[report.nodeid]][report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter) -> None:
        terminalreporter.section("timm's suite")
        terminalreporter.write_line('\n'.join(self.table()))

    def table(self) -> list[str]:
        """Counts per variant, and the tests that were left out, as lines of text."""
        columns = ('passed', 'failed', 'skipped')
        lines = [f'{"variant":26}{"collected":>10}' + ''.join(f'{c:>10}' for c in columns)]
        for variant, tests in self.tests.items():
            counts = ''.join(f'{self.outcomes[variant][c]:10}' for c in columns)
            lines.append(f'{variant:26}{len(tests):10}{counts}')
        lines.append(f'{"all":26}{sum(map(len, self.tests.values())):10}')
        for test, pattern, reason in DESELECTED:
            lines.append(f'deselected {self.deselected[test, reason]:3} of {test} [{pattern}]: {reason}')
        return lines


def variant_sizes() -> dict[str, int]:
    """Number of parameters of every registered variant, the smallest first."""
    import timm
    import torch

    sizes = {}
    for name in timm.list_models(f'{FAMILY}*'):
        with torch.device('meta'):
            sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
    return dict(sorted(sizes.items(), key=lambda item: item[1]))


def download(version: str, folder: Path) -> Path:
    """The source distribution of a timm version, fetched by pip unless the folder has it."""
    archive = folder / f'timm-{version}.tar.gz'
    if not archive.exists():
        command = [
            sys.executable,
            '-m',
            'pip',
            'download',
            '--quiet',
            '--no-deps',
            '--no-binary',
            'timm',
            '--dest',
            str(folder),
            f'timm=={version}',
        ]
        print(' '.join(command), flush=True)
        subprocess.run(command, check=True)
    return archive


def prepare(modules: list[str]) -> Path:
    """Put an edited copy of timm's tests into the cache.

    Only what they need is unpacked: with more, its timm would be imported instead of the installed one.

    Returns:
        Folder with ``pyproject.toml`` (timm's pytest settings) and ``tests/test_models.py``.
    """
    import timm

    folder = ROOT / '.cache' / f'timm-{timm.__version__}'
    (folder / 'tests').mkdir(parents=True, exist_ok=True)
    with tarfile.open(download(timm.__version__, folder)) as archive:
        for name in ('pyproject.toml', 'tests/conftest.py', 'tests/test_models.py'):
            text = archive.extractfile(f'timm-{timm.__version__}/{name}').read().decode()
            (folder / name).write_text(edit(text, modules) if name.endswith('test_models.py') else text)
    return folder


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and what comes after ``--``."""
    cut = argv.index('--') if '--' in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--models',
        nargs='+',
        default=['small'],
        metavar='NAME',
        help=f'small (default: up to {SMALL / 1e6:.0f} M parameters), all, or names',
    )
    parser.add_argument('--list', action='store_true', help='print what would run, and what is left out')
    return parser.parse_args(argv[:cut]), argv[cut + 1 :]


def main(argv: list[str] | None = None) -> int:
    args, extra = parse(sys.argv[1:] if argv is None else argv)
    sys.path.insert(0, str(ROOT))
    os.environ['TORCH_BACKEND'] = 'violin_timm'  # timm's tests import the module of this name
    import timm

    import violin_timm  # noqa: F401

    sizes = variant_sizes()
    try:
        variants = select(args.models, sizes)
        modules = sorted({timm.models.model_entrypoint(name).__module__.rpartition('.')[2] for name in sizes})
        folder = prepare(modules)
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f'test_timm: {error}', file=sys.stderr)
        return 2
    options = [
        '-c',
        str(folder / 'pyproject.toml'),
        '--import-mode=importlib',
        '-k',
        FAMILY,
        '-p',
        'no:cacheprovider',
        '-W',
        'ignore::pytest.PytestWarning',
    ]
    if args.list:
        options += ['--collect-only', '-q']
    return int(pytest.main([*options, *extra, str(folder / 'tests' / 'test_models.py')], plugins=[Selection(variants)]))


if __name__ == '__main__':
    raise SystemExit(main())
