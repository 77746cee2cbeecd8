"""What the model in the box can do: exact answers, steps, and batch 1 against batch 16.

    python benchmarks/box.py
    python benchmarks/box.py --prompts 500 --seed 2

Every prompt is held out from training (by a hash of its text, see ``dllm_sched_hf.box.task``).
Tokens of a request must not depend on who shares its batch; its trace, position by position and
step by step, is compared as well, and the share that is equal is reported.
"""

from __future__ import annotations

import argparse
import platform

import numpy as np
import torch

from dllm_sched import Finished, Scheduler, presets
from dllm_sched_hf import D2FEngine, box, load_model


def answer_all(model: object, pairs: list[tuple[str, str]], batch_size: int) -> list[Finished]:
    """Serve every prompt, ``batch_size`` at a time; return the endings in order."""
    engine = D2FEngine(model, max_num_seqs=batch_size, trace=True)
    scheduler = Scheduler(policy=presets.continuous(batch_size), capacity=engine.capacity())
    for number, (prompt, _) in enumerate(pairs):
        ids = box.task.encode_prompt(prompt)
        scheduler.submit(engine.request(str(number), ids, **box.DECODING), now=0.0)
    ended: list[Finished] = []
    while scheduler.has_work():
        batch = scheduler.next_step(now=0.0).batch
        update = scheduler.complete_step(batch, engine.run(batch), now=0.0)
        engine.release(update.released)
        ended.extend(update.finished)
    return sorted(ended, key=lambda end: int(end.request.id))


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=500, help="how many; default: 500")
    parser.add_argument("--seed", type=int, default=2, help="of the prompts; default: 2")
    parser.add_argument("--threads", type=int, default=1, help="of torch; default: 1")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model(box.box_model_dir(), box.box_lora_dir(), device="cpu")
    pairs = list(box.task.sample_requests(options.prompts, options.seed, distinct=True))

    alone = answer_all(model, pairs, 1)
    mixed = answer_all(model, pairs, 16)
    right = [
        box.task.check(prompt, box.task.decode(end.output.tokens))
        for (prompt, _), end in zip(pairs, mixed, strict=True)
    ]
    steps = [end.output.num_forwards for end in mixed]
    low, middle, high = (int(np.percentile(steps, q, method="nearest")) for q in (10, 50, 90))
    tokens = [a.output.tokens == b.output.tokens for a, b in zip(alone, mixed, strict=True)]
    traces = [a.output.trace == b.output.trace for a, b in zip(alone, mixed, strict=True)]

    count = len(pairs)
    print(f"{count} prompts never trained on, seed {options.seed}, float32")
    print(f"exact answers           {sum(right)} = {sum(right) / count:.1%}")
    print(f"forwards per request    p10 {low}, p50 {middle}, p90 {high}, max {max(steps)}")
    print(f"batch 1 and 16 alike    tokens {sum(tokens)}, step traces {sum(traces)} of {count}")
    print(f"{platform.machine()}, {options.threads} thread(s), torch {torch.__version__}")


if __name__ == "__main__":
    main()
