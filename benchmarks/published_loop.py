"""The engine against the published D2F loop, which serves one request at a time, and what is left.

    python benchmarks/published_loop.py
    python benchmarks/published_loop.py --recordings all --batch-sizes 1,4,16,64 --threads 2

The loop is a stand-in, in own words, for that of the public evaluation script, which was not run
here. Its forward does the same operations: a LoRA that PEFT keeps beside the weights, a cache that
grows by ``torch.cat``, keys kept unrotated and all turned again at each forward, an explicit mask
put together anew for each step. So does its decoding: one request at a time; for each block copies
and sums of the whole sequence's masks and a softmax over the vocabulary; commits written and read
back one by one. It leaves out the text of the answer so far, which the public one makes at every
step, and the calls of modules and wrappers around its forward.

Both serve the same requests in one process with as many threads, in ``--rounds`` interleaved
rounds of which the fastest counts, in wall time. What the public loop was said to reach elsewhere
stands beside what the stand-in reaches here; nothing is fitted to it.

How much more is possible at all, from every forward of the engine run again on the same packed
tokens: ``forward alone``, with nothing around it; ``products alone``, of that only the products of
matrices and the attention, on the same operands, without the norms, rotations, copies and sums
between them, and the rate at which they run; ``at the peak``, as many operations at the rate of
one large product, by the faster of two libraries. Each is given in requests/s and as times the
loop.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from engine import (
    GOLDEN,
    Workload,
    build,
    golden_workload,
    loop,
    machine,
    number,
    percent,
    positive,
    recorded,
    serve,
    sizes,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dllm_sched_hf import D2FRequest, LLaDAConfig, LLaDAModelLM, block_causal_mask

RECORDINGS = ("d2f_train_b16", "d2f_gsm8k_b64", "d2f_math_humaneval_b32")
PUBLISHED = {  # of the public loop on the recordings, on two cores of another machine: least, most
    "requests_per_s": (12, 25),
    "step_s": (1.2e-3, 1.7e-3),
    "forward_s": (0.8e-3, 1.4e-3),
    "forward_share": (0.70, 0.84),
}
# Products by the name of the function: which argument's last dimension is summed over.
PRODUCTS = {
    "linear": 0,
    "_linear_pointwise": 0,
    "matmul": 0,
    "mm": 0,
    "bmm": 0,
    "addmm": 1,
    "addmm_": 1,
    "baddbmm": 1,
}
ATTENTION = "scaled_dot_product_attention"


# --- the loop -------------------------------------------------------------------------------------


class LoopRun(NamedTuple):
    """All requests served one after the other."""

    wall_s: float
    forward_s: float  # of that, in the model
    forwards: int


class Answer(NamedTuple):
    tokens: list[int]
    forwards: int
    forward_s: float


@dataclass
class Block:
    """A block of the sequence; the prompt is the first one."""

    start: int
    end: int
    left: int  # masks
    state: str = "active"  # then "to cache", then "cached"
    complete: bool = False  # may be forced to commit

    @property
    def decoded(self) -> float:
        return (self.end - self.start - self.left) / (self.end - self.start)


def rotary_table(config: LLaDAConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[length, head_dim]`` of every position."""
    even = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequency = 1.0 / config.rope_theta ** (even / config.head_dim)
    angle = torch.outer(torch.arange(config.max_sequence_length), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    return norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps))


def forward(
    model: LLaDAModelLM,
    table: tuple[Tensor, Tensor],
    ids: Tensor,
    cache: list[tuple[Tensor, Tensor]],
    bias: Tensor,
    kept: int,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Run the tokens that follow the cached ones.

    Returns:
        Their logits, and the keys and values of so many first positions.
    """
    config, parts = model.config, model.model.transformer
    share = config.n_heads // config.n_kv_heads
    num_new, num_keys = bias.shape[-2:]
    cos, sin = (x[:num_keys] for x in table)
    new_cos, new_sin = cos[-num_new:], sin[-num_new:]
    x = parts.wte(ids)
    grown = []
    for layer, block in enumerate(parts.blocks):
        h = rms_norm(x, block.attn_norm)
        q, k, v = (
            project(h).view(1, num_new, -1, config.head_dim).transpose(1, 2)
            for project in (block.q_proj, block.k_proj, block.v_proj)
        )
        if cache:
            k, v = (torch.cat(pair, 2) for pair in zip(cache[layer], (k, v), strict=True))
        grown.append((k[:, :, :kept], v[:, :, :kept]))
        with torch.autocast("cpu", enabled=False):
            q, k = turn(q, new_cos, new_sin), turn(k, cos, sin)
        if share > 1:
            k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + block.attn_out(out.transpose(1, 2).reshape(1, num_new, -1))
        h = rms_norm(x, block.ff_norm)
        x = x + block.ff_out(F.silu(block.ff_proj(h)) * block.up_proj(h))
    return parts.ff_out(rms_norm(x, parts.ln_f)), grown


def seen(bias: Tensor, start: int, end: int, cached: int) -> Tensor:
    """Return a step's part of the whole bias, put together anew."""
    part = torch.full((1, 1, end - start, cached + end - start), -math.inf)
    part[..., :cached] = bias[..., start:end, :cached]
    part[..., cached:] = bias[..., start:end, start:end]
    return part


def within(masked: Tensor, block: Block) -> Tensor:
    """Return where a sequence is masked, as far as a block goes."""
    own = masked.clone()
    own[:, : block.start] = False
    own[:, block.end :] = False
    return own


@torch.inference_mode()
def generate(model: LLaDAModelLM, table: tuple[Tensor, Tensor], request: D2FRequest) -> Answer:
    """Decode one request to its end."""
    mask_id, length = model.config.mask_token_id, request.block_length
    prompt_len = len(request.prompt)
    whole = prompt_len + request.max_blocks * length
    visible = block_causal_mask(prompt_len, length, whole)
    bias = torch.zeros(1, 1, whole, whole).masked_fill_(~visible, -math.inf)
    x = torch.tensor([request.prompt])
    blocks = [Block(0, prompt_len, 0, "to cache", complete=True)]
    cache: list[tuple[Tensor, Tensor]] = []
    cached, forwards, forward_s, stopped = 0, 0, 0.0, False
    while True:
        last = blocks[-1]
        if (
            len(blocks) <= request.max_blocks
            and not stopped
            and last.decoded >= request.block_add_threshold
        ):
            blocks.append(Block(last.end, last.end + length, length))
            x = torch.cat((x, torch.tensor([[mask_id] * length])), 1)
        for before, block in itertools.pairwise(blocks):
            if before.decoded >= request.decoded_token_threshold:
                block.complete = True
        masked = x == mask_id
        if masked.sum() == 0 and all(block.state != "active" for block in blocks):
            return Answer(x[0, prompt_len:].tolist(), forwards, forward_s)

        start = next(block.start for block in blocks if block.state != "cached")
        finished = [block for block in blocks if block.state == "to cache"]
        kept = finished[-1].end if finished else cached
        part = seen(bias, start, x.shape[1], cached)
        began = perf_counter()
        logits, grown = forward(model, table, x[:, start:], cache, part, kept)
        forward_s += perf_counter() - began
        forwards += 1
        if finished:
            cache, cached = grown, kept
            for block in finished:
                block.state = "cached"

        for place, block in enumerate(blocks):
            if block.state != "active":
                continue
            own = within(masked, block)
            if own.sum():
                at = torch.where(own[0, block.start : block.end])[0]
                found = logits[:, block.start - start + at, :].squeeze(0)
                confidence, token = torch.softmax(found, -1).max(-1)
                chosen = torch.where(confidence > request.skip_threshold)[0]
                if block.complete:
                    none = torch.tensor([], dtype=torch.int64)
                    best = none if len(chosen) else confidence.topk(1).indices
                    chosen = torch.unique(torch.cat((best, chosen)))
                if len(chosen):
                    committed = torch.full_like(token, mask_id)
                    committed[chosen] = token[chosen]
                    for index in chosen:
                        x[0, block.start + at[index]] = committed[index]
                    block.left -= len(chosen)
                    stopped |= any(
                        token[index].item() in request.stop_token_ids for index in chosen
                    )
                masked = x == mask_id
                own = within(masked, block)
            if own.sum() == 0 and all(one.state != "active" for one in blocks[:place]):
                block.state = "to cache"


def serve_one_by_one(model: LLaDAModelLM, work: Workload) -> LoopRun:
    """Run the loop; its tokens and forwards must be the recorded ones."""
    table = rotary_table(model.config)
    began = perf_counter()
    answers = [generate(model, table, request) for request in work.requests]
    wall_s = perf_counter() - began
    for request, answer in zip(work.requests, answers, strict=True):
        for name, value, got in (
            ("tokens", work.tokens[request.id], answer.tokens),
            ("forwards", work.forwards[request.id], answer.forwards),
        ):
            assert got == value, f"{work.name}: request {request.id}: {name} {value}, got {got}"
    forward_s = sum(answer.forward_s for answer in answers)
    return LoopRun(wall_s, forward_s, sum(answer.forwards for answer in answers))


# --- what is possible -----------------------------------------------------------------------------


class Floor(NamedTuple):
    """What the forwards of one run take by themselves."""

    forward_s: float
    products_s: float
    flops: int  # of the products


class Products(TorchFunctionMode):
    """Notes every product of matrices and every attention, to be done again without the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[partial[Tensor]] = []
        self.flops = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in PRODUCTS or name == ATTENTION:
            self.calls.append(partial(func, *args, **(kwargs or {})))
            if name == ATTENTION:  # its scores, and their product with as many values
                self.flops += 4 * out.numel() * args[1].shape[-2]
            else:
                self.flops += 2 * out.numel() * args[PRODUCTS[name]].shape[-1]
        return out


def floor(work: Workload, batch_size: int) -> Floor:
    """Serve all requests; run each forward again, and then its products."""
    engine, scheduler = build(work, batch_size)
    forward_s = products_s = 0.0
    flops = 0
    with recorded(engine.model) as calls:
        for _ in loop(engine, scheduler, work.requests):
            with torch.inference_mode():
                with Products() as products:
                    again(calls)
                forward_s += again(calls)
                products_s += again(products.calls)
            flops += products.flops
            calls.clear()
    return Floor(forward_s, products_s, flops)


def again(calls: Sequence[Callable[[], object]]) -> float:
    """Return the seconds that the calls take."""
    began = perf_counter()
    for call in calls:
        call()
    return perf_counter() - began


def peak_flops_per_s() -> dict[str, float]:
    """The rate of a product of 1,024 x 1,024, the best of ten, as torch does it and by oneDNN.

    torch leaves float32 to MKL, which has no AVX-512 code for other makers' processors.
    """
    a, b = torch.randn(2, 1024, 1024)
    products = {"torch": partial(torch.mm, a, b)}
    if torch.backends.mkldnn.is_available():
        linear = torch.ops.mkldnn._linear_pointwise
        products["oneDNN"] = partial(linear, a, b, None, "none", [], "")
    return {
        name: 2 * 1024**3 / min(again([product]) for _ in range(10))
        for name, product in products.items()
    }


# --- measuring ------------------------------------------------------------------------------------


def measure(name: str, options: argparse.Namespace, peak: float) -> dict[str, Any]:
    """Serve one recording by the loop and by the engine; say what is possible."""
    work = golden_workload(name, options)
    beside = golden_workload(name, options, merge=False).model
    generate(beside, rotary_table(beside.config), work.requests[0])  # warms up
    loops: list[LoopRun] = []
    runs: dict[int, list[Any]] = {size: [] for size in options.batch_sizes}
    floors: dict[int, list[Floor]] = {size: [] for size in options.batch_sizes}
    for _ in range(options.rounds):
        gc.collect()
        loops.append(serve_one_by_one(beside, work))
        for size in options.batch_sizes:
            gc.collect()  # the engine before this one, and its cache
            runs[size].append(serve(work, size))
            floors[size].append(floor(work, size))
    best = min(loops, key=lambda run: run.wall_s)
    count = len(work.requests)

    def rate(seconds: float) -> dict[str, float]:
        return {"requests_per_s": count / seconds, "times_loop": best.wall_s / seconds}

    batches = []
    for size in options.batch_sizes:
        run = min(runs[size], key=lambda run: run.wall_s)
        forward_s = min(one.forward_s for one in floors[size])
        products_s = min(one.products_s for one in floors[size])
        flops = floors[size][0].flops
        batches.append(
            {"batch_size": size, "step_s": run.wall_s / run.forwards}
            | rate(run.wall_s)
            | {"forward_alone": rate(forward_s), "products_alone": rate(products_s)}
            | {"at_peak": rate(flops / peak), "products_flops_per_s": flops / products_s}
        )
    told = {
        "requests_per_s": count / best.wall_s,
        "step_s": best.wall_s / best.forwards,
        "forward_s": best.forward_s / best.forwards,
        "forward_share": best.forward_s / best.wall_s,
    }
    return {"name": name, "requests": count, "loop": told, "batches": batches}


def between(name: str, scale: float = 1.0, unit: str = "") -> str:
    """What was published of the loop, from the least to the most."""
    low, high = (f"{scale * value:g}" for value in PUBLISHED[name])
    return f"{low} to {high}{unit}"


def tables(results: Sequence[dict[str, Any]]) -> None:
    """Print the figures as Markdown."""
    print("\n| the loop | requests | requests/s | ms a step | ms a forward | in the forward |")
    print(f"|{'---|' * 6}")
    for one in results:
        told = one["loop"]
        cells = [
            one["name"],
            f"{one['requests']}",
            number(told["requests_per_s"]),
            number(told["step_s"] * 1e3, 2),
            number(told["forward_s"] * 1e3, 2),
            percent(told["forward_share"]),
        ]
        print(f"| {' | '.join(cells)} |")
    cells = [
        "published, other machine",
        "",
        between("requests_per_s"),
        between("step_s", 1e3),
        between("forward_s", 1e3),
        between("forward_share", 100, "%"),
    ]
    print(f"| {' | '.join(cells)} |")
    print(
        "\n| the engine | batch | ms a step | requests/s | times the loop | forward alone | times "
        "the loop | products alone | times the loop | their GFLOP/s | at the peak | times the loop "
        "|"
    )
    print(f"|{'---|' * 12}")
    for result in results:
        for one in result["batches"]:
            cells = [result["name"], f"{one['batch_size']}", number(one["step_s"] * 1e3, 2)]
            rates = (one, one["forward_alone"], one["products_alone"], one["at_peak"])
            for each in rates:
                cells += [number(each["requests_per_s"]), number(each["times_loop"], 2)]
            cells.insert(-2, number(one["products_flops_per_s"] * 1e-9))
            print(f"| {' | '.join(cells)} |")


# --- command line ---------------------------------------------------------------------------------


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--recordings", default=",".join(RECORDINGS), help="of D2F, with commas between, or all")
    add("--batch-sizes", type=sizes, default=[1, 16], help="of the engine; default: 1,16")
    add("--requests", type=positive, help="of each recording, the first so many; default: all")
    add("--rounds", type=positive, default=3, help="of which the fastest counts; default: 3")
    add("--threads", type=positive, default=1, help="of torch; default: 1")
    add("--json", action="store_true", help="print one JSON object, nothing else")
    parser.set_defaults(device="cpu", dtype="float32")
    options = parser.parse_args(argv)
    known = sorted(path.name.partition(".")[0] for path in GOLDEN.glob("d2f_*.json.gz"))
    options.recordings = known if options.recordings == "all" else options.recordings.split(",")
    for name in options.recordings:
        if name not in known:
            parser.error(f"--recordings: {name!r} is none; there are {', '.join(known)}")
    return options


def main() -> None:
    """Print the tables."""
    options = parse_args()
    torch.set_num_threads(options.threads)
    peaks = peak_flops_per_s()
    facts = machine(options)
    if not options.json:
        print(", ".join(f"{name} {value}" for name, value in facts.items() if value is not None))
        rates = " and ".join(f"{number(rate * 1e-9)} by {name}" for name, rate in peaks.items())
        print(f"peak: a product of 1,024 x 1,024 at {rates}, in GFLOP/s")
    results = [measure(name, options, max(peaks.values())) for name in options.recordings]
    if options.json:
        figures = {"peak_flops_per_s": peaks, "published": PUBLISHED, "recordings": results}
        print(json.dumps({"machine": facts, "options": vars(options)} | figures))
    else:
        tables(results)


if __name__ == "__main__":
    main()
