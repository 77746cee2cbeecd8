"""What a driver asks of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from dllm_sched.batch import Released, StepBatch, StepOutcome

__all__ = ["Engine", "PipelinedEngine", "Progress", "StepFailedError", "StreamingEngine"]


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


class PipelinedEngine(Engine, Protocol):
    """An engine that takes a step while one runs; ``run`` is ``launch``, then ``collect``.

    At most two steps are launched at a time. The later one may name rows that end in the earlier
    one: they are let be. ``release`` may come while a step runs that has none of the slots.
    """

    def launch(self, batch: StepBatch) -> None:
        """Take a step and do as much of it as can be done without waiting for the device.

        An exception means that the step was not taken; the one before it is not concerned.
        """

    def collect(self) -> StepOutcome:
        """Wait for the oldest step and say what happened in it, as ``run`` does.

        An exception means that nobody advanced in it, and that the step behind it is forgotten.
        """


class Progress(NamedTuple):
    """How a row's answer stands, from some position of it on."""

    committed: tuple[int, ...]  #: token ids that are final, without a gap
    provisional: tuple[int | None, ...] = ()
    """How the positions after them look now, as far as the row has opened them: a token id that
    may still change, or is final but behind a gap; None = masked."""


class StreamingEngine(Engine, Protocol):
    """An engine whose answers can be followed while they are decoded."""

    def progress(self, slot: int, start: int) -> Progress:
        """Say how the answer of the row in ``slot`` stands, from position ``start`` of it on.

        Asked after ``run`` and before the slot is released, also of rows that have just finished,
        never of rows that failed. What is committed ends where the answer in the row's
        ``RowFinished.output`` will, and is all of it once the row has finished. It never changes
        while the row is in its slot.
        """


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
