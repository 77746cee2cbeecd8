"""The block states alone, without a model."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from dllm_sched_hf.d2f import D2F, D2FRequest
from dllm_sched_hf.decoder import uniform_draws

MASK = 9


def _row(prompt, block_length, blocks):
    budget = block_length * blocks
    return D2FRequest("r", prompt=prompt, block_length=block_length, max_new_tokens=budget)


def _states(request, *, add=0.1, tau=0.95, skip=0.9, slots=1, max_len=1024, stops=()):
    states = D2F(slots, max_len, MASK)
    states.start(0, request, stops)
    states.block_add_threshold[:] = add
    states.decoded_token_threshold[:] = tau
    states.skip_threshold[:] = skip
    return states


def _forwards(states, *, confidence=0.5, token=1):
    """Run slot 0 to its end with constant predictions; return the number of forwards."""
    slots = np.zeros(1, np.int64)
    while True:
        plan = states.plan(slots)
        count = len(plan.masked)
        commits = states.commit(plan, np.full(count, confidence, np.float32), np.full(count, token))
        if commits.finished[0]:
            return int(states.num_steps[0])


@pytest.mark.parametrize(
    ("tau", "add", "period"),
    [
        (0.9, 0.5, 29),
        (0.9, 0.1, 29),
        (0.9, 0.9, 29),
        (0.5, 0.1, 16),
        (0.7, 0.1, 23),
        (0.95, 0.1, 31),
        (1.0, 0.1, 32),
        (0.9, 1.0, 32),
    ],
)
def test_step_ladder_when_nothing_commits_by_itself(tau, add, period):
    """steps(n) = p (n - 1) + L + 1 for n blocks of L: 178, 207, ..., 468 by default."""
    for blocks in range(6, 17):
        states = _states(_row([1], 32, blocks), add=add, tau=tau, skip=1.0)
        assert _forwards(states, confidence=1.0) + 1 == period * (blocks - 1) + 32 + 1


def test_ladder_of_the_published_run():
    steps = [
        _forwards(_states(_row([1] * 5, 32, n), add=0.5, tau=0.9, skip=1.0)) + 1
        for n in range(6, 17)
    ]
    assert steps == [178 + 29 * k for k in range(11)]


def test_everything_confident_takes_one_forward_per_block():
    assert _forwards(_states(_row([1, 2], 4, 5)), confidence=0.95) == 5


def test_confidence_equal_to_the_threshold_does_not_commit():
    states = _states(_row([1], 4, 1), skip=0.5)
    plan = states.plan(np.zeros(1, np.int64))
    commits = states.commit(plan, np.array([0.5, 0.4, 0.5, 0.1], np.float32), np.full(4, 1))
    # Nothing passes, the first block is ready: one is forced, the first of the best.
    assert commits.chosen.tolist() == commits.forced.tolist() == [0]


def test_planning_writes_nothing():
    states = _states(_row([1, 2, 3], 4, 3), add=0.0)
    slots = np.zeros(1, np.int64)
    first, second = states.plan(slots), states.plan(slots)
    for field in attrs.fields(type(first)):
        one, two = getattr(first, field.name), getattr(second, field.name)
        assert np.array_equal(one, two) if isinstance(one, np.ndarray) else one is two is None
    assert first.num_blocks.tolist() == [1]
    assert states.num_blocks[0] == 0


def test_first_forward_holds_prompt_and_first_block():
    plan = _states(_row([4, 5, 6], 2, 2)).plan(np.zeros(1, np.int64))
    assert plan.token.tolist() == [4, 5, 6, MASK, MASK]
    assert plan.position.tolist() == [0, 1, 2, 3, 4]
    assert plan.visible.tolist() == [3, 3, 3, 5, 5]
    assert plan.masked.tolist() == [3, 4]


def test_stop_id_keeps_further_blocks_shut():
    states = _states(_row([1], 4, 5), stops=(7,))
    assert _forwards(states, confidence=0.95, token=7) == 1
    assert states.num_blocks[0] == 1
    assert states.stop_step[0] == 1


def test_rows_of_different_shape_do_not_touch_each_other():
    def start(states, slot):
        states.start(slot, [_row([1], 4, 6), _row([1] * 7, 3, 20)][slot], [(), (5, 6)][slot])

    together = _states(_row([1], 4, 6), slots=2, tau=0.5, skip=0.6)
    start(together, 1)
    alone = [_states(_row([1], 4, 6), slots=2, tau=0.5, skip=0.6) for _ in range(2)]
    start(alone[1], 1)
    for _ in range(6):
        plan = together.plan(np.arange(2))
        position = plan.position[plan.masked]
        confidence = ((position * 37 % 11) / 11).astype(np.float32)
        row = plan.row[plan.masked]
        together.commit(plan, confidence, np.ones(len(row), np.int64))
        for slot in range(2):
            mine = row == slot
            single = alone[slot].plan(np.array([slot]))
            assert single.position[single.masked].tolist() == position[mine].tolist()
            alone[slot].commit(single, confidence[mine], np.ones(mine.sum(), np.int64))
            assert np.array_equal(alone[slot].generated(slot), together.generated(slot))


def test_saved_row_goes_on_in_another_slot():
    request = _row([1, 2], 4, 6)
    reference = _forwards(_states(request, tau=0.5))
    states = _states(request, tau=0.5, slots=2)
    for _ in range(4):
        plan = states.plan(np.zeros(1, np.int64))
        states.commit(
            plan, np.full(len(plan.masked), 0.5, np.float32), np.ones(len(plan.masked), np.int64)
        )
    saved = states.save(0)
    states.start(0, _row([3] * 30, 8, 9))
    other = _states(_row([8], 2, 2), tau=0.5)
    other.restore(0, request, (), saved)
    assert _forwards(other) == reference > 4


def test_draws_are_uniform_and_keyed_by_all_three_counters():
    count = 20_000
    zeros, many = np.zeros(count, np.int64), np.arange(count)
    for args in ((many, zeros, zeros), (zeros, many, zeros), (zeros, zeros, many)):
        draws = uniform_draws(*args)
        assert draws.min() >= 0
        assert draws.max() < 1
        histogram = np.histogram(draws, 20, (0, 1))[0]
        # chi-square with 19 degrees of freedom: 43.8 is the 0.1 % point
        assert ((histogram - count / 20) ** 2 / (count / 20)).sum() < 43.8
        assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.03
    assert uniform_draws(many[:9], many[:9], many[:9])[4] == uniform_draws(*[many[4:5]] * 3)[0]
    swapped = uniform_draws(np.array([1]), np.array([2]), np.array([3]))
    assert swapped != uniform_draws(np.array([2]), np.array([1]), np.array([3]))


def test_draws_are_pinned():
    """A recorded run must draw the same tokens in every later release."""
    draws = uniform_draws(np.array([0, 7, -1]), np.array([0, 12, 3]), np.array([0, 1, 2]))
    assert [f"{draw:.12f}" for draw in draws] == [
        "0.432641786973",
        "0.613975652167",
        "0.039007122935",
    ]


def test_places_are_those_of_the_step_before_only_while_the_same_rows_run_the_same_positions():
    states = _states(_row([1, 2], 4, 2), add=0.5, tau=1.0)
    slots = np.zeros(1, np.int64)

    def step(number):
        plan = states.plan(slots)
        confidence = np.zeros(len(plan.masked), np.float32)
        confidence[:number] = 0.95
        states.commit(plan, confidence, np.ones(len(plan.masked), np.int64))
        return plan

    first, second, third, fourth = (step(number) for number in (1, 1, 1, 1))
    assert first.place.tolist() == [0, 1, 2, 3, 4, 5]
    assert second.place.tolist() == [2, 3, 4, 5], "the prompt is cached"
    assert third.place.tolist() == list(range(2, 10)), "a block was appended"
    assert fourth.place is third.place
    assert fourth.visible is third.visible
    # The same positions in the same slot, of a row whose blocks end elsewhere.
    states.start(0, _row([1, 2], 2, 4))
    states.set_prompt_cached(0, cached=True)
    for _ in range(4):
        plan = step(2)
    assert plan.place.tolist() == [6, 7, 8, 9]
    assert plan.visible.tolist() == [8, 8, 10, 10]
    states.start(0, _row([1] * 6, 4, 1))
    states.set_prompt_cached(0, cached=True)
    again = states.plan(slots)
    assert again.place is not plan.place
    assert again.place.tolist() == [6, 7, 8, 9]
    assert again.visible.tolist() == [10, 10, 10, 10]
