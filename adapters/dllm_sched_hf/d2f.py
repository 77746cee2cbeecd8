"""The D2F decoder: which blocks are open, which positions commit. Vectorised over rows, no model.

A row is a prompt (block 0) followed by blocks of ``block_length`` masks that are appended one at a
time. Finished blocks always form a prefix, so three integers say what the reference keeps as a
list of states: blocks ``1..num_finished`` are finished, the rest is active, and the ``cached``
first positions are in the KV cache. A step is

1. :meth:`BlockStates.plan`: append and activate blocks, name the tokens of the forward;
2. the caller's forward, which gives one (confidence, token) per masked position;
3. :meth:`BlockStates.commit`: commit tokens, finish blocks, account for what is now cached.

Nothing is written before ``commit``: a step that fails in between has advanced nobody.

This is integer work on ``[rows, blocks]`` arrays and it runs in numpy on the host, not in torch on
the device: the host needs its result before it can shape the next forward, one copy of
``[masked positions]`` results has to come back in any case, a numpy call on arrays this small costs
a fifth of a torch call on a CPU and a tenth of a kernel launch, and ratios and draws come out the
same to the last bit whatever the device.

Source: Wang et al., "Discrete Diffusion Forcing" (arXiv 2508.09192) for the rule; own derivation of
the prefix form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockStates", "Commits", "RowSetup", "RowState", "StepPlan", "uniform_draws"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class RowSetup(NamedTuple):
    """What a row needs to start: tokens and limits, no model."""

    prompt: Sequence[int]
    block_length: int  #: >= 1
    max_blocks: int  #: >= 1
    stop_ids: Sequence[int] = ()  #: a committed one stops further blocks from being appended


class RowState(NamedTuple):
    """A row's whole progress, taken out of its slot; what :meth:`BlockStates.restore` needs."""

    tokens: Ints  #: ``[prompt + blocks]``
    left: Ints  #: ``[max_blocks]``
    ready: Bools  #: ``[max_blocks]``
    num_blocks: int
    num_finished: int
    cached: int
    num_steps: int
    stop_step: int


class StepPlan(NamedTuple):
    """One forward of r rows: n new tokens, c of them masked. Rows lie in the caller's order."""

    slots: Ints  #: ``[r]``
    num_blocks: Ints  #: ``[r]`` appended blocks, this step's included
    left: Ints  #: ``[r, width]`` masks left per block; block_length where there is no block
    ready: Bools  #: ``[r, width]`` fully activated: may be forced to commit
    start: Ints  #: ``[r]`` first new position = cached positions
    end: Ints  #: ``[r]`` length of the row
    row: Ints  #: ``[n]`` row of each new token
    position: Ints  #: ``[n]`` its position in the row
    token: Ints  #: ``[n]`` its id
    visible: Ints  #: ``[n]`` it attends to the positions below this one
    masked: Ints  #: ``[c]`` indices into the n tokens, ascending


class Commits(NamedTuple):
    """What one step decided, for the c masked positions of its plan."""

    chosen: Ints  #: ``[k]`` which of the c positions committed, ascending
    forced: Ints  #: ``[f]`` which of the c positions were a block's forced single one
    finished: Bools  #: ``[r]`` rows that have nothing left to do
    grew: Bools  #: ``[r]`` rows whose number of finished blocks grew


class BlockStates:
    """The blocks and tokens of every slot.

    Args:
        num_slots: Rows that can be alive at once.
        max_len: Longest row in tokens, prompt included.
        mask_id: The id of a masked position.

    Memory is ``8 * num_slots * max_len`` bytes and a little; a step costs O(rows * blocks + tokens)
    in about forty numpy calls.
    """

    def __init__(self, num_slots: int, max_len: int, mask_id: int) -> None:
        self.mask_id = mask_id
        self.tokens: Ints = np.full((num_slots, max_len), mask_id)
        ints = np.zeros((8, num_slots), np.int64)
        self.prompt_len, self.block_length, self.max_blocks = ints[:3]
        self.num_blocks, self.num_finished, self.cached = ints[3:6]
        self.num_steps, self.stop_step = ints[6:]  # stop_step: of the first stop id, 0 = none yet
        self.block_add_threshold, self.decoded_token_threshold = np.zeros((2, num_slots))
        # Compared with float32 probabilities, in their precision.
        self.skip_threshold = np.zeros(num_slots, np.float32)
        # One column more than any row has blocks, never finished: searches always find an end.
        self.left: Ints = np.ones((num_slots, 2), np.int64)
        self.ready: Bools = np.zeros((num_slots, 2), np.bool_)
        self.stop_ids: Ints = np.full((num_slots, 1), -1)

    def start(self, slot: int, setup: RowSetup) -> None:
        """Put a fresh row into ``slot``; its thresholds are set separately."""
        self._grow(setup.max_blocks + 1, len(setup.stop_ids))
        self.tokens[slot] = self.mask_id
        self.tokens[slot, : len(setup.prompt)] = setup.prompt
        self.prompt_len[slot] = len(setup.prompt)
        self.block_length[slot] = setup.block_length
        self.max_blocks[slot] = setup.max_blocks
        self.num_blocks[slot] = self.num_finished[slot] = 0
        self.cached[slot] = self.num_steps[slot] = self.stop_step[slot] = 0
        self.left[slot] = setup.block_length
        self.ready[slot] = False
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(setup.stop_ids)] = setup.stop_ids

    def save(self, slot: int) -> RowState:
        """Return a copy of the row's progress."""
        end = self.prompt_len[slot] + self.num_blocks[slot] * self.block_length[slot]
        blocks = self.max_blocks[slot]
        return RowState(
            self.tokens[slot, :end].copy(),
            self.left[slot, :blocks].copy(),
            self.ready[slot, :blocks].copy(),
            int(self.num_blocks[slot]),
            int(self.num_finished[slot]),
            int(self.cached[slot]),
            int(self.num_steps[slot]),
            int(self.stop_step[slot]),
        )

    def restore(self, slot: int, setup: RowSetup, saved: RowState) -> None:
        """Put a row back with the progress that :meth:`save` took; any slot will do."""
        self.start(slot, setup)
        self.tokens[slot, : len(saved.tokens)] = saved.tokens
        self.left[slot, : len(saved.left)] = saved.left
        self.ready[slot, : len(saved.ready)] = saved.ready
        self.num_blocks[slot] = saved.num_blocks
        self.num_finished[slot] = saved.num_finished
        self.cached[slot] = saved.cached
        self.num_steps[slot] = saved.num_steps
        self.stop_step[slot] = saved.stop_step

    def generated(self, slot: int) -> Ints:
        """Return a view of the row's tokens after the prompt, masks included."""
        start = self.prompt_len[slot]
        return self.tokens[slot, start : start + self.num_blocks[slot] * self.block_length[slot]]

    def plan(self, slots: Ints) -> StepPlan:
        """Append and activate blocks and lay out the coming forward; writes nothing.

        Args:
            slots: ``[r]`` the rows that take part, each alive and not finished.
        """
        prompt_len, length = self.prompt_len[slots], self.block_length[slots]
        num_blocks, left, ready = self.num_blocks[slots], self.left[slots], self.ready[slots]
        rows = np.arange(len(slots))

        # Append at most one block, if the last one (at first the prompt) is decoded far enough.
        # Double precision throughout: thresholds are compared with exact small fractions.
        ratio = (length[:, None] - left) / length[:, None]
        last = np.where(num_blocks > 0, ratio[rows, num_blocks - 1], 1.0)
        num_blocks += (
            (num_blocks < self.max_blocks[slots])
            & (self.stop_step[slots] == 0)
            & (last >= self.block_add_threshold[slots])
        )

        # Activate, for good, every existing block whose direct predecessor is decoded far enough;
        # the prompt always is.
        ready[:, 0] = True
        ready[:, 1:] |= (ratio[:, :-1] >= self.decoded_token_threshold[slots, None]) & (
            np.arange(1, left.shape[1]) < num_blocks[:, None]
        )

        # From the first position that is not cached to the end of the row.
        start, end = self.cached[slots], prompt_len + num_blocks * length
        count = end - start
        row = np.repeat(rows, count)
        first = np.cumsum(count) - count
        position = np.arange(len(row)) + (start - first)[row]
        token = self.tokens[slots[row], position]
        offset = position - prompt_len[row]
        block_end = (offset // length[row] + 1) * length[row]
        visible = prompt_len[row] + np.where(offset < 0, 0, block_end)
        masked = np.flatnonzero((token == self.mask_id) & (offset >= 0))
        return StepPlan(
            slots, num_blocks, left, ready, start, end, row, position, token, visible, masked
        )

    def commit(self, plan: StepPlan, confidence: NDArray[np.float32], token: Ints) -> Commits:
        """Commit what the forward found and move every row of the plan one step on.

        Args:
            plan: The rows' plan, made since their last step.
            confidence: ``[c]`` probability of ``token``, finite.
            token: ``[c]`` never the mask id.

        Returns:
            What was committed and which rows changed state.
        """
        slots, left, num_blocks = plan.slots, plan.left, plan.num_blocks
        row, position = plan.row[plan.masked], plan.position[plan.masked]
        slot = slots[row]
        block = (position - self.prompt_len[slot]) // self.block_length[slot]

        # Positions of one (row, block) lie together: reduce over each run of them.
        key = row * left.shape[1] + block
        head = np.flatnonzero(_run_starts(key))
        chosen = confidence > self.skip_threshold[slot]
        number = np.add.reduceat(chosen, head, dtype=np.int64)
        # A ready block in which nothing passed commits its best position.
        force = (number == 0) & plan.ready.ravel()[key[head]]
        forced = head[:0]
        if force.any():
            run = _run_starts(key).cumsum() - 1
            best = (confidence == np.maximum.reduceat(confidence, head)[run]) & force[run]
            at_best = np.flatnonzero(best)
            forced = at_best[_run_starts(run[at_best])]  # the first, if several tie
            chosen[forced] = True
        index = np.flatnonzero(chosen)

        slot, token = slot[index], token[index]
        self.tokens[slot, position[index]] = token
        left.ravel()[key[head]] -= number + force
        self.num_steps[slots] += 1
        stop = slot[(token[:, None] == self.stop_ids[slot]).any(1)]
        stop = stop[self.stop_step[stop] == 0]
        self.stop_step[stop] = self.num_steps[stop]

        length = self.block_length[slots]
        finished_before = self.num_finished[slots]
        num_finished = (left != 0).argmax(1)
        self.left[slots], self.ready[slots] = left, plan.ready
        self.num_blocks[slots], self.num_finished[slots] = num_blocks, num_finished
        # Blocks that were finished before this forward ran in it from their final tokens.
        self.cached[slots] = self.prompt_len[slots] + finished_before * length
        may_append = (num_blocks < self.max_blocks[slots]) & (self.stop_step[slots] == 0)
        return Commits(
            index,
            forced,
            (num_finished == num_blocks) & ~may_append,
            num_finished > finished_before,
        )

    def _grow(self, width: int, num_stops: int) -> None:
        """Make room for rows with more blocks or stop ids than any before."""
        slots = len(self.prompt_len)
        if width > self.left.shape[1]:
            extra = width - self.left.shape[1]
            filler = np.repeat(np.maximum(self.block_length, 1)[:, None], extra, 1)
            self.left = np.hstack((self.left, filler))
            self.ready = np.hstack((self.ready, np.zeros((slots, extra), np.bool_)))
        if num_stops > self.stop_ids.shape[1]:
            extra = num_stops - self.stop_ids.shape[1]
            self.stop_ids = np.hstack((self.stop_ids, np.full((slots, extra), -1)))


def _run_starts(key: Ints) -> Bools:
    """Return where each run of equal values begins in a non-empty array."""
    starts = np.empty(len(key), np.bool_)
    starts[0] = True
    np.not_equal(key[1:], key[:-1], out=starts[1:])
    return starts


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64 bits so that neighbouring inputs give unrelated outputs."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform_draws(seed: Ints, position: Ints, step: Ints) -> Floats:
    """Return one uniform number per (request seed, position, the row's own step).

    A counter-based draw: no generator state, so it cannot depend on which rows share a batch, on
    their order, or on the device.

    Args:
        seed: ``[c]`` any int64.
        position: ``[c]`` absolute position in the row.
        step: ``[c]`` steps that the row has made, from 0.

    Returns:
        float64 ``[c]`` in [0, 1), multiples of 2**-53.

    Source: finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), chained over the three counters.
    """
    state = np.zeros(len(seed), np.uint64)
    for word in (seed, position, step):
        state = _mix((state + _GOLDEN) ^ _mix(word.astype(np.uint64) + _GOLDEN))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
