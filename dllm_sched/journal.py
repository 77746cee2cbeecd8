"""The append-only journal: every input of a scheduler and what it decided, a line for each call.

Two uses. ``replay`` makes the recorded calls again, from the inputs alone, and shows the first
decision that differs. ``restore`` brings back, after a crash, whoever had not finished: the
restarted engine serves each request at least once.

A line is a JSON array, ``[call, now, arguments ..., what it told]``, written once its call has
succeeded; a call that raises has changed nothing and leaves no line. Steps in which nothing changes
are short lines, and are not written through to the disk one by one: a crash may lose the last of
those, never a request or an ending.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import attrs

from dllm_sched.batch import (
    NO_KNOBS,
    NOTHING,
    Accepted,
    BlockBoundary,
    Knobs,
    PhaseChange,
    Rejected,
    Row,
    RowFailed,
    RowFate,
    RowFinished,
    StepBatch,
    StepOutcome,
    Update,
)
from dllm_sched.capacity import Capacity
from dllm_sched.errors import ConfigError, DllmSchedError, JournalError, described
from dllm_sched.events import Event, request_from_plain, request_to_plain
from dllm_sched.policies.base import Policy
from dllm_sched.policies.codec import from_plain, to_plain
from dllm_sched.request import FinishReason, Phase, Request
from dllm_sched.scheduler import Scheduler

__all__ = [
    "Difference",
    "JournaledScheduler",
    "Replayed",
    "Restored",
    "replay",
    "restore",
]

_VERSION = 1
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_AXES = tuple(field.name for field in attrs.fields(Policy))[:6]
_INF = math.inf
_log = logging.getLogger("dllm_sched")

MakeRequest = Callable[[dict[str, Any], Any], Request]
"""(arguments of ``Request`` without its payload, what the payload was written as) -> request."""


class JournaledScheduler(Scheduler):
    """A scheduler that writes down what it is told and what it answers.

    Args:
        sink: A new file's path, or an open text file, which stays the caller's to close.
        capacity: As of ``Scheduler``.
        policy: As of ``Scheduler``. One with parts that are not this library's own is written by
            its name alone; ``replay`` and ``restore`` are then given it.
        observers: As of ``Scheduler``; they are not written.
        max_in_flight: As of ``Scheduler``.
        write_payload: What to write for a request's payload (a JSON value); default: nothing.
        fsync: Write requests and endings through to the disk (survives a power cut), not only to
            the operating system (survives the process).

    Raises:
        ConfigError: If the file exists and is not empty, or as of ``Scheduler``.
        JournalError: From any call after one whose line could not be written.
    """

    __slots__ = (
        "_failure",
        "_fsync",
        "_last_rows",
        "_last_wake_at",
        "_owned",
        "_sink",
        "_write_payload",
    )

    def __init__(
        self,
        sink: str | os.PathLike[str] | TextIO,
        *,
        capacity: Capacity,
        policy: Policy | None = None,
        observers: Iterable[Callable[[Event], object]] = (),
        max_in_flight: int = 1,
        write_payload: Callable[[Request], Any] | None = None,
        fsync: bool = False,
    ) -> None:
        super().__init__(
            capacity=capacity, policy=policy, observers=observers, max_in_flight=max_in_flight
        )
        self._failure: BaseException | None = None
        self._fsync = fsync
        self._write_payload = write_payload
        self._last_rows: tuple[Row, ...] = ()
        self._last_wake_at = -_INF
        header = _line(
            "journal",
            _VERSION,
            to_plain(capacity),
            _policy_to_plain(self.policy),
            max_in_flight,
        )
        if isinstance(sink, str | os.PathLike):
            path = Path(sink)
            if path.exists() and path.stat().st_size:
                raise ConfigError(
                    f"journal: {path} is not empty; each run writes a file of its own (restore "
                    "reads the old one and writes a new one)"
                )
            self._sink: TextIO = path.open("w", encoding="utf-8")
            self._owned = True
        else:
            self._sink = sink
            self._owned = False
        self._write(header, keep=True)

    def close(self) -> None:
        """Write out what is buffered; closes the file if it was opened here. Idempotent."""
        if not self._sink.closed:
            self._sink.flush()
            if self._owned:
                self._sink.close()

    # --- the calls ------------------------------------------------------------------------------

    def submit(self, request: Request, *, now: float) -> Accepted | Rejected:
        """As of ``Scheduler``; the request is in the journal when this returns."""
        now = self._ready_at(now)
        asked = self._written(request)  # raises, if it must, before anything has changed
        answer = super().submit(request, now=now)
        told = "null" if isinstance(answer, Accepted) else json.dumps(answer.reason)
        self._write(f'["submit",{now!r},{asked},{told}]\n', keep=True)
        return answer

    def cancel(self, request_id: str, *, now: float) -> Update:
        """As of ``Scheduler``."""
        now = self._ready_at(now)
        return self._wrote("cancel", now, request_id, super().cancel(request_id, now=now))

    def requeue(self, request_id: str, *, now: float) -> Update:
        """As of ``Scheduler``."""
        now = self._ready_at(now)
        return self._wrote("requeue", now, request_id, super().requeue(request_id, now=now))

    def next_step(self, *, now: float) -> Update:
        """As of ``Scheduler``."""
        now = self._ready_at(now)
        update = super().next_step(now=now)
        batch, finished, released, wake_at = update
        if (
            batch is not None
            and batch.rows is self._last_rows
            and wake_at == self._last_wake_at
            and not (batch.joined or finished or released or batch.knobs or batch.hints)
        ):
            self._write(f'["n",{now!r},{batch.step_id}]\n')
            return update
        if batch is not None:
            self._last_rows, self._last_wake_at = batch.rows, wake_at
        return self._wrote("next", now, None, update)

    def complete_step(
        self, batch: StepBatch, outcome: StepOutcome = NOTHING, *, now: float, steps: int = 1
    ) -> Update:
        """As of ``Scheduler``."""
        now = self._ready_at(now)
        update = super().complete_step(batch, outcome, now=now, steps=steps)
        nothing = outcome is NOTHING or outcome == NOTHING
        if nothing and steps == 1 and not (update.finished or update.released):
            self._write(f'["d",{now!r},{batch.step_id}]\n')
            return update
        done = [batch.step_id, _outcome_to_plain(outcome), steps]
        return self._wrote("done", now, done, update)

    def fail_step(
        self, batch: StepBatch, error: BaseException, *, rows: Mapping[int, RowFate], now: float
    ) -> Update:
        """As of ``Scheduler``."""
        now = self._ready_at(now)
        update = super().fail_step(batch, error, rows=rows, now=now)
        fates = [[slot, fate.value] for slot, fate in rows.items()]
        return self._wrote("fail", now, [batch.step_id, described(error), fates], update)

    def set_policy(self, policy: Policy, *, now: float) -> Update:
        """As of ``Scheduler``."""
        now = self._ready_at(now)
        plain = None
        if isinstance(policy, Policy):
            plain = _policy_to_plain(policy)
            pairs = zip(_AXES, self.policy.strategies, policy.strategies, strict=True)
            kept = [axis for axis, before, after in pairs if before is after]
            if kept:
                plain["kept"] = kept  # their states go on
        return self._wrote("policy", now, plain, super().set_policy(policy, now=now))

    def set_capacity(self, capacity: Capacity, *, now: float) -> Update:
        """As of ``Scheduler``."""
        now = self._ready_at(now)
        plain = to_plain(capacity) if isinstance(capacity, Capacity) else None
        return self._wrote("capacity", now, plain, super().set_capacity(capacity, now=now))

    def pause(self, *, now: float) -> Update:
        """As of ``Scheduler``."""
        now = self._ready_at(now)
        return self._wrote("pause", now, None, super().pause(now=now))

    def resume(self, *, now: float) -> Update:
        """As of ``Scheduler``."""
        now = self._ready_at(now)
        return self._wrote("resume", now, None, super().resume(now=now))

    def drain(self, *, now: float) -> Update:
        """As of ``Scheduler``."""
        now = self._ready_at(now)
        return self._wrote("drain", now, None, super().drain(now=now))

    # --- the lines ------------------------------------------------------------------------------

    def _written(self, request: Request) -> str:
        if not isinstance(request, Request):
            return ""  # which the call itself refuses
        try:
            asked = [request_to_plain(request)]
            if self._write_payload is not None:
                asked.append(self._write_payload(request))
            return json.dumps(asked, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"journal: request {request.id!r} cannot be written as JSON: {error}"
            ) from error

    def _ready_at(self, now: float) -> float:
        if self._failure is not None:
            raise JournalError(
                f"journal: a line could not be written ({self._failure!r}), so what has happened "
                "since cannot be restored; start anew with a journal that can"
            ) from self._failure
        if isinstance(now, str | bytes | bytearray):
            return now  # which the call itself refuses, like all that is no number
        try:
            return float(now)  # as it is written
        except (TypeError, ValueError, OverflowError):
            return now

    def _wrote(self, call: str, now: float, asked: Any, update: Update) -> Update:
        told = _update_to_plain(update, names_rows=self._asking.select)
        self._write(_line(call, now, asked, told), keep=bool(update.finished))
        return update

    def _write(self, line: str, *, keep: bool = False) -> None:
        """Write a line; the call has been carried out, so this must not raise."""
        try:
            self._sink.write(line)
            if keep:
                self._sink.flush()
                if self._fsync:
                    os.fsync(self._sink.fileno())
        except Exception as error:  # noqa: BLE001 - of whatever kind the sink is
            self._failure = error
            _log.exception("journal: a line could not be written")


def _line(*values: Any) -> str:
    return json.dumps(values, allow_nan=False, separators=(",", ":"), default=described) + "\n"


def _policy_to_plain(policy: Policy) -> Any:
    try:
        return to_plain(policy)
    except ConfigError:
        return {"named": policy.name}


def _instant(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


def _knobs(knobs: Knobs) -> Any:
    """Knobs as JSON can say them: as they are, or else in words."""
    if knobs is NO_KNOBS:
        return {}
    try:
        json.dumps(knobs, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return described(knobs)
    return knobs


def _update_to_plain(update: Update, *, names_rows: bool) -> Any:
    """What a call told. O(what changed), and the slots of a step whose rows were selected."""
    batch, finished, released, wake_at = update
    told: dict[str, Any] = {}
    if batch is not None:
        told["step"] = [batch.step_id, len(batch.rows)]
        if batch.joined:
            told["joined"] = [
                [slot, request.id, phase.value, max_tokens, _knobs(knobs), resumed]
                for slot, request, phase, max_tokens, knobs, resumed in batch.joined
            ]
        if names_rows:
            told["slots"] = [row.slot for row in batch.rows]
        if batch.knobs is not NO_KNOBS:
            told["knobs"] = _knobs(batch.knobs)
        if batch.hints:
            told["hints"] = [described(hint) for hint in batch.hints]
    if finished:
        told["finished"] = [[one.request.id, one.reason.value, one.num_steps] for one in finished]
    if released:
        told["released"] = [[one.slot, one.request.id, one.kept] for one in released]
    if batch is not None or wake_at != -_INF:
        told["wake_at"] = _instant(wake_at)
    return told or None


def _outcome_to_plain(outcome: StepOutcome) -> Any:
    plain: dict[str, Any] = {}
    if outcome.finished:
        plain["finished"] = [[slot, reason.value] for slot, reason, _ in outcome.finished]
    if outcome.boundaries:
        plain["boundaries"] = [list(one) for one in outcome.boundaries]
    if outcome.phases:
        plain["phases"] = [[slot, phase.value] for slot, phase in outcome.phases]
    if outcome.failed:
        plain["failed"] = [[slot, described(error)] for slot, error in outcome.failed]
    if outcome.masked_remaining is not None:
        plain["masked"] = list(outcome.masked_remaining)
    return plain or None


def _outcome_from_plain(plain: Any) -> StepOutcome:
    if plain is None:
        return NOTHING
    masked = plain.get("masked")
    return StepOutcome(
        tuple(RowFinished(slot, FinishReason(why)) for slot, why in plain.get("finished", ())),
        tuple(BlockBoundary(*one) for one in plain.get("boundaries", ())),
        tuple(PhaseChange(slot, Phase(phase)) for slot, phase in plain.get("phases", ())),
        tuple(RowFailed(slot, _RecordedError(text)) for slot, text in plain.get("failed", ())),
        None if masked is None else tuple(masked),
    )


class _RecordedError(Exception):
    """An engine's error as the journal has it."""

    def __repr__(self) -> str:
        return str(self)


# --- reading --------------------------------------------------------------------------------------


def _read(source: str | os.PathLike[str] | Iterable[str]) -> Iterator[tuple[int, str, list[Any]]]:
    """Yield (line number, line, values); a last line that a crash cut off is left out."""
    if isinstance(source, str | os.PathLike):
        try:
            with Path(source).open(encoding="utf-8") as file:
                yield from _read(file)
        except (OSError, UnicodeDecodeError) as error:
            raise JournalError(f"journal: {source} cannot be read: {error}") from error
        return
    for number, line in enumerate(source, 1):
        if not line.endswith("\n"):
            return
        try:
            values = json.loads(line)
            if not isinstance(values, list) or len(values) < 2 or not isinstance(values[0], str):
                raise ValueError("it is not [call, now, ...]")
            if number == 1 and (values[0] != "journal" or values[1] != _VERSION):
                raise ValueError("a journal begins with its version")
        except (ValueError, RecursionError) as error:
            raise JournalError(f"journal, line {number}: {line[:120]!r}: {error}") from error
        yield number, line, values


def _policy(plain: Any, policies: Mapping[str, Policy]) -> Policy:
    if "named" not in plain:
        policy: Policy = from_plain(plain)
        return policy
    try:
        return policies[plain["named"]]
    except KeyError:
        raise ConfigError(
            f"journal: policy {plain['named']!r} has parts of your own, which are not in the "
            f"journal; give it as policies={{{plain['named']!r}: ...}}"
        ) from None


def _request(asked: list[Any], make_request: MakeRequest | None, **changes: Any) -> Request:
    fields = request_from_plain(asked[0]) | changes
    payload = asked[1] if len(asked) > 1 else None
    if make_request is None:
        return Request(**fields, payload=payload)
    return make_request(fields, payload)


class Difference(NamedTuple):
    """The first line that a replay did not write again."""

    line: int  #: its number, from 1
    recorded: str
    recomputed: str


class Replayed(NamedTuple):
    """What a replay found."""

    num_calls: int  #: made again
    num_requests: int  #: submitted among them
    num_steps: int  #: completed among them
    difference: Difference | None  #: None: every decision is the same


class _Lines:
    """A sink that keeps the last line."""

    closed = False
    last = ""

    def write(self, line: str) -> int:
        self.last = line
        return len(line)

    def flush(self) -> None:
        """Nothing is buffered."""


def replay(
    source: str | os.PathLike[str] | Iterable[str],
    *,
    policies: Mapping[str, Policy] | None = None,
) -> Replayed:
    """Make the recorded calls again and compare every decision. O(journal).

    Args:
        source: A journal's path, or its lines.
        policies: Those that the journal has by name alone.

    Returns:
        How far it came, and the first difference. A decision depends on the calls alone, so one
        that differs is a policy that reads a clock, draws random numbers or keeps hidden state, or
        another version of one.

    Raises:
        JournalError: If it is no journal; says which line.
        ConfigError: If it names a policy that is not among ``policies``.
    """
    known = {} if policies is None else policies
    sink: Any = _Lines()
    player: _Player | None = None
    calls = requests = 0
    for number, line, values in _read(source):
        try:
            if player is None:
                _, _, capacity, plain, max_in_flight = values
                scheduler = JournaledScheduler(
                    sink,
                    capacity=from_plain(capacity),
                    policy=_policy(plain, known),
                    max_in_flight=max_in_flight,
                )
                player = _Player(scheduler, known)
            else:
                calls += 1
                requests += values[0] == "submit"
                player.play(*values)
        except (ConfigError, JournalError):
            raise
        except DllmSchedError as error:
            sink.last = f"{type(error).__name__}: {error}"
        except _MALFORMED as error:
            raise JournalError(f"journal, line {number}: {line[:120]!r}: {error!r}") from error
        if sink.last != line and not _same(sink.last, values):
            difference = Difference(number, line.rstrip("\n"), sink.last.rstrip("\n"))
            return Replayed(calls, requests, scheduler.stats().num_steps, difference)
    if player is None:
        raise JournalError("journal: it is empty")
    return Replayed(calls, requests, scheduler.stats().num_steps, None)


def _same(line: str, values: list[Any]) -> bool:
    """Whether a line has these values, however it is spelt."""
    try:
        return bool(json.loads(line) == values)
    except ValueError:
        return False


def _payload_as_read(request: Request) -> Any:
    return request.payload


class _Player:
    """Makes recorded calls again."""

    def __init__(self, scheduler: JournaledScheduler, policies: Mapping[str, Policy]) -> None:
        self.scheduler = scheduler
        self.policies = policies
        self.flights: dict[int, StepBatch] = {}

    def play(self, call: str, now: float, *rest: Any) -> None:
        """Make one call. Raises ValueError if there is none of that name."""
        if call in ("pause", "resume", "drain"):
            getattr(self.scheduler, call)(now=now)
        elif call in _CALLS:
            _CALLS[call](self, now, rest[0] if rest else None)
        else:
            raise ValueError(f"{call!r} is no call")

    def submit(self, now: float, asked: Any) -> None:
        self.scheduler._write_payload = _payload_as_read if len(asked) > 1 else None
        self.scheduler.submit(_request(asked, None), now=now)

    def cancel(self, now: float, asked: Any) -> None:
        self.scheduler.cancel(asked, now=now)

    def requeue(self, now: float, asked: Any) -> None:
        self.scheduler.requeue(asked, now=now)

    def next_step(self, now: float, asked: Any) -> None:
        batch = self.scheduler.next_step(now=now).batch
        if batch is not None:
            self.flights[batch.step_id] = batch

    def complete_quietly(self, now: float, asked: Any) -> None:
        self.scheduler.complete_step(self.flights.pop(asked), now=now)

    def complete_step(self, now: float, asked: Any) -> None:
        step_id, outcome, steps = asked
        flight = self.flights.pop(step_id)
        self.scheduler.complete_step(flight, _outcome_from_plain(outcome), now=now, steps=steps)

    def fail_step(self, now: float, asked: Any) -> None:
        step_id, text, fates = asked
        flight = self.flights[step_id]
        self.flights.clear()
        rows = {slot: RowFate(fate) for slot, fate in fates}
        self.scheduler.fail_step(flight, _RecordedError(text), rows=rows, now=now)

    def set_policy(self, now: float, asked: Any) -> None:
        policy = _policy(asked, self.policies)
        pairs = zip(_AXES, self.scheduler.policy.strategies, policy.strategies, strict=True)
        kept = asked.get("kept", ())
        changes: dict[str, Any] = {
            axis: before if axis in kept else copy.copy(after)
            for axis, before, after in pairs
            if axis in kept or before is after
        }
        self.scheduler.set_policy(attrs.evolve(policy, **changes), now=now)

    def set_capacity(self, now: float, asked: Any) -> None:
        self.scheduler.set_capacity(from_plain(asked), now=now)


_CALLS: dict[str, Callable[[_Player, float, Any], None]] = {
    "submit": _Player.submit,
    "cancel": _Player.cancel,
    "requeue": _Player.requeue,
    "n": _Player.next_step,
    "next": _Player.next_step,
    "d": _Player.complete_quietly,
    "done": _Player.complete_step,
    "fail": _Player.fail_step,
    "policy": _Player.set_policy,
    "capacity": _Player.set_capacity,
}


class Restored(NamedTuple):
    """Who is back."""

    scheduler: JournaledScheduler  #: with all of them waiting, in their old order
    requests: tuple[Request, ...]  #: they


def restore(
    source: str | os.PathLike[str] | Iterable[str],
    sink: str | os.PathLike[str] | TextIO,
    *,
    now: float,
    capacity: Capacity | None = None,
    policy: Policy | None = None,
    policies: Mapping[str, Policy] | None = None,
    make_request: MakeRequest | None = None,
    **arguments: Any,
) -> Restored:
    """Bring back whoever a journal shows as not finished, on a new scheduler. O(journal).

    Waiting requests wait again, and what was in flight starts anew, in the order of arrival. An
    ending counts as told if another call came after it; so each is served at least once. Instants
    are rebased: the last one of the journal becomes ``now`` (monotonic clocks start anew with the
    machine), so a deadline has as much left as then. Who had begun has no queue timeout any more.

    Args:
        source: The old journal.
        sink: The new one; when this has returned the old one is no longer needed.
        now: Seconds on the new clock.
        capacity: Default: the one last in force. A ``max_num_seqs`` that was lowered, because a
            step did not fit or by hand (a journal does not say), stays so: give the full one here.
        policy: Default: the one last in force; its estimates start anew.
        policies: Those that the journal has by name alone.
        make_request: Builds a request from (fields, payload as written); default: a ``Request``.
        arguments: As of ``JournaledScheduler``.

    Raises:
        JournalError: If it is no journal; says which line.
        ConfigError: If a policy is not among ``policies``, or the capacity is too small for one of
            the requests.
    """
    left = _read_survivors(source)
    if policy is None:
        policy = _policy(left.policy, {} if policies is None else policies)
    last = capacity
    if capacity is None:
        last = left.capacity  # with perhaps fewer slots for a while than its policy was built for
        capacity = attrs.evolve(last, max_num_seqs=left.most_slots)
    try:
        requests = tuple(
            _request(asked, make_request, **left.rebased(asked[0], when, now))
            for asked, when in left.waiting.values()
        )
    except DllmSchedError:
        raise
    except _MALFORMED as error:
        raise JournalError(f"journal: a request cannot be built again: {error!r}") from error
    # Under the plainest of policies first: one that refuses newcomers refuses none of these.
    scheduler = JournaledScheduler(sink, capacity=capacity, **arguments)
    for request in requests:
        answer = scheduler.submit(request, now=now)
        if isinstance(answer, Rejected):
            raise ConfigError(
                f"restore: request {request.id!r} is {answer.reason}: give a capacity that holds it"
            )
    scheduler.set_policy(policy, now=now)
    if last is not None and last != capacity:
        scheduler.set_capacity(last, now=now)
    return Restored(scheduler, requests)


class _Survivors:
    """Whoever a journal shows as not finished, and under what."""

    def __init__(self, capacity: Any, policy: Any) -> None:
        self.capacity: Capacity = from_plain(capacity)
        self.most_slots = self.capacity.max_num_seqs  # ever
        self.policy = policy  # as written
        self.at = -_INF  # the last instant
        self.waiting: dict[str, tuple[list[Any], float]] = {}  # by id: (as submitted, when)
        self._begun: set[str] = set()
        self._ended: list[str] = []  # by the last call

    def read(self, call: str, at: float, asked: Any = None, told: Any = None) -> None:
        for request_id in self._ended:  # the caller went on, so it has told them
            self.waiting.pop(request_id, None)
            self._begun.discard(request_id)
        self._ended = []
        self.at = at
        if call == "submit":
            if told is None:
                self.waiting[asked[0]["id"]] = (asked, at)
            return
        if call == "policy":
            self.policy = asked
        elif call == "capacity":
            self.capacity = from_plain(asked)
            self.most_slots = max(self.most_slots, self.capacity.max_num_seqs)
        if told is not None:
            self._begun.update(row[1] for row in told.get("joined", ()))
            self._ended = [one[0] for one in told.get("finished", ())]

    def rebased(self, plain: dict[str, Any], when: float, now: float) -> dict[str, float]:
        fields = request_from_plain(plain)
        waited_s = self.at - when
        left_s = max(0.0, fields["queue_timeout_s"] - waited_s)
        return {
            "deadline_at": fields["deadline_at"] - self.at + now,
            "queue_timeout_s": _INF if fields["id"] in self._begun else left_s,
        }


def _read_survivors(source: str | os.PathLike[str] | Iterable[str]) -> _Survivors:
    left: _Survivors | None = None
    for number, line, values in _read(source):
        try:
            if left is None:
                left = _Survivors(values[2], values[3])
            else:
                left.read(*values)
        except _MALFORMED as error:
            raise JournalError(f"journal, line {number}: {line[:120]!r}: {error!r}") from error
    if left is None:
        raise JournalError("journal: it is empty")
    return left
