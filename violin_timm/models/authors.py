"""The authors' checkpoint layout (LIONS-EPFL/VIOLIN), translated into ours. No other file knows their names.

Theirs are timm's keys, with ``attn.ai_list.K`` for beta of curve K over heads, or one stacked ``attn.ai_list [C, H]``
of gamma itself where the mask is fixed, and ``attn.normalize`` for alpha. Their ``zigzag`` is our ``zigzag_T``,
and theirs ``zigzag_T`` our ``zigzag``.
"""

import re
from typing import Dict, Tuple

import torch

__all__ = ['is_authors', 'to_native']

# the K-th entry of ai_list, by our names
AUTHORS_CURVES = ('snake', 'snake_T', 'hilbert', 'hilbert_T', 'peano', 'peano_T', 'zigzag_T', 'zigzag')

_ALPHA = '.attn.normalize'
_BETA = re.compile(r'(.*)\.attn\.ai_list(?:\.(\d+))?$')


def is_authors(state_dict: Dict[str, torch.Tensor]) -> bool:
    """Whether a state dict holds masks in the authors' layout."""
    return any(_BETA.match(k) or k.endswith(_ALPHA) for k in state_dict)


def to_native(state_dict: Dict[str, torch.Tensor], components: Tuple[str, ...]) -> Dict[str, torch.Tensor]:
    """Rename the authors' mask parameters to ours, with curves in the order of a model's components.

    Args:
        state_dict: Flat state dict in the authors' layout.
        components: Curves of the model that is to take it; a permutation of the eight default ones.

    Raises:
        ValueError: If the model has other curves than the eight, or the file's number of curves is not eight.
    """
    if set(components) != set(AUTHORS_CURVES):
        raise ValueError(
            f'curves: got {", ".join(components) or "none"}; the file has masks of {", ".join(AUTHORS_CURVES)}, '
            f"so the model needs these (the default) and mask='learned' or 'fixed'"
        )
    columns = [AUTHORS_CURVES.index(name) for name in components]
    native, betas = {}, {}
    for key, value in state_dict.items():
        match = _BETA.match(key)
        if match and match[2] is None:  # stacked gamma of a fixed mask; in float64 until the logit is taken
            betas[match[1]] = dict(enumerate(torch.logit(value.double()).to(value.dtype)))
        elif match:
            betas.setdefault(match[1], {})[int(match[2])] = value
        elif key.endswith(_ALPHA):
            native[key[: -len(_ALPHA)] + '.attn.decay.alpha'] = value
        else:
            native[key] = value
    for prefix, beta in betas.items():
        if sorted(beta) != list(range(len(AUTHORS_CURVES))):
            raise ValueError(
                f'{prefix}.attn.ai_list: got curves {sorted(beta)}; allowed are all of 0 to {len(AUTHORS_CURVES) - 1}'
            )
        native[f'{prefix}.attn.decay.beta'] = torch.stack([beta[c] for c in columns], dim=1)
    return native
