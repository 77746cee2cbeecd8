"""The public names, frozen: a new one, or one that goes, is a line of ``public_names.txt``.

After a change that is meant, write the file anew: ``python tests/packaging/test_public_names.py``.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

FROZEN = Path(__file__).with_name("public_names.txt")
PACKAGES = (
    "dllm_sched",
    "dllm_sched.policies",
    "dllm_sched.metrics",
    "dllm_sched.runtime",
    "dllm_sched.sim",
    "dllm_sched.testing",
    "dllm_sched.theory",
    "dllm_sched_hf",
)
# A package that is not there yet has no names; once it is there, they must be in the file.
PRESENT = [package for package in PACKAGES if find_spec(package) is not None]


def names(package: str) -> list[str]:
    return sorted(f"{package}.{name}" for name in getattr(import_module(package), "__all__", ()))


def test_public_names_are_the_frozen_ones():
    actual = {line for package in PRESENT for line in names(package)}
    frozen = set(FROZEN.read_text().split())
    assert (sorted(actual - frozen), sorted(frozen - actual)) == ([], []), "(new, gone)"


@pytest.mark.parametrize("package", PRESENT)
def test_every_public_name_exists_and_is_listed_once(package):
    module = import_module(package)
    listed = getattr(module, "__all__", ())
    assert len(listed) == len(set(listed))
    assert [name for name in listed if not hasattr(module, name)] == []


@pytest.mark.parametrize("package", PRESENT)
def test_every_public_class_and_function_has_a_docstring(package):
    module = import_module(package)
    public = [getattr(module, name) for name in getattr(module, "__all__", ())]
    bare = [thing for thing in public if callable(thing) and not (thing.__doc__ or "").strip()]
    assert bare == []


if __name__ == "__main__":
    FROZEN.write_text("".join(f"{line}\n" for package in PRESENT for line in names(package)))
