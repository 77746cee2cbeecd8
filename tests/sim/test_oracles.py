"""The simulator, and with it the real ``Scheduler``, against closed forms and against SimPy.

A mean wait converges slowly: for 2 % one needs some 200,000 requests. So each queue is compared
twice, exactly and in the long run: every single wait of a short run through the ``Scheduler`` is
that of SimPy, or of the textbook's recursion; and the recursion's mean over millions is the closed
form. With ``DLLM_SCHED_FULL=1`` in the environment the ``Scheduler`` itself also goes the long way
(200,000 arrivals a point), and congestion's slow cases run: some minutes in all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import simpy

from dllm_sched import Capacity, Policy, Request, presets
from dllm_sched.events import Event, RequestFinished, RequestPreempted
from dllm_sched.policies import Admission, Verdict, YoungestFirst
from dllm_sched.request import RequestView
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.report import Result
from dllm_sched.sim.service import Constant, ServiceModel
from dllm_sched.sim.shapes import Work, gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.theory import congestion, fixed_fill
from dllm_sched.view import Round

FULL = os.environ.get("DLLM_SCHED_FULL", "") not in ("", "0")
ONE_STEP = Work(10, 32, 32, 1, 1, (1,))
S = 8.738217888618237  # the mean of the published batch times, seconds


class Draws(ServiceModel):
    """One drawn time per step: where every request is one step, its service time."""

    def __init__(self, times: Iterable[float]) -> None:
        self.times: Iterator[float] = iter(times)

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        return next(self.times)


def arrivals_at(rate: float, count: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    instants: list[float] = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    return instants


def single_server(arrivals: list[float], services: list[float]) -> Result:
    return simulate(
        [(at, ONE_STEP) for at in arrivals],
        policy=presets.continuous(1),
        capacity=Capacity(max_num_seqs=1),
        service=Draws(services),
    )


def recursion(arrivals: np.ndarray, services: np.ndarray) -> np.ndarray:
    """Waits of a single server, first come first served (Lindley), all at once."""
    excess = np.concatenate(([0.0], np.cumsum(services[:-1] - np.diff(arrivals))))
    return excess - np.minimum.accumulate(excess)


# Squared coefficient of variation of the service time -> draws with mean 1.
SERVICES = {
    "M/M/1": (1.0, lambda rng, n: rng.exponential(1.0, n)),
    "M/D/1": (0.0, lambda rng, n: np.ones(n)),
    "M/G/1 uniform": (1 / 3, lambda rng, n: rng.uniform(0.0, 2.0, n)),
    "M/G/1 two-point": (0.64, lambda rng, n: rng.choice([0.2, 1.8], n)),
}


@pytest.mark.parametrize("name", SERVICES)
def test_mean_waits_of_single_servers(name: str) -> None:
    """Pollaczek-Khinchine: ``W = rho S (1 + c^2) / (2 (1 - rho))``, here at rho = 0.6."""
    squared_cv, draw = SERVICES[name]
    expected = 0.6 * (1 + squared_cv) / 0.8
    arrivals = np.cumsum(np.random.default_rng(17).exponential(1 / 0.6, 2_000_000))
    services = draw(np.random.default_rng(7), len(arrivals))
    waits = recursion(arrivals, services)
    assert waits.mean() == pytest.approx(expected, rel=0.02)

    count = 200_000 if FULL else 5000
    result = single_server(arrivals[:count].tolist(), services[:count].tolist())
    assert list(result.wait_s) == pytest.approx(waits[:count].tolist(), abs=1e-6)
    if FULL:
        assert result.mean("wait_s") == pytest.approx(expected, rel=0.02)


def test_mean_wait_where_a_request_is_many_steps() -> None:
    """M/G/1 whose service time is the block histogram's steps."""
    shapes, rate, step_s = gsm8k(), 0.6, 1 / 290.39
    workload = OpenLoop(Poisson(rate), shapes, seed=5, max_requests=200_000 if FULL else 5000)
    arrivals, works = zip(*workload, strict=True)
    services = np.array([work.num_steps * step_s for work in works])
    result = simulate(
        workload,
        policy=presets.per_request(),
        capacity=Capacity(max_num_seqs=1),
        service=Constant(step_s),
    )
    waits = recursion(np.array(arrivals), services)
    assert list(result.wait_s) == pytest.approx(waits.tolist(), abs=1e-6)

    steps = shapes.steps()
    second = math.fsum(n * n * p for n, p in steps.items()) / math.fsum(steps.values())
    expected = rate * second * step_s**2 / (2 * (1 - rate * shapes.mean_steps * step_s))
    drawn = shapes.draw(np.random.default_rng(1), 1_000_000)
    services = np.array([work.num_steps * step_s for work in drawn])
    arrivals = np.cumsum(np.random.default_rng(2).exponential(1 / rate, len(drawn)))
    assert recursion(arrivals, services).mean() == pytest.approx(expected, rel=0.02)
    if FULL:
        assert result.mean("wait_s") == pytest.approx(expected, rel=0.02)


def simpy_waits(arrivals: list[float], services: list[float], batch: int) -> list[float]:
    """Waits of a server that takes full batches, by an independent simulator; the rest is left."""
    env = simpy.Environment()
    queue = simpy.Store(env)
    waits: list[float] = []

    def source() -> Any:
        for at in arrivals:
            yield env.timeout(at - env.now)
            queue.put(at)

    def server() -> Any:
        for service in services:
            members = yield env.all_of([queue.get() for _ in range(batch)])
            waits.extend(env.now - at for at in members.values())
            yield env.timeout(service)

    env.process(source())
    env.process(server())
    env.run()
    return waits


def test_every_single_wait_is_simpys() -> None:
    services = np.random.default_rng(3).exponential(1.0, 4000).tolist()
    arrivals = arrivals_at(0.8, 4000, seed=4)
    expected = simpy_waits(arrivals, services, 1)
    assert list(single_server(arrivals, services).wait_s) == pytest.approx(expected, abs=1e-6)


def test_every_single_wait_of_a_batch_queue_is_simpys() -> None:
    arrivals = arrivals_at(0.8, 4000, seed=5)
    services = np.random.default_rng(6).uniform(1.0, 9.0, 500).tolist()
    result = simulate(
        [(at, ONE_STEP) for at in arrivals],
        policy=presets.fixed_fill(8),
        capacity=Capacity(max_num_seqs=8),
        service=Draws(services),
    )
    expected = simpy_waits(arrivals, services, 8)
    assert sorted(result.wait_s) == pytest.approx(sorted(expected), abs=1e-6)


# Utilisation -> mean latency, seconds, and the tolerance for 200,000 arrivals.
LONG_RUN = {
    0.1: (46.968, 0.01),
    0.2: (27.853, 0.01),
    0.4: (18.319, 0.01),
    0.5: (16.466, 0.01),
    0.6: (15.334, 0.01),
    0.7: (14.747, 0.01),
    0.8: (14.845, 0.01),
    0.9: (16.918, 0.04),
    0.95: (22.094, 0.15),
}


@pytest.mark.parametrize("utilisation", LONG_RUN)
def test_long_run_latency_of_fixed_fill(utilisation: float) -> None:
    latency, tolerance = LONG_RUN[utilisation]
    rate = utilisation * 8 / S
    assert fixed_fill.mean_latency(rate, S, 8) == pytest.approx(latency, abs=6e-4)

    count = 200_000
    arrivals = np.cumsum(np.random.default_rng(11).exponential(1 / rate, count))
    full = arrivals[7::8]
    start = np.repeat(full + recursion(full, np.full(len(full), S)), 8)
    expected = start + S - arrivals
    assert expected.mean() == pytest.approx(latency, rel=tolerance)

    count = count if FULL else 8000
    result = simulate(
        [(at, ONE_STEP) for at in arrivals[:count].tolist()],
        policy=presets.fixed_fill(8),
        capacity=Capacity(max_num_seqs=8),
        service=Constant(S),
    )
    assert result.num_requests == count
    # Those of one batch finish at one instant, in the order of their slots.
    by_batch = [np.sort(np.reshape(each, (-1, 8))) for each in (result.latency_s, expected[:count])]
    assert by_batch[0] == pytest.approx(by_batch[1], abs=1e-6)
    assert result.mean() == pytest.approx(expected[:count].mean(), rel=1e-9)


def test_fixed_fill_is_best_at_a_utilisation_of_three_quarters() -> None:
    utilisation, latency = fixed_fill.best_utilisation(S, 8)
    assert utilisation == pytest.approx(0.745, abs=0.003)  # the curve is flat there
    assert latency == pytest.approx(14.680, abs=6e-4)


# --- congestion by whole requests -----------------------------------------------------------------


@attrs.frozen
class Ages:
    """Pages of a request at age j: the input, and ``unit`` for each of its j + 1 blocks."""

    input_pages: int
    unit: int = 1
    grows = True

    def pages(self, request: Request, kv_tokens: int) -> int:
        age = max(kv_tokens - request.prompt_len, 0)
        return self.input_pages + self.unit * (age + 1)

    def peak_pages(self, request: Request) -> int:
        return self.input_pages + self.unit * request.max_new_tokens


@attrs.frozen
class RateCap(Admission):
    """At most ``per_step`` joins a step, in the mean. The state is what is left over."""

    per_step: float

    def init(self) -> float:
        return self.per_step

    def admit(self, state: float, rv: RequestView, round: Round) -> Verdict:
        left = state + self.per_step * round.num_steps
        return Verdict.ADMIT if left >= 1 - 1e-9 else Verdict.STOP

    def joined(self, state: float, rv: RequestView, round: Round) -> float:
        return state - 1

    def settle(self, state: float, round: Round) -> float:
        return min(state + self.per_step * round.num_steps, self.per_step + 1)

    def recheck(self, state: float, round: Round) -> float:
        return 1


@attrs.frozen
class ProjectedPeak(Admission):
    """Whoever is in could grow to ``peak_pages`` at once."""

    peak_pages: int
    num_pages: int

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        inside = round.view.num_running + round.num_joined + 1
        return Verdict.ADMIT if inside * self.peak_pages <= self.num_pages else Verdict.STOP


class Tally:
    """Finishes and evictions between two steps (a step is a second)."""

    def __init__(self, from_s: float, until_s: float) -> None:
        self.window = (from_s + 0.5, until_s + 0.5)
        self.finished = self.evicted = 0

    def __call__(self, event: Event) -> None:
        if self.window[0] <= event.at < self.window[1]:
            self.finished += isinstance(event, RequestFinished)
            self.evicted += isinstance(event, RequestPreempted)


def congested(
    lengths: int | tuple[int, ...],
    memory: Ages,
    per_step: int,
    *,
    warm_up: int | None = None,
    admission: Admission | None = None,
) -> tuple[float, int]:
    """Return throughput over n*, about ``per_step``, and evictions, of a saturated cold start."""
    if isinstance(lengths, int):
        lengths = (lengths,)
    size = memory.input_pages / memory.unit
    weights = dict.fromkeys(lengths, 1.0)
    num_pages = round(memory.unit * per_step / congestion.equilibrium_rate(weights, size, 1.0))
    works = [Work(1, each, 1, each, each, tuple(range(1, each + 1))) for each in lengths]
    longest = max(lengths)
    warm_up = 10 * longest if warm_up is None else warm_up
    steps = 20 * longest if len(lengths) == 1 else warm_up
    tally = Tally(warm_up, warm_up + steps)
    count = per_step * (warm_up + steps + longest)
    simulate(
        [(0.0, works[i % len(works)]) for i in range(count)],
        policy=Policy(
            admission=Admission() if admission is None else admission, eviction=YoungestFirst()
        ),
        capacity=Capacity(max_num_seqs=num_pages, num_pages=num_pages, memory=memory),
        service=Constant(1.0),
        max_waiting=10**9,
        observers=[tally],
    )
    return tally.finished / (steps * per_step), tally.evicted


SLOW = pytest.mark.skipif(not FULL, reason="slow: DLLM_SCHED_FULL=1 runs it")
CASES = [
    pytest.param(0, 10, 20, 0.550),
    pytest.param(10, 10, 20, 0.775),
    pytest.param(10, 50, 2, 0.592),
    pytest.param(0, 200, 2, 0.5025, marks=SLOW),
    pytest.param(100, 100, 2, 0.7525),
]


@pytest.mark.parametrize(("size", "length", "per_step", "ratio"), CASES)
def test_congestion_locks_whole_requests_into_the_worst_cycle(
    size: int, length: int, per_step: int, ratio: float
) -> None:
    assert congestion.worst_cycle_ratio(length, size) == pytest.approx(ratio, abs=5e-4)
    found, evicted = congested(length, Ages(size), per_step)
    assert found == pytest.approx(ratio, rel=0.01)
    assert evicted > 0


def test_lengths_with_a_common_divisor_congest_and_others_do_not() -> None:
    """Inputs of 50, half and half. Whole requests in a step cost the stable mix half a percent."""
    assert (
        congestion.spectral_radius({4: 1, 8: 1}, 50)
        > 1
        > congestion.spectral_radius({5: 1, 7: 1}, 50)
    )
    found, evicted = congested((4, 8), Ages(50), 60, warm_up=500)
    assert found == pytest.approx(0.973, rel=0.01)
    assert evicted > 0
    found, evicted = congested((5, 7), Ages(50), 60, warm_up=500)
    assert found == pytest.approx(1.0, rel=0.01)
    assert evicted == 0


def test_congestion_of_a_diffusion_model() -> None:
    """Prompts of 76 tokens = 2.4 blocks, ten blocks each: a unit is a fifth of a block."""
    found, evicted = congested(10, Ages(12, unit=5), 30)
    assert found == pytest.approx(0.637, rel=0.01)
    assert evicted > 0


@pytest.mark.parametrize(("size", "length", "per_step", "ratio"), CASES)
def test_the_projected_peak_alone_evicts_nobody_and_keeps_the_cycle(
    size: int, length: int, per_step: int, ratio: float
) -> None:
    peak = size + length
    num_pages = round(per_step / congestion.equilibrium_rate({length: 1}, size, 1.0))
    found, evicted = congested(
        length, Ages(size), per_step, admission=ProjectedPeak(peak, num_pages)
    )
    assert evicted == 0
    assert found == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize(("size", "length", "per_step", "ratio"), CASES)
def test_the_rate_cap_evicts_nobody_and_gives_all_the_throughput(
    size: int, length: int, per_step: int, ratio: float
) -> None:
    found, evicted = congested(length, Ages(size), per_step, admission=RateCap(per_step))
    assert evicted == 0
    assert found == pytest.approx(1.0, abs=0.001)
