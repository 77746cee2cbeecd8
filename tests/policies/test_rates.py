"""Estimators of arrival rates against published values, scipy, and a rebuild from all arrivals."""

from __future__ import annotations

import math
import os
from statistics import fmean

import numpy as np
import pytest
from scipy.signal import savgol_filter

from dllm_sched import ConfigError, Request
from dllm_sched.events import RequestJoined, RequestSubmitted
from dllm_sched.policies import (
    RATES,
    EmaRate,
    FilteredMeanRate,
    KnownRate,
    LogBandRate,
    Rate,
    WindowRate,
)
from dllm_sched.policies.rates import last_of_cubic, rate_of
from dllm_sched.sim.arrivals import MMPP
from dllm_sched.theory.arrivals import arrival_weighted_rate, time_average_rate, two_state

FULL = os.environ.get("DLLM_SCHED_FULL", "") not in ("", "0")
REQUEST = Request("a", prompt_len=1, max_new_tokens=1)


def fed(estimator: Rate, instants: list[float]) -> list[float | None]:
    """The estimate after each arrival."""
    state = estimator.init()
    found = []
    for at in instants:
        state = estimator.observe(state, RequestSubmitted(at, REQUEST))
        found.append(estimator.rate(state))
    return found


def instants_of(gaps: list[float]) -> list[float]:
    return np.cumsum([0.0, *gaps]).tolist()


STEP = instants_of([0.2] * 2000 + [0.02] * 2000)


def test_the_ema_passes_45_on_the_91st_arrival_after_the_step() -> None:
    found = fed(EmaRate(), STEP)
    assert found[2000] == pytest.approx(5.0)
    assert next(k for k in range(1, 2001) if (found[2000 + k] or 0) > 45) == 91


def test_the_running_mean_is_still_at_five_then() -> None:
    raw = fed(EmaRate(), STEP)[1 : 2000 + 91 + 1]
    assert fmean(value or math.nan for value in raw) == pytest.approx(5.841, abs=5e-4)
    filtered = fed(FilteredMeanRate(), STEP)[2000 + 91]
    assert filtered == pytest.approx(5.856, abs=5e-4)


def test_a_window_has_forgotten_after_its_length() -> None:
    found = fed(WindowRate(100), STEP)
    assert found[2099] != pytest.approx(50.0)
    assert found[2100] == pytest.approx(50.0)


def test_the_bias_of_constant_poisson_arrivals() -> None:
    """One over a mean is too high in the mean: 5.112 for a rate of 5."""
    gaps = np.random.default_rng(6).exponential(1 / 5, 20_000).tolist()
    found = fed(FilteredMeanRate(), instants_of(gaps))[-1]
    assert found == pytest.approx(5.112, abs=0.16)


def test_the_running_mean_ends_near_the_rate_that_arrivals_see() -> None:
    """Not at the time average (67.5), nor at the present rate (50 or 120)."""
    generator = two_state(0.2, 0.6)
    assert time_average_rate((50, 120), generator) == pytest.approx(67.5)
    assert arrival_weighted_rate((50, 120), generator) == pytest.approx(81.11, abs=0.005)
    arrivals = MMPP((50, 120), generator)
    runs, seconds, tolerance = (20, 3000.0, 1.2) if FULL else (4, 600.0, 6.0)
    ends = []
    for seed in range(runs):
        estimator = FilteredMeanRate()
        state = estimator.init()
        for at in arrivals.times(seed):
            if at > seconds:
                break
            state = estimator.observe(state, RequestSubmitted(at, REQUEST))
        ends.append(estimator.rate(state) or math.nan)
    assert fmean(ends) == pytest.approx(80.5, abs=tolerance)


@pytest.mark.parametrize("window", [5, 7, 51, 101, 301])
def test_the_weights_of_the_last_value_are_scipys(window: int) -> None:
    samples = np.random.default_rng(window).normal(size=window)
    expected = savgol_filter(samples, window, 3)[-1]
    weights = last_of_cubic(window)
    assert len(weights) == window
    assert float(np.dot(weights, samples)) == pytest.approx(expected, abs=1e-9)


def test_the_weights_leave_a_cubic_as_it_is() -> None:
    cubic = [2 - 3 * x + 0.5 * x**2 + 0.01 * x**3 for x in range(101)]
    assert float(np.dot(last_of_cubic(101), cubic)) == pytest.approx(cubic[-1], rel=1e-9)


# --- against a rebuild from the whole past ------------------------------------------------------


def rebuilt_running_mean(instants: list[float]) -> float:
    """From all arrivals at once: smoothed gaps, their inverses, scipy's filter, the mean."""
    gaps = np.diff(instants)
    smooth: list[float] = []
    for number in range(1, len(gaps) + 1):
        recent = float(gaps[max(0, number - 10) : number].mean())
        smooth.append(recent if not smooth else smooth[-1] + 0.05 * (recent - smooth[-1]))
    raw = 1 / np.array(smooth)
    ends = range(1, len(raw) + 1)
    values = [raw[n - 1] if n < 101 else savgol_filter(raw[:n], 101, 3)[-1] for n in ends]
    return float(np.mean(values))


def rebuilt_log_band(instants: list[float]) -> float:
    """The rule of the log rate, told again with the past in lists."""
    gaps = np.diff(instants)
    kept: list[float] = []
    buffer: list[float] = []

    def near(x: float, y: float) -> bool:
        half = 0.5 * abs(y) ** 0.5
        return y - half <= x <= y + half

    for number in range(1, len(gaps) + 1):
        new = -math.log(float(gaps[max(0, number - 10) : number].mean()))
        if not kept:
            kept.append(new)
            continue
        previous, midpoint = kept[-1], (kept[-1] + new) / 2
        if near(new, previous):
            kept.append(previous)
            buffer = []
        elif near(new, midpoint) and near(previous, midpoint):
            kept.append(midpoint)
            buffer = []
        else:
            buffer.append(new)
            if len(buffer) == 10:
                average = sum(buffer) / 10
                kept.append(average if near(average, new) else new)
                buffer = []
            else:
                kept.append(previous)
    return float(np.mean(np.exp(kept)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale", [0.05, 1.0, 40.0])
def test_published_estimators_are_rebuilt(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    speed = np.repeat([1.0, 8.0, 0.5, 30.0], 60)
    instants = instants_of((rng.exponential(1 / (scale * speed))).tolist())
    for count in (2, 13, 101, 102, 103, 160, 241):
        part = instants[:count]
        assert fed(FilteredMeanRate(), part)[-1] == pytest.approx(rebuilt_running_mean(part))
        assert fed(LogBandRate(), part)[-1] == pytest.approx(rebuilt_log_band(part))


def test_below_one_arrival_a_second_the_log_band_works() -> None:
    """There the logarithm is negative, and the published band has no width to speak of."""
    gaps = np.random.default_rng(2).exponential(20.0, 3000).tolist()
    found = fed(LogBandRate(), instants_of(gaps))[-1]
    assert found == pytest.approx(0.05, rel=0.25)


# --- the rest -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RATES)
def test_nothing_is_known_before_two_arrivals_lie_apart(name: str) -> None:
    found = fed(RATES[name], [3.0, 3.0, 3.0, 4.0, 4.5])
    assert found[:3] == [None, None, None]
    assert all(value is not None and 0 < value < 100 for value in found[3:])
    state = RATES[name].init()
    assert RATES[name].observe(state, RequestJoined(1.0, "a", 0, 0, 0.0, resumed=False)) == state
    with pytest.raises(NotImplementedError):  # the base estimates nothing, and does not say None
        Rate().rate(None)


@pytest.mark.parametrize("name", RATES)
def test_states_are_never_changed_in_place(name: str) -> None:
    estimator = RATES[name]
    instants = np.cumsum(np.random.default_rng(1).exponential(1.0, 130)).tolist()
    states = [estimator.init()]
    for at in instants:
        states.append(estimator.observe(states[-1], RequestSubmitted(at, REQUEST)))
    fresh = [estimator.init()]
    for state, at in zip(states, instants, strict=False):
        fresh.append(estimator.observe(state, RequestSubmitted(at, REQUEST)))
    assert fresh == states


def test_rates_by_number_and_by_name() -> None:
    assert rate_of(2) == KnownRate(2)
    assert rate_of(2).rate(None) == 2
    assert rate_of("ema") == EmaRate()
    assert rate_of(WindowRate(3)) == WindowRate(3)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: EmaRate(weight=0.0), "weight"),
        (lambda: EmaRate(weight=1.5), "weight"),
        (lambda: EmaRate(weight=math.nan), "weight"),
        (lambda: EmaRate(window=0), "window"),
        (lambda: WindowRate(0), "window"),
        (lambda: FilteredMeanRate(window=100), "window"),
        (lambda: FilteredMeanRate(window=3), "window"),
        (lambda: LogBandRate(patience=0), "patience"),
        (lambda: KnownRate(0), "per_s"),
        (lambda: rate_of("best"), "rate"),
    ],
)
def test_out_of_range(make: object, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make()  # type: ignore[operator]
