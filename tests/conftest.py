"""Fixtures shared by all tests."""

from pathlib import Path

import pytest
import torch

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
