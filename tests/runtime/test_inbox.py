import math
import queue
import threading

import pytest

from dllm_sched.runtime import Inbox, MonotonicClock, VirtualClock


class CountingClock:
    """Counts how often it is read: a loop that polls would read it again and again."""

    def __init__(self, *instants):
        self.instants = list(instants)
        self.reads = 0

    def __call__(self):
        self.reads += 1
        return self.instants.pop(0) if len(self.instants) > 1 else self.instants[0]


def test_first_in_first_out():
    inbox = Inbox(VirtualClock())
    for item in "abc":
        inbox.put(item)
    assert list(inbox.drain()) == ["a", "b", "c"]
    assert list(inbox.drain()) == []


def test_what_ended_a_wait_comes_first():
    inbox = Inbox(MonotonicClock())
    got = []

    def take():
        inbox.wait(math.inf)
        inbox.wait(math.inf)  # one is there: returns at once, and loses nothing
        while len(got) < 2:
            inbox.wait(math.inf)
            got.extend(inbox.drain())

    taking = threading.Thread(target=take, daemon=True)
    taking.start()
    inbox.put("a")
    inbox.put("b")
    taking.join(timeout=60)
    assert got == ["a", "b"]


def test_a_drain_that_is_given_up_loses_nothing():
    inbox = Inbox(VirtualClock())
    for item in "abc":
        inbox.put(item)
    for item in inbox.drain():
        assert item == "a"
        break
    assert list(inbox.drain()) == ["b", "c"]


def test_what_arrives_during_a_drain_waits_for_the_next():
    inbox = Inbox(VirtualClock())
    inbox.put(0)
    for item in inbox.drain():
        inbox.put(item + 1)
    assert list(inbox.drain()) == [1]


def test_waiting_reads_the_clock_once_and_sleeps_once(monkeypatch):
    timeouts = []

    class Recording:
        def empty(self):
            return True

        def get(self, timeout=None):
            timeouts.append(timeout)
            raise queue.Empty

    clock = CountingClock(100.0)
    inbox = Inbox(clock)
    monkeypatch.setattr(inbox, "_queue", Recording())
    inbox.wait(100.25)
    assert timeouts == [0.25]
    assert clock.reads == 1
    inbox.wait(1e300)  # longer than the operating system can be told
    assert timeouts[1] == threading.TIMEOUT_MAX


@pytest.mark.parametrize("until", [99.0, 100.0, -math.inf])
def test_an_instant_that_has_come_is_not_waited_for(until):
    inbox = Inbox(CountingClock(100.0))
    inbox.wait(until)
    assert list(inbox.drain()) == []


def test_virtual_time_jumps_to_the_instant_unless_something_is_there():
    clock = VirtualClock()
    inbox = Inbox(clock)
    inbox.wait(1e9)
    assert clock() == 1e9
    inbox.put("a")
    inbox.wait(2e9)
    assert clock() == 1e9
