"""The settings of a Violin's masks, in one checked value that models, attention layers and plugs share."""

from dataclasses import dataclass, fields
from typing import Any, Dict, Optional, Sequence, Tuple, Union

from .geometry import components
from .strategies import ALPHA_ON, STRATEGIES

__all__ = ['MaskSettings']

_CHOICES = {
    'mask': ('learned', 'fixed', 'none'),
    'alpha': ('learned', 'none'),
    'mask_init': ('pretrain', 'finetune', 'none'),
    'curve_weights': ('mean', 'learned'),
    'strategy': tuple(STRATEGIES),
    'alpha_on': ALPHA_ON,
}


@dataclass(frozen=True)
class MaskSettings:
    """Where distances come from, where decays come from, and how the mask meets the scores.

    Args:
        mask: ``learned`` decays, ``fixed`` ones (gamma constant, paper E.4), or ``none``.
        alpha: ``learned`` per-head scale of the logits, or ``none`` (1). Independent of `mask`.
        geometry: ``curves``, ``raster``, ``manhattan`` or ``random``; see `violin_timm.geometry`.
        curves: Names in place of the eight default curves; a sequence or a comma-separated string.
        num_random: Number of permutations of ``geometry='random'``.
        random_seed: Seed of the first of them.
        strategy: How mask and scores meet; see `violin_timm.strategies`.
        alpha_on: ``mask`` as in the authors' code, or ``scores`` as the paper writes it.
        curve_weights: The ``mean`` over curves, or per-head weights, ``learned`` (softmax, equal at first).
        mask_init: ``pretrain`` (beta ~ U(5, 9), alpha ~ N(0, 0.5)), ``finetune`` (U(15, 20), N(1, 0.01)) or ``none``
            (N(0, 0.5) both: the paper's ablation). Default: finetune when plain weights are loaded, else pretrain.
        beta_range: Bounds of the uniform draw of beta in place of those; not for ``mask_init='none'``.
        beta_std: Deviation of beta for ``mask_init='none'``.
        alpha_mean: Mean of alpha in place of those.
        alpha_std: Deviation of alpha in place of those.
        gamma: Decay per step of ``mask='fixed'``: 0.9996 in the paper, 0.996 in the authors' code.

    Raises:
        ValueError: On a value that is unknown, out of range, or that the other settings leave without effect.
    """

    mask: str = 'learned'
    alpha: str = 'learned'
    geometry: str = 'curves'
    curves: Union[str, Sequence[str], None] = None
    num_random: int = 8
    random_seed: int = 0
    strategy: str = 'mul_v1'
    alpha_on: str = 'mask'
    curve_weights: str = 'mean'
    mask_init: Optional[str] = None
    beta_range: Optional[Tuple[float, float]] = None
    beta_std: Optional[float] = None
    alpha_mean: Optional[float] = None
    alpha_std: Optional[float] = None
    gamma: float = 0.9996

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == 'mask_init' and value is None):
                raise ValueError(f'{name}: got {value!r}; choose from {", ".join(choices)}')
        components(self.geometry, self.curves, self.num_random, self.random_seed)
        self._check_ranges()
        self._check_idle()

    def _check_ranges(self) -> None:
        if self.beta_range is not None:
            low, high = self.beta_range
            if not low <= high:
                raise ValueError(f'beta_range: got {self.beta_range!r}; the first bound must not exceed the second')
        for name in ('beta_std', 'alpha_std'):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f'{name}: got {value!r}; a deviation is at least 0')
        if not 0 < self.gamma < 1:
            raise ValueError(f'gamma: got {self.gamma!r}; a decay lies between 0 and 1, both excluded')

    def _check_idle(self) -> None:
        """Refuse what would be ignored: an ablation that ran without its factor is worse than one that did not run."""
        if self.mask == 'none':
            self._refuse("mask='none'", 'geometry', 'curves', 'strategy', 'alpha_on', 'curve_weights')
        if self.mask != 'learned':
            self._refuse(f'mask={self.mask!r}', 'beta_range', 'beta_std')
        if self.mask != 'fixed':
            self._refuse(f'mask={self.mask!r}', 'gamma')
        if self.alpha == 'none':
            self._refuse("alpha='none'", 'alpha_mean', 'alpha_std', 'alpha_on')
        if self.geometry != 'random':
            self._refuse(f'geometry={self.geometry!r}', 'num_random', 'random_seed')
        self._refuse(f'mask_init={self.mask_init!r}', 'beta_range' if self.mask_init == 'none' else 'beta_std')

    def _refuse(self, cause: str, *names: str) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in names and value != field.default:
                raise ValueError(f'{field.name}: got {value!r}, which has no effect with {cause}')

    @classmethod
    def pop_from(cls, kwargs: Dict[str, Any]) -> 'MaskSettings':
        """Take the settings out of a model's keyword arguments."""
        return cls(**{f.name: kwargs.pop(f.name) for f in fields(cls) if f.name in kwargs})

    @property
    def components(self) -> Tuple[str, ...]:
        """Names of the curves, or other distances, over which the mask is averaged."""
        return components(self.geometry, self.curves, self.num_random, self.random_seed)

    def beta_uniform(self) -> Optional[Tuple[float, float]]:
        """Bounds of beta's uniform draw, or None where it is normal."""
        if self.mask_init == 'none':
            return None
        return self.beta_range or {'finetune': (15.0, 20.0)}.get(self.mask_init, (5.0, 9.0))

    def alpha_normal(self) -> Tuple[float, float]:
        """Mean and deviation of alpha's draw."""
        mean, std = {'finetune': (1.0, 0.01)}.get(self.mask_init, (0.0, 0.5))
        return (mean if self.alpha_mean is None else self.alpha_mean, std if self.alpha_std is None else self.alpha_std)
