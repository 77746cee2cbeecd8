"""The example observers tell of each request what happened to it."""

import io
import json
from importlib import import_module
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dllm_sched import (
    BlockBoundary,
    Capacity,
    FinishReason,
    Policy,
    Request,
    RowFate,
    RowFinished,
    Scheduler,
    StepOutcome,
)
from dllm_sched.events import RequestFinished, RequestPreempted, from_json
from dllm_sched.policies import MaxWaiting

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def request(name, **fields):
    return Request(name, prompt_len=8, max_new_tokens=16, block_length=8, **fields)


def play(observer):
    """The life of a: joins, a block, a failed step, joins again, ends. b is refused."""
    scheduler = Scheduler(
        capacity=Capacity(max_num_seqs=1),
        policy=Policy(admission=MaxWaiting(1)),
        observers=[observer],
    )
    scheduler.submit(request("a", tenant="acme"), now=0.0)
    scheduler.submit(request("b"), now=0.25)
    batch = scheduler.next_step(now=1.0).batch
    block = StepOutcome(boundaries=(BlockBoundary(0, 1, 16),))
    scheduler.complete_step(batch, block, now=2.0)
    batch = scheduler.next_step(now=2.0).batch
    scheduler.fail_step(batch, RuntimeError(), rows={0: RowFate.RESTART}, now=3.0)
    batch = scheduler.next_step(now=3.5).batch
    ends = StepOutcome(finished=(RowFinished(0, FinishReason.EOS),))
    scheduler.complete_step(batch, ends, now=4.0)


# --- JSON lines


def test_a_life_is_read_back_from_the_lines():
    example = import_module("observe_jsonl")
    file, events = io.StringIO(), []
    lines = example.JsonLines(file)
    play(lambda event: (lines(event), events.append(event)))
    assert len(file.getvalue().splitlines()) == len(events) > 10
    for line, event in zip(file.getvalue().splitlines(), events, strict=True):
        assert json.loads(line)["event"] == type(event).__name__
    names = [type(event).__name__ for event in example.life(io.StringIO(file.getvalue()), "a")]
    assert names == [
        "RequestSubmitted",
        "RequestJoined",
        "BlockDone",
        "RequestPreempted",
        "RequestJoined",
        "RequestFinished",
    ]
    (refused,) = example.life(io.StringIO(file.getvalue()), "b")
    assert refused.reason == "queue_full"


def test_the_jsonl_example_runs(tmp_path, capsys):
    example = import_module("observe_jsonl")
    file = tmp_path / "events.jsonl"
    assert example.main([str(file), "--request", "r1"]) == 0
    events = [from_json(line) for line in file.read_text().splitlines()]
    ended = [event for event in events if isinstance(event, RequestFinished)]
    assert sorted(event.request_id for event in ended) == sorted(f"r{n}" for n in range(20))
    assert any(isinstance(event, RequestPreempted) for event in events), "the device was lost"
    printed = capsys.readouterr().out.splitlines()
    assert "RequestSubmitted" in printed[0]
    assert "RequestFinished" in printed[-1]


# --- OpenTelemetry


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider
    provider.shutdown()


S = 10**9


def test_a_span_has_what_happened_when(provider, exporter):
    example = import_module("observe_otel")
    spans = example.Spans(provider.get_tracer("test"), clock=lambda: 0.0)
    zero = spans._zero_ns
    play(spans)
    assert spans._spans == {}
    refused, span = exporter.get_finished_spans()
    assert refused.attributes["dllm.rejected"] == "queue_full"
    assert refused.attributes["dllm.request_id"] == "b"
    assert refused.start_time == refused.end_time == zero + S // 4
    assert (span.start_time - zero, span.end_time - zero) == (0, 4 * S)
    assert dict(span.attributes) == {
        "dllm.request_id": "a",
        "dllm.tenant": "acme",
        "dllm.prompt_len": 8,
        "dllm.max_new_tokens": 16,
        "dllm.finish_reason": "eos",
        "dllm.num_steps": 1,
        "dllm.num_blocks": 0,
    }
    told = [(one.name, one.timestamp - zero, dict(one.attributes)) for one in span.events]
    assert told == [
        ("joined", 1 * S, {"slot": 0, "step_id": 0}),
        ("block", 2 * S, {"blocks": 1, "steps": 1}),
        ("preempted", 3 * S, {"kept": False}),
        ("joined", 7 * S // 2, {"slot": 0, "step_id": 2}),
        ("finished", 4 * S, {"reason": "eos"}),
    ]
    assert span.status.status_code is trace.StatusCode.UNSET


def test_a_clients_span_is_the_parent(provider, exporter):
    example = import_module("observe_otel")
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("client") as client:
        context = trace.set_span_in_context(client)
        play(example.Spans(tracer, clock=lambda: 0.0, parent_of=lambda _: context))
    *requests, last = exporter.get_finished_spans()
    assert last.name == "client"
    assert [span.parent.span_id for span in requests] == [last.context.span_id] * 2


def test_the_otel_example_marks_the_row_that_failed(provider, exporter):
    import_module("observe_otel").serve(provider)
    spans = {span.attributes["dllm.request_id"]: span for span in exporter.get_finished_spans()}
    assert spans.keys() == {f"r{n}" for n in range(5)}
    failed = [name for name, span in spans.items() if not span.status.is_ok]
    assert failed == ["r2"]
    preempted = [
        name for name, span in spans.items() if any(e.name == "preempted" for e in span.events)
    ]
    assert len(preempted) == 2, "the rows of the step in which the device was lost"
