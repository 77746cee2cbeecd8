"""One frozen value per public call and per decision, and their JSON-lines form.

Every event has ``at`` (seconds, the ``now`` of its call). Events of steps carry counts, never
rows: an observer must not turn a step's cost into one that grows with the batch.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from dllm_sched.errors import ConfigError
from dllm_sched.request import FinishReason, Phase, Request

__all__ = [
    "BlockDone",
    "CapacitySet",
    "DrainStarted",
    "Event",
    "Paused",
    "PhaseChanged",
    "PolicySet",
    "RequestFinished",
    "RequestJoined",
    "RequestPreempted",
    "RequestRejected",
    "RequestSubmitted",
    "Resumed",
    "StepCompleted",
    "StepFailed",
    "StepPlanned",
    "from_json",
    "request_from_plain",
    "request_to_plain",
    "to_json",
]


class RequestSubmitted(NamedTuple):
    """``submit`` took a request."""

    at: float
    request: Request


class RequestRejected(NamedTuple):
    """``submit`` refused a request."""

    at: float
    request: Request
    reason: str


class RequestJoined(NamedTuple):
    """A waiting request got a slot."""

    at: float
    request_id: str
    slot: int
    step_id: int  #: the step it joins
    waited_s: float  #: since its arrival
    resumed: bool


class RequestPreempted(NamedTuple):
    """A row went back to the queue, at its old place in the order."""

    at: float
    request_id: str
    slot: int
    kept: bool  #: with its progress


class RequestFinished(NamedTuple):
    """A request ended."""

    at: float
    request_id: str
    reason: FinishReason
    arrived_at: float
    admitted_at: float | None
    num_steps: int
    num_blocks_done: int


class BlockDone(NamedTuple):
    """A row completed blocks."""

    at: float
    request_id: str
    num_blocks_done: int
    kv_tokens: int
    num_steps: int


class PhaseChanged(NamedTuple):
    """A row's next forward is of another kind."""

    at: float
    request_id: str
    phase: Phase


class StepPlanned(NamedTuple):
    """``next_step`` handed out a batch."""

    at: float
    step_id: int
    num_rows: int
    num_joined: int
    num_waiting: int


class StepCompleted(NamedTuple):
    """``complete_step`` took an outcome."""

    at: float
    step_id: int
    num_rows: int
    steps: int


class StepFailed(NamedTuple):
    """``fail_step`` took an error; nobody advanced."""

    at: float
    step_id: int
    num_rows: int
    error: str


class PolicySet(NamedTuple):
    """``set_policy``, also the first one at construction."""

    at: float
    policy: str


class CapacitySet(NamedTuple):
    """``set_capacity``."""

    at: float
    max_num_seqs: int
    num_pages: int | None


class Paused(NamedTuple):
    """``pause``."""

    at: float


class Resumed(NamedTuple):
    """``resume``."""

    at: float


class DrainStarted(NamedTuple):
    """``drain``."""

    at: float


Event = (
    RequestSubmitted
    | RequestRejected
    | RequestJoined
    | RequestPreempted
    | RequestFinished
    | BlockDone
    | PhaseChanged
    | StepPlanned
    | StepCompleted
    | StepFailed
    | PolicySet
    | CapacitySet
    | Paused
    | Resumed
    | DrainStarted
)

_TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in Event.__args__}
_ENUMS: dict[str, type[FinishReason | Phase]] = {"reason": FinishReason, "phase": Phase}
_REQUEST_FIELDS = (
    "id",
    "prompt_len",
    "max_new_tokens",
    "block_length",
    "priority",
    "deadline_at",
    "queue_timeout_s",
    "request_class",
    "batch_key",
    "tenant",
    "group",
)


def _plain(value: Any) -> Any:
    """A value in strict JSON: infinities as words, since JSON has none."""
    if isinstance(value, Request):
        return request_to_plain(value)
    if isinstance(value, FinishReason | Phase):
        return value.value
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def request_to_plain(request: Request) -> dict[str, Any]:
    """Return a request's fields as JSON values; its payload stays with the caller."""
    return {name: _plain(getattr(request, name)) for name in _REQUEST_FIELDS}


def request_from_plain(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that build a request again, from what ``request_to_plain`` wrote."""
    return {name: _number(name, value) for name, value in fields.items()}


def to_json(event: Event) -> str:
    """Write an event as one line of strict JSON, ``{"event": name, field: value, ...}``.

    A request's payload stays with the caller and is not written.

    Raises:
        TypeError: If a request's class or batch key has no JSON form.
    """
    fields = {name: _plain(value) for name, value in zip(event._fields, event, strict=True)}
    return json.dumps({"event": type(event).__name__, **fields}, allow_nan=False)


def from_json(line: str) -> Event:
    """Read what ``to_json`` wrote.

    Raises:
        ConfigError: If the line is not one of these events; says what is wrong with it.
    """
    try:
        fields = json.loads(line)
        kind = _TYPES[fields.pop("event")]
        if "request" in fields:
            fields["request"] = Request(**request_from_plain(fields["request"]))
        for name, enum_type in _ENUMS.items():
            if name in fields and kind is not RequestRejected:
                fields[name] = enum_type(fields[name])
        event: Event = kind(**{k: _number(k, v) for k, v in fields.items()})
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ConfigError(f"not an event: {line[:200]!r} ({error!r})") from error
    return event


def _hashable(value: Any) -> Any:
    """Lists, which JSON makes of tuples, as tuples."""
    return tuple(_hashable(one) for one in value) if isinstance(value, list) else value


_INSTANTS = frozenset("at arrived_at admitted_at deadline_at queue_timeout_s waited_s".split())


def _number(name: str, value: Any) -> Any:
    """Turn the words for infinity back into numbers, where a number stands."""
    if name in ("request_class", "batch_key"):
        return _hashable(value)
    if name not in _INSTANTS or not isinstance(value, str):
        return value
    return {"inf": math.inf, "-inf": -math.inf}[value]
