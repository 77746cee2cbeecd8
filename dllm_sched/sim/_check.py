"""Argument checks of the simulator's value objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from dllm_sched.errors import ConfigError


def instance_of(kind: type[Any]) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return an attrs validator that refuses what is not of a class."""

    def check(owner: Any, field: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, kind):
            raise ConfigError(
                f"{type(owner).__name__}: {field.name} must be one of {kind.__module__}."
                f"{kind.__name__}, got {value!r}"
            )

    return check


def length_only(values: Any) -> str:
    """Return the repr of a long field: how many there are."""
    return f"<{len(values)}>"
