"""What scheduling costs beside the model: bytecodes, and CPU microseconds with ``--time``.

    python benchmarks/cost.py
    python benchmarks/cost.py --time --repeats 10

Two tables: an unchanged step (``next_step`` and ``complete_step(NOTHING)``), and the whole life of
a request (submit, admission, 16 to 64 steps, retirement) in a full engine. Requests and outcomes
are made beforehand and do not count. Times stand beside the floor of the same run, a loop that
adds 1 and checks an int on each of 16 slotted objects: the ratio survives a busy machine. Bytecodes
depend on the Python version alone.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
import time
from collections.abc import Callable

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
from dllm_sched.policies import AllRows, Fill, MaxWait, PastDeadline, Slots, StepCap, TokenBudget

PolicyMaker = Callable[[int], Policy]


def six_strategies(rows: int) -> Policy:
    """A policy of which every axis is asked."""
    return Policy(
        ordering=lambda rv: (rv.request.priority,),
        admission=Slots(rows) & TokenBudget(10**9),
        timeout=Fill(1) | MaxWait(1.0),
        composition=AllRows(),
        eviction=PastDeadline() | StepCap(10**6),
        control=lambda _rv, _view: ({}, math.inf),
        name="six strategies",
    )


LIVES: list[tuple[str, PolicyMaker, int]] = [  # name, policy for so many rows, boundaries
    ("default", lambda _: Policy(), 0),
    ("continuous", presets.continuous, 0),
    ("six strategies", six_strategies, 0),
    ("ten boundaries", lambda _: Policy(), 10),
]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time", action="store_true", help="measure CPU time as well")
    parser.add_argument("--repeats", type=int, default=5, help="times are the least of so many")
    parser.add_argument("--steps", type=int, default=20_000, help="per timed unchanged step")
    parser.add_argument("--requests", type=int, default=2_000, help="per timed life")
    parser.add_argument("--waiting", default="0,100000", help="queue lengths")
    args = parser.parse_args()

    floor = least(args.repeats, floor_loop) if args.time else math.nan
    if args.time:
        print(f"floor: {floor:.3f} us for 16 objects")
    print(f"\n{'unchanged step':<28}{'bytecodes':>10}{'us':>9}{'x floor':>9}")
    for rows in (16, 256, 4_096):
        for waiting in map(int, args.waiting.split(",")):
            scheduler = full(rows, waiting)
            codes = bytecodes(run_steps, scheduler, 100) / 100
            spent = math.nan
            if args.time:
                spent = least(args.repeats, run_steps, scheduler, args.steps) / args.steps
            line(f"{rows} rows, {waiting} waiting", codes, spent, floor)

    print(f"\n{'life of a request':<28}{'bytecodes':>10}{'us':>9}{'x floor':>9}")
    for name, make, boundaries in LIVES:
        for rows in (16, 256):
            count = max(200, 2 * rows)
            requests, outcomes = record(rows, make(rows), count, boundaries)
            codes = bytecodes(live, rows, make(rows), requests, outcomes)
            spent = math.nan
            if args.time:
                requests, outcomes = record(rows, make(rows), args.requests, boundaries)
                spent = min(
                    live(rows, make(rows), requests, outcomes) for _ in range(args.repeats)
                ) / len(requests)
            line(f"{name}, {rows} rows", codes / count, spent, floor)


def line(name: str, codes: float, spent: float, floor: float) -> None:
    """Print one line of a table; ``spent`` in microseconds, NaN if not measured."""
    times = "" if math.isnan(spent) else f"{spent:>9.2f}{spent / floor:>9.1f}"
    print(f"{name:<28}{codes:>10.1f}{times}", flush=True)


def full(rows: int, waiting: int) -> Scheduler:
    """A scheduler with every slot taken, past the first steps."""
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=rows))
    for number in range(rows + waiting):
        scheduler.submit(Request(f"r{number}", prompt_len=50, max_new_tokens=512), now=0.0)
    run_steps(scheduler, 3)
    return scheduler


def run_steps(scheduler: Scheduler, steps: int) -> float:
    """Run steps that change nothing; CPU microseconds."""
    next_step, complete_step = scheduler.next_step, scheduler.complete_step
    start = time.process_time()
    for _ in range(steps):
        complete_step(next_step(now=0.0).batch, NOTHING, now=0.0)  # type: ignore[arg-type]
    return (time.process_time() - start) * 1e6


def record(
    rows: int, policy: Policy, count: int, boundaries: int
) -> tuple[list[Request], list[StepOutcome]]:
    """Live through a run once, for its requests and the outcome of each step."""
    rng = random.Random(1)
    requests = [Request(f"r{n}", prompt_len=50, max_new_tokens=512) for n in range(count)]
    length = {request.id: rng.randint(16, 64) for request in requests}
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=rows), policy=policy)
    for request in requests:
        scheduler.submit(request, now=0.0)
    coming: list[tuple[int, int, int]] = []  # (step, slot, blocks done; 0: the row is done)
    outcomes: list[StepOutcome] = []
    while (batch := scheduler.next_step(now=0.0).batch) is not None:
        for row in batch.joined:
            last = len(outcomes) + length[row.request.id]
            heapq.heappush(coming, (last, row.slot, 0))
            for done in range(1, boundaries + 1):
                at = last - length[row.request.id] * done // (boundaries + 1)
                heapq.heappush(coming, (at, row.slot, boundaries + 1 - done))
        ended, crossed = [], []
        while coming and coming[0][0] <= len(outcomes) + 1:
            _, slot, done = heapq.heappop(coming)
            if done:
                crossed.append(BlockBoundary(slot, done, 50 + 32 * done))
            else:
                ended.append(RowFinished(slot, FinishReason.EOS))
        outcome = StepOutcome(tuple(ended), tuple(crossed)) if ended or crossed else NOTHING
        outcomes.append(outcome)
        scheduler.complete_step(batch, outcome, now=0.0)
    return requests, outcomes


def live(rows: int, policy: Policy, requests: list[Request], outcomes: list[StepOutcome]) -> float:
    """Live through a recorded run again; CPU microseconds."""
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=rows), policy=policy)
    submit, next_step, complete_step = (
        scheduler.submit,
        scheduler.next_step,
        scheduler.complete_step,
    )
    start = time.process_time()
    for request in requests:
        submit(request, now=0.0)
    for outcome in outcomes:
        complete_step(next_step(now=0.0).batch, outcome, now=0.0)  # type: ignore[arg-type]
    spent = (time.process_time() - start) * 1e6
    assert not scheduler.counts().running, "the recorded run was another"
    return spent


class Counter:
    """What the floor counts on."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


def floor_loop() -> float:
    """CPU microseconds to add 1 and check it on 16 objects."""
    counters = [Counter() for _ in range(16)]
    start = time.process_time()
    for _ in range(5_000):
        for counter in counters:
            counter.steps += 1
            if counter.steps > 10**9:
                raise AssertionError
    return (time.process_time() - start) * 1e6 / 5_000


def least(repeats: int, measure: Callable[..., float], *args: object) -> float:
    """The least of several measurements."""
    return min(measure(*args) for _ in range(repeats))


def bytecodes(function: Callable[..., object], *args: object) -> int:
    """Bytecodes that a call executes, those of what it calls included."""
    count = 0

    def trace(frame, event, _):  # type: ignore[no-untyped-def]  # its types are CPython's own
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(None)
    return count


if __name__ == "__main__":
    main()
