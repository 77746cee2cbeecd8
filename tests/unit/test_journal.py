"""The journal: every decision again, whoever had not finished back, and what cannot be written."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import os
import random
import subprocess
import sys
from typing import Any

import attrs
import pytest

from dllm_sched import (
    Accepted,
    BlockBoundary,
    Capacity,
    ClockError,
    ConfigError,
    FinishReason,
    GrowingKV,
    JournalError,
    Phase,
    PhaseChange,
    Policy,
    Request,
    RowFailed,
    RowFate,
    RowFinished,
    Scheduler,
    StepOutcome,
    cli,
    presets,
)
from dllm_sched.journal import JournaledScheduler, replay, restore
from dllm_sched.policies import Admission, MaxWaiting, PastDeadline, PriorityFirst, Slots, Verdict


def req(request_id: str, **fields: Any) -> Request:
    return Request(request_id, prompt_len=4, max_new_tokens=64, block_length=8, **fields)


class Play:
    """A random run on a journaled scheduler; knows after each line who is active."""

    def __init__(self, seed: int, policies: dict[str, Policy], *, ahead: int = 1) -> None:
        self.rng = random.Random(seed)
        self.policies = policies
        self.file = io.StringIO()
        self.scheduler = JournaledScheduler(
            self.file,
            capacity=Capacity(max_num_seqs=4, num_pages=40, memory=GrowingKV(page_size=4)),
            policy=next(iter(policies.values())),
            max_in_flight=ahead,
        )
        self.now = 0.0
        self.serial = 0
        self.active: dict[str, None] = {}
        self.flights: list[Any] = []
        self.blocks: dict[str, int] = {}
        self.after: list[tuple[int, list[str]]] = []  # (lines, who must come back)

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        update = function(*args, now=self.now, **kwargs)
        must = list(self.active)  # what this call ends is not known to have been told
        for one in update.finished:
            del self.active[one.request.id]
        for slot in update.released:
            self.blocks.pop(slot.request.id, None)
        if update.batch is not None:
            self.flights.append(update.batch)
        self.after.append((self.file.getvalue().count("\n"), must))
        return update

    def submit(self) -> None:
        rng = self.rng
        request = req(
            f"r{self.serial}",
            priority=rng.randint(0, 2),
            deadline_at=rng.choice([math.inf, self.now + 5.0]),
            queue_timeout_s=rng.choice([math.inf, 3.0]),
            payload={"n": self.serial},
        )
        self.serial += 1
        if isinstance(self.scheduler.submit(request, now=self.now), Accepted):
            self.active[request.id] = None
        self.after.append((self.file.getvalue().count("\n"), list(self.active)))

    def next(self) -> None:
        if len(self.flights) <= self.scheduler._max_in_flight - 1:
            self.call(self.scheduler.next_step)

    def complete(self) -> None:
        if not self.flights:
            return
        rng, batch = self.rng, self.flights.pop(0)
        finished, boundaries, phases, failed = [], [], [], []
        for row in batch.rows:
            dice = rng.random()
            if dice < 0.1:
                finished.append(RowFinished(row.slot, FinishReason.EOS, object()))
            elif dice < 0.13:
                failed.append(RowFailed(row.slot, ValueError("NaN")))
            elif dice < 0.3:
                done = min(self.blocks.get(row.request.id, 0) + 1, 8)
                self.blocks[row.request.id] = done
                boundaries.append(BlockBoundary(row.slot, done, 4 + 8 * done))
            elif dice < 0.4:
                phases.append(PhaseChange(row.slot, rng.choice(list(Phase))))
        outcome = StepOutcome(*map(tuple, (finished, boundaries, phases, failed)))
        if not (finished or boundaries or phases or failed):
            self.call(self.scheduler.complete_step, batch)
        else:
            self.call(self.scheduler.complete_step, batch, outcome)

    def fail(self) -> None:
        if self.flights:
            batch = self.flights[0]
            self.flights.clear()
            fates = {row.slot: self.rng.choice(list(RowFate)) for row in batch.rows}
            for row in batch.rows:
                if fates[row.slot] is RowFate.RESTART:
                    self.blocks.pop(row.request.id, None)
            self.call(self.scheduler.fail_step, batch, RuntimeError("lost"), rows=fates)

    def cancel(self) -> None:
        if self.active:
            self.call(self.scheduler.cancel, self.rng.choice(list(self.active)))

    def requeue(self) -> None:
        if self.active:
            self.call(self.scheduler.requeue, self.rng.choice(list(self.active)))

    def swap(self) -> None:
        self.call(self.scheduler.set_policy, self.rng.choice(list(self.policies.values())))

    def other(self) -> None:
        scheduler = self.scheduler
        if scheduler._paused:
            self.call(scheduler.resume)
            return
        what = self.rng.choice(
            [
                (scheduler.pause,),
                (scheduler.set_capacity, attrs.evolve(scheduler.capacity, max_num_seqs=3)),
                (scheduler.set_capacity, attrs.evolve(scheduler.capacity, max_num_seqs=4)),
            ]
        )
        self.call(*what)

    def run(self, calls: int) -> list[str]:
        plays = [
            self.requeue,
            self.submit,
            self.next,
            self.complete,
            self.cancel,
            self.fail,
            self.swap,
            self.other,
        ]
        for _ in range(calls):
            self.now += self.rng.choice([0.0, 0.25, 1 / 3])
            self.rng.choices(
                plays, [0.5, 4, 8, 8, 1, 0.5, 0.3, 3 if self.scheduler._paused else 0.5]
            )[0]()
        self.scheduler.resume(now=self.now)
        return self.file.getvalue().splitlines(keepends=True)


POLICIES = {
    "plain": Policy(name="plain"),
    "timed": attrs.evolve(presets.fixed_fill(3, 0.5), name="timed"),
    "mixed": Policy(
        ordering=PriorityFirst(),
        admission=Slots(3) & MaxWaiting(6),
        eviction=PastDeadline(),
        name="mixed",
    ),
    "mine": Policy(
        admission=lambda rv, round: Verdict.SKIP if rv.sequence % 5 == 4 else Verdict.ADMIT,
        name="mine",
    ),
}


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_a_recorded_run_replays_to_the_same_decisions(seed, ahead):
    play = Play(seed, POLICIES, ahead=ahead)
    lines = play.run(400)
    replayed = replay(lines, policies=POLICIES)
    assert replayed.difference is None
    assert replayed.num_requests == play.serial
    assert replayed.num_steps == play.scheduler.stats().num_steps > 40
    assert replayed.num_calls == len(lines) - 1


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_record_nobody_is_lost(seed):
    play = Play(100 + seed, POLICIES)
    lines = play.run(150)
    for number, must in play.after:
        sink = io.StringIO()
        back = restore(lines[:number], sink, now=1000.0, policies=POLICIES)
        assert [request.id for request in back.requests] == must
        assert back.scheduler.counts().waiting == len(must)
        back.scheduler.check_invariants()
    finished = serve(back.scheduler, now=1000.0)
    assert sorted(finished) == sorted(must)
    assert replay(sink.getvalue().splitlines(keepends=True), policies=POLICIES).difference is None


def serve(scheduler: Any, now: float) -> list[str]:
    """Serve what waits to its end; every row takes one step."""
    ended: list[str] = []
    update = scheduler.drain(now=now)
    for _ in range(1000):
        ended += [one.request.id for one in update.finished]
        if not scheduler.has_work():
            return ended
        update = scheduler.next_step(now=now)
        if update.batch is None:
            now = max(now, update.wake_at)
            continue
        ended += [one.request.id for one in update.finished]
        over = tuple(RowFinished(row.slot, FinishReason.EOS) for row in update.batch.rows)
        update = scheduler.complete_step(update.batch, StepOutcome(finished=over), now=now)
    raise AssertionError("it never ends")


def lines_of(*calls: Any, **arguments: Any) -> list[str]:
    file = io.StringIO()
    scheduler = JournaledScheduler(file, capacity=Capacity(max_num_seqs=2), **arguments)
    for call in calls:
        call(scheduler)
    return file.getvalue().splitlines(keepends=True)


def test_what_a_restart_leaves_of_deadlines_and_timeouts():
    def late(scheduler: Any) -> None:
        scheduler.submit(req("runs", deadline_at=110.0, queue_timeout_s=5.0), now=100.0)
        scheduler.submit(req("waits", deadline_at=120.0, queue_timeout_s=5.0), now=101.0)
        scheduler.submit(req("free"), now=101.0)
        scheduler.next_step(now=103.0)

    lines = lines_of(late, policy=presets.continuous(1))
    back = restore(lines, io.StringIO(), now=7.0)
    runs, waits, free = back.requests
    assert (runs.deadline_at, runs.queue_timeout_s) == (14.0, math.inf)  # 7 s left; it had begun
    assert (waits.deadline_at, waits.queue_timeout_s) == (24.0, 3.0)  # 2 of 5 s are gone
    assert (free.deadline_at, free.queue_timeout_s) == (math.inf, math.inf)


def test_a_full_queue_refuses_nobody_who_comes_back():
    policy = Policy(admission=Slots(1) & MaxWaiting(2))

    def fill(scheduler: Any) -> None:
        for one in "abc":
            scheduler.submit(req(one), now=0.0)
            scheduler.next_step(now=0.0) if one == "a" else None
        assert not isinstance(scheduler.submit(req("d"), now=0.0), Accepted)

    back = restore(lines_of(fill, policy=policy), io.StringIO(), now=0.0)
    assert [request.id for request in back.requests] == ["a", "b", "c"]
    assert back.scheduler.policy == policy


def test_payloads_go_through_the_callers_codec():
    class Mine(Request):
        pass

    def one(scheduler: Any) -> None:
        scheduler.submit(req("a", payload=b"\x01\x02", batch_key=("lora", 3)), now=0.0)

    lines = lines_of(one, write_payload=lambda request: request.payload.hex())
    assert replay(lines).difference is None
    back = restore(
        lines,
        io.StringIO(),
        now=0.0,
        make_request=lambda fields, payload: Mine(**fields, payload=bytes.fromhex(payload)),
    )
    (request,) = back.requests
    assert type(request) is Mine
    assert request.payload == b"\x01\x02"
    assert request.batch_key == ("lora", 3)


class Forgetful(Admission):
    """Decides by a count of its own, which no journal knows."""

    def __init__(self) -> None:
        self.asked = itertools.count()

    def admit(self, state: Any, rv: Any, round: Any) -> Verdict:
        return Verdict.ADMIT if next(self.asked) % 3 == 0 else Verdict.SKIP


def test_a_policy_with_hidden_state_is_found_out():
    policy = Policy(admission=Forgetful(), name="forgetful")

    def some(scheduler: Any) -> None:
        for one in "abcd":
            scheduler.submit(req(one), now=0.0)
        batch = scheduler.next_step(now=0.0).batch
        scheduler.complete_step(batch, now=0.0)

    lines = lines_of(some, policy=policy)
    found = replay(lines, policies={"forgetful": policy})  # it has already counted
    assert found.difference is not None
    assert found.difference.line == 6
    assert found.difference.recorded == lines[5].rstrip("\n")
    assert found.difference.recomputed != found.difference.recorded


def test_an_outcome_that_is_empty_is_none():
    def one(scheduler: Any) -> None:
        scheduler.submit(req("a"), now=0.0)
        batch = scheduler.next_step(now=0.0).batch
        scheduler.complete_step(batch, StepOutcome(), now=1.0)

    assert replay(lines_of(one)).difference is None


def test_every_preset_of_ours_is_written_whole():
    policy = presets.energy_fill(2, target_j=50.0, fixed_j=60.0, row_j=10.0)
    lines = lines_of(lambda scheduler: scheduler.submit(req("a"), now=0.0), policy=policy)
    assert replay(lines).difference is None
    assert restore(lines, io.StringIO(), now=0.0).scheduler.policy == policy


def test_a_tampered_decision_is_shown():
    def one(scheduler: Any) -> None:
        scheduler.submit(req("a"), now=0.0)
        scheduler.next_step(now=0.0)

    lines = lines_of(one)
    lines[2] = lines[2].replace('"joined":[[0,', '"joined":[[1,')
    found = replay(lines).difference
    assert found is not None
    assert found.line == 3
    assert '"joined":[[0,' in found.recomputed


def test_a_call_that_cannot_be_is_a_difference():
    def one(scheduler: Any) -> None:
        scheduler.submit(req("a"), now=0.0)

    lines = lines_of(one)
    found = replay([*lines, lines[1]]).difference
    assert found is not None
    assert "DuplicateRequestError" in found.recomputed


def test_a_last_line_that_was_cut_off_is_left_out():
    def two(scheduler: Any) -> None:
        scheduler.submit(req("a"), now=0.0)
        scheduler.submit(req("b"), now=0.0)

    lines = lines_of(two)
    lines[-1] = lines[-1][:-9]
    assert replay(lines).num_requests == 1
    assert [one.id for one in restore(lines, io.StringIO(), now=0.0).requests] == ["a"]


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ([], "it is empty"),
        (["[]\n"], "line 1"),
        (['{"a": 1}\n'], "line 1"),
        (['["submit",0.0,[],null]\n'], "begins with its version"),
        (['["journal",99,{},{},1]\n'], "begins with its version"),
        ([None, "what is this\n"], "line 2"),
        ([None, '["submit",0.0]\n'], "line 2"),
        ([None, '["dance",0.0,null,null]\n'], "line 2"),
        ([None, '["done",0.0,[5,null,1],null]\n'], "line 2"),
    ],
)
def test_what_is_no_journal_is_said(lines, what):
    header = lines_of()
    whole = [header[0] if line is None else line for line in lines]
    with pytest.raises(JournalError, match=what):
        replay(whole)


@pytest.mark.parametrize(
    "evil",
    [
        {"type": "os:system", "with": {"command": "true"}},
        {"type": "dllm_sched.journal:os.system", "with": {"command": "true"}},
        {"function": "subprocess:run"},
        {"enum": "signal:Signals", "member": "SIGKILL"},
        {"type": "dllm_sched.nowhere:Nothing", "with": {}},
        {"type": "dllm_sched.policies.admission:Slots", "with": {"count": 0}},
    ],
)
def test_nothing_but_this_library_is_built(evil):
    header = json.loads(lines_of()[0])
    header[3] = evil
    with pytest.raises(ConfigError):
        replay([json.dumps(header) + "\n"])


def test_a_limit_that_was_down_at_the_crash_refuses_no_policy():
    def short_of_memory(scheduler: Any) -> None:
        scheduler.submit(req("a"), now=0.0)
        scheduler.set_capacity(attrs.evolve(scheduler.capacity, max_num_seqs=1), now=1.0)
        scheduler.set_policy(presets.fixed_fill(2), now=2.0)

    lines = lines_of(short_of_memory, policy=presets.continuous(2))
    assert replay(lines).difference is None
    sink = io.StringIO()
    scheduler, requests = restore(lines, sink, now=0.0)
    assert [one.id for one in requests] == ["a"]
    assert scheduler.policy.name == "fixed_fill"
    assert scheduler.capacity.max_num_seqs == 1
    again = restore(sink.getvalue().splitlines(keepends=True), io.StringIO(), now=0.0)
    assert [one.id for one in again.requests] == ["a"]
    with pytest.raises(ConfigError, match="only 1 slots"):  # as given
        restore(lines, io.StringIO(), now=0.0, capacity=scheduler.capacity)


def test_a_policy_of_ones_own_must_be_given():
    lines = lines_of(policy=POLICIES["mine"])
    with pytest.raises(ConfigError, match="policies="):
        replay(lines)
    with pytest.raises(ConfigError, match="policies="):
        restore(lines, io.StringIO(), now=0.0)
    assert replay(lines, policies=POLICIES).difference is None


def test_what_json_cannot_say_is_refused_before_anything_changes():
    scheduler = JournaledScheduler(
        io.StringIO(),
        capacity=Capacity(max_num_seqs=1),
        write_payload=lambda request: request.payload,
    )
    for payload in (object(), math.nan):
        with pytest.raises(ConfigError, match="'a' cannot be written"):
            scheduler.submit(req("a", payload=payload), now=0.0)
    with pytest.raises(ConfigError, match="expected a Request"):
        scheduler.submit("a", now=0.0)
    assert scheduler.counts().submitted == 0


class _Full(io.StringIO):
    """A disk that is full after some lines."""

    left = 2

    def write(self, line: str) -> int:
        if not self.left:
            raise OSError(28, "No space left on device")
        self.left -= 1
        return super().write(line)


def test_after_a_line_that_could_not_be_written_every_call_says_so():
    scheduler = JournaledScheduler(_Full(), capacity=Capacity(max_num_seqs=1))
    assert isinstance(scheduler.submit(req("a"), now=0.0), Accepted)
    assert isinstance(scheduler.submit(req("b"), now=0.0), Accepted), "it was carried out"
    before = scheduler.counts()
    with pytest.raises(JournalError, match="No space left"):
        scheduler.submit(req("c"), now=0.0)
    with pytest.raises(JournalError, match="No space left"):
        scheduler.next_step(now=0.0)
    assert scheduler.counts() == before


def test_a_file_is_never_written_over(tmp_path):
    path = tmp_path / "run.jsonl"
    one = JournaledScheduler(path, capacity=Capacity(max_num_seqs=1), fsync=True)
    one.submit(req("a"), now=0.0)
    one.close()
    one.close()
    with pytest.raises(ConfigError, match="not empty"):
        JournaledScheduler(path, capacity=Capacity(max_num_seqs=1))
    with pytest.raises(ConfigError, match="not empty"):
        restore(path, path, now=0.0)
    assert replay(path).num_requests == 1
    with pytest.raises(JournalError, match="cannot be read"):
        replay(tmp_path / "none.jsonl")


CRASH = """
import os, sys
from dllm_sched import Capacity, Request
from dllm_sched.journal import JournaledScheduler
one = JournaledScheduler(sys.argv[1], capacity=Capacity(max_num_seqs=1))
for name in ("a", "b"):
    one.submit(Request(name, prompt_len=1, max_new_tokens=1), now=0.0)
for _ in range(3):
    one.complete_step(one.next_step(now=0.0).batch, now=0.0)
os.kill(os.getpid(), 9)
"""


def test_a_killed_process_leaves_its_requests(tmp_path):
    path = tmp_path / "run.jsonl"
    run = subprocess.run([sys.executable, "-c", CRASH, os.fspath(path)], check=False)
    assert run.returncode == -9
    back = restore(path, tmp_path / "next.jsonl", now=0.0)
    back.scheduler.close()
    assert [request.id for request in back.requests] == ["a", "b"]


def replayed(capsys: Any, *arguments: Any) -> tuple[int, str, str]:
    code = cli.main(["replay", *map(str, arguments)])
    return (code, *capsys.readouterr())


def test_the_command_line_replays(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    policies = {"plain": POLICIES["plain"], "timed": POLICIES["timed"]}
    lines = Play(1, policies).run(60)
    path.write_text("".join(lines))
    code, out, err = replayed(capsys, path)
    assert (code, err) == (0, "")
    assert out.startswith(f"{len(lines) - 1} calls, ")
    assert out.endswith("every decision is the same\n")
    code, out, _ = replayed(capsys, path, "--json")
    assert json.loads(out)["difference"] is None

    wrong = next(n for n, line in enumerate(lines) if '"wake_at":"inf"' in line)
    lines[wrong] = lines[wrong].replace('"wake_at":"inf"', '"wake_at":7.5')
    path.write_text("".join(lines))
    code, out, _ = replayed(capsys, path)
    assert code == 1
    assert f"line {wrong + 1} differs\nrecorded    {lines[wrong]}recomputed  " in out
    code, out, _ = replayed(capsys, path, "--json")
    assert (code, json.loads(out)["difference"]["line"]) == (1, wrong + 1)


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\n", b"hello\n", b'["journal",1]\n'])
def test_the_command_line_says_in_one_line_what_is_no_journal(tmp_path, capsys, content):
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_bytes(content)
    code, out, err = replayed(capsys, path)
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("given", [True, False])
def test_a_swap_keeps_in_a_replay_the_states_that_it_kept(given):
    """An axis whose object is unchanged keeps its state; an equal one of its own does not."""
    share = attrs.evolve(presets.fair_share(1), name="share")
    if given:  # a part of one's own: written by name alone
        share = attrs.evolve(share, control=lambda rv, view: ({}, math.inf))
    twin = attrs.evolve(share, ordering=copy.copy(share.ordering))
    wider = attrs.evolve(share, admission=Slots(2), name="wider")

    def swaps(scheduler: Any) -> None:
        serial = itertools.count()
        for policy in (share, wider, share, twin, wider, twin):
            for tenant in "aab":
                scheduler.submit(req(f"r{next(serial)}", tenant=tenant), now=0.0)
            batch = scheduler.next_step(now=0.0).batch
            over = tuple(RowFinished(row.slot, FinishReason.EOS) for row in batch.rows)
            scheduler.complete_step(batch, StepOutcome(finished=over), now=0.0)
            scheduler.set_policy(policy, now=0.0)
        scheduler.drain(now=0.0)
        while scheduler.has_work():
            batch = scheduler.next_step(now=0.0).batch
            over = tuple(RowFinished(row.slot, FinishReason.EOS) for row in batch.rows)
            scheduler.complete_step(batch, StepOutcome(finished=over), now=0.0)

    lines = lines_of(swaps, policy=share)
    apart = {"share": share, "wider": attrs.evolve(wider, ordering=copy.copy(share.ordering))}
    assert replay(lines, policies=apart).difference is None


STATEFUL = {
    policy.name: policy
    for policy in (
        presets.fair_share(3),
        presets.wait(3, max_wait_s=0.5, rate="ema"),
        presets.fixed_fill_online(3),
        presets.sangam(3),
    )
}


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("policies", [POLICIES, STATEFUL], ids=["plain", "stateful"])
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_record_nobody_is_lost_and_nobody_ends_twice(seed, policies, ahead):
    play = Play(200 + seed, policies, ahead=ahead)
    lines = play.run(120)
    for number, must in play.after:
        sink = io.StringIO()
        back = restore(lines[:number], sink, now=1000.0, policies=policies, max_in_flight=ahead)
        assert [request.id for request in back.requests] == must
        back.scheduler.check_invariants()
        ended = serve(back.scheduler, now=1000.0)
        assert sorted(ended) == sorted(must)
        written = sink.getvalue().splitlines(keepends=True)
        assert replay(written, policies=policies).difference is None


def test_a_request_that_cannot_be_built_again_is_said():
    lines = lines_of(lambda scheduler: scheduler.submit(req("a"), now=0.0))
    lines[1] = lines[1].replace("prompt_len", "prompt_size")
    with pytest.raises(JournalError, match="prompt_size"):
        restore(lines, io.StringIO(), now=0.0)


@pytest.mark.parametrize("now", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("call", ["pause", "drain", "next_step", "submit"])
def test_the_first_instant_is_a_number_too(call, now):
    text = io.StringIO()
    for scheduler in (
        JournaledScheduler(text, policy=presets.continuous(1), capacity=Capacity(max_num_seqs=1)),
        Scheduler(capacity=Capacity(max_num_seqs=1)),
    ):
        before = text.getvalue()
        args = (Request("a", prompt_len=1, max_new_tokens=1),) if call == "submit" else ()
        with pytest.raises(ClockError):
            getattr(scheduler, call)(*args, now=now)
        assert text.getvalue() == before
        assert scheduler.submit(Request("a", prompt_len=1, max_new_tokens=1), now=0.0) == Accepted(
            "a"
        ), "neither paused nor draining"
        assert scheduler.next_step(now=0.0).batch is not None
