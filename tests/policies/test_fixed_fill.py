"""Fixed fill and its timers: the published rule, the cap-aware one, the fluid one, learned loads.

The reference dispatcher below is a loop over instants that keeps nothing: whenever it must decide
it goes through all arrivals and all past batches anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np
import pytest

from dllm_sched import Capacity, ConfigError, Policy, Request, Scheduler, presets
from dllm_sched.events import Event, RequestFinished, RequestJoined, RequestSubmitted
from dllm_sched.policies import (
    Fill,
    FluidFill,
    LearnedService,
    LearnedTimeout,
    PoissonTimeout,
)
from dllm_sched.sim.service import Constant, ServiceModel
from dllm_sched.sim.shapes import Work
from dllm_sched.sim.simulate import simulate
from dllm_sched.testing import check_policy
from dllm_sched.theory.batching import capped_timeout

S = 8.738217888618237  # the mean of the published batch times, seconds
ONE_STEP = Work(10, 32, 32, 1, 1, (1,))
Batches = list[tuple[float, tuple[int, ...]]]


class Drawn(ServiceModel):
    """The seconds of each batch, a batch being one step."""

    def __init__(self, make: Callable[[int], float]) -> None:
        self.make = make

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        return self.make(num_rows)


def noisy(seed: int) -> Callable[[int], float]:
    """Longer for more rows, and at random, drawn anew with every call."""
    rng = np.random.default_rng(seed)
    return lambda rows: float((2.0 + 0.5 * rows) * rng.uniform(0.7, 1.3))


def scheduled(policy: Policy, arrivals: list[float], service: Callable[[int], float]) -> Batches:
    """Who started when, through the real scheduler."""
    starts: dict[float, list[int]] = {}

    def watch(event: Event) -> None:
        if isinstance(event, RequestJoined):
            starts.setdefault(event.at, []).append(int(event.request_id[1:]))

    simulate(
        [(at, ONE_STEP) for at in arrivals],
        policy=policy,
        capacity=Capacity(max_num_seqs=5),
        service=Drawn(service),
        observers=[watch],
    )
    return [(at, tuple(ids)) for at, ids in starts.items()]


def referred(
    wait_until: Callable[[list[float], list[float], Batches, list[float]], float],
    arrivals: list[float],
    service: Callable[[int], float],
    size: int,
) -> Batches:
    """A dispatcher from scratch.

    ``wait_until(waiting, seen, batches, seconds)`` says when the waiting ones start at the latest
    if nobody else comes: their arrivals, all arrivals so far, the batches and how long each took.
    """
    batches: Batches = []
    seconds: list[float] = []
    free, first = 0.0, 0
    while first < len(arrivals):
        now = max(free, arrivals[first])
        while True:
            seen = [at for at in arrivals if at <= now]
            waiting = seen[first : first + size]
            upcoming = min((at for at in arrivals if at > now), default=math.inf)
            if len(waiting) == size or upcoming == math.inf:  # full; or all have come: drain
                break
            until = wait_until(seen[first:], seen, batches, seconds)
            if until <= now:
                break
            now = min(until, upcoming)
        batches.append((now, tuple(range(first, first + len(waiting)))))
        seconds.append(service(len(waiting)))
        free, first = now + seconds[-1], first + len(waiting)
    return batches


def arrivals_of(seed: int, count: int = 240) -> list[float]:
    """Slow, faster, too fast, and slower again."""
    rng = np.random.default_rng(seed)
    rates = np.repeat([0.3, 0.9, 1.6, 0.9, 0.3, 1.1], count // 6)
    instants: list[float] = np.cumsum(rng.exponential(1 / rates)).tolist()
    return instants


def ema_of(seen: list[float]) -> float | None:
    """The rate rebuilt from all arrivals: means of the last ten gaps, the older counting less."""
    gaps = np.diff(seen)
    if not len(gaps):
        return None
    means = [gaps[max(0, i - 9) : i + 1].mean() for i in range(len(gaps))]
    weights = [0.05 * 0.95 ** (len(means) - 1 - i) for i in range(len(means))]
    weights[0] /= 0.05
    return 1 / float(np.dot(weights, means))


def line_of(batches: Batches, seconds: list[float]) -> Callable[[int], float]:
    """The service time rebuilt by weighted least squares over all batches."""
    rows = np.array([len(ids) for _, ids in batches], float)
    took = np.array([at + s - at for (at, _), s in zip(batches, seconds, strict=True)])
    weights = 0.1 * 0.9 ** np.arange(len(rows))[::-1]
    weights[0] /= 0.1
    if np.ptp(rows) == 0:
        return lambda _: float(np.average(took, weights=weights))
    slope, base = np.polyfit(rows, took, 1, w=np.sqrt(weights))
    if slope < 0:
        return lambda _: float(np.average(took, weights=weights))
    return lambda n: max(0.0, float(base + slope * n))


def assert_same(found: Batches, expected: Batches) -> None:
    assert [ids for _, ids in found] == [ids for _, ids in expected]
    assert [at for at, _ in found] == pytest.approx([at for at, _ in expected], rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rate", [0.25, 0.8, 1.4])
def test_fluid_fill_of_a_known_load_is_the_reference(seed: int, rate: float) -> None:
    def needs(n: int) -> float:
        return 2.0 + 0.5 * n

    def wait_until(waiting: list[float], *_: object) -> float:
        enough = next(n for n in range(10**6) if n + 1 >= rate * needs(n))
        return -math.inf if len(waiting) >= enough else waiting[0] + needs(5)

    arrivals = arrivals_of(seed)
    policy = presets.fluid_fill(5, rate=rate, service=needs)
    assert_same(
        scheduled(policy, arrivals, noisy(seed)), referred(wait_until, arrivals, noisy(seed), 5)
    )


def test_fluid_fill_of_a_learned_load_is_the_reference() -> None:
    waited = 0

    def wait_until(
        waiting: list[float], seen: list[float], batches: Batches, seconds: list[float]
    ) -> float:
        nonlocal waited
        rate = ema_of(seen)
        if rate is None or not batches:
            return -math.inf
        line = line_of(batches, seconds)
        if len(waiting) + 1 >= rate * line(len(waiting)):
            return -math.inf
        waited += 1
        return waiting[0] + line(5)

    for seed in range(6):
        arrivals = arrivals_of(seed)
        expected = referred(wait_until, arrivals, noisy(seed), 5)
        assert_same(scheduled(presets.fluid_fill(5), arrivals, noisy(seed)), expected)
    assert waited > 15


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", ["paper", "capped"])
def test_a_learned_timer_is_the_reference(seed: int, rule: str) -> None:
    def timer(rate: float, service: float) -> float:
        if rule == "paper":
            return max(0.0, service - 1 / rate)
        if 1 / rate >= service:
            return 0.0
        if 5 / rate <= service:
            return math.inf
        low, high = 0.0, 1e4 * service  # the mean cycle as a sum of tail probabilities
        for _ in range(200):
            middle = (low + high) / 2
            mean = rate * middle
            below = np.cumsum([math.exp(-mean) * mean**k / math.factorial(k) for k in range(4)])
            if (1 + float(np.sum(1 - below))) / rate < service:
                low = middle
            else:
                high = middle
        return high

    def wait_until(
        waiting: list[float], seen: list[float], batches: Batches, seconds: list[float]
    ) -> float:
        rate = ema_of(seen)
        if rate is None or not batches:
            return -math.inf
        service = line_of(batches, seconds)(5)
        return waiting[0] + min(timer(rate, service), 2 * service)

    arrivals = arrivals_of(seed)
    policy = presets.fixed_fill_online(5, rule=rule)  # type: ignore[arg-type]
    expected = referred(wait_until, arrivals, noisy(seed), 5)
    found = scheduled(policy, arrivals, noisy(seed))
    assert [ids for _, ids in found] == [ids for _, ids in expected]
    assert [at for at, _ in found] == pytest.approx([at for at, _ in expected], rel=1e-6)


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "paper", "capped"),
    [
        (0.183, 3.274, 3.274),
        (0.366, 6.006, 6.013),
        (0.641, 7.178, 7.512),
        (0.824, 7.525, 9.222),
        (0.870, 7.589, 10.393),
    ],
)
def test_the_scheduler_waits_as_long_as_the_table_says(
    rate: float, paper: float, capped: float
) -> None:
    for rule, seconds in (("paper", paper), ("capped", capped)):
        policy = presets.fixed_fill_online(8, rate=rate, service=S, rule=rule)  # type: ignore[arg-type]
        scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=8))
        scheduler.submit(Request("a", prompt_len=1, max_new_tokens=1), now=100.0)
        update = scheduler.next_step(now=100.0)
        assert update.batch is None
        assert update.wake_at == pytest.approx(100 + seconds, abs=6e-4)
        batch = scheduler.next_step(now=update.wake_at).batch
        assert batch is not None and len(batch.rows) == 1


@pytest.mark.parametrize(("rate", "starts_with"), [(0.2, 1), (0.366, 3), (0.641, 5), (0.87, 7)])
def test_fluid_fill_starts_one_request_short_of_the_fluid_batch(
    rate: float, starts_with: int
) -> None:
    assert starts_with == max(1, math.ceil(rate * S - 1))
    scheduler = Scheduler(
        policy=presets.fluid_fill(8, rate=rate, service=S), capacity=Capacity(max_num_seqs=8)
    )
    for number in range(starts_with):
        assert scheduler.next_step(now=float(number)).batch is None
        request = Request(f"{number}", prompt_len=1, max_new_tokens=1)
        scheduler.submit(request, now=float(number))
    batch = scheduler.next_step(now=float(starts_with - 1)).batch
    assert batch is not None and len(batch.rows) == starts_with


def test_fluid_fill_in_overload_waits_for_a_full_batch_but_not_for_ever() -> None:
    scheduler = Scheduler(
        policy=presets.fluid_fill(4, rate=100.0, service=S), capacity=Capacity(max_num_seqs=4)
    )
    for number in range(3):
        scheduler.submit(Request(f"{number}", prompt_len=1, max_new_tokens=1), now=1.0)
    assert scheduler.next_step(now=1.0).wake_at == 1 + S
    scheduler.submit(Request("3", prompt_len=1, max_new_tokens=1), now=2.0)
    assert scheduler.next_step(now=2.0).batch is not None


def test_where_no_timer_is_stable_the_learned_one_is_two_services() -> None:
    assert capped_timeout(1.0, S, 8) == math.inf
    policy = presets.fixed_fill_online(8, rate=1.0, service=S)
    scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=8))
    scheduler.submit(Request("a", prompt_len=1, max_new_tokens=1), now=0.0)
    assert scheduler.next_step(now=0.0).wake_at == 2 * S


def test_a_learned_service_time_is_that_of_the_slowest_row() -> None:
    service = LearnedService()
    state = service.init()
    assert service.seconds(state, 3) is None
    for name in "ab":
        state = service.observe(state, RequestJoined(10.0, name, 0, 0, 0.0, resumed=False))
    for name, at in (("a", 11.0), ("b", 13.0)):
        state = service.observe(state, RequestFinished(at, name, None, 9.0, 10.0, 1, 1))  # type: ignore[arg-type]
    # One that never ran, and one of another batch, say nothing.
    state = service.observe(state, RequestFinished(99.0, "c", None, 9.0, None, 1, 1))  # type: ignore[arg-type]
    state = service.observe(state, RequestFinished(99.0, "d", None, 9.0, 5.0, 1, 1))  # type: ignore[arg-type]
    assert service.seconds(state, 1) == service.seconds(state, 7) == 3.0
    # Then a batch of four that takes 5 s: a line through both.
    for name in "efgh":
        state = service.observe(state, RequestJoined(20.0, name, 0, 0, 0.0, resumed=False))
    state = service.observe(state, RequestFinished(25.0, "h", None, 9.0, 20.0, 1, 1))  # type: ignore[arg-type]
    assert service.seconds(state, 2) == pytest.approx(3.0)
    assert service.seconds(state, 4) == pytest.approx(5.0)
    assert service.seconds(state, 6) == pytest.approx(7.0)


# --- in the simulator -----------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "gain"), [(0.4, 0.27), (0.7, 0.06)])
def test_a_timer_is_worth_much_at_low_load_and_starting_at_once_more(
    load: float, gain: float
) -> None:
    """Run to completion with equal batch times: the sooner an idle engine starts, the better."""
    rate = load * 8 / S
    arrivals = np.cumsum(np.random.default_rng(11).exponential(1 / rate, 20_000)).tolist()

    def mean_of(policy: Policy) -> float:
        return simulate(
            [(at, ONE_STEP) for at in arrivals],
            policy=policy,
            capacity=Capacity(max_num_seqs=8),
            service=Constant(S),
        ).mean()

    full = mean_of(presets.fixed_fill(8))
    capped = mean_of(presets.fixed_fill_online(8, rate=rate, service=S))
    fluid = mean_of(presets.fluid_fill(8, rate=rate, service=S))
    learned = mean_of(presets.fluid_fill(8))
    at_once = mean_of(presets.fixed_fill(8, 0.0))
    assert at_once < fluid < capped < full
    assert 1 - capped / full == pytest.approx(gain, abs=0.01)
    assert learned == pytest.approx(fluid, rel=0.01)


def test_a_burst_leaves_nobody_waiting_for_ever() -> None:
    """Rates learned in a burst are far too high for the silence after it."""
    burst = [0.01 * n for n in range(101)]
    for policy in (presets.fluid_fill(8), presets.fixed_fill_online(8)):
        result = simulate(
            [(at, ONE_STEP) for at in [*burst, 1e6, 2e6]],
            policy=policy,
            capacity=Capacity(max_num_seqs=8),
            service=Constant(1.0),
        )
        assert result.num_requests == 103
        assert max(result.latency_s) < 16


# --- the contract ---------------------------------------------------------------------------------

LEARNING = {
    "fixed_fill_online": presets.fixed_fill_online(4),
    "its paper rule": presets.fixed_fill_online(4, rule="paper", rate="running_mean"),
    "fluid_fill": presets.fluid_fill(4),
    "fluid_fill of windows": presets.fluid_fill(3, rate="window", service=0.5),
    "fluid_fill of log bands": presets.fluid_fill(4, rate="log_band", service=lambda n: 0.1 * n),
    "all known": presets.fluid_fill(4, rate=3.0, service=1.0),
}


@pytest.mark.parametrize("name", LEARNING)
def test_they_keep_the_contract_of_policies(name: str) -> None:
    check_policy(LEARNING[name])


def test_what_is_known_costs_no_events() -> None:
    assert FluidFill(4, rate=1.0, service=1.0).observes == ()
    assert FluidFill(4, rate="ema", service=1.0).observes == (RequestSubmitted,)


@pytest.mark.parametrize("strategy", [FluidFill, LearnedTimeout])
def test_out_of_range(strategy: type[FluidFill]) -> None:
    for bad in (0, -1.0, math.nan, math.inf, True, None, "nope", []):
        with pytest.raises(ConfigError, match="rate"):
            strategy(4, rate=bad)  # type: ignore[arg-type]
    for bad in (0, -1.0, math.nan, math.inf, True, "ema"):
        with pytest.raises(ConfigError, match="given"):
            strategy(4, service=bad)  # type: ignore[arg-type]
    for bad in (0, 1.5, True, None):
        with pytest.raises(ConfigError, match="batch_size"):
            strategy(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="8 slots"):
        Scheduler(policy=Policy(timeout=strategy(9)), capacity=Capacity(max_num_seqs=8))


def test_out_of_range_of_the_timer_alone() -> None:
    for bad in (0, -1.0, math.nan, True):
        with pytest.raises(ConfigError, match="most_services"):
            LearnedTimeout(4, most_services=bad)
    with pytest.raises(ConfigError, match="rule"):
        LearnedTimeout(4, rule="best")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rule"):
        PoissonTimeout(1.0, 1.0, 4, rule="best")  # type: ignore[arg-type]


def test_the_learned_timer_of_a_known_load_is_the_given_one() -> None:
    found = [
        scheduled(
            attrs.evolve(presets.fixed_fill(5), timeout=Fill(5) | timer), arrivals_of(3), noisy(1)
        )
        for timer in (LearnedTimeout(5, rate=0.5, service=S), PoissonTimeout(0.5, S, 5))
    ]
    assert found[0] == found[1]
