"""How far masks moved, against the formula pair by pair; and models that are wrapped, arms that lack parameters."""

import math

import pytest
import timm
import torch
from torch import nn

import violin_timm
from violin_timm.curves import curve_order
from violin_timm.engine.config import ConfigError
from violin_timm.evals import movement as module
from violin_timm.evals.movement import COLUMNS, movement, snapshot, summary
from violin_timm.geometry import DEFAULT_CURVES

GRID = (3, 4)
TINY = dict(img_size=(24, 32), patch_size=8, embed_dim=48, num_heads=3, depth=2, num_classes=5)
MASK = {key for key in COLUMNS if key.startswith(('mask', 'beta'))}
ALPHA = {key for key in COLUMNS if key.startswith('alpha')}
ARMS = {
    'default': ({}, DEFAULT_CURVES, MASK | ALPHA),
    'fine-tuning': (dict(mask_init='finetune'), DEFAULT_CURVES, MASK | ALPHA),
    'one curve': (dict(curves='hilbert_T'), ('hilbert_T',), MASK | ALPHA),
    'two curves': (dict(curves='zigzag,peano'), ('zigzag', 'peano'), MASK | ALPHA),
    'random': (dict(geometry='random', num_random=2), ('random0', 'random1'), MASK | ALPHA),
    'manhattan': (dict(geometry='manhattan'), ('manhattan',), MASK | ALPHA),
    'weighted': (dict(curve_weights='learned', curves='snake,raster'), ('snake', 'raster'), MASK | ALPHA),
    'fixed': (dict(mask='fixed'), DEFAULT_CURVES, MASK | ALPHA),
    'strategy': (dict(strategy='add_v1'), DEFAULT_CURVES, MASK | ALPHA),
    'mask alone': (dict(alpha='none'), DEFAULT_CURVES, MASK),
    'alpha alone': (dict(mask='none'), (), ALPHA),
    'plain': (dict(mask='none', alpha='none'), (), set()),
}


def create(class_token=False, **settings):
    return timm.create_model('violin_deit_tiny', **{**TINY, 'class_token': class_token, **settings})


def train(model):
    """Other values of everything that decays."""
    with torch.no_grad():
        for block in model.blocks:
            for name in ('beta', 'alpha', 'curve_logits'):
                value = getattr(block.attn.decay, name, None)
                if value is not None:
                    value.add_(0.7 * torch.randn_like(value))
    return model


def distance(name, i, j, grid=GRID):
    if name == 'manhattan':
        return abs(i // grid[1] - j // grid[1]) + abs(i % grid[1] - j % grid[1])
    order = curve_order(name, *grid).tolist()
    return abs(order.index(i) - order.index(j))


def deviations(layer, names):
    """1 - M for every head and pair of patches, from gamma = 1 / (1 + exp(-beta))."""
    beta, logits = layer['beta'].tolist(), layer.get('curve_logits')
    weights = torch.full(layer['beta'].shape, 1 / len(names)) if logits is None else logits.softmax(1)
    patches = range(GRID[0] * GRID[1])
    distances = {(c, i, j): distance(name, i, j) for c, name in enumerate(names) for i in patches for j in patches}
    return [
        sum(
            float(weights[h, c]) * (1 - (1 / (1 + math.exp(-beta[h][c]))) ** distances[c, i, j])
            for c in range(len(names))
        )
        for h in range(len(beta))
        for i in patches
        for j in patches
        if i != j
    ]


def mean(values):
    return sum(values) / len(values)


def expected(old, new, names):
    result = {}
    if names:
        before, after = deviations(old, names), deviations(new, names)
        result['mask_before'], result['mask_before_max'] = mean(before), max(before)
        result['mask_after'], result['mask_after_max'] = mean(after), max(after)
        result['mask_change'] = mean([abs(a - b) for a, b in zip(after, before, strict=True)])
        betas = [abs(a - b) for a, b in zip(new['beta'].flatten().tolist(), old['beta'].flatten().tolist())]
        result['beta_change'], result['beta_change_max'] = mean(betas), max(betas)
    if 'alpha' in new:
        a, b = old['alpha'].tolist(), new['alpha'].tolist()
        result['alpha_before'], result['alpha_after'] = mean([abs(x - 1) for x in a]), mean([abs(x - 1) for x in b])
        result['alpha_after_max'] = max(abs(x - 1) for x in b)
        result['alpha_change'] = mean([abs(x - y) for x, y in zip(a, b, strict=True)])
    return result


@pytest.mark.parametrize('class_token', [False, True])
@pytest.mark.parametrize('arm', ARMS)
def test_numbers_are_those_of_the_formula(arm, class_token):
    settings, names, keys = ARMS[arm]
    model = create(class_token, **settings)
    before = snapshot(model)
    layers = movement(train(model), before)
    after = snapshot(model)
    assert len(layers) == 2
    for layer, old, new in zip(layers, before, after, strict=True):
        assert layer.keys() == keys
        assert layer == pytest.approx(expected(old, new, names), rel=1e-5, abs=1e-15)
        assert all(value > 0 for value in layer.values())


def test_pairs_in_pieces_are_all_the_pairs(monkeypatch):
    model = create()
    before = snapshot(model)
    whole = movement(train(model), before)
    monkeypatch.setattr(module, 'CHUNK_PAIRS', 7)  # of 66
    for pieces, at_once in zip(movement(model, before), whole, strict=True):
        assert pieces == pytest.approx(at_once, rel=1e-12)


@pytest.mark.parametrize('arm', ARMS)
def test_untouched_model_has_not_moved(arm):
    model = create(**ARMS[arm][0])
    for layer in movement(model, snapshot(model)):
        assert all(layer[key] == 0 for key in layer if 'change' in key)
        for key in ('mask', 'alpha'):
            assert layer.get(f'{key}_before') == layer.get(f'{key}_after')


def test_mask_of_almost_all_ones_is_not_zero():
    """What float32 would round: 1 - sigmoid(20) is 2.06e-9, and a pair is at most 11 steps apart."""
    model = create(curves='raster')
    with torch.no_grad():
        for block in model.blocks:
            block.attn.decay.beta.fill_(20.0)
    for layer in movement(model, snapshot(model)):
        assert layer['mask_after_max'] == pytest.approx(11 * math.exp(-20), rel=1e-6)
        assert layer['mask_after'] == pytest.approx(13 / 3 * math.exp(-20), rel=1e-6)  # mean |i - j| of 12 is 13 / 3


def test_fixed_mask_does_not_move_but_its_alpha_may():
    model = create(mask='fixed')
    before = snapshot(model)
    with torch.no_grad():
        model.blocks[1].attn.decay.alpha += 0.5
    first, second = movement(model, before)
    assert first['mask_after'] > 0 and first['beta_change'] == second['mask_change'] == first['alpha_change'] == 0
    assert second['alpha_change'] == pytest.approx(0.5)


def test_snapshot_is_a_copy_in_double_precision():
    model = create(curve_weights='learned').to(torch.float64)
    before = snapshot(model)
    wanted = {name: value.clone() for name, value in before[0].items()}
    train(model)
    assert wanted.keys() == {'beta', 'alpha', 'curve_logits'}
    for name, value in before[0].items():
        assert value.dtype == torch.float64 and not value.requires_grad
        assert torch.equal(value, wanted[name]) and not torch.equal(value, getattr(model.blocks[0].attn.decay, name))


# --- wrapped

WRAPPERS = {
    'task': nn.Sequential,
    'data parallel': nn.DataParallel,
    'compiled': torch.compile,
    'twice': lambda model: torch.compile(nn.DataParallel(model)),
}


@pytest.mark.parametrize('wrapper', WRAPPERS)
def test_wrapped_model_is_looked_into(wrapper):
    model = create()
    before = snapshot(model)
    bare = movement(train(model), before)
    wrapped = WRAPPERS[wrapper](model)
    assert movement(wrapped, before) == bare
    for one, other in zip(snapshot(wrapped), snapshot(model), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ('beta', 'alpha'))


def test_with_peft_it_is_the_trained_copy():
    peft = pytest.importorskip('peft')
    model = create()
    before = snapshot(model)
    config = peft.LoraConfig(r=2, target_modules=['qkv', 'proj'], modules_to_save=['decay', 'head'])
    wrapped = peft.get_peft_model(model, config)
    assert movement(wrapped, before)[1]['beta_change'] == 0
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and name.endswith(('default.beta', 'default.alpha')):
                parameter += 0.25
    for layer in movement(wrapped, before):
        assert layer['beta_change'] == pytest.approx(0.25, rel=1e-5)
        assert layer['alpha_change'] == pytest.approx(0.25, rel=1e-5)
    with wrapped.disable_adapter():
        assert movement(wrapped, before)[0]['beta_change'] == 0
    merged = wrapped.merge_and_unload()
    assert movement(merged, before)[0]['beta_change'] == pytest.approx(0.25, rel=1e-5)


def test_add_violin_with_registers():
    model = timm.create_model('vit_small_patch14_reg4_dinov2', **TINY)
    violin_timm.add_violin(model)
    before = snapshot(model)
    layers = movement(train(model), before)
    for layer, old, new in zip(layers, before, snapshot(model), strict=True):
        assert layer == pytest.approx(expected(old, new, DEFAULT_CURVES), rel=1e-5)


# --- what does not fit, and the table


def test_what_is_no_single_violin_is_refused():
    with pytest.raises(ConfigError, match='model: got VisionTransformer with 0 Violins'):
        snapshot(timm.create_model('deit_tiny_patch16_224', **TINY))
    with pytest.raises(ConfigError, match='2 Violins in it; exactly one'):
        snapshot(nn.ModuleList([create(), create()]))


@pytest.mark.parametrize('other', [dict(curves='snake'), dict(alpha='none'), dict(depth=1), dict(mask='none')], ids=str)
def test_snapshot_of_another_model_is_refused(other):
    with pytest.raises(ConfigError, match='before: got a snapshot of'):
        movement(create(), snapshot(create(**other)))


@pytest.mark.parametrize('arm', ARMS)
def test_table_has_a_line_for_each_layer(arm):
    settings, _, keys = ARMS[arm]
    model = create(**settings)
    layers = movement(train(model), snapshot(model))
    lines = summary(layers).splitlines()
    if not keys:
        assert lines == ['no layer has a mask or alpha']
        return
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    assert lines[0].split()[0] == 'layer' and [line.split()[0] for line in lines[1:]] == ['0', '1']
    for line, layer in zip(lines[1:], layers, strict=True):
        values = [float(cell) for cell in line.split()[1:]]
        assert values == pytest.approx([layer[key] for key in COLUMNS if key in keys], rel=1e-2)
