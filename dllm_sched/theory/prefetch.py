"""Blocks that two resources work on in turn: KV selection for the next one while this one runs."""

from __future__ import annotations

from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import not_negative, positive, whole

__all__ = ["blocks_s", "prefetch_gain"]


def _check(
    num_blocks: int, select_s: float, step_s: float, steps_per_block: int, draft_steps: int
) -> None:
    whole(num_blocks=num_blocks, steps_per_block=steps_per_block)
    whole(0, draft_steps=draft_steps)
    not_negative(select_s=select_s)
    positive(step_s=step_s)
    if draft_steps > steps_per_block:
        raise ConfigError(
            f"draft_steps must be at most the {steps_per_block} steps of a block, got {draft_steps}"
        )


def blocks_s(
    num_blocks: int,
    select_s: float,
    step_s: float,
    steps_per_block: int,
    *,
    draft_steps: int = 1,
    prefetch: bool = True,
) -> float:
    """Return how long a request of equal blocks takes, seconds. O(1).

    Each of n blocks needs a selection of s seconds on one resource, then T steps of g seconds on
    another. Without prefetch they take turns: ``n (s + T g)``. With it the selection for the next
    block starts once a draft is there, d steps into this one:
    ``s + (n - 1) max(T g, d g + s) + T g``. For R rows that cross together, s is the sum of
    theirs.

    Args:
        num_blocks: n, >= 1.
        select_s: s, with the crossing from one memory to the other, >= 0.
        step_s: g, > 0.
        steps_per_block: T, >= 1.
        draft_steps: d, >= 0, at most T.
        prefetch: Whether the two overlap.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        The split and the draft from the first step's logits: "HERALD" (arXiv 2606.21633), from its
        abstract and second-hand notes; the closed form is our own.
    """
    _check(num_blocks, select_s, step_s, steps_per_block, draft_steps)
    denoise = steps_per_block * step_s
    if not prefetch:
        return num_blocks * (select_s + denoise)
    between = max(denoise, draft_steps * step_s + select_s)
    return select_s + (num_blocks - 1) * between + denoise


def prefetch_gain(
    select_s: float, step_s: float, steps_per_block: int, *, draft_steps: int = 1
) -> float:
    """Return the speed-up of a long request by prefetch: that of ``blocks_s`` for many blocks.

    ``(s + T g) / max(T g, d g + s)``: at least 1, and at most ``2 - d / T``, where the selection
    takes just as long as the steps that are left after the draft. O(1).

    Args:
        select_s: As of ``blocks_s``.
        step_s: As of ``blocks_s``.
        steps_per_block: As of ``blocks_s``.
        draft_steps: As of ``blocks_s``.

    Source:
        Own derivation.

    >>> prefetch_gain(0.7, 0.1, 8, draft_steps=1)
    1.875
    """
    _check(1, select_s, step_s, steps_per_block, draft_steps)
    denoise = steps_per_block * step_s
    return (select_s + denoise) / max(denoise, draft_steps * step_s + select_s)
