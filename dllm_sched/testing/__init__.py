"""Checks for engines and policies, and fakes, for the tests of those who embed the scheduler."""

from dllm_sched.testing.engine_checks import EngineCheckError, check_engine
from dllm_sched.testing.fakes import FakeEngine, FakeOutput, fake_steps
from dllm_sched.testing.policy_checks import POLICY_RULES, PolicyCheckError, check_policy

__all__ = [
    "POLICY_RULES",
    "EngineCheckError",
    "FakeEngine",
    "FakeOutput",
    "PolicyCheckError",
    "check_engine",
    "check_policy",
    "fake_steps",
]
