"""Sweeps as they ship and as they run: the configs, and `violin sweep` over runs of `violin train` itself."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import yaml

from violin_timm import cli
from violin_timm.recipes.sweep_points import KEYS, read_sweep

CONFIGS = sorted((Path(__file__).parents[2] / 'configs' / 'sweeps').glob('*.yaml'))


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_configs(path):
    """Every point is named, builds its model, and the file has only keys that wandb knows."""
    assert set(yaml.safe_load(path.read_text())) <= set(KEYS)
    head = path.read_text().split('name:')[0]
    assert f'violin sweep configs/sweeps/{path.name}' in head and 'Duration:' in head and 'paper' in head
    sweep = read_sweep(path)
    arms = {point.arm: point.settings['model_kwargs'] for point in sweep.points}
    assert set(arms) == set(sweep.table.arms)
    assert len({json.dumps(kwargs, sort_keys=True) for kwargs in arms.values()}) == len(arms)
    for kwargs in arms.values():
        timm.create_model('violin_pixel_nano', img_size=8, in_chans=1, **kwargs)


def test_curve_subsets_are_all_of_them():
    path = next(path for path in CONFIGS if path.stem == 'curve_subsets')
    kwargs = [point.settings['model_kwargs'] for point in read_sweep(path).points if point.seed == '0']
    subsets = {tuple(sorted(entry['curves'].split(','))) for entry in kwargs if 'curves' in entry}
    assert len(subsets) == 3 * 15 and len(kwargs) == 3 * 15 + 4
    assert sum(all(name.endswith('_T') for name in names) for names in subsets) == 15
    assert sum(not any(name.endswith('_T') for name in names) for names in subsets) == 15


def test_real_runs(write_sweep, tmp_path, capsys):
    """Two arms, two seeds: trained, tabulated, and after damage only the damaged one goes on from its checkpoint."""
    tiny = 'embed_dim=16 depth=1 num_heads=2'
    arms = {'plain': f'{tiny} mask=none alpha=none', 'both': tiny}
    parameters = {
        'config': {'value': 'configs/quick/digits.yaml'},
        'epochs': {'value': 1},
        'warmup-epochs': {'value': 0},
        'batch-size': {'value': 100},
        'test-split': {'value': 'validation'},  # spares the baselines of the digits' test split
        'sched': {'value': 'constant'},
        'model-kwargs': {'values': list(arms.values())},
        'seed': {'values': [0, 1]},
    }
    path, output = write_sweep(parameters=parameters, table={'arms': arms}), tmp_path / 'out'
    argv = ['sweep', str(path), '--output', str(output), '--jobs', '2', '--threads', '1']
    assert cli.main(argv) == 0
    sweep = read_sweep(path)
    folders = [output / 'runs' / point.name for point in sweep.points]
    results = [json.loads((folder / 'result.json').read_text()) for folder in folders]
    assert [result['seed'] for result in results] == [0, 0, 1, 1]
    table = {row['arm']: row for row in csv.DictReader((output / 'table.csv').open())}
    plain, both = (np.array([result['test']['top1'] for result in results[start::2]]) for start in (0, 1))
    assert float(table['both']['test.top1 mean']) == pytest.approx(both.mean())
    assert float(table['both']['test.top1 difference']) == pytest.approx((both - plain).mean())

    times = [(folder / 'summary.csv').stat().st_mtime_ns for folder in folders]
    (folders[1] / 'result.json').write_text('{"model": ')
    assert cli.main(argv) == 0
    assert json.loads((folders[1] / 'result.json').read_text())['test'] == results[1]['test']
    assert 'continuing' in (folders[1] / 'log.txt').read_text()
    assert [times[i] == (folders[i] / 'summary.csv').stat().st_mtime_ns for i in (0, 2, 3)] == [True] * 3


def test_a_real_run_that_fails(write_sweep, tmp_path, capsys):
    parameters = {'config': {'value': 'configs/quick/digits.yaml'}, 'model-kwargs': {'value': 'curves=hilbrt'}}
    path = write_sweep(parameters=parameters, description='', command=['violin', 'train', '${args}'])
    assert cli.main(['sweep', str(path), '--output', str(tmp_path / 'out'), '--threads', '1']) == 1
    out = capsys.readouterr().out
    assert '- `run`: exit status 2: ' in out and 'hilbrt' in out
