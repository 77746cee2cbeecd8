"""Loops over numbers and arrays, compiled: what would be dozens of calls of numpy or torch is one.

The arrays of a step are small, so that starting an operation costs more than the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

__all__ = ["compiled"]

_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def compiled(loop: _Loop, *, reorder: bool = False) -> _Loop:
    """Compile a function when it is first called, once for each set of types of its arguments.

    The machine code is kept beside the source, or where else numba may write, and later processes
    load it from there.

    Args:
        loop: The function: of numbers and arrays, and calls of no other than numba knows.
        reorder: Sums may be taken in any order, so that they are taken several at a time.

    Indices are not checked, as in C; ``NUMBA_BOUNDSCHECK=1`` in the environment, with a
    ``NUMBA_CACHE_DIR`` of its own, has them checked.
    """
    fast = {"contract", "nsz", "reassoc"} if reorder else set()  # NaN stays NaN
    options: dict[str, Any] = {"error_model": "numpy", "nogil": True, "fastmath": fast}
    try:
        function = numba.njit(loop, cache=True, **options)
    except RuntimeError:  # nowhere to keep it: a read-only file system
        return numba.njit(loop, **options)
    cache = getattr(function, "_cache", None)  # None: numba is told to compile nothing
    for name in ("load_overload", "save_overload"):
        if hasattr(cache, name):
            setattr(cache, name, _or_none(getattr(cache, name)))
    return function


def _or_none(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of a cache, for which a damaged file or a full disk is nothing found."""

    def forgiving(*args: Any) -> Any:
        try:
            return method(*args)
        except Exception:  # noqa: BLE001 - whatever bytes make a pickle raise; it only saves time
            return None

    return forgiving
