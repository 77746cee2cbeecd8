"""The confidence threshold as a load knob: a lower one commits more tokens a step.

A grid lists thresholds with the steps that a request takes at each, as a share of those at the
highest: ``((0.7, 0.62), (0.9, 1.0))`` says that 0.7 saves 38 % of the steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import is_number, not_negative, positive

__all__ = ["Grid", "check_grid", "threshold_for_deadline", "threshold_for_load"]

Grid = tuple[tuple[float, float], ...]
"""``(threshold, share of the steps)``, ascending in both; the last share is 1."""


def check_grid(grid: Sequence[tuple[float, float]]) -> Grid:
    """Return the grid as tuples.

    Raises:
        ConfigError: If it is empty, a threshold is outside of (0, 1], thresholds do not ascend, a
            share is not in (0, 1], shares fall, or the last share is not 1.
    """
    try:
        pairs = tuple((threshold, share) for threshold, share in grid)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"grid must be (threshold, share) pairs, got {grid!r}") from error
    if not pairs:
        raise ConfigError("grid needs at least one (threshold, share) pair")
    for number in itertools.chain.from_iterable(pairs):
        if not is_number(number) or not 0 < number <= 1:
            raise ConfigError(f"grid: thresholds and shares must lie in (0, 1], got {number!r}")
    for (low, less), (high, more) in itertools.pairwise(pairs):
        if not (low < high and less <= more):
            raise ConfigError(
                "grid: thresholds must ascend, and a higher one takes at least as many steps, got "
                f"{(low, less)} before {(high, more)}"
            )
    if pairs[-1][1] != 1:
        raise ConfigError(f"grid: the highest threshold has share 1, got {pairs[-1]!r}")
    return pairs


def _highest(grid: Grid, most: float) -> float:
    """The highest threshold whose share is at most ``most``; the lowest if none is."""
    return next((one for one, share in reversed(grid) if share <= most), grid[0][0])


def threshold_for_deadline(grid: Grid, *, num_steps: float, step_s: float, slack_s: float) -> float:
    """Return the highest threshold at which the steps left fit before the deadline.

    ``max { theta : steps(theta) * step_s <= slack }``; the lowest if none does. O(grid).

    Args:
        grid: As of ``check_grid``.
        num_steps: Steps left at the highest threshold, >= 0.
        step_s: Seconds of a step, > 0.
        slack_s: Seconds from the instant the request runs (now plus any backlog before it) to its
            deadline; may be negative or ``inf``.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation; the abstract of "TeDiServe" (arXiv 2606.29094) names the aim: the highest
        threshold that still meets the request's deadline.
    """
    not_negative(num_steps=num_steps)
    positive(step_s=step_s)
    if not is_number(slack_s) or math.isnan(slack_s):
        raise ConfigError(f"slack_s must be seconds, got {slack_s!r}")
    need_s = num_steps * step_s
    if need_s == 0:
        return grid[-1][0] if slack_s >= 0 else grid[0][0]
    return _highest(grid, slack_s / need_s)


def threshold_for_load(grid: Grid, *, demand: float, step_s: float, num_slots: float) -> float:
    """Return the highest threshold at which the offered load stays within the capacity.

    ``max { theta : sum of rate * steps(theta) * step_s <= num_slots }``; the lowest if none does:
    then not even that one keeps up. O(grid).

    Args:
        grid: As of ``check_grid``.
        demand: Row-steps per second that arrive, at the highest threshold: the sum of rate times
            steps over the kinds of requests, >= 0.
        step_s: Seconds of a step, > 0.
        num_slots: Rows in a step, as far as they may be used, > 0.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation; the abstract of "TeDiServe" (arXiv 2606.29094) names the aim: a cap on the
        threshold that keeps the aggregate load within capacity. With share .62 at the lowest, the
        capacity is 1 / .62 = 1.613 times that of the highest: the paper's 1.61.
    """
    not_negative(demand=demand)
    positive(step_s=step_s, num_slots=num_slots)
    busy = demand * step_s
    return _highest(grid, num_slots / busy if busy else math.inf)
