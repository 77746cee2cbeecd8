"""WAIT's equilibrium, thresholds, booking limits and segments against known values."""

import math

import pytest

from dllm_sched import ConfigError
from dllm_sched.theory.wait import (
    TrafficType,
    are_thresholds_stable,
    booking_limits,
    fluid_equilibrium,
    nested_segments,
)

TWO = (TrafficType(20, 50, 100), TrafficType(10, 50, 200))


def test_fluid_equilibrium():
    found = fluid_equilibrium(TWO, base_s=0.02, token_s=1e-6)
    assert sum(each.rate * each.token_steps for each in TWO) == 503500
    assert round(found.step_s, 7) == 0.0402820
    assert round(found.tokens, 2) == 20281.97
    assert [round(n, 5) for n in found.num_per_stage] == [0.80564, 0.40282]


def test_no_equilibrium_when_memory_costs_more_time_than_there_is():
    found = fluid_equilibrium(TWO, base_s=0.02, token_s=2e-6)
    assert found == (math.inf, math.inf, (math.inf, math.inf))


def test_thresholds():
    """At the equilibrium they just keep up; fewer do not; more do, at the price of memory."""
    cost = {"base_s": 0.02, "token_s": 1e-6}
    assert are_thresholds_stable(TWO, (0.8057, 0.40285), **cost)
    assert not are_thresholds_stable(TWO, (0.8055, 0.40275), **cost)
    assert are_thresholds_stable(TWO, (3, 1.5), **cost, capacity=80_000)
    assert not are_thresholds_stable(TWO, (3, 1.5), **cost, capacity=70_000)
    # One type's threshold alone is too low for its rate.
    assert not are_thresholds_stable(TWO, (3, 0.5), **cost)


def test_booking_limits_of_four_types():
    types = [
        TrafficType(rate, 25, decode)
        for rate, decode in ((175, 25), (71.875, 75), (25, 125), (10, 175))
    ]
    found = booking_limits(types, 256)
    assert [round(each.limit, 2) for each in found] == [78.06, 93.71, 54.04, 30.19]
    assert [each.per_stage for each in found] == [3, 1, 1, 1]


def test_segments_of_two_types():
    first, second = nested_segments([TrafficType(50, 1, 20), TrafficType(100, 1, 10)], 130)
    assert (*first, first.num_whole) == (10, 150, 97.5, 10, 97)
    assert (*second, second.num_whole) == (10, 50, 32.5, 4, 32)


def test_segments_of_four_types():
    types = [TrafficType(r, 1, d) for d, r in ((20, 18), (40, 34), (80, 68), (160, 138))]
    found = nested_segments(types, 256)
    assert [each.rate for each in found] == [258, 240, 206, 138]
    assert [round(each.limit, 2) for each in found] == [45.18, 42.02, 72.14, 96.66]
    assert [each.per_stage for each in found] == [3, 3, 2, 2]
    assert [each.num_stages for each in found] == [20, 20, 40, 80]


@pytest.mark.parametrize("divide", [booking_limits, nested_segments])
def test_rates_beyond_any_sum_divide_as_their_ratios_do(divide):
    types = [TrafficType(r, 25, d) for r, d in ((1.75, 20), (1.7, 40))]
    huge = [TrafficType(math.ldexp(each.rate, 1023), 25, each.decode_len) for each in types]
    tiny = [TrafficType(math.ldexp(each.rate, -1000), 25, each.decode_len) for each in types]
    limits = [(each.limit, each.per_stage) for each in divide(types, 256)]
    assert limits == [(each.limit, each.per_stage) for each in divide(huge, 256)]
    assert limits == [(each.limit, each.per_stage) for each in divide(tiny, 256)]


def test_types_of_one_length_share_a_segment():
    (only,) = nested_segments([TrafficType(1, 1, 5), TrafficType(2, 9, 5)], 10)
    assert only == (5, 3, 10, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda: TrafficType(0, 1, 1),
        lambda: TrafficType(1, -1, 1),
        lambda: TrafficType(1, 1, 0),
        lambda: fluid_equilibrium([], base_s=1, token_s=1),
        lambda: fluid_equilibrium(TWO, base_s=0, token_s=1),
        lambda: fluid_equilibrium(TWO, base_s=1, token_s=math.nan),
        lambda: are_thresholds_stable(TWO, (1,), base_s=1, token_s=0),
        lambda: are_thresholds_stable(TWO, (1, 0), base_s=1, token_s=0),
        lambda: are_thresholds_stable(TWO, (1, 1), base_s=1, token_s=0, capacity=0),
        lambda: booking_limits(TWO, 0),
        lambda: nested_segments([(1, 2, 3)], 4),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(ConfigError):
        call()
