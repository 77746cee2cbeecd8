"""Compiled loops: compiled before the first request, with or without a place to keep them."""

from __future__ import annotations

import cmath
import itertools
import math
import os
import subprocess
import sys

import numba
import numpy as np
import pytest
import torch

from dllm_sched_hf import engine as engine_module
from dllm_sched_hf import loops, modeling_llada
from dllm_sched_hf.modeling_llada import PackedLayout

# As a test of its own in a process of its own: what a cache holds is read once.
DAMAGED = """
import pathlib, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from looped import total
assert total(np.arange(5)) == 10
"""

FILES = ["d2f_gqa_aggressive_b16", "fast_dllm_prefix_factor2_b8", "llada_g60_b20_s24"]


def test_where_nothing_can_be_kept_loops_are_compiled_all_the_same(monkeypatch):
    njit = numba.njit

    def refuses(function, *, cache=False, **options):
        if cache:
            raise RuntimeError(f"cannot cache function {function.__name__!r}: no locator available")
        return njit(function, **options)

    monkeypatch.setattr(numba, "njit", refuses)

    @loops.compiled
    def total(values):
        result = 0
        for value in values:
            result += value
        return result

    assert total(np.arange(5)) == 10
    assert total.signatures == [(numba.typeof(np.arange(5)),)]


@pytest.mark.parametrize("damage", [b"", b"no pickle", None], ids=["empty", "other", "cut"])
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_damaged_files_of_the_cache_are_as_none(suffix, damage, tmp_path):
    (tmp_path / "looped.py").write_text(
        "from dllm_sched_hf.loops import compiled\n\n\n"
        "@compiled\ndef total(values):\n    return values.sum()\n"
    )
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", DAMAGED, str(tmp_path)]
    subprocess.run(command, env=env, check=True)
    (file,) = (tmp_path / "cache").rglob(f"*.{suffix}")
    file.write_bytes(file.read_bytes()[:-9] if damage is None else damage)
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_cache_that_takes_no_files_is_as_none(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    @loops.compiled
    def total(values):
        return values.sum()

    monkeypatch.setattr(total._cache._cache_file, "save", full)
    assert total(np.arange(5)) == 10


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_norm_weights_may_have_another_dtype(dtype):
    weight = torch.tensor([0.5, -2.0, 3.0])
    norm = modeling_llada._Norm(weight.to(dtype), 1e-5)
    x = torch.randn(4, 3)
    expected = modeling_llada._Norm(weight, 1e-5)(x, loops=False)
    torch.testing.assert_close(norm(x, loops=True), expected)


@pytest.mark.parametrize("name", FILES)
def test_no_step_compiles_anything(
    name, record, golden_request, golden_engine, assert_recorded, loop
):
    """A row joins, ends and is alone; one and many tokens run; with a cache and without."""
    stored = record(name)
    modules = {
        sys.modules[cls.__module__] for cls in type(golden_engine(stored, 1)._decoder).__mro__
    }
    compiled = [
        loop_
        for module in {engine_module, modeling_llada, *modules}
        for loop_ in vars(module).values()
        if isinstance(loop_, numba.core.registry.CPUDispatcher)
    ]
    assert len(compiled) >= 9
    for loop_ in compiled:
        loop_._reset_overloads()
    engine_module._warm_up.cache_clear()
    engine = golden_engine(stored, 3)
    assert {len(loop_.signatures) for loop_ in compiled} == {1}
    drive = loop(engine)
    for slot, entry in enumerate(stored["requests"][:3]):
        drive.join(slot, golden_request(stored, entry))
        drive.step()
    drive.run()
    for entry in stored["requests"][:3]:
        assert_recorded(drive.outputs[str(entry["id"])], entry)
    assert {len(loop_.signatures) for loop_ in compiled} == {1}


@torch.inference_mode()
@pytest.mark.parametrize("loops_", [True, False])
@pytest.mark.parametrize("name", ["tiny_mha", "tiny_gqa"])
def test_a_norm_is_what_it_says(name, loops_, model):
    norm = modeling_llada._serving(model(name).model.transformer.ln_f)
    x = torch.randn(7, len(norm.weight)) * torch.logspace(-6, 6, 7)[:, None]
    wide = x.double()
    mean_square = wide.pow(2).sum(-1, keepdim=True) / x.shape[1]
    expected = wide / (mean_square + norm.eps).sqrt() * norm.weight
    torch.testing.assert_close(norm(x, loops=loops_).double(), expected, rtol=1e-6, atol=0)


@torch.inference_mode()
@pytest.mark.parametrize("loops_", [True, False])
@pytest.mark.parametrize("name", ["tiny_mha", "tiny_gqa"])
@pytest.mark.parametrize("cached", [True, False])
def test_queries_and_keys_turn_by_their_positions_and_values_do_not(name, loops_, cached, model):
    net = model(name)
    config, block = net.config, net.model.transformer.blocks[0]
    heads, kv_heads, width = config.n_heads, config.n_kv_heads, config.head_dim
    positions = torch.tensor([0, 1, 77, 300])
    qkv = torch.randn(4, heads + 2 * kv_heads, width)
    before = qkv.double()
    rotary = net._rotary(positions, torch.float32)
    cache = torch.zeros(2, 400, 2 * kv_heads, width) if cached else None
    places = torch.tensor([5, 399, 400, 731])
    layout = PackedLayout(positions, places if cached else None, ())
    if not loops_:
        rotary.turn_(qkv[:, : heads + kv_heads])
    kv = block._write(qkv, rotary, layout, cache, loops=loops_)
    assert (kv is cache) == cached
    written = kv.flatten(0, 1)[places] if cached else kv
    if cached:
        assert cache.flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist() == places.tolist()
    assert torch.equal(written[:, kv_heads:], before[:, heads + kv_heads :].float())
    found = torch.cat((qkv[:, :heads], written[:, :kv_heads]), 1)
    half = width // 2
    for token, head, i in itertools.product(range(4), range(heads + kv_heads), range(half)):
        angle = int(positions[token]) * config.rope_theta ** (-2 * i / width)
        x = complex(*before[token, head, i::half].tolist())
        turned = x * cmath.exp(1j * angle)
        got = complex(*found[token, head, i::half].tolist())
        assert math.isclose(abs(got - turned), 0, abs_tol=2e-5 * abs(x))
