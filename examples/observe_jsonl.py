"""Every event of a run on a line of JSON, and a request's life read back from them.

    python examples/observe_jsonl.py events.jsonl
    python examples/observe_jsonl.py events.jsonl --request r7

An observer is called in the scheduler's thread, after the call has been carried out: it should be
quick. To a disk that is slow write from a thread of your own, with a queue in between.
(``dllm_sched.journal`` is another thing: it holds the calls too, and can be replayed.)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dllm_sched import Capacity, Request, Scheduler, presets
from dllm_sched.events import Event, RequestRejected, RequestSubmitted, from_json, to_json
from dllm_sched.runtime import Driver, VirtualClock
from dllm_sched.testing import FakeEngine


class JsonLines:
    """An observer that writes to a text file."""

    def __init__(self, file):
        self._file = file

    def __call__(self, event: Event) -> None:
        """Write an event. A request's payload is not written."""
        self._file.write(to_json(event) + "\n")


def life(lines, request_id):
    """The events that are about one request, in order."""
    for line in lines:
        event = from_json(line)
        about = getattr(event, "request_id", None)
        if isinstance(event, RequestSubmitted | RequestRejected):
            about = event.request.id
        if about == request_id:
            yield event


def serve(path):
    """Serve twenty requests in virtual time; the device is lost once."""
    clock = VirtualClock()
    engine = FakeEngine(
        4, service_s=lambda _: 0.02, clock=clock, fail_at={9: RuntimeError("device lost")}
    )
    with path.open("w", encoding="utf-8") as file:
        scheduler = Scheduler(
            policy=presets.continuous(4),
            capacity=Capacity(max_num_seqs=4),
            observers=[JsonLines(file)],
        )
        Driver(scheduler, engine, clock).run(
            (0.1 * number, Request(f"r{number}", prompt_len=20, max_new_tokens=64))
            for number in range(20)
        )


def main(argv=None):
    """Write a run's events, and print one request's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="where the events go")
    parser.add_argument("--request", default="r3", help="whose life is printed")
    options = parser.parse_args(argv)
    serve(options.file)
    with options.file.open(encoding="utf-8") as lines:
        for event in life(lines, options.request):
            fields = {k: v for k, v in event._asdict().items() if k not in ("at", "request_id")}
            print(f"{event.at:8.3f} {type(event).__name__:16} {fields}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
