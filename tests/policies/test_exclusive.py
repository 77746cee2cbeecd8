"""Exclusive batching through the real scheduler, and where it pays."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np
import pytest

from dllm_sched import (
    Capacity,
    ConfigError,
    FinishReason,
    GrowingKV,
    Phase,
    PhaseChange,
    Policy,
    Request,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.policies import ExclusivePhases, YoungestFirst
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.service import Linear, ServiceModel
from dllm_sched.sim.shapes import Work, gsm8k
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.testing import check_policy
from dllm_sched.theory.exclusive import empty_slots, is_mixed_better, threshold


@pytest.mark.parametrize("seed", range(16))
def test_every_step_is_that_of_the_threshold_rule(seed: int) -> None:
    """The reference counts the idle slots one by one, and knows nothing of phases but a word."""
    rng = random.Random(seed)
    slots, count = [(8, 3), (5, 5), (6, 1), (12, 4)][seed % 4]
    scheduler = Scheduler(
        policy=presets.exclusive(slots, count), capacity=Capacity(max_num_seqs=slots + seed % 3)
    )
    inside: dict[str, str] = {}  # id -> "whole" or "cached"
    waiting: list[str] = []
    number = served = 0
    now = 0.0
    while number < 80 or scheduler.has_work():
        for _ in range(rng.choice([0, 0, 1, 1, 4]) if number < 80 else 0):
            scheduler.submit(Request(f"{number}", prompt_len=9, max_new_tokens=32), now=now)
            waiting.append(f"{number}")
            number += 1
        if number >= 80:
            scheduler.drain(now=now)
        while waiting and len(inside) < slots:
            inside[waiting.pop(0)] = "whole"
        whole = {name for name, kind in inside.items() if kind == "whole"}
        cached = {name for name, kind in inside.items() if kind == "cached"}
        idle = slots - len(cached)
        go = whole if whole and (not cached or idle >= count) else cached
        batch = scheduler.next_step(now=now).batch
        now += 1.0
        if batch is None:
            assert not go
            continue
        assert {row.request.id for row in batch.rows} == go
        ended: list[RowFinished] = []
        phases: list[PhaseChange] = []
        for row in batch.rows:
            name = row.request.id
            if inside[name] == "whole":
                inside[name] = "cached"
                phases.append(PhaseChange(row.slot, Phase.REUSE))
            elif (what := rng.random()) < 0.1:
                del inside[name]
                ended.append(RowFinished(row.slot, FinishReason.EOS))
            elif what < 0.3:
                inside[name] = "whole"
                phases.append(PhaseChange(row.slot, Phase.REFRESH))
        served += len(ended)
        scheduler.complete_step(
            batch, StepOutcome(finished=tuple(ended), phases=tuple(phases)), now=now
        )
        scheduler.check_invariants()
    assert served == number


def test_the_preset_collects_as_many_as_the_threshold_says() -> None:
    assert presets.exclusive(100, hazard=0.01, prefill_base_s=30.69).composition == (
        ExclusivePhases(100, 50)
    )
    assert presets.exclusive(16).composition == ExclusivePhases(16, 1)
    assert presets.exclusive(16, 4).composition == ExclusivePhases(16, 4)


# --- findings -------------------------------------------------------------------------------------

PROMPT, MEAN = 100, 20  # tokens; a decoding row takes one


@attrs.frozen
class ByKind(ServiceModel):
    """The theory's three kinds of iteration: only prefills, only decoding rows, both."""

    prefill_base_s: float
    mixed_token_s: float
    base_s: float = 20.0
    token_s: float = 0.02

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        if num_tokens == num_rows:
            return self.base_s + self.token_s * num_tokens
        if num_tokens == num_rows * (PROMPT + 1):
            return self.prefill_base_s + self.token_s * num_tokens
        return self.base_s + self.mixed_token_s * num_tokens


def per_request_s(policy: Policy, service: ServiceModel, slots: int = 32) -> float:
    """Seconds of engine time per request of a long backlog with geometric lengths."""
    lengths = np.random.default_rng(3).geometric(1 / MEAN, 1500)
    works = [Work(PROMPT, int(n), 1, int(n), int(n), tuple(range(1, int(n) + 1))) for n in lengths]
    result = simulate(
        [(0.0, work) for work in works],
        policy=policy,
        capacity=Capacity(max_num_seqs=slots, window_blocks=1),
        service=service,
        blocks=False,
        phases=True,
    )
    return float(np.max(result.latency_s)) / len(works)


def test_the_published_condition_says_when_mixing_wins() -> None:
    """A mixed token dearer by half the margin: mixing wins; by twice the margin: exclusive."""
    slots, prefill = 32, 40.0
    theta = threshold(hazard=1 / MEAN, prefill_base_s=prefill, decode_base_s=20.0)
    count = empty_slots(theta, slots)
    assert count == 10
    given: dict[str, Any] = {
        "num_slots": slots,
        "num_empty": count,
        "mean_prompt": PROMPT,
        "mean_output": MEAN,
        "prefill_base_s": prefill,
        "decode_base_s": 20.0,
        "mixed_base_s": 20.0,
        "exclusive_token_s": 0.02,
    }
    surcharges = [0.01 * n for n in range(1, 20)]
    better = [is_mixed_better(theta, mixed_token_s=0.02 + each, **given) for each in surcharges]
    edge = surcharges[better.index(False)]
    for factor, mixed_wins in ((0.5, True), (2.0, False)):
        service = ByKind(prefill, 0.02 + factor * edge)
        mixed = per_request_s(presets.continuous(slots), service)
        exclusive = per_request_s(presets.exclusive(slots, count), service)
        assert (mixed < exclusive) is mixed_wins


def test_the_best_count_is_the_one_of_the_threshold() -> None:
    service = ByKind(40.0, 1.0)
    found = {
        count: per_request_s(presets.exclusive(32, count), service)
        for count in (1, 3, 6, 8, 10, 12, 15, 20, 32)
    }
    assert min(found.values()) > 0.99 * found[10]
    assert found[1] > 1.3 * found[10]
    assert found[32] > 1.2 * found[10]


def gsm8k_run(policy: Policy, pages: int | None = None, rate: float = 0.2) -> Any:
    memory = None if pages is None else GrowingKV(page_size=16)
    return simulate(
        OpenLoop(Poisson(rate), gsm8k(), seed=2, max_requests=300),
        policy=attrs.evolve(policy, eviction=YoungestFirst()),
        capacity=Capacity(max_num_seqs=16, num_pages=pages, memory=memory, window_blocks=2),
        service=Linear(0.02, 0.001, 0.0001),
        phases=True,
    )


@pytest.mark.parametrize(("pages", "rate"), [(None, 0.55), (120, 0.15)])
def test_where_tokens_cost_the_same_mixed_or_not_it_only_costs(
    pages: int | None, rate: float
) -> None:
    """As on our model: one step of both kinds has one fixed cost, two steps have two."""
    plain = np.mean(gsm8k_run(presets.continuous(16), pages, rate).latency_s)
    alone = np.mean(gsm8k_run(presets.exclusive(16, 1), pages, rate).latency_s)
    four = np.mean(gsm8k_run(presets.exclusive(16, 4), pages, rate).latency_s)
    assert plain < alone <= four


def test_it_keeps_the_contract() -> None:
    check_policy(presets.exclusive(4))
    check_policy(presets.exclusive(4, 3))


@pytest.mark.parametrize("arguments", [(0, 1), (4, 0), (4, 5), (4, 1.5), (True, 1)])
def test_bad_arguments_are_named(arguments: Iterable[Any]) -> None:
    with pytest.raises(ConfigError, match="ExclusivePhases"):
        ExclusivePhases(*arguments)


def test_a_batch_beyond_the_capacity_is_refused() -> None:
    with pytest.raises(ConfigError, match="only 4 slots"):
        Scheduler(
            policy=Policy(composition=ExclusivePhases(5, 2)), capacity=Capacity(max_num_seqs=4)
        )
