"""The asyncio driver: handles, streams, cancellation at any moment, and who is told what.

The engine's thread is real. Where a moment matters, a gate holds the engine in a step; nothing
here waits for time to pass. Numbers like sglang #35255 name complaints about other engines that a
test here keeps from coming true.
"""

import asyncio
import gc
import subprocess
import sys
import threading
from contextlib import aclosing

import pytest

from dllm_sched import (
    Accepted,
    Capacity,
    ConfigError,
    DuplicateRequestError,
    EngineProtocolError,
    FinishReason,
    Policy,
    PolicyError,
    Rejected,
    Request,
    Scheduler,
    presets,
)
from dllm_sched.journal import restore
from dllm_sched.policies import Admission, MaxWaiting, Slots
from dllm_sched.runtime import AsyncDriver, Committed, Progress, Provisional
from dllm_sched.testing import FakeEngine, fake_steps

PATIENCE_S = 60  # far more than anything here takes


def request(name, tokens=8, **fields):
    return Request(name, prompt_len=5, max_new_tokens=tokens, block_length=4, **fields)


def a_token_a_step(one):
    return one.max_new_tokens


def alone(one, steps=fake_steps):
    """What a request answers on an engine of its own."""
    scheduler, engine = Scheduler(capacity=Capacity(max_num_seqs=1)), FakeEngine(1, steps=steps)
    scheduler.submit(one, now=0)
    while True:
        update = scheduler.next_step(now=0)
        update = scheduler.complete_step(update.batch, engine.run(update.batch), now=0)
        engine.release(update.released)
        for ended in update.finished:
            return ended.output.tokens


class GatedEngine(FakeEngine):
    """Runs a step for each permit; ``begun`` counts the steps that wait for one or ran."""

    def __init__(self, slots, *, permits=0, **options):
        super().__init__(slots, **options)
        self.gate = threading.Semaphore(permits)
        self.begun = threading.Semaphore(0)

    def _run(self, batch):
        self.begun.release()
        assert self.gate.acquire(timeout=PATIENCE_S)
        return super()._run(batch)

    def let(self, steps=1):
        self.gate.release(steps)

    async def in_a_step(self):
        """Wait until one more step has begun."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=PATIENCE_S)


@pytest.fixture(autouse=True, params=[1, 2], ids=["one in flight", "run ahead"])
def depth(request):
    """Steps in flight."""
    Bench.depth = request.param
    return request.param


class Bench:
    depth = 1

    def __init__(self, slots=2, engine=None, policy=None, **options):
        self.engine = engine or FakeEngine(slots)
        self.scheduler = Scheduler(
            policy=policy, capacity=Capacity(max_num_seqs=slots), max_in_flight=self.depth
        )
        self.told = []
        self.driver = AsyncDriver(self.scheduler, self.engine, on_update=self.note, **options)

    def note(self, update):
        self.told += [one.request.id for one in update.finished]

    def check_clean(self):
        counts = self.scheduler.counts()
        assert (counts.waiting, counts.running) == (0, 0)
        assert counts.submitted == counts.finished
        assert len(self.told) == len(set(self.told)) == counts.finished
        assert self.engine.held == frozenset()
        assert not self.driver._feeds
        assert not self.driver._feed_in
        self.scheduler.check_invariants()


def serve(main):
    """Run a test's coroutine, with patience; no thread and no task may be left."""

    async def patiently():
        async with asyncio.timeout(PATIENCE_S):
            await main
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(patiently())
    for thread in threading.enumerate():
        if thread.name.startswith("dllm_sched"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def join_driver():
    """Wait in this thread until the driver's has ended."""
    for thread in threading.enumerate():
        if thread.name == "dllm_sched driver":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


async def tokens_of(handle):
    committed = []
    async for event in handle:
        assert event.request_id == handle.id
        assert event.position == len(committed)
        if isinstance(event, Committed):
            assert event.tokens
            committed += event.tokens
        else:
            assert isinstance(event, Provisional)
    return tuple(committed)


def test_a_handle_comes_at_once_and_its_result_later():
    async def main():
        bench = Bench(engine=GatedEngine(2))
        async with bench.driver as driver:
            busy = await driver.submit(request("busy"))
            await bench.engine.in_a_step()
            handle = await driver.submit(request("a"))
            assert handle.id == "a"
            assert not handle.done
            bench.engine.let(100)
            assert await handle.accepted() == Accepted("a")
            finished = await handle.result()
            assert (finished.request.id, finished.reason) == ("a", FinishReason.LENGTH)
            assert finished.output.tokens == alone(request("a"))
            assert handle.done
            assert handle.request is finished.request
            await busy.result()
        bench.check_clean()

    serve(main())


def test_streams_tell_every_token_of_many_requests_once_and_in_order():
    # dInfer #31: many clients, and no state between them.
    async def main():
        bench = Bench(slots=4)
        async with bench.driver as driver:
            handles = [await driver.submit(request(f"r{i}", 1 + i % 17)) for i in range(60)]
            answers = await asyncio.gather(*map(tokens_of, handles))
            for handle, answer in zip(handles, answers, strict=True):
                finished = await handle.result()
                assert answer == finished.output.tokens == alone(handle.request)
        bench.check_clean()

    serve(main())


def test_provisional_text_changes_and_committed_text_does_not():
    # sglang #39499.
    async def main():
        bench = Bench(engine=GatedEngine(1, steps=a_token_a_step), slots=1)
        async with bench.driver as driver:
            handle = await driver.submit(request("a", 4))
            events, stream = [], aiter(handle)
            for _ in range(4):
                bench.engine.let()
                events.append(await anext(stream))
                if len(events) < 4 and isinstance(events[-1], Committed):
                    events.append(await anext(stream))
            bench.engine.let(bench.depth)  # ahead, the row takes part in a step after its last
            events += [event async for event in stream]
        committed = [event for event in events if isinstance(event, Committed)]
        assert [event.position for event in committed] == [0, 1, 2, 3]
        assert sum((event.tokens for event in committed), ()) == alone(
            request("a", 4), a_token_a_step
        )
        provisional = [event for event in events if isinstance(event, Provisional)][:3]
        assert [(event.position, event.tokens[1:]) for event in provisional] == [
            (1, (None, None)),
            (2, (None,)),
            (3, ()),
        ]
        assert any(
            event.tokens[0] != after.tokens[0]
            for event, after in zip(provisional, committed[1:], strict=True)
        ), "a guess"

    serve(main())


def test_a_slow_reader_finds_what_it_missed_merged():
    async def main():
        bench = Bench()
        async with bench.driver as driver:
            handle = await driver.submit(request("a", 50))
            await handle.result()
            events = [event async for event in handle]
        assert events == [Committed("a", 0, alone(request("a", 50)))]

    serve(main())


def test_a_stream_is_followed_once_and_only_if_asked_for():
    async def main():
        bench = Bench()
        async with bench.driver as driver:
            handle = await driver.submit(request("a"))
            assert await tokens_of(handle) == alone(request("a"))
            with pytest.raises(EngineProtocolError, match="'a': not streamed"):
                aiter(handle)
            silent = await driver.submit(request("b"), stream=False)
            with pytest.raises(EngineProtocolError, match="'b': not streamed"):
                aiter(silent)
            assert (await silent.result()).output.tokens == alone(request("b"))

    serve(main())


class Mute:
    """An engine that cannot say how an answer stands."""

    def __init__(self, slots):
        self._engine = FakeEngine(slots)
        self.run, self.release = self._engine.run, self._engine.release


def test_an_engine_without_progress_serves_but_does_not_stream():
    async def main():
        driver = AsyncDriver(Scheduler(capacity=Capacity(max_num_seqs=1)), Mute(1))
        async with driver:
            handle = await driver.submit(request("a"))
            assert (await handle.result()).output.tokens == alone(request("a"))
            with pytest.raises(ConfigError, match=r"'b': cannot be streamed.*progress"):
                await driver.submit(request("b"), stream=True)

    serve(main())


@pytest.mark.parametrize(
    "how", ["handle", "driver", "task", "timeout", "left loop", "closed stream"]
)
@pytest.mark.parametrize("state", ["mailbox", "waiting", "running"])
def test_a_request_can_be_cancelled_in_whatever_state(how, state):
    # sglang PR #28255, #35255; ai-dynamo #14368: also before the first output, by its id.
    async def main():
        bench = Bench(slots=1, engine=GatedEngine(1, steps=a_token_a_step))
        engine = bench.engine
        async with bench.driver as driver:
            if state == "running":
                handle = await driver.submit(request("a"))
                await engine.in_a_step()
                engine.let(2)
                await engine.in_a_step()
                await engine.in_a_step()
            else:
                other = await driver.submit(request("other", 4))
                await engine.in_a_step()
                handle = await driver.submit(request("a"))
                if state == "waiting":
                    engine.let()
                    await handle.accepted()
                    await engine.in_a_step()
            await cancel(how, driver, handle)
            engine.let(100)
            finished = await handle.result()
            assert finished.reason is FinishReason.CANCELLED
            assert (finished.admitted_at is not None) == (state == "running")
            handle.cancel()  # once more: nothing happens
            driver.cancel("a", "unknown")
            if state != "running":
                assert (await other.result()).output.tokens == alone(
                    request("other", 4), a_token_a_step
                )
        bench.check_clean()

    async def cancel(how, driver, handle):
        if how == "handle":
            handle.cancel()
        elif how == "driver":
            driver.cancel(handle.id)
        elif how == "task":
            task = asyncio.create_task(handle.result())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await handle.result()
        elif how == "closed stream":
            task = asyncio.create_task(tokens_of(handle))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            task = asyncio.create_task(leave_after_one_event(handle))
            await asyncio.sleep(0)
            if not task.done():  # there is no event to leave after
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def leave_after_one_event(handle):
        async with aclosing(aiter(handle)) as events:
            async for _ in events:
                break

    serve(main())


def test_a_loop_that_is_left_cancels_as_soon_as_its_iterator_is_dropped():
    async def main():
        bench = Bench(engine=GatedEngine(2, steps=a_token_a_step))
        async with bench.driver as driver:
            handle = await driver.submit(request("a"))
            bench.engine.let()
            async for _ in handle:
                break
            gc.collect()
            for _ in range(3):  # the loop closes what was dropped
                await asyncio.sleep(0)
            bench.engine.let(100)
            assert (await handle.result()).reason is FinishReason.CANCELLED
        bench.check_clean()

    serve(main())


def test_a_cancelled_handle_spares_a_later_request_of_its_id():
    async def main():
        bench = Bench(slots=1, engine=GatedEngine(1))
        async with bench.driver as driver:
            first = await driver.submit(request("a", 1))
            await bench.engine.in_a_step()
            bench.engine.let()
            while not bench.told:  # over in the driver's thread, and the loop has not been told:
                pass  # nothing is awaited here
            later = await driver.submit(request("a", 1))
            assert not first.done
            first.cancel()
            bench.engine.let(100)
            assert (await later.result()).reason is FinishReason.LENGTH
            assert (await first.result()).reason is FinishReason.LENGTH

    serve(main())


def test_load_is_refused_with_a_value_by_driver_scheduler_and_drain():
    async def main():
        policy = Policy(admission=Slots(1) & MaxWaiting(1))
        bench = Bench(slots=1, engine=GatedEngine(1), policy=policy, max_open=3)
        async with bench.driver as driver:
            running = await driver.submit(request("running"))
            await bench.engine.in_a_step()
            waiting = await driver.submit(request("waiting"))
            third = await driver.submit(request("third"))
            fourth = await driver.submit(request("fourth"))
            assert (
                await fourth.result() == await fourth.accepted() == Rejected("fourth", "queue_full")
            )
            assert [event async for event in fourth] == []
            bench.engine.let(100)
            assert (await third.accepted()).reason == "queue_full"  # the scheduler's
            assert (await running.result()).reason is FinishReason.LENGTH
            assert (await waiting.result()).reason is FinishReason.LENGTH
        late = await driver.submit(request("late"))
        assert await late.result() == Rejected("late", "draining")
        bench.check_clean()

    serve(main())


def test_who_waits_for_room_gets_it_and_who_gives_up_takes_none():
    async def main():
        bench = Bench(slots=1, engine=GatedEngine(1), max_open=1)
        async with bench.driver as driver:
            await driver.submit(request("a"))
            waits = asyncio.create_task(driver.submit(request("b"), wait=True))
            await asyncio.sleep(0)
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            bench.engine.let(100)
            await (await driver.submit(request("c"), wait=True)).result()
        assert bench.told == ["a", "c"]

    serve(main())


def test_an_id_that_is_active_is_its_callers_error_and_disturbs_nobody():
    async def main():
        bench = Bench(engine=GatedEngine(2))
        async with bench.driver as driver:
            one = request("a")
            first = await driver.submit(one)
            await bench.engine.in_a_step()
            again = [await driver.submit(one), await driver.submit(request("a"))]
            bench.engine.let(100)
            for handle in again:
                with pytest.raises(DuplicateRequestError, match="'a'"):
                    await handle.result()
                with pytest.raises(DuplicateRequestError, match="'a'"):
                    await handle.accepted()
                with pytest.raises(DuplicateRequestError, match="'a'"):
                    await tokens_of(handle)
            assert await tokens_of(first) == alone(request("a"))
        bench.check_clean()

    serve(main())


def test_deadlines_and_queue_timeouts_are_instants_of_the_drivers_clock():
    # vllm #2901, #16391.
    async def main():
        policy = presets.continuous(batch_size=1)
        bench = Bench(slots=1, engine=GatedEngine(1), policy=policy)
        async with bench.driver as driver:
            busy = await driver.submit(request("busy"))
            await bench.engine.in_a_step()
            late = await driver.submit(request("late", deadline_at=driver.clock() - 1.0))
            bored = await driver.submit(request("bored", queue_timeout_s=0.0))
            bench.engine.let(100)
            assert (await late.result()).reason is FinishReason.DEADLINE
            assert (await bored.result()).reason is FinishReason.QUEUE_TIMEOUT
            assert (await busy.result()).reason is FinishReason.LENGTH
        bench.check_clean()

    serve(main())


def test_a_poisoned_row_and_a_failed_step_leave_the_neighbours_tokens_as_they_are():
    # Dream #55.
    async def main():
        engine = FakeEngine(
            4,
            poison={"bad": 2},
            fail_at={3: RuntimeError("the third step fails"), 9: RuntimeError("the ninth")},
            steps=a_token_a_step,
        )
        bench = Bench(slots=4, engine=engine, max_restarts=2)
        async with bench.driver as driver:
            names = ["a", "bad", "b", "c", "d"]
            handles = [await driver.submit(request(name)) for name in names]
            answers = await asyncio.gather(*map(tokens_of, handles))
            for name, handle, answer in zip(names, handles, answers, strict=True):
                finished = await handle.result()
                if name == "bad":
                    assert finished.reason is FinishReason.ERROR
                    assert str(finished.error) == "bad is poisoned"
                else:
                    # Told once, although every row started anew.
                    assert answer == finished.output.tokens
        bench.check_clean()

    serve(main())


class Forgetful(FakeEngine):
    """Commits other tokens in a second life."""

    def progress(self, slot, start):
        committed, provisional = super().progress(slot, start)
        if self.num_runs > 3:
            committed = tuple(token + 1 for token in committed)
        return Progress(committed, provisional)


def test_a_second_life_with_other_tokens_ends_the_stream():
    async def main():
        engine = Forgetful(2, fail_at={2: RuntimeError("again")}, steps=a_token_a_step)
        bench = Bench(engine=engine)
        async with bench.driver as driver:
            handle = await driver.submit(request("a"))
            with pytest.raises(EngineProtocolError, match="'a': started anew and committed other"):
                await tokens_of(handle)
            with pytest.raises(EngineProtocolError, match="'a': started anew"):
                await handle.result()
        assert bench.told == ["a"]
        bench.check_clean()

    serve(main())


class Curious(FakeEngine):
    """Cannot say how the answer of one request stands."""

    def progress(self, slot, start):
        if self._tenants[slot].request.id == "bad":
            raise ValueError("no idea")
        return super().progress(slot, start)


def test_an_engine_that_cannot_tell_of_one_row_ends_that_one():
    async def main():
        bench = Bench(slots=3, engine=Curious(3))
        async with bench.driver as driver:
            bad, good = await driver.submit(request("bad")), await driver.submit(request("good"))
            with pytest.raises(ValueError, match="no idea"):
                await bad.result()
            assert await tokens_of(good) == alone(request("good"))
        bench.check_clean()

    serve(main())


class Stubborn(Admission):
    def admit(self, state, rv, round):
        if rv.request.id == "bad":
            raise ZeroDivisionError("a policy's bug")
        return super().admit(state, rv, round)


def test_what_ends_the_run_reaches_every_handle_and_the_owner():
    async def main():
        bench = Bench(engine=GatedEngine(2), policy=Policy(admission=Stubborn(), name="stubborn"))

        async def owner():
            async with bench.driver as driver:
                good = await driver.submit(request("good"))
                await bench.engine.in_a_step()
                bad = await driver.submit(request("bad"))
                bench.engine.let(100)
                join_driver()
                with pytest.raises(PolicyError, match="stubborn"):
                    await driver.submit(request("at once"))  # before the loop has been told
                for handle in (good, bad):
                    with pytest.raises(PolicyError, match="stubborn"):
                        await handle.result()
                with pytest.raises(PolicyError, match="stubborn"):
                    await driver.submit(request("later"))
                with pytest.raises(EngineProtocolError, match="over"):
                    await driver.call(bench.scheduler.pause)
                with pytest.raises(EngineProtocolError, match="over"):
                    await driver.ask(bench.scheduler.counts)

        with pytest.raises(PolicyError, match="stubborn"):
            await owner()

    serve(main())


def test_what_ends_the_run_reaches_all_who_wait_for_room():
    async def main():
        policy = Policy(admission=Stubborn(), name="stubborn")
        bench = Bench(engine=GatedEngine(2), policy=policy, max_open=2)
        met = []

        async def owner():
            async with bench.driver as driver:
                await driver.submit(request("good"))
                await bench.engine.in_a_step()
                await driver.submit(request("bad"))
                names = [f"w{i}" for i in range(5)]
                waiters = [
                    asyncio.create_task(driver.submit(request(name), wait=True)) for name in names
                ]
                await asyncio.sleep(0)
                bench.engine.let(100)
                join_driver()  # nothing is told until all of it can be
                met.extend(await asyncio.gather(*waiters, return_exceptions=True))

        with pytest.raises(PolicyError, match="stubborn"):
            await owner()
        assert [type(error) for error in met] == [PolicyError] * 5

    serve(main())


def nothing_left(*_, **__):
    """What a ``next`` without a default does."""
    return next(iter(()))


def test_stop_iteration_reaches_whoever_waits_as_another_error():
    # asyncio refuses it in a future: the call that hands it over would raise, and nobody be told.
    async def main():
        bench = Bench()
        async with bench.driver as driver:
            for outcome in (driver.ask(nothing_left), driver.call(nothing_left)):
                with pytest.raises(RuntimeError, match="StopIteration") as met:
                    await outcome
                assert isinstance(met.value.__cause__, StopIteration)
            await (await driver.submit(request("a"))).result()
        bench.check_clean()

        engine = FakeEngine(2)
        engine.progress = nothing_left
        async with Bench(engine=engine).driver as driver:
            with pytest.raises(RuntimeError, match="StopIteration"):
                await (await driver.submit(request("a"))).result()

        driver = AsyncDriver(Bench().scheduler, FakeEngine(2), on_update=nothing_left)

        async def owner():
            async with driver:
                for name in ("a", "b"):
                    with pytest.raises(RuntimeError, match="StopIteration"):
                        await (await driver.submit(request(name))).result()

        with pytest.raises(RuntimeError, match="StopIteration"):
            await owner()

    serve(main())


def test_leaving_lets_everyone_finish():
    # SDAR #14, JetEngine #4: more of them than there are slots.
    async def main():
        bench = Bench(slots=1)
        async with bench.driver as driver:
            handles = [await driver.submit(request(f"r{i}")) for i in range(10)]
        assert [(await handle.result()).reason for handle in handles] == [FinishReason.LENGTH] * 10
        bench.check_clean()

    serve(main())


def test_leaving_with_an_error_cancels_everyone():
    async def main():
        bench = Bench(slots=1, engine=GatedEngine(1))
        handles = []

        async def owner():
            async with bench.driver as driver:
                handles.extend([await driver.submit(request(f"r{i}")) for i in range(3)])
                await bench.engine.in_a_step()
                bench.engine.let(bench.depth)
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await owner()
        reasons = {(await handle.result()).reason for handle in handles}
        assert reasons == {FinishReason.CANCELLED}
        bench.check_clean()

    serve(main())


def test_a_drain_that_is_cancelled_becomes_a_fast_stop():
    async def main():
        bench = Bench(slots=1, engine=GatedEngine(1, steps=a_token_a_step))
        handles = []

        async def serve_some():
            async with bench.driver as driver:
                handles.extend([await driver.submit(request(f"r{i}")) for i in range(3)])

        task = asyncio.create_task(serve_some())
        await bench.engine.in_a_step()
        task.cancel()
        await asyncio.sleep(0)
        bench.engine.let(bench.depth)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert {(await handle.result()).reason for handle in handles} == {FinishReason.CANCELLED}
        bench.check_clean()

    serve(main())


def test_a_policy_is_swapped_live_and_the_scheduler_looked_at():
    async def main():
        bench = Bench(slots=1, engine=GatedEngine(1), policy=presets.per_request())
        async with bench.driver as driver:
            handle = await driver.submit(request("a"))
            await bench.engine.in_a_step()
            swap = asyncio.create_task(
                driver.call(bench.scheduler.set_policy, presets.continuous(batch_size=1))
            )
            look = asyncio.create_task(driver.ask(bench.scheduler.counts))
            await asyncio.sleep(0)
            bench.engine.let(100)
            await swap
            assert (await look).submitted == 1
            assert bench.scheduler.policy.name.startswith("continuous")
            await handle.result()
            with pytest.raises(ConfigError, match="driver itself calls submit"):
                await driver.call(bench.scheduler.submit, request("b"))
            with pytest.raises(ZeroDivisionError):
                await driver.ask(lambda: 1 / 0)
            with pytest.raises(ConfigError, match="must be callable"):
                await driver.ask("counts")
        assert driver.report().num_steps == bench.engine.num_runs

    serve(main())


def test_nothing_runs_while_paused_and_rows_can_be_started_anew():
    async def main():
        bench = Bench(slots=1, engine=GatedEngine(1, steps=a_token_a_step))
        async with bench.driver as driver:
            handle = await driver.submit(request("a"))
            await bench.engine.in_a_step()
            bench.engine.let(bench.depth)  # one may be ahead
            async with driver.paused():
                ran = bench.engine.num_runs
                other = await driver.submit(request("b"))
                await other.accepted()
                bench.engine.let(100)
                assert (await driver.ask(bench.scheduler.counts)).running == 1
                assert bench.engine.num_runs == ran
                await driver.call(bench.scheduler.requeue, "a")
            finished = await handle.result()
            assert finished.output.num_steps == 8, "all of its steps anew"
            assert await tokens_of(handle) == finished.output.tokens
            await other.result()
        bench.check_clean()

    serve(main())


def test_of_several_who_paused_the_last_one_out_lets_steps_run():
    async def main():
        bench = Bench(slots=1)
        async with bench.driver as driver:
            first = driver.paused()
            await first.__aenter__()
            async with driver.paused():
                await first.__aexit__(None, None, None)
                handle = await driver.submit(request("a"))
                await handle.accepted()
                for _ in range(3):
                    assert (await driver.ask(bench.scheduler.counts)).waiting == 1
            await handle.result()
        bench.check_clean()

    serve(main())


@pytest.mark.parametrize("turns", range(4))
def test_who_gives_up_pausing_leaves_nobody_paused(turns):
    async def main():
        bench = Bench(slots=1, engine=GatedEngine(1, steps=a_token_a_step))
        entered = False

        async def pause():
            nonlocal entered
            async with bench.driver.paused():
                entered = True
                await asyncio.Event().wait()

        async with bench.driver as driver:
            handle = await driver.submit(request("a"))
            await bench.engine.in_a_step()
            gives_up = asyncio.create_task(pause())
            for turn in range(turns):
                bench.engine.let()
                # Turn by turn: it is asked for, in force with a step ahead, in force.
                await driver.ask(bench.scheduler.counts) if turn else await asyncio.sleep(0)
            gives_up.cancel()
            await asyncio.sleep(0)
            gives_up.cancel()  # once more, while it lets steps run
            bench.engine.let(100)
            await asyncio.gather(gives_up, return_exceptions=True)
            assert gives_up.cancelled()
            await handle.result()
            await (await driver.submit(request("b"))).result()
        bench.check_clean()

    serve(main())


def test_a_step_that_hangs_is_named_and_the_loop_goes_on():
    # vllm #29416, #36130.
    async def main():
        loop, stuck = asyncio.get_running_loop(), asyncio.Event()
        named = []

        def on_stuck(batch, seconds):
            named.append([row.request.id for row in batch.rows])
            loop.call_soon_threadsafe(stuck.set)

        bench = Bench(engine=GatedEngine(2), step_timeout_s=1e-3, on_stuck=on_stuck)
        async with bench.driver as driver:
            handle = await driver.submit(request("a"))
            await stuck.wait()
            bench.engine.let(100)
            assert (await handle.result()).reason is FinishReason.LENGTH
        assert named[0] == ["a"]
        bench.check_clean()

    serve(main())


def test_used_wrongly_it_says_so():
    async def main():
        bench = Bench()
        with pytest.raises(EngineProtocolError, match="async with"):
            await bench.driver.submit(request("a"))
        with pytest.raises(EngineProtocolError, match="async with"):
            await bench.driver.stop()
        for look in (bench.driver.ask, bench.driver.call):
            with pytest.raises(EngineProtocolError, match="async with"):
                await look(bench.scheduler.counts)
        with pytest.raises(EngineProtocolError, match="async with"):
            async with bench.driver.paused():
                pass
        async with bench.driver as driver:
            for use in (
                lambda: driver.submit(request("a")),
                lambda: driver.ask(bench.scheduler.counts),
                lambda: driver.call(bench.scheduler.pause),
                driver.stop,
            ):
                with pytest.raises(EngineProtocolError, match="another event loop"):
                    await asyncio.to_thread(lambda use=use: asyncio.run(use()))
            with pytest.raises(ConfigError, match="must be a Request"):
                await driver.submit("a")
            with pytest.raises(ConfigError, match="finish must be one of"):
                await driver.stop("now")
            with pytest.raises(EngineProtocolError, match="runs once"):
                await driver.__aenter__()
        with pytest.raises(EngineProtocolError, match="runs once"):
            async with bench.driver:
                pass

    for max_open in (0, -1, True, 1.5, "many"):
        with pytest.raises(ConfigError, match="max_open"):
            Bench(max_open=max_open)
    serve(main())


def test_a_closed_loop_stops_the_run():
    bench = Bench(slots=1, engine=GatedEngine(1))

    async def main():
        driver = await bench.driver.__aenter__()
        for i in range(3):
            await driver.submit(request(f"r{i}"))
        await bench.engine.in_a_step()

    asyncio.run(main())
    bench.engine.let(100)
    join_driver()
    bench.check_clean()


def test_one_wake_up_brings_all_that_a_step_told():
    async def main():
        bench = Bench(slots=8, engine=GatedEngine(8, steps=a_token_a_step))
        calls = []
        async with bench.driver as driver:
            handles = [await driver.submit(request(f"r{i}")) for i in range(8)]
            await bench.engine.in_a_step()
            bench.engine.let()
            await bench.engine.in_a_step()
            loop = asyncio.get_running_loop()
            call = loop.call_soon_threadsafe

            def counted(callback, *args):
                if callback == driver._deliver:
                    calls.append(callback)
                return call(callback, *args)

            loop.call_soon_threadsafe = counted
            bench.engine.let()
            while bench.engine.num_runs < 2 or not bench.engine.begun.acquire(blocking=False):
                pass  # the loop stands still meanwhile
            assert len(calls) == 1
            del loop.call_soon_threadsafe
            bench.engine.let(100)
            await asyncio.gather(*(handle.result() for handle in handles))

    serve(main())


KILLED = """
import asyncio, sys, threading
from dllm_sched import Capacity, Request
from dllm_sched.journal import JournaledScheduler
from dllm_sched.runtime import AsyncDriver
from dllm_sched.testing import FakeEngine

submitted = threading.Event()

class Hanging(FakeEngine):
    def run(self, batch):
        submitted.wait()
        if self.num_runs == 6:
            print("hangs", flush=True)
            threading.Event().wait()
        return super().run(batch)

def note(update):
    if update.finished:
        print(*(finished.request.id for finished in update.finished), flush=True)

async def main():
    scheduler = JournaledScheduler(sys.argv[1], capacity=Capacity(max_num_seqs=2))
    async with AsyncDriver(scheduler, Hanging(2), on_update=note) as driver:
        for i in range(12):
            handle = await driver.submit(
                Request(f"r{i}", prompt_len=5, max_new_tokens=8, block_length=4)
            )
        submitted.set()

asyncio.run(main())
"""


def test_killed_in_a_step_and_restarted_everybody_is_served(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path / "old"], stdout=subprocess.PIPE, text=True
    ) as killed:
        before = []
        for line in killed.stdout:
            if line == "hangs\n":
                break
            before.append(line.split())
        killed.kill()
    served = {name for update in before for name in update}
    assert served, "some were served before"
    restored = restore(tmp_path / "old", tmp_path / "new", now=0.0)
    names = {request.id for request in restored.requests}
    # At least once: the last ends may have been told, or not; nobody can know.
    assert {f"r{i}" for i in range(12)} - served <= names
    assert names & served <= set(before[-1])
    ended = {}

    async def main():
        driver = AsyncDriver(
            restored.scheduler,
            FakeEngine(2),
            on_update=lambda update: ended.update({one.request.id: one for one in update.finished}),
        )
        async with driver:
            fresh = await driver.submit(request("fresh"))
            assert await tokens_of(fresh) == alone(request("fresh"))

    serve(main())
    restored.scheduler.close()
    assert set(ended) == names | {"fresh"}
    for name in names:
        assert ended[name].output.tokens == alone(request(name))
