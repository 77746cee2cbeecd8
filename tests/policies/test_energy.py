"""Energy: whose it was, exactly, and batches filled up to a target of joules per request."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from dllm_sched import (
    Capacity,
    ConfigError,
    FinishReason,
    GrowingKV,
    Phase,
    PhaseChange,
    Policy,
    Request,
    RowFate,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.events import RequestJoined
from dllm_sched.observers import EnergyMeter
from dllm_sched.policies import EnergyFill, Fill, MaxWait, YoungestFirst
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Constant
from dllm_sched.sim.shapes import gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.testing import check_policy
from dllm_sched.theory.energy import batch_gain, fixed_share, smallest_batch


def request(name, blocks=1):
    return Request(name, prompt_len=8, max_new_tokens=8 * blocks, block_length=8)


def lived(seed, *, batches):
    """Live a random day; return the windows, and who took part in each step by the batches."""
    rng = random.Random(seed)
    meter = EnergyMeter()
    sched = Scheduler(
        capacity=Capacity(max_num_seqs=4, num_pages=30, memory=GrowingKV(page_size=4)),
        policy=Policy(eviction=YoungestFirst()),
        observers=[meter],
    )
    windows, steps, now, names = [], {}, 0.0, 0
    for _ in range(200):
        now += 1.0
        for _ in range(rng.choice((0, 0, 1))):
            # names come again: an id is free after its end
            name = f"r{names % 7}"
            if not any(view.id == name for view in sched._views.values()):
                sched.submit(request(name, rng.randint(1, 4)), now=now)
            names += 1
        batch = sched.next_step(now=now).batch
        if batch is not None:
            if rng.random() < 0.2:  # takes part in the step all the same
                sched.cancel(rng.choice(batch.rows).request.id, now=now)
            if rng.random() < 0.1:
                fates = {rng.choice(batch.rows).slot: rng.choice(list(RowFate))}
                sched.fail_step(batch, RuntimeError("no"), rows=fates, now=now)
            else:
                taken = min(rng.randint(1, 3), sched.horizon().steps)
                for row in batch.rows:
                    steps[row.request.id] = steps.get(row.request.id, 0) + taken
                ends = tuple(
                    RowFinished(row.slot, FinishReason.EOS)
                    for row in batch.rows
                    if rng.random() < 0.2
                )
                sched.complete_step(batch, StepOutcome(ends), now=now, steps=taken)
        if rng.random() < 0.15:
            windows.append((meter.close(Fraction(rng.randint(1, 10**6), 7)), steps))
            steps = {}
    batches.extend(windows)
    return sched


@pytest.mark.parametrize("seed", range(8))
def test_shares_are_the_row_steps_of_the_batches_and_sum_to_the_window(seed):
    windows = []
    sched = lived(seed, batches=windows)
    assert sched.stats().row_steps > 200
    for window, steps in windows:
        by_name = {}
        for share in window.shares:
            by_name[share.request_id] = by_name.get(share.request_id, 0) + share.row_steps
        assert by_name == steps
        total = sum(steps.values())
        assert window.row_steps == total
        if not total:
            assert window.unattributed_j == window.joules
            continue
        assert sum(share.joules for share in window.shares) == window.joules  # in fractions
        for share in window.shares:
            assert share.joules == window.joules * share.row_steps / total


def test_a_life_is_the_sum_of_its_shares_and_floats_sum_to_the_window():
    meter, windows, lives = EnergyMeter(), [], {}

    def watch(event):
        meter(event)
        if isinstance(event, RequestJoined) and len(windows) < event.at // 7:
            windows.append(meter.close(123.456))

    result = simulate(
        OpenLoop(Poisson(0.3), gsm8k(), seed=2, max_requests=150),
        policy=presets.continuous(4),
        capacity=Capacity(max_num_seqs=4),
        service=Constant(0.03),
        observers=[watch],
    )
    windows.append(meter.close(1.0))
    for window in windows:
        if window.shares:
            assert math.fsum(share.joules for share in window.shares) == pytest.approx(
                window.joules, rel=4e-16
            )
        for share in window.shares:
            lives.setdefault(share.request_id, []).append(share.joules)
    ended = [end for window in windows for end in window.ended]
    assert len(ended) == 150
    assert sum(end.row_steps for end in ended) == result.stats.row_steps == sum(result.steps)
    for end in ended:
        assert end.joules == pytest.approx(math.fsum(lives[end.request_id]), rel=1e-12)


@pytest.mark.parametrize("jump", [True, False])
def test_jumped_steps_count_as_often_as_they_were(jump):
    meter = EnergyMeter(step_j=lambda rows: 3.0 + rows)
    result = simulate(
        OpenLoop(Poisson(0.3), gsm8k(), seed=2, max_requests=60),
        policy=presets.continuous(4),
        capacity=Capacity(max_num_seqs=4),
        service=Constant(0.03),
        observers=[meter],
        jump=jump,
    )
    window = meter.close()
    assert window.joules == 3.0 * result.stats.num_steps + result.stats.row_steps
    assert sorted(share.row_steps for share in window.shares) == sorted(result.steps)


def test_a_step_of_some_rows_is_shared_by_all_that_run():
    meter = EnergyMeter()
    sched = Scheduler(
        capacity=Capacity(max_num_seqs=2),
        policy=Policy(
            composition=lambda round: (
                {Phase.PREFILL} if round.view.running_by_phase[Phase.PREFILL] else {Phase.REUSE}
            )
        ),
        observers=[meter],
    )
    sched.submit(request("a"), now=0.0)
    batch = sched.next_step(now=0.0).batch
    sched.complete_step(batch, StepOutcome(phases=(PhaseChange(0, Phase.REUSE),)), now=0.0)
    sched.submit(request("b"), now=0.0)
    batch = sched.next_step(now=0.0).batch
    assert [row.request.id for row in batch.rows] == ["b"]
    sched.complete_step(batch, now=0.0)
    window = meter.close(10.0)
    assert {share.request_id: share.row_steps for share in window.shares} == {"a": 1.5, "b": 0.5}
    assert window.row_steps == sched.stats().row_steps == 2


def test_tokens_and_figures_of_a_window():
    meter = EnergyMeter(tokens=lambda one, end: one.max_new_tokens)
    sched = Scheduler(capacity=Capacity(max_num_seqs=2), observers=[meter])
    for name, blocks in (("a", 1), ("b", 3)):
        sched.submit(request(name, blocks), now=0.0)
    for ends in ((), (0,), (1,)):
        batch = sched.next_step(now=0.0).batch
        outcome = StepOutcome(tuple(RowFinished(slot, FinishReason.EOS) for slot in ends))
        sched.complete_step(batch, outcome, now=0.0)
    window = meter.close(50.0)
    assert {end.request_id: (end.joules, end.tokens) for end in window.ended} == {
        "a": (20.0, 8),
        "b": (30.0, 24),
    }
    assert window.joules_per_token == 50.0 / 32
    assert window.joules_per_request == 25.0
    assert [end.joules_per_token for end in window.ended] == [2.5, 1.25]
    empty = meter.close(7.0)
    assert (empty.unattributed_j, empty.joules_per_token, empty.joules_per_request) == (
        7.0,
        None,
        None,
    )
    assert (empty.shares, empty.ended) == ((), ())


def test_a_meter_that_comes_late_counts_from_then_on():
    sched = Scheduler(capacity=Capacity(max_num_seqs=2))
    sched.submit(request("a"), now=0.0)
    sched.complete_step(sched.next_step(now=0.0).batch, now=0.0)
    meter = EnergyMeter()
    sched._observers.append(meter)
    sched._set_watch()
    sched.submit(request("b"), now=0.0)
    batch = sched.next_step(now=0.0).batch
    ended = tuple(RowFinished(row.slot, FinishReason.EOS) for row in batch.rows)
    sched.complete_step(batch, StepOutcome(ended), now=0.0)
    window = meter.close(4.0)
    assert [(share.request_id, share.joules) for share in window.shares] == [("b", 4.0)]
    assert sorted(end.request_id for end in window.ended) == ["a", "b"]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_readings_are_refused(bad):
    with pytest.raises(ConfigError, match="joules"):
        EnergyMeter().close(bad)
    with pytest.raises(ConfigError, match="step_j"):
        EnergyMeter().close()


def linear(fixed, own):
    return lambda rows: fixed + own * rows


def test_the_published_gains_do_not_follow_from_one_linear_model():
    """6.31x at 512 tokens and 1.17x at 4K, batch 16: the second is less than a longer row costs."""
    short = fixed_share(6.31, 16)
    assert batch_gain(linear(short, 1.0), 16) == pytest.approx(6.31)
    assert batch_gain(linear(fixed_share(1.17, 16), 1.0), 16) == pytest.approx(1.17)
    # a row that costs in proportion to its context: eight times as much at eight times the length
    assert batch_gain(linear(short, 8.0), 16) == pytest.approx(1.9617, abs=1e-3)
    assert short / fixed_share(1.17, 16) == pytest.approx(47.8, abs=0.1)


@pytest.mark.parametrize("fixed", [0.0, 1.0, 9.0, 40.0])
@pytest.mark.parametrize("target", [0.5, 1.2, 2.0, 3.4, 10.0, 50.0])
def test_the_batch_is_the_smallest_that_reaches_the_target(fixed, target):
    batch = linear(fixed, 1.0)
    found = smallest_batch(batch, target_j=target, most=12)
    reached = [size for size in range(1, 13) if batch(size) / size <= target]
    if reached:
        assert found == min(reached)
    else:
        assert all(batch(found) / found <= batch(size) / size for size in range(1, 13))


def test_an_idle_engine_waits_for_the_target_and_no_longer_than_told():
    fill = EnergyFill(3.0, linear(8.0, 1.0), 8, max_wait_s=5.0)
    assert fill.count == 4  # (8 + 4) / 4
    sched = Scheduler(capacity=Capacity(max_num_seqs=8), policy=Policy(timeout=fill))
    for index in range(3):
        sched.submit(request(f"r{index}"), now=float(index))
        update = sched.next_step(now=float(index))
        assert (update.batch, update.wake_at) == (None, 5.0)
    sched.submit(request("r3"), now=3.0)
    assert len(sched.next_step(now=3.0).batch.rows) == 4
    late = Scheduler(capacity=Capacity(max_num_seqs=8), policy=Policy(timeout=fill))
    late.submit(request("r"), now=1.0)
    assert late.next_step(now=5.9).batch is None
    assert len(late.next_step(now=6.0).batch.rows) == 1


def test_it_decides_as_a_fill_and_a_timer_of_that_size():
    rng = random.Random(3)
    for _ in range(5):
        size, wait = rng.randint(1, 4), rng.choice((1.0, 7.5, math.inf))
        target = (9.0 + size) / size + 1e-9
        logs = []
        for timeout in (
            EnergyFill(target, linear(9.0, 1.0), 4, wait),
            Fill(size) | MaxWait(wait),
        ):
            log = []
            simulate(
                OpenLoop(Poisson(0.2), gsm8k(), seed=1, max_requests=50),
                policy=Policy(timeout=timeout),
                capacity=Capacity(max_num_seqs=4),
                service=Constant(0.02),
                observers=[lambda event, log=log: log.append(event)],
            )
            logs.append([event for event in log if isinstance(event, RequestJoined)])
        assert logs[0] == logs[1]


def energy_and_latency(policy, rate):
    meter = EnergyMeter(step_j=lambda rows: 8.0 + rows)
    result = simulate(
        OpenLoop(Poisson(rate), gsm8k(), seed=8, max_requests=400),
        policy=policy,
        capacity=Capacity(max_num_seqs=8),
        service=Constant(0.0241),
        observers=[meter],
    )
    assert result.num_requests == 400
    return meter.close().joules / 400, result.mean()


def test_filling_saves_energy_at_light_load_and_costs_it_at_high_load():
    """Its gain is the fixed joules shared; but a batch run to its end steps with rows empty."""
    filled = presets.energy_fill(8, target_j=3.0, fixed_j=8.0, row_j=1.0, max_wait_s=60.0)
    plain = presets.continuous(8)
    light = energy_and_latency(filled, 0.08), energy_and_latency(plain, 0.08)
    assert light[0][0] < 0.65 * light[1][0]  # joules per request
    assert light[0][1] > 2 * light[1][1]  # and the wait that they cost
    busy = energy_and_latency(filled, 1.0), energy_and_latency(plain, 1.0)
    assert busy[0][0] > 1.05 * busy[1][0]


@pytest.mark.parametrize(
    "policy",
    [
        presets.energy_fill(4, target_j=3.0, fixed_j=4.0, row_j=1.0),
        Policy(timeout=EnergyFill(1.0, linear(8.0, 1.0), 3)),
    ],
)
def test_it_keeps_the_contract(policy):
    check_policy(policy)


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ({"target_j": 0.0}, "target_j"),
        ({"target_j": math.nan}, "target_j"),
        ({"most": 0}, "most"),
        ({"most": True}, "most"),
        ({"batch_j": 3.0}, "batch_j"),
        ({"batch_j": lambda rows: -1.0}, "batch_j"),
        ({"batch_j": lambda rows: math.nan}, "batch_j"),
        ({"max_wait_s": -1.0}, "MaxWait"),
    ],
)
def test_bad_arguments_are_named(bad, what):
    arguments = {"target_j": 3.0, "batch_j": linear(8.0, 1.0), "most": 4} | bad
    with pytest.raises(ConfigError, match=what):
        EnergyFill(**arguments)
    with pytest.raises(ConfigError, match="slots"):
        Scheduler(
            capacity=Capacity(max_num_seqs=2),
            policy=Policy(timeout=EnergyFill(3.0, linear(8.0, 1.0), 4)),
        )
