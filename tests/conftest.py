"""Fixtures shared by all tests."""

from pathlib import Path

import pytest
import torch
from timm.layers import set_fused_attn, use_fused_attn

from violin_timm import ViolinAttention
from violin_timm.settings import MaskSettings

torch.set_num_threads(1)  # the models are tiny


@pytest.fixture(scope='session')
def golden():
    """Path of a recorded file: ``golden('curve_orders_page.json')``."""

    def path(name: str) -> Path:
        found = Path(__file__).parent / 'golden' / name
        assert found.is_file(), f'{name}: not among the recorded files'
        return found

    return path


@pytest.fixture(autouse=True)
def seeded():
    """One seed for every test, whichever ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope='session')
def close():
    """Assert that two tensors agree to `tolerance`, relative to the largest entry of the second."""

    def check(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4, what: str = '') -> None:
        assert actual.shape == expected.shape, f'{what}: {tuple(actual.shape)} against {tuple(expected.shape)}'
        actual, expected = actual.detach().double(), expected.detach().double()
        error = (actual - expected).abs().max() / expected.abs().max()
        assert error <= tolerance, f'{what}: relative error {error:.2e}'  # false for NaN, too

    return check


@pytest.fixture(scope='session')
def layer():
    """One attention layer, in float64, of the same weights for one seed: ``layer(mask='fixed', gamma=0.9)``.

    ``layer(Attention)`` is timm's own. Further keyword arguments are those of `MaskSettings`.
    """

    def _layer(cls=ViolinAttention, dim=12, num_heads=3, seed=1, dtype=torch.float64, layer_kwargs=(), **settings):
        torch.manual_seed(seed)
        kwargs = dict(qkv_bias=True, **dict(layer_kwargs))
        if cls is ViolinAttention:
            kwargs['settings'] = MaskSettings(**settings)
        return cls(dim, num_heads, **kwargs).to(dtype)

    return _layer


@pytest.fixture(scope='session')
def tokens():
    """Input of `layer`, ``[batch, count, dim]``: the same numbers for the same shape."""

    def _tokens(count, batch=2, dim=12, dtype=torch.float64):
        return torch.randn(batch, count, dim, generator=torch.Generator().manual_seed(2)).to(dtype)

    return _tokens


@pytest.fixture(params=[False, True], ids=['unfused', 'fused'])
def fused(request):
    """Each of the two, as timm's switch for layers that are then built."""
    before = use_fused_attn(), use_fused_attn(experimental=True)
    set_fused_attn(request.param)
    yield request.param
    set_fused_attn(*before)
