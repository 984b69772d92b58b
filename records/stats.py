"""Student's t without scipy: tests, intervals and the number of runs a claim needs. tests/test_records_stats.py holds
it to scipy within 1e-6."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A difference of means and where it lies with the asked confidence; infinite bounds where one run says nothing
    about the spread."""

    difference: float
    low: float
    high: float
    df: float

    @property
    def contains_zero(self) -> bool:
        return self.low <= 0 <= self.high


mean = statistics.fmean


def sd(values: Sequence[float]) -> float:
    """Standard deviation with n - 1; nan for fewer than two values."""
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else math.nan


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised I_x(a, b) by its continued fraction, evaluated with Lentz's method (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges quickly on the other side only
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            c, d = 1 + term / c, 1 / (1 + term * d)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value


def t_cdf(t: float, df: float) -> float:
    """P(T <= t) for Student's t."""
    tail = incomplete_beta(df / 2, 0.5, df / (df + t * t)) / 2
    return tail if t < 0 else 1 - tail


def t_quantile(probability: float, df: float) -> float:
    """The t below which `probability` of Student's distribution lies, by bisection on the tail that keeps its digits.
    """
    if probability > 0.5:
        return -t_quantile(1 - probability, df)
    low, high = -1.0, 0.0
    while t_cdf(low, df) > probability:
        low *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < probability else (low, middle)
    return (low + high) / 2


def noncentral_t_cdf(t: float, df: float, shift: float) -> float:
    """P((Z + shift) / S <= t), Z standard normal, S = sqrt(chi2 / df):

    Phi(t s - shift) integrated over the density of S.
    """
    spread, bend = 1 / math.sqrt(2 * df), shift / t if t else 0.0  # where Phi turns from 0 to 1, within a few 1 / t
    low, high = max(0.0, 1 - 12 * spread), 1 + 12 * spread + 4 / df
    edges = sorted(min(max(edge, low), high) for edge in (low, bend - 8 / abs(t or 1), bend + 8 / abs(t or 1), high))
    nodes, weights = np.polynomial.legendre.leggauss(200)
    total = 0.0
    for left, right in zip(edges, edges[1:]):
        s = (left + right) / 2 + (right - left) / 2 * nodes
        constant = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)
        log_density = constant + (df - 1) * np.log(np.maximum(s, 1e-300)) - df * s * s / 2
        below = np.array([math.erfc((shift - t * x) / math.sqrt(2)) / 2 for x in s])
        total += float((right - left) / 2 * (weights * np.exp(log_density) * below).sum())
    return total


def p_below(values: Sequence[float], target: float) -> float:
    """One-sided one-sample t-test: the chance of a mean this low if the true mean were `target`."""
    spread = sd(values)
    if not spread > 0:  # one value, or equal ones: no evidence about the spread
        return math.nan
    return t_cdf((mean(values) - target) / (spread / math.sqrt(len(values))), len(values) - 1)


def _interval(difference: float, error: float, df: float, confidence: float) -> Interval:
    if not error > 0:
        return Interval(difference, -math.inf, math.inf, df)
    reach = t_quantile((1 + confidence) / 2, df) * error
    return Interval(difference, difference - reach, difference + reach, df)


def welch(a: Sequence[float], b: Sequence[float], confidence: float = 0.99) -> Interval:
    """Interval of mean(a) - mean(b) for independent runs with different spreads (Welch-Satterthwaite)."""
    difference = mean(a) - mean(b)
    if min(len(a), len(b)) < 2:
        return Interval(difference, -math.inf, math.inf, 0)
    va, vb = sd(a) ** 2 / len(a), sd(b) ** 2 / len(b)
    if va + vb == 0:
        return Interval(difference, -math.inf, math.inf, 0)
    df = (va + vb) ** 2 / (va ** 2 / (len(a) - 1) + vb ** 2 / (len(b) - 1))
    return _interval(difference, math.sqrt(va + vb), df, confidence)


def paired(a: Sequence[float], b: Sequence[float], confidence: float = 0.99) -> Interval:
    """Interval of the mean of a[i] - b[i]: what both runs of a pair share (the machine's drift) cancels."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    return _interval(mean(differences), sd(differences) / math.sqrt(len(differences)), len(differences) - 1, confidence)


def power(effect: float, n: int, alpha: float = 0.01, samples: int = 2) -> float:
    """Chance that a two-sided test at `alpha` sees a difference of `effect` standard deviations.

    samples=2: `n` independent runs in each arm, equal spreads; samples=1: `n` pairs (or runs against a target).
    """
    df = samples * (n - 1)
    if df < 1:
        return 0.0
    shift, critical = abs(effect) * math.sqrt(n / samples), t_quantile(1 - alpha / 2, df)
    return 1 - noncentral_t_cdf(critical, df, shift) + noncentral_t_cdf(-critical, df, shift)


def runs_needed(effect: float, alpha: float = 0.01, wanted: float = 0.9, samples: int = 2,
                most: int = 10_000) -> int | None:
    """The smallest n (runs an arm, or pairs) whose power reaches `wanted`; None where even `most` would not do."""
    if not math.isfinite(effect) or power(effect, most, alpha, samples) < wanted:
        return None
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, middle, alpha, samples) >= wanted else (middle, high)
    return high


def normal_cdf(z: float) -> float:
    return math.erfc(-z / math.sqrt(2)) / 2


def z_below(values: Sequence[float], target: float, known_sd: float) -> float:
    """How many standard errors the mean lies below `target`, for a standard deviation that is known beforehand."""
    return (target - mean(values)) / (known_sd / math.sqrt(len(values)))


def pooled_sd(arms: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Standard deviation common to all arms, each with a mean of its own, and its degrees of freedom; nan and 0 without
    any."""
    several = [values for values in arms if len(values) > 1]
    degrees = sum(len(values) - 1 for values in several)
    squares = math.fsum((len(values) - 1) * sd(values) ** 2 for values in several)
    return (math.sqrt(squares / degrees) if degrees else math.nan), degrees
