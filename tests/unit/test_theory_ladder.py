"""The step ladder against the published numbers and against the decoder's own block states."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sched import ConfigError
from dllm_sched.theory.ladder import GSM8K_BLOCKS, StepLadder
from dllm_sched.theory.maxima import (
    coefficient_of_variation,
    expected_maximum,
    mean,
    refill_gain,
)
from dllm_sched_hf.d2f import D2F, D2FRequest


def _ladder(append, activate, length=32):
    return StepLadder(length, block_add_threshold=append, decoded_token_threshold=activate)


PUBLISHED = _ladder(0.5, 0.9)


def test_eleven_levels():
    levels = [178, 207, 236, 265, 294, 323, 352, 381, 410, 439, 468]
    assert [PUBLISHED.steps(n) for n in range(6, 17)] == levels
    assert PUBLISHED.forwards(16) == 467


@pytest.mark.parametrize(
    ("activate", "append", "period"),
    [
        (0.9, 0.1, 29),
        (0.9, 0.5, 29),
        (0.9, 0.9, 29),
        (0.9, 1.0, 32),
        (0.5, 0.1, 16),
        (0.7, 0.1, 23),
        (0.95, 0.1, 31),
        (1.0, 0.1, 32),
    ],
)
def test_periods(activate, append, period):
    assert _ladder(append, activate).period == period


def test_a_block_of_any_length_has_a_period():
    length = 2**50
    assert StepLadder(length, block_add_threshold=0.25, decoded_token_threshold=0.5).period == 2**49


def test_first_and_last_level_when_blocks_wait_for_each_other():
    assert [_ladder(0.1, 1.0).steps(n) for n in (6, 16)] == [193, 513]


@pytest.mark.parametrize(("append", "active"), [(0.1, 1.899), (0.5, 1.5139), (0.9, 1.096)])
def test_blocks_at_work(append, active):
    digits = len(str(active)) - 2
    assert round(_ladder(append, 0.9).mean_active_blocks(16), digits) == active


def test_active_block_steps_of_the_longest_answer():
    assert PUBLISHED.mean_active_blocks(16) * 467 == pytest.approx(707, abs=1e-9)


def test_defaults_are_ours():
    assert (StepLadder().block_length, StepLadder().period) == (32, 31)


def _replay(ladder, num_blocks):
    """Run the decoder's block states when no token passes the confidence threshold."""
    length = ladder.block_length
    states = D2F(1, 4 + length * num_blocks, 9)
    budget = length * num_blocks
    states.start(0, D2FRequest("r", prompt=[1] * 4, block_length=length, max_new_tokens=budget))
    states.block_add_threshold[:] = ladder.block_add_threshold
    states.decoded_token_threshold[:] = ladder.decoded_token_threshold
    states.skip_threshold[:] = 1.0
    ends, active, forwards = [], 0, 0
    while True:
        finished = int(states.num_finished[0])
        plan = states.plan(np.zeros(1, np.int64))
        active += int(plan.num_blocks[0]) - finished
        count = len(plan.masked)
        commits = states.commit(plan, np.full(count, 1.0, np.float32), np.ones(count, np.int64))
        forwards += 1
        ends += [forwards] * (int(states.num_finished[0]) - finished)
        if commits.finished[0]:
            return tuple(ends), active / forwards


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 20),
    num_blocks=st.integers(1, 6),
    thresholds=st.tuples(*[st.sampled_from([0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 1.0])] * 2),
)
def test_ladder_is_what_the_decoder_does(length, num_blocks, thresholds):
    ladder = _ladder(*thresholds, length)
    ends, active = _replay(ladder, num_blocks)
    assert ladder.block_ends(num_blocks) == ends
    assert ladder.forwards(num_blocks) == ends[-1]
    assert ladder.mean_active_blocks(num_blocks) == pytest.approx(active, rel=1e-12)


@pytest.mark.parametrize("append", [0.1, 0.5, 0.9])
def test_the_published_run_is_what_the_decoder_does(append):
    ladder = _ladder(append, 0.9)
    for num_blocks in (6, 11, 16):
        ends, active = _replay(ladder, num_blocks)
        assert ladder.block_ends(num_blocks) == ends
        assert ladder.mean_active_blocks(num_blocks) == pytest.approx(active)


def test_gsm8k_histogram():
    assert sum(GSM8K_BLOCKS.values()) == 100
    assert mean(GSM8K_BLOCKS) == pytest.approx(9.91, abs=1e-12)
    steps = {PUBLISHED.steps(n): weight for n, weight in GSM8K_BLOCKS.items()}
    assert mean(steps) == pytest.approx(291.39, abs=1e-10)
    assert round(coefficient_of_variation(steps), 3) == 0.242
    assert round(expected_maximum(steps, 8), 2) == 401.38
    assert round(expected_maximum(steps, 16), 2) == 428.13
    assert round(refill_gain(steps, 8), 3) == 1.377
    assert round(refill_gain(steps, 16), 3) == 1.469


def test_expected_maximum_of_a_die():
    die = dict.fromkeys(range(1, 7), 1)
    assert expected_maximum(die, 1) == pytest.approx(3.5)
    assert expected_maximum(die, 2) == pytest.approx(161 / 36)
    assert expected_maximum({7: 2.5}, 100) == 7
    assert expected_maximum({1: 1, 1000: 1e-9}, 1) == pytest.approx(1 + 999e-9, rel=1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda: StepLadder(0),
        lambda: _ladder(-0.1, 0.9),
        lambda: _ladder(0.1, 1.1),
        lambda: _ladder(0.1, math.nan),
        lambda: PUBLISHED.steps(0),
        lambda: PUBLISHED.block_ends(1.5),
        lambda: mean({}),
        lambda: mean({0: 1}),
        lambda: mean({1: 0}),
        lambda: mean({1: -1, 2: 3}),
        lambda: mean({1: math.inf}),
        lambda: expected_maximum({1: 1}, 0),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(ConfigError):
        call()
