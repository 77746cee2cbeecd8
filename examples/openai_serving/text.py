"""Prompts to token ids, and committed tokens to text that can be sent at once.

What is sent cannot be taken back: a character whose bytes are not all there is held back, and so is
the beginning of what may become a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from dllm_sched import ConfigError

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character, or not yet
CONTEXT = 8  # tokens that tell how the next one is written; a character has at most 4


class Text:
    """A checkpoint's tokenizer.

    Args:
        model: Directory or hub id of the checkpoint.
        check: Raises ValueError for a text that the tokenizer would read wrongly. For a model that
            looks at the last message only.
        chat_only: Completions go through the chat template as well.
    """

    def __init__(
        self,
        model: str,
        check: Callable[[str], object] | None = None,
        *,
        chat_only: bool = False,
    ) -> None:
        from transformers import PreTrainedTokenizerFast

        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        except (OSError, ValueError, TypeError) as error:
            lines = str(error).splitlines() or [repr(error)]
            raise ConfigError(f"model {model!r}: has no tokenizer to read: {lines[0]}") from None
        self._check = check
        self._chat_only = chat_only
        self.shown: Callable[[int], str] = lru_cache(2**16)(self._shown)

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt to be continued.

        Raises:
            ValueError: If it has words that the model does not know.
        """
        if self._chat_only:
            return self.encode_chat([{"role": "user", "content": prompt}])
        if self._check is not None:
            self._check(prompt)
        return list(self._tokenizer(prompt)["input_ids"])

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins.

        Raises:
            ValueError: If there is no chat template, it takes no such conversation, or a message
                has words that the model does not know.
        """
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise ValueError("this model has no chat template: use /v1/completions")
        if self._check is not None:
            self._check(messages[-1]["content"])  # its template takes no more
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise ValueError(f"the chat template says: {error}") from None
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _shown(self, token: int) -> str:
        """One token by itself, special ones too: to look at, not to be joined."""
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False)


class Detokenizer:
    """Tokens in, their text out; together it is the text of all. O(1) per token with a text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # the last ones
        self._sent = 0  # characters of their text

    def feed(self, tokens: Iterable[int]) -> str:
        """Return the text that has become certain."""
        self._tokens += tokens
        text = self._decode(self._tokens)
        whole = text.rstrip(REPLACEMENT)
        new = whole[self._sent :]
        self._sent = max(self._sent, len(whole))
        if whole == text and len(self._tokens) > CONTEXT:
            sent = len(self._decode(self._tokens[-CONTEXT:]))
            if sent:  # special tokens alone would not tell that a blank has to follow
                del self._tokens[:-CONTEXT]
                self._sent = sent
        return new

    def finish(self) -> str:
        """Return what was held back: bytes that will not become a character any more."""
        return self._decode(self._tokens)[self._sent :]


class StopStrings:
    """Text in, the same text out, up to the first stop string.

    First is the one that is complete first, so it does not matter in which pieces the text comes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self.wanted = bool(stops)  #: whether there are any
        self._held = ""
        self.met = False  #: whether the text has come to its end

    def feed(self, text: str) -> str:
        """Return what is certain to come before any stop string."""
        if self.met or not text:
            return ""
        text = self._held + text
        ends = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]  # fmt: skip
        if ends:
            self.met = True
            self._held = ""
            return text[: min(ends)[1]]
        longest = max(map(len, self._stops), default=1) - 1
        keep = next(
            (
                size
                for size in range(min(longest, len(text)), 0, -1)
                if any(stop.startswith(text[-size:]) for stop in self._stops)
            ),
            0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back: it has not become a stop string."""
        held, self._held = self._held, ""
        return held


def provisional(shown: Callable[[int], str], tokens: Sequence[int | None]) -> list[Any]:
    """The text of each token by itself, None where it is masked."""
    return [None if token is None else shown(token) for token in tokens]
