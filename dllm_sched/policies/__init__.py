"""Strategies for the six axes, and presets that put them together."""

from dllm_sched.policies.admission import (
    AtBatchBoundary,
    AtBlockBoundary,
    MaxWaiting,
    NotAfterPreemption,
    Slots,
    TokenBudget,
)
from dllm_sched.policies.base import (
    ALL,
    KEEP,
    RESTART,
    Admission,
    Composition,
    Control,
    Eviction,
    Ordering,
    Policy,
    Strategy,
    Timeout,
    Verdict,
)
from dllm_sched.policies.blockserve import BoundingBox, ShortestPrompt
from dllm_sched.policies.composition import AllRows
from dllm_sched.policies.congestion import MixLengths, ProjectedPeak, RateCap
from dllm_sched.policies.denoising_surface import (
    AgedShortestFirst,
    BudgetCost,
    ConstantCost,
    CostPredictor,
    PayloadCost,
    SurfaceCost,
)
from dllm_sched.policies.dllm_serve import JoinWithinBudget, StepWithinBudget
from dllm_sched.policies.energy import EnergyFill
from dllm_sched.policies.eviction import PastDeadline, StepCap, YoungestFirst
from dllm_sched.policies.exclusive import ExclusivePhases
from dllm_sched.policies.fair_share import WeightedFairShare
from dllm_sched.policies.herald import Prefetch, PrefetchNextBlock
from dllm_sched.policies.optimus import ChunkWidth
from dllm_sched.policies.ordering import FCFS, EarliestDeadline, PriorityFirst, ShortestBudget
from dllm_sched.policies.rates import (
    RATES,
    EmaRate,
    FilteredMeanRate,
    KnownRate,
    KnownService,
    LearnedService,
    LogBandRate,
    Rate,
    Service,
    WindowRate,
)
from dllm_sched.policies.request_router import ByLength, ChooseMode
from dllm_sched.policies.sangam import DeficitBudget, FewestBlocks
from dllm_sched.policies.sglang import AtCommonBoundary, BlockSynchronous
from dllm_sched.policies.tediserve import ConfidenceThreshold
from dllm_sched.policies.timeout import (
    Fill,
    FluidFill,
    LearnedTimeout,
    MaxWait,
    PoissonTimeout,
)
from dllm_sched.policies.wait import (
    NestedWaitQuota,
    NestedWaitRows,
    NestedWaitStart,
    WaitQuota,
    WaitRows,
    WaitStart,
)

__all__ = [
    "ALL",
    "FCFS",
    "KEEP",
    "RATES",
    "RESTART",
    "Admission",
    "AgedShortestFirst",
    "AllRows",
    "AtBatchBoundary",
    "AtBlockBoundary",
    "AtCommonBoundary",
    "BlockSynchronous",
    "BoundingBox",
    "BudgetCost",
    "ByLength",
    "ChooseMode",
    "ChunkWidth",
    "Composition",
    "ConfidenceThreshold",
    "ConstantCost",
    "Control",
    "CostPredictor",
    "DeficitBudget",
    "EarliestDeadline",
    "EmaRate",
    "EnergyFill",
    "Eviction",
    "ExclusivePhases",
    "FewestBlocks",
    "Fill",
    "FilteredMeanRate",
    "FluidFill",
    "JoinWithinBudget",
    "KnownRate",
    "KnownService",
    "LearnedService",
    "LearnedTimeout",
    "LogBandRate",
    "MaxWait",
    "MaxWaiting",
    "MixLengths",
    "NestedWaitQuota",
    "NestedWaitRows",
    "NestedWaitStart",
    "NotAfterPreemption",
    "Ordering",
    "PastDeadline",
    "PayloadCost",
    "PoissonTimeout",
    "Policy",
    "Prefetch",
    "PrefetchNextBlock",
    "PriorityFirst",
    "ProjectedPeak",
    "Rate",
    "RateCap",
    "Service",
    "ShortestBudget",
    "ShortestPrompt",
    "Slots",
    "StepCap",
    "StepWithinBudget",
    "Strategy",
    "SurfaceCost",
    "Timeout",
    "TokenBudget",
    "Verdict",
    "WaitQuota",
    "WaitRows",
    "WaitStart",
    "WeightedFairShare",
    "WindowRate",
    "YoungestFirst",
]
