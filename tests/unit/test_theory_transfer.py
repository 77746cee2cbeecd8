"""Burst-gap transfers: one burst, many bursts, and that they agree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_sched import ConfigError
from dllm_sched.theory.transfer import burst_s, steady_stall_s


def test_what_the_path_holds_costs_only_the_issue():
    assert burst_s(2**20, issue_s=1e-6) == (1e-6, 2**20)
    assert burst_s(0) == (0, 0)


def test_what_it_does_not_hold_drains_first():
    """4 MiB beyond the 4.25 outstanding, at 717 GB/s: 5.8498 us."""
    seconds, backlog = burst_s(8.25 * 2**20)
    assert seconds == pytest.approx(5.8498e-6, rel=1e-4)
    assert backlog == 4.25 * 2**20
    assert burst_s(100, backlog_bytes=50, bandwidth=10, outstanding=60) == (9, 60)


def test_many_bursts_by_hand():
    # 100 bytes a burst; the gap drains 10 * 3 of them, the path holds 60.
    assert steady_stall_s(100, 3, bandwidth=10, outstanding=60) == 7
    assert steady_stall_s(100, 8, bandwidth=10, outstanding=60) == 4
    assert steady_stall_s(100, 99, bandwidth=10, outstanding=100) == 0


@given(st.integers(0, 200), st.integers(0, 40), st.integers(1, 20), st.integers(0, 200))
def test_the_steady_state_is_where_bursts_settle(num_bytes, gap, bandwidth, outstanding):
    backlog, seconds = 0.0, 0.0
    for _ in range(500):
        seconds, backlog = burst_s(
            num_bytes, backlog_bytes=backlog, bandwidth=bandwidth, outstanding=outstanding
        )
        backlog = max(0.0, backlog - bandwidth * gap)
    settled = steady_stall_s(num_bytes, gap, bandwidth=bandwidth, outstanding=outstanding)
    assert seconds == pytest.approx(settled, abs=1e-9)


@pytest.mark.parametrize(
    "call",
    [
        lambda: burst_s(-1),
        lambda: burst_s(1, bandwidth=0),
        lambda: steady_stall_s(1, -1),
        lambda: steady_stall_s(1, 1, outstanding=float("nan")),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(ConfigError):
        call()
