"""A batch waits for its slowest member: the expected maximum, and what refilling slots gains."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dllm_sched.theory._check import histogram, whole

__all__ = ["coefficient_of_variation", "expected_maximum", "mean", "refill_gain"]


def mean(weights: Mapping[int, float]) -> float:
    """Return the mean of a histogram. O(values).

    Args:
        weights: Value (int >= 1) -> weight (>= 0, need not sum to 1).

    Raises:
        ConfigError: If the histogram is empty or has a bad value or weight.

    Source:
        Textbook.
    """
    return math.fsum(value * p for value, p in histogram("weights", weights))


def coefficient_of_variation(weights: Mapping[int, float]) -> float:
    """Return standard deviation over mean, the whole histogram as the population. O(values).

    Args:
        weights: Value (int >= 1) -> weight (>= 0, need not sum to 1).

    Raises:
        ConfigError: If the histogram is empty or has a bad value or weight.

    Source:
        Textbook.
    """
    pairs = histogram("weights", weights)
    average = math.fsum(value * p for value, p in pairs)
    return math.sqrt(math.fsum((value - average) ** 2 * p for value, p in pairs)) / average


def expected_maximum(weights: Mapping[int, float], batch_size: int) -> float:
    """Return the expected maximum of ``batch_size`` independent draws. O(values).

    ``E[max] = sum over v of v (F(v)^B - F(v-)^B)``, F the distribution function.

    Args:
        weights: Value (int >= 1), e.g. the steps of a request -> weight (>= 0, need not sum to 1).
        batch_size: Draws, B, >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Textbook.
    """
    whole(batch_size=batch_size)
    pairs = histogram("weights", weights)
    terms = []
    below = cumulated = 0.0
    for value, p in pairs[:-1]:
        cumulated += p
        power = cumulated**batch_size
        terms.append(value * (power - below))
        below = power
    terms.append(pairs[-1][0] * (1.0 - below))
    return math.fsum(terms)


def refill_gain(weights: Mapping[int, float], batch_size: int) -> float:
    """Return by how much refilling slots at once beats running whole batches to completion.

    ``E[max of B] / mean``: the ratio of the two throughputs under a long backlog, where refilled
    slots are never idle and a run-to-completion batch lasts as long as its slowest member.
    O(values).

    Args:
        weights: Steps of a request (int >= 1) -> weight (>= 0, need not sum to 1).
        batch_size: Slots, B, >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    return expected_maximum(weights, batch_size) / mean(weights)
