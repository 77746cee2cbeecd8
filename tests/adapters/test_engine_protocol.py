"""The D2F engine keeps the step protocol, whatever its rows do."""

import random

import pytest

torch = pytest.importorskip("torch")

from dllm_sched.testing import check_engine  # noqa: E402
from dllm_sched_hf import D2FEngine, D2FRequest, LLaDAConfig, LLaDAModelLM  # noqa: E402

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
