"""What a decoder is: which tokens go through the next forward, and which predictions commit.

One engine (``dllm_sched_hf.engine``) serves any :class:`Decoder`, and a decoder is one file: a
request with its settings, and the integer work of a step for many rows at once. A step is

1. :meth:`Decoder.plan`: name the tokens of the forward and the positions to be predicted;
2. the engine's forward, which gives one (confidence, token) per such position;
3. :meth:`Decoder.commit`: commit tokens, finish blocks, account for what is now cached.

Nothing is written before ``commit``: a step that fails in between has advanced nobody.

This is integer work on small arrays, and it runs on the host, not in torch on the device: the host
needs its result before it can shape the next forward, one copy of the predictions has to come back
in any case, and ratios and draws come out the same to the last bit whatever the device. Whatever
would take numpy many calls is a compiled loop over the rows (``dllm_sched_hf.loops``). Measured for
D2F on one core: plan and commit of one row take 0.02 ms a step, of 16 rows 0.04 ms; the published
run of LLaDA-8B took 24 ms a step on an H200 (arXiv 2608.23807).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeGuard

import attrs
import numpy as np
from numpy.typing import NDArray

from dllm_sched.errors import ConfigError
from dllm_sched.request import Request
from dllm_sched_hf.loops import compiled

__all__ = [
    "Bools",
    "Commits",
    "DecodeRequest",
    "Decoder",
    "Floats",
    "Ints",
    "PromptRequest",
    "StepPlan",
    "as_tuple",
    "check_field",
    "check_flag",
    "check_knobs",
    "check_token_ids",
    "is_int",
    "shown",
    "uniform_draws",
]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e6
"""Temperatures above 0 lie between these: logits divided by them stay finite in float32."""

_MAX_TOKEN_ID = 2**31 - 1  # of any vocabulary; the engine knows the model's

_POSITIVE = (5e-324, 1e6, "above 0 and up to 1e6")
_SPANS = {
    "cfg_scale": (0.0, 1e6, "in [0, 1e6]"),
    "confidence_threshold": _POSITIVE,
    "entropy_bound": _POSITIVE,
    "factor": _POSITIVE,
    "t_max": (MIN_TEMPERATURE, MAX_TEMPERATURE, f"in [{MIN_TEMPERATURE:g}, {MAX_TEMPERATURE:g}]"),
    "t_min": (0.0, MAX_TEMPERATURE, f"in [0, {MAX_TEMPERATURE:g}]"),
}
_UNIT = (0.0, 1.0, "in [0, 1]")


# -- requests


def shown(value: object) -> str:
    """Return a short text of any value: some have none, and huge ints refuse to be printed."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a message about a bad value must not fail on that value
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_int(value: object) -> TypeGuard[int]:
    """Return whether the value is an int and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_tuple(value: Any) -> Any:
    """Return a tuple of what can be iterated over, anything else as it is: validators refuse it."""
    try:
        return tuple(value)
    except TypeError:
        return value


def check_token_ids(where: str, value: object, highest: int = _MAX_TOKEN_ID) -> None:
    """Raise unless the value is a tuple of token ids.

    Raises:
        ConfigError: If it is not; says where.
    """
    if not isinstance(value, tuple):
        raise ConfigError(f"{where} must be a sequence of token ids, got {shown(value)}")
    for token in value:
        if not is_int(token) or not 0 <= token <= highest:
            raise ConfigError(
                f"{where} must hold token ids (ints) from 0 to {highest}, got {shown(token)}"
            )


def check_setting(where: str, name: str, value: object) -> None:
    """Raise unless a decoding setting is a number in the range of its name.

    Raises:
        ConfigError: If it is not; says where, and the range.
    """
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if name == "temperature":
        ok = number == 0 or MIN_TEMPERATURE <= number <= MAX_TEMPERATURE
        span = f"0 or in [{MIN_TEMPERATURE:g}, {MAX_TEMPERATURE:g}]"
    else:
        low, high, span = _SPANS.get(name, _UNIT)
        ok = low <= number <= high
    if not ok:
        raise ConfigError(f"{where}: {name} must be a number {span}, got {shown(value)}")


def check_knobs(where: str, known: Sequence[str], knobs: Mapping[str, Any]) -> None:
    """Raise unless every knob is known and in its range.

    Raises:
        ConfigError: If one is not; names it. Or if these are no knobs.
    """
    if not isinstance(knobs, Mapping):
        raise ConfigError(
            f"{where} must be a mapping, NO_KNOBS if there are none, got {shown(knobs)}"
        )
    for name, value in knobs.items():
        if name not in known:
            raise ConfigError(
                f"{where}: unknown {shown(name)}, this engine takes {', '.join(known)}"
            )
        check_setting(where, name, value)


def check_flag(request: Request, field: attrs.Attribute[Any], value: object) -> None:
    """Validate a field that is True or False.

    Raises:
        ConfigError: If it is neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(
            f"request {request.id!r}: {field.name} must be True or False, got {shown(value)}"
        )


def check_field(request: Request, field: attrs.Attribute[Any], value: object) -> None:
    """Validate a field that holds a setting.

    Raises:
        ConfigError: If it is no number, or out of the range of its name.
    """
    check_setting(f"request {request.id!r}", field.name, value)


def _num_tokens(request: PromptRequest) -> int:
    # At least one: what is wrong with an empty prompt is told by its own validator.
    return max(1, len(request.prompt)) if isinstance(request.prompt, tuple) else 1


def _check_prompt(request: Request, field: attrs.Attribute[Any], value: object) -> None:
    check_token_ids(f"request {request.id!r}: {field.name}", value)
    if not value:
        raise ConfigError(f"request {request.id!r}: prompt is empty: give at least one token")


def _check_stop_ids(request: Request, field: attrs.Attribute[Any], value: object) -> None:
    if value is not None:
        check_token_ids(f"request {request.id!r}: {field.name}", value)


def _check_seed(request: Request, field: attrs.Attribute[int], value: object) -> None:
    if not is_int(value) or not -(2**63) <= value < 2**63:
        raise ConfigError(
            f"request {request.id!r}: {field.name} must be an int64, got {shown(value)}"
        )


@attrs.frozen(kw_only=True, eq=False)
class PromptRequest(Request):
    """A request with its prompt, its seed and its end, whatever decodes it.

    Attributes:
        prompt: Token ids of the vocabulary, at least one, none of them the mask id.
        prompt_len: Derived from ``prompt``.
        seed: Key of this request's draws, int64.
        stop_token_ids: Ids of the vocabulary that end the answer, at most 256 of them and not the
            mask id; None = the engine's.
        truncate_at_stop: Finish as soon as everything before the first stop id is committed, and
            cut the answer there. False = the references: the answer keeps all its tokens.

    Raises:
        ConfigError: If a field is out of its range; names the field.
    """

    prompt: tuple[int, ...] = attrs.field(converter=as_tuple, validator=_check_prompt, repr=False)
    prompt_len: int = attrs.field(init=False, default=attrs.Factory(_num_tokens, takes_self=True))
    seed: int = attrs.field(default=0, validator=_check_seed)
    stop_token_ids: tuple[int, ...] | None = attrs.field(
        default=None, converter=as_tuple, validator=_check_stop_ids
    )
    truncate_at_stop: bool = attrs.field(default=True, validator=check_flag)


@attrs.frozen(kw_only=True, eq=False)
class DecodeRequest(PromptRequest):
    """A request with what every decoder knows; each adds its own settings.

    Attributes:
        temperature: Divides the logits before a token is drawn; 0 = the most probable token, and
            ``seed`` does not matter. Otherwise in [0.001, 1e6], which float32 survives.

    Raises:
        ConfigError: If a field is out of its range; names the field.
    """

    temperature: float = attrs.field(default=0.0, validator=check_field)


# -- one step


@attrs.define(kw_only=True, eq=False)  # frozen takes five times as long to make, once a step
class StepPlan:
    """One forward for r rows: n tokens of s sequences, of which c positions are to be predicted.

    The first r sequences belong to the rows in their order; what follows are second sequences of
    some of them, whose positions are never predicted themselves. A decoder adds its own fields.
    Valid until its rows commit: arrays may be views of their decoder's.
    """

    slots: Ints  #: ``[r]``
    start: Ints  #: ``[s]`` first position of the sequence that goes through the forward
    end: Ints  #: ``[s]`` past the last one
    length: Ints  #: ``[s]`` positions that may be attended to, at most
    row: Ints  #: ``[n]`` sequence of each token, ascending
    position: Ints  #: ``[n]`` its position in the sequence
    place: Ints
    """``[n]`` ``slot * max_len + position``, also of second sequences; the very array of the step
    before if that ran the same positions of the same rows. On a CPU the cache is written there,
    unchecked (``dllm_sched_hf.loops``)."""
    token: Ints  #: ``[n]`` its id
    visible: Ints
    """``[n]`` it attends to the positions below this one; never less than the tokens of the same
    sequence before it."""
    masked: Ints  #: ``[c]`` indices into the n tokens, ascending
    guide: Ints | None = None
    """``[c]`` index of the same position in the row's second sequence, -1 where the row has none;
    None = no row has one."""
    guide_scale: Floats | None = None
    """``[c]`` logits are ``second + (scale + 1) * (first - second)``; given with ``guide``."""


class Commits(NamedTuple):
    """What one step decided, for the c predicted positions of its plan."""

    chosen: Ints  #: ``[k]`` which of the c positions committed, ascending
    finished: Bools  #: ``[r]`` rows that have nothing left to do
    grew: Bools  #: ``[r]`` rows whose number of finished blocks grew
    forced: Ints | None = None  #: ``[f]`` which committed only because no other did; for traces


class Decoder(abc.ABC):
    """The tokens and the progress of every slot, and the rule by which tokens commit.

    A subclass names its request and its knobs, keeps one array entry per slot for whatever else it
    needs, and implements the abstract methods. Settings that are knobs live in arrays of their own
    name, ``[num_slots]``, which the engine writes.

    Args:
        num_slots: Rows that can be alive at once.
        max_len: Longest row in tokens, prompt included.
        mask_id: The id of a masked position.

    Memory is ``8 * num_slots * max_len`` bytes and a little; a step costs O(rows * blocks +
    tokens).
    """

    request_type: ClassVar[type[DecodeRequest]]
    knobs: ClassVar[tuple[str, ...]]  #: settings that may change while a row runs (``Row.knobs``)
    caches: ClassVar[bool] = True
    """Whether later forwards read keys and values of earlier ones."""
    whole_prefill: ClassVar[bool] = False
    """Whether a row's first forward holds its whole canvas (``Capacity.whole_prefill``)."""
    prompt_stands_alone: ClassVar[bool] = False
    """Whether a prompt sees only itself: rows of a group may then share its keys and values."""
    confidence_type: ClassVar[type[np.floating[Any]]] = np.float32
    """In which precision the softmax is taken."""
    recomputes: ClassVar[bool] = True
    """Whether a row that reads from the cache may go back to sending its whole sequence."""
    progress: ClassVar[tuple[str, ...]] = ("tokens", "num_steps", "stop_step", "stop_at", "early")
    """The per-slot arrays that :meth:`save` takes along."""

    def __init__(self, num_slots: int, max_len: int, mask_id: int) -> None:
        self.mask_id = mask_id
        self.max_len = max_len
        self.tokens: Ints = np.full((num_slots, max_len), mask_id)
        self._tokens = self.tokens.reshape(-1)  # the same memory, by place
        # The last step's slots, their starts and ends as bytes, and how its tokens lie.
        self._packed: tuple[Ints, tuple[bytes, bytes], tuple[Ints, Ints, Ints]] | None = None
        ints = np.zeros((7, num_slots), np.int64)
        self.prompt_len, self.block_length, self.seed, self.num_steps = ints[:4]
        # The end of what is wanted; step of the first stop id that came, 0 = none yet; and position
        # of the first there is, or that end.
        self.answer_end, self.stop_step, self.stop_at = ints[4:]
        # Rows whose answer ends there, finished or not.
        self.early: Bools = np.zeros(num_slots, np.bool_)
        self.temperature: Floats = np.zeros(num_slots)
        self.truncates: Bools = np.zeros(num_slots, np.bool_)
        self.stop_ids: Ints = np.full((num_slots, 1), -1)
        # Which ids may end some row: most tokens end none.
        self._stops: Bools = np.zeros(0, np.bool_)

    # -- a row's life

    def start(self, slot: int, request: Any, stop_ids: Sequence[int] = ()) -> None:
        """Put a fresh row into ``slot``; its knobs are set separately."""
        if len(stop_ids) > self.stop_ids.shape[1]:
            extra = len(stop_ids) - self.stop_ids.shape[1]
            filler = np.full((len(self.stop_ids), extra), -1)
            self.stop_ids = np.hstack((self.stop_ids, filler))
        self._packed = None  # other rows lie where those lay
        self.tokens[slot] = self.mask_id
        self.tokens[slot, : request.prompt_len] = request.prompt
        self.prompt_len[slot] = request.prompt_len
        self.block_length[slot] = request.block_length
        self.seed[slot] = request.seed
        self.truncates[slot] = request.truncate_at_stop
        self.num_steps[slot] = self.stop_step[slot] = 0
        self.answer_end[slot] = self.stop_at[slot] = request.prompt_len + request.max_new_tokens
        self.early[slot] = False
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
        if len(stop_ids):
            extra = max(stop_ids) + 1 - len(self._stops)
            if extra > 0:
                self._stops = np.append(self._stops, np.zeros(extra, np.bool_))
            self._stops[list(stop_ids)] = True

    def set_prompt_cached(self, slot: int, *, cached: bool) -> None:  # noqa: B027 - for those who can
        """Say whether the prompt of a row that has taken no step is in the cache already.

        Asked only of a decoder whose ``prompt_stands_alone``.
        """

    def save(self, slot: int) -> tuple[Any, ...]:
        """Return a copy of the row's progress."""
        return tuple(getattr(self, name)[slot].copy() for name in self.progress)

    def restore(
        self, slot: int, request: Any, stop_ids: Sequence[int], saved: tuple[Any, ...]
    ) -> None:
        """Put a row back with the progress that :meth:`save` took; any slot will do."""
        self.start(slot, request, stop_ids)
        for name, value in zip(self.progress, saved, strict=True):
            array = getattr(self, name)
            if value.ndim:  # columns that came since keep what start gave them
                array[slot, : len(value)] = value
            else:
                array[slot] = value

    # -- a step

    @abc.abstractmethod
    def plan(self, slots: Ints) -> StepPlan:
        """Lay out the coming forward; writes nothing.

        Args:
            slots: ``[r]`` the rows that take part, each alive and not finished.
        """

    @abc.abstractmethod
    def commit(self, plan: Any, confidence: Any, token: Ints) -> Commits:
        """Commit what the forward found and move every row of the plan one step on.

        Args:
            plan: The rows' plan, made since their last step.
            confidence: ``[c]`` probability of ``token``, finite, of ``confidence_type``.
            token: ``[c]`` never the mask id.

        Returns:
            What was committed and which rows changed state.
        """

    @abc.abstractmethod
    def trace(self, plan: Any, commits: Commits, token: Ints) -> list[dict[str, Any]]:
        """Return what a committed step did, one entry per row, in the words of the golden data."""

    # -- what the engine reports of rows

    @abc.abstractmethod
    def num_blocks_done(self, slot: int) -> int:
        """Return how many blocks are finished."""

    @abc.abstractmethod
    def num_blocks_opened(self, slot: int) -> int:
        """Return how many blocks have been worked on."""

    @abc.abstractmethod
    def kv_tokens(self, slot: int) -> int:
        """Return the tokens that the row has in the cache once its coming step has run."""

    @abc.abstractmethod
    def num_cached(self, slot: int) -> int:
        """Return how many first positions a later forward may read from the cache."""

    @abc.abstractmethod
    def refreshes(self, slots: Ints) -> Bools:
        """Return which rows send their whole sequence through the coming forward."""

    @abc.abstractmethod
    def generated(self, slot: int) -> Ints:
        """Return a view of the row's tokens after the prompt, masks included."""

    def masked_remaining(self, slot: int) -> int:
        """Return the positions that this row may still have to commit."""
        return int((self.generated(slot) == self.mask_id).sum())

    def ended(self, slots: Ints, finished: Bools) -> Ints:
        """Return which rows of a step have their whole answer, as indices.

        Args:
            slots: ``[r]`` of the step.
            finished: ``[r]`` rows that have nothing left to do: they have.
        """
        return _ended(
            *(slots, finished, self.early, self.truncates, self.stop_at, self.answer_end),
            *(self.prompt_len, self.tokens, self.mask_id),
        )

    # -- for subclasses

    def _pack(self, slots: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
        """Lay sequences behind each other; return row, position and place of each token.

        They are the very same arrays as in the step before if that ran the same positions.
        """
        ran = start.tobytes(), end.tobytes()
        if self._packed is not None:
            of, ran_then, found = self._packed
            if slots is of and ran == ran_then:
                return found
        found = _pack(slots, start, end, self.max_len)
        self._packed = slots, ran, found
        return found

    def _look(self, place: Ints, row: Ints, position: Ints, reach: Ints) -> tuple[Ints, Ints]:
        """Return the token at each of ``[n]`` places, and which of them are masked.

        Args:
            place: ``[n]`` as :meth:`_pack` returns it.
            row: ``[n]`` likewise.
            position: ``[n]`` likewise.
            reach: ``[s]`` only masks below this position count.
        """
        return _look(self._tokens, self.mask_id, place, row, position, reach)

    def _write(self, plan: StepPlan, chosen: Ints, token: Ints) -> Ints:
        """Write the tokens that commit and count the step of the plan's rows.

        Args:
            plan: The rows'; its places are not checked.
            chosen: ``[k]`` which of its c masked positions commit, ascending.
            token: ``[c]``

        Returns:
            Slots that have come upon a stop id.
        """
        return _write(
            *(plan.slots, plan.place, plan.masked, chosen, token, self.tokens, self.num_steps),
            *(self._stops, self.stop_ids, self.stop_at, self.stop_step, self.early),
            self.truncates,
        )

    def _commits_by_row(
        self, plan: StepPlan, commits: Commits, token: Ints
    ) -> list[list[list[int]]]:
        """Return ``[position, token]`` of every commit, per row."""
        at = plan.masked[commits.chosen]
        found: list[list[list[int]]] = [[] for _ in plan.slots]
        chosen = zip(plan.row[at], plan.position[at], token[commits.chosen], strict=True)
        for row, position, committed in chosen:
            found[row].append([int(position), int(committed)])
        return found


# -- for all rows of a step


@compiled
def _pack(slots: Ints, start: Ints, end: Ints, max_len: int) -> tuple[Ints, Ints, Ints]:
    """Lay sequences behind each other; return row, position and place of each token."""
    total = 0
    for index in range(len(slots)):
        total += end[index] - start[index]
    row, position, place = np.empty((3, total), np.int64)
    at = 0
    for index, slot in enumerate(slots):
        for each in range(start[index], end[index]):
            row[at], position[at], place[at] = index, each, slot * max_len + each
            at += 1
    return row, position, place


@compiled
def _look(
    tokens: Ints, mask_id: int, place: Ints, row: Ints, position: Ints, reach: Ints
) -> tuple[Ints, Ints]:
    """Return tokens, and which of them are masked. Arguments as in :class:`Decoder`."""
    token, masked = np.empty((2, len(place)), np.int64)
    count = 0
    for index, where in enumerate(place):
        token[index] = tokens[where]
        if token[index] == mask_id and position[index] < reach[row[index]]:
            masked[count] = index
            count += 1
    return token, masked[:count]


@compiled
def _write(
    slots: Ints,
    place: Ints,
    masked: Ints,
    chosen: Ints,
    token: Ints,
    tokens: Ints,
    num_steps: Ints,
    stops: Bools,
    stop_ids: Ints,
    stop_at: Ints,
    stop_step: Ints,
    early: Bools,
    truncates: Bools,
) -> Ints:
    """Write what commits to its places, and notice stop ids. Arguments as in :class:`Decoder`.

    Returns:
        Slots that have come upon one.
    """
    num_steps[slots] += 1
    stopped = np.empty(len(slots), np.int64)
    count = 0
    for each in chosen:
        written = token[each]
        slot, position = divmod(place[masked[each]], tokens.shape[1])
        tokens[slot, position] = written
        if written < len(stops) and stops[written] and np.any(stop_ids[slot] == written):
            stop_at[slot] = min(stop_at[slot], position)
            if stop_step[slot] == 0:
                stop_step[slot] = num_steps[slot]
            early[slot] |= truncates[slot]
            if count == 0 or stopped[count - 1] != slot:  # a row's tokens lie together
                stopped[count] = slot
                count += 1
    return stopped[:count]


@compiled
def _ended(
    slots: Ints,
    finished: Bools,
    early: Bools,
    truncates: Bools,
    stop_at: Ints,
    answer_end: Ints,
    prompt_len: Ints,
    tokens: Ints,
    mask_id: int,
) -> Ints:
    """Return which rows have their whole answer. Arguments as in :class:`Decoder`."""
    ended = np.empty(len(slots), np.int64)
    count = 0
    for index, slot in enumerate(slots):
        if not (finished[index] or early[slot]):
            continue
        low, high = prompt_len[slot], stop_at[slot] if truncates[slot] else answer_end[slot]
        while not finished[index] and high > low and tokens[slot, high - 1] != mask_id:
            high -= 1  # most masks are at the end
        if finished[index] or high == low:
            ended[count] = index
            count += 1
    return ended[:count]


# -- draws


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64 bits so that neighbouring inputs give unrelated outputs."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform_draws(seed: Ints, position: Ints, step: Ints) -> Floats:
    """Return one uniform number per (request seed, position, the row's own step).

    A counter-based draw: no generator state, so it cannot depend on which rows share a batch, on
    their order, or on the device.

    Args:
        seed: ``[c]`` any int64.
        position: ``[c]`` absolute position in the row.
        step: ``[c]`` steps that the row has made, from 0.

    Returns:
        float64 ``[c]`` in [0, 1), multiples of 2**-53.

    Source: finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), chained over the three counters.
    """
    state = np.zeros(len(seed), np.uint64)
    for word in (seed, position, step):
        state = _mix((state + _GOLDEN) ^ _mix(word.astype(np.uint64) + _GOLDEN))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
