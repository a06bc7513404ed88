"""Masks of all layers of a model for one grid: built together, and kept while nothing that they depend on changed."""

import threading
from collections import OrderedDict
from typing import Hashable, List, Optional, Sequence, Tuple

import torch

from ..attention import ViolinAttention
from ..masks import Pairs

__all__ = ['MaskBank']

MAX_BYTES = 2**30  # of masks of one grid; beyond it, every layer builds its own and lets go of it
MAX_GRIDS = 4


class MaskBank:
    """Builds the masks of all layers once per forward, and at inference once per grid.

    A kept mask is used only while the *values* of all decay parameters are those it was built from: optimisers, EMA and
    DINO teachers write in place and through ``.data``, which leaves version counters alone, so values are what is
    compared: about a thousand numbers, in one comparison for all layers. Nothing is kept while a decay parameter needs
    a gradient. A bank is no part of a model's state: it is neither saved nor copied with the model.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Tuple[torch.Tensor, List[torch.Tensor]]] = OrderedDict()

    def __deepcopy__(self, memo) -> 'MaskBank':
        return MaskBank()

    def __reduce__(self):
        return MaskBank, ()

    def get(
        self,
        layers: Sequence[ViolinAttention],
        positions: torch.Tensor,
        num_prefix: int,
        grid: Hashable,
    ) -> List[torch.Tensor]:
        """Masks ``[H, P + N, P + N]`` of all layers; none if they would be too large, or parameters lie elsewhere.

        Args:
            layers: Attention layers of one model.
            positions: ``[C, N, D]`` of the grid.
            num_prefix: Number P of prefix tokens.
            grid: What identifies the positions: rows, columns and names of curves.
        """
        parameters = self._parameters(layers, positions)
        length = num_prefix + positions.shape[1]
        if parameters is None or 4 * length**2 * sum(a.num_heads for a in layers) > MAX_BYTES:
            return []
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            return _build(layers, positions, num_prefix)
        # ordinary tensors, also when made in inference mode: training may follow, with the mask frozen
        with torch.inference_mode(False), torch.no_grad():
            values = torch.cat([p.detach().flatten() for p in parameters])
            key = (grid, num_prefix, len(layers), values.device, values.dtype)
            with self._lock:
                kept = self._kept.get(key)
            if kept is None or not torch.equal(kept[0], values):
                kept = values, _build(layers, positions, num_prefix)
                with self._lock:
                    self._kept[key] = kept
                    self._kept.move_to_end(key)
                    while len(self._kept) > MAX_GRIDS:
                        self._kept.popitem(last=False)
            return kept[1]

    @staticmethod
    def _parameters(layers: Sequence[ViolinAttention], positions: torch.Tensor) -> Optional[List[torch.Tensor]]:
        """All decay parameters, or None where they are not whole here (sharded, or on the meta device)."""
        found = [p for a in layers for p in (a.decay.beta, a.decay.alpha, a.decay.curve_logits) if p is not None]
        whole = all(type(p) in (torch.Tensor, torch.nn.Parameter) and p.numel() and not p.is_meta for p in found)
        return found if whole and len({p.device for p in found}) == 1 else None


def _build(layers: Sequence[ViolinAttention], positions: torch.Tensor, num_prefix: int) -> List[torch.Tensor]:
    pairs = Pairs.of(positions)
    return [a.decay(positions, num_prefix, a.alpha_on_mask, pairs) for a in layers]
