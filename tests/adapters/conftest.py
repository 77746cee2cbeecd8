"""Golden models and records, and a loop that drives an engine by hand."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from dllm_sched.batch import Released, Row, StepBatch, StepOutcome  # noqa: E402
from dllm_sched.request import Phase  # noqa: E402
from dllm_sched_hf.decoder import DecodeRequest  # noqa: E402
from dllm_sched_hf.engine import (  # noqa: E402
    D2FEngine,
    D2FRequest,
    DecodingEngine,
    FastDLLMEngine,
    FastDLLMRequest,
    LLaDAEngine,
    LLaDARequest,
)
from dllm_sched_hf.loading import load_model  # noqa: E402

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # The models are tiny: a second thread costs more than it brings.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The recorded data: models, LoRAs, logits and decodings."""
    return GOLDEN


@functools.cache
def _model(name: str, lora: bool, merge: bool) -> Any:
    path = GOLDEN / name
    return load_model(
        path, f"{path}_lora" if lora else None, merge=merge, device="cpu", dtype="float32"
    )


@pytest.fixture(scope="session")
def model() -> Callable[..., Any]:
    """``model(name, lora=True, merge=True)``, each loaded once; tests must not change it."""

    def load(name: str = "tiny_mha", *, lora: bool = True, merge: bool = True) -> Any:
        return _model(name, lora, merge)

    return load


@functools.cache
def read_record(name: str) -> dict[str, Any]:
    """Return a recorded file."""
    record: dict[str, Any] = json.loads(gzip.decompress((GOLDEN / f"{name}.json.gz").read_bytes()))
    return record


@pytest.fixture(scope="session")
def record() -> Callable[[str], dict[str, Any]]:
    """``record(name)``: a recorded file."""
    return read_record


def _d2f(stored: dict[str, Any]) -> tuple[type[DecodeRequest], dict[str, Any]]:
    params = stored["params"]
    names = ("block_add_threshold", "decoded_token_threshold", "skip_threshold", "max_new_tokens")
    fields = {name: params[name] for name in names}
    return D2FRequest, fields | {"block_length": params["block_size"], "whole_blocks_only": True}


def _canvas(stored: dict[str, Any]) -> tuple[type[DecodeRequest], dict[str, Any]]:
    params = stored["params"]
    fields = {"max_new_tokens": params["gen_length"], "block_length": params["block_length"]}
    if stored["kind"] == "llada":
        return LLaDARequest, fields | {name: params[name] for name in ("steps", "cfg_scale")}
    rule = next((name for name in ("threshold", "factor") if params[name] is not None), "steps")
    return FastDLLMRequest, fields | {"cache": stored["cache"], rule: params[rule]}


@pytest.fixture(scope="session")
def golden_request() -> Callable[..., Any]:
    """``golden_request(record, entry, **overrides)``: a recorded request, in reference mode."""

    def build(stored: dict[str, Any], entry: dict[str, Any], **overrides: Any) -> DecodeRequest:
        request_type, fields = (_d2f if stored["kind"] == "d2f" else _canvas)(stored)
        fields |= {
            "prompt": entry["prompt"],
            "stop_token_ids": (stored["eos_token_id"],),
            "truncate_at_stop": False,
        }
        return request_type(str(entry["id"]), **(fields | overrides))

    return build


@pytest.fixture(scope="session")
def golden_engine(model: Callable[..., Any]) -> Callable[..., DecodingEngine]:
    """``golden_engine(record, max_num_seqs, net=None, **options)``: a tracing engine for it."""
    engines = {"d2f": D2FEngine, "fast_dllm": FastDLLMEngine, "llada": LLaDAEngine}

    def build(
        stored: dict[str, Any], max_num_seqs: int, net: Any = None, **options: Any
    ) -> DecodingEngine:
        if net is None:
            net = model(stored["model"], lora=stored["lora"])
        engine_type = engines[stored["kind"]]
        return engine_type(net, max_num_seqs=max_num_seqs, trace=True, **options)

    return build


@pytest.fixture(scope="session")
def assert_recorded() -> Callable[[Any, dict[str, Any]], None]:
    """``assert_recorded(output, entry)``: tokens, forwards and every step are the recorded ones."""

    def check(output: Any, entry: dict[str, Any]) -> None:
        assert list(output.tokens) == entry["output"]
        assert output.num_forwards == entry["nfe" if "nfe" in entry else "n_forward"]
        assert output.num_blocks == entry.get("n_blocks", output.num_blocks)
        assert output.first_stop_step == entry.get("eos_step", output.first_stop_step)
        assert list(output.trace) == entry["trace"]

    return check


class HandLoop:
    """Drives an engine without a scheduler: rows join, step and leave when the test says so."""

    def __init__(self, engine: DecodingEngine) -> None:
        self.engine = engine
        self.rows: dict[int, Row] = {}
        self.joined: list[Row] = []
        self.outputs: dict[str, Any] = {}
        self.errors: dict[str, BaseException] = {}
        self.step_id = 0

    def join(
        self, slot: int, request: DecodeRequest, *, resumed: bool = False, **knobs: Any
    ) -> None:
        row = Row(slot, request, Phase.PREFILL, 0, knobs, resumed)
        self.rows[slot] = row
        self.joined.append(row)

    def leave(self, slot: int, *, kept: bool = False) -> None:
        row = self.rows.pop(slot)
        self.joined = [new for new in self.joined if new.slot != slot]
        self.engine.release([Released(slot, row.request, None, kept)])

    def step(self, *slots: int) -> StepOutcome:
        """Run one step of the given slots, or of all."""
        rows = tuple(self.rows[slot] for slot in slots or sorted(self.rows))
        joined = tuple(row for row in self.joined if row in rows)
        outcome = self.engine.run(StepBatch(self.step_id, 0.0, rows, joined))
        self.step_id += 1
        self.joined = [row for row in self.joined if row not in joined]
        for change in outcome.phases:
            self.rows[change.slot] = self.rows[change.slot]._replace(phase=change.phase)
        for end in outcome.finished:
            self.outputs[self.rows[end.slot].request.id] = end.output
            self.leave(end.slot)
        for failure in outcome.failed:
            self.errors[self.rows[failure.slot].request.id] = failure.error
            self.leave(failure.slot)
        return outcome

    def run(self, max_steps: int = 1000) -> None:
        """Step until every row is gone."""
        for _ in range(max_steps):
            if not self.rows:
                return
            self.step()
        raise AssertionError(f"rows {sorted(self.rows)} still run after {max_steps} steps")


@pytest.fixture
def loop() -> Callable[[DecodingEngine], HandLoop]:
    """``loop(engine)``: a :class:`HandLoop`."""
    return HandLoop
