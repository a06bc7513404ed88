"""`scripts/gpu_check.py` as far as it goes without a GPU: arguments, wheels, steps and the report."""

import importlib.util
import json
import os
import sys
import zipfile
from pathlib import Path

import pytest

from violin_timm.engine.config import parse as parse_training
from violin_timm.evals import benchmark

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope='module')
def script():
    spec = importlib.util.spec_from_file_location('gpu_check', ROOT / 'scripts' / 'gpu_check.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_wheel(folder, name, version, code=''):
    """A wheel of one module that pip accepts."""
    path = folder / f'{name}-{version}-py3-none-any.whl'
    info = f'{name}-{version}.dist-info'
    with zipfile.ZipFile(path, 'w') as wheel:
        wheel.writestr(f'{name}/__init__.py', code)
        wheel.writestr(
            f'{info}/METADATA',
            f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: no-such-thing-anywhere\n',
        )
        wheel.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        wheel.writestr(f'{info}/RECORD', '')
    return path


def test_without_a_gpu_one_line_and_status_2(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script, 'find_gpu', lambda: None)
    assert script.main(['--json', str(tmp_path / 'r.json')]) == 2
    assert capsys.readouterr().err == 'gpu-check: there is no CUDA device here\n'
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--wheels', '/none'], '--wheels: got /none, which is no folder'),
        (['--steps', 'tset'], "invalid choice: 'tset' (choose from"),
        (['--jsn', 'x'], 'unrecognized arguments'),
    ],
)
def test_bad_arguments(script, argv, message, capsys):
    assert script.main(argv) == 2
    assert message in capsys.readouterr().err


def test_versions(script):
    assert script.version_key('1.0.31.dev0+cu1') == (1, 0, 31) and script.version_key('x') == ()
    assert script.version_key('1.0.9') < script.version_key('1.0.31') < script.version_key('1.1')


@pytest.mark.parametrize(
    ('installed', 'wanted'),
    [('1.0.9', ['timm-1.0.31']), (None, ['timm-1.0.31']), ('1.0.31', []), ('1.2', [])],
)
def test_wheels_that_are_wanted(script, installed, wanted, monkeypatch, tmp_path):
    here = {'timm': installed, 'pytest': '1', 'scikit-learn': None}
    monkeypatch.setattr(script, 'installed_version', here.get)
    for name, version in (('timm', '1.0.31'), ('pytest', '9'), ('scikit_learn', '1.9')):
        make_wheel(tmp_path, name, version)
    found = [wheel.name.split('-py3')[0] for wheel in script.wanted_wheels(tmp_path)]
    assert found == ['scikit_learn-1.9', *wanted]
    assert script.wanted_wheels(tmp_path / 'none') == []


def test_an_old_wheel_does_not_help(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, 'installed_version', lambda name: '1.0.9')
    make_wheel(tmp_path, 'timm', '1.0.20')
    assert script.wanted_wheels(tmp_path) == []
    with pytest.raises(RuntimeError, match=r'timm: got 1\.0\.9; 1\.0\.31 or newer is needed'):
        script.check_oldest([])
    script.check_oldest([make_wheel(tmp_path, 'timm', '1.0.31')])


def test_wheels_are_installed_without_requirements_and_found(script, tmp_path):
    wheel = make_wheel(tmp_path, 'violin_dummy', '1.0', 'value = 3')
    script.install([wheel], tmp_path / 'packages')
    environment = {**os.environ, 'PYTHONPATH': str(tmp_path / 'packages')}
    step = script.run_step([sys.executable, '-c', 'import violin_dummy; print(violin_dummy.value)'], 60, environment)
    assert step['status'] == 0 and step['tail'] == ['3']


def test_a_broken_wheel_is_named(script, tmp_path):
    (tmp_path / 'broken-1.0-py3-none-any.whl').write_text('no archive')
    with pytest.raises(RuntimeError, match=r'pip cannot install broken-1\.0'):
        script.install([tmp_path / 'broken-1.0-py3-none-any.whl'], tmp_path / 'packages')


def test_commands_are_understood_by_what_they_call(script, tmp_path):
    commands = script.commands(tmp_path)
    assert set(commands) == set(script.STEPS)
    assert (ROOT / commands['tests'][3]).is_dir()
    args = parse_training(commands['training'][4:])
    assert args.device == 'cuda' and args.amp and args.dataset == 'digits' and args.experiment == 'training'
    assert (ROOT / 'configs' / 'quick' / 'digits.yaml').is_file()
    command = commands['benchmark'][4:]
    command[command.index('cuda')] = 'cpu'
    assert benchmark.suite(benchmark._parser().parse_args(command).suite)


def test_a_step_out_of_time(script):
    step = script.run_step([sys.executable, '-uc', 'import time; print("begun"); time.sleep(60)'], 3, dict(os.environ))
    assert step['status'] == 124 and step['tail'] == ['begun'] and step['seconds'] < 30


JUNIT = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="off by 1"/></testcase>
<testcase name="c"><skipped message="no NCCL"/></testcase><testcase name="d"><error message="crash"/></testcase>
</testsuite></testsuites>"""


def test_tests_are_counted(script, tmp_path):
    (tmp_path / 'tests.xml').write_text(JUNIT)
    result = script.read_tests(tmp_path / 'tests.xml')
    assert result['passed'] == 1 and result['skipped'] == [{'test': 'c', 'message': 'no NCCL'}]
    assert [(f['test'], f['message']) for f in result['failed']] == [('b', 'off by 1'), ('d', 'crash')]
    assert script.read_tests(tmp_path / 'none.xml') == {'passed': 0, 'skipped': [], 'failed': []}


WRITES = {
    'tests': ('tests.xml', '<testsuite><testcase name="a"/></testsuite>'),
    'training': ('training/result.json', '{"test": {"top1": 95.0}}'),
    'benchmark': ('benchmark.json', '{"cases": {}}'),
}


def pretend(writes, status=0):
    """Commands that leave files instead of doing the work."""

    def commands(folder):
        result = {}
        for name, (path, text) in writes.items():
            code = (
                f'import pathlib, sys; path = pathlib.Path({str(folder / path)!r}); '
                f'path.parent.mkdir(exist_ok=True); path.write_text({text!r}); print({name!r}); '
                f'sys.exit({status})'
            )
            result[name] = [sys.executable, '-c', code]
        return result

    return commands


def check(script, monkeypatch, tmp_path, writes, status=0):
    monkeypatch.setattr(script, 'find_gpu', lambda: {'gpu': 'none'})
    monkeypatch.setattr(script, 'commands', pretend(writes, status))
    path = tmp_path / 'results' / 'gpu.json'
    code = script.main(['--json', str(path)])
    return code, json.loads(path.read_text())


def test_report(script, monkeypatch, tmp_path):
    code, report = check(script, monkeypatch, tmp_path, WRITES)
    assert code == 0 and report['ok'] and report['machine'] == {'gpu': 'none'} and report['wheels'] == []
    assert list(report['steps']) == ['tests', 'training', 'benchmark']
    for name, step in report['steps'].items():
        assert step['ok'] and step['status'] == 0 and step['tail'] == [name] and step['seconds'] >= 0
    assert report['steps']['tests']['passed'] == 1
    assert report['steps']['training']['result'] == {'test': {'top1': 95.0}}
    assert report['steps']['benchmark']['complete']


def test_a_failed_step_is_reported_and_the_others_run(script, monkeypatch, tmp_path):
    code, report = check(script, monkeypatch, tmp_path, WRITES, status=3)
    assert code == 1 and not report['ok'] and [s['status'] for s in report['steps'].values()] == [3, 3, 3]


def test_no_tests_and_no_results_are_failures(script, monkeypatch, tmp_path):
    skipped = '<testsuite><testcase name="a"><skipped message="no GPU"/></testcase></testsuite>'
    writes = {
        'tests': ('tests.xml', skipped),
        'training': ('x', ''),
        'benchmark': ('benchmark.partial.json', '{"a": 1}'),
    }
    code, report = check(script, monkeypatch, tmp_path, writes)
    steps = report['steps']
    assert code == 1 and not any(steps[name]['ok'] for name in ('tests', 'training'))
    assert steps['benchmark']['result'] == {'a': 1} and not steps['benchmark']['complete']


def test_too_old_a_timm_ends_with_status_2(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script, 'find_gpu', lambda: {'gpu': 'none'})
    monkeypatch.setattr(script, 'installed_version', lambda name: '1.0.9')
    assert script.main(['--json', str(tmp_path / 'r.json'), '--wheels', str(tmp_path)]) == 2
    assert 'timm: got 1.0.9' in capsys.readouterr().err


def test_it_fits_its_time(script):
    """Steps may not take more than all of them together, which is under 8 minutes."""
    assert script.SECONDS < 480 and max(script.STEPS.values()) < script.SECONDS
