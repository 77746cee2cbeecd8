"""What a request will turn out to need: prompt, blocks, and the step at which each block ends."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import attrs
import numpy as np

from dllm_sched.errors import ConfigError
from dllm_sched.sim._check import instance_of
from dllm_sched.sim.lengths import Fixed, Histogram, Lengths
from dllm_sched.theory._check import positive, whole
from dllm_sched.theory.ladder import GSM8K_BLOCKS, StepLadder

__all__ = ["Decoder", "EvenSteps", "LadderSteps", "Shapes", "Work", "gsm8k"]

_MOST_CACHED = 1 << 16


class Work(NamedTuple):
    """One request's whole need. A step is a forward pass that it takes part in."""

    prompt_len: int  #: tokens, >= 1
    max_new_tokens: int  #: tokens that it may generate, at least those of its blocks
    block_length: int  #: tokens
    num_blocks: int  #: blocks that it will generate
    num_steps: int  #: steps until it is finished
    block_ends: tuple[int, ...]  #: steps after which each block is finished; the last = num_steps


class Decoder(ABC):
    """How many steps blocks take. A value object with a ``block_length`` in tokens."""

    block_length: int

    @abstractmethod
    def block_ends(self, num_blocks: int) -> tuple[int, ...]:
        """Return, per block, after how many steps it is finished; ascending. O(num_blocks)."""

    @abstractmethod
    def blocks_in(self, num_steps: int) -> int:
        """Return the least number of blocks that take at least this many steps. O(1)."""


@attrs.frozen
class LadderSteps(Decoder):
    """D2F by its step ladder.

    Args:
        ladder: The decoder's settings; ours by default.
        exit_step: Count the published decoder's last pass, too, in which it finds that it is done
            and makes no forward: ``ladder.steps`` instead of ``ladder.forwards``.

    Source:
        ``theory.ladder``: exact if no token passes the confidence threshold, else the most.
    """

    ladder: StepLadder = attrs.field(factory=StepLadder, validator=instance_of(StepLadder))
    exit_step: bool = attrs.field(default=False, kw_only=True)

    @property
    def block_length(self) -> int:  # type: ignore[override]
        """Tokens of a block."""
        return self.ladder.block_length

    def block_ends(self, num_blocks: int) -> tuple[int, ...]:
        """Return the ladder's; the exit step is the last block's."""
        ends = self.ladder.block_ends(num_blocks)
        return (*ends[:-1], ends[-1] + 1) if self.exit_step else ends

    def blocks_in(self, num_steps: int) -> int:
        """Return the ladder's inverse."""
        beyond = num_steps - self.ladder.block_length - self.exit_step
        return 1 + max(0, math.ceil(beyond / self.ladder.period))


@attrs.frozen
class EvenSteps(Decoder):
    """Every block takes the same number of steps, one block after the other.

    Args:
        steps_per_block: >= 1; may be a fraction: ends are rounded up.
        block_length: Tokens, >= 1.
    """

    steps_per_block: float
    block_length: int = 32

    def __attrs_post_init__(self) -> None:
        positive(steps_per_block=self.steps_per_block)
        whole(block_length=self.block_length)
        if self.steps_per_block < 1:
            raise ConfigError(f"steps_per_block must be >= 1, got {self.steps_per_block!r}")

    def block_ends(self, num_blocks: int) -> tuple[int, ...]:
        """Return the multiples of ``steps_per_block``, rounded up."""
        return tuple(math.ceil(self.steps_per_block * n) for n in range(1, num_blocks + 1))

    def blocks_in(self, num_steps: int) -> int:
        """Return how many blocks it takes to fill the steps."""
        return max(1, math.ceil(num_steps / self.steps_per_block))


@attrs.frozen
class Shapes:
    """A population of requests: how long their prompts are, and how much they need.

    Args:
        size: How much a request needs, in ``unit``; draws beyond the budget are cut to it.
        unit: ``blocks``; ``tokens`` of output, rounded up to blocks; or ``steps``, e.g. from a log.
        prompt: Prompt lengths, tokens; independent of the size.
        decoder: Turns blocks into steps (and steps into blocks).
        max_new_tokens: Budget of every request; ``None``: each asks for exactly its blocks.

    Raises:
        ConfigError: If the budget holds no block.
    """

    size: Lengths = attrs.field(validator=instance_of(Lengths))
    unit: Literal["blocks", "tokens", "steps"] = attrs.field(default="blocks", kw_only=True)
    prompt: Lengths = attrs.field(default=Fixed(128), kw_only=True, validator=instance_of(Lengths))
    decoder: Decoder = attrs.field(
        factory=LadderSteps, kw_only=True, validator=instance_of(Decoder)
    )
    max_new_tokens: int | None = attrs.field(default=None, kw_only=True)
    _cache: dict[tuple[int, int], Work] = attrs.field(
        init=False, factory=dict, repr=False, eq=False
    )

    def __attrs_post_init__(self) -> None:
        if self.unit not in ("blocks", "tokens", "steps"):
            raise ConfigError(f"unit must be 'blocks', 'tokens' or 'steps', got {self.unit!r}")
        if self.max_new_tokens is not None:
            whole(self.decoder.block_length, max_new_tokens=self.max_new_tokens)

    def work(self, prompt_len: int, size: int) -> Work:
        """Return the work of one request, the same object for the same arguments. O(blocks)."""
        key = (prompt_len, size)
        work = self._cache.get(key)
        if work is None:
            if len(self._cache) >= _MOST_CACHED:
                self._cache.clear()
            work = self._cache[key] = self._make(prompt_len, size)
        return work

    def _make(self, prompt_len: int, size: int) -> Work:
        length = self.decoder.block_length
        if self.unit == "tokens":
            blocks = max(1, -(-size // length))
        elif self.unit == "steps":
            blocks = self.decoder.blocks_in(size)
        else:
            blocks = size
        wanted = blocks
        if self.max_new_tokens is not None:
            blocks = min(blocks, self.max_new_tokens // length)
        ends = self.decoder.block_ends(blocks)
        if self.unit == "steps" and blocks == wanted:
            # The last block ends where the log says.
            ends = (*(end for end in ends[:-1] if end < size), size)
            blocks = len(ends)
        budget = blocks * length if self.max_new_tokens is None else self.max_new_tokens
        return Work(prompt_len, budget, length, blocks, ends[-1], ends)

    def draw(self, rng: np.random.Generator, count: int) -> list[Work]:
        """Return the work of ``count`` requests. 0.1 us each when shapes repeat, else 2 us."""
        prompts = self.prompt.draw(rng, count).tolist()
        sizes = self.size.draw(rng, count).tolist()
        get = self._cache.get
        make = self.work
        return [
            get(key) or make(*key)  # a Work is never empty
            for key in zip(prompts, sizes, strict=True)
        ]

    def steps(self) -> dict[int, float]:
        """Return the exact histogram of steps, as ``theory.maxima`` takes it. O(sizes)."""
        values, probabilities = self.size.pmf()
        out: dict[int, float] = {}
        for size, probability in zip(values.tolist(), probabilities.tolist(), strict=True):
            if probability > 0:
                steps = self._make(1, size).num_steps
                out[steps] = out.get(steps, 0.0) + probability
        return out

    @property
    def mean_steps(self) -> float:
        """The exact mean number of steps of a request. O(sizes)."""
        steps = self.steps()
        return math.fsum(n * p for n, p in steps.items()) / math.fsum(steps.values())


def gsm8k(prompt: Lengths | None = None, *, exit_step: bool = False) -> Shapes:
    """Return the 100 GSM8K answers of the published run: 6 to 16 blocks, 290.39 steps in the mean.

    Args:
        prompt: Prompt lengths, tokens; 76 each by default, which is typical.
        exit_step: Count the decoder's last pass without a forward, too: 291.39 steps.

    Source:
        "Serving Masked Diffusion LLMs" (arXiv 2608.23807), public raw data; block_length 32,
        block_add_threshold 0.5, decoded_token_threshold 0.9, 512 new tokens.
    """
    ladder = StepLadder(32, block_add_threshold=0.5, decoded_token_threshold=0.9)
    return Shapes(
        Histogram(GSM8K_BLOCKS),
        prompt=Fixed(76) if prompt is None else prompt,
        decoder=LadderSteps(ladder, exit_step=exit_step),
        max_new_tokens=512,
    )
