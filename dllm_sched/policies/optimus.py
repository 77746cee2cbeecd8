"""Chunk width by load (Optimus)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from dllm_sched.batch import Knobs
from dllm_sched.errors import ConfigError
from dllm_sched.policies.base import Control
from dllm_sched.theory._check import items, positive, whole
from dllm_sched.view import SchedulerView

__all__ = ["ChunkWidth"]


def _widths(widths: Sequence[int]) -> tuple[int, ...]:
    found = items("widths", widths)
    for width in found:
        whole(**{"a width": width})
    if not found or sorted(set(found)) != list(found):
        raise ConfigError(f"ChunkWidth: widths must be ascending and at least one, got {widths!r}")
    return found


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    return items("committed", values)


def _table(latency_s: Mapping[int, Sequence[float]]) -> dict[int, tuple[float, ...]]:
    if not isinstance(latency_s, Mapping) or not latency_s:
        raise ConfigError(
            f"ChunkWidth: latency_s must map rows to seconds per width, got {latency_s!r}"
        )
    whole(**{f"rows {rows!r} of latency_s": rows for rows in latency_s})
    return {rows: items("latency_s of some rows", latency_s[rows]) for rows in sorted(latency_s)}


@attrs.frozen
class ChunkWidth(Control):
    """The width at which a row commits the most tokens a second, as a knob of the batch.

    ``argmax over widths of committed(width) / latency(rows, width)``: wide chunks while a step
    costs the same whatever its tokens, narrow ones once it does not. The table's entry is the
    least that holds the rows of the batch, or its last. Asked when somebody joins or leaves;
    O(log n) for n entries, whose best widths are found beforehand.

    Args:
        widths: Tokens, ascending, >= 1.
        committed: Tokens that a row commits in a step, mean, per width, > 0.
        latency_s: Rows of a batch -> seconds of a step per width, > 0.
        knob: Name of the knob.

    Attributes:
        best: Rows of a batch -> the width for it.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        "Optimus" (arXiv 2605.24832), second hand: the table and the argmax. The paper estimates the
        committed tokens while it serves; here they are given. Of equal widths the narrower: ours.
    """

    widths: tuple[int, ...] = attrs.field(converter=_widths)
    committed: tuple[float, ...] = attrs.field(converter=_numbers)
    latency_s: Mapping[int, Sequence[float]] = attrs.field(converter=_table, hash=False)
    knob: str = "chunk_width"
    best: Mapping[int, int] = attrs.field(init=False, hash=False, eq=False)
    _rows: tuple[int, ...] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.knob, str) or not self.knob:
            raise ConfigError(f"ChunkWidth: knob must be a non-empty str, got {self.knob!r}")
        for name, values in (
            ("committed", self.committed),
            *((f"latency_s[{rows}]", row) for rows, row in self.latency_s.items()),
        ):
            if len(values) != len(self.widths):
                raise ConfigError(
                    f"ChunkWidth: {name} must have a value per width, {len(self.widths)}, got "
                    f"{len(values)}"
                )
            for value in values:
                positive(**{f"ChunkWidth: each of {name}": value})
        best = {rows: self._best(row) for rows, row in self.latency_s.items()}
        object.__setattr__(self, "best", best)
        object.__setattr__(self, "_rows", tuple(best))

    def _best(self, latency_s: Sequence[float]) -> int:
        rates = [tokens / each for tokens, each in zip(self.committed, latency_s, strict=True)]
        return self.widths[rates.index(max(rates))]

    def batch_knobs(self, state: Any, view: SchedulerView) -> tuple[Knobs, float]:
        """Return the width for the rows there are."""
        rows = self._rows
        held = rows[min(bisect_left(rows, view.num_running), len(rows) - 1)]
        return {self.knob: self.best[held]}, math.inf
