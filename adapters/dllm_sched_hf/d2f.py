"""The D2F decoder: blocks are appended one by one, decoded together, and cached when finished.

A row is a prompt (block 0) followed by blocks of ``block_length`` masks that are appended one at a
time. Finished blocks always form a prefix, so three integers say what the reference keeps as a
list of states: blocks ``1..num_finished`` are finished, the rest is active, and the ``cached``
first positions are in the KV cache.

Source: Wang et al., "Discrete Diffusion Forcing" (arXiv 2508.09192) for the rule; own derivation of
the prefix form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from dllm_sched.errors import ConfigError
from dllm_sched_hf.decoder import (
    Bools,
    Commits,
    Decoder,
    DecodeRequest,
    Floats,
    Ints,
    StepPlan,
    check_field,
    check_flag,
    shown,
)
from dllm_sched_hf.loops import compiled

__all__ = ["D2F", "D2FPlan", "D2FRequest"]


@attrs.frozen(kw_only=True, eq=False)
class D2FRequest(DecodeRequest):
    """A request with its prompt and its settings for D2F.

    Attributes:
        block_add_threshold: Decoded share of the last block, in [0, 1], from which on the next
            block is appended.
        decoded_token_threshold: Decoded share of a block, in [0, 1], from which on the next block
            is fully activated: it then commits at least one token per step.
        skip_threshold: A position commits when its confidence is above this; in [0, 1], and at 1
            no position ever does by itself.
        truncate_at_stop: As for every request. False = the reference: a stop id only keeps
            further blocks from being opened, and the answer keeps all its tokens.
        whole_blocks_only: False = ``max_new_tokens`` is rounded up to whole blocks and the answer
            cut back to it. True = the reference: rounded down, and nothing is cut.

    Raises:
        ConfigError: If a field is out of its range; names the field.

    Source: defaults from the D2F evaluation settings for LLaDA (arXiv 2508.09192, public scripts).
    """

    block_add_threshold: float = attrs.field(default=0.1, validator=check_field)
    decoded_token_threshold: float = attrs.field(default=0.95, validator=check_field)
    skip_threshold: float = attrs.field(default=0.9, validator=check_field)
    whole_blocks_only: bool = attrs.field(default=False, validator=check_flag)

    def __attrs_post_init__(self) -> None:
        if self.max_blocks < 1:
            raise ConfigError(
                f"request {self.id!r}: max_new_tokens {shown(self.max_new_tokens)} holds no whole "
                f"block of block_length {shown(self.block_length)}: raise it, or set "
                "whole_blocks_only=False"
            )

    @property
    def max_blocks(self) -> int:
        """Blocks that may be opened."""
        if self.whole_blocks_only:
            return self.max_new_tokens // self.block_length
        return -(-self.max_new_tokens // self.block_length)


@attrs.define(kw_only=True, eq=False)
class D2FPlan(StepPlan):
    """A forward from each row's first position that is not cached to its end."""

    num_finished: Ints  #: ``[r]`` finished blocks before this step
    num_blocks: Ints  #: ``[r]`` appended blocks, this step's included


class D2F(Decoder):
    """The blocks of every slot. A row attends causally by blocks, and only finished ones stay."""

    request_type = D2FRequest
    prompt_stands_alone = True
    recomputes = False
    knobs = ("block_add_threshold", "decoded_token_threshold", "skip_threshold", "temperature")
    progress = (
        *Decoder.progress,
        *("left", "ready", "most_blocks", "num_blocks", "num_finished", "cached", "settled"),
    )

    def __init__(self, num_slots: int, max_len: int, mask_id: int) -> None:
        super().__init__(num_slots, max_len, mask_id)
        # What every step asks of its rows, in one array.
        self._rows = np.zeros((7, num_slots), np.int64)
        self.prompt_len, self.block_length = self._rows[:2]
        self.most_blocks, self.num_blocks, self.num_finished = self._rows[2:5]
        self.cached, self.settled = self._rows[5:]
        self.block_add_threshold: Floats
        self.decoded_token_threshold: Floats
        self.block_add_threshold, self.decoded_token_threshold = np.zeros((2, num_slots))
        # Compared with float32 probabilities, in their precision.
        self.skip_threshold = np.zeros(num_slots, np.float32)
        # Masks left per block; block 0 is the prompt.
        self.left: Ints = np.zeros((num_slots, 1), np.int64)
        self.ready: Bools = np.zeros((num_slots, 1), np.bool_)  # fully activated, for good
        none = np.empty(0, np.int64)
        self._seen = none, none  # places of the last step, and what each sees

    def start(self, slot: int, request: D2FRequest, stop_ids: Sequence[int] = ()) -> None:
        """Put a fresh row into ``slot``; its knobs are set separately."""
        super().start(slot, request, stop_ids)
        self._grow(request.max_blocks + 1)
        self._rows[2:, slot] = request.max_blocks, 0, 0, 0, request.prompt_len
        # Only a part of its last block is wanted: perhaps it never finishes that.
        self.early[slot] = request.max_blocks * request.block_length > request.max_new_tokens
        self.left[slot] = request.block_length
        self.left[slot, 0] = 0
        self.ready[slot] = False

    def plan(self, slots: Ints) -> D2FPlan:
        """Append blocks and lay out the coming forward; writes nothing."""
        reached = _reach(slots, self._rows, self.left, self.block_add_threshold)
        num_finished, num_blocks, start, end = reached
        row, position, place = self._pack(slots, start, end)
        if place is not self._seen[0]:
            self._seen = place, _see(slots, row, position, self._rows)
        token, masked = self._look(place, row, position, end)
        return D2FPlan(
            slots=slots,
            start=start,
            end=end,
            length=end,
            row=row,
            position=position,
            place=place,
            token=token,
            visible=self._seen[1],
            masked=masked,
            num_finished=num_finished,
            num_blocks=num_blocks,
        )

    def commit(self, plan: D2FPlan, confidence: NDArray[np.float32], token: Ints) -> Commits:
        """Commit what is confident enough, and the best position of a ready block without any."""
        slots = plan.slots
        chosen, forced, grew, some = _choose(
            slots,
            plan.num_blocks,
            confidence,
            self._rows,
            self.left,
            self.ready,
            self.decoded_token_threshold,
            self.skip_threshold,
        )
        stopped = self._write(plan, chosen, token)
        if len(stopped):
            self.most_blocks[stopped] = self.num_blocks[stopped]
        finished = grew
        if some:
            num_finished = self.num_finished[slots]
            finished = num_finished == plan.num_blocks
            finished &= num_finished >= self.most_blocks[slots]
        return Commits(chosen, finished, grew, forced)

    def trace(self, plan: D2FPlan, commits: Commits, token: Ints) -> list[dict[str, Any]]:
        """Return what a committed step did, one entry per row."""
        committed = self._commits_by_row(plan, commits, token)
        row = plan.row[plan.masked]
        slot = plan.slots[row]
        block = plan.position[plan.masked] - self.prompt_len[slot]
        block = block // self.block_length[slot] + 1
        forced: list[list[int]] = [[] for _ in plan.slots]
        for index in [] if commits.forced is None else commits.forced.tolist():
            forced[row[index]].append(int(block[index]))
        before = self.left.copy()  # this step's commits are undone in it
        np.add.at(before, (slot[commits.chosen], block[commits.chosen]), 1)
        whole = np.maximum(self.block_length, 1)[:, None]
        far = (whole - before) / whole >= self.decoded_token_threshold[:, None]
        entries = []
        for index, slot in enumerate(plan.slots.tolist()):
            start, count = int(plan.start[index]), int(plan.num_blocks[index])
            finished = int(plan.num_finished[index])
            ends = self.prompt_len[slot] + np.arange(count + 1) * self.block_length[slot]
            entries.append(
                {
                    "step": int(self.num_steps[slot]),
                    "start": start,
                    "len": int(plan.end[index]) - start,
                    "cache": start,
                    "cache_after": int(self.cached[slot]),
                    "n_blocks": count,
                    "states": "".join(
                        "A" if block > finished else "C" if end <= start else "T"
                        for block, end in enumerate(ends.tolist())
                    ),
                    "complete": [
                        block
                        for block in range(finished + 1, count + 1)
                        if self.ready[slot, block] or far[slot, block - 1]
                    ],
                    "forced": forced[index],
                    "commits": committed[index],
                }
            )
        return entries

    def num_blocks_done(self, slot: int) -> int:
        """Return how many blocks are finished."""
        return int(self.num_finished[slot])

    def num_blocks_opened(self, slot: int) -> int:
        """Return how many blocks were appended."""
        return int(self.num_blocks[slot])

    def kv_tokens(self, slot: int) -> int:
        """Return the prompt and the finished blocks: the coming step caches them."""
        return int(self.settled[slot])

    def num_cached(self, slot: int) -> int:
        """Return what the steps so far have cached."""
        return int(self.cached[slot])

    def set_prompt_cached(self, slot: int, *, cached: bool) -> None:
        """Say whether the prompt of a row that has taken no step is in the cache already."""
        self.cached[slot] = self.prompt_len[slot] if cached else 0

    def refreshes(self, slots: Ints) -> Bools:
        """Return no row: nothing that is cached is ever computed anew."""
        return np.zeros(len(slots), np.bool_)

    def generated(self, slot: int) -> Ints:
        """Return a view of the appended blocks, masks included."""
        start = self.prompt_len[slot]
        return self.tokens[slot, start : start + self.num_blocks[slot] * self.block_length[slot]]

    def masked_remaining(self, slot: int) -> int:
        """Return the positions that may still have to commit, unopened blocks included."""
        unopened = self.most_blocks[slot] - self.num_blocks[slot]
        return super().masked_remaining(slot) + int(unopened * self.block_length[slot])

    def _grow(self, width: int) -> None:
        """Make room for rows with more blocks than any before."""
        extra = width - self.left.shape[1]
        if extra > 0:
            filler = np.zeros((len(self.left), extra), np.int64)
            self.left = np.hstack((self.left, filler))
            self.ready = np.hstack((self.ready, filler.astype(np.bool_)))


# -- for all rows of a step


@compiled
def _reach(slots: Ints, rows: Ints, left: Ints, add: Floats) -> tuple[Ints, Ints, Ints, Ints]:
    """Append at most one block to each row, if its last one is decoded far enough.

    Args:
        slots: ``[r]`` of the step.
        rows: ``[7, slots]`` as in the decoder.
        left: ``[slots, blocks]`` masks of each.
        add: ``[slots]`` share of the last block, at first the prompt, from which on one comes.

    Returns:
        ``[r]`` finished blocks, all blocks, and the range of positions that goes through the
        forward.
    """
    num_finished, num_blocks, start, end = np.empty((4, len(slots)), np.int64)
    for index, slot in enumerate(slots):
        prompt_len, length, most, count, num_finished[index], cached, _ = rows[:, slot]
        # Double precision: thresholds are compared with exact small fractions.
        if count < most and (length - left[slot, count]) / length >= add[slot]:
            count += 1
        num_blocks[index], start[index], end[index] = count, cached, prompt_len + count * length
    return num_finished, num_blocks, start, end


@compiled
def _see(slots: Ints, row: Ints, position: Ints, rows: Ints) -> Ints:
    """Return how far each token of the forward sees: to the end of its block."""
    visible = np.empty(len(row), np.int64)
    for index, at in enumerate(position):
        prompt_len, length = rows[:2, slots[row[index]]]
        behind = at - prompt_len
        visible[index] = prompt_len + (0 if behind < 0 else (behind // length + 1) * length)
    return visible


@compiled
def _choose(
    slots: Ints,
    num_blocks: Ints,
    confidence: NDArray[np.float32],
    rows: Ints,
    left: Ints,
    ready: Bools,
    activate: Floats,
    skip: NDArray[np.float32],
) -> tuple[Ints, Ints, Bools, bool]:
    """Choose what commits, and move the blocks of every row one step on.

    Args:
        slots: ``[r]`` of the step.
        num_blocks: ``[r]`` this step's blocks.
        confidence: ``[c]`` of the masked positions: row by row, block by block.
        rows: ``[7, slots]`` as in the decoder; written.
        left: ``[slots, blocks]`` masks of each; written.
        ready: ``[slots, blocks]`` which are fully activated, for good; written.
        activate: ``[slots]`` share of a block from which on the next one is.
        skip: ``[slots]`` above this a confidence commits by itself.

    Returns:
        Which of the c commit, and which of those only because no other of their ready block did;
        ``[r]`` where finished blocks grew, and whether they did anywhere.
    """
    chosen, forced = np.empty((2, len(confidence)), np.int64)
    grew = np.zeros(len(slots), np.bool_)
    num_chosen = num_forced = at = 0
    for index, slot in enumerate(slots):
        prompt_len, length, _, _, num_finished, _, settled = rows[:, slot]
        before = 0  # masks of the block before, as they were
        for block in range(num_finished + 1, num_blocks[index] + 1):
            masks = left[slot, block]
            if (length - before) / length >= activate[slot]:
                ready[slot, block] = True
            best, number = at, num_chosen
            for each in range(at, at + masks):
                if confidence[each] > skip[slot]:
                    chosen[num_chosen] = each
                    num_chosen += 1
                if confidence[each] > confidence[best]:
                    best = each
            if masks and num_chosen == number and ready[slot, block]:
                chosen[num_chosen] = forced[num_forced] = best
                num_chosen += 1
                num_forced += 1
            left[slot, block] = masks - (num_chosen - number)
            before = masks
            at += masks
        rows[3, slot], rows[5, slot] = num_blocks[index], settled
        while num_finished < num_blocks[index] and left[slot, num_finished + 1] == 0:
            num_finished += 1
            grew[index] = True
        rows[4, slot], rows[6, slot] = num_finished, prompt_len + num_finished * length
    return chosen[:num_chosen], forced[:num_forced], grew, bool(grew.any())
