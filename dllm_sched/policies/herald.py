"""Hints at block boundaries: what the engine may fetch while the present block is denoised."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs

from dllm_sched.policies.base import Control
from dllm_sched.request import RequestStatus
from dllm_sched.view import Round

__all__ = ["Prefetch", "PrefetchNextBlock"]


class Prefetch(NamedTuple):
    """Advice in ``StepBatch.hints``: prepare this row's next block while it works on this one."""

    slot: int
    request_id: str
    block: int  #: the block to prepare, from 0; the row now starts the one before it


@attrs.frozen
class PrefetchNextBlock(Control):
    """Tell the engine of each row that starts a block, unless that is its last one.

    An engine whose KV lies in another memory can then select and fetch what the next block will
    attend to while the GPU is busy with this one. A hint comes once, with the first step of the
    block; whoever ignores it loses speed and nothing else.

    O(1) per boundary or join, nothing for steps in between.

    Source:
        "HERALD" (arXiv 2606.21633), from its abstract and second-hand notes: selection once per
        block, overlapped with denoising. That it is a hint at the boundary is our own derivation.
    """

    needs = frozenset({"blocks"})

    def hints(self, state: Any, round: Round) -> tuple[Prefetch, ...]:
        """Return a ``Prefetch`` for each row that joined or crossed into another block."""
        return tuple(
            Prefetch(rv.slot, rv.id, rv.num_blocks_done + 1)
            for rv in (*round.boundaries, *round.joined)
            if rv.status is RequestStatus.RUNNING
            and rv.slot is not None
            and rv.num_blocks_done + 1 < rv.request.max_blocks
        )
