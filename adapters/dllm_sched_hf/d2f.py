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
    run_starts,
    shown,
)

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


@attrs.frozen(kw_only=True, eq=False)
class D2FPlan(StepPlan):
    """A forward from each row's first position that is not cached to its end."""

    num_finished: Ints  #: ``[r]`` finished blocks before this step
    num_blocks: Ints  #: ``[r]`` appended blocks, this step's included
    left: Ints  #: ``[r, width]`` masks left per block; block_length where there is no block
    ready: Bools  #: ``[r, width]`` fully activated: may be forced to commit


class D2F(Decoder):
    """The blocks of every slot. A row attends causally by blocks, and only finished ones stay."""

    request_type = D2FRequest
    prompt_stands_alone = True
    knobs = ("block_add_threshold", "decoded_token_threshold", "skip_threshold", "temperature")
    progress = (*Decoder.progress, "left", "ready", "num_blocks", "num_finished", "cached")

    def __init__(self, num_slots: int, max_len: int, mask_id: int) -> None:
        super().__init__(num_slots, max_len, mask_id)
        ints = np.zeros((4, num_slots), np.int64)
        self.max_blocks, self.num_blocks, self.num_finished, self.cached = ints
        self.block_add_threshold: Floats
        self.decoded_token_threshold: Floats
        self.block_add_threshold, self.decoded_token_threshold = np.zeros((2, num_slots))
        # Compared with float32 probabilities, in their precision.
        self.skip_threshold = np.zeros(num_slots, np.float32)
        self.partial: Bools = np.zeros(num_slots, np.bool_)  # the last block is only partly wanted
        # One column more than any row has blocks, never finished: searches always find an end.
        self.left: Ints = np.ones((num_slots, 2), np.int64)
        self.ready: Bools = np.zeros((num_slots, 2), np.bool_)

    def start(self, slot: int, request: D2FRequest, stop_ids: Sequence[int] = ()) -> None:
        """Put a fresh row into ``slot``; its knobs are set separately."""
        super().start(slot, request, stop_ids)
        self._grow(request.max_blocks + 1)
        self.max_blocks[slot] = request.max_blocks
        self.partial[slot] = request.max_blocks * request.block_length > request.max_new_tokens
        self.num_blocks[slot] = self.num_finished[slot] = self.cached[slot] = 0
        self.left[slot] = request.block_length
        self.ready[slot] = False

    def plan(self, slots: Ints) -> D2FPlan:
        """Append and activate blocks and lay out the coming forward; writes nothing."""
        prompt_len, length = self.prompt_len[slots], self.block_length[slots]
        num_blocks, left, ready = self.num_blocks[slots], self.left[slots], self.ready[slots]

        # Append at most one block, if the last one (at first the prompt) is decoded far enough.
        # Double precision throughout: thresholds are compared with exact small fractions.
        whole = length[:, None]
        ratio = (whole - left) / whole
        last = ratio[np.arange(len(slots)), num_blocks - 1]
        last[num_blocks == 0] = 1.0
        num_blocks += self._may_append(slots, num_blocks) & (
            last >= self.block_add_threshold[slots]
        )

        # Activate, for good, every existing block whose direct predecessor is decoded far enough;
        # the prompt always is.
        ready[:, 0] = True
        ready[:, 1:] |= (ratio[:, :-1] >= self.decoded_token_threshold[slots, None]) & (
            np.arange(1, left.shape[1]) < num_blocks[:, None]
        )

        start, end = self.cached[slots], prompt_len + num_blocks * length
        row, position, token = self._pack(slots, start, end)
        offset = position - prompt_len[row]
        length_of = length[row]
        # The end of its block; the prompt is one, and ends where the blocks begin.
        visible = position - np.where(offset < 0, offset, offset % length_of - length_of)
        return D2FPlan(
            slots=slots,
            start=start,
            end=end,
            length=end,
            row=row,
            position=position,
            token=token,
            visible=visible,
            masked=(token == self.mask_id).nonzero()[0],  # no prompt holds one
            num_finished=self.num_finished[slots],
            num_blocks=num_blocks,
            left=left,
            ready=ready,
        )

    def commit(self, plan: D2FPlan, confidence: NDArray[np.float32], token: Ints) -> Commits:
        """Commit what is confident enough, and the best position of a ready block without any."""
        slots, left, num_blocks = plan.slots, plan.left, plan.num_blocks
        row, position = plan.row[plan.masked], plan.position[plan.masked]
        slot = slots[row]
        block = (position - self.prompt_len[slot]) // self.block_length[slot]

        # Positions of one (row, block) lie together: reduce over each run of them.
        key = row * left.shape[1] + block
        head = run_starts(key).nonzero()[0]
        at_head = key[head]
        chosen = confidence > self.skip_threshold[slot]
        number = np.add.reduceat(chosen, head, dtype=np.int64)
        # A ready block in which nothing passed commits its best position.
        force = (number == 0) & plan.ready.ravel()[at_head]
        forced = head[:0]
        if force.any():
            run = run_starts(key).cumsum() - 1
            best = (confidence == np.maximum.reduceat(confidence, head)[run]) & force[run]
            at_best = np.flatnonzero(best)
            forced = at_best[run_starts(run[at_best])]  # the first, if several tie
            chosen[forced] = True
        index = chosen.nonzero()[0]

        self._write(slots, slot[index], position[index], token[index])
        left.ravel()[at_head] -= number + force
        num_finished = (left != 0).argmax(1)
        self.left[slots], self.ready[slots] = left, plan.ready
        self.num_blocks[slots], self.num_finished[slots] = num_blocks, num_finished
        # Blocks that were finished before this forward ran in it from their final tokens.
        self.cached[slots] = self.prompt_len[slots] + plan.num_finished * self.block_length[slots]
        return Commits(
            index,
            (num_finished == num_blocks) & ~self._may_append(slots, num_blocks),
            num_finished > plan.num_finished,
            forced,
        )

    def trace(self, plan: D2FPlan, commits: Commits, token: Ints) -> list[dict[str, Any]]:
        """Return what a committed step did, one entry per row."""
        committed = self._commits_by_row(plan, commits, token)
        at = plan.masked[commits.forced]
        slot = plan.slots[plan.row[at]]
        blocks = (plan.position[at] - self.prompt_len[slot]) // self.block_length[slot] + 1
        forced: list[list[int]] = [[] for _ in plan.slots]
        for row, block in zip(plan.row[at], blocks, strict=True):
            forced[row].append(int(block))
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
                        if plan.ready[index, block - 1]
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
        return int(self.prompt_len[slot] + self.num_finished[slot] * self.block_length[slot])

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
        opened = super().masked_remaining(slot)
        if self.stop_step[slot]:
            return opened
        unopened = self.max_blocks[slot] - self.num_blocks[slot]
        return opened + int(unopened * self.block_length[slot])

    def may_end(self, slots: Ints, finished: Bools) -> Bools:
        """Return also the rows that want only a part of their last block."""
        all_open = self.num_blocks[slots] == self.max_blocks[slots]
        return super().may_end(slots, finished) | (self.partial[slots] & all_open)

    def _may_append(self, slots: Ints, num_blocks: Ints) -> Bools:
        return (num_blocks < self.max_blocks[slots]) & (self.stop_step[slots] == 0)

    def _grow(self, width: int) -> None:
        """Make room for rows with more blocks than any before."""
        extra = width - self.left.shape[1]
        if extra > 0:
            filler = np.repeat(np.maximum(self.block_length, 1)[:, None], extra, 1)
            self.left = np.hstack((self.left, filler))
            self.ready = np.hstack((self.ready, np.zeros((len(filler), extra), np.bool_)))
