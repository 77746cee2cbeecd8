"""BlockServe: refill at block boundaries, as far as a padded batch stays within its budget."""

from __future__ import annotations

import math
from typing import Any, Literal

import attrs

from dllm_sched.capacity import at_least_one
from dllm_sched.errors import ConfigError
from dllm_sched.policies.base import Admission, Ordering, Verdict
from dllm_sched.request import RequestView
from dllm_sched.theory._check import is_number
from dllm_sched.view import Round

__all__ = ["BoundingBox", "ShortestPrompt"]


@attrs.frozen
class ShortestPrompt(Ordering):
    """By prompt length, shortest first, but not for ever: later requests overtake within bounds.

    The key is ``arrival number + max_bypass * min(prompt, longest) / longest``. So a request is
    overtaken by fewer than ``max_bypass`` later ones, by the fewer the shorter its prompt, and
    nobody starves. Among requests that came together the order is that of their prompts. O(1).

    Args:
        max_bypass: >= 0; 0: first come, first served; ``inf``: by length alone, which starves long
            prompts under load.
        longest: Prompts of so many tokens and more count alike, >= 1 (unless ``max_bypass`` is
            ``inf``, when no two lengths do).

    Source:
        BlockServe (arXiv 2607.08930) sorts its queue by prompt length, which is all that is known
        of it here; the bound is our own derivation.
    """

    max_bypass: float = attrs.field(default=256)
    longest: int = attrs.field(default=4096, validator=at_least_one)

    @max_bypass.validator
    def _check(self, field: attrs.Attribute[float], value: object) -> None:
        if not is_number(value) or not value >= 0:  # type: ignore[operator]
            raise ConfigError(f"ShortestPrompt: max_bypass must be a number >= 0, got {value!r}")

    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        """Return the arrival number moved back by the prompt's share of the bound. O(1)."""
        prompt = rv.request.prompt_len
        if self.max_bypass == math.inf:
            return (prompt,)
        return (rv.sequence + self.max_bypass * min(prompt, self.longest) / self.longest,)


@attrs.frozen
class BoundingBox(Admission):
    """Keep rows x longest row within a budget: what a dense, padded batch computes.

    A request too large for the budget on its own runs alone. Nobody overtakes a head that does not
    fit; rows end, so its turn comes.

    Args:
        tokens: Tokens of the box, >= 1.
        length: Of a row: ``canvas``: its prompt and its whole budget, in blocks; the box is then
            within the budget at every step. ``causal``: its prompt, its finished blocks and the
            open one; rows grow, so the box is within the budget whenever somebody joins, and may
            outgrow it in between. ``canvas`` is O(1) per head, ``causal`` O(rows) per round.

    Source:
        BlockServe (arXiv 2607.08930), from its abstract and second-hand notes; the rule in this
        form is our own derivation.
    """

    tokens: int = attrs.field(validator=at_least_one)
    length: Literal["canvas", "causal"] = attrs.field(default="canvas")

    @length.validator
    def _check(self, field: attrs.Attribute[str], value: object) -> None:
        if value not in ("canvas", "causal"):
            raise ConfigError(f"BoundingBox: length must be 'canvas' or 'causal', got {value!r}")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The running maximum, or the rows and their blocks."""
        return frozenset({"max_length"} if self.length == "canvas" else {"rows", "blocks"})

    def _length(self, rv: RequestView) -> int:
        request = rv.request
        if self.length == "canvas":
            return request.max_total_tokens
        grown = request.prompt_len + (rv.num_blocks_done + 1) * request.block_length
        return min(grown, request.max_total_tokens)

    def _longest(self, state: int | None, round: Round) -> int:
        """The longest row so far: after a join the state knows."""
        if state is not None:
            return state
        if self.length == "canvas":
            return round.view.max_length
        return max(map(self._length, round.rows), default=0)

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        """Admit while the box with this row is within the budget, or if nobody else is in."""
        rows = round.view.num_running + round.num_joined + 1
        box = rows * max(self._longest(state, round), self._length(rv))
        return Verdict.ADMIT if box <= self.tokens or rows == 1 else Verdict.STOP

    def joined(self, state: Any, rv: RequestView, round: Round) -> int:
        """Remember the longest row. O(1)."""
        return max(self._longest(state, round), self._length(rv))

    def settle(self, state: Any, round: Round) -> None:
        """Forget it: rows come and go."""
