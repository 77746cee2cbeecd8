"""Exclusive batching: known values, and the optimum found by brute force."""

import math

import numpy as np
import pytest
from scipy import optimize

from dllm_sched import ConfigError
from dllm_sched.theory.exclusive import (
    empty_slots,
    hazard_correction,
    is_mixed_better,
    safe_slots,
    threshold,
)

EXAMPLE = {
    "hazard": 0.01,
    "hazard_slope": 1e-6,
    "num_slots": 100,
    "decode_base_s": 20,
    "decode_token_s": 0.02,
}


def test_threshold():
    # p0 * alpha_p / alpha_d = 1 - ln 2
    found = threshold(hazard=0.01, prefill_base_s=30.685282, decode_base_s=1.0)
    assert found == pytest.approx(0.5, abs=1e-8)


@pytest.mark.parametrize("ratio", [1e-12, 1e-6, 1e-3, 1.0, 1e3])
def test_threshold_solves_its_equation(ratio):
    theta = threshold(hazard=0.5, prefill_base_s=2 * ratio, decode_base_s=1.0)
    if ratio >= 1e-3:
        rest = 1 - theta
        if rest > 1e-6:
            assert theta / rest + math.log(rest) == pytest.approx(ratio, rel=1e-9)
    else:  # theta^2 / 2 and a little
        assert theta == pytest.approx(math.sqrt(2 * ratio), rel=2e-3)
    assert 0 < theta <= 1


def test_the_threshold_of_costs_that_are_worlds_apart_stays_below_one():
    for prefill, decode in ((1e308, 1.0), (1.0, 5e-324), (1e308, 5e-324)):
        theta = threshold(hazard=0.5, prefill_base_s=prefill, decode_base_s=decode)
        assert theta == math.nextafter(1.0, 0.0)
        assert empty_slots(theta, 4) == 3  # one decoding row keeps them waiting
    assert 0 < threshold(hazard=0.5, prefill_base_s=5e-324, decode_base_s=1e308) < 1e-150


def test_hazard_correction():
    assert round(hazard_correction(0.5, **EXAMPLE), 7) == 0.0023612
    assert hazard_correction(0.5, **{**EXAMPLE, "hazard_slope": 0.0}) == 0


def test_it_leads_to_the_numerical_optimum():
    """The best threshold by brute force lies .0023565 above 0.5: the error is second order."""
    p0, eta, slots, base, token = 0.01, 1e-6, 100, 20, 0.02
    prefill = (1 - math.log(2)) * base / p0

    def cost(theta):
        """Time per request of a cycle, but for what is the same at any threshold."""
        zeta = -math.log1p(-theta)
        end = (math.sqrt(p0 * p0 + 2 * eta * zeta) - p0) / eta
        t, weights = np.polynomial.legendre.leggauss(60)
        t = (t + 1) * end / 2
        active = (np.exp(-p0 * t - eta * t * t / 2) * weights).sum() * end / 2
        return (prefill + base * end + token * slots * active) / theta

    best = optimize.minimize_scalar(cost, bounds=(0.4, 0.6), options={"xatol": 1e-10}).x
    assert best - 0.5 == pytest.approx(0.0023565, abs=2e-7)


def test_slots():
    found = safe_slots(0.5, memory_tokens=1e5, mean_prompt=100, hazard=0.01, risk=0.01)
    assert found == 587
    assert safe_slots(0.5, memory_tokens=400, mean_prompt=100, hazard=0.01, risk=0.01) == 0
    assert [empty_slots(0.5, n) for n in (1, 2, 7, 100)] == [1, 1, 3, 50]


def test_mixed_or_exclusive():
    """By hand: zeta = ln 2, (600 + 20 ln 2 * 100) / 50 - 20 * 101 / 100 = 19.526, over 200."""
    given = {
        "num_slots": 100,
        "num_empty": 50,
        "mean_prompt": 100,
        "mean_output": 100,
        "prefill_base_s": 600,
        "decode_base_s": 20,
        "mixed_base_s": 20,
        "exclusive_token_s": 0.02,
    }
    assert is_mixed_better(0.5, mixed_token_s=0.02 + 0.0976, **given)
    assert not is_mixed_better(0.5, mixed_token_s=0.02 + 0.0977, **given)


@pytest.mark.parametrize(
    "call",
    [
        lambda: threshold(hazard=0, prefill_base_s=1, decode_base_s=1),
        lambda: threshold(hazard=0.1, prefill_base_s=0, decode_base_s=1),
        lambda: hazard_correction(1.0, **EXAMPLE),
        lambda: hazard_correction(0.5, **{**EXAMPLE, "hazard_slope": math.nan}),
        lambda: empty_slots(0.5, 0),
        lambda: safe_slots(0.5, memory_tokens=0, mean_prompt=1, hazard=0.1, risk=0.1),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(ConfigError):
        call()
