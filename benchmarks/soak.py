"""A day of bursty traffic in virtual time, in which everything goes wrong: does every count match?

    python benchmarks/soak.py
    python benchmarks/soak.py --hours 1 --seed 7

The shipped trace of code completion (Azure 2023), looped, through the real scheduler and a fake
engine that holds it to the protocol. Meanwhile, at random: cancels, swaps among all presets, other
capacities, pauses, failed steps with every fate for every row, poisoned rows, and calls that must
be refused. In the end each accepted request must have finished exactly once, every slot and page
must be back, and every table empty; else this ends with an error.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import itertools
import math
import random
import resource
import sys
import time
from collections import Counter

from dllm_sched import (
    Accepted,
    Capacity,
    ConfigError,
    DllmSchedError,
    GrowingKV,
    Request,
    RowFate,
    RowFinished,
    Scheduler,
    StepOutcome,
)
from dllm_sched.policies.presets import PRESETS
from dllm_sched.request import FinishReason
from dllm_sched.sim.workloads import Trace
from dllm_sched.testing import FakeEngine

SLOTS, PAGES = 32, 1500
MEMORY = GrowingKV(page_size=16)
STEP_S, ROW_S = 0.05, 0.002
CHECK_EVERY = 500  # calls
NEEDED = {
    "batch_size": 12,
    "target_j": 5.0,
    "fixed_j": 6.0,
    "row_j": 2.0,
    "widths": (2, 8),
    "committed": (1.5, 4.0),
    "latency_s": {1: (1.0, 1.0), 12: (1.0, 3.0)},
    "memory": MEMORY,
}
"""What to give for a parameter that has no default."""


def policies():
    """Every preset."""
    for _, preset in sorted(PRESETS.items()):
        parameters = inspect.signature(preset).parameters.items()
        empty = inspect.Parameter.empty
        yield preset(**{key: NEEDED[key] for key, how in parameters if how.default is empty})


def arrivals(hours, rng):
    """The trace, again and again, with a block, deadline, tenant and class of each."""
    trace = list(Trace.shipped("azure2023_code", max_prompt_len=2048).rows())
    period_s = trace[-1][0] + 1.0
    serial = itertools.count()
    for round_number in itertools.count():
        for at_s, prompt, output in trace:
            now = round_number * period_s + at_s
            if now >= hours * 3600:
                return
            yield (
                now,
                Request(
                    f"r{next(serial)}",
                    prompt_len=max(1, min(prompt, 2048)),
                    max_new_tokens=max(1, min(output, 256)),
                    block_length=8,
                    priority=rng.randrange(3),
                    tenant=rng.choice("abc"),
                    deadline_at=now + rng.expovariate(0.01) if rng.random() < 0.3 else math.inf,
                    queue_timeout_s=rng.choice([math.inf, math.inf, 60.0]),
                ),
            )


class Soak:
    """Client, engine and operator of one scheduler."""

    def __init__(self, hours, seed):
        self.rng = rng = random.Random(seed)
        self.arrivals = arrivals(hours, rng)
        self.policies = list(policies())
        self.now = 0.0
        self.scheduler = Scheduler(
            capacity=Capacity(max_num_seqs=SLOTS, num_pages=PAGES, memory=MEMORY),
            policy=self.policies[0],
        )
        self.poison = {}
        self.engine = FakeEngine(
            SLOTS,
            steps=lambda request: 1 + 2 * request.max_blocks,
            poison=self.poison,
            report_masked=True,
        )
        self.accepted = set()
        self.active = {}  # id -> None, in order
        self.ended = Counter()
        self.reasons = Counter()
        self.calls = self.lost = 0
        self.faults = Counter()
        self.operations = [(0.0, 0, self.operate)]
        self.order = itertools.count(1)

    # --- the calls ------------------------------------------------------------------------------

    def call(self, function, *args, **kwargs):
        self.calls += 1
        answer = function(*args, now=self.now, **kwargs)
        if self.calls % CHECK_EVERY == 0:
            self.scheduler.check_invariants()
        return answer

    def tell(self, update):
        self.engine.release(update.released)
        for one in update.finished:
            self.ended[one.request.id] += 1
            self.reasons[one.reason.value] += 1
            self.active.pop(one.request.id, None)
            self.poison.pop(one.request.id, None)
        return update

    def submit(self, request):
        if self.rng.random() < 0.002:
            self.poison[request.id] = self.rng.randint(1, 4)
            self.faults["rows poisoned"] += 1
        if isinstance(self.call(self.scheduler.submit, request), Accepted):
            self.accepted.add(request.id)
            self.active[request.id] = None
        else:
            self.poison.pop(request.id, None)

    def step(self, batch):
        dice = self.rng.random()
        if dice < 0.002:
            self.faults["steps failed"] += 1
            fates = {row.slot: self.rng.choice(list(RowFate)) for row in batch.rows}
            error = RuntimeError("device lost")
            self.tell(self.call(self.scheduler.fail_step, batch, error, rows=fates))
            return
        outcome = self.engine.run(batch)
        self.now += STEP_S + ROW_S * len(batch.rows)
        if dice < 0.004:
            self.refuse(batch)
        self.tell(self.call(self.scheduler.complete_step, batch, outcome))

    def refuse(self, batch):
        """Calls that cannot be; each must raise."""
        slot = batch.rows[0].slot
        over = RowFinished(slot, FinishReason.EOS)
        s = self.scheduler
        for bad in (
            lambda: s.complete_step(batch, StepOutcome(finished=(over, over)), now=self.now),
            lambda: s.complete_step(batch._replace(rows=()), now=self.now),
            lambda: s.complete_step(batch, now=-1.0),
            lambda: s.next_step(now=self.now),
            lambda: s.fail_step(batch, RuntimeError(), rows={SLOTS: RowFate.FAIL}, now=self.now),
        ):
            self.calls += 1
            self.faults["calls refused"] += 1
            try:
                bad()
            except DllmSchedError:
                continue
            raise SystemExit("a call that cannot be was carried out")

    # --- the operator -----------------------------------------------------------------------------

    def later(self, in_s, operation):
        heapq.heappush(self.operations, (self.now + in_s, next(self.order), operation))

    def operate(self):
        self.later(self.rng.expovariate(1 / 5), self.operate)
        self.rng.choices(
            [self.cancel, self.swap, self.resize, self.pause, self.requeue], [8, 2, 1, 1, 2]
        )[0]()

    def cancel(self):
        if self.active:
            one = self.rng.choice(list(self.active))
            self.faults["cancels"] += 1
            self.tell(self.call(self.scheduler.cancel, one))

    def requeue(self):
        if self.active:
            self.tell(self.call(self.scheduler.requeue, self.rng.choice(list(self.active))))

    def swap(self):
        try:
            self.tell(self.call(self.scheduler.set_policy, self.rng.choice(self.policies)))
            self.faults["policies swapped"] += 1
        except ConfigError:  # it needs more than a shrunk capacity has
            self.faults["swaps refused"] += 1

    def resize(self):
        self.faults["capacities changed"] += 1
        slots, pages = self.rng.randint(4, SLOTS), self.rng.randint(400, PAGES)
        self.set_capacity(slots, pages)
        self.later(self.rng.expovariate(1 / 60), lambda: self.set_capacity(SLOTS, PAGES))

    def set_capacity(self, slots, pages):
        capacity = Capacity(max_num_seqs=slots, num_pages=pages, memory=MEMORY)
        self.tell(self.call(self.scheduler.set_capacity, capacity))

    def pause(self):
        self.faults["pauses"] += 1
        self.tell(self.call(self.scheduler.pause))
        self.later(self.rng.expovariate(1 / 4), lambda: self.tell(self.call(self.scheduler.resume)))

    # --- the day ----------------------------------------------------------------------------------

    def run(self):
        arrival = next(self.arrivals, None)
        while arrival is not None:
            while arrival is not None and arrival[0] <= self.now:
                self.submit(arrival[1])
                arrival = next(self.arrivals, None)
            while self.operations[0][0] <= self.now:
                heapq.heappop(self.operations)[2]()
            update = self.tell(self.call(self.scheduler.next_step))
            if update.batch is not None:
                self.step(update.batch)
            elif update.wake_at > self.now:
                coming = math.inf if arrival is None else arrival[0]
                self.now = max(self.now, min(update.wake_at, coming, self.operations[0][0]))
        self.drain()

    def drain(self):
        self.tell(self.call(self.scheduler.resume))
        self.set_capacity(SLOTS, PAGES)
        self.tell(self.call(self.scheduler.drain))
        while self.scheduler.has_work():
            update = self.tell(self.call(self.scheduler.next_step))
            if update.batch is not None:
                self.step(update.batch)
            elif self.scheduler.has_work() and update.wake_at > self.now:
                self.now = update.wake_at  # infinite would be a stall, which the clock refuses

    def verdict(self):
        """What does not match, in words."""
        counts, stats = self.scheduler.counts(), self.scheduler.stats()
        self.scheduler.check_invariants()
        self.lost = len(self.accepted - self.ended.keys())
        self.repeated = sum(times > 1 for times in self.ended.values())
        wrong = {
            "requests lost": self.lost,
            "requests told twice": self.repeated,
            "told, never accepted": len(self.ended.keys() - self.accepted),
            "submitted but not finished": counts.submitted - counts.finished,
            "accepted but not submitted": len(self.accepted) - counts.submitted,
            "waiting or running": counts.waiting + counts.running,
            "slots missing": SLOTS - stats.free_slots,
            "pages missing": PAGES - stats.free_pages,
            "held by the engine": len(self.engine.held),
            "reasons that do not add up": counts.finished - sum(self.reasons.values()),
        }
        return {name: number for name, number in wrong.items() if number}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=24.0, help="of virtual time (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default: 0)")
    arguments = parser.parse_args()
    soak = Soak(arguments.hours, arguments.seed)
    began = time.perf_counter()
    soak.run()
    wall_s = time.perf_counter() - began
    wrong = soak.verdict()
    stats = soak.scheduler.stats()
    rows = [
        ("virtual hours", f"{soak.now / 3600:.2f}"),
        ("presets", len(soak.policies)),
        ("calls", soak.calls),
        ("steps", stats.num_steps),
        ("requests accepted", len(soak.accepted)),
        ("preempted, times", stats.num_preempted),
        *((f"finished: {reason}", number) for reason, number in soak.reasons.most_common()),
        *((f"faults: {kind}", number) for kind, number in soak.faults.most_common()),
        ("lost", soak.lost),
        ("repeated", soak.repeated),
        ("seconds", f"{wall_s:.0f}"),
        ("peak memory, MB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024),
    ]
    for name, value in rows:
        print(f"{name:24} {value:>12,}" if isinstance(value, int) else f"{name:24} {value:>12}")
    if wrong:
        print(f"NOT RIGHT: {wrong}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
