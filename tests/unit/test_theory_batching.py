"""The timeout rules against published and independently simulated values."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_sched import ConfigError
from dllm_sched.theory.batching import capped_timeout, mean_cycle, paper_timeout

# The mean of the eight batch service times measured in the paper's repository, and its fill cap.
SERVICE_S = 8.738217888618237
BATCH_SIZE = 8


@pytest.mark.parametrize(
    ("rate", "paper", "capped"),
    [
        (0.183, 3.274, 3.274),
        (0.366, 6.006, 6.013),
        (0.641, 7.178, 7.512),
        (0.824, 7.525, 9.222),
        (0.870, 7.589, 10.393),
    ],
)
def test_the_known_table(rate, paper, capped):
    assert round(paper_timeout(rate, SERVICE_S), 3) == paper
    assert round(capped_timeout(rate, SERVICE_S, BATCH_SIZE), 3) == capped


def test_the_published_rule_is_27_percent_too_short_at_95_percent_load():
    ratio = paper_timeout(0.870, SERVICE_S) / capped_timeout(0.870, SERVICE_S, BATCH_SIZE)
    assert round(1 - ratio, 2) == 0.27


@pytest.mark.parametrize(
    ("rate", "timeout_s", "batch_size", "cycle"),
    [
        (0.5, 3.0, 1, 2.0),  # every arrival goes at once
        (1.0, 0.0, 8, 1.0),  # a timer of nothing: likewise
        (1.0, math.log(2), 2, 1.5),  # a second one in time: with probability 1/2
        (2.0, 0.5, 3, 1.5 - 1.5 / math.e),  # E[min(N, 2)] = 2 - 3/e at a mean of 1
        (4.0, math.inf, 8, 2.0),  # always full
        (1000.0, 5.0, 8, 0.008),  # full, though exp(-5000) is 0 in floating point
    ],
)
def test_mean_cycle_by_hand(rate, timeout_s, batch_size, cycle):
    assert mean_cycle(rate, timeout_s, batch_size) == pytest.approx(cycle, rel=1e-12)


@pytest.mark.parametrize(
    ("rate", "timeout_s", "batch_size"), [(0.87, 10.4, 8), (0.3, 2.0, 8), (2.0, 0.7, 3)]
)
def test_mean_cycle_is_what_a_timer_dispatcher_does(rate, timeout_s, batch_size):
    rng = random.Random(20261130)
    num_cycles = 20_000
    now = 0.0
    for _ in range(num_cycles):
        now += rng.expovariate(rate)  # the first arrival starts the timer
        due = now + timeout_s
        waiting = 1
        while waiting < batch_size:
            arrival = now + rng.expovariate(rate)
            if arrival > due:
                now = due  # the arrival is beyond it; memoryless, so it is drawn anew
                break
            now = arrival
            waiting += 1
    # A cycle's standard deviation is below its mean here: 2 % is more than 2.8 of the mean's own.
    assert now / num_cycles == pytest.approx(mean_cycle(rate, timeout_s, batch_size), rel=0.02)


def test_the_capped_timer_keeps_up_in_simulation_and_the_published_one_does_not():
    """At 95 % load: the cycle with each timer against the service time."""
    assert mean_cycle(0.87, 10.393, BATCH_SIZE) == pytest.approx(SERVICE_S, abs=1e-3)
    assert mean_cycle(0.87, 7.589, BATCH_SIZE) < SERVICE_S - 0.5


def test_limits():
    assert paper_timeout(0.1, 10.0) == 0.0  # even an immediate dispatch keeps up
    assert paper_timeout(0.05, 10.0) == 0.0
    assert capped_timeout(0.1, 10.0, 8) == 0.0
    assert capped_timeout(0.8, 10.0, 8) == math.inf  # exactly B arrivals a service: no timer does
    assert capped_timeout(2.0, 10.0, 8) == math.inf
    assert capped_timeout(2.0, 10.0, 1) == math.inf
    # Just below, it grows without bound, while the published rule stays at 8.75.
    ladder = [capped_timeout(0.8 * (1 - 10.0**-k), 10.0, 8) for k in (3, 5, 7, 9)]
    assert all(later > sooner + 3 for sooner, later in pairwise(ladder))
    assert ladder[0] > 2 * paper_timeout(0.8, 10.0)
    # A batch that is never full: the published rule is the limit.
    assert capped_timeout(1.0, 10.0, 200) == pytest.approx(paper_timeout(1.0, 10.0), rel=1e-9)


rates = st.floats(0.01, 10.0)
services = st.floats(0.01, 20.0)
sizes = st.integers(1, 40)


@given(rates, services, sizes)
def test_the_capped_rule_is_never_shorter(rate, service_s, batch_size):
    assert capped_timeout(rate, service_s, batch_size) >= paper_timeout(rate, service_s)


@given(rates, services, sizes, st.floats(1.0, 2.0))
def test_the_capped_rule_is_monotone(rate, service_s, batch_size, factor):
    timeout_s = capped_timeout(rate, service_s, batch_size) * (1 - 1e-9)
    assert capped_timeout(rate * factor, service_s, batch_size) >= timeout_s  # more load: longer
    assert capped_timeout(rate, service_s * factor, batch_size) >= timeout_s  # slower: longer
    larger = capped_timeout(rate, service_s, batch_size + 1)
    assert larger * (1 - 1e-9) <= capped_timeout(rate, service_s, batch_size)  # room: shorter


@given(rates, st.floats(0, 50), sizes)
def test_the_cycle_lies_between_immediate_and_full(rate, timeout_s, batch_size):
    cycle = mean_cycle(rate, timeout_s, batch_size) * rate
    assert 1 - 1e-9 <= cycle <= batch_size + 1e-9
    assert cycle <= (1 + rate * timeout_s) * (1 + 1e-9)  # what it would be without the cap


@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan, "1", None, True])
def test_bad_rates_and_times_are_named(bad):
    for call in (paper_timeout, lambda *a: capped_timeout(*a, 8)):
        with pytest.raises(ConfigError, match="rate"):
            call(bad, 1.0)
        with pytest.raises(ConfigError, match="service_s"):
            call(1.0, bad)
    with pytest.raises(ConfigError, match="rate"):
        mean_cycle(bad, 1.0, 8)


@pytest.mark.parametrize("bad", [0, -3, 1.5, "8", None, True])
def test_bad_batch_sizes_are_named(bad):
    with pytest.raises(ConfigError, match="batch_size"):
        capped_timeout(0.87, SERVICE_S, bad)
    with pytest.raises(ConfigError, match="batch_size"):
        mean_cycle(0.87, 1.0, bad)


@pytest.mark.parametrize("bad", [-0.5, math.nan, "1", None])
def test_bad_timers_are_named(bad):
    with pytest.raises(ConfigError, match="timeout_s"):
        mean_cycle(0.87, bad, 8)
