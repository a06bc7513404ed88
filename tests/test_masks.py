"""Masks against a per-pair reference in float64: values, gradients, numbers that are easily wrong, and memory."""

import itertools
import math

import pytest
import torch

from violin_timm import curve_order, masks
from violin_timm.attention import Decay
from violin_timm.geometry import DEFAULT_CURVES, GEOMETRIES, components, positions
from violin_timm.masks import Pairs, _plain_mask, decay_mask, decay_rates
from violin_timm.settings import MaskSettings

GRIDS = [(1, 1), (1, 6), (5, 1), (3, 4), (4, 3), (3, 3)]


def as_positions(names, height, width):
    return torch.tensor(positions(tuple(names), height, width))


def inputs(num_heads, names, low=-2.0, high=9.0, dtype=torch.float64):
    """beta and weights ``[H, C]`` that require gradients."""
    generator = torch.Generator().manual_seed(3)
    shape = (num_heads, len(names))
    beta = torch.empty(shape, dtype=torch.float64).uniform_(low, high, generator=generator)
    weights = torch.rand(shape, dtype=torch.float64, generator=generator)
    return beta.to(dtype).requires_grad_(), weights.to(dtype).requires_grad_()


def mask_of(beta, weights, names, height, width, num_prefix=0):
    return decay_mask(decay_rates(beta), weights, as_positions(names, height, width), num_prefix)


def distance(name, i, j, height, width):
    """Of two patches, from the definition."""
    if name == 'manhattan':
        return abs(i // width - j // width) + abs(i % width - j % width)
    order = curve_order(name, height, width).tolist()
    return abs(order.index(i) - order.index(j))


def per_pair(beta, weights, names, height, width, num_prefix):
    """The mask, one pair of patches after another, from sigmoid and power in float64."""
    count = height * width
    mask = torch.ones(len(beta), num_prefix + count, num_prefix + count, dtype=torch.float64)
    gamma = [[1.0 / (1.0 + math.exp(-b)) for b in row] for row in beta.tolist()]
    for i, j in itertools.product(range(count), repeat=2):
        steps = [distance(name, i, j, height, width) for name in names]
        for h, row in enumerate(gamma):
            mask[h, num_prefix + i, num_prefix + j] = sum(
                w * g**d for w, g, d in zip(weights[h].tolist(), row, steps, strict=True)
            )
    return mask


@pytest.mark.parametrize('num_prefix', [0, 1, 5])
@pytest.mark.parametrize('height, width', GRIDS)
def test_equals_per_pair_reference(height, width, num_prefix, close):
    for names in (DEFAULT_CURVES, ('manhattan',), ('raster', 'manhattan', 'random3')):
        beta, weights = inputs(2, names)
        expected = per_pair(beta, weights, names, height, width, num_prefix)
        assert mask_of(beta, weights, names, height, width, num_prefix).dtype == torch.float64
        close(mask_of(beta, weights, names, height, width, num_prefix), expected, 1e-12)
        single = mask_of(beta.float(), weights.float(), names, height, width, num_prefix)
        assert single.dtype == torch.float32
        close(single, expected, 1e-6)


@pytest.mark.parametrize('num_prefix', [0, 2])
@pytest.mark.parametrize('names', [DEFAULT_CURVES, ('manhattan', 'snake')], ids=['curves', 'mixed'])
@pytest.mark.parametrize('height, width', [(2, 3), (1, 4), (1, 1)])
def test_gradcheck(height, width, names, num_prefix):
    beta, weights = inputs(2, names, -1.0, 3.0)
    rates = decay_rates(beta).detach().requires_grad_()
    place = as_positions(names, height, width)
    assert torch.autograd.gradcheck(lambda r, w: decay_mask(r, w, place, num_prefix), (rates, weights))
    assert torch.autograd.gradcheck(lambda b: mask_of(b, weights.detach(), names, height, width, num_prefix), beta)


def beta_gradient(beta, names, side, dtype, cotangent):
    beta = beta.detach().to(dtype).requires_grad_()
    weights = torch.full_like(beta, 1.0 / len(names)).detach()
    mask_of(beta, weights, names, side, side).backward(cotangent.to(dtype))
    return beta.grad.double()


@pytest.mark.parametrize('side', [4, 14])
def test_gradients_of_finetuning_betas_are_right_in_float32(side):
    """Where sigmoid(beta) is 1 in float32, and its power has no gradient at all."""
    beta, _ = inputs(6, DEFAULT_CURVES, 15.0, 20.0, torch.float32)
    assert (torch.sigmoid(beta) == 1).double().mean() > 0.5
    cotangent = torch.randn(6, side**2, side**2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for signs in (cotangent, cotangent.abs()):
        expected = beta_gradient(beta, DEFAULT_CURVES, side, torch.float64, signs)
        actual = beta_gradient(beta, DEFAULT_CURVES, side, torch.float32, signs)
        assert (expected != 0).all() and (actual != 0).all()
        error = (actual - expected).abs() / expected.abs()
        assert error.max() < 1e-4
        # and the reference is right: -sum of weight * d * gamma ** d * dlog(gamma)
    gamma = torch.sigmoid(beta.double())[:, 0, None, None]
    steps = as_positions(['snake'], side, side)[0, :, None, 0] - as_positions(['snake'], side, side)[0, None, :, 0]
    steps = steps.abs().double()
    by_hand = (signs * steps * gamma**steps * (1 - gamma)).sum((1, 2)) / len(DEFAULT_CURVES)
    torch.testing.assert_close(expected[:, 0], by_hand, rtol=1e-6, atol=0)


def test_distance_from_one_is_right_in_float32():
    beta = torch.tensor([[15.0]])
    mask = mask_of(beta, torch.ones(1, 1), ['raster'], 1, 196)[0, 0]
    expected = -torch.expm1(-torch.arange(196.0).double() * math.log1p(math.exp(-15.0)))
    assert ((1 - mask.double()) - expected).abs().max() < 1e-7  # half a unit in the last place of 1


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_computed_in_float32_whatever_the_model_is(dtype):
    """In bfloat16 sigmoid(7) is 1; 195 steps away the mask has to be 0.837."""
    decay = Decay(2, MaskSettings(curves='raster')).to(dtype)
    assert decay.beta.dtype == dtype
    with torch.no_grad():
        decay.beta.fill_(7.0)
    place = as_positions(['raster'], 1, 196)
    mask = decay(place)
    assert mask.dtype == torch.float32
    expected = torch.sigmoid(torch.tensor(7.0).double()) ** torch.arange(196)
    torch.testing.assert_close(mask[0, 0].double(), expected, rtol=1e-6, atol=0)
    mask.sum().backward()
    assert decay.beta.grad.dtype == dtype
    assert decay.beta.grad.isfinite().all() and (decay.beta.grad != 0).all()


@pytest.mark.parametrize('curve_weights', ['mean', 'learned'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast_changes_no_bit(dtype, curve_weights):
    decay = Decay(3, MaskSettings(mask_init='finetune', curve_weights=curve_weights))
    place = as_positions(DEFAULT_CURVES, 5, 6)
    results = []
    for enabled in (False, True):
        decay.zero_grad()
        with torch.autocast('cpu', dtype, enabled=enabled):
            mask = decay(place, 1)
            assert mask.dtype == torch.float32
            loss = (mask * torch.linspace(-1, 1, mask.numel()).view_as(mask)).sum()
        loss.backward()
        results.append((mask, decay.beta.grad.clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert (results[0][1] != 0).all()


@pytest.mark.parametrize('num_prefix', [0, 2])
@pytest.mark.parametrize('height, width', GRIDS)
def test_plain_version_equals_the_function(height, width, num_prefix, close):
    """The one that tracers and exporters see."""
    for names in (DEFAULT_CURVES, ('manhattan', 'hilbert')):
        beta, weights = inputs(2, names)
        place = as_positions(names, height, width)
        rates = decay_rates(beta).detach().requires_grad_()
        results = []
        for function in (decay_mask, _plain_mask):
            mask = function(rates, weights, place, num_prefix)
            scale = torch.linspace(-1, 2, mask.numel(), dtype=mask.dtype).view_as(mask)
            results.append((mask, *torch.autograd.grad((mask * scale).sum(), (rates, weights))))
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_tracing_takes_the_plain_version():
    beta, weights = inputs(2, DEFAULT_CURVES, dtype=torch.float32)
    place = as_positions(DEFAULT_CURVES, 3, 4)
    example = (decay_rates(beta).detach(), weights.detach(), place)
    traced = torch.jit.trace(lambda r, w, p: decay_mask(r, w, p, 1), example)
    assert 'PythonOp' not in str(traced.graph) and '_DecayMask' not in str(traced.graph)
    torch.testing.assert_close(traced(*example), decay_mask(*example, 1))


@pytest.mark.parametrize('curve_weights', ['mean', 'learned'])
def test_saves_no_maps_for_backward(curve_weights):
    side, heads = 7, 3
    decay = Decay(heads, MaskSettings(curve_weights=curve_weights))
    place = as_positions(DEFAULT_CURVES, side, side)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        mask = decay(place, 1)
    assert saved and mask.requires_grad
    largest = max(math.prod(shape) for shape in saved)
    assert largest <= len(DEFAULT_CURVES) * side**2 < side**4, saved  # the positions; not even one map


@pytest.mark.parametrize('num_prefix', [0, 1, 2, 5])
@pytest.mark.parametrize('geometry', GEOMETRIES)
def test_diagonal_symmetry_and_prefix(geometry, num_prefix):
    decay = Decay(3, MaskSettings(geometry=geometry))
    height, width = 4, 6
    mask = decay(as_positions(components(geometry), height, width), num_prefix)
    assert mask.shape == (3, num_prefix + 24, num_prefix + 24)
    torch.testing.assert_close(mask.diagonal(dim1=1, dim2=2), torch.ones(3, num_prefix + 24), rtol=0, atol=3e-7)
    torch.testing.assert_close(mask, mask.mT, rtol=0, atol=0)
    assert (mask[:, :num_prefix] == 1).all() and (mask[:, :, :num_prefix] == 1).all()
    patches = mask[:, num_prefix:, num_prefix:]
    assert (patches > 0).all() and (patches <= 1 + 3e-7).all()
    off_diagonal = patches[:, ~torch.eye(24, dtype=torch.bool)]
    assert (off_diagonal < 1).all()


def test_prefix_entries_send_no_gradient():
    decay = Decay(2, MaskSettings())
    mask = decay(as_positions(DEFAULT_CURVES, 3, 3), 2)
    cotangent = torch.ones_like(mask)
    cotangent[:, 2:, 2:] = 0
    mask.backward(cotangent)
    assert (decay.beta.grad == 0).all()


def test_one_patch_leaves_beta_without_effect():
    decay = Decay(2, MaskSettings())
    mask = decay(as_positions(DEFAULT_CURVES, 1, 1), 1)
    torch.testing.assert_close(mask, torch.ones(2, 2, 2))
    mask.sum().backward()
    assert (decay.beta.grad == 0).all()


def test_learned_curve_weights_start_equal_and_get_gradients():
    settings = dict(curves='snake,peano,hilbert_T')
    place = as_positions(('snake', 'peano', 'hilbert_T'), 4, 5)
    mean, learned = Decay(2, MaskSettings(**settings)), Decay(2, MaskSettings(**settings, curve_weights='learned'))
    assert learned.curve_logits.shape == (2, 3)
    torch.testing.assert_close(learned(place), mean(place))
    scale = torch.randn(2, 20, 20)
    (learned(place) * scale).sum().backward()
    assert (learned.curve_logits.grad != 0).all()
    # softmax: gradients of the logits of one head cancel
    torch.testing.assert_close(learned.curve_logits.grad.sum(1), torch.zeros(2), rtol=0, atol=1e-5)
    with torch.no_grad():
        learned.curve_logits[:, 1] = 40.0
    only = Decay(2, MaskSettings(curves='peano'))
    with torch.no_grad():
        only.beta.copy_(learned.beta[:, 1:2])
    torch.testing.assert_close(learned(place), only(as_positions(('peano',), 4, 5)))


def test_one_mask_serves_every_grid():
    """Patches as far apart have the same entry, on whatever grid."""
    decay = Decay(2, MaskSettings(curves='raster'))
    small, large = decay(as_positions(('raster',), 1, 5)), decay(as_positions(('raster',), 6, 6))
    torch.testing.assert_close(small[:, 0], large[:, 0, :5])


def by_every_way(monkeypatch, names, height, width, num_prefix, dtype):
    """Mask and gradients of rates, weights and prefix: pairs shared, all lines at once, and one line at a time."""
    beta, weights = inputs(3, names, dtype=dtype)
    prefix = torch.rand(3, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    place = as_positions(names, height, width)
    length = num_prefix + height * width
    grad = torch.randn(3, length, length, dtype=dtype, generator=torch.Generator().manual_seed(2))
    for block, pairs in ((2**25, Pairs.of(place)), (2**25, None), (1, None)):
        monkeypatch.setattr(masks, 'BLOCK_BYTES', block)
        mask = decay_mask(decay_rates(beta), weights, place, num_prefix, prefix, pairs)
        wanted = (beta, weights, prefix)[: 3 if num_prefix else 2]
        yield mask.detach(), *torch.autograd.grad(mask, wanted, grad)


@pytest.mark.parametrize('num_prefix', [0, 2])
@pytest.mark.parametrize('names', [DEFAULT_CURVES, ('manhattan', 'snake'), ('random1',)])
def test_shared_pairs_and_blocks_agree(names, num_prefix, monkeypatch):
    shared, whole, lines = by_every_way(monkeypatch, names, 4, 5, num_prefix, torch.float64)
    for a, b, c in zip(shared, whole, lines, strict=True):
        assert a.abs().sum() > 0
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)


def test_pairs_are_the_distances():
    place = as_positions(('hilbert', 'manhattan'), 3, 4)
    rows, pair = Pairs.of(place)
    distances = (place[:, :, None] - place[:, None]).abs().sum(-1)
    for c in range(2):
        assert torch.equal(rows[pair, c].view(12, 12) - c * 12, distances[c])
    assert len(rows) == 12 * 13 // 2
