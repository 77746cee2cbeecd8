"""The engine: takes a ``StepBatch``, runs one forward for all its rows, returns a ``StepOutcome``.

Per step: a few small index uploads (one, where it runs as a graph), one forward, one copy back of
(confidence, token) per masked position. Everything else is integer work on the host (``decoder``):
it needs the tokens there in any case, to plan, to stream and to notice ends, and ``launch`` and
``collect`` hide the scheduler behind the forward. Not thread-safe: one loop owns it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import Tensor, nn

from dllm_sched.batch import (
    NO_KNOBS,
    NOTHING,
    BlockBoundary,
    Knobs,
    PhaseChange,
    Released,
    Row,
    RowFailed,
    RowFinished,
    StepBatch,
    StepOutcome,
)
from dllm_sched.capacity import Capacity
from dllm_sched.errors import ConfigError, EngineProtocolError
from dllm_sched.request import FinishReason, Phase, Request
from dllm_sched.runtime.engine import Progress, StepFailedError
from dllm_sched_hf.d2f import D2F, D2FRequest
from dllm_sched_hf.decoder import (
    Bools,
    Commits,
    Decoder,
    DecodeRequest,
    Floats,
    Ints,
    StepPlan,
    as_tuple,
    check_knobs,
    check_token_ids,
    is_int,
    shown,
    uniform_draws,
)
from dllm_sched_hf.fast_dllm import FastDLLM, FastDLLMRequest
from dllm_sched_hf.graphs import Capture, StepGraphs
from dllm_sched_hf.llada import LLaDA, LLaDARequest
from dllm_sched_hf.loops import compiled
from dllm_sched_hf.modeling_llada import (
    PARTS,
    AttentionGroup,
    KVCache,
    LLaDAModelLM,
    PackedLayout,
    compiled_parts,
    warm_up,
)

__all__ = [
    "D2FEngine",
    "D2FOutput",
    "D2FRequest",
    "DecodeOutput",
    "DecodingEngine",
    "DeviceLostError",
    "FastDLLMEngine",
    "FastDLLMRequest",
    "LLaDAEngine",
    "LLaDARequest",
    "NonFiniteLogitsError",
    "StepOutOfMemoryError",
    "default_stop_ids",
]

LLADA_END_OF_TURN_ID = 126348
"""End of turn in the published LLaDA vocabulary; the config names only end of text."""

_LLADA_MASK_ID = 126336

MAX_STOP_IDS = 256
"""A request's stop ids are compared with every committed token, for all rows at once."""

# Padded attention cells (query x key) worth less than the calls that a further group costs.
_SPLIT_CELLS = {"cpu": 2**12, "cuda": 2**19}

# Logits in flight at once while confidences are read: 32 M float32 values are 128 MiB.
_LOGITS_PER_CHUNK = 2**25
# Of those, in float32 or float64 at once.
_WIDE_PER_CHUNK = 2**23

# In which confidences are computed, and what takes their bits.
_NARROW, _WIDE = (torch.float32, torch.int32), (torch.float64, torch.int64)

_PHASES = (Phase.PREFILL, Phase.REFRESH, Phase.REUSE)
_CODES = {phase: code for code, phase in enumerate(_PHASES)}
_AGAIN_OR_NOT = _CODES[Phase.REFRESH], _CODES[Phase.REUSE]


class NonFiniteLogitsError(RuntimeError):
    """One row's logits were NaN or infinite; its neighbours are not concerned."""


class StepOutOfMemoryError(StepFailedError):
    """A forward did not fit in memory. No row has advanced; says how to go on.

    The half of the rows with the least progress starts again later, under a lower limit; a lone row
    fails, because it never will fit.
    """

    def __init__(self, slots: Sequence[int]) -> None:
        """Decide who goes.

        Args:
            slots: The step's slots, most progress first; at least one.
        """
        keep = len(slots) // 2
        if keep:
            advice = f"restart {len(slots) - keep} rows and go on with at most {keep}"
        else:
            advice = f"the row in slot {slots[0]} does not fit alone: fail it"
        super().__init__(
            f"out of memory in a step of {len(slots)} rows; nobody has advanced: {advice}",
            restart=slots[keep:] if keep else (),
            fail=() if keep else slots,
            max_num_seqs=max(1, keep),
        )


class DeviceLostError(StepFailedError):
    """The device takes no more work: an error from which its context does not recover.

    Every row of the step fails with this, and so does every later step; other requests wait for an
    engine in a new process.
    """

    def __init__(self, slots: Sequence[int], reason: BaseException) -> None:
        """Say what the device said.

        Args:
            slots: The step's.
            reason: What it raised first.
        """
        first_line = str(reason).partition("\n")[0]
        super().__init__(
            f"the device is lost ({first_line}): this engine runs no more steps; start a new "
            "process, for the memory of this one's context cannot be used again",
            fail=slots,
        )


class DecodeOutput(NamedTuple):
    """What a finished row hands to ``Finished.output``."""

    tokens: tuple[int, ...]  #: the answer, without the prompt; cut as the request asked
    num_forwards: int  #: forwards that this row took part in
    num_blocks: int  #: blocks that were opened
    first_stop_step: int | None  #: the row's forward (from 1) that committed its first stop id
    trace: tuple[dict[str, Any], ...] | None = None  #: one entry per forward, if the engine traces


D2FOutput = DecodeOutput
"""Its name from the time when D2F was the only decoder."""


def default_stop_ids(model: LLaDAModelLM) -> tuple[int, ...]:
    """Return end of text and, in the published LLaDA vocabulary, end of turn."""
    config = model.config
    published = config.mask_token_id == _LLADA_MASK_ID and config.vocab_size > LLADA_END_OF_TURN_ID
    return (config.eos_token_id, *((LLADA_END_OF_TURN_ID,) if published else ()))


class _Holder(Protocol):
    """Holds a slot."""

    request: Any


_T = TypeVar("_T")


@attrs.define(eq=False)
class _Tenant:
    """What the engine remembers of the request in a slot, beside what its decoder knows."""

    request: DecodeRequest
    trace: list[dict[str, Any]] | None
    knobs: Knobs | None = None  #: last seen


_Found = Tensor | tuple[NDArray[Any], Ints]
"""Confidence and token of every masked position: bits ``[2, c]`` on the device, or two arrays."""


_LaidOut = tuple[Ints, Tensor, Tensor | None, tuple[AttentionGroup, ...]]


class _Flight(NamedTuple):
    """A step whose forward was started."""

    batch: StepBatch
    failed: list[RowFailed]
    plan: StepPlan | None  #: None = no row is left to run
    found: _Found | None
    began: float
    num_shared: int = 0  #: tokens of prompts that rows skip


class _Kept(NamedTuple):
    """A preempted row's progress, off the device: slots are preempted to free its memory."""

    state: tuple[Any, ...]
    cache: Tensor | None  #: keys and values, ``[n_layers, cached, 2 * n_kv_heads, head_dim]``
    trace: list[dict[str, Any]] | None


class DecodingEngine:
    """Batched decoding of LLaDA by one kind of decoder, behind the scheduler's step protocol.

    Rows are ragged: they join late, leave early, differ in length, settings and temperature, may
    sit out a step, and are kept or restarted when preempted. A row attends to its own tokens only,
    so its tokens depend on its neighbours only where two choices are so close that rounding decides
    between them: products of another number of tokens sum in another order. A subclass names its
    decoder.

    Args:
        model: A :class:`LLaDAModelLM`, or a PEFT model around one; runs where its weights are and
            in their dtype, autocast or not. It is put into ``eval`` mode. Mode, dtype and device
            must stay what they are, which is looked at when rows join. Between two steps weights
            may change in place (``copy_``, ``load_state_dict``); after a parameter was given other
            data (``.data =``, ``assign=True``), or a LoRA was attached, call
            ``model.join_weights()``.
        max_num_seqs: Slots, >= 1.
        max_len: Tokens a slot can hold, prompt and whole blocks; None = the model's window. The KV
            cache takes ``2 * n_layers * max_num_seqs * max_len * n_kv_heads * head_dim`` values
            (nothing for a decoder that reuses nothing).
        stop_token_ids: For requests that name none, under the same rules; None =
            :func:`default_stop_ids`.
        trace: Attach to every output one entry per forward (for parity; costs Python time).
        report_masked: Fill ``StepOutcome.masked_remaining``.
        clock: Seconds; if given, ``forward_s`` accumulates the time inside the model's forward.
            On CUDA that is launch to results, on CPU embedding to logits.
        capture: How steps are captured as graphs (``dllm_sched_hf.graphs``): ``capture_cuda``; None
            = steps run without. What became of them is in ``graph_stats``.
        compile_forward: Run what a block does before and after attention through
            ``torch.compile``, which needs a compiler and a minute at first.

    Raises:
        ConfigError: If an argument is out of its range; names it.

    Attributes:
        num_forwards: Forwards so far, each for all rows of its step.
        num_tokens: Tokens that went through them.
        num_shared_tokens: Tokens of prompts that did not: another row of the group had them.
        forward_s: Seconds inside them; 0 without a clock.
        max_num_seqs: Slots.
        max_len: Tokens a slot can hold.
        mask_token_id: Never committed, refused in prompts.
        vocab_size: Ids that can be committed.
        stop_token_ids: For requests that name none.
        graph_stats: Captures, replays and fallbacks by reason; None without ``capture``.
    """

    decoder_type: ClassVar[type[Decoder]]

    def __init__(
        self,
        model: nn.Module,
        *,
        max_num_seqs: int,
        max_len: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
        trace: bool = False,
        report_masked: bool = False,
        clock: Callable[[], float] | None = None,
        capture: Capture | None = None,
        compile_forward: bool = False,
    ) -> None:
        base = _checked_base(model, max_num_seqs, max_len, clock)
        for name, flag in (
            ("trace", trace),
            ("report_masked", report_masked),
            ("compile_forward", compile_forward),
        ):
            if not isinstance(flag, bool):
                raise ConfigError(f"{name} must be True or False, got {shown(flag)}")
        self.model = base.eval()
        base.join_weights()
        self.max_num_seqs = max_num_seqs
        self.max_len = base.config.max_sequence_length if max_len is None else max_len
        self.mask_token_id = base.config.mask_token_id
        self.vocab_size = base.config.vocab_size
        self.stop_token_ids: tuple[int, ...] = default_stop_ids(base)
        if stop_token_ids is not None:
            self.stop_token_ids = as_tuple(stop_token_ids)
            self._check_stop_ids("stop_token_ids", self.stop_token_ids)
        self.num_forwards = self.num_tokens = self.num_shared_tokens = 0
        self.forward_s = 0.0
        self._clock, self._trace, self._report_masked = clock, trace, report_masked
        weight = base.get_input_embeddings().weight
        self._device, self._dtype = weight.device, weight.dtype
        self._decoder = decoder = self.decoder_type(max_num_seqs, self.max_len, self.mask_token_id)
        self._cache: KVCache | None = None
        if decoder.caches:
            self._cache = KVCache.allocate(
                base.config, max_num_seqs, self.max_len, device=weight.device, dtype=weight.dtype
            )
        self._layers = () if self._cache is None else self._cache.layers
        self._bias = _bias_rows(self.max_len, weight)
        self._split_cells = _SPLIT_CELLS.get(weight.device.type, _SPLIT_CELLS["cuda"])
        self._on_host = on_host = weight.is_cpu
        self._pads = not on_host  # few large calls of rows padded to each other
        parts = compiled_parts() if compile_forward else PARTS
        loops = on_host and weight.dtype == torch.float32 and not compile_forward
        self._parts = parts._replace(loops=loops)
        narrow = decoder.confidence_type is np.float32
        self._precision, self._bits = _NARROW if narrow else _WIDE
        self._graphs: StepGraphs | None = None
        if capture is not None:
            self._graphs = StepGraphs(
                base,
                self._cache,
                self._bias,
                self._read_greedy,
                self._read_drawn,
                chunk=max(1, _LOGITS_PER_CHUNK // self.vocab_size),
                max_rows=max_num_seqs,
                capture=capture,
                parts=parts,
            )
        self.graph_stats = None if self._graphs is None else self._graphs.stats
        # The step that runs, or why it does not.
        self._flight: _Flight | BaseException | None = None
        self._behind: StepBatch | None = None
        self._lost: RuntimeError | None = None
        self._phase = np.zeros(max_num_seqs, np.int64)  # of each row's coming step, as last told
        # Slots whose rows have ended, until others join: steps planned ahead still name them.
        self._over: set[int] = set()
        self._tenants: list[_Tenant | None] = [None] * max_num_seqs
        self._kept: dict[Request, _Kept] = {}
        self._last_rows: tuple[Row, ...] | None = None
        # Rows that are known to be in their slots, by slot, and the batch's knobs in force there.
        self._known: dict[int, Row] = {}
        self._known_knobs = NO_KNOBS
        self._slots: Ints = np.empty(0, np.int64)
        self._reusing: Ints | None = None  # slots of which no phase will change, if found already
        # Places of the last step that ran without a graph, and what they make of its layout.
        self._laid_out: _LaidOut = self._slots, torch.empty(0), None, ()
        _warm_up(self.decoder_type)

    def __getstate__(self) -> object:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: its rows and its cache stay "
            "where they are; build another one on the model"
        )

    # -- requests

    def request(self, id: str, prompt: Sequence[int], **fields: Any) -> Any:
        """Return a request of the decoder's type that this engine can run.

        Raises:
            ConfigError: If a field is out of range, or the request does not suit the model.
        """
        request = self.decoder_type.request_type(id, prompt=prompt, **fields)
        self.check(request)
        return request

    def check(self, request: Request) -> None:
        """Raise if this engine cannot run the request. O(prompt).

        Raises:
            ConfigError: Wrong type, mask id or unknown id in the prompt or among the stop ids, or a
                window that does not fit after rounding to blocks; names the field and the fix.
        """
        self._checked(request)

    def _checked(self, request: Request) -> DecodeRequest:
        wanted = self.decoder_type.request_type
        if not isinstance(request, wanted):
            raise ConfigError(
                f"request {request.id!r}: must be a {wanted.__name__}, got {type(request).__name__}"
            )
        where = f"request {request.id!r}"
        if self.mask_token_id in request.prompt:
            raise ConfigError(
                f"{where}: prompt holds the mask id {self.mask_token_id} at position "
                f"{request.prompt.index(self.mask_token_id)}: remove it, it stands for tokens to "
                "be decoded"
            )
        if max(request.prompt) >= self.vocab_size:
            raise ConfigError(
                f"{where}: prompt holds id {max(request.prompt)}, but the model's vocabulary has "
                f"{self.vocab_size} ids"
            )
        if request.stop_token_ids is not None:
            self._check_stop_ids(f"{where}: stop_token_ids", request.stop_token_ids)
        if request.max_total_tokens > self.max_len:
            raise ConfigError(
                f"{where}: prompt of {request.prompt_len} and max_new_tokens "
                f"{shown(request.max_new_tokens)} in {shown(request.max_blocks)} blocks of "
                f"{shown(request.block_length)} need {shown(request.max_total_tokens)} "
                f"positions, but max_len is {self.max_len}: shorten the prompt, or lower "
                "max_new_tokens or block_length"
            )
        return request

    def _check_stop_ids(self, where: str, ids: tuple[int, ...]) -> None:
        check_token_ids(where, ids, self.vocab_size - 1)
        if self.mask_token_id in ids:
            raise ConfigError(
                f"{where} holds the mask id {self.mask_token_id}, which is never committed: remove "
                "it"
            )
        if len(ids) > MAX_STOP_IDS:
            raise ConfigError(f"{where} holds {len(ids)} ids: at most {MAX_STOP_IDS} are taken")

    def capacity(self) -> Capacity:
        """Return what a scheduler may put on this engine: slots, with memory set aside for each."""
        return Capacity(
            max_num_seqs=self.max_num_seqs, whole_prefill=self.decoder_type.whole_prefill
        )

    def progress(self, slot: int, start: int = 0) -> Progress:
        """Say how the row's answer stands from position ``start`` of it on, for streaming.

        Cut like the final answer will be. What is committed ends before the first masked position;
        tokens behind it are final, but told as provisional until the gap has closed. O(answer).

        Raises:
            ConfigError: If this engine has no such slot, or ``start`` is no int >= 0.
            EngineProtocolError: If no row is in ``slot``.
        """
        tenant = tenant_in(self._tenants, slot, start)
        decoder = self._decoder
        tokens = decoder.generated(slot)[: tenant.request.max_new_tokens]
        if tenant.request.truncate_at_stop:
            tokens = tokens[: int(decoder.stop_at[slot]) - tenant.request.prompt_len]
        masked = tokens == self.mask_token_id
        gap = max(start, int(masked.argmax())) if masked.any() else len(tokens)
        rest = (None if token == self.mask_token_id else token for token in tokens[gap:].tolist())
        return Progress(tuple(tokens[start:gap].tolist()), tuple(rest))

    # -- the step protocol

    def run(self, batch: StepBatch) -> StepOutcome:
        """Run one denoising step for the rows of ``batch``.

        Args:
            batch: Any selection of the rows that hold a slot; ``batch.joined`` are placed first.

        Returns:
            Rows that finished (``output`` is a :class:`DecodeOutput`), whose finished blocks grew,
            whose next forward is of another kind, or that failed alone: an unsuitable request, an
            unknown or out-of-range knob of its own, NaN or infinite logits. O(tokens) plus a
            constant number of small host operations.

        Raises:
            StepOutOfMemoryError: The forward did not fit; nobody has advanced.
            DeviceLostError: The device takes no more work, now and from here on.
            EngineProtocolError: A row is not in its slot, is named twice, or cannot be placed or
                resumed where it joins; the model has left ``eval`` mode, its dtype or its device
                when rows join; or a step that was launched was not collected.
            ConfigError: A knob of the whole batch is unknown or out of range.
        """
        if self._flight is not None:
            raise EngineProtocolError("run: a step was launched: collect it first")
        self.launch(batch)
        return self.collect()

    def launch(self, batch: StepBatch) -> None:
        """Start a step, without waiting for the device; or take it, if one is running.

        Which tokens go through a forward depends on what the one before it has found. So a step
        that is launched while another runs starts inside :meth:`collect` of that one, as soon as
        its results are there: before they are told, reported and scheduled upon. Rows that ended
        in the one are left out of the other.

        Raises:
            EngineProtocolError: If two steps are on their way.
            Exception: What :meth:`run` raises. The step was not taken then.
        """
        if self._flight is None:
            self._flight = self._begin(batch)
        elif self._behind is None:
            self._behind = batch
        else:
            raise EngineProtocolError("launch: two steps are on their way: collect one")

    def collect(self) -> StepOutcome:
        """Wait for the oldest step that was launched and return what happened; as :meth:`run`.

        Raises:
            EngineProtocolError: If no step was launched.
            Exception: What :meth:`run` raises. The step behind it is forgotten then.
        """
        flight, behind = self._flight, self._behind
        if flight is None:
            raise EngineProtocolError("collect: no step was launched")
        self._flight = self._behind = None
        if isinstance(flight, BaseException):
            raise flight
        outcome = self._complete(flight)
        if behind is not None:
            try:
                self._flight = self._begin(behind)
            except BaseException as error:  # noqa: BLE001 - told when that step is collected
                self._flight = error
        return outcome

    def _begin(self, batch: StepBatch) -> _Flight:
        """Place who joins, plan the step and start its forward."""
        if self._lost is not None:
            raise DeviceLostError([row.slot for row in batch.rows], self._lost)
        new = self._check(batch)
        try:
            failed = self._join(batch.joined)
        except BaseException as error:
            self._tell_fault(error, batch, np.array([row.slot for row in batch.rows]))
            raise
        slots = self._select(batch, new, failed)
        if len(slots) == 0:
            return _Flight(batch, failed, None, None, 0.0)
        try:
            copied = self._share_prompts(batch.joined, slots)
            plan, ranges = self._group(slots)
            began = self._clock() if self._clock else 0.0
            with torch.inference_mode(), _without_autocast(self._device.type):
                found = self._start(plan, ranges, copied)
        except BaseException as error:
            self._tell_fault(error, batch, slots)
            raise
        return _Flight(batch, failed, plan, found, began, 0 if copied is None else len(copied[0]))

    def _complete(self, flight: _Flight) -> StepOutcome:
        """Fetch what the forward has found, commit it and say what happened."""
        batch, failed, plan, found, began, num_shared = flight
        if plan is None or found is None:
            self._over.update(row.slot for row in failed)
            masked = (0,) * len(batch.rows) if self._report_masked else None
            return StepOutcome(failed=tuple(failed), masked_remaining=masked)
        if isinstance(found, Tensor):
            try:
                host = found.cpu().numpy()  # the step's only copy back
            except BaseException as error:
                self._tell_fault(error, batch, plan.slots)
                raise
            found = host[0].view(self._decoder.confidence_type), host[1].astype(np.int64)
        confidence, token = found
        if self._clock and not self._on_host:  # only results tell that it is over
            self.forward_s += self._clock() - began
        self.num_forwards += 1
        self.num_tokens += len(plan.token)
        self.num_shared_tokens += num_shared
        lost = self._fail(plan, confidence, failed)
        commits = self._decoder.commit(plan, confidence, token)
        if self._trace:
            entries = self._decoder.trace(plan, commits, token)
            for slot, entry in zip(plan.slots.tolist(), entries, strict=True):
                tenant = self._tenants[slot]
                if tenant is not None and tenant.trace is not None:
                    tenant.trace.append(entry)
        return self._outcome(batch, plan, commits, lost, failed)

    def _tell_fault(self, error: BaseException, batch: StepBatch, slots: Ints) -> None:
        """Raise what the device raised as who is concerned and how to go on, if that is known."""
        self._share_nothing(slots)
        if isinstance(error, RuntimeError) and _is_out_of_memory(error):
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            progress = np.argsort(-self._decoder.num_steps[slots], kind="stable")
            raise StepOutOfMemoryError(slots[progress].tolist()) from error
        if isinstance(error, RuntimeError) and _is_lost(error):
            self._lost = error
            raise DeviceLostError([row.slot for row in batch.rows], error) from error

    def release(self, released: Sequence[Released]) -> None:
        """Take back slots; keep the progress of rows that were preempted with ``kept``.

        Kept progress moves to host memory until the request joins again (``Row.resumed``), or a
        release without a slot says that it never will.

        Raises:
            EngineProtocolError: If this engine has no such slot. Nothing was released then.
        """
        if not released:
            return
        check_released(released, self.max_num_seqs)
        for gone in released:
            if not gone.kept:  # also of a row whose step failed before it was resumed
                self._kept.pop(gone.request, None)
            if gone.slot is None:
                continue
            self._known.pop(gone.slot, None)
            tenant = self._tenants[gone.slot]
            if tenant is None or tenant.request is not gone.request:
                continue  # it failed to join
            self._tenants[gone.slot] = None
            if gone.kept and self._lost is None:
                cached = self._decoder.num_cached(gone.slot)
                cache = None
                if self._layers:
                    cache = torch.stack([layer[gone.slot, :cached] for layer in self._layers]).cpu()
                state = self._decoder.save(gone.slot)
                self._kept[tenant.request] = _Kept(state, cache, tenant.trace)
        self._last_rows = None

    # -- joining and selecting

    def _check(self, batch: StepBatch) -> list[Row]:
        """Raise unless this engine can run the batch; return its rows that were not known."""
        known = self._known
        if batch.knobs is not self._known_knobs:
            check_knobs("batch knobs", self.decoder_type.knobs, batch.knobs)
            known.clear()
        elif batch.rows is self._last_rows and not batch.joined:
            return []
        if batch.joined:
            weight = self.model.get_input_embeddings().weight
            check_unchanged(self.model, weight, self._device, self._dtype)
            for row in batch.joined:
                known.pop(row.slot, None)
        new = [row for row in batch.rows if known.get(row.slot) is not row]
        check_rows(batch, new, self._tenants, self._over, self._kept)
        self._known_knobs = batch.knobs
        return new

    def _join(self, joined: tuple[Row, ...]) -> list[RowFailed]:
        """Place new rows; a request that cannot run fails alone."""
        failed = []
        for row in joined:
            slot, request = row.slot, row.request
            self._over.discard(slot)
            self._phase[slot], self._reusing = _CODES[row.phase], None
            here = self._tenants[slot]
            if row.resumed and here is not None and here.request is request:
                continue  # placed by a step that failed before it advanced anybody
            try:
                request = self._checked(request)
            except ConfigError as error:
                self._tenants[slot] = None
                failed.append(RowFailed(slot, error))
                continue
            stop_ids = request.stop_token_ids
            if stop_ids is None:
                stop_ids = self.stop_token_ids
            kept = self._kept.get(request) if row.resumed else None
            if kept is None:
                trace: list[dict[str, Any]] | None = [] if self._trace else None
                self._decoder.start(slot, request, stop_ids)
            else:
                trace = kept.trace
                self._decoder.restore(slot, request, stop_ids, kept.state)
                saved = () if kept.cache is None else kept.cache
                for layer, values in zip(self._layers, saved, strict=True):
                    layer[slot, : len(values)] = values.to(self._device)
            self._kept.pop(request, None)
            self._tenants[slot] = _Tenant(request, trace)
        return failed

    def _select(self, batch: StepBatch, new: list[Row], failed: list[RowFailed]) -> Ints:
        """Return the batch's slots, ascending, with their knobs in force.

        Args:
            batch: The step's.
            new: Those of its rows that are not known.
            failed: Rows that cannot take part; one whose own knobs are bad is added.
        """
        if batch.rows is self._last_rows and not (new or failed):
            return self._slots
        lost = {row.slot for row in failed} | self._over
        for row in new:
            slot = row.slot
            tenant = self._tenants[slot]
            if tenant is None or slot in lost:
                continue
            before = self._known.get(slot)
            if before is None or before.knobs is not row.knobs:
                try:
                    if row.knobs is not NO_KNOBS:
                        where = f"request {row.request.id!r}: knobs"
                        check_knobs(where, self.decoder_type.knobs, row.knobs)
                except ConfigError as error:
                    # Its slot stays its own until release(): if this step fails, it comes again.
                    failed.append(RowFailed(slot, error))
                    lost.add(slot)
                    continue
                knobs = {**batch.knobs, **row.knobs} if batch.knobs else row.knobs
                self._apply(slot, tenant, knobs)
            self._known[slot] = row
        slots = sorted(row.slot for row in batch.rows if row.slot not in lost)
        if slots != self._slots.tolist():  # by the very array a decoder knows its last step
            self._slots = np.array(slots, np.int64)
        self._last_rows = None if failed else batch.rows
        return self._slots

    def _apply(self, slot: int, tenant: _Tenant, knobs: Mapping[str, Any]) -> None:
        """Set the row's settings: the request's, overridden by its knobs."""
        if tenant.knobs is not None and knobs == tenant.knobs:
            return
        for name in self.decoder_type.knobs:
            value = knobs.get(name, getattr(tenant.request, name))
            getattr(self._decoder, name)[slot] = math.nan if value is None else value
        tenant.knobs = dict(knobs)

    def _share_prompts(self, joined: tuple[Row, ...], slots: Ints) -> tuple[Ints, Ints] | None:
        """Let rows skip a prompt that another row of their group has, or computes in this step.

        Exact for a decoder whose prompt sees only itself.

        Returns:
            Places of the cache to be copied in the forward, and where to; None = nothing to copy.
        """
        decoder = self._decoder
        if not decoder.prompt_stands_alone or all(row.request.group is None for row in joined):
            return None
        here = set(slots.tolist())
        donors: dict[tuple[Any, ...], int] = {}
        source, target = [], []
        for row in joined:
            tenant = self._tenants[row.slot] if row.slot in here else None
            if tenant is None or tenant.request.group is None or row.resumed:
                continue
            request = tenant.request
            key = (request.group, request.prompt)
            if key not in donors:
                donors[key] = self._donor(request, row.slot)
            donor = donors[key]
            if donor != row.slot:
                places = np.arange(request.prompt_len)
                source.append(donor * self.max_len + places)
                target.append(row.slot * self.max_len + places)
                decoder.set_prompt_cached(row.slot, cached=True)
        if not target:
            return None
        return np.concatenate(source), np.concatenate(target)

    def _donor(self, request: DecodeRequest, slot: int) -> int:
        """Return a slot whose row has that prompt of that group in the cache, or else ``slot``."""
        for other, tenant in enumerate(self._tenants):
            if (
                tenant is not None
                and tenant.request.group == request.group
                and tenant.request.prompt == request.prompt
                and self._decoder.num_cached(other) >= request.prompt_len
            ):
                return other
        return slot

    def _share_nothing(self, slots: Ints) -> None:
        """Take back what rows were to skip in a step that failed."""
        decoder = self._decoder
        if decoder.prompt_stands_alone:
            for slot in slots[decoder.num_steps[slots] == 0].tolist():
                decoder.set_prompt_cached(slot, cached=False)

    # -- the forward

    def _group(self, slots: Ints) -> tuple[StepPlan, list[tuple[int, int]]]:
        """Plan the step, and say which sequences attend in one call.

        Returns:
            The plan, and the groups as ranges of its sequences.
        """
        plan = self._decoder.plan(slots)
        queries, keys = plan.end - plan.start, plan.length
        if not self._pads:
            return plan, self._neighbours(plan, queries)
        padding = len(keys) * int(queries.max()) * int(keys.max()) - int((queries * keys).sum())
        if padding <= self._split_cells:
            return plan, [(0, len(keys))]
        order = np.argsort(_size_class(plan)[: len(slots)], kind="stable")  # slots stay ascending
        plan = self._decoder.plan(slots[order])
        edges = [0, *(np.flatnonzero(np.diff(_size_class(plan))) + 1).tolist(), len(keys)]
        return plan, list(itertools.pairwise(edges))

    def _neighbours(self, plan: StepPlan, queries: Ints) -> list[tuple[int, int]]:
        """Group sequences that lie beside each other and send as many queries.

        Nothing is copied to bring them together: no key is gathered and no query padded. A call per
        row costs a CPU less than either.
        """
        if len(queries) == 1:
            return [(0, 1)]
        slots, cells = plan.slots, self._split_cells
        if self._cache is None:  # keys lie on the packed axis: there is nothing to pad them with
            slots, cells = np.arange(len(queries)), 0
        return list(itertools.pairwise(_edges(queries, plan.length, slots, cells).tolist()))

    def _upload(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._on_host else tensor.to(self._device, non_blocking=True)

    def _layout(self, plan: StepPlan, ranges: list[tuple[int, int]]) -> PackedLayout:
        """Lay out the forward, of whose hidden states only those of masked positions are wanted."""
        place, positions, write_index, groups = self._laid_out
        if place is not plan.place:
            groups = self._groups(plan, ranges, plan.end - plan.start, plan.visible)
            positions = self._upload(plan.position)
            write_index = None if self._cache is None else self._upload(plan.place)
            self._laid_out = plan.place, positions, write_index, groups
        wanted = wanted_groups = None
        index = plan.masked
        if plan.guide is not None:
            index = np.append(index, plan.guide[plan.guide >= 0])
        if len(index) < len(plan.token):
            wanted = self._upload(index)
            # At most so many cells are saved, and every call takes as long as some; how many more
            # there would be takes longer to find out than to guess.
            saved = (len(plan.token) - len(index)) * max(group.num_keys for group in groups)
            if saved > self._split_cells * max(1, len(groups) // 2) and not self._pads:
                wanted_groups = self._wanted_groups(plan, ranges, index)
        return PackedLayout(positions, write_index, groups, wanted, wanted_groups)

    def _wanted_groups(
        self, plan: StepPlan, ranges: list[tuple[int, int]], index: Ints
    ) -> tuple[AttentionGroup, ...] | None:
        """Lay out the attention of the wanted tokens alone, if that saves more than it takes."""
        queries = plan.end - plan.start
        left = np.bincount(plan.row[index], minlength=len(queries))
        # What is saved, in cells, against the calls that it takes more.
        saved = int(((queries - left) * plan.length).sum())
        again = self._neighbours(plan, left)
        if saved <= (1 + len(again) - len(ranges)) * self._split_cells or not left.min():
            return None
        return self._groups(plan, again, left, plan.visible[index])

    def _groups(
        self, plan: StepPlan, ranges: list[tuple[int, int]], queries: Ints, visible: Ints
    ) -> tuple[AttentionGroup, ...]:
        """Lay out the attention of queries ``[n]``, so many of each sequence, in groups.

        Args:
            plan: The step's.
            ranges: The groups, as ranges of the plan's sequences.
            queries: ``[s]`` of each sequence, in order.
            visible: ``[n]`` each sees the positions below this one.
        """
        if self._pads:
            return self._padded_groups(plan, ranges, queries, visible)
        starts, most, bias_at, shade = _shade(np.array(ranges), queries, plan.length, visible)
        bias_rows = torch.from_numpy(shade).to(self._dtype)
        edges, most, bias_at = starts.tolist(), most.tolist(), bias_at.tolist()
        slots = plan.slots.tolist()
        ends = [0, *(plan.end - plan.start).cumsum().tolist()] if self._cache is None else []
        groups = []
        for index, (low, high) in enumerate(ranges):
            num_keys, bias = most[index], None
            if bias_at[index] < bias_at[index + 1]:
                bias = bias_rows[bias_at[index] : bias_at[index + 1]]
                bias = bias.view(high - low, 1, -1, num_keys)
            where = (
                slice(ends[low], ends[high]) if ends else slice(slots[low], slots[low] + high - low)
            )
            start, stop = edges[index], edges[index + 1]
            groups.append(
                AttentionGroup(start, stop, where, num_keys, None, None, high - low, bias)
            )
        return tuple(groups)

    def _padded_groups(
        self, plan: StepPlan, ranges: list[tuple[int, int]], queries: Ints, visible: Ints
    ) -> tuple[AttentionGroup, ...]:
        """Lay out the same, with the queries of a group's rows padded to the longest."""
        edges = [0, *queries.cumsum().tolist()]
        unseen = self._upload(self.max_len - visible)
        ends = [0, *(plan.end - plan.start).cumsum().tolist()] if self._cache is None else []
        groups = []
        for low, high in ranges:
            start, stop, num_keys = edges[low], edges[high], int(plan.length[low:high].max())
            pad, unpad = self._padding(queries[low:high])
            bias = None
            if int(visible[start:stop].min()) < num_keys:
                at = unseen[start:stop]
                bias = self._bias[:, :num_keys][at if pad is None else at[pad].flatten()]
                bias = bias.view(high - low, 1, -1, num_keys)
            slots = plan.slots[low:high]
            where: slice | Tensor
            if ends:
                where = slice(ends[low], ends[high])
            elif slots[-1] - slots[0] == high - low - 1:  # ascending within a group
                where = slice(int(slots[0]), int(slots[-1]) + 1)
            else:
                where = self._upload(slots)
            groups.append(
                AttentionGroup(start, stop, where, num_keys, pad, unpad, high - low, bias)
            )
        return tuple(groups)

    def _padding(self, queries: Ints) -> tuple[Tensor | None, Tensor | None]:
        """Return how a group's queries are brought to one length, and back."""
        most = int(queries.max())
        if int(queries.min()) == most:
            return None, None
        offset = np.cumsum(queries) - queries
        # Padded queries repeat the row's last token; nobody reads what they find.
        pad = np.minimum(np.arange(most), queries[:, None] - 1) + offset[:, None]
        row = np.repeat(np.arange(len(queries)), queries)
        unpad = row * most + np.arange(len(row)) - offset[row]
        return self._upload(pad), self._upload(unpad)

    def _start(
        self, plan: StepPlan, ranges: list[tuple[int, int]], copied: tuple[Ints, Ints] | None
    ) -> _Found:
        """Start the step, as a graph if it can be one.

        Args:
            plan: The step's.
            ranges: Its groups.
            copied: Places of the cache to be copied in the forward, and where to.
        """
        decoder, draws = self._decoder, None
        temperature = decoder.temperature[plan.slots]
        if np.count_nonzero(temperature):
            row = plan.row[plan.masked]
            slot, temperature = plan.slots[row], temperature[row]
            position, step = plan.position[plan.masked], decoder.num_steps[slot]
            draws = uniform_draws(decoder.seed[slot], position, step)
        if self._graphs is not None:
            drawn = None if draws is None else (temperature, draws)
            replayed = self._graphs.run(plan, drawn, None if copied is None else "shared")
            if replayed is not None:
                return replayed
        layout = self._layout(plan, ranges)
        if copied is not None:
            source, target = copied
            layout = layout._replace(copied=(self._upload(source), self._upload(target)))
        return self._forward(plan, layout, temperature, draws)

    def _forward(
        self,
        plan: StepPlan,
        layout: PackedLayout,
        temperature: Floats,
        draws: Floats | None,
    ) -> _Found:
        """Run the model once; return confidence and token of every masked position.

        Args:
            plan: The step's.
            layout: Of its forward.
            temperature: ``[c]`` of each masked position, if any is drawn.
            draws: ``[c]`` likewise, or None if none is drawn.
        """
        token = self._upload(plan.token)
        clock = self._clock if self._on_host else None  # elsewhere launches return at once
        began = clock() if clock else 0.0
        hidden = self.model.forward_packed(token, layout, self._cache, self._parts)
        if clock:
            self.forward_s += clock() - began
        chunk = max(1, _LOGITS_PER_CHUNK // self.vocab_size)
        parts: list[Tensor] = []
        read: list[tuple[NDArray[Any], Ints]] = []
        for low in range(0, len(plan.masked), chunk):
            part = slice(low, min(low + chunk, len(plan.masked)))
            head_began = clock() if clock else 0.0
            logits = self.model.logits(hidden[part])
            if plan.guide is not None and plan.guide_scale is not None:
                self._guide(logits, hidden, plan.guide, plan.guide_scale, part)
            if clock:
                self.forward_s += clock() - head_began
            hot = None if draws is None else draws[part]
            if self._on_host and hot is None:
                read.append(self._read_on_host(logits))
            else:
                parts.append(self._read_out(logits, temperature[part], hot))
        if len(read) == 1:
            return read[0]
        if read:
            return np.concatenate([each[0] for each in read]), np.concatenate(
                [each[1] for each in read]
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _guide(
        self, logits: Tensor, hidden: Tensor, guide: Ints, scale: Floats, part: slice
    ) -> None:
        """Lead the logits of guided rows away from those of their second sequences, in place.

        Args:
            logits: Of a part of the masked positions.
            hidden: Of all of them, then of the same positions in the second sequences.
            guide: ``[c]`` as in the plan.
            scale: ``[c]`` likewise.
            part: Of the masked positions.
        """
        is_guided = guide >= 0
        guided = np.flatnonzero(is_guided[part])
        if len(guided) == 0:
            return
        at = self._upload(guided)
        first = len(guide) + int(is_guided[: part.start].sum())
        second = self.model.logits(hidden[first : first + len(guided)])
        weight = self._upload(scale[part][guided] + 1).to(logits.dtype)[:, None]
        logits[at] = second + weight * (logits[at] - second)

    def _read_greedy(self, logits: Tensor) -> Tensor:
        """Read out the most probable tokens, a part of the positions at a time.

        The head's logits stay in the model's dtype: only a part of them is ever widened.
        """
        part = max(1, _WIDE_PER_CHUNK // self.vocab_size)
        return torch.cat([self._choose(each) for each in logits.split(part)], 1)

    def _choose(self, logits: Tensor) -> Tensor:
        # As a host reads it: near 1, where the order of commits is decided, a logarithm is off by
        # more than probabilities differ.
        probability = logits[:, : self.vocab_size].softmax(-1, self._precision)
        probability[:, self.mask_token_id].fill_(-1.0)
        return self._as_bits(*probability.max(-1))

    def _as_bits(self, probability: Tensor, token: Tensor) -> Tensor:
        return torch.stack((probability.view(self._bits), token.to(self._bits)))

    def _read_out(
        self, logits: Tensor, temperature: NDArray[np.float64], draws: NDArray[np.float64] | None
    ) -> Tensor:
        """Choose a token per position and its probability, both as bits of ints: ``[2, c]``.

        The probability is that of the whole softmax, mask token included, as in the reference; but
        the mask token itself is never chosen.
        """
        if draws is None:
            return self._read_greedy(logits)
        return self._read_drawn(logits, self._upload(temperature), self._upload(draws))

    def _read_drawn(self, logits: Tensor, temperature: Tensor, draws: Tensor) -> Tensor:
        """Read out tokens of which some are drawn, a part of the positions at a time.

        No shape depends on a value and nothing waits for the device: graphs run this too.
        """
        part = max(1, _WIDE_PER_CHUNK // self.vocab_size)
        parts = zip(logits.split(part), temperature.split(part), draws.split(part), strict=True)
        return torch.cat([self._draw(*each) for each in parts], 1)

    def _draw(self, logits: Tensor, temperature: Tensor, draws: Tensor) -> Tensor:
        hot = temperature > 0
        divisor = torch.where(hot, temperature, 1.0).to(self._precision)
        scores = logits[:, : self.vocab_size].to(self._precision) / divisor[:, None]
        probability = scores.softmax(-1)
        scores[:, self.mask_token_id].fill_(-math.inf)
        # Inverse of the cumulative distribution: one draw per position, not per token.
        steps = scores.double().softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(steps, (draws * steps[:, -1])[:, None], right=True)[:, 0]
        probability[:, self.mask_token_id].fill_(-1.0)
        token = torch.where(hot & (drawn < self.vocab_size), drawn, probability.argmax(-1))
        return self._as_bits(probability.gather(1, token[:, None])[:, 0], token)

    def _read_on_host(self, logits: Tensor) -> tuple[NDArray[Any], Ints]:
        """Do the same, without draws, in a third of the time where the host has the logits.

        numpy finds the maxima of rows seven times as fast as torch, which is most of the work.

        Returns:
            The probability and the token, ``[c]`` each.
        """
        scores = logits
        if logits.shape[1] > self.vocab_size:
            scores = logits[:, : self.vocab_size]
        probability: NDArray[Any] = scores.softmax(-1, self._precision).numpy()
        token = probability.argmax(1)
        confidence, is_mask = _take(probability, token, self.mask_token_id)
        if is_mask:
            probability[:, self.mask_token_id] = -1.0
            token = probability.argmax(1)
            confidence, _ = _take(probability, token, self.mask_token_id)
        return confidence, token

    # -- what happened

    def _fail(
        self, plan: StepPlan, confidence: NDArray[Any], failed: list[RowFailed]
    ) -> Bools | None:
        """Take out rows with non-finite logits; return which rows of the plan, if any."""
        if math.isfinite(confidence.dot(confidence)):
            return None
        lost = np.zeros(len(plan.slots), np.bool_)
        bad = ~np.isfinite(confidence)
        lost[plan.row[plan.masked[bad]]] = True
        confidence[bad] = 0.0  # lets the row go through the motions; nobody sees the result
        for index in np.flatnonzero(lost).tolist():
            slot = int(plan.slots[index])
            tenant = self._tenants[slot]
            name = tenant.request.id if tenant is not None else "?"
            step = int(self._decoder.num_steps[slot]) + 1
            error = NonFiniteLogitsError(
                f"request {name!r}: NaN or infinite logits in its forward {step}; check the "
                "checkpoint and the dtype"
            )
            failed.append(RowFailed(slot, error))
            self._tenants[slot] = None
            # Masked keys still enter the products, and 0 * nan is nan: the next row must not see.
            for layer in self._layers:
                layer[slot].zero_()
        return lost

    def _outcome(
        self,
        batch: StepBatch,
        plan: StepPlan,
        commits: Commits,
        lost: Bools | None,
        failed: list[RowFailed],
    ) -> StepOutcome:
        decoder, slots = self._decoder, plan.slots
        finished = []
        for index in decoder.ended(slots, commits.finished).tolist():
            if lost is None or not lost[index]:
                end = self._end(int(slots[index]))
                if end is not None:
                    finished.append(end)
        over = {row.slot for row in finished} | {row.slot for row in failed}
        if over:
            self._over |= over
            self._last_rows = None
        boundaries = tuple(
            BlockBoundary(slot, decoder.num_blocks_done(slot), decoder.kv_tokens(slot))
            for slot in slots[commits.grew].tolist()
            if slot not in over
        )
        phases = self._phase_changes(slots, over)
        masked = None
        if self._report_masked:
            masked = tuple(
                0 if row.slot in self._over else decoder.masked_remaining(row.slot)
                for row in batch.rows
            )
        if not (finished or boundaries or phases or failed or self._report_masked):
            return NOTHING  # the very object: the scheduler takes its shortest path on it
        return StepOutcome(tuple(finished), boundaries, phases, tuple(failed), masked)

    def _phase_changes(self, slots: Ints, over: set[int]) -> tuple[PhaseChange, ...]:
        """Say which rows' coming forward is of another kind than this one."""
        if slots is self._reusing:
            return ()
        phase = self._phase[slots]
        # After its first forward a row reuses, and may do nothing else from there on.
        if not self._decoder.recomputes and np.count_nonzero(phase) == len(phase):
            self._reusing = slots
            return ()
        coming = np.where(self._decoder.refreshes(slots), *_AGAIN_OR_NOT)
        changes = (coming != phase).nonzero()[0]
        self._phase[slots] = coming
        return tuple(
            PhaseChange(int(slots[index]), _PHASES[coming[index]])
            for index in changes.tolist()
            if slots[index] not in over
        )

    def _end(self, slot: int) -> RowFinished | None:
        """Return the finish of a row that has its whole answer."""
        tenant = self._tenants[slot]
        if tenant is None:
            return None
        request, decoder = tenant.request, self._decoder
        wanted, stop = request.max_new_tokens, int(decoder.stop_at[slot]) - request.prompt_len
        reason = FinishReason.EOS if stop < wanted else FinishReason.LENGTH
        tokens = decoder.generated(slot)[: stop if request.truncate_at_stop else wanted]
        output = DecodeOutput(
            tuple(tokens.tolist()),
            int(decoder.num_steps[slot]),
            decoder.num_blocks_opened(slot),
            int(decoder.stop_step[slot]) or None,
            None if tenant.trace is None else tuple(tenant.trace),
        )
        return RowFinished(slot, reason, output)


class D2FEngine(DecodingEngine):
    """Batched D2F decoding of LLaDA: takes :class:`D2FRequest`."""

    decoder_type = D2F


class FastDLLMEngine(DecodingEngine):
    """Batched Fast-dLLM decoding of LLaDA: takes :class:`FastDLLMRequest`.

    Rows at different blocks, of different caches and rules, share a forward: some run their whole
    canvas (PREFILL, REFRESH), some their block (REUSE). If every request's cache is ``dual``, set
    ``Capacity.window_blocks`` to 1, and ``Row.max_tokens`` is exact.
    """

    decoder_type = FastDLLM


class LLaDAEngine(DecodingEngine):
    """Batched plain LLaDA generation: takes :class:`LLaDARequest`. Allocates no cache.

    A guided row sends twice as many tokens through a forward as ``Row.max_tokens`` says.
    """

    decoder_type = LLaDA


def _checked_base(
    model: nn.Module, max_num_seqs: object, max_len: object, clock: object
) -> LLaDAModelLM:
    """Return the model without its wrapper, if an engine can be built of these."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(base, LLaDAModelLM):
        raise ConfigError(f"model must be a LLaDAModelLM, got {type(base).__name__}")
    window = base.config.max_sequence_length
    if not is_int(max_num_seqs) or max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs must be an int >= 1, got {shown(max_num_seqs)}")
    if max_len is not None and not (is_int(max_len) and 1 <= max_len <= window):
        raise ConfigError(
            f"max_len must be an int in 1..{window} (the model's window), got {shown(max_len)}"
        )
    if clock is not None and not callable(clock):
        raise ConfigError(f"clock must be a function without arguments, got {shown(clock)}")
    return base


def check_unchanged(
    model: nn.Module, weight: Tensor, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise unless the model is as it was when an engine was built on it; looked at when rows join.

    Raises:
        EngineProtocolError: Says what has changed.
    """
    if model.training:
        raise EngineProtocolError(
            "the model was put into training mode after this engine was built on it, and dropout "
            "would change answers: call eval() on it, and train a copy"
        )
    if weight.dtype != dtype or weight.device != device:
        raise EngineProtocolError(
            f"the model was moved to {weight.dtype} on {weight.device} after this engine was built "
            f"on it in {dtype} on {device}: move it back, or build another engine on it"
        )


def check_rows(
    batch: StepBatch,
    new: Sequence[Row],
    tenants: Sequence[_Holder | None],
    over: Collection[int],
    kept: Collection[Request],
) -> None:
    """Raise unless every row of a batch is, or can be placed, where the batch has it. O(rows).

    Args:
        batch: The step's.
        new: Its rows that have not been found in their slots before.
        tenants: Who is in each slot.
        over: Slots whose rows have ended.
        kept: Requests that can be resumed.

    Raises:
        EngineProtocolError: Names the slot and the request.
    """
    joining: dict[int, Request] = {}
    for row in batch.joined:
        slot, request = row.slot, row.request
        _check_slot(slot, request, "joins", len(tenants))
        if slot in joining:
            raise EngineProtocolError(
                f"slot {slot}: requests {joining[slot].id!r} and {request.id!r} join there in one "
                "step: a slot holds one row"
            )
        joining[slot] = request
        here = tenants[slot]
        if here is not None and here.request is not request:
            raise EngineProtocolError(
                f"slot {slot}: request {request.id!r} joins there, but request "
                f"{here.request.id!r} was not released: pass every Update.released to release()"
            )
        if row.resumed and here is None and request not in kept:
            raise EngineProtocolError(
                f"slot {slot}: request {request.id!r} is to be resumed, but this engine keeps no "
                "progress of it: pass every Update.released to release()"
            )
    _check_slots(batch.rows)
    for row in new:
        slot, request = row.slot, row.request
        there = joining.get(slot)
        if there is None:
            if slot in over:
                continue
            _check_slot(slot, request, "is", len(tenants))
            here = tenants[slot]
            there = None if here is None else here.request
        if there is not request:
            raise EngineProtocolError(
                f"slot {slot}: the batch has request {request.id!r} there, which never joined or "
                "was released"
            )


def _check_slots(rows: Sequence[Row]) -> None:
    slots = [row.slot for row in rows]
    if len(set(slots)) < len(slots):
        later = next(row for number, row in enumerate(rows) if row.slot in slots[:number])
        raise EngineProtocolError(
            f"slot {later.slot}: the batch has two rows there, the later one of request "
            f"{later.request.id!r}: name each row once"
        )


def check_released(released: Sequence[Released], num_slots: int) -> None:
    """Raise unless an engine of so many slots has all these.

    Raises:
        EngineProtocolError: Names the slot and the request.
    """
    for gone in released:
        if gone.slot is not None:
            _check_slot(gone.slot, gone.request, "is released", num_slots)


def tenant_in(tenants: Sequence[_T | None], slot: object, start: object) -> _T:
    """Return who is in a slot and is asked for its answer from a position on.

    Raises:
        ConfigError: If there is no such slot, or the position is no int >= 0.
        EngineProtocolError: If the slot holds no row.
    """
    if not is_int(slot) or not 0 <= slot < len(tenants):
        raise ConfigError(f"slot must be an int in 0..{len(tenants) - 1}, got {shown(slot)}")
    if not is_int(start) or start < 0:
        raise ConfigError(f"slot {slot}: start must be an int >= 0, got {shown(start)}")
    tenant = tenants[slot]
    if tenant is None:
        raise EngineProtocolError(f"slot {slot}: holds no row; ask between join and release")
    return tenant


def _check_slot(slot: object, request: Request, does: str, num_slots: int) -> None:
    if not is_int(slot) or not 0 <= slot < num_slots:
        raise EngineProtocolError(
            f"slot {shown(slot)}: request {request.id!r} {does} there, but this engine has "
            f"{num_slots} slots: give the scheduler its capacity()"
        )


@functools.cache
def _warm_up(decoder_type: type[Decoder]) -> None:
    """Run every loop of a step once, so that no request waits until they are compiled."""
    decoder, slots = decoder_type(1, 8, 0), np.zeros(1, np.int64)
    request = decoder_type.request_type(
        id="warm-up", prompt=(1,), max_new_tokens=1, block_length=1, stop_token_ids=(1,)
    )
    decoder.start(0, request, (1,))
    plan = decoder.plan(slots)
    one = np.ones(1, np.int64)
    commits = decoder.commit(plan, one.astype(decoder_type.confidence_type), one)
    decoder.ended(slots, commits.finished)
    _take(one[:, None].astype(decoder_type.confidence_type), slots, 0)
    _edges(one, one, slots, 0)
    _shade(np.array([(0, 1)]), one, one, one)
    warm_up()


def _bias_rows(max_len: int, weight: Tensor) -> Tensor:
    """Return what may be seen by who sees the first ``max_len - u`` positions, as row u.

    Returns:
        ``[max_len + 1, max_len]``, 0 or -inf.
    """
    bias = torch.zeros(2 * max_len, device=weight.device, dtype=weight.dtype)
    bias[max_len:] = -math.inf
    return bias.as_strided((max_len + 1, max_len), (1, 1))  # a row is the one above it, a place on


@compiled
def _take(probability: NDArray[Any], token: Ints, mask_id: int) -> tuple[NDArray[Any], bool]:
    """Return the probability of each position's token, and whether one is the mask token.

    Args:
        probability: ``[c, vocabulary]``
        token: ``[c]``
        mask_id: Its id.
    """
    taken, is_mask = np.empty(len(token), probability.dtype), False
    for index, each in enumerate(token):
        taken[index] = probability[index, each]
        is_mask |= each == mask_id
    return taken, is_mask


@compiled
def _edges(queries: Ints, keys: Ints, slots: Ints, most_cells: int) -> Ints:
    """Return where groups of neighbours begin, and the end of the last one.

    Args:
        queries: ``[s]`` of each sequence: equally many in a group.
        keys: ``[s]`` likewise: padded to the longest.
        slots: ``[s]`` likewise: each is next to the one before.
        most_cells: Queries times keys that a further sequence may cost in padding.
    """
    edges = np.empty(len(queries) + 1, np.int64)
    edges[0], count, most = 0, 1, keys[0]
    for index in range(1, len(queries)):
        longest, rows = max(most, keys[index]), index - edges[count - 1]
        padded = (rows * (longest - most) + longest - keys[index]) * queries[index]
        most = longest
        if (
            queries[index] != queries[index - 1]
            or slots[index] != slots[index - 1] + 1
            or padded > most_cells
        ):
            edges[count], most = index, keys[index]
            count += 1
    edges[count] = len(queries)
    return edges[: count + 1]


@compiled
def _shade(
    ranges: Ints, queries: Ints, keys: Ints, visible: Ints
) -> tuple[Ints, Ints, Ints, NDArray[np.float32]]:
    """Say what the queries of each group see.

    Args:
        ranges: ``[g, 2]`` the sequences of each group.
        queries: ``[s]`` of each sequence, in order.
        keys: ``[s]`` likewise.
        visible: ``[n]`` each query sees the positions below this one.

    Returns:
        ``[g + 1]`` where the queries of each group begin, and n; ``[g]`` its keys; ``[g + 1]``
        where its bias begins in what comes last, and the end: 0 or -inf, as ``[queries, keys]``,
        nothing for a group that sees everything.
    """
    count = len(ranges)
    starts, bias_at = np.zeros((2, count + 1), np.int64)
    most = np.empty(count, np.int64)
    for group, (low, high) in enumerate(ranges):
        at, most[group] = starts[group], keys[low:high].max()
        blind = False
        for each in range(low, high):
            # Later tokens of a sequence see no less than its first one.
            blind |= visible[at] < most[group]
            at += queries[each]
        starts[group + 1], bias_at[group + 1] = at, bias_at[group]
        if blind:
            bias_at[group + 1] += (at - starts[group]) * most[group]
    shade = np.zeros(bias_at[count], np.float32)
    for group in range(count):
        if bias_at[group] < bias_at[group + 1]:
            rows = shade[bias_at[group] : bias_at[group + 1]].reshape(-1, most[group])
            for index in range(len(rows)):
                rows[index, visible[starts[group] + index] :] = -np.inf
    return starts, most, bias_at, shade


def _size_class(plan: StepPlan) -> Floats:
    """Return a number per sequence, alike for those within a factor of four, in cells."""
    cells = (plan.end - plan.start) * plan.length
    return np.floor(np.log2(cells) / 2)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    # To switch off what is off takes twenty times as long as to ask.
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()


def _is_lost(error: RuntimeError) -> bool:
    # After these every call on the device raises: a failed kernel has taken its context along.
    accelerator = getattr(torch, "AcceleratorError", ())
    return isinstance(error, accelerator) or "CUDA error" in str(error)


def _is_out_of_memory(error: RuntimeError) -> bool:
    # The CPU allocator has no exception type of its own.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
