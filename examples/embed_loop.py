"""The scheduler in a loop of your own, around an engine of your own.

    python examples/embed_loop.py

``serve`` is the whole embedding: any thread puts requests, ids to cancel, and at last None into the
inbox; one thread owns scheduler and engine. ``docs/embedding.md`` explains it line by line.
"""

from __future__ import annotations

import math
import queue
import threading
import time

from dllm_sched import (
    NOTHING,
    Capacity,
    FinishReason,
    Rejected,
    Request,
    RowFate,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)


# --- engine
class ToyEngine:
    """Stands where your model will: a row ends after one step for every 8 tokens of its budget."""

    def __init__(self):
        self.left = {}  # slot -> steps to go; yours has tensors here

    def run(self, batch):
        for row in batch.joined:  # new in their slots
            self.left[row.slot] = -(-row.request.max_new_tokens // 8)
        ended = []
        for row in batch.rows:  # one forward for all of them
            self.left[row.slot] -= 1
            if self.left[row.slot] == 0:
                ended.append(RowFinished(row.slot, FinishReason.LENGTH, output=row.request.id))
        return StepOutcome(finished=tuple(ended)) if ended else NOTHING

    def release(self, released):
        for gone in released:  # these slots will be given again
            self.left.pop(gone.slot, None)


# --- loop
def serve(scheduler, engine, inbox, deliver, clock=time.monotonic):
    """Serve until None came and everybody has ended; ``deliver`` gets every end and refusal."""

    def tell(update):
        engine.release(update.released)
        for finished in update.finished:
            deliver(finished)

    draining, until = False, -math.inf
    while not draining or scheduler.has_work():
        for message in messages(inbox, until, clock):
            if isinstance(message, Request):
                answer = scheduler.submit(message, now=clock())
                if isinstance(answer, Rejected):
                    deliver(answer)
            elif isinstance(message, str):
                tell(scheduler.cancel(message, now=clock()))
            else:
                draining = True
                tell(scheduler.drain(now=clock()))
        update = scheduler.next_step(now=clock())
        tell(update)
        until = update.wake_at if update.batch is None else -math.inf
        if update.batch is None:
            continue
        try:
            outcome = engine.run(update.batch)
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody waits for an answer
            fates = {row.slot: RowFate.FAIL for row in update.batch.rows}
            tell(scheduler.fail_step(update.batch, error, rows=fates, now=clock()))
        else:
            tell(scheduler.complete_step(update.batch, outcome, now=clock()))


def messages(inbox, until, clock):
    """What is in the inbox; if nothing is, wait for it, at most until an instant."""
    try:
        yield inbox.get(timeout=None if until == math.inf else max(0.0, until - clock()))
        while True:
            yield inbox.get_nowait()
    except queue.Empty:
        return


# --- end
def main():
    """Serve forty requests from another thread."""
    inbox, ended = queue.SimpleQueue(), []
    scheduler = Scheduler(
        policy=presets.fixed_fill(batch_size=4, timeout_s=0.01), capacity=Capacity(max_num_seqs=4)
    )

    def client():
        for number in range(40):
            inbox.put(Request(f"r{number}", prompt_len=20, max_new_tokens=8 + number))
        inbox.put("r39")
        inbox.put(None)

    threading.Thread(target=client).start()
    serve(scheduler, ToyEngine(), inbox, ended.append)
    for finished in ended:
        print(f"{finished.request.id:4} {finished.reason.value:10} {finished.num_steps} steps")


if __name__ == "__main__":
    main()
