"""records/stats.py against scipy: 1e-6 everywhere, and relative 1e-6 in the tails that p-values live in."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

scipy_stats = pytest.importorskip("scipy.stats")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "records"))
import stats  # noqa: E402

pytestmark = pytest.mark.fast

SIZES = [2, 3, 5, 8, 20, 80]


def samples(n, seed=0, centre=3.28, spread=0.0015):
    return (centre + spread * np.random.default_rng(seed).standard_normal(n)).tolist()


@pytest.mark.parametrize("df", [1, 1.5, 2, 3.7, 10, 79, 1000, 20_000])
@pytest.mark.parametrize("t", [-40, -9.9, -2.5, -0.3, 0, 1e-4, 0.7, 3, 12])
def test_t_distribution(t, df):
    assert stats.t_cdf(t, df) == pytest.approx(scipy_stats.t.cdf(t, df), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("df", [1, 2, 4.3, 12, 500])
@pytest.mark.parametrize("probability", [0.005, 0.01, 0.3, 0.5, 0.9, 0.995, 0.9995])
def test_t_quantile(probability, df):
    assert stats.t_quantile(probability, df) == pytest.approx(scipy_stats.t.ppf(probability, df), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("target", [3.2785, 3.28, 3.2830])
def test_one_sided_p(n, target):
    values = samples(n, n)
    assert stats.p_below(values, target) == pytest.approx(scipy_stats.ttest_1samp(values, target, alternative="less").pvalue, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("m", SIZES)
def test_welch_interval(n, m):
    a, b = samples(n, 1), samples(m, 2, 3.279, 0.003)
    expected = scipy_stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.99)
    found = stats.welch(a, b)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-6)
    assert found.difference == pytest.approx(np.mean(a) - np.mean(b), abs=1e-12)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_paired_interval(n, confidence):
    a, b = samples(n, 3, 130, 0.2), samples(n, 4, 131, 0.2)
    expected = scipy_stats.ttest_rel(a, b).confidence_interval(confidence)
    found = stats.paired(a, b, confidence)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-6)
    assert stats.paired(a, b) == stats.paired(a, b, 0.99), "what verify says it asks"


@pytest.mark.parametrize("n", [2, 3, 5, 12, 60])
@pytest.mark.parametrize("effect", [0.0, 0.3, 1.0, -2.5, 6.0])
@pytest.mark.parametrize("arms", [1, 2])
@pytest.mark.parametrize("alpha", [0.01, 0.05])
def test_power(n, effect, arms, alpha):
    df = arms * (n - 1)
    shift, critical = abs(effect) * math.sqrt(n / arms), scipy_stats.t.ppf(1 - alpha / 2, df)
    other_side = np.nan_to_num(scipy_stats.nct.cdf(-critical, df, shift))  # scipy gives nan where it is practically 0
    expected = scipy_stats.nct.sf(critical, df, shift) + other_side if effect else alpha
    assert stats.power(effect, n, alpha, arms) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("effect, arms", [(0.2, 2), (0.8, 2), (1.0, 1), (5.0, 2)])
def test_runs_needed_is_the_smallest(effect, arms):
    n = stats.runs_needed(effect, samples=arms)
    assert stats.power(effect, n, samples=arms) >= 0.9 > stats.power(effect, n - 1, samples=arms)


def test_too_few_values_prove_nothing():
    assert math.isnan(stats.p_below([3.2], 3.28)) and math.isnan(stats.p_below([3.2, 3.2], 3.28)) and math.isnan(stats.sd([1.0]))
    for interval in (stats.welch([1.0], [2.0, 3.0]), stats.welch([1.0, 1.0], [2.0, 2.0]), stats.paired([1.0], [2.0]), stats.paired([1.0, 2.0], [2.0, 3.0])):
        assert interval.low == -math.inf and interval.high == math.inf and interval.contains_zero
    assert stats.runs_needed(0.0) is None and stats.runs_needed(1e-4) is None and stats.runs_needed(math.nan) is None
    with pytest.raises(ValueError):
        stats.paired([1.0, 2.0], [1.0])


def test_a_plan_fixed_beforehand_keeps_its_level():
    """Under the null a fixed n accepts 1 %; stopping at the first success would accept several times that."""
    draws = np.random.default_rng(5).standard_normal((1500, 12))
    fixed = np.mean([stats.p_below(row.tolist(), 0.0) < 0.01 for row in draws])
    stopped = np.mean([any(stats.p_below(row[:n].tolist(), 0.0) < 0.01 for n in range(2, 13)) for row in draws])
    assert fixed < 0.02 < stopped
