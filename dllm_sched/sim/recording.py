"""What observers write down, in virtual time or live: slots, queue and memory, steps, cohorts.

Each recorder is a callable for ``observers=[...]``. Each is made of events alone, O(1) per event
(amortised), and keeps no more than it was told to, however long the run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from dllm_sched.capacity import Capacity
from dllm_sched.errors import ConfigError
from dllm_sched.events import (
    BlockDone,
    Event,
    RequestFinished,
    RequestJoined,
    RequestPreempted,
    RequestSubmitted,
    StepCompleted,
)
from dllm_sched.request import Request
from dllm_sched.theory._check import is_number, not_negative, whole

__all__ = ["Cohorts", "QueueTrace", "Sample", "SlotTimeline", "Span", "StepHistogram"]

_INF = math.inf


class Span(NamedTuple):
    """One stay of a request in a slot."""

    slot: int
    request_id: str
    from_s: float
    to_s: float  #: ``inf``: it was still there when the recording ended
    why: str  #: how it ended: a finish reason, ``preempted``, or ``running``


class SlotTimeline:
    """Who held which slot from when to when.

    Args:
        from_s: Forget stays that ended before this instant, seconds.
        until_s: Take no joins after this instant, seconds.
        max_spans: Take no joins after so many stays, >= 1.

    Attributes:
        complete_until_s: Up to this instant nothing is missing, seconds.
    """

    def __init__(
        self, *, from_s: float = 0.0, until_s: float = _INF, max_spans: int = 10_000
    ) -> None:
        not_negative(from_s=from_s)
        whole(max_spans=max_spans)
        if not is_number(until_s) or not until_s > from_s:
            raise ConfigError(f"until_s must be later than from_s = {from_s!r}, got {until_s!r}")
        self.from_s = from_s
        self.until_s = until_s
        self.max_spans = max_spans
        self.complete_until_s = _INF
        self._ended: list[Span] = []
        self._open: dict[str, tuple[int, float]] = {}

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, RequestJoined):
            room = len(self._ended) + len(self._open) < self.max_spans
            if room and event.at <= self.until_s and self.complete_until_s == _INF:
                self._open[event.request_id] = (event.slot, event.at)
            elif self.complete_until_s == _INF:
                self.complete_until_s = event.at
        elif isinstance(event, RequestFinished):
            self._end(event.request_id, event.at, event.reason.value)
        elif isinstance(event, RequestPreempted):
            self._end(event.request_id, event.at, "preempted")

    def _end(self, request_id: str, at: float, why: str) -> None:
        stay = self._open.pop(request_id, None)
        if stay is not None and at >= self.from_s:
            self._ended.append(Span(stay[0], request_id, stay[1], at, why))

    @property
    def spans(self) -> list[Span]:
        """All stays in order of their start, those that have not ended included. O(n log n)."""
        running = (
            Span(slot, request_id, at, _INF, "running")
            for request_id, (slot, at) in self._open.items()
        )
        return sorted([*self._ended, *running], key=lambda span: (span.from_s, span.slot))


class Sample(NamedTuple):
    """A stretch of time: means over it, and the largest value in it."""

    from_s: float
    to_s: float
    waiting: float  #: mean number of requests in the queue
    waiting_max: int
    rows: float  #: mean number of requests that hold a slot
    pages: float  #: mean number of KV pages held; 0 without a memory model
    pages_max: int


class QueueTrace:
    """Queue length, rows and KV pages over time, exact in the mean however coarse.

    Counts are constant between events, pages are counted as the scheduler does. Stretches of
    ``stride`` changes become one sample; when there are ``max_samples``, neighbours are merged and
    the stride doubles: memory stays flat.

    Args:
        capacity: Its memory model, if any, says what a row holds.
        max_samples: >= 2.
    """

    def __init__(self, capacity: Capacity | None = None, *, max_samples: int = 2000) -> None:
        whole(2, max_samples=max_samples)
        self._memory = None if capacity is None else capacity.memory
        self._most = max_samples
        self._stride = 1
        self._samples: list[Sample] = []
        self._requests: dict[str, Request] = {}  # all that are active, if memory is counted
        self._kv_tokens: dict[str, int] = {}
        self._held: dict[str, int] = {}  # pages of each row
        self._waiting = self._pages = 0
        self._now = 0.0
        self._started = False
        # The open stretch: start, changes, integrals, maxima.
        self._from = 0.0
        self._changes = 0
        self._sums = [0.0, 0.0, 0.0]
        self._waiting_max = self._pages_max = 0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, RequestSubmitted):
            self._pass_time(event.at)
            self._waiting += 1
            if self._memory is not None:
                self._requests[event.request.id] = event.request
        elif isinstance(event, RequestJoined):
            self._pass_time(event.at)
            self._waiting -= 1
            self._hold(event.request_id)
        elif isinstance(event, BlockDone):
            self._pass_time(event.at)
            self._kv_tokens[event.request_id] = event.kv_tokens
            self._hold(event.request_id)
        elif isinstance(event, RequestPreempted):
            self._pass_time(event.at)
            self._pages -= self._held.pop(event.request_id, 0)
            self._waiting += 1
            if not event.kept:
                self._kv_tokens.pop(event.request_id, None)
        elif isinstance(event, RequestFinished):
            self._pass_time(event.at)
            if event.request_id in self._held:
                self._pages -= self._held.pop(event.request_id)
            else:
                self._waiting -= 1
            self._requests.pop(event.request_id, None)
            self._kv_tokens.pop(event.request_id, None)

    def _hold(self, request_id: str) -> None:
        """Book the pages of a row anew."""
        pages = 0
        if self._memory is not None:
            request = self._requests[request_id]
            tokens = self._kv_tokens.get(request_id, request.prompt_len)
            pages = self._memory.pages(request, tokens)
        held = self._held.get(request_id, 0)
        self._held[request_id] = max(held, pages)  # what a row holds it keeps
        self._pages += max(pages - held, 0)

    def _pass_time(self, at: float) -> None:
        if not self._started:
            self._started = True
            self._from = self._now = at
        lasted = at - self._now
        if lasted <= 0:
            return
        self._now = at
        sums = self._sums
        sums[0] += lasted * self._waiting
        sums[1] += lasted * len(self._held)
        sums[2] += lasted * self._pages
        self._waiting_max = max(self._waiting_max, self._waiting)
        self._pages_max = max(self._pages_max, self._pages)
        self._changes += 1
        if self._changes >= self._stride:
            self._samples.append(self._sample())
            self._from = at
            self._changes = 0
            self._sums = [0.0, 0.0, 0.0]
            self._waiting_max = self._pages_max = 0
            if len(self._samples) >= self._most:
                self._merge()

    def _sample(self) -> Sample:
        lasted = self._now - self._from
        waiting, rows, pages = (total / lasted for total in self._sums)
        return Sample(
            self._from, self._now, waiting, self._waiting_max, rows, pages, self._pages_max
        )

    def _merge(self) -> None:
        samples = self._samples
        merged = [_merged(*samples[i : i + 2]) for i in range(0, len(samples) - 1, 2)]
        self._samples = merged + samples[len(samples) // 2 * 2 :]
        self._stride *= 2

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples in order of time; they leave no gap."""
        yield from self._samples
        if self._changes:
            yield self._sample()


def _merged(left: Sample, right: Sample) -> Sample:
    before, after = left.to_s - left.from_s, right.to_s - right.from_s
    share = before / (before + after)
    return Sample(
        left.from_s,
        right.to_s,
        share * left.waiting + (1 - share) * right.waiting,
        max(left.waiting_max, right.waiting_max),
        share * left.rows + (1 - share) * right.rows,
        share * left.pages + (1 - share) * right.pages,
        max(left.pages_max, right.pages_max),
    )


class StepHistogram:
    """How many steps requests took, and how many rows steps had.

    Attributes:
        steps: Steps of a request -> how many requests that ran ended after so many.
        rows: Rows of a step -> how many steps had so many.
    """

    def __init__(self) -> None:
        self.steps: Counter[int] = Counter()
        self.rows: Counter[int] = Counter()

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, StepCompleted):
            self.rows[event.num_rows] += event.steps
        elif isinstance(event, RequestFinished) and event.admitted_at is not None:
            self.steps[event.num_steps] += 1

    @property
    def rows_mean(self) -> float:
        """Mean rows of a step; nan before the first."""
        total = self.rows.total()
        return sum(n * k for n, k in self.rows.items()) / total if total else math.nan


class Cohorts:
    """How far the rows run in step with each other: 1 = all joined together, 1 / rows = nobody did.

    A cohort is the rows that joined at the same step. Large cohorts grow, and leave, together:
    memory that grows with the rows' age then swings (``theory.congestion``).
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # step -> rows that joined with it and are still there
        self._number: Counter[int] = Counter()  # size -> how many cohorts have it
        self._of: dict[str, int] = {}
        self._largest = 0
        self._steps = 0
        self._sum = 0.0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, RequestJoined):
            self._of[event.request_id] = event.step_id
            self._change(event.step_id, 1)
        elif isinstance(event, RequestFinished | RequestPreempted):
            step_id = self._of.pop(event.request_id, None)
            if step_id is not None:
                self._change(step_id, -1)
        elif isinstance(event, StepCompleted) and self._of:
            self._steps += event.steps
            self._sum += event.steps * self.now

    def _change(self, step_id: int, by: int) -> None:
        before = self._sizes.get(step_id, 0)
        size = before + by
        if before:
            self._number[before] -= 1
        if size:
            self._sizes[step_id] = size
            self._number[size] += 1
        else:
            del self._sizes[step_id]
        if size > self._largest:
            self._largest = size
        elif before == self._largest and not self._number[before]:
            self._largest = size  # it was the only one so large, and is now one smaller

    @property
    def now(self) -> float:
        """The largest cohort's share of the rows, 0 if there are none. O(1)."""
        return self._largest / len(self._of) if self._of else 0.0

    @property
    def mean(self) -> float:
        """Mean share over all steps so far; nan before the first. O(1)."""
        return self._sum / self._steps if self._steps else math.nan
