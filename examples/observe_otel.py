"""OpenTelemetry: a span for each request, with its joins, block boundaries and preemptions.

    pip install opentelemetry-sdk
    python examples/observe_otel.py

A span begins with the submission, whose client's own span can be its parent, and ends with the
request. Spans are exported by a thread of the SDK's (``BatchSpanProcessor``), so that the scheduler
does not wait for a collector.
"""

from __future__ import annotations

import sys
import time

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

from dllm_sched import Capacity, FinishReason, Request, Scheduler, presets
from dllm_sched.events import (
    BlockDone,
    Event,
    RequestFinished,
    RequestJoined,
    RequestPreempted,
    RequestRejected,
    RequestSubmitted,
)
from dllm_sched.runtime import Driver, MonotonicClock
from dllm_sched.testing import FakeEngine


class Spans:
    """An observer that keeps a span for each active request. O(1) per event.

    Args:
        tracer: Where the spans begin.
        clock: The scheduler's; its seconds become the SDK's nanoseconds since 1970.
        parent_of: (request) -> the OpenTelemetry context of whoever sent it, or None.
    """

    def __init__(self, tracer, clock, parent_of=lambda _: None):
        self._tracer = tracer
        self._zero_ns = time.time_ns() - round(clock() * 1e9)
        self._parent_of = parent_of
        self._spans = {}

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, RequestSubmitted | RequestRejected):
            self._begin(event)
        elif isinstance(event, RequestJoined):
            self._add(event, "joined", slot=event.slot, step_id=event.step_id)
        elif isinstance(event, BlockDone):
            self._add(event, "block", blocks=event.num_blocks_done, steps=event.num_steps)
        elif isinstance(event, RequestPreempted):
            self._add(event, "preempted", kept=event.kept)
        elif isinstance(event, RequestFinished):
            self._end(event)

    def _ns(self, at):
        return self._zero_ns + round(at * 1e9)

    def _begin(self, event):
        request = event.request
        span = self._tracer.start_span(
            "dllm request",
            context=self._parent_of(request),
            start_time=self._ns(event.at),
            attributes={
                "dllm.request_id": request.id,
                "dllm.tenant": request.tenant,
                "dllm.prompt_len": request.prompt_len,
                "dllm.max_new_tokens": request.max_new_tokens,
            },
        )
        if isinstance(event, RequestRejected):
            span.set_attribute("dllm.rejected", event.reason)
            span.end(self._ns(event.at))
        else:
            self._spans[request.id] = span

    def _add(self, event, name, **attributes):
        self._spans[event.request_id].add_event(name, attributes, self._ns(event.at))

    def _end(self, event):
        self._add(event, "finished", reason=event.reason.value)
        span = self._spans.pop(event.request_id)
        span.set_attribute("dllm.finish_reason", event.reason.value)
        span.set_attribute("dllm.num_steps", event.num_steps)
        span.set_attribute("dllm.num_blocks", event.num_blocks_done)
        if event.reason is FinishReason.ERROR:
            span.set_status(trace.StatusCode.ERROR)
        span.end(self._ns(event.at))


def serve(provider):
    """Serve five requests; the device is lost once, and one row fails alone."""
    clock = MonotonicClock()
    engine = FakeEngine(2, fail_at={3: RuntimeError("device lost")}, poison={"r2": 2})
    scheduler = Scheduler(
        policy=presets.continuous(2),
        capacity=Capacity(max_num_seqs=2),
        observers=[Spans(provider.get_tracer("dllm_sched"), clock)],
    )
    Driver(scheduler, engine, clock).run(
        (0.0, Request(f"r{number}", prompt_len=20, max_new_tokens=64, block_length=16))
        for number in range(5)
    )


def main():
    """Print the spans of a run."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter()))
    serve(provider)
    provider.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
