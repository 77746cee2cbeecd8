"""An OpenAI-compatible server around the asyncio driver: LLaDA + D2F behind /v1.

    python examples/openai_server.py
    python examples/openai_server.py --policy fixed_fill --max-num-seqs 8 --port 8001
    python examples/openai_server.py --model GSAI-ML/LLaDA-8B-Instruct \
        --lora SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora --device cuda

Without ``--model`` the model in the box answers: small, offline, on any CPU. Completions and chats,
whole or streamed; streams carry committed text only, which never changes. Beside OpenAI's fields a
request may have ``deadline_s``, ``queue_timeout_s``, ``priority``, ``provisional`` and the
decoder's thresholds. For operators: /health, /metrics, /state, /state/stream and /policy.

SIGTERM or Ctrl-C takes no more requests and lets the open ones finish; a second one cuts them off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import inspect
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

try:
    import attrs
    import torch
    import uvicorn
    from prometheus_client import CollectorRegistry, generate_latest
    from starlette.applications import Starlette

    from dllm_sched import ConfigError, Policy, Scheduler, presets
    from dllm_sched.journal import JournaledScheduler
    from dllm_sched.metrics import Metrics
    from dllm_sched.policies import ChooseMode, PastDeadline
    from dllm_sched.runtime import AsyncDriver, Driver
    from dllm_sched_hf import D2FEngine, box, load_model
    from openai_serving.app import by_name_alone, make_app
    from openai_serving.monitor import History, Monitor
    from openai_serving.service import Defaults, Service
    from openai_serving.text import Text
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}; run: pip install -e '.[hf,serve]'")

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PAGE = Path(__file__).parent / "page"
KEY = "DLLM_SCHED_API_KEY"
FILL_S = 0.1  # for a batch to fill: alone, a client would wait for ever
STALLED_S = 30.0  # a client that has read nothing of a full buffer for so long is as good as gone
LAST_WORDS_S = 1.0  # for who is cut off to read so
_log = logging.getLogger("openai_server")


class Built(NamedTuple):
    """A server that has not begun."""

    app: Starlette
    monitor: Monitor
    driver: AsyncDriver
    scheduler: Scheduler
    engine: D2FEngine


# --- command line -------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"error: {message}\n")


def number(low: float, high: float, *, whole: bool = False):
    """Return an argparse type: a number from ``low`` to ``high``."""

    def parse(text: str) -> float:
        value = int(text) if whole else float(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, got {text}")
        return value

    parse.__name__ = "whole number" if whole else "number"
    return parse


def count(high: int):
    return number(1, high, whole=True)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__.partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help="checkpoint directory or hub id; None: the model in the box")
    add("--lora", help="LoRA directory or hub id; None: the box's for the box, else none")
    add("--served-name", help="the model's name in requests; None: --model, or llada-box")
    add("--device", help="cpu, cuda, ...; None: cuda if there is any")
    add("--dtype", help="float32, bfloat16, ...; None: bfloat16 on cuda, else float32")
    add("--threads", type=count(1024), help="of the CPU; None: torch's, but 1 for the box")
    add("--host", default="127.0.0.1", help="to listen on; loopback unless you say otherwise")
    add("--port", type=number(0, 65535, whole=True), default=8000, help="0: any free one")
    add("--policy", default="continuous", choices=by_name_alone(policy_maker(1)),
        help="how to schedule")  # fmt: skip
    add("--max-num-seqs", type=count(4096), default=16, help="rows of a step")
    add("--run-ahead", action="store_true", help="plan a step while one runs; for GPUs")
    add("--max-len", type=count(10**6), help="tokens of prompt and answer; None: the window")
    add("--max-open", type=count(10**6), default=1024, help="requests at once; the next gets 429")
    add("--max-body", type=count(2**30), default=2**18, help="bytes of a request")
    add("--max-tokens", type=count(10**6), help="of an answer; None: 48 for the box, else 256")
    add("--block-length", type=count(10**6), help="None: 8 for the box, else 32")
    add("--temperature", type=number(0, 2), default=0.0, help="where a request says nothing")
    for name in ("block-add", "decoded-token", "skip"):
        usual = box.DECODING[f"{name.replace('-', '_')}_threshold"]
        add(f"--{name}-threshold", type=number(0, 1), default=usual, help="likewise")
    add("--api-key", default=os.environ.get(KEY), metavar="KEY",
        help=f"what clients must know; better given as {KEY}")  # fmt: skip
    add("--drain", type=number(0, 1e9), default=math.inf, metavar="SECONDS",
        help="until open requests are cut off after SIGTERM")  # fmt: skip
    add("--journal", type=Path, help="new file to write every decision to, for `replay`")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"), help=" ")
    return parser.parse_args(argv)


# --- what is served -----------------------------------------------------------------------------


def policy_maker(max_num_seqs: int):
    """Return a function that makes policies by name, for as many rows unless told otherwise.

    It raises ConfigError for those that cannot be, and those whose knob the engine does not take.
    """
    usual = {"batch_size": max_num_seqs, "timeout_s": FILL_S}
    knobs = D2FEngine.decoder_type.knobs

    def make(name: str, **arguments: Any) -> Policy:
        takes = inspect.signature(presets.find(name)).parameters
        arguments = {key: usual[key] for key in usual if key in takes} | arguments
        policy = presets.by_name(name, **arguments)
        control = policy.control
        knob = "mode" if isinstance(control, ChooseMode) else getattr(control, "knob", None)
        if knob is not None and knob not in knobs:
            raise ConfigError(
                f"policy {name!r}: sets the knob {knob!r}, and the engine takes {', '.join(knobs)}"
            )
        # Some baselines have no deadlines, and clients of this server do.
        return attrs.evolve(policy, eviction=PastDeadline() | policy.eviction)

    return make


def build(args: argparse.Namespace) -> Built:
    """Load the model and put the server together.

    Raises:
        ConfigError: If something cannot be, of the model or of the policy.
    """
    in_box = args.model is None
    path = str(box.box_model_dir()) if in_box else args.model
    lora = str(box.box_lora_dir()) if in_box and args.lora is None else args.lora
    model = load_model(path, lora, device=args.device, dtype=args.dtype)
    if args.threads is not None or (in_box and model.device.type == "cpu"):
        torch.set_num_threads(args.threads or 1)
    usual = box.DECODING if in_box else {"max_new_tokens": 256, "block_length": 32}
    defaults = Defaults(
        max_tokens=args.max_tokens or usual["max_new_tokens"],
        block_length=args.block_length or usual["block_length"],
        temperature=args.temperature,
        thresholds={
            name: getattr(args, name)
            for name in ("block_add_threshold", "decoded_token_threshold", "skip_threshold")
        },
    )
    # The box's tokenizer would read an unknown word as the end of the text, and the model knows
    # nothing but its task.
    text = Text(path, box.task.encode if in_box else None, chat_only=in_box)
    engine = D2FEngine(
        model, max_num_seqs=args.max_num_seqs, max_len=args.max_len, clock=perf_counter
    )
    make_policy = policy_maker(args.max_num_seqs)
    metrics, registry, history = Metrics(), CollectorRegistry(), History()
    setting = {
        "policy": make_policy(args.policy),
        "capacity": engine.capacity(),
        "observers": [metrics, history],
        "max_in_flight": 2 if args.run_ahead else 1,
    }
    warm_up(engine, text, defaults)
    scheduler = (
        Scheduler(**setting)
        if args.journal is None
        else JournaledScheduler(args.journal, **setting)
    )
    monitor = Monitor(scheduler, engine, text, history)
    driver = AsyncDriver(scheduler, engine, max_open=args.max_open, on_update=monitor.on_update)
    monitor.attach(driver)
    metrics.expose(scheduler, driver=driver, engine=engine, registry=registry)
    registry.register(monitor)
    service = Service(
        driver,
        scheduler,
        engine,
        text,
        defaults,
        model=args.served_name or ("llada-box" if in_box else args.model),
        max_open=args.max_open,
        on_first_tokens=monitor.first_tokens,
    )

    @contextlib.asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        try:
            async with driver:
                yield
        finally:
            if isinstance(scheduler, JournaledScheduler):
                scheduler.close()

    app = make_app(
        service,
        monitor,
        make_policy,
        partial(generate_latest, registry),
        lifespan,
        api_key=args.api_key,
        hosts=("127.0.0.1", "localhost", "[::1]") if args.host in LOOPBACK else None,
        max_body=args.max_body,
        page=PAGE,
    )
    return Built(app, monitor, driver, scheduler, engine)


def warm_up(engine: D2FEngine, text: Text, defaults: Defaults) -> None:
    """Let caches fill and kernels load before the first client waits for them."""
    prompt = text.encode("spell a 1")
    request = engine.request(
        "warm-up", prompt, max_new_tokens=defaults.block_length, block_length=defaults.block_length
    )
    Driver(Scheduler(capacity=engine.capacity()), engine).run([(0.0, request)])


# --- serving ------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """uvicorn, which drains on the first signal, cuts off on the second, and quits on the third."""

    def __init__(self, built: Built, args: argparse.Namespace) -> None:
        config = uvicorn.Config(
            built.app,
            host=args.host,
            port=args.port,
            http="h11",
            ws="none",
            timeout_keep_alive=75,  # longer than clients keep theirs: they must not meet the end
            lifespan="on",
            proxy_headers=False,  # nobody asks where a client is
            log_level=args.log_level,
            access_log=args.log_level == "debug",
        )
        super().__init__(config)
        self._built = built
        self._drain_s = args.drain
        self._loop: asyncio.AbstractEventLoop | None = None
        self.cut_off = False

    async def serve(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        watch = asyncio.ensure_future(self._hang_up_on_stalled())
        try:
            await super().serve(sockets)
        finally:
            watch.cancel()

    async def shutdown(self, sockets: Any = None) -> None:
        self._built.monitor.draining = True
        timer = None
        if self._drain_s != math.inf:
            timer = asyncio.get_running_loop().call_later(self._drain_s, self._cut_off)
        await super().shutdown(sockets)
        if timer is not None:
            timer.cancel()

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self.should_exit:
            self.should_exit = True
        elif not self.cut_off and self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut_off)
        else:
            self.force_exit = True

    def _cut_off(self) -> None:
        """End every request now; their clients are told, if they read."""
        if not self.cut_off:
            self.cut_off = True
            self._stopping = asyncio.ensure_future(self._built.driver.stop("none"))
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._hang_up)

    def _hang_up(self) -> None:
        for transport in self._transports():
            transport.abort()

    async def _hang_up_on_stalled(self) -> None:
        """Let nobody who has stopped reading hold a stream, or the server's end, for ever."""
        before: dict[asyncio.Transport, int] = {}
        while True:
            await asyncio.sleep(STALLED_S)
            unread = {each: each.get_write_buffer_size() for each in self._transports()}
            for transport, size in unread.items():
                if size > 0 and before.get(transport) == size:
                    transport.abort()
            before = unread

    def _transports(self) -> list[asyncio.Transport]:
        return [connection.transport for connection in self.server_state.connections]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=args.log_level.upper())
    try:
        built = build(args)
    except (ConfigError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if args.host not in LOOPBACK and args.api_key is None:
        _log.warning("%s is not loopback and there is no %s: anybody may come", args.host, KEY)
    # What was loaded stays: a full collection that looks through it holds everybody up for 0.2 s.
    gc.collect()
    gc.freeze()
    server = Server(built, args)
    server.run()
    return 1 if server.cut_off or server.lifespan.shutdown_failed else 0


if __name__ == "__main__":
    sys.exit(main())
