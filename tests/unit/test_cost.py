"""An unchanged step costs the same whatever stands around it. Counted, never timed."""

import gc
import sys
from collections import Counter

import pytest

from dllm_sched import NOTHING, Capacity, Policy, Request, Scheduler, presets
from dllm_sched.policies import EarliestDeadline, PriorityFirst, TokenBudget


def scheduler(rows, waiting, policy=None, kind=Scheduler, **arguments):
    """A scheduler with full slots in the middle of its work."""
    one = kind(capacity=Capacity(max_num_seqs=rows), policy=policy, **arguments)
    for number in range(rows + waiting):
        one.submit(Request(f"r{number}", prompt_len=8, max_new_tokens=64), now=0.0)
    for _ in range(3):
        step(one)
    return one


def step(one):
    update = one.next_step(now=1.0)
    one.complete_step(update.batch, NOTHING, now=1.0)


def count(function, *args):
    """Bytecodes, Python calls and calls into C that a call makes."""
    counts = Counter()

    def trace(frame, event, _):
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        counts[event] += event in ("call", "opcode")
        return trace

    def profile(_frame, event, _):
        counts[event] += event == "c_call"

    tracer, profiler = sys.gettrace(), sys.getprofile()
    gc.collect()
    gc.disable()  # a collection in between would be counted, with the hooks that others put on it
    try:
        sys.settrace(trace)
        function(*args)
        sys.settrace(None)
        sys.setprofile(profile)
        function(*args)
    finally:
        sys.setprofile(profiler)
        sys.settrace(tracer)
        gc.enable()
    return +counts


def ahead(one):
    """Plan a step while one runs, and complete that one."""
    update = one.next_step(now=1.0)
    one.complete_step(one._in_flight, NOTHING, now=1.0)
    return update


def unchanged(rows, waiting, policy=None):
    return count(step, scheduler(rows, waiting, policy))


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
    least = unchanged(16, 0, policy)
    assert least["opcode"] > 0, "nothing was counted"
    assert unchanged(4_096, 0, policy) == least
    assert unchanged(16, 10_000, policy) == least
    assert unchanged(4_096, 10_000, policy) == least


def test_an_unchanged_step_is_two_short_calls():
    counts = unchanged(16, 100)
    assert counts["call"] == 3, "step itself, next_step and complete_step"
    assert counts["opcode"] < 150


def test_the_count_sees_a_walk_over_the_rows():
    class Walking(Scheduler):
        def next_step(self, *, now):
            for _ in self._running.slots:
                pass
            return super().next_step(now=now)

    def walk(rows):
        return count(step, scheduler(rows, 0, kind=Walking))["opcode"]

    assert walk(64) > walk(16)


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


def test_running_ahead_costs_the_same_at_any_size():
    costs = []
    for rows, waiting in ((16, 0), (4_096, 10_000)):
        one = scheduler(rows, waiting, max_in_flight=2)
        one.next_step(now=1.0)
        costs.append(count(ahead, one))
    assert costs[0] == costs[1]
    assert costs[0]["call"] == 4, "ahead itself, next_step, _run_ahead and complete_step"
