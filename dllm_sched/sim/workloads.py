"""Workloads: who arrives when, and what each request will turn out to need.

An open workload is an iterable of ``(arrival_s, Work)`` in order of arrival; iterating it again
gives the same requests, and it streams: a day of traffic never sits in memory. A closed loop is
asked for a client's next request when the last one has finished.

Arrivals and shapes have random streams of their own: the i-th request needs the same whatever the
arrival process or its rate, so that comparisons see the same work.
"""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import closing
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple

import attrs
import numpy as np

from dllm_sched.errors import ConfigError
from dllm_sched.sim._check import any_seed, instance_of, length_only
from dllm_sched.sim.arrivals import Arrivals, ClientMix, csv_rows, open_text
from dllm_sched.sim.lengths import Fixed
from dllm_sched.sim.shapes import Decoder, LadderSteps, Shapes, Work
from dllm_sched.theory._check import not_negative, positive, whole

__all__ = [
    "Arrival",
    "ClosedLoop",
    "ClosedLoopRun",
    "OpenLoop",
    "Replay",
    "Trace",
    "Workload",
    "servegen_clients",
    "shipped_traces",
]

_CHUNK = 8192
_DATA = "data"
_CLIENTS = "servegen_msmall_clients"
_SUFFIX = ".csv.gz"
_MOST_TOKENS = 10_000_000  # a request of more fills the memory
_HEADER = "arrival_s,prompt_tokens,output_tokens"


class Workload(ABC):
    """An open workload. Iterate it as often as needed."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[float, Work]]:
        """Yield ``(arrival_s, work)``, instants in seconds that never fall."""


def _optional(**values: object) -> None:
    whole(1, **{name: value for name, value in values.items() if value is not None})


@attrs.frozen
class OpenLoop(Workload):
    """Requests that arrive whether or not the others are finished.

    Args:
        arrivals: When.
        shapes: What.
        seed: >= 0; the same seed gives the same requests.
        max_requests: Stop after so many; ``None``: when the arrivals do, which may be never.
        until_s: Stop before the first arrival at or after this instant.
    """

    arrivals: Arrivals = attrs.field(validator=instance_of(Arrivals))
    shapes: Shapes = attrs.field(validator=instance_of(Shapes))
    seed: int = attrs.field(default=0, kw_only=True)
    max_requests: int | None = attrs.field(default=None, kw_only=True)
    until_s: float = attrs.field(default=math.inf, kw_only=True)

    def __attrs_post_init__(self) -> None:
        any_seed(self.seed)
        _optional(max_requests=self.max_requests)
        if self.until_s != math.inf:
            positive(until_s=self.until_s)

    def __iter__(self) -> Iterator[tuple[float, Work]]:
        arrivals, shapes = np.random.SeedSequence(self.seed).spawn(2)
        times: Iterator[float] = self.arrivals.times(arrivals)
        if self.until_s != math.inf:
            times = itertools.takewhile(float(self.until_s).__gt__, times)
        if self.max_requests is not None:
            times = itertools.islice(times, self.max_requests)
        rng = np.random.default_rng(shapes)
        works = itertools.chain.from_iterable(
            self.shapes.draw(rng, _CHUNK) for _ in itertools.count()
        )
        return zip(times, works, strict=False)


@attrs.frozen
class Replay(Workload):
    """Requests that are given: a recorded run, or a test's.

    Args:
        requests: ``(arrival_s, work)`` pairs, instants never falling; kept in memory.
    """

    requests: tuple[tuple[float, Work], ...] = attrs.field(converter=tuple, repr=length_only)

    def __attrs_post_init__(self) -> None:
        before = -math.inf
        for number, (arrival, _) in enumerate(self.requests):
            if not math.isfinite(arrival) or arrival < before:
                raise ConfigError(f"request {number}: arrival {arrival!r} follows {before!r}")
            before = arrival

    def __iter__(self) -> Iterator[tuple[float, Work]]:
        return iter(self.requests)


def _resources() -> dict[str, str]:
    folder = resources.files("dllm_sched.sim").joinpath(_DATA)
    names = (entry.name for entry in folder.iterdir() if entry.name.endswith(_SUFFIX))
    return {name.removesuffix(_SUFFIX): str(folder.joinpath(name)) for name in sorted(names)}


def shipped_traces() -> tuple[str, ...]:
    """Return the names of the real traces that come with the package; see ``data/NOTICE.md``."""
    return tuple(name for name in _resources() if name != _CLIENTS)


def servegen_clients(
    *,
    start_s: float = 0.0,
    end_s: float | None = None,
    rate_scale: float = 1.0,
) -> ClientMix:
    """Return ServeGen's 35 clients of its m-small workload: a week, about 1000 requests a second.

    Args:
        start_s: Begin here, a multiple of 600 s; a day is 86,400 s.
        end_s: End here, likewise; ``None``: after the week.
        rate_scale: Multiplies all rates, > 0.
    """
    return ClientMix.load(
        _resources()[_CLIENTS], start_s=start_s, end_s=end_s, rate_scale=rate_scale
    )


@attrs.frozen
class Trace(Workload):
    """Recorded traffic from a CSV file: ``arrival_s,prompt_tokens,output_tokens``, ``.gz`` too.

    Output tokens become blocks, rounded up, and the decoder turns blocks into steps. A line is read
    when its request is due; a fault in it is raised then.

    Args:
        path: The file; its first line is the header. Instants never fall, tokens are >= 0 (an
            output of none counts as one token, as does a prompt).
        decoder: Steps of the blocks; D2F's ladder, which is the most they can take, by default.
        speedup: Arrivals come this many times faster, > 0.
        max_prompt_len: Longer prompts are cut to it, tokens.
        max_output_len: Longer outputs are cut to it, tokens.
        max_new_tokens: Budget of every request, at least a block; ``None``: exactly its blocks.
        jitter_s: Spread requests over so many seconds (before the speed-up) after their instant,
            at random: for traces whose instants lie on a grid of that size.
        seed: Of the jitter.
        max_requests: Stop after so many.
    """

    path: str | Path
    decoder: Decoder = attrs.field(factory=LadderSteps, kw_only=True)
    speedup: float = attrs.field(default=1.0, kw_only=True)
    max_prompt_len: int | None = attrs.field(default=None, kw_only=True)
    max_output_len: int | None = attrs.field(default=None, kw_only=True)
    max_new_tokens: int | None = attrs.field(default=None, kw_only=True)
    jitter_s: float = attrs.field(default=0.0, kw_only=True)
    seed: int = attrs.field(default=0, kw_only=True)
    max_requests: int | None = attrs.field(default=None, kw_only=True)
    _shapes: Shapes = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        positive(speedup=self.speedup)
        not_negative(jitter_s=self.jitter_s)
        any_seed(self.seed)
        _optional(
            max_prompt_len=self.max_prompt_len,
            max_output_len=self.max_output_len,
            max_requests=self.max_requests,
        )
        shapes = Shapes(
            Fixed(1), unit="tokens", decoder=self.decoder, max_new_tokens=self.max_new_tokens
        )
        object.__setattr__(self, "_shapes", shapes)

    @classmethod
    def shipped(
        cls,
        name: str,
        *,
        decoder: Decoder | None = None,
        speedup: float = 1.0,
        max_prompt_len: int | None = None,
        max_output_len: int | None = None,
        max_new_tokens: int | None = None,
        jitter_s: float = 0.0,
        seed: int = 0,
        max_requests: int | None = None,
    ) -> Trace:
        """Return one of ``shipped_traces()``; options as of the class."""
        found = _resources()
        if name not in shipped_traces():
            raise ConfigError(f"no shipped trace {name!r}; there are {shipped_traces()}")
        return cls(
            found[name],
            decoder=LadderSteps() if decoder is None else decoder,
            speedup=speedup,
            max_prompt_len=max_prompt_len,
            max_output_len=max_output_len,
            max_new_tokens=max_new_tokens,
            jitter_s=jitter_s,
            seed=seed,
            max_requests=max_requests,
        )

    def rows(self) -> Iterator[tuple[float, int, int]]:
        """Yield ``(arrival_s, prompt_tokens, output_tokens)`` as recorded.

        Raises:
            ConfigError: If a line is malformed; names the line.
        """
        before = 0.0
        with closing(open_text(self.path)) as lines:
            for number, fields in csv_rows(self.path, lines, _HEADER):
                try:
                    arrival, prompt, output = float(fields[0]), int(fields[1]), int(fields[2])
                except ValueError:
                    raise ConfigError(
                        f"{self.path}, line {number}: arrival_s must be a number, tokens whole "
                        f"numbers: {','.join(fields)!r}"
                    ) from None
                if not before <= arrival < math.inf:
                    raise ConfigError(
                        f"{self.path}, line {number}: arrival_s must be finite, >= 0 and never "
                        f"fall: {arrival!r} after {before!r}"
                    )
                if not (0 <= prompt <= _MOST_TOKENS and 0 <= output <= _MOST_TOKENS):
                    raise ConfigError(
                        f"{self.path}, line {number}: tokens must be >= 0 and <= {_MOST_TOKENS:,}, "
                        f"got {prompt} and {output}"
                    )
                before = arrival
                yield arrival, prompt, output

    def _jittered(self) -> Iterator[tuple[float, int, int]]:
        rng = np.random.default_rng(self.seed)
        held: list[tuple[float, int, int, int]] = []
        for number, (arrival, prompt, output) in enumerate(self.rows()):
            while held and held[0][0] <= arrival:
                at, _, held_prompt, held_output = heapq.heappop(held)
                yield at, held_prompt, held_output
            heapq.heappush(held, (arrival + self.jitter_s * rng.random(), number, prompt, output))
        while held:
            at, _, held_prompt, held_output = heapq.heappop(held)
            yield at, held_prompt, held_output

    def __iter__(self) -> Iterator[tuple[float, Work]]:
        rows: Iterable[tuple[float, int, int]] = self._jittered() if self.jitter_s else self.rows()
        if self.max_requests is not None:
            rows = itertools.islice(rows, self.max_requests)
        longest_prompt = self.max_prompt_len or math.inf
        longest_output = self.max_output_len or math.inf
        work, speedup = self._shapes.work, self.speedup
        for arrival, prompt, output in rows:
            yield (
                arrival / speedup,
                work(int(max(1, min(prompt, longest_prompt))), int(min(output, longest_output))),
            )


class Arrival(NamedTuple):
    """A request of a closed loop."""

    arrival_s: float
    work: Work
    client: int


@attrs.frozen
class ClosedLoop:
    """Clients that each send one request, wait until it is finished, think, and send the next.

    Args:
        num_clients: >= 1.
        shapes: What they ask for.
        think_s: Mean time from a finish to the client's next arrival, seconds, >= 0. Everybody
            thinks before the first request, too.
        think: ``exponential`` or ``constant``.
        seed: >= 0. Each client has a random stream of its own: its i-th request needs the same
            under any scheduler.
        max_requests: Stop after so many arrivals in all.
    """

    num_clients: int
    shapes: Shapes = attrs.field(validator=instance_of(Shapes))
    think_s: float = attrs.field(default=0.0, kw_only=True)
    think: Literal["exponential", "constant"] = attrs.field(default="exponential", kw_only=True)
    seed: int = attrs.field(default=0, kw_only=True)
    max_requests: int | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        whole(num_clients=self.num_clients)
        not_negative(think_s=self.think_s)
        if self.think not in ("exponential", "constant"):
            raise ConfigError(f"think must be 'exponential' or 'constant', got {self.think!r}")
        any_seed(self.seed)
        _optional(max_requests=self.max_requests)

    def start(self) -> ClosedLoopRun:
        """Return a fresh run."""
        return ClosedLoopRun(self)


class ClosedLoopRun:
    """One run of a closed loop: the driver calls back at every finish.

    Args:
        loop: Its parameters.
    """

    def __init__(self, loop: ClosedLoop) -> None:
        self._loop = loop
        self._left = math.inf if loop.max_requests is None else loop.max_requests
        seeds = np.random.SeedSequence(loop.seed).spawn(loop.num_clients)
        self._streams = [self._stream(seed) for seed in seeds]

    def _stream(self, seed: np.random.SeedSequence) -> Iterator[tuple[float, Work]]:
        """Yield one client's thinking times and works."""
        loop = self._loop
        rng = np.random.default_rng(seed)
        while True:
            works = loop.shapes.draw(rng, 32)
            thinks = rng.standard_exponential(32) * loop.think_s
            if loop.think == "constant":
                thinks[:] = loop.think_s
            yield from zip(thinks.tolist(), works, strict=True)

    def first(self) -> list[Arrival]:
        """Return every client's first arrival, in order of arrival. Call it once. O(n log n)."""
        arrivals = [self.after(client, 0.0) for client in range(self._loop.num_clients)]
        return sorted((each for each in arrivals if each is not None), key=lambda each: each[::2])

    def after(self, client: int, finished_s: float) -> Arrival | None:
        """Return the client's next arrival; ``None`` when all requests have been sent. O(1).

        Args:
            client: Whose request has finished.
            finished_s: When, seconds.
        """
        if self._left < 1:
            return None
        self._left -= 1
        think, work = next(self._streams[client])
        return Arrival(finished_s + think, work, client)
