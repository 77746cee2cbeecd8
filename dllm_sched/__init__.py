"""A request scheduler for diffusion language models, for other engines to embed."""

from dllm_sched.batch import (
    NO_KNOBS,
    NOTHING,
    Accepted,
    BlockBoundary,
    Finished,
    Knobs,
    PhaseChange,
    Rejected,
    Released,
    Row,
    RowFailed,
    RowFate,
    RowFinished,
    StepBatch,
    StepOutcome,
    Update,
)
from dllm_sched.capacity import Capacity, FixedCanvas, GrowingKV, RaggedKV
from dllm_sched.errors import (
    ClockError,
    ConfigError,
    DllmSchedError,
    DuplicateRequestError,
    EngineProtocolError,
    InvariantError,
    JournalError,
    OutcomeError,
    PolicyError,
    UnknownRequestError,
)
from dllm_sched.policies import presets
from dllm_sched.policies.base import Policy
from dllm_sched.request import FinishReason, Phase, Request, RequestStatus, RequestView
from dllm_sched.scheduler import Counts, Explanation, Horizon, Scheduler, Stats
from dllm_sched.view import BlockedBy, Round, SchedulerView

__version__ = "0.1.0"

__all__ = [
    "NOTHING",
    "NO_KNOBS",
    "Accepted",
    "BlockBoundary",
    "BlockedBy",
    "Capacity",
    "ClockError",
    "ConfigError",
    "Counts",
    "DllmSchedError",
    "DuplicateRequestError",
    "EngineProtocolError",
    "Explanation",
    "FinishReason",
    "Finished",
    "FixedCanvas",
    "GrowingKV",
    "Horizon",
    "InvariantError",
    "JournalError",
    "Knobs",
    "OutcomeError",
    "Phase",
    "PhaseChange",
    "Policy",
    "PolicyError",
    "RaggedKV",
    "Rejected",
    "Released",
    "Request",
    "RequestStatus",
    "RequestView",
    "Round",
    "Row",
    "RowFailed",
    "RowFate",
    "RowFinished",
    "Scheduler",
    "SchedulerView",
    "Stats",
    "StepBatch",
    "StepOutcome",
    "UnknownRequestError",
    "Update",
    "presets",
]
