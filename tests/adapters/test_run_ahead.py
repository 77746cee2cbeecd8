"""A driver that runs ahead gets the same answers from every decoder, step for step."""

from __future__ import annotations

import pytest
import torch

from dllm_sched import EngineProtocolError, FinishReason, Scheduler, presets
from dllm_sched.runtime import Driver, VirtualClock
from dllm_sched.testing import check_engine
from dllm_sched_hf import D2FEngine, DeviceLostError, NonFiniteLogitsError, box, load_model

DECODERS = [
    "d2f_gqa_aggressive_b16",
    "fast_dllm_dual_thr05_b4",
    "fast_dllm_prefix_factor2_b8",
    "llada_g32_b32_s32_cfg",
]


class Served:
    """Requests served to their ends; a step takes a second."""

    def __init__(self, engine, requests, *, ahead, cancel_at=None, spread_s=1.5, at_step=None):
        clock = VirtualClock(0.0)
        slots = engine.max_num_seqs
        scheduler = Scheduler(
            policy=presets.continuous(slots), capacity=engine.capacity(), max_in_flight=ahead
        )
        self.ends, steps = {}, 0

        def stepped(batch, outcome):
            nonlocal steps
            steps += 1
            clock.advance(1.0)
            for name, step in (cancel_at or {}).items():
                if step == steps:
                    self.driver.cancel(name)
            if at_step is not None:
                at_step(steps, batch)

        def told(update):
            self.ends.update({end.request.id: end for end in update.finished})

        self.driver = Driver(scheduler, engine, clock, on_update=told, on_step=stepped)
        self.driver.run((spread_s * n, request) for n, request in enumerate(requests))
        self.stats, self.scheduler = scheduler.stats(), scheduler
        scheduler.check_invariants()
        assert scheduler.counts().running == 0


@pytest.mark.parametrize("name", DECODERS)
def test_every_step_is_the_recorded_one(
    name, record, golden_request, golden_engine, assert_recorded
):
    """Late joiners, a row that cannot join, one that is cancelled, one with NaN in its cache."""
    stored = record(name)
    entries = stored["requests"][:7]
    victims = [{**entries[n], "id": f"victim {n}"} for n in range(2)]
    bad = {**entries[0], "id": "bad", "prompt": [1, 295]}
    requests = [golden_request(stored, entry) for entry in (*victims, *entries[:3], bad)]
    requests += [golden_request(stored, entry) for entry in entries[3:]]
    forwards = []
    for ahead in (1, 2):
        engine = golden_engine(stored, 3)

        def poison(step, batch, engine=engine):
            if step == 6 and engine._layers:
                slots = {row.request.id: row.slot for row in batch.rows}
                if "victim 1" in slots:
                    engine._layers[0][slots["victim 1"], 0] = float("nan")

        served = Served(engine, requests, ahead=ahead, cancel_at={"victim 0": 3}, at_step=poison)
        for entry in entries:
            assert_recorded(served.ends[str(entry["id"])].output, entry)
        assert served.ends["victim 0"].reason is FinishReason.CANCELLED
        assert served.ends["bad"].reason is FinishReason.ERROR
        error = served.ends["victim 1"].error
        assert error is None or isinstance(error, NonFiniteLogitsError)
        forwards.append(engine.num_forwards)
        assert (served.stats.wasted_row_steps > 0) == (ahead == 2)
    assert forwards[1] >= forwards[0]


def test_the_model_in_the_box_answers_the_same():
    net = load_model(box.box_model_dir(), box.box_lora_dir(), device="cpu", dtype="float64")
    traces = []
    for ahead in (1, 2):
        engine = D2FEngine(net, max_num_seqs=4, trace=True)
        requests = [
            engine.request(str(n), box.task.encode_prompt(prompt), **box.DECODING)
            for n, (prompt, _) in enumerate(box.task.sample_requests(12, 5, distinct=True))
        ]
        served = Served(engine, requests, ahead=ahead)
        traces.append({name: end.output for name, end in served.ends.items()})
    assert traces[0] == traces[1]
    assert len(traces[0]) == 12


def test_the_forward_behind_starts_before_a_step_is_told(record, golden_request, golden_engine):
    stored = record("d2f_gqa_aggressive_b16")
    engine = golden_engine(stored, 2)
    scheduler = Scheduler(capacity=engine.capacity(), max_in_flight=2)
    for entry in stored["requests"][:2]:
        scheduler.submit(golden_request(stored, entry), now=0.0)
    first, second = (scheduler.next_step(now=0.0).batch for _ in range(2))
    with pytest.raises(EngineProtocolError, match="no step was launched"):
        engine.collect()
    engine.launch(first)
    with pytest.raises(EngineProtocolError, match="collect it first"):
        engine.run(first)
    engine.launch(second)
    with pytest.raises(EngineProtocolError, match="two steps are on their way"):
        engine.launch(second)
    assert engine._behind is second, "what goes through its forward is not known yet"
    scheduler.complete_step(first, engine.collect(), now=0.0)
    assert engine._flight.found is not None, "started before the first one was told"
    scheduler.complete_step(second, engine.collect(), now=0.0)
    assert engine.num_forwards == 2


def test_an_interrupt_of_the_step_behind_loses_nothing_of_the_one_before(
    record, golden_request, golden_engine, assert_recorded, monkeypatch
):
    stored = record("d2f_gqa_aggressive_b16")
    entries = stored["requests"][:3]
    engine = golden_engine(stored, 2)
    forward, calls = engine.model.forward_packed, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) % 5 == 0:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(engine.model, "forward_packed", interrupted)
    scheduler = Scheduler(capacity=engine.capacity(), max_in_flight=2)
    ends, flights, num_interrupts = {}, [], 0

    def tell(update):
        engine.release(update.released)
        ends.update({end.request.id: end for end in update.finished})

    for entry in entries:
        scheduler.submit(golden_request(stored, entry), now=0.0)
    while scheduler.has_work():
        update = scheduler.next_step(now=0.0)
        tell(update)
        try:
            if update.batch is not None:
                flights.append(update.batch)
                engine.launch(update.batch)
            if update.batch is None or len(flights) == 2:
                outcome = engine.collect()
                tell(scheduler.complete_step(flights.pop(0), outcome, now=0.0))
        except KeyboardInterrupt as error:  # everybody stays and goes on
            num_interrupts += 1
            tell(scheduler.fail_step(flights[0], error, rows={}, now=0.0))
            flights.clear()
    for entry in entries:
        end = ends[str(entry["id"])]
        assert_recorded(end.output, entry)
        assert end.num_steps == end.output.num_forwards, "every step was told"
    assert num_interrupts > 3


@pytest.mark.parametrize("ahead", [1, 2])
def test_out_of_memory_takes_along_the_step_behind_and_loses_nobody(
    ahead, record, golden_request, golden_engine, assert_recorded, monkeypatch
):
    stored = record("d2f_gqa_aggressive_b16")
    engine = golden_engine(stored, 4)
    forward = engine.model.forward_packed
    calls = []

    def full(*args):
        calls.append(1)
        if len(calls) in (5, 6):
            raise torch.OutOfMemoryError("no memory")
        return forward(*args)

    monkeypatch.setattr(engine.model, "forward_packed", full)
    scheduler = Scheduler(capacity=engine.capacity(), max_in_flight=ahead)
    ends = {}
    driver = Driver(
        scheduler,
        engine,
        VirtualClock(0.0),
        on_update=lambda update: ends.update({end.request.id: end for end in update.finished}),
        recover_steps=4,
    )
    entries = stored["requests"][:8]
    driver.run((0.0, golden_request(stored, entry)) for entry in entries)
    for entry in entries:
        assert_recorded(ends[str(entry["id"])].output, entry)
    assert scheduler.capacity.max_num_seqs == 4, "the limit came back"


@pytest.mark.parametrize("ahead", [1, 2])
def test_after_a_lost_device_every_request_ends_with_the_reason(
    ahead, record, golden_request, golden_engine, monkeypatch
):
    stored = record("d2f_gqa_aggressive_b16")
    engine = golden_engine(stored, 3)
    forward, calls = engine.model.forward_packed, []

    def broken(*args):
        calls.append(1)
        if len(calls) > 4:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA ...")
        return forward(*args)

    monkeypatch.setattr(engine.model, "forward_packed", broken)
    requests = [golden_request(stored, entry) for entry in stored["requests"][:6]]
    served = Served(engine, requests, ahead=ahead, spread_s=0.0)
    assert len(served.ends) == 6
    for end in served.ends.values():
        assert end.reason is FinishReason.ERROR
        assert isinstance(end.error, DeviceLostError)
        assert "illegal memory access" in str(end.error)
    assert len(calls) == 5, "it is not asked again"


@pytest.mark.parametrize("name", DECODERS[:2])
def test_keeps_every_rule_when_each_step_is_launched_and_collected(
    name, record, golden_request, golden_engine
):
    stored = record(name)

    class Split:
        def __init__(self, slots):
            self.engine = golden_engine(stored, slots)
            self.release = self.engine.release

        def run(self, batch):
            self.engine.launch(batch)
            return self.engine.collect()

    check_engine(
        Split,
        lambda index: golden_request(stored, stored["requests"][index]),
        output=lambda output: output and output.tokens,
        num_requests=5,
        max_num_seqs=3,
    )
