"""Arrival processes, traces and loops: rates, dispersions, streams, and readable faults.

A dispersion (variance over mean of the counts in a window) that is measured over n windows has a
relative standard error of about sqrt(2 / n). All seeds are fixed.
"""

import gzip
import itertools
import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from dllm_sched import ConfigError
from dllm_sched.sim.arrivals import (
    MMPP,
    ClientMix,
    GammaRenewal,
    Poisson,
    WeibullRenewal,
    burstiness,
)
from dllm_sched.sim.lengths import Fixed, Uniform
from dllm_sched.sim.shapes import EvenSteps, Shapes, gsm8k
from dllm_sched.sim.workloads import (
    ClosedLoop,
    OpenLoop,
    Replay,
    Trace,
    servegen_clients,
    shipped_traces,
)

TWO_STATE = MMPP.two_state(50, 120, leave_first=0.2, leave_second=0.6)
CLIENTS = ClientMix([(k, 600.0 * w, 2.0 + k, 1.0, "Gamma") for k in range(3) for w in range(50)])
PROCESSES = [
    Poisson(5.0),
    GammaRenewal(5.0, 3.0),
    WeibullRenewal(5.0, cv=3.0),
    WeibullRenewal(5.0, shape=0.6),
    TWO_STATE,
    MMPP((50, 0, 20), ((-1, 0.5, 0.5), (1, -2, 1), (1, 1, -2))),
    CLIENTS,
]


def _until(process, seconds, seed=1):
    return itertools.takewhile(float(seconds).__gt__, process.times(seed))


# Process, window, seconds, rate, dispersion in the window, relative tolerance of it; the gaps' cv.
KNOWN = {
    "poisson": (Poisson(5.0), 10.0, 40_000, 5.0, 1.0, 0.08, 1.0),
    # The dispersion of a renewal process tends to cv^2; the windows hold 2,000 arrivals.
    "gamma": (GammaRenewal(5.0, 3.0), 400.0, 400_000, 5.0, 9.0, 0.15, 3.0),
    "even gamma": (GammaRenewal(5.0, 0.5), 40.0, 40_000, 5.0, 0.25, 0.15, 0.5),
    "weibull": (WeibullRenewal(5.0, cv=2.0), 400.0, 400_000, 5.0, 4.0, 0.15, 2.0),
    "weibull by shape": (WeibullRenewal(5.0, shape=0.5), 400.0, 400_000, 5.0, 5.0, 0.2, 2.236),
    # Limit 35.0278, and (1 - e^-4) / 4 of what exceeds 1 less in 5 s.
    "mmpp": (TWO_STATE, 5.0, 40_000, 67.5, 26.677, 0.06, None),
    # Likewise (1 - e^-80) / 80 less in 100 s.
    "mmpp, long window": (TWO_STATE, 100.0, 100_000, 67.5, 34.602, 0.15, None),
    # Stays of 1/20 s with 3 and 12 arrivals a second: 1 + 2 / 4 * 81 / (7.5 * 40) = 1.135.
    "fast mmpp": (
        MMPP.two_state(3, 12, leave_first=20, leave_second=20), 10.0, 40_000, 7.5, 1.1347, 0.08,
        None,
    ),
    # On for 1 s at 40, off for 3 s: rate 10, r = 4/3; 1 + 2 (3/16) 1600 / (10 * 4/3) = 46 in the
    # limit, and (1 - e^-80) / 80 of the 45 less in a minute.
    "on and off": (
        MMPP.two_state(40, 0, leave_first=1, leave_second=1 / 3), 60.0, 120_000, 10.0, 45.44, 0.12,
        None,
    ),
    # The busy state of TWO_STATE split in two that swap: a chain of three states.
    "three states": (
        MMPP((50, 120, 120), ((-0.2, 0.1, 0.1), (0.6, -5.6, 5), (0.6, 5, -5.6))),
        5.0, 40_000, 67.5, 26.677, 0.06, None,
    ),
    # Three Poisson clients of 2, 3 and 4 a second.
    "clients": (CLIENTS, 10.0, 30_000, 9.0, 1.0, 0.08, 1.0),
    # One client of cv 3 whose rate changes from window to window: in windows of its own time cv^2.
    "client": (
        ClientMix([(0, 600.0 * w, 5.0, 3.0, "Weibull") for w in range(700)]),
        400.0, 420_000, 5.0, 9.0, 0.25, 3.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KNOWN)
def test_rate_dispersion_and_cv(case):
    process, window, seconds, rate, dispersion, tolerance, cv = KNOWN[case]
    assert process.rate == pytest.approx(rate)
    found = burstiness(_until(process, seconds), [window])
    # Five standard errors of the mean of the windows' counts.
    error = 5 * math.sqrt(dispersion / (rate * seconds))
    assert found.num_arrivals / seconds == pytest.approx(rate, rel=error)
    assert found.dispersion[window] == pytest.approx(dispersion, rel=tolerance)
    if cv is not None:
        assert found.cv == pytest.approx(cv, rel=0.03)


def test_arrivals_see_the_weighted_rate():
    """A second after an arrival of the MMPP brings more than the time average of 67.5.

    The rate that an arrival sees is 81.11; it relaxes at 0.8 a second, so that the next tenth of a
    second has 67.5 + 13.61 (1 - e^-.08) / .08 = 80.58 a second.
    """
    times = np.fromiter(_until(TWO_STATE, 20_000), float)
    after = np.searchsorted(times, times + 0.1) - np.arange(1, len(times) + 1)
    assert after.mean() / 0.1 == pytest.approx(80.58, rel=0.01)


@pytest.mark.parametrize("process", PROCESSES, ids=lambda each: type(each).__name__)
def test_instants_never_fall_and_seeds_repeat(process):
    first = list(itertools.islice(process.times(3), 20_000))
    assert first[0] >= 0
    assert first == sorted(first)
    assert first == list(itertools.islice(process.times(3), 20_000))
    assert first != list(itertools.islice(process.times(4), 20_000))


@pytest.mark.parametrize("process", PROCESSES, ids=lambda each: type(each).__name__)
def test_another_rate(process):
    other = process.at_rate(2.5)
    assert other.rate == pytest.approx(2.5)
    seconds = 20_000
    count = sum(1 for _ in _until(other, seconds, seed=2))
    assert count / seconds == pytest.approx(2.5, rel=0.1)


def test_a_single_state_is_poisson():
    found = burstiness(_until(MMPP((4,), ((0,),)), 20_000), [10])
    assert found.rate == pytest.approx(4, rel=0.02)
    assert found.dispersion[10] == pytest.approx(1, rel=0.1)


def test_a_client_mix_follows_its_windows():
    mix = ClientMix(
        [(0, 600, 10.0, 4.0, "Gamma"), (0, 1200, 0.0, 1.0, "Gamma"), (1, 1800, 3.0, 2.0, "Weibull")]
    )
    assert mix.rate == pytest.approx(13 / 4)
    times = list(mix.times(0))
    counts = Counter(int(t // 600) for t in times)
    assert set(counts) == {1, 3}
    # Standard deviations: 4 * sqrt(6000) = 310, 2 * sqrt(1800) = 85.
    assert counts[1] == pytest.approx(6000, abs=1240)
    assert counts[3] == pytest.approx(1800, abs=340)
    later = ClientMix(mix.windows, start_s=1200, end_s=2400)
    assert later.rate == 1.5
    assert min(later.times(0)) >= 600


def test_gaps_stretch_across_windows():
    """A rate of one per three windows still gives its arrivals, evenly."""
    mix = ClientMix([(0, 600.0 * w, 1 / 1800, 0.05, "Gamma") for w in range(3000)])
    times = np.array(list(mix.times(0)))
    assert len(times) == pytest.approx(1000, abs=5)
    assert np.diff(times).std() / 1800 == pytest.approx(0.05, rel=0.1)


def test_servegen_clients():
    mix = servegen_clients()
    windows = mix.windows
    assert len(windows) == 19_640
    assert len({window.client for window in windows}) == 35
    cvs = np.array([window.cv for window in windows])
    rates = np.array([window.rate for window in windows])
    percentiles = np.percentile(cvs, [10, 50, 90, 99])
    for found, known in zip(percentiles, (0.99, 1.19, 5.92, 27.9), strict=True):
        assert found == pytest.approx(known, rel=0.01)
    assert float(rates @ cvs / rates.sum()) == pytest.approx(2.58, abs=0.005)
    assert mix.rate == pytest.approx(1063.0, rel=1e-3)


def test_a_servegen_day():
    """The fourth day at a fiftieth of its rate, far burstier than Poisson."""
    day = servegen_clients(start_s=3 * 86_400, end_s=4 * 86_400, rate_scale=0.02)
    assert day.rate == pytest.approx(0.02 * 1151.1, rel=1e-3)
    found = burstiness(day.times(1), [1, 60])
    assert found.num_arrivals / 86_400 == pytest.approx(day.rate, rel=0.03)
    assert found.span_s <= 86_400
    assert found.dispersion[60] > 20


# Rows, rate, dispersions in 1, 10 and 60 s, cv of the gaps.
TRACES = {
    "azure2023_conv": (9683, 5.554, 1.3, 3.05, 12.94, 1.07),
    "azure2023_code": (4409, 3.1, 14.51, 82.87, 219.47, 14.1),
    "azure2024_conv_thinned": (2940, 0.061, 1.01, 1.09, 1.79, 1.15),
    "mooncake_conversation": (6015, 3.198, 7.51, 2.0, 2.89, 2.93),
    "mooncake_synthetic": (1996, 3.748, 1.03, 1.12, 0.72, 1.0),
    "burstgpt1_opening": (191, 0.006, 1.02, 1.17, 1.67, 3.41),
}


def test_every_shipped_trace_is_known():
    assert set(shipped_traces()) == set(TRACES)


@pytest.mark.parametrize("name", TRACES)
def test_shipped_traces_are_as_bursty_as_the_real_ones(name):
    rows, rate, *dispersions, cv = TRACES[name]
    found = burstiness(arrival for arrival, _ in Trace.shipped(name))
    assert found.num_arrivals == rows
    assert round(found.rate, 3) == rate
    assert found.cv == pytest.approx(cv, abs=0.0051)
    for window, known in zip((1, 10, 60), dispersions, strict=True):
        assert found.dispersion[window] == pytest.approx(known, abs=0.0051)


def test_lengths_of_a_trace():
    rows = list(Trace.shipped("azure2023_conv").rows())
    assert np.median([prompt for _, prompt, _ in rows]) == 1035
    assert np.median([output for _, _, output in rows]) == 141
    works = [work for _, work in Trace.shipped("azure2023_conv", max_prompt_len=1000)]
    assert max(work.prompt_len for work in works) == 1000
    # 44 and 109 tokens: 2 and 4 blocks of 32, a block every 31 steps.
    assert [work.num_blocks for work in works[:2]] == [2, 4]
    assert [work.num_steps for work in works[:2]] == [63, 125]


def test_a_grid_is_spread_by_jitter():
    plain = [at for at, _ in Trace.shipped("mooncake_conversation")]
    spread = [at for at, _ in Trace.shipped("mooncake_conversation", jitter_s=3.0, seed=5)]
    assert len(plain) == len(spread)
    assert spread == sorted(spread)
    assert len(set(plain)) < 700 < len(set(spread))
    assert np.abs(np.array(plain) + 1.5 - spread).max() <= 3
    assert burstiness(spread).cv < 1.2 < burstiness(plain).cv
    again = Trace.shipped("mooncake_conversation", jitter_s=3.0, seed=5)
    assert spread == [at for at, _ in again]


def _file(tmp_path, *lines, name="trace.csv"):
    path = tmp_path / name
    text = "".join(f"{line}\n" for line in ("arrival_s,prompt_tokens,output_tokens", *lines))
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz"])
def test_options_of_a_trace(tmp_path, name):
    path = _file(tmp_path, "0,0,0", "", "10.0,300,100", "30,20,40", name=name)
    trace = Trace(path, decoder=EvenSteps(4), speedup=10, max_prompt_len=200, max_output_len=64)
    found = list(trace)
    assert [at for at, _ in found] == [0, 1, 3]
    assert [work.prompt_len for _, work in found] == [1, 200, 20]
    assert [work.block_ends for _, work in found] == [(4,), (4, 8), (4, 8)]
    assert [work.max_new_tokens for _, work in found] == [32, 64, 64]
    assert list(trace) == found
    assert len(list(Trace(path, max_requests=2))) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("1.0,5", "line 3: 3 fields"),
        ("1.0,5,6,7", "line 3: 3 fields"),
        ("one,5,6", "line 3: arrival_s must be a number"),
        ("1.0,5.5,6", "line 3: .*tokens whole numbers"),
        ("1.0,5,", "line 3: .*tokens whole numbers"),
        ("-1.0,5,6", "line 3: arrival_s"),
        ("nan,5,6", "line 3: arrival_s"),
        ("inf,5,6", "line 3: arrival_s"),
        ("0.25,5,6", "line 3: arrival_s"),
        ("1.0,-5,6", "line 3: tokens"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, says):
    path = _file(tmp_path, "0.5,10,10", line)
    with pytest.raises(ConfigError, match=says) as caught:
        list(Trace(path))
    assert str(path) in str(caught.value)


def test_malformed_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        list(Trace(tmp_path / "none.csv"))
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(ConfigError, match="empty"):
        list(Trace(tmp_path / "empty.csv"))
    (tmp_path / "header.csv").write_text("time,in,out\n1,2,3\n")
    with pytest.raises(ConfigError, match="line 1: the header must be"):
        list(Trace(tmp_path / "header.csv"))
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        list(Trace(tmp_path / "bytes.csv"))
    whole = _file(tmp_path, *["1.0,5,6"] * 5000, name="cut.csv.gz").read_bytes()
    (tmp_path / "cut.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot be read"):
        list(Trace(tmp_path / "cut.csv.gz"))
    with pytest.raises(ConfigError, match="azure2023_code"):
        Trace.shipped("azure2025")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("0,600,x,1,Gamma", "line 2: client must be"),
        ("0,600,1,0,Gamma", "line 2: needs"),
        ("0,600,1,1,Normal", "line 2: needs"),
        ("0,600,nan,1,Gamma", "line 2: needs"),
        ("0,700,1,1,Gamma", "multiples"),
    ],
)
def test_malformed_clients(tmp_path, line, says):
    path = tmp_path / "clients.csv"
    path.write_text(f"client,t_s,rate,cv,pattern\n{line}\n")
    with pytest.raises(ConfigError, match=says):
        ClientMix.load(path)


def test_open_loop_repeats_and_stops():
    loop = OpenLoop(Poisson(2.0), gsm8k(), seed=9, max_requests=1000)
    first = list(loop)
    assert len(first) == 1000
    assert first == list(loop)
    assert first[:500] == list(OpenLoop(Poisson(2.0), gsm8k(), seed=9, max_requests=500))
    early = list(OpenLoop(Poisson(2.0), gsm8k(), seed=9, until_s=100))
    assert early == [each for each in first if each[0] < 100]
    assert list(OpenLoop(CLIENTS, gsm8k()))[-1][0] <= 30_000


def test_work_does_not_depend_on_the_arrivals():
    """Comparisons across loads and processes see the same requests."""
    shapes = gsm8k(Uniform(10, 500))
    sequences = [
        [work for _, work in OpenLoop(process, shapes, seed=4, max_requests=9000)]
        for process in (Poisson(1.0), Poisson(7.0), TWO_STATE, CLIENTS)
    ]
    assert all(each == sequences[0] for each in sequences)


def test_streaming_needs_no_memory():
    loop = OpenLoop(TWO_STATE, gsm8k(), max_requests=300_000)
    sum(1 for _ in itertools.islice(loop, 10_000))  # fills the caches
    tracemalloc.start()
    count = sum(1 for _ in loop)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 300_000
    assert peak < 4_000_000


def test_replay():
    work = gsm8k().work(5, 6)
    replay = Replay([(0.0, work), (0.0, work), (2.5, work)])
    assert list(replay) == list(replay) == [(0.0, work), (0.0, work), (2.5, work)]
    for bad in ([(1.0, work), (0.5, work)], [(math.nan, work)]):
        with pytest.raises(ConfigError):
            Replay(bad)


def test_closed_loop():
    """Each client has at most one request; the rate is what Little's law says."""
    loop = ClosedLoop(8, gsm8k(), think_s=3.0, seed=2)
    run = loop.start()
    pending = run.first()
    assert [each.client for each in sorted(pending, key=lambda each: each.client)] == list(range(8))
    assert pending == sorted(pending, key=lambda each: each.arrival_s)
    now = 0.0
    for _ in range(20_000):
        pending.sort(key=lambda each: each.arrival_s, reverse=True)
        arrival = pending.pop()
        now = arrival.arrival_s
        pending.append(run.after(arrival.client, now + 1.0))
    # 8 clients, 3 s to think and 1 s of service each.
    assert 20_000 / now == pytest.approx(2.0, rel=0.03)


def test_closed_loop_work_does_not_depend_on_who_finishes_first():
    loop = ClosedLoop(3, gsm8k(), think_s=1.0, seed=6)
    one, other = loop.start(), loop.start()
    one.first()
    other.first()
    ahead = [one.after(client, 0.0) for client in (0, 1, 2, 0, 1, 2)]
    behind = [other.after(client, 0.0) for client in (2, 2, 1, 1, 0, 0)]
    assert sorted(ahead) == sorted(behind)


def test_closed_loop_options():
    run = ClosedLoop(5, gsm8k(), think="constant", think_s=2.0, max_requests=7).start()
    assert [each.arrival_s for each in run.first()] == [2.0] * 5
    assert run.after(0, 10.0).arrival_s == 12.0
    assert run.after(0, 20.0).arrival_s == 22.0
    assert run.after(0, 30.0) is None
    few = ClosedLoop(5, gsm8k(), max_requests=2).start()
    assert [each.client for each in few.first()] == [0, 1]


def test_burstiness_by_hand():
    # Counts 3, 1, 0, 2 of the four complete seconds; the fifth is not complete.
    found = burstiness([0.0, 0.5, 0.9, 1.1, 3.2, 3.4, 4.5], [1, 100])
    assert found.num_arrivals == 7
    assert found.span_s == 4.5
    assert found.dispersion[1] == pytest.approx((5 / 3) / 1.5)
    assert math.isnan(found.dispersion[100])
    assert found.cv == pytest.approx(np.std([0.5, 0.4, 0.2, 2.1, 0.2, 1.1]) / 0.75)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Poisson(0),
        lambda: Poisson(math.nan),
        lambda: Poisson(1).at_rate(0),
        lambda: GammaRenewal(1, 0),
        lambda: WeibullRenewal(1),
        lambda: WeibullRenewal(1, cv=1, shape=1),
        lambda: WeibullRenewal(1, shape=0.001),
        lambda: MMPP((0, 0), ((-1, 1), (1, -1))),
        lambda: MMPP((1, 2), ((-1, 1),)),
        lambda: MMPP((1, 0), ((-1, 1), (0, 0))),  # ends in silence
        lambda: ClientMix([]),
        lambda: ClientMix([(0, 0.0, 1.0, 1.0, "Gamma")] * 2),
        lambda: ClientMix([(0, 0.0, 1.0, 1.0, "Normal")]),
        lambda: ClientMix([(0, 0.0, 1.0, 1.0, "Gamma")], start_s=600),
        lambda: ClientMix([(0, 0.0, 1.0, 1.0, "Gamma")], end_s=700),
        lambda: OpenLoop(5.0, gsm8k()),
        lambda: OpenLoop(Poisson(1), 5),
        lambda: OpenLoop(Poisson(1), gsm8k(), seed=-1),
        lambda: OpenLoop(Poisson(1), gsm8k(), max_requests=0),
        lambda: OpenLoop(Poisson(1), gsm8k(), until_s=math.nan),
        lambda: Trace("x.csv", speedup=0),
        lambda: Trace("x.csv", jitter_s=-1),
        lambda: Trace("x.csv", max_prompt_len=0),
        lambda: Trace("x.csv", max_new_tokens=5),
        lambda: ClosedLoop(0, gsm8k()),
        lambda: ClosedLoop(1, Fixed(1)),
        lambda: ClosedLoop(1, gsm8k(), think_s=-1),
        lambda: ClosedLoop(1, gsm8k(), think="hard"),
        lambda: Shapes(Fixed(1), prompt=None),
        lambda: burstiness([]),
        lambda: burstiness([0.0, 2.0, 1.0]),
        lambda: burstiness([1.0, 1.0, 1.0]),
        lambda: burstiness([-1.0, 0.0, 1.0]),
        lambda: burstiness([0.0, 1.0, math.nan]),
        lambda: burstiness([0.0, 1.0, 2.0], [0]),
    ],
)
def test_bad_arguments(call):
    with pytest.raises(ConfigError):
        call()


def test_a_chain_that_changes_all_the_time_is_refused():
    fast = MMPP.two_state(1.0, 2.0, leave_first=1e9, leave_second=1e9)
    with pytest.raises(ConfigError, match="times per arrival"):
        next(fast.times(0))


def test_burstiness_of_a_span_with_too_many_windows_is_refused():
    with pytest.raises(ConfigError, match="longer windows_s"):
        burstiness([0.0, 1.0, 1e12])
    assert burstiness([0.0, 1.0, 1e12], windows_s=[1e9]).num_arrivals == 3
