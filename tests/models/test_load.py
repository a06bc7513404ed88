"""Weights in: timm's checkpoints and our own, through timm's own ways; and files that do not fit, refused."""

import argparse
import json
import math
import struct

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import resample_abs_pos_embed
from timm.models import load_checkpoint, save_for_hf
from timm.models.vision_transformer import checkpoint_filter_fn as timm_filter_fn

import violin_timm  # noqa: F401
from violin_timm.models.load import unwrap

TINY = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2)
KINDS = {
    'deit': ('violin_deit_tiny', 'deit_tiny_patch16_224'),
    'deit3': ('violin_deit3_small', 'deit3_small_patch16_224'),
    'dino': ('violin_dino_small', 'vit_small_patch16_224.dino'),
}
NO_CHANGE = dict(alpha_std=0.0)  # with the fine-tuning beta: within 1e-3 of the plain model


def plain_model(kind='deit', num_classes=10, **kwargs):
    """A model of timm's own with random weights under which attention matters."""
    if kind == 'dino':
        num_classes = 0
    torch.manual_seed(1)
    model = timm.create_model(KINDS[kind][1], **{**TINY, **kwargs}, num_classes=num_classes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def write(path, content, suffix='.pth'):
    path = path / f'weights{suffix}'
    if suffix == '.safetensors':
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


def load(path, kind='deit', num_classes=10, source_classes=10, **kwargs):
    """`num_classes` of the model, and what timm is told of the file's."""
    if kind == 'dino':
        num_classes = source_classes = 0
    return timm.create_model(
        KINDS[kind][0],
        pretrained=True,
        num_classes=num_classes,
        **{**TINY, **kwargs},
        pretrained_cfg_overlay=dict(file=str(path), num_classes=source_classes),
    ).eval()


def image(size=(32, 32)):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(4))


def assert_within(actual, expected, tolerance=1e-3):
    assert (actual - expected).abs().max() < tolerance * expected.abs().max()


def assert_fresh(model, mask_init='finetune'):
    low, high = {'finetune': (15, 20), 'pretrain': (5, 9)}[mask_init]
    for block in model.blocks:
        decay = block.attn.decay
        assert (decay.beta >= low).all() and (decay.beta <= high).all() and decay.beta.std() > 0.3
        assert decay.settings.mask_init == mask_init
        torch.testing.assert_close(decay.alpha, torch.ones(3), rtol=0, atol=0.05) if mask_init == 'finetune' else None


# --- timm's plain weights


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
@pytest.mark.parametrize('kind', KINDS)
def test_plain_weights_give_the_plain_outputs(kind, suffix, tmp_path):
    plain = plain_model(kind)
    model = load(write(tmp_path, plain.state_dict(), suffix), kind, **NO_CHANGE)
    assert model.has_class_token and model.global_pool == 'token'
    assert_fresh(model)
    assert_within(model(image()), plain(image()))
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert model.state_dict().keys() - plain.state_dict().keys() == {
        f'blocks.{i}.attn.decay.{p}' for i in range(2) for p in ('beta', 'alpha')
    }


@pytest.mark.parametrize('kind', KINDS)
def test_mask_off_gives_the_plain_outputs_to_the_last_bit(kind, tmp_path):
    plain = plain_model(kind)
    model = load(write(tmp_path, plain.state_dict()), kind, mask='none', alpha='none')
    assert torch.equal(model(image()), plain(image()))


@pytest.mark.parametrize('size', [(48, 48), (16, 40), (64, 64)])
@pytest.mark.parametrize('kind', KINDS)
def test_other_size_is_resampled_as_timm_does(kind, size, tmp_path):
    source = plain_model(kind)
    plain = plain_model(kind, img_size=size)
    plain.load_state_dict(timm_filter_fn(source.state_dict(), plain))
    model = load(write(tmp_path, source.state_dict()), kind, img_size=size, **NO_CHANGE)
    assert torch.equal(model.pos_embed, plain.pos_embed)
    assert_within(model(image(size)), plain(image(size)))


@pytest.mark.parametrize('kind', KINDS)
def test_other_patch_size_is_resampled_as_timm_does(kind, tmp_path):
    source = plain_model(kind)
    plain = plain_model(kind, patch_size=16)
    plain.load_state_dict(timm_filter_fn(source.state_dict(), plain))
    model = load(write(tmp_path, source.state_dict()), kind, patch_size=16, **NO_CHANGE)
    assert_within(model(image()), plain(image()))


def test_other_number_of_channels(tmp_path):
    source = plain_model()
    model = load(write(tmp_path, source.state_dict()), in_chans=1, **NO_CHANGE)
    torch.testing.assert_close(model.patch_embed.proj.weight, source.patch_embed.proj.weight.sum(1, keepdim=True))


@pytest.mark.parametrize('source_classes', [10, -1])  # -1: what timm's --pretrained-path says
@pytest.mark.parametrize('class_token', [True, False])
@pytest.mark.parametrize('kind', ['deit', 'deit3'])
def test_new_head_is_drawn_and_the_rest_is_loaded(kind, class_token, source_classes, tmp_path):
    source = plain_model(kind)
    model = load(
        write(tmp_path, source.state_dict()),
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


def test_no_head(tmp_path):
    source = plain_model()
    model = load(write(tmp_path, source.state_dict()), num_classes=0, **NO_CHANGE)
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


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
@pytest.mark.parametrize('size', [(32, 32), (48, 48), (16, 40)])
@pytest.mark.parametrize('kind', KINDS)
def test_class_token_weights_into_gap(kind, size, suffix, tmp_path):
    """The class token and its position go; the final norm stays, before the mean."""
    source = plain_model(kind)
    model = load(write(tmp_path, source.state_dict(), suffix), kind, img_size=size, class_token=False, **NO_CHANGE)
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
def test_class_token_weights_of_a_rectangle_into_gap(size, tmp_path):
    source = plain_model(img_size=size)
    model = load(write(tmp_path, source.state_dict()), img_size=size, class_token=False)
    assert torch.equal(model.pos_embed, source.pos_embed[:, 1:])


def test_registers_stay_when_the_class_token_goes(tmp_path):
    source = plain_model(reg_tokens=2)
    model = load(write(tmp_path, source.state_dict()), reg_tokens=2, class_token=False)
    assert torch.equal(model.reg_token, source.reg_token)
    assert torch.equal(model.pos_embed, source.pos_embed[:, 1:])


def test_gap_weights_into_gap(tmp_path):
    source = plain_model(class_token=False, global_pool='avg', fc_norm=False)
    model = load(write(tmp_path, source.state_dict()), class_token=False, **NO_CHANGE)
    assert_within(model(image()), source(image()))


@pytest.mark.parametrize('kind', ['deit', 'deit3'])
def test_position_embedding_is_dropped_where_there_is_none(kind, tmp_path):
    source = plain_model(kind)
    model = load(write(tmp_path, source.state_dict()), kind, pos_embed='none', **NO_CHANGE)
    plain = plain_model(kind, pos_embed='none')
    plain.load_state_dict({k: v for k, v in source.state_dict().items() if k != 'pos_embed'})
    assert_within(model(image()), plain(image()))


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
def test_wrapped_weights(kind, wrapping, tmp_path):
    source = plain_model(kind)
    model = load(write(tmp_path, WRAPPINGS[wrapping](source.state_dict())), kind, **NO_CHANGE)
    assert_within(model(image()), source(image()))


def test_unwrap_leaves_what_is_no_tensor():
    state = {'a': torch.ones(1), 'note': 'text', 'step': 3}
    assert unwrap({'model': state}).keys() == {'a'}


# --- which initialisation


@pytest.mark.parametrize(
    'given, beta',
    [
        ({}, (15, 20)),
        (dict(mask_init='finetune'), (15, 20)),
        (dict(mask_init='pretrain'), (5, 9)),
        (dict(beta_range=(1, 2)), (1, 2)),
        (dict(mask_init='pretrain', beta_range=(1, 2)), (1, 2)),
    ],
    ids=str,
)
def test_initialisation_of_fresh_masks(given, beta, tmp_path):
    model = load(write(tmp_path, plain_model().state_dict()), **given)
    for block in model.blocks:
        value = block.attn.decay.beta
        assert (value >= beta[0]).all() and (value <= beta[1]).all()
    mean = torch.stack([block.attn.decay.alpha for block in model.blocks]).mean()
    assert (abs(mean - 1) < 0.05) == (given.get('mask_init', 'finetune') == 'finetune')


def test_ablation_without_initialisation(tmp_path):
    model = load(write(tmp_path, plain_model().state_dict()), mask_init='none')
    assert all(block.attn.decay.beta.abs().max() < 3 for block in model.blocks)


def test_without_weights_the_default_is_pretrain():
    model = timm.create_model('violin_deit_tiny', **TINY)
    assert all((block.attn.decay.beta >= 5).all() and (block.attn.decay.beta <= 9).all() for block in model.blocks)


def test_loading_for_one_seed_is_repeatable_and_paired(tmp_path):
    path = write(tmp_path, plain_model().state_dict())
    models = []
    for extra in (0, 5):
        torch.manual_seed(3)
        torch.rand(extra)
        models.append(load(path))
    for block, other in zip(models[0].blocks, models[1].blocks, strict=True):
        assert torch.equal(block.attn.decay.beta, other.attn.decay.beta)


@pytest.mark.parametrize(
    'settings',
    [
        dict(mask='fixed'),
        dict(mask='fixed', alpha='none'),
        dict(mask='none'),
        dict(alpha='none'),
        dict(curve_weights='learned'),
        dict(geometry='manhattan'),
        dict(strategy='add_v1', alpha_on='scores'),
    ],
    ids=str,
)
def test_plain_weights_into_every_arm(settings, tmp_path):
    source = plain_model()
    model = load(write(tmp_path, source.state_dict()), **settings)
    assert model(image()).isfinite().all()
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    if settings.get('mask') == 'fixed':
        torch.testing.assert_close(model.blocks[1].attn.decay.beta.sigmoid(), torch.full((3, 8), 0.9996))


# --- our own weights


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
@pytest.mark.parametrize('class_token', [True, False])
def test_native_weights_bring_their_masks(class_token, suffix, tmp_path):
    torch.manual_seed(1)
    source = timm.create_model('violin_deit_tiny', **TINY, num_classes=10, class_token=class_token).eval()
    path = write(tmp_path, source.state_dict(), suffix)
    torch.manual_seed(2)
    model = load(path, class_token=class_token)
    assert torch.equal(model(image()), source(image()))
    direct = timm.create_model(
        'violin_deit_tiny', **TINY, num_classes=10, class_token=class_token, checkpoint_path=str(path)
    ).eval()
    assert torch.equal(direct(image()), source(image()))


@pytest.mark.parametrize(
    'source_arm, arm, fresh',
    [
        (dict(alpha='none'), {}, 'alpha'),
        (dict(mask='none'), {}, 'beta'),
        ({}, dict(curve_weights='learned'), 'curve_logits'),
    ],
)
def test_kinds_of_mask_parameters_that_a_file_lacks_are_drawn(source_arm, arm, fresh, tmp_path):
    source = timm.create_model('violin_deit3_small', **TINY, num_classes=10, **source_arm)
    model = load(write(tmp_path, source.state_dict()), 'deit3', **arm)
    for name, value in model.state_dict().items():
        if name.endswith(fresh):
            assert name not in source.state_dict() and value.isfinite().all()
        else:
            assert torch.equal(value, source.state_dict()[name]), name


def native(**kwargs):
    return timm.create_model('violin_deit_tiny', **TINY, num_classes=10, class_token=True, **kwargs).state_dict()


@pytest.mark.parametrize('settings', [dict(mask='none', alpha='none'), dict(mask='none'), dict(alpha='none')], ids=str)
@pytest.mark.parametrize('num_classes', [10, 7])
def test_masks_that_have_no_place_are_refused(settings, num_classes, tmp_path):
    with pytest.raises(RuntimeError, match='it has masks that this model has no place for'):
        load(write(tmp_path, native()), num_classes=num_classes, **settings)


@pytest.mark.parametrize('num_classes', [10, 7])
def test_other_number_of_curves_is_refused(num_classes, tmp_path):
    with pytest.raises(RuntimeError, match=r'decay\.beta'):
        load(write(tmp_path, native()), num_classes=num_classes, curves='snake')


@pytest.mark.parametrize('num_classes', [10, 7])
def test_masks_of_some_layers_only_are_refused(num_classes, tmp_path):
    state = native()
    del state['blocks.1.attn.decay.alpha']
    with pytest.raises(RuntimeError, match=r'missing: blocks\.1\.attn\.decay\.alpha'):
        load(write(tmp_path, state), num_classes=num_classes)


# --- files that do not fit

JUNK = {
    'other model': {'conv1.weight': torch.ones(2, 3, 3, 3), 'fc.bias': torch.ones(4)},
    'empty': {},
    'only a head': {'head.weight': torch.ones(10, 48), 'head.bias': torch.ones(10)},
    'no tensors': {'epoch': 3},
    'wrapped empty': {'model': {}},
}


@pytest.mark.parametrize('num_classes, source_classes', [(10, 10), (7, 10), (7, -1), (0, 10)])
@pytest.mark.parametrize('class_token', [True, False])
@pytest.mark.parametrize('junk', JUNK)
def test_junk_is_refused_also_with_a_new_head(junk, class_token, num_classes, source_classes, tmp_path):
    with pytest.raises(RuntimeError, match=r'checkpoint does not fit|missing'):
        load(
            write(tmp_path, JUNK[junk]), num_classes=num_classes, source_classes=source_classes, class_token=class_token
        )


@pytest.mark.parametrize('num_classes', [10, 7])
def test_convolutional_network_is_refused(num_classes, tmp_path):
    path = write(tmp_path, timm.create_model('resnet10t', num_classes=10).state_dict(), '.safetensors')
    with pytest.raises(RuntimeError, match='none of its'):
        load(path, num_classes=num_classes)


@pytest.mark.parametrize('content', [b'', b'junk', [torch.ones(2)]], ids=['nothing', 'bytes', 'list'])
@pytest.mark.parametrize('num_classes', [10, 7])
def test_files_that_hold_no_state_dict_are_refused(num_classes, content, tmp_path):
    path = tmp_path / 'weights.pth'
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises((EOFError, RuntimeError, AttributeError, struct.error)):
        load(path, num_classes=num_classes)


LACKING = ['norm.weight', 'blocks.1.mlp.fc2.bias', 'blocks.0.attn.qkv.weight', 'patch_embed.proj.bias', 'pos_embed']


@pytest.mark.parametrize('num_classes, source_classes', [(10, 10), (7, 10), (7, -1), (0, 10)])
@pytest.mark.parametrize('class_token', [True, False])
@pytest.mark.parametrize('key', LACKING)
def test_one_key_too_few_is_refused_also_with_a_new_head(key, class_token, num_classes, source_classes, tmp_path):
    state = plain_model().state_dict()
    del state[key]
    with pytest.raises(RuntimeError, match=f'missing: {key}'):
        load(write(tmp_path, state), num_classes=num_classes, source_classes=source_classes, class_token=class_token)


def test_head_too_few_is_refused_unless_it_is_new(tmp_path):
    state = plain_model().state_dict()
    del state['head.bias']
    path = write(tmp_path, state)
    with pytest.raises(RuntimeError, match=r'missing: head\.bias'):
        load(path)
    assert load(path, num_classes=7).head.out_features == 7


@pytest.mark.parametrize('num_classes', [10, 7])
@pytest.mark.parametrize(
    'options', [dict(depth=3), dict(reg_tokens=2), dict(init_values=1.0), dict(qk_norm=True)], ids=str
)
def test_keys_left_over_are_refused(options, num_classes, tmp_path):
    with pytest.raises(RuntimeError, match='left over: '):
        load(write(tmp_path, plain_model(**options).state_dict()), num_classes=num_classes)


def test_distilled_weights_are_refused(tmp_path):
    source = timm.create_model('deit_tiny_distilled_patch16_224', **TINY, num_classes=10)
    with pytest.raises(RuntimeError, match='left over: dist_token'):
        load(write(tmp_path, source.state_dict()))


@pytest.mark.parametrize('num_classes', [10, 7])
def test_other_width_is_refused(num_classes, tmp_path):
    with pytest.raises(RuntimeError, match='size mismatch'):
        load(write(tmp_path, plain_model(embed_dim=24).state_dict()), num_classes=num_classes)


def test_head_of_another_size_is_refused_by_name(tmp_path):
    path = write(tmp_path, plain_model(num_classes=12).state_dict())
    with pytest.raises(ValueError, match='num_classes: got 10, but the checkpoint has 12 classes'):
        load(path)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('num_classes', [10, 7])
def test_gap_weights_into_a_class_token_model_name_the_argument(kind, num_classes, tmp_path):
    source = plain_model(kind, class_token=False, global_pool='avg', fc_norm=False)
    with pytest.raises(ValueError, match=r'class_token: got True.*pass class_token=False'):
        load(write(tmp_path, source.state_dict()), kind, num_classes=num_classes)


@pytest.mark.parametrize('class_token', [True, False])
def test_native_file_of_the_other_kind_names_the_argument(class_token, tmp_path):
    source = timm.create_model('violin_deit_tiny', **TINY, class_token=class_token)
    path = write(tmp_path, source.state_dict())
    message = f'class_token: got {not class_token}.*class_token={class_token}'
    with pytest.raises(RuntimeError, match=message):
        timm.create_model('violin_deit_tiny', **TINY, class_token=not class_token, checkpoint_path=str(path))
    model = timm.create_model('violin_deit_tiny', **TINY, class_token=not class_token)
    for function in (lambda: model.load_state_dict(source.state_dict()), lambda: load_checkpoint(model, str(path))):
        with pytest.raises(RuntimeError, match=message):
            function()


def test_plain_file_as_a_native_one_is_refused(tmp_path):
    path = write(tmp_path, plain_model().state_dict())
    with pytest.raises(RuntimeError, match='decay'):
        timm.create_model('violin_deit_tiny', **TINY, num_classes=10, class_token=True, checkpoint_path=str(path))


# --- save_for_hf and local-dir


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
def test_local_dir_after_reset_classifier_on_a_class_token_model(variant, classes, pool, tmp_path):
    source = timm.create_model(variant, **TINY, num_classes=10, class_token=True).eval()
    source.reset_classifier(classes, pool)
    model = round_trip(source, tmp_path)
    assert model.has_class_token and model.global_pool == (pool or 'token') and model.num_classes == classes
    assert torch.equal(model(image()), source(image()))
    again = round_trip(model, tmp_path / 'again')
    assert torch.equal(again(image()), source(image()))


def test_local_dir_after_reset_classifier_on_a_gap_model(tmp_path):
    source = timm.create_model('violin_deit_tiny', **TINY, num_classes=10).eval()
    source.reset_classifier(7, 'max')
    model = round_trip(source, tmp_path)
    assert not model.has_class_token and model.global_pool == 'max'
    assert torch.equal(model(image()), source(image()))


def test_local_dir_of_a_model_with_plain_weights(tmp_path):
    """pretrained=True made it a class-token model; the folder says so by itself."""
    source = load(write(tmp_path, plain_model().state_dict()))
    model = round_trip(source, tmp_path / 'folder')
    assert model.has_class_token
    assert torch.equal(model(image()), source(image()))
    config = json.loads((tmp_path / 'folder' / 'config.json').read_text())
    assert config['model_args']['class_token'] is True
    untrained = timm.create_model(f'local-dir:{tmp_path / "folder"}', pretrained=False)
    assert untrained.has_class_token and untrained.patch_embed.grid_size == (4, 4)


def test_local_dir_after_set_input_size(tmp_path):
    source = timm.create_model('violin_deit_tiny', **TINY, num_classes=10).eval()
    source.set_input_size((16, 40))
    model = round_trip(source, tmp_path)
    assert torch.equal(model(image((16, 40))), source(image((16, 40))))


def test_local_dir_with_a_new_head_and_size(tmp_path):
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
