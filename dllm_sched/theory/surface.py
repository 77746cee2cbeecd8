"""The denoising surface: what a request will cost, block by block and step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import attrs

from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import is_number, not_negative, positive, whole

__all__ = ["Marginals", "StepCosts", "Surface", "aged_work", "log_key"]

_TOLERANCE = 1e-3
_ROUNDING = 1e-5  # predictions come from single precision


def _row(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(values)


def _rows(values: Iterable[Iterable[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in values)


@attrs.frozen
class Marginals:
    """What is left of a surface when its blocks are summed up; some predictors give only this.

    Args:
        steps: Expected blocks that execute denoising step 1, 2, ...; >= 0, never rising: whoever
            takes a step has taken the one before.
        blocks: Expected number of output blocks, >= 0; the same as ``steps[0]``, since every
            block takes its first step.

    Raises:
        ConfigError: If ``steps`` rises, or its first entry is further from ``blocks`` than a
            thousandth of them (of 1 if they are fewer).

    Source:
        "DWS / Denoising Surface" (arXiv 2610.00499), as its authors' public code checks it.
    """

    steps: tuple[float, ...] = attrs.field(converter=_row)
    blocks: float

    def __attrs_post_init__(self) -> None:
        not_negative(blocks=self.blocks)
        for number, value in enumerate(self.steps, 1):
            not_negative(**{f"the marginal of step {number}": value})
        for number, value in enumerate(self.steps[1:], 2):
            before = self.steps[number - 2]
            if value > before + _ROUNDING * max(1.0, math.fsum(self.steps)):
                raise ConfigError(
                    f"the marginals rise from {before!r} at step {number - 1} to {value!r}: more "
                    "blocks cannot take a step than took the one before"
                )
        first = self.steps[0] if self.steps else 0.0
        if abs(first - self.blocks) > _TOLERANCE * max(self.blocks, 1.0):
            raise ConfigError(
                f"every block takes step 1: {first!r} expected there, but {self.blocks!r} blocks"
            )

    @property
    def curve(self) -> tuple[float, ...]:
        """The workload curve: expected block-steps of number s or lower, for each s. O(steps)."""
        return tuple(math.fsum(self.steps[: end + 1]) for end in range(len(self.steps)))

    def cost_ms(self, prompt_len: int, costs: StepCosts, step_ms: Sequence[float]) -> float:
        """Return the cost without a surface, milliseconds: ``sum of steps[s] * step_ms[s]``.

        With the prefill and refresh terms of ``StepCosts``. O(steps).

        Args:
            prompt_len: Tokens, >= 1.
            costs: The machine.
            step_ms: Cost of step 1, 2, ... of a block, at least as many as there are marginals.
        """
        if len(step_ms) < len(self.steps):
            raise ConfigError(f"{len(self.steps)} marginals, but step_ms has {len(step_ms)}")
        steps = math.fsum(n * ms for n, ms in zip(self.steps, step_ms, strict=False))
        return costs.prefill_ms(prompt_len) + self.blocks * costs.refresh_block_ms + steps


@attrs.frozen
class Surface:
    """``probabilities[j][s]``: that output block j executes its denoising step s, both from 0.

    Args:
        probabilities: One row per block, each between 0 and 1; shorter rows end in zeros.

    Raises:
        ConfigError: If it is empty, an entry is no probability, or the marginals rise.

    Source:
        "DWS / Denoising Surface" (arXiv 2610.00499).

    >>> surface = Surface([[1, 0.5], [0.6, 0.3]])
    >>> surface.marginals.steps, surface.marginals.blocks
    ((1.6, 0.8), 1.6)
    >>> machine = StepCosts(prefill_block_ms=2, refresh_block_ms=3, step_ms=1)
    >>> round(surface.cost_ms(70, machine), 9)
    11.2
    """

    probabilities: tuple[tuple[float, ...], ...] = attrs.field(converter=_rows)
    marginals: Marginals = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        width = max((len(row) for row in self.probabilities), default=0)
        if not width:
            raise ConfigError("a surface needs at least one block of at least one step")
        for block, row in enumerate(self.probabilities):
            for step, value in enumerate(row):
                if not is_number(value) or not 0 <= value <= 1:
                    raise ConfigError(
                        f"probabilities[{block}][{step}] must lie between 0 and 1, got {value!r}"
                    )
        steps = tuple(
            math.fsum(row[step] for row in self.probabilities if step < len(row))
            for step in range(width)
        )
        blocks = math.fsum(row[0] for row in self.probabilities if row)
        object.__setattr__(self, "marginals", Marginals(steps, blocks))

    def cost_ms(self, prompt_len: int, costs: StepCosts, *, prefilled: bool = False) -> float:
        """Return what the request costs, milliseconds. O(blocks * steps).

        ``floor(prompt / L) * alpha + E[blocks] * beta + sum of Q * K`` with
        ``K = g * W + delta * (floor(prompt / L) - mean)``.

        Args:
            prompt_len: Tokens, >= 1.
            costs: The machine: L, alpha, beta, and what K is made of.
            prefilled: Without the first term: how requests that are ready to decode are ranked.
        """
        shift = costs.context_ms * (costs.prompt_blocks(prompt_len) - costs.mean_prompt_blocks)
        denoising = math.fsum(
            value * (costs.step_ms * costs.weight(block, step) + shift)
            for block, row in enumerate(self.probabilities)
            for step, value in enumerate(row)
        )
        refresh = self.marginals.blocks * costs.refresh_block_ms
        return (0.0 if prefilled else costs.prefill_ms(prompt_len)) + refresh + denoising


@attrs.frozen(kw_only=True)
class StepCosts:
    """What the parts of a request cost on one machine.

    Args:
        prefill_block_ms: Per block of the prompt, milliseconds, >= 0; alpha.
        refresh_block_ms: Per output block, milliseconds, > 0; beta, the unit of normalised work.
        step_ms: Per denoising step of a block in the mean, milliseconds, >= 0; g.
        shape: Relative cost of step s of block j, W; its mean over what was measured is 1. Beyond
            its edges the last entry counts. Empty: flat.
        context_ms: More per step for each prompt block above the mean, milliseconds; delta.
        mean_prompt_blocks: The mean of the prompts that were measured, blocks, >= 0.
        block_length: L, tokens, >= 1.

    Source:
        "DWS / Denoising Surface" (arXiv 2610.00499).
    """

    prefill_block_ms: float
    refresh_block_ms: float
    step_ms: float
    shape: tuple[tuple[float, ...], ...] = attrs.field(default=(), converter=_rows)
    context_ms: float = 0.0
    mean_prompt_blocks: float = 0.0
    block_length: int = 32

    def __attrs_post_init__(self) -> None:
        not_negative(
            prefill_block_ms=self.prefill_block_ms,
            step_ms=self.step_ms,
            mean_prompt_blocks=self.mean_prompt_blocks,
        )
        positive(refresh_block_ms=self.refresh_block_ms)
        if not is_number(self.context_ms) or not math.isfinite(self.context_ms):
            raise ConfigError(f"context_ms must be a finite number, got {self.context_ms!r}")
        whole(block_length=self.block_length)
        for row in self.shape:
            if not row:
                raise ConfigError("a row of shape needs at least one step")
            for value in row:
                not_negative(**{"an entry of shape": value})

    def prompt_blocks(self, prompt_len: int) -> int:
        """Return the whole blocks of a prompt. O(1)."""
        whole(prompt_len=prompt_len)
        return prompt_len // self.block_length

    def prefill_ms(self, prompt_len: int) -> float:
        """Return what the prompt costs, milliseconds. O(1)."""
        return self.prompt_blocks(prompt_len) * self.prefill_block_ms

    def weight(self, block: int, step: int) -> float:
        """Return W of a block and step, both from 0. O(1)."""
        if not self.shape:
            return 1.0
        row = self.shape[min(block, len(self.shape) - 1)]
        return row[min(step, len(row) - 1)]

    def work(self, cost_ms: float) -> float:
        """Return a cost in refreshes: the normalised work that requests are ranked by. O(1)."""
        return cost_ms / self.refresh_block_ms


def _check_ageing(work: float, rate: float, period_s: float) -> None:
    positive(work=work, period_s=period_s)
    if not is_number(rate) or not 0 <= rate < 1:
        raise ConfigError(f"rate must be >= 0 and < 1, got {rate!r}")


def aged_work(work: float, waited_s: float, *, rate: float = 0.1, period_s: float = 30.0) -> float:
    """Return the work that a waiting request is ranked by: less, the longer it waits. O(1).

    ``work * (1 - rate)^floor(waited / period)``, the published rule.

    Args:
        work: Any unit, > 0.
        waited_s: Seconds since arrival, >= 0.
        rate: Share taken off per period, >= 0 and < 1; 0: no ageing.
        period_s: Seconds, > 0.

    Source:
        "DWS / Denoising Surface" (arXiv 2610.00499).

    >>> round(aged_work(100, 95), 9)
    72.9
    """
    _check_ageing(work, rate, period_s)
    not_negative(waited_s=waited_s)
    return work * (1.0 - rate) ** math.floor(waited_s / period_s)


def log_key(work: float, arrived_at: float, *, rate: float = 0.1, period_s: float = 30.0) -> float:
    """Return a key that orders requests by aged work and never changes while they wait. O(1).

    ``log(work) + |log(1 - rate)| * arrived / period``. With a = |log(1 - rate)|, the logarithm of
    ``aged_work`` at time t is ``key - a * t / period + a * f``, where f in [0, 1) is the part that
    the floor cuts off ``(t - arrived) / period``. The middle term is common to all, so if one
    request is before another by its key, its aged work is less than ``1 / (1 - rate)`` times the
    other's: never further from the published order than a single period's ageing. Without the
    floor the two orders are the same.

    Args:
        work: Any unit, > 0.
        arrived_at: Seconds, any origin.
        rate: As of ``aged_work``.
        period_s: As of ``aged_work``.

    Source:
        Own derivation from the rule of arXiv 2610.00499, so that a queue stays O(log n).
    """
    _check_ageing(work, rate, period_s)
    if not is_number(arrived_at) or not math.isfinite(arrived_at):
        raise ConfigError(f"arrived_at must be finite seconds, got {arrived_at!r}")
    return math.log(work) - math.log1p(-rate) * arrived_at / period_s
