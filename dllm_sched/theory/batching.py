"""Fixed-fill batching with a timeout: when is a timer long enough to be stable?"""

from __future__ import annotations

import math

from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import is_number, positive, whole

__all__ = ["capped_timeout", "mean_cycle", "paper_timeout"]


def paper_timeout(rate: float, service_s: float) -> float:
    """Return the published shortest stable timeout, ``max(0, S - 1/rate)`` seconds. O(1).

    The timer starts with the first arrival after a dispatch. The rule takes batches to be
    unbounded, so it is too short when the fill cap binds (see ``capped_timeout``).

    Args:
        rate: Poisson arrival rate, requests per second, > 0.
        service_s: Mean service time of a batch, seconds, > 0.

    Raises:
        ConfigError: If an argument is not positive and finite.

    Source:
        "Serving Masked Diffusion LLMs" (arXiv 2608.23807), the batch-timeout stability rule, as
        implemented in its authors' public repository.
    """
    positive(rate=rate, service_s=service_s)
    return max(0.0, service_s - 1.0 / rate)


def mean_cycle(rate: float, timeout_s: float, batch_size: int) -> float:
    """Return the mean time between dispatches, seconds, with timer and fill cap. O(batch_size).

    ``C(T) = (1 + E[min(N, B - 1)]) / rate`` with ``N ~ Poisson(rate * T)``; the mean batch is
    ``rate * C(T)``.

    Args:
        rate: Poisson arrival rate, requests per second, > 0.
        timeout_s: Timer from the first arrival after a dispatch, seconds, >= 0, may be ``inf``.
        batch_size: Fill cap B, >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    positive(rate=rate)
    if not is_number(timeout_s) or not timeout_s >= 0:
        raise ConfigError(f"timeout_s must be >= 0 seconds, got {timeout_s!r}")
    whole(batch_size=batch_size)
    if timeout_s == math.inf:
        return batch_size / rate
    return _cycle(rate, timeout_s, batch_size)[0]


def _cycle(rate: float, timeout_s: float, batch_size: int) -> tuple[float, float]:
    """The mean cycle, seconds, and its derivative by the timer, ``P(N <= B - 2)``."""
    mean = rate * timeout_s
    # E[min(N, B - 1)] = sum over n of min(n, B - 1) P(N = n), the tail beyond B - 1 in one term.
    # Each probability from its logarithm: exp(-mean) alone underflows for long timers.
    expected = 0.0
    below = 0.0
    for n in range(batch_size - 1):
        log_p = n * math.log(mean) - mean - math.lgamma(n + 1) if mean > 0 else -math.inf * n
        p = 1.0 if mean == 0 and n == 0 else math.exp(log_p)
        expected += n * p
        below += p
    expected += (batch_size - 1) * max(0.0, 1.0 - below)
    return (1.0 + expected) / rate, below


def capped_timeout(rate: float, service_s: float, batch_size: int) -> float:
    """Return the shortest stable timeout when a batch holds at most ``batch_size``, seconds.

    The root of ``mean_cycle(T) = S``; 0 if even an immediate dispatch keeps up, ``inf`` if no
    timer does (``batch_size / rate <= S``: only full batches are stable, or nothing is).
    Never less than ``paper_timeout``. O(batch_size) times some ten steps
    of Newton's method, more of them the closer the load is to full batches.

    Args:
        rate: Poisson arrival rate, requests per second, > 0.
        service_s: Mean service time of a batch, seconds, > 0.
        batch_size: Fill cap B, >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation (the published rule is its limit for an unbounded batch).
    """
    positive(rate=rate, service_s=service_s)
    whole(batch_size=batch_size)
    if 1.0 / rate >= service_s:
        return 0.0
    if batch_size / rate <= service_s:
        return math.inf
    # The cycle is concave in the timer: from below, Newton's steps climb and never pass the root.
    timeout_s = paper_timeout(rate, service_s)
    while True:
        cycle, slope = _cycle(rate, timeout_s, batch_size)
        step = (service_s - cycle) / slope if slope > 0 else 0.0
        if not step > 1e-13 * timeout_s:
            return timeout_s
        timeout_s += step
