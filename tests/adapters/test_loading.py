"""Loading: what is incomplete or does not belong together is an error that names it."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from dllm_sched.errors import ConfigError
from dllm_sched_hf.loading import _same_base, load_model, resolve_device, resolve_dtype

LAYER = "model.transformer.blocks.1.q_proj.weight"
FACTOR = "base_model.model.model.transformer.blocks.0.q_proj.lora_A.weight"


@pytest.fixture
def copied(golden, tmp_path):
    """A private copy of a model and its LoRA."""
    for name in ("tiny_mha", "tiny_mha_lora"):
        shutil.copytree(golden / name, tmp_path / name, copy_function=shutil.copyfile)
    return tmp_path / "tiny_mha", tmp_path / "tiny_mha_lora"


def _edit(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def _edit_config(path, **changes):
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | changes))


def test_merged_and_unmerged_are_equal(model):
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        merged, beside, base = (
            model(lora=lora, merge=merge)(ids).logits
            for lora, merge in ((True, True), (True, False), (False, True))
        )
    assert (merged - beside).abs().max() <= 5e-4
    assert (merged - base).abs().max() > 0.1


def test_what_is_loaded_is_ready_to_serve(golden):
    net = load_model(golden / "tiny_gqa", device="cpu", dtype="bfloat16")
    assert net.dtype is torch.bfloat16
    assert not net.training
    assert not any(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(LAYER), f"1 tensors missing from the checkpoint: {LAYER}"),
        (lambda t: t.update(extra=torch.zeros(2)), "does not have: extra"),
        (lambda t: t.update({LAYER: torch.zeros(3, 64)}), f"shape .*: {LAYER}"),
    ],
)
def test_wrong_tensors_are_named(change, message, copied):
    _edit(copied[0] / "model.safetensors", change)
    with pytest.raises(ConfigError, match=message):
        load_model(copied[0], device="cpu")


@pytest.mark.parametrize("size", [4, 200, 300_000])
def test_truncated_weights_are_an_error(size, copied):
    os.truncate(copied[0] / "model.safetensors", size)
    with pytest.raises(ConfigError, match="truncated"):
        load_model(copied[0], device="cpu")


def test_missing_files_are_named(copied, tmp_path):
    with pytest.raises(ConfigError, match="no directory"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="lora: no directory"):
        load_model(copied[0], tmp_path / "nothing", device="cpu")
    (copied[1] / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        load_model(*copied, device="cpu")
    (copied[1] / "adapter_config.json").unlink()
    with pytest.raises(ConfigError, match=r"adapter_config\.json is missing"):
        load_model(*copied, device="cpu")
    (copied[0] / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_model(copied[0], device="cpu")
    (copied[0] / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load_model(copied[0], device="cpu")


@pytest.fixture
def no_hub(monkeypatch):
    """Any look-up on the hub is a failure."""

    def fail(*_args, **_kwargs):
        raise AssertionError("looked up on the hub")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", fail)


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("place", ["a/b/c", "a/b/", "./b", "~/b", "/b", "a\\b", Path("a/b")])
def test_a_path_is_never_looked_up_on_the_hub(place, golden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="model: no directory"):
        load_model(place, device="cpu")
    with pytest.raises(ConfigError, match="lora: no directory"):
        load_model(golden / "tiny_mha", place, device="cpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": None}, "model must be a directory or a hub id, got None"),
        ({"model": 3}, "model must be"),
        ({"model": ""}, "model must be"),
        ({"lora": 3}, "lora must be"),
        ({"lora": ""}, "lora must be"),
        ({"merge": "no"}, "merge must be True or False"),
        ({"allow_base_mismatch": 1}, "allow_base_mismatch must be"),
        ({"base_name": 1}, "base_name must be"),
        ({"device": []}, "device"),
        ({"dtype": 3}, "dtype"),
    ],
)
def test_bad_arguments_name_themselves(fields, message, golden):
    with pytest.raises(ConfigError, match=message):
        load_model(**({"model": golden / "tiny_mha", "device": "cpu"} | fields))


def test_loading_is_silent_and_leaves_the_settings_alone(golden, capfd):
    bars = []

    def bar(factory, args, options):
        bars.append(options)
        return factory(*args, **options)

    loggers = [
        logging.getLogger(name)
        for name in ("transformers.modeling_utils", "huggingface_hub.utils._http")
    ]
    before = (transformers_logging.is_progress_bar_enabled(), are_progress_bars_disabled())
    first = transformers_logging.set_tqdm_hook(bar)
    try:
        load_model(golden / "tiny_mha", golden / "tiny_mha_lora", device="cpu")
        with pytest.raises(ConfigError):
            load_model("a", golden / "nothing", device="cpu")
        assert transformers_logging.set_tqdm_hook(None) is bar
    finally:
        transformers_logging.set_tqdm_hook(first)
    assert not bars
    assert not any(capfd.readouterr())
    assert before == (transformers_logging.is_progress_bar_enabled(), are_progress_bars_disabled())
    assert not any(logger.disabled for logger in loggers)


def test_missing_shard_is_an_error(model, tmp_path):
    model("tiny_gqa", lora=False).save_pretrained(tmp_path, max_shard_size="200KB")
    next(tmp_path.glob("model-00002-*")).unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 300}, "mask_token_id 300 is not in the vocabulary"),
        ({"alibi": True}, "alibi"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"eos_token_id": 300}, "eos_token_id 300 is not in the vocabulary"),
        ({"eos_token_id": 295}, "eos_token_id 295 is the mask_token_id"),
        ({"rope_theta": 0}, "rope_theta must be a number above 0"),
        ({"n_heads": "4"}, "n_heads must be an int >= 1 .*'4'"),
        ({"mask_token_id": None}, "mask_token_id must be an int"),
    ],
)
def test_wrong_config_is_named(changes, message, copied):
    _edit_config(copied[0] / "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        load_model(copied[0], device="cpu")


def test_malformed_config_is_an_error(copied):
    (copied[0] / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not readable JSON"):
        load_model(copied[0], device="cpu")


def test_lora_for_another_base_is_refused_unless_told(copied):
    base, lora = copied
    _edit_config(lora / "adapter_config.json", base_model_name_or_path="GSAI-ML/LLaDA-8B-Base")
    with pytest.raises(ConfigError, match="base_model_name_or_path is 'GSAI-ML/LLaDA-8B-Base'"):
        load_model(base, lora, device="cpu")
    load_model(base, lora, device="cpu", base_name="GSAI-ML/LLaDA-8B-Base")
    load_model(base, lora, device="cpu", allow_base_mismatch=True)
    with pytest.raises(ConfigError, match="Instruct"):
        load_model(base, lora, device="cpu", base_name="GSAI-ML/LLaDA-8B-Instruct")


@pytest.mark.parametrize(
    ("named", "loaded", "same"),
    [
        ("GSAI-ML/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-8B-Instruct", True),
        ("GSAI-ML/LLaDA-8B-Instruct", "/models/LLaDA-8B-Instruct/", True),
        ("GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct", False),
        ("GSAI-ML/LLaDA-8B-Base", "/models/LLaDA-8B-Instruct", False),
        ("other/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-8B-Instruct", False),
        (None, "GSAI-ML/LLaDA-8B-Instruct", False),
    ],
)
def test_same_base(named, loaded, same):
    assert _same_base(named, loaded) is same


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(FACTOR), "missing from the adapter: .*lora_A"),
        (
            lambda t: t.update({FACTOR.replace("s.0", "s.9"): t[FACTOR].clone()}),
            r"no place for: .*blocks\.9",
        ),
        (lambda t: t.update({FACTOR: torch.zeros(2, 64)}), "size mismatch"),
    ],
)
def test_wrong_lora_tensors_are_named(change, message, copied):
    _edit(copied[1] / "adapter_model.safetensors", change)
    with pytest.raises(ConfigError, match=message):
        load_model(*copied, device="cpu")


def test_truncated_lora_is_an_error(copied):
    os.truncate(copied[1] / "adapter_model.safetensors", 3000)
    with pytest.raises(ConfigError, match="truncated"):
        load_model(*copied, device="cpu")


def test_lora_on_other_modules_is_refused(copied):
    _edit_config(copied[1] / "adapter_config.json", target_modules=["ff_proj"])
    with pytest.raises(ConfigError, match="target_modules"):
        load_model(*copied, device="cpu")


def test_device_and_dtype():
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="'nowhere'"):
        resolve_device("nowhere")
    assert resolve_dtype("float64") is torch.float64
    assert resolve_dtype(None, torch.device("cuda")) is torch.bfloat16
    assert resolve_dtype(None, torch.device("cpu")) is torch.float32
    for bad in ("int8", "nonsense", "nn"):
        with pytest.raises(ConfigError, match=bad):
            resolve_dtype(bad)


@pytest.mark.parametrize("device", ["meta", "vulkan", "fpga", torch.device("meta")])
def test_a_device_that_cannot_run_here_is_refused(device, golden):
    where = re.escape(f"device: {device!r} is not available here")
    with pytest.raises(ConfigError, match=where):
        resolve_device(device)
    with pytest.raises(ConfigError, match=r"device: .* is not available here \(.+\): use cpu"):
        load_model(golden / "tiny_mha", device=device)


def test_absent_cuda_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(None) == torch.device("cpu")
    with pytest.raises(ConfigError, match="use cpu"):
        resolve_device("cuda")
