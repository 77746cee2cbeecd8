"""The congestion model against known values: cycles, spectral radii, and what cures it."""

import math

import pytest

from dllm_sched import ConfigError
from dllm_sched.theory.congestion import (
    equilibrium_rate,
    is_surely_stable,
    polynomial,
    simulate,
    spectral_radius,
    survival,
    worst_cycle_ratio,
)
from dllm_sched.theory.ladder import GSM8K_BLOCKS

ONE_LENGTH = [
    (0, 10, 0.550),
    (0, 200, 0.5025),
    (10, 10, 0.775),
    (10, 50, 0.592),
    (100, 100, 0.7525),
]
# Input, lengths in equal parts, spectral radius, throughput where it is known.
MIXES = [
    (50, (5, 7), 0.99499, 1.000),
    (50, (4, 8), 1.01878, 0.973),
    (1000, (5, 7), 0.97756, None),
    (1000, (4, 8), 1.00100, 0.9985),
    (1000, (9, 10), 0.99515, None),
    (1000, (10, 21), 0.99967, None),
    (5, (5, 7), 1.10285, 0.943),
    (5, (2, 3, 5), 0.98625, 1.000),
]


def _mix(lengths):
    return dict.fromkeys(lengths, 1)


@pytest.mark.parametrize(("input_size", "length", "ratio"), ONE_LENGTH)
def test_worst_cycle(input_size, length, ratio):
    digits = len(str(ratio)) - 2
    assert round(worst_cycle_ratio(length, input_size), max(digits, 3)) == ratio


def _run(length, input_size, **options):
    return simulate({length: 1}, input_size, warm_up=40 * length, steps=40 * length, **options)


@pytest.mark.parametrize("start", ["cold", "perturbed"])
@pytest.mark.parametrize(("input_size", "length", "ratio"), ONE_LENGTH)
def test_one_length_ends_in_the_worst_cycle(input_size, length, ratio, start):
    found = _run(length, input_size, start=start)
    assert found.throughput_ratio == pytest.approx(ratio, abs=0.001)
    assert found.evicted_ratio > 0
    assert found.cohort_share == pytest.approx(1)  # all in one cohort
    assert found.peak_memory == pytest.approx(1)


@pytest.mark.parametrize(("input_size", "length", "ratio"), ONE_LENGTH)
def test_rate_cap_cures_one_length(input_size, length, ratio):
    for reserve in ("nothing", "projected"):
        found = _run(length, input_size, rate_cap=True, reserve=reserve)
        assert found.throughput_ratio == pytest.approx(1.000, abs=0.001)
        assert found.evicted_ratio == 0


@pytest.mark.parametrize("reserve", ["peak", "projected"])
@pytest.mark.parametrize(("input_size", "length", "ratio"), ONE_LENGTH)
def test_reservation_alone_evicts_nobody_and_keeps_the_cycle(input_size, length, ratio, reserve):
    found = _run(length, input_size, reserve=reserve)
    assert found.evicted_ratio == 0
    assert found.throughput_ratio == pytest.approx(ratio, abs=0.001)


def test_reserving_everybodys_peak_at_once_wastes_what_the_cap_gains():
    found = _run(10, 10, rate_cap=True, reserve="peak")
    assert found.throughput_ratio == pytest.approx(0.775, abs=0.001)
    assert found.peak_memory < 0.85


@pytest.mark.parametrize(("input_size", "lengths", "radius", "ratio"), MIXES)
def test_spectral_radius(input_size, lengths, radius, ratio):
    assert round(spectral_radius(_mix(lengths), input_size), 5) == radius


@pytest.mark.parametrize(
    ("input_size", "lengths", "ratio"), [(s, lengths, r) for s, lengths, _, r in MIXES if r]
)
def test_throughput_of_mixes(input_size, lengths, ratio):
    found = simulate(_mix(lengths), input_size)
    tolerance = 0.003 if (input_size, lengths) == (5, (5, 7)) else 0.001
    assert found.throughput_ratio == pytest.approx(ratio, abs=tolerance)
    assert (found.evicted_ratio == 0) == (ratio == 1.000)


def test_a_perturbed_mix_that_is_stable_recovers():
    found = simulate(_mix((5, 7)), 50, start="perturbed")
    assert found.throughput_ratio == pytest.approx(1.000, abs=0.001)
    assert found.evicted_ratio == 0


def test_a_barely_unstable_mix_takes_long_to_leave_its_equilibrium():
    """The radius is 1.00100: a deviation of 0.1 % of one class needs more than 10,000 steps."""
    early = simulate(_mix((4, 8)), 1000, start="perturbed", warm_up=0, steps=1000)
    late = simulate(_mix((4, 8)), 1000, start="perturbed")
    assert early.throughput_ratio > late.throughput_ratio
    assert late.throughput_ratio == pytest.approx(0.9989, abs=0.0002)


@pytest.mark.parametrize(("input_size", "lengths", "radius", "ratio"), MIXES)
def test_rate_cap_cures_mixes(input_size, lengths, radius, ratio):
    found = simulate(_mix(lengths), input_size, rate_cap=True, warm_up=2000, steps=2000)
    assert found.throughput_ratio == pytest.approx(1.000, abs=0.001)
    assert found.evicted_ratio == 0


@pytest.mark.parametrize(
    ("input_size", "radius"), [(0, 1.069), (1, 1.027), (2, 0.995), (2.4, 0.985), (10, 0.910)]
)
def test_diffusion_blocks(input_size, radius):
    assert round(spectral_radius(GSM8K_BLOCKS, input_size), 3) == radius


def test_diffusion_with_answers_of_one_length():
    assert round(spectral_radius({10: 1}, 2.4), 3) == 1.160
    assert round(worst_cycle_ratio(10, 2.4), 3) == 0.637
    assert _run(10, 2.4).throughput_ratio == pytest.approx(0.637, abs=0.001)


def test_typical_diffusion_prompts_are_stable():
    found = simulate(GSM8K_BLOCKS, 2.4, start="perturbed", warm_up=2000, steps=2000)
    assert found.throughput_ratio == pytest.approx(1.000, abs=0.001)
    assert found.evicted_ratio == 0


def test_one_length_of_two_by_hand():
    """x_1 = -x_0 (s + 2) / (s + 1): with s = 5 the root is -7/6."""
    assert spectral_radius({2: 1}, 5) == pytest.approx(7 / 6)
    assert polynomial({2: 1}, 5) == (6, 7)
    assert spectral_radius({1: 1}, 5) == 0


def test_equilibrium():
    # Ten ages of 11 .. 20 tokens: 155 tokens per request a step.
    assert equilibrium_rate({10: 1}, 10, 1550) == pytest.approx(10)
    # Half leave after one step: 1 + 2/2 tokens.
    assert survival({1: 1, 2: 1}) == (1, 0.5)
    assert equilibrium_rate({1: 1, 2: 1}, 0, 8) == pytest.approx(4)


def test_sufficient_condition():
    assert not is_surely_stable({10: 1}, 1000)
    assert not is_surely_stable({1: 1, 2: 1}, 0)  # equal terms: a root may lie on the circle
    assert is_surely_stable({1: 1, 2: 1}, 1)
    assert is_surely_stable(dict.fromkeys(range(1, 6), 1), 10)
    assert spectral_radius(dict.fromkeys(range(1, 6), 1), 10) < 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: survival({}),
        lambda: polynomial({1: 1}, -1),
        lambda: equilibrium_rate({1: 1}, 0, 0),
        lambda: worst_cycle_ratio(0, 0),
        lambda: worst_cycle_ratio(1, math.inf),
        lambda: simulate({1: 1}, 0, start="warm"),
        lambda: simulate({1: 1}, 0, reserve="some"),
        lambda: simulate({1: 1}, 0, steps=0),
        lambda: simulate({1: 1}, 0, warm_up=-1),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(ConfigError):
        call()
