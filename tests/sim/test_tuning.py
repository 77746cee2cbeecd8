"""Capacity, comparison and search: against closed forms, bounds and each other."""

from __future__ import annotations

import math

import pytest

from dllm_sched import Capacity, ConfigError, GrowingKV, Scheduler, presets
from dllm_sched.sim.arrivals import Poisson
from dllm_sched.sim.lengths import Fixed
from dllm_sched.sim.service import Constant, Linear, Table
from dllm_sched.sim.shapes import EvenSteps, Shapes, Work, gsm8k
from dllm_sched.sim.tuning import (
    Candidate,
    SpedUp,
    Tried,
    Tuning,
    at_once,
    candidates,
    compare,
    is_burst,
    latency_bound,
    mean_rate,
    saturated_rate,
    tune,
)
from dllm_sched.sim.workloads import OpenLoop

STEP_S = 0.0241
SERVICE = Constant(STEP_S)


def traffic(rate, count=600, seed=0):
    return OpenLoop(Poisson(rate), gsm8k(), seed=seed, max_requests=count)


def test_rates_and_speed():
    work = Work(10, 32, 32, 1, 1, (1,))
    assert mean_rate([(1.0, work), (4.0, work)]) == 0.5
    assert mean_rate([(0.0, work)]) == math.inf
    assert [at for at, _ in SpedUp([(1.0, work), (4.0, work)], 2.0)] == [0.5, 2.0]
    with pytest.raises(ConfigError, match="no requests"):
        mean_rate([])
    with pytest.raises(ConfigError, match="factor"):
        SpedUp([], 0.0)


@pytest.mark.parametrize(
    ("policy", "slots", "steps"),
    [
        (presets.per_request(), 1, 290.39),
        (presets.continuous(8), 8, 290.39),
        (presets.fixed_fill(8), 8, 290.39 * 1.377),  # as if each took as long as its slowest
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_capacity_of_a_backlog(policy, slots, steps):
    rate = saturated_rate(
        traffic(1.0, count=2000),
        policy=policy,
        capacity=Capacity(max_num_seqs=slots),
        service=SERVICE,
    )
    assert rate == pytest.approx(slots / (steps * STEP_S), rel=0.015)


def test_capacity_is_exact_where_everybody_needs_the_same():
    shapes = Shapes(Fixed(4), decoder=EvenSteps(10))
    rate = saturated_rate(
        OpenLoop(Poisson(1.0), shapes),
        policy=presets.continuous(8),
        capacity=Capacity(max_num_seqs=8),
        service=Constant(0.5),
    )
    assert rate == pytest.approx(8 / (40 * 0.5), rel=1e-9)


def test_at_once():
    work = Work(10, 32, 32, 1, 1, (1,))
    assert at_once([(5.0, work)])
    assert at_once([(5.0, work)] * 3)
    assert not at_once([(0.0, work), (5.0, work)])


def test_capacity_needs_requests():
    arguments = {
        "policy": presets.continuous(8),
        "capacity": Capacity(max_num_seqs=8),
        "service": SERVICE,
    }
    with pytest.raises(ConfigError, match="no requests"):
        saturated_rate([], **arguments)
    with pytest.raises(ConfigError, match="max_requests"):
        saturated_rate(traffic(1.0), max_requests=0, **arguments)
    # Too few to see a plateau: the whole run counts.
    one = saturated_rate(traffic(1.0), max_requests=1, **arguments)
    assert one == pytest.approx(1 / (next(iter(traffic(1.0)))[1].num_steps * STEP_S))


def test_nobody_beats_the_bound():
    policies = {
        "continuous": presets.continuous(16),
        "fixed": presets.fixed_fill(16, 5.0),
        "one": presets.per_request(),
    }
    capacity = Capacity(max_num_seqs=16)
    found = compare(policies, traffic(1.2), capacity=capacity, service=SERVICE, max_waiting=200)
    assert list(found.results) == list(policies)
    assert 1.0 <= found.ratio("continuous") < 1.02
    assert 1.3 < found.ratio("fixed") < 2.5
    assert found.results["one"].unstable
    assert math.isnan(found.ratio("one"))
    rows = found.figures()
    assert [row["label"] for row in rows] == list(policies)
    assert rows[2]["mean_over_bound"] is None
    assert "one (unstable)" in found.table()
    assert "mean / bound" in found.table()
    without = compare(
        {"continuous": presets.continuous(16)},
        traffic(1.2),
        capacity=capacity,
        service=SERVICE,
        bound=False,
    )
    assert without.bound is None
    assert math.isnan(without.ratio("continuous"))
    with pytest.raises(ConfigError, match="no policies"):
        compare({}, traffic(1.2), capacity=capacity, service=SERVICE)


@pytest.mark.parametrize(
    "service",
    [
        Linear(0.01, 0.001),
        Linear(0.01, 0.0005, 1e-6),
        Table([1, 4, 16], [0], [[0.02], [0.018], [0.04]]),  # faster with four rows than with one
    ],
    ids=["rows", "tokens", "table"],
)
def test_the_bound_holds_where_steps_cost_more_with_more_rows(service):
    capacity = Capacity(max_num_seqs=16)
    for rate in (0.5, 1.5):
        found = compare(
            {"continuous": presets.continuous(16)},
            traffic(rate, 300),
            capacity=capacity,
            service=service,
        )
        assert 1.0 <= found.ratio("continuous") < 3.0
    with pytest.raises(ConfigError, match="no requests"):
        latency_bound([], capacity=capacity, service=service)


def test_candidates_are_named_and_built():
    found = candidates(2.0, [1, 9], presets=("continuous", "fixed_fill", "per_request"))
    assert [str(each) for each in found] == [
        "continuous(batch_size=1)",
        "continuous(batch_size=9)",
        "fixed_fill(batch_size=1, timeout_s=0)",
        "fixed_fill(batch_size=9, timeout_s=0)",
        "fixed_fill(batch_size=9, timeout_s=1)",
        "fixed_fill(batch_size=9, timeout_s=2)",
        "fixed_fill(batch_size=9, timeout_s=4)",
        "per_request()",
    ]
    for each in found:
        assert each.policy().name == each.preset
    given = candidates(2.0, [4], presets=("fixed_fill",), timeouts_s=(0.5, math.inf))
    assert [str(each) for each in given] == [
        "fixed_fill(batch_size=4, timeout_s=0.5)",
        "fixed_fill(batch_size=4)",
    ]


def test_the_line_of_code_builds_the_scheduler():
    candidate = Candidate("fixed_fill", 16, (("batch_size", 16), ("timeout_s", 0.12)))
    line = (
        "Scheduler(policy=presets.fixed_fill(batch_size=16, timeout_s=0.12), "
        "capacity=Capacity(max_num_seqs=16))"
    )
    assert candidate.code(Capacity(max_num_seqs=64)) == line
    names = {
        "Scheduler": Scheduler, "presets": presets, "Capacity": Capacity, "GrowingKV": GrowingKV
    }  # fmt: skip
    engine = Capacity(max_num_seqs=64, num_pages=500, memory=GrowingKV(page_size=32))
    scheduler = eval(candidate.code(engine), names)  # noqa: S307
    built, meant = scheduler.policy, candidate.policy()
    assert (built.name, built.admission, built.timeout) == (
        meant.name,
        meant.admission,
        meant.timeout,
    )
    assert scheduler.capacity == candidate.capacity(engine)


def test_the_least_p99_without_a_target():
    seen = []
    found = tune(
        traffic(1.0),
        service=SERVICE,
        batch_sizes=(4, 16),
        progress=lambda done, of, last: seen.append((done, of, last)),
    )
    assert len(found.tried) == len(seen) == seen[-1][1] == 12
    best = found.recommended
    assert best.candidate == Candidate("continuous", 16, (("batch_size", 16),))
    assert best.p99_s == min(each.p99_s for each in found.tried)
    assert best.headroom == pytest.approx(best.capacity_per_s / found.rate)
    # Four slots serve 0.57 requests/s.
    assert all(
        each.p99_s == math.inf and each.headroom < 1
        for each in found.tried
        if each.candidate.max_num_seqs == 4
    )
    assert found.code == (
        "Scheduler(policy=presets.continuous(batch_size=16), capacity=Capacity(max_num_seqs=16))"
    )
    assert "p99" in found.answer
    assert found.answer.startswith("continuous(batch_size=16)")
    assert found.figures()["recommended"]["preset"] == "continuous"
    assert str(best.candidate) in found.table()


def test_the_most_headroom_within_a_target():
    arguments = {"service": SERVICE, "target_p99_s": 14.0, "presets": ("continuous",)}
    workload = traffic(1.0, 400)
    found = tune(workload, batch_sizes=(8, 16, 32), **arguments)
    best = found.recommended
    assert best.candidate.max_num_seqs == 32
    by_size = {each.candidate.max_num_seqs: each for each in found.tried}
    assert by_size[8].headroom == 0.0  # it serves 1.14 a second, but not fast enough
    assert 1.0 < by_size[16].headroom < by_size[32].headroom
    # What it says of the head-room is true.
    search = {"capacity": Capacity(max_num_seqs=16), "service": SERVICE}
    for factor, within in ((by_size[16].headroom, True), (by_size[16].headroom * 1.06, False)):
        result = compare(
            {"continuous": presets.continuous(16)}, SpedUp(workload, factor), **search
        ).results["continuous"]
        assert (result.percentile(99) <= 14.0) is within


def test_an_impossible_target_is_answered_not_raised():
    found = tune(traffic(50.0, 300), service=SERVICE, batch_sizes=(4, 8), presets=("continuous",))
    assert found.recommended is None
    assert found.code is None
    assert found.frontier == []
    assert "no stable policy" in found.answer
    assert "continuous(batch_size=8)" in found.answer
    assert found.figures()["tried"][0]["p99_s"] is None

    found = tune(
        traffic(0.5, 300),
        service=SERVICE,
        target_p99_s=1.0,
        batch_sizes=(8,),
        presets=("continuous", "block_refill"),
    )
    assert found.recommended is None
    assert "no policy reaches p99 <= 1 s" in found.answer
    assert [each.candidate.preset for each in found.frontier] == ["continuous"]


def test_the_frontier_is_what_nobody_beats():
    def tried(p99_s, headroom):
        return Tried(
            candidate=Candidate("continuous", 1),
            capacity_per_s=1.0,
            p99_s=p99_s,
            mean_s=p99_s,
            headroom=headroom,
        )

    all_of_them = (
        tried(3.0, 2.0), tried(1.0, 1.0), tried(2.0, 0.5), tried(3.0, 1.5), tried(math.inf, 9.0)
    )  # fmt: skip
    found = Tuning(1.0, None, Capacity(max_num_seqs=1), all_of_them, None)
    assert [(each.p99_s, each.headroom) for each in found.frontier] == [(1.0, 1.0), (3.0, 2.0)]


def test_bad_arguments_are_named():
    for name, value in (("target_p99_s", math.nan), ("tolerance", 0.0), ("target_p99_s", -1.0)):
        with pytest.raises(ConfigError, match=name):
            tune(traffic(1.0), service=SERVICE, **{name: value})
    work = Work(10, 32, 32, 1, 1, (1,))
    with pytest.raises(ConfigError, match="a rate is needed"):
        tune([(0.0, work)], service=SERVICE)
    with pytest.raises(ConfigError, match="no candidates"):
        tune(traffic(1.0), service=SERVICE, presets=())
    with pytest.raises(ConfigError, match="batch_size"):
        tune(traffic(1.0), service=SERVICE, batch_sizes=(0,))
    with pytest.raises(ConfigError, match="unknown policy 'best'"):
        tune(traffic(1.0), service=SERVICE, presets=("best",))


def test_many_slots_are_measured_with_fewer_requests_and_as_well():
    slots = 1024
    arguments = {
        "policy": presets.continuous(slots),
        "capacity": Capacity(max_num_seqs=slots),
        "service": SERVICE,
    }
    seen = []
    workload = OpenLoop(Poisson(1.0), gsm8k())
    rate = saturated_rate(workload, progress=lambda *each: seen.append(each), **arguments)
    assert seen[-1] == (20 * slots, 20 * slots)
    assert rate == pytest.approx(slots / (290.39 * STEP_S), rel=0.02)


def test_long_requests_whose_blocks_are_reported_are_measured_with_few():
    shapes = Shapes(Fixed(4000), decoder=EvenSteps(1))
    capacity = Capacity(max_num_seqs=4, num_pages=10**6, memory=GrowingKV(page_size=32))
    seen = []
    rate = saturated_rate(
        OpenLoop(Poisson(1.0), shapes),
        policy=presets.continuous(4),
        capacity=capacity,
        service=Constant(0.5),
        progress=lambda *each: seen.append(each),
    )
    assert len(seen) == 250  # of 2000
    assert rate == pytest.approx(4 / (4000 * 0.5), rel=1e-9)


def test_a_burst_is_what_is_over_before_one_batch():
    work = Work(10, 32, 32, 1, 1, (1,))
    burst = [(0.1 * i, work) for i in range(10)]
    assert is_burst(burst, 1.0, 16)
    assert is_burst([(100.0 + at, each) for at, each in burst], 1.0, 16)
    assert is_burst(SpedUp(burst, 2.0), 1.0, 16)
    assert not is_burst(burst, 100.0, 16)
    assert not is_burst(traffic(1e9, 10), 1.0, 16)  # its rate is known
    assert not is_burst(SpedUp(traffic(1e9, 10), 2.0), 1.0, 16)
    found = tune(burst, service=SERVICE, batch_sizes=(16,), presets=("continuous",))
    assert found.recommended is not None
    assert found.recommended.headroom >= 1
    found = tune(
        burst, service=SERVICE, batch_sizes=(16,), presets=("continuous",), target_p99_s=9.0
    )
    assert found.recommended is not None


def test_what_can_be_iterated_once_only_is_refused():
    arguments = {"capacity": Capacity(max_num_seqs=4), "service": SERVICE}
    with pytest.raises(ConfigError, match="only once"):
        compare({"a": presets.continuous(4)}, iter(traffic(1.0)), **arguments)
    with pytest.raises(ConfigError, match="only once"):
        tune(iter(traffic(1.0)), service=SERVICE)
    with pytest.raises(ConfigError, match="only once"):
        SpedUp(iter(traffic(1.0)), 2.0)
    with pytest.raises(ConfigError, match="sequence of names"):
        tune(traffic(1.0), service=SERVICE, presets="continuous")


def test_timeouts_share_one_measurement(monkeypatch):
    calls = []

    def measured(*_, **options):
        calls.append(options["policy"].name)
        return 2.0

    monkeypatch.setattr("dllm_sched.sim.tuning.saturated_rate", measured)
    tune(traffic(0.2, 100), service=SERVICE, batch_sizes=(4, 8))
    assert sorted(calls) == ["block_refill"] * 2 + ["continuous"] * 2 + ["fixed_fill"] * 2


def test_a_backlog_is_counted_as_the_engine_counts() -> None:
    """Steps of one row of 32 tokens; the prompt of 100 in the first of each request's ten alone."""
    work = Work(100, 32, 32, 1, 10, (10,))
    rate = saturated_rate(
        [(0.0, work)] * 50,
        policy=presets.continuous(1),
        capacity=Capacity(max_num_seqs=1, window_blocks=1),
        service=Linear(1.0, token_s=0.01),
        phases=True,
    )
    assert rate == pytest.approx(1 / (10 * 1.32 + 1.0))
