"""Visiting orders of space-filling curves on any rectangle of patches.

A grid of ``height x width`` patches is flattened row-major: patch ``i = y * width + x``. A curve is a function
``(height, width) -> order`` with ``order[t]`` the patch visited at step ``t``. To add one, write that function and
give it a line in `CURVES`; its transpose (``NAME_T``), its ranks and its tests follow by themselves.

Names are those of the VIOLIN paper (arXiv 2606.14757, section 3 and appendix B). Two of them need care: ``peano`` is
Morton (Z-) order, not Peano's ternary curve, and ``zigzag`` is JPEG's (the authors' code calls that one ``zigzag_T``).
"""

import difflib
import re
from functools import lru_cache
from typing import Callable, Dict, Iterator, Tuple

import numpy as np

__all__ = ['CURVES', 'curve_order', 'curve_ranks']

Curve = Callable[[int, int], np.ndarray]


def _raster(height: int, width: int) -> np.ndarray:
    """Row-major."""
    return np.arange(height * width)


def _snake(height: int, width: int) -> np.ndarray:
    """Row by row, every odd row reversed."""
    rows = np.arange(height * width).reshape(height, width)
    rows[1::2] = rows[1::2, ::-1].copy()
    return rows.reshape(-1)


def _zigzag(height: int, width: int) -> np.ndarray:
    """Anti-diagonals in alternating directions, the first one downwards, as in JPEG."""
    y, x = np.divmod(np.arange(height * width), width)
    diagonal = y + x
    return np.lexsort((np.where(diagonal % 2 == 1, y, -y), diagonal))


def _peano(height: int, width: int) -> np.ndarray:
    """Morton order: sorted by the interleaved bits of row and column, the column's bit lowest."""
    y, x = np.divmod(np.arange(height * width), width)
    code = np.zeros_like(x)
    for bit in range(max(height, width).bit_length()):
        code |= ((x >> bit & 1) << 2 * bit) | ((y >> bit & 1) << 2 * bit + 1)
    return np.argsort(code, kind='stable')


def _hilbert(height: int, width: int) -> np.ndarray:
    """Generalised Hilbert curve ("gilbert", J. Cerveny): neighbours stay adjacent, but for one step on odd sizes."""
    right, down = 1, width
    along, across = ((right, width), (down, height)) if width >= height else ((down, height), (right, width))
    return np.concatenate(list(_gilbert(0, *along, *across)))


def _gilbert(start: int, a: int, length_a: int, b: int, length_b: int) -> Iterator[np.ndarray]:
    """Fill the rectangle at patch `start` that spans `length_a` steps of index stride `a` and `length_b` of `b`.

    Signs of strides are directions; a half is rounded towards the origin of the grid, whichever way it is walked.
    """
    if length_b == 1:
        yield start + a * np.arange(length_a)
        return
    if length_a == 1:
        yield start + b * np.arange(length_b)
        return
    half_a = length_a // 2 if a > 0 else (length_a + 1) // 2
    half_b = length_b // 2 if b > 0 else (length_b + 1) // 2
    if 2 * length_a > 3 * length_b:  # long: two pieces side by side
        if half_a % 2 and length_a > 2:
            half_a += 1  # an even piece ends where the next one begins
        yield from _gilbert(start, a, half_a, b, length_b)
        yield from _gilbert(start + a * half_a, a, length_a - half_a, b, length_b)
        return
    if half_b % 2 and length_b > 2:
        half_b += 1
    yield from _gilbert(start, b, half_b, a, half_a)
    yield from _gilbert(start + b * half_b, a, length_a, b, length_b - half_b)
    corner = start + a * (length_a - 1) + b * (half_b - 1)
    yield from _gilbert(corner, -b, half_b, -a, length_a - half_a)


def _random(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A fixed permutation, drawn from `seed` alone: the paper's negative control."""
    return np.random.RandomState(seed).permutation(height * width)


CURVES: Dict[str, Curve] = {
    'snake': _snake,
    'zigzag': _zigzag,
    'hilbert': _hilbert,
    'peano': _peano,
    'raster': _raster,
    'random': _random,  # 'random' is seed 0, 'random7' is seed 7
}


def _resolve(name: str) -> Tuple[Curve, bool]:
    """The curve called `name` and whether it is to be transposed."""
    family = name[:-2] if name.endswith('_T') else name
    if family in CURVES:
        return CURVES[family], family != name
    seeded = re.fullmatch(r'random(\d+)', family)
    if seeded:
        return (lambda height, width: _random(height, width, int(seeded[1]))), family != name
    close = difflib.get_close_matches(name, [*CURVES, *(f'{c}_T' for c in CURVES)], n=1)
    hint = f' (did you mean {close[0]!r}?)' if close else ''
    raise ValueError(
        f'curve: got {name!r}{hint}; choose from {", ".join(CURVES)}, random0, random1, ..., '
        f'each also with the suffix _T for its transpose'
    )


def check_curve(name: str) -> str:
    """Return `name` if a curve is called so, else raise a ValueError that lists what is allowed."""
    _resolve(name)
    return name


@lru_cache(maxsize=1024)
def _order(name: str, height: int, width: int) -> np.ndarray:
    curve, transposed = _resolve(name)
    if transposed:  # the curve of the swapped grid, mapped back
        row, column = np.divmod(curve(width, height), height)
        order = column * width + row
    else:
        order = curve(height, width)
    order = order.astype(np.int64)
    order.setflags(write=False)  # shared by all callers
    return order


def curve_order(name: str, height: int, width: int) -> np.ndarray:
    """Patches in the order in which a curve visits them.

    Args:
        name: A key of `CURVES`, ``random<seed>``, or either with the suffix ``_T`` for the transposed curve, which is
            the curve of the swapped ``width x height`` grid, mapped back.
        height: Rows of the grid, in patches.
        width: Columns of the grid, in patches.

    Returns:
        int64 array ``[height * width]``, step -> patch, read-only.

    Raises:
        ValueError: If no curve has that name or a side is not a positive integer.
    """
    for side, size in (('height', height), ('width', width)):
        if int(size) != size or size < 1:
            raise ValueError(f'{side}: got {size!r}; a grid of patches needs a positive integer')
    return _order(name, int(height), int(width))


def curve_ranks(name: str, height: int, width: int) -> np.ndarray:
    """Step at which a curve visits each patch: the inverse of `curve_order`.

    Returns:
        int64 array ``[height * width]``, patch -> step, read-only.
    """
    order = curve_order(name, height, width)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    ranks.setflags(write=False)
    return ranks
