"""Requests of one group with one prompt: it goes through the model once, and nobody can tell."""

import numpy as np
import pytest
import torch

from dllm_sched_hf import D2FEngine, FastDLLMEngine, StepOutOfMemoryError

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
BLOCK = 8


@pytest.fixture
def net(model):
    return model()


def samples(engine, count, *, prompt=PROMPT, group="g", name="s", **fields):
    fields = {"temperature": 0.7, "max_new_tokens": 32, "block_length": BLOCK} | fields
    return [
        engine.request(f"{name}{i}", prompt, seed=i, group=group, **fields) for i in range(count)
    ]


def outputs(loop, engine, requests):
    drive = loop(engine)
    for slot, request in enumerate(requests):
        drive.join(slot, request)
    drive.run()
    assert not drive.errors
    return drive.outputs


def test_samples_that_join_together_send_their_prompt_once(net, loop):
    engine = D2FEngine(net, max_num_seqs=4)
    requests = samples(engine, 4)
    drive = loop(engine)
    for slot, request in enumerate(requests):
        drive.join(slot, request)
    drive.step()
    assert engine.num_tokens == len(PROMPT) + 4 * BLOCK
    assert engine.num_shared_tokens == 3 * len(PROMPT)
    drive.run()
    for request in requests:
        expected = outputs(loop, D2FEngine(net, max_num_seqs=1), [request])[request.id]
        assert drive.outputs[request.id] == expected
    assert len({output.tokens for output in drive.outputs.values()}) > 1, "samples differ"


def test_a_sample_that_joins_late_takes_the_prompt_of_who_is_there(net, loop):
    engine = D2FEngine(net, max_num_seqs=3)
    first, late, other = (
        *samples(engine, 2),
        *samples(engine, 1, prompt=PROMPT[1:], name="other"),
    )
    drive = loop(engine)
    drive.join(2, first)
    drive.step()
    drive.step()
    before = engine.num_tokens
    drive.join(0, late)
    drive.join(1, other)
    drive.step(0, 1)
    assert engine.num_tokens - before == BLOCK + len(PROMPT) - 1 + BLOCK
    assert engine.num_shared_tokens == len(PROMPT)
    drive.run()
    for request in (first, late, other):
        expected = outputs(loop, D2FEngine(net, max_num_seqs=1), [request])[request.id]
        assert drive.outputs[request.id] == expected


def test_the_cache_of_who_shares_is_what_it_would_have_computed(net, loop):
    engine, single = D2FEngine(net, max_num_seqs=2), D2FEngine(net, max_num_seqs=1)
    shared, own = loop(engine), loop(single)
    requests = samples(engine, 2)
    shared.join(0, requests[0])
    shared.join(1, requests[1])
    own.join(0, requests[1])
    shared.step()
    own.step()
    for ours, theirs in zip(engine._layers, single._layers, strict=True):
        torch.testing.assert_close(ours[1, : len(PROMPT)], theirs[0, : len(PROMPT)])


@pytest.mark.parametrize("group", ["g", None])
def test_without_a_group_or_a_prompt_that_stands_alone_everybody_computes(group, net, loop):
    engine = D2FEngine(net, max_num_seqs=2)
    drive = loop(engine)
    drive.join(0, samples(engine, 1, group=group, name="a")[0])
    drive.join(1, samples(engine, 1, group="h", name="b")[0])
    drive.step()
    assert engine.num_shared_tokens == 0
    assert engine.num_tokens == 2 * (len(PROMPT) + BLOCK)
    fast = FastDLLMEngine(net, max_num_seqs=2)
    drive = loop(fast)
    for slot, request in enumerate(samples(fast, 2, group=group)):
        drive.join(slot, request)
    drive.run()
    assert fast.num_shared_tokens == 0


@pytest.mark.parametrize("where", ["forward", "plan"])
def test_after_a_step_that_failed_the_prompt_is_computed_after_all(where, net, loop, monkeypatch):
    engine = D2FEngine(net, max_num_seqs=2)
    requests = samples(engine, 2)
    owner, name, error = {
        "forward": (net, "forward_packed", torch.OutOfMemoryError("no room")),
        "plan": (engine._decoder, "plan", MemoryError("no room on the host")),
    }[where]
    works = getattr(owner, name)

    def out_of_memory(*args):
        monkeypatch.setattr(owner, name, works)
        raise error

    monkeypatch.setattr(owner, name, out_of_memory)
    drive = loop(engine)
    drive.join(0, requests[0])
    drive.join(1, requests[1])
    with pytest.raises((StepOutOfMemoryError, MemoryError), match=r"out of memory|no room"):
        drive.step()
    assert engine.num_shared_tokens == 0
    drive.leave(0)  # who had it computed restarts elsewhere
    drive.joined.clear()
    drive.run()
    expected = outputs(loop, D2FEngine(net, max_num_seqs=1), [requests[1]])[requests[1].id]
    assert drive.outputs[requests[1].id] == expected


@pytest.fixture
def bad_token(net):
    """A token whose embedding is no number."""
    embedding = net.get_input_embeddings()
    weight = embedding.weight.data.clone()
    weight[9] = np.nan
    net.set_input_embeddings(torch.nn.Embedding.from_pretrained(weight))
    yield 9
    net.set_input_embeddings(embedding)


def test_a_prompt_that_breaks_takes_along_who_shares_it_and_nobody_else(net, loop, bad_token):
    engine = D2FEngine(net, max_num_seqs=3)
    requests = [*samples(engine, 2), *samples(engine, 1, prompt=[7, 7, 8], name="other")]
    assert bad_token in PROMPT
    drive = loop(engine)
    for slot, request in enumerate(requests):
        drive.join(slot, request)
    drive.run()
    assert set(drive.errors) == {"s0", "s1"}
    expected = outputs(loop, D2FEngine(net, max_num_seqs=1), [requests[2]])["other0"]
    assert drive.outputs["other0"] == expected
