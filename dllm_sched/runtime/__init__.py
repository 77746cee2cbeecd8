"""Drivers: a scheduler, an engine and a clock, put together into a loop that serves."""

from dllm_sched.runtime.clocks import Clock, MonotonicClock, VirtualClock
from dllm_sched.runtime.driver import Driver, RunReport
from dllm_sched.runtime.engine import Engine, StepFailedError
from dllm_sched.runtime.inbox import Inbox

__all__ = [
    "Clock",
    "Driver",
    "Engine",
    "Inbox",
    "MonotonicClock",
    "RunReport",
    "StepFailedError",
    "VirtualClock",
]
