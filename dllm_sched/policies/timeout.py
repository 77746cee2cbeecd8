"""When a partly filled batch stops waiting. Asked per batch_key while the engine is idle."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import attrs

from dllm_sched.capacity import Capacity, within_slots
from dllm_sched.errors import ConfigError
from dllm_sched.policies.base import Timeout
from dllm_sched.policies.rates import EmaRate, LearnedService, Rate, Service, rate_of, service_of
from dllm_sched.theory._check import is_number, positive
from dllm_sched.theory.batching import capped_timeout, paper_timeout
from dllm_sched.view import SchedulerView

__all__ = ["Fill", "FluidFill", "LearnedTimeout", "MaxWait", "PoissonTimeout"]


@attrs.frozen
class Fill(Timeout):
    """Start once ``count`` requests wait (or as many as there are free slots).

    Alone it never starts a smaller batch except while draining; combine it with a timer:
    ``Fill(16) | MaxWait(0.12)``.

    Args:
        count: Requests of one batch_key, >= 1 and at most ``max_num_seqs`` when the scheduler is
            built.
    """

    count: int = attrs.field(validator=within_slots)

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
        if not is_number(value) or not value >= 0:  # type: ignore[operator]
            raise ConfigError(f"MaxWait: seconds must be a number >= 0, got {value!r}")

    def due(self, state: Any, view: SchedulerView) -> float:
        """Return the oldest arrival plus the wait; ``-inf`` while draining. O(1)."""
        return -math.inf if view.draining else view.oldest_arrival_at + self.seconds


def _rule(instance: object, _field: attrs.Attribute[str], value: object) -> None:
    if value not in ("paper", "capped"):
        raise ConfigError(
            f"{type(instance).__name__}: rule must be 'paper' or 'capped', got {value!r}"
        )


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
    batch_size: int = attrs.field(validator=within_slots)
    rule: Literal["paper", "capped"] = attrs.field(default="capped", validator=_rule)
    timeout_s: float = attrs.field(init=False)  #: the timer, seconds

    @timeout_s.default
    def _timeout(self) -> float:
        if self.rule == "paper":
            return paper_timeout(self.rate, self.service_s)
        return capped_timeout(self.rate, self.service_s, self.batch_size)

    def due(self, state: Any, view: SchedulerView) -> float:
        """Return the oldest arrival plus the timer; ``-inf`` while draining. O(1)."""
        return -math.inf if view.draining else view.oldest_arrival_at + self.timeout_s


class _Load(NamedTuple):
    """What is known of the arrivals and of the batches: two states."""

    rate: Any
    service: Any


@attrs.frozen
class _Learning(Timeout):
    """A rule of the arrival rate and the service time, each known or learned."""

    batch_size: int = attrs.field(validator=within_slots)
    rate: Rate = attrs.field(factory=EmaRate, converter=rate_of, kw_only=True)
    service: Service = attrs.field(factory=LearnedService, converter=service_of, kw_only=True)

    @property
    def observes(self) -> tuple[type[Any], ...]:  # type: ignore[override]
        """What either learner wants to see."""
        return (*self.rate.observes, *self.service.observes)

    def init(self) -> _Load:
        """Nothing learned yet."""
        return _Load(self.rate.init(), self.service.init())

    def observe(self, state: Any, event: Any) -> Any:
        """Learn."""
        return _Load(
            self.rate.observe(state.rate, event), self.service.observe(state.service, event)
        )

    def _full(self, view: SchedulerView) -> bool:
        """Whether a batch that waits longer could not get larger."""
        return view.num_waiting >= min(self.batch_size, max(1, view.free_slots))

    def validate(self, capacity: Capacity) -> None:
        """Refuse a batch that the capacity can never hold."""
        if self.batch_size > capacity.max_num_seqs:
            raise ConfigError(
                f"{type(self).__name__}({self.batch_size}): the capacity has only "
                f"{capacity.max_num_seqs} slots; raise max_num_seqs or lower the batch size"
            )


@attrs.frozen
class LearnedTimeout(_Learning):
    """``PoissonTimeout`` with what it needs known or learned while serving.

    Combine with a fill: ``Fill(8) | LearnedTimeout(8)``. Until rate and service time are known a
    batch starts at once. The timer is never longer than ``most_services`` service times of a full
    batch: the bound for the capped rule, which has no timer that is stable when the load nears full
    batches. Meant for one batch_key: the rate is that of all arrivals.

    Args:
        batch_size: Fill cap, >= 1 and at most ``max_num_seqs`` when the scheduler is built.
        rate: Arrivals per second, > 0; or who learns them: a name of ``RATES`` or a ``Rate``.
        service: Seconds of a batch, > 0; a function of its rows; None: learned; or a ``Service``.
        rule: ``paper`` or ``capped``, as of ``PoissonTimeout``.
        most_services: > 0.

    Source:
        As ``PoissonTimeout``; learning and the bound are our own.
    """

    rule: Literal["paper", "capped"] = attrs.field(default="capped", validator=_rule, kw_only=True)
    most_services: float = attrs.field(default=2.0, kw_only=True)

    @most_services.validator
    def _check(self, field: attrs.Attribute[float], value: object) -> None:
        positive(most_services=value)

    def due(self, state: Any, view: SchedulerView) -> float:
        """Return the oldest arrival plus the timer; ``-inf`` while draining. O(batch_size)."""
        if view.draining:
            return -math.inf
        rate = self.rate.rate(state.rate)
        seconds = self.service.seconds(state.service, self.batch_size)
        if not rate or not seconds:
            return -math.inf
        timer = (
            paper_timeout(rate, seconds)
            if self.rule == "paper"
            else capped_timeout(rate, seconds, self.batch_size)
        )
        return view.oldest_arrival_at + min(timer, self.most_services * seconds)


@attrs.frozen
class FluidFill(_Learning):
    """Start an idle engine once one more request would not be worth its wait.

    With n waiting: start if ``n + 1 >= rate * S(n)``, or if a batch is full; else wait. One more
    mean gap costs the waiting ones n / rate together; to start now costs the next arrival
    S(n) - 1 / rate. No timer is needed for stability, since nothing is ever started while the
    engine is busy; only so that nothing waits for ever if arrivals cease, the oldest request waits
    no longer than a full batch takes. Until rate and service time are known a batch starts at once.
    Meant for one batch_key: the rate is that of all arrivals.

    Args:
        batch_size: Fill cap, >= 1 and at most ``max_num_seqs`` when the scheduler is built.
        rate: Arrivals per second, > 0; or who learns them: a name of ``RATES`` or a ``Rate``.
        service: Seconds of a batch, > 0; a function of its rows; None: learned; or a ``Service``.

    Source:
        Own derivation. It is no rule of "Serving Masked Diffusion LLMs" (arXiv 2608.23807).
    """

    def due(self, state: Any, view: SchedulerView) -> float:
        """Return ``-inf`` if it pays to start, else the bound. O(1)."""
        if view.draining or self._full(view):
            return -math.inf
        rate = self.rate.rate(state.rate)
        seconds = self.service.seconds(state.service, view.num_waiting)
        longest = self.service.seconds(state.service, self.batch_size)
        if rate is None or not seconds or not longest or view.num_waiting + 1 >= rate * seconds:
            return -math.inf
        return view.oldest_arrival_at + longest
