"""Numbers that are none, or that nothing can hold: wherever one is asked for, refused or of use."""

from __future__ import annotations

import inspect
import io
import itertools
import math
import runpy
from pathlib import Path
from typing import Any

import attrs
import pytest

from dllm_sched import (
    Capacity,
    ClockError,
    ConfigError,
    DllmSchedError,
    FinishReason,
    FixedCanvas,
    GrowingKV,
    Policy,
    Request,
    Scheduler,
    StepOutcome,
    UnknownRequestError,
    policies,
    presets,
)
from dllm_sched.batch import RowFinished
from dllm_sched.capacity import RaggedKV
from dllm_sched.journal import JournaledScheduler, replay
from dllm_sched.policies import (
    Admission,
    Control,
    Eviction,
    Ordering,
    Slots,
    StepCap,
    Timeout,
    TokenBudget,
)
from dllm_sched.policies.base import Composition
from dllm_sched.runtime import AsyncDriver, Driver, MonotonicClock, VirtualClock
from dllm_sched.sim.recording import SlotTimeline
from dllm_sched.testing import FakeEngine
from dllm_sched.theory import batching, energy, exclusive, surface
from dllm_sched.theory.wait import TrafficType

HUGE = 10**400  # beyond every float
TINY, LARGE = 5e-324, 1e308  # floats whose inverse, or whose double, is none
HOSTILE = [
    *(HUGE, HUGE + 1, -HUGE, math.nan, math.inf, -math.inf, TINY, LARGE, 10**300, 2**63),
    *(True, "5", None, [], object()),
]
MEMORY = GrowingKV(page_size=8)
SLOTS = Capacity(max_num_seqs=4, num_pages=40, memory=MEMORY)
TYPES = {"": TrafficType(1.0, 0, 9)}
needed = runpy.run_path(str(Path(__file__).parents[1] / "needed.py"))["needed"]
GRID = ((0.7, 0.62), (0.9, 1.0))
LENGTHS = {"memory": MEMORY, "lengths": {1: 2.0, 2: 1.0}}
OPTIONS: dict[str, dict[str, Any]] = {
    "congestion_stable": LENGTHS,
    "fair_share": {"weights": {"": 2.0}},
    "nested_wait": {"types": TYPES},
    "tediserve": {"grid": GRID},
    "wait": {"types": TYPES},
}
"""Of the presets that have such as a number hides in."""


def serve(policy: Policy) -> None:
    """Everybody ends, some with a deadline, with whatever rate, cost and time is estimated."""
    clock, ended = VirtualClock(0.0), []
    scheduler = Scheduler(policy=policy, capacity=SLOTS)
    engine = FakeEngine(4, clock=clock, service_s=lambda batch: 0.5, steps=lambda request: 4)
    driver = Driver(scheduler, engine, clock, on_update=lambda one: ended.extend(one.finished))
    fields = {"prompt_len": 4, "max_new_tokens": 16, "block_length": 8}
    driver.run(
        (0.3 * n, Request(f"r{n}", deadline_at=1000.0 if n % 2 else math.inf, **fields))
        for n in range(9)
    )
    assert len(ended) == 9
    scheduler.check_invariants()


def variants(value: Any) -> Any:
    """The same with each of its numbers, one after the other, replaced by what is hostile."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from ({**value, key: other} for other in variants(one))
            if isinstance(key, int):
                rest = {k: v for k, v in value.items() if k != key}
                yield from ({**rest, k: one} for k in HOSTILE if k.__hash__ is not None)
    elif isinstance(value, tuple):
        for n, one in enumerate(value):
            yield from ((*value[:n], other, *value[n + 1 :]) for other in variants(one))
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            for other in HOSTILE:
                try:
                    yield attrs.evolve(value, **{field.name: other})
                except ConfigError:
                    continue
    else:
        yield from HOSTILE


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
def test_a_preset_refuses_what_it_cannot_use(name):
    takes = inspect.signature(presets.PRESETS[name]).parameters
    given = needed(name, 2) | OPTIONS.get(name, {})
    served = 0
    for argument in takes:
        for wrong in variants(given.get(argument)):
            try:
                policy = presets.PRESETS[name](**{**given, argument: wrong})
                Scheduler(policy=policy, capacity=SLOTS)
            except ConfigError:
                continue
            serve(policy)
            served += 1
    assert served < len(takes) * len(HOSTILE) or not takes, "nothing was refused"


STRATEGIES: dict[str, dict[str, Any]] = {
    "AgedShortestFirst": {},
    "BoundingBox": {"tokens": 300},
    "ByLength": {"modes": ("short", "long"), "bounds": (20,)},
    "ChunkWidth": {
        key: value for key, value in needed("optimus", 2).items() if key != "batch_size"
    },
    "ConfidenceThreshold": {"grid": GRID, "demand": 1.0},
    "ConstantCost": {},
    "DeficitBudget": {},
    "EarliestDeadline": {},
    "EmaRate": {},
    "EnergyFill": {"target_j": 5.0, "batch_j": lambda rows: 6.0 + 2.0 * rows, "most": 4},
    "ExclusivePhases": {"batch_size": 2, "count": 1},
    "FewestBlocks": {},
    "Fill": {"count": 2},
    "FilteredMeanRate": {},
    "FluidFill": {"batch_size": 2, "rate": 1.0, "service": 1.0},
    "JoinWithinBudget": {},
    "KnownRate": {"per_s": 2.0},
    "KnownService": {"given": 2.0},
    "LearnedService": {},
    "LearnedTimeout": {"batch_size": 2, "rate": 1.0, "service": 1.0},
    "LogBandRate": {},
    "MaxWait": {"seconds": 1.0},
    "MaxWaiting": {"count": 9},
    "MixLengths": {"weights": {"": 2.0}},
    "NestedWaitQuota": {"batch_size": 2, "types": TYPES},
    "NestedWaitRows": {"batch_size": 2, "types": TYPES},
    "NestedWaitStart": {"batch_size": 2, "types": TYPES},
    "PoissonTimeout": {"rate": 1.0, "service_s": 1.0, "batch_size": 2},
    "PriorityFirst": {},
    "ProjectedPeak": LENGTHS,
    "RateCap": {"per_step": {"": 0.5}},
    "ShortestPrompt": {},
    "Slots": {"count": 2},
    "StepCap": {"steps": 3},
    "StepWithinBudget": {},
    "TokenBudget": {"tokens": 300},
    "WaitQuota": {"batch_size": 2, "types": TYPES},
    "WaitRows": {"batch_size": 2, "types": TYPES},
    "WaitStart": {"batch_size": 2, "types": TYPES},
    "WeightedFairShare": {"weights": {"": 2.0}},
    "WindowRate": {},
}
AXES = {
    kind: kind.__name__.lower()
    for kind in (Ordering, Admission, Timeout, Composition, Eviction, Control)
}


def policy_of(strategy: Any) -> Policy:
    """A policy that asks it."""
    for kind, axis in AXES.items():
        if isinstance(strategy, kind):
            return Policy(**{axis: strategy})
    if isinstance(strategy, policies.Rate):
        return Policy(timeout=policies.LearnedTimeout(2, rate=strategy))
    if isinstance(strategy, policies.Service):
        return Policy(timeout=policies.LearnedTimeout(2, service=strategy))
    if isinstance(strategy, policies.ByLength):
        return Policy(control=policies.ChooseMode(strategy.modes, strategy))
    return Policy(ordering=policies.AgedShortestFirst(strategy))


def test_no_strategy_with_a_number_is_left_out():
    takes_numbers = {
        name
        for name in policies.__all__
        if attrs.has(kind := getattr(policies, name))
        and any(
            field.init and field.type is not None and ("int" in field.type or "float" in field.type)
            for field in attrs.fields(kind)
            if isinstance(field.type, str) and not field.type.startswith("Callable")
        )
    }
    assert takes_numbers <= set(STRATEGIES)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_refuses_what_it_cannot_use(name):
    kind, given = getattr(policies, name), STRATEGIES[name]
    refused = 0
    for argument in inspect.signature(kind).parameters:
        for wrong in variants(given.get(argument)):
            try:
                policy = policy_of(kind(**{**given, argument: wrong}))
                Scheduler(policy=policy, capacity=SLOTS)
            except ConfigError:
                refused += 1
            else:
                serve(policy)
    assert refused


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Capacity, {"max_num_seqs": 4, "num_pages": 40, "memory": MEMORY, "window_blocks": 1}),
        (FixedCanvas, {"page_size": 8}),
        (GrowingKV, {"page_size": 8}),
        (RaggedKV, {"retentions": (0.5, 1.0), "page_size": 8, "window_blocks": 1}),
        (Request, {"id": "a", "prompt_len": 4, "max_new_tokens": 16}),
        (FakeEngine, {"max_num_seqs": 4}),
        (MonotonicClock, {"offset_s": 5.0}),
    ],
)
def test_a_value_refuses_what_it_cannot_be(kind, given):
    for argument in inspect.signature(kind).parameters:
        for wrong in variants(given.get(argument)):
            try:
                value = kind(**{**given, argument: wrong})
            except ConfigError:
                continue
            if isinstance(value, Capacity):
                scheduler = Scheduler(capacity=value)
                scheduler.submit(Request("a", prompt_len=4, max_new_tokens=16), now=0.0)
                scheduler.next_step(now=0.0)


@pytest.mark.parametrize("field", ["prompt_len", "max_new_tokens", "block_length", "priority"])
def test_a_request_is_of_a_size_that_arithmetic_holds(field):
    """Its greatest is served under every policy and memory model; what is beyond is refused."""
    fields = {"prompt_len": 4, "max_new_tokens": 16, "block_length": 8}
    for beyond in (2**63, 10**300, HUGE, 10**5000):  # Python does not even write the last one
        with pytest.raises(ConfigError, match=rf"request 'a': {field} must be an int .* < 2\*\*63"):
            Request("a", **{**fields, field: beyond})
    greatest = {**fields, field: 2**63 - 1}
    memories = (GrowingKV(page_size=8), FixedCanvas(page_size=8), RaggedKV((0.5, 1.0), page_size=8))
    for name, memory in itertools.product(presets.PRESETS, memories):
        scheduler = Scheduler(
            policy=presets.PRESETS[name](**needed(name, 2)),
            capacity=Capacity(max_num_seqs=4, num_pages=2**63 - 1, memory=memory),
        )
        for deadline_at in (1e6, math.inf):
            request = Request(f"until {deadline_at}", deadline_at=deadline_at, **greatest)
            assert scheduler.submit(request, now=0.0)
        scheduler.drain(now=0.0)
        ended = 0
        for step in range(1, 7):
            batch = scheduler.next_step(now=float(step)).batch
            if batch is not None:
                done = tuple(RowFinished(row.slot, FinishReason.EOS) for row in batch.rows)
                outcome = StepOutcome(finished=done if step % 2 else ())
                ended += len(scheduler.complete_step(batch, outcome, now=float(step)).finished)
        assert ended == 2, name
        scheduler.check_invariants()


@pytest.mark.parametrize("kind", [TokenBudget, StepCap, FixedCanvas, Slots])
def test_a_count_is_below_two_to_the_63(kind):
    for beyond in (2**63, HUGE, 10**5000):
        with pytest.raises(ConfigError, match=r"must be an int >= 1 and < 2\*\*63"):
            kind(beyond)


# --- calls ----------------------------------------------------------------------------------------

NO_INSTANTS = [HUGE, -HUGE, math.nan, math.inf, -math.inf, "5", b"5", None, [], object()]


def calls(scheduler: Any, fresh: str = "fresh") -> dict[str, Any]:
    """Every call that takes an instant, with arguments that are right; each can be made."""
    flight = scheduler._in_flight
    found = {
        "submit": lambda now: scheduler.submit(
            Request(fresh, prompt_len=4, max_new_tokens=16), now=now
        ),
        "cancel": lambda now: scheduler.cancel("r0", now=now),
        "requeue": lambda now: scheduler.requeue("r8", now=now),
        "set_policy": lambda now: scheduler.set_policy(Policy(), now=now),
        "set_capacity": lambda now: scheduler.set_capacity(Capacity(max_num_seqs=2), now=now),
        "pause": lambda now: scheduler.pause(now=now),
        "resume": lambda now: scheduler.resume(now=now),
        "drain": lambda now: scheduler.drain(now=now),
    }
    if flight is None or scheduler.max_in_flight == 2:
        found["next_step"] = lambda now: scheduler.next_step(now=now)
    if flight is not None:
        found["complete_step"] = lambda now: scheduler.complete_step(flight, now=now)
        found["complete_step, of something"] = lambda now: scheduler.complete_step(
            flight, StepOutcome(phases=()), now=now
        )
        found["fail_step"] = lambda now: scheduler.fail_step(
            flight, RuntimeError("x"), rows={}, now=now
        )
    return found


@pytest.mark.parametrize("journaled", [False, True])
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("flying", [False, True])
def test_a_call_refuses_what_is_no_instant(journaled, ahead, flying):
    """Also where nothing has changed and nobody looks: it would be the latest for ever."""
    file = io.StringIO()
    arguments: dict[str, Any] = {"capacity": Capacity(max_num_seqs=2), "max_in_flight": ahead}
    scheduler = JournaledScheduler(file, **arguments) if journaled else Scheduler(**arguments)
    for n in range(9):
        scheduler.submit(Request(f"r{n}", prompt_len=4, max_new_tokens=16), now=0.0)
    for n in range(4):
        scheduler.complete_step(scheduler.next_step(now=float(n)).batch, now=float(n))
    if flying:
        scheduler.next_step(now=4.0)
    written = file.getvalue()
    for call, make in calls(scheduler).items():
        for now in NO_INSTANTS:
            with pytest.raises(ClockError, match=call.partition(",")[0]):
                make(now)
        assert file.getvalue() == written, call
        scheduler.check_invariants()
    assert scheduler.counts().running == 2
    scheduler.drain(now=5)  # an int is one, too
    if journaled:
        assert replay(file.getvalue().splitlines(keepends=True)).difference is None


NO_IDS = [5, None, True, math.nan, b"r0", [], {}, object()]


@pytest.mark.parametrize(
    "kind", [Scheduler, lambda **how: JournaledScheduler(io.StringIO(), **how)]
)
def test_a_call_refuses_what_is_none_of_its_arguments(kind):
    scheduler = kind(capacity=Capacity(max_num_seqs=2))
    scheduler.submit(Request("r0", prompt_len=4, max_new_tokens=16), now=0.0)
    flight = scheduler.next_step(now=0.0).batch
    for wrong in NO_IDS:
        for call in (scheduler.cancel, scheduler.requeue):
            with pytest.raises(ConfigError, match="request_id must be a str"):
                call(wrong, now=0.0)
        for look in (scheduler.view, scheduler.explain):
            with pytest.raises(UnknownRequestError):
                look(wrong)
        for call in (scheduler.submit, scheduler.set_policy, scheduler.set_capacity):
            with pytest.raises(ConfigError, match="expected a"):
                call(wrong, now=0.0)
        for call in (
            lambda wrong: scheduler.complete_step(wrong, now=0.0),
            lambda wrong: scheduler.complete_step(flight, wrong, now=0.0),
            lambda wrong: scheduler.fail_step(wrong, RuntimeError("x"), rows={}, now=0.0),
            lambda wrong: scheduler.fail_step(flight, wrong, rows={}, now=0.0),
            lambda wrong: scheduler.fail_step(flight, RuntimeError("x"), rows={0: wrong}, now=0.0),
            lambda wrong: scheduler.fail_step(flight, RuntimeError("x"), rows=[wrong], now=0.0),
        ):
            with pytest.raises(DllmSchedError):
                call(wrong)
        with pytest.raises(ConfigError):
            Policy(name=wrong)
        with pytest.raises(ConfigError):
            kind(capacity=wrong)
        if wrong not in ([], {}):
            with pytest.raises(ConfigError):
                kind(capacity=Capacity(max_num_seqs=2), observers=wrong)
    for steps in [*HOSTILE, 0, -1, 0.5, 2**60]:
        if steps is not True:
            with pytest.raises(DllmSchedError):
                scheduler.complete_step(flight, now=0.0, steps=steps)
    for policy in (*NO_IDS[:1], *NO_IDS[2:]):
        with pytest.raises(ConfigError):
            kind(capacity=Capacity(max_num_seqs=2), policy=policy)
    scheduler.check_invariants()
    assert scheduler.counts().running == 1


JUNK = [*HOSTILE[:6], b"5", 5, -1, "x", None, [], {}, object()]


@pytest.mark.parametrize("kind", [Driver, AsyncDriver])
@pytest.mark.parametrize(
    ("argument", "fine"),
    [
        ("scheduler", ()),
        ("max_restarts", (5, HUGE, HUGE + 1)),
        ("recover_steps", (None, 5, HUGE, HUGE + 1)),
        ("step_timeout_s", (5, math.inf)),
        ("on_update", (None,)),
        ("on_stuck", (None,)),
    ],
)
def test_a_driver_refuses_what_it_cannot_use(kind, argument, fine):
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=1))
    for wrong in JUNK:
        if wrong not in fine:
            with pytest.raises(ConfigError):
                kind(**{"scheduler": scheduler, "engine": FakeEngine(1), argument: wrong})


def test_a_driver_refuses_arrivals_that_are_none():
    request = Request("a", prompt_len=1, max_new_tokens=1)
    strange: list[Any] = [*((wrong,) for wrong in JUNK)]
    strange += [((0.0, wrong),) for wrong in JUNK]
    strange += [((wrong, request),) for wrong in NO_INSTANTS]
    strange += [wrong for wrong in JUNK if wrong not in ([], {}, None)]
    for arrivals in strange:
        clock = VirtualClock(0.0)
        driver = Driver(Scheduler(capacity=Capacity(max_num_seqs=1)), FakeEngine(1), clock)
        with pytest.raises(ConfigError):
            driver.run(arrivals)


def test_a_clock_refuses_what_is_no_time():
    clock = VirtualClock(0.0)
    for wrong in NO_INSTANTS:
        for call in (clock.set, clock.advance, VirtualClock):
            with pytest.raises(ClockError):
                call(wrong)
    assert clock() == 0.0


@pytest.mark.parametrize(
    ("function", "given", "fine"),
    [
        (surface.log_key, {"work": 2.0, "arrived_at": 1.0, "rate": 0.1, "period_s": 3.0}, ()),
        (surface.aged_work, {"work": 2.0, "waited_s": 1.0, "rate": 0.1, "period_s": 3.0}, ()),
        (energy.fixed_share, {"gain": 1.5, "size": 4}, ()),
        (exclusive.empty_slots, {"theta": 0.5, "num_slots": 4}, ()),
        (exclusive.threshold, {"hazard": 0.1, "prefill_base_s": 2.0, "decode_base_s": 1.0}, ()),
        (batching.capped_timeout, {"rate": 0.5, "service_s": 8.0, "batch_size": 8}, ()),
        (SlotTimeline, {"from_s": 1.0, "until_s": 2.0, "max_spans": 3}, (math.inf,)),
    ],
)
def test_a_closed_form_refuses_what_is_no_number(function, given, fine):
    function(**given)
    for argument in given:
        for wrong in [HUGE, -HUGE, math.nan, math.inf, -math.inf, True, "5", None, [], object()]:
            if not (wrong in fine and argument == "until_s"):
                with pytest.raises(ConfigError):
                    function(**{**given, argument: wrong})
