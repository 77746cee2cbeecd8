"""The model: recorded logits, explicit attention, refusals."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch

from dllm_sched.errors import ConfigError
from dllm_sched_hf import modeling_llada
from dllm_sched_hf.modeling_llada import LLaDAConfig, LLaDAModelLM, block_causal_mask

MODELS = ["tiny_mha", "tiny_gqa"]
TOLERANCE = 5e-4


def _largest(got, expected):
    return float(np.abs(got.numpy() - expected).max())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("logits", {"lora": False}),
        ("logits_lora", {"merge": False}),
        ("logits_lora_merged", {"merge": True}),
    ],
)
def test_logits_are_the_recorded_ones(name, what, options, model, golden):
    net = model(name, **options)
    with np.load(golden / f"forward_{name}.npz") as stored, torch.inference_mode():
        for number in range(5):
            got = net(torch.from_numpy(stored[f"ids_{number}"])[None]).logits[0]
            assert _largest(got, stored[f"{what}_{number}"]) <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_are_the_recorded_ones(name, model, golden):
    with np.load(golden / f"forward_{name}.npz") as stored, torch.inference_mode():
        ids = torch.from_numpy(stored["ids_3"])[None]
        states = model(name, lora=False)(ids, output_hidden_states=True).hidden_states
        assert len(states) == len(stored["hidden_3"])
        assert _largest(torch.cat(states), stored["hidden_3"]) <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_block_causal_logits_are_the_recorded_ones(name, model, golden):
    net = model(name, merge=False)
    with np.load(golden / f"forward_{name}.npz") as stored, torch.inference_mode():
        for number in range(4):
            ids = stored[f"bc_ids_{number}"]
            prompt_len, block_length, _ = stored[f"bc_meta_{number}"].tolist()
            mask = block_causal_mask(prompt_len, block_length, len(ids))
            got = net(torch.from_numpy(ids)[None], mask).logits[0]
            assert _largest(got, stored[f"bc_logits_lora_{number}"]) <= TOLERANCE


def test_block_causal_mask_counts_blocks_from_the_prompts_end():
    mask = block_causal_mask(3, 2, 7)
    assert mask.sum(1).tolist() == [3, 3, 3, 5, 5, 7, 7]
    assert all(row.tolist() == sorted(row.tolist(), reverse=True) for row in mask)


def test_float_and_bool_bias_agree(model):
    net, ids = model(), torch.arange(12)[None]
    mask = block_causal_mask(4, 4, 12)
    bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    with torch.inference_mode():
        torch.testing.assert_close(net(ids, mask).logits, net(ids, bias).logits)


def test_attention_mask_is_refused(model):
    with pytest.raises(ConfigError, match="attention_bias"):
        model()(torch.zeros((1, 3), dtype=torch.int64), attention_mask=torch.ones(1, 3))


def test_config_has_the_published_keys(golden, tmp_path):
    published = json.loads((golden / "tiny_mha" / "config.json").read_text())
    LLaDAConfig(**published).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    version = published.pop("transformers_version")
    assert version != saved.pop("transformers_version")
    del published["use_cache"]  # transformers keeps it with the generation settings
    assert {key: saved.get(key, "absent") for key in published} == published


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alibi", True),
        ("weight_tying", True),
        ("include_bias", True),
        ("n_heads", 7),
        ("n_kv_heads", 3),
        ("mask_token_id", 10**6),
        ("embedding_size", 10),
        ("eos_token_id", 126464),
        ("eos_token_id", 126336),  # the mask
        ("eos_token_id", None),
        ("pad_token_id", -1),
        ("mask_token_id", None),
        ("mask_token_id", 1.0),
        ("rope_theta", 0),
        ("rope_theta", -1.0),
        ("rope_theta", float("nan")),
        ("rope_theta", "10000"),
        ("rms_norm_eps", None),
        ("init_std", -0.1),
        ("n_heads", "4"),
        ("n_layers", True),
        ("d_model", "64"),
        ("mlp_ratio", "4"),
        ("mlp_hidden_size", 0),
        ("vocab_size", None),
        ("max_sequence_length", 0),
        ("max_sequence_length", 512.5),
    ],
)
def test_config_names_what_it_cannot_run(key, value):
    with pytest.raises(ConfigError, match=key):
        LLaDAConfig(**{key: value})


def test_shards_load_like_one_file(model, tmp_path):
    net = model("tiny_gqa", lora=False)
    net.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    again = LLaDAModelLM.from_pretrained(tmp_path).state_dict()
    assert again.keys() == net.state_dict().keys()
    assert all(torch.equal(again[key], value) for key, value in net.state_dict().items())


def test_gradients_reach_every_weight():
    config = LLaDAConfig(
        d_model=16,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        mlp_hidden_size=24,
        vocab_size=20,
        mask_token_id=19,
        eos_token_id=18,
        pad_token_id=18,
    )
    net = LLaDAModelLM(config)
    net(torch.randint(0, 19, (2, 9))).logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


def test_joined_weights_are_the_same_parameters_until_the_model_moves(model, tmp_path):
    net = model("tiny_gqa")
    net = type(net)(net.config).eval()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    parameters = dict(net.named_parameters())
    net.join_weights()
    joined = [block.joined for block in net.model.transformer.blocks]
    net.join_weights()
    again = [block.joined for block in net.model.transformer.blocks]
    assert all(
        new.qkv is old.qkv and new.ff is old.ff for new, old in zip(again, joined, strict=True)
    )
    assert all(net.get_parameter(name) is value for name, value in parameters.items())
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
    with torch.no_grad():  # what is written into a parameter is in the product as well
        net.model.transformer.blocks[0].v_proj.weight.fill_(2.0)
    assert (joined[0].qkv[:, -1] == 2.0).all()
    net.save_pretrained(tmp_path)
    again = LLaDAModelLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[key], value) for key, value in net.state_dict().items())
    net.double()
    assert all(block.joined is None for block in net.model.transformer.blocks)


def test_a_copy_joins_its_own_weights(model):
    net = copy.deepcopy(model("tiny_gqa"))
    net.join_weights()
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):  # noqa: S301 - just made
        assert all(block.joined is None for block in twin.model.transformer.blocks)
        twin.join_weights()
        with torch.no_grad():
            twin.model.transformer.blocks[0].v_proj.weight.fill_(2.0)
        assert (twin.model.transformer.blocks[0].joined.qkv[:, -1] == 2.0).all()
    assert not (net.model.transformer.blocks[0].joined.qkv[:, -1] == 2.0).any()


@pytest.fixture
def onednn(monkeypatch):
    """Rows of every product that oneDNN was asked for."""
    linear, rows = modeling_llada._ONEDNN, []
    if linear is None:
        pytest.skip("this torch was built without oneDNN")

    def noted(x, weight, *rest):
        assert x.is_contiguous()
        assert weight.is_contiguous()
        rows.append(len(x))
        return linear(x, weight, *rest)

    monkeypatch.setattr(modeling_llada, "_ONEDNN", noted)
    return rows


def _product(length, weight, dtype=torch.float32):
    """A product, and added to something; how far both are off."""
    torch.manual_seed(length)
    x = torch.randn(length, 2 * weight.shape[0]).to(dtype)[:, ::2]
    expected = x.double() @ weight.double()
    residual = torch.randn_like(expected)
    added = residual.to(dtype, copy=True)
    modeling_llada._add_times(added, x, weight)
    off = modeling_llada._times(x, weight) - expected
    return max(off.abs().max(), (added - residual - expected).abs().max())


@pytest.mark.parametrize("length", [4096, 4097, 5000, 8191])
def test_large_products_are_the_same_by_onednn(length, onednn):
    weight = torch.randn(24, 16).t()  # [16, 24]: 384 multiplications a row
    assert _product(2 * length, weight) < 1e-4
    assert len(onednn) == 2


def test_onednn_sees_few_numbers_of_rows_and_hardly_more_than_there_are(onednn, monkeypatch):
    monkeypatch.setattr(modeling_llada, "_LARGE", 0)
    weight = torch.randn(3, 2).t()
    for length in range(1, 1025):
        modeling_llada._times(torch.zeros(length, 2), weight)
    assert all(1 <= padded / n < 1.125 for n, padded in enumerate(onednn, 1))
    # All up to 15, then 8 from one power of two to the next.
    assert len(set(onednn)) == 15 + 6 * 8 + 1


@pytest.mark.parametrize(
    ("weight", "dtype"),
    [
        (torch.ones(1024, 1025).t(), torch.float64),
        (torch.ones(1024, 1025).t(), torch.bfloat16),
        (torch.ones(1025, 1024), torch.float32),  # strides that oneDNN has no fast code for
        (torch.ones(10, 10).t(), torch.float32),
    ],
)
def test_other_products_are_left_to_torch(weight, dtype, onednn):
    assert _product(7, weight.to(dtype), dtype) < (20 if dtype == torch.bfloat16 else 1e-2)
    assert onednn == []


def test_onednn_can_be_switched_off(onednn, monkeypatch):
    weight = torch.randn(1025, 1024).t()
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        assert _product(7, weight) < 1e-2
    assert onednn == []
    assert _product(7, weight) < 1e-2
    assert onednn == [7, 7]


@pytest.mark.parametrize("name", ["d2f_gqa_aggressive_b16", "fast_dllm_dual_thr05_b4"])
def test_recorded_steps_are_the_same_if_every_product_is_large(
    name, onednn, record, golden_request, golden_engine, assert_recorded, loop, monkeypatch
):
    monkeypatch.setattr(modeling_llada, "_LARGE", 0)
    stored = record(name)
    engine = golden_engine(stored, 4)
    drive = loop(engine)
    for slot, entry in enumerate(stored["requests"][:4]):
        drive.join(slot, golden_request(stored, entry))
    drive.run()
    for entry in stored["requests"][:4]:
        assert_recorded(drive.outputs[str(entry["id"])], entry)
    layers = engine.model.config.n_layers
    assert len(onednn) == engine.num_forwards * (4 * layers + 1)


@torch.inference_mode()
def test_a_layer_that_was_given_a_bias_keeps_it(model):
    net = copy.deepcopy(model("tiny_gqa"))
    with torch.inference_mode(mode=False):
        transformer = net.model.transformer
        for owner in (transformer, transformer.blocks[0]):
            old = owner.ff_out
            owner.ff_out = torch.nn.Linear(old.in_features, old.out_features)
            owner.ff_out.weight = old.weight
    net.join_weights()
    assert transformer.blocks[0].joined.ff_out is None
    hidden = torch.randn(5, net.config.d_model)
    expected = hidden @ transformer.ff_out.weight.t() + transformer.ff_out.bias
    torch.testing.assert_close(net.logits(hidden), expected)


def test_weights_are_joined_anew_if_others_begin_at_the_same_place(model):
    net = copy.deepcopy(model("tiny_mha"))
    net.join_weights()
    weight = net.model.transformer.blocks[0].q_proj.weight
    weight.data = weight.data.t()
    net.join_weights()
    assert torch.equal(net.model.transformer.blocks[0].joined.qkv[:, : len(weight)], weight.t())


def test_layers_that_share_a_weight_are_refused(model):
    net = copy.deepcopy(model("tiny_mha"))
    first, second, *_ = net.model.transformer.blocks
    second.k_proj.weight = first.v_proj.weight
    with pytest.raises(ConfigError, match=r"blocks\[1\].k_proj.weight is the weight of another"):
        net.join_weights()
