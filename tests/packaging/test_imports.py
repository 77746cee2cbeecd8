"""Importing the scheduler is light, and its core reads no clock and draws no random number."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "dllm_sched"
# They drive the core: clocks, workloads, files and command lines are theirs.
DRIVERS = ("runtime", "testing", "sim", "journal.py", "cli.py", "__main__.py")
CORE_FILES = [
    path for path in sorted(CORE.rglob("*.py")) if path.relative_to(CORE).parts[0] not in DRIVERS
]
IMPURE = {"asyncio", "datetime", "os", "random", "secrets", "time", "uuid"}


def run(code: str) -> str:
    """Run code in a new interpreter; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True
    )
    return done.stdout


def imports(tree: ast.AST) -> set[str]:
    """The top-level names of all modules that are imported somewhere below a node."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize(
    ("package", "banned"),
    [
        (
            "dllm_sched",
            "numpy numba torch transformers asyncio multiprocessing concurrent ssl socket",
        ),
        ("dllm_sched", "prometheus_client"),
        ("dllm_sched_hf", "numpy numba torch transformers peft asyncio multiprocessing ssl socket"),
    ],
)
def test_importing_is_light(package, banned):
    loaded = run(f"import sys, {package}; print(*sys.modules)").split()
    assert package in loaded
    assert not set(banned.split()) & set(loaded)


def test_importing_configures_no_logging():
    """A library adds no handler to the root logger and sets no level: that is the program's."""
    code = "import dllm_sched, logging as l; print(l.root.handlers, l.root.level == l.WARNING)"
    assert run(code).strip() == "[] True"


@pytest.mark.parametrize("path", CORE_FILES, ids=lambda path: path.relative_to(CORE).as_posix())
def test_core_reads_no_clock_and_draws_no_random_number(path):
    assert not imports(ast.parse(path.read_text())) & IMPURE


@pytest.mark.parametrize(
    "path",
    [path for path in CORE.rglob("*.py") if path.relative_to(CORE).parts[0] != "sim"],
    ids=lambda path: path.relative_to(CORE).as_posix(),
)
def test_numpy_is_imported_inside_functions_only(path):
    tree = ast.parse(path.read_text())
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in inside:
            assert "numpy" not in imports(node)


def test_no_package_named_adapters_is_ours():
    """Another project on the package index has that import name."""
    assert not (ROOT / "adapters" / "__init__.py").exists()
    spec = importlib.util.find_spec("adapters")
    # At the repository's root the folder may show up as an empty namespace, never as a package.
    assert spec is None or spec.origin is None or ROOT not in Path(spec.origin).parents


@pytest.mark.parametrize(
    ("extra", "missing", "use"),
    [
        *(("hf", name, "dllm_sched_hf.load_model") for name in ("torch", "transformers", "peft")),
        ("metrics", "prometheus_client", "dllm_sched.metrics"),
        ("sim", "numpy", "dllm_sched.sim"),
    ],
)
def test_without_its_extra_it_says_what_to_install(extra, missing, use):
    module, _, name = use.partition(".")
    code = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import {module}
try:
    from {module} import {name}
except ImportError as error:
    print(error)
"""
    message = run(code)
    assert f"dllm-sched[{extra}]" in message
    assert missing.replace("_", "-") in message
