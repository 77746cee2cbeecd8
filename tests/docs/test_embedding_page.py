"""The page on embedding quotes its examples word for word."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUOTE = re.compile(
    r"<!-- (\S+): (\w+) -->\n(?:<!-- skip: next -->\n)?```python\n(.*?)\n```", re.DOTALL
)


def test_what_it_quotes_is_what_the_tests_run():
    quotes = QUOTE.findall((ROOT / "docs" / "embedding.md").read_text())
    assert [(file, part) for file, part, _ in quotes] == [
        ("embed_loop.py", "engine"),
        ("embed_loop.py", "loop"),
        ("embed_worker.py", "worker"),
        ("embed_worker.py", "engine"),
    ]
    for file, part, quoted in quotes:
        text = (ROOT / "examples" / file).read_text()
        between = text.partition(f"# --- {part}\n")[2].partition("\n# --- ")[0]
        assert quoted == between.strip("\n")
