"""Checks on what an engine reports of a step, made before any of it is carried out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dllm_sched.batch import (
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

_COLUMN = (tuple, list)
_CONTENTS: dict[type[Any], type[Any]] = {  # what the second field of each must be
    RowFinished: FinishReason,
    BlockBoundary: int,
    PhaseChange: Phase,
    RowFailed: BaseException,
}

InBatch = Callable[[object, str], RequestView]
"""(slot, what for) -> the request in that slot of the batch, or OutcomeError."""
End = tuple[RequestView, FinishReason, Any]
"""(request, why, output) of a row that finished."""
Crossing = tuple[RequestView, int, int]
"""(request, blocks done, KV tokens) of a block boundary."""


Named = tuple[
    Sequence[End],
    Sequence[Crossing],
    Sequence[tuple[RequestView, Any]],
    Sequence[tuple[RequestView, Any]],
]
"""Whom an outcome names: ends, crossings, (request, phase) and (request, error), in order."""


def check_outcome(
    batch: StepBatch,
    outcome: StepOutcome,
    slots: Sequence[RequestView | None],
    clock: object,
    in_batch: InBatch,
    *,
    needs_progress: bool,
) -> Named:
    """Refuse an outcome that cannot be. O(what it names); O(rows) with ``masked_remaining``.

    Args:
        batch: The batch in flight.
        outcome: What the engine says.
        slots: Who has each slot, where whoever follows ``clock`` is in the batch; else nobody.
        clock: The clock of the rows that step.
        in_batch: Finds, or refuses, whoever cannot be told from ``slots``.
        needs_progress: Whether ``masked_remaining`` must be there.

    Raises:
        OutcomeError: If it names a row that is not in the batch, a row twice in one column, one
            both finished and failed, impossible progress, or values of another type; or if the
            policy needs progress and there is none.
    """
    if type(outcome) is not StepOutcome and not isinstance(outcome, StepOutcome):
        raise OutcomeError(f"complete_step: expected a StepOutcome, got {outcome!r}")
    finished, boundaries, phases, failed, remaining = outcome
    ends = _check_finished(finished, slots, clock, in_batch) if finished else ()
    failures = _check_column("failed", failed, RowFailed, slots, clock, in_batch) if failed else ()
    if failed and finished:
        twice = {one.slot for one in finished} & {one.slot for one in failed}
        if twice:
            raise OutcomeError(f"outcome: slots {sorted(twice)} both finished and failed")
    changes = _check_column("phases", phases, PhaseChange, slots, clock, in_batch) if phases else ()
    crossings = _check_boundaries(boundaries, slots, clock, in_batch) if boundaries else ()
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
    return ends, crossings, changes, failures


def _check_column(
    name: str,
    column: Any,
    kind: type[Any],
    slots: Sequence[RequestView | None],
    clock: object,
    in_batch: InBatch,
) -> list[tuple[RequestView, Any]]:
    if not isinstance(column, _COLUMN):
        raise OutcomeError(f"{name}: expected a tuple of {kind.__name__} values, got {column!r}")
    content, num_slots = _CONTENTS[kind], len(slots)
    named: list[tuple[RequestView, Any]] = []
    for one in column:
        if type(one) is not kind and not isinstance(one, kind):
            raise OutcomeError(f"{name}: expected {kind.__name__} values, got {one!r}")
        slot, what = one[0], one[1]
        view = slots[slot] if type(slot) is int and 0 <= slot < num_slots else None
        if view is None or view._cohort is None or view._cohort.clock is not clock:
            view = in_batch(slot, name)
        if type(what) is not content and not isinstance(what, content):
            raise OutcomeError(
                f"{name}: slot {slot} ({view.request.id!r}): {kind._fields[1]} must be a "
                f"{content.__name__}, got {what!r}"
            )
        named.append((view, what))
    if len(named) > 1:
        _refuse_twice(name, [view for view, _ in named])
    return named


def _refuse_twice(name: str, views: list[RequestView]) -> None:
    if len(set(views)) < len(views):
        view = next(view for view in views if views.count(view) > 1)
        raise OutcomeError(f"{name}: slot {view.slot} ({view.request.id!r}) is named twice")


def _check_finished(
    column: Any, slots: Sequence[RequestView | None], clock: object, in_batch: InBatch
) -> list[End]:
    """``_check_column`` in one pass; what cannot be told at sight goes there."""
    ends: list[End] = []
    try:
        for one in column if type(column) is tuple else (None,):
            slot, reason, output = one
            view: Any = slots[slot]
            if (
                type(one) is not RowFinished
                or type(slot) is not int
                or type(reason) is not FinishReason
                or view._cohort.clock is not clock
                or slot < 0
            ):
                break
            ends.append((view, reason, output))
        else:
            if len(ends) == 1 or len({end[0] for end in ends}) == len(ends):
                return ends
    except (AttributeError, LookupError, TypeError, ValueError):
        pass  # it names nobody, or is no row at all
    named = _check_column("finished", column, RowFinished, slots, clock, in_batch)
    return [(view, why, one[2]) for (view, why), one in zip(named, column, strict=True)]


def _check_boundaries(
    column: Any, slots: Sequence[RequestView | None], clock: object, in_batch: InBatch
) -> list[Crossing]:
    """The same for boundaries."""
    crossings: list[Crossing] = []
    try:
        for one in column if type(column) is tuple else (None,):
            slot, blocks, tokens = one
            view: Any = slots[slot]
            if (
                type(one) is not BlockBoundary
                or type(slot) is not int
                or type(blocks + tokens) is not int
                or view._cohort.clock is not clock
                or slot < 0
                or blocks < view._num_blocks_done
                or blocks > view._max_blocks
                or tokens < view._kv_tokens
                or tokens > view._max_total_tokens
            ):
                break
            crossings.append((view, blocks, tokens))
        else:
            if len(crossings) == 1 or len({one[0] for one in crossings}) == len(crossings):
                return crossings
    except (AttributeError, LookupError, TypeError, ValueError):
        pass
    named = _check_column("boundaries", column, BlockBoundary, slots, clock, in_batch)
    for (view, _), boundary in zip(named, column, strict=True):
        _check_boundary(boundary, view)
    return [(view, blocks, one[2]) for (view, blocks), one in zip(named, column, strict=True)]


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
