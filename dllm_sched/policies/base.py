"""The six policy axes, their operators, and the ``Policy`` that puts them together.

A strategy is a small immutable object. What it must remember between calls is a *state* that the
scheduler holds and hands in: ``init`` makes it, ``observe`` and ``settle`` return the next one,
and only those two may change it. So one policy object serves many schedulers, and a call that
fails half-way has changed nothing. An axis also takes a plain callable (see ``Policy``).
"""

from __future__ import annotations

import enum
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import attrs

from dllm_sched.batch import NO_KNOBS, Knobs
from dllm_sched.capacity import Capacity
from dllm_sched.errors import ConfigError
from dllm_sched.request import FinishReason, Phase, RequestView
from dllm_sched.view import Round, SchedulerView

__all__ = [
    "ALL",
    "KEEP",
    "NEEDS",
    "RESTART",
    "Admission",
    "Composition",
    "Control",
    "Eviction",
    "Ordering",
    "Policy",
    "Preempt",
    "Selection",
    "Strategy",
    "Timeout",
    "Verdict",
    "Victim",
    "operator_of",
    "operators",
]

NEEDS = frozenset({"blocks", "progress", "every_step", "lanes", "rows", "max_length"})
"""What a strategy may declare in ``needs``; who declares nothing pays for nothing.

blocks: ``round.boundaries`` (and knobs again at each boundary). progress: the engine must report
``masked_remaining``. every_step: be asked at every step, not only after a change. lanes: one
sub-queue per request class, and counts by lane. rows: ``round.rows``. max_length:
``view.max_length``.
"""


_MANY = (frozenset, set, tuple, list)


class Verdict(enum.IntEnum):
    """What admission says of a head; ``&`` takes the smaller, ``|`` the larger."""

    STOP = 0  #: nobody joins any more in this round
    SKIP_LANE = 1  #: nobody of this lane
    SKIP = 2  #: not this one; look at the next (at most 8 in a round)
    ADMIT = 3


class Preempt(enum.Enum):
    """How a row goes back to the queue."""

    KEEP = "keep"  #: with its progress: the engine must be able to resume it
    RESTART = "restart"  #: from nothing


KEEP = Preempt.KEEP
RESTART = Preempt.RESTART


class _All(enum.Enum):
    ALL = "all"


ALL = _All.ALL
"""Composition: every row of the batch_key whose turn it is."""

Selection = _All | Collection[Phase] | Collection[RequestView]
Victim = tuple[RequestView, Preempt | FinishReason]


class Strategy:
    """What all axes share.

    Attributes:
        needs: Words of ``NEEDS``.
        observes: Event types handed to ``observe``.
    """

    needs: frozenset[str] = frozenset()
    observes: tuple[type[Any], ...] = ()

    def init(self) -> Any:
        """Make the state of one scheduler."""
        return None

    def observe(self, state: Any, event: Any) -> Any:
        """Return the state after an event; called before the next decision, in order."""
        return state

    def validate(self, capacity: Capacity) -> None:
        """Raise ``ConfigError`` if this strategy can never work within ``capacity``.

        Asked when the policy is put in force, not when a limit changes later: under a
        ``max_num_seqs`` lowered for a while (memory was short) it must serve on with fewer rows.
        """

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def asks(self, hook: str) -> bool:
        """Whether this strategy answers ``hook`` itself; what nobody answers is never called."""
        for base in type(self).__mro__:
            if hook in vars(base):
                return base not in _BASES
        return False


class Ordering(Strategy):
    """Who goes first: the smallest key, then the earliest arrival."""

    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        """Return the sort key of a request: numbers, as many for each, never NaN.

        Asked once when the request is queued (again after a preemption or a policy swap).
        """
        return ()

    def then(self, other: Ordering | Callable[[RequestView], tuple[float, ...]]) -> Ordering:
        """Order by this; among equals by ``other``."""
        return _Then(_flatten(_Then, self, _as_ordering(other)))


class Admission(Strategy):
    """Who may join the next step.

    Attributes:
        max_rows: No more rows than this at a time, whatever ``admit`` says; read once, when the
            policy is put in force, so that a plain limit costs nothing per round.
    """

    max_rows: float = math.inf

    def _within_max_rows(self) -> Admission:
        """Return what is left to ask where nobody joins beyond ``max_rows`` anyway."""
        return self

    def accept(self, state: Any, rv: RequestView, view: SchedulerView) -> str | None:
        """Return why a submitted request is refused, or None to queue it."""
        return None

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        """Judge the head ``rv``. No side effects; ``round.joined`` holds who is in already."""
        return Verdict.ADMIT

    def joined(self, state: Any, rv: RequestView, round: Round) -> Any:
        """Return the state for the rest of this round after ``rv`` was admitted (in-round sums).

        The state handed in must not be changed in place: the round may still fail.
        """
        return state

    def settle(self, state: Any, round: Round) -> Any:
        """Return the state to keep; once a round, with its real outcome, last of all."""
        return state

    def recheck(self, state: Any, round: Round) -> float:
        """Return after how many steps ``admit`` may answer otherwise though nothing changed."""
        return math.inf

    def __and__(self, other: Any) -> Admission:
        """Join only if both would."""
        return _AdmissionPair(_flatten_pair(min, self, _as_admission(other)), min)

    def __or__(self, other: Any) -> Admission:
        """Join if either would."""
        return _AdmissionPair(_flatten_pair(max, self, _as_admission(other)), max)


class Timeout(Strategy):
    """When a partly filled batch stops waiting.

    Attributes:
        scope: ``idle``: only an idle engine waits (default); ``step``: asked before every
            admission, also while rows run.
    """

    scope: str = "idle"

    def due(self, state: Any, view: SchedulerView) -> float:
        """Return the instant at which a batch must start: ``-inf`` now, ``inf`` only by input.

        Asked per batch_key: ``view.num_waiting`` and ``view.oldest_arrival_at`` are that key's.
        """
        return -math.inf

    def __or__(self, other: Any) -> Timeout:
        """Start at the earlier instant."""
        return _TimeoutPair(_flatten_pair(min, self, _as_timeout(other)), min)

    def __and__(self, other: Any) -> Timeout:
        """Start at the later instant."""
        return _TimeoutPair(_flatten_pair(max, self, _as_timeout(other)), max)


class Composition(Strategy):
    """Which of the rows take part in the next step."""

    def select(self, state: Any, round: Round) -> Selection:
        """Return ``ALL``, a collection of phases, or a collection of rows (needs ``rows``).

        An empty answer is legal only while the timeout axis names a finite instant.
        """
        return ALL

    def __and__(self, other: Any) -> Composition:
        """Rows that both select."""
        return _CompositionPair(_flatten_pair(_intersect, self, _as_composition(other)), _intersect)

    def __or__(self, other: Any) -> Composition:
        """Rows that either selects."""
        return _CompositionPair(_flatten_pair(_unite, self, _as_composition(other)), _unite)


class Eviction(Strategy):
    """Who leaves before being done."""

    def limits(self, rv: RequestView) -> tuple[float, float]:
        """Return (instant, steps) at which a row ends unfinished; asked once, at its join."""
        return (math.inf, math.inf)

    def victims(self, state: Any, need_pages: int, round: Round) -> Iterable[Victim]:
        """Return (row, ``KEEP``, ``RESTART`` or a finish reason) for each row that must leave.

        Asked when the running rows need ``need_pages`` more than there are: name rows in order of
        preference (a generator will do), they are taken one by one until the others have enough.
        Also asked at every step if ``every_step`` is declared; with 0, all that are named go.
        """
        return ()

    def __or__(self, other: Any) -> Eviction:
        """Rows that either evicts; the tighter limits."""
        return _EvictionPair(_flatten_pair(min, self, _as_eviction(other)), min)

    def __and__(self, other: Any) -> Eviction:
        """Rows that both evict; the looser limits."""
        return _EvictionPair(_flatten_pair(max, self, _as_eviction(other)), max)


class Control(Strategy):
    """What a row, or a batch, may spend: the knobs it runs with."""

    def knobs(self, state: Any, rv: RequestView, view: SchedulerView) -> tuple[Knobs, float]:
        """Return (knobs, instant until which they hold) of a row.

        Asked at its join, when they run out, and at boundaries if ``blocks`` is declared.
        """
        return (NO_KNOBS, math.inf)

    def batch_knobs(self, state: Any, view: SchedulerView) -> tuple[Knobs, float]:
        """Return (knobs, instant until which they hold) of a whole batch."""
        return (NO_KNOBS, math.inf)

    def hints(self, state: Any, round: Round) -> tuple[Any, ...]:
        """Return advice for the engine, asked whenever a step follows a change."""
        return ()

    def then(self, other: Any) -> Control:
        """Both; where they set the same knob, ``other`` wins."""
        return _ControlThen(_flatten(_ControlThen, self, _as_control(other)))


_BASES = frozenset({Strategy, Ordering, Admission, Timeout, Composition, Eviction, Control})

# --- composition ------------------------------------------------------------------------------

_S = TypeVar("_S", bound=Strategy)


def _flatten(kind: type[Any], left: _S, right: _S) -> tuple[_S, ...]:
    parts: list[_S] = []
    for side in (left, right):
        parts.extend(side.parts if isinstance(side, kind) else (side,))
    return tuple(parts)


def _flatten_pair(combine: Any, left: _S, right: _S) -> tuple[_S, ...]:
    parts: list[_S] = []
    for side in (left, right):
        same = isinstance(side, _Combined) and side.combine is combine
        parts.extend(side.parts if same else (side,))  # type: ignore[attr-defined]
    return tuple(parts)


class _Parts(Strategy):
    """Several strategies of one axis; the state is the tuple of theirs."""

    parts: tuple[Any, ...]

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts
        self.needs = frozenset().union(*(part.needs for part in parts))
        self.observes = tuple(dict.fromkeys(kind for part in parts for kind in part.observes))

    def init(self) -> Any:
        return tuple(part.init() for part in self.parts)

    def observe(self, state: Any, event: Any) -> Any:
        kind = type(event)
        return tuple(
            part.observe(one, event) if kind in part.observes else one
            for part, one in zip(self.parts, state, strict=True)
        )

    def validate(self, capacity: Capacity) -> None:
        for part in self.parts:
            part.validate(capacity)

    def asks(self, hook: str) -> bool:
        return any(part.asks(hook) for part in self.parts)

    def __repr__(self) -> str:
        return ".then(".join(map(repr, self.parts)) + ")" * (len(self.parts) - 1)


class _Combined(_Parts):
    """Strategies joined by ``&`` or ``|``; ``combine`` is the lattice operation."""

    def __init__(self, parts: tuple[Any, ...], combine: Any) -> None:
        super().__init__(parts)
        self.combine = combine

    def __repr__(self) -> str:
        sign = _SIGNS[type(self).__name__, self.combine]
        return "(" + sign.join(map(repr, self.parts)) + ")"


class _Then(_Parts, Ordering):
    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        key: tuple[float, ...] = ()
        for part, one in zip(self.parts, state, strict=True):
            key += part.key(one, rv)
        return key


_HOOKS = ("accept", "admit", "joined", "settle", "recheck")  # of an admission


class _AdmissionPair(_Combined, Admission):
    def __init__(self, parts: tuple[Any, ...], combine: Any) -> None:
        super().__init__(parts, combine)
        self.max_rows = combine(part.max_rows for part in parts)

    def _within_max_rows(self) -> Admission:
        if self.combine is max:
            return self  # ``max_rows`` of one part is no limit where another may admit
        rest = tuple(part for part in self.parts if part.observes or any(map(part.asks, _HOOKS)))
        if len(rest) == 1:
            only: Admission = rest[0]._within_max_rows()
            return only
        return _AdmissionPair(rest, min) if rest else self

    def asks(self, hook: str) -> bool:
        if hook == "admit" and self.combine is max:
            return True  # also of parts whose ``max_rows`` says it all when they stand alone
        return super().asks(hook)

    def accept(self, state: Any, rv: RequestView, view: SchedulerView) -> str | None:
        reasons = [p.accept(s, rv, view) for p, s in zip(self.parts, state, strict=True)]
        refused = [reason for reason in reasons if reason is not None]
        if not refused or (self.combine is max and len(refused) < len(reasons)):
            return None
        reason: str = refused[0]
        return reason

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        verdict: Verdict = self.combine(
            [p.admit(s, rv, round) for p, s in zip(self.parts, state, strict=True)]
        )
        return verdict

    def joined(self, state: Any, rv: RequestView, round: Round) -> Any:
        return tuple(p.joined(s, rv, round) for p, s in zip(self.parts, state, strict=True))

    def settle(self, state: Any, round: Round) -> Any:
        return tuple(p.settle(s, round) for p, s in zip(self.parts, state, strict=True))

    def recheck(self, state: Any, round: Round) -> float:
        steps: float = min(p.recheck(s, round) for p, s in zip(self.parts, state, strict=True))
        return steps


class _TimeoutPair(_Combined, Timeout):
    def __init__(self, parts: tuple[Any, ...], combine: Any) -> None:
        super().__init__(parts, combine)
        self.scope = "step" if any(part.scope == "step" for part in parts) else "idle"

    def due(self, state: Any, view: SchedulerView) -> float:
        due: float = self.combine([p.due(s, view) for p, s in zip(self.parts, state, strict=True)])
        return due


class _CompositionPair(_Combined, Composition):
    def select(self, state: Any, round: Round) -> Selection:
        chosen = [p.select(s, round) for p, s in zip(self.parts, state, strict=True)]
        result: Selection = chosen[0]
        for one in chosen[1:]:
            result = self.combine(result, one, round)
        return result


class _EvictionPair(_Combined, Eviction):
    def limits(self, rv: RequestView) -> tuple[float, float]:
        combine = self.combine
        instant, steps = self.parts[0].limits(rv)
        for part in self.parts[1:]:
            other, more = part.limits(rv)
            instant, steps = combine(instant, other), combine(steps, more)
        return (instant, steps)

    def victims(self, state: Any, need_pages: int, round: Round) -> Iterable[Victim]:
        answers = [
            list(p.victims(s, need_pages, round)) for p, s in zip(self.parts, state, strict=True)
        ]
        verdicts = {rv.id: (rv, how) for answer in reversed(answers) for rv, how in answer}
        if self.combine is max:
            common = [{rv.id for rv, _ in answer} for answer in answers]
            verdicts = {i: v for i, v in verdicts.items() if all(i in ids for ids in common)}
        return list(verdicts.values())


class _ControlThen(_Parts, Control):
    def knobs(self, state: Any, rv: RequestView, view: SchedulerView) -> tuple[Knobs, float]:
        return _merge([p.knobs(s, rv, view) for p, s in zip(self.parts, state, strict=True)])

    def batch_knobs(self, state: Any, view: SchedulerView) -> tuple[Knobs, float]:
        return _merge([p.batch_knobs(s, view) for p, s in zip(self.parts, state, strict=True)])

    def hints(self, state: Any, round: Round) -> tuple[Any, ...]:
        answers: list[tuple[Any, ...]] = []
        for part, one in zip(self.parts, state, strict=True):
            hints = tuple(part.hints(one, round))
            if hints not in answers:  # the same advice twice is no other advice
                answers.append(hints)
        return tuple(itertools.chain.from_iterable(answers))


def _merge(answers: list[tuple[Knobs, float]]) -> tuple[Knobs, float]:
    merged = {name: value for knobs, _ in answers for name, value in knobs.items()}
    return (merged or NO_KNOBS, min(until for _, until in answers))


def _phases_of(selection: Selection) -> frozenset[Phase] | None:
    """The selection as phases, or None if it names rows."""
    if isinstance(selection, _All):
        return frozenset(Phase)
    phases = [one for one in selection if isinstance(one, Phase)]
    return frozenset(phases) if len(phases) == len(selection) else None


def _rows_of(selection: Selection, round: Round) -> list[RequestView]:
    phases = _phases_of(selection)
    if phases is not None:
        return [rv for rv in round.rows if rv.phase in phases]
    return (
        []
        if isinstance(selection, _All)
        else [one for one in selection if isinstance(one, RequestView)]
    )


def _intersect(left: Selection, right: Selection, round: Round) -> Selection:
    if left is ALL or right is ALL:
        return right if left is ALL else left
    phases, others = _phases_of(left), _phases_of(right)
    if phases is not None and others is not None:
        return phases & others
    keep = {rv.id for rv in _rows_of(right, round)}
    return [rv for rv in _rows_of(left, round) if rv.id in keep]


def _unite(left: Selection, right: Selection, round: Round) -> Selection:
    if left is ALL or right is ALL:
        return ALL
    phases, others = _phases_of(left), _phases_of(right)
    if phases is not None and others is not None:
        return phases | others
    rows = {rv.id: rv for one in (left, right) for rv in _rows_of(one, round)}
    return list(rows.values())


_SIGNS: dict[tuple[str, Any], str] = {
    ("_AdmissionPair", min): " & ",
    ("_AdmissionPair", max): " | ",
    ("_TimeoutPair", min): " | ",
    ("_TimeoutPair", max): " & ",
    ("_CompositionPair", _intersect): " & ",
    ("_CompositionPair", _unite): " | ",
    ("_EvictionPair", min): " | ",
    ("_EvictionPair", max): " & ",
}

operators: dict[str, Callable[[Any, Any], Any]] = {
    "&": operator.and_,
    "|": operator.or_,
    "then": lambda left, right: left.then(right),
}
"""How strategies are joined, by sign."""


def operator_of(strategy: object) -> str | None:
    """Return the sign that joins a strategy's parts; None if it has none."""
    if isinstance(strategy, _Combined):
        return _SIGNS[type(strategy).__name__, strategy.combine].strip()
    return "then" if isinstance(strategy, _Parts) else None


# --- plain callables as strategies -------------------------------------------------------------


@attrs.frozen
class _OrderingCall(Ordering):
    call: Callable[[RequestView], tuple[float, ...]]

    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        return self.call(rv)


@attrs.frozen
class _AdmissionCall(Admission):
    call: Callable[[RequestView, Round], Verdict]

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        return self.call(rv, round)


@attrs.frozen
class _TimeoutCall(Timeout):
    call: Callable[[SchedulerView], float]

    def due(self, state: Any, view: SchedulerView) -> float:
        return self.call(view)


@attrs.frozen
class _CompositionCall(Composition):
    call: Callable[[Round], Selection]

    def select(self, state: Any, round: Round) -> Selection:
        return self.call(round)


@attrs.frozen
class _EvictionCall(Eviction):
    call: Callable[[RequestView], tuple[float, float]]

    def limits(self, rv: RequestView) -> tuple[float, float]:
        return self.call(rv)


@attrs.frozen
class _ControlCall(Control):
    call: Callable[[RequestView, SchedulerView], tuple[Knobs, float]]

    def knobs(self, state: Any, rv: RequestView, view: SchedulerView) -> tuple[Knobs, float]:
        return self.call(rv, view)


def _coerce(value: Any, axis: type[_S], wrap: Callable[[Any], _S]) -> _S:
    if isinstance(value, axis):
        return value
    if isinstance(value, Strategy | type) or not callable(value):
        raise ConfigError(
            f"policy: the {axis.__name__.lower()} axis takes an instance of {axis.__name__} or a "
            f"plain callable, got {value!r}"
        )
    return wrap(value)


def _as_ordering(value: Any) -> Ordering:
    return _coerce(value, Ordering, _OrderingCall)


def _as_admission(value: Any) -> Admission:
    return _coerce(value, Admission, _AdmissionCall)


def _as_timeout(value: Any) -> Timeout:
    return _coerce(value, Timeout, _TimeoutCall)


def _as_composition(value: Any) -> Composition:
    return _coerce(value, Composition, _CompositionCall)


def _as_eviction(value: Any) -> Eviction:
    return _coerce(value, Eviction, _EvictionCall)


def _as_control(value: Any) -> Control:
    return _coerce(value, Control, _ControlCall)


@attrs.frozen(kw_only=True)
class Policy:
    """Six strategies; a value object that knows no queue, no clock and no request.

    Each axis also takes a plain callable: ordering ``(rv) -> key``, admission
    ``(rv, round) -> Verdict``, timeout ``(view) -> instant``, composition
    ``(round) -> selection``, eviction ``(rv) -> (instant, steps)``, control
    ``(rv, view) -> (knobs, valid_until)``.

    Attributes:
        ordering: Who is first; default: first come, first served.
        admission: Who may join; default: everybody whom a slot and memory allow.
        timeout: When an idle engine starts a batch; default: at once.
        composition: Which rows step; default: all of them.
        eviction: Who leaves early; default: nobody.
        control: The knobs; default: none.
        name: For events and error messages.

    Raises:
        ConfigError: If an axis holds something else, a strategy declares an unknown need, or the
            name is no non-empty str.
    """

    ordering: Ordering = attrs.field(factory=Ordering, converter=_as_ordering)
    admission: Admission = attrs.field(factory=Admission, converter=_as_admission)
    timeout: Timeout = attrs.field(factory=Timeout, converter=_as_timeout)
    composition: Composition = attrs.field(factory=Composition, converter=_as_composition)
    eviction: Eviction = attrs.field(factory=Eviction, converter=_as_eviction)
    control: Control = attrs.field(factory=Control, converter=_as_control)
    name: str = "custom"

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"policy: name must be a non-empty str, got {self.name!r}")
        for strategy in self.strategies:
            needs, observes = strategy.needs, strategy.observes
            if not isinstance(needs, _MANY) or not all(need in NEEDS for need in needs):
                raise ConfigError(
                    f"policy {self.name!r}: {strategy!r} declares unknown needs {needs!r}; "
                    f"a set of {sorted(NEEDS)} is meant"
                )
            if not isinstance(observes, _MANY) or not all(
                isinstance(one, type) for one in observes
            ):
                raise ConfigError(
                    f"policy {self.name!r}: observes of {strategy!r} must be a tuple of event "
                    f"types, got {observes!r}"
                )
        if self.timeout.scope not in ("idle", "step"):
            raise ConfigError(
                f"policy {self.name!r}: a timeout's scope is 'idle' or 'step', "
                f"got {self.timeout.scope!r}"
            )

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The six, in the order of the fields."""
        return (
            self.ordering,
            self.admission,
            self.timeout,
            self.composition,
            self.eviction,
            self.control,
        )

    @property
    def needs(self) -> frozenset[str]:
        """What any of the six declares."""
        return frozenset().union(*(strategy.needs for strategy in self.strategies))

    def validate(self, capacity: Capacity) -> None:
        """Raise ``ConfigError`` if a strategy can never work within ``capacity``."""
        for strategy in self.strategies:
            strategy.validate(capacity)
