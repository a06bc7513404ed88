"""`ViolinAttention` against the authors' recorded numbers and a per-pair reference; and what it refuses."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from violin_timm import ViolinAttention, curve_order
from violin_timm.geometry import DEFAULT_CURVES
from violin_timm.models.authors import to_native
from violin_timm.settings import MaskSettings
from violin_timm.strategies import ALPHA_ON

AUTHORS_STRATEGIES = ('mul_v1', 'mul_v2', 'add_v1', 'mul_after_sm', 'add_after_sm')
CASES = [
    f'{strategy}|{case}'
    for strategy in AUTHORS_STRATEGIES
    for case in ('cls=0|learned|scale=1', 'cls=1|learned|scale=1', 'cls=0|fixed|scale=1', 'cls=1|learned|scale=0')
]


@pytest.fixture(scope='module')
def authors(golden):
    numbers = load_file(golden('attention_authors.safetensors'))
    cases = {}
    for key, value in numbers.items():
        case, name = key.split('/', 1)
        cases.setdefault(case, {})[name] = value
    assert set(cases) == set(CASES) == set(json.loads(golden('attention_authors.json').read_text()))
    return cases


def native(case, kind):
    """Entries ``kind/...`` of a case under our names."""
    prefixed = {f'b.attn.{k.removeprefix(kind)}': v for k, v in case.items() if k.startswith(kind)}
    if any('ai_list' in k for k in prefixed):
        prefixed = to_native(prefixed, DEFAULT_CURVES)
    return {k.removeprefix('b.attn.'): v for k, v in prefixed.items()}


@pytest.mark.parametrize('fused', [False, True])
@pytest.mark.parametrize('name', CASES)
def test_equals_the_authors(name, fused, authors, close):
    case = authors[name]
    strategy, class_token, mask, scale = name.split('|')
    attention = ViolinAttention(
        48,
        3,
        qkv_bias=True,
        settings=MaskSettings(strategy=strategy, mask=mask, alpha='learned' if scale == 'scale=1' else 'none'),
    )
    attention.load_state_dict(native(case, 'param/'))
    attention.fused_attn = fused
    x = case['x'].clone().requires_grad_()
    assert x.shape[1] == 16 + (class_token == 'cls=1')
    y = attention(x, positions=attention.grid(4, 4))
    close(y, case['y'], what='y')
    y.backward(case['gy'])
    close(x.grad, case['gx'], what='gx')
    expected = {'decay.alpha': case['grad/normalize']} if scale == 'scale=1' else {}
    if mask == 'learned':
        expected['decay.beta'] = native(case, 'grad/')['decay.beta']
    assert expected
    for parameter, gradient in expected.items():
        assert (gradient != 0).any()
        close(attention.get_parameter(parameter).grad, gradient, what=parameter)


def softmax(logits):
    powers = [math.exp(value - max(logits)) for value in logits]
    return [power / sum(powers) for power in powers]


def per_pair(attention, x, grid, num_prefix, strategy, alpha_on, bias):
    """Masked attention of one image, one pair of tokens after another, in Python's floats."""
    length, heads = len(x), attention.num_heads
    size = attention.head_dim
    q, k, v = (x @ attention.qkv.weight.T + attention.qkv.bias).view(length, 3, heads, size).permute(1, 2, 0, 3)
    orders = [curve_order(name, *grid).tolist() for name in attention.decay.settings.components]
    result = torch.zeros(length, heads * size, dtype=torch.float64)
    for h, i in itertools.product(range(heads), range(length)):
        alpha = attention.decay.alpha[h].item()
        gammas = [1 / (1 + math.exp(-b)) for b in attention.decay.beta[h].tolist()]
        scores, masks = [], []
        for j in range(length):
            score, mask = (q[h, i] @ k[h, j]).item() / math.sqrt(size), 1.0
            if min(i, j) >= num_prefix:
                steps = [abs(o.index(i - num_prefix) - o.index(j - num_prefix)) for o in orders]
                mask = sum(g**d for g, d in zip(gammas, steps, strict=True)) / len(gammas)
            scores.append(alpha * score if alpha_on == 'scores' else score)
            masks.append(alpha * mask if alpha_on == 'mask' else mask)
        added = bias[i].tolist()
        if strategy in ('mul_v1', 'mul_v2', 'add_v1'):
            meet = {'mul_v1': lambda a, m: a * m, 'mul_v2': lambda a, m: a * (1 + m), 'add_v1': lambda a, m: a + m}
            weights = softmax([meet[strategy](a, m) + b for a, m, b in zip(scores, masks, added, strict=True)])
        else:
            shares = softmax([a + b for a, b in zip(scores, added, strict=True)])
            meet = {'mul_after_sm': lambda s, m: s * m, 'add_after_sm': lambda s, m: s + m}[strategy]
            weights = [0.0 if b == -math.inf else meet(s, m) for s, m, b in zip(shares, masks, added, strict=True)]
        result[i, h * size : (h + 1) * size] = sum(w * v[h, j] for j, w in enumerate(weights))
    return result @ attention.proj.weight.T + attention.proj.bias


@pytest.mark.parametrize('num_prefix', [0, 1, 2, 5])
@pytest.mark.parametrize('alpha_on', ALPHA_ON)
@pytest.mark.parametrize('strategy', AUTHORS_STRATEGIES)
@torch.no_grad()
def test_equals_per_pair_reference(strategy, alpha_on, num_prefix, layer, tokens):
    attention = layer(strategy=strategy, alpha_on=alpha_on, beta_range=(-1, 4), alpha_mean=1.0)
    x = tokens(num_prefix + 6, batch=1)
    length = x.shape[1]
    positions = attention.grid(2, 3)
    bias = torch.randn(length, length, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    cut = bias > -0.5
    cut.fill_diagonal_(True)
    infinite = torch.zeros_like(bias)
    causal = infinite.masked_fill(~torch.ones_like(cut).tril(), -math.inf)
    for arguments, added in (
        ({}, infinite),
        (dict(attn_mask=bias), bias),
        (dict(is_causal=True), causal),
        (dict(attn_mask=cut), infinite.masked_fill(~cut, -math.inf)),
        (dict(attn_mask=cut, is_causal=True), causal),
    ):  # timm: is_causal takes precedence
        actual = attention(x, positions=positions, **arguments)[0]
        expected = per_pair(attention, x[0], (2, 3), num_prefix, strategy, alpha_on, added)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def test_fused_switch_changes_nothing_with_a_mask(fused, layer, tokens):
    attention = layer(strategy='mul_v1')
    assert attention.fused_attn == fused
    x = tokens(7)
    y = attention(x, positions=attention.grid(2, 3))
    torch.testing.assert_close(
        y[0], per_pair(attention, x[0], (2, 3), 1, 'mul_v1', 'mask', torch.zeros(7, 7)).detach(), rtol=1e-9, atol=1e-11
    )


# --- refusals


def test_masked_attention_needs_positions(layer, tokens):
    with pytest.raises(ValueError, match='positions: got None'):
        layer()(tokens(6))


def test_more_patches_than_tokens_are_refused(layer, tokens):
    attention = layer()
    with pytest.raises((AssertionError, ValueError), match='positions'):
        attention(tokens(6), positions=attention.grid(3, 3))


def test_positions_of_other_curves_are_refused(layer, tokens):
    attention = layer()
    other = layer(curves='snake')
    with pytest.raises((AssertionError, ValueError), match='positions'):
        attention(tokens(6), positions=other.grid(2, 3))
