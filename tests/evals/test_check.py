"""`violin check`: right where the layer is right, and a failure where it is not."""

import numpy as np
import pytest
import torch

from violin_timm import attention
from violin_timm.evals import check


def run(*argv):
    return check.main([str(arg) for arg in argv])


SMALL = ('--heads', 2, '--head-dim', 4)


@pytest.mark.parametrize('height, width', [(4, 4), (3, 7), (1, 6), (5, 1)])
@pytest.mark.parametrize('flags', [(), ('--class-token',)])
def test_right_layer_agrees(height, width, flags, capsys):
    assert run('--height', height, '--width', width, *SMALL, *flags) == 0
    said = capsys.readouterr().out
    tokens = height * width + len(flags)
    assert f'shape [2, {tokens}, 8]' in said
    assert '18 added a layer' in said
    assert 'all right' in said and 'WRONG' not in said and 'inactive' not in said
    assert ('class token row' in said) == bool(flags)


def test_report_is_aligned_and_seeded(capsys):
    reports = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed + 5)  # the caller's generator is neither read nor moved
        state = torch.get_rng_state()
        assert run('--height', 3, '--width', 3, *SMALL, '--seed', seed) == 0
        assert torch.equal(state, torch.get_rng_state())
        reports.append(capsys.readouterr().out)
    assert reports[0] == reports[1] != reports[2]
    lines = [line for line in reports[0].splitlines() if line.startswith('ok')]
    assert len(lines) == 9 and all(line[26] != ' ' and line[25] == ' ' for line in lines)


def test_single_patch_and_single_token_are_inactive(capsys):
    assert run('--height', 1, '--width', 1, *SMALL) == 0
    said = capsys.readouterr().out
    assert said.count('inactive') == 2 and 'one patch' in said and 'one token' in said
    assert run('--height', 1, '--width', 1, *SMALL, '--class-token') == 0
    said = capsys.readouterr().out
    assert said.count('inactive') == 1 and 'one patch' in said


def mixed(change):
    """The right mask with a change that `WRONG` must tell."""
    right = attention.decay_mask

    def mask(rates, weights, positions, *rest):
        return change(right(rates, weights, positions, *rest), rates)

    return mask


@pytest.mark.parametrize(
    'change, names',
    [
        (lambda mask, rates: 1.0 + 0.0 * mask, ['agreement', 'mask agreement', 'gradient of beta']),
        (lambda mask, rates: mask.triu() + torch.zeros_like(mask).triu(1), ['agreement', 'mask symmetry']),
        (lambda mask, rates: mask * 0.999, ['agreement', 'mask agreement', 'mask diagonal']),
        (lambda mask, rates: mask.detach() + 0 * rates.sum(), ['gradient of beta']),
        (lambda mask, rates: mask.flip(0), ['agreement', 'mask agreement']),
        (lambda mask, rates: mask / 0.0, ['agreement', 'gradient of beta', 'gradient of alpha']),
    ],
)
def test_sabotage_is_found(change, names, monkeypatch, capsys):
    monkeypatch.setattr(attention, 'decay_mask', mixed(change))
    assert run('--height', 3, '--width', 4, *SMALL, '--class-token') == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith('WRONG')]
    for name in names:
        assert any(line.startswith(f'WRONG  {name:<19}') for line in wrong), name


def test_wrong_backend_is_found(monkeypatch):
    def without_scale(q, k, v, mask, scale, *rest):
        return attention.eager(q, k, v, mask, 1.0, *rest)

    monkeypatch.setattr(attention, 'eager', attention.masked_attention, raising=False)
    monkeypatch.setattr(attention, 'masked_attention', without_scale)
    assert run('--height', 3, '--width', 3, *SMALL) == 1


def test_reference_on_a_case_by_hand():
    beta = np.full((1, 8), np.log(3.0))  # gamma = 3 / 4
    mask = check.reference_mask(beta, 1, 3, 1)  # on a line, every curve is the line
    assert np.allclose(mask[0], [[1, 1, 1, 1], [1, 1, 3 / 4, 9 / 16], [1, 3 / 4, 1, 3 / 4], [1, 9 / 16, 3 / 4, 1]])
    q, k = np.full((1, 1, 1, 4), 1.0), np.stack([np.zeros((1, 1, 4)), np.full((1, 1, 4), 1.0)], axis=2)
    v = np.arange(8.0).reshape(1, 1, 2, 4)
    out = check.reference_attention(
        np.repeat(q, 2, axis=2), k, v, np.array([0.5]), np.ones((1, 2, 2))
    )  # logits 0 and 0.5 * 4 / 2
    share = np.e / (1 + np.e)
    assert np.allclose(out[0, 0], (1 - share) * v[0, 0, 0] + share * v[0, 0, 1])


@pytest.mark.parametrize(
    'flags, message',
    [
        (('--height', 0), "--height: got '0'; a whole number from 1"),
        (('--width', 'two'), "--width: got 'two'"),
        (('--heads', -1), "--heads: got '-1'"),
        (('--head-dim', 2.5), "--head-dim: got '2.5'"),
        (('--seed', -1), "--seed: got '-1'; a whole number from 0"),
        (('--device', 'abacus'), "--device: got 'abacus'; allowed here are cpu"),
        (('--device', 'meta'), "--device: got 'meta'; allowed here are cpu"),
        (('--heigth', 3), 'unrecognized arguments: --heigth'),
    ],
)
def test_bad_arguments(flags, message, capsys):
    assert run(*flags) == 2
    assert message in capsys.readouterr().err


def test_help(capsys):
    assert run('--help') == 0
    assert '--class-token' in capsys.readouterr().out
