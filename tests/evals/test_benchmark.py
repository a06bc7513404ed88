"""`violin benchmark`: its cases, its report and its refusals. Nothing here looks at how long anything took."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from violin_timm.evals import benchmark, benchmark_cases, benchmark_measure
from violin_timm.evals.benchmark_cases import CASES, SIDES, SUITES, Case, plain_mask, sides, twins

NANO = {'model': 'violin_pixel_nano', 'image': (8, 8)}
TINY = {
    case.name: case
    for case in (
        Case('tiny_inference', 'inference', 1e6, **NANO),
        Case('tiny_training', 'training', 0.0, batch=2, **NANO),
        Case('tiny_bf16', 'training', batch=2, autocast='bfloat16', **NANO),
        Case('tiny_token', 'inference', class_token=True, **NANO),
        Case('tiny_share', 'mask_share', batch=2, **NANO),
        Case('tiny_mask', 'mask', image=(48, 32)),
        Case('tiny_mask_forward', 'mask_forward', image=(48, 32)),
        Case('tiny_added', 'added', **NANO),
    )
}
TIMED = [name for name in TINY if name != 'tiny_added']


@pytest.fixture
def tiny(monkeypatch):
    """The command with small cases instead of its own."""
    monkeypatch.setattr(benchmark, 'CASES', TINY)


def bench(*argv):
    return benchmark.main([str(arg) for arg in argv])


@pytest.fixture(scope='module')
def report():
    return json.loads(json.dumps(benchmark.run(list(TINY.values()), rounds=2)))


def test_report_has_its_keys(report):
    assert set(report) == {'format', 'date', 'command', 'machine', 'load', 'cases'}
    assert {'cpu', 'cores', 'threads', 'device', 'python', 'torch', 'timm', 'violin_timm'} <= set(report['machine'])
    assert set(report['load']) == {'before', 'after', 'noisy'}
    assert list(report['cases']) == list(TINY)
    assert all({'settings', 'target', 'met', 'value', 'unit'} <= set(case) for case in report['cases'].values())
    assert report['cases']['tiny_training']['settings']['batch'] == 2


@pytest.mark.parametrize('name', TIMED)
def test_times_and_ratios_are_finite_and_positive(name, report):
    case = report['cases'][name]
    assert set(case['seconds']) == set(SIDES) and case['unit'] == 'x'
    for numbers in (case['ratio'], *case['seconds'].values()):
        assert len(numbers['rounds']) == 2
        for value in (*numbers['rounds'], *(numbers[key] for key in ('median', 'q1', 'q3', 'min', 'max'))):
            assert math.isfinite(value) and value > 0
        assert numbers['min'] <= numbers['q1'] <= numbers['median'] <= numbers['q3'] <= numbers['max']
    pairs = zip(*(case['seconds'][side]['rounds'] for side in SIDES))
    assert case['ratio']['rounds'] == pytest.approx([ours / theirs for ours, theirs in pairs])
    assert case['value'] == case['ratio']['median']


def test_targets_are_upper_bounds(report):
    assert [report['cases'][f'tiny_{kind}']['met'] for kind in ('inference', 'training', 'bf16')] == [True, False, None]


def test_rounds_take_turns():
    order = []
    times = benchmark_measure.time_pair({side: lambda side=side: order.append(side) for side in SIDES}, rounds=4)
    assert order[-8:] == ['violin', 'plain', 'plain', 'violin'] * 2
    assert {side: len(values) for side, values in times.items()} == {'violin': 4, 'plain': 4}


def test_rounds_by_duration_are_even_and_bounded(monkeypatch):
    for estimate, expected in ((1e-6, 40), (1.0, 6), (100.0, 6)):
        monkeypatch.setattr(benchmark_measure, '_warm_up', lambda call, device, estimate=estimate: estimate)
        times = benchmark_measure.time_pair(dict.fromkeys(SIDES, lambda: None))
        assert len(times['violin']) == expected


def test_garbage_collection_is_off_while_timing_and_back_on(monkeypatch):
    import gc

    seen = []
    benchmark_measure.time_pair({'violin': lambda: seen.append(gc.isenabled()), 'plain': lambda: None}, rounds=2)
    assert seen[-2:] == [False, False] and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        benchmark_measure.time_pair({'violin': lambda: 1 / 0}, rounds=2)
    assert gc.isenabled()


@pytest.mark.parametrize('name', ['training_224_b8', 'inference_dino_5184', 'training_pixel_b8', 'added_deit_base_384'])
def test_twins_are_of_one_shape_and_tokens(name):
    with torch.device('meta'):
        violin, plain = (twins(CASES[name], (side,), 'meta')[side] for side in SIDES)
    ours = {key: value.shape for key, value in violin.state_dict().items() if '.decay.' not in key}
    assert ours == {key: value.shape for key, value in plain.state_dict().items()}
    assert violin.num_prefix_tokens == plain.num_prefix_tokens == int(CASES[name].class_token)
    assert violin.global_pool == plain.global_pool and type(violin.fc_norm) is type(plain.fc_norm)
    assert plain.blocks[0].attn.fused_attn


def test_twins_start_from_the_same_weights():
    models = twins(TINY['tiny_inference'])
    for key, value in models['plain'].state_dict().items():
        assert torch.equal(value, models['violin'].state_dict()[key])


def test_what_is_not_a_twin_is_refused(monkeypatch):
    real = benchmark_cases.timm.create_model
    monkeypatch.setattr(
        benchmark_cases.timm,
        'create_model',
        lambda name, **kwargs: real(name, qkv_bias=name.startswith('violin'), **kwargs),
    )
    with pytest.raises(RuntimeError, match=r'violin_pixel_nano: not the twin of vit_tiny_patch16_224, by .*qkv\.bias'):
        twins(TINY['tiny_inference'])


def test_unfused_timm_is_refused(monkeypatch):
    from timm.layers import attention

    monkeypatch.setattr(attention, 'use_fused_attn', lambda *args: 0)
    with pytest.raises(RuntimeError, match='TIMM_FUSED_ATTN'):
        twins(TINY['tiny_inference'])


def test_the_reference_mask_is_the_mask(close):
    from violin_timm.attention import Decay
    from violin_timm.geometry import grid_positions
    from violin_timm.settings import MaskSettings

    decay = Decay(3, MaskSettings())
    positions = grid_positions(','.join(decay.settings.components), 4, 5, decay.beta)
    distances = (positions[:, :, None] - positions[:, None]).abs().sum(-1).float()
    close(plain_mask(decay, distances), decay(positions, 0, True), 1e-5)


def test_added_by_hand(report):
    """Nano: 4 layers of 4 heads and 8 curves on 64 pixels."""
    case = report['cases']['tiny_added']
    assert case['parameters']['added'] == 4 * 4 * (8 + 1)
    work = case['multiply_adds']
    assert work['mask'] == 4 * 4 * 8 * (2 + 3 * 64 + 64 * 65 // 2) and work['scores'] == 4 * 4 * 64**2
    linear = 64 * 64 * (3 + 1 + 4 + 4) * 64  # qkv, projection, MLP, for 64 tokens
    assert work['plain'] == 64 * 64 + 4 * (linear + 2 * 64 * 64 * 64) + 64 * 10


def test_added_to_deit_base_is_what_the_paper_says():
    case = benchmark_measure.added(CASES['added_deit_base_384'])
    assert case['multiply_adds']['plain'] / 1e9 == pytest.approx(55.4, abs=0.05)
    assert case['parameters']['percent'] == pytest.approx(0.0015, abs=5e-5)
    assert case['value'] < 0.64


def test_memory_is_measured_in_a_process_of_its_own(monkeypatch):
    """The smallest case there is; the process looks its case up by name."""
    case = Case('memory_tiny', 'memory_training', 1.3, batch=2, **NANO)
    code = (
        'import sys; from violin_timm.evals import benchmark_cases as cases, benchmark_measure as measure; '
        'case = cases.Case("m", "memory_training", model="violin_pixel_nano", image=(8, 8), batch=2); '
        'print(measure.peak_memory(case, sys.argv[1]))'
    )
    root = Path(benchmark.__file__).parents[2]
    done = subprocess.run([sys.executable, '-c', code, 'plain'], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0 and 2**16 < int(done.stdout) < 2**30, done.stderr
    monkeypatch.setattr(
        benchmark_measure,
        '_peak_in_own_process',
        lambda case, side, device: {'violin': 3 * 2**20, 'plain': 2**20}[side],
    )
    result = benchmark_measure.measure(case)
    assert result['value'] == 3 and result['map_shape'] == [4, 64, 64]
    assert result['maps']['violin'] == 3 * 2**20 / (4 * 4 * 64 * 64)
    in_maps = benchmark_measure.measure(Case('m', 'memory_training', value='maps', **NANO))
    assert in_maps['unit'] == 'maps' and in_maps['value'] == in_maps['maps']['violin']


def test_a_failed_process_is_named(monkeypatch):
    monkeypatch.setattr(benchmark_measure.sys, 'executable', '/bin/false')
    report = benchmark.run([CASES['memory_training_512_b8']], rounds=1)
    assert 'memory_training_512_b8, violin: exit status 1' in report['cases']['memory_training_512_b8']['error']
    assert 'failed' in benchmark.table(report)


def test_a_failed_case_does_not_stop_the_others(tiny, monkeypatch, tmp_path, capsys):
    real = benchmark.measure

    def measure(case, *args):
        if case.kind == 'training':
            raise torch.OutOfMemoryError('no room')
        return real(case, *args)

    monkeypatch.setattr(benchmark, 'measure', measure)
    path = tmp_path / 'r.json'
    assert bench('--cases', 'tiny_training', 'tiny_added', '--rounds', 1, '--json', path) == 1
    cases = json.loads(path.read_text())['cases']
    assert cases['tiny_training']['error'] == 'OutOfMemoryError: no room' and cases['tiny_added']['value'] > 0


def test_command_prints_a_table_writes_json_and_compares(tiny, tmp_path, capsys):
    path = tmp_path / 'deep' / 'first.json'
    threads = torch.get_num_threads()
    names = ['tiny_inference', 'tiny_training', 'tiny_added']
    assert bench('--cases', *names, '--rounds', 1, '--threads', 1, '--json', path) == 0
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith(('case', 'tiny'))]
    assert lines[1].index('<=') == lines[2].index('<=') == lines[0].index('target')
    assert ' met' in lines[1] and 'missed' in lines[2] and 'load average' in said and 'paper' in lines[3]
    assert [p.name for p in path.parent.iterdir()] == ['first.json'] and torch.get_num_threads() == threads
    first = json.loads(path.read_text())
    assert first['machine']['threads'] == 1

    first['cases']['tiny_added']['value'] *= 2
    first['machine']['torch'] = '0.1'
    del first['cases']['tiny_training']
    first['cases']['tiny_inference']['settings']['batch'] = 99
    path.write_text(json.dumps(first))
    assert bench('--cases', *names, '--rounds', 1, '--json', tmp_path / 's.json', '--compare', path) == 0
    said = capsys.readouterr().out
    rows = {line.split()[0]: line for line in said.splitlines() if line.startswith('tiny')}
    assert '-50.0 %' in rows['tiny_added'] and 'new' in rows['tiny_training']
    assert 'other settings' in rows['tiny_inference'] and 'torch 0.1' in said


def test_a_killed_run_leaves_what_it_had(tiny, monkeypatch, tmp_path):
    def measure(case, *args):
        if case.kind == 'training':
            raise KeyboardInterrupt
        return {'value': 1.0, 'unit': 'x'}

    monkeypatch.setattr(benchmark, 'measure', measure)
    (tmp_path / 'r.json').write_text('earlier')
    with pytest.raises(KeyboardInterrupt):
        bench('--cases', 'tiny_inference', 'tiny_training', '--json', tmp_path / 'r.json')
    assert (tmp_path / 'r.json').read_text() == 'earlier'
    assert list(json.loads((tmp_path / 'r.partial.json').read_text())['cases']) == ['tiny_inference']


def test_a_busy_machine_is_said_so(report, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, '_load', lambda: torch.get_num_threads() + 1.0)
    busy = benchmark.run([])
    assert busy['load']['noisy']
    benchmark._print({**report, 'load': busy['load']}, None)
    assert 'do not trust these times' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--cases', 'inference_224_b9'], "got 'inference_224_b9'; choose from inference_224_b1, inference_224_b8"),
        (['--suite', 'all'], "got 'all'; choose from quick, issue, full, gpu"),
        (['--suite', 'quick', '--cases', 'mask_196'], 'not allowed with'),
        (['--rounds', 0], "got '0'"),
        (['--threads', 'two'], "got 'two'"),
        (['--device', 'abacus'], "got 'abacus'; allowed here are cpu"),
        (['--compare', '/none.json'], '--compare: cannot read /none.json'),
        (['--compare', __file__], '--compare: cannot read'),
    ],
)
def test_bad_arguments(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bench(*flags) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_another_json_is_no_report(tmp_path, capsys):
    (tmp_path / 'x.json').write_text('{"cases": {}}')
    assert bench('--compare', tmp_path / 'x.json') == 2
    assert 'is no report of violin benchmark' in capsys.readouterr().err


def test_suites():
    assert all(benchmark.suite(name) for name in SUITES)
    assert {case.name for case in benchmark.suite('quick')} <= {case.name for case in benchmark.suite('issue')}
    everything = {case.name for name in SUITES for case in benchmark.suite(name)}
    assert everything == set(CASES)
    targets = {case.target for case in benchmark.suite('issue')}
    assert {1.05, 1.06, 1.15, 1.5, 1.25, 1.3, 1 / 3, 3.0, 0.02} <= targets


@pytest.mark.parametrize('kind', ['inference', 'training', 'mask', 'mask_forward', 'mask_share', 'backend'])
def test_every_kind_of_timed_case_builds(kind):
    assert set(sides(Case('x', kind, batch=1, model='violin_pixel_nano', image=(32, 32)))) == set(SIDES)


def test_default_names_of_reports():
    def name(*argv):
        return str(benchmark._default_path(benchmark._parser().parse_args(argv)))

    assert name('--suite', 'issue') == 'results/benchmark-cpu.json'
    assert name() == 'results/benchmark-cpu-quick.json'
    assert name('--cases', 'mask_196') == 'results/benchmark-cpu-cases.json'
