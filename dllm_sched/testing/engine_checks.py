"""``check_engine``: does an engine keep its side of the step protocol?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import attrs

from dllm_sched.batch import Finished, Rejected, RowFate, StepBatch, Update
from dllm_sched.capacity import Capacity
from dllm_sched.errors import ConfigError, OutcomeError
from dllm_sched.policies.base import Composition, Eviction, Policy, Preempt, Victim
from dllm_sched.request import FinishReason, Request, RequestView
from dllm_sched.runtime import Engine
from dllm_sched.scheduler import Scheduler
from dllm_sched.view import Round

__all__ = ["EngineCheckError", "check_engine"]


class EngineCheckError(AssertionError):
    """An engine broke a rule; the message says which, with which request, and how."""


def check_engine(
    make_engine: Callable[[int], Engine],
    make_request: Callable[[int], Request],
    *,
    make_bad_request: Callable[[int], Request] | None = None,
    output: Callable[[Any], Any] | None = None,
    num_requests: int = 9,
    max_num_seqs: int = 4,
    can_resume: bool = True,
    can_sit_out: bool = True,
    max_steps: int = 10_000,
) -> None:
    """Check an engine against the rules that a scheduler relies on.

    ============== ================================================================================
    alone          Every request, served alone, finishes once, and does not fail.
    neighbours     Rows that share a batch answer what they answer alone ...
    batch size     ... in a batch of any size, while slots are used again and again ...
    order          ... in whatever order and slots ...
    late joiners   ... and whenever they join.
    used engine    An engine that has served before answers like a new one.
    cancelled      Rows that are cancelled, also with their step in flight, disturb nobody.
    restarted      A row that starts again after a failed step answers the same.
    sitting out    A row that sits out steps answers the same.
    resumed        A row that is preempted with its progress kept, and resumed, answers the same.
    moved          Likewise if it is resumed in another slot, whose row went to its own.
    failing row    A row that fails takes nobody along, and its slot can be used again.
    ============== ================================================================================

    The same answer means finish reason, output and number of the row's own steps. In all trials an
    outcome names only rows of its batch, each at most once, and nothing that cannot be; ``run`` and
    ``release`` do not raise.

    Args:
        make_engine: Builds a new engine with that many slots.
        make_request: Builds the request of an index, a new object each time, always with the same
            id and content; different indices have different ids. Give them different lengths.
        make_bad_request: Likewise, requests whose rows fail alone; None = the last rule is not
            checked.
        output: What of ``Finished.output`` must be equal; default: all of it.
        num_requests: Requests per trial, >= 2; more than ``max_num_seqs`` to have slots reused.
        max_num_seqs: Largest batch, >= 2.
        can_resume: Whether the engine keeps the progress of preempted rows.
        can_sit_out: Whether it takes any selection of the rows that hold a slot.
        max_steps: Steps after which a trial counts as stuck.

    Raises:
        EngineCheckError: At the first rule that is broken.
        ConfigError: If there are too few requests or slots to check anything.
    """
    if num_requests < 2 or max_num_seqs < 2:
        raise ConfigError(
            f"check_engine: num_requests and max_num_seqs must be >= 2, got {num_requests!r} and "
            f"{max_num_seqs!r}"
        )
    everyone = range(num_requests)
    trial = _Trial(make_engine, make_request, output or (lambda whole: whole), max_steps)
    for index in everyone:
        trial.alone(index)

    trial.together("neighbours", everyone, slots=max_num_seqs)
    for size in {2, max_num_seqs - 1} - {1, max_num_seqs}:
        trial.together("batch size", everyone, slots=size)
    trial.together("order", everyone[::-1], slots=max_num_seqs)
    late = {index: 2 * place for place, index in enumerate((*everyone[::2], *everyone[1::2]))}
    trial.together("late joiners", everyone, slots=max_num_seqs, join_at=late)
    used = make_engine(max_num_seqs)
    for order in (everyone, everyone[::-1]):
        trial.together("used engine", order, slots=max_num_seqs, engine=used)
    for start in range(3):
        cancel_at = {index: 1 + place for place, index in enumerate(everyone[start::3])}
        trial.together("cancelled", everyone, slots=max_num_seqs, cancel_at=cancel_at)
    for start in range(3):
        fail_at = range(start, 3 * num_requests, 4)
        trial.together("restarted", everyone, slots=max_num_seqs, fail_at=fail_at)
    if can_sit_out:
        policy = Policy(composition=_EveryOther(), name="every other row")
        with _optional("can_sit_out", "takes any selection of the rows that hold a slot"):
            trial.together("sitting out", everyone, slots=max_num_seqs, policy=policy)
    if can_resume:
        one = Policy(eviction=_KeepAndResume(1), name="keep and resume")
        two = Policy(eviction=_KeepAndResume(2), name="keep and trade slots")
        with _optional("can_resume", "keeps the progress of preempted rows"):
            trial.together("resumed", everyone, slots=max_num_seqs, policy=one)
            trial.together("moved", everyone, slots=max_num_seqs, policy=two)
    if make_bad_request is not None:
        bad = {num_requests + index: make_bad_request(index) for index in range(2)}
        mixed = (everyone[0], num_requests, *everyone[1:], num_requests + 1)
        trial.together("failing row", mixed, slots=max_num_seqs, bad=bad)


@contextmanager
def _optional(option: str, ability: str) -> Iterator[None]:
    """Tell whoever breaks a rule in here how an engine without the ability is checked."""
    try:
        yield
    except EngineCheckError as error:
        raise EngineCheckError(
            f"{error}\n  Only an engine that {ability} need keep this rule; check others with "
            f"{option}=False"
        ) from error


class _Answer(NamedTuple):
    reason: FinishReason
    num_steps: int
    output: Any

    def __str__(self) -> str:
        return f"{self.reason.value} after {self.num_steps} steps: {self.output!r}"


@attrs.define
class _Trial:
    """Serves requests under a rule, and compares what they answer with what they answer alone."""

    make_engine: Callable[[int], Engine]
    make_request: Callable[[int], Request]
    output: Callable[[Any], Any]
    max_steps: int
    expected: dict[str, _Answer] = attrs.field(factory=dict)

    def alone(self, index: int) -> None:
        """Serve one request on its own, which tells what to expect of it from then on."""
        request = self.make_request(index)
        if request.id in self.expected:
            raise ConfigError(f"check_engine: make_request gave the id {request.id!r} twice")
        run = _Run("alone", self.make_engine(1), slots=1, max_steps=self.max_steps)
        self.expected[request.id] = self._answer("alone", run.serve({0: request})[request.id])

    def together(
        self,
        rule: str,
        order: Sequence[int],
        *,
        slots: int,
        engine: Engine | None = None,
        policy: Policy | None = None,
        join_at: Mapping[int, int] | None = None,
        cancel_at: Mapping[int, int] | None = None,
        fail_at: Iterable[int] = (),
        bad: Mapping[int, Request] | None = None,
    ) -> None:
        """Serve the requests of these indices in one trial; instants are numbers of steps."""
        bad = bad or {}
        requests = {i: bad[i] if i in bad else self.make_request(i) for i in order}
        run = _Run(
            rule,
            self.make_engine(slots) if engine is None else engine,
            slots=slots,
            max_steps=self.max_steps,
            policy=policy,
            fail_at=frozenset(fail_at),
            cancel_at={requests[i].id: at for i, at in (cancel_at or {}).items()},
        )
        ends = run.serve(requests, join_at or {})
        for index, request in requests.items():
            finished = ends[request.id]
            if index in bad:
                if finished.reason is not FinishReason.ERROR or finished.error is None:
                    raise EngineCheckError(
                        f"rule {rule!r}: bad request {request.id!r} must end with an error of its "
                        f"own (StepOutcome.failed), but it ended with {finished.reason.value}"
                    )
            elif finished.reason is not FinishReason.CANCELLED:
                self._compare(rule, finished)

    def _answer(self, rule: str, finished: Finished) -> _Answer:
        if finished.error is not None:
            raise EngineCheckError(
                f"rule {rule!r}: request {finished.request.id!r} failed: {finished.error!r}"
            ) from finished.error
        return _Answer(finished.reason, finished.num_steps, self.output(finished.output))

    def _compare(self, rule: str, finished: Finished) -> None:
        answer = self._answer(rule, finished)
        expected = self.expected[finished.request.id]
        if answer != expected:
            raise EngineCheckError(
                f"rule {rule!r}: request {finished.request.id!r} answers differently than alone\n"
                f"  alone: {expected}\n"
                f"  here:  {answer}"
            )


@attrs.define
class _Run:
    """One scheduler and one engine, driven step by step; ``now`` is the number of the step."""

    rule: str
    engine: Engine
    slots: int = attrs.field(kw_only=True)
    max_steps: int = attrs.field(kw_only=True)
    policy: Policy | None = attrs.field(default=None, kw_only=True)
    fail_at: frozenset[int] = attrs.field(default=frozenset(), kw_only=True)
    cancel_at: Mapping[str, int] = attrs.field(factory=dict, kw_only=True)
    ends: dict[str, Finished] = attrs.field(factory=dict, init=False)

    def serve(
        self, requests: Mapping[int, Request], join_at: Mapping[int, int] | None = None
    ) -> dict[str, Finished]:
        scheduler = Scheduler(policy=self.policy, capacity=Capacity(max_num_seqs=self.slots))
        coming = [(join_at.get(i, 0) if join_at else 0, r) for i, r in requests.items()]
        for step in range(self.max_steps):
            now = float(step)
            for _, request in (one for one in coming if one[0] == step):
                if isinstance(scheduler.submit(request, now=now), Rejected):
                    raise ConfigError(f"check_engine: request {request.id!r} does not fit")
            due = [request_id for request_id, at in self.cancel_at.items() if at == step]
            for request_id in due[::2]:
                self._tell(scheduler.cancel(request_id, now=now))
            update = scheduler.next_step(now=now)
            self._tell(update)
            for request_id in due[1::2]:
                self._tell(scheduler.cancel(request_id, now=now))
            if update.batch is not None:
                self._tell(self._step(scheduler, update.batch, step))
            elif not scheduler.has_work() and all(at <= step for at, _ in coming):
                return self.ends
        raise EngineCheckError(
            f"rule {self.rule!r}: after {self.max_steps} steps these have not finished: "
            f"{sorted({request.id for _, request in coming} - set(self.ends))}"
        )

    def _step(self, scheduler: Scheduler, batch: StepBatch, step: int) -> Update:
        now = float(step)
        if step in self.fail_at:  # as if the step had failed before it reached the engine
            rows = dict.fromkeys((row.slot for row in batch.rows[step % 2 :: 2]), RowFate.RESTART)
            return scheduler.fail_step(batch, RuntimeError("a check"), rows=rows, now=now)
        who = [f"{row.slot}: {row.request.id}" for row in batch.rows]
        try:
            outcome = self.engine.run(batch)
        except Exception as error:
            raise EngineCheckError(
                f"rule {self.rule!r}: run raised {error!r} in step {step} with rows {who}"
            ) from error
        try:
            return scheduler.complete_step(batch, outcome, now=now)
        except OutcomeError as error:
            raise EngineCheckError(
                f"rule {self.rule!r}: the outcome of step {step} with rows {who} cannot be: {error}"
            ) from error

    def _tell(self, update: Update) -> None:
        for finished in update.finished:
            self.ends[finished.request.id] = finished
        if not update.released:
            return
        try:
            self.engine.release(update.released)
        except Exception as error:
            raise EngineCheckError(
                f"rule {self.rule!r}: release raised {error!r} for {update.released!r}"
            ) from error


class _EveryOther(Composition):
    """Half of the rows step, in turn."""

    needs = frozenset({"rows", "every_step"})

    def select(self, state: Any, round: Round) -> Any:
        turn = int(round.view.now) % 2
        rows = [rv for rv in round.rows if rv.slot is not None and rv.slot % 2 == turn]
        return rows or round.rows


@attrs.frozen
class _KeepAndResume(Eviction):
    """The youngest rows wait for a moment every third step; two of them trade slots.

    For the slot that came back last is given first, to whoever arrived first.
    """

    count: int

    needs = frozenset({"every_step"})

    def victims(self, state: Any, need_pages: int, round: Round) -> Iterable[Victim]:
        if int(round.view.now) % 3 or round.view.num_running < 2:
            return []
        youngest: list[RequestView] = list(islice(round.youngest_first(), self.count))
        return [(rv, Preempt.KEEP) for rv in reversed(youngest)]
