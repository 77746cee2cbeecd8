"""Every table checked against every other; behind ``Scheduler.check_invariants``."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from dllm_sched._running import Cohort
from dllm_sched.request import RequestStatus, RequestView

if TYPE_CHECKING:
    from dllm_sched.scheduler import Scheduler

__all__ = ["find_fault"]


def find_fault(scheduler: Scheduler) -> str | None:
    """Return the first broken invariant in words, or None. O(everything)."""
    waiting = list(scheduler._queue)
    zombies = [zombie[0] for zombie in scheduler._zombies]
    return (
        _conservation(scheduler, waiting)
        or _queue(scheduler, waiting)
        or _slots(scheduler, zombies)
        or _pages(scheduler, zombies)
        or _cohorts(scheduler)
        or _short_ways(scheduler)
        or _times(scheduler)
        or _empty(scheduler)
    )


def _conservation(scheduler: Scheduler, waiting: list[RequestView]) -> str | None:
    counts = scheduler.counts()
    if counts.submitted != counts.waiting + counts.running + counts.finished:
        return f"submitted != waiting + running + finished: {counts}"
    if len(scheduler._views) != counts.waiting + counts.running:
        return f"{len(scheduler._views)} active requests, but {counts}"
    ids = {id(view) for view in waiting} | {id(view) for view in scheduler._running.rows()}
    if ids != {id(view) for view in scheduler._views.values()}:
        return "an active request neither waits nor runs, or another does"
    return None


def _queue(scheduler: Scheduler, waiting: list[RequestView]) -> str | None:
    queue = scheduler._queue
    if len(waiting) != queue.size:
        return f"the queue counts {queue.size} but holds {len(waiting)}"
    if sum(key.size for key in queue.keys.values()) != queue.size:
        return "the batch_keys' counts do not add up to the queue's"
    if sum(lane.size for lane in queue.lanes.values()) != queue.size:
        return "the lanes' counts do not add up to the queue's"
    if any(lane.parked for lane in queue.lanes.values()):
        return "a lane is parked outside a round"
    lanes = queue.lanes.values()
    if any(len(lane.line) + len(lane.heap) != lane.size + lane.dead for lane in lanes):
        return "a lane does not know how many of its entries are dead"
    statuses = {RequestStatus.WAITING, RequestStatus.PREEMPTED}
    if any(view._status not in statuses or view._slot is not None for view in waiting):
        return "a waiting request is running or holds a slot"
    for lane in lanes:
        if any(one > other for one, other in pairwise(lane.line)):
            return f"the line of lane {lane.lane} is out of order"
        if queue._sole is None and lane.shown is not lane.first():
            return f"lane {lane.lane} lists {lane.shown}, not its first entry"
        if queue._sole is None and not any(entry is lane.shown for entry in queue._heads):
            return f"lane {lane.lane} is not among the heads"
    if len(queue._heads) > 2 * len(queue.lanes) + 65:
        return f"{len(queue._heads)} heads for {len(queue.lanes)} lanes"
    head = queue.peek()
    first = min((view._entry[:-1] for view in waiting), default=None)
    if (None if head is None else head._entry[:-1]) != first:
        return f"peek says {head!r}, but the smallest key is {first}"
    return None


def _slots(scheduler: Scheduler, zombies: list[RequestView]) -> str | None:
    running = scheduler._running
    rows = running.rows()
    if len(rows) != running.size:
        return f"{running.size} rows counted, {len(rows)} hold slots"
    if any(view._slot != slot for slot, view in enumerate(running.slots) if view is not None):
        return "a row does not know its slot"
    held = sum(view is not None for view in running.slots)
    if held != len(rows) + len(zombies):
        return f"{held} slots held by {len(rows)} rows and {len(zombies)} ended in flight"
    free = {
        slot
        for slot, view in enumerate(running.slots)
        if view is None and slot < running.capacity.max_num_seqs
    }
    if set(running.free_slots) != free or len(running.free_slots) != len(free):
        return "the free slots are not those that nobody holds"
    if scheduler._ahead is not None and scheduler._in_flight is None:
        return "a step is ahead of none"
    if zombies and scheduler._in_flight is None:
        return "slots are quarantined though no step is in flight"
    return None


def _pages(scheduler: Scheduler, zombies: list[RequestView]) -> str | None:
    running = scheduler._running
    capacity = running.capacity
    rows = running.rows()
    if running.tokens != sum(view._max_tokens for view in rows):
        return "the tokens in rows do not add up"
    if capacity.memory is None or capacity.num_pages is None:
        return None
    used = sum(view._num_pages for view in (*rows, *zombies))
    if capacity.num_pages - used != running.free_pages:
        return f"{used} pages held, {running.free_pages} free of {capacity.num_pages}"
    short = {id(view) for view in scheduler._short}
    for view in rows:
        if running.lacks(view) and id(view) not in short:
            return f"{view!r} lacks {running.lacks(view)} pages and nobody knows"
    return None


def _cohorts(scheduler: Scheduler) -> str | None:
    running = scheduler._running
    seen = 0
    for key, key_rows in running.keys.items():
        size = 0
        for phase, cohort in key_rows.cohorts.items():
            size += len(cohort.rows)
            if cohort.key_rows is not key_rows:
                return f"a cohort does not know that it is of batch_key {key!r}"
            if (cohort in running.stepping) != (cohort.clock is running.clock):
                return "a cohort follows the clock though it does not step, or the reverse"
            for index, row in enumerate(cohort.rows):
                view = running.slots[row.slot]
                if view is None or view._cohort is not cohort or view._index != index:
                    return f"{view!r} does not know its place"
                if (row.slot, row.request, row.phase) != (view._slot, view.request, phase):
                    return f"{view!r} stands as {row!r}"
                if view.request.batch_key != key or row.max_tokens != view._max_tokens:
                    return f"{view!r} stands among rows of {key!r} as {row!r}"
                if view.num_steps < 0:
                    return f"{view!r} has negative steps"
            if cohort.frozen() != tuple(cohort.rows):
                return "a cohort hands out stale rows"
            if cohort.next_limit() < cohort.steps:
                return "a row is past its step cap"
        if not size:
            return f"batch_key {key!r} has no rows left"
        seen += size
    if seen != running.size:
        return f"{running.size} rows, {seen} in cohorts"
    if list(running.turns) != [
        running.keys[key_rows.batch_key] for key_rows in running.turns
    ] or len(running.turns) != len(running.keys):
        return "the turns are not those of the running batch_keys"
    return None


def _short_ways(scheduler: Scheduler) -> str | None:
    """What lets ``next_step`` and ``complete_step`` look at nothing must never hold too long."""
    s = scheduler
    if s._quiet_until > s._wake_at:
        return f"quiet until {s._quiet_until}, though something changes at {s._wake_at}"
    if s._quiet_until != -math.inf and (s._dirty or s._running.untold or s._short or s._paused):
        return "quiet, though something is to be decided"
    if s._in_flight is not None and s._stop_step > min(s._limit_step, s._recheck_step):
        return f"no step is looked at before {s._stop_step}, though a decision may change"
    if s._stop_step != -math.inf and (s._zombies or s._flight_views is not None):
        return "no step is looked at, though each must be"
    if any(view._status is not RequestStatus.RUNNING for view in s._running.untold):
        return "somebody who left is still to be named as joined"
    if s._counted_steps > s._clock.steps:
        return "more steps are counted than were completed"
    return None


def _times(scheduler: Scheduler) -> str | None:
    live = {entry[2] for entry in scheduler._expiries.heap if entry[2]._expire_at == entry[0]}
    for view in scheduler._views.values():
        if view._expire_at != math.inf and view not in live:
            return f"{view!r} ends at {view._expire_at} and no timer knows"
        if view._status is RequestStatus.RUNNING and not isinstance(view._cohort, Cohort):
            return f"{view!r} runs in no cohort"
    return None


def _empty(scheduler: Scheduler) -> str | None:
    if scheduler._views or scheduler._zombies:
        return None
    queue = scheduler._queue
    if any(lane is not queue._sole or lane.first() for lane in queue.lanes.values()):
        return f"nothing is active, but lanes are left: {queue.lanes!r}"
    arrivals = any(key.arrivals or key.returned for key in queue.keys.values())
    if arrivals or len(queue.keys) > len(queue.lanes):
        return f"nothing is active, but batch_keys are left: {queue.keys!r}"
    left = {
        "batch_keys running": scheduler._running.keys,
        "turns": scheduler._running.turns,
    }
    for name, table in left.items():
        if table:
            return f"nothing is active, but {name} still hold {table!r}"
    if scheduler._running.free_pages != (scheduler.capacity.num_pages or 0):
        return "nothing is active, but pages are missing"
    return None
