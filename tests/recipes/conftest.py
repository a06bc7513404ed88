"""Fixtures of the recipes that several modules test."""

import pytest
import yaml

ARMS = {'plain': 'mask=none alpha=none', 'both': 'mask=learned'}


@pytest.fixture
def write_sweep(tmp_path):
    """Write a sweep file of 2 arms x lr x seeds; keyword arguments replace its keys, None drops them."""

    def _write_sweep(seeds=(0, 1), table=None, **keys):
        section = {'arms': ARMS, 'baseline': 'plain', 'report': ['best_metric', 'test.top1'], **(table or {})}
        content = {
            'program': 'scripts/train.py',
            'method': 'grid',
            'metric': {'name': 'eval_top1', 'goal': 'maximize'},
            'description': 'Some arms.\n' + yaml.safe_dump({'table': section}),
            'parameters': {
                'config': {'value': 'configs/quick/digits.yaml'},
                'model-kwargs': {'values': list(ARMS.values())},
                'lr': {'value': 0.1},
                'seed': {'values': list(seeds)},
            },
        } | keys
        path = tmp_path / 'file.yaml'
        content = {key: value for key, value in content.items() if value is not None}
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return _write_sweep


@pytest.fixture(scope='session')
def lr_grid():
    """Parameters of a sweep file: the arms, three seeds and these values of lr."""

    def _lr_grid(*values):
        arms = {'values': [*ARMS.values()]}
        return {'lr': {'values': list(values)}, 'seed': {'values': [0, 1, 2]}, 'model-kwargs': arms}

    return _lr_grid
