"""What the scheduler and an engine say to each other. Plain immutable values, no tensors.

These are ``NamedTuple``s because one is built per step or per change: a third of the cost of a
frozen class.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dllm_sched.request import FinishReason, Phase, Request

__all__ = [
    "NOTHING",
    "NO_KNOBS",
    "Accepted",
    "BlockBoundary",
    "Finished",
    "Knobs",
    "PhaseChange",
    "Rejected",
    "Released",
    "Row",
    "RowFailed",
    "RowFate",
    "RowFinished",
    "StepBatch",
    "StepOutcome",
    "Update",
]

Knobs = Mapping[str, Any]
"""Per-row (or per-batch) settings that a control strategy hands to the engine, by name."""


class _NoKnobs(Mapping[str, Any]):
    """Nothing; one and the same also in another process, for batches are sent there."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "NO_KNOBS"

    __reduce__ = __repr__


NO_KNOBS: Knobs = _NoKnobs()


class Row(NamedTuple):
    """One request's place in a step."""

    slot: int  #: sticky: the same from join to release, 0 <= slot < max_num_seqs
    request: Request
    phase: Phase
    max_tokens: int  #: upper bound of the tokens this row sends through the next forward
    knobs: Knobs = NO_KNOBS
    resumed: bool = False  #: joined with the progress it had when it was preempted


class StepBatch(NamedTuple):
    """The rows that share one denoising step.

    ``rows`` is the very same tuple object as in the step before when nothing changed.
    """

    step_id: int
    planned_at: float  #: seconds, the ``now`` of the call that planned it
    rows: tuple[Row, ...]
    joined: tuple[Row, ...] = ()  #: the rows that are new in their slot with this step
    knobs: Knobs = NO_KNOBS  #: for the whole batch
    hints: tuple[Any, ...] = ()  #: advice the engine may ignore (e.g. what to prefetch)


class RowFinished(NamedTuple):
    """This row is done; ``output`` is passed through to ``Finished.output`` unread."""

    slot: int
    reason: FinishReason
    output: Any = None


class BlockBoundary(NamedTuple):
    """This row has completed blocks. Absolute counts, never less than reported before."""

    slot: int
    num_blocks_done: int
    kv_tokens: int  #: tokens of this row in the KV cache once the coming step has run


class PhaseChange(NamedTuple):
    """This row's next forward is of another kind."""

    slot: int
    phase: Phase


class RowFailed(NamedTuple):
    """This row failed alone (NaN logits, bad input); its neighbours did not."""

    slot: int
    error: BaseException


class RowFate(enum.Enum):
    """What ``fail_step`` does with a row of the failed step."""

    FAIL = "fail"  #: it ends with the step's error
    RESTART = "restart"  #: it waits again, from nothing
    KEEP = "keep"  #: it stays in its slot as it was before the step


class StepOutcome(NamedTuple):
    """Only what happened in a step. A row of the batch that is not named advanced one step."""

    finished: tuple[RowFinished, ...] = ()
    boundaries: tuple[BlockBoundary, ...] = ()
    phases: tuple[PhaseChange, ...] = ()
    failed: tuple[RowFailed, ...] = ()
    masked_remaining: tuple[int, ...] | None = None
    """One count per row of the batch, in its order; only for policies that need progress."""


NOTHING = StepOutcome()
"""The outcome of a step after which every row simply goes on."""


class Finished(NamedTuple):
    """The end of a request; told exactly once."""

    request: Request
    reason: FinishReason
    arrived_at: float  #: seconds
    admitted_at: float | None  #: seconds, first admission; None if it never ran
    finished_at: float  #: seconds
    num_steps: int  #: denoising steps it took part in, since its last restart
    num_blocks_done: int
    output: Any = None  #: what the engine attached when it reported the finish
    error: BaseException | None = None


class Released(NamedTuple):
    """A slot came back; told exactly once per slot given.

    With ``slot`` None: a request that was preempted with its progress kept will not resume it
    (it ended while it waited, or starts over); what the engine put aside for it can go. It also can
    with any release that is not ``kept``: a step that was to resume the row may never have run.
    """

    slot: int | None
    request: Request
    reason: FinishReason | None  #: why the request ended, or None: it was preempted
    kept: bool = False  #: preempted with progress kept: the engine must be able to resume it


class Update(NamedTuple):
    """What one call brought about."""

    batch: StepBatch | None = None
    finished: tuple[Finished, ...] = ()
    released: tuple[Released, ...] = ()
    wake_at: float = float("-inf")
    """The earliest instant at which anything changes without input: a value up to ``now`` means
    call ``next_step`` at once, ``inf`` that only input helps."""


class Accepted(NamedTuple):
    """The request waits now."""

    request_id: str


class Rejected(NamedTuple):
    """The request was not taken; a load condition, not an error."""

    request_id: str
    reason: str  #: ``queue_full``, ``too_large``, ``draining``, or a policy's own word
    retry_after_s: float | None = None  #: seconds, where a guess is possible
