"""Threshold-based exclusive batching: collect expensive rows for a step of their own."""

from __future__ import annotations

from typing import Any

import attrs

from dllm_sched.capacity import Capacity, within_slots
from dllm_sched.errors import ConfigError
from dllm_sched.policies.base import Composition, Selection
from dllm_sched.request import Phase
from dllm_sched.view import Round

__all__ = ["ExclusivePhases"]

_WHOLE = frozenset({Phase.PREFILL, Phase.REFRESH})
_CACHED = frozenset({Phase.REUSE})


@attrs.frozen
class ExclusivePhases(Composition):
    """Rows that compute their whole sequence never share a step with rows that reuse a cache.

    Prefills and refreshes are held, in their slots, until ``count`` of ``batch_size`` slots are
    not decoding (empty, to prefill or to refresh); then they have a step to themselves, however
    many they are. Else the others step. So under load ``count`` of them are collected, and where
    there is room anyway nobody waits.

    Nobody starves as long as the engine reports ``REUSE`` after a row's prefill or refresh: rows
    that decode end, or come to a refresh, and so do those that were held. Never selects nobody.

    O(1), but asked at every step: none is free of it.

    Args:
        batch_size: N, >= 1 and at most ``max_num_seqs`` when the scheduler is built.
        count: k, 1 to ``batch_size``; ``theory.exclusive`` has the best one.

    Source:
        "Threshold-Based Exclusive Batching" (arXiv 2606.00516), seen second hand, which prefills
        when k slots are empty; refreshes as the same question, and rows held in their slots, are
        our own.
    """

    batch_size: int = attrs.field(validator=within_slots)
    count: int = attrs.field(validator=within_slots)

    def __attrs_post_init__(self) -> None:
        if self.count > self.batch_size:
            raise ConfigError(
                f"ExclusivePhases: count must be at most batch_size = {self.batch_size}, or "
                f"nothing would ever start; got {self.count}"
            )

    def select(self, state: Any, round: Round) -> Selection:
        """Return the phases whose turn it is. O(1)."""
        view = round.view
        decoding = view.running_by_phase.get(Phase.REUSE, 0)
        if decoding == view.num_running:
            return _CACHED
        if not decoding or self.batch_size - decoding >= self.count:
            return _WHOLE
        return _CACHED

    def validate(self, capacity: Capacity) -> None:
        """Refuse a batch that the capacity can never hold."""
        if self.batch_size > capacity.max_num_seqs:
            raise ConfigError(
                f"ExclusivePhases({self.batch_size}): the capacity has only "
                f"{capacity.max_num_seqs} slots; raise max_num_seqs or lower the batch size"
            )
