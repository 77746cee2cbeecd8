"""The engine: takes a ``StepBatch``, runs one forward for all its rows, returns a ``StepOutcome``.

Per step: a few small index uploads, one forward, one copy back of (confidence, token) per masked
position. Everything else is integer work on the host (``d2f``). Not thread-safe: one loop owns it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

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
from dllm_sched.runtime.engine import StepFailedError
from dllm_sched_hf.d2f import (
    BlockStates,
    Commits,
    Ints,
    RowSetup,
    RowState,
    StepPlan,
    uniform_draws,
)
from dllm_sched_hf.modeling_llada import AttentionGroup, KVCache, LLaDAModelLM, PackedLayout

__all__ = [
    "D2FEngine",
    "D2FOutput",
    "D2FRequest",
    "NonFiniteLogitsError",
    "StepOutOfMemoryError",
    "default_stop_ids",
]

LLADA_END_OF_TURN_ID = 126348
"""End of turn in the published LLaDA vocabulary; the config names only end of text."""

_LLADA_MASK_ID = 126336

KNOBS = ("block_add_threshold", "decoded_token_threshold", "skip_threshold", "temperature")
"""The settings that a control strategy may change while a row runs (``Row.knobs``)."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e6
"""Temperatures above 0 lie between these: logits divided by them stay finite in float32."""

MAX_STOP_IDS = 256
"""A request's stop ids are compared with every committed token, for all rows at once."""

_MAX_TOKEN_ID = 2**31 - 1  # of any vocabulary; check() knows the model's

# Padded attention cells (query x key) worth less than the calls that a further group costs.
_SPLIT_CELLS = {"cpu": 2**14, "cuda": 2**19}

# Logits in flight at once while confidences are read: 32 M float32 values are 128 MiB.
_LOGITS_PER_CHUNK = 2**25


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


class D2FOutput(NamedTuple):
    """What a finished row hands to ``Finished.output``."""

    tokens: tuple[int, ...]  #: the answer, without the prompt; cut as the request asked
    num_forwards: int  #: forwards that this row took part in
    num_blocks: int  #: blocks that were opened
    first_stop_step: int | None  #: the row's forward (from 1) that committed its first stop id
    trace: tuple[dict[str, Any], ...] | None = None  #: one entry per forward, if the engine traces


def _shown(value: object) -> str:
    """Return a short text of any value: some have none, and huge ints refuse to be printed."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a message about a bad value must not fail on that value
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _tuple(value: Any) -> Any:
    """Return a tuple of what can be iterated over, anything else as it is: validators refuse it."""
    try:
        return tuple(value)
    except TypeError:
        return value


def _num_tokens(request: D2FRequest) -> int:
    return len(request.prompt) if isinstance(request.prompt, tuple) else 0


def _check_ids(where: str, value: object, highest: int = _MAX_TOKEN_ID) -> None:
    if not isinstance(value, tuple):
        raise ConfigError(f"{where} must be a sequence of token ids, got {_shown(value)}")
    for token in value:
        if not _is_int(token) or not 0 <= token <= highest:
            raise ConfigError(
                f"{where} must hold token ids (ints) from 0 to {highest}, got {_shown(token)}"
            )


def _check_prompt(request: Request, field: attrs.Attribute[Any], value: object) -> None:
    _check_ids(f"request {request.id!r}: {field.name}", value)
    if not value:
        raise ConfigError(f"request {request.id!r}: prompt is empty: give at least one token")


def _check_stop_ids(request: Request, field: attrs.Attribute[Any], value: object) -> None:
    if value is not None:
        _check_ids(f"request {request.id!r}: {field.name}", value)


def _check_bool(request: Request, field: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(
            f"request {request.id!r}: {field.name} must be True or False, got {_shown(value)}"
        )


def _check_knob(where: str, name: str, value: object) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if name == "temperature":
        ok = number == 0 or MIN_TEMPERATURE <= number <= MAX_TEMPERATURE
        span = f"0 or in [{MIN_TEMPERATURE:g}, {MAX_TEMPERATURE:g}]"
    else:
        ok, span = 0 <= number <= 1, "in [0, 1]"
    if not ok:
        raise ConfigError(f"{where}: {name} must be a number {span}, got {_shown(value)}")


def _check_knobs(where: str, knobs: Mapping[str, Any]) -> None:
    for name, value in knobs.items():
        if name not in KNOBS:
            raise ConfigError(
                f"{where}: unknown {_shown(name)}, this engine takes {', '.join(KNOBS)}"
            )
        _check_knob(where, name, value)


def _check_setting(request: Request, field: attrs.Attribute[Any], value: object) -> None:
    _check_knob(f"request {request.id!r}", field.name, value)


def _check_seed(request: Request, field: attrs.Attribute[int], value: object) -> None:
    if not _is_int(value) or not -(2**63) <= value < 2**63:
        raise ConfigError(
            f"request {request.id!r}: {field.name} must be an int64, got {_shown(value)}"
        )


@attrs.frozen(kw_only=True, eq=False)
class D2FRequest(Request):
    """A request with its prompt and its decoding settings.

    Attributes:
        prompt: Token ids of the vocabulary, at least one, none of them the mask id.
        prompt_len: Derived from ``prompt``.
        seed: Key of this request's draws, int64; matters only at ``temperature`` > 0.
        temperature: Divides the logits before a token is drawn; 0 = the most probable token.
            Otherwise in [0.001, 1e6], which float32 survives.
        block_add_threshold: Decoded share of the last block, in [0, 1], from which on the next
            block is appended.
        decoded_token_threshold: Decoded share of a block, in [0, 1], from which on the next block
            is fully activated: it then commits at least one token per step.
        skip_threshold: A position commits when its confidence is above this; in [0, 1], and at 1
            no position ever does by itself.
        stop_token_ids: Ids of the vocabulary that end the answer, at most 256 of them and not the
            mask id; None = the engine's.
        truncate_at_stop: Finish as soon as everything before the first stop id is committed, and
            cut the answer there. False = the reference: a stop id only keeps further blocks from
            being opened, and the answer keeps all its tokens.
        whole_blocks_only: False = ``max_new_tokens`` is rounded up to whole blocks and the answer
            cut back to it. True = the reference: rounded down, and nothing is cut.

    Raises:
        ConfigError: If a field is out of its range; names the field.

    Source: defaults from the D2F evaluation settings for LLaDA (arXiv 2508.09192, public scripts).
    """

    prompt: tuple[int, ...] = attrs.field(converter=_tuple, validator=_check_prompt, repr=False)
    prompt_len: int = attrs.field(init=False, default=attrs.Factory(_num_tokens, takes_self=True))
    seed: int = attrs.field(default=0, validator=_check_seed)
    temperature: float = attrs.field(default=0.0, validator=_check_setting)
    block_add_threshold: float = attrs.field(default=0.1, validator=_check_setting)
    decoded_token_threshold: float = attrs.field(default=0.95, validator=_check_setting)
    skip_threshold: float = attrs.field(default=0.9, validator=_check_setting)
    stop_token_ids: tuple[int, ...] | None = attrs.field(
        default=None, converter=_tuple, validator=_check_stop_ids
    )
    truncate_at_stop: bool = attrs.field(default=True, validator=_check_bool)
    whole_blocks_only: bool = attrs.field(default=False, validator=_check_bool)

    @property
    def max_blocks(self) -> int:
        """Blocks that may be opened."""
        if self.whole_blocks_only:
            return self.max_new_tokens // self.block_length
        return -(-self.max_new_tokens // self.block_length)


def default_stop_ids(model: LLaDAModelLM) -> tuple[int, ...]:
    """Return end of text and, in the published LLaDA vocabulary, end of turn."""
    config = model.config
    published = config.mask_token_id == _LLADA_MASK_ID and config.vocab_size > LLADA_END_OF_TURN_ID
    return (config.eos_token_id, *((LLADA_END_OF_TURN_ID,) if published else ()))


@attrs.define(eq=False)
class _Tenant:
    """What the engine remembers of the request in a slot, beside its blocks."""

    request: D2FRequest
    setup: RowSetup
    trace: list[dict[str, Any]] | None
    knobs: Knobs | None = None  #: last seen


class _Kept(NamedTuple):
    """A preempted row's progress, off the device: slots are preempted to free its memory."""

    state: RowState
    keys: Tensor  #: ``[n_layers, cached, n_kv_heads, head_dim]``
    values: Tensor
    trace: list[dict[str, Any]] | None


class D2FEngine:
    """Batched D2F decoding of LLaDA behind the scheduler's step protocol.

    Rows are ragged: they join late, leave early, differ in length, thresholds and temperature, may
    sit out a step, and are kept or restarted when preempted. A row attends to its own tokens only,
    so in float32 its tokens do not depend on its neighbours.

    Args:
        model: A :class:`LLaDAModelLM`, or a PEFT model around one; runs where its weights are and
            in their dtype.
        max_num_seqs: Slots, >= 1.
        max_len: Tokens a slot can hold, prompt and whole blocks; None = the model's window. The KV
            cache takes ``2 * n_layers * max_num_seqs * max_len * n_kv_heads * head_dim`` values.
        stop_token_ids: For requests that name none, under the same rules; None =
            :func:`default_stop_ids`.
        trace: Attach to every output one entry per forward (for parity; costs Python time).
        report_masked: Fill ``StepOutcome.masked_remaining``.
        clock: Seconds; if given, ``forward_s`` accumulates the time inside the model's forward.
            On CUDA that is launch to results, on CPU embedding to logits.

    Raises:
        ConfigError: If an argument is out of its range; names it.

    Attributes:
        num_forwards: Forwards so far, each for all rows of its step.
        num_tokens: Tokens that went through them.
        forward_s: Seconds inside them; 0 without a clock.
        max_num_seqs: Slots.
        max_len: Tokens a slot can hold.
        mask_token_id: Never committed, refused in prompts.
        vocab_size: Ids that can be committed.
        stop_token_ids: For requests that name none.
    """

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
    ) -> None:
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        if not isinstance(base, LLaDAModelLM):
            raise ConfigError(f"model must be a LLaDAModelLM, got {type(base).__name__}")
        window = base.config.max_sequence_length
        if not _is_int(max_num_seqs) or max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs must be an int >= 1, got {_shown(max_num_seqs)}")
        if max_len is not None and not (_is_int(max_len) and 1 <= max_len <= window):
            raise ConfigError(
                f"max_len must be an int in 1..{window} (the model's window), got {_shown(max_len)}"
            )
        for name, flag in (("trace", trace), ("report_masked", report_masked)):
            if not isinstance(flag, bool):
                raise ConfigError(f"{name} must be True or False, got {_shown(flag)}")
        if clock is not None and not callable(clock):
            raise ConfigError(f"clock must be a function without arguments, got {_shown(clock)}")
        self.model = base.eval()
        self.max_num_seqs = max_num_seqs
        self.max_len = window if max_len is None else max_len
        self.mask_token_id = base.config.mask_token_id
        self.vocab_size = base.config.vocab_size
        self.stop_token_ids: tuple[int, ...] = default_stop_ids(base)
        if stop_token_ids is not None:
            self.stop_token_ids = _tuple(stop_token_ids)
            self._check_stop_ids("stop_token_ids", self.stop_token_ids)
        self.num_forwards = self.num_tokens = 0
        self.forward_s = 0.0
        self._clock = clock
        self._trace = trace
        self._report_masked = report_masked
        weight = base.get_input_embeddings().weight
        self._device = weight.device
        self._cache = KVCache.allocate(
            base.config, max_num_seqs, self.max_len, device=weight.device, dtype=weight.dtype
        )
        self._key_positions = torch.arange(self.max_len, device=weight.device)
        self._split_cells = _SPLIT_CELLS.get(weight.device.type, _SPLIT_CELLS["cuda"])
        self._states = BlockStates(max_num_seqs, self.max_len, self.mask_token_id)
        self._temperature = np.zeros(max_num_seqs)
        self._seed = np.zeros(max_num_seqs, np.int64)
        self._truncates = np.zeros(max_num_seqs, np.bool_)
        self._partial = np.zeros(max_num_seqs, np.bool_)  # the last block is only partly wanted
        self._tenants: list[_Tenant | None] = [None] * max_num_seqs
        self._kept: dict[Request, _Kept] = {}
        self._last_batch: tuple[tuple[Row, ...], Knobs] = ((), NO_KNOBS)
        self._slots: Ints = np.empty(0, np.int64)
        self._prefilling: list[int] = []

    # -- requests

    def request(self, id: str, prompt: Sequence[int], **fields: Any) -> D2FRequest:
        """Return a :class:`D2FRequest` that this engine can run.

        Raises:
            ConfigError: If a field is out of range, or the request does not suit the model.
        """
        request = D2FRequest(id, prompt=prompt, **fields)
        self.check(request)
        return request

    def check(self, request: Request) -> None:
        """Raise if this engine cannot run the request. O(prompt).

        Raises:
            ConfigError: Wrong type, mask id or unknown id in the prompt or among the stop ids, no
                whole block, or a window that does not fit after rounding to blocks; names the
                field and the fix.
        """
        self._checked(request)

    def _checked(self, request: Request) -> D2FRequest:
        if not isinstance(request, D2FRequest):
            raise ConfigError(
                f"request {request.id!r}: must be a D2FRequest, got {type(request).__name__}"
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
        if request.max_blocks < 1:
            raise ConfigError(
                f"{where}: max_new_tokens {_shown(request.max_new_tokens)} holds no whole block of "
                f"block_length {_shown(request.block_length)}: raise it, or set "
                "whole_blocks_only=False"
            )
        if request.max_total_tokens > self.max_len:
            raise ConfigError(
                f"{where}: prompt of {request.prompt_len} and max_new_tokens "
                f"{_shown(request.max_new_tokens)} in {_shown(request.max_blocks)} blocks of "
                f"{_shown(request.block_length)} need {_shown(request.max_total_tokens)} "
                f"positions, but max_len is {self.max_len}: shorten the prompt or lower "
                "max_new_tokens"
            )
        return request

    def _check_stop_ids(self, where: str, ids: tuple[int, ...]) -> None:
        _check_ids(where, ids, self.vocab_size - 1)
        if self.mask_token_id in ids:
            raise ConfigError(
                f"{where} holds the mask id {self.mask_token_id}, which is never committed: remove "
                "it"
            )
        if len(ids) > MAX_STOP_IDS:
            raise ConfigError(f"{where} holds {len(ids)} ids: at most {MAX_STOP_IDS} are taken")

    def capacity(self) -> Capacity:
        """Return what a scheduler may put on this engine: slots, with memory set aside for each."""
        return Capacity(max_num_seqs=self.max_num_seqs)

    def committed(self, slot: int) -> tuple[int, ...]:
        """Return the row's final tokens before its first masked position, for streaming.

        Cut like the final answer will be; each call returns an extension of the one before.

        Raises:
            ConfigError: If this engine has no such slot.
            EngineProtocolError: If no row is in ``slot``.
        """
        if not _is_int(slot) or not 0 <= slot < self.max_num_seqs:
            raise ConfigError(
                f"slot must be an int in 0..{self.max_num_seqs - 1}, got {_shown(slot)}"
            )
        tenant = self._tenants[slot]
        if tenant is None:
            raise EngineProtocolError(f"slot {slot}: holds no row; ask between join and release")
        tokens = self._states.generated(slot)[: tenant.request.max_new_tokens]
        open_positions = np.flatnonzero(tokens == self.mask_token_id)
        if len(open_positions):
            tokens = tokens[: open_positions[0]]
        if tenant.request.truncate_at_stop:
            tokens = tokens[: _first_stop(tokens, tenant.setup)]
        return tuple(tokens.tolist())

    # -- the step protocol

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepOutcome:
        """Run one denoising step for the rows of ``batch``.

        Args:
            batch: Any selection of the rows that hold a slot; ``batch.joined`` are placed first.

        Returns:
            Rows that finished (``output`` is a :class:`D2FOutput`), whose finished blocks grew,
            whose next forward is of another kind, or that failed alone: an unsuitable request, an
            unknown or out-of-range knob of its own, NaN or infinite logits. O(tokens) plus a
            constant number of small host operations.

        Raises:
            StepOutOfMemoryError: The forward did not fit; nobody has advanced.
            EngineProtocolError: A row is not in its slot, or cannot be resumed here.
            ConfigError: A knob of the whole batch is unknown or out of range.
        """
        if batch.knobs is not self._last_batch[1]:
            _check_knobs("batch knobs", batch.knobs)
        failed = self._join(batch.joined)
        slots = self._select(batch, failed)
        if len(slots) == 0:
            masked = (0,) * len(batch.rows) if self._report_masked else None
            return StepOutcome(failed=tuple(failed), masked_remaining=masked)
        plan, ranges = self._group(slots)
        try:
            confidence, token = self._forward(plan, ranges)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            progress = np.argsort(-self._states.num_steps[slots], kind="stable")
            raise StepOutOfMemoryError(slots[progress].tolist()) from error
        lost = self._fail(plan, confidence, failed)
        num_finished = self._states.num_finished[plan.slots]
        commits = self._states.commit(plan, confidence, token)
        if self._trace:
            self._record(plan, num_finished, commits, token)
        return self._outcome(batch, plan, commits, lost, failed)

    def release(self, released: Sequence[Released]) -> None:
        """Take back slots; keep the progress of rows that were preempted with ``kept``.

        Kept progress moves to host memory until the request joins again (``Row.resumed``), or a
        release without a slot says that it never will.
        """
        for gone in released:
            if gone.slot is None:
                self._kept.pop(gone.request, None)
                continue
            tenant = self._tenants[gone.slot]
            if tenant is None or tenant.request is not gone.request:
                continue  # it failed to join
            self._tenants[gone.slot] = None
            if gone.kept:
                state = self._states.save(gone.slot)
                keys, values = (
                    torch.stack([layer[gone.slot, : state.cached] for layer in layers]).cpu()
                    for layers in self._cache
                )
                self._kept[tenant.request] = _Kept(state, keys, values, tenant.trace)
        self._last_batch = ((), NO_KNOBS)

    # -- joining and selecting

    def _join(self, joined: tuple[Row, ...]) -> list[RowFailed]:
        """Place new rows; a request that cannot run fails alone."""
        failed = []
        for row in joined:
            slot, request = row.slot, row.request
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
            setup = RowSetup(
                request.prompt,
                request.block_length,
                request.max_blocks,
                self.stop_token_ids if stop_ids is None else stop_ids,
            )
            trace: list[dict[str, Any]] | None = [] if self._trace else None
            if row.resumed:
                kept = self._kept.pop(request, None)
                if kept is None:
                    raise EngineProtocolError(
                        f"slot {slot}: request {request.id!r} is to be resumed, but this engine "
                        "keeps no progress of it: pass every Update.released to release()"
                    )
                self._states.restore(slot, setup, kept.state)
                for layer, (keys, values) in enumerate(zip(*self._cache, strict=True)):
                    keys[slot, : kept.state.cached] = kept.keys[layer].to(self._device)
                    values[slot, : kept.state.cached] = kept.values[layer].to(self._device)
                trace = kept.trace
            else:
                self._kept.pop(request, None)
                self._states.start(slot, setup)
            self._tenants[slot] = _Tenant(request, setup, trace)
            self._seed[slot] = request.seed
            self._truncates[slot] = request.truncate_at_stop
            self._partial[slot] = request.max_blocks * request.block_length > request.max_new_tokens
        return failed

    def _select(self, batch: StepBatch, failed: list[RowFailed]) -> Ints:
        """Return the batch's slots, ascending, with their knobs in force.

        A row whose own knobs are bad is left out and joins ``failed``.
        """
        if not failed and self._last_batch[0] is batch.rows and self._last_batch[1] is batch.knobs:
            return self._slots
        lost = {row.slot for row in failed}
        slots = []
        for row in batch.rows:
            if row.slot in lost:
                continue
            tenant = self._tenants[row.slot]
            if tenant is None or tenant.request is not row.request:
                raise EngineProtocolError(
                    f"slot {row.slot}: the batch has request {row.request.id!r} there, which never "
                    "joined or was released"
                )
            try:
                _check_knobs(f"request {row.request.id!r}: knobs", row.knobs)
            except ConfigError as error:
                # Its slot stays its own until release(): if this step fails, it comes again.
                failed.append(RowFailed(row.slot, error))
                continue
            self._apply(
                row.slot, tenant, {**batch.knobs, **row.knobs} if batch.knobs else row.knobs
            )
            slots.append(row.slot)
        self._slots = np.sort(np.array(slots, np.int64))
        self._prefilling = [row.slot for row in batch.rows if row.phase is Phase.PREFILL]
        self._last_batch = (batch.rows, batch.knobs) if not failed else ((), NO_KNOBS)
        return self._slots

    def _apply(self, slot: int, tenant: _Tenant, knobs: Mapping[str, Any]) -> None:
        """Set the row's thresholds and temperature: the request's, overridden by its knobs."""
        if tenant.knobs is not None and knobs == tenant.knobs:
            return
        for name in KNOBS:
            value = knobs.get(name, getattr(tenant.request, name))
            if name == "temperature":
                self._temperature[slot] = value
            else:
                getattr(self._states, name)[slot] = value
        tenant.knobs = dict(knobs)

    # -- the forward

    def _group(self, slots: Ints) -> tuple[StepPlan, list[tuple[int, int]]]:
        """Plan the step with its rows ordered so that those of similar size lie together.

        Returns:
            The plan, and the groups as ranges of its rows.
        """
        plan = self._states.plan(slots)
        queries, keys = plan.end - plan.start, plan.end
        cells = queries * keys
        padding = len(slots) * int(queries.max()) * int(keys.max()) - int(cells.sum())
        if padding <= self._split_cells:
            return plan, [(0, len(slots))]
        # Within a factor of four of each other, in cells; stable, so slots stay ascending.
        bucket = np.floor(np.log2(cells) / 2)
        order = np.argsort(bucket, kind="stable")
        edges = [0, *(np.flatnonzero(np.diff(bucket[order])) + 1).tolist(), len(slots)]
        return self._states.plan(slots[order]), list(itertools.pairwise(edges))

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _forward(
        self, plan: StepPlan, ranges: list[tuple[int, int]]
    ) -> tuple[NDArray[np.float32], Ints]:
        """Run the model once; return confidence and token of every masked position."""
        visible = self._upload(plan.visible)
        layout = PackedLayout(
            self._upload(plan.position),
            self._upload(plan.slots[plan.row] * self.max_len + plan.position),
            tuple(self._attention_group(plan, low, high, visible) for low, high in ranges),
        )
        token, masked = self._upload(plan.token), self._upload(plan.masked)
        row = plan.row[plan.masked]
        slot = plan.slots[row]
        temperature = self._temperature[slot]
        draws = None
        if temperature.any():
            position, step = plan.position[plan.masked], self._states.num_steps[slot]
            draws = uniform_draws(self._seed[slot], position, step)

        clock, on_cpu = self._clock, self._device.type == "cpu"
        began = clock() if clock else 0.0
        hidden = self.model.forward_packed(token, layout, self._cache)[masked]
        if clock and on_cpu:
            self.forward_s += clock() - began
        chunk = max(1, _LOGITS_PER_CHUNK // self.vocab_size)
        parts = []
        for low in range(0, len(row), chunk):
            part = slice(low, low + chunk)
            head_began = clock() if clock else 0.0
            logits = self.model.logits(hidden[part])
            if clock and on_cpu:
                self.forward_s += clock() - head_began
            parts.append(
                self._read_out(logits, temperature[part], None if draws is None else draws[part])
            )
        host = torch.cat(parts, 1).cpu().numpy()  # the step's only copy back
        if clock and not on_cpu:  # launches return at once: only results tell that it is over
            self.forward_s += clock() - began
        self.num_forwards += 1
        self.num_tokens += len(plan.token)
        return host[0].view(np.float32), host[1].astype(np.int64)

    def _attention_group(
        self, plan: StepPlan, low: int, high: int, visible: Tensor
    ) -> AttentionGroup:
        """Lay out the attention of the plan's rows ``low..high-1``."""
        count = plan.end[low:high] - plan.start[low:high]
        first = int((plan.end[:low] - plan.start[:low]).sum())
        last = first + int(count.sum())
        max_q, num_keys = int(count.max()), int(plan.end[low:high].max())
        pad = unpad = bias = None
        if int(count.min()) < max_q:
            offset = np.cumsum(count) - count
            # Padded queries repeat the row's last token; nobody reads what they find.
            index = np.minimum(np.arange(max_q), count[:, None] - 1) + offset[:, None]
            pad = self._upload(index)
            row = plan.row[first:last] - low
            unpad = self._upload(row * max_q + np.arange(last - first) - offset[row])
        if int(plan.visible[first:last].min()) < num_keys:
            limit = visible[first:last]
            limit = (
                limit.view(high - low, 1, max_q, 1) if pad is None else limit[pad][:, None, :, None]
            )
            hidden = self._key_positions[:num_keys] >= limit
            dtype = self._cache.keys[0].dtype
            bias = torch.zeros(hidden.shape, dtype=dtype, device=self._device)
            bias.masked_fill_(hidden, -math.inf)
        slots = plan.slots[low:high]
        contiguous = (
            int(slots[-1] - slots[0]) == high - low - 1
        )  # they ascend: then no key is copied
        where = slice(int(slots[0]), int(slots[-1]) + 1) if contiguous else self._upload(slots)
        return AttentionGroup(first, last, where, num_keys, pad, unpad, high - low, bias)

    def _read_out(
        self, logits: Tensor, temperature: NDArray[np.float64], draws: NDArray[np.float64] | None
    ) -> Tensor:
        """Choose a token per position and its probability, both as int32 bits: ``[2, c]``.

        The probability is that of the whole softmax, mask token included, as in the reference; but
        the mask token itself is never chosen.
        """
        scores = logits[:, : self.vocab_size].float()
        if draws is not None:
            divisor = np.where(temperature > 0, temperature, 1.0)
            scores = scores / self._upload(divisor).float()[:, None]
        total = scores.logsumexp(-1)
        scores[:, self.mask_token_id].fill_(-math.inf)
        top, token = scores.max(-1)
        if draws is not None and temperature.any():
            hot = np.flatnonzero(temperature)
            where, draw = self._upload(hot), self._upload(draws[hot])
            # Inverse of the cumulative distribution: one draw per position, not per token.
            steps = scores[where].double().softmax(-1).cumsum(-1)
            drawn = torch.searchsorted(steps, (draw * steps[:, -1])[:, None], right=True)[:, 0]
            drawn = torch.where(drawn < scores.shape[1], drawn, token[where])
            token[where], top[where] = drawn, scores[where, drawn]
        confidence = (top - total).exp().clamp(max=1.0)
        return torch.stack((confidence.view(torch.int32), token.int()))

    # -- what happened

    def _fail(
        self, plan: StepPlan, confidence: NDArray[np.float32], failed: list[RowFailed]
    ) -> NDArray[np.bool_]:
        """Take out rows with non-finite logits; return which of the plan's rows they are."""
        lost = np.zeros(len(plan.slots), np.bool_)
        bad = ~np.isfinite(confidence)
        if not bad.any():
            return lost
        lost[plan.row[plan.masked[bad]]] = True
        confidence[bad] = 0.0  # lets the row go through the motions; nobody sees the result
        for index in np.flatnonzero(lost).tolist():
            slot = int(plan.slots[index])
            tenant = self._tenants[slot]
            name = tenant.request.id if tenant is not None else "?"
            step = int(self._states.num_steps[slot]) + 1
            error = NonFiniteLogitsError(
                f"request {name!r}: NaN or infinite logits in its forward {step}; check the "
                "checkpoint and the dtype"
            )
            failed.append(RowFailed(slot, error))
            self._tenants[slot] = None
            # Masked keys still enter the products, and 0 * nan is nan: the next row must not see.
            for layer in (*self._cache.keys, *self._cache.values):
                layer[slot].zero_()
        return lost

    def _outcome(
        self,
        batch: StepBatch,
        plan: StepPlan,
        commits: Commits,
        lost: NDArray[np.bool_],
        failed: list[RowFailed],
    ) -> StepOutcome:
        states, slots = self._states, plan.slots
        stopped = states.stop_step[slots] > 0
        all_open = states.num_blocks[slots] == states.max_blocks[slots]
        may_end = commits.finished | (self._truncates[slots] & stopped)
        may_end |= self._partial[slots] & all_open
        finished = []
        for index in np.flatnonzero(may_end & ~lost).tolist():
            end = self._end(int(slots[index]), done=bool(commits.finished[index]))
            if end is not None:
                finished.append(end)
        over = {row.slot for row in finished} | {row.slot for row in failed}
        boundaries = tuple(
            BlockBoundary(
                slot,
                int(states.num_finished[slot]),
                int(
                    states.prompt_len[slot] + states.num_finished[slot] * states.block_length[slot]
                ),
            )
            for slot in slots[commits.grew].tolist()
            if slot not in over
        )
        phases = tuple(
            PhaseChange(slot, Phase.REUSE) for slot in self._prefilling if slot not in over
        )
        masked = None
        if self._report_masked:
            masked = tuple(
                0 if row.slot in over else self._masked_remaining(row.slot) for row in batch.rows
            )
        if not (finished or boundaries or phases or failed or self._report_masked):
            return NOTHING  # the very object: the scheduler takes its shortest path on it
        return StepOutcome(tuple(finished), boundaries, phases, tuple(failed), masked)

    def _end(self, slot: int, *, done: bool) -> RowFinished | None:
        """Return the row's finish if everything it will answer is committed."""
        tenant = self._tenants[slot]
        if tenant is None:
            return None
        request, states = tenant.request, self._states
        tokens = states.generated(slot)[: request.max_new_tokens]
        stop = _first_stop(tokens, tenant.setup)
        reason = FinishReason.EOS if stop < len(tokens) else FinishReason.LENGTH
        if request.truncate_at_stop:
            tokens = tokens[:stop]
        if not done:
            cut_short = reason is FinishReason.EOS and request.truncate_at_stop
            if (tokens == self.mask_token_id).any() or not (
                cut_short or len(tokens) == request.max_new_tokens
            ):
                return None
        output = D2FOutput(
            tuple(tokens.tolist()),
            int(states.num_steps[slot]),
            int(states.num_blocks[slot]),
            int(states.stop_step[slot]) or None,
            None if tenant.trace is None else tuple(tenant.trace),
        )
        return RowFinished(slot, reason, output)

    def _masked_remaining(self, slot: int) -> int:
        """Positions that this row may still have to commit, unopened blocks included."""
        states = self._states
        opened = int((states.generated(slot) == self.mask_token_id).sum())
        if states.stop_step[slot]:
            return opened
        unopened = states.max_blocks[slot] - states.num_blocks[slot]
        return opened + int(unopened * states.block_length[slot])

    def _record(self, plan: StepPlan, num_finished: Ints, commits: Commits, token: Ints) -> None:
        """Append one entry per row to its trace, in the words of the golden data."""
        states = self._states
        row, position = plan.row[plan.masked], plan.position[plan.masked]
        forced = set(commits.forced.tolist())
        committed: list[list[list[int]]] = [[] for _ in plan.slots]
        forced_blocks: list[list[int]] = [[] for _ in plan.slots]
        for index in commits.chosen.tolist():
            at = int(position[index])
            committed[row[index]].append([at, int(token[index])])
            if index in forced:
                slot = plan.slots[row[index]]
                block = (at - states.prompt_len[slot]) // states.block_length[slot] + 1
                forced_blocks[row[index]].append(int(block))
        for index, slot in enumerate(plan.slots.tolist()):
            tenant = self._tenants[slot]
            if tenant is None or tenant.trace is None:
                continue
            start, blocks = int(plan.start[index]), int(plan.num_blocks[index])
            ends = states.prompt_len[slot] + np.arange(blocks + 1) * states.block_length[slot]
            tenant.trace.append(
                {
                    "step": int(states.num_steps[slot]),
                    "start": start,
                    "len": int(plan.end[index]) - start,
                    "cache": start,
                    "cache_after": int(states.cached[slot]),
                    "n_blocks": blocks,
                    "states": "".join(
                        "A" if block > num_finished[index] else "C" if end <= start else "T"
                        for block, end in enumerate(ends.tolist())
                    ),
                    "complete": [
                        block
                        for block in range(int(num_finished[index]) + 1, blocks + 1)
                        if plan.ready[index, block - 1]
                    ],
                    "forced": forced_blocks[index],
                    "commits": committed[index],
                }
            )


def _first_stop(tokens: Ints, setup: RowSetup) -> int:
    """Return the index of the first stop id, or the number of tokens."""
    hits = np.flatnonzero(np.isin(tokens, setup.stop_ids))
    return int(hits[0]) if len(hits) else len(tokens)


def _is_out_of_memory(error: RuntimeError) -> bool:
    # The CPU allocator has no exception type of its own.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
