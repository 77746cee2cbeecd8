"""What a request is, and what a policy may see of it while it lives."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Hashable
from typing import Any

import attrs

from dllm_sched.errors import ConfigError, described

__all__ = ["FinishReason", "Phase", "Request", "RequestStatus", "RequestView"]


class RequestStatus(enum.Enum):
    """Where a request is in its life; changed only by ``_lifecycle``."""

    __hash__ = object.__hash__  # Enum's own hashes the name, in Python, at every table look-up

    WAITING = "waiting"  #: queued, never ran
    RUNNING = "running"  #: holds a slot
    PREEMPTED = "preempted"  #: queued again after it gave its slot back
    FINISHED = "finished"  #: told once, gone


class FinishReason(enum.Enum):
    """Why a request ended. Each ends with exactly one of these."""

    __hash__ = object.__hash__  # see RequestStatus

    EOS = "eos"  #: the model committed a stop token
    LENGTH = "length"  #: the token budget was used up
    MAX_STEPS = "max_steps"  #: a step cap of the policy was reached
    CANCELLED = "cancelled"  #: the client asked for it
    DEADLINE = "deadline"  #: ``deadline_at`` passed
    QUEUE_TIMEOUT = "queue_timeout"  #: waited ``queue_timeout_s`` without ever running
    ERROR = "error"  #: its row failed, or it can no longer fit the capacity


class Phase(enum.Enum):
    """What a row's next forward costs; the engine reports changes, composition selects on it."""

    __hash__ = object.__hash__  # see RequestStatus

    PREFILL = "prefill"  #: the prompt goes through the model for the first time
    REFRESH = "refresh"  #: the whole sequence is computed anew
    REUSE = "reuse"  #: only open blocks are computed, the rest comes from the cache


LARGEST_COUNT = 2**63 - 1
"""Of every count, here and wherever one is asked for: what goes with it may be a float."""

_INF = math.inf
_WAITING = RequestStatus.WAITING
_PREFILL = Phase.PREFILL


def _positive_int(value: object) -> str | None:
    right = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_COUNT
    return None if right else "an int >= 1 and < 2**63"


def _int(value: object) -> str | None:
    right = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST_COUNT
    return None if right else "an int > -2**63 and < 2**63"


def _instant(value: object) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            if not math.isnan(value):
                return None
        except OverflowError:  # an int beyond every float
            pass
    return "seconds (inf = never)"


def _duration(value: object) -> str | None:
    wrong = _instant(value)
    if wrong is None and isinstance(value, int | float) and value < 0:
        wrong = ">= 0 seconds (inf = never)"
    return wrong


def _text(value: object) -> str | None:
    return None if isinstance(value, str) else "a str"


def _optional_text(value: object) -> str | None:
    return None if value is None or isinstance(value, str) else "a str or None"


def _key(value: object) -> str | None:
    try:
        hash(value)
        fit = bool(value == value)  # noqa: PLR0124 - NaN is not, and would never share a batch
    except Exception:  # noqa: BLE001 - it is the caller's own
        fit = False
    return None if fit else "hashable and equal to itself"


_CHECKS: tuple[tuple[str, Callable[[object], str | None]], ...] = (
    ("prompt_len", _positive_int),
    ("max_new_tokens", _positive_int),
    ("block_length", _positive_int),
    ("priority", _int),
    ("deadline_at", _instant),
    ("queue_timeout_s", _duration),
    ("request_class", _key),
    ("batch_key", _key),
    ("tenant", _text),
    ("group", _optional_text),
)


def _check(request: Request, _field: attrs.Attribute[str], request_id: object) -> None:
    """Check every field of a request, in one call: one is built for each that is served."""
    if not isinstance(request_id, str) or not request_id:
        raise ConfigError(f"request: id must be a non-empty str, got {request_id!r}")
    prompt, budget, block = request.prompt_len, request.max_new_tokens, request.block_length
    if (
        type(prompt) is type(budget) is type(block) is type(request.priority) is int
        and prompt >= 1
        and budget >= 1
        and block >= 1
        and prompt + budget + block <= LARGEST_COUNT  # so each of them is
        and abs(request.priority) <= LARGEST_COUNT
        and type(request.deadline_at) is float
        and request.deadline_at > -_INF  # and no NaN
        and type(request.queue_timeout_s) is float
        and request.queue_timeout_s >= 0
        and type(request.request_class) is type(request.tenant) is str
        and request.batch_key is request.group is None
    ):
        return
    for name, check in _CHECKS:
        value = getattr(request, name)
        wrong = check(value)
        if wrong is not None:
            raise ConfigError(
                f"request {request_id!r}: {name} must be {wrong}, got {described(value)}"
            )


@attrs.frozen(kw_only=True, eq=False)
class Request:
    """One generation request; a value that knows neither its status nor the time.

    Frozen, compared by identity, and open for subclassing: an adapter adds its own fields.

    Attributes:
        id: Non-empty; unique among active requests, free again once this one has finished.
        prompt_len: Prompt length in tokens, >= 1; this and all other ints are below 2**63.
        max_new_tokens: Budget of generated tokens, >= 1.
        block_length: Diffusion block length in tokens, >= 1.
        priority: Lower goes first.
        deadline_at: Instant in seconds on the scheduler's clock; ``inf`` = never.
        queue_timeout_s: Longest wait for the first step in seconds, >= 0; ``inf`` = never.
        request_class: Label for policies that treat classes differently.
        batch_key: Rows of one batch share it (model variant, LoRA, sampling kernel).
        tenant: Who pays; for fair-share orderings.
        group: Requests that belong together (samples of one prompt), or None.
        payload: The caller's own; never looked at.

    Raises:
        ConfigError: If a field is out of its range; names the field.
    """

    id: str = attrs.field(validator=_check, kw_only=False)
    prompt_len: int
    max_new_tokens: int
    block_length: int = 32
    priority: int = 0
    deadline_at: float = math.inf
    queue_timeout_s: float = math.inf
    request_class: Hashable = ""
    batch_key: Hashable = None
    tenant: str = ""
    group: str | None = None
    payload: Any = attrs.field(default=None, repr=False)

    @property
    def max_blocks(self) -> int:
        """Blocks that hold ``max_new_tokens``, the last one possibly partly used."""
        return -(-self.max_new_tokens // self.block_length)

    @property
    def max_total_tokens(self) -> int:
        """Prompt plus the budget rounded up to whole blocks: the longest this row can get."""
        # the blocks counted here once more: this is asked for at every block boundary
        blocks = -(-self.max_new_tokens // self.block_length)
        return self.prompt_len + blocks * self.block_length


class RequestView:
    """What a policy may see of one live request. Read-only; the scheduler keeps it current.

    ``num_steps`` is derived: a row stores the difference to its cohort's step count, so a step
    costs nothing per row.
    """

    __slots__ = (
        "_admitted_at",
        "_arrived_at",
        "_cohort",
        "_entry",
        "_expire_at",
        "_expire_reason",
        "_given",
        "_index",
        "_join_number",
        "_knobs",
        "_knobs_until",
        "_kv_tokens",
        "_lane",
        "_masked_remaining",
        "_max_blocks",
        "_max_tokens",
        "_max_total_tokens",
        "_num_blocks_done",
        "_num_pages",
        "_phase",
        "_resumed",
        "_sequence",
        "_slot",
        "_status",
        "_step_limit",
        "_steps_base",
        "request",
    )

    def __init__(self, request: Request, sequence: int, now: float) -> None:
        length = request.block_length
        blocks = -(-request.max_new_tokens // length)
        tokens = request.prompt_len + blocks * length
        self._max_blocks = blocks  # as the request says, for the checks at each boundary
        self._max_total_tokens = tokens
        self._max_tokens = tokens
        self.request = request
        self._sequence = sequence
        self._arrived_at = now
        self._status = _WAITING
        self._admitted_at: float | None = None
        self._slot: int | None = None
        self._phase = _PREFILL
        self._num_blocks_done = 0
        self._kv_tokens = 0
        self._num_pages = 0
        self._steps_base = 0
        self._cohort: Any = None
        self._resumed = False
        self._masked_remaining: int | None = None
        self._expire_at = _INF
        self._step_limit = _INF
        self._knobs_until = _INF
        # Set by the queue.
        self._lane: Any
        self._entry: Any
        # Set with the instant it expires at.
        self._expire_reason: FinishReason
        # Set by the join: a request that only waits does not pay for them.
        self._index: int  # place in its cohort
        self._join_number: int
        self._knobs: Any
        self._given: bool  # set when it leaves: the engine was told of the slot it held

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def status(self) -> RequestStatus:
        """Where the request is in its life."""
        return self._status

    @property
    def sequence(self) -> int:
        """Arrival number: the last word of every order; kept through preemption."""
        return self._sequence

    @property
    def arrived_at(self) -> float:
        """Instant of submission, seconds."""
        return self._arrived_at

    @property
    def admitted_at(self) -> float | None:
        """Instant of the first admission, seconds; None before it."""
        return self._admitted_at

    @property
    def slot(self) -> int | None:
        """Slot held, or None while waiting."""
        return self._slot

    @property
    def phase(self) -> Phase:
        """What the next forward of this row is, as the engine last said."""
        return self._phase

    @property
    def num_steps(self) -> int:
        """Denoising steps completed since the last restart. O(1)."""
        cohort = self._cohort
        steps: int = self._steps_base
        if cohort is not None:
            steps += cohort.offset + cohort.clock.steps
        return max(0, steps)  # less while steps are in flight that it is not in

    @property
    def num_blocks_done(self) -> int:
        """Completed blocks, as last reported."""
        return self._num_blocks_done

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache, as last reported; 0 before the first report."""
        return self._kv_tokens

    @property
    def num_pages(self) -> int:
        """KV pages held; 0 while waiting."""
        return self._num_pages

    @property
    def max_tokens(self) -> int:
        """Upper bound of the tokens its next forward takes (at a join: with the prompt)."""
        return self._max_tokens

    @property
    def masked_remaining(self) -> int | None:
        """Masked positions left, for policies that need progress; None if never reported."""
        return self._masked_remaining

    def __repr__(self) -> str:
        return (
            f"<RequestView {self.request.id!r} {self._status.value} slot={self._slot} "
            f"steps={self.num_steps} blocks={self._num_blocks_done}/{self.request.max_blocks}>"
        )
