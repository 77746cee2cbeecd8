"""X-Stage: layers that ship their results, a writer's credit, and what interleaving gains."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_sched import Capacity, ConfigError, presets
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Constant, Exchange, Linear
from dllm_sched.sim.shapes import gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.theory.transfer import (
    BANDWIDTH_BYTES_PER_S,
    OUTSTANDING_BYTES,
    burst_s,
    exchange_s,
    interleaving_gain,
)

MIB = 2**20


def turn_by_turn(layers, compute, num_bytes, waves, issue, bandwidth, credit):
    """The device and the path, event by event, bytes counted as they leave."""
    now, backlog, seen_at = 0.0, 0.0, 0.0
    left = [0.0] * waves  # instant at which a wave's last bytes have arrived
    for _ in range(layers):
        for wave in range(waves):
            now = max(now, left[wave]) + compute / waves + issue
            backlog = max(0.0, backlog - bandwidth * (now - seen_at))
            held, after = burst_s(
                num_bytes / waves, backlog_bytes=backlog, bandwidth=bandwidth, outstanding=credit
            )
            left[wave] = now + (backlog + num_bytes / waves) / bandwidth
            now += held
            backlog, seen_at = after, now
    return max(now, *left)


amounts = st.integers(0, 50)


@given(st.integers(1, 8), amounts, amounts, st.integers(1, 5), amounts, st.integers(1, 9), amounts)
def test_the_closed_form_is_that_of_turn_by_turn(
    layers, compute, num_bytes, waves, issue, bandwidth, credit
):
    found = exchange_s(
        layers,
        compute,
        num_bytes,
        waves=waves,
        issue_s=issue,
        bandwidth=bandwidth,
        outstanding=credit,
    )
    expected = turn_by_turn(layers, compute, num_bytes, waves, issue, bandwidth, credit)
    assert found == pytest.approx(expected)


def test_by_hand():
    # 3 layers of 4 s and 60 bytes at 10 a second.
    assert exchange_s(3, 4, 60, bandwidth=10, outstanding=20) == 30
    # Halves of 2 s and 3 s of path; the credit holds 2 s of it, so a writer is held for 1 s more
    # than it computes, and the path is always busy: 2 + 3 + 5 * 3.
    assert exchange_s(3, 4, 60, waves=2, bandwidth=10, outstanding=20) == 20
    # Credit for 1 s of path only: held for 2 s, a turn takes 4: 2 + 3 + 5 * 4.
    assert exchange_s(3, 4, 60, waves=2, bandwidth=10, outstanding=10) == 25


@given(st.floats(1e-6, 1), st.floats(1, 1e9), st.floats(0, 1e9), st.integers(2, 6))
def test_the_gain_is_at_least_one_and_at_most_two_without_a_cost_of_issuing(
    compute, num_bytes, credit, waves
):
    gain = interleaving_gain(compute, num_bytes, waves=waves, outstanding=credit)
    path = num_bytes / BANDWIDTH_BYTES_PER_S
    assert 1 - 1e-9 <= gain <= (compute + path) / max(compute, path) * (1 + 1e-6) <= 2.000003
    many = exchange_s(4000, compute, num_bytes) / exchange_s(
        4000, compute, num_bytes, waves=waves, outstanding=credit
    )
    assert many == pytest.approx(gain, rel=1e-3)


def test_without_credit_there_is_no_overlap_and_credit_is_worth_what_it_hides():
    assert interleaving_gain(1e-5, 8 * MIB, outstanding=0) == pytest.approx(1)
    gains = [interleaving_gain(1e-5, 8 * MIB, outstanding=q * MIB) for q in (0, 1, 2, 4, 8)]
    assert gains == sorted(gains)
    assert gains[-1] > 1.8


def test_the_published_path():
    """4.25 MiB at 717 GB/s: 6.2 us of writing that a wave may leave behind."""
    hidden = OUTSTANDING_BYTES / BANDWIDTH_BYTES_PER_S
    assert hidden == pytest.approx(6.2154e-6, rel=1e-4)
    # A wave's burst that fits is hidden whole; of a large one, that much per wave.
    assert exchange_s(1, 40e-6, 8.5 * MIB, waves=2) == pytest.approx(40e-6 + hidden)
    plain = exchange_s(100, 40e-6, 64 * MIB)
    waved = exchange_s(100, 40e-6, 64 * MIB, waves=2)
    assert plain - waved == pytest.approx(199 * hidden)


def gains_of_a_grid():
    """Layers that ship 1 to 64 MiB and compute from a quarter to four times as long as that."""
    return [
        interleaving_gain(ratio * size * MIB / BANDWIDTH_BYTES_PER_S, size * MIB, issue_s=1e-6)
        for size in (1, 2, 4, 8, 16, 32, 64)
        for ratio in (0.25, 0.5, 1, 2, 4)
    ]


def test_gains_over_a_grid_are_of_the_published_size():
    """The paper's claims for its own kernels: 1.18x in the geometric mean, up to 1.62x.

    Ours is another machine model over another grid; it need not give these, and must not exceed 2.
    """
    gains = gains_of_a_grid()
    mean = math.exp(math.fsum(map(math.log, gains)) / len(gains))
    assert 1.05 < mean < 1.5
    assert 1.5 < max(gains) <= 2


def test_issuing_twice_may_cost_more_than_it_hides():
    assert interleaving_gain(1e-6, 0.1 * MIB, issue_s=5e-6) < 1


# --- in the simulator -----------------------------------------------------------------------------


def test_the_service_model_is_the_closed_form_of_its_tokens():
    model = Exchange(Linear(0.01, token_s=1e-6), num_layers=20, bytes_per_token=32_768, waves=2)
    per_layer = (0.01 + 512e-6) / 20
    assert model.step_s(16, 512) == exchange_s(20, per_layer, 512 * 32_768, waves=2)
    assert Exchange(Constant(0.02), num_layers=4, bytes_per_token=0).step_s(3, 99) == (
        pytest.approx(0.02)
    )


def test_any_policy_runs_on_it_and_the_gain_shows_in_its_latency():
    """20 layers, 32 KiB a token and layer (top 8 of 2,048 values in 16 bits), 16 rows."""
    latency = {}
    for waves in (1, 2):
        for policy in (presets.continuous(16), presets.fixed_fill(16, 1.0), presets.dws(16)):
            service = Exchange(
                Constant(0.002), num_layers=20, bytes_per_token=32_768, waves=waves, issue_s=2e-6
            )
            result = simulate(
                OpenLoop(Poisson(4.0), gsm8k(), max_requests=400, seed=1),
                policy=policy,
                capacity=Capacity(max_num_seqs=16, window_blocks=2),
                service=service,
                phases=True,
            )
            assert result.num_requests == 400
            latency[policy.name, waves] = result.mean()
    for name in ("continuous", "fixed_fill", "dws"):
        assert 1.02 < latency[name, 1] / latency[name, 2] < 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: exchange_s(0, 1, 1),
        lambda: exchange_s(1, -1, 1),
        lambda: exchange_s(1, 1, math.nan),
        lambda: exchange_s(1, 1, 1, waves=0),
        lambda: exchange_s(1, 1, 1, bandwidth=0),
        lambda: exchange_s(1, 1, 1, outstanding=-1),
        lambda: exchange_s(1, 1, 1, issue_s=math.inf),
        lambda: interleaving_gain(0, 0),
        lambda: Exchange(None, num_layers=1, bytes_per_token=1),
        lambda: Exchange(Constant(1.0), num_layers=0, bytes_per_token=1),
        lambda: Exchange(Constant(1.0), num_layers=1, bytes_per_token=-1),
        lambda: Exchange(Constant(1.0), num_layers=1, bytes_per_token=1, waves=True),
        lambda: Exchange(Constant(1.0), num_layers=1, bytes_per_token=1, bandwidth=math.inf),
    ],
)
def test_bad_arguments(make):
    with pytest.raises(ConfigError):
        make()
