"""``check_policy`` names the rule that each broken policy breaks, and lets sound ones pass."""

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from dllm_sched import (
    Capacity,
    ConfigError,
    DllmSchedError,
    FixedCanvas,
    GrowingKV,
    Policy,
    Request,
)
from dllm_sched.events import RequestSubmitted
from dllm_sched.policies import (
    FCFS,
    KEEP,
    Admission,
    AllRows,
    AtBatchBoundary,
    AtBlockBoundary,
    Control,
    EarliestDeadline,
    Eviction,
    Fill,
    MaxWait,
    MaxWaiting,
    Ordering,
    PastDeadline,
    PoissonTimeout,
    PriorityFirst,
    ShortestBudget,
    Slots,
    StepCap,
    Timeout,
    TokenBudget,
    Verdict,
    YoungestFirst,
    presets,
)
from dllm_sched.testing import POLICY_RULES, PolicyCheckError, check_policy
from dllm_sched.testing._play import Play
from dllm_sched.testing._workloads import workloads

SHELF = runpy.run_path(str(Path(__file__).with_name("broken_policies.py")))["SHELF"]


@pytest.mark.parametrize(
    ("rule", "axis", "make"), [pytest.param(*entry[1:], id=entry[0]) for entry in SHELF]
)
def test_each_broken_policy_is_caught_with_the_right_rule(rule, axis, make):
    with pytest.raises(PolicyCheckError) as caught:
        check_policy(make)
    assert (caught.value.rule, caught.value.axis) in {(rule, axis), (rule, "policy")}
    assert caught.value.reproduction.startswith("#")
    assert rule in str(caught.value)


def test_the_shelf_is_long_and_touches_nearly_every_rule():
    assert len(SHELF) >= 18
    # `spin` needs a fault of the scheduler itself: its own checks refuse such policies first.
    assert set(POLICY_RULES) - {rule for _, rule, _, _ in SHELF} <= {"spin"}


def test_a_break_is_an_assertion_with_a_reproduction():
    with pytest.raises(AssertionError) as caught:
        check_policy(Policy(admission=lambda rv, _: True))
    error = caught.value
    assert isinstance(error, DllmSchedError)
    assert error.rule == "verdict"
    lines = error.reproduction.splitlines()
    assert "Scheduler(" in lines[1]
    assert lines[-1].startswith("sched.next_step(now=")
    assert any(line.startswith("sched.submit(Request('r000', prompt_len=") for line in lines)


class Deficit(Admission):
    """A state with in-round sums: a budget that grows while the head does not fit."""

    def init(self):
        return {"deficit": 0, "used": 0}

    def admit(self, state, rv, round):
        room = 24 + state["deficit"] - state["used"]
        alone = not round.view.num_running and not round.num_joined
        return Verdict.ADMIT if rv.max_tokens <= room or alone else Verdict.STOP

    def joined(self, state, rv, round):
        return {**state, "used": state["used"] + rv.max_tokens}

    def settle(self, state, round):
        left = max(0, 24 + state["deficit"] - state["used"]) if round.blocked else 0
        return {"deficit": min(96, left), "used": 0}

    def recheck(self, state, round):
        return 1


class ServedByTenant(Ordering):
    """A state that observes: who had least so far goes first."""

    observes = (RequestSubmitted,)

    def init(self):
        return {}

    def observe(self, state, event):
        tenant = event.request.tenant
        state[tenant] = state.get(tenant, 0) + event.request.max_new_tokens
        return state

    def key(self, state, rv):
        return (state.get(rv.request.tenant, 0),)


class LanesInTurn(Admission):
    needs = frozenset({"lanes"})

    def admit(self, state, rv, round):
        lane = (rv.request.request_class, rv.request.batch_key)
        return Verdict.SKIP_LANE if round.view.running_by_lane.get(lane, 0) >= 2 else Verdict.ADMIT


class LowLast(Admission):
    """Low priorities stand aside while anybody else waits."""

    def admit(self, state, rv, round):
        aside = rv.request.priority < 0 and round.view.num_waiting > 1
        return Verdict.SKIP if aside and not round.view.draining else Verdict.ADMIT


class PrefillFirst(AllRows):
    needs = frozenset({"rows", "every_step"})

    def select(self, state, round):
        fresh = [rv for rv in round.rows if rv.num_steps == 0]
        return fresh or round.rows


class LooserWhenLate(Control):
    needs = frozenset({"blocks"})

    def knobs(self, state, rv, view):
        return ({"threshold": 0.9 if view.num_waiting < 3 else 0.8}, view.now + 0.5)


class WhileRunning(Timeout):
    scope = "step"

    def due(self, state, view):
        return -math.inf if view.draining else view.oldest_arrival_at + 0.375


class Swap(Eviction):
    """Sends a row back once, with its progress, when others wait."""

    needs = frozenset({"every_step", "rows"})

    def victims(self, state, need_pages, round):
        if round.view.num_waiting and need_pages == 0:
            return [(rv, KEEP) for rv in round.rows if rv.num_steps == 4][:1]
        return [(rv, KEEP) for rv in round.youngest_first()][: 1 if need_pages else 0]


SOUND = {
    "default": Policy(),
    "per_request": presets.per_request(),
    "fixed_fill_without_timer": presets.fixed_fill(4),
    "fixed_fill": presets.fixed_fill(4, 0.12),
    "fixed_fill_of_16": presets.fixed_fill(16, 0.12),
    "continuous": presets.continuous(3),
    "block_refill": presets.block_refill(4),
    "deadlines": Policy(
        ordering=EarliestDeadline().then(ShortestBudget()).then(FCFS()),
        admission=TokenBudget(40) & MaxWaiting(6),
        timeout=Fill(3) & MaxWait(0.5),
        eviction=PastDeadline() | StepCap(9),
    ),
    "priorities": Policy(
        ordering=PriorityFirst(),
        admission=Slots(2) | AtBlockBoundary(),
        timeout=Fill(3) | PoissonTimeout(rate=0.641, service_s=2.0, batch_size=3),
        composition=AllRows() & AllRows(),
        eviction=YoungestFirst(keep=True) | StepCap(6),
    ),
    "youngest_restarts": Policy(
        admission=AtBatchBoundary() | Slots(3), eviction=YoungestFirst() & YoungestFirst()
    ),
    "plain_callables": Policy(
        ordering=lambda rv: (rv.request.priority, -rv.request.prompt_len),
        admission=lambda rv, here: (
            Verdict.ADMIT if here.view.num_running + here.num_joined < 3 else Verdict.SKIP
        ),
        timeout=lambda view: -math.inf if view.draining else view.oldest_arrival_at + 0.3,
        composition=lambda here: tuple(
            phase for phase, count in here.view.running_by_phase.items() if count
        )[:1],
        eviction=lambda rv: (math.inf, 7),
        control=lambda rv, view: ({"threshold": 0.9}, view.now + 1),
    ),
    "low_last": Policy(admission=LowLast()),
    "states": Policy(ordering=ServedByTenant(), admission=Deficit() & Slots(4)),
    "needs": Policy(
        admission=LanesInTurn(),
        timeout=WhileRunning(),
        composition=PrefillFirst(),
        eviction=Swap(),
        control=LooserWhenLate(),
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_sound_policies_pass(name):
    check_policy(SOUND[name])


@pytest.mark.parametrize(
    "capacity",
    [
        Capacity(max_num_seqs=3, num_pages=9, memory=GrowingKV(page_size=8)),
        Capacity(max_num_seqs=5, num_pages=6, memory=FixedCanvas(page_size=16)),
        Capacity(max_num_seqs=2, window_blocks=1),
    ],
    ids=repr,
)
def test_a_capacity_of_ones_own_and_another_seed(capacity):
    check_policy(presets.continuous(2), capacity=capacity, seed=7)


def test_a_factory_is_asked_for_new_policies():
    made = []

    def make():
        made.append(Policy(ordering=PriorityFirst()))
        return made[-1]

    check_policy(make, capacity=Capacity(max_num_seqs=2))
    assert len(made) > 1
    assert len({id(policy) for policy in made}) == len(made)


def test_requests_of_ones_own_for_policies_that_look_at_more():
    @attrs.frozen(kw_only=True, eq=False)
    class Priced(Request):
        price: float = 1.0

    class Cheapest(Ordering):
        def key(self, state, rv):
            return (rv.request.price,)

    def priced(**fields):
        return Priced(price=fields["prompt_len"] / 4, **fields)

    check_policy(Policy(ordering=Cheapest()), request=priced)
    with pytest.raises(PolicyCheckError, match="price"):
        check_policy(Policy(ordering=Cheapest()))


def test_what_is_no_policy_and_what_does_not_fit_is_the_callers_fault():
    with pytest.raises(ConfigError, match="expected a Policy"):
        check_policy("fixed_fill")
    with pytest.raises(ConfigError, match="not a Policy"):
        check_policy(FCFS)
    with pytest.raises(ConfigError, match=r"Slots\(16\)"):
        check_policy(presets.fixed_fill(16), capacity=Capacity(max_num_seqs=8))


def test_an_attribute_computed_once_is_no_hidden_state():
    class Lazy(Ordering):
        def key(self, state, rv):
            if not hasattr(self, "sign"):
                self.sign = -1
            return (self.sign * rv.request.prompt_len,)

    check_policy(lambda: Policy(ordering=Lazy()))


def test_nothing_is_left_behind():
    profile, modules = sys.getprofile(), set(vars(__import__("time")))
    check_policy(Policy())
    assert sys.getprofile() is profile
    assert set(vars(__import__("time"))) == modules


@pytest.mark.parametrize("seed", range(4))
def test_requests_are_passed_over_while_three_batch_keys_wait(seed):
    most = 0

    class Counts(LowLast):
        needs = frozenset({"lanes"})

        def admit(self, state, rv, round):
            nonlocal most
            verdict = super().admit(state, rv, round)
            if verdict is Verdict.SKIP and not round.view.num_running:
                keys = {key for (_, key), n in round.view.waiting_by_lane.items() if n}
                most = max(most, len(keys))
            return verdict

    for day in workloads(Capacity(max_num_seqs=4), seed):
        Play(Policy(admission=Counts()), day).to_end()
    assert most >= 3


LOGS = """
import hashlib
from dllm_sched import Capacity, Policy
from dllm_sched.policies import *
from dllm_sched.policies import presets
from dllm_sched.testing._play import Play
from dllm_sched.testing._workloads import workloads
policies = [
    presets.per_request(), presets.fixed_fill(4, 0.12), presets.continuous(4),
    presets.block_refill(4), Policy(ordering=EarliestDeadline(), eviction=YoungestFirst(keep=True)),
]
logs = [Play(p, day).to_end() for p in policies for day in workloads(Capacity(max_num_seqs=4), 0)]
assert sum(map(len, logs)) > 1000
print(hashlib.sha256(repr(logs).encode()).hexdigest())
"""


def test_decisions_do_not_depend_on_the_hash_seed():
    digests = {
        subprocess.run(
            [sys.executable, "-c", LOGS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(digests) == 1


def test_a_policy_that_wants_more_slots_than_are_tried_is_told_whose_they_are():
    with pytest.raises(ConfigError) as caught:
        check_policy(Policy(admission=Slots(5000)))
    assert "no capacity was given" in str(caught.value)
    assert "4096" in str(caught.value)
    assert "capacity=Capacity(max_num_seqs=" in str(caught.value)
