"""The driver plans and launches a step while one runs: the same answers, whatever happens."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_sched import (
    Capacity,
    ConfigError,
    EngineProtocolError,
    FinishReason,
    Request,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.runtime import Driver, StepFailedError, VirtualClock
from dllm_sched.testing import FakeEngine, fake_steps

STEP_S = 0.25


class Log(FakeEngine):
    """Writes down what it is asked for; may refuse to launch, or answer nonsense."""

    def __init__(self, *args, refuse=(), lie=(), **options):
        super().__init__(*args, **options)
        self.log = []
        self.refuse, self.lie = set(refuse), set(lie)

    def launch(self, batch):
        self.log.append(("launch", batch.step_id))
        if batch.step_id in self.refuse:
            raise RuntimeError(f"step {batch.step_id} cannot be launched")
        super().launch(batch)

    def collect(self):
        self.log.append(("collect", self._launched[0].step_id if self._launched else None))
        step = self._launched[0].step_id
        outcome = super().collect()
        if step in self.lie:
            return StepOutcome(finished=(RowFinished(99, FinishReason.EOS),))
        return outcome


class Serving:
    """Requests served to their ends, each told once."""

    def __init__(self, requests, *, ahead, slots=4, cancel_at=None, policy=None, **options):
        self.clock = VirtualClock(0.0)
        self.scheduler = Scheduler(
            policy=policy or presets.continuous(slots),
            capacity=Capacity(max_num_seqs=slots),
            max_in_flight=ahead,
        )
        self.engine = Log(slots, clock=self.clock, service_s=lambda batch: STEP_S, **options)
        self.ends, self.cancel_at, self.steps = {}, cancel_at or {}, 0
        self.driver = Driver(
            self.scheduler, self.engine, self.clock, on_update=self.told, on_step=self.stepped
        )
        self.report = self.driver.run(requests)
        counts = self.scheduler.counts()
        assert (counts.waiting, counts.running) == (0, 0)
        assert self.engine.held == frozenset(), "slots that never came back"
        self.scheduler.check_invariants()

    def told(self, update):
        for end in update.finished:
            assert end.request.id not in self.ends, "told twice"
            self.ends[end.request.id] = end

    def stepped(self, batch, outcome):
        self.steps += 1
        for name, step in self.cancel_at.items():
            if step == self.steps:
                self.driver.cancel(name)

    def answers(self):
        return {name: (end.reason, end.output, end.num_steps) for name, end in self.ends.items()}


def arrivals(count, seed=0, spread_s=2.0):
    draw = random.Random(seed)
    times = sorted(draw.uniform(0, spread_s) for _ in range(count))
    return [
        (at, Request(f"r{n}", prompt_len=5, max_new_tokens=draw.randint(1, 12), block_length=4))
        for n, at in enumerate(times)
    ]


def test_a_step_is_launched_while_one_runs_and_they_complete_in_order():
    request = Request("a", prompt_len=5, max_new_tokens=3, block_length=4)
    serving = Serving([(0.0, request)], ahead=2, steps=lambda request: 3)
    assert serving.engine.log == [
        ("launch", 0), ("launch", 1), ("collect", 0),
        ("launch", 2), ("collect", 1),
        ("launch", 3), ("collect", 2),  # in which the request ends: the step behind it is wasted
        ("collect", 3),
    ]  # fmt: skip
    assert serving.scheduler.stats().wasted_row_steps == 1
    assert serving.report.num_steps == 4
    assert serving.ends["a"].num_steps == 3


@pytest.mark.parametrize("seed", range(6))
def test_late_joiners_and_rows_that_fail_alone_answer_the_same(seed):
    coming = arrivals(30, seed)
    poison = {"r3": 1, "r11": 2}
    poison = {k: min(v, fake_steps(coming[int(k[1:])][1])) for k, v in poison.items()}
    plain, ahead = (Serving(coming, ahead=n, poison=poison) for n in (1, 2))
    assert ahead.answers() == plain.answers()
    assert {n for n, end in ahead.ends.items() if end.reason is FinishReason.ERROR} == {*poison}
    assert plain.scheduler.stats().wasted_row_steps == 0
    wasted = ahead.scheduler.stats().wasted_row_steps
    assert 0 < wasted <= len(coming), "at most one for each that ended"


@pytest.mark.parametrize("seed", range(6))
def test_cancels_change_nobody_elses_answer(seed):
    coming = arrivals(30, seed)
    draw = random.Random(seed)
    gone = {f"r{n}": draw.randint(1, 12) for n in draw.sample(range(30), 8)}
    plain = Serving(coming, ahead=1).answers()
    ahead = Serving(coming, ahead=2, cancel_at=gone).answers()
    assert ahead.keys() == plain.keys()
    for name, answer in ahead.items():
        assert answer == plain[name] or (name in gone and answer[0] is FinishReason.CANCELLED)


@pytest.mark.parametrize("seed", range(6))
def test_failed_steps_lose_nobody(seed):
    """Every kind of failure, each of which takes along the step behind it."""
    coming = arrivals(30, seed)
    draw = random.Random(seed)
    faults = {number: RuntimeError("lost") for number in draw.sample(range(4, 30), 2)}
    oom = draw.randint(31, 36)
    faults[oom] = StepFailedError("no memory", restart=(), max_num_seqs=3)
    plain = Serving(coming, ahead=1).answers()
    ahead = Serving(
        coming, ahead=2, fail_at=faults, refuse=[draw.randint(1, 20)], lie=[draw.randint(1, 20)]
    ).answers()
    assert ahead.keys() == plain.keys()
    for name, answer in ahead.items():
        assert answer == plain[name] or answer[0] is FinishReason.ERROR


STEPS = st.sets(st.integers(0, 40), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    slots=st.integers(1, 5),
    lost=STEPS,
    refuse=STEPS,
    lie=STEPS,
    gone=st.dictionaries(st.integers(0, 11), st.integers(1, 30), max_size=4),
    poison=st.dictionaries(st.integers(0, 11), st.integers(1, 3), max_size=3),
)
def test_whatever_happens_everybody_is_told_once_and_nobody_else_is_concerned(
    seed, slots, lost, refuse, lie, gone, poison
):
    coming = arrivals(12, seed, spread_s=6.0)
    plain = Serving(coming, ahead=1, slots=slots).answers()
    ahead = Serving(
        coming,
        ahead=2,
        slots=slots,
        fail_at={number: RuntimeError("lost") for number in lost},
        refuse=refuse,
        lie=lie,
        cancel_at={f"r{n}": step for n, step in gone.items()},
        poison={f"r{n}": step for n, step in poison.items()},
    ).answers()
    assert ahead.keys() == plain.keys()
    for name, answer in ahead.items():
        if answer[0] is FinishReason.LENGTH:
            assert answer == plain[name]
        elif answer[0] is FinishReason.CANCELLED:
            assert int(name[1:]) in gone
        else:
            assert answer[0] is FinishReason.ERROR
            assert int(name[1:]) in poison or lost | refuse | lie


def test_a_launch_that_fails_waits_for_its_turn():
    coming = [(0.0, Request(name, prompt_len=5, max_new_tokens=4, block_length=4)) for name in "ab"]
    serving = Serving(coming, ahead=2, refuse=[1], steps=lambda request: 4)
    # Step 1 fails only after step 0 has counted, and nothing is launched in between.
    assert serving.engine.log[:4] == [("launch", 0), ("launch", 1), ("collect", 0), ("launch", 2)]
    assert {name: end.num_steps for name, end in serving.ends.items()} == {"a": 4, "b": 4}


def test_a_step_behind_one_that_does_not_count_is_waited_for_and_does_not_count():
    coming = [(0.0, Request(name, prompt_len=5, max_new_tokens=4, block_length=4)) for name in "ab"]
    serving = Serving(coming, ahead=2, lie=[1], steps=lambda request: 4)
    assert serving.engine.log[:7] == [
        ("launch", 0), ("launch", 1), ("collect", 0), ("launch", 2),
        ("collect", 1), ("collect", 2), ("launch", 3),
    ]  # fmt: skip
    plain = Serving(coming, ahead=1, steps=lambda request: 4)
    assert serving.answers() == plain.answers()


def test_an_engine_that_cannot_is_refused_by_name():
    class Plain:
        run = FakeEngine.run
        release = FakeEngine.release

    scheduler = Scheduler(capacity=Capacity(max_num_seqs=1), max_in_flight=2)
    with pytest.raises(ConfigError, match=r"launch and collect, but Plain has no launch.*=1"):
        Driver(scheduler, Plain())
    Driver(Scheduler(capacity=Capacity(max_num_seqs=1)), Plain())


def test_the_fake_engine_keeps_its_caller_to_the_order():
    engine = FakeEngine(2)
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=2), max_in_flight=2)
    scheduler.submit(Request("a", prompt_len=5, max_new_tokens=4, block_length=4), now=0.0)
    with pytest.raises(EngineProtocolError, match="no step was launched"):
        engine.collect()
    first, second = (scheduler.next_step(now=0.0).batch for _ in range(2))
    engine.launch(first)
    with pytest.raises(EngineProtocolError, match="step 0 was launched"):
        engine.run(second)
    engine.launch(second)
    with pytest.raises(EngineProtocolError, match="steps 0 and 1 are on their way"):
        engine.launch(second)
    scheduler.complete_step(first, engine.collect(), now=0.0)
    scheduler.complete_step(second, engine.collect(), now=0.0)
