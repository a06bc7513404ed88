"""The arms of `ViolinAttention`: mask and alpha, each absent, fixed or learned."""

import pytest
import torch
from timm.layers import Attention

ARMS = {
    'plain': ('none', 'none'),
    'alpha only': ('none', 'learned'),
    'mask only': ('learned', 'none'),
    'both': ('learned', 'learned'),
    'fixed': ('fixed', 'none'),
    'fixed and alpha': ('fixed', 'learned'),
}


@pytest.mark.parametrize('arm', ARMS)
def test_arm_has_its_parameters_and_no_other(arm, layer):
    mask, alpha = ARMS[arm]
    attention = layer(mask=mask, alpha=alpha)
    added = dict(attention.named_parameters()).keys() - dict(layer(Attention).named_parameters()).keys()
    assert added == ({'decay.beta'} if mask == 'learned' else set()) | ({'decay.alpha'} if alpha != 'none' else set())
    keys = attention.state_dict().keys() - layer(Attention).state_dict().keys()
    assert keys == added | ({'decay.beta'} if mask == 'fixed' else set())
    count = sum(attention.get_parameter(n).numel() for n in added)
    assert count == 3 * (8 * (mask == 'learned') + (alpha == 'learned'))


def test_arms_differ_by_what_they_are_called(fused, layer, tokens):
    """alpha only: scaled logits; mask only: alpha 1; both: their product."""
    x = tokens(7)
    alpha = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    arms = {name: layer(mask=mask, alpha=a) for name, (mask, a) in ARMS.items()}
    for attention in arms.values():
        if attention.decay is not None and attention.decay.alpha is not None:
            attention.decay.alpha.data.copy_(alpha)
    y = {name: a(x, positions=a.grid(2, 3) if a.has_mask else None) for name, a in arms.items()}

    plain = layer(Attention)
    scaled = layer(Attention)
    scaled.qkv.weight.data[:12] *= alpha.repeat_interleave(4)[:, None]
    scaled.qkv.bias.data[:12] *= alpha.repeat_interleave(4)
    torch.testing.assert_close(y['plain'], plain(x))
    torch.testing.assert_close(y['alpha only'], scaled(x))
    for name, reference in (('mask only', 1.0), ('both', alpha), ('fixed', 1.0), ('fixed and alpha', alpha)):
        attention = layer(mask=ARMS[name][0])
        attention.decay.alpha.data.copy_(torch.as_tensor(reference))
        torch.testing.assert_close(y[name], attention(x, positions=attention.grid(2, 3)))
    assert len({tuple(value.flatten().tolist()) for value in y.values()}) == len(ARMS)


def test_fixed_mask_has_the_gamma_that_was_asked_for(layer):
    attention = layer(mask='fixed', gamma=0.9, curves='raster', dtype=torch.float32)
    mask = attention.decay(attention.grid(1, 6))
    torch.testing.assert_close(mask[0, 0], 0.9 ** torch.arange(6))
    assert not attention.decay.beta.requires_grad


def test_learned_curve_weights_are_equal_at_first_and_learn(layer, tokens):
    mean, learned = layer(), layer(curve_weights='learned')
    x = tokens(6)
    positions = mean.grid(2, 3)
    y = learned(x, positions=positions)
    torch.testing.assert_close(y, mean(x, positions=positions))
    y.square().sum().backward()
    assert learned.decay.curve_logits.shape == (3, 8)
    assert learned.decay.curve_logits.grad.isfinite().all() and (learned.decay.curve_logits.grad != 0).any()
