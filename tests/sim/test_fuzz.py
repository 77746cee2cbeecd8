"""Files that are damaged at random: a clean result or one of our errors, never anything else.

Valid traces, tables, samples, configurations, journals and event logs are cut, flipped, doubled and
spiked with what parsers choke on. ``DLLM_SCHED_FULL=1`` runs forty times as many.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dllm_sched import (
    Capacity,
    DllmSchedError,
    FinishReason,
    GrowingKV,
    Request,
    RowFinished,
    StepOutcome,
    cli,
    presets,
)
from dllm_sched.events import from_json, to_json
from dllm_sched.journal import JournaledScheduler, replay, restore
from dllm_sched.policies import Policy
from dllm_sched.sim.arrivals import ClientMix
from dllm_sched.sim.service import load_samples
from dllm_sched.sim.workloads import Trace

ROUNDS = 25 if "DLLM_SCHED_FULL" not in os.environ else 1000
MOST_MEMORY = 4 << 30  # address space of the process, bytes, beyond what it had

SPIKES = [
    b"NaN", b"nan", b"inf", b"-inf", b"-Infinity", b"1e999", b"-1", b"-0", b"0", b"1e-320",
    b"9" * 25, b"9" * 5000, b"1e18", b"true", b"null", b"[]", b"{}", b'""', b'"\\ud800"', b"'",
    b"[" * 3000, b"{" * 3000, b'{"a":' * 3000, b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b",",
    "\u202e\u0661\u0662\U0001f600".encode(), b"\n\n", b'"', b"\\", b"#", b"=", b"1_000", b"0x10",
    b"2147483648", b"1000000000", b"99999999",
]  # fmt: skip


def damage(content: bytes, rng: random.Random) -> bytes:
    """One to four wounds."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content) + 1)
        kind = rng.randrange(7)
        if kind == 0 and content:
            at = min(at, len(content) - 1)
            content = content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
        elif kind == 1:
            content = content[:at]
        elif kind == 2:
            content = content[:at] + rng.choice(SPIKES) + content[at:]
        elif kind == 3:  # a number becomes another one
            end = at
            while end < len(content) and content[end : end + 1] in b"0123456789.-+e":
                end += 1
            content = content[:at] + rng.choice(SPIKES) + content[max(end, at) :]
        else:
            lines = content.splitlines(keepends=True)
            if not lines:
                continue
            one = rng.randrange(len(lines))
            if kind == 4:
                lines.insert(one, lines[rng.randrange(len(lines))])
            elif kind == 5:
                del lines[one]
            else:
                rng.shuffle(lines)
            content = b"".join(lines)
    return content


def journal() -> bytes:
    file = io.StringIO()
    sched = JournaledScheduler(
        file,
        capacity=Capacity(max_num_seqs=3, num_pages=40, memory=GrowingKV(page_size=4)),
        policy=presets.fixed_fill(2, 0.5),
    )
    for number in range(6):
        sched.submit(
            Request(f"r{number}", prompt_len=4, max_new_tokens=16, batch_key=("x", 1)),
            now=float(number),
        )
        batch = sched.next_step(now=float(number)).batch
        if batch is not None:
            over = tuple(RowFinished(row.slot, FinishReason.EOS) for row in batch.rows[:1])
            sched.complete_step(batch, StepOutcome(finished=over), now=float(number))
    sched.set_policy(presets.fair_share(2, {"a": 2.0}), now=9.0)
    sched.set_capacity(Capacity(max_num_seqs=4, num_pages=50, memory=GrowingKV(4)), now=9.0)
    sched.cancel("r5", now=9.5)
    return file.getvalue().encode()


def events() -> bytes:
    seen: list[Any] = []
    from dllm_sched import Scheduler

    sched = Scheduler(capacity=Capacity(max_num_seqs=2), policy=Policy(), observers=[seen.append])
    for number in range(3):
        sched.submit(Request(f"r{number}", prompt_len=4, max_new_tokens=16), now=float(number))
        batch = sched.next_step(now=float(number)).batch
        over = (RowFinished(batch.rows[0].slot, FinishReason.EOS),)
        sched.complete_step(batch, StepOutcome(finished=over), now=float(number))
    return "".join(to_json(event) + "\n" for event in seen).encode()


def trace() -> bytes:
    rows = "".join(f"{n / 4},{10 * n + 5},{n + 20}\n" for n in range(30))
    return f"arrival_s,prompt_tokens,output_tokens\n{rows}".encode()


CONFIG = b"""# a comparison
work = "blocks:4"
load = 0.5
requests = 100
batch-size = 4
seed = 3
workload = "poisson"
service = "linear:0.01,0.001,0"
policies = [{ name = "fixed_fill", batch_size = 4, timeout_s = 2.0 }, { name = "continuous" }]
"""
TABLE = b"rows,tokens,seconds\n1,0,0.01\n16,0,0.02\n16,4000,0.05\n"
CLIENTS = b"client,t_s,rate,cv,pattern\n0,0,0.5,1.5,Gamma\n1,0,0.2,0.7,Weibull\n0,600,1,1,Gamma\n"
STEPS = b"10\n20\n30\n40\n"


def read_trace(path: Path) -> None:
    for _ in Trace(path):
        pass


def read_events(path: Path) -> None:
    for line in path.read_bytes().decode("utf-8", "replace").splitlines():
        from_json(line)


def read_restore(path: Path) -> None:
    restore(path, io.StringIO(), now=0.0)


READERS: dict[str, tuple[Callable[[], bytes], Callable[[Path], object], str]] = {
    "trace": (trace, read_trace, "x.csv"),
    "packed": (lambda: gzip.compress(trace(), mtime=0), read_trace, "x.csv.gz"),
    "samples": (lambda: TABLE, load_samples, "x.csv"),
    "clients": (lambda: CLIENTS, ClientMix.load, "x.csv"),
    "replay": (journal, replay, "x.jsonl"),
    "restore": (journal, read_restore, "x.jsonl"),
    "events": (events, read_events, "x.jsonl"),
}
COMMANDS: dict[str, tuple[Callable[[], bytes], list[str], str]] = {
    "simulate --trace": (
        trace,
        ["simulate", "--workload", "trace", "--json", "--trace"],
        "x.csv",
    ),
    "compare --config": (lambda: CONFIG, ["compare", "--json", "--config"], "x.toml"),
    "simulate --service": (
        lambda: TABLE,
        ["simulate", "--requests", "60", "--load", "0.5", "--json", "--service", "table:"],
        "x.csv",
    ),
    "simulate --work": (
        lambda: STEPS,
        ["simulate", "--requests", "60", "--load", "0.5", "--json", "--work", "steps:"],
        "x.txt",
    ),
    "replay": (journal, ["replay", "--json"], "x.jsonl"),
}


@pytest.fixture(autouse=True)
def little_memory():
    """What a damaged file makes large ends in a MemoryError, which is none of our errors."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used * resource.getpagesize() + MOST_MEMORY, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused(name, tmp_path):
    make, read, file = READERS[name]
    content, path = make(), tmp_path / file
    path.write_bytes(content)
    read(path)
    refused = 0
    for seed in range(ROUNDS * 4):
        path.write_bytes(damage(content, random.Random(seed)))
        try:
            read(path)
        except DllmSchedError as error:
            refused += 1
            assert str(error)
        except BaseException as error:
            error.add_note(f"seed {seed} of {name}: {path.read_bytes()[:300]!r}")
            raise
    assert refused > ROUNDS // 2


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_answers_in_one_line(name, tmp_path, capsys):
    make, arguments, file = COMMANDS[name]
    content, path = make(), tmp_path / file
    refused = 0
    for seed in range(ROUNDS):
        path.write_bytes(damage(content, random.Random(seed)))
        *first, last = arguments
        whole = [*first, last + str(path)] if last.endswith(":") else [*arguments, str(path)]
        try:
            code = cli.main(whole)
        except BaseException as error:
            error.add_note(f"seed {seed} of {name}: {path.read_bytes()[:300]!r}")
            raise
        out, err = capsys.readouterr()
        refused += code == 2
        assert code in (0, 1, 2, 3), f"seed {seed}"
        assert err.count("\n") == (code == 2), f"seed {seed}: {err}"
        assert "Traceback" not in out + err
    assert refused


def test_the_damage_is_real():
    made = [make() for make, *_ in itertools.chain(READERS.values(), COMMANDS.values())]
    for content in made:
        changed = sum(damage(content, random.Random(seed)) != content for seed in range(50))
        assert changed > 40


def test_a_configuration_nested_too_deep_is_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "deep.toml"
    path.write_bytes(CONFIG + b"\ndeep = " + b"[" * 3000)
    assert cli.main(["compare", "--config", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
