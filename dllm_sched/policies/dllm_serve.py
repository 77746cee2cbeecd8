"""A token budget by phase (dLLM-Serve): a refresh costs the whole sequence, a reuse one block."""

from __future__ import annotations

import attrs

from dllm_sched.capacity import at_least_one
from dllm_sched.policies.base import ALL, Admission, Composition, Selection, Verdict
from dllm_sched.request import Phase, RequestView
from dllm_sched.view import Round

__all__ = ["JoinWithinBudget", "StepWithinBudget", "phase_tokens"]


def phase_tokens(rv: RequestView) -> int:
    """Return what a row's next forward costs: its block in REUSE, else its whole length. O(1)."""
    request = rv.request
    return request.block_length if rv.phase is Phase.REUSE else request.max_total_tokens


@attrs.frozen
class JoinWithinBudget(Admission):
    """Let a request join while the step's tokens stay within a budget; stop at the first too large.

    The rows count with ``view.tokens_in_rows``, which is exact under ``Capacity(window_blocks=1)``
    and otherwise too much for rows in REUSE. A request too large for the budget runs alone.
    O(1).

    Args:
        tokens: Tokens in one forward, >= 1.

    Source:
        "dLLM-Serve" (arXiv 2512.17077) and its public code: ``max_num_batched_tokens``.
    """

    tokens: int = attrs.field(default=16_384, validator=at_least_one)

    def init(self) -> int:
        """Nobody has joined yet: the state is the tokens of who joined in this round."""
        return 0

    def admit(self, state: int, rv: RequestView, round: Round) -> Verdict:
        """Admit while the budget holds the row, or if nobody else is in."""
        view = round.view
        alone = view.num_running + round.num_joined == 0
        fits = view.tokens_in_rows + state + phase_tokens(rv) <= self.tokens
        return Verdict.ADMIT if fits or alone else Verdict.STOP

    def joined(self, state: int, rv: RequestView, round: Round) -> int:
        """Add its tokens."""
        return state + phase_tokens(rv)

    def settle(self, state: int, round: Round) -> int:
        """Forget them: from now on they are the rows'."""
        return 0


@attrs.frozen
class StepWithinBudget(Composition):
    """Let rows step in order of arrival while the step's tokens stay within a budget.

    When many rows refresh at once the later ones sit out, from the first that does not fit. The
    first row always steps, so nobody waits for ever. O(joins) when all fit, else O(n log n).

    Args:
        tokens: Tokens in one forward, >= 1.

    Source:
        "dLLM-Serve" (arXiv 2512.17077) and its public code.
    """

    needs = frozenset({"rows"})

    tokens: int = attrs.field(default=16_384, validator=at_least_one)

    def select(self, state: None, round: Round) -> Selection:
        """Return the rows that fit, ``ALL`` if all do."""
        if self._surely(round):
            return ALL
        chosen: list[RequestView] = []
        total = 0
        for rv in sorted(round.rows, key=lambda row: row.sequence):
            total += phase_tokens(rv)
            if chosen and total > self.tokens:
                break
            chosen.append(rv)
        return chosen

    def _surely(self, round: Round) -> bool:
        """Whether an upper bound fits: whoever joins is counted whole."""
        more = sum(max(0, phase_tokens(rv) - rv.max_tokens) for rv in round.joined)
        return round.view.tokens_in_rows + more <= self.tokens
