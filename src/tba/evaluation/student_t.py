"""Student's t distribution: the quantiles that a mean of few values needs. Standard library only.

Invariant: accurate to about ten digits wherever an interval asks, also for degrees of freedom that are no integers.
"""

from __future__ import annotations

import math

_TERMS = 500  # of the continued fraction, at most; 20 to 60 are usual
_TINY = 1e-300


def t_quantile(p: float, freedom: float) -> float:
    """Returns the value below which a t variable of `freedom` degrees of freedom lies with probability `p`, 0 < p < 1.

    Raises `ValueError` for other probabilities and for degrees of freedom that are not above 0.
    """
    if not 0 < p < 1 or not freedom > 0:
        raise ValueError(f"a quantile of t needs 0 < p < 1 and freedom > 0, but got p {p} and freedom {freedom}")
    if p < 0.5:
        return -t_quantile(1 - p, freedom)
    high = 1.0
    while cumulative(high, freedom) < p:
        high *= 2
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if cumulative(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def cumulative(t: float, freedom: float) -> float:
    """Returns the probability that a t variable with `freedom` degrees of freedom is at most `t`."""
    if t * t < freedom:  # near the middle, where the tail's argument would be rounded to 1
        return 0.5 + math.copysign(regularised_beta(t * t / (freedom + t * t), 0.5, freedom / 2) / 2, t)
    tail = regularised_beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2
    return 1 - tail if t > 0 else tail


def regularised_beta(x: float, a: float, b: float) -> float:
    """Returns I_x(a, b), the regularised incomplete beta function (Abramowitz, Stegun 26.5); 0 <= x <= 1, a, b > 0."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, by I_x(a, b) = 1 - I_(1-x)(b, a)
        return 1 - regularised_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * _fraction(x, a, b))


def _fraction(x: float, a: float, b: float) -> float:
    """Returns the continued fraction 1 + d1/(1 + d2/(1 + ...)) of 26.5.8, by Lentz's method."""
    c, d, value = 1.0, 0.0, 1.0
    for n in range(1, _TERMS):
        m = n // 2
        if n % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / _away_from_0(1 + term * d)
        c = _away_from_0(1 + term / c)
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _away_from_0(x: float) -> float:
    return x if abs(x) > _TINY else _TINY
