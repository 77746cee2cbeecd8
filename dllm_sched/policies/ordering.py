"""Who goes first. Smaller keys do; among equals the earlier arrival."""

from __future__ import annotations

from typing import Any

import attrs

from dllm_sched.policies.base import Ordering
from dllm_sched.request import RequestView

__all__ = ["FCFS", "EarliestDeadline", "PriorityFirst", "ShortestBudget"]


@attrs.frozen
class FCFS(Ordering):
    """First come, first served: no key at all, so the arrival number decides."""


@attrs.frozen
class PriorityFirst(Ordering):
    """By ``Request.priority``, lower first.

    Starves low priorities under load; chain an ageing order, or give deadlines, where that hurts.
    """

    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        """Return ``(priority,)``."""
        return (rv.request.priority,)


@attrs.frozen
class EarliestDeadline(Ordering):
    """By ``Request.deadline_at``; requests without one come last.

    Source:
        Earliest deadline first (Liu and Layland, 1973).
    """

    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        """Return ``(deadline_at,)``."""
        return (rv.request.deadline_at,)


@attrs.frozen
class ShortestBudget(Ordering):
    """By ``Request.max_new_tokens``: shortest job first when the budget is all one knows.

    Starves long requests under load.
    """

    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        """Return ``(max_new_tokens,)``."""
        return (rv.request.max_new_tokens,)
