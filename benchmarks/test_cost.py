"""What scheduling costs, in CPU time of one core, with no model beside it.

    python -m pytest benchmarks --benchmark-only --benchmark-json=cost.json
    python benchmarks/table.py cost.json

Every figure is the least of several rounds, and in the same run stand its yardsticks: a loop in
plain Python that adds 1 and compares on as many slotted objects (the floor), numpy doing the same
to an array, and the scheduler of transformers' continuous batching, driven without its model. A
ratio to the floor survives a busy machine. Requests and outcomes are made beforehand and do not
count.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from dllm_sched import (
    NOTHING,
    BlockBoundary,
    Capacity,
    FinishReason,
    Policy,
    Request,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.journal import JournaledScheduler
from dllm_sched.policies import (
    AllRows,
    EarliestDeadline,
    Fill,
    MaxWait,
    PastDeadline,
    PriorityFirst,
    Slots,
    StepCap,
    TokenBudget,
)
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Constant
from dllm_sched.sim.shapes import gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop

pytestmark = pytest.mark.benchmark(timer=time.process_time)

ROWS = (1, 16, 64, 256, 1_024, 4_096)
WAITING = (0, 1_000, 100_000, 1_000_000)
CALLS = 200  # of a round, where each changes something
QUIET_CALLS = 2_000  # of a round, where none does
ENDINGS = [StepOutcome((RowFinished(slot, FinishReason.EOS),)) for slot in range(max(ROWS))]


def measure(
    benchmark: Any,
    function: Callable[..., object],
    *args: object,
    calls: int,
    setup: Callable[[], object] | None = None,
    rounds: int = 7,
    **labels: object,
) -> None:
    """Time a function that makes so many calls; ``labels`` say what they were."""
    benchmark.group = labels["what"]
    benchmark.extra_info.update(labels, calls=calls)
    benchmark.pedantic(function, args, setup=setup, rounds=rounds, warmup_rounds=1)


# --- schedulers in the middle of their work -------------------------------------------------------


def make_request(number: int) -> Request:
    """One of many, unlike the others in whatever an ordering may look at."""
    rng = random.Random(number)
    return Request(
        f"r{number}",
        prompt_len=50,
        max_new_tokens=2**20,
        priority=rng.randrange(10),
        deadline_at=1e6 * (1 + rng.random()),
    )


REQUESTS: list[Request] = []


def requests(count: int) -> list[Request]:
    """The first so many; made once."""
    REQUESTS.extend(map(make_request, range(len(REQUESTS), count)))
    return REQUESTS[:count]


POLICIES: dict[str, Callable[[int], Policy]] = {
    "fcfs": lambda _: Policy(),
    "priority": lambda _: Policy(ordering=PriorityFirst()),
    "edf": lambda _: Policy(ordering=EarliestDeadline()),
    "tediserve": presets.tediserve,  # the preset whose changes cost most
    "wait": presets.wait,  # the preset whose unchanged steps cost most: it is asked at each
    "observed": lambda _: Policy(),
    "ahead": lambda _: Policy(),
    "journaled": lambda _: Policy(),
}


class Engine:
    """An engine without a model, and its scheduler with every slot taken."""

    def __init__(self, name: str, rows: int, waiting: int, journal: Any) -> None:
        self.ahead = name == "ahead"
        self.spare = requests(rows + waiting + CALLS)[rows + waiting :]
        self.blocks = [0] * rows
        arguments: dict[str, Any] = {
            "capacity": Capacity(max_num_seqs=rows),
            "policy": POLICIES[name](rows),
            "observers": [id] if name == "observed" else [],
            "max_in_flight": 2 if self.ahead else 1,
        }
        if name == "journaled":
            self.scheduler: Scheduler = JournaledScheduler(journal, **arguments)
        else:
            self.scheduler = Scheduler(**arguments)
        gc.disable()  # or the building takes longer than the measuring
        for one in requests(rows + waiting):
            self.scheduler.submit(one, now=0.0)
        gc.enable()
        self.flight = self.scheduler.next_step(now=0.0).batch if self.ahead else None
        self.steps([NOTHING] * 3)

    def steps(self, outcomes: list[StepOutcome]) -> None:
        """Steps to which these things happen."""
        next_step, complete_step = self.scheduler.next_step, self.scheduler.complete_step
        if self.ahead:
            flight: Any = self.flight
            for outcome in outcomes:
                batch = next_step(now=0.0).batch
                complete_step(flight, outcome, now=0.0)
                flight = batch
            self.flight = flight
        else:
            for outcome in outcomes:
                complete_step(next_step(now=0.0).batch, outcome, now=0.0)  # type: ignore[arg-type]

    def turns(self) -> None:
        """Steps in each of which one row retires and one joins; who retired is spare."""
        next_step, complete_step = self.scheduler.next_step, self.scheduler.complete_step
        flight: Any = self.flight
        spare = self.spare
        spare.clear()
        for number in range(CALLS):
            batch: Any = next_step(now=0.0).batch
            if not self.ahead:
                flight = batch
            slot = flight.rows[number % len(flight.rows)].slot
            spare.append(complete_step(flight, ENDINGS[slot], now=0.0).finished[0].request)
            flight = batch
        self.flight = flight if self.ahead else None

    def crossings(self) -> list[StepOutcome]:
        """A boundary for one row after the other."""
        outcomes = []
        for number in range(CALLS):
            slot = number % len(self.blocks)
            self.blocks[slot] += 1
            done = self.blocks[slot]
            outcomes.append(StepOutcome((), (BlockBoundary(slot, done, 50 + 32 * done),)))
        return outcomes

    def submit(self) -> None:
        submit = self.scheduler.submit
        for one in self.spare:
            submit(one, now=0.0)

    def cancel(self) -> None:
        cancel = self.scheduler.cancel
        for one in self.spare:
            cancel(one.id, now=0.0)


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory) -> Iterator[Callable[..., Engine]]:
    with contextlib.ExitStack() as journals:

        def make(name: str, rows: int, waiting: int = 0) -> Engine:
            journal = tmp_path_factory.mktemp(name) / "journal"
            return Engine(name, rows, waiting, journals.enter_context(journal.open("w")))

        yield make


# --- hot calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("change", ["nothing", "turn", "boundary"])
@pytest.mark.parametrize("name", POLICIES)
def test_step(benchmark, make_engine, name, change, rows):
    """``next_step`` and ``complete_step``: nothing, a retirement and a join, or a boundary."""
    # A change is reported of one row at each step. Under WAIT a row steps only in its stage's
    # turn, and who replaces a lone row while a step is ahead sits that one out.
    if (name == "wait" and change != "nothing") or (
        name == "ahead" and change == "turn" and rows == 1
    ):
        pytest.skip("the row would not be in every step")
    engine = make_engine(name, rows)
    labels = {"what": "step", "name": name, "change": change, "rows": rows, "waiting": 0}
    if change == "nothing":
        quiet = [NOTHING] * QUIET_CALLS
        measure(benchmark, engine.steps, quiet, calls=QUIET_CALLS, **labels)
    elif change == "turn":
        measure(benchmark, engine.turns, setup=engine.submit, calls=CALLS, **labels)
    else:

        def setup() -> tuple[tuple[object, ...], dict[str, object]]:
            return (engine.crossings(),), {}

        measure(benchmark, engine.steps, setup=setup, calls=CALLS, **labels)


@pytest.fixture(scope="module")
def queue(request, make_engine) -> Iterator[tuple[Engine, dict[str, Any]]]:
    """16 rows, and so many waiting. One at a time: a million take a gigabyte."""
    name, waiting = request.param
    yield make_engine(name, 16, waiting), {"name": name, "rows": 16, "waiting": waiting}
    gc.collect()


@pytest.mark.parametrize("call", ["nothing", "submit", "cancel", "turn"])
@pytest.mark.parametrize(
    "queue",
    list(itertools.product(POLICIES, WAITING)),
    indirect=True,
    ids=lambda param: "-".join(map(str, param)),
)
def test_queue(benchmark, queue, call):
    """Calls while many wait."""
    engine, labels = queue
    labels = {"what": "queue", "change": call, **labels}
    if call == "nothing":
        quiet = [NOTHING] * QUIET_CALLS
        measure(benchmark, engine.steps, quiet, calls=QUIET_CALLS, **labels)
    elif call == "submit":
        measure(benchmark, engine.submit, setup=engine.cancel, calls=CALLS, **labels)
        engine.cancel()
    elif call == "cancel":
        measure(benchmark, engine.cancel, setup=engine.submit, calls=CALLS, **labels)
    elif labels["name"] == "wait":  # as in test_step
        pytest.skip("the row would not be in every step")
    else:
        measure(benchmark, engine.turns, setup=engine.submit, calls=CALLS, **labels)


def test_set_policy(benchmark, make_engine):
    """A swap with a million waiting, there and back; garbage is collected meanwhile."""
    waiting = WAITING[-1]
    scheduler = make_engine("fcfs", 16, waiting).scheduler
    policies = itertools.cycle([POLICIES["edf"](16), POLICIES["tediserve"](16)])
    measure(
        benchmark,
        lambda: scheduler.set_policy(next(policies), now=0.0),
        calls=1,
        rounds=4,
        what="set_policy",
        waiting=waiting,
    )


def test_an_unchanged_step_costs_the_same_at_any_number_of_rows(benchmark, make_engine):
    """The promise, as a ratio within one run."""
    engines = {rows: make_engine("fcfs", rows) for rows in (16, 4_096)}
    least = dict.fromkeys(engines, math.inf)
    quiet = [NOTHING] * QUIET_CALLS

    def alternate() -> None:
        for _ in range(50):
            for rows, engine in engines.items():
                start = time.process_time()
                engine.steps(quiet)
                least[rows] = min(least[rows], time.process_time() - start)

    measure(benchmark, alternate, calls=100 * QUIET_CALLS, rounds=1, what="ratio")
    benchmark.extra_info["ratio"] = least[4_096] / least[16]
    assert least[4_096] / least[16] < 1.5


# --- the life of a request ------------------------------------------------------------------------


def six_strategies(rows: int) -> Policy:
    """A policy of which every axis is asked."""
    return Policy(
        ordering=lambda rv: (rv.request.priority,),
        admission=Slots(rows) & TokenBudget(10**9),
        timeout=Fill(1) | MaxWait(1.0),
        composition=AllRows(),
        eviction=PastDeadline() | StepCap(10**6),
        control=lambda _rv, _view: ({}, math.inf),
        name="six strategies",
    )


LIVES: dict[str, tuple[Callable[[int], Policy], int]] = {  # policy for so many rows, boundaries
    "default": (lambda _: Policy(), 0),
    "continuous": (presets.continuous, 0),
    "six strategies": (six_strategies, 0),
    "ten boundaries": (lambda _: Policy(), 10),
}


class Life(NamedTuple):
    """What a run does: all are submitted, and each step has its outcome."""

    requests: list[Request]
    outcomes: list[StepOutcome]


def record(rows: int, policy: Policy, count: int, boundaries: int) -> Life:
    """Live through a run once, for its requests and the outcome of each step."""
    rng = random.Random(1)
    requests = [Request(f"r{n}", prompt_len=50, max_new_tokens=512) for n in range(count)]
    length = {request.id: rng.randint(16, 64) for request in requests}
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=rows), policy=policy)
    for request in requests:
        scheduler.submit(request, now=0.0)
    coming: list[tuple[int, int, int]] = []  # (step, slot, blocks done; 0: the row is done)
    outcomes: list[StepOutcome] = []
    while (batch := scheduler.next_step(now=0.0).batch) is not None:
        for row in batch.joined:
            last = len(outcomes) + length[row.request.id]
            heapq.heappush(coming, (last, row.slot, 0))
            for done in range(1, boundaries + 1):
                at = last - length[row.request.id] * done // (boundaries + 1)
                heapq.heappush(coming, (at, row.slot, boundaries + 1 - done))
        ended, crossed = [], []
        while coming and coming[0][0] <= len(outcomes) + 1:
            _, slot, done = heapq.heappop(coming)
            if done:
                crossed.append(BlockBoundary(slot, done, 50 + 32 * done))
            else:
                ended.append(RowFinished(slot, FinishReason.EOS))
        outcome = StepOutcome(tuple(ended), tuple(crossed)) if ended or crossed else NOTHING
        outcomes.append(outcome)
        scheduler.complete_step(batch, outcome, now=0.0)
    return Life(requests, outcomes)


def live(rows: int, policy: Policy, life: Life) -> None:
    """Live through a recorded run again."""
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=rows), policy=policy)
    submit, next_step, complete_step = (
        scheduler.submit,
        scheduler.next_step,
        scheduler.complete_step,
    )
    for request in life.requests:
        submit(request, now=0.0)
    for outcome in life.outcomes:
        complete_step(next_step(now=0.0).batch, outcome, now=0.0)  # type: ignore[arg-type]
    assert not scheduler.counts().running, "the recorded run was another"


@pytest.mark.parametrize("rows", [16, 256])
@pytest.mark.parametrize("name", LIVES)
def test_life(benchmark, name, rows):
    """Submit, admission, 16 to 64 steps, retirement, for 10,000 requests in a full engine."""
    make, boundaries = LIVES[name]
    life = record(rows, make(rows), 10_000, boundaries)
    labels = {"what": "life", "name": name, "rows": rows}
    measure(benchmark, live, rows, make(rows), life, calls=10_000, rounds=5, **labels)


# --- whole simulations ----------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [16, 256])
@pytest.mark.parametrize("reported", ["finishes", "boundaries"])
def test_simulation(benchmark, reported, slots):
    """GSM8K's work, Poisson arrivals at 80 % of what the slots can do, ``continuous``."""
    shapes, step_s, count = gsm8k(), 0.0241, 20_000  # of the published single request
    rate = 0.8 * slots / (shapes.mean_steps * step_s)

    def run() -> None:
        simulate(
            OpenLoop(Poisson(rate), shapes, seed=1, max_requests=count),
            policy=presets.continuous(slots),
            capacity=Capacity(max_num_seqs=slots),
            service=Constant(step_s),
            blocks=reported == "boundaries",
        )

    labels = {"what": "simulation", "name": reported, "rows": slots}
    measure(benchmark, run, calls=count, rounds=3, **labels)


# --- yardsticks -----------------------------------------------------------------------------------


class Counter:
    """What the floor counts on."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


@pytest.mark.parametrize("rows", ROWS)
def test_floor(benchmark, rows):
    """The least that plain Python does if it looks at every row: add 1 and compare."""
    counters = [Counter() for _ in range(rows)]
    calls = max(4, 20_000 // rows)

    def loop() -> None:
        for _ in range(calls):
            for counter in counters:
                counter.steps += 1
                if counter.steps >= 1 << 60:
                    raise OverflowError

    labels = {"what": "yardstick", "name": "floor", "rows": rows, "waiting": 0}
    measure(benchmark, loop, calls=calls, rounds=20, **labels)


@pytest.mark.parametrize("rows", ROWS)
def test_numpy(benchmark, rows):
    """The same on an array."""
    steps = np.zeros(rows, dtype=np.int64)

    def loop() -> None:
        nonlocal steps
        for _ in range(QUIET_CALLS):
            steps += 1
            if (steps >= 1 << 60).any():
                raise OverflowError

    labels = {"what": "yardstick", "name": "numpy", "rows": rows, "waiting": 0}
    measure(benchmark, loop, calls=QUIET_CALLS, rounds=20, **labels)


class Transformers:
    """The scheduler and the page tables of transformers' continuous batching, without its model.

    A step is ``schedule_batch`` and what ``ContinuousBatchProcessor.update_batch`` does to the
    scheduler's states; the tensors of a batch are not made.
    """

    def __init__(self, rows: int) -> None:
        pytest.importorskip("transformers.generation.continuous_batching", exc_type=ImportError)
        from transformers import LlamaConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.cache import PagedAttentionCache
        from transformers.generation.continuous_batching.distributed import DistributedHelper
        from transformers.generation.continuous_batching.requests import RequestState
        from transformers.generation.continuous_batching.scheduler import FIFOScheduler

        config = LlamaConfig(
            hidden_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            vocab_size=8,
            attn_implementation="flash_attention_2",  # which needs no room for masks
        )
        self.tokens = 64 * rows
        pages = ContinuousBatchingConfig(
            page_size=32,
            num_blocks=20 * rows,
            max_batch_tokens=self.tokens,
            max_blocks_per_request=20,
            max_requests_per_batch=rows,
            max_memory_percent=0.9,
            allow_block_sharing=False,
        )
        cache = PagedAttentionCache(config, pages, "cpu", DistributedHelper(None, None))
        self.cache = cache
        self.scheduler = FIFOScheduler(cache, 0.0, rows)
        self.make_state = RequestState
        self.rows = rows

    def submit(self, name: str, max_new_tokens: int = 512) -> None:
        state = self.make_state(name, [1] * 50, max_new_tokens=max_new_tokens)
        self.scheduler.add_waiting_request(state)

    def step(self) -> None:
        batch, *_ = self.scheduler.schedule_batch(self.tokens, self.cache.max_tokens_read)
        for future in batch:
            state = future.state
            state.position_offset += future.query_length
            done = state.update_and_check_completion(1, None)
            self.cache.mark_complete_blocks(state, future.complete_blocks)
            if done:
                self.scheduler.finish_request(state.request_id)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def live(self, lengths: list[int]) -> None:
        """Requests that come as others leave, so that its queue, which it walks, stays short."""
        active = self.scheduler.active_requests
        coming = enumerate(lengths)
        while True:
            for number, length in itertools.islice(coming, self.rows - len(active)):
                self.submit(f"r{number}", length)
            if not self.scheduler.has_pending_requests():
                return
            self.step()


@pytest.mark.parametrize(
    ("rows", "waiting"), [*((rows, 0) for rows in ROWS), (16, 1_000), (16, 100_000)]
)
def test_transformers_step(benchmark, rows, waiting):
    """One token for every row, nobody joins or leaves."""
    peer = Transformers(rows)
    for number in range(rows + waiting):
        peer.submit(f"r{number}")
    peer.steps(3)
    assert len(peer.scheduler.active_requests) == rows
    calls = max(2, 50 // max(rows, waiting // 20))
    labels = {"what": "yardstick", "name": "transformers", "rows": rows, "waiting": waiting}
    measure(benchmark, peer.steps, calls, calls=calls, rounds=5, **labels)
    assert len(peer.scheduler.active_requests) == rows


@pytest.mark.parametrize("rows", [16, 256])
def test_transformers_life(benchmark, rows):
    """As ``test_life`` with the default policy, for 2,000 requests."""
    rng = random.Random(1)
    lengths = [rng.randint(16, 64) for _ in range(2_000)]
    peer = Transformers(rows)
    labels = {"what": "life", "name": "transformers", "rows": rows}
    measure(benchmark, peer.live, lengths, calls=len(lengths), rounds=3, **labels)
