"""LLaDA + D2F on transformers and PEFT: batched denoising steps for ``dllm_sched``.

Importing this package is cheap; torch comes in with the first name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dllm_sched_hf.modeling_llada import (
        LLaDAConfig as LLaDAConfig,
        LLaDAModelLM as LLaDAModelLM,
        block_causal_mask as block_causal_mask,
    )

_HOME = {
    "LLaDAConfig": "modeling_llada",
    "LLaDAModelLM": "modeling_llada",
    "block_causal_mask": "modeling_llada",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        raise ModuleNotFoundError(
            f"dllm_sched_hf needs {error.name!r}: install dllm-sched[hf]", name=error.name
        ) from error


def __dir__() -> list[str]:
    return list(__all__)


_EXTRA = {"numpy", "peft", "safetensors", "torch", "transformers"}
