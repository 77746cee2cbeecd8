"""Serve LLaDA + D2F live under several scheduling policies, and compare them on the same arrivals.

    python examples/serve_llada_d2f.py
    python examples/serve_llada_d2f.py --policy continuous --rate 40 --requests 500
    python examples/serve_llada_d2f.py --model GSAI-ML/LLaDA-8B-Instruct \
        --lora SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora --device cuda --prompts prompts.jsonl

Without ``--model`` the model in the box runs: small, offline, on any CPU, with answers that can be
checked. Requests arrive by a Poisson process, faster than they can be served unless ``--rate`` says
otherwise, or when a trace says so. The first finished requests are printed; then comes one table.
Ctrl-C stops the intake, lets running requests finish, and reports; again: cancels these as well.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import logging
import math
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Self

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it


def leave(*_: object) -> None:
    """Handle Ctrl-C while there is nothing to clean up."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def hear_ctrl_c(before: object, handler: object) -> None:
    """Change what Ctrl-C does, unless the program was started to ignore it, as by nohup."""
    if signal.getsignal(signal.SIGINT) is before:
        signal.signal(signal.SIGINT, handler)


if __name__ == "__main__":  # to import torch takes seconds
    hear_ctrl_c(signal.default_int_handler, leave)
try:
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table

    from dllm_sched import ConfigError, Finished, FinishReason, Policy, Scheduler, Update, presets
    from dllm_sched.journal import JournaledScheduler
    from dllm_sched.runtime import Driver, RunReport
    from dllm_sched_hf import D2FEngine, D2FRequest, LLaDAModelLM, box, load_model
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}; run: pip install -e '.[hf]'")
hear_ctrl_c(leave, signal.default_int_handler)

COMPARED = ("per_request", "fixed_fill", "continuous")
TRACE_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
DONE = (FinishReason.EOS, FinishReason.LENGTH)
REFRESH_S = 0.25
BOX_REQUESTS = 200
LINES = 10
QUESTIONS = (
    "A baker sells 12 rolls an hour and 3 cakes a day. How many rolls in an 8-hour day?",
    "Name three rivers that flow into the Mediterranean.",
    "Write a Python function that returns the second largest number of a list.",
    "Why does ice float on water?",
    "Translate into French: The library opens at nine.",
    "A train covers 180 km in 2.5 hours. What is its mean speed?",
    "Summarise in one sentence what a compiler does.",
    "List the prime numbers between 40 and 60.",
)  # for models that are not in the box, asked in turn


class Job(NamedTuple):
    """One request of the workload, before any policy sees it."""

    at_s: float  #: arrival, seconds after the start
    request: D2FRequest
    prompt: str
    answer: str | None = None  #: the right one, where it is known


class Served(NamedTuple):
    """One policy's run."""

    policy: str
    report: RunReport
    metrics: dict[str, Any]
    failed: list[Finished]


# --- command line -------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"error: {message}\n")


def number(low: float, *, whole: bool = False, above: bool = False, high: float = math.inf):
    """Return an argparse type: a number from ``low`` (or above it) to ``high``."""
    kind = int if whole else float

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high or (above and value == low):
            sign = ">" if above else ">="
            limit = "" if high == math.inf else f" and <= {high}"
            raise argparse.ArgumentTypeError(f"must be {sign} {low}{limit}, got {text}")
        return value

    parse.__name__ = "whole number" if whole else "number"
    return parse


def lines(text: str) -> float:
    return sys.maxsize if text == "all" else number(0, whole=True, high=sys.maxsize)(text)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="checkpoint directory or hub id; default: the model in the box")
    add("--lora", help="LoRA directory or hub id; default: the box's for the box, else none")
    add("--device", help="cpu, cuda, ...; default: cuda if there is any")
    add("--dtype", help="float32, bfloat16, ...; default: bfloat16 on cuda, else float32")
    add("--threads", type=number(1, whole=True, high=1024),
        help="of the CPU; default: torch's, but 1 for the model in the box")  # fmt: skip
    add("--policy", default="all", choices=("all", *sorted(presets.PRESETS)), help="default: all")
    add(
        "--batch-size", type=number(1, whole=True, high=4096), default=16, help="slots; default: 16"
    )
    add("--timeout", type=number(0), default=0.12, help="of fixed_fill, seconds; default: 0.12")
    add("--requests", type=number(1, whole=True, high=10**6),
        help="how many; default: what the source has")  # fmt: skip
    add("--rate", type=number(0, above=True), default=1000.0,
        help="Poisson arrivals per second, inf = all at once; default: 1000")  # fmt: skip
    add("--trace", type=Path, help=f"CSV with {','.join(TRACE_COLUMNS)}: arrivals and lengths;\n"
        "prompts are random tokens unless --prompts gives them")  # fmt: skip
    add("--prompts", type=Path, help='JSON lines with {"prompt": ...}, or one prompt a line')
    add("--seed", type=int, default=0, help="of arrivals, prompts and draws; default: 0")
    add("--max-new-tokens", type=number(1, whole=True, high=10**6),
        help="default: 48 for the box, else 256")  # fmt: skip
    add("--block-length", type=number(1, whole=True, high=10**6),
        help="default: 8 for the box, else 32")  # fmt: skip
    for name in ("block-add", "decoded-token", "skip"):
        default = box.DECODING[f"{name.replace('-', '_')}_threshold"]
        add(f"--{name}-threshold", type=number(0, high=1), default=default,
            help=f"default: {default}")  # fmt: skip
    add("--temperature", type=number(0), default=0.0, help="default: 0, the most probable token")
    add("--lines", type=lines, help="finished requests to print per policy, or all;\n"
        f"default: {LINES}, or 0 with --json")  # fmt: skip
    add("--journal", type=Path, help="folder to write each run's journal to, as POLICY.jsonl;\n"
        "python -m dllm_sched replay makes its decisions again")  # fmt: skip
    add("--json", action="store_true",
        help="one JSON object on standard output, everything else on standard error")  # fmt: skip
    args = parser.parse_args(argv)
    if args.lines is None:
        args.lines = 0 if args.json else LINES
    return args


# --- the workload -------------------------------------------------------------------------------


def read_lines(path: Path) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers from 1."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Excel begins with a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from None
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{path}: is empty")
    return lines


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """Return (where it stands, prompt) of each prompt in a file."""
    lines = read_lines(path)
    if path.suffix != ".jsonl" and not lines[0][1].lstrip().startswith("{"):
        return [(f"{path}, line {i}", line.strip()) for i, line in lines]
    prompts = []
    for i, line in lines:
        where = f"{path}, line {i}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        prompt = found.get("prompt") if isinstance(found, dict) else None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(f'{where}: expected {{"prompt": "some text"}}, got {line.strip()}')
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{where}: the prompt is no text: {error}") from None
        prompts.append((where, prompt))
    return prompts


def read_trace(path: Path) -> list[tuple[str, float, int, int]]:
    """Return (where it stands, arrival in seconds, prompt tokens, output tokens) of each line."""
    (first, header), *lines = read_lines(path)
    names = [name.strip() for name in split(f"{path}, line {first}", header)]
    missing = [name for name in TRACE_COLUMNS if name not in names]
    if missing:
        raise ConfigError(
            f"{path}, line {first}: the header lacks {', '.join(missing)}; expected "
            f"{','.join(TRACE_COLUMNS)}"
        )
    trace = []
    before = 0.0
    for i, line in lines:
        where = f"{path}, line {i}"
        cells = dict(zip(names, split(where, line), strict=False))
        at_s = cell(where, cells, "arrival_s", float)
        if not before <= at_s < math.inf:
            raise ConfigError(
                f"{where}: arrival_s must be finite seconds >= {before:g}, the one before it, got "
                f"{at_s:g}"
            )
        before = at_s
        sizes = [cell(where, cells, name, int) for name in TRACE_COLUMNS[1:]]
        for name, size in zip(TRACE_COLUMNS[1:], sizes, strict=True):
            if size < 1:
                raise ConfigError(f"{where}: {name} must be >= 1, got {size}")
        trace.append((where, at_s, *sizes))
    if not trace:
        raise ConfigError(f"{path}: has a header but no arrivals")
    return trace


def split(where: str, line: str) -> list[str]:
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise ConfigError(f"{where}: not CSV: {error}") from None


def cell(where: str, cells: dict[str, str], name: str, kind: type) -> Any:
    try:
        return kind(cells[name])
    except (KeyError, ValueError):
        what = "seconds" if kind is float else "a whole number"
        raise ConfigError(f"{where}: {name} must be {what}, got {cells.get(name)!r}") from None


class Text:
    """Prompts to token ids and back, by the checkpoint's own tokenizer."""

    def __init__(self, model: str) -> None:
        from transformers import PreTrainedTokenizerFast

        try:
            self.tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        except (OSError, ValueError, TypeError) as error:
            lines = str(error).splitlines() or [repr(error)]
            raise ConfigError(f"model {model!r}: has no tokenizer to read: {lines[0]}") from None

    def encode(self, prompt: str) -> list[int]:
        tokenizer = self.tokenizer
        if not tokenizer.chat_template:
            return tokenizer(prompt)["input_ids"]
        turn = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.tokenizer.decode(tokens, skip_special_tokens=True).split())


def make_jobs(args: argparse.Namespace, model: LLaDAModelLM, text: Text) -> list[Job]:
    """Build every request before the clock starts: what is measured is serving."""
    rng = random.Random(args.seed)
    trace = None if args.trace is None else read_trace(args.trace)
    for where, _, *sizes in trace or ():  # before anything of such a size is made
        for name, size in zip(TRACE_COLUMNS[1:], sizes, strict=True):
            if size > model.config.max_sequence_length:
                raise ConfigError(
                    f"{where}: {name} must be <= {model.config.max_sequence_length}, the model's "
                    f"window, got {size}"
                )
    prompts: Iterator[tuple[str, str | list[int], str | None]]
    if args.prompts is not None:
        listed = read_prompts(args.prompts)
        count = len(listed)
        prompts = ((where, prompt, None) for where, prompt in itertools.cycle(listed))
    elif trace is not None:
        plain = [i for i in range(model.config.vocab_size) if i not in special_ids(model, text)]
        prompts = ((where, rng.choices(plain, k=length), None) for where, _, length, _ in trace)
    elif args.model is None:
        count = BOX_REQUESTS
        pairs = box.task.sample_requests(args.requests or count, args.seed)
        prompts = (("the box", prompt, answer) for prompt, answer in pairs)
    else:
        count = 8 * len(QUESTIONS)
        prompts = (("a built-in question", asked, None) for asked in itertools.cycle(QUESTIONS))
    if trace is None:
        gaps = itertools.repeat(0.0) if args.rate == math.inf else poisson(args.rate, rng)
        arrivals = zip(itertools.accumulate(gaps), itertools.repeat(None), strict=True)
        limit = args.requests or count
    else:
        arrivals = ((at_s, output) for _, at_s, _, output in trace)
        limit = min(args.requests or len(trace), len(trace))
    return [
        make_job(args, number, text, at_s, output, source)
        for number, ((at_s, output), source) in enumerate(
            itertools.islice(zip(arrivals, prompts, strict=False), limit)
        )
    ]


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    while True:
        yield rng.expovariate(rate)


def special_ids(model: LLaDAModelLM, text: Text) -> set[int]:
    config = model.config
    named = {config.mask_token_id, config.eos_token_id, config.pad_token_id}
    return named | set(text.tokenizer.all_special_ids)


def make_job(
    args: argparse.Namespace,
    number: int,
    text: Text,
    at_s: float,
    max_new_tokens: int | None,
    source: tuple[str, str | list[int], str | None],
) -> Job:
    where, prompt, answer = source
    if isinstance(prompt, str):
        ids, shown = text.encode(prompt), prompt
        if args.model is None:  # its tokenizer would read an unknown word as the end of the text
            try:
                box.task.encode(prompt)
            except ValueError as error:
                raise ConfigError(f"{where}: {error}") from None
    else:
        ids, shown = prompt, f"{len(prompt)} random tokens"
    request = D2FRequest(
        f"r{number}",
        prompt=ids,
        max_new_tokens=max_new_tokens or args.max_new_tokens,
        block_length=args.block_length,
        block_add_threshold=args.block_add_threshold,
        decoded_token_threshold=args.decoded_token_threshold,
        skip_threshold=args.skip_threshold,
        temperature=args.temperature,
        seed=args.seed + number,
        payload=where,
    )
    return Job(at_s, request, shown, answer)


def make_engine(args: argparse.Namespace, model: LLaDAModelLM, jobs: Sequence[Job]) -> D2FEngine:
    """Build an engine with room for what these requests need, and check each of them."""
    longest = max(job.request.max_total_tokens for job in jobs)
    max_len = min(longest, model.config.max_sequence_length)
    try:
        engine = D2FEngine(model, max_num_seqs=args.batch_size, max_len=max_len, clock=perf_counter)
    except (MemoryError, RuntimeError) as error:
        what = f"{args.batch_size} slots of {max_len} tokens"
        raise ConfigError(f"--batch-size: no room for {what}: {error}") from None
    for job in jobs:
        try:
            engine.check(job.request)
        except ConfigError as error:
            raise ConfigError(f"{job.request.payload}: {error}") from None
    return engine


# --- serving ------------------------------------------------------------------------------------


class Display:
    """Keeps what finished, and shows it a few times per second rather than at each step."""

    def __init__(
        self, console: Console, policy: str, jobs: Sequence[Job], text: Text, lines: int
    ) -> None:
        self.finished: list[Finished] = []
        self.started_at = math.nan  #: seconds on the driver's clock
        self._jobs = {job.request.id: job for job in jobs}
        self._text = text
        self._answers: dict[str, str] = {}
        self._lines = lines
        self._num_shown = 0
        self._num_rows = 0
        self._next_show = -math.inf
        self._console = console
        self._progress = Progress(
            TextColumn(policy),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rows]} rows in the step"),
            console=console,
            auto_refresh=False,  # no thread that competes with the model
            disable=not console.is_terminal,
            transient=True,
        )
        self._bar = self._progress.add_task(policy, total=len(jobs), rows=0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.show()
        self._progress.stop()
        num_hidden = len(self.finished) - self._num_shown
        if num_hidden and self._num_shown:
            self._console.print(f"  ... and {num_hidden} more; --lines all shows them")

    def on_update(self, update: Update) -> None:
        self.finished += update.finished
        if update.batch is not None:
            self._num_rows = len(update.batch.rows)
            now = perf_counter()
            if now >= self._next_show:
                self._next_show = now + REFRESH_S
                self.show()

    def show(self) -> None:
        fresh = self.finished[self._num_shown : self._lines]
        self._num_shown += len(fresh)
        if fresh:
            lines = "\n".join(map(self._line, fresh))
            self._console.print(lines, markup=False, highlight=False, soft_wrap=True)
        self._progress.update(self._bar, completed=len(self.finished), rows=self._num_rows)
        self._progress.refresh()

    def right(self, finished: Finished) -> bool | None:
        """Whether the answer is right; None where nobody knows."""
        answer = self._jobs[finished.request.id].answer
        return None if answer is None else self._answer(finished) == answer

    def latency_s(self, finished: Finished) -> float:
        """Seconds since it arrived, which may be before the step during which it was taken up."""
        return finished.finished_at - self.started_at - self._jobs[finished.request.id].at_s

    def _answer(self, finished: Finished) -> str:
        name = finished.request.id
        if name not in self._answers:
            tokens = () if finished.output is None else finished.output.tokens
            self._answers[name] = self._text.decode(tokens)
        return self._answers[name]

    def _line(self, finished: Finished) -> str:
        latency_s = self.latency_s(finished)
        ran_s = 0.0
        if finished.admitted_at is not None:
            ran_s = finished.finished_at - finished.admitted_at
        blocks = finished.num_blocks_done
        if finished.output is not None:
            blocks = finished.output.num_blocks
        verdict = {True: "  (right)", False: "  (wrong)", None: ""}[self.right(finished)]
        return (
            f"{finished.request.id:>5} {finished.reason.value:<9} {finished.num_steps:>3} steps "
            f"{blocks:>2} blocks  wait {latency_s - ran_s:7.3f} s  latency {latency_s:7.3f} s  "
            f"{self._jobs[finished.request.id].prompt} -> "
            f"{finished.error or self._answer(finished)}{verdict}"
        )


def make_policy(name: str, args: argparse.Namespace) -> Policy:
    if name == "per_request":
        return presets.by_name(name)
    if name == "fixed_fill":
        return presets.by_name(name, batch_size=args.batch_size, timeout_s=args.timeout)
    return presets.by_name(name, batch_size=args.batch_size)


def make_scheduler(policy: Policy, engine: D2FEngine, folder: Path | None) -> Scheduler:
    """Return a scheduler, one that keeps a journal if there is a folder for it."""
    if folder is None:
        return Scheduler(policy=policy, capacity=engine.capacity())
    path = folder / f"{policy.name}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return JournaledScheduler(path, policy=policy, capacity=engine.capacity())
    except OSError as error:
        raise ConfigError(f"--journal {folder}: {error}") from None


def serve(
    scheduler: Scheduler, engine: D2FEngine, jobs: Sequence[Job], display: Display, batch_size: int
) -> Served:
    """Serve all jobs live under one policy."""
    driver = Driver(scheduler, engine, on_update=display.on_update)
    forward_s = engine.forward_s
    with display:
        display.started_at = driver.clock()
        report = driver.run((job.at_s, job.request) for job in jobs)
        if report.interrupted:  # all that is left is to report
            hear_ctrl_c(signal.default_int_handler, signal.SIG_IGN)
    stats = scheduler.stats()
    done = [one for one in display.finished if one.reason in DONE]
    lasted_s = max((one.finished_at for one in display.finished), default=math.nan)
    lasted_s -= display.started_at
    latencies = sorted(map(display.latency_s, done))
    verdicts = [display.right(one) for one in done]
    metrics = {
        "requests_per_s": len(done) / lasted_s if done else 0.0,
        "tokens_per_s": sum(len(one.output.tokens) for one in done) / lasted_s if done else 0.0,
        "latency_mean_s": sum(latencies) / len(latencies) if done else None,
        "latency_p50_s": percentile(latencies, 0.50),
        "latency_p99_s": percentile(latencies, 0.99),
        "occupancy": stats.row_steps / stats.num_steps / batch_size if stats.num_steps else 0.0,
        "wasted_row_steps": stats.wasted_row_steps,
        "forward_share": (engine.forward_s - forward_s) / report.busy_s,
        "scheduler_us_per_step": report.scheduler_us_per_step,
        "num_requests": len(done),
        "num_exact": None if None in verdicts or not done else sum(verdicts),
    }
    failed = [one for one in display.finished if one.reason is FinishReason.ERROR]
    if isinstance(scheduler, JournaledScheduler):
        scheduler.close()
    return Served(scheduler.policy.name, report, metrics, failed)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share of all does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def warm_up(engine: D2FEngine, jobs: Sequence[Job]) -> None:
    """Let caches fill and kernels load before anything is measured."""
    driver = Driver(Scheduler(capacity=engine.capacity()), engine)
    report = driver.run((0.0, job.request) for job in jobs[: engine.max_num_seqs])
    if report.interrupted:
        raise KeyboardInterrupt


# --- the table ----------------------------------------------------------------------------------


def table_of(runs: Sequence[Served], num_jobs: int, model: LLaDAModelLM) -> Table:
    where = model.device.type
    if where == "cpu":
        where += f" with {torch.get_num_threads()} thread(s)"
    table = Table(
        title=f"{num_jobs} requests, the same arrivals for each policy",
        caption=f"{model.num_parameters() / 1e6:,.2f} M parameters, "
        f"{str(model.dtype).removeprefix('torch.')}, {where}",
    )
    table.add_column("")
    for run in runs:
        table.add_column(run.policy, justify="right")

    def row(label: str, show: str, key: str, scale: float = 1.0) -> None:
        values = [run.metrics[key] for run in runs]
        table.add_row(label, *("-" if v is None else format(v * scale, show) for v in values))

    row("requests/s", ".1f", "requests_per_s")
    row("tokens/s", ".0f", "tokens_per_s")
    row("latency mean, s", ".3f", "latency_mean_s")
    row("latency p50, s", ".3f", "latency_p50_s")
    row("latency p99, s", ".3f", "latency_p99_s")
    row("occupancy, %", ".1f", "occupancy", 100)
    row("wasted row-steps", ",.0f", "wasted_row_steps")
    row("in the forward, % of busy time", ".1f", "forward_share", 100)
    row("scheduler, us/step", ".1f", "scheduler_us_per_step")
    row("requests served", ",.0f", "num_requests")
    row("exact answers", ",.0f", "num_exact")
    return table


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=args.json)
    in_box = args.model is None
    model_name = str(box.box_model_dir()) if in_box else args.model
    lora = str(box.box_lora_dir()) if in_box and args.lora is None else args.lora
    defaults = box.DECODING if in_box else {"max_new_tokens": 256, "block_length": 32}
    args.max_new_tokens = args.max_new_tokens or defaults["max_new_tokens"]
    args.block_length = args.block_length or defaults["block_length"]

    with console.status("loading the model"):
        model = load_model(model_name, lora, device=args.device, dtype=args.dtype)
        text = Text(model_name)
        jobs = make_jobs(args, model, text)
        engine = make_engine(args, model, jobs)
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        elif in_box and model.device.type == "cpu":
            # So small that a second thread brings a third more speed on an idle machine and costs
            # many times as much on a busy one.
            torch.set_num_threads(1)
        warm_up(engine, jobs)

    runs: list[Served] = []
    for name in COMPARED if args.policy == "all" else (args.policy,):
        console.print(f"{name}:", style="bold")
        display = Display(console, name, jobs, text, args.lines)
        scheduler = make_scheduler(make_policy(name, args), engine, args.journal)
        runs.append(serve(scheduler, engine, jobs, display, args.batch_size))
        if runs[-1].report.interrupted:
            console.print(f"interrupted during {name}; what was done until then:", style="yellow")
            break
    hear_ctrl_c(signal.default_int_handler, signal.SIG_IGN)
    if args.json:
        print(json.dumps({one.policy: one.metrics for one in runs}))
    else:
        console.print(table_of(runs, len(jobs), model))
    failed = [finished for one in runs for finished in one.failed]
    if failed:
        first = f"the first, {failed[0].request.id}: {failed[0].error!r}"
        console.print(f"{len(failed)} requests failed; {first}", style="red", markup=False)
    if runs[-1].report.interrupted:
        return INTERRUPTED
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    before = signal.getsignal(signal.SIGINT)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    args = parse_args(argv)
    try:
        return run(args)
    except (ConfigError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        hear_ctrl_c(signal.default_int_handler, signal.SIG_IGN)
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        hear_ctrl_c(signal.SIG_IGN, before)


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    hear_ctrl_c(signal.default_int_handler, signal.SIG_IGN)  # it ends anyway
    sys.exit(code)
