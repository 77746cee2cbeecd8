"""What an engine can hold: slots, and KV pages under a memory model."""

from __future__ import annotations

from typing import Protocol

import attrs

from dllm_sched.errors import ConfigError
from dllm_sched.request import Phase, Request

__all__ = ["Capacity", "FixedCanvas", "GrowingKV", "MemoryModel"]


def at_least_one(instance: object, field: attrs.Attribute[int], value: object) -> None:
    """Validate a count; for the policies' fields as well.

    Raises:
        ConfigError: If it is not an int >= 1.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"{type(instance).__name__}: {field.name} must be an int >= 1, got {value!r}"
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


@attrs.frozen(kw_only=True)
class Capacity:
    """The limits within which a scheduler plans; ``set_capacity`` changes them live.

    Attributes:
        max_num_seqs: Slots, i.e. the most rows in a step, >= 1.
        num_pages: KV pages in all, or None for no memory limit.
        memory: How rows use pages; given if and only if ``num_pages`` is.
        window_blocks: The most blocks of a row that one forward works on, the one being cached
            included; None = all of the row's blocks. Bounds ``Row.max_tokens``.

    Raises:
        ConfigError: If a field is out of range, or only one of pages and model is given.
    """

    max_num_seqs: int = attrs.field(validator=at_least_one)
    num_pages: int | None = attrs.field(default=None, validator=_count_or_none)
    memory: MemoryModel | None = None
    window_blocks: int | None = attrs.field(default=None, validator=_count_or_none)

    def __attrs_post_init__(self) -> None:
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
        if phase is Phase.REFRESH:
            return request.max_total_tokens
        blocks = request.max_blocks
        if self.window_blocks is not None and self.window_blocks < blocks:
            blocks = self.window_blocks
        window = blocks * request.block_length
        return request.prompt_len + window if phase is Phase.PREFILL else window

    def fits(self, request: Request) -> bool:
        """Whether the request could run alone. O(1)."""
        return (
            self.memory is None
            or self.num_pages is None
            or self.memory.peak_pages(request) <= self.num_pages
        )
