"""Load LLaDA with or without a D2F LoRA, and refuse what would run wrongly.

transformers and PEFT only warn when a tensor is missing and fill it with random numbers, and PEFT
puts an adapter on whatever base it is given. Both produce fluent nonsense; here both are errors.

Source: own derivation from reported failures (a LoRA put on the base instead of the instruct model
lost 20 points; an evaluation ran without its LoRA).
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from transformers.utils.logging import set_tqdm_hook

from dllm_sched.errors import ConfigError
from dllm_sched_hf.modeling_llada import LLaDAConfig, LLaDAModelLM

__all__ = ["load_model", "resolve_device", "resolve_dtype"]

_LORA_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_MODULES = {"attn_out", "k_proj", "q_proj", "v_proj"}


def resolve_device(device: str | torch.device | None = None) -> torch.device:
    """Return the device to run on; None = CUDA if there is any, else CPU.

    Raises:
        ConfigError: If the name is no device, or one that cannot be used here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: {device!r} is not a torch device, e.g. cpu or cuda") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: {device!r} is not available here: use cpu")
    try:
        torch.zeros(1, device=found).cpu()  # torch knows names that it was not built for
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ConfigError(
            f"device: {device!r} is not available here ({reason}): use cpu"
        ) from error
    return found


def resolve_dtype(
    dtype: str | torch.dtype | None, device: torch.device | None = None
) -> torch.dtype:
    """Return the dtype to compute in; None = bfloat16 on CUDA, float32 elsewhere.

    Raises:
        ConfigError: If the name is no floating-point dtype of torch.
    """
    if dtype is None:
        return torch.bfloat16 if device is not None and device.type == "cuda" else torch.float32
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype: {dtype!r} is not one of float32, bfloat16, float16, float64")
    return found


def load_model(
    model: str | os.PathLike[str],
    lora: str | os.PathLike[str] | None = None,
    *,
    merge: bool = True,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    base_name: str | None = None,
    allow_base_mismatch: bool = False,
) -> LLaDAModelLM:
    """Load a checkpoint, put a LoRA on it, and move it to where it will run.

    Args:
        model: Directory or hub id of a checkpoint in the published layout (one file or shards). A
            ``Path`` is always a directory; so is a string that cannot be a hub id.
        lora: Directory or hub id of a PEFT LoRA, or None; told apart in the same way.
        merge: Add the LoRA into the weights (faster); False keeps it beside them.
        device: None = CUDA if present, else CPU.
        dtype: Name or torch dtype; None = bfloat16 on CUDA, float32 elsewhere.
        base_name: What ``model`` is, where its path does not tell: compared with the LoRA's
            ``base_model_name_or_path``.
        allow_base_mismatch: Accept a LoRA that names another base.

    Returns:
        The model in eval mode, without gradients.

    Raises:
        ConfigError: A missing, truncated or mis-shaped file, a tensor that is missing or left
            over, a LoRA for another base or for other modules; names file and fix.
    """
    where = resolve_device(device)
    for field, flag in (("merge", merge), ("allow_base_mismatch", allow_base_mismatch)):
        if not isinstance(flag, bool):
            raise ConfigError(f"{field} must be True or False, got {flag!r:.80}")
    if base_name is not None and not isinstance(base_name, str):
        raise ConfigError(f"base_name must be a str or None, got {base_name!r:.80}")
    _check_place("model", model)
    if lora is not None:
        _check_place("lora", lora)
    with _quiet():
        base = _load_base(model, resolve_dtype(dtype, where))
        if lora is not None:
            _check_lora(lora, model, base_name, allow_base_mismatch=allow_base_mismatch)
            base = _add_lora(base, lora, merge=merge)
    return base.requires_grad_(False).to(where).eval()


def _check_place(field: str, place: object) -> None:
    """Refuse what is neither a directory nor possibly a hub id: nobody looks it up on the hub."""
    if not isinstance(place, str | os.PathLike) or not str(place):
        raise ConfigError(f"{field} must be a directory or a hub id, got {place!r:.80}")
    if Path(place).is_dir():
        return
    name = str(place)
    is_path = isinstance(place, os.PathLike) or name.startswith((".", "~", "/"))
    if is_path or "\\" in name or name.count("/") > 1 or name.endswith("/"):
        raise ConfigError(f"{field}: no directory {name!r}; give a directory or a hub id")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence others while they load, and leave everything as it was.

    transformers draws a bar over the tensors and reports missing ones as a reason to train them
    (ours is an error); an unreachable hub logs every retry before the error that says so.
    Progress of downloads stays visible.
    """
    noise = [
        logging.getLogger(name)
        for name in ("transformers.modeling_utils", "huggingface_hub.utils._http")
    ]
    muted = [logger.disabled for logger in noise]
    hook = set_tqdm_hook(lambda bar, args, options: bar(*args, **{**options, "disable": True}))
    for logger in noise:
        logger.disabled = True
    try:
        yield
    finally:
        set_tqdm_hook(hook)
        for logger, was in zip(noise, muted, strict=True):
            logger.disabled = was


def _load_base(model: str | os.PathLike[str], dtype: torch.dtype) -> LLaDAModelLM:
    path = Path(model)
    if path.is_dir():
        _check_config_file(path / "config.json")
    try:
        # ignore_mismatched_sizes: so that shapes come back as a list that the error can name.
        base, info = LLaDAModelLM.from_pretrained(
            os.fspath(model), dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except ConfigError:
        raise
    except (SafetensorError, EOFError) as error:
        raise ConfigError(
            f"model {str(model)!r}: a weight file is truncated or damaged ({error}): fetch it again"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"model {str(model)!r}: cannot be loaded: {_first_line(error)}"
        ) from error
    _refuse(
        f"model {str(model)!r}",
        {
            "tensors missing from the checkpoint": info["missing_keys"],
            "tensors that LLaDA does not have": info["unexpected_keys"],
            "tensors whose shape is not the one config.json asks for": info["mismatched_keys"],
        },
    )
    return base


def _check_config_file(path: Path) -> None:
    config = _read_json(path, "model")
    kind = config.get("model_type")
    if kind != LLaDAConfig.model_type:
        raise ConfigError(f"{path}: model_type is {kind!r}, this adapter runs 'llada' only")


def _read_json(path: Path, field: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{field}: {path} is missing") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: {path} is not readable JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{field}: {path} must hold a JSON object")
    return found


def _check_lora(
    lora: str | os.PathLike[str],
    model: str | os.PathLike[str],
    base_name: str | None,
    *,
    allow_base_mismatch: bool,
) -> None:
    path = Path(lora)
    if path.is_dir():
        _read_json(path / "adapter_config.json", "lora")
        if not any((path / name).is_file() for name in _LORA_FILES):
            raise ConfigError(f"lora: {path} holds none of {', '.join(_LORA_FILES)}")
    try:
        config = PeftConfig.from_pretrained(os.fspath(lora))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"lora {str(lora)!r}: cannot be read: {_first_line(error)}") from error
    targets = getattr(config, "target_modules", None)
    if not isinstance(targets, set | list | tuple) or not set(targets) <= _MODULES:
        raise ConfigError(
            f"lora {str(lora)!r}: target_modules {targets!r} are not among {sorted(_MODULES)}"
        )
    named = config.base_model_name_or_path
    if not allow_base_mismatch and not _same_base(named, base_name or os.fspath(model)):
        raise ConfigError(
            f"lora {str(lora)!r}: base_model_name_or_path is {named!r}, but the loaded model is "
            f"{base_name or str(model)!r}: load that base, or say what it is with base_name=, or "
            "pass allow_base_mismatch=True"
        )


def _same_base(named: str | None, loaded: str) -> bool:
    """Whether two names mean one model: equal ids, one directory, or one final component.

    The last rule is for local copies (``/models/LLaDA-8B-Instruct``); it still tells Base from
    Instruct. Between two hub ids the owner counts as well.
    """
    if not named:
        return False
    first, second = (name.rstrip("/\\") for name in (named, loaded))
    if first == second:
        return True
    paths = Path(first), Path(second)
    if all(path.exists() for path in paths):
        return paths[0].samefile(paths[1])
    if all(_is_hub_id(name) for name in (first, second)):
        return False
    return paths[0].name == paths[1].name


def _is_hub_id(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and not path.exists() and len(path.parts) == 2


def _add_lora(base: LLaDAModelLM, lora: str | os.PathLike[str], *, merge: bool) -> LLaDAModelLM:
    try:
        with warnings.catch_warnings():
            # PEFT asks transformers for an attribute by a name that newer releases deprecate.
            warnings.simplefilter("ignore", FutureWarning)
            config = PeftConfig.from_pretrained(os.fspath(lora))
            config.inference_mode = True
            wrapped = PeftModel(base, config)
            # The explicit device keeps PEFT from moving the adapter to an accelerator by itself.
            result = wrapped.load_adapter(os.fspath(lora), "default", torch_device="cpu")
    except (SafetensorError, EOFError) as error:
        raise ConfigError(
            f"lora {str(lora)!r}: the weight file is truncated or damaged ({error}): fetch it again"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(f"lora {str(lora)!r}: cannot be loaded: {_first_line(error)}") from error
    _refuse(
        f"lora {str(lora)!r}",
        {
            "tensors missing from the adapter": result.missing_keys,
            "tensors that the model has no place for": result.unexpected_keys,
        },
    )
    return wrapped.merge_and_unload() if merge else wrapped.get_base_model()


def _refuse(where: str, problems: dict[str, Iterable[Any]]) -> None:
    """Raise if any of the named tensors is a problem."""
    for what, names in problems.items():
        listed = sorted(str(name[0] if isinstance(name, tuple) else name) for name in names)
        if listed:
            raise ConfigError(
                f"{where}: {len(listed)} {what}: {', '.join(listed[:3])}"
                f"{', ...' if len(listed) > 3 else ''}; check that the config and the weight files "
                "belong together and are complete"
            )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__
