"""HERALD: hints at block boundaries, and what overlapping selection with denoising gains."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from dllm_sched.policies import Admission, Prefetch, PrefetchNextBlock, Slots
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Constant, Linear, Offloaded
from dllm_sched.sim.shapes import EvenSteps, Shapes, Work, gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop, Replay
from dllm_sched.testing import check_policy
from dllm_sched.theory.prefetch import blocks_s, prefetch_gain


class EveryRound(Admission):
    """Has every change seen as a round, also while nobody waits or every slot is taken."""

    def settle(self, state, round):
        return state


def hinting(slots):
    policy = presets.herald(slots)
    return Policy(admission=policy.admission & EveryRound(), control=policy.control, name="hints")


class Machine:
    """A driver as an engine in virtual time: step by step, with the waits of a service model."""

    def __init__(self, policy, slots, service, jobs):
        """``jobs``: (arrival in steps from the start, prompt, steps of each block)."""
        self.scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=slots))
        self.service, self.waits = service, service.waits()
        self.jobs = jobs
        self.hints = []  # (number of the step, hints)
        self.gpu_s = 0.0
        self.now = 0.0

    def run(self):
        jobs = sorted(enumerate(self.jobs), key=lambda job: job[1][0])
        at_work = {}  # slot -> [request, steps left of each block, blocks done]
        crossed, number = [], 0
        while jobs or self.scheduler.has_work():
            while jobs and jobs[0][1][0] <= number:
                index, (_, prompt, blocks) = jobs.pop(0)
                request = Request(
                    f"r{index}", prompt_len=prompt, max_new_tokens=32 * len(blocks), payload=blocks
                )
                self.scheduler.submit(request, now=self.now)
            number += 1
            batch = self.scheduler.next_step(now=self.now).batch
            if batch is None:
                continue
            for row in batch.joined:
                at_work[row.slot] = [row.request, list(row.request.payload), 0]
            if batch.hints:
                self.hints.append((number, batch.hints))
            step_s = self.service.step_s(len(batch.rows), 0)
            if batch.joined or crossed or batch.hints:
                self.now += self.waits.before(batch, crossed, now=self.now, step_s=step_s)
            self.now += step_s
            self.gpu_s += step_s
            crossed, finished = [], []
            for slot, row in list(at_work.items()):
                request, left, done = row
                left[done] -= 1
                if left[done]:
                    continue
                row[2] += 1
                if row[2] == len(left):
                    finished.append(RowFinished(slot, FinishReason.EOS))
                    del at_work[slot]
                else:
                    kv_tokens = request.prompt_len + 32 * row[2]
                    crossed.append(BlockBoundary(slot, row[2], kv_tokens))
            outcome = StepOutcome(tuple(finished), tuple(crossed))
            self.scheduler.complete_step(batch, outcome, now=self.now)
            self.scheduler.check_invariants()
        return self.now


# --- hints ----------------------------------------------------------------------------------------


def test_a_hint_comes_once_with_the_first_step_of_a_block_and_not_for_the_last():
    machine = Machine(
        hinting(2), 2, Offloaded(Constant(1.0)), [(0, 10, (3, 2, 2)), (2, 10, (4, 1))]
    )
    machine.run()
    assert machine.hints == [
        (1, (Prefetch(0, "r0", 1),)),
        (3, (Prefetch(1, "r1", 1),)),
        (4, (Prefetch(0, "r0", 2),)),
    ]


def test_hints_come_while_every_slot_is_taken():
    machine = Machine(presets.herald(1), 1, Offloaded(Constant(1.0)), [(0, 10, (3, 2, 2))])
    machine.run()
    assert machine.hints == [(1, (Prefetch(0, "r0", 1),)), (4, (Prefetch(0, "r0", 2),))]


def test_no_hint_for_a_row_that_has_ended_since_its_boundary():
    """Running ahead, its slot is still in use by the step in flight."""
    scheduler = Scheduler(policy=hinting(2), capacity=Capacity(max_num_seqs=2), max_in_flight=2)
    for id in "ab":
        scheduler.submit(Request(id, prompt_len=8, max_new_tokens=96), now=0.0)
    first = scheduler.next_step(now=0.0).batch
    scheduler.next_step(now=0.0)
    crossed = tuple(BlockBoundary(slot, 1, 40) for slot in (0, 1))
    scheduler.complete_step(first, StepOutcome(boundaries=crossed), now=1.0)
    scheduler.cancel("a", now=1.0)
    assert scheduler.next_step(now=1.0).batch.hints == (Prefetch(1, "b", 2),)


@pytest.mark.parametrize("seed", range(6))
def test_each_hint_is_that_of_a_naive_reference(seed):
    """From the jobs alone: who has started which block by which step."""
    rng = random.Random(seed)
    jobs = [
        (rng.randint(0, 60), 8, tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 5))))
        for _ in range(25)
    ]
    slots = rng.randint(1, 5)
    machine = Machine(hinting(slots), slots, Offloaded(Constant(1.0)), jobs)
    machine.run()
    waiting = sorted(range(len(jobs)), key=lambda job: jobs[job][0])
    running, expected, number = {}, {}, 0  # job -> step at which it started
    while waiting or running:
        number += 1
        for job, start in list(running.items()):
            if number - start == sum(jobs[job][2]):
                del running[job]
        while waiting and len(running) < slots and jobs[waiting[0]][0] < number:
            running[waiting.pop(0)] = number
        for job, start in running.items():
            blocks = jobs[job][2]
            for block in range(len(blocks) - 1):
                if start + sum(blocks[:block]) == number:
                    expected.setdefault(number, set()).add((f"r{job}", block + 1))
    assert {at: {hint[1:] for hint in hints} for at, hints in machine.hints} == expected


def test_the_policy_keeps_its_contract():
    check_policy(presets.herald(4))
    check_policy(hinting(4))


# --- two resources --------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(1, 6),
    st.integers(0, 400),
    st.integers(1, 50),
    st.integers(1, 10),
    st.integers(0, 10),
    st.integers(1, 4),
)
def test_rows_that_cross_together_take_what_the_closed_form_says(
    blocks, select, step, steps, draft, rows
):
    draft = min(draft, steps)
    model = Offloaded(Constant(step / 100), select_s=select / 100, draft_steps=draft)
    jobs = [(0, 100, (steps,) * blocks)] * rows
    for policy, prefetch in ((hinting(rows), True), (presets.continuous(rows), False)):
        expected = blocks_s(
            blocks, rows * select / 100, step / 100, steps, draft_steps=draft, prefetch=prefetch
        )
        assert Machine(policy, rows, model, jobs).run() == pytest.approx(expected)


def test_the_gain_by_hand():
    """A selection of 0.7 s hides behind the 7 steps of 0.1 s that follow the draft, exactly."""
    model = Offloaded(Constant(0.1), select_s=0.7)
    jobs = [(0, 64, (8,) * 50)]
    alone = Machine(presets.continuous(1), 1, model, jobs).run()
    ahead = Machine(hinting(1), 1, model, jobs).run()
    assert alone == pytest.approx(50 * 1.5)
    assert ahead == pytest.approx(0.7 + 50 * 0.8)
    assert prefetch_gain(0.7, 0.1, 8) == pytest.approx(1.5 / 0.8)
    assert alone / ahead < prefetch_gain(0.7, 0.1, 8)


@given(st.floats(0, 100), st.floats(1e-3, 10), st.integers(1, 64), st.integers(0, 64))
def test_the_gain_is_at_least_one_and_less_than_two(select, step, steps, draft):
    draft = min(draft, steps)
    gain = prefetch_gain(select, step, steps, draft_steps=draft)
    assert 1 - 1e-12 <= gain <= 2 - draft / steps + 1e-12
    many = 10_000
    plain = blocks_s(many, select, step, steps, draft_steps=draft, prefetch=False)
    ahead = blocks_s(many, select, step, steps, draft_steps=draft)
    assert plain / ahead == pytest.approx(gain, rel=1e-3)
    assert ahead >= max(many * select, many * steps * step) - 1e-9


def test_a_selection_reads_the_whole_cache_and_a_share_of_it_crosses():
    model = Offloaded(
        Constant(0.02),
        select_s=0.001,
        select_token_s=1e-6,
        bytes_per_token=500_000,
        budget=0.05,
        bandwidth=25e9,
    )
    assert model.step_s(3, 500) == 0.02
    assert model.selection_s(32_768) == pytest.approx(0.001 + 0.032768 + 0.032768)
    # A block later the cache is 32 tokens longer.
    machine = Machine(presets.continuous(1), 1, model, [(0, 32_736, (2, 2))])
    whole = model.selection_s(32_736) + model.selection_s(32_768) + 4 * 0.02
    assert machine.run() == pytest.approx(whole)


def reference_run(jobs, slots, select, step, draft, *, hinted):
    """Events from scratch: every selection ever asked for is scheduled anew at each step."""
    asked = {}  # (job, block) -> (instant at which it may start, order)
    now, number, order = 0.0, 0, 0
    waiting = sorted(range(len(jobs)), key=lambda job: (jobs[job][0], job))
    running = {}

    def there(keys):
        free, done = 0.0, {}
        for key, (at, _) in sorted(asked.items(), key=lambda one: one[1]):
            free = max(free, at) + select
            done[key] = free
        return max(done[key] for key in keys)

    while waiting or running:
        number += 1
        for job, start in list(running.items()):
            if number - start == sum(jobs[job][2]):
                del running[job]
        begin = []
        while waiting and len(running) < slots and jobs[waiting[0]][0] < number:
            running[waiting.pop(0)] = number
        for job, start in running.items():
            ends = [sum(jobs[job][2][:block]) for block in range(len(jobs[job][2]))]
            if number - start in ends:
                begin.append((job, ends.index(number - start)))
        if not running:
            continue
        for key in sorted(begin, key=lambda key: key[1] > 0):  # those who join ask first
            if key not in asked or asked[key][0] > now:
                asked[key] = (now, order)
                order += 1
        if begin:
            now = max(now, there(begin))
        for job, block in sorted(begin, key=lambda key: key[1] == 0):  # and are hinted at last
            if hinted and block + 1 < len(jobs[job][2]):
                asked[job, block + 1] = (now + draft * step, order)
                order += 1
        now += step
    return now


@pytest.mark.parametrize("seed", range(8))
def test_rows_at_different_blocks_against_a_reference_from_scratch(seed):
    """Selections of one length: the order among those who must wait together is all the same."""
    rng = random.Random(seed)
    steps = [rng.randint(2, 8) for _ in range(30)]
    jobs = [(rng.randint(0, 80), 64, (n,) * rng.randint(1, 6)) for n in steps]
    slots, select, draft = rng.randint(1, 4), rng.uniform(0, 0.5), rng.randint(0, 2)
    model = Offloaded(Constant(0.125), select_s=select, draft_steps=draft)
    found = {}
    for policy, hinted in ((hinting(slots), True), (presets.continuous(slots), False)):
        machine = Machine(policy, slots, model, jobs)
        found[hinted] = machine.run()
        expected = reference_run(jobs, slots, select, 0.125, draft, hinted=hinted)
        assert found[hinted] == pytest.approx(expected)
        assert found[hinted] >= machine.gpu_s
    assert found[True] <= found[False] + 1e-9


def test_what_it_gains_with_sixteen_rows_at_different_blocks():
    """The CPU serves one row after the other, so many rows hide less than one does.

    32 steps of 20 ms a block; selections of 30 ms: 16 of them fill 75 % of a block's time.
    """
    rng = random.Random(1)
    jobs = [(rng.randint(0, 640), 512, (32,) * rng.randint(4, 16)) for _ in range(64)]
    model = Offloaded(Constant(0.02), select_s=0.03)
    plain = Machine(presets.continuous(16), 16, model, jobs)
    ahead = Machine(hinting(16), 16, model, jobs)
    gain = plain.run() / ahead.run()
    assert 1.3 < gain < prefetch_gain(16 * 0.03, 0.02, 32)


def serve(policy, service, *, jump=True, rate=1.0):
    return simulate(
        OpenLoop(Poisson(rate), Shapes(gsm8k().size, decoder=EvenSteps(16)), max_requests=300),
        policy=policy,
        capacity=Capacity(max_num_seqs=8),
        service=service,
        jump=jump,
    )


def test_the_simulator_waits_as_the_reference_does():
    rng = random.Random(3)
    jobs = [(0, 64, (8,) * rng.randint(1, 6)) for _ in range(30)]
    works = [
        Work(p, 32 * len(b), 32, len(b), 8 * len(b), tuple(range(8, 8 * len(b) + 1, 8)))
        for _, p, b in jobs
    ]
    model = Offloaded(Constant(0.125), select_s=0.3)
    for policy, hinted in ((presets.herald(3), True), (presets.continuous(3), False)):
        for jump in (True, False):
            result = simulate(
                Replay([(0.0, work) for work in works]),
                policy=policy,
                capacity=Capacity(max_num_seqs=3),
                service=model,
                jump=jump,
            )
            expected = reference_run(jobs, 3, 0.3, 0.125, 1, hinted=hinted)
            assert result.duration_s == pytest.approx(expected)


def test_hints_shorten_latencies_in_the_simulator():
    model = Offloaded(Constant(0.02), select_s=0.01)
    ahead, plain = serve(presets.herald(8), model), serve(presets.continuous(8), model)
    assert list(ahead.latency_s) == list(serve(presets.herald(8), model, jump=False).latency_s)
    assert 1.1 < plain.mean() / ahead.mean() < 2
    free = serve(presets.herald(8), Offloaded(Constant(0.02)))
    assert list(free.latency_s) == list(serve(presets.herald(8), Constant(0.02)).latency_s)


def test_other_models_never_wait():
    assert Constant(1.0).waits() is None
    assert Linear(1.0).waits() is None


def test_a_hint_for_somebody_else_prepares_nothing():
    """The slot was given to another request since; a policy may also hint at what is not there."""
    model = Offloaded(Constant(1.0), select_s=5.0)
    waits = model.waits()
    scheduler = Scheduler(policy=hinting(1), capacity=Capacity(max_num_seqs=1))
    for id in "ab":
        scheduler.submit(Request(id, prompt_len=8, max_new_tokens=64), now=0.0)
    batch = scheduler.next_step(now=0.0).batch
    assert batch.hints == (Prefetch(0, "a", 1),)
    hints = (*batch.hints, Prefetch(7, "x", 1), "something else")
    assert waits.before(batch._replace(hints=hints), (), now=0.0, step_s=1.0) == 5.0
    done = StepOutcome((RowFinished(0, FinishReason.EOS),))
    scheduler.complete_step(batch, done, now=6.0)
    batch = scheduler.next_step(now=20.0).batch
    assert waits.before(batch, (), now=20.0, step_s=1.0) == 5.0  # b's own, asked for now
    outcome = StepOutcome(boundaries=(BlockBoundary(0, 1, 40),))
    scheduler.complete_step(batch, outcome, now=26.0)
    batch = scheduler.next_step(now=40.0).batch
    assert waits.before(batch, outcome.boundaries, now=40.0, step_s=1.0) == 0.0  # fetched long ago


@pytest.mark.parametrize(
    "make",
    [
        lambda: Offloaded(None),
        lambda: Offloaded(Constant(1.0), select_s=-1),
        lambda: Offloaded(Constant(1.0), budget=1.5),
        lambda: Offloaded(Constant(1.0), bandwidth=0),
        lambda: Offloaded(Constant(1.0), draft_steps=-1),
        lambda: blocks_s(0, 1, 1, 1),
        lambda: blocks_s(1, -1, 1, 1),
        lambda: blocks_s(1, 1, 0, 1),
        lambda: blocks_s(1, 1, 1, 4, draft_steps=5),
        lambda: prefetch_gain(1, 1, 0),
    ],
)
def test_bad_arguments(make):
    with pytest.raises(ConfigError):
        make()


def test_the_preset_is_continuous_with_hints():
    policy = presets.by_name("herald", batch_size=4)
    assert policy.control == PrefetchNextBlock()
    assert policy.admission == Slots(4)
