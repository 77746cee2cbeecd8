import math

import pytest

from dllm_sched import Capacity, ClockError, ConfigError, Scheduler
from dllm_sched.runtime import MonotonicClock, VirtualClock


def test_monotonic_goes_forward_from_its_offset():
    clock = MonotonicClock(offset_s=5e8)
    first = clock()
    assert first >= 5e8
    assert clock() >= first


def test_each_monotonic_clock_draws_an_origin_far_from_the_others():
    clocks = [MonotonicClock() for _ in range(8)]
    origins = sorted(clock() for clock in clocks)
    assert origins[0] > 1e5
    assert origins[-1] - origins[0] > 1000, "eight draws from a range of 900,000 s"


def test_code_that_mixes_clocks_fails_at_once():
    here, there = MonotonicClock(offset_s=2e6), MonotonicClock(offset_s=1e6)
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=1))
    scheduler.next_step(now=here())
    with pytest.raises(ClockError, match="another clock"):
        scheduler.next_step(now=there())


def test_virtual_time_moves_only_when_told():
    clock = VirtualClock(start_at=10.0)
    assert clock() == clock() == 10.0
    clock.advance(0.5)
    assert clock() == 10.5
    clock.set(11.0)
    assert clock() == 11.0
    clock.advance(0.0)
    assert clock() == 11.0


@pytest.mark.parametrize("seconds", [-0.1, math.nan, math.inf, -math.inf])
def test_virtual_time_never_goes_back_and_stays_finite(seconds):
    clock = VirtualClock(start_at=1.0)
    with pytest.raises(ClockError, match="forward"):
        clock.advance(seconds)
    with pytest.raises(ClockError, match="forward"):
        clock.set(1.0 + seconds)
    assert clock() == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_origins_must_be_finite(bad):
    with pytest.raises(ConfigError, match="offset_s"):
        MonotonicClock(offset_s=bad)
    with pytest.raises(ClockError):
        VirtualClock(start_at=bad)
