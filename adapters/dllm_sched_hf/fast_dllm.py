"""Fast-dLLM: a block cache around plain LLaDA, and rules that commit several tokens per forward.

The first forward of each block runs the whole canvas and leaves its keys and values behind; the
later ones run the block and what comes after it (``prefix``) or the block alone (``dual``), and
read the rest as that first forward left it, stale suffix included.

Source: Wu et al., "Fast-dLLM" (arXiv 2505.22618) and its public code for the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs
import numpy as np

from dllm_sched.errors import ConfigError
from dllm_sched.request import Request
from dllm_sched_hf.canvas import CanvasDecoder, CanvasPlan, CanvasRequest
from dllm_sched_hf.decoder import Bools, Commits, Floats, Ints, check_field, shown
from dllm_sched_hf.loops import compiled

__all__ = ["FastDLLM", "FastDLLMRequest"]

_CACHES = ("none", "prefix", "dual")


def _check_cache(request: Request, field: attrs.Attribute[Any], value: object) -> None:
    if value not in _CACHES:
        raise ConfigError(
            f"request {request.id!r}: {field.name} must be one of {', '.join(_CACHES)}, got "
            f"{shown(value)}"
        )


@attrs.frozen(kw_only=True, eq=False)
class FastDLLMRequest(CanvasRequest):
    """A request with its prompt and its settings for Fast-dLLM.

    At most one of ``threshold``, ``factor`` and ``steps`` is given; by default one position commits
    per forward.

    Attributes:
        cache: ``none``, ``prefix`` or ``dual``.
        threshold: In [0, 1]: every position commits whose confidence reaches it, and always the
            best one.
        factor: Above 0: the n most confident positions commit while the n-th one's confidence is at
            least ``1 - factor / (n + 1)``. If only the last candidate fails it commits as well, as
            in the reference.

    Raises:
        ConfigError: If a field is out of its range, does not divide, or excludes another; names it.

    Source: arXiv 2505.22618 and its public code; its GSM8K script has blocks of 32, ``dual``, and
    threshold 0.9 or factor 1.
    """

    cache: Literal["none", "prefix", "dual"] = attrs.field(default="dual", validator=_check_cache)
    threshold: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(check_field)
    )
    factor: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(check_field)
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        rules = ("threshold", "factor", "steps")
        given = [name for name in rules if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(
                f"request {self.id!r}: give one of threshold, factor and steps, got "
                f"{' and '.join(given)}"
            )


class FastDLLM(CanvasDecoder):
    """The canvas of every slot, with a cache that lasts for a block."""

    request_type = FastDLLMRequest
    knobs = ("threshold", "factor", "temperature")
    confidence_type = np.float64

    def __init__(self, num_slots: int, max_len: int, mask_id: int) -> None:
        super().__init__(num_slots, max_len, mask_id)
        self.threshold: Floats
        self.factor: Floats
        self.threshold, self.factor = np.zeros((2, num_slots))
        self.by_threshold: Bools
        self.by_factor: Bools
        self.cached: Bools
        self.dual: Bools
        self.by_threshold, self.by_factor, self.cached, self.dual = np.zeros(
            (4, num_slots), np.bool_
        )

    def start(self, slot: int, request: Any, stop_ids: Sequence[int] = ()) -> None:
        """Put a fresh row into ``slot``; its knobs are set separately.

        A knob of a rule that the request does not follow is without effect.
        """
        super().start(slot, request, stop_ids)
        self.by_threshold[slot] = request.threshold is not None
        self.by_factor[slot] = request.factor is not None
        self.cached[slot] = request.cache != "none"
        self.dual[slot] = request.cache == "dual"

    def trace(self, plan: CanvasPlan, commits: Commits, token: Ints) -> list[dict[str, Any]]:
        """Return what a committed step did, one entry per row."""
        entries = super().trace(plan, commits, token)
        steps = self.num_steps[plan.slots].tolist()
        full = (plan.start == 0).tolist()  # there is always a prompt
        return [
            {"step": step, "full": whole, **entry}
            for step, whole, entry in zip(steps, full, entries, strict=True)
        ]

    def refreshes(self, slots: Ints) -> Bools:
        """Return the rows without a cache or at the first forward of a block."""
        return ~self.cached[slots] | (self.round[slots] == 0)

    def _window(self, slots: Ints, first: Ints, length: Ints) -> tuple[Ints, Ints]:
        whole = self.refreshes(slots)
        block_only = self.dual[slots] & ~whole
        return (
            np.where(whole, 0, first),
            np.where(block_only, first + self.block_length[slots], length),
        )

    def _num_commits(self, slots: Ints, confidence: Floats, head: Ints) -> Ints:
        number = super()._num_commits(slots, confidence, head)
        _apply_rules(
            *(slots, confidence, head, number),
            *(self.by_threshold, self.threshold, self.by_factor, self.factor),
        )
        return number


@compiled
def _apply_rules(
    slots: Ints,
    confidence: Floats,
    head: Ints,
    number: Ints,
    by_threshold: Bools,
    threshold: Floats,
    by_factor: Bools,
    factor: Floats,
) -> None:
    """Correct how many positions the rows commit that follow a rule and no schedule.

    Args:
        slots: ``[r]``
        confidence: ``[c]`` as in the decoder.
        head: ``[r + 1]`` likewise.
        number: ``[r]``, written.
        by_threshold: ``[slots]`` which follow this rule.
        threshold: ``[slots]``
        by_factor: ``[slots]`` which follow this one.
        factor: ``[slots]``
    """
    for index, slot in enumerate(slots):
        own = confidence[head[index] : head[index + 1]]
        count = 1  # whatever its confidence
        if by_threshold[slot]:
            while count < len(own) and own[count] >= threshold[slot]:
                count += 1
            number[index] = count
        elif by_factor[slot]:
            while count < len(own) and own[count] >= 1 - factor[slot] / (count + 2):
                count += 1
            # All of them, too, if only the last one fails: so the reference counts.
            number[index] = count if count < len(own) - 1 else len(own)
