"""Sangam's deficit budget, iteration by iteration, through the real scheduler."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from dllm_sched import (
    Capacity,
    ConfigError,
    FinishReason,
    FixedCanvas,
    Phase,
    PhaseChange,
    Policy,
    Request,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.events import Event, RequestFinished, RequestJoined, StepCompleted, StepPlanned
from dllm_sched.policies import DeficitBudget, FewestBlocks
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.lengths import Histogram
from dllm_sched.sim.service import Linear
from dllm_sched.sim.shapes import EvenSteps, Shapes
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.testing import check_policy

BLOCK = 32


class Job:
    def __init__(self, name: str, prompt: int, blocks: int, steps: int) -> None:
        self.name, self.prompt, self.blocks, self.steps = name, prompt, blocks, steps
        self.slot = -1

    @property
    def length(self) -> int:
        """What its prefill takes."""
        return self.prompt + BLOCK

    @property
    def pages(self) -> int:
        return -(-(self.prompt + self.blocks * BLOCK) // 16)


class Reference:
    """The published loop, told again: every iteration counts, every sum is made anew."""

    def __init__(self, budget: int, slots: int, pages: int | None, *, fewest: bool) -> None:
        self.budget, self.slots, self.pages, self.fewest = budget, slots, pages, fewest
        self.queue: list[Job] = []
        self.active: list[Job] = []
        self.deficit = 0

    def iterate(self) -> list[Job]:
        if not self.queue:
            self.deficit = 0
            return []
        if self.fewest:
            self.queue.sort(key=lambda job: job.blocks)  # stable: arrivals stay in order
        free = self.budget - BLOCK * len(self.active)
        may_spend = free + self.deficit
        taken: list[Job] = []
        no_memory = False
        while self.queue:
            job = self.queue[0]
            inside = self.active + taken
            held = sum(other.pages for other in inside)
            if len(inside) == self.slots or (
                self.pages is not None and held + job.pages > self.pages
            ):
                no_memory = True
                break
            spent = sum(other.length for other in taken)
            if spent + job.length > may_spend and inside:
                break
            taken.append(self.queue.pop(0))
        spent = sum(job.length for job in taken)
        if no_memory:
            self.deficit = max(0, self.deficit - max(0, spent - free))
        else:
            self.deficit = max(0, may_spend - spent)
        self.active += taken
        return taken


def play(seed: int, budget: int, slots: int, pages: int | None, *, fewest: bool) -> int:
    """Compare who joins at every iteration; return how many requests never ended."""
    rng = random.Random(seed)
    memory = None if pages is None else FixedCanvas(page_size=16)
    order = "fewest_blocks" if fewest else "arrival"
    scheduler = Scheduler(
        policy=presets.sangam(slots, budget, order=order, bypass=math.inf),  # type: ignore[arg-type]
        capacity=Capacity(
            max_num_seqs=slots + seed % 3, num_pages=pages, memory=memory, window_blocks=1
        ),
    )
    reference = Reference(budget, slots, pages, fewest=fewest)
    submitted = served = 0
    now = 0.0
    while submitted < 120 or scheduler.has_work():
        for _ in range(rng.choice([0, 0, 0, 1, 1, 3]) if submitted < 120 else 0):
            job = Job(
                f"{submitted}", rng.randint(1, 300), rng.randint(1, 6), rng.choice([1, 2, 9, 30])
            )
            submitted += 1
            reference.queue.append(job)
            request = Request(job.name, prompt_len=job.prompt, max_new_tokens=BLOCK * job.blocks)
            scheduler.submit(request, now=now)
        if reference.queue and rng.random() < 0.03:  # somebody hangs up
            gone = rng.choice(reference.queue)
            reference.queue.remove(gone)
            scheduler.cancel(gone.name, now=now)
            served += 1
        if submitted >= 120:
            scheduler.drain(now=now)
        update = scheduler.next_step(now=now)
        taken = reference.iterate()
        joined = () if update.batch is None else update.batch.joined
        assert [row.request.id for row in joined] == [job.name for job in taken]
        now += 1.0
        if update.batch is None:
            assert not reference.active
            continue
        for row, job in zip(joined, taken, strict=True):
            job.slot = row.slot
        for job in reference.active:
            job.steps -= 1
        done = [job for job in reference.active if job.steps == 0]
        reference.active = [job for job in reference.active if job.steps]
        served += len(done)
        outcome = StepOutcome(
            finished=tuple(RowFinished(job.slot, FinishReason.EOS) for job in done),
            phases=tuple(PhaseChange(job.slot, Phase.REUSE) for job in taken if job.steps),
        )
        scheduler.complete_step(update.batch, outcome, now=now)
        scheduler.check_invariants()
    return submitted - served


@pytest.mark.parametrize("seed", range(24))
def test_every_iteration_is_the_published_one(seed: int) -> None:
    budget, slots, pages = [(100, 64, None), (64, 4, None), (400, 16, 90), (30, 6, 60)][seed % 4]
    assert play(seed, budget, slots, pages, fewest=seed % 8 >= 4) == 0


def joins(policy: Policy, prompts: list[int], steps: int) -> list[list[str]]:
    """Who joins at each iteration; the first request decodes all the time.

    The others come two iterations later: one passes with an empty queue.
    """
    scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=8, window_blocks=1))
    out: list[list[str]] = []
    for number in range(steps + 1):
        coming = {0: [0], 2: range(1, len(prompts))}.get(number, ())
        for index in coming:
            request = Request(f"{index}", prompt_len=prompts[index], max_new_tokens=BLOCK)
            scheduler.submit(request, now=float(number))
        batch = scheduler.next_step(now=float(number)).batch
        assert batch is not None
        out.append([row.request.id for row in batch.joined])
        phases = tuple(PhaseChange(row.slot, Phase.REUSE) for row in batch.joined)
        scheduler.complete_step(batch, StepOutcome(phases=phases), now=number + 0.5)
    return out


def test_two_hundred_tokens_wait_for_the_third_iteration() -> None:
    """An income of 68: deficits 68 and 136, then 204 will do, and 4 are left."""
    policy = Policy(admission=DeficitBudget(100))
    assert joins(policy, [1, 168], 5) == [["0"], [], [], [], ["1"], []]
    # Then two rows leave an income of 36: with the 4, a prefill of 40 fits the next iteration,
    assert joins(policy, [1, 168, 8], 6)[2:] == [[], [], ["1"], ["2"], []]
    # and one of 41 the second next.
    assert joins(policy, [1, 168, 9], 6)[2:] == [[], [], ["1"], [], ["2"]]


def test_nothing_is_decided_while_it_saves() -> None:
    scheduler = Scheduler(
        policy=Policy(admission=DeficitBudget(100)),
        capacity=Capacity(max_num_seqs=8, window_blocks=1),
    )
    scheduler.submit(Request("row", prompt_len=1, max_new_tokens=BLOCK), now=0.0)
    batch = scheduler.next_step(now=0.0).batch
    assert batch is not None
    phases = (PhaseChange(batch.rows[0].slot, Phase.REUSE),)
    scheduler.complete_step(batch, StepOutcome(phases=phases), now=0.0)
    batch = scheduler.next_step(now=0.0).batch
    assert batch is not None
    scheduler.complete_step(batch, now=0.0)
    scheduler.submit(Request("head", prompt_len=168, max_new_tokens=BLOCK), now=0.0)
    batch = scheduler.next_step(now=0.0).batch
    assert batch is not None
    assert not batch.joined
    assert scheduler.horizon().steps == 2  # nothing to decide before the third iteration
    scheduler.complete_step(batch, now=0.0, steps=2)
    batch = scheduler.next_step(now=0.0).batch
    assert batch is not None
    assert [row.request.id for row in batch.joined] == ["head"]


def test_only_an_empty_engine_takes_what_is_too_large() -> None:
    policy = Policy(admission=DeficitBudget(50))
    assert joins(policy, [500, 1], 4) == [["0"], [], [], ["1"], []]  # 18 a step for one of 33
    assert joins(Policy(admission=DeficitBudget(20)), [500, 1], 6)[1:] == [[]] * 6  # no income


def test_prefills_take_the_income_in_the_mean() -> None:
    """While one row decodes, what joined by iteration n took at most n incomes."""
    prompts = [1, *(random.Random(7).randint(1, 400) for _ in range(6))]
    total, spent = 0, []
    for names in joins(Policy(admission=DeficitBudget(400)), prompts, 40)[2:]:
        rows = 1 + sum(len(each) for each in spent)
        total += 400 - BLOCK * rows
        spent.append([prompts[int(name)] + BLOCK for name in names])
        assert sum(map(sum, spent)) <= total
    assert sum(map(len, spent)) == 6


def test_fewest_blocks_first() -> None:
    scheduler = Scheduler(policy=Policy(ordering=FewestBlocks()), capacity=Capacity(max_num_seqs=1))
    for name, tokens in (("four", 128), ("one", 20), ("two", 64)):
        scheduler.submit(Request(name, prompt_len=9, max_new_tokens=tokens), now=0.0)
    batch = scheduler.next_step(now=0.0).batch
    assert batch is not None
    assert batch.rows[0].request.id == "one"


class Longest:
    """The longest step, seconds."""

    def __init__(self) -> None:
        self.planned_at = self.seconds = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepPlanned):
            self.planned_at = event.at
        elif isinstance(event, StepCompleted):
            self.seconds = max(self.seconds, (event.at - self.planned_at) / event.steps)


def run(policy: Policy, count: int = 1000, **options: Any) -> Any:
    """Answers of 1 to 8 blocks; one prompt in five has 4,000 tokens, the others 200."""
    shapes = Shapes(
        Histogram({1: 1, 2: 1, 4: 1, 8: 1}),
        prompt=Histogram({200: 8, 4000: 2}),
        decoder=EvenSteps(16),
    )
    return simulate(
        OpenLoop(Poisson(1.7), shapes, seed=3, max_requests=count),
        policy=policy,
        capacity=Capacity(max_num_seqs=16, window_blocks=1),
        service=Linear(0.01, 0.0005, 0.0001),
        phases=True,
        **options,
    )


def test_it_halves_the_longest_stall_and_wins_nothing_else() -> None:
    """Where a step's time is linear in its tokens, a prefill costs the same whenever it runs.

    So there is no throughput in it: what the budget buys is that no two long prompts meet in one
    step, and what it costs is the wait for a step's turn, the more the smaller the budget.
    """
    meters = [Longest() for _ in range(3)]
    plain = run(presets.continuous(16), observers=[meters[0]])
    wide = run(presets.sangam(16), observers=[meters[1]])
    narrow = run(presets.sangam(16, 600), observers=[meters[2]])
    assert meters[0].seconds == pytest.approx(0.83, abs=0.01)
    assert meters[1].seconds < 0.58 * meters[0].seconds
    assert meters[2].seconds < 0.58 * meters[0].seconds
    latency = [float(np.mean(each.latency_s)) for each in (plain, wide, narrow)]
    assert latency == pytest.approx([1.96, 1.95, 1.98], abs=0.02)
    waits = [float(np.mean(each.wait_s)) for each in (plain, wide, narrow)]
    assert waits[1] < 1.2 * waits[0]
    assert waits[2] > 2 * waits[0]


@pytest.mark.parametrize("order", ["arrival", "fewest_blocks"])
def test_jumped_and_stepped_runs_give_the_same_events(order: Any) -> None:
    logs = []
    for jump in (True, False):
        events: list[Any] = []
        run(presets.sangam(16, 1100, order=order), count=200, jump=jump, observers=[events.append])
        logs.append([e for e in events if isinstance(e, RequestJoined | RequestFinished)])
    assert len(logs[0]) == 400
    for jumped, stepped in zip(*logs, strict=True):
        assert type(jumped) is type(stepped)
        assert jumped.request_id == stepped.request_id
        assert jumped.at == pytest.approx(stepped.at, rel=1e-9)


def test_it_keeps_the_contract() -> None:
    check_policy(presets.sangam(4, 100))
    check_policy(presets.sangam(4, order="fewest_blocks"))


def test_bad_arguments_are_named() -> None:
    for wrong in (0, -1, 1.5, True, None):
        with pytest.raises(ConfigError, match="tokens"):
            DeficitBudget(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="order"):
        presets.sangam(4, order="shortest")  # type: ignore[arg-type]
