"""Distributions of whole numbers: draws against exact moments, and those against closed forms."""

import math

import numpy as np
import pytest

from dllm_sched import ConfigError
from dllm_sched.sim.lengths import Fixed, Geometric, Histogram, LogNormal, Pareto, Uniform

N = 200_000

# Mean and coefficient of variation by textbook; where a continuous one is rounded up, plus 1/2.
KNOWN = [
    (Fixed(76), 76.0, 0.0),
    (Uniform(1, 9), 5.0, math.sqrt(80 / 12) / 5),
    (Histogram({6: 6, 10: 4}), 7.6, math.sqrt(3.84) / 7.6),
    (Geometric(20, 2000), 20.0, 0.974679),
    (LogNormal(200, 0.5, 20_000), 226.63 + 0.5, 0.5318),
    (Pareto(4.0, 100, 1_000_000), 133.33 + 0.5, 0.3523),
]


@pytest.mark.parametrize(("lengths", "mean", "cv"), KNOWN, ids=lambda each: type(each).__name__)
def test_exact_moments_are_the_textbooks(lengths, mean, cv):
    assert lengths.mean == pytest.approx(mean, rel=2e-4)
    assert lengths.cv == pytest.approx(cv, rel=2e-3, abs=1e-12)
    values, probabilities = lengths.pmf()
    assert (np.diff(values) > 0).all()
    assert probabilities.min() >= 0
    assert probabilities.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "lengths",
    [*(each for each, _, _ in KNOWN), LogNormal(500, 2.0, 4096, low=16), Pareto(0.8, 10, 5000)],
    ids=lambda each: type(each).__name__,
)
def test_draws_have_the_exact_moments(lengths):
    """Within five standard errors of the mean, and 5 % of the dispersion."""
    drawn = lengths.draw(np.random.default_rng(7), N)
    assert drawn.dtype == np.int64
    values, _ = lengths.pmf()
    assert values[0] <= drawn.min() <= drawn.max() <= values[-1]
    mean, cv = lengths.mean, lengths.cv
    assert abs(drawn.mean() - mean) <= 5 * cv * mean / math.sqrt(N)
    assert drawn.var() / mean == pytest.approx(cv * cv * mean, rel=0.05, abs=1e-12)


def test_cut_draws_pile_up_at_the_bounds():
    values, probabilities = Geometric(20, 10).pmf()
    assert values[-1] == 10
    assert probabilities[-1] == pytest.approx(0.95**9)
    _, probabilities = LogNormal(100, 1.0, 200, low=100).pmf()
    assert probabilities[0] == pytest.approx(0.5)


def test_of_a_log():
    assert Histogram.of([5, 3, 5, 5]) == Histogram({3: 1, 5: 3}) == Histogram({5: 0.75, 3: 0.25})
    assert Histogram.of([5, 3, 5, 5]).mean == 4.5


def test_histogram_draws_every_value_and_no_other():
    drawn = Histogram({2: 1, 3: 0, 7: 1e-3}).draw(np.random.default_rng(0), 100_000)
    assert set(drawn.tolist()) == {2, 7}


@pytest.mark.parametrize(
    "call",
    [
        lambda: Fixed(0),
        lambda: Uniform(5, 4),
        lambda: Uniform(1, 10**9),
        lambda: Histogram({}),
        lambda: Histogram({1.5: 1}),
        lambda: Geometric(0.5, 10),
        lambda: Geometric(5, 0),
        lambda: LogNormal(0, 1, 10),
        lambda: LogNormal(5, math.nan, 10),
        lambda: LogNormal(5, 1, 10, low=11),
        lambda: Pareto(0, 1, 10),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(ConfigError):
        call()
