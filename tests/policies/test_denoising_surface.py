"""Denoising Surface: its arithmetic, its order against the published one, and what it gains."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_sched import (
    BlockBoundary,
    Capacity,
    ConfigError,
    FinishReason,
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
from dllm_sched.policies import (
    AgedShortestFirst,
    BudgetCost,
    ConstantCost,
    PayloadCost,
    Slots,
    SurfaceCost,
)
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Constant
from dllm_sched.sim.shapes import Work, gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.testing import check_policy
from dllm_sched.theory.surface import Marginals, StepCosts, Surface, aged_work, log_key

SURFACE = Surface([[1, 0.5], [0.6, 0.3]])
MACHINE = StepCosts(prefill_block_ms=2, refresh_block_ms=3, step_ms=1)


# --- the surface ----------------------------------------------------------------------------------


def test_the_marginals_of_the_example():
    assert SURFACE.marginals.steps == pytest.approx((1.6, 0.8))
    assert SURFACE.marginals.blocks == pytest.approx(1.6)
    assert SURFACE.marginals.curve == pytest.approx((1.6, 2.4))


def test_the_cost_of_the_example():
    """2 whole blocks of prompt * 2 + 1.6 blocks * 3 + 2.4 block-steps * 1."""
    assert SURFACE.cost_ms(70, MACHINE) == pytest.approx(11.2)
    assert MACHINE.work(SURFACE.cost_ms(70, MACHINE)) == pytest.approx(11.2 / 3)


def test_ready_to_decode_ranks_without_the_prefill():
    assert SURFACE.cost_ms(70, MACHINE, prefilled=True) == pytest.approx(7.2)


def test_a_step_costs_by_its_place_and_by_the_prompt():
    machine = StepCosts(
        prefill_block_ms=0,
        refresh_block_ms=1,
        step_ms=10,
        shape=[[1.5, 0.5]],
        context_ms=0.25,
        mean_prompt_blocks=2,
        block_length=16,
    )
    # 5 whole blocks of prompt: 3 above the mean, 0.75 ms more for each of the 2.4 block-steps.
    steps = 1.6 * 15 + 0.8 * 5 + 2.4 * 0.75
    assert SURFACE.cost_ms(95, machine) == pytest.approx(1.6 + steps)


def test_without_a_surface_the_marginals_and_a_price_per_step_do():
    flat = Marginals((1.6, 0.8), 1.6)
    assert flat.cost_ms(70, MACHINE, [1, 1, 1]) == pytest.approx(11.2)
    assert flat.cost_ms(70, MACHINE, [2, 0.5]) == pytest.approx(4 + 4.8 + 3.2 + 0.4)


def test_marginals_that_rise_are_refused():
    with pytest.raises(ConfigError, match="rise"):
        Surface([[0.5, 0.6]])
    Surface([[0.5, 0.500005]])  # no more than single precision does
    with pytest.raises(ConfigError, match="rise"):
        Marginals((1.0, 0.5, 0.75), 1.0)
    Surface([[0.5, 0.6], [1, 0.2]])  # a block's own entries may, their sums may not


@pytest.mark.parametrize(
    ("first", "blocks", "good"),
    [
        (1.6, 1.6015, True),
        (1.6, 1.6017, False),
        (0.4, 0.4009, True),  # of less than one block: a thousandth of 1
        (0.4, 0.4011, False),
        (2000, 2001.9, True),
    ],
)
def test_the_first_marginal_is_the_number_of_blocks(first, blocks, good):
    if good:
        Marginals((first,), blocks)
    else:
        with pytest.raises(ConfigError, match="step 1"):
            Marginals((first,), blocks)


@given(st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=6))
def test_the_cost_is_that_of_every_possible_step(rows):
    """Against the expectation step by step; rows sorted, so that the surface is a legal one."""
    rows = [sorted(row, reverse=True) for row in rows]
    surface = Surface(rows)
    expected = sum(2 for _ in range(70 // 32)) + sum(row[0] * 3 for row in rows)
    expected += sum(value for row in rows for value in row)
    assert surface.cost_ms(70, MACHINE) == pytest.approx(expected)
    curve = surface.marginals.curve
    assert list(curve) == sorted(curve)
    assert curve[-1] == pytest.approx(sum(map(sum, rows)))


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan, math.inf, True, "1", None])
def test_what_is_no_probability_is_refused(bad):
    with pytest.raises(ConfigError, match=r"probabilities\[0\]\[1\]"):
        Surface([[1, bad]])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Surface([]),
        lambda: Surface([[], []]),
        lambda: Marginals((1.0,), math.nan),
        lambda: Marginals((-1.0,), 1.0),
        lambda: Marginals((2.0, 1.0), 2.0).cost_ms(8, MACHINE, [1.0]),
        lambda: StepCosts(prefill_block_ms=-1, refresh_block_ms=1, step_ms=1),
        lambda: StepCosts(prefill_block_ms=1, refresh_block_ms=0, step_ms=1),
        lambda: StepCosts(prefill_block_ms=1, refresh_block_ms=1, step_ms=1, context_ms=math.inf),
        lambda: StepCosts(prefill_block_ms=1, refresh_block_ms=1, step_ms=1, shape=[[]]),
        lambda: StepCosts(prefill_block_ms=1, refresh_block_ms=1, step_ms=1, block_length=0),
        lambda: SURFACE.cost_ms(0, MACHINE),
        lambda: aged_work(0, 1),
        lambda: aged_work(1, -1),
        lambda: aged_work(1, 1, rate=1),
        lambda: log_key(1, 1, rate=-0.1),
        lambda: log_key(1, 1, period_s=0),
        lambda: AgedShortestFirst(rate=math.nan),
        lambda: AgedShortestFirst(rate=True),
        lambda: AgedShortestFirst(period_s=0.0),
        lambda: AgedShortestFirst(placeholder=math.inf),
        lambda: AgedShortestFirst(BudgetCost),
        lambda: AgedShortestFirst(lambda request: 1.0),
        lambda: ConstantCost(0),
        lambda: presets.dws(4, rate=1.0),
    ],
)
def test_bad_arguments(make):
    with pytest.raises(ConfigError):
        make()


# --- the order ------------------------------------------------------------------------------------


def test_ageing_of_the_example():
    """100 at 95 s: three full periods of 30 s, 10 % each."""
    assert aged_work(100, 95) == pytest.approx(72.9)


works = st.floats(1e-3, 1e6)
instants = st.floats(0, 1e5)


@given(works, instants, works, instants, st.floats(0, 1e4), st.floats(0, 0.9))
def test_the_static_key_is_within_one_factor_of_the_published_order(
    work, arrived, other_work, other_arrived, later, rate
):
    """Whoever is first by the key has at most 1 / (1 - rate) of the other's aged work."""
    now = max(arrived, other_arrived) + later
    pairs = sorted(
        (log_key(w, at, rate=rate), aged_work(w, now - at, rate=rate))
        for w, at in ((work, arrived), (other_work, other_arrived))
    )
    (_, first), (_, second) = pairs
    assert first <= second / (1 - rate) * (1 + 1e-6)


def naive_order(waiting, now, rate, period):
    """Published ageing without the floor, computed anew for everybody at every decision."""

    def aged(one):
        work, arrived, _ = one
        for _ in range(int((now - arrived) // period)):  # whole periods, then the rest
            work *= 1 - rate
        return work * (1 - rate) ** ((now - arrived) % period / period)

    return sorted(waiting, key=lambda one: (round(math.log(aged(one)), 9), one[2]))


@pytest.mark.parametrize("seed", range(12))
def test_each_decision_is_that_of_a_naive_reference(seed):
    """Who joins, step by step, with several slots; and never far from the floor rule."""
    rng = random.Random(seed)
    rate, period = rng.choice([0.0, 0.1, 0.5]), rng.choice([5.0, 30.0])
    slots = rng.randint(1, 4)
    scheduler = Scheduler(
        policy=presets.dws(slots, PayloadCost("work"), rate=rate, period_s=period),
        capacity=Capacity(max_num_seqs=slots),
    )
    waiting, running, now, count = [], {}, 0.0, 0
    while count < 150 or waiting or running:
        now += rng.choice([0.0, rng.uniform(0, 10)])
        for _ in range(rng.randint(0, 3) if count < 150 else 0):
            work = rng.choice([1.0, 2.0, rng.uniform(1, 100)])
            payload = SimpleNamespace(work=work)
            request = Request(f"r{count}", prompt_len=4, max_new_tokens=8, payload=payload)
            scheduler.submit(request, now=now)
            waiting.append((work, now, count))
            count += 1
        expected = naive_order(waiting, now, rate, period)[: slots - len(running)]
        update = scheduler.next_step(now=now)
        if update.batch is None:
            assert not waiting and not running
            continue
        joined = [int(row.request.id[1:]) for row in update.batch.joined]
        assert sorted(joined) == sorted(number for _, _, number in expected)
        floored = {n: aged_work(w, now - at, rate=rate, period_s=period) for w, at, n in waiting}
        waiting = [one for one in waiting if one[2] not in joined]
        for number in joined:
            for _, _, left in waiting:
                assert floored[number] <= floored[left] / (1 - rate) * (1 + 1e-9)
        for row in update.batch.joined:
            running[row.slot] = row.request.id
        done = [slot for slot in running if rng.random() < 0.3]
        for slot in done:
            del running[slot]
        outcome = StepOutcome(tuple(RowFinished(slot, FinishReason.EOS) for slot in done))
        scheduler.complete_step(update.batch, outcome, now=now)
    scheduler.check_invariants()


class Guess:
    """A predictor that answers as told, by the request's id."""

    def __init__(self, **answers):
        self.answers = answers

    def cost(self, request, *, prefilled):
        answer = self.answers[request.id]
        return answer() if callable(answer) else answer


def order(ordering, *requests):
    """The order in which requests that arrive together run one at a time."""
    policy = Policy(ordering=ordering, admission=Slots(1))
    scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=1))
    for request in requests:
        scheduler.submit(request, now=0.0)
    ran = ""
    while (update := scheduler.next_step(now=0.0)).batch is not None:
        row = update.batch.rows[0]
        ran += row.request.id
        finished = (RowFinished(row.slot, FinishReason.EOS),)
        scheduler.complete_step(update.batch, StepOutcome(finished), now=0.0)
    return ran


def plain(id, prompt_len=8, budget=64, payload=None):
    return Request(id, prompt_len=prompt_len, max_new_tokens=budget, payload=payload)


def test_a_missing_prediction_counts_as_the_placeholder():
    guess = Guess(a=1025.0, b=None, c=1023.0)
    assert order(AgedShortestFirst(guess), plain("a"), plain("b"), plain("c")) == "cba"
    guess = Guess(a=6.0, b=None, c=4.0)
    few = AgedShortestFirst(guess, placeholder=5.0)
    assert order(few, plain("a"), plain("b"), plain("c")) == "cba"


@pytest.mark.parametrize(
    "failure", [math.nan, math.inf, 0, -1.0, "12", True, lambda: {}["gone"], lambda: 1 / 0]
)
def test_a_failed_prediction_counts_as_the_prompt(failure):
    guess = Guess(a=101.0, b=failure, c=99.0)
    ran = order(AgedShortestFirst(guess), plain("a"), plain("b", prompt_len=100), plain("c"))
    assert ran == "cba"


def test_no_prediction_ever_is_first_come_first_served_and_nobody_is_stuck():
    assert order(AgedShortestFirst(Guess(**dict.fromkeys("abcde"))), *map(plain, "ecbda")) == (
        "ecbda"
    )


def test_a_prediction_that_comes_late_counts_when_the_request_is_queued_again():
    late = Guess(a=None, b=10.0)
    policy = Policy(ordering=AgedShortestFirst(late), admission=Slots(1))
    scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=1))
    scheduler.submit(plain("a"), now=0.0)
    batch = scheduler.next_step(now=0.0).batch
    late.answers["a"] = 5.0  # it has arrived, in the payload, say
    scheduler.submit(plain("b"), now=1.0)
    scheduler.fail_step(batch, RuntimeError(), rows={0: RowFate.RESTART}, now=2.0)
    assert scheduler.next_step(now=2.0).batch.rows[0].request.id == "a"


def test_predictions_that_have_come_in_the_meantime_count_from_requeue_on():
    guess = Guess(a=None, b=None, c=None)
    policy = Policy(ordering=AgedShortestFirst(guess), admission=Slots(1))
    scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=1))
    for at, id in enumerate("abc"):
        scheduler.submit(plain(id), now=float(at))
    guess.answers |= {"c": 700.0, "b": 900.0}
    for id in "bc":
        scheduler.requeue(id, now=3.0)
    ran = ""
    while (update := scheduler.next_step(now=4.0)).batch is not None:
        ran += update.batch.rows[0].request.id
        done = StepOutcome((RowFinished(0, FinishReason.EOS),))
        scheduler.complete_step(update.batch, done, now=4.0)
    assert ran == "cba"


def test_constant_is_first_come_first_served_and_budget_is_what_the_client_allows():
    requests = plain("a", budget=96), plain("b", budget=32), plain("c", budget=64)
    assert order(AgedShortestFirst(ConstantCost()), *requests) == "abc"
    assert order(AgedShortestFirst(BudgetCost()), *requests) == "bca"
    assert presets.dws(4).ordering == AgedShortestFirst(BudgetCost())


def test_surfaces_are_predictions():
    by_surface = SurfaceCost(lambda request: request.payload, MACHINE)
    cheap, dear = Surface([[1, 0.1]]), Surface([[1, 1], [1, 1]])
    requests = plain("a", payload=dear), plain("b"), plain("c", payload=cheap)
    assert order(AgedShortestFirst(by_surface), *requests) == "cab"  # b has none: 1024


def test_a_row_that_comes_back_ranks_without_its_prefill():
    """With its prefill 'a' would cost 100 * 2 more and come after 'b'."""
    ordering = AgedShortestFirst(SurfaceCost(lambda _: SURFACE, MACHINE), rate=0.0)
    seen = {}

    class Watched(AgedShortestFirst):
        def key(self, state, rv):
            key = ordering.key(state, rv)
            seen.setdefault(rv.id, []).append(math.exp(key[0]) * 3)
            return key

    scheduler = Scheduler(
        policy=Policy(ordering=Watched(), admission=Slots(1)), capacity=Capacity(max_num_seqs=1)
    )
    scheduler.submit(plain("a", prompt_len=70), now=0.0)
    batch = scheduler.next_step(now=0.0).batch
    outcome = StepOutcome(
        boundaries=(BlockBoundary(0, 1, 102),), phases=(PhaseChange(0, Phase.REUSE),)
    )
    scheduler.complete_step(batch, outcome, now=1.0)
    batch = scheduler.next_step(now=1.0).batch
    scheduler.fail_step(batch, RuntimeError(), rows={0: RowFate.RESTART}, now=2.0)
    assert seen["a"] == pytest.approx([11.2, 7.2])


def test_the_key_is_the_one_of_the_theory():
    ordering = AgedShortestFirst(ConstantCost(7.0), rate=0.3, period_s=11.0)
    seen = []

    class Watched(AgedShortestFirst):
        def key(self, state, rv):
            seen.append(ordering.key(state, rv))
            return seen[-1]

    scheduler = Scheduler(policy=Policy(ordering=Watched()), capacity=Capacity(max_num_seqs=1))
    scheduler.submit(plain("a"), now=123.0)
    assert seen[0][0] == pytest.approx(log_key(7.0, 123.0, rate=0.3, period_s=11.0))


@pytest.mark.parametrize("predictor", [None, ConstantCost(), PayloadCost()])
def test_the_policy_keeps_its_contract(predictor):
    check_policy(presets.dws(4, predictor))


# --- what it gains --------------------------------------------------------------------------------


def r_squared_of(values, truth):
    return float(np.corrcoef(values, truth)[0, 1] ** 2)


class Foretold(Work):
    """The simulator's work, and what somebody said of it."""

    guess: float


class Noisy:
    """Attaches a prediction that explains a share of the variance: the oracle in a fog."""

    def __init__(self, share, shapes, seed=5):
        self.share, self.mean = share, shapes.mean_steps
        steps = shapes.steps()
        self.deviation = math.sqrt(sum(p * (n - self.mean) ** 2 for n, p in steps.items()))
        self.rng = np.random.default_rng(seed)
        self.guesses, self.truths = [], []

    def __call__(self, id, work, at):
        fog = math.sqrt(self.share * (1 - self.share)) * self.rng.standard_normal()
        told = Foretold(*work)
        told.guess = self.mean + self.share * (work.num_steps - self.mean) + self.deviation * fog
        self.guesses.append(told.guess)
        self.truths.append(work.num_steps)
        return Request(
            id,
            prompt_len=work.prompt_len,
            max_new_tokens=work.max_new_tokens,
            block_length=work.block_length,
            payload=told,
        )


def gsm8k_at(load, policy, count=6000, **options):
    """Full use of 16 slots is a request per mean_steps / 16 steps."""
    shapes = gsm8k()
    step_s = 0.02
    rate = load * 16 / (shapes.mean_steps * step_s)
    return simulate(
        OpenLoop(Poisson(rate), shapes, max_requests=count, seed=11),
        policy=policy,
        capacity=Capacity(max_num_seqs=16),
        service=Constant(step_s),
        **options,
    )


def test_an_oracle_gains_on_gsm8k_and_a_constant_is_fcfs():
    """At 98 % load. Steps vary little (cv 0.23): below 90 % there is next to nothing to gain."""
    fcfs = gsm8k_at(0.98, presets.continuous(16))
    constant = gsm8k_at(0.98, presets.dws(16, ConstantCost()))
    oracle = gsm8k_at(0.98, presets.dws(16, PayloadCost()))
    assert list(constant.latency_s) == list(fcfs.latency_s)
    assert oracle.mean() < 0.9 * fcfs.mean()
    assert oracle.percentile(99) > 1.5 * fcfs.percentile(99)  # the long ones pay for it
    assert oracle.num_requests == fcfs.num_requests == 6000


def test_a_predictor_as_weak_as_the_measured_ones_gains_a_part_of_it():
    """R^2 of 0.15, what prompts tell of GSM8K's lengths: between FCFS and the oracle."""
    noisy = Noisy(0.15, gsm8k())
    weak = gsm8k_at(0.98, presets.dws(16, PayloadCost("guess")), make_request=noisy)
    assert r_squared_of(noisy.guesses, noisy.truths) == pytest.approx(0.15, abs=0.02)
    fcfs = gsm8k_at(0.98, presets.continuous(16)).mean()
    oracle = gsm8k_at(0.98, presets.dws(16, PayloadCost())).mean()
    assert oracle < weak.mean() < 1.01 * fcfs
    assert fcfs - weak.mean() < 0.6 * (fcfs - oracle)
