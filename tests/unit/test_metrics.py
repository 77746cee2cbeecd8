"""Every metric on a value worked out by hand, and nothing unbounded among the labels."""

import math
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dllm_sched import (
    BlockBoundary,
    Capacity,
    ConfigError,
    FinishReason,
    FixedCanvas,
    Policy,
    Request,
    RowFailed,
    RowFate,
    RowFinished,
    Scheduler,
    StepOutcome,
    presets,
)
from dllm_sched.metrics import Metrics
from dllm_sched.policies import Admission, MaxWaiting, Slots, StepCap
from dllm_sched.runtime import Driver, RunReport, VirtualClock
from dllm_sched.testing import FakeEngine


def request(name, **fields):
    return Request(name, prompt_len=8, max_new_tokens=16, block_length=8, **fields)


class Bench:
    """A scheduler with metrics, and what a scrape of them shows."""

    def __init__(self, slots=2, policy=None, max_words=32, **options):
        self.metrics = Metrics(max_words=max_words)
        self.registry = CollectorRegistry()
        options.setdefault("capacity", Capacity(max_num_seqs=slots))
        self.scheduler = Scheduler(policy=policy, observers=[self.metrics], **options)
        self.metrics.expose(self.scheduler, registry=self.registry)

    def submit(self, *names, now=0.0):
        return [self.scheduler.submit(request(name), now=now) for name in names]

    def step(self, began, ended, *, steps=1, **outcome):
        batch = self.scheduler.next_step(now=began).batch
        self.scheduler.complete_step(batch, StepOutcome(**outcome), now=ended, steps=steps)
        return batch

    def text(self):
        return generate_latest(self.registry).decode()

    def value(self, name, **labels):
        return self.registry.get_sample_value(f"dllm_sched_{name}", labels)

    def histogram(self, name):
        """Its sum, its count, and what each bucket holds that is not empty."""
        (family,) = (one for one in self.registry.collect() if one.name == f"dllm_sched_{name}")
        below, held = 0.0, {}
        for sample in family.samples:
            if "le" in sample.labels:
                if sample.value > below:
                    held[sample.labels["le"]] = sample.value - below
                below = sample.value
        return self.value(f"{name}_sum"), self.value(f"{name}_count"), held


EOS, LENGTH = FinishReason.EOS, FinishReason.LENGTH


def test_before_the_first_step_everything_is_there_and_zero():
    bench = Bench(policy=presets.continuous(2))
    for line in bench.text().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            here = {"dllm_sched_slots": 2.0, 'dllm_sched_policy_info{policy="continuous"}': 1.0}
            assert float(value) == here.get(name, 0.0), line
    for reason in FinishReason:
        assert bench.value("requests_finished_total", reason=reason.value) == 0
    assert bench.histogram("wait_seconds") == (0, 0, {})


def test_requests_and_steps_are_counted_and_timed():
    bench = Bench()
    bench.submit("a", "b", "c")
    assert bench.value("requests_waiting") == 3
    bench.step(1.0, 1.5)
    bench.step(1.5, 2.5, boundaries=(BlockBoundary(0, 1, 16),))
    assert (bench.value("requests_waiting"), bench.value("requests_running")) == (1, 2)
    batch = bench.scheduler.next_step(now=2.5).batch
    bench.scheduler.cancel("b", now=2.75)  # in mid-flight: this row-step is for nobody
    ends = StepOutcome(finished=(RowFinished(0, EOS),))
    bench.scheduler.complete_step(batch, ends, now=3.0)
    bench.step(3.0, 3.25)
    bench.step(3.25, 5.25, finished=(RowFinished(1, LENGTH),))  # c, the only row

    assert bench.value("requests_submitted_total") == 3
    assert bench.value("requests_finished_total", reason="eos") == 1
    assert bench.value("requests_finished_total", reason="length") == 1
    assert bench.value("requests_finished_total", reason="cancelled") == 1
    assert (bench.value("requests_waiting"), bench.value("requests_running")) == (0, 0)
    # a and b from 0 to 1, c from 0 to 3
    assert bench.histogram("wait_seconds") == (5.0, 3, {"1.0": 2, "5.0": 1})
    # a from 0 to 3, c from 0 to 5.25; b did not get to its end
    assert bench.histogram("request_seconds") == (8.25, 2, {"5.0": 1, "10.0": 1})
    assert bench.histogram("request_steps") == (5, 2, {"2.0": 1, "4.0": 1})
    # a: two steps, and one more to its end; c: two
    assert bench.histogram("block_steps") == (5, 3, {"1.0": 1, "2.0": 2})
    assert bench.value("blocks_total") == 1
    assert bench.histogram("step_seconds") == (
        0.5 + 1.0 + 0.5 + 0.25 + 2.0,
        5,
        {"0.5": 3, "1.0": 1, "2.0": 1},
    )
    assert bench.histogram("step_rows") == (2 + 2 + 2 + 1 + 1, 5, {"1.0": 2, "2.0": 3})
    assert bench.value("wasted_row_steps_total") == 1


def test_steps_taken_at_once_count_each_and_share_their_time():
    bench = Bench()
    bench.submit("a")
    bench.step(0.0, 1.0)
    bench.step(1.0, 9.0, steps=4)
    assert bench.histogram("step_seconds") == (9.0, 5, {"1.0": 1, "2.0": 4})
    assert bench.histogram("step_rows") == (5, 5, {"1.0": 5})


def test_blocks_crossed_together_share_their_steps():
    bench = Bench()
    bench.submit("a")
    for number in range(6):
        bench.step(number, number + 1)
    bench.step(6.0, 7.0, boundaries=(BlockBoundary(0, 2, 24),), finished=(RowFinished(0, LENGTH),))
    assert bench.histogram("block_steps") == (7.0, 2, {"4.0": 2})
    assert bench.value("blocks_total") == 2


def test_each_block_counts_its_own_steps_and_a_boundary_told_again_is_none():
    bench = Bench()
    bench.submit("a")
    first, second = BlockBoundary(0, 1, 16), BlockBoundary(0, 2, 24)
    for number, outcome in enumerate([(), (), (first,), (first,), (second,)]):
        bench.step(number, number + 1, boundaries=outcome)
    assert bench.histogram("block_steps") == (5.0, 2, {"2.0": 1, "4.0": 1})
    assert bench.value("blocks_total") == 2
    assert bench.scheduler.stats().num_blocks == 2


def test_a_request_that_its_step_cap_ends_counts_and_one_that_fails_does_not():
    bench = Bench(policy=Policy(eviction=StepCap(3)))
    bench.submit("a", "b")
    bench.step(0.0, 1.0, failed=(RowFailed(1, ValueError("bad row")),))
    for number in (1.0, 2.0):
        bench.step(number, number + 1)
    assert bench.value("requests_finished_total", reason="max_steps") == 1
    assert bench.value("requests_finished_total", reason="error") == 1
    assert bench.histogram("request_steps") == (3, 1, {"4.0": 1})


def test_a_step_planned_while_one_runs_begins_when_that_one_has_ended():
    bench = Bench(max_in_flight=2)
    bench.submit("a")
    first = bench.scheduler.next_step(now=0.0).batch
    second = bench.scheduler.next_step(now=0.25).batch
    bench.scheduler.complete_step(first, StepOutcome(), now=1.0)
    bench.scheduler.complete_step(second, StepOutcome(finished=(RowFinished(0, EOS),)), now=1.5)
    assert bench.histogram("step_seconds") == (1.5, 2, {"0.5": 1, "1.0": 1})


def test_slots_that_stand_empty_while_somebody_waits_are_wasted():
    bench = Bench(slots=4, policy=Policy(admission=Slots(1)))
    bench.submit("a", "b")
    bench.step(0.0, 1.0)
    bench.step(1.0, 2.0, finished=(RowFinished(0, EOS),))
    bench.step(2.0, 3.0)  # b alone: nobody waits
    assert bench.value("wasted_row_steps_total") == 2 * 3
    assert bench.scheduler.stats().wasted_row_steps == 2 * 3


def test_refusals_by_reason():
    bench = Bench(policy=Policy(admission=MaxWaiting(1)))
    bench.submit("a", "b", "c")
    bench.scheduler.drain(now=1.0)
    bench.submit("d", now=1.0)
    assert bench.value("requests_rejected_total", reason="queue_full") == 2
    assert bench.value("requests_rejected_total", reason="draining") == 1
    assert bench.value("requests_rejected_total", reason="too_large") == 0
    assert bench.value("draining") == 1


def test_a_failed_step_restarts_its_rows_and_nobody_waits_for_the_first_time_again():
    bench = Bench()
    bench.submit("a", "b")
    bench.step(1.0, 2.0, boundaries=(BlockBoundary(0, 1, 16),))
    batch = bench.scheduler.next_step(now=2.0).batch
    bench.scheduler.fail_step(
        batch, RuntimeError("device lost"), rows={0: RowFate.RESTART, 1: RowFate.FAIL}, now=3.0
    )
    assert bench.value("failed_steps_total") == 1
    assert bench.value("requests_preempted_total", progress="lost") == 1
    assert bench.value("requests_preempted_total", progress="kept") == 0
    assert bench.value("requests_finished_total", reason="error") == 1
    slot = bench.step(3.0, 4.0).rows[0].slot
    bench.step(4.0, 5.0, finished=(RowFinished(slot, EOS),))
    assert bench.histogram("wait_seconds") == (2.0, 2, {"1.0": 2})
    # The block of its first life took one step; its second life, of two, began from nothing.
    assert bench.histogram("block_steps") == (1 + 2, 2, {"1.0": 1, "2.0": 1})
    assert bench.histogram("request_steps")[0] == 2


def test_pages_used_and_free():
    capacity = Capacity(max_num_seqs=2, num_pages=10, memory=FixedCanvas(page_size=8))
    bench = Bench(capacity=capacity)
    assert bench.value("kv_pages", state="free") == 10
    bench.submit("a")
    bench.step(0.0, 1.0)
    assert bench.value("kv_pages", state="used") == 3, "8 tokens of prompt and 16 to come"
    assert bench.value("kv_pages", state="free") == 7
    assert bench.value("tokens_in_rows") == bench.scheduler.tokens_in_rows > 0
    assert "dllm_sched_kv_pages{" not in Bench().text(), "without a memory model"


def test_the_policy_in_force_and_the_pause():
    bench = Bench(policy=presets.continuous(2))
    bench.scheduler.set_policy(presets.per_request(), now=0.0)
    bench.scheduler.pause(now=0.0)
    assert bench.value("policy_info", policy="per_request") == 1
    assert bench.value("policy_info", policy="continuous") is None
    assert (bench.value("policy_swaps_total"), bench.value("paused")) == (1, 1)
    bench.scheduler.resume(now=0.0)
    assert bench.value("paused") == 0


class Refusing(Admission):
    """Has another word for every request."""

    def accept(self, state, rv, view):
        return f"because of {rv.id}"


def test_words_of_policies_are_labels_up_to_a_number():
    bench = Bench(policy=Policy(admission=Refusing(), name="\ud800"), max_words=2)
    for number in range(5):
        bench.submit(f"r{number}")
        bench.scheduler.set_policy(Policy(admission=Refusing(), name=f"p{number}"), now=0.0)
    rejected = {
        sample.labels["reason"]: sample.value
        for family in bench.registry.collect()
        for sample in family.samples
        if sample.name == "dllm_sched_requests_rejected_total" and sample.value
    }
    assert rejected == {"because of r0": 1, "because of r1": 1, "other": 3}
    assert bench.value("policy_info", policy="other") == 1
    bench.scheduler.set_policy(Policy(name="p0"), now=0.0)
    assert bench.value("policy_info", policy="p0") == 1, "one of the first two"
    bench.scheduler.set_policy(Policy(name="\ud800"), now=0.0)
    assert bench.value("policy_info", policy="?") == 1, "what has no UTF-8 can be written"
    assert bench.text()


def test_no_request_and_no_tenant_is_ever_a_label():
    bench = Bench()
    who = {"tenant": "tnt7", "request_class": "cls7", "batch_key": "key7", "group": "grp7"}
    bench.scheduler.submit(request("req7", **who), now=0.0)
    batch = bench.step(0.0, 1.0)
    ends = (RowFinished(batch.rows[0].slot, EOS),)
    bench.step(1.0, 2.0, boundaries=(BlockBoundary(batch.rows[0].slot, 1, 16),), finished=ends)
    text = bench.text()
    assert [word for word in ("req7", *who.values()) if word in text] == []


def test_nothing_is_kept_of_who_has_gone():
    bench = Bench(max_in_flight=2)
    scheduler, engine = bench.scheduler, FakeEngine(2, poison={"r3": 2}, fail_at={5: OSError("x")})
    driver = Driver(scheduler, engine, VirtualClock())
    driver.run((0.0, request(f"r{number}", queue_timeout_s=math.inf)) for number in range(20))
    assert bench.metrics._progress == {}
    assert bench.metrics._sent_back == set()
    assert bench.metrics._planned_at == {}
    ended = {
        reason: bench.value("requests_finished_total", reason=reason)
        for reason in ("length", "error")
    }
    assert ended == {"length": 19, "error": 1}


# --- whose, and where ---------------------------------------------------------------------------


def test_it_is_exposed_once_and_for_the_scheduler_that_it_observes():
    bench = Bench()
    with pytest.raises(ConfigError, match="exposed already"):
        bench.metrics.expose(bench.scheduler, registry=CollectorRegistry())
    with pytest.raises(ConfigError, match="not an observer"):
        Metrics().expose(bench.scheduler, registry=CollectorRegistry())
    second = Metrics()
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=1), observers=[second])
    with pytest.raises(ConfigError, match="give the driver"):
        second.expose(scheduler, engine=FakeEngine(1), registry=bench.registry)
    with pytest.raises(ValueError, match="Duplicated"):
        second.expose(scheduler, registry=bench.registry)
    bench.registry.unregister(bench.metrics)
    second.expose(scheduler, registry=bench.registry)
    assert bench.value("slots") == 1


@pytest.mark.parametrize("wrong", [0, True, 1.5, "many"])
def test_a_bound_must_be_a_count(wrong):
    with pytest.raises(ConfigError, match="max_words"):
        Metrics(max_words=wrong)


# --- where the time goes ------------------------------------------------------------------------


def report(engine_s, scheduler_s=1.0, wait_s=2.0, other_s=4.0):
    return RunReport(
        started_at=0.0,
        num_steps=1,
        wall_s=engine_s + scheduler_s + wait_s + other_s,
        engine_s=engine_s,
        scheduler_s=scheduler_s,
        wait_s=wait_s,
        other_s=other_s,
        interrupted=False,
    )


def parts(registry):
    (family,) = (one for one in registry.collect() if one.name == "dllm_sched_time_seconds")
    return {sample.labels["part"]: sample.value for sample in family.samples}


def exposed(driver, engine=None):
    metrics, registry = Metrics(), CollectorRegistry()
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=2), observers=[metrics])
    driver = driver(scheduler) if callable(driver) else driver
    metrics.expose(scheduler, driver=driver, engine=engine, registry=registry)
    return driver, registry


def test_the_forward_is_taken_out_of_the_engine_and_no_part_ever_falls():
    engine = SimpleNamespace(forward_s=100.0)  # of runs before this one
    driver = SimpleNamespace(report=lambda: report(now))
    now = 0.0
    _, registry = exposed(driver, engine)
    seen = []
    for now, engine.forward_s in (
        (10.0, 107.0),
        (12.0, 107.0),  # in the middle of a forward, which is not counted yet
        (12.5, 109.5),  # it has ended: of 12.5 seconds 9.5 were forwards
        (20.0, 114.0),
    ):
        seen.append(parts(registry))
        assert sum(seen[-1].values()) == now + 7.0
    assert [(one["engine"], one["forward"]) for one in seen] == [
        (3.0, 7.0),
        (5.0, 7.0),
        (5.0, 7.5),
        (6.0, 14.0),
    ]
    assert {name: seen[0][name] for name in ("scheduler", "wait", "other")} == {
        "scheduler": 1.0,
        "wait": 2.0,
        "other": 4.0,
    }


def test_before_the_run_no_time_has_gone_and_after_it_all_of_it_is_there():
    engine = FakeEngine(2)
    driver, registry = exposed(lambda scheduler: Driver(scheduler, engine, VirtualClock()))
    assert parts(registry) == {"engine": 0, "scheduler": 0, "wait": 0, "other": 0}
    end = driver.run((0.0, request(f"r{number}")) for number in range(5))
    now = parts(registry)
    assert sum(now.values()) == pytest.approx(end.wall_s)
    assert now["engine"] == end.engine_s > 0


def test_counters_never_fall_whenever_another_thread_scrapes():
    engine = FakeEngine(2)
    driver, registry = exposed(lambda scheduler: Driver(scheduler, engine))
    scrapes, over = [], threading.Event()

    def scrape():
        scrapes.append(
            {
                (sample.name, *sample.labels.values()): sample.value
                for family in registry.collect()
                if family.type in ("counter", "histogram")
                for sample in family.samples
            }
        )

    def scrape_on():
        while not over.is_set():
            scrape()

    thread = threading.Thread(target=scrape_on)
    thread.start()
    driver.run((0.0, request(f"r{number}")) for number in range(300))
    over.set()
    thread.join()
    scrape()
    assert scrapes[-1]["dllm_sched_requests_finished_total", "length"] == 300
    for before, after in pairwise(scrapes):
        assert before.keys() == after.keys()
        assert [name for name, value in before.items() if after[name] < value] == []


def test_an_engine_that_times_its_forwards_has_that_part_from_the_start():
    engine = SimpleNamespace(forward_s=0.0, run=None, release=None)
    _, registry = exposed(lambda scheduler: Driver(scheduler, engine), engine)
    assert parts(registry) == dict.fromkeys(("engine", "forward", "scheduler", "wait", "other"), 0)
