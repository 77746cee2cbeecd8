"""Drivers: a scheduler, an engine and a clock, put together into a loop that serves."""

from dllm_sched.runtime.aio import AsyncDriver, Committed, Handle, Provisional
from dllm_sched.runtime.clocks import Clock, MonotonicClock, VirtualClock
from dllm_sched.runtime.driver import Driver, RunReport
from dllm_sched.runtime.engine import (
    Engine,
    PipelinedEngine,
    Progress,
    StepFailedError,
    StreamingEngine,
)
from dllm_sched.runtime.inbox import Inbox

__all__ = [
    "AsyncDriver",
    "Clock",
    "Committed",
    "Driver",
    "Engine",
    "Handle",
    "Inbox",
    "MonotonicClock",
    "PipelinedEngine",
    "Progress",
    "Provisional",
    "RunReport",
    "StepFailedError",
    "StreamingEngine",
    "VirtualClock",
]
