"""Forwards per second of each decoder, on the recorded requests and their tiny models.

    python benchmarks/decoders.py --threads 1

Per recording and batch size, all requests at once through so many slots: forwards and tokens of
answers per second of wall time, tokens that a row sends through a forward, milliseconds of a step
inside the forward and beside it. The outputs must be the recorded ones.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from dllm_sched import Scheduler, presets
from dllm_sched_hf import load_model, parity

GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "golden"
FILES = [
    "d2f_train_b16",
    "fast_dllm_nocache_thr09",
    "fast_dllm_prefix_thr09",
    "fast_dllm_dual_thr09",
    "fast_dllm_dual_factor1",
    "llada_g64_b16_s32",
    "llada_g32_b32_s32_cfg",
]


def main() -> None:
    """Print one line per recording and batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=GOLDEN, help="recordings and checkpoints")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-sizes", default="1,16")
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.device}, {args.threads} threads")
    print(
        "recording                batch  forwards/s  answer tokens/s  tokens/row  ms in  ms beside"
    )
    for name in FILES:
        path = next(args.directory.glob(f"{name}.json*"))
        record = parity._read_record(path)
        requests = [parity._case(path.name, record, entry)[0] for entry in record["requests"]]
        lora = args.directory / f"{record['model']}_lora" if record["lora"] else None
        model = load_model(args.directory / record["model"], lora, device=args.device)
        for batch_size in map(int, args.batch_sizes.split(",")):
            rounds = [serve(record, model, requests, batch_size) for _ in range(args.rounds)]
            engine, row_steps, wall_s = min(rounds, key=lambda one: one[2])
            steps = engine.num_forwards
            answered = sum(len(entry["output"]) for entry in record["requests"])
            print(
                f"{name:24s} {batch_size:5d} {steps / wall_s:11.0f} {answered / wall_s:16.0f} "
                f"{engine.num_tokens / row_steps:11.1f} {engine.forward_s / steps * 1e3:6.2f} "
                f"{(wall_s - engine.forward_s) / steps * 1e3:10.3f}"
            )


def serve(record, model, requests, batch_size):
    """Serve all requests; return the engine, its row-steps and the seconds of wall time."""
    clock = time.perf_counter
    engine_type = parity._ENGINES[record["kind"]]
    max_len = max(request.max_total_tokens for request in requests)
    engine = engine_type(model, max_num_seqs=batch_size, max_len=max_len, clock=clock)
    sched = Scheduler(policy=presets.continuous(batch_size), capacity=engine.capacity())
    for request in requests:
        sched.submit(request, now=0.0)
    outputs, row_steps, began = {}, 0, clock()
    while sched.has_work():
        batch = sched.next_step(now=clock()).batch
        row_steps += len(batch.rows)
        update = sched.complete_step(batch, engine.run(batch), now=clock())
        engine.release(update.released)
        outputs |= {end.request.id: end.output for end in update.finished}
    wall_s = clock() - began
    for entry in record["requests"]:
        assert list(outputs[str(entry["id"])].tokens) == entry["output"]
    return engine, row_steps, wall_s


if __name__ == "__main__":
    main()
