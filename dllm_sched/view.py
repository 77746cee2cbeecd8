"""What policies see of the scheduler: O(1) counts, and the round being decided."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from dllm_sched.errors import PolicyError
from dllm_sched.request import Phase, RequestView

__all__ = ["BlockedBy", "Lane", "Round", "SchedulerView"]

Lane = tuple[Hashable, Hashable]
"""``(request_class, batch_key)``."""

_NO_COUNTS: Mapping[Lane, int] = MappingProxyType({})


class SchedulerView(NamedTuple):
    """The counts a policy may decide on; each kept in O(1), frozen at the start of a round."""

    now: float  #: seconds
    draining: bool  #: no more requests come: let the leftovers go
    num_waiting: int  #: waiting and preempted; for ``due``: of the batch_key asked about
    num_running: int  #: rows that hold a slot
    max_num_seqs: int
    free_slots: int
    num_pages: int | None  #: None: no memory limit
    free_pages: int | None
    tokens_in_rows: int  #: sum of the running rows' ``max_tokens``
    oldest_arrival_at: float
    """Arrival of the oldest waiting request, seconds, ``inf`` if none; for ``due``: of the
    batch_key asked about. Kept only for timeout strategies."""
    batch_key: Hashable = None  #: only for ``due``: the key asked about
    max_length: int = 0  #: longest ``max_total_tokens`` among rows; needs ``max_length``
    waiting_by_lane: Mapping[Lane, int] = _NO_COUNTS  #: needs ``lanes``
    running_by_lane: Mapping[Lane, int] = _NO_COUNTS  #: needs ``lanes``
    running_by_phase: Mapping[Phase, int] = MappingProxyType({})  #: counted when looked at


class BlockedBy(enum.Enum):
    """Why the head of the queue stays where it is."""

    POLICY = "policy"
    SLOTS = "slots"
    MEMORY = "memory"


class Round:
    """One admission round: the frozen view, who joined so far, and what happened before it.

    Strategies read it; only the scheduler writes it.
    """

    __slots__ = (
        "_rows",
        "_youngest",
        "blocked",
        "blocked_by",
        "boundaries",
        "joined",
        "joined_tokens",
        "num_joined",
        "num_preempted",
        "num_retired",
        "num_steps",
        "view",
    )

    def __init__(
        self,
        view: SchedulerView,
        *,
        num_steps: int,
        boundaries: Sequence[RequestView],
        num_retired: int,
        num_preempted: int,
        rows: Callable[[], Sequence[RequestView]] | None,
        youngest: Callable[[], Iterator[RequestView]],
    ) -> None:
        self.view = view
        self.num_steps = num_steps  #: steps completed since the last round
        self.boundaries = boundaries  #: rows that crossed a block boundary since; needs ``blocks``
        self.num_retired = num_retired  #: rows that left since
        self.num_preempted = num_preempted  #: of them those sent back, in this very call included
        self.joined: list[RequestView] = []  #: admitted in this round, in order
        self.num_joined = 0
        self.joined_tokens = 0  #: sum of the joined rows' ``max_tokens``
        self.blocked: RequestView | None = None  #: the head that stays
        self.blocked_by: BlockedBy | None = None
        self._rows = rows
        self._youngest = youngest

    @property
    def rows(self) -> Sequence[RequestView]:
        """Every running row, in slot order. O(rows); needs ``rows``.

        Raises:
            PolicyError: If the policy did not declare that it needs rows.
        """
        if self._rows is None:
            raise PolicyError(
                'round.rows walks every row: declare needs = frozenset({"rows"}) on the strategy'
            )
        return self._rows()

    def youngest_first(self) -> Iterator[RequestView]:
        """Running rows, last admitted first. O(1) for each one taken.

        Only for ``victims``; elsewhere the order of admission is not kept and nothing comes.
        """
        return self._youngest()
