"""The two embeddings of docs/embedding.md serve, keep the protocol, and lose nobody."""

import multiprocessing
import queue
import threading
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from dllm_sched import Capacity, FinishReason, Policy, Rejected, Request, Scheduler, presets
from dllm_sched.policies import MaxWaiting
from dllm_sched.runtime import Driver, VirtualClock
from dllm_sched.testing import FakeEngine, check_engine

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """A worker process imports the example by its name, as it would a user's module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def loop():
    return import_module("embed_loop")


@pytest.fixture
def worker():
    return import_module("embed_worker")


def request(name, tokens=64, **fields):
    return Request(name, prompt_len=8, max_new_tokens=tokens, block_length=8, **fields)


# --- a loop of one's own


class Serving:
    """The example's ``serve``, in a thread, and what it delivered."""

    def __init__(self, loop, engine, policy=None):
        self.scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=4))
        self.inbox, self.ended = queue.SimpleQueue(), []
        arguments = (self.scheduler, engine, self.inbox, self.ended.append)
        self.thread = threading.Thread(target=loop.serve, args=arguments)

    def run(self, *messages):
        """Put the messages and None; serve to the end."""
        for message in (*messages, None):
            self.inbox.put(message)
        self.thread.start()
        self.thread.join()
        assert not self.scheduler.has_work()
        self.scheduler.check_invariants()
        return {end.request.id: end for end in self.ended if not isinstance(end, Rejected)}


def test_the_loop_serves_everybody_once(loop):
    engine = loop.ToyEngine()
    ended = Serving(loop, engine).run(*(request(f"r{n}", 8 + n) for n in range(20)))
    assert {name: end.num_steps for name, end in ended.items()} == {
        f"r{n}": -(-(8 + n) // 8) for n in range(20)
    }
    assert {end.reason for end in ended.values()} == {FinishReason.LENGTH}
    assert engine.left == {}, "slots that never came back"


def test_the_loop_sleeps_until_input_comes(loop):
    """A full batch is waited for without a timeout: only the inbox can wake it."""
    serving = Serving(loop, loop.ToyEngine(), presets.fixed_fill(2))
    serving.thread.start()
    serving.inbox.put(request("a"))
    serving.inbox.put(request("b"))
    serving.inbox.put(None)
    serving.thread.join()
    assert [end.reason for end in serving.ended] == [FinishReason.LENGTH] * 2


def test_the_loop_cancels_and_refuses(loop):
    serving = Serving(loop, loop.ToyEngine(), Policy(admission=MaxWaiting(2)))
    ended = serving.run(request("a"), request("b"), request("c"), "b", "nobody")
    assert {name: end.reason.value for name, end in ended.items()} == {
        "a": "length",
        "b": "cancelled",
    }
    refused = [end for end in serving.ended if isinstance(end, Rejected)]
    assert refused == [Rejected("c", "queue_full")]


def test_a_step_that_fails_fails_its_rows_and_nobody_else(loop):
    engine = FakeEngine(4, fail_at={0: RuntimeError("device lost")})
    ended = Serving(loop, engine).run(*(request(f"r{n}") for n in range(6)))
    reasons = Counter(end.reason.value for end in ended.values())
    assert reasons == {"error": 4, "length": 2}
    assert str(ended["r0"].error) == "device lost"
    assert engine.held == frozenset()


def test_the_toy_engine_keeps_the_protocol(loop):
    check_engine(
        lambda _: loop.ToyEngine(),
        lambda index: request(f"r{index}", 8 + 5 * index),
        can_resume=False,
    )


def test_the_loop_runs(loop, capsys):
    loop.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 40
    assert sum("length" in line for line in lines) >= 39, "r39 may have been cancelled in time"


# --- an engine in a process of its own


@pytest.fixture
def threaded(worker):
    """The same engine with a thread for a process: everything still crosses a pipe."""

    class ThreadedEngine(worker.ProcessEngine):
        def _start(self):
            self._pipe, theirs = multiprocessing.Pipe()
            self._worker = threading.Thread(
                target=worker.work, args=(theirs, *self._making), daemon=True
            )
            self._worker.start()
            self._rows = None
            self._known = set()

    return ThreadedEngine


def poisoned(slots):
    return FakeEngine(slots, poison={"bad0": 2, "bad1": 1})


def test_what_crosses_the_pipe_keeps_the_protocol(threaded):
    """Late joiners, cancels, restarts, rows that sit out or resume, rows that fail: all of it."""
    check_engine(
        lambda slots: threaded(poisoned, slots),
        lambda index: request(f"r{index}", 8 + 5 * index),
        make_bad_request=lambda index: request(f"bad{index}"),
    )


def test_rows_that_have_not_changed_are_not_sent_again(threaded):
    engine = threaded(FakeEngine, 2)
    sent = []
    send = engine._pipe.send
    engine._pipe = Spy(engine._pipe, lambda message: (sent.append(message), send(message)))
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=2))
    scheduler.submit(request("a"), now=0.0)
    steps = 0
    while scheduler.has_work():
        batch = scheduler.next_step(now=0.0).batch
        update = scheduler.complete_step(batch, engine.run(batch), now=0.0)
        engine.release(update.released)
        steps += 1
    batches = [one for one in sent if not isinstance(one, list)]
    assert len(batches) == steps > 3
    whole = [one for one in batches if one.rows is not None]
    assert len(whole) == 2, "when it joined, and when it left its prefill"
    assert [row.request.id for one in batches for row in one.joined] == ["a"]


class Spy:
    def __init__(self, pipe, send):
        self.send, self.recv = send, pipe.recv


def test_an_answer_that_cannot_be_sent_fails_the_step_only(threaded):
    engine = threaded(Unsendable, 2)
    ended = []
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=2))
    driver = Driver(
        scheduler, engine, VirtualClock(), on_update=lambda update: ended.extend(update.finished)
    )
    driver.run([(0.0, request("a"))])
    assert [end.reason.value for end in ended] == ["error"]
    assert "cannot be sent" in str(ended[0].error)


class Unsendable(FakeEngine):
    def run(self, batch):
        raise RuntimeError(threading.Lock())


def test_a_worker_that_dies_loses_nobody(worker):
    engine = worker.ProcessEngine(FakeEngine, 4)
    first = engine._worker
    ended = []

    def on_update(update):
        ended.extend(update.finished)
        if update.batch is not None and update.batch.step_id == 3:
            engine.kill()

    scheduler = Scheduler(capacity=Capacity(max_num_seqs=4))
    driver = Driver(scheduler, engine, VirtualClock(), on_update=on_update)
    driver.run((0.0, request(f"r{n}")) for n in range(9))
    assert not first.is_alive()
    engine.close()
    assert not engine._worker.is_alive()
    assert Counter(end.reason.value for end in ended) == {"length": 9}
    alone = FakeEngine(1)
    for end in ended:  # the same answers as in this process, also of those that started anew
        assert end.output == answer(alone, end.request)
    scheduler.check_invariants()


def test_rows_that_sat_out_when_the_worker_died_start_anew_too(worker):
    engine = worker.ProcessEngine(FakeEngine, 4)
    ended, dying = [], []

    def on_update(update):
        ended.extend(update.finished)
        if update.batch is not None and update.batch.step_id == 3:
            dying.append({row.request.batch_key for row in update.batch.rows})
            engine.kill()

    scheduler = Scheduler(capacity=Capacity(max_num_seqs=4))
    requests = [request(f"r{n}", batch_key="xy"[n % 2]) for n in range(4)]  # x and y take turns
    driver = Driver(scheduler, engine, VirtualClock(), on_update=on_update)
    driver.run((0.0, one) for one in requests)
    engine.close()
    assert len(dying[0]) == 1
    assert Counter(end.reason.value for end in ended) == {"length": 4}
    assert scheduler.stats().num_failed_steps == 2, "that of the dead, and one with strangers"


def answer(engine, one):
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=1))
    scheduler.submit(one, now=0.0)
    while scheduler.has_work():
        batch = scheduler.next_step(now=0.0).batch
        update = scheduler.complete_step(batch, engine.run(batch), now=0.0)
        engine.release(update.released)
    return update.finished[0].output


def test_the_worker_example_runs(worker, capsys):
    assert worker.main(["--kill-at", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(" length " in line for line in lines) == 40
    assert lines[-1].startswith("40 requests, ")
