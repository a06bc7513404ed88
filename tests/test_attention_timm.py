"""`ViolinAttention` gives every argument and option of timm's attention timm's meaning."""

import math

import pytest
import torch
from timm.layers import Attention

from violin_timm import ViolinAttention
from violin_timm.settings import MaskSettings


def all_ones(attention):
    """A mask of ones and alpha 1."""
    with torch.no_grad():
        attention.decay.beta.fill_(1e4)
        attention.decay.alpha.fill_(1.0)
    return attention


def timm_arguments(length):
    generator = torch.Generator().manual_seed(6)
    additive = torch.randn(length, length, generator=generator, dtype=torch.float64)
    cut = additive > -0.5
    cut.fill_diagonal_(True)
    per_head = torch.randn(2, 3, length, length, generator=generator, dtype=torch.float64)
    return {
        'nothing': {},
        'boolean': dict(attn_mask=cut),
        'additive': dict(attn_mask=additive),
        'infinite': dict(attn_mask=additive.masked_fill(~cut, -math.inf)),
        'causal': dict(is_causal=True),
        'per head': dict(attn_mask=per_head),
        'keys of each image': dict(attn_mask=cut[:2, None, None]),
    }


@pytest.mark.parametrize('kind', timm_arguments(3))
@pytest.mark.parametrize('strategy', ['mul_v1', 'mul_v2', 'add_v1', 'mul_after_sm', 'add_after_sm'])
def test_attn_mask_means_what_it_means_in_timm(strategy, kind, layer, tokens):
    """With a mask of ones every strategy is timm's attention, but for a factor 2 of the logits or the sum of values."""
    ours, plain = all_ones(layer(strategy=strategy)), layer(Attention)
    assert all(torch.equal(p, ours.get_parameter(n)) for n, p in plain.named_parameters())
    x, arguments = tokens(1 + 6), timm_arguments(7)[kind]
    actual = ours(x, positions=ours.grid(2, 3), **arguments)
    if strategy == 'mul_v2':  # S(2A)
        with torch.no_grad():
            plain.qkv.weight[:12] *= 2
            plain.qkv.bias[:12] *= 2
    expected = plain(x, **arguments)
    if strategy == 'add_after_sm':  # S(A) + 1 where no key is cut
        bias = torch.zeros(7, 7, dtype=torch.float64)
        if arguments.get('is_causal'):
            bias = bias.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -math.inf)
        elif kind != 'nothing':
            given = arguments['attn_mask']
            bias = given if given.dtype != torch.bool else bias.masked_fill(~given, -math.inf)
        kept = (bias > -math.inf).double()
        values = plain.qkv(x)[..., 24:].view(2, 7, 3, 4).transpose(1, 2)
        summed = (kept @ values).transpose(1, 2).reshape(2, 7, 12)
        expected = expected + summed @ plain.proj.weight.T
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize('fused', [False, True])
@pytest.mark.parametrize(
    'options',
    [
        dict(),
        dict(qk_norm=True),
        dict(scale_norm=True),
        dict(gated=True),
        dict(attn_head_dim=6),
        dict(dim_out=8),
        dict(proj_bias=False),
    ],
    ids=str,
)
def test_options_of_timms_layer(options, fused, layer, tokens):
    options = dict(options, norm_layer=torch.nn.LayerNorm)
    ours, plain = all_ones(layer(layer_kwargs=options)), layer(Attention, layer_kwargs=options)
    plain.fused_attn = fused
    x = tokens(6)
    torch.testing.assert_close(ours(x, positions=ours.grid(2, 3)), plain(x), rtol=1e-9, atol=1e-11)


def test_dropout_of_attention_and_projection_is_timms(layer, tokens):
    options = dict(attn_drop=0.4, proj_drop=0.3)
    ours, plain = all_ones(layer(layer_kwargs=options)), layer(Attention, layer_kwargs=options)
    plain.fused_attn = False
    x = tokens(6)
    positions = ours.grid(2, 3)
    outputs = []
    for function in (lambda: ours(x, positions=positions), lambda: plain(x)):
        torch.manual_seed(7)
        outputs.append(function())
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-11)
    ours.eval(), plain.eval()
    assert not torch.allclose(outputs[0], ours(x, positions=positions))
    torch.testing.assert_close(ours(x, positions=positions), plain(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize('kind', timm_arguments(3))
@pytest.mark.parametrize('settings', [None, MaskSettings(mask='none', alpha='none')], ids=['no settings', 'none'])
def test_without_mask_and_alpha_is_timms_to_the_last_bit(settings, kind, fused, tokens):
    torch.manual_seed(1)
    plain = Attention(12, 3, qkv_bias=True)
    ours = ViolinAttention(12, 3, qkv_bias=True, settings=settings)
    assert ours.fused_attn == plain.fused_attn == fused
    assert list(ours.state_dict()) == list(plain.state_dict())
    ours.load_state_dict(plain.state_dict())
    x = tokens(7, dtype=torch.float32)
    arguments = {
        k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in timm_arguments(7)[kind].items()
    }
    results = []
    for attention in (ours, plain):
        leaf = x.clone().requires_grad_()
        y = attention(leaf, **arguments)
        y.square().sum().backward()
        results.append((y, leaf.grad, attention.qkv.weight.grad))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
