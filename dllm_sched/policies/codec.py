"""Policies and capacities as plain JSON values, and back: for journals.

Only what this library itself defines can be written, by its name: a strategy or a function of
somebody else's is code, and code does not go into a data file.
"""

from __future__ import annotations

import enum
import importlib
import math
from collections.abc import Mapping
from functools import reduce
from types import FunctionType
from typing import Any

import attrs

from dllm_sched.errors import ConfigError, described
from dllm_sched.policies.base import Strategy, operator_of, operators

__all__ = ["from_plain", "to_plain"]

_PACKAGE = "dllm_sched"


def to_plain(value: Any) -> Any:
    """Write a policy, a capacity, or a value inside of one. O(its size).

    Raises:
        ConfigError: If some part of it is not this library's own; names it.
    """
    if value is None or isinstance(value, bool | int | str):
        plain: Any = value
    elif isinstance(value, float):
        plain = value if math.isfinite(value) else {"float": repr(value)}
    elif isinstance(value, enum.Enum) and _is_ours(type(value)):
        plain = {"enum": _name(type(value)), "member": value.name}
    elif isinstance(value, FunctionType) and _is_ours(value):
        plain = {"function": _name(value)}
    elif operator_of(value) is not None:
        plain = {"join": operator_of(value), "parts": [to_plain(part) for part in value.parts]}
    elif attrs.has(type(value)) and _is_ours(type(value)):
        fields = attrs.fields(type(value))
        given = {field.alias: getattr(value, field.name) for field in fields if field.init}
        plain = {"type": _name(type(value)), "with": {k: to_plain(v) for k, v in given.items()}}
    elif isinstance(value, tuple | list):
        plain = [to_plain(one) for one in value]
    elif isinstance(value, Mapping):
        plain = {"map": [[to_plain(k), to_plain(v)] for k, v in value.items()]}
    elif _is_ours(type(value)) and not vars(value):
        plain = {"type": _name(type(value)), "with": {}}  # the default of an axis
    else:
        raise ConfigError(f"only what dllm_sched defines can be written down, got {value!r}")
    return plain


def from_plain(plain: Any) -> Any:
    """Read what ``to_plain`` wrote; lists come back as tuples. O(its size).

    Raises:
        ConfigError: If it is not such a value; says which part.
    """
    if isinstance(plain, list):
        return tuple(from_plain(one) for one in plain)
    if not isinstance(plain, dict):
        return plain
    try:
        return _from_mapping(plain)
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ImportError, ArithmeticError) as error:
        raise ConfigError(
            f"not a policy or capacity of dllm_sched: {described(plain)[:200]} ({error!r})"
        ) from error


def _from_mapping(plain: dict[str, Any]) -> Any:
    if "float" in plain:
        value: Any = float(plain["float"])
    elif "enum" in plain:
        value = _ours(plain["enum"], type)[plain["member"]]
    elif "function" in plain:
        value = _ours(plain["function"], FunctionType)
    elif "join" in plain:
        value = reduce(operators[plain["join"]], [from_plain(one) for one in plain["parts"]])
    elif "map" in plain:
        value = {from_plain(k): from_plain(v) for k, v in plain["map"]}
    else:
        arguments = {name: from_plain(value) for name, value in plain["with"].items()}
        kind = _ours(plain["type"], type)
        if not (attrs.has(kind) or issubclass(kind, Strategy)):  # which do something when built
            raise ConfigError(f"{plain['type']!r} is no value")
        value = kind(**arguments)
    return value


def _is_ours(kind: Any) -> bool:
    return kind.__module__.partition(".")[0] == _PACKAGE and "<" not in kind.__qualname__


def _name(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _ours(name: str, kind: type[Any]) -> Any:
    """A class or function of this package by its name; nothing else is ever imported."""
    module, _, qualname = name.partition(":")
    if module.partition(".")[0] != _PACKAGE:
        raise ConfigError(f"{name!r} is not of {_PACKAGE}")
    found = getattr(importlib.import_module(module), qualname)
    if not isinstance(found, kind) or not _is_ours(found):
        raise ConfigError(f"{name!r} is no {kind.__name__} of {_PACKAGE}")
    return found
