"""One machine over every call of the scheduler, with all invariants checked after each.

The machine plays engine, client and operator at once, and keeps its own small model of what must
be true: who is active, who was told finished, which slot belongs to whom. 100,000 calls run with
``DLLM_SCHED_MACHINE_CALLS=100000``; the default is smaller.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from dllm_sched import (
    Accepted,
    BlockBoundary,
    Capacity,
    ClockError,
    ConfigError,
    EngineProtocolError,
    FinishReason,
    FixedCanvas,
    GrowingKV,
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
    StepBatch,
    StepOutcome,
    Update,
    presets,
)
from dllm_sched.metrics import Metrics
from dllm_sched.policies import (
    ALL,
    KEEP,
    RESTART,
    Admission,
    AtBlockBoundary,
    Composition,
    Control,
    EarliestDeadline,
    Eviction,
    Fill,
    MaxWait,
    MaxWaiting,
    Ordering,
    PastDeadline,
    PriorityFirst,
    ShortestBudget,
    Slots,
    StepCap,
    TokenBudget,
    Verdict,
    YoungestFirst,
)
from dllm_sched.policies.base import Timeout

CALLS = int(os.environ.get("DLLM_SCHED_MACHINE_CALLS", "6000"))


class Alternating(Composition):
    """Prefilling rows step alone when there are any."""

    def select(self, state: Any, round: Any) -> Any:
        if round.view.running_by_phase[Phase.PREFILL]:
            return {Phase.PREFILL}
        return ALL


class OddRows(Composition):
    """Chooses rows one by one."""

    needs = frozenset({"rows"})

    def select(self, state: Any, round: Any) -> Any:
        rows = round.rows
        return [rv for rv in rows if rv.num_steps % 2 == round.view.num_running % 2] or rows


class Deficit(Admission):
    """A budget that grows every step the head is blocked (Sangam-like), with lanes."""

    needs = frozenset({"every_step", "lanes", "max_length"})

    def init(self) -> int:
        return 0

    def admit(self, state: int, rv: Any, round: Any) -> Verdict:
        view = round.view
        idle = view.num_running + round.num_joined == 0
        if rv.request.request_class == "b" and sum(view.running_by_lane.values()) > 3:
            return Verdict.SKIP_LANE
        return Verdict.ADMIT if idle or rv.max_tokens <= 40 + state else Verdict.SKIP

    def settle(self, state: int, round: Any) -> int:
        return state + 5 if round.blocked is not None else 0

    def recheck(self, state: int, round: Any) -> float:
        return 2


class Churn(Eviction):
    """Sends rows back, or ends them, without need."""

    needs = frozenset({"every_step"})

    def victims(self, state: Any, need_pages: int, round: Any) -> Any:
        rows = list(round.youngest_first())
        if len(rows) > 4:
            return [(rows[0], KEEP), (rows[1], RESTART), (rows[2], FinishReason.MAX_STEPS)]
        return []


class Knobby(Control):
    """Knobs that run out and change at boundaries."""

    needs = frozenset({"blocks"})

    def knobs(self, state: Any, rv: Any, view: Any) -> Any:
        return {"skip_threshold": 0.5 + rv.num_blocks_done / 8}, view.now + 0.5

    def batch_knobs(self, state: Any, view: Any) -> Any:
        return {"cap": view.num_running}, view.now + 0.75

    def hints(self, state: Any, round: Any) -> Any:
        return tuple(rv.id for rv in round.boundaries)


class Progress(Ordering):
    """Needs masked_remaining; observes arrivals."""

    needs = frozenset({"progress"})


class Hostile(Admission):
    """Raises on every third head."""

    def admit(self, state: Any, rv: Any, round: Any) -> Verdict:
        if rv.sequence % 3 == 0:
            raise RuntimeError("hostile")
        return Verdict.ADMIT


class EveryStepWait(Timeout):
    """Joins happen only at whole seconds, also while rows run."""

    scope = "step"

    def due(self, state: Any, view: Any) -> float:
        return -math.inf if view.draining else math.ceil(view.oldest_arrival_at)


def policies() -> list[Policy]:
    return [
        Policy(),
        presets.per_request(),
        presets.continuous(4),
        presets.fixed_fill(3, 0.5),
        presets.fixed_fill(4),
        presets.block_refill(4),
        Policy(
            ordering=PriorityFirst().then(EarliestDeadline()),
            admission=Slots(5) & TokenBudget(200) & MaxWaiting(12),
            timeout=Fill(2) | MaxWait(0.25),
            eviction=PastDeadline() | StepCap(9) | YoungestFirst(),
        ),
        Policy(ordering=ShortestBudget(), composition=Alternating(), eviction=StepCap(5)),
        Policy(composition=OddRows(), eviction=StepCap(7) | PastDeadline()),
        Policy(ordering=lambda rv: (-rv.request.prompt_len,), admission=Deficit()),
        Policy(eviction=Churn(), control=Knobby(), admission=AtBlockBoundary()),
        Policy(ordering=Progress().then(EarliestDeadline()), eviction=YoungestFirst(keep=True)),
        Policy(timeout=EveryStepWait(), control=Knobby()),
        Policy(admission=Hostile(), name="hostile"),
    ]


CAPACITIES = [
    Capacity(max_num_seqs=6),
    Capacity(max_num_seqs=6, num_pages=40, memory=GrowingKV(page_size=4)),
    Capacity(max_num_seqs=6, num_pages=40, memory=FixedCanvas(page_size=4)),
    Capacity(max_num_seqs=6, window_blocks=1),
]


class Machine:
    """Plays everybody around a scheduler and checks what it is told."""

    def __init__(self, seed: int, *observers: Any) -> None:
        self.rng = random.Random(seed)
        self.capacity = self.rng.choice(CAPACITIES)
        self.policies = policies()
        self.events: list[Any] = []
        self.scheduler = Scheduler(
            capacity=self.capacity,
            policy=self.rng.choice(self.policies[:-1]),
            observers=[*observers, self.events.append] if seed % 2 else observers,
            max_in_flight=1 + seed // 2 % 2,
        )
        self.max_in_flight = 1 + seed // 2 % 2
        self.now = 0.0
        self.serial = 0
        self.flights: list[StepBatch] = []  # oldest first
        self.took: dict[str, int] = {}  # steps since the last restart
        self.num_ahead = 0
        self.active: set[str] = set()
        self.finished: dict[str, int] = {}
        self.holds: dict[int, str] = {}  # slot -> id, as an engine would know it
        self.blocks: dict[str, tuple[int, int]] = {}
        self.calls = 0
        self.policy_errors = 0

    def told(self, update: Update) -> None:
        for released in update.released:
            if released.slot is not None:
                assert self.holds.pop(released.slot) == released.request.id
                for flight in self.flights:
                    assert all(row.slot != released.slot for row in flight.rows), "still in use"
            else:
                assert released.request.id in self.blocks, "nothing was kept for it"
                assert released.request.id not in self.holds.values()
            if not released.kept:
                self.blocks.pop(released.request.id, None)
                self.took.pop(released.request.id, None)
        for finished in update.finished:
            request_id = finished.request.id
            assert request_id in self.active, "told finished twice, or never submitted"
            self.active.discard(request_id)
            self.finished[request_id] = self.finished.get(request_id, 0) + 1
            assert finished.finished_at <= self.now
            assert finished.arrived_at <= finished.finished_at
            if finished.reason in (FinishReason.EOS, FinishReason.LENGTH):
                assert finished.num_steps >= 1
        if update.batch is not None:
            batch = update.batch
            assert batch.rows, "an empty batch"
            slots = [row.slot for row in batch.rows]
            assert len(set(slots)) == len(slots)
            assert len({row.request.batch_key for row in batch.rows}) == 1
            for row in batch.joined:
                assert row in batch.rows
                # a row that joined with a step that failed is named again
                assert self.holds.get(row.slot, row.request.id) == row.request.id, "given twice"
                self.holds[row.slot] = row.request.id
                if row.resumed:
                    assert row.request.id in self.blocks, "nothing was kept for it"
                else:
                    self.blocks[row.request.id] = (0, row.request.prompt_len)
            for row in batch.rows:
                assert self.holds[row.slot] == row.request.id, "a row the engine was never told of"
            self.flights.append(batch)

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Make one call; if it raises a PolicyError nothing may have changed."""
        before = self.snapshot()
        self.calls += 1
        try:
            result = function(*args, now=self.now, **kwargs)
        except PolicyError:
            self.policy_errors += 1
            assert self.snapshot() == before, "a call that raised has changed something"
            self.scheduler.check_invariants()
            return None
        self.scheduler.check_invariants()
        return result

    def snapshot(self) -> tuple[Any, ...]:
        s = self.scheduler
        return (
            s.counts(),
            s.stats(),
            [(v.id, v.status, v.slot, v.num_steps, v.kv_tokens) for v in s._views.values()],
            s.has_work(),
        )

    def submit(self) -> None:
        rng = self.rng
        fresh = not self.active or rng.random() < 0.95
        request = Request(
            f"r{self.serial}" if fresh else min(self.active),
            prompt_len=rng.randint(1, 30),
            max_new_tokens=rng.randint(1, 40),
            block_length=rng.choice([8, 16]),
            priority=rng.randint(0, 2),
            deadline_at=rng.choice([math.inf, self.now + rng.random() * 8, self.now - 1.0]),
            queue_timeout_s=rng.choice([math.inf, math.inf, 2.0]),
            request_class=rng.choice("ab"),
            batch_key=rng.choice([None, None, None, "x", "y", "z"]),
        )
        if not fresh:
            with pytest.raises(ValueError, match="is still"):
                self.scheduler.submit(request, now=self.now)
            return
        self.serial += 1
        result = self.call(self.scheduler.submit, request)
        if isinstance(result, Accepted):
            self.active.add(request.id)
        else:
            assert result is None or isinstance(result, Rejected)

    def next_step(self) -> None:
        if len(self.flights) == self.max_in_flight:
            with pytest.raises(EngineProtocolError):
                self.scheduler.next_step(now=self.now)
            return
        self.num_ahead += len(self.flights)
        update = self.call(self.scheduler.next_step)
        if update is not None:
            self.told(update)

    def complete(self) -> None:
        if not self.flights:
            return
        batch = self.flights[0]
        rng = self.rng
        finished, failed, boundaries, phases = [], [], [], []
        for row in batch.rows:
            dice = rng.random()
            if dice < 0.08:
                finished.append(RowFinished(row.slot, FinishReason.EOS, output=row.request.id))
            elif dice < 0.1:
                failed.append(RowFailed(row.slot, ValueError("bad row")))
            if rng.random() < 0.25:
                done, kv = self.blocks[row.request.id]
                if done < row.request.max_blocks:
                    done, kv = done + 1, kv + row.request.block_length
                    boundaries.append(BlockBoundary(row.slot, done, kv))
                    self.blocks[row.request.id] = (done, kv)
            if rng.random() < 0.2:
                phases.append(PhaseChange(row.slot, rng.choice(list(Phase))))
        outcome = StepOutcome(
            tuple(finished),
            tuple(boundaries),
            tuple(phases),
            tuple(failed),
            tuple(rng.randint(0, 9) for _ in batch.rows),
        )
        if rng.random() < 0.1:
            self.refuse_bad_outcomes(batch)
        horizon = self.scheduler.horizon()
        steps = 1
        if horizon.steps > 1 and rng.random() < 0.3:
            steps = int(min(horizon.steps, 3))
        if len(self.flights) > 1:
            with pytest.raises(EngineProtocolError):  # completions come in order
                self.scheduler.complete_step(self.flights[1], now=self.now)
        update = self.call(self.scheduler.complete_step, batch, outcome, steps=steps)
        self.flights.pop(0)
        self.told(update)
        named = {one.slot for one in (*finished, *failed)}
        busy = {row.slot for flight in self.flights for row in flight.rows}
        assert not (named - busy) & self.holds.keys(), "a finished row kept its slot"
        for row in batch.rows:
            request_id = row.request.id
            if request_id in self.active:
                self.took[request_id] = self.took.get(request_id, 0) + steps
                assert self.steps_of(request_id) == self.took[request_id]

    def refuse_bad_outcomes(self, batch: StepBatch) -> None:
        slot = batch.rows[0].slot
        eos = RowFinished(slot, FinishReason.EOS)
        free = next(s for s in range(99) if s not in {row.slot for row in batch.rows})
        before = self.snapshot()
        for bad in (
            StepOutcome(finished=(RowFinished(free, FinishReason.EOS),)),
            StepOutcome(finished=(eos, eos)),
            StepOutcome(finished=(eos,), failed=(RowFailed(slot, ValueError()),)),
            StepOutcome(boundaries=(BlockBoundary(slot, -1, 5),)),
            StepOutcome(boundaries=(BlockBoundary(slot, 10**6, 5),)),
            StepOutcome(masked_remaining=(1,) * (len(batch.rows) + 1)),
        ):
            with pytest.raises(OutcomeError):
                self.scheduler.complete_step(batch, bad, now=self.now)
        with pytest.raises(ClockError):
            self.scheduler.complete_step(batch, now=self.now - 1000)
        assert self.snapshot() == before

    def fail(self) -> None:
        if not self.flights:
            return
        batch = self.flights[0]
        fates = {row.slot: self.rng.choice(list(RowFate)) for row in batch.rows}
        before = {row.request.id: self.steps_of(row.request.id) for row in batch.rows}
        update = self.call(self.scheduler.fail_step, batch, RuntimeError("device lost"), rows=fates)
        self.flights.clear()
        self.told(update)
        for row in batch.rows:
            if fates[row.slot] is RowFate.KEEP and row.request.id in self.active:
                assert self.steps_of(row.request.id) == before[row.request.id]

    def steps_of(self, request_id: str) -> int | None:
        if request_id not in self.active:
            return None
        return self.scheduler.view(request_id).num_steps

    def cancel(self) -> None:
        pool = sorted(self.active) or ["nobody"]
        request_id = self.rng.choice(pool)
        update = self.call(self.scheduler.cancel, request_id)
        self.told(update)
        assert request_id not in self.active

    def requeue(self) -> None:
        pool = sorted(self.active) or ["nobody"]
        update = self.call(self.scheduler.requeue, self.rng.choice(pool))
        if update is not None:
            self.told(update)

    def set_policy(self) -> None:
        policy = self.rng.choice(self.policies)
        try:
            update = self.call(self.scheduler.set_policy, policy)
        except ConfigError as error:
            assert "slots" in str(error)  # it needs more than a shrunk capacity has
            self.scheduler.check_invariants()
            return
        if update is not None:
            self.told(update)

    def set_capacity(self) -> None:
        pages = self.capacity.num_pages
        self.told(
            self.call(
                self.scheduler.set_capacity,
                Capacity(
                    max_num_seqs=self.rng.randint(1, 8),
                    num_pages=None if pages is None else self.rng.randint(10, 50),
                    memory=self.capacity.memory,
                    window_blocks=self.capacity.window_blocks,
                ),
            )
        )

    def pause(self) -> None:
        self.told(self.call(self.scheduler.pause))

    def resume(self) -> None:
        self.told(self.call(self.scheduler.resume))

    def tick(self) -> None:
        self.now += self.rng.choice([0.0, 0.125, 0.25, 1.0])

    def explain(self) -> None:
        for request_id in sorted(self.active)[:3]:
            explanation = self.scheduler.explain(request_id)
            assert explanation.why
            assert explanation.status is not RequestStatus.FINISHED

    def run(self, calls: int) -> None:
        actions = [
            (self.submit, 6),
            (self.next_step, 10),
            (self.complete, 10),
            (self.tick, 4),
            (self.fail, 1),
            (self.cancel, 2),
            (self.requeue, 1),
            (self.set_policy, 1),
            (self.explain, 1),
            (self.set_capacity, 0.3),
            (self.pause, 0.1),
            (self.resume, 0.4),
        ]
        functions, weights = zip(*actions, strict=True)
        while self.calls < calls:
            self.rng.choices(functions, weights)[0]()
        self.drain()

    def drain(self) -> None:
        """Everything must end, every table must empty."""
        while self.flights:
            self.complete()
        self.told(self.call(self.scheduler.resume))
        if self.scheduler.policy.name == "hostile":
            self.told(self.call(self.scheduler.set_policy, self.policies[0]))
        self.told(self.call(self.scheduler.drain))
        refused = self.scheduler.submit(
            Request("late", prompt_len=1, max_new_tokens=1), now=self.now
        )
        assert refused == Rejected("late", "draining", None)
        for _ in range(10_000):
            if not self.scheduler.has_work():
                break
            update = self.call(self.scheduler.next_step)
            assert update is not None
            self.told(update)
            if self.flights:
                self.complete()
            elif self.scheduler.has_work() and update.wake_at > self.now:
                assert update.wake_at < math.inf, "a stall"
                self.now = update.wake_at
        assert not self.scheduler.has_work()
        assert not self.active
        assert not self.holds
        assert not self.blocks
        assert set(self.finished.values()) <= {1}
        counts = self.scheduler.counts()
        assert (counts.waiting, counts.running) == (0, 0)
        assert counts.submitted == counts.finished == len(self.finished)
        self.scheduler.check_invariants()


@settings(
    max_examples=max(1, CALLS // 300),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(st.integers(0, 2**32))
def test_every_call_keeps_every_invariant(seed: int) -> None:
    Machine(seed).run(300)


class Recorded(Machine):
    """Notes what it was told, and now and then compares the metrics with the scheduler's totals."""

    def __init__(self, seed: int, metrics: Metrics | None = None) -> None:
        super().__init__(seed, *[] if metrics is None else [metrics])
        self.heard: list[str] = []
        self.registry = CollectorRegistry()
        self.num_compared = 0
        if metrics is not None:
            metrics.expose(self.scheduler, registry=self.registry)

    def told(self, update: Update) -> None:
        self.heard.append(repr(update))
        super().told(update)

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().call(function, *args, **kwargs)
        if self.calls % 8 == 0:
            self.compare()
        return result

    def compare(self) -> None:
        sums: Counter[str] = Counter()  # a metric's, and with a slash those by label
        for sample in (one for family in self.registry.collect() for one in family.samples):
            name = sample.name.removeprefix("dllm_sched_")
            sums[name] += sample.value
            for word in sample.labels.values():
                sums[f"{name}/{word}"] += sample.value
        if not sums:
            return
        self.num_compared += 1
        counts, stats = self.scheduler.counts(), self.scheduler.stats()
        assert counts == (
            sums["requests_submitted_total"],
            sums["requests_rejected_total"],
            sums["requests_waiting"],
            sums["requests_running"],
            sums["requests_finished_total"],
        )
        assert (stats.num_steps, stats.row_steps) == (
            sums["step_rows_count"],
            sums["step_rows_sum"],
        )
        assert stats.num_steps == sums["step_seconds_count"]
        assert stats.wasted_row_steps == sums["wasted_row_steps_total"]
        assert stats.num_preempted == sums["requests_preempted_total"]
        assert stats.num_failed_steps == sums["failed_steps_total"]
        assert stats.num_blocks == sums["blocks_total"]
        for reason, number in stats.finished_by_reason.items():
            assert sums[f"requests_finished_total/{reason.value}"] == number
        assert stats.tokens_in_rows == sums["tokens_in_rows"]
        if stats.free_pages is not None:
            assert max(0, stats.free_pages) == sums["kv_pages/free"]
        assert 0 <= sums["wait_seconds_count"] <= stats.num_joined


@settings(
    max_examples=max(1, CALLS // 600),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(st.integers(0, 2**32))
def test_metrics_change_no_decision_and_count_what_the_scheduler_counts(seed: int) -> None:
    plain, watched = Recorded(seed), Recorded(seed, Metrics())
    plain.run(300)
    watched.run(300)
    assert watched.heard == plain.heard
    assert watched.num_compared > 30
