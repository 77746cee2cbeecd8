"""Live through a workload: a driver's calls, in virtual time, and what came of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dllm_sched.batch import StepBatch, Update
from dllm_sched.errors import PolicyError
from dllm_sched.events import Event
from dllm_sched.policies.base import Policy
from dllm_sched.request import FinishReason, Phase, Request
from dllm_sched.scheduler import Scheduler
from dllm_sched.testing._fingerprint import fingerprint
from dllm_sched.testing._probes import PolicyCheckError, Probed, Record
from dllm_sched.testing._workloads import STEP_S, Action, Engine, Workload

__all__ = ["Play"]

_SPINS = 3  # calls at one instant that bring nothing
_WAKE_UPS = 32  # wake-ups one after the other that bring nothing
_GRID = 1024.0  # of a driver whose timer is coarse: parts of a second


_identity = id


class Play:
    """A policy, a workload, and the log of what the one made of the other.

    Args:
        policy: As it is to be used.
        workload: What to live through.
        record: Where faults are told; None: they are raised as they come.
        probes: The probes inside ``policy``, if there are any.
        names: Other ids for the requests.
        shift: Another origin of time, seconds.
        request: Makes requests of the fields of a ``Request``.
        coarse: Wake up on a grid of 1/1024 s, at or after ``wake_at``, so that no rounding of
            an instant can matter.
    """

    def __init__(
        self,
        policy: Policy,
        workload: Workload,
        *,
        record: Record | None = None,
        probes: Probed | None = None,
        names: Mapping[str, str] | None = None,
        shift: float = 0.0,
        request: Callable[..., Request] = Request,
        coarse: bool = False,
    ) -> None:
        self.policy = policy
        self.workload = workload
        self.log: list[object] = []
        self._record = record if record is not None else Record(f"workload {workload.name!r}")
        self._probes = probes
        self._names = dict(names or {})
        self._original = {name: original for original, name in self._names.items()}
        self._shift = shift
        self._make_request = request
        self._coarse = coarse
        self._engine = Engine(reports_progress="progress" in policy.needs)
        self._actions = list(reversed(workload.actions))
        self._now = shift
        self._draining = False
        self._requests: list[Request] = []
        self._accepted: set[str] = set()
        self._ended: set[str] = set()
        self._num_steps = 0
        self._most_steps = workload.most_steps
        self._spins = 0
        self._wake_ups = 0
        self._scheduler: Scheduler

    def to_end(self) -> list[object]:
        """Live through it; return the log.

        Raises:
            PolicyCheckError: If the policy broke a rule.
        """
        for _ in self.calls():
            pass
        return self.log

    def calls(self) -> Iterator[None]:
        """Live through it, one call at a time."""
        record = self._record
        capacity = self.workload.capacity
        record.note(f"sched = Scheduler(policy=policy, capacity={capacity!r})")
        try:
            self._scheduler = Scheduler(
                policy=self.policy, capacity=capacity, observers=[self._observe]
            )
        except PolicyError as error:
            raise self._blame(error) from error
        while self._actions or self._scheduler.has_work():
            while self._actions and self._at(self._actions[-1]) <= self._now:
                self._act(self._actions.pop())
                yield
            update = self._next_step()
            yield
            if update.batch is None:
                if not self._wait(update):
                    break
            else:
                yield from self._step(update.batch)
        lost = self._accepted - self._ended
        if lost:
            raise record.fail("drains", "policy", f"requests {sorted(lost)} never ended")

    # --- calls --------------------------------------------------------------------------------

    def _at(self, action: Action) -> float:
        return action.at + self._shift

    def _call(self, name: str, *arguments: Any, now: float, **more: Any) -> Any:
        record = self._record
        record.call(name, *arguments, **more, now=now)
        try:
            answer = getattr(self._scheduler, name)(*arguments, now=now, **more)
        except PolicyError as error:
            raise (record.failure or self._blame(error)) from error
        if record.failure is not None:  # the scheduler first told what had gone well
            raise record.failure
        if self._probes is not None:
            self._scheduler.check_invariants()
        if isinstance(answer, Update):
            self._deliver(answer)
        return answer

    def _act(self, action: Action) -> None:
        now = max(self._now, self._at(action))
        self._now = now
        self._wake_ups = self._spins = 0
        if action.call == "submit":
            request = self._request(action.what)
            answer = self._call("submit", request, now=now)
            if type(answer).__name__ == "Accepted":
                self._accepted.add(request.id)
                if self._probes is not None:
                    view = self._scheduler.view(request.id)
                    self._record.views[id(view)] = view
            else:
                self.log.append(("rejected", self._id(request.id), answer.reason))
        elif action.call == "cancel":
            self._call("cancel", self._names.get(action.what, action.what), now=now)
        elif action.call == "set_policy":
            self._call("set_policy", action.what or self.policy, now=now)
        elif action.call == "set_capacity":
            self._call("set_capacity", action.what, now=now)
        else:
            self._draining = self._draining or action.call == "drain"
            self._call(action.call, now=now)

    def _request(self, fields: dict[str, Any]) -> Request:
        deadline_at = fields.get("deadline_at", math.inf) + self._shift
        id = self._names.get(fields["id"], fields["id"])
        request = self._make_request(**{**fields, "id": id, "deadline_at": deadline_at})
        self._engine.jobs[_identity(request)] = self.workload.jobs[fields["id"]]
        self._requests.append(request)  # an identity is unique while its owner lives
        return request

    def _next_step(self) -> Update:
        update: Update = self._call("next_step", now=self._now)
        batch = update.batch
        probes = self._probes
        if probes is not None and update.wake_at > self._now:
            idle = batch is None and not self._scheduler.counts().running
            if batch is not None or idle:
                every_step = "every_step" in self.policy.needs
                if idle or not every_step:
                    probes.admission.check_honest(step_s=STEP_S, wake_at=update.wake_at, idle=idle)
                probes.timeout.check_honest(update.wake_at)
        if batch is not None:
            self._log_batch(batch)
        return update

    def _step(self, batch: StepBatch) -> Iterator[None]:
        self._spins = self._wake_ups = 0
        self._num_steps += 1
        if self._num_steps > self._most_steps:
            counts = self._scheduler.counts()
            preempted = self._scheduler.stats().num_preempted
            axis = "eviction" if preempted > counts.submitted else "composition"
            raise self._record.fail(
                "drains",
                axis,
                f"no end after {self._num_steps - 1} steps and {preempted} preemptions: {counts}",
            )
        done = self._now + STEP_S
        while self._actions and self._at(self._actions[-1]) < done:
            self._act(self._actions.pop())
            yield
        self._now = done
        if self._num_steps in self.workload.failing:
            error = RuntimeError("the device is gone")
            self._call("fail_step", batch, error, rows=self._engine.fates(batch), now=done)
        else:
            self._call("complete_step", batch, self._engine.run(batch), now=done)
        yield

    def _wait(self, update: Update) -> bool:
        """Sleep until there is something to do; False if there is nothing any more."""
        if update.finished or update.released:
            self._spins = self._wake_ups = 0
        if update.wake_at <= self._now:
            self._spins += 1
            if self._spins > _SPINS:
                raise self._record.fail(
                    "spin",
                    self._waker(),
                    f"wake_at is {update.wake_at} at {self._now}, {self._spins} times, and "
                    "nothing happens",
                )
            return True
        self._spins = 0
        if not self._scheduler.has_work() and not self._actions:
            return False
        if self._draining:
            self._check_drain()
        wake_at = (
            math.ceil(update.wake_at * _GRID) / _GRID
            if self._may_round(update)
            else (update.wake_at)
        )
        arrival = self._at(self._actions[-1]) if self._actions else math.inf
        if wake_at < arrival:
            self._wake_ups += 1
            if self._wake_ups > _WAKE_UPS:
                raise self._record.fail(
                    "due",
                    self._waker(),
                    f"woken {_WAKE_UPS} times, each time at the wake_at named before; it moves on "
                    f"to {update.wake_at} and nothing starts",
                )
        if min(wake_at, arrival) == math.inf:
            raise self._record.fail("drains", "policy", "nothing will ever happen")
        self._now = min(wake_at, arrival)
        return True

    def _may_round(self, update: Update) -> bool:
        return self._coarse and update.wake_at < math.inf

    def _waker(self) -> str:
        if self._record.dues or self.policy.timeout.asks("due"):
            return "timeout"
        return "control" if self.policy.control.asks("knobs") else "policy"

    def _check_drain(self) -> None:
        """An idle engine that drains waits for a due instant only."""
        counts = self._scheduler.counts()
        if self._probes is None or counts.running or not counts.waiting:
            return
        dues = [kept.due for kept in self._record.dues]
        if dues and self._now < min(dues) < math.inf:
            return
        raise self._record.fail(
            "drains",
            "timeout" if dues and min(dues) > self._now else "admission",
            f"{counts.waiting} wait while draining, the engine is idle, and nobody starts",
        )

    def _blame(self, error: PolicyError) -> PolicyCheckError:
        """Name the rule behind an error that no probe foresaw."""
        record = self._record
        if record.selected:  # asked, it left rows running and nobody to step
            return record.fail("select", "composition", str(error))
        if self._draining:
            dues = [kept.due for kept in record.dues]
            axis = "timeout" if dues and min(dues) > self._now else "admission"
            return record.fail("drains", axis, str(error))
        return record.fail("raises", "policy", str(error))

    # --- what came of it ----------------------------------------------------------------------

    def _deliver(self, update: Update) -> None:
        for finished in update.finished:
            id = finished.request.id
            if id in self._ended or id not in self._accepted:
                raise AssertionError(f"request {id!r} was told finished twice, or never taken")
            self._ended.add(id)

    def _id(self, name: str) -> str:
        return self._original.get(name, name)

    def _log_batch(self, batch: StepBatch) -> None:
        rows = [
            (row.slot, self._id(row.request.id), row.phase, row.resumed, fingerprint(row.knobs))
            for row in batch.rows
        ]
        joined = [self._id(row.request.id) for row in batch.joined]
        at = batch.planned_at - self._shift
        self.log.append(("batch", at, rows, joined, fingerprint(batch.knobs), len(batch.hints)))

    def _observe(self, event: Event) -> None:
        self.log.append((type(event).__name__, *map(self._plain, event._fields, event)))

    def _plain(self, name: str, value: object) -> object:
        if isinstance(value, Request):
            return self._id(value.id)
        if name == "request_id" and isinstance(value, str):
            return self._id(value)
        if name in ("at", "arrived_at", "admitted_at") and isinstance(value, int | float):
            return value - self._shift
        return value.value if isinstance(value, FinishReason | Phase) else value
