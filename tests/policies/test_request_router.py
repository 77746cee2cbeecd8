"""RequestRouter: one mode per request, for life, and answers that are checked."""

from __future__ import annotations

import random

import pytest

from dllm_sched import (
    BlockBoundary,
    Capacity,
    ConfigError,
    FinishReason,
    GrowingKV,
    Policy,
    PolicyError,
    Request,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.policies import ByLength, ChooseMode, YoungestFirst
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Constant
from dllm_sched.sim.shapes import gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.testing import check_policy


def request(id, prompt_len=8, budget=32, **fields):
    return Request(id, prompt_len=prompt_len, max_new_tokens=budget, **fields)


def scheduler_for(policy, slots=2):
    return Scheduler(policy=policy, capacity=Capacity(max_num_seqs=slots))


def test_a_row_runs_in_the_mode_that_was_chosen():
    policy = presets.request_router(2, ("fp16", "int8"), lambda one: one.request_class)
    scheduler = scheduler_for(policy)
    scheduler.submit(request("a", request_class="int8"), now=0.0)
    scheduler.submit(request("b", request_class="fp16"), now=0.0)
    batch = scheduler.next_step(now=0.0).batch
    assert [dict(row.knobs) for row in batch.rows] == [{"mode": "int8"}, {"mode": "fp16"}]


@pytest.mark.parametrize("answer", ["int4", "", None, 3, ["fp16"]])
def test_a_mode_that_is_not_declared_is_an_error_that_names_it(answer):
    scheduler = scheduler_for(
        presets.request_router(2, ("fp16", "int8"), lambda one: answer if one.id == "b" else "int8")
    )
    for id in "ab":
        scheduler.submit(request(id), now=0.0)
    with pytest.raises(PolicyError) as raised:
        scheduler.next_step(now=0.0)
    for part in (repr(answer), "'b'", "fp16", "int8"):
        assert part in str(raised.value)
    scheduler.check_invariants()
    assert scheduler.counts().waiting == 2  # nothing has changed
    scheduler.set_policy(presets.request_router(2), now=0.0)
    assert len(scheduler.next_step(now=0.0).batch.rows) == 2


def test_a_rule_that_raises_is_an_error_that_names_the_request():
    scheduler = scheduler_for(presets.request_router(2, ("a",), lambda one: 1 / 0))
    scheduler.submit(request("x"), now=0.0)
    with pytest.raises(PolicyError, match=r"control.knobs.*ZeroDivisionError.*'x'"):
        scheduler.next_step(now=0.0)


def test_by_length():
    rule = ByLength(("short", "middle", "long"), (64, 100))
    lengths = [(32, 32), (33, 32), (68, 32), (69, 32), (4000, 32)]
    found = [rule(request("a", prompt_len=p, budget=b)) for p, b in lengths]
    assert found == ["short", "middle", "middle", "long", "long"]
    assert ByLength(["only"], ())(request("a")) == "only"


@pytest.mark.parametrize("seed", range(5))
def test_a_row_keeps_its_mode_through_blocks_and_preemptions(seed):
    """Against the rule asked on the spot, for every row of every step."""
    rng = random.Random(seed)
    modes = ("m0", "m1", "m2")

    def by_digit(one):
        return modes[int(one.id[1:]) % 3]

    policy = Policy(
        control=ChooseMode(modes, by_digit), eviction=YoungestFirst(keep=rng.random() < 0.5)
    )
    scheduler = Scheduler(
        policy=policy,
        capacity=Capacity(max_num_seqs=4, num_pages=24, memory=GrowingKV(page_size=8)),
    )
    count, preempted, done = 0, 0, {}
    while count < 60 or scheduler.has_work():
        if count < 60:
            scheduler.submit(request(f"r{count}", rng.randint(1, 30), 96), now=0.0)
            count += 1
        update = scheduler.next_step(now=0.0)
        preempted += sum(one.reason is None for one in update.released)
        for one in update.released:
            if not one.kept:
                done.pop(one.request.id, None)
        finished, crossed = [], []
        for row in update.batch.rows:
            expected = {"mode": modes[int(row.request.id[1:]) % 3]}
            assert dict(row.knobs) == expected
            if rng.random() < 0.5:
                blocks = done[row.request.id] = done.get(row.request.id, 0) + 1
                if blocks == 3:
                    finished.append(RowFinished(row.slot, FinishReason.LENGTH))
                else:
                    tokens = row.request.prompt_len + 32 * blocks
                    crossed.append(BlockBoundary(row.slot, blocks, tokens))
        scheduler.complete_step(update.batch, StepOutcome(tuple(finished), tuple(crossed)), now=0.0)
        scheduler.check_invariants()
    assert preempted > 0


def test_the_policy_keeps_its_contract():
    check_policy(presets.request_router(4))


def test_modes_cost_the_simulation_nothing():
    runs = [
        simulate(
            OpenLoop(Poisson(2.0), gsm8k(), max_requests=500, seed=3),
            policy=policy,
            capacity=Capacity(max_num_seqs=16),
            service=Constant(0.02),
        )
        for policy in (presets.request_router(16), presets.continuous(16))
    ]
    assert list(runs[0].latency_s) == list(runs[1].latency_s)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ChooseMode((), len),
        lambda: ChooseMode(("a", "a"), len),
        lambda: ChooseMode(("a", ""), len),
        lambda: ChooseMode(("a", 1), len),
        lambda: ChooseMode(("a",), "a"),
        lambda: ByLength(("a", "b"), ()),
        lambda: ByLength(("a", "b", "c"), (5, 5)),
        lambda: ByLength(("a", "b"), (0,)),
        lambda: ByLength(("a", "b"), (True,)),
        lambda: presets.request_router(4, ("a", "b", "c")),
    ],
)
def test_bad_arguments(make):
    with pytest.raises(ConfigError):
        make()


def test_a_single_mode_may_stand_alone():
    assert ChooseMode("only", lambda _: "only").modes == ("only",)
