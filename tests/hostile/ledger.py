"""What an honest engine and client know of a scheduler, and what they may then demand of it."""

from __future__ import annotations

import math
from typing import Any

from dllm_sched import (
    Accepted,
    BlockBoundary,
    Capacity,
    FinishReason,
    GrowingKV,
    Policy,
    Request,
    RowFate,
    RowFinished,
    Scheduler,
    StepBatch,
    StepOutcome,
)

SMALL = Capacity(max_num_seqs=4, num_pages=30, memory=GrowingKV(page_size=4))


def snapshot(scheduler: Any) -> tuple[Any, ...]:
    """Everything that a call which raises must leave alone."""
    views = scheduler._views.values()
    return (
        scheduler.counts(),
        scheduler.stats(),
        scheduler.capacity,
        scheduler.policy,
        [
            (v.id, v.status, v.slot, v.phase, v.num_steps, v.num_blocks_done, v.kv_tokens)
            for v in views
        ],
        scheduler._in_flight,
        scheduler._ahead,
    )


class Ledger:
    """An honest engine and its client: told of everything, fooled by nothing."""

    def __init__(self, policy: Policy | None = None, **arguments: Any) -> None:
        arguments.setdefault("capacity", SMALL)
        kind = arguments.pop("kind", Scheduler)
        self.scheduler: Scheduler = kind(policy=policy, **arguments)
        self.now = 0.0
        self.serial = 0
        self.active: dict[str, Request] = {}
        self.ended: dict[str, FinishReason] = {}
        self.slots: dict[int, str] = {}
        self.steps: dict[str, int] = {}
        self.flights: list[StepBatch] = []

    def told(self, update: Any) -> Any:
        self.scheduler.check_invariants()
        for gone in update.released:
            if gone.slot is not None:
                assert self.slots.pop(gone.slot) == gone.request.id
            if not gone.kept:
                self.steps.pop(gone.request.id, None)
        for one in update.finished:
            del self.active[one.request.id]  # once, and only who was accepted
            self.ended[one.request.id] = one.reason
        if update.batch is not None:
            for row in update.batch.joined:
                assert self.slots.setdefault(row.slot, row.request.id) == row.request.id
                self.steps.setdefault(row.request.id, 0)
            for row in update.batch.rows:
                assert self.slots[row.slot] == row.request.id
            self.flights.append(update.batch)
        return update

    def submit(self, **fields: Any) -> Any:
        fields = {"prompt_len": 4, "max_new_tokens": 24, "block_length": 4} | fields
        request = Request(f"r{self.serial}", **fields)
        self.serial += 1
        answer = self.scheduler.submit(request, now=self.now)
        if isinstance(answer, Accepted):
            self.active[request.id] = request
        self.scheduler.check_invariants()
        return answer

    def next(self) -> Any:
        return self.told(self.scheduler.next_step(now=self.now))

    def complete(self) -> None:
        """A step in which each row does its third of a block, and ends with the last."""
        batch = self.flights.pop(0)
        finished, boundaries = [], []
        for row in batch.rows:
            if row.request.id not in self.active:
                continue  # cancelled meanwhile
            steps = self.steps[row.request.id] = self.steps.get(row.request.id, 0) + 1
            blocks, rest = divmod(steps, 3)
            if rest == 0 and blocks >= row.request.max_blocks:
                finished.append(RowFinished(row.slot, FinishReason.LENGTH))
            elif rest == 0:
                cached = row.request.prompt_len + blocks * row.request.block_length
                boundaries.append(BlockBoundary(row.slot, blocks, cached))
        self.now += 0.125
        self.told(
            self.scheduler.complete_step(
                batch,
                StepOutcome(
                    finished=tuple(finished),
                    boundaries=tuple(boundaries),
                    masked_remaining=(1,) * len(batch.rows),
                ),
                now=self.now,
            )
        )

    def fail(self, fate: RowFate) -> None:
        batch = self.flights[0]
        self.flights.clear()
        fates = {row.slot: fate for row in batch.rows}
        self.told(self.scheduler.fail_step(batch, RuntimeError("x"), rows=fates, now=self.now))

    def serve(self, most: int = 2000) -> None:
        """Drain: everybody must come home, nothing may be left."""
        while self.flights:
            self.complete()
        self.told(self.scheduler.resume(now=self.now))
        self.told(self.scheduler.drain(now=self.now))
        for _ in range(most):
            if not self.scheduler.has_work():
                break
            update = self.next()
            if update.batch is not None:
                self.complete()
            elif self.scheduler.has_work() and update.wake_at > self.now:
                assert update.wake_at < math.inf, "a stall"
                self.now = update.wake_at
        assert not self.scheduler.has_work()
        assert not self.active
        assert not self.slots
        counts = self.scheduler.counts()
        assert counts.submitted == counts.finished == len(self.ended)
        self.scheduler.check_invariants()
