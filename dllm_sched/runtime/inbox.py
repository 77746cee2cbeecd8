"""The mailbox between any thread and the one that owns the scheduler."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from dllm_sched.runtime.clocks import Clock, VirtualClock

__all__ = ["Inbox"]

T = TypeVar("T")


class Inbox(Generic[T]):
    """Any thread puts, one thread drains and waits. First in, first out.

    ``put`` may also be called from a signal handler or a finalizer: ``SimpleQueue`` is re-entrant,
    where a condition variable would deadlock or miss the wake-up.

    Args:
        clock: The clock that ``wait`` goes by.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._taken: list[T] = []  # what ended a wait, not yet drained: at most one

    def put(self, item: T) -> None:
        """Add an item, and end a wait. Never blocks."""
        self._queue.put(item)

    def drain(self) -> Iterator[T]:
        """Take what is there now, one by one: what the caller does not get to stays inside."""
        for _ in range(len(self._taken) + self._queue.qsize()):
            yield self._taken.pop() if self._taken else self._queue.get_nowait()

    def wait(self, until: float) -> None:
        """Sleep until an item is there or the instant has come, whichever is first.

        Blocks in the operating system: it neither polls nor spins. Nobody sleeps on a
        ``VirtualClock``: it jumps to the instant at once.

        Args:
            until: Instant in seconds on the inbox's clock; ``inf`` = only an item ends the wait.
        """
        if self._taken or not self._queue.empty():
            return
        if until == math.inf:
            self._taken.append(self._queue.get())
            return
        seconds = until - self._clock()
        if seconds <= 0:
            return
        if isinstance(self._clock, VirtualClock):
            self._clock.set(until)
            return
        with contextlib.suppress(queue.Empty):
            self._taken.append(self._queue.get(timeout=min(seconds, threading.TIMEOUT_MAX)))
