"""A checkpoint's backbone into a model that is to be fine-tuned, with fresh masks and with carried ones."""

import argparse
import logging

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.layers import LayerScale
from timm.models.vision_transformer import checkpoint_filter_fn as timm_filter_fn

from violin_timm import add_violin
from violin_timm.geometry import DEFAULT_CURVES
from violin_timm.models import files
from violin_timm.models.authors import AUTHORS_CURVES, to_native
from violin_timm.models.transfer import MASKS, load_backbone

TINY = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2)
NO_CHANGE = dict(alpha_std=0.0)  # with the fine-tuning beta: within 1e-4 of the plain model
PLUGGED = [
    'deit_tiny_patch16_224',
    'deit3_small_patch16_224',
    'vit_small_patch14_dinov2',
    'vit_small_patch14_reg4_dinov2',
    'deit_tiny_distilled_patch16_224',
    'vit_base_patch16_clip_quickgelu_224',
    'vit_base_patch16_siglip_224',
    'vit_base_patch16_gap_224',
]
REGISTERED = {'violin_deit_tiny': 'deit_tiny_patch16_224', 'violin_deit3_small': 'deit3_small_patch16_224'}


def plain_model(name, num_classes=10, **kwargs):
    """A model of timm's own with random weights under which attention matters, LayerScale included."""
    torch.manual_seed(1)
    model = timm.create_model(name, **{**TINY, **kwargs}, num_classes=num_classes)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LayerScale):
                module.gamma.fill_(1.0)
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def violin(num_classes=5, seed=2, name='violin_deit_tiny', **kwargs):
    torch.manual_seed(seed)
    return timm.create_model(name, **{**TINY, 'class_token': True, **kwargs}, num_classes=num_classes).eval()


def plugged(name, num_classes=10, settings=NO_CHANGE, **kwargs):
    torch.manual_seed(2)
    model = timm.create_model(name, **{**TINY, **kwargs}, num_classes=num_classes)
    return add_violin(model, **settings).eval()


def image(size=(32, 32)):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(4))


def state_of(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def is_head(key):
    return key.startswith(('head.', 'head_dist.'))


def is_mask(key):
    return '.decay.' in key


def assert_within(actual, expected, tolerance=1e-4):
    assert (actual - expected).abs().max() < tolerance * expected.abs().max()


def copy_head(model, source):
    model.load_state_dict({k: v for k, v in source.state_dict().items() if is_head(k)}, strict=False)


def assert_loaded(model, before, state, masks):
    """Every key is from the file, but for a classifier, and masks that are fresh, which are as before."""
    for key, value in model.state_dict().items():
        kept = is_head(key) or (is_mask(key) and masks == 'fresh')
        assert torch.equal(value, before[key] if kept else state[key]), key


# --- plain weights


@pytest.mark.parametrize('name', PLUGGED)
def test_plain_weights_into_an_extended_model(name):
    source, model = plain_model(name), plugged(name)
    before, state = state_of(model), state_of(source)
    load_backbone(model, source.state_dict())
    assert_loaded(model, before, state, 'fresh')
    assert (model(image()) - source(image())).abs().max() > 1e-2
    copy_head(model, source)
    assert_within(model(image()), source(image()))
    assert all(torch.equal(source.state_dict()[key], value) for key, value in state.items())


@pytest.mark.parametrize('name', REGISTERED)
def test_plain_weights_into_a_registered_model(name):
    source = plain_model(REGISTERED[name])
    model = violin(10, name=name, **NO_CHANGE)
    assert all((block.attn.decay.beta < 10).all() for block in model.blocks)
    load_backbone(model, {'model': source.state_dict()})
    for block in model.blocks:  # built with none, so as for fine-tuning
        assert (block.attn.decay.beta >= 15).all() and (block.attn.decay.alpha == 1).all()
        assert block.attn.decay.settings.mask_init == 'finetune'
    copy_head(model, source)
    assert_within(model(image()), source(image()))


@pytest.mark.parametrize(
    'given, low, high', [(dict(mask_init='pretrain'), 5, 9), (dict(beta_range=(1, 2)), 1, 2)], ids=str
)
def test_fresh_masks_are_those_the_model_was_built_for(given, low, high):
    model = violin(**given)
    load_backbone(model, violin(seed=7, mask_init='finetune').state_dict())
    assert all((block.attn.decay.beta >= low).all() for block in model.blocks)
    assert all((block.attn.decay.beta <= high).all() for block in model.blocks)


def test_fresh_masks_of_one_seed_are_those_of_a_model_built_for_fine_tuning():
    source = plain_model('deit_tiny_patch16_224')
    model = violin(seed=3)
    load_backbone(model, source.state_dict())
    for block, other in zip(model.blocks, violin(seed=3, mask_init='finetune').blocks, strict=True):
        assert torch.equal(block.attn.decay.beta, other.attn.decay.beta)
        assert torch.equal(block.attn.decay.alpha, other.attn.decay.alpha)


@pytest.mark.parametrize('size', [(48, 48), (16, 40)])
@pytest.mark.parametrize('name', PLUGGED)
def test_other_resolution(name, size):
    source = plain_model(name)
    plain = plain_model(name, img_size=size)
    plain.load_state_dict(timm_filter_fn(state_of(source), plain))
    model = plugged(name, img_size=size)
    load_backbone(model, source.state_dict())
    assert torch.equal(model.pos_embed, plain.pos_embed)
    copy_head(model, plain)
    assert_within(model(image(size)), plain(image(size)))


def test_dinov2_layout_with_registers():
    """As published: register_tokens, mask_token, and one more position, which timm adds to the class token."""
    source = plain_model('vit_small_patch14_reg4_dinov2', num_classes=0)
    state = state_of(source)
    theirs = {k: v for k, v in state.items() if k not in ('reg_token', 'cls_token', 'pos_embed')}
    theirs['register_tokens'], theirs['mask_token'] = state['reg_token'], torch.ones(1, 48)
    theirs['cls_token'] = state['cls_token'] - 1
    theirs['pos_embed'] = torch.cat([torch.ones(1, 1, 48), state['pos_embed']], dim=1)
    keys = list(theirs)
    model = plugged('vit_small_patch14_reg4_dinov2', num_classes=0)
    load_backbone(model, theirs)
    assert_within(model(image()), source(image()))
    assert list(theirs) == keys


def test_openai_clip_layout():
    source = plain_model('vit_base_patch16_clip_quickgelu_224', patch_size=16, img_size=64)
    names = {
        'cls_token': 'class_embedding',
        'pos_embed': 'positional_embedding',
        'patch_embed.proj': 'conv1',
        'norm_pre': 'ln_pre',
        'attn.qkv.': 'attn.in_proj_',
        'attn.proj': 'attn.out_proj',
        'mlp.fc1': 'mlp.c_fc',
        'mlp.fc2': 'mlp.c_proj',
        '.norm1': '.ln_1',
        '.norm2': '.ln_2',
        'blocks.': 'transformer.resblocks.',
    }
    theirs = {'positional_embedding': torch.ones(3, 3), 'visual.proj': torch.ones(48, 10)}  # one of the text tower
    for key, value in source.state_dict().items():
        if is_head(key):
            continue
        key = key.replace('norm.', 'ln_post.') if key.startswith('norm.') else key
        for ours, name in names.items():
            key = key.replace(ours, name)
        theirs[f'visual.{key}'] = value.squeeze(0).squeeze(0) if 'embedding' in key else value
    model = plugged('vit_base_patch16_clip_quickgelu_224', patch_size=16, img_size=64)
    load_backbone(model, theirs)
    copy_head(model, source)
    assert_within(model(image((64, 64))), source(image((64, 64))))


# --- weights of a Violin


@pytest.mark.parametrize('num_classes', [10, 5, 0])
@pytest.mark.parametrize('masks', MASKS)
def test_trained_violin(masks, num_classes):
    """Fresh differs from carried in the decay parameters alone."""
    source = violin(10, seed=7)
    model = violin(num_classes, mask_init='finetune')
    before = state_of(model)
    load_backbone(model, {'state_dict': source.state_dict()}, masks)
    assert_loaded(model, before, source.state_dict(), masks)
    same = [torch.equal(v, source.state_dict()[k]) for k, v in model.state_dict().items() if is_mask(k)]
    assert all(same) if masks == 'carried' else not any(same)
    if masks == 'carried' and num_classes == 10:
        copy_head(model, source)
        assert torch.equal(model(image()), source(image()))


@pytest.mark.parametrize('masks', MASKS)
def test_checkpoint_of_our_dino_gives_the_teacher(masks):
    student, teacher = violin(0, seed=7).state_dict(), violin(0, seed=8).state_dict()
    model = violin()
    before = state_of(violin(mask_init='finetune'))
    load_backbone(model, {'state_dict': student, 'state_dict_ema': teacher, 'student_head': {}, 'epoch': 3}, masks)
    assert_loaded(model, before, teacher, masks)
    for block in model.blocks:
        assert block.attn.decay.settings.mask_init == (None if masks == 'carried' else 'finetune')


@pytest.mark.parametrize('masks', MASKS)
@pytest.mark.parametrize(
    'arm, kinds',
    [
        (dict(mask='none', alpha='none'), ()),
        (dict(mask='none'), ('alpha',)),
        (dict(alpha='none'), ('beta',)),
    ],
    ids=str,
)
def test_arms_without_masks_drop_them(arm, kinds, masks, caplog):
    source = violin(seed=7).state_dict()
    model = violin(**arm)
    with caplog.at_level(logging.INFO, 'violin_timm'):
        load_backbone(model, source, masks)
    state = model.state_dict()
    assert {k.rpartition('.')[2] for k in state if is_mask(k)} == set(kinds)
    assert all(torch.equal(state[k], source[k]) == (masks == 'carried') for k in state if is_mask(k))
    assert all(torch.equal(state[k], source[k]) for k in state if not is_mask(k) and not is_head(k))
    dropped = 4 if masks == 'fresh' else 4 - 2 * len(kinds)
    (message,) = (record.getMessage() for record in caplog.records if 'Dropped' in record.getMessage())
    assert message.startswith(f'Dropped {dropped} mask parameters of the checkpoint: blocks.0.attn.decay.')


@pytest.mark.parametrize('settings', [dict(mask='fixed'), dict(curve_weights='learned')], ids=str)
def test_other_kinds_of_masks_are_carried(settings):
    source = violin(seed=7, **settings)
    with torch.no_grad():
        for key, value in source.state_dict().items():
            value += torch.randn_like(value) if is_mask(key) else 0
    model = violin(**settings)
    before = state_of(model)
    load_backbone(model, source.state_dict(), 'carried')
    assert_loaded(model, before, source.state_dict(), 'carried')


@pytest.mark.parametrize('masks', MASKS)
def test_file_of_a_fine_tuned_model_with_registers(masks, tmp_path):
    source = plugged('vit_small_patch14_reg4_dinov2', settings=dict(mask_init='pretrain'))
    torch.save({'state_dict': source.state_dict()}, tmp_path / 'model.pth')
    model = plugged('vit_small_patch14_reg4_dinov2', num_classes=4)
    before = state_of(model)
    load_backbone(model, files.read_checkpoint(tmp_path / 'model.pth'), masks)
    assert_loaded(model, before, source.state_dict(), masks)


def test_class_token_weights_into_gap():
    source = violin(seed=7).state_dict()
    model = violin(class_token=False)
    load_backbone(model, source, 'carried')
    assert model.cls_token is None and torch.equal(model.pos_embed, source['pos_embed'][:, 1:])
    assert torch.equal(model.blocks[1].attn.decay.beta, source['blocks.1.attn.decay.beta'])


# --- the authors' layout


@pytest.fixture(scope='module')
def authors(golden):
    prefix = 'cls=1|pos=1/param/'
    recorded = load_file(golden('deit_model_authors.safetensors'))
    return {k.removeprefix(prefix): v for k, v in recorded.items() if k.startswith(prefix)}


@pytest.mark.parametrize('curves', [DEFAULT_CURVES, AUTHORS_CURVES], ids=['default', 'shuffled'])
@pytest.mark.parametrize('masks', MASKS)
def test_authors_weights(masks, curves, authors):
    model = violin(norm_layer=None, mask_init='finetune', curves=curves)
    before = state_of(model)
    theirs = {f'module.backbone.{k}': v for k, v in authors.items()}
    load_backbone(model, {'teacher': theirs, 'args': argparse.Namespace(model='violin_tiny')}, masks)
    assert_loaded(model, before, to_native(authors, curves), masks)


@pytest.mark.parametrize('arm', [dict(curves='snake'), dict(mask='none'), dict(geometry='manhattan')], ids=str)
def test_authors_weights_with_fresh_masks_of_any_kind(arm, authors):
    model = violin(**arm, mask_init='finetune')
    before = state_of(model)
    load_backbone(model, authors)
    assert_loaded(model, before, authors, 'fresh')


def test_authors_alpha_alone(authors):
    model = violin(mask='none')
    load_backbone(model, authors, 'carried')
    assert torch.equal(model.blocks[1].attn.decay.alpha, authors['blocks.1.attn.normalize'])


def test_authors_masks_of_other_curves_are_not_carried(authors):
    with pytest.raises(ValueError, match='curves: got snake; the file has masks of snake, snake_T'):
        load_backbone(violin(curves='snake'), authors, 'carried')
