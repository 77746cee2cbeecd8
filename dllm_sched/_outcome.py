"""Checks on what an engine reports of a step, made before any of it is carried out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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

__all__ = ["Named", "check_outcome"]

_new = tuple.__new__  # builds a NamedTuple in half the time of its own constructor
_NONE: Sequence[tuple[RequestView, Any]] = ()
_COLUMN = (tuple, list)

InBatch = Callable[[object, str], RequestView]
"""(slot, what for) -> the request in that slot of the batch, or OutcomeError."""


class Named(NamedTuple):
    """Whom an outcome names: (request, what of it) in each column, in order."""

    finished: Sequence[tuple[RequestView, RowFinished]]
    boundaries: Sequence[tuple[RequestView, BlockBoundary]]
    phases: Sequence[tuple[RequestView, PhaseChange]]
    failed: Sequence[tuple[RequestView, RowFailed]]


def check_outcome(
    batch: StepBatch, outcome: StepOutcome, in_batch: InBatch, *, needs_progress: bool
) -> Named:
    """Refuse an outcome that cannot be. O(what it names); O(rows) with ``masked_remaining``.

    Raises:
        OutcomeError: If it names a row that is not in the batch, a row twice in one column, one
            both finished and failed, impossible progress, or values of another type; or if the
            policy needs progress and there is none.
    """
    finished = boundaries = phases = failed = _NONE
    if outcome is not NOTHING:
        if not isinstance(outcome, StepOutcome):
            raise OutcomeError(f"complete_step: expected a StepOutcome, got {outcome!r}")
        if outcome.finished:
            finished = _check_column(
                "finished", outcome.finished, RowFinished, FinishReason, in_batch
            )
        if outcome.failed:
            failed = _check_column("failed", outcome.failed, RowFailed, BaseException, in_batch)
            ended = {one.slot for one in outcome.finished or ()}
            twice = ended & {one.slot for one in outcome.failed}
            if twice:
                raise OutcomeError(f"outcome: slots {sorted(twice)} both finished and failed")
        if outcome.phases:
            phases = _check_column("phases", outcome.phases, PhaseChange, Phase, in_batch)
        if outcome.boundaries:
            boundaries = _check_column(
                "boundaries", outcome.boundaries, BlockBoundary, int, in_batch
            )
            for view, boundary in boundaries:
                _check_boundary(boundary, view)
    remaining = outcome.masked_remaining
    if remaining is None:
        if needs_progress:
            raise OutcomeError(
                "complete_step: the policy needs masked_remaining, one count per row of step "
                f"{batch.step_id}; got none"
            )
    elif (
        not isinstance(remaining, _COLUMN)
        or len(remaining) != len(batch.rows)
        or not all(isinstance(count, int) and count >= 0 for count in remaining)
    ):
        raise OutcomeError(
            f"masked_remaining: expected {len(batch.rows)} counts >= 0 (one per row of step "
            f"{batch.step_id}), got {remaining!r}"
        )
    named: Named = _new(Named, (finished, boundaries, phases, failed))
    return named


def _check_column(
    name: str, column: Any, kind: type[Any], content: type[Any], in_batch: InBatch
) -> Sequence[tuple[RequestView, Any]]:
    if not isinstance(column, _COLUMN):
        raise OutcomeError(f"{name}: expected a tuple of {kind.__name__} values, got {column!r}")
    named = []
    for one in column:
        if type(one) is not kind and not isinstance(one, kind):
            raise OutcomeError(f"{name}: expected {kind.__name__} values, got {one!r}")
        view = in_batch(one[0], name)
        if type(one[1]) is not content and not isinstance(one[1], content):
            raise OutcomeError(
                f"{name}: slot {one[0]} ({view.request.id!r}): {kind._fields[1]} must be a "
                f"{content.__name__}, got {one[1]!r}"
            )
        named.append((view, one))
    if len(named) > 1:
        views = [view for view, _ in named]
        if len(set(views)) < len(views):
            view = next(view for view in views if views.count(view) > 1)
            raise OutcomeError(f"{name}: slot {view.slot} ({view.request.id!r}) is named twice")
    return named


def _check_boundary(boundary: BlockBoundary, view: RequestView) -> None:
    slot, blocks, tokens = boundary
    request = view.request
    if not isinstance(tokens, int):
        wrong = f"kv_tokens must be an int, got {tokens!r}"
    elif not view._num_blocks_done <= blocks <= request.max_blocks:
        wrong = (
            f"num_blocks_done {blocks} is not between the {view._num_blocks_done} reported before "
            f"and its {request.max_blocks} blocks"
        )
    elif not view._kv_tokens <= tokens <= request.max_total_tokens:
        wrong = (
            f"kv_tokens {tokens} is not between the {view._kv_tokens} reported before and its "
            f"{request.max_total_tokens} tokens"
        )
    else:
        return
    raise OutcomeError(f"boundaries: slot {slot} ({request.id!r}): {wrong}")
