"""The parity command: agrees with the recorded data, and names what does not."""

from __future__ import annotations

import gzip
import json
import shutil

import numpy as np
import pytest

from dllm_sched_hf.parity import main

FILE = "d2f_gqa_aggressive_b16"


@pytest.fixture
def folder(golden, tmp_path, record):
    """A small directory of its own: one model under another name, a few requests."""
    shutil.copytree(golden / "tiny_gqa", tmp_path / "other", copy_function=shutil.copyfile)
    shutil.copytree(
        golden / "tiny_gqa_lora", tmp_path / "other_lora", copy_function=shutil.copyfile
    )
    stored = {**record(FILE), "model": "other"}
    stored["requests"] = stored["requests"][:5]
    _write(tmp_path, stored)
    return tmp_path, stored


def _write(path, stored):
    (path / "d2f.json").write_text(json.dumps(stored))


def _changed(stored, **changes):
    first, *others = stored["requests"]
    return {**stored, "requests": [{**first, **changes}, *others]}


def test_agrees_and_lists_what_it_does_not_decode(folder, golden, capsys):
    path, _ = folder
    shutil.copyfile(golden / "forward_tiny_gqa.npz", path / "forward_other.npz")
    (path / "llada.json.gz").write_bytes(gzip.compress(b'{"kind": "llada"}'))
    (path / "SUMMARY.json").write_text("{}")
    assert main([str(path), "--batch-size", "3", "--policy", "fixed_fill", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    checks = {check["what"]: check["num_compared"] for check in report["checks"]}
    assert checks == {
        "logits": 5,
        "logits_lora": 5,
        "logits_lora_merged": 5,
        "hidden": 1,
        "bc_logits_lora": 4,
        "alone": 5,
        "batch 3, fixed_fill": 5,
        "llada": 0,
    }
    assert report["checks"][-1]["note"] == "not decoded yet"


@pytest.mark.parametrize("policy", ["per_request", "block_refill"])
def test_other_policies_agree_too(policy, folder):
    assert main([str(folder[0]), "--batch-size", "2", "--policy", policy]) == 0


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("output", lambda tokens: [tokens[0] + 1, *tokens[1:]], "output[0]: expected"),
        ("n_forward", lambda count: count + 1, "n_forward: expected"),
        ("n_blocks", lambda count: count + 1, "n_blocks: expected"),
        (
            "trace",
            lambda trace: [{**trace[0], "cache_after": 3}, *trace[1:]],
            "step 1: cache_after",
        ),
        ("trace", lambda trace: trace[:-1], "trace length"),
    ],
)
def test_first_difference_is_named(field, change, message, folder, capsys):
    path, stored = folder
    first = stored["requests"][0]
    _write(path, _changed(stored, **{field: change(first[field])}))
    assert main([str(path), "--batch-size", "2"]) == 1
    out = capsys.readouterr().out
    assert out.count(f"request {first['id']}: {message}") == 2  # alone, and in the batch
    assert out.count("4/5 agree") == 2


def test_logit_difference_is_named(folder, golden, capsys):
    path, _ = folder
    with np.load(golden / "forward_tiny_gqa.npz") as stored:
        arrays = {"ids_2": stored["ids_2"], "logits_2": stored["logits_2"].copy()}
    arrays["logits_2"][4, 17] += 1e-3
    np.savez(path / "forward_other.npz", **arrays)
    assert main([str(path)]) == 1
    assert "logits_2[4, 17]: expected" in capsys.readouterr().out


def test_a_budget_without_a_block_is_an_empty_answer(folder):
    path, stored = folder
    entry = {**stored["requests"][0], "output": [], "trace": [], "n_forward": 0, "n_blocks": 0}
    params = {**stored["params"], "max_new_tokens": 15}
    _write(path, {**stored, "params": params, "requests": [{**entry, "eos_step": None}]})
    assert main([str(path)]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": None}, "kind"),
        ({"model": "nothing"}, "nothing"),
        ({"params": {}}, "block_size"),
        ({"requests": [{"id": 1}]}, "request 1: prompt"),
        ({"requests": [3]}, "object with an id"),
        ({"mask_token_id": 1}, "mask_token_id 1"),
    ],
)
def test_malformed_records_are_errors(change, message, folder, capsys):
    path, stored = folder
    _write(path, {**stored, **change})
    assert main([str(path)]) == 2
    assert message in capsys.readouterr().err


def test_unusable_files_and_arguments_are_errors(folder, tmp_path, capsys):
    path, _ = folder
    for args, message in (
        ([str(path / "missing")], "no such directory"),
        ([str(path / "other")], "config.json: kind"),
        ([str(path), "--policy", "best"], "'best' is not one of"),
        ([str(path), "--batch-size", "0"], "batch-size"),
        ([str(path), "--device", "nowhere"], "nowhere"),
        ([str(path), "--dtype", "int3"], "int3"),
    ):
        assert main(args) == 2
        assert message in capsys.readouterr().err
    (path / "d2f.json").write_text("{")
    assert main([str(path)]) == 2
    assert "not readable JSON" in capsys.readouterr().err
    (path / "forward_other.npz").write_bytes(b"PK nonsense")
    assert main([str(path)]) == 2
    assert "npz" in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main([str(empty)]) == 2
    assert "holds no forward" in capsys.readouterr().err
