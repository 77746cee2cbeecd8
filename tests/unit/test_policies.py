"""What each strategy decides, through the real scheduler, on scenarios worked out by hand."""

import math
import operator

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_sched import (
    Accepted,
    BlockBoundary,
    Capacity,
    ConfigError,
    FinishReason,
    GrowingKV,
    Phase,
    PhaseChange,
    Policy,
    PolicyError,
    Rejected,
    Request,
    RowFinished,
    Scheduler,
    StepOutcome,
)
from dllm_sched.policies import (
    ALL,
    FCFS,
    KEEP,
    RESTART,
    Admission,
    AllRows,
    AtBatchBoundary,
    AtBlockBoundary,
    Composition,
    Control,
    EarliestDeadline,
    Eviction,
    Fill,
    MaxWait,
    MaxWaiting,
    Ordering,
    PastDeadline,
    PoissonTimeout,
    PriorityFirst,
    ShortestBudget,
    Slots,
    StepCap,
    Timeout,
    TokenBudget,
    Verdict,
    YoungestFirst,
    presets,
)


class Desk:
    """A scheduler and what the engine would say, in a few words."""

    def __init__(self, policy, slots=4, **capacity):
        self.scheduler = Scheduler(policy=policy, capacity=Capacity(max_num_seqs=slots, **capacity))
        self.batch = None
        self.wake_at = None
        self.ended = []  # (id, reason) in the order told
        self.released = []

    def submit(self, id, now=0.0, **fields):
        fields = {"prompt_len": 4, "max_new_tokens": 8, "block_length": 4} | fields
        return self.scheduler.submit(Request(id, **fields), now=now)

    def start(self, now=0.0):
        """Plan a step; return the ids of its rows in slot order, None without a batch."""
        update = self.scheduler.next_step(now=now)
        self._told(update)
        self.batch = update.batch
        self.wake_at = update.wake_at
        return None if update.batch is None else self.ids(update.batch.rows)

    def ids(self, rows):
        return [row.request.id for row in sorted(rows, key=lambda row: row.slot)]

    def joined(self):
        return self.ids(self.batch.joined)

    def end(self, *finished, now=0.0, blocks=None, phases=None):
        """End the step; ``blocks``: {id: (blocks done, tokens cached)}; ``phases``: {id: phase}."""
        slots = {row.request.id: row.slot for row in self.batch.rows}
        outcome = StepOutcome(
            finished=tuple(RowFinished(slots[id], FinishReason.EOS) for id in finished),
            boundaries=tuple(BlockBoundary(slots[i], *b) for i, b in (blocks or {}).items()),
            phases=tuple(PhaseChange(slots[i], p) for i, p in (phases or {}).items()),
        )
        self._told(self.scheduler.complete_step(self.batch, outcome, now=now))
        self.scheduler.check_invariants()

    def run_one(self, now=0.0):
        """Start whoever may, and let them all finish; return who it was."""
        ids = self.start(now)
        self.end(*ids, now=now)
        return ids

    def _told(self, update):
        self.ended += [(one.request.id, one.reason.value) for one in update.finished]
        self.released += [(one.request.id, one.kept) for one in update.released]


def order(policy, **requests):
    """The order in which requests run one at a time; {id: fields}, all arriving at 0."""
    desk = Desk(policy, slots=1)
    for id, fields in requests.items():
        desk.submit(id, **fields)
    return "".join(desk.run_one()[0] for _ in requests)


# --- ordering -------------------------------------------------------------------------------------


def test_first_come_first_served_and_slots_are_sticky():
    desk = Desk(Policy(), slots=2)
    for id in "abc":
        desk.submit(id)
    assert desk.start() == ["a", "b"]
    assert desk.wake_at == math.inf
    desk.end("a")
    assert desk.start() == ["c", "b"]  # c in a's slot, b where it was
    assert desk.joined() == ["c"]


def test_lower_priority_numbers_go_first_and_ties_by_arrival():
    requests = {id: {"priority": p} for id, p in zip("abcd", (5, -1, 0, -1), strict=True)}
    assert order(Policy(ordering=PriorityFirst()), **requests) == "bdca"
    assert order(Policy(ordering=FCFS()), **requests) == "abcd"


def test_earliest_deadline_first_and_without_one_last():
    requests = {
        id: {"deadline_at": at} for id, at in zip("abcd", (math.inf, 9.0, 3.0, 9.0), strict=True)
    }
    assert order(Policy(ordering=EarliestDeadline()), **requests) == "cbda"


def test_shortest_budget_first():
    requests = {id: {"max_new_tokens": n} for id, n in zip("abcd", (8, 4, 16, 4), strict=True)}
    assert order(Policy(ordering=ShortestBudget()), **requests) == "bdac"


def test_then_breaks_ties():
    requests = {
        id: {"priority": p, "max_new_tokens": n}
        for id, p, n in zip("abcd", (1, 0, 0, 1), (4, 16, 8, 2), strict=True)
    }
    assert order(Policy(ordering=PriorityFirst().then(ShortestBudget())), **requests) == "cbda"
    assert order(Policy(ordering=ShortestBudget().then(PriorityFirst())), **requests) == "dacb"
    by_prompt = PriorityFirst().then(lambda rv: (-rv.request.max_new_tokens,))
    assert order(Policy(ordering=by_prompt), **requests) == "bcad"


def test_a_late_arrival_with_a_better_key_passes_those_who_wait():
    desk = Desk(Policy(ordering=PriorityFirst()), slots=1)
    for id in "ab":
        desk.submit(id)
    assert desk.start() == ["a"]
    desk.submit("c", priority=-1, now=1.0)
    desk.end("a", now=2.0)
    assert desk.start(2.0) == ["c"]


# --- admission ------------------------------------------------------------------------------------


def test_slots_below_the_capacity():
    desk = Desk(Policy(admission=Slots(2)))
    for id in "abc":
        desk.submit(id)
    assert desk.start() == ["a", "b"]
    desk.end("b")
    assert desk.start() == ["a", "c"]


def test_max_waiting_rejects_with_a_value():
    desk = Desk(Policy(admission=MaxWaiting(2)), slots=1)
    assert desk.submit("a") == Accepted("a")
    assert desk.submit("b") == Accepted("b")
    assert desk.submit("c") == Rejected("c", "queue_full")
    assert desk.start() == ["a"]  # one waits now: there is room again
    assert desk.submit("c") == Accepted("c")
    assert desk.submit("d") == Rejected("d", "queue_full")
    assert desk.scheduler.counts()[:3] == (3, 2, 2)  # submitted, rejected, waiting


def test_refusals_join_like_verdicts():
    """With &: refused if either would; with |: only if both would."""
    for combine, limit in ((operator.and_, 1), (operator.or_, 3)):
        desk = Desk(Policy(admission=combine(MaxWaiting(1), MaxWaiting(3))), slots=1)
        taken = sum(isinstance(desk.submit(str(n)), Accepted) for n in range(5))
        assert taken == limit


def test_a_token_budget_counts_prompts_until_they_are_cached():
    desk = Desk(Policy(admission=TokenBudget(32)))  # a row: prompt 4 + window 8 = 12, then 8
    for id in "abc":
        desk.submit(id)
    assert desk.start() == ["a", "b"]  # 24; 36 would be too many
    desk.end(phases={"a": Phase.REUSE})
    assert desk.start() == ["a", "b", "c"]  # 8 + 12 + 12 = 32


def test_the_whole_sequence_counts_when_a_row_refreshes():
    desk = Desk(Policy(admission=TokenBudget(26)))
    for id in "abc":
        desk.submit(id)
    assert desk.start() == ["a", "b"]
    desk.end(phases={"a": Phase.REUSE, "b": Phase.REFRESH})
    assert desk.start() == ["a", "b"]  # 8 + 12 + 12 = 32
    desk.end("b")
    assert desk.start() == ["a", "c"]  # 8 + 12


def test_a_request_beyond_the_token_budget_runs_alone():
    desk = Desk(Policy(admission=TokenBudget(24)))
    desk.submit("a")
    desk.submit("huge", prompt_len=40)  # 48
    desk.submit("b")
    assert desk.start() == ["a"]  # strictly in order: b does not pass
    desk.end("a")
    assert desk.start() == ["huge"]
    desk.end("huge")
    assert desk.start() == ["b"]


def test_batch_boundary_waits_for_the_last_row():
    desk = Desk(Policy(admission=AtBatchBoundary()), slots=2)
    for id in "abc":
        desk.submit(id)
    assert desk.start() == ["a", "b"]
    desk.end("a")
    assert desk.start() == ["b"]
    desk.end("b")
    assert desk.start() == ["c"]


def test_block_boundary_refills_when_somebody_crosses_or_leaves():
    desk = Desk(Policy(admission=AtBlockBoundary()))
    desk.submit("a")
    desk.submit("b")
    assert desk.start() == ["a", "b"]
    desk.submit("c")
    desk.end()
    assert desk.start() == ["a", "b"]  # in the middle of blocks
    desk.end(blocks={"a": (1, 8)})
    assert desk.start() == ["a", "b", "c"]
    desk.submit("d")
    desk.end()
    assert desk.start() == ["a", "b", "c"]  # the boundary is over
    desk.end("b")
    assert desk.start() == ["a", "d", "c"]


def verdicts(**by_id):
    """An admission axis that says what it is told of each request, by the first letter."""
    return lambda rv, _: by_id.get(rv.id[0], Verdict.ADMIT)


def test_skip_lets_others_pass_and_keeps_the_place():
    desk = Desk(Policy(admission=verdicts(x=Verdict.SKIP)))
    for id in ("x", "a", "b"):
        desk.submit(id)
    assert desk.start() == ["a", "b"]
    assert desk.scheduler.explain("x").why.startswith("it is the head")


@pytest.mark.parametrize(("ahead", "started"), [(7, ["a"]), (8, None), (20, None)])
def test_at_most_eight_are_set_aside_in_a_round(ahead, started):
    desk = Desk(Policy(admission=verdicts(x=Verdict.SKIP)), slots=32)
    for number in range(ahead):
        desk.submit(f"x{number}")
    desk.submit("a")
    assert desk.start() == started


def test_skip_lane_passes_over_the_class_if_lanes_are_declared():
    @attrs.frozen
    class ByLane(Admission):
        needs: frozenset[str] = frozenset()

        def admit(self, state, rv, round):
            return Verdict.SKIP_LANE if rv.request.request_class == "slow" else Verdict.ADMIT

    for needs, started in ((frozenset({"lanes"}), ["a", "b"]), (frozenset(), ["a"])):
        desk = Desk(Policy(admission=ByLane(needs)))
        desk.submit("a")
        for number in range(9):  # more than could be skipped one by one
            desk.submit(f"x{number}", request_class="slow")
        desk.submit("b")
        assert desk.start() == started


def test_stop_ends_the_round():
    desk = Desk(Policy(admission=verdicts(x=Verdict.STOP)))
    for id in ("a", "x", "b"):
        desk.submit(id)
    assert desk.start() == ["a"]
    assert desk.scheduler.explain("b").behind == "x"


def test_views_count_by_lane_and_the_longest_row():
    seen = []

    class Looks(Admission):
        needs = frozenset({"lanes", "max_length"})

        def admit(self, state, rv, round):
            view = round.view
            lanes = {lane[0]: n for lane, n in view.waiting_by_lane.items()}
            running = {lane[0]: n for lane, n in view.running_by_lane.items()}
            seen.append((rv.id, lanes, running, view.max_length))
            return Verdict.ADMIT

    desk = Desk(Policy(admission=Looks()), slots=2)
    desk.submit("a", request_class="chat", prompt_len=20)
    desk.submit("b", request_class="code")
    desk.submit("c", request_class="code")
    desk.start()
    desk.end("b")
    desk.start()
    assert seen == [
        ("a", {"chat": 1, "code": 2}, {}, 0),
        ("b", {"chat": 1, "code": 2}, {}, 0),  # frozen when the round began
        ("c", {"code": 1}, {"chat": 1}, 28),
    ]


# --- timeout --------------------------------------------------------------------------------------


def test_fill_or_wait_whichever_comes_first():
    policy = Policy(timeout=Fill(3) | MaxWait(0.5))
    desk = Desk(policy)
    desk.submit("a", now=1.0)
    assert desk.start(1.0) is None
    assert desk.wake_at == 1.5
    desk.submit("b", now=1.25)
    assert desk.start(1.25) is None
    assert desk.wake_at == 1.5  # the oldest counts
    assert desk.start(1.5) == ["a", "b"]

    desk = Desk(policy)
    for id, at in zip("abc", (1.0, 1.25, 1.375), strict=True):
        desk.submit(id, now=at)
    assert desk.start(1.375) == ["a", "b", "c"]  # full before the timer


def test_fill_and_wait_wants_both():
    policy = Policy(timeout=Fill(3) & MaxWait(0.5))
    desk = Desk(policy)
    for id in "abc":
        desk.submit(id)
    assert desk.start(0.0) is None
    assert desk.wake_at == 0.5  # full, but not long enough
    assert desk.start(0.5) == ["a", "b", "c"]

    desk = Desk(policy)
    desk.submit("a")
    assert desk.start(9.0) is None
    assert desk.wake_at == math.inf  # long enough, but never full without input


def test_fill_alone_starts_a_part_only_while_draining():
    desk = Desk(presets.fixed_fill(3))
    desk.submit("a")
    assert desk.start(100.0) is None
    assert desk.wake_at == math.inf
    desk.scheduler.drain(now=101.0)
    assert desk.start(101.0) == ["a"]


@pytest.mark.parametrize(
    "timeout",
    [
        MaxWait(9.0),
        Fill(3) & MaxWait(9.0),
        PoissonTimeout(rate=0.5, service_s=8.0, batch_size=8),
        PoissonTimeout(rate=2.0, service_s=8.0, batch_size=4),
    ],
    ids=repr,
)
def test_nobody_waits_for_others_while_draining(timeout):
    desk = Desk(Policy(timeout=timeout))
    desk.submit("a")
    assert desk.start(1.0) is None
    desk.scheduler.drain(now=1.0)
    assert desk.start(1.0) == ["a"]


def test_an_idle_scope_lets_arrivals_join_running_rows_at_once():
    desk = Desk(Policy(timeout=Fill(2)))
    for id in "ab":
        desk.submit(id)
    assert desk.start() == ["a", "b"]
    desk.submit("c")
    desk.end()
    assert desk.start() == ["a", "b", "c"]


def test_a_step_scope_holds_arrivals_back_while_rows_run():
    class StepFill(MaxWait):
        scope = "step"

    desk = Desk(Policy(timeout=StepFill(2.0)))
    desk.submit("a")
    assert desk.start(2.0) == ["a"]
    desk.submit("b", now=2.5)
    desk.end(now=3.0)
    assert desk.start(3.0) == ["a"]
    assert desk.wake_at == 4.5
    desk.end(now=4.5)
    assert desk.start(4.5) == ["a", "b"]


def test_a_batch_key_fills_by_itself():
    desk = Desk(Policy(timeout=Fill(2)))
    for id, key in zip("abc", ("x", "y", "x"), strict=True):
        desk.submit(id, batch_key=key)
    assert desk.start() == ["a", "c"]
    assert {row.request.batch_key for row in desk.batch.rows} == {"x"}


@pytest.mark.parametrize(("rule", "timer"), [("paper", 7.589), ("capped", 10.393)])
def test_poisson_timeout_wakes_at_the_published_instants(rule, timer):
    timeout = PoissonTimeout(rate=0.870, service_s=8.738217888618237, batch_size=8, rule=rule)
    desk = Desk(Policy(timeout=Fill(8) | timeout), slots=8)
    desk.submit("a", now=100.0)
    assert desk.start(100.0) is None
    assert round(desk.wake_at - 100.0, 3) == timer
    assert desk.start(desk.wake_at) == ["a"]
    assert round(timeout.timeout_s, 3) == timer


def test_a_poisson_timeout_without_a_stable_timer_waits_for_a_full_batch():
    timeout = PoissonTimeout(rate=2.0, service_s=8.0, batch_size=4)
    desk = Desk(Policy(timeout=Fill(4) | timeout))
    desk.submit("a")
    assert desk.start(50.0) is None
    assert desk.wake_at == math.inf


# --- composition ----------------------------------------------------------------------------------


@attrs.frozen
class Phases(Composition):
    phases: tuple[Phase, ...]

    def select(self, state, round):
        return self.phases


class EvenSlots(Composition):
    needs = frozenset({"rows"})

    def select(self, state, round):
        return [rv for rv in round.rows if rv.slot % 2 == 0]


@pytest.mark.parametrize(
    ("composition", "started"),
    [
        (AllRows(), "abcd"),
        (Phases((Phase.PREFILL,)), "cd"),
        (Phases((Phase.REUSE,)), "ab"),
        (EvenSlots(), "ac"),
        (EvenSlots() & Phases((Phase.PREFILL,)), "c"),
        (Phases((Phase.PREFILL,)) & EvenSlots(), "c"),
        (EvenSlots() | Phases((Phase.PREFILL,)), "acd"),
        (EvenSlots() & AllRows(), "ac"),
        (EvenSlots() | AllRows(), "abcd"),
        (Phases((Phase.PREFILL,)) | Phases((Phase.REUSE,)), "abcd"),
        (Phases((Phase.PREFILL, Phase.REUSE)) & Phases((Phase.REUSE, Phase.REFRESH)), "ab"),
    ],
    ids=repr,
)
def test_who_steps(composition, started):
    desk = Desk(Policy())
    for id in "abcd":
        desk.submit(id)
    desk.start()
    desk.end(phases={"a": Phase.REUSE, "b": Phase.REUSE})
    desk.scheduler.set_policy(Policy(composition=composition), now=0.0)
    assert "".join(desk.start()) == started
    desk.end()
    steps = {id: desk.scheduler.view(id).num_steps for id in "abcd"}
    assert steps == {id: 2 if id in started else 1 for id in "abcd"}


# --- eviction -------------------------------------------------------------------------------------


def test_past_deadline_ends_a_running_row_on_time():
    desk = Desk(Policy(eviction=PastDeadline()))
    desk.submit("a", deadline_at=2.0)
    desk.submit("b")
    assert desk.start(0.0) == ["a", "b"]
    assert desk.wake_at == 2.0
    desk.end(now=1.0)
    assert desk.start(1.0) == ["a", "b"]
    desk.end(now=2.0)
    assert desk.start(2.0) == ["b"]
    assert desk.ended == [("a", "deadline")]
    assert desk.released == [("a", False)]


def test_without_it_a_row_that_runs_may_finish_late():
    desk = Desk(Policy())
    desk.submit("a", deadline_at=2.0)
    assert desk.start(0.0) == ["a"]
    assert desk.wake_at == math.inf
    desk.end(now=3.0)
    assert desk.start(3.0) == ["a"]
    desk.end("a", now=4.0)
    assert desk.ended == [("a", "eos")]


def test_waiting_requests_expire_under_any_policy():
    desk = Desk(Policy(), slots=1)
    desk.submit("a")
    desk.submit("b", deadline_at=2.0)
    desk.submit("c", queue_timeout_s=1.5)
    desk.start(0.0)
    assert desk.wake_at == 1.5
    desk.end(now=1.0)
    desk.start(1.0)
    desk.end(now=2.0)
    assert desk.start(2.0) == ["a"]
    assert desk.ended == [("c", "queue_timeout"), ("b", "deadline")]


def test_a_step_cap_ends_a_row_after_exactly_that_many_steps():
    desk = Desk(Policy(eviction=StepCap(3)), slots=2)
    desk.submit("a")
    assert desk.start() == ["a"]
    assert desk.scheduler.horizon().steps == 3
    desk.end()
    desk.submit("b")
    assert desk.start() == ["a", "b"]
    assert desk.scheduler.horizon().steps == 2
    desk.end()
    desk.start()
    assert desk.ended == []
    desk.end()
    assert desk.ended == [("a", "max_steps")]
    assert desk.start() == ["b"]
    desk.end()
    assert desk.ended == [("a", "max_steps"), ("b", "max_steps")]


def test_joined_limits_are_the_tighter_or_the_looser():
    for eviction, steps in ((StepCap(2) | StepCap(4), 2), (StepCap(2) & StepCap(4), 4)):
        desk = Desk(Policy(eviction=eviction))
        desk.submit("a")
        desk.start()
        assert desk.scheduler.horizon().steps == steps
    desk = Desk(Policy(eviction=PastDeadline() | StepCap(2)))
    desk.submit("a", deadline_at=7.0)
    desk.start()
    assert desk.scheduler.horizon() == (2, 7.0)


def tight(eviction):
    """Six pages of four tokens; three rows that hold two each (prompt 4, window 4)."""
    desk = Desk(
        Policy(eviction=eviction), num_pages=6, memory=GrowingKV(page_size=4), window_blocks=1
    )
    for id in "abc":
        desk.submit(id, max_new_tokens=16)
    assert desk.start() == ["a", "b", "c"]
    assert desk.scheduler.stats().free_pages == 0
    return desk


@pytest.mark.parametrize(
    ("eviction", "kept"),
    [(YoungestFirst(), False), (YoungestFirst(keep=True), True), (Eviction(), False)],
    ids=repr,
)
def test_the_youngest_goes_back_when_memory_runs_out(eviction, kept):
    desk = tight(eviction)
    desk.submit("d")
    desk.end(blocks={"a": (1, 8)})  # a must hold 3 pages before its next step
    assert desk.start() == ["a", "b"]
    assert desk.released == [("c", kept)]
    assert desk.scheduler.stats().free_pages == 1  # of c's two, one went to a
    desk.end("b")
    assert desk.start() == ["a", "c"]  # b's two and that one: c again, before d
    assert [(row.request.id, row.resumed) for row in desk.batch.joined] == [("c", kept)]
    assert desk.scheduler.view("c").num_steps == (1 if kept else 0)
    assert desk.scheduler.stats().free_pages == 1


LEAST = pytest.mark.parametrize("eviction", [Eviction(), YoungestFirst()], ids=repr)


@LEAST
def test_no_more_rows_go_back_than_must(eviction):
    desk = tight(eviction)
    desk.end(blocks={"a": (1, 8), "b": (1, 8), "c": (1, 8)})  # 9 pages wanted of 6
    assert desk.start() == ["a", "b"]  # c's two pages are one for each of them
    assert desk.scheduler.stats().free_pages == 0


@LEAST
def test_the_oldest_row_always_advances(eviction):
    desk = tight(eviction)
    for blocks in (1, 2, 3):
        cached = 4 + 4 * blocks
        desk.end(blocks={row.request.id: (blocks, cached) for row in desk.batch.rows})
        assert desk.start()[0] == "a"
        assert desk.scheduler.view("a").num_pages == min(blocks + 2, 5)
    desk.end("a")
    assert desk.ended == [("a", "eos")]
    assert desk.start()  # the others begin again


class Rows(Eviction):
    """At every step, rows of some ids, with what becomes of them."""

    needs = frozenset({"every_step", "rows"})

    def __init__(self, **by_id):
        self.by_id = by_id

    def victims(self, state, need_pages, round):
        return [
            (rv, self.by_id[rv.id]) for rv in round.rows if rv.id in self.by_id and rv.num_steps
        ]


def test_victims_join_as_sets_and_the_first_word_counts():
    left = Rows(a=RESTART, b=KEEP)
    right = Rows(b=FinishReason.MAX_STEPS, c=FinishReason.MAX_STEPS)
    for eviction, released, ended in (
        (left | right, {("a", False), ("b", True), ("c", False)}, [("c", "max_steps")]),
        (left & right, {("b", True)}, []),
    ):
        desk = Desk(Policy(eviction=eviction))
        for id in "abcd":
            desk.submit(id)
        desk.start()
        desk.end()
        desk.start()
        assert set(desk.released) == released
        assert desk.ended == ended


# --- control --------------------------------------------------------------------------------------


@attrs.frozen
class Sets(Control):
    values: dict
    seconds: float = math.inf

    def knobs(self, state, rv, view):
        return (self.values, view.now + self.seconds)

    def batch_knobs(self, state, view):
        return ({f"batch_{k}": v for k, v in self.values.items()}, math.inf)

    def hints(self, state, round):
        return tuple(self.values)


def test_of_two_controls_the_later_one_wins_and_the_shorter_time_counts():
    control = Sets({"threshold": 0.9, "width": 4}, 2.0).then(Sets({"threshold": 0.8}, 5.0))
    desk = Desk(Policy(control=control))
    desk.submit("a", now=1.0)
    desk.start(1.0)
    assert dict(desk.batch.rows[0].knobs) == {"threshold": 0.8, "width": 4}
    assert dict(desk.batch.knobs) == {"batch_threshold": 0.8, "batch_width": 4}
    assert desk.batch.hints == ("threshold", "width", "threshold")
    assert desk.wake_at == 3.0


# --- the laws of & and | --------------------------------------------------------------------------


@attrs.frozen
class Says(Admission):
    verdict: Verdict

    def admit(self, state, rv, round):
        return self.verdict


@attrs.frozen
class Due(Timeout):
    at: float

    def due(self, state, view):
        return self.at


@attrs.frozen
class Ends(Eviction):
    at: float
    steps: float

    def limits(self, rv):
        return (self.at, self.steps)


def verdict_of(strategy):
    return strategy.admit(strategy.init(), None, None)


def due_of(strategy):
    return strategy.due(strategy.init(), None)


def limits_of(strategy):
    return strategy.limits(None)


def phases_of(strategy):
    selection = strategy.select(strategy.init(), None)
    return frozenset(Phase) if selection is ALL else frozenset(selection)


instants = st.floats(allow_nan=False)
said = st.sampled_from(Verdict).map(Says)
due = instants.map(Due)
ends = st.builds(Ends, instants, st.integers(1, 9) | st.just(math.inf))
steps_of = st.lists(st.sampled_from(Phase), unique=True).map(tuple).map(Phases) | st.just(AllRows())
MEET, JOIN = operator.and_, operator.or_


@pytest.mark.parametrize(
    ("values", "answer"),
    [(said, verdict_of), (due, due_of), (ends, limits_of), (steps_of, phases_of)],
    ids=["admission", "timeout", "eviction", "composition"],
)
@pytest.mark.parametrize("op", [MEET, JOIN], ids=["&", "|"])
def test_lattice_laws(values, answer, op):
    other = JOIN if op is MEET else MEET

    @given(values, values, values)
    def hold(x, y, z):
        assert answer(op(x, x)) == answer(x)  # idempotent
        assert answer(op(x, y)) == answer(op(y, x))  # commutative
        assert answer(op(op(x, y), z)) == answer(op(x, op(y, z)))  # associative
        assert answer(op(x, other(x, y))) == answer(x)  # absorption
        assert answer(op(x, other(y, z))) == answer(other(op(x, y), op(x, z)))  # distributive

    hold()


@given(st.sampled_from(Verdict), st.sampled_from(Verdict))
def test_and_is_the_stricter_verdict_or_the_milder(x, y):
    strict = [Verdict.STOP, Verdict.SKIP_LANE, Verdict.SKIP, Verdict.ADMIT]
    first, last = sorted((x, y), key=strict.index)
    assert verdict_of(Says(x) & Says(y)) is first
    assert verdict_of(Says(x) | Says(y)) is last


@given(instants, instants)
def test_or_is_the_earlier_instant_and_the_later(x, y):
    assert due_of(Due(x) | Due(y)) == min(x, y)
    assert due_of(Due(x) & Due(y)) == max(x, y)


def test_operands_are_both_asked_and_each_sees_the_round_as_it_was():
    class Counts(Admission):
        def __init__(self, verdict):
            self.verdict = verdict

        def init(self):
            return (0, 0)  # rounds, joins

        def admit(self, state, rv, round):
            return self.verdict

        def settle(self, state, round):
            return (state[0] + 1, state[1] + round.num_joined)

    states = []

    class Watches(Counts):
        def settle(self, state, round):
            states.append(super().settle(state, round))
            return states[-1]

    desk = Desk(Policy(admission=Watches(Verdict.STOP) | Watches(Verdict.ADMIT)))
    desk.submit("a")
    desk.submit("b")
    desk.start()
    assert states == [(1, 2), (1, 2)]  # the first, too, though it would have let nobody in


def test_needs_and_scope_of_operands_are_united():
    class StepWait(MaxWait):
        scope = "step"

    both = AtBlockBoundary() & Slots(2)
    assert both.needs == frozenset({"blocks"})
    assert (Fill(2) | StepWait(1.0)).scope == "step"
    assert (Fill(2) | MaxWait(1.0)).scope == "idle"
    with pytest.raises(ConfigError, match=r"Slots\(9\)"):
        Scheduler(
            policy=Policy(admission=Slots(2) | (Slots(9) & Slots(3))),
            capacity=Capacity(max_num_seqs=4),
        )


def test_operands_read_like_what_was_written():
    assert (
        repr(Slots(2) & Slots(3) & AtBatchBoundary()) == "(Slots(count=2) & Slots(count=3) & "
        "AtBatchBoundary())"
    )
    assert repr(Fill(2) | MaxWait(1.0)) == "(Fill(count=2) | MaxWait(seconds=1.0))"
    assert repr(FCFS().then(PriorityFirst())) == "FCFS().then(PriorityFirst(yield_s=inf))"
    assert Slots(2) & Slots(3) == Slots(2) & Slots(3)
    assert Slots(2) & Slots(3) != Slots(2) | Slots(3)


# --- plain callables, presets, names --------------------------------------------------------------


def test_every_axis_takes_a_plain_callable():
    policy = Policy(
        ordering=lambda rv: (-rv.request.prompt_len,),
        admission=lambda rv, here: (
            Verdict.ADMIT if here.view.num_running + here.num_joined < 2 else Verdict.STOP
        ),
        timeout=lambda view: view.oldest_arrival_at + 1.0,
        composition=lambda here: [Phase.PREFILL],
        eviction=lambda rv: (math.inf, 1),
        control=lambda rv, view: ({"width": rv.request.prompt_len}, math.inf),
    )
    desk = Desk(policy)
    for id, prompt_len in zip("abc", (2, 9, 5), strict=True):
        desk.submit(id, prompt_len=prompt_len)
    assert desk.start(0.0) is None
    assert desk.wake_at == 1.0
    assert desk.start(1.0) == ["b", "c"]
    assert [row.knobs["width"] for row in desk.batch.rows] == [9, 5]
    desk.end(now=2.0)
    assert desk.ended == [("b", "max_steps"), ("c", "max_steps")]
    assert desk.start(2.0) == ["a"]


def test_plain_callables_are_operands_too():
    desk = Desk(
        Policy(
            admission=Slots(3) & (lambda rv, _: Verdict.SKIP if rv.id == "a" else (Verdict.ADMIT))
        )
    )
    for id in "abcde":
        desk.submit(id)
    assert desk.start() == ["b", "c", "d"]


def test_per_request():
    desk = Desk(presets.per_request())
    for id in "ab":
        desk.submit(id)
    assert desk.run_one() == ["a"]
    assert desk.run_one() == ["b"]


def test_fixed_fill():
    desk = Desk(presets.fixed_fill(2, 0.5))
    for id in "abc":
        desk.submit(id)
    assert desk.start(0.0) == ["a", "b"]
    desk.end("a", now=1.0)
    assert desk.start(1.0) == ["b"]  # to its end
    desk.submit("d", now=1.25)
    desk.end("b", now=2.0)
    assert sorted(desk.start(2.0)) == ["c", "d"]
    desk.end("c", "d", now=3.0)
    desk.submit("e", now=3.5)
    assert desk.start(3.5) is None
    assert desk.wake_at == 4.0
    assert desk.start(4.0) == ["e"]


def test_continuous():
    desk = Desk(presets.continuous(2))
    for id in "abc":
        desk.submit(id)
    assert desk.start() == ["a", "b"]
    desk.end("b")
    assert desk.start() == ["a", "c"]


def test_block_refill():
    desk = Desk(presets.block_refill(3))
    for id in "ab":
        desk.submit(id)
    assert desk.start() == ["a", "b"]
    for id in "cd":
        desk.submit(id)
    desk.end()
    assert desk.start() == ["a", "b"]
    desk.end(blocks={"b": (1, 8)})
    assert desk.start() == ["a", "b", "c"]  # and no fourth


@pytest.mark.parametrize("preset", ["per_request", "fixed_fill", "continuous", "block_refill"])
def test_presets_end_rows_past_their_deadline(preset):
    arguments = {} if preset == "per_request" else {"batch_size": 1}
    policy = presets.by_name(preset, **arguments)
    assert policy.name == preset
    desk = Desk(policy)
    desk.submit("a", deadline_at=1.0)
    assert desk.start(0.0) == ["a"]
    desk.end(now=1.0)
    assert desk.start(1.0) is None
    assert desk.ended == [("a", "deadline")]


def test_unknown_names_and_arguments():
    with pytest.raises(ConfigError, match=r"'nope'.*block_refill.*fixed_fill.*per_req"):
        presets.by_name("nope")
    with pytest.raises(ConfigError, match=r"continuous.*batch_size"):
        presets.by_name("continuous")
    with pytest.raises(ConfigError, match=r"per_request.*batch"):
        presets.by_name("per_request", batch=3)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", None, True, math.nan])
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Slots, "Slots: count"),
        (MaxWaiting, "MaxWaiting: count"),
        (TokenBudget, "TokenBudget: tokens"),
        (Fill, "Fill: count"),
        (StepCap, "StepCap: steps"),
        (lambda n: PoissonTimeout(rate=1.0, service_s=2.0, batch_size=n), "batch_size"),
        (presets.continuous, "count"),
        (presets.block_refill, "count"),
        (presets.fixed_fill, "count"),
    ],
)
def test_counts_out_of_range_name_the_field(make, named, bad):
    with pytest.raises(ConfigError, match=named):
        make(bad)


@pytest.mark.parametrize("bad", [-0.1, math.nan, "1", None, True])
def test_waits_out_of_range_name_the_field(bad):
    with pytest.raises(ConfigError, match="seconds"):
        MaxWait(bad)
    with pytest.raises(ConfigError, match="seconds"):
        presets.fixed_fill(2, bad)


@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan, "1", None, True])
def test_poisson_parameters_out_of_range_name_the_field(bad):
    for rule in ("paper", "capped"):
        with pytest.raises(ConfigError, match="rate"):
            PoissonTimeout(rate=bad, service_s=1.0, batch_size=8, rule=rule)
        with pytest.raises(ConfigError, match="service_s"):
            PoissonTimeout(rate=1.0, service_s=bad, batch_size=8, rule=rule)
    with pytest.raises(ConfigError, match="rule"):
        PoissonTimeout(rate=1.0, service_s=1.0, batch_size=8, rule=bad)


def test_more_than_the_capacity_holds_is_refused_when_the_scheduler_is_built():
    for policy, named in (
        (Policy(admission=Slots(5)), r"Slots\(5\)"),
        (Policy(timeout=Fill(5)), r"Fill\(5\)"),
        (presets.continuous(5), r"Slots\(5\)"),
    ):
        with pytest.raises(ConfigError, match=named):
            Scheduler(policy=policy, capacity=Capacity(max_num_seqs=4))


def test_a_capacity_lowered_later_is_filled_as_far_as_it_goes():
    desk = Desk(presets.fixed_fill(4))
    desk.scheduler.set_capacity(Capacity(max_num_seqs=2), now=0.0)
    desk.submit("a")
    assert desk.start() is None
    desk.submit("b")
    desk.submit("c")
    assert desk.start() == ["a", "b"]


@pytest.mark.parametrize(
    ("axis", "value"),
    [
        ("ordering", FCFS),
        ("ordering", MaxWait(1.0)),
        ("admission", 3),
        ("timeout", Slots(1)),
        ("composition", None),
        ("eviction", "past_deadline"),
        ("control", Control),
    ],
)
def test_an_axis_refuses_what_is_none_of_its_strategies(axis, value):
    with pytest.raises(ConfigError, match=axis):
        Policy(**{axis: value})


def test_unknown_needs_and_scopes_are_refused():
    class Psychic(Admission):
        needs = frozenset({"oracle"})

    class Sometimes(Timeout):
        scope = "sometimes"

    with pytest.raises(ConfigError, match="oracle"):
        Policy(admission=Psychic())
    with pytest.raises(ConfigError, match="sometimes"):
        Policy(timeout=Sometimes())


def test_operands_of_another_axis_are_refused():
    for call in (lambda: Slots(1) & MaxWait(1.0), lambda: Fill(2) | Slots(1)):
        with pytest.raises(ConfigError, match="axis"):
            call()


# --- what a policy does wrong loses nothing -------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "value", "named"),
    [
        ("admission", lambda rv, _: True, "admit"),
        ("admission", lambda rv, _: 1 / 0, "admission.admit.*ZeroDivisionError.*'a'"),
        ("timeout", lambda view: math.nan, "due"),
        ("eviction", lambda rv: (math.nan, 1), "limits"),
        ("eviction", lambda rv: (1.0, 0), "limits"),
        ("control", lambda rv, view: ([], math.inf), "knobs"),
        ("control", lambda rv, view: ({}, view.now), "valid_until"),
    ],
)
def test_nonsense_is_a_policy_error_and_another_policy_goes_on(axis, value, named):
    desk = Desk(Policy(**{axis: value}, name="mine"))
    desk.submit("a")
    with pytest.raises(PolicyError, match=f"'mine'.*{named}"):
        desk.start(1.0)
    desk.scheduler.check_invariants()
    assert desk.scheduler.counts().waiting == 1
    desk.scheduler.set_policy(Policy(), now=0.5)  # the failed call has not moved the time
    assert desk.start(1.0) == ["a"]


@pytest.mark.parametrize("key", [None, 1, (math.nan,), ("a",), [1]])
def test_a_request_whose_key_is_nonsense_is_not_taken(key):
    desk = Desk(Policy(ordering=lambda rv: key if rv.id == "a" else (1,)))
    with pytest.raises(PolicyError, match="key"):
        desk.submit("a")
    assert not desk.scheduler.has_work()
    desk.submit("b")
    assert desk.start() == ["b"]


def test_keys_of_another_length_are_refused():
    desk = Desk(Policy(ordering=lambda rv: (1,) if rv.id == "a" else (1, 2)))
    desk.submit("a")
    with pytest.raises(PolicyError, match="one length"):
        desk.submit("b")
    assert desk.run_one() == ["a"]


def test_an_ordering_state_follows_what_it_observes():
    from dllm_sched.events import RequestSubmitted

    class FewestSoFar(Ordering):
        observes = (RequestSubmitted,)

        def init(self):
            return {}

        def observe(self, state, event):
            tenant = event.request.tenant
            return {**state, tenant: state.get(tenant, 0) + 1}

        def key(self, state, rv):
            return (state.get(rv.request.tenant, 0),)

    desk = Desk(Policy(ordering=FewestSoFar()), slots=1)
    for id, tenant in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "y")):
        desk.submit(id, tenant=tenant)
    assert [desk.run_one()[0] for _ in range(4)] == ["a", "d", "b", "c"]


def test_policies_and_strategies_are_values():
    assert presets.continuous(4) == presets.continuous(4)
    assert presets.continuous(4) != presets.continuous(5)
    assert len({presets.fixed_fill(4, 1.0), presets.fixed_fill(4, 1.0)}) == 1

    class Own(Admission):
        def __init__(self, limit):
            self.limit = limit

    assert Own(2) == Own(2)
    assert Own(2) != Own(3)
    assert Own(2) != Admission()


@pytest.mark.parametrize(
    ("preset", "arguments"),
    [
        ("request_router", {"modes": 0}),
        ("wait", {"types": 0}),
        ("nested_wait", {"types": math.nan}),
        ("optimus", {"widths": 0, "committed": (1.0,), "latency_s": {1: (1.0,)}}),
        ("optimus", {"widths": (1,), "committed": None, "latency_s": {1: (1.0,)}}),
        ("optimus", {"widths": (1,), "committed": (1.0,), "latency_s": {1: 1.0}}),
    ],
)
def test_what_must_be_a_sequence_and_is_none_is_named(preset, arguments):
    with pytest.raises(ConfigError, match=r"modes|types|widths|committed|latency_s"):
        presets.PRESETS[preset](4, **arguments)
