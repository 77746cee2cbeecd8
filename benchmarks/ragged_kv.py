"""What grouping heads by retention is worth: pages over-allocated, and requests served by them.

    python benchmarks/ragged_kv.py
    python benchmarks/ragged_kv.py --layers 32 --heads 8 --rate 3

A made-up model whose heads keep anything from nothing to all of their KV (Beta(0.8, 1.2)); clusters
of 4 heads, pages of 16 tokens. Over-allocation is what the pages hold beyond what heads keep, at
8,192 tokens (Tangram, arXiv 2606.06302, reports 42.7 % for adjacent heads and 2.9 % by retention,
for its models). Then GSM8K's answers in virtual time, 32 slots, steps of 20 ms, and pages for seven
requests that keep everything.
"""

from __future__ import annotations

import argparse
import random

from dllm_sched import Capacity, Policy, RaggedKV
from dllm_sched.policies import YoungestFirst
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Constant
from dllm_sched.sim.shapes import gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.theory.clusters import cluster_heads, over_allocation, ragged_kv

CANVAS = 76 + 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2.2)
    parser.add_argument("--requests", type=int, default=3000)
    options = parser.parse_args()
    rng = random.Random(3)
    profile = [
        [rng.betavariate(0.8, 1.2) for _ in range(options.heads)] for _ in range(options.layers)
    ]
    clusters = options.layers * options.heads // 4
    pages = 7 * clusters * -(-CANVAS // 16)
    columns = f"{'served/s':>9} {'mean s':>8} {'p99 s':>8}"
    print(f"{'clusters':<24} {'over':>7} {'pages each':>10} {columns}")
    runs: list[tuple[str, RaggedKV, float | None]] = [
        ("everything kept", RaggedKV([1.0] * clusters), None)
    ]
    for by in ("adjacent", "retention"):
        over = over_allocation(profile, cluster_heads(profile, by=by), 8192)
        runs.append((by, ragged_kv(profile, by=by), over))
    over = over_allocation(profile, cluster_heads(profile, per_layer=1), 8192)
    runs.append(("retention, 1 per layer", ragged_kv(profile, per_layer=1), over))
    runs.append(("retention, growing", ragged_kv(profile, window_blocks=3), None))
    for name, memory, over in runs:
        result = simulate(
            OpenLoop(Poisson(options.rate), gsm8k(), max_requests=options.requests, seed=4),
            policy=Policy(eviction=YoungestFirst(), name="ragged"),
            capacity=Capacity(max_num_seqs=32, num_pages=pages, memory=memory),
            service=Constant(0.02),
        )
        said = "" if over is None else f"{over:.1%}"
        print(
            f"{name:<24} {said:>7} {memory.footprint(CANVAS):>10,} {result.requests_per_s:>9.2f} "
            f"{result.mean():>8.2f} {result.percentile(99):>8.2f}"
        )


if __name__ == "__main__":
    main()
