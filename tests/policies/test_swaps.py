"""Any preset after any other, at any moment: nothing is lost, nothing comes twice."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dllm_sched import (
    Accepted,
    Capacity,
    FinishReason,
    FixedCanvas,
    GrowingKV,
    Policy,
    Request,
    RowFate,
    RowFinished,
    Scheduler,
    StepOutcome,
)
from dllm_sched.policies.presets import PRESETS
from dllm_sched.testing import FakeEngine

needed = runpy.run_path(str(Path(__file__).parents[1] / "needed.py"))["needed"]


def small(name: str, capacity: Capacity) -> Policy:
    """Build a preset with small arguments."""
    more = {"memory": capacity.memory} if name == "congestion_stable" else {}
    return PRESETS[name](**needed(name, 3), **more)


CAPACITIES = [
    Capacity(max_num_seqs=4),
    Capacity(max_num_seqs=4, window_blocks=1),
    Capacity(max_num_seqs=4, num_pages=24, memory=GrowingKV(page_size=8)),
    Capacity(max_num_seqs=4, num_pages=24, memory=FixedCanvas(page_size=8)),
]


class Day:
    """Client, engine and operator around one scheduler."""

    def __init__(self, capacity: Capacity, first: int) -> None:
        self.policies = [small(name, capacity) for name in sorted(PRESETS)]
        self.sched = Scheduler(capacity=capacity, policy=self.policies[first])
        self.engine = FakeEngine(capacity.max_num_seqs, report_masked=True)
        self.now = 0.0
        self.batch: Any = None
        self.accepted: list[str] = []
        self.active: list[str] = []
        self.ended: list[str] = []

    def told(self, update: Any) -> None:
        self.sched.check_invariants()
        self.engine.release(update.released)
        for end in update.finished:
            self.ended.append(end.request.id)
            self.active.remove(end.request.id)

    def submit(self, blocks: int, kind: int) -> None:
        name = f"r{len(self.accepted)}"
        answer = self.sched.submit(
            Request(
                name,
                prompt_len=3 + 5 * kind,
                max_new_tokens=4 * blocks,
                block_length=4,
                tenant=f"t{kind}",
                priority=kind,
                deadline_at=self.now + 40.0 if kind == 2 else math.inf,
            ),
            now=self.now,
        )
        self.sched.check_invariants()
        assert isinstance(answer, Accepted)
        self.accepted.append(name)
        self.active.append(name)

    def cancel(self, index: int) -> None:
        if self.active:
            self.told(self.sched.cancel(self.active[index % len(self.active)], now=self.now))

    def swap(self, index: int) -> None:
        self.told(self.sched.set_policy(self.policies[index], now=self.now))

    def step(self) -> bool:
        """Begin a step, or end the one in flight; whether there was anything to do."""
        if self.batch is not None:
            outcome = self.engine.run(self.batch)
            self.now += 0.125
            batch, self.batch = self.batch, None
            self.told(self.sched.complete_step(batch, outcome, now=self.now))
            return True
        update = self.sched.next_step(now=self.now)
        self.batch = update.batch
        self.told(update)
        if update.batch is None and self.now < update.wake_at < math.inf:
            self.now = update.wake_at
        return update.batch is not None or update.wake_at != math.inf

    def fail(self, index: int) -> None:
        """Let the step in flight fail; one of its rows ends, starts over, or stays."""
        if self.batch is not None:
            batch, self.batch = self.batch, None
            row = batch.rows[index % len(batch.rows)]
            fates = {row.slot: list(RowFate)[index % len(RowFate)]}
            error = RuntimeError("the device is away")
            self.told(self.sched.fail_step(batch, error, rows=fates, now=self.now))

    def to_end(self) -> None:
        self.told(self.sched.drain(now=self.now))
        for _ in range(3000):
            if not self.sched.has_work():
                break
            self.step()
        assert sorted(self.ended) == sorted(self.accepted)
        assert not self.engine.held


CALLS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 4), st.integers(0, 2)),
    st.tuples(st.just("submit"), st.integers(1, 4), st.integers(0, 2)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("swap"), st.integers(0, len(PRESETS) - 1)),
    st.tuples(st.just("fail"), st.integers(0, 9)),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(
    st.sampled_from(CAPACITIES),
    st.integers(0, len(PRESETS) - 1),
    st.lists(CALLS, min_size=20, max_size=120),
)
def test_swaps_lose_nobody(capacity: Capacity, first: int, calls: list[Any]) -> None:
    day = Day(capacity, first)
    for name, *arguments in calls:
        getattr(day, name)(*arguments)
    day.to_end()


def test_every_preset_takes_over_from_every_other() -> None:
    for first in range(len(PRESETS)):
        day = Day(CAPACITIES[2], first)
        for second in range(len(PRESETS)):
            for kind in range(3):
                day.submit(3, kind)
            for _ in range(3):
                day.step()
            day.swap(second)
            for _ in range(2):
                day.step()
            day.swap(first)
            day.step()
            day.cancel(second)
        day.to_end()


def test_the_first_round_of_a_policy_sees_nothing_that_an_earlier_round_has_seen() -> None:
    def step(*finished: int) -> list[str]:
        update = scheduler.next_step(now=0.0)
        assert update.batch is not None
        ends = tuple(RowFinished(slot, FinishReason.EOS) for slot in finished)
        scheduler.complete_step(update.batch, StepOutcome(ends), now=0.0)
        return [row.request.id for row in update.batch.rows]

    scheduler = Scheduler(policy=PRESETS["continuous"](2), capacity=Capacity(max_num_seqs=2))
    for name in ("a", "b", "c"):
        scheduler.submit(Request(name, prompt_len=5, max_new_tokens=8), now=0.0)
    assert step(1) == ["a", "b"]
    assert step(1) == ["a", "c"]
    assert step() == ["a"], "that c has left was seen here"
    scheduler.set_policy(PRESETS["block_refill"](2), now=0.0)
    scheduler.submit(Request("d", prompt_len=5, max_new_tokens=8), now=0.0)
    assert step() == ["a"], "nobody is at a boundary, and nobody has left"
    assert step(0) == ["a"]
    assert step() == ["d"]
