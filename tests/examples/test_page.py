"""The live page of the example server, in a headless Chromium, with the model in the box."""

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
playwright = pytest.importorskip("playwright.sync_api")

PATIENCE_S = 120  # far more than anything here takes
EXAMPLES = Path(__file__).parents[2] / "examples"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
if CHROMIUM is None:  # a browser is no Python package; .ci/run installs it where it may
    pytest.skip("no chromium is installed", allow_module_level=True)
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
 --disable-background-networking --disable-component-update --disable-sync""".split()
ASKED = "spell a 405 b 12 c 318 d 77 e 960 f 251 g 84 h 733"
ANSWER = (
    "a four hundred five b twelve c three hundred eighteen d seventy seven e nine hundred sixty "
    "f two hundred fifty one g eighty four h seven hundred thirty three"
)


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import openai_server

        yield openai_server
    finally:
        sys.path.remove(str(EXAMPLES))


class Live:
    """A server in a thread of its own, whose steps can be taken one by one."""

    def __init__(self, example, *options, port=0):
        ready = threading.Event()

        class Server(example.Server):
            async def startup(self, sockets=None):
                await super().startup(sockets)
                ready.set()

        options = ["--port", str(port), "--threads", "1", "--log-level", "error", *options]
        args = example.parse_args(options)
        self.built = example.build(args)
        self._run, self.built.engine.run = self.built.engine.run, self._hold
        self._stepping, self._holds = False, threading.Event()
        self.step_s = 0.0  # that every step takes longer
        self._permits = threading.Semaphore(0)
        self.server = Server(self.built, args)
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        assert ready.wait(PATIENCE_S)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def close(self):
        self.http.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def _hold(self, batch):
        if self._stepping:
            self._holds.set()
            assert self._permits.acquire(timeout=PATIENCE_S)
        time.sleep(self.step_s)
        return self._run(batch)

    def _call(self, method):
        return asyncio.run_coroutine_threadsafe(self.built.driver.call(method), self.server._loop)

    @contextlib.contextmanager
    def one_by_one(self):
        """Hand out a function that lets one step run; between steps the server answers."""
        scheduler = self.built.scheduler
        self._call(scheduler.pause).result(PATIENCE_S)
        self._stepping = True

        def step():
            self._holds.clear()
            self._call(scheduler.resume).result(PATIENCE_S)
            assert self._holds.wait(PATIENCE_S)
            paused = self._call(scheduler.pause)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.server._loop).result()
            self._permits.release()
            paused.result(PATIENCE_S)

        try:
            yield step
        finally:
            self._stepping = False
            self._call(scheduler.resume).result(PATIENCE_S)

    def post(self, path, **body):
        return self.http.post(path, json=body)


@pytest.fixture(scope="module")
def live(example):
    live = Live(example, "--max-num-seqs", "4")
    yield live
    live.close()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """A function that opens the page; nobody may complain in its console.

    But for the browser itself, where requests are to fail.
    """
    with contextlib.ExitStack() as stack:
        wrong = []

        def open_page(live, *, failing=False, **options):
            context = browser.new_context(**options)
            stack.callback(context.close)
            context.set_default_timeout(1000 * PATIENCE_S)
            page = context.new_page()

            def note(message):
                of_browser = failing and message.text.startswith("Failed to load resource")
                if message.type in ("error", "warning") and not of_browser:
                    wrong.append(message.text)

            page.on("console", note)
            page.on("pageerror", lambda error: wrong.append(error.stack))
            page.goto(live.url)
            page.wait_for_selector("#link[data-state=live]")
            until(page, "model !== null")
            return page

        yield open_page
        assert wrong == []


@pytest.fixture
def page(opened, live):
    return opened(live, viewport={"width": 1280, "height": 900})


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Where pictures go: $DLLM_SCHED_PICTURES, or pytest's own folder."""
    folder = Path(os.environ.get("DLLM_SCHED_PICTURES") or tmp_path_factory.mktemp("pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def until(page, holds):
    """Wait until a JavaScript expression holds. (Playwright's own would need eval.)"""
    page.evaluate(
        f"""new Promise((done, fail) => {{
            const end = performance.now() + {1000 * PATIENCE_S};
            const look = () => {{
                if ({holds}) done();
                else if (performance.now() < end) requestAnimationFrame(look);
                else fail(new Error({json.dumps(holds)}));
            }};
            look();
        }})"""
    )


def make_load(page, live):
    """Let the page send 60 requests; return how many had finished before."""
    before = live.http.get("/state").json()["finished"]
    page.select_option("#count", "60")
    page.click("#load")
    page.wait_for_selector("#load-said:has-text('of 60 answered')")
    return before


def tab_to(page, id):
    """Go to an element with the keyboard alone; where the focus is can be seen on the way."""
    for _ in range(40):
        page.keyboard.press("Tab")
        at, outline = page.evaluate(
            "[document.activeElement.id, getComputedStyle(document.activeElement).outlineStyle]"
        )
        assert outline != "none", f"the focus cannot be seen on {at}"
        if at == id:
            return
    raise AssertionError(f"{id} is not reached")


def test_each_stay_is_a_bar_in_its_lane(page, live):
    before = make_load(page, live)
    page.wait_for_selector("#load:text('Start')")
    finished = live.http.get("/state").json()["finished"]
    assert finished == before + 60
    until(page, f"frame.finished === {finished} && open.size === 0")
    bars = page.evaluate("bars.map((bar) => ({ ...bar }))")
    assert len(bars) == finished, "whoever came before the page was opened is among them"
    lanes = {}
    for bar in bars:
        assert bar["reason"] == "eos"
        times = [bar["from"], *bar["blocks"], bar["to"]]
        assert times == sorted(times)
        assert len(bar["blocks"]) == bar["numBlocks"]
        assert [phase for _, phase in bar["phases"]] in (["prefill"], ["prefill", "reuse"])
        lanes.setdefault(bar["slot"], []).append((bar["from"], bar["to"]))
    assert set(lanes) <= {0, 1, 2, 3}
    for stays in lanes.values():
        ends = [instant for stay in stays for instant in stay]
        assert ends == sorted(ends), "no two at once"
    assert sum(bar["numBlocks"] for bar in bars) == live.http.get("/state").json()["num_blocks"]


def test_bars_are_drawn_and_a_click_chooses_one(page, live, monkeypatch):
    monkeypatch.setattr(live, "step_s", 0.05)  # else the bar is hardly longer than its label
    live.post("/v1/completions", prompt=ASKED)
    until(page, "bars.length > 0 && open.size === 0")
    page.click("#hold")
    page.select_option("#span", "2")
    drawn, due = page.evaluate(
        """() => {
            held = bars.at(-1).to;
            drawGantt();
            const { lanes, lane, span, left } = layout();
            const [r, g, b] = colour.reuse.match(/\\w\\w/g).map((two) => parseInt(two, 16));
            const { data } = gantt.getContext("2d").getImageData(0, 0, gantt.width, gantt.height);
            const drawn = new Array(lanes).fill(0);
            for (let i = 0; i < data.length; i += 4) {
                if (data[i] !== r || data[i + 1] !== g || data[i + 2] !== b) continue;
                drawn[Math.floor(Math.floor(i / 4 / gantt.width) / lane)] += 1;
            }
            const due = new Array(lanes).fill(0);
            for (const { slot, to, phases } of bars) {
                const from = phases.find(([, phase]) => phase === "reuse")?.[0] ?? to;
                const seconds = Math.min(to, held) - Math.max(from, left);
                due[slot] += Math.max(0, seconds) / span * (gantt.width - GUTTER) * (lane - 2);
            }
            return [drawn, due];
        }"""
    )
    most = max(due)  # of the bar that took its time; those before it are little more than labels
    assert most > 1000
    assert drawn[due.index(most)] >= 0.5 * most - 100  # ticks, ends and words are on it
    for count, pixels in zip(drawn, due, strict=True):
        assert count <= pixels + 100
    x, y = page.evaluate(
        """() => {
            const { lane, span, left } = layout();
            const bar = bars.at(-1);
            const middle = (bar.from + bar.to) / 2;
            return [GUTTER + (middle - left) / span * (gantt.clientWidth - GUTTER),
                (bar.slot + 0.5) * lane];
        }"""
    )
    page.click("#gantt", position={"x": x, "y": y})
    until(page, "chosen?.told === true")
    assert page.evaluate("chosen.id === bars.at(-1).id")
    assert page.inner_text("#text").strip() == ANSWER
    assert page.inner_text("#answer-prompt") == ASKED
    assert not page.is_checked("#follow")
    assert "eos" in page.inner_text("#caption")


def test_a_chosen_answer_fills_in_block_by_block(page, live):
    answers = []

    def ask():
        answers.append(httpx.post(f"{live.url}/v1/completions", json=body, timeout=PATIENCE_S))

    body = {"prompt": ASKED}
    asking = threading.Thread(target=ask)
    with live.one_by_one() as step:
        asking.start()
        until(page, "frame.waiting === 1")
        step()
        until(page, "open.size === 1")
        tab_to(page, "gantt")
        page.keyboard.press("ArrowRight")
        until(page, "chosen?.id === bars.at(-1).id")
        texts, blocks = [], set()
        for steps in range(1, 25):
            if steps > 1:
                step()
            until(
                page,
                f"chosen.states.at(-1)?.steps === {steps} && chosen.shown === "
                "chosen.states.length - 1 || chosen.told",
            )
            if page.evaluate("chosen.told"):
                break
            texts.append("".join(page.locator("#text .committed").all_inner_texts()))
            blocks.add(page.get_attribute("#blocks", "aria-label"))
            cells = page.evaluate(
                "[...document.querySelectorAll('#blocks i')].map((cell) => cell.className)"
            )
            masks = page.locator("#text .mask").count()
            guesses = page.locator("#text .provisional").count()
            assert (cells.count("m"), cells.count("p")) == (masks, guesses)
            assert "".join(cells).startswith("c" * cells.count("c")), "committed from the left"
            assert masks + guesses > 0, "the rest is dimmed, or a placeholder"
    asking.join(PATIENCE_S)
    until(page, "chosen.told")
    answer = answers[0].json()["choices"][0]["text"]
    assert answer == ANSWER
    assert page.inner_text("#text .committed") == answer
    assert page.locator("#text .provisional, #text .mask").count() == 0
    assert all(answer.startswith(text) for text in texts)
    assert texts == sorted(texts, key=len)
    assert len(set(texts)) > 3
    assert len(blocks) > 3
    assert page.get_attribute("#blocks", "aria-label") == "30 tokens committed, 3 of 6 blocks whole"


def test_one_s_own_request_is_answered_and_played_again(page):
    tab_to(page, "prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type(ASKED)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    until(page, "chosen?.mine && chosen.told")
    assert page.inner_text("#text").strip() == ANSWER
    assert page.inner_text("#said") == "Your answer is whole: eos."
    states = page.evaluate("chosen.states")
    assert len(states) > 3
    for before, after in itertools.pairwise(states):
        assert after["committed"].startswith(before["committed"])
        assert after["position"] >= before["position"] or after is states[-1]
    page.focus("#step")
    page.keyboard.press("Home")
    assert page.inner_text("#step-of") == f"1 of {len(states)}"
    assert "".join(page.locator("#text .committed").all_inner_texts()) == states[0]["committed"]
    page.keyboard.press("End")
    assert page.inner_text("#text").strip() == ANSWER


def test_whoever_runs_next_is_followed(page, live):
    assert page.is_checked("#follow")
    assert page.evaluate("chosen === null")
    for _ in range(100):  # who came before the page was ready is not followed
        live.post("/v1/completions", prompt=ASKED)
        if page.evaluate("chosen !== null"):
            break
    until(page, f"chosen.told && document.querySelector('#text').innerText.trim() === '{ANSWER}'")


def test_the_policy_is_switched_by_keyboard(opened, live):
    page = opened(live, failing=True)
    try:
        tab_to(page, "policy")
        while page.input_value("#policy") != "fixed_fill":
            page.keyboard.press("ArrowDown")
        assert page.input_value("#settings") == "timeout_s=0.1", "or leftovers would wait for ever"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector("#said:text('The policy is fixed_fill now.')")
        assert live.http.get("/policy").json()["policy"] == "fixed_fill"
        page.wait_for_selector("#link:text('Live · fixed_fill')")
        assert page.evaluate("policies.at(-1)[1]") == "fixed_fill"
        for setting, said in (
            ("timeout_s=-1", "must be a number >= 0"),
            ("batch_size=0", "must be an int >= 1"),
            ("nonsense=1", "nonsense"),
            ("nonsense", "name=value"),
        ):
            page.fill("#settings", setting)
            page.keyboard.press("Enter")
            page.wait_for_selector(f"#said[data-bad]:has-text('{said}')")
            assert page.inner_text("#said").startswith("Not switched: ")
        assert live.http.get("/policy").json()["policy"] == "fixed_fill"
    finally:
        live.post("/policy", name="continuous")


def test_the_slots_are_a_table_too(page, live):
    page.locator("#table-box summary").press("Enter")
    until(page, "document.querySelectorAll('#table tr').length === 4")
    asking = threading.Thread(target=live.post, args=("/v1/completions",), kwargs={"prompt": ASKED})
    with live.one_by_one() as step:
        asking.start()
        until(page, "frame.waiting === 1")
        step()
        page.wait_for_selector("#table td:text('0 of 6')")
        slot = page.evaluate("frame.slots.findIndex((row) => row !== null)")
        row = page.locator("#table tr").nth(slot)
        assert row.locator("th").inner_text() == str(slot)
        row.locator("button").press("Enter")
        until(page, "chosen?.states.length > 0")
        assert page.evaluate("chosen.id === frame.slots.find((row) => row !== null).id")
    asking.join(PATIENCE_S)
    until(page, "chosen.told")
    until(page, "document.querySelectorAll('#table button:disabled').length >= 3")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_window_of_any_width(opened, live, pictures, scheme):
    page = opened(live, color_scheme=scheme)
    before = make_load(page, live)
    until(page, f"frame.finished > {before} + 20 && chosen?.states.length > 0")
    for width in (320, 360, 768, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sticking_out = page.evaluate(
            """() => [...document.querySelectorAll("main *, header *")]
                .filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5
                    && !one.closest(".scroll, .hidden")).map((one) => one.outerHTML)"""
        )
        assert sticking_out == []
        path = pictures / f"page-{width}-{scheme}.png"
        page.screenshot(path=path, full_page=True)
        assert path.stat().st_size > 10_000
    page.wait_for_selector("#load:text('Start')")


def contrast(one, other):
    """WCAG's contrast of two colours, each "r g b" of 0 to 255."""

    def luminance(colour):
        parts = [value / 255 for value in colour]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(opened, live, scheme):
    page = opened(live, color_scheme=scheme)
    colours = {
        name: [int(value[i : i + 2], 16) for i in (1, 3, 5)]
        for name, value in page.evaluate("colour").items()
        if value.startswith("#")
    }
    for text, behind in (
        ("ink", "card"),
        ("ink", "lane"),
        ("muted", "card"),
        ("muted", "lane"),
        ("bad", "card"),
        ("label", "reuse"),
        ("on-prefill", "prefill"),
        *(("card", end) for end in ("done", "length", "cancelled", "bad")),
    ):
        assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
    for shape, behind in (("reuse", "lane"), ("refresh", "lane"), ("eos", "reuse")):
        assert contrast(colours[shape], colours[behind]) >= 2, (shape, behind)


def test_text_of_others_is_never_read_as_html(opened, live):
    page = opened(live, failing=True)
    for source in (EXAMPLES / "page").glob("*.js"):
        for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert name not in source.read_text()
    page.fill("#prompt", "<img src=x onerror=alert(1)>")
    page.click("#ask-form button")
    page.wait_for_selector("#said[data-bad]:has-text('<img')")
    page.evaluate("reached(chosen, { committed: '<img src=x>', position: 1, "
                  "provisional: ['<img src=x>', null], steps: 1 })")  # fmt: skip
    until(page, "document.querySelector('#text').innerText.includes('<img src=x>')")
    assert page.locator("img").count() == 0


def test_the_feed_of_an_answer(live):
    def told(**params):
        with live.http.stream("GET", "/state/answer", params=params) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    answer = live.post("/v1/completions", prompt=ASKED).json()
    only, over = told(id=f"{answer['id']}.0")
    assert (only["committed"], only["prompt"], only["status"]) == (ANSWER, ASKED, "eos")
    assert (only["position"], only["provisional"]) == (30, [])
    assert only["steps"] == answer["choices"][0]["dllm"]["num_steps"]
    assert over == {"over": True}
    unknown = live.http.get("/state/answer", params={"id": "nobody"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_request")


def test_a_lost_connection_is_told_and_found_again(example, opened):
    """The server ends; another one on its port wants a key."""
    first = Live(example)
    try:
        page = opened(first, failing=True)
        assert page.is_hidden("#lost")
        first.post("/v1/completions", prompt=ASKED)
        until(page, "frame.finished === 1")
    finally:
        first.close()
    page.wait_for_selector("#lost:has-text('lost')")
    assert page.get_attribute("#lost", "role") == "alert"
    page.wait_for_selector("#link[data-state=lost]")
    second = Live(example, "--api-key", "secret", port=first.port)
    try:
        assert second.http.get("/state/answer").status_code == 401
        page.click("#retry")
        page.wait_for_selector("#key-form")
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#said:text('Connected again.')")
        page.wait_for_selector("#link[data-state=live]")
        assert page.is_hidden("#lost")
        assert page.is_hidden("#key-form")
        assert page.evaluate("bars.length") == 0, "the other server's are not this one's"
    finally:
        second.close()
