"""Checks for engines and policies, and fakes, for the tests of those who embed the scheduler."""

from dllm_sched.testing.engine_checks import EngineCheckError, check_engine
from dllm_sched.testing.fakes import FakeEngine, FakeOutput, fake_steps

__all__ = [
    "EngineCheckError",
    "FakeEngine",
    "FakeOutput",
    "check_engine",
    "fake_steps",
]
