"""The scripts that overload the asyncio driver, for some seconds: they judge their own runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script, *args):
    command = [sys.executable, str(BENCHMARKS / script), "--threads", "1", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("ahead", [(), ("--ahead",)])
def test_a_run_in_which_everything_goes_wrong_loses_nobody(ahead):
    done = run("faults.py", "--minutes", "0.07", "--prompts", "20", "--seed", "3", *ahead)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost 0, told twice 0" in done.stdout
    assert "answers that changed 0" in done.stdout
    healthy = re.search(r"healthy requests ([\d,]+)", done.stdout)
    assert int(healthy[1].replace(",", "")) > 20
    for harm in ("stream closed", "task cancelled", "cancelled by id", "deadline", "queue timeout"):
        assert re.search(rf"{harm} [1-9]", done.stdout), "nobody was harmed that way"


def test_what_the_driver_adds_is_measured_to_the_end():
    done = run("aio.py", "--requests", "20", "--slots", "2", "--seconds", "0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[2:4]] == ["fake engine", "model in the box"]
    assert [line.split(",")[0] for line in lines[5:]] == ["0 open", "2 open", "4 open"]
    for line in (*lines[2:4], *lines[5:]):
        p50, p99, most = map(float, line.split()[-3:])
        assert p50 <= p99 <= most
