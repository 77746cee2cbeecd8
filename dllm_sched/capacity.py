"""What an engine can hold: slots, and KV pages under a memory model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import attrs

from dllm_sched.errors import ConfigError, described
from dllm_sched.request import LARGEST_COUNT, Phase, Request

__all__ = ["Capacity", "FixedCanvas", "GrowingKV", "MemoryModel", "RaggedKV", "kept_tokens"]

_MOST_SLOTS = 1_000_000
_PREFILL, _REFRESH, _REUSE = Phase.PREFILL, Phase.REFRESH, Phase.REUSE


def at_least_one(instance: object, field: attrs.Attribute[int], value: object) -> None:
    """Validate a count; for the policies' fields as well.

    Raises:
        ConfigError: If it is not an int from 1 to 2**63 - 1.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_COUNT:
        raise ConfigError(
            f"{type(instance).__name__}: {field.name} must be an int >= 1 and < 2**63, got "
            f"{described(value)}"
        )


def within_slots(instance: object, field: attrs.Attribute[int], value: object) -> None:
    """Validate a number of rows or slots; for the policies' fields as well.

    Raises:
        ConfigError: If it is not an int from 1 to 1,000,000.
    """
    at_least_one(instance, field, value)
    if isinstance(value, int) and value > _MOST_SLOTS:  # each has its place in a list
        raise ConfigError(
            f"{type(instance).__name__}: {field.name} must be <= {_MOST_SLOTS:,}, got {value!r}"
        )


def _count_or_none(instance: object, field: attrs.Attribute[int | None], value: object) -> None:
    if value is not None:
        at_least_one(instance, field, value)  # type: ignore[arg-type]  # same field, narrower


class MemoryModel(Protocol):
    """How many KV pages a row holds. Pure functions of the request and its progress, O(1)."""

    @property
    def grows(self) -> bool:
        """Whether ``pages`` depends on ``kv_tokens``."""

    def pages(self, request: Request, kv_tokens: int) -> int:
        """Pages that must be held before the next step of a row with ``kv_tokens`` cached."""

    def peak_pages(self, request: Request) -> int:
        """The most pages this request can ever hold."""


@attrs.frozen
class FixedCanvas:
    """The whole canvas (prompt and answer) is held from join to release.

    What a bidirectional model without a block cache needs; memory can then never run out in
    mid-flight.

    Args:
        page_size: Tokens a page holds, >= 1.

    Source:
        Own derivation from LLaDA's fixed canvas of prompt + generation length.
    """

    page_size: int = attrs.field(default=16, validator=at_least_one)
    grows = False

    def pages(self, request: Request, kv_tokens: int) -> int:
        """Pages of the whole canvas; progress does not matter. O(1)."""
        return -(-request.max_total_tokens // self.page_size)

    def peak_pages(self, request: Request) -> int:
        """The same as ``pages``. O(1)."""
        return -(-request.max_total_tokens // self.page_size)


@attrs.frozen
class GrowingKV:
    """A row holds what is cached plus the window that its next step may write.

    Args:
        page_size: Tokens a page holds, >= 1.
        window_blocks: Blocks beyond the cached ones that a step may write, >= 1.

    Source:
        Own derivation: block-causal models (D2F, block diffusion) cache finished blocks only.
    """

    page_size: int = attrs.field(default=16, validator=at_least_one)
    window_blocks: int = attrs.field(default=1, validator=at_least_one)
    grows = True

    def pages(self, request: Request, kv_tokens: int) -> int:
        """Pages of the cached tokens and the open window, never past the canvas. O(1)."""
        tokens = min(
            kv_tokens + self.window_blocks * request.block_length, request.max_total_tokens
        )
        return -(-tokens // self.page_size)

    def peak_pages(self, request: Request) -> int:
        """Pages of the whole canvas. O(1)."""
        return -(-request.max_total_tokens // self.page_size)


def kept_tokens(retention: float, num_tokens: int) -> int:
    """Return how many of ``num_tokens`` a head keeps, rounded up: ``ceil(retention * n)``. O(1)."""
    return min(num_tokens, math.ceil(retention * num_tokens))


def _retentions(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(values)


def _each_a_share(
    _model: RaggedKV, _field: attrs.Attribute[tuple[float, ...]], value: tuple[object, ...]
) -> None:
    for one in value:
        if not isinstance(one, int | float) or isinstance(one, bool) or not 0 <= one <= 1:
            raise ConfigError(f"RaggedKV: a retention must lie between 0 and 1, got {one!r}")
    if not any(value):
        raise ConfigError(
            f"RaggedKV: retentions must name at least one cluster that keeps something: {value!r}"
        )


_MOST_CACHED = 1 << 16


@attrs.frozen
class RaggedKV:
    """Heads keep different shares of their KV, and clusters of heads have pages of their own.

    A cluster of n cached tokens holds ``ceil(kept / page_size)`` pages, where kept is what the most
    retentive of its heads keeps, ``ceil(retention * n)``. A page holds ``page_size`` tokens of each
    head of one cluster; where all clusters have equally many heads all pages have one size, and
    ``Capacity.num_pages`` counts those of the one pool. Retentions are fixed beforehand, so what is
    reserved is what is used, to the page, once the cache is compressed.

    Args:
        retentions: The largest share kept in each cluster, 0 to 1; at least one above 0.
            ``theory.clusters.ragged_kv`` makes them from a profile.
        page_size: Tokens a page holds for each of its heads, >= 1.
        window_blocks: None: the whole canvas is reserved from join to release (as in
            ``FixedCanvas``), and compressed. Else what is cached is compressed, and in every
            cluster so many open blocks more are held whole, >= 1 (as in ``GrowingKV``).

    Source:
        "Tangram" (arXiv 2606.06302): kept lengths fixed when a request is scheduled, and the pages
        of a cluster. (Its public code still reserves the uncompressed length.) The growing form is
        our own derivation.
    """

    retentions: tuple[float, ...] = attrs.field(converter=_retentions, validator=_each_a_share)
    page_size: int = attrs.field(default=16, validator=at_least_one)
    window_blocks: int | None = attrs.field(default=None, validator=_count_or_none)
    _clusters: tuple[tuple[float, int], ...] = attrs.field(init=False, repr=False, eq=False)
    _pages: dict[tuple[int, int], int] = attrs.field(init=False, factory=dict, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_clusters", tuple(Counter(self.retentions).items()))

    @property
    def grows(self) -> bool:
        """Whether pages come with progress."""
        return self.window_blocks is not None

    def footprint(self, num_tokens: int, whole: int = 0) -> int:
        """Return the pages of so many cached tokens. O(1) when asked again, else O(clusters).

        Args:
            num_tokens: Cached, and compressed, >= 0.
            whole: Tokens beside them that every head keeps, >= 0.
        """
        key = (num_tokens, whole)
        pages = self._pages.get(key)
        if pages is None:
            if len(self._pages) >= _MOST_CACHED:
                self._pages.clear()
            size = self.page_size
            pages = self._pages[key] = sum(
                -(-(kept_tokens(retention, num_tokens) + whole) // size) * count
                for retention, count in self._clusters
            )
        return pages

    def pages(self, request: Request, kv_tokens: int) -> int:
        """Pages of the compressed canvas, or of what is cached and the open window. O(1)."""
        total = request.max_total_tokens
        if self.window_blocks is None:
            return self.footprint(total)
        cached = min(kv_tokens, total)
        return self.footprint(cached, min(self._window(request), total - cached))

    def peak_pages(self, request: Request) -> int:
        """The same without a window; with it, the pages when the last window opens. O(1)."""
        total = request.max_total_tokens
        if self.window_blocks is None:
            return self.footprint(total)
        window = self._window(request)
        return self.footprint(total - window, window)

    def _window(self, request: Request) -> int:
        blocks = min(self.window_blocks or 0, request.max_blocks)
        return blocks * request.block_length


@attrs.frozen(kw_only=True)
class Capacity:
    """The limits within which a scheduler plans; ``set_capacity`` changes them live.

    Attributes:
        max_num_seqs: Slots, i.e. the most rows in a step, 1 to 1,000,000.
        num_pages: KV pages in all, or None for no memory limit.
        memory: How rows use pages; given if and only if ``num_pages`` is.
        window_blocks: The most blocks of a row that one forward works on, the one being cached
            included; None = all of the row's blocks. Bounds ``Row.max_tokens``.
        whole_prefill: A prefill sends the whole canvas, not the prompt and a window, as in models
            whose blocks attend to those after them. Bounds ``Row.max_tokens``.

    Raises:
        ConfigError: If a field is out of range, or only one of pages and model is given.
    """

    max_num_seqs: int = attrs.field(validator=within_slots)
    num_pages: int | None = attrs.field(default=None, validator=_count_or_none)
    memory: MemoryModel | None = None
    window_blocks: int | None = attrs.field(default=None, validator=_count_or_none)
    whole_prefill: bool = False

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.whole_prefill, bool):
            raise ConfigError(
                f"Capacity: whole_prefill must be True or False, got {self.whole_prefill!r}"
            )
        if self.memory is not None and (
            isinstance(self.memory, type) or not callable(getattr(self.memory, "peak_pages", None))
        ):
            raise ConfigError(
                "Capacity: memory must be a memory model such as GrowingKV(page_size=16), got "
                f"{self.memory!r}"
            )
        if (self.num_pages is None) != (self.memory is None):
            raise ConfigError(
                "Capacity: give num_pages and memory together (or neither, for slots only), got "
                f"num_pages={self.num_pages!r}, memory={self.memory!r}"
            )

    def max_tokens(self, request: Request, phase: Phase) -> int:
        """Upper bound of the tokens a row sends through a forward in ``phase``. O(1)."""
        length = request.block_length
        canvas = -(-request.max_new_tokens // length) * length  # as in Request.max_blocks
        if self.window_blocks is not None and not (
            phase is _REFRESH or (self.whole_prefill and phase is _PREFILL)
        ):
            canvas = min(canvas, self.window_blocks * length)
        return canvas if phase is _REUSE else request.prompt_len + canvas

    def fits(self, request: Request) -> bool:
        """Whether the request could run alone. O(1)."""
        return (
            self.memory is None
            or self.num_pages is None
            or self.memory.peak_pages(request) <= self.num_pages
        )
