"""Who may join the next step. Slots and memory are the scheduler's own check, made before these."""

from __future__ import annotations

import math
from typing import Any

import attrs

from dllm_sched.capacity import Capacity, at_least_one, within_slots
from dllm_sched.errors import ConfigError
from dllm_sched.policies.base import Admission, Verdict
from dllm_sched.request import RequestView
from dllm_sched.view import Round, SchedulerView

__all__ = [
    "AtBatchBoundary",
    "AtBlockBoundary",
    "MaxWaiting",
    "NotAfterPreemption",
    "Slots",
    "TokenBudget",
]

_ADMIT, _STOP = Verdict.ADMIT, Verdict.STOP


@attrs.frozen
class Slots(Admission):
    """At most ``count`` rows at a time, whatever the capacity has.

    Args:
        count: Rows, >= 1 and at most ``max_num_seqs`` when the scheduler is built.
    """

    count: int = attrs.field(validator=within_slots)

    @property
    def max_rows(self) -> float:  # type: ignore[override]
        """``count``: the scheduler keeps to it unasked."""
        return self.count

    def asks(self, hook: str) -> bool:
        """Not for ``admit``, unless as a part of ``|``: ``max_rows`` says the same."""
        return hook != "admit" and super().asks(hook)

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        """Admit while running and joined rows are fewer than ``count``. O(1)."""
        return _ADMIT if round.view.num_running + round.num_joined < self.count else _STOP

    def validate(self, capacity: Capacity) -> None:
        """Refuse a count that the capacity can never reach."""
        if self.count > capacity.max_num_seqs:
            raise ConfigError(
                f"Slots({self.count}): the capacity has only {capacity.max_num_seqs} slots; raise "
                "max_num_seqs or lower the count"
            )


@attrs.frozen
class MaxWaiting(Admission):
    """Refuse a request (``Rejected("queue_full")``) when ``count`` already wait.

    Args:
        count: Waiting requests, >= 1.
    """

    count: int = attrs.field(validator=at_least_one)

    def accept(self, state: Any, rv: RequestView, view: SchedulerView) -> str | None:
        """Return ``queue_full`` when the queue is. O(1)."""
        return "queue_full" if view.num_waiting >= self.count else None


@attrs.frozen
class TokenBudget(Admission):
    """Keep the tokens of a step within a budget: the sum of the rows' ``max_tokens``.

    A request too large for the budget on its own runs alone.

    Args:
        tokens: Tokens in one forward, >= 1.

    Source:
        The usual ``max_num_batched_tokens`` of serving engines; the bound per row is
        ``Capacity.max_tokens``.
    """

    tokens: int = attrs.field(validator=at_least_one)

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        """Admit while the budget holds the row, or if nobody else is in. O(1)."""
        view = round.view
        total = view.tokens_in_rows + round.joined_tokens + rv.max_tokens
        alone = view.num_running + round.num_joined == 0
        return _ADMIT if total <= self.tokens or alone else _STOP


@attrs.frozen
class NotAfterPreemption(Admission):
    """Let nobody join in a round in which rows were sent back: their room is not for others.

    Source:
        vLLM (Kwon et al., SOSP 2023), whose scheduler admits nobody in an iteration that preempts.
    """

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        """Admit unless rows were sent back since the last round and others run on. O(1)."""
        return _STOP if round.num_preempted and round.view.num_running else _ADMIT

    def recheck(self, state: Any, round: Round) -> float:
        """Return 1 if it has just held somebody back."""
        return 1 if round.num_preempted and round.view.num_running else math.inf


@attrs.frozen
class AtBatchBoundary(Admission):
    """Fill only an empty engine: a batch runs until its last row has ended.

    Source:
        Synchronised batching as in "Serving Masked Diffusion LLMs" (arXiv 2608.23807).
    """

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        """Admit if no row was running when the round began. O(1)."""
        return _ADMIT if round.view.num_running == 0 else _STOP


@attrs.frozen
class AtBlockBoundary(Admission):
    """Refill only at steps after which a row crossed a block boundary or left.

    Source:
        The block-grained cycle of BlockServe (arXiv 2607.08930), from its abstract and
        second-hand notes; the rule for rows at different blocks is our own derivation.
    """

    needs = frozenset({"blocks"})

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        """Admit if the engine is empty or somebody is at a boundary. O(1)."""
        if round.view.num_running == 0 or round.boundaries or round.num_retired:
            return _ADMIT
        return _STOP
