"""The box model's task: short lists of lettered numbers, rewritten.

A prompt is a verb and 1 to `MAX_ITEMS` lettered numbers from 0 to 999; the verb says what to do:

| verb | prompt | answer |
|---|---|---|
| `spell` | `spell a 405 b 12` | `a four hundred five b twelve` |
| `digits` | `digits a four hundred five b twelve` | `a 405 b 12` |
| `reverse` | `reverse a 405 b 12 c 7` | `c 7 b 12 a 405` |
| `sort` | `sort c 7 a 405 b 12` | `a 405 b 12 c 7` |

Every prompt has exactly one right answer, so an output is checked by comparing texts. Answers are
2 to 40 tokens long, which is what makes requests converge after different numbers of steps.

Prompts fall into two splits by a checksum of their text (CRC-32 modulo 10: 0 is `serve`, the rest
is `train`). The split is a property of the text alone, so no prompt that is ever served or
evaluated can have been trained on, whatever the seeds.

Pure Python: neither torch nor tokenizers is imported here. `encode` and `decode` agree with the
shipped `tokenizer.json`, which is built from `VOCABULARY`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from random import Random
from typing import Literal

__all__ = [
    "BOS",
    "BOS_ID",
    "EOS",
    "EOS_ID",
    "EOT",
    "EOT_ID",
    "LETTERS",
    "MASK",
    "MASK_ID",
    "MAX_ITEMS",
    "VERBS",
    "VOCABULARY",
    "answer_of",
    "check",
    "decode",
    "encode",
    "encode_prompt",
    "make_prompt",
    "sample_requests",
    "spell_number",
    "split_of",
]

Split = Literal["train", "serve"]

BOS = "<|startoftext|>"
EOS = "<|endoftext|>"  # also the padding token, as in LLaDA
MASK = "<|mdm_mask|>"
EOT = "<|eot_id|>"

VERBS = ("spell", "digits", "reverse", "sort")
LETTERS = "abcdefgh"
MAX_ITEMS = len(LETTERS)

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()

VOCABULARY: tuple[str, ...] = (
    BOS, EOS, MASK, EOT, *VERBS, *"0123456789", *LETTERS, *_SMALL, *_TENS, "hundred"
)  # fmt: skip
"""Every token, in the order of its id."""

_ID = {token: i for i, token in enumerate(VOCABULARY)}
BOS_ID, EOS_ID, MASK_ID, EOT_ID = (_ID[token] for token in (BOS, EOS, MASK, EOT))
_SPECIAL = frozenset((BOS_ID, EOS_ID, MASK_ID, EOT_ID))
_ITEM = r"[a-h] (\d{1,3}|[a-z]{2,}( [a-z]{2,})*)"
_LISTING = re.compile(f"{_ITEM}( {_ITEM})*")
_NUMBER = re.compile(r"\d+")
_BETWEEN_DIGITS = re.compile(r"(?<=\d) (?=\d)")


def spell_number(number: int) -> str:
    """`number` (0 to 999) in English words, without hyphens and without "and".

    Raises:
        ValueError: if `number` is out of range.
    """
    if not 0 <= number <= 999:
        raise ValueError(f"number must be between 0 and 999, got {number}")
    hundreds, rest = divmod(number, 100)
    words = [_SMALL[hundreds], "hundred"] if hundreds else []
    if rest >= 20:
        tens, units = divmod(rest, 10)
        words += [_TENS[tens - 2], _SMALL[units]] if units else [_TENS[tens - 2]]
    elif rest or not words:
        words.append(_SMALL[rest])
    return " ".join(words)


_NUMBER_OF_WORDS = {spell_number(number): str(number) for number in range(1000)}


def make_prompt(rng: Random) -> str:
    """A random prompt: verb, number of items and number of digits are uniform."""
    verb = rng.choice(VERBS)
    count = rng.randint(1, MAX_ITEMS)
    letters = list(LETTERS[:count])
    if verb == "sort":
        rng.shuffle(letters)
    words = [verb]
    for letter in letters:
        number = rng.randrange(*rng.choice(((0, 10), (10, 100), (100, 1000))))
        words += [letter, spell_number(number) if verb == "digits" else str(number)]
    return " ".join(words)


def answer_of(prompt: str) -> str:
    """The one right answer to `prompt`.

    Raises:
        ValueError: if `prompt` is not of the form that `make_prompt` gives.
    """
    verb, _, listing = prompt.partition(" ")
    try:
        if not _LISTING.fullmatch(listing):
            raise ValueError("after the verb come a letter from a to h and its number, repeatedly")
        items = [(item[0], item[2:]) for item in re.split(r" (?=[a-h] )", listing)]
        if verb == "spell":
            items = [(letter, spell_number(int(number))) for letter, number in items]
        elif verb == "digits":
            items = [(letter, _NUMBER_OF_WORDS[words]) for letter, words in items]
        elif verb == "reverse":
            items.reverse()
        elif verb == "sort":
            items.sort()
        else:
            raise ValueError(f"the verb must be one of {', '.join(VERBS)}")
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"not a prompt of this task: {prompt!r} ({error})") from error
    return " ".join(f"{letter} {number}" for letter, number in items)


def check(prompt: str, output: str) -> bool:
    """Whether `output` (decoded text, surrounding blanks ignored) answers `prompt` exactly."""
    return output.strip() == answer_of(prompt)


def split_of(prompt: str) -> Split:
    """The split that `prompt` belongs to: about one prompt in ten is never trained on."""
    return "train" if zlib.crc32(prompt.encode()) % 10 else "serve"


def sample_requests(
    n: int, seed: int, split: Split = "serve", *, distinct: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield `n` pairs (prompt, answer) of one split; the same arguments give the same pairs.

    Args:
        n: how many pairs, at least 0.
        seed: any integer.
        split: "serve" for prompts never trained on, or "train".
        distinct: leave out prompts already given. Short prompts are few: keep `n` below 2,000.
    """
    rng = Random(f"{split} {seed}")
    seen: set[str] = set()
    while n > 0:
        prompt = make_prompt(rng)
        if split_of(prompt) != split or prompt in seen:
            continue
        if distinct:
            seen.add(prompt)
        n -= 1
        yield prompt, answer_of(prompt)


def encode(text: str) -> list[int]:
    """Token ids of `text`: one a word, one a digit.

    Raises:
        ValueError: if a word is not in the vocabulary.
    """
    words = _NUMBER.sub(lambda digits: " ".join(digits[0]), text).split()
    try:
        return [_ID[word] for word in words]
    except KeyError as error:
        raise ValueError(f"not a word of the box model's vocabulary: {error}") from None


def encode_prompt(prompt: str) -> list[int]:
    """Token ids of `prompt` between begin-of-text and end-of-turn, as the model was trained."""
    return [BOS_ID, *encode(prompt), EOT_ID]


def decode(ids: Iterable[int]) -> str:
    """The text up to the first end-of-text, without special tokens.

    Raises:
        IndexError: if an id is outside the vocabulary.
    """
    words: list[str] = []
    for i in ids:
        if i == EOS_ID:
            break
        if i not in _SPECIAL:
            words.append(VOCABULARY[i])
    return _BETWEEN_DIGITS.sub("", " ".join(words))
