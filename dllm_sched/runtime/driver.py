"""The synchronous driver: one thread, one scheduler, one engine, one clock.

Host time is measured here and nowhere else (``RunReport``), with ``time.perf_counter`` whatever
the driver's own clock is.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from time import perf_counter
from typing import Any, Literal, TypeVar, cast

import attrs

from dllm_sched.batch import (
    Accepted,
    Finished,
    Rejected,
    RowFate,
    StepBatch,
    StepOutcome,
    Update,
)
from dllm_sched.capacity import Capacity
from dllm_sched.errors import ConfigError, DllmSchedError, EngineProtocolError, OutcomeError
from dllm_sched.request import Request, RequestStatus
from dllm_sched.runtime.clocks import Clock, MonotonicClock
from dllm_sched.runtime.engine import Engine, PipelinedEngine, StepFailedError
from dllm_sched.runtime.inbox import Inbox
from dllm_sched.runtime.limit import RowLimit
from dllm_sched.runtime.watchdog import OnStuck, Watchdog
from dllm_sched.scheduler import Scheduler
from dllm_sched.theory._check import is_number

__all__ = ["Driver", "RunReport"]

T = TypeVar("T")
Finish = Literal["all", "running", "none"]
Arrival = tuple[float, Request]
Message = Callable[[], None]
"""Carries out what a thread asked for."""

_CUTS: tuple[Finish, ...] = ("all", "running", "none")  # each cuts deeper than the one before
_ENGINE, _SCHEDULER, _WAIT, _OTHER = range(4)  # parts of the time
_DRIVERS_OWN = ("submit", "next_step", "complete_step", "fail_step")
_log = logging.getLogger("dllm_sched")


@attrs.frozen(kw_only=True)
class RunReport:
    """Where the host's time went. Seconds of ``time.perf_counter`` since ``run`` began.

    The four parts add up to ``wall_s``, and none of them ever falls: a call that has not returned
    yet counts up to this moment.

    Attributes:
        started_at: Instant at which ``run`` began, seconds on the driver's clock.
        num_steps: Steps run, failed ones included.
        wall_s: In all.
        engine_s: Inside ``engine.run`` and ``engine.release``.
        scheduler_s: Inside the scheduler's calls.
        wait_s: Asleep, with nothing to do.
        other_s: In none of these: the driver itself, and the callbacks.
        interrupted: Whether Ctrl-C ended it.
    """

    started_at: float
    num_steps: int
    wall_s: float
    engine_s: float
    scheduler_s: float
    wait_s: float
    other_s: float
    interrupted: bool

    @property
    def busy_s(self) -> float:
        """Not asleep."""
        return self.wall_s - self.wait_s

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
      ``max_num_seqs`` goes down to its limit, never below 1, whatever the policy. After
      ``recover_steps`` steps that went well with all those slots taken it goes up by one, and so
      on, up to where it was, or to one row more than the policy ever runs; if one does not fit
      again, the next row takes twice as many. The log says why.
    * Any other exception, or an outcome or a ``StepFailedError`` that cannot be: every row of the
      step restarts from nothing. A request that restarted ``max_restarts`` times fails instead,
      with the error as its ``Finished.error``; so a step that always fails ends.

    With ``Scheduler(max_in_flight=2)`` the next step is planned and launched while one runs
    (``PipelinedEngine``): what the scheduler, the callbacks and the driver take is hidden behind
    the forward. Steps complete in order, and one that fails takes the one behind it with it.

    An exception from anywhere else (a policy, a callback, the arrivals) leaves ``run`` and is set
    on every future that has not ended. What ``submit`` and ``call`` meet ends their own future
    only.

    Args:
        scheduler: Used by this driver alone from now on.
        engine: Runs the steps; a ``PipelinedEngine`` if the scheduler runs ahead.
        clock: Seconds for the scheduler; default: a ``MonotonicClock``. With a ``VirtualClock``
            nobody sleeps, and the engine advances it by its service time.
        on_update: Called with every ``Update`` of the scheduler, in order, in the thread of
            ``run``; what it does delays the next step.
        on_rejected: Called with each request that was refused, and how; likewise.
        on_step: Called with each step that counted and its outcome, before anything that it freed
            is released: who finished is still in its slot. Likewise.
        max_restarts: Restarts of one request after failed steps, >= 0. Those that come with a
            lower ``max_num_seqs`` do not count: they end when there is one row.
        recover_steps: Good steps before a lowered ``max_num_seqs`` goes up by one again, >= 1;
            None = it stays down.
        step_timeout_s: Host seconds after which a call of ``engine.run`` (or ``launch``, or
            ``collect``) counts as stuck, > 0; ``inf``: never. Nothing can end it from outside;
            ``on_stuck`` can tell, or end the process.
        on_stuck: Called with the batch and the seconds it has been running, once for each stuck
            step, in a thread of its own: of scheduler and driver it may call only what any thread
            may. What it raises is logged. Default: a warning in the log.

    Raises:
        ConfigError: If an argument is of no use, or the scheduler runs ahead and the engine
            cannot.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        clock: Clock | None = None,
        *,
        on_update: Callable[[Update], object] | None = None,
        on_rejected: Callable[[Request, Rejected], object] | None = None,
        on_step: Callable[[StepBatch, StepOutcome], object] | None = None,
        max_restarts: int = 1,
        recover_steps: int | None = 64,
        step_timeout_s: float = math.inf,
        on_stuck: OnStuck | None = None,
    ) -> None:
        if not isinstance(max_restarts, int) or isinstance(max_restarts, bool) or max_restarts < 0:
            raise ConfigError(f"Driver: max_restarts must be an int >= 0, got {max_restarts!r}")
        if not isinstance(scheduler, Scheduler):
            raise ConfigError(f"Driver: scheduler must be a Scheduler, got {scheduler!r}")
        for name, callback in (
            ("on_update", on_update),
            ("on_rejected", on_rejected),
            ("on_step", on_step),
        ):
            if callback is not None and not callable(callback):
                raise ConfigError(f"Driver: {name} must be callable or None, got {callback!r}")
        self._scheduler = scheduler
        self._engine = engine
        self._pipelined = cast("PipelinedEngine", engine)  # if the scheduler runs ahead
        self._clock: Clock = MonotonicClock() if clock is None else clock
        self._on_update = on_update
        self._on_rejected = on_rejected
        self._on_step = on_step
        self._max_restarts = max_restarts
        self._limit = RowLimit(recover_steps)
        self._depth = scheduler.max_in_flight
        for name in ("launch", "collect") if self._depth > 1 else ():
            if not callable(getattr(engine, name, None)):
                raise ConfigError(
                    f"Driver: max_in_flight={self._depth} of the scheduler needs an engine with "
                    f"launch and collect, but {type(engine).__name__} has no {name}: give the "
                    "scheduler max_in_flight=1"
                )
        # In flight, the oldest first; why one never took off, if it did not.
        self._flights: deque[tuple[StepBatch, Exception | None]] = deque()
        self._watchdog: Watchdog | None = None
        if step_timeout_s != math.inf:
            self._watchdog = Watchdog(step_timeout_s, on_stuck)
        elif on_stuck is not None:
            raise ConfigError("Driver: on_stuck needs a finite step_timeout_s")
        self._inbox: Inbox[Message] = Inbox(self._clock)
        self._gate = threading.Lock()  # between a put and the end of the run
        self._closed = False
        self._failure: BaseException | None = None  # what ended the run, once it is closed
        self._open: set[Future[Any]] = set()  # not ended
        self._active: dict[str, Future[Finished | Rejected] | None] = {}
        self._restarts: dict[str, int] = {}
        self._stopping = False  # take no more requests
        self._draining = False  # ... and the scheduler knows
        self._num_interrupts = 0
        self._started_at = math.nan
        self._began = self._ended = math.nan
        self._num_steps = 0
        self._turning = threading.RLock()  # guards what follows; a signal handler may report too
        self._spent = [0.0] * 4  # seconds of each part
        self._part = _OTHER  # the one that is on
        self._since = 0.0

    # --- from any thread ------------------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        """The clock of every instant that the scheduler is told."""
        return self._clock

    @property
    def failure(self) -> BaseException | None:
        """What ended the run, if that was an error; known before anybody is told of it."""
        return self._failure

    def submit(
        self, request: Request, *, on_accepted: Callable[[], object] | None = None
    ) -> Future[Finished | Rejected]:
        """Hand a request over, before or during ``run``.

        Args:
            request: Whose id is not active.
            on_accepted: Called in the thread of ``run`` once the request waits.

        Returns:
            A future that ends exactly once: with ``Finished``, with ``Rejected`` (also after the
            run is over), or with the exception that the submission meets, or that ended the run.
            Its own ``cancel`` works only until the request is taken up; after that call ``cancel``
            here.

        Raises:
            ConfigError: If it is not a Request.
        """
        if not isinstance(request, Request):
            raise ConfigError(f"submit: request must be a Request, got {request!r}")
        future: Future[Finished | Rejected] = Future()
        if not self._put(
            lambda: self._take_up(future, self._submit, request, future, on_accepted), future
        ):
            if self._failure is None:
                future.set_result(Rejected(request.id, "draining"))
            else:
                future.set_exception(self._failure)
        return future

    def cancel(self, request_id: str, future: Future[Any] | None = None) -> None:
        """End a request in whatever state; nothing happens if it is not active.

        Args:
            request_id: Its id.
            future: What ``submit`` returned for it: a later request of the same id stays.

        Raises:
            ConfigError: If the id is not a str.
        """
        if not isinstance(request_id, str):
            raise ConfigError(f"cancel: request_id must be a str, got {request_id!r}")
        self._put(lambda: self._cancel(request_id, future))

    def call(self, method: Callable[..., Update], *args: Any) -> Future[Update]:
        """Call a method of the scheduler between two steps: ``set_policy``, ``pause``, and so on.

        ``driver.call(scheduler.set_policy, policy)``: ``now`` is added, and what the Update tells
        is delivered like any other.

        Returns:
            A future of the Update, or of the exception that the call or the run met.

        Raises:
            ConfigError: If it is not callable, or a method that is the driver's own to call.
        """
        if not callable(method):
            raise ConfigError(f"call: method must be one of the scheduler's, got {method!r}")
        if method in [getattr(self._scheduler, name) for name in _DRIVERS_OWN]:
            raise ConfigError(f"call: the driver itself calls {method.__name__}")
        future: Future[Update] = Future()
        message = partial(self._take_up, future, self._call, future, method, *args)
        if not self._put(message, future):
            future.set_exception(EngineProtocolError("call: the run is over"))
        return future

    def ask(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Look at the scheduler between two steps: ``driver.ask(scheduler.explain, "r7")``.

        Returns:
            A future of what the function returns, or of the exception that it or the run met.

        Raises:
            ConfigError: If it is not callable.
        """
        if not callable(function):
            raise ConfigError(f"ask: function must be callable, got {function!r}")
        future: Future[T] = Future()
        if not self._put(
            lambda: self._take_up(future, self._look, future, function, *args), future
        ):
            future.set_exception(EngineProtocolError("ask: the run is over"))
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

        self._inbox.put(
            lambda: self._stop(finish)
        )  # without the gate, for a signal handler comes here too

    def report(self) -> RunReport:
        """Return where the time has gone so far; two of them, subtracted, tell about a step.

        Raises:
            EngineProtocolError: If ``run`` has not begun.
        """
        if math.isnan(self._began):
            raise EngineProtocolError("report: run has not begun")
        with self._turning:
            ended = perf_counter() if math.isnan(self._ended) else self._ended
            spent = self._spent.copy()
            spent[self._part] += ended - self._since
        return RunReport(
            started_at=self._started_at,
            num_steps=self._num_steps,
            wall_s=ended - self._began,
            engine_s=spent[_ENGINE],
            scheduler_s=spent[_SCHEDULER],
            wait_s=spent[_WAIT],
            other_s=spent[_OTHER],
            interrupted=self._num_interrupts > 0,
        )

    # --- the loop -------------------------------------------------------------------------------

    def run(self, arrivals: Iterable[Arrival] | None = None) -> RunReport:
        """Serve until there is nothing left to do.

        Ctrl-C, unless the program handles it itself, stops with ``finish="running"``, a second
        one with ``"none"``; only a third raises ``KeyboardInterrupt``. Where Ctrl-C is ignored
        (``nohup``, a job in the background) it stays so: end such a run with ``stop``.

        Args:
            arrivals: ``(seconds after the start, request)`` in order of time, taken one ahead.
                When they are exhausted the scheduler drains, and ``run`` returns once everyone
                has finished. None = serve what is submitted, until ``stop``.

        Raises:
            EngineProtocolError: If this driver has run before.
            ConfigError: If an arrival is no (seconds, request), not finite, or before the previous
                one.
            PolicyError: If the policy raised or answered nonsense.
        """
        if not math.isnan(self._began):
            raise EngineProtocolError("run: a driver runs once; build another")
        self._since = self._began = perf_counter()
        watched = nullcontext() if self._watchdog is None else self._watchdog.on_duty()
        with _interruptible(self._interrupt), watched:
            failure: BaseException | None = None
            try:
                self._started_at = self._clock()
                self._serve(arrivals)
                self._close()
            except BaseException as error:
                failure = error
                raise
            finally:
                with self._turning:
                    self._ended = perf_counter()
                self._end_all(failure)
        return self.report()

    def _serve(self, arrivals: Iterable[Arrival] | None) -> None:
        clock, inbox = self._clock, self._inbox
        coming = iter(()) if arrivals is None else _in_order(arrivals)
        arrival = next(coming, None)
        while True:
            for message in inbox.drain():
                message()
            while arrival is not None and not self._stopping and self._due(arrival) <= clock():
                self._submit(arrival[1], None)
                arrival = next(coming, None)
            if self._stopping or (arrival is None and arrivals is not None):
                arrival = None
                self._drain()

            wake_at = self._plan()
            if self._flights:
                if wake_at > -math.inf or len(self._flights) == self._depth:
                    self._land()
            elif self._draining and not self._scheduler.has_work():
                return
            else:
                if arrival is not None:
                    wake_at = min(wake_at, self._due(arrival))
                self._turn_to(_WAIT)
                inbox.wait(wake_at)
                self._turn_to(_OTHER)

    def _plan(self) -> float:
        """Plan and launch a step; return when to try for the next: at once (``-inf``), or later."""
        if self._flights and self._flights[-1][1] is not None:
            return math.inf  # the last one never took off: first that is told
        self._turn_to(_SCHEDULER)
        update = self._scheduler.next_step(now=self._clock())
        self._turn_to(_OTHER)
        self._tell(update)
        if update.batch is None:
            return update.wake_at
        self._launch(update.batch)
        return -math.inf

    def _due(self, arrival: Arrival) -> float:
        return self._started_at + arrival[0]

    def _turn_to(self, part: int) -> None:
        """Count the time for another part from here on. One is always on, so none is lost."""
        with self._turning:
            now = perf_counter()
            self._spent[self._part] += now - self._since
            self._part, self._since = part, now

    def _launch(self, batch: StepBatch) -> None:
        """Let a step take off; with one in flight at a time, ``run`` does so where it lands."""
        self._num_steps += 1
        error: Exception | None = None
        if self._depth > 1:
            self._turn_to(_ENGINE)
            try:
                with self._watching(batch):
                    self._pipelined.launch(batch)
            except Exception as caught:  # noqa: BLE001 - told when its turn comes
                error = caught
            self._turn_to(_OTHER)
        self._flights.append((batch, error))

    def _land(self) -> None:
        """Complete the oldest step in flight. If it failed, so has the one behind it."""
        batch, error = self._flights.popleft()
        if error is None:
            self._turn_to(_ENGINE)
            try:
                with self._watching(batch):
                    outcome = (
                        self._engine.run(batch) if self._depth == 1 else self._pipelined.collect()
                    )
            except Exception as caught:  # noqa: BLE001 - whatever it is, no request is lost
                error = caught
        if error is not None:
            self._turn_to(_OTHER)
            self._flights.clear()
            self._recover(batch, error)
            return
        num_running = self._scheduler.num_running
        self._turn_to(_SCHEDULER)
        try:
            update = self._scheduler.complete_step(batch, outcome, now=self._clock())
        except Exception as caught:
            if isinstance(caught, DllmSchedError) and not isinstance(caught, OutcomeError):
                raise
            self._turn_to(_OTHER)
            self._void()
            self._recover(batch, caught)  # values of such a kind that to look at them raised
            return
        self._turn_to(_OTHER)
        if self._on_step is not None:
            self._on_step(batch, outcome)
        self._tell(update)
        if self._limit.is_lowered:
            self._raise_limit(num_running)

    def num_in_flight(self) -> int:
        """Return how many steps are on their way, for ``ask``: between two steps, 0 or 1."""
        return len(self._flights)

    def _void(self) -> None:
        """Wait for steps whose outcome does not count, because the one before them does not."""
        while self._flights:
            _, error = self._flights.popleft()
            if error is None:
                with suppress(Exception):
                    self._pipelined.collect()

    def _watching(self, batch: StepBatch) -> AbstractContextManager[None]:
        return nullcontext() if self._watchdog is None else self._watchdog.watching(batch)

    def _ask(self, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        self._turn_to(_SCHEDULER)
        try:
            return method(*args, **kwargs, now=self._clock())
        finally:
            self._turn_to(_OTHER)

    def _tell(self, update: Update) -> None:
        if update.released:
            self._turn_to(_ENGINE)
            self._engine.release(update.released)
            self._turn_to(_OTHER)
        for finished in update.finished:
            future = self._active.pop(finished.request.id, None)
            self._restarts.pop(finished.request.id, None)
            self._end(future, finished)
        if self._on_update is not None:
            self._on_update(update)

    # --- intake ---------------------------------------------------------------------------------

    def _put(self, message: Message, future: Future[Any] | None = None) -> bool:
        with self._gate:
            if not self._closed:
                if future is not None:
                    self._open.add(future)
                self._inbox.put(message)
            return not self._closed

    def _take_up(self, future: Future[Any], carry_out: Callable[..., None], *args: Any) -> None:
        if future.set_running_or_notify_cancel():
            carry_out(*args)
        else:
            self._open.discard(future)

    def _end(self, future: Future[T] | None, result: T) -> None:
        if future is not None:
            future.set_result(result)
            self._open.discard(future)

    def _fail(self, future: Future[Any], error: BaseException) -> None:
        future.set_exception(for_future(error))
        self._open.discard(future)

    def _call(self, future: Future[Update], method: Callable[..., Update], *args: Any) -> None:
        try:
            update = self._ask(method, *args)
            if not isinstance(update, Update):
                raise ConfigError(f"call: {method!r} must return an Update, got {update!r}")
        except Exception as error:  # noqa: BLE001 - the caller's own, and the caller knows
            self._fail(future, error)
            return
        self._end(future, update)
        self._tell(update)

    def _look(self, future: Future[T], function: Callable[..., T], *args: Any) -> None:
        try:
            answer = function(*args)
        except Exception as error:  # noqa: BLE001 - the caller's own, and the caller knows
            self._fail(future, error)
            return
        self._end(future, answer)

    def _submit(
        self,
        request: Request,
        future: Future[Finished | Rejected] | None,
        on_accepted: Callable[[], object] | None = None,
    ) -> None:
        try:
            answer = self._ask(self._scheduler.submit, request)
        except Exception as error:
            if future is None:
                raise
            self._fail(future, error)  # the caller's bug, and the caller knows
            return
        if isinstance(answer, Accepted):
            self._active[request.id] = future
            if on_accepted is not None:
                on_accepted()
            return
        self._end(future, answer)
        if self._on_rejected is not None:
            self._on_rejected(request, answer)

    def _cancel(self, request_id: str, future: Future[Any] | None) -> None:
        if future is None or self._active.get(request_id) is future:
            self._tell(self._ask(self._scheduler.cancel, request_id))

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
        if not math.isnan(self._ended):
            return  # nothing is left to cut short but the answers to those who wait
        if self._num_interrupts > 2:
            raise KeyboardInterrupt
        self.stop(_CUTS[self._num_interrupts])

    def _close(self) -> None:
        """Carry out what came too late to be served; from here on the gate refuses."""
        with self._gate:
            self._closed = True
        for message in self._inbox.drain():
            message()

    def _end_all(self, failure: BaseException | None) -> None:
        """Answer everyone who still waits, whatever their callbacks raise."""
        with self._gate:
            self._closed = True
            self._failure = None if failure is None else for_future(failure)
        self._active.clear()
        error = self._failure or EngineProtocolError("run: it is over")
        raised: BaseException | None = None
        while self._open:
            future = self._open.pop()
            try:
                if not future.done() or future.cancelled():
                    with suppress(RuntimeError):  # cancelled, and told so
                        if future.running() or future.set_running_or_notify_cancel():
                            future.set_exception(error)
            except BaseException as error_of_callback:  # noqa: BLE001 - after the others
                raised = error_of_callback
        if raised is not None and failure is None:
            raise raised

    # --- faults ---------------------------------------------------------------------------------

    def _recover(self, batch: StepBatch, error: Exception) -> None:
        """Report a failed step; the class says who restarts and who fails."""
        slots = [row.slot for row in batch.rows]
        fates: dict[int, RowFate] = {}
        capacity: Capacity | None = None
        if isinstance(error, StepFailedError):
            wrong = _wrong(error, slots)
            if wrong is None:
                fates |= {slot: RowFate.RESTART for slot in slots if slot in error.restart}
                fates |= {slot: RowFate.FAIL for slot in slots if slot in error.fail}
                capacity = self._limit.lower(self._scheduler.capacity, error.max_num_seqs)
            else:
                _log.warning("StepFailedError counts as any exception: %s", wrong)
        if not fates and capacity is None:
            fates = dict.fromkeys(slots, RowFate.RESTART)
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
            self._limit.lowered(self._scheduler.capacity, capacity)
            self._tell(self._ask(self._scheduler.set_capacity, capacity))

    def _restart_or_fail(self, request_id: str) -> RowFate:
        restarts = self._restarts.get(request_id, 0)
        if restarts >= self._max_restarts:
            return RowFate.FAIL
        self._restarts[request_id] = restarts + 1
        return RowFate.RESTART

    def _raise_limit(self, num_running: int) -> None:
        """Give a row back after enough steps that went well under a lowered limit."""
        capacity = self._limit.step(num_running, self._scheduler.capacity)
        if capacity is not None:
            self._limit.raised()
            _log.info("steps fit again: from here on at most %d rows", capacity.max_num_seqs)
            self._tell(self._ask(self._scheduler.set_capacity, capacity))


def for_future(error: BaseException) -> BaseException:
    """Return the error as a future may hold it: asyncio's refuse StopIteration, and tell nobody."""
    if not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"raised {error!r}: a next() that found nothing?")
    told.__cause__ = error
    return told


def _wrong(error: StepFailedError, slots: Sequence[int]) -> str | None:
    """What cannot be in it, of a step with rows in these slots."""
    for name in ("restart", "fail"):
        named = getattr(error, name)
        if not isinstance(named, tuple):
            return f"{name} must be a tuple of slots, got {named!r}"
        for slot in named:
            if slot not in slots:
                return f"{name}: slot {slot!r} is not in the step"
    most = error.max_num_seqs
    if most is not None and (not isinstance(most, int) or isinstance(most, bool)):
        return f"max_num_seqs must be an int or None, got {most!r}"
    return None


def _in_order(arrivals: Iterable[Arrival]) -> Iterator[Arrival]:
    before = -math.inf
    if not isinstance(arrivals, Iterable):
        raise ConfigError(f"run: arrivals must be an iterable or None, got {arrivals!r}")
    for arrival in arrivals:
        if not isinstance(arrival, tuple | list) or len(arrival) != 2:
            raise ConfigError(f"run: an arrival is (seconds, request), got {arrival!r}")
        at_s, request = arrival
        if not isinstance(request, Request):
            raise ConfigError(f"run: an arrival is (seconds, request), got {arrival!r}")
        if not is_number(at_s) or not math.isfinite(at_s) or at_s < before:
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
