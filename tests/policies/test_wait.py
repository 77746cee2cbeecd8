"""WAIT and Nested WAIT against the published text told again, through the real scheduler.

The references below keep plain lists of requests and decide each iteration from nothing.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import attrs
import pytest

from dllm_sched import (
    BlockBoundary,
    Capacity,
    ConfigError,
    FinishReason,
    Policy,
    Request,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.policies import (
    NestedWaitQuota,
    NestedWaitRows,
    NestedWaitStart,
    WaitQuota,
    WaitRows,
    WaitStart,
)
from dllm_sched.testing import check_policy
from dllm_sched.theory.wait import TrafficType

TYPES = {"a": TrafficType(3.0, 0, 4), "b": TrafficType(1.0, 0, 9), "c": TrafficType(0.4, 0, 2)}
FOUR = {
    name: TrafficType(rate, 25, decode)
    for name, rate, decode in (("a", 175, 25), ("b", 71.875, 75), ("c", 25, 125), ("d", 10, 175))
}


class Job:
    """One request as the reference knows it."""

    def __init__(self, number: int, kind: str, at: float, blocks: int) -> None:
        self.id, self.kind, self.at = f"{number}", kind, at
        self.blocks, self.done, self.steps = blocks, 0, 0
        self.number = number


class World:
    """The scheduler, and beside it nothing but lists."""

    def __init__(self, policy: Policy, slots: int, seed: int, kinds: str = "abc") -> None:
        self.scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=slots))
        self.rng = random.Random(seed)
        self.slots, self.kinds = slots, kinds
        self.now, self.draining = 0.0, False
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.arrivals: list[tuple[float, str]] = []
        self.finished = 0

    def submit(self) -> None:
        kind = self.rng.choice(self.kinds)
        job = Job(len(self.arrivals), kind, self.now, self.rng.randint(1, 10))
        self.arrivals.append((self.now, kind))
        self.waiting.append(job)
        request = Request(
            job.id, prompt_len=1, max_new_tokens=99, block_length=1, request_class=kind
        )
        self.scheduler.submit(request, now=self.now)

    def iterate(self, decide: Callable[[World], tuple[list[Job], list[Job]]]) -> bool:
        """Plan one iteration and compare; False if there was none."""
        joining, stepping = decide(self)
        before = len(self.waiting)
        update = self.scheduler.next_step(now=self.now)
        for job in joining:
            self.waiting.remove(job)
            self.running.append(job)
        assert self.scheduler.num_waiting == len(self.waiting), (before, len(joining))
        if update.batch is None:
            assert not stepping
            self.wake_at = update.wake_at
            return False
        assert {row.request.id for row in update.batch.rows} == {job.id for job in stepping}
        self.now += self.rng.choice([0.05, 0.2])
        slots = {row.request.id: row.slot for row in update.batch.rows}
        ended, crossed = [], []
        for job in stepping:
            job.steps += 1
            if self.rng.random() < 0.5:
                job.done += 1
                if job.done >= job.blocks:
                    ended.append(RowFinished(slots[job.id], FinishReason.EOS))
                    self.running.remove(job)
                else:
                    crossed.append(BlockBoundary(slots[job.id], job.done, job.done))
        self.finished += len(ended)
        outcome = StepOutcome(finished=tuple(ended), boundaries=tuple(crossed))
        self.scheduler.complete_step(update.batch, outcome, now=self.now)
        self.scheduler.check_invariants()
        return True

    def live(self, decide: Callable[[World], tuple[list[Job], list[Job]]], num: int) -> None:
        """Serve ``num`` requests in bursts and lulls, then drain."""
        while self.scheduler.has_work() or len(self.arrivals) < num:
            if len(self.arrivals) < num:
                for _ in range(self.rng.choice([0, 0, 0, 1, 1, 2, 6])):
                    self.submit()
            elif not self.draining:
                self.draining = True
                self.scheduler.drain(now=self.now)
            if not self.iterate(decide):
                lull = self.rng.choice([0.01, 0.3, 3.0])
                self.now = (
                    min(self.now + lull, self.wake_at)
                    if self.wake_at > self.now
                    else (self.now + lull)
                )
        assert self.finished == len(self.arrivals)


# --- WAIT -----------------------------------------------------------------------------------------


def published_wait(
    total: int,
    types: dict[str, TrafficType],
    *,
    strict: bool,
    patience: float,
    hold: bool,
    rate_of: Callable[[World, str], float | None] = lambda *_: None,
) -> Callable[[World], tuple[list[Job], list[Job]]]:
    def decide(world: World) -> tuple[list[Job], list[Job]]:
        rates = {k: rate_of(world, k) or types[k].rate for k in types}
        stages = {k: types[k].decode_len + 1 for k in types}
        whole = sum(rates[k] * stages[k] for k in types)
        queued = Counter(job.kind for job in world.waiting)
        inside = Counter(job.kind for job in world.running)
        wanted = {}
        for k in types:
            limit = total * rates[k] * stages[k] / whole
            threshold = int(max(limit / stages[k], 1))
            free = math.floor(max(limit, 1.0) - inside[k])
            wanted[k] = threshold if strict else min(threshold, max(0, free))
        if strict:
            go = all(queued[k] >= wanted[k] for k in types)
        else:
            open_kinds = [k for k in types if wanted[k] > 0]
            go = any(queued[k] >= wanted[k] for k in open_kinds)
            go = go or (not open_kinds and bool(world.running))
        # ours: nobody waits beyond patience, a drain lets everything go, full slots hold nobody
        oldest = min((job.at for job in world.waiting), default=math.inf)
        go = go or world.now >= oldest + patience or world.draining
        go = go or len(world.running) == world.slots
        joining: list[Job] = []
        if go:
            for job in world.waiting:
                mine = sum(other.kind == job.kind for other in joining)
                room = len(world.running) + len(joining) < min(world.slots, total)
                if room and (job.kind not in types or mine < wanted[job.kind]):
                    joining.append(job)
        if hold and not go and world.waiting:
            return joining, []
        return joining, world.running + joining

    return decide


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rule", ["modified", "strict"])
@pytest.mark.parametrize("hold", [True, False])
def test_every_iteration_of_wait_is_the_published_one(seed: int, rule: Any, hold: bool) -> None:
    total, slots, patience = [(8, 8, 1.0), (6, 9, 0.3), (30, 30, 4.0)][seed % 3]
    policy = presets.wait(total, TYPES, rule=rule, max_wait_s=patience, hold_rows=hold)
    world = World(policy, slots, seed, kinds="aaabbcx")  # x: a class that nobody announced
    world.live(
        published_wait(total, TYPES, strict=rule == "strict", patience=patience, hold=hold), 150
    )


def estimated(world: World, kind: str) -> float | None:
    """The exponential mean of the gaps of one type, rebuilt from all its arrivals."""
    instants = [at for at, other in world.arrivals if other == kind]
    gaps = [after - before for before, after in pairwise(instants)]
    smooth: float | None = None
    for number in range(len(gaps)):
        recent = gaps[max(0, number - 9) : number + 1]
        mean = sum(recent) / len(recent)
        smooth = mean if smooth is None else smooth + 0.05 * (mean - smooth)
    return 1 / smooth if smooth else None


@pytest.mark.parametrize("seed", range(6))
def test_every_iteration_of_bursty_wait_is_the_published_one(seed: int) -> None:
    policy = presets.wait(12, TYPES, rate="ema", max_wait_s=0.7)
    world = World(policy, 12, seed, kinds="aaabbcx")
    world.live(
        published_wait(12, TYPES, strict=False, patience=0.7, hold=True, rate_of=estimated), 150
    )


def test_booking_limits_of_the_four_types() -> None:
    """78.06/93.71/54.04/30.19 of 256: 3, 1, 1, 1 join at a step, and no more than the limits."""
    scheduler = Scheduler(
        policy=presets.wait(256, FOUR, hold_rows=False), capacity=Capacity(max_num_seqs=256)
    )
    for number in range(200):
        for kind in FOUR:
            scheduler.submit(
                Request(f"{kind}{number}", prompt_len=1, max_new_tokens=9, request_class=kind),
                now=0.0,
            )
    joined: Counter[str] = Counter()
    for step in range(120):
        batch = scheduler.next_step(now=0.1).batch
        assert batch is not None
        news = Counter(row.request.id[0] for row in batch.joined)
        if step == 0:
            assert news == {"a": 3, "b": 1, "c": 1, "d": 1}
        joined += news
        scheduler.complete_step(batch, now=0.1)
    assert joined == {"a": 78, "b": 93, "c": 54, "d": 30}


def test_at_a_full_booking_the_rows_go_on() -> None:
    """Every type's quota is 0: as written the next iteration would wait for ever."""
    types = {"a": TrafficType(1.0, 0, 1), "b": TrafficType(1.0, 0, 1)}
    scheduler = Scheduler(policy=presets.wait(2, types), capacity=Capacity(max_num_seqs=4))
    for number, kind in enumerate("aabb"):
        scheduler.submit(
            Request(f"{number}", prompt_len=1, max_new_tokens=1, request_class=kind), now=0.0
        )
    for _ in range(3):
        batch = scheduler.next_step(now=0.0).batch
        assert batch is not None and [row.request.id for row in batch.rows] == ["0", "2"]
        scheduler.complete_step(batch, now=0.0)


def test_rows_are_held_until_the_oldest_has_waited_enough() -> None:
    policy = presets.wait(8, {"a": TrafficType(1.0, 0, 3)}, max_wait_s=2.0)
    scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=8))

    def arrive(name: str, now: float) -> None:
        request = Request(name, prompt_len=1, max_new_tokens=9, request_class="a")
        scheduler.submit(request, now=now)

    arrive("0", 0.0)
    assert scheduler.next_step(now=0.0).wake_at == 2.0  # two must wait: 8 / 4 stages
    arrive("1", 0.5)
    batch = scheduler.next_step(now=0.5).batch
    assert batch is not None and len(batch.rows) == 2
    scheduler.complete_step(batch, now=1.0)
    arrive("2", 1.0)
    held = scheduler.next_step(now=1.0)
    assert held.batch is None and held.wake_at == 3.0
    batch = scheduler.next_step(now=3.0).batch
    assert batch is not None and len(batch.rows) == 3


def test_a_type_too_rare_for_a_place_is_served() -> None:
    """Its limit is 0.04 requests; a limit counts as one."""
    types = {"often": TrafficType(100.0, 0, 3), "rare": TrafficType(1.0, 0, 3)}
    scheduler = Scheduler(policy=presets.wait(4, types), capacity=Capacity(max_num_seqs=4))
    scheduler.submit(Request("r", prompt_len=1, max_new_tokens=1, request_class="rare"), now=0.0)
    batch = scheduler.next_step(now=0.0).batch
    assert batch is not None and len(batch.rows) == 1


def test_only_held_rows_cost_something_at_every_step() -> None:
    """While nobody waits a step without changes is free of WAIT, unless the rows may be held."""
    for hold, steps in ((False, math.inf), (True, 1)):
        policy = presets.wait(8, TYPES, hold_rows=hold)
        scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=8))
        request = Request("a", prompt_len=1, max_new_tokens=1, request_class="a")
        scheduler.submit(request, now=0.0)
        assert scheduler.next_step(now=0.0).batch is not None
        assert scheduler.horizon().steps == steps


def test_two_batch_keys_hold_nobody() -> None:
    scheduler = Scheduler(
        policy=presets.wait(8, {"": TrafficType(1.0, 0, 3)}), capacity=Capacity(max_num_seqs=8)
    )
    for number, key in enumerate("xyxyx"):
        scheduler.submit(
            Request(f"{number}", prompt_len=1, max_new_tokens=1, batch_key=key), now=0.0
        )
    turns = set()
    for _ in range(6):
        batch = scheduler.next_step(now=0.0).batch
        assert batch is not None
        turns.add(batch.rows[0].request.batch_key)
        scheduler.complete_step(batch, now=0.0)
    assert turns == {"x", "y"}


# --- Nested WAIT ----------------------------------------------------------------------------------


def published_nested(
    total: int, types: dict[str, TrafficType], *, by_block: bool, patience: float
) -> Callable[[World], tuple[list[Job], list[Job]]]:
    lengths = sorted({each.decode_len for each in types.values()})
    edges = list(zip([0, *lengths], lengths, strict=False))
    reach = [sum(t.rate for t in types.values() if t.decode_len > low) for low, _ in edges]
    weights = [(high - low) * rate for (low, high), rate in zip(edges, reach, strict=True)]
    shares = [total * weight / sum(weights) for weight in weights]

    def decide(world: World) -> tuple[list[Job], list[Job]]:
        def stage(job: Job) -> int:
            return min(job.done if by_block else job.steps, lengths[-1] - 1)

        def take(index: int, rows: list[Job]) -> int:
            (low, high), share = edges[index], shares[index]
            inside = sum(low < stage(job) < high for job in rows)
            left = max(int(share), 1) - inside
            return min(math.ceil(share / (high - low)), max(0, left))

        quota = take(0, world.running)
        first = [job for job in world.running if stage(job) == 0]
        oldest = min((job.at for job in world.waiting), default=math.inf)
        go = len(first) + len(world.waiting) >= quota
        go = go or world.draining or world.now >= oldest + patience
        room = world.slots - len(world.running)
        joining = world.waiting[: max(0, min(quota - len(first), room))] if go else []
        rows = world.running + joining
        if not world.waiting:
            return [], rows
        if not (go or len(world.running) == world.slots) or not rows:
            return joining, []
        left = [job for job in world.waiting if job not in joining]
        late = any(world.now >= job.at + patience for job in left)
        lapsed = late or world.draining or len(rows) == world.slots
        chosen: list[Job] = []
        for index, (low, high) in enumerate(edges):
            here = [job for job in rows if stage(job) == low]
            quota = take(index, rows)
            if index > 0 and len(here) < quota and not lapsed:
                break
            for level in range(low, high):
                level_rows = sorted(
                    (job for job in rows if stage(job) == level), key=lambda job: job.number
                )
                most = quota if level == low else math.ceil(shares[index] / (high - low))
                chosen += level_rows[:most]
        eldest = min(rows, key=lambda job: job.number)
        return joining, chosen if eldest in chosen else [*chosen, eldest]

    return decide


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("stage", ["block", "step"])
def test_every_iteration_of_nested_wait_is_the_published_one(seed: int, stage: Any) -> None:
    total, slots, patience = [(8, 8, 1.0), (6, 9, 0.3), (30, 30, 4.0)][seed % 3]
    policy = presets.nested_wait(total, TYPES, stage=stage, max_wait_s=patience)
    world = World(policy, slots, seed)
    decide = published_nested(total, TYPES, by_block=stage == "block", patience=patience)
    world.live(decide, 150)


def test_a_row_between_segments_is_not_overtaken_for_ever() -> None:
    """Alone beyond block 6, where two are wanted, with a stream of short requests behind it."""
    types = {6: TrafficType(1.0, 0, 6), 12: TrafficType(1.0, 0, 12)}
    policy = presets.nested_wait(16, types, max_wait_s=0.0)
    scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=16))
    scheduler.submit(Request("long", prompt_len=1, max_new_tokens=12, block_length=1), now=0.0)
    done: Counter[str] = Counter()
    for now in range(40):
        scheduler.submit(
            Request(f"{now}", prompt_len=1, max_new_tokens=6, block_length=1), now=float(now)
        )
        batch = scheduler.next_step(now=float(now)).batch
        assert batch is not None
        ended, crossed = [], []
        for row in batch.rows:
            name = row.request.id
            done[name] += 1
            if done[name] == row.request.max_new_tokens:
                ended.append(RowFinished(row.slot, FinishReason.EOS))
            else:
                crossed.append(BlockBoundary(row.slot, done[name], done[name]))
        outcome = StepOutcome(finished=tuple(ended), boundaries=tuple(crossed))
        scheduler.complete_step(batch, outcome, now=float(now))
    assert done["long"] == 12


def test_segments_of_gsm8k_blocks() -> None:
    """One segment of blocks 1 to 6, then one for each block from 7 to 16."""
    segments = presets.nested_wait(16).admission.init().shares
    assert [each.num_stages for each in segments] == [6] + [1] * 10
    assert sum(each.limit for each in segments) == pytest.approx(16)
    assert segments[0].limit == pytest.approx(16 * 6 / 9.91)


def test_a_share_below_one_request_is_one() -> None:
    """A batch of one: the first segment's share is 0.6, and nobody would ever join."""
    scheduler = Scheduler(policy=presets.nested_wait(1), capacity=Capacity(max_num_seqs=1))
    scheduler.submit(Request("a", prompt_len=1, max_new_tokens=1), now=0.0)
    assert scheduler.next_step(now=0.0).batch is not None


# --- the contract ---------------------------------------------------------------------------------

MIXED = {"": TrafficType(1.0, 0, 9), "a": TrafficType(2.0, 0, 3)}
POLICIES = {
    "wait": presets.wait(4),
    "strict": presets.wait(4, MIXED, rule="strict"),
    "rows go on": presets.wait(4, MIXED, hold_rows=False),
    "bursty": presets.wait(4, MIXED, rate="running_mean"),
    "nested": presets.nested_wait(4),
    "nested by steps": presets.nested_wait(4, MIXED, stage="step"),
    "nested bursty": presets.nested_wait(4, MIXED, rate="log_band"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_they_keep_the_contract_of_policies(name: str) -> None:
    check_policy(POLICIES[name])


@pytest.mark.parametrize(
    "kind",
    [WaitStart, WaitQuota, WaitRows, NestedWaitStart, NestedWaitQuota, NestedWaitRows],
)
def test_out_of_range(kind: Any) -> None:
    names = {field.name for field in attrs.fields(kind)}
    for bad in (0, 2.0, True, "4"):
        with pytest.raises(ConfigError, match="batch_size"):
            kind(bad, TYPES)
    for bad_types in ({}, (), {"a": 3}, [1], [*TYPES.items(), *TYPES.items()]):
        with pytest.raises(ConfigError, match="types"):
            kind(4, bad_types)
    with pytest.raises(ConfigError, match="rate"):
        kind(4, TYPES, rate="best")
    if "rule" in names:
        with pytest.raises(ConfigError, match="rule"):
            kind(4, TYPES, rule="best")
    if "stage" in names:
        with pytest.raises(ConfigError, match="stage"):
            kind(4, TYPES, stage="token")
    if "max_wait_s" in names:
        for bad_wait in (-1, math.inf, math.nan, True, None):
            with pytest.raises(ConfigError, match="max_wait_s"):
                kind(4, TYPES, max_wait_s=bad_wait)
    with pytest.raises(ConfigError, match="4 slots"):
        kind(5, TYPES).validate(Capacity(max_num_seqs=4))


def test_they_are_values() -> None:
    assert presets.wait(4, TYPES) == presets.wait(4, dict(TYPES))
    assert presets.wait(4, TYPES) != presets.wait(4, MIXED)
    assert hash(presets.nested_wait(4)) == hash(presets.nested_wait(4))
