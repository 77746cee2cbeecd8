"""Small seeded days in the life of a scheduler, and an engine in virtual time to live them with.

All instants are multiples of 1/8 s, so that sums of them are exact and a day can be moved to
another origin of time without rounding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import attrs

from dllm_sched.batch import (
    BlockBoundary,
    PhaseChange,
    Row,
    RowFailed,
    RowFate,
    RowFinished,
    StepBatch,
    StepOutcome,
)
from dllm_sched.capacity import Capacity, FixedCanvas, GrowingKV
from dllm_sched.policies.base import Policy
from dllm_sched.request import FinishReason, Phase, Request

__all__ = ["STEP_S", "Action", "Engine", "Job", "Workload", "workloads"]

STEP_S = 0.125

_MOST_REQUESTS = 96


@attrs.frozen
class Job:
    """What a request will turn out to need; the engine knows, policies do not."""

    steps: tuple[int, ...]  # of each block
    refreshes: bool  # each block begins with a REFRESH
    fails_at: int | None  # own step


class Action(NamedTuple):
    """Input at an instant: ``submit`` (a request's fields), or another call and its argument."""

    at: float
    call: str
    what: Any = None


class Workload(NamedTuple):
    """One day."""

    name: str
    capacity: Capacity
    actions: tuple[Action, ...]
    jobs: Mapping[str, Job]  # by id
    failing: frozenset[int] = frozenset()  # numbers of the steps that fail

    @property
    def most_steps(self) -> int:
        """More steps than any sane policy needs: each row alone, several times over."""
        work = sum(sum(job.steps) for job in self.jobs.values())
        return 64 + 8 * work


# --- the engine -----------------------------------------------------------------------------------


@attrs.define(eq=False)
class _Progress:
    steps: int = 0
    in_block: int = 0
    blocks: int = 0
    phase: Phase = Phase.PREFILL


class Engine:
    """Runs batches by each request's ``Job``; rows do not touch each other."""

    def __init__(self, *, reports_progress: bool) -> None:
        self.jobs: dict[int, Job] = {}  # by identity of the request
        self._reports_progress = reports_progress
        self._progress: dict[int, _Progress] = {}  # by identity of the request

    def fates(self, batch: StepBatch) -> dict[int, RowFate]:
        """What becomes of the rows of a step that failed as a whole: nobody has advanced."""
        fates = (RowFate.KEEP, RowFate.RESTART, RowFate.FAIL)
        return {row.slot: fates[row.slot % 3] for row in batch.rows}

    def run(self, batch: StepBatch) -> StepOutcome:
        """One step."""
        for row in batch.joined:
            if not row.resumed:
                self._progress[id(row.request)] = _Progress()
        columns: dict[type[Any], list[Any]] = {
            kind: [] for kind in (RowFinished, BlockBoundary, PhaseChange, RowFailed)
        }
        remaining = []
        for row in batch.rows:
            events, left = self._advance(row)
            remaining.append(left)
            for event in events:
                columns[type(event)].append(event)
        return StepOutcome(
            finished=tuple(columns[RowFinished]),
            boundaries=tuple(columns[BlockBoundary]),
            phases=tuple(columns[PhaseChange]),
            failed=tuple(columns[RowFailed]),
            masked_remaining=tuple(remaining) if self._reports_progress else None,
        )

    def _advance(self, row: Row) -> tuple[list[Any], int]:
        request, slot = row.request, row.slot
        job = self.jobs[id(request)]
        at = self._progress[id(request)]
        at.steps += 1
        at.in_block += 1
        events: list[Any] = []
        phase = Phase.REUSE
        if at.in_block == job.steps[at.blocks]:
            at.in_block = 0
            at.blocks += 1
            if at.blocks == len(job.steps):
                short = at.blocks < request.max_blocks
                reason = FinishReason.EOS if short else FinishReason.LENGTH
                return [RowFinished(slot, reason, at.steps)], 0
            cached = request.prompt_len + at.blocks * request.block_length
            events.append(BlockBoundary(slot, at.blocks, cached))
            phase = Phase.REFRESH if job.refreshes else Phase.REUSE
        if at.steps == job.fails_at:
            return [RowFailed(slot, RuntimeError("NaN logits"))], 0
        if phase is not at.phase:
            at.phase = phase
            events.append(PhaseChange(slot, phase))
        return events, sum(job.steps[at.blocks :]) - at.in_block


# --- the days -------------------------------------------------------------------------------------


def _eighths(rng: random.Random, low: float, high: float) -> float:
    return rng.randrange(int(low * 8), int(high * 8) + 1) / 8


class _Maker:
    """Draws requests that fit a capacity."""

    def __init__(self, rng: random.Random, capacity: Capacity) -> None:
        self.rng = rng
        self.capacity = capacity
        self.jobs: dict[str, Job] = {}

    def request(self, at: float, **fields: Any) -> Action:
        """Draw a request that arrives at ``at``; ``fields`` are taken as they are."""
        rng = self.rng
        prompt_len = rng.randrange(1, 13)
        block_length = rng.choice((4, 4, 8))
        num_blocks = rng.randrange(1, 5)
        drawn: dict[str, Any] = {
            "prompt_len": prompt_len,
            "max_new_tokens": num_blocks * block_length - rng.choice((0, 0, 3)),
            "block_length": block_length,
        } | fields
        while not self.capacity.fits(Request("probe", **drawn)) and drawn["max_new_tokens"] > 1:
            drawn["prompt_len"] = max(1, drawn["prompt_len"] // 2)
            drawn["max_new_tokens"] = max(1, drawn["max_new_tokens"] // 2)
        most = -(-drawn["max_new_tokens"] // block_length)
        used = rng.randrange(1, most + 1)
        id = f"r{len(self.jobs):03d}"
        self.jobs[id] = Job(
            steps=tuple([rng.randrange(1, block_length + 1) for _ in range(used)]),
            refreshes=rng.random() < 0.3,
            fails_at=3 if rng.random() < 0.05 else None,
        )
        return Action(at, "submit", {"id": id} | drawn)

    def mixed(self, at: float) -> Action:
        """Draw a request of any kind."""
        rng = self.rng
        return self.request(
            at,
            priority=rng.randrange(-2, 3),
            request_class=rng.choice(("chat", "code", "chat", "sum")),
            batch_key=rng.choice((None, None, "lora")),
            tenant=rng.choice("ab"),
            group=rng.choice((None, "g")),
        )

    def keyed(self, at: float) -> Action:
        """Draw a request of one of many batch_keys and tenants, small, of any priority."""
        rng = self.rng
        return self.request(
            at,
            prompt_len=rng.randrange(1, 5),
            max_new_tokens=rng.choice((4, 8)),
            priority=rng.randrange(-2, 3),
            request_class=rng.choice(("chat", "code", "sum")),
            batch_key=rng.choice((None, "lora", "other", "third", "fourth")),
            tenant=rng.choice("abc"),
        )

    def hurried(self, at: float) -> Action:
        """Draw a request with a deadline and a limit to its waiting."""
        rng = self.rng
        return self.request(
            at,
            priority=rng.randrange(2),
            deadline_at=at + _eighths(rng, -0.25, 6),
            queue_timeout_s=rng.choice((math.inf, 0.0, 0.5, 2.0)),
        )


def _arrivals(make: _Maker, kind: Callable[[float], Action], gap: float, most: int) -> list[Action]:
    at = 0.0
    actions = []
    for _ in range(most):
        at += _eighths(make.rng, 0, gap)
        actions.append(kind(at))
    return actions


def _rough(make: _Maker, most: int) -> list[Action]:
    """Cancels in every state; a pause, another policy for a while, a slot less for a while."""
    actions = _arrivals(make, make.mixed, 0.5, most)
    middle = actions[most // 2].at
    for action in tuple(actions):
        if make.rng.random() < 0.4:
            at = action.at + _eighths(make.rng, 0, 3)
            actions.append(Action(at, "cancel", action.what["id"]))
    fewer = attrs.evolve(make.capacity, max_num_seqs=max(1, make.capacity.max_num_seqs - 1))
    return [
        *actions,
        Action(middle, "pause"),
        Action(middle + 0.5, "resume"),
        Action(middle + 0.75, "set_policy", Policy(name="another")),
        Action(middle + 1.25, "set_policy"),
        Action(middle + 1.5, "set_capacity", fewer),
        Action(middle + 2.0, "set_capacity", make.capacity),
    ]


def _keys(make: _Maker, most: int) -> list[Action]:
    """Requests of many batch_keys that wait together: in two bursts, and a few in between."""
    half = most // 2
    actions = [make.keyed(0.0) for _ in range(half)]
    actions += [make.keyed(1.0 + k / 2) for k in range(most // 4)]
    actions += [make.keyed(2.0 + most / 8) for _ in range(half)]
    return actions


def _day(  # noqa: PLR0911  # a table
    name: str, make: _Maker, most: int
) -> tuple[list[Action], float]:
    """The actions of a day, and the instant at which it is drained."""
    match name:
        case "nobody":
            return [], 1.0
        case "one":
            return [make.request(0.25)], 4.0
        case "burst":
            return [make.request(0.0) for _ in range(most)], 8.0 + most / 8
        case "steady":
            return _arrivals(make, make.mixed, 0.5, most), 4.0 + most / 4
        case "trickle":
            return [make.mixed(4.0 * k) for k in range(5)], 24.0
        case "hurried":
            return _arrivals(make, make.hurried, 0.5, most), 2.0 + most / 4
        case "keys":
            return _keys(make, most), 4.0 + most / 4
        case "rough":
            return _rough(make, most), 4.0 + most / 2
        case _:
            return _arrivals(make, make.request, 0.25, most), most / 4


def _workload(name: str, capacity: Capacity, seed: int) -> Workload:
    make = _Maker(random.Random(f"{seed}/{name}"), capacity)  # noqa: S311  # no secret
    most = min(_MOST_REQUESTS, max(12, 3 * capacity.max_num_seqs))
    actions, drained_at = _day(name, make, most)
    actions.append(Action(drained_at, "drain"))
    actions.sort(key=lambda action: action.at)
    failing = frozenset({3, 4, 11} if name == "rough" else ())
    return Workload(name, capacity, tuple(actions), make.jobs, failing)


def workloads(capacity: Capacity, seed: int) -> tuple[Workload, ...]:
    """The days to live through; those about memory only if ``capacity`` leaves memory open."""
    names = ("nobody", "one", "burst", "steady", "trickle", "hurried", "keys", "rough")
    days = [_workload(name, capacity, seed) for name in names]
    if capacity.memory is not None:
        return (*days, _workload("tight", capacity, seed))
    slots = capacity.max_num_seqs
    for memory, pages in (
        (GrowingKV(page_size=4), max(14, 4 * slots)),
        (GrowingKV(page_size=4, window_blocks=2), max(14, 4 * slots)),
        (FixedCanvas(page_size=8), max(7, 3 * slots)),
    ):
        day = _workload("tight", attrs.evolve(capacity, num_pages=pages, memory=memory), seed)
        days.append(day._replace(name=f"tight, {memory!r}"))
    return tuple(days)
