"""Clairvoyant lower bounds: how far is a policy from the best possible on this very trace?

Work is the seconds for which a request holds a slot when it runs by itself; at most ``num_slots``
requests run at once, each at speed 1 at most, and nobody is served before it arrives. No scheduler,
however clever, and even if it knew the future and could preempt for free, does better.

Where a step takes longer the more rows it has, count work in steps of a single row and pass
``effective_slots`` instead of the slots: a fraction is fine.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import is_number, whole

__all__ = ["LatencyBound", "effective_slots", "makespan", "mean_latency"]


class LatencyBound(NamedTuple):
    """Three valid bounds of the mean latency, seconds; the largest is the bound."""

    mean_s: float  #: the largest of the three
    shortest_remaining_s: float  #: the fast machine by shortest remaining work
    busy_s: float  #: least mean busy time of the fast machine, and half of the own work
    own_work_s: float  #: nobody waits for anybody


def effective_slots(step_s: Callable[[int], float], num_slots: int) -> float:
    """Return how many single rows' work a machine does at best at once. O(num_slots).

    ``max over n of n * step_s(1) / step_s(n)``: with n rows each advances ``1 / step_s(n)`` steps a
    second. At most ``num_slots``.

    Args:
        step_s: Seconds of a step of 1 .. num_slots rows; positive, not decreasing.
        num_slots: >= 1.

    Raises:
        ConfigError: If a step takes no time, or less with more rows.

    Source:
        Own derivation.
    """
    whole(num_slots=num_slots)
    times = [step_s(rows) for rows in range(1, num_slots + 1)]
    if not all(is_number(each) and 0 < each < math.inf for each in times):
        raise ConfigError("step_s must return positive seconds for 1 .. num_slots rows")
    if any(after < before for before, after in itertools.pairwise(times)):
        raise ConfigError("step_s must not decrease with the number of rows")
    return max(rows * times[0] / each for rows, each in enumerate(times, 1))


def _sorted(jobs: Iterable[tuple[float, float]], num_slots: float) -> list[tuple[float, float]]:
    if not is_number(num_slots) or not 1 <= num_slots < math.inf:
        raise ConfigError(f"num_slots must be a finite number >= 1, got {num_slots!r}")
    ordered = sorted(jobs)
    if not ordered:
        raise ConfigError("a bound needs at least one (arrival_s, work_s) pair")
    for arrival, work in ordered:
        if not math.isfinite(arrival) or not 0 <= work < math.inf:
            raise ConfigError(
                "each (arrival_s, work_s) must be a finite instant and seconds >= 0, got "
                f"{(arrival, work)!r}"
            )
    return ordered


def makespan(jobs: Iterable[tuple[float, float]], num_slots: float) -> float:
    """Return the least time from the first arrival to the last finish, seconds. O(n log n).

    The larger of: the latest ``arrival + work`` (a request runs in one slot at a time); and, over
    all arrivals a, ``a + (work that arrives from a on) / slots`` (the slots do no more than that),
    which is when a work-conserving machine of that speed gets done.

    Args:
        jobs: ``(arrival_s, work_s)`` pairs in any order, at least one.
        num_slots: Slots, or effective slots, k >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation (textbook relaxations).
    """
    ordered = _sorted(jobs, num_slots)
    ready = latest = -math.inf
    for arrival, work in ordered:
        ready = max(ready, arrival) + work / num_slots
        latest = max(latest, arrival + work)
    return max(ready, latest) - ordered[0][0]


def _fast_machine(ordered: list[tuple[float, float]], speed: float, *, by_size: bool) -> float:
    """Sum over jobs of the finish instant (or of the mean busy instant) on one fast machine.

    Preemptive: shortest remaining work first, or smallest original work first (``by_size``). A job
    of no work is done when it arrives.
    """
    total = 0.0
    now = ordered[0][0]
    heap: list[tuple[float, float, float]] = []  # key, left, busy integral of t dw so far
    index, num = 0, len(ordered)
    while heap or index < num:
        if not heap:
            now = max(now, ordered[index][0])
        while index < num and ordered[index][0] <= now:
            arrival, work = ordered[index]
            index += 1
            if work == 0:
                total += arrival
            else:
                heapq.heappush(heap, (work, work, 0.0))
        if not heap:
            continue
        until = ordered[index][0] if index < num else math.inf
        key, left, busy = heap[0]
        end = now + left / speed
        if end <= until:
            heapq.heappop(heap)
            total += (busy + left * (now + end) / 2.0) / key if by_size else end
            now = end
            continue
        done = (until - now) * speed
        rest = max(left - done, 0.0)
        if by_size:
            heapq.heapreplace(heap, (key, rest, busy + done * (now + until) / 2.0))
        else:
            heapq.heapreplace(heap, (rest, rest, 0.0))
        now = until
    return total


def mean_latency(jobs: Iterable[tuple[float, float]], num_slots: float) -> LatencyBound:
    """Return lower bounds of the mean latency (finish minus arrival). O(n log n).

    Replace the k slots by one machine of speed k that may preempt and share its time. It can copy
    any schedule of the slots: give each request that runs there the rate it has there, at most 1
    each and at most k together. Every request then finishes at the same instant, so the least mean
    latency of this machine bounds that of the slots, and

    1. its least mean latency is reached by shortest remaining work first (Schrage 1968);
    2. in the slots a request runs at rate 1 at most, so the mean instant at which it is worked on
       is at least half its work before it finishes: ``finish >= busy + work / 2``. The fast machine
       minimises the sum of these busy instants by smallest original work first, preemptively: the
       sum is linear in the work done at each instant, weighted by ``1 / work``, and exchanging two
       pieces against this order never lowers it (Goemans 1996);
    3. nobody finishes before its arrival plus its own work.

    All three hold at once; the largest is the bound. The first is the best near saturation with
    few slots, the second with many, the third at low load.

    Args:
        jobs: ``(arrival_s, work_s)`` pairs in any order, at least one.
        num_slots: Slots, or effective slots, k >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Relaxations from the literature, as named; their combination here: own derivation.
    """
    ordered = _sorted(jobs, num_slots)
    num = len(ordered)
    # Relative to the first arrival: instants may be large.
    first = ordered[0][0]
    ordered = [(arrival - first, work) for arrival, work in ordered]
    arrivals = math.fsum(arrival for arrival, _ in ordered)
    own = math.fsum(work for _, work in ordered)
    shortest = (_fast_machine(ordered, num_slots, by_size=False) - arrivals) / num
    busy = (_fast_machine(ordered, num_slots, by_size=True) - arrivals + own / 2) / num
    return LatencyBound(max(shortest, busy, own / num), shortest, busy, own / num)
