"""The D2F step ladder: how many steps n blocks take when no token commits by its confidence."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType

import attrs

from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import is_number, whole

__all__ = ["GSM8K_BLOCKS", "StepLadder"]

#: Generated blocks of 32 tokens -> answers, of 100 GSM8K questions that LLaDA-8B + D2F answered
#: within 512 tokens. Source: the published raw data of "Serving Masked Diffusion LLMs" (arXiv
#: 2608.23807): steps of each answer, turned into blocks by the ladder with thresholds 0.5 and 0.9.
GSM8K_BLOCKS: Mapping[int, int] = MappingProxyType(
    {6: 6, 7: 10, 8: 15, 9: 16, 10: 19, 11: 12, 12: 6, 13: 4, 14: 7, 15: 3, 16: 2}
)


@attrs.frozen
class StepLadder:
    """Steps of a request, computed from the decoder's settings.

    Holds exactly when no token ever passes the confidence threshold (``skip_threshold = 1.0``: the
    test is ``confidence > threshold``), and is the most that a request can take otherwise. Then a
    fully activated block commits one token a step and a semi-activated one none; a block becomes
    fully activated when its predecessor is decoded far enough; the prompt counts as decoded; at
    most one block is appended a step. So the blocks start ``period`` steps apart:

        ``period = max over both thresholds of the least k with k / block_length >= threshold``,
        ``steps(n) = period * (n - 1) + block_length + 1``,  ``forwards(n) = steps(n) - 1``:

    the published decoder counts the pass in which it finds that it is done, and makes no forward
    in it. Thresholds are compared in double precision as the decoder compares them, never by a
    rounded product: ``k / 32 >= 0.7`` first at 23.

    Args:
        block_length: Tokens of a block, >= 1.
        block_add_threshold: In [0, 1]: a new block is appended once the last one has this share of
            its tokens.
        decoded_token_threshold: In [0, 1]: a block is fully activated once its predecessor has
            this share.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        The rules: "Discrete Diffusion Forcing" (D2F, arXiv 2508.09192). The closed form: own
        derivation; it gives every step count in the raw data of arXiv 2608.23807.

    >>> ladder = StepLadder(32, block_add_threshold=0.5, decoded_token_threshold=0.9)
    >>> ladder.period, [ladder.steps(n) for n in (6, 7, 16)]
    (29, [178, 207, 468])
    """

    block_length: int = 32
    block_add_threshold: float = attrs.field(default=0.1, kw_only=True)
    decoded_token_threshold: float = attrs.field(default=0.95, kw_only=True)
    period: int = attrs.field(init=False)  #: forwards between the first commits of two blocks
    _to_append: int = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        whole(block_length=self.block_length)
        for name in ("block_add_threshold", "decoded_token_threshold"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= 1:
                raise ConfigError(f"{name} must lie between 0 and 1, got {value!r}")
        to_append = self._tokens(self.block_add_threshold)
        period = max(1, to_append, self._tokens(self.decoded_token_threshold))
        object.__setattr__(self, "_to_append", to_append)
        object.__setattr__(self, "period", period)

    def _tokens(self, threshold: float) -> int:
        """The least k with ``k / block_length >= threshold``, as the decoder computes it."""
        length = self.block_length
        return bisect_left(range(length), threshold, key=lambda k: k / length)

    def steps(self, num_blocks: int) -> int:
        """Return the published decoder's step count of a request of >= 1 blocks. O(1)."""
        return self.forwards(num_blocks) + 1

    def forwards(self, num_blocks: int) -> int:
        """Return the forward passes, which is what an engine runs and bills. O(1)."""
        whole(num_blocks=num_blocks)
        return self.period * (num_blocks - 1) + self.block_length

    def block_ends(self, num_blocks: int) -> tuple[int, ...]:
        """Return, block by block, after how many forwards it is finished. O(num_blocks)."""
        whole(num_blocks=num_blocks)
        return tuple(self.period * block + self.block_length for block in range(num_blocks))

    def mean_active_blocks(self, num_blocks: int) -> float:
        """Return the mean number of blocks at work in a forward.

        A block counts from the pass in which it is appended through the one that commits its last
        token. O(num_blocks).
        """
        total = 0
        for block, end in enumerate(self.block_ends(num_blocks)):
            if block == 0 or not self._to_append:
                appended = block + 1  # without a threshold one is appended every pass
            else:
                appended = self.period * (block - 1) + 1 + self._to_append
            total += end - appended + 1
        return float(Fraction(total, self.forwards(num_blocks)))
