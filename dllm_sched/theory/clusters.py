"""Ragged KV: which heads share pages, what that wastes, and who computes which group."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from dllm_sched.capacity import RaggedKV, kept_tokens
from dllm_sched.errors import ConfigError
from dllm_sched.theory._check import is_number, not_negative, whole

__all__ = [
    "Head",
    "Stability",
    "cluster_heads",
    "longest_first",
    "over_allocation",
    "ragged_kv",
    "rank_stability",
    "retention_profile",
]

Head = tuple[int, int]
"""``(layer, head)``, both from 0."""

Profile = Sequence[Sequence[float]]
"""``profile[layer][head]``: the share of its KV that this head keeps, 0 to 1."""

Clusters = tuple[tuple[Head, ...], ...]


class Stability(NamedTuple):
    """How well single samples agree with the profile made of all of them."""

    mean: float
    least: float


def _shape(profile: Profile) -> tuple[int, int]:
    """Layers and heads of a profile that has been checked."""
    layers = len(profile)
    heads = len(profile[0]) if layers else 0
    if not heads or any(len(row) != heads for row in profile):
        raise ConfigError("a profile needs layers of equally many heads, at least one")
    for layer, row in enumerate(profile):
        for head, value in enumerate(row):
            if not is_number(value) or not 0 <= value <= 1:
                raise ConfigError(
                    f"the retention of layer {layer}, head {head} must lie between 0 and 1, got "
                    f"{value!r}"
                )
    return layers, heads


def retention_profile(samples: Sequence[Profile]) -> tuple[tuple[float, ...], ...]:
    """Return the mean retention of each head over samples of one model. O(all entries).

    Args:
        samples: At least one, all of one shape; the published profile is made of about 50.

    Source:
        "Tangram" (arXiv 2606.06302).
    """
    if not samples or len({_shape(sample) for sample in samples}) > 1:
        raise ConfigError("a profile needs at least one sample, all of one shape")
    return tuple(
        tuple(math.fsum(one) / len(samples) for one in zip(*rows, strict=True))
        for rows in zip(*samples, strict=True)
    )


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            ranks[index] = (start + end - 1) / 2
        start = end
    return ranks


def _spearman(left: Sequence[float], right: Sequence[float]) -> float:
    x, y = _ranks(left), _ranks(right)
    middle = (len(x) - 1) / 2
    spread = math.sqrt(
        math.fsum((a - middle) ** 2 for a in x) * math.fsum((b - middle) ** 2 for b in y)
    )
    if not spread:
        return math.nan
    return math.fsum((a - middle) * (b - middle) for a, b in zip(x, y, strict=True)) / spread


def rank_stability(samples: Sequence[Profile]) -> Stability:
    """Return Spearman's rank correlation of each sample with the profile of all: mean and least.

    Clusters are made once, from ranks; this says whether that is sound for the model. NaN where a
    sample or the profile ranks all heads equal. O(all entries * log heads).

    Args:
        samples: As of ``retention_profile``.

    Source:
        The check of "Tangram" (arXiv 2606.06302): mean 0.967, least 0.937 for Qwen2.5-7B.
    """
    profile = [value for row in retention_profile(samples) for value in row]
    found = [_spearman([value for row in sample for value in row], profile) for sample in samples]
    return Stability(math.fsum(found) / len(found), min(found))


def cluster_heads(
    profile: Profile,
    page_group_size: int = 4,
    *,
    by: Literal["retention", "layer", "adjacent"] = "retention",
    per_layer: int | None = None,
) -> Clusters:
    """Group heads that keep about as much, so that few pages are held for the largest alone.

    Heads are sorted by retention, largest first, equal ones by layer and head, and cut into
    clusters of ``page_group_size``; the columns inside a cluster are in order of layer and head.
    No grouping into clusters of this size wastes less: its i-th largest cluster maximum is the
    least possible one, for each i. O(heads log heads), O(heads * clusters) with ``per_layer``.

    Args:
        profile: Retention by layer and head.
        page_group_size: Heads that share a page, >= 1; must divide their number (with ``layer``,
            that of each layer).
        by: ``retention``; ``layer``: sorted within each layer only; ``adjacent``: not sorted at
            all, for comparison.
        per_layer: At most so many heads of one layer in a cluster, >= 1; only with ``retention``.

    Returns:
        The clusters; each head is in exactly one.

    Raises:
        ConfigError: If an argument is out of range, or the sizes do not divide.

    Source:
        "Tangram" (arXiv 2606.06302) with its authors' public code. How the cap per layer is met
        without ever getting stuck is our own derivation.
    """
    layers, heads = _shape(profile)
    whole(page_group_size=page_group_size)
    if by not in ("retention", "layer", "adjacent"):
        raise ConfigError(f"by must be 'retention', 'layer' or 'adjacent', got {by!r}")
    divided, what = (heads, "heads of a layer") if by == "layer" else (layers * heads, "heads")
    if divided % page_group_size:
        raise ConfigError(
            f"page_group_size must divide the {divided} {what}, got {page_group_size}"
        )
    order = [(layer, head) for layer in range(layers) for head in range(heads)]
    if by != "adjacent":
        order.sort(key=lambda one: -profile[one[0]][one[1]])  # stable: ties by layer, head
    if by == "layer":
        order.sort(key=lambda one: one[0])
    if per_layer is None:
        chunks = [
            order[start : start + page_group_size]
            for start in range(0, len(order), page_group_size)
        ]
    else:
        whole(per_layer=per_layer)
        if by != "retention":
            raise ConfigError(f"per_layer goes with by='retention', got {by!r}")
        if per_layer * layers < page_group_size:
            raise ConfigError(
                f"clusters of {page_group_size} heads, at most {per_layer} from each of {layers} "
                "layers: there are not enough layers"
            )
        chunks = _capped(order, page_group_size, per_layer)
    return tuple(tuple(sorted(chunk)) for chunk in chunks)


def _capped(order: list[Head], size: int, cap: int) -> list[list[Head]]:
    """Clusters in order, at most ``cap`` heads of a layer in each.

    A layer with more heads left than the later clusters may take must give some to this one; the
    places for those are kept free.
    """
    chunks: list[list[Head]] = []
    left = Counter(layer for layer, _ in order)
    for later in range(len(order) // size - 1, -1, -1):
        owed = {layer: max(0, count - cap * later) for layer, count in left.items()}
        free = size - sum(owed.values())
        taken: Counter[int] = Counter()
        chunk: list[Head] = []
        rest: list[Head] = []
        for one in order:
            layer = one[0]
            must = taken[layer] < owed[layer]
            if must or (free and taken[layer] < cap):
                free -= not must
                taken[layer] += 1
                chunk.append(one)
            else:
                rest.append(one)
        order = rest
        left -= taken
        chunks.append(chunk)
    return chunks


def _maxima(profile: Profile, clusters: Clusters) -> list[float]:
    return [max(profile[layer][head] for layer, head in cluster) for cluster in clusters]


def over_allocation(
    profile: Profile, clusters: Clusters, num_tokens: int, page_size: int = 16
) -> float:
    """Return the pages' tokens that no head keeps, over those that one does. O(heads).

    Each cluster holds ``ceil(most kept by a member / page_size)`` pages.

    Args:
        profile: Retention by layer and head.
        clusters: Of the same heads.
        num_tokens: Length of the sequence, >= 1.
        page_size: Tokens a page holds for each of its heads, >= 1.

    Raises:
        ConfigError: If an argument is out of range, or nothing is kept at all.

    Source:
        "Tangram" (arXiv 2606.06302), which reports 42.7 % for adjacent heads and 2.9 % for
        clusters by retention.
    """
    _shape(profile)
    whole(num_tokens=num_tokens, page_size=page_size)
    held = sum(
        len(cluster) * page_size * -(-kept_tokens(most, num_tokens) // page_size)
        for cluster, most in zip(clusters, _maxima(profile, clusters), strict=True)
    )
    kept = sum(kept_tokens(profile[i][j], num_tokens) for one in clusters for i, j in one)
    if not kept:
        raise ConfigError("no head keeps anything")
    return held / kept - 1.0


def ragged_kv(
    profile: Profile,
    page_group_size: int = 4,
    *,
    by: Literal["retention", "layer", "adjacent"] = "retention",
    per_layer: int | None = None,
    page_size: int = 16,
    window_blocks: int | None = None,
) -> RaggedKV:
    """Return the memory model of a profile: ``cluster_heads``, then ``capacity.RaggedKV``.

    Args:
        profile: Retention by layer and head.
        page_group_size: As of ``cluster_heads``.
        by: As of ``cluster_heads``.
        per_layer: As of ``cluster_heads``.
        page_size: As of ``RaggedKV``.
        window_blocks: As of ``RaggedKV``.
    """
    clusters = cluster_heads(profile, page_group_size, by=by, per_layer=per_layer)
    return RaggedKV(_maxima(profile, clusters), page_size=page_size, window_blocks=window_blocks)


def longest_first(lengths: Iterable[float], num_workers: int) -> tuple[tuple[int, ...], ...]:
    """Divide jobs of known lengths over workers: the longest first, each to the least loaded.

    For head groups over the multiprocessors of a GPU: their lengths are known from the profile, so
    one partition per (profile, length bucket) is made ahead. The largest load is at most
    ``4/3 - 1/(3 * workers)`` times the least possible one. O(jobs * log(jobs * workers)).

    Args:
        lengths: Of the jobs, >= 0.
        num_workers: >= 1.

    Returns:
        The jobs' indexes, one tuple per worker.

    Source:
        Longest processing time first and its bound: R. L. Graham (1969). That head groups are
        divided so is our own derivation of what "Tangram" (arXiv 2606.06302) does ahead of time.

    >>> longest_first([7, 6, 5, 4, 3], 2)
    ((0, 3, 4), (1, 2))
    """
    jobs = list(lengths)
    for number, length in enumerate(jobs):
        not_negative(**{f"length {number}": length})
    whole(num_workers=num_workers)
    loads = [(0.0, worker) for worker in range(num_workers)]
    shares: list[list[int]] = [[] for _ in range(num_workers)]
    for job in sorted(range(len(jobs)), key=lambda one: -jobs[one]):
        load, worker = heapq.heappop(loads)
        shares[worker].append(job)
        heapq.heappush(loads, (load + jobs[job], worker))
    return tuple(tuple(sorted(share)) for share in shares)
