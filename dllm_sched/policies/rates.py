"""Arrival rates and service times, known or learned from events: parts of a strategy's state.

A learner is a value; what it has learned is a state of its own, never changed in place, that the
strategy keeps inside its state: ``observe`` is handed the strategy's events and returns the next.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from operator import mul
from typing import Any, ClassVar, NamedTuple

import attrs

from dllm_sched.capacity import at_least_one
from dllm_sched.errors import ConfigError
from dllm_sched.events import RequestFinished, RequestJoined, RequestSubmitted
from dllm_sched.theory._check import is_number, whole

__all__ = [
    "RATES",
    "EmaRate",
    "FilteredMeanRate",
    "KnownRate",
    "KnownService",
    "LearnedService",
    "LogBandRate",
    "Rate",
    "Service",
    "WindowRate",
    "last_of_cubic",
    "rate_of",
    "service_of",
]


def _number_above_zero(value: object) -> bool:
    return is_number(value) and 0 < value < math.inf  # type: ignore[operator]


def _positive(instance: object, field: attrs.Attribute[float], value: object) -> None:
    if not _number_above_zero(value):
        raise ConfigError(
            f"{type(instance).__name__}: {field.name} must be a positive finite number, "
            f"got {value!r}"
        )


def _weight(instance: object, field: attrs.Attribute[float], value: object) -> None:
    _positive(instance, field, value)
    if isinstance(value, int | float) and value > 1:
        raise ConfigError(
            f"{type(instance).__name__}: {field.name} must be at most 1, got {value!r}"
        )


# --- arrival rates ----------------------------------------------------------------------------


class Rate:
    """How many requests arrive per second, as far as is known.

    Attributes:
        observes: Events to hand to ``observe``.
    """

    observes: ClassVar[tuple[type[Any], ...]] = (RequestSubmitted,)

    def init(self) -> Any:
        """Make the state before the first arrival."""
        return None

    def observe(self, state: Any, event: Any) -> Any:
        """Return the state after an arrival; other events leave it as it is."""
        return state

    def rate(self, state: Any) -> float | None:
        """Return arrivals per second, > 0; None: not known yet. O(1)."""
        raise NotImplementedError  # a base: what is known is each estimator's own


@attrs.frozen
class KnownRate(Rate):
    """Given, never learned.

    Args:
        per_s: Arrivals per second, > 0.
    """

    observes = ()
    per_s: float = attrs.field(validator=_positive)

    def rate(self, state: Any) -> float | None:
        """Return it. O(1)."""
        return self.per_s


class _Gaps(NamedTuple):
    """The last arrival and the gaps before it, seconds."""

    last_at: float
    gaps: tuple[float, ...] = ()

    def next(self, at: float, most: int) -> _Gaps:
        return _Gaps(at, (*self.gaps, at - self.last_at)[-most:])

    @property
    def mean(self) -> float:
        return math.fsum(self.gaps) / len(self.gaps)


@attrs.frozen
class WindowRate(Rate):
    """One over the mean of the last gaps: forgets all at once what is older. O(window) an arrival.

    Args:
        window: Gaps, >= 1.

    Source:
        Own choice.
    """

    window: int = attrs.field(default=100, validator=at_least_one)

    def observe(self, state: Any, event: Any) -> Any:
        """Take one more gap."""
        if not isinstance(event, RequestSubmitted):
            return state
        return _Gaps(event.at) if state is None else state.next(event.at, self.window)

    def rate(self, state: Any) -> float | None:
        """Return gaps over seconds; None until two arrivals lie apart. O(window)."""
        if state is None or not state.gaps:
            return None
        mean = state.mean
        return 1.0 / mean if mean > 0 else None


class _Ema(NamedTuple):
    gaps: _Gaps
    mean: float | None = None  # exponential mean of the means of the last gaps, seconds


@attrs.frozen
class EmaRate(Rate):
    """One over an exponential mean of the gaps: follows a rate that changes. O(1) an arrival.

    The mean of the last ``window`` gaps m enters ``e <- weight m + (1 - weight) e``; e begins with
    the first gap. After a step from 5 to 50 a second it passes 45 on the 91st arrival. For constant
    Poisson arrivals it is 2 % too high in the mean, since 1 / e is no linear function of e.

    Args:
        weight: Of what is new, in (0, 1].
        window: Gaps that are averaged first, >= 1.

    Source:
        The first half of the estimator of bursty WAIT (arXiv 2608.06135), as implemented in its
        authors' public repository, with its numbers as defaults; see ``FilteredMeanRate``.
    """

    weight: float = attrs.field(default=0.05, validator=_weight)
    window: int = attrs.field(default=10, validator=at_least_one)

    def observe(self, state: Any, event: Any) -> Any:
        """Take one more gap."""
        if not isinstance(event, RequestSubmitted):
            return state
        if state is None:
            return _Ema(_Gaps(event.at))
        gaps = state.gaps.next(event.at, self.window)
        old = state.mean
        new = gaps.mean
        return _Ema(gaps, new if old is None else self.weight * new + (1 - self.weight) * old)

    def rate(self, state: Any) -> float | None:
        """Return 1 / e; None until two arrivals lie apart. O(1)."""
        return 1.0 / state.mean if state is not None and state.mean else None


@functools.cache
def last_of_cubic(window: int) -> tuple[float, ...]:
    """Return the weights that give a least-squares cubic's value at its last point. O(window).

    The dot product with the last ``window`` samples is the last value of a Savitzky-Golay filter of
    order 3. The weights come from the four orthogonal polynomials on the points -h, ..., h.

    Args:
        window: Odd, 5 to 999,999.

    Raises:
        ConfigError: If it is even, too short for a cubic, or too long to be added up.

    Source:
        Textbook least squares (Savitzky and Golay, 1964); own derivation.
    """
    if not isinstance(window, int) or not 5 <= window < 1_000_000 or window % 2 == 0:
        raise ConfigError(f"window must be an odd int from 5 to 999,999, got {window!r}")
    half = window // 2
    points = range(-half, half + 1)
    second = sum(x**2 for x in points)
    fourth = sum(x**4 for x in points)
    basis: list[Callable[[int], float]] = [
        lambda _: 1.0,
        float,
        lambda x: x**2 - second / window,
        lambda x: x**3 - x * fourth / second,
    ]
    norms = [math.fsum(p(x) ** 2 for x in points) for p in basis]
    return tuple(
        math.fsum(p(half) * p(x) / norm for p, norm in zip(basis, norms, strict=True))
        for x in points
    )


class _Filtered(NamedTuple):
    ema: Any = None
    raw: tuple[float, ...] = ()
    num: int = 0
    mean: float = 0.0


@attrs.frozen
class FilteredMeanRate(Rate):
    """The mean, since the start, of a smoothed ``EmaRate``. O(window) an arrival.

    Each arrival gives 1 / e; from the ``window``-th on it is replaced by the last value of a
    Savitzky-Golay filter of order 3 over the last ``window``; the rate is the mean of all those
    values so far. So it does **not** follow a rate that changes: long after, it is near the rate
    that an arrival sees in the mean (``theory.arrivals.arrival_weighted_rate``), not the present
    one. It is here for comparison; use ``EmaRate``.

    Args:
        ema: What is smoothed.
        window: Odd, 5 to 999,999.

    Source:
        Bursty WAIT (arXiv 2608.06135), as implemented in its authors' public repository.
    """

    ema: EmaRate = attrs.field(factory=EmaRate)
    window: int = attrs.field(default=101)

    @ema.validator
    def _check_ema(self, field: attrs.Attribute[EmaRate], value: object) -> None:
        if not isinstance(value, EmaRate):
            raise ConfigError(f"FilteredMeanRate: ema must be an EmaRate, got {value!r}")

    @window.validator
    def _check_window(self, field: attrs.Attribute[int], value: int) -> None:
        whole(5, window=value)
        last_of_cubic(value)

    def init(self) -> Any:
        """Nothing seen."""
        return _Filtered()

    def observe(self, state: Any, event: Any) -> Any:
        """Take one more gap."""
        if not isinstance(event, RequestSubmitted):
            return state
        ema = self.ema.observe(state.ema, event)
        value = self.ema.rate(ema)
        if value is None:
            return state._replace(ema=ema)
        raw = (*state.raw, value)[-self.window :]
        if len(raw) == self.window:
            value = math.fsum(map(mul, raw, last_of_cubic(self.window)))
        num = state.num + 1
        return _Filtered(ema, raw, num, state.mean + (value - state.mean) / num)

    def rate(self, state: Any) -> float | None:
        """Return the mean; None until two arrivals lie apart, or if it is not > 0. O(1)."""
        return state.mean if state.mean > 0 else None


class _Banded(NamedTuple):
    gaps: _Gaps | None = None
    value: float | None = None  # the accepted log rate
    aside: tuple[float, ...] = ()  # log rates that were too far from it
    num: int = 0
    mean: float = 0.0


@attrs.frozen
class LogBandRate(Rate):
    """The mean, since the start, of a log rate that moves only when it must. O(window) an arrival.

    With x = -log(mean of the last ``window`` gaps), v the value kept and a band of half width
    ``sqrt(|y|) / 2`` around y: v stays if x lies in the band of v; else the midpoint of x and v is
    taken if both lie in its band; else x is put aside and v stays, until ``patience`` of them lie
    there, when their mean is taken if it is in the band of x, otherwise x. The rate is the mean of
    exp(v) over all arrivals, so it does not follow a rate that changes; see ``FilteredMeanRate``.

    Args:
        window: Gaps, >= 1.
        patience: Values put aside, >= 1.

    Source:
        Bursty Nested WAIT (arXiv 2608.06135), as implemented in its authors' public repository.
        Ours: ``|y|`` (below one arrival a second the published square root is of a negative
        number), what is aside is forgotten once a value is accepted, and arrivals at one instant,
        which have no logarithm, are passed over.
    """

    window: int = attrs.field(default=10, validator=at_least_one)
    patience: int = attrs.field(default=10, validator=at_least_one)

    def init(self) -> Any:
        """Nothing seen."""
        return _Banded()

    def observe(self, state: Any, event: Any) -> Any:
        """Take one more gap."""
        if not isinstance(event, RequestSubmitted):
            return state
        if state.gaps is None:
            return state._replace(gaps=_Gaps(event.at))
        gaps = state.gaps.next(event.at, self.window)
        if not gaps.mean > 0:
            return state._replace(gaps=gaps)
        value, aside = self._move(state, -math.log(gaps.mean))
        num = state.num + 1
        mean = state.mean + (math.exp(value) - state.mean) / num
        return _Banded(gaps, value, aside, num, mean)

    def _move(self, state: _Banded, x: float) -> tuple[float, tuple[float, ...]]:
        """Return the value to keep, and what is aside."""
        value = state.value
        if value is None:
            return x, ()
        if _in_band(x, value):
            return value, ()
        middle = (x + value) / 2
        if _in_band(x, middle) and _in_band(value, middle):
            return middle, ()
        aside = (*state.aside, x)
        if len(aside) < self.patience:
            return value, aside
        mean = math.fsum(aside) / len(aside)
        return (mean if _in_band(mean, x) else x), ()

    def rate(self, state: Any) -> float | None:
        """Return the mean; None until two arrivals lie apart. O(1)."""
        return state.mean if state.num else None


def _in_band(x: float, around: float) -> bool:
    return abs(x - around) <= 0.5 * math.sqrt(abs(around))


RATES: dict[str, Rate] = {
    "ema": EmaRate(),
    "window": WindowRate(),
    "running_mean": FilteredMeanRate(),
    "log_band": LogBandRate(),
}
"""Estimators by name. ``ema`` and ``window`` adapt; the two published ones average for ever."""


def rate_of(value: object) -> Rate:
    """Return a rate: of a number (arrivals per second, > 0), a name of ``RATES``, or itself.

    Raises:
        ConfigError: If it is none of them.
    """
    if isinstance(value, Rate):
        return value
    if isinstance(value, str) and value in RATES:
        return RATES[value]
    if _number_above_zero(value):
        return KnownRate(value)  # type: ignore[arg-type]
    raise ConfigError(
        f"rate must be arrivals per second > 0 or one of {', '.join(RATES)}, got {value!r}"
    )


# --- service times ----------------------------------------------------------------------------


class Service:
    """How long a batch runs, as far as is known.

    Attributes:
        observes: Events to hand to ``observe``.
    """

    observes: ClassVar[tuple[type[Any], ...]] = ()

    def init(self) -> Any:
        """Make the state before the first batch."""
        return None

    def observe(self, state: Any, event: Any) -> Any:
        """Return the state after an event."""
        return state

    def seconds(self, state: Any, num_rows: int) -> float | None:
        """Return the seconds that a batch of ``num_rows`` runs; None: not known yet. O(1)."""
        raise NotImplementedError  # a base: what is known is each estimator's own


@attrs.frozen
class KnownService(Service):
    """Given, never learned.

    Args:
        given: Seconds, > 0, or a function of the number of rows.
    """

    given: float | Callable[[int], float] = attrs.field()

    @given.validator
    def _check(self, field: attrs.Attribute[Any], value: object) -> None:
        if not callable(value):
            _positive(self, field, value)

    def seconds(self, state: Any, num_rows: int) -> float | None:
        """Return it. O(1)."""
        return self.given(num_rows) if callable(self.given) else self.given


class _Batches(NamedTuple):
    """Exponential means over the batches that have ended, and the latest batch."""

    known: bool = False  # one has ended
    rows: float = 0.0
    seconds: float = 0.0
    rows_squared: float = 0.0
    product: float = 0.0
    began_at: float = -math.inf
    size: int = 0
    longest: float = 0.0  # seconds until the last of its rows so far ended


@attrs.frozen
class LearnedService(Service):
    """A line through the batches seen: seconds by rows, the older ones counting less.

    For batches that start together and run to their end (``AtBatchBoundary``): all rows that join
    at one instant are a batch, and it lasts until the last of them has ended. While batches are
    all of one size, or larger ones are no slower, the line is level. O(1) an event.

    Args:
        weight: Of the latest batch, in (0, 1].

    Source:
        Own derivation (exponentially weighted least squares).
    """

    observes = (RequestJoined, RequestFinished)

    weight: float = attrs.field(default=0.1, validator=_weight)

    def init(self) -> Any:
        """Nothing seen."""
        return _Batches()

    def observe(self, state: Any, event: Any) -> Any:
        """Note who joins and who ends."""
        if isinstance(event, RequestJoined):
            if event.at == state.began_at:
                return state._replace(size=state.size + 1)
            return self._ended(state)._replace(began_at=event.at, size=1, longest=0.0)
        if isinstance(event, RequestFinished) and event.admitted_at == state.began_at:
            return state._replace(longest=max(state.longest, event.at - state.began_at))
        return state

    def _ended(self, state: _Batches) -> _Batches:
        """Return the means with the latest batch among them."""
        rows, seconds = state.size, state.longest
        if not seconds:
            return state
        keep = 1.0 - self.weight if state.known else 0.0
        add = 1.0 - keep
        return state._replace(
            known=True,
            rows=keep * state.rows + add * rows,
            seconds=keep * state.seconds + add * seconds,
            rows_squared=keep * state.rows_squared + add * rows * rows,
            product=keep * state.product + add * rows * seconds,
        )

    def seconds(self, state: Any, num_rows: int) -> float | None:
        """Return the line's value, of an idle engine: the latest batch counts as ended. O(1)."""
        means = self._ended(state)
        if not means.known:
            return None
        spread = means.rows_squared - means.rows**2
        slope = 0.0
        if spread > 1e-6 * means.rows_squared:
            slope = max(0.0, (means.product - means.rows * means.seconds) / spread)
        value: float = max(0.0, means.seconds + slope * (num_rows - means.rows))
        return value


def service_of(value: object) -> Service:
    """Return a service: of seconds > 0, a function of the rows, None (learned), or itself.

    Raises:
        ConfigError: If it is none of them.
    """
    if isinstance(value, Service):
        return value
    return LearnedService() if value is None else KnownService(value)  # type: ignore[arg-type]
