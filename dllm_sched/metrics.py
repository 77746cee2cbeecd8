"""Prometheus metrics of a scheduler, and of where its driver's time goes.

::

    metrics = Metrics()
    scheduler = Scheduler(policy=policy, capacity=capacity, observers=[metrics])
    driver = Driver(scheduler, engine)
    metrics.expose(scheduler, driver=driver, engine=engine)
    prometheus_client.start_http_server(9000)

An event adds to plain numbers, O(1), in the scheduler's thread; names, labels and text are made
when somebody scrapes, in whatever thread that is, without waiting for a step. Labels are bounded:
ids and tenants never become one. ``examples/grafana_dashboard.json`` shows all of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Protocol

from dllm_sched.errors import ConfigError, EngineProtocolError
from dllm_sched.events import (
    BlockDone,
    DrainStarted,
    Event,
    Paused,
    PolicySet,
    RequestFinished,
    RequestJoined,
    RequestPreempted,
    RequestRejected,
    RequestSubmitted,
    Resumed,
    StepCompleted,
    StepFailed,
    StepPlanned,
)
from dllm_sched.request import FinishReason
from dllm_sched.runtime.driver import RunReport
from dllm_sched.scheduler import Scheduler

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
        Metric,
    )
except ImportError as error:
    raise ImportError(
        "dllm_sched.metrics needs prometheus-client: pip install 'dllm-sched[metrics]'"
    ) from error

__all__ = ["Metrics"]

_STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_LIFE_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
_STEPS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_REJECTIONS = ("draining", "queue_full", "too_large")
_SERVED = frozenset({FinishReason.EOS, FinishReason.LENGTH, FinishReason.MAX_STEPS})


class Reporting(Protocol):
    """A ``Driver`` or an ``AsyncDriver``."""

    def report(self) -> RunReport:
        """Return where the time has gone so far."""


class _Histogram:
    """Counts by bucket. One thread observes; another may read."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def family(self, name: str, text: str) -> Metric:
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        counts = list(accumulate(self.counts.copy()))
        return HistogramMetricFamily(
            name, text, buckets=list(zip(names, counts, strict=True)), sum_value=self.sum
        )


class Metrics:
    """An observer that counts, and the Prometheus collector of what it has counted.

    It belongs to one scheduler, from its construction on, and one registry has room for one: for
    several schedulers in a process take a ``CollectorRegistry`` each. Never raises on an event, and
    has no part in any decision.

    O(1) per event, and a few numbers for each active request that was preempted or has completed a
    block.

    Args:
        max_words: The most policies' names, and the most of policies' own words for a rejection,
            that become labels, >= 1; the rest is ``other``.

    Raises:
        ConfigError: If ``max_words`` is not an int >= 1.
    """

    def __init__(self, *, max_words: int = 32) -> None:
        if not isinstance(max_words, int) or isinstance(max_words, bool) or max_words < 1:
            raise ConfigError(f"Metrics: max_words must be an int >= 1, got {max_words!r}")
        self._max_words = max_words
        self._scheduler: Scheduler | None = None
        self._driver: Reporting | None = None
        self._engine: Any = None
        self._forward_before = 0.0  # what the engine had spent before
        self._forward_s = self._around_s = 0.0  # as told last; neither ever falls

        self._submitted = 0
        self._rejected = dict.fromkeys(_REJECTIONS, 0)
        self._finished = {reason.value: 0 for reason in FinishReason}
        self._preempted = {"kept": 0, "lost": 0}
        self._blocks = 0
        self._failed_steps = 0
        self._swaps = -1  # the first policy is none
        self._policy = ""
        self._policies: set[str] = set()
        self._paused = self._draining = False
        self._wait_s = _Histogram(_LIFE_S)
        self._request_s = _Histogram(_LIFE_S)
        self._request_steps = _Histogram(_STEPS)
        self._block_steps = _Histogram(_STEPS)
        self._step_s = _Histogram(_STEP_S)
        self._step_rows = _Histogram(_ROWS)

        self._planned_at: dict[int, float] = {}  # steps in flight
        self._completed_at = float("-inf")
        self._sent_back: set[str] = set()  # active requests that were preempted
        self._progress: dict[str, tuple[int, int]] = {}  # (blocks, steps) at the last boundary
        self._hear: dict[type[Any], Callable[[Any], None]] = {
            RequestSubmitted: self._on_submitted,
            RequestRejected: self._on_rejected,
            RequestJoined: self._on_joined,
            RequestPreempted: self._on_preempted,
            RequestFinished: self._on_finished,
            BlockDone: self._on_block,
            StepPlanned: self._on_planned,
            StepCompleted: self._on_completed,
            StepFailed: self._on_failed,
            PolicySet: self._on_policy,
            Paused: self._on_paused,
            Resumed: self._on_resumed,
            DrainStarted: self._on_drain,
        }

    def __call__(self, event: Event) -> None:
        """Take an event."""
        hear = self._hear.get(type(event))
        if hear is not None:
            hear(event)

    def expose(
        self,
        scheduler: Scheduler,
        *,
        driver: Reporting | None = None,
        engine: object = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        """Register with a registry; ``registry.unregister(metrics)`` takes it back.

        Args:
            scheduler: The one whose observer this is.
            driver: Its ``Driver`` or ``AsyncDriver``: its time is exposed by part, and the parts
                add up to all of it. Before the run they are 0.
            engine: The driver's. If it has ``forward_s`` (host seconds inside the model, counted
                during ``run``), these are a part of their own, and ``engine`` the rest.
            registry: Default: prometheus_client's own, which its server and exporters show.

        Raises:
            ConfigError: If this is not one of the scheduler's observers, is exposed already, or an
                engine is given without its driver.
            ValueError: If the registry has these names already (prometheus_client's).
        """
        if not isinstance(scheduler, Scheduler) or self not in scheduler._observers:
            raise ConfigError(
                "Metrics.expose: this is not an observer of that scheduler; build it with "
                "Scheduler(observers=[metrics])"
            )
        if self._scheduler is not None:
            raise ConfigError("Metrics.expose: it is exposed already")
        if engine is not None and driver is None:
            raise ConfigError(
                "Metrics.expose: the engine's forward is a part of its driver's time; give the "
                "driver as well"
            )
        self._scheduler = scheduler
        self._driver = driver
        self._engine = engine if hasattr(engine, "forward_s") else None
        self._forward_before = 0.0 if self._engine is None else self._engine.forward_s
        try:
            registry.register(self)
        except BaseException:
            self._scheduler = None
            raise

    # --- events -------------------------------------------------------------------------------

    def _on_submitted(self, event: RequestSubmitted) -> None:
        self._submitted += 1

    def _on_rejected(self, event: RequestRejected) -> None:
        counts, reason = self._rejected, _label(event.reason)
        if reason not in counts and len(counts) >= len(_REJECTIONS) + self._max_words:
            reason = "other"
        counts[reason] = counts.get(reason, 0) + 1

    def _on_joined(self, event: RequestJoined) -> None:
        if event.request_id not in self._sent_back:
            self._wait_s.observe(event.waited_s)

    def _on_preempted(self, event: RequestPreempted) -> None:
        self._preempted["kept" if event.kept else "lost"] += 1
        self._sent_back.add(event.request_id)
        if not event.kept:
            self._progress.pop(event.request_id, None)

    def _on_finished(self, event: RequestFinished) -> None:
        self._finished[event.reason.value] += 1
        self._sent_back.discard(event.request_id)
        _, steps = self._progress.pop(event.request_id, (0, 0))
        if event.reason in _SERVED:
            self._request_s.observe(event.at - event.arrived_at)
            self._request_steps.observe(event.num_steps)
            if event.num_steps > steps:  # its last block ended with it
                self._block_steps.observe(event.num_steps - steps)

    def _on_block(self, event: BlockDone) -> None:
        blocks, steps = self._progress.get(event.request_id, (0, 0))
        crossed = event.num_blocks_done - blocks
        if crossed > 0:
            self._blocks += crossed
            self._block_steps.observe((event.num_steps - steps) / crossed, crossed)
            self._progress[event.request_id] = (event.num_blocks_done, event.num_steps)

    def _on_planned(self, event: StepPlanned) -> None:
        self._planned_at[event.step_id] = event.at

    def _on_completed(self, event: StepCompleted) -> None:
        at, steps = event.at, event.steps
        # A step that was planned while another ran begins when that one has ended.
        began = max(self._planned_at.pop(event.step_id, at), self._completed_at)
        self._completed_at = at
        self._step_s.observe((at - began) / steps, steps)
        self._step_rows.observe(event.num_rows, steps)

    def _on_failed(self, event: StepFailed) -> None:
        self._failed_steps += 1
        self._planned_at.clear()  # the one planned meanwhile is void as well

    def _on_policy(self, event: PolicySet) -> None:
        self._swaps += 1
        name = _label(event.policy)
        if name in self._policies or len(self._policies) < self._max_words:
            self._policies.add(name)
            self._policy = name
        else:
            self._policy = "other"

    def _on_paused(self, event: Paused) -> None:
        self._paused = True

    def _on_resumed(self, event: Resumed) -> None:
        self._paused = False

    def _on_drain(self, event: DrainStarted) -> None:
        self._draining = True

    # --- scrapes ------------------------------------------------------------------------------

    def describe(self) -> Iterator[Metric]:
        """Yield the families, for a registry to see which names are taken."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Yield every family with its samples, from any thread.

        Figures of one scrape may lie one event apart. O(families).
        """
        scheduler = self._scheduler
        if scheduler is None:
            return
        yield _counter("requests_submitted", "Requests that submit took.", self._submitted)
        yield _counters(
            "requests_rejected", "Requests that submit refused.", "reason", self._rejected
        )
        yield _counters("requests_finished", "Requests that ended.", "reason", self._finished)
        yield _counters(
            "requests_preempted",
            "Rows sent back to the queue, by what became of their progress; lost: evicted for "
            "good, or restarted after a failed step.",
            "progress",
            self._preempted,
        )
        yield _gauge("requests_waiting", "Requests in the queue now.", scheduler.num_waiting)
        yield _gauge("requests_running", "Requests that hold a slot now.", scheduler.num_running)
        yield self._wait_s.family(
            "dllm_sched_wait_seconds", "From submission to the first step it joined."
        )
        yield self._request_s.family(
            "dllm_sched_request_seconds",
            "From submission to the end, of requests that ended by eos, length or max_steps.",
        )
        yield self._request_steps.family(
            "dllm_sched_request_steps",
            "Denoising steps of a request that ended by eos, length or max_steps.",
        )
        yield self._block_steps.family(
            "dllm_sched_block_steps",
            "Denoising steps of a block: from one boundary to the next, or to the request's end.",
        )
        yield _counter("blocks", "Blocks reported done.", self._blocks)
        yield self._step_s.family("dllm_sched_step_seconds", "A step, on the scheduler's clock.")
        yield self._step_rows.family("dllm_sched_step_rows", "Rows in a completed step.")
        yield _counter(
            "wasted_row_steps",
            "Slots that stood empty during a step while requests waited, and row-steps run for "
            "requests that had ended.",
            scheduler._wasted,  # settled at every call while somebody observes
        )
        yield _counter("failed_steps", "Steps reported by fail_step.", self._failed_steps)
        yield from _capacity(scheduler)
        policy = {"policy": self._policy}
        yield InfoMetricFamily("dllm_sched_policy", "The policy in force.", policy)
        yield _counter("policy_swaps", "Policies set after the first one.", self._swaps)
        yield _gauge("paused", "1 while paused.", self._paused)
        yield _gauge("draining", "1 once no more requests are taken.", self._draining)
        if self._driver is not None:
            yield _counters(
                "time_seconds",
                "Host seconds of the driver's thread; the parts add up to all of them. forward: "
                "inside the model; engine: in the engine, around it; wait: asleep; other: the "
                "driver and the callbacks.",
                "part",
                self._parts(self._driver),
            )

    def _parts(self, driver: Reporting) -> dict[str, float]:
        engine = self._engine
        forward_s = 0.0 if engine is None else engine.forward_s - self._forward_before
        try:
            report = driver.report()
        except EngineProtocolError:  # the run has not begun
            names = ("engine", "forward", "scheduler", "wait", "other")
            return {name: 0.0 for name in names if name != "forward" or engine is not None}
        parts = {"engine": report.engine_s}
        if engine is not None:
            # While a forward runs, its time is not in ``forward_s`` yet, and would be taken back
            # from the rest later; a counter must not fall.
            self._around_s = max(self._around_s, report.engine_s - forward_s)
            self._forward_s = max(self._forward_s, report.engine_s - self._around_s)
            parts = {"engine": self._around_s, "forward": self._forward_s}
        return {
            **parts,
            "scheduler": report.scheduler_s,
            "wait": report.wait_s,
            "other": report.other_s,
        }


def _capacity(scheduler: Scheduler) -> Iterator[Metric]:
    capacity = scheduler.capacity
    yield _gauge("slots", "Slots: the most rows of a step.", capacity.max_num_seqs)
    yield _gauge(
        "tokens_in_rows",
        "Upper bound of the tokens that the running rows send through the next forward.",
        scheduler.tokens_in_rows,
    )
    pages = GaugeMetricFamily(
        "dllm_sched_kv_pages", "KV pages; none without a memory model.", labels=["state"]
    )
    if capacity.num_pages is not None:
        free = max(0, scheduler._running.free_pages)
        pages.add_metric(["free"], free)
        pages.add_metric(["used"], capacity.num_pages - free)
    yield pages


def _label(word: object) -> str:
    """A policy's own word, such that it can be written whatever it is."""
    return word.encode(errors="replace").decode() if isinstance(word, str) else "other"


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"dllm_sched_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"dllm_sched_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: dict[str, Any]) -> Metric:
    family = CounterMetricFamily(f"dllm_sched_{name}", text, labels=[label])
    for word, value in values.copy().items():  # its owner may be adding a word
        family.add_metric([word], value)
    return family
