"""The main job: what it prints, what it refuses, and what Ctrl-C does."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from dllm_sched.journal import replay

pytest.importorskip("torch")
pytest.importorskip("rich")

PATIENCE_S = 300  # far more than anything here takes
EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_llada_d2f.py"
BIG = 9999999999999999999999
WHOLE_NUMBERS = (
    "--requests",
    "--batch-size",
    "--threads",
    "--max-new-tokens",
    "--block-length",
    "--seed",
    "--lines",
)
KEYS = {
    "requests_per_s",
    "tokens_per_s",
    "latency_mean_s",
    "latency_p50_s",
    "latency_p99_s",
    "occupancy",
    "wasted_row_steps",
    "forward_share",
    "scheduler_us_per_step",
    "num_requests",
    "num_exact",
}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("serve_llada_d2f", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serve(example, capsys):
    """Run the example in this process; return exit code, standard output, standard error."""

    def run(*options):
        try:
            code = example.main(["--threads", "1", *map(str, options)])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def write(tmp_path):
    def to_file(name, text):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def test_a_live_run_replays_to_the_same_decisions(serve, tmp_path):
    code, _, _ = serve("--requests", 12, "--batch-size", 3, "--journal", tmp_path / "runs")
    assert code == 0
    for policy in ("per_request", "fixed_fill", "continuous"):
        replayed = replay(tmp_path / "runs" / f"{policy}.jsonl")
        assert replayed.difference is None
        assert replayed.num_requests == 12
        assert replayed.num_steps > 12
    code, _, err = serve("--requests", 1, "--policy", "continuous", "--journal", tmp_path / "runs")
    assert code == 2
    assert "not empty" in err


def test_the_three_policies_serve_the_same_requests_and_answer_them_alike(serve):
    code, out, err = serve("--requests", 8, "--batch-size", 3, "--json", "--timeout", 0.01)
    assert code == 0, err
    results = json.loads(out)
    assert list(results) == ["per_request", "fixed_fill", "continuous"]
    for metrics in results.values():
        assert set(metrics) == KEYS
        assert metrics["num_requests"] == 8
        assert 0 < metrics["latency_p50_s"] <= metrics["latency_p99_s"]
        assert metrics["latency_mean_s"] <= metrics["latency_p99_s"]
        assert 0 < metrics["occupancy"] <= 1
        assert 0 < metrics["forward_share"] < 1
        assert metrics["tokens_per_s"] >= 0
        assert metrics["scheduler_us_per_step"] > 0
    assert len({metrics["num_exact"] for metrics in results.values()}) == 1
    assert results["per_request"]["occupancy"] == pytest.approx(1 / 3)
    assert results["continuous"]["wasted_row_steps"] == 0, "a free slot is filled at the next step"


def test_each_finished_request_is_a_line_and_the_table_comes_last(serve):
    code, out, _ = serve("--requests", 5, "--batch-size", 2, "--policy", "continuous")
    assert code == 0
    lines = [line for line in out.splitlines() if " latency " in line and " -> " in line]
    assert {line.split()[0] for line in lines} == {f"r{i}" for i in range(5)}
    assert all(" steps " in line and " blocks " in line and " wait " in line for line in lines)
    assert "requests/s" in out[out.rindex(" -> ") :]


@pytest.mark.parametrize(
    ("options", "num_lines"),
    [
        ([], 10),
        (["--lines", 2], 2),
        (["--lines", 0], 0),
        (["--lines", "all"], 13),
        (["--json"], 0),
        (["--json", "--lines", 3], 3),
    ],
)
def test_a_few_lines_are_shown_unless_told_otherwise(serve, options, num_lines):
    code, out, err = serve("--requests", 13, "--policy", "continuous", *options)
    assert code == 0
    shown = err if "--json" in options else out
    assert shown.count(" -> ") == num_lines
    assert (f"and {13 - num_lines} more" in shown) == (0 < num_lines < 13)


def test_a_trace_says_when_and_how_long(serve, write):
    trace = write(
        "trace.csv",
        "arrival_s,prompt_tokens,output_tokens\n0.0,12,8\n0.01,30,20\n0.02,5,3\n",
    )
    code, out, err = serve("--trace", trace, "--policy", "continuous", "--json", "--lines", "all")
    assert code == 0, err
    metrics = json.loads(out)["continuous"]
    assert metrics["num_requests"] == 3
    assert metrics["num_exact"] is None
    assert "30 random tokens" in err


def test_prompts_come_from_lines_or_json_lines_and_are_repeated(serve, write):
    plain = write("prompts.txt", "spell a 12\n\nspell b 7\n")
    lines = write("prompts.jsonl", '{"prompt": "spell a 12"}\n{"prompt": "spell b 7"}\n')
    shown = []
    for path in (plain, lines):
        code, out, err = serve("--prompts", path, "--requests", 3, "--policy", "per_request")
        assert code == 0, err
        shown.append([line.split("s  ")[-1] for line in out.splitlines() if " -> " in line])
    assert shown[0] == shown[1]
    assert [line.split(" -> ")[0] for line in shown[0]] == ["spell a 12", "spell b 7", "spell a 12"]


def test_any_preset_can_be_served(serve):
    code, out, _ = serve("--policy", "block_refill", "--requests", 4, "--json")
    assert code == 0
    assert json.loads(out)["block_refill"]["num_requests"] == 4


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "", "t.csv: is empty"),
        ("t.csv", "arrival_s,prompt_tokens\n0,1\n", "line 1: the header lacks output_tokens"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n", "no arrivals"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n0,1,1\n\nx,1,1\n", "line 4: arrival_s"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n1,1,1\n0.5,1,1\n", "line 3: arrival_s"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\nnan,1,1\n", "line 2: arrival_s"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n0,1.5,1\n", "line 2: prompt_tokens"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n0,1,0\n", "line 2: output_tokens"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n0,1\n", "line 2: output_tokens"),
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n0,9999,4\n", "line 2: prompt_tokens"),
        ("t.csv", f"arrival_s,prompt_tokens,output_tokens\n0,{BIG},4\n", "line 2: prompt_tokens"),
        ("t.csv", f"arrival_s,prompt_tokens,output_tokens\n0,4,{BIG}\n", "line 2: output_tokens"),
        ("t.csv", f"arrival_s,prompt_tokens,output_tokens\n0,{10**9},4\n", "line 2: prompt_tok"),
        ("t.csv", f"arrival_s,prompt_tokens,output_tokens\n{'9' * 400},4,4\n", "line 2: arrival"),
        ("t.csv", f"arrival_s,prompt_tokens,output_tokens\n0,{'1' * 200_000},4\n", "line 2: not"),
        ("p.jsonl", '{"prompt": "\\ud800"}\n', "line 1: the prompt is no text"),
        ("p.jsonl", '{"prompt": 1}\n' + "[" * 100_000, "line 1: expected"),
        ("p.jsonl", '{"prompt": "spell a 1"}\n' + "[" * 100_000, "line 2: not JSON"),
        ("p.jsonl", '{"prompt": "spell a 1"}\n{"prompt": 7}\n', "line 2: expected"),
        ("p.jsonl", '{"prompt": "spell a 1"}\n{"prompt\n', "line 2: not JSON"),
        ("p.txt", "spell a 1\nspell a xyzzy\n", "line 2: not a word of the box"),
    ],
)
def test_a_bad_file_is_named_with_its_line(serve, write, name, text, message):
    option = "--trace" if name.endswith("csv") else "--prompts"
    code, out, err = serve(option, write(name, text))
    assert code == 2
    assert out == ""
    assert [line for line in err.splitlines() if line.startswith("error: ")] == err.splitlines()[
        -1:
    ]
    assert message in err


@pytest.mark.parametrize(
    "options",
    [
        ["--policy", "nonsense"],
        ["--batch-size", "0"],
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--skip-threshold", "1.5"],
        ["--timeout", "-1"],
        ["--model", "./no/such/directory"],
        ["--trace", "no-such-file.csv"],
        ["--dtype", "int32"],
        ["--device", "abacus"],
        *([option, str(BIG)] for option in WHOLE_NUMBERS),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(serve, options):
    code, out, err = serve(*options)
    assert code == 2
    assert out == ""
    assert err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in err


def test_a_trace_may_begin_with_a_byte_order_mark(serve, write):
    trace = write("trace.csv", "\ufeffarrival_s,prompt_tokens,output_tokens\n0.0,12,8\n")
    code, out, err = serve("--trace", trace, "--policy", "continuous", "--json")
    assert code == 0, err
    assert json.loads(out)["continuous"]["num_requests"] == 1


@contextmanager
def started(*command, **options):
    """Start Python as at a terminal, where Ctrl-C is heard; kill it when patience ends."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # else it starts deaf too
    try:
        process = subprocess.Popen(
            [sys.executable, "-u", *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    timer = threading.Timer(PATIENCE_S, process.kill)
    timer.daemon = True
    timer.start()
    try:
        with process:
            yield process
    finally:
        timer.cancel()


def test_ctrl_c_drains_and_reports_what_was_done():
    options = ["--json", "--requests", "2000", "--threads", "1", "--lines", "all"]
    with started(EXAMPLE, *options) as process:
        for line in process.stderr:
            if " -> " in line:  # it serves
                break
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, rest
    results = json.loads(out)
    assert list(results) == ["per_request"]
    assert 1 <= results["per_request"]["num_requests"] < 2000
    assert "cancelled" in rest
    assert "interrupted during per_request" in rest
    assert "Traceback" not in rest


def test_ctrl_c_during_the_imports_is_one_word(tmp_path):
    press = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "torch.py").write_text(press)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with started(EXAMPLE, env=os.environ | {"PYTHONPATH": path}) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


LATE = """
import atexit, json, os, runpy, signal, sys
import dllm_sched_hf

def press():
    os.kill(os.getpid(), signal.SIGINT)

def dumps(value, **options):
    if isinstance(value, dict) and "continuous" in value:
        press()  # while it reports
    return true_dumps(value, **options)

def run(engine, batch):
    if interrupts and any(row.request.id == "r9" for row in batch.joined):
        press()
    return true_run(engine, batch)

true_dumps, json.dumps = json.dumps, dumps
true_run, dllm_sched_hf.D2FEngine.run = dllm_sched_hf.D2FEngine.run, run
interrupts = sys.argv.pop(1) == "yes"
atexit.register(press)  # while it ends
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("interrupts", "code"), [("yes", 130), ("no", 0)])
def test_ctrl_c_after_the_serving_changes_nothing(interrupts, code):
    options = "--json --requests 12 --batch-size 2 --threads 1 --policy continuous".split()
    with started("-c", LATE, interrupts, EXAMPLE, *options) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, err
    assert list(json.loads(out)) == ["continuous"]
    assert "Traceback" not in err
