"""Steps as graphs, with a capture that does again what was done: buckets, tokens, fallbacks."""

from __future__ import annotations

import collections
import copy
import itertools
import logging

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dllm_sched_hf import D2FEngine, FastDLLMEngine, LLaDAEngine, graphs
from dllm_sched_hf.decoder import StepPlan
from dllm_sched_hf.graphs import Bucket
from dllm_sched_hf.modeling_llada import PARTS, compiled_parts

DECODERS = [
    "d2f_gqa_aggressive_b16",
    "d2f_gsm8k_b64",
    "fast_dllm_dual_thr05_b4",
    "fast_dllm_prefix_factor2_b8",
    "llada_g60_b20_s24",
]


# What a CUDA graph cannot hold, for each has the host wait for the device.
WAITS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "unique",
    "unique2",
}


class Recorder(TorchDispatchMode):
    """Writes down every operation with the very tensors that it read and wrote."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        self.done.append((op, args, kwargs or {}, found))
        return found


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Capture:
    """Like a graph: operations are repeated on the tensors that they had; no Python runs again."""

    def __init__(self, fail=(), error=None):
        self.fail, self.graphs, self.num_tried = fail, [], 0
        self.error = error or RuntimeError("operation not permitted when stream is capturing")

    def __call__(self, body, pool):
        self.num_tried += 1
        if self.num_tried - 1 in self.fail:
            raise self.error
        with Recorder() as recorder:
            result = body()
        self.graphs.append(recorder.done)
        steps = []
        for op, args, kwargs, found in recorder.done:
            read = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
            made = [x for x in tensors(found) if x.untyped_storage().data_ptr() not in read]
            if made or op._schema.is_mutable:  # else a view: still one
                steps.append((op, args, kwargs, made))

        def replay():
            for op, args, kwargs, made in steps:
                again = tensors(op(*args, **kwargs))
                for old, new in zip(made, again if made else (), strict=True):
                    old.copy_(new)
            return result

        return replay


def with_graphs(engine, capture):
    """The engine as it is with a capture; fixtures build it without."""
    engine._graphs = graphs.StepGraphs(
        engine.model,
        engine._cache,
        engine._bias,
        engine._read_greedy,
        engine._read_drawn,
        chunk=50,
        max_rows=engine.max_num_seqs,
        capture=capture,
    )
    engine.graph_stats = engine._graphs.stats
    return engine


def join_one_by_one(drive, requests, slots):
    """One more row before each step, in the first of ``slots`` that is free."""
    waiting = list(requests)
    while waiting or drive.rows:
        for slot in [slot for slot in slots if slot not in drive.rows][:1]:
            if waiting:
                drive.join(slot, waiting.pop(0))
        drive.step()
    return drive.outputs


def serve(engine, stored, golden_request, loop, count=8, slots=None):
    requests = [golden_request(stored, entry) for entry in stored["requests"][:count]]
    return join_one_by_one(loop(engine), requests, slots or range(engine.max_num_seqs))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("slots", [(0, 1, 2, 3, 4), (0, 1, 2, 3, 5), (3, 1, 4)])
def test_padded_steps_are_the_recorded_ones(
    name, slots, record, golden_request, golden_engine, assert_recorded, loop
):
    """Rows join one by one: ragged batches of up to 5, in the first slots, one left out, any."""
    stored = record(name)
    capture = Capture()
    engine = with_graphs(golden_engine(stored, max(slots) + 1), capture)
    outputs = serve(engine, stored, golden_request, loop, slots=slots)
    for entry in stored["requests"][:8]:
        assert_recorded(outputs[str(entry["id"])], entry)
    stats = engine.graph_stats
    assert stats.captures == capture.num_tried > 0
    assert stats.replays == engine.num_forwards > stats.captures, "shapes come again"
    assert stats.fallbacks == {}
    large = [bucket for bucket in engine._graphs._graphs if bucket.rows >= len(slots)]
    in_place = engine._cache is not None and len(slots) == 5
    assert {bucket.in_place for bucket in large} == {in_place}


def test_the_capture_of_these_tests_repeats_operations_and_not_python():
    number, factor = torch.ones(3), [2.0]
    replay = Capture()(lambda: (number[1:] * factor[0]).add_(1.0), None)
    factor[0] = 5.0
    for value in (1.0, 4.0):
        number.fill_(value)
        assert replay().tolist() == [2 * value + 1] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine_type", [D2FEngine, FastDLLMEngine, LLaDAEngine])
def test_rows_that_draw_are_as_without_graphs(engine_type, dtype, model, loop):
    """Beside rows that do not, in every decision; a graph has no temperature but its input's."""
    net = copy.deepcopy(model()).to(dtype)
    outputs = []
    for capture in (None, Capture(), None):
        engine = engine_type(net, max_num_seqs=4, max_len=96, trace=True)
        if capture is not None:
            with_graphs(engine, capture)
        hot = (0.0, 0.7, 0.0, 1.3, 0.2, 0.0, 0.0) if len(outputs) < 2 else (0.0,) * 7
        requests = [
            engine.request(
                str(number), range(1, 8 + 5 * number), max_new_tokens=32, seed=number,
                block_length=16, stop_token_ids=(), temperature=temperature,
            )
            for number, temperature in enumerate(hot)
        ]  # fmt: skip
        outputs.append(join_one_by_one(loop(engine), requests, range(4)))
        if capture is not None:
            stats, buckets = engine.graph_stats, engine._graphs._graphs
            assert stats.fallbacks == {}
            assert stats.replays == engine.num_forwards > stats.captures
            assert {bucket.drawn for bucket in buckets} == {False, True}
    without, as_graphs, greedy = outputs
    assert as_graphs == without
    changed = {name for name, output in greedy.items() if output.tokens != without[name].tokens}
    assert changed == {"1", "3", "4"}


def test_a_step_is_one_upload_and_one_copy_back(record, golden_request, golden_engine, loop):
    stored = record(DECODERS[0])
    engine = with_graphs(golden_engine(stored, 3), Capture())
    engine._upload = None  # whatever is not filled in at once
    requests = [
        golden_request(stored, entry, temperature=0.5 * (number % 2))
        for number, entry in enumerate(stored["requests"][:5])
    ]
    copies = collections.Counter()
    with Recorder() as recorder, pytest.MonkeyPatch.context() as patch:
        cpu = torch.Tensor.cpu
        patch.setattr(torch.Tensor, "cpu", lambda x: copies.update(["back"]) or cpu(x))
        join_one_by_one(loop(engine), requests, range(3))
    inputs = engine._graphs._inputs.data_ptr()
    for op, args, *_ in recorder.done:
        copies["up"] += op is torch.ops.aten.copy_.default and args[0].data_ptr() == inputs
    steps = engine.num_forwards
    assert steps == engine.graph_stats.replays > 20
    assert copies == {"up": steps, "back": steps}


def test_what_is_captured_never_waits_and_widens_a_part_at_a_time(
    record, golden_request, golden_engine, loop, monkeypatch
):
    stored = record(DECODERS[0])
    capture = Capture()
    engine = with_graphs(golden_engine(stored, 3), capture)
    most = 3 * engine.vocab_size
    monkeypatch.setattr("dllm_sched_hf.engine._WIDE_PER_CHUNK", most)
    requests = [
        golden_request(stored, entry, temperature=0.5 * (number // 2))
        for number, entry in enumerate(stored["requests"][:4])
    ]
    join_one_by_one(loop(engine), requests, range(3))
    assert {bucket.drawn for bucket in engine._graphs._graphs} == {False, True}
    widest = 0
    for op, args, _, found in itertools.chain.from_iterable(capture.graphs):
        name = op.overloadpacket.__name__
        assert name not in WAITS
        if name in {"index", "index_put_"}:  # where True is = how many there are
            assert all(index.dtype == torch.int64 for index in tensors(args[1]))
        wide = [x.numel() for x in tensors(found) if x.dtype == torch.float64]
        widest = max(widest, *wide, 0)
    assert widest == most


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_not_a_token_in_twenty_is_padding(batch_size, record, golden_request, golden_engine, loop):
    stored = record(DECODERS[0])
    engine = with_graphs(golden_engine(stored, batch_size), lambda body, _pool: body)
    sent = []
    embedding = engine.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _module, ids, _out: sent.append(len(ids[0])))
    serve(engine, stored, golden_request, loop, 16)
    hook.remove()
    stats = engine.graph_stats
    assert stats.replays == engine.num_forwards
    assert {bucket.tokens for bucket in engine._graphs._graphs} == set(sent)
    assert sum(sent) == engine.num_tokens + stats.padding
    assert 0 < 20 * stats.padding < sum(sent)


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
    assert capture.num_tried == 3
    assert engine.graph_stats.replays == engine.graph_stats.captures == 0


def masked(error):
    """As a capture that is ended after it has failed raises another error."""
    other = RuntimeError("operation failed due to a previous error during capture")
    other.__context__ = error
    return other


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), masked(torch.OutOfMemoryError("no memory"))]
)
def test_without_memory_captures_wait_and_are_tried_again(
    error, record, golden_request, golden_engine, assert_recorded, loop, monkeypatch, caplog
):
    """The second to the sixth one fail: more than would end all capturing."""
    monkeypatch.setattr(graphs, "_RETRY_STEPS", 4)
    stored = record(DECODERS[0])
    capture = Capture(fail=range(1, 6), error=error)
    engine = with_graphs(golden_engine(stored, 4), capture)
    with caplog.at_level(logging.WARNING, "dllm_sched"):
        outputs = serve(engine, stored, golden_request, loop)
    for entry in stored["requests"][:8]:
        assert_recorded(outputs[str(entry["id"])], entry)
    stats = engine.graph_stats
    assert stats.fallbacks == {"memory": 5 * 4}, "nothing is tried while it waits"
    assert stats.replays == engine.num_forwards - 20
    assert stats.captures == capture.num_tried - 5 > 1
    assert len(caplog.records) == 1
    assert "memory" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [("MAX_TOKENS", 40, "size"), ("MAX_PADDED_CELLS", 50, "padding"), ("MAX_GRAPHS", 1, "graphs")],
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


def test_second_sequences_and_copied_prompts_run_without_a_graph(
    record, golden_request, golden_engine, assert_recorded, loop
):
    stored = record("llada_g32_b32_s32_cfg")
    engine = with_graphs(golden_engine(stored, 2), Capture())
    outputs = serve(engine, stored, golden_request, loop, 2)
    for entry in stored["requests"][:2]:
        assert_recorded(outputs[str(entry["id"])], entry)
    assert engine.graph_stats.fallbacks == {"guided": engine.num_forwards}
    stored = record(DECODERS[0])
    entry = stored["requests"][0]
    engine = with_graphs(golden_engine(stored, 2), Capture())
    drive = loop(engine)
    for slot in range(2):
        drive.join(slot, golden_request(stored, entry, group="all"))
        drive.step()
    drive.run()
    assert list(drive.outputs[str(entry["id"])].tokens) == entry["output"]
    assert engine.num_shared_tokens == len(entry["prompt"])
    assert engine.graph_stats.fallbacks == {"shared": 1}


def plan_of(queries, lengths, masked, slots=None):
    """A plan as far as a bucket looks at it."""
    queries, lengths = np.array(queries), np.array(lengths)
    row = np.repeat(np.arange(len(queries)), queries)
    zeros = np.zeros(len(row), np.int64)
    return StepPlan(
        slots=np.array(range(len(queries)) if slots is None else slots), start=lengths - queries,
        end=lengths, length=lengths, row=row, position=zeros, place=zeros, token=zeros,
        visible=zeros, masked=np.arange(masked),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("queries", "lengths", "masked", "bucket"),
    [
        ([5], [70], 3, (5, 1, 5, 256, 5)),
        ([131], [256], 17, (132, 1, 132, 256, 24)),  # every second number from 128 on
        ([899], [899], 17, (900, 1, 900, 900, 24)),  # 900 positions, though steps are of 8
        ([33, 20, 32], [257, 90, 80], 60, (85, 3, 48, 512, 64)),
        ([32] * 5, [400] * 5, 160, (160, 6, 32, 512, 160)),
        ([9] * 9, [900] * 9, 1, (81, 10, 16, 900, 16)),  # ten rows at most
        ([128] * 8 + [1], [512] * 9, 600, (1040, 10, 128, 512, 768)),
    ],
)
def test_buckets(queries, lengths, masked, bucket):
    plan = plan_of(queries, lengths, masked)
    assert Bucket.of(plan, 10, 900, cached=True, drawn=False) == (*bucket, True, False)
    tokens, rows, most, _, wanted = bucket
    without = (tokens, rows, most, most, wanted, False, True)
    assert Bucket.of(plan, 10, 900, cached=False, drawn=True) == without


@pytest.mark.parametrize(
    ("slots", "in_place"),
    [([0], True), ([1], False), ([1, 2, 3], False), ([0, 1, 3, 5, 4], True), ([0, 6], False)],
)
def test_keys_stay_in_place_where_that_takes_no_more_rows(slots, in_place):
    plan = plan_of([4] * len(slots), [9] * len(slots), 4, slots)
    assert Bucket.of(plan, 8, 64, cached=True, drawn=False).in_place is in_place


def test_no_step_has_a_graph_in_which_a_token_in_twenty_is_padding():
    buckets = [
        Bucket.of(plan_of([number, 1], [999, 1], 1), 2, 5000, cached=True, drawn=False)
        for number in range(600)
    ]
    for number, bucket in enumerate(buckets, 1):
        assert number <= bucket.tokens
        for other in buckets[number - 1 :]:
            if other._replace(queries=bucket.queries).holds(bucket):
                assert 20 * (other.tokens - number) < other.tokens


def test_a_graph_serves_shapes_of_almost_its_tokens_and_half_of_the_rest():
    graph = Bucket(93, 6, 32, 512, 64, in_place=True, drawn=False)
    assert graph.excess == (6 * 32 - 93) * 512 / 93
    assert graph.holds(graph._replace(tokens=90, rows=3, queries=16, keys=256, wanted=32))
    for change in (
        {"tokens": 94},
        {"tokens": 89},
        {"rows": 2},
        {"rows": 8},
        {"queries": 15},
        {"queries": 48},
        {"keys": 255},
        {"keys": 768},
        {"wanted": 31},
        {"wanted": 96},
        {"in_place": False},
        {"drawn": True},
    ):
        assert not graph.holds(graph._replace(**change))


@pytest.mark.parametrize("part", [1, 300, 700, 10**9])
def test_draws_are_the_same_in_parts(part, model, monkeypatch):
    engine = D2FEngine(model(), max_num_seqs=1)
    torch.manual_seed(1)
    logits = torch.randn(11, 300) * 4
    temperature = torch.tensor([0.0, 0.5, 3.0, 1e-3] * 3, dtype=torch.float64)[:11]
    draws = torch.rand(11, dtype=torch.float64)
    expected = engine._read_drawn(logits.clone(), temperature, draws)
    monkeypatch.setattr("dllm_sched_hf.engine._WIDE_PER_CHUNK", part)
    assert engine._read_drawn(logits.clone(), temperature, draws).tolist() == expected.tolist()
    greedy = engine._read_greedy(logits)
    assert expected[1][3::4].tolist() == greedy[1][3::4].tolist()
    cold = temperature == 0
    assert expected[:, cold].tolist() == greedy[:, cold].tolist()


def test_a_row_that_does_not_draw_is_read_out_alike_whoever_does(model):
    """To the last bit: among probabilities near 1 those decide which positions commit first."""
    engine = D2FEngine(model(), max_num_seqs=1)
    torch.manual_seed(2)
    logits = torch.randn(64, 300)
    logits[torch.arange(64), torch.arange(64)] = 14 + torch.rand(64) * 8
    logits += 40
    cold = torch.zeros(64, dtype=torch.float64)
    alone, token = engine._read_on_host(logits.clone())
    assert alone.min() > 0.999
    assert len(np.unique(alone)) > 9
    for found in (
        engine._read_drawn(logits.clone(), cold, torch.rand(64, dtype=torch.float64)),
        engine._read_greedy(logits.clone()),
    ):
        np.testing.assert_array_equal(found[0].view(torch.float32).numpy(), alone)
        assert found[1].tolist() == token.tolist()


def test_no_engine_captures_unless_it_is_told_how(model):
    assert D2FEngine(model(), max_num_seqs=1).graph_stats is None


@pytest.mark.parametrize("part", [1, 7, 100, 10**9])
def test_positions_in_parts_read_out_what_a_host_does(part, model, monkeypatch):
    engine = D2FEngine(model(), max_num_seqs=1)
    torch.manual_seed(1)
    logits = torch.randn(11, 300) * 4
    logits[3, 295] = 50.0  # the mask token keeps its share and is not chosen
    logits[5, 17] = float("nan")
    monkeypatch.setattr("dllm_sched_hf.engine._WIDE_PER_CHUNK", 300 * part)
    confidence, token = engine._read_greedy(logits.clone())
    expected, best = engine._read_on_host(logits.clone())
    np.testing.assert_array_equal(confidence.view(torch.float32).numpy(), expected)
    assert np.isnan(expected).nonzero()[0].tolist() == [5]
    kept = [row for row in range(11) if row != 5]
    assert token[kept].tolist() == best[kept].tolist()


def test_the_parts_of_a_block_are_compiled_if_asked_and_not_for_every_shape(
    record, golden_request, assert_recorded, model, loop, monkeypatch, request
):
    stored, compiled, compile = record(DECODERS[0]), [], torch.compile

    def traced(function):  # what a compiler would be given, without one
        compiled.append(function)
        return compile(function, backend="eager")

    monkeypatch.setattr(torch, "compile", traced)
    for clear in (compiled_parts.cache_clear, torch._dynamo.reset, counters.clear):
        clear()
        request.addfinalizer(clear)
    D2FEngine(model("tiny_gqa"), max_num_seqs=1)
    assert compiled == []
    for slots in (2, 1, 3):
        engine = D2FEngine(model("tiny_gqa"), max_num_seqs=slots, trace=True, compile_forward=True)
        outputs = serve(engine, stored, golden_request, loop, slots)
        for entry in stored["requests"][:slots]:
            assert_recorded(outputs[str(entry["id"])], entry)
    assert compiled == [PARTS.before, PARTS.after]
    # For the first number of tokens, for any, and for a single one.
    assert counters["stats"]["unique_graphs"] <= 3 * len(compiled)
    assert not counters["graph_break"]
