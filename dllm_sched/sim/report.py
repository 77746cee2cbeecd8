"""What a simulation found, as one object: figures, a table, JSON and CSV."""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from dllm_sched.request import FinishReason
from dllm_sched.scheduler import Counts, Stats

__all__ = ["Result", "table"]


@attrs.frozen(kw_only=True)
class Result:
    """One simulated run.

    Attributes:
        policy: Its name.
        max_num_seqs: Slots.
        duration_s: Virtual seconds from 0 to the last event.
        busy_s: Of them, inside steps.
        counts: Who was where when it ended.
        stats: The scheduler's totals.
        reasons: Requests by finish reason.
        num_tokens: Tokens of the requests that finished by themselves.
        unstable: Arrivals outran the engine; a stopped run is taken for that unless its arrival
            rate is known to be below the capacity.
        stopped: More than ``max_waiting`` waited and the run was broken off.
        latency_s: Arrival to finish of every request that finished by itself, seconds, in order
            of finish.
        wait_s: Of it, before the first admission.
        steps: Denoising steps of each.
    """

    policy: str
    max_num_seqs: int
    duration_s: float
    busy_s: float
    counts: Counts
    stats: Stats
    reasons: Mapping[FinishReason, int]
    num_tokens: int
    unstable: bool
    stopped: bool = False
    latency_s: array[float] = attrs.field(repr=False)
    wait_s: array[float] = attrs.field(repr=False)
    steps: array[int] = attrs.field(repr=False)

    @property
    def num_requests(self) -> int:
        """Requests that finished by themselves."""
        return len(self.latency_s)

    @property
    def requests_per_s(self) -> float:
        """Throughput over the whole duration."""
        return self.num_requests / self.duration_s if self.duration_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second over the whole duration."""
        return self.num_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def occupancy(self) -> float:
        """Mean share of the slots that took part in a step, 0 to 1."""
        steps = self.stats.num_steps
        return self.stats.row_steps / (steps * self.max_num_seqs) if steps else 0.0

    def percentile(self, q: float, of: str = "latency_s") -> float:
        """Return a percentile with linear interpolation; nan if nobody finished.

        Args:
            q: 0 to 100.
            of: ``latency_s``, ``wait_s`` or ``steps``.
        """
        values = getattr(self, of)
        return float(np.percentile(np.asarray(values), q)) if len(values) else math.nan

    def mean(self, of: str = "latency_s") -> float:
        """Return a mean; nan if nobody finished. ``of`` as of ``percentile``."""
        values = getattr(self, of)
        return float(np.mean(np.asarray(values))) if len(values) else math.nan

    def figures(self) -> dict[str, Any]:
        """Return the figures by name, ready for JSON (nan and inf become None)."""
        figures: dict[str, Any] = {
            "policy": self.policy,
            "num_requests": self.num_requests,
            "requests_per_s": self.requests_per_s,
            "tokens_per_s": self.tokens_per_s,
            "latency_mean_s": self.mean(),
            "latency_p50_s": self.percentile(50),
            "latency_p90_s": self.percentile(90),
            "latency_p99_s": self.percentile(99),
            "wait_mean_s": self.mean("wait_s"),
            "steps_mean": self.mean("steps"),
            "occupancy": self.occupancy,
            "busy_share": self.busy_s / self.duration_s if self.duration_s else 0.0,
            "wasted_row_steps": self.stats.wasted_row_steps,
            "num_steps": self.stats.num_steps,
            "num_preempted": self.stats.num_preempted,
            "num_rejected": self.counts.rejected,
            "unstable": self.unstable,
            "stopped": self.stopped,
            "duration_s": self.duration_s,
        }
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in figures.items()
        }

    def to_json(self) -> str:
        """Return ``figures`` as one JSON object."""
        return json.dumps(self.figures(), allow_nan=False)

    def write_csv(self, path: str | Path) -> None:
        """Write one line per request that finished: latency_s, wait_s, steps."""
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("latency_s", "wait_s", "steps"))
            writer.writerows(zip(self.latency_s, self.wait_s, self.steps, strict=True))


_COLUMNS = (
    ("requests/s", "requests_per_s", "{:.4g}"),
    ("tokens/s", "tokens_per_s", "{:.4g}"),
    ("mean s", "latency_mean_s", "{:.4g}"),
    ("p50 s", "latency_p50_s", "{:.4g}"),
    ("p99 s", "latency_p99_s", "{:.4g}"),
    ("wait s", "wait_mean_s", "{:.4g}"),
    ("occupancy", "occupancy", "{:.1%}"),
    ("waste", "wasted_row_steps", "{:,}"),
    ("preempted", "num_preempted", "{:,}"),
)


def table(results: Sequence[Result], *, best_mean_s: float | None = None) -> str:
    """Return a table, one line per result.

    Args:
        results: In the order of the lines.
        best_mean_s: A lower bound of the mean latency; adds a column with the ratio to it,
            for runs that are neither unstable nor stopped.
    """
    heads = ["policy", *(head for head, _, _ in _COLUMNS)]
    if best_mean_s is not None:
        heads.append("mean / bound")
    lines = [heads]
    for result in results:
        figures = result.figures()
        state = " (unstable)" if result.unstable else " (stopped)" if result.stopped else ""
        cells = [result.policy + state]
        for _, name, form in _COLUMNS:
            cells.append("-" if figures[name] is None else form.format(figures[name]))
        if best_mean_s is not None:
            cells.append("-" if state else f"{result.mean() / best_mean_s:.3f}")
        lines.append(cells)
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
