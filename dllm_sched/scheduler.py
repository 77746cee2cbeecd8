"""The facade that an engine calls: queues, slots, capacity and the life of every request.

Sans-IO: the caller owns the clock, the threads and the model. Nothing here reads a clock, draws a
random number, or logs on the hot path.

How a step stays cheap. Running rows stand in *cohorts* (same batch_key, same phase); a cohort has
one step clock, and a row's step count is a difference to it. When nothing changed since the last
step, ``next_step`` hands out the same row tuple and ``complete_step`` moves a clock: neither looks
at a row or at the queue. Whatever may change that (a submit, a finish, a boundary) drops
``_quiet``, and the next call decides anew, in small transactions: expiries, evictions, admissions,
composition. Each is staged and commits whole, so a policy that raises has changed nothing; what an
earlier transaction of the same call did is told before the error is met again.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Any, NamedTuple

from dllm_sched._lifecycle import Change, advance
from dllm_sched._queue import LaneQueue, LazyHeap, WaitingQueue
from dllm_sched._running import Cohort, KeyRows
from dllm_sched.batch import (
    NO_KNOBS,
    NOTHING,
    Accepted,
    BlockBoundary,
    Finished,
    Knobs,
    PhaseChange,
    Rejected,
    Released,
    Row,
    RowFailed,
    RowFate,
    RowFinished,
    StepBatch,
    StepOutcome,
    Update,
)
from dllm_sched.capacity import Capacity
from dllm_sched.errors import (
    ClockError,
    ConfigError,
    DllmSchedError,
    DuplicateRequestError,
    EngineProtocolError,
    InvariantError,
    OutcomeError,
    PolicyError,
    UnknownRequestError,
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
from dllm_sched.policies.base import ALL, Policy, Preempt, Verdict
from dllm_sched.request import FinishReason, Phase, Request, RequestStatus, RequestView
from dllm_sched.view import BlockedBy, Round, SchedulerView

__all__ = ["Counts", "Explanation", "Horizon", "Scheduler", "Stats"]

_INF = math.inf
_SKIPS_PER_ROUND = 8
_PHASES = tuple(Phase)
_STEP_EVENTS = frozenset({StepPlanned, StepCompleted, StepFailed})
_EMPTY: Mapping[Any, int] = MappingProxyType({})
_GO_ON = Update()
_ADMIT = Verdict.ADMIT
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
        policy: The six strategies; default: first come, first served, whatever fits, at once.
        capacity: What the engine can hold.
        observers: Callables given every event (``dllm_sched.events``) after its call has
            committed. One that raises is logged once and removed.

    Raises:
        ConfigError: If the policy can never work within the capacity.
    """

    def __init__(
        self,
        *,
        capacity: Capacity,
        policy: Policy | None = None,
        observers: Iterable[Callable[[Event], object]] = (),
    ) -> None:
        if not isinstance(capacity, Capacity):
            raise ConfigError(f"Scheduler: capacity must be a Capacity, got {capacity!r}")
        policy = _checked_policy(Policy() if policy is None else policy, capacity)
        self._capacity = capacity
        self._observers = list(observers)
        self._now = -_INF
        self._sequence = 0
        self._step_id = 0
        self._join_number = 0
        self._views: dict[str, RequestView] = {}
        self._slots: list[RequestView | None] = [None] * capacity.max_num_seqs
        self._free_slots = list(range(capacity.max_num_seqs - 1, -1, -1))
        self._free_pages = capacity.num_pages or 0
        self._num_running = 0
        self._tokens_in_rows = 0
        self._keys: dict[Hashable, KeyRows] = {}
        self._turns: deque[KeyRows] = deque()
        self._expiries = LazyHeap(lambda view: view._expire_at)
        self._knob_expiries = LazyHeap(lambda view: view._knobs_until)
        self._lengths: list[tuple[int, int, RequestView]] = []  # running rows, longest first
        self._running_by_lane: dict[Any, int] = {}
        self._joins: list[tuple[int, RequestView]] = []  # by admission; kept for ``victims``

        self._queue: WaitingQueue
        self._key_length: int | None = None

        self._in_flight: StepBatch | None = None
        self._flight_cohorts: tuple[Cohort, ...] = ()
        self._flight_views: tuple[RequestView, ...] | None = None  # composition chose rows
        self._flight_progress = False  # the policy that planned it needs masked_remaining
        self._zombies: list[tuple[RequestView, FinishReason]] = []  # ended while it was in flight
        self._joined: list[RequestView] = []  # not yet handed out in a batch
        self._finished: list[Finished] = []
        self._released: list[Released] = []
        self._events: list[Event] = []
        self._unobserved: list[Event] = []

        self._paused = False
        self._draining = False
        self._quiet = False  # the last batch may be handed out again as it is
        self._rows: tuple[Row, ...] = ()
        self._cohorts: tuple[Cohort, ...] = ()
        self._dirty = True  # something changed that admission may care about
        self._wake_at = -_INF
        self._due_at = _INF
        self._recheck_step: float = _INF
        self._limit_steps = _INF  # completed steps at which a step cap may be met
        self._blocked: tuple[str, BlockedBy] | None = None
        self._boundaries: list[RequestView] = []
        self._retired = 0
        self._round_step = 0
        self._short: list[RequestView] = []  # rows whose growth found no pages
        self._batch_knobs: Knobs = NO_KNOBS
        self._batch_knobs_until = -_INF

        self._num_steps = 0
        self._row_steps = 0
        self._wasted = 0
        self._num_rounds = 0
        self._num_preempted = 0
        self._num_failed_steps = 0
        self._num_blocks = 0
        self._num_rejected = 0
        self._num_finished = 0
        self._by_reason = dict.fromkeys(FinishReason, 0)

        self._set_policy(policy, [part.init() for part in policy.strategies])
        if self._watch:
            self._emit(PolicySet(-_INF, policy.name))
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
            PolicyError: If the ordering answers nonsense.
        """
        if not self._now <= now < _INF:
            self._bad_clock("submit", now)
        if not isinstance(request, Request):
            raise ConfigError(f"submit: expected a Request, got {request!r}")
        if request.id in self._views:
            raise DuplicateRequestError(
                f"submit: request {request.id!r} is still "
                f"{self._views[request.id]._status.value}; use another id, or wait until it has "
                "finished"
            )
        capacity = self._capacity
        if self._draining:
            return self._reject(request, "draining", now)
        if capacity.memory is not None and not capacity.fits(request):
            return self._reject(request, "too_large", now)
        view = RequestView(
            request, self._sequence, now, capacity.max_tokens(request, Phase.PREFILL)
        )
        if self._asks_accept:
            try:
                reason = self._policy.admission.accept(self._states[1], view, self._view(now))
            except Exception as error:
                raise self._policy_error("admission.accept", view, error) from error
            if reason is not None:
                return self._reject(request, str(reason), now)
        key = self._sort_key(view) if self._asks_key else ()

        self._now = now
        self._sequence += 1
        self._views[request.id] = view
        self._queue.push(view, key)
        expire_at = request.deadline_at
        if now + request.queue_timeout_s < expire_at:
            expire_at = now + request.queue_timeout_s
            view._expire_reason = FinishReason.QUEUE_TIMEOUT
        if expire_at != _INF:
            view._expire_at = expire_at
            self._expiries.push(expire_at, view)
            if expire_at < self._wake_at:
                self._wake_at = expire_at
        if self._free_slots or self._asks_settle:
            self._quiet = False
            self._dirty = True
        if self._watch:
            self._emit(RequestSubmitted(now, request))
            self._flush_events()
        return Accepted(request.id)

    def cancel(self, request_id: str, *, now: float) -> Update:
        """End a request in whatever state; nothing happens if it is not active. O(log n).

        A row whose step is in flight ends at once, but its slot comes back (``released``) only
        when that step has completed.
        """
        self._check_clock("cancel", now)
        self._now = now
        view = self._views.get(request_id)
        if view is not None:
            self._end(view, FinishReason.CANCELLED)
        return self._update(None, -_INF if view is not None else self._wake_at)

    # --- steps --------------------------------------------------------------------------------

    def next_step(self, *, now: float) -> Update:
        """Plan the next step.

        O(1) if nothing changed since the last one; else O(log n) per request that joins or
        leaves, plus at most one copy of the row tuple.

        Returns:
            The batch to run, or None and the instant (``wake_at``) before which nothing changes
            without input.

        Raises:
            EngineProtocolError: If a batch is still in flight.
            ClockError: If ``now`` is not finite or went backward.
            PolicyError: If the policy raised, answered nonsense, or lets nothing go while
                draining. Nothing has changed then.
        """
        if self._in_flight is not None:
            raise EngineProtocolError(
                f"next_step: step {self._in_flight.step_id} is in flight; complete_step or "
                "fail_step comes first"
            )
        if not self._now <= now < _INF:
            self._bad_clock("next_step", now)
        if self._quiet and now < self._wake_at and self._num_steps < self._recheck_step:
            self._now = now
            batch: StepBatch = _new(
                StepBatch, (self._step_id, now, self._rows, (), self._batch_knobs, ())
            )
            self._step_id += 1
            self._in_flight = batch
            if self._watch_steps:
                self._emit(
                    StepPlanned(now, batch.step_id, len(batch.rows), 0, self._queue.size)
                )
                self._flush_events()
            return _new(Update, (batch, (), (), self._wake_at))
        return self._plan(now)

    def complete_step(
        self, batch: StepBatch, outcome: StepOutcome = NOTHING, *, now: float, steps: int = 1
    ) -> Update:
        """Report what happened in a step. O(what is reported), O(1) for ``NOTHING``.

        Args:
            batch: The batch in flight.
            outcome: What happened; rows it does not name advanced by ``steps``.
            now: Seconds.
            steps: Steps taken at once, 1 <= steps <= ``horizon().steps``; the outcome belongs to
                the last of them.

        Raises:
            EngineProtocolError: If ``batch`` is not the one in flight, or ``steps`` is out of
                range.
            OutcomeError: If the outcome names a row that is not in the batch, one twice, or
                impossible progress. Nothing has changed then.
            ClockError: If ``now`` is not finite or went backward.
        """
        if batch is not self._in_flight:
            self._check_flight("complete_step", batch)
        if not self._now <= now < _INF:
            self._bad_clock("complete_step", now)
        if steps != 1:
            self._check_steps(steps)
        if (
            outcome is NOTHING
            and self._num_steps + steps < self._limit_steps
            and not self._zombies
            and not self._flight_progress
            and self._flight_views is None
        ):
            self._tick(batch, now, steps)
            if self._watch_steps:
                self._emit(StepCompleted(now, batch.step_id, len(batch.rows), steps))
                self._flush_events()
            return _GO_ON
        self._check_outcome(batch, outcome)
        self._tick(batch, now, steps)
        if self._watch_steps:
            self._emit(StepCompleted(now, batch.step_id, len(batch.rows), steps))
        self._apply(batch, outcome)
        self._meet_step_limits()
        self._land(steps)
        return self._update(None, -_INF)

    def fail_step(
        self,
        batch: StepBatch,
        error: BaseException,
        *,
        rows: Mapping[int, RowFate],
        now: float,
    ) -> Update:
        """Report that a step failed. After it nobody has advanced. O(rows named).

        Args:
            batch: The batch in flight.
            error: What went wrong; becomes ``Finished.error`` of the rows that fail.
            rows: For slots of the batch: ``RowFate.FAIL`` (ends with ``error``), ``RESTART``
                (waits again, from nothing) or ``KEEP`` (stays in its slot). Not named: ``KEEP``.
            now: Seconds.

        Raises:
            EngineProtocolError: If ``batch`` is not the one in flight.
            OutcomeError: If a slot is not in the batch, or its fate is none of the three.
            PolicyError: If the ordering raised for a row that waits again.
        """
        if batch is not self._in_flight:
            self._check_flight("fail_step", batch)
        self._check_clock("fail_step", now)
        fates: list[tuple[RequestView, RowFate]] = []
        for slot, fate in rows.items():
            view = self._in_batch(slot, "fail_step")
            if not isinstance(fate, RowFate):
                raise OutcomeError(
                    f"fail_step: slot {slot} ({view.request.id!r}): expected a RowFate, got "
                    f"{fate!r}"
                )
            if view._status is RequestStatus.RUNNING:
                fates.append((view, fate))
        keys = {
            view._sequence: self._sort_key(view)
            for view, fate in fates
            if fate is RowFate.RESTART
        }
        self._now = now
        self._num_failed_steps += 1
        if self._watch_steps:
            self._emit(StepFailed(now, batch.step_id, len(batch.rows), repr(error)))
        self._in_flight = None
        for row in batch.joined:  # for the engine they never joined: name them again
            joined = self._slots[row.slot]
            if joined is not None and joined._status is RequestStatus.RUNNING:
                self._joined.append(joined)
        for view, fate in fates:
            if fate is RowFate.FAIL:
                self._retire(view, FinishReason.ERROR, error=error)
            elif fate is RowFate.RESTART:
                self._preempt(view, Preempt.RESTART, keys[view._sequence])
        self._quiet = False
        self._land(0)
        return self._update(None, -_INF)

    def horizon(self) -> Horizon:
        """How long the batch in flight stays as it is without input. O(1).

        Returns:
            ``steps``: the least of admission's ``recheck``, the step caps, and 1 where the policy
            is asked at every step; ``until``: the least of due instants, expiries and knobs'
            ends. Whatever the engine itself reports (a finish, a boundary) ends it as well.

        Raises:
            EngineProtocolError: If no batch is in flight.
        """
        if self._in_flight is None:
            raise EngineProtocolError("horizon: no batch is in flight; call next_step first")
        if self._flight_progress or not self._quiet:
            return Horizon(1, self._wake_at)
        steps = min(self._recheck_step, self._limit_steps) - self._num_steps
        return Horizon(max(1, steps), self._wake_at)

    # --- control ------------------------------------------------------------------------------

    def set_policy(self, policy: Policy, *, now: float) -> Update:
        """Swap the policy, live. O(waiting + running).

        Every waiting request is keyed and laned anew, every row's limits and knobs are asked
        anew. An axis whose strategy is the same object keeps its state.

        Raises:
            ConfigError: If the policy can never work within the capacity.
            PolicyError: If it raises while it is asked. The old policy stays then.
        """
        self._check_clock("set_policy", now)
        policy = _checked_policy(policy, self._capacity)
        old = self._policy
        states = [
            state if new is previous else new.init()
            for new, previous, state in zip(
                policy.strategies, old.strategies, self._states, strict=True
            )
        ]
        waiting = sorted(self._queue, key=lambda view: view._sequence)
        keys = [self._key(policy, states[0], view) for view in waiting]
        for key, view in zip(keys, waiting, strict=True):
            self._check_key_length(policy, key, len(keys[0]), view)
        running = self._running()
        limits = [self._limits(policy, view) for view in running]

        self._now = now
        self._set_policy(policy, states)
        self._key_length = len(keys[0]) if keys else None
        for view, key in zip(waiting, keys, strict=True):
            self._queue.push(view, key)
        self._expiries.clear()
        for view in waiting:
            if view._expire_at != _INF:
                self._expiries.push(view._expire_at, view)
        self._knob_expiries.clear()
        self._joins = sorted((view._join_number, view) for view in running)
        self._lengths = []
        self._running_by_lane = {}
        for view, (instant, steps) in zip(running, limits, strict=True):
            self._arm(view, instant)
            view._step_limit = steps
            if isinstance(view._cohort, Cohort):
                view._cohort.push_limit(view)
            view._knobs_until = -_INF if self._asks_knobs else _INF
            if self._asks_knobs:
                self._knob_expiries.push(-_INF, view)
            elif view._knobs:
                self._rewrite_row(view, NO_KNOBS)
            self._count_row(view)
        self._limit_steps = -_INF
        self._meet_step_limits()
        if self._watch:
            self._emit(PolicySet(now, policy.name))
        return self._update(None, -_INF)

    def set_capacity(self, capacity: Capacity, *, now: float) -> Update:
        """Change the limits, live. O(slots).

        Rows above a smaller limit run on; nobody joins until there is room again. A waiting
        request that could not run alone any more ends with ``ERROR`` when its turn comes.

        Raises:
            ConfigError: If the policy can never work within it, or the memory model changes kind
                while rows run.
        """
        self._check_clock("set_capacity", now)
        if not isinstance(capacity, Capacity):
            raise ConfigError(f"set_capacity: expected a Capacity, got {capacity!r}")
        if capacity.memory != self._capacity.memory and self._num_running:
            raise ConfigError(
                "set_capacity: the memory model cannot change while rows run; drain first"
            )
        if capacity.window_blocks != self._capacity.window_blocks and self._views:
            raise ConfigError(
                "set_capacity: window_blocks cannot change while requests are active; drain first"
            )
        self._policy.validate(capacity)
        self._now = now
        used_pages = (self._capacity.num_pages or 0) - self._free_pages
        self._capacity = capacity
        self._keep_joins = self._asks_victims or _grows(capacity)
        self._free_pages = (capacity.num_pages or 0) - used_pages
        missing = capacity.max_num_seqs - len(self._slots)
        self._slots.extend([None] * missing)
        self._free_slots = [
            slot
            for slot in range(capacity.max_num_seqs - 1, -1, -1)
            if self._slots[slot] is None
        ]
        self._touch()
        if self._watch:
            self._emit(CapacitySet(now, capacity.max_num_seqs, capacity.num_pages))
        return self._update(None, -_INF)

    def pause(self, *, now: float) -> Update:
        """Hand out no more batches (weights are being changed); time limits still pass."""
        self._check_clock("pause", now)
        self._now = now
        self._paused = True
        self._quiet = False
        if self._watch:
            self._emit(Paused(now))
        return self._update(None, -_INF)

    def resume(self, *, now: float) -> Update:
        """Go on after ``pause``."""
        self._check_clock("resume", now)
        self._now = now
        self._paused = False
        self._touch()
        if self._watch:
            self._emit(Resumed(now))
        return self._update(None, -_INF)

    def drain(self, *, now: float) -> Update:
        """Promise that no more requests come: ``submit`` rejects, partial batches may go."""
        self._check_clock("drain", now)
        self._now = now
        self._draining = True
        self._touch()
        if self._watch:
            self._emit(DrainStarted(now))
        return self._update(None, -_INF)

    # --- values -------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    @property
    def capacity(self) -> Capacity:
        """The capacity in force."""
        return self._capacity

    def has_work(self) -> bool:
        """Whether a request is active, or an ending still has to be told. O(1)."""
        return bool(self._views or self._finished or self._released or self._zombies)

    def counts(self) -> Counts:
        """How many requests are where. O(1)."""
        return Counts(
            self._sequence,
            self._num_rejected,
            self._queue.size,
            self._num_running,
            self._num_finished,
        )

    def stats(self) -> Stats:
        """Totals since construction. O(1)."""
        return Stats(
            self._num_steps,
            self._row_steps,
            self._wasted,
            self._num_rounds,
            self._join_number,
            self._num_preempted,
            self._num_failed_steps,
            self._num_blocks,
            MappingProxyType(dict(self._by_reason)),
            self._tokens_in_rows,
            max(0, self._capacity.max_num_seqs - self._num_running),
            None if self._capacity.num_pages is None else self._free_pages,
        )

    def view(self, request_id: str) -> RequestView:
        """The live view of an active request. O(1).

        Raises:
            UnknownRequestError: If the id is not active.
        """
        try:
            return self._views[request_id]
        except KeyError:
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
        if status is RequestStatus.RUNNING:
            return Explanation(status, f"runs in slot {view._slot}, {view.num_steps} steps done")
        if self._paused:
            return Explanation(status, "the scheduler is paused; resume() lets it go on")
        if self._dirty:
            return Explanation(status, "the next call of next_step will decide about it")
        if self._blocked is None:
            if not self._num_running and self._due_at != _INF:
                return Explanation(
                    status, "its batch is not due yet", until=max(self._due_at, self._now)
                )
            return Explanation(
                status,
                "the timeout axis waits for more requests, or the admission axis passed it over",
            )
        head, why = self._blocked
        reason = {
            BlockedBy.SLOTS: "every slot is taken",
            BlockedBy.MEMORY: "there are not enough free KV pages",
            BlockedBy.POLICY: f"policy {self._policy.name!r} holds it back",
        }[why]
        if head == request_id:
            return Explanation(status, f"it is the head of the queue, but {reason}")
        return Explanation(status, f"request {head!r} is ahead of it, and {reason}", behind=head)

    # --- planning -----------------------------------------------------------------------------

    def _plan(self, now: float) -> Update:
        """``next_step`` when something may have changed; see the module's docstring."""
        before, wake_at = self._now, self._wake_at
        self._now = now
        self._progressed = False
        self._expire(now)
        batch: StepBatch | None = None
        memo: tuple[Any, ...] = ()
        try:
            self._observe()
            memo = self._memo()
            if not self._paused:
                batch = self._decide(now)
            if batch is None:
                self._check_drain()
        except BaseException:
            if memo:
                self._restore(memo)
            self._dirty = True
            self._quiet = False
            self._wake_at = wake_at
            if self._progressed or self._finished or self._released:
                return self._update(None, -_INF)  # tell it; the next call meets the error again
            self._now = before
            raise
        self._wake_at = min(self._expiries.first(), self._due_at, self._knob_expiries.first())
        if batch is None:
            return self._update(None, self._wake_at)
        if self._batch_knobs_until < self._wake_at:
            self._wake_at = self._batch_knobs_until
        self._step_id += 1
        self._in_flight = batch
        if self._watch_steps:
            self._emit(
                StepPlanned(
                    now, batch.step_id, len(batch.rows), len(batch.joined), self._queue.size
                )
            )
        return self._update(batch, self._wake_at)

    def _memo(self) -> tuple[Any, ...]:
        """What a round writes beside joins; put back if the call fails after it."""
        return (
            self._states,
            self._num_rounds,
            self._round_step,
            self._boundaries,
            self._retired,
            self._recheck_step,
            self._blocked,
            self._due_at,
        )

    def _restore(self, memo: tuple[Any, ...]) -> None:
        (
            self._states,
            self._num_rounds,
            self._round_step,
            self._boundaries,
            self._retired,
            self._recheck_step,
            self._blocked,
            self._due_at,
        ) = memo

    def _check_drain(self) -> None:
        """While draining no input can help: a policy that starts nothing would stall for ever."""
        if not self._draining or self._paused or not self._views:
            return
        if min(self._expiries.first(), self._due_at) == _INF:
            raise PolicyError(
                f"policy {self._policy.name!r} starts nothing while draining: every axis must let "
                f"the leftovers go when view.draining is True. {self._dump()}"
            )

    def _decide(self, now: float) -> StepBatch | None:
        if self._short or self._asks_every_victim:
            self._evict(now)
        round: Round | None = None
        if (
            self._dirty
            or self._every_step
            or now >= self._due_at
            or self._num_steps >= self._recheck_step
        ):
            self._dirty = False  # unless the round leaves something to look at
            self._due_at = _INF
            queue = self._queue
            if self._asks_settle or (
                queue.size and self._num_running < self._capacity.max_num_seqs
            ):
                round = self._new_round(now)
                self._admit(round, now)
            else:  # nothing to ask: nobody waits, or every slot is taken
                self._blocked = None
                if queue.size and (head := queue.peek()) is not None:
                    self._blocked = (head.request.id, BlockedBy.SLOTS)
                self._boundaries = []
                self._retired = 0
                self._recheck_step = _INF
        if self._asks_knobs:
            self._renew_knobs(now)
        return self._compose(round, now)

    def _new_round(self, now: float) -> Round:
        return Round(
            self._view(now),
            num_steps=self._num_steps - self._round_step,
            boundaries=self._boundaries,
            num_retired=self._retired,
            rows=self._running if self._needs_rows else None,
            youngest=self._youngest,
        )

    def _view(self, now: float, key: Any = None) -> SchedulerView:
        """The counts; with ``key`` (a KeyQueue), those of one batch_key for ``due``."""
        capacity = self._capacity
        queue = self._queue
        limited = capacity.num_pages is not None
        oldest = _INF
        if self._asks_due:
            keys = queue.keys.values() if key is None else (key,)
            oldest = min((queue.oldest_arrival_at(k) for k in keys), default=_INF)
        return SchedulerView(
            now,
            self._draining,
            queue.size if key is None else key.size,
            self._num_running,
            capacity.max_num_seqs,
            max(0, capacity.max_num_seqs - self._num_running),
            capacity.num_pages,
            max(0, self._free_pages) if limited else None,
            self._tokens_in_rows,
            oldest,
            None if key is None else key.batch_key,
            self._longest() if self._needs_length else 0,
            {lane: q.size for lane, q in queue.lanes.items()} if self._needs_lanes else _EMPTY,
            dict(self._running_by_lane) if self._needs_lanes else _EMPTY,
            {
                phase: sum(
                    len(k.cohorts[phase].rows) for k in self._keys.values() if phase in k.cohorts
                )
                for phase in _PHASES
            }
            if self._asks_select or self._asks_settle
            else _EMPTY,
        )

    def _admit(self, round: Round, now: float) -> None:
        """One admission round; commits whole or not at all."""
        queue = self._queue
        capacity = self._capacity
        policy = self._policy
        admission = policy.admission
        state = self._states[1]
        asks_admit, asks_joined = self._asks_admit, self._asks_joined
        memory = capacity.memory
        idle = not self._num_running
        room = capacity.max_num_seqs - self._num_running
        pages = self._free_pages
        need = 0
        staged: list[RequestView] = []
        aside: list[RequestView] = []
        parked: list[LaneQueue] = []
        others: list[LaneQueue] = []  # of batch_keys that could have started as well
        hopeless: RequestView | None = None
        asking = "timeout.due"
        view: RequestView | None = None
        try:
            if self._asks_due and (idle or self._due_every_step) and queue.size:
                self._hold_back(now, parked)
            while (view := queue.peek()) is not None:
                if len(staged) >= room:
                    round.blocked, round.blocked_by = view, BlockedBy.SLOTS
                    break
                if memory is not None:
                    need = memory.pages(view.request, view._kv_tokens or view.request.prompt_len)
                    if need > pages or not capacity.fits(view.request):
                        if not capacity.fits(view.request):
                            hopeless = view
                        round.blocked, round.blocked_by = view, BlockedBy.MEMORY
                        break
                if asks_admit:
                    asking = "admission.admit"
                    verdict = admission.admit(state, view, round)
                    if verdict is not _ADMIT:
                        if verdict is Verdict.SKIP:
                            aside.append(queue.pop())
                            if len(aside) < _SKIPS_PER_ROUND:
                                continue
                        elif verdict is Verdict.SKIP_LANE:
                            parked.append(view._lane)
                            queue.park(view._lane)
                            if round.blocked is None:
                                round.blocked, round.blocked_by = view, BlockedBy.POLICY
                            continue
                        elif verdict is not Verdict.STOP:
                            raise PolicyError(
                                f"policy {policy.name!r}: admit must return a Verdict, got "
                                f"{verdict!r} for request {view.request.id!r}"
                            )
                        round.blocked, round.blocked_by = view, BlockedBy.POLICY
                        break
                queue.pop()
                if idle and not staged and len(queue.keys) > 1:
                    others = self._park_other_keys(view)  # an idle engine starts one batch_key
                staged.append(view)
                pages -= need
                round.joined.append(view)
                round.num_joined += 1
                round.joined_tokens += view._max_tokens
                if asks_joined:
                    asking = "admission.joined"
                    state = admission.joined(state, view, round)
            if round.blocked is None and aside:
                round.blocked, round.blocked_by = aside[0], BlockedBy.POLICY
            recheck: float = _INF
            if self._asks_settle:
                asking = "admission.settle"
                state = admission.settle(state, round)
            if self._asks_recheck and queue.size > len(staged):
                asking = "admission.recheck"
                recheck = admission.recheck(state, round)
                if not recheck >= 1:
                    raise PolicyError(
                        f"policy {policy.name!r}: recheck must return steps >= 1 (inf = only after "
                        f"a change), got {recheck!r}"
                    )
            limits = [self._limits(policy, one) for one in staged] if self._asks_limits else None
            knobs = (
                [self._ask_knobs(one, round.view) for one in staged] if self._asks_knobs else None
            )
        except BaseException as error:
            for one in (*staged, *aside):
                queue.restore(one)
            for lane in (*parked, *others):
                queue.unpark(lane)
            if isinstance(error, DllmSchedError) or not isinstance(error, Exception):
                raise
            raise self._policy_error(asking, view, error) from error
        # nothing below can raise
        for one in aside:
            queue.restore(one)
        for one in staged:
            queue.settle_pop(one)
        for lane in parked:
            queue.unpark(lane)
        for lane in others:
            queue.unpark(lane)
        if self._asks_settle:
            self._states = [self._states[0], state, *self._states[2:]]
        self._num_rounds += 1
        self._round_step = self._num_steps
        self._boundaries = []
        self._retired = 0
        self._recheck_step = self._num_steps + recheck
        blocked, why = round.blocked, round.blocked_by
        self._blocked = None if blocked is None or why is None else (blocked.request.id, why)
        for index, one in enumerate(staged):
            instant, steps = (_INF, _INF) if limits is None else limits[index]
            one._step_limit = steps
            self._join(one, now, NO_KNOBS if knobs is None else knobs[index][0])
            if instant != one._expire_at:
                self._arm(one, instant)
            one._expire_reason = FinishReason.DEADLINE
            if knobs is not None:
                self._arm_knobs(one, knobs[index][1])
        if staged:
            self._progressed = True
            if idle and queue.size and (others or parked):
                self._dirty = True  # the other batch_keys may join from the next step on
        if hopeless is not None:
            self._end(
                hopeless,
                FinishReason.ERROR,
                error=ConfigError(
                    f"request {hopeless.request.id!r} can hold more KV pages than the capacity has "
                    "now; it was accepted under a larger one"
                ),
            )
            self._dirty = True

    def _hold_back(self, now: float, parked: list[LaneQueue]) -> None:
        """Park the lanes of the batch_keys that are not due yet. O(batch_keys)."""
        queue = self._queue
        for key in queue.keys.values():
            due = self._policy.timeout.due(self._states[2], self._view(now, key))
            if not due <= _INF:
                raise PolicyError(
                    f"policy {self._policy.name!r}: due must be an instant (inf = only by input), "
                    f"got {due!r}"
                )
            if now < due:
                self._due_at = min(self._due_at, due)
                for lane in key.lanes.values():
                    parked.append(lane)
                    queue.park(lane)

    def _park_other_keys(self, view: RequestView) -> list[LaneQueue]:
        parked = []
        for key in self._queue.keys.values():
            if key is not view._lane.key_queue:
                for lane in key.lanes.values():
                    if not lane.parked:
                        parked.append(lane)
                        self._queue.park(lane)
        return parked

    def _compose(self, round: Round | None, now: float) -> StepBatch | None:
        if not self._num_running:
            self._quiet = False
            return None
        turns = self._turns
        control = self._policy.control
        selection: Any = ALL
        chosen: tuple[RequestView, ...] | None = None
        rows: tuple[Row, ...] = ()
        cohorts: tuple[Cohort, ...] = ()
        batch_knobs, until = NO_KNOBS, _INF
        hints: tuple[Any, ...] = ()
        asking = "composition.select"
        if round is None and (self._asks_select or self._asks_hints or self._asks_batch_knobs):
            round = self._new_round(now)
        try:
            if self._asks_select:
                selection, chosen = self._checked_selection(
                    self._policy.composition.select(self._states[3], round)  # type: ignore[arg-type]
                )
            turn, rows, cohorts, chosen = self._take_turn(selection, chosen)
            if not rows:
                asking = "timeout.due"
                self._wait_for_due(now)
                return None
            if self._asks_batch_knobs and round is not None:
                asking = "control.batch_knobs"
                batch_knobs, until = _checked_knobs(
                    control.batch_knobs(self._states[5], round.view), now
                )
            if self._asks_hints and round is not None:
                asking = "control.hints"
                hints = tuple(control.hints(self._states[5], round))
        except DllmSchedError:
            raise
        except Exception as error:
            raise self._policy_error(asking, None, error) from error
        # nothing below can raise
        turns.rotate(-turn - 1)
        self._batch_knobs, self._batch_knobs_until = batch_knobs, until
        joined: tuple[Row, ...] = ()
        if self._joined:
            joined = self._take_joined(chosen, cohorts)
        self._rows = rows
        self._cohorts = cohorts
        self._flight_cohorts = cohorts
        self._flight_views = chosen
        self._flight_progress = self._needs_progress
        self._quiet = (
            len(turns) == 1
            and not self._every_step
            and not self._asks_select
            and not self._dirty
            and not self._joined
        )
        return StepBatch(self._step_id, now, rows, joined, batch_knobs, hints)

    def _take_turn(
        self, selection: Any, chosen: tuple[RequestView, ...] | None
    ) -> tuple[int, tuple[Row, ...], tuple[Cohort, ...], tuple[RequestView, ...] | None]:
        """The rows of the batch_key whose turn it is, among those that have any selected."""
        for turn, key_rows in enumerate(self._turns):
            if chosen is None:
                rows, cohorts = key_rows.select(selection)
                if rows:
                    return turn, rows, cohorts, None
            else:
                key = key_rows.batch_key
                mine = tuple(view for view in chosen if view.request.batch_key == key)
                if mine:
                    return turn, tuple(map(_row_of, mine)), (), mine
        return 0, (), (), chosen

    def _wait_for_due(self, now: float) -> None:
        """Composition selected nobody: legal only while the timeout axis will end the wait."""
        keys = self._queue.keys.values()
        timeout, state = self._policy.timeout, self._states[2]
        due = min((timeout.due(state, self._view(now, key)) for key in keys), default=_INF)
        if not now < due < _INF:
            raise PolicyError(
                f"policy {self._policy.name!r}: composition selected none of {self._num_running} "
                f"running rows though no later instant is due (got {due}); nothing would ever "
                f"happen. {self._dump()}"
            )
        self._due_at = min(self._due_at, due)
        self._quiet = False

    def _take_joined(
        self,
        chosen: tuple[RequestView, ...] | None,
        cohorts: tuple[Cohort, ...],
    ) -> tuple[Row, ...]:
        """The rows of this batch that are new in their slot; the others stay for a later one."""
        inside: list[Row] = []
        later: list[RequestView] = []
        for view in self._joined:
            cohort = view._cohort
            if not isinstance(cohort, Cohort):
                continue  # left again before its first step
            if (view in chosen) if chosen is not None else (cohort in cohorts):
                inside.append(cohort.rows[view._index])
            else:
                later.append(view)
        self._joined = later
        return tuple(inside)

    def _checked_selection(self, selection: Any) -> tuple[Any, tuple[RequestView, ...] | None]:
        if selection is ALL:
            return ALL, None
        chosen = tuple(selection)
        if all(isinstance(one, Phase) for one in chosen):
            return frozenset(chosen), None
        if not self._needs_rows:
            raise PolicyError(
                f"policy {self._policy.name!r}: select returned rows without declaring "
                'needs = frozenset({"rows"})'
            )
        seen: set[int] = set()
        for view in chosen:
            if (
                not isinstance(view, RequestView)
                or view._status is not RequestStatus.RUNNING
                or self._views.get(view.request.id) is not view
                or view._sequence in seen
            ):
                raise PolicyError(
                    f"policy {self._policy.name!r}: select must return running rows, each once; "
                    f"got {view!r}"
                )
            seen.add(view._sequence)
        return ALL, chosen

    def _evict(self, now: float) -> None:
        """Ask for victims, then make sure that what is left can grow."""
        short = [view for view in self._short if view._status is RequestStatus.RUNNING]
        memory = self._capacity.memory
        needs = []
        for view in short:
            if memory is not None:
                needs.append(memory.pages(view.request, view._kv_tokens) - view._num_pages)
        lacking = max(0, sum(needs) - self._free_pages) if short else 0
        victims: list[tuple[RequestView, Any]] = []
        if self._asks_victims and (lacking or self._asks_every_victim):
            try:
                answer = list(
                    self._policy.eviction.victims(self._states[4], lacking, self._new_round(now))
                )
            except DllmSchedError:
                raise
            except Exception as error:
                raise self._policy_error("eviction.victims", None, error) from error
            victims = self._checked_victims(answer)
        keys = {
            view._sequence: self._sort_key(view)
            for view, how in victims
            if isinstance(how, Preempt)
        }
        gone = {view._sequence for view, _ in victims}
        lacking = self._still_lacking(short, gone, victims)
        spares: list[RequestView] = []
        if lacking > 0:  # the policy freed too little: youngest first, so that the oldest advances
            for view in self._youngest():
                if view._sequence in gone:
                    continue
                keys[view._sequence] = self._sort_key(view)
                gone.add(view._sequence)
                spares.append(view)
                lacking = self._still_lacking(
                    short, gone, [*victims, *((one, Preempt.RESTART) for one in spares)]
                )
                if lacking <= 0:
                    break
        # nothing below can raise
        for view, how in victims:
            if isinstance(how, Preempt):
                self._preempt(view, how, keys[view._sequence])
            else:
                self._retire(view, how)
        for view in spares:
            self._preempt(view, Preempt.RESTART, keys[view._sequence])
        for view in short:
            if view._status is RequestStatus.RUNNING and memory is not None:
                pages = memory.pages(view.request, view._kv_tokens)
                self._free_pages -= pages - view._num_pages
                view._num_pages = pages
        self._short.clear()

    def _still_lacking(
        self, short: list[RequestView], gone: set[int], victims: Sequence[tuple[RequestView, Any]]
    ) -> int:
        memory = self._capacity.memory
        if memory is None or not short:
            return 0
        need = sum(
            memory.pages(view.request, view._kv_tokens) - view._num_pages
            for view in short
            if view._sequence not in gone
        )
        if not need:
            return 0
        return need - self._free_pages - sum(view._num_pages for view, _ in victims)

    def _checked_victims(self, answer: list[Any]) -> list[tuple[RequestView, Any]]:
        seen: set[int] = set()
        for one in answer:
            view, how = one if isinstance(one, tuple) and len(one) == 2 else (None, None)
            if (
                not isinstance(view, RequestView)
                or view._status is not RequestStatus.RUNNING
                or self._views.get(view.request.id) is not view
                or view._sequence in seen
                or not isinstance(how, Preempt | FinishReason)
            ):
                raise PolicyError(
                    f"policy {self._policy.name!r}: victims must be (running row, KEEP | RESTART | "
                    f"finish reason), each row once; got {one!r}"
                )
            seen.add(view._sequence)
        return answer

    def _expire(self, now: float) -> None:
        if self._expiries.first() > now:
            return
        for view in self._expiries.pop_due(now):
            self._end(view, view._expire_reason)

    def _observe(self) -> None:
        """Feed the strategies what happened since they were last asked."""
        if not self._unobserved:
            return
        states = list(self._states)
        event: Event | None = None
        try:
            for event in self._unobserved:
                kind = type(event)
                for axis, strategy in self._observing.get(kind, ()):
                    states[axis] = strategy.observe(states[axis], event)
        except Exception as error:
            raise PolicyError(
                f"policy {self._policy.name!r}: observe raised {error!r} on {event!r}"
            ) from error
        self._states = states
        self._unobserved.clear()

    # --- changes of one request -----------------------------------------------------------------

    def _join(self, view: RequestView, now: float, knobs: Knobs) -> None:
        advance(view, Change.ADMIT)
        slot = self._free_slots.pop()
        request = view.request
        self._slots[slot] = view
        view._slot = slot
        if view._admitted_at is None:
            view._admitted_at = now
        view._join_number = self._join_number
        self._join_number += 1
        memory = self._capacity.memory
        if memory is not None:
            view._num_pages = memory.pages(request, view._kv_tokens or request.prompt_len)
            self._free_pages -= view._num_pages
        self._num_running += 1
        self._tokens_in_rows += view._max_tokens
        view._knobs = knobs
        key_rows = self._keys.get(request.batch_key)
        if key_rows is None:
            key_rows = self._keys[request.batch_key] = KeyRows(request.batch_key)
            self._turns.append(key_rows)
        key_rows.size += 1
        row = Row(slot, request, view._phase, view._max_tokens, knobs, view._resumed)
        self._cohort(key_rows, view._phase).add(view, row)
        if view._step_limit != _INF:
            left = view._step_limit - view.num_steps
            self._limit_steps = min(self._limit_steps, self._num_steps + left)
        self._joined.append(view)
        if self._keep_joins:
            joins = self._joins
            joins.append((view._join_number, view))
            if len(joins) > 64 and len(joins) > 2 * self._num_running:
                self._joins = [j for j in joins if self._is_join(j)]
        if self._needs_length or self._needs_lanes:
            self._count_row(view)
        if self._watch:
            self._emit(
                RequestJoined(
                    now, request.id, slot, self._step_id, now - view._arrived_at, view._resumed
                )
            )

    def _cohort(self, key_rows: KeyRows, phase: Phase) -> Cohort:
        cohort = key_rows.cohorts.get(phase)
        if cohort is None:
            cohort = key_rows.cohorts[phase] = Cohort(phase)
        return cohort

    def _count_row(self, view: RequestView) -> None:
        if self._needs_length:
            heappush(self._lengths, (-view.request.max_total_tokens, view._join_number, view))
        if self._needs_lanes:
            lane = self._queue.lane_of(view)
            self._running_by_lane[lane] = self._running_by_lane.get(lane, 0) + 1

    def _leave(self, view: RequestView) -> None:
        """Take a row out of the running set; its slot comes back by ``_free``."""
        cohort = view._cohort
        if not isinstance(cohort, Cohort):
            raise InvariantError(f"request {view.request.id!r} runs in no cohort. {self._dump()}")
        cohort.remove(view)
        key_rows = self._keys[view.request.batch_key]
        key_rows.size -= 1
        if not key_rows.size:
            del self._keys[view.request.batch_key]
            self._turns.remove(key_rows)
        self._num_running -= 1
        self._tokens_in_rows -= view._max_tokens
        if self._needs_lanes:
            lane = self._queue.lane_of(view)
            left = self._running_by_lane[lane] - 1
            if left:
                self._running_by_lane[lane] = left
            else:
                del self._running_by_lane[lane]
        self._retired += 1
        self._touch()

    def _free(self, view: RequestView, reason: FinishReason | None, *, kept: bool = False) -> None:
        """Give slot and pages back, and tell so."""
        slot = view._slot
        if slot is None:
            raise InvariantError(f"request {view.request.id!r} holds no slot. {self._dump()}")
        self._slots[slot] = None
        view._slot = None
        if slot < self._capacity.max_num_seqs:
            self._free_slots.append(slot)
        self._free_pages += view._num_pages
        view._num_pages = 0
        self._released.append(Released(slot, view.request, reason, kept))

    def _end(
        self, view: RequestView, reason: FinishReason, *, error: BaseException | None = None
    ) -> None:
        """Finish a request in whatever state."""
        if view._status is RequestStatus.RUNNING:
            self._retire(view, reason, error=error)
            return
        self._queue.discard(view)
        self._finish(view, reason, None, error)
        if self._asks_settle or self._asks_due or self._blocked is not None:
            self._touch()

    def _retire(
        self,
        view: RequestView,
        reason: FinishReason,
        *,
        output: Any = None,
        error: BaseException | None = None,
    ) -> None:
        """Finish a running request; a slot whose step is in flight is quarantined until then."""
        self._leave(view)
        self._finish(view, reason, output, error)
        if self._in_flight is not None:
            self._zombies.append((view, reason))
        else:
            self._free(view, reason)

    def _finish(
        self,
        view: RequestView,
        reason: FinishReason,
        output: Any,
        error: BaseException | None,
    ) -> None:
        advance(view, Change.FINISH)
        request = view.request
        del self._views[request.id]
        self._num_finished += 1
        self._by_reason[reason] += 1
        finished = Finished(
            request,
            reason,
            view._arrived_at,
            view._admitted_at,
            self._now,
            view._steps_base,
            view._num_blocks_done,
            output,
            error,
        )
        self._finished.append(finished)
        if self._watch:
            self._emit(
                RequestFinished(
                    self._now,
                    request.id,
                    reason,
                    view._arrived_at,
                    view._admitted_at,
                    view._steps_base,
                    view._num_blocks_done,
                )
            )

    def _preempt(self, view: RequestView, how: Preempt, key: tuple[float, ...]) -> None:
        """Send a row back to the queue under its old arrival number."""
        kept = how is Preempt.KEEP
        slot = view._slot
        self._leave(view)
        self._free(view, None, kept=kept)
        advance(view, Change.PREEMPT)
        request = view.request
        view._resumed = kept
        if not kept:
            view._steps_base = 0
            view._num_blocks_done = 0
            view._kv_tokens = 0
            view._masked_remaining = None
            view._phase = Phase.PREFILL
            view._max_tokens = self._capacity.max_tokens(request, Phase.PREFILL)
        view._knobs_until = _INF
        view._step_limit = _INF
        view._expire_reason = FinishReason.DEADLINE
        view._expire_at = _INF
        self._arm(view, request.deadline_at)
        self._queue.push(view, key)
        self._num_preempted += 1
        self._progressed = True
        if self._watch and slot is not None:
            self._emit(RequestPreempted(self._now, request.id, slot, kept))

    def _arm(self, view: RequestView, instant: float) -> None:
        """Let a request end at an instant (``inf``: never)."""
        if instant != view._expire_at:
            view._expire_at = instant
            if instant != _INF:
                self._expiries.push(instant, view)
        if instant < self._wake_at:
            self._wake_at = instant
        view._expire_reason = FinishReason.DEADLINE

    def _arm_knobs(self, view: RequestView, until: float) -> None:
        view._knobs_until = until
        if until != _INF:
            self._knob_expiries.push(until, view)

    def _rewrite_row(self, view: RequestView, knobs: Knobs) -> None:
        """Give a running row new knobs, phase or token bound in the next batch."""
        cohort = view._cohort
        slot = view._slot
        if not isinstance(cohort, Cohort) or slot is None:
            raise InvariantError(f"request {view.request.id!r} is not running. {self._dump()}")
        view._knobs = knobs
        cohort.replace(
            view, Row(slot, view.request, view._phase, view._max_tokens, knobs, view._resumed)
        )
        self._quiet = False

    # --- knobs ----------------------------------------------------------------------------------

    def _ask_knobs(self, view: RequestView, counts: SchedulerView) -> tuple[Knobs, float]:
        try:
            return _checked_knobs(
                self._policy.control.knobs(self._states[5], view, counts), counts.now
            )
        except Exception as error:
            raise self._policy_error("control.knobs", view, error) from error

    def _renew_knobs(self, now: float) -> None:
        """Ask again for rows whose knobs ran out or, if declared, that crossed a boundary."""
        due = [v for v in self._knob_expiries.pop_due(now) if v._status is RequestStatus.RUNNING]
        if "blocks" in self._policy.control.needs:
            seen = {view._sequence for view in due}
            due.extend(
                view
                for view in self._knob_boundaries
                if view._status is RequestStatus.RUNNING and view._sequence not in seen
            )
        if not due:
            return
        counts = self._view(now)
        try:
            answers = [self._ask_knobs(view, counts) for view in due]
        except PolicyError:
            for view in due:
                self._knob_expiries.push(view._knobs_until, view)
            raise
        self._knob_boundaries.clear()
        for view, (knobs, until) in zip(due, answers, strict=True):
            self._arm_knobs(view, until)
            if knobs != view._knobs:
                self._rewrite_row(view, knobs)

    # --- outcomes -------------------------------------------------------------------------------

    def _tick(self, batch: StepBatch, now: float, steps: int) -> None:
        """Everybody in the batch advances."""
        views = self._flight_views
        if views is None:
            for cohort in self._flight_cohorts:
                cohort.clock += steps
        else:
            for view in views:
                if view._status is RequestStatus.RUNNING:
                    view._steps_base += steps
                    if isinstance(view._cohort, Cohort):
                        view._cohort.push_limit(view)
        self._now = now
        self._in_flight = None
        self._num_steps += steps
        self._row_steps += len(batch.rows) * steps
        if self._queue.size:
            self._wasted += len(self._free_slots) * steps

    def _in_batch(self, slot: object, column: str) -> RequestView:
        """The request that has a slot in the batch in flight; cancelled ones still have theirs."""
        slots = self._slots
        view = (
            slots[slot]
            if isinstance(slot, int) and not isinstance(slot, bool) and 0 <= slot < len(slots)
            else None
        )
        if view is not None and (
            view._status is RequestStatus.FINISHED
            or (
                view._cohort in self._flight_cohorts
                if self._flight_views is None
                else view in self._flight_views
            )
        ):
            return view
        batch = self._in_flight
        raise OutcomeError(
            f"{column}: slot {slot!r} is not in the batch of step "
            f"{batch.step_id if batch else None}, whose slots are "
            f"{sorted(row.slot for row in batch.rows) if batch else []}"
        )

    def _check_outcome(self, batch: StepBatch, outcome: StepOutcome) -> None:
        """Refuse an outcome that cannot be; before anything is changed."""
        if outcome is NOTHING:
            if self._flight_progress:
                raise OutcomeError(
                    f"complete_step: policy {self._policy.name!r} needs masked_remaining, one "
                    f"count per row of step {batch.step_id}; got none"
                )
            return
        if not isinstance(outcome, StepOutcome):
            raise OutcomeError(f"complete_step: expected a StepOutcome, got {outcome!r}")
        self._check_column("finished", outcome.finished, RowFinished)
        self._check_column("boundaries", outcome.boundaries, BlockBoundary)
        self._check_column("phases", outcome.phases, PhaseChange)
        self._check_column("failed", outcome.failed, RowFailed)
        if outcome.finished and outcome.failed:
            twice = {f.slot for f in outcome.finished} & {f.slot for f in outcome.failed}
            if twice:
                raise OutcomeError(f"outcome: slots {sorted(twice)} both finished and failed")
        for one in outcome.finished:
            if not isinstance(one.reason, FinishReason):
                raise OutcomeError(
                    f"finished: slot {one.slot}: expected a FinishReason, got {one.reason!r}"
                )
        for failed in outcome.failed:
            if not isinstance(failed.error, BaseException):
                raise OutcomeError(
                    f"failed: slot {failed.slot}: expected an exception, got {failed.error!r}"
                )
        for change in outcome.phases:
            if not isinstance(change.phase, Phase):
                raise OutcomeError(
                    f"phases: slot {change.slot}: expected a Phase, got {change.phase!r}"
                )
        for boundary in outcome.boundaries:
            self._check_boundary(boundary)
        remaining = outcome.masked_remaining
        if remaining is None:
            if self._flight_progress:
                raise OutcomeError(
                    f"complete_step: policy {self._policy.name!r} needs masked_remaining, one "
                    f"count per row of step {batch.step_id}; got none"
                )
        elif len(remaining) != len(batch.rows) or not all(
            isinstance(count, int) and count >= 0 for count in remaining
        ):
            raise OutcomeError(
                f"masked_remaining: expected {len(batch.rows)} counts >= 0 (one per row of step "
                f"{batch.step_id}), got {remaining!r}"
            )

    def _check_column(self, name: str, column: Any, kind: type[Any]) -> None:
        seen: set[int] = set()
        for one in column:
            if not isinstance(one, kind):
                raise OutcomeError(f"{name}: expected {kind.__name__} values, got {one!r}")
            view = self._in_batch(one[0], name)
            if view._sequence in seen:
                raise OutcomeError(f"{name}: slot {one[0]} ({view.request.id!r}) is named twice")
            seen.add(view._sequence)

    def _check_boundary(self, boundary: BlockBoundary) -> None:
        slot, blocks, tokens = boundary
        view = self._in_batch(slot, "boundaries")
        request = view.request
        if not isinstance(blocks, int) or not isinstance(tokens, int):
            raise OutcomeError(f"boundaries: slot {slot}: expected ints, got {boundary!r}")
        if not view._num_blocks_done <= blocks <= request.max_blocks:
            raise OutcomeError(
                f"boundaries: slot {slot} ({request.id!r}): num_blocks_done {blocks} is not between "
                f"the {view._num_blocks_done} reported before and its {request.max_blocks} blocks"
            )
        if not view._kv_tokens <= tokens <= request.max_total_tokens:
            raise OutcomeError(
                f"boundaries: slot {slot} ({request.id!r}): kv_tokens {tokens} is not between the "
                f"{view._kv_tokens} reported before and its {request.max_total_tokens} tokens"
            )

    def _apply(self, batch: StepBatch, outcome: StepOutcome) -> None:
        """Carry out a checked outcome. Calls no policy, so it cannot fail half-way."""
        slots = self._slots
        if outcome.masked_remaining is not None:
            for row, remaining in zip(batch.rows, outcome.masked_remaining, strict=True):
                view = slots[row.slot]
                if view is not None:
                    view._masked_remaining = remaining
        for boundary in outcome.boundaries:
            view = slots[boundary.slot]
            if view is not None and view._status is RequestStatus.RUNNING:
                self._cross(view, boundary)
        for slot, phase in outcome.phases:
            view = slots[slot]
            if view is not None and view._status is RequestStatus.RUNNING:
                self._change_phase(view, phase)
        for slot, error in outcome.failed:
            view = slots[slot]
            if view is not None and view._status is RequestStatus.RUNNING:
                self._retire(view, FinishReason.ERROR, error=error)
        for slot, reason, output in outcome.finished:
            view = slots[slot]
            if view is not None and view._status is RequestStatus.RUNNING:
                self._retire(view, reason, output=output)

    def _cross(self, view: RequestView, boundary: BlockBoundary) -> None:
        """Record a block boundary; reserve the pages that the coming step may write."""
        _, blocks, tokens = boundary
        self._num_blocks += blocks - view._num_blocks_done
        view._num_blocks_done = blocks
        view._kv_tokens = tokens
        memory = self._capacity.memory
        if memory is not None and memory.grows:
            pages = memory.pages(view.request, tokens)
            more = pages - view._num_pages
            if more > 0:
                if more <= self._free_pages and not self._short:
                    self._free_pages -= more
                    view._num_pages = pages
                else:
                    if view not in self._short:
                        self._short.append(view)
                    self._quiet = False
        if self._needs_blocks:
            self._boundaries.append(view)
            self._touch()
        if self._asks_knobs and "blocks" in self._policy.control.needs:
            self._knob_boundaries.append(view)
            self._quiet = False
        if self._watch:
            self._emit(BlockDone(self._now, view.request.id, blocks, tokens, view.num_steps))

    def _change_phase(self, view: RequestView, phase: Phase) -> None:
        if phase is view._phase:
            return
        request = view.request
        tokens = self._capacity.max_tokens(request, phase)
        cohort = view._cohort
        if not isinstance(cohort, Cohort) or view._slot is None:
            raise InvariantError(f"request {request.id!r} is not running. {self._dump()}")
        cohort.remove(view)
        view._phase = phase
        self._tokens_in_rows += tokens - view._max_tokens
        view._max_tokens = tokens
        row = Row(view._slot, request, phase, tokens, view._knobs, view._resumed)
        self._cohort(self._keys[request.batch_key], phase).add(view, row)
        self._quiet = False
        if self._asks_admit:
            self._dirty = True  # fewer tokens in rows: a token budget may have room now
        if self._watch:
            self._emit(PhaseChanged(self._now, request.id, phase))

    def _meet_step_limits(self) -> None:
        """End the rows that met their step cap, and find when the next one may."""
        if self._num_steps < self._limit_steps and self._flight_views is None:
            return
        for key_rows in list(self._keys.values()):
            for cohort in list(key_rows.cohorts.values()):
                while cohort.next_limit() <= cohort.clock:
                    self._retire(cohort.limits[0][2], FinishReason.MAX_STEPS)
        self._limit_steps = self._next_limit_step()

    def _next_limit_step(self) -> float:
        left = _INF
        for key_rows in self._keys.values():
            for cohort in key_rows.cohorts.values():
                if cohort.limits:
                    left = min(left, cohort.next_limit() - cohort.clock)
        return self._num_steps + left

    def _land(self, steps: int) -> None:
        """No step is in flight any more: give back the slots of rows that ended meanwhile."""
        for view, reason in self._zombies:
            self._wasted += steps
            self._free(view, reason)
        if self._zombies:
            self._zombies.clear()
            self._touch()

    # --- policy ---------------------------------------------------------------------------------

    def _set_policy(self, policy: Policy, states: list[Any]) -> None:
        """Install a policy and an empty queue for it."""
        needs = policy.needs
        self._policy = policy
        self._states = states
        self._needs_rows = "rows" in needs
        self._needs_blocks = "blocks" in needs
        self._needs_progress = "progress" in needs
        self._needs_lanes = "lanes" in needs
        self._needs_length = "max_length" in needs
        self._asks_key = policy.ordering.asks("key")
        self._asks_accept = policy.admission.asks("accept")
        self._asks_admit = policy.admission.asks("admit")
        self._asks_joined = policy.admission.asks("joined")
        self._asks_settle = policy.admission.asks("settle")
        self._asks_recheck = policy.admission.asks("recheck")
        self._asks_due = policy.timeout.asks("due")
        self._asks_select = policy.composition.asks("select")
        self._asks_limits = policy.eviction.asks("limits")
        self._asks_victims = policy.eviction.asks("victims")
        self._asks_every_victim = self._asks_victims and "every_step" in policy.eviction.needs
        self._asks_knobs = policy.control.asks("knobs")
        self._asks_batch_knobs = policy.control.asks("batch_knobs")
        self._asks_hints = policy.control.asks("hints")
        self._every_step = "every_step" in needs
        self._due_every_step = policy.timeout.scope == "step"
        self._keep_joins = self._asks_victims or _grows(self._capacity)
        self._observing: dict[type[Any], list[tuple[int, Any]]] = {}
        for axis, strategy in enumerate(policy.strategies):
            for kind in strategy.observes:
                self._observing.setdefault(kind, []).append((axis, strategy))
        self._set_watch()
        self._key_length = None
        self._knob_boundaries: list[RequestView] = []
        self._progressed = False
        self._queue = WaitingQueue(by_class=self._needs_lanes, track_arrivals=self._asks_due)
        self._unobserved.clear()
        self._batch_knobs = NO_KNOBS
        self._batch_knobs_until = -_INF
        self._recheck_step = _INF
        self._touch()

    def _set_watch(self) -> None:
        self._watch_steps = bool(self._observers) or not _STEP_EVENTS.isdisjoint(self._observing)
        self._watch = bool(self._observers) or bool(self._observing.keys() - _STEP_EVENTS)

    def _key(self, policy: Policy, state: Any, view: RequestView) -> tuple[float, ...]:
        """Ask the ordering; a key that could break a heap is refused here."""
        try:
            key = policy.ordering.key(state, view)
        except Exception as error:
            raise self._policy_error("ordering.key", view, error, policy) from error
        if not isinstance(key, tuple):
            raise PolicyError(
                f"policy {policy.name!r}: a key must be a tuple of numbers, got {key!r} for "
                f"request {view.request.id!r}"
            )
        for part in key:
            if not isinstance(part, int | float) or part != part:
                raise PolicyError(
                    f"policy {policy.name!r}: a key holds numbers, never NaN; got {key!r} for "
                    f"request {view.request.id!r}"
                )
        return key

    def _sort_key(self, view: RequestView) -> tuple[float, ...]:
        if not self._asks_key:
            return ()
        key = self._key(self._policy, self._states[0], view)
        if self._key_length is None:
            self._key_length = len(key)
        self._check_key_length(self._policy, key, self._key_length, view)
        return key

    def _check_key_length(
        self, policy: Policy, key: tuple[float, ...], length: int, view: RequestView
    ) -> None:
        if len(key) != length:
            raise PolicyError(
                f"policy {policy.name!r}: keys must have one length, got {key!r} for request "
                f"{view.request.id!r} after keys of {length}"
            )

    def _limits(self, policy: Policy, view: RequestView) -> tuple[float, float]:
        try:
            instant, steps = policy.eviction.limits(view)
            valid = instant <= _INF and steps >= 1
        except Exception as error:
            raise self._policy_error("eviction.limits", view, error, policy) from error
        if not valid:
            raise PolicyError(
                f"policy {policy.name!r}: limits must be (instant, steps >= 1), got "
                f"{(instant, steps)!r} for request {view.request.id!r}"
            )
        return instant, steps

    def _policy_error(
        self,
        hook: str,
        view: RequestView | None,
        error: Exception,
        policy: Policy | None = None,
    ) -> PolicyError:
        policy = self._policy if policy is None else policy
        axis = hook.split(".", maxsplit=1)[0]
        about = "" if view is None else f" about request {view.request.id!r}"
        return PolicyError(
            f"policy {policy.name!r}: {hook} of {getattr(policy, axis)!r} raised {error!r}{about}; "
            "nothing was changed"
        )

    # --- small change -----------------------------------------------------------------------------

    def _touch(self) -> None:
        self._quiet = False
        self._dirty = True

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
        finished: tuple[Finished, ...] = ()
        released: tuple[Released, ...] = ()
        if self._finished:
            finished = tuple(self._finished)
            self._finished.clear()
        if self._released:
            released = tuple(self._released)
            self._released.clear()
        return Update(batch, finished, released, wake_at)

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        if type(event) in self._observing:
            self._unobserved.append(event)
            self._quiet = False

    def _flush_events(self) -> None:
        events = self._events
        self._events = []
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

    def _check_clock(self, call: str, now: float) -> None:
        if not self._now <= now < _INF:
            self._bad_clock(call, now)

    def _bad_clock(self, call: str, now: object) -> None:
        raise ClockError(
            f"{call}: now must be finite seconds that never go backward, got {now!r} after "
            f"{self._now!r}; is another clock mixed in?"
        )

    def _check_flight(self, call: str, batch: StepBatch) -> None:
        flight = self._in_flight
        if flight is None:
            raise EngineProtocolError(f"{call}: no step is in flight; call next_step first")
        if not isinstance(batch, StepBatch) or batch.step_id != flight.step_id:
            raise EngineProtocolError(
                f"{call}: step {flight.step_id} is in flight, got "
                f"{batch.step_id if isinstance(batch, StepBatch) else batch!r}"
            )

    def _check_steps(self, steps: int) -> None:
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise EngineProtocolError(f"complete_step: steps must be an int >= 1, got {steps!r}")
        most = self.horizon().steps
        if steps > most:
            raise EngineProtocolError(
                f"complete_step: {steps} steps at once, but a decision may change after {most} "
                "(see horizon)"
            )

    def _running(self) -> list[RequestView]:
        return [v for v in self._slots if v is not None and v._status is RequestStatus.RUNNING]

    def _is_join(self, join: tuple[int, RequestView]) -> bool:
        number, view = join
        return view._status is RequestStatus.RUNNING and view._join_number == number

    def _youngest(self) -> Iterator[RequestView]:
        joins = self._joins
        while joins and not self._is_join(joins[-1]):
            joins.pop()
        return (join[1] for join in reversed(joins) if self._is_join(join))

    def _longest(self) -> int:
        lengths = self._lengths
        while lengths:
            _, number, view = lengths[0]
            if self._is_join((number, view)):
                return -lengths[0][0]
            heappop(lengths)
        return 0

    def _dump(self) -> str:
        """A few lines about the state, for error messages."""
        head = self._queue.peek()
        return (
            f"[now={self._now} waiting={self._queue.size} running={self._num_running} "
            f"free_slots={len(self._free_slots)} free_pages={self._free_pages} "
            f"draining={self._draining} paused={self._paused} head={head!r} "
            f"blocked={self._blocked} due_at={self._due_at} policy={self._policy.name!r}]"
        )


def _checked_policy(policy: Policy, capacity: Capacity) -> Policy:
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"expected a Policy (see dllm_sched.policies.presets for ready ones), got {policy!r}"
        )
    policy.validate(capacity)
    return policy


def _checked_knobs(answer: Any, now: float) -> tuple[Knobs, float]:
    """Refuse an answer that is not (mapping, later instant)."""
    knobs, until = answer
    if not isinstance(knobs, Mapping):
        raise TypeError(f"knobs must be a mapping, got {knobs!r}")
    if not until > now:
        raise ValueError(f"knobs must hold beyond now={now}, got until={until!r}")
    return knobs, until


def _grows(capacity: Capacity) -> bool:
    return capacity.memory is not None and capacity.memory.grows


def _row_of(view: RequestView) -> Row:
    cohort = view._cohort
    if not isinstance(cohort, Cohort):
        raise InvariantError(f"request {view.request.id!r} is not running")
    return cohort.rows[view._index]
