"""Service-induced congestion: memory that grows while a request is served can lock into a cycle.

A request with an input of s holds ``s + j + 1`` units of memory at age j, of which there are as
many as its length. The unit is a token for an autoregressive model; for block-wise diffusion it is
a block, which takes about 29 steps. Saturated input: every step refills what memory is left.

Source of everything here, unless a docstring says otherwise: own derivation. "Service-Induced
Congestion" (arXiv 2606.15555) states the effect, the loss of up to one half, and rate-limited
admission and mixing of requests as the remedies; its equations were not available.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import histogram, not_negative, positive, whole

__all__ = [
    "FluidRun",
    "equilibrium_rate",
    "is_surely_stable",
    "polynomial",
    "simulate",
    "spectral_radius",
    "survival",
    "worst_cycle_ratio",
]


def survival(lengths: Mapping[int, float]) -> tuple[float, ...]:
    """Return ``S(j) = P(length > j)`` for ``j = 0 .. longest - 1``. O(longest).

    Args:
        lengths: Length (int >= 1) -> weight (>= 0, need not sum to 1).

    Raises:
        ConfigError: If the histogram is empty or has a bad value or weight.

    Source:
        Textbook.
    """
    pairs = dict(histogram("lengths", lengths))
    longest = max(pairs)
    above, out = 0.0, []
    for j in range(longest - 1, -1, -1):
        above += pairs.get(j + 1, 0.0)
        out.append(above)
    out[-1] = 1.0  # free of rounding
    return tuple(reversed(out))


def polynomial(lengths: Mapping[int, float], input_size: float) -> tuple[float, ...]:
    """Return the coefficients of ``P(z) = sum of S(j) (s + j + 1) z^(J-1-j)``, highest first.

    Small deviations of admissions from the equilibrium follow this recursion: it is locally stable
    iff all roots lie inside the unit disk. O(longest).

    Args:
        lengths: Length (int >= 1) -> weight; J is the longest.
        input_size: s, >= 0, in the unit of the lengths.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    not_negative(input_size=input_size)
    return tuple(p * (input_size + j + 1) for j, p in enumerate(survival(lengths)))


def equilibrium_rate(lengths: Mapping[int, float], input_size: float, memory: float) -> float:
    """Return n*, the admissions per step at which memory is full and nothing is evicted.

    ``n* = M / sum of S(j) (s + j + 1)``; ``M / (L (s + (L + 1) / 2))`` for one length L. Also the
    rate cap that keeps admission stable. O(longest).

    Args:
        lengths: Length (int >= 1) -> weight.
        input_size: s, >= 0, in the unit of the lengths.
        memory: M, > 0, in that unit.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    positive(memory=memory)
    return memory / math.fsum(polynomial(lengths, input_size))


def worst_cycle_ratio(length: int, input_size: float) -> float:
    """Return throughput over n* when all requests run as one synchronised cohort. O(1).

    ``M / (s + L)`` requests every L steps: ``(s + (L + 1) / 2) / (s + L)``, one half for long
    outputs after short inputs.

    Args:
        length: L, the one length of all requests, >= 1.
        input_size: s, >= 0, in the unit of the length.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation; the "50 %" of arXiv 2606.15555 is its limit.
    """
    whole(length=length)
    not_negative(input_size=input_size)
    return (input_size + (length + 1) / 2) / (input_size + length)


def is_surely_stable(lengths: Mapping[int, float], input_size: float) -> bool:
    """Whether the sufficient condition for local stability holds. O(longest).

    ``S(j) (s + j + 1)`` falls strictly in j (Enestrom-Kakeya): at every age the share that finishes
    exceeds the relative growth of the others. Never true of a single length above 1, whose
    equilibrium is unstable; false does not mean unstable.

    Args:
        lengths: Length (int >= 1) -> weight.
        input_size: s, >= 0, in the unit of the lengths.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    terms = polynomial(lengths, input_size)
    return all(after < before for before, after in itertools.pairwise(terms))


def spectral_radius(lengths: Mapping[int, float], input_size: float) -> float:
    """Return the largest modulus of a root of ``polynomial``; below 1 = locally stable.

    Growth of a small deviation per step. 0 if all lengths are 1. Imports numpy; the eigenvalues of
    a companion matrix, O(longest^3).

    Args:
        lengths: Length (int >= 1) -> weight.
        input_size: s, >= 0, in the unit of the lengths.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    import numpy as np  # noqa: PLC0415

    roots = np.roots(polynomial(lengths, input_size))
    return float(np.abs(roots).max(initial=0.0))


class FluidRun(NamedTuple):
    """What ``simulate`` measured after its warm-up."""

    throughput_ratio: float  #: completions per step over n*
    evicted_ratio: float  #: evictions per step over n*
    peak_memory: float  #: largest memory after a step, in units of M
    cohort_share: float  #: mean share of the requests inside that the largest age class holds


def simulate(
    lengths: Mapping[int, float],
    input_size: float,
    *,
    start: Literal["cold", "perturbed"] = "cold",
    rate_cap: bool = False,
    reserve: Literal["nothing", "peak", "projected"] = "nothing",
    warm_up: int = 10_000,
    steps: int = 10_000,
) -> FluidRun:
    """Run the fluid recursion: masses, not whole requests, so its scale does not matter.

    Each step: ages advance, and what has reached its length leaves; if memory exceeds M, evict from
    the youngest class upward to exactly M, across types in proportion (progress is lost); then
    admit what fits, split by the mix. As every cohort keeps its own mix, one number per age is the
    whole state. Imports numpy; O((warm_up + steps) * longest), with
    ``projected`` times longest again.

    Args:
        lengths: Length (int >= 1) -> weight.
        input_size: s, >= 0, in the unit of the lengths.
        start: ``cold``: empty; ``perturbed``: the equilibrium with its newest class 0.1 % larger.
        rate_cap: Admit at most n* a step.
        reserve: Admit only what still fits later: ``peak``, when everybody inside has grown to
            ``s + longest`` at once; ``projected``, at every coming step if nobody else came. The
            former never fills the memory, so even with the rate cap it keeps the worst cycle's
            throughput; the latter with the cap gives all of it.
        warm_up: Steps that are not measured, >= 0.
        steps: Steps that are, >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Own derivation.
    """
    import numpy as np  # noqa: PLC0415

    if reserve not in ("nothing", "peak", "projected"):
        raise ConfigError(f"reserve must be 'nothing', 'peak' or 'projected', got {reserve!r}")
    whole(0, warm_up=warm_up)
    whole(steps=steps)
    if start not in ("cold", "perturbed"):
        raise ConfigError(f"start must be 'cold' or 'perturbed', got {start!r}")
    alive = np.array(survival(lengths))
    held = np.array(polynomial(lengths, input_size))  # by a cohort admitted with mass 1
    leaving = alive - np.append(alive[1:], 0.0)
    cap = 1.0 / float(held.sum())  # n* for M = 1
    peak = input_size + len(alive)
    # admitted[j]: what was admitted j steps ago and not evicted, counted as when it came.
    admitted = np.zeros(len(alive))
    if start == "perturbed":
        admitted[:] = cap
        admitted[0] *= 1.001
    completed = evicted = top = shares = 0.0
    for step in range(-warm_up, steps):
        done = float(admitted @ leaving)
        admitted[1:] = admitted[:-1]
        admitted[0] = 0.0
        memory = float(admitted @ held)
        lost = 0.0
        age = 1
        while memory > 1.0 and age < len(alive):
            mass = admitted[age]
            if mass:
                drop = min(mass, (memory - 1.0) / held[age])
                admitted[age] -= drop
                lost += float(drop * alive[age])
                memory = 1.0 if drop < mass else float(admitted @ held)
            age += 1
        room = (1.0 - memory) / held[0]
        if reserve == "peak":
            room = min(room, 1.0 / peak - float(admitted @ alive))
        elif reserve == "projected":
            coming = np.correlate(held, admitted, "full")[len(alive) - 1 :]
            room = float(((1.0 - coming) / held).min())
        admitted[0] = max(0.0, min(room, cap) if rate_cap else room)
        if step >= 0:
            completed += done
            evicted += lost
            top = max(top, float(admitted @ held))
            classes = admitted * alive
            shares += float(classes.max() / classes.sum())
    return FluidRun(completed / steps / cap, evicted / steps / cap, top, shares / steps)
