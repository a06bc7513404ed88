"""Fixtures of the recipes that several modules test."""

import pytest
import yaml

from violin_timm.engine.config import settings
from violin_timm.recipes.tables import DINO

ARMS = {'plain': 'mask=none alpha=none', 'both': 'mask=learned'}

DINO_MODEL = {
    'patch_size': 2, 'embed_dim': 16, 'depth': 2, 'num_heads': 2, 'dynamic_img_size': True,
    'pos_embed_resample': 'dino',
}  # fmt: skip
DINO_BASE = {
    'model': 'violin_dino_small', 'model_kwargs': DINO_MODEL, 'img_size': 8, 'in_chans': 1, 'mean': [0.3], 'std': [0.4],
    'dataset': 'digits', 'device': 'cpu', 'workers': 0, 'batch_size': 125, 'crop_pct': 1.0, 'local_size': [4],
    'local_number': [2], 'out_dim': 32, 'head_hidden_dim': 16, 'head_bottleneck_dim': 8, 'lr': 2e-3, 'epochs': 2,
    'warmup_epochs': 0, 'blur_prob': [0, 0, 0], 'jitter': [0, 0, 0, 0], 'drop_path': 0.1, 'freeze_last_layer': 0,
}  # fmt: skip


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


@pytest.fixture(scope='session')
def dino_base():
    """What `dino_args` sets, before the arguments of a test."""
    return DINO_BASE


@pytest.fixture
def dino_args(tmp_path, dino_base):
    """Settings of a short run of DINO: ``dino_args('name', epochs=3)``."""

    def _dino_args(experiment='run', **values):
        return settings(DINO, **{**dino_base, 'output': str(tmp_path), 'experiment': experiment, **values})

    return _dino_args
