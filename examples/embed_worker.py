"""An engine in a process of its own: steps cross a pipe, and a worker that dies loses nobody.

    python examples/embed_worker.py
    python examples/embed_worker.py --kill-at 3

The model has its own interpreter and its own CUDA context there, and a crash in it takes no client
along. The scheduler stays with the server, where requests come in, and sees an engine like any
other. ``torch.multiprocessing`` works in the same way; only tensors in a pipe need it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import signal
import sys

from dllm_sched import NOTHING, Capacity, Request, Scheduler, StepBatch, presets
from dllm_sched.runtime import Driver
from dllm_sched.testing import FakeEngine


# --- worker
def work(pipe, make_engine, *args):
    """Be the worker: an engine, and the requests that it holds something of, by id."""
    with contextlib.suppress(ValueError):  # only a main thread may
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's business
    engine = make_engine(*args)
    requests, rows = {}, ()
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return  # the server has gone
        if not isinstance(message, StepBatch):
            known = [one._replace(request=requests[one.request]) for one in message]
            engine.release(known)
            for gone in known:
                if not gone.kept:
                    del requests[gone.request.id]
            continue
        try:
            # The same request is the same object here too, however often it comes.
            joined = tuple(
                row._replace(request=requests.setdefault(row.request.id, row.request))
                for row in message.joined
            )
            if message.rows is not None:
                rows = tuple(row._replace(request=requests[row.request]) for row in message.rows)
            outcome = engine.run(message._replace(rows=rows, joined=joined))
        except Exception as error:  # noqa: BLE001 - the driver knows what to do with it
            outcome = error
        try:
            pipe.send(None if outcome is NOTHING else outcome)
        except Exception:  # noqa: BLE001 - nothing has been sent of what cannot be
            pipe.send(RuntimeError(f"the worker's answer cannot be sent: {outcome!r}"))


# --- engine
class ProcessEngine:
    """An engine that runs in a worker process.

    Args:
        make_engine: Called there; a class or function that the worker can import.
        args: Its arguments.
    """

    def __init__(self, make_engine, *args):
        self._making = (make_engine, *args)
        self._start()

    def run(self, batch):
        """Send a step and wait for what happened; rows that are as before are not sent again."""
        rows = None
        if batch.rows is not self._rows:
            rows = tuple(row._replace(request=row.request.id) for row in batch.rows)
        try:
            self._pipe.send(batch._replace(rows=rows))
            self._rows = batch.rows
            self._known.update(row.request.id for row in batch.joined)
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.kill()
            self.close()
            self._start()
            raise RuntimeError("the engine's process has died; another has been started") from error
        if isinstance(answer, Exception):
            self._rows = None
            raise answer
        return NOTHING if answer is None else answer

    def release(self, released):
        """Send slots back; the pipe keeps the order, so this is before they are given again."""
        gone = [one for one in released if one.request.id in self._known]
        self._known -= {one.request.id for one in gone if not one.kept}
        with contextlib.suppress(OSError):  # has it died, the next step will notice
            self._pipe.send([one._replace(request=one.request.id) for one in gone])

    def kill(self):
        """End the worker, from any thread: a step that hangs fails, and its rows start anew."""
        self._worker.kill()

    def close(self):
        """Let the worker end."""
        self._pipe.close()
        self._worker.join()

    def _start(self):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._worker = context.Process(target=work, args=(theirs, *self._making), daemon=True)
        self._worker.start()
        theirs.close()
        self._rows = None  # what the worker has as the rows
        self._known = set()  # ids of the requests that it has


# --- end
def main(argv=None):
    """Serve forty requests; on demand, kill the worker in the middle."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kill-at", type=int, help="number of the step at which the worker dies")
    options = parser.parse_args(argv)
    engine = ProcessEngine(FakeEngine, 8)
    ended = []

    def on_update(update):
        ended.extend(update.finished)
        if update.batch is not None and update.batch.step_id == options.kill_at:
            engine.kill()

    driver = Driver(
        Scheduler(policy=presets.continuous(8), capacity=Capacity(max_num_seqs=8)),
        engine,
        on_update=on_update,
        step_timeout_s=60.0,
        on_stuck=lambda *_: engine.kill(),
    )
    report = driver.run(
        (0.0, Request(f"r{number}", prompt_len=20, max_new_tokens=64)) for number in range(40)
    )
    engine.close()
    for finished in ended:
        print(f"{finished.request.id:4} {finished.reason.value:10} {finished.num_steps} steps")
    print(f"{len(ended)} requests, {report.num_steps} steps, {report.engine_s:.2f} s in the engine")
    return 0


if __name__ == "__main__":
    sys.exit(main())
