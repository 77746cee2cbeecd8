"""Memory of logits: a diffusion step reads the whole vocabulary at every open position."""

from __future__ import annotations

from collections.abc import Iterable

from dllm_sched.theory._check import whole

__all__ = ["logits_bytes", "logits_sub_batches"]


def logits_bytes(*, num_rows: int, length: int, vocab_size: int, value_bytes: int = 2) -> int:
    """Return the bytes of all logits of a forward: ``rows * length * vocabulary * bytes``. O(1).

    Args:
        num_rows: Rows, >= 1.
        length: Positions of each, >= 1.
        vocab_size: >= 1.
        value_bytes: Bytes of a logit, >= 1.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        "dLLM-Serve" (arXiv 2512.17077) and its public code.

    >>> logits_bytes(num_rows=1, length=512, vocab_size=126464)
    129499136
    """
    whole(num_rows=num_rows, length=length, vocab_size=vocab_size, value_bytes=value_bytes)
    return num_rows * length * vocab_size * value_bytes


def logits_sub_batches(
    lengths: Iterable[int], *, vocab_size: int, limit_bytes: int, value_bytes: int = 2
) -> tuple[tuple[int, int], ...]:
    """Cut a batch into runs of rows whose logits fit in a limit, computed one after the other.

    Each run is as long as fits; a row that does not fit by itself is a run of its own. No cut has
    fewer runs. O(rows).

    Args:
        lengths: Positions of each row, in order, >= 1.
        vocab_size: >= 1.
        limit_bytes: Of the logits of one run, >= 1.
        value_bytes: Bytes of a logit, >= 1.

    Returns:
        ``(start, stop)`` of each run.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        "dLLM-Serve" (arXiv 2512.17077) decomposes the logits so; that the cut is greedy is our
        own choice.

    >>> logits_sub_batches([512] * 5, vocab_size=126464, limit_bytes=2 * 129499136)
    ((0, 2), (2, 4), (4, 5))
    """
    whole(vocab_size=vocab_size, limit_bytes=limit_bytes, value_bytes=value_bytes)
    runs: list[tuple[int, int]] = []
    start = stop = used = 0
    for stop, length in enumerate(lengths):  # wanted after the loop
        whole(**{"each of lengths": length})
        need = length * vocab_size * value_bytes
        if stop > start and used + need > limit_bytes:
            runs.append((start, stop))
            start, used = stop, 0
        used += need
    if used:
        runs.append((start, stop + 1))
    return tuple(runs)
