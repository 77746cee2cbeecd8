"""BlockServe: block boundaries, the bounding box, and an order that overtakes within bounds."""

from __future__ import annotations

import heapq
import random
from typing import Any

import attrs
import numpy as np
import pytest

from dllm_sched import (
    BlockBoundary,
    Capacity,
    ConfigError,
    FinishReason,
    GrowingKV,
    Policy,
    Request,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.events import BlockDone, Event, RequestFinished, RequestJoined, RequestSubmitted
from dllm_sched.policies import BoundingBox, ShortestPrompt, YoungestFirst
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.lengths import Histogram
from dllm_sched.sim.service import Constant, Linear, ServiceModel
from dllm_sched.sim.shapes import EvenSteps, Shapes, Work, gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.testing import check_policy

BLOCK = 32


class Job:
    def __init__(self, number: int, prompt: int, blocks: int) -> None:
        self.number, self.prompt, self.blocks = number, prompt, blocks
        self.budget = blocks + number % 3  # blocks that it might take
        self.done = self.overtaken = 0
        self.slot = -1

    def padded(self, length: str) -> int:
        """What it asks of the box."""
        if length == "canvas":
            return self.prompt + BLOCK * self.budget
        return self.prompt + BLOCK * self.done + BLOCK


class Reference:
    """The canonical rule, told again with a list that is kept sorted by walking along it."""

    def __init__(self, slots: int, tokens: int | None, length: str, bypass: int, longest: int):
        self.slots, self.tokens, self.length = slots, tokens, length
        self.bypass, self.longest = bypass, longest
        self.queue: list[Job] = []
        self.running: list[Job] = []
        self.at_boundary = False

    def submit(self, new: Job) -> None:
        place = len(self.queue)
        while place:
            other = self.queue[place - 1]
            gained = min(other.prompt, self.longest) - min(new.prompt, self.longest)
            if (new.number - other.number) * self.longest >= self.bypass * gained:
                break
            place -= 1
        self.queue.insert(place, new)

    def refill(self) -> list[Job]:
        taken: list[Job] = []
        while self.queue and (self.at_boundary or not self.running):
            everybody = [*self.running, *taken, self.queue[0]]
            box = len(everybody) * max(job.padded(self.length) for job in everybody)
            fits = self.tokens is None or box <= self.tokens or len(everybody) == 1
            if len(everybody) > self.slots or not fits:
                break
            taken.append(self.queue.pop(0))
            for job in self.queue:
                job.overtaken += job.number < taken[-1].number
        self.running += taken
        self.at_boundary = False
        return taken

    def box(self) -> int:
        return len(self.running) * max((job.padded(self.length) for job in self.running), default=0)


@pytest.mark.parametrize("length", ["canvas", "causal"])
@pytest.mark.parametrize("seed", range(12))
def test_every_join_is_that_of_the_canonical_rule(seed: int, length: Any) -> None:
    rng = random.Random(seed)
    slots, tokens = [(6, 900), (32, 2500), (4, None), (16, 300)][seed % 4]
    bypass, longest = [(16, 256), (0, 64), (128, 128)][seed % 3]
    policy = presets.blockserve(
        slots, tokens, length=length, max_bypass=bypass, longest_prompt=longest
    )
    scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=slots + seed % 2))
    reference = Reference(slots, tokens, length, bypass, longest)
    number = served = 0
    now = 0.0
    while number < 150 or scheduler.has_work():
        for _ in range(rng.choice([0, 0, 0, 1, 1, 5]) if number < 150 else 0):
            job = Job(number, rng.randint(1, 300), rng.randint(1, 5))
            reference.submit(job)
            request = Request(f"{number}", prompt_len=job.prompt, max_new_tokens=BLOCK * job.budget)
            scheduler.submit(request, now=now)
            number += 1
        if number >= 150:
            scheduler.drain(now=now)
        update = scheduler.next_step(now=now)
        taken = reference.refill()
        joined = () if update.batch is None else update.batch.joined
        assert [row.request.id for row in joined] == [f"{job.number}" for job in taken]
        if tokens is not None and (taken or length == "canvas"):
            assert reference.box() <= tokens or len(reference.running) == 1
        now += 1.0
        if update.batch is None:
            continue
        for row, job in zip(joined, taken, strict=True):
            job.slot = row.slot
        crossed = [job for job in reference.running if rng.random() < 0.15]
        for job in crossed:
            job.done += 1
        ended = [job for job in crossed if job.done == job.blocks]
        reference.running = [job for job in reference.running if job not in ended]
        reference.at_boundary = bool(crossed)
        for job in ended:
            served += 1
            assert job.overtaken <= bypass
        outcome = StepOutcome(
            finished=tuple(RowFinished(job.slot, FinishReason.EOS) for job in ended),
            boundaries=tuple(
                BlockBoundary(job.slot, job.done, job.prompt + BLOCK * job.done)
                for job in crossed
                if job not in ended
            ),
        )
        scheduler.complete_step(update.batch, outcome, now=now)
        scheduler.check_invariants()
    assert served == number


def joined_of(policy: Policy, requests: list[Request]) -> list[str]:
    scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=8))
    for request in requests:
        scheduler.submit(request, now=0.0)
    batch = scheduler.next_step(now=0.0).batch
    assert batch is not None
    return [row.request.id for row in batch.joined]


def sized(name: str, prompt: int, tokens: int) -> Request:
    return Request(name, prompt_len=prompt, max_new_tokens=tokens)


def test_the_box_is_rows_times_the_longest() -> None:
    requests = [sized("a", 68, 32), sized("b", 36, 64), sized("c", 168, 32)]

    def box(tokens: int, length: Any) -> Policy:
        return Policy(admission=BoundingBox(tokens, length))

    assert joined_of(box(200, "canvas"), requests) == ["a", "b"]  # 2 * 100
    assert joined_of(box(199, "canvas"), requests) == ["a"]
    assert joined_of(box(599, "canvas"), requests) == ["a", "b"]  # 3 * 200
    assert joined_of(box(600, "canvas"), requests) == ["a", "b", "c"]
    wide = [sized("a", 68, 320), sized("b", 36, 64)]
    assert joined_of(box(200, "causal"), wide) == ["a", "b"]  # the first block of each
    assert joined_of(box(200, "canvas"), wide) == ["a"]


def test_what_is_too_large_runs_alone() -> None:
    large, small = sized("large", 500, 32), sized("small", 10, 32)
    for length in ("canvas", "causal"):
        policy = Policy(admission=BoundingBox(100, length))  # type: ignore[arg-type]
        assert joined_of(policy, [large, small]) == ["large"]
        assert joined_of(policy, [small, large]) == ["small"]


def test_short_prompts_first_among_those_who_came_together() -> None:
    requests = [sized("b", 200, 32), sized("c", 300, 32), sized("a", 100, 32)]
    assert joined_of(presets.blockserve(8, max_bypass=4096), requests) == ["a", "b", "c"]
    policy = Policy(ordering=ShortestPrompt(float("inf")))
    assert joined_of(policy, requests) == ["a", "b", "c"]
    assert joined_of(presets.blockserve(8, max_bypass=0), requests) == ["b", "c", "a"]


def test_a_long_prompt_is_overtaken_by_fewer_than_the_bound() -> None:
    """One slot and a short request with every step: the long one goes tenth."""
    scheduler = Scheduler(
        policy=presets.blockserve(1, max_bypass=10, longest_prompt=1000),
        capacity=Capacity(max_num_seqs=1),
    )
    scheduler.submit(sized("long", 5000, 32), now=0.0)
    order: list[str] = []
    for number in range(15):
        scheduler.submit(sized(f"{number}", 1, 32), now=float(number))
        batch = scheduler.next_step(now=float(number)).batch
        assert batch is not None
        order.append(batch.rows[0].request.id)
        done = (RowFinished(batch.rows[0].slot, FinishReason.EOS),)
        scheduler.complete_step(batch, StepOutcome(finished=done), now=float(number))
    assert order.index("long") == 9


def cycles(policy: Policy, slots: int, blocks: list[int], steps: int = 4) -> float:
    works = [
        Work(50, n * BLOCK, BLOCK, n, n * steps, tuple(steps * (i + 1) for i in range(n)))
        for n in blocks
    ]
    last = 0.0

    def note(event: Event) -> None:
        nonlocal last
        last = event.at

    simulate(
        [(0.0, work) for work in works],
        policy=policy,
        capacity=Capacity(max_num_seqs=slots),
        service=Constant(1 / steps),
        observers=[note],
    )
    return last


def test_six_cycles_in_static_batches_and_four_by_blocks() -> None:
    assert cycles(presets.fixed_fill(2, timeout_s=0), 2, [4, 1, 1, 1, 1]) == 6
    assert cycles(presets.blockserve(2), 2, [4, 1, 1, 1, 1]) == 4


@pytest.mark.parametrize("seed", range(6))
def test_a_closed_backlog_takes_what_list_scheduling_takes(seed: int) -> None:
    rng = random.Random(seed)
    slots, blocks = rng.randint(1, 6), [rng.randint(1, 9) for _ in range(40)]
    free_at = [0] * slots
    for n in blocks:
        heapq.heappush(free_at, heapq.heappop(free_at) + n)
    assert cycles(presets.blockserve(slots), slots, blocks) == max(free_at)


@pytest.mark.parametrize("tokens", [None, 3000])
def test_rows_come_and_go_only_at_block_boundaries(tokens: int | None) -> None:
    boundaries, joins, submitted = {0.0}, [], 0
    running: set[str] = set()

    def note(event: Event) -> None:
        nonlocal submitted
        if isinstance(event, BlockDone | RequestFinished):
            boundaries.add(event.at)
        if isinstance(event, RequestFinished):
            running.discard(event.request_id)
        elif isinstance(event, RequestSubmitted):
            submitted += 1
        elif isinstance(event, RequestJoined):
            joins.append((event.at, bool(running)))
        if isinstance(event, RequestJoined):
            running.add(event.request_id)

    simulate(
        OpenLoop(Poisson(0.5), gsm8k(), seed=1, max_requests=150),
        policy=presets.blockserve(16, tokens),
        capacity=Capacity(max_num_seqs=16),
        service=Constant(0.03),
        observers=[note],
    )
    assert submitted == len(joins) == 150
    alone = {at for at, others in joins if not others}
    assert {at for at, others in joins if others} <= boundaries | alone


# --- findings -------------------------------------------------------------------------------------


class Padded(ServiceModel):
    """A dense engine: the step takes what rows x longest row take. It listens to know who is in."""

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}
        self.inside: set[str] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestSubmitted):
            self.lengths[event.request.id] = event.request.max_total_tokens
        elif isinstance(event, RequestJoined):
            self.inside.add(event.request_id)
        elif isinstance(event, RequestFinished):
            self.inside.discard(event.request_id)

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        return 0.01 + 2e-6 * num_rows * max(self.lengths[name] for name in self.inside)


def backlog_s(policy: Policy, seed: int = 0) -> float:
    """Seconds for 400 requests, one long prompt in five."""
    shapes = Shapes(
        Histogram({2: 1, 4: 1, 8: 1}),
        prompt=Histogram({100: 4, 200: 4, 2000: 2}),
        decoder=EvenSteps(16),
    )
    engine = Padded()
    result = simulate(
        OpenLoop(Poisson(1e6), shapes, seed=seed, max_requests=400),
        policy=policy,
        capacity=Capacity(max_num_seqs=64),
        service=engine,
        observers=[engine],
    )
    return float(np.max(result.latency_s))


def test_on_a_padded_engine_the_order_is_what_pays() -> None:
    """Sorted, the backlog takes less than half; the budget alone is no faster than 16 rows."""
    plain = backlog_s(presets.continuous(16))
    assert backlog_s(presets.blockserve(16, max_bypass=0)) == pytest.approx(plain, rel=0.01)
    assert backlog_s(presets.blockserve(64, 20_000, max_bypass=0)) > plain
    assert backlog_s(presets.blockserve(64, 20_000, max_bypass=1e5)) < 0.45 * plain
    bounded = backlog_s(presets.blockserve(64, 20_000))
    assert 0.8 * plain < bounded < 0.95 * plain


def ragged_s(policy: Policy, pages: int) -> float:
    """The same backlog in little memory on an engine without padding, as ours is."""
    shapes = Shapes(
        Histogram({2: 1, 4: 1, 8: 1}),
        prompt=Histogram({100: 4, 200: 4, 2000: 2}),
        decoder=EvenSteps(16),
    )
    result = simulate(
        OpenLoop(Poisson(1e6), shapes, max_requests=400),
        policy=attrs.evolve(policy, eviction=YoungestFirst()),
        capacity=Capacity(
            max_num_seqs=64, num_pages=pages, memory=GrowingKV(page_size=16), window_blocks=1
        ),
        service=Linear(0.01, 0.0002, 2e-6),
    )
    return float(np.max(result.latency_s))


def test_on_an_engine_without_padding_the_box_only_costs() -> None:
    """20,000 tokens of memory or of box: rows of 100 tokens count as 2,000 in the one only."""
    plain = ragged_s(presets.continuous(64), 1250)
    assert ragged_s(presets.blockserve(64, max_bypass=0), 1250) == pytest.approx(plain, rel=0.05)
    assert ragged_s(presets.blockserve(64, 20_000, max_bypass=0), 1250) > 1.5 * plain


def test_it_keeps_the_contract() -> None:
    check_policy(presets.blockserve(4))
    check_policy(presets.blockserve(4, 400))
    check_policy(presets.blockserve(4, 400, length="causal", max_bypass=3))


@pytest.mark.parametrize("wrong", [-1, float("nan"), "1", True, None])
def test_a_wrong_bound_is_named(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="max_bypass"):
        ShortestPrompt(wrong)


def test_bad_arguments_are_named() -> None:
    for wrong in (0, 1.5, True):
        with pytest.raises(ConfigError, match="tokens"):
            BoundingBox(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="longest"):
        ShortestPrompt(4, 0)
    with pytest.raises(ConfigError, match="length"):
        BoundingBox(100, "padded")  # type: ignore[arg-type]
