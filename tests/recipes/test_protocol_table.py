"""The fine-tuning protocol's page: numbers against numpy, scipy and hand-made cases, and pages of unfinished ones."""

import csv
import itertools
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from violin_timm.engine.config import ConfigError
from violin_timm.recipes import markdown as md
from violin_timm.recipes.protocol_table import as_csv, markdown, rows

TASKS = [
    SimpleNamespace(name=name, group=group)
    for name, group in [('pets', 'natural'), ('svhn', 'natural'), ('dtd', 'natural'), ('count', 'structured')]
]
ARMS = ['plain', 'alpha only', 'violin']
LRS, TUNE, FINAL = [0.001, 0.0005, 0.0001], [0, 1], [0, 1, 2, 3, 4]
SHAPE = (ARMS, TASKS, LRS, TUNE, FINAL)


def run(arm, task, stage, lr, seed, top1, **changes):
    parameters = {'total': 1234567, 'trainable': 1200, 'adapter': 0, 'mask': 200, 'head': 1000, 'other': 0}
    result = {'arm': arm, 'task': task, 'stage': stage, 'lr': lr, 'seed': seed, 'top1': top1, 'diverged': False}
    return result | {'movement': [], 'parameters': parameters} | changes


def protocol(arms=ARMS, tasks=TASKS, lrs=LRS, tune=TUNE, final=FINAL, seed=0):
    """Results with random accuracies; the middle rate is the best for all arms on all tasks."""
    generator = np.random.default_rng(seed)
    for arm, task in itertools.product(arms, tasks):
        for lr, number in itertools.product(lrs, tune):
            yield run(arm, task.name, 'tune', lr, number, generator.uniform(50, 60) + 20 * (lr == 0.0005))
        for number in final:
            yield run(arm, task.name, 'final', 0.0005, number, generator.uniform(60, 90))


def page(results, shape=SHAPE, baselines=('plain',), predictions=None):
    return markdown(list(results), *shape, baselines, predictions, 'Title', ['A fact.'])


def tables(text):
    """Tables of a page by the heading above, each a list of dicts by column."""
    found = {}
    for block in re.split(r'^#+ ', text, flags=re.M)[1:]:
        lines = [
            [cell.strip().replace(r'\|', '|') for cell in re.split(r'(?<!\\)\|', line)[1:-1]]
            for line in block.splitlines()
            if line.startswith('|')
        ]
        assert len({len(line) for line in lines}) <= 1
        found[block.splitlines()[0]] = [dict(zip(lines[0], line)) for line in lines[2:]]
    return found


def column(text, heading, key, of):
    return {line[key]: line[of] for line in tables(text)[heading]}


def at(results, arm, line, **shape):
    (row,) = (row for row in rows(results, *SHAPE, ['plain'], **shape) if (row['arm'], row['task']) == (arm, line))
    return row


# ---------------------------------------------------------------- accuracies against numpy and scipy


@pytest.fixture(scope='module')
def complete():
    results = list(protocol())
    random.Random(0).shuffle(results)
    return results


def reference(results, arm):
    """Final accuracies by seed `[5]` of each line, computed anew."""
    final = {(r['task'], r['seed']): r['top1'] for r in results if (r['arm'], r['stage']) == (arm, 'final')}
    of = {task.name: np.array([final[task.name, seed] for seed in FINAL]) for task in TASKS}
    natural = (of['pets'] + of['svhn'] + of['dtd']) / 3
    averages = {'mean of natural tasks': natural, 'mean of structured tasks': of['count']}
    averages |= {'mean over tasks': np.mean([*of.values()], axis=0), 'mean of groups': (natural + of['count']) / 2}
    return of | averages


def test_rows_and_page_against_numpy_and_scipy(complete):
    table = {(row['arm'], row['task']): row for row in rows(complete, *SHAPE, ['plain'])}
    text, plain = page(complete), reference(complete, 'plain')
    assert len(table) == len(ARMS) * (len(TASKS) + 4)
    for arm in ARMS:
        values = reference(complete, arm)
        means = column(text, 'Test accuracy', 'task', arm)
        assert list(means) == list(values)
        for name, of in values.items():
            row = table[arm, name]
            assert [row[f'seed {seed}'] for seed in FINAL] == pytest.approx(of)
            assert (row['mean'], row['std'], row['seeds'], row['missing']) == pytest.approx(
                (of.mean(), of.std(ddof=1), 5, 0)
            )
            assert means[name] == f'{of.mean():.2f} ({of.std(ddof=1):.2f})'
            if arm == 'plain':
                assert row['minus plain'] is None
                continue
            low, high = stats.ttest_rel(of, plain[name]).confidence_interval(0.95)
            mean = (of - plain[name]).mean()
            found = [row[f'minus plain{part}'] for part in ('', ' low', ' high', ' pairs')]
            assert found == pytest.approx([mean, low, high, 5])
            shown = column(text, 'Difference from plain', 'task', arm)[name]
            assert shown == f'{mean:+.2f} [{low:+.2f}, {high:+.2f}], 5'
    assert 'Intervals here: 16, on this page: 16,' in text
    assert 'Intervals here: 16, on this page: 32,' in page(complete, baselines=['plain', 'alpha only'])


def test_best_three_of_five(complete):
    heading = 'Mean of the best 3 of 5 seeds (chosen on the test set)'
    shown, best = tables(page(complete))[heading], {}
    for task in TASKS:
        best[task.name] = np.mean(np.sort(reference(complete, 'violin')[task.name])[-3:])
    best['mean over tasks'] = np.mean([*best.values()])
    assert {line['task']: line['violin'] for line in shown} == {name: f'{value:.2f}' for name, value in best.items()}
    assert at(complete, 'violin', 'pets')['best 3 mean'] == pytest.approx(best['pets'])
    three = page(complete, (*SHAPE[:4], FINAL[:3]))
    assert 'best 3' not in three and 'Test accuracy' in tables(three)


def test_by_hand():
    tasks = [
        SimpleNamespace(name='a', group='x'),
        SimpleNamespace(name='b', group='x'),
        SimpleNamespace(name='c', group='y'),
    ]
    values = {'a': [10, 20], 'b': [30, 60], 'c': [50, 50]}
    results = [run('plain', t, 'final', 0.1, s, v) for t, of in values.items() for s, v in enumerate(of)]
    shown = column(page(results, (['plain'], tasks, [0.1], [0], [0, 1])), 'Test accuracy', 'task', 'plain')
    assert shown == {
        'a': '15.00 (7.07)', 'b': '45.00 (21.21)', 'c': '50.00 (0.00)', 'mean of x tasks': '30.00 (14.14)',
        'mean of y tasks': '50.00 (0.00)', 'mean over tasks': '36.67 (9.43)', 'mean of groups': '40.00 (7.07)',
    }  # fmt: skip


def test_order_changes_nothing(complete):
    shuffled = list(complete)
    random.Random(1).shuffle(shuffled)
    assert page(shuffled) == page(complete) and as_csv(shuffled, *SHAPE) == as_csv(complete, *SHAPE)
    reordered = rows(complete, *SHAPE[:3], TUNE[::-1], FINAL[::-1], ['plain'])
    for row, other in zip(rows(complete, *SHAPE, ['plain']), reordered):
        assert {key: row[key] for key in other} == pytest.approx(other)


def test_seeds_without_a_partner_are_left_out(complete):
    results = [r for r in complete if (r['arm'], r['task'], r['stage'], r['seed']) != ('plain', 'pets', 'final', 1)]
    of, plain = reference(complete, 'violin')['pets'], reference(complete, 'plain')['pets']
    row = at(results, 'violin', 'pets')
    assert row['minus plain'] == pytest.approx(np.delete(of - plain, 1).mean())
    assert (row['minus plain pairs'], row['seeds']) == (4, 5)
    assert column(page(results), 'Difference from plain', 'task', 'violin')['pets'].endswith('], 4')


def test_csv_holds_the_rows_in_full(complete):
    table = rows(complete, *SHAPE, ['plain'])
    read = list(csv.DictReader(as_csv(complete, *SHAPE, ['plain']).splitlines()))
    assert [list(row) for row in read] == [list(row) for row in table]
    for row, of in zip(read, table):
        assert row == {key: '' if value is None else str(value) for key, value in of.items()}
    assert at(complete, 'violin', 'pets')['lr'] == 0.0005 and at(complete, 'violin', 'mean of groups')['lr'] is None


# ---------------------------------------------------------------- what is missing, diverged, or has no place


def test_nothing_has_run():
    text = page([], predictions=lambda *_: None)
    assert '0 of 132 runs finished; 132 are missing, and this page is partial.' in text
    assert list(tables(text)) == ['Title'] and text.startswith('# Title\n\nA fact.\n\n')
    assert all(row['mean'] is None and row['seeds'] == 0 for row in rows([], *SHAPE, ['plain']))


def test_an_average_never_stands_for_fewer_runs(complete):
    results = [r for r in complete if (r['arm'], r['task'], r['stage'], r['seed']) != ('violin', 'pets', 'final', 1)]
    text = page(results)
    assert '131 of 132 runs finished; 1 is missing' in text
    shown = column(text, 'Test accuracy', 'task', 'violin')
    assert shown['pets'].endswith(', 4 of 5') and shown['mean of structured tasks'] != '-'
    assert {name for name, cell in shown.items() if cell == '-'} == {
        'mean of natural tasks', 'mean over tasks', 'mean of groups'
    }  # fmt: skip
    assert '-' not in column(text, 'Test accuracy', 'task', 'plain').values()
    differences = column(text, 'Difference from plain', 'task', 'violin')
    assert {name for name, cell in differences.items() if cell == '-'} == {
        n for n, cell in shown.items() if cell == '-'
    }
    best = next(table for heading, table in tables(text).items() if 'best 3' in heading)
    assert {line['task'] for line in best if line['violin'] == '-'} == {'pets', 'mean over tasks'}
    row = at(results, 'violin', 'mean over tasks')
    assert (row['mean'], row['missing'], row['minus plain']) == (None, 1, None)


def test_final_runs_count_at_the_chosen_rate_alone(complete):
    stray = [run('violin', 'pets', 'final', 0.001, 0, 1.0), run('other', 'pets', 'tune', 0.001, 0, 1.0)]
    text = page(complete + stray)
    assert '132 of 132 runs finished. 2 more are left out' in text
    assert tables(text) == tables(page(complete))
    untuned = [r for r in complete if (r['arm'], r['task'], r['stage'], r['lr']) != ('violin', 'pets', 'tune', 0.001)]
    assert column(page(untuned), 'Test accuracy', 'task', 'violin')['pets'] == '-'
    assert '5 more are left out' in page(untuned) and '7 are missing' in page(untuned)


def test_one_rate_is_not_tuned(complete):
    text = page(complete, (ARMS, TASKS, [0.0005], TUNE, FINAL))
    assert '60 of 60 runs finished. 72 more are left out' in text and 'a rate of 0.0005' in text
    assert 'Learning rates' not in tables(text)
    assert tables(text)['Test accuracy'] == tables(page(complete))['Test accuracy']


def test_diverged_final_runs(complete):
    results = [dict(r) for r in complete]
    (bad,) = (r for r in results if (r['arm'], r['task'], r['stage'], r['seed']) == ('violin', 'pets', 'final', 1))
    bad |= {'diverged': True, 'top1': float('nan'), 'movement': [{'mask_after': float('nan')}]}
    of = reference(complete, 'violin')['pets']
    of[1] = 0
    text = page(
        results, predictions=lambda arm, task, seed: np.zeros(4) if (arm, seed) != ('violin', 1) else np.ones(4)
    )
    assert [line['diverged'] for line in tables(text)['Title']] == ['0', '1']
    assert '1 diverged: such a run counts with an accuracy of 0' in text and 'Movement' not in text
    shown = column(text, 'Test accuracy', 'task', 'violin')
    assert shown['pets'] == f'{of.mean():.2f} ({of.std(ddof=1):.2f}), 1 diverged'
    assert shown['mean over tasks'].endswith(', 1 diverged') and 'diverged' not in shown['svhn']
    assert column(text, 'Changed predictions', 'task', 'violin')['pets'] == '0.00 (0.00 - 0.00), 4 of 5'


def test_a_single_task_and_seed():
    shape = (['plain', 'violin'], TASKS[:1], LRS, [3], [3])
    results = list(protocol(*shape))
    text = page(results, shape)
    assert [line['task'] for line in tables(text)['Test accuracy']] == ['pets']
    one, other = (next(r['top1'] for r in results if r['arm'] == a and r['stage'] == 'final') for a in shape[0])
    assert tables(text)['Difference from plain'] == [{'task': 'pets', 'violin': f'{other - one:+.2f}, 1'}]
    assert 'Intervals' not in text and '(' not in tables(text)['Test accuracy'][0]['violin']


def test_names_with_blanks_and_pipes():
    names = ['a | b', '|', 'c d']
    results = list(protocol(names))
    text = page(results, (names, *SHAPE[1:]), ['|'], lambda *_: np.zeros(2))
    found = tables(text)
    assert list(found['Test accuracy'][0]) == ['task', 'group', *names]
    assert list(found['Difference from |'][0]) == ['task', 'a | b', 'c d']
    assert list(found['Changed predictions'][0]) == ['task', 'a | b', 'c d', '|, other seeds']
    assert [line['arm'] for line in found['Parameters']] == names


def test_a_baseline_is_an_arm():
    with pytest.raises(ConfigError, match="baselines: got 'plane'; choose from plain, alpha only, violin"):
        page([], baselines=['plane'])


# ---------------------------------------------------------------- rates, and the form of tables


def tuned(values, **changes):
    """Runs from `{lr: accuracies by seed}`; None leaves one out."""
    return [
        run('plain', 'pets', 'tune', lr, seed, top1, **changes)
        for lr, of in values.items()
        for seed, top1 in enumerate(of)
        if top1 is not None
    ]


def test_rates_on_the_page():
    results = [*tuned({0.001: [50, 60], 0.0005: [70, 72], 0.0001: [10]}), *tuned({0.0001: [None, 20]}, diverged=True)]
    head, shape = 'Learning rates', (['plain'], TASKS[:1], LRS, TUNE, FINAL)
    (line,) = tables(page(results, shape))[head]
    assert [*line.values()] == ['pets', 'plain', '55.00 (7.07)', '71.00 (1.41) *', '5.00 (7.07), 1 diverged']
    assert tables(page(results[:-1], shape))[head][0]['0.0001'] == '10.00, 1 of 2'
    assert '72.00 *' not in page(results[:-1], shape) and '(1.41) *' not in page(results[:-1], shape)
    for lrs in ([0.0005, 0.001, 0.0001], [0.0001, 0.0005]):
        edge = tables(page(results, (['plain'], TASKS[:1], lrs, TUNE, FINAL)))[head][0]['0.0005']
        assert edge == '71.00 (1.41) *' + (' (edge)' if len(lrs) == 2 else '')


def test_tables_are_aligned():
    lines = md.table(['a|b', 'c'], [['1', '2 | 3'], ['', 'long enough']]).splitlines()
    assert (
        lines[0] == r'| a\|b | c           |'
        and lines[1] == '|------|-------------|'
        and lines[2] == r'| 1    | 2 \| 3      |'
    )
    assert len({len(line) for line in lines}) == 1
