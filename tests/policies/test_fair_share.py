"""Weighted fair share against start-time fair queueing in exact arithmetic, from the log alone."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest

from dllm_sched import (
    Capacity,
    ConfigError,
    FinishReason,
    GrowingKV,
    Policy,
    PolicyError,
    Request,
    RowFate,
    RowFinished,
    Scheduler,
    StepOutcome,
)
from dllm_sched.events import RequestFinished, RequestJoined, RequestSubmitted
from dllm_sched.policies import FCFS, PriorityFirst, Slots, WeightedFairShare, YoungestFirst
from dllm_sched.policies import _persistent as persistent
from dllm_sched.policies._persistent import get
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Constant
from dllm_sched.sim.shapes import gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.testing import check_policy

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


def request(name, tenant, blocks=1, **fields):
    return Request(
        name, prompt_len=8, max_new_tokens=32 * blocks, block_length=32, tenant=tenant, **fields
    )


class Reference:
    """Who must be first, from the list of events and nothing else."""

    def __init__(self, log, costs):
        self.log, self.costs = log, costs

    def tags(self):
        """Every request's (start, arrival), each worked out from the events before its own."""
        starts, info, now, door, last = {}, {}, Fraction(0), Fraction(0), {}
        active, waiting, newest = set(), set(), {}
        for number, event in enumerate(self.log):
            if isinstance(event, RequestSubmitted):
                name, tenant = event.request.id, event.request.tenant
                weight, share = self.costs(event.request)
                begin = last[tenant] if tenant in last and last[tenant] > now else door
                starts[name] = (begin, number)
                info[name] = (tenant, weight, share)
                last[tenant], newest[tenant] = begin + share, name
                active.add(name)
                waiting.add(name)
            elif isinstance(event, RequestJoined):
                tenant, weight, share = info[event.request_id]
                there = sum(info[one][1] for one in newest.values() if one in waiting)
                now = max(now, starts[event.request_id][0])
                door = max(now, door) + share * weight / max(there, weight)
                waiting.discard(event.request_id)
            elif isinstance(event, RequestFinished):
                if event.admitted_at is None:
                    tenant, _, share = info[event.request_id]
                    last[tenant] -= share
                active.discard(event.request_id)
                waiting.discard(event.request_id)
                if not active:  # a new busy period begins as the first one did
                    now, door, last, newest = Fraction(0), Fraction(0), {}, {}
        return starts

    def is_first(self, name, waiting):
        starts = self.tags()
        first = min(waiting, key=lambda one: starts[one])
        return name == first or abs(starts[name][0] - starts[first][0]) < Fraction(1, 10**9)


def costs_of(ordering):
    def cost(one):
        weight = ordering.weights.get(one.tenant, ordering.default_weight)
        weight = Fraction(weight)
        return weight, Fraction(one.max_new_tokens // one.block_length) / weight

    return cost


@pytest.mark.parametrize("seed", range(12))
def test_every_join_is_the_one_of_exact_arithmetic(seed):
    rng = random.Random(seed)
    ordering = WeightedFairShare(WEIGHTS, default_weight=4.0)
    log, waiting, joined = [], set(), []
    reference = Reference(log, costs_of(ordering))

    def watch(event):
        if isinstance(event, RequestJoined):
            assert reference.is_first(event.request_id, waiting)
            waiting.remove(event.request_id)
            joined.append(event.request_id)
        elif isinstance(event, RequestSubmitted):
            waiting.add(event.request.id)
        elif isinstance(event, RequestFinished):
            waiting.discard(event.request_id)
        log.append(event)

    errors = []

    def observer(event):
        try:
            watch(event)
        except AssertionError as error:  # an observer that raises is only removed
            errors.append(error)
            raise

    sched = Scheduler(
        capacity=Capacity(max_num_seqs=rng.choice((1, 2, 3))),
        policy=Policy(ordering=ordering),
        observers=[observer],
    )
    for number in range(90):
        for index in range(rng.choice((0, 1, 1, 2))):
            tenant = rng.choice("aabbbcd")
            sched.submit(
                request(f"{number}.{index}", tenant, rng.choice((1, 2, 8))), now=float(number)
            )
        if waiting and rng.random() < 0.2:
            sched.cancel(rng.choice(sorted(waiting)), now=float(number))
        batch = sched.next_step(now=float(number)).batch
        if batch is not None:
            ends = [row.slot for row in batch.rows if rng.random() < 0.4]
            outcome = StepOutcome(tuple(RowFinished(slot, FinishReason.EOS) for slot in ends))
            sched.complete_step(batch, outcome, now=float(number))
        sched.check_invariants()
    assert not errors
    assert len(joined) > 30


def backlog(counts, slots=1, policy=None, order=None):
    """Serve a backlog; return the joins in order as (tenant, cost)."""
    joins, by_name = [], {}
    ordering = WeightedFairShare(WEIGHTS) if order is None else order

    def watch(event):
        if isinstance(event, RequestJoined):
            joins.append(by_name[event.request_id])

    sched = Scheduler(
        capacity=Capacity(max_num_seqs=slots),
        policy=Policy(ordering=ordering) if policy is None else policy,
        observers=[watch],
    )
    for name, (tenant, blocks) in enumerate(counts):
        by_name[str(name)] = (tenant, blocks)
        sched.submit(request(str(name), tenant, blocks), now=0.0)
    sched.drain(now=0.0)
    now = 0.0
    while sched.has_work():
        now += 1.0
        batch = sched.next_step(now=now).batch
        ends = tuple(RowFinished(row.slot, FinishReason.EOS) for row in batch.rows)
        sched.complete_step(batch, StepOutcome(ends), now=now)
    return joins


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_no_interval_breaks_the_fairness_bound(slots, seed):
    rng = random.Random(seed)
    work = [("a", rng.randint(1, 6)) for _ in range(40)]
    work += [("b", rng.randint(1, 6)) for _ in range(70)]
    work += [("c", rng.randint(1, 6)) for _ in range(30)]
    joins = backlog(work, slots)
    assert sorted(joins) == sorted(work)
    for one, other in itertools.combinations("abc", 2):
        ends = [
            max(index for index, join in enumerate(joins) if join[0] == tenant)
            for tenant in (one, other)
        ]
        both = joins[: min(ends)]  # while both still wait
        largest = {t: max(cost for tenant, cost in work if tenant == t) for t in (one, other)}
        bound = sum(largest[tenant] / WEIGHTS[tenant] for tenant in (one, other))
        gap, gaps = 0.0, [0.0]
        for tenant, cost in both:
            gap += (cost / WEIGHTS[tenant]) * ((tenant == one) - (tenant == other))
            gaps.append(gap)
        # of all intervals, the worst one lies between the lowest and the highest of these
        assert max(gaps) - min(gaps) <= bound


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_holds_for_tenants_that_always_come_again(seed):
    rng, log, waiting, info = random.Random(seed), [], dict.fromkeys("abcd", 0), {}

    def watch(event):
        if isinstance(event, RequestJoined):
            log.append(info[event.request_id])
            waiting[info[event.request_id][0]] -= 1

    sched = Scheduler(
        capacity=Capacity(max_num_seqs=1),
        policy=Policy(ordering=WeightedFairShare(WEIGHTS)),
        observers=[watch],
    )

    def submit(tenant, blocks):
        name = f"r{len(info)}"
        info[name] = (tenant, blocks)
        waiting[tenant] += 1
        sched.submit(request(name, tenant, blocks), now=0.0)

    for _ in range(400):
        for tenant in "abc":
            while waiting[tenant] < rng.choice((1, 1, 2, 5)):
                submit(tenant, rng.randint(1, 6))
        if rng.random() < 0.3:
            submit("d", 1)
        batch = sched.next_step(now=0.0).batch
        ended = StepOutcome((RowFinished(0, FinishReason.EOS),))
        sched.complete_step(batch, ended, now=0.0)
    for one, other in itertools.combinations("abc", 2):
        gap, gaps = 0.0, [0.0]
        for tenant, cost in log:
            gap += cost / WEIGHTS.get(tenant, 1.0) * ((tenant == one) - (tenant == other))
            gaps.append(gap)
        assert max(gaps) - min(gaps) <= 6 / WEIGHTS[one] + 6 / WEIGHTS[other] + 1e-9


def test_ever_new_tenants_starve_nobody():
    sched = Scheduler(
        capacity=Capacity(max_num_seqs=1), policy=Policy(ordering=WeightedFairShare())
    )
    served = {}
    for index in range(3):
        sched.submit(request(f"a{index}", "a"), now=0.0)
    for step in range(100):
        for index in range(2):  # twice as many as can be served
            sched.submit(request(f"{step}.{index}", f"tenant {step}.{index}"), now=0.0)
        batch = sched.next_step(now=0.0).batch
        served[batch.rows[0].request.id] = step
        ended = StepOutcome((RowFinished(0, FinishReason.EOS),))
        sched.complete_step(batch, ended, now=0.0)
    assert [served[f"a{index}"] for index in range(3)] == [0, 13, 44]


def test_weights_are_shares_of_the_joins():
    joins = backlog([("a", 1)] * 60 + [("b", 1)] * 60)
    first = [tenant for tenant, _ in joins[:60]]
    assert (first.count("a"), first.count("b")) == (20, 40)


def test_an_idle_tenant_has_no_credit_and_no_debt():
    ordering = WeightedFairShare()
    sched = Scheduler(capacity=Capacity(max_num_seqs=1), policy=Policy(ordering=ordering))

    def serve(name):
        batch = sched.next_step(now=0.0).batch
        assert batch.rows[0].request.id == name
        sched.complete_step(batch, StepOutcome((RowFinished(0, FinishReason.EOS),)), now=0.0)

    for index in range(10):
        sched.submit(request(f"a{index}", "a"), now=0.0)
    for index in range(5):
        serve(f"a{index}")
    for index in range(3):  # b slept through five of a's: it gets every other slot, not five
        sched.submit(request(f"b{index}", "b"), now=0.0)
    for name in ("a5", "b0", "a6", "b1", "a7", "b2"):
        serve(name)


def test_cancelled_requests_give_their_share_back():
    sched = Scheduler(
        capacity=Capacity(max_num_seqs=1), policy=Policy(ordering=WeightedFairShare())
    )
    sched.submit(request("running", "z"), now=0.0)
    batch = sched.next_step(now=0.0).batch
    for index in range(50):
        sched.submit(request(f"a{index}", "a"), now=0.0)
        sched.submit(request(f"b{index}", "b"), now=0.0)
    for index in range(50):
        sched.cancel(f"a{index}", now=0.0)
    sched.submit(request("again", "a"), now=0.0)
    sched.complete_step(batch, StepOutcome((RowFinished(0, FinishReason.EOS),)), now=0.0)
    order = []
    while sched.num_waiting:
        batch = sched.next_step(now=0.0).batch
        order.append(batch.rows[0].request.id)
        sched.complete_step(batch, StepOutcome((RowFinished(0, FinishReason.EOS),)), now=0.0)
    assert order.index("again") <= 1


def test_a_preempted_request_keeps_its_place():
    sched = Scheduler(
        capacity=Capacity(max_num_seqs=2, num_pages=4, memory=GrowingKV(page_size=32)),
        policy=Policy(ordering=WeightedFairShare(), eviction=YoungestFirst()),
    )
    for index in range(4):
        sched.submit(request(f"a{index}", "a", 1), now=0.0)
    batch = sched.next_step(now=0.0).batch
    assert [row.request.id for row in batch.rows] == ["a0", "a1"]
    sched.fail_step(batch, RuntimeError("again"), rows={1: RowFate.RESTART}, now=0.0)
    assert sched._queue.peek().id == "a1"


def test_a_swap_of_another_axis_keeps_every_place():
    ordering = WeightedFairShare()
    sched = Scheduler(capacity=Capacity(max_num_seqs=1), policy=Policy(ordering=ordering))
    for index in range(6):
        sched.submit(request(f"a{index}", "a"), now=0.0)
    for index in range(3):
        sched.submit(request(f"b{index}", "b"), now=0.0)
    before = [view.id for view in sorted(sched._queue, key=lambda view: view._entry[:-1])]
    sched.set_policy(Policy(ordering=ordering, admission=Slots(1)), now=0.0)
    after = [view.id for view in sorted(sched._queue, key=lambda view: view._entry[:-1])]
    assert before == after == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]


def test_who_waited_at_a_swap_comes_first_by_arrival():
    sched = Scheduler(capacity=Capacity(max_num_seqs=1), policy=Policy(ordering=FCFS()))
    for index in range(4):
        sched.submit(request(f"a{index}", "a"), now=0.0)
    sched.set_policy(Policy(ordering=WeightedFairShare()), now=0.0)
    for index in range(2):
        sched.submit(request(f"b{index}", "b"), now=0.0)
    order = [view.id for view in sorted(sched._queue, key=lambda view: view._entry[:-1])]
    assert order == ["a0", "a1", "a2", "a3", "b0", "b1"]


@pytest.mark.parametrize("always_busy", [False, True])
def test_state_does_not_grow_with_the_tenants_ever_seen(always_busy):
    ordering = WeightedFairShare()
    state = ordering.init()
    if always_busy:
        state = ordering.observe(state, RequestSubmitted(0.0, request("stays", "stays")))
    most = 0
    for number in range(30_000):
        name = f"r{number}"
        state = ordering.observe(state, RequestSubmitted(0.0, request(name, f"tenant {number}")))
        state = ordering.observe(state, RequestJoined(0.0, name, 0, 0, 0.0, False))
        state = ordering.observe(
            state, RequestFinished(0.0, name, FinishReason.EOS, 0.0, 0.0, 1, 1)
        )
        most = max(most, sum(map(len, state.tenants)))
        assert sum(map(len, state.tags)) <= 4
    assert most <= (2 * 4096 if always_busy else 1)
    if always_busy:
        assert [get(state.tenants, name) is None for name in ("stays", "tenant 29999")] == [
            False,
            False,
        ]


def test_nobody_starves_in_the_simulator_and_the_small_tenant_is_served_early():
    def tenant_of(number):
        return "small" if number % 10 == 0 else "large"

    def waits(ordering):
        found = {"small": [], "large": []}

        def watch(event):
            if isinstance(event, RequestJoined):
                found[tenant_of(int(event.request_id[1:]))].append(event.waited_s)

        result = simulate(
            OpenLoop(Poisson(0.35), gsm8k(), seed=4, max_requests=400),
            policy=Policy(ordering=ordering, name="fair"),
            capacity=Capacity(max_num_seqs=4),
            service=Constant(0.04),
            observers=[watch],
            make_request=lambda name, work, _at: Request(
                name,
                prompt_len=work.prompt_len,
                max_new_tokens=work.max_new_tokens,
                payload=work,
                tenant=tenant_of(int(name[1:])),
            ),
        )
        assert result.num_requests == 400
        return {tenant: sum(times) / len(times) for tenant, times in found.items()}

    shouting = waits(FCFS())
    fair = waits(WeightedFairShare())
    assert fair["small"] < 0.25 * shouting["small"]
    assert fair["large"] < 1.25 * shouting["large"]


@pytest.mark.parametrize(
    "ordering",
    [
        WeightedFairShare(WEIGHTS),
        PriorityFirst().then(WeightedFairShare()),
        WeightedFairShare().then(PriorityFirst()),
    ],
)
def test_it_keeps_the_contract_and_composes(ordering):
    check_policy(Policy(ordering=ordering))


@pytest.mark.parametrize(
    "bad",
    [
        {"weights": {"a": 0}},
        {"weights": {"a": -1.0}},
        {"weights": {"a": float("nan")}},
        {"weights": {"a": float("inf")}},
        {"weights": {"a": True}},
        {"weights": {"a": "1"}},
        {"weights": {7: 1.0}},
        {"weights": [("a", 1.0)]},
        {"default_weight": 0},
        {"default_weight": float("nan")},
        {"cost": 3},
    ],
)
def test_bad_arguments_are_refused(bad):
    with pytest.raises(ConfigError, match="WeightedFairShare"):
        WeightedFairShare(**bad)


def test_a_bad_cost_is_refused_at_submit_and_harms_nobody():
    ordering = WeightedFairShare(cost=lambda one: 1.0 if one.id != "bad" else float("nan"))
    sched = Scheduler(capacity=Capacity(max_num_seqs=1), policy=Policy(ordering=ordering))
    with pytest.raises(PolicyError, match="cost of request 'bad'"):
        sched.submit(request("bad", "a"), now=0.0)
    sched.submit(request("good", "a"), now=0.0)
    assert sched.next_step(now=0.0).batch is not None


def test_the_map_under_it_is_a_dict_that_never_changes():
    rng = random.Random(0)
    levels, truth, kept = persistent.EMPTY, {}, []
    for _ in range(3000):
        key = rng.randrange(60)
        value = persistent.GONE if rng.random() < 0.5 else rng.random()
        levels = persistent.put(levels, key, value)
        truth = {**truth, key: value}
        if value is persistent.GONE:
            del truth[key]
        kept.append((levels, truth))
        assert sum(map(len, levels)) <= 2 * len(truth) + 2
    for levels, truth in kept[::97]:
        assert {key: persistent.get(levels, key) for key in range(60)} == {
            key: truth.get(key) for key in range(60)
        }
