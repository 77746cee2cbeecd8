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
from dllm_sched_hf.engine import D2FEngine, D2FRequest  # noqa: E402
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


@pytest.fixture(scope="session")
def golden_request() -> Callable[..., D2FRequest]:
    """``golden_request(record, entry, **overrides)``: a recorded request, in reference mode."""

    def build(stored: dict[str, Any], entry: dict[str, Any], **overrides: Any) -> D2FRequest:
        params = stored["params"]
        fields = {
            "prompt": entry["prompt"],
            "max_new_tokens": params["max_new_tokens"],
            "block_length": params["block_size"],
            "block_add_threshold": params["block_add_threshold"],
            "decoded_token_threshold": params["decoded_token_threshold"],
            "skip_threshold": params["skip_threshold"],
            "stop_token_ids": (stored["eos_token_id"],),
            "truncate_at_stop": False,
            "whole_blocks_only": True,
        }
        return D2FRequest(str(entry["id"]), **(fields | overrides))

    return build


class HandLoop:
    """Drives an engine without a scheduler: rows join, step and leave when the test says so."""

    def __init__(self, engine: D2FEngine) -> None:
        self.engine = engine
        self.rows: dict[int, Row] = {}
        self.joined: list[Row] = []
        self.outputs: dict[str, Any] = {}
        self.errors: dict[str, BaseException] = {}
        self.step_id = 0

    def join(self, slot: int, request: D2FRequest, *, resumed: bool = False, **knobs: Any) -> None:
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
def loop() -> Callable[[D2FEngine], HandLoop]:
    """``loop(engine)``: a :class:`HandLoop`."""
    return HandLoop
