"""What a step of the D2F engine costs beside its forward, and what raggedness costs the forward.

    python benchmarks/engine_step.py --batch-sizes 1,4,16
    python benchmarks/engine_step.py --model DIR --lora DIR

Without ``--model`` a fresh model of about 1.2 M parameters runs (its tokens mean nothing, its cost
does). Per batch size, over a saturated run with late joiners: milliseconds per step inside the
forward and beside it, the forward's share of wall time, tokens per row and step, and how much
longer the forward took than a dense ``[rows, tokens per row]`` forward of as many tokens, which
has no padding, no cache and no ragged rows.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch

from dllm_sched import Scheduler
from dllm_sched_hf import D2FEngine, LLaDAConfig, LLaDAModelLM, load_model


def main() -> None:
    """Print one line per batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint directory; default: a fresh small model")
    parser.add_argument("--lora", help="LoRA directory")
    parser.add_argument("--device", help="cpu, cuda, ...")
    parser.add_argument("--dtype", help="float32, bfloat16, ...")
    parser.add_argument("--batch-sizes", default="1,4,16")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=24, help="mean, tokens")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--block-length", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.model:
        model = load_model(args.model, args.lora, device=args.device, dtype=args.dtype)
    else:
        torch.manual_seed(0)
        model = LLaDAModelLM(
            LLaDAConfig(
                d_model=160,
                n_layers=4,
                n_heads=4,
                mlp_hidden_size=448,
                vocab_size=128,
                max_sequence_length=512,
                mask_token_id=127,
                eos_token_id=126,
                pad_token_id=126,
            )
        ).eval()
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{size:.2f} M parameters, {model.dtype}, {model.device}, {args.threads} threads")
    print("batch   steps  tokens/row  forward ms  beside ms  share   vs dense")
    for batch_size in map(int, args.batch_sizes.split(",")):
        measure(model, batch_size, args)


def measure(model: LLaDAModelLM, batch_size: int, args: argparse.Namespace) -> None:
    """Serve all requests at once through ``batch_size`` slots and print what it took."""
    best = None
    for _ in range(3):  # the first warms up; of the rest the one with the least disturbance counts
        engine, wall_s, row_steps = serve(model, batch_size, args)
        if best is None or wall_s < best[1]:
            best = (engine, wall_s, row_steps)
    engine, wall_s, row_steps = best
    steps = engine.num_forwards
    per_row = engine.num_tokens / row_steps
    rows = max(1, round(row_steps / steps))
    dense_s = dense(model, rows, round(engine.num_tokens / steps / rows))
    print(
        f"{batch_size:5d} {steps:7d} {per_row:11.1f} {engine.forward_s / steps * 1e3:11.3f} "
        f"{(wall_s - engine.forward_s) / steps * 1e3:10.3f} {engine.forward_s / wall_s:6.1%} "
        f"{engine.forward_s / steps / dense_s:10.2f}"
    )


def serve(
    model: LLaDAModelLM, batch_size: int, args: argparse.Namespace
) -> tuple[D2FEngine, float, int]:
    """Return the engine, seconds of wall time and row-steps of one saturated run."""
    clock = time.perf_counter
    max_len = 2 * args.prompt_len + args.max_new_tokens + args.block_length
    engine = D2FEngine(model, max_num_seqs=batch_size, max_len=max_len, clock=clock)
    draw = random.Random(0)
    sched = Scheduler(capacity=engine.capacity())
    top = engine.mask_token_id
    for index in range(args.num_requests):
        prompt = [draw.randrange(top) for _ in range(draw.randint(1, 2 * args.prompt_len))]
        request = engine.request(
            str(index),
            prompt,
            max_new_tokens=args.max_new_tokens,
            block_length=args.block_length,
            skip_threshold=draw.choice([0.02, 0.05, 0.9]) if args.model is None else 0.9,
        )
        sched.submit(request, now=0.0)
    row_steps = 0
    began = clock()
    while sched.has_work():
        update = sched.next_step(now=clock())
        engine.release(update.released)
        if update.batch is None:
            continue
        outcome = engine.run(update.batch)
        row_steps += len(update.batch.rows)
        engine.release(sched.complete_step(update.batch, outcome, now=clock()).released)
    return engine, clock() - began, row_steps


def dense(model: LLaDAModelLM, rows: int, length: int) -> float:
    """Return the median seconds of one plain forward of ``rows * length`` tokens."""
    ids = torch.zeros((rows, length), dtype=torch.int64, device=model.device)
    times = []
    with torch.inference_mode():
        for _ in range(60):
            began = time.perf_counter()
            model(ids)
            if ids.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
    return statistics.median(times[10:])


if __name__ == "__main__":
    main()
