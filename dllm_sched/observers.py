"""Observers: callables that a scheduler gives every event, once its call has committed.

``Scheduler(observers=[...])``; one that raises is logged once and removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dllm_sched.errors import ConfigError
from dllm_sched.events import (
    Event,
    RequestFinished,
    RequestJoined,
    RequestPreempted,
    RequestSubmitted,
    StepCompleted,
    StepFailed,
    StepPlanned,
)
from dllm_sched.request import FinishReason, Request
from dllm_sched.theory._check import not_negative, positive

__all__ = ["CohortMeter", "EnergyMeter", "EnergyShare", "EnergyWindow", "RequestEnergy"]


class EnergyShare(NamedTuple):
    """What one request took of a window."""

    request_id: str
    row_steps: float  #: steps that it took part in
    joules: float


class RequestEnergy(NamedTuple):
    """What one request took in its whole life; told in the window in which it ended."""

    request_id: str
    reason: FinishReason
    row_steps: float
    joules: float
    tokens: int

    @property
    def joules_per_token(self) -> float | None:
        """Joules over tokens; None without tokens."""
        return self.joules / self.tokens if self.tokens else None


class EnergyWindow(NamedTuple):
    """The energy of a stretch of time, and whose it was."""

    joules: float
    row_steps: float
    shares: tuple[EnergyShare, ...]  #: of every request that took part in a step
    ended: tuple[RequestEnergy, ...]  #: who ended, in order
    unattributed_j: float  #: all of it if no step was completed, else 0

    @property
    def tokens(self) -> int:
        """Tokens of the requests that ended."""
        return sum(each.tokens for each in self.ended)

    @property
    def joules_per_token(self) -> float | None:
        """The window's joules over the tokens of who ended in it; None without tokens."""
        tokens = self.tokens
        return self.joules / tokens if tokens else None

    @property
    def joules_per_request(self) -> float | None:
        """The mean over their whole lives of who ended; None if nobody did."""
        ended = self.ended
        return sum(each.joules for each in ended) / len(ended) if ended else None


class _Account:
    """One life of a request. ``since``: the meter's clock up to which it is counted; None: idle."""

    __slots__ = ("joules", "name", "request", "row_steps", "since", "window_steps")

    def __init__(self, name: str, request: Request | None) -> None:
        self.name = name
        self.request = request
        self.since: float | None = None
        self.window_steps: float = 0
        self.row_steps: float = 0
        self.joules: float = 0.0


_End = tuple[_Account, RequestFinished]


def _reported_blocks(request: Request, end: RequestFinished) -> int:
    return end.num_blocks_done * request.block_length


class EnergyMeter:
    """Shares the energy of a window among requests: each gets its part of the row-steps.

    A step of n rows is n row-steps, k steps taken at once are k times as many. A row that is
    cancelled while its step runs has taken part in it; a failed step is nobody's (its energy falls
    on the row-steps of its window). Events name no rows: a step in which only some of the running
    rows took part (a composition, several batch_keys) is shared by all of them alike, and with two
    steps in flight a row that has ended counts in the first of them only.

    O(1) per event; ``close`` is O(requests that ran in the window or are active).

    Args:
        step_j: Joules of a step by its rows, where a model stands for a meter; None: ``close`` is
            given what a meter read.
        tokens: (request, its ``RequestFinished``) -> tokens that it brought; default: the blocks
            that the engine reported, whole.

    Source:
        Own derivation; energy per window and per request besides per token as in
        "Characterization of Request and Token Energy Costs" (arXiv 2608.28044), second hand.
    """

    def __init__(
        self,
        *,
        step_j: Callable[[int], float] | None = None,
        tokens: Callable[[Request, RequestFinished], int] = _reported_blocks,
    ) -> None:
        self._step_j = step_j
        self._tokens = tokens
        self._clock: float = 0  # steps of a row that never leaves
        self._accounts: dict[str, _Account] = {}  # active requests
        self._num_running = 0
        self._planned: int | None = None  # rows that ran when the step in flight was planned
        self._leaving: list[_End] = []  # while their step was in flight
        self._ended: list[_End] = []  # in this window, in order
        self._modelled_j = 0.0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, StepPlanned):
            self._planned = self._num_running
        elif isinstance(event, StepCompleted):
            self._completed(event)
        elif isinstance(event, StepFailed):
            self._landed()
        elif isinstance(event, RequestSubmitted):
            self._accounts[event.request.id] = _Account(event.request.id, event.request)
        elif isinstance(event, RequestJoined):
            self._account(event.request_id).since = self._clock
            self._num_running += 1
        elif isinstance(event, RequestPreempted):
            self._stop(self._account(event.request_id))
        elif isinstance(event, RequestFinished):
            self._finished(event)

    def close(self, joules: float | None = None) -> EnergyWindow:
        """End the window, and begin the next one.

        Args:
            joules: What a meter read over it, >= 0; None: the sum of ``step_j``.

        Raises:
            ConfigError: If it is out of range, or missing where there is no ``step_j``.
        """
        if joules is None:
            if self._step_j is None:
                raise ConfigError("EnergyMeter.close: give joules, or a step_j to the meter")
            joules = self._modelled_j
        not_negative(joules=float(joules))
        self._modelled_j = 0.0
        accounts = (*(one for one, _ in (*self._ended, *self._leaving)), *self._accounts.values())
        for account in accounts:
            if account.since is not None:
                self._count(account, account.since)
        took_part = [account for account in accounts if account.window_steps]
        total = sum(account.window_steps for account in took_part)
        shares = []
        for one in took_part:
            share = joules * one.window_steps / total
            shares.append(EnergyShare(one.name, one.window_steps, share))
            one.joules += share
            one.row_steps += one.window_steps
            one.window_steps = 0
        ended = tuple(self._told(account, end) for account, end in self._ended)
        self._ended = []
        return EnergyWindow(joules, total, tuple(shares), ended, 0.0 if took_part else joules)

    def _told(self, one: _Account, end: RequestFinished) -> RequestEnergy:
        tokens = 0 if one.request is None else self._tokens(one.request, end)
        return RequestEnergy(one.name, end.reason, one.row_steps, one.joules, tokens)

    def _account(self, name: str) -> _Account:
        account = self._accounts.get(name)
        if account is None:  # submitted before the meter listened
            account = self._accounts[name] = _Account(name, None)
        return account

    def _count(self, account: _Account, since: float) -> None:
        account.window_steps += self._clock - since
        account.since = self._clock

    def _stop(self, account: _Account) -> None:
        if account.since is not None:
            self._count(account, account.since)
            account.since = None
            self._num_running -= 1

    def _finished(self, event: RequestFinished) -> None:
        account = self._account(event.request_id)
        del self._accounts[event.request_id]
        if account.since is not None and self._planned is not None:
            self._num_running -= 1
            self._leaving.append((account, event))
            return
        self._stop(account)
        self._ended.append((account, event))

    def _completed(self, event: StepCompleted) -> None:
        rows, steps = event.num_rows, event.steps
        if self._step_j is not None:
            joules = self._step_j(rows)
            positive(step_j=joules)
            self._modelled_j += steps * joules
        running = self._planned or rows
        self._clock += steps if rows >= running else steps * rows / running
        self._landed()

    def _landed(self) -> None:
        self._planned = None
        for account, _ in self._leaving:
            if account.since is not None:
                self._count(account, account.since)
                account.since = None
        self._ended += self._leaving
        self._leaving = []


class CohortMeter:
    """Measures how synchronised the rows are: the share of the largest cohort among them.

    A cohort is those who joined with one step. The measure is its share of all rows, as a mean
    over the steps completed: 1 if everybody always came together, 1 / n if n rows came one by one.
    High and lasting values under load are the mark of service-induced congestion
    (``theory.congestion``), whose recursion calls it ``cohort_share``.

    O(1) per event.

    Source:
        Own derivation; "Service-Induced Congestion" (arXiv 2606.15555) describes the effect.
    """

    def __init__(self) -> None:
        self._cohort_of: dict[str, int] = {}  # running rows: the step they joined with
        self._sizes: dict[int, int] = {}  # of the cohorts that are not empty
        self._having: dict[int, int] = {}  # how many cohorts have a size
        self._largest = 0
        self._shares = 0.0
        self._steps = 0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, StepCompleted):
            if self._cohort_of:
                self._shares += event.steps * self.share_now
                self._steps += event.steps
        elif isinstance(event, RequestJoined):
            self._cohort_of[event.request_id] = event.step_id
            self._change(event.step_id, +1)
        elif isinstance(event, RequestPreempted | RequestFinished):
            cohort = self._cohort_of.pop(event.request_id, None)
            if cohort is not None:
                self._change(cohort, -1)

    @property
    def share_now(self) -> float:
        """The share at this moment; 0 if nobody runs."""
        return self._largest / len(self._cohort_of) if self._cohort_of else 0.0

    @property
    def mean_share(self) -> float:
        """The mean over all steps completed while somebody ran; 0 if there was none."""
        return self._shares / self._steps if self._steps else 0.0

    def _change(self, cohort: int, by: int) -> None:
        size = self._sizes.pop(cohort, 0)
        self._count(size, -1)
        self._count(size + by, +1)
        if size + by:
            self._sizes[cohort] = size + by
        if by > 0:
            self._largest = max(self._largest, size + by)
        elif size == self._largest and not self._having.get(size):
            self._largest -= 1  # the cohort that shrank has that size now

    def _count(self, size: int, by: int) -> None:
        self._having[size] = self._having.get(size, 0) + by
        if not self._having[size] or not size:
            del self._having[size]
