"""The OpenAI-compatible server, asked over loopback by OpenAI's own client and by raw HTTP."""

import asyncio
import contextlib
import importlib.util
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example as example_of
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

from dllm_sched import FinishReason, Scheduler  # noqa: E402
from dllm_sched.runtime import Driver  # noqa: E402
from dllm_sched_hf import D2FEngine, box  # noqa: E402

PATIENCE_S = 120  # far more than anything here takes
EXAMPLES = Path(__file__).parents[2] / "examples"
ASKED = "spell a 405 b 12"
ANSWER = "a four hundred five b twelve"
PAIRS = list(box.task.sample_requests(8, 5, distinct=True))


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import openai_server

        yield openai_server
    finally:
        sys.path.remove(str(EXAMPLES))


class Live:
    """A server in a thread of its own, on a free port of loopback."""

    def __init__(self, example, *options, prepare=None):
        ready = threading.Event()

        class Server(example.Server):
            async def startup(self, sockets=None):
                await super().startup(sockets)
                ready.set()

        options = ["--port", "0", "--threads", "1", "--log-level", "error", *options]
        args = example.parse_args(options)
        self.built = example.build(args)
        if prepare is not None:
            prepare(self.built)
        self.server = Server(self.built, args)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        assert ready.wait(PATIENCE_S)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="x", max_retries=0, timeout=PATIENCE_S
        )

    def close(self):
        self.http.close()
        self.openai.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def call(self, method, *args):
        """Call a method of the scheduler, in the driver's thread."""
        driver = self.built.driver
        return asyncio.run_coroutine_threadsafe(
            driver.call(method, *args), self.server._loop
        ).result(PATIENCE_S)

    @contextlib.contextmanager
    def paused(self):
        self.call(self.built.scheduler.pause)
        try:
            yield
        finally:
            self.call(self.built.scheduler.resume)

    def post(self, path, **body):
        return self.http.post(path, json=body)

    def ask(self, prompt=ASKED, **body):
        return self.post("/v1/completions", prompt=prompt, **body)

    def wait_until(self, holds):
        """Follow the state until something holds of it, and return it."""
        with self.http.stream("GET", "/state/stream") as response:
            for line in response.iter_lines():
                if line and holds(state := json.loads(line.removeprefix("data: "))):
                    return state
        raise AssertionError("the state's stream has ended")

    def idle(self):
        """Wait until nobody waits or runs; check what the scheduler holds."""
        state = self.wait_until(lambda state: not state["waiting"] and not state["running"])
        self.built.scheduler.check_invariants()
        assert state["submitted"] == state["finished"]
        assert state["slots"] == [None] * state["max_num_seqs"]
        return state


@pytest.fixture(scope="module")
def shared(example):
    live = Live(example, "--max-num-seqs", "4", "--max-open", "6")
    yield live
    live.close()


@pytest.fixture
def live(shared):
    """The server that the tests share; each leaves it empty."""
    yield shared
    shared.idle()


@pytest.fixture(scope="module")
def alone(shared):
    """The text of a request that an engine of its own decodes without neighbours."""
    engine = D2FEngine(shared.built.engine.model, max_num_seqs=1)
    text = box.load_tokenizer()

    def run(prompt, **fields):
        asked = box.DECODING | fields
        request = engine.request("alone", box.task.encode_prompt(prompt), **asked)
        ended = []
        scheduler = Scheduler(capacity=engine.capacity())
        Driver(scheduler, engine, on_update=lambda update: ended.extend(update.finished)).run(
            [(0.0, request)]
        )
        (finished,) = ended
        return text.decode(finished.output.tokens, skip_special_tokens=True), finished

    return run


def pieces(stream):
    """The text of a stream's first choice, and how it ended."""
    text, reason = "", None
    for chunk in stream:
        for choice in chunk.choices:
            assert reason is None, "nothing comes after the end"
            said = choice.delta.content if hasattr(choice, "delta") else choice.text
            text += said or ""
            reason = choice.finish_reason
    return text, reason


# --- answers


def test_chats_and_completions_are_what_the_engine_decodes_alone(live, alone):
    for prompt, _ in PAIRS[:4]:
        text, finished = alone(prompt)
        chat = live.openai.chat.completions.create(
            model="llada-box", messages=[{"role": "user", "content": prompt}]
        )
        completion = live.openai.completions.create(model="llada-box", prompt=prompt)
        assert chat.choices[0].message.content == completion.choices[0].text == text
        assert chat.choices[0].message.role == "assistant"
        assert chat.choices[0].finish_reason == completion.choices[0].finish_reason == "stop"
        assert chat.usage == completion.usage
        assert chat.usage.prompt_tokens == len(box.task.encode_prompt(prompt))
        assert chat.usage.completion_tokens == len(finished.output.tokens)
        assert chat.id.startswith("chatcmpl-")
        assert completion.id.startswith("cmpl-")
        facts = completion.choices[0].dllm
        assert (facts["reason"], facts["num_steps"]) == ("eos", finished.num_steps)


def test_a_stream_is_the_same_text_in_pieces(live, alone):
    for prompt, _ in PAIRS[:4]:
        chunks = list(
            live.openai.chat.completions.create(
                model="llada-box",
                messages=[{"role": "user", "content": prompt}],
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert pieces(chunks) == (alone(prompt)[0], "stop")
        assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == [
            "assistant",
            *[None] * (len(chunks) - 2),
        ]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == len(alone(prompt)[1].output.tokens)
        stream = live.openai.completions.create(model="llada-box", prompt=prompt, stream=True)
        assert pieces(stream) == (alone(prompt)[0], "stop")


def test_many_async_clients_at_once_each_get_their_own(live, alone):
    async def all_of_them():
        async with openai.AsyncOpenAI(
            base_url=f"{live.url}/v1", api_key="x", max_retries=0
        ) as client:

            async def follow(prompt):
                stream = await client.chat.completions.create(
                    model="llada-box",
                    messages=[{"role": "user", "content": prompt}],
                    stream=True,
                )
                return pieces([chunk async for chunk in stream])[0]

            return await asyncio.gather(*(follow(prompt) for prompt, _ in PAIRS[:6]))

    assert asyncio.run(all_of_them()) == [alone(prompt)[0] for prompt, _ in PAIRS[:6]]


def test_a_budget_that_is_used_up_is_length(live):
    for stream in (False, True):
        answer = live.openai.completions.create(
            model="llada-box", prompt=ASKED, max_tokens=3, stream=stream
        )
        if stream:
            assert pieces(answer) == ("a four hundred", "length")
        else:
            assert (answer.choices[0].text, answer.choices[0].finish_reason) == (
                "a four hundred",
                "length",
            )
            assert answer.usage.completion_tokens == 3
    chat = live.openai.chat.completions.create(
        model="llada-box",
        messages=[
            {"role": "system", "content": "You are kind."},
            {"role": "user", "content": [{"type": "text", "text": ASKED}]},
        ],
        max_completion_tokens=3,
    )
    assert chat.choices[0].message.content == "a four hundred"


def test_samples_differ_by_seed_and_each_is_what_its_seed_gives_alone(live, alone):
    """In company: the four requests of the answer share their steps."""
    prompts = ["sort sort sort a", "reverse one b two"]  # not of the task: it is unsure
    fields = {"temperature": 2.0, "seed": 7}
    answer = live.openai.completions.create(
        model="llada-box", prompt=prompts, n=2, **fields, extra_body={"skip_threshold": 0.2}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [
        alone(prompt, temperature=2.0, seed=7 + i, skip_threshold=0.2)
        for i, prompt in enumerate([prompts[0], prompts[0], prompts[1], prompts[1]])
    ]
    assert [choice.text for choice in answer.choices] == [text for text, _ in expected]
    assert len({choice.text for choice in answer.choices}) > 2
    tokens = sum(len(finished.output.tokens) for _, finished in expected)
    prompt_tokens = sum(len(box.task.encode_prompt(prompt)) for prompt in prompts)
    assert answer.usage.completion_tokens == tokens
    assert answer.usage.prompt_tokens == prompt_tokens, "a prompt counts once, however many samples"
    again = live.openai.completions.create(
        model="llada-box",
        prompt=prompts[1],
        temperature=2.0,
        seed=9,
        extra_body={"skip_threshold": 0.2},
    )
    assert again.choices[0].text == answer.choices[2].text


def test_streamed_samples_come_apart_by_index(live, alone):
    texts = {0: "", 1: ""}
    reasons = {}
    stream = live.openai.chat.completions.create(
        model="llada-box",
        messages=[{"role": "user", "content": ASKED}],
        n=2,
        seed=3,
        temperature=1.5,
        stream=True,
    )
    for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == {i: alone(ASKED, temperature=1.5, seed=3 + i)[0] for i in (0, 1)}
    assert set(reasons) == {0, 1}


def test_a_prompt_may_be_token_ids(live):
    tokens = box.task.encode_prompt(ASKED)
    answer = live.openai.completions.create(model="llada-box", prompt=[tokens, tokens])
    assert [choice.text for choice in answer.choices] == [ANSWER, ANSWER]


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("b", "a four hundred five ", 5),
        (["five b", "twelve"], "a four hundred ", 5),
        (["ve tw", "x"], "a four hundred five b twelve", 6),
        ("b tw", "a four hundred five ", 6),
        (["hundred", "four"], "a ", 2),
        ("a", "", 1),
    ],
)
def test_a_stop_string_cuts_and_its_request_is_cancelled(live, stop, text, tokens):
    before = live.idle()["finished_by_reason"]
    stopped = text != ANSWER
    whole = live.openai.completions.create(model="llada-box", prompt=ASKED, stop=stop)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, "stop")
    assert whole.choices[0].dllm["reason"] == ("stop_string" if stopped else "eos")
    assert whole.usage.completion_tokens == tokens
    stream = live.openai.completions.create(model="llada-box", prompt=ASKED, stop=stop, stream=True)
    assert pieces(stream) == (text, "stop")
    after = live.idle()["finished_by_reason"]
    ends = {reason: after[reason] - before[reason] for reason in after}
    assert ends["eos"] + ends["cancelled"] == 2
    assert stopped or ends["eos"] == 2


def test_provisional_text_comes_only_if_asked_for_and_beside_an_empty_delta(live):
    ask = {"model": "llada-box", "prompt": ASKED, "stream": True}
    plain = list(live.openai.completions.create(**ask))
    assert not any("dllm" in chunk.model_extra for chunk in plain[:-1])
    told = []
    for _ in range(10):  # a reader that is slow is told the latest state only
        chunks = list(live.openai.completions.create(**ask, extra_body={"provisional": True}))
        assert pieces(chunks) == pieces(plain)
        guesses = [chunk for chunk in chunks[:-1] if "dllm" in chunk.model_extra]
        position = 0
        for chunk in guesses:
            assert chunk.choices[0].text == ""
            assert chunk.dllm["position"] >= position
            position = chunk.dllm["position"]
            assert all(token is None or token for token in chunk.dllm["provisional"])
        told += [chunk.dllm for chunk in guesses]
        masked = any(None in each["provisional"] for each in told)
        sizes = [each["position"] + len(each["provisional"]) for each in told]
        if masked and max(sizes) >= 8:
            break
    assert masked, "masked positions are null"
    assert max(sizes) >= 8, "a block of 8 was open"


def test_models_are_listed(live):
    assert [model.id for model in live.openai.models.list()] == ["llada-box"]


# --- what is refused

CHAT = {"messages": [{"role": "user", "content": ASKED}]}
TEXT = {"prompt": ASKED}
BAD = [
    ("prompt", {}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": [ASKED, ""]}),
    ("prompt", {"prompt": [ASKED, 7]}),
    ("prompt", {"prompt": [[1, -1]]}),
    ("prompt", {"prompt": [[1, 2.0]]}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": "spell xyzzy 1"}),
    ("prompt", {"prompt": "\ud800"}),
    ("prompt", {"prompt": [box.task.MASK_ID]}),
    ("prompt", {"prompt": [10**30]}),
    ("prompt", {"prompt": [len(box.task.VOCABULARY) + 5]}),
    ("prompt", {"prompt": "a " * 120}),
    ("prompt", TEXT | {"max_tokens": 10**6}),
    ("max_tokens", TEXT | {"max_tokens": 0}),
    ("max_tokens", TEXT | {"max_tokens": "8"}),
    ("max_tokens", TEXT | {"max_tokens": True}),
    ("max_tokens", TEXT | {"max_tokens": 10**40}),
    ("max_completion_tokens", TEXT | {"max_completion_tokens": 8}),
    ("max_completion_tokens", CHAT | {"max_completion_tokens": -1}),
    ("n", TEXT | {"n": 0}),
    ("n", TEXT | {"n": 7}),
    ("n", TEXT | {"n": 1.0}),
    ("n", {"prompt": [ASKED] * 100, "n": 2}),
    ("temperature", TEXT | {"temperature": -0.1}),
    ("temperature", TEXT | {"temperature": 2.1}),
    ("temperature", TEXT | {"temperature": 1e-9}),
    ("temperature", TEXT | {"temperature": "hot"}),
    ("seed", TEXT | {"seed": 2**63}),
    ("seed", TEXT | {"seed": 0.5}),
    ("stop", TEXT | {"stop": ""}),
    ("stop", TEXT | {"stop": ["a", 1]}),
    ("stop", TEXT | {"stop": list("abcde")}),
    ("user", TEXT | {"user": 7}),
    ("stream", TEXT | {"stream": "yes"}),
    ("stream_options", TEXT | {"stream_options": {"include_usage": 1}}),
    ("stream_options", TEXT | {"stream_options": []}),
    ("deadline_s", TEXT | {"deadline_s": 0}),
    ("deadline_s", TEXT | {"deadline_s": -1}),
    ("queue_timeout_s", TEXT | {"queue_timeout_s": -1}),
    ("priority", TEXT | {"priority": 0.5}),
    ("skip_threshold", TEXT | {"skip_threshold": 1.5}),
    ("block_add_threshold", TEXT | {"block_add_threshold": "low"}),
    ("decoded_token_threshold", TEXT | {"decoded_token_threshold": -1}),
    ("provisional", TEXT | {"provisional": True}),
    ("top_p", TEXT | {"top_p": 0.9}),
    ("tools", CHAT | {"tools": [{"type": "function"}]}),
    ("deadline", TEXT | {"deadline": 3}),
    ("\ud800", TEXT | {"\ud800": 3}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hello"}),
    ("messages", {"messages": ["hello"]}),
    ("messages", {"messages": [{"role": "judge", "content": ASKED}]}),
    ("messages", {"messages": [{"role": "user"}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages", {"messages": [{"role": "user", "content": "say xyzzy"}]}),
    ("messages", {"messages": [{"role": "user", "content": "a " * 120}]}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("field", "body"), BAD)
def test_a_bad_field_is_400_and_named(live, field, body, stream):
    path = "/v1/chat/completions" if "messages" in body or "tools" in body else "/v1/completions"
    if stream and field in ("stream", "provisional"):
        return
    content = json.dumps({"stream": stream} | body)
    answer = live.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]
    assert error["code"]
    assert "cmpl-" not in error["message"], "no id of ours"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
KNOWN = [field for field, _ in BAD]


@given(
    body=st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=5), anything, max_size=4),
    base=st.sampled_from([TEXT, CHAT, {}]),
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
)
@settings(max_examples=60, deadline=None)
def test_whatever_a_body_holds_it_is_answered_or_refused(shared, body, base, path):
    body = body | base | {"stream": False}
    content = json.dumps(body, allow_nan=True)
    answer = shared.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404, 504), (body, answer.text)
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] is not None


def test_fields_without_effect_and_nulls_are_taken(live):
    answer = live.ask(
        top_p=1, frequency_penalty=0.0, logprobs=None, seed=None, best_of=1, metadata={"a": "b"}
    )
    assert answer.json()["choices"][0]["text"] == ANSWER


def test_another_model_is_404_and_openai_s_client_says_so(live):
    with pytest.raises(openai.NotFoundError) as caught:
        live.openai.completions.create(model="gpt-4", prompt=ASKED)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000, b'{"n": 1' + b"1" * 5000 + b"}"],
)
def test_a_body_that_is_no_json_object_is_400(live, content):
    headers = {"content-type": "application/json"}
    answer = live.http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


def test_a_body_of_another_type_is_415(live):
    """A web page elsewhere can make a browser send a form or plain text, but no JSON."""
    for path in ("/v1/completions", "/policy"):
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            headers = {"content-type": kind}
            answer = live.http.post(path, content=json.dumps(TEXT), headers=headers)
            assert answer.status_code == 415


def test_a_body_beyond_the_limit_is_413_whether_its_length_is_told_or_not(live):
    headers = {"content-type": "application/json"}
    large = b'{"prompt": "' + b"a" * 2**18 + b'"}'
    for content in (large, iter([large[:100], large[100:]])):
        answer = live.http.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


def test_a_body_that_does_not_come_is_408(live, example, monkeypatch):
    import openai_serving.app

    monkeypatch.setattr(openai_serving.app, "BODY_S", 0.05)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    url = httpx.URL(live.url)
    with socket.create_connection((url.host, url.port), timeout=PATIENCE_S) as connection:
        connection.sendall(head)
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_other_paths_and_methods_are_told_in_the_same_words(live):
    answer = live.http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")
    answer = live.http.get("/v1/completions")
    assert answer.status_code == 405
    assert "POST" in answer.headers["allow"]


def test_a_name_that_is_not_loopback_s_is_403(live):
    """DNS that points elsewhere's name at loopback must not open the server to its pages."""
    assert live.http.get("/state", headers={"host": "evil.example:80"}).status_code == 403
    assert live.http.get("/state", headers={"host": "localhost:80"}).status_code == 200


# --- load, deadlines, disconnects


def test_a_full_server_is_429_with_retry_after(live):
    with live.paused(), contextlib.ExitStack() as stack:
        open_ones = [stack.enter_context(Asking(live, stream=True)) for _ in range(6)]
        live.wait_until(lambda state: state["waiting"] == 6)
        answer = live.ask()
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        assert live.ask(stream=True).status_code == 429
        with pytest.raises(openai.RateLimitError):
            live.openai.completions.create(model="llada-box", prompt=ASKED)
        live.call(live.built.scheduler.resume)
        assert [one.join().status_code for one in open_ones] == [200] * 6
    assert live.ask().status_code == 200


def test_two_samples_of_which_one_finds_no_room_are_refused_together(live):
    with live.paused(), contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(Asking(live))
        live.wait_until(lambda state: state["waiting"] == 5)
        assert live.ask(n=2).status_code == 429
        state = live.wait_until(lambda state: state["waiting"] == 5)
        assert state["running"] == 0
        live.call(live.built.scheduler.resume)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "code"), [("deadline_s", "deadline"), ("queue_timeout_s", "queue_timeout")]
)
def test_a_deadline_or_queue_timeout_that_passes_is_504(live, field, code, stream):
    with live.paused():
        answer = live.ask(stream=stream, **{field: 0.01})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == code
    assert answer.json()["error"]["type"] == "timeout_error"
    assert answer.headers["x-should-retry"] == "false"


def test_deadlines_far_away_change_nothing(live):
    fields = {"deadline_s": 1e6, "queue_timeout_s": 1e6, "priority": -3, "user": "somebody"}
    assert live.ask(**fields).json()["choices"][0]["text"] == ANSWER


class Asking(threading.Thread):
    """A client that waits for its answer elsewhere."""

    def __init__(self, live, **body):
        super().__init__()
        self._live, self._body = live, body

    def run(self):
        body = {"prompt": ASKED} | self._body
        url = f"{self._live.url}/v1/completions"
        try:
            self.answer = httpx.post(url, json=body, timeout=PATIENCE_S)
        except httpx.HTTPError as error:
            self.answer = error

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        super().join(PATIENCE_S)

    def join(self, timeout=PATIENCE_S):
        super().join(timeout)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def gone(live, path):
    """How many have hung up."""
    return sum(
        each["count"]
        for each in live.http.get("/state").json()["responses"]
        if (each["path"], each["status"]) == (path, 499)
    )


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_while_waiting_is_cancelled(live, stream, n):
    before = live.idle()
    count = gone(live, "/v1/completions")
    with live.paused():
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{live.url}/v1/completions",
                json={"prompt": ASKED, "stream": stream, "n": n},
                timeout=httpx.Timeout(PATIENCE_S, read=0.05),
            )
        state = live.wait_until(
            lambda state: state["submitted"] == before["submitted"] + n and not state["waiting"]
        )
    cancelled = state["finished_by_reason"]["cancelled"]
    assert cancelled == before["finished_by_reason"]["cancelled"] + n
    live.idle()
    assert gone(live, "/v1/completions") == count + 1


async def visit(client, rng):
    """Ask like somebody in a hurry: stay to the end, or leave somewhere on the way."""
    body = {
        "prompt": rng.choice(PAIRS)[0],
        "n": rng.choice([1, 1, 3]),
        "stream": rng.random() < 0.8,
    }
    body |= rng.choice([{}, {"stop": "five"}, {"deadline_s": 0.05}, {"provisional": True}])
    body["provisional"] = body.get("provisional", False) and body["stream"]
    patience = rng.choice([0, 1, 3, 10, 10**6])  # lines
    if not body["stream"] and patience < 10**6:
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        for _ in range(patience * 20):
            await asyncio.sleep(0)  # some turns of the loop, not some time
        asking.cancel()
        return (await asyncio.gather(asking, return_exceptions=True))[0]
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            patience -= 1
            if patience < 0:
                break
        return response


def test_a_crowd_that_comes_and_goes_leaves_nothing_behind(live):
    async def crowd():
        rng = random.Random(5)
        async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(visit(client, rng) for _ in range(80)))

    seen = Counter(getattr(response, "status_code", None) for response in asyncio.run(crowd()))
    assert set(seen) <= {200, 429, 504, None}
    assert seen[200]
    live.idle()
    assert live.built.driver._feeds == {}
    assert live.ask().json()["choices"][0]["text"] == ANSWER


class Brake:
    """Lets an engine run some steps, and holds it inside of the next one."""

    def __init__(self, built):
        self._run, built.engine.run = built.engine.run, self.run
        self._free, self.holds = threading.Event(), threading.Event()
        self._free.set()
        self._left = 0

    def run(self, batch):
        if self._left == 0:
            self.holds.set()
            assert self._free.wait(PATIENCE_S)
        else:
            self._left -= 1
        return self._run(batch)

    def hold_after(self, steps):
        self._left = steps
        self._free.clear()
        self.holds.clear()

    def release(self):
        self._free.set()


@pytest.fixture(scope="module")
def braked(example):
    live = Live(
        example,
        "--max-num-seqs",
        "2",
        prepare=lambda built: setattr(built.monitor, "brake", Brake(built)),
    )
    live.brake = live.built.monitor.brake
    yield live
    live.close()


@contextlib.contextmanager
def paused_in_the_middle(live, **body):
    """A stream whose row keeps its slot: three steps have run, and the next one does not begin."""
    live.brake.hold_after(2)
    body = {"prompt": ASKED, "stream": True} | body
    with live.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        assert json.loads(next(lines))["choices"][0]["text"]
        assert live.brake.holds.wait(PATIENCE_S)
        loop, driver = live.server._loop, live.built.driver
        pausing = asyncio.run_coroutine_threadsafe(driver.call(live.built.scheduler.pause), loop)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE_S)
        live.brake.release()
        pausing.result(PATIENCE_S)
        try:
            yield lines
        finally:
            response.close()
            live.wait_until(lambda state: not state["running"] and not state["waiting"])
            live.call(live.built.scheduler.resume)


@pytest.mark.parametrize("n", [1, 2])
def test_who_hangs_up_in_the_middle_of_a_stream_is_cancelled(braked, n):
    before = braked.idle()
    count = gone(braked, "/v1/completions")
    with paused_in_the_middle(braked, n=n):
        assert braked.http.get("/state").json()["running"] == n
    after = braked.idle()
    assert after["submitted"] == before["submitted"] + n
    cancelled = before["finished_by_reason"]["cancelled"] + n
    assert after["finished_by_reason"] == before["finished_by_reason"] | {"cancelled": cancelled}
    assert gone(braked, "/v1/completions") == count + 1
    assert braked.ask().json()["choices"][0]["text"] == ANSWER


def test_a_deadline_in_the_middle_of_a_stream_is_an_error_event(braked):
    with paused_in_the_middle(braked, deadline_s=5000) as lines:
        braked.built.driver.clock._offset_s += 5000
        assert braked.http.get("/state").status_code == 200  # whatever wakes the driver
        *_, error, last = lines
    assert json.loads(error)["error"]["code"] == "deadline"
    assert last == "[DONE]"
    braked.idle()


def test_openai_s_client_raises_what_an_error_event_says(braked):
    """A step that fails for good, in the middle of a stream."""
    engine = braked.built.engine
    braked.brake.hold_after(2)
    stream = braked.openai.completions.create(model="llada-box", prompt=ASKED, stream=True)
    chunks = iter(stream)
    assert next(chunks).choices[0].text
    run, engine.run = engine.run, lambda batch: 1 / 0
    braked.brake.release()
    with pytest.raises(openai.APIError) as caught:
        list(chunks)
    engine.run = run
    assert caught.value.code == "engine_error"
    braked.idle()


# --- operators


def test_the_state_s_stream_tells_each_step_and_each_end_once(braked):
    """Three requests and two slots."""
    frames = []
    with (
        braked.http.stream("GET", "/state/stream?show=all") as response,
        contextlib.ExitStack() as stack,
    ):
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        frames.append(json.loads(next(lines)))
        with braked.paused():
            for stream in (True, False, False):
                stack.enter_context(Asking(braked, stream=stream))
            braked.wait_until(lambda state: state["waiting"] == 3)
        while frames[-1]["finished"] < frames[0]["finished"] + 3:
            frames.append(json.loads(next(lines)))
    first, last = frames[0], frames[-1]
    assert first["steps"] == first["ended"] == []
    steps = [step for frame in frames for step in frame["steps"]]
    assert len(steps) == last["num_steps"] - first["num_steps"]
    assert [step["id"] for step in steps] == list(range(steps[0]["id"], steps[-1]["id"] + 1))
    assert (steps[0]["num_rows"], steps[0]["num_waiting"]) == (2, 1)
    joined = [(slot, name) for step in steps for slot, name in step["joined"]]
    assert {slot for slot, _ in joined[:2]} == {0, 1}
    ended = [end for frame in frames for end in frame["ended"]]
    assert sorted(end["id"] for end in ended) == sorted(name for _, name in joined)
    for end in ended:
        assert end["answer"] == {"committed": ANSWER, "provisional": []}
        assert (end["reason"], end["num_tokens"]) == ("eos", 6)
    assert last["latency_s"]["count"] >= 3
    assert 0 < last["waited_s"]["p50"] <= last["latency_s"]["p50"] <= last["latency_s"]["p99"]
    assert last["first_tokens_s"]["count"] >= 1
    assert last["tokens_per_s"] > last["requests_per_s"] > 0
    braked.idle()


def test_only_so_many_may_watch(braked):
    with contextlib.ExitStack() as stack:
        kept = []  # an iterator that is dropped hangs up
        for _ in range(16):
            watching = braked.http.stream("GET", "/state/stream")
            kept.append(stack.enter_context(watching).iter_lines())
            next(kept[-1])
        refused = stack.enter_context(braked.http.stream("GET", "/state/stream"))
        assert refused.status_code == 429
        assert json.loads(refused.read())["error"]["code"] == "too_many_watchers"
    status = 429
    while status == 429:  # until the server has noticed who is gone
        with braked.http.stream("GET", "/state/stream") as again:
            status = again.status_code
    assert status == 200
    braked.idle()


def test_a_row_s_answer_is_shown_as_it_stands(braked):
    with paused_in_the_middle(braked):
        (row,) = filter(None, braked.http.get("/state?show=all").json()["slots"])
        assert ANSWER.startswith(row["answer"]["committed"])
        assert row["answer"]["committed"]
        assert None in row["answer"]["provisional"]
        assert (row["prompt_len"], row["block_length"], row["max_blocks"]) == (10, 8, 6)
        assert row["steps"] == 3
        for shown, answer in (
            (row["id"], True),
            (row["group"], True),
            ("somebody-else", False),
            (None, False),
        ):
            params = {} if shown is None else {"show": shown}
            state = braked.http.get("/state", params=params).json()
            assert any("answer" in each for each in filter(None, state["slots"])) == answer
    braked.idle()


def test_the_policy_is_switched_while_requests_run(live, example):
    try:
        with contextlib.ExitStack() as stack:
            asking = [stack.enter_context(Asking(live)) for _ in range(4)]
            for name in ("fixed_fill", "per_request", "vllm", "block_refill"):
                fields = {"timeout_s": 0.01} if name == "fixed_fill" else {}
                answer = live.post("/policy", name=name, **fields)
                assert answer.json() == {"policy": name}
                assert live.http.get("/policy").json()["policy"] == name
                assert live.ask().json()["choices"][0]["text"] == ANSWER
            assert [one.join().status_code for one in asking] == [200] * 4
    finally:
        live.post("/policy", name="continuous")


def test_a_policy_in_force_is_listed_though_it_needs_arguments(live):
    joules = {"target_j": 50.0, "fixed_j": 60.0, "row_j": 10.0, "max_wait_s": 0.01}
    try:
        assert live.post("/policy", name="energy_fill", **joules).status_code == 200
        now = live.http.get("/policy").json()
        assert now["policy"] == "energy_fill"
        assert "energy_fill" in now["policies"]
    finally:
        live.post("/policy", name="continuous")
    assert "energy_fill" not in live.http.get("/policy").json()["policies"]


def test_no_policy_can_be_asked_for_that_the_command_line_cannot_make(example, capsys):
    for name in ("energy_fill", "optimus", "request_router"):
        with pytest.raises(SystemExit):
            example.parse_args(["--policy", name])
        assert "--policy" in capsys.readouterr().err
    assert example.parse_args(["--policy", "sangam"]).policy == "sangam"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": 7},
        {"name": "nonsense"},
        {"name": "os.system"},
        {"name": "per_request", "batch_size": 3},
        {"name": "continuous", "batch_size": 0},
        {"name": "energy_fill"},
        {"name": "request_router"},  # the engine has no modes
        {"name": "tediserve", "knob": "nonsense"},
        {
            "name": "optimus",
            "widths": [4],
            "committed": [2],
            "latency_s": {"1": [0.1]},
            "knob": "width",
        },
    ],
)
def test_a_policy_that_cannot_be_is_400_and_the_old_one_stays(live, body):
    answer = live.http.post("/policy", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "name"
    assert live.http.get("/policy").json()["policy"] == "continuous"


def test_every_policy_that_needs_no_more_than_its_size_serves(live):
    from dllm_sched import presets

    need_more = {"energy_fill", "optimus", "request_router"}
    offered = live.http.get("/policy").json()["policies"]
    assert offered == sorted(set(presets.PRESETS) - need_more)
    for name in need_more:
        assert live.http.post("/policy", json={"name": name}).status_code == 400
    try:
        for name in offered:
            assert live.post("/policy", name=name).status_code == 200, name
            # Alone, with nobody to fill a batch with.
            assert live.ask().json()["choices"][0]["text"] == ANSWER, name
            with live.paused():
                assert live.ask(deadline_s=0.01).status_code == 504, name
    finally:
        live.post("/policy", name="continuous")


def test_metrics_are_prometheus_text_and_add_up(live):
    from prometheus_client.parser import text_string_to_metric_families as parse

    def read():
        page = live.http.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        return {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in parse(page.text)
            for sample in family.samples
        }

    before = read()
    assert live.ask().status_code == 200
    assert live.ask(n=0).status_code == 400
    after = read()

    def grown(*key):
        return after.get(key, 0) - before.get(key, 0)

    assert grown("openai_server_responses_total", "/v1/completions", "200") == 1
    assert grown("openai_server_responses_total", "/v1/completions", "400") == 1
    assert grown("dllm_sched_requests_finished_total", "eos") == 1
    assert grown("dllm_sched_requests_submitted_total") == 1
    assert grown("dllm_sched_time_seconds_total", "forward") > 0


def test_health(live):
    assert live.http.get("/health").json() == {"status": "ok"}


def test_an_api_key_is_needed_where_there_is_one(example):
    live = Live(example, "--api-key", "secret")
    try:
        for path in ("/v1/models", "/state", "/state/stream", "/policy", "/metrics"):
            for given in (
                None,
                "Bearer",
                "Bearer secre",
                "Bearer secret2",
                "secret",
                "Bearer \xe9",
            ):
                headers = {} if given is None else {"authorization": given.encode("latin-1")}
                answer = live.http.get(path, headers=headers)
                assert answer.status_code == 401, (path, given)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["type"] == "authentication_error"
        assert live.ask().status_code == 401
        assert live.post("/policy", name="per_request").status_code == 401
        assert live.http.get("/v1/models%0A").status_code in (401, 404)
        with pytest.raises(openai.AuthenticationError):
            live.openai.models.list()
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="secret") as client:
            answer = client.completions.create(model="llada-box", prompt=ASKED)
        assert answer.choices[0].text == ANSWER
        assert live.http.get("/health").status_code == 200
    finally:
        live.close()


def test_an_engine_that_fails_every_step_fails_its_requests_and_not_the_server(example):
    def break_down(built):
        built.engine.run = fail

    def fail(batch):
        raise RuntimeError("secret of the engine")

    live = Live(example, prepare=break_down)
    try:
        for stream in (False, True):
            answer = live.ask(stream=stream)
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "engine_error"
            assert "secret" not in answer.text
        assert live.http.get("/health").status_code == 200
        assert live.idle()["finished_by_reason"]["error"] == 2
    finally:
        live.close()


def test_a_driver_that_has_ended_is_503_and_not_healthy(example):
    def break_down(built):
        built.engine.release = fail

    def fail(released):
        raise RuntimeError("cannot release")

    live = Live(example, prepare=break_down)
    try:
        assert live.ask().status_code == 500
        for stream in (False, True):
            answer = live.ask(stream=stream)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] in ("engine_down", "draining")
        assert live.http.get("/health").status_code == 503
        assert live.http.get("/state").status_code == 503
        assert live.http.get("/state/stream").status_code == 503
        assert live.post("/policy", name="per_request").status_code == 503
    finally:
        live.close()


def test_a_model_by_its_path_has_its_own_tokenizer_and_template(example):
    options = ["--model", str(box.box_model_dir()), "--lora", str(box.box_lora_dir())]
    options += ["--served-name", "mine", "--block-length", "8", "--max-tokens", "48"]
    live = Live(example, *options, "--skip-threshold", "0.999")
    try:
        chat = live.openai.chat.completions.create(
            model="mine", messages=[{"role": "user", "content": ASKED}]
        )
        assert chat.choices[0].message.content == ANSWER
        raw = f"{box.task.BOS}{ASKED}{box.task.EOT}"
        assert live.ask(raw).json()["choices"][0]["text"] == ANSWER, "no template for completions"
    finally:
        live.close()


def test_run_ahead_changes_no_answer(example, alone):
    live = Live(example, "--run-ahead", "--max-num-seqs", "2")
    try:
        prompts = [prompt for prompt, _ in PAIRS[:4]]
        texts = [alone(prompt)[0] for prompt in prompts]
        answer = live.ask(prompts).json()
        assert [choice["text"] for choice in answer["choices"]] == texts
        for prompt, text in zip(prompts, texts, strict=True):
            stream = live.openai.completions.create(model="llada-box", prompt=prompt, stream=True)
            assert pieces(stream) == (text, "stop")
        frame = live.wait_until(lambda state: state["finished"] == 8)
        assert frame["num_steps"] > 0
        live.idle()
    finally:
        live.close()


def test_a_journal_replays(example, tmp_path):
    from dllm_sched.journal import replay

    path = tmp_path / "journal.jsonl"
    live = Live(example, "--journal", str(path))
    try:
        assert live.ask(n=3).status_code == 200
    finally:
        live.close()
    replayed = replay(path)
    assert replayed.difference is None
    assert replayed.num_requests == 3


# --- the process


@contextlib.contextmanager
def started(*options):
    """The server as a process; killed when patience ends."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # else it starts deaf to it
    command = [sys.executable, "-u", str(EXAMPLES / "openai_server.py"), "--port", "0"]
    try:
        process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    timer = threading.Timer(PATIENCE_S, process.kill)
    timer.daemon = True
    timer.start()
    try:
        with process:
            url = None
            while url is None:
                line = process.stderr.readline()
                assert line, "it has ended"
                url = re.search(r"http://127\.0\.0\.1:\d+", line)
            rest = []
            reader = threading.Thread(target=lambda: rest.extend(process.stderr))
            reader.start()
            yield process, url[0], rest
            reader.join(PATIENCE_S)
    finally:
        timer.cancel()


def readme_commands():
    """The lines that a reader would type, each with its continuations."""
    text = (EXAMPLES.parent / "README.md").read_text()
    part = text.partition("<!-- server-commands -->")[2].partition("<!-- /server-commands -->")[0]
    blocks = re.findall(r"```console\n(.*?)```", part, re.DOTALL)
    return [
        command for block in blocks for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    ]


def test_the_readme_s_commands_do_what_it_says(live):
    def say(command):
        assert command.startswith("curl ")
        here = command.replace("http://127.0.0.1:8000", live.url)
        assert here != command
        shell = ["bash", "-c", here.replace("curl ", "curl -sS --fail-with-body ", 1)]
        return subprocess.run(shell, check=True, capture_output=True, text=True).stdout

    try:
        commands = list(readme_commands())
        chat, stream, policy, state, metrics = map(say, commands)
        assert json.loads(chat)["choices"][0]["message"]["content"] == ANSWER
        for _ in range(10):  # a reader that is slow is told the latest state only
            events = stream.split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
            assert "".join(each["choices"][0]["text"] for each in chunks) == "a 405 b 12 c 7"
            guessed = any("provisional" in each.get("dllm", {}) for each in chunks)
            if guessed:
                break
            stream = say(commands[1])
        assert guessed
        assert json.loads(policy) == {"policy": "fixed_fill"}
        assert json.loads(state)["policy"] == "fixed_fill"
        assert "dllm_sched_requests_submitted_total" in metrics
    finally:
        live.post("/policy", name="continuous")


async def drained(process, url, count, signals):
    """Many streams at once; signals once the first has begun; how each stream went."""
    begun = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

        async def ask():
            body = {"prompt": PAIRS[0][0], "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = []
                async for line in response.aiter_lines():
                    begun.set()
                    lines.append(line)
                return response.status_code, [line for line in lines if line]

        async def watch():
            """Who looks must not keep the server from ending."""
            async with client.stream("GET", "/state/stream") as response:
                return [line async for line in response.aiter_lines() if line]

        async def interrupt():
            await begun.wait()
            state = (await client.get("/state")).json()
            for each in signals:
                process.send_signal(each)
            return state

        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.gather(
                interrupt(), watch(), *(ask() for _ in range(count)), return_exceptions=True
            )


@pytest.mark.slow
def test_a_signal_lets_open_requests_finish():
    with started("--max-num-seqs", "2") as (process, url, rest):
        state, watched, *answers = asyncio.run(drained(process, url, 60, [signal.SIGTERM]))
        assert process.wait(PATIENCE_S) == 0, rest
    assert "Traceback" not in "".join(rest)
    done = [each for each in answers if isinstance(each, tuple)]
    assert len(done) >= state["submitted"] > 0, "who was taken is answered"
    for status, lines in done:
        assert status == 200
        assert lines[-1] == "data: [DONE]"
        assert not any("error" in line for line in lines)
    assert all(isinstance(each, tuple | httpx.HTTPError) for each in answers)
    assert watched[-1] == 'data: {"over": true}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["a second signal", "the end of --drain"])
def test_who_is_cut_off_is_told(example, how, stream):
    timed = how == "the end of --drain"
    live = Live(example, "--max-num-seqs", "1", *(["--drain", "0.1"] if timed else []))
    try:
        live.call(live.built.scheduler.pause)
        with Asking(live, stream=stream) as one, Asking(live, stream=stream, n=2) as other:
            live.wait_until(lambda state: state["waiting"] == 3)
            for _ in range(1 if timed else 2):
                live.server.handle_exit(signal.SIGTERM, None)
            for answer in (one.join(), other.join()):
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "cancelled"
        live.thread.join(PATIENCE_S)
        assert live.server.cut_off
        assert live.built.scheduler.counts().waiting == 0
    finally:
        live.close()


@pytest.mark.parametrize("how", ["for long", "at a second signal"])
def test_who_stops_reading_is_hung_up_on(example, monkeypatch, how):
    long = how == "for long"
    monkeypatch.setattr(example, "STALLED_S", 0.01 if long else 1e6)
    monkeypatch.setattr(example, "LAST_WORDS_S", 0.0)
    begun, over = threading.Event(), threading.Event()

    async def endless(_):
        try:
            while True:
                yield {"more than any buffer": "x" * 2**20}
                begun.set()
                await asyncio.sleep(0)
        finally:
            over.set()

    live = Live(example)
    live.built.monitor.frames = endless
    url = httpx.URL(live.url)
    try:
        with socket.create_connection((url.host, url.port)) as deaf:
            deaf.sendall(f"GET /state/stream HTTP/1.1\r\nHost: {url.host}\r\n\r\n".encode())
            assert begun.wait(PATIENCE_S)
            for _ in range(0 if long else 2):
                live.server.handle_exit(signal.SIGTERM, None)
            assert over.wait(PATIENCE_S)
    finally:
        live.close()
    assert live.built.monitor.responses["/state/stream", 499] == 1


# --- load


@pytest.fixture(scope="module")
def load():
    path = EXAMPLES.parent / "benchmarks" / "load.py"
    spec = importlib.util.spec_from_file_location("load", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("how", [["--clients", "3"], ["--rate", "1000"]])
def test_load_is_put_on_and_measured(live, load, capsys, how):
    code = load.main(["--url", live.url, "--requests", "5", "--json", *how])
    figures = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (figures["sent"], figures["done"], figures["errors"]) == (5, 5, {})
    assert 0 < figures["first_text_p50_s"] <= figures["latency_p99_s"]
    assert figures["tokens_per_s"] > figures["requests_per_s"] > 0


def test_load_tells_errors_by_kind_and_leaves_when_its_time_is_over(live, load, capsys):
    options = ["--url", live.url, "--json"]
    assert load.main([*options, "--requests", "2", "--body", '{"n": 0}']) == 1
    assert json.loads(capsys.readouterr().out)["errors"] == {"400 invalid_value": 2}
    with live.paused():
        assert load.main([*options, "--requests", "9", "--rate", "1000", "--seconds", "0.3"]) == 1
        errors = json.loads(capsys.readouterr().out)["errors"]
        assert sum(errors.values()) <= 9
        assert 1 <= errors["unfinished"] <= 6
        live.wait_until(lambda state: not state["waiting"])


@pytest.mark.parametrize("option", ["--url=http://192.0.2.1", "--url=http://x", "--requests=0"])
def test_load_stays_on_loopback_and_within_bounds(load, option, capsys):
    with pytest.raises(SystemExit) as stop:
        load.main([option])
    assert stop.value.code == 2
    assert "must be" in capsys.readouterr().err


# --- bad options


@pytest.mark.parametrize(
    "options",
    [
        ["--policy", "nonsense"],
        ["--policy", "energy_fill"],
        ["--policy", "request_router"],
        ["--port", "70000"],
        ["--max-num-seqs", "0"],
        ["--temperature", "nan"],
        ["--model", "./no/such/directory"],
        ["--max-len", "100000"],
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(example, capsys, options):
    try:
        code = example.main(options)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in err


# --- text

chunks_of = st.lists(st.integers(1, 5), min_size=1)


def cut(items, sizes):
    """The items in runs of these sizes, over and over."""
    position = i = 0
    while position < len(items):
        yield items[position : position + sizes[i % len(sizes)]]
        position += sizes[i % len(sizes)]
        i += 1


@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd")), chunks_of)
def test_bytes_become_characters_once_they_are_whole(example_text, text, sizes):
    """One token a byte, the hardest vocabulary there is."""
    tokens = example_text.Detokenizer(lambda tokens: bytes(tokens).decode(errors="replace"))
    sent = ""
    for chunk in cut(list(text.encode()), sizes):
        sent += tokens.feed(chunk)
        assert text.startswith(sent)
    assert sent + tokens.finish() == text


@given(st.binary(), chunks_of)
def test_bytes_that_are_no_characters_are_not_lost(example_text, data, sizes):
    def decode(tokens):
        return bytes(tokens).decode(errors="replace")

    tokens = example_text.Detokenizer(decode)
    text = "".join([tokens.feed(chunk) for chunk in cut(list(data), sizes)]) + tokens.finish()
    assert text.rstrip("\ufffd") == decode(data).rstrip("\ufffd")


@given(st.lists(st.integers(0, len(box.task.VOCABULARY) - 1)), chunks_of)
@example_of([4, *[0] * 8, 4], [1])  # a word, special tokens, a word
def test_the_box_s_words_and_digits_come_out_as_its_tokenizer_writes_them(
    example_text, box_text, tokens, sizes
):
    pieces = example_text.Detokenizer(box_text.decode)
    text = "".join([pieces.feed(chunk) for chunk in cut(tokens, sizes)]) + pieces.finish()
    assert text == box_text.decode(tokens)


@given(st.text("abc"), st.lists(st.text("abc", min_size=1), max_size=3), chunks_of)
def test_a_stop_string_is_found_however_the_text_is_cut(example_text, text, stops, sizes):
    """Against the definition: the shortest beginning that ends in one, without its longest one."""
    expected = text
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            expected = text[: end - max(map(len, ending))]
            break
    finder = example_text.StopStrings(stops)
    sent = ""
    for chunk in cut(text, sizes):
        sent += finder.feed(chunk)
        assert expected.startswith(sent)
    assert sent + finder.finish() == expected
    assert finder.met == (expected != text or any(text.endswith(stop) for stop in stops))


@pytest.fixture(scope="module")
def example_text(example):
    import openai_serving.text

    return openai_serving.text


@pytest.fixture(scope="module")
def box_text(example_text):
    return example_text.Text(str(box.box_model_dir()), box.task.encode, chat_only=True)


def test_every_end_of_a_request_has_its_answer(example):
    from openai_serving.service import FAILURES, REASONS

    assert set(REASONS) | set(FAILURES) == set(FinishReason)
