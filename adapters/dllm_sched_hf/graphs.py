"""Steps as CUDA graphs: one launch for all kernels of a forward whose shape has come before.

A step is padded to a *bucket* of (rows, tokens per row, keys, wanted positions), filled into
buffers that never move, in one upload, and replayed. What does not pay or cannot be captured runs
as ever, and is counted with the reason. How a function is captured is injected: tests run the whole
of this on a CPU with a capture that only calls the function again.

Padding repeats what is there already: a row's last token fills up its row, the last row fills up
the batch. The copies write the same keys and values to the same places, and nobody reads what they
find, so no slot is needed for them.

**Not run on a GPU:** there was none to run it on. What is tested is the choice of buckets, that a
padded step decodes to the same tokens, and every fallback; not :func:`capture_cuda`, and no speed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dllm_sched_hf.decoder import StepPlan
from dllm_sched_hf.modeling_llada import AttentionGroup, KVCache, LLaDAModelLM, PackedLayout

__all__ = ["Bucket", "Capture", "GraphStats", "StepGraphs", "capture_cuda"]

Body = Callable[[], Tensor]
Capture = Callable[[Body], Body]
"""Takes a function that works on fixed tensors, and returns one that repeats it."""

MAX_TOKENS = 4096
"""Padded tokens of the largest bucket: beyond, launches are a small part of a forward."""
MAX_PADDING = 2.0
"""Padded tokens per token that a step may have: beyond, it runs without padding."""
MAX_GRAPHS = 64
_MAX_FAILURES = 3
_KEYS = 256  # buckets of keys are multiples of this

_log = logging.getLogger("dllm_sched")


@attrs.define
class GraphStats:
    """What became of an engine's steps.

    Attributes:
        captures: Graphs made.
        replays: Steps that ran as one.
        padding: Tokens that they sent through forwards to fill up their buckets;
            ``num_tokens`` of the engine has only those that rows needed.
        fallbacks: Steps that did not, by reason: ``draws`` (temperature above 0), ``shared`` (a
            prompt is copied from another row), ``guided`` (second sequences), ``size`` (above
            ``MAX_TOKENS``), ``padding`` (rows too unlike), ``graphs`` (there are ``MAX_GRAPHS``),
            ``capture`` (it failed for this bucket).
    """

    captures: int = 0
    replays: int = 0
    padding: int = 0
    fallbacks: Counter[str] = attrs.field(factory=Counter)


class Bucket(NamedTuple):
    """The shape of a graph."""

    rows: int
    tokens: int  #: per row
    keys: int
    wanted: int  #: positions to be predicted

    @classmethod
    def of(cls, plan: StepPlan, max_rows: int, max_len: int, *, cached: bool) -> Bucket:
        """Return the smallest bucket that holds a step.

        Args:
            plan: The step's.
            max_rows: Of any step.
            max_len: Longest row.
            cached: Whether keys come from a cache; else they are the row's own new tokens.
        """
        rows = min(_step_up(len(plan.slots), 1), max_rows)
        tokens = min(_step_up(int((plan.end - plan.start).max()), 16), max_len)
        keys = min(-(-int(plan.length.max()) // _KEYS) * _KEYS, max_len) if cached else tokens
        wanted = min(1 << max(5, (len(plan.masked) - 1).bit_length()), rows * tokens)
        return cls(rows, tokens, keys, wanted)


class _Graph(NamedTuple):
    inputs: Tensor
    replay: Body


class StepGraphs:
    """The graphs of one engine, and the steps that run as one.

    Args:
        model: Its weights stay where they are.
        cache: The engine's, or None.
        bias: ``[max_len + 1, max_len]``; row u shows the first ``max_len - u`` positions.
        read_out: Logits ``[c, embedding_size]`` to what the engine copies back, ``[2, c]``.
        max_rows: Of any step.
        capture: How a function is captured.
    """

    def __init__(
        self,
        model: LLaDAModelLM,
        cache: KVCache | None,
        bias: Tensor,
        read_out: Callable[[Tensor], Tensor],
        max_rows: int,
        capture: Capture,
    ) -> None:
        self.stats = GraphStats()
        self._model, self._cache, self._bias = model, cache, bias
        self._read_out = read_out
        self._max_rows, self._max_len = max_rows, bias.shape[1]
        self._capture = capture
        self._graphs: dict[Bucket, _Graph | None] = {}  # None = it could not be captured
        self._num_failed = 0
        on_gpu = bias.is_cuda
        most = 4 * MAX_TOKENS + max_rows + MAX_TOKENS
        # On the host, filled anew for each step: the one before has been copied back by then.
        self._staged = torch.empty(most, dtype=torch.int64, pin_memory=on_gpu)

    def run(self, plan: StepPlan, against: str | None = None) -> Tensor | None:
        """Run a step as a graph, if it can be one; O(padded tokens) on the host.

        Args:
            plan: The step's.
            against: Why the engine has it run without one, if so.

        Returns:
            What ``read_out`` gives of the masked positions, ``[2, c]``, valid until the next run;
            None = run it without a graph.
        """
        bucket = Bucket.of(plan, self._max_rows, self._max_len, cached=self._cache is not None)
        reason = against or self._refusal(plan, bucket)
        if reason is None and bucket not in self._graphs:
            self._graphs[bucket] = self._make(plan, bucket)
        graph = None if reason else self._graphs[bucket]
        if graph is None:
            self.stats.fallbacks[reason or "capture"] += 1
            return None
        self._fill(plan, bucket, graph.inputs)
        self.stats.replays += 1
        self.stats.padding += bucket.rows * bucket.tokens - len(plan.token)
        return graph.replay()[:, : len(plan.masked)]

    def _refusal(self, plan: StepPlan, bucket: Bucket) -> str | None:
        """Return why a step is not to run as a graph, or None."""
        padded, new = bucket.rows * bucket.tokens, bucket not in self._graphs
        reasons = {
            "guided": plan.guide is not None,
            "size": padded > MAX_TOKENS,
            "padding": padded > MAX_PADDING * max(len(plan.token), 16 * bucket.rows),
            "graphs": new and len(self._graphs) >= MAX_GRAPHS,
            "capture": new and self._num_failed >= _MAX_FAILURES,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _make(self, plan: StepPlan, bucket: Bucket) -> _Graph | None:
        inputs = torch.zeros(_num_inputs(bucket), dtype=torch.int64, device=self._bias.device)
        self._fill(plan, bucket, inputs)  # what is captured is run before, to warm up
        try:
            replay = self._capture(self._body(bucket, inputs))
        except RuntimeError as error:
            self._num_failed += 1
            _log.warning(
                "%s could not be captured, its steps run without a graph: %r", bucket, error
            )
            return None
        self.stats.captures += 1
        return _Graph(inputs, replay)

    def _body(self, bucket: Bucket, inputs: Tensor) -> Body:
        """Return the step of a bucket as a function of nothing but fixed tensors."""
        rows, tokens, keys, _ = bucket
        token, position, write_index, unseen, slots, wanted = inputs.split(_sizes(bucket))
        where: slice | Tensor = slice(0, rows * tokens)
        if self._cache is not None:
            where = slots

        def body() -> Tensor:
            bias = self._bias[:, :keys].index_select(0, unseen).view(rows, 1, tokens, keys)
            group = AttentionGroup(0, rows * tokens, where, keys, None, None, rows, bias)
            write = None if self._cache is None else write_index
            layout = PackedLayout(position, write, (group,), wanted)
            hidden = self._model.forward_packed(token, layout, self._cache)
            return self._read_out(self._model.logits(hidden))

        return body

    def _fill(self, plan: StepPlan, bucket: Bucket, inputs: Tensor) -> None:
        """Upload a step, padded to its bucket, in one copy."""
        count = plan.end - plan.start
        offset = count.cumsum() - count
        row = np.minimum(np.arange(bucket.rows), len(count) - 1)
        at = np.minimum(np.arange(bucket.tokens), count[row, None] - 1) + offset[row, None]
        at = at.ravel()
        position = plan.position[at]
        slots = plan.slots[row]
        wanted = np.full(bucket.wanted, plan.masked[0])
        wanted[: len(plan.masked)] = plan.masked
        of = plan.row[wanted]
        staged = self._staged[: len(inputs)]
        filled: NDArray[Any] = staged.numpy()
        np.concatenate(
            (
                plan.token[at],
                position,
                np.repeat(slots * self._max_len, bucket.tokens) + position,
                self._max_len - plan.visible[at],
                slots,
                of * bucket.tokens + wanted - offset[of],
            ),
            out=filled,
        )
        inputs.copy_(staged, non_blocking=True)


def capture_cuda(body: Body) -> Body:
    """Capture a function as a CUDA graph, after it has run a few times on a stream of its own.

    Not run on a GPU, see the module.

    Raises:
        RuntimeError: If it does something that cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = body()

    def replay() -> Tensor:
        graph.replay()
        return found

    return replay


def _sizes(bucket: Bucket) -> list[int]:
    tokens = bucket.rows * bucket.tokens
    return [tokens, tokens, tokens, tokens, bucket.rows, bucket.wanted]


def _num_inputs(bucket: Bucket) -> int:
    return sum(_sizes(bucket))


def _step_up(number: int, least: int) -> int:
    """Return the next of 1, 2, 3, 4, 6, 8, 12, 16, ... that is no less than either."""
    number = max(number, least)
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if power >= 4 and number <= power * 3 // 4 else power
