"""Record a live run, fit step times to it, and replay the same arrivals in virtual time.

    python examples/live_to_virtual.py
    python examples/live_to_virtual.py --policy fixed_fill --load 0.6 --requests 800 --json

The model in the box is served live at a chosen share of what it can serve at most. Of each step its
rows, its tokens (``Row.max_tokens``) and its seconds are recorded, host work included; of each
request its steps. A linear model is fitted to the steps, its error printed, and the simulator
serves the same arrivals with the very same policy. Live and virtual figures stand side by side.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dllm_sched import Capacity, ConfigError, Finished, FinishReason, Policy, Scheduler, presets
from dllm_sched.events import Event, StepCompleted, StepPlanned
from dllm_sched.runtime import Driver, MonotonicClock
from dllm_sched.sim.service import Fit, Sample, fit_linear
from dllm_sched.sim.shapes import Work
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import Replay
from dllm_sched_hf import D2FEngine, box, load_model


class Steps:
    """An observer that notes rows, tokens and seconds of each step.

    A step lasts until the next one is planned, if that follows at once: so the host's work between
    two steps counts, and idle time does not.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.scheduler: Scheduler | None = None
        self._planned: tuple[float, int, int] | None = None
        self._completed_at = 0.0

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepPlanned):
            self._note(event.at if event.at - self._completed_at < 1e-3 else self._completed_at)
            tokens = 0 if self.scheduler is None else self.scheduler.tokens_in_rows
            self._planned = (event.at, event.num_rows, tokens)
        elif isinstance(event, StepCompleted):
            self._completed_at = event.at

    def _note(self, until: float) -> None:
        if self._planned is not None and until > self._planned[0]:
            at, rows, tokens = self._planned
            self.samples.append(Sample(rows, tokens, until - at))


class Live(NamedTuple):
    """What a live run gave."""

    samples: list[Sample]
    ended: dict[str, Finished]
    started_at: float
    ended_at: float


def serve(model: Any, jobs: Sequence[tuple[float, Any]], policy: Policy, slots: int) -> Live:
    """Serve ``(arrival_s, request)`` jobs live."""
    engine = D2FEngine(model, max_num_seqs=slots)
    steps = Steps()
    scheduler = Scheduler(policy=policy, capacity=engine.capacity(), observers=[steps])
    steps.scheduler = scheduler
    ended: dict[str, Finished] = {}
    driver = Driver(
        scheduler,
        engine,
        MonotonicClock(),
        on_update=lambda update: ended.update({f.request.id: f for f in update.finished}),
    )
    report = driver.run(jobs)
    last = max(end.finished_at for end in ended.values())
    return Live(steps.samples, ended, report.started_at, last)


def figures(latency_s: Sequence[float], duration_s: float) -> dict[str, float]:
    """The figures that are compared."""
    return {
        "requests_per_s": len(latency_s) / duration_s,
        "latency_mean_s": float(np.mean(latency_s)),
        "latency_p99_s": float(np.percentile(latency_s, 99)),
    }


def make_jobs(engine: D2FEngine, count: int, rate: float, seed: int) -> list[tuple[float, Any]]:
    """Poisson arrivals of the box's own task."""
    rng = random.Random(seed)
    at, jobs = 0.0, []
    for number, (prompt, _) in enumerate(box.task.sample_requests(count, seed)):
        ids = box.task.encode_prompt(prompt)
        jobs.append((at, engine.request(f"r{number}", ids, **box.DECODING)))
        at += rng.expovariate(rate)
    return jobs


def works_of(live: Live, jobs: Sequence[tuple[float, Any]]) -> Replay:
    """The same arrivals, with the steps that each request turned out to need."""
    pairs = []
    for at, request in jobs:
        end = live.ended[request.id]
        if end.reason not in (FinishReason.EOS, FinishReason.LENGTH):
            raise ConfigError(f"request {request.id} ended by {end.reason.value}")
        blocks, steps = end.output.num_blocks, end.num_steps
        ends = (*range(1, blocks), steps) if blocks <= steps else (steps,)
        pairs.append(
            (
                at,
                Work(
                    request.prompt_len,
                    request.max_new_tokens,
                    request.block_length,
                    blocks,
                    steps,
                    ends,
                ),
            )
        )
    return Replay(pairs)


def compare(options: argparse.Namespace) -> tuple[Fit, dict[str, dict[str, float]]]:
    """Serve live, fit, simulate."""
    torch.set_num_threads(options.threads)
    model = load_model(box.box_model_dir(), box.box_lora_dir(), device="cpu")
    slots = options.batch_size
    engine = D2FEngine(model, max_num_seqs=slots)
    arguments = {} if options.policy == "per_request" else {"batch_size": slots}
    if options.policy == "fixed_fill":
        arguments["timeout_s"] = options.timeout
    policy = presets.by_name(options.policy, **arguments)
    # A backlog tells how much can be served at most, and warms everything up.
    backlog = [(0.0, request) for _, request in make_jobs(engine, 200, 1.0, options.seed + 1)]
    most = serve(model, backlog, policy, slots)
    rate = options.load * len(backlog) / (most.ended_at - most.started_at)
    jobs = make_jobs(engine, options.requests, rate, options.seed)
    live = serve(model, jobs, policy, slots)
    fit = fit_linear(live.samples)
    latency = [live.ended[r.id].finished_at - live.started_at - at for at, r in jobs]
    result = simulate(
        works_of(live, jobs),
        policy=policy,
        capacity=Capacity(max_num_seqs=slots),
        service=fit.model,
        phases=True,
    )
    return fit, {
        "live": figures(latency, live.ended_at - live.started_at),
        "virtual": figures(result.latency_s, result.duration_s),
    }


def main() -> int:
    """Print the fit and both sets of figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--policy", default="continuous", choices=sorted(presets.PRESETS))
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--timeout", type=float, default=0.12, help="of fixed_fill, seconds")
    parser.add_argument("--load", type=float, default=0.7, help="share of what can be served")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args()
    try:
        fit, both = compare(options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ratios = {name: both["virtual"][name] / value for name, value in both["live"].items()}
    if options.json:
        print(json.dumps({**both, "virtual_over_live": ratios, "fit": str(fit)}))
        return 0
    print(f"{options.policy}, {options.requests} requests at {options.load:.0%} of capacity")
    print(f"fit: {fit}")
    print(f"{'':16}{'live':>10}{'virtual':>10}{'ratio':>8}")
    for name, ratio in ratios.items():
        print(f"{name:16}{both['live'][name]:10.4f}{both['virtual'][name]:10.4f}{ratio:8.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
