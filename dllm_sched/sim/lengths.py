"""Distributions of whole numbers: prompt lengths, output lengths, blocks, steps. All bounded."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import histogram, positive, whole

__all__ = ["Fixed", "Geometric", "Histogram", "Lengths", "LogNormal", "Pareto", "Uniform"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_LARGEST = 10_000_000  # pmf() writes one number per value


class Lengths(ABC):
    """A distribution over whole numbers >= 1. A value object: the generator is the caller's."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Return ``count`` independent draws, int64 ``[count]``. O(count)."""

    @abstractmethod
    def pmf(self) -> tuple[Ints, Floats]:
        """Return the possible values, ascending, and their probabilities. O(values)."""

    @property
    def mean(self) -> float:
        """The exact mean. O(values)."""
        values, probabilities = self.pmf()
        return float(values @ probabilities)

    @property
    def cv(self) -> float:
        """Standard deviation over mean, exact. O(values)."""
        values, probabilities = self.pmf()
        mean = float(values @ probabilities)
        return math.sqrt(float((values - mean) ** 2 @ probabilities)) / mean


@attrs.frozen
class Fixed(Lengths):
    """Always the same.

    Args:
        value: >= 1.
    """

    value: int

    def __attrs_post_init__(self) -> None:
        whole(value=self.value)

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Return the value ``count`` times; the generator is not used."""
        return np.full(count, self.value)

    def pmf(self) -> tuple[Ints, Floats]:
        """Return the one value."""
        return np.array([self.value]), np.ones(1)


@attrs.frozen
class Uniform(Lengths):
    """Every value between two bounds, both included.

    Args:
        low: >= 1.
        high: >= low, at most 10 million.
    """

    low: int
    high: int

    def __attrs_post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Return ``count`` draws."""
        return rng.integers(self.low, self.high, count, endpoint=True)

    def pmf(self) -> tuple[Ints, Floats]:
        """Return the values and equal probabilities."""
        values = np.arange(self.low, self.high + 1)
        return values, np.full(len(values), 1.0 / len(values))


def _pairs(weights: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    return histogram("weights", weights)


@attrs.frozen
class Histogram(Lengths):
    """Drawn by weight.

    Args:
        weights: Value (int >= 1) -> weight (>= 0, need not sum to 1).
    """

    weights: tuple[tuple[int, float], ...] = attrs.field(converter=_pairs)
    _tables: tuple[Ints, Floats, Floats] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        values = np.array([value for value, _ in self.weights])
        probabilities = np.array([p for _, p in self.weights])
        # The last edge is left out: a draw beyond all others is the last value.
        edges = np.cumsum(probabilities)[:-1]
        object.__setattr__(self, "_tables", (values, probabilities, edges))

    @classmethod
    def of(cls, values: Iterable[int]) -> Histogram:
        """Return the empirical distribution of a log: each value as often as it occurs."""
        return cls(Counter(values))

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Return ``count`` draws, O(log values) each."""
        values, _, edges = self._tables
        return values[np.searchsorted(edges, rng.random(count), side="right")]

    def pmf(self) -> tuple[Ints, Floats]:
        """Return the values and their probabilities."""
        return self._tables[0], self._tables[1]


def _check_bounds(low: int, high: int) -> None:
    whole(low=low, high=high)
    if not low <= high <= _LARGEST:
        raise ConfigError(f"high must lie between low = {low} and {_LARGEST}, got {high!r}")


class _Clipped(Lengths):
    """A number Y > 0 rounded up to a whole one, and cut to ``low .. high``, as a server cuts."""

    low: int
    high: int

    @abstractmethod
    def _sample(self, rng: np.random.Generator, count: int) -> Floats:
        """Draw Y; ``inf`` is fine."""

    @abstractmethod
    def _above(self, values: Floats) -> Floats:
        """P(Y > value)."""

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Return ``count`` draws."""
        bounded = np.clip(self._sample(rng, count), self.low, self.high)
        return np.ceil(bounded).astype(np.int64)

    def pmf(self) -> tuple[Ints, Floats]:
        """Return every value between the bounds and its probability, the cut mass at the ends."""
        values = np.arange(self.low, self.high + 1)
        above = self._above(values[:-1].astype(np.float64))
        edges = np.concatenate(([1.0], above, [0.0]))
        return values, edges[:-1] - edges[1:]


@attrs.frozen
class Geometric(_Clipped):
    """The same chance to end at every count.

    Args:
        average: Mean before it is cut, >= 1; the chance to end is its inverse.
        high: Larger draws are cut to it, >= 1, at most 10 million.
    """

    average: float
    high: int
    low: int = attrs.field(default=1, init=False)

    def __attrs_post_init__(self) -> None:
        positive(average=self.average)
        if self.average < 1:
            raise ConfigError(f"average must be >= 1, got {self.average!r}")
        _check_bounds(1, self.high)

    def _sample(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.geometric(1.0 / self.average, count).astype(np.float64)

    def _above(self, values: Floats) -> Floats:
        return (1.0 - 1.0 / self.average) ** values


@attrs.frozen
class LogNormal(_Clipped):
    """The usual shape of prompt and output lengths.

    Args:
        median: Of the number before it is rounded up and cut, > 0.
        sigma: Standard deviation of its logarithm, > 0; 1 is typical, 2 is wild.
        high: Larger draws are cut to it, at most 10 million.
        low: Smaller ones to this, >= 1.
    """

    median: float
    sigma: float
    high: int
    low: int = 1

    def __attrs_post_init__(self) -> None:
        positive(median=self.median, sigma=self.sigma)
        _check_bounds(self.low, self.high)

    def _sample(self, rng: np.random.Generator, count: int) -> Floats:
        return rng.lognormal(math.log(self.median), self.sigma, count)

    def _above(self, values: Floats) -> Floats:
        scaled = np.log(values / self.median) / (self.sigma * math.sqrt(2.0))
        return np.array([0.5 * math.erfc(each) for each in scaled.tolist()])


@attrs.frozen
class Pareto(_Clipped):
    """A power tail: ``P(Y > y) = (low / y)^exponent``.

    Args:
        exponent: > 0; at most 2 the variance, at most 1 the mean is the bound's doing.
        low: Least value, >= 1.
        high: Larger draws are cut to it, >= low, at most 10 million.
    """

    exponent: float
    low: int
    high: int

    def __attrs_post_init__(self) -> None:
        positive(exponent=self.exponent)
        _check_bounds(self.low, self.high)

    def _sample(self, rng: np.random.Generator, count: int) -> Floats:
        with np.errstate(over="ignore"):
            return self.low * (1.0 - rng.random(count)) ** (-1.0 / self.exponent)

    def _above(self, values: Floats) -> Floats:
        return (self.low / values) ** self.exponent
