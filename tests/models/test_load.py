"""timm's plain weights in, through timm's own ways: of any size, head and wrapping, with or without a class token."""

import argparse

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import checkpoint_filter_fn as timm_filter_fn

from violin_timm.models.load import unwrap

TINY = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2)
KINDS = ('deit', 'deit3', 'dino')
NO_CHANGE = dict(alpha_std=0.0)  # with the fine-tuning beta: within 1e-3 of the plain model


def assert_within(actual, expected, tolerance=1e-3):
    assert (actual - expected).abs().max() < tolerance * expected.abs().max()


def assert_fresh(model, mask_init='finetune'):
    low, high = {'finetune': (15, 20), 'pretrain': (5, 9)}[mask_init]
    for block in model.blocks:
        decay = block.attn.decay
        assert (decay.beta >= low).all() and (decay.beta <= high).all() and decay.beta.std() > 0.3
        assert decay.settings.mask_init == mask_init
        torch.testing.assert_close(decay.alpha, torch.ones(3), rtol=0, atol=0.05) if mask_init == 'finetune' else None


# --- outputs, sizes and heads


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
@pytest.mark.parametrize('kind', KINDS)
def test_plain_weights_give_the_plain_outputs(kind, suffix, tmp_path, plain_model, write_weights, model_from, image):
    plain = plain_model(kind)
    model = model_from(write_weights(tmp_path, plain.state_dict(), suffix), kind, **NO_CHANGE)
    assert model.has_class_token and model.global_pool == 'token'
    assert_fresh(model)
    assert_within(model(image()), plain(image()))
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert model.state_dict().keys() - plain.state_dict().keys() == {
        f'blocks.{i}.attn.decay.{p}' for i in range(2) for p in ('beta', 'alpha')
    }


@pytest.mark.parametrize('kind', KINDS)
def test_mask_off_gives_the_plain_outputs_to_the_last_bit(
    kind, tmp_path, plain_model, write_weights, model_from, image
):
    plain = plain_model(kind)
    model = model_from(write_weights(tmp_path, plain.state_dict()), kind, mask='none', alpha='none')
    assert torch.equal(model(image()), plain(image()))


@pytest.mark.parametrize('size', [(48, 48), (16, 40), (64, 64)])
@pytest.mark.parametrize('kind', KINDS)
def test_other_size_is_resampled_as_timm_does(kind, size, tmp_path, plain_model, write_weights, model_from, image):
    source = plain_model(kind)
    plain = plain_model(kind, img_size=size)
    plain.load_state_dict(timm_filter_fn(source.state_dict(), plain))
    model = model_from(write_weights(tmp_path, source.state_dict()), kind, img_size=size, **NO_CHANGE)
    assert torch.equal(model.pos_embed, plain.pos_embed)
    assert_within(model(image(size)), plain(image(size)))


@pytest.mark.parametrize('kind', KINDS)
def test_other_patch_size_is_resampled_as_timm_does(kind, tmp_path, plain_model, write_weights, model_from, image):
    source = plain_model(kind)
    plain = plain_model(kind, patch_size=16)
    plain.load_state_dict(timm_filter_fn(source.state_dict(), plain))
    model = model_from(write_weights(tmp_path, source.state_dict()), kind, patch_size=16, **NO_CHANGE)
    assert_within(model(image()), plain(image()))


def test_other_number_of_channels(tmp_path, plain_model, write_weights, model_from):
    source = plain_model()
    model = model_from(write_weights(tmp_path, source.state_dict()), in_chans=1, **NO_CHANGE)
    torch.testing.assert_close(model.patch_embed.proj.weight, source.patch_embed.proj.weight.sum(1, keepdim=True))


@pytest.mark.parametrize('source_classes', [10, -1])  # -1: what timm's --pretrained-path says
@pytest.mark.parametrize('class_token', [True, False])
@pytest.mark.parametrize('kind', ['deit', 'deit3'])
def test_new_head_is_drawn_and_the_rest_is_loaded(
    kind, class_token, source_classes, tmp_path, plain_model, write_weights, model_from
):
    source = plain_model(kind)
    model = model_from(
        write_weights(tmp_path, source.state_dict()),
        kind,
        num_classes=7,
        source_classes=source_classes,
        class_token=class_token,
    )
    assert model.head.weight.shape == (7, 48) and model.head.weight.std() > 0
    assert_fresh(model)
    skipped = {'head.weight', 'head.bias'} | (set() if class_token else {'cls_token', 'pos_embed'})
    for name in source.state_dict().keys() - skipped:
        assert torch.equal(model.state_dict()[name], source.state_dict()[name]), name


def test_no_head(tmp_path, plain_model, write_weights, model_from, image):
    source = plain_model()
    model = model_from(write_weights(tmp_path, source.state_dict()), num_classes=0, **NO_CHANGE)
    assert_within(model(image()), source.forward_head(source.forward_features(image()), pre_logits=True))
    features = timm.create_model(
        'violin_deit_tiny',
        pretrained=True,
        features_only=True,
        out_indices=[0, 1],
        **TINY,
        **NO_CHANGE,
        pretrained_cfg_overlay=dict(file=str(tmp_path / 'weights.pth'), num_classes=10),
    ).eval()
    expected = source.forward_intermediates(image(), indices=[0, 1], intermediates_only=True)
    for actual, feature in zip(features(image()), expected, strict=True):
        assert_within(actual, feature)


@pytest.mark.parametrize('kind', ['deit', 'deit3'])
def test_position_embedding_is_dropped_where_there_is_none(
    kind, tmp_path, plain_model, write_weights, model_from, image
):
    source = plain_model(kind)
    model = model_from(write_weights(tmp_path, source.state_dict()), kind, pos_embed='none', **NO_CHANGE)
    plain = plain_model(kind, pos_embed='none')
    plain.load_state_dict({k: v for k, v in source.state_dict().items() if k != 'pos_embed'})
    assert_within(model(image()), plain(image()))


# --- models without a class token


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
@pytest.mark.parametrize('size', [(32, 32), (48, 48), (16, 40)])
@pytest.mark.parametrize('kind', KINDS)
def test_class_token_weights_into_gap(kind, size, suffix, tmp_path, plain_model, write_weights, model_from, image):
    """The class token and its position go; the final norm stays, before the mean."""
    source = plain_model(kind)
    model = model_from(
        write_weights(tmp_path, source.state_dict(), suffix), kind, img_size=size, class_token=False, **NO_CHANGE
    )
    assert model.cls_token is None and model.global_pool == 'avg'
    assert torch.equal(model.norm.weight, source.norm.weight) and torch.equal(model.norm.bias, source.norm.bias)
    assert torch.equal(model.patch_embed.proj.weight, source.patch_embed.proj.weight)
    position = source.pos_embed if kind == 'deit3' else source.pos_embed[:, 1:]
    expected = resample_abs_pos_embed(position, model.patch_embed.grid_size, (4, 4), num_prefix_tokens=0)
    assert torch.equal(model.pos_embed, expected)
    assert_fresh(model)
    # the same by timm's own modules, without the class token
    plain = plain_model(kind, img_size=size, class_token=False, global_pool='avg', fc_norm=False)
    state = {k: v for k, v in source.state_dict().items() if k != 'cls_token'}
    plain.load_state_dict({**state, 'pos_embed': expected})
    assert_within(model(image(size)), plain(image(size)))


@pytest.mark.parametrize('size', [(24, 40), (16, 40)])  # 15 patches and a token: as many as 4 x 4
def test_class_token_weights_of_a_rectangle_into_gap(size, tmp_path, plain_model, write_weights, model_from):
    source = plain_model(img_size=size)
    model = model_from(write_weights(tmp_path, source.state_dict()), img_size=size, class_token=False)
    assert torch.equal(model.pos_embed, source.pos_embed[:, 1:])


def test_registers_stay_when_the_class_token_goes(tmp_path, plain_model, write_weights, model_from):
    source = plain_model(reg_tokens=2)
    model = model_from(write_weights(tmp_path, source.state_dict()), reg_tokens=2, class_token=False)
    assert torch.equal(model.reg_token, source.reg_token)
    assert torch.equal(model.pos_embed, source.pos_embed[:, 1:])


def test_gap_weights_into_gap(tmp_path, plain_model, write_weights, model_from, image):
    source = plain_model(class_token=False, global_pool='avg', fc_norm=False)
    model = model_from(write_weights(tmp_path, source.state_dict()), class_token=False, **NO_CHANGE)
    assert_within(model(image()), source(image()))


# --- in whatever a file wraps them


WRAPPINGS = {
    'bare': lambda s: s,
    'model': lambda s: {'model': s, 'epoch': 3},
    'state_dict': lambda s: {'state_dict': s},
    'ema': lambda s: {'state_dict': {k: v + 1 for k, v in s.items()}, 'state_dict_ema': s},
    'ddp': lambda s: {'state_dict': {f'module.{k}': v for k, v in s.items()}},
    'compiled': lambda s: {f'_orig_mod.{k}': v for k, v in s.items()},
    'compiled ddp': lambda s: {f'module._orig_mod.{k}': v for k, v in s.items()},
    'namespace': lambda s: {'model': s, 'args': argparse.Namespace(lr=0.1)},
    'teacher': lambda s: {
        'student': {f'module.backbone.{k}': v + 1 for k, v in s.items()},
        'args': argparse.Namespace(),
        'teacher': {'head.mlp.0.weight': torch.ones(2, 2), **{f'backbone.{k}': v for k, v in s.items()}},
    },
}


@pytest.mark.parametrize('wrapping', WRAPPINGS)
@pytest.mark.parametrize('kind', ['deit3', 'dino'])
def test_wrapped_weights(kind, wrapping, tmp_path, plain_model, write_weights, model_from, image):
    source = plain_model(kind)
    model = model_from(write_weights(tmp_path, WRAPPINGS[wrapping](source.state_dict())), kind, **NO_CHANGE)
    assert_within(model(image()), source(image()))


def test_unwrap_leaves_what_is_no_tensor():
    state = {'a': torch.ones(1), 'note': 'text', 'step': 3}
    assert unwrap({'model': state}).keys() == {'a'}
