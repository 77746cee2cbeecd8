"""The D2F engine keeps the step protocol, whatever its rows do, and says what does not."""

import copy
import random

import pytest

torch = pytest.importorskip("torch")

from dllm_sched.batch import NO_KNOBS, Released, Row, StepBatch  # noqa: E402
from dllm_sched.errors import ConfigError, EngineProtocolError  # noqa: E402
from dllm_sched.request import FinishReason, Phase  # noqa: E402
from dllm_sched.runtime.engine import Progress  # noqa: E402
from dllm_sched.testing import check_engine  # noqa: E402
from dllm_sched_hf import (  # noqa: E402
    D2FEngine,
    D2FRequest,
    LLaDAConfig,
    LLaDAModelLM,
    StepOutOfMemoryError,
)

MASK_ID = 63


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LLaDAConfig(
        d_model=32,
        n_layers=2,
        n_heads=4,
        mlp_hidden_size=64,
        vocab_size=64,
        max_sequence_length=128,
        mask_token_id=MASK_ID,
        eos_token_id=62,
        pad_token_id=62,
    )
    return LLaDAModelLM(config).eval()


def make_request(index):
    draw = random.Random(index)
    return D2FRequest(
        f"r{index}",
        prompt=[draw.randrange(62) for _ in range(draw.randint(1, 20))],
        max_new_tokens=draw.randint(3, 20),
        block_length=4,
        skip_threshold=(0.02, 0.05, 0.9)[index % 3],
        temperature=(0.0, 0.7)[index % 2],
        seed=index,
    )


def make_bad_request(index):
    return D2FRequest(f"bad{index}", prompt=[MASK_ID], max_new_tokens=8)


def test_the_engine_passes_every_check(model):
    check_engine(
        lambda max_num_seqs: D2FEngine(model, max_num_seqs=max_num_seqs),
        make_request,
        make_bad_request=make_bad_request,
        num_requests=6,
        max_num_seqs=3,
    )


def row_of(slot, request, **fields):
    return Row(slot, request, Phase.PREFILL, 0, **fields)


def batch_of(rows, joined=(), knobs=NO_KNOBS):
    return StepBatch(0, 0.0, tuple(rows), tuple(joined), knobs)


def served_alone(model, request):
    engine = D2FEngine(model, max_num_seqs=1)
    rows = joined = (row_of(0, request),)
    for _ in range(100):
        finished = engine.run(batch_of(rows, joined)).finished
        if finished:
            return finished[0].output
        joined = ()
    raise AssertionError("does not end")


A, B, C = (make_request(index) for index in range(3))


@pytest.mark.parametrize(
    ("rows", "joined", "message"),
    [
        ([(0, A), (0, A)], [], r"slot 0: the batch has two rows there, .* 'r0'"),
        ([(0, A), (0, B)], [(1, B)], r"slot 0: the batch has two rows there, .* 'r1'"),
        ([(0, A), (1, B)], [(1, B), (1, C)], r"slot 1: requests 'r1' and 'r2' join there"),
        ([(0, B)], [(0, B)], r"slot 0: request 'r1' joins there, but request 'r0' was not rel"),
        ([(1, B), (0, C)], [(1, B), (0, C)], r"slot 0: request 'r2' joins .* 'r0' was not rel"),
        ([(1, B), (2, C)], [(1, B)], r"slot 2: .* 'r2' there, which never joined"),
        ([(0, A), (1, B), (0, C)], [(1, B)], r"slot 0: .* two rows"),
        ([(1, A)], [], r"slot 1: .* 'r0' there, which never joined"),
        ([(-1, A)], [], r"slot -1: request 'r0' .* has 3 slots"),
        ([(3, A)], [], r"slot 3: request 'r0' .* has 3 slots"),
        ([(1, B)], [("1", B)], r"slot '1': request 'r1' joins there, .* has 3 slots"),
    ],
)
def test_a_batch_that_cannot_be_changes_nothing(rows, joined, message, model):
    """Rows that join before the wrong one are not placed; the row in slot 0 goes on."""
    engine = D2FEngine(model, max_num_seqs=3)
    first = [row_of(0, A)]
    engine.run(batch_of(first, first))
    with pytest.raises(EngineProtocolError, match=message):
        engine.run(batch_of([row_of(*row) for row in rows], [row_of(*row) for row in joined]))
    for slot in (1, 2):
        with pytest.raises(EngineProtocolError, match="holds no row"):
            engine.progress(slot)
    later = [row_of(1, C)]
    ends, rows, joined = {}, first + later, later
    while len(ends) < 2:
        for end in engine.run(batch_of(rows, joined)).finished:
            ends[end.slot] = end.output
        rows, joined = [row for row in rows if row.slot not in ends], ()
    assert ends == {0: served_alone(model, A), 1: served_alone(model, C)}


def test_a_row_that_cannot_be_resumed_leaves_the_others_where_they_are(model):
    engine = D2FEngine(model, max_num_seqs=2)
    rows = [row_of(0, A), row_of(1, B, resumed=True)]
    with pytest.raises(EngineProtocolError, match=r"slot 1: .*'r1' is to be resumed, .* no progr"):
        engine.run(batch_of(rows, rows))
    with pytest.raises(EngineProtocolError, match="holds no row"):
        engine.progress(0)


@pytest.mark.parametrize("slot", [2, -1, "0"])
def test_a_slot_that_it_has_not_is_not_released(slot, model):
    """Nor is what comes before it in the same call."""
    engine = D2FEngine(model, max_num_seqs=2)
    rows = [row_of(0, A), row_of(1, B)]
    engine.run(batch_of(rows, rows))
    gone = [Released(0, A, FinishReason.CANCELLED), Released(slot, B, FinishReason.CANCELLED)]
    with pytest.raises(EngineProtocolError, match=f"slot {slot!r}: request 'r1' is released there"):
        engine.release(gone)
    assert engine.run(batch_of(rows)).failed == ()
    assert isinstance(engine.progress(0), Progress)


@pytest.mark.parametrize("start", [-1, 1.0, "0", None, True])
def test_progress_starts_at_a_position(start, model):
    engine = D2FEngine(model, max_num_seqs=1)
    rows = [row_of(0, A)]
    engine.run(batch_of(rows, rows))
    with pytest.raises(ConfigError, match=f"slot 0: start must be an int >= 0, got {start!r}"):
        engine.progress(0, start)


def test_knobs_are_a_mapping(model):
    engine = D2FEngine(model, max_num_seqs=2)
    rows = [row_of(0, A), row_of(1, B, knobs=None)]
    with pytest.raises(ConfigError, match=r"batch knobs must be a mapping, .* got None"):
        engine.run(batch_of(rows, rows, None))
    (failed,) = engine.run(batch_of(rows, rows)).failed
    assert failed.slot == 1
    assert isinstance(failed.error, ConfigError)
    assert "request 'r1': knobs must be a mapping" in str(failed.error)


@pytest.mark.parametrize(
    ("spoil", "mend", "message"),
    [
        (lambda net: net.train(), lambda net: net.eval(), r"into training mode .* eval\(\)"),
        (lambda net: net.half(), lambda net: net.float(), r"moved to torch\.float16 on cpu .*32"),
    ],
)
def test_a_model_that_is_no_longer_as_it_was_takes_nobody_in(spoil, mend, message, model):
    net = copy.deepcopy(model)
    engine = D2FEngine(net, max_num_seqs=2)
    rows = [row_of(0, A), row_of(1, B)]
    engine.run(batch_of(rows[:1], rows[:1]))
    spoil(net)
    with pytest.raises(EngineProtocolError, match=message):
        engine.run(batch_of(rows, rows[1:]))
    with pytest.raises(EngineProtocolError, match="slot 1: holds no row"):
        engine.progress(1)
    mend(net)
    assert engine.run(batch_of(rows, rows[1:])).failed == ()


def test_knobs_are_in_force_however_rows_and_batches_bring_them(model):
    """A row that is known is not looked at again; what it is known with may still change."""
    request = make_request(0)
    engine = D2FEngine(model, max_num_seqs=1)
    row = row_of(0, request)
    rows, low, high = (row,), {"skip_threshold": 0.1}, {"skip_threshold": 0.2}
    own = (row._replace(knobs={"skip_threshold": 0.3}),)
    thresholds = []
    for sent, joined, knobs in (
        (rows, rows, NO_KNOBS),
        (rows, (), low),
        (rows, (), high),
        (own, (), high),
        (rows, (), high),
        ((*rows,), (), NO_KNOBS),
    ):
        engine.run(batch_of(sent, joined, knobs))
        thresholds.append(float(engine._decoder.skip_threshold[0]))
    mine = request.skip_threshold
    assert thresholds == pytest.approx([mine, 0.1, 0.2, 0.3, 0.2, mine])
    engine.release([Released(0, request, FinishReason.CANCELLED)])
    engine.run(batch_of(rows, rows, low))
    engine.release([Released(0, request, FinishReason.CANCELLED)])
    with pytest.raises(EngineProtocolError, match="never joined or was released"):
        engine.run(batch_of(rows, (), low))


def test_knobs_of_a_batch_that_was_refused_come_into_force_with_the_next(model):
    engine = D2FEngine(model, max_num_seqs=1)
    rows = (row_of(0, make_request(0)),)
    low, high = {"skip_threshold": 0.1}, {"skip_threshold": 0.2}
    engine.run(batch_of(rows, rows, low))
    with pytest.raises(EngineProtocolError, match="slot 5"):
        engine.run(batch_of(rows, [row_of(5, make_request(1))], high))
    engine.run(batch_of(rows, (), high))
    assert engine._decoder.skip_threshold[0] == pytest.approx(0.2)


def test_a_row_that_does_not_fit_when_it_is_resumed_keeps_its_progress(model, monkeypatch):
    engine = D2FEngine(model, max_num_seqs=1)
    rows = (row_of(0, A),)
    for joined in (rows, ()):
        engine.run(batch_of(rows, joined))
    engine.release([Released(0, A, None, kept=True)])
    again = (row_of(0, A, resumed=True),)
    to = torch.Tensor.to

    def full(tensor, *args, **kwargs):
        monkeypatch.setattr(torch.Tensor, "to", to)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(StepOutOfMemoryError) as raised:
        engine.run(batch_of(again, again))
    assert "slot 0 does not fit alone" in str(raised.value)
    joined = again
    while not (finished := engine.run(batch_of(again, joined)).finished):
        joined = ()
    assert finished[0].output == served_alone(model, A)
