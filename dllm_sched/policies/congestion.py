"""Admission that does not congest: a cap on the rate of joins, and memory projected ahead.

Memory that grows while a request is served can lock into a cycle (``theory.congestion``): the
engine fills with requests of one age, which later evict each other or leave together. The cap keeps
ages apart; the projection keeps within memory those whom the cap lets in; ``YoungestFirst`` is what
is left where a projection was too hopeful.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import attrs

from dllm_sched.capacity import Capacity, MemoryModel
from dllm_sched.errors import ConfigError
from dllm_sched.policies.base import Admission, Verdict
from dllm_sched.policies.fair_share import WeightedFairShare
from dllm_sched.request import Request, RequestView
from dllm_sched.theory._check import histogram, is_number, positive
from dllm_sched.view import Round

__all__ = ["MixLengths", "ProjectedPeak", "RateCap"]

_ADMIT, _STOP, _SKIP_LANE = Verdict.ADMIT, Verdict.STOP, Verdict.SKIP_LANE


class _Everybody(enum.Enum):
    EVERYBODY = "everybody"


_ALL: Hashable = _Everybody.EVERYBODY  # the one name of a cap on all classes together


class _Credit(NamedTuple):
    left: Mapping[Hashable, float]  # of joins, by name; never changed
    joined: Mapping[Hashable, int] = {}  # of this round, by name; never changed


def _rates(value: Any) -> dict[Hashable, float]:
    rates = dict(value) if isinstance(value, Mapping) else {_ALL: value}
    if not rates:
        raise ConfigError("RateCap: per_step must hold at least one class")
    for name, rate in rates.items():
        about = "per_step" if name is _ALL else f"per_step of {name!r}"
        positive(**{f"RateCap: {about}": rate})
    return rates


@attrs.frozen
class RateCap(Admission):
    """At most so many joins a step, in the mean; fractions carry over.

    What a step leaves unused is lost but for one join, so a lull is not followed by a burst. An
    empty engine takes one request in any case. O(1) per head, O(classes) per round; no round in
    steps in which nobody could join.

    Args:
        per_step: n*, > 0: ``theory.congestion.equilibrium_rate`` of the mix, per *step* (its unit
            of length is a block: divide by the steps that a block takes). A mapping from
            request_class: a cap for each; other classes join freely.

    Source:
        Rate-limited admission as in "Service-Induced Congestion" (arXiv 2606.15555); n* and the
        carry are our own derivation.
    """

    per_step: Mapping[Hashable, float] = attrs.field(converter=_rates, hash=False)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Lanes if classes are capped one by one."""
        return frozenset(() if _ALL in self.per_step else ("lanes",))

    def init(self) -> _Credit:
        """One step's joins."""
        return _Credit(self.per_step)

    def _name(self, rv: RequestView) -> Hashable:
        return _ALL if _ALL in self.per_step else rv.request.request_class

    def _available(self, state: _Credit, name: Hashable, round: Round) -> float:
        rate = self.per_step[name]
        saved = min(state.left[name] + rate * round.num_steps, rate + 1)
        return saved - state.joined.get(name, 0)

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        """Admit while the class has a join left, or if nobody else is in. O(1)."""
        name = self._name(rv)
        if name not in self.per_step or round.view.num_running + round.num_joined == 0:
            return _ADMIT
        if self._available(state, name, round) >= 1 - 1e-9:
            return _ADMIT
        return _STOP if name is _ALL else _SKIP_LANE

    def joined(self, state: Any, rv: RequestView, round: Round) -> _Credit:
        """Count it. O(classes)."""
        name, joined = self._name(rv), state.joined
        return _Credit(state.left, {**joined, name: joined.get(name, 0) + 1})

    def settle(self, state: Any, round: Round) -> _Credit:
        """Keep what is left. O(classes)."""
        return _Credit(
            {name: max(0.0, self._available(state, name, round)) for name in self.per_step}
        )

    def recheck(self, state: Any, round: Round) -> float:
        """Return the steps until the next class has a join again. O(classes)."""
        waits = (
            (1 - left) / self.per_step[name] - 1e-9
            for name, left in state.left.items()
            if left < 1 - 1e-9
        )
        soonest = min(waits, default=math.inf)
        return max(1, math.ceil(soonest)) if soonest < math.inf else math.inf


def _histogram(value: Any) -> tuple[tuple[int, float], ...] | None:
    if value is None:
        return None
    if isinstance(value, tuple):  # as it is kept, which is how a journal brings it back
        try:
            value = dict(value)
        except (TypeError, ValueError):
            raise ConfigError(
                "lengths must be a non-empty mapping from value to weight, or its pairs"
            ) from None
    histogram("lengths", value)
    return tuple((blocks, value[blocks]) for blocks in sorted(value) if value[blocks])


@attrs.frozen
class ProjectedPeak(Admission):
    """Admit a request only if memory will hold it and all rows at every block to come.

    The projection: rows advance a block at a time, in step with each other, and each leaves after
    its projected number of blocks. Where they do that, ``quantile=1`` never evicts anybody; rows
    that drift apart, or longer answers than projected, may; add ``YoungestFirst``. With the
    projection alone an engine that starts empty fills with one cohort, and keeps its cycle: join
    it with ``RateCap``.

    O(rows x blocks) per round in which somebody waits and O(blocks) per head.

    Args:
        memory: The capacity's memory model.
        lengths: Blocks -> weight, how long answers are; None: as long as their budget.
        quantile: With ``lengths``: a row that has n blocks is taken to get as long as this share
            of those that get longer than n, in (0, 1]; 1: the longest. Never beyond its budget.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation, from the model of "Service-Induced Congestion" (arXiv 2606.15555).
    """

    needs = frozenset({"rows", "blocks"})

    memory: MemoryModel
    lengths: tuple[tuple[int, float], ...] | None = attrs.field(
        default=None, converter=_histogram, kw_only=True
    )
    quantile: float = attrs.field(default=1.0, kw_only=True)
    _ends: tuple[int, ...] = attrs.field(init=False, repr=False, eq=False)

    @quantile.validator
    def _check(self, field: attrs.Attribute[float], value: object) -> None:
        if not is_number(value) or not 0 < value <= 1:  # type: ignore[operator]
            raise ConfigError(f"ProjectedPeak: quantile must lie in (0, 1], got {value!r}")

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_ends", self._projected_ends())

    def _projected_ends(self) -> tuple[int, ...]:
        """By the lengths that were outgrown: after how many blocks the row is taken to end."""
        pairs, ends = self.lengths or (), []
        for outgrown in range(len(pairs)):
            longer = pairs[outgrown:]
            target = self.quantile * math.fsum(weight for _, weight in longer)
            below = 0.0
            for end, weight in longer:  # noqa: B007
                below += weight
                if below >= target - 1e-12:
                    break
            ends.append(end)
        return tuple(ends)

    def _pages(self, rv: RequestView) -> list[int]:
        """What a row holds now, a block later, and so on until it leaves."""
        request, done = rv.request, rv.num_blocks_done
        end = request.max_blocks
        if self.lengths is not None:
            outgrown = bisect_right(self.lengths, (done, math.inf))
            end = min(end, self._ends[outgrown] if outgrown < len(self._ends) else done + 1)
        start, block = request.prompt_len, request.block_length
        pages = self.memory.pages
        return [pages(request, start + n * block) for n in range(done, max(end, done + 1))]

    def _coming(self, state: list[int] | None, round: Round) -> list[int]:
        """What all rows hold now, a block later, and so on; after a join the state knows."""
        if state is not None:
            return state
        total: list[int] = []
        for rv in round.rows:
            total = _added(total, self._pages(rv))
        return total

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        """Admit if the pages suffice at every block to come, or if nobody else is in."""
        most = round.view.num_pages
        if most is None or round.view.num_running + round.num_joined == 0:
            return _ADMIT
        peak = max(_added(self._coming(state, round), self._pages(rv)))
        return _ADMIT if peak <= most else _STOP

    def joined(self, state: Any, rv: RequestView, round: Round) -> list[int] | None:
        """Add the row to the projection. O(blocks)."""
        if round.view.num_pages is None:
            return None
        return _added(self._coming(state, round), self._pages(rv))

    def settle(self, state: Any, round: Round) -> None:
        """Forget the projection: rows advance and leave."""

    def validate(self, capacity: Capacity) -> None:
        """Refuse another memory model than the capacity's."""
        if capacity.memory is not None and capacity.memory != self.memory:
            raise ConfigError(
                f"ProjectedPeak: memory must be the capacity's, {capacity.memory!r}, got "
                f"{self.memory!r}"
            )


def _added(left: list[int], right: list[int]) -> list[int]:
    if len(left) < len(right):
        left, right = right, left
    total = left.copy()
    for n, pages in enumerate(right):
        total[n] += pages
    return total


def _shares(value: Any) -> dict[Hashable, float]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"MixLengths: weights must map classes to weights, got {value!r}")
    for name, weight in value.items():
        positive(**{f"MixLengths: the weight of {name!r}": weight})
    return dict(value)


def _weight(_instance: object, field: attrs.Attribute[float], value: object) -> None:
    positive(**{f"MixLengths: {field.name}": value})


def _one(_request: Request) -> float:
    return 1.0


@attrs.frozen
class MixLengths(WeightedFairShare):
    """Deal requests out in the proportions of a mix, so that lengths never come in one lump.

    Start-time fair queueing among request classes, each request counting as one: while two classes
    wait, their joins, each over its weight, differ by no more than one of each over its weight. A
    class that was away has no claim to what it missed. Nobody starves. O(log n) amortised.

    Args:
        weights: Class (``Request.request_class``) -> weight in the mix, > 0; default: all alike.
        default_weight: Of classes that ``weights`` does not name, > 0.

    Source:
        Mixing requests as in "Service-Induced Congestion" (arXiv 2606.15555); the order is our own
        choice, see ``WeightedFairShare``.
    """

    weights: Mapping[Any, float] = attrs.field(factory=dict, converter=_shares, hash=False)
    default_weight: float = attrs.field(default=1.0, validator=_weight)
    cost: Callable[[Request], float] = attrs.field(default=_one, init=False, repr=False)

    def _tenant(self, request: Request) -> Hashable:
        return request.request_class
