"""Burst-gap transfers: when does writing to a remote store make the writer wait?"""

from __future__ import annotations

from dllm_sched.theory._check import not_negative, positive

__all__ = ["BANDWIDTH_BYTES_PER_S", "OUTSTANDING_BYTES", "burst_s", "steady_stall_s"]

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
