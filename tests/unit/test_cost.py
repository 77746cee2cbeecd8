"""An unchanged step costs the same whatever stands around it. Counted, never timed.

What is counted, since no count sees everything:

* bytecodes and Python calls see a loop in Python;
* the names of the C functions called see ``sum``, ``sorted``, ``heapify``;
* containers that note what reads them see C code that walks one without a call of its own:
  ``tuple(rows)``, ``x in rows``, ``[*rows]``, ``rows == others``;
* memory, kept and at its peak, sees copies.
"""

import gc
import heapq
import io
import math
import sys
import tracemalloc
from collections import Counter, deque
from typing import NamedTuple

import pytest

from dllm_sched import (
    NOTHING,
    BlockBoundary,
    Capacity,
    FinishReason,
    Policy,
    Request,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.journal import JournaledScheduler
from dllm_sched.metrics import Metrics
from dllm_sched.policies import (
    EarliestDeadline,
    Fill,
    Ordering,
    PastDeadline,
    PriorityFirst,
    Slots,
    StepCap,
    TokenBudget,
)


def request(number):
    return Request(f"r{number}", prompt_len=8, max_new_tokens=64)


def scheduler(rows, waiting, policy=None, kind=Scheduler, **arguments):
    """A scheduler with full slots in the middle of its work."""
    one = kind(capacity=Capacity(max_num_seqs=rows), policy=policy, **arguments)
    for number in range(rows + waiting):
        one.submit(request(number), now=0.0)
    for _ in range(3):
        step(one)
    return one


def step(one):
    update = one.next_step(now=1.0)
    one.complete_step(update.batch, NOTHING, now=1.0)
    return update


def ahead(one):
    """Plan a step while one runs, and complete that one."""
    update = one.next_step(now=1.0)
    one.complete_step(one._in_flight, NOTHING, now=1.0)
    return update


# --- counting -------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """What a call does."""

    bytecodes: int
    python_calls: int
    c_calls: Counter  # by name
    kept: int  # memory blocks, among them what it returns
    peak: int  # bytes beyond those it began with
    reads: Counter  # of containers with an element for each row or each waiting request


def cost(function, one):
    """Measure a call, again and again; the containers come last, for they stay slow."""
    events, c_calls = Counter(), Counter()

    def trace(frame, event, _):
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        events[event] += 1
        return trace

    def profile(_frame, event, called):
        if event == "c_call":
            c_calls[called.__qualname__] += 1

    tracer, profiler = sys.gettrace(), sys.getprofile()
    gc.collect()
    gc.disable()  # a collection in between would be counted, with the hooks that others put on it
    try:
        sys.settrace(trace)
        function(one)
        sys.settrace(None)
        sys.setprofile(profile)
        function(one)
        sys.setprofile(None)
        kept = blocks_kept(function, one)
        peak = peak_bytes(function, one)
        reads = watch(one)
        function(one)
        reads = +reads
    finally:
        sys.setprofile(profiler)
        sys.settrace(tracer)
        gc.enable()
    del c_calls["setprofile"]
    return Cost(events["opcode"], events["call"], c_calls, kept, peak, reads)


def blocks_kept(function, one):
    """Memory blocks that a call leaves behind while what it returned is alive."""
    returned = [None] * 8
    least = sys.maxsize
    for index in range(len(returned)):
        before = sys.getallocatedblocks()
        returned[index] = function(one)
        least = min(least, sys.getallocatedblocks() - before)
    return least


def peak_bytes(function, one):
    """Bytes that a call takes at most, beyond those taken when it began."""
    tracemalloc.start()
    try:
        least = sys.maxsize
        for _ in range(8):
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            function(one)
            least = min(least, tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return least


KINDS = (list, tuple, dict, set, deque)
SILENT = {"__new__", "__init__", "__getattribute__", "__class_getitem__", "__len__", "__sizeof__"}
O1 = {  # what costs the same in a large one
    list: {"__setitem__", "append"},
    tuple: set(),
    dict: {"__getitem__", "__setitem__", "__delitem__", "__contains__", "get", "pop"},
    set: {"add", "discard", "__contains__"},
    deque: {"append", "popleft"},
}


def watch(one, least=16):
    """Let the scheduler's containers of so many elements note whatever reads them.

    Each becomes one of a subclass in which every method but those of O(1) notes that it was called;
    the interpreter calls them, too, wherever it does not know the exact type.
    """
    notes = Counter()

    def noting(name, plain):
        def method(self, *args, **kwargs):
            notes[name] += 1
            return plain(self, *args, **kwargs)

        return method

    watched = {
        kind: type(
            kind.__name__,
            (kind,),
            {
                name: noting(f"{kind.__name__}.{name}", plain)
                for name, plain in vars(kind).items()
                if callable(plain) and name not in SILENT | O1[kind]
            },
        )
        for kind in KINDS
    }
    replaced = {}
    todo, seen = [one], {}
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if type(thing) in KINDS:
            todo.extend(thing.values() if type(thing) is dict else thing)
        elif type(thing).__module__.startswith(("dllm_sched.", __name__)):
            names = [
                name for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ())
            ]
            for name in [*names, *getattr(thing, "__dict__", ())]:
                value = getattr(thing, name, None)
                todo.append(value)
                if type(value) in KINDS and len(value) >= least:
                    if id(value) not in replaced:
                        replaced[id(value)] = watched[type(value)](value)
                    object.__setattr__(thing, name, replaced[id(value)])
    assert replaced, "nothing is watched"
    notes.clear()
    return notes


# --- an unchanged step ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        None,
        presets.continuous(16),
        Policy(ordering=PriorityFirst().then(EarliestDeadline()), admission=TokenBudget(10**6)),
    ],
    ids=["default", "continuous", "ordered"],
)
def test_an_unchanged_step_costs_the_same_at_any_size(policy):
    least = cost(step, scheduler(16, 0, policy))
    assert least.bytecodes > 0, "nothing was counted"
    assert not least.reads
    assert cost(step, scheduler(4_096, 0, policy)) == least
    assert cost(step, scheduler(16, 10_000, policy)) == least
    assert cost(step, scheduler(4_096, 10_000, policy)) == least


def test_an_unchanged_step_is_two_short_calls_that_build_two_values():
    counts = cost(step, scheduler(16, 100))
    assert counts.python_calls == 3, "step itself, next_step and complete_step"
    assert counts.bytecodes < 140
    assert counts.c_calls == {"tuple.__new__": 2}
    assert counts.kept == 2, "the batch and the update"
    assert counts.peak < 256


def test_running_ahead_costs_the_same_at_any_size():
    costs = []
    for rows, waiting in ((16, 0), (4_096, 10_000)):
        one = scheduler(rows, waiting, max_in_flight=2)
        one.next_step(now=1.0)
        costs.append(cost(ahead, one))
    assert costs[0] == costs[1]
    assert costs[0].python_calls == 4, "ahead itself, next_step, _run_ahead and complete_step"


def test_an_unchanged_step_with_a_journal_costs_the_same_at_any_size():
    def journaled(**arguments):
        return JournaledScheduler(io.StringIO(), **arguments)

    costs = [cost(step, scheduler(*size, kind=journaled)) for size in ((16, 0), (4_096, 10_000))]
    assert costs[0] == costs[1]
    assert not costs[0].reads


def test_an_unchanged_step_that_is_observed_walks_nothing():
    one = cost(step, scheduler(4_096, 10_000, observers=[id]))
    assert not one.reads
    assert one.peak < 2_048


def test_metrics_cost_an_unchanged_step_the_same_at_any_size():
    added = []
    for size in ((16, 0), (4_096, 10_000)):
        bare, counted = (
            cost(step, scheduler(*size, observers=[observer])) for observer in (id, Metrics())
        )
        assert not counted.reads
        assert counted.peak < 2_048
        added.append(
            (
                counted.bytecodes - bare.bytecodes,
                counted.python_calls - bare.python_calls,
                counted.c_calls - bare.c_calls,
            )
        )
    assert added[0] == added[1]
    assert added[0][1] == 6, "two events, each with a method, and two histograms"


WALKS = {
    "a loop": lambda one: [None for _ in one._running.slots],
    "tuple": lambda one: tuple(one._running.slots),
    "list": lambda one: list(one._rows),
    "sum": lambda one: sum(map(bool, one._running.slots)),
    "in": lambda one: one in one._running.slots,
    "sorted": lambda one: sorted(one._running.slots, key=id),
    "any": lambda one: any(view is one for view in one._running.slots),
    "max of map": lambda one: max(map(id, one._rows)),
    "unpack": lambda one: [*one._rows],
    "slice": lambda one: one._rows[1:],
    "equal": lambda one: one._rows == (),
    "add": lambda one: (*one._rows, None),
    "set": lambda one: set(one._running.slots),
    "count": lambda one: one._running.slots.count(None),
    "index by map": lambda one: deque(map(one._rows.__getitem__, range(9)), maxlen=0),
    "ids": lambda one: list(one._views),
    "views": lambda one: min(one._views.values(), key=id),
    "the queue walked": lambda one: [*next(iter(one._queue.lanes.values())).line],
    "a heap made": lambda one: heapq.heapify(next(iter(one._queue.lanes.values())).heap),
}


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_the_guard_sees_a_walk(walk):
    class Walking(Scheduler):
        def next_step(self, *, now):
            if self._rows:
                walk(self)
            return super().next_step(now=now)

    seen = cost(step, scheduler(16, 64, kind=Walking))
    assert seen.reads or seen.c_calls != {"tuple.__new__": 2}


# --- calls that change something ------------------------------------------------------------------


def turn(one):
    """One row retires and one joins."""
    batch = one.next_step(now=1.0).batch
    ending = StepOutcome((RowFinished(batch.rows[0].slot, FinishReason.EOS),))
    one.complete_step(batch, ending, now=1.0)
    step(one)


def test_a_change_copies_the_rows_once_and_walks_nothing_else():
    small, large, queued = (  # 32: a tuple of less than 20 comes from the interpreter's own store
        cost(turn, scheduler(*size)) for size in ((32, 100), (4_096, 100), (32, 10_000))
    )
    assert small.reads["list.__iter__"] == 1, "the copy"
    assert set(small.reads) == {
        "list.__iter__",
        "list.__getitem__",
        "tuple.__getitem__",
        "list.pop",
    }
    for one in (large, queued):
        assert one.bytecodes == small.bytecodes
        assert one.python_calls == small.python_calls
        assert one.c_calls == small.c_calls
        assert one.reads == small.reads
    assert large.peak - small.peak <= 8 * 4_096, "a pointer for each row"
    assert queued.peak == small.peak


NUMBERS = iter(range(10**6))


def submit(one):
    one.submit(request(f"new{next(NUMBERS)}"), now=1.0)


def boundaries(one):
    """A step in which four rows cross a boundary."""
    batch = one.next_step(now=1.0).batch
    rows = [one._running.slots[row.slot] for row in batch.rows[:4]]
    crossed = [BlockBoundary(rv.slot, rv.num_blocks_done, 8) for rv in rows]
    one.complete_step(batch, StepOutcome(boundaries=tuple(crossed)), now=1.0)


class Every(Ordering):
    def key(self, state, rv):
        return (rv.request.priority,)


SIX = Policy(
    ordering=Every(),
    admission=Slots(16) & TokenBudget(10**6),
    timeout=Fill(1),
    eviction=PastDeadline() | StepCap(100),
    control=lambda rv, view: ({}, math.inf),
)


@pytest.mark.parametrize(
    ("call", "policy", "calls", "bytecodes"),
    [
        (submit, None, 7, 546),
        (turn, None, 24, 1_415),
        (boundaries, None, 23, 1_050),
        (submit, SIX, 12, 690),
        (turn, SIX, 52, 2_760),
    ],
)
def test_a_change_is_few_calls(call, policy, calls, bytecodes):
    """Of Python, the request or the outcome made included; so that no later change adds to them."""
    counts = cost(call, scheduler(16, 100, policy))
    assert counts.python_calls <= calls
    assert counts.bytecodes <= bytecodes


def test_submit_and_cancel_walk_nothing():
    numbers = iter(range(10**6))

    def cancel(one):
        one.cancel(f"r{20 + next(numbers)}", now=1.0)

    for call in (submit, cancel):
        small, large = (cost(call, scheduler(16, waiting)) for waiting in (100, 10_000))
        assert set(small.reads) <= {"list.__getitem__", "deque.__getitem__"}
        assert large.reads == small.reads
        assert large.c_calls == small.c_calls
        assert large.bytecodes == small.bytecodes


def test_totals_are_the_same_however_late_they_are_settled():
    """Totals of unchanged steps are added up when something changes, or when they are read."""
    often, once = scheduler(4, 0), scheduler(4, 0)
    for one in (often, once):
        one.cancel("r3", now=1.0)
    for number in range(10):
        for one in (often, once):
            if number == 5:
                one.set_capacity(Capacity(max_num_seqs=4), now=1.0)
            step(one)
        often.stats()
    assert often.stats() == once.stats()
    assert once.stats().row_steps == 3 * 4 + 10 * 3
