"""The operators obey the laws of a lattice (of sets, for rows), whatever the strategies."""

from __future__ import annotations

import math
import random
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_sched import Capacity, FinishReason, GrowingKV, Phase, Policy, Request, Scheduler
from dllm_sched.events import RequestJoined
from dllm_sched.policies import (
    ALL,
    FCFS,
    KEEP,
    RESTART,
    Admission,
    Composition,
    Control,
    Eviction,
    Fill,
    MaxWait,
    Ordering,
    ProjectedPeak,
    Slots,
    Timeout,
    TokenBudget,
    Verdict,
)
from dllm_sched.request import RequestView
from dllm_sched.testing import FakeEngine
from dllm_sched.view import Round, SchedulerView

VIEW = SchedulerView(
    now=5.0,
    draining=False,
    num_waiting=3,
    num_running=6,
    max_num_seqs=8,
    free_slots=2,
    num_pages=None,
    free_pages=None,
    tokens_in_rows=60,
    oldest_arrival_at=1.0,
)
NUM_ROWS = 6


def make_rows() -> list[RequestView]:
    rows = []
    for index in range(NUM_ROWS):
        rv = RequestView(Request(f"r{index}", prompt_len=4, max_new_tokens=8), index, 0.0)
        rv._phase = list(Phase)[index % 3]
        rows.append(rv)
    return rows


ROWS = make_rows()


def make_round() -> Round:
    return Round(
        VIEW,
        num_steps=1,
        boundaries=(),
        num_retired=0,
        num_preempted=0,
        rows=lambda: ROWS,
        youngest=lambda: reversed(ROWS),
    )


# --- leaves that answer from a table ------------------------------------------------------------


@attrs.frozen
class Says(Admission):
    """Answers by request; counts joins and rounds, to see that every part is told of them."""

    verdicts: tuple[Verdict, ...]
    reasons: tuple[str | None, ...] = (None,)
    every: float = math.inf

    def init(self) -> int:
        return 0

    def accept(self, state: int, rv: RequestView, view: SchedulerView) -> str | None:
        return self.reasons[rv.sequence % len(self.reasons)]

    def admit(self, state: int, rv: RequestView, round: Round) -> Verdict:
        return self.verdicts[(rv.sequence + state) % len(self.verdicts)]

    def joined(self, state: int, rv: RequestView, round: Round) -> int:
        return state + 1

    def settle(self, state: int, round: Round) -> int:
        return state + 3

    def recheck(self, state: int, round: Round) -> float:
        return self.every


@attrs.frozen
class Due(Timeout):
    at: float

    def due(self, state: Any, view: SchedulerView) -> float:
        return self.at


@attrs.frozen
class Picks(Composition):
    answer: Any

    def select(self, state: Any, round: Round) -> Any:
        return self.answer


@attrs.frozen
class Names(Eviction):
    chosen: tuple[int, ...]
    how: Any
    instant: float = math.inf
    steps: float = math.inf

    def limits(self, rv: RequestView) -> tuple[float, float]:
        return self.instant, self.steps

    def victims(self, state: Any, need_pages: int, round: Round) -> Any:
        return [(ROWS[index], self.how) for index in self.chosen]


@attrs.frozen
class Key(Ordering):
    numbers: tuple[float, ...]

    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        return tuple(number * rv.sequence for number in self.numbers)


@attrs.frozen
class Sets(Control):
    values: tuple[tuple[str, int], ...]
    until: float

    def knobs(self, state: Any, rv: RequestView, view: SchedulerView) -> Any:
        return dict(self.values), self.until


verdicts = st.lists(st.sampled_from(list(Verdict)), min_size=1, max_size=4).map(tuple)
reasons = st.lists(st.sampled_from([None, None, "full", "late"]), min_size=1, max_size=3).map(tuple)
admissions = st.builds(Says, verdicts, reasons, st.sampled_from([1.0, 3.0, math.inf]))
timeouts = st.builds(Due, st.one_of(st.floats(-9, 9), st.sampled_from([-math.inf, math.inf])))
selections = st.one_of(
    st.just(ALL),
    st.frozensets(st.sampled_from(list(Phase))),
    st.lists(st.sampled_from(range(NUM_ROWS)), unique=True).map(
        lambda chosen: [ROWS[index] for index in chosen]
    ),
)
compositions = st.builds(Picks, selections)
evictions = st.builds(
    Names,
    st.lists(st.sampled_from(range(NUM_ROWS)), unique=True).map(tuple),
    st.sampled_from([KEEP, RESTART, FinishReason.MAX_STEPS]),
    st.sampled_from([1.0, 2.0, math.inf]),
    st.sampled_from([4, 9, math.inf]),
)
orderings = st.builds(Key, st.lists(st.floats(-3, 3), max_size=2).map(tuple))
controls = st.builds(
    Sets,
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), max_size=3).map(tuple),
    st.sampled_from([6.0, 8.0, math.inf]),
)


def lived(admission: Admission) -> Any:
    """Everything an admission says over two rounds, through ``joined`` and ``settle``."""
    state, said = admission.init(), []
    for _ in range(2):
        round = make_round()
        for rv in ROWS:
            verdict = admission.admit(state, rv, round)
            refused = admission.accept(state, rv, VIEW) is not None
            said.append((verdict, refused))
            if verdict is Verdict.ADMIT:
                state = admission.joined(state, rv, round)
        said.append(admission.recheck(state, round))
        state = admission.settle(state, round)
    return said


def due(timeout: Timeout) -> float:
    return timeout.due(timeout.init(), VIEW)


def rows_of(composition: Composition) -> set[str]:
    answer = composition.select(composition.init(), make_round())
    if answer is ALL:
        return {rv.id for rv in ROWS}
    return {rv.id for rv in ROWS for one in answer if one in (rv, rv.phase)}


def victims_of(eviction: Eviction) -> Any:
    answer = eviction.victims(eviction.init(), 3, make_round())
    names = [rv.id for rv, _ in answer]
    assert len(names) == len(set(names))  # each once
    return frozenset(names), eviction.limits(ROWS[0])


AXES = [
    pytest.param(admissions, lived, id="admission"),
    pytest.param(timeouts, due, id="timeout"),
    pytest.param(compositions, rows_of, id="composition"),
    pytest.param(evictions, victims_of, id="eviction"),
]


@pytest.mark.parametrize(("leaves", "meaning"), AXES)
def test_and_and_or_are_a_lattice(leaves: Any, meaning: Any) -> None:
    @given(leaves, leaves, leaves)
    def laws(a: Any, b: Any, c: Any) -> None:
        same = [
            (a & b, b & a),
            (a | b, b | a),
            ((a & b) & c, a & (b & c)),
            ((a | b) | c, a | (b | c)),
            (a & a, a),
            (a | a, a),
        ]
        for left, right in same:
            assert meaning(left) == meaning(right), (left, right)

    laws()


# absorption and distribution, where states of the parts do not differ: each part of an admission
# counts the same joins, so they hold there as well
@pytest.mark.parametrize(("leaves", "meaning"), AXES)
def test_they_absorb_and_distribute(leaves: Any, meaning: Any) -> None:
    @given(leaves, leaves, leaves)
    def laws(a: Any, b: Any, c: Any) -> None:
        same = [
            (a & (a | b), a),
            (a | (a & b), a),
            (a & (b | c), (a & b) | (a & c)),
            (a | (b & c), (a | b) & (a | c)),
        ]
        for left, right in same:
            meant = [meaning(left), meaning(right)]
            if leaves is admissions:  # of all parts the earliest recheck counts, also b's
                meant = [[said for said in one if type(said) is tuple] for one in meant]
            assert meant[0] == meant[1], (left, right)

    laws()


@given(compositions, compositions)
def test_rows_are_the_sets_that_both_or_either_select(a: Composition, b: Composition) -> None:
    assert rows_of(a & b) == rows_of(a) & rows_of(b)
    assert rows_of(a | b) == rows_of(a) | rows_of(b)


@given(evictions, evictions)
def test_victims_are_the_sets_that_both_or_either_name(a: Eviction, b: Eviction) -> None:
    (left, (instant, steps)), (right, (other_instant, other_steps)) = victims_of(a), victims_of(b)
    assert victims_of(a & b) == (
        left & right,
        (max(instant, other_instant), max(steps, other_steps)),
    )
    assert victims_of(a | b) == (
        left | right,
        (min(instant, other_instant), min(steps, other_steps)),
    )


@given(admissions, admissions)
def test_verdicts_are_the_least_and_the_most(a: Admission, b: Admission) -> None:
    round = make_round()
    for rv in ROWS:
        said = [one.admit(one.init(), rv, round) for one in (a, b)]
        both, either = a & b, a | b
        assert both.admit(both.init(), rv, round) is min(said)
        assert either.admit(either.init(), rv, round) is max(said)


@given(timeouts, timeouts)
def test_instants_are_the_earlier_and_the_later(a: Timeout, b: Timeout) -> None:
    assert due(a | b) == min(due(a), due(b))
    assert due(a & b) == max(due(a), due(b))


@given(orderings, orderings, orderings)
def test_then_is_associative_and_fcfs_is_its_one(a: Ordering, b: Ordering, c: Ordering) -> None:
    def keys(ordering: Ordering) -> list[tuple[float, ...]]:
        return [ordering.key(ordering.init(), rv) for rv in ROWS]

    assert keys(a.then(b).then(c)) == keys(a.then(b.then(c)))
    assert keys(FCFS().then(a)) == keys(a.then(FCFS())) == keys(a)
    assert a.then(b).then(c) == a.then(b.then(c))


@given(controls, controls, controls)
def test_control_then_is_associative_and_the_later_wins(a: Sets, b: Sets, c: Sets) -> None:
    def knobs(control: Control) -> Any:
        values, until = control.knobs(control.init(), ROWS[0], VIEW)
        return dict(values), until

    assert knobs(a.then(b).then(c)) == knobs(a.then(b.then(c)))
    assert knobs(a.then(b)) == (
        dict(a.values) | dict(b.values),
        min(a.until, b.until),
    )
    assert knobs(a.then(a)) == knobs(a)


# --- through the scheduler --------------------------------------------------------------------


def joins(
    policy: Policy, seed: int, capacity: Capacity | None = None
) -> list[tuple[float, str, int]]:
    """Live a small day; return who joined when, and where."""
    rng = random.Random(seed)
    found: list[tuple[float, str, int]] = []

    def watch(event: Any) -> None:
        if isinstance(event, RequestJoined):
            found.append((event.at, event.request_id, event.slot))

    capacity = Capacity(max_num_seqs=20) if capacity is None else capacity
    sched = Scheduler(capacity=capacity, policy=policy, observers=[watch])
    engine = FakeEngine(20)
    now = 0.0
    for number in range(120):
        now += 0.05
        for _ in range(rng.choice((0, 0, 1, 3))):
            name = f"r{number}.{rng.random()}"
            request = Request(
                name,
                prompt_len=rng.randint(1, 30),
                max_new_tokens=rng.randint(1, 12),
                block_length=4,
                payload=len(found),
            )
            sched.submit(request, now=now)
        if number == 100:
            sched.drain(now=now)
        update = sched.next_step(now=now)
        engine.release(update.released)
        batch = update.batch
        if batch is not None:
            engine.release(sched.complete_step(batch, engine.run(batch), now=now).released)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_real_strategies_in_any_order_and_nesting_decide_alike(seed: int) -> None:
    budget, slots = TokenBudget(90), Slots(5)
    gates = [
        budget & slots,
        slots & budget,
        (slots & budget) & (budget & slots),
        slots & (budget & (slots | budget)),
    ]
    logs = [joins(Policy(admission=gate), seed) for gate in gates]
    assert len(logs[0]) > 20
    assert all(log == logs[0] for log in logs)
    starts = [Fill(16) | MaxWait(0.1), MaxWait(0.1) | Fill(16), Fill(16) | MaxWait(0.1) | Fill(16)]
    logs = [joins(Policy(timeout=start), seed) for start in starts]
    assert len(logs[0]) > 20
    assert all(log == logs[0] for log in logs)


@pytest.mark.parametrize("seed", range(3))
def test_a_token_budget_and_a_projected_peak_admit_what_both_would(seed: int) -> None:
    capacity = Capacity(
        max_num_seqs=20, num_pages=28, memory=GrowingKV(page_size=4), window_blocks=1
    )
    budget, peak = TokenBudget(40), ProjectedPeak(GrowingKV(page_size=4))
    both = joins(Policy(admission=budget & peak), seed, capacity)
    assert len(both) > 20
    assert both == joins(Policy(admission=peak & budget), seed, capacity)
    assert both == joins(Policy(admission=(budget & peak) & (peak | budget)), seed, capacity)
    alone = [joins(Policy(admission=one), seed, capacity) for one in (budget, peak)]
    assert both not in alone  # each of them binds at times
    either = joins(Policy(admission=budget | peak), seed, capacity)
    assert either == joins(Policy(admission=peak | budget), seed, capacity)
    assert either not in (*alone, both)


def test_fill_or_max_wait_starts_at_the_sixteenth_or_after_a_tenth_of_a_second() -> None:
    def first_start(arrivals: list[float]) -> tuple[float, int]:
        sched = Scheduler(
            capacity=Capacity(max_num_seqs=16), policy=Policy(timeout=Fill(16) | MaxWait(0.1))
        )
        for index, at in enumerate(arrivals):
            update = sched.next_step(now=at)
            assert update.batch is None
            if update.wake_at < at:
                break
            sched.submit(Request(f"r{index}", prompt_len=1, max_new_tokens=1), now=at)
        update = sched.next_step(now=arrivals[-1])
        at = arrivals[-1]
        if update.batch is None:
            at = update.wake_at
            update = sched.next_step(now=at)
        return at, len(update.batch.rows)

    assert first_start([index / 1000 for index in range(16)]) == (0.015, 16)
    assert first_start([index / 1000 for index in range(15)]) == (0.1, 15)
    assert first_start([0.25]) == (0.35, 1)
