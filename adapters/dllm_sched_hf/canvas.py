"""What decoders on a fixed canvas share: all masks are there at once, blocks are decoded in turn.

A row is its prompt and ``max_new_tokens`` masks, and every position sees every other. Blocks of
``block_length`` are decoded one after the other; a forward predicts the masked positions of the
current block, and its most confident predictions commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from dllm_sched.errors import ConfigError
from dllm_sched_hf.decoder import (
    Bools,
    Commits,
    Decoder,
    DecodeRequest,
    Floats,
    Ints,
    StepPlan,
    is_int,
    shown,
)
from dllm_sched_hf.loops import compiled

__all__ = ["CanvasDecoder", "CanvasPlan", "CanvasRequest"]


@attrs.frozen(kw_only=True, eq=False)
class CanvasRequest(DecodeRequest):
    """A request for a fixed canvas of whole blocks.

    Attributes:
        max_new_tokens: Positions of the answer, a multiple of ``block_length``.
        steps: Forwards in all, shared out evenly: a multiple of the number of blocks, and at most
            one per position. Each forward of a block commits as many positions as the next, up to
            one. None = one position per forward.

    Raises:
        ConfigError: If a field is out of its range or does not divide; names the field.
    """

    steps: int | None = None

    def __attrs_post_init__(self) -> None:
        where = f"request {self.id!r}"
        budget, length = self.max_new_tokens, self.block_length
        if budget % length:
            raise ConfigError(
                f"{where}: max_new_tokens {shown(budget)} must be a multiple of block_length "
                f"{shown(length)}"
            )
        blocks = budget // length
        if self.steps is None:
            return
        if not is_int(self.steps) or not 1 <= self.steps <= budget or self.steps % blocks:
            raise ConfigError(
                f"{where}: steps must be an int in 1..{shown(budget)} (max_new_tokens) and a "
                f"multiple of the {shown(blocks)} blocks, got {shown(self.steps)}"
            )


@attrs.define(kw_only=True, eq=False)
class CanvasPlan(StepPlan):
    """A forward of each row's canvas, or of a part of it that holds the current block."""

    block: Ints  #: ``[r]`` the current block, from 0


class CanvasDecoder(Decoder):
    """The canvas of every slot, and the schedule that commits the top k of each forward."""

    whole_prefill = True
    progress = (*Decoder.progress, "block", "round")

    def __init__(self, num_slots: int, max_len: int, mask_id: int) -> None:
        super().__init__(num_slots, max_len, mask_id)
        self.num_blocks, self.num_rounds, self.block, self.round = np.zeros(
            (4, num_slots), np.int64
        )  # rounds: forwards of one block

    def start(self, slot: int, request: CanvasRequest, stop_ids: Sequence[int] = ()) -> None:
        """Put a fresh row into ``slot``; its knobs are set separately."""
        super().start(slot, request, stop_ids)
        blocks = request.max_blocks
        steps = request.max_new_tokens if request.steps is None else request.steps
        self.num_blocks[slot], self.num_rounds[slot] = blocks, steps // blocks
        self.block[slot] = self.round[slot] = 0

    def plan(self, slots: Ints) -> CanvasPlan:
        """Lay out the coming forward; writes nothing."""
        block, block_length = self.block[slots], self.block_length[slots]
        first = self.prompt_len[slots] + block * block_length
        length = first + (self.num_blocks[slots] - block) * block_length
        start, end = self._window(slots, first, length)
        row, position, place = self._pack(slots, start, end)
        # Earlier blocks have no masks.
        token, masked = self._look(place, row, position, first + block_length)
        return CanvasPlan(
            slots=slots,
            start=start,
            end=end,
            length=length,
            row=row,
            position=position,
            place=place,
            token=token,
            visible=length[row],
            masked=masked,
            block=block,
        )

    def commit(self, plan: CanvasPlan, confidence: Floats, token: Ints) -> Commits:
        """Commit the most confident positions of each row, as many as its rule says."""
        slots = plan.slots
        head, order = _ranked(plan.row[plan.masked], len(slots), confidence)
        number = self._num_commits(slots, confidence[order], head)
        chosen = _best(head, order, number)
        self._write(plan, chosen, token)
        grew = number == head[1:] - head[:-1]
        self.block[slots] = plan.block + grew
        self.round[slots] = np.where(grew, 0, self.round[slots] + 1)
        return Commits(chosen, self.block[slots] == self.num_blocks[slots], grew)

    def trace(self, plan: CanvasPlan, commits: Commits, token: Ints) -> list[dict[str, Any]]:
        """Return what a committed step did, one entry per row."""
        committed = self._commits_by_row(plan, commits, token)
        return [
            {"block": block, "commits": pairs}
            for block, pairs in zip(plan.block.tolist(), committed, strict=True)
        ]

    def num_blocks_done(self, slot: int) -> int:
        """Return how many blocks are finished."""
        return int(self.block[slot])

    def num_blocks_opened(self, slot: int) -> int:
        """Return how many blocks are finished or begun."""
        return int(self.block[slot] + (self.round[slot] > 0))

    def kv_tokens(self, slot: int) -> int:
        """Return the whole canvas: every forward needs room for it (``FixedCanvas``)."""
        return self._canvas(slot)

    def num_cached(self, slot: int) -> int:
        """Return the whole canvas within a block that reads from the cache, else nothing."""
        whole = self.refreshes(np.array([slot]))[0]
        return 0 if whole else self._canvas(slot)

    def refreshes(self, slots: Ints) -> Bools:
        """Return every row: without a cache the whole canvas is computed anew."""
        return np.ones(len(slots), np.bool_)

    def generated(self, slot: int) -> Ints:
        """Return a view of the canvas after the prompt, masks included."""
        return self.tokens[slot, self.prompt_len[slot] : self._canvas(slot)]

    def _canvas(self, slot: int) -> int:
        return int(self.prompt_len[slot] + self.num_blocks[slot] * self.block_length[slot])

    def _window(self, slots: Ints, first: Ints, length: Ints) -> tuple[Ints, Ints]:
        """Return start and end of what goes through the forward: here the whole canvas.

        Args:
            slots: ``[r]``
            first: ``[r]`` first position of the current block.
            length: ``[r]`` of the canvas.
        """
        return np.zeros_like(length), length

    def _num_commits(self, slots: Ints, confidence: Floats, head: Ints) -> Ints:
        """Return how many positions each row commits, at least one: here what the schedule says.

        Args:
            slots: ``[r]``
            confidence: ``[c]`` row by row, in each row the highest first.
            head: ``[r + 1]`` where each row begins, and c. Each has a candidate.
        """
        each, rest = np.divmod(self.block_length[slots], self.num_rounds[slots])
        return each + (self.round[slots] < rest)


@compiled
def _ranked(row: Ints, num_rows: int, confidence: Floats) -> tuple[Ints, Ints]:
    """Order each row's candidates by confidence.

    Args:
        row: ``[c]`` of each candidate, ascending.
        num_rows: r
        confidence: ``[c]``

    Returns:
        ``[r + 1]`` where each row begins, and c; ``[c]`` the candidates row by row, in each row the
        highest first and of equal ones the first.
    """
    head, order = np.zeros(num_rows + 1, np.int64), np.empty(len(row), np.int64)
    for each in row:
        head[each + 1] += 1
    for index in range(num_rows):
        head[index + 1] += head[index]
        low, high = head[index], head[index + 1]
        order[low:high] = low + np.argsort(-confidence[low:high], kind="mergesort")  # stable
    return head, order


@compiled
def _best(head: Ints, order: Ints, number: Ints) -> Ints:
    """Return the first ``number`` of each row of what :func:`_ranked` returns, ascending."""
    passes = np.zeros(len(order), np.bool_)
    for index, count in enumerate(number):
        low, high = head[index], head[index + 1]
        passes[order[low : min(low + count, high)]] = True
    return passes.nonzero()[0]
