"""The model in the box: task, splits, tokenizer, files, training script, and its answers."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType

import numpy as np
import pytest

from dllm_sched_hf import box
from dllm_sched_hf.box import task

SCRIPT = Path(__file__).parents[2] / "examples" / "train_tiny.py"
torch = pytest.importorskip("torch")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("train_tiny", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_tiny"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_tiny"]


# --- the task -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (20, "twenty"),
        (99, "ninety nine"),
        (100, "one hundred"),
        (405, "four hundred five"),
        (911, "nine hundred eleven"),
        (730, "seven hundred thirty"),
    ],
)
def test_numbers_are_spelled_in_english(number: int, words: str) -> None:
    assert task.spell_number(number) == words


@pytest.mark.parametrize("number", [-1, 1000])
def test_other_numbers_are_refused(number: int) -> None:
    with pytest.raises(ValueError, match="between 0 and 999"):
        task.spell_number(number)


def test_every_number_has_its_own_words() -> None:
    assert len({task.spell_number(number) for number in range(1000)}) == 1000


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("spell a 405 b 12", "a four hundred five b twelve"),
        ("digits a four hundred five b twelve", "a 405 b 12"),
        ("reverse a 405 b 12 c 7", "c 7 b 12 a 405"),
        ("sort c 7 a 405 b 12", "a 405 b 12 c 7"),
    ],
)
def test_answers(prompt: str, answer: str) -> None:
    assert task.answer_of(prompt) == answer
    assert task.check(prompt, f" {answer} ")
    assert not task.check(prompt, answer + " zero")
    assert not task.check(prompt, "")


@pytest.mark.parametrize(
    "prompt",
    ["", "spell", "spell a", "add a 1 b 2", "spell a twelve", "reverse a 1 2", "digits a so"],
)
def test_what_is_no_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(ValueError, match="not a prompt of this task"):
        task.answer_of(prompt)


def test_splits_are_disjoint_and_every_sample_lies_in_its_own() -> None:
    train = {prompt for prompt, _ in task.sample_requests(5_000, 0, "train")}
    serve = {prompt for prompt, _ in task.sample_requests(5_000, 0, "serve")}
    assert not train & serve
    assert {task.split_of(prompt) for prompt in train} == {"train"}
    assert {task.split_of(prompt) for prompt in serve} == {"serve"}


def test_about_one_prompt_in_ten_is_held_out() -> None:
    rng = Random(0)
    held_out = sum(task.split_of(task.make_prompt(rng)) == "serve" for _ in range(10_000))
    assert 800 < held_out < 1200


def test_samples_are_repeatable_and_distinct_where_asked() -> None:
    assert list(task.sample_requests(50, 1)) == list(task.sample_requests(50, 1))
    assert list(task.sample_requests(50, 1)) != list(task.sample_requests(50, 2))
    assert len(set(task.sample_requests(2_000, 3, distinct=True))) == 2_000
    assert list(task.sample_requests(0, 1)) == []


def test_every_sample_fits_what_the_model_is_served_with() -> None:
    for prompt, answer in task.sample_requests(5_000, 4):
        assert len(task.encode_prompt(prompt)) <= 43
        assert len(task.encode(answer)) < box.DECODING["max_new_tokens"]


def test_lengths_vary_widely() -> None:
    lengths = [len(task.encode(answer)) for _, answer in task.sample_requests(2_000, 5)]
    low, high = np.percentile(lengths, (10, 90))
    assert high >= 4 * low


# --- the tokenizer ------------------------------------------------------------------------------


def test_text_survives_encoding() -> None:
    for prompt, answer in task.sample_requests(500, 6):
        assert task.decode(task.encode(prompt)) == prompt
        assert task.decode([*task.encode(answer), task.EOS_ID, *task.encode("zero")]) == answer


def test_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        task.encode("spell a million")


def test_shipped_tokenizer_agrees_with_the_task() -> None:
    tokenizer = box.load_tokenizer()
    assert tuple(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))) == task.VOCABULARY
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (task.BOS_ID, task.EOS_ID)
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (task.EOS_ID, task.MASK_ID)
    for prompt, answer in task.sample_requests(200, 7):
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=True, return_dict=True
        )
        assert chat["input_ids"] == task.encode_prompt(prompt)
        ids = task.encode(answer)
        assert tokenizer(answer, add_special_tokens=False).input_ids == ids
        assert tokenizer.decode([*ids, task.EOS_ID], skip_special_tokens=True) == answer


def test_shipped_tokenizer_is_the_one_the_vocabulary_makes() -> None:
    built = json.loads(box.build_tokenizer().backend_tokenizer.to_str())
    assert json.loads((box.box_model_dir() / "tokenizer.json").read_text()) == built


# --- the files ----------------------------------------------------------------------------------


def test_config_matches_weights_and_task() -> None:
    from safetensors.torch import load_file

    config = json.loads((box.box_model_dir() / "config.json").read_text())
    tensors = load_file(box.box_model_dir() / "model.safetensors")
    width, layers = config["d_model"], config["n_layers"]
    assert config["vocab_size"] == config["embedding_size"] == len(task.VOCABULARY)
    assert (config["mask_token_id"], config["eos_token_id"]) == (task.MASK_ID, task.EOS_ID)
    assert len(tensors) == 3 + 9 * layers
    assert tensors["model.transformer.wte.weight"].shape == (len(task.VOCABULARY), width)
    assert tensors["model.transformer.ff_out.weight"].shape == (len(task.VOCABULARY), width)
    for layer in range(layers):
        block = f"model.transformer.blocks.{layer}."
        assert tensors[block + "q_proj.weight"].shape == (width, width)
        assert tensors[block + "up_proj.weight"].shape == (config["mlp_hidden_size"], width)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}


def test_lora_names_its_base_and_is_half_precision() -> None:
    from safetensors.torch import load_file

    config = json.loads((box.box_lora_dir() / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == box.BASE_NAME == box.box_model_dir().name
    assert config["target_modules"] == ["attn_out", "k_proj", "q_proj", "v_proj"]
    tensors = load_file(box.box_lora_dir() / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}


def test_decoding_file_says_what_the_code_says() -> None:
    assert json.loads((box.box_model_dir() / "decoding.json").read_text()) == box.DECODING


def test_box_is_small() -> None:
    files = [*box.box_model_dir().iterdir(), *box.box_lora_dir().iterdir()]
    assert sum(file.stat().st_size for file in files) < 6_000_000


# --- training and answers -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "pipeline", "two_stream"])
def test_a_position_sees_what_it_may_when_decoding(script: ModuleType, kind: str) -> None:
    examples = script.make_examples(8, 0)
    batch = script.make_batch(examples, kind, 4, np.random.default_rng(0))
    for row, example in enumerate(examples):
        prompt_len, n = len(example.prompt), batch.ids.shape[1]
        num_blocks = int((batch.positions[row].max() + 1 - prompt_len) // 4)
        end = prompt_len + 4 * num_blocks
        # What a position of the (masked) answer may know: position -> clean or as it is.
        for i in range(end):
            seen = batch.visible[row, 0, i].nonzero()[:, 0]
            block = -1 if i < prompt_len else (i - prompt_len) // 4
            limit = end if kind == "plain" else prompt_len + 4 * (block + 1)
            assert batch.positions[row, seen].tolist() == list(range(limit)) or (
                kind == "two_stream"
                and sorted(batch.positions[row, seen].tolist()) == list(range(limit))
            )
            if kind == "two_stream" and block >= 0:
                own = (seen >= prompt_len) & (seen < end)
                assert (batch.positions[row, seen[own]] >= prompt_len + 4 * block).all()
                assert (batch.ids[row, seen[~own]] != task.MASK_ID).all()
        learnt = batch.target[row] != script.IGNORED
        assert (batch.ids[row, learnt] == task.MASK_ID).all()
        assert n >= end


def test_two_streams_give_the_logits_that_decoding_gives(script: ModuleType) -> None:
    from dllm_sched_hf import block_causal_mask, load_model

    model = load_model(box.box_model_dir(), device="cpu")
    (example,) = script.make_examples(1, 1)
    batch = script.make_batch([example], "two_stream", 8, np.random.default_rng(1))
    prompt_len = len(example.prompt)
    blocks = -(-len(example.answer) // 8)
    clean = batch.ids[0, prompt_len + 8 * blocks :]
    with torch.no_grad():
        both = script.logits_at(model, batch)[0]
        for block in range(blocks):
            start, end = prompt_len + 8 * block, prompt_len + 8 * (block + 1)
            ids = torch.cat(
                (batch.ids[0, :prompt_len], clean[: 8 * block], batch.ids[0, start:end])
            )
            alone = model(ids[None], block_causal_mask(prompt_len, 8, len(ids))[None, None]).logits[
                0
            ]
            torch.testing.assert_close(both[start:end], alone[start:], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_training_script_runs_from_end_to_end(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = script.main(["--smoke", "--out", str(tmp_path)])
    assert 0.0 <= report.exact <= 1.0
    assert "steps p10" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / box.BASE_NAME).iterdir()} == {
        path.name for path in box.box_model_dir().iterdir()
    }
    assert {path.name for path in (tmp_path / box.LORA_NAME).iterdir()} == {
        path.name for path in box.box_lora_dir().iterdir()
    }


@pytest.mark.slow
def test_box_answers_prompts_it_has_never_seen(script: ModuleType) -> None:
    report = script.evaluate(Path(box.__file__).parent, 500)
    low, _, high = report.steps
    assert report.exact >= 0.95
    assert high >= 2.5 * low
