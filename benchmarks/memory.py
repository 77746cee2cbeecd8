"""What waiting requests weigh, and whether serving leaves anything behind.

    python benchmarks/memory.py
    python benchmarks/memory.py --served 10000000

A waiting request is weighed by tracemalloc with its ``Request`` and id. While requests are served
(16 rows, 16 to 64 steps each), the interpreter's memory blocks and the process's memory are read
ten times; at the end every table must be empty.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from dllm_sched import (
    NOTHING,
    Capacity,
    FinishReason,
    Policy,
    Request,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.policies import EarliestDeadline, PriorityFirst

ROWS = 16
POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": Policy,
    "priority": lambda: Policy(ordering=PriorityFirst()),
    "edf": lambda: Policy(ordering=EarliestDeadline()),
    "continuous": lambda: presets.continuous(ROWS),
    "tediserve": lambda: presets.tediserve(ROWS),
}


def weigh(policy: Policy, waiting: int, deadline_s: float) -> float:
    """Bytes of a waiting request."""
    scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=ROWS))
    tracemalloc.start()
    for number in range(waiting):
        one = Request(
            f"request-{number}",
            prompt_len=50 + number,
            max_new_tokens=512,
            deadline_at=deadline_s + number,
        )
        scheduler.submit(one, now=0.0)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / waiting


def serve(scheduler: Scheduler, first: int, count: int, rng: random.Random) -> None:
    """Serve requests with full slots, to the last one."""
    ending: list[tuple[int, int]] = []  # (step, slot)
    step, came = 0, 0
    while scheduler.has_work() or came < count:
        while came < count and scheduler.num_waiting + scheduler.num_running < ROWS + 4:
            one = Request(f"request-{first + came}", prompt_len=50, max_new_tokens=512)
            scheduler.submit(one, now=0.0)
            came += 1
        batch = scheduler.next_step(now=0.0).batch
        assert batch is not None
        for row in batch.joined:
            heapq.heappush(ending, (step + rng.randint(16, 64), row.slot))
        step += 1
        outcome = NOTHING
        if ending[0][0] <= step:
            ended = []
            while ending and ending[0][0] <= step:
                ended.append(RowFinished(heapq.heappop(ending)[1], FinishReason.EOS))
            outcome = StepOutcome(tuple(ended))
        scheduler.complete_step(batch, outcome, now=0.0)


def resident_mb() -> float:
    """Memory of this process in RAM (Linux)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--waiting", type=int, default=100_000, help="default: 100,000")
    parser.add_argument("--served", type=int, default=300_000, help="default: 300,000")
    options = parser.parse_args()

    print(f"{'bytes of a waiting request':<28}{'no deadline':>12}{'deadline':>12}")
    for name, make in POLICIES.items():
        sizes = [weigh(make(), options.waiting, deadline_s) for deadline_s in (float("inf"), 1e6)]
        print(f"{name:<28}{sizes[0]:>12.0f}{sizes[1]:>12.0f}", flush=True)

    print(f"\n{'served':>12}{'memory blocks':>15}{'resident MB':>13}{'requests/s':>12}")
    scheduler = Scheduler(policy=presets.continuous(ROWS), capacity=Capacity(max_num_seqs=ROWS))
    rng, part = random.Random(1), options.served // 10
    for number in range(10):
        began = time.process_time()
        serve(scheduler, number * part, part, rng)
        speed = part / (time.process_time() - began)
        gc.collect()
        print(
            f"{(number + 1) * part:>12,}{sys.getallocatedblocks():>15,}"
            f"{resident_mb():>13.1f}{speed:>12,.0f}",
            flush=True,
        )
    scheduler.drain(now=0.0)
    scheduler.check_invariants()  # nothing active: every table must be empty
    assert not scheduler.has_work()
    print("every table is empty")


if __name__ == "__main__":
    main()
