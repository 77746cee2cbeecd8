"""Energy of a batch: what sharing it saves, and how large it must be for a target per request."""

from __future__ import annotations

import math
from collections.abc import Callable

from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import is_number, positive, whole

__all__ = ["batch_gain", "fixed_share", "smallest_batch"]


def _joules(batch_j: Callable[[int], float], size: int) -> float:
    joules = batch_j(size)
    if not is_number(joules) or not 0 < joules < math.inf:
        raise ConfigError(f"batch_j({size}) must be a positive finite number, got {joules!r}")
    return joules


def batch_gain(batch_j: Callable[[int], float], size: int) -> float:
    """Return how many times less energy a request takes in a batch than alone. O(1).

    ``size * E(1) / E(size)``; with ``E(n) = fixed + n * own`` at most ``1 + fixed / own``.

    Args:
        batch_j: Joules of a batch by its rows, > 0.
        size: Rows, >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    whole(size=size)
    return size * _joules(batch_j, 1) / _joules(batch_j, size)


def fixed_share(gain: float, size: int) -> float:
    """Return ``fixed / own`` of the linear model that gives a gain at a size. O(1).

    The inverse of ``batch_gain`` for ``E(n) = fixed + n * own``:
    ``size * (gain - 1) / (size - gain)``.

    Args:
        gain: In [1, size).
        size: Rows, >= 2.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.

    >>> round(fixed_share(6.31, 16), 3), round(fixed_share(1.17, 16), 3)
    (8.768, 0.183)
    """
    whole(2, size=size)
    if not is_number(gain) or not 1 <= gain < size:
        raise ConfigError(f"gain must lie in [1, {size}), got {gain!r}")
    return size * (gain - 1) / (size - gain)


def smallest_batch(batch_j: Callable[[int], float], *, target_j: float, most: int) -> int:
    """Return the least number of rows at which a request takes no more than a target.

    ``min { n : E(n) / n <= target }``; where none up to ``most`` reaches it, the size at which a
    request takes least. O(most).

    Args:
        batch_j: Joules of a batch by its rows, > 0.
        target_j: Joules per request, > 0.
        most: Rows, >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    positive(target_j=target_j)
    whole(most=most)
    each = [_joules(batch_j, size) / size for size in range(1, most + 1)]
    reached = (size for size, joules in enumerate(each, 1) if joules <= target_j)
    return next(reached, each.index(min(each)) + 1)
