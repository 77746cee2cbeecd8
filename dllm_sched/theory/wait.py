"""WAIT: the fluid equilibrium of a batch whose step time grows with its memory, and thresholds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import attrs

from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import not_negative, positive, whole

__all__ = [
    "BookingLimit",
    "FluidEquilibrium",
    "Segment",
    "TrafficType",
    "are_thresholds_stable",
    "booking_limits",
    "fluid_equilibrium",
    "nested_segments",
]


@attrs.frozen
class TrafficType:
    """Requests of one kind.

    For a diffusion LLM a stage is a block (or a denoising step) and memory may be in blocks.

    Args:
        rate: Arrivals per second, > 0.
        prompt_len: Tokens, >= 0.
        decode_len: Decode stages after stage 0, >= 1; each adds one token.
    """

    rate: float
    prompt_len: int
    decode_len: int

    def __attrs_post_init__(self) -> None:
        positive(rate=self.rate)
        whole(0, prompt_len=self.prompt_len)
        whole(decode_len=self.decode_len)

    @property
    def num_stages(self) -> int:
        """Stage 0 and the decode stages."""
        return self.decode_len + 1

    @property
    def token_steps(self) -> float:
        """Tokens held, summed over all stages: ``(l' + 1) (l + l' / 2)``."""
        return self.num_stages * (self.prompt_len + self.decode_len / 2)


class FluidEquilibrium(NamedTuple):
    """Where the fluid model rests. All infinite if it does not."""

    step_s: float  #: seconds of an iteration
    tokens: float  #: KV tokens in the batch
    num_per_stage: tuple[float, ...]  #: requests in each stage, per type


class BookingLimit(NamedTuple):
    """A type's share of the batch."""

    limit: float  #: requests in all its stages together
    per_stage: int  #: requests that start together, and in each stage


class Segment(NamedTuple):
    """Stages that the same types pass through."""

    num_stages: int
    rate: float  #: arrivals per second of the types that reach it
    limit: float  #: its share of the batch, requests
    per_stage: int

    @property
    def num_whole(self) -> int:
        """Whole requests of the share."""
        return int(self.limit)


def _check(types: Sequence[TrafficType]) -> None:
    if not types or not all(isinstance(each, TrafficType) for each in types):
        raise ConfigError(f"types must be a non-empty sequence of TrafficType, got {types!r}")


def _unit(types: Sequence[TrafficType]) -> float:
    """A power of two: rates over it are exact, and no sum of them is beyond every float."""
    return 2.0 ** (math.frexp(max(each.rate for each in types))[1] - 1)


def fluid_equilibrium(
    types: Sequence[TrafficType], *, base_s: float, token_s: float
) -> FluidEquilibrium:
    """Return the rest point of the fluid model, infinite where there is none.

    An iteration takes ``tau = d0 + d1 M`` with M tokens in the batch. At rest ``n_j = rate_j tau``
    requests of type j are in each of its stages, so ``M = tau A`` with ``A = sum of
    rate_j (l'_j + 1)(l_j + l'_j / 2)``, and

        ``tau* = d0 / (1 - d1 A)``,  ``M* = d0 A / (1 - d1 A)``,  stable iff ``d1 A < 1``

    and the memory holds M*. O(types).

    Args:
        types: The traffic, at least one.
        base_s: Seconds of an iteration without tokens, d0, > 0.
        token_s: Seconds per token in the batch, d1, >= 0.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation from the linear iteration time stated in the WAIT paper (arXiv 2504.11320);
        not checked against its text.
    """
    _check(types)
    positive(base_s=base_s)
    not_negative(token_s=token_s)
    demand = math.fsum(each.rate * each.token_steps for each in types)
    if token_s * demand >= 1:
        return FluidEquilibrium(math.inf, math.inf, (math.inf,) * len(types))
    step_s = base_s / (1 - token_s * demand)
    return FluidEquilibrium(step_s, step_s * demand, tuple(each.rate * step_s for each in types))


def are_thresholds_stable(
    types: Sequence[TrafficType],
    thresholds: Sequence[float],
    *,
    base_s: float,
    token_s: float,
    capacity: float = math.inf,
) -> bool:
    """Whether WAIT's thresholds keep up with the traffic and fit the memory. O(types).

    With ``n_j`` requests of type j in each stage the batch holds ``M = sum of
    n_j (l'_j + 1)(l_j + l'_j / 2)`` tokens; needed are ``M <= capacity`` and, for all j,
    ``d0 + d1 M <= n_j / rate_j``: an iteration is over before the next ``n_j`` have arrived.

    Args:
        types: The traffic, at least one.
        thresholds: Requests of each type that start together, > 0.
        base_s: Seconds of an iteration without tokens, d0, > 0.
        token_s: Seconds per token in the batch, d1, >= 0.
        capacity: Tokens the memory holds, > 0, may be ``inf``.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        As ``fluid_equilibrium``.
    """
    _check(types)
    positive(base_s=base_s)
    not_negative(token_s=token_s)
    if capacity != math.inf:
        positive(capacity=capacity)
    if len(thresholds) != len(types):
        raise ConfigError(f"thresholds: {len(types)} types need as many, got {len(thresholds)}")
    for threshold in thresholds:
        positive(threshold=threshold)
    pairs = list(zip(types, thresholds, strict=True))
    tokens = math.fsum(n * each.token_steps for each, n in pairs)
    step_s = base_s + token_s * tokens
    return tokens <= capacity and all(step_s <= n / each.rate for each, n in pairs)


def booking_limits(types: Sequence[TrafficType], total: int) -> tuple[BookingLimit, ...]:
    """Return how WAIT divides a batch between types. O(types).

    ``limit_j = N rate_j s_j / sum of rate_k s_k`` with ``s = l' + 1`` stages;
    ``n_j = int(max(limit_j / s_j, 1))``.

    Args:
        types: The traffic, at least one.
        total: Requests in a batch, N, >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        WAIT (arXiv 2504.11320), as implemented in its authors' public repository.
    """
    _check(types)
    whole(total=total)
    unit = _unit(types)
    work = math.fsum(each.rate / unit * each.num_stages for each in types)
    limits = [total * (each.rate / unit) * each.num_stages / work for each in types]
    return tuple(
        BookingLimit(limit, int(max(limit / each.num_stages, 1)))
        for each, limit in zip(types, limits, strict=True)
    )


def nested_segments(types: Sequence[TrafficType], total: int) -> tuple[Segment, ...]:
    """Return Nested WAIT's segments: how a batch is divided when lengths are unknown.

    Distinct decode lengths ``0 = d_0 < d_1 < ...``; segment i has ``c_i = d_i - d_(i-1)`` stages
    and the rate ``r_i`` of the types with a longer decode than ``d_(i-1)``; its share is
    ``N c_i r_i / sum of c r``, and ``ceil(share / c_i)`` requests per stage. O(types^2).

    Args:
        types: The traffic, at least one.
        total: Requests in a batch, N, >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Nested WAIT (arXiv 2504.11320), as implemented in its authors' public repository; the
        paper's safety buffer is not in that code, nor here.
    """
    _check(types)
    whole(total=total)
    ends = [0, *sorted({each.decode_len for each in types})]
    unit = _unit(types)
    parts = [
        (end - start, math.fsum(each.rate / unit for each in types if each.decode_len > start))
        for start, end in itertools.pairwise(ends)
    ]
    work = math.fsum(count * rate for count, rate in parts)
    shares = [total * count * rate / work for count, rate in parts]
    return tuple(
        Segment(count, rate * unit, share, math.ceil(share / count))
        for (count, rate), share in zip(parts, shares, strict=True)
    )
