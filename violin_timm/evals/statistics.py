"""Numbers over seeds: mean and deviation of one arm, and the paired difference of two with its t interval."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Hashable, Mapping, Sequence

__all__ = ['Difference', 'Summary', 'paired_difference', 'require_scipy', 'summarise', 't_quantile']


@dataclass(frozen=True)
class Summary:
    """Values of one arm.

    Attributes:
        count: Number of values.
        mean: Their mean.
        std: Their standard deviation, with `count - 1` below the fraction; None for one value.
        min: The smallest.
    """

    count: int
    mean: float
    std: float | None
    min: float


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences, and its confidence interval.

    Attributes:
        pairs: Number of pairs.
        mean: Mean of the differences.
        low: Lower bound of the interval; None for one pair, which says nothing about the spread.
        high: Upper bound.
    """

    pairs: int
    mean: float
    low: float | None
    high: float | None


def require_scipy() -> None:
    """Check for scipy before work is done that ends in an interval.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import scipy.special  # noqa: F401
    except ImportError as err:
        raise ImportError("t intervals need scipy, which is not installed; pip install 'violin-timm[sweep]'") from err


def t_quantile(probability: float, degrees: int) -> float:
    """The value below which a Student's t with `degrees` degrees of freedom lies with `probability`."""
    require_scipy()
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def summarise(values: Sequence[float]) -> Summary:
    """Mean, deviation and minimum.

    Raises:
        ValueError: There is no value.
    """
    if not values:
        raise ValueError('values: got none; a mean needs at least one')
    return Summary(len(values), float(statistics.mean(values)), _deviation(values), min(values))


def paired_difference(
    arm: Mapping[Hashable, float], baseline: Mapping[Hashable, float], level: float = 0.95
) -> Difference | None:
    """Mean of `arm - baseline` over the keys (seeds) both have, with a Student's t interval.

    The interval is mean +- t * s / sqrt(n), s the deviation of the n differences and t the quantile with n - 1 degrees
    of freedom: what the seeds share cancels, and none of them counts twice.

    Args:
        arm: Values by seed.
        baseline: Values by seed.
        level: Coverage of the interval.

    Returns:
        None where no seed is in both.
    """
    if not 0 < level < 1:
        raise ValueError(f'level: got {level!r}; a coverage lies between 0 and 1, both excluded')
    differences = [arm[seed] - baseline[seed] for seed in arm if seed in baseline]
    if not differences:
        return None
    count, mean, std = len(differences), float(statistics.mean(differences)), _deviation(differences)
    if std is None:
        return Difference(count, mean, None, None)
    half = t_quantile((1 + level) / 2, count - 1) * std / math.sqrt(count)
    return Difference(count, mean, mean - half, mean + half)


def _deviation(values: Sequence[float]) -> float | None:
    """Exact up to the last rounding, so that equal values have none."""
    return float(statistics.stdev(values)) if len(values) > 1 else None
