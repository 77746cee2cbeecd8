"""Which of the rows take part in the next step."""

from __future__ import annotations

import attrs

from dllm_sched.policies.base import Composition

__all__ = ["AllRows"]


@attrs.frozen
class AllRows(Composition):
    """Every row steps, whatever its phase: one forward for all."""
