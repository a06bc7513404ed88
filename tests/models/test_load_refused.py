"""Files that do not fit the model are refused by name, whether or not the head is new."""

import struct

import pytest
import timm
import torch
from timm.models import load_checkpoint

TINY = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2)
KINDS = ('deit', 'deit3', 'dino')


# --- masks of our own


def native(**kwargs):
    return timm.create_model('violin_deit_tiny', **TINY, num_classes=10, class_token=True, **kwargs).state_dict()


@pytest.mark.parametrize('settings', [dict(mask='none', alpha='none'), dict(mask='none'), dict(alpha='none')], ids=str)
@pytest.mark.parametrize('num_classes', [10, 7])
def test_masks_that_have_no_place_are_refused(settings, num_classes, tmp_path, write_weights, model_from):
    with pytest.raises(RuntimeError, match='it has masks that this model has no place for'):
        model_from(write_weights(tmp_path, native()), num_classes=num_classes, **settings)


@pytest.mark.parametrize('num_classes', [10, 7])
def test_other_number_of_curves_is_refused(num_classes, tmp_path, write_weights, model_from):
    with pytest.raises(RuntimeError, match=r'decay\.beta'):
        model_from(write_weights(tmp_path, native()), num_classes=num_classes, curves='snake')


@pytest.mark.parametrize('num_classes', [10, 7])
def test_masks_of_some_layers_only_are_refused(num_classes, tmp_path, write_weights, model_from):
    state = native()
    del state['blocks.1.attn.decay.alpha']
    with pytest.raises(RuntimeError, match=r'missing: blocks\.1\.attn\.decay\.alpha'):
        model_from(write_weights(tmp_path, state), num_classes=num_classes)


# --- no weights of such a model


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
def test_junk_is_refused_also_with_a_new_head(
    junk, class_token, num_classes, source_classes, tmp_path, write_weights, model_from
):
    with pytest.raises(RuntimeError, match=r'checkpoint does not fit|missing'):
        model_from(
            write_weights(tmp_path, JUNK[junk]),
            num_classes=num_classes,
            source_classes=source_classes,
            class_token=class_token,
        )


@pytest.mark.parametrize('num_classes', [10, 7])
def test_convolutional_network_is_refused(num_classes, tmp_path, write_weights, model_from):
    path = write_weights(tmp_path, timm.create_model('resnet10t', num_classes=10).state_dict(), '.safetensors')
    with pytest.raises(RuntimeError, match='none of its'):
        model_from(path, num_classes=num_classes)


@pytest.mark.parametrize('content', [b'', b'junk', [torch.ones(2)]], ids=['nothing', 'bytes', 'list'])
@pytest.mark.parametrize('num_classes', [10, 7])
def test_files_that_hold_no_state_dict_are_refused(num_classes, content, tmp_path, model_from):
    path = tmp_path / 'weights.pth'
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises((EOFError, RuntimeError, AttributeError, struct.error)):
        model_from(path, num_classes=num_classes)


# --- keys and shapes


LACKING = ['norm.weight', 'blocks.1.mlp.fc2.bias', 'blocks.0.attn.qkv.weight', 'patch_embed.proj.bias', 'pos_embed']


@pytest.mark.parametrize('num_classes, source_classes', [(10, 10), (7, 10), (7, -1), (0, 10)])
@pytest.mark.parametrize('class_token', [True, False])
@pytest.mark.parametrize('key', LACKING)
def test_one_key_too_few_is_refused_also_with_a_new_head(
    key, class_token, num_classes, source_classes, tmp_path, plain_model, write_weights, model_from
):
    state = plain_model().state_dict()
    del state[key]
    with pytest.raises(RuntimeError, match=f'missing: {key}'):
        model_from(
            write_weights(tmp_path, state),
            num_classes=num_classes,
            source_classes=source_classes,
            class_token=class_token,
        )


def test_head_too_few_is_refused_unless_it_is_new(tmp_path, plain_model, write_weights, model_from):
    state = plain_model().state_dict()
    del state['head.bias']
    path = write_weights(tmp_path, state)
    with pytest.raises(RuntimeError, match=r'missing: head\.bias'):
        model_from(path)
    assert model_from(path, num_classes=7).head.out_features == 7


@pytest.mark.parametrize('num_classes', [10, 7])
@pytest.mark.parametrize(
    'options', [dict(depth=3), dict(reg_tokens=2), dict(init_values=1.0), dict(qk_norm=True)], ids=str
)
def test_keys_left_over_are_refused(options, num_classes, tmp_path, plain_model, write_weights, model_from):
    with pytest.raises(RuntimeError, match='left over: '):
        model_from(write_weights(tmp_path, plain_model(**options).state_dict()), num_classes=num_classes)


def test_distilled_weights_are_refused(tmp_path, write_weights, model_from):
    source = timm.create_model('deit_tiny_distilled_patch16_224', **TINY, num_classes=10)
    with pytest.raises(RuntimeError, match='left over: dist_token'):
        model_from(write_weights(tmp_path, source.state_dict()))


@pytest.mark.parametrize('num_classes', [10, 7])
def test_other_width_is_refused(num_classes, tmp_path, plain_model, write_weights, model_from):
    with pytest.raises(RuntimeError, match='size mismatch'):
        model_from(write_weights(tmp_path, plain_model(embed_dim=24).state_dict()), num_classes=num_classes)


def test_head_of_another_size_is_refused_by_name(tmp_path, plain_model, write_weights, model_from):
    path = write_weights(tmp_path, plain_model(num_classes=12).state_dict())
    with pytest.raises(ValueError, match='num_classes: got 10, but the checkpoint has 12 classes'):
        model_from(path)


# --- the other kind of model


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('num_classes', [10, 7])
def test_gap_weights_into_a_class_token_model_name_the_argument(
    kind, num_classes, tmp_path, plain_model, write_weights, model_from
):
    source = plain_model(kind, class_token=False, global_pool='avg', fc_norm=False)
    with pytest.raises(ValueError, match=r'class_token: got True.*pass class_token=False'):
        model_from(write_weights(tmp_path, source.state_dict()), kind, num_classes=num_classes)


@pytest.mark.parametrize('class_token', [True, False])
def test_native_file_of_the_other_kind_names_the_argument(class_token, tmp_path, write_weights):
    source = timm.create_model('violin_deit_tiny', **TINY, class_token=class_token)
    path = write_weights(tmp_path, source.state_dict())
    message = f'class_token: got {not class_token}.*class_token={class_token}'
    with pytest.raises(RuntimeError, match=message):
        timm.create_model('violin_deit_tiny', **TINY, class_token=not class_token, checkpoint_path=str(path))
    model = timm.create_model('violin_deit_tiny', **TINY, class_token=not class_token)
    for function in (lambda: model.load_state_dict(source.state_dict()), lambda: load_checkpoint(model, str(path))):
        with pytest.raises(RuntimeError, match=message):
            function()


def test_plain_file_as_a_native_one_is_refused(tmp_path, plain_model, write_weights):
    path = write_weights(tmp_path, plain_model().state_dict())
    with pytest.raises(RuntimeError, match='decay'):
        timm.create_model('violin_deit_tiny', **TINY, num_classes=10, class_token=True, checkpoint_path=str(path))
