"""Argument checks of the simulator's value objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from dllm_sched.errors import ConfigError, described


def instance_of(kind: type[Any]) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return an attrs validator that refuses what is not of a class."""

    def check(owner: Any, field: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, kind):
            raise ConfigError(
                f"{type(owner).__name__}: {field.name} must be one of {kind.__module__}."
                f"{kind.__name__}, got {value!r}"
            )

    return check


def any_seed(value: object) -> None:
    """Refuse what seeds nothing: all but an int >= 0, of whatever size."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"seed must be an int >= 0, got {described(value)}")


def length_only(values: Any) -> str:
    """Return the repr of a long field: how many there are."""
    return f"<{len(values)}>"
