"""After a step that did not fit: fewer rows at once, and one more again after good steps."""

import logging

import pytest

from dllm_sched import Capacity, ConfigError, Request, Scheduler
from dllm_sched.runtime import AsyncDriver, Driver, StepFailedError, VirtualClock
from dllm_sched.runtime.limit import RowLimit
from dllm_sched.testing import FakeEngine


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


def serve(fits, *, slots=8, steps=200, then=None, **options):
    """Rows of a saturated run, step by step, and the limits it went through."""
    clock = VirtualClock(0.0)
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=slots))
    engine = Memory(
        slots,
        clock=clock,
        service_s=lambda batch: 1.0,
        steps=lambda request: request.max_new_tokens,
    )
    engine.fits = fits
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
        for n in range(slots)
    ]
    driver.run(coming)
    assert {one.reason.value for one in finished.values()} == {"length"}
    assert len(finished) == slots
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
