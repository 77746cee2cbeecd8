"""What requests need: decoders, units, budgets, and the built-in GSM8K answers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_sched import ConfigError
from dllm_sched.sim.lengths import Fixed, Geometric, Histogram, LogNormal, Uniform
from dllm_sched.sim.shapes import EvenSteps, LadderSteps, Shapes, Work, gsm8k
from dllm_sched.theory.ladder import StepLadder
from dllm_sched.theory.maxima import coefficient_of_variation, expected_maximum, refill_gain

PUBLISHED = LadderSteps(StepLadder(32, block_add_threshold=0.5, decoded_token_threshold=0.9))


def test_gsm8k_work_is_the_ladder():
    assert gsm8k().work(76, 6) == Work(76, 512, 32, 6, 177, (32, 61, 90, 119, 148, 177))
    assert gsm8k(exit_step=True).work(76, 6).block_ends == (32, 61, 90, 119, 148, 178)
    assert gsm8k(exit_step=True).work(76, 16).num_steps == 468


def test_gsm8k_moments():
    assert gsm8k().mean_steps == pytest.approx(290.39)
    published = gsm8k(exit_step=True)
    assert published.mean_steps == pytest.approx(291.39)
    assert published.size.mean == pytest.approx(9.91)
    steps = published.steps()
    assert set(steps) == {178 + 29 * k for k in range(11)}
    assert round(coefficient_of_variation(steps), 3) == 0.242
    assert round(expected_maximum(steps, 8), 2) == 401.38
    assert round(expected_maximum(steps, 16), 2) == 428.13
    assert round(refill_gain(steps, 8), 3) == 1.377


def test_gsm8k_draws():
    drawn = gsm8k(Uniform(50, 200)).draw(np.random.default_rng(3), 50_000)
    steps = np.array([work.num_steps for work in drawn])
    # Standard error of the mean: 0.242 * 291 / sqrt(50000) = 0.32.
    assert steps.mean() == pytest.approx(290.39, abs=1.5)
    # Dispersion of one request's steps: 0.242^2 * 291.39^2 / 290.39 = 17.15, within 3 %.
    assert steps.var() / steps.mean() == pytest.approx(17.15, rel=0.03)
    prompts = [work.prompt_len for work in drawn]
    assert (min(prompts), max(prompts)) == (50, 200)


def test_output_tokens_become_whole_blocks():
    shapes = Shapes(Fixed(1), unit="tokens", decoder=PUBLISHED)
    assert [shapes.work(9, tokens).num_blocks for tokens in (0, 1, 32, 33, 64)] == [1, 1, 1, 2, 2]
    assert shapes.work(9, 33) == Work(9, 64, 32, 2, 61, (32, 61))


def test_the_budget_cuts():
    shapes = Shapes(Fixed(1), unit="tokens", decoder=PUBLISHED, max_new_tokens=100)
    assert shapes.work(9, 10_000) == Work(9, 100, 32, 3, 90, (32, 61, 90))
    assert shapes.work(9, 5).max_new_tokens == 100


def test_steps_of_a_log():
    """The last block ends where the log says; a budget cuts at a block's end."""
    shapes = Shapes(Histogram.of([178, 190, 330]), unit="steps", decoder=EvenSteps(20))
    assert set(shapes.steps()) == {178, 190, 330}
    assert shapes.work(1, 50).block_ends == (20, 40, 50)
    assert shapes.work(1, 40).block_ends == (20, 40)
    cut = Shapes(Fixed(500), unit="steps", decoder=EvenSteps(20), max_new_tokens=64)
    assert cut.steps() == {40: 1}
    on_ladder = Shapes(Fixed(1), unit="steps", decoder=PUBLISHED)
    assert on_ladder.work(1, 178).block_ends[-2:] == (177, 178)
    assert on_ladder.work(1, 5).block_ends == (5,)


def test_even_steps_may_be_a_fraction():
    assert EvenSteps(2.5).block_ends(4) == (3, 5, 8, 10)


DECODERS = st.one_of(
    st.builds(EvenSteps, st.floats(1, 40), st.integers(1, 64)),
    st.builds(
        lambda length, add, tau, exit_step: LadderSteps(
            StepLadder(length, block_add_threshold=add, decoded_token_threshold=tau),
            exit_step=exit_step,
        ),
        st.integers(1, 64),
        st.floats(0, 1),
        st.floats(0, 1),
        st.booleans(),
    ),
)


@given(DECODERS, st.sampled_from(["blocks", "tokens", "steps"]), st.integers(1, 600), st.data())
def test_any_work_is_sound(decoder, unit, size, data):
    length = decoder.block_length
    budget = data.draw(st.none() | st.integers(length, 50 * length))
    shapes = Shapes(Fixed(size), unit=unit, decoder=decoder, max_new_tokens=budget)
    work = shapes.work(3, size)
    assert work.block_length == length
    assert len(work.block_ends) == work.num_blocks >= 1
    assert work.block_ends[-1] == work.num_steps >= 1
    assert list(work.block_ends) == sorted(set(work.block_ends))
    assert work.num_blocks * length <= work.max_new_tokens
    if budget is None and unit == "steps":
        assert work.num_steps == size
    assert shapes.work(3, size) is work


@pytest.mark.parametrize(
    ("size", "mean", "dispersion"),
    [
        # Geometric of mean 40: variance over mean is 39.
        (Geometric(40, 100_000), 40.0, 39.0),
        # Log-normal, median 100, sigma 1: mean 164.87 + 1/2, variance over mean 283.3 / ...
        (LogNormal(100, 1.0, 1_000_000), 165.37, 282.4),
    ],
    ids=["geometric", "lognormal"],
)
def test_step_counts_of_any_distribution(size, mean, dispersion):
    shapes = Shapes(size, unit="steps", decoder=EvenSteps(16))
    drawn = shapes.draw(np.random.default_rng(5), 100_000)
    steps = np.array([work.num_steps for work in drawn])
    assert steps.mean() == pytest.approx(mean, rel=0.02)
    assert steps.var() / steps.mean() == pytest.approx(dispersion, rel=0.1)


def test_many_shapes_do_not_pile_up():
    shapes = Shapes(Uniform(1, 16), prompt=Uniform(1, 1_000_000), decoder=PUBLISHED)
    rng = np.random.default_rng(0)
    for _ in range(20):
        shapes.draw(rng, 8192)
    assert len(shapes._cache) <= 1 << 16


def test_shapes_are_values():
    assert gsm8k() == gsm8k()
    assert gsm8k() != gsm8k(exit_step=True)
    assert hash(gsm8k()) == hash(gsm8k())


@pytest.mark.parametrize(
    "call",
    [
        lambda: Shapes(5),
        lambda: Shapes(Fixed(1), unit="words"),
        lambda: Shapes(Fixed(1), prompt=7),
        lambda: Shapes(Fixed(1), decoder=None),
        lambda: Shapes(Fixed(1), max_new_tokens=31),
        lambda: EvenSteps(0.5),
        lambda: EvenSteps(5, 0),
        lambda: LadderSteps(29),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(ConfigError):
        call()
