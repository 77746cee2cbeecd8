"""Each axis under random strategies, against a naive model of what must come out.

A strategy here answers from a table drawn for the case: by request, and by what it is shown. The
model on the other side is as plain as can be and O(n); it shares no code with the scheduler.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dllm_sched import (
    Capacity,
    FinishReason,
    Phase,
    PhaseChange,
    Policy,
    Request,
    RowFinished,
    Scheduler,
    StepOutcome,
)
from dllm_sched.policies import (
    ALL,
    KEEP,
    RESTART,
    Admission,
    Composition,
    Control,
    Eviction,
    Ordering,
    Timeout,
    Verdict,
)

CASES = 40 if "DLLM_SCHED_FULL" not in os.environ else 2000
EOS = FinishReason.EOS

machine = settings(
    max_examples=CASES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
seeds = given(st.integers(0, 2**32), st.sampled_from([1, 2, 5]))


class Play:
    """A scheduler, who waits in order of arrival, and who runs."""

    def __init__(self, seed: int, slots: int, policy: Policy) -> None:
        self.rng = random.Random(seed)
        self.slots = slots
        self.scheduler = Scheduler(capacity=Capacity(max_num_seqs=slots), policy=policy)
        self.now = 0.0
        self.serial = itertools.count()
        self.waiting: list[str] = []
        self.running: dict[str, int] = {}  # id -> slot
        self.steps: dict[str, int] = {}
        self.batch: Any = None

    def submit(self, **fields: Any) -> str:
        name = f"r{next(self.serial)}"
        request = Request(name, prompt_len=4, max_new_tokens=32, block_length=8, **fields)
        self.scheduler.submit(request, now=self.now)
        self.waiting.append(name)
        return name

    def told(self, update: Any) -> Any:
        self.scheduler.check_invariants()
        for one in update.finished:
            self.running.pop(one.request.id, None)
            if one.request.id in self.waiting:
                self.waiting.remove(one.request.id)
        if update.batch is not None:
            self.batch = update.batch
        return update

    def next(self) -> Any:
        return self.told(self.scheduler.next_step(now=self.now))

    def joined(self, update: Any) -> list[str]:
        """Who joined with this step; they are rows now."""
        rows = () if update.batch is None else update.batch.joined
        for row in rows:
            self.waiting.remove(row.request.id)
            self.running[row.request.id] = row.slot
            self.steps.setdefault(row.request.id, 0)
        return [row.request.id for row in rows]

    def placed(self) -> list[str]:
        """Who has got a slot since; their first step may come later."""
        views = [self.scheduler.view(name) for name in self.waiting]
        names = [view.id for view in views if view.slot is not None]
        for name in names:
            self.waiting.remove(name)
            self.running[name] = self.scheduler.view(name).slot
            self.steps[name] = 0
        return names

    def complete(self, *, ends: float = 0.3, phases: float = 0.0) -> None:
        """End some rows at random, and change the phase of others."""
        batch, self.batch, rng = self.batch, None, self.rng
        over = tuple(RowFinished(row.slot, EOS) for row in batch.rows if rng.random() < ends)
        moved = tuple(
            PhaseChange(row.slot, rng.choice(list(Phase)))
            for row in batch.rows
            if rng.random() < phases
        )
        for row in batch.rows:
            self.steps[row.request.id] += 1
        outcome = StepOutcome(finished=over, phases=moved)
        self.told(self.scheduler.complete_step(batch, outcome, now=self.now))


# --- ordering -------------------------------------------------------------------------------------


@machine
@seeds
def test_ordering_is_sorting_by_key_then_arrival(seed: int, slots: int) -> None:
    draw = random.Random(seed + 1)
    length = draw.randint(0, 3)
    keys: dict[str, tuple[float, ...]] = {}

    class Table(Ordering):
        def key(self, state: Any, rv: Any) -> tuple[float, ...]:
            values = [-math.inf, -1, 0, 0.5, 1, 10**30, math.inf]
            return keys.setdefault(rv.id, tuple(draw.choice(values) for _ in range(length)))

    play = Play(seed, slots, Policy(ordering=Table()))
    arrived: dict[str, int] = {}
    for _ in range(60):
        for _ in range(play.rng.randrange(4)):
            arrived[play.submit(batch_key=None)] = len(arrived)
        if play.waiting and play.rng.random() < 0.2:
            name = play.rng.choice(play.waiting)
            keys.pop(name)  # what it goes by has come
            play.told(play.scheduler.requeue(name, now=play.now))
        if play.waiting and play.rng.random() < 0.1:
            play.told(play.scheduler.cancel(play.rng.choice(play.waiting), now=play.now))
        room = slots - len(play.running)
        must = sorted(play.waiting, key=lambda name: (keys[name], arrived[name]))[:room]
        update = play.next()
        assert play.joined(update) == must
        if update.batch is not None:
            play.complete()
        play.now += 0.25


# --- admission ------------------------------------------------------------------------------------


@machine
@seeds
def test_admission_is_what_the_verdicts_say(seed: int, slots: int) -> None:
    draw = random.Random(seed + 1)
    verdicts: dict[tuple[int, str], Verdict] = {}
    turn = 0
    asked: list[str] = []

    def verdict(name: str) -> Verdict:
        kinds = [*Verdict, Verdict.ADMIT, Verdict.ADMIT, Verdict.SKIP]
        return verdicts.setdefault((turn, name), draw.choice(kinds))

    class Table(Admission):
        needs = frozenset({"every_step", "lanes"})

        def admit(self, state: Any, rv: Any, round: Any) -> Verdict:
            asked.append(rv.id)
            assert [one.id for one in round.joined] == [
                one for one in asked[:-1] if verdict(one) is Verdict.ADMIT
            ]
            assert round.num_joined == len(round.joined)
            return verdict(rv.id)

        def settle(self, state: Any, round: Any) -> Any:
            return None if round.blocked is None else round.blocked.id

    play = Play(seed, slots, Policy(admission=Table()))
    classes: dict[str, str] = {}
    for _ in range(60):
        turn += 1
        for _ in range(play.rng.randrange(6)):
            kind = play.rng.choice("ab")
            classes[play.submit(request_class=kind)] = kind
        room, aside, must, blocked = slots - len(play.running), 0, [], None
        parked: set[str] = set()
        first_aside = None
        for name in play.waiting:  # the naive round
            if classes[name] in parked:
                continue
            if len(must) == room:
                blocked = name
                break
            said = verdict(name)
            if said is Verdict.ADMIT:
                must.append(name)
            elif said is Verdict.STOP:
                blocked = name
                break
            elif said is Verdict.SKIP_LANE:
                parked.add(classes[name])
                blocked = name
            else:
                first_aside = first_aside or name
                aside += 1
                if aside == 8:
                    blocked = first_aside
                    break
        blocked = blocked or first_aside
        asked.clear()
        update = play.next()
        assert play.joined(update) == must
        assert play.scheduler._asking.admission_state == blocked
        if blocked is not None and not play.scheduler._dirty:
            assert blocked in play.waiting
            behind = [one for one in play.waiting if one != blocked]
            assert all(play.scheduler.explain(one).behind == blocked for one in behind)
        if update.batch is not None:
            play.complete()
        play.now += 0.25


# --- timeout --------------------------------------------------------------------------------------


@machine
@seeds
@pytest.mark.parametrize("scope", ["idle", "step"])
def test_no_batch_of_an_idle_engine_before_it_is_due(scope: str, seed: int, slots: int) -> None:
    draw = random.Random(seed + 1)
    waits = {(key, n): draw.choice([0.0, 0.1, 0.7, 3.0]) for key in "xyz" for n in range(100)}

    class Table(Timeout):
        def due(self, state: Any, view: Any) -> float:
            if view.draining:
                return -math.inf
            return view.oldest_arrival_at + waits[view.batch_key, min(view.num_waiting, 99)]

    Table.scope = scope
    play = Play(seed, slots, Policy(timeout=Table()))
    key_of: dict[str, str] = {}
    arrived: dict[str, float] = {}

    def due(key: str) -> float:
        mine = [name for name in play.waiting if key_of[name] == key]
        first = min((arrived[name] for name in mine), default=math.inf)
        return first + waits[key, len(mine)]

    for _ in range(80):
        for _ in range(play.rng.choice([0, 0, 1, 2])):
            key = play.rng.choice("xyz")
            name = play.submit(batch_key=key)
            key_of[name], arrived[name] = key, play.now
        idle = not play.running
        ready = {key for key in "xyz" if due(key) <= play.now}
        dues = [due(key) for key in "xyz"]
        waiting = list(play.waiting)
        update = play.next()
        placed = play.placed()
        if idle or scope == "step":
            assert {key_of[name] for name in placed} <= ready, "somebody joined before it was due"
        if idle:
            first = next((name for name in waiting if key_of[name] in ready), None)
            assert (update.batch is None) == (first is None), (
                "due, and nothing goes; or the reverse"
            )
            if first is None:
                assert update.wake_at == min(dues)
            else:
                mine = [name for name in waiting if key_of[name] == key_of[first]]
                assert placed == mine[:slots], "an idle engine starts one batch_key"
        if update.batch is not None:
            play.complete(ends=0.5)
        if idle and update.batch is None and play.rng.random() < 0.5 and min(dues) < math.inf:
            play.now = min(dues)  # exactly then it must go
        else:
            play.now += play.rng.choice([0.0, 0.1, 0.25])


# --- composition ----------------------------------------------------------------------------------


@machine
@seeds
@pytest.mark.parametrize("by", ["rows", "phases"])
def test_exactly_the_selected_rows_step(by: str, seed: int, slots: int) -> None:
    draw = random.Random(seed + 1)
    chosen: list[Any] = []

    class Table(Composition):
        needs = frozenset({"rows"})

        def select(self, state: Any, round: Any) -> Any:
            rows = list(round.rows)
            if by == "rows":
                answer = [rv for rv in rows if draw.random() < 0.5] or rows[:1]
                chosen[:] = [rv.id for rv in answer]
                draw.shuffle(answer)
                return draw.choice([list, tuple, set])(answer)
            there = sorted({rv.phase.value for rv in rows})
            picked = {Phase(draw.choice(there))} | {p for p in Phase if draw.random() < 0.3}
            chosen[:] = [rv.id for rv in rows if rv.phase in picked]
            if len(chosen) == len(rows) and draw.random() < 0.5:
                return ALL
            return picked

    play = Play(seed, slots, Policy(composition=Table()))
    known: set[str] = set()
    for _ in range(80):
        for _ in range(play.rng.randrange(3)):
            play.submit()
        update = play.next()
        if update.batch is None:
            assert not play.running
            continue
        for row in update.batch.joined:  # with its first step, which may be later than its slot
            assert row.request.id not in known
            known.add(row.request.id)
        play.placed()
        names = [row.request.id for row in update.batch.rows]
        assert known >= set(names)
        assert sorted(names) == sorted(chosen)
        if by == "rows":
            slots_of = [row.slot for row in update.batch.rows]
            assert slots_of == sorted(slots_of), "in whatever order they were named"
        play.complete(ends=0.2, phases=0.3)
        for name in play.running:
            assert play.scheduler.view(name).num_steps == play.steps[name]


# --- eviction -------------------------------------------------------------------------------------


@machine
@seeds
def test_victims_leave_and_nobody_else(seed: int, slots: int) -> None:
    draw = random.Random(seed + 1)
    named: dict[str, Any] = {}
    limits: dict[str, tuple[float, float]] = {}

    class Table(Eviction):
        needs = frozenset({"every_step"})

        def limits(self, rv: Any) -> tuple[float, float]:
            instant = draw.choice([math.inf, math.inf, play.now + draw.random() * 3])
            return limits.setdefault(rv.id, (instant, draw.choice([math.inf, 1, 3, 8])))

        def victims(self, state: Any, need_pages: int, round: Any) -> Any:
            hows = [KEEP, RESTART, FinishReason.MAX_STEPS, FinishReason.ERROR]
            named.update(
                (rv.id, (rv, draw.choice(hows)))
                for rv in round.youngest_first()
                if draw.random() < 0.15
            )
            return list(named.values())

    play = Play(seed, slots, Policy(eviction=Table()))
    kept: dict[str, int] = {}  # steps of who was sent back with progress
    for _ in range(80):
        for _ in range(play.rng.randrange(3)):
            play.submit()
        named.clear()
        running = dict(play.running)
        expired = {name for name in running if limits[name][0] <= play.now}
        update = play.next()
        ended = {one.request.id: one for one in update.finished}
        gone = {one.request.id: one for one in update.released}
        assert not expired & named.keys(), "asked about a row whose time is over"
        assert ended.keys() == expired | {
            name for name, (_, how) in named.items() if isinstance(how, FinishReason)
        }
        assert gone.keys() == expired | named.keys(), "exactly those leave their slots"
        for name, (_, how) in named.items():
            assert gone[name].kept == (how is KEEP)
            if isinstance(how, FinishReason):
                assert ended[name].reason is how
                continue
            play.running.pop(name)
            play.waiting.append(name)
            play.waiting.sort(key=lambda one: int(one[1:]))  # its old place
            kept[name] = play.steps.pop(name) if how is KEEP else 0
        for name in expired:
            assert ended[name].reason is FinishReason.DEADLINE
        joined = play.joined(update)
        assert not set(joined) & named.keys(), "back in the round that sent it away"
        for name in joined:
            play.steps[name] = kept.pop(name, 0)
            assert play.scheduler.view(name).num_steps == play.steps[name]
        assert {name: play.running[name] for name in running if name in play.running} == {
            name: slot
            for name, slot in running.items()
            if name not in expired and name not in named
        }, "the others stay where they are"
        if update.batch is None:
            play.now += 0.25
            continue
        rows, before = play.batch.rows, set(play.running)
        play.complete(ends=0.1)
        for row in rows:
            name = row.request.id
            capped = play.steps[name] >= limits[name][1]
            assert not (capped and name in play.running), "a row past its cap"
        assert before >= set(play.running)
        play.now += 0.25


# --- control --------------------------------------------------------------------------------------


@machine
@seeds
def test_knobs_are_those_last_answered_and_never_stale(seed: int, slots: int) -> None:
    draw = random.Random(seed + 1)
    rows: dict[str, tuple[dict[str, Any], float]] = {}
    whole: list[Any] = [None, -math.inf]
    asked: list[str] = []

    def until(now: float) -> float:
        return now + draw.choice([1e-9, 0.25, 0.5, 2.0, math.inf])

    class Table(Control):
        def knobs(self, state: Any, rv: Any, view: Any) -> Any:
            asked.append(rv.id)
            rows[rv.id] = ({"a": draw.randrange(3)} if draw.random() < 0.9 else {}, until(view.now))
            return rows[rv.id]

        def batch_knobs(self, state: Any, view: Any) -> Any:
            whole[:] = [{"b": draw.randrange(3)}, until(view.now)]
            return tuple(whole)

    play = Play(seed, slots, Policy(control=Table()))
    for _ in range(80):
        for _ in range(play.rng.choice([0, 0, 1])):
            play.submit()
        stale = {name for name in play.running if rows[name][1] <= play.now}
        whole_stale = whole[1] <= play.now
        asked.clear()
        update = play.next()
        joined = play.joined(update)
        assert sorted(asked) == sorted(stale | set(joined)), (
            "asked when they ran out, and then only"
        )
        if update.batch is None:
            play.now += 0.25
            continue
        assert all(rows[name][1] > play.now for name in play.running), "valid beyond now"
        for row in update.batch.rows:
            assert row.knobs == rows[row.request.id][0]
        assert whole[1] > play.now
        assert update.batch.knobs == whole[0]
        assert not whole_stale or whole[1] > play.now
        assert update.wake_at <= min(whole[1], *(rows[name][1] for name in play.running))
        play.complete(ends=0.1)
        play.now += play.rng.choice([0.0, 0.1, 0.25])
