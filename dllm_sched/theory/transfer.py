"""Burst-gap transfers: when does writing to a remote store make the writer wait?"""

from __future__ import annotations

import functools

from dllm_sched.theory._check import not_negative, positive, whole

__all__ = [
    "BANDWIDTH_BYTES_PER_S",
    "OUTSTANDING_BYTES",
    "burst_s",
    "exchange_s",
    "interleaving_gain",
    "steady_stall_s",
]

#: About 717 GB/s and 4.25 MiB: what a third party reports of the X-Stage paper's machine.
BANDWIDTH_BYTES_PER_S = 717e9
OUTSTANDING_BYTES = 4.25 * 2**20


def burst_s(
    num_bytes: float,
    *,
    backlog_bytes: float = 0.0,
    issue_s: float = 0.0,
    bandwidth: float = BANDWIDTH_BYTES_PER_S,
    outstanding: float = OUTSTANDING_BYTES,
) -> tuple[float, float]:
    """Return for how long one burst holds its writer, and the backlog it leaves. O(1).

    The path behind the writer drains at rate R and takes at most Q bytes that are not yet written.
    A burst of b bytes on a backlog q costs ``issue_s + max(0, q + b - Q) / R`` and leaves
    ``min(Q, q + b)``.

    Args:
        num_bytes: Bytes of the burst, b, >= 0.
        backlog_bytes: Bytes outstanding when it starts, q, >= 0.
        issue_s: Fixed cost of issuing, seconds, >= 0.
        bandwidth: R, bytes per second, > 0.
        outstanding: Q, bytes, >= 0.

    Returns:
        Seconds, and bytes outstanding at that moment.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        "X-Stage" (arXiv 2607.23264) names the three parameters of its burst-gap model (issue time,
        rate, outstanding bytes), seen second hand; the equations are our own: a bounded-credit
        queue whose drain during the issue time is neglected.
    """
    not_negative(
        num_bytes=num_bytes,
        backlog_bytes=backlog_bytes,
        issue_s=issue_s,
        outstanding=outstanding,
    )
    positive(bandwidth=bandwidth)
    total = backlog_bytes + num_bytes
    return issue_s + max(0.0, total - outstanding) / bandwidth, min(outstanding, total)


def steady_stall_s(
    num_bytes: float,
    gap_s: float,
    *,
    bandwidth: float = BANDWIDTH_BYTES_PER_S,
    outstanding: float = OUTSTANDING_BYTES,
) -> float:
    """Return how long each of many equal bursts stalls its writer, seconds. O(1).

    Bursts of b bytes with compute gaps g between them: ``max(0, b - min(Q, R g)) / R``. What a gap
    can drain, or the path can hold, costs nothing: the fixed point of ``burst_s``.

    Args:
        num_bytes: Bytes of a burst, b, >= 0.
        gap_s: Seconds from the end of a burst to the next one, g, >= 0.
        bandwidth: R, bytes per second, > 0.
        outstanding: Q, bytes, >= 0.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        As ``burst_s``: parameters published, equation our own.
    """
    not_negative(num_bytes=num_bytes, gap_s=gap_s, outstanding=outstanding)
    positive(bandwidth=bandwidth)
    return max(0.0, num_bytes - min(outstanding, bandwidth * gap_s)) / bandwidth


def exchange_s(
    num_layers: int,
    compute_s: float,
    num_bytes: float,
    *,
    waves: int = 1,
    issue_s: float = 0.0,
    bandwidth: float = BANDWIDTH_BYTES_PER_S,
    outstanding: float = OUTSTANDING_BYTES,
) -> float:
    """Return how long a step takes whose layers ship their results to other devices. O(1).

    In each of n layers a device computes for c seconds, then writes b bytes to remote memory, and
    goes on to the next layer when they have arrived. The path drains at rate R; a writer is held
    while more than Q bytes are outstanding (its credit). In one piece a layer takes
    ``c + issue + b / R``. In w >= 2 waves, halves of the rows say, each layer is w turns of
    ``x = c / w + issue`` and ``y = b / (w R)``; a wave waits for its own bytes only, and another
    one computes meanwhile. The turns then follow each other by
    ``max(y, x + max(0, y - Q / R))``, and the step takes ``x + y`` and w n - 1 times that.

    Args:
        num_layers: n, >= 1.
        compute_s: c, seconds of one layer, >= 0.
        num_bytes: b, bytes that one layer ships, >= 0.
        waves: w, >= 1.
        issue_s: Fixed cost of issuing a burst, seconds, >= 0.
        bandwidth: R, bytes per second, > 0.
        outstanding: Q, bytes, >= 0.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        "X-Stage" (arXiv 2607.23264), seen second hand: the parameters, and that two layers are
        interleaved across waves. Equations: own derivation, ``burst_s`` applied turn by turn.
    """
    whole(num_layers=num_layers, waves=waves)
    not_negative(compute_s=compute_s, num_bytes=num_bytes, issue_s=issue_s, outstanding=outstanding)
    positive(bandwidth=bandwidth)
    compute = compute_s / waves + issue_s
    path = num_bytes / waves / bandwidth
    if waves == 1:
        return num_layers * (compute + path)
    turn = max(path, compute + max(0.0, path - outstanding / bandwidth))
    return compute + path + (waves * num_layers - 1) * turn


def interleaving_gain(
    compute_s: float,
    num_bytes: float,
    *,
    waves: int = 2,
    issue_s: float = 0.0,
    bandwidth: float = BANDWIDTH_BYTES_PER_S,
    outstanding: float = OUTSTANDING_BYTES,
) -> float:
    """Return how much faster many layers are in waves than in one piece; at most 2. O(1).

    Below 1 where the bursts' issuing costs more than the overlap saves; 1 without credit (Q = 0):
    who is held until everything has arrived overlaps nothing.

    Args:
        compute_s: As of ``exchange_s``; it or ``num_bytes`` or ``issue_s`` is > 0.
        num_bytes: As of ``exchange_s``.
        waves: As of ``exchange_s``.
        issue_s: As of ``exchange_s``.
        bandwidth: As of ``exchange_s``.
        outstanding: As of ``exchange_s``.

    Source:
        As ``exchange_s``. The paper reports 1.18x in the geometric mean and up to 1.62x.
    """
    step = functools.partial(
        exchange_s,
        compute_s=compute_s,
        num_bytes=num_bytes,
        issue_s=issue_s,
        bandwidth=bandwidth,
        outstanding=outstanding,
    )
    plain = step(1)
    positive(**{"compute_s + issue_s + num_bytes": plain})
    return plain / (step(2, waves=waves) - step(1, waves=waves))
