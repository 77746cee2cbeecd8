"""A clone stands alone: its files name no machine's folders and no folder beside the clone."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Put together from pieces, so that this file does not hold them either.
BANNED = [
    "/".join(parts)
    for parts in (
        ("..", "shared"),
        ("", "work", ""),
        ("", "tmp", "venvs"),
        ("", "root", ""),
        ("", "home", ""),
    )
] + [
    # An index is the user's choice: pip's own configuration names it.
    ".".join(parts)
    for parts in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"))
]


def tracked() -> list[Path]:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git clone")  # an unpacked sdist: only git knows what is the project's
    listed = subprocess.run(
        [git, "ls-files", "-z"], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_file_names_a_machine_or_a_package_index():
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in tracked()
        if path.is_file()
        for word in BANNED
        if word.encode() in path.read_bytes()
    ]
    assert found == []


@pytest.mark.parametrize("folder", ["adapters", "tests", "examples", "benchmarks"])
def test_these_folders_are_not_packages(folder):
    assert not (ROOT / folder / "__init__.py").exists()
