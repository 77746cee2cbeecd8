"""Strategies around strategies: each question is asked for the scheduler, and checked.

A probe hands a question on to the strategy it surrounds, twice where the answer should be the same
twice, and looks at the answer and at what the call left behind.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import attrs

from dllm_sched.batch import Knobs, StepBatch, StepOutcome
from dllm_sched.capacity import Capacity
from dllm_sched.errors import DllmSchedError
from dllm_sched.policies.base import (
    ALL,
    Admission,
    Composition,
    Control,
    Eviction,
    Ordering,
    Policy,
    Preempt,
    Selection,
    Strategy,
    Timeout,
    Verdict,
    Victim,
)
from dllm_sched.request import FinishReason, Phase, Request, RequestStatus, RequestView
from dllm_sched.testing._fingerprint import attributes, fingerprint, owned
from dllm_sched.testing._guard import Watch, watching
from dllm_sched.view import Round, SchedulerView

__all__ = ["POLICY_RULES", "Ask", "Kept", "PolicyCheckError", "Record", "probed"]

POLICY_RULES: Mapping[str, str] = {
    "raises": "no hook raises",
    "state": "init, observe, joined and settle return a state that every hook can use",
    "state-in-place": "only settle and observe change the state; nobody else, not even in place",
    "shared-state": "a strategy keeps nothing on itself: one object serves many schedulers",
    "inputs": "what a hook is given stays as it is",
    "clock": "no hook reads a clock: the time is view.now",
    "random": "no hook draws a random number",
    "repeatable": "the same question has the same answer",
    "needs": "what a hook reads beyond the free counts is declared in needs",
    "key": "a key is a tuple of numbers, as many for each request, never NaN",
    "accept": "accept returns a reason (a non-empty str) or None",
    "verdict": "admit returns a Verdict",
    "recheck": "recheck returns a number of steps >= 1",
    "recheck-honest": "admit does not change its answer earlier than recheck says",
    "due": "due is an instant that comes, and that nothing but a change moves forward",
    "spin": "a driver that wakes at wake_at gets on",
    "progress": "an idle engine is not held back by something that only time can change",
    "select": "select returns ALL, phases, or running rows once each, and not nobody for ever",
    "victims": "victims are running rows, each once, each with KEEP, RESTART or a finish reason",
    "limits": "limits are (instant, steps >= 1)",
    "knobs": "knobs are (mapping by name, instant after now)",
    "hints": "hints can be put into a tuple",
    "drains": "while draining, everything gets to its end",
    "deterministic": "the same calls bring the same decisions",
    "ids": "other request ids change nothing",
    "time-shift": "another origin of time changes nothing",
    "operators": "x & x, x | x and x.then(x) decide as x does",
}
"""What ``check_policy`` checks, by the name in ``PolicyCheckError.rule``."""


class PolicyCheckError(DllmSchedError, AssertionError):
    """A policy breaks its contract.

    Attributes:
        rule: Which rule, a key of ``POLICY_RULES``.
        axis: Which axis breaks it (``ordering`` ... ``control``), or ``policy``: not known.
        reproduction: The workload, and every call made to the scheduler up to the fault.
    """

    def __init__(self, rule: str, axis: str, message: str, reproduction: str) -> None:
        self.rule = rule
        self.axis = axis
        self.reproduction = reproduction
        last = "\n".join(f"    {line}" for line in reproduction.splitlines()[-6:])
        super().__init__(
            f"{axis} breaks rule {rule!r} ({POLICY_RULES[rule]}): {message}\n  the last calls "
            f"(all of them in .reproduction):\n{last}"
        )


class Ask(NamedTuple):
    """A question that admission answered with something else than ADMIT, before anybody joined."""

    state: Any
    rv: RequestView
    round: Round
    verdict: Verdict


class Kept(NamedTuple):
    """A question to the timeout axis, and its answer."""

    state: Any
    view: SchedulerView
    due: float


class Record:
    """What one run has shown so far."""

    def __init__(self, about: str) -> None:
        self._calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.failure: PolicyCheckError | None = None
        self.views: dict[int, RequestView] = {}  # every view ever, by identity
        self.key_length: int | None = None
        self.selected = False  # composition was asked since the last call of the scheduler
        self.dues: list[Kept] = []  # since the last call of the scheduler
        self.first_ask: Ask | None = None  # the first refusal of this round
        self.admission_state: Any = None  # after the round
        self.recheck: float | None = None  # asked in this round
        self.note(about)

    def fail(self, rule: str, axis: str, message: str) -> PolicyCheckError:
        """Build the error, and remember it: a scheduler may wrap it or tell it later."""
        error = PolicyCheckError(rule, axis, message, "\n".join(map(_line, self._calls)))
        if self.failure is None:
            self.failure = error
        return self.failure

    def note(self, line: str) -> None:
        """Note something as it is."""
        self._calls.append((line, (), {}))

    def call(self, name: str, *arguments: Any, **more: Any) -> None:
        """Note a call of the scheduler that is about to be made; written out if it is wanted."""
        self._calls.append((name, arguments, more))
        self.dues.clear()
        self.first_ask = None
        self.recheck = None
        self.selected = False


def _line(call: tuple[str, tuple[Any, ...], dict[str, Any]]) -> str:
    name, arguments, more = call
    if not more:
        return name
    told = [_short(one) for one in arguments] + [f"{k}={_short(v)}" for k, v in more.items()]
    return f"sched.{name}({', '.join(told)})"


def _short(argument: object) -> str:
    """Fields that have their default left out, batches by number."""
    if isinstance(argument, StepBatch):
        return f"<the batch of step {argument.step_id}>"
    if isinstance(argument, StepOutcome):
        told = [f"{k}={v!r}" for k, v in argument._asdict().items() if v]
        return f"StepOutcome({', '.join(told)})"
    if isinstance(argument, Request):
        fields = attrs.fields(Request)
        told = [
            f"{field.name}={getattr(argument, field.name)!r}"
            for field in fields
            if field.name not in ("id", "payload")
            and getattr(argument, field.name) != field.default
        ]
        return f"Request({', '.join([repr(argument.id), *told])})"
    return repr(argument)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _seen(argument: Any) -> object:
    """A print of an argument that must not change: of a view, all that a policy sees of it."""
    if isinstance(argument, RequestView):
        public = (
            argument.status,
            argument.slot,
            argument.phase,
            argument.num_steps,
            argument.num_blocks_done,
            argument.kv_tokens,
            argument.num_pages,
            argument.max_tokens,
            argument.masked_remaining,
            argument.arrived_at,
            argument.admitted_at,
            argument.sequence,
        )
        return fingerprint((public, list(attributes(argument.request))))
    if isinstance(argument, Round):
        return (fingerprint(argument), fingerprint(argument.view))
    return fingerprint(argument)


class _Probe(Strategy):
    """What the probes of all axes share."""

    axis = ""

    def __init__(self, inner: Any, record: Record) -> None:
        self.inner = inner
        self.record = record
        self.needs = inner.needs
        self.observes = inner.observes
        self._owned = owned(inner)
        self._moved_by = "init"

    def asks(self, hook: str) -> bool:
        return bool(self.inner.asks(hook))

    def validate(self, capacity: Capacity) -> None:
        self.inner.validate(capacity)

    def init(self) -> Any:
        self._moved_by = "init"
        state = self.ask("init")
        again = self.ask("init")
        if state is again and state is not None and isinstance(state, list | dict | set):
            raise self.fail("shared-state", f"init returned the same {state!r} twice")
        return state

    def observe(self, state: Any, event: Any) -> Any:
        return self.move("observe", state, event)

    # --- asking -------------------------------------------------------------------------------

    def fail(self, rule: str, message: str) -> PolicyCheckError:
        return self.record.fail(rule, self.axis, f"{message}, {self.inner!r}")

    def ask(
        self, hook: str, *arguments: Any, into: Callable[[Any], Any] = lambda answer: answer
    ) -> Any:
        """Ask a question that changes nothing, twice; ``into`` uses an iterator up."""
        before = [_seen(one) for one in arguments]
        answer = self._once(hook, arguments, into)
        self._check_inputs(hook, arguments, before)
        again = self._once(hook, arguments, into)
        if fingerprint(again) != fingerprint(answer):
            raise self.fail(
                "repeatable", f"{hook} answered {answer!r}, and asked again at once {again!r}"
            )
        return answer

    def move(self, hook: str, state: Any, argument: Any) -> Any:
        """Let settle or observe make the next state; first on copies, twice."""
        before = _seen(argument)
        tries = []
        for _ in range(2):
            try:
                one = copy.deepcopy(state, dict(self.record.views))
            except Exception:  # noqa: BLE001  # a state that cannot be copied is not asked twice
                break
            tries.append(fingerprint(self._once(hook, (one, argument))))
            if _seen(argument) != before:
                raise self.fail("inputs", f"{hook} changed the {_name(argument)} it was given")
        if len(tries) == 2 and tries[0] != tries[1]:
            raise self.fail("repeatable", f"{hook} made two states of equal ones")
        state = self._once(hook, (state, argument))
        self._moved_by = hook
        return state

    def _check_inputs(self, hook: str, arguments: tuple[Any, ...], before: list[object]) -> None:
        for index, (one, was) in enumerate(zip(arguments, before, strict=True)):
            if _seen(one) == was:
                continue
            if index == 0 and hook not in ("init", "limits"):
                raise self.fail("state-in-place", f"{hook} changed the state it was given")
            raise self.fail("inputs", f"{hook} changed the {_name(one)} it was given")

    def _once(
        self,
        hook: str,
        arguments: tuple[Any, ...],
        into: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:
        handed = list(arguments)
        error: Exception | None = None
        answer: Any = None
        with watching(handed) as watch:
            try:
                answer = into(getattr(self.inner, hook)(*handed))
            except Exception as raised:  # noqa: BLE001  # named below
                error = raised
        self._check_watch(hook, watch)
        self._check_self(hook)
        if error is not None:
            raise self._blame(hook, arguments, error) from error
        return answer

    def _check_watch(self, hook: str, watch: Watch) -> None:
        if watch.clock:
            raise self.fail("clock", f"{hook} called {watch.clock}")
        if watch.random:
            raise self.fail("random", f"{hook} drew a random number ({watch.random})")
        for name in sorted(watch.reads):
            need = _NEEDED.get(name)
            if need is not None and need not in self.needs:
                raise self.fail("needs", f"{hook} reads {name} without declaring {need!r}")
            if need is None and hook != "victims":
                raise self.fail("needs", f"{hook} calls {name}, which only victims may")

    def _check_self(self, hook: str) -> None:
        now = owned(self.inner)
        for name, was in self._owned.items():
            if now.get(name) != was:
                raise self.fail("shared-state", f"{hook} changed .{name} of the strategy itself")
        self._owned = now  # what is new may have been computed once, and stays from here on

    def _blame(self, hook: str, arguments: tuple[Any, ...], error: Exception) -> PolicyCheckError:
        if self._moved_by != "init" and hook not in ("init", "limits"):
            try:
                getattr(self.inner, hook)(self.inner.init(), *arguments[1:])
            except Exception:  # noqa: BLE001  # it raises whatever the state is
                return self.fail("raises", f"{hook} raised {error!r}")
            return self.fail(
                "state", f"{hook} raised {error!r} on {arguments[0]!r}, made by {self._moved_by}"
            )
        return self.fail("raises", f"{hook} raised {error!r}")


_NEEDED = {
    "max_length": "max_length",
    "waiting_by_lane": "lanes",
    "running_by_lane": "lanes",
    "boundaries": "blocks",
    "rows": "rows",
    "masked_remaining": "progress",
}


def _name(argument: object) -> str:
    return {
        RequestView: "request or its view",
        Round: "round",
        SchedulerView: "view",
    }.get(type(argument), type(argument).__name__)


class _OrderingProbe(_Probe, Ordering):
    axis = "ordering"

    def key(self, state: Any, rv: RequestView) -> tuple[float, ...]:
        key: tuple[float, ...] = self.ask("key", state, rv)
        if not isinstance(key, tuple):
            raise self.fail("key", f"key of request {rv.id!r} is {key!r}, not a tuple")
        if not all(isinstance(part, bool) or _is_number(part) for part in key):
            raise self.fail("key", f"key of request {rv.id!r} holds no number, {key!r}")
        length = self.record.key_length
        if length is not None and len(key) != length:
            raise self.fail("key", f"{key!r} of request {rv.id!r} after keys of length {length}")
        self.record.key_length = len(key)
        return key


class _AdmissionProbe(_Probe, Admission):
    axis = "admission"

    def __init__(self, inner: Any, record: Record) -> None:
        super().__init__(inner, record)
        self.max_rows = inner.max_rows

    def init(self) -> Any:
        state = super().init()
        self.record.admission_state = state
        return state

    def accept(self, state: Any, rv: RequestView, view: SchedulerView) -> str | None:
        self.record.views[id(rv)] = rv
        reason: str | None = self.ask("accept", state, rv, view)
        if reason is not None and (not isinstance(reason, str) or not reason):
            raise self.fail("accept", f"accept answered {reason!r} for request {rv.id!r}")
        return reason

    def admit(self, state: Any, rv: RequestView, round: Round) -> Verdict:
        verdict: Verdict = self.ask("admit", state, rv, round)
        if not isinstance(verdict, Verdict):
            raise self.fail("verdict", f"admit answered {verdict!r} for request {rv.id!r}")
        if not round.num_joined and self.record.first_ask is None and verdict != Verdict.ADMIT:
            self.record.first_ask = Ask(state, rv, _as_it_is(round), verdict)
        return verdict

    def joined(self, state: Any, rv: RequestView, round: Round) -> Any:
        state = self.ask("joined", state, rv, round)
        self._moved_by = "joined"
        return state

    def settle(self, state: Any, round: Round) -> Any:
        state = self.record.admission_state = self.move("settle", state, round)
        return state

    def recheck(self, state: Any, round: Round) -> float:
        steps: float = self.ask("recheck", state, round)
        if not _is_number(steps) or steps < 1:
            raise self.fail("recheck", f"recheck answered {steps!r}")
        self.record.recheck = steps
        return steps

    def check_honest(self, *, step_s: float, wake_at: float, idle: bool) -> None:
        """Ask on behalf of later steps and instants: nobody else will before they come."""
        ask, record = self.record.first_ask, self.record
        if ask is None or ask.rv.status is RequestStatus.FINISHED:
            return
        state = record.admission_state if self.asks("settle") else ask.state
        if idle:
            for later in _LATER:
                answer = self._later(ask, state, ask.round.view.now + later, 0, wake_at)
                if answer is Verdict.ADMIT:
                    raise self.fail(
                        "progress",
                        f"admit holds request {ask.rv.id!r} back and would let it go {later} s "
                        "later, but nobody wakes then; that is for the timeout axis to say",
                    )
            return
        steps = math.inf if record.recheck is None else record.recheck
        for number in _STEPS:
            if number >= steps:
                break
            at = ask.round.view.now + number * step_s
            answer = self._later(ask, state, at, number, wake_at)
            if answer is not None and answer != ask.verdict:
                raise self.fail(
                    "recheck-honest",
                    f"admit answered {ask.verdict.name} for request {ask.rv.id!r}, recheck "
                    f"promised {steps} steps without another answer, and {number} steps later "
                    f"it is {answer.name}",
                )

    def _later(
        self, ask: Ask, state: Any, at: float, num_steps: int, wake_at: float
    ) -> Verdict | None:
        if at >= wake_at:
            return None
        round = _as_it_is(ask.round)
        round.view = round.view._replace(now=at)
        round.num_steps = num_steps
        round.boundaries = []
        round.num_retired = round.num_preempted = 0
        verdict: Verdict = self._once("admit", (state, ask.rv, round))
        return verdict


_LATER = (0.5, 4.0, 32.0, 1024.0)
_STEPS = (1, 2, 3, 4, 5, 7, 8, 16, 32)


def _as_it_is(round: Round) -> Round:
    """A round that the scheduler will not write any more."""
    one = copy.copy(round)
    one.joined = list(round.joined)
    one.blocked = None
    one.blocked_by = None
    return one


class _TimeoutProbe(_Probe, Timeout):
    axis = "timeout"

    def __init__(self, inner: Any, record: Record) -> None:
        super().__init__(inner, record)
        self.scope = inner.scope

    def due(self, state: Any, view: SchedulerView) -> float:
        due: float = self.ask("due", state, view)
        if not _is_number(due):
            raise self.fail("due", f"due answered {due!r}")
        self.record.dues.append(Kept(state, view, due))
        return due

    def check_honest(self, wake_at: float) -> None:
        """What is not due before ``wake_at`` must not become due before it by itself."""
        for state, view, due in tuple(self.record.dues):
            for later in _LATER:
                at = view.now + later
                if at >= wake_at:
                    break
                answer = self._once("due", (state, view._replace(now=at)))
                if answer <= at and due > at:
                    raise self.fail(
                        "due",
                        f"at {view.now} the batch was due at {due}, and at {at} it is due at "
                        f"{answer}, without a change in between: nobody wakes for it",
                    )


class _CompositionProbe(_Probe, Composition):
    axis = "composition"

    def select(self, state: Any, round: Round) -> Selection:
        answer: Selection = self.ask("select", state, round)
        self.record.selected = True
        if answer is ALL:
            return answer
        if not isinstance(answer, Collection) or isinstance(answer, str | bytes | Mapping):
            raise self.fail("select", f"select answered {answer!r}")
        chosen: list[Any] = list(answer)
        if all(isinstance(one, Phase) for one in chosen):
            return answer
        if not all(isinstance(one, RequestView) for one in chosen):
            raise self.fail("select", f"select answered {answer!r}")
        if "rows" not in self.needs:
            raise self.fail("needs", "select returns rows without declaring 'rows'")
        self._check_rows("select", chosen)
        return answer

    def _check_rows(self, rule: str, rows: list[RequestView]) -> None:
        for row in rows:
            if row.status is not RequestStatus.RUNNING:
                raise self.fail(rule, f"{row!r} is not running")
        if len({id(row) for row in rows}) < len(rows):
            raise self.fail(rule, f"a row is named twice in {rows!r}")


class _EvictionProbe(_Probe, Eviction):
    axis = "eviction"

    def limits(self, rv: RequestView) -> tuple[float, float]:
        answer: Any = self.ask("limits", rv)
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise self.fail("limits", f"limits of request {rv.id!r} are {answer!r}")
        instant, steps = answer
        if not _is_number(instant) or not _is_number(steps) or steps < 1:
            raise self.fail("limits", f"limits of request {rv.id!r} are {answer!r}")
        return instant, steps

    def victims(self, state: Any, need_pages: int, round: Round) -> Iterable[Victim]:
        answer: Any = self.ask("victims", state, need_pages, round, into=_tuple_or_not)
        if not isinstance(answer, tuple):
            raise self.fail("victims", f"victims answered {answer!r}")
        seen: set[int] = set()
        for one in answer:
            if (
                not isinstance(one, tuple)
                or len(one) != 2
                or not isinstance(one[0], RequestView)
                or not isinstance(one[1], Preempt | FinishReason)
            ):
                raise self.fail("victims", f"{one!r} is no (row, KEEP | RESTART | reason)")
            if one[0].status is not RequestStatus.RUNNING:
                raise self.fail("victims", f"{one[0]!r} is not running")
            if id(one[0]) in seen:
                raise self.fail("victims", f"{one[0]!r} is named twice")
            seen.add(id(one[0]))
        victims: Iterable[Victim] = answer
        return victims


class _ControlProbe(_Probe, Control):
    axis = "control"

    def knobs(self, state: Any, rv: RequestView, view: SchedulerView) -> tuple[Knobs, float]:
        return self._checked("knobs", self.ask("knobs", state, rv, view), view)

    def batch_knobs(self, state: Any, view: SchedulerView) -> tuple[Knobs, float]:
        return self._checked("batch_knobs", self.ask("batch_knobs", state, view), view)

    def _checked(self, hook: str, answer: Any, view: SchedulerView) -> tuple[Knobs, float]:
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self.fail("knobs", f"{hook} answered {answer!r}")
        knobs, until = answer
        if not isinstance(knobs, Mapping) or not all(isinstance(name, str) for name in knobs):
            raise self.fail("knobs", f"{hook} answered {knobs!r}")
        if not _is_number(until) or not until > view.now:
            raise self.fail("knobs", f"{hook} at {view.now} is valid until {until!r}")
        return knobs, until

    def hints(self, state: Any, round: Round) -> tuple[Any, ...]:
        hints: Any = self.ask("hints", state, round, into=_tuple_or_not)
        if not isinstance(hints, tuple):
            raise self.fail("hints", f"hints answered {hints!r}")
        return hints


def _tuple_or_not(answer: Any) -> Any:
    return tuple(answer) if isinstance(answer, Iterable) else answer


_PROBES: tuple[tuple[str, type[_Probe]], ...] = (
    ("ordering", _OrderingProbe),
    ("admission", _AdmissionProbe),
    ("timeout", _TimeoutProbe),
    ("composition", _CompositionProbe),
    ("eviction", _EvictionProbe),
    ("control", _ControlProbe),
)


class Probed(NamedTuple):
    """A policy behind probes, and the two that are asked about later."""

    policy: Policy
    admission: _AdmissionProbe
    timeout: _TimeoutProbe


def probed(policy: Policy, record: Record) -> Probed:
    """Put a probe around each axis."""
    probes: dict[str, Any] = {axis: probe(getattr(policy, axis), record) for axis, probe in _PROBES}
    return Probed(attrs.evolve(policy, **probes), probes["admission"], probes["timeout"])
