"""Means, deviations and paired t intervals, by hand and against scipy.stats."""

import math
import sys

import numpy as np
import pytest
from scipy import stats

from violin_timm.evals.statistics import paired_difference, require_scipy, summarise, t_quantile


def test_summary_by_hand():
    summary = summarise([2.0, 4.0, 9.0])
    assert (summary.count, summary.mean, summary.min) == (3, 5.0, 2.0)
    assert summary.std == pytest.approx(math.sqrt((9 + 1 + 16) / 2))


def test_one_value_has_no_deviation_and_equal_values_have_none():
    assert summarise([3.5]).std is None
    assert summarise([7.4, 7.4, 7.4]).std == 0


def test_no_value_is_refused():
    with pytest.raises(ValueError, match='got none'):
        summarise([])


def test_interval_by_hand():
    """Differences 1, 2, 3: mean 2, deviation 1, and t(0.975; 2) = 4.302653 from any table."""
    difference = paired_difference({0: 11.0, 1: 22.0, 2: 33.0}, {0: 10.0, 1: 20.0, 2: 30.0})
    half = 4.302653 / math.sqrt(3)
    assert (difference.pairs, difference.mean) == (3, 2.0)
    assert (difference.low, difference.high) == pytest.approx((2 - half, 2 + half), abs=1e-6)


@pytest.mark.parametrize('count', [2, 5, 30])
@pytest.mark.parametrize('level', [0.9, 0.95])
def test_interval_against_scipy(count, level):
    generator = np.random.default_rng(count)
    one, other = generator.normal(80, 3, (2, count))
    ours = paired_difference(dict(enumerate(one)), dict(enumerate(other)), level)
    theirs = stats.ttest_rel(one, other).confidence_interval(level)
    assert ours.mean == pytest.approx((one - other).mean())
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)


def test_only_shared_seeds_are_pairs():
    difference = paired_difference({0: 1.0, 1: 5.0, 7: 100.0}, {1: 4.0, 0: 2.0, 8: -100.0})
    assert (difference.pairs, difference.mean) == (2, 0.0)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_one_pair_has_no_interval():
    difference = paired_difference({0: 3.0}, {0: 1.0})
    assert (difference.pairs, difference.mean, difference.low, difference.high) == (1, 2.0, None, None)


def test_level_out_of_range():
    with pytest.raises(ValueError, match='level: got 95'):
        paired_difference({0: 1.0}, {0: 1.0}, 95)


def test_quantile():
    assert t_quantile(0.975, 4) == pytest.approx(2.776445, abs=1e-6)


def test_missing_scipy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, 'scipy.special', None)
    with pytest.raises(ImportError, match=r'violin-timm\[sweep\]'):
        require_scipy()
