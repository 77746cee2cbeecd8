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
    (path / "other.json.gz").write_bytes(gzip.compress(b'{"kind": "other"}'))
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
        "other": 0,
    }
    assert report["checks"][-1]["note"] == "not decoded yet"


CANVAS_FILES = [
    "fast_dllm_gqa_dual_thr08_b16",
    "fast_dllm_prefix_factor2_b8",
    "fast_dllm_dual_topk",
    "llada_g32_b32_s32_cfg",
]


@pytest.fixture(params=CANVAS_FILES)
def canvas_folder(request, golden, tmp_path, record):
    """A few requests of a file on a fixed canvas, and its model."""
    stored = {**record(request.param)}
    shutil.copytree(
        golden / stored["model"], tmp_path / stored["model"], copy_function=shutil.copyfile
    )
    stored["requests"] = stored["requests"][:4]
    _write(tmp_path, stored)
    return tmp_path, stored


def test_the_other_decoders_agree(canvas_folder, capsys):
    path, stored = canvas_folder
    assert main([str(path), "--batch-size", "3", "--policy", "block_refill"]) == 0
    assert capsys.readouterr().out.count("4/4 agree") == 2
    first = stored["requests"][0]
    count = "nfe" if "nfe" in first else "n_forward"
    step = first["trace"][3]
    for field, value, message in (
        (count, first[count] + 1, f"{count}: expected"),
        ("trace", [*first["trace"][:3], {**step, "block": 7}], "step 4: block: expected 7"),
        ("output", [first["output"][0] + 1, *first["output"][1:]], "output[0]: expected"),
    ):
        _write(path, _changed(stored, **{field: value}))
        assert main([str(path), "--batch-size", "2"]) == 1
        assert capsys.readouterr().out.count(f"request {first['id']}: {message}") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gen_length": 7}, "must be a multiple of block_length"),
        ({"gen_length": None}, "gen_length must be a int"),
        ({"block_length": 0}, "block_length must be an int >= 1"),
        ({"steps": "many"}, "steps must be a int"),
    ],
)
def test_malformed_parameters_are_errors(change, message, canvas_folder, capsys):
    path, stored = canvas_folder
    _write(path, {**stored, "params": {**stored["params"], **change}})
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: d2f.json: ")
    assert message in error


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
        ({"requests": [{"id": None}]}, "id must be an int or a non-empty str"),
        ({"requests": [{"id": True}]}, "id must be an int or a non-empty str"),
        ({"eos_token_id": 300}, "stop_token_ids"),
    ],
)
def test_malformed_records_are_errors(change, message, folder, capsys):
    path, stored = folder
    _write(path, {**stored, **change})
    assert main([str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trace": [1, 2]}, "trace: step 1 must be an object, got 1"),
        ({"trace": [{}, [3]]}, "trace: step 2 must be an object, got [3]"),
        ({"prompt": [1] * 600}, "max_len is 512"),
        ({"prompt": [1, 300]}, "vocabulary has 300"),
        ({"prompt": ["a"]}, "prompt must hold token ids"),
        ({"prompt": []}, "prompt is empty"),
    ],
)
def test_a_malformed_request_is_named_with_its_file(changes, message, folder, capsys):
    path, stored = folder
    _write(path, _changed(stored, id="odd", **changes))
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: d2f.json: request ")
    assert "odd" in error
    assert message in error


def test_an_id_that_is_used_twice_is_an_error(folder, capsys):
    path, stored = folder
    again = stored["requests"][1]["id"]
    _write(path, _changed(stored, id=str(again)))
    assert main([str(path)]) == 2
    assert f"d2f.json: request {again}: the id is used twice" in capsys.readouterr().err


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
@pytest.mark.parametrize("what", ["no requests", "unknown kinds", "no arrays"])
def test_checking_nothing_is_no_success(what, json_flag, folder, capsys):
    path, stored = folder
    if what == "no requests":
        _write(path, {**stored, "requests": []})
    else:
        (path / "d2f.json").unlink()
    if what == "unknown kinds":
        (path / "other.json").write_text('{"kind": "other"}')
    if what == "no arrays":
        np.savez(path / "forward_other.npz", ids_0=np.arange(3))
    assert main([str(path), *json_flag]) == 2
    out, error = capsys.readouterr()
    assert "nothing was checked" in error
    assert "agrees" not in out
    assert not json_flag or json.loads(out)["ok"] is False


@pytest.mark.parametrize("relative", [True, False])
def test_a_missing_checkpoint_is_not_looked_up_on_the_hub(
    relative, folder, golden, capsys, monkeypatch
):
    def fail(*_args, **_kwargs):
        raise AssertionError("looked up on the hub")

    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", fail)
    path, stored = folder
    monkeypatch.chdir(path.parent)
    argument = path.name if relative else str(path)
    for changes, message in (
        ({"model": "absent"}, "d2f.json: model 'absent': no directory"),
        ({"model": ""}, "d2f.json: model '': no directory"),
        ({"lora": "absent_lora"}, "d2f.json: lora 'absent_lora': no directory"),
    ):
        _write(path, {**stored, **changes})
        assert main([argument]) == 2
        assert message in capsys.readouterr().err
    shutil.copyfile(golden / "forward_tiny_gqa.npz", path / "forward_x.npz")
    assert main([argument]) == 2
    assert "forward_x.npz: model 'x': no directory" in capsys.readouterr().err
    (path / "forward_x.npz").unlink()
    _write(path, stored)
    assert main([argument]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids_0": np.array([0.5])}, "ids_0"),
        ({"ids_0": np.array([300])}, "ids_0"),
        ({"ids_0": np.array([[1, 2]])}, "ids_0"),
        ({"ids_0": np.array([], np.int64)}, "ids_0"),
        ({"logits_0": np.array(["a"])}, "logits_0 must hold floats"),
        ({"hidden_7": np.zeros(3)}, "ids_7"),
        ({"bc_logits_lora_0": np.zeros(3)}, "bc_ids_0"),
        ({"bc_logits_lora_0": np.zeros(3), "bc_ids_0": np.arange(3)}, "bc_meta_0"),
        (
            {
                "bc_logits_lora_0": np.zeros(3),
                "bc_ids_0": np.arange(3),
                "bc_meta_0": np.array([1, 0, 2]),
            },
            "block length",
        ),
    ],
)
def test_malformed_arrays_are_named(changes, message, folder, capsys):
    path, _ = folder
    arrays = {"ids_0": np.arange(3), "logits_0": np.zeros((3, 300))}
    np.savez(path / "forward_other.npz", **(arrays | changes))
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: forward_other.npz: ")
    assert message in error


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d2f.json", b"[" * 100_000),
        ("d2f.json.gz", gzip.compress(b"{}")[:10] + bytes(range(7, 30))),
        ("forward_other.npz", b"\x93NUMPY\x01\x00"),
    ],
)
def test_damaged_files_are_named(name, content, folder, capsys):
    path, _ = folder
    (path / name).write_bytes(content)
    assert main([str(path)]) == 2
    assert name in capsys.readouterr().err


def test_unusable_files_and_arguments_are_errors(folder, tmp_path, capsys):
    path, _ = folder
    for args, message in (
        ([str(path / "missing")], "no such directory"),
        ([str(path / "other")], "config.json: kind"),
        ([str(path), "--policy", "best"], "'best' is not one of"),
        ([str(path), "--batch-size", "0"], "batch-size"),
        ([str(path), "--batch-size", "99999999999"], "batch-size: must be in 1..4096"),
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
