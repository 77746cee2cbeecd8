"""Exclusive batching: how many free slots to collect before one batch of prefills runs alone.

For a diffusion LLM "refresh or reuse" is the same question: how many refreshes to collect before
one exclusive refresh step.
"""

from __future__ import annotations

import math

from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import fraction, is_number, not_negative, positive, whole

__all__ = ["empty_slots", "hazard_correction", "is_mixed_better", "safe_slots", "threshold"]

_STEEPEST = 8e15  # of the threshold's equation; beyond it the root is 1 to the last bit


def threshold(*, hazard: float, prefill_base_s: float, decode_base_s: float) -> float:
    """Return the share of empty slots at which to prefill, theta0, in (0, 1).

    The root of ``theta / (1 - theta) + ln(1 - theta) = p0 alpha_p / alpha_d``; with
    ``zeta = -ln(1 - theta)`` this is ``e^zeta - 1 - zeta``, found by bisection.

    Args:
        hazard: Probability that a row finishes in a step, p0, in (0, 1).
        prefill_base_s: Fixed cost of a prefill iteration, alpha_p, seconds, > 0.
        decode_base_s: Fixed cost of a decode iteration, alpha_d, in the same unit, > 0.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        "Threshold-Based Exclusive Batching" (arXiv 2606.00516), seen second hand.
    """
    fraction(hazard=hazard)
    positive(prefill_base_s=prefill_base_s, decode_base_s=decode_base_s)
    target = min(hazard * prefill_base_s / decode_base_s, _STEEPEST)

    def excess(zeta: float) -> float:
        if zeta < 1e-3:  # where the difference would cancel
            return zeta * zeta * (1 / 2 + zeta * (1 / 6 + zeta * (1 / 24 + zeta / 120)))
        return math.expm1(zeta) - zeta

    low, high = 0.0, 1.0
    while excess(high) < target:
        low, high = high, high * 2.0
    while (middle := (low + high) / 2.0) not in (low, high):
        if excess(middle) < target:
            low = middle
        else:
            high = middle
    return -math.expm1(-high)


def hazard_correction(
    theta: float,
    *,
    hazard: float,
    hazard_slope: float,
    num_slots: int,
    decode_base_s: float,
    decode_token_s: float,
) -> float:
    """Return the first-order change of the threshold when the hazard is ``p0 + eta t``. O(1).

    ``eta (1 - theta)^2 / (p0^2 theta) * [zeta (theta / (1 - theta) - zeta / 2)
    + (beta_d N / alpha_d) (zeta - theta)]``, ``zeta = -ln(1 - theta)``, t steps since the decode
    phase began. The error is of second order in eta.

    Args:
        theta: The threshold at constant hazard, in (0, 1).
        hazard: p0, per step, in (0, 1).
        hazard_slope: eta, per step squared, finite.
        num_slots: N, >= 1.
        decode_base_s: Fixed cost of a decode iteration, alpha_d, seconds, > 0.
        decode_token_s: Cost per active row of a decode iteration, beta_d, same unit, >= 0.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        "Threshold-Based Exclusive Batching" (arXiv 2606.00516), seen second hand; agrees with the
        numerical optimum.
    """
    fraction(theta=theta, hazard=hazard)
    whole(num_slots=num_slots)
    positive(decode_base_s=decode_base_s)
    not_negative(decode_token_s=decode_token_s)
    if not is_number(hazard_slope) or not math.isfinite(hazard_slope):
        raise ConfigError(f"hazard_slope must be a finite number, got {hazard_slope!r}")
    zeta = -math.log1p(-theta)
    per_slope = (1 - theta) ** 2 / (hazard**2 * theta)
    base = zeta * (theta / (1 - theta) - zeta / 2)
    tokens = decode_token_s * num_slots / decode_base_s * (zeta - theta)
    return hazard_slope * per_slope * (base + tokens)


def empty_slots(theta: float, num_slots: int) -> int:
    """Return k*, the empty slots at which to prefill: ``floor(theta N)``, at least 1. O(1).

    Args:
        theta: Threshold, in (0, 1).
        num_slots: N, >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        "Threshold-Based Exclusive Batching" (arXiv 2606.00516), seen second hand; at least 1 is
        our own: a threshold of no slot would prefill nothing for ever.
    """
    fraction(theta=theta)
    whole(num_slots=num_slots)
    return max(1, math.floor(theta * num_slots))


def safe_slots(
    theta: float, *, memory_tokens: float, mean_prompt: float, hazard: float, risk: float
) -> int:
    """Return N*, the number of slots that the memory carries; 0 if it carries none. O(1).

    ``floor((C - ln(1/eps) / (p0^2 mu_L)) / (mu_L + zeta (1 - theta) / (theta p0)))`` with
    ``zeta = -ln(1 - theta)``.

    Do not read ``risk`` as a bound on how often the memory overflows: by our simulation of the
    example (0.01, 100 tokens, 0.5, 1e5 tokens, 0.01: 587 slots) 44 % of cycles exceed C.

    Args:
        theta: Threshold, in (0, 1).
        memory_tokens: C, tokens, > 0.
        mean_prompt: mu_L, tokens, > 0.
        hazard: p0, per step, in (0, 1).
        risk: eps, in (0, 1).

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        "Threshold-Based Exclusive Batching" (arXiv 2606.00516), seen second hand.
    """
    fraction(theta=theta, hazard=hazard, risk=risk)
    positive(memory_tokens=memory_tokens, mean_prompt=mean_prompt)
    reserve = math.log(1 / risk) / (hazard**2 * mean_prompt)
    per_slot = mean_prompt - (1 - theta) / (theta * hazard) * math.log1p(-theta)
    return max(0, math.floor((memory_tokens - reserve) / per_slot))


def is_mixed_better(
    theta: float,
    *,
    num_slots: int,
    num_empty: int,
    mean_prompt: float,
    mean_output: float,
    prefill_base_s: float,
    decode_base_s: float,
    mixed_base_s: float,
    mixed_token_s: float,
    exclusive_token_s: float,
) -> bool:
    """Whether mixed batches beat exclusive ones. O(1).

    True iff ``beta_MB - beta_EB < [(alpha_p + alpha_d zeta mu_O) / k0
    - alpha_MB (1 + mu_O) / N] / (mu_L + mu_O)``, ``zeta = -ln(1 - theta)``.

    Args:
        theta: Threshold of the exclusive scheme, in (0, 1).
        num_slots: N, >= 1.
        num_empty: Slots that it refills at once, k0, >= 1.
        mean_prompt: mu_L, tokens, > 0.
        mean_output: mu_O, tokens, > 0.
        prefill_base_s: Fixed cost of an exclusive prefill iteration, alpha_p, seconds, >= 0.
        decode_base_s: Fixed cost of an exclusive decode iteration, alpha_d, seconds, >= 0.
        mixed_base_s: Fixed cost of a mixed iteration, alpha_MB, seconds, >= 0.
        mixed_token_s: Cost per token of a mixed iteration, beta_MB, seconds, >= 0.
        exclusive_token_s: Cost per token of an exclusive iteration, beta_EB, seconds, >= 0.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        "Threshold-Based Exclusive Batching" (arXiv 2606.00516), seen second hand.
    """
    fraction(theta=theta)
    whole(num_slots=num_slots, num_empty=num_empty)
    positive(mean_prompt=mean_prompt, mean_output=mean_output)
    not_negative(
        prefill_base_s=prefill_base_s,
        decode_base_s=decode_base_s,
        mixed_base_s=mixed_base_s,
        mixed_token_s=mixed_token_s,
        exclusive_token_s=exclusive_token_s,
    )
    zeta = -math.log1p(-theta)
    exclusive = (prefill_base_s + decode_base_s * zeta * mean_output) / num_empty
    mixed = mixed_base_s * (1 + mean_output) / num_slots
    return mixed_token_s - exclusive_token_s < (exclusive - mixed) / (mean_prompt + mean_output)
