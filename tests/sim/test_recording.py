"""Recorders against hand-made events, and against what the scheduler itself counts."""

from __future__ import annotations

import itertools
import math

import pytest

from dllm_sched import Capacity, ConfigError, FinishReason, GrowingKV, Policy, Request, presets
from dllm_sched.batch import BlockBoundary, RowFinished, StepOutcome
from dllm_sched.events import (
    RequestFinished,
    RequestJoined,
    RequestPreempted,
    StepCompleted,
)
from dllm_sched.policies import YoungestFirst
from dllm_sched.scheduler import Scheduler
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.recording import (
    Cohorts,
    QueueTrace,
    Sample,
    SlotTimeline,
    Span,
    StepHistogram,
)
from dllm_sched.sim.service import Constant
from dllm_sched.sim.shapes import gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop


def joined(at, name, slot, step_id=0):
    return RequestJoined(at, name, slot, step_id, 0.0, False)


def finished(at, name, reason=FinishReason.EOS, admitted_at=0.0, num_steps=3):
    return RequestFinished(at, name, reason, 0.0, admitted_at, num_steps, 1)


def test_a_timeline_tells_who_held_which_slot_and_why_it_left():
    timeline = SlotTimeline()
    for event in (
        joined(0.0, "a", 0),
        joined(0.0, "b", 1),
        RequestPreempted(2.0, "b", 1, False),
        finished(3.0, "a"),
        joined(3.0, "b", 0),
        finished(4.0, "c", FinishReason.QUEUE_TIMEOUT, admitted_at=None),
    ):
        timeline(event)
    assert timeline.spans == [
        Span(0, "a", 0.0, 3.0, "eos"),
        Span(1, "b", 0.0, 2.0, "preempted"),
        Span(0, "b", 3.0, math.inf, "running"),
    ]


def test_a_timeline_stops_when_told_and_says_up_to_when_it_is_complete():
    timeline = SlotTimeline(from_s=1.0, max_spans=2)
    for event in (
        joined(0.0, "a", 0),
        finished(0.5, "a"),
        joined(1.0, "b", 0),
        joined(1.0, "c", 1),
        joined(2.0, "d", 2),
        finished(3.0, "b"),
        finished(3.0, "d"),
        joined(4.0, "e", 0),
    ):
        timeline(event)
    assert [span.request_id for span in timeline.spans] == ["b", "c"]
    assert timeline.complete_until_s == 2.0
    with pytest.raises(ConfigError, match="until_s"):
        SlotTimeline(from_s=1.0, until_s=1.0)
    with pytest.raises(ConfigError, match="max_spans"):
        SlotTimeline(max_spans=0)


def run_with(*observers, count=300, rate=1.8, capacity=None, policy=None):
    return simulate(
        OpenLoop(Poisson(rate), gsm8k(), seed=1, max_requests=count),
        policy=presets.continuous(16) if policy is None else policy,
        capacity=Capacity(max_num_seqs=16) if capacity is None else capacity,
        service=Constant(0.0241),
        observers=observers,
    )


def test_no_slot_is_held_twice_at_a_time_and_stays_add_up():
    timeline, histogram = SlotTimeline(), StepHistogram()
    result = run_with(timeline, histogram)
    spans = timeline.spans
    assert len(spans) == 300
    last = dict.fromkeys(range(16), 0.0)
    for span in spans:
        assert span.from_s >= last[span.slot]
        last[span.slot] = span.to_s
    held = sum(span.to_s - span.from_s for span in spans)
    assert held == pytest.approx(result.stats.row_steps * 0.0241)
    assert histogram.steps.total() == 300
    assert histogram.rows.total() == result.stats.num_steps
    assert histogram.rows_mean == pytest.approx(16 * result.occupancy)
    assert sum(n * k for n, k in histogram.rows.items()) == result.stats.row_steps


@pytest.mark.parametrize("max_samples", [2, 7, 64, 10_000])
def test_however_coarse_a_trace_is_exact_in_the_mean(max_samples):
    """Little's law: the area under the queue is the sum of the waits; under the rows, of stays."""
    trace = QueueTrace(max_samples=max_samples)
    result = run_with(trace)
    samples = list(trace)
    assert len(samples) <= max_samples
    assert all(a.to_s == b.from_s for a, b in itertools.pairwise(samples))
    waiting = sum((s.to_s - s.from_s) * s.waiting for s in samples)
    rows = sum((s.to_s - s.from_s) * s.rows for s in samples)
    assert waiting == pytest.approx(sum(result.wait_s))
    assert rows == pytest.approx(sum(result.latency_s) - sum(result.wait_s))
    assert max(s.waiting_max for s in samples) >= max(s.waiting for s in samples)


def test_the_largest_value_survives_merging():
    fine, coarse = QueueTrace(max_samples=10_000), QueueTrace(max_samples=4)
    run_with(fine, coarse, rate=2.6)
    assert max(s.waiting_max for s in fine) == max(s.waiting_max for s in coarse) > 20


def test_an_empty_trace_has_no_samples():
    assert list(QueueTrace()) == []
    with pytest.raises(ConfigError, match="max_samples"):
        QueueTrace(max_samples=1)


def test_pages_are_those_that_the_scheduler_holds():
    """By hand, under memory pressure, with both kinds of preemption, seen before every step."""
    for keep in (False, True):
        capacity = Capacity(max_num_seqs=4, num_pages=12, memory=GrowingKV(page_size=16))
        trace = QueueTrace(capacity, max_samples=10_000)
        scheduler = Scheduler(
            capacity=capacity, policy=Policy(eviction=YoungestFirst(keep=keep)), observers=[trace]
        )
        for number in range(6):
            request = Request(f"r{number}", prompt_len=16, max_new_tokens=96, block_length=32)
            scheduler.submit(request, now=0.0)
        scheduler.drain(now=0.0)
        now, blocks, preempted = 0.0, {}, 0
        held = []
        while scheduler.has_work():
            update = scheduler.next_step(now=now)
            for row in update.batch.joined:
                if not row.resumed:
                    blocks[row.request.id] = 0
            stats = scheduler.stats()
            held.append(12 - stats.free_pages)
            now += 1.0
            boundaries, done = [], []
            for row in update.batch.rows:
                blocks[row.request.id] += 1
                count = blocks[row.request.id]
                if count == 3:
                    done.append(RowFinished(row.slot, FinishReason.EOS))
                else:
                    boundaries.append(BlockBoundary(row.slot, count, 16 + 32 * count))
            outcome = StepOutcome(tuple(done), tuple(boundaries))
            scheduler.complete_step(update.batch, outcome, now=now)
            preempted = stats.num_preempted
        assert preempted > 0
        samples = list(trace)
        assert [s.pages for s in samples] == held[: len(samples)]
        assert all(isinstance(s, Sample) and s.pages_max == s.pages for s in samples)


def test_cohorts_share():
    cohorts = Cohorts()
    assert math.isnan(cohorts.mean)
    assert cohorts.now == 0.0
    for name in "abc":
        cohorts(joined(0.0, name, 0, step_id=0))
    cohorts(StepCompleted(1.0, 0, 3, 1))
    assert cohorts.now == 1.0
    cohorts(joined(1.0, "d", 3, step_id=1))
    assert cohorts.now == 0.75
    cohorts(StepCompleted(4.0, 1, 4, 3))
    assert cohorts.mean == pytest.approx((1.0 + 3 * 0.75) / 4)
    cohorts(finished(4.0, "a"))
    cohorts(RequestPreempted(4.0, "b", 1, True))
    assert cohorts.now == 0.5
    cohorts(finished(4.0, "c"))
    cohorts(finished(4.0, "x", FinishReason.CANCELLED, admitted_at=None))
    assert cohorts.now == 1.0


def test_synchronised_batches_are_one_cohort_and_refilled_slots_are_not():
    together, apart = Cohorts(), Cohorts()
    run_with(together, policy=presets.fixed_fill(16), rate=1.4)
    run_with(apart, rate=1.4)
    assert together.mean == pytest.approx(1.0)
    assert apart.mean < 0.25


def test_histograms_of_nothing():
    histogram = StepHistogram()
    assert math.isnan(histogram.rows_mean)
