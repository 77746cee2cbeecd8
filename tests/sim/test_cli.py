"""The command line: what it prints, what it answers when it cannot, and its exit codes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dllm_sched import cli
from dllm_sched.sim.workloads import shipped_traces

QUICK = ["--requests", "300"]
UNSTABLE = [*QUICK, "--rate", "50"]


@pytest.fixture
def run(capsys):
    """Return (exit code, stdout, stderr) of a command line."""

    def call(*arguments):
        code = cli.main([str(each) for each in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_the_issue_s_example(run):
    code, out, err = run(
        "simulate", "--preset", "continuous", "--batch-size", 16, "--work", "gsm8k",
        "--load", 0.8, "--requests", 2000, "--json",
    )  # fmt: skip
    figures = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert figures["load"] == pytest.approx(0.8)
    assert figures["capacity_per_s"] == pytest.approx(16 / (290.39 * 0.0241), rel=0.01)
    assert figures["num_requests"] == 2000
    assert figures["unstable"] is False
    assert 1.0 <= figures["mean_over_bound"] < 1.2
    assert 7.0 < figures["latency_mean_s"] < figures["latency_p99_s"] < 20.0


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(run):
    first, again, other = (
        run("simulate", *QUICK, "--load", 0.7, "--json", "--seed", seed)[1] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_table_for_people(run):
    code, out, _ = run("simulate", *QUICK, "--preset", "fixed_fill", "--timeout", 2, "--load", 0.5)
    assert code == 0
    assert out.startswith("policy")
    assert "mean / bound" in out
    assert "that the policy can serve" in out


@pytest.mark.parametrize(
    "traffic",
    [
        ("--workload", "mmpp"),
        ("--workload", "gamma", "--cv", 3),
        ("--workload", "weibull", "--cv", 2),
        ("--workload", "servegen"),
        ("--work", "blocks:4", "--prompt", 200),
        ("--work", "geometric:5,16"),
        ("--service", "linear:0.01,0.001,1e-7"),
        ("--pages", 300, "--page-size", 32),
    ],
    ids=lambda traffic: " ".join(map(str, traffic)),
)
def test_every_kind_of_traffic_and_engine(run, traffic):
    code, out, err = run("simulate", *QUICK, "--load", 0.6, "--json", *traffic)
    assert (code, err) == (0, "")
    assert json.loads(out)["num_requests"] == 300


def test_work_and_service_from_files(run, tmp_path):
    steps, table = tmp_path / "steps.txt", tmp_path / "table.csv"
    steps.write_text("100\n200\n")
    table.write_text("rows,tokens,seconds\n1,0,0.01\n16,0,0.02\n")
    code, out, _ = run(
        "simulate", "--load", 0.5, "--json", *QUICK,
        "--work", f"steps:{steps}", "--service", f"table:{table}",
    )  # fmt: skip
    assert code == 0
    assert 100 < json.loads(out)["steps_mean"] < 200


def test_traces_shipped_and_own(run, tmp_path):
    code, out, _ = run(
        "simulate", "--workload", "trace", "--trace", "azure2023_conv", "--max-output", 512,
        "--requests", 300, "--load", 0.5, "--json",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["load"] == pytest.approx(0.5)
    own = tmp_path / "own.csv"
    own.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,10,64\n20.0,10,64\n40.0,10,64\n")
    code, out, _ = run("simulate", "--workload", "trace", "--trace", own, "--speedup", 2, "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["rate"] == pytest.approx(3 / 20)
    assert figures["num_requests"] == 3


@pytest.mark.parametrize("name", shipped_traces())
def test_tune_on_every_shipped_trace(run, name):
    code, out, _ = run(
        "tune", "--workload", "trace", "--trace", name, "--max-output", 512, "--jitter", 3,
        "--requests", 150, "--load", 0.5, "--batch-sizes", "4,8", "--timeouts", "1", "--json",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0
    assert found["code"].startswith("Scheduler(policy=presets.")
    assert found["recommended"]["p99_s"] == min(each["p99_s"] for each in found["frontier"])


@pytest.mark.parametrize("command", ["simulate", "compare", "tune"])
def test_what_cannot_keep_up_is_said_in_words(run, command):
    small = ("--batch-sizes", "2,4") if command == "tune" else ()
    code, out, _ = run(command, *UNSTABLE, *small)
    assert code == 3
    assert "serves" in out
    assert ("no stable policy" if command == "tune" else "unstable: 50 requests/s arrive") in out
    code, out, _ = run(command, *UNSTABLE, *small, "--json")
    assert code == 3
    assert json.loads(out)["unstable"] is True


def test_compare_names_policies_and_the_bound(run):
    code, out, _ = run(
        "compare", *QUICK, "--rate", 0.6, "--json", "--policy", "continuous",
        "--policy", "fixed_fill:timeout_s=2.5", "--policy", "fixed_fill:batch_size=32",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0
    assert [row["label"] for row in found["policies"]] == [
        "continuous",
        "fixed_fill(timeout_s=2.5)",
        "fixed_fill(batch_size=32)",
    ]
    assert all(row["mean_over_bound"] >= 1 for row in found["policies"])
    code, out, _ = run("compare", *QUICK, "--load", 0.3)
    assert code == 0
    assert all(name in out for name in ("continuous", "block_refill", "fixed_fill", "seed 0"))


def test_tune_prints_the_frontier_and_the_line_of_code(run):
    arguments = ("tune", *QUICK, "--rate", 0.8, "--batch-sizes", "8,16")
    code, out, _ = run(*arguments, "--timeouts", "1,inf")
    assert code == 0
    assert out.splitlines()[-1] == (
        "Scheduler(policy=presets.continuous(batch_size=16), capacity=Capacity(max_num_seqs=16))"
    )
    code, out, _ = run(*arguments, "--p99", 15, "--presets", "continuous", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["target_p99_s"] == 15
    assert found["recommended"]["headroom"] > 1
    code, out, _ = run(*arguments, "--p99", 0.5)
    assert code == 3
    assert "no policy reaches p99 <= 0.5 s" in out
    code, out, _ = run("tune", "--load", 0.4, *QUICK, "--batch-sizes", "8", "--json")
    assert code == 0
    assert json.loads(out)["rate"] == pytest.approx(0.4 * 8 / (290.39 * 0.0241), rel=0.15)


def test_plots(run, tmp_path):
    for command in ("simulate", "compare", "tune"):
        path = tmp_path / f"{command}.png"
        small = ("--batch-sizes", "16") if command == "tune" else ()
        code, _, _ = run(command, "--requests", 60, "--rate", 0.5, "--plot", path, *small)
        assert code == 0
        assert path.stat().st_size > 10_000
    code, _, err = run("simulate", "--requests", 60, "--rate", 0.5, "--plot", tmp_path / "x.gif")
    assert code == 2
    assert "plot's name ends in" in err


def test_progress_goes_to_stderr_only_if_asked(run):
    assert run("simulate", *QUICK, "--load", 0.5)[2] == ""
    code, out, err = run("simulate", *QUICK, "--load", 0.5, "--json", "--progress")
    assert code == 0
    json.loads(out)
    assert "measuring" in err


def test_every_request_as_a_line_of_csv(run, tmp_path):
    path = tmp_path / "requests.csv"
    code, _, _ = run("simulate", *QUICK, "--load", 0.5, "--csv", path)
    lines = path.read_text().splitlines()
    assert code == 0
    assert lines[0] == "latency_s,wait_s,steps"
    assert len(lines) == 301
    code, _, err = run("simulate", *QUICK, "--load", 0.5, "--csv", tmp_path / "missing" / "x.csv")
    assert code == 2
    assert "cannot write" in err


# --- configuration --------------------------------------------------------------------------------


def test_a_file_says_what_the_command_line_does_not(run, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'load = 0.5\nrequests = 300\nbatch-size = 8\npreset = "block_refill"\n'
        "json = true\nseed = 7\n"
    )
    code, out, _ = run("simulate", "--config", path)
    figures = json.loads(out)
    assert code == 0
    assert (figures["policy"], figures["seed"], figures["num_requests"]) == ("block_refill", 7, 300)
    code, out, _ = run("simulate", "--config", path, "--preset", "continuous", "--rate", "0.3")
    figures = json.loads(out)
    assert code == 0
    assert (figures["policy"], figures["rate"]) == ("continuous", 0.3)


def test_policies_in_a_file_go_by_their_registered_names(run, tmp_path):
    path = tmp_path / "compare.toml"
    path.write_text(
        "rate = 0.9\nrequests = 300\njson = true\n"
        '[[policies]]\nname = "fixed_fill"\nbatch_size = 8\ntimeout_s = inf\n'
        '[[policies]]\nname = "continuous"\nbatch_size = 16\n'
    )
    code, out, _ = run("compare", "--config", path)
    assert code == 0
    labels = [row["label"] for row in json.loads(out)["policies"]]
    assert labels == ["fixed_fill(batch_size=8, timeout_s=inf)", "continuous(batch_size=16)"]
    code, out, _ = run("compare", "--config", path, "--policy", "per_request", "--rate", "0.1")
    assert [row["label"] for row in json.loads(out)["policies"]] == ["per_request"]
    path.write_text('rate = 0.1\nrequests = 50\npolicy = "per_request"\n')
    code, out, _ = run("compare", "--config", path, "--json")
    assert [row["label"] for row in json.loads(out)["policies"]] == ["per_request"]
    path.write_text("rate = 0.5\nrequests = 50\nbatch-sizes = [4, 8]\ntimeouts = [1.0]\n")
    code, out, _ = run("tune", "--config", path, "--json")
    assert code == 0
    assert len(json.loads(out)["tried"]) == 6
    one = tmp_path / "one.toml"
    one.write_text('rate = 0.3\npolicies = [{ name = "fixed_fill", batch_size = 4 }]\n')
    code, out, _ = run("simulate", "--config", one, "--requests", 200, "--json")
    assert code == 0
    assert json.loads(out)["policy"] == "fixed_fill"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lod = 0.5", "unknown key 'lod'"),
        ("load = ", "run.toml"),
        ("load = 'much'", "--load: invalid float value"),
        ("load = true", "--load: invalid float value"),
        ("json = 1", "'json' must be true or false"),
        ("[work]\nname = 'gsm8k'", "'work' must be a plain value"),
        ("workload = 'tides'", "got 'tides'"),
        ("policies = ['continuous']", "list of tables"),
        ("policies = []", "policies is empty"),
        ("preset = 'continuous'\npolicies = [{ name = 'continuous' }]", "do not mix"),
        ("policies = [{ batch_size = 4 }]", "needs the name of a preset"),
        ("policies = [{ name = 'best' }]", "unknown policy 'best'"),
        ("policies = [{ name = 'continuous' }, { name = 'per_request' }]", "runs one policy"),
        ("policies = [{ name = 'continuous', batch_size = 4, size = 4 }]", "size"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_key(run, tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    code, out, err = run("simulate", "--config", path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "command"),
        (("guess",), "invalid choice"),
        (("simulate", "--frob"), "unrecognized arguments: --frob"),
        (("simulate",), "--rate or --load is needed"),
        (("simulate", "--rate", "0"), "--rate must be a positive finite number"),
        (("simulate", "--rate", "nan"), "--rate must be a positive finite number"),
        (("simulate", "--load", "-1"), "--load must be a positive finite number"),
        (("simulate", "--load", "inf"), "--load must be a positive finite number"),
        (("simulate", "--rate", "1", "--load", "0.5"), "exclude each other"),
        (("simulate", "--rate", "1", "--requests", "0"), "--requests: must be"),
        (("simulate", "--rate", "1", "--seed", "-1"), "--seed: must be"),
        (("simulate", "--rate", "1", "--batch-size", "0"), "must be an int >= 1"),
        (("simulate", "--rate", "1", "--max-waiting", "0"), "--max-waiting: must be"),
        (("simulate", "--rate", "1", "--preset", "best"), "unknown policy 'best'"),
        (("simulate", "--rate", "1", "--timeout", "1"), "continuous has none"),
        (
            ("simulate", "--rate", "1", "--preset", "fixed_fill", "--timeout", "nan"),
            "--timeout: must be a number >= 0",
        ),
        (("simulate", "--rate", "1", "--service", "constant:nan"), "seconds must be a positive"),
        (("simulate", "--rate", "1", "--service", "constant:fast"), "numbers expected"),
        (("simulate", "--rate", "1", "--service", "linear:1"), "3 numbers expected"),
        (("simulate", "--rate", "1", "--service", "magic"), "constant:S, linear"),
        (("simulate", "--rate", "1", "--service", "table:missing.csv"), "cannot read missing.csv"),
        (("simulate", "--rate", "1", "--work", "hard"), "gsm8k, blocks:N"),
        (("simulate", "--rate", "1", "--work", "blocks:0"), "--work blocks: must be an int >= 1"),
        (("simulate", "--rate", "1", "--work", "blocks:many"), "whole numbers expected"),
        (("simulate", "--rate", "1", "--work", "steps:missing.txt"), "missing.txt"),
        (("simulate", "--rate", "1", "--speedup", "2"), "--speedup is for --workload trace"),
        (("simulate", "--rate", "1", "--workload", "gamma", "--cv", "0"), "--cv: must be"),
        (("simulate", "--rate", "1", "--workload", "mmpp", "--mmpp", "1,2"), "4 numbers"),
        (("simulate", "--workload", "trace"), "go together"),
        (
            ("simulate", "--workload", "trace", "--trace", "x", "--speedup", "2", "--rate", "1"),
            "exclude each other",
        ),
        (("simulate", "--rate", "1", "--work", f"steps:{os.devnull}"), "holds no counts"),
        (("simulate", "--trace", "azure2023_conv", "--rate", "1"), "go together"),
        (("simulate", "--workload", "trace", "--trace", "missing.csv"), "azure2023_conv"),
        (("simulate", "--rate", "1", "--pages", "1"), "do they need more than --pages?"),
        (("simulate", "--rate", "1", "--config", "missing.toml"), "missing.toml"),
        (("compare", "--rate", "1", "--policy", "fixed_fill:fast"), "KEY=VALUE expected"),
        (("compare", "--rate", "1", "--policy", "continuous:sise=3"), "sise"),
        (("tune", "--rate", "1", "--p99", "nan"), "--p99: must be"),
        (("tune", "--rate", "1", "--batch-sizes", "x"), "whole numbers expected"),
        (("tune", "--rate", "1", "--presets", "best"), "unknown policy 'best'"),
        # What would fill the memory.
        (("simulate", "--rate", "1", "--work", "blocks:1000000000"), "--work blocks: must be"),
        (("simulate", "--rate", "1", "--work", f"blocks:{'9' * 20}"), "--work blocks: must be"),
        (("simulate", "--rate", "1", "--work", "geometric:5,1e7"), "--work geometric: must be"),
        (("simulate", "--rate", "1", "--work", "geometric:5,inf"), "whole number"),
        (("simulate", "--rate", "1", "--batch-size", "99999999999"), "--batch-size: must be"),
        (("simulate", "--rate", "1", "--prompt", "9" * 20), "--prompt: must be"),
        (("compare", "--rate", "1", "--policy", "continuous:batch_size=99999999"), "batch_size of"),
        (("tune", "--rate", "1", "--batch-sizes", "1,99999999"), "--batch-sizes: must be"),
        (("simulate", "--rate", "1", "--service", "linear:1e-320,0,0"), "--service linear:1e-320"),
        (("simulate", "--rate", "1e-320"), "--rate must be 1e-09 to"),
        (("simulate", "--load", "1e300"), "--load must be 1e-09 to"),
        (("simulate", "--rate", "1", "--workload", "gamma", "--cv", "1e200"), "--cv: must be"),
        (("simulate", "--rate", "1", "--workload", "mmpp", "--mmpp", "1,2,0,0"), "--mmpp: "),
        # What would be ignored.
        (("simulate", "--rate", "1", "--cv", "3"), "--cv is for --workload gamma"),
        (("simulate", "--rate", "1", "--mmpp", "1,2,3,4"), "--mmpp is for --workload mmpp"),
        (("simulate", "--rate", "1", "--max-prompt", "9"), "--max-prompt is for --workload trace"),
        (("simulate", "--rate", "1", "--max-output", "9"), "--max-output is for --workload trace"),
        (("simulate", "--rate", "1", "--jitter", "1"), "--jitter is for --workload trace"),
        (("simulate", "--rate", "1", "--page-size", "8"), "--page-size is for"),
        (
            ("simulate", "--workload", "trace", "--trace", "azure2023_conv", "--work", "gsm8k"),
            "--work is for generated",
        ),
        (
            ("simulate", "--workload", "trace", "--trace", "azure2023_conv", "--prompt", "9"),
            "--prompt is for generated",
        ),
        (
            ("tune", "--rate", "1", "--presets", "continuous", "--timeouts", "1"),
            "--timeouts: none of --presets has one",
        ),
        (
            ("compare", "--rate", "1", "--policy", "continuous", "--policy", "continuous"),
            "continuous is given twice",
        ),
        (("tune", "--rate", "1", "--presets", "continuous,continuous"), "given twice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_an_error_is_one_line_on_stderr(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dllm-sched: error: ")
    assert message in err


def test_a_bad_line_of_a_trace_is_named(run, tmp_path):
    path = tmp_path / "bad.csv"
    for text, message in (
        ("arrival_s,prompt_tokens,output_tokens\n0.0,10,64\nnan,10,64\n", "line 3"),
        ("arrival_s,prompt_tokens,output_tokens\n5.0,10,64\n4.0,10,64\n", "line 3"),
        ("arrival_s,prompt_tokens,output_tokens\n0.0,ten,64\n", "line 2"),
        ("arrival_s,prompt_tokens,output_tokens\n", "no requests"),
        ("time,tokens\n", "line 1"),
    ):
        path.write_text(text)
        code, out, err = run("simulate", "--workload", "trace", "--trace", path)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_a_file_that_is_not_text_is_one_line(run, tmp_path):
    path = tmp_path / "latin"
    path.write_bytes("arrival_s,prompt_tokens,output_tokens # caf\xe9".encode("latin-1"))
    for arguments in (
        ("--rate", 1, "--config", path),
        ("--rate", 1, "--work", f"steps:{path}"),
        ("--rate", 1, "--service", f"table:{path}"),
        ("--workload", "trace", "--trace", path),
    ):
        code, out, err = run("simulate", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)


# --- what stops a run, and what does not ----------------------------------------------------------


def test_a_stopped_run_below_capacity_is_not_called_unstable(run):
    arguments = (
        "--rate", 0.9, "--requests", 2000, "--workload", "gamma", "--cv", 6, "--max-waiting", 20,
    )  # fmt: skip
    sizes = ("--batch-sizes", "16", "--presets", "continuous")
    for command, more in (
        ("simulate", ()),
        ("compare", ("--policy", "continuous")),
        ("tune", sizes),
    ):
        code, out, _ = run(command, *arguments, *more)
        assert code == 3
        assert "stopped: more than 20 waited (--max-waiting) after" in out
        assert "of 2,000 requests" in out
        assert "unstable" not in out
        assert "grows without bound" not in out
        code, out, _ = run(command, *arguments, *more, "--json")
        assert (code, json.loads(out)["unstable"]) == (3, False)


@pytest.mark.parametrize("instants", [[0.0], [5.0], [0.0] * 40, [5.0] * 40])
def test_requests_at_one_instant_have_no_rate(run, tmp_path, instants):
    path = tmp_path / "burst.csv"
    lines = [f"{at},10,64\n" for at in instants]
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(lines))
    traffic = ("--workload", "trace", "--trace", path)
    for command in ("simulate", "compare"):
        code, out, _ = run(command, *traffic)
        assert code == 0
        assert "all requests at one instant" in out
        assert "unstable" not in out
        assert "inf" not in out
        code, out, _ = run(command, *traffic, "--json")
        assert (code, json.loads(out)["rate"]) == (0, None)
        assert run(command, *traffic, "--load", 0.5)[0] == 2
    code, out, err = run("tune", *traffic)
    assert (code, out) == (2, "")
    assert "one instant" in err


def test_load_is_of_the_largest_capacity_in_any_order(run):
    names = ("continuous", "fixed_fill")
    found = []
    for order in (names, names[::-1]):
        policies = [each for name in order for each in ("--policy", name)]
        code, out, _ = run("compare", *QUICK, "--load", 0.4, "--json", *policies)
        assert code == 0
        found.append(json.loads(out))
    assert found[0]["rate"] == found[1]["rate"]
    assert found[0]["load"] == pytest.approx(0.4)
    _, out, _ = run("compare", *QUICK, "--load", 0.4)
    assert "the largest capacity among the policies (continuous)" in out
    _, out, _ = run("tune", *QUICK, "--load", 0.4, "--batch-sizes", "8")
    assert "the largest capacity among the presets" in out


# --- output ---------------------------------------------------------------------------------------


def test_files_are_checked_before_the_run_and_printed_after(run, tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("it ran")

    with monkeypatch.context() as patch:
        patch.setattr(cli, "_measured", never)
        for option, name in (("--plot", "x.gif"), ("--plot", "no/x.png"), ("--csv", "no/x.csv")):
            code, out, err = run("simulate", *QUICK, "--load", 0.5, option, tmp_path / name)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert option in err
        assert run("simulate", *QUICK, "--load", 0.5, "--csv", tmp_path)[0] == 2
        patch.setitem(sys.modules, "matplotlib.figure", None)
        code, _, err = run("simulate", *QUICK, "--load", 0.5, "--plot", tmp_path / "x.png")
        assert code == 2
        assert "dllm-sched[plot]" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is full")
def test_a_full_disk_is_one_line_and_the_table_comes_first(run):
    code, out, err = run("simulate", *QUICK, "--load", 0.5, "--json", "--csv", "/dev/full")
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot write" in err
    json.loads(out)
    command = [sys.executable, "-m", "dllm_sched", "simulate", *QUICK, "--load", "0.5"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot write to stdout" in done.stderr


def test_a_reader_that_goes_away_is_no_fault():
    command = [sys.executable, "-m", "dllm_sched", "simulate", *QUICK, "--load", "0.5"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_is_one_word(run, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_measured", interrupt)
    code, out, err = run("simulate", *QUICK, "--load", 0.5)
    assert (code, out, err) == (130, "", "dllm-sched: interrupted\n")


def test_it_runs_as_a_module_and_says_when_numpy_is_missing():
    code = (
        "import sys; sys.modules['numpy'] = None; from dllm_sched.cli import main; "
        "sys.exit(main(['simulate', '--rate', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "dllm-sched[sim]" in done.stderr
    assert done.stderr.count("\n") == 1
    done = subprocess.run(
        [sys.executable, "-m", "dllm_sched", "--help"], capture_output=True, text=True, check=True
    )
    assert all(command in done.stdout for command in ("simulate", "compare", "tune"))


# --- what a stranger broke ------------------------------------------------------------------------

HEADER = "arrival_s,prompt_tokens,output_tokens\n"
ROWS = "".join(f"{5 * i}.0,10,64\n" for i in range(30))


def test_a_trace_may_have_a_bom_crlf_or_be_packed_under_any_name(run, tmp_path):
    path = tmp_path / "trace"
    found = set()
    for data in (
        (HEADER + ROWS).encode(),
        b"\xef\xbb\xbf" + (HEADER + ROWS).replace("\n", "\r\n").encode(),
        gzip.compress((HEADER + ROWS).encode()),
    ):
        path.write_bytes(data)
        code, out, err = run("simulate", "--workload", "trace", "--trace", path, "--json")
        assert (code, err) == (0, "")
        found.add(out)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x1f\x8b\x08\0" + b"xx" * 200, "cannot be read"),
        (HEADER.encode() + b"0,1.5,3\n", "line 2: arrival_s must be a number, tokens whole"),
        (HEADER.encode() + b"0,1,-3\n", "got 1 and -3"),
        (HEADER.encode(), "trace.csv: it has a header and no requests"),
        (HEADER.upper().encode() + ROWS.encode(), "the header must be"),
        (HEADER.encode("utf-16"), "cannot be read"),
        (b"", "the file is empty"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "compare", "tune"])
def test_a_bad_trace_is_one_line(run, tmp_path, command, data, message):
    path = tmp_path / "trace.csv"
    path.write_bytes(data)
    code, out, err = run(command, "--workload", "trace", "--trace", path, "--json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_trace_is_a_plain_file(run, tmp_path):
    for name, message in ((tmp_path, "it is a folder"), (os.devnull, "no plain file")):
        code, _, err = run("simulate", "--workload", "trace", "--trace", name)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err


@pytest.mark.parametrize("command", ["simulate", "compare", "tune"])
def test_a_short_trace_is_a_burst_and_no_unstable_load(run, tmp_path, command):
    path = tmp_path / "burst.csv"
    path.write_text(HEADER + "".join(f"{i * 1e-4:.4f},10,64\n" for i in range(20)))
    code, out, _ = run(command, "--workload", "trace", "--trace", path)
    assert code == 0
    assert "unstable" not in out
    assert ("a burst" in out) is (command != "tune")
    code, out, _ = run(command, "--workload", "trace", "--trace", path, "--json")
    assert json.loads(out)["unstable"] is False
    # The same rate over a time that counts is one.
    path.write_text(HEADER + "".join(f"{i * 0.01:.4f},10,64\n" for i in range(4000)))
    small = ("--batch-sizes", "8") if command == "tune" else ()
    code, out, _ = run(command, "--workload", "trace", "--trace", path, *small)
    assert code == 3
    assert "a burst" not in out


def test_outputs_do_not_overwrite_inputs_or_each_other(run, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(HEADER + ROWS)
    steps = tmp_path / "steps.csv"
    steps.write_text("100\n")
    config = tmp_path / "run.toml"
    config.write_text("load = 0.5\nrequests = 50\n")
    work = ("--load", 0.5, "--requests", 50)
    for arguments in (
        ("--workload", "trace", "--trace", trace, "--csv", trace),
        (*work, "--work", f"steps:{steps}", "--csv", tmp_path / "." / "steps.csv"),
        (*work, "--csv", tmp_path / "both.png", "--plot", tmp_path / "both.png"),
        ("--config", config, "--csv", config),
    ):
        code, out, err = run("simulate", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "is the file of --" in err
    assert trace.read_text() == HEADER + ROWS


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--plot", "", "the name of a file expected"),
        ("--csv", "", "the name of a file expected"),
        ("--config", "", "--config"),
        ("--plot", "x.png/", "it is a folder"),
        ("--csv", "a\0b", "no file can be called"),
    ],
)
def test_what_no_file_can_be_called(run, option, value, message):
    code, out, err = run("simulate", *QUICK, "--load", 0.5, option, value)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("compare", "policy = 3", "policy must be a text"),
        ("compare", "policy = ['continuous', 3]", "policy must be a text"),
        ("compare", "plot = ['a.png', 'b.png']", "'plot' must be one value"),
        ("simulate", "work = ['gsm8k']", "'work' must be one value"),
        ("compare", "batch-size = 8\nbatch_size = 16", "given twice"),
        ("simulate", "policies = [{ name = 'continuous', batch_size = '4' }]", "policy continuous"),
        ("compare", "policies = [{ name = 'continuous', batch_size = true }]", "a whole number"),
        ("compare", "policies = [{ name = 'fixed_fill', timeout_s = 'x' }]", "policy fixed_fill"),
    ],
)
def test_wrong_types_in_a_file_name_the_file_and_the_key(run, tmp_path, command, text, message):
    path = tmp_path / "run.toml"
    path.write_text(f"load = 0.5\nrequests = 50\n{text}\n")
    code, out, err = run(command, "--config", path, "--json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err
    assert message in err


def test_two_batch_sizes_for_one_policy_are_refused(run, tmp_path):
    path = tmp_path / "run.toml"
    policy = 'load = 0.5\nrequests = 100\npolicies = [{ name = "continuous", batch_size = 4 }]\n'
    path.write_text(policy)
    code, _, err = run("simulate", "--config", path, "--batch-size", 8)
    assert (code, err.count("\n")) == (2, 1)
    assert "--batch-size 8: the policy of --config has its own batch_size = 4" in err
    assert run("simulate", "--config", path)[0] == 0
    # Another policy instead, or several that may differ: no conflict.
    assert run("simulate", "--config", path, "--batch-size", 8, "--preset", "continuous")[0] == 0
    assert run("compare", "--config", path, "--batch-size", 8)[0] == 0
    path.write_text("batch-size = 8\n" + policy)
    assert run("simulate", "--config", path)[0] == 2


def test_an_argument_of_a_policy_is_given_once(run):
    policy = "fixed_fill:timeout_s=1,timeout_s=2"
    code, _, err = run("compare", "--load", 0.5, "--policy", policy)
    assert code == 2
    assert "timeout_s is given twice" in err


def test_libraries_add_no_lines_of_their_own(run, tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("rows,tokens,seconds\n1,0,1e300\n16,0,1e300\n")
    code, _, err = run("simulate", "--load", 0.5, "--service", f"table:{path}")
    assert (code, err.count("\n")) == (2, 1)


def test_a_chain_that_never_rests_is_refused(run):
    chain = ("--workload", "mmpp", "--mmpp", "1,2,1e9,1e9")
    code, _, err = run("simulate", *QUICK, "--load", 0.5, *chain)
    assert (code, err.count("\n")) == (2, 1)
    assert "times per arrival" in err


@pytest.mark.skipif(os.name != "posix", reason="Windows cannot send Ctrl-C to one process alone")
def test_ctrl_c_in_a_long_run_is_one_line():
    command = [sys.executable, "-m", "dllm_sched", "simulate", "--requests", "10000000"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # else it starts deaf too
    try:
        running = subprocess.Popen(
            [*command, "--load", "0.5", "--progress"],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with running:
        try:
            assert running.stderr is not None
            running.stderr.read(1)  # the first progress
            running.send_signal(signal.SIGINT)
            out, err = running.communicate(timeout=60)
        finally:
            running.kill()
    assert (running.returncode, out) == (130, b"")
    assert err.split(b"\r\x1b[K")[-1] == b"dllm-sched: interrupted\n"


def test_progress_counts_while_a_capacity_is_measured_and_while_it_runs(run, monkeypatch):
    monkeypatch.setattr(cli, "_SAY_EVERY_S", 0.0)
    err = run("simulate", *QUICK, "--load", 0.5, "--progress")[2]
    assert "measuring the capacity of continuous: 1,999 of 2,000 requests" in err
    assert "299 requests, " in err
    err = run("compare", *QUICK, "--load", 0.5, "--progress", "--policy", "continuous")[2]
    assert "299 requests, " in err


OWN = """
from dllm_sched import Policy
from dllm_sched.policies import Slots


def narrow(batch_size):
    return Policy(admission=Slots(max(1, batch_size // 4)), name="narrow")


def nothing(batch_size):
    return None


number = 3
"""


def test_a_policy_of_one_s_own_goes_by_its_dotted_name(run, tmp_path, monkeypatch):
    (tmp_path / "own_policies.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    traffic = ("--load", "0.7", "--requests", "300")
    both = ("--policy", "own_policies.narrow", "--policy", "own_policies.narrow:batch_size=8")
    code, out, _ = run("compare", *traffic, *both, "--json")
    assert code in (0, 3)
    labels = [line["label"] for line in json.loads(out)["policies"]]
    assert labels == ["own_policies.narrow", "own_policies.narrow(batch_size=8)"]
    code, out, _ = run("tune", *traffic, "--presets", "own_policies.narrow", "--batch-sizes", "8")
    assert code == 0
    assert "Scheduler(policy=own_policies.narrow(batch_size=8)" in out


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("own_policies.nope", "no attribute 'nope'"),
        ("no_such_module.narrow", "No module named 'no_such_module'"),
        ("own_policies.nothing", "must return a Policy, got None"),
        ("own_policies.number", "a function that returns a Policy expected: 3"),
        (".narrow", "unknown policy '.narrow'"),
    ],
)
def test_what_is_no_policy_is_named(run, tmp_path, monkeypatch, name, what):
    (tmp_path / "own_policies.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    code, out, error = run("simulate", "--load", "0.7", "--preset", name)
    assert (code, out) == (2, "")
    assert what in error
