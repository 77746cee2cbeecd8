"""The policy in force: its states, what it answers to, and the checks on its answers.

The core owns correctness. Whatever a strategy raises, and whatever nonsense it answers, becomes a
``PolicyError`` here that names policy, hook and request, before anything is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dllm_sched.batch import NO_KNOBS, Knobs
from dllm_sched.capacity import Capacity
from dllm_sched.errors import ConfigError, PolicyError
from dllm_sched.events import Event, StepCompleted, StepFailed, StepPlanned
from dllm_sched.policies.base import ALL, Policy, Preempt, Strategy
from dllm_sched.request import FinishReason, Phase, RequestView
from dllm_sched.view import Round, SchedulerView

__all__ = ["STEP_EVENTS", "Asking"]

STEP_EVENTS = frozenset({StepPlanned, StepCompleted, StepFailed})

_INF = math.inf
_BIG = 2**53  # beyond it an int is not what the float is that it meets
_ORDERING, _ADMISSION, _TIMEOUT, _COMPOSITION, _EVICTION, _CONTROL = range(6)


def _number(value: Any) -> float:
    """A number of whatever kind as one that goes with every other; the rest raises."""
    if type(value) is float or (type(value) is int and -_BIG < value < _BIG):
        return value
    if isinstance(value, str | bytes):
        raise TypeError(f"{value!r} is no number")
    return float(value)


class Asking:
    """A policy with its states, as one scheduler asks it.

    The flags say which hooks anybody answers; what nobody answers is never called.
    """

    # Slots: an instance with this many attributes in a dict finds each of them by hashing.
    __slots__ = (
        "_key",
        "_key_length",
        "_limits",
        "_observing",
        "_row_knobs",
        "accept",
        "admission",
        "admit",
        "batch_knobs",
        "due",
        "due_every_step",
        "every_step",
        "hints",
        "joined",
        "key",
        "knobs",
        "knobs_at_blocks",
        "limits",
        "max_rows",
        "may_raise_late",
        "needs_blocks",
        "needs_lanes",
        "needs_length",
        "needs_progress",
        "needs_rows",
        "observed",
        "plain",
        "policy",
        "recheck",
        "repeats_batches",
        "sees_rounds",
        "select",
        "settle",
        "shapes_batches",
        "states",
        "victims",
        "victims_every_step",
    )

    def __init__(self, policy: Policy, capacity: Capacity, previous: Asking | None = None) -> None:
        if not isinstance(policy, Policy):
            raise ConfigError(
                f"expected a Policy (see dllm_sched.presets for ready ones), got {policy!r}"
            )
        self.policy = policy
        self._validate(capacity)
        needs = policy.needs
        self.max_rows = self._max_rows(policy)
        self.needs_rows = "rows" in needs
        self.needs_blocks = "blocks" in needs
        self.needs_progress = "progress" in needs
        self.needs_lanes = "lanes" in needs
        self.needs_length = "max_length" in needs
        self.every_step = "every_step" in needs
        self.admission = admission = policy.admission._within_max_rows()
        self._key = policy.ordering.key
        self._limits = policy.eviction.limits
        self._row_knobs = policy.control.knobs
        self.key = policy.ordering.asks("key")
        self.accept = admission.asks("accept")
        self.admit = admission.asks("admit")
        self.joined = admission.asks("joined")
        self.settle = admission.asks("settle")
        self.recheck = admission.asks("recheck")
        self.due = policy.timeout.asks("due")
        self.due_every_step = self.due and policy.timeout.scope == "step"
        self.select = policy.composition.asks("select")
        self.limits = policy.eviction.asks("limits")
        self.victims = policy.eviction.asks("victims")
        self.victims_every_step = self.victims and "every_step" in policy.eviction.needs
        self.knobs = policy.control.asks("knobs")
        self.knobs_at_blocks = self.knobs and "blocks" in policy.control.needs
        self.batch_knobs = policy.control.asks("batch_knobs")
        self.hints = policy.control.asks("hints")
        self.sees_rounds = (
            self.admit
            or self.joined
            or self.settle
            or self.recheck
            or self.knobs
            or self.select
            or self.hints
        )
        self._key_length: int | None = None
        self._observing: dict[type[Any], list[tuple[int, Strategy]]] = {}
        strategies = (policy.ordering, admission, *policy.strategies[2:])
        for axis, strategy in enumerate(strategies):
            for kind in strategy.observes:
                self._observing.setdefault(kind, []).append((axis, strategy))
        self.shapes_batches = self.select or self.batch_knobs or self.hints
        self.repeats_batches = not self.select and not self.every_step
        self.observed = frozenset(self._observing)
        self.plain = not (  # nothing is asked but keys, and the limits of whoever joins
            self.sees_rounds
            or self.due
            or self.shapes_batches
            or self.every_step
            or self.needs_progress
            or self.victims_every_step
            or self.observed
        )
        # in a plan, after something of it has been written down
        self.may_raise_late = bool(self.observed) or self.shapes_batches
        self.states: tuple[Any, ...] = tuple(
            previous.states[axis]
            if previous is not None and previous.policy.strategies[axis] is policy.strategies[axis]
            else self._init(strategy)
            for axis, strategy in enumerate(strategies)
        )

    def _validate(self, capacity: Capacity) -> None:
        try:
            self.policy.validate(capacity)
        except ConfigError:
            raise
        except Exception as error:
            raise PolicyError(f"policy {self.policy.name!r}: validate raised {error!r}") from error

    def _max_rows(self, policy: Policy) -> float:
        most = policy.admission.max_rows
        if not isinstance(most, int | float) or not most >= 1:
            raise ConfigError(
                f"policy {policy.name!r}: max_rows of {policy.admission!r} must be rows >= 1 "
                f"(inf = no limit), got {most!r}"
            )
        return most

    def _init(self, strategy: Strategy) -> Any:
        try:
            return strategy.init()
        except Exception as error:
            raise PolicyError(
                f"policy {self.policy.name!r}: init of {strategy!r} raised {error!r}"
            ) from error

    def error(self, hook: str, cause: Exception, view: RequestView | None = None) -> PolicyError:
        """What to raise (``from cause``) after a strategy raised."""
        axis = getattr(self.policy, hook.split(".", maxsplit=1)[0])
        about = "" if view is None else f" about request {view.request.id!r}"
        return PolicyError(
            f"policy {self.policy.name!r}: {hook} of {axis!r} raised {cause!r}{about}; nothing was "
            "changed"
        )

    def wrong(self, what: str, view: RequestView | None = None) -> PolicyError:
        """What to raise after a strategy answered nonsense."""
        about = "" if view is None else f" for request {view.request.id!r}"
        return PolicyError(f"policy {self.policy.name!r}: {what}{about}; nothing was changed")

    # --- ordering -----------------------------------------------------------------------------

    def sort_key(self, view: RequestView) -> tuple[float, ...]:
        """Ask for a key. One that could break a heap (no number, NaN, another length) is refused.

        O(1).
        """
        if not self.key:
            return ()
        try:
            key = self._key(self.states[_ORDERING], view)
        except Exception as error:
            raise self.error("ordering.key", error, view) from error
        if type(key) is tuple and len(key) == self._key_length:
            for part in key:
                if (type(part) is not int and type(part) is not float) or part != part:
                    break
            else:
                return key
        self._check_key(key, view)
        return key

    def _check_key(self, key: Any, view: RequestView) -> None:
        if not isinstance(key, tuple):
            raise self.wrong(f"a key must be a tuple of numbers, got {key!r}", view)
        for part in key:
            if not isinstance(part, int | float) or part != part:
                raise self.wrong(f"a key holds numbers, never NaN, got {key!r}", view)
        if self._key_length is None:
            self._key_length = len(key)
        elif len(key) != self._key_length:
            raise self.wrong(
                f"keys must have one length, got {key!r} after keys of {self._key_length}", view
            )

    # --- admission ----------------------------------------------------------------------------

    def refusal(self, view: RequestView, counts: SchedulerView) -> str | None:
        """Ask whether a submitted request is refused, and why."""
        try:
            reason = self.admission.accept(self.states[_ADMISSION], view, counts)
        except Exception as error:
            raise self.error("admission.accept", error, view) from error
        if reason is not None and not isinstance(reason, str):
            raise self.wrong(f"accept must return a reason (str) or None, got {reason!r}", view)
        return reason

    @property
    def admission_state(self) -> Any:
        """The state that a round starts from."""
        return self.states[_ADMISSION]

    def set_admission_state(self, state: Any) -> None:
        """Commit what ``settle`` returned."""
        self.states = (self.states[0], state, *self.states[2:])

    # --- timeout ------------------------------------------------------------------------------

    def due_at(self, counts: SchedulerView) -> float:
        """Ask when a batch of a batch_key must start."""
        try:
            due = _number(self.policy.timeout.due(self.states[_TIMEOUT], counts))
            valid = due <= _INF
        except Exception as error:
            raise self.error("timeout.due", error) from error
        if not valid:
            raise self.wrong(f"due must be an instant (inf = only by input), got {due!r}")
        return due

    # --- composition --------------------------------------------------------------------------

    def selection(
        self, round: Round, is_running: Callable[[Any], bool]
    ) -> tuple[Any, tuple[RequestView, ...] | None]:
        """Ask who steps: (``ALL`` or phases, None) or (``ALL``, rows)."""
        try:
            answer = self.policy.composition.select(self.states[_COMPOSITION], round)
            if answer is ALL:
                return ALL, None
            chosen: tuple[Any, ...] = tuple(answer)
        except PolicyError:
            raise
        except Exception as error:
            raise self.error("composition.select", error) from error
        if all(isinstance(one, Phase) for one in chosen):
            return frozenset(chosen), None
        if not self.needs_rows:
            raise self.wrong(
                f"select returned {chosen[0]!r}, not phases; to choose rows declare "
                'needs = frozenset({"rows"})'
            )
        seen: set[int] = set()
        for view in chosen:
            if not is_running(view) or view.sequence in seen:
                raise self.wrong(f"select must return running rows, each once; got {view!r}")
            seen.add(view.sequence)
        return ALL, tuple(sorted(chosen, key=lambda view: view.slot))  # a set has no order

    # --- eviction -----------------------------------------------------------------------------

    def end_limits(self, view: RequestView) -> tuple[float, float]:
        """Ask for the (instant, steps) at which a row ends unfinished."""
        if not self.limits:
            return (_INF, _INF)
        try:
            instant, steps = self._limits(view)
            if type(instant) is not float:
                instant = _number(instant)
            if type(steps) is not int or steps >= _BIG:
                steps = _number(steps)
            valid = instant <= _INF and steps >= 1
        except Exception as error:
            raise self.error("eviction.limits", error, view) from error
        if not valid:
            raise self.wrong(
                f"limits must be (instant, steps >= 1), got {(instant, steps)!r}", view
            )
        return instant, steps

    def chosen_victims(
        self, need_pages: int, round: Round, is_running: Callable[[Any], bool]
    ) -> Iterator[tuple[RequestView, Preempt | FinishReason]]:
        """Ask who must leave; each is asked for when the caller needs one more."""
        seen: set[int] = set()
        try:
            for one in self.policy.eviction.victims(self.states[_EVICTION], need_pages, round):
                if (
                    not isinstance(one, tuple)
                    or len(one) != 2
                    or not isinstance(one[1], Preempt | FinishReason)
                ):
                    raise self.wrong(
                        f"victims must be (row, KEEP | RESTART | finish reason), got {one!r}"
                    )
                if not is_running(one[0]) or one[0].sequence in seen:
                    raise self.wrong(f"victims must return running rows, each once; got {one[0]!r}")
                seen.add(one[0].sequence)
                yield one
        except PolicyError:
            raise
        except Exception as error:
            raise self.error("eviction.victims", error) from error

    # --- control ------------------------------------------------------------------------------

    def row_knobs(self, view: RequestView, counts: SchedulerView) -> tuple[Knobs, float]:
        """Ask for a row's knobs and until when they hold."""
        try:
            answer = self._row_knobs(self.states[_CONTROL], view, counts)
            knobs, until = answer
            if type(knobs) is dict and type(until) is float and until > counts[0]:
                return dict(knobs), until  # the policy may change its own
            return self._knobs(answer, counts.now)
        except PolicyError:
            raise
        except Exception as error:
            raise self.error("control.knobs", error, view) from error

    def differ(self, view: RequestView, knobs: Knobs) -> bool:
        """Whether these knobs are others than a row has; values may not be comparable."""
        try:
            return bool(knobs != view._knobs)
        except Exception as error:
            raise self.error("control.knobs", error, view) from error

    def whole_batch_knobs(self, counts: SchedulerView) -> tuple[Knobs, float]:
        """Ask for the batch's knobs and until when they hold."""
        try:
            answer = self.policy.control.batch_knobs(self.states[_CONTROL], counts)
            return self._knobs(answer, counts.now)
        except PolicyError:
            raise
        except Exception as error:
            raise self.error("control.batch_knobs", error) from error

    def _knobs(self, answer: Any, now: float) -> tuple[Knobs, float]:
        knobs, until = answer
        if type(knobs) is not dict and not isinstance(knobs, Mapping):
            raise self.wrong(f"knobs must be a mapping, got {knobs!r}")
        if type(until) is not float:
            until = _number(until)
        if not until > now:
            raise self.wrong(f"knobs must hold beyond now={now}, got valid_until={until!r}")
        return knobs if knobs is NO_KNOBS else dict(knobs), until  # the policy may change its own

    def batch_hints(self, round: Round) -> tuple[Any, ...]:
        """Ask for advice to the engine."""
        try:
            return tuple(self.policy.control.hints(self.states[_CONTROL], round))
        except PolicyError:
            raise
        except Exception as error:
            raise self.error("control.hints", error) from error

    # --- observation --------------------------------------------------------------------------

    def observe(self, events: list[Event]) -> None:
        """Hand events to the strategies that observe their kind, in order; all or none."""
        states = list(self.states)
        for event in events:
            for axis, strategy in self._observing.get(type(event), ()):
                try:
                    states[axis] = strategy.observe(states[axis], event)
                except Exception as error:
                    raise PolicyError(
                        f"policy {self.policy.name!r}: observe of {strategy!r} raised {error!r} on "
                        f"{event!r}"
                    ) from error
        self.states = tuple(states)
