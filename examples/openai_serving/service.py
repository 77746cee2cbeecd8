"""From an ask to an answer: requests of the scheduler, their streams, and how they end.

The choices of one ask are requests of one group: they are submitted together, and when one of them
cannot go on, or the client is gone, all of them are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import attrs

from dllm_sched import ConfigError, Finished, FinishReason, Rejected, Scheduler
from dllm_sched.runtime import AsyncDriver, Committed, Handle, Provisional
from dllm_sched_hf import D2FEngine, D2FRequest
from openai_serving.text import Detokenizer, StopStrings, Text, provisional
from openai_serving.wire import ApiError, Ask, Words, usage_of

_log = logging.getLogger("openai_server")

RETRY_AFTER_S = 1.0  # where the scheduler makes no guess
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's client heeds it: the time is over anyway
T = TypeVar("T")
Write = Callable[[dict[str, Any]], Awaitable[None]]

REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.MAX_STEPS: "length",  # a step cap of the policy
}
# Requests that end in no answer: status, code, what is said.
FAILURES = {
    FinishReason.DEADLINE: (504, "deadline", "deadline_s has passed"),
    FinishReason.QUEUE_TIMEOUT: (504, "queue_timeout", "waited queue_timeout_s without a slot"),
    FinishReason.CANCELLED: (503, "cancelled", "cancelled: the server is shutting down"),
    FinishReason.ERROR: (500, "engine_error", "the engine failed this request"),
}


@attrs.frozen(kw_only=True)
class Defaults:
    """What holds where an ask says nothing."""

    max_tokens: int  #: or what is left of the window, if less
    block_length: int
    temperature: float
    thresholds: dict[str, float]


@attrs.define(eq=False)
class Choice:
    """One answer in the making."""

    index: int
    handle: Handle
    text: str = ""
    reason: str = ""
    num_tokens: int = 0
    facts: dict[str, Any] = attrs.field(factory=dict)

    def end(self, reason: str, why: str, ended: Finished | None = None) -> None:
        """Set OpenAI's word for the end, and beside it what the scheduler says."""
        self.reason = reason
        self.facts = {"reason": why}
        if ended is not None:
            admitted_at = ended.finished_at if ended.admitted_at is None else ended.admitted_at
            self.facts |= {
                "num_steps": ended.num_steps,
                "num_blocks": 0 if ended.output is None else ended.output.num_blocks,
                "waited_s": admitted_at - ended.arrived_at,
                "latency_s": ended.finished_at - ended.arrived_at,
            }


Tell = Callable[..., Awaitable[None]]  # (choice, text, guess=None)


class Service:
    """Answers asks with a driver that runs."""

    def __init__(
        self,
        driver: AsyncDriver,
        scheduler: Scheduler,
        engine: D2FEngine,
        text: Text,
        defaults: Defaults,
        *,
        model: str,
        max_open: int,
        on_first_tokens: Callable[[float], object],
    ) -> None:
        self.driver = driver
        self.scheduler = scheduler
        self.engine = engine
        self.text = text
        self.model = model
        self._defaults = defaults
        self._max_open = max_open
        self._on_first_tokens = on_first_tokens

    # --- requests

    def requests(self, ask: Ask, name: str) -> list[D2FRequest]:
        """The requests of an ask, by prompt and then by sample.

        Raises:
            ApiError: 400, if a prompt does not suit the model.
        """
        seed = random.getrandbits(62) if ask.seed is None else ask.seed
        deadline_at = self.driver.clock() + ask.deadline_s
        built: list[D2FRequest] = []
        for prompt in ask.prompts:
            tokens = self._tokens(ask, prompt)
            for _ in range(ask.n):
                built.append(self._request(ask, f"{name}.{len(built)}", tokens, seed, deadline_at))
                seed += 1
        if len(built) > self._max_open:
            message = f"n: {len(built)} choices are more than this server takes at once"
            raise ApiError(400, f"{message}, {self._max_open}", "n", "invalid_value")
        return built

    def _tokens(self, ask: Ask, prompt: Any) -> list[int]:
        try:
            if ask.chat:
                return self.text.encode_chat(prompt)
            return self.text.encode(prompt) if isinstance(prompt, str) else prompt
        except ValueError as error:
            name = ask.prompt_field
            raise ApiError(400, f"{name}: {error}", name, "invalid_value") from None

    def _request(
        self, ask: Ask, name: str, prompt: list[int], seed: int, deadline_at: float
    ) -> D2FRequest:
        defaults, engine = self._defaults, self.engine
        block = defaults.block_length
        room = (engine.max_len - len(prompt)) // block * block
        if room < max(1, -(-(ask.max_tokens or 1) // block) * block):
            over = "" if ask.max_tokens is None else f" and max_tokens of {ask.max_tokens}"
            raise ApiError(
                400,
                f"{ask.prompt_field}: {len(prompt)} tokens{over}, in blocks of {block}, do not fit "
                f"the window of {engine.max_len}",
                ask.prompt_field,
                "context_length_exceeded",
            )
        try:
            request = D2FRequest(
                name,
                prompt=prompt,
                max_new_tokens=ask.max_tokens or min(defaults.max_tokens, room),
                block_length=block,
                seed=seed,
                temperature=defaults.temperature if ask.temperature is None else ask.temperature,
                priority=ask.priority,
                deadline_at=deadline_at,
                queue_timeout_s=ask.queue_timeout_s,
                tenant=ask.user,
                group=name.rpartition(".")[0],
                **(defaults.thresholds | dict(ask.thresholds)),
            )
            engine.check(request)
        except ConfigError as error:  # the other fields have been checked
            message = str(error).removeprefix(f"request {name!r}: ")
            name = "temperature" if message.startswith("temperature") else ask.prompt_field
            raise ApiError(400, f"{name}: {message}", name, "invalid_value") from None
        return request

    # --- answers

    async def answer(self, ask: Ask) -> dict[str, Any]:
        """Answer in one piece.

        Raises:
            ApiError: What the client is told instead.
        """
        words = self._words(ask)

        async def keep(choice: Choice, text: str, _: Provisional | None = None) -> None:
            choice.text += text

        choices = await self._serve(ask, words.id, keep, stream=bool(ask.stop))
        told = [words.choice(one.index, one.text, one.reason, one.facts) for one in choices]
        return words.whole(told, _usage(ask, choices))

    async def stream(self, ask: Ask, write: Write) -> None:
        """Write the answer in chunks, as it becomes certain.

        Raises:
            ApiError: What the client is told instead, or after what has been written.
        """
        words = self._words(ask)
        begun: set[int] = set()

        async def send(choice: Choice, text: str, guess: Provisional | None = None) -> None:
            def role() -> bool:  # goes with the first chunk of every choice
                first = choice.index not in begun
                begun.add(choice.index)
                return first

            if text:
                await write(words.chunk(choice.index, text, role=role()))
            if guess is not None and ask.provisional:
                tokens = provisional(self.text.shown, guess.tokens)
                shown = {"position": guess.position, "provisional": tokens}
                await write(words.chunk(choice.index, role=role(), dllm=shown))
            if choice.reason:
                await write(
                    words.chunk(choice.index, role=role(), reason=choice.reason, dllm=choice.facts)
                )

        choices = await self._serve(ask, words.id, send, stream=True)
        if ask.include_usage:
            await write(words.usage(_usage(ask, choices)))

    def _words(self, ask: Ask) -> Words:
        kind = "chatcmpl" if ask.chat else "cmpl"
        return Words(f"{kind}-{uuid.uuid4().hex}", ask.chat, self.model)

    async def _serve(self, ask: Ask, name: str, tell: Tell, *, stream: bool) -> list[Choice]:
        """Run an ask to its end; ``tell`` hears of each choice's text, of guesses, and its end."""
        began = self.driver.clock()
        choices: list[Choice] = []
        try:
            for request in self.requests(ask, name):
                try:
                    handle = await self.driver.submit(request, stream=stream)
                except Exception as error:  # what ended the run
                    _log.error("%s cannot be submitted: %r", request.id, error)
                    raise ApiError(503, "the engine is down", None, "engine_down") from error
                choices.append(Choice(len(choices), handle))
            async with asyncio.TaskGroup() as tasks:
                for choice in choices:
                    if stream:
                        stops = StopStrings(ask.stop)
                        tasks.create_task(self._follow(choice, stops, tell, began))
                    else:
                        tasks.create_task(self._wait(choice, tell))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for choice in choices:
                choice.handle.cancel()  # whoever has not ended
        return choices

    async def _wait(self, choice: Choice, tell: Tell) -> None:
        """Wait for a choice that nobody follows."""
        ended = await _result(choice.handle)
        if ended.output is None:
            raise _failure(FinishReason.DEADLINE, "the policy's step cap was reached", "max_steps")
        choice.num_tokens = len(ended.output.tokens)
        choice.end(REASONS[ended.reason], ended.reason.value, ended)
        await tell(choice, self.text.decode(ended.output.tokens))

    async def _follow(self, choice: Choice, stops: StopStrings, tell: Tell, began: float) -> None:
        """Follow a choice as its tokens are committed."""
        text = Detokenizer(self.text.decode)
        async with aclosing(aiter(choice.handle)) as events:
            while (event := await _next(choice.handle, events)) is not None:
                if not isinstance(event, Committed):
                    await tell(choice, "", event)
                    continue
                if choice.num_tokens == 0:
                    self._on_first_tokens(self.driver.clock() - began)
                new = ""
                # One by one only where those up to a stop string are to be counted.
                for tokens in zip(event.tokens) if stops.wanted else [event.tokens]:
                    if not stops.met:
                        new += stops.feed(text.feed(tokens))
                        choice.num_tokens += len(tokens)
                if new:
                    await tell(choice, new)
                if stops.met:
                    break
        if stops.met:
            choice.handle.cancel()
            choice.end("stop", "stop_string")
            await tell(choice, "")
            return
        ended = await _result(choice.handle)
        rest = stops.feed(text.finish()) + stops.finish()
        why = "stop_string" if stops.met else ended.reason.value
        choice.end("stop" if stops.met else REASONS[ended.reason], why, ended)
        await tell(choice, rest)


async def _next(handle: Handle, events: AsyncIterator[T]) -> T | None:
    """Wait for more of an answer; None if there is no more.

    Raises:
        ApiError: If it cannot go on.
    """
    try:
        return await anext(events, None)
    except Exception as error:
        raise _broken(handle, error) from error


async def _result(handle: Handle) -> Finished:
    """Wait for the end that brings an answer.

    Raises:
        ApiError: If it is another one.
    """
    try:
        ended = await handle.result()
    except Exception as error:
        raise _broken(handle, error) from error
    if isinstance(ended, Rejected):
        raise _refusal(ended)
    if ended.reason not in REASONS:
        if ended.error is not None:
            _log.error("%s: %r", handle.id, ended.error)
        raise _failure(ended.reason)
    return ended


def _broken(handle: Handle, error: Exception) -> ApiError:
    _log.error("%s: %r", handle.id, error)
    return _failure(FinishReason.ERROR)


def _failure(reason: FinishReason, message: str | None = None, code: str | None = None) -> ApiError:
    status, known, usual = FAILURES[reason]
    headers = NO_RETRY if status == 504 else {}
    return ApiError(status, message or usual, None, code or known, headers)


def _refusal(refused: Rejected) -> ApiError:
    if refused.reason == "too_large":
        return ApiError(400, "the request can never fit this server", None, "too_large")
    after_s = RETRY_AFTER_S if refused.retry_after_s is None else refused.retry_after_s
    headers = {"retry-after": str(max(1, math.ceil(min(after_s, 3600.0))))}
    if refused.reason == "draining":
        return ApiError(503, "the server is shutting down", None, "draining", headers)
    return ApiError(429, "the server is full: try again later", None, refused.reason, headers)


def _usage(ask: Ask, choices: Sequence[Choice]) -> dict[str, int]:
    prompts = sum(choice.handle.request.prompt_len for choice in choices[:: ask.n])
    return usage_of(prompts, sum(choice.num_tokens for choice in choices))
