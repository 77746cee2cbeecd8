"""dLLM-Serve, Optimus, SGLang and the autoregressive baselines, decision by decision."""

from __future__ import annotations

import math
import random

import pytest

from dllm_sched import (
    BlockBoundary,
    Capacity,
    ConfigError,
    FinishReason,
    FixedCanvas,
    GrowingKV,
    Phase,
    PhaseChange,
    Policy,
    Request,
    RowFate,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.events import RequestJoined, RequestPreempted
from dllm_sched.policies import ChunkWidth, JoinWithinBudget, StepWithinBudget
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Constant, Linear
from dllm_sched.sim.shapes import gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.testing import check_policy
from dllm_sched.theory.logits import logits_bytes, logits_sub_batches

SIMPLE = ("orca", "vllm", "sarathi", "sglang_fdfo", "sglang_block_sync", "dllm_serve")


def request(name, prompt=10, blocks=2, **fields):
    return Request(name, prompt_len=prompt, max_new_tokens=8 * blocks, block_length=8, **fields)


# --- dLLM-Serve -------------------------------------------------------------------------------


def test_logits_of_one_row_are_129_5_megabytes():
    assert logits_bytes(num_rows=1, length=512, vocab_size=126464, value_bytes=2) == 129_499_136
    assert round(129_499_136 / 1e6, 1) == 129.5


@pytest.mark.parametrize("seed", range(20))
def test_sub_batches_hold_every_row_once_within_the_limit_and_no_cut_has_fewer(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 9) for _ in range(rng.randint(0, 9))]
    limit = rng.randint(4, 20) * 100 * 2
    runs = logits_sub_batches(lengths, vocab_size=100, limit_bytes=limit)
    assert [row for start, stop in runs for row in range(start, stop)] == list(range(len(lengths)))
    for start, stop in runs:
        assert stop - start == 1 or sum(lengths[start:stop]) * 200 <= limit

    def fewest(left):  # every cut, tried
        if not left:
            return 0
        sizes = [n for n in range(1, len(left) + 1) if n == 1 or sum(left[:n]) * 200 <= limit]
        return 1 + min(fewest(left[n:]) for n in sizes)

    assert len(runs) == fewest(lengths)


def test_bad_sizes_of_logits_are_named():
    with pytest.raises(ConfigError, match="length"):
        logits_bytes(num_rows=1, length=0, vocab_size=1)
    with pytest.raises(ConfigError, match="limit_bytes"):
        logits_sub_batches([1], vocab_size=1, limit_bytes=0)
    with pytest.raises(ConfigError, match="lengths"):
        logits_sub_batches([0], vocab_size=1, limit_bytes=1)


@pytest.mark.parametrize("seed", range(10))
def test_running_first_then_waiting_until_the_first_that_does_not_fit(seed):
    """Against the loop of the public code: two lists, and one budget that both draw on."""
    rng = random.Random(seed)
    slots, budget = rng.choice((3, 5)), rng.choice((60, 100, 160))
    sched = Scheduler(
        capacity=Capacity(max_num_seqs=8, window_blocks=1),
        policy=presets.dllm_serve(slots, max_num_batched_tokens=budget),
    )
    waiting, running, refreshing, everything = [], [], set(), {}
    sat_out = 0
    for number in range(250):
        now = float(number)
        while rng.random() < 0.35:
            one = request(f"r{len(everything)}", rng.randint(1, 60), rng.randint(1, 5))
            everything[one.id] = one
            waiting.append(one.id)
            sched.submit(one, now=now)

        def cost(name):
            one = everything[name]
            whole = one.prompt_len + -(-one.max_new_tokens // 8) * 8
            return whole if name in refreshing else 8

        # what the loop would do
        batch, left, room = [], budget, slots
        full = False
        for name in running:
            if batch and cost(name) > left:
                full = True
                break
            batch.append(name)
            left -= cost(name)
        spent = budget - sum(map(cost, running))
        while waiting and not full and len(running) < room:
            name = waiting[0]
            refreshing.add(name)  # the first pass computes everything
            if running and cost(name) > spent:
                break
            running.append(waiting.pop(0))
            batch.append(name)
            spent -= cost(name)

        update = sched.next_step(now=now)
        if not batch:
            assert update.batch is None
            continue
        assert {row.request.id for row in update.batch.rows} == set(batch)
        sat_out += len(batch) < len(running)
        ends, phases = [], []
        for row in update.batch.rows:
            if rng.random() < 0.12:
                ends.append(RowFinished(row.slot, FinishReason.EOS))
                running.remove(row.request.id)
            else:
                phase = rng.choice((Phase.REUSE, Phase.REUSE, Phase.REFRESH))
                phases.append(PhaseChange(row.slot, phase))
                if phase is Phase.REFRESH:
                    refreshing.add(row.request.id)
                else:
                    refreshing.discard(row.request.id)
        outcome = StepOutcome(tuple(ends), phases=tuple(phases))
        sched.complete_step(update.batch, outcome, now=now)
        sched.check_invariants()
    assert sat_out


def test_a_preempted_request_starts_from_nothing():
    events = []
    sched = Scheduler(
        capacity=Capacity(max_num_seqs=2, num_pages=8, memory=GrowingKV(page_size=8)),
        policy=presets.dllm_serve(2),
        observers=[events.append],
    )
    for name in ("a", "b"):
        sched.submit(request(name, 8, 5), now=0.0)
    for blocks in range(1, 4):
        batch = sched.next_step(now=0.0).batch
        crossed = tuple(BlockBoundary(row.slot, blocks, 8 + 8 * blocks) for row in batch.rows)
        sched.complete_step(batch, StepOutcome(boundaries=crossed), now=0.0)
        sched.check_invariants()
    sched.next_step(now=0.0)
    gone = [event for event in events if isinstance(event, RequestPreempted)]
    assert [(event.request_id, event.kept) for event in gone] == [("b", False)]
    assert sched.view("b").num_blocks_done == 0


# --- Optimus ----------------------------------------------------------------------------------

WIDTHS = (2, 4, 8, 16, 32)
COMMITTED = tuple(1.6 * width**0.5 for width in WIDTHS)
LATENCY = {
    rows: tuple(max(0.01, 5e-5 * rows * width) for width in WIDTHS) for rows in (1, 4, 16, 64)
}


def test_the_width_is_the_best_of_the_table_at_every_number_of_rows():
    control = ChunkWidth(WIDTHS, COMMITTED, LATENCY)
    sched = Scheduler(capacity=Capacity(max_num_seqs=80), policy=Policy(control=control))
    seen = []
    for count in range(1, 81):
        sched.submit(request(f"r{count}"), now=0.0)
        batch = sched.next_step(now=0.0).batch
        assert len(batch.rows) == count
        held = min((rows for rows in LATENCY if rows >= count), default=64)
        speed = {
            width: COMMITTED[index] / LATENCY[held][index] for index, width in enumerate(WIDTHS)
        }
        width = batch.knobs["chunk_width"]
        assert speed[width] == max(speed.values())
        seen.append(width)
        sched.complete_step(batch, now=0.0)
    assert seen == sorted(seen, reverse=True)  # never wider under more load
    assert (seen[0], seen[-1]) == (32, 4)


def test_in_the_simulator_light_load_is_wide_and_heavy_load_narrow():
    def mean_width(rate):
        control = ChunkWidth(WIDTHS, COMMITTED, LATENCY)
        seen = []

        class Spy(ChunkWidth):
            def batch_knobs(self, state, view):
                answer = super().batch_knobs(state, view)
                seen.append(answer[0]["chunk_width"])
                return answer

        spy = Spy(control.widths, control.committed, control.latency_s)
        result = simulate(
            OpenLoop(Poisson(rate), gsm8k(), seed=1, max_requests=300),
            policy=Policy(control=spy),
            capacity=Capacity(max_num_seqs=64),
            service=Constant(0.0241),
        )
        assert result.num_requests == 300
        return sum(seen) / len(seen)

    light, middle, heavy = map(mean_width, (0.05, 0.5, 4.9))
    assert light > 20 > 1.2 * heavy
    assert light >= middle > heavy


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ({"widths": ()}, "widths"),
        ({"widths": (4, 2)}, "ascending"),
        ({"widths": (0, 2)}, "width"),
        ({"committed": (1.0,)}, "committed"),
        ({"committed": (1.0, 0.0)}, "committed"),
        ({"committed": (1.0, math.nan)}, "committed"),
        ({"latency_s": {}}, "latency_s"),
        ({"latency_s": {1: (1.0,)}}, "latency_s"),
        ({"latency_s": {0: (1.0, 1.0)}}, "rows"),
        ({"latency_s": {1: (1.0, -1.0)}}, "latency_s"),
        ({"knob": ""}, "knob"),
    ],
)
def test_a_bad_table_is_refused(bad, what):
    arguments = {"widths": (2, 4), "committed": (1.0, 1.5), "latency_s": {1: (1.0, 1.0)}} | bad
    with pytest.raises(ConfigError, match=what):
        ChunkWidth(**arguments)


# --- SGLang -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_block_synchronous_rows_wait_for_each_other(seed):
    """Against generations: a row may take its next block once nobody is inside of one."""
    rng = random.Random(seed)
    sched = Scheduler(capacity=Capacity(max_num_seqs=4), policy=presets.sglang_block_sync(4))
    waiting, inside, between, count, refills = [], [], [], 0, 0
    for number in range(300):
        now = float(number // 3)  # the clock may stand still
        if rng.random() < 0.25:
            waiting.append(f"r{count}")
            sched.submit(request(f"r{count}", blocks=3), now=now)
            count += 1
        if waiting and rng.random() < 0.05:
            sched.cancel(waiting.pop(rng.randrange(len(waiting))), now=now)
        if not inside:
            while waiting and len(between) < 4:
                between.append(waiting.pop(0))
                refills += 1
            inside, between = between, []
        update = sched.next_step(now=now)
        if update.batch is None:
            assert not inside
            continue
        assert {row.request.id for row in update.batch.rows} == set(inside)
        ends, boundaries = [], []
        for row in update.batch.rows:
            name = row.request.id
            if rng.random() < 0.3:
                inside.remove(name)
                done = sched.view(name).num_blocks_done + 1
                if done == 3 or rng.random() < 0.2:
                    ends.append(RowFinished(row.slot, FinishReason.EOS))
                else:
                    between.append(name)
                    boundaries.append(BlockBoundary(row.slot, done, 10 + 8 * done))
        if inside and rng.random() < 0.05:  # somebody inside of its block goes away
            name = rng.choice(inside)
            inside.remove(name)
            sched.cancel(name, now=now)
        sched.complete_step(update.batch, StepOutcome(tuple(ends), tuple(boundaries)), now=now)
        sched.check_invariants()
    assert refills > 20


def test_first_done_first_out_beats_waiting_for_each_other():
    times = {
        name: simulate(
            OpenLoop(Poisson(0.5), gsm8k(), seed=1, max_requests=300),
            policy=presets.by_name(name, batch_size=8),
            capacity=Capacity(max_num_seqs=8),
            service=Constant(0.0241),
        ).mean()
        for name in ("sglang_fdfo", "sglang_block_sync", "fixed_fill")
    }
    assert times["sglang_fdfo"] < times["sglang_block_sync"] < times["fixed_fill"]


# --- baselines --------------------------------------------------------------------------------


def joins_of(policy, capacity, *, rate=0.4, count=120, service=None):
    events = []
    result = simulate(
        OpenLoop(Poisson(rate), gsm8k(), seed=6, max_requests=count),
        policy=policy,
        capacity=capacity,
        service=Constant(0.02) if service is None else service,
        observers=[events.append],
        phases=True,
    )
    assert result.num_requests == count
    return result, events


def test_orca_admits_in_order_of_arrival_and_sets_memory_aside():
    capacity = Capacity(max_num_seqs=8, num_pages=200, memory=FixedCanvas(page_size=16))
    _, events = joins_of(presets.orca(4), capacity)
    order = [int(event.request_id[1:]) for event in events if isinstance(event, RequestJoined)]
    assert order == sorted(order)
    assert not any(isinstance(event, RequestPreempted) for event in events)


def test_vllm_sends_back_the_last_to_come_and_takes_it_back_before_later_ones():
    capacity = Capacity(max_num_seqs=8, num_pages=120, memory=GrowingKV(page_size=16))
    result, events = joins_of(presets.vllm(8), capacity, rate=0.8)
    assert result.stats.num_preempted > 5
    running, gone = [], {}
    for event in events:
        if isinstance(event, RequestJoined):
            number = int(event.request_id[1:])
            assert all(number <= other for other in gone), "who was sent back comes first"
            assert event.at not in gone.values(), "nobody joins in a round that sends rows back"
            gone.pop(number, None)
            running.append(number)
        elif isinstance(event, RequestPreempted):
            number = int(event.request_id[1:])
            assert number == running[-1]  # the last admitted
            assert not event.kept
            running.remove(number)
            gone[number] = event.at
        elif type(event).__name__ == "RequestFinished":
            running.remove(int(event.request_id[1:]))


@pytest.mark.parametrize("draining", [False, True])
def test_vllm_goes_on_after_a_step_that_failed_for_every_row(draining):
    scheduler = Scheduler(policy=presets.vllm(4), capacity=Capacity(max_num_seqs=4))
    scheduler.submit(Request("a", prompt_len=20, max_new_tokens=64), now=0.0)
    batch = scheduler.next_step(now=0.0).batch
    if draining:
        scheduler.drain(now=0.0)
    scheduler.fail_step(batch, ValueError(), rows={0: RowFate.RESTART}, now=1.0)
    assert scheduler.next_step(now=1.0).batch is not None


def test_sarathi_keeps_every_step_within_its_budget():
    tokens = 500
    seen = []

    class Spy(Linear):
        def step_s(self, num_rows, num_tokens):
            seen.append((num_rows, num_tokens))
            return super().step_s(num_rows, num_tokens)

    capacity = Capacity(max_num_seqs=8, window_blocks=2)
    joins_of(presets.sarathi(8, tokens=tokens), capacity, rate=1.0, service=Spy(0.02))
    assert 1 < max(rows for rows, _ in seen) < 8  # the budget binds, not the slots
    assert all(used <= tokens or rows == 1 for rows, used in seen)
    assert max(used for _, used in seen) > 0.8 * tokens


@pytest.mark.parametrize("name", SIMPLE)
def test_every_request_ends_and_a_drain_lets_the_leftovers_go(name):
    for capacity in (
        Capacity(max_num_seqs=4),
        Capacity(max_num_seqs=4, num_pages=60, memory=GrowingKV(page_size=16), window_blocks=1),
    ):
        joins_of(presets.by_name(name, batch_size=4), capacity, count=60)


@pytest.mark.parametrize("name", SIMPLE)
def test_the_presets_keep_the_contract(name):
    check_policy(presets.by_name(name, batch_size=4))


def test_other_strategies_keep_the_contract():
    check_policy(presets.optimus(4, widths=WIDTHS, committed=COMMITTED, latency_s=LATENCY))
    check_policy(presets.dllm_serve(4, max_num_batched_tokens=60))
    for kind in (JoinWithinBudget, StepWithinBudget):
        with pytest.raises(ConfigError, match="tokens"):
            kind(0)
