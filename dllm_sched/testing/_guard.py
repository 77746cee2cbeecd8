"""What a strategy does besides answering: clocks read, random numbers drawn, counts not declared.

Watched through the interpreter's profiling hook of this one thread, so that a function is known
whatever name it was imported under, and other threads go on undisturbed.
"""

from __future__ import annotations

import datetime as dt
import gc
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dllm_sched.request import RequestView
from dllm_sched.view import Round, SchedulerView

__all__ = ["Watch", "watching"]

_CLOCKS = frozenset(
    getattr(time, name)
    for name in (
        "time time_ns monotonic monotonic_ns perf_counter perf_counter_ns process_time "
        "process_time_ns thread_time thread_time_ns localtime gmtime ctime strftime sleep"
    ).split()
    if hasattr(time, name)
)
_MASKED_REMAINING = vars(RequestView)["masked_remaining"].fget.__code__
_NOW = frozenset({"now", "utcnow", "today"})


class Watch:
    """What one call did."""

    __slots__ = ("clock", "random", "reads")

    def __init__(self) -> None:
        self.clock: str = ""  # the function that read a clock
        self.random: str = ""  # the function that drew a number
        self.reads: set[str] = set()  # watched attributes that were read

    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call" and frame.f_code is _MASKED_REMAINING:
            self.reads.add("masked_remaining")
        if event != "c_call":
            return
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if isinstance(owner, random.Random) or function is os.urandom:
            self.random = name
        elif isinstance(owner, type) and issubclass(owner, dt.date):
            if name in _NOW:
                self.clock = f"{owner.__name__}.{name}"
        elif owner is time and function in _CLOCKS:
            self.clock = f"time.{name}"


class _SpyView(SchedulerView):
    """The counts; notes who reads those that cost extra."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name in ("max_length", "waiting_by_lane", "running_by_lane"):
            _current[-1].reads.add(name)
        return tuple.__getattribute__(self, name)


class _SpyRound(Round):
    """A round that notes the same."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name in ("boundaries", "rows", "youngest_first"):
            _current[-1].reads.add(name)
        return object.__getattribute__(self, name)


_current: list[Watch] = []  # a stack: a call may be asked within a call


@contextmanager
def watching(arguments: list[Any]) -> Iterator[Watch]:
    """Watch a call; ``arguments`` is changed in place to the objects to hand in.

    Rounds are watched by lending them another class for the time of the call, so that the callee
    has the very object.
    """
    watch = Watch()
    rounds: list[tuple[Round, SchedulerView]] = []
    for index, one in enumerate(arguments):
        if type(one) is Round:
            view = one.view
            rounds.append((one, view))
            one.view = tuple.__new__(_SpyView, view)
            one.__class__ = _SpyRound
        elif type(one) is SchedulerView:
            arguments[index] = tuple.__new__(_SpyView, one)
    _current.append(watch)
    previous: Any = sys.getprofile()
    free = previous is None or callable(previous)  # a profiler in C could not be put back
    # A collection may call others' hooks (hypothesis times its own), which are not the strategy's.
    collects = gc.isenabled()
    gc.disable()
    if free:
        sys.setprofile(watch._profile)
    try:
        yield watch
    finally:
        if free:
            sys.setprofile(previous)
        if collects:
            gc.enable()
        _current.pop()
        for one, view in rounds:
            one.__class__ = Round
            if type(one.view) is _SpyView:
                one.view = view
