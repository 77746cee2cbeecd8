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


@attrs.define(kw_only=True, eq=False)
class D2FPlan(StepPlan):
    """A forward from each row's first position that is not cached to its end.

    Masked positions of one block lie together: h of the blocks have any.
    """

    num_finished: Ints  #: ``[r]`` finished blocks before this step
    num_blocks: Ints  #: ``[r]`` appended blocks, this step's included
    settled: Ints  #: ``[r]`` end of the finished blocks, which this forward runs from final tokens
    masked_place: Ints  #: ``[c]``
    edges: Ints  #: ``[h + 1]`` where each block begins among the c, and c
    block: Ints  #: ``[h]`` the block, as an index into the flat ``left``
    ready: Bools  #: ``[h]`` it is fully activated: may be forced to commit


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
        # What every plan asks of its rows, in one array: one look-up for all.
        self._rows = np.zeros((7, num_slots), np.int64)
        self.prompt_len, self.block_length = self._rows[:2]
        self.most_blocks, self.num_blocks, self.num_finished = self._rows[2:5]
        self.cached, self.settled = self._rows[5:]
        self.block_add_threshold: Floats
        self.decoded_token_threshold: Floats
        self.block_add_threshold, self.decoded_token_threshold = np.zeros((2, num_slots))
        # Compared with float32 probabilities, in their precision.
        self.skip_threshold = np.zeros(num_slots, np.float32)
        # Masks left per block. Block 0 is the prompt, and there is one column more than any row has
        # blocks, never finished: searches always find an end.
        self.left: Ints = np.ones((num_slots, 2), np.int64)
        self.ready: Bools = np.zeros((num_slots, 2), np.bool_)  # fully activated, for good
        # Of every place: the block it is in, as an index into the flat ``left``; and the end of it.
        self._block: Ints = np.zeros(num_slots * max_len, np.int64)
        self._visible: Ints = np.zeros(num_slots * max_len, np.int64)
        self._seen = self._block[:0], self._visible[:0]  # places of the last step, and their ends

    def start(self, slot: int, request: D2FRequest, stop_ids: Sequence[int] = ()) -> None:
        """Put a fresh row into ``slot``; its knobs are set separately."""
        super().start(slot, request, stop_ids)
        self._grow(request.max_blocks + 2)
        prompt_len, length = request.prompt_len, request.block_length
        self._rows[2:, slot] = request.max_blocks, 0, 0, 0, prompt_len
        # Only a part of its last block is wanted: perhaps it never finishes that.
        self.early[slot] = request.max_blocks * length > request.max_new_tokens
        self.left[slot] = length
        self.left[slot, 0] = 0
        self.ready[slot] = False
        block = np.arange(prompt_len, prompt_len + request.max_blocks * length) - prompt_len
        block //= length
        first = slot * self.max_len
        own = slice(first + prompt_len, first + prompt_len + len(block))
        self._block[own] = block + (slot * self.left.shape[1] + 1)
        self._visible[first : first + prompt_len] = prompt_len
        self._visible[own] = (block + 1) * length + prompt_len

    def plan(self, slots: Ints) -> D2FPlan:
        """Append and activate blocks and lay out the coming forward; writes nothing."""
        prompt_len, length, most, num_blocks, num_finished, cached, settled = self._rows.take(
            slots, 1
        )
        left, width = self.left.reshape(-1), self.left.shape[1]
        # Append at most one block, if the last one (at first the prompt) is decoded far enough.
        # Double precision throughout: thresholds are compared with exact small fractions.
        ratio = (length - left[slots * width + num_blocks]) / length
        num_blocks = num_blocks + ((num_blocks < most) & (ratio >= self.block_add_threshold[slots]))
        end = prompt_len + num_blocks * length
        row, position, place = self._pack(slots, cached, end)
        if place is not self._seen[0]:
            self._seen = place, self._visible[place]
        token = self._tokens[place]
        masked = (token == self.mask_id).nonzero()[0]  # no prompt holds one
        masked_place = place[masked]
        block = self._block[masked_place]
        starts = np.ones(len(block) + 1, np.bool_)
        np.not_equal(block[1:], block[:-1], out=starts[1:-1])
        edges = starts.nonzero()[0]
        block = block[edges[:-1]]
        # Activate, for good, every block whose direct predecessor is decoded far enough.
        slot = block // width
        length = self.block_length[slot]
        ready = (length - left[block - 1]) / length >= self.decoded_token_threshold[slot]
        ready |= self.ready.reshape(-1)[block]
        return D2FPlan(
            slots=slots,
            start=cached,
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
            settled=settled,
            masked_place=masked_place,
            edges=edges,
            block=block,
            ready=ready,
        )

    def commit(self, plan: D2FPlan, confidence: NDArray[np.float32], token: Ints) -> Commits:
        """Commit what is confident enough, and the best position of a ready block without any."""
        slots, block, masked_place = plan.slots, plan.block, plan.masked_place
        passes = confidence > self.skip_threshold[masked_place // self.max_len]
        chosen = passes.nonzero()[0]
        below = chosen.searchsorted(plan.edges)
        number = below[1:] - below[:-1]
        # A ready block in which nothing passed commits its best position.
        force = plan.ready & (number == 0)
        forced = chosen[:0]
        if np.count_nonzero(force):  # any() takes four times as long
            best = np.maximum.reduceat(confidence, plan.edges[:-1])
            best[~force] = 2.0  # nobody's
            best = best.repeat(plan.edges[1:] - plan.edges[:-1])
            forced = (confidence == best).nonzero()[0]
            if len(forced) > np.count_nonzero(force):  # some tie: the first of each block
                forced = forced[run_starts(self._block[masked_place[forced]])]
            passes[forced] = True
            chosen = passes.nonzero()[0]
            number += force

        left = self.left.reshape(-1)
        remaining = left[block] - number
        left[block] = remaining
        self.ready.reshape(-1)[block] = plan.ready
        self.num_blocks[slots], self.cached[slots] = plan.num_blocks, plan.settled
        stopped = self._write(slots, masked_place[chosen], token[chosen])
        if stopped is not None:
            self.most_blocks[stopped] = self.num_blocks[stopped]
        if np.count_nonzero(remaining) == len(remaining):
            none = np.zeros(len(slots), np.bool_)
            return Commits(chosen, none, none, forced)
        num_finished = (self.left[slots, 1:] != 0).argmax(1)
        self.num_finished[slots] = num_finished
        self.settled[slots] = self.prompt_len[slots] + num_finished * self.block_length[slots]
        return Commits(
            chosen,
            (num_finished == plan.num_blocks) & (num_finished >= self.most_blocks[slots]),
            num_finished > plan.num_finished,
            forced,
        )

    def trace(self, plan: D2FPlan, commits: Commits, token: Ints) -> list[dict[str, Any]]:
        """Return what a committed step did, one entry per row."""
        committed = self._commits_by_row(plan, commits, token)
        width = self.left.shape[1]
        forced: list[list[int]] = [[] for _ in plan.slots]
        forced_block = self._block[plan.masked_place[commits.forced]] % width
        for row, block in zip(plan.row[plan.masked[commits.forced]], forced_block, strict=True):
            forced[row].append(int(block))
        before = self.left.copy()  # this step's commits are undone in it
        np.add.at(before.reshape(-1), self._block[plan.masked_place[commits.chosen]], 1)
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

    def ends_before(self, slots: Ints) -> Ints:
        """Return the end of each row's first unfinished block: there is a mask before it."""
        return self.settled[slots] + self.block_length[slots]

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
            filler = np.repeat(np.maximum(self.block_length, 1)[:, None], extra, 1)
            self.left = np.hstack((self.left, filler))
            self.ready = np.hstack((self.ready, np.zeros((len(filler), extra), np.bool_)))
            self._block += np.arange(len(filler)).repeat(self.max_len) * extra
