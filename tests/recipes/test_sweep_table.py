"""A sweep's runs into a table: numbers against numpy and scipy, and the selection by validation."""

import csv

import numpy as np
import pytest
from scipy import stats

from violin_timm.recipes.sweep_points import read_sweep
from violin_timm.recipes.sweep_table import Outcome, as_csv, as_markdown, rows

ARMS = {'plain': 'mask=none alpha=none', 'both': 'mask=learned'}


def test_table_against_numpy_and_scipy(write_sweep, lr_grid):
    sweep = read_sweep(write_sweep(parameters=lr_grid(0.1, 0.2), table={'select': 'lr'}))
    generator = np.random.default_rng(0)
    values = {point.name: generator.normal(90, 2, 2) for point in sweep.points}
    outcomes = {name: Outcome({'best_metric': v, 'test.top1': t}) for name, (v, t) in values.items()}

    def of(arm, choice):
        return np.array([values[p.name] for p in sweep.points if (p.arm, p.choice) == (arm, choice)])

    best = {arm: max(('0.1', '0.2'), key=lambda choice: of(arm, choice)[:, 0].mean()) for arm in ARMS}
    one, other = (of(arm, best[arm])[:, 1] for arm in ('both', 'plain'))
    interval = stats.ttest_rel(one, other).confidence_interval(0.95)

    table = list(csv.DictReader(as_csv(sweep, rows(sweep, outcomes)).splitlines()))
    assert len(table) == 4
    assert {row['arm']: row['choice'] for row in table if row['chosen'] == 'yes'} == best
    row = next(row for row in table if row['arm'] == 'both' and row['chosen'] == 'yes')
    expected = [one.mean(), one.std(ddof=1), one.min(), (one - other).mean(), interval.low, interval.high, 3]
    names = ['mean', 'std', 'min', 'difference', 'low', 'high', 'pairs']
    assert [float(row[f'test.top1 {name}']) for name in names] == pytest.approx(expected)
    text = as_markdown(sweep, rows(sweep, outcomes), outcomes)
    assert f'{(one - other).mean():+.2f} [{interval.low:+.2f}, {interval.high:+.2f}], 3' in text
    assert '## All values of lr' in text and f'{best["both"]} *' in text


def _chosen(sweep, numbers):
    """Choice of each arm for `numbers[choice]`: validation values by seed, None for a failure; the test is reversed."""
    outcomes = {}
    for point in sweep.points:
        value = numbers[point.choice][int(point.seed)]
        outcomes[point.name] = (
            Outcome(failure='exit status 1: x')
            if value is None
            else Outcome({'best_metric': value, 'test.top1': -value})
        )
    return {row.choice for row in rows(sweep, outcomes) if row.chosen}


def test_selection_reads_validation_alone_and_the_goal(write_sweep, lr_grid):
    numbers = {'0.1': [1, 2, 3], '0.2': [2, 3, 4]}
    table = {'select': 'lr'}
    assert _chosen(read_sweep(write_sweep(parameters=lr_grid(0.1, 0.2), table=table)), numbers) == {'0.2'}
    low = {'name': 'loss', 'goal': 'minimize'}
    assert _chosen(read_sweep(write_sweep(parameters=lr_grid(0.1, 0.2), table=table, metric=low)), numbers) == {'0.1'}


def test_selection_passes_over_values_that_fail_for_a_seed(write_sweep, lr_grid):
    sweep = read_sweep(write_sweep(parameters=lr_grid(0.1, 0.2), table={'select': 'lr'}))
    assert _chosen(sweep, {'0.1': [1, 2, 3], '0.2': [9, 9, None]}) == {'0.1'}
    assert _chosen(sweep, {'0.1': [None] * 3, '0.2': [None] * 3}) == set()
