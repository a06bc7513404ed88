"""The paper's statements about permutations, of `ViolinAttention`."""

import pytest
import torch

from violin_timm import curve_order
from violin_timm.geometry import DEFAULT_CURVES
from violin_timm.strategies import STRATEGIES


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('num_prefix', [0, 2])
def test_permutation_equivariance(strategy, num_prefix, layer, tokens):
    """C.1: tokens permuted together with their positions give permuted outputs; alone, they do not."""
    attention, x = layer(strategy=strategy, beta_range=(0, 3)), tokens(num_prefix + 12)
    positions = attention.grid(3, 4)
    shuffle = torch.randperm(12)
    whole = torch.cat([torch.arange(num_prefix), num_prefix + shuffle])
    y = attention(x, positions=positions)
    torch.testing.assert_close(attention(x[:, whole], positions=positions[:, shuffle]), y[:, whole])
    assert not torch.allclose(attention(x[:, whole], positions=positions), y[:, whole])


@pytest.mark.parametrize('curve', DEFAULT_CURVES)
def test_permuting_the_mask_is_permuting_the_sequence(curve, layer, tokens):
    """C.3: a curve's mask is the one-dimensional decay on tokens put into the curve's order, and back."""
    x = tokens(12)
    along, line = layer(curves=curve, beta_range=(0, 3)), layer(curves='raster', beta_range=(0, 3))
    order = torch.tensor(curve_order(curve, 3, 4))
    expected = torch.empty_like(x)
    expected[:, order] = line(x[:, order], positions=line.grid(1, 12))
    torch.testing.assert_close(along(x, positions=along.grid(3, 4)), expected)
    mask, base = along.decay(along.grid(3, 4)), line.decay(line.grid(1, 12))
    torch.testing.assert_close(mask[:, order][:, :, order], base)
