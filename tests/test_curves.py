"""Every curve of the `CURVES` table, its transpose and its ranks, on any rectangle."""

import json

import numpy as np
import pytest

from violin_timm import CURVES, curve_order, curve_ranks

NAMES = [name + suffix for name in CURVES for suffix in ('', '_T')]
GRIDS = [(h, w) for h in range(1, 10) for w in range(1, 10)] + [(1, 40), (40, 1), (2, 31), (14, 14), (27, 48)]
SEEDED = ('random',)  # whose orders are drawn, not computed


def recorded(golden, name):
    return json.loads(golden(name).read_text())


def swapped(name):
    """The authors' name of one of our curves: they exchange zigzag and its transpose."""
    return {'zigzag': 'zigzag_T', 'zigzag_T': 'zigzag'}.get(name, name)


def test_orders_equal_the_pages(golden):
    grids = recorded(golden, 'curve_orders_page.json')
    assert len(grids) == 11
    for grid, orders in grids.items():
        height, width = map(int, grid.split('x'))
        assert len(orders) == 8
        for name, order in orders.items():
            np.testing.assert_array_equal(curve_order(name, height, width), order, err_msg=f'{name} on {grid}')


def test_ranks_equal_the_authors(golden):
    grids = recorded(golden, 'curve_ranks_authors_square.json')
    assert len(grids) == 8
    for grid, ranks in grids.items():
        side = int(grid.split('x')[0])
        assert len(ranks) == 8
        for name, expected in ranks.items():
            np.testing.assert_array_equal(curve_ranks(swapped(name), side, side), expected, err_msg=f'{name} on {grid}')


@pytest.mark.parametrize('name', NAMES)
def test_is_a_permutation_on_every_rectangle(name):
    for height, width in GRIDS:
        order, ranks = curve_order(name, height, width), curve_ranks(name, height, width)
        everything = np.arange(height * width)
        assert order.dtype == ranks.dtype == np.int64
        np.testing.assert_array_equal(np.sort(order), everything, err_msg=f'{height}x{width}')
        np.testing.assert_array_equal(ranks[order], everything, err_msg=f'{height}x{width}')
        np.testing.assert_array_equal(order[ranks], everything, err_msg=f'{height}x{width}')


@pytest.mark.parametrize('family', CURVES)
def test_transpose_is_the_curve_with_rows_and_columns_exchanged(family):
    """F_T(i, j) = F(j, i), the ranks of the swapped grid mapped back."""
    for height, width in GRIDS:
        plain = curve_ranks(family, width, height).reshape(width, height)
        transposed = curve_ranks(f'{family}_T', height, width).reshape(height, width)
        np.testing.assert_array_equal(transposed, plain.T, err_msg=f'{height}x{width}')


@pytest.mark.parametrize('name', [n for n in NAMES if not n.startswith(SEEDED)])
def test_line_of_patches_is_walked_along(name):
    np.testing.assert_array_equal(curve_order(name, 1, 17), np.arange(17))
    np.testing.assert_array_equal(curve_order(name, 17, 1), np.arange(17))


def steps(name, height, width):
    """Rows and columns walked in every step."""
    y, x = np.divmod(curve_order(name, height, width), width)
    return np.abs(np.diff(y)), np.abs(np.diff(x))


@pytest.mark.parametrize('name', ['hilbert', 'hilbert_T', 'snake', 'snake_T'])
def test_neighbours_on_the_curve_are_neighbours_on_the_grid(name):
    """Hilbert may make one diagonal step, where a side is odd and a corner could not be reached otherwise."""
    for height, width in GRIDS:
        dy, dx = steps(name, height, width)
        longer = dy + dx > 1
        if name.startswith('snake') or not (height % 2 or width % 2):
            assert not longer.any(), f'{height}x{width}'
        assert longer.sum() <= 1, f'{height}x{width}'
        assert (np.maximum(dy, dx) <= 1).all(), f'{height}x{width}'


def test_zigzag_is_jpegs():
    np.testing.assert_array_equal(curve_order('zigzag', 2, 3), [0, 1, 3, 4, 2, 5])
    np.testing.assert_array_equal(curve_order('zigzag', 3, 3), [0, 1, 3, 6, 4, 2, 5, 7, 8])
    for height, width in GRIDS:
        y, x = np.divmod(curve_order('zigzag', height, width), width)
        assert (np.diff(y + x) >= 0).all()


def test_peano_is_morton_order():
    np.testing.assert_array_equal(curve_order('peano', 4, 4), [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15])


def test_raster_is_row_major():
    np.testing.assert_array_equal(curve_order('raster', 3, 5), np.arange(15))
    np.testing.assert_array_equal(curve_order('raster_T', 2, 3), [0, 3, 1, 4, 2, 5])


def test_random_is_numbered_and_repeatable():
    np.testing.assert_array_equal(curve_order('random', 4, 6), curve_order('random0', 4, 6))
    assert (curve_order('random0', 4, 6) != curve_order('random1', 4, 6)).any()
    np.testing.assert_array_equal(curve_order('random12', 4, 6), np.random.RandomState(12).permutation(24))


@pytest.mark.parametrize('name', NAMES)
def test_arrays_are_read_only(name):
    for array in (curve_order(name, 3, 4), curve_ranks(name, 3, 4)):
        with pytest.raises(ValueError, match='read-only'):
            array[0] = 1
    np.testing.assert_array_equal(np.sort(curve_order(name, 3, 4)), np.arange(12))


@pytest.mark.parametrize('name', ['hilbrt', 'snake_t', 'snake_T_T', '', 'random-1', 'randomx', 'manhattan', '_T'])
def test_unknown_name_is_refused_with_the_choices(name):
    for function in (curve_order, curve_ranks):
        with pytest.raises(ValueError, match='choose from') as error:
            function(name, 4, 4)
        assert repr(name) in str(error.value)
        for known in CURVES:
            assert known in str(error.value)


def test_typo_gets_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'hilbert'"):
        curve_order('hilbrt', 4, 4)


@pytest.mark.parametrize(
    'height, width, named',
    [(0, 4, 'height: got 0'), (4, -1, 'width: got -1'), (2.5, 4, r'height: got 2\.5'), (4, 0, 'width: got 0')],
)
def test_side_must_be_a_positive_integer(height, width, named):
    for function in (curve_order, curve_ranks):
        with pytest.raises(ValueError, match=named):
            function('snake', height, width)


def test_a_new_curve_needs_one_line_of_the_table(monkeypatch):
    monkeypatch.setitem(CURVES, 'backwards', lambda height, width: np.arange(height * width)[::-1])
    np.testing.assert_array_equal(curve_order('backwards', 2, 3), [5, 4, 3, 2, 1, 0])
    np.testing.assert_array_equal(curve_order('backwards_T', 2, 3), [5, 2, 4, 1, 3, 0])
    with pytest.raises(ValueError, match='backwards'):
        curve_order('backward', 2, 3)
