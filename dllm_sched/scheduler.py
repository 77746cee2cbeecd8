"""The facade that an engine calls: queues, slots, capacity and the life of every request.

Sans-IO: the caller owns the clock, the threads and the model. Nothing here reads a clock, draws a
random number, or logs on the hot path.

How a step stays cheap. Running rows stand in *cohorts* (same batch_key, same phase); cohorts that
step follow one clock, and a row's step count is a difference to it. When nothing changed since the
last step, ``next_step`` hands out the same row tuple and ``complete_step`` moves that clock:
neither looks at a row or at the queue, and totals are settled when something changes. Two
thresholds guard the two short ways: ``_quiet_until`` (an instant) and ``_stop_step`` (a number of
steps). Whatever may change the batch (a submit, a finish, a boundary) drops ``_quiet_until``, and
the next call decides anew, in small transactions: expiries, evictions, admissions, composition.
Each is staged and commits whole, so a policy that raises has changed nothing; what an earlier
transaction of the same call did is told before the error is met again. Where the policy has
nothing to say but keys and limits (``Asking.plain``) none of that is needed, and a plan is one
straight walk (``_plan_unasked``).
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import attrs

from dllm_sched._asking import STEP_EVENTS, Asking
from dllm_sched._invariants import find_fault
from dllm_sched._lifecycle import AFTER_FINISH, AFTER_PREEMPT
from dllm_sched._outcome import Crossing, Named, check_outcome
from dllm_sched._queue import KeyQueue, LazyHeap, WaitingQueue
from dllm_sched._round import stage_round
from dllm_sched._running import KeyRows, RunningSet, cohort_of
from dllm_sched.batch import (
    NO_KNOBS,
    NOTHING,
    Accepted,
    Finished,
    Knobs,
    Rejected,
    Released,
    Row,
    RowFate,
    StepBatch,
    StepOutcome,
    Update,
)
from dllm_sched.capacity import Capacity
from dllm_sched.errors import (
    ClockError,
    ConfigError,
    DuplicateRequestError,
    EngineProtocolError,
    InvariantError,
    OutcomeError,
    PolicyError,
    UnknownRequestError,
    described,
)
from dllm_sched.events import (
    BlockDone,
    CapacitySet,
    DrainStarted,
    Event,
    Paused,
    PhaseChanged,
    PolicySet,
    RequestFinished,
    RequestJoined,
    RequestPreempted,
    RequestRejected,
    RequestSubmitted,
    Resumed,
    StepCompleted,
    StepFailed,
    StepPlanned,
)
from dllm_sched.policies.base import ALL, Policy, Preempt
from dllm_sched.request import FinishReason, Phase, Request, RequestStatus, RequestView
from dllm_sched.theory._check import items
from dllm_sched.view import BlockedBy, Round, SchedulerView

__all__ = ["Counts", "Explanation", "Horizon", "Scheduler", "Stats"]

_INF = math.inf
_LATEST = sys.float_info.max  # also of an int, which may be larger
_MOST_STEPS = 2**53  # in all; beyond it one step more is none to a float
_RUNNING = RequestStatus.RUNNING
_PREFILL = Phase.PREFILL
_DEADLINE = FinishReason.DEADLINE
_EMPTY: Mapping[Any, int] = MappingProxyType({})
_GO_ON = Update()
_NO_LIMITS = (_INF, _INF)  # (instant, steps)
_NO_SLOT, _MAX_ROWS = (None, BlockedBy.SLOTS), (None, BlockedBy.POLICY)
_new = tuple.__new__  # builds a NamedTuple in half the time of its own constructor


class Counts(NamedTuple):
    """How many requests are where."""

    submitted: int  #: taken by ``submit``, ever
    rejected: int  #: refused by ``submit``, ever
    waiting: int  #: in the queue, preempted ones included
    running: int  #: holding a slot
    finished: int  #: ended, ever


class Stats(NamedTuple):
    """Totals since construction; each kept in O(1)."""

    num_steps: int  #: steps completed
    row_steps: int  #: rows summed over completed steps
    wasted_row_steps: int
    """Slots that stood empty during a step while requests waited, plus row-steps run for requests
    that had been cancelled meanwhile."""
    num_rounds: int  #: admission rounds
    num_joined: int  #: joins, resumed rows included
    num_preempted: int
    num_failed_steps: int
    num_blocks: int  #: blocks reported done
    finished_by_reason: Mapping[FinishReason, int]
    tokens_in_rows: int  #: now
    free_slots: int  #: now
    free_pages: int | None  #: now


class Horizon(NamedTuple):
    """How far the issued batch stays the same without input."""

    steps: float  #: no decision changes before this many more steps (``inf``: never)
    until: float  #: ... or before this instant, seconds


class Explanation(NamedTuple):
    """Where an active request stands, and why it waits."""

    status: RequestStatus
    why: str  #: one sentence
    behind: str | None = None  #: id of the blocked head it waits behind, if any
    until: float | None = None  #: the instant that may change it, if known, seconds


class Scheduler:
    """Decides which requests share the next denoising step.

    One owner: not thread-safe, never blocking (``dllm_sched.runtime`` has drivers). Every call
    takes ``now``: seconds, finite, never going backward, any origin.

    Args:
        capacity: What the engine can hold.
        policy: The six strategies; default: first come, first served, whatever fits, at once.
        observers: Callables given every event (``dllm_sched.events``) after its call has
            committed. One that raises is logged once and removed.
        max_in_flight: Steps that may be in flight at a time: 1, or 2 to *run ahead*, i.e. to plan
            step t + 1 while step t runs. Completions come in order; a row that step t ends has
            then taken part in one step too many (``Stats.wasted_row_steps``), and its slot comes
            back when that one has completed.

    Raises:
        ConfigError: If the policy can never work within the capacity.
    """

    # Slots: an instance with this many attributes in a dict finds each of them by hashing.
    __slots__ = (
        "__weakref__",
        "_ahead",
        "_all_alike",
        "_asking",
        "_at",
        "_batch_knobs",
        "_batch_knobs_until",
        "_blocked",
        "_boundaries",
        "_by_reason",
        "_capacity",
        "_clock",
        "_counted_steps",
        "_dirty",
        "_draining",
        "_due_at",
        "_events",
        "_expiries",
        "_finished",
        "_flight_progress",
        "_flight_views",
        "_full",
        "_in_flight",
        "_jump_step",
        "_knob_boundaries",
        "_knob_expiries",
        "_limit_step",
        "_max_in_flight",
        "_max_rows",
        "_next_step_id",
        "_now",
        "_num_blocks",
        "_num_failed_steps",
        "_num_preempted",
        "_num_rejected",
        "_num_rounds",
        "_num_submitted",
        "_observers",
        "_paused",
        "_plain",
        "_progressed",
        "_queue",
        "_quiet_until",
        "_recheck_step",
        "_released",
        "_retired",
        "_round_step",
        "_row_steps",
        "_rows",
        "_running",
        "_sent_back",
        "_short",
        "_sifts",
        "_stop_step",
        "_unobserved",
        "_views",
        "_wake_at",
        "_wasted",
        "_watch",
        "_watch_steps",
        "_zombies",
    )

    def __init__(
        self,
        *,
        capacity: Capacity,
        policy: Policy | None = None,
        observers: Iterable[Callable[[Event], object]] = (),
        max_in_flight: int = 1,
    ) -> None:
        if not isinstance(capacity, Capacity):
            raise ConfigError(f"Scheduler: capacity must be a Capacity, got {capacity!r}")
        if type(max_in_flight) is not int or max_in_flight not in (1, 2):
            raise ConfigError(f"Scheduler: max_in_flight must be 1 or 2, got {max_in_flight!r}")
        self._max_in_flight = max_in_flight
        self._capacity = capacity
        self._observers = list(items("Scheduler: observers", observers))
        for observer in self._observers:
            if not callable(observer):
                raise ConfigError(f"Scheduler: observers must be callables, got {observer!r}")
        self._now = -_LATEST  # the latest ``now``; inf inside of a call that asks others (_locked)
        self._at = -_INF  # the ``now`` of the present call
        self._views: dict[str, RequestView] = {}
        self._running = RunningSet(capacity, max_in_flight)
        self._clock = self._running.clock
        self._expiries = LazyHeap(lambda view: view._expire_at)
        self._knob_expiries = LazyHeap(lambda view: view._knobs_until)
        self._paused = False
        self._draining = False

        # what the next call tells
        self._finished: list[Finished] = []
        self._released: list[Released] = []
        self._events: list[Event] = []

        # the steps in flight
        self._in_flight: StepBatch | None = None  # the oldest
        self._ahead: StepBatch | None = None  # planned while that one ran
        self._flight_views: dict[RequestView, None] | None = None  # composition chose rows
        self._flight_progress = False  # the policy that planned it needs masked_remaining
        # who ended meanwhile: (whose slot, why, the first and last step that it is in)
        self._zombies: list[tuple[RequestView, FinishReason, int, int]] = []

        # what the last plan holds for
        # Before it the last batch may be handed out again as it is; never later than any ``now``.
        self._quiet_until = -_INF
        self._stop_step = -_INF  # before it a step that brings nothing needs no closer look
        self._dirty = True  # something changed that admission may care about
        self._rows: tuple[Row, ...] = ()
        self._batch_knobs: Knobs = NO_KNOBS
        self._batch_knobs_until = _INF
        self._wake_at = -_INF
        self._due_at = _INF
        self._recheck_step = _INF  # completed steps after which admission may answer otherwise
        self._limit_step = _INF  # completed steps after which a step cap may be met
        self._jump_step = -_INF  # completed steps up to which the batch in flight may jump
        self._blocked: tuple[RequestView | None, BlockedBy] | None = None  # None: the queue's head
        self._progressed = False  # this call has committed something

        # what happened since the last round
        self._boundaries: list[RequestView] = []
        self._knob_boundaries: list[RequestView] = []
        self._retired = 0
        self._sent_back = 0  # of them
        self._round_step = 0
        self._short: dict[RequestView, None] = {}  # rows whose growth found no pages, in order
        self._unobserved: list[Event] = []

        self._num_submitted = 0
        self._num_rejected = 0
        self._counted_steps = 0  # of the clock's, in the two totals below
        self._next_step_id = 0
        self._row_steps = 0
        self._wasted = 0
        self._num_rounds = 0
        self._num_preempted = 0
        self._num_failed_steps = 0
        self._num_blocks = 0
        self._by_reason = dict.fromkeys(FinishReason, 0)

        self._install(Asking(Policy() if policy is None else policy, capacity))
        if self._watch:
            self._emit(PolicySet(-_INF, self.policy.name))
            self._flush_events()

    # --- input --------------------------------------------------------------------------------

    def submit(self, request: Request, *, now: float) -> Accepted | Rejected:
        """Queue a request. O(log n).

        A request whose deadline has passed is accepted and told finished by the next Update.

        Returns:
            ``Accepted``, or ``Rejected`` with ``draining``, ``too_large`` (its peak exceeds the
            pages there are) or the policy's reason (``queue_full``).

        Raises:
            DuplicateRequestError: If the id is still active.
            ConfigError: If it is not a Request.
            ClockError: If ``now`` is not finite or went backward.
            PolicyError: If the policy raises or answers nonsense.
        """
        try:
            if not self._now <= now or now > _LATEST:
                self._bad_clock("submit", now)
        except TypeError:
            self._bad_clock("submit", now)
        if not isinstance(request, Request):
            raise ConfigError(f"submit: expected a Request, got {request!r}")
        views, request_id = self._views, request.id
        if request_id in views:
            raise DuplicateRequestError(
                f"submit: request {request_id!r} is still {views[request_id]._status.value}; use "
                "another id, or wait until it has finished"
            )
        sequence, queue = self._num_submitted, self._queue
        view = RequestView(request, sequence, now)
        view._knobs = NO_KNOBS
        if self._capacity.window_blocks is not None:
            view._max_tokens = self._capacity.max_tokens(request, _PREFILL)
        key: tuple[float, ...] = ()
        if self._sifts:
            reason, key = self._sift(view, now)
            if reason is not None:
                return self._reject(request, reason, now)
        self._now = now
        if not queue.size:
            self._count_steps()  # until now nobody waited
        self._num_submitted = sequence + 1
        views[request_id] = view
        queue.push(view, key)
        if request.deadline_at != _INF or request.queue_timeout_s != _INF:
            self._arm_waiting(view)
        if self._running.size < self._max_rows or self._asking.settle:
            self._quiet_until = -_INF
            self._dirty = True
        if self._watch:
            self._emit(RequestSubmitted(now, request))
            self._flush_events()
        accepted: Accepted = _new(Accepted, (request_id,))
        return accepted

    def _sift(self, view: RequestView, now: float) -> tuple[str | None, tuple[float, ...]]:
        """Why a request is refused, or None, and its sort key."""
        if self._draining:
            return "draining", ()
        capacity, asking = self._capacity, self._asking
        if capacity.memory is not None and not capacity.fits(view.request):
            return "too_large", ()
        reason: str | None = None
        key: tuple[float, ...] = ()
        settled = self._now
        self._now = _INF  # as in _locked, which costs as much as the key itself
        try:
            if self._unobserved:
                self._observe()
            if asking.accept:
                reason = asking.refusal(view, self._view(now))
            if reason is None:
                key = asking.sort_key(view)
        finally:
            self._now = settled
        return reason, key

    def _arm_waiting(self, view: RequestView) -> None:
        """Let a request that waits end at its deadline, or when it has waited long enough."""
        request = view.request
        timeout_at = view._arrived_at + request.queue_timeout_s
        if timeout_at < request.deadline_at:
            self._arm(view, timeout_at, FinishReason.QUEUE_TIMEOUT)
        elif request.deadline_at != _INF:
            self._arm(view, request.deadline_at, _DEADLINE)

    def cancel(self, request_id: str, *, now: float) -> Update:
        """End a request in whatever state; nothing happens if it is not active. O(log n).

        A row whose step is in flight ends at once, but its slot comes back (``released``) only
        when that step has completed.

        Raises:
            ClockError: If ``now`` is not finite or went backward.
        """
        self._check_id("cancel", request_id)
        self._set_now("cancel", now)
        view = self._views.get(request_id)
        if view is None:
            return self._update(None, self._wake_at)
        self._end(view, FinishReason.CANCELLED)
        return self._update(None, -_INF)

    def requeue(self, request_id: str, *, now: float) -> Update:
        """Ask the ordering anew where a waiting request stands: what it goes by has come. O(log n).

        For orderings by something that arrives later than the request, such as a prediction.
        Nothing happens if it does not wait.

        Raises:
            ConfigError: If the id is not a str.
            PolicyError: If the ordering raises or answers nonsense. Nothing has changed then.
            ClockError: If ``now`` is not finite or went backward.
        """
        self._check_id("requeue", request_id)
        self._check_now("requeue", now)
        view = self._views.get(request_id)
        waits = view is not None and view._status is not _RUNNING
        key: tuple[float, ...] = ()
        with self._locked():
            self._observe()
            if view is not None and waits:
                key = self._asking.sort_key(view)
        self._set_now("requeue", now)
        if view is not None and waits:
            self._queue.discard(view)
            self._queue.push(view, key)
            self._touch()
        return self._update(None, -_INF)

    # --- steps --------------------------------------------------------------------------------

    def next_step(self, *, now: float) -> Update:
        """Plan the next step.

        O(1) if nothing changed since the last one; else O(log n) per request that joins or
        leaves, plus at most one copy of the row tuple. While the engine is idle and the policy has
        a timeout axis, also O(batch_keys that wait): each is asked for its due instant.

        With ``max_in_flight=2`` it may be called while a step runs. It returns no batch then where
        that step must complete first: under a policy that selects rows, evicts or needs progress,
        when several batch_keys are active, when memory is short, or while paused.

        Returns:
            The batch to run, or None and the instant (``wake_at``) before which nothing changes
            without input.

        Raises:
            EngineProtocolError: If ``max_in_flight`` steps are still in flight.
            ClockError: If ``now`` is not finite or went backward.
            PolicyError: If the policy raised, answered nonsense, or lets nothing go while
                draining. Nothing has changed then.
        """
        try:
            if self._in_flight is not None:
                return self._run_ahead(now)
            if not self._now <= now or now >= self._quiet_until:  # else the clock is right, too
                return self._plan(now)
        except TypeError:
            self._check_now("next_step", now)
            raise  # of somebody else's making
        self._now = now
        step_id = self._next_step_id
        self._next_step_id = step_id + 1
        batch: StepBatch = _new(StepBatch, (step_id, now, self._rows, (), self._batch_knobs, ()))
        self._in_flight = batch
        if self._watch_steps:
            self._emit(StepPlanned(now, step_id, len(self._rows), 0, self._queue.size))
            self._flush_events()
        update: Update = _new(Update, (batch, (), (), self._wake_at))
        return update

    def complete_step(
        self, batch: StepBatch, outcome: StepOutcome = NOTHING, *, now: float, steps: int = 1
    ) -> Update:
        """Report what happened in a step. O(what is reported), O(1) for ``NOTHING``.

        Args:
            batch: The batch in flight; of two, the one planned first.
            outcome: What happened; rows it does not name advanced by ``steps``.
            now: Seconds.
            steps: Steps taken at once, at most those of the ``horizon`` that the batch was handed
                out with; the outcome belongs to the last of them. Who takes several ends them at
                the first step during which input came that made ``horizon().steps`` 1.

        Raises:
            EngineProtocolError: If ``batch`` is not the one in flight, or ``steps`` is out of
                range.
            OutcomeError: If the outcome names a row that is not in the batch, one twice, or
                impossible progress. Nothing has changed then.
            ClockError: If ``now`` is not finite or went backward.
        """
        num_steps = self._clock.steps + 1
        try:
            if (
                outcome is NOTHING
                and batch is self._in_flight
                and batch is not None  # what next_step gave when there was no step
                and num_steps < self._stop_step
                and self._now <= now
                and steps == 1
                and now <= _LATEST
            ):
                self._now = now
                self._in_flight = self._ahead
                self._ahead = None
                self._clock.steps = num_steps
                return _GO_ON
            return self._complete(batch, outcome, now, steps)
        except TypeError:
            self._check_now("complete_step", now)
            raise  # of somebody else's making

    def _complete(self, batch: StepBatch, outcome: StepOutcome, now: float, steps: int) -> Update:
        """``complete_step`` when something may have changed."""
        clock, running = self._clock, self._running
        if batch is not self._in_flight or batch is None:
            batch = self._check_flight("complete_step", batch)
        if not self._now <= now or now > _LATEST:
            self._bad_clock("complete_step", now)
        if steps != 1 and not (type(steps) is int and 1 < steps <= self._most_steps()):
            self._bad_steps(steps)
        ahead, progress = self._ahead, self._flight_progress
        named: Named | None = None
        if outcome is not NOTHING or progress:
            told = ahead is None and self._flight_views is None
            slots = running.slots if told else ()
            named = check_outcome(
                batch, outcome, slots, clock, self._in_batch, needs_progress=progress
            )
        self._now = self._at = now
        self._in_flight = ahead
        if ahead is not None:
            self._ahead = None
            self._count_steps()  # of batches with other rows, perhaps
        clock.steps = num_steps = clock.steps + steps
        steps_since = num_steps - self._counted_steps
        self._counted_steps = num_steps
        self._row_steps += steps_since * len(batch.rows)
        if self._queue.size:
            self._wasted += steps_since * len(running.free_slots)
        if self._flight_views is not None:
            self._advance_chosen(self._flight_views, steps)
        if self._watch_steps:
            self._emit(StepCompleted(now, batch.step_id, len(batch.rows), steps))
        if named is not None:
            if outcome.masked_remaining is not None:
                self._note_progress(batch, outcome.masked_remaining)
            # calls no policy, so it cannot fail half-way; who ends by one column is past the next
            ends, crossings, changes, failures = named
            if crossings:
                self._cross(crossings)
            for view, phase in changes:
                if view._status is _RUNNING:
                    self._change_phase(view, phase)
            for view, error in failures:
                if view._status is _RUNNING:
                    self._end(view, FinishReason.ERROR, None, error)
            for view, reason, output in ends:
                if view._status is _RUNNING:
                    self._end(view, reason, output)
        if num_steps >= self._limit_step:
            self._meet_step_caps()
        if num_steps >= self._recheck_step:
            self._quiet_until = -_INF
        if ahead is not None and not self._watch_steps:
            self._stop_step = min(self._limit_step, self._recheck_step)
        if self._zombies:
            self._land(batch.step_id, steps)
        if self._events or self._finished or self._released:
            return self._update(None, -_INF)
        return _GO_ON

    def fail_step(
        self, batch: StepBatch, error: BaseException, *, rows: Mapping[int, RowFate], now: float
    ) -> Update:
        """Report that a step failed. After it nobody has advanced. O(rows named).

        Rows that had joined with this step are named in ``joined`` again when they next step. A
        step that was planned while it ran is void as well, and is not to be completed: the engine
        must have stopped it.

        Args:
            batch: The batch in flight; of two, the one planned first.
            error: What went wrong; becomes ``Finished.error`` of the rows that fail.
            rows: For slots of the batch: FAIL (ends with ``error``), RESTART (waits again, from
                nothing) or KEEP (stays in its slot). Not named: KEEP.
            now: Seconds.

        Raises:
            EngineProtocolError: If ``batch`` is not the one in flight.
            OutcomeError: If a slot is not in the batch, or its fate is no RowFate.
            ClockError: If ``now`` is not finite or went backward.
            PolicyError: If the ordering raised for a row that waits again.
        """
        if batch is not self._in_flight or batch is None:
            batch = self._check_flight("fail_step", batch)
        self._check_now("fail_step", now)
        if not isinstance(error, BaseException):
            raise OutcomeError(f"fail_step: error must be an exception, got {error!r}")
        if not isinstance(rows, Mapping):
            raise OutcomeError(f"fail_step: rows must map slots to RowFates, got {rows!r}")
        fates: list[tuple[RequestView, RowFate, tuple[float, ...]]] = []
        with self._locked():
            self._observe()
            for slot, fate in rows.items():
                view = self._in_batch(slot, "fail_step")
                if not isinstance(fate, RowFate):
                    raise OutcomeError(
                        f"fail_step: slot {slot} ({view.request.id!r}): expected a RowFate, got "
                        f"{fate!r}"
                    )
                if view._status is _RUNNING:
                    key = self._asking.sort_key(view) if fate is RowFate.RESTART else ()
                    fates.append((view, fate, key))
        self._now = self._at = now
        self._count_steps()
        ahead = self._ahead
        self._in_flight = self._ahead = None
        self._num_failed_steps += 1
        if self._watch_steps:
            self._emit(StepFailed(now, batch.step_id, len(batch.rows), described(error)))
        for row in batch.joined if ahead is None else (*batch.joined, *ahead.joined):
            joined = self._running.slots[row.slot]
            if joined is not None and joined._status is _RUNNING:
                self._running.untold[joined] = True
                if ahead is not None and row in ahead.joined:
                    self._running.advance(joined)  # the step it was to sit out will not come
        for view, fate, key in fates:
            if fate is RowFate.FAIL:
                self._end(view, FinishReason.ERROR, None, error)
            elif fate is RowFate.RESTART:
                self._preempt(view, Preempt.RESTART)
                self._queue.push(view, key)
        self._quiet_until = -_INF
        self._land(self._next_step_id, 0)
        return self._update(None, -_INF)

    def horizon(self) -> Horizon:
        """How long the batch in flight stays as it is without input. O(1).

        Whatever the engine itself reports (a finish, a boundary, a phase) ends it as well.

        Raises:
            EngineProtocolError: If no batch is in flight.
        """
        if self._in_flight is None:
            raise EngineProtocolError("horizon: no batch is in flight; call next_step first")
        steps: float = 1
        if self._quiet_until != -_INF and self._jump_step != -_INF:
            stop = self._limit_step
            if self._recheck_step < stop:
                stop = self._recheck_step
            steps = stop - self._clock.steps
            if steps < 1:
                steps = 1
        horizon: Horizon = _new(Horizon, (steps, self._wake_at))
        return horizon

    # --- control ------------------------------------------------------------------------------

    def set_policy(self, policy: Policy, *, now: float) -> Update:
        """Swap the policy, live. O(n log n) for n waiting and running.

        Every waiting request is keyed and laned anew, every row's limits and knobs are asked
        anew. An axis whose strategy is the same object keeps its state, unless the old policy
        raises over what has happened since it was last asked: all states start anew then.

        Raises:
            ConfigError: If the policy can never work within the capacity, with as many slots as
                there ever were: a limit that is lower for a while refuses none.
            PolicyError: If it raises while it is asked. The old policy stays then.
            ClockError: If ``now`` is not finite or went backward.
        """
        self._check_now("set_policy", now)
        with self._locked():
            try:
                self._observe()
                previous = self._asking
            except PolicyError:  # of the policy that goes; nothing of it is worth keeping
                previous = None
            # By the slots there ever were: a limit that is lower for a while refuses no policy.
            most = attrs.evolve(self._capacity, max_num_seqs=len(self._running.slots))
            asking = Asking(policy, most, previous)
            waiting = sorted(self._queue, key=lambda view: view._sequence)
            keys = [asking.sort_key(view) for view in waiting]
            rows = self._running.rows()
            limits = [asking.end_limits(view) for view in rows]

        self._now = self._at = now
        self._count_steps()
        self._install(asking)
        for view, key in zip(waiting, keys, strict=True):
            self._queue.push(view, key)
        self._running.set_limits(
            (view, steps) for view, (_, steps) in zip(rows, limits, strict=True)
        )
        for view, (instant, _) in zip(rows, limits, strict=True):
            self._arm(view, instant, _DEADLINE)
            self._arm_knobs(view, -_INF if asking.knobs else _INF)
            if view._knobs and not asking.knobs:
                self._running.set_knobs(view, NO_KNOBS)
        self._meet_step_caps()
        if self._watch:
            self._emit(PolicySet(now, policy.name))
        return self._update(None, -_INF)

    def set_capacity(self, capacity: Capacity, *, now: float) -> Update:
        """Change the limits, live. O(slots).

        Rows above a smaller limit run on; nobody joins until there is room again. A waiting
        request that could not run alone any more ends with ``ERROR`` when its turn comes.

        The policy is not asked whether it suits: a smaller limit for a while must not fail.

        Raises:
            ConfigError: If the memory model, ``window_blocks`` or ``whole_prefill`` changes while
                requests are active.
            ClockError: If ``now`` is not finite or went backward.
        """
        self._check_now("set_capacity", now)
        if not isinstance(capacity, Capacity):
            raise ConfigError(f"set_capacity: expected a Capacity, got {capacity!r}")
        old = self._capacity
        if self._views or self._zombies:
            for name in ("memory", "window_blocks", "whole_prefill"):
                if getattr(capacity, name) != getattr(old, name):
                    raise ConfigError(
                        f"set_capacity: {name} cannot change from {getattr(old, name)!r} to "
                        f"{getattr(capacity, name)!r} while requests are active; drain first"
                    )
        self._now = self._at = now
        self._count_steps()
        self._capacity = capacity
        self._running.set_capacity(capacity)
        self._keep_counts()
        self._touch()
        if self._watch:
            self._emit(CapacitySet(now, capacity.max_num_seqs, capacity.num_pages))
        return self._update(None, -_INF)

    def pause(self, *, now: float) -> Update:
        """Hand out no more batches (weights are being changed); time limits still pass."""
        self._set_now("pause", now)
        self._paused = True
        self._see_whether_plain()
        self._quiet_until = -_INF
        if self._watch:
            self._emit(Paused(now))
        return self._update(None, -_INF)

    def resume(self, *, now: float) -> Update:
        """Go on after ``pause``."""
        self._set_now("resume", now)
        self._paused = False
        self._see_whether_plain()
        self._touch()
        if self._watch:
            self._emit(Resumed(now))
        return self._update(None, -_INF)

    def drain(self, *, now: float) -> Update:
        """Promise that no more requests come: ``submit`` rejects, partial batches may go."""
        self._set_now("drain", now)
        self._draining = self._sifts = True
        self._touch()
        if self._watch:
            self._emit(DrainStarted(now))
        return self._update(None, -_INF)

    # --- values -------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._asking.policy

    @property
    def capacity(self) -> Capacity:
        """The capacity in force."""
        return self._capacity

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, as in ``counts``."""
        return self._queue.size

    @property
    def num_running(self) -> int:
        """Requests that hold a slot, as in ``counts``."""
        return self._running.size

    @property
    def tokens_in_rows(self) -> int:
        """Sum of the running rows' ``max_tokens``, as in ``stats``."""
        return self._running.tokens

    @property
    def max_in_flight(self) -> int:
        """Steps that may be in flight at a time."""
        return self._max_in_flight

    def has_work(self) -> bool:
        """Whether a request is active, or an ending still has to be told. O(1)."""
        return bool(self._views or self._finished or self._released or self._zombies)

    def counts(self) -> Counts:
        """How many requests are where. O(1)."""
        return Counts(
            self._num_submitted,
            self._num_rejected,
            self._queue.size,
            self._running.size,
            sum(self._by_reason.values()),
        )

    def stats(self) -> Stats:
        """Totals since construction. O(1)."""
        self._count_steps()
        running = self._running
        return Stats(
            self._clock.steps,
            self._row_steps,
            self._wasted,
            self._num_rounds,
            running.num_joined,
            self._num_preempted,
            self._num_failed_steps,
            self._num_blocks,
            MappingProxyType(dict(self._by_reason)),
            running.tokens,
            max(0, self._capacity.max_num_seqs - running.size),
            None if self._capacity.num_pages is None else running.free_pages,
        )

    def view(self, request_id: str) -> RequestView:
        """The live view of an active request. O(1).

        Raises:
            UnknownRequestError: If the id is not active.
        """
        try:
            return self._views[request_id]
        except (KeyError, TypeError):
            raise UnknownRequestError(
                f"request {request_id!r} is not active: never submitted, rejected, or finished"
            ) from None

    def explain(self, request_id: str) -> Explanation:
        """Say where an active request stands and why it waits. O(1).

        Raises:
            UnknownRequestError: If the id is not active.
        """
        view = self.view(request_id)
        status = view._status
        if status is _RUNNING:
            return Explanation(status, f"runs in slot {view._slot}, {view.num_steps} steps done")
        if self._paused:
            return Explanation(status, "the scheduler is paused; resume() lets it go on")
        if self._dirty:
            return Explanation(status, "the next call of next_step will decide about it")
        if self._blocked is None:
            if self._due_at != _INF:
                return Explanation(status, "its batch is not due yet", until=self._due_at)
            return Explanation(status, "the timeout axis waits for more requests")
        blocked, why = self._blocked
        view = blocked or self._queue.peek() or view
        head = view.request.id
        reason = {
            BlockedBy.SLOTS: "every slot is taken",
            BlockedBy.MEMORY: "there are not enough free KV pages",
            BlockedBy.POLICY: f"policy {self.policy.name!r} holds it back",
        }[why]
        if head == request_id:
            return Explanation(status, f"it is the head of the queue, but {reason}")
        return Explanation(status, f"request {head!r} is ahead of it, and {reason}", behind=head)

    def check_invariants(self) -> None:
        """Check every table against every other. O(everything): for tests and for doubts.

        Raises:
            InvariantError: If the bookkeeping is broken; with a dump of the state.
        """
        fault = find_fault(self)
        if fault is not None:
            raise InvariantError(f"{fault}. {self._dump()}")

    # --- planning -----------------------------------------------------------------------------

    def _plan(self, now: float) -> Update:
        """``next_step`` when something may have changed; see the module's docstring."""
        settled = self._now
        if not settled <= now or now > _LATEST:
            self._bad_clock("next_step", now)
        self._now = _INF  # see _locked
        self._at = now
        if self._counted_steps != self._clock.steps:
            self._count_steps()
        expiries = self._expiries
        if expiries.heap and expiries.first() <= now:
            self._expire(now)
        if self._plain and self._in_flight is None and self._queue.is_one_lane:
            return self._plan_unasked(now, settled)
        self._progressed = False
        memo: tuple[Any, ...] | None = None
        batch: StepBatch | None = None
        try:
            if self._unobserved:
                self._observe()
            if self._asking.may_raise_late or self._draining or self._asks_again():
                memo = self._memo()
            if not self._paused:
                batch = self._decide(now)
            wake_at = expiries.first() if expiries.heap else _INF
            if not self._paused:
                if self._due_at < wake_at:
                    wake_at = self._due_at
                if self._knob_expiries.heap:
                    wake_at = min(wake_at, self._knob_expiries.first())
                if batch is None:
                    if self._dirty:
                        wake_at = -_INF  # another round may find somebody at once
                    elif (
                        self._draining
                        and wake_at == _INF
                        and self._views
                        and self._in_flight is None
                    ):
                        self._stall()
            self._wake_at = wake_at
            settled = now
        except BaseException as error:
            if memo is not None:
                self._restore(memo)
            self._quiet_until = -_INF
            if not (self._progressed or self._finished or self._released):
                raise
            settled = now
            if not isinstance(error, PolicyError):
                raise
            batch, self._wake_at = None, -_INF  # tell it; the next call meets the error again
        finally:
            self._now = settled
        if batch is None:
            self._quiet_until = -_INF
            return self._update(None, self._wake_at)
        self._next_step_id += 1
        if self._in_flight is None:
            self._in_flight = batch
        else:
            self._ahead = batch
            self._jump_step = self._stop_step = -_INF  # the older step may have had other rows
        if self._batch_knobs_until < wake_at:
            self._wake_at = wake_at = self._batch_knobs_until
        if wake_at < self._quiet_until:
            self._quiet_until = wake_at
        if self._watch_steps:
            self._emit(
                StepPlanned(
                    now, batch.step_id, len(batch.rows), len(batch.joined), self._queue.size
                )
            )
        if self._events or self._finished or self._released:
            return self._update(batch, wake_at)
        update: Update = _new(Update, (batch, (), (), wake_at))
        return update

    def _plan_unasked(self, now: float, settled: float) -> Update:
        """The rest of ``_plan`` under a policy that only orders and limits.

        No round and no shape of batches to ask about: the heads join as long as slots last, and
        all rows step.
        """
        queue, running, expiries = self._queue, self._running, self._expiries
        steps = self._clock.steps
        if queue.size and running.size < self._max_rows:
            try:
                self._join_heads(now)
            except BaseException as error:
                self._quiet_until = -_INF
                told = bool(self._finished or self._released)
                self._now = now if told else settled
                if not told or not isinstance(error, PolicyError):
                    raise
                self._wake_at = -_INF  # as in _plan
                return self._update(None, -_INF)
        self._now = now
        if self._dirty:
            self._dirty = False
            # What a round would have seen; the next policy's first one must not.
            self._retired = self._sent_back = 0
            if self._boundaries:
                self._boundaries = []
            self._blocked = self._full if queue.size else None
        if steps >= self._limit_step:
            self._meet_step_caps()  # of a row that came back with more steps than it may have
        wake_at, quiet_until = _INF, _LATEST
        if expiries.heap:
            wake_at = quiet_until = expiries.first()
        self._wake_at = wake_at
        if not running.size:
            self._quiet_until = -_INF
            return self._update(None, wake_at)
        turns = running.turns
        batch: StepBatch | None
        if len(turns) == 1 and turns[0].only and not self._dirty:
            batch = self._put_out(turns[0], now, quiet_until)
        else:
            batch = self._compose(None, now)
            if wake_at < self._quiet_until:
                self._quiet_until = wake_at
        self._next_step_id += 1
        self._in_flight = batch
        if self._finished or self._released:
            return self._update(batch, wake_at)
        update: Update = _new(Update, (batch, (), (), wake_at))
        return update

    def _expire(self, now: float) -> None:
        """End whoever's time has come."""
        for view in self._expiries.pop_due(now):
            self._end(view, view._expire_reason)

    def _run_ahead(self, now: float) -> Update:
        """``next_step`` while a step is in flight."""
        flight = self._in_flight
        if flight is None or self._ahead is not None or self._max_in_flight == 1:
            raise EngineProtocolError(
                f"next_step: step {flight.step_id if flight else None} is in flight; complete_step "
                "or fail_step comes first"
            )
        if not self._now <= now <= _LATEST:
            self._bad_clock("next_step", now)
        if now < self._quiet_until and not self._flight_progress:
            self._now = now
            step_id = self._next_step_id
            self._next_step_id = step_id + 1
            batch: StepBatch = _new(
                StepBatch, (step_id, now, self._rows, (), self._batch_knobs, ())
            )
            self._ahead = batch
            self._jump_step = -_INF
            if self._watch_steps:
                self._emit(StepPlanned(now, step_id, len(self._rows), 0, self._queue.size))
                self._flush_events()
            update: Update = _new(Update, (batch, (), (), self._wake_at))
            return update
        asking = self._asking
        if (
            self._paused
            or self._short
            or asking.select
            or asking.victims_every_step
            or asking.needs_progress
            or self._flight_progress
            or self._flight_views is not None
            or not self._running.steps_as_one(self._queue.waiting_keys())
        ):
            self._now = now
            return Update(None, (), (), self._wake_at)
        return self._plan(now)

    def _memo(self) -> tuple[Any, ...]:
        """What a plan writes beside joins and ends; put back if it fails."""
        return (
            self._asking.states,
            self._dirty,
            self._due_at,
            self._wake_at,
            self._recheck_step,
            self._blocked,
            self._boundaries,
            self._retired,
            self._sent_back,
            self._round_step,
            self._num_rounds,
        )

    def _restore(self, memo: tuple[Any, ...]) -> None:
        (
            self._asking.states,
            self._dirty,
            self._due_at,
            self._wake_at,
            self._recheck_step,
            self._blocked,
            self._boundaries,
            self._retired,
            self._sent_back,
            self._round_step,
            self._num_rounds,
        ) = memo
        if self._progressed:
            self._dirty = True

    def _stall(self) -> NoReturn:
        """While draining no input can help: a policy that starts nothing would stall for ever."""
        self._wake_at = _INF
        raise PolicyError(
            f"policy {self.policy.name!r} starts nothing while draining: every axis must let the "
            f"leftovers go when view.draining is True. {self._dump()}"
        )

    def _decide(self, now: float) -> StepBatch | None:
        asking, queue = self._asking, self._queue
        round: Round | None = None
        held = True
        if self._short or asking.victims_every_step:
            sent_back = self._evict(now)
            try:
                round = self._hold_round(now)
            finally:  # who was sent back does not rejoin in the same round
                for view, key in sent_back:
                    queue.push(view, key)
                    self._touch()
        elif (
            self._dirty
            or asking.every_step
            or now >= self._due_at
            or self._clock.steps >= self._recheck_step
        ):
            round = self._hold_round(now)
        else:
            held = False
        if self._asks_again():
            self._renew_knobs(now)
        batch = self._compose(round, now) if self._running.size else None
        if held:  # what the round was about has been seen, by composition and hints as well
            if self._boundaries:
                self._boundaries = []
            self._retired = self._sent_back = 0
        return batch

    def _hold_round(self, now: float) -> Round | None:
        """Let requests join, if there is anybody, and room, or the policy counts the rounds."""
        asking = self._asking
        round: Round | None = None
        queue, size = self._queue, self._running.size
        if asking.settle or (queue.size and size < self._max_rows):
            round = self._new_round(now) if asking.sees_rounds else None
            self._admit(round, now)
        else:
            self._dirty = False
            self._due_at = self._recheck_step = _INF
            self._blocked = self._full if queue.size else None
        return round

    def _new_round(self, now: float) -> Round:
        return Round(
            self._view(now),
            num_steps=self._clock.steps - self._round_step,
            boundaries=self._boundaries,
            num_retired=self._retired,
            num_preempted=self._sent_back,
            rows=self._running.rows if self._asking.needs_rows else None,
            youngest=self._running.youngest,
        )

    def _view(self, now: float, key: KeyQueue | None = None) -> SchedulerView:
        """The counts; with ``key``, those of one batch_key for ``due``."""
        asking, queue, running, capacity = self._asking, self._queue, self._running, self._capacity
        oldest = _INF
        if asking.due:
            keys = queue.keys.values() if key is None else (key,)
            for one in keys:
                arrived_at = one.oldest_arrival_at()
                if arrived_at < oldest:
                    oldest = arrived_at
        free_slots = capacity.max_num_seqs - running.size
        view: SchedulerView = _new(
            SchedulerView,
            (
                now,
                self._draining,
                queue.size if key is None else key.size,
                running.size,
                capacity.max_num_seqs,
                free_slots if free_slots > 0 else 0,
                capacity.num_pages,
                None if capacity.num_pages is None else max(0, running.free_pages),
                running.tokens,
                oldest,
                None if key is None else key.batch_key,
                running.longest() if asking.needs_length else 0,
                queue.by_lane() if asking.needs_lanes else _EMPTY,
                running.by_lane() if asking.needs_lanes else _EMPTY,
                running.by_phase,
            ),
        )
        return view

    def _admit(self, round: Round | None, now: float) -> None:
        """One admission round: staged elsewhere, carried out here, where nothing can raise."""
        asking, steps = self._asking, self._clock.steps
        staged = stage_round(
            asking, self._queue, self._running, round, self._max_rows, now, self._view
        )
        if asking.settle:
            asking.set_admission_state(staged.state)
        self._num_rounds += 1
        self._round_step = steps
        self._recheck_step = steps + staged.recheck
        self._due_at = staged.due_at
        self._blocked = staged.blocked
        self._dirty = staged.waits_for_next_round
        if staged.views:
            self._queue.settle_pops(staged.views)
            self._join(staged.views, now, staged.limits, staged.knobs)
            if steps >= self._limit_step:
                self._meet_step_caps()  # of a row that came back with more steps than it may have
        if staged.hopeless is not None:
            self._end(
                staged.hopeless,
                FinishReason.ERROR,
                None,
                ConfigError(
                    f"request {staged.hopeless.request.id!r} can hold more KV pages than the "
                    "capacity has now; it was accepted under a larger one"
                ),
            )
            self._dirty = True

    def _join_heads(self, now: float) -> None:
        """The plainest of rounds: nobody judges who joins, so the heads do as long as slots last.

        The same as ``_hold_round``, without going through them one by one.
        """
        queue, running = self._queue, self._running
        room = self._max_rows - running.size
        free = len(running.free_slots)
        views = queue.take(free if free < room else room)
        limits: list[tuple[float, float]] | None = None
        if self._asking.limits:
            try:
                limits = [self._asking.end_limits(view) for view in views]
            except BaseException:
                queue.put_back(views)
                raise
            if limits.count(_NO_LIMITS) == len(limits):
                limits = None
        if limits is None and not self._expiries.heap:
            running.join(views, now)
        else:
            self._join(views, now, limits)
        self._num_rounds += 1
        self._round_step = self._clock.steps

    def _compose(self, round: Round | None, now: float) -> StepBatch | None:
        asking, running = self._asking, self._running
        turns = running.turns
        alone = len(turns) == 1
        if self._all_alike and alone and turns[0].only and not self._dirty:
            return self._put_out(turns[0], now, _LATEST)
        key_rows: KeyRows | None
        chosen: tuple[RequestView, ...] | None = None
        if asking.shapes_batches:
            phases: Any = ALL
            if round is None:
                round = self._new_round(now)
            elif round.num_joined:
                round.view = self._view(now)  # those who joined are rows now
            if asking.select:
                phases, chosen = asking.selection(round, self._is_running)
            key_rows, rows, cohorts, chosen = running.take_turn(phases, chosen)
            if key_rows is None:
                self._wait_for_due(now)
                return None
            batch_knobs, until, hints = NO_KNOBS, _INF, ()
            if asking.batch_knobs:
                batch_knobs, until = asking.whole_batch_knobs(self._view(now))
            if asking.hints:
                hints = asking.batch_hints(round)
            self._batch_knobs, self._batch_knobs_until = batch_knobs, until
        else:
            key_rows = turns[0] if alone else running.next_in_turn()
            rows, cohorts = key_rows.select(ALL)
            batch_knobs, hints = self._batch_knobs, ()
        # nothing below can raise
        if cohorts is not running.stepping or not alone:
            running.serve(key_rows, cohorts)
        self._flight_views = None if chosen is None else dict.fromkeys(chosen)
        self._flight_progress = progress = asking.needs_progress
        self._rows = rows
        joined: tuple[Row, ...] = ()
        untold = running.untold
        if untold:
            joined = self._take_joined()
        stop_step = self._limit_step
        if self._recheck_step < stop_step:
            stop_step = self._recheck_step
        if alone and asking.repeats_batches and not self._dirty and not untold:
            self._quiet_until = _LATEST
            self._jump_step = -_INF if progress else stop_step
        else:
            self._quiet_until = self._jump_step = -_INF
        self._stop_step = (
            -_INF if self._watch_steps or progress or chosen is not None else stop_step
        )
        batch: StepBatch = _new(
            StepBatch, (self._next_step_id, now, rows, joined, batch_knobs, hints)
        )
        return batch

    def _put_out(self, key_rows: KeyRows, now: float, quiet_until: float) -> StepBatch:
        """``_compose`` of all rows there are, which stand in one cohort and will do so again."""
        running = self._running
        untold, only = running.untold, key_rows.only
        cohort = only[0]
        rows = cohort._frozen
        if rows is None:
            rows = cohort._frozen = tuple(cohort.rows)
        self._rows = rows
        joined: tuple[Row, ...] = ()
        if untold:
            joined = tuple([rows[view._index] for view in untold])
            untold.clear()
        if only is not running.stepping:
            running.serve(key_rows, only)
        self._flight_views, self._flight_progress = None, False
        self._quiet_until = quiet_until
        stop_step = self._limit_step
        if self._recheck_step < stop_step:
            stop_step = self._recheck_step
        self._stop_step = self._jump_step = stop_step
        batch: StepBatch = _new(StepBatch, (self._next_step_id, now, rows, joined, NO_KNOBS, ()))
        return batch

    def _wait_for_due(self, now: float) -> None:
        """Composition selected nobody: legal only while the timeout axis will end the wait."""
        asking = self._asking
        keys = self._queue.waiting_keys()
        due = min([asking.due_at(self._view(now, key)) for key in keys], default=_INF)
        if not now < due < _INF:
            raise PolicyError(
                f"policy {self.policy.name!r}: composition selected none of "
                f"{self._running.size} running rows though no later instant is due (got {due}); "
                f"nothing would ever happen. {self._dump()}"
            )
        self._due_at = min(self._due_at, due)

    def _take_joined(self) -> tuple[Row, ...]:
        """The rows of this batch that are new in their slot; the others stay for a later one."""
        untold, chosen, clock = self._running.untold, self._flight_views, self._clock
        inside: list[Row] = []
        for view in list(untold):
            cohort = view._cohort
            if cohort.clock is clock if chosen is None else view in chosen:
                inside.append(cohort.rows[view._index])
                del untold[view]
        return tuple(inside)

    def _evict(self, now: float) -> list[tuple[RequestView, tuple[float, ...]]]:
        """Ask for victims, and see to it that the rows that are left can grow.

        Returns:
            Who was sent back, with the key under which it must still be queued.
        """
        asking, running = self._asking, self._running
        wanted = {view: running.lacks(view) for view in self._short if view._status is _RUNNING}
        lacking = sum(wanted.values()) - running.free_pages if wanted else 0
        victims: dict[RequestView, Preempt | FinishReason] = {}

        def take(view: RequestView, how: Preempt | FinishReason) -> int:
            """Note a victim; return the pages that are no longer lacking then."""
            victims[view] = how
            return view._num_pages + wanted.pop(view, 0)

        if asking.victims_every_step or (asking.victims and lacking > 0):
            need = max(0, lacking)
            for view, how in asking.chosen_victims(need, self._new_round(now), self._is_running):
                lacking -= take(view, how)
                if need and lacking <= 0:
                    break
        if lacking > 0:
            # The policy freed too little. Youngest first, so that the oldest row always advances:
            # growth can then never send everybody back in turn for ever.
            for view in running.youngest():
                if view not in victims:
                    lacking -= take(view, Preempt.RESTART)
                    if lacking <= 0:
                        break
        sent_back = [
            (view, asking.sort_key(view))
            for view, how in victims.items()
            if isinstance(how, Preempt)
        ]
        # nothing below can raise
        for view, how in victims.items():
            if isinstance(how, Preempt):
                self._preempt(view, how)
            else:
                self._end(view, how)
        for view, pages in wanted.items():
            running.grow(view, pages)
            self._progressed = True
        self._short.clear()
        return sent_back

    def _asks_again(self) -> bool:
        """Whether knobs may have to be renewed."""
        return self._asking.knobs and bool(self._knob_expiries.heap or self._knob_boundaries)

    def _renew_knobs(self, now: float) -> None:
        """Ask again for rows whose knobs ran out or, if declared, that crossed a boundary."""
        asking = self._asking
        due = [view for view in self._knob_expiries.pop_due(now) if view._status is _RUNNING]
        seen = {view._sequence for view in due}
        for view in self._knob_boundaries:
            if view._status is _RUNNING and view._sequence not in seen:
                seen.add(view._sequence)
                due.append(view)
        if not due:
            return
        counts = self._view(now)
        try:
            answers = [asking.row_knobs(view, counts) for view in due]
            changed = [
                asking.differ(view, knobs) for view, (knobs, _) in zip(due, answers, strict=True)
            ]
        except BaseException:
            for view in due:
                if view._knobs_until <= now:
                    self._knob_expiries.push(view._knobs_until, view)
            raise
        self._knob_boundaries.clear()
        for view, (knobs, until), other in zip(due, answers, changed, strict=True):
            self._arm_knobs(view, until)
            if other:
                self._running.set_knobs(view, knobs)

    # --- changes of one request -----------------------------------------------------------------

    def _join(
        self,
        views: list[RequestView],
        now: float,
        limits: list[tuple[float, float]] | None = None,
        knobs: list[tuple[Knobs, float]] | None = None,
    ) -> None:
        """Give requests that wait no more their slots.

        Args:
            views: Who, in order.
            now: Seconds.
            limits: (instant, steps) of each; None: nobody was asked.
            knobs: (knobs, until) of each; None: nobody was asked.
        """
        if limits is not None:
            for view, (_, steps) in zip(views, limits, strict=True):
                view._step_limit = steps
        if knobs is not None:
            for view, (row_knobs, until) in zip(views, knobs, strict=True):
                view._knobs = row_knobs
                if until != _INF:
                    self._arm_knobs(view, until)
        self._running.join(views, now, 0 if self._in_flight is None else 1)
        self._progressed = True
        if limits is not None:
            self._arm_limits(views, limits)
        elif self._expiries.heap:
            for view in views:
                if view._expire_at != _INF:
                    self._arm(view, _INF, _DEADLINE)
        if self._watch:
            for view in views:
                self._emit_joined(view, now)

    def _arm_limits(self, views: list[RequestView], limits: list[tuple[float, float]]) -> None:
        """Let rows that have joined end at an instant, and at their step cap."""
        limit_step, num_steps = self._limit_step, self._clock.steps
        for view, (instant, steps) in zip(views, limits, strict=True):
            if instant != _INF or view._expire_at != _INF:
                self._arm(view, instant, _DEADLINE)
            if steps < limit_step:  # of no use for a cap that lies beyond
                limit_step = min(limit_step, num_steps + steps - view.num_steps)
        self._limit_step = limit_step

    def _emit_joined(self, view: RequestView, now: float) -> None:
        slot, waited_s = view._slot, now - view._arrived_at
        if slot is not None:
            step_id = self._next_step_id
            self._emit(RequestJoined(now, view.request.id, slot, step_id, waited_s, view._resumed))

    def _end(
        self,
        view: RequestView,
        reason: FinishReason,
        output: Any = None,
        error: BaseException | None = None,
    ) -> None:
        """Finish a request in whatever state; a slot that a step in flight has stays until then."""
        request = view.request
        if view._status is _RUNNING:
            if self._in_flight is not None:
                self._quarantine(view, reason)
            else:
                running = self._running
                running.leave(view)
                if view._given:
                    slot = running.free(view)
                    self._released.append(_new(Released, (slot, request, reason, False)))
                else:
                    self._free(view, reason)
            self._retired += 1
            self._quiet_until = -_INF
            self._dirty = True
        else:
            self._queue.discard(view)
            if view._resumed:
                self._released.append(Released(None, request, reason))
            if self._blocked is not None or self._asking.due or self._asking.settle:
                self._touch()
        view._status = AFTER_FINISH[view._status]
        del self._views[request.id]
        self._by_reason[reason] += 1
        finished: Finished = _new(
            Finished,
            (
                request,
                reason,
                view._arrived_at,
                view._admitted_at,
                self._at,
                view._steps_base,
                view._num_blocks_done,
                output,
                error,
            ),
        )
        self._finished.append(finished)
        if self._watch:
            self._emit(
                RequestFinished(
                    self._at,
                    request.id,
                    reason,
                    view._arrived_at,
                    view._admitted_at,
                    view._steps_base,
                    view._num_blocks_done,
                )
            )

    def _quarantine(self, view: RequestView, reason: FinishReason) -> None:
        """Take out a row whose slot must wait for the steps in flight; note of which it is one."""
        flight, ahead = self._in_flight, self._ahead
        if flight is None:
            return
        first = last = flight.step_id
        if ahead is not None:
            last = ahead.step_id
            if any(row.slot == view._slot for row in ahead.joined):
                first = last
                self._running.advance(view)  # the older step, which it was to sit out
        self._running.leave(view)
        self._zombies.append((view, reason, first, last))
        self._stop_step = -_INF  # whatever the step brings, it lands

    def _free(self, view: RequestView, reason: FinishReason | None, *, kept: bool = False) -> None:
        """Give slot and pages back, and tell so."""
        slot = self._running.free(view)
        if view._given:
            self._released.append(_new(Released, (slot, view.request, reason, kept)))
        elif view._resumed and not kept:  # the engine never heard of this slot, but kept progress
            self._released.append(Released(None, view.request, reason))

    def _preempt(self, view: RequestView, how: Preempt) -> None:
        """Take a row's slot; the caller puts it back in the queue, at its old place."""
        kept = how is Preempt.KEEP
        slot = view._slot
        self._running.leave(view)
        known = view._given or view._resumed  # to the engine
        self._free(view, None, kept=kept)
        view._status = AFTER_PREEMPT[view._status]
        request = view.request
        view._resumed = kept and known
        if not kept:
            view._steps_base = 0
            view._num_blocks_done = 0
            view._kv_tokens = 0
            view._masked_remaining = None
            view._phase = Phase.PREFILL
            view._max_tokens = self._capacity.max_tokens(request, Phase.PREFILL)
        view._step_limit = _INF
        view._knobs = NO_KNOBS
        self._arm_knobs(view, _INF)
        self._arm(view, request.deadline_at, _DEADLINE)
        self._retired += 1
        self._sent_back += 1
        self._num_preempted += 1
        self._progressed = True
        self._touch()
        if self._watch and slot is not None:
            self._emit(RequestPreempted(self._at, request.id, slot, kept))

    def _arm(self, view: RequestView, instant: float, reason: FinishReason) -> None:
        """Let a request end at an instant (``inf``: never)."""
        view._expire_reason = reason
        if instant != view._expire_at:
            view._expire_at = instant
            if instant != _INF:
                self._expiries.push(instant, view)
        if instant < self._wake_at:
            self._wake_at = instant
        if instant < self._quiet_until:
            self._quiet_until = instant

    def _arm_knobs(self, view: RequestView, until: float) -> None:
        view._knobs_until = until
        if until != _INF:
            self._knob_expiries.push(until, view)

    # --- outcomes -------------------------------------------------------------------------------

    def _advance_chosen(self, views: Iterable[RequestView], steps: int) -> None:
        """Let rows that were chosen one by one advance; their cohorts stand."""
        for view in views:
            if view._status is _RUNNING:
                view._steps_base += steps
                if view._step_limit != _INF:
                    cohort_of(view).push_limit(view)

    def _in_batch(self, slot: object, column: str) -> RequestView:
        """The request that has a slot in the batch in flight; one that ended still has its own."""
        running, batch, ahead = self._running, self._in_flight, self._ahead
        if type(slot) is int and 0 <= slot < len(running.slots):
            view = running.slots[slot]
            if view is not None and (
                ahead is None or all(row.slot != slot for row in ahead.joined)
            ):
                chosen, cohort = self._flight_views, view._cohort
                if (
                    cohort is not None and cohort.clock is running.clock
                    if chosen is None
                    else view in chosen
                ):
                    return view
                ended = view._status is not _RUNNING  # while the step was in flight
                if ended and batch is not None and any(row.slot == slot for row in batch.rows):
                    return view
        raise OutcomeError(
            f"{column}: slot {slot!r} is not in the batch of step "
            f"{batch.step_id if batch else None}, whose slots are "
            f"{sorted(row.slot for row in batch.rows) if batch else []}"
        )

    def _note_progress(self, batch: StepBatch, counts: Iterable[int]) -> None:
        slots = self._running.slots
        for row, remaining in zip(batch.rows, counts, strict=True):
            view = slots[row.slot]
            if view is not None:
                view._masked_remaining = remaining

    def _cross(self, crossings: Iterable[Crossing]) -> None:
        """Record block boundaries; reserve the pages that the coming step may write."""
        memory = self._capacity.memory
        grows = memory is not None and memory.grows
        told = self._watch or self._asking.needs_blocks
        num_blocks = self._num_blocks
        for view, blocks, tokens in crossings:
            if view._status is _RUNNING:
                num_blocks += blocks - view._num_blocks_done
                view._num_blocks_done = blocks
                view._kv_tokens = tokens
                if grows:
                    self._reserve(view)
                if told:
                    self._tell_crossing(view)
        self._num_blocks = num_blocks

    def _tell_crossing(self, view: RequestView) -> None:
        asking = self._asking
        if asking.needs_blocks:
            self._boundaries.append(view)
            self._touch()
            if asking.knobs_at_blocks:
                self._knob_boundaries.append(view)
        if self._watch:
            blocks, tokens = view._num_blocks_done, view._kv_tokens
            self._emit(BlockDone(self._at, view.request.id, blocks, tokens, view.num_steps))

    def _reserve(self, view: RequestView) -> None:
        """Get a row the pages that its next step may write, or note that there are too few."""
        running = self._running
        more = running.lacks(view)
        if more and (more > running.free_pages or self._short):
            self._short[view] = None
            self._quiet_until = -_INF
        elif more:
            running.grow(view, more)

    def _change_phase(self, view: RequestView, phase: Phase) -> None:
        if phase is view._phase:
            return
        self._running.move(view, phase)
        self._quiet_until = -_INF
        if view._step_limit != _INF:
            self._limit_step = min(self._limit_step, self._clock.steps)
        if self._asking.admit or self._asking.settle:
            self._dirty = True  # fewer tokens in rows: a token budget may have room now
        if self._watch:
            self._emit(PhaseChanged(self._at, view.request.id, phase))

    def _meet_step_caps(self) -> None:
        """End the rows that met their step cap, and find when the next one may."""
        for view in self._running.at_limit():
            self._end(view, FinishReason.MAX_STEPS)
        self._limit_step = self._clock.steps + self._running.steps_to_limit()
        self._quiet_until = -_INF  # so that the next plan sets _stop_step by it

    def _count_steps(self) -> None:
        """Bring the totals up to date; called before whatever they count changes. O(1)."""
        steps = self._clock.steps - self._counted_steps
        if steps:
            self._counted_steps += steps
            self._row_steps += steps * len(self._rows)
            if self._queue.size:
                self._wasted += steps * len(self._running.free_slots)

    def _observe(self) -> None:
        """Hand the strategies what happened since they were last asked."""
        if self._unobserved:
            self._asking.observe(self._unobserved)
            self._unobserved = []

    def _land(self, step_id: int, steps: int) -> None:
        """A step is no longer in flight: give back slots that no later one has, of who ended."""
        still: list[tuple[RequestView, FinishReason, int, int]] = []
        for zombie in self._zombies:
            view, reason, first, last = zombie
            if step_id >= first:
                self._wasted += steps
            if step_id < last:
                still.append(zombie)
                continue
            self._free(view, reason)
            self._touch()
        self._zombies = still
        if still:
            self._stop_step = -_INF

    # --- small change -----------------------------------------------------------------------------

    def _install(self, asking: Asking) -> None:
        """Put a policy in force, with an empty queue for it."""
        self._asking = asking
        self._queue = WaitingQueue(by_class=asking.needs_lanes, track_arrivals=asking.due)
        self._set_watch()
        self._keep_counts()
        self._unobserved = []
        self._knob_boundaries = []
        self._recheck_step = _INF
        self._due_at = _INF
        self._batch_knobs, self._batch_knobs_until = NO_KNOBS, _INF
        self._stop_step = -_INF
        self._touch()

    def _keep_counts(self) -> None:
        """Follow a change of policy or capacity: what is kept, and which short ways are open."""
        asking, capacity = self._asking, self._capacity
        memory = capacity.memory
        self._max_rows = min(capacity.max_num_seqs, asking.max_rows)
        self._full = _NO_SLOT if self._max_rows == capacity.max_num_seqs else _MAX_ROWS
        self._sifts = bool(
            self._draining or memory is not None or asking.key or asking.accept or asking.observed
        )
        self._running.keep(
            joins=asking.victims or (memory is not None and memory.grows),
            lanes=asking.needs_lanes,
            lengths=asking.needs_length,
        )
        self._see_whether_plain()

    def _see_whether_plain(self) -> None:
        """Whether a plan has nothing to ask or tell but keys and limits, or but who joins."""
        asking = self._asking
        self._plain = asking.plain and not (
            self._paused or self._watch or self._capacity.memory is not None
        )
        self._all_alike = (
            asking.repeats_batches
            and not self._watch_steps
            and not asking.shapes_batches
            and not asking.needs_progress
        )

    def _touch(self) -> None:
        self._quiet_until = -_INF
        self._dirty = True

    def _is_running(self, view: object) -> bool:
        return (
            isinstance(view, RequestView)
            and view._status is _RUNNING
            and self._views.get(view.request.id) is view
        )

    def _reject(self, request: Request, reason: str, now: float) -> Rejected:
        self._now = now
        self._num_rejected += 1
        if self._watch:
            self._emit(RequestRejected(now, request, reason))
            self._flush_events()
        return Rejected(request.id, reason)

    def _update(self, batch: StepBatch | None, wake_at: float) -> Update:
        if self._events:
            self._flush_events()
        finished, released = tuple(self._finished), tuple(self._released)
        self._finished, self._released = [], []
        update: Update = _new(Update, (batch, finished, released, wake_at))
        return update

    def _set_watch(self) -> None:
        observed = self._asking.observed
        self._watch_steps = bool(self._observers) or not STEP_EVENTS.isdisjoint(observed)
        self._watch = bool(self._observers) or bool(observed - STEP_EVENTS)
        self._see_whether_plain()

    def _emit(self, event: Event) -> None:
        if self._observers:
            self._events.append(event)
        if type(event) in self._asking.observed:
            self._unobserved.append(event)
            self._quiet_until = -_INF

    def _flush_events(self) -> None:
        events = self._events
        self._events = []
        with self._locked():
            for observer in tuple(self._observers):
                try:
                    for event in events:
                        observer(event)
                except Exception:
                    logging.getLogger("dllm_sched").exception(
                        "observer %r raised and was removed", observer
                    )
                    self._observers.remove(observer)
                    self._set_watch()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Refuse calls from inside a policy's hook or an observer, at no cost to any call.

        While others are asked, ``_now`` is later than any ``now`` can be.
        """
        now = self._now
        self._now = _INF
        try:
            yield
        finally:
            self._now = now

    @staticmethod
    def _check_id(call: str, request_id: object) -> None:
        if not isinstance(request_id, str):
            raise ConfigError(f"{call}: request_id must be a str, got {request_id!r}")

    def _check_now(self, call: str, now: float) -> None:
        try:
            if self._now <= now <= _LATEST:
                return
        except TypeError:
            pass  # it is no number at all
        self._bad_clock(call, now)

    def _set_now(self, call: str, now: float) -> None:
        self._check_now(call, now)
        self._now = self._at = now
        self._count_steps()

    def _bad_clock(self, call: str, now: object) -> None:
        if self._now == _INF:
            raise EngineProtocolError(
                f"{call}: called from inside another call, by a policy's hook or an observer; note "
                "it, and make the call after the outer one has returned"
            )
        raise ClockError(
            f"{call}: now must be finite seconds that never go backward, got {now!r} after "
            f"{self._now!r}; is another clock mixed in?"
        )

    def _check_flight(self, call: str, batch: object) -> StepBatch:
        """The batch in flight, if this is a copy of it (from another process, say)."""
        flight = self._in_flight
        if flight is None:
            raise EngineProtocolError(f"{call}: no step is in flight; call next_step first")
        if not isinstance(batch, StepBatch):
            raise EngineProtocolError(f"{call}: step {flight.step_id} is in flight, got {batch!r}")
        if batch.step_id != flight.step_id:
            raise EngineProtocolError(
                f"{call}: step {flight.step_id} is in flight, got {batch.step_id!r}"
            )
        if [(row.slot, row.request.id) for row in batch.rows] != [
            (row.slot, row.request.id) for row in flight.rows
        ]:
            raise EngineProtocolError(
                f"{call}: step {flight.step_id} has other rows here; is it another scheduler's?"
            )
        return flight

    def _bad_steps(self, steps: object) -> None:
        if type(steps) is not int or steps < 1:
            raise EngineProtocolError(f"complete_step: steps must be an int >= 1, got {steps!r}")
        raise EngineProtocolError(
            f"complete_step: {steps} steps at once, but a decision may change after "
            f"{max(1, self._most_steps())} (see horizon)"
        )

    def _most_steps(self) -> float:
        """How many steps the batch in flight may take at once; not so many that counts blur."""
        return min(self._jump_step, _MOST_STEPS) - self._clock.steps

    def _dump(self) -> str:
        """The state in a line, for error messages."""
        running = self._running
        return (
            f"[now={self._at} waiting={self._queue.size} running={running.size} "
            f"free_slots={len(running.free_slots)} free_pages={running.free_pages} "
            f"draining={self._draining} paused={self._paused} head={self._queue.peek()!r} "
            f"blocked={self._blocked} due_at={self._due_at} policy={self.policy.name!r}]"
        )
