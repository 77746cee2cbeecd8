"""Whether a value is still what it was: a comparable print of it, taken before and after a call."""

from __future__ import annotations

import enum
import random
import types
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from dllm_sched.policies.base import Strategy
from dllm_sched.request import Request, RequestView
from dllm_sched.view import Round

__all__ = ["attributes", "fingerprint", "owned"]

_PLAIN = (type(None), bool, int, str, bytes, complex)
_LARGE = 1000  # a table of this size is told by its identity and length
_ATOMS = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType)


def attributes(value: object) -> Iterator[tuple[str, Any]]:
    """The instance attributes of an object, whether in its dict or in slots. O(attributes)."""
    yield from sorted(getattr(value, "__dict__", {}).items())
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def fingerprint(value: Any, above: tuple[int, ...] = ()) -> object:  # noqa: C901, PLR0911  # a table
    """A print that differs when the value does. Live views count by id only. O(size)."""
    if isinstance(value, float):
        return repr(value)  # NaN equals itself then
    if isinstance(value, _PLAIN):
        return (type(value).__name__, value)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, RequestView):
        return ("view", value.request.id, value.sequence)
    if isinstance(value, _ATOMS):
        return ("atom", id(value))
    if id(value) in above:
        return "cycle"
    above = (*above, id(value))
    if isinstance(value, Collection) and len(value) > _LARGE:
        return ("large", id(value), len(value))
    if isinstance(value, Mapping):
        items = [(fingerprint(k, above), fingerprint(v, above)) for k, v in value.items()]
        return (type(value).__name__, tuple(items))
    if isinstance(value, AbstractSet):
        members = sorted(repr(fingerprint(one, above)) for one in value)
        return (type(value).__name__, tuple(members))
    if isinstance(value, tuple | list):
        return (type(value).__name__, tuple([fingerprint(one, above) for one in value]))
    return _object(value, above)


def _object(value: Any, above: tuple[int, ...]) -> object:  # noqa: PLR0911  # goes on
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
        inside = (cells, value.__defaults__, value.__kwdefaults__, vars(value))
        return ("function", id(value.__code__), fingerprint(inside, above))
    if isinstance(value, types.MethodType):
        return ("method", id(value.__func__), fingerprint(value.__self__, above))
    if isinstance(value, Round):
        names = "joined num_joined joined_tokens num_steps num_retired num_preempted blocked"
        return tuple([fingerprint(getattr(value, name), above) for name in names.split()])
    if isinstance(value, random.Random):
        return ("random", hash(value.getstate()))
    parts = tuple([(name, fingerprint(one, above)) for name, one in attributes(value)])
    if parts or isinstance(value, Request | Strategy):
        return (type(value).__name__, parts)
    try:
        reduced = value.__reduce_ex__(4)  # deque, array, itertools.count, random.Random, numpy
    except Exception:  # noqa: BLE001  # whatever a foreign class raises: it has no print
        return ("identity", id(value))
    if isinstance(reduced, str):
        return ("named", reduced)
    state = [list(part) if isinstance(part, Iterator) else part for part in reduced]
    return (type(value).__name__, fingerprint(state, above))


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def owned(strategy: Strategy, path: str = "") -> dict[str, object]:
    """Prints of everything a strategy keeps on itself, on its class, and in its operands."""
    prints: dict[str, object] = {}
    for name, value in attributes(strategy):
        if isinstance(value, tuple) and value and isinstance(value[0], Strategy):
            for number, part in enumerate(value):
                prints.update(owned(part, f"{path}{name}[{number}]."))
        else:
            prints[path + name] = fingerprint(value)
    for base in type(strategy).__mro__:
        if base is object or base.__module__.startswith("dllm_sched."):
            continue
        for name, value in vars(base).items():
            if not name.startswith("__") and isinstance(value, list | dict | set | int | float):
                prints[f"{path}{base.__name__}.{name}"] = fingerprint(value)
    return prints
