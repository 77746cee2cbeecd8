"""What a denoising step of the adapter's engine costs and where its time goes, on CPU and CUDA.

    python benchmarks/engine.py
    python benchmarks/engine.py --ahead
    python benchmarks/engine.py --model golden --recordings all --batch-sizes 1,16
    python benchmarks/engine.py --model llada-8b-shape --device cuda --graphs
    python benchmarks/engine.py --model llada-8b-shape --device cuda --graphs --compile
    python benchmarks/engine.py --model llada-8b-shape --toy

Models: ``box``, the small trained one that ships with the package; ``golden``, the recorded
decodings and their tiny models, whose tokens must come out; ``llada-8b-shape``, LLaDA-8B's shapes
with random weights, on the published run's ladder (arXiv 2608.23807: ``skip_threshold`` 1, a block
every 29 steps, GSM8K's 6 to 16 blocks), which needs a GPU unless ``--toy`` shrinks model and
requests.

All requests are there from the start and run through so many slots; one slot is per-request
dispatch, one request after the other. Figures are of the fastest of ``--rounds`` interleaved
rounds. ``alike`` counts the answers that are those of dispatch, token for token: all of them, or
this ends with an error, in float64 and where float32 is known to keep every decision (``golden``).
With ``--ahead`` a step is planned and launched while one runs; a slot is refilled a step later
then.

A step's wall time is shared out: ``forward`` inside the model (``forward_s`` of the engine: on CUDA
from launch to results, which includes reading out), ``decode`` the rest of ``engine.run`` and
``release``, ``scheduler`` all of its calls, ``driver`` what is left: the loop itself, Python, and
whatever is accounted for nowhere. ``alone``: after some of the steps the same forward and head run
again on the same packed tokens, with nothing around them; their share of the whole step is how near
the step comes to its roofline, and ``dense`` is how long they take against a plain ``[rows, tokens
per row]`` forward of as many tokens, without cache, raggedness or padding. ``wasted``: tokens that
went through forwards though no row needed them (padding, steps of rows that had ended); what a row
needs is counted from its trace at the largest batch, and exact where answers are alike. ``peak`` is
the device's; on a CPU that of the whole process, which only grows. ``GPU busy``: the time in which
any kernel ran, over the wall time of the same steps. Events around a step that ends in a copy back
would measure its wall time again. ``--graphs`` serves all twice more with steps as graphs, and the
second time, when they have been captured, counts: ``captured`` is their number, ``replayed`` the
share of steps that ran as one, ``wasted`` their padding. ``--compile`` has all engines compile what
a block does beside attention, before the run that counts.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "data" / "golden"
RECORDINGS = (
    "d2f_gsm8k_b64",
    "d2f_train_b16",
    "fast_dllm_nocache_thr09",
    "fast_dllm_prefix_thr09",
    "fast_dllm_dual_thr09",
    "fast_dllm_dual_factor1",
    "llada_g64_b16_s32",
    "llada_g32_b32_s32_cfg",
)
MIB = 2**20
SHARES = ("forward", "decode", "scheduler", "driver")
GRAPH_FIGURES = (
    "graph_step_s",
    "graph_requests_per_s",
    "graph_gain",
    "graph_gpu_busy",
    "graph_captures",
    "graph_replays",
    "graph_wasted",
    "graph_alike",
)
PUBLISHED = (
    "Published of LLaDA-8B + D2F on one H200 (arXiv 2608.23807): one request at a time 0.149 "
    "requests/s, 24.1 ms a step, kernels 24.4 % of the wall time; batches of 8 0.916 requests/s = "
    "6.2 times. 16.0 times at 16 is a claim whose raw data are not public."
)


class Workload(NamedTuple):
    """Requests, and the engine that they are for."""

    name: str
    model: Any
    engine_type: Any
    requests: list[Any]
    guarded: bool  # whether float32 keeps every decision
    tokens: dict[str, list[int]] = {}  # noqa: RUF012 - of the answers, where they are known
    forwards: dict[str, int] = {}  # noqa: RUF012 - likewise
    compiled: bool = False


class Run(NamedTuple):
    """All requests served once."""

    forwards: int
    tokens: int
    forward_s: float
    outputs: dict[str, Any]
    wall_s: float
    engine_s: float
    scheduler_s: float
    row_steps: int


class GraphRun(NamedTuple):
    """All requests served once more, with steps as graphs that had been captured before."""

    wall_s: float
    run: Run
    captures: int  # before the run, and perhaps a few in it
    replays: int
    padding: int
    gpu_busy: float | None


# --- models and requests --------------------------------------------------------------------------


def box_workload(options: argparse.Namespace) -> Workload:
    from dllm_sched_hf import D2FEngine, D2FRequest, box, load_model

    model = load_model(
        box.box_model_dir(), box.box_lora_dir(), device=options.device, dtype=options.dtype
    )
    pairs = box.task.sample_requests(options.requests or 192, options.seed, distinct=True)
    requests = [
        D2FRequest(str(number), prompt=box.task.encode_prompt(prompt), **box.DECODING)
        for number, (prompt, _) in enumerate(pairs)
    ]
    return Workload("box", model, D2FEngine, requests, guarded=False)


def golden_workload(name: str, options: argparse.Namespace, *, merge: bool = True) -> Workload:
    """The recorded requests, or the first so many; with a LoRA in the weights or beside them."""
    from dllm_sched_hf import load_model, parity

    path = GOLDEN / f"{name}.json.gz"
    record = parity._read_record(path)
    entries = record["requests"]
    lora = GOLDEN / f"{record['model']}_lora" if record["lora"] else None
    model = load_model(
        GOLDEN / record["model"], lora, merge=merge, device=options.device, dtype=options.dtype
    )
    requests, tokens, forwards = [], {}, {}
    for entry in entries[: options.requests]:
        request, _ = parity._case(path.name, record, entry)
        requests.append(request)
        if options.dtype in {"float32", "float64"}:
            tokens[request.id] = entry["output"]
            forwards[request.id] = entry[parity._count_of(entry)]
    engine_type = parity._ENGINES[record["kind"]]
    return Workload(name, model, engine_type, requests, True, tokens, forwards)


def shape_workload(options: argparse.Namespace) -> Workload:
    """LLaDA-8B's shapes with random weights, or a toy with the same code; lengths are GSM8K's."""
    import numpy as np
    import torch

    from dllm_sched.sim.lengths import Histogram, LogNormal
    from dllm_sched.sim.shapes import LadderSteps, Shapes, gsm8k
    from dllm_sched.theory.ladder import StepLadder
    from dllm_sched_hf import D2FEngine, D2FRequest, LLaDAConfig, LLaDAModelLM

    thresholds = {"block_add_threshold": 0.5, "decoded_token_threshold": 0.9}
    if options.toy:
        config = LLaDAConfig(
            d_model=64, n_layers=2, n_heads=4, mlp_hidden_size=128, vocab_size=256,
            max_sequence_length=128, mask_token_id=255, eos_token_id=254, pad_token_id=254,
        )  # fmt: skip
        decoder = LadderSteps(StepLadder(8, **thresholds))
        prompt = LogNormal(20, 0.35, 64, low=8)
        shapes = Shapes(Histogram({1: 1, 2: 1, 3: 1, 4: 1}), prompt=prompt, decoder=decoder)
        count = options.requests or 8
    else:
        config = LLaDAConfig(mlp_hidden_size=12288)
        shapes = gsm8k(LogNormal(76, 0.35, 256, low=24))
        count = options.requests or 64
    with torch.device("meta"):
        model = LLaDAModelLM(config).eval()
    model = model.to(getattr(torch, options.dtype)).to_empty(device=options.device)
    torch.manual_seed(options.seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # of a norm
                weight.fill_(1.0)
            else:  # keeps the size of what it multiplies, so that logits differ by much
                weight.normal_(0.0, weight.shape[1] ** -0.5)
    draw = random.Random(options.seed)
    requests, forwards = [], {}
    for number, work in enumerate(shapes.draw(np.random.default_rng(options.seed), count)):
        request = D2FRequest(
            str(number),
            prompt=[draw.randrange(config.eos_token_id) for _ in range(work.prompt_len)],
            max_new_tokens=work.num_blocks * work.block_length,
            block_length=work.block_length,
            skip_threshold=1.0,
            temperature=options.temperature,
            seed=number,
            stop_token_ids=(),  # random weights have no ends
            **thresholds,
        )
        requests.append(request)
        forwards[request.id] = work.num_steps
    name = "llada-8b-shape, toy" if options.toy else "llada-8b-shape"
    return Workload(name, model, D2FEngine, requests, False, {}, forwards)


def workloads(options: argparse.Namespace) -> Iterator[Workload]:
    if options.model == "golden":
        found = (golden_workload(name, options) for name in options.recordings.split(","))
    else:
        found = iter([box_workload(options) if options.model == "box" else shape_workload(options)])
    for work in found:
        told = f"{work.name}, compiled" if options.compile else work.name
        yield work._replace(name=told, compiled=options.compile)


# --- one run --------------------------------------------------------------------------------------


def build(work: Workload, batch_size: int, *, ahead: bool = False, **more: Any) -> tuple[Any, Any]:
    """An engine with so many slots and a scheduler for it."""
    max_len = max(request.max_total_tokens for request in work.requests)
    engine = work.engine_type(
        work.model,
        max_num_seqs=batch_size,
        max_len=max_len,
        clock=perf_counter,
        compile_forward=work.compiled,
        **more,
    )
    return engine, fresh_scheduler(engine, ahead=ahead)


def fresh_scheduler(engine: Any, *, ahead: bool = False) -> Any:
    """A scheduler for all slots of an engine in which no request is left."""
    from dllm_sched import Scheduler, presets

    size = engine.max_num_seqs
    policy = presets.per_request() if size == 1 else presets.continuous(size)
    return Scheduler(policy=policy, capacity=engine.capacity(), max_in_flight=2 if ahead else 1)


def serve(work: Workload, batch_size: int, *, ahead: bool = False, **more: Any) -> Run:
    """Serve all requests through the driver."""
    return play(work, *build(work, batch_size, ahead=ahead, **more))


def play(work: Workload, engine: Any, scheduler: Any) -> Run:
    """Serve all requests by an engine, which may have served others."""
    from dllm_sched.runtime import Driver

    before = engine.num_forwards, engine.num_tokens, engine.forward_s
    outputs: dict[str, Any] = {}
    row_steps = 0

    def heard(update: Any) -> None:
        nonlocal row_steps
        if update.batch is not None:
            row_steps += len(update.batch.rows)
        for end in update.finished:
            outputs[end.request.id] = end.output

    driver = Driver(scheduler, engine, on_update=heard)
    began = perf_counter()
    report = driver.run((0.0, request) for request in work.requests)
    wall_s = perf_counter() - began
    for wanted, name in ((work.tokens, "tokens"), (work.forwards, "num_forwards")):
        for key, value in wanted.items():
            got = getattr(outputs[key], name)
            got = list(got) if name == "tokens" else got
            assert got == value, f"{work.name}: request {key}: {name} {value}, got {got}"
    return Run(
        engine.num_forwards - before[0],
        engine.num_tokens - before[1],
        engine.forward_s - before[2],
        outputs,
        wall_s,
        report.engine_s,
        report.scheduler_s,
        row_steps,
    )


def loop(engine: Any, scheduler: Any, requests: Iterable[Any]) -> Iterator[tuple[int, float]]:
    """Serve without a driver; yield the rows and the seconds of each step."""
    for request in requests:
        scheduler.submit(request, now=0.0)
    scheduler.drain(now=0.0)
    while scheduler.has_work():
        began = perf_counter()
        update = scheduler.next_step(now=0.0)
        engine.release(update.released)
        outcome = engine.run(update.batch)
        engine.release(scheduler.complete_step(update.batch, outcome, now=0.0).released)
        yield len(update.batch.rows), perf_counter() - began


@contextmanager
def recorded(model: Any) -> Iterator[list[partial[Any]]]:
    """Note what the steps ask of a model, to be asked again, in a list that the caller clears."""
    calls: list[partial[Any]] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(partial(function, *args))
            return function(*args)

        return call

    model.forward_packed, model.logits = noted(model.forward_packed), noted(model.logits)
    try:
        yield calls
    finally:
        del model.forward_packed, model.logits


def beside_the_forward_alone(
    work: Workload, batch_size: int, *, samples: int, every: int
) -> dict[str, float | None]:
    """Run the forward of every so many steps again, and a dense one of as many tokens.

    Returns:
        ``alone``, the share of the forward alone in the whole step, and ``dense``, the ratio of the
        forward to a dense one: medians over the samples; None if there are none.
    """
    import torch

    engine, scheduler = build(work, batch_size)
    model, device = engine.model, engine.model.device

    def timed(run: Callable[[], object]) -> float:
        began = perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter() - began

    alone, dense = [], []
    with recorded(model) as calls:
        for number, (rows, step_s) in enumerate(loop(engine, scheduler, work.requests)):
            if calls and number % every == every - 1:
                sent = calls[0].args[0].shape[0]
                with torch.inference_mode():
                    again_s = timed(lambda: [call() for call in calls])
                    ids = torch.zeros((rows, max(1, round(sent / rows))), dtype=torch.int64)
                    ids = ids.to(device)
                    dense_s = timed(lambda ids=ids: model(ids))
                alone.append(again_s / step_s)
                dense.append(again_s / dense_s)
            calls.clear()
            if len(alone) == samples:
                break
    if not alone:
        return {"alone": None, "dense": None}
    return {"alone": statistics.median(alone), "dense": statistics.median(dense)}


def gpu_busy(work: Workload, engine: Any, scheduler: Any, steps: int) -> float:
    """Return the share of wall time in which the GPU ran anything, over some steps."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    run = loop(engine, scheduler, work.requests)
    next(run)  # the first step warms up
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        wall_s = sum(step_s for _, step_s in itertools.islice(run, steps))
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA
    ]
    return covered(spans) * 1e-6 / wall_s


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals: what runs at once counts once."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


# --- measuring ------------------------------------------------------------------------------------


def measure(work: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """Run every batch size and return what to tell about each."""
    import torch

    sizes = sorted({1, *options.batch_sizes})
    on_gpu = options.device.startswith("cuda")
    # What each row needs, by its trace; the same whoever shares its batch.
    traced = serve(work, sizes[-1], trace=True).outputs
    needed = sum(needed_tokens(each, traced[each.id].trace) for each in work.requests)
    runs: dict[int, Run] = {}
    as_graphs: dict[int, GraphRun] = {}
    peaks: dict[int, int] = {}
    for _, size in itertools.product(range(options.rounds), sizes):
        gc.collect()  # the engine before this one, and its cache
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        run = serve(work, size, ahead=options.ahead)
        peaks[size] = torch.cuda.max_memory_allocated() if on_gpu else resident_bytes()
        keep_fastest(runs, size, run)
        if options.graphs:
            keep_fastest(as_graphs, size, serve_as_graphs(work, size, options))
    dispatch = runs[1]
    exact = options.dtype == "float64" or (options.dtype == "float32" and work.guarded)
    batches = []
    for size in sizes:
        run = runs[size]
        every = max(1, min(10, run.forwards // options.samples))
        aside = beside_the_forward_alone(work, size, samples=options.samples, every=every)
        aside["gpu_busy"] = gpu_busy(work, *build(work, size), options.samples) if on_gpu else None
        alike = sum(run.outputs[key].tokens == out.tokens for key, out in dispatch.outputs.items())
        assert alike == len(work.requests) or not exact, (
            f"{work.name}: {len(work.requests) - alike} answers at batch {size} differ from those "
            "of dispatch"
        )
        aside |= graph_figures(run, as_graphs.get(size))
        batches.append(
            told(run, size, needed)
            | {"times_dispatch": dispatch.wall_s / run.wall_s, "alike": alike}
            | aside
            | {"peak_bytes": peaks[size], "budget_bytes": budget(work, size)}
        )
    return {"name": work.name, "requests": len(work.requests), "batches": batches}


def keep_fastest(runs: dict[int, Any], size: int, run: Any) -> None:
    if size not in runs or run.wall_s < runs[size].wall_s:
        runs[size] = run


def capture(options: argparse.Namespace) -> Callable[[Any], Any]:
    """How steps become graphs; on a CPU only their padding is real: they are called again."""
    from dllm_sched_hf import capture_cuda

    return capture_cuda if options.device.startswith("cuda") else lambda body, _pool: body


def serve_as_graphs(work: Workload, batch_size: int, options: argparse.Namespace) -> GraphRun:
    """Serve all requests twice: graphs are captured in the first run, and the second counts."""
    engine, scheduler = build(work, batch_size, capture=capture(options))
    for _ in loop(engine, scheduler, work.requests):
        pass
    stats = engine.graph_stats
    replays, padding = stats.replays, stats.padding
    run = play(work, engine, fresh_scheduler(engine, ahead=options.ahead))
    replays, padding = stats.replays - replays, stats.padding - padding
    busy = None
    if options.device.startswith("cuda"):
        busy = gpu_busy(work, engine, fresh_scheduler(engine), options.samples)
    return GraphRun(run.wall_s, run, stats.captures, replays, padding, busy)


def graph_figures(run: Run, again: GraphRun | None) -> dict[str, Any]:
    """What graphs bring: times as fast; how many, the share of steps that ran as one, padding."""
    if again is None:
        return dict.fromkeys(GRAPH_FIGURES)
    alike = sum(again.run.outputs[key].tokens == out.tokens for key, out in run.outputs.items())
    figures = (
        again.wall_s / again.run.forwards,
        len(run.outputs) / again.wall_s,
        run.wall_s / again.wall_s,
        again.gpu_busy,
        again.captures,
        again.replays / again.run.forwards,
        again.padding / (again.run.tokens + again.padding),
        alike,
    )
    return dict(zip(GRAPH_FIGURES, figures, strict=True))


def needed_tokens(request: Any, trace: Sequence[dict[str, Any]]) -> int:
    """Return how many tokens a row has to send through its forwards, by its decoder's rule."""
    from dllm_sched_hf import D2FRequest, FastDLLMRequest

    if isinstance(request, D2FRequest):
        return sum(step["len"] for step in trace)
    canvas = request.max_total_tokens
    if not isinstance(request, FastDLLMRequest):
        return canvas * len(trace) * (2 if request.cfg_scale else 1)
    window = {"none": canvas, "prefix": canvas - request.prompt_len, "dual": request.block_length}
    total = 0
    for step in trace:
        before = step["block"] * request.block_length if request.cache == "prefix" else 0
        total += canvas if step["full"] else window[request.cache] - before
    return total


def told(run: Run, batch_size: int, needed: int) -> dict[str, Any]:
    """Figures of one run."""
    seconds = (
        run.forward_s,
        run.engine_s - run.forward_s,
        run.scheduler_s,
        run.wall_s - run.engine_s - run.scheduler_s,
    )
    answered = sum(len(output.tokens) for output in run.outputs.values())
    return {
        "batch_size": batch_size,
        "steps": run.forwards,
        "rows_per_step": run.row_steps / run.forwards,
        "tokens_per_forward": run.tokens / run.forwards,
        "answer_tokens_per_forward": answered / run.forwards,
        "wasted_tokens": 1 - needed / run.tokens,
        "step_s": run.wall_s / run.forwards,
        "shares": {name: s / run.wall_s for name, s in zip(SHARES, seconds, strict=True)},
        "requests_per_s": len(run.outputs) / run.wall_s,
        "tokens_per_s": answered / run.wall_s,
    }


def budget(work: Workload, batch_size: int) -> int:
    """Bytes of the weights and of the KV cache that the engine sets aside."""
    config = work.model.config
    weights = sum(p.numel() * p.element_size() for p in work.model.parameters())
    if not work.engine_type.decoder_type.caches:
        return weights
    max_len = max(request.max_total_tokens for request in work.requests)
    values = 2 * config.n_layers * batch_size * max_len * config.n_kv_heads * config.head_dim
    return weights + values * next(work.model.parameters()).element_size()


def resident_bytes() -> int:
    """The most that this process has had in memory so far."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def machine(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0].partition(":")[2].strip() if names else processor
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    on_gpu = options.device.startswith("cuda")
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(options.device) if on_gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "threads": torch.get_num_threads(),
        "dtype": options.dtype,
        "commit": commit.stdout.strip() or None,
    }


# --- telling --------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "" if value is None else f"{value:,.{digits}f}{unit}"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def tables(result: dict[str, Any], *, on_gpu: bool) -> None:
    """Print a workload's figures as Markdown."""
    batches = result["batches"]
    print(f"\n**{result['name']}**, {result['requests']} requests\n")
    gpu = " GPU busy |" if on_gpu else ""
    print(
        f"| batch | steps | rows | ms a step | {' | '.join(SHARES)}, unaccounted |{gpu} alone | "
        "dense |"
    )
    print(f"|{'---|' * (10 + on_gpu)}")
    for one in batches:
        shares = [percent(one["shares"][name]) for name in SHARES]
        if on_gpu:
            shares.append(percent(one["gpu_busy"]))
        cells = [
            f"{one['batch_size']}",
            f"{one['steps']:,}",
            number(one["rows_per_step"]),
            number(one["step_s"] * 1e3, 2),
            *shares,
            percent(one["alone"]),
            number(one["dense"], 2),
        ]
        print(f"| {' | '.join(cells)} |")
    print(
        "\n| batch | requests/s | tokens/s | times dispatch | tokens a forward | answer tokens a "
        "forward | wasted | alike | peak MiB | weights and cache, MiB |"
    )
    print(f"|{'---|' * 10}")
    for one in batches:
        cells = [
            f"{one['batch_size']}",
            number(one["requests_per_s"], 1 if one["requests_per_s"] > 10 else 3),
            number(one["tokens_per_s"], 0),
            number(one["times_dispatch"], 2),
            number(one["tokens_per_forward"]),
            number(one["answer_tokens_per_forward"], 2),
            percent(one["wasted_tokens"]),
            f"{one['alike']}",
            number(one["peak_bytes"] / MIB, 0),
            number(one["budget_bytes"] / MIB, 0),
        ]
        print(f"| {' | '.join(cells)} |")
    if batches[0]["graph_gain"] is None:
        return
    what = "CUDA graphs" if on_gpu else "graphs that are called again, for a CPU captures none"
    print(f"\nWith steps as {what}:\n")
    print(
        f"| batch | ms a step | requests/s | times as fast |{gpu} captured | replayed | wasted | "
        f"alike |\n|{'---|' * (8 + on_gpu)}"
    )
    for one in batches:
        cells = [
            f"{one['batch_size']}",
            number(one["graph_step_s"] * 1e3, 2),
            number(one["graph_requests_per_s"], 1 if one["graph_requests_per_s"] > 10 else 3),
            number(one["graph_gain"], 2),
            *([percent(one["graph_gpu_busy"])] if on_gpu else []),
            f"{one['graph_captures']}",
            percent(one["graph_replays"]),
            percent(one["graph_wasted"]),
            f"{one['graph_alike']}",
        ]
        print(f"| {' | '.join(cells)} |")


def plot(results: Sequence[dict[str, Any]], path: str) -> None:
    """Draw where a step's time goes (of the first workload) and what batching brings (of all)."""
    from matplotlib.figure import Figure

    from dllm_sched.sim.plots import save

    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    batches = results[0]["batches"]
    labels = [str(one["batch_size"]) for one in batches]
    bottom = [0.0] * len(batches)
    for name in SHARES:
        heights = [1e3 * one["step_s"] * one["shares"][name] for one in batches]
        label = "driver, unaccounted" if name == "driver" else name
        left.bar(labels, heights, bottom=bottom, label=label)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    left.set(xlabel="slots", ylabel="ms a step", title=f"{results[0]['name']}: a step's time")
    left.legend(title="from below")
    for result in results:
        sizes = [one["batch_size"] for one in result["batches"]]
        times = [one["times_dispatch"] for one in result["batches"]]
        right.plot(sizes, times, "o-", label=result["name"])
    right.plot(sizes, sizes, ":", color="#888888", label="as many times as slots")
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_formatter("{x:g}")
    right.set(xlabel="slots", ylabel="requests/s, times dispatch", title="Batching")
    right.grid(visible=True, color="#DDDDDD")
    right.legend()
    save(figure, path)


# --- command line ---------------------------------------------------------------------------------


def sizes(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if not 1 <= min(found) <= max(found) <= 4096:
        raise ValueError
    return found


def positive(text: str) -> int:
    if not 1 <= int(text) < 2**31:
        raise ValueError
    return int(text)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", default="box", choices=("box", "golden", "llada-8b-shape"))
    add("--toy", action="store_true", help="llada-8b-shape in a size for any CPU")
    add("--recordings", default=RECORDINGS[0], help="of golden, with commas between, or all")
    add("--device", default="cpu", help="cpu, cuda, ...; default: cpu")
    dtypes = ("float32", "bfloat16", "float16", "float64")
    usual = "default: bfloat16 for llada-8b-shape on cuda, else float32"
    add("--dtype", choices=dtypes, help=usual)
    add("--batch-sizes", type=sizes, default=[1, 2, 4, 8, 16, 32, 64], help="1 always runs")
    add("--requests", type=positive, help="default: 192 (box), all (golden), 64, 8 (toy)")
    add("--ahead", action="store_true", help="plan and launch a step while one runs")
    add("--compile", action="store_true", help="measure with compiled blocks")
    add("--graphs", action="store_true", help="measure with steps as CUDA graphs, too")
    add("--rounds", type=positive, help="default: 3, or 1 for llada-8b-shape in full size")
    add("--samples", type=positive, default=40, help="steps whose forward runs again; default: 40")
    add(
        "--temperature",
        type=float,
        default=0.2,
        help="of llada-8b-shape; default: 0.2, the published run's",
    )
    add("--threads", type=positive, default=1, help="of torch; default: 1")
    add("--seed", type=int, default=2, help="of requests and random weights; default: 2")
    add("--json", action="store_true", help="print one JSON object, nothing else")
    add("--plot", metavar="FILE", help="write a picture there")
    options = parser.parse_args(argv)
    full_size = options.model == "llada-8b-shape" and not options.toy
    on_gpu = options.device.startswith("cuda")
    if full_size and not on_gpu:
        parser.error("llada-8b-shape needs --device cuda (16 GB of weights), or --toy")
    if options.toy and options.model != "llada-8b-shape":
        parser.error("--toy goes with --model llada-8b-shape")
    if options.dtype is None:
        options.dtype = "bfloat16" if full_size else "float32"
    if options.rounds is None:
        options.rounds = 1 if full_size else 3
    if options.recordings == "all":
        options.recordings = ",".join(RECORDINGS)
    for name in options.recordings.split(","):
        if not (GOLDEN / f"{name}.json.gz").is_file():
            parser.error(f"--recordings: {name!r} is none; there are {', '.join(RECORDINGS)}")
    return options


def main() -> None:
    """Print the tables; draw if asked."""
    options = parse_args()
    import torch

    from dllm_sched.errors import ConfigError
    from dllm_sched_hf.loading import resolve_device

    torch.set_num_threads(options.threads)
    try:
        on_gpu = resolve_device(options.device).type == "cuda"
    except ConfigError as error:
        print(f"error: --device: {error}", file=sys.stderr)
        sys.exit(2)
    facts = machine(options)
    if not options.json:
        print(", ".join(f"{name} {value}" for name, value in facts.items() if value is not None))
    results = []
    for work in workloads(options):
        results.append(measure(work, options))
        if not options.json:
            tables(results[-1], on_gpu=on_gpu)
    if options.json:
        print(json.dumps({"machine": facts, "options": vars(options), "workloads": results}))
    elif options.model == "llada-8b-shape" and not options.toy:
        print(f"\n{PUBLISHED}")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
