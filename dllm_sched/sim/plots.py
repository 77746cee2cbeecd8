"""Pictures of runs, for people who have not seen the code. Needs matplotlib, the extra ``plot``.

Each function draws one figure and returns it; ``save`` writes it. Colours are told apart by
colour-blind readers and on paper (each has a marker, line style or hatch of its own, too). The
``caption`` says which workload, service and seed: pass what your reader needs to run it again.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dllm_sched.errors import ConfigError
from dllm_sched.sim.recording import Sample, Span, StepHistogram
from dllm_sched.sim.report import Result
from dllm_sched.sim.tuning import Tried, Tuning
from dllm_sched.theory import congestion
from dllm_sched.theory._check import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "congestion_cycle",
    "latency_against_load",
    "queue_and_memory",
    "run",
    "save",
    "slot_timeline",
    "step_histogram",
    "tuning_frontier",
]

# Okabe and Ito's palette, the yellow left out: it is too pale on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = "osD^vPX"
_MOST_LINES = 5  # of a caption; more would leave no room for the picture
_WHY = {
    "eos": (_COLOURS[0], "", "finished"),
    "length": (_COLOURS[4], "", "token budget used"),
    "max_steps": (_COLOURS[5], "//", "step cap"),
    "deadline": (_COLOURS[1], "xx", "deadline passed"),
    "preempted": (_COLOURS[3], "\\\\", "sent back to the queue"),
    "running": ("#BBBBBB", "", "still running"),
}
_OTHER = ("#666666", "..", "cancelled or failed")


def _figure(width: float, height: float, title: str, caption: str) -> Figure:
    """Return an empty figure with title and caption; the rest is laid out between them."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'dllm-sched[plot]'") from error
    figure = Figure(figsize=(width, height), dpi=120)
    top = 1.0 - 0.12 / height
    figure.text(0.02, top, title, ha="left", va="top", fontsize=12, fontweight="bold")
    lines = textwrap.fill(caption, int(width * 15), max_lines=_MOST_LINES, placeholder=" ...")
    foot = (0.12 + 0.16 * (lines.count("\n") + 1)) / height
    figure.text(0.02, 0.06 / height, lines, ha="left", va="bottom", fontsize=8.5, color="#444444")
    figure.set_layout_engine("constrained", rect=(0.0, foot, 1.0, top - 0.24 / height - foot))
    return figure


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure; the name's ending says the format.

    Args:
        figure: As the other functions return it.
        path: ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        ConfigError: If the file cannot be written, or the ending is none of those.
    """
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"a plot's name ends in .png, .svg or .pdf, got {str(path)!r}")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


# --- latency against load -------------------------------------------------------------------------


def latency_against_load(
    curves: Mapping[str, Sequence[tuple[float, Result]]],
    *,
    caption: str,
    x_label: str = "arrivals, requests per second",
    bound: Sequence[tuple[float, float]] = (),
) -> Figure:
    """Draw mean (line) and 99th percentile (dashes) of the latency of each policy.

    Args:
        curves: Label -> (load, result), ascending in load; unstable results are left out.
        caption: Workload, service times, requests per point, seed.
        x_label: What the load is, with its unit.
        bound: (load, least mean latency of any scheduler, seconds).
    """
    figure = _figure(8.0, 5.0, "Latency against load", caption)
    axes = figure.subplots()
    for number, (label, points) in enumerate(curves.items()):
        stable = [(load, result) for load, result in points if not result.unstable]
        loads = [load for load, _ in stable]
        colour, marker = _COLOURS[number % 7], _MARKERS[number % 7]
        for of, style in (("mean", "-"), ("p99", "--")):
            values = [r.mean() if of == "mean" else r.percentile(99) for _, r in stable]
            axes.plot(
                loads,
                values,
                style,
                color=colour,
                marker=marker,
                markersize=4.5,
                markerfacecolor=colour if of == "mean" else "white",
                label=f"{label}, {of}",
            )
    if bound:
        axes.plot(
            *zip(*bound, strict=True), ":", color="#666666", label="no scheduler beats this mean"
        )
    axes.set_yscale("log")
    _plain_ticks(axes)
    axes.set_xlabel(x_label)
    axes.set_ylabel("latency, seconds (log scale)")
    _tidy(axes)
    axes.grid(visible=True, which="minor", axis="y", color="#EEEEEE", linewidth=0.5)
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _plain_ticks(axes: Axes) -> None:
    """Write 20, not 2x10^1, and at least three numbers on a log axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator  # noqa: PLC0415

    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))


def _whole_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    axis.set_major_locator(MaxNLocator(8, integer=True))


# --- one run --------------------------------------------------------------------------------------


def slot_timeline(
    spans: Iterable[Span],
    *,
    caption: str,
    from_s: float | None = None,
    until_s: float | None = None,
) -> Figure:
    """Draw who held which slot when: a bar per stay, its colour says how it ended.

    Args:
        spans: As ``SlotTimeline.spans``.
        caption: Workload, policy, seed.
        from_s: Left edge, seconds; None: the first start.
        until_s: Right edge, seconds; None or ``inf``: the last end.
    """
    spans = list(spans)
    slots = 1 + max((span.slot for span in spans), default=0)
    figure = _figure(9.0, min(9.0, 2.2 + 0.22 * slots), "Who held which slot", caption)
    _draw_slots(figure.subplots(), spans, from_s, until_s)
    return figure


def _draw_slots(
    axes: Axes, spans: Sequence[Span], from_s: float | None, until_s: float | None
) -> None:
    ends = [span.to_s for span in spans if span.to_s < math.inf]
    starts = [span.from_s for span in spans]
    left = min(starts, default=0.0) if from_s is None else from_s
    right = max([*ends, *starts], default=1.0)
    if until_s is not None and until_s < math.inf:
        right = until_s
    groups: dict[tuple[str, str, str], list[Span]] = {}
    for span in spans:
        groups.setdefault(_WHY.get(span.why, _OTHER), []).append(span)
    for (colour, hatch, label), members in groups.items():
        axes.barh(
            [span.slot for span in members],
            [min(span.to_s, right) - span.from_s for span in members],
            left=[span.from_s for span in members],
            height=0.8,
            color=colour,
            edgecolor="white",
            linewidth=0.7,
            hatch=hatch,
            label=label,
        )
    slots = 1 + max((span.slot for span in spans), default=0)
    axes.set_xlim(left, right)
    axes.set_ylim(slots - 0.4, -0.6)
    axes.set_yticks(range(0, slots, max(1, slots // 16)))
    axes.set_xlabel("time, seconds")
    axes.set_ylabel("slot")
    axes.spines[["top", "right"]].set_visible(False)
    if groups:
        axes.legend(
            title="left because",
            frameon=False,
            fontsize=8.5,
            title_fontsize=8.5,
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
        )


def queue_and_memory(
    trace: Iterable[Sample], *, caption: str, num_pages: int | None = None
) -> Figure:
    """Draw queue length and rows over time, and KV pages where there are any.

    Args:
        trace: A ``QueueTrace``.
        caption: Workload, policy, seed.
        num_pages: Pages that there are; None: no memory limit, no memory panel.
    """
    samples = list(trace)
    rows = 1 if num_pages is None else 2
    figure = _figure(9.0, 1.4 + 2.3 * rows, "Queue and memory over time", caption)
    panels = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    _draw_queue(panels[0], samples)
    if num_pages is not None:
        _draw_pages(panels[1], samples, num_pages)
    panels[-1].set_xlabel("time, seconds")
    return figure


def _stairs(axes: Axes, samples: Sequence[Sample], values: Sequence[float], **style: Any) -> None:
    if samples:
        edges = [samples[0].from_s, *(sample.to_s for sample in samples)]
        axes.stairs(values, edges, baseline=None, **style)


def _draw_queue(axes: Axes, samples: Sequence[Sample]) -> None:
    _stairs(axes, samples, [s.waiting for s in samples], color=_COLOURS[1], label="waiting, mean")
    if any(sample.waiting_max > sample.waiting + 0.5 for sample in samples):
        _stairs(
            axes, samples, [s.waiting_max for s in samples],
            color=_COLOURS[1], alpha=0.35, label="waiting, most",
        )  # fmt: skip
    _stairs(
        axes, samples, [s.rows for s in samples],
        color=_COLOURS[0], linestyle="--", label="in a slot, mean",
    )  # fmt: skip
    _whole_ticks(axes.yaxis)
    axes.set_ylabel("requests")
    axes.set_ylim(bottom=0)
    _tidy(axes)
    if samples:
        axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_pages(axes: Axes, samples: Sequence[Sample], num_pages: int) -> None:
    _stairs(axes, samples, [s.pages for s in samples], color=_COLOURS[2], label="held, mean")
    _stairs(
        axes, samples, [s.pages_max for s in samples],
        color=_COLOURS[2], alpha=0.35, label="held, most",
    )  # fmt: skip
    axes.axhline(num_pages, color="black", linestyle=":", label=f"there are {num_pages:,}")
    axes.set_ylabel("KV pages")
    axes.set_ylim(0, num_pages * 1.08)
    _tidy(axes)
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))


def step_histogram(histogram: StepHistogram, *, caption: str) -> Figure:
    """Draw how many steps requests took, and how full steps were.

    Args:
        histogram: Of a run.
        caption: Workload, policy, seed.
    """
    figure = _figure(9.0, 3.8, "Steps of requests, rows of steps", caption)
    left, right = figure.subplots(1, 2)
    _draw_steps(left, histogram)
    _draw_rows(right, histogram)
    return figure


def _draw_steps(axes: Axes, histogram: StepHistogram) -> None:
    steps = histogram.steps
    total = steps.total()
    if total:
        values = np.array(list(steps))
        few = len(values) <= 40
        width = float(np.diff(np.sort(values)).min()) * 0.85 if few and len(values) > 1 else 1.0
        shares = [100.0 * steps[int(value)] / total for value in values]
        if few:
            axes.bar(values, shares, width=width, color=_COLOURS[0])
        else:
            axes.hist(values, bins=40, weights=shares, color=_COLOURS[0], edgecolor="white")
        mean = sum(n * k for n, k in steps.items()) / total
        axes.axvline(mean, color=_COLOURS[1], linestyle="--", label=f"mean {mean:.1f} steps")
        axes.legend(frameon=False, fontsize=8.5)
    axes.set_xlabel("denoising steps of a request")
    axes.set_ylabel("share of requests, %")
    _tidy(axes)


def _draw_rows(axes: Axes, histogram: StepHistogram) -> None:
    rows = histogram.rows
    total = rows.total()
    if total:
        values = sorted(rows)
        axes.bar(values, [100.0 * rows[n] / total for n in values], width=0.85, color=_COLOURS[2])
        mean = histogram.rows_mean
        axes.axvline(mean, color=_COLOURS[1], linestyle="--", label=f"mean {mean:.1f} rows")
        axes.legend(frameon=False, fontsize=8.5)
    _whole_ticks(axes.xaxis)
    axes.set_xlabel("rows in a step")
    axes.set_ylabel("share of steps, %")
    _tidy(axes)


def run(
    *,
    caption: str,
    spans: Iterable[Span],
    trace: Iterable[Sample],
    histogram: StepHistogram,
    num_pages: int | None = None,
    until_s: float | None = None,
) -> Figure:
    """Draw all of one run: the first stays in the slots, queue and memory, and the histograms.

    Args:
        caption: Workload, policy, seed.
        spans: As ``SlotTimeline.spans``.
        trace: A ``QueueTrace``.
        histogram: Of the run.
        num_pages: Pages that there are, or None.
        until_s: Right edge of the slots, seconds; None or ``inf``: the last end.
    """
    heights = [2.6, 1.8, 2.0] if num_pages is None else [2.6, 1.8, 1.5, 2.0]
    figure = _figure(9.5, 1.2 + 1.15 * sum(heights), "One simulated run", caption)
    grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    slots = figure.add_subplot(grid[0, :])
    _draw_slots(slots, list(spans), None, until_s)
    slots.set_title("Slots at the beginning", loc="left", fontsize=10)
    samples = list(trace)
    queue = figure.add_subplot(grid[1, :])
    _draw_queue(queue, samples)
    queue.set_title("The whole run", loc="left", fontsize=10)
    last = queue
    if num_pages is not None:
        last = figure.add_subplot(grid[2, :], sharex=queue)
        _draw_pages(last, samples, num_pages)
        queue.tick_params(labelbottom=False)
    last.set_xlabel("time, seconds")
    _draw_steps(figure.add_subplot(grid[-1, 0]), histogram)
    _draw_rows(figure.add_subplot(grid[-1, 1]), histogram)
    return figure


# --- congestion, tuning ---------------------------------------------------------------------------


def congestion_cycle(
    length: int, input_size: float, *, steps: int = 60, caption: str = ""
) -> Figure:
    """Draw the fluid model from a cold start: finishes and evictions, without and with a rate cap.

    Args:
        length: L, what each request generates, in units of memory, >= 1.
        input_size: s, what it holds from the start, in those units, >= 0.
        steps: Steps shown, 1 to 500.
        caption: Anything to add to the model's own line.

    Source:
        ``theory.congestion``; step by step, so O(steps^2).
    """
    whole(steps=steps)
    if steps > 500:
        raise ConfigError(f"steps must lie between 1 and 500, got {steps!r}")
    ratio = congestion.worst_cycle_ratio(length, input_size)
    model = (
        f"Fluid model, saturated input, empty at the start; every request holds {input_size:g} "
        f"units and one more each step, {length} steps long. Without a cap the cycle's long-run "
        f"throughput is {ratio:.4g} of what the memory could carry. {caption}"
    )
    figure = _figure(9.0, 5.2, "Service-induced congestion", model.strip())
    panels = figure.subplots(2, 1, sharex=True)
    for cap, colour, style in ((False, _COLOURS[1], "-"), (True, _COLOURS[0], "--")):
        label = "admissions capped at the equilibrium rate" if cap else "admit what fits now"
        series = [
            congestion.simulate({length: 1.0}, input_size, rate_cap=cap, warm_up=step, steps=1)
            for step in range(steps)
        ]
        finished = [each.throughput_ratio for each in series]
        evicted = [each.evicted_ratio for each in series]
        for axes, values in zip(panels, (finished, evicted), strict=True):
            axes.stairs(
                values, np.arange(steps + 1) - 0.5, baseline=None, linestyle=style,
                linewidth=1.5, color=colour, label=label,
            )  # fmt: skip
    panels[0].set_ylabel("finished per step,\nover the equilibrium's")
    panels[1].set_ylabel("evicted per step,\nover the same")
    panels[1].set_xlabel("step")
    for axes in panels:
        _tidy(axes)
        axes.set_ylim(bottom=-0.03 * axes.get_ylim()[1])
    panels[0].legend(frameon=False, fontsize=8.5, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    return figure


def tuning_frontier(tuning: Tuning, *, caption: str) -> Figure:
    """Draw every stable candidate of a search: p99 latency against head-room.

    Args:
        tuning: What ``tune`` found.
        caption: Workload, service times, seed.
    """
    figure = _figure(8.5, 5.0, "Which policy for this traffic?", caption)
    axes = figure.subplots()
    groups: dict[str, list[Tried]] = {}
    for each in tuning.tried:
        if each.p99_s < math.inf:
            groups.setdefault(each.candidate.preset, []).append(each)
    for number, (preset, members) in enumerate(groups.items()):
        axes.plot(
            [each.headroom for each in members],
            [each.p99_s for each in members],
            _MARKERS[number % 7],
            color=_COLOURS[number % 7],
            alpha=0.7,
            markeredgewidth=0,
            label=preset,
        )
    frontier = tuning.frontier
    if len(frontier) > 1:
        axes.plot(
            [each.headroom for each in frontier],
            [each.p99_s for each in frontier],
            "-",
            color="#888888",
            linewidth=1,
            zorder=1,
            label="frontier",
        )
    if tuning.target_p99_s is not None:
        axes.axhline(tuning.target_p99_s, color="black", linestyle=":", label="target")
    if tuning.recommended is not None:
        best = tuning.recommended
        axes.plot(
            [best.headroom], [best.p99_s], "o", markersize=13, markerfacecolor="none",
            markeredgecolor="black", label=f"recommended:\n{best.candidate}",
        )  # fmt: skip
    axes.set_yscale("log")
    _plain_ticks(axes)
    what = "saturation" if tuning.target_p99_s is None else "the p99 exceeds the target"
    axes.set_xlabel(f"head-room: the same traffic, so many times as fast, before {what}")
    axes.set_ylabel("99th percentile of latency now,\nseconds (log scale)")
    axes.margins(x=0.08, y=0.12)
    _tidy(axes)
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
