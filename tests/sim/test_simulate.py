"""The virtual-time driver against published numbers, closed forms, and itself step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dllm_sched import Capacity, ConfigError, FinishReason, GrowingKV, Policy, Request, presets
from dllm_sched.events import Event, RequestFinished, RequestJoined, RequestSubmitted, to_json
from dllm_sched.policies import Control, PastDeadline, StepCap, YoungestFirst
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Constant, Linear, ServiceModel
from dllm_sched.sim.shapes import Work, gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import ClosedLoop, OpenLoop, Replay

GEN_TIMES = [
    7.298050760058686,
    8.395521391998045,
    6.5397950309561566,
    9.397448202013038,
    12.157834048965015,
    12.024951440980658,
    8.98733195499517,
    5.10481027897913,
]


class PerBatch(ServiceModel):
    """The recorded time of each batch, a batch being one step here."""

    def __init__(self) -> None:
        self.times = iter(GEN_TIMES)

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        return next(self.times)


@pytest.mark.parametrize(
    ("rate", "mean", "percentiles", "wait"),
    [
        (0.366, 19.2346085958958, (19.2493, 28.9789, 34.6096), 10.4964),
        (0.641, 16.19967951640585, (15.8369, 23.0600, 24.9318), 7.4615),
        (0.870, 20.0632921639558, (18.9989, 29.9790, 32.3237), 11.3251),
    ],
)
def test_table_iii_to_the_last_digit(
    rate: float, mean: float, percentiles: tuple[float, ...], wait: float
) -> None:
    arrivals = np.cumsum(np.random.default_rng(42).exponential(1 / rate, 64))
    one_step = Work(10, 32, 32, 1, 1, (1,))
    result = simulate(
        Replay([(float(at), one_step) for at in arrivals]),
        policy=presets.fixed_fill(8),
        capacity=Capacity(max_num_seqs=8),
        service=PerBatch(),
    )
    assert result.num_requests == 64
    assert result.mean() == pytest.approx(mean, rel=1e-12)
    assert [round(result.percentile(q), 4) for q in (50, 90, 99)] == list(percentiles)
    assert round(result.mean("wait_s"), 4) == wait


@pytest.mark.parametrize(("slots", "gain"), [(8, 1.377), (16, 1.469)])
def test_slot_refill_beats_run_to_completion_by_the_known_gain(slots: int, gain: float) -> None:
    backlog = Replay([(0.0, work) for work in gsm8k().draw(np.random.default_rng(1), 20_000)])
    times = [
        simulate(
            backlog,
            policy=policy,
            capacity=Capacity(max_num_seqs=slots),
            service=Constant(1.0),
        ).duration_s
        for policy in (presets.fixed_fill(slots), presets.continuous(slots))
    ]
    assert times[0] / times[1] == pytest.approx(gain, rel=0.01)


def open_loop(rate: float, count: int, seed: int = 3) -> OpenLoop:
    return OpenLoop(Poisson(rate), gsm8k(), seed=seed, max_requests=count)


def log_of(policy: Policy, *, jump: bool, **kwargs: Any) -> list[str]:
    events: list[Event] = []
    capacity = kwargs.pop("capacity", Capacity(max_num_seqs=4))
    simulate(
        kwargs.pop("workload", open_loop(0.3, 60)),
        policy=policy,
        capacity=capacity,
        service=Linear(0.024, row_s=0.0007),
        jump=jump,
        observers=[events.append],
        **kwargs,
    )
    steps = ("StepPlanned", "StepCompleted", "PolicySet")
    kept = [event for event in events if type(event).__name__ not in steps]
    return [to_json(event) for event in kept if not isinstance(event, RequestJoined)] + [
        f"{event.at} {event.request_id} {event.slot}"
        for event in kept
        if isinstance(event, RequestJoined)
    ]


POLICIES = {
    "per_request": presets.per_request(),
    "fixed_fill": presets.fixed_fill(4),
    "fixed_fill with timer": presets.fixed_fill(4, 1.5),
    "continuous": presets.continuous(4),
    "block_refill": presets.block_refill(4),
    "caps": Policy(eviction=StepCap(250) | PastDeadline()),
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("blocks", [False, True])
def test_jumped_and_stepped_runs_give_the_same_events(name: str, blocks: bool) -> None:
    jumped = log_of(POLICIES[name], jump=True, blocks=blocks)
    assert len(jumped) > 120
    assert jumped == log_of(POLICIES[name], jump=False, blocks=blocks)


@pytest.mark.parametrize("name", POLICIES)
def test_jumped_and_stepped_runs_give_the_same_totals(name: str) -> None:
    stats = [
        simulate(
            open_loop(0.02, 60),
            policy=POLICIES[name],
            capacity=Capacity(max_num_seqs=4),
            service=Linear(0.25, row_s=0.0625),
            jump=jump,
        ).stats._replace(num_rounds=0)
        for jump in (True, False)
    ]
    assert stats[0] == stats[1]


def test_jumps_are_exact_under_memory_pressure_and_deadlines() -> None:
    def request(request_id: str, work: Work, arrival_s: float) -> Request:
        return Request(
            request_id,
            prompt_len=work.prompt_len,
            max_new_tokens=work.max_new_tokens,
            deadline_at=arrival_s + 25.0,
            payload=work,
        )

    def run(*, jump: bool) -> list[str]:
        return log_of(
            Policy(eviction=PastDeadline() | YoungestFirst(keep=True)),
            jump=jump,
            capacity=Capacity(max_num_seqs=4, num_pages=70, memory=GrowingKV(page_size=16)),
            make_request=request,
            workload=open_loop(0.8, 40),
        )

    jumped = run(jump=True)
    assert any('"deadline"' in line for line in jumped)
    assert any("RequestPreempted" in line for line in jumped)
    assert jumped == run(jump=False)


def test_every_request_of_a_closed_loop_is_served_and_sent_after_its_answer() -> None:
    events: list[Event] = []
    result = simulate(
        ClosedLoop(5, gsm8k(), think_s=10.0, seed=2, max_requests=60),
        policy=presets.continuous(4),
        capacity=Capacity(max_num_seqs=4),
        service=Constant(0.01),
        observers=[events.append],
    )
    assert result.num_requests == 60
    active = most = 0
    for event in events:
        active += type(event).__name__ == "RequestSubmitted"
        active -= isinstance(event, RequestFinished)
        most = max(most, active)
    assert most <= 5


def test_an_unstable_run_is_said_not_left_to_grow() -> None:
    result = simulate(
        open_loop(10.0, 100_000),
        policy=presets.continuous(4),
        capacity=Capacity(max_num_seqs=4),
        service=Constant(0.1),
        max_waiting=500,
    )
    assert result.unstable
    assert result.counts.waiting > 500


def test_work_left_behind_by_a_finish_reason_is_told_apart() -> None:
    result = simulate(
        open_loop(0.01, 30),
        policy=Policy(eviction=StepCap(200)),
        capacity=Capacity(max_num_seqs=4),
        service=Constant(0.1),
    )
    assert result.reasons[FinishReason.MAX_STEPS] + result.reasons[FinishReason.EOS] == 30
    assert result.num_requests == result.reasons[FinishReason.EOS] > 0
    assert max(result.steps) <= 199


def test_bad_arguments_are_named() -> None:
    def run(workload: Any = (), **kwargs: Any) -> None:
        simulate(
            workload,
            policy=presets.continuous(4),
            capacity=Capacity(max_num_seqs=4),
            service=Constant(0.1),
            **kwargs,
        )

    work = Work(10, 32, 32, 1, 1, (1,))
    with pytest.raises(ConfigError, match=r"in order, got 1\.0 after 2\.0"):
        run([(2.0, work), (1.0, work)])
    for wrong in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ConfigError, match="finite, >= 0 and in order"):
            run([(wrong, work)])
    impossible = work._replace(num_steps=2)
    with pytest.raises(ConfigError, match="r0 needs what cannot be"):
        run([(0.0, impossible)])
    with pytest.raises(ConfigError, match="max_waiting"):
        run(max_waiting=0)
    with pytest.raises(ConfigError, match="until_s"):
        run(until_s=float("nan"))


@pytest.mark.parametrize("step_s", [0.0, -1.0, float("inf"), float("nan")])
def test_steps_that_take_no_time_or_no_number_are_refused(step_s: float) -> None:
    class Odd(ServiceModel):
        def step_s(self, num_rows: int, num_tokens: int) -> float:
            return step_s

    with pytest.raises(ConfigError, match="s for a step of 1 rows"):
        simulate(
            [(0.0, Work(10, 32, 32, 1, 1, (1,)))],
            policy=presets.continuous(4),
            capacity=Capacity(max_num_seqs=4),
            service=Odd(),
        )


def test_a_closed_loop_ends_at_an_instant() -> None:
    events: list[Event] = []
    result = simulate(
        ClosedLoop(3, gsm8k(), think_s=1.0),
        policy=presets.continuous(2),
        capacity=Capacity(max_num_seqs=2),
        service=Constant(0.02),
        until_s=100.0,
        observers=[events.append],
    )
    last = max(event.at for event in events if isinstance(event, RequestSubmitted))
    assert 90.0 < last <= 100.0
    assert result.num_requests == result.counts.submitted > 20


def test_figures_are_plain_numbers_even_when_nobody_came() -> None:
    result = simulate(
        (),
        policy=presets.continuous(4),
        capacity=Capacity(max_num_seqs=4),
        service=Constant(0.1),
    )
    figures = result.figures()
    assert figures["num_requests"] == 0
    assert figures["latency_mean_s"] is None
    assert "NaN" not in result.to_json()


class Halved(Control):
    """Half the work for whoever has a number that can be divided by three; else a quarter less."""

    def knobs(self, state: Any, rv: Any, view: Any) -> tuple[dict[str, float], float]:
        return ({"share": 0.5} if int(rv.id[1:]) % 3 == 0 else {}), float("inf")

    def batch_knobs(self, state: Any, view: Any) -> tuple[dict[str, float], float]:
        return {"share": 0.75}, float("inf")


def share_of(work: Work, knobs: Any) -> Work:
    ends = tuple(round(knobs["share"] * end) for end in work.block_ends)
    return work._replace(num_steps=ends[-1], block_ends=ends)


@pytest.mark.parametrize("jump", [True, False])
def test_a_request_needs_what_its_knobs_leave_of_it(jump: bool) -> None:
    """A row's own knobs before the batch's."""
    works = [Work(1, 96, 32, 3, steps, (steps - 8, steps - 4, steps)) for steps in (40, 80, 60)]
    result = simulate(
        [(0.0, works[number % 3]) for number in range(9)],
        policy=Policy(control=Halved()),
        capacity=Capacity(max_num_seqs=1),
        service=Constant(1.0),
        blocks=True,
        under_knobs=share_of,
        jump=jump,
    )
    assert list(result.steps) == [20, 60, 45] * 3
    assert result.duration_s == 3 * 125


def test_a_row_that_comes_back_to_less_than_it_has_done_ends_at_its_next_step() -> None:
    """Kept progress of 4 blocks of 10 steps; the second time each block takes 1."""
    work = Work(16, 160, 16, 10, 100, tuple(range(10, 101, 10)))
    times: list[int] = []

    def quicker(given: Work, knobs: Any) -> Work:
        times.append(1)
        return (
            given if len(times) <= 2 else given._replace(num_steps=10, block_ends=(*range(1, 11),))
        )

    result = simulate(
        [(0.0, work), (0.0, work)],
        policy=Policy(eviction=YoungestFirst(keep=True)),
        capacity=Capacity(max_num_seqs=2, num_pages=12, memory=GrowingKV(page_size=16)),
        service=Constant(1.0),
        under_knobs=quicker,
    )
    assert result.num_requests == 2
    assert result.stats.num_preempted == 1
    assert min(result.steps) < 100
    assert max(result.steps) == 100
