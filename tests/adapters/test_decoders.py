"""Fast-dLLM and plain LLaDA: their rules by hand, rows of every kind together, what is reported."""

from __future__ import annotations

import copy
import math
import random

import attrs
import numpy as np
import pytest
import torch

from dllm_sched import Capacity, FixedCanvas, Phase, Scheduler, presets
from dllm_sched.errors import ConfigError
from dllm_sched.testing import check_engine
from dllm_sched_hf.canvas import CanvasDecoder, CanvasRequest
from dllm_sched_hf.engine import (
    D2FEngine,
    D2FRequest,
    DecodingEngine,
    FastDLLMEngine,
    FastDLLMRequest,
    LLaDAEngine,
    LLaDARequest,
)
from dllm_sched_hf.fast_dllm import FastDLLM

MASK = 9
MHA = [
    "fast_dllm_dual_factor1",
    "fast_dllm_dual_thr05_b4",
    "fast_dllm_dual_topk",
    "fast_dllm_nocache_thr09",
    "fast_dllm_prefix_factor2_b8",
    "fast_dllm_prefix_thr09",
]


def _rows(*requests):
    decoder = FastDLLM(len(requests), 64, MASK)
    for slot, request in enumerate(requests):
        decoder.start(slot, request)
        decoder.threshold[slot] = math.nan if request.threshold is None else request.threshold
        decoder.factor[slot] = math.nan if request.factor is None else request.factor
    return decoder


def _commit(decoder, *confidences):
    """One step of every row with these confidences, position by position of its open masks."""
    plan = decoder.plan(np.arange(len(confidences)))
    flat = np.concatenate([np.array(one, np.float64) for one in confidences])
    assert len(plan.masked) == len(flat)
    commits = decoder.commit(plan, flat, np.ones(len(flat), np.int64))
    rows, positions = plan.row[plan.masked], plan.position[plan.masked]
    return [
        (positions[commits.chosen[rows[commits.chosen] == row]] - 1).tolist()
        for row in range(len(confidences))
    ]


def _request(length=4, blocks=2, **fields):
    return FastDLLMRequest(
        "r", prompt=[1], max_new_tokens=length * blocks, block_length=length, **fields
    )


@pytest.mark.parametrize(
    ("threshold", "confidence", "committed"),
    [
        (0.5, [0.5, 0.4, 0.9, 0.1], [0, 2]),  # equal to it is enough
        (0.5, [0.1, 0.3, 0.2, 0.1], [1]),  # always the best
        (0.0, [0.1, 0.3, 0.2, 0.1], [0, 1, 2, 3]),
        (1.0, [1.0, 0.3, 1.0, 0.1], [0, 2]),
    ],
)
def test_threshold_rule(threshold, confidence, committed):
    assert _commit(_rows(_request(threshold=threshold)), confidence) == [committed]


@pytest.mark.parametrize(
    ("factor", "confidence", "committed"),
    [
        # The n-th best has to reach 1 - factor / (n + 1): 2/3, 3/4, 4/5 from the second on.
        (1.0, [0.1, 0.2, 0.3, 0.15], [2]),
        (1.0, [0.7, 0.9, 0.3, 0.2], [0, 1]),
        (1.0, [0.75, 0.9, 0.8, 0.2], [0, 1, 2, 3]),  # only the last fails: all of them
        (1.0, [0.9, 0.6, 0.9, 0.9], [0, 1, 2, 3]),
        (1.0, [0.9, 0.9, 0.9, 0.9], [0, 1, 2, 3]),
        (2.0, [0.34, 0.4, 0.2, 0.1], [0, 1]),  # 1/3, 1/2, 3/5
        (9.0, [0.1, 0.1, 0.1, 0.1], [0, 1, 2, 3]),
    ],
)
def test_factor_rule(factor, confidence, committed):
    assert _commit(_rows(_request(factor=factor)), confidence) == [committed]


def test_factor_rule_commits_the_last_two_together_whatever_they_are():
    decoder = _rows(_request(factor=1.0))
    assert _commit(decoder, [0.7, 0.8, 0.01, 0.01]) == [[0, 1]]
    assert _commit(decoder, [0.02, 0.01]) == [[2, 3]]


def test_schedule_shares_positions_out_evenly_the_first_forwards_taking_one_more():
    decoder = _rows(_request(length=5, blocks=2, steps=6))
    ranks = [0.5, 0.9, 0.1, 0.3, 0.7]
    assert _commit(decoder, ranks) == [[1, 4]]
    assert _commit(decoder, [0.1, 0.2, 0.3]) == [[2, 3]]
    assert _commit(decoder, [0.1]) == [[0]]
    assert _commit(decoder, ranks) == [[6, 9]]  # the second block starts its own schedule


def test_rows_of_every_rule_and_block_do_not_touch_each_other():
    requests = [_request(threshold=0.5), _request(factor=1.0, blocks=3), _request(2, 5, steps=10)]
    together, alone = _rows(*requests), [_rows(request) for request in requests]
    alive = [0, 1, 2]
    draw = random.Random(3)
    while alive:
        plan = together.plan(np.array(alive))
        confidence = np.array([draw.random() for _ in plan.masked])
        rows = plan.row[plan.masked]
        commits = together.commit(plan, confidence, np.ones(len(rows), np.int64))
        for row, slot in enumerate(alive):
            single = alone[slot].plan(np.zeros(1, np.int64))
            mine = confidence[rows == row]
            alone[slot].commit(single, mine, np.ones(len(mine), np.int64))
            assert alone[slot].tokens[0].tolist() == together.tokens[slot].tolist()
            assert alone[slot].block[0] == together.block[slot]
        alive = [slot for row, slot in enumerate(alive) if not commits.finished[row]]
    assert together.num_steps[2] == 10


@pytest.mark.parametrize("cells", [2**14, 0])
@pytest.mark.parametrize("batch_size", [5, 16])
def test_rows_of_every_cache_and_rule_share_a_forward(
    batch_size, cells, record, golden_request, assert_recorded, model, loop
):
    engine = FastDLLMEngine(model(lora=False), max_num_seqs=batch_size, trace=True)
    engine._split_cells = cells  # 0: a group for each size
    cases = [
        (str(number), record(name), record(name)["requests"][index])
        for number, (index, name) in enumerate((i, n) for i in range(2) for n in MHA)
    ]
    drive = loop(engine)
    waiting, both = list(cases), 0
    while waiting or drive.rows:
        if waiting and len(drive.rows) < batch_size:
            name, stored, entry = waiting.pop(0)
            slot = min(set(range(batch_size)) - set(drive.rows))
            drive.join(slot, golden_request(stored, {**entry, "id": name}))
        both += len({row.phase for row in drive.rows.values()}) > 1
        drive.step()
    assert both > 20  # whole sequences and cached blocks in one forward
    assert engine.num_forwards == drive.step_id
    sent = 0
    for name, stored, entry in cases:
        output = drive.outputs[name]
        assert_recorded(output, entry)
        prompt, block = len(entry["prompt"]), stored["params"]["block_length"]
        canvas = prompt + stored["params"]["gen_length"]
        for step in output.trace:
            start = prompt + block * step["block"]
            part = block if stored["cache"] == "dual" else canvas - start
            sent += canvas if step["full"] else part
    assert engine.num_tokens == sent  # nothing goes through the layers to fill up a shape


@pytest.mark.parametrize("cells", [2**14, 0])
def test_guided_and_plain_rows_share_a_forward(
    cells, record, golden_request, assert_recorded, model, loop
):
    engine = LLaDAEngine(model(lora=False), max_num_seqs=8, trace=True)
    engine._split_cells = cells
    guided, plain = record("llada_g32_b32_s32_cfg"), record("llada_g64_b16_s32")
    drive = loop(engine)
    cases, sent = [], 0
    for slot in range(8):
        stored = (guided, plain, plain, guided)[slot % 4]
        entry = {**stored["requests"][slot], "id": f"row {slot}"}
        canvas = len(entry["prompt"]) + stored["params"]["gen_length"]
        sent += canvas * len(entry["trace"]) * (1 + (stored is guided))
        cases.append(entry)
        drive.join(slot, golden_request(stored, entry))
        drive.step()
    drive.run()
    for entry in cases:
        assert_recorded(drive.outputs[entry["id"]], entry)
    assert engine.num_forwards == drive.step_id
    assert engine.num_tokens == sent


def test_nothing_is_allocated_for_a_decoder_without_a_cache(model):
    assert LLaDAEngine(model(), max_num_seqs=4)._cache is None


@pytest.mark.parametrize("name", ["fast_dllm_gqa_dual_thr08_b16", "fast_dllm_dual_thr05_b4"])
@pytest.mark.parametrize("count", [1, 4])
def test_whole_sequences_and_cached_blocks_in_steps_of_their_own(
    name, count, record, golden_request, golden_engine, assert_recorded
):
    """Exclusive batching within a fixed canvas: held rows keep their state and their cache."""
    stored = record(name)
    engine = golden_engine(stored, 6)
    requests = [golden_request(stored, entry) for entry in stored["requests"]]
    memory = FixedCanvas(16)
    pages = 5 * max(map(memory.peak_pages, requests))  # for five or six rows
    capacity = attrs.evolve(engine.capacity(), num_pages=pages, memory=memory, window_blocks=1)
    sched = Scheduler(policy=presets.exclusive(6, count), capacity=capacity)
    for request in requests:
        sched.submit(request, now=0.0)
    outputs, kinds, held, now = {}, set(), 0, 0.0
    while sched.has_work():
        update = sched.next_step(now=now)
        engine.release(update.released)
        now += 1.0
        if update.batch is None:
            continue
        phases = {row.phase for row in update.batch.rows}
        kinds.add(Phase.REUSE in phases)
        assert phases == {Phase.REUSE} or Phase.REUSE not in phases
        for row in update.batch.rows:
            whole = row.phase is not Phase.REUSE
            request = row.request
            assert row.max_tokens == (request.max_total_tokens if whole else request.block_length)
        held += sched.counts().running > len(update.batch.rows)
        update = sched.complete_step(update.batch, engine.run(update.batch), now=now)
        engine.release(update.released)
        outputs |= {end.request.id: end.output for end in update.finished}
        sched.check_invariants()
    assert kinds == {True, False}
    assert held > 0
    for entry in stored["requests"]:
        assert_recorded(outputs[str(entry["id"])], entry)


@pytest.mark.parametrize("name", ["fast_dllm_dual_thr05_b4", "fast_dllm_nocache_thr09"])
def test_reports_phases_and_boundaries(name, record, golden_request, golden_engine, loop):
    stored = record(name)
    entry = max(stored["requests"], key=lambda entry: entry["nfe"])
    engine = golden_engine(stored, 1, report_masked=True)
    drive = loop(engine)
    request = golden_request(stored, entry)
    drive.join(0, request)
    trace = entry["trace"]
    left = request.max_new_tokens
    for number, step in enumerate(trace):
        row = drive.rows[0]
        assert row.phase is (
            Phase.PREFILL if number == 0 else Phase.REFRESH if step["full"] else Phase.REUSE
        )
        outcome = drive.step()
        left -= len(step["commits"])
        assert outcome.masked_remaining == (left,)
        done = number + 1 < len(trace) and trace[number + 1]["block"] > step["block"]
        assert [tuple(boundary) for boundary in outcome.boundaries] == (
            [(0, step["block"] + 1, request.max_total_tokens)] if done else []
        )
    assert drive.rows == {}


def test_threshold_knob_rules_rows_by_threshold_and_no_others(
    record, golden_request, assert_recorded, model, loop
):
    drive = loop(FastDLLMEngine(model(lora=False), max_num_seqs=3, trace=True))
    stored, other = record("fast_dllm_dual_thr09"), record("fast_dllm_dual_factor1")
    first, second, third = stored["requests"][0], other["requests"][1], stored["requests"][2]
    drive.join(0, golden_request(stored, {**first, "id": "a"}, threshold=0.2), threshold=0.9)
    drive.join(1, golden_request(other, {**second, "id": "b"}), threshold=0.9)
    drive.join(2, golden_request(stored, {**third, "id": "c"}), skip_threshold=0.9)
    drive.run()
    assert_recorded(drive.outputs["a"], first)
    assert_recorded(drive.outputs["b"], second)
    assert "unknown 'skip_threshold', this engine takes threshold" in str(drive.errors["c"])


def test_guidance_knob(record, golden_request, assert_recorded, model, loop):
    stored = record("llada_g32_b32_s32_cfg")
    entry = stored["requests"][0]
    drive = loop(LLaDAEngine(model(lora=False), max_num_seqs=1, trace=True))
    drive.join(0, golden_request(stored, entry, cfg_scale=0.0), cfg_scale=0.25)
    drive.run()
    assert_recorded(drive.outputs[str(entry["id"])], entry)


ENGINES = [
    (D2FEngine, {"skip_threshold": 0.3}),
    (FastDLLMEngine, {"threshold": 0.3}),
    (FastDLLMEngine, {"factor": 1.0, "cache": "prefix"}),
    (LLaDAEngine, {"steps": 8, "cfg_scale": 0.5}),
]


@pytest.mark.parametrize(("engine_type", "fields"), ENGINES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_token_is_never_committed(engine_type, fields, temperature, model, record, loop):
    net = copy.deepcopy(model())
    stored = record("d2f_train_b16")
    with torch.no_grad():  # now the mask token is by far the most probable one
        head = net.get_output_embeddings().weight
        head[295] = 3 * head[stored["requests"][0]["output"][0]]
    drive = loop(engine_type(net, max_num_seqs=2))
    fields = {"max_new_tokens": 32, "block_length": 8, "truncate_at_stop": False} | fields
    for slot in range(2):
        prompt = stored["requests"][slot]["prompt"]
        drive.join(
            slot,
            drive.engine.request(f"r{slot}", prompt, temperature=temperature, seed=slot, **fields),
        )
    drive.run()
    for output in drive.outputs.values():
        assert len(output.tokens) == 32
        assert 295 not in output.tokens


@pytest.mark.parametrize(("engine_type", "fields"), ENGINES[1:])
def test_draws_depend_on_the_seed_and_not_on_the_batch(engine_type, fields, model, record, loop):
    prompt = record("d2f_train_b16")["requests"][0]["prompt"]

    def serve(slots):
        drive = loop(engine_type(model(), max_num_seqs=max(slots) + 1))
        for slot, seed in slots.items():
            request = drive.engine.request(
                f"{seed}",
                prompt,
                max_new_tokens=32,
                block_length=8,
                temperature=1.5,
                seed=seed,
                **fields,
            )
            drive.join(slot, request)
            drive.step()
        drive.run()
        return drive.outputs

    together = serve({2: 1, 0: 2, 1: 3})
    assert together == {name: out for seed in (1, 2, 3) for name, out in serve({0: seed}).items()}
    assert len({output.tokens for output in together.values()}) == 3


@pytest.mark.parametrize(
    ("engine_type", "fields", "message"),
    [
        (FastDLLMEngine, {"max_new_tokens": 60}, "60 must be a multiple of block_length 32"),
        (LLaDAEngine, {"max_new_tokens": 16}, "16 must be a multiple of block_length 32"),
        (FastDLLMEngine, {"steps": 5}, "multiple of the 2 blocks, got 5"),
        (LLaDAEngine, {"steps": 66}, "steps must be an int in 1..64"),
        (LLaDAEngine, {"steps": 0}, "steps must be an int in 1..64"),
        (LLaDAEngine, {"steps": 2.0}, "steps must be an int in 1..64"),
        (LLaDAEngine, {"cfg_scale": -1.0}, "cfg_scale must be a number in"),
        (LLaDAEngine, {"cfg_scale": math.nan}, "cfg_scale must be a number in"),
        (LLaDAEngine, {"prompt": [1, 295]}, "mask id 295"),
        (FastDLLMEngine, {"prompt": [295]}, "mask id 295"),
        (FastDLLMEngine, {"prompt": [1] * 449}, "513 positions"),
        (FastDLLMEngine, {"cache": "both"}, "cache must be one of none, prefix, dual"),
        (FastDLLMEngine, {"cache": ["dual"]}, "cache must be one of none, prefix, dual"),
        (FastDLLMEngine, {"threshold": 1.5}, "threshold must be a number in"),
        (FastDLLMEngine, {"threshold": "high"}, "threshold must be a number in"),
        (FastDLLMEngine, {"factor": 0}, "factor must be a number above 0"),
        (FastDLLMEngine, {"threshold": 0.9, "steps": 64}, "one of threshold, factor and steps"),
        (FastDLLMEngine, {"threshold": 0.9, "factor": 1}, "got threshold and factor"),
    ],
)
def test_bad_requests_name_the_field(engine_type, fields, message, model):
    engine = engine_type(model(), max_num_seqs=1)
    with pytest.raises(ConfigError, match=message):
        engine.request("r", **({"prompt": [1, 2], "max_new_tokens": 64} | fields))


@pytest.mark.parametrize("engine_type", [D2FEngine, FastDLLMEngine, LLaDAEngine])
def test_an_engine_takes_the_requests_of_its_decoder_only(engine_type, model):
    engine, taken = engine_type(model(), max_num_seqs=1), []
    for request_type in (D2FRequest, FastDLLMRequest, LLaDARequest):
        request = request_type("r", prompt=[1], max_new_tokens=32)
        try:
            engine.check(request)
        except ConfigError as error:
            assert f"must be a {engine_type.decoder_type.request_type.__name__}" in str(error)
        else:
            taken.append(request_type)
    assert taken == [engine_type.decoder_type.request_type]


@attrs.frozen(kw_only=True, eq=False)
class LeftToRightRequest(CanvasRequest):
    """One token after the other."""


class LeftToRight(CanvasDecoder):
    """The leftmost mask commits first: what a new decoder takes."""

    request_type = LeftToRightRequest
    knobs = ("temperature",)
    caches = False

    def commit(self, plan, confidence, token):
        return super().commit(plan, -plan.position[plan.masked], token)


class LeftToRightEngine(DecodingEngine):
    decoder_type = LeftToRight


def test_a_decoder_of_ones_own_keeps_the_step_protocol(model, record):
    prompts = [entry["prompt"] for entry in record("llada_g60_b20_s24")["requests"]]

    def request(index):
        return LeftToRightRequest(
            f"r{index}", prompt=prompts[index], max_new_tokens=4 + 4 * (index % 3), block_length=4
        )

    def engine(max_num_seqs):
        return LeftToRightEngine(model("tiny_gqa"), max_num_seqs=max_num_seqs, trace=True)

    check_engine(engine, request)
    sched = Scheduler(policy=presets.per_request(), capacity=Capacity(max_num_seqs=1))
    sched.submit(request(2), now=0.0)
    alone = engine(1)
    while sched.has_work():
        batch = sched.next_step(now=0.0).batch
        ended = sched.complete_step(batch, alone.run(batch), now=0.0).finished
    order = [at for step in ended[0].output.trace for at, _ in step["commits"]]
    assert order == sorted(order) and len(order) == 12
