"""TeDiServe: the closed forms, every knob against the log it follows from, and deadlines met."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_sched import (
    BlockBoundary,
    Capacity,
    ConfigError,
    FinishReason,
    Policy,
    Request,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.events import RequestSubmitted
from dllm_sched.policies import ConfidenceThreshold, Slots
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Constant
from dllm_sched.sim.shapes import gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.testing import check_policy
from dllm_sched.theory.thresholds import check_grid, threshold_for_deadline, threshold_for_load

PAPER = ((0.7, 0.62), (0.9, 1.0))
GRID = ((0.6, 0.5), (0.7, 0.62), (0.8, 0.8), (0.9, 1.0))


def for_load(demand, grid=PAPER, slots=1.0):
    return threshold_for_load(grid, demand=demand, step_s=1.0, num_slots=slots)


def test_the_lower_threshold_carries_1_61_times_the_load():
    assert for_load(1.0) == 0.9
    assert for_load(1.0001) == 0.7
    assert pytest.approx(1.613, abs=5e-4) == 1 / 0.62
    # at the lower threshold the slots are full at exactly that load
    assert 1.613 * PAPER[0][1] == pytest.approx(1.0, abs=1e-3)


@given(st.lists(st.floats(0, 50), min_size=2, max_size=6), st.floats(0, 500), st.floats(0.01, 3))
def test_thresholds_rise_with_slack_and_fall_with_load(values, steps, step_s):
    values.sort()
    by_slack = [
        threshold_for_deadline(GRID, num_steps=steps, step_s=step_s, slack_s=value)
        for value in values
    ]
    assert by_slack == sorted(by_slack)
    by_load = [
        threshold_for_load(GRID, demand=value, step_s=step_s, num_slots=4.0) for value in values
    ]
    assert by_load == sorted(by_load, reverse=True)


@given(st.floats(-100, 100), st.floats(0, 500), st.floats(0.01, 3))
def test_the_threshold_of_a_deadline_is_the_best_that_holds(slack, steps, step_s):
    found = threshold_for_deadline(GRID, num_steps=steps, step_s=step_s, slack_s=slack)
    holds = [theta for theta, share in GRID if steps * share * step_s <= slack * (1 + 1e-12)]
    surely = [theta for theta, share in GRID if steps * share * step_s <= slack * (1 - 1e-12)]
    assert max(surely, default=0.6) <= found <= max(holds, default=0.6)


def request(name, *, blocks=4, deadline_at=math.inf):
    return Request(
        name,
        prompt_len=8,
        max_new_tokens=8 * blocks,
        block_length=8,
        deadline_at=deadline_at,
    )


def steps_of(one):
    return 10.0 * one.max_blocks


def wanted_cap(submitted, now, control, slots):
    """From every submission so far, each faded by its age."""
    if control.demand is not None:
        demand = control.demand
    else:
        demand = (
            sum(
                steps_of(event.request) * math.exp(-(now - event.at) / control.window_s)
                for event in submitted
            )
            / control.window_s
        )
    best = control.grid[0][0]
    for theta, share in control.grid:
        if demand * share * control.step_s <= slots:
            best = max(best, theta)
    return best


def wanted_theta(one, blocks_done, now, control):
    steps = steps_of(one) * (one.max_blocks - blocks_done) / one.max_blocks
    best = control.grid[0][0]
    for theta, share in control.grid:
        if now + steps * share * control.step_s <= one.deadline_at:
            best = max(best, theta)
    return best


@pytest.mark.parametrize("known", [None, 30.0])
@pytest.mark.parametrize("seed", range(6))
def test_every_knob_follows_from_the_log(known, seed):
    rng = random.Random(seed)
    control = ConfidenceThreshold(
        GRID, step_s=0.11, steps=steps_of, demand=known, window_s=3.7, utilisation=0.9
    )
    log = []
    sched = Scheduler(
        capacity=Capacity(max_num_seqs=4),
        policy=Policy(admission=Slots(4), control=control),
        observers=[lambda event: log.append(event) if type(event) is RequestSubmitted else None],
    )
    slots = 4 * 0.9
    now, asked, caps = 0.0, {}, set()
    for number in range(150):
        if rng.random() < (0.4 if number % 60 < 40 else 0.0):
            slack = rng.choice((math.inf, rng.uniform(2.0, 40.0)))
            name = f"r{number}"
            sched.submit(request(name, blocks=rng.randint(1, 4), deadline_at=now + slack), now=now)
        update = sched.next_step(now=now)
        if update.batch is None:
            now += rng.uniform(0.0, 3.0)
            continue
        cap = wanted_cap(log, now, control, slots)
        caps.add(cap)
        assert update.batch.knobs == {"skip_threshold": cap}
        fresh = {row.slot for row in update.batch.joined}
        for row in update.batch.rows:
            one = row.request
            if one.deadline_at == math.inf:
                assert row.knobs == {}
                continue
            theta = row.knobs["skip_threshold"]
            done = sched.view(one.id).num_blocks_done
            if row.slot in fresh or row.slot in asked.get("crossed", ()):
                assert theta == min(wanted_theta(one, done, now, control), cap)
            assert 0.6 <= theta <= 0.9
        ends, boundaries = [], []
        for row in update.batch.rows:
            done = sched.view(row.request.id).num_blocks_done
            if rng.random() < 0.3:
                if done + 1 < row.request.max_blocks:
                    boundaries.append(BlockBoundary(row.slot, done + 1, 8 * (done + 2)))
                else:
                    ends.append(RowFinished(row.slot, FinishReason.EOS))
        asked["crossed"] = {boundary.slot for boundary in boundaries}
        now += 0.11
        sched.complete_step(update.batch, StepOutcome(tuple(ends), tuple(boundaries)), now=now)
        sched.check_invariants()
    assert len(caps) > 1 or known is not None


def test_the_cap_rises_by_itself_at_the_instant_that_was_promised():
    control = ConfidenceThreshold(GRID, step_s=1.0, steps=steps_of, window_s=10.0)
    sched = Scheduler(capacity=Capacity(max_num_seqs=2), policy=Policy(control=control))
    for index in range(3):
        sched.submit(request(f"r{index}"), now=0.0)
    now, seen = 0.0, []
    for _ in range(40):
        update = sched.next_step(now=now)
        seen.append((now, update.batch.knobs["skip_threshold"]))
        if update.wake_at == math.inf:
            break
        sched.complete_step(update.batch, now=now)
        before = update.wake_at - 1e-3  # nothing changes earlier
        batch = sched.next_step(now=before).batch
        assert batch.knobs["skip_threshold"] == seen[-1][1]
        sched.complete_step(batch, now=before)
        now = update.wake_at
    assert [theta for _, theta in seen] == [0.6, 0.7, 0.8, 0.9]


def test_a_row_that_the_cap_holds_down_rises_with_it_without_a_boundary():
    control = ConfidenceThreshold(GRID, step_s=1.0, steps=steps_of, window_s=10.0)
    sched = Scheduler(capacity=Capacity(max_num_seqs=2), policy=Policy(control=control))
    sched.submit(request("r0", deadline_at=65.0), now=0.0)  # .9 takes 40 s
    for index in range(1, 3):
        sched.submit(request(f"r{index}"), now=0.0)
    now, seen = 0.0, []
    while now < 60.0:
        update = sched.next_step(now=now)
        row = update.batch.rows[0]
        seen.append((row.knobs["skip_threshold"], update.batch.knobs["skip_threshold"]))
        sched.complete_step(update.batch, now=now)
        now = min(update.wake_at, 60.0)
    assert [cap for _, cap in seen] == [0.6, 0.7, 0.8, 0.9]
    assert all(theta <= cap for theta, cap in seen)
    assert [theta for theta, _ in seen] == sorted(theta for theta, _ in seen)
    assert seen[1] == (0.7, 0.7)


def test_overload_falls_to_the_floor_and_then_serves_the_earliest_deadline():
    policy = presets.tediserve(1, grid=GRID, step_s=1.0, steps=steps_of)
    sched = Scheduler(capacity=Capacity(max_num_seqs=1), policy=policy)
    for index, deadline in enumerate((900.0, 300.0, 600.0)):
        sched.submit(request(f"r{index}", deadline_at=deadline), now=0.0)
    order, now = [], 0.0
    while sched.has_work():
        batch = sched.next_step(now=now).batch
        assert batch.knobs == {"skip_threshold": 0.6}
        assert batch.rows[0].knobs == {"skip_threshold": 0.6}
        order.append(batch.rows[0].request.id)
        ended = StepOutcome((RowFinished(0, FinishReason.EOS),))
        sched.complete_step(batch, ended, now=now)
    assert order == ["r1", "r2", "r0"]


def serve(policy, rate, *, shares, seed=5, count=600, slots=4, step_s=0.05, slack=6.0):
    """Serve in virtual time rows whose speed is 1 / share of their threshold.

    Returns the share of deadlines met.
    """
    rng = random.Random(seed)
    arrivals, at = [], 0.0
    for index in range(count):
        at += rng.expovariate(rate)
        blocks = rng.choice((2, 3, 4))
        arrivals.append((at, request(f"r{index}", blocks=blocks, deadline_at=at + slack)))
    sched = Scheduler(capacity=Capacity(max_num_seqs=slots), policy=policy)
    now, done, met = 0.0, {}, 0
    arrivals.reverse()
    while arrivals or sched.has_work():
        while arrivals and arrivals[-1][0] <= now:
            sched.submit(arrivals.pop()[1], now=now)
        update = sched.next_step(now=now)
        met += sum(end.reason is FinishReason.EOS for end in update.finished)
        if update.batch is None:
            now = max(now, min(arrivals[-1][0] if arrivals else math.inf, update.wake_at))
            if now == math.inf:
                break
            continue
        ends, boundaries = [], []
        for row in update.batch.rows:
            one = row.request
            theta = {**update.batch.knobs, **row.knobs}.get("skip_threshold", 0.9)
            before = done.get(one.id, 0.0)
            done[one.id] = after = before + 1 / shares[theta]
            if after >= steps_of(one):
                ends.append(RowFinished(row.slot, FinishReason.EOS))
            elif int(after / 10) > int(before / 10):
                blocks = int(after / 10)
                boundaries.append(BlockBoundary(row.slot, blocks, 8 * (blocks + 1)))
        now += step_s
        update = sched.complete_step(
            update.batch, StepOutcome(tuple(ends), tuple(boundaries)), now=now
        )
        met += sum(end.reason is FinishReason.EOS for end in update.finished)
    return met / count


def test_more_deadlines_are_met_than_at_the_highest_threshold():
    shares = dict(GRID)
    common = {"step_s": 0.05, "steps": steps_of}
    # 30 steps of .05 s each: 4 slots serve 2.67 requests a second at .9, 5.33 at .6
    for rate, least_gain in ((2.0, 0.0), (3.5, 0.3), (4.5, 0.3)):
        high = serve(presets.tediserve(4, grid=((0.9, 1.0),), **common), rate, shares=shares)
        ours = serve(presets.tediserve(4, grid=GRID, **common), rate, shares=shares)
        assert ours >= high + least_gain, (rate, high, ours)
        assert ours > 0.85


def test_light_load_keeps_the_highest_threshold():
    control = ConfidenceThreshold(GRID, step_s=0.05, steps=steps_of)
    sched = Scheduler(capacity=Capacity(max_num_seqs=4), policy=Policy(control=control))
    sched.submit(request("r", deadline_at=100.0), now=0.0)
    batch = sched.next_step(now=0.0).batch
    assert batch.knobs == {"skip_threshold": 0.9}
    assert batch.rows[0].knobs == {"skip_threshold": 0.9}


def test_every_request_ends_in_the_simulator():
    result = simulate(
        OpenLoop(Poisson(0.3), gsm8k(), seed=2, max_requests=200),
        policy=presets.tediserve(4),
        capacity=Capacity(max_num_seqs=4),
        service=Constant(0.0241),
    )
    assert result.num_requests == 200


@pytest.mark.parametrize(
    "policy",
    [
        presets.tediserve(4),
        presets.tediserve(4, grid=GRID, steps=steps_of, step_s=0.5, demand=3.0),
        presets.tediserve(3, grid=GRID, steps=steps_of, step_s=0.7),
    ],
)
def test_it_keeps_the_contract(policy):
    check_policy(policy)


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ({"grid": ()}, "grid"),
        ({"grid": ((0.9, 1.0), (0.7, 1.0))}, "ascend"),
        ({"grid": ((0.7, 0.8), (0.9, 0.7))}, "ascend"),
        ({"grid": ((0.7, 0.5), (0.9, 0.9))}, "share 1"),
        ({"grid": ((0.7, math.nan), (0.9, 1.0))}, "grid"),
        ({"grid": 0.9}, "grid"),
        ({"step_s": 0.0}, "step_s"),
        ({"window_s": math.inf}, "window_s"),
        ({"demand": -1.0}, "demand"),
        ({"utilisation": 1.5}, "utilisation"),
        ({"utilisation": True}, "utilisation"),
        ({"steps": 3}, "steps"),
        ({"knob": ""}, "knob"),
    ],
)
def test_bad_arguments_are_named(bad, what):
    with pytest.raises(ConfigError, match=what):
        ConfidenceThreshold(**bad)
    assert check_grid([[0.7, 0.5], (0.9, 1)]) == ((0.7, 0.5), (0.9, 1))
