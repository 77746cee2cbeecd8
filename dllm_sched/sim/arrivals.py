"""When requests arrive: seeded processes that stream, a chunk of instants at a time.

The first arrival comes one gap after instant 0; renewal processes start as if there had been an
arrival at 0, modulated ones in a random state of their long-run mix.
"""

from __future__ import annotations

import bisect
import gzip
import io
import itertools
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from dllm_sched.errors import ConfigError
from dllm_sched.sim._check import length_only
from dllm_sched.theory._check import not_negative, positive
from dllm_sched.theory.arrivals import (
    gamma_shape,
    stationary,
    time_average_rate,
    two_state,
    weibull_shape,
)

__all__ = [
    "MMPP",
    "Arrivals",
    "Burstiness",
    "ClientMix",
    "ClientWindow",
    "GammaRenewal",
    "Poisson",
    "WeibullRenewal",
    "burstiness",
]

Floats = NDArray[np.float64]

CHUNK = 8192  # instants made at once: 64 KB, and a microsecond of overhead each thousand
_MOST_SLICE = 65536
_MOST_STAYS = 10_000  # of a modulated process per arrival; each takes some 10 ns
_MOST_WINDOWS = 100_000_000
_GZIP = b"\x1f\x8b"


class Arrivals(ABC):
    """A process of arrival instants. A value object: the generator is the caller's."""

    @property
    @abstractmethod
    def rate(self) -> float:
        """Long-run arrivals per second, > 0."""

    @abstractmethod
    def chunks(self, rng: np.random.Generator) -> Iterator[Floats]:
        """Yield arrays of instants, seconds, never falling; endless unless the class says not."""

    @abstractmethod
    def at_rate(self, rate: float) -> Arrivals:
        """Return the same process with another mean rate, requests per second, > 0."""

    def times(self, seed: int | np.random.SeedSequence) -> Iterator[float]:
        """Yield the instants one by one; the same ones for the same seed."""
        chunks = self.chunks(np.random.default_rng(seed))
        return itertools.chain.from_iterable(chunk.tolist() for chunk in chunks)


class _Renewal(Arrivals):
    """Independent gaps of one distribution."""

    @abstractmethod
    def _gaps(self, rng: np.random.Generator) -> Floats:
        """Draw CHUNK gaps, seconds."""

    def chunks(self, rng: np.random.Generator) -> Iterator[Floats]:
        """Yield ``CHUNK`` instants at a time, for ever."""
        last = 0.0
        while True:
            times = self._gaps(rng).cumsum()
            times += last
            last = float(times[-1])
            yield times

    def at_rate(self, rate: float) -> Arrivals:
        """Return the process with shorter or longer gaps."""
        return attrs.evolve(self, rate=rate)  # type: ignore[misc]


@attrs.frozen
class Poisson(_Renewal):
    """Memoryless arrivals.

    Args:
        rate: Requests per second, > 0.
    """

    rate: float

    def __attrs_post_init__(self) -> None:
        positive(rate=self.rate)

    def _gaps(self, rng: np.random.Generator) -> Floats:
        return rng.standard_exponential(CHUNK) / self.rate


@attrs.frozen
class GammaRenewal(_Renewal):
    """Gamma gaps: ``cv`` above 1 is bursty, 1 is Poisson, below 1 is even.

    Args:
        rate: Requests per second, > 0.
        cv: Standard deviation over mean of the gaps, > 0.
    """

    rate: float
    cv: float

    def __attrs_post_init__(self) -> None:
        positive(rate=self.rate, cv=self.cv)

    def _gaps(self, rng: np.random.Generator) -> Floats:
        shape = gamma_shape(self.cv)
        return rng.standard_gamma(shape, CHUNK) / (shape * self.rate)


@attrs.frozen
class WeibullRenewal(_Renewal):
    """Weibull gaps: heavier tails than Gamma at the same ``cv``.

    Args:
        rate: Requests per second, > 0.
        cv: Standard deviation over mean of the gaps, from 0.01 to 1e5; or else
        shape: Of the distribution, >= 0.02; below 1 is bursty.
    """

    rate: float
    cv: float | None = attrs.field(default=None, kw_only=True)
    shape: float | None = attrs.field(default=None, kw_only=True)
    _shape: float = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        positive(rate=self.rate)
        if (self.cv is None) == (self.shape is None):
            raise ConfigError("WeibullRenewal needs exactly one of cv and shape")
        if self.cv is not None:
            shape = weibull_shape(self.cv)
        else:
            positive(shape=self.shape)
            shape = self.shape or 0.0
            if shape < 0.02:
                raise ConfigError(f"shape must be >= 0.02, got {self.shape!r}")
        object.__setattr__(self, "_shape", shape)

    def _gaps(self, rng: np.random.Generator) -> Floats:
        mean = math.gamma(1 + 1 / self._shape)
        return rng.weibull(self._shape, CHUNK) / (mean * self.rate)


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(values)


def _rows(values: Iterable[Iterable[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in values)


@attrs.frozen
class MMPP(Arrivals):
    """A Poisson process whose rate is the state of a Markov chain: bursts with a memory.

    Args:
        rates: Requests per second in each state, >= 0, not all 0.
        generator: Row i: rates from state i to the others, per second; each row sums to 0.

    >>> MMPP.two_state(50, 120, leave_first=0.2, leave_second=0.6).rate
    67.5
    """

    rates: tuple[float, ...] = attrs.field(converter=_floats)
    generator: tuple[tuple[float, ...], ...] = attrs.field(converter=_rows)
    _rate: float = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        rate = time_average_rate(self.rates, self.generator)  # checks both
        if rate <= 0:
            raise ConfigError(f"no state that lasts has a rate > 0: {self!r}")
        object.__setattr__(self, "_rate", rate)

    @classmethod
    def two_state(
        cls, first: float, second: float, *, leave_first: float, leave_second: float
    ) -> MMPP:
        """Return a process with two rates, requests per second, and how often each is left.

        Args:
            first: Rate in the first state, >= 0.
            second: Rate in the second, >= 0.
            leave_first: Times per second at which the first is left (q01), > 0.
            leave_second: Likewise the second (q10), > 0.
        """
        return cls((first, second), two_state(leave_first, leave_second))

    @property
    def rate(self) -> float:
        """Time-average rate."""
        return self._rate

    def at_rate(self, rate: float) -> MMPP:
        """Return the process with every state's rate scaled; the chain keeps its pace."""
        positive(rate=rate)
        return MMPP([each * rate / self._rate for each in self.rates], self.generator)

    def _stays_per_s(self) -> float:
        shares = stationary(self.generator)
        return math.fsum(-share * self.generator[i][i] for i, share in enumerate(shares))

    def _stays(self, rng: np.random.Generator) -> Iterator[tuple[Floats, Floats]]:
        """Yield state by state its rate and its seconds, 1024 at a time."""
        rates = np.array(self.rates)
        leave = -np.diagonal(np.array(self.generator))
        edges = np.cumsum(stationary(self.generator)).tolist()
        state = min(bisect.bisect_right(edges, rng.random()), len(rates) - 1)
        jumps = []
        for i, row in enumerate(self.generator):
            odds = [max(0.0, value) if j != i else 0.0 for j, value in enumerate(row)]
            jumps.append(list(itertools.accumulate(odds)))
        two = len(rates) == 2 and leave.all()
        while True:
            if not leave[state]:  # one state, or one that is never left
                yield rates[[state]], np.array([math.inf])
                return
            if two:
                states = np.arange(state, state + 1024) % 2
            else:
                visited = []
                for draw in rng.random(1024).tolist():
                    visited.append(state)
                    ahead = jumps[state]
                    if not ahead[-1]:
                        break
                    state = bisect.bisect_right(ahead, draw * ahead[-1])
                states = np.array(visited)
            stays = rng.standard_exponential(len(states))
            with np.errstate(divide="ignore"):
                yield rates[states], stays / leave[states]

    def chunks(self, rng: np.random.Generator) -> Iterator[Floats]:
        """Yield at most ``CHUNK`` instants at a time, for ever.

        Arrivals of a Poisson process of rate 1 are mapped through the accumulated rate, which
        rises linearly within a stay.

        Raises:
            ConfigError: If the state changes so often that an arrival takes more than 10,000 stays.
        """
        stays = self._stays_per_s() / self._rate
        if stays > _MOST_STAYS:
            raise ConfigError(
                f"the state changes {stays:.4g} times per arrival, which leaves no burst and takes "
                f"for ever; use Poisson, or rates of leaving below {_MOST_STAYS:,} times the mean "
                "rate"
            )
        chain, unit = rng.spawn(2)
        began = 0.0
        waiting = unit.standard_exponential(CHUNK).cumsum()  # accumulated rate, from ``began`` on
        for rates, seconds in self._stays(chain):
            starts = began + np.concatenate(([0.0], seconds.cumsum()))
            # Of a last stay without end, inf; of one without arrivals, however long, nothing.
            gained = np.multiply(rates, seconds, where=rates > 0, out=np.zeros(len(rates)))
            heights = np.concatenate(([0.0], gained.cumsum()))
            top = heights[-1]
            while True:
                fits = int(np.searchsorted(waiting, top))
                if fits:
                    due = waiting[:fits]
                    # Right: never within a stay of height 0, whose start and end coincide.
                    stay = np.searchsorted(heights, due, side="right") - 1
                    yield starts[stay] + (due - heights[stay]) / rates[stay]
                if fits < len(waiting):
                    break
                waiting = waiting[-1] + unit.standard_exponential(CHUNK).cumsum()
            waiting = waiting[fits:] - top
            began = float(starts[-1])


class ClientWindow(NamedTuple):
    """What one client does in one window of time."""

    client: int
    start_s: float
    rate: float  #: requests per second
    cv: float  #: standard deviation over mean of its gaps
    pattern: str  #: family of its gaps: Gamma or Weibull


class _Client:
    """One client's arrivals, in units of its own mean gap, across windows of different rates."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._left: float | None = None  # mean gaps until its next arrival

    def _draw(self, window: ClientWindow, shape: float, count: int) -> Floats:
        if window.pattern == "Gamma":
            return self._rng.standard_gamma(shape, count) / shape
        return self._rng.weibull(shape, count) / math.gamma(1 + 1 / shape)

    def take(
        self, start: float, seconds: float, window: ClientWindow, rate: float, shape: float
    ) -> Floats:
        """Return its instants in the next ``seconds``."""
        room = rate * seconds
        if self._left is None:
            self._left = float(self._draw(window, shape, 1)[0])
        if self._left >= room:
            self._left -= room
            return np.empty(0)
        at = self._left
        parts = [np.array([at])]
        while True:
            count = min(_MOST_SLICE, int(1.2 * (room - at)) + 16)
            ends = at + self._draw(window, shape, count).cumsum()
            inside = int(np.searchsorted(ends, room))
            parts.append(ends[:inside])
            if inside < count:
                self._left = float(ends[inside]) - room
                return start + np.concatenate(parts) / rate
            at = float(ends[-1])


def _shape(window: ClientWindow) -> float:
    if window.pattern == "Gamma":
        return gamma_shape(window.cv)
    if window.pattern == "Weibull":
        return weibull_shape(window.cv)
    raise ConfigError(f"pattern must be 'Gamma' or 'Weibull': {window!r}")


def _windows(values: Iterable[ClientWindow]) -> tuple[ClientWindow, ...]:
    return tuple(sorted(ClientWindow(*value) for value in values))


@attrs.frozen
class ClientMix(Arrivals):
    """Many clients, each with its own rate and burstiness in each window of time. Finite.

    A client's gaps stretch and shrink with its rate, so that a gap that spans two windows is no
    special case; a window without an entry has no arrivals of it.

    Args:
        windows: Who does what when; one entry at most per client and window.
        window_s: Length of a window, seconds, > 0.
        start_s: Begin here, which becomes instant 0; a multiple of ``window_s``.
        end_s: End here; ``None``: after the last window.
        rate_scale: Multiplies all rates, > 0.

    Source:
        The construction of "ServeGen" (arXiv 2505.09999): superposed renewal processes, one per
        client. Gaps are drawn from the fitted family at the *measured* rate and coefficient of
        variation: in many windows the published shape and scale do not give the measured rate, and
        the smallest shapes belong to no process that a window could show.
    """

    windows: tuple[ClientWindow, ...] = attrs.field(converter=_windows, repr=length_only)
    window_s: float = attrs.field(default=600.0, kw_only=True)
    start_s: float = attrs.field(default=0.0, kw_only=True)
    end_s: float | None = attrs.field(default=None, kw_only=True)
    rate_scale: float = attrs.field(default=1.0, kw_only=True)
    _plan: dict[int, list[tuple[ClientWindow, float]]] = attrs.field(
        init=False, repr=False, eq=False
    )

    def __attrs_post_init__(self) -> None:
        positive(window_s=self.window_s, rate_scale=self.rate_scale)
        not_negative(start_s=self.start_s)
        if self.end_s is not None:
            positive(end_s=self.end_s)
        plan: dict[int, list[tuple[ClientWindow, float]]] = {}
        seen = set()
        for window in self.windows:
            not_negative(start_s=window.start_s, rate=window.rate)
            index = self._index(window.start_s)
            if (window.client, index) in seen:
                raise ConfigError(f"two entries for one client and window: {window!r}")
            seen.add((window.client, index))
            shape = _shape(window)
            if window.rate > 0:
                plan.setdefault(index, []).append((window, shape))
        object.__setattr__(self, "_plan", plan)
        if not any(index in plan for index in self._indices):
            raise ConfigError("no client sends anything between start_s and end_s")

    def _index(self, instant: float) -> int:
        """The number of the window that starts at an instant."""
        index = round(instant / self.window_s)
        if not math.isclose(index * self.window_s, instant, rel_tol=1e-9, abs_tol=1e-6):
            raise ConfigError(
                f"windows, start_s and end_s must lie at multiples of window_s = {self.window_s}: "
                f"{instant!r}"
            )
        return index

    @property
    def _indices(self) -> range:
        last = max(self._plan, default=-1) + 1
        end = last if self.end_s is None else self._index(self.end_s)
        return range(self._index(self.start_s), end)

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> ClientMix:
        """Read ``client,t_s,rate,cv,pattern`` rows (``.gz``, too); options as of the class.

        Raises:
            ConfigError: If a line is malformed; names the line.
        """
        windows = []
        with open_text(path) as lines:
            for number, fields in csv_rows(path, lines, "client,t_s,rate,cv,pattern"):
                try:
                    client = int(fields[0])
                    start, rate, cv = map(float, fields[1:4])
                except ValueError:
                    raise ConfigError(
                        f"{path}, line {number}: client must be a whole number, t_s, rate and cv "
                        f"numbers: {','.join(fields)!r}"
                    ) from None
                if not (
                    0 <= rate < math.inf
                    and 0.01 <= cv <= 1e5
                    and 0 <= start < math.inf
                    and fields[4] in ("Gamma", "Weibull")
                ):
                    raise ConfigError(
                        f"{path}, line {number}: needs t_s and rate >= 0, a cv from 0.01 to "
                        "1e5, and Gamma or Weibull"
                    )
                windows.append(ClientWindow(client, start, rate, cv, fields[4]))
        return cls(windows, **options)

    @property
    def rate(self) -> float:
        """Mean rate from start to end."""
        total = math.fsum(
            window.rate for index in self._indices for window, _ in self._plan.get(index, ())
        )
        return self.rate_scale * total / len(self._indices)

    def at_rate(self, rate: float) -> ClientMix:
        """Return the mix with all rates scaled."""
        positive(rate=rate)
        return attrs.evolve(self, rate_scale=self.rate_scale * rate / self.rate)

    def chunks(self, rng: np.random.Generator) -> Iterator[Floats]:
        """Yield slices of time, each with about 65,536 instants at most, until the end."""
        names = sorted({window.client for window in self.windows})
        streams = rng.spawn(len(names))
        clients = {name: _Client(stream) for name, stream in zip(names, streams, strict=True)}
        for index in self._indices:
            plan = self._plan.get(index, ())
            total = self.rate_scale * math.fsum(window.rate for window, _ in plan)
            slices = max(1, math.ceil(total * self.window_s / _MOST_SLICE))
            seconds = self.window_s / slices
            began = index * self.window_s - self.start_s
            for number in range(slices):
                parts = [
                    clients[window.client].take(
                        began + number * seconds,
                        seconds,
                        window,
                        window.rate * self.rate_scale,
                        shape,
                    )
                    for window, shape in plan
                ]
                times = np.concatenate(parts) if parts else np.empty(0)
                if len(times):
                    times.sort()
                    yield times


class Burstiness(NamedTuple):
    """How bursty a sequence of arrivals is."""

    num_arrivals: int
    span_s: float  #: from 0 to the last arrival
    rate: float  #: arrivals over span
    cv: float  #: standard deviation over mean of the gaps; 1 = Poisson
    dispersion: dict[float, float]  #: window, seconds -> variance over mean of its counts


def burstiness(times: Iterable[float], windows_s: Sequence[float] = (1, 10, 60)) -> Burstiness:
    """Measure arrivals. Streams: memory is one number per window, O(1) time per arrival.

    Args:
        times: Instants from 0 on, seconds, never falling, at least three.
        windows_s: Windows to count in, seconds, > 0; the last, incomplete one is dropped. ``nan``
            where fewer than two are complete.

    Raises:
        ConfigError: If there are too few instants, or they fall.
    """
    for window in windows_s:
        positive(window_s=window)
    iterator = iter(times)
    counts = [np.zeros(0, np.int64) for _ in windows_s]
    number, last = 0, 0.0
    first: float | None = None
    squares = 0.0
    while len(chunk := np.fromiter(itertools.islice(iterator, _MOST_SLICE), np.float64)):
        before = chunk[0] if first is None else last
        if first is None:
            first = float(chunk[0])
        gaps = np.diff(chunk, prepend=before)
        if not (gaps.min() >= 0 and first >= 0):
            raise ConfigError("times must be instants >= 0 that never fall")
        squares += float(gaps @ gaps)
        number += len(chunk)
        last = float(chunk[-1])
        for k, window in enumerate(windows_s):
            if last / window > _MOST_WINDOWS:
                raise ConfigError(
                    f"burstiness: {last:.4g} s hold more than {_MOST_WINDOWS:,} windows of "
                    f"{window} s; choose longer windows_s"
                )
            found = np.bincount((chunk // window).astype(np.int64), minlength=len(counts[k]))
            found[: len(counts[k])] += counts[k]
            counts[k] = found
    if number < 3 or first is None or last <= first:
        raise ConfigError(f"burstiness needs at least three instants that differ, got {number}")
    mean = (last - first) / (number - 1)
    cv = math.sqrt(max(0.0, squares / (number - 1) - mean * mean)) / mean
    dispersion = {}
    for window, found in zip(windows_s, counts, strict=True):
        whole_ones = found[: int(last // window)]
        usable = len(whole_ones) >= 2 and whole_ones.any()
        dispersion[window] = (
            float(whole_ones.var(ddof=1) / whole_ones.mean()) if usable else math.nan
        )
    return Burstiness(number, last, number / last, cv, dispersion)


def open_text(path: str | Path) -> IO[str]:
    """Open a text file, unpacking it if its name ends in ``.gz`` or it begins as such a file."""
    try:
        file = Path(path).open("rb")  # noqa: SIM115
        if str(path).endswith(".gz") or file.peek(2).startswith(_GZIP):
            file.close()
            return io.TextIOWrapper(gzip.open(path), encoding="utf-8")
        return io.TextIOWrapper(file, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigError(f"cannot read {path}: {error}") from error


def csv_rows(
    path: str | Path, lines: Iterable[str], header: str
) -> Iterator[tuple[int, list[str]]]:
    """Yield line numbers, from 2 on, and fields; refuse another header or number of fields."""
    number = 0
    width = header.count(",") + 1
    try:
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if number == 1:
                if text.lstrip("\ufeff") != header:
                    raise ConfigError(f"{path}, line 1: the header must be {header!r}: {text!r}")
                continue
            if not text:
                continue
            fields = text.split(",")
            if len(fields) != width:
                raise ConfigError(
                    f"{path}, line {number}: {width} fields ({header}) expected: {text!r}"
                )
            yield number, fields
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"{path}, after line {number}: cannot be read: {error}") from error
    if number == 0:
        raise ConfigError(f"{path}, line 1: the file is empty; the header must be {header!r}")
