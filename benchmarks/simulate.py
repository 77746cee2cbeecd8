"""How fast the simulator is: requests per second of CPU, with finishes only and with boundaries.

    python benchmarks/simulate.py
    python benchmarks/simulate.py --requests 1000000

GSM8K's work, Poisson arrivals at 80 % of what the slots can do, ``continuous``. One core.
"""

from __future__ import annotations

import argparse
import platform
import resource
from time import process_time

from dllm_sched import Capacity, presets
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Constant
from dllm_sched.sim.shapes import gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop

STEP_S = 0.0241  # of the published single request


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=50_000, help="per line; default: 50,000")
    options = parser.parse_args()
    shapes = gsm8k()
    print(f"{options.requests:,} requests a line, {platform.machine()}, one core")
    print(f"{'slots':>5}  {'reported':10}{'requests per CPU-second':>25}{'peak memory, MB':>18}")
    for slots in (16, 256):
        for blocks in (False, True):
            rate = 0.8 * slots / (shapes.mean_steps * STEP_S)
            workload = OpenLoop(Poisson(rate), shapes, seed=1, max_requests=options.requests)
            began = process_time()
            simulate(
                workload,
                policy=presets.continuous(slots),
                capacity=Capacity(max_num_seqs=slots),
                service=Constant(STEP_S),
                blocks=blocks,
            )
            speed = options.requests / (process_time() - began)
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            name = "boundaries" if blocks else "finishes"
            print(f"{slots:5}  {name:10}{speed:25,.0f}{memory:18,}")


if __name__ == "__main__":
    main()
