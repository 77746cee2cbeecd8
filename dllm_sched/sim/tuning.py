"""Which policy, batch size and timeout for this traffic? Asked of the very objects that serve it.

``saturated_rate`` measures what a policy can do at most, ``compare`` runs several on the same
arrivals beside a bound that no scheduler beats, and ``tune`` searches for a target.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import attrs

from dllm_sched.capacity import Capacity
from dllm_sched.errors import ConfigError
from dllm_sched.events import Event, RequestFinished, RequestJoined
from dllm_sched.policies.base import Policy
from dllm_sched.policies.presets import by_name
from dllm_sched.request import FinishReason
from dllm_sched.sim.report import Result, table
from dllm_sched.sim.service import ServiceModel
from dllm_sched.sim.shapes import Work
from dllm_sched.sim.simulate import simulate
from dllm_sched.sim.workloads import OpenLoop
from dllm_sched.theory._check import positive, whole
from dllm_sched.theory.bounds import LatencyBound, effective_slots, mean_latency

__all__ = [
    "Candidate",
    "Comparison",
    "Requests",
    "SpedUp",
    "Tried",
    "Tuning",
    "at_once",
    "candidates",
    "compare",
    "is_burst",
    "latency_bound",
    "mean_rate",
    "saturated_rate",
    "tune",
]

_INF = math.inf
_EOS = FinishReason.EOS
_MANY = 20_000  # requests that measure a capacity well, if there are 20 per slot
_MOST_BLOCKS = 1_000_000  # boundaries to report while measuring: some ten seconds


class Requests(Protocol):
    """What may be iterated again: an open workload, or a list of ``(arrival_s, Work)``."""

    def __iter__(self) -> Iterator[tuple[float, Work]]:
        """Yield ``(arrival_s, Work)`` in order of arrival."""


def _again(workload: Requests, whose: str) -> None:
    """Refuse what is empty when it is iterated a second time."""
    if iter(workload) is workload:
        raise ConfigError(
            f"{whose}: the workload can be iterated only once; pass a list of it, got {workload!r}"
        )


@attrs.frozen
class SpedUp:
    """The same requests, arriving ``factor`` times as fast.

    Args:
        workload: May be iterated again.
        factor: > 0.
    """

    workload: Requests
    factor: float

    def __attrs_post_init__(self) -> None:
        positive(factor=self.factor)
        _again(self.workload, "SpedUp")

    def __iter__(self) -> Iterator[tuple[float, Work]]:
        """Yield ``(arrival_s, Work)`` in order of arrival."""
        return ((arrival / self.factor, work) for arrival, work in self.workload)


def mean_rate(workload: Requests) -> float:
    """Return requests per second from 0 to the last arrival; ``inf`` if all come at 0. O(n).

    Raises:
        ConfigError: If there are no requests.
    """
    count, last = 0, 0.0
    for arrival, _ in workload:
        count += 1
        last = arrival
    if not count:
        raise ConfigError("the workload has no requests")
    return count / last if last > 0 else _INF


def at_once(workload: Requests) -> bool:
    """Return whether all requests arrive at one instant, so that they have no rate. O(n)."""
    instants = (arrival for arrival, _ in workload)
    first = next(instants, None)
    return all(arrival == first for arrival in instants)


def is_burst(workload: Requests, capacity_per_s: float, num_slots: int) -> bool:
    """Return whether requests come within so short a time that their mean rate says nothing.

    True for given requests (a trace, a list) whose last one arrives before the engine could have
    served one batch: what they do says nothing about the long run. A process of arrivals
    (``OpenLoop``) has its rate however few are drawn. O(n).

    Args:
        workload: May be iterated again.
        capacity_per_s: Requests per second that the policy serves, > 0.
        num_slots: Rows of a batch, >= 1.
    """
    source = workload
    while isinstance(source, SpedUp):
        source = source.workload
    if isinstance(source, OpenLoop):
        return False
    first, last = _INF, 0.0
    for arrival, _ in workload:
        first = min(first, arrival)
        last = arrival
    return (last - first) * capacity_per_s < num_slots


def stopped_after(result: Result, workload: Requests, max_waiting: int) -> str:
    """Return a sentence for a run that was broken off."""
    total = sum(1 for _ in workload)
    return (
        f"stopped: more than {max_waiting:,} waited (--max-waiting) after "
        f"{result.counts.submitted:,} of {total:,} requests"
    )


# --- capacity -------------------------------------------------------------------------------------


class _Plateau:
    """Counts finishes between two joins: the first after ``skip`` finishes, and the last."""

    def __init__(self, skip: int, progress: Callable[[int], object] | None = None) -> None:
        self._skip = skip
        self._progress = progress
        self._finished = 0
        self.first: tuple[float, int] | None = None
        self.last: tuple[float, int] | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RequestFinished):
            self._finished += event.reason is _EOS
            if self._progress is not None:
                self._progress(self._finished)
        elif isinstance(event, RequestJoined):
            self.last = (event.at, self._finished)
            if self.first is None and self._finished >= self._skip:
                self.first = self.last

    @property
    def rate(self) -> float | None:
        if self.first is None or self.last is None or self.last[0] <= self.first[0]:
            return None
        return (self.last[1] - self.first[1]) / (self.last[0] - self.first[0])


def saturated_rate(
    workload: Requests,
    *,
    policy: Policy,
    capacity: Capacity,
    service: ServiceModel,
    max_requests: int | None = None,
    progress: Callable[[int, int], object] | None = None,
    **options: Any,
) -> float:
    """Return how many requests a second the policy serves when there are always more waiting.

    Serves the workload's first requests as a backlog that is there from the start, and counts the
    finishes from a join after the first tenth of them up to the last join: full batches only, if
    the policy has batches. What arrives faster than this in the long run makes the queue grow
    without bound. With few requests per slot it is only a guess: 100 per slot give about 1 %, 10
    or 20 about 2 % (up to 10 % where a few requests need most of the work).

    Args:
        workload: Only its works matter.
        policy: The policy.
        capacity: The engine's slots and pages.
        service: Seconds of a step.
        max_requests: Take so many; None: 100 per slot, but at least 2000, beyond 20,000 only 20 per
            slot and beyond 80,000 only 10; fewer where every block of theirs has to be reported
            and they have many.
        progress: Called at each finish with (requests finished, of how many).
        options: As of ``simulate``: how the engine counts, what requests are.

    Returns:
        Requests per second that finish by themselves; 0 if none does.

    Raises:
        ConfigError: If there are no requests.
        PolicyError: If the policy is at fault.
    """
    slots = capacity.max_num_seqs
    grows = capacity.memory is not None and capacity.memory.grows
    most_blocks: float = _INF
    if max_requests is None:
        each = (min(100 * slots, _MANY), min(20 * slots, 4 * _MANY), 10 * slots)
        max_requests = max(2000, *each)
        most_blocks = _MOST_BLOCKS if grows or "blocks" in policy.needs else _INF
    whole(max_requests=max_requests)
    backlog: list[tuple[float, Work]] = []
    blocks = 0
    for _, work in itertools.islice(workload, max_requests):
        if blocks >= most_blocks and len(backlog) >= 2 * slots:
            break
        backlog.append((0.0, work))
        blocks += work.num_blocks
    count = len(backlog)
    if not backlog:
        raise ConfigError("the workload has no requests")
    told = None if progress is None else lambda finished: progress(finished, count)
    plateau = _Plateau(count // 10, told)
    result = simulate(
        backlog,
        policy=policy,
        capacity=capacity,
        service=service,
        max_waiting=count + 1,
        observers=[plateau],
        **options,
    )
    return result.requests_per_s if plateau.rate is None else plateau.rate


# --- comparison -----------------------------------------------------------------------------------


def latency_bound(workload: Requests, *, capacity: Capacity, service: ServiceModel) -> LatencyBound:
    """Return the least mean latency that any scheduler reaches on these arrivals. O(n log n).

    ``theory.bounds.mean_latency``, with a request's work in steps of a single row and as many slots
    as the best batch is worth. A step's tokens count with the least that a row can have, so that
    the bound holds whatever the batch. Pages are not considered.

    Args:
        workload: Kept in memory, 16 bytes and a pair of floats a request.
        capacity: The engine's slots.
        service: Seconds of a step.

    Raises:
        ConfigError: If there are no requests.
    """
    arrivals, steps = array("d"), array("l")
    least = _INF
    for arrival, work in workload:
        arrivals.append(arrival)
        steps.append(work.num_steps)
        # As ``Capacity.max_tokens`` counts a row that has not told its phase.
        blocks = -(-work.max_new_tokens // work.block_length)
        window = min(capacity.window_blocks or blocks, blocks)
        least = min(least, work.prompt_len + window * work.block_length)
    if not arrivals:
        raise ConfigError("the workload has no requests")
    num_slots = capacity.max_num_seqs
    times = [service.step_s(rows, int(rows * least)) for rows in range(1, num_slots + 1)]
    # A measured table may be faster with more rows; what is never slower bounds it from below.
    for rows in range(num_slots - 2, -1, -1):
        times[rows] = min(times[rows], times[rows + 1])
    slots = effective_slots(lambda rows: times[rows - 1], num_slots)
    jobs = [(at, count * times[0]) for at, count in zip(arrivals, steps, strict=True)]
    return mean_latency(jobs, slots)


@attrs.frozen
class Comparison:
    """Several policies on the same arrivals.

    Attributes:
        results: By label, in the order asked for.
        bound: The least mean latency that any scheduler reaches; None if not asked for.
    """

    results: dict[str, Result]
    bound: LatencyBound | None

    def ratio(self, label: str) -> float:
        """Return mean latency over the bound, >= 1; nan if unstable, stopped or without bound."""
        result = self.results[label]
        if self.bound is None or result.unstable or result.stopped:
            return math.nan
        return result.mean() / self.bound.mean_s

    def figures(self) -> list[dict[str, Any]]:
        """Return the figures of each policy, with ``label`` and ``mean_over_bound``, for JSON."""
        ratios = {label: self.ratio(label) for label in self.results}
        return [
            {
                "label": label,
                **result.figures(),
                "mean_over_bound": None if math.isnan(ratios[label]) else ratios[label],
            }
            for label, result in self.results.items()
        ]

    def table(self) -> str:
        """Return one line per policy."""
        named = [attrs.evolve(result, policy=label) for label, result in self.results.items()]
        return table(named, best_mean_s=None if self.bound is None else self.bound.mean_s)


def compare(
    policies: dict[str, Policy],
    workload: Requests,
    *,
    capacity: Capacity,
    service: ServiceModel,
    bound: bool = True,
    **options: Any,
) -> Comparison:
    """Run several policies on the same arrivals.

    Args:
        policies: Label -> policy.
        workload: May be iterated again.
        capacity: The engine's slots and pages, the same for all.
        service: Seconds of a step.
        bound: Compute the clairvoyant bound too; it holds the requests in memory.
        options: As of ``simulate``.

    Raises:
        ConfigError: If there are no policies or no requests.
        PolicyError: If a policy is at fault.
    """
    if not policies:
        raise ConfigError("compare: no policies")
    _again(workload, "compare")
    least = latency_bound(workload, capacity=capacity, service=service) if bound else None
    results = {
        label: simulate(workload, policy=policy, capacity=capacity, service=service, **options)
        for label, policy in policies.items()
    }
    return Comparison(results, least)


# --- search ---------------------------------------------------------------------------------------


def _pairs(values: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple(values)


@attrs.frozen
class Candidate:
    """A policy that one can name: preset, slots, and the preset's arguments.

    Args:
        preset: Of ``policies.presets``.
        max_num_seqs: Slots, >= 1.
        arguments: Of the preset.
    """

    preset: str
    max_num_seqs: int
    arguments: tuple[tuple[str, Any], ...] = attrs.field(default=(), converter=_pairs)

    def policy(self) -> Policy:
        """Build the policy."""
        return by_name(self.preset, **dict(self.arguments))

    def capacity(self, engine: Capacity) -> Capacity:
        """Return the engine's capacity with this candidate's slots."""
        return attrs.evolve(engine, max_num_seqs=self.max_num_seqs)

    def code(self, engine: Capacity) -> str:
        """Return the line that builds the scheduler."""
        inside = ", ".join(f"{name}={value!r}" for name, value in self.arguments if value != _INF)
        capacity = self.capacity(engine)
        limits = ", ".join(
            f"{field.name}={getattr(capacity, field.name)!r}"
            for field in attrs.fields(Capacity)
            if getattr(capacity, field.name) != field.default
        )
        build = self.preset if "." in self.preset else f"presets.{self.preset}"
        return f"Scheduler(policy={build}({inside}), capacity=Capacity({limits}))"

    def __str__(self) -> str:
        inside = ", ".join(f"{name}={value:g}" for name, value in self.arguments if value != _INF)
        return f"{self.preset}({inside})"


def candidates(
    rate: float,
    batch_sizes: Iterable[int],
    *,
    presets: Sequence[str] = ("continuous", "block_refill", "fixed_fill"),
    timeouts_s: Iterable[float] | None = None,
) -> list[Candidate]:
    """Return presets x batch sizes x timeouts.

    Args:
        rate: Requests per second, > 0; timeouts are shares of the time in which a batch fills.
        batch_sizes: Slots, each >= 1.
        presets: Names; of those given, ``fixed_fill`` takes timeouts and ``per_request`` no size.
        timeouts_s: For ``fixed_fill``, seconds, ``inf`` = only full batches; None: 0, and 1/4, 1/2
            and 1 of a batch's fill time, rounded to two digits.

    Raises:
        ConfigError: If an argument is out of range.
    """
    positive(rate=rate)
    sizes = list(dict.fromkeys(batch_sizes))
    for size in sizes:
        whole(batch_size=size)
    given = None if timeouts_s is None else list(timeouts_s)
    found = []
    for preset in presets:
        if preset == "per_request":
            found.append(Candidate(preset, 1))
            continue
        for size in sizes:
            base = (("batch_size", size),)
            if preset != "fixed_fill":
                found.append(Candidate(preset, size, base))
                continue
            timeouts = given
            if timeouts is None:
                fill_s = (size - 1) / rate
                timeouts = [_two_digits(fill_s * share) for share in (0.0, 0.25, 0.5, 1.0)]
            found += [
                Candidate(preset, size, (*base, ("timeout_s", timeout)))
                for timeout in dict.fromkeys(timeouts)
            ]
    return found


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


@attrs.frozen(kw_only=True)
class Tried:
    """One candidate and what it does.

    Attributes:
        candidate: The policy.
        capacity_per_s: Its saturated rate, requests per second.
        p99_s: 99th percentile of the latency at this traffic, seconds; ``inf`` if unstable or
            stopped.
        mean_s: Mean latency, seconds; ``inf`` likewise.
        headroom: By which factor the same traffic may be sped up: up to the saturated rate, and
            with the p99 still within the target, if there is one (0 if it is not even now). At
            least 1 for a burst (``is_burst``), which passes however fast it comes.
        stopped: Says so in words if it would keep up, but more than ``max_waiting`` waited.
    """

    candidate: Candidate
    capacity_per_s: float
    p99_s: float
    mean_s: float
    headroom: float
    stopped: str | None = None


@attrs.frozen
class Tuning:
    """What ``tune`` found.

    Attributes:
        rate: Of the traffic, requests per second.
        target_p99_s: What was asked for, seconds; None: the least p99.
        engine: Slots and pages; a candidate's slots replace these.
        tried: Every candidate, in the order of the search.
        recommended: The best one; None if none is stable, or none meets the target.
    """

    rate: float
    target_p99_s: float | None
    engine: Capacity
    tried: tuple[Tried, ...]
    recommended: Tried | None

    @property
    def frontier(self) -> list[Tried]:
        """Stable candidates that none beats in both p99 and head-room, by p99. O(n log n)."""
        best = -_INF
        found = []
        for each in sorted(self.tried, key=lambda t: (t.p99_s, -t.headroom)):
            if each.p99_s < _INF and each.headroom > best:
                best = each.headroom
                found.append(each)
        return found

    @property
    def code(self) -> str | None:
        """The line that builds the recommended scheduler."""
        return None if self.recommended is None else self.recommended.candidate.code(self.engine)

    @property
    def answer(self) -> str:
        """The outcome in a sentence."""
        if self.recommended is not None:
            best = self.recommended
            return (
                f"{best.candidate}: p99 {best.p99_s:.4g} s at {self.rate:.4g} requests/s, "
                f"head-room {best.headroom:.2f}x"
            )
        stable = [each for each in self.tried if each.p99_s < _INF]
        stopped = [each for each in self.tried if each.stopped is not None]
        if not stable and stopped:
            most = max(stopped, key=lambda each: each.capacity_per_s)
            return (
                f"no policy gets through: {most.candidate} serves {most.capacity_per_s:.4g} "
                f"requests/s, {self.rate:.4g} arrive; {most.stopped}"
            )
        if not stable:
            most = max(self.tried, key=lambda each: each.capacity_per_s)
            return (
                f"no stable policy: {self.rate:.4g} requests/s arrive, and the best of "
                f"{len(self.tried)}, {most.candidate}, serves {most.capacity_per_s:.4g}"
            )
        least = min(stable, key=lambda each: each.p99_s)
        return (
            f"no policy reaches p99 <= {self.target_p99_s:.4g} s at {self.rate:.4g} requests/s; "
            f"the least is {least.p99_s:.4g} s, by {least.candidate}"
        )

    def figures(self) -> dict[str, Any]:
        """Return everything by name, ready for JSON (``inf`` becomes None)."""
        return {
            "rate": self.rate,
            "target_p99_s": self.target_p99_s,
            "answer": self.answer,
            "code": self.code,
            "recommended": None if self.recommended is None else _figures(self.recommended),
            "frontier": [_figures(each) for each in self.frontier],
            "tried": [_figures(each) for each in self.tried],
        }

    def table(self) -> str:
        """Return the frontier, one line per candidate."""
        lines = [("policy", "p99 s", "mean s", "head-room", "capacity/s")]
        lines += [
            (
                str(each.candidate),
                f"{each.p99_s:.4g}",
                f"{each.mean_s:.4g}",
                f"{each.headroom:.2f}x",
                f"{each.capacity_per_s:.4g}",
            )
            for each in self.frontier
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        return "\n".join(
            "  ".join(
                c.rjust(w) if i else c.ljust(w)
                for i, (c, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )


def _figures(tried: Tried) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {
        "preset": tried.candidate.preset,
        "max_num_seqs": tried.candidate.max_num_seqs,
        **{name: "inf" if value == _INF else value for name, value in tried.candidate.arguments},
        "capacity_per_s": tried.capacity_per_s,
        "p99_s": plain(tried.p99_s),
        "mean_s": plain(tried.mean_s),
        "headroom": tried.headroom,
        "stopped": tried.stopped,
    }


class _Search:
    """One search: the same traffic, faster or slower, through one candidate after the other."""

    def __init__(
        self,
        workload: Requests,
        engine: Capacity,
        service: ServiceModel,
        target_s: float | None,
        max_waiting: int,
    ) -> None:
        self.workload = workload
        self.engine = engine
        self.service = service
        self.target_s = target_s
        self.max_waiting = max_waiting
        self.rate = mean_rate(workload)
        self._capacities: dict[tuple[Any, ...], float] = {}

    def capacity_per_s(self, candidate: Candidate) -> float:
        """The saturated rate. A timeout does not matter to it: nobody ever waits for others."""
        arguments = [each for each in candidate.arguments if each[0] != "timeout_s"]
        key = (candidate.preset, candidate.max_num_seqs, *arguments)
        if key not in self._capacities:
            self._capacities[key] = saturated_rate(
                self.workload,
                policy=candidate.policy(),
                capacity=candidate.capacity(self.engine),
                service=self.service,
            )
        return self._capacities[key]

    def run(self, candidate: Candidate, factor: float) -> Result:
        return simulate(
            self.workload if factor == 1.0 else SpedUp(self.workload, factor),
            policy=candidate.policy(),
            capacity=candidate.capacity(self.engine),
            service=self.service,
            max_waiting=self.max_waiting,
        )

    def meets(self, candidate: Candidate, factor: float) -> bool:
        result = self.run(candidate, factor)
        target_s = _INF if self.target_s is None else self.target_s
        return not result.unstable and result.percentile(99) <= target_s

    def headroom(self, candidate: Candidate, most: float, tolerance: float) -> float:
        """The largest factor, between 1 and ``most``, that meets the target."""
        low, high = 1.0, most
        while high > low * (1 + tolerance):
            middle = math.sqrt(low * high)
            if self.meets(candidate, middle):
                low = middle
            else:
                high = middle
        return low

    def attempt(self, candidate: Candidate, tolerance: float) -> Tried:
        capacity_per_s = self.capacity_per_s(candidate)
        most = capacity_per_s / self.rate
        if capacity_per_s > 0 and is_burst(self.workload, capacity_per_s, candidate.max_num_seqs):
            most = max(most, math.nextafter(1.0, _INF))  # it passes, and is over
        p99 = mean = _INF
        stopped = None
        headroom = most
        if most > 1.0:
            result = self.run(candidate, 1.0)
            if result.unstable:
                stopped = stopped_after(result, self.workload, self.max_waiting)
            elif result.num_requests:
                p99, mean = result.percentile(99), result.mean()
        if self.target_s is not None:
            within = p99 <= self.target_s
            headroom = self.headroom(candidate, most, tolerance) if within else 0.0
        return Tried(
            candidate=candidate,
            capacity_per_s=capacity_per_s,
            p99_s=p99,
            mean_s=mean,
            headroom=headroom,
            stopped=stopped,
        )


def tune(
    workload: Requests,
    *,
    service: ServiceModel,
    target_p99_s: float | None = None,
    engine: Capacity | None = None,
    batch_sizes: Iterable[int] | None = None,
    presets: Sequence[str] = ("continuous", "block_refill", "fixed_fill"),
    timeouts_s: Iterable[float] | None = None,
    tolerance: float = 0.02,
    max_waiting: int = 100_000,
    progress: Callable[[int, int, Tried], object] | None = None,
) -> Tuning:
    """Search presets x batch sizes x timeouts for the best policy for this traffic.

    With a target: of the policies whose p99 latency stays within it, the one with the most
    head-room (the factor by which the same arrivals may come faster before the p99 exceeds it), or
    of those within ``tolerance`` of it the least p99; without: the least p99. Equals are told apart
    by the smaller batch.

    Args:
        workload: Finite, and may be iterated again; some thousands of requests. It is run about 8
            times per candidate that meets the target, else once or twice.
        service: Seconds of a step.
        target_p99_s: > 0; None: the least p99.
        engine: Slots and pages; its slots are the largest batch. None: 64 slots.
        batch_sizes: None: powers of two up to the engine's slots.
        presets: As of ``candidates``.
        timeouts_s: As of ``candidates``.
        tolerance: Of the head-room, > 0.
        max_waiting: As of ``simulate``.
        progress: Called after each candidate with (how many are done, of how many, it).

    Raises:
        ConfigError: If an argument is out of range, or there are no requests.
        PolicyError: If a policy is at fault.
    """
    positive(tolerance=tolerance)
    _again(workload, "tune")
    if isinstance(presets, str):
        raise ConfigError(f"tune: presets must be a sequence of names, got the text {presets!r}")
    if target_p99_s is not None:
        positive(target_p99_s=target_p99_s)
    engine = Capacity(max_num_seqs=64) if engine is None else engine
    if batch_sizes is None:
        batch_sizes = [1 << k for k in range(engine.max_num_seqs.bit_length())]
    search = _Search(workload, engine, service, target_p99_s, max_waiting)
    if at_once(workload):
        raise ConfigError("tune: all requests arrive at one instant; a rate is needed")
    found = candidates(search.rate, batch_sizes, presets=presets, timeouts_s=timeouts_s)
    if not found:
        raise ConfigError("tune: no candidates; name presets and batch sizes")
    tried: list[Tried] = []
    for candidate in found:
        tried.append(search.attempt(candidate, tolerance))
        if progress is not None:
            progress(len(tried), len(found), tried[-1])
    best = _best(tried, target_p99_s, tolerance)
    return Tuning(search.rate, target_p99_s, engine, tuple(tried), best)


def _best(tried: Sequence[Tried], target_p99_s: float | None, tolerance: float) -> Tried | None:
    limit = _INF if target_p99_s is None else target_p99_s
    good = [each for each in tried if each.p99_s < _INF and each.p99_s <= limit]
    if target_p99_s is not None and good:
        most = max(each.headroom for each in good)
        good = [each for each in good if each.headroom * (1 + tolerance) >= most]
    return min(good, key=lambda each: (each.p99_s, each.candidate.max_num_seqs), default=None)
