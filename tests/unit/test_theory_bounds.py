"""Clairvoyant bounds: never above the best schedule of tiny cases, and tight where they can be."""

import functools
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sched import ConfigError
from dllm_sched.theory.bounds import effective_slots, makespan, mean_latency


def _best(jobs, num_slots):
    """Least makespan and least mean latency of all schedules that preempt at whole instants."""
    jobs = sorted(jobs)
    arrivals = tuple(arrival for arrival, _ in jobs)

    @functools.cache
    def search(now, left):
        """(least last finish, least sum of finishes) of what is left."""
        pending = [i for i, rest in enumerate(left) if rest]
        if not pending:
            return now, 0
        ready = [i for i in pending if arrivals[i] <= now]
        if not ready:
            return search(min(arrivals[i] for i in pending), left)
        # Leaving a slot idle while somebody is ready never helps.
        least_end, least_sum = math.inf, math.inf
        for chosen in itertools.combinations(ready, min(num_slots, len(ready))):
            after = tuple(rest - (i in chosen) for i, rest in enumerate(left))
            end, total = search(now + 1, after)
            total += sum(now + 1 for i in chosen if after[i] == 0)
            least_end, least_sum = min(least_end, end), min(least_sum, total)
        return least_end, least_sum

    end, total = search(arrivals[0], tuple(work for _, work in jobs))
    return end - arrivals[0], (total - sum(arrivals)) / len(jobs)


JOBS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(JOBS, st.integers(1, 3))
def test_never_above_the_best_schedule(jobs, num_slots):
    end, latency = _best(jobs, num_slots)
    bound = mean_latency(jobs, num_slots)
    assert makespan(jobs, num_slots) <= end + 1e-9
    assert bound.mean_s <= latency + 1e-9
    assert bound.mean_s == max(bound[1:])


@settings(max_examples=100, deadline=None)
@given(JOBS)
def test_one_slot_is_exact(jobs):
    """With one slot the relaxed machine is the machine."""
    end, latency = _best(jobs, 1)
    assert makespan(jobs, 1) == pytest.approx(end)
    assert mean_latency(jobs, 1).shortest_remaining_s == pytest.approx(latency)


def test_by_hand():
    jobs = [(0, 4), (1, 1), (1, 2)]
    # One slot by shortest remaining work: finishes at 2, 4 and 7.
    assert mean_latency(jobs, 1).shortest_remaining_s == pytest.approx((1 + 3 + 7) / 3)
    assert makespan(jobs, 1) == 7
    # Two slots: the long one alone needs 4; 7 units of work on a machine of speed 2 need 3.5 s,
    # and nothing but the long one is there in the first second, 2 of its units.
    assert makespan(jobs, 2) == 4
    # Speed 2: 2 of the 4 in the first second, then 1 until 1.5, then two of 2 left each.
    found = mean_latency(jobs, 2)
    assert found.shortest_remaining_s == pytest.approx((0.5 + 1.5 + 3.5) / 3)
    # Mean busy instants: (0 .. 1, 2.5 .. 3.5) -> 1.75, (1 .. 1.5) -> 1.25, (1.5 .. 2.5) -> 2;
    # finishes at least 3.75, 1.75 and 3.
    assert found.busy_s == pytest.approx((3.75 + 0.75 + 2) / 3)
    assert found.own_work_s == pytest.approx(7 / 3)


def test_together_at_once_the_busy_bound_is_exact_for_equal_work():
    """Four equal requests in two slots finish at 1, 1, 2, 2."""
    found = mean_latency([(0, 1)] * 4, 2)
    assert found.mean_s == found.busy_s == pytest.approx(1.5)
    assert found.shortest_remaining_s == pytest.approx(1.25)


def test_no_load_leaves_own_work():
    found = mean_latency([(10.0 * i, 2.0) for i in range(50)], 8)
    assert found.mean_s == found.own_work_s == 2.0
    assert makespan([(10.0 * i, 2.0) for i in range(50)], 8) == 492


def test_large_instants_lose_nothing():
    jobs = [(0, 4), (1, 1), (1, 2)]
    late = [(arrival + 1.7e9, work) for arrival, work in jobs]
    assert mean_latency(late, 2).mean_s == pytest.approx(mean_latency(jobs, 2).mean_s, abs=1e-6)


def test_a_saturated_backlog_is_bounded_by_its_work():
    jobs = [(0.0, 1.0 + (i % 7)) for i in range(2000)]
    assert makespan(jobs, 16) == pytest.approx(sum(work for _, work in jobs) / 16)


def test_effective_slots():
    assert effective_slots(lambda rows: 0.02, 16) == 16
    assert effective_slots(lambda rows: 0.02 * rows, 16) == 1
    # 0.02 + 0.01 rows: at 4 rows, 4 * .03 / .06 = 2.
    assert effective_slots(lambda rows: 0.02 + 0.01 * rows, 4) == pytest.approx(2)


@pytest.mark.parametrize(
    "call",
    [
        lambda: makespan([], 1),
        lambda: makespan([(0, 1)], 0),
        lambda: makespan([(0, -1)], 1),
        lambda: makespan([(math.nan, 1)], 1),
        lambda: mean_latency([(0, math.inf)], 1),
        lambda: mean_latency([(0, 1)], math.nan),
        lambda: effective_slots(lambda rows: 0, 4),
        lambda: effective_slots(lambda rows: 1 / rows, 4),
        lambda: effective_slots(lambda rows: 1, 0),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(ConfigError):
        call()
