"""Shortest job first by predicted work, with ageing; and where the prediction comes from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import attrs

from dllm_sched.errors import ConfigError
from dllm_sched.policies.base import Ordering
from dllm_sched.request import Phase, Request, RequestView
from dllm_sched.theory._check import is_number, positive
from dllm_sched.theory.surface import StepCosts, Surface

__all__ = [
    "AgedShortestFirst",
    "BudgetCost",
    "ConstantCost",
    "CostPredictor",
    "PayloadCost",
    "SurfaceCost",
]


class CostPredictor(Protocol):
    """Predicts the work of a request: a pure function of it, in any unit.

    A prediction that is made elsewhere, in a model of its own, travels with the request (in its
    payload or a subclass) and is only read here: the scheduler waits for nobody. One unit for all
    requests of a scheduler, on the scale of ``AgedShortestFirst``'s placeholder.
    """

    def cost(self, request: Request, *, prefilled: bool) -> float | None:
        """Return the work, > 0; None: not known (yet).

        Args:
            request: The request.
            prefilled: Its prompt is in the cache already, so it costs no more.
        """


@attrs.frozen
class ConstantCost:
    """The same for all: the order becomes that of arrival.

    Args:
        work: > 0.
    """

    work: float = 1024.0

    def __attrs_post_init__(self) -> None:
        positive(work=self.work)

    def cost(self, request: Request, *, prefilled: bool) -> float:
        """Return the constant. O(1)."""
        return self.work


@attrs.frozen
class BudgetCost:
    """``max_new_tokens``: what the client allows is all that is known without a predictor."""

    def cost(self, request: Request, *, prefilled: bool) -> float:
        """Return the budget, tokens. O(1)."""
        return request.max_new_tokens


@attrs.frozen
class PayloadCost:
    """What the payload says; None if it says nothing.

    With ``num_steps`` and the simulator's payload (``sim.shapes.Work``) this is the oracle; with a
    field of your own it is wherever you write a prediction.

    Args:
        field: An attribute of ``Request.payload``.
    """

    field: str = "num_steps"

    def cost(self, request: Request, *, prefilled: bool) -> float | None:
        """Return the attribute. O(1)."""
        value: float | None = getattr(request.payload, self.field, None)
        return value


@attrs.frozen
class SurfaceCost:
    """The normalised work of a request's denoising surface.

    Args:
        surface: Returns a request's surface, or None if there is none (yet).
        costs: The machine.

    Source:
        "DWS / Denoising Surface" (arXiv 2610.00499).
    """

    surface: Callable[[Request], Surface | None]
    costs: StepCosts

    def cost(self, request: Request, *, prefilled: bool) -> float | None:
        """Return the work in refreshes. O(entries of the surface)."""
        surface = self.surface(request)
        if surface is None:
            return None
        return self.costs.work(surface.cost_ms(request.prompt_len, self.costs, prefilled=prefilled))


@attrs.frozen
class AgedShortestFirst(Ordering):
    """The least predicted work goes first; what waits counts for less and less.

    The key is ``theory.surface.log_key``: it stays the same while a request waits, so that the
    queue stays O(log n), and it is never further from the published order, which takes
    ``rate`` off at every full period, than one factor ``1 - rate``. Nobody starves: a request that
    is k times as long yields to those that come within ``period * log(k) / |log(1 - rate)|``
    seconds after it, and to nobody later.

    A prediction is asked for when a request is queued (again). A missing one (None) counts as
    ``placeholder``; a predictor that raises, or answers no finite number > 0, as one of
    ``prompt_len``: nobody waits for a prediction. When one comes late,
    ``scheduler.requeue(request_id, now=now)`` has it counted. A row that comes back with its
    prompt in the cache ranks without its prefill.

    Args:
        predictor: Predicts the work.
        rate: Share of the work taken off per period of waiting, >= 0 and < 1; 0: no ageing, and
            long requests may starve.
        period_s: Seconds, > 0.
        placeholder: The work of a request without a prediction, > 0.

    Source:
        "DWS / Denoising Surface" (arXiv 2610.00499) with its authors' public code: the rule, its
        parameters and both fallbacks. The static key is our own derivation.
    """

    predictor: CostPredictor = attrs.field(factory=BudgetCost)
    rate: float = 0.1
    period_s: float = 30.0
    placeholder: float = 1024.0
    _decay: float = attrs.field(init=False, repr=False, eq=False)  # of the log, per period

    def __attrs_post_init__(self) -> None:
        if isinstance(self.predictor, type) or not callable(getattr(self.predictor, "cost", None)):
            raise ConfigError(
                "AgedShortestFirst: predictor must have a method cost(request, *, prefilled), such "
                f"as BudgetCost() has, got {self.predictor!r}"
            )
        if not is_number(self.rate) or not 0 <= self.rate < 1:
            raise ConfigError(f"AgedShortestFirst: rate must be >= 0 and < 1, got {self.rate!r}")
        positive(period_s=self.period_s, placeholder=self.placeholder)
        object.__setattr__(self, "_decay", -math.log1p(-self.rate))

    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        """Return the log of the work, later the later it came. O(1) beside the predictor."""
        return (math.log(self._work(rv)) + self._decay * rv.arrived_at / self.period_s,)

    def _work(self, rv: RequestView) -> float:
        request = rv.request
        try:
            work = self.predictor.cost(request, prefilled=rv.phase is not Phase.PREFILL)
        except Exception:  # noqa: BLE001  # whatever a model raises: the request must not be stuck
            return request.prompt_len
        if work is None:
            return self.placeholder
        return work if is_number(work) and 0 < work < math.inf else request.prompt_len
