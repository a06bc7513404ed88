"""Which distance between patches: positions along curves, or on the plane.

Whatever the geometry, a component ``c`` gives every patch integer coordinates, and the distance of two patches is the
L1 norm of their difference, ``d_c(i, j) = sum_k |p_c[i, k] - p_c[j, k]|``. A curve is one coordinate (its ranks);
Manhattan distance is two (row and column). So one array ``[C, N, D]`` describes all of them.

Arrays are cached per grid in NumPy and made into tensors where they are used: a cached tensor that was created under
``torch.inference_mode`` or ``torch.device('meta')`` would break whatever comes later.
"""

from functools import lru_cache
from typing import Dict, Sequence, Tuple, Union

import numpy as np
import torch
from timm.layers import register_notrace_function

from .curves import check_curve, curve_ranks

__all__ = ['DEFAULT_CURVES', 'GEOMETRIES', 'components', 'grid_positions', 'positions']

DEFAULT_CURVES = ('snake', 'snake_T', 'zigzag', 'zigzag_T', 'hilbert', 'hilbert_T', 'peano', 'peano_T')
MANHATTAN = 'manhattan'

# Geometry -> its components; 'random' takes their number and first seed from the settings.
GEOMETRIES: Dict[str, Tuple[str, ...]] = {
    'curves': DEFAULT_CURVES,
    'raster': ('raster',),
    'manhattan': (MANHATTAN,),
    'random': ('random',),
}


def components(
    geometry: str = 'curves',
    curves: Union[str, Sequence[str], None] = None,
    num_random: int = 8,
    random_seed: int = 0,
) -> Tuple[str, ...]:
    """Names of the components of a geometry, checked.

    Args:
        geometry: A key of `GEOMETRIES`.
        curves: Curve names in place of the eight default ones, as a sequence or a comma-separated string; only for
            ``geometry='curves'``.
        num_random: Number of permutations of ``geometry='random'``.
        random_seed: Seed of the first of them; the others count on from it.

    Raises:
        ValueError: On an unknown geometry or curve, a number out of range, or settings that the geometry does not use.
    """
    if geometry not in GEOMETRIES:
        raise ValueError(f'geometry: got {geometry!r}; choose from {", ".join(GEOMETRIES)}')
    if curves is None:
        if geometry == 'random':
            if num_random < 1:
                raise ValueError(f'num_random: got {num_random!r}; at least one permutation is needed')
            if not 0 <= random_seed <= 2**32 - num_random:
                raise ValueError(f'random_seed: got {random_seed!r}; NumPy allows seeds from 0 to {2**32 - 1}')
            return tuple(f'random{random_seed + i}' for i in range(num_random))
        return GEOMETRIES[geometry]
    if geometry != 'curves':
        raise ValueError(f"curves: got {curves!r} with geometry={geometry!r}; only geometry='curves' takes curves")
    names = tuple(c.strip() for c in curves.split(',')) if isinstance(curves, str) else tuple(curves)
    if not names:
        raise ValueError("curves: got none; name at least one, or switch the mask off with mask='none'")
    if len(set(names)) != len(names):
        raise ValueError(f'curves: got {names}; each may be named once')
    return tuple(name if name == MANHATTAN else check_curve(name) for name in names)


@lru_cache(maxsize=256)
def positions(names: Tuple[str, ...], height: int, width: int) -> np.ndarray:
    """Coordinates of every patch in every component.

    Args:
        names: Components, as `components` returns them.
        height: Rows of the grid, in patches.
        width: Columns of the grid, in patches.

    Returns:
        int64 array ``[C, height * width, D]``, read-only; D is 2 if Manhattan distance is among the components, else 1.
    """
    array = np.zeros((len(names), height * width, 1 + (MANHATTAN in names)), dtype=np.int64)
    for component, name in zip(array, names):
        if name == MANHATTAN:
            component[:, 0], component[:, 1] = np.divmod(np.arange(height * width), width)
        else:
            component[:, 0] = curve_ranks(name, height, width)
    array.setflags(write=False)
    return array


@torch.library.custom_op('violin_timm::grid_positions', mutates_args=())
def _grid_positions_op(names: str, height: int, width: int) -> torch.Tensor:
    """`positions` as an operator: what a compiler, TorchScript or an export with dynamic sizes cannot look into."""
    return torch.tensor(positions(tuple(names.split(',')), height, width), device='cpu')


@_grid_positions_op.register_fake
def _(names: str, height: int, width: int) -> torch.Tensor:
    listed = names.split(',')
    return torch.empty(len(listed), height * width, 1 + (MANHATTAN in listed), dtype=torch.int64, device='cpu')


@torch.fx.wrap
@register_notrace_function
def grid_positions(names: str, height: int, width: int, like: torch.Tensor) -> torch.Tensor:
    """`positions` as a tensor on the device of `like`.

    Args:
        names: Components, joined by commas.
        height: Rows of the grid, in patches.
        width: Columns of the grid, in patches.
        like: Any tensor on the device where the positions are needed.

    Returns:
        int64 tensor ``[C, height * width, D]``.
    """
    if torch.jit.is_scripting():
        return torch.ops.violin_timm.grid_positions(names, height, width).to(like.device)
    else:
        return _eager_grid_positions(names, height, width, like)


@torch.jit.unused
def _eager_grid_positions(names: str, height: int, width: int, like: torch.Tensor) -> torch.Tensor:
    symbolic = isinstance(height, torch.SymInt) or isinstance(width, torch.SymInt)
    if symbolic or torch.compiler.is_dynamo_compiling():
        return torch.ops.violin_timm.grid_positions(names, height, width).to(like.device)
    # a constant, so that an export of one grid needs no operator of ours
    return torch.tensor(positions(tuple(names.split(',')), int(height), int(width)), device=like.device)
