"""Arrival processes in closed form: mean rates, and how bursty they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import is_number, not_negative, positive

__all__ = [
    "arrival_weighted_rate",
    "gamma_shape",
    "mmpp_dispersion",
    "stationary",
    "time_average_rate",
    "two_state",
    "weibull_cv",
    "weibull_shape",
]

Matrix = Sequence[Sequence[float]]


def two_state(leave_first: float, leave_second: float) -> tuple[tuple[float, float], ...]:
    """Return the generator of a two-state chain: ``q01`` and ``q10``, both per second, > 0. O(1).

    Raises:
        ConfigError: If a rate is not positive and finite.

    Source:
        Textbook.
    """
    positive(leave_first=leave_first, leave_second=leave_second)
    return ((-leave_first, leave_first), (leave_second, -leave_second))


def _check(rates: Sequence[float], generator: Matrix) -> None:
    num = len(rates)
    if num < 1 or len(generator) != num or any(len(row) != num for row in generator):
        raise ConfigError(
            f"an MMPP of {num} rates needs a square generator of that size, got {generator!r}"
        )
    for rate in rates:
        not_negative(**{"a rate": rate})
    if not any(rates):
        raise ConfigError("an MMPP needs at least one state with a rate > 0")
    for i, row in enumerate(generator):
        others = [value for j, value in enumerate(row) if j != i]
        not_negative(**{f"generator[{i}] off the diagonal": min(others, default=0.0)})
        if not is_number(row[i]) or not math.isclose(row[i], -math.fsum(others), abs_tol=1e-12):
            raise ConfigError(f"generator[{i}] must sum to 0, got {row!r}")


def _stationary(generator: Matrix) -> Any:
    """The stationary distribution, an array of float64."""
    import numpy as np  # noqa: PLC0415

    matrix = np.array(generator, float)
    num = len(matrix)
    equations = np.vstack((matrix.T, np.ones(num)))
    target = np.append(np.zeros(num), 1.0)
    if np.linalg.matrix_rank(equations) < num:
        raise ConfigError(f"the chain has more than one recurrent class: {generator!r}")
    solution = np.linalg.lstsq(equations, target, rcond=None)[0]
    return np.maximum(solution, 0.0)


def stationary(generator: Matrix) -> tuple[float, ...]:
    """Return the share of time in each state. Imports numpy; O(states^3).

    Args:
        generator: Row i: rates from state i to the others, per second; each row sums to 0.

    Raises:
        ConfigError: If it is no generator, or its chain falls apart.

    Source:
        Textbook.
    """
    _check([1.0] * len(generator), generator)
    return tuple(float(p) for p in _stationary(generator))


def time_average_rate(rates: Sequence[float], generator: Matrix) -> float:
    """Return the long-run arrivals per second, ``sum of pi_i rate_i``. As ``stationary``.

    Two states: ``(q10 l0 + q01 l1) / (q01 + q10)``.

    Args:
        rates: Poisson rate in each state, per second, >= 0.
        generator: Row i: rates from state i to the others, per second; each row sums to 0.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Textbook.
    """
    _check(rates, generator)
    return math.fsum(p * rate for p, rate in zip(stationary(generator), rates, strict=True))


def arrival_weighted_rate(rates: Sequence[float], generator: Matrix) -> float:
    """Return the rate that an arrival sees in the mean. As ``stationary``.

    ``sum of pi_i rate_i^2 / sum of pi_i rate_i``, never below the time average: an estimator that
    averages over requests, not over time, ends up near this.

    Args:
        rates: Poisson rate in each state, per second, >= 0.
        generator: Row i: rates from state i to the others, per second; each row sums to 0.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    average = time_average_rate(rates, generator)
    shares = stationary(generator)
    return math.fsum(p * rate**2 for p, rate in zip(shares, rates, strict=True)) / average


def mmpp_dispersion(rates: Sequence[float], generator: Matrix, window_s: float = math.inf) -> float:
    """Return variance over mean of the arrivals in a window of a stationary MMPP; 1 = Poisson.

    ``1 + 2 [pi L D L 1 - pi L D^2 (I - e^(Q w)) L 1 / w] / rate``, L the rates as a diagonal,
    ``D = (1 pi - Q)^-1 - 1 pi`` the deviation matrix. Two states:
    ``1 + 2 pi_0 pi_1 (l0 - l1)^2 / (rate r) (1 - (1 - e^(-r w)) / (r w))``, ``r = q01 + q10``.
    Imports numpy; O(states^3).

    Args:
        rates: Poisson rate in each state, per second, >= 0.
        generator: Row i: rates from state i to the others, per second; each row sums to 0.
        window_s: Seconds, > 0; ``inf`` for the limit.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Textbook (variance of the counts of a Markovian arrival process).
    """
    import numpy as np  # noqa: PLC0415

    _check(rates, generator)
    if window_s != math.inf:
        positive(window_s=window_s)
    matrix, rate = np.array(generator, float), np.array(rates, float)
    shares = _stationary(generator)
    ones = np.outer(np.ones(len(rate)), shares)
    deviation = np.linalg.inv(ones - matrix) - ones
    weighted = shares * rate
    second = weighted @ deviation @ rate
    if window_s != math.inf:
        # The exponential by squaring: its norm is at most 2 at any time.
        halvings = max(0, math.ceil(math.log2(max(1e-300, np.abs(matrix).max() * window_s))) + 6)
        small = matrix * window_s / 2**halvings
        power = np.eye(len(rate))
        term = power
        for k in range(1, 12):
            term = term @ small / k
            power = power + term
        for _ in range(halvings):
            power = power @ power
        fading = np.eye(len(rate)) - power
        second -= weighted @ deviation @ deviation @ fading @ rate / window_s
    return float(1.0 + 2.0 * second / weighted.sum())


def gamma_shape(cv: float) -> float:
    """Return the shape of Gamma gaps with a coefficient of variation, ``1 / cv^2``. O(1).

    The dispersion of the counts of any renewal process tends to ``cv^2`` for long windows.

    Args:
        cv: Standard deviation over mean of the gaps, > 0.

    Raises:
        ConfigError: If it is not positive and finite.

    Source:
        Textbook.
    """
    positive(cv=cv)
    return 1.0 / (cv * cv)


def weibull_cv(shape: float) -> float:
    """Return the coefficient of variation of Weibull gaps. O(1).

    ``sqrt(G(1 + 2/k) / G(1 + 1/k)^2 - 1)``, G the gamma function.

    Args:
        shape: k, >= 0.01.

    Raises:
        ConfigError: If it is out of range.

    Source:
        Textbook.
    """
    positive(shape=shape)
    if shape < 0.01:
        raise ConfigError(f"shape must be >= 0.01, got {shape!r}")
    log_ratio = math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)
    return math.sqrt(max(0.0, math.expm1(log_ratio)))


def weibull_shape(cv: float) -> float:
    """Return the shape of Weibull gaps with a coefficient of variation. About 50 bisections.

    Args:
        cv: Standard deviation over mean of the gaps, from 0.01 to 1e5.

    Raises:
        ConfigError: If it is out of range.

    Source:
        Own choice: ``weibull_cv`` falls with the shape, so bisection finds its inverse.
    """
    positive(cv=cv)
    if not 0.01 <= cv <= 1e5:
        raise ConfigError(f"cv must lie between 0.01 and 1e5, got {cv!r}")
    low, high = math.log(0.05), math.log(200.0)
    while (middle := (low + high) / 2.0) not in (low, high):
        if weibull_cv(math.exp(middle)) > cv:
            low = middle
        else:
            high = middle
    return math.exp(high)
