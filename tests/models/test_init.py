"""Initialisation: paired backbones, a stream of their own for masks, and no weight decay on them."""

import math

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2

import violin_timm  # noqa: F401
from violin_timm.attention import Decay
from violin_timm.settings import MaskSettings

TINY = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=3, num_classes=10)
VARIANTS = ['violin_deit_tiny', 'violin_deit3_small', 'violin_dino_small', 'violin_pixel_tiny']
ARMS = [
    dict(),
    dict(mask='none'),
    dict(alpha='none'),
    dict(mask='fixed'),
    dict(mask_init='finetune'),
    dict(mask_init='none'),
    dict(geometry='manhattan'),
    dict(curves='snake'),
    dict(strategy='add_v1'),
    dict(curve_weights='learned'),
    dict(alpha_std=0.0),
]


def create(variant='violin_deit_tiny', seed=7, **kwargs):
    torch.manual_seed(seed)
    return timm.create_model(variant, **{**TINY, **kwargs})


def backbone(model):
    return {k: v for k, v in model.state_dict().items() if '.decay.' not in k}


def masks(model):
    return {k: v.clone() for k, v in model.state_dict().items() if '.decay.' in k}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize('kwargs', ARMS, ids=str)
@pytest.mark.parametrize('variant', VARIANTS)
def test_backbone_and_global_stream_do_not_depend_on_the_mask(variant, kwargs):
    plain = create(variant, mask='none', alpha='none')
    after = torch.rand(4)
    model = create(variant, **kwargs)
    assert torch.equal(torch.rand(4), after)
    assert masks(model)
    assert_same(backbone(model), backbone(plain))


@pytest.mark.parametrize(
    'variant, plain', [('violin_deit_tiny', 'deit_tiny_patch16_224'), ('violin_deit3_small', 'deit3_small_patch16_224')]
)
def test_backbone_starts_as_timms(variant, plain):
    ours = create(variant, class_token=True)
    torch.manual_seed(7)
    assert_same(backbone(ours), timm.create_model(plain, **TINY).state_dict())


def test_numpy_and_python_streams_are_left_alone():
    import random

    import numpy as np

    random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1), np.random.seed(1)
    create()(torch.randn(1, 3, 32, 32))
    create(geometry='random')(torch.randn(1, 3, 32, 32))
    assert (random.random(), np.random.rand()) == expected


def test_arms_with_a_common_parameter_start_with_the_same_values():
    both, mask_only, alpha_only = create(), create(alpha='none'), create(mask='none')
    for block, other, third in zip(both.blocks, mask_only.blocks, alpha_only.blocks, strict=True):
        assert torch.equal(block.attn.decay.beta, other.attn.decay.beta)
        assert torch.equal(block.attn.decay.alpha, third.attn.decay.alpha)


def test_seeds_layers_and_parameters_have_streams_of_their_own():
    values = [tuple(v.flatten().tolist()) for seed in (7, 8, 2**40) for v in masks(create(seed=seed)).values()]
    assert len(values) == 3 * 3 * 2
    assert len(set(values)) == len(values)
    everything = [x for value in values for x in value]
    assert len(set(everything)) == len(everything)
    assert_same(masks(create(seed=7)), masks(create(seed=7)))


@pytest.mark.parametrize('kwargs', ARMS, ids=str)
def test_reset_parameters_draws_the_same_again(kwargs):
    model = create(**kwargs)
    expected = masks(model)
    torch.rand(100)
    for block in model.blocks:
        for value in block.attn.decay.state_dict().values():
            value.fill_(-3.0)
        before = torch.get_rng_state()
        block.attn.decay.reset_parameters()
        assert torch.equal(torch.get_rng_state(), before)
    assert_same(masks(model), expected)


@pytest.mark.parametrize('mode', ['', 'jax', 'moco', 'reset'])
def test_init_weights_starts_masks_anew(mode):
    model, plain = create(), create(mask='none', alpha='none')
    expected = masks(model)
    for value in model.state_dict().values():
        value.fill_(-3.0)
    torch.manual_seed(7)
    model.init_weights(mode)
    torch.manual_seed(7)
    plain.init_weights(mode)
    assert_same(masks(model), expected)
    assert_same(backbone(model), backbone(plain))


def test_init_weights_after_the_meta_device():
    with torch.device('meta'):
        model = timm.create_model('violin_deit_tiny', **TINY, mask='fixed')
    model.to_empty(device='cpu')
    torch.manual_seed(7)
    model.init_weights()
    assert_same(masks(model), masks(create(mask='fixed')))


def test_reset_classifier_leaves_masks_alone():
    model = create()
    expected = masks(model)
    model.reset_classifier(3)
    assert_same(masks(model), expected)


# --- distributions


def draws(**settings):
    torch.manual_seed(0)
    decay = Decay(4000, MaskSettings(**settings))
    return decay.beta.detach(), decay.alpha.detach()


def assert_uniform(value, low, high):
    assert low <= value.min() and value.max() <= high
    assert value.min() < low + 0.01 * (high - low) and value.max() > high - 0.01 * (high - low)
    assert abs(value.mean() - (low + high) / 2) < 0.02 * (high - low)
    assert abs(value.std() - (high - low) / math.sqrt(12)) < 0.02 * (high - low)


def assert_normal(value, mean, std):
    assert abs(value.mean() - mean) < 0.06 * std
    assert abs(value.std() - std) < 0.06 * std
    assert 0.65 < ((value - mean).abs() < std).float().mean() < 0.72


@pytest.mark.parametrize(
    'settings, beta, alpha',
    [
        ({}, (5, 9), (0, 0.5)),
        (dict(mask_init='pretrain'), (5, 9), (0, 0.5)),
        (dict(mask_init='finetune'), (15, 20), (1, 0.01)),
        (dict(beta_range=(-2, 1), alpha_mean=3.0, alpha_std=2.0), (-2, 1), (3, 2)),
        (dict(mask_init='finetune', beta_range=(10, 11), alpha_std=0.1), (10, 11), (1, 0.1)),
    ],
    ids=str,
)
def test_uniform_beta_and_normal_alpha(settings, beta, alpha):
    values = draws(**settings)
    assert_uniform(values[0], *beta)
    assert_normal(values[1], *alpha)


def test_no_initialisation_of_the_ablation():
    beta, alpha = draws(mask_init='none')
    assert_normal(beta, 0, 0.5)
    assert_normal(alpha, 0, 0.5)
    assert_normal(draws(mask_init='none', beta_std=2.0)[0], 0, 2)


def test_deviation_zero_is_the_mean_exactly():
    assert (draws(mask_init='finetune', alpha_std=0.0)[1] == 1).all()
    assert (draws(beta_range=(6, 6))[0] == 6).all()


@pytest.mark.parametrize('gamma', [0.9996, 0.996, 0.5])
def test_fixed_gamma(gamma):
    beta, alpha = draws(mask='fixed', gamma=gamma)
    torch.testing.assert_close(torch.sigmoid(beta.double()), torch.full(beta.shape, gamma).double(), rtol=0, atol=1e-7)
    assert_normal(alpha, 0, 0.5)
    assert draws(mask='fixed')[0].sigmoid()[0, 0] == pytest.approx(0.9996)


def test_paper_range_of_pretraining_keeps_the_mask_above_a_quarter():
    """U(5, 9) is gamma in (0.9933, 0.9999), and at least 0.27 at 196 tokens."""
    beta = draws()[0].double()
    assert beta.sigmoid().min() > 0.9933 and beta.sigmoid().max() < 0.9999
    assert (beta.sigmoid() ** 195).min() > 0.26


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_draws_in_another_dtype_are_the_rounded_ones(dtype):
    settings = MaskSettings(mask_init='finetune')
    torch.manual_seed(0)
    single, other = Decay(3, settings), Decay(3, settings, dtype=dtype)
    assert other.beta.dtype == dtype
    assert torch.equal(other.beta, single.beta.to(dtype))
    assert torch.equal(other.alpha, single.alpha.to(dtype))


# --- weight decay


@pytest.mark.parametrize('opt', ['adamw', 'sgd', 'lamb'])
@pytest.mark.parametrize(
    'kwargs', [dict(), dict(curve_weights='learned'), dict(mask='none'), dict(mask='fixed')], ids=str
)
def test_timms_optimiser_decays_no_mask_parameter(kwargs, opt):
    model = create(class_token=True, **kwargs)
    groups = create_optimizer_v2(model, opt=opt, lr=1e-3, weight_decay=0.05).param_groups
    decayed = {id(p) for group in groups if group['weight_decay'] for p in group['params']}
    everything = {id(p) for group in groups for p in group['params']}
    named = dict(model.named_parameters())
    assert everything == {id(p) for p in named.values()}
    for name, parameter in named.items():
        plain = parameter.ndim > 1 and name not in ('pos_embed', 'cls_token') and '.decay.' not in name
        assert (id(parameter) in decayed) == plain, name
    assert any('.decay.' in name for name in named)


def test_layer_decay_puts_masks_with_their_block():
    model = create(curve_weights='learned', class_token=True)
    groups = create_optimizer_v2(model, opt='adamw', lr=1.0, weight_decay=0.05, layer_decay=0.5).param_groups
    scale = {id(p): (group['lr_scale'], group['weight_decay']) for group in groups for p in group['params']}
    for layer, block in enumerate(model.blocks):
        expected = scale[id(block.attn.qkv.weight)][0]
        assert expected == pytest.approx(0.5 ** (len(model.blocks) - layer))
        for parameter in block.attn.decay.parameters():
            assert scale[id(parameter)] == (expected, 0.0)


def test_no_weight_decay_still_names_timms_own():
    names = create(class_token=True).no_weight_decay()
    assert {'pos_embed', 'cls_token'} <= names and '*.decay.*' in names
