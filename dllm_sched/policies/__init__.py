"""Strategies for the six axes, and presets that put them together."""

from dllm_sched.policies.admission import (
    AtBatchBoundary,
    AtBlockBoundary,
    MaxWaiting,
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
from dllm_sched.policies.composition import AllRows
from dllm_sched.policies.denoising_surface import (
    AgedShortestFirst,
    BudgetCost,
    ConstantCost,
    CostPredictor,
    PayloadCost,
    SurfaceCost,
)
from dllm_sched.policies.eviction import PastDeadline, StepCap, YoungestFirst
from dllm_sched.policies.fair_share import WeightedFairShare
from dllm_sched.policies.ordering import FCFS, EarliestDeadline, PriorityFirst, ShortestBudget
from dllm_sched.policies.timeout import Fill, MaxWait, PoissonTimeout

__all__ = [
    "ALL",
    "FCFS",
    "KEEP",
    "RESTART",
    "Admission",
    "AgedShortestFirst",
    "AllRows",
    "AtBatchBoundary",
    "AtBlockBoundary",
    "BudgetCost",
    "Composition",
    "ConstantCost",
    "Control",
    "CostPredictor",
    "EarliestDeadline",
    "Eviction",
    "Fill",
    "MaxWait",
    "MaxWaiting",
    "Ordering",
    "PastDeadline",
    "PayloadCost",
    "PoissonTimeout",
    "Policy",
    "PriorityFirst",
    "ShortestBudget",
    "Slots",
    "StepCap",
    "Strategy",
    "SurfaceCost",
    "Timeout",
    "TokenBudget",
    "Verdict",
    "WeightedFairShare",
    "YoungestFirst",
]
