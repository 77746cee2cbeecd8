"""The running rows: who holds which slot and pages, and cohorts that step together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from dllm_sched._lifecycle import AFTER_ADMIT
from dllm_sched._queue import KeyQueue
from dllm_sched.batch import Knobs, Row
from dllm_sched.capacity import Capacity
from dllm_sched.errors import InvariantError
from dllm_sched.policies.base import ALL
from dllm_sched.request import Phase, RequestStatus, RequestView
from dllm_sched.view import Lane

__all__ = ["STANDING", "Cohort", "KeyRows", "RunningSet", "StepClock"]

_INF = math.inf
_PHASES = tuple(Phase)
_RUNNING = RequestStatus.RUNNING
_SMALL = 64  # lists below this size are not worth compacting
_new = tuple.__new__  # builds a NamedTuple in half the time of its own constructor


class StepClock:
    """Counts steps."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


STANDING = StepClock()
"""The clock of cohorts that take part in no step; it never moves."""


class Cohort:
    """Running rows of one batch_key and phase: they have all taken part in the same steps.

    Its step count follows the clock of all steps while it takes part in them, and a clock that
    stands still while it does not. So a step costs nothing per cohort, let alone per row.
    """

    __slots__ = ("_frozen", "clock", "key_rows", "limits", "offset", "phase", "rows")

    def __init__(self, key_rows: KeyRows, phase: Phase) -> None:
        self.key_rows = key_rows
        self.phase = phase
        self.clock = STANDING
        self.offset = 0
        self.rows: list[Row] = []
        self.limits: list[tuple[float, int, RequestView]] = []  # heap: steps at which a cap is met
        self._frozen: tuple[Row, ...] | None = ()

    @property
    def steps(self) -> int:
        """Steps that this cohort has taken part in, from an arbitrary start."""
        return self.offset + self.clock.steps

    def follow(self, clock: StepClock) -> None:
        """Count the steps of another clock from here on. O(1)."""
        self.offset += self.clock.steps - clock.steps
        self.clock = clock

    def frozen(self) -> tuple[Row, ...]:
        """The rows; the same object until one changes."""
        rows = self._frozen
        if rows is None:
            rows = self._frozen = tuple(self.rows)
        return rows

    def replace(self, view: RequestView, row: Row) -> None:
        """Put another row value in a row's place. O(1)."""
        self.rows[view._index] = row
        self._frozen = None

    def push_limit(self, view: RequestView) -> None:
        """Note after how many steps a row meets its cap. O(log n)."""
        limits = self.limits
        heappush(limits, (view._step_limit - view._steps_base, view._sequence, view))
        if len(limits) > _SMALL and len(limits) > 2 * len(self.rows):
            self.limits = [entry for entry in limits if self._is_live(entry)]
            heapify(self.limits)

    def _is_live(self, entry: tuple[float, int, RequestView]) -> bool:
        steps, _, view = entry
        return view._cohort is self and view._step_limit - view._steps_base == steps

    def next_limit(self) -> float:
        """The ``steps`` at which the next cap is met, ``inf`` if none. Amortised O(log n)."""
        limits = self.limits
        while limits:
            if self._is_live(limits[0]):
                return limits[0][0]
            heappop(limits)
        return _INF


class KeyRows:
    """The running rows of one batch_key."""

    __slots__ = ("batch_key", "cohorts", "only")

    def __init__(self, batch_key: Hashable) -> None:
        self.batch_key = batch_key
        self.cohorts: dict[Phase, Cohort] = {}  # in the order of the phases
        self.only: tuple[Cohort, ...] = ()  # the cohort, while there is but one

    def open_cohort(self, phase: Phase) -> Cohort:
        """Make the cohort of a phase that had no rows yet."""
        cohorts = {**self.cohorts, phase: Cohort(self, phase)}
        self.cohorts = {one: cohorts[one] for one in _PHASES if one in cohorts}
        self.only = tuple(cohorts.values()) if len(cohorts) == 1 else ()
        return self.cohorts[phase]

    def select(self, phases: Any) -> tuple[tuple[Row, ...], tuple[Cohort, ...]]:
        """Rows and cohorts of some phases (``ALL``: every one), with at most one copy."""
        if phases is ALL and self.only:
            return self.only[0].frozen(), self.only
        chosen: list[Cohort] = []
        for phase, cohort in self.cohorts.items():
            if cohort.rows and (phases is ALL or phase in phases):
                chosen.append(cohort)
        if len(chosen) == 1:
            return chosen[0].frozen(), (chosen[0],)
        rows: tuple[Row, ...] = ()
        for cohort in chosen:
            rows += cohort.frozen()
        return rows, tuple(chosen)


class PhaseCounts(Mapping[Phase, int]):
    """Rows per phase, counted when somebody looks. O(batch_keys) a look."""

    __slots__ = ("_keys",)

    def __init__(self, keys: dict[Hashable, KeyRows]) -> None:
        self._keys = keys

    def __getitem__(self, phase: Phase) -> int:
        if not isinstance(phase, Phase):
            raise KeyError(phase)
        cohorts = (key_rows.cohorts.get(phase) for key_rows in self._keys.values())
        return sum(len(cohort.rows) for cohort in cohorts if cohort is not None)

    def __iter__(self) -> Iterator[Phase]:
        return iter(_PHASES)

    def __len__(self) -> int:
        return len(_PHASES)


class RunningSet:
    """Slots, pages and cohorts. Knows no queue, no policy and no time."""

    __slots__ = (
        "_by_lane",
        "_joins",
        "_keep_joins",
        "_keep_lanes",
        "_keep_lengths",
        "_keeps_counts",
        "_lengths",
        "_served",
        "ahead",
        "by_phase",
        "capacity",
        "clock",
        "free_pages",
        "free_slots",
        "keys",
        "num_joined",
        "size",
        "slots",
        "stepping",
        "tokens",
        "turns",
        "untold",
    )

    def __init__(self, capacity: Capacity, max_in_flight: int = 1) -> None:
        self.capacity = capacity
        self.ahead = max_in_flight - 1  # steps that may be issued before a row's state is known
        self.clock = StepClock()  # steps completed
        self.slots: list[RequestView | None] = [None] * capacity.max_num_seqs
        self.free_slots = list(range(capacity.max_num_seqs - 1, -1, -1))  # the lowest goes first
        self.free_pages = capacity.num_pages or 0
        # rows not yet handed out in a batch, in order; whether the engine knows the slot even so
        self.untold: dict[RequestView, bool] = {}
        self.size = 0
        self.tokens = 0  # sum of the rows' max_tokens
        self.num_joined = 0  # ever
        self.keys: dict[Hashable, KeyRows] = {}
        self.by_phase = PhaseCounts(self.keys)
        self.turns: deque[KeyRows] = deque()
        self._served: KeyRows | None = None
        self.stepping: tuple[Cohort, ...] = ()  # the cohorts that follow the clock
        self._keeps_counts = False  # any of the three below
        self._keep_joins = False
        self._keep_lanes = False
        self._keep_lengths = False
        self._joins: list[tuple[int, RequestView]] = []  # in order of admission
        self._by_lane: dict[Lane, int] = {}
        self._lengths: list[tuple[int, int, RequestView]] = []  # heap, longest first

    # --- rows ---------------------------------------------------------------------------------

    def join(
        self,
        views: Sequence[RequestView],
        now: float,
        flying: int = 0,
    ) -> None:
        """Give each a slot, pages and a place in its cohort, in order. O(log n) for each.

        Args:
            views: Who.
            now: Seconds.
            flying: Steps in flight, which they are not in.
        """
        slots, free_slots, untold = self.slots, self.free_slots, self.untold
        number, tokens = self.num_joined, self.tokens
        cohort: Cohort | None = None
        for view in views:
            request, phase = view.request, view._phase
            if (
                cohort is None
                or phase is not cohort.phase
                or request.batch_key is not cohort.key_rows.batch_key
            ):
                cohort = self._cohort(request.batch_key, phase)
                cohort._frozen = None
                rows = cohort.rows
                steps = cohort.offset + cohort.clock.steps + flying
            slot = free_slots.pop()
            slots[slot] = view
            untold[view] = False
            view._status = AFTER_ADMIT[view._status]
            if view._admitted_at is None:
                view._admitted_at = now
            view._lane = view._entry = None
            view._slot = slot
            view._join_number = number
            number += 1
            view._cohort = cohort
            view._index = len(rows)
            view._steps_base -= steps
            max_tokens = view._max_tokens
            tokens += max_tokens
            rows.append(_new(Row, (slot, request, phase, max_tokens, view._knobs, view._resumed)))
            if view._step_limit != _INF:
                cohort.push_limit(view)
        self.size += len(views)
        self.num_joined = number
        self.tokens = tokens
        if self.capacity.memory is not None:
            for view in views:
                self.grow(view, self.pages(view))
        if self._keeps_counts:
            for view in views:
                self._count(view)

    def _cohort(self, batch_key: Hashable, phase: Phase) -> Cohort:
        """The cohort of a batch_key and phase, made if there is none."""
        key_rows = self.keys.get(batch_key)
        if key_rows is None:
            key_rows = self.keys[batch_key] = KeyRows(batch_key)
            self.turns.append(key_rows)
        return key_rows.cohorts.get(phase) or key_rows.open_cohort(phase)

    def leave(self, view: RequestView) -> None:
        """Take a row out of its cohort; slot and pages stay until ``free``. O(1).

        The cohort's last row fills its place.
        """
        cohort: Cohort = view._cohort
        rows = cohort.rows
        last = rows.pop()
        index = view._index
        if index != len(rows):
            rows[index] = last
            self.slots[last[0]]._index = index  # type: ignore[union-attr]  # whoever runs has one
        elif index == 0:
            self._close_key_if_empty(cohort.key_rows)
        view._steps_base += cohort.offset + cohort.clock.steps
        view._cohort = cohort._frozen = None
        view._given = not self.untold or self.untold.pop(view, True)
        self.size -= 1
        self.tokens -= view._max_tokens
        if self._keep_lanes:
            lane = lane_of(view)
            left = self._by_lane[lane] - 1
            if left:
                self._by_lane[lane] = left
            else:
                del self._by_lane[lane]

    def _close_key_if_empty(self, key_rows: KeyRows) -> None:
        if not any(cohort.rows for cohort in key_rows.cohorts.values()):
            del self.keys[key_rows.batch_key]
            self.turns.remove(key_rows)

    def free(self, view: RequestView) -> int:
        """Take slot and pages back from a row that left. O(1)."""
        slot: int = view._slot  # type: ignore[assignment]  # whoever runs has one
        self.slots[slot] = view._slot = None
        if slot < self.capacity.max_num_seqs:
            self.free_slots.append(slot)
        if view._num_pages:
            self.grow(view, -view._num_pages)
        return slot

    def move(self, view: RequestView, phase: Phase) -> None:
        """Put a row into another phase. O(1), O(log n) with a step cap."""
        cohort: Cohort = view._cohort
        key_rows = cohort.key_rows
        other = key_rows.cohorts.get(phase) or key_rows.open_cohort(phase)
        rows = other.rows
        if not rows and cohort.clock is self.clock and other.clock is not self.clock:
            other.follow(self.clock)  # for a step that is in flight already
            self.stepping += (other,)
        tokens = self.capacity.max_tokens(view.request, phase)
        told = self.untold.get(view)
        row: Row = _new(Row, (view._slot, view.request, phase, tokens, view._knobs, view._resumed))
        rows.append(row)  # before it leaves, so that its batch_key stays open
        self.leave(view)
        if told is not None:
            self.untold[view] = told
        self.size += 1
        self.tokens += tokens
        if self._keep_lanes:
            lane = lane_of(view)
            self._by_lane[lane] = self._by_lane.get(lane, 0) + 1
        view._max_tokens = tokens
        view._phase = phase
        view._cohort = other
        view._index = len(rows) - 1
        view._steps_base -= other.offset + other.clock.steps
        other._frozen = None
        if view._step_limit != _INF:
            other.push_limit(view)

    def advance(self, view: RequestView) -> None:
        """Count a step that a row was to sit out. O(log n)."""
        view._steps_base += 1
        if view._step_limit != _INF:
            cohort_of(view).push_limit(view)

    def set_knobs(self, view: RequestView, knobs: Knobs) -> None:
        """Give a row other knobs. O(1)."""
        view._knobs = knobs
        cohort_of(view).replace(view, self._row(view))

    def _row(self, view: RequestView) -> Row:
        row: Row = _new(
            Row,
            (
                view._slot,
                view.request,
                view._phase,
                view._max_tokens,
                view._knobs,
                view._resumed,
            ),
        )
        return row

    # --- pages --------------------------------------------------------------------------------

    def pages(self, view: RequestView) -> int:
        """Pages that a row must hold before the next step is issued. O(1).

        A step issued before the last one's outcome is known may write one block further.
        """
        memory, request = self.capacity.memory, view.request
        if memory is None:
            return 0
        tokens = view._kv_tokens or request.prompt_len
        return memory.pages(request, tokens + self.ahead * request.block_length)

    def lacks(self, view: RequestView) -> int:
        """Pages that a row must get before its next step. O(1)."""
        return max(0, self.pages(view) - view._num_pages)

    def grow(self, view: RequestView, pages: int) -> None:
        """Give a row more pages (less than 0: take them back). O(1)."""
        self.free_pages -= pages
        view._num_pages += pages

    def set_capacity(self, capacity: Capacity) -> None:
        """Change the limits; rows above a smaller one stay. O(slots)."""
        self.free_pages += (capacity.num_pages or 0) - (self.capacity.num_pages or 0)
        self.capacity = capacity
        self.slots.extend([None] * (capacity.max_num_seqs - len(self.slots)))
        slots = range(capacity.max_num_seqs - 1, -1, -1)
        self.free_slots = [slot for slot in slots if self.slots[slot] is None]

    # --- counts that only some policies need -----------------------------------------------------

    def keep(self, *, joins: bool, lanes: bool, lengths: bool) -> None:
        """Choose which counts are kept from now on, and take them anew. O(rows log rows)."""
        self._keep_joins = joins
        self._keep_lanes = lanes
        self._keep_lengths = lengths
        self._keeps_counts = joins or lanes or lengths
        self._joins = []
        self._by_lane = {}
        self._lengths = []
        for view in sorted(self.rows(), key=lambda view: view._join_number):
            self._count(view)

    def _count(self, view: RequestView) -> None:
        if self._keep_joins:
            joins = self._joins
            joins.append((view._join_number, view))
            if len(joins) > _SMALL and len(joins) > 2 * self.size:
                self._joins = [join for join in joins if _is_join(join)]
        if self._keep_lanes:
            lane = lane_of(view)
            self._by_lane[lane] = self._by_lane.get(lane, 0) + 1
        if self._keep_lengths:
            lengths = self._lengths
            heappush(lengths, (-view.request.max_total_tokens, view._join_number, view))
            if len(lengths) > _SMALL and len(lengths) > 2 * self.size:
                self._lengths = [entry for entry in lengths if _is_join(entry[1:])]
                heapify(self._lengths)

    def by_lane(self) -> dict[Lane, int]:
        """Rows per lane. O(lanes)."""
        return dict(self._by_lane)

    def longest(self) -> int:
        """The longest ``max_total_tokens`` among the rows, 0 if none. Amortised O(log n)."""
        lengths = self._lengths
        while lengths:
            if _is_join(lengths[0][1:]):
                return -lengths[0][0]
            heappop(lengths)
        return 0

    def youngest(self) -> Iterator[RequestView]:
        """Rows, last admitted first. O(1) for each one taken."""
        joins = self._joins
        while joins and not _is_join(joins[-1]):
            joins.pop()
        return (join[1] for join in reversed(joins) if _is_join(join))

    def rows(self) -> list[RequestView]:
        """Every running row, in slot order. O(slots)."""
        return [view for view in self.slots if view is not None and view._status is _RUNNING]

    # --- steps --------------------------------------------------------------------------------

    def next_in_turn(self) -> KeyRows:
        """The batch_key whose turn it is: not the one that was served last, if another has rows."""
        turns = self.turns
        if len(turns) > 1 and turns[0] is self._served:
            turns.rotate(-1)
        return turns[0]

    def take_turn(
        self, phases: Any, chosen: tuple[RequestView, ...] | None
    ) -> tuple[KeyRows | None, tuple[Row, ...], tuple[Cohort, ...], tuple[RequestView, ...] | None]:
        """The selected rows of the first batch_key in turn that has any.

        Args:
            phases: ``ALL`` or a set of phases; not looked at if rows were chosen one by one.
            chosen: Rows, or None.

        Returns:
            (whose turn, rows, their cohorts, those of ``chosen``). O(batch_keys), plus
            O(``chosen``).
        """
        self.next_in_turn()
        for key_rows in self.turns:
            if chosen is None:
                rows, cohorts = key_rows.select(phases)
                if rows:
                    return key_rows, rows, cohorts, None
            else:
                key = key_rows.batch_key
                mine = tuple([view for view in chosen if view.request.batch_key == key])
                if mine:
                    rows = tuple([cohort_of(view).rows[view._index] for view in mine])
                    return key_rows, rows, (), mine
        return None, (), (), chosen

    def serve(self, key_rows: KeyRows, cohorts: tuple[Cohort, ...]) -> None:
        """Note whose turn it was, and who steps. The next in line is first. O(batch_keys)."""
        turns = self.turns
        if turns[0] is not key_rows:
            turns.rotate(-turns.index(key_rows))
        self._served = key_rows
        if cohorts is not self.stepping and cohorts != self.stepping:
            for cohort in self.stepping:
                cohort.follow(STANDING)
            for cohort in cohorts:
                cohort.follow(self.clock)
            self.stepping = cohorts

    def steps_as_one(self, waiting: Sequence[KeyQueue]) -> bool:
        """Whether every row is in the steps in flight, and whoever waits is of the same batch_key.

        O(``waiting``), which are the batch_keys.
        """
        if not self.turns:
            return len(waiting) <= 1
        key_rows = self.turns[0]
        return (
            len(self.turns) == 1
            and all(key.batch_key == key_rows.batch_key for key in waiting)
            and all(
                cohort.clock is self.clock for cohort in key_rows.cohorts.values() if cohort.rows
            )
        )

    def at_limit(self) -> Iterator[RequestView]:
        """Rows that met their step cap; the caller takes each out before it asks on."""
        for key_rows in list(self.keys.values()):
            for cohort in list(key_rows.cohorts.values()):
                while cohort.limits and cohort.next_limit() <= cohort.steps:
                    yield cohort.limits[0][2]

    def steps_to_limit(self) -> float:
        """Steps before a row can meet its cap, at least. O(batch_keys), amortised."""
        return min(
            (
                cohort.next_limit() - cohort.steps
                for key_rows in self.keys.values()
                for cohort in key_rows.cohorts.values()
                if cohort.limits
            ),
            default=_INF,
        )

    def set_limits(self, limits: Iterable[tuple[RequestView, float]]) -> None:
        """Give rows other step caps. O(rows log rows)."""
        for view, steps in limits:
            view._step_limit = steps
            if steps != _INF:
                cohort_of(view).push_limit(view)


def lane_of(view: RequestView) -> Lane:
    """The lane of a request when classes are told apart."""
    return (view.request.request_class, view.request.batch_key)


def cohort_of(view: RequestView) -> Cohort:
    """The cohort a running request steps with."""
    cohort = view._cohort
    if not isinstance(cohort, Cohort):
        raise InvariantError(f"request {view.request.id!r} ({view._status.value}) runs nowhere")
    return cohort


def _is_join(join: tuple[int, RequestView]) -> bool:
    number, view = join
    return view._status is _RUNNING and view._join_number == number
