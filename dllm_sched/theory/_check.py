"""Argument checks of the closed forms: each names the argument and says what it must be."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from dllm_sched.errors import ConfigError, described
from dllm_sched.request import LARGEST_COUNT

_LARGEST = sys.float_info.max


def is_number(value: object) -> bool:
    """Whether it is a float, or an int (no bool) that a float can be. NaN and inf are numbers."""
    if isinstance(value, int) and not isinstance(value, bool):
        return -_LARGEST <= value <= _LARGEST
    return isinstance(value, float)


def positive(**values: object) -> None:
    """Refuse what is not a finite number > 0."""
    for name, value in values.items():
        if not is_number(value) or not 0 < value < math.inf:  # type: ignore[operator]
            raise ConfigError(f"{name} must be a positive finite number, got {described(value)}")


def not_negative(**values: object) -> None:
    """Refuse what is not a finite number >= 0."""
    for name, value in values.items():
        if not is_number(value) or not 0 <= value < math.inf:  # type: ignore[operator]
            raise ConfigError(f"{name} must be a finite number >= 0, got {described(value)}")


def fraction(**values: object) -> None:
    """Refuse what is not a number strictly between 0 and 1."""
    for name, value in values.items():
        if not is_number(value) or not 0 < value < 1:  # type: ignore[operator]
            raise ConfigError(f"{name} must lie strictly between 0 and 1, got {described(value)}")


def whole(least: int = 1, **values: object) -> None:
    """Refuse what is not an int of at least ``least``, below 2**63."""
    for name, value in values.items():
        right = isinstance(value, int) and not isinstance(value, bool)
        if not right or not least <= value <= LARGEST_COUNT:  # type: ignore[operator]
            raise ConfigError(
                f"{name} must be an int >= {least} and < 2**63, got {described(value)}"
            )


def histogram(name: str, weights: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    """Return ``(value, probability)`` pairs, ascending, of a histogram of whole numbers >= 1.

    Values without weight are left out.
    """
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigError(f"{name} must be a non-empty mapping from value to weight")
    for value, weight in weights.items():
        whole(**{f"a value of {name}": value})
        not_negative(**{f"{name}[{value}]": weight})
    try:
        total = math.fsum(weights.values())
    except OverflowError:
        total = math.inf
    positive(**{f"the total weight of {name}": total})
    return tuple((value, weights[value] / total) for value in sorted(weights) if weights[value])


def items(name: str, values: Any) -> tuple[Any, ...]:
    """Return what can be iterated over as a tuple.

    Raises:
        ConfigError: If it cannot; names it.
    """
    try:
        return tuple(values)
    except TypeError:
        raise ConfigError(f"{name} must be a sequence, got {values!r}") from None
