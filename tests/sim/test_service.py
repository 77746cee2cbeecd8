"""Service-time models, and fits that find a model again and say how far off they are."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_sched import ConfigError
from dllm_sched.sim.service import (
    BurstGap,
    Constant,
    Linear,
    Table,
    fit_linear,
    fit_table,
    load_samples,
)

TABLE = Table([1, 8, 16], [0, 1000], [[0.010, 0.020], [0.012, 0.030], [0.020, 0.050]])


def test_constant_and_linear():
    assert Constant(0.0241).step_s(16, 5000) == 0.0241
    model = Linear(0.02, row_s=0.001, token_s=1e-6)
    assert model.step_s(16, 4000) == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("rows", "tokens", "seconds"),
    [
        (1, 0, 0.010),
        (8, 1000, 0.030),
        (1, 500, 0.015),
        (12, 0, 0.016),
        (12, 500, 0.028),
        # Above the grid the last slope goes on: 0.001 a row at 0 tokens, 30e-6 a token at 16 rows.
        (24, 0, 0.028),
        (16, 2000, 0.080),
    ],
)
def test_table(rows, tokens, seconds):
    assert TABLE.step_s(rows, tokens) == pytest.approx(seconds)


def test_below_the_table_is_its_edge():
    table = Table([4, 8], [100, 200], [[1.0, 2.0], [3.0, 4.0]])
    assert table.step_s(1, 0) == 1.0
    assert table.step_s(1, 150) == 1.5
    assert table.step_s(6, 0) == 2.0


def test_a_falling_table_does_not_fall_on_beyond_its_end():
    table = Table([1, 2], [0], [[2.0], [1.0]])
    assert table.step_s(1, 7) == 2.0
    assert table.step_s(100, 7) == 1.0


def test_a_table_of_one_point_is_constant():
    assert Table([4], [100], [[0.5]]).step_s(64, 9000) == 0.5


@given(st.integers(1, 64), st.integers(0, 5000))
def test_a_table_of_a_linear_model_is_the_model(rows, tokens):
    model = Linear(0.02, 0.001, 1e-6)
    axes = [1, 5, 32], [0, 100, 2000]
    table = Table(*axes, [[model.step_s(r, t) for t in axes[1]] for r in axes[0]])
    assert table.step_s(rows, tokens) == pytest.approx(model.step_s(rows, tokens))


def test_burst_gap():
    """100 bytes a token; the path takes 1e6 bytes a second and holds 500."""
    model = BurstGap(
        Constant(0.001), bytes_per_token=100, issue_s=1e-5, bandwidth=1e6, outstanding=500
    )
    assert model.step_s(1, 5) == pytest.approx(0.00101)  # 500 bytes fit
    assert model.step_s(1, 20) == pytest.approx(0.00101 + 0.0015)  # 1500 wait
    slow = BurstGap(Constant(1.0), bytes_per_token=100, bandwidth=1e6, outstanding=1e9)
    assert slow.step_s(1, 9999) == 1.0  # drained in the gap


def test_burst_gap_defaults_are_the_published_machine():
    """1 GiB a step with no gap to speak of: all but 4.25 MiB at 717 GB/s."""
    model = BurstGap(Constant(1e-3), bytes_per_token=2**20)
    stall = (1024 - 4.25) * 2**20 / 717e9
    assert model.step_s(1, 1024) == pytest.approx(1e-3 + stall)


def _samples(model, noise=0.0, seed=1):
    rng = np.random.default_rng(seed)
    return [
        (rows, tokens, model.step_s(rows, tokens) * math.exp(noise * rng.standard_normal()))
        for rows in (1, 2, 4, 8, 16)
        for tokens in (32, 128, 512, 2048)
        for _ in range(3)
    ]


@pytest.mark.parametrize(
    "model",
    [Linear(0.02, 0.001, 1e-6), Linear(0.02), Linear(0.0, 0.003), Linear(0.02, 0.0, 3e-6)],
    ids=str,
)
@pytest.mark.parametrize("weights", ["equal", "relative"])
def test_a_fit_finds_the_model_again(model, weights):
    fit = fit_linear(_samples(model), weights=weights)
    assert fit.model.base_s == pytest.approx(model.base_s, abs=1e-12)
    assert fit.model.row_s == pytest.approx(model.row_s, abs=1e-12)
    assert fit.model.token_s == pytest.approx(model.token_s, abs=1e-15)
    assert fit.num_samples == 60
    assert fit.mean_error == pytest.approx(0, abs=1e-9)
    assert fit.r_squared == pytest.approx(1)


def test_the_error_of_a_noisy_fit():
    """Log-normal noise of 5 %: the mean absolute error is sqrt(2 / pi) of it, 4 %."""
    fit = fit_linear(_samples(Linear(0.02, 0.001, 1e-6), noise=0.05) * 1, weights="relative")
    assert fit.model.base_s == pytest.approx(0.02, rel=0.1)
    assert fit.mean_error == pytest.approx(0.04, abs=0.012)
    assert 0.08 < fit.p99_error < 0.20
    assert abs(fit.bias) < 0.01
    assert 0.8 < fit.r_squared < 1
    assert "from 60 steps: error" in str(fit)
    assert "R^2" in str(fit)


def test_a_fit_never_has_negative_costs():
    """Steps that get faster with tokens: the slope is 0, and the error says that it is wrong."""
    fit = fit_linear([(1, 0, 1.0), (1, 10, 0.9), (1, 20, 0.8)])
    assert (fit.model.base_s, fit.model.row_s, fit.model.token_s) == (pytest.approx(0.9), 0, 0)
    assert fit.mean_error == pytest.approx((0.1 + 0 + 0.125) / 3)
    assert fit.r_squared == pytest.approx(0)


def test_what_the_samples_cannot_tell_apart():
    """Always 32 tokens a row: one of the two slopes explains everything."""
    model = Linear(0.02, 0.0, 1e-5)
    fit = fit_linear([(rows, 32 * rows, model.step_s(rows, 32 * rows)) for rows in range(1, 17)])
    assert fit.mean_error == pytest.approx(0, abs=1e-9)
    assert 0.0 in (fit.model.row_s, fit.model.token_s)


def test_one_sample_is_a_constant():
    fit = fit_linear([(4, 128, 0.5)])
    assert fit.model.step_s(4, 128) == pytest.approx(0.5)
    assert fit.r_squared == 1


def test_a_fitted_table():
    fit = fit_table([(1, 0, 1.0), (1, 0, 2.0), (8, 0, 4.0), (1, 10, 2.0), (8, 10, 6.0)])
    assert fit.model == Table([1, 8], [0, 10], [[1.5, 2.0], [4.0, 6.0]])
    assert fit.mean_error == pytest.approx((0.5 + 0.25) / 5)
    assert fit.bias == pytest.approx(0)
    with pytest.raises(ConfigError, match=r"\(8, 10\)"):
        fit_table([(1, 0, 1.0), (8, 0, 4.0), (1, 10, 2.0)])


def test_samples_from_a_file(tmp_path):
    path = tmp_path / "samples.csv"
    path.write_text("rows,tokens,seconds\n1,32,0.02\n\n16,512,0.03\n")
    assert load_samples(path) == [(1, 32, 0.02), (16, 512, 0.03)]


@pytest.mark.parametrize(
    "line", ["1,32", "1,x,0.02", "0,32,0.02", "1,-1,0.02", "1,32,0", "1,1,nan"]
)
def test_a_malformed_sample_is_named(tmp_path, line):
    path = tmp_path / "samples.csv"
    path.write_text(f"rows,tokens,seconds\n1,32,0.02\n{line}\n")
    with pytest.raises(ConfigError, match="line 3"):
        load_samples(path)


def test_models_are_values():
    assert Table((1, 8, 16), (0, 1000), TABLE.seconds) == TABLE
    assert len({TABLE, Constant(1.0), Constant(1.0), Linear(1.0)}) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda: Constant(0),
        lambda: Constant(math.inf),
        lambda: Linear(-1),
        lambda: Linear(0, 0, 1e-6),
        lambda: Linear(math.nan),
        lambda: Table([], [0], []),
        lambda: Table([0], [0], [[1.0]]),
        lambda: Table([2, 1], [0], [[1.0], [1.0]]),
        lambda: Table([1, 2], [0], [[1.0]]),
        lambda: Table([1], [0], [[0.0]]),
        lambda: Table([1], [0, 0], [[1.0, 1.0]]),
        lambda: BurstGap(0.02, bytes_per_token=1),
        lambda: BurstGap(Constant(1.0), bytes_per_token=-1),
        lambda: BurstGap(Constant(1.0), bytes_per_token=1, bandwidth=0),
        lambda: fit_linear([]),
        lambda: fit_linear([(0, 1, 1.0)]),
        lambda: fit_linear([(1, 1, math.nan)]),
        lambda: fit_linear([(1, 1, 1.0)], weights="log"),
        lambda: fit_table([]),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(ConfigError):
        call()
