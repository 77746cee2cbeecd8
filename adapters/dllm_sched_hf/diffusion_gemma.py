"""DiffusionGemma of transformers, stepped by the scheduler: one decoder forward for all rows.

A row's answer is a sequence of canvases of ``config.canvas_length`` tokens. Before a canvas the
encoder runs what the row has committed since (at first its prompt) and leaves keys and values
behind; then every step sends the canvas through the decoder once, accepts what it is sure of, and
fills the rest with random tokens, until the canvas is stable and confident or its steps are used
up. So a step here is a denoising step: one decoder forward, and before it one encoder forward for
those rows that begin a canvas.

**What is equal to** ``generate``, **and what is not.** Each request is decoded as
``model.generate`` decodes it alone after ``torch.manual_seed(request.seed)``: the same draws in the
same order, from a generator of its own on the model's device. The tests hold the token ids to be
the same in float32 on a CPU, whoever shares the batch. What differs:

- ``generate`` with several rows draws for all of them from one generator, in the shape of the
  batch, so its rows depend on each other. That is not reproduced: here each row is alone.
- ``generate`` returns whole canvases; here the answer is cut to ``max_new_tokens``. With
  ``truncate_at_stop`` it also ends before the first stop id; without, what follows the stop id is
  ``pad_token_id``, as in ``generate``.
- Rows of different length share a forward by padding: keys by masks in the decoder (no canvas is
  ever padded), tokens in the encoder (``num_padding_tokens``). Sums are then taken in other orders
  than alone: logits agree up to rounding, so that a near tie, or half precision, may change an id.
- Text only, and no logits processors, stopping criteria or caches of the caller's.

Source: ``transformers.models.diffusion_gemma``; Ben-Hamu et al., "Accelerated Sampling from Masked
Diffusion Models via Entropy Bounded Unmasking" (arXiv 2505.24857), for the acceptance rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Categorical
from transformers import DiffusionGemmaForBlockDiffusion

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
from dllm_sched.errors import ConfigError
from dllm_sched.request import FinishReason, Phase, Request
from dllm_sched.runtime.engine import Progress
from dllm_sched_hf.decoder import (
    Bools,
    Ints,
    PromptRequest,
    as_tuple,
    check_field,
    check_knobs,
    check_token_ids,
    is_int,
    shown,
)
from dllm_sched_hf.engine import (
    MAX_STOP_IDS,
    DecodeOutput,
    NonFiniteLogitsError,
    StepOutOfMemoryError,
    _is_out_of_memory,
    check_released,
    check_rows,
    check_unchanged,
    tenant_in,
)

__all__ = ["DiffusionGemmaEngine", "DiffusionGemmaRequest"]

_SLIDING = "sliding_attention"
_MOST = 10**6
_KNOBS = ("entropy_bound", "confidence_threshold")
_SETTINGS = (
    "max_denoising_steps",
    "t_min",
    "t_max",
    "stability_threshold",
    "confidence_threshold",
)  # of a generation config; entropy_bound is its sampler's

# The forward's name for the cache changed between releases of transformers.
_CACHE = "cache"
if _CACHE not in inspect.signature(DiffusionGemmaForBlockDiffusion.forward).parameters:
    _CACHE = "past_key_values"


# -- requests


def _check_count(request: Request, field: attrs.Attribute[Any], value: object) -> None:
    low = 0 if field.name == "stability_threshold" else 1
    if not is_int(value) or not low <= value <= _MOST:
        raise ConfigError(
            f"request {request.id!r}: {field.name} must be an int in {low}..{_MOST}, got "
            f"{shown(value)}"
        )


_COUNT = attrs.validators.optional(_check_count)
_NUMBER = attrs.validators.optional(check_field)


@attrs.frozen(kw_only=True, eq=False)
class DiffusionGemmaRequest(PromptRequest):
    """A request with its prompt and its settings for DiffusionGemma; None = the model's own.

    The model's own are those of its ``generation_config``, and where that names none, those with
    which its ``generate`` fills in. ``seed`` always matters: this model has no greedy mode.

    Attributes:
        block_length: The model's ``canvas_length``.
        max_denoising_steps: Steps of one canvas at most, in 1..1,000,000.
        entropy_bound: Above 0, in nats: of the positions, surest first, those are accepted before
            which the entropies add up to no more.
        t_min: Temperature that the schedule falls towards, in [0, 1e6], below ``t_max``.
        t_max: Temperature of a canvas' first step, in [0.001, 1e6].
        stability_threshold: A canvas can be done once its most probable tokens have stayed the same
            for so many steps, in 0..1,000,000 ...
        confidence_threshold: ... and their mean entropy is below this, above 0, in nats.

    Raises:
        ConfigError: If a field is out of its range; names the field.
    """

    block_length: int = 256
    max_denoising_steps: int | None = attrs.field(default=None, validator=_COUNT)
    entropy_bound: float | None = attrs.field(default=None, validator=_NUMBER)
    t_min: float | None = attrs.field(default=None, validator=_NUMBER)
    t_max: float | None = attrs.field(default=None, validator=_NUMBER)
    stability_threshold: int | None = attrs.field(default=None, validator=_COUNT)
    confidence_threshold: float | None = attrs.field(default=None, validator=_NUMBER)


@attrs.define(eq=False)
class _Tenant:
    """The row in a slot: what it has, how far it is, and what it draws from."""

    slot: int
    request: DiffusionGemmaRequest
    settings: dict[str, Any]  #: the request's, without None; knobs overwrite
    stop_ids: Ints
    generator: torch.Generator
    tokens: list[int]  #: prompt and finished canvases
    phase: Phase  #: of its coming step, as the scheduler knows it
    given: tuple[Knobs, Knobs] | None = None  #: its own and the batch's that are in force
    num_cached: int = 0  #: of ``tokens``, those that the encoder has run
    num_canvases: int = 0  #: finished
    step: int = 0  #: steps that the open canvas has made
    num_same: int = 0  #: steps in a row after which its most probable tokens were the same
    draft: Ints | None = None  #: these tokens
    num_steps: int = 0
    stop_step: int = 0  #: 0 = no stop id yet


# -- the cache


class _SlotCache:
    """Keys and values of every slot: per layer a pair of ``[slots, kv heads, size, head dim]``.

    The token at position p lies at ``p % size``: a full layer keeps them all, a sliding one the
    last ``sliding_window - 1``, which is what the canvas and its encoding attend to.
    """

    def __init__(
        self, layers: Any, window: int, num_slots: int, max_len: int, like: Tensor
    ) -> None:
        sliding = min(window - 1, max_len)
        self.kinds = [layer.self_attn.layer_type for layer in layers]
        self.size = {kind: sliding if kind == _SLIDING else max_len for kind in self.kinds}
        self.layers = []
        for kind, layer in zip(self.kinds, layers, strict=True):
            head_dim = layer.self_attn.head_dim
            heads = layer.self_attn.k_proj.out_features // head_dim
            shape = (num_slots, heads, self.size[kind], head_dim)
            self.layers.append((like.new_zeros(shape), like.new_zeros(shape)))

    def positions(self, kind: str, length: Ints) -> Ints:
        """Return which position each place holds after ``length`` ``[r]`` tokens; < 0 = none."""
        last = length[:, None] - 1
        size = self.size[kind]
        return last - (last - np.arange(min(size, int(length.max())))) % size

    def write(
        self, new: list[tuple[Tensor, Tensor]], slots: Ints, start: Ints, count: Ints
    ) -> None:
        """Store a forward's keys and values: of each row ``count`` from position ``start``."""
        where = {}
        column = np.arange(int(count.max()))
        for kind, size in self.size.items():
            kept = (column < count[:, None]) & (column >= count[:, None] - size)
            row, at = np.nonzero(kept)
            device = self.layers[0][0].device
            where[kind] = [
                torch.from_numpy(index).to(device)
                for index in (slots[row], (start[row] + at) % size, row, at)
            ]
        for kind, stored, fresh in zip(self.kinds, self.layers, new, strict=True):
            slot, place, row_index, at_index = where[kind]
            for tensor, values in zip(stored, fresh, strict=True):
                tensor[slot, :, place] = values[row_index, :, at_index]

    def save(self, slot: int, length: int) -> list[tuple[Tensor, ...]]:
        """Copy a slot's ``length`` tokens to the host."""
        return [tuple(_to_host(t[slot, :, :length]) for t in pair) for pair in self.layers]

    def restore(self, slot: int, saved: list[tuple[Tensor, ...]]) -> None:
        """Put back what :meth:`save` took; any slot will do."""
        for pair, values in zip(self.layers, saved, strict=True):
            for tensor, value in zip(pair, values, strict=True):
                tensor[slot, :, : value.shape[1]] = value.to(tensor.device)

    def clear(self, slot: int) -> None:
        """Zero a slot: masked values still enter the products, and 0 * nan is nan."""
        for pair in self.layers:
            for tensor in pair:
                tensor[slot].zero_()


class _Layer:
    """One layer of a view. Slices only when asked: no step copies the whole cache at once."""

    def __init__(self, pair: tuple[Tensor, Tensor], where: slice | Tensor, width: int) -> None:
        self._pair, self._where, self._width = pair, where, width

    @property
    def keys(self) -> Tensor:
        return self._pair[0][self._where, :, : self._width]

    @property
    def values(self) -> Tensor:
        return self._pair[1][self._where, :, : self._width]


class _View:
    """What the model takes for its cache: the rows of one forward.

    New keys and values are put aside: nothing is written before the forward is through.
    """

    is_compileable = False

    def __init__(self, cache: _SlotCache, where: slice | Tensor, length: Ints) -> None:
        longest = int(length.max())
        self.layers = [
            _Layer(pair, where, min(cache.size[kind], longest))
            for kind, pair in zip(cache.kinds, cache.layers, strict=True)
        ]
        self.new: list[tuple[Tensor, Tensor]] = []

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what is stored with what is new behind it; layers come in their order."""
        self.new.append((keys, values))
        layer = self.layers[layer_idx]
        return torch.cat((layer.keys, keys), 2), torch.cat((layer.values, values), 2)


class _Kept(NamedTuple):
    """A preempted row's progress; its tensors are on the host."""

    tenant: _Tenant
    cache: list[tuple[Tensor, ...]]
    canvas: Tensor
    conditioning: Tensor


# -- the engine


class DiffusionGemmaEngine:
    """Batched DiffusionGemma behind the scheduler's step protocol.

    Takes :class:`DiffusionGemmaRequest`. Rows join late, leave early, differ in length and
    settings, may sit out a step, and are kept (with canvas, self-conditioning and generator, on the
    host) or restarted when preempted.

    Args:
        model: A ``DiffusionGemmaForBlockDiffusion`` with ``sdpa`` or ``eager`` attention; runs
            where its weights are and in their dtype. It is put into ``eval`` mode. Mode, dtype and
            device must stay what they are, which is looked at when rows join.
        max_num_seqs: Slots, >= 1. Each holds the last logits of its canvas for self-conditioning,
            ``canvas_length * vocab_size`` values, beside its keys and values.
        max_len: Tokens a slot can hold, prompt and whole canvases; None = the model's window.
        stop_token_ids: For requests that name none; None = the ``eos_token_id`` of the model's
            ``generation_config``, if it has any.
        report_masked: Fill ``StepOutcome.masked_remaining``.

    Raises:
        ConfigError: If an argument is out of its range; names it.

    Attributes:
        num_forwards: Decoder forwards so far, each for all rows of its step.
        num_encodes: Encoder forwards, each for all rows that began a canvas in one step.
        num_tokens: Tokens of rows that went through either.
        num_padding_tokens: Tokens that only filled up the encoder's shape.
        max_num_seqs: Slots.
        max_len: Tokens a slot can hold.
        canvas_length: Tokens of a canvas, the requests' ``block_length``.
        vocab_size: Ids that can be committed.
        stop_token_ids: For requests that name none.

    Source: see the module.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_num_seqs: int,
        max_len: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
        report_masked: bool = False,
    ) -> None:
        if not isinstance(model, DiffusionGemmaForBlockDiffusion):
            raise ConfigError(
                "model must be a DiffusionGemmaForBlockDiffusion, got " + type(model).__name__
            )
        config = model.config.text_config
        window = config.max_position_embeddings
        if not is_int(max_num_seqs) or max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs must be an int >= 1, got {shown(max_num_seqs)}")
        if max_len is not None and not (is_int(max_len) and 1 <= max_len <= window):
            raise ConfigError(
                f"max_len must be an int in 1..{window} (the model's window), got {shown(max_len)}"
            )
        if not isinstance(report_masked, bool):
            raise ConfigError(f"report_masked must be True or False, got {shown(report_masked)}")
        _check_model(model)
        self.model = model.eval()
        self.max_num_seqs = max_num_seqs
        self.max_len = window if max_len is None else max_len
        self.canvas_length: int = model.config.canvas_length
        self.vocab_size: int = config.vocab_size
        defaults, _ = model._prepare_generation_config(None)  # what `generate` would take
        self._defaults = {name: getattr(defaults, name) for name in _SETTINGS}
        self._defaults["entropy_bound"] = defaults.sampler_config.entropy_bound
        self._pad_token_id: int | None = defaults.pad_token_id
        if stop_token_ids is None:
            eos = defaults.eos_token_id
            stop_token_ids = () if eos is None else [eos] if is_int(eos) else eos
        self.stop_token_ids: tuple[int, ...] = as_tuple(stop_token_ids)
        self._check_stop_ids("stop_token_ids", self.stop_token_ids)
        self.num_forwards = self.num_encodes = self.num_tokens = self.num_padding_tokens = 0
        self._report_masked = report_masked
        weight = model.model.decoder.embed_tokens.weight.detach()
        self._device, self._window = weight.device, config.sliding_window
        self._cache = _SlotCache(
            model.model.decoder.layers, config.sliding_window, max_num_seqs, self.max_len, weight
        )
        shape = (max_num_seqs, self.canvas_length)
        self._canvas = torch.zeros(shape, dtype=torch.int64, device=weight.device)
        self._conditioning = weight.new_zeros((*shape, self.vocab_size))
        self._tenants: list[_Tenant | None] = [None] * max_num_seqs
        # Slots whose rows have ended, until others join: steps planned ahead still name them.
        self._over: set[int] = set()
        self._kept: dict[Request, _Kept] = {}
        self._checked_knobs = NO_KNOBS
        self._checked_rows: tuple[Row, ...] = ()

    # -- requests

    def request(self, id: str, prompt: Sequence[int], **fields: Any) -> DiffusionGemmaRequest:
        """Return a request that this engine can run; ``block_length`` is the canvas unless given.

        Raises:
            ConfigError: If a field is out of range, or the request does not suit the model.
        """
        fields = {"block_length": self.canvas_length} | fields
        request = DiffusionGemmaRequest(id, prompt=prompt, **fields)
        self.check(request)
        return request

    def check(self, request: Request) -> None:
        """Raise if this engine cannot run the request. O(prompt).

        Raises:
            ConfigError: Wrong type, unknown or image ids in the prompt, unknown stop ids, another
                block than the canvas, a schedule that rises, or more canvases than a slot holds;
                names the field and the fix.
        """
        self._checked(request)

    def _checked(self, request: Request) -> tuple[DiffusionGemmaRequest, dict[str, Any]]:
        where = f"request {request.id!r}"
        if not isinstance(request, DiffusionGemmaRequest):
            raise ConfigError(
                f"{where}: must be a DiffusionGemmaRequest, got {type(request).__name__}"
            )
        if max(request.prompt) >= self.vocab_size:
            raise ConfigError(
                f"{where}: prompt holds id {max(request.prompt)}, but the model's vocabulary has "
                f"{self.vocab_size} ids"
            )
        image = self.model.config.image_token_id
        if image in request.prompt:
            raise ConfigError(
                f"{where}: prompt holds the image id {image} at position "
                f"{request.prompt.index(image)}: remove it, this engine takes text only"
            )
        if request.stop_token_ids is not None:
            self._check_stop_ids(f"{where}: stop_token_ids", request.stop_token_ids)
        if request.block_length != self.canvas_length:
            raise ConfigError(
                f"{where}: block_length must be the model's canvas_length {self.canvas_length}, "
                f"got {shown(request.block_length)}"
            )
        if request.max_total_tokens > self.max_len:
            raise ConfigError(
                f"{where}: prompt of {request.prompt_len} and max_new_tokens "
                f"{shown(request.max_new_tokens)} in {shown(request.max_blocks)} canvases of "
                f"{self.canvas_length} need {shown(request.max_total_tokens)} positions, but "
                f"max_len is {self.max_len}: shorten the prompt or lower max_new_tokens"
            )
        settings = {
            name: default if (value := getattr(request, name)) is None else value
            for name, default in self._defaults.items()
        }
        if settings["t_min"] >= settings["t_max"]:
            raise ConfigError(
                f"{where}: t_min must be below t_max, got {settings['t_min']} and "
                f"{settings['t_max']}"
            )
        return request, settings

    def _check_stop_ids(self, where: str, ids: tuple[int, ...]) -> None:
        check_token_ids(where, ids, self.vocab_size - 1)
        if len(ids) > MAX_STOP_IDS:
            raise ConfigError(f"{where} holds {len(ids)} ids: at most {MAX_STOP_IDS} are taken")

    def capacity(self) -> Capacity:
        """Return what a scheduler may put on this engine: slots, with memory set aside for each.

        A forward works on two blocks of a row at most: the canvas, and the one that is encoded.
        """
        return Capacity(max_num_seqs=self.max_num_seqs, window_blocks=2)

    def progress(self, slot: int, start: int = 0) -> Progress:
        """Say how the row's answer stands from position ``start`` of it on, for streaming.

        Cut like the final answer will be. Committed are the finished canvases; provisional are the
        most probable tokens of the open one, once it has made a step. O(answer).

        Raises:
            ConfigError: If this engine has no such slot, or ``start`` is no int >= 0.
            EngineProtocolError: If no row is in ``slot``.
        """
        row = tenant_in(self._tenants, slot, start)
        committed, _ = self._cut(row, row.tokens)
        draft = [] if row.draft is None else row.draft.tolist()
        whole, _ = self._cut(row, row.tokens + draft)
        return Progress(committed[start:], whole[max(start, len(committed)) :])

    # -- the step protocol

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> StepOutcome:
        """Run one denoising step for the rows of ``batch``.

        Args:
            batch: Any selection of the rows that hold a slot; ``batch.joined`` are placed first.

        Returns:
            Rows that finished (``output`` is a :class:`DecodeOutput`), that finished a canvas, that
            are through their first step, or that failed alone: an unsuitable request, an unknown or
            out-of-range knob of its own, NaN logits.

        Raises:
            StepOutOfMemoryError: A forward did not fit; nobody has advanced.
            EngineProtocolError: A row is not in its slot, is named twice, or cannot be placed or
                resumed where it joins; or the model has left ``eval`` mode, its dtype or its device
                when rows join.
            ConfigError: A knob of the whole batch is unknown or out of range.
        """
        self._check(batch)
        failed = self._join(batch.joined)
        rows = self._select(batch, failed)
        finished: list[RowFinished] = []
        boundaries: list[BlockBoundary] = []
        phases: list[PhaseChange] = []
        if rows:
            draft, confident, finite = self._forward(rows)
            for index, row in enumerate(rows):
                row.num_steps += 1
                if not finite[index]:
                    failed.append(self._fail(row))
                    continue
                if self._advance(row, draft[index], confident=bool(confident[index])):
                    end = self._end(row)
                    if end is not None:
                        finished.append(end)
                        continue
                    boundaries.append(BlockBoundary(row.slot, row.num_canvases, len(row.tokens)))
                if row.phase is not Phase.REUSE:
                    row.phase = Phase.REUSE
                    phases.append(PhaseChange(row.slot, Phase.REUSE))
        self._over |= {row.slot for row in finished} | {row.slot for row in failed}
        masked = self._masked_remaining(batch) if self._report_masked else None
        if not (finished or boundaries or phases or failed or self._report_masked):
            return NOTHING
        return StepOutcome(tuple(finished), tuple(boundaries), tuple(phases), tuple(failed), masked)

    def release(self, released: Sequence[Released]) -> None:
        """Take back slots; keep the progress of rows that were preempted with ``kept``.

        Kept progress moves to host memory until the request joins again (``Row.resumed``), or a
        release without a slot says that it never will.

        Raises:
            EngineProtocolError: If this engine has no such slot. Nothing was released then.
        """
        check_released(released, self.max_num_seqs)
        self._checked_rows = ()
        for gone in released:
            if not gone.kept:  # also of a row whose step failed before it was resumed
                self._kept.pop(gone.request, None)
            if gone.slot is None:
                continue
            row = self._tenants[gone.slot]
            if row is None or row.request is not gone.request:
                continue  # it failed to join
            self._tenants[gone.slot] = None
            if gone.kept:
                self._kept[row.request] = _Kept(
                    row,
                    self._cache.save(gone.slot, row.num_cached),
                    _to_host(self._canvas[gone.slot]),
                    _to_host(self._conditioning[gone.slot]),
                )
            if row.step == 0 and row.num_cached == len(row.tokens):
                # Encoded, but its decoding failed for another reason: nobody saw if that was NaN.
                self._cache.clear(gone.slot)

    # -- joining and selecting

    def _check(self, batch: StepBatch) -> None:
        """Raise unless this engine can run the batch; looks only at what was not there before."""
        if batch.knobs is not self._checked_knobs:
            check_knobs("batch knobs", _KNOBS, batch.knobs)
            self._checked_knobs = batch.knobs
        if batch.joined:
            weight = self.model.model.decoder.embed_tokens.weight
            check_unchanged(self.model, weight, self._device, self._conditioning.dtype)
        if batch.joined or batch.rows is not self._checked_rows:
            check_rows(batch, batch.rows, self._tenants, self._over, self._kept)

    def _join(self, joined: tuple[Row, ...]) -> list[RowFailed]:
        """Place new rows; a request that cannot run fails alone."""
        failed = []
        for row in joined:
            slot = row.slot
            self._over.discard(slot)
            here = self._tenants[slot]
            if row.resumed and here is not None and here.request is row.request:
                continue  # placed by a step that failed before it advanced anybody
            try:
                request, settings = self._checked(row.request)
            except ConfigError as error:
                self._tenants[slot] = None
                failed.append(RowFailed(slot, error))
                continue
            kept = self._kept.get(request) if row.resumed else None
            if kept is None:
                stop_ids = request.stop_token_ids
                self._tenants[slot] = _Tenant(
                    slot,
                    request,
                    settings,
                    np.array(self.stop_token_ids if stop_ids is None else stop_ids, np.int64),
                    torch.Generator(self._device).manual_seed(request.seed),
                    list(request.prompt),
                    row.phase,
                )
            else:
                tenant = kept.tenant
                tenant.slot, tenant.phase = slot, row.phase
                self._cache.restore(slot, kept.cache)
                self._canvas[slot] = kept.canvas.to(self._device)
                self._conditioning[slot] = kept.conditioning.to(self._device)
                self._tenants[slot] = tenant
            self._kept.pop(request, None)
        return failed

    def _select(self, batch: StepBatch, failed: list[RowFailed]) -> list[_Tenant]:
        """Return the batch's rows by slot, ascending, with their knobs in force.

        A row whose own knobs are bad is left out and joins ``failed``.
        """
        lost = {row.slot for row in failed}
        rows = []
        for row in batch.rows:
            tenant = self._tenants[row.slot]
            if tenant is None or row.slot in lost or row.slot in self._over:
                continue
            if tenant.given is None or (
                tenant.given[0] is not row.knobs or tenant.given[1] is not batch.knobs
            ):
                try:
                    check_knobs(f"request {row.request.id!r}: knobs", _KNOBS, row.knobs)
                except ConfigError as error:
                    # Its slot stays its own until release(): if this step fails, it comes again.
                    failed.append(RowFailed(row.slot, error))
                    continue
                knobs = {**batch.knobs, **row.knobs}
                for name in _KNOBS:
                    own = getattr(tenant.request, name)
                    own = self._defaults[name] if own is None else own
                    tenant.settings[name] = knobs.get(name, own)
                tenant.given = (row.knobs, batch.knobs)
            rows.append(tenant)
        self._checked_rows = () if failed else batch.rows
        return sorted(rows, key=lambda row: row.slot)

    # -- the forwards

    def _forward(self, rows: list[_Tenant]) -> tuple[Ints, Bools, Bools]:
        """Run the step; return each row's most probable tokens, and if they are sure and finite.

        If it fails, generators are where they were, and what was encoded stays encoded.
        """
        states = [row.generator.get_state() for row in rows]
        try:
            starting = [row for row in rows if row.step == 0]
            behind = [row for row in starting if row.num_cached < len(row.tokens)]
            if behind:
                self._encode(behind)
            for row in starting:
                self._canvas[row.slot] = self._noise(row)
            return self._denoise(rows)
        except BaseException as error:
            for row, state in zip(rows, states, strict=True):
                row.generator.set_state(state)
            if not isinstance(error, RuntimeError) or not _is_out_of_memory(error):
                raise
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            progress = sorted(rows, key=lambda row: -row.num_steps)
            raise StepOutOfMemoryError([row.slot for row in progress]) from error

    def _encode(self, rows: list[_Tenant]) -> None:
        """Run what the rows have committed since their last canvas, each padded to the longest."""
        slots, start = _column(rows, "slot"), _column(rows, "num_cached")
        count = np.array([len(row.tokens) for row in rows]) - start
        column = np.arange(int(count.max()))
        # Padding repeats the row's last token, where it stands; as a key it comes after all.
        query = start[:, None] + np.minimum(column, count[:, None] - 1)
        fresh = start[:, None] + column
        token = [[row.tokens[at] for at in ats] for row, ats in zip(rows, query, strict=True)]
        position = self._upload(query)
        masks = {}
        for kind in self._cache.size:
            key = self._upload(np.hstack((self._cache.positions(kind, start), fresh)))[:, None]
            at = position[:, :, None]
            seen = (key >= 0) & (key <= at)
            if kind == _SLIDING:
                seen &= key > at - self._window
            masks[kind] = self._mask(seen)
        view = _View(self._cache, self._where(slots), start)
        self.model.model.encoder(
            input_ids=self._upload(np.array(token)),
            attention_mask=masks,
            position_ids=position,
            **{_CACHE: view},
        )
        self._cache.write(view.new, slots, start, count)
        for row in rows:
            row.num_cached = len(row.tokens)
        self.num_encodes += 1
        self.num_tokens += int(count.sum())
        self.num_padding_tokens += query.size - int(count.sum())

    def _denoise(self, rows: list[_Tenant]) -> tuple[Ints, Bools, Bools]:
        """Send every canvas through the decoder, and replace it by the next."""
        length, step = _column(rows, "num_cached"), _column(rows, "step")
        where = self._where(_column(rows, "slot"))
        masks: dict[str, Tensor | None] = {}
        for kind in self._cache.size:
            stored = self._cache.positions(kind, length) >= 0
            seen = np.pad(stored, ((0, 0), (0, self.canvas_length)), constant_values=True)
            masks[kind] = None if seen.all() else self._mask(self._upload(seen)[:, None])
        logits: Tensor = self.model(
            decoder_input_ids=self._canvas[where],
            self_conditioning_logits=self._conditioning[where] if step.any() else None,
            self_conditioning_mask=self._upload(step > 0) if step.any() else None,
            decoder_attention_mask=masks,
            decoder_position_ids=self._upload(length[:, None] + np.arange(self.canvas_length)),
            **{_CACHE: _View(self._cache, where, length)},
        ).logits
        logits /= self._temperature(rows)
        entropy = Categorical(logits=logits, validate_args=False).entropy()
        finite = entropy.isfinite()
        # Lets a failing row be drawn for; nobody sees what comes of it.
        logits.masked_fill_(~finite[..., None], 0.0)
        probabilities = logits.softmax(-1)
        drawn, noise = [], []
        for row, own in zip(rows, probabilities, strict=True):  # in the order of `generate`
            drawn.append(torch.multinomial(own, 1, generator=row.generator)[:, 0])
            noise.append(self._noise(row))
        ordered, order = entropy.sort(-1)
        accepted = ordered.cumsum(-1) - ordered <= self._setting(rows, "entropy_bound")
        accepted = torch.zeros_like(accepted).scatter(-1, order, accepted)
        canvas = torch.where(accepted, torch.stack(drawn), torch.stack(noise))
        confident = entropy.mean(-1, keepdim=True) < self._setting(rows, "confidence_threshold")
        result = torch.cat((logits.argmax(-1), confident, finite.all(-1, keepdim=True)), 1)
        host = result.cpu().numpy()  # the step's only copy back
        conditioning = logits.to(self._conditioning.dtype)
        self._canvas[where] = canvas
        self._conditioning[where] = conditioning
        self.num_forwards += 1
        self.num_tokens += canvas.numel()
        return host[:, :-2], host[:, -2] > 0, host[:, -1] > 0

    def _temperature(self, rows: list[_Tenant]) -> Tensor:
        """Return each row's temperature in float32, ``[r, 1, 1]``, rounded as in `generate`."""
        single = np.float32
        low = np.array([row.settings["t_min"] for row in rows], single)
        fall = np.array([row.settings["t_max"] - row.settings["t_min"] for row in rows], single)
        most = np.array([row.settings["max_denoising_steps"] for row in rows])
        left = (most - _column(rows, "step")).astype(single) / most.astype(single)
        return self._upload(low + fall * left)[:, None, None]

    def _setting(self, rows: list[_Tenant], name: str) -> Tensor:
        """Return a setting of each row in float32, ``[r, 1]``."""
        return self._upload(np.array([row.settings[name] for row in rows], np.float32))[:, None]

    def _noise(self, row: _Tenant) -> Tensor:
        """Draw a canvas of random tokens, ``[canvas_length]``."""
        shape = (1, self.canvas_length)
        generator, device = row.generator, self._device
        return torch.randint(self.vocab_size, shape, generator=generator, device=device)[0]

    def _mask(self, seen: Tensor) -> Tensor:
        """Return the attention mask of ``seen`` ``[r, queries or 1, keys]``."""
        seen = seen[:, None]
        if self.model.config._attn_implementation == "sdpa":
            return seen
        dtype = self._conditioning.dtype
        return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

    def _where(self, slots: Ints) -> slice | Tensor:
        """Return how to index these slots, ascending: if they are contiguous, nothing is copied."""
        first, last = int(slots[0]), int(slots[-1])
        return slice(first, last + 1) if last - first == len(slots) - 1 else self._upload(slots)

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    # -- what happened

    def _advance(self, row: _Tenant, draft: Ints, *, confident: bool) -> bool:
        """Move a row one step on; return whether its canvas is done."""
        same = row.draft is not None and bool((draft == row.draft).all())
        row.num_same = row.num_same + 1 if same else 0
        row.draft = draft
        row.step += 1
        stable = row.num_same >= row.settings["stability_threshold"]
        if not (stable and confident) and row.step < row.settings["max_denoising_steps"]:
            return False
        row.tokens += draft.tolist()
        row.num_canvases += 1
        row.step = 0
        row.draft = None
        if np.isin(draft, row.stop_ids).any():
            row.stop_step = row.num_steps
        return True

    def _end(self, row: _Tenant) -> RowFinished | None:
        """Return the row's finish if it holds a stop id, or all its canvases."""
        if not row.stop_step and row.num_canvases < row.request.max_blocks:
            return None
        tokens, stopped = self._cut(row, row.tokens)
        return RowFinished(
            row.slot,
            FinishReason.EOS if stopped else FinishReason.LENGTH,
            DecodeOutput(tokens, row.num_steps, row.num_canvases, row.stop_step or None),
        )

    def _cut(self, row: _Tenant, tokens: list[int]) -> tuple[tuple[int, ...], bool]:
        """Return the answer that the row's tokens make, and whether it holds a stop id."""
        start = row.request.prompt_len
        answer = np.array(tokens[start : start + row.request.max_new_tokens], np.int64)
        stops = np.isin(answer, row.stop_ids)
        stopped = bool(stops.any())
        stop = int(stops.argmax()) if stopped else len(answer)
        if row.request.truncate_at_stop:
            answer = answer[:stop]
        elif self._pad_token_id is not None:
            answer[stop + 1 :] = self._pad_token_id
        return tuple(answer.tolist()), stopped

    def _fail(self, row: _Tenant) -> RowFailed:
        """Take out a row with NaN logits."""
        self._tenants[row.slot] = None
        self._cache.clear(row.slot)
        error = NonFiniteLogitsError(
            f"request {row.request.id!r}: NaN or infinite logits in its forward {row.num_steps}; "
            "check the checkpoint and the dtype"
        )
        return RowFailed(row.slot, error)

    def _masked_remaining(self, batch: StepBatch) -> tuple[int, ...]:
        """Return how many tokens of each row's answer are not final."""
        left = []
        for slot in (row.slot for row in batch.rows):
            row = None if slot in self._over else self._tenants[slot]
            done = row.num_canvases * self.canvas_length if row else 0
            left.append(row.request.max_new_tokens - done if row else 0)
        return tuple(left)


def _check_model(model: Any) -> None:
    """Raise if a row's tokens would depend on its neighbours, or on what is not implemented.

    Raises:
        ConfigError: Names what is set in the model's config.
    """
    config = model.config.text_config
    if model.config._attn_implementation not in {"sdpa", "eager"}:
        raise ConfigError(
            "model: attn_implementation must be sdpa or eager, got "
            f"{model.config._attn_implementation!r}"
        )
    if config.use_bidirectional_attention == "all":
        raise ConfigError(
            "model: use_bidirectional_attention must be None or 'vision': with 'all' the encoder "
            "is not causal, which this engine does not know"
        )
    if config.sliding_window < 2:
        raise ConfigError(f"model: sliding_window must be >= 2, got {config.sliding_window!r}")
    for kind, rope in config.rope_parameters.items():
        if rope and ("dynamic" in rope["rope_type"] or rope["rope_type"] == "longrope"):
            raise ConfigError(
                f"model: rope_type {rope['rope_type']!r} ({kind}) follows the longest row of a "
                "forward: rows would depend on their neighbours"
            )


def _column(rows: list[_Tenant], name: str) -> Ints:
    return np.array([getattr(row, name) for row in rows], np.int64)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)  # a copy also if it is there already
