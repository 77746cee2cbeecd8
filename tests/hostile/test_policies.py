"""Policies that raise, answer nonsense, meddle and call back: nobody is lost, nothing breaks.

Each is put in force in the middle of a run, plays for a while, and is taken out again. Until then
a call either does its work or raises a ``PolicyError`` and has changed nothing; after that every
request must come home, each once.
"""

from __future__ import annotations

import contextlib
import math
import runpy
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import attrs
import pytest

from dllm_sched import (
    Capacity,
    ConfigError,
    EngineProtocolError,
    FinishReason,
    Phase,
    Policy,
    PolicyError,
    Request,
    RowFate,
    Scheduler,
    presets,
)
from dllm_sched.events import RequestFinished, RequestJoined, RequestSubmitted, StepCompleted
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
    YoungestFirst,
)

RIG = runpy.run_path(str(Path(__file__).with_name("ledger.py")))
Ledger, snapshot = RIG["Ledger"], RIG["snapshot"]

HOOKS = {
    "ordering": (Ordering, ["key"]),
    "admission": (Admission, ["accept", "admit", "joined", "settle", "recheck"]),
    "timeout": (Timeout, ["due"]),
    "composition": (Composition, ["select"]),
    "eviction": (Eviction, ["limits", "victims"]),
    "control": (Control, ["knobs", "batch_knobs", "hints"]),
}
EVERY_HOOK = [(axis, hook) for axis, (_, hooks) in HOOKS.items() for hook in hooks]
NEEDS = {
    "composition": {"rows"},
    "eviction": {"every_step", "rows"},
    "control": {"blocks", "rows"},
    "admission": {"every_step", "lanes", "rows", "max_length"},
}


def bad_policy(axis: str, answers: dict[str, Callable[..., Any]], **more: Any) -> Policy:
    """A policy with one axis whose hooks answer as told."""
    base = HOOKS[axis][0]
    body: dict[str, Any] = {"needs": frozenset(NEEDS.get(axis, ())), **more}
    for hook, answer in answers.items():
        body[hook] = lambda self, *args, _answer=answer: _answer(*args)
    return Policy(**{axis: type("Bad", (base,), body)()}, name=f"bad {axis}")


def guarded(ledger: Any, call: Callable[..., Any], *args: Any) -> bool:
    """Make a call; whether it got through. If not, nothing has changed."""
    before = snapshot(ledger.scheduler)
    try:
        call(*args)
    except (PolicyError, ConfigError):
        assert snapshot(ledger.scheduler) == before
        ledger.scheduler.check_invariants()
        return False
    return True


def play(policy: Policy, *, ahead: int = 1, kind: Any = Scheduler) -> tuple[Any, int]:
    """A run with the policy in its middle; returns how many calls it made fail."""
    ledger = Ledger(Policy(eviction=YoungestFirst()), max_in_flight=ahead, kind=kind)
    for number in range(7):
        ledger.submit(tenant=f"t{number % 2}", priority=number % 3)
    for _ in range(4):
        ledger.next()
        ledger.complete()
    refused = 0
    swapped = guarded(ledger, lambda: swap(ledger, policy))
    refused += not swapped
    for turn in range(24):
        refused += not guarded(ledger, ledger.submit)
        refused += not guarded(ledger, ledger.next)
        if turn % 5 == 1:
            ledger.told(ledger.scheduler.cancel(f"r{turn}", now=ledger.now))
        if ledger.flights and turn % 7 == 3:
            refused += not guarded(ledger, ledger.fail, RowFate.RESTART)
        elif ledger.flights:
            ledger.complete()
    swap(ledger, Policy())
    ledger.serve()
    return ledger, refused


def swap(ledger: Any, policy: Policy) -> None:
    ledger.told(ledger.scheduler.set_policy(policy, now=ledger.now))


def raises(error: BaseException) -> Callable[..., Any]:
    def hook(*_: Any) -> Any:
        raise error

    return hook


ERRORS = [
    RuntimeError("hostile"),
    StopIteration(),
    RecursionError(),
    MemoryError(),
    ConfigError("not so"),
    EngineProtocolError("not mine"),
    AssertionError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("axis", "hook"), EVERY_HOOK)
def test_a_hook_that_raises_is_the_policys_fault(axis, hook, error):
    _, refused = play(bad_policy(axis, {hook: raises(error)}))
    assert refused


def serve_some(ledger: Any) -> None:
    for _ in range(6):
        ledger.submit()
    for _ in range(3):
        if ledger.next().batch is not None:
            ledger.complete()


@pytest.mark.parametrize(("axis", "hook"), EVERY_HOOK)
def test_the_error_names_the_policy_and_has_the_cause(axis, hook):
    error = EngineProtocolError("from inside")
    policy = bad_policy(axis, {hook: raises(error)})
    ledger = Ledger(policy)
    with pytest.raises(PolicyError, match=f"bad {axis}.*{hook}") as caught:
        serve_some(ledger)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("hook", ["init", "observe", "validate"])
@pytest.mark.parametrize("axis", HOOKS)
def test_so_is_one_beside_the_decisions(axis, hook):
    body = {
        hook: raises(RuntimeError("hostile")),
        "observes": (RequestSubmitted, RequestJoined, RequestFinished, StepCompleted),
    }
    bad = type("Bad", (HOOKS[axis][0],), body | {hook: lambda self, *_: body[hook]()})()
    _, refused = play(Policy(**{axis: bad}))
    assert refused


ANSWERS: list[Any] = [
    None,
    True,
    "text",
    b"bytes",
    0,
    -1,
    10**400,
    math.nan,
    -math.inf,
    math.inf,
    1j,
    Decimal("NaN"),
    Decimal(3),
    (),
    (math.nan,),
    (10**400,),
    ("a", 1),
    (None, None),
    ({}, math.nan),
    ({}, Decimal("inf")),
    ({"a": [1, {2}]}, 10**400),
    ({1: math.inf}, math.inf),
    (math.inf, math.nan),
    (10**400, 1),
    (5.0, Decimal(2)),
    (Decimal(5), 2.5),
    [1, 2],
    {},
    {"a": 1},
    {Phase.PREFILL, "x"},
    {Phase.REFRESH},
    [()],
    [(None, KEEP)],
    object(),
    Verdict,
    ALL,
    KEEP,
    FinishReason.EOS,
    float,
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: repr(answer)[:30])
@pytest.mark.parametrize(("axis", "hook"), EVERY_HOOK)
def test_nonsense_breaks_nothing(axis, hook, answer):
    play(bad_policy(axis, {hook: lambda *_: answer}))


@pytest.mark.parametrize("answer", [math.nan, None, "x", -1, 0, 10**400, Decimal(2), True])
def test_a_most_of_rows_that_is_none(answer):
    play(Policy(admission=type("Bad", (Admission,), {"max_rows": answer})()))


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize(("axis", "hook"), EVERY_HOOK)
def test_one_that_fails_now_and_then(axis, hook, turn, ahead):
    """Half of the calls raise, the others answer as the plainest strategy does."""
    count = iter(range(10**6))
    plain = getattr(HOOKS[axis][0](), hook)

    def moody(*args: Any) -> Any:
        if next(count) % 3 == turn:
            raise RuntimeError("not today")
        return plain(*args)

    play(bad_policy(axis, {hook: moody}), ahead=ahead)


def strangers() -> list[Any]:
    """Views of another scheduler's row, of a request that ended, and of one that waits."""
    other = Scheduler(capacity=Capacity(max_num_seqs=1))
    other.submit(Request("r0", prompt_len=1, max_new_tokens=1), now=0.0)
    other.next_step(now=0.0)
    foreign = other.view("r0")
    third = Scheduler(capacity=Capacity(max_num_seqs=1))
    third.submit(Request("r1", prompt_len=1, max_new_tokens=1), now=0.0)
    waiting = third.view("r1")
    third.submit(Request("r2", prompt_len=1, max_new_tokens=1), now=0.0)
    gone = third.view("r2")
    third.cancel("r2", now=0.0)
    return [foreign, waiting, gone]


@pytest.mark.parametrize("who", range(3))
def test_rows_that_are_not_this_schedulers(who):
    view = strangers()[who]
    _, refused = play(bad_policy("composition", {"select": lambda state, round: [view]}))
    assert refused
    for how in (KEEP, RESTART, FinishReason.EOS):
        evict = bad_policy(
            "eviction", {"victims": lambda state, need, round, _how=how: [(view, _how)]}
        )
        assert play(evict)[1]


def test_rows_named_twice():
    twice = bad_policy("composition", {"select": lambda state, round: [*round.rows, *round.rows]})
    assert play(twice)[1]

    def victims(state: Any, need: int, round: Any) -> Any:
        rows = list(round.youngest_first())[:1]
        return [(row, RESTART) for row in rows * 2]

    assert play(bad_policy("eviction", {"victims": victims}))[1]


def test_rows_that_have_left_since():
    """Remembers every row it ever saw, and goes on choosing them."""
    seen: dict[str, Any] = {}

    def select(state: Any, round: Any) -> Any:
        seen.update((rv.id, rv) for rv in round.rows)
        return list(seen.values())

    assert play(bad_policy("composition", {"select": select}))[1]


@pytest.mark.parametrize("ahead", [1, 2])
def test_everybody_in_whatever_there_is_room_for(ahead):
    greedy = bad_policy(
        "admission",
        {"admit": lambda *_: Verdict.ADMIT, "recheck": lambda *_: 1},
        max_rows=math.inf,
    )
    ledger = Ledger(greedy, max_in_flight=ahead)
    for _ in range(50):
        ledger.submit()
        if len(ledger.flights) < ahead:
            ledger.next()
        stats, held = ledger.scheduler.stats(), len(ledger.slots)
        assert held <= ledger.scheduler.capacity.max_num_seqs
        assert stats.free_slots >= 0
        if ledger.flights:
            ledger.complete()
    ledger.serve()


@pytest.mark.parametrize("how", [KEEP, RESTART, FinishReason.MAX_STEPS, FinishReason.CANCELLED])
def test_one_that_evicts_everybody(how):
    everybody = bad_policy(
        "eviction",
        {"victims": lambda state, need, round: [(rv, how) for rv in round.youngest_first()]},
    )
    _, refused = play(everybody)
    assert refused == 0


@pytest.mark.parametrize(
    "never",
    [
        Policy(timeout=lambda view: math.inf),
        Policy(admission=lambda rv, round: Verdict.STOP),
        Policy(admission=lambda rv, round: Verdict.SKIP),
        Policy(admission=lambda rv, round: Verdict.SKIP_LANE),
    ],
)
def test_one_that_never_starts_is_told_so_when_it_must(never):
    ledger = Ledger(never)
    ledger.submit()
    assert ledger.next().batch is None, "legal: another may come"
    ledger.told(ledger.scheduler.drain(now=0.0))
    for _ in range(2):
        assert not guarded(ledger, ledger.next)
    swap(ledger, Policy())
    ledger.serve()


def test_one_that_selects_nobody_is_told_so_at_once():
    ledger = Ledger(Policy(composition=lambda round: ()))
    ledger.submit()
    assert ledger.next().batch is None, "it has joined, which is told first"
    for _ in range(2):
        assert not guarded(ledger, ledger.next)
    swap(ledger, Policy())
    ledger.serve()


class Vandal:
    """Breaks whatever public thing it is handed."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, *args: Any) -> None:
        for one in args:
            self.kept.append(one)
            for name in ("joined", "boundaries", "rows", "waiting_by_lane", "running_by_lane"):
                table = getattr(one, name, None)
                if table is None:
                    continue
                for meddle in (
                    lambda table=table: table.clear(),
                    lambda table=table: table.append("junk"),
                    lambda table=table: table.update({("x", "y"): -5}),
                    lambda table=table: table.__setitem__(Phase.PREFILL, -1),
                ):
                    with contextlib.suppress(TypeError, AttributeError, IndexError):
                        meddle()
            for name, value in (
                ("num_joined", 99),
                ("joined_tokens", -5),
                ("blocked", "me"),
                ("num_steps", -1),
                ("slot", 77),
                ("status", None),
                ("num_running", 0),
            ):
                with contextlib.suppress(AttributeError):
                    setattr(one, name, value)


@pytest.mark.parametrize(("axis", "hook"), EVERY_HOOK)
def test_one_that_breaks_what_it_is_handed(axis, hook):
    vandal = Vandal()
    plain = getattr(HOOKS[axis][0](), hook)

    def meddling(*args: Any) -> Any:
        vandal(*args)
        return plain(*args)

    policy = bad_policy(axis, {hook: meddling})
    policy = attrs.evolve(
        policy, **{"control": _Blocks()} if axis == "admission" else {}, name="vandal"
    )
    _ledger, refused = play(policy)
    assert vandal.kept
    assert refused == 0


class _Blocks(Control):
    needs = frozenset({"blocks"})

    def knobs(self, state: Any, rv: Any, view: Any) -> Any:
        return ({"blocks": rv.num_blocks_done}, view.now + 1)


def test_knobs_that_the_policy_goes_on_changing():
    """What a row runs with is what was answered, not what became of it."""
    shared = {"threshold": 0.5}
    ledger = Ledger(
        Policy(control=lambda rv, view: (shared, view.now + 0.2)), capacity=Capacity(max_num_seqs=2)
    )
    ledger.submit()
    (row,) = ledger.next().batch.rows
    assert row.knobs == {"threshold": 0.5}
    shared["threshold"] = 0.9
    assert row.knobs == {"threshold": 0.5}
    ledger.complete()
    assert ledger.next().batch.rows[0].knobs == {"threshold": 0.5}, "valid until 0.2"
    ledger.complete()
    assert ledger.next().batch.rows[0].knobs == {"threshold": 0.9}


class _Odd:
    """Values whose comparison raises, as arrays do."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


def test_knobs_that_cannot_be_compared():
    play(bad_policy("control", {"knobs": lambda s, rv, view: ({"a": _Odd()}, view.now + 0.1)}))


@pytest.mark.parametrize(("axis", "hook"), EVERY_HOOK)
@pytest.mark.parametrize("ahead", [1, 2])
def test_one_that_calls_back_is_refused_at_the_door(axis, hook, ahead):
    ledger = Ledger(Policy(), max_in_flight=ahead)
    scheduler = ledger.scheduler
    met: set[str] = set()
    calls: dict[str, Callable[[], Any]] = {
        "submit": lambda: scheduler.submit(
            Request("intruder", prompt_len=1, max_new_tokens=1), now=ledger.now
        ),
        "next_step": lambda: scheduler.next_step(now=ledger.now),
        "complete_step": lambda: scheduler.complete_step(scheduler._in_flight, now=ledger.now),
        "fail_step": lambda: scheduler.fail_step(
            scheduler._in_flight, ValueError(), rows={}, now=ledger.now
        ),
        "cancel": lambda: scheduler.cancel("r0", now=ledger.now),
        "requeue": lambda: scheduler.requeue("r0", now=ledger.now),
        "set_policy": lambda: scheduler.set_policy(Policy(), now=ledger.now),
        "set_capacity": lambda: scheduler.set_capacity(Capacity(max_num_seqs=1), now=ledger.now),
        "pause": lambda: scheduler.pause(now=ledger.now),
        "resume": lambda: scheduler.resume(now=ledger.now),
        "drain": lambda: scheduler.drain(now=ledger.now),
    }
    plain = getattr(HOOKS[axis][0](), hook)

    def meddling(*args: Any) -> Any:
        for name, call in calls.items():
            with pytest.raises(EngineProtocolError):
                call()
            met.add(name)
        scheduler.counts(), scheduler.stats(), scheduler.has_work()  # which may be looked at
        return plain(*args)

    swap(ledger, bad_policy(axis, {hook: meddling}))
    for _ in range(12):
        for _ in range(6):
            ledger.submit()
        if len(ledger.flights) < ahead:
            ledger.next()
        if len(ledger.flights) == ahead:
            ledger.complete()
    assert met == calls.keys()
    ledger.serve()


def test_an_observer_that_calls_back_is_refused_too():
    ledger = Ledger()
    met: list[Exception] = []

    def observer(event: Any) -> None:
        try:
            ledger.scheduler.cancel("r0", now=ledger.now)
        except EngineProtocolError as error:
            met.append(error)

    ledger.scheduler._observers.append(observer)
    ledger.scheduler._set_watch()
    ledger.submit()
    ledger.serve()
    assert len(met) > 5


@pytest.mark.parametrize("needs", [None, 5, "rows", {"rows", "gold"}, [5]])
@pytest.mark.parametrize("axis", HOOKS)
def test_needs_that_are_none(axis, needs):
    with pytest.raises(ConfigError, match="needs"):
        Policy(**{axis: type("Bad", (HOOKS[axis][0],), {"needs": needs})()})


@pytest.mark.parametrize("observes", [None, 5, RequestJoined, (5,)])
@pytest.mark.parametrize("axis", HOOKS)
def test_observes_that_is_no_tuple_of_events(axis, observes):
    with pytest.raises(ConfigError, match="observes"):
        Policy(**{axis: type("Bad", (HOOKS[axis][0],), {"observes": observes})()})


def test_a_policy_that_cannot_take_an_event_can_be_taken_out():
    """Else nothing but a restart would help."""
    policy = attrs.evolve(
        presets.fixed_fill(3),
        ordering=type(
            "Bad",
            (Ordering,),
            {"observes": (RequestSubmitted,), "observe": lambda self, *_: 1 / 0},
        )(),
    )
    ledger = Ledger(policy)
    ledger.submit()
    for _ in range(2):
        assert not guarded(ledger, ledger.next)
    swap(ledger, Policy())
    ledger.serve()
