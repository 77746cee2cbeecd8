"""The benchmark of a step: its figures add up, and its GPU path runs on a CPU in toy size."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from dllm_sched_hf.modeling_llada import PARTS, compiled_parts  # noqa: E402 - needs all of them

ROOT = Path(__file__).parents[2]
SCRIPT = "benchmarks/engine.py"
FIELDS = {
    "batch_size",
    "steps",
    "rows_per_step",
    "tokens_per_forward",
    "answer_tokens_per_forward",
    "wasted_tokens",
    "step_s",
    "shares",
    "requests_per_s",
    "tokens_per_s",
    "times_dispatch",
    "alike",
    "alone",
    "dense",
    "gpu_busy",
    "graph_step_s",
    "graph_requests_per_s",
    "graph_gain",
    "graph_gpu_busy",
    "graph_captures",
    "graph_replays",
    "graph_wasted",
    "graph_alike",
    "peak_bytes",
    "budget_bytes",
}
MACHINE = {
    "processor",
    "cores",
    "gpu",
    "python",
    "torch",
    "cuda",
    "threads",
    "dtype",
    "commit",
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmark_of_the_engine", ROOT / SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    return tmp_path_factory.mktemp("pictures") / "engine.png"


FEW = ["--rounds", "1", "--samples", "3"]


@pytest.fixture(scope="module")
def toy(picture):
    """From end to end. In float64 no decision of random weights hangs on a batch's shape."""
    arguments = "--model llada-8b-shape --toy --dtype float64 --batch-sizes 4,8 --graphs --json"
    command = [sys.executable, SCRIPT, *FEW, *arguments.split(), "--plot", str(picture)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def golden(script):
    """The recorded tokens and forwards must come out, or it raises; with a step in flight, too."""
    arguments = "--model golden --recordings d2f_aggressive_b16,fast_dllm_prefix_factor2_b8"
    more = ["--batch-sizes", "8", "--requests", "10", "--ahead"]
    options = script.parse_args([*FEW, *arguments.split(), *more])
    results = [script.measure(work, options) for work in script.workloads(options)]
    return {"machine": script.machine(options), "workloads": results}


def test_blocks_are_compiled_if_asked(script, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda part: asked.append(part) or part)
    compiled_parts.cache_clear()
    options = script.parse_args(["--compile", "--requests", "3", "--batch-sizes", "2", *FEW])
    (work,) = script.workloads(options)
    assert work.name == "box, compiled"
    script.measure(work, options)
    compiled_parts.cache_clear()
    assert asked == [PARTS.before, PARTS.after]


def batches(result):
    return [one for workload in result["workloads"] for one in workload["batches"]]


@pytest.mark.parametrize("name", ["toy", "golden"])
def test_every_field_is_there(name, request):
    result = request.getfixturevalue(name)
    assert result["machine"].keys() == MACHINE
    assert result["machine"]["gpu"] is None  # no figure of a GPU without one
    assert len(batches(result)) == {"toy": 3, "golden": 4}[name]
    for one in batches(result):
        assert one.keys() == FIELDS
        assert one["gpu_busy"] is None
        missing = {key for key, value in one.items() if value is None}
        graphs = {key for key in one if key.startswith("graph_")}
        no_gpu = {"gpu_busy", "graph_gpu_busy"}
        assert missing == no_gpu | (graphs if name == "golden" else set())


@pytest.mark.parametrize("name", ["toy", "golden"])
def test_the_shares_of_a_step_add_up_and_nothing_is_counted_twice(name, request):
    for one in batches(request.getfixturevalue(name)):
        assert list(one["shares"]) == ["forward", "decode", "scheduler", "driver"]
        assert all(share > 0 for share in one["shares"].values())  # the driver's is what is left
        assert sum(one["shares"].values()) == pytest.approx(1.0)
        # The same steps by another way: seconds a step, and requests in the seconds of all steps.
        assert one["step_s"] * one["steps"] * one["tokens_per_s"] == pytest.approx(
            one["answer_tokens_per_forward"] * one["steps"]
        )


@pytest.mark.parametrize("name", ["toy", "golden"])
def test_batches_give_the_tokens_of_dispatch(name, request):
    result = request.getfixturevalue(name)
    for workload in result["workloads"]:
        for one in workload["batches"]:
            assert one["alike"] == workload["requests"]
        assert workload["batches"][0]["batch_size"] == 1
        assert workload["batches"][0]["times_dispatch"] == 1.0


def test_one_slot_takes_every_forward_by_itself_and_a_slot_for_each_as_many_as_the_longest(toy):
    # The ladder in toy size: n blocks of 8 take 8 (n - 1) + 8 forwards, for 0.9 * 8 > 7.
    one, four, eight = batches(toy)
    answered = one["answer_tokens_per_forward"] * one["steps"]
    assert one["rows_per_step"] == 1.0
    assert one["steps"] == answered  # a token a forward and row
    assert eight["steps"] in {16, 24, 32}  # one of up to four blocks is the longest
    assert eight["steps"] < four["steps"] < one["steps"]
    for each in (four, eight):
        assert each["answer_tokens_per_forward"] * each["steps"] == pytest.approx(answered)
        assert each["rows_per_step"] * each["steps"] == pytest.approx(one["steps"])


@pytest.mark.parametrize("name", ["toy", "golden"])
def test_what_rows_do_not_need_is_a_small_share(name, request):
    for one in batches(request.getfixturevalue(name)):
        assert 0 <= one["wasted_tokens"] < 0.05


def test_steps_as_graphs_give_the_same_tokens(toy):
    """On a CPU nothing is captured, but all is padded as it would be."""
    for one in batches(toy):
        assert one["graph_alike"] == toy["workloads"][0]["requests"]
        assert one["graph_replays"] == 1.0
        assert 0 < one["graph_captures"] < one["steps"]
        assert 0 <= one["graph_wasted"] < 0.05
    assert any(one["graph_wasted"] for one in batches(toy))


def test_the_budget_is_weights_and_cache(toy):
    # Two layers of 64 x (64 * 4 + 3 * 128) and two norms, embedding and head of 256 x 64, a norm.
    weights = 2 * (64 * (4 * 64 + 3 * 128) + 2 * 64) + 2 * 256 * 64 + 64
    first, four, _ = batches(toy)
    per_slot = (four["budget_bytes"] - first["budget_bytes"]) / 3
    assert first["budget_bytes"] - per_slot == 8 * weights
    assert per_slot % (2 * 2 * 64 * 8) == 0  # keys and values, layers, width, bytes: whole tokens
    assert all(one["peak_bytes"] > one["budget_bytes"] for one in batches(toy))


def test_tables_show_every_batch(toy, script, capsys):
    script.tables(toy["workloads"][0], on_gpu=False)
    lines = capsys.readouterr().out.splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) == 3 * (2 + 3)
    for start in (0, 5, 10):
        assert len({line.count("|") for line in tables[start : start + 5]}) == 1
    assert not any("GPU" in line for line in lines)
    script.tables(toy["workloads"][0], on_gpu=True)
    assert capsys.readouterr().out.count("GPU busy") == 2


def test_the_picture_is_drawn(toy, picture):
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("spans", "length"),
    [
        ([], 0.0),
        ([(1, 3), (2, 5)], 4.0),
        ([(4, 6), (0, 1)], 3.0),
        ([(0, 9), (1, 2), (8, 10)], 10.0),
    ],
)
def test_kernels_that_run_at_once_count_once(spans, length, script):
    assert script.covered(spans) == length


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model llada-8b-shape", "needs --device cuda"),
        ("--toy", "--toy goes with"),
        ("--recordings nothing", "'nothing' is none"),
        ("--batch-sizes 0", "invalid sizes value"),
        ("--batch-sizes 1,99999999999", "invalid sizes value"),
        ("--threads 1000000000000", "invalid positive value"),
        ("--dtype float7", "invalid choice: 'float7'"),
        ("--device nothing", "'nothing' is not a torch device"),
        ("--device cuda", "'cuda' is not available here"),
        ("--device meta", "error: --device: device: 'meta' is not available here"),
        ("--rounds 0", "invalid positive value"),
    ],
)
def test_arguments_that_cannot_work(arguments, message, script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["engine.py", *arguments.split()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
