"""How long a step takes: models of a batch's rows and tokens, given or fitted from a live run."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import attrs
import numpy as np

from dllm_sched.batch import BlockBoundary, StepBatch
from dllm_sched.errors import ConfigError
from dllm_sched.policies.herald import Prefetch
from dllm_sched.sim._check import instance_of
from dllm_sched.sim.arrivals import csv_rows, open_text
from dllm_sched.theory._check import is_number, not_negative, positive, whole
from dllm_sched.theory.transfer import (
    BANDWIDTH_BYTES_PER_S,
    OUTSTANDING_BYTES,
    exchange_s,
    steady_stall_s,
)

__all__ = [
    "BurstGap",
    "Constant",
    "Exchange",
    "Fit",
    "Linear",
    "Offloaded",
    "Sample",
    "ServiceModel",
    "Table",
    "Waits",
    "fit_linear",
    "fit_table",
    "load_samples",
]


class ServiceModel(ABC):
    """Seconds of a step. A value object; the simulator asks once per run of equal steps."""

    @abstractmethod
    def step_s(self, num_rows: int, num_tokens: int) -> float:
        """Return the seconds of one step, > 0.

        Args:
            num_rows: Rows that take part, >= 1.
            num_tokens: Tokens that the step computes or reads, as the driver counts them, >= 0.
        """

    def waits(self) -> Waits | None:
        """Return what says how long steps of one run wait for another resource; None: never."""
        return None


class Waits(Protocol):
    """One run's waits for a resource that works beside the steps. It has a state: one per run."""

    def before(
        self, batch: StepBatch, crossed: Iterable[BlockBoundary], *, now: float, step_s: float
    ) -> float:
        """Return the seconds that a step waits before it runs, >= 0.

        To be called once for each batch that follows a join, a boundary or comes with hints; the
        steps after it, up to the next such batch, do not wait.

        Args:
            batch: The step that is about to run.
            crossed: What the step before reported of rows that go on.
            now: Seconds; never goes backward.
            step_s: What the step itself will take, seconds.
        """


@attrs.frozen
class Constant(ServiceModel):
    """The same whatever the batch: a device that a small batch does not fill.

    Args:
        seconds: > 0.
    """

    seconds: float

    def __attrs_post_init__(self) -> None:
        positive(seconds=self.seconds)

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        """Return ``seconds``. O(1)."""
        return self.seconds


@attrs.frozen
class Linear(ServiceModel):
    """``base_s + row_s * rows + token_s * tokens``; with ``token_s`` alone the model of WAIT.

    Args:
        base_s: Of any step, >= 0.
        row_s: Per row, >= 0.
        token_s: Per token, >= 0. One of the three is > 0, and not only this one.
    """

    base_s: float
    row_s: float = 0.0
    token_s: float = 0.0

    def __attrs_post_init__(self) -> None:
        not_negative(base_s=self.base_s, row_s=self.row_s, token_s=self.token_s)
        positive(**{"base_s + row_s": self.base_s + self.row_s})

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        """Return the sum. O(1)."""
        return self.base_s + self.row_s * num_rows + self.token_s * num_tokens


def _numbers(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(values)


def _grid(values: Iterable[Iterable[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in values)


def _cell(axis: tuple[float, ...], value: float) -> tuple[int, int, float]:
    """The neighbours of a value on an axis and its share of the way between them.

    Below the axis it counts as its start; above, the share exceeds 1: the last slope goes on.
    """
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0, 0.0
    right = min(bisect_right(axis, value), len(axis) - 1)
    left = right - 1
    return left, right, (value - axis[left]) / (axis[right] - axis[left])


@attrs.frozen
class Table(ServiceModel):
    """Measured at a grid of rows and tokens, linear in both in between.

    Below the grid a step costs what its edge costs; above, the slope of the last two points goes
    on, but never below the edge.

    Args:
        rows: Numbers of rows, ascending, >= 1.
        tokens: Numbers of tokens, ascending, >= 0.
        seconds: ``seconds[i][j]`` at ``rows[i]`` and ``tokens[j]``, > 0.
    """

    rows: tuple[float, ...] = attrs.field(converter=_numbers)
    tokens: tuple[float, ...] = attrs.field(converter=_numbers)
    seconds: tuple[tuple[float, ...], ...] = attrs.field(converter=_grid)

    def __attrs_post_init__(self) -> None:
        for name, least, axis in (("rows", 1, self.rows), ("tokens", 0, self.tokens)):
            if not axis or not all(is_number(each) and least <= each < math.inf for each in axis):
                raise ConfigError(f"{name} must be numbers >= {least}, at least one: {axis!r}")
            if any(after <= before for before, after in itertools.pairwise(axis)):
                raise ConfigError(f"{name} must be strictly ascending: {axis!r}")
        if len(self.seconds) != len(self.rows) or any(
            len(row) != len(self.tokens) for row in self.seconds
        ):
            raise ConfigError(
                f"seconds must be {len(self.rows)} rows of {len(self.tokens)} numbers each"
            )
        for row in self.seconds:
            for each in row:
                positive(**{"an entry of seconds": each})

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        """Return the bilinear interpolation. O(log points)."""
        value = self._at(num_rows, num_tokens)
        if num_rows <= self.rows[-1] and num_tokens <= self.tokens[-1]:
            return value
        return max(value, self._at(min(num_rows, self.rows[-1]), min(num_tokens, self.tokens[-1])))

    def _at(self, num_rows: float, num_tokens: float) -> float:
        top, bottom, down = _cell(self.rows, num_rows)
        left, right, across = _cell(self.tokens, num_tokens)
        above, below = self.seconds[top], self.seconds[bottom]
        first = above[left] + across * (above[right] - above[left])
        return first + down * (below[left] + across * (below[right] - below[left]) - first)


@attrs.frozen
class BurstGap(ServiceModel):
    """A step that also ships its tokens' memory elsewhere and may wait for the path.

    Each step is one burst of ``num_tokens * bytes_per_token``; the gap before it, in which the path
    drains, is the compute time. Steps of one size in a row are taken to be in their steady state.

    Args:
        compute: Seconds of the step itself.
        bytes_per_token: Shipped per token, >= 0.
        issue_s: Fixed cost of issuing, seconds, >= 0.
        bandwidth: Of the path, bytes per second, > 0.
        outstanding: Bytes that may be under way without stalling the step, >= 0.

    Source:
        ``theory.transfer``.
    """

    compute: ServiceModel = attrs.field(validator=instance_of(ServiceModel))
    bytes_per_token: float = attrs.field(kw_only=True)
    issue_s: float = attrs.field(default=0.0, kw_only=True)
    bandwidth: float = attrs.field(default=BANDWIDTH_BYTES_PER_S, kw_only=True)
    outstanding: float = attrs.field(default=OUTSTANDING_BYTES, kw_only=True)

    def __attrs_post_init__(self) -> None:
        not_negative(
            bytes_per_token=self.bytes_per_token,
            issue_s=self.issue_s,
            outstanding=self.outstanding,
        )
        positive(bandwidth=self.bandwidth)

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        """Return compute, issue and stall. O(1) beside the compute model."""
        compute = self.compute.step_s(num_rows, num_tokens)
        stall = steady_stall_s(
            num_tokens * self.bytes_per_token,
            compute,
            bandwidth=self.bandwidth,
            outstanding=self.outstanding,
        )
        return compute + self.issue_s + stall


@attrs.frozen
class Exchange(ServiceModel):
    """A step on several devices: after each layer they ship each other their tokens' results.

    The next layer waits for what was shipped, and a writer for its credit: no more than
    ``outstanding`` bytes may be under way. With two waves one half of the rows computes while the
    other half's bytes are under way.

    Args:
        compute: Seconds of the step's computing alone, all layers together.
        num_layers: Layers that ship, >= 1.
        bytes_per_token: Shipped by a device per token and layer, >= 0.
        waves: In how many parts the rows go through the layers, >= 1.
        issue_s: Fixed cost of issuing a burst, seconds, >= 0.
        bandwidth: Of the path, bytes per second, > 0.
        outstanding: Bytes that may be under way, >= 0.

    Source:
        ``theory.transfer.exchange_s``.
    """

    compute: ServiceModel = attrs.field(validator=instance_of(ServiceModel))
    num_layers: int = attrs.field(kw_only=True)
    bytes_per_token: float = attrs.field(kw_only=True)
    waves: int = attrs.field(default=1, kw_only=True)
    issue_s: float = attrs.field(default=0.0, kw_only=True)
    bandwidth: float = attrs.field(default=BANDWIDTH_BYTES_PER_S, kw_only=True)
    outstanding: float = attrs.field(default=OUTSTANDING_BYTES, kw_only=True)

    def __attrs_post_init__(self) -> None:
        not_negative(
            bytes_per_token=self.bytes_per_token,
            issue_s=self.issue_s,
            outstanding=self.outstanding,
        )
        positive(bandwidth=self.bandwidth)
        whole(num_layers=self.num_layers, waves=self.waves)

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        """Return the step with all its exchanges. O(1) beside the compute model."""
        return exchange_s(
            self.num_layers,
            self.compute.step_s(num_rows, num_tokens) / self.num_layers,
            num_tokens * self.bytes_per_token,
            waves=self.waves,
            issue_s=self.issue_s,
            bandwidth=self.bandwidth,
            outstanding=self.outstanding,
        )


@attrs.frozen
class Offloaded(ServiceModel):
    """The KV cache lies in another memory: once per block a part of it is selected and fetched.

    The selection for a row's block, and the one crossing of what it selected, take
    ``select_s + kv_tokens * (select_token_s + budget * bytes_per_token / bandwidth)`` on one
    resource beside the GPU that serves one row after the other, in the order in which they ask.
    A batch waits until all of its rows have theirs. For a row that the policy named in a
    ``Prefetch`` hint the selection starts ``draft_steps`` steps after the hint, for others when
    the block begins.

    ``step_s`` is the GPU's part alone; the waits come from ``waits().before``.

    Args:
        denoise: Seconds of the step itself, on the selected part.
        select_s: Fixed cost of a selection, seconds, >= 0.
        select_token_s: Per cached token, seconds, >= 0.
        bytes_per_token: KV bytes of a token, >= 0.
        budget: Share of the cache that is selected and crosses, 0 to 1.
        bandwidth: Of the crossing, bytes per second, > 0.
        draft_steps: Steps of a block after which the next one's selection can start, >= 0.

    Source:
        "HERALD" (arXiv 2606.21633), from its abstract and second-hand notes: selection on the whole
        cache once per block on the CPU, a budget of 5 to 10 %, one crossing per block, a draft from
        the first step's logits. The equations are our own; ``theory.prefetch`` has their closed
        form.
    """

    denoise: ServiceModel = attrs.field(validator=instance_of(ServiceModel))
    select_s: float = attrs.field(default=0.0, kw_only=True)
    select_token_s: float = attrs.field(default=0.0, kw_only=True)
    bytes_per_token: float = attrs.field(default=0.0, kw_only=True)
    budget: float = attrs.field(default=0.05, kw_only=True)
    bandwidth: float = attrs.field(default=25e9, kw_only=True)
    draft_steps: int = attrs.field(default=1, kw_only=True)

    def __attrs_post_init__(self) -> None:
        not_negative(
            select_s=self.select_s,
            select_token_s=self.select_token_s,
            bytes_per_token=self.bytes_per_token,
            budget=self.budget,
        )
        positive(bandwidth=self.bandwidth)
        whole(0, draft_steps=self.draft_steps)
        if self.budget > 1:
            raise ConfigError(f"budget must lie between 0 and 1, got {self.budget!r}")

    def step_s(self, num_rows: int, num_tokens: int) -> float:
        """Return the seconds on the GPU. O(1) beside the model of them."""
        return self.denoise.step_s(num_rows, num_tokens)

    def selection_s(self, kv_tokens: int) -> float:
        """Return the seconds of one selection and its crossing. O(1)."""
        crossing = self.budget * self.bytes_per_token / self.bandwidth
        return self.select_s + kv_tokens * (self.select_token_s + crossing)

    def waits(self) -> Waits:
        """Return the selections of one run, none asked for yet."""
        return _Selections(self)


class _Coming(NamedTuple):
    """A selection that was asked for and has not started."""

    draft_at: float  #: seconds; before it there is nothing to select by
    slot: int
    request_id: str
    block: int
    seconds: float


class _Selections:
    """The resource beside the GPU: what it has been asked for, and when that is there."""

    def __init__(self, model: Offloaded) -> None:
        self._model = model
        self._free_at = -math.inf
        self._coming: dict[int, _Coming] = {}  # by slot
        self._fetched: dict[int, tuple[str, int, float]] = {}  # slot -> request, block, instant

    def before(
        self, batch: StepBatch, crossed: Iterable[BlockBoundary], *, now: float, step_s: float
    ) -> float:
        self._start_those_due(now)
        rows = {row.slot: row.request for row in batch.rows}
        tokens = {row.slot: row.request.prompt_len for row in batch.joined}
        blocks = dict.fromkeys(tokens, -1)  # nothing was fetched for a row that joins
        for slot, block, kv_tokens in crossed:
            tokens[slot], blocks[slot] = kv_tokens, block
        ready_at = now
        for slot, block in blocks.items():
            if slot in rows:
                there = self._take(slot, rows[slot].id, block)
                if there is None:
                    there = self._select(now, self._model.selection_s(tokens[slot]))
                ready_at = max(ready_at, there)
        draft_at = ready_at + self._model.draft_steps * step_s
        for hint in batch.hints:
            if isinstance(hint, Prefetch) and hint.slot in tokens and hint.slot in rows:
                then = tokens[hint.slot] + rows[hint.slot].block_length
                self._coming.pop(hint.slot, None)
                self._coming[hint.slot] = _Coming(draft_at, *hint, self._model.selection_s(then))
        return ready_at - now

    def _start_those_due(self, now: float) -> None:
        for draft_at, slot, request_id, block, seconds in sorted(
            self._coming.values(), key=lambda one: one.draft_at
        ):  # among equals, who was hinted at first
            if draft_at <= now:
                del self._coming[slot]
                self._fetched[slot] = (request_id, block, self._select(draft_at, seconds))

    def _select(self, at: float, seconds: float) -> float:
        self._free_at = max(self._free_at, at) + seconds
        return self._free_at

    def _take(self, slot: int, request_id: str, block: int) -> float | None:
        """The instant at which what a row needs is there; None if nobody asked in time."""
        self._coming.pop(slot, None)
        whose, which, at = self._fetched.pop(slot, ("", -1, 0.0))
        return at if (whose, which) == (request_id, block) else None


class Sample(NamedTuple):
    """One recorded step."""

    num_rows: int
    num_tokens: int
    seconds: float


class Fit(NamedTuple):
    """A model and how far it is from what was recorded."""

    model: Linear | Table
    num_samples: int
    mean_error: float  #: mean of |model - sample| / sample
    p99_error: float  #: 99th percentile of it
    bias: float  #: sum of the model's seconds over the sum of the samples', minus 1
    r_squared: float  #: share of the variance that the model explains; 1 if there is none

    def __str__(self) -> str:
        return (
            f"{self.model} from {self.num_samples} steps: error {self.mean_error:.1%} in the mean, "
            f"{self.p99_error:.1%} at the 99th percentile, bias {self.bias:+.1%}, "
            f"R^2 {self.r_squared:.3f}"
        )


def load_samples(path: str | Path) -> list[Sample]:
    """Read ``rows,tokens,seconds`` lines from a CSV file, ``.gz`` too.

    Raises:
        ConfigError: If a line is malformed; names the line.
    """
    samples = []
    with open_text(path) as lines:
        for number, fields in csv_rows(path, lines, "rows,tokens,seconds"):
            try:
                sample = Sample(int(fields[0]), int(fields[1]), float(fields[2]))
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
            if not _is_good(sample):
                raise ConfigError(
                    f"{path}, line {number}: rows >= 1, tokens >= 0, seconds > 0 expected: {sample}"
                )
            samples.append(sample)
    return samples


def _is_good(sample: Sample) -> bool:
    return sample.num_rows >= 1 and sample.num_tokens >= 0 and 0 < sample.seconds < math.inf


def _checked(samples: Iterable[Sample | tuple[int, int, float]]) -> list[Sample]:
    found = [Sample(*sample) for sample in samples]
    if not found:
        raise ConfigError("a fit needs at least one (rows, tokens, seconds) sample")
    for number, sample in enumerate(found):
        if not _is_good(sample):
            raise ConfigError(
                f"sample {number}: rows >= 1, tokens >= 0, seconds > 0 expected: {sample}"
            )
    return found


def _judge(model: Linear | Table, samples: Sequence[Sample]) -> Fit:
    actual = np.array([sample.seconds for sample in samples])
    given = np.array([model.step_s(sample.num_rows, sample.num_tokens) for sample in samples])
    errors = np.abs(given - actual) / actual
    spread = float(((actual - actual.mean()) ** 2).sum())
    missed = float(((given - actual) ** 2).sum())
    nothing = spread <= 1e-24 * float((actual**2).sum())
    return Fit(
        model,
        len(samples),
        float(errors.mean()),
        float(np.quantile(errors, 0.99)),
        float(given.sum() / actual.sum() - 1.0),
        1.0 if nothing else 1.0 - missed / spread,
    )


def fit_linear(
    samples: Iterable[Sample | tuple[int, int, float]],
    *,
    weights: Literal["equal", "relative"] = "equal",
) -> Fit:
    """Fit ``Linear`` to recorded steps by least squares, no coefficient below 0.

    With three coefficients every choice of which are 0 is tried, and the best one without a
    negative coefficient wins; of equally good ones, the one with fewer. What the samples cannot
    tell apart (rows and tokens that always grow together) is left at 0. O(samples).

    Args:
        samples: ``(rows, tokens, seconds)``, at least one.
        weights: ``equal``: least sum of squared seconds; ``relative``: of squared shares, so that
            short steps count as much as long ones.

    Returns:
        The model and its errors on these samples.

    Raises:
        ConfigError: If a sample is out of range.
    """
    if weights not in ("equal", "relative"):
        raise ConfigError(f"weights must be 'equal' or 'relative', got {weights!r}")
    found = _checked(samples)
    seconds = np.array([sample.seconds for sample in found])
    scale = 1.0 / seconds if weights == "relative" else np.ones(len(seconds))
    columns = np.array([(1.0, sample.num_rows, sample.num_tokens) for sample in found])
    target = seconds * scale
    best: tuple[float, tuple[float, ...]] | None = None
    for size in (1, 2, 3):
        for chosen in itertools.combinations(range(3), size):
            part = columns[:, chosen] * scale[:, None]
            part_scale = np.sqrt((part**2).sum(0))
            if chosen == (2,) or not part_scale.all():
                continue  # a step without tokens must take time, too
            solution, _, rank, _ = np.linalg.lstsq(part / part_scale, target, rcond=1e-9)
            if rank < size or (solution < 0).any():
                continue
            missed = float(((part / part_scale @ solution - target) ** 2).sum())
            if best is None or missed < best[0] * (1 - 1e-9) - 1e-24 * float(target @ target):
                full = [0.0, 0.0, 0.0]
                for index, value in zip(chosen, (solution / part_scale).tolist(), strict=True):
                    full[index] = value
                best = missed, tuple(full)
    if best is None:  # pragma: no cover - a constant always fits
        raise ConfigError("no model fits these samples")
    return _judge(Linear(*best[1]), found)


def fit_table(samples: Iterable[Sample | tuple[int, int, float]]) -> Fit:
    """Make a ``Table`` of recorded steps: the mean seconds at each number of rows and of tokens.

    For runs over a grid: every number of rows must have been recorded with every number of tokens.
    O(samples).

    Args:
        samples: ``(rows, tokens, seconds)``, at least one.

    Returns:
        The model and its errors on these samples, which are the scatter at each point.

    Raises:
        ConfigError: If a sample is out of range, or a point of the grid is missing.
    """
    found = _checked(samples)
    cells: dict[tuple[int, int], list[float]] = {}
    for sample in found:
        cells.setdefault((sample.num_rows, sample.num_tokens), []).append(sample.seconds)
    rows = sorted({key[0] for key in cells})
    tokens = sorted({key[1] for key in cells})
    missing = [(r, t) for r in rows for t in tokens if (r, t) not in cells]
    if missing:
        raise ConfigError(
            f"no sample with (rows, tokens) = {missing[0]} and {len(missing) - 1} other points of "
            "the grid; record them, or use fit_linear"
        )
    seconds = [[math.fsum(cells[r, t]) / len(cells[r, t]) for t in tokens] for r in rows]
    return _judge(Table(rows, tokens, seconds), found)
