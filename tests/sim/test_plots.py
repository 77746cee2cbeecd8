"""Pictures: what they draw is what was measured, and a reader without the code can read them.

How they look was judged by eye; here: every axis has a name with its unit, there are title, legend
and caption, nothing lies outside the page, and the numbers drawn are the run's.
"""

from __future__ import annotations

import builtins
import math

import pytest

from dllm_sched import Capacity, ConfigError, GrowingKV, presets
from dllm_sched.sim import plots
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.recording import QueueTrace, SlotTimeline, Span, StepHistogram
from dllm_sched.sim.service import Constant
from dllm_sched.sim.shapes import gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.tuning import Candidate, Tried, Tuning
from dllm_sched.sim.workloads import OpenLoop

CAPTION = "GSM8K blocks, Poisson arrivals, 8 slots, continuous, 24.1 ms a step, seed 0"


def run(rate=0.9, *observers, capacity=None):
    return simulate(
        OpenLoop(Poisson(rate), gsm8k(), max_requests=80),
        policy=presets.continuous(8),
        capacity=Capacity(max_num_seqs=8) if capacity is None else capacity,
        service=Constant(0.0241),
        observers=observers,
    )


def check(figure, *, legends=1, path=None):
    """Whatever a reader needs is there, and inside the page."""
    texts = [text.get_text() for text in figure.texts]
    assert len(texts) == 2
    assert all(texts), "title and caption"
    for axes in figure.axes:
        assert (
            axes.get_xlabel()
            or axes.xaxis.get_label_position() != "bottom"
            or any(
                other.get_shared_x_axes().joined(axes, other) and other.get_xlabel()
                for other in figure.axes
            )
        )
        assert axes.get_ylabel()
    assert sum(axes.get_legend() is not None for axes in figure.axes) >= legends
    figure.draw_without_rendering()
    width, height = figure.get_size_inches() * figure.dpi
    box = figure.get_tightbbox().transformed(figure.dpi_scale_trans)
    assert -1 <= box.x0 <= box.x1 <= width + 1
    assert -1 <= box.y0 <= box.y1 <= height + 1
    if path is not None:
        plots.save(figure, path)
        assert path.stat().st_size > 5000
    return texts


@pytest.fixture(scope="module")
def recorded():
    capacity = Capacity(max_num_seqs=8, num_pages=200, memory=GrowingKV())
    slots, trace, histogram = SlotTimeline(), QueueTrace(capacity), StepHistogram()
    run(0.9, slots, trace, histogram, capacity=capacity)
    return slots, trace, histogram


def test_latency_against_load(tmp_path):
    results = {rate: run(rate) for rate in (0.4, 0.9)}
    curves = {"continuous": list(results.items()), "none": []}
    figure = plots.latency_against_load(curves, caption=CAPTION, bound=[(0.4, 7.0), (0.9, 7.0)])
    check(figure, path=tmp_path / "latency.png")
    mean, p99 = figure.axes[0].get_lines()[:2]
    assert list(mean.get_xdata()) == [0.4, 0.9]
    assert list(mean.get_ydata()) == [result.mean() for result in results.values()]
    assert list(p99.get_ydata()) == [result.percentile(99) for result in results.values()]


def test_slot_timeline_has_a_bar_per_stay(recorded, tmp_path):
    spans = recorded[0].spans
    figure = plots.slot_timeline(spans, caption=CAPTION, until_s=60.0)
    check(figure, path=tmp_path / "slots.svg")
    axes = figure.axes[0]
    assert len(axes.patches) == len(spans) == 80
    assert axes.get_xlim()[1] == 60.0
    assert max(bar.get_y() + bar.get_height() for bar in axes.patches) <= axes.get_ylim()[0]


def test_each_way_to_leave_has_a_name_of_its_own():
    whys = ("eos", "length", "max_steps", "deadline", "preempted", "cancelled", "error", "running")
    spans = [Span(n, f"r{n}", float(n), n + 1.0, why) for n, why in enumerate(whys)]
    spans[-1] = spans[-1]._replace(to_s=math.inf)
    figure = plots.slot_timeline(spans, caption=CAPTION)
    check(figure)
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert len(names) == len(set(names)) == 7


def test_queue_and_memory(recorded, tmp_path):
    figure = plots.queue_and_memory(recorded[1], caption=CAPTION, num_pages=200)
    check(figure, legends=2, path=tmp_path / "queue.pdf")
    assert len(figure.axes) == 2
    figure = plots.queue_and_memory(recorded[1], caption=CAPTION)
    check(figure)
    assert len(figure.axes) == 1


def test_step_histogram_adds_up_to_all(recorded):
    figure = plots.step_histogram(recorded[2], caption=CAPTION)
    check(figure, legends=2)
    for axes in figure.axes:
        assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(100.0)


def test_many_different_step_counts_are_binned():
    histogram = StepHistogram()
    histogram.steps.update(range(100, 1100))
    figure = plots.step_histogram(histogram, caption=CAPTION)
    assert len(figure.axes[0].patches) == 40
    assert sum(bar.get_height() for bar in figure.axes[0].patches) == pytest.approx(100.0)


def test_a_whole_run_in_one_picture(recorded, tmp_path):
    slots, trace, histogram = recorded
    parts = {"spans": slots.spans, "trace": trace, "histogram": histogram}
    figure = plots.run(caption=CAPTION, num_pages=200, **parts)
    check(figure, legends=5, path=tmp_path / "run.png")
    assert len(figure.axes) == 5
    figure = plots.run(caption=CAPTION, until_s=math.inf, **parts)
    check(figure)
    assert len(figure.axes) == 4


def test_congestion_cycle_draws_the_worst_cycle_and_the_cap(tmp_path):
    figure = plots.congestion_cycle(10, 10, steps=40)
    texts = check(figure, path=tmp_path / "cycle.png")
    assert "0.775" in texts[1]
    free, capped = figure.axes[0].patches
    # One cohort every ten steps: ten steps' worth of 0.775 at once.
    values = free.get_data().values
    assert [n for n, value in enumerate(values) if value > 0.1] == [10, 20, 30]
    assert values[20] == pytest.approx(7.75, rel=0.001)
    assert capped.get_data().values[10:] == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="steps"):
        plots.congestion_cycle(10, 10, steps=0)


@pytest.mark.parametrize("target", [None, 5.0])
def test_tuning_frontier(target, tmp_path):
    tried = tuple(
        Tried(
            candidate=Candidate(preset, size, (("batch_size", size),)),
            capacity_per_s=1.0,
            p99_s=p99_s,
            mean_s=p99_s,
            headroom=headroom,
        )
        for preset, size, p99_s, headroom in (
            ("continuous", 8, 4.0, 1.2),
            ("continuous", 16, 4.5, 2.5),
            ("fixed_fill", 16, 9.0, 1.5),
            ("fixed_fill", 8, math.inf, 0.8),
        )
    )
    tuning = Tuning(1.0, target, Capacity(max_num_seqs=16), tried, tried[1] if target else None)
    figure = plots.tuning_frontier(tuning, caption=CAPTION)
    check(figure, path=tmp_path / "tune.png")
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert ("target" in names) is (target is not None)
    assert any("recommended" in name for name in names) is (target is not None)
    drawn = sum(len(line.get_xdata()) for line in figure.axes[0].get_lines()[:2])
    assert drawn == 3  # the unstable one has no latency


def test_pictures_of_nothing_are_empty_not_errors():
    check(plots.slot_timeline([], caption=CAPTION), legends=0)
    check(plots.queue_and_memory(QueueTrace(), caption=CAPTION), legends=0)
    check(plots.step_histogram(StepHistogram(), caption=CAPTION), legends=0)


def test_a_long_caption_is_wrapped_inside_the_page():
    texts = check(plots.step_histogram(StepHistogram(), caption=CAPTION * 5), legends=0)
    assert texts[0].count("\n") + texts[1].count("\n") >= 2


def test_files_that_cannot_be_written_are_named(tmp_path):
    figure = plots.step_histogram(StepHistogram(), caption=CAPTION)
    with pytest.raises(ConfigError, match=r"ends in \.png"):
        plots.save(figure, tmp_path / "plot.gif")
    with pytest.raises(ConfigError, match="cannot write"):
        plots.save(figure, tmp_path / "missing" / "plot.png")


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"dllm-sched\[plot\]"):
        plots.step_histogram(StepHistogram(), caption=CAPTION)


def test_a_long_caption_is_cut(tmp_path):
    figure = plots.step_histogram(StepHistogram(), caption="word " * 3000)
    plots.save(figure, tmp_path / "long.png")
    assert any(text.get_text().endswith("...") for text in figure.texts)
