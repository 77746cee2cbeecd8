"""The life of a request: for each kind of change, the status after it by the status before.

Every status change reads one of these (``view._status = AFTER_FINISH[view._status]``); what stands
in none cannot happen. The tables know nothing of queues, slots or time.
"""

from __future__ import annotations

from collections.abc import Iterable

from dllm_sched.errors import InvariantError
from dllm_sched.request import RequestStatus

__all__ = ["AFTER_ADMIT", "AFTER_FINISH", "AFTER_PREEMPT"]


class _After(dict[RequestStatus, RequestStatus]):
    """The status after one kind of change. O(1); raises ``InvariantError`` where there is none."""

    def __init__(self, change: str, before: Iterable[RequestStatus], after: RequestStatus) -> None:
        super().__init__(dict.fromkeys(before, after))
        self._change = change

    def __missing__(self, status: RequestStatus) -> RequestStatus:
        raise InvariantError(f"a request that is {status.value} cannot {self._change}")


_WAITING, _RUNNING, _PREEMPTED, _FINISHED = RequestStatus

AFTER_ADMIT = _After("admit", (_WAITING, _PREEMPTED), _RUNNING)
"""It gets a slot."""

AFTER_PREEMPT = _After("preempt", (_RUNNING,), _PREEMPTED)
"""It gives the slot back and waits again."""

AFTER_FINISH = _After("finish", (_WAITING, _RUNNING, _PREEMPTED), _FINISHED)
"""It ends, for whatever reason."""
