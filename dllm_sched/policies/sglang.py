"""Block-synchronous batches (SGLang before FDFO): rows wait for each other at block boundaries."""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs

from dllm_sched.events import (
    BlockDone,
    RequestFinished,
    RequestJoined,
    RequestPreempted,
    StepPlanned,
)
from dllm_sched.policies.base import ALL, Admission, Composition, Selection, Strategy, Verdict
from dllm_sched.request import RequestView
from dllm_sched.view import Round

__all__ = ["AtCommonBoundary", "BlockSynchronous"]

_EVENTS = (RequestJoined, BlockDone, RequestFinished, RequestPreempted, StepPlanned)
_NOBODY: frozenset[str] = frozenset()


class _Blocks(NamedTuple):
    running: frozenset[str]
    arrived: frozenset[str]  # of them, who has finished the present block
    at_boundary: bool  # all had, and no step has been planned since


class _BlockState(Strategy):
    """Who has finished the present block. A copy of a set at each row's join, boundary, end."""

    observes = _EVENTS

    def init(self) -> _Blocks:
        """Nobody runs."""
        return _Blocks(_NOBODY, _NOBODY, at_boundary=False)

    def observe(self, state: _Blocks, event: Any) -> _Blocks:
        """Follow the rows."""
        running, arrived, at_boundary = state
        if isinstance(event, StepPlanned):
            return state._replace(at_boundary=False) if at_boundary else state
        name = frozenset((event.request_id,))
        if isinstance(event, RequestJoined):
            return state._replace(running=running | name)
        if isinstance(event, BlockDone):
            running, arrived = running | name, arrived | name
        elif name <= running:
            running, arrived = running - name, arrived - name
        else:
            return state  # it waited
        if arrived == running:
            return _Blocks(running, _NOBODY, bool(arrived))  # in step, or nobody is left
        return _Blocks(running, arrived, at_boundary)


@attrs.frozen
class AtCommonBoundary(_BlockState, Admission):
    """Refill only when every row has finished its block, or none runs.

    Source:
        SGLang's block-synchronous mode, from its public pull requests.
    """

    needs = frozenset({"blocks"})

    def admit(self, state: _Blocks, rv: RequestView, round: Round) -> Verdict:
        """Admit at the common boundary. O(1)."""
        return Verdict.ADMIT if state.at_boundary or not round.view.num_running else Verdict.STOP


@attrs.frozen
class BlockSynchronous(_BlockState, Composition):
    """A row that has finished its block sits out until every other has, too.

    Combine with ``AtCommonBoundary``. A row that an engine never reports at a boundary is waited
    for until it ends. O(1) while nobody sits out, else O(rows) per step.

    Source:
        SGLang's block-synchronous mode, from its public pull requests.
    """

    needs = frozenset({"blocks", "rows"})

    def select(self, state: _Blocks, round: Round) -> Selection:
        """Return the rows inside a block."""
        if not state.arrived:
            return ALL
        return [rv for rv in round.rows if rv.id not in state.arrived] or ALL
