"""The page on policies leaves out no preset, nor does the script whose figures it quotes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dllm_sched import presets

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
def test_every_preset_has_its_word(name):
    assert f"`{name}`" in (ROOT / "docs" / "policies.md").read_text()


def test_every_preset_is_compared_and_the_same_seed_gives_the_same_figures():
    command = [sys.executable, "benchmarks/policies.py", "--requests", "100", "--json"]
    command += ["--workload", "deadlines"]
    first, again = (
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    )
    assert first == again
    ((name, lines),) = json.loads(first)["tables"].items()
    assert name.startswith("deadlines")
    assert {label.partition(" ")[0] for label in lines} == set(presets.PRESETS)
    for line in lines.values():
        assert 0 <= line["in_time"] <= 1
        assert line["good_per_s"] <= line["per_s"]
