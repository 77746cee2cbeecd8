"""Fill a batch up to a target of joules per request."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from dllm_sched.capacity import Capacity, within_slots
from dllm_sched.errors import ConfigError
from dllm_sched.policies.base import Timeout
from dllm_sched.policies.timeout import Fill, MaxWait
from dllm_sched.theory._check import not_negative, positive
from dllm_sched.theory.energy import smallest_batch
from dllm_sched.view import SchedulerView

__all__ = ["EnergyFill", "LinearEnergy"]


@attrs.frozen
class LinearEnergy:
    """Joules of a batch: so many whatever its rows, and so many for each.

    Args:
        fixed_j: >= 0.
        row_j: > 0.
    """

    fixed_j: float
    row_j: float

    def __attrs_post_init__(self) -> None:
        not_negative(fixed_j=self.fixed_j)
        positive(row_j=self.row_j)

    def __call__(self, rows: int) -> float:
        """Return joules. O(1)."""
        return self.fixed_j + self.row_j * rows


@attrs.frozen
class EnergyFill(Timeout):
    """Start once the waiting requests share a batch at no more than ``target_j`` each.

    Where no size up to ``most`` reaches the target, once the cheapest size is there. Nobody waits
    longer than ``max_wait_s`` for an idle engine.

    Args:
        target_j: Joules per request, > 0.
        batch_j: Joules of a whole batch by its rows, > 0.
        most: Rows, >= 1 and at most ``max_num_seqs`` when the scheduler is built.
        max_wait_s: Longest wait of the oldest request, seconds, >= 0; ``inf``: by size only
            (except while draining).

    Attributes:
        count: The rows it waits for.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation; that requests share a batch's energy, and less so the longer their contexts:
        "Characterization of Request and Token Energy Costs" (arXiv 2608.28044), second hand.
    """

    target_j: float
    batch_j: Callable[[int], float]
    most: int = attrs.field(validator=within_slots)
    max_wait_s: float = math.inf
    count: int = attrs.field(init=False)
    _timeout: Timeout = attrs.field(init=False, repr=False)

    @count.default
    def _count(self) -> int:
        if not callable(self.batch_j):
            raise ConfigError(f"EnergyFill: batch_j must be a callable, got {self.batch_j!r}")
        within_slots(self, attrs.fields(EnergyFill).most, self.most)
        return smallest_batch(self.batch_j, target_j=self.target_j, most=self.most)

    @_timeout.default
    def _fill_or_wait(self) -> Timeout:
        return Fill(self.count) | MaxWait(self.max_wait_s)

    def init(self) -> Any:
        """Make the state of the parts: none of them has one."""
        return self._timeout.init()

    def due(self, state: Any, view: SchedulerView) -> float:
        """Return ``-inf`` when enough wait or draining, else the oldest arrival plus the wait."""
        return self._timeout.due(state, view)

    def validate(self, capacity: Capacity) -> None:
        """Refuse a size that the capacity can never hold."""
        self._timeout.validate(capacity)
