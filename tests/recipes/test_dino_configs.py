"""Settings of a run of DINO: refused before any work, cut short and said so, and as the configs ship them."""

import pytest

from violin_timm.engine.config import PACKAGE, ConfigError, parse
from violin_timm.recipes import dino, dino_build
from violin_timm.recipes.tables import DINO

TINY = {
    'patch_size': 2, 'embed_dim': 16, 'depth': 2, 'num_heads': 2, 'dynamic_img_size': True,
    'pos_embed_resample': 'dino',
}  # fmt: skip
CONFIGS = sorted((PACKAGE.parent / 'configs').glob('dino/*.yaml'))


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ({'warmup_epochs': 3}, 'warmup_epochs: got 3; the run has 2 epochs'),
        ({'stop_epoch': 3}, 'stop_epoch: got 3'),
        ({'local_number': [1, 1]}, 'local_number: got'),
        ({'local_number': [0], 'global_number': 1}, 'got one view'),
        ({'local_scale': [0.5, 0.1]}, 'local_scale: got'),
        ({'blur_prob': [2.0, 0, 0]}, 'blur_prob: got'),
        ({'val_split': 'train'}, "val_split: got 'train', which is train_split"),
        ({'batch_size': 1001}, 'batch_size: got 1001 for each of 1 process.* the 1000 images'),
        ({'local_size': [5]}, 'crop size: got .5, 5.; expected multiples of the patch size'),
        ({'model_kwargs': {**TINY, 'dynamic_img_size': False}}, 'without dynamic_img_size'),
        ({'train_split': 'valid'}, "split: got 'valid'"),
    ],
)
def test_refused_before_any_work(dino_args, tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        dino.run(dino_args(**values))
    assert list(tmp_path.iterdir()) == []


def test_what_is_cut_short_is_said(dino_args, caplog):
    dino_build.check(dino_args(warmup_teacher_temp_epochs=30, freeze_last_layer=2))
    assert 'cut off by the end of the run after 2' in caplog.text and 'last layer never learns' in caplog.text


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_settings_and_twins(path):
    args = parse(['--config', str(path)], DINO)
    dino_build.check(args)
    assert args.model_kwargs['pos_embed_resample'] == 'dino'
    twin = path.with_name(path.stem + '_plain.yaml')
    if not path.stem.endswith('_plain'):
        other = parse(['--config', str(twin)], DINO)
        kwargs = {**args.model_kwargs, 'mask': 'none', 'alpha': 'none'}
        assert {**vars(args), 'model_kwargs': kwargs} == vars(other)
    assert len(CONFIGS) == 6


def test_quick_config_trains(tmp_path, monkeypatch):
    from violin_timm.data import fashion

    monkeypatch.setattr(fashion, '_load', lambda name: None)  # wherever this runs: the digits
    argv = ['--config', 'quick/dino_fashion.yaml', '--epochs', '1', '--warmup-epochs', '0', '--output', str(tmp_path)]
    result = dino.run(parse([*argv, '--train-split', 'train[:128]', '--val-split', 'validation[:64]'], DINO))
    assert set(result['teacher']) == set(result['pixels']) == {'knn20'}
