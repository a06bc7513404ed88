"""Models saved by timm's `save_for_hf` and built again from their folder, by ``local-dir:``."""

import json
import math

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.models import save_for_hf

TINY = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2)


def round_trip(model, folder, safe=True, **kwargs):
    save_for_hf(model, str(folder), safe_serialization=safe)
    torch.manual_seed(99)
    return timm.create_model(f'local-dir:{folder}', pretrained=True, **kwargs).eval()


@pytest.mark.parametrize('safe', [True, False], ids=['safetensors', 'bin'])
@pytest.mark.parametrize(
    'kwargs',
    [
        {},
        dict(class_token=True),
        dict(global_pool='max'),
        dict(class_token=True, global_pool='avg'),
        dict(curves=['snake', 'hilbert_T']),
        dict(curves='peano'),
        dict(geometry='random', num_random=3, random_seed=4),
        dict(mask='fixed', gamma=0.99),
        dict(mask='none', alpha='none'),
        dict(strategy='add_v1', alpha_on='scores'),
        dict(pos_embed='none'),
        dict(img_size=(16, 40)),
        dict(in_chans=1),
        dict(reg_tokens=2),
        dict(num_classes=0),
        dict(curve_weights='learned', beta_range=(1, 2)),
        dict(fc_norm=True),
        dict(dynamic_img_size=True),
    ],
    ids=str,
)
def test_local_dir_rebuilds_what_was_built(kwargs, safe, tmp_path):
    torch.manual_seed(1)
    kwargs = {**TINY, 'num_classes': 10, **kwargs}
    source = timm.create_model('violin_deit_tiny', **kwargs).eval()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model = round_trip(source, tmp_path, safe)
    assert list(model.state_dict()) == list(source.state_dict())
    size = model.patch_embed.img_size
    x = torch.randn(2, kwargs.get('in_chans', 3), *size)
    assert torch.equal(model(x), source(x))
    assert model.has_class_token == source.has_class_token and model.global_pool == source.global_pool
    if source.blocks[0].attn.decay is not None:
        assert model.curve_names == source.curve_names
        assert model.blocks[0].attn.decay.settings.strategy == source.blocks[0].attn.decay.settings.strategy


@pytest.mark.parametrize('variant', ['violin_deit_tiny', 'violin_deit3_small', 'violin_dino_small'])
@pytest.mark.parametrize('classes, pool', [(7, 'avg'), (7, None), (0, 'avg'), (7, 'token'), (7, 'max')])
def test_local_dir_after_reset_classifier_on_a_class_token_model(variant, classes, pool, tmp_path, image):
    source = timm.create_model(variant, **TINY, num_classes=10, class_token=True).eval()
    source.reset_classifier(classes, pool)
    model = round_trip(source, tmp_path)
    assert model.has_class_token and model.global_pool == (pool or 'token') and model.num_classes == classes
    assert torch.equal(model(image()), source(image()))
    again = round_trip(model, tmp_path / 'again')
    assert torch.equal(again(image()), source(image()))


def test_local_dir_after_reset_classifier_on_a_gap_model(tmp_path, image):
    source = timm.create_model('violin_deit_tiny', **TINY, num_classes=10).eval()
    source.reset_classifier(7, 'max')
    model = round_trip(source, tmp_path)
    assert not model.has_class_token and model.global_pool == 'max'
    assert torch.equal(model(image()), source(image()))


def test_local_dir_of_a_model_with_plain_weights(tmp_path, plain_model, write_weights, model_from, image):
    """pretrained=True made it a class-token model; the folder says so by itself."""
    source = model_from(write_weights(tmp_path, plain_model().state_dict()))
    model = round_trip(source, tmp_path / 'folder')
    assert model.has_class_token
    assert torch.equal(model(image()), source(image()))
    config = json.loads((tmp_path / 'folder' / 'config.json').read_text())
    assert config['model_args']['class_token'] is True
    untrained = timm.create_model(f'local-dir:{tmp_path / "folder"}', pretrained=False)
    assert untrained.has_class_token and untrained.patch_embed.grid_size == (4, 4)


def test_local_dir_after_set_input_size(tmp_path, image):
    source = timm.create_model('violin_deit_tiny', **TINY, num_classes=10).eval()
    source.set_input_size((16, 40))
    model = round_trip(source, tmp_path)
    assert torch.equal(model(image((16, 40))), source(image((16, 40))))


def test_local_dir_with_a_new_head_and_size(tmp_path, image):
    source = timm.create_model('violin_deit_tiny', **TINY, num_classes=10).eval()
    model = round_trip(source, tmp_path, num_classes=3, img_size=48)
    assert model(image((48, 48))).shape == (2, 3)
    assert torch.equal(model.blocks[1].attn.decay.beta, source.blocks[1].attn.decay.beta)


def test_local_dir_into_gap(tmp_path):
    source = timm.create_model('violin_deit3_small', **TINY, num_classes=10).eval()
    model = round_trip(source, tmp_path, class_token=False, global_pool='avg')
    assert model.cls_token is None
    assert torch.equal(model.blocks[1].attn.decay.beta, source.blocks[1].attn.decay.beta)


def test_files_hold_nothing_but_tensors(tmp_path):
    source = timm.create_model('violin_deit_tiny', **TINY, curves=['snake'])
    save_for_hf(source, str(tmp_path), safe_serialization='both')
    state = torch.load(tmp_path / 'pytorch_model.bin', weights_only=True)
    assert state.keys() == load_file(tmp_path / 'model.safetensors').keys() == source.state_dict().keys()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert sum(value.numel() for name, value in state.items() if 'decay' in name) == 2 * 3 * 2


def test_keys_do_not_depend_on_the_resolution():
    keys = [
        {
            k: v.shape
            for k, v in timm.create_model('violin_deit_tiny', **{**TINY, 'img_size': size}, pos_embed='none')
            .state_dict()
            .items()
        }
        for size in (32, 64, (16, 40))
    ]
    assert keys[0] == keys[1] == keys[2]
    assert math.prod(keys[0]['blocks.0.attn.decay.beta']) == 24
