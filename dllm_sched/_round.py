"""One admission round, staged: who joins, decided without changing anything that stays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dllm_sched._asking import Asking
from dllm_sched._queue import KeyQueue, LaneQueue, WaitingQueue
from dllm_sched._running import RunningSet
from dllm_sched.batch import Knobs
from dllm_sched.errors import InvariantError, PolicyError
from dllm_sched.policies.base import Verdict
from dllm_sched.request import RequestView
from dllm_sched.view import BlockedBy, Round, SchedulerView

__all__ = ["Staged", "stage_round"]

_INF = math.inf
_ADMIT = Verdict.ADMIT
_SKIPS_PER_ROUND = 8


class Staged:
    """What a round decided; the scheduler carries it out."""

    __slots__ = (
        "blocked",
        "due_at",
        "hopeless",
        "knobs",
        "limits",
        "recheck",
        "state",
        "views",
        "waits_for_next_round",
    )

    def __init__(self) -> None:
        self.views: list[RequestView] = []  # who joins, in order
        self.limits: list[tuple[float, float]] | None = None  # (instant, steps) of each, if asked
        self.knobs: list[tuple[Knobs, float]] | None = None  # and (knobs, until)
        self.state: Any = None  # admission's
        self.recheck = _INF
        self.due_at = _INF  # when the first batch_key held back is due
        self.blocked: tuple[RequestView, BlockedBy] | None = None  # the head that stays, and why
        self.hopeless: RequestView | None = None  # can never fit the capacity any more
        self.waits_for_next_round = False  # batch_keys held back may join running rows


def stage_round(
    asking: Asking,
    queue: WaitingQueue,
    running: RunningSet,
    round: Round | None,
    max_rows: float,
    now: float,
    counts_of: Callable[[float, KeyQueue], SchedulerView],
) -> Staged:
    """Take the lanes' heads in total order and ask about each. O(log n) per head looked at.

    On return the staged requests are popped but still counted (``WaitingQueue.settle_pops``);
    everything else is back in its place. If a strategy raises, everything is.

    Args:
        asking: The policy.
        queue: Who waits.
        running: Who runs.
        round: What the strategies see; None if none of them looks (``Asking.sees_rounds``).
        max_rows: The most rows that may run.
        now: Seconds.
        counts_of: The counts of one batch_key.

    Raises:
        PolicyError: If a strategy raised or answered nonsense.
    """
    staged = Staged()
    views = staged.views
    aside: list[RequestView] = []
    parked: list[LaneQueue] = []
    capacity = running.capacity
    memory = capacity.memory
    idle = not running.size
    only: KeyQueue | None = None
    room = max(0, min(len(running.free_slots), max_rows - running.size))
    pages = running.free_pages
    need = 0
    state = None
    if round is not None:
        admission = asking.admission
        state = asking.admission_state
    asks_admit = asking.admit
    hook = "admission.admit"
    view: RequestView | None = None
    try:
        if asking.due and (idle or asking.due_every_step):
            _hold_back(asking, queue, parked, staged, now, counts_of)
        while (view := queue.peek(only)) is not None:
            if not room:
                full = running.size + len(views) >= capacity.max_num_seqs
                staged.blocked = (view, BlockedBy.SLOTS if full else BlockedBy.POLICY)
                break
            if memory is not None:
                need = running.pages(view)
                fits = capacity.fits(view.request)
                if need > pages or not fits:
                    staged.hopeless = None if fits else view
                    staged.blocked = (view, BlockedBy.MEMORY)
                    break
            if asks_admit and round is not None:
                hook = "admission.admit"
                verdict = admission.admit(state, view, round)
                if verdict is not _ADMIT:
                    if verdict is Verdict.SKIP:
                        queue.pop(view)
                        aside.append(view)
                        if len(aside) < _SKIPS_PER_ROUND:
                            continue
                        staged.blocked = (aside[0], BlockedBy.POLICY)
                        break
                    if not isinstance(verdict, Verdict):
                        raise asking.wrong(f"admit must return a Verdict, got {verdict!r}", view)
                    staged.blocked = (view, BlockedBy.POLICY)
                    if verdict is Verdict.STOP:
                        break
                    round.blocked, round.blocked_by = view, BlockedBy.POLICY
                    parked.append(view._lane)
                    queue.park(view._lane)
                    continue
            queue.pop(view)
            if idle:
                only = view._lane.key_queue  # an empty engine starts one batch_key
            views.append(view)
            room -= 1
            pages -= need
            if round is not None:
                round.joined.append(view)
                round.num_joined += 1
                round.joined_tokens += view._max_tokens
                if asking.joined:
                    hook = "admission.joined"
                    state = admission.joined(state, view, round)
        if aside and staged.blocked is None:
            staged.blocked = (aside[0], BlockedBy.POLICY)
        if round is not None:
            round.blocked, round.blocked_by = staged.blocked or (None, None)
            if asking.settle:
                hook = "admission.settle"
                state = admission.settle(state, round)
            if asking.recheck and queue.size > len(views):
                hook = "admission.recheck"
                staged.recheck = admission.recheck(state, round)
                if not staged.recheck >= 1:
                    raise asking.wrong(
                        "recheck must return steps >= 1 (inf = only after a change), got "
                        f"{staged.recheck!r}"
                    )
        if asking.limits:
            staged.limits = [asking.end_limits(one) for one in views]
        if asking.knobs and round is not None:
            staged.knobs = [asking.row_knobs(one, round.view) for one in views]
    except BaseException as error:
        for one in (*views, *aside):
            queue.restore(one)
        for lane in parked:
            queue.unpark(lane)
        if isinstance(error, PolicyError | InvariantError) or not isinstance(error, Exception):
            raise
        raise asking.error(hook, error, view) from error
    for one in aside:
        queue.restore(one)
    staged.state = state
    for lane in parked:
        queue.unpark(lane)
    if idle and views and len(queue.keys) > 1:
        staged.waits_for_next_round = True
    return staged


def _hold_back(
    asking: Asking,
    queue: WaitingQueue,
    parked: list[LaneQueue],
    staged: Staged,
    now: float,
    counts_of: Callable[[float, KeyQueue], SchedulerView],
) -> None:
    """Park the lanes of the batch_keys that are not due yet. O(batch_keys)."""
    for key in queue.waiting_keys():
        due = asking.due_at(counts_of(now, key))
        if now < due:
            staged.due_at = min(staged.due_at, due)
            for lane in key.lanes.values():
                parked.append(lane)
                queue.park(lane)
