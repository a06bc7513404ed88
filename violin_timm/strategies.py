"""How a mask meets the attention scores: by which operation, and before or after the softmax.

With scaled scores ``A``, mask ``M`` and scale ``a`` (alpha), and ``S`` the softmax over keys (names and formulas of the
authors' code; paper, appendix E):

    mul_v1        S(A * aM)            mul_after_sm   S(A) * aM
    mul_v2        S(A * (1 + aM))      add_after_sm   S(A) + aM
    add_v1        S(A + aM)

The paper writes alpha into the scores instead (``S(aA + M)`` and so on), which differs in all but the first; that form
is ``alpha_on='scores'``. To add a strategy, give it a line in `STRATEGIES`, and `combine` its operation if it is new.
"""

from typing import Dict, NamedTuple

import torch

__all__ = ['ALPHA_ON', 'STRATEGIES', 'Strategy', 'combine']

ALPHA_ON = ('mask', 'scores')


class Strategy(NamedTuple):
    """An operation of `combine`, and whether it acts on probabilities instead of on logits."""

    operation: str
    after_softmax: bool = False


STRATEGIES: Dict[str, Strategy] = {
    'mul_v1': Strategy('mul'),
    'mul_v2': Strategy('mul_one_plus'),
    'add_v1': Strategy('add'),
    'mul_after_sm': Strategy('mul', after_softmax=True),
    'add_after_sm': Strategy('add', after_softmax=True),
}


def combine(operation: str, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Apply an operation to scores (or probabilities) ``[B, H, L, L]`` and a mask ``[H, L, L]``."""
    if operation == 'mul':
        return scores * mask
    elif operation == 'mul_one_plus':
        return scores * (mask + 1.0)
    elif operation == 'add':
        return scores + mask
    else:
        raise ValueError('operation: got ' + operation + '; choose from mul, mul_one_plus, add')
