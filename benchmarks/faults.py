"""Minutes of overload in which everything goes wrong, on the real engine and the asyncio driver.

    python benchmarks/faults.py --threads 1
    python benchmarks/faults.py --minutes 10 --seed 7 --ahead

The model in the box is offered 1.5 times the requests that it can serve (measured first), in an
open loop. Meanwhile, at random: streams that are closed after a few events, tasks that are
cancelled, cancels by id, deadlines, queue timeouts, poisoned rows, steps that raise, and swaps of
the policy. In the end every request must have ended exactly once with a reason that fits what was
done to it; what streams told must be what the answer says; whoever nothing was done to must have
the very tokens that the prompt gets when it is served alone; nothing may be left in a table, no
task, no thread, no file. Else this ends with an error.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import resource
import statistics
import sys
import threading
import time
from collections import Counter, deque
from contextlib import aclosing, suppress
from pathlib import Path

import torch

from dllm_sched import (
    Capacity,
    Finished,
    FinishReason,
    Rejected,
    RowFailed,
    Scheduler,
    presets,
)
from dllm_sched.runtime import AsyncDriver, Committed
from dllm_sched_hf import D2FEngine, box, load_model

SLOTS = 16
MAX_OPEN = 256
MAX_RESTARTS = 3
HARM = ("stream closed", "task cancelled", "cancelled by id", "deadline", "queue timeout")
HARMED = 0.25  # share of the requests to which something is done
STEP_FAILS, ROW_FAILS = 1 / 300, 1 / 200  # of the steps
SWAP_EVERY_S = 1.0


class PoisonedRowError(RuntimeError):
    """Of a row that was to fail alone."""


class BrokenStepError(RuntimeError):
    """Of a step that was to fail."""


class FaultyEngine:
    """An engine whose steps and rows fail at random; counts who was hit."""

    def __init__(self, engine, rng):
        self.engine, self.rng = engine, rng
        self.release, self.progress, self.request = engine.release, engine.progress, engine.request
        self.broken = self.poisoned = 0
        self.launched = deque()

    def run(self, batch):
        if self.rng.random() < STEP_FAILS:
            self.broken += 1
            raise BrokenStepError(f"step {batch.step_id} was to fail")
        return self._with_poison(batch, self.engine.run(batch))

    def launch(self, batch):
        if self.rng.random() < STEP_FAILS:
            self.broken += 1
            raise BrokenStepError(f"step {batch.step_id} was to fail")
        self.engine.launch(batch)
        self.launched.append(batch)

    def collect(self):
        try:
            return self._with_poison(self.launched.popleft(), self.engine.collect())
        except Exception:
            self.launched.clear()
            raise

    def _with_poison(self, batch, outcome):
        if self.rng.random() < ROW_FAILS:
            ended = {row.slot for row in (*outcome.finished, *outcome.failed)}
            here = self.engine._tenants  # a step ahead may still have rows that are gone
            alive = [
                row.slot
                for row in batch.rows
                if row.slot not in ended | self.engine._over
                and here[row.slot] is not None
                and here[row.slot].request is row.request
            ]
            if alive:
                self.poisoned += 1
                slot = self.rng.choice(alive)
                boundaries = tuple(b for b in outcome.boundaries if b.slot != slot)
                phases = tuple(p for p in outcome.phases if p.slot != slot)
                failed = (*outcome.failed, RowFailed(slot, PoisonedRowError("was to fail")))
                outcome = outcome._replace(boundaries=boundaries, phases=phases, failed=failed)
        return outcome


def policies():
    """Swapped in turn."""
    return [
        presets.continuous(batch_size=SLOTS),
        presets.block_refill(batch_size=SLOTS),
        presets.fixed_fill(batch_size=SLOTS, timeout_s=0.05),
        presets.continuous(batch_size=SLOTS // 2),
        presets.per_request(),
    ]


async def answers_alone(model, prompts):
    """The tokens of each prompt, one request at a time."""
    engine = D2FEngine(model, max_num_seqs=1)
    async with AsyncDriver(Scheduler(capacity=Capacity(max_num_seqs=1)), engine) as driver:
        tokens = []
        for number, prompt in enumerate(prompts):
            request = engine.request(f"alone {number}", prompt, **box.DECODING)
            finished = await (await driver.submit(request, stream=False)).result()
            tokens.append(finished.output.tokens)
    return tokens


async def rate_of(model, prompts, seconds):
    """Requests per second of a full engine under the first policy."""
    engine = D2FEngine(model, max_num_seqs=SLOTS)
    numbers = iter(range(10**9))
    served = 0
    end = time.perf_counter() + seconds

    async def client(driver):
        nonlocal served
        while time.perf_counter() < end:
            number = next(numbers)
            request = engine.request(f"w{number}", prompts[number % len(prompts)], **box.DECODING)
            async for _ in await driver.submit(request):
                pass
            served += 1

    scheduler = Scheduler(policy=policies()[0], capacity=Capacity(max_num_seqs=SLOTS))
    async with AsyncDriver(scheduler, engine) as driver:
        await asyncio.gather(*(client(driver) for _ in range(SLOTS + 4)))
    return served / seconds


class Ledger:
    """What was done to whom, and how each request ended."""

    def __init__(self, prompts, answers):
        self.prompts, self.answers = prompts, answers
        self.harm = Counter()
        self.reasons = Counter()
        self.told = Counter()  # how often the scheduler told the end of an id
        self.submitted = self.refused = self.changed = self.healthy = 0
        self.latency_s = []
        self.problems = []

    def note(self, update):
        self.told.update(finished.request.id for finished in update.finished)

    def problem(self, what):
        self.problems.append(what)

    def end(self, name, prompt, harm, result, told, began):
        """Judge the end of a request."""
        if isinstance(result, Rejected):
            self.refused += 1
            if result.reason != "queue_full":
                self.problem(f"{name}: refused as {result.reason}")
            return
        if not isinstance(result, Finished):
            self.problem(f"{name}: ended with {result!r}")
            return
        self.reasons[result.reason] += 1
        fits = {
            "stream closed": {FinishReason.CANCELLED},
            "task cancelled": {FinishReason.CANCELLED},
            "cancelled by id": {FinishReason.CANCELLED},
            "deadline": {FinishReason.DEADLINE},
            "queue timeout": {FinishReason.QUEUE_TIMEOUT},
        }.get(harm, set())
        well = result.reason in {FinishReason.EOS, FinishReason.LENGTH}
        if result.reason is FinishReason.ERROR:
            if not isinstance(result.error, PoisonedRowError | BrokenStepError):
                self.problem(f"{name}: {result.error!r}")
        elif not well and result.reason not in fits:
            self.problem(f"{name}: ended by {result.reason.value}, done to it: {harm}")
        answer = self.answers[prompt]
        if well:
            if result.output.tokens != answer:
                self.changed += 1
            if harm is None:
                self.healthy += 1
                self.latency_s.append(time.perf_counter() - began)
                if told != answer:
                    self.problem(f"{name}: the stream told {told}, the answer is {answer}")
        if told != answer[: len(told)]:
            self.problem(f"{name}: the stream told {told}, not a part of {answer}")


async def one_request(driver, engine, ledger, rng, name):
    """Submit a request, do something to it or not, and judge its end."""
    prompt = rng.randrange(len(ledger.prompts))
    harm = rng.choice(HARM) if rng.random() < HARMED else None
    fields = dict(box.DECODING)
    if harm == "deadline":
        fields["deadline_at"] = driver.clock() + rng.uniform(0.0, 1.0)
    if harm == "queue timeout":
        fields["queue_timeout_s"] = rng.uniform(0.0, 1.0)
    request = engine.request(name, ledger.prompts[prompt], **fields)
    ledger.submitted += 1
    ledger.harm[harm or "nothing"] += 1
    began = time.perf_counter()
    handle = await driver.submit(request)
    told = []

    async def follow(events_to_take):
        async with aclosing(aiter(handle)) as events:
            async for event in events:
                if isinstance(event, Committed):
                    told.extend(event.tokens)
                events_to_take -= 1
                if events_to_take == 0:
                    return

    task = asyncio.ensure_future(follow(rng.randint(1, 6) if harm == "stream closed" else -1))
    if harm in {"task cancelled", "cancelled by id"}:
        await asyncio.wait([task], timeout=rng.uniform(0.0, 2.0))
        if harm == "task cancelled":
            task.cancel()
        else:
            driver.cancel(name)
    with suppress(asyncio.CancelledError):
        await task
    result = await handle.result()
    ledger.end(name, prompt, harm, result, tuple(told), began)


async def swap(driver, scheduler):
    """Swap the policy again and again; returns when cancelled."""
    while True:
        for policy in policies():
            await asyncio.sleep(SWAP_EVERY_S)
            await driver.call(scheduler.set_policy, policy)


async def late(seconds, lateness_s):
    """Watch how late the loop gets."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + seconds
        await asyncio.sleep(seconds)
        lateness_s.append(loop.time() - due)


async def overload(model, prompts, answers, rate, args):
    """Offer requests at ``rate`` for some minutes; returns what is to be told."""
    rng = random.Random(args.seed)
    engine = FaultyEngine(D2FEngine(model, max_num_seqs=SLOTS), random.Random(args.seed + 1))
    scheduler = Scheduler(
        policy=policies()[0],
        capacity=Capacity(max_num_seqs=SLOTS),
        max_in_flight=2 if args.ahead else 1,
    )
    ledger, lateness_s = Ledger(prompts, answers), []

    driver = AsyncDriver(
        scheduler, engine, max_open=MAX_OPEN, max_restarts=MAX_RESTARTS, on_update=ledger.note
    )
    half = None
    async with driver:
        helpers = [
            asyncio.create_task(swap(driver, scheduler)),
            asyncio.create_task(late(0.005, lateness_s)),
        ]
        began = loop_time = time.perf_counter()
        end = began + 60 * args.minutes
        clients = set()
        number = 0
        while loop_time < end:
            number += 1
            task = asyncio.create_task(one_request(driver, engine, ledger, rng, f"r{number}"))
            clients.add(task)
            task.add_done_callback(clients.discard)
            loop_time += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, loop_time - time.perf_counter()))
            if half is None and loop_time > (began + end) / 2:
                half = resident_mib()
            if number % 500 == 0:
                print(f"  {number:,} requests, {len(clients)} open", file=sys.stderr, flush=True)
        await asyncio.gather(*clients)
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
    counts = scheduler.counts()
    if set(ledger.told.values()) != {1} or len(ledger.told) != sum(ledger.reasons.values()):
        ledger.problem(
            f"ends told {sum(ledger.told.values())}, seen {sum(ledger.reasons.values())}"
        )
    scheduler.check_invariants()
    if counts.submitted != counts.finished or counts.waiting or counts.running:
        ledger.problem(f"the scheduler still counts {counts}")
    if any(tenant is not None for tenant in engine.engine._tenants) or engine.engine._kept:
        ledger.problem("the engine still holds rows")
    if driver._feeds or driver._feed_in or driver._driver._open or driver._driver._active:
        ledger.problem("the driver still holds requests")
    return ledger, engine, driver.report(), lateness_s, half


def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def held():
    """Open files and threads."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--load", type=float, default=1.5, help="times what it can serve")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ahead", action="store_true", help="with two steps in flight")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = load_model(box.box_model_dir(), box.box_lora_dir())
    gc.collect()
    gc.freeze()  # a full collection of all that was loaded takes 0.2 s
    samples = box.task.sample_requests(args.prompts, seed=args.seed)
    prompts = [box.task.encode_prompt(prompt) for prompt, _ in samples]
    answers = asyncio.run(answers_alone(model, prompts))
    rate = args.load * asyncio.run(rate_of(model, prompts, min(5.0, 60 * args.minutes)))
    print(f"{rate:.0f} requests/s offered, {args.load} times what 16 slots serve", flush=True)
    before, before_mib = held(), resident_mib()
    ledger, engine, report, lateness_s, half_mib = asyncio.run(
        overload(model, prompts, answers, rate, args)
    )
    after = held()
    # A thread of the time before may have ended since: only what has come and stays is a fault.
    if any(now > then for now, then in zip(after, before, strict=True)):
        ledger.problem(f"files and threads: {before} before, {after} after")

    twice = sum(count > 1 for count in ledger.told.values())
    ended = sum(ledger.reasons.values()) + ledger.refused
    print(f"requests {ledger.submitted:,}, refused {ledger.refused:,}")
    print(f"lost {ledger.submitted - ended}, told twice {twice}")
    print("done to them: " + ", ".join(f"{k} {v:,}" for k, v in sorted(ledger.harm.items())))
    print("ended by: " + ", ".join(f"{k.value} {v:,}" for k, v in ledger.reasons.items()))
    print(f"steps {report.num_steps:,}, failed {engine.broken}, rows poisoned {engine.poisoned}")
    print(f"healthy requests {ledger.healthy:,}, answers that changed {ledger.changed}")
    if len(ledger.latency_s) > 1:
        cuts = statistics.quantiles(ledger.latency_s, n=100, method="inclusive")
        print(f"latency of the healthy p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s")
    cuts = statistics.quantiles(lateness_s, n=1000, method="inclusive")
    print(
        f"the loop's timers late by p50 {cuts[499] * 1e3:.2f} ms, p99 {cuts[989] * 1e3:.2f} ms, "
        f"p99.9 {cuts[998] * 1e3:.2f} ms"
    )
    print(
        f"memory {before_mib:.0f} MiB before, {half_mib or 0:.0f} half-way, "
        f"{resident_mib():.0f} after"
    )
    print(f"files and threads before {before}, after {after}")
    for problem in ledger.problems[:20]:
        print("PROBLEM", problem)
    if ledger.problems or ledger.changed or twice or ledger.submitted != ended:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
