"""A fake engine: no model, but everything else an engine has, down to its strictness."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

import attrs

from dllm_sched.batch import (
    NOTHING,
    BlockBoundary,
    PhaseChange,
    Released,
    Row,
    RowFailed,
    RowFinished,
    StepBatch,
    StepOutcome,
)
from dllm_sched.capacity import Capacity
from dllm_sched.errors import ConfigError, EngineProtocolError
from dllm_sched.request import FinishReason, Phase, Request
from dllm_sched.runtime import Progress, VirtualClock

__all__ = ["FakeEngine", "FakeOutput", "fake_steps"]

_RowEvent = RowFinished | BlockBoundary | PhaseChange | RowFailed


class FakeOutput(NamedTuple):
    """What a row that finished hands to ``Finished.output``."""

    tokens: tuple[int, ...]  #: ``max_new_tokens`` of them
    num_steps: int  #: steps that this row took part in


def fake_steps(request: Request) -> int:
    """Return how many steps a request takes: 1 to ``max_new_tokens``, drawn from its key."""
    return 1 + crc32(_key(request).encode()) % request.max_new_tokens


def _key(request: Request) -> str:
    """What a request's tokens depend on: its seed, if the payload is an int, else its id."""
    return str(request.payload) if isinstance(request.payload, int) else request.id


@attrs.define(eq=False)
class _Tenant:
    request: Request
    steps: int  #: that it takes
    done: int = 0  #: steps so far
    tokens: list[int] = attrs.field(factory=list)


class FakeEngine:
    """Decodes rows that cannot influence each other, and holds its caller to the protocol.

    A row's token at a position depends on the request's key (an int ``payload`` is its seed, else
    the id), the position and the row's own step; nothing else. It reports phases, block
    boundaries and finishes (``LENGTH``, with a ``FakeOutput``), resumes rows that were preempted
    with progress kept, and refuses rows in slots where they are not.

    Args:
        max_num_seqs: Slots, as of ``Capacity``.
        steps: Steps that a request takes, >= 1; default: ``fake_steps``.
        fail_at: Exceptions to raise by number of the step, from 0, instead of running it.
        poison: Own steps, from 1, at which requests fail alone, by id.
        report_masked: Fill ``StepOutcome.masked_remaining``.
        service_s: Seconds that a step takes; advances ``clock``.
        clock: A virtual clock; given together with ``service_s``.

    Attributes:
        num_runs: Steps so far, those that raised included.

    Raises:
        ConfigError: If an argument is out of its range.
    """

    def __init__(
        self,
        max_num_seqs: int,
        *,
        steps: Callable[[Request], int] = fake_steps,
        fail_at: Mapping[int, Exception] | None = None,
        poison: Mapping[str, int] | None = None,
        report_masked: bool = False,
        service_s: Callable[[StepBatch], float] | None = None,
        clock: VirtualClock | None = None,
    ) -> None:
        Capacity(max_num_seqs=max_num_seqs)  # refuses what is no number of slots
        if (service_s is None) != (clock is None):
            raise ConfigError("FakeEngine: give service_s and clock together, or neither")
        self.num_runs = 0
        self._launched: deque[StepBatch] = deque()
        self._steps = steps
        self._fail_at = fail_at or {}
        self._poison = poison or {}
        self._report_masked = report_masked
        self._service_s = service_s
        self._clock = clock
        self._tenants: list[_Tenant | None] = [None] * max_num_seqs
        self._kept: dict[str, _Tenant] = {}  # progress of preempted requests, by id

    @property
    def held(self) -> frozenset[str]:
        """Ids of the requests that it holds anything of: empty once all slots came back."""
        here = (tenant.request.id for tenant in self._tenants if tenant is not None)
        return frozenset((*here, *self._kept))

    def run(self, batch: StepBatch) -> StepOutcome:
        """Run one step. O(tokens committed + rows).

        Raises:
            EngineProtocolError: If a slot is taken twice, a row is not in its slot, or a row is to
                be resumed whose progress was not kept. Nobody has advanced then.
            Exception: What ``fail_at`` has for this call.
        """
        if self._launched:
            raise EngineProtocolError(
                f"run: step {self._launched[0].step_id} was launched: collect it first"
            )
        return self._run(batch)

    def _run(self, batch: StepBatch) -> StepOutcome:
        number = self.num_runs
        self.num_runs += 1
        if number in self._fail_at:
            raise self._fail_at[number]
        for row in batch.joined:
            self._place(row)
        tenants = [self._tenant(row) for row in batch.rows]
        events: list[_RowEvent] = []
        for row, tenant in zip(batch.rows, tenants, strict=True):
            events += self._advance(row, tenant)
        if self._service_s is not None and self._clock is not None:
            self._clock.advance(self._service_s(batch))
        if self._report_masked:
            masked = tuple(one.request.max_new_tokens - len(one.tokens) for one in tenants)
        elif events:
            masked = None
        else:
            return NOTHING
        return StepOutcome(
            tuple(event for event in events if isinstance(event, RowFinished)),
            tuple(event for event in events if isinstance(event, BlockBoundary)),
            tuple(event for event in events if isinstance(event, PhaseChange)),
            tuple(event for event in events if isinstance(event, RowFailed)),
            masked,
        )

    def launch(self, batch: StepBatch) -> None:
        """Take a step; it runs when it is collected. O(1).

        Raises:
            EngineProtocolError: If two are on their way. The step was not taken then.
        """
        if len(self._launched) == 2:
            raise EngineProtocolError(
                f"launch: steps {self._launched[0].step_id} and {self._launched[1].step_id} are on "
                "their way: collect one"
            )
        self._launched.append(batch)

    def collect(self) -> StepOutcome:
        """Run the oldest step that was launched.

        Raises:
            EngineProtocolError: If there is none.
            Exception: As ``run``; the step behind it is forgotten then.
        """
        if not self._launched:
            raise EngineProtocolError("collect: no step was launched")
        try:
            return self._run(self._launched.popleft())
        except Exception:
            self._launched.clear()
            raise

    def release(self, released: Sequence[Released]) -> None:
        """Take slots back; keep the progress of rows that will resume it. O(released)."""
        for gone in released:
            if not gone.kept:  # also of a row whose step failed before it was resumed
                self._kept.pop(gone.request.id, None)
            if gone.slot is None:
                continue
            tenant = self._tenants[gone.slot]
            if tenant is not None and tenant.request is gone.request:
                self._tenants[gone.slot] = None
                if gone.kept:
                    self._kept[gone.request.id] = tenant

    def progress(self, slot: int, start: int) -> Progress:
        """Say how an answer stands: its tokens, a guess at the next, and the rest of the block.

        Raises:
            EngineProtocolError: If the slot holds no row.
        """
        tenant = self._tenants[slot]
        if tenant is None:
            raise EngineProtocolError(f"slot {slot}: holds no row")
        request, done = tenant.request, len(tenant.tokens)
        left = min(
            request.block_length - done % request.block_length, request.max_new_tokens - done
        )
        guess = (crc32(f"{_key(request)} {done} {tenant.done} guess".encode()) % 50_000,)
        masked = (None,) * (left - 1)
        return Progress(tuple(tenant.tokens[start:]), (*guess, *masked) if left else ())

    def _place(self, row: Row) -> None:
        here = self._tenants[row.slot]
        if here is not None and here.request is not row.request:
            raise EngineProtocolError(
                f"slot {row.slot}: {row.request.id!r} joins, but {here.request.id!r} was never "
                "released"
            )
        if row.resumed:
            kept = here or self._kept.pop(row.request.id, None)
            if kept is None:
                raise EngineProtocolError(
                    f"slot {row.slot}: {row.request.id!r} is to be resumed, but no progress was "
                    "kept; pass every Update.released on"
                )
            self._tenants[row.slot] = kept
            return
        steps = self._steps(row.request)
        if steps < 1:
            raise ConfigError(f"FakeEngine: steps of {row.request.id!r} must be >= 1, got {steps}")
        self._tenants[row.slot] = _Tenant(row.request, steps)

    def _tenant(self, row: Row) -> _Tenant:
        tenant = self._tenants[row.slot]
        if tenant is None or tenant.request is not row.request:
            raise EngineProtocolError(
                f"slot {row.slot}: the batch has {row.request.id!r} there, which never joined or "
                "was released"
            )
        return tenant

    def _advance(self, row: Row, tenant: _Tenant) -> list[_RowEvent]:
        """Let a row take its next step, and say what happened to it."""
        if tenant.done == tenant.steps:
            return []  # it has ended; a step that was planned ahead may still name it
        request = tenant.request
        blocks = len(tenant.tokens) // request.block_length
        tenant.done += 1
        for position in range(
            len(tenant.tokens), request.max_new_tokens * tenant.done // tenant.steps
        ):
            noise = crc32(f"{_key(request)} {position} {tenant.done}".encode())
            tenant.tokens.append(noise % 50_000)
        if self._poison.get(request.id) == tenant.done:
            tenant.steps = tenant.done
            return [RowFailed(row.slot, RuntimeError(f"{request.id} is poisoned"))]
        if tenant.done == tenant.steps:
            output = FakeOutput(tuple(tenant.tokens), tenant.done)
            return [RowFinished(row.slot, FinishReason.LENGTH, output)]
        events: list[_RowEvent] = []
        now_done = len(tenant.tokens) // request.block_length
        if now_done > blocks:
            cached = request.prompt_len + now_done * request.block_length
            events.append(BlockBoundary(row.slot, now_done, cached))
        if row.phase is Phase.PREFILL:
            events.append(PhaseChange(row.slot, Phase.REUSE))
        return events
