"""The scheduler's calls one by one: what they return, refuse and guarantee."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import random
import subprocess
import sys
import weakref
from typing import Any

import pytest

from dllm_sched import (
    NO_KNOBS,
    NOTHING,
    Accepted,
    BlockBoundary,
    Capacity,
    ClockError,
    ConfigError,
    DuplicateRequestError,
    EngineProtocolError,
    FinishReason,
    FixedCanvas,
    GrowingKV,
    InvariantError,
    OutcomeError,
    Phase,
    PhaseChange,
    Policy,
    PolicyError,
    Rejected,
    Request,
    RequestStatus,
    RowFailed,
    RowFate,
    RowFinished,
    Scheduler,
    StepOutcome,
    UnknownRequestError,
    presets,
)
from dllm_sched.events import Event, from_json, to_json
from dllm_sched.policies import Admission, Composition, Control, Eviction, Slots, StepCap, Verdict
from dllm_sched.policies.base import KEEP

INF = math.inf


def make(slots: int = 4, policy: Policy | None = None, **capacity: Any) -> Scheduler:
    return Scheduler(capacity=Capacity(max_num_seqs=slots, **capacity), policy=policy)


def req(request_id: str = "a", prompt_len: int = 4, budget: int = 32, **fields: Any) -> Request:
    fields.setdefault("block_length", 8)
    return Request(request_id, prompt_len=prompt_len, max_new_tokens=budget, **fields)


def finish(*slots: int, output: Any = None) -> StepOutcome:
    return StepOutcome(finished=tuple(RowFinished(s, FinishReason.EOS, output) for s in slots))


# --- requests ---


class NeverEqual:
    """Cannot be compared."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise ValueError("which of them?")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", ""),
        ("id", 7),
        ("prompt_len", 0),
        ("prompt_len", -1),
        ("prompt_len", 1.5),
        ("max_new_tokens", 0),
        ("block_length", 0),
        ("priority", "high"),
        ("deadline_at", math.nan),
        ("deadline_at", "soon"),
        ("queue_timeout_s", -0.1),
        ("queue_timeout_s", math.nan),
        ("batch_key", []),
        ("batch_key", math.nan),
        ("batch_key", NeverEqual()),
        ("request_class", {}),
        ("request_class", math.nan),
    ],
)
def test_a_bad_request_names_its_field(field: str, value: Any) -> None:
    fields = {"id": "a", "prompt_len": 4, "max_new_tokens": 8, field: value}
    with pytest.raises(ConfigError, match=field):
        Request(**fields)


def test_a_request_is_frozen_and_rounds_to_blocks() -> None:
    request = req(prompt_len=5, budget=20)
    assert (request.max_blocks, request.max_total_tokens) == (3, 29)
    with pytest.raises(AttributeError):
        request.prompt_len = 9  # type: ignore[misc]


# --- the life of a request ---


def test_a_request_runs_and_is_told_once() -> None:
    s = make()
    assert s.submit(req(), now=1.0) == Accepted("a")
    update = s.next_step(now=2.0)
    assert update.batch is not None
    (row,) = update.batch.rows
    assert update.batch.joined == (row,)
    assert (row.slot, row.phase, row.knobs, row.resumed) == (0, Phase.PREFILL, NO_KNOBS, False)
    assert row.max_tokens == 4 + 32
    assert s.complete_step(update.batch, now=3.0).finished == ()
    second = s.next_step(now=3.0).batch
    assert second is not None
    assert second.joined == ()
    assert second.rows is update.batch.rows, "nothing changed: the same tuple"
    told = s.complete_step(second, finish(0, output="text"), now=4.5)
    (done,) = told.finished
    assert done.reason is FinishReason.EOS
    assert (done.arrived_at, done.admitted_at, done.finished_at) == (1.0, 2.0, 4.5)
    assert (done.num_steps, done.output, done.error) == (2, "text", None)
    assert [(r.slot, r.reason, r.kept) for r in told.released] == [(0, FinishReason.EOS, False)]
    assert not s.has_work()
    assert s.next_step(now=5.0).wake_at == INF
    s.submit(req(), now=5.0)  # the id is free again
    s.check_invariants()


def test_rows_leave_and_join_while_others_go_on() -> None:
    s = make(2)
    for name in "abc":
        s.submit(req(name), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    s.complete_step(batch, finish(0), now=1.0)
    batch = s.next_step(now=1.0).batch
    assert batch is not None
    assert {row.slot: row.request.id for row in batch.rows} == {1: "b", 0: "c"}
    assert [row.request.id for row in batch.joined] == ["c"]
    s.complete_step(batch, now=2.0)
    assert s.view("b").num_steps == 2
    assert s.view("c").num_steps == 1


def test_counts_and_stats_add_up() -> None:
    s = make(2)
    for name in "abc":
        s.submit(req(name), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    s.complete_step(batch, finish(0), now=1.0)
    assert s.counts() == (3, 0, 1, 1, 1)
    stats = s.stats()
    assert (stats.num_steps, stats.row_steps, stats.wasted_row_steps) == (1, 2, 0)
    assert stats.finished_by_reason[FinishReason.EOS] == 1
    assert stats.free_slots == 1


def test_an_empty_slot_while_requests_wait_is_waste() -> None:
    s = make(3, presets.fixed_fill(3, 0.0))
    for name in "ab":
        s.submit(req(name), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    s.submit(req("c"), now=0.5)
    s.complete_step(batch, now=1.0)
    assert s.stats().wasted_row_steps == 1


# --- errors change nothing ---


def test_an_active_id_is_refused_with_its_state() -> None:
    s = make()
    s.submit(req(), now=0.0)
    with pytest.raises(DuplicateRequestError, match=r"'a' is still waiting"):
        s.submit(req(), now=0.0)
    s.next_step(now=0.0)
    with pytest.raises(ValueError, match="still running"):
        s.submit(req(), now=0.0)
    assert s.counts().submitted == 1


@pytest.mark.parametrize("now", [math.nan, INF, -INF, 4.9])
def test_time_is_finite_and_never_goes_backward(now: float) -> None:
    s = make()
    s.submit(req(), now=5.0)
    for call in (
        lambda: s.submit(req("b"), now=now),
        lambda: s.next_step(now=now),
        lambda: s.cancel("a", now=now),
        lambda: s.drain(now=now),
        lambda: s.set_policy(Policy(), now=now),
        lambda: s.set_capacity(Capacity(max_num_seqs=1), now=now),
        lambda: s.pause(now=now),
        lambda: s.resume(now=now),
    ):
        with pytest.raises(ClockError, match="another clock"):
            call()
    assert s.counts() == (1, 0, 1, 0, 0)
    assert s.next_step(now=5.0).batch is not None


def test_calls_out_of_order() -> None:
    s = make()
    s.submit(req(), now=0.0)
    with pytest.raises(EngineProtocolError, match="no batch is in flight"):
        s.horizon()
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    with pytest.raises(EngineProtocolError, match="step 0 is in flight"):
        s.next_step(now=0.0)
    with pytest.raises(EngineProtocolError, match="step 0 is in flight, got 7"):
        s.complete_step(batch._replace(step_id=7), now=0.0)
    s.complete_step(batch, now=0.0)
    with pytest.raises(EngineProtocolError, match="no step is in flight"):
        s.complete_step(batch, now=0.0)
    with pytest.raises(EngineProtocolError, match="no step is in flight"):
        s.fail_step(batch, RuntimeError(), rows={}, now=0.0)
    with pytest.raises(UnknownRequestError, match="'nobody' is not active"):
        s.explain("nobody")


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (finish(3), r"finished: slot 3 is not in the batch of step 0, whose slots are \[0, 1\]"),
        (finish(0, 0), r"slot 0 \('a'\) is named twice"),
        (
            StepOutcome(
                finished=(RowFinished(0, FinishReason.EOS),), failed=(RowFailed(0, OSError()),)
            ),
            r"\[0\] both finished and failed",
        ),
        (StepOutcome(boundaries=(BlockBoundary(1, 5, 44),)), "its 4 blocks"),
        (StepOutcome(boundaries=(BlockBoundary(1, 1, 99),)), "its 36 tokens"),
        (StepOutcome(phases=(PhaseChange(0, "reuse"),)), "must be a Phase"),  # type: ignore[arg-type]
        (StepOutcome(failed=(RowFailed(0, "boom"),)), "must be a BaseException"),  # type: ignore[arg-type]
        (StepOutcome(masked_remaining=(1,)), "expected 2 counts"),
        ({"finished": [0]}, "expected a StepOutcome"),
    ],
)
def test_an_impossible_outcome_is_refused_whole(outcome: Any, says: str) -> None:
    s = make()
    s.submit(req("a"), now=0.0)
    s.submit(req("b"), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    with pytest.raises(OutcomeError, match=says):
        s.complete_step(batch, outcome, now=1.0)
    s.check_invariants()
    assert s.view("a").num_steps == 0
    s.complete_step(batch, now=1.0)
    assert s.view("a").num_steps == 1


def test_block_counts_never_go_back() -> None:
    s = make()
    s.submit(req(), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    s.complete_step(batch, StepOutcome(boundaries=(BlockBoundary(0, 2, 20),)), now=1.0)
    batch = s.next_step(now=1.0).batch
    assert batch is not None
    with pytest.raises(OutcomeError, match="the 2 reported before"):
        s.complete_step(batch, StepOutcome(boundaries=(BlockBoundary(0, 1, 20),)), now=2.0)


# --- cancel and time limits ---


def test_requeue_moves_who_waits_and_nobody_else() -> None:
    rank = {"a": 1.0, "b": 2.0, "c": 3.0}
    scheduler = make(1, Policy(ordering=lambda rv: (rank[rv.id],)))
    for one in "abc":
        scheduler.submit(req(one), now=0.0)
    batch = scheduler.next_step(now=0.0).batch
    rank.update(a=9.0, c=0.5)
    for one in ("a", "c", "nobody"):
        assert scheduler.requeue(one, now=1.0).batch is None
        scheduler.check_invariants()
    assert scheduler.view("a").status is RequestStatus.RUNNING
    done = StepOutcome(finished=(RowFinished(0, FinishReason.EOS),))
    scheduler.complete_step(batch, done, now=1.0)
    assert scheduler.next_step(now=1.0).batch.rows[0].request.id == "c"
    rank["b"] = math.nan
    before = scheduler.counts()
    with pytest.raises(PolicyError, match="'b'"):
        scheduler.requeue("b", now=2.0)
    assert scheduler.counts() == before
    scheduler.check_invariants()


def test_cancel_in_every_state() -> None:
    s = make(1)
    for name in "ab":
        s.submit(req(name), now=0.0)
    assert s.cancel("b", now=0.0).finished[0].reason is FinishReason.CANCELLED
    assert s.cancel("b", now=0.0).finished == (), "idempotent"
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    told = s.cancel("a", now=0.5)
    assert [f.request.id for f in told.finished] == ["a"]
    assert told.released == (), "the step in flight may still touch the slot"
    s.submit(req("c"), now=0.5)
    told = s.complete_step(batch, finish(0), now=1.0)
    assert told.finished == (), "told once"
    assert [(r.slot, r.request.id) for r in told.released] == [(0, "a")]
    batch = s.next_step(now=1.0).batch
    assert batch is not None
    assert [(row.slot, row.request.id) for row in batch.rows] == [(0, "c")]
    s.check_invariants()


def test_a_past_deadline_is_an_ending_not_an_error() -> None:
    s = make()
    assert s.submit(req(deadline_at=3.0), now=5.0) == Accepted("a")
    update = s.next_step(now=5.0)
    assert update.batch is None
    assert [f.reason for f in update.finished] == [FinishReason.DEADLINE]
    assert update.finished[0].admitted_at is None


def test_waiting_requests_expire_and_wake_the_caller() -> None:
    s = make(1)
    s.submit(req("a"), now=0.0)
    s.submit(req("b", queue_timeout_s=2.0), now=0.0)
    s.submit(req("c", deadline_at=3.0, queue_timeout_s=9.0), now=0.0)
    update = s.next_step(now=0.0)
    assert update.wake_at == 2.0
    assert update.batch is not None
    s.complete_step(update.batch, now=2.0)
    update = s.next_step(now=2.0)
    assert [(f.request.id, f.reason) for f in update.finished] == [
        ("b", FinishReason.QUEUE_TIMEOUT)
    ]
    assert update.wake_at == 3.0
    assert update.batch is not None
    s.complete_step(update.batch, now=3.5)
    update = s.next_step(now=3.5)
    assert [(f.request.id, f.reason) for f in update.finished] == [("c", FinishReason.DEADLINE)]


def test_a_queue_timeout_ends_with_the_first_admission() -> None:
    s = make()
    s.submit(req(queue_timeout_s=1.0), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    s.fail_step(batch, OSError(), rows={0: RowFate.RESTART}, now=2.0)
    update = s.next_step(now=5.0)
    assert update.finished == ()
    assert update.batch is not None


# --- failing steps ---


def test_after_a_failed_step_nobody_has_advanced() -> None:
    s = make()
    for name in "abc":
        s.submit(req(name), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    s.complete_step(batch, now=1.0)
    batch = s.next_step(now=1.0).batch
    assert batch is not None
    error = RuntimeError("device lost")
    told = s.fail_step(batch, error, rows={0: RowFate.FAIL, 1: RowFate.RESTART}, now=2.0)
    assert [(f.request.id, f.reason, f.error) for f in told.finished] == [
        ("a", FinishReason.ERROR, error)
    ]
    assert [(r.slot, r.reason) for r in told.released] == [(0, FinishReason.ERROR), (1, None)]
    assert (s.view("b").status, s.view("b").num_steps) == (RequestStatus.PREEMPTED, 0)
    assert (s.view("c").status, s.view("c").num_steps) == (RequestStatus.RUNNING, 1)
    batch = s.next_step(now=2.0).batch
    assert batch is not None
    assert [row.request.id for row in batch.joined] == ["b"]


def test_rows_that_joined_with_a_failed_step_join_again() -> None:
    s = make()
    s.submit(req("a"), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    s.fail_step(batch, OSError(), rows={}, now=1.0)
    again = s.next_step(now=1.0).batch
    assert again is not None
    assert again.joined == again.rows == batch.rows


@pytest.mark.parametrize("rows", [{5: RowFate.KEEP}, {0: "fail"}, {True: RowFate.FAIL}])
def test_fail_step_checks_its_rows(rows: Any) -> None:
    s = make()
    s.submit(req(), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    with pytest.raises(OutcomeError, match="fail_step: slot"):
        s.fail_step(batch, OSError(), rows=rows, now=0.0)
    s.complete_step(batch, now=0.0)


def test_a_failing_row_fails_alone() -> None:
    s = make()
    s.submit(req("a"), now=0.0)
    s.submit(req("b"), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    error = ValueError("NaN logits")
    told = s.complete_step(batch, StepOutcome(failed=(RowFailed(0, error),)), now=1.0)
    assert [(f.request.id, f.error) for f in told.finished] == [("a", error)]
    batch = s.next_step(now=1.0).batch
    assert batch is not None
    assert [row.request.id for row in batch.rows] == ["b"]


# --- horizon and several steps at once ---


def test_horizon_and_steps_at_once() -> None:
    s = make(4, Policy(eviction=StepCap(10)))
    s.submit(req("a", deadline_at=50.0), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    assert s.horizon() == (10, INF), "a deadline does not end a row without PastDeadline"
    with pytest.raises(EngineProtocolError, match="11 steps at once"):
        s.complete_step(batch, now=1.0, steps=11)
    with pytest.raises(EngineProtocolError, match="steps must be"):
        s.complete_step(batch, now=1.0, steps=0)
    s.complete_step(batch, now=1.0, steps=7)
    assert s.view("a").num_steps == 7
    s.submit(req("b", queue_timeout_s=INF), now=1.0)
    batch = s.next_step(now=1.0).batch
    assert batch is not None
    assert s.horizon().steps == 3
    told = s.complete_step(batch, now=2.0, steps=3)
    assert [(f.request.id, f.reason, f.num_steps) for f in told.finished] == [
        ("a", FinishReason.MAX_STEPS, 10)
    ]
    batch = s.next_step(now=2.0).batch
    assert batch is not None
    s.submit(req("c"), now=2.0)
    assert s.horizon().steps == 1, "an arrival may join at the next step"


def test_jumps_and_single_steps_end_alike() -> None:
    def run(jump: int) -> tuple[Any, ...]:
        s = make(2, Policy(eviction=StepCap(6)))
        for name in "abc":
            s.submit(req(name), now=0.0)
        now, told = 0.0, []
        while s.has_work():
            batch = s.next_step(now=now).batch
            assert batch is not None
            steps = int(min(s.horizon().steps, jump))
            now += steps
            told += s.complete_step(batch, now=now, steps=steps).finished
        return [(f.request.id, f.num_steps, f.finished_at) for f in told], s.stats()[:3]

    assert run(1) == run(4) == run(100)


# --- control ---


def test_pause_hands_out_nothing_and_time_limits_still_pass() -> None:
    s = make()
    s.submit(req("a"), now=0.0)
    s.submit(req("b", queue_timeout_s=1.0), now=0.0)
    s.pause(now=0.0)
    update = s.next_step(now=0.0)
    assert (update.batch, update.wake_at) == (None, 1.0)
    update = s.next_step(now=1.0)
    assert [f.request.id for f in update.finished] == ["b"]
    assert "paused" in s.explain("a").why
    s.resume(now=2.0)
    assert s.next_step(now=2.0).batch is not None


def test_drain_lets_partial_batches_go_and_rejects() -> None:
    s = make(4, presets.fixed_fill(4))
    s.submit(req("a"), now=0.0)
    update = s.next_step(now=0.0)
    assert (update.batch, update.wake_at) == (None, INF), "only more requests help"
    s.drain(now=1.0)
    assert s.submit(req("b"), now=1.0) == Rejected("b", "draining", None)
    assert s.next_step(now=1.0).batch is not None


def test_a_policy_that_stalls_while_draining_is_an_error_with_a_dump() -> None:
    class Never(Admission):
        def admit(self, state: Any, rv: Any, round: Any) -> Verdict:
            return Verdict.STOP

    s = make(4, Policy(admission=Never(), name="never"))
    s.submit(req("a"), now=0.0)
    assert s.next_step(now=0.0).batch is None
    assert "holds it back" in s.explain("a").why
    s.drain(now=0.0)
    with pytest.raises(PolicyError, match=r"'never' starts nothing while draining.*waiting=1"):
        s.next_step(now=0.0)
    s.set_policy(presets.continuous(4), now=0.0)
    assert s.next_step(now=0.0).batch is not None


def test_set_policy_rekeys_and_keeps_unchanged_axes() -> None:
    class Counting(Admission):
        def init(self) -> int:
            return 0

        def settle(self, state: int, round: Any) -> int:
            return state + round.num_joined

    counting = Counting()
    s = make(1, Policy(admission=counting))
    for name, priority in (("a", 3), ("b", 2), ("c", 1)):
        s.submit(req(name, priority=priority), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    s.set_policy(Policy(ordering=lambda rv: (rv.request.priority,), admission=counting), now=0.5)
    s.complete_step(batch, finish(0), now=1.0)
    batch = s.next_step(now=1.0).batch
    assert batch is not None
    assert batch.rows[0].request.id == "c"
    assert s._asking.admission_state == 2, "a joined, then c"


def test_set_policy_refuses_what_cannot_work_and_keeps_the_old() -> None:
    s = make(2)
    s.submit(req("a"), now=0.0)
    old = s.policy
    with pytest.raises(ConfigError, match="only 2 slots"):
        s.set_policy(presets.continuous(3), now=0.0)
    with pytest.raises(PolicyError, match=r"ordering.key.*ZeroDivisionError.*'a'"):
        s.set_policy(Policy(ordering=lambda rv: (1 / 0,)), now=0.0)
    with pytest.raises(ConfigError, match="expected a Policy"):
        s.set_policy("fcfs", now=0.0)  # type: ignore[arg-type]
    assert s.policy is old
    assert s.next_step(now=0.0).batch is not None


def test_set_capacity_shrinks_and_grows() -> None:
    s = make(2)
    for name in "abcd":
        s.submit(req(name), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    s.set_capacity(Capacity(max_num_seqs=1), now=0.0)
    s.complete_step(batch, finish(0), now=1.0)
    batch = s.next_step(now=1.0).batch
    assert batch is not None
    assert [row.request.id for row in batch.rows] == ["b"], "no room above the new limit"
    s.set_capacity(Capacity(max_num_seqs=3), now=1.0)
    s.complete_step(batch, now=2.0)
    batch = s.next_step(now=2.0).batch
    assert batch is not None
    assert sorted(row.request.id for row in batch.rows) == ["b", "c", "d"]
    s.check_invariants()
    with pytest.raises(ConfigError, match="memory cannot change"):
        s.set_capacity(Capacity(max_num_seqs=3, num_pages=9, memory=FixedCanvas()), now=2.0)


# --- memory ---


def test_capacity_fields_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        Capacity(max_num_seqs=0)
    with pytest.raises(ConfigError, match="together"):
        Capacity(max_num_seqs=1, num_pages=4)
    with pytest.raises(ConfigError, match="page_size"):
        GrowingKV(page_size=0)
    with pytest.raises(ConfigError, match="whole_prefill must be True or False"):
        Capacity(max_num_seqs=1, whole_prefill="yes")  # type: ignore[arg-type]


def test_tokens_of_a_row_by_phase_window_and_canvas() -> None:
    request = Request("r", prompt_len=10, max_new_tokens=30, block_length=8)  # a canvas of 42

    def tokens(**fields: Any) -> list[int]:
        capacity = Capacity(max_num_seqs=1, **fields)
        phases = (Phase.PREFILL, Phase.REFRESH, Phase.REUSE)
        return [capacity.max_tokens(request, phase) for phase in phases]

    assert tokens() == [42, 42, 32]
    assert tokens(window_blocks=1) == [18, 42, 8]
    assert tokens(window_blocks=1, whole_prefill=True) == [42, 42, 8]
    s = make(1)
    s.submit(request, now=0.0)
    with pytest.raises(ConfigError, match="whole_prefill cannot change from False to True"):
        s.set_capacity(Capacity(max_num_seqs=1, whole_prefill=True), now=0.0)


def test_a_fixed_canvas_is_held_whole_from_the_join() -> None:
    s = make(4, num_pages=10, memory=FixedCanvas(page_size=8))  # 36 tokens = 5 pages each
    for name in "abc":
        s.submit(req(name), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    assert len(batch.rows) == 2
    assert s.stats().free_pages == 0
    assert (
        s.explain("c").why == "it is the head of the queue, but there are not enough free KV pages"
    )
    s.complete_step(batch, finish(1), now=1.0)
    assert s.stats().free_pages == 5


def test_growth_is_reserved_before_the_step_that_writes() -> None:
    s = make(2, num_pages=9, memory=GrowingKV(page_size=4))
    s.submit(req("a"), now=0.0)  # 4 prompt + 8 window = 3 pages, peak 9
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    assert s.view("a").num_pages == 3
    s.complete_step(batch, StepOutcome(boundaries=(BlockBoundary(0, 1, 12),)), now=1.0)
    assert s.view("a").num_pages == 5
    assert s.stats().free_pages == 4


def test_when_pages_run_out_the_youngest_restarts_and_the_oldest_goes_on() -> None:
    s = make(2, num_pages=9, memory=GrowingKV(page_size=4))
    s.submit(req("a"), now=0.0)
    s.submit(req("b"), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    assert len(batch.rows) == 2
    outcome = StepOutcome(boundaries=(BlockBoundary(0, 1, 12), BlockBoundary(1, 1, 12)))
    s.complete_step(batch, outcome, now=1.0)  # 5 + 5 pages wanted of 9
    update = s.next_step(now=1.0)
    assert update.batch is not None
    assert [row.request.id for row in update.batch.rows] == ["a"]
    assert [(r.slot, r.request.id, r.reason) for r in update.released] == [(1, "b", None)]
    assert s.view("b").status is RequestStatus.PREEMPTED
    assert s.view("b").num_blocks_done == 0
    s.check_invariants()


def test_a_request_that_can_never_fit_is_rejected_or_ended() -> None:
    s = make(2, num_pages=9, memory=GrowingKV(page_size=4))
    assert s.submit(req("big", budget=64), now=0.0) == Rejected("big", "too_large", None)
    s.submit(req("a"), now=0.0)
    s.submit(req("small", budget=8), now=0.0)
    s.set_capacity(Capacity(max_num_seqs=2, num_pages=8, memory=GrowingKV(page_size=4)), now=0.0)
    update = s.next_step(now=0.0)
    assert [(f.request.id, f.reason) for f in update.finished] == [("a", FinishReason.ERROR)]
    assert update.batch is None
    assert update.wake_at == -INF, "somebody else may join at once"
    update = s.next_step(now=0.0)
    assert update.batch is not None
    assert [row.request.id for row in update.batch.rows] == ["small"]


# --- policies and the round ---


def test_batch_keys_take_turns_and_never_mix() -> None:
    s = make(4)
    for name, key in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "y")):
        s.submit(req(name, batch_key=key), now=0.0)
    seen = []
    for now in range(4):
        batch = s.next_step(now=now).batch
        assert batch is not None
        seen.append(sorted(row.request.id for row in batch.rows))
        s.complete_step(batch, now=now)
    assert seen == [["a", "c"], ["b", "d"], ["a", "c"], ["b", "d"]]
    assert s.view("a").num_steps == 2


def test_kept_progress_comes_back_with_the_row() -> None:
    class SendBack(Eviction):
        needs = frozenset({"every_step"})

        def victims(self, state: Any, need_pages: int, round: Any) -> Any:
            return [(rv, KEEP) for rv in round.youngest_first() if rv.num_steps == 2]

    s = make(1, Policy(eviction=SendBack()))
    s.submit(req("a"), now=0.0)
    for now in range(2):
        batch = s.next_step(now=now).batch
        assert batch is not None
        s.complete_step(batch, StepOutcome(boundaries=(BlockBoundary(0, 1, 12),)), now=now)
    update = s.next_step(now=2)
    assert [(r.slot, r.kept) for r in update.released] == [(0, True)]
    assert update.batch is None, "not in the round that sent it back"
    assert update.wake_at == -INF
    update = s.next_step(now=2)
    assert update.batch is not None
    assert update.batch.joined[0].resumed
    assert (s.view("a").num_steps, s.view("a").num_blocks_done) == (2, 1)
    s.complete_step(update.batch, now=3)
    assert s.view("a").num_steps == 3


def test_progress_kept_for_a_request_that_ends_waiting_is_given_up() -> None:
    class SendBack(Eviction):
        needs = frozenset({"every_step"})

        def victims(self, state: Any, need_pages: int, round: Any) -> Any:
            return [(rv, KEEP) for rv in round.youngest_first() if rv.num_steps == 1]

    s = make(1, Policy(eviction=SendBack()))
    s.submit(req("a"), now=0.0)
    batch = s.next_step(now=0).batch
    assert batch is not None
    s.complete_step(batch, now=0)
    s.next_step(now=0)
    told = s.cancel("a", now=1)
    assert [(r.slot, r.request.id) for r in told.released] == [(None, "a")]


def test_what_an_earlier_part_of_a_call_did_is_told_before_its_error() -> None:
    class Raises(Composition):
        def select(self, state: Any, round: Any) -> Any:
            raise RuntimeError("no idea")

    s = make(2, Policy(composition=Raises(), name="raises"))
    s.submit(req("a", deadline_at=1.0), now=0.0)
    s.submit(req("b"), now=0.0)
    update = s.next_step(now=2.0)
    assert [f.request.id for f in update.finished] == ["a"]
    assert (update.batch, update.wake_at) == (None, -INF)
    for _ in range(2):
        with pytest.raises(PolicyError, match=r"'raises'.*composition.select.*no idea"):
            s.next_step(now=2.0)
    s.set_policy(Policy(), now=2.0)
    batch = s.next_step(now=2.0).batch
    assert batch is not None
    assert [row.request.id for row in batch.joined] == ["b"], "joined is told with the first batch"


def test_knobs_reach_the_row_and_run_out() -> None:
    class Ramp(Control):
        def knobs(self, state: Any, rv: Any, view: Any) -> Any:
            return {"skip_threshold": 0.9 - view.now / 10}, view.now + 2.0

    s = make(1, Policy(control=Ramp()))
    s.submit(req("a"), now=0.0)
    update = s.next_step(now=0.0)
    assert update.batch is not None
    assert update.batch.rows[0].knobs == {"skip_threshold": 0.9}
    assert update.wake_at == 2.0
    assert s.horizon().until == 2.0
    s.complete_step(update.batch, now=1.0)
    batch = s.next_step(now=1.0).batch
    assert batch is not None
    assert batch.rows is update.batch.rows
    s.complete_step(batch, now=2.0)
    batch = s.next_step(now=2.0).batch
    assert batch is not None
    assert batch.rows[0].knobs == {"skip_threshold": 0.7}
    assert batch.joined == ()


def test_skipped_heads_do_not_block_and_at_most_eight_are_passed() -> None:
    class OnlyZ(Admission):
        def admit(self, state: Any, rv: Any, round: Any) -> Verdict:
            return Verdict.ADMIT if rv.request.tenant == "z" else Verdict.SKIP

    def joined(others: int) -> list[str]:
        s = make(4, Policy(admission=OnlyZ()))
        for i in range(others):
            s.submit(req(f"o{i}"), now=0.0)
        s.submit(req("z", tenant="z"), now=0.0)
        batch = s.next_step(now=0.0).batch
        s.check_invariants()
        return [] if batch is None else [row.request.id for row in batch.rows]

    assert joined(7) == ["z"]
    assert joined(8) == []


def test_needs_progress_is_asked_of_the_engine() -> None:
    class Sees(Composition):
        needs = frozenset({"progress"})

    s = make(2, Policy(composition=Sees()))
    s.submit(req("a"), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    with pytest.raises(OutcomeError, match="masked_remaining"):
        s.complete_step(batch, NOTHING, now=1.0)
    s.complete_step(batch, StepOutcome(masked_remaining=(17,)), now=1.0)
    assert s.view("a").masked_remaining == 17


@pytest.mark.parametrize("bad", [None, 5, "ADMIT", True])
def test_a_wrong_verdict_is_named(bad: Any) -> None:
    s = make(2, Policy(admission=lambda rv, round: bad, name="odd"))
    s.submit(req("a"), now=0.0)
    with pytest.raises(PolicyError, match=r"'odd'.*Verdict.*'a'.*nothing was changed"):
        s.next_step(now=0.0)
    assert s.counts().waiting == 1
    s.check_invariants()


def test_who_is_passed_over_among_many_batch_keys_is_not_forgotten() -> None:
    def later(rv: Any, round: Any) -> Verdict:
        early = rv.request.batch_key == "a" and round.view.now < 2
        return Verdict.SKIP if early else Verdict.ADMIT

    s = make(1, Policy(admission=later))
    for i, key in enumerate("abcbcbc"):
        s.submit(req(f"{key}{i}", batch_key=key), now=0.0)
    served = []
    now = 0.0
    while s.has_work():
        batch = s.next_step(now=now).batch
        s.check_invariants()
        assert batch is not None
        served.append(batch.rows[0].request.id)
        now += 1.0
        s.complete_step(batch, finish(0), now=now)
    assert served == ["b1", "c2", "a0", "b3", "c4", "b5", "c6"]


def test_a_call_from_inside_a_call_is_refused_and_harms_nothing() -> None:
    calls: list[Any] = []
    refused: list[str] = []

    def meddle() -> None:
        for call in calls:
            try:
                call()
            except EngineProtocolError as error:
                refused.append(str(error))

    def admit(rv: Any, round: Any) -> Verdict:
        meddle()
        return Verdict.ADMIT

    s = Scheduler(
        capacity=Capacity(max_num_seqs=2),
        policy=Policy(admission=admit, ordering=lambda rv: (meddle() or 0.0,)),
        observers=[lambda event: meddle()],
    )
    calls += [
        lambda: s.submit(req("z"), now=9.0),
        lambda: s.cancel("a", now=9.0),
        lambda: s.next_step(now=9.0),
        lambda: s.set_policy(Policy(), now=9.0),
        lambda: s.set_capacity(Capacity(max_num_seqs=1), now=9.0),
        lambda: s.drain(now=9.0),
    ]
    for name in "abc":
        s.submit(req(name), now=0.0)
    batch = s.next_step(now=1.0).batch
    assert batch is not None
    told = s.complete_step(batch, finish(0), now=2.0)
    assert [f.request.id for f in told.finished] == ["a"]
    s.check_invariants()
    assert s.counts() == (3, 0, 1, 1, 1)
    assert len(refused) > 30
    assert all("inside another call" in text or "in flight" in text for text in refused)


def test_columns_of_an_outcome_are_tuples() -> None:
    s = make()
    s.submit(req("a"), now=0.0)
    batch = s.next_step(now=0.0).batch
    assert batch is not None
    done = (RowFinished(row.slot, FinishReason.EOS) for row in batch.rows)
    for bad in (
        StepOutcome(finished=done),  # type: ignore[arg-type]
        StepOutcome(finished=5),  # type: ignore[arg-type]
        StepOutcome(phases={0: Phase.REUSE}),  # type: ignore[arg-type]
        StepOutcome(masked_remaining=5),  # type: ignore[arg-type]
    ):
        with pytest.raises(OutcomeError):
            s.complete_step(batch, bad, now=1.0)
    assert s.complete_step(batch, finish(0), now=1.0).finished


def test_a_row_that_comes_back_past_a_new_step_cap_ends_without_another_step() -> None:
    class SendBack(Eviction):
        needs = frozenset({"every_step"})

        def victims(self, state: Any, need_pages: int, round: Any) -> Any:
            return [(rv, KEEP) for rv in round.youngest_first() if rv.num_steps == 5]

    s = make(1, Policy(eviction=SendBack()))
    s.submit(req("a"), now=0.0)
    for _ in range(5):
        batch = s.next_step(now=0.0).batch
        assert batch is not None
        s.complete_step(batch, now=0.0)
    assert s.next_step(now=0.0).batch is None
    s.set_policy(Policy(eviction=StepCap(3)), now=0.0)
    update = s.next_step(now=0.0)
    s.check_invariants()
    assert [(f.reason, f.num_steps) for f in update.finished] == [(FinishReason.MAX_STEPS, 5)]


# --- events ---


def test_every_call_and_decision_is_an_event_and_survives_json() -> None:
    events: list[Event] = []
    s = Scheduler(capacity=Capacity(max_num_seqs=1), observers=[events.append])
    s.submit(req("a", deadline_at=9.0), now=0.0)
    s.submit(req("b"), now=0.0)
    batch = s.next_step(now=1.0).batch
    assert batch is not None
    s.complete_step(
        batch,
        StepOutcome(boundaries=(BlockBoundary(0, 1, 12),), phases=(PhaseChange(0, Phase.REUSE),)),
        now=2.0,
    )
    batch = s.next_step(now=2.0).batch
    assert batch is not None
    s.fail_step(batch, OSError("x"), rows={0: RowFate.RESTART}, now=3.0)
    s.pause(now=3.0)
    s.resume(now=3.0)
    s.set_capacity(Capacity(max_num_seqs=2), now=3.0)
    s.set_policy(presets.continuous(2), now=3.0)
    s.cancel("a", now=3.0)
    s.drain(now=3.0)
    s.submit(req("c"), now=3.0)
    assert [type(event).__name__ for event in events] == [
        "PolicySet",
        "RequestSubmitted",
        "RequestSubmitted",
        "RequestJoined",
        "StepPlanned",
        "StepCompleted",
        "BlockDone",
        "PhaseChanged",
        "StepPlanned",
        "StepFailed",
        "RequestPreempted",
        "Paused",
        "Resumed",
        "CapacitySet",
        "PolicySet",
        "RequestFinished",
        "DrainStarted",
        "RequestRejected",
    ]
    lines = [to_json(event) for event in events]
    assert [to_json(from_json(line)) for line in lines] == lines
    assert from_json(lines[3]) == events[3]
    back = from_json(lines[1])
    assert back.request.deadline_at == 9.0  # type: ignore[union-attr]
    for bad in ("{}", "not json", '{"event": "Nothing"}', '{"event": "Paused", "x": 1}'):
        with pytest.raises(ConfigError, match="not an event"):
            from_json(bad)


def test_a_raising_observer_is_removed_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("observer bug")

    s = Scheduler(capacity=Capacity(max_num_seqs=1), observers=[broken, seen.append])
    s.submit(req("a"), now=0.0)
    s.submit(req("b"), now=0.0)
    assert len(caplog.records) == 1
    assert [type(event).__name__ for event in seen[-2:]] == ["RequestSubmitted"] * 2


# --- the long run ---


def test_nothing_of_a_finished_request_stays() -> None:
    s = make(2, presets.continuous(2))
    requests = [req(f"r{i}", deadline_at=1000.0, queue_timeout_s=50.0) for i in range(200)]
    alive = [weakref.ref(request) for request in requests]
    for request in requests:
        s.submit(request, now=0.0)
    del requests, request
    for i in range(0, 200, 3):
        s.cancel(f"r{i}", now=0.0)
    now = 0.0
    while s.has_work():
        now += 0.01
        batch = s.next_step(now=now).batch
        assert batch is not None
        s.complete_step(batch, finish(*(row.slot for row in batch.rows)), now=now)
    del batch
    s.check_invariants()
    for i in range(400):  # timers of the past are dropped as new ones come
        s.submit(req(f"n{i}", deadline_at=2000.0), now=now)
        s.cancel(f"n{i}", now=now)
    gc.collect()
    left = sum(ref() is not None for ref in alive)
    assert left <= 130, f"{left} of 200 finished requests are still held by timers"


def test_invariants_notice_a_broken_table() -> None:
    s = make(2)
    s.submit(req("a"), now=0.0)
    s.next_step(now=0.0)
    s._running.free_slots.append(0)
    with pytest.raises(InvariantError, match=r"free slots.*running=1"):
        s.check_invariants()


def decisions(rename: bool, offset: float = 0.0) -> str:
    """A digest of every decision of a varied run."""
    rng = random.Random(3)
    log = hashlib.sha256()
    numbers: dict[str, int] = {}
    s = make(
        3,
        Policy(
            ordering=lambda rv: (rv.request.priority,),
            admission=Slots(3),
            eviction=StepCap(6),
        ),
        num_pages=20,
        memory=GrowingKV(page_size=4),
    )
    now = offset
    for i in range(300):
        name = f"{rng.random()}" if rename else f"r{i}"
        numbers[name] = i
        fields = {"priority": i * 7 % 4, "batch_key": ("x", None)[i % 5 == 0]}
        s.submit(req(name, prompt_len=1 + i % 9, **fields), now=now)
        update = s.next_step(now=now)
        told = list(update.finished)
        if update.batch is not None:
            rows = [(row.slot, numbers[row.request.id]) for row in update.batch.rows]
            log.update(repr(rows).encode())
            grown = []
            for row in update.batch.rows:
                view = s.view(row.request.id)
                done = view.num_blocks_done + 1
                if done <= 3:
                    grown.append(BlockBoundary(row.slot, done, row.request.prompt_len + 8 * done))
            now += 0.25
            outcome = StepOutcome(boundaries=tuple(grown))
            told += s.complete_step(update.batch, outcome, now=now).finished
        log.update(repr([(numbers[f.request.id], f.reason.value) for f in told]).encode())
    log.update(repr(s.stats()[:8]).encode())
    return log.hexdigest()


def test_names_and_the_origin_of_time_change_no_decision() -> None:
    assert decisions(rename=False) == decisions(rename=True) == decisions(False, offset=1024.0)


def test_the_hash_seed_changes_no_decision() -> None:
    program = (
        "import importlib.util as u; m = u.spec_from_file_location('t', r'" + __file__ + "');"
        "t = u.module_from_spec(m); m.loader.exec_module(t); print(t.decisions(False))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(digests) == 1
    assert digests.pop().strip() == decisions(rename=False)
