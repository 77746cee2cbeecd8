"""The driver: who is told what, and when, whatever fails. Mostly in virtual time."""

import os
import signal
import threading
from concurrent.futures import CancelledError, wait

import pytest

from dllm_sched import (
    BlockBoundary,
    Capacity,
    ConfigError,
    DuplicateRequestError,
    EngineProtocolError,
    FinishReason,
    Policy,
    PolicyError,
    Rejected,
    Request,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.policies import MaxWaiting
from dllm_sched.runtime import Driver, MonotonicClock, StepFailedError, VirtualClock
from dllm_sched.testing import FakeEngine

STEP_S = 0.25
PATIENCE_S = 60  # far more than anything here takes


@pytest.fixture
def sigint():
    """Ctrl-C as a program at a terminal has it: a job in the background starts ignoring it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def serve(driver):
    """Run it until someone stops it, at the latest when patience ends."""
    timer = threading.Timer(PATIENCE_S, driver.stop, ["none"])
    timer.daemon = True
    timer.start()
    try:
        return driver.run()
    finally:
        timer.cancel()


def request(name, steps=4, **fields):
    return Request(name, prompt_len=5, max_new_tokens=steps, **fields)


def steps_of(request):
    return request.max_new_tokens


class Bench:
    """A driver in virtual time, and everything it told."""

    def __init__(self, slots=4, policy=None, engine=FakeEngine, start_at=0.0, **options):
        driver_options = {k: options.pop(k) for k in ("max_restarts",) if k in options}
        self.clock = VirtualClock(start_at)
        self.scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=slots))
        self.engine = engine(
            slots,
            steps=steps_of,
            clock=self.clock,
            service_s=lambda batch: STEP_S,
            **options,
        )
        self.finished = {}
        self.told = set()
        self.rejected = {}
        self.batches = []
        self.on_batch = lambda number: None
        self.on_refusal = lambda: None
        self.driver = Driver(
            self.scheduler,
            self.engine,
            self.clock,
            on_update=self.on_update,
            on_rejected=self.on_rejected,
            **driver_options,
        )

    def on_update(self, update):
        for one in update.finished:
            assert one.request not in self.told, "told twice"
            self.told.add(one.request)
            self.finished[one.request.id] = one
        if update.batch is not None:
            self.batches.append([row.request.id for row in update.batch.rows])
            self.on_batch(len(self.batches))

    def on_rejected(self, request, rejected):
        self.rejected[request.id] = rejected.reason
        self.on_refusal()

    def reasons(self):
        return {name: one.reason.value for name, one in self.finished.items()}

    def check_clean(self):
        counts = self.scheduler.counts()
        assert (counts.waiting, counts.running) == (0, 0)
        assert counts.submitted == counts.finished
        assert self.engine.held == frozenset(), "slots that never came back"
        self.scheduler.check_invariants()


def test_arrivals_are_served_at_their_time_until_all_have_finished():
    bench = Bench(start_at=1000.0)
    report = bench.driver.run([(0.0, request("a", 4)), (0.6, request("b", 2)), (9.0, request("c"))])
    ends = {name: one.finished_at - 1000.0 for name, one in bench.finished.items()}
    # b arrives during a's third step and joins the fourth; c finds everybody gone.
    assert ends == {"a": 4 * STEP_S, "b": 5 * STEP_S, "c": 9.0 + 4 * STEP_S}
    assert bench.finished["b"].arrived_at == 1000.0 + 3 * STEP_S, "taken up between two steps"
    assert bench.reasons() == dict.fromkeys("abc", "length")
    assert report.started_at == 1000.0
    assert report.num_steps == len(bench.batches) == 9
    bench.check_clean()


def test_the_report_accounts_for_all_of_the_time():
    report = Bench().driver.run([(0.0, request("a"))])
    parts = report.engine_s + report.scheduler_s + report.wait_s + report.other_s
    assert parts == pytest.approx(report.wall_s)
    assert min(report.engine_s, report.scheduler_s, report.other_s) > 0
    assert report.busy_s == report.wall_s - report.wait_s
    assert report.scheduler_us_per_step == pytest.approx(report.scheduler_s / 4 * 1e6)
    assert not report.interrupted


def test_a_report_in_the_middle_of_a_call_counts_it_where_it_belongs():
    """Else what has not returned yet would be "other" for a while, and then be taken back."""
    pairs = {"engine_s": [], "scheduler_s": [], "wait_s": [], "other_s": []}

    def look(part):
        pairs[part].append((bench.driver.report(), bench.driver.report()))

    class Engine(FakeEngine):
        def run(self, batch):
            look("engine_s")
            return super().run(batch)

        def release(self, released):
            look("engine_s")
            super().release(released)

    def key(rv):
        look("scheduler_s")
        return ()

    def jump(instant):
        if instant == 9.0:  # nobody but the inbox goes there
            look("wait_s")
        VirtualClock.set(bench.clock, instant)

    bench = Bench(engine=Engine, policy=Policy(ordering=key))
    bench.clock.set = jump
    bench.on_batch = lambda number: look("other_s")
    last = bench.driver.run([(0.0, request("a", 4)), (9.0, request("b", 2))])
    before = dict.fromkeys(pairs, 0.0)
    for part, looks in pairs.items():
        assert looks, part
        for first, second in looks:
            for other in pairs:
                assert (getattr(first, other) < getattr(second, other)) is (other == part)
    reports = [one for looks in pairs.values() for both in looks for one in both]
    for report in sorted(reports, key=lambda one: one.wall_s):
        now = {part: getattr(report, part) for part in pairs}
        assert sum(now.values()) == pytest.approx(report.wall_s)
        assert all(now[part] >= before[part] for part in pairs)
        before = now
    assert all(getattr(last, part) >= before[part] for part in pairs)


def test_a_partial_batch_waits_for_its_timer_and_drain_lets_the_last_go():
    bench = Bench(policy=presets.fixed_fill(batch_size=4, timeout_s=1.0))
    bench.driver.run([(0.0, request("a")), (0.5, request("b")), (20.0, request("c"))])
    assert bench.finished["a"].admitted_at == bench.finished["b"].admitted_at == 1.0
    assert bench.finished["c"].admitted_at == 20.0, "nobody else comes: no reason to wait"
    assert bench.reasons() == dict.fromkeys("abc", "length")


def test_a_fill_without_a_timer_waits_for_arrivals_only():
    bench = Bench(policy=presets.fixed_fill(batch_size=2), slots=2)
    bench.driver.run([(0.0, request("a")), (7.0, request("b"))])
    assert bench.finished["a"].admitted_at == 7.0
    assert bench.batches == [["a", "b"]] * 4


def test_deadlines_are_met_while_the_driver_sleeps():
    bench = Bench(policy=presets.fixed_fill(batch_size=4), slots=4)
    arrivals = [(0.0, request("a", queue_timeout_s=2.5)), (10.0, request("b"))]
    bench.driver.run(arrivals)
    assert bench.reasons() == {"a": "queue_timeout", "b": "length"}
    assert bench.finished["a"].finished_at == 2.5


def test_submit_before_run_gives_a_future_of_the_end():
    bench = Bench()
    future = bench.driver.submit(request("a", 3))
    assert not future.done()
    bench.driver.run([])
    assert future.result(timeout=0) is bench.finished["a"]
    assert len(future.result().output.tokens) == 3


def test_a_refused_request_is_a_value():
    policy = Policy(admission=MaxWaiting(1))
    bench = Bench(slots=1, policy=policy)
    futures = [bench.driver.submit(request(name)) for name in "abc"]
    bench.driver.run([(0.0, request("d"))])
    assert futures[0].result(timeout=0).reason is FinishReason.LENGTH
    assert futures[1].result(timeout=0) == Rejected("b", "queue_full")
    assert bench.rejected == {"b": "queue_full", "c": "queue_full", "d": "queue_full"}
    bench.check_clean()


def test_after_the_run_submissions_are_refused_and_calls_fail():
    bench = Bench()
    bench.driver.run([])
    assert bench.driver.submit(request("a")).result(timeout=0) == Rejected("a", "draining")
    bench.driver.cancel("a")
    with pytest.raises(EngineProtocolError, match="over"):
        bench.driver.call(bench.scheduler.pause).result(timeout=0)
    with pytest.raises(EngineProtocolError, match="once"):
        bench.driver.run([])


def test_a_duplicate_id_is_the_submitters_error_and_the_first_one_lives_on():
    bench = Bench()
    first, second = (bench.driver.submit(request("a")) for _ in range(2))
    bench.driver.run([])
    assert first.result(timeout=0).reason is FinishReason.LENGTH
    with pytest.raises(DuplicateRequestError):
        second.result(timeout=0)


def test_a_future_cancelled_before_it_is_taken_up_is_never_submitted():
    bench = Bench()
    future = bench.driver.submit(request("a"))
    assert future.cancel()
    bench.driver.run([])
    assert bench.scheduler.counts().submitted == 0
    with pytest.raises(CancelledError):
        future.result(timeout=0)


def test_cancel_ends_a_running_request_and_its_neighbour_goes_on():
    bench = Bench()
    bench.on_batch = lambda number: bench.driver.cancel("a") if number == 2 else None
    futures = [bench.driver.submit(request(name)) for name in "ab"]
    bench.driver.run([])
    assert futures[0].result(timeout=0).reason is FinishReason.CANCELLED
    assert futures[0].result(timeout=0).num_steps == 2
    assert bench.batches == [["a", "b"]] * 2 + [["b"]] * 2
    bench.check_clean()


def test_the_policy_is_swapped_while_it_serves():
    bench = Bench(slots=4, policy=presets.per_request())
    new = presets.continuous(4)
    swap = bench.driver.call
    bench.on_batch = lambda number: swap(bench.scheduler.set_policy, new) if number == 1 else None
    for name in "abc":
        bench.driver.submit(request(name))
    bench.driver.run([])
    assert bench.batches[0] == ["a"]
    assert sorted(bench.batches[1]) == ["a", "b", "c"]


def test_a_call_that_raises_tells_its_caller_only():
    bench = Bench(slots=2)
    bad = bench.driver.call(bench.scheduler.set_policy, presets.fixed_fill(batch_size=9))
    bench.driver.run([(0.0, request("a"))])
    with pytest.raises(ConfigError, match="slots"):
        bad.result(timeout=0)
    assert bench.reasons() == {"a": "length"}


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        ("all", {"a": "length", "b": "length", "c": "length"}),
        ("running", {"a": "length", "b": "length", "c": "cancelled"}),
        ("none", {"a": "cancelled", "b": "cancelled", "c": "cancelled"}),
    ],
)
def test_stop_drops_what_has_not_arrived_and_finishes_as_told(finish, expected):
    bench = Bench(slots=2)
    bench.on_batch = lambda number: bench.driver.stop(finish) if number == 2 else None
    late = (2 * STEP_S, request("late"))
    bench.driver.run([*((0.0, request(name)) for name in "abc"), late])
    assert bench.reasons() == expected
    bench.check_clean()


def test_a_second_stop_cuts_deeper():
    bench = Bench(slots=1)
    cuts = {1: "all", 2: "running", 3: "none"}
    bench.on_batch = lambda number: bench.driver.stop(cuts[number])
    bench.driver.run([(0.0, request("a")), (0.0, request("b"))])
    assert bench.reasons() == {"b": "cancelled", "a": "cancelled"}
    assert bench.finished["b"].finished_at == 2 * STEP_S
    assert bench.finished["a"].finished_at == 3 * STEP_S
    with pytest.raises(ConfigError, match="all, running, none"):
        bench.driver.stop("now")


def test_stop_before_run_serves_what_was_submitted_before_it():
    bench = Bench()
    before = bench.driver.submit(request("a"))
    bench.driver.stop()
    after = bench.driver.submit(request("b"))
    bench.driver.run()
    assert before.result(timeout=0).reason is FinishReason.LENGTH
    assert after.result(timeout=0) == Rejected("b", "draining")


# --- faults -------------------------------------------------------------------------------------


def test_after_an_exception_everybody_restarts_once_and_answers_the_same(caplog):
    bench = Bench(fail_at={2: RuntimeError("kernel")})
    calm = Bench()
    for one in (bench, calm):
        one.driver.run([(0.0, request("a")), (0.0, request("b", 6))])
    assert {n: f.output for n, f in bench.finished.items()} == {
        n: f.output for n, f in calm.finished.items()
    }
    assert bench.scheduler.stats().num_preempted == 2
    assert "RuntimeError('kernel'); 2 restart, 0 fail" in caplog.text
    bench.check_clean()


def test_a_step_that_always_fails_ends_and_every_request_says_why():
    broken = {number: RuntimeError(f"call {number}") for number in range(100)}
    bench = Bench(fail_at=broken)
    bench.driver.run([(0.0, request("a")), (0.0, request("b"))])
    assert bench.reasons() == {"a": "error", "b": "error"}
    assert str(bench.finished["a"].error) == "call 1"
    assert bench.engine.num_runs == 2
    bench.check_clean()


@pytest.mark.parametrize("restarts", [0, 3])
def test_the_number_of_restarts_is_a_choice(restarts):
    bench = Bench(fail_at={number: RuntimeError() for number in range(100)}, max_restarts=restarts)
    bench.driver.run([(0.0, request("a"))])
    assert bench.engine.num_runs == restarts + 1
    with pytest.raises(ConfigError, match="max_restarts"):
        Bench(max_restarts=-1)


def test_restarts_are_counted_anew_when_an_id_is_used_again():
    bench = Bench(slots=1, fail_at={0: RuntimeError(), 5: RuntimeError()})
    bench.driver.run([(0.0, request("a")), (5.0, request("a"))])
    assert bench.reasons() == {"a": "length"}
    assert len(bench.told) == 2
    assert bench.engine.num_runs == 2 * (1 + 4)


def spoilt(spoil):
    """An engine whose second outcome is ``spoil(the true one)``."""

    class Spoilt(FakeEngine):
        def run(self, batch):
            outcome = super().run(batch)
            return spoil(outcome) if self.num_runs == 2 else outcome

    return Spoilt


class Unlooked(tuple):
    """Raises as soon as someone looks inside."""

    __slots__ = ()

    def __bool__(self):
        raise TypeError("no look")

    __len__ = __iter__ = __bool__


@pytest.mark.parametrize(
    "spoil",
    [
        lambda outcome: StepOutcome(finished=(RowFinished(3, FinishReason.EOS),)),
        lambda outcome: outcome._replace(finished=5),
        lambda outcome: outcome._replace(finished=(5,)),
        lambda outcome: outcome._replace(boundaries=(BlockBoundary(0, None, 5),)),
        lambda outcome: outcome._replace(boundaries=(BlockBoundary([], 1, 5),)),
        lambda outcome: outcome._replace(phases={0: 1}),
        lambda outcome: outcome._replace(failed=Unlooked()),
        lambda outcome: outcome._replace(masked_remaining=5),
        lambda outcome: outcome._replace(masked_remaining=Unlooked()),
        lambda outcome: None,
        lambda outcome: 5,
        lambda outcome: [],
    ],
)
def test_an_impossible_outcome_restarts_the_rows_like_an_exception(spoil):
    bench = Bench(engine=spoilt(spoil))
    bench.driver.run([(0.0, request("a"))])
    assert bench.reasons() == {"a": "length"}
    assert bench.engine.num_runs == 2 + 4
    bench.check_clean()


@pytest.mark.parametrize(
    "fields",
    [
        {"restart": [7]},
        {"fail": [[]]},
        {"restart": "a"},
        {"max_num_seqs": "2"},
        {"restart": [0], "max_num_seqs": 0.5},
    ],
)
def test_a_step_failure_that_cannot_be_counts_as_any_exception(fields, caplog):
    bench = Bench(fail_at={1: StepFailedError("?", **fields)})
    bench.driver.run([(0.0, request("a")), (0.0, request("b"))])
    assert bench.reasons() == {"a": "length", "b": "length"}
    assert bench.scheduler.stats().num_preempted == 2
    assert "counts as any exception" in caplog.text
    bench.check_clean()


def test_a_row_that_fails_alone_leaves_its_neighbour():
    bench = Bench(poison={"a": 2})
    bench.driver.run([(0.0, request("a")), (0.0, request("b"))])
    assert bench.reasons() == {"a": "error", "b": "length"}
    assert "poisoned" in str(bench.finished["a"].error)
    bench.check_clean()


class SmallMemory(FakeEngine):
    """Has room for two rows; of more, the later half must go."""

    def run(self, batch):
        if len(batch.rows) > 2:
            slots = [row.slot for row in batch.rows]
            half = len(slots) // 2
            raise StepFailedError("out of memory", restart=slots[half:], max_num_seqs=half)
        return super().run(batch)


def test_out_of_memory_lowers_the_capacity_and_everybody_finishes():
    bench = Bench(slots=8, engine=SmallMemory)
    bench.driver.run([(0.0, request(f"r{i}")) for i in range(8)])
    assert bench.scheduler.capacity.max_num_seqs == 2
    assert set(bench.reasons().values()) == {"length"}
    assert len(bench.finished) == 8
    assert [len(rows) for rows in bench.batches[:3]] == [8, 4, 2]
    bench.check_clean()


def test_a_row_that_never_fits_fails_and_the_capacity_stays_positive():
    failures = {0: StepFailedError("too big", fail=[0], max_num_seqs=0)}
    bench = Bench(slots=2, fail_at=failures)
    bench.driver.run([(0.0, request("a")), (0.0, request("b"))])
    assert bench.reasons() == {"a": "error", "b": "length"}
    assert bench.finished["a"].error is failures[0]
    assert bench.scheduler.capacity.max_num_seqs == 1


def test_a_step_failure_that_says_nothing_counts_as_any_exception():
    bench = Bench(fail_at={number: StepFailedError("?") for number in range(100)})
    bench.driver.run([(0.0, request("a"))])
    assert bench.reasons() == {"a": "error"}
    assert bench.engine.num_runs == 2


def test_a_policy_that_cannot_do_with_less_keeps_its_capacity_and_still_ends():
    bench = Bench(slots=4, engine=SmallMemory, policy=presets.fixed_fill(batch_size=4))
    bench.driver.run([(0.0, request(f"r{i}")) for i in range(4)])
    assert len(bench.finished) == 4
    bench.check_clean()


def test_what_the_ordering_raises_at_submit_reaches_the_submitter_alone():
    def key(rv):
        if rv.id == "a":
            raise ZeroDivisionError
        return (0,)

    bench = Bench(policy=Policy(ordering=key))
    futures = [bench.driver.submit(request(name)) for name in "ab"]
    bench.driver.run([])
    with pytest.raises(PolicyError, match=r"ordering\.key"):
        futures[0].result(timeout=0)
    assert futures[1].result(timeout=0).reason is FinishReason.LENGTH


def test_what_a_policy_raises_at_a_step_leaves_run_and_reaches_every_future():
    def admit(rv, round):
        raise ZeroDivisionError

    bench = Bench(policy=Policy(admission=admit))
    futures = [bench.driver.submit(request(name)) for name in "ab"]
    with pytest.raises(PolicyError, match=r"admission\.admit"):
        bench.driver.run([])
    late = bench.driver.submit(request("late"))
    for future in (*futures, late):
        assert isinstance(future.exception(timeout=0), PolicyError)


def test_what_a_callback_raises_leaves_run_and_reaches_every_future():
    bench = Bench()

    def on_batch(number):
        raise LookupError("callback")

    bench.on_batch = on_batch
    futures = [bench.driver.submit(request(name)) for name in "ab"]
    with pytest.raises(LookupError):
        bench.driver.run([])
    for future in futures:
        with pytest.raises(LookupError, match="callback"):
            future.result(timeout=0)
    with pytest.raises(LookupError, match="callback"):
        bench.driver.submit(request("c")).result(timeout=0)


def test_messages_that_were_not_reached_fail_with_the_run():
    bench = Bench(policy=Policy(admission=MaxWaiting(1)))
    bench.on_refusal = lambda: 1 / 0
    for name in ("waits", "refused"):
        bench.driver.submit(request(name))
    behind = bench.driver.submit(request("a")), bench.driver.call(bench.scheduler.pause)
    with pytest.raises(ZeroDivisionError):
        bench.driver.run([])
    for future in behind:
        with pytest.raises(ZeroDivisionError):
            future.result(timeout=0)


@pytest.mark.parametrize("boom", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_every_future_ends_whatever_raises_while_the_run_closes(boom):
    futures = []

    def on_update(update):
        if update.batch is None and not futures:  # the last one: what comes now comes too late
            futures.extend(driver.submit(request(name)) for name in "abc")
            futures.append(driver.call(scheduler.pause))
            futures.append(driver.submit(request("never")))
            assert futures[-1].cancel()

    def on_rejected(request, rejected):
        if request.id == "b":
            raise boom

    scheduler = Scheduler(capacity=Capacity(max_num_seqs=1))
    scheduler.drain(now=0.0)
    driver = Driver(
        scheduler, FakeEngine(1), VirtualClock(), on_update=on_update, on_rejected=on_rejected
    )
    driver._draining = True
    with pytest.raises(boom):
        driver.run([])
    assert wait(futures, timeout=PATIENCE_S).not_done == set()
    assert [future.result(timeout=0).reason for future in futures[:2]] == ["draining"] * 2
    assert [type(future.exception(timeout=0)) for future in futures[2:4]] == [boom] * 2


@pytest.mark.parametrize("boom", [SystemExit, KeyboardInterrupt])
def test_every_future_ends_whatever_the_callback_of_one_raises(boom):
    def raise_boom(future):
        raise boom

    bench = Bench()
    futures = [bench.driver.submit(request(name)) for name in "abcd"]
    for future in futures[:2]:
        future.add_done_callback(raise_boom)
    with pytest.raises(boom):
        bench.driver.run([])
    assert wait(futures, timeout=PATIENCE_S).not_done == set()


def test_every_future_ends_when_the_clock_is_broken():
    def clock():
        raise OSError("no clock")

    driver = Driver(Scheduler(capacity=Capacity(max_num_seqs=1)), FakeEngine(1), clock)
    future = driver.submit(request("a"))
    with pytest.raises(OSError, match="no clock"):
        driver.run([])
    assert isinstance(future.exception(timeout=0), OSError)


def test_what_cannot_be_a_message_is_refused_to_the_one_who_says_it():
    bench = Bench()
    for wrong, name in (
        (lambda: bench.driver.submit("a"), "request"),
        (lambda: bench.driver.cancel([]), "request_id"),
        (lambda: bench.driver.call(5), "method"),
        (lambda: bench.driver.call(bench.scheduler.next_step), "next_step"),
        (lambda: bench.driver.call(bench.scheduler.submit, request("a")), "submit"),
        (lambda: bench.driver.stop([]), "finish"),
    ):
        with pytest.raises(ConfigError, match=name):
            wrong()
    bench.driver.run([(0.0, request("a"))])
    assert bench.reasons() == {"a": "length"}


def test_a_call_that_goes_wrong_ends_its_own_future_only():
    bench = Bench()
    calls = [
        (ZeroDivisionError, bench.driver.call(lambda *, now: 1 / 0)),
        (ConfigError, bench.driver.call(lambda *, now: None)),
        (ConfigError, bench.driver.call(bench.scheduler.cancel, [])),
        (TypeError, bench.driver.call(bench.scheduler.pause, 5)),
        (TypeError, bench.driver.call(lambda: None)),
    ]
    served = bench.driver.submit(request("a"))
    bench.driver.run([])
    assert served.result(timeout=0).reason is FinishReason.LENGTH
    for kind, future in calls:
        assert isinstance(future.exception(timeout=0), kind)
    bench.check_clean()


@pytest.mark.parametrize("times", [(1.0, 0.5), (0.0, float("nan")), (float("inf"),), (-1.0, -2.0)])
def test_arrivals_out_of_order_are_refused_by_name(times):
    with pytest.raises(ConfigError, match=f"'r{len(times) - 1}' arrives"):
        Bench().driver.run((at_s, request(f"r{i}")) for i, at_s in enumerate(times))


def test_a_report_before_the_run_is_refused():
    with pytest.raises(EngineProtocolError, match="not begun"):
        Bench().driver.report()


# --- threads, signals, real time ----------------------------------------------------------------


def real(slots=4, **options):
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=slots))
    return Driver(scheduler, FakeEngine(slots, **options), MonotonicClock())


def test_many_threads_submit_and_cancel_while_it_serves():
    driver = real()
    serving = threading.Thread(target=driver.run, daemon=True)
    serving.start()
    answers = {}

    def client(number):
        for i in range(50):
            name = f"{number}-{i}"
            future = driver.submit(request(name, 1 + i % 7))
            if i % 5 == 0:
                driver.cancel(name)
            answers[name] = future.result(timeout=PATIENCE_S)

    clients = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(4)]
    for one in clients:
        one.start()
    for one in clients:
        one.join(timeout=PATIENCE_S)
    driver.stop()
    serving.join(timeout=PATIENCE_S)
    assert not serving.is_alive()
    assert len(answers) == 200
    reasons = {answer.reason for answer in answers.values()}
    assert reasons <= {FinishReason.LENGTH, FinishReason.CANCELLED}
    assert all(answers[name].request.id == name for name in answers)


def test_stop_wakes_a_driver_that_sleeps_for_ever():
    driver = real()
    serving = threading.Thread(target=driver.run, daemon=True)
    serving.start()
    driver.stop()
    serving.join(timeout=PATIENCE_S)
    assert not serving.is_alive()
    assert driver.report().num_steps == 0


def test_ctrl_c_finishes_what_runs_and_cancels_what_waits(sigint):
    driver = real(slots=1, steps=lambda request: request.max_new_tokens)
    interrupt = driver._engine.run

    def run(batch):
        if driver.report().num_steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return interrupt(batch)

    driver._engine.run = run
    futures = [driver.submit(request(name)) for name in "ab"]
    report = serve(driver)
    assert report.interrupted
    assert [future.result(timeout=0).reason for future in futures] == [
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
    ]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("presses", "raised"), [(2, False), (3, True)])
def test_a_second_ctrl_c_cancels_and_a_third_raises(sigint, presses, raised):
    driver = real(slots=1, steps=lambda request: 50)
    interrupt = driver._engine.run

    def run(batch):
        if driver.report().num_steps == 2:
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)
        return interrupt(batch)

    driver._engine.run = run
    future = driver.submit(request("a"))
    if raised:
        with pytest.raises(KeyboardInterrupt):
            serve(driver)
        assert isinstance(future.exception(timeout=0), KeyboardInterrupt)
    else:
        serve(driver)
        assert future.result(timeout=0).reason is FinishReason.CANCELLED
        assert future.result(timeout=0).num_steps <= 2


def test_where_ctrl_c_is_ignored_it_stays_ignored(sigint):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = real(slots=1, steps=lambda request: 3)
    engine_run = driver._engine.run

    def run(batch):
        os.kill(os.getpid(), signal.SIGINT)
        driver.stop()
        return engine_run(batch)

    driver._engine.run = run
    future = driver.submit(request("a"))
    assert not serve(driver).interrupted
    assert future.result(timeout=0).reason is FinishReason.LENGTH
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
