"""Adapters on disk: whole at every moment, and refused by a model that they do not fit."""

import json
import shutil

import pytest
import timm
import torch

from violin_timm import add_violin, peft
from violin_timm.engine import files
from violin_timm.engine.config import ConfigError
from violin_timm.peft import Adapter, add_adapters, load_adapters, save_adapters

pytest.importorskip('peft')

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2, num_classes=5)
MODELS = {
    'learned': lambda: timm.create_model('violin_deit_tiny', class_token=True, **SMALL),
    'off': lambda: timm.create_model('violin_deit_tiny', class_token=True, mask='none', alpha='none', **SMALL),
    'distilled': lambda: add_violin(timm.create_model('deit_tiny_distilled_patch16_224', **SMALL)),
    'headless': lambda: timm.create_model('violin_dino_small', **{**SMALL, 'num_classes': 0}),
}


def create(kind='learned'):
    torch.manual_seed(1)
    return MODELS[kind]()


def adapted(kind='learned', method='lora'):
    """As if trained: nothing that is stored has its first value."""
    model = add_adapters(create(kind), Adapter(method, rank=2))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def output(model):
    with torch.no_grad():
        return model.eval()(torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(4)))


def adapters(tmp_path, kind='learned'):
    save_adapters(adapted(kind), tmp_path / 'adapters')
    return tmp_path / 'adapters'


def test_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = adapters(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = adapted(method='dora')

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(peft.os, 'fsync', interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_adapters(model, folder)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / '.adapters.tmp' / 'left').touch()
    save_adapters(model, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(peft.FILES)
    assert [path.name for path in tmp_path.iterdir()] == ['adapters']
    assert torch.equal(output(load_adapters(create(), folder)), output(model))


def test_the_name_is_given_last(tmp_path, monkeypatch):
    seen = []

    def rename(source, target):
        seen.append(sorted(path.name for path in source.iterdir()))
        files.rename(source, target)

    monkeypatch.setattr(peft, 'rename', rename)
    adapters(tmp_path)
    assert seen == [sorted(peft.FILES)]


def test_what_is_replaced_is_there_until_its_successor_is(tmp_path, monkeypatch):
    folder = adapters(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def killed(source, target):
        if target == folder:
            raise KeyboardInterrupt
        files.rename(source, target)

    monkeypatch.setattr(peft, 'rename', killed)
    with pytest.raises(KeyboardInterrupt):
        save_adapters(adapted(method='dora'), folder)
    assert {path.name: path.read_bytes() for path in (tmp_path / '.adapters.old').iterdir()} == before


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / 'summary.csv').touch()
    model = adapted()
    for place, message in ((tmp_path, 'which holds summary.csv'), (tmp_path / 'summary.csv', 'which is a file')):
        with pytest.raises(ConfigError, match=message):
            save_adapters(model, place)
    assert [path.name for path in tmp_path.iterdir()] == ['summary.csv']


@pytest.mark.parametrize('kind', ['off', 'distilled', 'headless'])
def test_another_model_is_refused(kind, tmp_path):
    folder = adapters(tmp_path)
    with pytest.raises(RuntimeError, match=r"modules_to_save: got \['decay', 'head'\]; \w+ needs"):
        load_adapters(create(kind), folder)


def test_adapters_without_masks_are_refused_by_a_model_with_them(tmp_path):
    folder = adapters(tmp_path, 'off')
    with pytest.raises(RuntimeError, match=r"modules_to_save: got \['head'\]; \w+ needs \['decay', 'head'\]"):
        load_adapters(create(), folder)


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(depth=3), r'missing: base_model\.model\.blocks\.2\.'),
        (dict(depth=1), r'left over: base_model\.model\.blocks\.1\.'),
        (dict(embed_dim=96), r'of another shape: .* \[48\] for \[96\]'),
        (dict(num_classes=6), r'of another shape: .*head\.bias \[5\] for \[6\]'),
        (dict(alpha='none'), r'left over: base_model\.model\.blocks\.0\.attn\.decay\.alpha'),
        (dict(curve_weights='learned'), r'missing: .*decay\.curve_logits'),
        (dict(curves='snake'), r'of another shape: .*decay\.beta \[3, 8\] for \[3, 1\]'),
    ],
    ids=str,
)
def test_another_size_is_refused(kwargs, message, tmp_path):
    folder = adapters(tmp_path)
    with pytest.raises(RuntimeError, match=f'does not fit the model: .*{message}'):
        load_adapters(timm.create_model('violin_deit_tiny', **{**SMALL, 'class_token': True, **kwargs}), folder)


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(r=5), 'of another shape: .*lora_A'),
        (dict(use_dora=True), 'missing: .*lora_magnitude_vector'),
        (dict(bias='none'), 'left over: .*bias'),
        (dict(target_modules=['qkv']), r"target_modules: got .*'qkv'.* needs 'blocks"),
        (dict(use_rslora=True), 'use_rslora: got True; ViolinVisionTransformer needs False'),
    ],
    ids=str,
)
def test_a_folder_that_was_tampered_with_is_refused(change, message, tmp_path):
    folder = adapters(tmp_path)
    config = json.loads((folder / peft.CONFIG).read_text())
    (folder / peft.CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(RuntimeError, match=message):
        load_adapters(create(), folder)


def test_what_peft_does_not_load_is_seen(tmp_path, monkeypatch):
    folder = adapters(tmp_path)
    monkeypatch.setattr('peft.set_peft_model_state_dict', lambda model, saved: None)
    with pytest.raises(RuntimeError, match='peft did not load base_model'):
        load_adapters(create(), folder)


@pytest.mark.parametrize('name', [peft.CONFIG, peft.WEIGHTS])
def test_a_folder_without_a_file_is_refused(name, tmp_path):
    folder = adapters(tmp_path)
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=f'which has no {name}'):
        load_adapters(create(), folder)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=f'which has no {peft.CONFIG}'):
        load_adapters(create(), folder)
