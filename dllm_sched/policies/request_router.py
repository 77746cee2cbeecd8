"""One mode per request, chosen once from cheap features: which of its ways an engine serves it."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from dllm_sched.batch import Knobs
from dllm_sched.errors import ConfigError, PolicyError
from dllm_sched.policies.base import Control
from dllm_sched.request import Request, RequestView
from dllm_sched.theory._check import items, whole
from dllm_sched.view import SchedulerView

__all__ = ["ByLength", "ChooseMode"]


def _names(values: Iterable[str]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else items("modes", values)


def _numbers(values: Iterable[int]) -> tuple[int, ...]:
    return items("bounds", values)


@attrs.frozen
class ChooseMode(Control):
    """Give each row the knob ``mode``: what ``choose_mode`` says of its request.

    The choice is a pure function of the request, so it is the same each time a row joins. An engine
    that cannot mix modes in one forward wants them as ``Request.batch_key`` instead.

    O(modes) beside ``choose_mode``, which is asked once per join and must be cheap: it runs between
    two steps.

    Args:
        modes: What the engine knows, at least one name, each once.
        choose_mode: Returns one of them for a request.

    Raises:
        PolicyError: From the scheduler's call in which a row joins, if ``choose_mode`` answers
            something that is not declared; names it and the request. Nothing has changed then.

    Source:
        "RequestRouter" (arXiv 2605.23057): one fixed mode per request (precision, speculation,
        caching) from cheap features. Its rule table is not public.
    """

    modes: tuple[str, ...] = attrs.field(converter=_names)
    choose_mode: Callable[[Request], str]

    def __attrs_post_init__(self) -> None:
        for mode in self.modes:
            if not isinstance(mode, str) or not mode:
                raise ConfigError(f"ChooseMode: a mode is a non-empty str, got {mode!r}")
        if not self.modes or len(set(self.modes)) < len(self.modes):
            raise ConfigError(f"ChooseMode: modes must be different, at least one: {self.modes!r}")
        if not callable(self.choose_mode):
            raise ConfigError(
                f"ChooseMode: choose_mode must be callable with a request, got {self.choose_mode!r}"
            )

    def knobs(self, state: Any, rv: RequestView, view: SchedulerView) -> tuple[Knobs, float]:
        """Return ``{"mode": ...}``, for good."""
        mode = self.choose_mode(rv.request)
        if mode not in self.modes:
            raise PolicyError(
                f"choose_mode answered {mode!r} for request {rv.id!r}, which is none of the "
                f"declared modes {list(self.modes)}; declare it, or mend choose_mode"
            )
        return {"mode": mode}, math.inf


@attrs.frozen
class ByLength:
    """A ``choose_mode`` by what a request may grow to: prompt and budget together.

    Args:
        modes: One more than ``bounds``; the first for the shortest requests.
        bounds: Ascending, tokens, >= 1: the most that each mode but the last one takes.

    Source:
        Own derivation.
    """

    modes: tuple[str, ...] = attrs.field(converter=_names)
    bounds: tuple[int, ...] = attrs.field(converter=_numbers)

    def __attrs_post_init__(self) -> None:
        for bound in self.bounds:
            whole(**{"ByLength: a bound": bound})
        if any(after <= before for before, after in itertools.pairwise(self.bounds)):
            raise ConfigError(f"ByLength: bounds must be strictly ascending: {self.bounds!r}")
        if len(self.modes) != len(self.bounds) + 1:
            raise ConfigError(
                f"ByLength: one mode more than bounds, got {self.modes!r} and {self.bounds!r}"
            )

    def __call__(self, request: Request) -> str:
        """Return the mode. O(log modes)."""
        return self.modes[bisect_left(self.bounds, request.max_total_tokens)]
