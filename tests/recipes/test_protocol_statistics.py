"""Which learning rate the fine-tuning protocol chooses, and which results and plans it refuses."""

from types import SimpleNamespace

import pytest

from violin_timm.engine.config import ConfigError
from violin_timm.recipes.protocol_statistics import Protocol, choose_lr

TASKS = [SimpleNamespace(name=name, group='natural') for name in ('pets', 'svhn')]
PLAN = (['plain', 'violin'], TASKS, [0.1, 0.2], [0, 1], [0])


def run(arm, task, stage, lr, seed, top1, diverged=False):
    return {'arm': arm, 'task': task, 'stage': stage, 'lr': lr, 'seed': seed, 'top1': top1, 'diverged': diverged}


def tuned(values):
    """Runs from `{lr: accuracies by seed}`; None leaves one out."""
    return [
        run('plain', 'pets', 'tune', lr, seed, top1)
        for lr, of in values.items()
        for seed, top1 in enumerate(of)
        if top1 is not None
    ]


@pytest.mark.parametrize(
    ('values', 'chosen'),
    [
        ({0.1: [50, 60], 0.2: [70, 45], 0.3: [0, 100]}, 0.2),
        ({0.1: [50, 60], 0.2: [55, 55], 0.3: [60, 50]}, 0.1),
        ({0.3: [50, 60], 0.2: [55, 55], 0.1: [60, 50]}, 0.3),
        ({0.1: [50, None], 0.2: [70, 45]}, None),
        ({0.1: [50, 60], 0.2: [None, None]}, None),
        ({0.1: [None, None]}, 0.1),
    ],
)
def test_choice_of_the_rate(values, chosen):
    other = [run('plain', 'pets', 'final', 0.1, 0, 99), run('plain', 'pets', 'tune', 0.1, 7, 99)]
    assert choose_lr(tuned(values) + other, list(values), [0, 1]) == chosen
    assert choose_lr(tuned(values)[::-1], list(values), [1, 0]) == chosen


def test_rates_with_equal_sums_tie_exactly():
    values = {0.1: [0.3, 0.2, 0.1], 0.2: [0.1, 0.2, 0.3]}
    assert sum(values[0.1]) < sum(values[0.2])
    assert choose_lr(tuned(values), [0.1, 0.2], [0, 1, 2]) == 0.1


@pytest.mark.parametrize('top1', [float('nan'), None, 99.0])
def test_a_diverged_run_counts_with_nothing_in_the_choice(top1):
    results = tuned({0.1: [60, 62], 0.2: [61]})
    assert choose_lr([*results, run('plain', 'pets', 'tune', 0.2, 1, top1, diverged=True)], [0.1, 0.2], [0, 1]) == 0.1
    assert choose_lr([*results, run('plain', 'pets', 'tune', 0.2, 1, 99.0)], [0.1, 0.2], [0, 1]) == 0.2


def test_a_rate_is_of_one_arm_on_one_task():
    with pytest.raises(ValueError, match='several arms or tasks'):
        choose_lr([run('plain', 'pets', 'tune', 0.1, 0, 1), run('both', 'pets', 'tune', 0.1, 0, 1)], [0.1, 0.2], [0])
    with pytest.raises(ConfigError, match=r"two of arm 'plain', task pets, stage tune, lr 0\.1, seed 0"):
        choose_lr(tuned({0.1: [1]}) * 2, [0.1, 0.2], [0])


@pytest.mark.parametrize(
    ('index', 'value', 'message'),
    [
        (0, [], 'arms: got none'),
        (0, ['a', 'b', 'a'], "arms: got 'a' twice"),
        (1, TASKS[:1] * 2, "tasks: got 'pets' twice"),
        (2, [], 'lrs: got none'),
        (3, [], 'tune_seeds: got none'),
        (3, [1, 1], 'tune_seeds: got 1 twice'),
        (4, [], 'final_seeds: got none'),
    ],
)
def test_plans_that_cannot_be(index, value, message):
    plan = [value if position == index else part for position, part in enumerate(PLAN)]
    with pytest.raises(ConfigError, match=message):
        Protocol([], *plan)


def test_results_that_cannot_be():
    with pytest.raises(ConfigError, match='results: got two of'):
        Protocol([run('plain', 'pets', 'final', 0.1, 0, 1)] * 2, *PLAN)
    with pytest.raises(ConfigError, match="stage: got 'test'; choose from tune, final"):
        Protocol([run('plain', 'pets', 'test', 0.1, 0, 1)], *PLAN)
