"""DiffusionGemma: every row gets the ids that transformers' own ``generate`` gives it alone."""

from __future__ import annotations

import copy
import functools
import itertools
import random

import pytest
import torch
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaForBlockDiffusion,
    DiffusionGemmaGenerationConfig,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSamplerConfig,
)

from dllm_sched import Scheduler
from dllm_sched.batch import NO_KNOBS, Released, Row, StepBatch
from dllm_sched.errors import ConfigError, EngineProtocolError
from dllm_sched.policies import presets
from dllm_sched.request import FinishReason, Phase, Request
from dllm_sched.testing import check_engine
from dllm_sched_hf import (
    DiffusionGemmaEngine,
    DiffusionGemmaRequest,
    NonFiniteLogitsError,
    StepOutOfMemoryError,
)

# `generate` imports what it does not use here, and that warns.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")

CANVAS, WINDOW, VOCAB, IMAGE = 8, 6, 40, 39
STOP_IDS, PAD = (3, 5), 0
SETTINGS = (
    "max_denoising_steps",
    "t_min",
    "t_max",
    "stability_threshold",
    "confidence_threshold",
)


@functools.cache
def tiny(attention="sdpa"):
    torch.manual_seed(0)
    config = DiffusionGemmaConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "global_head_dim": 8,
            "num_global_key_value_heads": 1,
            "sliding_window": WINDOW,
            "max_position_embeddings": 96,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 8,
            "use_bidirectional_attention": "vision",
            "initializer_range": 0.5,
        },
        vision_config={
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 8,
        },
        canvas_length=CANVAS,
        image_token_id=IMAGE,
        boi_token_id=38,
        eoi_token_id=37,
        attn_implementation=attention,
    )
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    model.generation_config = DiffusionGemmaGenerationConfig(
        eos_token_id=list(STOP_IDS), pad_token_id=PAD, max_denoising_steps=6
    )
    return model


@pytest.fixture
def model():
    return tiny()


def fields_of(index):
    draw = random.Random(index)
    return {
        "prompt": [draw.randrange(6, 37) for _ in range(draw.randint(1, 20))],
        "max_new_tokens": draw.choice((8, 13, 24, 32)),
        "seed": index,
        "t_max": draw.choice((0.01, 0.05, 0.8)),  # the first two make it sure of itself
        "t_min": draw.choice((0.0, 0.002)),
        "entropy_bound": draw.choice((0.1, 1.0, 5.0)),
        "stability_threshold": draw.choice((0, 1, 2)),
        "confidence_threshold": draw.choice((0.1, 0.5, 2.0)),
        "truncate_at_stop": False,
    }


def request_of(index, **changes):
    fields = fields_of(index) | changes
    return DiffusionGemmaRequest(f"r{index}", block_length=CANVAS, **fields)


_references = {}


def reference(request, model=None):
    """The ids and the decoder forwards of ``generate`` for this request alone."""
    model = model or tiny()
    settings = {name: getattr(request, name) for name in SETTINGS}
    settings = {name: value for name, value in settings.items() if value is not None}
    if request.entropy_bound is not None:
        settings["sampler_config"] = EntropyBoundSamplerConfig(request.entropy_bound)
    key = (model, request.prompt, request.seed, request.max_new_tokens, repr(settings))
    if key not in _references:
        torch.manual_seed(request.seed)
        made = model.generate(
            torch.tensor([request.prompt]), max_new_tokens=request.max_new_tokens, **settings
        )
        tokens = made.sequences[0, request.prompt_len :]
        padded = model.generation_config.pad_token_id is not None
        count = (tokens != PAD).sum().item() if padded else len(tokens)
        forwards = round(count / made.tokens_per_forward[0].item())
        _references[key] = (tuple(tokens[: request.max_new_tokens].tolist()), forwards)
    return _references[key]


def assert_as_generated(output, request, model=None):
    assert (output.tokens, output.num_forwards) == reference(request, model)


def serve(engine, policy, requests, rng=None, each_step=lambda sched, update, deliver: None):
    """Serve the requests; with ``rng`` they come one by one. Returns the ends by id."""
    sched = Scheduler(policy=policy, capacity=engine.capacity())
    coming, ends, now = list(requests), {}, 0.0

    def deliver(update):
        engine.release(update.released)
        for end in update.finished:
            assert end.request.id not in ends
            ends[end.request.id] = end

    while coming or sched.has_work():
        for _ in range(min(len(coming), rng.choice((0, 1, 2)) if rng else len(coming))):
            sched.submit(coming.pop(0), now=now)
        update = sched.next_step(now=now)
        deliver(update)
        now += 1.0
        if update.batch is None:
            continue
        each_step(sched, update, deliver)
        deliver(sched.complete_step(update.batch, engine.run(update.batch), now=now))
    return ends


# -- parity


@pytest.mark.parametrize("prompt_len", [1, 4, 5, 6, 7, 13, 33])  # around the window, and beyond
def test_alone_a_row_is_what_generate_makes_of_it(prompt_len, model, loop):
    prompt = [6 + i % 31 for i in range(prompt_len)]
    drive = loop(DiffusionGemmaEngine(model, max_num_seqs=1))
    for index in (2, 3):
        request = request_of(index, prompt=prompt, max_new_tokens=24, stop_token_ids=None)
        drive.join(0, request)
        drive.run()
        assert_as_generated(drive.outputs[request.id], request)


def test_the_cases_differ_in_what_matters():
    """Else parity would say little: early stops, all steps, stop ids, one canvas and several."""
    made = [reference(request_of(index)) for index in range(16)]
    canvases = [-(-len(tokens) // CANVAS) for tokens, _ in made]
    assert any(forwards < 6 for _, forwards in made)
    assert any(f == 6 * c for (_, f), c in zip(made, canvases, strict=True))
    assert {1, 2, 3} & set(canvases) and max(canvases) >= 3
    assert any(set(STOP_IDS) & set(tokens) for tokens, _ in made)
    assert len({tokens[:8] for tokens, _ in made}) == 16


POLICIES = {
    "continuous": presets.continuous,
    "fixed_fill": lambda batch_size: presets.fixed_fill(batch_size, 3.0),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch_size", [4, 8])
def test_neighbours_and_late_joins_change_nothing(batch_size, policy, model):
    engine = DiffusionGemmaEngine(model, max_num_seqs=batch_size)
    requests = [request_of(index) for index in range(16)]
    rng = random.Random(f"{policy} {batch_size}")
    ends = serve(engine, POLICIES[policy](batch_size), requests, rng)
    for request in requests:
        assert_as_generated(ends[request.id].output, request)
    alone = sum(reference(request)[1] for request in requests)
    assert engine.num_forwards < alone / 2  # they did share their forwards


def test_eager_attention_as_well():
    model = tiny("eager")
    engine = DiffusionGemmaEngine(model, max_num_seqs=3)
    requests = [request_of(index) for index in range(5)]
    ends = serve(engine, presets.continuous(3), requests, random.Random(1))
    for request in requests:
        assert_as_generated(ends[request.id].output, request, model)


def test_settings_of_the_model_are_those_of_generate(loop):
    """Nothing in the request, and a generation config with nothing but what it must have."""
    model = copy.copy(tiny())
    model.generation_config = DiffusionGemmaGenerationConfig(
        max_denoising_steps=9, t_max=0.6, sampler_config=EntropyBoundSamplerConfig(0.7)
    )
    engine = DiffusionGemmaEngine(model, max_num_seqs=1)
    assert engine.stop_token_ids == ()
    drive = loop(engine)
    request = engine.request("plain", [7, 8, 9], max_new_tokens=16, truncate_at_stop=False)
    assert request.block_length == CANVAS
    drive.join(0, request)
    drive.run()
    assert_as_generated(drive.outputs["plain"], request, model)
    assert drive.outputs["plain"].num_forwards > 9  # 48 is the default of neither canvas


def test_each_canvas_counts_its_own_stable_steps(loop):
    """The most probable tokens never change, so a canvas is done when it has stood long enough."""
    model = copy.deepcopy(tiny())
    with torch.no_grad():
        model.model.decoder.norm.weight.zero_()
    model.generation_config = DiffusionGemmaGenerationConfig()
    request = request_of(0, max_new_tokens=32, stability_threshold=2, confidence_threshold=10.0)
    drive = loop(DiffusionGemmaEngine(model, max_num_seqs=1))
    drive.join(0, request)
    drive.run()
    assert_as_generated(drive.outputs["r0"], request, model)
    assert drive.outputs["r0"].num_forwards == 4 * 3


def test_steps_ahead_change_nothing(model):
    engine = DiffusionGemmaEngine(model, max_num_seqs=3)
    sched = Scheduler(policy=presets.continuous(3), capacity=engine.capacity(), max_in_flight=2)
    requests = [request_of(index) for index in range(7)]
    for request in requests:
        sched.submit(request, now=0.0)
    ends, flying = {}, []

    def deliver(update):
        engine.release(update.released)
        ends.update({end.request.id: end for end in update.finished})

    while sched.has_work():
        while len(flying) < 2:
            update = sched.next_step(now=0.0)
            deliver(update)
            if update.batch is None:
                break
            flying.append(update.batch)
        batch = flying.pop(0)
        deliver(sched.complete_step(batch, engine.run(batch), now=0.0))
    assert sched.stats().wasted_row_steps > 0
    for request in requests:
        assert_as_generated(ends[request.id].output, request)


# -- rows come, go and fail


def test_cancelled_rows_leave_their_neighbours_alone(model):
    requests = [request_of(index) for index in range(12)]
    gone = {f"r{index}" for index in range(0, 12, 3)}
    rng = random.Random(5)

    def cancel(sched, update, deliver):
        for row in update.batch.rows:
            if row.request.id in gone and rng.random() < 0.3:  # its step is in flight
                deliver(sched.cancel(row.request.id, now=update.batch.planned_at))

    engine = DiffusionGemmaEngine(model, max_num_seqs=4)
    ends = serve(engine, presets.continuous(4), requests, rng, cancel)
    cancelled = {name for name, end in ends.items() if end.reason is FinishReason.CANCELLED}
    assert cancelled and cancelled <= gone
    for request in requests:
        if request.id not in cancelled:
            assert_as_generated(ends[request.id].output, request)


@pytest.mark.parametrize("layer", [0, 1])  # sliding and full
def test_a_nan_row_fails_alone_and_leaves_nothing_behind(layer, model, loop):
    engine = DiffusionGemmaEngine(model, max_num_seqs=3)
    drive = loop(engine)
    requests = [request_of(index) for index in range(4)]
    drive.join(0, requests[0])
    drive.join(1, request_of(90, prompt=[9] * 40))
    drive.join(2, requests[1])
    drive.step()
    for tensor in engine._cache.layers[layer]:
        tensor[1] = float("nan")
    drive.step()
    assert isinstance(drive.errors["r90"], NonFiniteLogitsError)
    assert "'r90'" in str(drive.errors["r90"]) and "forward 2" in str(drive.errors["r90"])
    drive.join(1, requests[2])  # where the failed row was
    drive.run()
    for request in requests[:3]:
        assert_as_generated(drive.outputs[request.id], request)
    assert engine._conditioning.isfinite().all()


def test_an_unsuitable_request_fails_alone(model, loop):
    drive = loop(DiffusionGemmaEngine(model, max_num_seqs=2))
    good = request_of(1)
    drive.join(0, good)
    drive.join(1, request_of(2, prompt=[7, IMAGE]))
    drive.run()
    assert "image id 39 at position 1" in str(drive.errors["r2"])
    assert_as_generated(drive.outputs["r1"], good)


def test_the_engine_passes_every_check(model):
    check_engine(
        lambda slots: DiffusionGemmaEngine(model, max_num_seqs=slots),
        lambda index: request_of(index, max_denoising_steps=3, truncate_at_stop=index % 2 == 0),
        make_bad_request=lambda index: DiffusionGemmaRequest(
            f"bad{index}", prompt=[VOCAB], max_new_tokens=8, block_length=CANVAS
        ),
        num_requests=6,
        max_num_seqs=3,
    )


def batch_of(rows, joined=()):
    return StepBatch(0, 0.0, tuple(rows), tuple(joined))


@pytest.mark.parametrize(
    ("rows", "joined", "message"),
    [
        ([(0, 0), (0, 0)], [], "slot 0: the batch has two rows there"),
        ([(1, 1), (0, 2)], [(1, 1), (0, 2)], r"slot 0: .*'r2' joins .* 'r0' was not released"),
        ([(1, 1), (1, 2)], [(1, 1), (1, 2)], "slot 1: requests 'r1' and 'r2' join there"),
        ([(-1, 0)], [], r"slot -1: .*'r0' .* has 2 slots"),
    ],
)
def test_a_batch_that_cannot_be_changes_nothing(rows, joined, message, model):
    requests = [request_of(index) for index in range(3)]
    engine = DiffusionGemmaEngine(model, max_num_seqs=2)

    def row_of(slot, index):
        return Row(slot, requests[index], Phase.PREFILL, 0)

    drive = [row_of(0, 0)]
    engine.run(batch_of(drive, drive))
    with pytest.raises(EngineProtocolError, match=message):
        engine.run(batch_of([row_of(*row) for row in rows], [row_of(*row) for row in joined]))
    with pytest.raises(EngineProtocolError, match="slot 1: holds no row"):
        engine.progress(1)
    for _ in range(100):
        finished = engine.run(batch_of(drive)).finished
        if finished:
            break
    assert_as_generated(finished[0].output, requests[0])


def test_slots_positions_and_knobs_that_cannot_be_are_named(model):
    requests = [request_of(index, max_new_tokens=32) for index in range(2)]
    rows = [
        Row(slot, request, Phase.PREFILL, 0, knobs)
        for slot, (request, knobs) in enumerate(zip(requests, (NO_KNOBS, None), strict=True))
    ]
    engine = DiffusionGemmaEngine(model, max_num_seqs=2)
    with pytest.raises(ConfigError, match=r"batch knobs must be a mapping, .* got None"):
        engine.run(batch_of(rows, rows)._replace(knobs=None))
    (failed,) = engine.run(batch_of(rows, rows)).failed
    assert failed.slot == 1
    assert "request 'r1': knobs must be a mapping" in str(failed.error)
    with pytest.raises(EngineProtocolError, match="slot 2: request 'r1' is released there"):
        engine.release([Released(slot, requests[1], None) for slot in (1, 2)])
    for start in (-1, 1.0, None):
        with pytest.raises(ConfigError, match=f"slot 1: start must be an int >= 0, got {start}"):
            engine.progress(1, start)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda net: net.train(), "into training mode"),
        (lambda net: net.double(), r"moved to torch\.float64"),
    ],
)
def test_a_model_that_is_no_longer_as_it_was_takes_nobody_in(spoil, message, model):
    net = copy.deepcopy(model)
    engine = DiffusionGemmaEngine(net, max_num_seqs=1)
    spoil(net)
    row = Row(0, request_of(0), Phase.PREFILL, 0)
    with pytest.raises(EngineProtocolError, match=message):
        engine.run(batch_of([row], [row]))


@pytest.mark.parametrize("kept", [True, False])
def test_preempted_rows_go_on_or_start_again(kept, model, loop, monkeypatch):
    """In the middle of the second canvas, and in another slot."""
    one, two, three = (request_of(i, max_new_tokens=32, t_max=0.8) for i in (4, 6, 10))
    assert [reference(request)[1] for request in (one, two, three)] == [24, 24, 24]
    engine = DiffusionGemmaEngine(model, max_num_seqs=2)
    drive = loop(engine)
    drive.join(0, one)
    drive.join(1, two)
    for _ in range(8):
        drive.step()
    drive.leave(0, kept=kept)
    drive.join(0, three)
    drive.step()
    drive.leave(1)
    drive.join(1, one, resumed=kept)
    with monkeypatch.context() as patch:
        _fail_after_the_draws(patch, model)
        with pytest.raises(StepOutOfMemoryError):
            drive.step()
    drive.run()  # tells it as new once more
    for request in (one, three):
        assert_as_generated(drive.outputs[request.id], request)
    assert engine.num_forwards == (8 + 24 if kept else 8 + 1 + 24)
    assert not engine._kept


def test_progress_of_a_request_that_is_dropped_is_dropped(model, loop):
    engine = DiffusionGemmaEngine(model, max_num_seqs=1)
    drive = loop(engine)
    request = request_of(0)
    drive.join(0, request)
    drive.step()
    drive.leave(0, kept=True)
    assert list(engine._kept) == [request]
    engine.release([Released(None, request, FinishReason.CANCELLED)])
    assert not engine._kept
    drive.join(0, request)
    drive.step()
    drive.leave(0, kept=True)
    # Or it has a slot again, but the step that was to resume it failed before anybody was placed.
    engine.release([Released(0, request, FinishReason.CANCELLED)])
    assert not engine._kept
    drive.join(0, request, resumed=True)
    with pytest.raises(EngineProtocolError, match="keeps no progress"):
        drive.step()


def _fail_in_encoder(patch, model):
    layer = model.model.encoder.language_model.layers[-1]
    patch.setattr(layer, "forward", _full)


def _fail_after_the_draws(patch, model):
    patch.setattr(torch, "where", _full)


def _full(*_args, **_kwargs):
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize("failure", [_fail_in_encoder, _fail_after_the_draws])
def test_out_of_memory_advances_nobody(failure, model, loop, monkeypatch):
    """In each kind of step: prompts, first and later canvases (rows begin theirs at odd times)."""
    engine = DiffusionGemmaEngine(model, max_num_seqs=3)
    drive = loop(engine)
    requests = [request_of(index) for index in range(3)]
    caught = []
    for slot, request in enumerate(requests):
        drive.join(slot, request)
        for _ in range(2):
            with monkeypatch.context() as patch:
                failure(patch, model)
                try:
                    drive.step()
                except StepOutOfMemoryError as error:
                    caught.append(error)
        drive.step()
    while drive.rows:
        with monkeypatch.context() as patch:
            failure(patch, model)
            try:
                drive.step()
            except StepOutOfMemoryError as error:
                caught.append(error)
        if drive.rows:
            drive.step()
    assert "nobody has advanced" in str(caught[0]) and caught[0].fail == (0,)
    for request in requests:
        assert_as_generated(drive.outputs[request.id], request)


def _nan_keys(patch, model):
    """What this step encodes comes out as NaN."""
    encoder = model.model.encoder
    plain = encoder.forward

    def spoilt(*args, **kwargs):
        result = plain(*args, **kwargs)
        for pair in next(one for one in kwargs.values() if hasattr(one, "layers")).new:
            for tensor in pair:
                tensor.fill_(float("nan"))
        return result

    patch.setattr(encoder, "forward", spoilt)


@pytest.mark.parametrize("kept", [True, False])
def test_what_was_encoded_and_never_decoded_is_not_left_behind(kept, model, loop, monkeypatch):
    """NaN from the encoder, and no memory for the decoder, which would have shown it."""
    engine = DiffusionGemmaEngine(model, max_num_seqs=2)
    drive = loop(engine)
    requests = [request_of(index) for index in range(4)]
    spoilt = request_of(90, prompt=[9] * 40)
    drive.join(0, requests[0])
    drive.step()
    drive.join(1, spoilt)
    with monkeypatch.context() as patch:
        _nan_keys(patch, model)
        _fail_after_the_draws(patch, model)
        with pytest.raises(StepOutOfMemoryError):
            drive.step()
    drive.leave(1, kept=kept)
    drive.join(1, requests[1])  # a shorter one
    drive.run()
    for request in requests[:2]:
        assert_as_generated(drive.outputs[request.id], request)
    if kept:  # whose progress is spoilt: it fails by itself
        drive.join(0, spoilt, resumed=True)
        drive.step()
        assert isinstance(drive.errors["r90"], NonFiniteLogitsError)
    for slot, request in enumerate(requests[2:]):
        drive.join(slot, request)
    drive.run()
    for request in requests[2:]:
        assert_as_generated(drive.outputs[request.id], request)


def test_other_errors_of_the_model_pass_through(model, loop, monkeypatch):
    drive = loop(DiffusionGemmaEngine(model, max_num_seqs=1))
    request = request_of(1)
    drive.join(0, request)

    def broken(*_args, **_kwargs):
        raise RuntimeError("shapes differ")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "where", broken)
        with pytest.raises(RuntimeError, match="shapes differ"):
            drive.step()
    drive.run()
    assert_as_generated(drive.outputs["r1"], request)


# -- what a step costs, and what it reports


def test_one_decoder_forward_and_one_copy_back_per_step(model, loop, monkeypatch):
    engine = DiffusionGemmaEngine(model, max_num_seqs=4)
    forwards, encodes, copies = [], [], []
    forward, encode, cpu = model.forward, model.model.encoder.forward, torch.Tensor.cpu
    monkeypatch.setattr(model, "forward", lambda **kw: forwards.append(1) or forward(**kw))
    monkeypatch.setattr(
        model.model.encoder, "forward", lambda **kw: encodes.append(1) or encode(**kw)
    )
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copies.append(1) or cpu(self))
    drive = loop(engine)
    for slot in range(4):
        drive.join(slot, request_of(slot))
        drive.step()
    drive.run()
    assert len(forwards) == len(copies) == engine.num_forwards == drive.step_id
    assert len(encodes) == engine.num_encodes < drive.step_id


def test_only_the_encoder_pads(model, loop):
    engine = DiffusionGemmaEngine(model, max_num_seqs=2)
    drive = loop(engine)
    for slot, prompt_len in enumerate((3, 10)):
        drive.join(slot, request_of(slot, prompt=[7] * prompt_len, max_new_tokens=8))
    drive.step()
    assert (engine.num_tokens, engine.num_padding_tokens) == (3 + 10 + 2 * CANVAS, 7)
    drive.run()
    assert engine.num_padding_tokens == 7


def test_reports_canvases_phases_and_what_is_left(model, loop):
    engine = DiffusionGemmaEngine(model, max_num_seqs=1, report_masked=True)
    drive = loop(engine)
    request = request_of(0, prompt=[7] * 5, max_new_tokens=20, stop_token_ids=(), t_max=8.0)
    drive.join(0, request)
    phases, boundaries, left = [], [], []
    while drive.rows:
        outcome = drive.step()
        phases.append(outcome.phases)
        boundaries += outcome.boundaries
        left += outcome.masked_remaining
    assert [(change.slot, change.phase) for change in phases[0]] == [(0, Phase.REUSE)]
    assert not any(phases[1:])
    assert boundaries == [(0, 1, 5 + CANVAS), (0, 2, 5 + 2 * CANVAS)]
    assert [left.index(n) for n in (20, 12, 4, 0)] == sorted(left.index(n) for n in (20, 12, 4, 0))
    output = drive.outputs["r0"]
    assert output.num_blocks == 3 and output.first_stop_step is None and len(output.tokens) == 20


class Drafts:
    """A streamer of transformers: what it is shown after each step."""

    def __init__(self):
        self.drafts = []

    def put(self, value):
        pass

    def put_draft(self, value):
        self.drafts.append(tuple(value[0].tolist()))

    def end(self):
        pass


def test_a_stream_tells_finished_canvases_and_the_draft_of_the_open_one(model):
    request = request_of(4, max_new_tokens=20, t_max=0.8)
    tokens, forwards = reference(request)
    streamer = Drafts()
    torch.manual_seed(request.seed)
    model.generate(
        torch.tensor([request.prompt]),
        max_new_tokens=20,
        streamer=streamer,
        t_max=request.t_max,
        t_min=request.t_min,
        sampler_config=EntropyBoundSamplerConfig(request.entropy_bound),
        stability_threshold=request.stability_threshold,
        confidence_threshold=request.confidence_threshold,
    )
    engine = DiffusionGemmaEngine(model, max_num_seqs=1)
    row = Row(0, request, Phase.PREFILL, 0)
    told = ()
    for step in range(18):
        outcome = engine.run(StepBatch(step, 0.0, (row,), () if step else (row,)))
        fresh = engine.progress(0, len(told))
        told += fresh.committed
        assert told == tokens[: (step + 1) // 6 * CANVAS]
        done = step % 6 == 5  # that draft is the canvas
        draft = streamer.drafts[step][: 20 - len(told)]
        stop = next((i for i, token in enumerate(draft) if token in STOP_IDS), len(draft))
        shown = draft[: stop + 1] + (PAD,) * (len(draft) - stop - 1)
        assert fresh.provisional == (() if done else shown)
        assert engine.progress(0) == (told, fresh.provisional)
    assert outcome.finished[0].output.tokens == told == tokens
    assert forwards == len(streamer.drafts) == 18


def test_a_forward_takes_no_more_tokens_than_the_scheduler_was_told(model):
    engine = DiffusionGemmaEngine(model, max_num_seqs=3)
    sent = []

    def measure(_sched, update, _deliver):
        sent.append((engine.num_tokens, sum(row.max_tokens for row in update.batch.rows)))

    serve(engine, presets.continuous(3), map(request_of, range(6)), random.Random(2), measure)
    used = [after - before for (before, _), (after, _) in itertools.pairwise(sent)]
    bounds = [bound for _, bound in sent]
    assert all(now <= bound for now, bound in zip(used, bounds, strict=False))
    assert max(used) > 3 * CANVAS


def test_the_answer_ends_before_the_first_stop_id(model, loop):
    whole = next(
        request
        for request in map(request_of, range(16))
        if set(reference(request)[0]) & set(STOP_IDS)
    )
    tokens, forwards = reference(whole)
    stop = min(tokens.index(token) for token in STOP_IDS if token in tokens)
    index = int(whole.id[1:])
    drive = loop(DiffusionGemmaEngine(model, max_num_seqs=1))
    drive.join(0, request_of(index, truncate_at_stop=True))
    ends = []
    while drive.rows:
        ends += drive.step().finished
    assert ends[0].reason is FinishReason.EOS
    output = drive.outputs[whole.id]
    assert output.tokens == tokens[:stop]
    assert output.num_forwards == output.first_stop_step == forwards


# -- knobs


def test_knobs_take_the_place_of_settings(model, loop):
    """A row's own knob wins over the batch's; without either the request's setting is back."""
    engine = DiffusionGemmaEngine(model, max_num_seqs=2)
    drive = loop(engine)
    knobs = {"confidence_threshold": 2.0, "entropy_bound": 1.0}
    fields = {"max_new_tokens": 16, "stability_threshold": 0, "t_max": 0.05}
    drive.join(0, request_of(1, confidence_threshold=1e-6, entropy_bound=0.1, **fields), **knobs)
    drive.join(1, request_of(2, confidence_threshold=0.5, entropy_bound=0.1, **fields))
    while drive.rows:
        rows = tuple(drive.rows[slot] for slot in sorted(drive.rows))
        joined, drive.joined = tuple(drive.joined), []
        outcome = engine.run(StepBatch(0, 0.0, rows, joined, {"entropy_bound": 5.0}))
        for end in outcome.finished:
            drive.outputs[drive.rows[end.slot].request.id] = end.output
            drive.leave(end.slot)
    assert_as_generated(drive.outputs["r1"], request_of(1, **fields, **knobs))
    two = request_of(2, confidence_threshold=0.5, entropy_bound=5.0, **fields)
    assert_as_generated(drive.outputs["r2"], two)


def test_a_bad_knob_of_a_row_fails_it_alone_and_of_the_batch_the_call(model, loop):
    engine = DiffusionGemmaEngine(model, max_num_seqs=2)
    drive = loop(engine)
    good = request_of(1)
    drive.join(0, good)
    drive.join(1, request_of(2), entropy_bound=0)
    drive.step()
    assert "entropy_bound must be a number above 0" in str(drive.errors["r2"])
    rows = tuple(drive.rows.values())
    with pytest.raises(ConfigError, match="unknown 'skip_threshold'"):
        engine.run(StepBatch(0, 0.0, rows, (), {"skip_threshold": 0.5}))
    drive.run()
    assert_as_generated(drive.outputs["r1"], good)


# -- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1.5]}, "prompt must hold token ids"),
        ({"seed": 2**63}, "seed must be an int64"),
        ({"max_denoising_steps": 0}, "max_denoising_steps must be an int in 1"),
        ({"max_denoising_steps": 2.0}, "max_denoising_steps must be an int in 1"),
        ({"stability_threshold": -1}, "stability_threshold must be an int in 0"),
        ({"entropy_bound": 0.0}, "entropy_bound must be a number above 0"),
        ({"confidence_threshold": "high"}, "confidence_threshold must be a number above 0"),
        ({"confidence_threshold": float("nan")}, "confidence_threshold must be a number above 0"),
        ({"t_min": -0.1}, "t_min must be a number in"),
        ({"t_max": 0.0}, "t_max must be a number in"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a sequence"),
        ({"truncate_at_stop": 1}, "truncate_at_stop must be True or False"),
    ],
)
def test_a_request_names_the_field_that_is_wrong(changes, message):
    with pytest.raises(ConfigError, match=f"'r0': {message}"):
        request_of(0, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": [VOCAB]}, "prompt holds id 40"),
        ({"prompt": [1, IMAGE]}, "prompt holds the image id 39 at position 1"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids must hold token ids"),
        ({"stop_token_ids": (1,) * 257}, "stop_token_ids holds 257 ids"),
        ({"t_min": 0.9, "t_max": None}, "t_min must be below t_max, got 0.9 and 0.8"),
        ({"max_new_tokens": 96}, "prompt of .* need 109 positions, but max_len is 96"),
    ],
)
def test_the_engine_names_the_field_that_does_not_suit(changes, message, model):
    engine = DiffusionGemmaEngine(model, max_num_seqs=1)
    with pytest.raises(ConfigError, match=f"'r0': {message}"):
        engine.check(request_of(0, **changes))


def test_other_blocks_and_other_requests_are_refused(model):
    engine = DiffusionGemmaEngine(model, max_num_seqs=1)
    with pytest.raises(ConfigError, match="block_length must be the model's canvas_length 8"):
        engine.request("r", [1], max_new_tokens=8, block_length=16)
    with pytest.raises(ConfigError, match="must be a DiffusionGemmaRequest"):
        engine.check(Request("r", prompt_len=1, max_new_tokens=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_len": 97}, "max_len"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"report_masked": 1}, "report_masked"),
        ({"model": torch.nn.Linear(1, 1)}, "model must be a DiffusionGemmaForBlockDiffusion"),
    ],
)
def test_the_engine_names_the_argument_that_is_wrong(changes, message, model):
    with pytest.raises(ConfigError, match=message):
        DiffusionGemmaEngine(**({"model": model, "max_num_seqs": 1} | changes))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("use_bidirectional_attention", "all", "use_bidirectional_attention"),
        ("sliding_window", 1, "sliding_window"),
        ("rope_parameters", {"full_attention": {"rope_type": "dynamic"}}, "rope_type 'dynamic'"),
        ("rope_parameters", {"full_attention": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
    ],
)
def test_models_whose_rows_would_depend_on_each_other_are_refused(
    name, value, message, model, monkeypatch
):
    monkeypatch.setattr(model.config.text_config, name, value)
    with pytest.raises(ConfigError, match=message):
        DiffusionGemmaEngine(model, max_num_seqs=1)


def test_slots_are_checked(model):
    engine = DiffusionGemmaEngine(model, max_num_seqs=1)
    with pytest.raises(ConfigError, match=r"slot must be an int in 0\.\.0"):
        engine.progress(1)
    with pytest.raises(EngineProtocolError, match="slot 0: holds no row"):
        engine.progress(0)
    row = Row(1, request_of(0), Phase.PREFILL, 0)
    with pytest.raises(EngineProtocolError, match=r"slot 1: .*'r0'.* has 1 slots"):
        engine.run(StepBatch(0, 0.0, (row,), (row,)))
