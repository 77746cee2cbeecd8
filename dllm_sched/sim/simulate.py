"""The virtual-time driver: the live ``Scheduler``, an engine that counts, a clock that jumps.

Not one line of scheduling logic stands here. The engine knows of each row after how many steps its
blocks end (``Work``); the driver asks the scheduler how long its decision holds (``horizon``) and
lets all those steps pass at once, up to the next thing that happens: a row finishes or crosses a
boundary, somebody arrives who may join, a time limit passes. Stepping one by one gives the same
events at the same instants.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from dllm_sched.batch import (
    NOTHING,
    Accepted,
    BlockBoundary,
    Finished,
    Knobs,
    PhaseChange,
    Row,
    RowFinished,
    StepBatch,
    StepOutcome,
    Update,
)
from dllm_sched.capacity import Capacity
from dllm_sched.errors import ConfigError
from dllm_sched.events import Event
from dllm_sched.policies.base import Policy
from dllm_sched.request import FinishReason, Phase, Request
from dllm_sched.scheduler import Scheduler
from dllm_sched.sim.report import Result
from dllm_sched.sim.service import ServiceModel, Waits
from dllm_sched.sim.shapes import Work
from dllm_sched.sim.workloads import ClosedLoop, ClosedLoopRun

__all__ = ["simulate"]

_INF = math.inf
_NONE: tuple[float, Any] = (_INF, None)  # no more arrivals
_EOS = FinishReason.EOS
_REUSE = Phase.REUSE
_set = object.__setattr__  # past the lock of a frozen class
_new = tuple.__new__  # builds a NamedTuple in half the time of its own constructor


class _Row:
    """A request in its slot. ``due``: the step after which its next event happens; -1: it left."""

    __slots__ = ("block", "due", "request", "start", "work")

    def __init__(self, request: Request, work: Work, start: int) -> None:
        self.request = request
        self.work = work
        self.start = start  # the step at which its count began
        self.block = 0  # the next one to be reported
        self.due = -1


class _Engine:
    """Counts steps. A row's next event stands in a heap under the step after which it happens."""

    def __init__(
        self, *, blocks: bool, phases: bool, under_knobs: Callable[[Work, Knobs], Work] | None
    ) -> None:
        self.steps = 0  # that every row here has taken part in
        self.prefilling: list[int] = []  # slots whose first step is not done
        self._blocks = blocks
        self._phases = phases
        self._under_knobs = under_knobs
        self._events: list[tuple[int, int, int, _Row]] = []  # (step, serial number, slot, row)
        self._serial = 0  # events of one step come in the order in which they were foreseen
        self._rows: dict[int, _Row] = {}  # by slot
        self._kept: dict[str, int] = {}  # steps that a preempted request had done

    def join(self, joined: tuple[Row, ...], batch_knobs: Knobs) -> None:
        for slot, request, phase, _, knobs, resumed in joined:
            done = self._kept.pop(request.id, 0) if resumed else 0
            work: Work = request.payload
            if self._under_knobs is not None:
                work = self._under_knobs(work, {**batch_knobs, **knobs})
            row = self._rows[slot] = _Row(request, work, self.steps - done)
            if self._blocks and done:
                ends = row.work.block_ends
                while row.block < len(ends) and ends[row.block] <= done:
                    row.block += 1
            self._foresee(slot, row)
            if self._phases and phase is Phase.PREFILL:
                self.prefilling.append(slot)

    def _foresee(self, slot: int, row: _Row) -> None:
        work = row.work
        block = row.block
        blocks = self._blocks and block < work.num_blocks - 1
        due = row.start + (work.block_ends[block] if blocks else work.num_steps)
        row.due = due = max(due, self.steps + 1)  # it may come back to less than it has done
        self._serial += 1
        heappush(self._events, (due, self._serial, slot, row))

    def next_event(self) -> float:
        """The step after which something happens, ``inf`` if nothing does."""
        events = self._events
        while events:
            due, _, _, row = events[0]
            if row.due == due:
                return due
            heappop(events)
        return _INF

    def sit_out(self, batch: StepBatch, steps: int) -> None:
        """Rows that are not in the batch do not advance: their counts begin later. O(rows)."""
        inside = {row.slot for row in batch.rows}
        for slot, row in self._rows.items():
            if slot not in inside:
                row.start += steps
                self._foresee(slot, row)
        if len(self._events) > 64 + 2 * len(self._rows):
            self._events = [event for event in self._events if event[3].due == event[0]]
            heapify(self._events)

    def outcome(self, batch: StepBatch, *, progress: bool) -> StepOutcome:
        """What happens after the steps counted so far."""
        steps, events = self.steps, self._events
        if not (progress or self.prefilling or (events and events[0][0] <= steps)):
            return NOTHING
        finished: list[RowFinished] = []
        boundaries: list[BlockBoundary] = []
        while events and events[0][0] <= steps:
            due, _, slot, row = heappop(events)
            if row.due != due:
                continue  # it left, or sat out
            work, done = row.work, steps - row.start
            if done >= work.num_steps:
                finished.append(_new(RowFinished, (slot, _EOS, None)))
                row.due = -1
                del self._rows[slot]
                continue
            ends, block = work.block_ends, row.block
            while ends[block] <= done:
                block += 1
            row.block = block
            kv_tokens = work.prompt_len + block * work.block_length
            boundaries.append(_new(BlockBoundary, (slot, block, kv_tokens)))
            self._foresee(slot, row)
        phases: tuple[PhaseChange, ...] = ()
        if self.prefilling:
            rows = self._rows
            phases = tuple(PhaseChange(slot, _REUSE) for slot in self.prefilling if slot in rows)
            self.prefilling.clear()
        remaining = tuple(self._masked(row.slot) for row in batch.rows) if progress else None
        outcome: StepOutcome = _new(
            StepOutcome, (tuple(finished), tuple(boundaries), phases, (), remaining)
        )
        return outcome

    def _masked(self, slot: int) -> int:
        row = self._rows.get(slot)
        if row is None:
            return 0
        work = row.work
        left = work.num_steps - (self.steps - row.start)
        return math.ceil(work.num_blocks * work.block_length * left / work.num_steps)

    def _drop(self, slot: int) -> None:
        row = self._rows.pop(slot, None)
        if row is not None:
            row.due = -1

    def release(self, update: Update) -> None:
        for slot, request, _, kept in update.released:
            if slot is None:
                self._kept.pop(request.id, None)
                continue
            row = self._rows.get(slot)
            if row is not None and row.request is request:
                if kept:
                    self._kept[request.id] = self.steps - row.start
                self._drop(slot)


def simulate(
    workload: Iterable[tuple[float, Work]] | ClosedLoop,
    *,
    policy: Policy,
    capacity: Capacity,
    service: ServiceModel,
    blocks: bool | None = None,
    phases: bool = False,
    under_knobs: Callable[[Work, Knobs], Work] | None = None,
    jump: bool = True,
    until_s: float = _INF,
    max_waiting: int = 100_000,
    make_request: Callable[[str, Work, float], Request] | None = None,
    observers: Iterable[Callable[[Event], object]] = (),
    progress: Callable[[int, float], object] | None = None,
) -> Result:
    """Serve a workload in virtual time with the very scheduler and policy of a live engine.

    Args:
        workload: ``(arrival_s, Work)`` in order of time, or a closed loop.
        policy: The policy.
        capacity: The engine's slots and pages.
        service: Seconds of a step by its rows and tokens (``Row.max_tokens`` summed).
        blocks: Report every block boundary; None: only if policy, memory or service need them.
        phases: Report that a row no longer prefills after its first step, so that ``num_tokens`` of
            the service model holds its prompt once only.
        under_knobs: What a request needs under the knobs with which it joins (the batch's, and its
            own before those); None: whatever the knobs, the same. Later knobs change nothing.
        jump: Take the steps of a horizon at once; False: one by one (the same, slower).
        until_s: Take no arrivals after this instant, seconds, of open and closed loops; what has
            arrived is served.
        max_waiting: When more than this many wait the run is stopped and called unstable, >= 1.
        make_request: ``(id, work, arrival_s) -> Request`` with ``payload=work``, for priorities,
            deadlines, classes; None: a plain request.
        observers: As of ``Scheduler``.
        progress: Called about every 10,000 arrivals with (requests submitted, virtual seconds).

    Returns:
        What happened. If arrivals outrun the engine, ``Result.unstable`` says so, and the figures
        are those up to then.

    Raises:
        ConfigError: If an argument is out of range, or arrivals are not in order.
        PolicyError: If the policy is at fault.
    """
    if not isinstance(max_waiting, int) or max_waiting < 1:
        raise ConfigError(f"simulate: max_waiting must be an int >= 1, got {max_waiting!r}")
    if math.isnan(until_s):
        raise ConfigError("simulate: until_s must be seconds, got nan")
    scheduler = Scheduler(capacity=capacity, policy=policy, observers=observers)
    needs = policy.needs
    grows = capacity.memory is not None and capacity.memory.grows
    if blocks is None:
        blocks = grows or "blocks" in needs or service.waits() is not None
    run = _Run(
        scheduler,
        _Engine(blocks=blocks, phases=phases, under_knobs=under_knobs),
        service,
        _Simulated if make_request is None else make_request,
        jump=jump,
        needs_progress="progress" in needs,
        max_waiting=max_waiting,
        progress=progress,
    )
    return run.serve(workload, until_s)


class _Simulated(Request):
    """A request as its ``Work`` says, and else a plain one.

    Fields that are the same for all stand on the class: building requests is a sizeable part of
    what a simulation costs.
    """

    __slots__ = ()

    priority = 0
    deadline_at = queue_timeout_s = _INF
    request_class = tenant = ""
    batch_key = group = None

    def __init__(self, request_id: str, work: Work, _arrival_s: float) -> None:
        prompt_len, max_new_tokens, block_length, num_blocks, num_steps, ends = work
        if not (
            prompt_len >= 1
            and max_new_tokens >= 1
            and block_length >= 1
            and len(ends) == num_blocks >= 1
            and ends[-1] == num_steps >= 1
        ):
            raise ConfigError(f"simulate: request {request_id} needs what cannot be: {work!r}")
        _set(self, "id", request_id)
        _set(self, "payload", work)
        _set(self, "prompt_len", prompt_len)
        _set(self, "max_new_tokens", max_new_tokens)
        _set(self, "block_length", block_length)


class _Run:
    """One simulation: who comes when, what the clock says, what is written down."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: _Engine,
        service: ServiceModel,
        make_request: Callable[[str, Work, float], Request],
        *,
        jump: bool,
        needs_progress: bool,
        max_waiting: int,
        progress: Callable[[int, float], object] | None,
    ) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.service = service
        self.waits = service.waits()
        self.crossed: tuple[BlockBoundary, ...] = ()  # in the step before; only for ``waits``
        self.make_request = make_request
        self.jump = jump
        self.needs_progress = needs_progress
        self.max_waiting = max_waiting
        self.progress = progress
        self.now = 0.0
        self.busy_s = 0.0
        self.not_wasted = 0  # row-steps that jumps made the scheduler count as waste
        self.step_s = math.nan  # of the present run of equal steps: seconds of each,
        self.run_start = self.run_end = math.nan  # its instants,
        self.run_steps = 0  # and how many there were
        self.num_submitted = 0
        self.unstable = False
        self.drained = False
        self.loop: ClosedLoopRun | None = None
        self.clients: dict[str, int] = {}
        self.queue: list[tuple[float, int, Work, int]] = []  # a closed loop's coming arrivals
        self.source: Iterator[tuple[float, Work]] = iter(())
        self.coming_at = _INF  # the next arrival's instant, inf if there is none,
        self.coming: Any = None  # its work,
        self.client = -1  # and in a closed loop whose it is
        self.latency_s = array("d")
        self.wait_s = array("d")
        self.steps = array("l")
        self.tokens = 0
        self.reasons: dict[FinishReason, int] = {}

    # --- arrivals -------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Look at the next arrival."""
        if self.loop is not None:
            self.coming_at = _INF
            if self.queue:
                self.coming_at, _, self.coming, self.client = heappop(self.queue)
            return
        last = self.coming_at
        found = next(self.source, _NONE)
        at, self.coming = found
        if not last <= at < _INF and found is not _NONE:
            raise ConfigError(
                f"simulate: arrivals must be finite, >= 0 and in order, got {at!r} after {last!r}"
            )
        self.coming_at = at if at <= self.until_s else _INF

    def _submit(self) -> None:
        """Hand the coming request over at its own instant."""
        at = self.coming_at
        number = self.num_submitted
        self.num_submitted = number + 1
        name = f"r{number}"
        now = self.now
        if at > now:
            self.now = now = at
        answer = self.scheduler.submit(self.make_request(name, self.coming, at), now=now)
        if self.client >= 0 and isinstance(answer, Accepted):
            self.clients[name] = self.client
        if self.progress is not None and self.num_submitted % 10_000 == 0:
            self.progress(self.num_submitted, now)
        self._advance()

    # --- the loop -------------------------------------------------------------------------------

    def serve(self, workload: Iterable[tuple[float, Work]] | ClosedLoop, until_s: float) -> Result:
        self.until_s = until_s
        if isinstance(workload, ClosedLoop):
            self.loop = workload.start()
            for arrival in self.loop.first():
                self._later(arrival)
        else:
            self.source = iter(workload)
            self.coming_at = 0.0
            self._advance()
        scheduler = self.scheduler
        while True:
            while self.coming_at <= self.now:
                self._submit()
            if self.coming_at == _INF and self.loop is None and not self.drained:
                self._drain()
            update = scheduler.next_step(now=self.now)
            if update.finished or update.released:
                self._told(update)
            if update.batch is not None:
                self._step(update.batch)
            elif not self._sleep(update.wake_at):
                break
            if scheduler.num_waiting > self.max_waiting:
                self.unstable = True
                break
        return self._result()

    def _sleep(self, wake_at: float) -> bool:
        """Pass the time until something changes; False when nothing ever will."""
        until = min(wake_at, self.coming_at)
        if until == _INF:
            if not self.scheduler.has_work():
                return False
            self._drain()  # a closed loop whose clients all wait for answers
            return True
        self.now = max(self.now, until)
        return True

    def _step(self, batch: StepBatch) -> None:
        scheduler, engine = self.scheduler, self.engine
        _, _, rows, joined, knobs, _ = batch
        if joined:
            engine.join(joined, knobs)
        num_rows = len(rows)
        whole = num_rows == scheduler.num_running
        tokens = scheduler.tokens_in_rows if whole else sum(row.max_tokens for row in rows)
        step_s = self.service.step_s(num_rows, tokens)
        if step_s != self.step_s or self.now != self.run_end:
            self._begin_run(step_s, num_rows, tokens)
        if self.waits is not None:
            self._wait(self.waits, batch)
        steps: float = 1
        if self.jump and whole and not engine.prefilling:
            steps, until = scheduler.horizon()
            steps = min(steps, engine.next_event() - engine.steps)
            if until < self.run_start + (self.run_steps + steps) * step_s:
                steps = self._steps_to(until, steps)
        end = self.run_start + (self.run_steps + steps) * step_s
        if self.coming_at < end:
            steps = self._arrivals(steps, end, num_rows)
            end = self.run_start + (self.run_steps + steps) * step_s
        count = int(steps)
        if not whole:
            engine.sit_out(batch, count)
        engine.steps += count
        self.busy_s += count * step_s
        self.run_steps += count
        self.now = self.run_end = end
        outcome = engine.outcome(batch, progress=self.needs_progress)
        if self.waits is not None:
            self.crossed = outcome.boundaries
        update = scheduler.complete_step(batch, outcome, now=end, steps=count)
        if update.finished or update.released:
            self._told(update)

    def _begin_run(self, step_s: float, num_rows: int, tokens: int) -> None:
        """Count instants from where equal steps begin.

        So they come out the same to the last bit however many steps are taken at once.
        """
        if not 0 < step_s < _INF:
            raise ConfigError(
                f"simulate: {self.service!r} says {step_s!r} s for a step of {num_rows} rows and "
                f"{tokens} tokens; it must be finite and > 0"
            )
        self.step_s, self.run_start, self.run_steps = step_s, self.now, 0

    def _wait(self, waits: Waits, batch: StepBatch) -> None:
        """Put off the steps that are about to run until what they need is there."""
        if batch.joined or self.crossed or batch.hints:
            seconds = waits.before(batch, self.crossed, now=self.now, step_s=self.step_s)
            if seconds:
                self.run_start, self.run_steps = self.now + seconds, 0

    def _arrivals(self, steps: float, end: float, num_rows: int) -> float:
        """Submit who comes before ``end``; return how many steps pass until the plan may change."""
        scheduler = self.scheduler
        nobody_waits = not scheduler.num_waiting
        while self.coming_at < end:
            at = self.coming_at
            self._submit()
            if steps == 1:
                continue
            if nobody_waits and scheduler.num_waiting:
                # The scheduler counts the steps before it, taken at once with the rest, as waited.
                nobody_waits = False
                free = scheduler.capacity.max_num_seqs - num_rows
                if free:
                    self.not_wasted += free * (int(self._steps_to(at, steps)) - 1)
            last = self.coming_at == _INF and self.loop is None  # the drain begins after this step
            if last or scheduler.horizon().steps <= 1:  # or it may join after it
                steps = self._steps_to(at, steps)
                end = self._after(steps)
        return steps

    def _after(self, steps: float) -> float:
        """The instant after so many more steps."""
        return self.run_start + (self.run_steps + steps) * self.step_s

    def _steps_to(self, instant: float, most: float) -> float:
        """The least number of steps, 1 .. ``most``, after which ``instant`` has come."""
        steps: float = max(1, math.ceil((instant - self.run_start) / self.step_s) - self.run_steps)
        while steps > 1 and self._after(steps - 1) >= instant:
            steps -= 1
        while self._after(steps) < instant:
            steps += 1
        return min(steps, most)

    def _drain(self) -> None:
        if not self.drained:
            self.drained = True
            self._told(self.scheduler.drain(now=self.now))

    # --- what is told ---------------------------------------------------------------------------

    def _told(self, update: Update) -> None:
        if update.released:
            self.engine.release(update)
        for finished in update.finished:
            self._record(finished)
            if self.loop is not None:
                arrival = self.loop.after(self.clients.pop(finished.request.id), self.now)
                if arrival is not None:
                    self._later(arrival)

    def _later(self, arrival: Any) -> None:
        at = arrival.arrival_s
        if at > self.until_s:
            return
        heappush(self.queue, (at, arrival.client, arrival.work, arrival.client))
        if at < self.coming_at:
            if self.coming_at != _INF:
                heappush(self.queue, (self.coming_at, self.client, self.coming, self.client))
            self._advance()

    def _record(self, finished: Finished) -> None:
        request, reason, arrived_at, admitted_at, finished_at, steps, _, _, _ = finished
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if reason is not _EOS:
            return
        self.latency_s.append(finished_at - arrived_at)
        self.wait_s.append(0.0 if admitted_at is None else admitted_at - arrived_at)
        self.steps.append(steps)
        work: Work = request.payload
        self.tokens += work.num_blocks * work.block_length

    def _result(self) -> Result:
        stats = self.scheduler.stats()
        return Result(
            policy=self.scheduler.policy.name,
            max_num_seqs=self.scheduler.capacity.max_num_seqs,
            duration_s=self.now,
            busy_s=self.busy_s,
            counts=self.scheduler.counts(),
            stats=stats._replace(wasted_row_steps=stats.wasted_row_steps - self.not_wasted),
            reasons=self.reasons,
            num_tokens=self.tokens,
            unstable=self.unstable,
            stopped=self.unstable,
            latency_s=self.latency_s,
            wait_s=self.wait_s,
            steps=self.steps,
        )
