"""A fault at every call boundary: a call that must be refused changes nothing, and leaves no line.

A random run on a journaled scheduler, in which before each call somebody makes one that cannot be
carried out. The journal, which knows only of the others, then replays to the same decisions.
"""

from __future__ import annotations

import io
import itertools
import math
import random
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dllm_sched import (
    Capacity,
    DllmSchedError,
    FinishReason,
    GrowingKV,
    Policy,
    Request,
    RowFailed,
    RowFate,
    RowFinished,
    StepBatch,
    StepOutcome,
    presets,
)
from dllm_sched.journal import JournaledScheduler, replay
from dllm_sched.policies import (
    Admission,
    Composition,
    Control,
    Eviction,
    MaxWaiting,
    Ordering,
    PastDeadline,
    Slots,
    Timeout,
    Verdict,
    YoungestFirst,
)

RIG = runpy.run_path(str(Path(__file__).with_name("ledger.py")))
Ledger, snapshot = RIG["Ledger"], RIG["snapshot"]
CAPACITY = Capacity(max_num_seqs=4, num_pages=30, memory=GrowingKV(page_size=4))


class WontTake(Ordering):
    """Cannot key a request; as it is swapped in, if anybody waits."""

    def key(self, state: Any, rv: Any) -> Any:
        return (math.nan,)


class WontRun(Eviction):
    """Cannot say how long a row may run; likewise, if anybody runs."""

    def limits(self, rv: Any) -> Any:
        raise RuntimeError("no idea")


class WontStart(Ordering):
    def init(self) -> Any:
        raise RuntimeError("no state")


class Touchy(Admission):
    """In force for a while: raises over every fifth request until there is nobody else."""

    def admit(self, state: Any, rv: Any, round: Any) -> Verdict:
        if rv.sequence % 5 == 2 and round.view.num_waiting > 1:
            raise RuntimeError("not this one")
        return Verdict.ADMIT


class Picky(Composition):
    """In force for a while: raises when three rows run."""

    needs = frozenset({"rows"})

    def select(self, state: Any, round: Any) -> Any:
        if len(round.rows) == 3:
            raise RuntimeError("three is a crowd")
        return round.rows[:2]


class Faddish(Control):
    """In force for a while: knobs that JSON cannot say, and that cannot be had of some rows."""

    needs = frozenset({"blocks"})

    def knobs(self, state: Any, rv: Any, view: Any) -> Any:
        if rv.num_blocks_done == 2:
            raise RuntimeError("not for two")
        return {"cap": math.inf, ("a", 1): object(), "done": rv.num_blocks_done}, view.now + 0.3

    def batch_knobs(self, state: Any, view: Any) -> Any:
        return {"rows": {view.num_running}}, math.inf

    def hints(self, state: Any, round: Any) -> Any:
        return (object(), math.nan)


class Slow(Timeout):
    """In force for a while: raises on whole seconds."""

    scope = "step"

    def due(self, state: Any, view: Any) -> float:
        if view.now % 1 == 0:
            raise RuntimeError("not on the hour")
        return view.oldest_arrival_at + 0.2


POLICIES = {
    policy.name: policy
    for policy in [
        Policy(name="plain", eviction=YoungestFirst()),
        Policy(name="mixed", admission=Slots(3) & MaxWaiting(9), eviction=PastDeadline()),
        presets.fixed_fill(3, 0.5),
        presets.fair_share(4),
        presets.fixed_fill_online(4),
        presets.sangam(4),
        Policy(name="touchy", admission=Touchy()),
        Policy(name="picky", composition=Picky()),
        Policy(name="faddish", control=Faddish()),
        Policy(name="slow", timeout=Slow()),
    ]
}


def faults(ledger: Any, rng: random.Random) -> Any:
    """A call that must be refused, as things stand."""
    scheduler, now = ledger.scheduler, ledger.now
    past = math.nextafter(scheduler._now, -math.inf)  # before the first call: -inf itself
    flight: StepBatch | None = ledger.flights[0] if ledger.flights else None
    slot = flight.rows[0].slot if flight is not None else 0
    bad_batch = StepBatch(-1, now, ()) if flight is None else flight._replace(rows=())
    eos = RowFinished(slot, FinishReason.EOS)
    fresh = Request("fresh", prompt_len=1, max_new_tokens=1)
    calls = [
        lambda: scheduler.submit(fresh, now=past),
        lambda: scheduler.submit(fresh, now=math.nan),
        lambda: scheduler.submit("fresh", now=now),
        lambda: scheduler.submit(
            Request("fresh", prompt_len=1, max_new_tokens=1, batch_key=frozenset()), now=now
        ),
        lambda: scheduler.next_step(now=past),
        lambda: scheduler.next_step(now=math.inf),
        lambda: scheduler.cancel("r0", now=past),
        lambda: scheduler.requeue("r0", now=past),
        lambda: scheduler.complete_step(bad_batch, now=now),
        lambda: scheduler.complete_step(None, now=now),
        lambda: scheduler.fail_step(bad_batch, ValueError(), rows={}, now=now),
        lambda: scheduler.set_policy(None, now=now),
        lambda: scheduler.set_policy(Policy(ordering=WontStart(), name="x"), now=now),
        lambda: scheduler.set_policy(POLICIES["plain"], now=past),
        lambda: scheduler.set_capacity("large", now=now),
        lambda: scheduler.pause(now=past),
        lambda: scheduler.resume(now=math.nan),
        lambda: scheduler.drain(now=past),
        lambda: scheduler.view("nobody"),
        lambda: scheduler.explain("nobody"),
    ]
    if ledger.active:
        again = Request(min(ledger.active), prompt_len=1, max_new_tokens=1)
        other = Capacity(max_num_seqs=4, num_pages=30, memory=GrowingKV(page_size=5))
        calls += [
            lambda: scheduler.submit(again, now=now),
            lambda: scheduler.set_capacity(other, now=now),
        ]
    if scheduler.num_waiting:
        calls.append(lambda: scheduler.set_policy(Policy(ordering=WontTake()), now=now))
    if scheduler.num_running:
        calls.append(lambda: scheduler.set_policy(Policy(eviction=WontRun()), now=now))
    if flight is not None:
        free = next(one for one in itertools.count() if all(r.slot != one for r in flight.rows))
        absent = RowFinished(free, FinishReason.EOS)
        both = (RowFailed(slot, ValueError()),)
        calls += [
            lambda: scheduler.complete_step(flight, now=now, steps=0),
            lambda: scheduler.complete_step(flight, now=past),
            lambda: scheduler.complete_step(flight, StepOutcome(finished=(eos, eos)), now=now),
            lambda: scheduler.complete_step(flight, StepOutcome(finished=(absent,)), now=now),
            lambda: scheduler.complete_step(flight, StepOutcome((eos,), failed=both), now=now),
            lambda: scheduler.complete_step(flight, StepOutcome(masked_remaining=()), now=now),
            lambda: scheduler.fail_step(flight, "error", rows={}, now=now),
            lambda: scheduler.fail_step(flight, ValueError(), rows={free: RowFate.FAIL}, now=now),
        ]
    if len(ledger.flights) == ledger.most:
        calls.append(lambda: scheduler.next_step(now=now))
    return rng.choice(calls)


class Run:
    """A random run; every call has a fault before it."""

    def __init__(self, seed: int, ahead: int) -> None:
        self.rng = random.Random(seed)
        self.file = io.StringIO()
        self.ledger = Ledger(
            self.rng.choice(list(POLICIES.values())[:6]),
            kind=partial(JournaledScheduler, self.file),
            max_in_flight=ahead,
        )
        self.ledger.most = ahead
        self.injected = 0
        self.own_faults = 0

    def inject(self) -> None:
        before, text = snapshot(self.ledger.scheduler), self.file.tell()
        fault = faults(self.ledger, self.rng)
        with pytest.raises(DllmSchedError):
            fault()
        self.injected += 1
        assert snapshot(self.ledger.scheduler) == before
        assert self.file.tell() == text, "a call that was refused has left a line"
        self.ledger.scheduler.check_invariants()

    def call(self, function: Any, *args: Any) -> None:
        """One that may go wrong by the policy in force, which must change nothing either."""
        self.inject()
        before, text = snapshot(self.ledger.scheduler), self.file.tell()
        try:
            function(*args)
        except DllmSchedError:
            self.own_faults += 1
            assert snapshot(self.ledger.scheduler) == before
            assert self.file.tell() == text

    def submit(self) -> None:
        self.ledger.submit(
            tenant=self.rng.choice("xyz"),
            priority=self.rng.randint(0, 2),
            max_new_tokens=self.rng.choice([4, 12, 24]),
            deadline_at=self.rng.choice([math.inf, self.ledger.now + 6.0]),
            queue_timeout_s=self.rng.choice([math.inf, 3.0]),
        )

    def next(self) -> None:
        if len(self.ledger.flights) < self.ledger.most:
            self.ledger.next()

    def complete(self) -> None:
        if self.ledger.flights:
            self.ledger.complete()

    def fail(self) -> None:
        if self.ledger.flights:
            flights = list(self.ledger.flights)
            try:
                self.ledger.fail(self.rng.choice(list(RowFate)))
            except DllmSchedError:
                self.ledger.flights[:] = flights  # refused: still in flight
                raise

    def cancel(self) -> None:
        name = self.rng.choice([*self.ledger.active, "nobody"])
        self.ledger.told(self.ledger.scheduler.cancel(name, now=self.ledger.now))

    def swap(self) -> None:
        policy = self.rng.choice(list(POLICIES.values()))
        self.ledger.told(self.ledger.scheduler.set_policy(policy, now=self.ledger.now))

    def resize(self) -> None:
        capacity = Capacity(
            max_num_seqs=self.rng.choice([3, 4, 5]), num_pages=30, memory=CAPACITY.memory
        )
        self.ledger.told(self.ledger.scheduler.set_capacity(capacity, now=self.ledger.now))

    def pause(self) -> None:
        call = self.rng.choice([self.ledger.scheduler.pause, self.ledger.scheduler.resume])
        self.ledger.told(call(now=self.ledger.now))
        self.ledger.told(self.ledger.scheduler.resume(now=self.ledger.now))

    def run(self, calls: int) -> list[str]:
        plays = [self.submit, self.next, self.complete, self.fail, self.cancel, self.swap]
        plays += [self.resize, self.pause]
        for _ in range(calls):
            self.ledger.now += self.rng.choice([0.0, 0.25, 1 / 3])
            self.call(self.rng.choices(plays, [4, 8, 8, 0.6, 0.6, 0.6, 0.3, 0.3])[0])
        self.ledger.told(self.ledger.scheduler.set_policy(POLICIES["plain"], now=self.ledger.now))
        self.ledger.serve()
        return self.file.getvalue().splitlines(keepends=True)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_a_fault_at_every_call_boundary(seed, ahead):
    run = Run(seed, ahead)
    lines = run.run(300)
    assert run.injected == 300
    replayed = replay(lines, policies=POLICIES)
    assert replayed.difference is None
    assert replayed.num_calls == len(lines) - 1


def test_policies_in_force_were_at_fault_as_well():
    runs = [Run(seed, 1) for seed in range(6)]
    for run in runs:
        run.run(200)
    assert sum(run.own_faults for run in runs) >= 10
