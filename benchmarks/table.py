"""The README's overhead table and picture, from what the benchmarks have written.

python -m pytest benchmarks --benchmark-only --benchmark-json=cost.json
python benchmarks/table.py cost.json
python benchmarks/table.py cost.json --plot benchmarks/pictures/cost.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

QUOTED = {  # us per step at 16 rows, at 256, and at 16 with 100,000 waiting
    "nano-vllm": (7.6, 115, 7.9),
    "vidur, vLLM replica": (17, 217, 17),
    "sarathi-serve": (93, 1_460, 98),
    "vLLM v1": (152, 2_680, 157),
    "mini-sglang": (225, 3_560, 242),
    "SGLang dLLM": (2_800, 31_000, 2_770),
}
QUOTED_FLOOR = 0.42  # us for 16 rows on the machine of those figures
CAPTION = (
    "Dotted: quoted from another machine of the same kind (2 cores, CPython 3.11). "
    "Each figure is divided by the floor at 16 rows of its own machine."
)


class Figures:
    """The least of each measurement, in microseconds a call, found by its labels."""

    def __init__(self, path: Path) -> None:
        self.run = json.loads(path.read_text(encoding="utf-8"))
        self.found = self.run["benchmarks"]

    def us(self, what: str, name: str, **labels: object) -> float:
        """The one measurement that has all of these labels."""
        labels |= {"what": what, "name": name}
        (one,) = (one for one in self.found if labels.items() <= one["extra_info"].items())
        return one["stats"]["min"] / one["extra_info"]["calls"] * 1e6

    def plain(self, what: str) -> dict[str, Any]:
        """The only measurement of its kind."""
        (one,) = (one for one in self.found if one["extra_info"]["what"] == what)
        return {**one["extra_info"], "s": one["stats"]["min"]}


STEPS = [  # in words, name, what happens
    ("unchanged", "fcfs", "nothing"),
    ("the same, an observer", "observed", "nothing"),
    ("the same, run-ahead", "ahead", "nothing"),
    ("the same, a journal", "journaled", "nothing"),
    ("the same, `wait`, asked at every step", "wait", "nothing"),
    ("one block boundary", "fcfs", "boundary"),
    ("one retires, one joins", "fcfs", "turn"),
    ("the same, `tediserve`", "tediserve", "turn"),
]
CALLS = [
    ("unchanged step", "fcfs", "nothing"),
    ("step in which one retires and one joins", "fcfs", "turn"),
    ("`submit`", "fcfs", "submit"),
    ("`submit`, earliest deadline first", "edf", "submit"),
    ("`cancel`", "fcfs", "cancel"),
]


def table(figures: Figures) -> None:
    """Print the tables as Markdown."""
    floor = figures.us("yardstick", "floor", rows=16)
    machine = figures.run["machine_info"]
    print(
        f"{machine['cpu']['count']} cores of {machine['cpu']['brand_raw']}, "
        f"{machine['python_implementation']} {machine['python_version']}, "
        f"commit {figures.run['commit_info']['id'][:7]}, us per step (times the floor at 16 rows)\n"
    )

    def line(name: str, values: list[float | None]) -> None:
        cells = ["" if v is None else f"{v:,.2f} ({v / floor:,.1f})" for v in values]
        print(f"| {name} | {' | '.join(cells)} |")

    print("| a step | 16 rows | 256 rows | 4,096 rows |\n|---|---|---|---|")
    rows = (16, 256, 4_096)
    for name in ("floor", "numpy", "transformers"):
        line(name, [figures.us("yardstick", name, rows=r, waiting=0) for r in rows])
    for words, name, change in STEPS:
        line(words, [figures.us("step", name, change=change, rows=r) for r in rows])

    print("\n| 16 rows | 1,000 wait | 100,000 wait | 1,000,000 wait |\n|---|---|---|---|")
    waiting = (1_000, 100_000, 1_000_000)
    peer = [figures.us("yardstick", "transformers", rows=16, waiting=w) for w in waiting[:2]]
    line("transformers, a step", [*peer, None])
    for words, name, change in CALLS:
        line(words, [figures.us("queue", name, change=change, waiting=w) for w in waiting])

    print("\n| the whole life of a request | 16 rows | 256 rows |\n|---|---|---|")
    names = ("default", "continuous", "six strategies", "ten boundaries", "transformers")
    for name in names:
        line(name, [figures.us("life", name, rows=r) for r in (16, 256)])
    for name in ("finishes", "boundaries"):
        speeds = [1e6 / figures.us("simulation", name, rows=r) for r in (16, 256)]
        cells = " | ".join(f"{speed:,.0f}" for speed in speeds)
        print(f"| simulated requests per CPU-second, {name} reported | {cells} |")

    queued = [one["extra_info"] for one in figures.found if one["extra_info"]["what"] == "queue"]
    calls = {(one["name"], one["change"]) for one in queued}

    def growth(call: tuple[str, str]) -> float:
        """How much dearer it is with a million waiting than with a thousand."""
        many, few = (
            figures.us("queue", call[0], change=call[1], waiting=w) for w in (1_000_000, 1_000)
        )
        return many / few

    worst = max(calls, key=growth)
    print(
        f"\nA call with 1,000,000 waiting against 1,000: at most "
        f"{growth(worst):.2f} times ({', '.join(worst)})."
    )
    swap = figures.plain("set_policy")
    print(f"`set_policy` with {swap['waiting']:,} waiting: {swap['s']:.2f} s.")


def plot(figures: Figures, path: Path) -> None:
    """Draw cost against rows and against the queue's length."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    floor = figures.us("yardstick", "floor", rows=16)
    picture, (left, right) = plt.subplots(1, 2, figsize=(12, 6), sharey=True)
    rows = (1, 16, 64, 256, 1_024, 4_096)
    for name in ("floor", "numpy", "transformers"):
        costs = [figures.us("yardstick", name, rows=r, waiting=0) / floor for r in rows]
        left.plot(rows, costs, "--", marker=".", label=name)
    for words, name, change in (STEPS[0], STEPS[5], STEPS[6]):
        costs = [figures.us("step", name, change=change, rows=r) / floor for r in rows]
        left.plot(rows, costs, "o-", linewidth=2, label=f"ours: {words}")
    waiting = (0, 1_000, 100_000, 1_000_000)
    costs = [
        figures.us("yardstick", "transformers", rows=16, waiting=w) / floor for w in waiting[:3]
    ]
    right.plot(waiting[:3], costs, "--", marker=".", color="C2", label="transformers")
    for words, name, change in CALLS:
        costs = [figures.us("queue", name, change=change, waiting=w) / floor for w in waiting]
        right.plot(waiting, costs, "o-", linewidth=2, label=f"ours: {words.replace('`', '')}")
    for number, (name, (few, many, queued)) in enumerate(QUOTED.items()):
        style = {"linestyle": ":", "marker": "x", "color": f"C{number % 10}", "alpha": 0.7}
        left.plot((16, 256), (few / QUOTED_FLOOR, many / QUOTED_FLOOR), **style)
        right.plot((0, 100_000), (few / QUOTED_FLOOR, queued / QUOTED_FLOOR), **style)
        left.annotate(
            name, (256, many / QUOTED_FLOOR), (4, -2), textcoords="offset points", fontsize=8
        )
    left.set(
        xscale="log",
        yscale="log",
        xlabel="rows",
        ylabel="CPU time of a step / floor",
        ylim=(5e-3, 2e5),
    )
    right.set_xscale("symlog", linthresh=1_000)
    right.set(xlabel="requests waiting (16 rows)", xlim=(-50, 2_000_000))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, ncols=2, loc="lower right")
    picture.text(0.5, 0.01, CAPTION, ha="center", fontsize=9)
    picture.tight_layout(rect=(0, 0.04, 1, 1))
    picture.savefig(path, dpi=90)


def main() -> None:
    """Print the tables; draw if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("json", type=Path, help="what --benchmark-json wrote")
    parser.add_argument("--plot", type=Path, help="write a picture there")
    options = parser.parse_args()
    figures = Figures(options.json)
    table(figures)
    if options.plot is not None:
        plot(figures, options.plot)


if __name__ == "__main__":
    main()
