"""Every entry of the `STRATEGIES` table: its formula, and what holds for all of them."""

import pytest
import torch

from violin_timm import ViolinAttention
from violin_timm.settings import MaskSettings
from violin_timm.strategies import ALPHA_ON, STRATEGIES, Strategy, combine

# scaled scores A, mask M, alpha a -> attention weights, as the authors name and write them
FORMULAS = {
    'mul_v1': lambda A, M: torch.softmax(A * M, -1),
    'mul_v2': lambda A, M: torch.softmax(A * (1 + M), -1),
    'add_v1': lambda A, M: torch.softmax(A + M, -1),
    'mul_after_sm': lambda A, M: torch.softmax(A, -1) * M,
    'add_after_sm': lambda A, M: torch.softmax(A, -1) + M,
}
DIM, HEADS, GRID = 12, 2, (2, 3)


def layer(strategy, **settings):
    torch.manual_seed(1)
    attention = ViolinAttention(
        DIM,
        HEADS,
        qkv_bias=True,
        settings=MaskSettings(strategy=strategy, beta_range=(-1, 3), alpha_mean=1.5, **settings),
    )
    return attention.double()


def tokens(num_prefix=1, batch=2):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, num_prefix + 6, DIM, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize('fused', [False, True])
@pytest.mark.parametrize('alpha_on', ALPHA_ON)
@pytest.mark.parametrize('strategy', FORMULAS)
def test_equals_its_formula(strategy, alpha_on, fused):
    attention, x = layer(strategy, alpha_on=alpha_on), tokens()
    attention.fused_attn = fused
    positions = attention.grid(*GRID)
    q, k, v = attention.qkv(x).reshape(2, 7, 3, HEADS, 6).permute(2, 0, 3, 1, 4)
    scores, mask = q @ k.mT / 6**0.5, attention.decay(positions, 1)
    alpha = attention.decay.alpha[:, None, None]
    if alpha_on == 'mask':
        weights = FORMULAS[strategy](scores, alpha * mask)
    else:
        weights = FORMULAS[strategy](alpha * scores, mask)
    expected = attention.proj((weights @ v).transpose(1, 2).reshape(2, 7, DIM))
    torch.testing.assert_close(attention(x, positions=positions), expected, rtol=1e-10, atol=1e-12)


def test_alpha_on_mask_or_scores_is_the_same_in_the_first_strategy_only():
    x = tokens()
    for strategy in FORMULAS:
        outputs = []
        for alpha_on in ALPHA_ON:
            attention = layer(strategy, alpha_on=alpha_on)
            outputs.append(attention(x, positions=attention.grid(*GRID)))
        assert torch.allclose(*outputs, rtol=1e-9, atol=1e-12) == (strategy == 'mul_v1'), strategy


@pytest.mark.parametrize('fused', [False, True])
@pytest.mark.parametrize('alpha_on', ALPHA_ON)
@pytest.mark.parametrize('strategy', STRATEGIES)
def test_every_parameter_gets_a_gradient(strategy, alpha_on, fused):
    attention = layer(strategy, alpha_on=alpha_on)
    attention.fused_attn = fused
    x = tokens().requires_grad_()
    y = attention(x, positions=attention.grid(*GRID))
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    for name, parameter in [('x', x), *attention.named_parameters()]:
        assert parameter.grad.isfinite().all(), name
        if 'decay' in name:
            assert (parameter.grad != 0).all(), name


def cut_masks(length):
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    cut = torch.rand(length, length, generator=torch.Generator().manual_seed(5)) > 0.4
    cut.fill_diagonal_(True)
    additive = torch.zeros(length, length, dtype=torch.float64).masked_fill(~cut, float('-inf'))
    batched = cut[None, None].expand(2, 1, -1, -1)
    return {
        'boolean': (cut, dict(attn_mask=cut)),
        'additive': (cut, dict(attn_mask=additive)),
        'causal': (causal, dict(is_causal=True)),
        'batched': (cut, dict(attn_mask=batched)),
    }


@pytest.mark.parametrize('kind', ['boolean', 'additive', 'causal', 'batched'])
@pytest.mark.parametrize('strategy', STRATEGIES)
def test_a_key_that_is_cut_has_no_influence(strategy, kind):
    attention, x = layer(strategy), tokens(batch=2).requires_grad_()
    allowed, arguments = cut_masks(x.shape[1])[kind]
    y = attention(x, positions=attention.grid(*GRID), **arguments)
    for query in range(x.shape[1]):
        influence = torch.autograd.grad(y[:, query].square().sum(), x, retain_graph=True)[0].abs().sum((0, 2))
        assert ((influence > 0) == allowed[query]).all(), f'query {query}: {influence}'


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_images_of_a_batch_do_not_mix(strategy):
    attention, x = layer(strategy), tokens(batch=3)
    positions = attention.grid(*GRID)
    together = attention(x, positions=positions)
    for i in range(3):
        torch.testing.assert_close(together[i : i + 1], attention(x[i : i + 1], positions=positions))


@pytest.mark.parametrize('name', ['mul', '', 'softmax', 'MUL_V1'])
def test_unknown_strategy_is_refused(name):
    with pytest.raises(ValueError, match='strategy: got') as error:
        MaskSettings(strategy=name)
    for known in STRATEGIES:
        assert known in str(error.value)


def test_unknown_operation_is_refused():
    with pytest.raises(ValueError, match='operation: got divide'):
        combine('divide', torch.ones(1, 1, 2, 2), torch.ones(1, 2, 2))


def test_a_new_strategy_needs_one_line_of_the_table(monkeypatch):
    from violin_timm import settings

    monkeypatch.setitem(STRATEGIES, 'one_plus_after_sm', Strategy('mul_one_plus', after_softmax=True))
    monkeypatch.setitem(settings._CHOICES, 'strategy', tuple(STRATEGIES))
    attention, x = layer('one_plus_after_sm'), tokens()
    assert attention(x, positions=attention.grid(*GRID)).isfinite().all()
