"""Steps as graphs, with a capture that only calls the function again: buckets and fallbacks."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from dllm_sched_hf import D2FEngine, graphs
from dllm_sched_hf.decoder import StepPlan
from dllm_sched_hf.graphs import Bucket

DECODERS = [
    "d2f_gqa_aggressive_b16",
    "d2f_gsm8k_b64",
    "fast_dllm_dual_thr05_b4",
    "fast_dllm_prefix_factor2_b8",
    "llada_g60_b20_s24",
]


class Capture:
    """Remembers what was captured; like a graph it sees only what its fixed tensors hold."""

    def __init__(self, fail=()):
        self.bodies, self.fail = [], fail

    def __call__(self, body):
        self.bodies.append(body)
        if len(self.bodies) - 1 in self.fail:
            raise RuntimeError("operation not permitted when stream is capturing")
        found = body()

        def replay():
            found.copy_(body())
            return found

        return replay


def with_graphs(engine, capture):
    """The engine as it is with a capture; fixtures build it without."""
    engine._graphs = graphs.StepGraphs(
        engine.model,
        engine._cache,
        engine._bias,
        engine._read_greedy,
        engine.max_num_seqs,
        capture,
    )
    engine.graph_stats = engine._graphs.stats
    return engine


def serve(engine, stored, golden_request, loop, count=8):
    drive, waiting = loop(engine), list(stored["requests"][:count])
    while waiting or drive.rows:
        for slot in sorted({*range(engine.max_num_seqs)} - {*drive.rows})[:1]:
            if waiting:
                drive.join(slot, golden_request(stored, waiting.pop(0)))
        drive.step()
    return drive.outputs


@pytest.mark.parametrize("name", DECODERS)
def test_padded_steps_are_the_recorded_ones(
    name, record, golden_request, golden_engine, assert_recorded, loop
):
    """Rows join one by one: batches of 1 to 5 rows, ragged, padded to the shapes of buckets."""
    stored = record(name)
    capture = Capture()
    engine = with_graphs(golden_engine(stored, 5), capture)
    outputs = serve(engine, stored, golden_request, loop)
    for entry in stored["requests"][:8]:
        assert_recorded(outputs[str(entry["id"])], entry)
    stats = engine.graph_stats
    assert stats.captures == len(capture.bodies) > 0
    assert stats.replays > stats.captures, "shapes come again"
    assert stats.replays + sum(stats.fallbacks.values()) == engine.num_forwards
    assert set(stats.fallbacks) <= {"padding"}  # a prompt that joins rows of a block or two


def test_a_capture_that_fails_is_counted_and_its_steps_run_all_the_same(
    record, golden_request, golden_engine, assert_recorded, loop, caplog
):
    stored = record(DECODERS[0])
    engine = with_graphs(golden_engine(stored, 4), Capture(fail={1}))
    with caplog.at_level(logging.WARNING, "dllm_sched"):
        outputs = serve(engine, stored, golden_request, loop)
    for entry in stored["requests"][:8]:
        assert_recorded(outputs[str(entry["id"])], entry)
    assert engine.graph_stats.fallbacks["capture"] > 0
    assert engine.graph_stats.replays > 0
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert "not permitted when stream is capturing" in told[0]


def test_after_three_failures_nothing_more_is_captured(
    record, golden_request, golden_engine, assert_recorded, loop
):
    stored = record(DECODERS[0])
    capture = Capture(fail=range(100))
    engine = with_graphs(golden_engine(stored, 4), capture)
    outputs = serve(engine, stored, golden_request, loop)
    for entry in stored["requests"][:8]:
        assert_recorded(outputs[str(entry["id"])], entry)
    assert len(capture.bodies) == 3
    assert engine.graph_stats.replays == engine.graph_stats.captures == 0


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [("MAX_TOKENS", 40, "size"), ("MAX_PADDING", 0.9, "padding"), ("MAX_GRAPHS", 1, "graphs")],
)
def test_what_does_not_pay_runs_without_a_graph(
    limit, value, reason, record, golden_request, golden_engine, assert_recorded, loop, monkeypatch
):
    monkeypatch.setattr(graphs, limit, value)
    stored = record(DECODERS[0])
    engine = with_graphs(golden_engine(stored, 4), Capture())
    outputs = serve(engine, stored, golden_request, loop, 5)
    for entry in stored["requests"][:5]:
        assert_recorded(outputs[str(entry["id"])], entry)
    assert engine.graph_stats.fallbacks[reason] > 0


def test_draws_and_second_sequences_run_without_a_graph(
    record, golden_request, golden_engine, assert_recorded, loop, model
):
    stored = record("llada_g32_b32_s32_cfg")
    engine = with_graphs(golden_engine(stored, 2), Capture())
    outputs = serve(engine, stored, golden_request, loop, 2)
    for entry in stored["requests"][:2]:
        assert_recorded(outputs[str(entry["id"])], entry)
    assert set(engine.graph_stats.fallbacks) == {"guided"}
    hot = D2FEngine(model(), max_num_seqs=1, capture=Capture())
    drive = loop(hot)
    drive.join(0, hot.request("hot", [1, 2, 3], max_new_tokens=32, temperature=0.7))
    drive.run()
    assert hot.graph_stats.fallbacks == {"draws": hot.num_forwards}


def plan_of(queries, lengths, masked):
    """A plan as far as a bucket looks at it."""
    queries, lengths = np.array(queries), np.array(lengths)
    row = np.repeat(np.arange(len(queries)), queries)
    zeros = np.zeros(len(row), np.int64)
    return StepPlan(
        slots=np.arange(len(queries)), start=lengths - queries, end=lengths, length=lengths,
        row=row, position=zeros, token=zeros, visible=zeros, masked=np.arange(masked),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("queries", "lengths", "masked", "bucket"),
    [
        ([5], [70], 3, (1, 16, 256, 16)),
        ([17], [256], 17, (1, 24, 256, 24)),
        ([33, 20, 31], [257, 90, 80], 60, (3, 48, 512, 64)),
        ([32] * 5, [400] * 5, 160, (6, 32, 512, 192)),
        ([32] * 9, [900] * 9, 1, (10, 32, 900, 32)),  # ten rows at most, 900 positions
    ],
)
def test_buckets(queries, lengths, masked, bucket):
    plan = plan_of(queries, lengths, masked)
    assert Bucket.of(plan, 10, 900, cached=True) == bucket
    assert Bucket.of(plan, 10, 900, cached=False).keys == bucket[1]


def test_no_engine_captures_unless_it_is_told_how(model):
    assert D2FEngine(model(), max_num_seqs=1).graph_stats is None


@pytest.mark.parametrize("part", [1, 7, 100, 10**9])
def test_the_vocabulary_in_parts_reads_out_the_same(part, model, monkeypatch):
    engine = D2FEngine(model(), max_num_seqs=1)
    torch.manual_seed(1)
    logits = torch.randn(11, 300) * 4
    logits[3, 295] = 50.0  # the mask token keeps its share and is not chosen
    logits[5, 17] = float("nan")
    monkeypatch.setattr("dllm_sched_hf.engine._WIDE_PER_CHUNK", 11 * part)
    confidence, token = engine._read_greedy(logits.clone())
    expected, best = engine._read_on_host(logits.clone())
    sure = confidence.view(torch.float32).numpy()
    assert np.isnan(sure[5])
    kept = [row for row in range(11) if row != 5]
    assert token[kept].tolist() == best[kept].tolist()
    np.testing.assert_allclose(sure[kept], expected[kept], rtol=2e-5)


def test_the_forward_is_compiled_only_if_asked(
    record, golden_request, assert_recorded, model, loop, monkeypatch
):
    stored = record(DECODERS[0])
    compiled, calls = [], []

    def compile(function):
        compiled.append(function)
        return lambda *args: calls.append(1) or function(*args)

    monkeypatch.setattr(torch, "compile", compile)
    D2FEngine(model("tiny_gqa"), max_num_seqs=1)
    assert compiled == []
    engine = D2FEngine(model("tiny_gqa"), max_num_seqs=2, trace=True, compile_forward=True)
    outputs = serve(engine, stored, golden_request, loop, 2)
    for entry in stored["requests"][:2]:
        assert_recorded(outputs[str(entry["id"])], entry)
    assert len(calls) == engine.num_forwards
