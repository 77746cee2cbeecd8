"""Two steps in flight: order, quarantined slots, what is wasted, what fails, what it costs."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Any

import pytest

from dllm_sched import (
    NOTHING,
    BlockBoundary,
    Capacity,
    ConfigError,
    EngineProtocolError,
    FinishReason,
    GrowingKV,
    OutcomeError,
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
from dllm_sched.policies import Composition, StepCap
from dllm_sched.policies.base import ALL


def make(slots: int = 4, *, ahead: int = 2, **arguments: Any) -> Scheduler:
    capacity = arguments.pop("capacity", Capacity(max_num_seqs=slots))
    return Scheduler(capacity=capacity, max_in_flight=ahead, **arguments)


def req(request_id: str, **fields: Any) -> Request:
    return Request(request_id, prompt_len=4, max_new_tokens=32, block_length=8, **fields)


def submit(scheduler: Scheduler, *ids: str) -> None:
    for one in ids:
        scheduler.submit(req(one), now=0.0)


def eos(*slots: int) -> StepOutcome:
    return StepOutcome(finished=tuple(RowFinished(slot, FinishReason.EOS) for slot in slots))


def ids(batch: Any) -> list[str]:
    return [row.request.id for row in batch.rows]


def test_two_steps_are_in_flight_and_a_third_is_refused():
    scheduler = make()
    submit(scheduler, "a")
    first = scheduler.next_step(now=0.0).batch
    second = scheduler.next_step(now=0.0).batch
    assert (first.step_id, second.step_id) == (0, 1)
    assert second.rows is first.rows
    with pytest.raises(EngineProtocolError, match="step 0 is in flight"):
        scheduler.next_step(now=0.0)


def test_completions_come_in_order():
    scheduler = make()
    submit(scheduler, "a")
    first, second = (scheduler.next_step(now=0.0).batch for _ in range(2))
    with pytest.raises(EngineProtocolError, match="step 0 is in flight, got 1"):
        scheduler.complete_step(second, now=0.0)
    scheduler.complete_step(first, now=0.0)
    scheduler.complete_step(second, now=0.0)
    assert scheduler.view("a").num_steps == 2


def test_one_step_in_flight_is_the_default_and_only_1_and_2_exist():
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=1))
    submit(scheduler, "a")
    scheduler.next_step(now=0.0)
    with pytest.raises(EngineProtocolError, match="step 0 is in flight"):
        scheduler.next_step(now=0.0)
    for wrong in (0, 3, True, 2.0, "2"):
        with pytest.raises(ConfigError, match="max_in_flight"):
            make(ahead=wrong)


def test_a_slot_is_quarantined_until_no_step_in_flight_has_it():
    scheduler = make(slots=1)
    submit(scheduler, "a", "b")
    first, second = (scheduler.next_step(now=0.0).batch for _ in range(2))
    told = scheduler.complete_step(first, eos(0), now=1.0)
    assert [one.request.id for one in told.finished] == ["a"]
    assert told.released == ()
    assert scheduler.next_step(now=1.0).batch is None, "its slot is not free yet"
    scheduler.check_invariants()
    told = scheduler.complete_step(second, eos(0), now=2.0)  # the engine ran it once more
    assert told.finished == ()
    assert [(one.slot, one.request.id) for one in told.released] == [(0, "a")]
    assert ids(scheduler.next_step(now=2.0).batch) == ["b"]
    assert scheduler.stats().wasted_row_steps == 1


def test_a_row_that_joins_ahead_does_not_count_the_older_step():
    scheduler = make()
    submit(scheduler, "a")
    first = scheduler.next_step(now=0.0).batch
    submit(scheduler, "b")
    second = scheduler.next_step(now=0.0).batch
    assert ids(second) == ["a", "b"]
    assert scheduler.view("b").num_steps == 0
    with pytest.raises(OutcomeError, match="slot 1 is not in the batch"):
        scheduler.complete_step(first, eos(1), now=0.0)
    scheduler.complete_step(first, now=0.0)
    assert (scheduler.view("a").num_steps, scheduler.view("b").num_steps) == (1, 0)
    scheduler.complete_step(second, now=0.0)
    assert (scheduler.view("a").num_steps, scheduler.view("b").num_steps) == (2, 1)
    assert scheduler.stats().row_steps == 3


def test_cancel_of_a_row_that_only_the_later_step_has():
    scheduler = make()
    submit(scheduler, "a")
    first = scheduler.next_step(now=0.0).batch
    submit(scheduler, "b")
    second = scheduler.next_step(now=0.0).batch
    (finished,) = scheduler.cancel("b", now=0.0).finished
    assert finished.num_steps == 0
    assert scheduler.complete_step(first, now=0.0).released == ()
    assert scheduler.stats().wasted_row_steps == 0, "it was not in that step"
    (released,) = scheduler.complete_step(second, now=0.0).released
    assert released.request.id == "b"
    assert scheduler.stats().wasted_row_steps == 1


def test_a_failed_step_takes_the_one_ahead_with_it():
    scheduler = make()
    submit(scheduler, "a")
    first = scheduler.next_step(now=0.0).batch
    submit(scheduler, "b")
    second = scheduler.next_step(now=0.0).batch
    with pytest.raises(EngineProtocolError, match="step 0 is in flight, got 1"):
        scheduler.fail_step(second, RuntimeError("lost"), rows={}, now=0.0)
    scheduler.fail_step(first, RuntimeError("lost"), rows={0: RowFate.KEEP}, now=0.0)
    again = scheduler.next_step(now=0.0).batch
    assert again.step_id == 2
    assert [row.request.id for row in again.joined] == ["a", "b"], "nobody was placed for good"
    scheduler.complete_step(again, now=0.0)
    assert (scheduler.view("a").num_steps, scheduler.view("b").num_steps) == (1, 1)
    scheduler.check_invariants()


def test_a_phase_that_changes_while_a_later_step_runs_keeps_the_count():
    scheduler = make()
    submit(scheduler, "a", "b")
    first, second = (scheduler.next_step(now=0.0).batch for _ in range(2))
    reuse = StepOutcome(phases=(PhaseChange(0, Phase.REUSE),))
    scheduler.complete_step(first, reuse, now=0.0)
    scheduler.complete_step(second, now=0.0)
    assert (scheduler.view("a").num_steps, scheduler.view("b").num_steps) == (2, 2)


def test_a_step_cap_wastes_one_step_at_most():
    scheduler = make(policy=Policy(eviction=StepCap(3)))
    submit(scheduler, "a")
    flights = deque(scheduler.next_step(now=0.0).batch for _ in range(2))
    ends = []
    while flights:
        ends += scheduler.complete_step(flights.popleft(), now=0.0).finished
        batch = scheduler.next_step(now=0.0).batch
        if batch is not None:
            flights.append(batch)
    assert [(one.reason, one.num_steps) for one in ends] == [(FinishReason.MAX_STEPS, 3)]
    assert scheduler.stats().wasted_row_steps == 1


class _OddsFirst(Composition):
    def select(self, state: Any, round: Any) -> Any:
        return ALL


@pytest.mark.parametrize("why", ["select", "paused", "batch_key", "progress"])
def test_where_it_cannot_run_ahead_it_says_so_with_no_batch(why):
    class _Wants(Composition):
        needs = frozenset({"progress"})

    policy = {"select": _OddsFirst(), "progress": _Wants()}.get(why, Composition())
    scheduler = make(policy=Policy(composition=policy))
    submit(scheduler, "a")
    first = scheduler.next_step(now=0.0).batch
    if why == "paused":
        scheduler.pause(now=0.0)
    if why == "batch_key":
        scheduler.submit(req("b", batch_key="other"), now=0.0)
    update = scheduler.next_step(now=0.0)
    assert update.batch is None
    remaining = StepOutcome(masked_remaining=(1,)) if why == "progress" else NOTHING
    scheduler.complete_step(first, remaining, now=0.0)
    scheduler.resume(now=0.0)
    assert scheduler.next_step(now=0.0).batch is not None


def test_nothing_to_run_ahead_with_is_no_stall():
    scheduler = make(slots=1)
    submit(scheduler, "a", "b")
    first = scheduler.next_step(now=0.0).batch
    scheduler.cancel("a", now=0.0)
    scheduler.drain(now=0.0)
    assert scheduler.next_step(now=0.0).batch is None, "the slot is in quarantine"
    scheduler.complete_step(first, now=0.0)
    assert ids(scheduler.next_step(now=0.0).batch) == ["b"]


def test_pages_cover_one_block_more():
    memory = GrowingKV(page_size=4)
    pages = {}
    for ahead in (1, 2):
        capacity = Capacity(max_num_seqs=1, num_pages=20, memory=memory)
        scheduler = make(ahead=ahead, capacity=capacity)
        submit(scheduler, "a")
        batch = scheduler.next_step(now=0.0).batch
        pages[ahead] = [scheduler.view("a").num_pages]
        boundary = StepOutcome(boundaries=(BlockBoundary(0, 1, 12),))
        scheduler.complete_step(batch, boundary, now=0.0)
        pages[ahead].append(scheduler.view("a").num_pages)
    # 4 tokens of prompt and a window of 8, then 12 and 8; with a block of 8 more
    assert pages == {1: [3, 5], 2: [5, 7]}


def test_jumps_end_where_a_second_step_is_in_flight():
    scheduler = make()
    submit(scheduler, "a")
    first = scheduler.next_step(now=0.0).batch
    assert scheduler.horizon().steps == math.inf
    scheduler.next_step(now=0.0)
    assert scheduler.horizon().steps == 1
    with pytest.raises(EngineProtocolError, match="2 steps at once"):
        scheduler.complete_step(first, now=0.0, steps=2)


def serve(ahead: int, seed: int) -> tuple[dict[str, int], Any]:
    """Serve 60 requests on an engine that notices an end only when the step is over."""
    rng = random.Random(seed)
    needs = {f"r{n}": rng.randint(1, 9) for n in range(60)}
    scheduler = make(slots=5, ahead=ahead, policy=presets.continuous(5))
    coming = deque(needs)
    flights: deque[Any] = deque()
    done: dict[str, int] = {}
    steps: dict[str, int] = {}
    now = 0.0
    while coming or scheduler.has_work():
        now += 1.0
        for _ in range(rng.randint(0, 2)):
            if coming:
                scheduler.submit(req(coming.popleft()), now=now)
        while len(flights) < ahead:
            batch = scheduler.next_step(now=now).batch
            if batch is None:
                break
            flights.append(batch)
        if not flights:
            continue
        batch = flights.popleft()
        over = []
        for row in batch.rows:
            steps[row.request.id] = steps.get(row.request.id, 0) + 1
            if steps[row.request.id] == needs[row.request.id]:
                over.append(row.slot)
        for one in scheduler.complete_step(batch, eos(*over), now=now).finished:
            assert one.request.id not in done
            done[one.request.id] = one.num_steps
        scheduler.check_invariants()
    assert done == needs, "each has its own number of steps, whether run ahead or not"
    return done, scheduler.stats()


@pytest.mark.parametrize("seed", range(5))
def test_run_ahead_gives_the_same_and_wastes_at_most_a_row_step_per_end(seed):
    plain, before = serve(1, seed)
    ahead, after = serve(2, seed)
    assert plain == ahead
    assert before.row_steps == sum(plain.values())
    assert 0 < after.row_steps - before.row_steps <= len(plain)
