"""The confidence threshold by deadline and by load (TeDiServe)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import attrs

from dllm_sched.batch import NO_KNOBS, Knobs
from dllm_sched.errors import ConfigError
from dllm_sched.events import RequestSubmitted
from dllm_sched.policies.base import Control
from dllm_sched.request import Request, RequestView
from dllm_sched.theory._check import is_number, not_negative, positive
from dllm_sched.theory.ladder import StepLadder
from dllm_sched.theory.thresholds import (
    Grid,
    check_grid,
    threshold_for_deadline,
    threshold_for_load,
)
from dllm_sched.view import SchedulerView

__all__ = ["ConfidenceThreshold"]

_INF = math.inf


class _Load(NamedTuple):
    """Offered steps, each weighted by ``exp(-age / window_s)``."""

    steps: float
    at: float  # the instant they are weighted at


def _ladder_steps(request: Request) -> float:
    return StepLadder(request.block_length).forwards(request.max_blocks)


@attrs.frozen
class ConfidenceThreshold(Control):
    """Each row's highest threshold that meets its deadline, under a cap by the load.

    A row with a deadline gets the row knob ``min(theta, cap)``, theta being the highest of the grid
    at which the steps left, at ``step_s`` each, end before ``deadline_at``. There is no backlog to
    add: the knob is asked when the row has its slot. The batch knob is the cap, and rules every row
    without a deadline. The cap is the highest threshold at which the steps that arrive fit into the
    slots. Neither ever leaves the grid: a row too late, or a load too high, gets its lowest.

    Both are asked again when the estimated load has fallen so far that the cap rises, a row's also
    at each of its block boundaries, with the blocks left. A cap that falls (arrivals) reaches the
    batch knob at the next step, a row with a deadline at its next boundary. O(grid) per question.

    Args:
        grid: ``(threshold, share of the steps)`` pairs, ascending; the last share is 1.
        step_s: Seconds of a step, > 0.
        steps: Request -> steps it takes at the highest threshold, >= 0; default: the step ladder of
            D2F for its whole budget, which is the most it can take.
        demand: Row-steps per second that arrive, at the highest threshold, >= 0; None: estimated
            from what is submitted, over about ``window_s``.
        window_s: Memory of the estimate, seconds, > 0.
        utilisation: Share of the slots that the load may fill, in (0, 1].
        knob: Name of the knob.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        "TeDiServe" (arXiv 2606.29094), two levels: its abstract and second-hand notes; the
        equations and the estimate are our own derivation. Default grid: the two thresholds whose
        steps the notes give.
    """

    needs = frozenset({"blocks"})
    observes = (RequestSubmitted,)

    grid: Grid = attrs.field(default=((0.7, 0.62), (0.9, 1.0)), converter=check_grid)
    step_s: float = attrs.field(default=0.0241, kw_only=True)
    steps: Callable[[Request], float] = attrs.field(default=_ladder_steps, kw_only=True)
    demand: float | None = attrs.field(default=None, kw_only=True)
    window_s: float = attrs.field(default=30.0, kw_only=True)
    utilisation: float = attrs.field(default=1.0, kw_only=True)
    knob: str = attrs.field(default="skip_threshold", kw_only=True)

    def __attrs_post_init__(self) -> None:
        positive(step_s=self.step_s, window_s=self.window_s)
        if self.demand is not None:
            not_negative(demand=self.demand)
        if not is_number(self.utilisation) or not 0 < self.utilisation <= 1:
            raise ConfigError(f"utilisation must lie in (0, 1], got {self.utilisation!r}")
        if not callable(self.steps):
            raise ConfigError(f"steps must be a callable, got {self.steps!r}")
        if not isinstance(self.knob, str) or not self.knob:
            raise ConfigError(f"knob must be a non-empty str, got {self.knob!r}")

    def init(self) -> _Load:
        """Start without any load."""
        return _Load(0.0, 0.0)

    def observe(self, state: _Load, event: RequestSubmitted) -> _Load:
        """Add a submitted request's steps to the load."""
        if self.demand is not None:
            return state
        return _Load(self._fade(state, event.at) + self._steps(event.request), event.at)

    def knobs(self, state: _Load, rv: RequestView, view: SchedulerView) -> tuple[Knobs, float]:
        """Return the row's threshold, if it has a deadline."""
        request = rv.request
        if request.deadline_at == _INF:
            return NO_KNOBS, _INF
        left = max(0.0, 1.0 - rv.num_blocks_done / request.max_blocks)
        theta = threshold_for_deadline(
            self.grid,
            num_steps=self._steps(request) * left,
            step_s=self.step_s,
            slack_s=request.deadline_at - view.now,
        )
        cap, until = self._cap(state, view)
        return ({self.knob: theta}, _INF) if theta <= cap else ({self.knob: cap}, until)

    def batch_knobs(self, state: _Load, view: SchedulerView) -> tuple[Knobs, float]:
        """Return the cap, and when it rises if nobody comes."""
        cap, until = self._cap(state, view)
        return {self.knob: cap}, until

    def _steps(self, request: Request) -> float:
        steps = self.steps(request)
        not_negative(**{f"the steps of request {request.id!r}": steps})
        return steps

    def _fade(self, state: _Load, now: float) -> float:
        return state.steps * math.exp(min(0.0, (state.at - now) / self.window_s))

    def _cap(self, state: _Load, view: SchedulerView) -> tuple[float, float]:
        slots = view.max_num_seqs * self.utilisation
        if self.demand is not None:
            cap = threshold_for_load(
                self.grid, demand=self.demand, step_s=self.step_s, num_slots=slots
            )
            return cap, _INF
        steps = self._fade(state, view.now)
        cap = threshold_for_load(
            self.grid, demand=steps / self.window_s, step_s=self.step_s, num_slots=slots
        )
        above = next((share for threshold, share in self.grid if threshold > cap), None)
        if above is None:
            return cap, _INF
        fits = slots * self.window_s / (above * self.step_s)  # the load at which it may rise
        wait_s = self.window_s * (math.log(steps / fits) + 1e-6)  # the rest is for rounding
        return cap, max(view.now + wait_s, math.nextafter(view.now, _INF))
