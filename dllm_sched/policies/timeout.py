"""When a partly filled batch stops waiting. Asked per batch_key while the engine is idle."""

from __future__ import annotations

import math
from typing import Any, Literal

import attrs

from dllm_sched.capacity import Capacity, at_least_one
from dllm_sched.errors import ConfigError
from dllm_sched.policies.base import Timeout
from dllm_sched.theory.batching import capped_timeout, paper_timeout
from dllm_sched.view import SchedulerView

__all__ = ["Fill", "MaxWait", "PoissonTimeout"]


@attrs.frozen
class Fill(Timeout):
    """Start once ``count`` requests wait (or as many as there are free slots).

    Alone it never starts a smaller batch except while draining; combine it with a timer:
    ``Fill(16) | MaxWait(0.12)``.

    Args:
        count: Requests of one batch_key, >= 1 and at most ``max_num_seqs`` when the scheduler is
            built.
    """

    count: int = attrs.field(validator=at_least_one)

    def due(self, state: Any, view: SchedulerView) -> float:
        """Return ``-inf`` when filled or draining, else ``inf``. O(1)."""
        full = view.num_waiting >= min(self.count, max(1, view.free_slots))
        return -math.inf if full or view.draining else math.inf

    def validate(self, capacity: Capacity) -> None:
        """Refuse a fill that the capacity can never hold."""
        if self.count > capacity.max_num_seqs:
            raise ConfigError(
                f"Fill({self.count}): the capacity has only {capacity.max_num_seqs} slots; raise "
                "max_num_seqs or lower the count"
            )


@attrs.frozen
class MaxWait(Timeout):
    """Start when the oldest waiting request has waited ``seconds``.

    Args:
        seconds: >= 0; ``inf`` = never by time.
    """

    seconds: float = attrs.field()

    @seconds.validator
    def _check(self, field: attrs.Attribute[float], value: object) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            raise ConfigError(f"MaxWait: seconds must be a number >= 0, got {value!r}")

    def due(self, state: Any, view: SchedulerView) -> float:
        """Return the oldest arrival plus the wait; ``-inf`` while draining. O(1)."""
        return -math.inf if view.draining else view.oldest_arrival_at + self.seconds


@attrs.frozen
class PoissonTimeout(Timeout):
    """Start after the shortest timer that is stable under Poisson arrivals.

    The timer starts with the oldest waiting request. Combine with a fill:
    ``Fill(8) | PoissonTimeout(rate=0.641, service_s=8.74, batch_size=8)``.

    Args:
        rate: Arrival rate, requests per second, > 0.
        service_s: Mean service time of a batch, seconds, > 0.
        batch_size: Fill cap, >= 1; used by ``capped``.
        rule: ``paper``: the published ``S - 1/rate``; ``capped``: with the fill cap, never
            shorter, and ``inf`` where no timer is stable.

    Source:
        arXiv 2608.23807 (``paper``); own derivation (``capped``); both in ``theory.batching``.
    """

    rate: float
    service_s: float
    batch_size: int = attrs.field(validator=at_least_one)
    rule: Literal["paper", "capped"] = attrs.field(default="capped")
    timeout_s: float = attrs.field(init=False)  #: the timer, seconds

    @rule.validator
    def _check_rule(self, field: attrs.Attribute[str], value: object) -> None:
        if value not in ("paper", "capped"):
            raise ConfigError(f"PoissonTimeout: rule must be 'paper' or 'capped', got {value!r}")

    @timeout_s.default
    def _timeout(self) -> float:
        if self.rule == "paper":
            return paper_timeout(self.rate, self.service_s)
        return capped_timeout(self.rate, self.service_s, self.batch_size)

    def due(self, state: Any, view: SchedulerView) -> float:
        """Return the oldest arrival plus the timer; ``-inf`` while draining. O(1)."""
        return -math.inf if view.draining else view.oldest_arrival_at + self.timeout_s
