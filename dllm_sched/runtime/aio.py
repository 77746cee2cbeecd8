"""The asyncio driver: one thread owns scheduler and engine, any number of tasks await answers.

``submit`` returns a handle at once. What happens to its request reaches the event loop by
``call_soon_threadsafe``, one wake-up for all that a step brought; the loop never waits for a step.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from dllm_sched.batch import Accepted, Finished, Rejected, StepBatch, StepOutcome, Update
from dllm_sched.errors import ConfigError, EngineProtocolError
from dllm_sched.request import Request
from dllm_sched.runtime.clocks import Clock
from dllm_sched.runtime.driver import Driver, Finish, RunReport, for_future
from dllm_sched.runtime.engine import Engine
from dllm_sched.runtime.watchdog import OnStuck
from dllm_sched.scheduler import Scheduler

__all__ = ["AsyncDriver", "Committed", "Handle", "Provisional"]

T = TypeVar("T")


class Committed(NamedTuple):
    """More of the answer is final: it follows what was told before, and never changes."""

    request_id: str
    position: int  #: of the first token, counted from the start of the answer
    tokens: tuple[int, ...]  #: token ids, at least one


class Provisional(NamedTuple):
    """How the rest of the answer looks now; it replaces what was told of it before."""

    request_id: str
    position: int  #: of the first token: all before it are committed
    tokens: tuple[int | None, ...]  #: token ids that may still change; None = masked


class Handle:
    """One request on its way through an :class:`AsyncDriver`. Used in the event loop only.

    ``async for event in handle`` gives :class:`Committed` and :class:`Provisional` until the
    request has ended. Events that nobody has taken yet are merged, so a slow reader costs no more
    memory than the answer. A loop that is left early, or a task that is cancelled while it waits
    in here, cancels the request in whatever state it is.
    """

    def __init__(self, request: Request, cancel: Callable[[], None], *, stream: bool) -> None:
        self._request = request
        self._cancel = cancel
        self._stream = stream
        loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Accepted | Rejected] = loop.create_future()
        self._result: asyncio.Future[Finished | Rejected] = loop.create_future()
        self._news = asyncio.Event()
        self._position = 0  # of the first token that the reader has not taken
        self._committed: list[int] = []
        self._provisional: tuple[int | None, ...] | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self._request.id

    @property
    def request(self) -> Request:
        """The request."""
        return self._request

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._result.done()

    def cancel(self) -> None:
        """End the request in whatever state; nothing happens if it has ended."""
        if not self._result.done():
            self._cancel()

    async def accepted(self) -> Accepted | Rejected:
        """Wait until the request waits in the scheduler, or has been refused.

        The scheduler is asked between two steps. Cancelled in here, the request is cancelled.

        Raises:
            DllmSchedError: What the submission, or the run, met.
        """
        return await self._wait_for(self._answer)

    async def result(self) -> Finished | Rejected:
        """Wait for the end. Cancelled in here (``asyncio.timeout``, say), the request is too.

        Raises:
            DllmSchedError: What the submission, the stream or the run met.
        """
        return await self._wait_for(self._result)

    def __aiter__(self) -> AsyncGenerator[Committed | Provisional, None]:
        """Follow the answer; once. Who may leave early leaves by ``contextlib.aclosing``.

        Raises:
            EngineProtocolError: If it is not streamed, or is being followed already.
        """
        if not self._stream:
            raise EngineProtocolError(
                f"request {self.id!r}: not streamed; submit it with stream=True, to an engine that "
                "has progress()"
            )
        self._stream = False
        return self._follow()

    async def _follow(self) -> AsyncGenerator[Committed | Provisional, None]:
        try:
            while True:
                self._news.clear()
                if self._committed:
                    tokens, position = tuple(self._committed), self._position
                    self._committed.clear()
                    self._position += len(tokens)
                    yield Committed(self.id, position, tokens)
                elif self._provisional is not None:
                    provisional, self._provisional = self._provisional, None
                    yield Provisional(self.id, self._position, provisional)
                elif self._result.done():
                    self._result.result()  # raises what it ended with
                    return
                else:
                    await self._news.wait()
        finally:
            self.cancel()

    async def _wait_for(self, future: asyncio.Future[T]) -> T:
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self.cancel()
            raise

    # --- what the driver tells, in the loop

    def _accept(self) -> None:
        self._answer.set_result(Accepted(self.id))

    def _advance(
        self, committed: tuple[int, ...], provisional: tuple[int | None, ...] | None
    ) -> None:
        if not self._result.done():
            self._committed += committed
            self._provisional = provisional
            self._news.set()

    def _end(self, ended: Future[Finished | Rejected]) -> None:
        error = ended.exception()
        if error is not None:
            self._fail(error)
        elif not self._result.done():
            result = ended.result()
            if isinstance(result, Rejected):
                self._answer.set_result(result)
            self._result.set_result(result)
            self._provisional = None
            self._news.set()

    def _fail(self, error: BaseException) -> None:
        error = for_future(error)
        for future in (self._answer, self._result):
            if not future.done():
                future.set_exception(error)
                future.exception()  # who does not ask need not read of it in the log
        self._news.set()


class _Feed:
    """What the driver's thread knows of a stream."""

    __slots__ = ("confirmed", "fail", "provisional", "request", "tell", "told")

    def __init__(self, handle: Handle, fail: Callable[[Exception], None]) -> None:
        self.request = handle.request
        self.tell = handle._advance
        self.fail = fail
        self.told: list[int] = []
        self.confirmed = 0  #: tokens told that the row, in its present life, has committed
        self.provisional: tuple[int | None, ...] | None = None


class AsyncDriver:
    """Serves requests to tasks of one event loop: a :class:`Driver` in a thread of its own.

    ``async with AsyncDriver(scheduler, engine) as driver: ...`` starts the thread; leaving lets
    everyone finish, or, if the body raised, cancels whoever is left. Faults of the engine are
    handled as in ``Driver``. All methods belong to the loop that entered; one loop only. Works
    under anyio's asyncio backend, not under trio.

    A request that starts anew after a failed step is told no token twice: its stream goes on once
    it has committed the same tokens again. If they differ, the stream raises, and the request is
    cancelled: what was told as committed cannot be taken back.

    Args:
        scheduler: Used by this driver alone from now on.
        engine: Runs the steps, in the driver's thread. With ``progress``
            (a ``StreamingEngine``) its answers can be followed.
        clock: Seconds for the scheduler; default: a ``MonotonicClock``.
        max_open: Requests that may be open at once, >= 1; None: as many as come. It bounds what
            a policy's ``MaxWaiting`` cannot: the mailbox between two steps.
        on_update: As in ``Driver``: called in the driver's thread, with every ``Update``.
        max_restarts: As in ``Driver``.
        recover_steps: As in ``Driver``.
        step_timeout_s: As in ``Driver``.
        on_stuck: As in ``Driver``.

    Raises:
        ConfigError: If an argument is out of its range.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        clock: Clock | None = None,
        *,
        max_open: int | None = None,
        on_update: Callable[[Update], object] | None = None,
        max_restarts: int = 1,
        recover_steps: int | None = 64,
        step_timeout_s: float = math.inf,
        on_stuck: OnStuck | None = None,
    ) -> None:
        if max_open is not None and (
            not isinstance(max_open, int) or isinstance(max_open, bool) or max_open < 1
        ):
            raise ConfigError(
                f"AsyncDriver: max_open must be an int >= 1 or None, got {max_open!r}"
            )
        if on_update is not None and not callable(on_update):
            raise ConfigError(f"AsyncDriver: on_update must be callable or None, got {on_update!r}")
        self._scheduler = scheduler
        self._progress: Callable[[int, int], Any] | None = getattr(engine, "progress", None)
        self._on_update = on_update
        self._driver = Driver(
            scheduler,
            engine,
            clock,
            on_update=self._updated,
            on_step=None if self._progress is None else self._stepped,
            max_restarts=max_restarts,
            recover_steps=recover_steps,
            step_timeout_s=step_timeout_s,
            on_stuck=on_stuck,
        )
        self._room = None if max_open is None else asyncio.Semaphore(max_open)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Future[RunReport]
        self._num_paused = 0  # of those who are inside paused()
        # Of the driver's thread:
        self._feeds: dict[Request, _Feed] = {}
        self._feed_in: dict[int, _Feed] = {}  # by slot
        # Between the two: news for the loop, and whether it has been called to fetch them.
        self._news: deque[Callable[[], object]] = deque()
        self._called = False

    # --- the run

    async def __aenter__(self) -> Self:
        """Start the driver's thread.

        Raises:
            EngineProtocolError: If it was entered before.
        """
        if self._loop is not None:
            raise EngineProtocolError("AsyncDriver: runs once; build another")
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        # A daemon: a loop that is closed without leaving must not keep the process from ending.
        threading.Thread(target=self._run, name="dllm_sched driver", daemon=True).start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let everyone finish; if the body raised, cancel who is left."""
        try:
            await self.stop("all" if error is None else "none")
        except asyncio.CancelledError:
            await self.stop("none")
            raise
        except BaseException as failure:
            if failure is not error:
                raise

    async def stop(self, finish: Finish = "all") -> RunReport:
        """Take no more requests, and wait until what is left has finished.

        Args:
            finish: As in ``Driver.stop``; called again it can cut deeper.

        Raises:
            ConfigError: If it is none of the three.
            BaseException: What ended the run, if not this.
        """
        self._check_started()
        self._driver.stop(finish)
        return await asyncio.shield(self._over)

    @property
    def clock(self) -> Clock:
        """The clock of every instant that the scheduler is told: of ``deadline_at``, say."""
        return self._driver.clock

    def report(self) -> RunReport:
        """Return where the thread's time has gone so far."""
        return self._driver.report()

    # --- requests

    async def submit(
        self, request: Request, *, stream: bool | None = None, wait: bool = False
    ) -> Handle:
        """Hand a request over.

        Args:
            request: Whose id is not active.
            stream: Whether its answer will be followed; default: if the engine can tell.
            wait: At ``max_open`` requests, wait for room, first come first served, instead of
                being refused as ``queue_full``.

        Raises:
            ConfigError: If it is not a Request, or is to be streamed by an engine that cannot.
            BaseException: What ended the run.
        """
        self._check_started()
        if not isinstance(request, Request):
            raise ConfigError(f"submit: request must be a Request, got {request!r}")
        if stream is None:
            stream = self._progress is not None
        elif stream and self._progress is None:
            raise ConfigError(
                f"request {request.id!r}: cannot be streamed, the engine has no progress()"
            )
        if self._room is not None:
            if not wait and self._room.locked():
                return _refused(request, stream=stream)
            await self._room.acquire()
        failure = self._driver.failure
        if failure is not None:
            if self._room is not None:
                self._room.release()  # for who waits behind, to be told too
            raise failure
        return self._hand_over(request, stream=stream)

    def _hand_over(self, request: Request, *, stream: bool) -> Handle:
        future: Future[Finished | Rejected] | None = None
        handle = Handle(request, lambda: self._driver.cancel(request.id, future), stream=stream)
        feed = _Feed(handle, partial(self._lose, handle)) if stream else None

        def accepted() -> None:
            if feed is not None:
                self._feeds[request] = feed
            self._post(handle._accept)

        def ended(ended: Future[Finished | Rejected]) -> None:
            if feed is not None and self._feeds.get(request) is feed:
                del self._feeds[request]
            self._post(partial(self._ended, handle, ended))

        future = self._driver.submit(request, on_accepted=accepted)
        future.add_done_callback(ended)
        return handle

    def cancel(self, *request_ids: str) -> None:
        """End requests in whatever state, all between the same two steps; unknown ids are none.

        Raises:
            ConfigError: If an id is not a str.
        """
        for request_id in request_ids:
            self._driver.cancel(request_id)

    # --- the scheduler

    async def call(self, method: Callable[..., Update], *args: Any) -> Update:
        """Call a method of the scheduler between two steps, as ``Driver.call`` does.

        Raises:
            ConfigError: If it is not callable, or a method that is the driver's own to call.
            BaseException: What the call or the run met.
        """
        self._check_started()
        return await asyncio.wrap_future(self._driver.call(method, *args))

    async def ask(self, function: Callable[..., T], *args: Any) -> T:
        """Look at the scheduler between two steps: ``await driver.ask(scheduler.stats)``.

        Raises:
            ConfigError: If it is not callable.
            BaseException: What the function or the run met.
        """
        self._check_started()
        return await asyncio.wrap_future(self._driver.ask(function, *args))

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Run no step in here, to change the weights, say. Requests are taken, and wait.

        Rows keep their slots, and what the engine has cached of them: where that is void,
        ``await driver.call(scheduler.requeue, id)`` starts one anew. Several tasks may be in here
        at once: steps run again when the last one leaves.
        """
        self._check_started()
        self._num_paused += 1
        try:
            await self.call(self._scheduler.pause)
            while await self.ask(self._driver.num_in_flight):
                pass  # a step that was ahead: asked again when it is over
            yield
        finally:
            self._num_paused -= 1
            if not self._num_paused:
                # Asked for before anybody else can pause, and whatever is cancelled meanwhile.
                resumed = asyncio.wrap_future(self._driver.call(self._scheduler.resume))
                await asyncio.shield(resumed)

    # --- in the driver's thread

    def _run(self) -> None:
        try:
            report = self._driver.run()
        except BaseException as error:  # noqa: BLE001 - it ends in the loop, where stop() is awaited
            self._post(partial(self._run_failed, for_future(error)))
        else:
            self._post(partial(self._over.set_result, report))

    def _stepped(self, batch: StepBatch, outcome: StepOutcome) -> None:
        """Tell the streams what the step committed."""
        for row in batch.joined:
            feed = self._feeds.get(row.request)
            if feed is not None:
                self._feed_in[row.slot] = feed
                if not row.resumed:
                    feed.confirmed = 0
        if not self._feed_in:
            return
        failed = {row.slot for row in outcome.failed}
        for slot, feed in list(self._feed_in.items()):
            if slot not in failed:
                try:
                    self._follow(slot, feed)
                except Exception as error:  # noqa: BLE001 - this stream's, not its neighbours'
                    del self._feed_in[slot]
                    feed.fail(error)

    def _follow(self, slot: int, feed: _Feed) -> None:
        if self._progress is None:
            return
        committed, provisional = self._progress(slot, feed.confirmed)
        again = feed.told[feed.confirmed : feed.confirmed + len(committed)]
        if tuple(again) != committed[: len(again)]:
            raise EngineProtocolError(
                f"request {feed.request.id!r}: started anew and committed other tokens from "
                f"position {feed.confirmed} on than were told: {committed[: len(again)]} after "
                f"{tuple(again)}"
            )
        feed.confirmed += len(committed)
        new = committed[len(again) :]
        if feed.confirmed < len(feed.told) or (not new and provisional == feed.provisional):
            return
        feed.told += new
        feed.provisional = provisional
        self._post(partial(feed.tell, new, provisional))

    def _updated(self, update: Update) -> None:
        for gone in update.released:
            if gone.slot is not None:
                self._feed_in.pop(gone.slot, None)
        if self._on_update is not None:
            self._on_update(update)

    def _lose(self, handle: Handle, error: Exception) -> None:
        """End a stream that cannot go on, and its request."""
        handle._cancel()
        self._post(partial(handle._fail, error))

    def _post(self, news: Callable[[], object]) -> None:
        """Hand news to the loop, from any thread."""
        self._news.append(news)
        if not self._called and self._loop is not None:
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody is left to serve
                self._driver.stop("none")

    # --- in the loop

    def _check_started(self) -> None:
        if self._loop is None:
            raise EngineProtocolError("AsyncDriver: not running; use it in `async with`")
        if asyncio.get_running_loop() is not self._loop:
            raise EngineProtocolError(
                "AsyncDriver: belongs to another event loop; from there, use "
                "asyncio.run_coroutine_threadsafe"
            )

    def _deliver(self) -> None:
        self._called = False  # before looking: what comes later calls again
        for _ in range(len(self._news)):
            self._news.popleft()()

    def _ended(self, handle: Handle, ended: Future[Finished | Rejected]) -> None:
        if self._room is not None:
            self._room.release()
        handle._end(ended)

    def _run_failed(self, error: BaseException) -> None:
        self._over.set_exception(error)
        self._over.exception()  # stop() raises it


def _refused(request: Request, *, stream: bool) -> Handle:
    ended: Future[Finished | Rejected] = Future()
    ended.set_result(Rejected(request.id, "queue_full"))
    handle = Handle(request, lambda: None, stream=stream)
    handle._end(ended)
    return handle
