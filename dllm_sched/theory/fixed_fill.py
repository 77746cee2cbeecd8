"""Fixed-fill batching in the long run: how long a batch fills, and latency against load."""

from __future__ import annotations

import cmath
import math

from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import is_number, positive, whole

__all__ = [
    "best_utilisation",
    "fill_wait_cdf",
    "mean_batch_fill_wait",
    "mean_fill_wait",
    "mean_latency",
    "timeout_probability",
]


def _log_poisson(mean: float, n: int) -> float:
    """``log P(N = n)``, ``N ~ Poisson(mean)``, without the cancellation of large terms."""
    if n < 16:
        return n * math.log(mean) - mean - math.lgamma(n + 1)
    excess = (mean - n) / n
    stirling = (1 / 12 - (1 / 360 - 1 / (1260 * n * n)) / (n * n)) / n
    return n * (math.log1p(excess) - excess) - 0.5 * math.log(2 * math.pi * n) - stirling


def _poisson_below(mean: float, n: int) -> float:
    """``P(N < n)`` for ``mean >= n >= 1``: terms that fall from the first one on."""
    term = math.exp(_log_poisson(mean, n - 1))
    total = 0.0
    for k in range(n - 1, -1, -1):
        total += term
        term *= k / mean
        if term <= 1e-17 * total:
            break
    return total


def _poisson_tail(mean: float, n: int) -> float:
    """``P(N >= n)`` for ``mean < n``: terms that fall faster than geometrically."""
    term = math.exp(_log_poisson(mean, n)) if mean > 0 else 0.0
    total, k = 0.0, n
    while term > 1e-17 * total:
        total += term
        k += 1
        term *= mean / k
    return total


def _root(offered: float, batch_size: int, index: int) -> complex:
    """The index-th root of ``z^B = exp(offered (z - 1))`` inside the unit disk, by Newton."""
    load = offered / batch_size
    turn = cmath.exp(2j * math.pi * index / batch_size)
    z = turn * math.exp(-load)
    for _ in range(100):
        image = turn * cmath.exp(load * (z - 1.0))
        step = (image - z) / (1.0 - load * image)
        z += step
        if abs(step) < 1e-15:
            break
    return z


def fill_wait_cdf(rate: float, batch_size: int, wait_s: float) -> float:
    """Return the probability that a batch is full within ``wait_s`` of its first arrival.

    ``P(Erlang(B - 1, rate) <= w) = P(Poisson(rate * w) >= B - 1)``.
    O(batch_size + sqrt(rate * wait_s)).

    Args:
        rate: Poisson arrival rate, requests per second, > 0.
        batch_size: Requests that make a batch, B, >= 1.
        wait_s: Seconds, >= 0, may be ``inf``.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation (textbook Erlang).
    """
    positive(rate=rate)
    whole(batch_size=batch_size)
    if not is_number(wait_s) or not wait_s >= 0:
        raise ConfigError(f"wait_s must be >= 0 seconds, got {wait_s!r}")
    if batch_size == 1 or wait_s == math.inf:
        return 1.0
    mean = rate * wait_s
    if mean < batch_size - 1:
        return _poisson_tail(mean, batch_size - 1)
    return 1.0 - _poisson_below(mean, batch_size - 1)


def timeout_probability(rate: float, timeout_s: float, batch_size: int) -> float:
    """Return the probability that the timer fires before the batch is full.

    ``P(Poisson(rate * T) <= B - 2)``; the timer starts with the batch's first arrival.
    O(batch_size + sqrt(rate * timeout_s)).

    Args:
        rate: Poisson arrival rate, requests per second, > 0.
        timeout_s: Seconds, >= 0, may be ``inf``.
        batch_size: Fill cap B, >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    filled = fill_wait_cdf(rate, batch_size, timeout_s)  # checks the arguments, too
    if batch_size == 1 or timeout_s == math.inf:
        return 0.0
    mean = rate * timeout_s
    return 1.0 - filled if mean < batch_size - 1 else _poisson_below(mean, batch_size - 1)


def mean_fill_wait(rate: float, batch_size: int) -> float:
    """Return how long the first arrival of a batch waits for the last, ``(B - 1) / rate``. O(1).

    Args:
        rate: Poisson arrival rate, requests per second, > 0.
        batch_size: Requests that make a batch, B, >= 1.

    Returns:
        Seconds, in the mean.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    positive(rate=rate)
    whole(batch_size=batch_size)
    return (batch_size - 1) / rate


def mean_batch_fill_wait(rate: float, batch_size: int) -> float:
    """Return the fill wait averaged over a batch's requests, ``(B - 1) / (2 rate)`` s. O(1).

    Args:
        rate: Poisson arrival rate, requests per second, > 0.
        batch_size: Requests that make a batch, B, >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    return mean_fill_wait(rate, batch_size) / 2


def mean_latency(rate: float, service_s: float, batch_size: int) -> float:
    """Return the long-run mean latency of full batches without a timeout, seconds.

    Poisson arrivals, batches of exactly B in arrival order, one at a time, each taking S:

        ``E = (B - 1) / (2 rate) + S + Wq``,
        ``Wq = sum over k >= 1 of E[(k S - G_k)^+] / k``,  ``G_k ~ Gamma(B k, rate)``.

    The first term falls with the load and ``Wq`` rises: the curve is U-shaped. ``Wq`` is Spitzer's
    identity for the wait with Erlang(B) gaps and constant service. Term by term it equals the mean
    content, over ``rate``, of the queue ``X <- (X + Poisson(rate S) - B)^+``, for which the roots
    ``z_1 .. z_(B-1)`` of ``z^B = exp(-rate S (1 - z))`` inside the unit disk give the sum at once,
    near saturation too, where the series needs millions of tail probabilities:

        ``rate Wq = a / (2 (B - a)) - (B - 1 + a) / 2 + sum of 1 / (1 - z_j)``,  ``a = rate S``.

    Args:
        rate: Poisson arrival rate, requests per second, > 0.
        service_s: Constant service time of a batch, seconds, > 0.
        batch_size: Requests in every batch, B, >= 1.

    Returns:
        Seconds from arrival to finish; ``inf`` if ``rate * S >= B``. O(batch_size).

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation; the root form is the textbook one of the bulk-service queue (Bailey 1954).
        The U shape, with its minimum near a utilisation of 0.70, is measured in "Serving Masked
        Diffusion LLMs" (arXiv 2608.23807).
    """
    positive(rate=rate, service_s=service_s)
    whole(batch_size=batch_size)
    offered = rate * service_s
    if offered >= batch_size:
        return math.inf
    roots = (_root(offered, batch_size, index) for index in range(1, batch_size))
    waiting = math.fsum(
        (
            offered / (2.0 * (batch_size - offered)),
            -(batch_size - 1 + offered) / 2.0,
            *((1.0 / (1.0 - z)).real for z in roots),
        )
    )
    return (batch_size - 1) / (2 * rate) + service_s + max(0.0, waiting) / rate


def best_utilisation(service_s: float, batch_size: int) -> tuple[float, float]:
    """Return the utilisation at which ``mean_latency`` is least, and that latency in seconds.

    Utilisation is ``rate * S / B``. Found by golden-section search to 1e-6; about 30 evaluations.

    Args:
        service_s: Constant service time of a batch, seconds, > 0.
        batch_size: Requests in every batch, >= 2 (a batch of one has no fill wait, and no minimum).

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    positive(service_s=service_s)
    whole(2, batch_size=batch_size)

    def latency(utilisation: float) -> float:
        return mean_latency(utilisation * batch_size / service_s, service_s, batch_size)

    golden = (math.sqrt(5.0) - 1.0) / 2.0
    low, high = 0.01, 0.99
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = latency(left), latency(right)
    while high - low > 1e-6:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = latency(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = latency(right)
    best = (low + high) / 2.0
    return best, latency(best)
