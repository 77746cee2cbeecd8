"""Clocks: where a driver's ``now`` comes from. Waiting is the inbox's job, not theirs."""

from __future__ import annotations

import math
import random
import time
from typing import Protocol

from dllm_sched.errors import ClockError, ConfigError
from dllm_sched.theory._check import is_number

__all__ = ["Clock", "MonotonicClock", "VirtualClock"]


class Clock(Protocol):
    """Anything that tells seconds: finite, never going backward, any origin."""

    def __call__(self) -> float:
        """Return now, seconds."""


class MonotonicClock:
    """``time.monotonic`` plus an offset, so that code which mixes clocks fails at once.

    Args:
        offset_s: Added to ``time.monotonic``, finite seconds; None = drawn once, for this clock,
            between 1e5 and 1e6.

    Raises:
        ConfigError: If the offset is not finite.

    Source:
        The random origin is trio's idea: an instant of another clock then looks absurd, instead
        of plausible until the machine is restarted.
    """

    def __init__(self, offset_s: float | None = None) -> None:
        if offset_s is None:
            offset_s = random.SystemRandom().uniform(1e5, 1e6)
        if not is_number(offset_s) or not math.isfinite(offset_s):
            raise ConfigError(f"MonotonicClock: offset_s must be finite seconds, got {offset_s!r}")
        self._offset_s = offset_s

    def __call__(self) -> float:
        """Return now, seconds."""
        return time.monotonic() + self._offset_s

    def __repr__(self) -> str:
        return f"MonotonicClock(offset_s={self._offset_s!r})"


class VirtualClock:
    """Time that moves only when told to: by whoever owns it, an engine's service time, a wait.

    Args:
        start_at: First instant, finite seconds.

    Raises:
        ClockError: If the instant is not finite.
    """

    def __init__(self, start_at: float = 0.0) -> None:
        self._now = -math.inf
        self.set(start_at)

    def __call__(self) -> float:
        """Return now, seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Args:
            seconds: Finite, >= 0.

        Raises:
            ClockError: If it is neither; the clock stays.
        """
        if not is_number(seconds):
            raise ClockError(f"VirtualClock: advance takes finite seconds >= 0, got {seconds!r}")
        self.set(self._now + seconds)

    def set(self, instant: float) -> None:
        """Jump to an instant.

        Args:
            instant: Finite seconds, not before now.

        Raises:
            ClockError: If it is neither; the clock stays.
        """
        if not is_number(instant) or not math.isfinite(instant) or instant < self._now:
            raise ClockError(
                f"VirtualClock: time goes forward and stays finite, got {instant!r} after "
                f"{self._now!r}"
            )
        self._now = instant

    def __repr__(self) -> str:
        return f"VirtualClock({self._now!r})"
