"""Who goes first. Smaller keys do; among equals the earlier arrival."""

from __future__ import annotations

import math
from typing import Any

import attrs

from dllm_sched.errors import ConfigError
from dllm_sched.policies.base import Ordering
from dllm_sched.request import RequestView
from dllm_sched.theory._check import is_number

__all__ = ["FCFS", "EarliestDeadline", "PriorityFirst", "ShortestBudget"]


@attrs.frozen
class FCFS(Ordering):
    """First come, first served: no key at all, so the arrival number decides."""


def _seconds(instance: object, field: attrs.Attribute[float], value: object) -> None:
    if not is_number(value) or not value >= 0:  # type: ignore[operator]
        raise ConfigError(
            f"{type(instance).__name__}: {field.name} must be seconds >= 0, got {value!r}"
        )


@attrs.frozen
class PriorityFirst(Ordering):
    """By ``Request.priority``, lower first.

    Args:
        yield_s: A request yields to those whose priority is one less if they come within so many
            seconds after it, to those with two less within twice as many, and so on, >= 0; ``inf``:
            for ever, which starves low priorities under load. If finite, equals are rare: what
            follows in ``.then`` hardly counts.
    """

    yield_s: float = attrs.field(default=math.inf, validator=_seconds)

    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        """Return ``(priority,)``, or the arrival put off by it."""
        priority = rv.request.priority
        if self.yield_s == math.inf:
            return (priority,)
        return (rv.arrived_at + self.yield_s * priority,)


@attrs.frozen
class EarliestDeadline(Ordering):
    """By ``Request.deadline_at``; requests without one come last.

    Args:
        patience_s: A request without a deadline counts as if due so many seconds after its arrival,
            >= 0, though it never expires; ``inf``: as if never due, which starves it as long as
            requests with a deadline fill the engine.

    Source:
        Earliest deadline first (Liu and Layland, 1973); the patience is our own.
    """

    patience_s: float = attrs.field(default=math.inf, validator=_seconds)

    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        """Return ``(deadline_at,)``, or what stands for it."""
        due_at = rv.request.deadline_at
        return (rv.arrived_at + self.patience_s if due_at == math.inf else due_at,)


@attrs.frozen
class ShortestBudget(Ordering):
    """By ``Request.max_new_tokens``: shortest job first when the budget is all one knows.

    Starves long requests under load; ``AgedShortestFirst`` is the same order with a bound.
    """

    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        """Return ``(max_new_tokens,)``."""
        return (rv.request.max_new_tokens,)
