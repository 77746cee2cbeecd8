"""What is whose fault. A load condition is a value; an exception is somebody's bug.

Every message says what happened, to which id or slot, in which state, and what to do about it.
A call that raises one of these has changed nothing.
"""

import re

__all__ = [
    "ClockError",
    "ConfigError",
    "DllmSchedError",
    "DuplicateRequestError",
    "EngineProtocolError",
    "InvariantError",
    "JournalError",
    "OutcomeError",
    "PolicyError",
    "UnknownRequestError",
    "described",
]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class DllmSchedError(Exception):
    """Base of everything this library raises on purpose; never raised itself."""

    def __init__(self, *args: object) -> None:
        if type(self) is DllmSchedError:
            raise TypeError("DllmSchedError is abstract: raise one of its subclasses")
        super().__init__(*args)


class ConfigError(DllmSchedError, ValueError):
    """The integrator built something that cannot work (a field, a capacity, a policy's needs)."""


class DuplicateRequestError(DllmSchedError, ValueError):
    """The caller submitted an id that is still active."""


class UnknownRequestError(DllmSchedError, KeyError):
    """The caller asked about an id that is not active."""

    __str__ = Exception.__str__  # KeyError would show the repr of the message


class EngineProtocolError(DllmSchedError, RuntimeError):
    """The engine called out of order: a wrong batch, or a second step while one is in flight."""


class OutcomeError(EngineProtocolError):
    """The engine reported something impossible of a step."""


class ClockError(EngineProtocolError):
    """``now`` went backward, or is not a finite number."""


class PolicyError(DllmSchedError, RuntimeError):
    """A policy raised or answered nonsense; its own exception, if any, is the ``__cause__``."""


class JournalError(DllmSchedError, RuntimeError):
    """A journal cannot be read, or could not be written any further."""


class InvariantError(DllmSchedError, AssertionError):
    """Our own bookkeeping is broken; the message carries a dump of the state."""


def described(value: object) -> str:
    """Return the repr of somebody else's value, which may not have one, without addresses."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - it is looked at after the call has been carried out
        return f"<{type(value).__name__}>"
    return _ADDRESS.sub("", text)
