"""What two kinds of overlap are worth by our closed forms, beside what their papers report.

    python benchmarks/overlap.py

HERALD (arXiv 2606.21633): KV selection for the next block while this one is denoised; 32 steps a
block, a draft after the first, selections from a tenth to ten times as long as a block. X-Stage
(arXiv 2607.23264): two waves through layers that ship 1 to 64 MiB and compute from a quarter to
four times as long as that takes at 717 GB/s with 4.25 MiB outstanding, 1 us to issue.
"""

from __future__ import annotations

import math

from dllm_sched.theory.prefetch import prefetch_gain
from dllm_sched.theory.transfer import BANDWIDTH_BYTES_PER_S, interleaving_gain

STEPS = 32
SHARES = (0.1, 0.25, 0.5, 1.0, 2.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)


def main() -> None:
    print(
        "prefetch: speed-up by selection / denoising of a block (paper: block latency 1.59x less)"
    )
    print("  ".join(f"{share:>5g}" for share in SHARES))
    print("  ".join(f"{prefetch_gain(share * STEPS, 1.0, STEPS):>5.2f}" for share in SHARES))
    print()
    print("interleaving: speed-up by MiB a layer (down) and computing / writing (across)")
    print("     " + "  ".join(f"{ratio:>5g}" for ratio in RATIOS))
    every = []
    for size in SIZES:
        writing = size * 2**20 / BANDWIDTH_BYTES_PER_S
        gains = [interleaving_gain(r * writing, size * 2**20, issue_s=1e-6) for r in RATIOS]
        every += gains
        print(f"{size:>4} " + "  ".join(f"{gain:>5.2f}" for gain in gains))
    mean = math.exp(math.fsum(map(math.log, every)) / len(every))
    print(f"geometric mean {mean:.2f}x, most {max(every):.2f}x (paper: 1.18x, 1.62x)")


if __name__ == "__main__":
    main()
