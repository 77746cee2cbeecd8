"""What a prediction of a request's length is worth: the aged shortest-first order against FCFS.

    python benchmarks/shortest_first.py
    python benchmarks/shortest_first.py --requests 100000 --loads 0.8,0.95

Virtual time, 16 slots refilled at every step, steps of 20 ms whatever their rows, Poisson arrivals.
The load is a share of what full slots can serve. Predictions: the truth (oracle), the truth in a
fog that leaves so much of its variance explained (R^2; 0.15 and 0.42 are what prompts were measured
to tell of GSM8K and HumanEval), or a constant. Two populations: the 100 GSM8K answers of the
published run, and long-tailed outputs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np

from dllm_sched import Capacity, Policy, Request, presets
from dllm_sched.policies import ConstantCost, PayloadCost
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.lengths import LogNormal
from dllm_sched.sim.service import Constant
from dllm_sched.sim.shapes import Shapes, Work, gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop

SLOTS = 16
STEP_S = 0.02
MakeRequest = Callable[[str, Work, float], Request]


class Foretold(Work):
    """Work, and what a predictor said of it."""

    guess: float


def foggy(shapes: Shapes, share: float) -> MakeRequest:
    """Requests with a calibrated prediction that explains this share of the variance of steps."""
    mean = shapes.mean_steps
    deviation = math.sqrt(sum(p * (n - mean) ** 2 for n, p in shapes.steps().items()))
    noise = math.sqrt(share * (1 - share)) * deviation
    rng = np.random.default_rng(5)

    def make(id: str, work: Work, _at: float) -> Request:
        told = Foretold(*work)
        guess = mean + share * (work.num_steps - mean) + noise * rng.standard_normal()
        told.guess = max(1.0, guess)
        return Request(
            id,
            prompt_len=work.prompt_len,
            max_new_tokens=work.max_new_tokens,
            block_length=work.block_length,
            payload=told,
        )

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--loads", default="0.7,0.9,0.98")
    options = parser.parse_args()
    tailed = Shapes(LogNormal(128, 1.0, 2048), unit="tokens")
    print(
        f"{'population':<12} {'load':>5} {'prediction':<12} "
        f"{'mean s':>8} {'gain':>7} {'p99 s':>8} {'gain':>7}"
    )
    for population, shapes in (("gsm8k", gsm8k()), ("long-tailed", tailed)):
        runs: list[tuple[str, Policy, MakeRequest | None]] = [
            ("none (FCFS)", presets.continuous(SLOTS), None),
            ("constant", presets.dws(SLOTS, ConstantCost()), None),
            ("R^2 0.15", presets.dws(SLOTS, PayloadCost("guess")), foggy(shapes, 0.15)),
            ("R^2 0.42", presets.dws(SLOTS, PayloadCost("guess")), foggy(shapes, 0.42)),
            ("oracle", presets.dws(SLOTS, PayloadCost()), None),
            ("oracle, r=0", presets.dws(SLOTS, PayloadCost(), rate=0.0), None),
        ]
        for load in map(float, options.loads.split(",")):
            rate = load * SLOTS / (shapes.mean_steps * STEP_S)
            first: tuple[float, float] | None = None
            for name, policy, make_request in runs:
                result = simulate(
                    OpenLoop(Poisson(rate), shapes, max_requests=options.requests, seed=11),
                    policy=policy,
                    capacity=Capacity(max_num_seqs=SLOTS),
                    service=Constant(STEP_S),
                    make_request=make_request,
                )
                mean, tail = result.mean(), result.percentile(99)
                first = first or (mean, tail)
                print(
                    f"{population:<12} {load:>5.2f} {name:<12} {mean:>8.2f} "
                    f"{1 - mean / first[0]:>7.1%} {tail:>8.2f} {1 - tail / first[1]:>7.1%}"
                )


if __name__ == "__main__":
    main()
