"""WAIT and Nested WAIT: an iteration starts once enough requests of the right kinds are there.

The published rules are about *iterations*: when the next one may start, how many requests it takes
from the queue (stage 0), and which of the rows (stages above 0). Here the three are three axes of a
policy: a timeout asked at every step, an admission, and a composition that lets the rows wait, too.

What a stage is, the caller says by the lengths it gives: denoising steps, as an iteration is one,
or blocks, which makes the same shares of a batch but lets more requests join at one step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import attrs

from dllm_sched.capacity import Capacity, within_slots
from dllm_sched.errors import ConfigError
from dllm_sched.events import RequestSubmitted
from dllm_sched.policies.base import (
    ALL,
    Admission,
    Composition,
    Selection,
    Strategy,
    Timeout,
    Verdict,
)
from dllm_sched.policies.rates import Rate, rate_of
from dllm_sched.request import RequestView
from dllm_sched.theory._check import is_number, items
from dllm_sched.theory.wait import (
    BookingLimit,
    Segment,
    TrafficType,
    booking_limits,
    nested_segments,
)
from dllm_sched.view import Round, SchedulerView

__all__ = [
    "NestedWaitQuota",
    "NestedWaitRows",
    "NestedWaitStart",
    "WaitQuota",
    "WaitRows",
    "WaitStart",
]

Types = tuple[tuple[Hashable, TrafficType], ...]
_ADMIT, _STOP, _SKIP_LANE = Verdict.ADMIT, Verdict.STOP, Verdict.SKIP_LANE


def _pairs(types: Any) -> Types:
    pairs = items("types", types.items() if isinstance(types, Mapping) else types)
    if not pairs or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ConfigError(
            f"types must map at least one request_class to its TrafficType, got {types!r}"
        )
    if len({name for name, _ in pairs}) < len(pairs):
        raise ConfigError(f"types must name each request_class once, got {types!r}")
    return pairs


def _seconds(instance: object, field: attrs.Attribute[float], value: object) -> None:
    if not is_number(value) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ConfigError(
            f"{type(instance).__name__}: {field.name} must be finite seconds >= 0, so that nothing "
            f"waits for ever; got {value!r}"
        )


def _maybe_rate(value: object) -> Rate | None:
    return None if value is None else rate_of(value)


class _Shares(NamedTuple):
    """How the batch is divided now, and what is known of each type's rate."""

    shares: Any
    rates: Mapping[Hashable, Any]  # states of the estimator, by type
    joined: Mapping[Hashable, int] = {}  # of this round, by type; never changed


@attrs.frozen
class _Dividing(Strategy):
    """A batch divided among types of requests, by rates that are given or estimated."""

    batch_size: int = attrs.field(validator=within_slots)
    types: Types = attrs.field(converter=_pairs)
    rate: Rate | None = attrs.field(default=None, converter=_maybe_rate, kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.init()  # refuses what is no type

    def _divide(self, types: Sequence[TrafficType]) -> Any:
        """Return the shares of a batch."""
        raise NotImplementedError  # a base: WAIT and Nested WAIT divide in their own ways

    @property
    def observes(self) -> tuple[type[Any], ...]:  # type: ignore[override]
        """Arrivals, if there is an estimator."""
        return () if self.rate is None else (RequestSubmitted,)

    def init(self) -> _Shares:
        """Nothing estimated yet: the types' own rates."""
        rates = {} if self.rate is None else {name: self.rate.init() for name, _ in self.types}
        return _Shares(self._divide([each for _, each in self.types]), rates)

    def observe(self, state: Any, event: Any) -> Any:
        """Estimate the rate of an arrival's type anew, and divide anew. O(types)."""
        name = event.request.request_class
        if self.rate is None or name not in state.rates:
            return state
        rates = {**state.rates, name: self.rate.observe(state.rates[name], event)}
        types = []
        for each, given in self.types:
            per_s = self.rate.rate(rates[each])
            types.append(given if per_s is None else attrs.evolve(given, rate=per_s))
        return state._replace(shares=self._divide(types), rates=rates)

    def validate(self, capacity: Capacity) -> None:
        """Refuse a batch that the capacity can never hold."""
        if self.batch_size > capacity.max_num_seqs:
            raise ConfigError(
                f"{type(self).__name__}({self.batch_size}): the capacity has only "
                f"{capacity.max_num_seqs} slots; raise max_num_seqs or lower the batch size"
            )


# --- WAIT -----------------------------------------------------------------------------------------


@attrs.frozen
class _Wait(_Dividing):
    """The numbers of both rules. O(types)."""

    needs = frozenset({"lanes"})

    rule: Literal["modified", "strict"] = attrs.field(default="modified", kw_only=True)

    @rule.validator
    def _check_rule(self, field: attrs.Attribute[str], value: object) -> None:
        if value not in ("modified", "strict"):
            raise ConfigError(
                f"{type(self).__name__}: rule must be 'modified' or 'strict', got {value!r}"
            )

    def _divide(self, types: Sequence[TrafficType]) -> dict[Hashable, BookingLimit]:
        limits = booking_limits(types, self.batch_size)
        return {name: limit for (name, _), limit in zip(self.types, limits, strict=True)}

    def _quota(self, limit: BookingLimit, running: int) -> int:
        """How many of a type an iteration takes from the queue at most."""
        if self.rule == "strict":
            return limit.per_stage
        return min(limit.per_stage, max(0, int(max(limit.limit, 1.0) - running)))

    def _may_start(self, state: Any, view: SchedulerView, key: Hashable) -> bool:
        """Whether enough wait; or to wait is of no use: while draining, and without a free slot."""
        if view.draining or not view.free_slots:
            return True
        waiting, running = view.waiting_by_lane, view.running_by_lane
        met = []
        for name, limit in state.shares.items():
            quota = self._quota(limit, running.get((name, key), 0))
            if quota:
                met.append(waiting.get((name, key), 0) >= quota)
        if not met:
            return view.num_running > 0
        return all(met) if self.rule == "strict" else any(met)


@attrs.frozen
class _TimedWait(_Wait):
    max_wait_s: float = attrs.field(default=1.0, validator=_seconds, kw_only=True)


@attrs.frozen
class WaitStart(_TimedWait, Timeout):
    """When the next iteration of WAIT takes requests from the queue.

    With N = ``batch_size``, a type's limit is ``N rate_j s_j / sum of rate s`` (s: its stages) and
    ``n_j = int(max(limit_j / s_j, 1))``.

    * ``strict``: once every type has n_j waiting.
    * ``modified``: once any type has ``min(n_j, free_j)`` waiting, where that is not 0, with
      ``free_j = int(limit_j - its rows)``; also if it is 0 for every type and rows run.

    Types are request classes; all counts are of one batch_key. O(types) per decision.

    Args:
        batch_size: N, >= 1 and at most ``max_num_seqs`` when the scheduler is built.
        types: ``{request_class: TrafficType}``. Requests of other classes never bring a start
            about; they wait for one, ``max_wait_s`` at most.
        rate: Who estimates the types' rates from arrivals: a name of ``RATES`` or a ``Rate``; until
            then, or if None, they are the given ones.
        rule: ``modified`` or ``strict``.
        max_wait_s: Nobody is held back by this rule for longer, seconds, finite, >= 0.

    Source:
        WAIT (arXiv 2504.11320) and its bursty modification (arXiv 2608.06135), as implemented in
        their authors' public repositories. Ours: ``max_wait_s``, and starting while draining and
        when all slots are taken (there a trace's last requests are dropped); a limit counts as at
        least 1, or a rare type would never be served.
    """

    scope = "step"

    def due(self, state: Any, view: SchedulerView) -> float:
        """Return ``-inf`` if enough wait, else the oldest arrival plus ``max_wait_s``. O(types)."""
        if self._may_start(state, view, view.batch_key):
            return -math.inf
        return view.oldest_arrival_at + self.max_wait_s


@attrs.frozen
class WaitQuota(_Wait, Admission):
    """How many of each type join at one step: n_j (``strict``) or ``min(n_j, free_j)``.

    See ``WaitStart``. Requests of other classes join freely. O(types) per join.

    Args:
        batch_size: N, >= 1 and at most ``max_num_seqs`` when the scheduler is built.
        types: ``{request_class: TrafficType}``.
        rate: As of ``WaitStart``.
        rule: ``modified`` or ``strict``.

    Source:
        As ``WaitStart``.
    """

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        """Admit while the type has its quota. O(1)."""
        name, key = rv.request.request_class, rv.request.batch_key
        limit = state.shares.get(name)
        if limit is None:
            return _ADMIT
        quota = self._quota(limit, round.view.running_by_lane.get((name, key), 0))
        return _ADMIT if state.joined.get((name, key), 0) < quota else _SKIP_LANE

    def joined(self, state: Any, rv: RequestView, round: Round) -> Any:
        """Count it. O(types)."""
        lane = (rv.request.request_class, rv.request.batch_key)
        return state._replace(joined={**state.joined, lane: state.joined.get(lane, 0) + 1})

    def settle(self, state: Any, round: Round) -> Any:
        """Forget the round's counts. O(1)."""
        return state._replace(joined=MappingProxyType({}))

    def recheck(self, state: Any, round: Round) -> float:
        """Return 1 if a quota may have ended the round: each step has its own."""
        return 1 if round.num_joined else math.inf


@attrs.frozen
class WaitRows(_TimedWait, Composition):
    """The rows wait for the start, too, as published: no iteration runs before it.

    Beside ``WaitStart`` with the same arguments; without a timeout, or with rows or queue of
    several batch_keys, or with nobody waiting, nobody is held. O(types) per step, and no step is
    free of it any more. Leave it out, and the rows step on while the queue waits.

    Args:
        batch_size: As of ``WaitStart``.
        types: Likewise.
        rate: Likewise.
        rule: Likewise.
        max_wait_s: Likewise.

    Source:
        As ``WaitStart``; the exceptions are ours.
    """

    def select(self, state: Any, round: Round) -> Selection:
        """Return nobody while the next iteration may not start. O(types)."""
        view = round.view
        if round.num_joined or not view.num_waiting:
            return ALL
        keys = {key for lanes in (view.waiting_by_lane, view.running_by_lane) for _, key in lanes}
        if len(keys) > 1 or self._may_start(state, view, keys.pop()):
            return ALL
        held = view.now < view.oldest_arrival_at + self.max_wait_s < math.inf
        return () if held else ALL


# --- Nested WAIT ----------------------------------------------------------------------------------


@attrs.frozen
class _Nested(_Dividing):
    """The numbers of the rule."""

    stage: Literal["block", "step"] = attrs.field(default="block", kw_only=True)
    max_wait_s: float = attrs.field(default=1.0, validator=_seconds, kw_only=True)

    @stage.validator
    def _check_stage(self, field: attrs.Attribute[str], value: object) -> None:
        if value not in ("block", "step"):
            raise ConfigError(
                f"{type(self).__name__}: stage must be 'block' or 'step', got {value!r}"
            )

    def _divide(self, types: Sequence[TrafficType]) -> tuple[Segment, ...]:
        return nested_segments(types, self.batch_size)

    def _stages(self, segments: Sequence[Segment], rows: Iterable[RequestView]) -> list[int]:
        """The stage of each row; those beyond the longest type count as at its last stage."""
        last = sum(each.num_stages for each in segments) - 1
        if self.stage == "block":
            return [min(rv.num_blocks_done, last) for rv in rows]
        return [min(rv.num_steps, last) for rv in rows]

    def _overdue(self, view: SchedulerView) -> bool:
        return view.draining or view.now >= view.oldest_arrival_at + self.max_wait_s


class _SeesRows(_Nested):
    """What needs to know at which stage each row is."""

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Rows, and blocks if those are the stages."""
        return frozenset({"rows", "blocks"} if self.stage == "block" else {"rows"})


def _quota(segment: Segment, num_inside: int) -> int:
    """What a segment takes at its first stage, with so many rows at its later ones."""
    return min(segment.per_stage, max(0, max(1, segment.num_whole) - num_inside))


@attrs.frozen
class NestedWaitStart(_Nested, Timeout):
    """When an idle engine starts under Nested WAIT: once the first segment's quota waits.

    While rows run, ``NestedWaitQuota`` decides: only it can see at which stage they are. O(1).

    Args:
        batch_size: As of ``NestedWaitQuota``.
        types: Likewise.
        rate: Likewise.
        stage: Likewise.
        max_wait_s: An idle engine waits no longer after the oldest arrival, seconds, finite, >= 0.

    Source:
        As ``NestedWaitQuota``.
    """

    def due(self, state: Any, view: SchedulerView) -> float:
        """Return ``-inf`` if enough wait, else the oldest arrival plus ``max_wait_s``. O(1)."""
        if view.draining or view.num_waiting >= _quota(state.shares[0], 0):
            return -math.inf
        return view.oldest_arrival_at + self.max_wait_s


@attrs.frozen
class NestedWaitQuota(_SeesRows, Admission):
    """Who joins under Nested WAIT, which need not know how long a request will be.

    The distinct lengths d_1 < d_2 < ... divide the stages into segments; segment i has the stages
    d_(i-1) to d_i - 1 and a share of the batch in proportion to its stages and to the rate of the
    types that reach it (``theory.wait.nested_segments``). An iteration walks the segments in order.
    Each takes up to ``q = min(per_stage, share - its rows beyond its first stage)`` at its first
    stage and up to ``per_stage`` at each later one; the walk ends at the first segment that holds
    fewer than q at its first stage. The first stage of the first segment holds the queue, too:
    requests join as long as its q is not used up.

    Rows that wait between two segments keep their slots: give the engine more than ``batch_size``.
    O(rows) for each head looked at, and that at every step while somebody waits.

    Args:
        batch_size: N, >= 1 and at most ``max_num_seqs`` when the scheduler is built.
        types: ``{name: TrafficType}``; only rates and lengths count, and of the rates their ratios.
        rate: Who estimates the types' rates from arrivals, a type's name being the request_class:
            a name of ``RATES`` or a ``Rate``; until then, or if None, they are the given ones.
        stage: What lengths count: ``block`` or ``step``.
        max_wait_s: When the oldest request has waited for so long, every segment starts with what
            is there, seconds, finite, >= 0.

    Source:
        Nested WAIT (arXiv 2504.11320) and its bursty modification (arXiv 2608.06135), as
        implemented in their authors' public repositories; the paper's safety buffer is not in that
        code, nor here. Ours: ``max_wait_s``, and that a share counts as at least one request.
    """

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        """Admit while the first segment starts and has room at its first stage. O(rows)."""
        segments, view = state.shares, round.view
        stages = self._stages(segments, round.rows)
        here = stages.count(0)
        quota = _quota(segments[0], sum(0 < n < segments[0].num_stages for n in stages))
        if here + view.num_waiting < quota and not self._overdue(view):
            return _STOP
        return _ADMIT if here + round.num_joined < quota else _STOP

    def recheck(self, state: Any, round: Round) -> float:
        """Return 1: rows move from stage to stage, and time passes."""
        return 1


@attrs.frozen
class NestedWaitRows(_SeesRows, Composition):
    """Which rows an iteration of Nested WAIT takes; see ``NestedWaitQuota``.

    Beside ``NestedWaitStart`` and ``NestedWaitQuota`` with the same arguments. O(rows log rows) per
    step, and no step is free of it.

    Args:
        batch_size: As of ``NestedWaitQuota``.
        types: Likewise.
        rate: Likewise.
        stage: Likewise.
        max_wait_s: Likewise.

    Source:
        As ``NestedWaitQuota``. Ours: the oldest row always takes part, so that every request comes
        to its end, whoever follows; with nobody waiting, nobody is held; and without a free slot
        every segment starts with what is there, since nobody can come to fill it.
    """

    def select(self, state: Any, round: Round) -> Selection:
        """Return the rows of the segments that start. O(rows log rows)."""
        view = round.view
        if not (view.num_waiting or round.num_joined):
            return ALL
        rows = sorted(round.rows, key=lambda rv: rv.sequence)
        lapsed = not view.free_slots or self._overdue(view)
        started = lapsed or round.num_joined > 0
        chosen = self._walk(state.shares, rows, view.num_waiting, started=started, lapsed=lapsed)
        if chosen is None:
            return () if view.oldest_arrival_at < math.inf else ALL
        return chosen if rows[0] in chosen else [rows[0], *chosen]

    def _walk(
        self,
        segments: Sequence[Segment],
        rows: list[RequestView],
        num_waiting: int,
        *,
        started: bool,
        lapsed: bool,
    ) -> list[RequestView] | None:
        """The rows that take part, oldest first within a stage; None if no segment starts.

        ``started``: the first segment does in any case; ``lapsed``: each of them.
        """
        at: dict[int, list[RequestView]] = {}
        for stage, rv in zip(self._stages(segments, rows), rows, strict=True):
            at.setdefault(stage, []).append(rv)
        reached = sorted(at)
        chosen: list[RequestView] | None = None
        first = 0
        for segment in segments:
            end = first + segment.num_stages
            here = at.get(first, [])
            inside = reached[bisect_right(reached, first) : bisect_left(reached, end)]
            later = [at[stage] for stage in inside]
            quota = _quota(segment, sum(map(len, later)))
            if len(here) + num_waiting < quota and not started:
                break
            chosen = [*(chosen or ()), *here[:quota]]
            for each in later:
                chosen += each[: segment.per_stage]
            first, num_waiting, started = end, 0, lapsed
        return chosen
