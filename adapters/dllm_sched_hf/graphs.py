"""Steps as CUDA graphs: one launch for all kernels of a forward whose shape has come before.

A step is padded to a :class:`Bucket`, filled into buffers that never move, in one upload, and
replayed. Linear layers run over the tokens of all rows, packed as ever and padded at the end alone;
only attention is padded to rows of equally many queries. What does not pay or cannot be captured
runs without a graph, and is counted with the reason. How a function is captured is injected: tests
run the whole of this on a CPU, with a capture that does again what was done, operation by
operation.

Padding repeats what is there already: the last token fills up the packed axis and the queries, and
the last position to be predicted those. Copies write the same keys and values to the same places,
and nobody reads what they find, so no slot is needed for them.

**Not run on a GPU:** there was none to run it on. What is tested is the choice of buckets, that a
padded step decodes to the same tokens, that a body reads nothing but its fixed tensors, and every
fallback; not :func:`capture_cuda`, and no speed.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from torch import Tensor

from dllm_sched_hf.decoder import Floats, Ints, StepPlan
from dllm_sched_hf.modeling_llada import (
    PARTS,
    AttentionGroup,
    KVCache,
    LLaDAModelLM,
    PackedLayout,
    Parts,
)

__all__ = ["Bucket", "Capture", "GraphStats", "StepGraphs", "capture_cuda"]

Body = Callable[[], Tensor]
Capture = Callable[[Body, Any], Body]
"""Takes a function that works on fixed tensors, and returns one that repeats it. Second comes what
names the memory that all graphs of an engine may work in, for no two of them run at once."""

MAX_TOKENS = 4096
"""Tokens of the largest bucket: beyond, launches are a small part of a forward."""
MAX_PADDED_CELLS = 4096
"""Attention cells (query x key) of padded queries that a bucket may have per token. In LLaDA-8B so
many cost a sixth of a token's linear layers (4 against 24 ``d_model**2`` in multiply-adds)."""
MAX_GRAPHS = 256
_MAX_FAILURES = 3
_RETRY_STEPS = 256  # so rarely that a capture which runs out of memory again costs a percent or two
# Of buckets' tokens, and how many more a graph may have than the bucket that it serves: together,
# not one token in twenty is padding.
_STEPS_PER_OCTAVE, _MORE_TOKENS = 64, 1 / 30
_KEYS = 256  # buckets of keys are multiples of this

_log = logging.getLogger("dllm_sched")


@attrs.define
class GraphStats:
    """What became of an engine's steps.

    Attributes:
        captures: Graphs made.
        replays: Steps that ran as one.
        padding: Tokens that they sent through linear layers to fill up their buckets;
            ``num_tokens`` of the engine has only those that rows needed.
        fallbacks: Steps that did not, by reason: ``shared`` (a prompt is copied from another row),
            ``guided`` (second sequences), ``size`` (above ``MAX_TOKENS``), ``padding`` (rows too
            unlike: above ``MAX_PADDED_CELLS``), ``graphs`` (there are ``MAX_GRAPHS``), ``capture``
            (it failed for this bucket, or for three), ``memory`` (a capture ran out of it: after
            256 such steps captures are tried again).
    """

    captures: int = 0
    replays: int = 0
    padding: int = 0
    fallbacks: Counter[str] = attrs.field(factory=Counter)


class Bucket(NamedTuple):
    """The shape of a graph."""

    tokens: int  #: of all rows: what linear layers run over
    rows: int
    queries: int  #: per row, in attention
    keys: int  #: likewise
    wanted: int  #: positions to be predicted
    in_place: bool  #: its rows are the first slots of the cache: no key is gathered
    drawn: bool  #: tokens are drawn where temperatures are above 0

    @classmethod
    def of(
        cls, plan: StepPlan, max_rows: int, max_len: int, *, cached: bool, drawn: bool
    ) -> Bucket:
        """Return the smallest bucket that holds a step.

        Args:
            plan: The step's.
            max_rows: Of any step.
            max_len: Longest row.
            cached: Whether keys come from a cache; else they are the row's own new tokens.
            drawn: Whether any row has a temperature above 0.
        """
        rows = min(_step_up(len(plan.slots)), max_rows)
        first = min(_step_up(int(plan.slots.max()) + 1), max_rows)
        tokens = _step_up(len(plan.token), _STEPS_PER_OCTAVE)
        if rows == 1:  # not padded twice
            tokens = queries = min(tokens, max_len)
        else:
            queries = min(_step_up(max(int((plan.end - plan.start).max()), 16)), max_len)
        keys = min(-(-int(plan.length.max()) // _KEYS) * _KEYS, max_len) if cached else queries
        wanted = min(_step_up(max(len(plan.masked), 16)), tokens)
        return cls(tokens, rows, queries, keys, wanted, cached and first == rows, drawn)

    @property
    def excess(self) -> float:
        """Attention cells of padded queries per token."""
        return (self.rows * self.queries - self.tokens) * self.keys / self.tokens

    def holds(self, other: Bucket) -> bool:
        """Return whether a graph of this shape is to serve the steps of another as well.

        It has hardly more tokens, and nothing in attention or the head is more than twice as long.
        """
        most = (1 + _MORE_TOKENS) * other.tokens
        if not other.tokens <= self.tokens <= most or self[5:] != other[5:]:
            return False
        return all(x <= y <= 2 * x for x, y in zip(other[1:5], self[1:5], strict=True))


class StepGraphs:
    """The graphs of one engine, and the steps that run as one.

    Args:
        model: Its weights stay where they are.
        cache: The engine's, or None.
        bias: ``[max_len + 1, max_len]``; row u shows the first ``max_len - u`` positions.
        read_greedy: Logits ``[c, embedding_size]`` to what the engine copies back, ``[2, c]``.
        read_drawn: The same, given float64 ``[c]`` temperatures and ``[c]`` draws besides.
        chunk: Positions whose logits exist at once, >= 1.
        max_rows: Of any step.
        capture: How a function is captured.
        parts: For the model's ``forward_packed``.
    """

    def __init__(
        self,
        model: LLaDAModelLM,
        cache: KVCache | None,
        bias: Tensor,
        read_greedy: Callable[[Tensor], Tensor],
        read_drawn: Callable[[Tensor, Tensor, Tensor], Tensor],
        chunk: int,
        max_rows: int,
        capture: Capture,
        parts: Parts = PARTS,
    ) -> None:
        self.stats = GraphStats()
        self._model, self._parts, self._cache, self._bias = model, parts, cache, bias
        self._read_greedy, self._read_drawn, self._chunk = read_greedy, read_drawn, chunk
        self._max_rows, self._max_len = max_rows, bias.shape[1]
        self._capture = capture
        self._graphs: dict[Bucket, Body] = {}
        self._served: dict[Bucket, Bucket | str] = {}  # by which graph, or why by none
        self._num_failed = 0
        self._num_waiting = 0  # steps for want of memory, until captures are tried again
        on_gpu = bias.is_cuda
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        most = 8 * MAX_TOKENS + max_rows * (self._max_len + 1)
        self._inputs = torch.zeros(most, dtype=torch.int64, device=bias.device)  # of every graph
        # On the host, filled anew for each step: the one before has been copied back by then.
        self._staged = torch.empty(most, dtype=torch.int64, pin_memory=on_gpu)
        self._filled: Ints = self._staged.numpy()

    def run(
        self, plan: StepPlan, drawn: tuple[Floats, Floats] | None, against: str | None = None
    ) -> Tensor | None:
        """Run a step as a graph, if it can be one; O(padded tokens and queries) on the host.

        Args:
            plan: The step's.
            drawn: Temperature and draw of each masked position, ``[c]`` each; None = no row has a
                temperature above 0.
            against: Why the engine has it run without one, if so.

        Returns:
            What the engine copies back of the masked positions, ``[2, c]``, valid until the next
            run; None = run it without a graph.
        """
        served: Bucket | str | None = against if plan.guide is None else "guided"
        if served is None:
            cached = self._cache is not None
            bucket = Bucket.of(
                plan, self._max_rows, self._max_len, cached=cached, drawn=drawn is not None
            )
            served = self._served.get(bucket) or self._choose(bucket)
        if isinstance(served, Bucket):
            self._fill(plan, drawn, served)
            if served not in self._graphs:
                served = self._make(served)
        if isinstance(served, str):
            self.stats.fallbacks[served] += 1
            if served == "memory":
                self._wait_for_memory()
            return None
        self.stats.replays += 1
        self.stats.padding += served.tokens - len(plan.token)
        return self._graphs[served]()[:, : len(plan.masked)]

    def _choose(self, bucket: Bucket) -> Bucket | str:
        """Return the bucket whose graph is to serve this one's steps, or why there is none."""
        served: Bucket | str = bucket
        holding = [other for other in self._graphs if other.holds(bucket)]
        if holding:
            served = min(holding)
        elif bucket.tokens > MAX_TOKENS:
            served = "size"
        elif bucket.excess > MAX_PADDED_CELLS:
            served = "padding"
        elif len(self._graphs) >= MAX_GRAPHS:
            served = "graphs"
        elif self._num_failed >= _MAX_FAILURES:
            served = "capture"
        elif self._num_waiting:
            served = "memory"
        self._served[bucket] = served
        return served

    def _make(self, bucket: Bucket) -> Bucket | str:
        """Capture the step that has been filled in; return its bucket, or why there is no graph."""
        try:
            self._graphs[bucket] = self._capture(self._body(bucket), self._pool)
        except RuntimeError as error:
            reason = "memory" if _is_out_of_memory(error) else "capture"
            if reason == "capture":
                self._num_failed += 1
            else:
                self._num_waiting = _RETRY_STEPS
            self._served[bucket] = reason
            if reason == "capture" or not self.stats.fallbacks[reason]:
                _log.warning(
                    "%s could not be captured, its steps run without a graph%s: %r",
                    bucket,
                    " for want of memory, for now" if reason == "memory" else "",
                    error,
                )
            return reason
        self.stats.captures += 1
        return bucket

    def _wait_for_memory(self) -> None:
        """Count a step that had no graph for want of memory; after enough, forget who has none."""
        self._num_waiting -= 1
        if not self._num_waiting:
            self._served = {
                bucket: served for bucket, served in self._served.items() if served != "memory"
            }

    def _body(self, bucket: Bucket) -> Body:
        """Return the step of a bucket as a function of nothing but fixed tensors."""
        num_tokens, rows, queries, keys, num_wanted, in_place, drawn = bucket
        packed, pad, slots, wanted, *hot = _split(self._inputs, bucket)
        token, position, write_index, unseen, unpad = packed
        where: slice | Tensor = slots
        if self._cache is None:
            where = slice(0, num_tokens)
        elif in_place:
            where = slice(0, rows)
        alone = rows == 1  # as long as the packed axis
        temperature, draws = (x.view(torch.float64) for x in hot) if drawn else (wanted, wanted)

        def body() -> Tensor:
            seen = unseen if alone else unseen.index_select(0, pad.flatten())
            bias = self._bias[:, :keys].index_select(0, seen).view(rows, 1, queries, keys)
            to_rows, back = (None, None) if alone else (pad, unpad)
            group = AttentionGroup(0, num_tokens, where, keys, to_rows, back, rows, bias)
            write = None if self._cache is None else write_index
            layout = PackedLayout(position, write, (group,), wanted)
            hidden = self._model.forward_packed(token, layout, self._cache, self._parts)
            found = []
            for low in range(0, num_wanted, self._chunk):
                part = slice(low, low + self._chunk)
                logits = self._model.logits(hidden[part])
                if drawn:
                    found.append(self._read_drawn(logits, temperature[part], draws[part]))
                else:
                    found.append(self._read_greedy(logits))
            return torch.cat(found, 1)

        return body

    def _fill(self, plan: StepPlan, drawn: tuple[Floats, Floats] | None, bucket: Bucket) -> None:
        """Upload a step, padded to its bucket, in one copy."""
        num, num_rows, num_wanted = len(plan.token), len(plan.slots), len(plan.masked)
        packed, pad, slots, wanted, *hot = _split(self._filled, bucket)
        token, position, write_index, unseen, unpad = packed[:, :num]
        token[:] = plan.token
        position[:] = plan.position
        write_index[:] = plan.place
        np.subtract(self._max_len, plan.visible, out=unseen)
        if bucket.rows > 1:
            count = plan.end - plan.start
            offset = count.cumsum() - count
            place = plan.slots if bucket.in_place else np.arange(num_rows)
            np.add((place * bucket.queries - offset)[plan.row], np.arange(num), out=unpad)
            pad.fill(num - 1)
            pad[place] = np.minimum(np.arange(bucket.queries), count[:, None] - 1) + offset[:, None]
        packed[:, num:] = packed[:, num - 1 : num]
        slots[:num_rows] = plan.slots
        slots[num_rows:] = plan.slots[-1]
        wanted[:num_wanted] = plan.masked
        wanted[num_wanted:] = plan.masked[-1]
        if drawn is not None:  # what lies behind these draws what nobody reads
            for into, values in zip(hot, drawn, strict=True):
                into.view(np.float64)[:num_wanted] = values
        size = sum(_sizes(bucket))
        self._inputs[:size].copy_(self._staged[:size], non_blocking=True)


def capture_cuda(body: Body, pool: Any) -> Body:
    """Capture a function as a CUDA graph, after it has run a few times on a stream of its own.

    Not run on a GPU, see the module.

    Args:
        body: Works on fixed tensors.
        pool: Of ``torch.cuda.graph_pool_handle``: graphs that share it work in the same memory, so
            what one has found lasts until another runs.

    Raises:
        RuntimeError: If it does something that cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(2):
                body()
    finally:  # what has been launched reads the inputs and writes the cache, if it failed as well
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        found = body()

    def replay() -> Tensor:
        graph.replay()
        return found

    return replay


def _is_out_of_memory(error: RuntimeError) -> bool:
    # To end a capture that has failed may raise again.
    return any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__context__))


def _sizes(bucket: Bucket) -> tuple[int, ...]:
    num_drawn = bucket.wanted if bucket.drawn else 0
    queries = bucket.rows * bucket.queries
    return 5 * bucket.tokens, queries, bucket.rows, bucket.wanted, num_drawn, num_drawn


def _split(numbers: Any, bucket: Bucket) -> list[Any]:
    """Return what is where in the inputs of a graph, as views of a tensor or of an array.

    Returns:
        Per token (``[5, tokens]``) its id, its position, where its keys are written, how much it
        does not see and where its query is in the padded ones; ``[rows, queries]`` the token of
        each padded query; ``[rows]`` slots; ``[wanted]`` tokens to be predicted, and the
        temperature and the draw of each (empty where none is drawn).
    """
    edges = (0, *itertools.accumulate(_sizes(bucket)))
    packed, pad, *rest = (numbers[low:high] for low, high in itertools.pairwise(edges))
    return [packed.reshape(5, -1), pad.reshape(bucket.rows, -1), *rest]


def _step_up(number: int, steps: int = 2) -> int:
    """Return the next number no less than this one, of so many (a power of two) per octave."""
    step = max(1, (1 << (number - 1).bit_length()) // (2 * steps))
    return -(-number // step) * step
