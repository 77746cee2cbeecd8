"""Sangam: whole-sequence prefills within a token budget that saves up what it could not spend."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import attrs

from dllm_sched.capacity import at_least_one
from dllm_sched.errors import ConfigError
from dllm_sched.policies.base import Admission, Ordering, Verdict
from dllm_sched.request import RequestView
from dllm_sched.theory._check import is_number
from dllm_sched.view import BlockedBy, Round

__all__ = ["DeficitBudget", "FewestBlocks"]


@attrs.frozen
class FewestBlocks(Ordering):
    """By the blocks that a request has still to make, fewest first.

    Args:
        bypass: A request is overtaken by fewer than so many later ones for each of its blocks,
            >= 0; ``inf``: by all that have fewer blocks, which starves long requests under load.

    Source:
        "Sangam" (arXiv 2607.04206), one of its two queue orders; the bound is our own.
    """

    bypass: float = attrs.field(default=math.inf)

    @bypass.validator
    def _check(self, field: attrs.Attribute[float], value: object) -> None:
        if not is_number(value) or not value >= 0:  # type: ignore[operator]
            raise ConfigError(f"FewestBlocks: bypass must be a number >= 0, got {value!r}")

    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        """Return the remaining blocks by the budget, or the arrival put off by them. O(1)."""
        blocks = rv.request.max_blocks - rv.num_blocks_done
        return (blocks if self.bypass == math.inf else rv.sequence + self.bypass * blocks,)


class _Savings(NamedTuple):
    """What the last round left over."""

    tokens: int  # the deficit
    per_step: int  # what each later step adds to it as long as nothing changes


@attrs.frozen
class DeficitBudget(Admission):
    """A prefill takes a step's free tokens and what earlier steps saved up for it.

    A prefill of a bidirectional model cannot be cut into chunks. So with D tokens of running rows
    a step has the income ``I = tokens - D``, may spend ``R = I + deficit`` on those who join, and
    keeps what is left:

    * Strictly in order: the head joins while the joiners' tokens and its own stay within R. What
      is larger than R joins an empty engine alone.
    * The head did not fit R: the deficit is what is left of R.
    * It waits for a slot or memory: only what was spent beyond I is taken off the deficit; nothing
      is saved.
    * A step begins with an empty queue: the deficit is 0.

    While rows run, the prefills of a step take I in the mean, so the others are not stalled more
    than they would be by a ``TokenBudget`` of ``tokens``, and yet no prefill is too long to come.

    Rows' tokens are upper bounds, ``RequestView.max_tokens``: the engine has to report that a row
    no longer prefills; ``Capacity(window_blocks=1, whole_prefill=True)`` makes a running row one
    block and a prefill the whole canvas.

    O(1) per round, and none in steps in which it can only save: ``recheck`` says in which the
    head can go. After a failed step, the step that takes its place has no income of its own.

    Args:
        tokens: t, tokens of a step that has a prefill in it, in the mean, >= 1.

    Source:
        "Sangam" (arXiv 2607.04206) and its public code, which counts step by step, and in which a
        request comes back to the queue after each block; here it keeps its row. Sums over steps
        without changes, and slots counted as memory, are our own.
    """

    tokens: int = attrs.field(default=4096, validator=at_least_one)

    def init(self) -> _Savings:
        """Nothing saved."""
        return _Savings(0, 0)

    def _income(self, round: Round) -> int:
        view = round.view
        return self.tokens - view.tokens_in_rows if round.num_steps or not view.num_running else 0

    def _spendable(self, state: _Savings, round: Round) -> int:
        saved = state.tokens + state.per_step * max(0, round.num_steps - 1)
        return self._income(round) + (max(0, saved) if round.view.num_waiting else 0)

    def _fits(self, state: _Savings, rv: RequestView, round: Round) -> bool:
        if round.view.num_running + round.num_joined == 0:
            return True
        return round.joined_tokens + rv.max_tokens <= self._spendable(state, round)

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        """Admit what fits the deficit, or anything into an empty engine. O(1)."""
        return Verdict.ADMIT if self._fits(state, rv, round) else Verdict.STOP

    def settle(self, state: Any, round: Round) -> _Savings:
        """Save what is left. O(1)."""
        income, spendable = self._income(round), self._spendable(state, round)
        coming = self.tokens - round.view.tokens_in_rows - round.joined_tokens
        left = spendable - round.joined_tokens
        head = round.blocked
        if head is None:  # a step that finds the queue empty takes all savings away
            left = max(0, left) if round.num_joined else 0
            return _Savings(left, -left)
        if round.blocked_by is BlockedBy.POLICY and not self._fits(state, head, round):
            return _Savings(max(0, left), coming)
        deficit = spendable - income
        return _Savings(max(0, deficit - max(0, round.joined_tokens - income)), min(0, coming))

    def recheck(self, state: Any, round: Round) -> float:
        """Return the steps after which the head can go, if its turn comes by saving. O(1)."""
        head, per_step = round.blocked, state.per_step
        if head is None or per_step <= 0:
            return math.inf
        steps: int = math.ceil((head.max_tokens - state.tokens) / per_step)
        return max(1, steps)
