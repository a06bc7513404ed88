"""Movement of masks, changed predictions and numbers of parameters on the fine-tuning protocol's page, by hand."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import timm

from violin_timm.evals import movement as moved
from violin_timm.recipes.protocol_details import movement, parameters, predicted
from violin_timm.recipes.protocol_statistics import Protocol

ARMS = ['plain', 'alpha only', 'violin']
TASKS = [SimpleNamespace(name=name, group='natural') for name in ('pets', 'svhn')]
SEEDS = [0, 1, 2]


def protocol(arms=ARMS, tasks=TASKS, seeds=SEEDS, layers=lambda arm, task, seed: [], **changes):
    """Final runs at the only rate."""
    results = [
        {'arm': arm, 'task': task.name, 'stage': 'final', 'lr': 0.1, 'seed': seed, 'top1': 50.0, 'diverged': False}
        | {'movement': layers(arm, task.name, seed)}
        | changes
        for arm, task, seed in itertools.product(arms, tasks, seeds)
    ]
    return Protocol(results, arms, tasks, [0.1], [], seeds)


def grid(block):
    return [[cell.strip() for cell in line.split('|')[1:-1]] for line in block.splitlines() if '---' not in line]


def test_movement_is_the_mean_over_tasks_and_seeds():
    def layers(arm, task, seed):
        first = {'mask_before': 2e-9, 'mask_after': 1e-5 * (1 + seed + 3 * (task == 'svhn')), 'alpha_after': 0.0}
        return [first, {'beta_change_max': 12345.0}] if arm == 'violin' else [{}, {}]

    heading, text, arm, table = movement(protocol(layers=layers))
    assert heading.startswith('## ') and '|beta after - beta before|' in text and arm == '### violin'
    assert grid(table) == [
        ['layer', '1 - M before', 'after', 'largest change of beta', 'alpha from 1 after'],
        ['0', '2.0e-09', '3.5e-05', '-', '0'],
        ['1', '-', '-', '1.2e+04', '-'],
    ]
    assert movement(protocol()) == []


def test_movement_of_models():
    """What `evals.movement` says of arms with both, alpha alone and neither."""
    settings = {'plain': {'mask': 'none', 'alpha': 'none'}, 'alpha only': {'mask': 'none'}, 'violin': {}}

    def layers(arm, task, seed):
        size = {'img_size': 8, 'in_chans': 1, 'embed_dim': 16, 'depth': 2, 'num_heads': 2}
        model = timm.create_model('violin_pixel_nano', **size, **settings[arm])
        return moved.movement(model, moved.snapshot(model))

    _, _, *blocks = movement(protocol(layers=layers, seeds=[0], tasks=TASKS[:1]))
    assert blocks[::2] == ['### alpha only', '### violin']
    alpha, both = map(grid, blocks[1::2])
    assert alpha[0] == ['layer', 'alpha from 1 before', 'alpha from 1 after'] and [len(alpha), len(both)] == [3, 3]
    assert len(both[0]) == 8 and all(line[1] == line[2] != '0' and line[4] == line[5] == '0' for line in both[1:])


def classes(arm, task, seed):
    """Ten classes: the arm sets some, each seed another one, and of plain's seeds the last one more."""
    of = np.zeros(10, int)
    of[: {'plain': 0, 'alpha only': seed, 'violin': 4}[arm]] = 1
    of[9] = 10 * seed
    of[8] = (arm, seed) == ('plain', 2)
    return None if (arm, seed) == ('alpha only', 2) else of


def test_changed_predictions():
    heading, text, table = predicted(protocol(tasks=TASKS[:1]), 'plain', classes)
    assert heading == '## Changed predictions' and 'that of plain with the same seed' in text
    assert grid(table) == [
        ['task', 'alpha only', 'violin', 'plain, other seeds'],
        ['pets', '5.00 (0.00 - 10.00), 2 of 3', '43.33 (40.00 - 50.00)', '16.67 (10.00 - 20.00)'],
    ]
    assert predicted(protocol(), 'plain', lambda *_: None) == []
    assert predicted(protocol(diverged=True), 'plain', classes) == []


def test_predictions_of_other_images_are_refused():
    with pytest.raises(ValueError, match=r'predictions of pets: got shapes \(2,\) and \(3,\)'):
        predicted(protocol(), 'plain', lambda arm, task, seed: np.zeros(2 + (arm == 'violin')))


def test_parameters_are_those_of_the_first_task_with_a_run():
    counts = {'total': 1234567, 'trainable': 1200, 'adapter': 1, 'mask': 200, 'head': 1000, 'other': 0}
    full = protocol(parameters=counts)
    results = [run for run in full.results if (run['arm'], run['task']) != ('violin', 'pets')]
    _, text, table = parameters(Protocol(results, ARMS, TASKS, [0.1], [], SEEDS))
    head, *lines = grid(table)
    assert head == ['arm', 'task', *counts] and 'the head of another' in text
    assert [line[:2] for line in lines] == [['plain', 'pets'], ['alpha only', 'pets'], ['violin', 'svhn']]
    assert lines[0][2:] == ['1,234,567', '1,200', '1', '200', '1,000', '0']
    assert 'the head of another' not in parameters(protocol(tasks=TASKS[:1], parameters=counts))[1]
