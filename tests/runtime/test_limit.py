"""After a step that did not fit: fewer rows at once, and one more again after good steps."""

import logging
import runpy
from pathlib import Path

import pytest

from dllm_sched import Capacity, ConfigError, Policy, Request, Scheduler, presets
from dllm_sched.policies import Composition
from dllm_sched.runtime import AsyncDriver, Driver, StepFailedError, VirtualClock
from dllm_sched.runtime.limit import RowLimit
from dllm_sched.testing import FakeEngine
from dllm_sched.theory.wait import TrafficType

needed = runpy.run_path(str(Path(__file__).parents[1] / "needed.py"))["needed"]


def preset(name):
    more = {"types": {"": TrafficType(1.0, 0, 1)}} if name in ("wait", "nested_wait") else {}
    return presets.PRESETS[name](**needed(name, 8), **more)


class OneAtATime(Composition):
    """Whoever has the fewest steps; the others sit out, in their slots."""

    needs = frozenset({"rows"})

    def select(self, state, round):
        return [min(round.rows, key=lambda rv: (rv.num_steps, rv.sequence))]


class Memory(FakeEngine):
    """Fits so many rows from each step on; halves them when they do not."""

    fits = {0: 8}  # noqa: RUF012 - each test gives its own

    def run(self, batch):
        most = next(rows for step, rows in reversed(self.fits.items()) if self.num_runs >= step)
        if len(batch.rows) > most:
            self.num_runs += 1
            keep = len(batch.rows) // 2
            slots = [row.slot for row in batch.rows]
            raise StepFailedError("no memory", restart=slots[keep:], max_num_seqs=keep)
        return super().run(batch)


def serve(fits, *, slots=8, steps=200, count=None, policy=None, then=None, fail_at=None, **options):
    """Serve ``count`` requests (default: one a slot); return the limits it went through."""
    clock = VirtualClock(0.0)
    scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=slots))
    count = slots if count is None else count
    engine = Memory(
        slots,
        clock=clock,
        fail_at=fail_at,
        service_s=lambda batch: 1.0,
        steps=lambda request: request.max_new_tokens,
    )
    engine.fits = fits or engine.fits
    limits, finished = [slots], {}

    def told(update):
        finished.update({one.request.id: one for one in update.finished})
        if scheduler.capacity.max_num_seqs != limits[-1]:
            limits.append(scheduler.capacity.max_num_seqs)
        if then is not None:
            then(driver, engine.num_runs)

    driver = Driver(scheduler, engine, clock, on_update=told, **options)
    coming = [
        (0.0, Request(f"r{n}", prompt_len=4, max_new_tokens=steps, block_length=4))
        for n in range(count)
    ]
    driver.run(coming)
    assert {one.reason.value for one in finished.values()} == {"length"}
    assert len(finished) == count
    scheduler.check_invariants()
    return limits


def test_the_limit_comes_back_row_by_row(caplog):
    with caplog.at_level(logging.INFO, "dllm_sched"):
        limits = serve({0: 4, 1: 8}, recover_steps=10)
    assert limits == [8, 4, 5, 6, 7, 8]
    told = [record.getMessage() for record in caplog.records]
    assert "no memory" in told[0]
    assert told[1:] == [f"steps fit again: from here on at most {n} rows" for n in (5, 6, 7, 8)]


def test_it_never_goes_above_where_it_came_from():
    assert serve({0: 4, 1: 100}, recover_steps=1) == [8, 4, 5, 6, 7, 8]


def test_it_stays_down_if_so_told():
    assert serve({0: 4, 1: 8}, recover_steps=None) == [8, 4]


def test_each_attempt_that_does_not_fit_makes_the_next_one_wait_twice_as_long():
    limit, capacity = RowLimit(3), Capacity(max_num_seqs=4)
    waits = []
    for _ in range(4):
        lower = limit.lower(capacity, 2)
        limit.lowered(capacity, lower)
        capacity, count = lower, 0
        while limit.step(2, lower) is None:
            count += 1
        waits.append(count + 1)
        limit.raised()
        capacity = Capacity(max_num_seqs=3)
    assert waits == [3, 6, 12, 24]


def test_steps_that_do_not_fill_the_limit_tell_nothing():
    limit, capacity = RowLimit(2), Capacity(max_num_seqs=8)
    lower = limit.lower(capacity, 4)
    limit.lowered(capacity, lower)
    assert [limit.step(rows, lower) for rows in (1, 3, 4, 3, 3)] == [None] * 5
    assert limit.step(4, lower).max_num_seqs == 5


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
def test_it_falls_and_comes_back_under_every_preset(name):
    """Whatever number of rows a policy was built for, a limit below it is no reason to fail."""
    limits = serve(
        {0: 8, 5: 3, 40: 8},
        steps=20,
        count=48,
        policy=preset(name),
        recover_steps=2,
        max_restarts=0,
    )
    assert limits[-1] == 8
    assert min(limits) == (8 if name == "per_request" else 2)


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_preset_serves_all_with_fewer_slots_for_good(name, rows):
    limits = serve(
        {0: 8, 1: rows}, steps=9, count=12, policy=preset(name), recover_steps=None, max_restarts=0
    )
    assert limits[-1] <= rows or name == "per_request"


def test_it_comes_back_as_far_as_the_policy_fills_it():
    """One row more than the policy ever runs holds nobody back; what is beyond was never tried."""
    before = []

    def then(driver, step):
        if step == 60 and not before:
            before.append(driver._scheduler.capacity.max_num_seqs)
            driver.call(driver._scheduler.set_policy, presets.continuous(20))

    limits = serve(
        {0: 8, 1: 64},
        slots=64,
        steps=30,
        count=90,
        policy=presets.continuous(16),
        then=then,
        recover_steps=2,
    )
    assert before == [17]
    assert limits == [64, *range(8, 22)]  # the policy after it has 20 rows


def test_rows_that_sit_out_take_their_slots_too():
    policy = Policy(composition=OneAtATime())
    fails = {9: StepFailedError("no memory", max_num_seqs=4)}
    limits = serve({}, steps=20, count=48, policy=policy, recover_steps=3, fail_at=fails)
    assert limits == [8, 4, 5, 6, 7, 8]


def test_a_policy_can_be_swapped_while_the_limit_is_down():
    swapped = []

    def then(driver, step):
        if step == 20:
            scheduler = driver._scheduler
            assert scheduler.capacity.max_num_seqs < 8
            swapped.append(driver.call(scheduler.set_policy, presets.fixed_fill(8)))
            swapped.append(driver.call(scheduler.set_policy, presets.fixed_fill(9)))

    limits = serve({0: 4, 40: 8}, steps=30, count=32, then=then, recover_steps=10)
    assert limits[-1] == 8
    assert swapped[0].exception() is None
    assert "only 8 slots" in str(swapped[1].exception())  # more than there ever were


def test_another_limit_that_somebody_sets_meanwhile_stays():
    def then(driver, step):
        if step == 20:
            driver.call(driver._scheduler.set_capacity, Capacity(max_num_seqs=2))

    assert serve({0: 4, 1: 8}, recover_steps=10, then=then, steps=100) == [8, 4, 5, 2]


def test_a_limit_that_is_no_lower_is_none():
    limit = RowLimit(1)
    assert limit.lower(Capacity(max_num_seqs=4), None) is None
    assert limit.lower(Capacity(max_num_seqs=4), 4) is None
    assert limit.lower(Capacity(max_num_seqs=4), 0).max_num_seqs == 1
    assert not limit.is_lowered


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, "64"])
def test_what_cannot_be_is_refused(wrong):
    for driver in (Driver, AsyncDriver):
        scheduler = Scheduler(capacity=Capacity(max_num_seqs=1))
        with pytest.raises(ConfigError, match="recover_steps"):
            driver(scheduler, FakeEngine(1), recover_steps=wrong)
