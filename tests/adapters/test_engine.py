"""The engine: exact decoding whoever shares the batch, one forward and one copy back per step."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import random
import re

import numpy as np
import pytest
import torch

from dllm_sched import Scheduler
from dllm_sched.batch import NO_KNOBS, NOTHING, Released, Row, StepBatch
from dllm_sched.errors import ConfigError, EngineProtocolError
from dllm_sched.policies import presets
from dllm_sched.request import FinishReason, Phase, Request
from dllm_sched.testing import check_engine
from dllm_sched_hf.engine import (
    D2FEngine,
    D2FRequest,
    NonFiniteLogitsError,
    StepOutOfMemoryError,
)
from dllm_sched_hf.modeling_llada import PARTS

FILES = [
    "d2f_aggressive_b16",
    "d2f_base_nolora_b16",
    "d2f_defaults_forced_only_b32",
    "d2f_eager_add0_b16",
    "d2f_gqa_aggressive_b16",
    "d2f_gqa_math_b32",
    "d2f_gqa_train_b16",
    "d2f_gsm8k_b64",
    "d2f_math_humaneval_b32",
    "d2f_mbpp_b32",
    "d2f_nondivisible_b32",
    "d2f_serial_b16",
    "d2f_train_b16",
    "fast_dllm_dual_factor1",
    "fast_dllm_dual_thr05_b4",
    "fast_dllm_dual_thr09",
    "fast_dllm_dual_topk",
    "fast_dllm_gqa_dual_thr08_b16",
    "fast_dllm_nocache_thr09",
    "fast_dllm_prefix_factor2_b8",
    "fast_dllm_prefix_thr09",
    "llada_g32_b32_s32_cfg",
    "llada_g60_b20_s24",
    "llada_g64_b16_s32",
    "llada_g64_b64_s64",
]

DECODERS = [
    "d2f_aggressive_b16",
    "fast_dllm_dual_thr05_b4",
    "fast_dllm_prefix_factor2_b8",
    "fast_dllm_gqa_dual_thr08_b16",
    "llada_g32_b32_s32_cfg",
    "llada_g60_b20_s24",
]
"""Short ones of every kind."""

POLICIES = {
    "continuous": presets.continuous,
    "fixed_fill": lambda batch_size: presets.fixed_fill(batch_size, 3.0),
    "block_refill": presets.block_refill,
}


@pytest.mark.parametrize("name", FILES)
def test_alone_every_step_is_the_recorded_one(
    name, record, golden_request, golden_engine, assert_recorded, loop
):
    stored = record(name)
    engine = golden_engine(stored, 1)
    drive = loop(engine)
    for entry in stored["requests"]:
        drive.join(0, golden_request(stored, entry))
        drive.run()
        assert_recorded(drive.outputs[str(entry["id"])], entry)
    assert engine.num_forwards == sum(len(entry["trace"]) for entry in stored["requests"])


def _mixes():
    """Every file in every batch size; the policies shared out, or each (DLLM_SCHED_FULL=1)."""
    for index, name in enumerate(FILES):
        for batch_size in (4, 8, 16):
            for turn, policy in enumerate(POLICIES):
                mine = turn == (index + batch_size // 4) % len(POLICIES)
                if mine or os.environ.get("DLLM_SCHED_FULL"):
                    yield name, batch_size, policy


@pytest.mark.parametrize(("name", "batch_size", "policy"), list(_mixes()))
def test_neighbours_change_nothing(
    name, batch_size, policy, record, golden_request, golden_engine, assert_recorded
):
    """Random order, late joiners, and neighbours that are cancelled or fail at random steps."""
    stored = record(name)
    rng = random.Random(f"{name} {batch_size}")
    engine = golden_engine(stored, batch_size)
    sched = Scheduler(policy=POLICIES[policy](batch_size), capacity=engine.capacity())
    arrivals = [golden_request(stored, entry) for entry in stored["requests"]]
    for index in range(8):
        entry = rng.choice(stored["requests"])
        arrivals.append(golden_request({**stored}, {**entry, "id": f"victim {index}"}))
    rng.shuffle(arrivals)
    results, now, victims = {}, 0.0, {}

    def deliver(update):
        engine.release(update.released)
        for end in update.finished:
            assert end.request.id not in results
            results[end.request.id] = end

    while arrivals or sched.has_work():
        for _ in range(min(len(arrivals), rng.choice((0, 1, 2)))):
            sched.submit(arrivals.pop(), now=now)
        update = sched.next_step(now=now)
        deliver(update)
        now += 1.0
        if update.batch is None:
            continue
        for row in update.batch.rows:
            if row.request.id.startswith("victim") and rng.random() < 0.1:
                victims[row.request.id] = fate = rng.choice(("cancel", "fail"))
                if fate == "cancel":
                    deliver(sched.cancel(row.request.id, now=now))
                elif row.phase is Phase.REUSE:  # such rows have a cache
                    engine._cache.layers[0][row.slot, 0] = float("nan")
        outcome = engine.run(update.batch)
        deliver(sched.complete_step(update.batch, outcome, now=now))
    assert len(results) == len(stored["requests"]) + 8
    assert victims
    for entry in stored["requests"]:
        assert_recorded(results[str(entry["id"])].output, entry)
    for end in results.values():
        if end.reason is FinishReason.ERROR:
            assert end.request.id.startswith("victim")
            assert isinstance(end.error, NonFiniteLogitsError)


def test_unmerged_lora_decodes_the_same(record, assert_recorded, golden_request, model, loop):
    stored = record("d2f_gqa_aggressive_b16")
    engine = D2FEngine(model("tiny_gqa", merge=False), max_num_seqs=8, trace=True)
    drive = loop(engine)
    for slot, entry in enumerate(stored["requests"][:8]):
        drive.join(slot, golden_request(stored, entry))
    drive.run()
    for entry in stored["requests"][:8]:
        assert_recorded(drive.outputs[str(entry["id"])], entry)


@pytest.mark.parametrize("pads", [False, True])
def test_a_neighbour_ten_times_as_long_changes_nothing(
    pads, record, assert_recorded, golden_request, model, loop, monkeypatch
):
    stored = record("d2f_train_b16")
    entry = min(stored["requests"], key=lambda entry: len(entry["prompt"]))
    length = 512 - 128
    assert length >= 10 * len(entry["prompt"])
    engine = D2FEngine(model(), max_num_seqs=5, trace=True)
    engine._pads = pads
    drive = loop(engine)
    drive.join(3, golden_request(stored, entry))
    drive.step()
    for slot in (0, 1, 4):
        long = (entry["prompt"] * length)[:length]
        drive.join(slot, golden_request(stored, {**entry, "id": f"long {slot}", "prompt": long}))
    groups = []
    forward = engine.model.forward_packed
    monkeypatch.setattr(
        engine.model,
        "forward_packed",
        lambda ids, layout, *rest: groups.append(layout.groups) or forward(ids, layout, *rest),
    )
    drive.run()
    # The short row is not padded to the prompts that join, wherever its slot lies.
    long_apart = [(1, False), (3, True)] if pads else [(2, True), (1, False), (1, True)]
    assert [(group.num_rows, group.num_keys >= length) for group in groups[0]] == long_apart
    outputs = drive.outputs
    assert_recorded(outputs[str(entry["id"])], entry)
    assert outputs["long 0"] == outputs["long 1"] == outputs["long 4"]
    # No token is ever sent through a linear layer just to fill up a shape.
    assert engine.num_tokens == sum(step["len"] for out in outputs.values() for step in out.trace)


def as_elsewhere(engine):
    """Groups padded to their longest row, torch's operations and its read-out: not as on a CPU."""
    engine._pads, engine._on_host, engine._parts = True, False, PARTS


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("name", DECODERS)
def test_one_forward_and_one_copy_back_per_step(
    name, on_host, record, golden_request, golden_engine, loop, monkeypatch
):
    stored = record(name)
    engine = golden_engine(stored, 8)
    if not on_host:
        as_elsewhere(engine)
    forwards, copies, reads = [], [], []
    forward, cpu = engine.model.forward_packed, torch.Tensor.cpu
    monkeypatch.setattr(
        engine.model, "forward_packed", lambda *args: forwards.append(1) or forward(*args)
    )
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copies.append(1) or cpu(self))
    for read in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, read, lambda *_args, read=read: reads.append(read))
    drive = loop(engine)
    for slot, entry in enumerate(stored["requests"][:8]):
        drive.join(slot, golden_request(stored, entry))
        drive.step()  # prompts of new rows and blocks of old ones together
    drive.run()
    assert len(drive.outputs) == 8
    assert len(forwards) == engine.num_forwards == drive.step_id
    assert len(copies) == (0 if on_host else drive.step_id), "a CPU has nothing to copy"
    assert reads == []


@pytest.mark.parametrize("name", ["d2f_defaults_forced_only_b32", "d2f_gqa_train_b16"])
def test_attention_is_laid_out_anew_only_when_other_positions_run(
    name, record, golden_request, golden_engine, assert_recorded, loop, monkeypatch
):
    stored = record(name)
    engine = golden_engine(stored, 1)
    laid_out, groups = [], engine._groups

    def counted(plan, ranges, queries, visible):
        laid_out.extend([plan.place] * (visible is plan.visible))  # not of wanted tokens alone
        return groups(plan, ranges, queries, visible)

    monkeypatch.setattr(engine, "_groups", counted)
    for entry in stored["requests"][:3]:
        laid_out.clear()
        drive = loop(engine)
        drive.join(0, golden_request(stored, entry))
        drive.run()
        assert_recorded(drive.outputs[str(entry["id"])], entry)
        ran = [(step["start"], step["len"]) for step in entry["trace"]]
        moves = sum(new != old for old, new in itertools.pairwise(ran))
        assert len(laid_out) == moves + 1 < len(ran)


@pytest.mark.parametrize("name", DECODERS)
def test_the_way_of_other_devices_gives_the_same(
    name, record, golden_request, golden_engine, assert_recorded, loop
):
    stored = record(name)
    engine = golden_engine(stored, 8)
    as_elsewhere(engine)
    drive = loop(engine)
    for slot, entry in enumerate(stored["requests"][:8]):
        drive.join(slot, golden_request(stored, entry))
        drive.step()
    drive.run()
    for entry in stored["requests"][:8]:
        assert_recorded(drive.outputs[str(entry["id"])], entry)


@pytest.mark.parametrize("name", DECODERS)
def test_nan_row_fails_alone_and_leaves_nothing_behind(
    name, record, golden_request, golden_engine, assert_recorded, model, loop
):
    stored = record(name)
    first, second, third = stored["requests"][:3]
    used = {token for e in (first, second, third) for token in (*e["prompt"], *e["output"])}
    poison = min(set(range(290)) - used)
    net = copy.deepcopy(model(stored["model"], lora=stored["lora"]))
    with torch.no_grad():
        net.get_input_embeddings().weight[poison] = float("nan")
    drive = loop(golden_engine(stored, 3, net))
    drive.join(0, golden_request(stored, first))
    bad = {**first, "id": "bad", "prompt": [*(first["prompt"] * 3)[:380], poison]}
    drive.join(1, golden_request(stored, bad))
    drive.join(2, golden_request(stored, second))
    drive.step()
    assert isinstance(drive.errors["bad"], NonFiniteLogitsError)
    assert "'bad'" in str(drive.errors["bad"])
    drive.join(1, golden_request(stored, third))  # shorter: stale keys lie beyond its end
    drive.run()
    for entry in (first, second, third):
        assert_recorded(drive.outputs[str(entry["id"])], entry)


@pytest.mark.parametrize("name", DECODERS)
def test_a_request_that_does_not_suit_the_model_fails_alone(
    name, record, golden_request, golden_engine, assert_recorded, loop
):
    stored = record(name)
    good, bad = stored["requests"][:2]
    drive = loop(golden_engine(stored, 2))
    drive.join(0, golden_request(stored, good))
    drive.join(1, golden_request(stored, {**bad, "prompt": [1, 295, 2]}))
    drive.run()
    assert "mask id 295 at position 1" in str(drive.errors[str(bad["id"])])
    assert_recorded(drive.outputs[str(good["id"])], good)


@pytest.mark.parametrize("name", ["d2f_gqa_train_b16", "fast_dllm_prefix_thr09", *DECODERS[1:]])
@pytest.mark.parametrize("kept", [True, False])
def test_preempted_rows_go_on_or_start_again(
    kept, name, record, golden_request, golden_engine, assert_recorded, loop
):
    stored = record(name)
    one, two, three = stored["requests"][:3]
    drive = loop(golden_engine(stored, 2))
    request = golden_request(stored, one)
    drive.join(0, request)
    drive.join(1, golden_request(stored, two))
    for _ in range(5):
        drive.step()
    drive.leave(0, kept=kept)
    drive.join(0, golden_request(stored, three))
    while str(two["id"]) not in drive.outputs:
        drive.step()
    drive.join(1, request, resumed=kept)
    drive.run()
    for entry in (one, two, three):
        assert_recorded(drive.outputs[str(entry["id"])], entry)
    assert not drive.engine._kept


def test_resuming_what_was_never_kept_is_the_callers_error(record, golden_request, model, loop):
    stored = record("d2f_train_b16")
    drive = loop(D2FEngine(model(), max_num_seqs=1))
    drive.join(0, golden_request(stored, stored["requests"][0]), resumed=True)
    with pytest.raises(EngineProtocolError, match="keeps no progress"):
        drive.step()


def test_progress_of_a_request_that_is_dropped_is_dropped(record, golden_request, model, loop):
    stored = record("d2f_train_b16")
    engine = D2FEngine(model(), max_num_seqs=1)
    drive = loop(engine)
    request = golden_request(stored, stored["requests"][0])
    drive.join(0, request)
    drive.step()
    drive.leave(0, kept=True)
    assert list(engine._kept) == [request]
    engine.release([Released(None, request, FinishReason.CANCELLED)])
    assert not engine._kept


def test_progress_is_dropped_with_a_slot_that_it_never_came_back_to(
    record, golden_request, model, loop
):
    """The step that was to resume it failed before anybody was placed, and then it is cancelled."""
    stored = record("d2f_train_b16")
    engine = D2FEngine(model(), max_num_seqs=1)
    drive = loop(engine)
    request = golden_request(stored, stored["requests"][0])
    drive.join(0, request)
    drive.step()
    drive.leave(0, kept=True)
    row = Row(0, request, Phase.REUSE, 0, NO_KNOBS, resumed=True)
    with pytest.raises(ConfigError, match="unknown"):
        engine.run(StepBatch(1, 0.0, (row,), (row,), {"nobody knows": 1.0}))
    engine.release([Released(0, request, None, kept=True)])
    assert list(engine._kept) == [request], "sent back once more"
    engine.release([Released(0, request, FinishReason.CANCELLED)])
    assert not engine._kept


@pytest.mark.parametrize("name", DECODERS)
def test_rows_may_sit_out_steps(name, record, golden_request, golden_engine, assert_recorded, loop):
    stored = record(name)
    entries = stored["requests"][:3]
    drive = loop(golden_engine(stored, 3))
    for slot, entry in enumerate(entries):
        drive.join(slot, golden_request(stored, entry))
    rng = random.Random(4)
    while drive.rows:
        drive.step(*rng.sample(sorted(drive.rows), rng.randint(1, len(drive.rows))))
    for entry in entries:
        assert_recorded(drive.outputs[str(entry["id"])], entry)


# In the first a block is appended at every step.
@pytest.mark.parametrize("name", ["d2f_eager_add0_b16", *DECODERS[1:]])
def test_out_of_memory_advances_nobody(
    name, record, golden_request, golden_engine, assert_recorded, loop, monkeypatch
):
    stored = record(name)
    entries = stored["requests"][:3]
    engine = golden_engine(stored, 3)
    drive = loop(engine)
    drive.join(0, golden_request(stored, entries[0]))
    drive.step()
    drive.join(1, golden_request(stored, entries[1]))
    drive.join(2, golden_request(stored, entries[2]))

    forward = engine.model.model.transformer.blocks[-1].forward_packed

    def full(*args, **more):
        forward(*args, **more)  # by then the earlier layers' keys are overwritten
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model.model.transformer.blocks[-1], "forward_packed", full)
        for _ in range(2):
            with pytest.raises(StepOutOfMemoryError, match="nobody has advanced") as caught:
                drive.step()
    assert caught.value.restart == (1, 2)  # the least progress
    assert caught.value.fail == ()
    assert caught.value.max_num_seqs == 1
    drive.run()
    for entry in entries:
        assert_recorded(drive.outputs[str(entry["id"])], entry)
    assert StepOutOfMemoryError([5]).fail == (5,)


def test_other_errors_of_the_model_pass_through(record, golden_request, model, loop, monkeypatch):
    stored = record("d2f_train_b16")
    engine = D2FEngine(model(), max_num_seqs=1)
    drive = loop(engine)
    drive.join(0, golden_request(stored, stored["requests"][0]))

    def broken(*_args):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(engine.model, "forward_packed", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        drive.step()


def test_reports_boundaries_phases_and_masks(record, golden_request, model, loop):
    stored = record("d2f_train_b16")
    entry = max(stored["requests"], key=lambda entry: entry["n_blocks"])
    engine = D2FEngine(model(), max_num_seqs=1, report_masked=True)
    drive = loop(engine)
    drive.join(0, golden_request(stored, entry))
    phases, blocks, remaining = [], [], []
    while drive.rows:
        outcome = drive.step()
        phases += outcome.phases
        blocks += outcome.boundaries
        remaining += outcome.masked_remaining
    prompt_len = len(entry["prompt"])
    assert [(change.slot, change.phase) for change in phases] == [(0, Phase.REUSE)]
    done = [boundary.num_blocks_done for boundary in blocks]
    assert done == sorted(set(done)) and done[-1] < entry["n_blocks"]
    assert all(b.kv_tokens == prompt_len + 16 * b.num_blocks_done for b in blocks)
    committed = sum(len(step["commits"]) for step in entry["trace"])
    assert remaining[-1] == 0
    assert remaining == sorted(remaining, reverse=True)
    assert remaining[0] == 128 - len(entry["trace"][0]["commits"]) and committed <= 128


def test_a_step_without_news_is_nothing(record, golden_request, model, loop):
    stored = record("d2f_serial_b16")
    drive = loop(D2FEngine(model(), max_num_seqs=1))
    drive.join(0, golden_request(stored, max(stored["requests"], key=lambda e: e["n_forward"])))
    drive.step()
    assert any(drive.step() is NOTHING for _ in range(8))


@pytest.mark.parametrize(
    "name", ["d2f_train_b16", "fast_dllm_dual_thr09", "fast_dllm_nocache_thr09"]
)
def test_streamed_tokens_only_grow_and_end_as_the_answer(
    name, record, golden_request, golden_engine, loop
):
    stored = record(name)
    entry = next(e for e in stored["requests"] if stored["eos_token_id"] in e["output"])
    engine = golden_engine(stored, 1)
    drive = loop(engine)
    drive.join(0, golden_request(stored, entry, truncate_at_stop=True))
    seen, guessed = (), False
    while drive.rows:
        drive.step()
        if drive.rows:
            whole = engine.progress(0)
            now = whole.committed
            assert now[: len(seen)] == seen
            assert engine.progress(0, len(seen)) == (now[len(seen) :], whole.provisional)
            assert whole.provisional[:1] in {(), (None,)}, "what is committed goes up to the gap"
            guessed |= any(token is not None for token in whole.provisional)
            seen = now
    answer = drive.outputs[str(entry["id"])].tokens
    assert answer[: len(seen)] == seen
    assert guessed, "some token was committed behind a gap"
    with pytest.raises(EngineProtocolError, match="slot 0"):
        engine.progress(0)


@pytest.mark.parametrize("name", ["d2f_mbpp_b32", "fast_dllm_dual_thr09"])
def test_truncation_stops_early_and_cuts_before_the_first_stop_id(
    name, record, golden_request, golden_engine, loop
):
    stored = record(name)
    eos = stored["eos_token_id"]
    drive = loop(golden_engine(stored, 1))
    saved = 0
    for entry in stored["requests"]:
        drive.join(0, golden_request(stored, entry, truncate_at_stop=True))
        while drive.rows:
            outcome = drive.step()
        output, end = drive.outputs[str(entry["id"])], outcome.finished[0]
        if eos in entry["output"]:
            assert list(output.tokens) == entry["output"][: entry["output"].index(eos)]
            assert end.reason is FinishReason.EOS
        else:
            assert list(output.tokens) == entry["output"]
            assert end.reason is FinishReason.LENGTH
        saved += len(entry["trace"]) - output.num_forwards
    assert saved > 0


def test_every_stop_id_counts(record, golden_request, model, loop):
    stored = record("d2f_mbpp_b32")
    entry = next(entry for entry in stored["requests"] if entry["eos_step"] is None)
    other = entry["output"][5]
    drive = loop(D2FEngine(model(), max_num_seqs=1, stop_token_ids=(stored["eos_token_id"], other)))
    drive.join(0, golden_request(stored, entry, stop_token_ids=None, truncate_at_stop=True))
    drive.run()
    output = drive.outputs[str(entry["id"])]
    assert list(output.tokens) == entry["output"][: entry["output"].index(other)]


def test_budget_is_rounded_up_and_cut_back(record, golden_request, model, loop):
    stored = record("d2f_train_b16")
    entry = next(entry for entry in stored["requests"] if entry["eos_step"] is None)
    drive = loop(D2FEngine(model(), max_num_seqs=2))
    for slot, budget in enumerate((5, 40)):
        request = golden_request(
            stored, {**entry, "id": budget}, max_new_tokens=budget, whole_blocks_only=False
        )
        assert request.max_blocks == -(-budget // 16)
        drive.join(slot, request)
    drive.run()
    assert [len(drive.outputs[str(budget)].tokens) for budget in (5, 40)] == [5, 40]


def _sampled(engine, loop, slots_and_seeds, prompt, temperature=1.5):
    drive = loop(engine)
    for slot, seed in slots_and_seeds:
        drive.join(
            slot,
            D2FRequest(
                f"{seed}",
                prompt=prompt,
                max_new_tokens=48,
                block_length=16,
                seed=seed,
                temperature=temperature,
                skip_threshold=0.3,
            ),
        )
        drive.step()
    drive.run()
    return {name: output.tokens for name, output in drive.outputs.items()}


def test_draws_depend_on_the_seed_and_not_on_the_batch(model, loop, record):
    prompt = record("d2f_train_b16")["requests"][0]["prompt"]
    alone = {}
    for seed in (1, 2, 3):
        engine = D2FEngine(model(), max_num_seqs=1)
        alone |= _sampled(engine, loop, [(0, seed)], prompt)
    together = _sampled(
        D2FEngine(model(), max_num_seqs=6), loop, [(4, 3), (0, 2), (5, 9), (1, 1)], prompt
    )
    assert {name: together[name] for name in alone} == alone
    assert len(set(together.values())) == 4
    assert all(295 not in tokens for tokens in together.values())


def test_drawn_tokens_follow_the_softmax(model):
    """Frequencies over many draws agree with the probabilities; the mask id never comes."""
    engine = D2FEngine(model(), max_num_seqs=1)
    torch.manual_seed(0)
    row = torch.randn(engine.vocab_size) * 2
    count = 20_000
    temperature = np.full(count, 0.7)
    draws = (np.arange(count) + 0.5) / count
    read = engine._read_out(row.repeat(count, 1), temperature, draws)
    confidence, token = read[0].view(torch.float32), read[1].long()
    scaled = (row / 0.7).softmax(-1)
    allowed = scaled.clone()
    allowed[engine.mask_token_id] = 0
    expected = allowed / allowed.sum()
    got = torch.bincount(token, minlength=engine.vocab_size) / count
    assert got[engine.mask_token_id] == 0
    # Evenly spaced draws: each count is within one of its share.
    assert (got - expected).abs().max() <= 1.5 / count
    torch.testing.assert_close(confidence, scaled[token], rtol=1e-4, atol=1e-6)


def test_the_mask_token_is_never_chosen_but_keeps_its_share(model):
    engine = D2FEngine(model(), max_num_seqs=1)
    logits = torch.zeros(1, engine.vocab_size)
    logits[0, engine.mask_token_id] = 10.0
    logits[0, 7] = 9.0
    expected = logits.softmax(-1)[0, 7]
    read = engine._read_out(logits.clone(), np.zeros(1), None)
    assert read[1].tolist() == [7]
    torch.testing.assert_close(read[0].view(torch.float32)[0], expected)
    confidence, token = engine._read_on_host(logits)
    assert token.tolist() == [7]
    torch.testing.assert_close(torch.from_numpy(confidence)[0], expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_give_a_non_finite_confidence(bad, model):
    engine = D2FEngine(model(), max_num_seqs=1)
    logits = torch.zeros(2, engine.vocab_size)
    logits[1, 3] = bad
    read = engine._read_out(logits.clone(), np.zeros(2), None)
    assert read[0].view(torch.float32).isfinite().tolist() == [True, False]
    assert np.isfinite(engine._read_on_host(logits)[0]).tolist() == [True, False]


@pytest.mark.parametrize("name", DECODERS)
def test_steps_planned_ahead_may_name_rows_that_have_ended(
    name, record, golden_request, golden_engine, assert_recorded
):
    stored = record(name)
    engine = golden_engine(stored, 3, report_masked=True)
    sched = Scheduler(policy=presets.continuous(3), capacity=engine.capacity(), max_in_flight=2)
    bad = {**stored["requests"][0], "id": "bad", "prompt": [1, 295]}
    for entry in (stored["requests"][0], bad, *stored["requests"][1:8]):
        sched.submit(golden_request(stored, entry), now=0.0)
    ended, flights, named_again, phases = {}, [], 0, {}

    def deliver(update):
        engine.release(update.released)
        ended.update({end.request.id: end for end in update.finished})

    while sched.has_work():
        update = sched.next_step(now=0.0)
        deliver(update)
        flights += [update.batch] if update.batch is not None else []
        if len(flights) == 2 or update.batch is None:
            batch = flights.pop(0)
            named_again += any(row.request.id in ended for row in batch.rows)
            outcome = engine.run(batch)
            for slot, phase in outcome.phases:
                assert phases.get(slot) is not phase  # told once
                phases[slot] = phase
            deliver(sched.complete_step(batch, outcome, now=0.0))
            for slot in {end.slot for end in (*outcome.finished, *outcome.failed)}:
                phases.pop(slot, None)
    assert named_again
    assert "mask id" in str(ended.pop("bad").error)
    assert len(ended) == 8
    for entry in stored["requests"][:8]:
        assert_recorded(ended[str(entry["id"])].output, entry)


@pytest.mark.parametrize("name", DECODERS)
def test_head_in_chunks_changes_nothing(
    name, record, golden_request, golden_engine, assert_recorded, loop, monkeypatch
):
    monkeypatch.setattr("dllm_sched_hf.engine._LOGITS_PER_CHUNK", 300 * 7)
    stored = record(name)
    drive = loop(golden_engine(stored, 4))
    for slot, entry in enumerate(stored["requests"][:4]):
        drive.join(slot, golden_request(stored, entry))
    drive.run()
    for entry in stored["requests"][:4]:
        assert_recorded(drive.outputs[str(entry["id"])], entry)


def test_knobs_override_the_request(record, assert_recorded, golden_request, model, loop):
    stored = record("d2f_aggressive_b16")
    entry = stored["requests"][0]
    plain = {"skip_threshold": 0.99, "decoded_token_threshold": 1.0, "block_add_threshold": 0.2}
    names = dict.fromkeys(plain)
    knobs = {name: stored["params"][name] for name in names}
    drive = loop(D2FEngine(model(), max_num_seqs=1, trace=True))
    drive.join(0, golden_request(stored, entry, **plain), **knobs)
    drive.run()
    assert_recorded(drive.outputs[str(entry["id"])], entry)


BAD_KNOBS = [
    ({"skip": 0.5}, "unknown 'skip'"),
    ({"skip_threshold": 2}, "skip_threshold must be a number in \\[0, 1\\]"),
    ({"temperature": 10**5000}, "temperature must be a number 0 or in"),
    ({"temperature": 1e-40}, "temperature must be a number 0 or in"),
    ({"block_add_threshold": np.array([0.1, 0.2])}, "block_add_threshold"),
]


@pytest.mark.parametrize(("knobs", "message"), BAD_KNOBS)
def test_bad_knobs_fail_their_row_alone(
    knobs, message, record, assert_recorded, golden_request, model, loop
):
    stored = record("d2f_aggressive_b16")
    good, bad, late = stored["requests"][:3]
    drive = loop(D2FEngine(model(), max_num_seqs=3, trace=True, report_masked=True))
    drive.join(0, golden_request(stored, bad), **knobs)  # nobody else is there
    outcome = drive.step()
    assert [row.slot for row in outcome.failed] == [0]
    assert outcome.masked_remaining == (0,)
    drive.join(0, golden_request(stored, good))
    request = golden_request(stored, {**bad, "id": "knobs change"})
    drive.join(1, request, skip_threshold=0.5, block_add_threshold=0.1, temperature=0.0)
    drive.step()
    drive.rows[1] = drive.rows[1]._replace(knobs=knobs)
    drive.step()
    assert sorted(drive.rows) == [0]
    drive.join(1, golden_request(stored, late))  # the slot serves on
    drive.run()
    for name in (str(bad["id"]), "knobs change"):
        assert isinstance(drive.errors[name], ConfigError)
        assert re.search(message, str(drive.errors[name]))
    for entry in (good, late):
        assert_recorded(drive.outputs[str(entry["id"])], entry)


def test_bad_knobs_fail_again_after_a_step_that_did_not_fit(
    record, assert_recorded, golden_request, model, loop, monkeypatch
):
    stored = record("d2f_aggressive_b16")
    good, bad = stored["requests"][:2]
    engine = D2FEngine(model(), max_num_seqs=2, trace=True)
    drive = loop(engine)
    drive.join(0, golden_request(stored, good))
    drive.join(1, golden_request(stored, bad))
    drive.step()
    drive.rows[1] = drive.rows[1]._replace(knobs={"skip": 1})

    def full(*_args):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward_packed", full)
        with pytest.raises(StepOutOfMemoryError):
            drive.step()
    drive.run()
    assert "unknown 'skip'" in str(drive.errors[str(bad["id"])])
    assert_recorded(drive.outputs[str(good["id"])], good)


@pytest.mark.parametrize(("knobs", "message"), BAD_KNOBS)
def test_bad_batch_knobs_fail_the_step(
    knobs, message, record, assert_recorded, golden_request, model
):
    stored = record("d2f_aggressive_b16")
    entry = stored["requests"][0]
    engine = D2FEngine(model(), max_num_seqs=1, trace=True)
    row = Row(0, golden_request(stored, entry), Phase.PREFILL, 0)
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"batch knobs: {message}"):
            engine.run(StepBatch(0, 0.0, (row,), (row,), knobs))
    outcome = engine.run(StepBatch(0, 0.0, (row,), (row,)))
    while not outcome.finished:
        outcome = engine.run(StepBatch(1, 0.0, (row,)))
    assert_recorded(outcome.finished[0].output, entry)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, 295]}, "mask id 295"),
        ({"prompt": [1, 300]}, "vocabulary has 300"),
        ({"prompt": [-1]}, "prompt must hold token ids"),
        ({"prompt": [1] * 400, "max_new_tokens": 97}, "528 positions"),
        ({"max_new_tokens": 31, "whole_blocks_only": True}, "no whole block"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"block_length": 0}, "block_length"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"skip_threshold": 1.1}, "skip_threshold"),
        ({"seed": 2**63}, "seed"),
        ({"stop_token_ids": (295,)}, "stop_token_ids holds the mask id"),
        ({"stop_token_ids": (2**63,)}, "stop_token_ids"),
        ({"stop_token_ids": (10**5000,)}, "stop_token_ids"),
        ({"stop_token_ids": (300,)}, "stop_token_ids must hold token ids .* from 0 to 299"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": 1}, "stop_token_ids must be a sequence"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": (True,)}, "stop_token_ids"),
        ({"stop_token_ids": range(290)}, "at most 256"),
        ({"prompt": None}, "prompt must be a sequence"),
        ({"prompt": 3}, "prompt must be a sequence"),
        ({"prompt": "spell"}, "prompt must hold token ids"),
        ({"prompt": [1, 2.0]}, "prompt must hold token ids"),
        ({"prompt": [2**63]}, "prompt must hold token ids"),
        ({"temperature": 10**400}, "temperature must be a number 0 or in"),
        ({"temperature": 10**5000}, "temperature"),
        ({"temperature": 1e-40}, "temperature"),
        ({"temperature": 1e-300}, "temperature"),
        ({"temperature": 1e-4}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"skip_threshold": 10**400}, "skip_threshold"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"truncate_at_stop": "no"}, "truncate_at_stop must be True or False"),
        ({"whole_blocks_only": 1}, "whole_blocks_only must be True or False"),
        ({"max_new_tokens": 10**5000}, "max_new_tokens"),
        ({"block_length": 10**5000}, "block_length"),
        ({"block_length": 10**12}, "need .* positions"),
    ],
)
def test_bad_requests_name_the_field(fields, message, model):
    engine = D2FEngine(model(), max_num_seqs=1)
    with pytest.raises(ConfigError, match=message):
        engine.request("r", **({"prompt": [1, 2], "max_new_tokens": 64} | fields))


def test_only_its_own_requests_are_taken(model):
    with pytest.raises(ConfigError, match="D2FRequest"):
        D2FEngine(model(), max_num_seqs=1).check(Request("r", prompt_len=3, max_new_tokens=4))


@pytest.mark.parametrize("temperature", [0, 1e-3, 1, 1e6])
def test_every_temperature_that_is_taken_runs(temperature, record, model, loop):
    prompt = record("d2f_train_b16")["requests"][0]["prompt"]
    engine = D2FEngine(model(), max_num_seqs=1)
    drive = loop(engine)
    drive.join(
        0, engine.request("r", prompt, max_new_tokens=8, block_length=8, temperature=temperature)
    )
    drive.run()
    assert "r" in drive.outputs


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_seqs": 0},
        {"max_num_seqs": 2.5},
        {"max_num_seqs": "4"},
        {"max_num_seqs": True},
        {"max_len": 0},
        {"max_len": 513},
        {"max_len": 50.5},
        {"max_len": "50"},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": [295]},
        {"stop_token_ids": [300]},
        {"stop_token_ids": [2**63]},
        {"stop_token_ids": 1},
        {"trace": "no"},
        {"report_masked": 1},
        {"clock": 3},
    ],
)
def test_bad_engine_arguments_name_themselves(fields, model):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        D2FEngine(model(), **({"max_num_seqs": 1} | fields))


@pytest.mark.parametrize("slot", [99, 1, -1, "0", None])
def test_a_slot_that_does_not_exist_is_named(slot, model):
    with pytest.raises(ConfigError, match=f"slot must be an int in 0..0, got {slot!r}"):
        D2FEngine(model(), max_num_seqs=1).progress(slot)


def test_a_row_that_never_joined_is_the_callers_error(model):
    engine = D2FEngine(model(), max_num_seqs=2)
    request = engine.request("r", [1, 2], max_new_tokens=8)
    with pytest.raises(EngineProtocolError, match="'r'"):
        engine.run(StepBatch(0, 0.0, (Row(1, request, Phase.PREFILL, 0),)))


@pytest.mark.parametrize("slot", [2, -1])
def test_a_row_in_a_slot_that_the_engine_has_not_is_the_callers_error(slot, model):
    engine = D2FEngine(model(), max_num_seqs=2)
    request = engine.request("r", [1, 2], max_new_tokens=8)
    row = Row(slot, request, Phase.PREFILL, 0)
    with pytest.raises(EngineProtocolError, match=rf"slot {slot}: .*'r'.* has 2 slots: .*capacity"):
        engine.run(StepBatch(0, 0.0, (row,), (row,)))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(copied, model):
    with pytest.raises(
        TypeError, match=r"a D2FEngine cannot be copied or pickled: .* build another"
    ):
        copied(D2FEngine(model(), max_num_seqs=1))


@pytest.mark.parametrize("name", DECODERS)
def test_autocast_of_the_caller_changes_nothing(
    name, record, golden_request, golden_engine, assert_recorded, loop
):
    stored = record(name)
    drive = loop(golden_engine(stored, 3))
    for slot, entry in enumerate(stored["requests"][:3]):
        drive.join(slot, golden_request(stored, entry))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        drive.run()
        assert torch.is_autocast_enabled("cpu"), "it is the caller's"
    for entry in stored["requests"][:3]:
        assert_recorded(drive.outputs[str(entry["id"])], entry)


def test_built_in_inference_mode_it_leaves_rows_and_weights_that_can_be_written(
    record, golden_request, golden_engine, assert_recorded, model, loop
):
    stored = record("d2f_gqa_train_b16")
    net = copy.deepcopy(model(stored["model"], lora=stored["lora"]))
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    with torch.inference_mode():
        engine = golden_engine(stored, 2, net)
    entries = stored["requests"][:2]
    drive = loop(engine)
    for slot, entry in enumerate(entries):
        drive.join(slot, golden_request(stored, entry))
    drive.step()
    net.to(torch.float64).to(torch.float32)  # weights lie apart again, and the next step joins them
    drive.step()
    request = drive.rows[0].request
    drive.leave(0, kept=True)
    drive.join(0, request, resumed=True)  # written outside of a forward
    net.load_state_dict(weights)
    drive.run()
    for entry in entries:
        assert_recorded(drive.outputs[str(entry["id"])], entry)
    assert all(value.requires_grad_() is value for value in net.parameters())


def test_releasing_a_stranger_changes_nothing(model, loop):
    engine = D2FEngine(model(), max_num_seqs=1)
    drive = loop(engine)
    drive.join(0, engine.request("r", [1, 2], max_new_tokens=8))
    drive.step()
    stranger = engine.request("r", [1, 2], max_new_tokens=8)
    engine.release([Released(0, stranger, FinishReason.CANCELLED)])
    drive.run()
    assert "r" in drive.outputs


def test_clock_times_the_forward_only(model, loop):
    ticks = iter(range(10**6))
    engine = D2FEngine(model(), max_num_seqs=1, clock=lambda: float(next(ticks)))
    drive = loop(engine)
    drive.join(0, engine.request("r", [1, 2], max_new_tokens=8))
    drive.run()
    # Two intervals of one tick per step: the blocks, and the head.
    assert engine.forward_s == 2 * engine.num_forwards > 0
    assert engine.num_tokens >= 2 + 32


@pytest.mark.parametrize("name", ["d2f_gqa_aggressive_b16", *DECODERS[1:]])
def test_keeps_every_rule_of_the_step_protocol(name, record, golden_request, golden_engine):
    stored = record(name)

    def request(index, **changes):
        entry = {**stored["requests"][index], **changes}
        return golden_request(stored, entry, truncate_at_stop=bool(index % 2))

    check_engine(
        lambda num_slots: golden_engine(stored, num_slots),
        request,
        make_bad_request=lambda index: request(index, id=f"bad {index}", prompt=[1, 295]),
    )
