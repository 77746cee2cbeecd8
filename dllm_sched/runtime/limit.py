"""How many rows a step may have after one that did not fit."""

from __future__ import annotations

import attrs

from dllm_sched.capacity import Capacity
from dllm_sched.errors import ConfigError

__all__ = ["RowLimit"]


class RowLimit:
    """Lowers ``max_num_seqs`` when a step did not fit, and raises it again, one row at a time.

    A step counts as good if every slot that the limit allows was taken, whichever of the rows took
    part: others tell nothing about one row more. After so many good steps the limit goes up by one,
    up to where it came from. Each time that a step does not fit on the way up, the next row takes
    twice as many; once the limit is back where it came from, it starts over.

    Args:
        recover_steps: Good steps before the first row comes back, >= 1, or None = never.

    Raises:
        ConfigError: If it is neither.

    Source: own choice; additive increase and multiplicative decrease (Chiu and Jain 1989), with
    the halving left to the engine.
    """

    def __init__(self, recover_steps: int | None) -> None:
        if recover_steps is not None and (
            not isinstance(recover_steps, int)
            or isinstance(recover_steps, bool)
            or recover_steps < 1
        ):
            raise ConfigError(
                f"recover_steps must be an int >= 1 or None, got {recover_steps!r}: None = never"
            )
        self._first = recover_steps
        self._needed = recover_steps or 0
        self._full: int | None = None  # where the limit came from, while it is lowered
        self._now = 0  # the limit that was set last
        self._good = 0

    @property
    def is_lowered(self) -> bool:
        """Whether a limit was lowered that has not come back."""
        return self._full is not None

    def lower(self, capacity: Capacity, most: int | None) -> Capacity | None:
        """Return the capacity with at most so many rows, or None if that is no fewer than now."""
        if most is None or max(1, most) >= capacity.max_num_seqs:
            return None
        return attrs.evolve(capacity, max_num_seqs=max(1, most))

    def lowered(self, before: Capacity, after: Capacity) -> None:
        """Take note that the limit was lowered because a step did not fit."""
        if self._full is None or before.max_num_seqs != self._now:
            self._full, self._needed = before.max_num_seqs, self._first or 0
        else:
            self._needed *= 2
        self._now, self._good = after.max_num_seqs, 0

    def step(self, num_running: int, capacity: Capacity) -> Capacity | None:
        """Count a step that went well; return the capacity with one row more when it is time. O(1).

        ``num_running``: the rows in their slots while it ran.

        If somebody else has set another limit meanwhile, that one stays.
        """
        if self._full is None or self._first is None:
            return None
        if capacity.max_num_seqs != self._now:
            self._full = None
            return None
        self._good += num_running >= self._now
        if self._good < self._needed:
            return None
        self._good = 0
        return attrs.evolve(capacity, max_num_seqs=self._now + 1)

    def raised(self) -> None:
        """Take note that the limit was raised by one."""
        self._now += 1
        if self._now == self._full:
            self._full = None
