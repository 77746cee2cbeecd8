"""Load on an OpenAI-compatible server: requests per second, times, and errors by kind.

    python examples/openai_server.py &
    python benchmarks/load.py --rate 50 --requests 500
    python benchmarks/load.py --clients 32 --requests 500 --json

Open loop (``--rate``: Poisson arrivals that wait for nobody) or closed loop (``--clients``: each
asks again once it has its answer). Loopback only, and bounded in count and time. Prompts are those
of the model in the box; ``--prompt`` asks one and the same. Times are the client's: from sending to
the first text, and to the end. An answer that has not come when the time is over is cut off, and
counted as ``unfinished``.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

try:
    import attrs
    import httpx

    from dllm_sched_hf.box import task
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}; run: pip install -e '.[hf,serve]' httpx")

MAX_REQUESTS, MAX_SECONDS, MAX_CLIENTS = 100_000, 3600, 1000


@attrs.define
class Tally:
    """What has come back so far."""

    sent: int = 0
    tokens: int = 0
    first_s: list[float] = attrs.field(factory=list)
    latency_s: list[float] = attrs.field(factory=list)
    errors: Counter[str] = attrs.field(factory=Counter)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="on loopback; default: %(default)s")
    add("--requests", type=int, default=200, help="how many; default: %(default)s")
    add("--seconds", type=float, default=60.0, help="at most; default: %(default)s")
    add("--rate", type=float, help="arrivals per second; default: as fast as clients ask")
    add("--clients", type=int, default=16, help="of the closed loop; default: %(default)s")
    add("--prompt", help="default: the prompts of the model in the box")
    add("--body", type=json.loads, default={}, help="further fields of every request, JSON")
    add("--seed", type=int, default=0, help="of prompts and arrivals; default: %(default)s")
    add("--api-key", default="-")
    add("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    for name, low, high in (
        ("requests", 1, MAX_REQUESTS),
        ("seconds", 0.0, MAX_SECONDS),
        ("clients", 1, MAX_CLIENTS),
        ("rate", 1e-6, math.inf),
    ):
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            parser.error(f"--{name} must be from {low} to {high}, got {value}")
    host = httpx.URL(args.url).host
    if host != "localhost" and not _is_loopback(host):
        parser.error(f"--url must be on loopback, got {host!r}: this is no tool for other machines")
    return args


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def ask(client: httpx.AsyncClient, prompt: str, fields: dict[str, Any], tally: Tally) -> None:
    """Stream one answer, and note how it went."""
    tally.sent += 1
    began = perf_counter()
    first = math.nan
    body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}} | fields
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                error = response.json()["error"]
                tally.errors[f"{response.status_code} {error['code']}"] += 1
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    tally.errors[f"stream {chunk['error']['code']}"] += 1
                    return
                if math.isnan(first) and any(choice["text"] for choice in chunk["choices"]):
                    first = perf_counter() - began
                tally.tokens += (chunk.get("usage") or {}).get("completion_tokens", 0)
    except asyncio.CancelledError:
        tally.errors["unfinished"] += 1
        raise
    except httpx.HTTPError as error:
        tally.errors[type(error).__name__] += 1
        return
    tally.latency_s.append(perf_counter() - began)
    if not math.isnan(first):
        tally.first_s.append(first)


async def open_loop(
    prompts: Iterator[str], rate: float, rng: random.Random, go: Callable[[str], Awaitable[None]]
) -> None:
    """Send each at its own instant, whatever has become of the ones before."""
    due = perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            if due > perf_counter():  # else at once: a busy client must not thin the load out
                await asyncio.sleep(due - perf_counter())
            tasks.create_task(go(prompt))
            due += rng.expovariate(rate)


async def closed_loop(
    prompts: Iterator[str], clients: int, go: Callable[[str], Awaitable[None]]
) -> None:
    async def one() -> None:
        for prompt in prompts:  # one iterator for all of them
            await go(prompt)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(one())


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Put the load on; return the figures."""
    rng = random.Random(args.seed)
    if args.prompt is None:
        prompts = (prompt for prompt, _ in task.sample_requests(args.requests, args.seed))
    else:
        prompts = (args.prompt for _ in range(args.requests))
    tally = Tally()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_CLIENTS)
    headers = {"authorization": f"Bearer {args.api_key}"}
    began = perf_counter()
    async with httpx.AsyncClient(
        base_url=args.url,
        timeout=args.seconds,
        limits=limits,
        headers=headers,
        trust_env=False,
    ) as client:

        async def go(prompt: str) -> None:
            await ask(client, prompt, args.body, tally)

        try:
            async with asyncio.timeout(args.seconds):
                if args.rate is None:
                    await closed_loop(prompts, args.clients, go)
                else:
                    await open_loop(prompts, args.rate, rng, go)
        except TimeoutError:
            pass
    lasted_s = perf_counter() - began
    return {
        "sent": tally.sent,
        "done": len(tally.latency_s),
        "errors": dict(sorted(tally.errors.items())),
        "seconds": lasted_s,
        "requests_per_s": len(tally.latency_s) / lasted_s,
        "tokens_per_s": tally.tokens / lasted_s,
        "first_text_p50_s": percentile(tally.first_s, 0.50),
        "first_text_p99_s": percentile(tally.first_s, 0.99),
        "latency_p50_s": percentile(tally.latency_s, 0.50),
        "latency_p99_s": percentile(tally.latency_s, 0.99),
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    figures = asyncio.run(run(args))
    if args.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            shown = f"{value:.4g}" if isinstance(value, float) else value
            print(f"{name:<18} {shown}")
    return 0 if figures["done"] else 1


if __name__ == "__main__":
    sys.exit(main())
