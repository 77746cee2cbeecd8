"""Ready policies: functions that put strategies together. Change an axis with ``attrs.evolve``."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal

import attrs

from dllm_sched.capacity import MemoryModel
from dllm_sched.errors import ConfigError
from dllm_sched.policies.admission import (
    AtBatchBoundary,
    AtBlockBoundary,
    NotAfterPreemption,
    Slots,
    TokenBudget,
)
from dllm_sched.policies.base import Policy
from dllm_sched.policies.blockserve import BoundingBox, ShortestPrompt
from dllm_sched.policies.composition import AllRows
from dllm_sched.policies.congestion import ProjectedPeak, RateCap
from dllm_sched.policies.denoising_surface import AgedShortestFirst, BudgetCost, CostPredictor
from dllm_sched.policies.dllm_serve import JoinWithinBudget, StepWithinBudget
from dllm_sched.policies.energy import EnergyFill, LinearEnergy
from dllm_sched.policies.eviction import PastDeadline, YoungestFirst
from dllm_sched.policies.exclusive import ExclusivePhases
from dllm_sched.policies.fair_share import WeightedFairShare
from dllm_sched.policies.herald import PrefetchNextBlock
from dllm_sched.policies.optimus import ChunkWidth
from dllm_sched.policies.ordering import FCFS, EarliestDeadline
from dllm_sched.policies.rates import Rate, Service
from dllm_sched.policies.request_router import ByLength, ChooseMode
from dllm_sched.policies.sangam import DeficitBudget, FewestBlocks
from dllm_sched.policies.sglang import AtCommonBoundary, BlockSynchronous
from dllm_sched.policies.tediserve import ConfidenceThreshold
from dllm_sched.policies.timeout import Fill, FluidFill, LearnedTimeout, MaxWait
from dllm_sched.policies.wait import (
    NestedWaitQuota,
    NestedWaitRows,
    NestedWaitStart,
    WaitQuota,
    WaitRows,
    WaitStart,
)
from dllm_sched.request import Request
from dllm_sched.theory.exclusive import empty_slots, threshold
from dllm_sched.theory.ladder import GSM8K_BLOCKS
from dllm_sched.theory.thresholds import Grid
from dllm_sched.theory.wait import TrafficType

__all__ = [
    "PRESETS",
    "block_refill",
    "blockserve",
    "by_name",
    "congestion_stable",
    "continuous",
    "dllm_serve",
    "dws",
    "energy_fill",
    "exclusive",
    "fair_share",
    "find",
    "fixed_fill",
    "fixed_fill_online",
    "fluid_fill",
    "herald",
    "nested_wait",
    "optimus",
    "orca",
    "per_request",
    "request_router",
    "sangam",
    "sarathi",
    "sglang_block_sync",
    "sglang_fdfo",
    "tediserve",
    "vllm",
    "wait",
]


def per_request() -> Policy:
    """One request at a time: the baseline that every batching gain is measured against."""
    return Policy(admission=Slots(1), eviction=PastDeadline(), name="per_request")


def fixed_fill(batch_size: int, timeout_s: float = math.inf) -> Policy:
    """Wait for ``batch_size`` requests or ``timeout_s``, then run that batch to its end.

    Args:
        batch_size: Rows, >= 1.
        timeout_s: Longest wait of the oldest request while the engine is idle, seconds, >= 0;
            ``inf``: only a full batch starts (except while draining).

    Source:
        Fixed-fill synchronised batching (arXiv 2608.23807).
    """
    timeout = Fill(batch_size) | MaxWait(timeout_s) if timeout_s != math.inf else Fill(batch_size)
    return Policy(
        admission=Slots(batch_size) & AtBatchBoundary(),
        timeout=timeout,
        eviction=PastDeadline(),
        name="fixed_fill",
    )


def fixed_fill_online(
    batch_size: int,
    *,
    rate: float | str | Rate = "ema",
    service: float | Callable[[int], float] | Service | None = None,
    rule: Literal["paper", "capped"] = "capped",
) -> Policy:
    """Fixed fill whose timer is the shortest stable one for the load, known or learned.

    Args:
        batch_size: Rows, >= 1.
        rate: Arrivals per second, > 0, or a name of ``RATES`` (``ema``, ``window``, ...).
        service: Seconds of a batch, > 0, or a function of its rows; None: learned.
        rule: ``paper`` or ``capped``; see ``PoissonTimeout``.

    Source:
        Fixed-fill synchronised batching (arXiv 2608.23807); learning is our own.
    """
    timeout = Fill(batch_size) | LearnedTimeout(batch_size, rate=rate, service=service, rule=rule)
    return attrs.evolve(fixed_fill(batch_size), timeout=timeout, name="fixed_fill_online")


def fluid_fill(
    batch_size: int,
    *,
    rate: float | str | Rate = "ema",
    service: float | Callable[[int], float] | Service | None = None,
) -> Policy:
    """Fill an idle engine only while one more request is worth its wait; run the batch to its end.

    Args:
        batch_size: Rows, >= 1.
        rate: Arrivals per second, > 0, or a name of ``RATES`` (``ema``, ``window``, ...).
        service: Seconds of a batch, > 0, or a function of its rows; None: learned.

    Source:
        Own derivation; see ``FluidFill``.
    """
    timeout = FluidFill(batch_size, rate=rate, service=service)
    return attrs.evolve(fixed_fill(batch_size), timeout=timeout, name="fluid_fill")


def continuous(batch_size: int) -> Policy:
    """Refill a slot at the very next step after it is free: step-level batching.

    Args:
        batch_size: Rows, >= 1.
    """
    return Policy(admission=Slots(batch_size), eviction=PastDeadline(), name="continuous")


def congestion_stable(
    batch_size: int,
    per_step: float | Mapping[Hashable, float] = 1.0,
    *,
    memory: MemoryModel | None = None,
    lengths: Mapping[int, float] | None = None,
    quantile: float = 1.0,
) -> Policy:
    """Admit at the rate that memory carries, within the memory projected ahead.

    Args:
        batch_size: Rows, >= 1.
        per_step: Joins per step, > 0: n* of ``theory.congestion.equilibrium_rate``, per step; or
            for each request_class.
        memory: The capacity's memory model; None: nothing is projected, the cap does it alone.
        lengths: Blocks -> weight, how long answers are; None: as long as their budget.
        quantile: Of those lengths, in (0, 1]; see ``ProjectedPeak``.

    Raises:
        ConfigError: If an argument is out of range, or ``lengths`` come without ``memory``.

    Source:
        "Service-Induced Congestion" (arXiv 2606.15555); see ``RateCap`` and ``ProjectedPeak``.
    """
    admission = Slots(batch_size) & RateCap(per_step)
    if memory is not None:
        admission = admission & ProjectedPeak(memory, lengths=lengths, quantile=quantile)
    elif lengths is not None:
        raise ConfigError("congestion_stable: to project lengths give the capacity's memory, too")
    return Policy(
        admission=admission,
        eviction=PastDeadline() | YoungestFirst(),
        name="congestion_stable",
    )


def block_refill(batch_size: int) -> Policy:
    """Refill only at block boundaries.

    Args:
        batch_size: Rows, >= 1.

    Source:
        BlockServe's cycle (arXiv 2607.08930); see ``AtBlockBoundary``.
    """
    return Policy(
        admission=Slots(batch_size) & AtBlockBoundary(),
        eviction=PastDeadline(),
        name="block_refill",
    )


def blockserve(
    batch_size: int,
    tokens: int | None = None,
    *,
    length: Literal["canvas", "causal"] = "canvas",
    max_bypass: float = 256,
    longest_prompt: int = 4096,
) -> Policy:
    """Refill at block boundaries, short prompts first, within the budget of a padded batch.

    Args:
        batch_size: Rows, >= 1.
        tokens: Rows x longest row at most, >= 1; None: no budget, as many rows as there are.
        length: What a row is padded to, ``canvas`` or ``causal``; see ``BoundingBox``.
        max_bypass: How many later requests may overtake one, >= 0; 0: none.
        longest_prompt: Prompts of so many tokens and more count alike, >= 1.

    Source:
        BlockServe (arXiv 2607.08930), second hand; see ``BoundingBox`` and ``ShortestPrompt``.
    """
    admission = Slots(batch_size) & AtBlockBoundary()
    return Policy(
        ordering=ShortestPrompt(max_bypass, longest_prompt),
        admission=admission if tokens is None else admission & BoundingBox(tokens, length),
        eviction=PastDeadline(),
        name="blockserve",
    )


def dws(
    batch_size: int,
    predictor: CostPredictor | None = None,
    *,
    rate: float = 0.1,
    period_s: float = 30.0,
) -> Policy:
    """Shortest predicted job first, with ageing; a slot is refilled at the next step.

    Args:
        batch_size: Rows, >= 1.
        predictor: Predicts the work of a request; None: its budget, ``max_new_tokens``.
        rate: Share of the work taken off per period of waiting, >= 0 and < 1.
        period_s: Seconds, > 0.

    Source:
        "DWS / Denoising Surface" (arXiv 2610.00499); see ``AgedShortestFirst``.
    """
    return Policy(
        ordering=AgedShortestFirst(
            BudgetCost() if predictor is None else predictor, rate=rate, period_s=period_s
        ),
        admission=Slots(batch_size),
        eviction=PastDeadline(),
        name="dws",
    )


def dllm_serve(batch_size: int = 512, *, max_num_batched_tokens: int = 16_384) -> Policy:
    """First come, first served within a token budget that counts a row by its phase.

    Running rows first, then waiting ones, up to the first that does not fit. Give the scheduler
    ``Capacity(window_blocks=1)``, whose bounds are this system's costs.

    Args:
        batch_size: Rows, >= 1.
        max_num_batched_tokens: Tokens in one forward, >= 1.

    Source:
        "dLLM-Serve" (arXiv 2512.17077); see ``JoinWithinBudget`` and ``StepWithinBudget``. When
        memory runs out the youngest restarts from nothing.
    """
    return Policy(
        admission=Slots(batch_size) & JoinWithinBudget(max_num_batched_tokens),
        composition=StepWithinBudget(max_num_batched_tokens),
        eviction=PastDeadline() | YoungestFirst(),
        name="dllm_serve",
    )


def optimus(
    batch_size: int,
    *,
    widths: Sequence[int],
    committed: Sequence[float],
    latency_s: Mapping[int, Sequence[float]],
) -> Policy:
    """The chunk width by load, from an offline table; a slot is refilled at the next step.

    Args:
        batch_size: Rows, >= 1.
        widths: Tokens, ascending, >= 1.
        committed: Tokens that a row commits in a step, per width, > 0.
        latency_s: Rows of a batch -> seconds of a step per width, > 0.

    Source:
        "Optimus" (arXiv 2605.24832); see ``ChunkWidth``.
    """
    return Policy(
        admission=Slots(batch_size),
        eviction=PastDeadline(),
        control=ChunkWidth(widths, committed, latency_s),
        name="optimus",
    )


def sglang_fdfo(batch_size: int) -> Policy:
    """One denoising step a round; a finished row leaves at once and its slot is refilled.

    A row whose block is unresolved keeps its slot. As ``continuous``, but memory pressure sends
    the youngest back.

    Args:
        batch_size: Rows, >= 1.

    Source:
        "First done, first out" in SGLang, from its public pull requests.
    """
    return Policy(
        admission=Slots(batch_size),
        eviction=PastDeadline() | YoungestFirst(),
        name="sglang_fdfo",
    )


def sglang_block_sync(batch_size: int) -> Policy:
    """All rows finish their block before any goes on, and refills happen between blocks.

    Args:
        batch_size: Rows, >= 1.

    Source:
        SGLang before "first done, first out", from its public pull requests.
    """
    return Policy(
        admission=Slots(batch_size) & AtCommonBoundary(),
        composition=BlockSynchronous(),
        eviction=PastDeadline() | YoungestFirst(),
        name="sglang_block_sync",
    )


def orca(batch_size: int) -> Policy:
    """Iteration-level scheduling: first come, first served, a fixed number of slots.

    Memory is set aside whole at the join: ``Capacity(memory=FixedCanvas(...))``, or slots alone.

    Args:
        batch_size: Rows, >= 1.

    Source:
        "Orca" (Yu et al., OSDI 2022), a baseline for autoregressive models.
    """
    return Policy(admission=Slots(batch_size), name="orca")


def vllm(batch_size: int) -> Policy:
    """First come, first served as memory allows; when it runs out the last to come starts over.

    Memory grows with the row: ``Capacity(memory=GrowingKV(...))``. Nobody joins in a round that
    sent rows back; from the next one on they come before whoever arrived later.

    Args:
        batch_size: Rows, >= 1.

    Source:
        "PagedAttention / vLLM" (Kwon et al., SOSP 2023), preemption by recomputation; a baseline
        for autoregressive models.
    """
    return Policy(
        admission=Slots(batch_size) & NotAfterPreemption(), eviction=YoungestFirst(), name="vllm"
    )


def sarathi(batch_size: int, *, tokens: int = 2048) -> Policy:
    """A token budget per step that running rows use first, and joining prompts fill up.

    The original cuts a prompt into chunks that fit in what the rows leave. A diffusion LLM's
    prompt is attended to in both directions and goes through whole, so the analogue is: whole
    prompts while they fit, one that is too large for any budget alone.

    Args:
        batch_size: Rows, >= 1.
        tokens: Tokens in one forward, >= 1.

    Source:
        "Sarathi-Serve" (Agrawal et al., OSDI 2024), a baseline for autoregressive models; the
        analogue is our own.
    """
    return Policy(
        admission=Slots(batch_size) & TokenBudget(tokens),
        eviction=YoungestFirst(),
        name="sarathi",
    )


def energy_fill(
    batch_size: int,
    *,
    target_j: float,
    fixed_j: float,
    row_j: float,
    max_wait_s: float = 1.0,
) -> Policy:
    """Wait until a request takes no more than a target of joules, then run that batch to its end.

    Args:
        batch_size: Rows, >= 1.
        target_j: Joules per request, > 0.
        fixed_j: Joules of a batch whatever its rows, >= 0.
        row_j: Joules of each row of it, > 0.
        max_wait_s: Longest wait of the oldest request while the engine is idle, seconds, >= 0.

    Source:
        Own derivation; see ``EnergyFill``.
    """
    return Policy(
        admission=Slots(batch_size) & AtBatchBoundary(),
        timeout=EnergyFill(target_j, LinearEnergy(fixed_j, row_j), batch_size, max_wait_s),
        eviction=PastDeadline(),
        name="energy_fill",
    )


def exclusive(
    batch_size: int,
    count: int | None = None,
    *,
    hazard: float = 1 / 291,
    prefill_base_s: float = 1.0,
    decode_base_s: float = 1.0,
) -> Policy:
    """Prefills and refreshes never share a step with rows that reuse their cache.

    Args:
        batch_size: Rows, >= 1.
        count: Slots without a decoding row at which the others get a step, 1 to ``batch_size``;
            None: the best one for the figures below.
        hazard: Probability that a row finishes in a step, in (0, 1); default: the GSM8K answers of
            "Serving Masked Diffusion LLMs".
        prefill_base_s: Fixed cost of a step of prefills, > 0, seconds.
        decode_base_s: Fixed cost of a step of the others, > 0, seconds; only the ratio counts.

    Source:
        "Threshold-Based Exclusive Batching" (arXiv 2606.00516), seen second hand; see
        ``ExclusivePhases`` and ``theory.exclusive``.
    """
    theta = threshold(hazard=hazard, prefill_base_s=prefill_base_s, decode_base_s=decode_base_s)
    best = empty_slots(theta, batch_size) if count is None else count
    return Policy(
        admission=Slots(batch_size),
        composition=ExclusivePhases(batch_size, best),
        eviction=PastDeadline(),
        name="exclusive",
    )


def tediserve(
    batch_size: int,
    *,
    grid: Grid = ((0.7, 0.62), (0.9, 1.0)),
    step_s: float = 0.0241,
    steps: Callable[[Request], float] | None = None,
    demand: float | None = None,
    patience_s: float = 300.0,
) -> Policy:
    """The confidence threshold as a load knob, by deadline and by load; earliest deadline first.

    Args:
        batch_size: Rows, >= 1.
        grid: ``(threshold, share of the steps)`` pairs, ascending; the last share is 1.
        step_s: Seconds of a step, > 0; default: LLaDA-8B with D2F on an H200, one row.
        steps: Request -> steps at the highest threshold; None: the step ladder of its budget.
        demand: Row-steps per second that arrive, at the highest threshold; None: estimated.
        patience_s: Requests without a deadline are queued as if due so long after their arrival,
            seconds, >= 0.

    Source:
        "TeDiServe" (arXiv 2606.29094); see ``ConfidenceThreshold``.
    """
    threshold = ConfidenceThreshold(grid, step_s=step_s, demand=demand)
    return Policy(
        ordering=EarliestDeadline(patience_s),
        admission=Slots(batch_size),
        eviction=PastDeadline(),
        control=threshold if steps is None else attrs.evolve(threshold, steps=steps),
        name="tediserve",
    )


def fair_share(batch_size: int, weights: Mapping[str, float] | None = None) -> Policy:
    """Step-level batching in which tenants get slots in proportion to their weights.

    Args:
        batch_size: Rows, >= 1.
        weights: Tenant -> weight, > 0; who is not named has weight 1. None: all alike.

    Source:
        Start-time fair queueing; see ``WeightedFairShare``.
    """
    return Policy(
        ordering=WeightedFairShare({} if weights is None else weights),
        admission=Slots(batch_size),
        eviction=PastDeadline(),
        name="fair_share",
    )


def herald(batch_size: int) -> Policy:
    """Refill a slot at the next step, and hint at each block boundary which block comes after.

    Args:
        batch_size: Rows, >= 1.

    Source:
        "HERALD" (arXiv 2606.21633); see ``PrefetchNextBlock``.
    """
    return Policy(
        admission=Slots(batch_size),
        eviction=PastDeadline(),
        control=PrefetchNextBlock(),
        name="herald",
    )


def request_router(
    batch_size: int,
    modes: Sequence[str] = ("short", "long"),
    choose_mode: Callable[[Request], str] | None = None,
) -> Policy:
    """Step-level batching in which each row has one mode for life, the knob ``mode``.

    Args:
        batch_size: Rows, >= 1.
        modes: What the engine knows, at least one.
        choose_mode: Returns one of them for a request; None, with two modes: the first up to 512
            tokens of prompt and budget, the second beyond.

    Source:
        "RequestRouter" (arXiv 2605.23057); see ``ChooseMode``. The default rule is our own.
    """
    if choose_mode is None:
        choose_mode = ByLength(modes, (512,))
    return Policy(
        admission=Slots(batch_size),
        eviction=PastDeadline(),
        control=ChooseMode(modes, choose_mode),
        name="request_router",
    )


def wait(
    batch_size: int,
    types: Mapping[Hashable, TrafficType] | None = None,
    *,
    rule: Literal["modified", "strict"] = "modified",
    rate: str | Rate | None = None,
    max_wait_s: float = 1.0,
    hold_rows: bool = True,
) -> Policy:
    """WAIT: an iteration starts once enough requests of the right types wait for it.

    Args:
        batch_size: Rows, >= 1.
        types: ``{request_class: TrafficType}``; None: one class, ``""``, of ten stages.
        rule: ``modified``: enough of any type; ``strict``: enough of every type.
        rate: Who estimates the types' rates: ``ema`` or ``window``, which adapt, or
            ``running_mean``, the published one of bursty WAIT; None: they are as given.
        max_wait_s: Longest wait for the start of an iteration, seconds, finite, >= 0.
        hold_rows: Rows wait for the start, too, as published; else they step on meanwhile.

    Source:
        arXiv 2504.11320 and 2608.06135; see ``WaitStart``.
    """
    pairs = _ONE_TYPE if types is None else types
    quota = WaitQuota(batch_size, pairs, rule=rule, rate=rate)
    timed: dict[str, Any] = {"rule": rule, "rate": rate, "max_wait_s": max_wait_s}
    return Policy(
        admission=Slots(batch_size) & quota,
        timeout=WaitStart(batch_size, pairs, **timed),
        composition=WaitRows(batch_size, pairs, **timed) if hold_rows else AllRows(),
        eviction=PastDeadline(),
        name="wait",
    )


def nested_wait(
    batch_size: int,
    types: Mapping[Hashable, TrafficType] | None = None,
    *,
    rate: str | Rate | None = None,
    stage: Literal["block", "step"] = "block",
    max_wait_s: float = 1.0,
) -> Policy:
    """Nested WAIT: like WAIT, for requests whose length nobody knows when they arrive.

    Args:
        batch_size: Rows that the shares are of, >= 1; give the engine more slots, since rows that
            wait between two segments keep theirs.
        types: ``{name: TrafficType}``, whose rates tell how frequent lengths are; None: the GSM8K
            answers of "Serving Masked Diffusion LLMs", in blocks.
        rate: Who estimates the types' rates, a type's name being the request_class: ``ema``,
            ``window``, or ``log_band``, the published one; None: they are as given.
        stage: What lengths count: ``block`` or ``step``.
        max_wait_s: Longest wait for the start of an iteration, seconds, finite, >= 0.

    Source:
        arXiv 2504.11320 and 2608.06135; see ``NestedWaitQuota``.
    """
    pairs = _GSM8K_TYPES if types is None else types
    how: dict[str, Any] = {"rate": rate, "stage": stage, "max_wait_s": max_wait_s}
    return Policy(
        admission=NestedWaitQuota(batch_size, pairs, **how),
        timeout=NestedWaitStart(batch_size, pairs, **how),
        composition=NestedWaitRows(batch_size, pairs, **how),
        eviction=PastDeadline(),
        name="nested_wait",
    )


def sangam(
    batch_size: int,
    tokens: int = 4096,
    *,
    order: Literal["arrival", "fewest_blocks"] = "arrival",
    bypass: float = 32,
) -> Policy:
    """Whole prefills within a token budget that saves up what it could not spend.

    Args:
        batch_size: Rows, >= 1.
        tokens: Tokens of a step that has a prefill in it, in the mean, >= 1.
        order: ``arrival`` or ``fewest_blocks``.
        bypass: Later requests that may overtake one, for each of its blocks, >= 0; ``inf``: all
            that have fewer blocks. Only for ``fewest_blocks``.

    Source:
        "Sangam" (arXiv 2607.04206); see ``DeficitBudget``.
    """
    if order not in ("arrival", "fewest_blocks"):
        raise ConfigError(f"sangam: order must be 'arrival' or 'fewest_blocks', got {order!r}")
    return Policy(
        ordering=FCFS() if order == "arrival" else FewestBlocks(bypass),
        admission=Slots(batch_size) & DeficitBudget(tokens),
        eviction=PastDeadline(),
        name="sangam",
    )


_ONE_TYPE = {"": TrafficType(1.0, 0, 9)}
_GSM8K_TYPES = {blocks: TrafficType(float(n), 0, blocks) for blocks, n in GSM8K_BLOCKS.items()}

PRESETS: dict[str, Callable[..., Policy]] = {
    preset.__name__: preset
    for preset in (
        per_request,
        fixed_fill,
        continuous,
        congestion_stable,
        block_refill,
        blockserve,
        dws,
        fair_share,
        fixed_fill_online,
        fluid_fill,
        herald,
        tediserve,
        request_router,
        energy_fill,
        exclusive,
        wait,
        nested_wait,
        dllm_serve,
        optimus,
        sglang_fdfo,
        sglang_block_sync,
        orca,
        vllm,
        sarathi,
        sangam,
    )
}


def find(name: str) -> Callable[..., Policy]:
    """Return a preset by its name, or what builds a policy of your own by its dotted name.

    Args:
        name: One of ``PRESETS``; or e.g. ``my_policies.small_first``, which is imported.

    Raises:
        ConfigError: If there is no such preset, or it cannot be imported.
    """
    if name in PRESETS:
        return PRESETS[name]
    module, dot, function = name.rpartition(".")
    if not (dot and module):
        known = ", ".join(sorted(PRESETS))
        raise ConfigError(
            f"unknown policy {name!r}; known: {known}; one of your own goes by its dotted name"
        )
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"policy {name!r}: {error}") from error
    if not callable(found):
        raise ConfigError(f"policy {name!r}: a function that returns a Policy expected: {found!r}")
    build: Callable[..., Policy] = found
    return build


def by_name(name: str, **arguments: Any) -> Policy:
    """Build a policy by its name; for command lines and configuration files.

    Args:
        name: As of ``find``.
        arguments: Its own.

    Raises:
        ConfigError: If there is no such policy, or it does not take these arguments.
    """
    build = find(name)
    try:
        policy = build(**arguments)
    except TypeError as error:
        raise ConfigError(f"policy {name!r}: {error}") from error
    if not isinstance(policy, Policy):
        raise ConfigError(f"policy {name!r}: it must return a Policy, got {policy!r}")
    return policy
