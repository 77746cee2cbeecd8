"""The benchmark against the published loop: the stand-in decodes what was recorded, all is told."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
NAMES = ("d2f_train_b16", "d2f_gqa_aggressive_b16", "d2f_base_nolora_b16")  # mha, gqa, no LoRA
RATES = ("forward_alone", "products_alone", "at_peak")


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import published_loop
    return published_loop


@pytest.fixture
def options(script):
    return script.parse_args(["--requests", "2"])


@pytest.fixture(scope="module")
def result():
    """From end to end."""
    arguments = "--recordings d2f_train_b16,d2f_gqa_math_b32 --requests 2 --rounds 1 --json"
    command = [sys.executable, "benchmarks/published_loop.py", *arguments.split()]
    command += ["--batch-sizes", "1,2"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_the_loop_decodes_what_was_recorded(name, script, options):
    path = ROOT / "tests" / "data" / "golden" / f"{name}.json.gz"
    entries = json.loads(gzip.decompress(path.read_bytes()))["requests"][:2]
    work = script.golden_workload(name, options, merge=False)
    table = script.rotary_table(work.model.config)
    for request, entry in zip(work.requests, entries, strict=True):
        answer = script.generate(work.model, table, request)
        assert answer.tokens == entry["output"]
        assert answer.forwards == entry["n_forward"]
    run = script.serve_one_by_one(work.model, work)
    assert run.forwards == sum(entry["n_forward"] for entry in entries)
    assert 0 < run.forward_s < run.wall_s


@pytest.mark.parametrize("field", ["tokens", "forwards"])
def test_a_loop_that_decodes_something_else_is_found_out(field, script, options):
    work = script.golden_workload("d2f_train_b16", options, merge=False)
    known = dict(getattr(work, field))
    id = work.requests[1].id
    known[id] = known[id] + (1 if field == "forwards" else [0])
    with pytest.raises(AssertionError, match=f"request {id}: {field}"):
        script.serve_one_by_one(work.model, work._replace(**{field: known}))


def test_no_product_of_a_forward_is_left_out(script, options):
    """Counted by the profiler, which sees them below whatever Python calls them by."""
    work = script.golden_workload("d2f_gqa_aggressive_b16", options)
    engine, scheduler = script.build(work, 2)

    def products(calls):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            script.again(calls)
        counted = {event.key: event.count for event in profiler.key_averages()}
        below = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")
        names = (*(f"aten::{name}" for name in below), "mkldnn::_linear_pointwise")
        return {name: counted.get(name, 0) for name in names}

    with script.recorded(engine.model) as calls, torch.inference_mode():
        next(script.loop(engine, scheduler, work.requests))
        with script.Products() as noted:
            script.again(calls)
        whole = products(calls)
        assert products(noted.calls) == whole
    assert sum(whole.values()) > 3 * 4  # layers, each with no fewer than four


def test_operations_are_counted(script):
    x, weight = torch.ones(5, 8), torch.ones(3, 8)
    q, kv = torch.ones(1, 2, 4, 8), torch.ones(1, 2, 6, 8)
    with script.Products() as linear:
        torch.nn.functional.linear(x, weight)
    with script.Products() as added:
        torch.addmm(torch.ones(3), x, weight.T)
    with script.Products() as attention:
        torch.nn.functional.scaled_dot_product_attention(q, kv, kv)
    assert linear.flops == added.flops == 2 * 5 * 8 * 3
    assert attention.flops == 2 * (2 * 2 * 4 * 6 * 8)  # heads, queries, keys, width; twice
    assert [len(each.calls) for each in (linear, added, attention)] == [1, 1, 1]


def test_every_figure_is_there_and_fits_the_others(result):
    assert result["machine"]["threads"] == 1
    assert min(result["peak_flops_per_s"].values()) > 0
    assert [one["name"] for one in result["recordings"]] == ["d2f_train_b16", "d2f_gqa_math_b32"]
    for one in result["recordings"]:
        told = one["loop"]
        assert told["forward_share"] == pytest.approx(told["forward_s"] / told["step_s"])
        assert [batch["batch_size"] for batch in one["batches"]] == [1, 2]
        flops = []
        for batch in one["batches"]:
            for rate in (batch, *(batch[name] for name in RATES)):
                times = rate["requests_per_s"] / told["requests_per_s"]
                assert rate["times_loop"] == pytest.approx(times)
            products_s = 1 / batch["products_alone"]["requests_per_s"]
            flops.append(products_s * batch["products_flops_per_s"])
        assert max(flops) < 1.1 * min(flops)  # the same work, but for padding


def test_tables_have_a_line_for_each(result, script, capsys):
    script.tables(result["recordings"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    loops, engines = lines[:5], lines[5:]
    assert len(engines) == 2 + 2 * 2
    for table in (loops, engines):
        assert len({line.count("|") for line in table}) == 1
    for column in ("requests/s", "ms a step", "in the forward"):
        assert f"| {column} |" in loops[0]
    for column in ("batch", "ms a step", "requests/s", "forward alone", "products alone"):
        assert f"| {column} |" in engines[0]
    assert engines[0].count("| times the loop |") == 4
    assert loops[-1].startswith("| published") and "| 12 to 25 | 1.2 to 1.7 |" in loops[-1]


def test_all_recordings_of_d2f_and_no_others(script):
    names = script.parse_args(["--recordings", "all"]).recordings
    assert set(NAMES) | set(script.RECORDINGS) < set(names)
    assert all(name.startswith("d2f_") for name in names)


@pytest.mark.parametrize("name", ["nothing", "fast_dllm_dual_thr09"])
def test_a_recording_that_is_none_of_d2f(name, script, capsys):
    with pytest.raises(SystemExit):
        script.parse_args(["--recordings", name])
    assert f"'{name}' is none; there are d2f_" in capsys.readouterr().err
