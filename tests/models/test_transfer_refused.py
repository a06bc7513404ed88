"""Checkpoints whose backbone or masks do not fit a model to be fine-tuned: refused, with the model left as it was."""

import argparse

import pytest
import timm
import torch
from torch import nn

from violin_timm import add_violin
from violin_timm.models.transfer import MASKS, load_backbone

TINY = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2)


def violin(num_classes=5, seed=2, **kwargs):
    torch.manual_seed(seed)
    return timm.create_model('violin_deit_tiny', **{**TINY, 'class_token': True, **kwargs}, num_classes=num_classes)


def plain(name):
    return timm.create_model(name, **TINY, num_classes=10)


def state_of(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def refused(model, checkpoint, masks, error, message):
    before = state_of(model)
    inits = [block.attn.decay and block.attn.decay.settings for block in model.blocks]
    with pytest.raises(error, match=message):
        load_backbone(model, checkpoint, masks)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert inits == [block.attn.decay and block.attn.decay.settings for block in model.blocks]


def test_unknown_choice():
    refused(violin(), violin().state_dict(), 'kept', ValueError, "masks: got 'kept'; choose from fresh, carried")


@pytest.mark.parametrize('wrap', [lambda model: plain('deit_tiny_patch16_224'), nn.DataParallel])
def test_model_that_is_no_bare_violin(wrap):
    with pytest.raises(ValueError, match=r'model: got \w+; a bare Violin is needed'):
        load_backbone(wrap(violin()), violin().state_dict())


@pytest.mark.parametrize(
    'source, arm, lacking',
    [
        (dict(mask='none', alpha='none'), {}, ('4', '4', 'alpha')),
        (dict(mask='none'), {}, ('2', '4', 'beta')),
        (dict(alpha='none'), dict(mask='none'), ('2', '2', 'alpha')),
        ({}, dict(curve_weights='learned'), ('2', '6', 'curve_logits')),
    ],
    ids=str,
)
def test_masks_that_the_file_lacks_are_not_carried(source, arm, lacking):
    count, total, kind = lacking
    message = (
        rf"masks: got 'carried', but the checkpoint lacks {count} of the model's {total} mask parameters: "
        rf"blocks\.0\.attn\.decay\.{kind}, .*masks='fresh' draws new ones"
    )
    refused(violin(**arm), violin(seed=7, **source).state_dict(), 'carried', ValueError, message)
    load_backbone(violin(**arm), violin(seed=7, **source).state_dict())


def test_masks_of_some_layers_only_are_not_carried():
    state = state_of(violin(seed=7))
    del state['blocks.1.attn.decay.beta']
    refused(violin(), state, 'carried', ValueError, r'lacks 1 of the model.s 4 mask parameters: blocks\.1\.attn')


def test_learned_weights_of_curves_are_not_left_behind():
    state = violin(seed=7, curve_weights='learned').state_dict()
    refused(violin(), state, 'carried', ValueError, "curve_weights: got 'mean'.*pass curve_weights='learned'")
    load_backbone(violin(), state)


FEW = 'snake,hilbert'
RECORDED = [
    (dict(curves=FEW), dict(curves='zigzag,peano'), 'curves: got zigzag, peano.*checkpoint are snake, hilbert'),
    (dict(curves=FEW), dict(curves='hilbert,snake'), 'curves: got hilbert, snake.*checkpoint are snake, hilbert'),
    (dict(geometry='manhattan'), dict(curves='snake'), 'curves: got snake.*checkpoint are manhattan'),
    ({}, dict(geometry='random'), 'curves: got random0, random1.*checkpoint are snake, snake_T'),
    (dict(geometry='random'), dict(geometry='random', random_seed=4), 'curves: got random4.*checkpoint are random0'),
]


@pytest.mark.parametrize('args', [dict, lambda **kwargs: argparse.Namespace(**kwargs)], ids=['dict', 'namespace'])
@pytest.mark.parametrize('source, arm, message', RECORDED, ids=str)
def test_curves_that_the_file_records_are_compared(source, arm, message, args):
    state = violin(seed=7, **source).state_dict()
    checkpoint = {'state_dict': state, 'args': args(model='violin_deit_tiny', model_kwargs=source)}
    refused(violin(**arm), checkpoint, 'carried', ValueError, message)
    load_backbone(violin(**arm), checkpoint)
    model = violin(**source)
    load_backbone(model, checkpoint, 'carried')
    assert torch.equal(model.blocks[0].attn.decay.beta, state['blocks.0.attn.decay.beta'])


def test_another_number_of_curves_is_seen_without_a_record():
    message = r'curves: got snake, hilbert.*decay\.beta is \[3, 2\].*is \[3, 8\]'
    refused(violin(curves=FEW), violin(seed=7).state_dict(), 'carried', ValueError, message)


JUNK = {
    'other model': {'conv1.weight': torch.ones(2, 3, 3, 3), 'fc.bias': torch.ones(4)},
    'empty': {},
    'only a head': {'head.weight': torch.ones(10, 48), 'head.bias': torch.ones(10)},
    'no tensors': {'epoch': 3},
}


@pytest.mark.parametrize('masks', MASKS)
@pytest.mark.parametrize('junk', JUNK)
@pytest.mark.parametrize(
    'make', [violin, lambda: add_violin(plain('vit_small_patch14_reg4_dinov2'))], ids=['ours', 'extended']
)
def test_junk(make, junk, masks):
    refused(make(), JUNK[junk], masks, (RuntimeError, ValueError), 'checkpoint does not fit|has no class token')


@pytest.mark.parametrize('masks', MASKS)
@pytest.mark.parametrize(
    'kwargs, error, message',
    [
        (dict(depth=1), RuntimeError, r'missing: blocks\.1\.'),
        (dict(depth=3), RuntimeError, r'left over: blocks\.2\.'),
        (dict(reg_tokens=2), RuntimeError, 'left over: reg_token'),
        (dict(embed_dim=24), RuntimeError, r'size mismatch: .*: got \[.*24.*the model has \[.*48'),
        (dict(class_token=False), ValueError, r'class_token: got True.*pass class_token=False'),
    ],
    ids=str,
)
def test_backbone_that_does_not_fit(kwargs, error, message, masks):
    refused(violin(), violin(seed=7, **kwargs).state_dict(), masks, error, message)


def test_position_embedding_of_a_rectangle_that_timm_cannot_resample():
    state = violin(seed=7, img_size=(16, 40)).state_dict()
    refused(violin(), state, 'fresh', RuntimeError, 'checkpoint does not fit .*: position embedding: ')


def test_distilled_weights_need_a_distilled_model():
    state = plain('deit_tiny_distilled_patch16_224').state_dict()
    refused(add_violin(plain('deit_tiny_patch16_224')), state, 'fresh', RuntimeError, 'left over: dist_token')
    state = plain('deit_tiny_patch16_224').state_dict()
    refused(add_violin(plain('deit_tiny_distilled_patch16_224')), state, 'fresh', RuntimeError, 'missing: dist_token')
