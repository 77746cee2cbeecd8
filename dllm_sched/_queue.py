"""The waiting queue: lanes of flat entries, O(log n), with lazy deletion.

An entry is ``(*key, sequence, view)``. Keys are numbers of one length, sequence numbers are
unique, so a comparison never reaches the view.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from dllm_sched.request import Request, RequestStatus, RequestView
from dllm_sched.view import Lane

__all__ = ["KeyQueue", "LaneQueue", "LazyHeap", "WaitingQueue"]

Entry = tuple[Any, ...]

_FINISHED = RequestStatus.FINISHED
_SMALL = 64  # heaps below this size are not worth compacting


class LaneQueue:
    """The waiting requests of one lane.

    ``line`` takes the entries that come in order, as all do under first come, first served; the
    ``heap`` takes the others. The first of the lane is the lesser of the first of both.
    """

    __slots__ = ("dead", "heap", "key_queue", "lane", "line", "parked", "shown", "size")

    def __init__(self, lane: Lane, key_queue: KeyQueue) -> None:
        self.lane = lane
        self.key_queue = key_queue
        self.line: deque[Entry] = deque()  # sorted; the first entry is always a live one
        self.heap: list[Entry] = []  # and so is this one's
        self.dead = 0  # entries whose request was discarded
        self.shown: Entry | None = None  # its entry among the heads: its first, if not parked
        self.size = 0  # live entries
        self.parked = False

    def first(self) -> Entry | None:
        """The first entry. O(1)."""
        line, heap = self.line, self.heap
        if not heap:
            return line[0] if line else None
        return line[0] if line and line[0] < heap[0] else heap[0]

    def sweep(self) -> None:
        """Drop every dead entry. O(n)."""
        self.line = deque([entry for entry in self.line if entry[-1]._entry is entry])
        self.heap = [entry for entry in self.heap if entry[-1]._entry is entry]
        heapify(self.heap)
        self.dead = 0


class KeyQueue:
    """What is waiting under one batch_key: the unit that a batch starts from."""

    __slots__ = ("arrivals", "batch_key", "lanes", "returned", "size")

    def __init__(self, batch_key: Hashable) -> None:
        self.batch_key = batch_key
        self.size = 0
        self.lanes: dict[Lane, LaneQueue] = {}
        # by arrival, those who left included: in order, and the heap of who came back
        self.arrivals: deque[RequestView] = deque()
        self.returned: list[tuple[int, RequestView]] = []

    def note_arrival(self, view: RequestView) -> None:
        """Keep the order of arrival. O(1), O(log n) for a request that ran before."""
        arrivals = self.arrivals
        if not arrivals or arrivals[-1]._sequence < view._sequence:
            arrivals.append(view)
        else:
            heappush(self.returned, (view._sequence, view))

    def forget_arrivals(self) -> None:
        """Drop those who left, once they prevail. Amortised O(1)."""
        arrivals, returned = self.arrivals, self.returned
        if not self.size:
            arrivals.clear()
            returned.clear()
        elif len(arrivals) + len(returned) > max(_SMALL, 2 * self.size):
            self.arrivals = deque([view for view in arrivals if view._lane is not None])
            self.returned = [one for one in returned if one[1]._lane is not None]
            heapify(self.returned)

    def oldest_arrival_at(self) -> float:
        """Arrival instant of the oldest request, ``inf`` if none. Amortised O(log n)."""
        arrivals, returned = self.arrivals, self.returned
        while arrivals and arrivals[0]._lane is None:
            arrivals.popleft()
        while returned and returned[0][1]._lane is None:
            heappop(returned)
        oldest = arrivals[0]._arrived_at if arrivals else math.inf
        return min(oldest, returned[0][1]._arrived_at) if returned else oldest


class WaitingQueue:
    """Lanes in one total order.

    ``heads`` lists each lane's first entry; one that its lane no longer shows is skipped when it
    comes up. So a round costs O(log n) per head it looks at, however many lanes there are.
    A lane that is alone (``sole``, the common case) needs no heads: its own heap is the order. It
    stays open when it is empty, until another one opens; all others close then.
    """

    __slots__ = ("_by_class", "_heads", "_sole", "_track_arrivals", "keys", "lanes", "size")

    def __init__(self, *, by_class: bool, track_arrivals: bool) -> None:
        self._by_class = by_class
        self._track_arrivals = track_arrivals
        self._heads: list[Entry] = []
        self._sole: LaneQueue | None = None
        self.lanes: dict[Lane, LaneQueue] = {}
        self.keys: dict[Hashable, KeyQueue] = {}
        self.size = 0

    def push(self, view: RequestView, key: tuple[float, ...]) -> None:
        """Add a request under its sort key. O(log n)."""
        lane = self._sole
        if lane is None or self._by_class or view.request.batch_key is not lane.lane[1]:
            lane = self._lane_of(view.request)
        entry: Entry = (*key, view._sequence, view) if key else (view._sequence, view)
        view._lane = lane
        view._entry = entry
        line = lane.line
        if line and entry < line[-1]:
            heappush(lane.heap, entry)
        else:
            line.append(entry)
        lane.size += 1
        lane.key_queue.size += 1
        self.size += 1
        if self._sole is None and lane.first() is entry:
            self._refresh(lane)
        if self._track_arrivals:
            lane.key_queue.note_arrival(view)

    def _lane_of(self, request: Request) -> LaneQueue:
        """The lane of a request. Without lanes declared there is one per batch_key."""
        lane_id = (request.request_class if self._by_class else "", request.batch_key)
        return self.lanes.get(lane_id) or self._open(lane_id)

    def _open(self, lane_id: Lane) -> LaneQueue:
        sole = self._sole
        if sole is not None and not sole.size:
            self._sole = None
            self._close(sole)
        key_queue = self.keys.get(lane_id[1])
        if key_queue is None:
            key_queue = self.keys[lane_id[1]] = KeyQueue(lane_id[1])
        lane = LaneQueue(lane_id, key_queue)
        self.lanes[lane_id] = key_queue.lanes[lane_id] = lane
        self._see_whether_sole()
        return lane

    def _see_whether_sole(self) -> None:
        """Go over to heads when a second lane opens, and back when one is left."""
        lanes = self.lanes
        if len(lanes) <= 1:
            self._sole = next(iter(lanes.values()), None)
            self._heads = []
            if self._sole is not None:
                self._sole.shown = None
        elif self._sole is not None:
            self._sole = None
            for lane in lanes.values():
                self._refresh(lane)

    def peek(self, only: KeyQueue | None = None) -> RequestView | None:
        """The first request in the total order among lanes that are not parked. O(log n).

        Args:
            only: Look at the lanes of this batch_key alone. O(its lanes).
        """
        sole = self._sole
        if sole is not None:
            line = sole.line
            if not sole.heap and not sole.parked:
                return line[0][-1] if line else None
            first = None if sole.parked else sole.first()
            return None if first is None else first[-1]
        if only is not None:
            lanes = [lane.first() for lane in only.lanes.values() if not lane.parked]
            firsts = [first for first in lanes if first is not None]
            head: RequestView | None = min(firsts)[-1] if firsts else None
            return head
        heads = self._heads
        while heads:
            entry = heads[0]
            view: RequestView = entry[-1]
            lane: LaneQueue | None = view._lane
            if lane is not None and lane.shown is entry:
                return view
            heappop(heads)
        return None

    def pop(self, view: RequestView) -> None:
        """Take the request that ``peek`` just returned out of its heap. O(log n).

        It stays counted until ``settle_pops`` or comes back by ``restore``.
        """
        lane: LaneQueue = view._lane
        line = lane.line
        if line and line[0] is view._entry:
            line.popleft()
        else:
            heappop(lane.heap)
        if lane.dead or self._sole is None:
            self._refresh(lane)

    @property
    def is_one_lane(self) -> bool:
        """Whether everybody waits in the same lane."""
        return self._sole is not None

    def take(self, count: float) -> list[RequestView]:
        """Take the first requests, so many or all there are, where there is but one lane.

        For lanes whose arrivals are not tracked. ``peek``, ``pop`` and ``settle_pops`` in one.
        O(log n) for each, O(1) in order of arrival.
        """
        lane = self._sole
        views: list[RequestView] = []
        if lane is None:
            return views
        line = lane.line
        if not lane.heap and not lane.dead:
            while line and count > 0:
                views.append(line.popleft()[-1])
                count -= 1
        else:
            while len(views) < count and (view := self.peek()) is not None:
                self.pop(view)
                views.append(view)
        taken = len(views)
        lane.size -= taken
        lane.key_queue.size -= taken
        self.size -= taken
        return views

    def put_back(self, views: Sequence[RequestView]) -> None:
        """Undo ``take``. O(log n) for each."""
        for view in views:
            lane: LaneQueue = view._lane
            lane.size += 1
            lane.key_queue.size += 1
            self.size += 1
            self.restore(view)

    def _refresh(self, lane: LaneQueue) -> None:
        """Drop dead entries from the top of a lane and list its first live one among the heads.

        To be called whenever a lane's first entry may have changed: ``shown`` is what is listed.
        """
        line, heap = lane.line, lane.heap
        while line and line[0][-1]._entry is not line[0]:
            line.popleft()
            lane.dead -= 1
        while heap and heap[0][-1]._entry is not heap[0]:
            heappop(heap)
            lane.dead -= 1
        first = None if lane.parked else lane.first()
        if self._sole is None and lane.shown is not first:
            lane.shown = first
            if first is not None:
                heads = self._heads
                heappush(heads, first)
                if len(heads) > _SMALL and len(heads) > 2 * len(self.lanes):
                    self._heads = [one.shown for one in self.lanes.values() if one.shown]
                    heapify(self._heads)

    def restore(self, view: RequestView) -> None:
        """Undo ``pop``. O(log n)."""
        lane: LaneQueue = view._lane
        entry = view._entry
        if not lane.line or entry < lane.line[0]:
            lane.line.appendleft(entry)  # where it came from, most likely
        else:
            heappush(lane.heap, entry)
        self._refresh(lane)

    def settle_pops(self, views: Sequence[RequestView]) -> None:
        """Make the ``pop`` of each final. O(1) for each; in one lane, O(1) for all."""
        sole, count = self._sole, len(views)
        self.size -= count
        if sole is not None:
            sole.size -= count
            sole.key_queue.size -= count
            if self._track_arrivals:
                for view in views:
                    view._lane = None
                key_queue = sole.key_queue
                if key_queue.returned or len(key_queue.arrivals) > 2 * key_queue.size:
                    key_queue.forget_arrivals()
            return
        for view in views:
            lane: LaneQueue = view._lane
            key_queue = lane.key_queue
            view._lane = view._entry = None
            lane.size -= 1
            key_queue.size -= 1
            if self._track_arrivals:
                key_queue.forget_arrivals()
            if not lane.size and not lane.parked:
                self._close(lane)

    def discard(self, view: RequestView) -> None:
        """Remove a waiting request that was not popped. Amortised O(log n), deleted lazily."""
        lane: LaneQueue = view._lane
        entry = view._entry
        self.settle_pops((view,))
        view._lane = view._entry = None
        lane.dead += 1
        if lane.size == 0:
            lane.line.clear()
            lane.heap.clear()
            lane.dead = 0
            lane.shown = None
        elif (lane.line and lane.line[0] is entry) or (lane.heap and lane.heap[0] is entry):
            self._refresh(lane)
        elif lane.dead > _SMALL and lane.dead > lane.size:
            lane.sweep()

    def _close(self, lane: LaneQueue) -> None:
        if lane is self._sole:
            return
        key_queue = lane.key_queue
        del self.lanes[lane.lane]
        del key_queue.lanes[lane.lane]
        if not key_queue.lanes:
            del self.keys[key_queue.batch_key]
        self._see_whether_sole()

    def park(self, lane: LaneQueue) -> None:
        """Leave a lane out of ``peek`` until ``unpark``. O(1)."""
        lane.parked = True
        lane.shown = None

    def unpark(self, lane: LaneQueue) -> None:
        """Bring a parked lane back. O(log n)."""
        lane.parked = False
        if lane.size == 0:
            self._close(lane)
        else:
            self._refresh(lane)

    def by_lane(self) -> dict[Lane, int]:
        """Waiting requests per lane, of those that have any. O(lanes)."""
        return {lane_id: lane.size for lane_id, lane in self.lanes.items() if lane.size}

    def waiting_keys(self) -> list[KeyQueue]:
        """The batch_keys under which anybody waits. O(batch_keys)."""
        return [key for key in self.keys.values() if key.size]

    def __iter__(self) -> Iterator[RequestView]:
        """Every waiting request, in no order. O(n): for policy swaps and checks only."""
        for lane in self.lanes.values():
            for entries in (lane.line, lane.heap):
                for entry in entries:
                    if entry[-1]._entry is entry:
                        yield entry[-1]


class LazyHeap:
    """Instants with lazy deletion: an entry counts while its request still names that instant."""

    __slots__ = ("_current", "_live", "heap")

    def __init__(self, current: Callable[[RequestView], float]) -> None:
        self._current = current
        self.heap: list[tuple[float, int, RequestView]] = []  # stale entries included
        self._live = _SMALL

    def push(self, instant: float, view: RequestView) -> None:
        """Add an instant. Amortised O(log n): stale entries are dropped when they prevail."""
        heap = self.heap
        heappush(heap, (instant, view._sequence, view))
        if len(heap) > 2 * self._live:
            self.heap = [e for e in heap if self._is_live(e)]
            heapify(self.heap)
            self._live = max(_SMALL, len(self.heap))

    def _is_live(self, entry: tuple[float, int, RequestView]) -> bool:
        view = entry[2]
        return view._status is not _FINISHED and self._current(view) == entry[0]

    def first(self) -> float:
        """The earliest live instant, ``inf`` if none. Amortised O(log n)."""
        heap = self.heap
        while heap:
            if self._is_live(heap[0]):
                return heap[0][0]
            heappop(heap)
        return math.inf

    def pop_due(self, now: float) -> list[RequestView]:
        """Take every request whose instant is at or before ``now``, each once, in time order."""
        due: list[RequestView] = []
        heap = self.heap
        while heap and heap[0][0] <= now:
            entry = heappop(heap)
            if self._is_live(entry) and (not due or due[-1] is not entry[2]):
                due.append(entry[2])
        return due

    def __iter__(self) -> Iterator[tuple[float, int, RequestView]]:
        """Every entry, stale ones included, in no order."""
        return iter(self.heap)
