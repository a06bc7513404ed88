"""Fixtures shared by all tests."""
from pathlib import Path

import pytest
import torch


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
