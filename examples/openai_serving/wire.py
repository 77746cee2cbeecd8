"""OpenAI's JSON: what a client may ask for, and what it is told.

Every field that is known is checked before anything is tokenised, and an error names the field.
Fields of OpenAI's that this server cannot honour are refused unless they say what happens anyway;
fields that nobody knows are refused too, since a misspelt limit is a limit that does not hold.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

MAX_CHOICES = 128
MAX_STOPS = 4  # as OpenAI
Check = Callable[[Any], Any]  # returns the value to use, or raises ValueError("must be ...")


@attrs.define(eq=False)
class ApiError(Exception):
    """Something that a client is told in OpenAI's error object."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error" if self.status >= 500 else _INVALID),
                "param": self.param,
                "code": self.code,
            }
        }


_INVALID = "invalid_request_error"
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}


@attrs.frozen(kw_only=True)
class Ask:
    """What a client asks for, checked; prompts are still text, unless they came as token ids."""

    chat: bool
    prompts: tuple[Any, ...]  #: texts, lists of token ids, or one list of messages
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    user: str = ""
    stream: bool = False
    include_usage: bool = False
    # Not OpenAI's:
    provisional: bool = False
    deadline_s: float = math.inf  #: from now on
    queue_timeout_s: float = math.inf
    priority: int = 0
    thresholds: Mapping[str, float] = attrs.field(factory=dict)

    @property
    def prompt_field(self) -> str:
        return "messages" if self.chat else "prompt"


# --- fields -------------------------------------------------------------------------------------


def whole(low: int, high: int) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return check


def number(low: float, high: float, *, above: bool = False) -> Check:
    def check(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high or (above and value == low):
            raise ValueError(f"must be a number {'above' if above else 'from'} {low} to {high}")
        return float(value)

    return check


def flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be Unicode text, without lone surrogates") from None
    return value


def stops(value: Any) -> tuple[str, ...]:
    listed = value if type(value) is list else [value]
    if len(listed) > MAX_STOPS or not all(map(text, listed)):
        raise ValueError(f"must be a string, or a list of up to {MAX_STOPS}, none of them empty")
    return tuple(listed)


def stream_options(value: Any) -> bool:
    if type(value) is not dict or value.keys() - {"include_usage", "include_obfuscation"}:
        raise ValueError('must be an object: {"include_usage": true}')
    return flag(value.get("include_usage", False))


def prompt(value: Any) -> tuple[str | list[int], ...]:
    """One prompt or a list of them, each a text or a list of token ids."""
    if type(value) is not list or (value and all(type(each) is int for each in value)):
        value = [value]
    if not value:
        raise ValueError("must not be empty")
    for each in value:
        if type(each) is not list:
            text(each)
        elif not each or not all(type(token) is int and token >= 0 for token in each):
            raise ValueError("must hold texts or lists of token ids, none of them empty")
        if not each:
            raise ValueError("must not be empty")
    return tuple(value)


def messages(value: Any) -> tuple[list[dict[str, str]], ...]:
    """A conversation; of the kinds of content only text."""
    if type(value) is not list or not value:
        raise ValueError("must be a list of messages, at least one")
    said = []
    for i, message in enumerate(value):
        if type(message) is not dict or message.get("role") not in _ROLES:
            raise ValueError(f"[{i}]: must be an object with a role out of {', '.join(_ROLES)}")
        content = message.get("content")
        if type(content) is list:
            parts = [part.get("text") if _is_text(part) else None for part in content]
            content = None if None in parts else "".join(map(text, parts))
        if type(content) is not str:
            raise ValueError(f"[{i}]: content must be text")
        said.append({"role": message["role"], "content": text(content)})
    return (said,)


def _is_text(part: Any) -> bool:
    return type(part) is dict and part.get("type") == "text"


_ROLES = ("system", "developer", "user", "assistant", "tool")
_THRESHOLDS = ("block_add_threshold", "decoded_token_threshold", "skip_threshold")
_FIELDS: dict[str, Check] = {
    "model": text,
    "n": whole(1, MAX_CHOICES),
    "max_tokens": whole(1, 10**6),
    "temperature": number(0, 2),
    "seed": whole(-(2**63), 2**63 - 1 - 2 * MAX_CHOICES),
    "stop": stops,
    "user": text,
    "stream": flag,
    "stream_options": stream_options,
    "provisional": flag,
    "deadline_s": number(0, 1e9, above=True),
    "queue_timeout_s": number(0, 1e9),
    "priority": whole(-(2**31), 2**31),
    **dict.fromkeys(_THRESHOLDS, number(0, 1)),
}
_COMPLETION = {**_FIELDS, "prompt": prompt}
_CHAT = {**_FIELDS, "messages": messages, "max_completion_tokens": _FIELDS["max_tokens"]}

_ANYTHING = object()
# Of OpenAI's, not to be had here: what they may say all the same, since it is what happens anyway.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (_ANYTHING,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "metadata": (_ANYTHING,),
    "service_tier": (_ANYTHING,),
}


def read_ask(body: Any, *, chat: bool, model: str) -> Ask:
    """Check a request's body.

    Raises:
        ApiError: 400 that names the field, 404 for another model.
    """
    if type(body) is not dict:
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    fields = _CHAT if chat else _COMPLETION
    found: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:  # as if it were not there
            continue
        if name in fields:
            try:
                found[name] = fields[name](value)
            except ValueError as error:
                raise ApiError(400, f"{name}: {error}", name, "invalid_value") from None
        elif name not in _WITHOUT_EFFECT:
            raise ApiError(400, f"{name}: unknown field", name, "unknown_field")
        elif not any(fine is _ANYTHING or fine == value for fine in _WITHOUT_EFFECT[name]):
            raise ApiError(400, f"{name}: not supported by this server", name, "unsupported")
    asked_of = found.pop("model", model)
    if asked_of != model:
        message = f"there is no model {asked_of!r} here, only {model!r}"
        raise ApiError(404, message, "model", "model_not_found")
    name = "messages" if chat else "prompt"
    if name not in found:
        raise ApiError(400, f"{name}: is required", name, "missing")
    found["include_usage"] = found.pop("stream_options", False)
    if "max_completion_tokens" in found:
        found["max_tokens"] = found.pop("max_completion_tokens")
    thresholds = {name: found.pop(name) for name in _THRESHOLDS if name in found}
    ask = Ask(chat=chat, prompts=found.pop(name), thresholds=thresholds, **found)
    if len(ask.prompts) * ask.n > MAX_CHOICES:
        message = f"n: {ask.n} for {len(ask.prompts)} prompts are more than {MAX_CHOICES} choices"
        raise ApiError(400, message, "n", "invalid_value")
    if ask.provisional and not ask.stream:
        message = "provisional: needs stream: true"
        raise ApiError(400, message, "provisional", "invalid_value")
    return ask


# --- answers ------------------------------------------------------------------------------------


@attrs.frozen
class Words:
    """Puts the answers of one completion into OpenAI's objects."""

    id: str
    chat: bool
    model: str
    created: int = attrs.field(factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """The answer in one piece."""
        kind = "chat.completion" if self.chat else "text_completion"
        return self._object(kind, list(choices)) | {"usage": usage}

    def choice(self, index: int, text: str, reason: str, facts: Any) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        if self.chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        ended = {"finish_reason": reason, "dllm": facts}
        return {"index": index, **said, "logprobs": None, **ended}

    def chunk(
        self,
        index: int,
        text: str | None = None,
        *,
        role: bool = False,
        reason: str | None = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """A piece of one choice; ``extra`` goes beside the choices."""
        said: dict[str, Any] = {"text": text or ""}
        if self.chat:
            delta = {"role": "assistant", "content": text or ""} if role else {}
            said = {"delta": delta if text is None else delta | {"content": text}}
        choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
        return self._object(self._chunk, [choice]) | extra

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        """The chunk after the last one of every choice."""
        return self._object(self._chunk, []) | {"usage": usage}

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
