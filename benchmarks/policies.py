"""Every preset on the same requests, in virtual time: who takes what when.

    python benchmarks/policies.py
    python benchmarks/policies.py --workload deadlines --requests 5000
    python benchmarks/policies.py --json > policies.json
    python benchmarks/policies.py --requests 1000 --picture benchmarks/pictures/policies.png

One engine for all: 16 slots, one block of 32 tokens per row and step, and steps that take
``17.03 ms + 1.4 ms a row + 0.03 ms a token``. That line is our own: one row then takes 19.39 ms, as
measured of one forward of LLaDA-8B on an H200, and eight rows 35.9 ms, the mean step in the public
raw data of batches of eight; of the slope, 0.03 ms a token is what 16 GFLOP take at half of the
device's peak. A prompt counts in the step in which its row joins. Work is D2F's step ladder, a
block every 29 steps. Loads are shares of what 16 full slots can do (``most/s`` of ``continuous``).

The table has one line per preset, the least mean latency first; presets that decided alike to the
last figure share one. most/s: requests per second out of a backlog; who has less of it than arrive
is unstable. good/s: requests per second that finished within their deadline, if they had one; in
time: share of those that had one, "small" of the smallest tenant's. worst step: the longest one.
waste: share of the row-steps in which a slot stood empty while somebody waited. evicted: rows sent
back for want of memory.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import json
import math
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from dllm_sched import Capacity, FinishReason, GrowingKV, Policy, Request, presets
from dllm_sched.events import Event, RequestFinished
from dllm_sched.policies import FCFS, AgedShortestFirst, ConfidenceThreshold, PayloadCost
from dllm_sched.sim.arrivals import MMPP, Arrivals, Poisson
from dllm_sched.sim.lengths import Fixed, Histogram, Lengths, LogNormal
from dllm_sched.sim.recording import QueueTrace
from dllm_sched.sim.service import Constant, Linear, Offloaded, ServiceModel
from dllm_sched.sim.shapes import EvenSteps, Shapes, Work, gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.tuning import saturated_rate
from dllm_sched.sim.workloads import OpenLoop, Trace
from dllm_sched.theory.congestion import equilibrium_rate, spectral_radius, worst_cycle_ratio
from dllm_sched.theory.maxima import expected_maximum
from dllm_sched.theory.wait import TrafficType

SLOTS = 16
STEP = Linear(0.01703, row_s=0.0014, token_s=0.00003)
ENGINE = Capacity(max_num_seqs=SLOTS, window_blocks=1)
FULL_STEP_S = STEP.step_s(SLOTS, SLOTS * 32)
DECODER = gsm8k().decoder
BUDGET = 512  # of every request: nobody tells a scheduler how long an answer will be
LOADS = (0.4, 0.6, 0.8, 0.95)
SHARES = {0.7: 0.62, 0.9: 1.0}  # TeDiServe: confidence threshold -> share of the steps
TIGHT_S, LOOSE_S = 30.0, 120.0
PICTURE_LOADS = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
POWER_W = 600.0  # taken for the whole of a busy step; only ratios count

Requests = list[tuple[float, Work]]
MakeRequest = Callable[[str, Work, float], Request]


@attrs.frozen
class Workload:
    """What arrives at which engine."""

    name: str
    requests: Requests = attrs.field(repr=False)
    work: str = ""  # workloads of the same work have the same ``most``
    capacity: Capacity = ENGINE
    typed: bool = False  # whether a request's class tells its length
    deadlines: bool = False
    seed: int = 0

    @property
    def rate(self) -> float:
        return len(self.requests) / self.requests[-1][0]

    @property
    def works(self) -> list[Work]:
        return [work for _, work in self.requests]

    def classed(self, id: str, work: Work, at: float) -> Request:
        """A request without deadline."""
        return self._request(id, work)

    def _request(self, id: str, work: Work, **more: Any) -> Request:
        return Request(
            id,
            prompt_len=work.prompt_len,
            max_new_tokens=work.max_new_tokens,
            block_length=work.block_length,
            request_class=str(work.num_blocks) if self.typed else "",
            payload=work,
            **more,
        )

    def make_request(self) -> MakeRequest:
        """Requests as they arrive: with deadlines, tenants and priorities if the workload has."""
        if not self.deadlines:
            return self.classed
        rng = np.random.default_rng([self.seed, 7])
        count = len(self.requests)
        patience = rng.choice([TIGHT_S, LOOSE_S, math.inf], count, p=[0.4, 0.4, 0.2]).tolist()
        tenants = rng.choice(["large", "middle", "small"], count, p=[0.6, 0.3, 0.1]).tolist()

        def make(id: str, work: Work, at: float) -> Request:
            number = int(id[1:])
            seconds = patience[number]
            return self._request(
                id,
                work,
                deadline_at=at + seconds,
                priority=[TIGHT_S, LOOSE_S, math.inf].index(seconds),
                tenant=tenants[number],
            )

        return make

    @property
    def types(self) -> dict[str, TrafficType]:
        """As WAIT takes them: by class."""
        if not self.typed:
            mean = sum(work.num_blocks for work in self.works) / len(self.requests)
            return {"": TrafficType(self.rate, 0, max(1, round(mean)))}
        return {str(n): kind for n, kind in self.lengths_as_types.items()}

    @property
    def lengths(self) -> Counter[int]:
        return Counter(work.num_blocks for work in self.works)

    @property
    def lengths_as_types(self) -> dict[Any, TrafficType]:
        """As Nested WAIT takes them: how frequent each length is."""
        return {n: TrafficType(float(count), 0, n) for n, count in sorted(self.lengths.items())}


# --- what arrives ---------------------------------------------------------------------------------


def most_per_s(works: list[Work]) -> float:
    """Requests per second of 16 slots that are always full."""
    steps = sum(work.num_steps for work in works) / len(works)
    prompt = sum(work.prompt_len for work in works) / len(works)
    return 1 / (steps * FULL_STEP_S / SLOTS + prompt * STEP.token_s)


def drawn(shapes: Shapes, arrivals: Arrivals, load: float, count: int, seed: int) -> Requests:
    """Requests whose mean rate is a share of what their kind of work allows."""
    sample = [work for _, work in OpenLoop(Poisson(1.0), shapes, seed=seed, max_requests=4000)]
    rate = load * most_per_s(sample)
    return list(OpenLoop(arrivals.at_rate(rate), shapes, seed=seed, max_requests=count))


def blocks(size: Lengths, prompt: Lengths | None = None) -> Shapes:
    return Shapes(size, prompt=prompt or Fixed(76), decoder=DECODER, max_new_tokens=BUDGET)


def shifting(pace: str, count: int, seed: int) -> Requests:
    """Two types of requests, short and long, whose rates shift.

    Rates (1000, 500) and (1000, 200) a second in two states left (0.5, 0.3) or (1.0, 0.8) times a
    second: "low demand" of bursty WAIT (arXiv 2608.06135). Ours: lengths of 6 and 12 blocks for 10
    and 20 tokens, rates scaled to a load of 0.7, and states that last 40 times as long, since a
    request takes 16 times as many steps and a full step some 2.4 times as long.
    """
    first, second = {"low": (0.5, 0.3), "high": (1.0, 0.8)}[pace]
    kinds = [
        (
            MMPP.two_state(*rates, leave_first=first / 40, leave_second=second / 40),
            blocks(Fixed(size)),
        )
        for rates, size in (((1000, 500), 6), ((1000, 200), 12))
    ]
    total = sum(process.rate for process, _ in kinds)
    steps = sum(process.rate / total * shapes.mean_steps for process, shapes in kinds)
    scale = 0.7 / (steps * FULL_STEP_S / SLOTS + 76 * STEP.token_s) / total
    streams = [
        OpenLoop(process.at_rate(scale * process.rate), shapes, seed=1000 * seed + number)
        for number, (process, shapes) in enumerate(kinds)
    ]
    merged = heapq.merge(*streams, key=lambda each: each[0])
    return list(itertools.islice(merged, count))


def traced(name: str, load: float, count: int) -> Requests:
    """The first requests of a shipped trace, sped up or slowed down to a load."""
    trace = Trace.shipped(
        name,
        decoder=DECODER,
        max_prompt_len=2048,
        max_output_len=BUDGET,
        max_new_tokens=BUDGET,
        max_requests=count,
    )
    requests = list(trace)
    works = [work for _, work in requests]
    factor = load * most_per_s(works) * requests[-1][0] / len(requests)
    return [(at / factor, work) for at, work in requests]


def tight_memory(count: int, seed: int) -> Workload:
    """Several lengths, and pages for about half of what 16 rows hold at their ends."""
    shapes = blocks(Histogram({2: 30, 6: 30, 10: 20, 16: 20}), LogNormal(200, 0.7, 1024, low=16))
    requests = drawn(shapes, Poisson(1.0), 0.62, count, seed)
    ends = [-(-(work.prompt_len + 32 * work.num_blocks) // 16) for _, work in requests]
    pages = int(SLOTS * sum(ends) / len(ends) / 2)
    capacity = Capacity(
        max_num_seqs=SLOTS, window_blocks=1, num_pages=pages, memory=GrowingKV(page_size=16)
    )
    return Workload("tight memory, load 0.62", requests, capacity=capacity)


def workloads(count: int, seed: int) -> list[Workload]:
    found = [
        Workload(f"gsm8k, load {load}", drawn(gsm8k(), Poisson(1.0), load, count, seed), "gsm8k")
        for load in LOADS
    ]
    found += [
        Workload(f"mmpp, {pace} shift, load 0.7", shifting(pace, count, seed), typed=True)
        for pace in ("low", "high")
    ]
    found += [
        Workload("code trace, load 0.6", traced("azure2023_code", 0.6, count)),
        Workload("conversation trace, load 0.7", traced("azure2023_conv", 0.7, count)),
        Workload(
            "deadlines, load 1.1",
            drawn(gsm8k(), Poisson(1.0), 1.1, count, seed),
            "gsm8k",
            deadlines=True,
            seed=seed,
        ),
        tight_memory(count, seed),
    ]
    return found


# --- who decides ----------------------------------------------------------------------------------


def policies(workload: Workload) -> dict[str, Policy]:
    """Every preset, told what an operator would know of the workload; and a few variants."""
    n = SLOTS
    mean_steps = sum(work.num_steps for work in workload.works) / len(workload.requests)
    steps = Counter(work.num_steps for work in workload.works)
    batch_s = {
        rows: expected_maximum(steps, rows) * STEP.step_s(rows, rows * 32) for rows in (1, n)
    }
    row_j = POWER_W * (batch_s[n] - batch_s[1]) / (n - 1)
    fixed_j = POWER_W * batch_s[1] - row_j
    widths = (8, 16, 32)
    memory = workload.capacity.memory
    per_step = 1.0
    if memory is not None:
        lengths = workload.lengths
        prompt = sum(work.prompt_len for work in workload.works) / len(workload.requests)
        mean_blocks = sum(work.num_blocks for work in workload.works) / len(workload.requests)
        room = workload.capacity.num_pages * 16 / 32
        per_step = equilibrium_rate(lengths, prompt / 32, room) * mean_blocks / mean_steps
    found = {
        "per_request": presets.per_request(),
        "fixed_fill": presets.fixed_fill(n),
        "fixed_fill_online": presets.fixed_fill_online(n),
        "fluid_fill": presets.fluid_fill(n),
        "energy_fill": presets.energy_fill(
            n, target_j=1.25 * (row_j + fixed_j / n), fixed_j=fixed_j, row_j=row_j, max_wait_s=10.0
        ),
        "continuous": presets.continuous(n),
        "block_refill": presets.block_refill(n),
        "blockserve": presets.blockserve(n, 16_384),
        "sglang_fdfo": presets.sglang_fdfo(n),
        "sglang_block_sync": presets.sglang_block_sync(n),
        "wait": presets.wait(n, workload.types),
        "wait (rows go on)": presets.wait(n, workload.types, hold_rows=False),
        "wait (rates by ema)": presets.wait(n, workload.types, rate="ema"),
        "nested_wait": presets.nested_wait(n, workload.lengths_as_types),
        "dws": presets.dws(n),
        "dws (oracle)": presets.dws(n, PayloadCost()),
        "sangam": presets.sangam(n, 1024),
        "exclusive": presets.exclusive(
            n, hazard=1 / mean_steps, prefill_base_s=STEP.base_s, decode_base_s=STEP.base_s
        ),
        "dllm_serve": presets.dllm_serve(n),
        "tediserve": presets.tediserve(n, step_s=FULL_STEP_S, steps=lambda _: mean_steps),
        "optimus": presets.optimus(
            n,
            widths=widths,
            committed=(1.0, 1.5, 2.0),
            latency_s={
                rows: [STEP.step_s(rows, rows * width) for width in widths] for rows in (1, 4, n)
            },
        ),
        "herald": presets.herald(n),
        "request_router": presets.request_router(n),
        "fair_share": presets.fair_share(n),
        "congestion_stable": presets.congestion_stable(
            n, per_step, memory=memory, lengths=None if memory is None else workload.lengths
        ),
        "congestion_stable (cap alone)": presets.congestion_stable(n, per_step),
        "orca": presets.orca(n),
        "vllm": presets.vllm(n),
        "sarathi": presets.sarathi(n),
    }
    missing = set(presets.PRESETS) - {name.partition(" ")[0] for name in found}
    assert not missing, f"presets that are not compared: {sorted(missing)}"
    return found


# --- one run --------------------------------------------------------------------------------------


class Thresholds:
    """What rows need: the ladder's steps at the highest threshold, a share of them at a lower."""

    def __init__(self) -> None:
        self.num_rows = self.num_low = 0

    def under_knobs(self, work: Work, knobs: Any) -> Work:
        share = SHARES.get(knobs.get("skip_threshold"), 1.0)
        self.num_rows += 1
        if share == 1.0:
            return work
        self.num_low += 1
        ends = tuple(math.ceil(share * end) for end in work.block_ends)
        return work._replace(num_steps=ends[-1], block_ends=ends)


class LongestStep(ServiceModel):
    """The line, and the longest step that it was asked for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        seconds = STEP.step_s(num_rows, num_tokens)
        self.seconds = max(self.seconds, seconds)
        return seconds


class InTime:
    """Counts requests that had a deadline, and those that finished by it."""

    def __init__(self, make: MakeRequest) -> None:
        self._make = make
        self._requests: dict[str, Request] = {}
        self.num_good = 0
        self.due: Counter[str] = Counter()  # by tenant
        self.met: Counter[str] = Counter()

    def make(self, id: str, work: Work, at: float) -> Request:
        request = self._make(id, work, at)
        self._requests[id] = request
        return request

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestFinished):
            request = self._requests.pop(event.request_id)
            good = event.reason is FinishReason.EOS and event.at <= request.deadline_at
            self.num_good += good
            if request.deadline_at < math.inf:
                self.due[request.tenant] += 1
                self.met[request.tenant] += good


def run(workload: Workload, policy: Policy, most: float) -> dict[str, Any]:
    """Simulate one policy; return the figures of its line."""
    pages, in_time = QueueTrace(workload.capacity), InTime(workload.make_request())
    thresholds, step = Thresholds(), LongestStep()
    limited = workload.capacity.memory is not None
    watched = [in_time] * workload.deadlines + [pages] * limited
    result = simulate(
        workload.requests,
        policy=policy,
        capacity=workload.capacity,
        service=step,
        phases=True,
        under_knobs=thresholds.under_knobs,
        max_waiting=max(64, len(workload.requests) // 2),
        make_request=in_time.make if workload.deadlines else workload.classed,
        observers=watched,
    )
    stats = result.stats
    unstable = result.unstable or most <= workload.rate
    settled = workload.deadlines or not unstable  # with deadlines the late ones leave
    found: dict[str, Any] = {
        "most_per_s": most,
        "per_s": result.requests_per_s,
        "mean_s": result.mean() if settled else None,
        "p99_s": result.percentile(99) if settled else None,
        "worst_step_s": step.seconds,
        "waste": stats.wasted_row_steps / (stats.row_steps + stats.wasted_row_steps),
        "low_threshold": thresholds.num_low / thresholds.num_rows,
        "unstable": unstable,
    }
    if workload.deadlines:
        found["good_per_s"] = in_time.num_good / result.duration_s
        found["in_time"] = in_time.met.total() / in_time.due.total()
        found["in_time_small"] = in_time.met["small"] / in_time.due["small"]
    if limited:
        found["evicted"] = stats.num_preempted
        found["pages"] = max(sample.pages_max for sample in pages)
    return found


COLUMNS = (
    ("most/s", "most_per_s", "{:.3f}"),
    ("served/s", "per_s", "{:.3f}"),
    ("good/s", "good_per_s", "{:.3f}"),
    ("in time", "in_time", "{:.1%}"),
    ("small", "in_time_small", "{:.1%}"),
    ("mean s", "mean_s", "{:.2f}"),
    ("p99 s", "p99_s", "{:.1f}"),
    ("worst step s", "worst_step_s", "{:.3f}"),
    ("waste", "waste", "{:.1%}"),
    ("evicted", "evicted", "{:,}"),
    ("pages", "pages", "{:,}"),
)


def grouped(lines: dict[str, dict[str, Any]]) -> list[tuple[list[str], dict[str, Any]]]:
    """Labels of equal runs together; the best first: by goodput, else stable ones by latency."""
    groups: list[tuple[list[str], dict[str, Any]]] = []
    for label, line in lines.items():
        for labels, known in groups:
            if known == {**line, "most_per_s": known["most_per_s"]}:
                labels.append(label)
                break
        else:
            groups.append(([label], line))

    def rank(group: tuple[list[str], dict[str, Any]]) -> tuple[float, ...]:
        line = group[1]
        if "good_per_s" in line:
            return (-line["good_per_s"],)
        return (line["unstable"], line["mean_s"] or -line["most_per_s"])

    return sorted(groups, key=rank)


def table(workload: Workload, lines: dict[str, dict[str, Any]]) -> str:
    """The figures of all policies, and which of them decided alike."""
    columns = [each for each in COLUMNS if each[1] in next(iter(lines.values()))]
    rows = [["policy", *(head for head, _, _ in columns)]]
    notes = []
    for labels, line in grouped(lines):
        cells = ["-" if line[key] is None else form.format(line[key]) for _, key, form in columns]
        first = "continuous" if "continuous" in labels else labels[0]
        rows.append([first + " (unstable)" * line["unstable"], *cells])
        if len(labels) > 1:
            notes.append(f"as {first}: {', '.join(each for each in labels if each != first)}")
        if line["low_threshold"]:
            notes.append(f"{first}: {line['low_threshold']:.0%} of the rows at the lower threshold")
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    head = f"{workload.name}: {len(workload.requests):,} requests, {workload.rate:.3f} a second"
    if workload.capacity.num_pages is not None:
        head += f", {workload.capacity.num_pages} pages"
    return "\n".join([head, *text, *notes, ""])


# --- beside the papers ----------------------------------------------------------------------------


def most(workload: Workload, policy: Policy, *, service: ServiceModel = STEP) -> float:
    """Requests per second out of a backlog.

    An order by length would serve the short ones first and the rate would be that of the long
    ones, so order is left out; and a policy that estimates its load from arrivals is told of the
    overload, which a backlog is not an arrival of.
    """
    if isinstance(policy.ordering, AgedShortestFirst):
        policy = attrs.evolve(policy, ordering=FCFS())
    if isinstance(policy.control, ConfidenceThreshold):
        policy = attrs.evolve(policy, control=attrs.evolve(policy.control, demand=1e9))
    return saturated_rate(
        workload.requests,
        policy=policy,
        capacity=workload.capacity,
        service=service,
        max_requests=100 * SLOTS,
        phases=True,
        under_knobs=Thresholds().under_knobs,
        make_request=workload.classed,
    )


def headlines(count: int, seed: int) -> list[tuple[str, str, str, float]]:
    """System, what was published, what stands beside it here, and our figure."""
    equal = Constant(0.02)
    gsm = Workload("gsm8k", drawn(gsm8k(), Poisson(1.0), 0.95, count, seed))
    code = Workload("code trace", traced("azure2023_code", 0.6, count))
    canvas = Workload("canvas", drawn(blocks(Fixed(16)), Poisson(1.0), 0.5, count, seed))
    tailed_shapes = Shapes(
        LogNormal(128, 1.0, 2048),
        unit="tokens",
        prompt=Fixed(76),
        decoder=DECODER,
        max_new_tokens=2048,
    )
    tailed = Workload("long tail", drawn(tailed_shapes, Poisson(1.0), 0.95, count, seed))

    @functools.cache
    def served(on: int, name: str, service: ServiceModel = STEP) -> float:
        workload = (gsm, code, canvas)[on]
        return most(workload, policies(workload)[name], service=service)

    def gain(first: str, second: str, on: int = 0, service: ServiceModel = STEP) -> float:
        return served(on, first, service) / served(on, second, service)

    def quicker(workload: Workload) -> float:
        found = policies(workload)
        slow, fast = (
            run(workload, found[name], math.inf)["mean_s"]
            for name in ("continuous", "dws (oracle)")
        )
        return slow / fast

    return [
        ("Serving Masked dLLMs", "16.0x", "continuous / per_request",
         gain("continuous", "per_request")),
        ("", "", "... steps of equal length", gain("continuous", "per_request", 0, equal)),
        ("", "6.2x (8 rows, raw data)", "fixed_fill / per_request",
         gain("fixed_fill", "per_request")),
        ("", "1.469x (closed form)", "continuous / fixed_fill", gain("continuous", "fixed_fill")),
        ("", "", "... steps of equal length", gain("continuous", "fixed_fill", 0, equal)),
        ("", "least at load 0.70", "load of fixed fill's least mean latency", best_load(seed)),
        ("BlockServe", "2.6-7.7x static batches", "blockserve / fixed_fill",
         gain("blockserve", "fixed_fill")),
        ("", "", "... that denoises the whole canvas",
         served(0, "blockserve") / served(2, "fixed_fill")),
        ("dLLM-Serve", "1.6-1.8x", "dllm_serve / fixed_fill", gain("dllm_serve", "fixed_fill")),
        ("Sangam", "2.5-3x Fast-dLLM", "sangam / fixed_fill, code trace",
         gain("sangam", "fixed_fill", 1)),
        ("", "", "sangam / continuous, code trace", gain("sangam", "continuous", 1)),
        ("SGLang", "-", "sglang_fdfo / sglang_block_sync",
         gain("sglang_fdfo", "sglang_block_sync")),
        ("Exclusive batching", "0.971-1.015x (H200)", "exclusive / continuous",
         gain("exclusive", "continuous")),
        ("", "", "... code trace", gain("exclusive", "continuous", 1)),
        ("TeDiServe", "1.61x", "tediserve / continuous", gain("tediserve", "continuous")),
        ("Denoising Surface", "up to 1.92x", "mean latency, continuous / dws with oracle",
         quicker(gsm)),
        ("", "", "... long-tailed lengths", quicker(tailed)),
        ("HERALD", "up to 2.28x", "herald / continuous", herald_gain(gsm)),
        *congestion(),
        ("", "unstable above 1", "spectral radius of the tight-memory mix",
         radius(tight_memory(count, seed))),
    ]  # fmt: skip


def radius(workload: Workload) -> float:
    prompt = sum(work.prompt_len for work in workload.works) / len(workload.requests)
    return spectral_radius(workload.lengths, prompt / 32)


def best_load(seed: int) -> float:
    """The load at which full batches of 8 have their least mean latency, steps being equal."""
    seconds, work = 8.738, Work(76, 32, 32, 1, 1, (1,))
    means = {}
    for load in (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9):
        arrivals = Poisson(load * 8 / seconds).times(seed)
        result = simulate(
            [(at, work) for at in itertools.islice(arrivals, 20_000)],
            policy=presets.fixed_fill(8),
            capacity=Capacity(max_num_seqs=8),
            service=Constant(seconds),
        )
        means[load] = result.mean()
    return min(means, key=means.__getitem__)


def herald_gain(workload: Workload) -> float:
    """Prefetching where 16 rows' selections take as long as the denoising of a block."""
    service = Offloaded(STEP, select_s=29 * FULL_STEP_S / SLOTS)
    ahead, late = (
        most(workload, policy, service=service)
        for policy in (presets.herald(SLOTS), presets.continuous(SLOTS))
    )
    return ahead / late


def congestion() -> list[tuple[str, str, str, float]]:
    """Ten blocks each, a prompt of one page, steps of equal length, 1,100 pages of a block."""
    length, period, room = 10, 29, 1100
    work = Shapes(Fixed(length), prompt=Fixed(32), decoder=EvenSteps(period)).work(32, length)
    memory = GrowingKV(page_size=32)
    capacity = Capacity(max_num_seqs=room, num_pages=room, memory=memory)
    best = equilibrium_rate({length: 1.0}, 1, room) / period
    stable = presets.congestion_stable(room, best, memory=memory)
    worst = f"{worst_cycle_ratio(length, 1):.3f} of n* at worst"
    lines = []
    for system, claim, policy in (
        ("Congestion", worst, presets.vllm(room)),
        ("", "1.000 with the rate cap", stable),
    ):
        per_s = saturated_rate(
            [(0.0, work)] * 5000, policy=policy, capacity=capacity, service=Constant(1.0)
        )
        lines.append((system, claim, f"{policy.name}, share of n*", per_s / best))
    return lines


def beside(lines: list[tuple[str, str, str, float]]) -> str:
    """What was published and what we measured."""
    columns = "{:<22}{:<26}{:<46}{:>6}".format
    head = columns("system", "published", "here, requests/s of a backlog if not said", "ours")
    return "\n".join([head, *(columns(*texts, f"{value:.3f}") for *texts, value in lines)])


# --- the picture ----------------------------------------------------------------------------------


def curves(count: int, seed: int, say: Callable[[str], None]) -> dict[str, list[float]]:
    """Mean latency of each preset at each of the picture's loads, up to its last stable one."""
    found: dict[str, list[float]] = {}
    measured: dict[str, float] = {}
    for number, load in enumerate(PICTURE_LOADS):
        workload = Workload("picture", drawn(gsm8k(), Poisson(1.0), load, count, seed))
        for label, policy in policies(workload).items():
            if label not in presets.PRESETS or len(found.setdefault(label, [])) < number:
                continue  # a variant, or unstable already
            say(f"picture, load {load}, {label}")
            if label not in measured:
                measured[label] = most(workload, policy)
            mean = run(workload, policy, measured[label])["mean_s"]
            if mean is not None:
                found[label].append(mean)
    return found


def draw(means: dict[str, list[float]], path: str, caption: str) -> None:
    """A line per group of presets that are within 1 % of each other, its name at its end."""
    from matplotlib.figure import Figure

    from dllm_sched.sim.plots import save

    groups: list[tuple[list[str], list[float]]] = []
    for label, values in sorted(means.items(), key=lambda each: each[0] != "continuous"):
        for labels, known in groups:
            if len(known) == len(values) and np.allclose(known, values, rtol=0.01):
                labels.append(label)
                break
        else:
            groups.append(([label], values))
    groups.sort(key=lambda group: -group[1][-1])
    figure = Figure(figsize=(10.5, 6.6), dpi=120)
    axes = figure.add_axes((0.075, 0.17, 0.6, 0.74))
    axes.set_yscale("log")
    axes.set_xlim(0, 1.0)
    axes.set_ylim(5, 180)
    ticks = [5, 6, 8, 10, 15, 20, 30, 50, 100]
    axes.set_yticks(ticks, [str(each) for each in ticks])
    axes.minorticks_off()
    colours = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"]
    top = 1.0
    for number, (labels, values) in enumerate(groups):
        loads = PICTURE_LOADS[: len(values)]
        colour = colours[number % 7]
        axes.plot(
            loads, values, ("-", "--", "-.", ":")[number % 4], color=colour,
            marker="osD^vPX"[number % 7], markersize=4,
            linewidth=2.4 if "continuous" in labels else 1.3,
        )  # fmt: skip
        end = (loads[-1], values[-1])
        text = textwrap.fill(", ".join(labels), 38)
        if loads[-1] < 0.8:
            axes.annotate(text, end, (6, 4), textcoords="offset points", color=colour, fontsize=9)
            continue
        half = 0.016 * (text.count("\n") + 1) + 0.005
        height = min(top - half, math.log(values[-1] / 5) / math.log(180 / 5))
        top = height - half
        axes.annotate(
            text, end, (1.03, height), textcoords=axes.transAxes, color=colour, fontsize=9,
            va="center", annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": colour, "linewidth": 0.7, "alpha": 0.7,
                "relpos": (0, 0.5), "shrinkB": 3,
            },
        )  # fmt: skip
    axes.set_xlabel("load: arrivals over what 16 full slots can do")
    axes.set_ylabel("mean latency, seconds (log scale)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#DDDDDD", linewidth=0.6)
    figure.text(0.02, 0.965, "Mean latency against load, every preset", fontsize=12, weight="bold")
    figure.text(0.02, 0.02, textwrap.fill(caption, 150), fontsize=8.5, color="#444444")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000, help="of each run; default: 2,000")
    parser.add_argument("--seed", type=int, default=1, help="of all that is random; default: 1")
    parser.add_argument("--workload", default="", help="only those whose names begin so")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--picture", metavar="FILE", help="only draw mean latency against load")
    options = parser.parse_args()
    if options.requests < 100:
        parser.error("--requests: at least 100, or there is nothing to see")
    began = time.monotonic()

    def say(text: str) -> None:
        line = f"{time.monotonic() - began:.0f} s: {text}" if text else ""
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    if options.picture:
        caption = (
            "GSM8K's answers (6 to 16 blocks, a block every 29 steps), Poisson arrivals, "
            f"{options.requests:,} requests a point, seed {options.seed}; 16 slots, a step takes "
            "17.03 ms + 1.4 ms a row + 0.03 ms a token (our line through what an H200 was measured "
            "to take). A line ends before the first load at which its policy is unstable. Policies "
            "within 1 % of each other share a line. "
            f"python benchmarks/policies.py --picture FILE --requests {options.requests}"
        )
        draw(curves(options.requests, options.seed, say), options.picture, caption)
        say("")
        return
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    measured: dict[tuple[str, str], float] = {}
    for workload in workloads(options.requests, options.seed):
        if not workload.name.startswith(options.workload):
            continue
        lines = tables[workload.name] = {}
        for label, policy in policies(workload).items():
            say(f"{workload.name}, {label}")
            key = (workload.work or workload.name, label)
            if key not in measured:
                measured[key] = most(workload, policy)
            lines[label] = run(workload, policy, measured[key])
        say("")
        if not options.json:
            print(table(workload, lines), flush=True)
    published: list[tuple[str, str, str, float]] = []
    if not options.workload:
        say("beside what was published")
        published = headlines(options.requests, options.seed)
        say("")
        if not options.json:
            print(beside(published))
    if options.json:
        print(json.dumps({**vars(options), "tables": tables, "published": published}))


if __name__ == "__main__":
    main()
