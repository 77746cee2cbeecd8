"""What it costs to choose a request's mode, beside what RequestRouter (arXiv 2605.23057) reports.

    python benchmarks/router.py
    python benchmarks/router.py --decisions 1000000 --modes 8

One decision is one ``ChooseMode.knobs``: the rule and the check of its answer. Each is timed alone,
so a decision carries the cost of two looks at the clock, which is printed as well.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from types import SimpleNamespace

from dllm_sched import Request
from dllm_sched.policies import ByLength, ChooseMode

PUBLISHED_MS = (0.00475, 0.00532)


def timed_ns(call, arguments) -> list[int]:
    clock = time.perf_counter_ns
    taken = []
    for one in arguments:
        start = clock()
        call(None, one, None)
        taken.append(clock() - start)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decisions", type=int, default=200_000)
    parser.add_argument("--modes", type=int, default=6)
    options = parser.parse_args()
    rng = random.Random(1)
    views = []
    for number in range(options.decisions):
        prompt_len, budget = rng.randint(1, 4096), rng.randint(1, 1024)
        request = Request(f"r{number}", prompt_len=prompt_len, max_new_tokens=budget)
        views.append(SimpleNamespace(request=request, id=request.id))
    modes = tuple(f"mode-{number}" for number in range(options.modes))
    bounds = tuple(5120 * number // options.modes for number in range(1, options.modes))
    control = ChooseMode(modes, ByLength(modes, bounds))
    timed_ns(control.knobs, views[:10_000])  # warm
    print(f"{'':<12} {'mean ms':>10} {'p99 ms':>10}")
    for name, call in (("ours", control.knobs), ("clock alone", lambda *_: None)):
        taken = sorted(timed_ns(call, views))
        tail = taken[int(0.99 * len(taken))]
        print(f"{name:<12} {statistics.fmean(taken) / 1e6:>10.5f} {tail / 1e6:>10.5f}")
    print(f"{'published':<12} {PUBLISHED_MS[0]:>10.5f} {PUBLISHED_MS[1]:>10.5f}")


if __name__ == "__main__":
    main()
