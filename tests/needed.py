"""What every preset needs, with small figures: the tests that go through all of them share it."""

from __future__ import annotations

import inspect
from typing import Any

from dllm_sched.policies.presets import PRESETS


def needed(name: str, batch_size: int) -> dict[str, Any]:
    """Return arguments for the parameters of a preset that have no default, and its batch size.

    A parameter without a default that is new must be entered here.
    """
    known = {
        "batch_size": batch_size,
        "target_j": 5.0,
        "fixed_j": 6.0,
        "row_j": 2.0,
        "widths": (2, 8),
        "committed": (1.5, 4.0),
        "latency_s": {1: (1.0, 1.0), max(2, batch_size): (1.0, 3.0)},
    }
    parameters = inspect.signature(PRESETS[name]).parameters.items()
    return {key: known[key] for key, how in parameters if key in known or how.default is how.empty}
