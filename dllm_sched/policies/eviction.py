"""Who leaves before being done."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs

from dllm_sched.capacity import at_least_one
from dllm_sched.policies.base import KEEP, RESTART, Eviction, Victim
from dllm_sched.request import RequestView
from dllm_sched.view import Round

__all__ = ["PastDeadline", "StepCap", "YoungestFirst"]


@attrs.frozen
class PastDeadline(Eviction):
    """A running row ends (``deadline``) once its request's ``deadline_at`` has passed.

    Waiting requests expire by themselves, with or without this.
    """

    def limits(self, rv: RequestView) -> tuple[float, float]:
        """Return the request's own deadline. O(1)."""
        return (rv.request.deadline_at, math.inf)


@attrs.frozen
class StepCap(Eviction):
    """A row ends (``max_steps``) after ``steps`` denoising steps.

    For workloads in which a few rows hit the engine's own cap and eat a large share of all steps.

    Args:
        steps: >= 1.
    """

    steps: int = attrs.field(validator=at_least_one)

    def limits(self, rv: RequestView) -> tuple[float, float]:
        """Return the cap. O(1)."""
        return (math.inf, self.steps)


@attrs.frozen
class YoungestFirst(Eviction):
    """When pages run out, send back the rows admitted last until the others can grow.

    The oldest row is never sent back while another holds pages, so somebody always finishes.

    Args:
        keep: With their progress (the engine must be able to resume them), or from nothing.

    Source:
        Youngest first as in "Service-Induced Congestion" (arXiv 2606.15555), own derivation of the
        page rule.
    """

    keep: bool = False

    def victims(self, state: Any, need_pages: int, round: Round) -> Iterable[Victim]:
        """Name rows, youngest first, as long as pages are lacking. O(1) for each one taken."""
        if need_pages > 0:
            how = KEEP if self.keep else RESTART
            yield from ((rv, how) for rv in round.youngest_first())
