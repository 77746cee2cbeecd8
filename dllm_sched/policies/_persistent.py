"""A map for states: every change makes a new one, and the old one stays as it is.

Levels of dicts, newest first, each at least four times as large as the one before it: a change
writes a dict of one entry and merges it with what is not much larger. A look-up asks
O(log n) dicts, a change costs O(log n) amortised, and at most a third more entries are held than
the largest level has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

__all__ = ["EMPTY", "GONE", "Levels", "get", "put"]

Levels = tuple[dict[Hashable, Any], ...]

EMPTY: Levels = ()
GONE = None
"""Put under a key, it takes the key away."""

_GROWTH = 4


def get(levels: Levels, key: Hashable) -> Any:
    """Return the value of a key, ``None`` if it has none. O(log n)."""
    for level in levels:
        if key in level:
            return level[key]
    return None


def put(
    levels: Levels, key: Hashable, value: Any, stays: Callable[[Any], bool] | None = None
) -> Levels:
    """Return the map with a key set to a value. O(log n) amortised.

    Args:
        levels: The map; not changed.
        key: The key.
        value: The value; ``GONE`` takes the key away.
        stays: Which values are still wanted; others may be dropped whenever the last level is
            written anew.
    """
    new = {key: value}
    merged = 0
    while merged < len(levels) and len(levels[merged]) < _GROWTH * len(new):
        new = levels[merged] | new
        merged += 1
    if merged == len(levels):  # nothing older can come to light
        new = {
            one: kept
            for one, kept in new.items()
            if kept is not GONE and (stays is None or stays(kept))
        }
    return (new, *levels[merged:]) if new else levels[merged:]
