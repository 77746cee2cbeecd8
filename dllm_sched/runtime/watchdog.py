"""A thread that says when a step of the engine takes too long. It touches nothing else."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from dllm_sched.batch import StepBatch
from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import is_number

__all__ = ["OnStuck", "Watchdog"]

OnStuck = Callable[[StepBatch, float], object]
"""Called with the step that is stuck and the seconds for which it has been running."""

_log = logging.getLogger("dllm_sched")


def _warn(batch: StepBatch, seconds: float) -> None:
    _log.warning(
        "step %d of %d rows has been running for %.3g s", batch.step_id, len(batch.rows), seconds
    )


class Watchdog:
    """Watches steps, in seconds of ``time.perf_counter``; a virtual clock stands still in a hang.

    Args:
        timeout_s: Longest step, > 0 seconds.
        on_stuck: Called in the watchdog's own thread, once for each step that takes longer, while
            it still runs. What it raises is logged. Default: a warning in the log.

    Raises:
        ConfigError: If an argument is out of its range.
    """

    def __init__(self, timeout_s: float, on_stuck: OnStuck | None = None) -> None:
        if not is_number(timeout_s) or not 0 < timeout_s < math.inf:
            raise ConfigError(f"step_timeout_s must be finite seconds > 0, got {timeout_s!r}")
        if on_stuck is not None and not callable(on_stuck):
            raise ConfigError(f"on_stuck must be callable, got {on_stuck!r}")
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._on_stuck = _warn if on_stuck is None else on_stuck
        self._step: tuple[StepBatch, float] | None = None  # the one that runs, and since when
        self._over = threading.Event()

    @contextmanager
    def on_duty(self) -> Iterator[None]:
        """Watch for as long as this lasts."""
        threading.Thread(target=self._watch, name="dllm_sched watchdog", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()

    @contextmanager
    def watching(self, batch: StepBatch) -> Iterator[None]:
        """Watch a step."""
        self._step = (batch, perf_counter())
        try:
            yield
        finally:
            self._step = None

    def _watch(self) -> None:
        told: tuple[StepBatch, float] | None = None
        left_s = self._timeout_s
        while not self._over.wait(left_s):
            left_s = self._timeout_s
            step = self._step
            if step is None or step is told:
                continue
            seconds = perf_counter() - step[1]
            if seconds < self._timeout_s:
                left_s = self._timeout_s - seconds
                continue
            told = step
            try:
                self._on_stuck(step[0], seconds)
            except Exception:  # noqa: BLE001 - the next step is watched all the same
                _log.exception("on_stuck %r raised", self._on_stuck)
