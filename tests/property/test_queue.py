"""The waiting queue and the heap of instants against sorted lists, over random histories."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dllm_sched import Request
from dllm_sched._lifecycle import AFTER_FINISH
from dllm_sched._queue import LazyHeap, WaitingQueue
from dllm_sched.request import RequestView

CLASSES = ("chat", "code")
BATCH_KEYS = (None, "lora", 7)


def make_view(sequence, now=0.0, **fields):
    request = Request(f"r{sequence}", prompt_len=1, max_new_tokens=1, **fields)
    return RequestView(request, sequence, now)


class QueueMachine(RuleBasedStateMachine):
    """Rounds of peek, pop, park and restore, with pushes and discards between them."""

    @initialize(by_class=st.booleans(), tracks=st.booleans(), length=st.integers(0, 2))
    def start(self, by_class, tracks, length):
        self.queue = WaitingQueue(by_class=by_class, track_arrivals=tracks)
        self.by_class = by_class
        self.tracks = tracks
        self.length = length
        self.sequence = 0
        self.clock = 0.0
        self.waiting = {}  # sequence: (key, view)
        self.gone = []  # popped for good: they may be pushed again under their old number

    def lane(self, view):
        request = view.request
        return (request.request_class if self.by_class else "", request.batch_key)

    def sorted(self, parked=()):
        entries = [
            (*key, sequence)
            for sequence, (key, view) in self.waiting.items()
            if self.lane(view) not in parked
        ]
        return [self.waiting[entry[-1]][1] for entry in sorted(entries)]

    def draw_key(self, data):
        numbers = st.integers(0, 3) | st.sampled_from((0.5, math.inf, -math.inf))
        return tuple(data.draw(numbers) for _ in range(self.length))

    @rule(data=st.data(), request_class=st.sampled_from(CLASSES), key=st.sampled_from(BATCH_KEYS))
    def push(self, data, request_class, key):
        self.clock += 0.5
        view = make_view(self.sequence, self.clock, request_class=request_class, batch_key=key)
        self._push(view, self.draw_key(data))
        self.sequence += 1

    def _push(self, view, key):
        self.queue.push(view, key)
        self.waiting[view.sequence] = (key, view)

    @rule(data=st.data(), number=st.integers(2, 90))
    def push_many(self, data, number):
        """Past the size from which dead entries are swept out."""
        seed = data.draw(st.integers(0, 2**16))
        rng = random.Random(seed)
        for _ in range(number):
            view = make_view(
                self.sequence,
                self.clock,
                request_class=rng.choice(CLASSES),
                batch_key=rng.choice(BATCH_KEYS),
            )
            self._push(view, tuple(rng.randrange(4) for _ in range(self.length)))
            self.sequence += 1

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def push_again(self, data):
        """A preempted row comes back with its old arrival number."""
        view = self.gone.pop(data.draw(st.integers(0, len(self.gone) - 1)))
        self._push(view, self.draw_key(data))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def discard(self, data):
        sequence = data.draw(st.sampled_from(sorted(self.waiting)))
        _, view = self.waiting.pop(sequence)
        self.queue.discard(view)
        if data.draw(st.booleans()):
            self.gone.append(view)

    @precondition(lambda self: len(self.waiting) > 40)
    @rule(data=st.data(), share=st.floats(0.5, 1.0))
    def discard_many(self, data, share):
        rng = random.Random(data.draw(st.integers(0, 2**16)))
        chosen = rng.sample(sorted(self.waiting), int(share * len(self.waiting)))
        for sequence in chosen:
            self.queue.discard(self.waiting.pop(sequence)[1])

    @precondition(lambda self: self.queue.is_one_lane and not self.tracks)
    @rule(count=st.integers(1, 6), commit=st.booleans())
    def take(self, count, commit):
        """The heads of the only lane, at once."""
        views = self.queue.take(count)
        assert views == self.sorted()[:count]
        assert self.queue.size == len(self.waiting) - len(views)
        if not commit:
            self.queue.put_back(views)
            return
        for view in views:
            view._lane = view._entry = None  # as their join does
            del self.waiting[view.sequence]
            self.gone.append(view)

    @rule(data=st.data(), commit=st.booleans())
    def round(self, data, commit):
        """Heads in total order; each is taken, set aside, or has its lane parked."""
        queue = self.queue
        parked = {}
        popped = []
        aside = []
        lanes = list(queue.lanes.values())
        for lane in lanes:
            if data.draw(st.integers(0, 4)) == 0:
                queue.park(lane)
                parked[lane.lane] = lane
        expected = self.sorted(parked)
        while expected and len(popped) + len(aside) < 8:
            head = queue.peek()
            assert head is expected[0]
            what = data.draw(st.sampled_from(("take", "take", "aside", "park", "stop")))
            if what == "stop":
                break
            if what == "park":
                lane = head._lane
                queue.park(lane)
                parked[lane.lane] = lane
                expected = [view for view in expected if self.lane(view) != lane.lane]
                continue
            queue.pop(head)
            (popped if what == "take" else aside).append(head)
            expected.pop(0)
        if not expected:
            assert queue.peek() is None
        assert queue.size == len(self.waiting)  # counted until the round is over
        for view in aside if commit else [*popped, *aside]:
            queue.restore(view)
        for view in popped if commit else ():
            queue.settle_pops((view,))
            del self.waiting[view.sequence]
            self.gone.append(view)
        for lane in parked.values():
            queue.unpark(lane)

    @invariant()
    def agrees(self):
        if not hasattr(self, "queue"):
            return
        queue = self.queue
        views = self.sorted()
        assert queue.size == len(views)
        assert queue.peek() is (views[0] if views else None)
        assert {id(view) for view in queue} == {id(view) for view in views}
        by_lane, by_key = {}, {}
        for view in views:
            by_lane.setdefault(self.lane(view), []).append(view)
            by_key.setdefault(view.request.batch_key, []).append(view)
        assert queue.by_lane() == {lane: len(inside) for lane, inside in by_lane.items()}
        assert {key.batch_key: key.size for key in queue.waiting_keys()} == {
            key: len(inside) for key, inside in by_key.items()
        }
        assert len(queue.lanes) <= max(1, len(by_lane))  # one that is alone stays open
        if self.tracks:
            for key, inside in by_key.items():
                oldest = min(inside, key=lambda view: view.sequence).arrived_at
                assert queue.keys[key].oldest_arrival_at() == oldest

    def teardown(self):
        """Whatever is left comes out in order, and leaves nothing behind."""
        if not hasattr(self, "queue"):
            return
        for view in self.sorted():
            assert self.queue.peek() is view
            self.queue.pop(view)
            self.queue.settle_pops((view,))
        assert self.queue.peek() is None
        assert not self.queue.waiting_keys()
        assert len(self.queue.lanes) <= 1
        for lane in self.queue.lanes.values():
            assert not lane.line
            assert not lane.heap
            assert not lane.key_queue.arrivals
        assert self.queue.size == 0


def test_the_queue_is_a_sorted_list():
    run_state_machine_as_test(
        QueueMachine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )


@pytest.mark.parametrize("tracks", [False, True])
def test_dead_entries_are_swept_out(tracks):
    """Memory follows what is alive, not what ever was."""
    queue = WaitingQueue(by_class=True, track_arrivals=tracks)
    keepers = [make_view(n, request_class="keep", batch_key="k") for n in range(10)]
    for view in keepers:
        queue.push(view, (100.0,))
    for wave in range(20):
        views = [
            make_view(1000 * wave + n + 10, request_class="pass", batch_key="k") for n in range(500)
        ]
        for view in views:
            queue.push(view, (float(view.sequence % 7),))
        for view in reversed(views):
            queue.discard(view)
    key_queue = queue.keys["k"]
    assert queue.size == 10
    held = sum(len(lane.line) + len(lane.heap) for lane in queue.lanes.values())
    assert held <= 2 * 64 + 20
    assert len(key_queue.arrivals) <= 2 * 64 + 20
    assert len(queue._heads) <= 2 * 64 + 20


def test_rounds_that_park_lanes_leave_nothing_behind():
    queue = WaitingQueue(by_class=False, track_arrivals=False)
    for sequence, key in enumerate("abc"):
        queue.push(make_view(sequence, batch_key=key), ())
    for _ in range(2000):  # an idle engine, asked again and again; `a` is always the head
        others = [queue.lanes["", key] for key in "bc"]
        for lane in others:
            queue.park(lane)
        assert queue.peek().sequence == 0
        for lane in others:
            queue.unpark(lane)
    assert len(queue._heads) <= 2 * 64


# --- instants -------------------------------------------------------------------------------------


class HeapMachine(RuleBasedStateMachine):
    """Instants armed, moved, disarmed and met, against a dict."""

    def __init__(self):
        super().__init__()
        self.heap = LazyHeap(lambda view: view._expire_at)
        self.views = []
        self.now = 0.0

    def live(self):
        return [v for v in self.views if v._expire_at != math.inf and v.status.value != "finished"]

    def arm(self, view, instant):
        view._expire_at = instant
        if instant != math.inf:
            self.heap.push(instant, view)

    @rule(delay=st.integers(0, 8), number=st.integers(1, 70))
    def add(self, delay, number):
        for extra in range(number):
            view = make_view(len(self.views))
            self.views.append(view)
            self.arm(view, self.now + delay + extra % 5)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), delay=st.integers(0, 8) | st.just(math.inf))
    def move(self, data, delay):
        self.arm(data.draw(st.sampled_from(self.live())), self.now + delay)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def arm_again(self, data):
        """To where it is already: two entries, one request."""
        view = data.draw(st.sampled_from(self.live()))
        self.arm(view, view._expire_at)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), share=st.floats(0, 1))
    def finish(self, data, share):
        rng = random.Random(data.draw(st.integers(0, 2**16)))
        live = self.live()
        for view in rng.sample(live, int(share * len(live))):
            view._status = AFTER_FINISH[view._status]

    @rule(step=st.integers(0, 6))
    def meet(self, step):
        self.now += step
        due = [view for view in self.live() if view._expire_at <= self.now]
        due.sort(key=lambda view: (view._expire_at, view.sequence))
        met = self.heap.pop_due(self.now)
        assert met == due
        for view in met:
            view._status = AFTER_FINISH[view._status]

    @invariant()
    def agrees(self):
        live = self.live()
        assert self.heap.first() == min((view._expire_at for view in live), default=math.inf)
        assert {(at, view.id) for at, _, view in self.heap} >= {
            (view._expire_at, view.id) for view in live
        }


def test_the_heap_is_a_sorted_list():
    run_state_machine_as_test(
        HeapMachine, settings=settings(max_examples=80, stateful_step_count=40, deadline=None)
    )


@given(st.integers(1, 50))
@settings(max_examples=10, deadline=None)
def test_instants_that_move_do_not_pile_up(num_views):
    heap = LazyHeap(lambda view: view._expire_at)
    views = [make_view(n) for n in range(num_views)]
    for instant in range(400):
        for view in views:
            view._expire_at = float(1000 + instant)
            heap.push(view._expire_at, view)
    assert heap.first() == 1399.0
    assert sum(1 for _ in heap) <= 2 * 64 + 1
