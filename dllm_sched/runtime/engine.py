"""What a driver asks of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from dllm_sched.batch import Released, StepBatch, StepOutcome

__all__ = ["Engine", "StepFailedError"]


class Engine(Protocol):
    """Runs denoising steps. Called from one thread only.

    ``dllm_sched.testing.check_engine`` checks that an engine keeps to this.
    """

    def run(self, batch: StepBatch) -> StepOutcome:
        """Run one step: place ``batch.joined``, advance ``batch.rows``, say what happened.

        A row that fails alone is named in the outcome. An exception means that nobody advanced:
        ``StepFailedError`` says which rows to give up, any other leaves that to the driver.
        """

    def release(self, released: Sequence[Released]) -> None:
        """Take slots back, before the step in which they may be given again."""


class StepFailedError(RuntimeError):
    """A step failed as a whole, and the engine knows how to go on (it ran out of memory, say).

    Nobody has advanced. Rows named neither in ``restart`` nor in ``fail`` stay in their slots.

    Args:
        message: What happened.
        restart: Slots whose rows wait again, from nothing.
        fail: Slots whose rows end with this error.
        max_num_seqs: The most rows to go on with, or None for as many as before.
    """

    restart: tuple[int, ...] = ()
    fail: tuple[int, ...] = ()
    max_num_seqs: int | None = None

    def __init__(
        self,
        message: str,
        *,
        restart: Iterable[int] = (),
        fail: Iterable[int] = (),
        max_num_seqs: int | None = None,
    ) -> None:
        super().__init__(message)
        self.restart = tuple(restart)
        self.fail = tuple(fail)
        self.max_num_seqs = max_num_seqs
