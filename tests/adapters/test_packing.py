"""Packed rows decode as a padded batch does, and pay for their own tokens only."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import pytest
import torch

from dllm_sched_hf import LLaDAConfig, LLaDAModelLM, block_causal_mask, box, load_model
from dllm_sched_hf.engine import D2FEngine

BLOCK = 32


@torch.inference_mode()
def decode_padded(net, requests):
    """D2F by the book: every row padded to the longest, no cache, whole sequences every step."""
    rows = [
        SimpleNamespace(r=r, x=list(r.prompt), ready=[], seen_stop=False, forwards=0)
        for r in requests
    ]
    mask_id = net.config.mask_token_id

    def blocks(row):
        size, start = row.r.block_length, row.r.prompt_len
        return [range(at, at + size) for at in range(start, len(row.x), size)]

    def decoded(row, block):
        return sum(row.x[at] != mask_id for at in block) / row.r.block_length

    while True:
        for row in rows:
            shares = [1.0, *(decoded(row, block) for block in blocks(row))]
            may_grow = len(shares) <= row.r.max_blocks and not row.seen_stop
            if may_grow and shares[-1] >= row.r.block_add_threshold:
                row.x += [mask_id] * row.r.block_length
                row.ready.append(False)
            for number, share in enumerate(shares[: len(row.ready)]):
                row.ready[number] |= share >= row.r.decoded_token_threshold
        alive = [row for row in rows if mask_id in row.x[row.r.prompt_len :]]
        if not alive:
            return [(row.x[row.r.prompt_len :], row.forwards) for row in rows]
        width = max(len(row.x) for row in alive)
        ids = torch.tensor([row.x + [0] * (width - len(row.x)) for row in alive])
        visible = torch.stack(
            [
                block_causal_mask(row.r.prompt_len, row.r.block_length, width)
                & ((torch.arange(width) < len(row.x)) | torch.eye(width, dtype=torch.bool))
                for row in alive
            ]
        )
        logits = net(ids, visible[:, None]).logits
        confidence = logits.softmax(-1)
        confidence[..., mask_id] = -1.0
        confidence, token = (each.tolist() for each in confidence.max(-1))
        for row, sure, best in zip(alive, confidence, token, strict=True):
            row.forwards += 1
            for block, ready in zip(blocks(row), row.ready, strict=True):
                masked = [at for at in block if row.x[at] == mask_id]
                chosen = [at for at in masked if sure[at] > row.r.skip_threshold]
                if not chosen and masked and ready:
                    chosen = [max(masked, key=lambda at: sure[at])]
                for at in chosen:
                    row.x[at] = best[at]
                    row.seen_stop |= best[at] in row.r.stop_token_ids


def box_requests():
    net = load_model(box.box_model_dir(), box.box_lora_dir(), device="cpu", dtype="float64")
    fields = box.DECODING | {"whole_blocks_only": True, "truncate_at_stop": False}
    fields["stop_token_ids"] = (net.config.eos_token_id,)
    engine = D2FEngine(net, max_num_seqs=8, trace=True)
    pairs = box.task.sample_requests(12, 3, distinct=True)
    return engine, [
        engine.request(str(number), box.task.encode_prompt(prompt), **fields)
        for number, (prompt, _) in enumerate(pairs)
    ]


@pytest.mark.parametrize("name", ["box", "d2f_train_b16", "d2f_gqa_aggressive_b16"])
def test_packed_rows_decode_as_a_padded_batch_does(name, record, golden_request, golden, loop):
    if name == "box":
        engine, requests = box_requests()
    else:
        stored = record(name)
        lora = golden / f"{stored['model']}_lora"
        net = load_model(golden / stored["model"], lora, device="cpu", dtype="float64")
        engine = D2FEngine(net, max_num_seqs=8, trace=True)
        requests = [golden_request(stored, entry) for entry in stored["requests"][:10]]
    assert len({request.prompt_len for request in requests}) > 4  # padding would be needed
    drive, waiting = loop(engine), list(requests)
    while waiting or drive.rows:
        for slot in sorted({*range(8)} - {*drive.rows})[: len(waiting)]:
            drive.join(slot, waiting.pop(0))
        drive.step()
    for request, (tokens, forwards) in zip(
        requests, decode_padded(engine.model, requests), strict=True
    ):
        assert list(drive.outputs[request.id].tokens) == tokens
        assert drive.outputs[request.id].num_forwards == forwards


# -- waste


@pytest.fixture(scope="module")
def long_window():
    torch.manual_seed(0)
    config = LLaDAConfig(
        d_model=32, n_layers=2, n_heads=2, mlp_hidden_size=32, vocab_size=64,
        max_sequence_length=4096, mask_token_id=63, eos_token_id=62, pad_token_id=62,
    )  # fmt: skip
    return LLaDAModelLM(config).eval()


def count_per_step(net, lengths, long_at, loop, monkeypatch):
    """Serve prompts of these lengths; those of 2,000 tokens join at a step of their own.

    Returns:
        Per step, the tokens sent through the forward and those that its rows needed by their
        traces; and in all, the (query, key) pairs that attention worked on.
    """
    engine = D2FEngine(net, max_num_seqs=len(lengths), max_len=2304, trace=True)
    pairs = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def counted(query, key, value, **more):
        pairs.append(query.shape[0] * query.shape[-2] * key.shape[-2])
        return attention(query, key, value, **more)

    draw = random.Random(7)
    drive = loop(engine)
    joined_at, tokens, cells = {}, [], []
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        step = 0
        while step == 0 or drive.rows:
            for slot, length in enumerate(lengths):
                if step == (long_at if length >= 2000 else 0):
                    prompt = [draw.randrange(62) for _ in range(length)]
                    request = engine.request(
                        str(slot),
                        prompt,
                        max_new_tokens=64,
                        block_length=BLOCK,
                        skip_threshold=1.0,  # the ladder: one token a step and active block
                        stop_token_ids=(),
                    )
                    drive.join(slot, request)
                    joined_at[str(slot)] = step
            before = engine.num_tokens
            drive.step()
            tokens.append(engine.num_tokens - before)
            cells.append(sum(pairs))
            pairs.clear()
            step += 1
    needed = [0] * len(tokens)
    for id, start in joined_at.items():
        for number, entry in enumerate(drive.outputs[id].trace):
            needed[start + number] += entry["len"]
    return tokens, needed, sum(cells)


def test_rows_of_gsm8k_length_do_not_pay_for_a_prompt_of_2000_tokens(
    long_window, loop, monkeypatch
):
    draw = random.Random(1)
    short = [draw.randint(45, 190) for _ in range(15)]
    serve = functools.partial(count_per_step, long_window, loop=loop, monkeypatch=monkeypatch)
    tokens, needed, cells = serve([*short, 2000], long_at=5)
    assert tokens[5] >= 2000 + BLOCK  # the long prompt joins fifteen rows that are denoising
    assert 1 - sum(needed) / sum(tokens) < 0.05
    # Nor does any single step carry more: the fifteen send what they send by themselves.
    assert all(sent <= 1.05 * need for sent, need in zip(tokens, needed, strict=True))
    fifteen, _, fifteen_cells = serve(short, long_at=0)
    _, _, long_cells = serve([2000], long_at=0)
    assert tokens[5] - 2000 - BLOCK <= 1.05 * fifteen[5]
    # Attention neither: no pair more than both need without the other.
    assert fifteen_cells > 0 < long_cells
    assert cells <= 1.05 * (fifteen_cells + long_cells)


def test_what_fills_up_the_shapes_of_graphs_is_counted(record, golden_request, model, loop):
    stored = record("d2f_aggressive_b16")
    engine = D2FEngine(model(), max_num_seqs=4, capture=lambda body, _pool: body)
    sent = []
    embedding = engine.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _module, ids, _out: sent.append(ids[0].numel()))
    drive = loop(engine)
    for slot, entry in enumerate(stored["requests"][:4]):
        drive.join(slot, golden_request(stored, entry))
        drive.step()
    drive.run()
    hook.remove()
    assert engine.graph_stats.padding > 0
    assert sum(sent) == engine.num_tokens + engine.graph_stats.padding
