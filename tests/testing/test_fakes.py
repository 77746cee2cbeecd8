import pytest

from dllm_sched import (
    NOTHING,
    Capacity,
    ConfigError,
    EngineProtocolError,
    FinishReason,
    Phase,
    Released,
    Request,
    Row,
    Scheduler,
    StepBatch,
)
from dllm_sched.runtime import VirtualClock
from dllm_sched.testing import FakeEngine, fake_steps


def request(name="a", tokens=6, **fields):
    return Request(name, prompt_len=3, max_new_tokens=tokens, block_length=2, **fields)


def row(request, slot=0, **fields):
    return Row(slot, request, fields.pop("phase", Phase.PREFILL), 9, **fields)


def batch(*rows, joined=()):
    return StepBatch(0, 0.0, rows, joined)


def serve(engine, *requests, slots=2):
    """Return what each request answered, by id."""
    scheduler = Scheduler(capacity=Capacity(max_num_seqs=slots))
    for one in requests:
        scheduler.submit(one, now=0.0)
    answers = {}
    while scheduler.has_work():
        update = scheduler.next_step(now=0.0)
        engine.release(update.released)
        done = scheduler.complete_step(update.batch, engine.run(update.batch), now=0.0)
        engine.release(done.released)
        answers |= {finished.request.id: finished.output for finished in done.finished}
    return answers


def test_a_request_answers_its_budget_in_its_own_number_of_steps():
    answers = serve(FakeEngine(2), request("a"), request("b", 30), request("c", 11))
    for name, tokens in (("a", 6), ("b", 30), ("c", 11)):
        assert len(answers[name].tokens) == tokens
        assert answers[name].num_steps == fake_steps(request(name, tokens))
    assert len({output.num_steps for output in answers.values()}) > 1


def test_tokens_depend_on_the_key_and_the_rows_own_steps_only():
    alone = serve(FakeEngine(1), request("a"), slots=1)["a"]
    together = serve(FakeEngine(2), request("b"), request("a"), request("c"))
    assert together["a"] == alone
    assert together["b"].tokens != alone.tokens
    slower = serve(FakeEngine(1, steps=lambda request: 5), request("a"), slots=1)["a"]
    assert slower.tokens != alone.tokens, "the step is part of the noise"


def test_a_seed_in_the_payload_takes_the_place_of_the_id():
    first, second = (request(name, payload=7) for name in "ab")
    answers = serve(FakeEngine(2), first, second)
    assert answers["a"] == answers["b"]


def test_a_row_that_has_ended_is_let_be_by_a_step_that_was_planned_ahead():
    engine = FakeEngine(2, steps=lambda request: 2, poison={"b": 1})
    a, b = request("a"), request("b")
    first = engine.run(batch(row(a), row(b, 1), joined=(row(a), row(b, 1))))
    assert [one.slot for one in first.failed] == [1]
    second = engine.run(batch(row(a), row(b, 1)))
    assert [one.slot for one in second.finished] == [0]
    assert second.failed == ()
    assert engine.run(batch(row(a), row(b, 1))) is NOTHING
    assert len(second.finished[0].output.tokens) == 6


def test_it_reports_phases_boundaries_and_the_finish():
    engine = FakeEngine(1, steps=lambda request: 3)
    one = request()
    first = engine.run(batch(row(one), joined=(row(one),)))
    assert [tuple(change) for change in first.phases] == [(0, Phase.REUSE)]
    assert [tuple(boundary) for boundary in first.boundaries] == [(0, 1, 3 + 2)]
    second = engine.run(batch(row(one, phase=Phase.REUSE)))
    assert second.phases == ()
    assert [tuple(boundary) for boundary in second.boundaries] == [(0, 2, 3 + 4)]
    (finish,) = engine.run(batch(row(one, phase=Phase.REUSE))).finished
    assert (finish.slot, finish.reason) == (0, FinishReason.LENGTH)


def test_masked_positions_are_counted_down():
    engine = FakeEngine(1, steps=lambda request: 3, report_masked=True)
    one = request()
    counts = [engine.run(batch(row(one), joined=(row(one),))).masked_remaining]
    counts += [engine.run(batch(row(one))).masked_remaining for _ in range(2)]
    assert counts == [(4,), (2,), (0,)]


def test_a_failure_comes_at_its_call_and_changes_nothing():
    error = RuntimeError("kernel")
    engine = FakeEngine(1, fail_at={0: error})
    one = request()
    with pytest.raises(RuntimeError, match="kernel"):
        engine.run(batch(row(one), joined=(row(one),)))
    assert engine.held == frozenset()
    engine.run(batch(row(one), joined=(row(one),)))
    assert (engine.held, engine.num_runs) == ({"a"}, 2)


def test_a_poisoned_row_fails_at_its_step_and_alone():
    engine = FakeEngine(2, steps=lambda request: 4, poison={"a": 2})
    rows = row(request("a")), row(request("b"), slot=1)
    assert engine.run(batch(*rows, joined=rows)).failed == ()
    outcome = engine.run(batch(*rows))
    assert [failed.slot for failed in outcome.failed] == [0]
    assert "poisoned" in str(outcome.failed[0].error)


def test_a_step_takes_its_service_time():
    clock = VirtualClock()
    engine = FakeEngine(2, service_s=lambda batch: len(batch.rows) / 2, clock=clock)
    rows = row(request("a")), row(request("b"), slot=1)
    engine.run(batch(*rows, joined=rows))
    assert clock() == 1.0
    for half in ({"clock": clock}, {"service_s": lambda batch: 1.0}):
        with pytest.raises(ConfigError, match="together"):
            FakeEngine(1, **half)


def test_kept_progress_is_resumed_or_dropped():
    engine = FakeEngine(1, steps=lambda request: 3)
    one = request()
    engine.run(batch(row(one), joined=(row(one),)))
    engine.release([Released(0, one, None, kept=True)])
    assert engine.held == {"a"}
    resumed = row(one, phase=Phase.REUSE, resumed=True)
    assert engine.run(batch(resumed, joined=(resumed,))).boundaries[0].num_blocks_done == 2
    engine.release([Released(0, one, None, kept=True)])
    engine.release([Released(None, one, FinishReason.CANCELLED)])
    assert engine.held == frozenset()
    engine.run(batch(row(one), joined=(row(one),)))
    engine.release([Released(0, one, None, kept=True)])
    # It has a slot again, but the step that was to resume it never ran.
    engine.release([Released(0, one, FinishReason.CANCELLED)])
    assert engine.held == frozenset()
    with pytest.raises(EngineProtocolError, match="no progress"):
        engine.run(batch(resumed, joined=(resumed,)))


def test_it_refuses_what_a_scheduler_must_not_do():
    engine = FakeEngine(1)
    one, other = request("a", 30), request("b")
    with pytest.raises(EngineProtocolError, match="never joined"):
        engine.run(batch(row(one)))
    engine.run(batch(row(one), joined=(row(one),)))
    with pytest.raises(EngineProtocolError, match="'a' was never released"):
        engine.run(batch(row(other), joined=(row(other),)))
    with pytest.raises(EngineProtocolError, match="never joined or was released"):
        engine.run(batch(row(other)))


@pytest.mark.parametrize("bad", [{"max_num_seqs": 0}, {"max_num_seqs": 1, "steps": lambda r: 0}])
def test_arguments_out_of_range_are_refused(bad):
    with pytest.raises(ConfigError, match=r"must be (an int )?>= 1"):
        serve(FakeEngine(**bad), request(), slots=1)
