"""The life of a request as one table. Every status change goes through ``advance``.

The table knows nothing of queues, slots or time; the scheduler asks it first and acts after.
"""

from __future__ import annotations

import enum

from dllm_sched.errors import InvariantError
from dllm_sched.request import RequestStatus, RequestView

__all__ = ["TRANSITIONS", "Change", "advance"]


class Change(enum.Enum):
    """What can happen to a live request."""

    ADMIT = "admit"  #: it gets a slot
    PREEMPT = "preempt"  #: it gives the slot back and waits again
    FINISH = "finish"  #: it ends, for whatever reason

    __hash__ = object.__hash__  # see RequestStatus


TRANSITIONS: dict[RequestStatus, dict[Change, RequestStatus]] = {
    RequestStatus.WAITING: {
        Change.ADMIT: RequestStatus.RUNNING,
        Change.FINISH: RequestStatus.FINISHED,
    },
    RequestStatus.RUNNING: {
        Change.PREEMPT: RequestStatus.PREEMPTED,
        Change.FINISH: RequestStatus.FINISHED,
    },
    RequestStatus.PREEMPTED: {
        Change.ADMIT: RequestStatus.RUNNING,
        Change.FINISH: RequestStatus.FINISHED,
    },
    RequestStatus.FINISHED: {},
}


def advance(view: RequestView, change: Change) -> None:
    """Move a request along the table. O(1).

    Raises:
        InvariantError: If the table has no such transition; the request is unchanged.
    """
    try:
        view._status = TRANSITIONS[view._status][change]
    except KeyError:
        raise InvariantError(
            f"request {view.request.id!r} is {view._status.value} and cannot {change.value}"
        ) from None
