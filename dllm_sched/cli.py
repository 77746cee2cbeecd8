"""The command line: ``dllm-sched simulate | compare | tune | replay``, or ``python -m dllm_sched``.

Try a policy on traffic in virtual time before it serves anybody, or make the decisions of a
recorded run again. Exit codes: 0 all went well; 1 a replay decided otherwise; 2 the arguments
cannot work, or an output cannot be written (one line on stderr says why); 3 the answer is that no
policy keeps up; 130 interrupted.

A TOML file (``--config``) may hold the same options by their long names, and ``policies``, a list
of tables with the ``name`` of a preset and its arguments; what the command line says wins::

    work = "gsm8k"
    load = 0.8
    policies = [{ name = "fixed_fill", batch_size = 16, timeout_s = 2.0 }]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import inspect
import json
import math
import os
import sys
import time
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from dllm_sched.capacity import Capacity, GrowingKV
from dllm_sched.errors import ConfigError, DllmSchedError
from dllm_sched.policies.base import Policy
from dllm_sched.policies.presets import PRESETS, by_name, find

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dllm_sched.sim.arrivals import Arrivals
    from dllm_sched.sim.service import ServiceModel
    from dllm_sched.sim.shapes import Shapes, Work
    from dllm_sched.sim.tuning import Requests

__all__ = ["main"]

_INF = math.inf
_BOUND_REQUESTS = 200_000  # above it the bound takes more memory than the run
_WORKLOADS = ("poisson", "mmpp", "gamma", "weibull", "servegen", "trace")
_LOADS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9)
# Least and most of the whole numbers; beyond the most, memory or time runs out.
_WHOLE = {
    "batch_size": (1, 16_384),  # more takes minutes to measure
    "requests": (1, 1_000_000_000),
    "seed": (0, 2**64),
    "max_waiting": (1, 1_000_000_000),
    "prompt": (1, 10_000_000),
    "max_prompt": (1, 10_000_000),
    "max_output": (1, 10_000_000),
    "pages": (1, 1_000_000_000),
    "page_size": (1, 10_000_000),
}
_MOST_BLOCKS = 100_000
_MOST_DRAWN_BLOCKS = 4_096  # of many sizes, each is kept
_MOST_STEPS = 1_000_000
_STEP_S = (1e-12, 1e12)
_RATES = (1e-9, 1e9)
_MOST_CV = 1000.0
# Options that only some workloads take: what they are for, and what they are when not given.
_FOR_TRACES = ("speedup", "jitter", "max_prompt", "max_output")
_LATER = {
    "batch_size": 16,
    "cv": 2.0,
    "mmpp": "50,120,0.2,0.6",
    "jitter": 0.0,
    "work": "gsm8k",
    "page_size": 16,
}
_LISTS = ("batch_sizes", "presets", "timeouts", "mmpp")  # may be lists in a file
_SAY_EVERY_S = 0.1


class _Parser(argparse.ArgumentParser):
    """One line on stderr, whatever is wrong."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> Any:
        raise ConfigError(message)


# --- options --------------------------------------------------------------------------------------


def _parser() -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    parser = _Parser(prog="dllm-sched", description=(__doc__ or "").split("\n\n")[1])
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    one = commands.add_parser("simulate", help="run one policy in virtual time")
    _add_policy(one)
    one.add_argument("--csv", metavar="FILE", help="write latency, wait and steps of each request")
    several = commands.add_parser("compare", help="run several policies on the same arrivals")
    several.add_argument(
        "--policy",
        action="append",
        metavar="NAME[:KEY=VALUE,...]",
        help="a preset and its arguments, e.g. fixed_fill:timeout_s=2; may be given several times "
        "(default: every preset that needs no more than a batch size)",
    )
    several.add_argument(
        "--batch-size",
        type=int,
        help="slots, and rows of a policy that does not say its own (default: 16)",
    )
    search = commands.add_parser("tune", help="search policy, batch size and timeout")
    search.add_argument(
        "--p99",
        type=float,
        metavar="S",
        help="p99 latency to stay within, s (default: the least p99)",
    )
    search.add_argument(
        "--presets", help="to try, comma-separated (default: continuous,block_refill,fixed_fill)"
    )
    search.add_argument("--batch-sizes", help="to try, comma-separated (default: 1,2,4,...,64)")
    search.add_argument(
        "--timeouts",
        help="of fixed_fill to try, s, comma-separated "
        "(default: 0, and 1/4, 1/2 and 1 of the time in which a batch fills)",
    )
    whose = {
        one: "the policy's capacity",
        several: "the largest capacity among the policies",
        search: "the largest capacity among the presets at the largest batch size",
    }
    for command in (one, several, search):
        _add_traffic(command, whose[command])
        _add_engine(command)
        _add_output(command)
    again = commands.add_parser("replay", help="make a journal's decisions again, and compare")
    again.add_argument("journal", metavar="FILE", help="what a JournaledScheduler wrote")
    again.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    again.add_argument("--progress", action="store_true", help="on stderr; default on a terminal")
    return parser, {"simulate": one, "compare": several, "tune": search}


def _add_policy(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("policy")
    group.add_argument(
        "--preset",
        default="continuous",
        help=", ".join(sorted(PRESETS)) + ", or module.function of your own (default: continuous)",
    )
    group.add_argument("--batch-size", type=int, help="rows, and the engine's slots (default: 16)")
    group.add_argument(
        "--timeout", type=float, metavar="S", help="of fixed_fill, seconds (default: none)"
    )


def _add_traffic(parser: argparse.ArgumentParser, whose: str) -> None:
    group = parser.add_argument_group("traffic")
    group.add_argument(
        "--workload", default="poisson", help=" | ".join(_WORKLOADS) + " (default: poisson)"
    )
    group.add_argument("--rate", type=float, help="mean arrivals, requests per second")
    group.add_argument("--load", type=float, help=f"or else as a share of {whose}")
    group.add_argument(
        "--requests", type=int, help="how many (default: 20,000, tune: 4,000; traces: all)"
    )
    group.add_argument("--seed", type=int, default=0, help="of all that is random (default: 0)")
    group.add_argument(
        "--mmpp",
        metavar="A,B,QA,QB",
        help="rates of two states and how often each is left per second; scaled to --rate "
        "(default: 50,120,0.2,0.6)",
    )
    group.add_argument("--cv", type=float, help="of gaps, for gamma and weibull (default: 2)")
    group.add_argument("--trace", metavar="FILE", help="CSV, or a shipped trace's name")
    group.add_argument("--speedup", type=float, help="of a trace (default: 1)")
    group.add_argument("--jitter", type=float, metavar="S", help="of a trace (default: 0)")
    group.add_argument("--max-prompt", type=int, help="cut a trace's prompts, tokens")
    group.add_argument("--max-output", type=int, help="cut a trace's outputs, tokens")
    group.add_argument(
        "--work",
        help="gsm8k | blocks:N | geometric:MEAN,HIGH (blocks) | steps:FILE (one count a line) "
        "(default: gsm8k)",
    )
    group.add_argument(
        "--prompt", type=int, help="prompt length of generated work, tokens (default: 76)"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--service",
        default="constant:0.0241",
        help="seconds of a step: constant:S | linear:BASE,ROW,TOKEN | table:FILE "
        "(rows,tokens,seconds); default: 24.1 ms, measured on an H200 (arXiv 2608.23807)",
    )
    group.add_argument("--pages", type=int, help="KV pages; default: no memory limit")
    group.add_argument("--page-size", type=int, help="tokens of a page (default: 16)")
    group.add_argument(
        "--max-waiting",
        type=int,
        default=100_000,
        help="longer queues stop a run (default: 100,000)",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    group.add_argument("--plot", metavar="FILE", help="write a picture: .png, .svg or .pdf")
    group.add_argument("--progress", action="store_true", help="on stderr; default on a terminal")
    group.add_argument("--config", metavar="TOML", help="options from a file")


def _configured(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse; what the file says is the default of what the command line does not."""
    parser, commands = _parser()
    options = parser.parse_args(arguments)
    if options.command == "replay":
        return options
    policies: list[tuple[str, dict[str, Any]]] = []
    if options.config is not None:
        values, policies = _from_file(options)
        commands[options.command].set_defaults(**values)
        options = parser.parse_args(arguments)
    if options.workload not in _WORKLOADS:
        raise ConfigError(f"workload: one of {', '.join(_WORKLOADS)}, got {options.workload!r}")
    given = {each.partition("=")[0] for each in arguments}
    options.policies = [] if {"--preset", "--policy"} & given else policies
    if options.policies and getattr(options, "timeout", None) is not None:
        raise ConfigError("--timeout: the policies of --config have their own timeout_s")
    sizes = [of["batch_size"] for _, of in options.policies if "batch_size" in of]
    if sizes and options.command == "simulate" and options.batch_size is not None:
        raise ConfigError(
            f"--batch-size {options.batch_size}: the policy of --config has its own batch_size = "
            f"{sizes[0]}; give one of the two"
        )
    _check(options)
    for name, value in _LATER.items():
        if getattr(options, name, value) is None:
            setattr(options, name, value)
    return options


def _from_file(
    options: argparse.Namespace,
) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """Return what ``--config`` says beside what the command line does, and its policies."""
    path = options.config
    values = _read(path)
    policies: list[tuple[str, dict[str, Any]]] = []
    if "policies" in values:
        other = "presets" if options.command == "tune" else "preset"
        if options.command == "tune" or other in values:
            raise ConfigError(f"--config {path}: policies and {other} do not mix")
        policies = _policies(values.pop("policies"), path)
    known = sorted(set(vars(options)) - {"command", "config"})
    for key in values:
        if key not in known:
            raise ConfigError(
                f"--config {path}: unknown key {key!r} for {options.command}; known: "
                f"{', '.join(known)}, policies"
            )
    for names in (("rate", "load"), ("policy",)):
        if any(getattr(options, name, None) is not None for name in names):
            values = {key: value for key, value in values.items() if key not in names}
    return values, policies


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _in_range(value: int, option: str, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{option}: must be an int >= {least:,} and <= {most:,}, got {value}")


def _check(options: argparse.Namespace) -> None:
    """Refuse numbers out of range, options that would be ignored, and files that cannot be."""
    _check_numbers(options)
    _check_used(options)
    for name in ("plot", "csv", "trace", "config"):
        if getattr(options, name, None) == "":
            raise ConfigError(f"{_option(name)}: the name of a file expected, got ''")
    _check_outputs(options)
    if options.plot is not None:
        if Path(options.plot).suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ConfigError(f"--plot: a plot's name ends in .png, .svg or .pdf: {options.plot!r}")
        try:
            import matplotlib.figure  # noqa: F401, PLC0415
        except ImportError as error:
            raise ImportError(
                "--plot: plots need matplotlib: pip install 'dllm-sched[plot]'"
            ) from error


def _check_numbers(options: argparse.Namespace) -> None:
    for name, (least, most) in _WHOLE.items():
        value = getattr(options, name, None)
        if value is not None:
            _in_range(value, _option(name), least, most)
    for name, highest in (("cv", _MOST_CV), ("p99", sys.float_info.max)):
        value = getattr(options, name, None)
        if value is not None and not 0 < value <= highest:
            raise ConfigError(
                f"{_option(name)}: must be a number > 0 and <= {highest:g}, got {value!r}"
            )
    for name, highest in (("jitter", sys.float_info.max), ("timeout", _INF)):
        value = getattr(options, name, None)
        if value is not None and not 0 <= value <= highest:
            raise ConfigError(f"{_option(name)}: must be a number >= 0, got {value!r}")


def _check_used(options: argparse.Namespace) -> None:
    trace = options.workload == "trace"
    for names, fits, needed in (
        (("cv",), options.workload in ("gamma", "weibull"), "--workload gamma or weibull"),
        (("mmpp",), options.workload == "mmpp", "--workload mmpp"),
        (_FOR_TRACES, trace, "--workload trace"),
        (("work", "prompt"), not trace, "generated work, not for traces"),
        (("page_size",), options.pages is not None, "a limit by --pages"),
    ):
        for name in names:
            if getattr(options, name) is not None and not fits:
                raise ConfigError(f"{_option(name)} is for {needed}")


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written, or that hold something else of the same run."""
    taken = {
        Path(name).resolve(): option
        for option, name in (
            ("--trace", options.trace),
            ("--config", options.config),
            ("--work", (options.work or "").partition("steps:")[2]),
            ("--service", options.service.partition("table:")[2]),
        )
        if name and "\0" not in name and Path(name).is_file()
    }
    for name in ("csv", "plot"):
        given = getattr(options, name, None)
        if given is None:
            continue
        option = _option(name)
        _check_file(option, given)
        other = taken.setdefault(Path(given).resolve(), option)
        if other != option:
            raise ConfigError(f"{option}: {given} is the file of {other}; name another one")


def _check_file(option: str, given: str) -> None:
    if "\0" in given:
        raise ConfigError(f"{option}: no file can be called {given!r}")
    path = Path(given)
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"{option}: cannot write {path}: no folder {folder}")
    if path.is_dir() or given.endswith(("/", os.sep)):
        raise ConfigError(f"{option}: cannot write {path}: it is a folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option}: cannot write {path}: permission denied")


def _read(path: str) -> dict[str, Any]:
    """Read a TOML file: ``policies`` as it is, flags, lists of strings, and the rest as text."""
    try:
        with Path(path).open("rb") as file:
            found = tomllib.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    values: dict[str, Any] = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name in values:
            raise ConfigError(
                f"--config {path}: {key!r} is given twice, with a hyphen and with an underscore"
            )
        if name in ("json", "progress") and not isinstance(value, bool):
            raise ConfigError(f"--config {path}: {key!r} must be true or false, got {value!r}")
        if name == "policy":
            values[name] = _texts(value, path)
        elif name in ("policies", "json", "progress"):
            values[name] = value
        else:
            values[name] = _as_text(key, value, path)
    return values


def _texts(value: Any, path: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise ConfigError(
            f"--config {path}: policy must be a text such as 'fixed_fill:timeout_s=2', or a list "
            f"of them, got {value!r}"
        )
    return texts


def _as_text(key: str, value: Any, path: str) -> str:
    """Return a value as argparse reads it."""
    if isinstance(value, dict):
        raise ConfigError(f"--config {path}: {key!r} must be a plain value, got a table")
    if isinstance(value, list):
        if key.replace("-", "_") not in _LISTS:
            raise ConfigError(f"--config {path}: {key!r} must be one value, got {value!r}")
        return ",".join(str(each) for each in value)
    return str(value)


def _policies(found: Any, path: str) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ConfigError(f"--config {path}: policies must be a list of tables")
    if not found:
        raise ConfigError(f"--config {path}: policies is empty")
    policies = []
    for table in found:
        arguments = dict(table)
        name = arguments.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"--config {path}: a policy needs the name of a preset: {table!r}")
        with _naming(f"--config {path}, policy {name}"):
            _preset(name, arguments, 1)  # refuses what is unknown
        policies.append((name, arguments))
    return policies


def _numbers(text: str, option: str, count: int | None = None) -> list[float]:
    try:
        numbers = [float(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option}: numbers expected, got {text!r}") from None
    if count is not None and len(numbers) != count:
        raise ConfigError(f"{option}: {count} numbers expected, got {text!r}")
    return numbers


def _whole_numbers(text: str, option: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option}: whole numbers expected, got {text!r}") from None


# --- from options to objects ----------------------------------------------------------------------


def _shapes(options: argparse.Namespace) -> Shapes:
    from dllm_sched.sim.lengths import Fixed, Geometric, Histogram  # noqa: PLC0415
    from dllm_sched.sim.shapes import Shapes, gsm8k  # noqa: PLC0415

    kind, _, text = options.work.partition(":")
    prompt = Fixed(76 if options.prompt is None else options.prompt)
    if options.work == "gsm8k":
        return gsm8k(prompt)
    if kind == "blocks":
        numbers = _whole_numbers(text, "--work blocks")
        if len(numbers) != 1:
            raise ConfigError(f"--work blocks: one number expected, got {text!r}")
        _in_range(numbers[0], "--work blocks", 1, _MOST_BLOCKS)
        return Shapes(Fixed(numbers[0]), prompt=prompt)
    if kind == "geometric":
        mean, high = _numbers(text, "--work geometric", 2)
        if not high.is_integer():
            raise ConfigError(f"--work geometric: HIGH must be a whole number, got {high!r}")
        _in_range(int(high), "--work geometric", 1, _MOST_DRAWN_BLOCKS)
        with _naming("--work geometric"):
            return Shapes(Geometric(mean, int(high)), prompt=prompt)
    if kind == "steps":
        try:
            lines = Path(text).read_text(encoding="utf-8").split()
            counts = [int(line) for line in lines]
        except (OSError, ValueError) as error:
            raise ConfigError(f"--work {options.work}: {error}") from error
        if not counts:
            raise ConfigError(f"--work {options.work}: the file holds no counts")
        for count in (min(counts), max(counts)):
            _in_range(count, f"--work {options.work}", 1, _MOST_STEPS)
        return Shapes(Histogram.of(counts), unit="steps", prompt=prompt)
    raise ConfigError(
        f"--work: gsm8k, blocks:N, geometric:MEAN,HIGH or steps:FILE expected, got {options.work!r}"
    )


@contextlib.contextmanager
def _naming(option: str) -> Iterator[None]:
    """Put the option before what is wrong with it."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("--") else f"{option}: {text}") from error


def _service(options: argparse.Namespace) -> ServiceModel:
    with _naming("--service"):
        service = _service_model(options.service)
    for rows, tokens in ((1, 0), (1, 10**7), (_WHOLE["batch_size"][1], 0)):
        step_s = service.step_s(rows, tokens)
        if not _STEP_S[0] <= step_s <= _STEP_S[1]:
            raise ConfigError(
                f"--service {options.service}: a step must take {_STEP_S[0]:g} to {_STEP_S[1]:g} "
                f"s, got {step_s:g} s with {rows:,} rows and {tokens:,} tokens"
            )
    return service


def _service_model(text: str) -> ServiceModel:
    from dllm_sched.sim.service import Constant, Linear, fit_table, load_samples  # noqa: PLC0415

    kind, _, rest = text.partition(":")
    if kind == "constant":
        return Constant(*_numbers(rest, "--service constant", 1))
    if kind == "linear":
        return Linear(*_numbers(rest, "--service linear", 3))
    if kind == "table":
        return fit_table(load_samples(rest)).model
    raise ConfigError(
        f"--service: constant:S, linear:BASE,ROW,TOKEN or table:FILE expected, got {text!r}"
    )


def _arrivals(options: argparse.Namespace, rate: float) -> Arrivals:
    from dllm_sched.sim.arrivals import (  # noqa: PLC0415
        MMPP,
        GammaRenewal,
        Poisson,
        WeibullRenewal,
    )
    from dllm_sched.sim.workloads import servegen_clients  # noqa: PLC0415

    if options.workload == "gamma":
        return GammaRenewal(rate, options.cv)
    if options.workload == "weibull":
        return WeibullRenewal(rate, cv=options.cv)
    if options.workload == "mmpp":
        first, second, leave_first, leave_second = _numbers(options.mmpp, "--mmpp", 4)
        with _naming("--mmpp"):
            return MMPP.two_state(
                first, second, leave_first=leave_first, leave_second=leave_second
            ).at_rate(rate)
    if options.workload == "servegen":
        return servegen_clients().at_rate(rate)
    return Poisson(rate)


class _Saturated(NamedTuple):
    """The same works, whenever they arrive; what a capacity is measured with."""

    shapes: Shapes
    seed: int

    def requests(self) -> Requests:
        from dllm_sched.sim.arrivals import Poisson  # noqa: PLC0415
        from dllm_sched.sim.workloads import OpenLoop  # noqa: PLC0415

        return OpenLoop(Poisson(1.0), self.shapes, seed=self.seed)


class _Traffic:
    """The workload that the options describe, at any rate."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._trace: Requests | None = None
        if (options.workload == "trace") != (options.trace is not None):
            raise ConfigError("--workload trace and --trace FILE go together")
        for name in ("rate", "load", "speedup"):
            value = getattr(options, name)
            if value is not None and not 0 < value < _INF:
                raise ConfigError(f"--{name} must be a positive finite number, got {value!r}")
            if value is not None and not _RATES[0] <= value <= _RATES[1]:
                raise ConfigError(f"--{name} must be {_RATES[0]:g} to {_RATES[1]:g}, got {value!r}")
        if options.rate is not None and options.load is not None:
            raise ConfigError("--rate and --load exclude each other")
        if options.workload != "trace":
            if options.rate is None and options.load is None:
                raise ConfigError("--rate or --load is needed (a trace brings its own)")
            self._shapes = _shapes(options)
            return
        if options.speedup is not None and (options.rate or options.load):
            raise ConfigError("--speedup, --rate and --load exclude each other")
        self._trace = self._load_trace()

    def _load_trace(self) -> Requests:
        from dllm_sched.sim.workloads import Trace, shipped_traces  # noqa: PLC0415

        options = self.options
        settings: dict[str, Any] = {
            "speedup": options.speedup or 1.0,
            "max_prompt_len": options.max_prompt,
            "max_output_len": options.max_output,
            "jitter_s": options.jitter,
            "seed": options.seed,
            "max_requests": options.requests,
        }
        if options.trace in shipped_traces():
            return Trace.shipped(options.trace, **settings)
        path = Path(options.trace)
        if not path.exists():
            raise ConfigError(
                f"--trace {options.trace}: no such file, and no shipped trace; those are "
                f"{', '.join(shipped_traces())}"
            )
        if not path.is_file():
            what = "a folder" if path.is_dir() else "no plain file, and is read several times"
            raise ConfigError(f"--trace {options.trace}: it is {what}; name a CSV file")
        trace = Trace(options.trace, **settings)
        if next(iter(trace), None) is None:
            raise ConfigError(f"--trace {options.trace}: it has a header and no requests")
        return trace

    def saturated(self) -> Requests:
        """The works in their order, for measuring a capacity."""
        if self._trace is not None:
            return self._trace
        return _Saturated(self._shapes, self.options.seed).requests()

    def at(self, rate: float | None) -> Requests:
        """The workload at a mean rate, requests per second; None: a trace's own."""
        from dllm_sched.sim.tuning import SpedUp, at_once, mean_rate  # noqa: PLC0415
        from dllm_sched.sim.workloads import OpenLoop  # noqa: PLC0415

        options = self.options
        if self._trace is None:
            if rate is None:
                raise ConfigError("--rate or --load is needed")
            count = 20_000 if options.requests is None else options.requests
            arrivals = _arrivals(options, rate)
            return OpenLoop(arrivals, self._shapes, seed=options.seed, max_requests=count)
        if rate is not None and at_once(self._trace):
            raise ConfigError(
                f"--trace {options.trace}: all requests arrive at one instant; neither --rate nor "
                "--load can be set"
            )
        return self._trace if rate is None else SpedUp(self._trace, rate / mean_rate(self._trace))

    def mean_rate(self, rate: float | None) -> float:
        """The rate in requests per second; ``inf`` if all arrive at one instant."""
        from dllm_sched.sim.tuning import at_once, mean_rate  # noqa: PLC0415

        if rate is not None or self._trace is None:
            return _INF if rate is None else rate
        return _INF if at_once(self._trace) else mean_rate(self._trace)

    def rate(self, capacity_per_s: float) -> float | None:
        """The rate asked for; None: a trace's own."""
        if self.options.load is not None:
            return float(self.options.load) * capacity_per_s
        rate: float | None = self.options.rate
        return rate

    def describe(self, amount: str) -> str:
        """Words for a caption; ``amount``: how many requests, or how fast."""
        options = self.options
        if self._trace is None:
            kind = {"poisson": "Poisson", "mmpp": "Markov-modulated Poisson"}
            name = kind.get(options.workload, options.workload)
            cv = f" (cv {options.cv:g})" if options.workload in ("gamma", "weibull") else ""
            what = f"{name} arrivals{cv}, work {options.work}"
        else:
            cut = [f"prompts up to {options.max_prompt}"] if options.max_prompt else []
            cut += [f"outputs up to {options.max_output}"] if options.max_output else []
            tokens = f" ({', '.join(cut)} tokens)" if cut else ""
            what = f"Trace {Path(options.trace).name}{tokens}"
        pages = f", {options.pages} pages of {options.page_size} tokens" if options.pages else ""
        return f"{what}; {amount}; seconds of a step {options.service}{pages}; seed {options.seed}"


def _capacity(options: argparse.Namespace, num_slots: int) -> Capacity:
    if options.pages is None:
        return Capacity(max_num_seqs=num_slots)
    memory = GrowingKV(page_size=options.page_size)
    return Capacity(max_num_seqs=num_slots, num_pages=options.pages, memory=memory)


def _takes(preset: str) -> tuple[str, ...]:
    return tuple(inspect.signature(find(preset)).parameters)


def _preset(preset: str, arguments: dict[str, Any], batch_size: int) -> Policy:
    """Build a preset; the batch size goes where the preset takes one."""
    takes = _takes(preset)
    if "batch_size" in takes:
        arguments = {"batch_size": batch_size, **arguments}
        size = arguments["batch_size"]
        if not isinstance(size, int) or isinstance(size, bool):
            raise ConfigError(f"batch_size of {preset}: must be a whole number, got {size!r}")
        _in_range(size, f"batch_size of {preset}", *_WHOLE["batch_size"])
    return by_name(preset, **arguments)


def _one_policy(options: argparse.Namespace) -> Policy:
    if options.policies:
        if len(options.policies) > 1:
            raise ConfigError("simulate runs one policy; compare runs several")
        name, arguments = options.policies[0]
        options.batch_size = arguments.get("batch_size", options.batch_size)
        return _preset(name, arguments, options.batch_size)
    arguments = {}
    if options.timeout is not None:
        if "timeout_s" not in _takes(options.preset):
            raise ConfigError(f"--timeout: {options.preset} has none; fixed_fill has")
        arguments["timeout_s"] = options.timeout
    return _preset(options.preset, arguments, options.batch_size)


def _several(options: argparse.Namespace) -> tuple[dict[str, Policy], int]:
    """The policies by label, and the slots that the largest of them needs."""
    wanted: list[tuple[str, dict[str, Any]]] = list(options.policies)
    for text in options.policy or ():
        name, _, rest = text.partition(":")
        arguments: dict[str, Any] = {}
        for pair in rest.split(",") if rest else ():
            key, equals, value = pair.partition("=")
            if not equals:
                raise ConfigError(f"--policy {text}: KEY=VALUE expected, got {pair!r}")
            if key in arguments:
                raise ConfigError(f"--policy {text}: {key} is given twice")
            number = _numbers(value, f"--policy {text}", 1)[0]
            arguments[key] = int(number) if number.is_integer() and "." not in value else number
        wanted.append((name, arguments))
    if not wanted:
        wanted = [(name, {}) for name in ("continuous", "block_refill", "fixed_fill")]
    found: dict[str, Policy] = {}
    slots = options.batch_size
    for name, arguments in wanted:
        inside = ", ".join(f"{key}={value}" for key, value in arguments.items())
        label = f"{name}({inside})" if inside else name
        if label in found:
            raise ConfigError(f"--policy: {label} is given twice")
        with _naming(f"policy {label}"):
            found[label] = _preset(name, arguments, options.batch_size)
        slots = max(slots, arguments.get("batch_size", 1))
    return found, slots


# --- progress -------------------------------------------------------------------------------------


class _Progress:
    """One line on stderr that is written over; nothing unless wanted."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._on = options.progress or (sys.stderr.isatty() and not options.json)
        self._wrote = False
        self._said_at = -_INF

    def say(self, text: str) -> None:
        if self._on:
            self._said_at = time.monotonic()
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._wrote = True

    def _due(self) -> bool:
        return self._on and time.monotonic() - self._said_at >= _SAY_EVERY_S

    def measuring(self, of: str) -> Callable[[int, int], None]:
        """Say at times how far the measuring of a capacity is."""

        def told(finished: int, count: int) -> None:
            if self._due():
                self.say(f"measuring the capacity of {of}: {finished:,} of {count:,} requests")

        self.say(f"measuring the capacity of {of}")
        return told

    def lines(self, file: Iterable[str]) -> Iterator[str]:
        """The same lines; says at times how many have come."""
        for number, line in enumerate(file, 1):
            if self._due():
                self.say(f"{number:,} lines")
            yield line

    def counting(self, workload: Requests, of: str = "") -> Requests:
        """The same requests; says at times how many have come."""

        def told(number: int, now: float) -> None:
            if self._due():
                self.say(f"{of}{number:,} requests, {now:,.0f} s of virtual time")

        return _Counted(workload, told) if self._on else workload

    def done(self) -> None:
        if self._wrote:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class _Counted:
    """Requests that are counted on stderr as they come."""

    def __init__(self, source: Requests, told: Callable[[int, float], None]) -> None:
        self._source = source
        self._told = told

    def __iter__(self) -> Iterator[tuple[float, Work]]:
        for number, each in enumerate(self._source, 1):
            self._told(number, each[0])
            yield each


def _print(options: argparse.Namespace, figures: dict[str, Any], text: str) -> None:
    """Print at once: what fails after it does not take it away."""
    try:
        text = json.dumps(_finite(figures), allow_nan=False) if options.json else text
        print(text, flush=True)
    except BrokenPipeError:
        _drop_stdout()  # nobody reads on, which is no fault
    except OSError as error:
        _drop_stdout()
        raise ConfigError(f"cannot write to stdout: {error}") from error


def _flush() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _drop_stdout()


def _drop_stdout() -> None:
    """Let what is buffered go nowhere, so that the interpreter's exit does not fail on it."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _finite(value: Any) -> Any:
    """Replace what JSON has no number for by None."""
    if isinstance(value, float):
        return _plain(value)
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list) else value


def _a_second(rate: float) -> str:
    return f"{rate:.4g} requests/s" if math.isfinite(rate) else "all requests at one instant"


_BURST = (
    "a burst: these requests arrive within less time than one batch takes, so their mean rate says "
    "nothing about the long run; the latencies are those of this burst"
)


def _too_fast(rate: float, capacity_per_s: float) -> str:
    return (
        f"unstable: {rate:.4g} requests/s arrive, the policy serves {capacity_per_s:.4g}: the "
        "queue grows without bound; the latencies say how long the run was, not what they would be"
    )


# --- commands -------------------------------------------------------------------------------------


def _simulate(options: argparse.Namespace, progress: _Progress) -> int:
    from dllm_sched.sim.recording import QueueTrace, SlotTimeline, StepHistogram  # noqa: PLC0415
    from dllm_sched.sim.report import table  # noqa: PLC0415
    from dllm_sched.sim.simulate import simulate  # noqa: PLC0415
    from dllm_sched.sim.tuning import is_burst, latency_bound, stopped_after  # noqa: PLC0415

    policy = _one_policy(options)
    capacity = _capacity(options, options.batch_size)
    service = _service(options)
    traffic = _Traffic(options)
    capacity_per_s = _measured(traffic, policy, capacity, service, progress)
    rate = traffic.rate(capacity_per_s)
    workload = traffic.at(rate)
    rate = traffic.mean_rate(rate)
    outrun = capacity_per_s <= rate < _INF
    burst = outrun and is_burst(workload, capacity_per_s, capacity.max_num_seqs)
    slots = SlotTimeline(max_spans=8 * options.batch_size)
    trace = QueueTrace(capacity, max_samples=300)
    histogram = StepHistogram()
    result = simulate(
        progress.counting(workload),
        policy=policy,
        capacity=capacity,
        service=service,
        max_waiting=options.max_waiting,
        observers=(slots, trace, histogram) if options.plot else (),
    )
    unstable = outrun and not burst
    result = attrs.evolve(result, unstable=unstable)
    bound = None
    if not (unstable or result.stopped) and result.counts.submitted <= _BOUND_REQUESTS:
        progress.say("computing the bound")
        bound = latency_bound(workload, capacity=capacity, service=service).mean_s
    progress.done()
    figures = {
        **result.figures(),
        "rate": _plain(rate),
        "capacity_per_s": capacity_per_s,
        "load": _plain(rate / capacity_per_s),
        "burst": burst,
        "bound_mean_s": bound,
        "mean_over_bound": result.mean() / bound if bound and result.num_requests else None,
        "seed": options.seed,
    }
    text = table([result], best_mean_s=bound)
    share = " of" if math.isfinite(rate) else ", requests/s:"
    text += f"\n{_a_second(rate)}{share} {capacity_per_s:.4g} that the policy can serve"
    if unstable:
        text += "\n" + _too_fast(rate, capacity_per_s)
    elif result.stopped:
        text += "\n" + stopped_after(result, workload, options.max_waiting)
    elif burst:
        text += "\n" + _BURST
    _print(options, figures, text)
    if options.plot:
        from dllm_sched.sim import plots  # noqa: PLC0415

        amount = f"{result.counts.submitted:,} requests, {_a_second(rate)}"
        caption = f"{policy.name}, {options.batch_size} slots. {traffic.describe(amount)}."
        figure = plots.run(
            caption=caption,
            spans=slots.spans,
            trace=trace,
            histogram=histogram,
            num_pages=capacity.num_pages,
            until_s=slots.complete_until_s,
        )
        plots.save(figure, options.plot)
    if options.csv:
        try:
            result.write_csv(options.csv)
        except OSError as error:
            raise ConfigError(f"--csv: cannot write {options.csv}: {error}") from error
    return 3 if unstable or result.stopped else 0


def _measured(
    traffic: _Traffic,
    policy: Policy,
    capacity: Capacity,
    service: ServiceModel,
    progress: _Progress,
    label: str | None = None,
) -> float:
    """Measure a policy's saturated rate, requests per second, > 0."""
    from dllm_sched.sim.tuning import saturated_rate  # noqa: PLC0415

    rate = saturated_rate(
        traffic.saturated(),
        policy=policy,
        capacity=capacity,
        service=service,
        progress=progress.measuring(policy.name if label is None else label),
    )
    if rate <= 0:
        raise ConfigError(
            f"{policy.name} finishes none of these requests; do they need more than --pages?"
        )
    return rate


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _compare(options: argparse.Namespace, progress: _Progress) -> int:
    from dllm_sched.sim.tuning import compare, is_burst, stopped_after  # noqa: PLC0415

    policies, slots = _several(options)
    capacity = _capacity(options, slots)
    service = _service(options)
    traffic = _Traffic(options)
    capacities = {}
    for label, policy in policies.items():
        capacities[label] = _measured(traffic, policy, capacity, service, progress, label)
    most = max(capacities.values())
    rate = traffic.rate(most)
    workload = traffic.at(rate)
    rate = traffic.mean_rate(rate)
    found = compare(
        policies,
        progress.counting(workload),
        capacity=capacity,
        service=service,
        max_waiting=options.max_waiting,
        bound=(options.requests or 0) <= _BOUND_REQUESTS,
    )
    outrun = {label for label in policies if capacities[label] <= rate < _INF}
    bursts = {
        label for label in outrun if is_burst(workload, capacities[label], capacity.max_num_seqs)
    }
    results = {
        label: attrs.evolve(result, unstable=label in outrun - bursts)
        for label, result in found.results.items()
    }
    found = attrs.evolve(found, results=results)
    progress.done()
    rows = [
        {
            **row,
            "capacity_per_s": capacities[row["label"]],
            "burst": row["label"] in bursts,
        }
        for row in found.figures()
    ]
    figures = {
        "rate": _plain(rate),
        "bound_mean_s": None if found.bound is None else found.bound.mean_s,
        "load": rate / most,  # of the largest capacity
        "seed": options.seed,
        "policies": rows,
        "unstable": all(row["unstable"] for row in rows),
        "stopped": all(row["stopped"] for row in rows),
    }
    text = f"{found.table()}\n{traffic.describe(_a_second(rate))}"
    if math.isfinite(rate):
        text += (
            f"\nload {rate / most:.4g} of {most:.4g} requests/s, the largest capacity among the "
            f"policies ({max(capacities, key=lambda label: capacities[label])})"
        )
    for label, result in results.items():
        if result.unstable:
            text += f"\n{label}: {_too_fast(rate, capacities[label])}"
        elif result.stopped:
            text += f"\n{label}: {stopped_after(result, workload, options.max_waiting)}"
        elif label in bursts:
            text += f"\n{label}: {_BURST}"
    _print(options, figures, text)
    if options.plot:
        from dllm_sched.sim import plots  # noqa: PLC0415

        count = max(result.counts.submitted for result in results.values())
        amount = f"{slots} slots, {count:,} requests at each load"
        figure = _curves(policies, capacity, service, traffic, capacities, amount, progress)
        plots.save(figure, options.plot)
        progress.done()
    return 3 if all(row["unstable"] or row["stopped"] for row in rows) else 0


def _curves(
    policies: dict[str, Policy],
    capacity: Capacity,
    service: ServiceModel,
    traffic: _Traffic,
    capacities: dict[str, float],
    amount: str,
    progress: _Progress,
) -> Figure:
    """Draw the policies at several loads, each as far as it keeps up."""
    from dllm_sched.sim import plots  # noqa: PLC0415
    from dllm_sched.sim.simulate import simulate  # noqa: PLC0415
    from dllm_sched.sim.tuning import latency_bound  # noqa: PLC0415

    most = max(capacities.values())
    curves: dict[str, list[tuple[float, Any]]] = {label: [] for label in policies}
    bound = []
    for load in _LOADS:
        rate = load * most
        workload = traffic.at(rate)
        bound.append((rate, latency_bound(workload, capacity=capacity, service=service).mean_s))
        for label, policy in policies.items():
            if rate < capacities[label]:
                progress.say(f"{label} at {rate:.4g} requests/s")
                result = simulate(workload, policy=policy, capacity=capacity, service=service)
                curves[label].append((rate, result))
    caption = traffic.describe(amount) + "."
    return plots.latency_against_load(curves, caption=caption, bound=bound)


def _searched(
    options: argparse.Namespace,
) -> tuple[list[int], tuple[str, ...], list[float] | None]:
    """Return the batch sizes, presets and timeouts to try."""
    sizes = (
        [1, 2, 4, 8, 16, 32, 64]
        if options.batch_sizes is None
        else _whole_numbers(options.batch_sizes, "--batch-sizes")
    )
    presets: tuple[str, ...] = ("continuous", "block_refill", "fixed_fill")
    if options.presets is not None:
        presets = tuple(options.presets.split(","))
        if len(set(presets)) < len(presets):
            raise ConfigError(f"--presets: one is given twice: {options.presets}")
        for name in presets:
            _takes(name)
    for size in sizes:
        _in_range(size, "--batch-sizes", *_WHOLE["batch_size"])
    if options.timeouts is not None and not any("timeout_s" in _takes(name) for name in presets):
        raise ConfigError("--timeouts: none of --presets has one; fixed_fill has")
    timeouts = None if options.timeouts is None else _numbers(options.timeouts, "--timeouts")
    for timeout in timeouts or ():
        if not timeout >= 0:
            raise ConfigError(f"--timeouts: numbers >= 0 expected, got {options.timeouts!r}")
    return sizes, presets, timeouts


def _tune(options: argparse.Namespace, progress: _Progress) -> int:
    from dllm_sched.sim.tuning import tune  # noqa: PLC0415

    sizes, presets, timeouts = _searched(options)
    engine = _capacity(options, max(sizes))
    service = _service(options)
    if options.requests is None and options.workload != "trace":
        options.requests = 4000
    traffic = _Traffic(options)
    rate = traffic.rate(0.0)
    most = 0.0
    if options.load is not None:
        policies = [_preset(name, {}, engine.max_num_seqs) for name in presets]
        most = max(_measured(traffic, policy, engine, service, progress) for policy in policies)
        rate = traffic.rate(most)
    progress.say("trying the first candidate")
    found = tune(
        traffic.at(rate),
        service=service,
        target_p99_s=options.p99,
        engine=engine,
        batch_sizes=sizes,
        presets=presets,
        timeouts_s=timeouts,
        max_waiting=options.max_waiting,
        progress=lambda done, of, last: progress.say(f"{done} of {of}: {last.candidate}"),
    )
    progress.done()
    figures = {
        **found.figures(),
        "unstable": all(t.p99_s == _INF and t.stopped is None for t in found.tried),
    }
    text = found.answer
    if found.frontier:
        text = f"{found.table()}\n{text}"
    if found.code is not None:
        text += f"\n{found.code}"
    if options.load is not None:
        text = (
            f"load {options.load:.4g} of {most:.4g} requests/s, the largest capacity among the "
            f"presets at the largest batch size\n{text}"
        )
    _print(options, figures, text)
    if options.plot:
        from dllm_sched.sim import plots  # noqa: PLC0415

        caption = traffic.describe(f"{found.rate:.4g} requests/s") + "."
        plots.save(plots.tuning_frontier(found, caption=caption), options.plot)
    return 0 if found.recommended is not None else 3


def _replay(options: argparse.Namespace, progress: _Progress) -> int:
    from dllm_sched.journal import replay  # noqa: PLC0415

    with Path(options.journal).open(encoding="utf-8") as file:
        found = replay(progress.lines(file))
    progress.done()
    different = found.difference
    told = f"{found.num_calls:,} calls, {found.num_requests:,} requests, {found.num_steps:,} steps"
    if different is None:
        text = f"{told}: every decision is the same"
    else:
        text = (
            f"{told}: line {different.line} differs\n"
            f"recorded    {different.recorded}\nrecomputed  {different.recomputed}"
        )
    figures = found._asdict() | {"difference": None if different is None else different._asdict()}
    _print(options, figures, text)
    return 0 if different is None else 1


_COMMANDS: dict[str, Callable[[argparse.Namespace, _Progress], int]] = {
    "simulate": _simulate,
    "compare": _compare,
    "tune": _tune,
    "replay": _replay,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: Without the program's name; None: this process's.

    Returns:
        The exit code: 0, 1 (a replay differs), 2 (arguments), 3 (no policy keeps up, or meets the
        target) or 130 (interrupted).
    """
    progress: _Progress | None = None
    try:
        options = _configured(sys.argv[1:] if arguments is None else arguments)
        progress = _Progress(options)
        with warnings.catch_warnings():
            # What is not finite is said in words; numpy and matplotlib would add lines of theirs.
            warnings.simplefilter("ignore", RuntimeWarning)
            warnings.simplefilter("ignore", UserWarning)
            return _COMMANDS[options.command](options, progress)
    except SystemExit:
        _flush()  # --help
        raise
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    except UnicodeError as error:
        message, code = f"error: a file is not text in UTF-8: {error}", 2
    except (OverflowError, ZeroDivisionError) as error:
        message, code = f"error: numbers too large or too small to work with: {error}", 2
    except MemoryError:
        message, code = "error: not enough memory for this many requests, slots or blocks", 2
    except (DllmSchedError, ImportError, OSError, EOFError, csv.Error) as error:
        message, code = f"error: {error}", 2
    if progress is not None:
        progress.done()
    print(f"dllm-sched: {' '.join(message.split())}", file=sys.stderr)
    return code
