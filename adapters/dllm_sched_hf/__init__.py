"""LLaDA and DiffusionGemma on transformers: batched denoising steps for ``dllm_sched``.

Three decoders behind one engine: D2F, Fast-dLLM, and plain LLaDA generation. Beside it, an engine
for DiffusionGemma as transformers has it.

Importing this package is cheap; torch comes in with the first name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dllm_sched_hf.decoder import Commits, Decoder, DecodeRequest, StepPlan
    from dllm_sched_hf.diffusion_gemma import DiffusionGemmaEngine, DiffusionGemmaRequest
    from dllm_sched_hf.engine import (
        D2FEngine,
        D2FOutput,
        D2FRequest,
        DecodeOutput,
        DecodingEngine,
        DeviceLostError,
        FastDLLMEngine,
        FastDLLMRequest,
        LLaDAEngine,
        LLaDARequest,
        NonFiniteLogitsError,
        StepOutOfMemoryError,
    )
    from dllm_sched_hf.graphs import GraphStats, capture_cuda
    from dllm_sched_hf.loading import load_model
    from dllm_sched_hf.modeling_llada import LLaDAConfig, LLaDAModelLM, block_causal_mask

__all__ = [
    "Commits",
    "D2FEngine",
    "D2FOutput",
    "D2FRequest",
    "DecodeOutput",
    "DecodeRequest",
    "Decoder",
    "DecodingEngine",
    "DeviceLostError",
    "DiffusionGemmaEngine",
    "DiffusionGemmaRequest",
    "FastDLLMEngine",
    "FastDLLMRequest",
    "GraphStats",
    "LLaDAConfig",
    "LLaDAEngine",
    "LLaDAModelLM",
    "LLaDARequest",
    "NonFiniteLogitsError",
    "StepOutOfMemoryError",
    "StepPlan",
    "block_causal_mask",
    "capture_cuda",
    "load_model",
]

_MODULES = {
    "Commits": "decoder",
    "DecodeRequest": "decoder",
    "Decoder": "decoder",
    "DiffusionGemmaEngine": "diffusion_gemma",
    "DiffusionGemmaRequest": "diffusion_gemma",
    "GraphStats": "graphs",
    "StepPlan": "decoder",
    "LLaDAConfig": "modeling_llada",
    "LLaDAModelLM": "modeling_llada",
    "block_causal_mask": "modeling_llada",
    "capture_cuda": "graphs",
    "load_model": "loading",
}
_EXTRA = {"numba", "numpy", "peft", "safetensors", "torch", "transformers"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'engine')}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        raise ModuleNotFoundError(
            f"dllm_sched_hf.{name} needs {error.name!r}: install dllm-sched[hf]", name=error.name
        ) from error


def __dir__() -> list[str]:
    return list(__all__)
