"""A thousand requests through the real engine, cancelled at random moments in every state."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import attrs
import torch

from dllm_sched import (
    Accepted,
    FinishReason,
    GrowingKV,
    RequestStatus,
    RowFate,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.policies import YoungestFirst
from dllm_sched_hf import D2FEngine, box, load_model

NUM_REQUESTS = 1000
SLOTS = 8


def serve_alone(engine: D2FEngine, requests: list[Any]) -> dict[str, tuple[int, ...]]:
    """The answer of each request without any neighbour."""
    scheduler = Scheduler(policy=presets.per_request(), capacity=engine.capacity())
    answers = {}
    for request in requests:
        scheduler.submit(request, now=0.0)
    while scheduler.has_work():
        batch = scheduler.next_step(now=0.0).batch
        assert batch is not None
        update = scheduler.complete_step(batch, engine.run(batch), now=0.0)
        engine.release(update.released)
        answers.update({done.request.id: done.output.tokens for done in update.finished})
    return answers


def test_everyone_ends_once_and_every_slot_and_page_comes_back() -> None:
    torch.set_num_threads(1)
    rng = random.Random(7)
    model = load_model(box.box_model_dir(), box.box_lora_dir(), device="cpu")
    engine = D2FEngine(model, max_num_seqs=SLOTS)
    prompts = [p for p, _ in box.task.sample_requests(NUM_REQUESTS, seed=4)]
    requests = [
        engine.request(f"r{i}", box.task.encode_prompt(prompt), **box.DECODING)
        for i, prompt in enumerate(prompts)
    ]
    # Pages for four long rows: growth runs out now and then, and rows are sent back.
    capacity = attrs.evolve(engine.capacity(), num_pages=44, memory=GrowingKV(page_size=8))
    keep = attrs.evolve(presets.continuous(SLOTS), eviction=YoungestFirst(keep=True))
    policies = [keep, presets.fixed_fill(4), presets.block_refill(SLOTS), keep]
    scheduler = Scheduler(policy=keep, capacity=capacity)

    waiting_to_come = list(requests)
    ended: Counter[str] = Counter()
    cancelled_in: Counter[str] = Counter()
    answers: dict[str, tuple[int, ...]] = {}
    reasons: Counter[FinishReason] = Counter()
    now = 0.0

    def told(update: Any) -> None:
        engine.release(update.released)
        for done in update.finished:
            ended[done.request.id] += 1
            reasons[done.reason] += 1
            if done.reason in (FinishReason.EOS, FinishReason.LENGTH):
                answers[done.request.id] = done.output.tokens

    def cancel_somebody(moment: str) -> None:
        active = list(scheduler._views.values())
        if active and rng.random() < 0.25:
            sent_back = [v for v in active if v.status is RequestStatus.PREEMPTED]
            view = rng.choice(sent_back if sent_back and rng.random() < 0.2 else active)
            cancelled_in[f"{view.status.value}, {moment}"] += 1
            told(scheduler.cancel(view.id, now=now))

    while waiting_to_come or scheduler.has_work():
        now += 0.01
        for _ in range(rng.randint(0, 6)):
            if waiting_to_come:
                request = waiting_to_come.pop()
                assert scheduler.submit(request, now=now) == Accepted(request.id)
        if not waiting_to_come:
            told(scheduler.drain(now=now))
        cancel_somebody("between steps")
        if rng.random() < 0.02:
            told(scheduler.set_policy(rng.choice(policies), now=now))
        update = scheduler.next_step(now=now)
        told(update)
        batch = update.batch
        if batch is None:
            continue
        cancel_somebody("before the forward")
        outcome: StepOutcome = engine.run(batch)
        cancel_somebody("after the forward")
        if rng.random() < 0.02:  # the step is lost; every row starts over or ends
            fates = rng.choices([RowFate.RESTART, RowFate.FAIL], [4, 1], k=len(batch.rows))
            rows = dict(zip((row.slot for row in batch.rows), fates, strict=True))
            told(scheduler.fail_step(batch, RuntimeError("lost"), rows=rows, now=now))
        else:
            told(scheduler.complete_step(batch, outcome, now=now))
        scheduler.check_invariants()

    assert ended == Counter(request.id for request in requests), "each exactly once"
    states = {state.partition(",")[0] for state in cancelled_in}
    assert states == {s.value for s in RequestStatus if s is not RequestStatus.FINISHED}
    assert sum(cancelled_in.values()) > 150
    assert reasons[FinishReason.CANCELLED] == sum(cancelled_in.values())
    assert scheduler.stats().num_preempted > 20, "pages were tight"
    assert scheduler.stats().free_slots == SLOTS
    assert scheduler.stats().free_pages == 44
    assert engine._tenants == [None] * SLOTS
    assert not engine._kept
    # Those that were left alone answered as they would have without all this.
    sample = rng.sample([r for r in requests if r.id in answers], 120)
    assert {r.id: answers[r.id] for r in sample} == serve_alone(engine, sample)
