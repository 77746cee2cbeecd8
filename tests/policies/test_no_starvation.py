"""Nobody waits for ever: under load, beyond it, while draining, behind an endless preference."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import pytest

from dllm_sched import Capacity, ConfigError, GrowingKV, Policy, Request, Scheduler, presets
from dllm_sched.policies import (
    EarliestDeadline,
    FewestBlocks,
    PriorityFirst,
    ShortestBudget,
    Slots,
)
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Linear
from dllm_sched.sim.shapes import gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.testing import FakeEngine

SLOTS = 4
STEP = Linear(0.01, row_s=0.001)
PAGES = {"num_pages": 80, "memory": GrowingKV(page_size=16)}  # two of four rows at their ends
ALL = sorted(presets.PRESETS)
needed = runpy.run_path(str(Path(__file__).parents[1] / "needed.py"))["needed"]


def preset(name, **more):
    return presets.PRESETS[name](**{**needed(name, SLOTS), **more})


def capacity_per_s(policy):
    rows = min(SLOTS, policy.admission.max_rows)
    return rows / (gsm8k().mean_steps * STEP.step_s(int(rows), 0))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("load", "memory"), [(0.6, {}), (3.0, {}), (0.4, PAGES)], ids=["0.6", "3.0", "memory"]
)
def test_everybody_finishes(name, load, memory):
    """At 3.0 the queue grows until the last arrival: the tail is finite, and served."""
    policy = preset(name)
    count = 100
    rate = load * capacity_per_s(policy)
    result = simulate(
        OpenLoop(Poisson(rate), gsm8k(), seed=3, max_requests=count),
        policy=policy,
        capacity=Capacity(max_num_seqs=SLOTS, window_blocks=1, **memory),
        service=STEP,
        phases=True,
    )
    assert result.num_requests == count
    assert result.counts.waiting == result.counts.running == 0
    if load < 1:  # nobody waits much longer than a few batches take
        assert max(result.wait_s) < 20 * 467 * STEP.step_s(SLOTS, 0)


class Queue:
    """A scheduler before a fake engine; a step takes a second, a block is a step."""

    def __init__(self, policy, slots=2):
        self.now = 0.0
        self.engine = FakeEngine(slots, steps=lambda request: request.max_blocks)
        self.sched = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=slots))
        self.ended = set()
        self.count = 0

    def submit(self, id=None, blocks=1, prompt=1, **fields):
        self.count += 1
        request = Request(
            id or f"r{self.count}",
            prompt_len=prompt,
            max_new_tokens=4 * blocks,
            block_length=4,
            **fields,
        )
        self.sched.submit(request, now=self.now)

    def told(self, update):
        self.engine.release(update.released)
        self.ended |= {end.request.id for end in update.finished}

    def step(self):
        """Run a step, or sleep until something is due; False if only input would help."""
        update = self.sched.next_step(now=self.now)
        self.told(update)
        if update.batch is None:
            if update.wake_at == math.inf:
                return False
            self.now = max(self.now, update.wake_at)
            return True
        outcome = self.engine.run(update.batch)
        self.now += 1.0
        self.told(self.sched.complete_step(update.batch, outcome, now=self.now))
        return True


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("draining", [False, True])
def test_what_is_left_over_is_served(name, draining):
    """Seven requests, and no more come. Who is not told so may wait only if that is its rule."""
    queue = Queue(preset(name), slots=SLOTS)
    for number in range(7):
        queue.submit(blocks=1 + number % 3)
    if draining:
        queue.told(queue.sched.drain(now=queue.now))
    for _ in range(500):
        if not queue.step():
            break
    left = 3 if name == "fixed_fill" and not draining else 0  # it has no timer unless given one
    assert len(queue.ended) == 7 - left
    assert queue.sched.has_work() == bool(left)


def overtaken_by(policy, victim, preferred, steps):
    """How many that came later end before the victim; inf if it is still there at the end."""
    queue = Queue(policy)
    for _ in range(4):
        queue.submit(**preferred(queue.now))
    queue.submit("victim", **victim)
    before = len(queue.ended)
    for _ in range(steps):
        for _ in range(3):  # two slots serve at most two a second
            queue.submit(**preferred(queue.now))
        queue.step()
        if "victim" in queue.ended:
            return len(queue.ended) - before
    return math.inf


def alike(**fields):
    return lambda now: fields


def preferred_in_all(now):
    return {"tenant": "large", "deadline_at": now + 30}


LONG, SHORT = {"blocks": 8}, alike()
BOUNDED = {
    "dws": (preset("dws", batch_size=2), LONG, SHORT),
    "blockserve": (preset("blockserve", batch_size=2), {"prompt": 5000}, SHORT),
    "sangam, fewest blocks": (
        preset("sangam", batch_size=2, order="fewest_blocks"),
        LONG,
        SHORT,
    ),
    "tediserve": (preset("tediserve", batch_size=2), {}, lambda now: {"deadline_at": now + 30}),
    "fair_share": (
        preset("fair_share", batch_size=2, weights={"large": 20.0}),
        {"tenant": "small"},
        alike(tenant="large"),
    ),
    "priority": (Policy(ordering=PriorityFirst(yield_s=60.0)), {"priority": 5}, SHORT),
}


@pytest.mark.parametrize("name", sorted(BOUNDED))
def test_an_endless_preference_ends(name):
    assert overtaken_by(*BOUNDED[name], steps=1000) < 2000


ORDERINGS = {preset(name).ordering for name in ALL}


@pytest.mark.parametrize(
    "ordering", sorted(ORDERINGS, key=repr), ids=lambda one: type(one).__name__
)
def test_presets_bound_every_preference_unasked(ordering):
    """Whatever a request may be, no stream of others keeps a preset's order from its turn."""
    policy = Policy(ordering=ordering, admission=Slots(2))
    victim = {"blocks": 8, "prompt": 5000, "priority": 9, "tenant": "small"}
    assert overtaken_by(policy, victim, preferred_in_all, steps=1000) < 2000


@pytest.mark.parametrize(
    ("ordering", "victim", "preferred"),
    [
        (PriorityFirst(), {"priority": 1}, SHORT),
        (EarliestDeadline(), {}, lambda now: {"deadline_at": now + 30}),
        (ShortestBudget(), LONG, SHORT),
        (FewestBlocks(), LONG, SHORT),
    ],
    ids=repr,
)
def test_orders_without_a_bound_starve_as_they_say(ordering, victim, preferred):
    assert overtaken_by(Policy(ordering=ordering), victim, preferred, steps=700) == math.inf
    assert "tarve" in type(ordering).__doc__


def test_the_bounds_are_exact():
    """Two slots of one: the victim goes when its key is the least."""
    one = Policy(ordering=FewestBlocks(bypass=10), admission=Slots(1))
    assert overtaken_by(one, {"blocks": 3}, SHORT, steps=200) <= 4 + 2 * 10 + 3
    soon = Policy(ordering=EarliestDeadline(patience_s=40.0), admission=Slots(1))
    seconds = overtaken_by(soon, {}, lambda now: {"deadline_at": now + 30}, steps=200)
    assert seconds <= 4 + 3 * 10 + 1  # those of ten seconds, three a second


@pytest.mark.parametrize("wrong", [-1.0, math.nan, "1", None, True])
@pytest.mark.parametrize(
    "bound",
    [
        lambda value: PriorityFirst(yield_s=value),
        lambda value: EarliestDeadline(patience_s=value),
        lambda value: FewestBlocks(bypass=value),
    ],
)
def test_bounds_out_of_range_are_named(bound, wrong):
    with pytest.raises(ConfigError, match="must be"):
        bound(wrong)
