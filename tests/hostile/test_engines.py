"""Engines that report what cannot be: each such call is refused whole, and the run goes on."""

from __future__ import annotations

import copy
import io
import logging
import math
import pickle
import random
import runpy
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dllm_sched import (
    BlockBoundary,
    Capacity,
    ClockError,
    ConfigError,
    EngineProtocolError,
    FinishReason,
    OutcomeError,
    Phase,
    PhaseChange,
    Policy,
    Request,
    RowFailed,
    RowFate,
    RowFinished,
    Scheduler,
    StepBatch,
    StepOutcome,
)
from dllm_sched.journal import JournaledScheduler, replay
from dllm_sched.runtime import Driver, StepFailedError, VirtualClock
from dllm_sched.testing import FakeEngine

RIG = runpy.run_path(str(Path(__file__).with_name("ledger.py")))
Ledger, snapshot = RIG["Ledger"], RIG["snapshot"]

EOS = FinishReason.EOS
CAPACITY = Capacity(max_num_seqs=4)


def running(ahead: int = 1, **arguments: Any) -> Any:
    """A ledger in the middle of its work, a step in flight (and one ahead of it)."""
    ledger = Ledger(max_in_flight=ahead, **arguments)
    for _ in range(7):
        ledger.submit()
    for _ in range(4):
        ledger.next()
        ledger.complete()
    for _ in range(ahead):
        ledger.next()
    return ledger


def refused(ledger: Any, *calls: Any, errors: Any = EngineProtocolError) -> None:
    """Each call raises and changes nothing; an honest engine then brings everybody home."""
    for call in calls:
        before = snapshot(ledger.scheduler)
        with pytest.raises(errors):
            call()
        assert snapshot(ledger.scheduler) == before
        ledger.scheduler.check_invariants()
    ledger.serve()


def bad_columns(batch: StepBatch) -> list[StepOutcome]:
    """Outcomes that cannot be, of a batch that is not all of the slots."""
    slot = batch.rows[0].slot
    free = max(row.slot for row in batch.rows) + 1
    request = batch.rows[0].request
    columns: list[Any] = [
        {"finished": column}
        for column in (
            5,
            "ab",
            {slot: EOS},
            (None,),
            (slot,),
            ((slot, EOS, None),),
            (RowFailed(slot, ValueError()),),
            (RowFinished(slot, "eos"),),
            (RowFinished(slot, RowFate.FAIL),),
            (RowFinished(slot, EOS), RowFinished(slot, EOS)),
            *((RowFinished(one, EOS),) for one in (free, -1, 10**30, "0", None, 0.0, True, [])),
        )
    ]
    columns += [
        {"failed": (RowFailed(slot, "error"),)},
        {"failed": (RowFailed(slot, ValueError),)},
        {"failed": (RowFailed(free, ValueError()),)},
        {"failed": (RowFailed(slot, ValueError()),) * 2, "finished": None},
        {"failed": (RowFailed(slot, ValueError()),), "finished": (RowFinished(slot, EOS),)},
        {"phases": (PhaseChange(slot, "reuse"),)},
        {"phases": (PhaseChange(free, Phase.REUSE),)},
        {"phases": (PhaseChange(slot, Phase.REUSE), PhaseChange(slot, Phase.REFRESH))},
        {"boundaries": (BlockBoundary(free, 1, 5),)},
        {"boundaries": (BlockBoundary(slot, -1, 5),)},
        {"boundaries": (BlockBoundary(slot, 1.5, 5),)},
        {"boundaries": (BlockBoundary(slot, 0, 5),)},
        {"boundaries": (BlockBoundary(slot, request.max_blocks + 1, 5),)},
        {"boundaries": (BlockBoundary(slot, 2, None),)},
        {"boundaries": (BlockBoundary(slot, 2, math.nan),)},
        {"boundaries": (BlockBoundary(slot, 2, request.max_total_tokens + 1),)},
        {"boundaries": (BlockBoundary(slot, 2, -5),)},
        {"masked_remaining": ()},
        {"masked_remaining": (1,) * (len(batch.rows) + 1)},
        {"masked_remaining": (-1,) * len(batch.rows)},
        {"masked_remaining": (math.nan,) * len(batch.rows)},
        {"masked_remaining": 3},
    ]
    return [StepOutcome(**column) for column in columns]


@pytest.mark.parametrize("ahead", [1, 2])
def test_outcomes_that_cannot_be(ahead):
    ledger = running(ahead)
    ledger.told(ledger.scheduler.cancel("r6", now=ledger.now))
    scheduler, batch = ledger.scheduler, ledger.flights[0]
    good = StepOutcome(finished=(RowFinished(batch.rows[-1].slot, EOS),))
    outcomes: list[Any] = [None, 5, (), {}, [], "x", batch, *bad_columns(batch)]
    outcomes += [  # a fault in one column, with good news in another
        one._replace(finished=good.finished)
        for one in bad_columns(batch)
        if not one.finished and not one.failed
    ]
    refused(
        ledger,
        *(
            lambda outcome=outcome: scheduler.complete_step(batch, outcome, now=ledger.now)
            for outcome in outcomes
        ),
        errors=OutcomeError,
    )


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_batch_that_is_not_in_flight(ahead):
    other, ledger = running(ahead), running(ahead)
    other.told(other.scheduler.cancel("r3", now=other.now))
    while other.flights[0].step_id < 8:
        other.complete()
        other.next()
    while ledger.flights[0].step_id < 8:
        ledger.complete()
        ledger.next()
    scheduler, batch = ledger.scheduler, ledger.flights[0]
    foreign = other.flights[0]
    assert foreign.step_id == batch.step_id
    assert foreign.rows != batch.rows
    wrong: list[Any] = [
        foreign,
        batch._replace(step_id=batch.step_id - 1),
        batch._replace(step_id=batch.step_id + 1),
        batch._replace(step_id=None),
        batch._replace(rows=batch.rows[:-1]),
        batch._replace(rows=()),
        None,
        5,
        (),
        tuple(batch),
        batch.rows,
        *ledger.flights[1:],
    ]
    calls = []
    for one in wrong:
        calls.append(lambda one=one: scheduler.complete_step(one, now=ledger.now))
        calls.append(
            lambda one=one: scheduler.fail_step(one, ValueError(), rows={}, now=ledger.now)
        )
    refused(ledger, *calls)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])  # noqa: S301
def test_a_copy_of_the_batch_in_flight_will_do(twin):
    """It may have been to another process and back."""
    ledger = running()
    ledger.flights[0] = twin(ledger.flights[0])
    ledger.complete()
    ledger.next()
    ledger.flights[0] = twin(ledger.flights[0])
    ledger.fail(RowFate.RESTART)
    ledger.serve()


@pytest.mark.parametrize("ahead", [1, 2])
def test_calls_out_of_order(ahead):
    ledger = running(ahead)
    scheduler, batch = ledger.scheduler, ledger.flights[0]
    while ledger.flights:
        ledger.complete()
    refused(
        ledger,
        lambda: scheduler.complete_step(batch, now=ledger.now),
        lambda: scheduler.complete_step(None, now=ledger.now),
        lambda: scheduler.fail_step(batch, ValueError(), rows={}, now=ledger.now),
        lambda: scheduler.fail_step(None, ValueError(), rows={}, now=ledger.now),
        scheduler.horizon,
    )
    ledger = running(ahead)
    refused(ledger, lambda: ledger.scheduler.next_step(now=ledger.now))


def test_a_row_that_finished_is_not_heard_of_again():
    ledger = running()
    scheduler, batch = ledger.scheduler, ledger.flights.pop()
    slot = batch.rows[0].slot
    over = StepOutcome(finished=(RowFinished(slot, EOS),))
    for _ in range(7):  # until nobody takes its place
        ledger.told(scheduler.complete_step(batch, over, now=ledger.now))
        batch = scheduler.next_step(now=ledger.now).batch
        ledger.told(scheduler.stats() and _nothing(batch))
        batch = ledger.flights.pop()
        if all(row.slot != slot for row in batch.rows):
            break
    else:
        pytest.fail("somebody always came")
    ledger.flights.append(batch)
    refused(
        ledger,
        lambda: scheduler.complete_step(batch, over, now=ledger.now),
        lambda: scheduler.fail_step(batch, ValueError(), rows={slot: RowFate.KEEP}, now=ledger.now),
        errors=OutcomeError,
    )


def _nothing(batch: StepBatch) -> Any:
    from dllm_sched import Update

    return Update(batch)


@pytest.mark.parametrize("ahead", [1, 2])
def test_times_that_cannot_be(ahead):
    ledger = running(ahead)
    scheduler, batch = ledger.scheduler, ledger.flights[0]
    request = Request("x", prompt_len=1, max_new_tokens=1)
    calls: list[Any] = []
    for now in (ledger.now - 1e-9, -1.0, math.nan, math.inf, -math.inf, 10**400):
        for name, arguments in (
            ("submit", (request,)),
            ("cancel", ("r1",)),
            ("requeue", ("r1",)),
            ("complete_step", (batch,)),
            ("complete_step", (batch, StepOutcome(finished=(RowFinished(0, EOS),)))),
            ("set_policy", (Policy(),)),
            ("set_capacity", (CAPACITY,)),
            ("pause", ()),
            ("resume", ()),
            ("drain", ()),
        ):
            calls.append(
                lambda now=now, name=name, arguments=arguments: getattr(scheduler, name)(
                    *arguments, now=now
                )
            )
        calls.append(lambda now=now: scheduler.fail_step(batch, ValueError(), rows={}, now=now))
    refused(ledger, *calls, errors=ClockError)


def test_times_that_are_no_numbers():
    ledger = running()
    scheduler, batch = ledger.scheduler, ledger.flights[0]
    request = Request("x", prompt_len=1, max_new_tokens=1, queue_timeout_s=5.0)
    refused(
        ledger,
        *(
            lambda now=now, call=call: call(now)
            for now in (None, "now", b"", [], 1j, object())
            for call in (
                lambda now: scheduler.submit(request, now=now),
                lambda now: scheduler.complete_step(batch, now=now),
                lambda now: scheduler.cancel("r1", now=now),
            )
        ),
        errors=ClockError,
    )


@pytest.mark.parametrize("steps", [0, -1, 2.0, None, "1", math.nan, math.inf])
def test_numbers_of_steps_that_cannot_be(steps):
    ledger = running()
    batch = ledger.flights[0]
    refused(ledger, lambda: ledger.scheduler.complete_step(batch, now=ledger.now, steps=steps))


@pytest.mark.parametrize("ahead", [1, 2])
def test_failures_that_cannot_be(ahead):
    ledger = running(ahead)
    scheduler, batch = ledger.scheduler, ledger.flights[0]
    slot = batch.rows[0].slot

    def fail(error: Any, rows: Any) -> Any:
        return lambda: scheduler.fail_step(batch, error, rows=rows, now=ledger.now)

    refused(
        ledger,
        fail("error", {}),
        fail(ValueError, {}),
        fail(None, {}),
        fail(ValueError(), None),
        fail(ValueError(), [slot]),
        fail(ValueError(), {slot: "restart"}),
        fail(ValueError(), {slot: None}),
        fail(ValueError(), {99: RowFate.FAIL}),
        fail(ValueError(), {"0": RowFate.FAIL}),
        fail(ValueError(), {slot: RowFate.FAIL, -1: RowFate.FAIL}),
        errors=OutcomeError,
    )


class _UnspeakableError(Exception):
    def __repr__(self) -> str:
        raise ValueError("no words")

    __str__ = __repr__


@pytest.mark.parametrize("journaled", [False, True])
def test_an_error_that_cannot_be_shown_ends_rows_all_the_same(journaled):
    lines = io.StringIO()
    kind = partial(JournaledScheduler, lines) if journaled else Scheduler
    ledger = running(observers=[lambda event: None], kind=kind)
    slot = ledger.flights[0].rows[0].slot
    failed = StepOutcome(failed=(RowFailed(slot, _UnspeakableError()),))
    ledger.told(ledger.scheduler.complete_step(ledger.flights.pop(), failed, now=ledger.now))
    ledger.next()
    batch = ledger.flights.pop()
    fates = {row.slot: RowFate.FAIL for row in batch.rows}
    ledger.told(ledger.scheduler.fail_step(batch, _UnspeakableError(), rows=fates, now=ledger.now))
    ledger.serve()
    if journaled:
        assert "<_UnspeakableError>" in lines.getvalue()
        assert replay(lines.getvalue().splitlines(keepends=True)).difference is None


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_a_random_engine(seed, ahead):
    """Outcomes drawn blindly: what is taken must be bookable, what is refused changes nothing."""
    rng = random.Random(seed)
    ledger = running(ahead)
    scheduler = ledger.scheduler
    taken = 0
    for _ in range(300):
        ledger.now += 0.1
        if rng.random() < 0.4:
            ledger.submit()
        if len(ledger.flights) < ahead:
            ledger.next()
        if not ledger.flights:
            continue
        slots = [rng.randrange(-1, 5) for _ in range(rng.randrange(3))]
        outcome = StepOutcome(
            finished=tuple(RowFinished(s, EOS) for s in slots if rng.random() < 0.3),
            boundaries=tuple(
                BlockBoundary(s, rng.randrange(8), rng.randrange(32))
                for s in slots
                if rng.random() < 0.3
            ),
            phases=tuple(
                PhaseChange(s, rng.choice(list(Phase))) for s in slots if rng.random() < 0.3
            ),
            failed=tuple(RowFailed(s, ValueError()) for s in slots if rng.random() < 0.2),
        )
        before = snapshot(scheduler)
        try:
            update = scheduler.complete_step(ledger.flights[0], outcome, now=ledger.now)
        except OutcomeError:
            assert snapshot(scheduler) == before
            scheduler.check_invariants()
            continue
        taken += 1
        ledger.flights.pop(0)
        ledger.told(update)
    assert taken > 50
    scheduler.check_invariants()
    for name in list(ledger.active):  # their progress is beyond what an honest engine may report
        ledger.told(scheduler.cancel(name, now=ledger.now))
    ledger.serve()


# --- under the driver -----------------------------------------------------------------------------


class Faulty(FakeEngine):
    """Does its work, or half of it, and then something else at the runs that are named."""

    def __init__(self, slots: int, fault: Any, at: set[int], clock: VirtualClock) -> None:
        super().__init__(slots, steps=lambda request: 6, service_s=lambda batch: 0.1, clock=clock)
        self.fault = fault
        self.at = at
        self.before: tuple[StepBatch, StepOutcome] | None = None

    def run(self, batch: StepBatch) -> StepOutcome:
        number = self.num_runs
        outcome = super().run(batch)
        if number in self.at:
            outcome = self.fault(self, batch, outcome)
        self.before = (batch, outcome)
        return outcome


def half_done(engine: Any, batch: StepBatch, outcome: StepOutcome) -> Any:
    raise RuntimeError("in the middle of it")


def out_of_memory(engine: Any, batch: StepBatch, outcome: StepOutcome) -> Any:
    slots = [row.slot for row in batch.rows]
    raise StepFailedError("memory", restart=slots[1:], max_num_seqs=len(slots) - 1)


def of_the_step_before(engine: Any, batch: StepBatch, outcome: StepOutcome) -> Any:
    return StepOutcome(finished=(RowFinished(3, EOS), RowFinished(3, EOS)))


def of_other_rows(engine: Any, batch: StepBatch, outcome: StepOutcome) -> Any:
    return StepOutcome(finished=(RowFinished(99, EOS),))


def twice(engine: Any, batch: StepBatch, outcome: StepOutcome) -> Any:
    done = RowFinished(batch.rows[0].slot, EOS)
    return StepOutcome(finished=(done, done))


def too_short(engine: Any, batch: StepBatch, outcome: StepOutcome) -> Any:
    return StepOutcome(masked_remaining=(1,) * (len(batch.rows) - 1) or (1, 1))


def nothing_at_all(engine: Any, batch: StepBatch, outcome: StepOutcome) -> Any:
    return None


FAULTS = [
    half_done,
    out_of_memory,
    of_the_step_before,
    of_other_rows,
    twice,
    too_short,
    nothing_at_all,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("at", [{0}, {3}, {2, 9}, set(range(0, 300, 3))])
def test_no_request_is_lost_under_the_driver(fault, at, caplog):
    caplog.set_level(logging.CRITICAL, "dllm_sched")
    clock = VirtualClock()
    scheduler = Scheduler(capacity=CAPACITY)
    engine = Faulty(4, fault, at, clock)
    told: list[str] = []
    driver = Driver(
        scheduler,
        engine,
        clock,
        max_restarts=2,
        on_update=lambda update: told.extend(one.request.id for one in update.finished),
    )
    arrivals = [(n / 4, Request(f"r{n}", prompt_len=4, max_new_tokens=6)) for n in range(9)]
    driver.run(arrivals)
    scheduler.check_invariants()
    assert sorted(told) == sorted(request.id for _, request in arrivals)
    assert scheduler.counts().finished == 9
    assert not engine.held


def test_a_clock_that_goes_backward_ends_the_run_and_says_so():
    times = iter([0.0, 0.0, 1.0, 2.0, 1.0])

    class Broken:
        def __call__(self) -> float:
            return next(times, 0.5)

    scheduler = Scheduler(capacity=CAPACITY)
    driver = Driver(scheduler, FakeEngine(4), Broken())
    future = driver.submit(Request("a", prompt_len=1, max_new_tokens=50))
    with pytest.raises(ClockError, match="never go backward"):
        driver.run()
    with pytest.raises(ClockError):
        future.result(timeout=0)
    scheduler.check_invariants()


# --- the watchdog ---------------------------------------------------------------------------------


class Hanging(FakeEngine):
    """Hangs in its third step until it is let go."""

    def __init__(self) -> None:
        super().__init__(4, steps=lambda request: 5)
        self.let_go = threading.Event()

    def run(self, batch: StepBatch) -> StepOutcome:
        if self.num_runs == 2:
            assert self.let_go.wait(60), "nobody noticed"
        return super().run(batch)


@pytest.mark.parametrize("raises", [False, True])
def test_a_step_that_hangs_is_named_from_another_thread(raises, caplog):
    caplog.set_level(logging.CRITICAL, "dllm_sched")
    engine, heard = Hanging(), []

    def on_stuck(batch: StepBatch, seconds: float) -> None:
        heard.append((batch, seconds, threading.current_thread()))
        engine.let_go.set()
        if raises:
            raise RuntimeError("in the callback")

    driver = Driver(Scheduler(capacity=CAPACITY), engine, step_timeout_s=0.05, on_stuck=on_stuck)
    driver.run([(0.0, Request("a", prompt_len=4, max_new_tokens=4))])
    stuck = [(batch, seconds, thread) for batch, seconds, thread in heard if batch.step_id == 2]
    ((batch, seconds, thread),) = stuck
    assert [row.request.id for row in batch.rows] == ["a"]
    assert seconds >= 0.05
    assert thread is not threading.current_thread()


def test_without_a_callback_the_log_names_it(caplog):
    engine = Hanging()

    class LetGo(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("step 2 of 1 rows has been running"):
                engine.let_go.set()

    handler = LetGo()
    logger = logging.getLogger("dllm_sched")
    logger.addHandler(handler)
    try:
        driver = Driver(Scheduler(capacity=CAPACITY), engine, step_timeout_s=0.05)
        driver.run([(0.0, Request("a", prompt_len=4, max_new_tokens=4))])
    finally:
        logger.removeHandler(handler)
    assert engine.num_runs == 5


def test_a_step_in_time_is_not_named():
    heard: list[Any] = []
    driver = Driver(
        Scheduler(capacity=CAPACITY),
        FakeEngine(4),
        step_timeout_s=3600.0,
        on_stuck=lambda *args: heard.append(args),
    )
    driver.run([(0.0, Request("a", prompt_len=4, max_new_tokens=4))])
    assert not heard


@pytest.mark.parametrize(
    "options",
    [
        {"step_timeout_s": 0},
        {"step_timeout_s": -1.0},
        {"step_timeout_s": math.nan},
        {"step_timeout_s": None},
        {"step_timeout_s": "1"},
        {"step_timeout_s": 1.0, "on_stuck": 5},
        {"on_stuck": print},
    ],
)
def test_a_watchdog_of_no_use_is_refused(options):
    with pytest.raises(ConfigError, match=r"step_timeout_s|on_stuck"):
        Driver(Scheduler(capacity=CAPACITY), FakeEngine(4), **options)
