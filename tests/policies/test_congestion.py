"""Congestion-stable admission by whole requests, through the real scheduler and simulator."""

from __future__ import annotations

import io
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import attrs
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
from dllm_sched.events import (
    Event,
    RequestFinished,
    RequestJoined,
    RequestPreempted,
    StepCompleted,
)
from dllm_sched.journal import JournaledScheduler, replay, restore
from dllm_sched.observers import CohortMeter
from dllm_sched.policies import Admission, MixLengths, ProjectedPeak, RateCap, YoungestFirst
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.lengths import Fixed
from dllm_sched.sim.service import Constant, Linear
from dllm_sched.sim.shapes import Shapes, Work, gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.testing import check_policy
from dllm_sched.theory import congestion
from dllm_sched.theory.ladder import GSM8K_BLOCKS

# --- each decision against a reference ------------------------------------------------------------


class Job:
    def __init__(self, number: int, kind: str, prompt: int, most: int, blocks: int) -> None:
        self.number, self.kind, self.prompt, self.most = number, kind, prompt, most
        self.blocks, self.done, self.slot = blocks, 0, -1


def would_fit(jobs: Sequence[Job], pages: int, block: int, page: int) -> bool:
    """Play the rest out, block by block, with answers as long as they may get."""
    future = [(job.prompt + block * job.done, job.most - job.done) for job in jobs]
    while future:
        if sum(math.ceil((held + block) / page) for held, _ in future) > pages:
            return False
        future = [(held + block, left - 1) for held, left in future if left > 1]
    return True


@pytest.mark.parametrize("seed", range(20))
def test_every_join_is_within_the_cap_and_the_projection(seed: int) -> None:
    """Rows advance a block a step. The reference counts joins in fractions, from every step."""
    rng = random.Random(seed)
    block, page, pages = [(8, 4, 60), (8, 16, 30), (1, 1, 200)][seed % 3]
    rates = [
        {"": Fraction(1, 3)},
        {"": Fraction(5, 2)},
        {"a": Fraction(1, 2), "b": Fraction(2)},
        {"a": Fraction(1, 4)},
    ][seed % 4]
    per_step: Any = {name: float(rate) for name, rate in rates.items()}
    memory = GrowingKV(page_size=page)
    policy = presets.congestion_stable(12, per_step.get("", per_step), memory=memory)
    scheduler = Scheduler(
        policy=policy, capacity=Capacity(max_num_seqs=12, num_pages=pages, memory=memory)
    )
    queue: list[Job] = []
    running: list[Job] = []
    credit = dict(rates)
    number = served = 0
    now = 0.0
    first = True
    while number < 120 or scheduler.has_work():
        for _ in range(rng.choice([0, 0, 1, 1, 4]) if number < 120 else 0):
            most = rng.randint(1, 9)
            kind = rng.choice("ab") if "a" in rates else ""
            job = Job(number, kind, rng.randint(1, 40), most, rng.randint(1, most))
            queue.append(job)
            request = Request(
                f"{number}",
                prompt_len=job.prompt,
                max_new_tokens=block * most,
                block_length=block,
                request_class=kind,
            )
            assert type(scheduler.submit(request, now=now)).__name__ == "Accepted"
            number += 1
        if number >= 120:
            scheduler.drain(now=now)
        if not first:
            for name, rate in rates.items():
                credit[name] = min(credit[name] + rate, rate + 1)
        taken: list[Job] = []
        parked: set[str] = set()  # classes without a join left: nobody looks at the rest of them
        for job in list(queue):
            if job.kind in parked:
                continue
            inside = [*running, *taken]
            if len(inside) == 12:
                break
            now_held = sum(math.ceil((j.prompt + block * (j.done + 1)) / page) for j in inside)
            if now_held + math.ceil((job.prompt + block) / page) > pages:
                break
            capped = job.kind in credit and credit[job.kind] < 1 and bool(inside)
            fits = not inside or would_fit([*inside, job], pages, block, page)
            if not fits or (capped and "" in rates):
                break
            if capped:
                parked.add(job.kind)
                continue
            taken.append(job)
            queue.remove(job)
            if job.kind in credit:
                credit[job.kind] -= 1
        credit = {name: max(Fraction(0), left) for name, left in credit.items()}
        update = scheduler.next_step(now=now)
        joined = () if update.batch is None else update.batch.joined
        assert [row.request.id for row in joined] == [f"{job.number}" for job in taken]
        running += taken
        now += 1.0
        if update.batch is None:
            first = True
            continue
        first = False
        assert len(update.batch.rows) == len(running)  # nobody was evicted
        for row, job in zip(joined, taken, strict=True):
            job.slot = row.slot
        for job in running:
            job.done += 1
        ended = [job for job in running if job.done == job.blocks]
        running = [job for job in running if job.done < job.blocks]
        served += len(ended)
        outcome = StepOutcome(
            finished=tuple(RowFinished(job.slot, FinishReason.EOS) for job in ended),
            boundaries=tuple(
                BlockBoundary(job.slot, job.done, job.prompt + block * job.done) for job in running
            ),
        )
        scheduler.complete_step(update.batch, outcome, now=now)
        scheduler.check_invariants()
    assert served == number


# --- saturated: throughput and evictions ----------------------------------------------------------


@attrs.frozen
class Ages:
    """The model's unit: a request of input s holds s + j + 1 pages at age j."""

    input_pages: int
    grows = True

    def pages(self, request: Request, kv_tokens: int) -> int:
        return self.input_pages + kv_tokens - request.prompt_len + 1

    def peak_pages(self, request: Request) -> int:
        return self.input_pages + request.max_new_tokens


class Tally:
    def __init__(self, from_s: float, until_s: float) -> None:
        self.window = (from_s + 0.5, until_s + 0.5)
        self.finished = self.evicted = 0
        self.cohorts = CohortMeter()

    def __call__(self, event: Event) -> None:
        if event.at >= self.window[1]:
            return
        self.cohorts(event)
        self.evicted += isinstance(event, RequestPreempted)
        if event.at >= self.window[0]:
            self.finished += isinstance(event, RequestFinished)


def saturated(
    answers: Sequence[int],
    size: int,
    per_step: int,
    parts: Iterable[str],
    *,
    warm_up: int,
    steps: int,
    budget: int | None = None,
    **projection: Any,
) -> tuple[float, Tally]:
    """Return throughput over n* = ``per_step`` of a cold start, and the tally."""
    weights = dict(Counter(answers))
    pages = round(per_step / congestion.equilibrium_rate(weights, size, 1.0))
    memory = Ages(size)
    admission = Admission()
    if "cap" in parts:
        admission = admission & RateCap(per_step)
    if "projection" in parts:
        admission = admission & ProjectedPeak(memory, **projection)
    works = [Work(1, budget or n, 1, n, n, tuple(range(1, n + 1))) for n in answers]
    tally = Tally(warm_up, warm_up + steps)
    simulate(
        [(0.0, works[i % len(works)]) for i in range(2 * per_step * (warm_up + steps))],
        policy=Policy(admission=admission, eviction=YoungestFirst()),
        capacity=Capacity(max_num_seqs=pages, num_pages=pages, memory=memory),
        service=Constant(1.0),
        max_waiting=10**9,
        observers=[tally],
        until_s=warm_up + steps + 1,
    )
    return tally.finished / (steps * per_step), tally


CASES = [(0, 10, 20, 0.550), (10, 10, 20, 0.775), (0, 200, 1, 0.5025), (100, 100, 1, 0.7525)]


@pytest.mark.parametrize(("size", "length", "per_step", "ratio"), CASES)
def test_the_projection_alone_evicts_nobody_and_keeps_the_cycle(
    size: int, length: int, per_step: int, ratio: float
) -> None:
    found, tally = saturated(
        [length], size, per_step, ["projection"], warm_up=length, steps=2 * length
    )
    assert tally.evicted == 0
    assert found == pytest.approx(ratio, rel=0.01)
    assert tally.cohorts.mean_share > 0.95  # all of one age


@pytest.mark.parametrize(("size", "length", "per_step", "ratio"), CASES)
def test_cap_and_projection_evict_nobody_and_give_all_the_throughput(
    size: int, length: int, per_step: int, ratio: float
) -> None:
    found, tally = saturated(
        [length], size, per_step, ["cap", "projection"], warm_up=length, steps=2 * length
    )
    assert tally.evicted == 0
    assert found == pytest.approx(1.0, abs=0.001)
    assert tally.cohorts.mean_share < 4 / length + 0.1  # all ages alike, but for the beginning
    assert found > 1.2 * ratio


@pytest.mark.parametrize("lengths", [(4, 8), (5, 7), (2, 3, 5)])
def test_mixed_lengths_with_both(lengths: tuple[int, ...]) -> None:
    per_step = 12
    found, tally = saturated(lengths, 20, per_step, ["cap", "projection"], warm_up=40, steps=120)
    assert tally.evicted == 0
    assert found == pytest.approx(1.0, abs=0.01)


def random_mix(parts: Iterable[str], **projection: Any) -> tuple[float, Tally]:
    lengths = random.Random(1).choices((2, 20), k=400)
    return saturated(lengths, 2, 3, parts, warm_up=60, steps=240, budget=20, **projection)


def test_the_cap_alone_evicts_where_lengths_come_by_chance() -> None:
    """The mean fits, a run of long answers does not: the cap is a promise about means only."""
    found, tally = random_mix(["cap"])
    assert tally.evicted > 10
    both, kept = random_mix(["cap", "projection"])
    assert kept.evicted == 0
    assert both > found + 0.03  # .804 against .763


def test_a_quantile_lets_a_little_more_in_and_evicts_some() -> None:
    exact, _ = random_mix(["cap", "projection"], lengths={2: 1.0, 20: 1.0})
    half, tally = random_mix(["cap", "projection"], lengths={2: 1.0, 20: 1.0}, quantile=0.5)
    assert exact < half < exact + 0.02
    assert 0 < tally.evicted < 60


def test_a_quantile_by_hand() -> None:
    """Half the answers have 2 blocks, half 6; of those beyond 2, all have 6."""
    memory = GrowingKV(page_size=8)
    capacity = Capacity(max_num_seqs=9, num_pages=20, memory=memory)
    requests = [Request(f"{n}", prompt_len=8, max_new_tokens=80, block_length=8) for n in range(9)]

    def joins(**how: Any) -> int:
        policy = Policy(admission=ProjectedPeak(memory, **how))
        scheduler = Scheduler(policy=policy, capacity=capacity)
        for request in requests:
            scheduler.submit(request, now=0.0)
        batch = scheduler.next_step(now=0.0).batch
        assert batch is not None
        return len(batch.rows)

    assert joins() == 1  # 11 pages each at the end of the budget
    assert joins(lengths={2: 1, 6: 1}) == 2  # 7 pages
    assert joins(lengths={2: 1, 6: 1}, quantile=0.51) == 2
    assert joins(lengths={2: 1, 6: 1}, quantile=0.5) == 6  # 3 pages
    assert joins(lengths={1: 1, 90: 1}, quantile=1.0) == 1  # the budget is the limit


# --- mixing, and the meter ------------------------------------------------------------------------


def order_of(policy: Policy, kinds: str) -> str:
    """In which order one slot takes requests that came together."""
    scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=1))
    for number, kind in enumerate(kinds):
        request = Request(f"{number}", prompt_len=1, max_new_tokens=1, request_class=kind)
        scheduler.submit(request, now=0.0)
    order = ""
    while (batch := scheduler.next_step(now=0.0).batch) is not None:
        order += str(batch.rows[0].request.request_class)
        done = (RowFinished(batch.rows[0].slot, FinishReason.EOS),)
        scheduler.complete_step(batch, StepOutcome(finished=done), now=0.0)
    return order


def test_a_lump_of_long_requests_is_spread_over_the_others() -> None:
    policy = Policy(ordering=MixLengths({"l": 1, "s": 3}))
    mixed = "".join(random.Random(3).sample("l" * 20 + "s" * 60, 80))
    for kinds in ("l" * 20 + "s" * 60, "s" * 60 + "l" * 20, mixed):
        order = order_of(policy, kinds)
        for end in range(min(order.rindex("l"), order.rindex("s")) + 1):
            long, short = order[:end].count("l"), order[:end].count("s")
            assert abs(long - short / 3) <= 1 + 1 / 3


def test_a_class_that_was_away_has_no_claim() -> None:
    """Twenty short ones went; then both come: no run of long ones makes up for the past."""
    policy = Policy(ordering=MixLengths({"l": 1, "s": 1}))
    scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=1))
    served = ""
    for number in range(60):
        kinds = "s" if number < 20 else ("ls" if number < 40 else "")
        for kind in kinds:
            name = f"{number}{kind}"
            request = Request(name, prompt_len=1, max_new_tokens=1, request_class=kind)
            scheduler.submit(request, now=0.0)
        batch = scheduler.next_step(now=0.0).batch
        assert batch is not None
        served += str(batch.rows[0].request.request_class)
        done = (RowFinished(batch.rows[0].slot, FinishReason.EOS),)
        scheduler.complete_step(batch, StepOutcome(finished=done), now=0.0)
    assert served[:20] == "s" * 20
    assert "lll" not in served
    assert served.count("l") == 20


def test_mixing_desynchronises_answers_that_come_sorted() -> None:
    """Answers of 5 blocks first, then of 7: alone they congest, half and half they do not."""
    assert congestion.spectral_radius({5: 1}, 50) > 1
    assert congestion.spectral_radius({7: 1}, 50) > 1
    assert congestion.spectral_radius({5: 1, 7: 1}, 50) < 1
    found = {}
    for name, policy in (
        ("fcfs", Policy(eviction=YoungestFirst())),
        ("mixed", Policy(ordering=MixLengths({5: 1, 7: 1}), eviction=YoungestFirst())),
    ):
        memory = Ages(50)
        pages = round(24 / congestion.equilibrium_rate({5: 1, 7: 1}, 50, 1.0))
        tally = Tally(300, 500)
        works = [Work(1, n, 1, n, n, tuple(range(1, n + 1))) for n in (5, 7)]
        simulate(
            [(0.0, works[i >= 7_000]) for i in range(14_000)],
            policy=policy,
            capacity=Capacity(max_num_seqs=pages, num_pages=pages, memory=memory),
            service=Constant(1.0),
            max_waiting=10**9,
            make_request=lambda name, work, _at: Request(
                name,
                prompt_len=1,
                max_new_tokens=work.max_new_tokens,
                block_length=1,
                request_class=work.num_blocks,
                payload=work,
            ),
            observers=[tally],
            until_s=1.0,
        )
        found[name] = (tally.finished, tally.evicted, tally.cohorts.mean_share)
    assert found["mixed"][0] > 1.2 * found["fcfs"][0]
    assert found["mixed"][1] < 0.1 * found["fcfs"][1]
    assert found["fcfs"][2] > 0.95
    assert found["mixed"][2] < 0.35


@pytest.mark.parametrize("seed", range(5))
def test_the_meter_counts_what_a_list_counts(seed: int) -> None:
    meter, rng = CohortMeter(), random.Random(seed)
    rows: list[tuple[str, int]] = []
    shares: list[float] = []
    for step in range(200):
        for number in range(rng.choice([0, 0, 1, 3])):
            name = f"{step}-{number}"
            rows.append((name, step))
            meter(RequestJoined(0.0, name, 0, step, 0.0, False))
        largest = max(Counter(cohort for _, cohort in rows).values(), default=0)
        meter(StepCompleted(0.0, step, len(rows), 2))
        if rows:
            shares.append(largest / len(rows))
            assert meter.share_now == shares[-1]
        while rows and rng.random() < 0.6:
            name, _ = rows.pop(rng.randrange(len(rows)))
            gone: Event = (
                RequestPreempted(0.0, name, 0, False)
                if rng.random() < 0.3
                else RequestFinished(0.0, name, FinishReason.EOS, 0.0, 0.0, 1, 1)
            )
            meter(gone)
            meter(gone)  # somebody it does not know
    assert meter.mean_share == pytest.approx(sum(shares) / len(shares))


def test_an_idle_meter_reads_nothing() -> None:
    assert CohortMeter().mean_share == CohortMeter().share_now == 0


# --- on our model ---------------------------------------------------------------------------------


MEMORY = GrowingKV(page_size=16)


def served(policy: Policy, shapes: Shapes, rate: float) -> tuple[float, int]:
    """Return the mean latency of 400 requests in 150 pages, and evictions."""
    tally = Tally(-1, math.inf)
    result = simulate(
        OpenLoop(Poisson(rate), shapes, seed=2, max_requests=400),
        policy=policy,
        capacity=Capacity(max_num_seqs=64, num_pages=150, memory=MEMORY),
        service=Linear(0.02, 0.001),
        observers=[tally],
    )
    return sum(result.latency_s) / len(result.latency_s), tally.evicted


def test_on_gsm8k_answers_it_only_costs() -> None:
    """Typical prompts are stable by themselves: a few evictions cost less than waiting does."""
    plain, evicted = served(Policy(eviction=YoungestFirst()), gsm8k(), 0.6)
    assert 20 < evicted < 60
    last = plain
    for quantile, at_most in ((0.9, 2), (1.0, 0)):
        policy = presets.congestion_stable(
            64, memory=MEMORY, lengths=GSM8K_BLOCKS, quantile=quantile
        )
        mean, evicted = served(policy, gsm8k(), 0.6)
        assert evicted <= at_most
        assert mean > 1.05 * last
        last = mean


def test_on_answers_of_one_length_the_cap_wins() -> None:
    """Ten blocks each: .8 requests a second break plain admission, and are within n*.

    Rows join at any step, so they cross their blocks out of step: then the projection is no
    promise, and adds nothing to the cap.
    """
    shapes = Shapes(Fixed(10), prompt=Fixed(76))
    per_block = congestion.equilibrium_rate({10: 1}, 76 / 32, 150 * 16 / 32)
    policy = presets.congestion_stable(64, per_block / 32, memory=MEMORY)
    alone = attrs.evolve(policy, admission=RateCap(per_block / 32))
    plain, evicted = served(Policy(eviction=YoungestFirst()), shapes, 0.8)
    both, few = served(policy, shapes, 0.8)
    cap, as_few = served(alone, shapes, 0.8)
    assert plain > 5 * both
    assert evicted > 1000
    assert few < 50
    assert cap == pytest.approx(both, rel=0.02)
    assert as_few < 50


def test_it_keeps_the_contract() -> None:
    memory = GrowingKV(page_size=16)
    tight = Capacity(max_num_seqs=4, num_pages=40, memory=memory)
    check_policy(presets.congestion_stable(4, 0.3))
    check_policy(presets.congestion_stable(4, 0.7, memory=memory), capacity=tight)
    check_policy(
        presets.congestion_stable(4, {"": 0.2}, lengths={1: 1, 3: 2}, quantile=0.5, memory=memory),
        capacity=tight,
    )
    check_policy(Policy(ordering=MixLengths({"": 1})))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RateCap(0), "per_step"),
        (lambda: RateCap(math.nan), "per_step"),
        (lambda: RateCap(True), "per_step"),
        (lambda: RateCap({}), "at least one"),
        (lambda: RateCap({"a": -1}), "'a'"),
        (lambda: ProjectedPeak(GrowingKV(), quantile=0), "quantile"),
        (lambda: ProjectedPeak(GrowingKV(), quantile=math.nan), "quantile"),
        (lambda: ProjectedPeak(GrowingKV(), lengths={}), "lengths"),
        (lambda: presets.congestion_stable(4, lengths={1: 1}), "memory"),
        (lambda: MixLengths("ab"), "weights"),
        (lambda: MixLengths({}, 0), "default_weight"),
        (lambda: MixLengths({"a": math.inf}), "'a'"),
    ],
)
def test_bad_arguments_are_named(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_another_memory_model_than_the_capacitys_is_refused() -> None:
    with pytest.raises(ConfigError, match="the capacity's"):
        Scheduler(
            policy=Policy(admission=ProjectedPeak(GrowingKV(page_size=8))),
            capacity=Capacity(max_num_seqs=2, num_pages=9, memory=GrowingKV(page_size=16)),
        )


def test_lengths_come_back_from_a_journal_as_they_were():
    sink = io.StringIO()
    memory = GrowingKV(page_size=8)
    policy = presets.congestion_stable(2, lengths={3: 0.1, 1: 0.7, 2: 0.7}, memory=memory)
    capacity = Capacity(max_num_seqs=2, num_pages=40, memory=memory)
    scheduler = JournaledScheduler(sink, policy=policy, capacity=capacity)
    scheduler.submit(Request("a", prompt_len=4, max_new_tokens=16), now=0.0)
    lines = sink.getvalue().splitlines(keepends=True)
    replay(lines)
    again, _ = restore(lines, io.StringIO(), now=5.0)
    assert again.policy == policy
    assert again.num_waiting == 1


@pytest.mark.parametrize("lengths", [(1, 2), ((1, 2, 3),), (), {1: 1.7e308, 2: 1.7e308}])
def test_lengths_that_are_none_are_refused(lengths):
    with pytest.raises(ConfigError, match="lengths"):
        ProjectedPeak(GrowingKV(page_size=8), lengths=lengths)
