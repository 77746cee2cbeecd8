"""The bursty traffic that WAIT was shown on: types of requests, each with arrivals of its own."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from dllm_sched.errors import ConfigError
from dllm_sched.request import Request
from dllm_sched.sim._check import any_seed, instance_of
from dllm_sched.sim.arrivals import MMPP, Arrivals
from dllm_sched.sim.shapes import Work
from dllm_sched.sim.workloads import Workload
from dllm_sched.theory._check import positive, whole
from dllm_sched.theory.wait import TrafficType

__all__ = ["FIGURE_ARRIVALS", "WAIT_TRAFFIC", "TypeArrivals", "TypedLoop"]


@attrs.frozen
class TypeArrivals:
    """One type of requests: when they come, and that they are all alike.

    A request takes ``decode_len + 1`` steps: the first one reads the prompt, each of the others
    gives a block of one token.

    Args:
        name: The ``request_class``.
        arrivals: When.
        prompt_len: Tokens, >= 1.
        decode_len: Tokens generated, >= 1.
    """

    name: str
    arrivals: Arrivals = attrs.field(validator=instance_of(Arrivals))
    prompt_len: int
    decode_len: int

    def __attrs_post_init__(self) -> None:
        whole(prompt_len=self.prompt_len, decode_len=self.decode_len)

    @property
    def work(self) -> Work:
        """What a request needs."""
        length = self.decode_len
        return Work(self.prompt_len, length, 1, length, length + 1, tuple(range(2, length + 2)))

    @property
    def traffic(self) -> TrafficType:
        """The type, at its mean rate, as WAIT's policies take it."""
        return TrafficType(self.arrivals.rate, self.prompt_len, self.decode_len)


def _types(values: Any) -> tuple[TypeArrivals, ...]:
    types = tuple(values)
    if not types or not all(isinstance(each, TypeArrivals) for each in types):
        raise ConfigError(f"types must be TypeArrivals, at least one, got {values!r}")
    if len({each.work for each in types}) < len(types):
        raise ConfigError("types must differ in their lengths: a request is told by them")
    return types


@attrs.frozen
class TypedLoop(Workload):
    """Types of requests that arrive side by side, whether or not the others are finished.

    Pass ``make_request`` to ``simulate``, so that each request is of its class.

    Args:
        types: At least one, no two of the same lengths.
        until_s: Stop before the first arrival at or after this instant.
        seed: >= 0; each type has a random stream of its own.
        max_requests: Stop after so many; None: at ``until_s``, which may be never.
    """

    types: tuple[TypeArrivals, ...] = attrs.field(converter=_types)
    until_s: float = attrs.field(default=math.inf, kw_only=True)
    seed: int = attrs.field(default=0, kw_only=True)
    max_requests: int | None = attrs.field(default=None, kw_only=True)
    _names: dict[Work, str] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        any_seed(self.seed)
        if self.until_s != math.inf:
            positive(until_s=self.until_s)
        if self.max_requests is not None:
            whole(max_requests=self.max_requests)
        names = {each.work: each.name for each in self.types}
        object.__setattr__(self, "_names", names)

    @property
    def traffic(self) -> dict[str, TrafficType]:
        """The types at their mean rates, by class, as WAIT's policies take them."""
        return {each.name: each.traffic for each in self.types}

    def scaled(self, factor: float) -> TypedLoop:
        """Return the same types, all rates multiplied, > 0; the states keep their pace."""
        positive(factor=factor)
        types = [
            attrs.evolve(each, arrivals=each.arrivals.at_rate(factor * each.arrivals.rate))
            for each in self.types
        ]
        return attrs.evolve(self, types=types)

    def make_request(self, request_id: str, work: Work, arrival_s: float) -> Request:
        """Make the request of a work that this workload gave, of its type's class."""
        return Request(
            request_id,
            prompt_len=work.prompt_len,
            max_new_tokens=work.max_new_tokens,
            block_length=work.block_length,
            request_class=self._names[work],
            payload=work,
        )

    def __iter__(self) -> Iterator[tuple[float, Work]]:
        seeds = np.random.SeedSequence(self.seed).spawn(len(self.types))
        streams = [
            zip(each.arrivals.times(seed), itertools.repeat(number), itertools.repeat(each.work))
            for number, (each, seed) in enumerate(zip(self.types, seeds, strict=True))
        ]
        merged = itertools.takewhile(
            lambda arrival: arrival[0] < self.until_s, heapq.merge(*streams)
        )
        return ((at, work) for at, _, work in itertools.islice(merged, self.max_requests))


def _loop(
    rates: list[tuple[float, float]],
    leave: list[tuple[float, float]],
    prompt_len: int,
    decode: list[int],
    until_s: float,
) -> TypedLoop:
    return TypedLoop(
        [
            TypeArrivals(
                f"decode {length}",
                MMPP.two_state(*pair, leave_first=q[0], leave_second=q[1]),
                prompt_len,
                length,
            )
            for pair, q, length in zip(rates, leave, decode, strict=True)
        ],
        until_s=until_s,
    )


_LOW: list[tuple[float, float]] = [(1000, 500), (1000, 200)]
_HIGH: list[tuple[float, float]] = [(5000, 4000), (4000, 3000), (2000, 1000)]
_SHIFTS = {"low_shift": (0.5, 0.3), "high_shift": (1.0, 0.8), "higher_shift": (1.5, 1.3)}

FIGURE_ARRIVALS = MMPP.two_state(50, 120, leave_first=0.2, leave_second=0.6)
"""Of the estimator's figure, over 300 s: 67.5 a second in the mean, set beside a constant 78.25.

Source: bursty WAIT (arXiv 2608.06135), its authors' public repository.
"""

WAIT_TRAFFIC: dict[str, TypedLoop] = {
    "four_types": _loop(
        [(50, 300), (25, 150), (10, 50), (1, 25)],
        [(0.2, 0.2), (0.3, 0.5), (0.3, 0.5), (0.3, 0.5)],
        25,
        [25, 75, 125, 175],
        75.0,
    ),
    "ten_types": _loop(
        [(1000.0 - 100 * n, 100.0 - 10 * n) for n in range(10)],
        [(5.0, 5.0)] * 10,
        100,
        [25, *range(100, 801, 100), 900],
        10.0,
    ),
    **{
        f"low_demand_{shift}": _loop(_LOW, [leave] * 2, 10, [10, 20], 10.0)
        for shift, leave in _SHIFTS.items()
    },
    **{
        f"high_demand_{shift}": _loop(_HIGH, [leave] * 3, 20, [100, 200, 300], 10.0)
        for shift, leave in _SHIFTS.items()
    },
}
"""By name. Requests per second in two states, and how often each state is left, per second.

Source: bursty WAIT (arXiv 2608.06135), its authors' public repository. Ours: that all scenarios but
the four types last 10 s, and the eight lengths of the ten types between 25 and 900.
"""
