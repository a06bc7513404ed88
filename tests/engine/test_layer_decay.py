"""Parameter groups for fine-tuning, against the rule worked out by hand and against timm's."""

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from timm.scheduler import CosineLRScheduler
from torch import nn

from violin_timm import add_violin
from violin_timm.engine.config import ConfigError
from violin_timm.engine.layer_decay import TOKENS, parameter_groups, plain_name

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=3, num_classes=5)
MODELS = {
    'violin_deit_tiny': dict(class_token=True),
    'violin_deit_tiny.gap': dict(fc_norm=True, curve_weights='learned'),
    'violin_deit3_small': {},
    'violin_dino_small': dict(num_classes=0),
    'deit_tiny_distilled_patch16_224': {},
    'vit_small_patch14_reg4_dinov2': {},
    'vit_base_patch16_clip_quickgelu_224': {},
    'vit_base_patch16_siglip_224': {},
}


def create(name='violin_deit_tiny', **kwargs):
    model = timm.create_model(name.split('.gap')[0], **{**SMALL, **MODELS[name], **kwargs})
    return model if name.startswith('violin') else add_violin(model)


def by_name(model, weight_decay=0.05, layer_decay=0.5, mask_lr_scale=1.0):
    """Plain name -> scale and weight decay."""
    groups = parameter_groups(model, weight_decay, layer_decay, mask_lr_scale)
    return {plain_name(n): (g['lr_scale'], g['weight_decay']) for g in groups for n in g['param_names']}


BY_HAND = {  # three blocks at layer decay 1/2: scale, weight decay
    'patch_embed.proj.weight': (1 / 16, 0.05),
    'patch_embed.proj.bias': (1 / 16, 0.0),
    'cls_token': (1 / 16, 0.05),
    'pos_embed': (1 / 16, 0.05),
    'blocks.0.attn.qkv.weight': (1 / 8, 0.05),
    'blocks.0.norm1.weight': (1 / 8, 0.0),
    'blocks.1.mlp.fc1.weight': (1 / 4, 0.05),
    'blocks.1.mlp.fc1.bias': (1 / 4, 0.0),
    'blocks.2.mlp.fc2.weight': (1 / 2, 0.05),
    'norm.weight': (1.0, 0.0),
    'head.weight': (1.0, 0.05),
    'head.bias': (1.0, 0.0),
    'blocks.0.attn.decay.beta': (3 / 8, 0.0),  # mask_lr_scale 3; no weight decay, though it has two dimensions
    'blocks.2.attn.decay.alpha': (3 / 2, 0.0),
}


@pytest.mark.parametrize('name', BY_HAND)
def test_three_blocks_by_hand(name):
    assert by_name(create(), mask_lr_scale=3.0)[name] == BY_HAND[name]
    assert create().blocks[0].attn.decay.beta.ndim == 2


@pytest.mark.parametrize('name', MODELS)
def test_is_timms_rule_but_for_what_is_documented(name):
    model = create(name)
    names = {id(p): n for n, p in model.named_parameters()}
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    timms = {names[id(p)]: (g['lr_scale'], g['weight_decay']) for g in groups for p in g['params']}
    for own_name, own in by_name(model).items():
        theirs = timms.pop(own_name)
        if own_name.startswith('norm.'):
            theirs = (1.0, theirs[1])
        if own_name in TOKENS:
            assert theirs[1] == 0.0
            theirs = (theirs[0], 0.05)
        if not model.num_classes and not own_name.startswith('norm.'):
            theirs = (theirs[0] / 2, theirs[1])
        assert own == theirs, own_name
    assert not timms


@pytest.mark.parametrize('name', MODELS)
def test_every_trainable_parameter_is_there_once_under_its_name(name):
    model = create(name)
    for parameter in [*model.blocks[1].mlp.parameters(), model.patch_embed.proj.weight]:
        parameter.requires_grad_(False)
    model = distributed(model)  # names are the wrapper's
    parameters = dict(model.named_parameters())
    found = []
    for group in parameter_groups(model, 0.05, 0.65):
        assert len(group['params']) == len(group['param_names'])
        for n, p in zip(group['param_names'], group['params'], strict=True):
            assert parameters[n] is p
            found.append(n)
    assert sorted(found) == sorted(n for n, p in parameters.items() if p.requires_grad)


@pytest.mark.parametrize('layer_decay', [None, 1, 1.0])
def test_without_layer_decay_all_scales_are_one(layer_decay):
    assert {scale for scale, _ in by_name(create(), layer_decay=layer_decay).values()} == {1.0}
    assert len(parameter_groups(create(), 0.05, layer_decay)) == 2


def test_frozen_blocks_do_not_shift_the_scales():
    model = create()
    expected = by_name(model)
    model.blocks[0].requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    found = by_name(model)
    assert found and all(expected[name] == value for name, value in found.items())
    assert not any(name.startswith(('blocks.0', 'blocks.2')) for name in found)


def distributed(model):
    """Named as `DistributedDataParallel` names, without a process group."""
    wrapper = nn.Module()
    wrapper.module = model
    return wrapper


def part_compiled(model):
    model.blocks[1].attn = torch.compile(model.blocks[1].attn)
    return model


WRAPPERS = {
    'module': distributed,
    'compiled': torch.compile,
    'compiled part': part_compiled,
    'compiled in module': lambda model: distributed(torch.compile(model)),
    'module in compiled': lambda model: torch.compile(distributed(model)),
}


@pytest.mark.parametrize('wrap', WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_are_seen_through(wrap):
    expected = by_name(create(), mask_lr_scale=3.0)
    wrapped = wrap(create())
    assert [n for n, _ in wrapped.named_parameters()] != [n for n, _ in create().named_parameters()]
    assert by_name(wrapped, mask_lr_scale=3.0) == expected


@pytest.mark.parametrize('wrap', [lambda m: m, distributed, torch.compile], ids=['bare', 'module', 'compiled'])
def test_adapters_have_the_scale_of_their_block(wrap):
    pytest.importorskip('peft')
    from violin_timm.peft import Adapter, add_adapters

    expected = by_name(create(), mask_lr_scale=3.0)
    found = by_name(wrap(add_adapters(create(), Adapter('dora', rank=2))), mask_lr_scale=3.0)
    adapters = {name: value for name, value in found.items() if '.lora_' in name}
    assert len(adapters) == 3 * 4 * 3
    for name, value in adapters.items():
        layer, kind = name.split('.lora_')
        scale = expected[f'{layer}.weight'][0]
        assert value == (scale, 0.0 if kind.startswith('magnitude') else 0.05), name
    rest = found.keys() - adapters.keys()
    assert {'head.weight', 'blocks.1.attn.decay.beta', 'blocks.0.attn.qkv.bias', 'norm.bias'} <= rest
    assert all(found[name] == expected[name] for name in rest)


@pytest.mark.parametrize(
    'name, plain',
    [
        ('blocks.0.attn.qkv.weight', 'blocks.0.attn.qkv.weight'),
        ('module._orig_mod.base_model.model.blocks.0.mlp.fc1.base_layer.bias', 'blocks.0.mlp.fc1.bias'),
        ('base_model.model.blocks.11.attn.qkv.lora_A.default.weight', 'blocks.11.attn.qkv.lora_A.weight'),
        ('base_model.model.head.modules_to_save.default.weight', 'head.weight'),
        ('blocks.0._orig_mod.attn.decay.beta', 'blocks.0.attn.decay.beta'),
    ],
)
def test_plain_names(name, plain):
    assert plain_name(name) == plain


@pytest.mark.parametrize('name', ['position_bias', 'rope.freqs', 'blocks_extra.weight', 'header.weight'])
def test_a_parameter_of_no_layer_is_refused(name):
    model = create()
    holder, _, leaf = name.rpartition('.')
    if holder:
        model.add_module(holder, nn.Module())
    parameter = nn.Parameter(torch.zeros(2, 2))
    model.get_submodule(holder).register_parameter(leaf, parameter)
    with pytest.raises(ConfigError, match=f"got parameter '{name}', which has no layer; allowed are blocks.<i>"):
        parameter_groups(model, 0.05, None)
    parameter.requires_grad_(False)
    assert name not in by_name(model)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigError, match=r'got a model without blocks\.<i>'):
        parameter_groups(nn.Sequential(nn.Linear(2, 2)), 0.05, 0.65)


@pytest.mark.parametrize(
    'settings, message',
    [
        (dict(layer_decay=0), 'layer_decay: got 0; expected a number above 0 and at most 1'),
        (dict(layer_decay=1.01), 'layer_decay: got 1.01'),
        (dict(layer_decay=-0.5), 'layer_decay: got -0.5'),
        (dict(layer_decay=float('nan')), 'layer_decay: got nan'),
        (dict(weight_decay=-0.1), 'weight_decay: got -0.1'),
        (dict(weight_decay=float('inf')), 'weight_decay: got inf'),
        (dict(mask_lr_scale=-1.0), 'mask_lr_scale: got -1.0'),
        (dict(mask_lr_scale=float('nan')), 'mask_lr_scale: got nan'),
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        parameter_groups(create(), **{'weight_decay': 0.05, 'layer_decay': 0.65, **settings})


def test_scales_take_effect_through_timms_scheduler():
    """AdamW's first step moves every weight with a gradient by its learning rate."""
    model = create()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.0, 0.5, mask_lr_scale=0.0), lr=1e-2)
    scheduler = CosineLRScheduler(optimizer, t_initial=10, t_in_epochs=False)
    for updates in (0, 5):  # at half of the cosine, half of the rate
        scheduler.step_update(updates)
        for group in optimizer.param_groups:
            assert group['lr'] == pytest.approx((1e-2 if updates == 0 else 5e-3) * group['lr_scale'])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moved = {n: (before[n] - p).detach() for n, p in model.named_parameters()}
    scales = {'patch_embed.proj.weight': 1 / 16, 'blocks.0.attn.qkv.weight': 1 / 8, 'blocks.2.attn.qkv.weight': 1 / 2}
    for name, scale in (scales | {'norm.weight': 1.0, 'head.weight': 1.0, 'blocks.1.attn.decay.beta': 0.0}).items():
        assert moved[name] == pytest.approx(torch.full_like(moved[name], 5e-3 * scale), rel=1e-3, abs=1e-7), name
