"""Checks on what an engine reports of a step, made before any of it is carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dllm_sched.batch import (
    NOTHING,
    BlockBoundary,
    PhaseChange,
    RowFailed,
    RowFinished,
    StepBatch,
    StepOutcome,
)
from dllm_sched.errors import OutcomeError
from dllm_sched.request import FinishReason, Phase, RequestView

__all__ = ["check_outcome"]

InBatch = Callable[[object, str], RequestView]
"""(slot, what for) -> the request in that slot of the batch, or OutcomeError."""


def check_outcome(
    batch: StepBatch, outcome: StepOutcome, in_batch: InBatch, *, needs_progress: bool
) -> None:
    """Refuse an outcome that cannot be. O(what it names); O(rows) with ``masked_remaining``.

    Raises:
        OutcomeError: If it names a row that is not in the batch, a row twice in one column, one
            both finished and failed, impossible progress, or values of another type; or if the
            policy needs progress and there is none.
    """
    if outcome is not NOTHING:
        if not isinstance(outcome, StepOutcome):
            raise OutcomeError(f"complete_step: expected a StepOutcome, got {outcome!r}")
        if outcome.finished:
            _check_column("finished", outcome.finished, RowFinished, FinishReason, in_batch)
        if outcome.failed:
            _check_column("failed", outcome.failed, RowFailed, BaseException, in_batch)
            twice = {one.slot for one in outcome.finished} & {one.slot for one in outcome.failed}
            if twice:
                raise OutcomeError(f"outcome: slots {sorted(twice)} both finished and failed")
        if outcome.phases:
            _check_column("phases", outcome.phases, PhaseChange, Phase, in_batch)
        if outcome.boundaries:
            _check_column("boundaries", outcome.boundaries, BlockBoundary, int, in_batch)
            for boundary in outcome.boundaries:
                _check_boundary(boundary, in_batch(boundary.slot, "boundaries"))
    remaining = outcome.masked_remaining
    if remaining is None:
        if needs_progress:
            raise OutcomeError(
                "complete_step: the policy needs masked_remaining, one count per row of step "
                f"{batch.step_id}; got none"
            )
    elif len(remaining) != len(batch.rows) or not all(
        isinstance(count, int) and count >= 0 for count in remaining
    ):
        raise OutcomeError(
            f"masked_remaining: expected {len(batch.rows)} counts >= 0 (one per row of step "
            f"{batch.step_id}), got {remaining!r}"
        )


def _check_column(
    name: str, column: Any, kind: type[Any], content: type[Any], in_batch: InBatch
) -> None:
    seen: set[int] = set()
    for one in column:
        if not isinstance(one, kind):
            raise OutcomeError(f"{name}: expected {kind.__name__} values, got {one!r}")
        slot = one[0]
        view = in_batch(slot, name)
        if slot in seen:
            raise OutcomeError(f"{name}: slot {slot} ({view.request.id!r}) is named twice")
        seen.add(slot)
        if not isinstance(one[1], content):
            raise OutcomeError(
                f"{name}: slot {slot} ({view.request.id!r}): {kind._fields[1]} must be a "
                f"{content.__name__}, got {one[1]!r}"
            )


def _check_boundary(boundary: BlockBoundary, view: RequestView) -> None:
    slot, blocks, tokens = boundary
    request = view.request
    where = f"boundaries: slot {slot} ({request.id!r})"
    if not isinstance(tokens, int):
        raise OutcomeError(f"{where}: kv_tokens must be an int, got {tokens!r}")
    if not view._num_blocks_done <= blocks <= request.max_blocks:
        raise OutcomeError(
            f"{where}: num_blocks_done {blocks} is not between the {view._num_blocks_done} "
            f"reported before and its {request.max_blocks} blocks"
        )
    if not view._kv_tokens <= tokens <= request.max_total_tokens:
        raise OutcomeError(
            f"{where}: kv_tokens {tokens} is not between the {view._kv_tokens} reported before and "
            f"its {request.max_total_tokens} tokens"
        )
