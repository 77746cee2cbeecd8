"""The synchronous driver: one thread, one scheduler, one engine, one clock.

Host time is measured here and nowhere else (``RunReport``), with ``time.perf_counter`` whatever
the driver's own clock is.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal, TypeVar

import attrs

from dllm_sched.batch import Accepted, Finished, Rejected, RowFate, StepBatch, Update
from dllm_sched.capacity import Capacity
from dllm_sched.errors import ConfigError, DllmSchedError, EngineProtocolError, OutcomeError
from dllm_sched.request import Request, RequestStatus
from dllm_sched.runtime.clocks import Clock, MonotonicClock
from dllm_sched.runtime.engine import Engine, StepFailedError
from dllm_sched.runtime.inbox import Inbox
from dllm_sched.scheduler import Scheduler

__all__ = ["Driver", "RunReport"]

T = TypeVar("T")
Finish = Literal["all", "running", "none"]
Arrival = tuple[float, Request]
Message = Callable[[BaseException | None], None]
"""Carries out what a thread asked for; given the exception that ended the run, passes it on."""

_CUTS: tuple[Finish, ...] = ("all", "running", "none")  # each cuts deeper than the one before
_log = logging.getLogger("dllm_sched")


@attrs.frozen(kw_only=True)
class RunReport:
    """Where the host's time went. Seconds of ``time.perf_counter`` since ``run`` began.

    Attributes:
        started_at: Instant at which ``run`` began, seconds on the driver's clock.
        num_steps: Steps run, failed ones included.
        wall_s: In all.
        engine_s: Inside ``engine.run`` and ``engine.release``.
        scheduler_s: Inside the scheduler's calls.
        wait_s: Asleep, with nothing to do.
        interrupted: Whether Ctrl-C ended it.
    """

    started_at: float
    num_steps: int
    wall_s: float
    engine_s: float
    scheduler_s: float
    wait_s: float
    interrupted: bool

    @property
    def busy_s(self) -> float:
        """Not asleep."""
        return self.wall_s - self.wait_s

    @property
    def other_s(self) -> float:
        """Neither asleep nor in engine or scheduler: the driver itself, and the callbacks."""
        return self.busy_s - self.engine_s - self.scheduler_s

    @property
    def scheduler_us_per_step(self) -> float:
        """Microseconds inside the scheduler for each step, all of its calls counted; 0 if none."""
        return self.scheduler_s / self.num_steps * 1e6 if self.num_steps else 0.0


class Driver:
    """Serves requests by calling the engine with what the scheduler plans, step after step.

    ``run`` is the loop; its thread owns scheduler and engine. Everything else on the driver may
    be called from any thread, and takes effect between two steps. A driver runs once.

    If the engine fails a step, no request is lost:

    * ``StepFailedError``: its rows restart or fail as it says, and the scheduler's
      ``max_num_seqs`` goes down to its limit, never below 1, for the rest of the run.
    * Any other exception, or an outcome that cannot be: every row of the step restarts from
      nothing. A request that restarted ``max_restarts`` times fails instead, with the error as its
      ``Finished.error``; so a step that always fails ends.

    An exception from anywhere else (a policy, a callback, the arrivals) leaves ``run`` and is set
    on the future of every request that has not ended.

    Args:
        scheduler: Used by this driver alone from now on.
        engine: Runs the steps.
        clock: Seconds for the scheduler; default: a ``MonotonicClock``. With a ``VirtualClock``
            nobody sleeps, and the engine advances it by its service time.
        on_update: Called with every ``Update`` of the scheduler, in order, in the thread of
            ``run``; what it does delays the next step.
        on_rejected: Called with each request that was refused, and how; likewise.
        max_restarts: Restarts of one request after failed steps, >= 0. Those that come with a
            lower ``max_num_seqs`` do not count: they end when there is one row.

    Raises:
        ConfigError: If ``max_restarts`` is negative or not an int.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        clock: Clock | None = None,
        *,
        on_update: Callable[[Update], object] | None = None,
        on_rejected: Callable[[Request, Rejected], object] | None = None,
        max_restarts: int = 1,
    ) -> None:
        if not isinstance(max_restarts, int) or isinstance(max_restarts, bool) or max_restarts < 0:
            raise ConfigError(f"Driver: max_restarts must be an int >= 0, got {max_restarts!r}")
        self._scheduler = scheduler
        self._engine = engine
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._on_update = on_update
        self._on_rejected = on_rejected
        self._max_restarts = max_restarts
        self._inbox: Inbox[Message] = Inbox(self._clock)
        self._gate = threading.Lock()  # between a put and the end of the run
        self._closed = False
        self._active: dict[str, Future[Finished | Rejected] | None] = {}
        self._restarts: dict[str, int] = {}
        self._stopping = False  # take no more requests
        self._draining = False  # ... and the scheduler knows
        self._num_interrupts = 0
        self._started_at = math.nan
        self._began = self._ended = math.nan
        self._num_steps = 0
        self._engine_s = self._scheduler_s = self._wait_s = 0.0

    # --- from any thread ------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        """The clock of every instant that the scheduler is told."""
        return self._clock

    def submit(self, request: Request) -> Future[Finished | Rejected]:
        """Hand a request over, before or during ``run``.

        Returns:
            A future that ends exactly once: with ``Finished``, with ``Rejected`` (also after the
            run is over), or with the exception that the submission or the run met. Its own
            ``cancel`` works only until the request is taken up; after that call ``cancel`` here.
        """
        future: Future[Finished | Rejected] = Future()

        def message(failure: BaseException | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            if failure is None:
                self._submit(request, future)
            else:
                future.set_exception(failure)

        if not self._put(message):
            future.set_result(Rejected(request.id, "draining"))
        return future

    def cancel(self, request_id: str) -> None:
        """End a request in whatever state; nothing happens if it is not active."""

        def message(failure: BaseException | None) -> None:
            if failure is None:
                self._tell(self._ask(self._scheduler.cancel, request_id))

        self._put(message)

    def call(self, method: Callable[..., Update], *args: Any) -> Future[Update]:
        """Call a method of the scheduler between two steps: ``set_policy``, ``pause``, and so on.

        ``driver.call(scheduler.set_policy, policy)``: ``now`` is added, and what the Update tells
        is delivered like any other.

        Returns:
            A future of the Update, or of the exception that the call or the run met.
        """
        future: Future[Update] = Future()

        def message(failure: BaseException | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if failure is not None:
                    raise failure
                update = self._ask(method, *args)
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, DllmSchedError) and error is not failure:
                    raise
            else:
                future.set_result(update)
                self._tell(update)

        if not self._put(message):
            future.set_exception(EngineProtocolError("call: the run is over"))
        return future

    def stop(self, finish: Finish = "all") -> None:
        """Take no more requests, and let ``run`` return once what is left has finished.

        Args:
            finish: Who goes on to the end: ``all`` that were accepted, those that are ``running``
                (the waiting ones are cancelled), or ``none``. Called again it can cut deeper.

        Raises:
            ConfigError: If it is none of the three.
        """
        if finish not in _CUTS:
            raise ConfigError(f"stop: finish must be one of {', '.join(_CUTS)}, got {finish!r}")

        def message(failure: BaseException | None) -> None:
            if failure is None:
                self._stop(finish)

        self._inbox.put(message)  # without the gate, for a signal handler comes here too

    def report(self) -> RunReport:
        """Return where the time has gone so far; two of them, subtracted, tell about a step.

        Raises:
            EngineProtocolError: If ``run`` has not begun.
        """
        if math.isnan(self._began):
            raise EngineProtocolError("report: run has not begun")
        ended = perf_counter() if math.isnan(self._ended) else self._ended
        return RunReport(
            started_at=self._started_at,
            num_steps=self._num_steps,
            wall_s=ended - self._began,
            engine_s=self._engine_s,
            scheduler_s=self._scheduler_s,
            wait_s=self._wait_s,
            interrupted=self._num_interrupts > 0,
        )

    # --- the loop -------------------------------------------------------------------------------

    def run(self, arrivals: Iterable[Arrival] | None = None) -> RunReport:
        """Serve until there is nothing left to do.

        Ctrl-C, unless the program handles it itself, stops with ``finish="running"``, a second
        one with ``"none"``; only a third raises ``KeyboardInterrupt``.

        Args:
            arrivals: ``(seconds after the start, request)`` in order of time, taken one ahead.
                When they are exhausted the scheduler drains, and ``run`` returns once everyone
                has finished. None = serve what is submitted, until ``stop``.

        Raises:
            EngineProtocolError: If this driver has run before.
            ConfigError: If an arrival is not finite, or before the previous one.
            PolicyError: If the policy raised or answered nonsense.
        """
        if not math.isnan(self._began):
            raise EngineProtocolError("run: a driver runs once; build another")
        self._started_at = self._clock()
        self._began = perf_counter()
        failure: BaseException | None = None
        try:
            with _interruptible(self._interrupt):
                self._serve(arrivals)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._ended = perf_counter()
            self._close(failure)
        return self.report()

    def _serve(self, arrivals: Iterable[Arrival] | None) -> None:
        scheduler, clock, inbox = self._scheduler, self._clock, self._inbox
        coming = iter(()) if arrivals is None else _in_order(arrivals)
        arrival = next(coming, None)
        while True:
            for message in inbox.drain():
                message(None)
            while arrival is not None and not self._stopping and self._due(arrival) <= clock():
                self._submit(arrival[1], None)
                arrival = next(coming, None)
            if self._stopping or (arrival is None and arrivals is not None):
                arrival = None
                self._drain()

            began = perf_counter()
            update = scheduler.next_step(now=clock())
            self._scheduler_s += perf_counter() - began
            self._tell(update)
            if update.batch is not None:
                self._step(update.batch)
            elif self._draining and not scheduler.has_work():
                return
            else:
                began = perf_counter()
                until = update.wake_at
                if arrival is not None:
                    until = min(until, self._due(arrival))
                inbox.wait(until)
                self._wait_s += perf_counter() - began

    def _due(self, arrival: Arrival) -> float:
        return self._started_at + arrival[0]

    def _step(self, batch: StepBatch) -> None:
        self._num_steps += 1
        began = perf_counter()
        try:
            outcome = self._engine.run(batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, no request is lost
            self._engine_s += perf_counter() - began
            self._recover(batch, error)
            return
        ran = perf_counter()
        self._engine_s += ran - began
        try:
            update = self._scheduler.complete_step(batch, outcome, now=self._clock())
        except OutcomeError as error:
            self._recover(batch, error)
            return
        self._scheduler_s += perf_counter() - ran
        self._tell(update)

    def _ask(self, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        began = perf_counter()
        try:
            return method(*args, **kwargs, now=self._clock())
        finally:
            self._scheduler_s += perf_counter() - began

    def _tell(self, update: Update) -> None:
        if update.released:
            began = perf_counter()
            self._engine.release(update.released)
            self._engine_s += perf_counter() - began
        for finished in update.finished:
            future = self._active.pop(finished.request.id, None)
            self._restarts.pop(finished.request.id, None)
            if future is not None:
                future.set_result(finished)
        if self._on_update is not None:
            self._on_update(update)

    # --- intake ---------------------------------------------------------------------------------

    def _put(self, message: Message) -> bool:
        with self._gate:
            if not self._closed:
                self._inbox.put(message)
            return not self._closed

    def _submit(self, request: Request, future: Future[Finished | Rejected] | None) -> None:
        try:
            answer = self._ask(self._scheduler.submit, request)
        except BaseException as error:
            if future is not None:
                future.set_exception(error)
                if isinstance(error, DllmSchedError):
                    return  # the caller's bug, and the caller knows
            raise
        if isinstance(answer, Accepted):
            self._active[request.id] = future
            return
        if future is not None:
            future.set_result(answer)
        if self._on_rejected is not None:
            self._on_rejected(request, answer)

    def _drain(self) -> None:
        if not self._draining:
            self._draining = True
            self._tell(self._ask(self._scheduler.drain))

    def _stop(self, finish: Finish) -> None:
        self._stopping = True
        self._drain()
        for request_id in list(self._active) if finish != "all" else ():
            running = self._scheduler.view(request_id).status is RequestStatus.RUNNING
            if finish == "none" or not running:
                self._tell(self._ask(self._scheduler.cancel, request_id))

    def _interrupt(self, *_: object) -> None:
        self._num_interrupts += 1
        if self._num_interrupts > 2:
            raise KeyboardInterrupt
        self.stop(_CUTS[self._num_interrupts])

    def _close(self, failure: BaseException | None) -> None:
        """Answer everyone who still waits; whoever comes later is refused at the gate."""
        with self._gate:
            self._closed = True
        for message in self._inbox.drain():
            message(failure)
        for future in self._active.values():
            if future is not None:
                future.set_exception(failure)
        self._active.clear()

    # --- faults ---------------------------------------------------------------------------------

    def _recover(self, batch: StepBatch, error: Exception) -> None:
        """Report a failed step; the class says who restarts and who fails."""
        fates: dict[int, RowFate] = {}
        capacity: Capacity | None = None
        if isinstance(error, StepFailedError):
            fates |= dict.fromkeys(error.restart, RowFate.RESTART)
            fates |= dict.fromkeys(error.fail, RowFate.FAIL)
            capacity = self._lowered(error.max_num_seqs)
        if not fates and capacity is None:
            fates = dict.fromkeys((row.slot for row in batch.rows), RowFate.RESTART)
        if capacity is None:
            for row in batch.rows:
                if fates.get(row.slot) is RowFate.RESTART:
                    fates[row.slot] = self._restart_or_fail(row.request.id)
        counts = Counter(fates.values())
        _log.warning(
            "step %d of %d rows failed: %r; %d restart, %d fail%s",
            batch.step_id,
            len(batch.rows),
            error,
            counts[RowFate.RESTART],
            counts[RowFate.FAIL],
            "" if capacity is None else f"; from here on at most {capacity.max_num_seqs} rows",
        )
        self._tell(self._ask(self._scheduler.fail_step, batch, error, rows=fates))
        if capacity is not None:
            self._tell(self._ask(self._scheduler.set_capacity, capacity))

    def _restart_or_fail(self, request_id: str) -> RowFate:
        restarts = self._restarts.get(request_id, 0)
        if restarts >= self._max_restarts:
            return RowFate.FAIL
        self._restarts[request_id] = restarts + 1
        return RowFate.RESTART

    def _lowered(self, max_num_seqs: int | None) -> Capacity | None:
        """The capacity with fewer rows, or None if that is no change or the policy refuses it."""
        capacity = self._scheduler.capacity
        if max_num_seqs is None or max(1, max_num_seqs) >= capacity.max_num_seqs:
            return None
        capacity = attrs.evolve(capacity, max_num_seqs=max(1, max_num_seqs))
        try:
            self._scheduler.policy.validate(capacity)
        except ConfigError as error:
            _log.warning("the capacity stays: %s", error)
            return None
        return capacity


def _in_order(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    before = -math.inf
    for at_s, request in arrivals:
        if not before <= at_s < math.inf:
            raise ConfigError(
                f"run: arrivals come in order of time, in finite seconds; {request.id!r} arrives "
                f"at {at_s!r} after {before!r}"
            )
        before = at_s
        yield at_s, request


@contextmanager
def _interruptible(handle: Callable[..., None]) -> Iterator[None]:
    """Send Ctrl-C to ``handle``, where it would raise KeyboardInterrupt (as asyncio.run does)."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
