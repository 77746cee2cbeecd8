"""The list of right values names tests that exist."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS: dict[str, dict[str, str]] = tomllib.loads(
    (Path(__file__).with_name("right_values.toml")).read_text(encoding="utf-8")
)
ITEMS = [
    pytest.param(node, id=f"{system}:{item}")
    for system, items in SYSTEMS.items()
    for item, node in items.items()
]


@pytest.mark.parametrize("node", ITEMS)
def test_the_named_test_exists(node: str) -> None:
    path, _, name = node.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = set()
    for one in tree.body:
        if isinstance(one, ast.ClassDef):
            names |= {
                f"{one.name}::{inner.name}"
                for inner in one.body
                if isinstance(inner, ast.FunctionDef)
            }
        elif isinstance(one, ast.FunctionDef):
            names.add(one.name)
    assert name in names
