"""What the asyncio driver adds: from submit to the first event, and how late the loop gets.

    python benchmarks/aio.py --threads 1

First, at an idle engine: seconds from ``submit`` to the first event of the answer, less those that
the step itself took, one request after the other; with a fake engine, whose step costs nothing, and
with the model in the box. Then with as many requests open as there are slots, and twice that: how
much later than asked a timer of 5 ms fires in the loop, beside the same with an idle engine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time

import torch

from dllm_sched import Capacity, Request, Scheduler
from dllm_sched.runtime import AsyncDriver
from dllm_sched.testing import FakeEngine
from dllm_sched_hf import D2FEngine, box, load_model

TICK_S = 0.005


class Timed:
    """An engine, and how long its last step took, what it tells of an answer included."""

    def __init__(self, engine):
        self.engine, self.release = engine, engine.release
        self.step_s = 0.0

    def run(self, batch):
        began = time.perf_counter()
        try:
            return self.engine.run(batch)
        finally:
            self.step_s = time.perf_counter() - began

    def progress(self, slot, start):
        began = time.perf_counter()
        try:
            return self.engine.progress(slot, start)
        finally:
            self.step_s += time.perf_counter() - began


async def first_events(engine, requests):
    """Seconds from submit to the first event, less those of the step, of one after the other."""
    engine = Timed(engine)
    added = []
    async with AsyncDriver(Scheduler(capacity=Capacity(max_num_seqs=1)), engine) as driver:
        for request in requests:
            began = time.perf_counter()
            handle = await driver.submit(request)
            async for _ in handle:
                added.append(time.perf_counter() - began - engine.step_s)
                break
            await handle.result()
    return added


async def lateness(engine, slots, requests, num_open, seconds):
    """Seconds by which timers of the loop fire too late while ``num_open`` requests are open."""
    late = []
    served = 0

    async def client(driver):
        nonlocal served
        for request in requests:
            async for _ in await driver.submit(request):
                pass
            served += 1

    async with AsyncDriver(Scheduler(capacity=Capacity(max_num_seqs=slots)), engine) as driver:
        clients = [asyncio.create_task(client(driver)) for _ in range(num_open)]
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (due := loop.time() + TICK_S) < end:
            await asyncio.sleep(TICK_S)
            late.append(loop.time() - due)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return late, served


def quantiles(seconds):
    cuts = statistics.quantiles(seconds, n=1000, method="inclusive")
    return cuts[499], cuts[989], max(seconds)


def requests_of(engine, count):
    """Endless requests for the box; the clients share them."""
    samples = list(box.task.sample_requests(count, seed=0))
    number = 0
    while True:
        for prompt, _ in samples:
            number += 1
            yield engine.request(f"r{number}", box.task.encode_prompt(prompt), **box.DECODING)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--requests", type=int, default=2000, help="one after the other")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each loaded run")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    print(f"torch {torch.__version__}, {args.threads} threads")
    print("submit to first event, less the step, us      p50      p99      max")
    fakes = (Request(f"f{i}", prompt_len=8, max_new_tokens=1) for i in range(args.requests))
    model = load_model(box.box_model_dir(), box.box_lora_dir())
    gc.collect()
    gc.freeze()  # a full collection of all that was loaded takes 0.2 s
    single = D2FEngine(model, max_num_seqs=1)
    boxes = requests_of(single, 100)
    for name, engine, requests in (
        ("fake engine", FakeEngine(1), fakes),
        ("model in the box", single, (next(boxes) for _ in range(args.requests // 10))),
    ):
        added = asyncio.run(first_events(engine, requests))
        print(f"{name:40s} " + " ".join(f"{s * 1e6:8.0f}" for s in quantiles(added)))

    print(
        f"a timer of {TICK_S * 1e3:.0f} ms fires too late by, ms            p50      p99      max"
    )
    for num_open in (0, args.slots, 2 * args.slots):
        engine = D2FEngine(model, max_num_seqs=args.slots)
        requests = requests_of(engine, 100)
        late, served = asyncio.run(lateness(engine, args.slots, requests, num_open, args.seconds))
        name = f"{num_open} open, {served / args.seconds:.0f} requests/s"
        print(f"{name:40s} " + " ".join(f"{s * 1e3:8.2f}" for s in quantiles(late)))


if __name__ == "__main__":
    main()
