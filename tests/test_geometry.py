"""Distances between patches: metrics (paper, proposition C.2), presets, refusals, and a cache that poisons nothing."""

import numpy as np
import pytest
import torch

from violin_timm import CURVES, curve_ranks
from violin_timm.geometry import DEFAULT_CURVES, GEOMETRIES, components, grid_positions, positions

GRIDS = [(1, 1), (1, 7), (6, 1), (4, 6), (5, 5)]


def distances(names, height, width):
    """int64 ``[C, N, N]``."""
    array = positions(tuple(names), height, width)
    return np.abs(array[:, :, None] - array[:, None]).sum(-1)


@pytest.mark.parametrize(
    'names',
    [*(components(geometry) for geometry in GEOMETRIES), tuple(f'{c}_T' for c in CURVES), ('snake', 'manhattan')],
    ids=[*GEOMETRIES, 'transposes', 'mixed'],
)
@pytest.mark.parametrize('height, width', GRIDS)
def test_every_component_is_a_metric(names, height, width):
    count = height * width
    for name, distance in zip(names, distances(names, height, width), strict=True):
        assert (distance == distance.T).all(), name
        assert ((distance == 0) == np.eye(count, dtype=bool)).all(), name
        assert (distance[:, None] <= distance[:, :, None] + distance[None]).all(), name  # d_ij <= d_ik + d_kj
        assert distance.max() <= max(count - 1, 0), name


@pytest.mark.parametrize('height, width', GRIDS)
def test_manhattan_is_rows_plus_columns(height, width):
    y, x = np.divmod(np.arange(height * width), width)
    expected = np.abs(y[:, None] - y) + np.abs(x[:, None] - x)
    for names in (('manhattan',), ('hilbert', 'manhattan')):
        np.testing.assert_array_equal(distances(names, height, width)[-1], expected)


def test_curve_component_is_the_difference_of_ranks():
    for name, distance in zip(DEFAULT_CURVES, distances(DEFAULT_CURVES, 3, 5), strict=True):
        ranks = curve_ranks(name, 3, 5)
        np.testing.assert_array_equal(distance, np.abs(ranks[:, None] - ranks))


def test_presets():
    assert components() == DEFAULT_CURVES
    assert set(DEFAULT_CURVES) == {c + t for c in ('snake', 'zigzag', 'hilbert', 'peano') for t in ('', '_T')}
    assert components('raster') == ('raster',)
    assert components('manhattan') == ('manhattan',)
    assert components('random') == tuple(f'random{i}' for i in range(8))
    assert components('random', num_random=3, random_seed=5) == ('random5', 'random6', 'random7')
    assert components(curves='snake, peano_T') == components(curves=['snake', 'peano_T']) == ('snake', 'peano_T')
    assert components(curves='hilbert,manhattan') == ('hilbert', 'manhattan')


@pytest.mark.parametrize('geometry', GEOMETRIES)
def test_positions_have_one_row_per_component_and_patch(geometry):
    names = components(geometry)
    array = positions(names, 4, 6)
    assert array.dtype == np.int64
    assert array.shape == (len(names), 24, 2 if 'manhattan' in names else 1)
    with pytest.raises(ValueError, match='read-only'):
        array[0, 0, 0] = 1


def test_random_is_seeded_and_leaves_the_global_stream_alone():
    names = components('random', num_random=3)
    np.random.seed(4)
    expected = np.random.rand(5)
    np.random.seed(4)
    positions.cache_clear()
    first = positions(names, 5, 7)
    np.testing.assert_array_equal(np.random.rand(5), expected)
    np.random.seed(99)
    positions.cache_clear()
    np.testing.assert_array_equal(positions(names, 5, 7), first)
    later = positions(components('random', num_random=3, random_seed=1), 5, 7)
    np.testing.assert_array_equal(first[1:], later[:2])
    assert all((first[i] != first[j]).any() for i in range(3) for j in range(i))


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(geometry='curvs'), "geometry: got 'curvs'; choose from curves, raster, manhattan, random"),
        (dict(curves='snake,hilbrt'), 'hilbrt'),
        (dict(curves=[]), 'curves: got none'),
        (dict(curves=()), 'curves: got none'),
        (dict(curves=''), 'curve'),
        (dict(curves='snake,snake'), 'each may be named once'),
        (dict(geometry='raster', curves='snake'), "curves: got 'snake' with geometry='raster'"),
        (dict(geometry='random', num_random=0), 'num_random: got 0'),
        (dict(geometry='random', random_seed=-1), 'random_seed: got -1'),
        (dict(geometry='random', random_seed=2**32 - 7), 'random_seed: got 4294967289'),
    ],
)
def test_refusals_name_the_setting(arguments, message):
    with pytest.raises(ValueError) as error:
        components(**arguments)
    assert message in str(error.value)


def as_tensor(height, width, device='cpu'):
    return grid_positions('snake,manhattan', height, width, torch.empty(0, device=device))


def test_tensor_equals_the_array_and_is_the_callers_own():
    expected = torch.tensor(positions(('snake', 'manhattan'), 4, 6))
    tensor = as_tensor(4, 6)
    assert tensor.dtype == torch.int64
    assert torch.equal(tensor, expected)
    tensor.zero_()
    assert torch.equal(as_tensor(4, 6), expected)


def test_grids_with_as_many_patches_differ():
    assert not torch.equal(as_tensor(8, 18), as_tensor(12, 12))
    assert torch.equal(as_tensor(8, 18), torch.tensor(positions(('snake', 'manhattan'), 8, 18)))


def test_cache_is_not_poisoned_by_inference_mode_or_the_meta_device():
    positions.cache_clear()
    with torch.inference_mode():
        as_tensor(3, 11)
    with torch.device('meta'):
        assert as_tensor(3, 11, 'meta').is_meta
        assert not as_tensor(3, 11, 'cpu').is_meta
    tensor = as_tensor(3, 11)
    assert not tensor.is_inference() and tensor.device.type == 'cpu'
    assert torch.equal(tensor, torch.tensor(positions(('snake', 'manhattan'), 3, 11)))
    rate = torch.ones((), requires_grad=True)
    (rate * tensor).sum().backward()  # an inference tensor could not be saved for backward
    assert rate.grad == tensor.sum()


def test_operator_gives_the_same_positions():
    """What compilers, TorchScript and exports with dynamic sizes call."""
    for names in ('snake,hilbert_T', 'manhattan'):
        tensor = torch.ops.violin_timm.grid_positions(names, 4, 6)
        assert torch.equal(tensor, torch.tensor(positions(tuple(names.split(',')), 4, 6)))
    torch.library.opcheck(torch.ops.violin_timm.grid_positions.default, ('snake,manhattan', 3, 5))
