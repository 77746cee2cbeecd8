"""The Python in the documents runs, block after block, as a reader would type it.

In each document the blocks fenced as ``python`` run in order in one namespace; others, such as
``console`` and ``text``, do not run. What a block needs and a reader need not see goes before it
in an HTML comment that starts with ``<!-- invisible-code-block: python``.
"""

import doctest
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

import dllm_sched

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MODULES = [
    module.name
    for module in pkgutil.walk_packages(dllm_sched.__path__, "dllm_sched.")
    if not module.name.endswith("__main__")
]


def run_blocks(path: Path) -> int:
    """Run a document's blocks; return how many there were."""
    parser = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])
    examples = list(parser.parse(path).examples())
    for example in examples:
        example.evaluate()
    return len(examples)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(path)


def test_readme_has_the_test_command_that_ci_runs():
    """``.ci/run`` reads it from between these markers."""
    text = (ROOT / "README.md").read_text()
    command = text.partition("<!-- test-command -->")[2].partition("<!-- /test-command -->")[0]
    assert "python -m pytest" in command


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    assert doctest.testmod(import_module(name)).failed == 0


# The harness itself: a document whose error went unseen would be worse than none.


def test_blocks_share_a_namespace_and_hidden_ones_run(tmp_path):
    document = tmp_path / "good.md"
    document.write_text(
        "<!-- invisible-code-block: python\nhidden = 1\n-->\n\n"
        "```python\nseen = hidden + 1\n```\n\n"
        "```console\n$ this is not run\n```\n\n"
        "```python\nassert seen == 2\n```\n\n"
        "```python\n>>> seen\n2\n\n```\n"
    )
    assert run_blocks(document) == 4


@pytest.mark.parametrize(
    ("block", "error"),
    [("assert 1 == 2", AssertionError), ("1 +", SyntaxError), (">>> 1\n2\n", AssertionError)],
)
def test_a_wrong_block_fails(tmp_path, block, error):
    document = tmp_path / "bad.md"
    document.write_text(f"Text.\n\n```python\n{block}\n```\n")
    with pytest.raises(error):
        run_blocks(document)
