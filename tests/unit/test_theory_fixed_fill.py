"""Fill waits and the long-run fixed-fill curve, against known and independent values."""

import math

import numpy as np
import pytest
from scipy import special, stats

from dllm_sched import ConfigError
from dllm_sched.theory.fixed_fill import (
    best_utilisation,
    fill_wait_cdf,
    mean_batch_fill_wait,
    mean_fill_wait,
    mean_latency,
    timeout_probability,
)

# The mean of the eight batch service times measured in the paper's repository, and its fill cap.
SERVICE_S = 8.738217888618237
BATCH_SIZE = 8


@pytest.mark.parametrize(
    ("utilisation", "latency"),
    [
        (0.1, 46.968),
        (0.2, 27.853),
        (0.4, 18.319),
        (0.5, 16.466),
        (0.6, 15.334),
        (0.7, 14.747),
        (0.8, 14.845),
        (0.9, 16.918),
        (0.95, 22.094),
    ],
)
def test_the_known_curve(utilisation, latency):
    rate = utilisation * BATCH_SIZE / SERVICE_S
    assert round(mean_latency(rate, SERVICE_S, BATCH_SIZE), 3) == latency


def test_its_minimum():
    utilisation, latency = best_utilisation(SERVICE_S, BATCH_SIZE)
    assert round(latency, 3) == 14.680
    assert abs(utilisation - 0.745) < 0.005
    # At the printed place the curve has its least value to the printed digits.
    assert round(mean_latency(0.745 * BATCH_SIZE / SERVICE_S, SERVICE_S, BATCH_SIZE), 3) == 14.680


def _spitzer(rate, service_s, batch_size, terms):
    """The same latency by its series of Gamma tails, by another library."""
    k = np.arange(1, terms + 1)
    x = k * service_s
    shape = batch_size * k
    excess = x * special.gammainc(shape, rate * x)
    excess -= shape / rate * special.gammainc(shape + 1, rate * x)
    return (batch_size - 1) / (2 * rate) + service_s + float((excess / k).sum())


@pytest.mark.parametrize("batch_size", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("utilisation", [0.05, 0.5, 0.85])
def test_roots_and_series_agree(batch_size, utilisation):
    rate = utilisation * batch_size / 2.5
    expected = _spitzer(rate, 2.5, batch_size, 3000)
    assert mean_latency(rate, 2.5, batch_size) == pytest.approx(expected, rel=1e-9)


def test_one_at_a_time_is_the_queue_with_constant_service():
    """M/D/1 at half load waits half a service time: S + S/2."""
    assert mean_latency(0.25, 2.0, 1) == pytest.approx(3.0, rel=1e-12)


def test_close_to_saturation_is_quick_and_beyond_it_is_infinite():
    assert 180 < mean_latency(0.9999 * 256 / SERVICE_S, SERVICE_S, 256) < 190
    assert mean_latency(8 / SERVICE_S, SERVICE_S, 8) == math.inf
    assert mean_latency(100.0, SERVICE_S, 8) == math.inf


@pytest.mark.parametrize("batch_size", [2, 8, 200])
@pytest.mark.parametrize("wait_s", [1e-3, 1.0, 9.0, 300.0])
def test_fill_wait_is_erlang(batch_size, wait_s):
    erlang = stats.gamma(batch_size - 1, scale=1 / 0.8)
    assert fill_wait_cdf(0.8, batch_size, wait_s) == pytest.approx(
        erlang.cdf(wait_s), rel=1e-10, abs=1e-300
    )
    # The small tail keeps its digits, too.
    assert timeout_probability(0.8, wait_s, batch_size) == pytest.approx(
        erlang.sf(wait_s), rel=1e-10, abs=1e-300
    )


def test_fill_wait_of_two_is_exponential():
    """``1 - exp(-0.641 * 3)``."""
    assert fill_wait_cdf(0.641, 2, 3.0) == pytest.approx(0.853832, abs=1e-6)
    assert timeout_probability(0.641, 3.0, 2) == pytest.approx(0.146168, abs=1e-6)


def test_edges():
    assert fill_wait_cdf(1.0, 1, 0.0) == 1.0
    assert fill_wait_cdf(1.0, 3, 0.0) == 0.0
    assert fill_wait_cdf(1.0, 3, math.inf) == 1.0
    assert timeout_probability(1.0, 0.0, 3) == 1.0
    assert timeout_probability(1.0, math.inf, 3) == 0.0
    assert timeout_probability(1.0, 0.0, 1) == 0.0


def test_mean_fill_waits():
    assert mean_fill_wait(0.5, 8) == 14.0
    assert mean_batch_fill_wait(0.5, 8) == 7.0
    assert mean_fill_wait(0.5, 1) == 0.0


@pytest.mark.parametrize(
    "call",
    [
        lambda: mean_latency(0.0, 1.0, 8),
        lambda: mean_latency(1.0, math.nan, 8),
        lambda: mean_latency(1.0, 1.0, 0),
        lambda: best_utilisation(1.0, 1),
        lambda: fill_wait_cdf(1.0, 8, -1.0),
        lambda: timeout_probability(1.0, math.nan, 8),
        lambda: mean_fill_wait(1.0, True),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(ConfigError):
        call()
