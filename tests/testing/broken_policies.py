"""A shelf of policies that each break one rule, and say which. Loaded by ``test_policy_checks``."""

import math
import random
import time
from datetime import UTC, datetime
from random import random as drawn_under_another_name
from time import monotonic as read_under_another_name

from dllm_sched import FinishReason, Phase, Policy, RequestStatus
from dllm_sched.events import RequestFinished, RequestJoined, RequestSubmitted
from dllm_sched.policies import (
    ALL,
    KEEP,
    RESTART,
    Admission,
    Composition,
    Control,
    Eviction,
    Fill,
    Ordering,
    Timeout,
    Verdict,
)

SHELF = []  # (name, rule, axis, makes a policy)


def broken(rule, axis, **more):
    """Put a strategy class, or a plain callable, on the shelf."""

    def put(thing):
        def make():
            return Policy(**{axis: thing() if isinstance(thing, type) else thing}, **more)

        SHELF.append((thing.__name__.strip("_"), rule, axis, make))
        return thing

    return put


# --- ordering -------------------------------------------------------------------------------------


@broken("raises", "ordering")
class KeyRaises(Ordering):
    def key(self, state, rv):
        return (1 / rv.request.priority,)


@broken("key", "ordering")
class KeyIsNaN(Ordering):
    def key(self, state, rv):
        return (math.nan if rv.request.priority > 1 else 0.0,)


@broken("key", "ordering")
class KeyIsANumber(Ordering):
    def key(self, state, rv):
        return rv.request.priority


@broken("key", "ordering")
class KeyIsAString(Ordering):
    def key(self, state, rv):
        return (rv.request.tenant,)


@broken("key", "ordering")
class KeysOfSeveralLengths(Ordering):
    def key(self, state, rv):
        return (0,) if rv.request.group is None else (0, 1)


@broken("random", "ordering")
class KeyIsRandom(Ordering):
    def key(self, state, rv):
        return (random.random(),)


@broken("random", "ordering")
def draws_under_another_name(rv):
    return (drawn_under_another_name(),)


@broken("random", "ordering")
class OwnGenerator(Ordering):
    def init(self):
        return random.Random(1)

    def key(self, state, rv):
        return (state.randrange(10),)


@broken("shared-state", "ordering")
class CountsOnItself(Ordering):
    def __init__(self):
        self.count = 0

    def key(self, state, rv):
        self.count += 1
        return (-self.count,)


@broken("shared-state", "ordering")
class CountsOnItsClass(Ordering):
    seen = []  # noqa: RUF012  # that is what is broken

    def key(self, state, rv):
        self.seen.append(rv.id)
        return (len(self.seen),)


def counting():
    count = 0

    def counts_in_a_closure(rv):
        nonlocal count
        count += 1
        return (-count,)

    return counts_in_a_closure


broken("shared-state", "ordering")(counting())


@broken("ids", "ordering")
class ByName(Ordering):
    def key(self, state, rv):
        return tuple(map(ord, rv.id[:2]))


@broken("time-shift", "ordering")
class ByTimeOfDay(Ordering):
    def key(self, state, rv):
        return (-(rv.arrived_at % 3.0),)


@broken("state", "ordering")
class ObserveForgetsToReturn(Ordering):
    observes = (RequestSubmitted,)

    def init(self):
        return 0

    def observe(self, state, event):
        state += 1

    def key(self, state, rv):
        return (state % 2,)


@broken("inputs", "ordering")
class WritesToTheRequest(Ordering):
    def key(self, state, rv):
        object.__setattr__(rv.request, "priority", rv.request.priority + 1)
        return (0,)


@broken("ids", "ordering")
class ByHash(Ordering):
    def key(self, state, rv):
        return (hash(rv.id) % 7,)


@broken("raises", "ordering")
class InitRaises(Ordering):
    def init(self):
        raise KeyError("no table")

    def key(self, state, rv):
        return (0,)


@broken("raises", "ordering")
class MustSeeTheBeginning(Ordering):
    """Works as long as it is there from the start: not when it is swapped in live."""

    observes = (RequestSubmitted, RequestFinished)

    def init(self):
        return frozenset()

    def observe(self, state, event):
        if isinstance(event, RequestSubmitted):
            return state | {event.request.id}
        if event.request_id not in state:
            raise KeyError(event.request_id)
        return state - {event.request_id}

    def key(self, state, rv):
        return (len(state),)


# --- admission ------------------------------------------------------------------------------------


@broken("raises", "admission")
def divides_by_free_slots(rv, round):
    return Verdict.ADMIT if 1 / (round.view.free_slots - 1) else Verdict.STOP


@broken("verdict", "admission")
class AdmitSaysTrue(Admission):
    def admit(self, state, rv, round):
        return round.view.num_running < 2


@broken("verdict", "admission")
def says_nothing(rv, round):
    return None


@broken("drains", "admission")
class NeverAdmits(Admission):
    def admit(self, state, rv, round):
        return Verdict.STOP


@broken("drains", "admission")
class AlwaysSkips(Admission):
    def admit(self, state, rv, round):
        return Verdict.SKIP


@broken("drains", "admission")
class NeedsThreeEvenWhileDraining(Admission):
    def admit(self, state, rv, round):
        enough = round.view.num_waiting >= 3 or round.view.num_running
        return Verdict.ADMIT if enough else Verdict.STOP


@broken("verdict", "admission")
class AdmitSaysThree(Admission):
    def admit(self, state, rv, round):
        return 3


@broken("drains", "admission")
class TenAndNoMore(Admission):
    def init(self):
        return 0

    def admit(self, state, rv, round):
        return Verdict.ADMIT if state + round.num_joined < 10 else Verdict.STOP

    def settle(self, state, round):
        return state + round.num_joined


@broken("drains", "admission")
class OneClassNever(Admission):
    needs = frozenset({"lanes"})

    def admit(self, state, rv, round):
        return Verdict.SKIP_LANE if rv.request.request_class == "code" else Verdict.ADMIT


@broken("state-in-place", "admission")
class ChangesStateInAdmit(Admission):
    def init(self):
        return []

    def admit(self, state, rv, round):
        state.append(rv.id)
        return Verdict.ADMIT


@broken("state-in-place", "admission")
class ChangesStateInJoined(Admission):
    def init(self):
        return {"joined": 0}

    def joined(self, state, rv, round):
        state["joined"] += 1
        return state


@broken("inputs", "admission")
class TakesWhoJoined(Admission):
    def admit(self, state, rv, round):
        if round.joined:
            round.joined.clear()
        return Verdict.ADMIT


@broken("inputs", "admission")
class CountsJoinsItself(Admission):
    def joined(self, state, rv, round):
        round.joined_tokens += 100
        return state


@broken("inputs", "admission")
class ChangesTheCounts(Admission):
    needs = frozenset({"lanes"})

    def admit(self, state, rv, round):
        round.view.waiting_by_lane.clear()
        return Verdict.ADMIT


@broken("inputs", "admission")
class SettleTakesWhoJoined(Admission):
    def settle(self, state, round):
        round.joined.clear()
        return state


@broken("shared-state", "admission")
class EveryOtherOne(Admission):
    def __init__(self):
        self.last = None

    def admit(self, state, rv, round):
        self.last = rv.id
        return Verdict.ADMIT


@broken("needs", "admission")
class ReadsRows(Admission):
    def admit(self, state, rv, round):
        return Verdict.ADMIT if len(round.rows) < 3 else Verdict.STOP


@broken("needs", "admission")
class ReadsBoundaries(Admission):
    def admit(self, state, rv, round):
        free = not round.view.num_running or round.boundaries or round.view.draining
        return Verdict.ADMIT if free else Verdict.STOP


@broken("needs", "admission")
class ReadsTheLongest(Admission):
    def admit(self, state, rv, round):
        return Verdict.ADMIT if round.view.max_length < 30 else Verdict.STOP


@broken("needs", "admission")
class ReadsLanes(Admission):
    def admit(self, state, rv, round):
        lane = (rv.request.request_class, rv.request.batch_key)
        return Verdict.ADMIT if round.view.running_by_lane.get(lane, 0) < 2 else Verdict.SKIP_LANE


@broken("needs", "admission")
class ReadsProgress(Admission):
    def settle(self, state, round):
        return max((rv.masked_remaining or 0 for rv in round.joined), default=0)


@broken("needs", "admission")
class AsksForTheYoungest(Admission):
    def admit(self, state, rv, round):
        return (
            Verdict.STOP
            if any(one.num_steps == 1 for one in round.youngest_first())
            else (Verdict.ADMIT)
        )


@broken("recheck", "admission")
class RecheckAtOnce(Admission):
    def recheck(self, state, round):
        return 0


@broken("recheck", "admission")
class RecheckIsNaN(Admission):
    def recheck(self, state, round):
        return math.nan


@broken("recheck-honest", "admission")
class EveryFourthStepWithoutSayingSo(Admission):
    def admit(self, state, rv, round):
        free = not round.view.num_running or round.num_steps >= 4
        return Verdict.ADMIT if free else Verdict.STOP


@broken("recheck-honest", "admission")
class EveryFourthStepButSaysEight(EveryFourthStepWithoutSayingSo):
    def recheck(self, state, round):
        return 8


@broken("progress", "admission")
class WaitsByTheClockInAdmission(Admission):
    def admit(self, state, rv, round):
        late = round.view.now >= rv.arrived_at + 0.5 or round.view.draining
        return Verdict.ADMIT if late else Verdict.STOP


@broken("state", "admission")
class SettleReturnsGarbage(Admission):
    def init(self):
        return {"budget": 10}

    def admit(self, state, rv, round):
        return Verdict.ADMIT if state["budget"] > 0 else Verdict.STOP

    def settle(self, state, round):
        return "garbage"


@broken("state", "admission")
class JoinedForgetsToReturn(Admission):
    def init(self):
        return 0

    def admit(self, state, rv, round):
        return Verdict.ADMIT if state < 3 else Verdict.STOP

    def joined(self, state, rv, round):
        state += 1

    def settle(self, state, round):
        return 0


@broken("accept", "admission")
class AcceptSaysTrue(Admission):
    def accept(self, state, rv, view):
        return True


@broken("shared-state", "admission")
class OneStateForAll(Admission):
    _state = ()

    def __init__(self):
        self.state = {"rounds": 0}

    def init(self):
        return self.state

    def settle(self, state, round):
        return {"rounds": state["rounds"] + 1}


# --- timeout --------------------------------------------------------------------------------------


@broken("drains", "timeout")
class NeverDueNotEvenWhileDraining(Timeout):
    def due(self, state, view):
        return -math.inf if view.num_waiting >= 4 else math.inf


@broken("due", "timeout")
class DueIsNaN(Timeout):
    def due(self, state, view):
        return math.nan


@broken("due", "timeout")
def due_says_nothing(view):
    return None


@broken("due", "timeout")
class AlwaysALittleLater(Timeout):
    def due(self, state, view):
        return -math.inf if view.draining else view.now + 0.25


@broken("due", "timeout")
class AlwaysTheNextInstant(Timeout):
    def due(self, state, view):
        return math.nextafter(view.now, math.inf)


@broken("due", "timeout")
class FallsDueByItself(Timeout):
    def due(self, state, view):
        late = view.now - view.oldest_arrival_at >= 0.5
        return -math.inf if late or view.draining else math.inf


@broken("clock", "timeout")
class ReadsTheClock(Timeout):
    def due(self, state, view):
        return view.oldest_arrival_at + 0 * time.time()


@broken("clock", "timeout")
def reads_under_another_name(view):
    return min(view.oldest_arrival_at, read_under_another_name())


@broken("clock", "timeout")
class ReadsTheDate(Timeout):
    def due(self, state, view):
        return view.oldest_arrival_at + (datetime.now(tz=UTC).hour < 8)


@broken("raises", "timeout")
class LooksItUp(Timeout):
    def due(self, state, view):
        return view.oldest_arrival_at + {None: 0.5}[view.batch_key]


@broken("operators", "timeout")
class OrIsNotOr(Timeout):
    def due(self, state, view):
        return view.oldest_arrival_at + 0.5

    def __or__(self, other):
        return Fill(1)


# --- composition ----------------------------------------------------------------------------------


@broken("select", "composition")
class SelectsNobodyForEver(Composition):
    def select(self, state, round):
        return ()


@broken("select", "composition")
class OnlyPrefill(Composition):
    def select(self, state, round):
        return (Phase.PREFILL,)


@broken("select", "composition")
class SelectsWhoWaits(Composition):
    needs = frozenset({"rows"})
    observes = (RequestSubmitted, RequestJoined)

    def select(self, state, round):
        blocked = round.blocked
        return [*round.rows, blocked] if blocked is not None else ALL


@broken("select", "composition")
class SelectsTwice(Composition):
    needs = frozenset({"rows"})

    def select(self, state, round):
        return [*round.rows, *round.rows]


@broken("select", "composition")
class SelectsNothingAtAll(Composition):
    def select(self, state, round):
        return None


@broken("select", "composition")
class SelectsPhasesAndRows(Composition):
    needs = frozenset({"rows"})

    def select(self, state, round):
        return [Phase.PREFILL, *round.rows]


@broken("select", "composition")
class NeverTheLastOne(Composition):
    needs = frozenset({"rows"})

    def select(self, state, round):
        return list(round.rows)[1:]


@broken("select", "composition")
def selects_slots(round):
    return [0, 1, 2]


@broken("needs", "composition")
class SelectsRowsUndeclared(Composition):
    def select(self, state, round):
        return list(round.joined) or ALL


@broken("needs", "composition")
class LooksAtProgressUndeclared(Composition):
    needs = frozenset({"rows", "every_step"})

    def select(self, state, round):
        done = [one for one in round.rows if (one.masked_remaining or 0) <= 2]
        return done or ALL


# --- eviction -------------------------------------------------------------------------------------


@broken("limits", "eviction")
class LimitIsNaN(Eviction):
    def limits(self, rv):
        return (math.nan, math.inf)


@broken("limits", "eviction")
class NoSteps(Eviction):
    def limits(self, rv):
        return (math.inf, 0)


@broken("limits", "eviction")
def only_steps(rv):
    return 5


class EveryStep(Eviction):
    needs = frozenset({"every_step", "rows"})


@broken("victims", "eviction")
class VictimTwice(EveryStep):
    def victims(self, state, need_pages, round):
        return [(one, KEEP) for one in [*round.rows[:1], *round.rows[:1]]]


@broken("victims", "eviction")
class VictimWithoutAReason(EveryStep):
    def victims(self, state, need_pages, round):
        return [(one, "kill") for one in round.rows]


@broken("victims", "eviction")
class VictimIsARequest(EveryStep):
    def victims(self, state, need_pages, round):
        return [(one.request, RESTART) for one in round.rows]


@broken("victims", "eviction")
class NoVictimsButNone(EveryStep):
    def victims(self, state, need_pages, round):
        return None


@broken("drains", "eviction")
class AlwaysTheOldest(EveryStep):
    def victims(self, state, need_pages, round):
        return [(one, RESTART) for one in round.rows[:1] if one.num_steps >= 2]


@broken("drains", "eviction")
class SendsEverybodyBackForEver(EveryStep):
    def victims(self, state, need_pages, round):
        for one in round.rows:
            if one.num_steps >= 1:
                yield one, RESTART


DAYS = []


@broken("repeatable", "eviction")
class EveryOtherDay(EveryStep):
    def victims(self, state, need_pages, round):
        DAYS.append(round.view.now)
        done = [one for one in round.rows if one.num_steps == 2 and len(DAYS) % 2]
        return [(one, FinishReason.MAX_STEPS) for one in done]


# --- control --------------------------------------------------------------------------------------


@broken("knobs", "control")
class KnobsAreAList(Control):
    def knobs(self, state, rv, view):
        return (["threshold", 0.9], math.inf)


@broken("knobs", "control")
class KnobsInThePast(Control):
    def knobs(self, state, rv, view):
        return ({"threshold": 0.9}, view.now)


@broken("knobs", "control")
class KnobsWithoutAnEnd(Control):
    def knobs(self, state, rv, view):
        return {"threshold": 0.9}


@broken("knobs", "control")
class BatchKnobsUntilNaN(Control):
    def batch_knobs(self, state, view):
        return ({}, math.nan)


@broken("shared-state", "control")
class NumbersItsKnobs(Control):
    def __init__(self):
        self.number = 0

    def knobs(self, state, rv, view):
        self.number += 1
        return ({"number": self.number}, math.inf)


@broken("raises", "control")
class WritesToTheView(Control):
    def knobs(self, state, rv, view):
        rv.note = "seen"
        return ({}, math.inf)


@broken("hints", "control")
class HintsAreNothing(Control):
    def hints(self, state, round):
        return None


# --- the same, but another time -------------------------------------------------------------------

GLOBAL = []


@broken("repeatable", "admission")
class KeepsCountInAGlobal(Admission):
    def admit(self, state, rv, round):
        GLOBAL.append(rv.status is RequestStatus.WAITING)
        lucky = len(GLOBAL) % 3 or not round.view.num_running
        return Verdict.ADMIT if lucky else Verdict.STOP


LIVED = []


@broken("deterministic", "ordering")
class FirstTimeIsDifferent(Ordering):
    """The same answer at once, but another on another day: only a second run shows it."""

    def key(self, state, rv):
        if not LIVED or LIVED[-1] is not rv:
            LIVED.append(rv)
        return (0 if len(LIVED) % 5 < 2 else -rv.sequence,)


BESIDE = []


@broken("shared-state", "ordering")
class SharesThroughAGlobal(Ordering):
    """Each day alone is always the same day; only a second scheduler beside shows it."""

    def key(self, state, rv):
        if rv.sequence == 0:
            BESIDE.clear()
        if not BESIDE or BESIDE[-1] is not rv:
            BESIDE.append(rv)
        return (-(len(BESIDE) % 3),)
