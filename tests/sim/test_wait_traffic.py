"""WAIT's bursty traffic: rates, classes, and what WAIT makes of it."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import attrs
import pytest

from dllm_sched import Capacity, ConfigError, Policy, Request, presets
from dllm_sched.sim.arrivals import MMPP, Poisson
from dllm_sched.sim.report import Result
from dllm_sched.sim.service import Constant, Linear, ServiceModel
from dllm_sched.sim.shapes import Work, gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.wait_traffic import FIGURE_ARRIVALS, WAIT_TRAFFIC, TypeArrivals, TypedLoop
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.theory.arrivals import time_average_rate, two_state
from dllm_sched.theory.ladder import GSM8K_BLOCKS
from dllm_sched.theory.wait import TrafficType, booking_limits

FOUR = WAIT_TRAFFIC["four_types"]


def test_time_averages() -> None:
    """``(q10 l0 + q01 l1) / (q01 + q10)``."""
    assert FIGURE_ARRIVALS.rate == pytest.approx((0.6 * 50 + 0.2 * 120) / 0.8) == 67.5
    found = [each.arrivals.rate for each in FOUR.types]
    assert found == pytest.approx([175, 71.875, 25, 10])
    for loop in WAIT_TRAFFIC.values():
        for each in loop.types:
            arrivals: Any = each.arrivals
            (_, q01), (q10, _) = arrivals.generator
            slow, fast = arrivals.rates
            expected = (q10 * slow + q01 * fast) / (q01 + q10)
            assert arrivals.rate == pytest.approx(expected)
            assert expected == pytest.approx(time_average_rate(arrivals.rates, two_state(q01, q10)))


def test_names_and_lengths() -> None:
    lengths = {
        name: [each.decode_len for each in loop.types] for name, loop in WAIT_TRAFFIC.items()
    }
    assert lengths["four_types"] == [25, 75, 125, 175]
    assert lengths["low_demand_low_shift"] == lengths["low_demand_higher_shift"] == [10, 20]
    assert lengths["high_demand_high_shift"] == [100, 200, 300]
    assert len(lengths["ten_types"]) == 10
    limits = booking_limits(list(FOUR.traffic.values()), 256)
    assert [round(each.limit, 2) for each in limits] == [78.06, 93.71, 54.04, 30.19]


def test_arrivals_come_in_order_and_at_their_rates() -> None:
    loop = attrs.evolve(FOUR, until_s=400.0, seed=3)
    arrivals = list(loop)
    assert all(before[0] <= after[0] for before, after in pairwise(arrivals))
    assert arrivals[-1][0] < 400
    assert arrivals == list(loop)
    counts = Counter(work.num_blocks for _, work in arrivals)
    for each in loop.types:  # states of seconds: dozens of independent stays in 400 s
        assert counts[each.decode_len] / 400 == pytest.approx(each.arrivals.rate, rel=0.25)
    assert len(list(attrs.evolve(loop, max_requests=7))) == 7
    halved = loop.scaled(0.5)
    assert halved.types[0].arrivals.rate == pytest.approx(87.5)


def test_requests_are_of_their_class() -> None:
    _, work = next(iter(FOUR))
    request = FOUR.make_request("a", work, 0.0)
    assert request.request_class == f"decode {work.num_blocks}"
    assert work == Work(25, request.max_new_tokens, 1, work.num_blocks, work.num_steps, work[5])
    assert work.num_steps == work.num_blocks + 1 == work.block_ends[-1]


def served(loop: TypedLoop, policy: Policy, service: ServiceModel) -> Result:
    return simulate(
        loop,
        policy=policy,
        capacity=Capacity(max_num_seqs=256),
        service=service,
        make_request=loop.make_request,
    )


def test_everybody_is_served_under_any_rule() -> None:
    """The published simulator drops what is left at the end of its trace."""
    loop = attrs.evolve(FOUR.scaled(0.1), until_s=20.0)
    count = len(list(loop))
    for policy in (
        presets.wait(256, loop.traffic),
        presets.wait(256, loop.traffic, rule="strict"),
        presets.wait(256, loop.traffic, rate="ema"),
        presets.wait(256, loop.traffic, rate="running_mean", hold_rows=False),
        presets.nested_wait(256, loop.traffic, stage="step", rate="log_band"),
    ):
        result = served(loop, policy, Linear(0.02, row_s=1e-4))
        assert result.num_requests == count


def test_holding_the_rows_costs_time_and_not_holding_them_none() -> None:
    """Below saturation; and to wait for every type costs most."""
    loop = attrs.evolve(FOUR.scaled(0.1), until_s=40.0)
    service = Linear(0.02, row_s=1e-4)
    mean = {
        name: served(loop, policy, service).mean()
        for name, policy in {
            "continuous": presets.continuous(256),
            "rows go on": presets.wait(256, loop.traffic, hold_rows=False),
            "published": presets.wait(256, loop.traffic),
            "strict": presets.wait(256, loop.traffic, rule="strict"),
        }.items()
    }
    assert mean["continuous"] < mean["rows go on"] < 1.03 * mean["continuous"]
    assert 1.2 * mean["rows go on"] < mean["published"] < 0.5 * mean["strict"]


@pytest.mark.parametrize(
    "policy",
    [
        presets.wait(64, FOUR.traffic),
        presets.wait(64, FOUR.traffic, rule="strict", hold_rows=False),
        presets.nested_wait(48, FOUR.traffic, stage="step"),
        presets.fluid_fill(64),
        presets.fixed_fill_online(64, rule="paper"),
    ],
    ids=["wait", "strict", "nested", "fluid", "online"],
)
def test_jumps_change_nothing(policy: Policy) -> None:
    loop = attrs.evolve(FOUR.scaled(0.03), until_s=20.0)
    found = [
        simulate(
            loop,
            policy=policy,
            capacity=Capacity(max_num_seqs=64),
            service=Linear(0.015625, row_s=2.0**-12),  # exact in binary
            make_request=loop.make_request,
            jump=jump,
        )
        for jump in (True, False)
    ]
    assert list(found[0].latency_s) == pytest.approx(list(found[1].latency_s), rel=1e-9)
    assert found[0].num_requests > 100


# --- on the block histogram -----------------------------------------------------------------------

BLOCKS = {blocks: TrafficType(float(n), 0, blocks) for blocks, n in GSM8K_BLOCKS.items()}


def by_blocks(request_id: str, work: Work, _arrival_s: float) -> Request:
    return Request(
        request_id,
        prompt_len=work.prompt_len,
        max_new_tokens=work.max_new_tokens,
        block_length=work.block_length,
        request_class=work.num_blocks,
        payload=work,
    )


@pytest.mark.parametrize("bursty", [False, True])
def test_on_gsm8k_blocks_continuous_batching_beats_both(bursty: bool) -> None:
    """A step costs the same whatever the batch, so a slot left empty is lost.

    Shares for eleven types of requests, in whole requests, leave half of 16 slots empty at a load
    of 0.85; segments leave a third empty.
    """
    step_s = 0.024
    rate = 0.85 * 16 / (290.39 * step_s)
    slow, fast = 50 * rate / 67.5, 120 * rate / 67.5
    arrivals = MMPP.two_state(slow, fast, leave_first=0.02, leave_second=0.06)

    def run(policy: Policy) -> Result:
        return simulate(
            OpenLoop(arrivals if bursty else Poisson(rate), gsm8k(), seed=3, max_requests=600),
            policy=policy,
            capacity=Capacity(max_num_seqs=16),
            service=Constant(step_s),
            make_request=by_blocks,
        )

    continuous = run(presets.continuous(16))
    wait = run(presets.wait(16, BLOCKS, hold_rows=False))
    nested = run(presets.nested_wait(16))
    assert continuous.occupancy > 0.8
    assert 0.4 < wait.occupancy < 0.55
    assert 0.6 < nested.occupancy < 0.75
    assert min(wait.mean(), nested.mean()) > 2 * continuous.mean()


def test_full_slots_of_rows_that_wait_for_each_other_go_on() -> None:
    """64 rows, fewer before each segment than it starts with: as written hardly anybody goes."""
    rate = 0.6 * 64 / (290.39 * 0.024)
    nested, continuous = (
        simulate(
            OpenLoop(Poisson(rate), gsm8k(), seed=3, max_requests=1000),
            policy=policy,
            capacity=Capacity(max_num_seqs=64),
            service=Constant(0.024),
        )
        for policy in (presets.nested_wait(64), presets.continuous(64))
    )
    assert nested.mean() < 2.5 * continuous.mean()


# --- arguments ------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    poisson = Poisson(1.0)
    one = TypeArrivals("a", poisson, 1, 2)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ConfigError):
            TypeArrivals("a", poisson, bad, 2)
        with pytest.raises(ConfigError):
            TypeArrivals("a", poisson, 1, bad)
        with pytest.raises(ConfigError):
            TypedLoop([one], max_requests=bad)
    for types in ([], [3], [one, TypeArrivals("b", poisson, 1, 2)]):
        with pytest.raises(ConfigError, match="types"):
            TypedLoop(types)
    for until in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError):
            TypedLoop([one], until_s=until)
    with pytest.raises(ConfigError):
        TypedLoop([one], seed=-1)
    with pytest.raises(ConfigError):
        TypedLoop([one]).scaled(0.0)
