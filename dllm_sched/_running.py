"""The running rows: cohorts that step together, grouped by batch_key."""

from __future__ import annotations

import math
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Any

from dllm_sched.batch import Row
from dllm_sched.policies.base import ALL
from dllm_sched.request import Phase, RequestView

__all__ = ["Cohort", "KeyRows"]

_INF = math.inf
_PHASES = tuple(Phase)


class Cohort:
    """Running rows of one batch_key and phase, and the clock of their common steps."""

    __slots__ = ("_tuple", "clock", "limits", "phase", "rows", "views")

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.clock = 0
        self.rows: list[Row] = []
        self.views: list[RequestView] = []
        self.limits: list[tuple[float, int, RequestView]] = []  # heap: clock at which a cap is met
        self._tuple: tuple[Row, ...] | None = ()

    def tuple(self) -> tuple[Row, ...]:
        rows = self._tuple
        if rows is None:
            rows = self._tuple = tuple(self.rows)
        return rows

    def add(self, view: RequestView, row: Row) -> None:
        view._cohort = self
        view._index = len(self.rows)
        view._steps_base -= self.clock
        self.rows.append(row)
        self.views.append(view)
        self._tuple = None
        self.push_limit(view)

    def push_limit(self, view: RequestView) -> None:
        """Note at which clock a row meets its step cap. O(log n), nothing without a cap."""
        if view._step_limit != _INF:
            heappush(self.limits, (view._step_limit - view._steps_base, view._sequence, view))

    def remove(self, view: RequestView) -> Row:
        """Take a row out; the last one fills its place, so that it costs O(1)."""
        rows, views, index = self.rows, self.views, view._index
        row = rows[index]
        last_row, last_view = rows.pop(), views.pop()
        if last_view is not view:
            rows[index] = last_row
            views[index] = last_view
            last_view._index = index
        view._steps_base += self.clock
        view._cohort = None
        view._index = -1
        self._tuple = None
        return row

    def replace(self, view: RequestView, row: Row) -> None:
        self.rows[view._index] = row
        self._tuple = None

    def next_limit(self) -> float:
        """The clock at which the next step cap is met."""
        limits = self.limits
        while limits:
            clock, _, view = limits[0]
            if view._cohort is self and view._step_limit - view._steps_base == clock:
                return clock
            heappop(limits)
        return _INF


class KeyRows:
    """The running rows of one batch_key."""

    __slots__ = ("batch_key", "cohorts", "size")

    def __init__(self, batch_key: Hashable) -> None:
        self.batch_key = batch_key
        self.cohorts: dict[Phase, Cohort] = {}
        self.size = 0

    def select(self, phases: Any) -> tuple[tuple[Row, ...], tuple[Cohort, ...]]:
        """Rows and cohorts of the phases (``ALL`` for every one): at most one copy."""
        chosen = tuple(
            cohort
            for phase in _PHASES
            if (cohort := self.cohorts.get(phase)) is not None
            and cohort.rows
            and (phases is ALL or phase in phases)
        )
        if len(chosen) == 1:
            return chosen[0].tuple(), chosen
        rows: tuple[Row, ...] = ()
        for cohort in chosen:
            rows += cohort.tuple()
        return rows, chosen
