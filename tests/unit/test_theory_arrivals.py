"""Rates and dispersions of arrival processes against known values."""

import math

import pytest

from dllm_sched import ConfigError
from dllm_sched.theory.arrivals import (
    arrival_weighted_rate,
    gamma_shape,
    mmpp_dispersion,
    stationary,
    time_average_rate,
    two_state,
    weibull_cv,
    weibull_shape,
)

CHAIN = two_state(0.2, 0.6)


def test_rates_of_the_two_state_process():
    assert stationary(CHAIN) == pytest.approx((0.75, 0.25), abs=1e-12)
    assert time_average_rate((50, 120), CHAIN) == pytest.approx(67.5, abs=1e-9)
    assert round(arrival_weighted_rate((50, 120), CHAIN), 2) == 81.11


@pytest.mark.parametrize(
    ("rates", "leave", "average"),
    [
        ((50, 300), (0.2, 0.2), 175),
        ((25, 150), (0.3, 0.5), 71.875),
        ((10, 50), (0.3, 0.5), 25),
        ((1, 25), (0.3, 0.5), 10),
    ],
)
def test_the_four_types(rates, leave, average):
    assert time_average_rate(rates, two_state(*leave)) == pytest.approx(average)


def test_dispersion_of_two_states():
    """1 + 2 * .75 * .25 * 70^2 / (67.5 * .8) = 35.0278; in 5 s, less (1 - e^-4) / 4 of the rest."""
    assert mmpp_dispersion((50, 120), CHAIN) == pytest.approx(35.0278, abs=1e-4)
    assert mmpp_dispersion((50, 120), CHAIN, 5.0) == pytest.approx(26.6766, abs=1e-4)
    # A short window sees the spread of the rates: 1 + w (81.11 - 67.5).
    assert mmpp_dispersion((50, 120), CHAIN, 1e-3) == pytest.approx(1.01361, abs=1e-5)
    assert mmpp_dispersion((50, 120), CHAIN, 1e6) == pytest.approx(35.0278, abs=1e-3)


def test_states_of_one_rate_are_poisson():
    chain = ((-3, 1, 2), (4, -5, 1), (0, 2, -2))
    assert mmpp_dispersion((7, 7, 7), chain) == pytest.approx(1)
    assert mmpp_dispersion((7, 7, 7), chain, 2.0) == pytest.approx(1)
    assert mmpp_dispersion((7,), ((0,),), 2.0) == pytest.approx(1)


def test_two_copies_of_a_state_change_nothing():
    """The busy state split in two that swap: the same process with three states."""
    chain = ((-0.2, 0.1, 0.1), (0.6, -5.6, 5), (0.6, 5, -5.6))
    assert time_average_rate((50, 120, 120), chain) == pytest.approx(67.5)
    assert mmpp_dispersion((50, 120, 120), chain, 5.0) == pytest.approx(26.6766, abs=1e-4)


def test_shapes():
    assert gamma_shape(2.0) == 0.25
    assert weibull_cv(1.0) == pytest.approx(1.0)
    assert weibull_cv(0.5) == pytest.approx(2.2360680, abs=1e-7)  # sqrt(5)
    assert weibull_cv(2.0) == pytest.approx(0.5227232, abs=1e-7)
    assert weibull_shape(2.2360680) == pytest.approx(0.5, abs=1e-7)
    for cv in (0.01, 0.5, 1.0, 30.0, 1e5):
        assert weibull_cv(weibull_shape(cv)) == pytest.approx(cv, rel=1e-9)


@pytest.mark.parametrize(
    "call",
    [
        lambda: two_state(0, 1),
        lambda: time_average_rate((1, 2), ((-1, 1),)),
        lambda: time_average_rate((0, 0), CHAIN),
        lambda: time_average_rate((1, math.nan), CHAIN),
        lambda: time_average_rate((1, 2), ((-1, 2), (1, -1))),
        lambda: time_average_rate((1, 2), ((1, -1), (1, -1))),
        lambda: stationary(((0, 0), (0, 0))),
        lambda: mmpp_dispersion((1, 2), CHAIN, 0),
        lambda: gamma_shape(0),
        lambda: weibull_cv(0.001),
        lambda: weibull_shape(1e6),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(ConfigError):
        call()
