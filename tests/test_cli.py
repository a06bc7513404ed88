"""The command line: exit statuses, and that mistakes and help cost nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from violin_timm import cli
from violin_timm.engine.config import ConfigError

ROOT = Path(__file__).parent.parent


def test_help(capsys):
    assert cli.main(['--help']) == 0
    out = capsys.readouterr().out
    assert 'usage: violin <command>' in out and all(name in out for name in cli.COMMANDS)


def test_no_command(capsys):
    assert cli.main([]) == 2
    assert 'usage: violin' in capsys.readouterr().err


def test_unknown_command(capsys):
    assert cli.main(['trian']) == 2
    assert "unknown command 'trian'; did you mean train?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--bath-size', '3'], "unknown flag '--bath-size'; did you mean --batch-size?"),
        (['--torchscript'], '--torchscript is a timm flag'),
        (['--device', 'cpu', '--model', 'violin_pixel_nan'], "model: got 'violin_pixel_nan'; did you mean violin"),
        (['--device', 'cpu', '--model', 'violin_pixel_nano', '--model-kwargs', 'curves=hilbrt'], 'hilbrt'),
        (['--device', 'cpu', '--model', 'violin_pixel_nano', '--model-kwargs', 'curvs=hilbert'], 'curvs'),
        (['--device', 'gpu'], "device: got 'gpu'; expected a torch device"),
        (['--device', 'cpu', '--resume', 'auto'], '--experiment'),
        (['--device', 'cpu', '--resume', '/none'], "resume: got '/none'"),
        (['--device', 'cpu', '--device-modules', 'nonesuch'], "device_modules: cannot import 'nonesuch'"),
    ],
)
def test_mistakes_end_with_status_2_and_write_nothing(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(['train', *argv]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count('\n') == 1
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_ends_with_status_1(capsys, monkeypatch):
    from violin_timm.recipes import supervised

    def fail(args):
        raise supervised.TrainingError('loss is nan')

    monkeypatch.setattr(supervised, 'run', fail)
    assert cli.main(['train']) == 1
    assert capsys.readouterr().err == 'violin train: loss is nan\n'


def test_settings_reach_the_recipe(monkeypatch):
    from violin_timm.recipes import supervised

    seen = []
    monkeypatch.setattr(supervised, 'run', seen.append)
    assert cli.main(['train', '--epochs', '3']) == 0
    assert seen[0].epochs == 3


@pytest.mark.parametrize('command', [['-m', 'violin_timm', 'train'], ['scripts/train.py']])
def test_entry_points(command, tmp_path):
    if command[0].startswith('scripts'):
        command = [str(ROOT / command[0])]
    done = subprocess.run([sys.executable, *command, '--bath-size', '3'], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert 'did you mean --batch-size?' in done.stderr and 'Traceback' not in done.stderr


def test_flags_are_parsed_without_torch():
    """The config module is loaded by itself: the package around it registers models, which needs torch."""
    code = (
        'import importlib.util, sys, types\n'
        'for name in ("violin_timm", "violin_timm.engine"):\n'
        '    package = types.ModuleType(name)\n'
        f'    package.__path__ = [{str(ROOT)!r} + "/" + name.replace(".", "/")]\n'
        '    sys.modules[name] = package\n'
        'from violin_timm.engine import config\n'
        'config.parse(["--epochs", "3"])\n'
        'print([name for name in ("torch", "timm", "numpy") if name in sys.modules])\n'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.stdout.strip() == '[]', done.stderr


def test_config_error_is_a_value_error():
    assert issubclass(ConfigError, ValueError)
