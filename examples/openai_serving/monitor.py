"""What operators see: who is in which slot, how fast, how long, and how an answer stands.

The driver's thread writes down what an ``Update`` brings, which is work for what changed and a
bounded memory; everything that costs is done in the event loop, and only while somebody looks.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from prometheus_client.core import CounterMetricFamily, Metric

from dllm_sched import DllmSchedError, FinishReason, Request, Scheduler, Update, events
from dllm_sched.runtime import AsyncDriver
from dllm_sched_hf import D2FEngine
from openai_serving.text import Text, provisional
from openai_serving.wire import ApiError

T = TypeVar("T")

PERIOD_S = 0.1  # between two frames
LOOK_S = 0.01  # between two looks at one answer
WINDOW_S = 10.0  # of rates
KEEP = 4096  # steps, endings and waits that are remembered, for rates and percentiles
KEEP_EVENTS = 2**13
DONE = (FinishReason.EOS, FinishReason.LENGTH)


class Step(NamedTuple):
    """A step as it was planned."""

    id: int
    at: float
    num_rows: int
    num_waiting: int  #: once it was planned
    joined: tuple[tuple[int, str], ...]  #: (slot, request id)


class Ended(NamedTuple):
    """A request that has ended."""

    id: str
    request: Request
    num_steps: int
    at: float
    reason: FinishReason
    latency_s: float
    waited_s: float | None  #: until its first step; None if it never ran
    tokens: tuple[int, ...]


class History:
    """An observer: what has become of whom lately, each as (kind, instant, id, value)."""

    def __init__(self) -> None:
        self.events: deque[tuple[str, float, str, Any]] = deque(maxlen=KEEP_EVENTS)
        self.count = 0  #: of all there ever were
        self.joined = (0, "")  #: how many have joined a slot, and who last

    def __call__(self, event: events.Event) -> None:
        """Write an event down if it is of these. O(1)."""
        match event:
            case events.RequestJoined(at, id, slot):
                told = ("join", at, id, slot)
                self.joined = (self.joined[0] + 1, id)
            case events.BlockDone(at, id, blocks):
                told = ("block", at, id, blocks)
            case events.PhaseChanged(at, id, phase):
                told = ("phase", at, id, phase.value)
            case events.RequestPreempted(at, id):
                told = ("preempt", at, id, None)
            case events.RequestFinished(at, id, reason):
                told = ("end", at, id, reason.value)
            case events.PolicySet(at, name) if at > -math.inf:  # but for the first one
                told = ("policy", at, name, None)
            case _:
                return
        self.count += 1
        self.events.append(told)


class Monitor:
    """Watches a driver. ``on_update`` belongs to the driver's thread, the rest to the loop.

    Args:
        scheduler: Of the driver.
        engine: Likewise.
        text: To show answers.
        history: An observer of the scheduler.
    """

    def __init__(
        self, scheduler: Scheduler, engine: D2FEngine, text: Text, history: History
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._text = text
        self._history = history
        self._run = uuid.uuid4().hex
        # Of the driver's thread:
        self._slots: dict[int, Request] = {}
        self._steps: deque[Step] = deque(maxlen=KEEP)
        self._ended: deque[Ended] = deque(maxlen=KEEP)
        self._num_ended = 0
        # Of the loop:
        self._driver: AsyncDriver
        self._first_tokens_s: deque[float] = deque(maxlen=KEEP)
        self.responses: Counter[tuple[str, int]] = Counter()  #: by path and status
        self.draining = False

    def attach(self, driver: AsyncDriver) -> None:
        """Name the driver whose ``on_update`` this is."""
        self._driver = driver

    # --- in the driver's thread

    def on_update(self, update: Update) -> None:
        """Write down what happened. O(changes)."""
        for gone in update.released:
            if gone.slot is not None:
                self._slots.pop(gone.slot, None)
        for one in update.finished:
            waited_s = None if one.admitted_at is None else one.admitted_at - one.arrived_at
            tokens = () if one.output is None else one.output.tokens
            latency_s = one.finished_at - one.arrived_at
            self._num_ended += 1
            self._ended.append(
                Ended(
                    one.request.id,
                    one.request,
                    one.num_steps,
                    one.finished_at,
                    one.reason,
                    latency_s,
                    waited_s,
                    tokens,
                )
            )
        batch = update.batch
        if batch is not None:
            joined = tuple((row.slot, row.request.id) for row in batch.joined)
            num_waiting = self._scheduler.num_waiting
            self._steps.append(
                Step(batch.step_id, batch.planned_at, len(batch.rows), num_waiting, joined)
            )
            for row in batch.joined:
                self._slots[row.slot] = row.request

    def _look(self, shown: str | None) -> dict[str, Any]:
        """Take a picture, between two steps. O(slots + KEEP), and O(answer) per text shown."""
        rows = []
        for slot, request in sorted(self._slots.items()):
            try:
                view = self._scheduler.view(request.id)
            except DllmSchedError:  # it has ended, and the step that it was in still runs
                continue
            row = {
                "slot": slot,
                "id": request.id,
                "group": request.group,
                "steps": view.num_steps,
                "blocks": view.num_blocks_done,
                "max_blocks": request.max_blocks,
                "block_length": request.block_length,
                "prompt_len": request.prompt_len,
                "phase": view.phase.value,
                "arrived_at": view.arrived_at,
                "admitted_at": view.admitted_at,
            }
            if shown in ("all", request.id, request.group):
                row["answer"] = self._progress(slot)
            rows.append(row)
        return {
            "policy": self._scheduler.policy.name,
            "max_num_seqs": self._scheduler.capacity.max_num_seqs,
            "counts": self._scheduler.counts(),
            "stats": self._scheduler.stats(),
            "rows": rows,
            "steps": tuple(self._steps),
            "ended": tuple(self._ended),
            "num_ended": self._num_ended,
            "events": tuple(self._history.events),
            "num_events": self._history.count,
        }

    def _look_at(self, request_id: str) -> dict[str, Any] | None:
        """One request, between two steps; None if nobody knows it. O(KEEP) once it has ended."""
        try:
            view = self._scheduler.view(request_id)
        except DllmSchedError:
            ended = next((one for one in reversed(self._ended) if one.id == request_id), None)
            if ended is None:
                return None
            return {
                "request": ended.request,
                "status": ended.reason.value,
                "steps": ended.num_steps,
                "committed": ended.tokens,
                "provisional": (),
                "latency_s": ended.latency_s,
            }
        answer = None if view.slot is None else self._progress(view.slot)
        return {
            "request": view.request,
            "status": view.status.value,
            "steps": view.num_steps,
            "committed": () if answer is None else answer.committed,
            "provisional": () if answer is None else answer.provisional,
            "latency_s": None,
        }

    def _progress(self, slot: int) -> Any:
        try:
            return self._engine.progress(slot)
        except DllmSchedError:  # it has a slot, and the step that it joins has not begun
            return None

    # --- in the loop

    def collect(self) -> Iterator[Metric]:
        """What Prometheus is told, beside what the scheduler's own observer tells."""
        family = CounterMetricFamily(
            "openai_server_responses",
            "Responses; 499: the client had hung up.",
            labels=["path", "status"],
        )
        for (path, status), count in sorted(self.responses.items()):
            family.add_metric([path, str(status)], count)
        yield family

    def first_tokens(self, seconds: float) -> None:
        """Note how long a stream waited for its first committed tokens."""
        self._first_tokens_s.append(seconds)

    async def state(self, shown: str | None = None) -> dict[str, Any]:
        """Everything, as JSON values.

        Args:
            shown: Whose answers come with it: the id of a request, of a group, ``all``, or None.

        Raises:
            ApiError: 503, if the driver has ended.
        """
        return self._state(await self._ask(self._look, shown))

    async def _ask(self, look: Callable[[Any], T], shown: str | None) -> T:
        try:
            return await self._driver.ask(look, shown)
        except Exception as error:  # what ended the run
            raise ApiError(503, "the engine is down", None, "engine_down") from error

    async def frames(self, shown: str | None = None) -> AsyncGenerator[dict[str, Any], None]:
        """The state every ``PERIOD_S``, with the steps and the endings since the last one.

        The first one has all the events that are remembered, the others those since the last one.
        Ends once the server drains, so that nobody who looks keeps it alive.
        """
        last_step, num_ended, num_events = -1, 0, 0
        first = True
        while not self.draining:
            seen = await self._ask(self._look, shown)
            frame = self._state(seen)
            fresh = [] if first else [step for step in seen["steps"] if step.id > last_step]
            count = 0 if first else min(seen["num_ended"] - num_ended, len(seen["ended"]))
            ended = seen["ended"][len(seen["ended"]) - count :]
            frame["steps"] = [step._asdict() for step in fresh]
            frame["ended"] = [self._shown_end(one, shown) for one in ended]
            count = min(seen["num_events"] - num_events, len(seen["events"]))
            frame["events"] = seen["events"][len(seen["events"]) - count :]
            first, num_ended, num_events = False, seen["num_ended"], seen["num_events"]
            last_step = seen["steps"][-1].id if seen["steps"] else -1
            yield frame
            await asyncio.sleep(PERIOD_S)

    async def answer(self, request_id: str | None) -> AsyncGenerator[dict[str, Any], None]:
        """How one request stands, whenever that has changed, until it has ended.

        Args:
            request_id: Its id; None: of whoever gets a slot next.

        Raises:
            LookupError: If nobody knows it, or no more.
        """
        told, before = None, self._history.joined
        while request_id is None and not self.draining:
            await asyncio.sleep(LOOK_S)
            if self._history.joined != before:
                request_id = self._history.joined[1]
        while not self.draining:
            seen = await self._ask(self._look_at, request_id)
            if seen is None:
                raise LookupError(f"request {request_id!r}: unknown, or ended too long ago")
            if seen != told:
                request = seen["request"]
                tokens = seen["committed"]
                yield {
                    **seen,
                    "request": request.id,
                    "prompt": None if told else self._text.decode(request.prompt),
                    "max_tokens": request.max_new_tokens,
                    "block_length": request.block_length,
                    "position": len(tokens),
                    "committed": self._text.decode(tokens),
                    "provisional": provisional(self._text.shown, seen["provisional"]),
                }
                told = seen
            if seen["latency_s"] is not None:
                return
            await asyncio.sleep(LOOK_S)  # looks come between steps: of longer ones none is missed

    def _shown_end(self, one: Ended, shown: str | None) -> dict[str, Any]:
        end = {
            "id": one.id,
            "at": one.at,
            "reason": one.reason.value,
            "latency_s": one.latency_s,
            "num_tokens": len(one.tokens),
        }
        if shown in ("all", one.id, one.id.rpartition(".")[0]):
            end["answer"] = {"committed": self._text.decode(one.tokens), "provisional": []}
        return end

    def _state(self, seen: dict[str, Any]) -> dict[str, Any]:
        """Turn a picture into JSON values."""
        now = self._driver.clock()
        counts, stats = seen["counts"], seen["stats"]
        rows: list[dict[str, Any] | None] = [None] * seen["max_num_seqs"]
        for row in seen["rows"]:
            answer = row.get("answer")
            if answer is not None:
                guess = provisional(self._text.shown, answer.provisional)
                committed = self._text.decode(answer.committed)
                row["answer"] = {"committed": committed, "provisional": guess}
            if row["slot"] < len(rows):  # the capacity may have been lowered
                rows[row["slot"]] = row
        recent = [one for one in seen["ended"] if one.at >= now - WINDOW_S]
        steps = [step for step in seen["steps"] if step.at >= now - WINDOW_S]
        done = [one for one in recent if one.reason in DONE]
        return {
            "run": self._run,
            "now": now,
            "policy": seen["policy"],
            "draining": self.draining,
            "max_num_seqs": seen["max_num_seqs"],
            "waiting": counts.waiting,
            "running": counts.running,
            "submitted": counts.submitted,
            "rejected": counts.rejected,
            "finished": counts.finished,
            "finished_by_reason": {
                reason.value: count for reason, count in stats.finished_by_reason.items()
            },
            "num_steps": stats.num_steps,
            "row_steps": stats.row_steps,
            "wasted_row_steps": stats.wasted_row_steps,
            "num_preempted": stats.num_preempted,
            "num_failed_steps": stats.num_failed_steps,
            "num_blocks": stats.num_blocks,
            "responses": [
                {"path": path, "status": status, "count": count}
                for (path, status), count in sorted(self.responses.items())
            ],
            "window_s": WINDOW_S,
            "steps_per_s": len(steps) / WINDOW_S,
            "requests_per_s": len(done) / WINDOW_S,
            "tokens_per_s": sum(len(one.tokens) for one in done) / WINDOW_S,
            "rows_per_step": sum(step.num_rows for step in steps) / len(steps) if steps else 0.0,
            "latency_s": percentiles(one.latency_s for one in done),
            "waited_s": percentiles(one.waited_s for one in done if one.waited_s is not None),
            "first_tokens_s": percentiles(self._first_tokens_s),
            "num_events": seen["num_events"],
            "slots": rows,
        }


def percentiles(values: Iterable[float]) -> dict[str, float | int | None]:
    """How many there are, and the smallest value that 50, 90 and 99 % of them do not exceed."""
    ordered = sorted(values)
    count = len(ordered)
    found: dict[str, float | int | None] = {"count": count}
    for percent in (50, 90, 99):
        at = max(0, math.ceil(percent / 100 * count) - 1)
        found[f"p{percent}"] = ordered[at] if ordered else None
    return found
