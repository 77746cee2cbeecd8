"""Check a device, a checkpoint and this engine against recorded decodings.

    python -m dllm_sched_hf.parity DIR [--batch-size N] [--policy NAME] [--device D] [--dtype T]

``DIR`` holds files of the golden format: ``forward_<model>.npz`` (logits), ``*.json`` or
``*.json.gz`` (requests with their full traces), and the checkpoints that they name: ``<model>/``
and ``<model>_lora/``. Every logit array must agree within 5e-4 and every request (D2F, Fast-dLLM,
plain LLaDA) in its tokens, number of forwards, blocks and complete trace: alone, and in mixed
batches with a random order of arrival and late joiners. Kinds that this adapter does not decode are
listed.

Exit status: 0 everything agrees, 1 something differs (the first difference of each is named), 2 the
directory or an argument is unusable, or nothing could be compared. Nothing is ever downloaded.
Only float32 and float64 can be expected to agree.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch

from dllm_sched import Scheduler
from dllm_sched.errors import ConfigError
from dllm_sched.policies import Policy, presets
from dllm_sched.request import FinishReason
from dllm_sched_hf.d2f import D2FRequest
from dllm_sched_hf.decoder import DecodeRequest
from dllm_sched_hf.engine import (
    D2FEngine,
    DecodeOutput,
    DecodingEngine,
    FastDLLMEngine,
    LLaDAEngine,
)
from dllm_sched_hf.fast_dllm import FastDLLMRequest
from dllm_sched_hf.llada import LLaDARequest
from dllm_sched_hf.loading import load_model, resolve_device, resolve_dtype
from dllm_sched_hf.modeling_llada import LLaDAModelLM, block_causal_mask

__all__ = ["Check", "check_directory", "main", "serve_mixed"]

LOGIT_TOLERANCE = 5e-4

_POLICIES: dict[str, Callable[[int], Policy]] = {
    "block_refill": presets.block_refill,
    "continuous": presets.continuous,
    "fixed_fill": lambda batch_size: presets.fixed_fill(batch_size, timeout_s=5.0),
    "per_request": lambda _batch_size: presets.per_request(),
}

_ENGINES: dict[str, type[DecodingEngine]] = {
    "d2f": D2FEngine,
    "fast_dllm": FastDLLMEngine,
    "llada": LLaDAEngine,
}

# What damaged npz and gzip files raise; an npy file under the name of an npz is a TypeError.
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    NotImplementedError,
    RecursionError,
    zipfile.BadZipFile,
    zlib.error,
)


class Check(NamedTuple):
    """The result of one comparison."""

    file: str
    what: str  #: e.g. ``logits_lora`` or ``batch 8, continuous``
    num_compared: int
    differences: tuple[str, ...] = ()  #: the first difference of each thing that differs
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


@attrs.define
class _Run:
    """What all checks of one directory share."""

    directory: Path
    device: torch.device
    dtype: torch.dtype
    _models: dict[tuple[str, str | None, bool], LLaDAModelLM] = attrs.field(factory=dict)

    def model(self, file: str, name: str, lora: str | None, *, merge: bool = True) -> LLaDAModelLM:
        """Return a model of the directory that ``file`` names, loaded once."""
        key = (name, lora, merge)
        if key not in self._models:
            for field, wanted in (("model", name), ("lora", lora)):
                if wanted is not None and not (wanted and (self.directory / wanted).is_dir()):
                    raise ConfigError(
                        f"{file}: {field} {wanted!r}: no directory {self.directory / wanted}"
                    )
            # The directory itself says which LoRA belongs to which model.
            self._models[key] = load_model(
                self.directory / name,
                None if lora is None else self.directory / lora,
                merge=merge,
                device=self.device,
                dtype=self.dtype,
                allow_base_mismatch=True,
            )
        return self._models[key]


def check_directory(
    directory: str | Path,
    *,
    batch_size: int = 8,
    policy: str = "continuous",
    device: str | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> Iterator[Check]:
    """Run every file of a directory and yield one result per comparison.

    Args:
        directory: Files of the golden format and the checkpoints that they name.
        batch_size: Slots of the mixed batches, 1 to 4096.
        policy: ``block_refill``, ``continuous``, ``fixed_fill`` or ``per_request``.
        device: None = CUDA if present, else CPU.
        dtype: To compute in.
        seed: Of the arrival order.

    Raises:
        ConfigError: If an argument or a file is unusable; names it.
    """
    if policy not in _POLICIES:
        raise ConfigError(f"policy: {policy!r} is not one of {', '.join(_POLICIES)}")
    if not 1 <= batch_size <= 4096:  # more rows than anybody has recorded, and they take memory
        raise ConfigError(f"batch-size: must be in 1..4096, got {batch_size}")
    root = Path(directory)
    if not root.is_dir():
        raise ConfigError(f"{root}: no such directory")
    run = _Run(root, resolve_device(device), resolve_dtype(dtype))
    forwards = sorted(root.glob("forward_*.npz"))
    records = [
        path
        for path in sorted((*root.glob("*.json"), *root.glob("*.json.gz")))
        if not path.name.startswith("SUMMARY.")
    ]
    if not forwards and not records:
        raise ConfigError(f"{root}: holds no forward_*.npz and no *.json or *.json.gz")
    for path in forwards:
        compared = tuple(_check_forward(run, path))
        yield from compared or (Check(path.name, "logits", 0, note="holds nothing to compare"),)
    for path in records:
        record = _read_record(path)
        kind = _field(path.name, record, "kind", str)
        if kind in _ENGINES:
            yield from _check_decoding(run, path.name, record, batch_size, policy, seed)
        else:
            yield Check(path.name, kind, 0, note="not decoded yet")


# -- logits


def _check_forward(run: _Run, path: Path) -> Iterator[Check]:
    name = path.stem.removeprefix("forward_")
    lora = f"{name}_lora"
    try:
        with np.load(path) as stored:
            arrays = {key: stored[key] for key in stored.files}
    except _UNREADABLE as error:
        raise ConfigError(f"{path}: not a readable npz file: {error}") from error
    variants: dict[str, Callable[[], LLaDAModelLM]] = {
        "logits": lambda: run.model(path.name, name, None),
        "logits_lora": lambda: run.model(path.name, name, lora, merge=False),
        "logits_lora_merged": lambda: run.model(path.name, name, lora),
    }
    numbers = sorted(key.removeprefix("ids_") for key in arrays if key.startswith("ids_"))
    for what, model in variants.items():
        pairs = [
            (f"{what}_{number}", _logits(model(), _ids(path.name, arrays, f"ids_{number}", model)))
            for number in numbers
            if f"{what}_{number}" in arrays
        ]
        if pairs:
            yield _compare_arrays(path.name, what, arrays, pairs)
    base, beside = variants["logits"], variants["logits_lora"]
    hidden = [
        (key, _hidden(base(), _ids(path.name, arrays, key.replace("hidden_", "ids_", 1), base)))
        for key in sorted(arrays)
        if key.startswith("hidden_")
    ]
    if hidden:
        yield _compare_arrays(path.name, "hidden", arrays, hidden)
    block_causal = []
    for key in sorted(arrays):
        if not key.startswith("bc_logits_lora_"):
            continue
        number = key.removeprefix("bc_logits_lora_")
        ids = _ids(path.name, arrays, f"bc_ids_{number}", beside)
        try:
            prompt_len, block_length, _ = (int(value) for value in arrays[f"bc_meta_{number}"])
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{path.name}: {key} needs bc_meta_{number} of three ints: {error}"
            ) from error
        if prompt_len < 0 or block_length < 1:
            raise ConfigError(
                f"{path.name}: bc_meta_{number}: prompt length must be >= 0 and block length "
                f">= 1, got {prompt_len} and {block_length}"
            )
        mask = block_causal_mask(prompt_len, block_length, len(ids), device=run.device)
        block_causal.append((key, _logits(beside(), ids, mask)))
    if block_causal:
        yield _compare_arrays(path.name, "bc_logits_lora", arrays, block_causal)


def _ids(file: str, arrays: dict[str, Any], key: str, model: Callable[[], LLaDAModelLM]) -> Any:
    """Return stored token ids that the model can run."""
    ids, config = arrays.get(key), model().config
    if (
        ids is None
        or ids.dtype.kind not in "iu"
        or ids.ndim != 1
        or not 1 <= len(ids) <= config.max_sequence_length
        or ids.min() < 0
        or ids.max() >= config.vocab_size
    ):
        raise ConfigError(
            f"{file}: {key} must be there and hold 1 to {config.max_sequence_length} token ids "
            f"from 0 to {config.vocab_size - 1}"
        )
    return ids.astype(np.int64)


@torch.inference_mode()
def _logits(model: LLaDAModelLM, ids: Any, mask: torch.Tensor | None = None) -> Any:
    batch = torch.from_numpy(ids).to(model.device)[None]
    return model(batch, mask).logits[0].float().cpu().numpy()


@torch.inference_mode()
def _hidden(model: LLaDAModelLM, ids: Any) -> Any:
    batch = torch.from_numpy(ids).to(model.device)[None]
    states = model(batch, output_hidden_states=True).hidden_states
    return torch.cat(states).float().cpu().numpy()


def _compare_arrays(
    file: str, what: str, arrays: dict[str, Any], pairs: Sequence[tuple[str, Any]]
) -> Check:
    differences = []
    largest = 0.0
    for key, got in pairs:
        expected = arrays[key]
        if expected.dtype.kind != "f":
            raise ConfigError(f"{file}: {key} must hold floats, got {expected.dtype}")
        if expected.shape != got.shape:
            differences.append(f"{key}: expected shape {expected.shape}, got {got.shape}")
            continue
        error = np.abs(expected - got)
        largest = max(largest, float(error.max()))
        wrong = ~(error <= LOGIT_TOLERANCE)  # so that NaN counts
        if wrong.any():
            at = tuple(int(index[0]) for index in np.nonzero(wrong))
            differences.append(f"{key}{list(at)}: expected {expected[at]:.6g}, got {got[at]:.6g}")
    return Check(file, what, len(pairs), tuple(differences), f"largest difference {largest:.1e}")


# -- decoding


def _check_decoding(
    run: _Run, file: str, record: dict[str, Any], batch_size: int, policy: str, seed: int
) -> Iterator[Check]:
    engine_type = _ENGINES[record["kind"]]
    name = _field(file, record, "model", str)
    uses = record.get("lora")
    lora = uses if isinstance(uses, str) else f"{name}_lora" if uses else None
    model = run.model(file, name, lora)
    mask_id = _field(file, record, "mask_token_id", int)
    if mask_id != model.config.mask_token_id:
        raise ConfigError(
            f"{file}: mask_token_id {mask_id} is not that of {name}/config.json, "
            f"{model.config.mask_token_id}"
        )
    entries = _field(file, record, "requests", list)
    if not entries:
        yield Check(file, record["kind"], 0, note="holds no requests")
        return
    cases = [_case(file, record, entry) for entry in entries]
    seen: set[str] = set()
    for entry in entries:
        if str(entry["id"]) in seen:
            raise ConfigError(f"{file}: request {entry['id']}: the id is used twice")
        seen.add(str(entry["id"]))
    runnable = [request for request, _ in cases if request is not None]
    max_len = max((request.max_total_tokens for request in runnable), default=1)
    max_len = min(max_len, model.config.max_sequence_length)

    def compare(what: str, outputs: dict[str, Any]) -> Check:
        differences = [
            f"request {entry['id']}: {difference}"
            for request, entry in cases
            if (difference := _first_difference(entry, _result(request, outputs))) is not None
        ]
        return Check(file, what, len(cases), tuple(differences))

    alone = engine_type(model, max_num_seqs=1, max_len=max_len, trace=True)
    for request in runnable:
        try:
            alone.check(request)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error
    outputs: dict[str, Any] = {}
    for request in runnable:
        outputs |= serve_mixed(alone, [request], presets.per_request(), random.Random(seed))
    yield compare("alone", outputs)
    mixed = engine_type(model, max_num_seqs=batch_size, max_len=max_len, trace=True)
    outputs = serve_mixed(mixed, runnable, _POLICIES[policy](batch_size), random.Random(seed))
    yield compare(f"batch {batch_size}, {policy}", outputs)


def serve_mixed(
    engine: DecodingEngine, requests: Sequence[DecodeRequest], policy: Policy, rng: random.Random
) -> dict[str, DecodeOutput | BaseException | None]:
    """Serve requests that arrive in random order, most of them while others run.

    Time is virtual: a step takes one second.

    Returns:
        By request id, the output, or the error that ended it.
    """
    sched = Scheduler(policy=policy, capacity=engine.capacity())
    waiting = rng.sample(list(requests), len(requests))
    results: dict[str, DecodeOutput | BaseException | None] = {}
    now = 0.0
    while waiting or sched.has_work():
        for _ in range(min(len(waiting), rng.choice((0, 0, 1, 3)))):
            sched.submit(waiting.pop(), now=now)
        updates = [sched.next_step(now=now)]
        now += 1.0
        if (batch := updates[0].batch) is not None:
            outcome = engine.run(batch)
            updates.append(sched.complete_step(batch, outcome, now=now))
        elif not waiting:
            updates.append(sched.drain(now=now))
        for update in updates:
            engine.release(update.released)
            for end in update.finished:
                ok = end.reason in {FinishReason.EOS, FinishReason.LENGTH}
                results[end.request.id] = end.output if ok else end.error
    return results


def _case(
    file: str, record: dict[str, Any], entry: Any
) -> tuple[DecodeRequest | None, dict[str, Any]]:
    """Return the request of a stored entry; None if its budget holds no block."""
    if not isinstance(entry, dict) or "id" not in entry:
        raise ConfigError(f"{file}: requests: each must be an object with an id, got {entry!r:.80}")
    if not isinstance(entry["id"], str | int) or isinstance(entry["id"], bool) or entry["id"] == "":
        raise ConfigError(
            f"{file}: requests: id must be an int or a non-empty str, got {entry['id']!r:.80}"
        )
    where = f"{file}: request {entry['id']}"
    for field in ("prompt", "output", "trace"):
        _field(where, entry, field, list)
    _field(where, entry, _count_of(entry), int)
    for number, step in enumerate(entry["trace"], 1):
        if not isinstance(step, dict):
            raise ConfigError(f"{where}: trace: step {number} must be an object, got {step!r:.80}")
    build = _d2f_request if record["kind"] == "d2f" else _canvas_request
    try:
        return build(file, record, entry, _field(file, record, "params", dict)), entry
    except ConfigError as error:
        named = str(error).startswith(f"{file}: ")
        raise error if named else ConfigError(f"{file}: {error}") from error


def _d2f_request(
    file: str, record: dict[str, Any], entry: dict[str, Any], params: dict[str, Any]
) -> DecodeRequest | None:
    block_length = _field(f"{file}: params", params, "block_size", int)
    budget = _field(f"{file}: params", params, "max_new_tokens", int)
    if 0 <= budget < block_length:
        return None
    return D2FRequest(
        str(entry["id"]),
        prompt=entry["prompt"],
        max_new_tokens=budget,
        block_length=block_length,
        temperature=params.get("temperature", 0.0),
        block_add_threshold=_field(file, params, "block_add_threshold", (int, float)),
        decoded_token_threshold=_field(file, params, "decoded_token_threshold", (int, float)),
        skip_threshold=_field(file, params, "skip_threshold", (int, float)),
        stop_token_ids=(_field(file, record, "eos_token_id", int),),
        truncate_at_stop=False,
        whole_blocks_only=True,
    )


def _canvas_request(
    file: str, record: dict[str, Any], entry: dict[str, Any], params: dict[str, Any]
) -> DecodeRequest:
    """Return the request of a Fast-dLLM or plain LLaDA entry."""
    where = f"{file}: params"
    fields: dict[str, Any] = {
        "prompt": entry["prompt"],
        "max_new_tokens": _field(where, params, "gen_length", int),
        "block_length": _field(where, params, "block_length", int),
        "temperature": params.get("temperature", 0.0),
        "stop_token_ids": (_field(file, record, "eos_token_id", int),),
        "truncate_at_stop": False,
    }
    steps = _field(where, params, "steps", int)
    if record["kind"] == "llada":
        scale = params.get("cfg_scale", 0.0)
        return LLaDARequest(str(entry["id"]), steps=steps, cfg_scale=scale, **fields)
    rules: dict[str, Any] = {name: params.get(name) for name in ("threshold", "factor")}
    if rules == {"threshold": None, "factor": None}:
        rules = {"steps": steps}
    cache = _field(file, record, "cache", str)
    return FastDLLMRequest(str(entry["id"]), cache=cache, **rules, **fields)


def _count_of(entry: dict[str, Any]) -> str:
    """Return under which name an entry holds its number of forwards."""
    return "nfe" if "nfe" in entry else "n_forward"


def _result(
    request: DecodeRequest | None, outputs: dict[str, Any]
) -> DecodeOutput | BaseException | None:
    if request is None:
        return DecodeOutput((), 0, 0, None, ())
    return outputs.get(request.id)


def _first_difference(
    expected: dict[str, Any], got: DecodeOutput | BaseException | None
) -> str | None:
    """Name the first thing that differs: by step, then in the result; None if nothing does."""
    if not isinstance(got, DecodeOutput):
        return f"no result: {got}"
    trace = got.trace or ()
    for number, (step, ours) in enumerate(zip(expected["trace"], trace, strict=False), 1):
        for key, value in step.items():
            if value != ours.get(key):
                return f"step {number}: {key}: expected {value}, got {ours.get(key)}"
    count = _count_of(expected)
    for what, want, have in (
        (count, expected[count], got.num_forwards),
        ("n_blocks", expected.get("n_blocks", got.num_blocks), got.num_blocks),
        ("eos_step", expected.get("eos_step", got.first_stop_step), got.first_stop_step),
        ("trace length", len(expected["trace"]), len(trace)),
        ("output length", len(expected["output"]), len(got.tokens)),
    ):
        if want != have:
            return f"{what}: expected {want}, got {have}"
    for index, (want, have) in enumerate(zip(expected["output"], got.tokens, strict=True)):
        if want != have:
            return f"output[{index}]: expected {want}, got {have}"
    return None


# -- files and the command line


def _read_record(path: Path) -> dict[str, Any]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        record = json.loads(raw)
    except _UNREADABLE as error:
        raise ConfigError(f"{path}: not readable JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return record


def _field(where: str, record: dict[str, Any], name: str, kind: Any) -> Any:
    value = record.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = getattr(kind, "__name__", "number")
        raise ConfigError(f"{where}: {name} must be a {expected}, got {value!r:.80}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dllm_sched_hf.parity",
        description="Compare logits, tokens, forwards and traces with recorded decodings.",
    )
    parser.add_argument("directory", help="recorded files and the checkpoints that they name")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of the mixed batches")
    parser.add_argument("--policy", default="continuous", help=", ".join(_POLICIES))
    parser.add_argument("--device", help="default: cuda if present, else cpu")
    parser.add_argument("--dtype", default="float32", help="default: float32")
    parser.add_argument("--seed", type=int, default=0, help="of the arrival order")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args(argv)
    checks = []
    try:
        for check in check_directory(
            args.directory,
            batch_size=args.batch_size,
            policy=args.policy,
            device=args.device,
            dtype=args.dtype,
            seed=args.seed,
        ):
            checks.append(check)
            if not args.json:
                _print(check)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    vacuous = not any(check.num_compared for check in checks)
    ok = all(check.ok for check in checks) and not vacuous
    if args.json:
        listed = [{**check._asdict(), "ok": check.ok} for check in checks]
        print(json.dumps({"ok": ok, "checks": listed}))
    elif not vacuous:
        wrong = sum(not check.ok for check in checks)
        print("everything agrees" if ok else f"{wrong} of {len(checks)} checks differ")
    if vacuous:
        print(
            f"error: {args.directory}: nothing was checked: no file holds logits or requests",
            file=sys.stderr,
        )
        return 2
    return 0 if ok else 1


def _print(check: Check) -> None:
    if check.num_compared == 0:
        print(f"----  {check.file}: {check.what}: {check.note}")
        return
    status = "ok  " if check.ok else "DIFF"
    agree = check.num_compared - len(check.differences)
    note = f" ({check.note})" if check.note else ""
    print(f"{status}  {check.file}: {check.what}: {agree}/{check.num_compared} agree{note}")
    for difference in check.differences:
        print(f"        {difference}")


if __name__ == "__main__":
    sys.exit(main())
