"""The model in the box: a small LLaDA and its D2F LoRA, with a task whose answers can be checked.

Everything lies in this package, so it runs offline and on any CPU:

    model = load_model(box.box_model_dir(), box.box_lora_dir())
    engine = D2FEngine(model, max_num_seqs=16)
    for prompt, answer in box.task.sample_requests(100, seed=0):
        request = engine.request(prompt, box.task.encode_prompt(prompt), **box.DECODING)

Importing it needs neither torch nor transformers. ``examples/train_tiny.py`` makes the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_sched_hf.box import task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "BASE_NAME",
    "DECODING",
    "LORA_NAME",
    "box_lora_dir",
    "box_model_dir",
    "build_tokenizer",
    "load_tokenizer",
    "task",
]

BASE_NAME = "llada-box"
"""The base model's directory, and what its LoRA names as its base."""

LORA_NAME = "llada-box-d2f-lora"

DECODING: dict[str, Any] = {
    "block_length": 8,
    "max_new_tokens": 48,
    "block_add_threshold": 0.1,
    "decoded_token_threshold": 0.95,
    "skip_threshold": 0.999,
}
"""Fields of ``D2FRequest`` that this model was trained for and is evaluated with.

The longest answer of 8 items has 41 tokens, its end-of-text included. ``decoding.json`` beside the
weights says the same.
"""


def box_model_dir() -> Path:
    """Return the directory of the base: config, float16 weights, tokenizer, decoding settings."""
    return Path(__file__).parent / BASE_NAME


def box_lora_dir() -> Path:
    """Return the directory of the D2F LoRA, in PEFT's layout."""
    return Path(__file__).parent / LORA_NAME


def load_tokenizer() -> PreTrainedTokenizerFast:
    """Return the shipped tokenizer.

    ``apply_chat_template`` gives the ids of ``task.encode_prompt``, ``encode`` and ``decode`` agree
    with those of ``task``.
    """
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - needed here only

    return PreTrainedTokenizerFast.from_pretrained(box_model_dir())


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer from ``task.VOCABULARY``: one token a word, one a digit."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words = {word: i for i, word in enumerate(task.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=task.EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=False),  # a blank before all but the first
            decoders.Fuse(),
            decoders.Replace(Regex(r"(?<=\d) (?=\d)"), ""),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=task.BOS,
        eos_token=task.EOS,
        pad_token=task.EOS,
        mask_token=task.MASK,
        additional_special_tokens=[task.EOT],
        clean_up_tokenization_spaces=False,
        model_max_length=128,
        chat_template=task.BOS + "{{ messages[-1]['content'] }}" + task.EOT,
    )
