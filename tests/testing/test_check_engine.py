"""check_engine accepts the fake engine, and catches a shelf of broken ones by the right rule."""

import attrs
import pytest

from dllm_sched import (
    NOTHING,
    ConfigError,
    FinishReason,
    Request,
    RowFailed,
    RowFinished,
    StepOutcome,
)
from dllm_sched.testing import EngineCheckError, FakeEngine, check_engine


def make_request(index):
    return Request(f"r{index}", prompt_len=3 + index, max_new_tokens=6 + 3 * index, block_length=4)


def make_bad_request(index):
    return attrs.evolve(make_request(index + 3), id=f"bad{index}")


POISON = {"bad0": 1, "bad1": 4}


def steps(request):
    return 2 + request.max_new_tokens // 2


def make_fake(max_num_seqs):
    return FakeEngine(max_num_seqs, steps=steps, poison=POISON)


def check(make_engine, **options):
    check_engine(make_engine, make_request, make_bad_request=make_bad_request, **options)


def test_a_sound_engine_passes():
    check(make_fake)


class Wrapped(FakeEngine):
    """A sound engine whose outcomes a subclass spoils."""

    def __init__(self, max_num_seqs):
        super().__init__(max_num_seqs, steps=steps, poison=POISON)
        self.slots = max_num_seqs


class SeesNeighbours(Wrapped):
    def run(self, batch):
        outcome = super().run(batch)
        finished = tuple(f._replace(output=(f.output, len(batch.rows))) for f in outcome.finished)
        return outcome._replace(finished=finished)


class KnowsItsSlot(Wrapped):
    def run(self, batch):
        outcome = super().run(batch)
        finished = tuple(f._replace(output=(f.output, f.slot)) for f in outcome.finished)
        return outcome._replace(finished=finished)


class KnowsItsNumberOfSlots(Wrapped):
    """Wrong in batches of one size only, as kernels that depend on shape are."""

    def run(self, batch):
        outcome = super().run(batch)
        finished = tuple(f._replace(output=(f.output, self.slots == 3)) for f in outcome.finished)
        return outcome._replace(finished=finished)


class CountsStepsForAll(Wrapped):
    """Its noise is keyed by the engine's step, not by the row's own."""

    def run(self, batch):
        outcome = super().run(batch)
        step = self.num_runs
        finished = tuple(
            f._replace(output=(f.output.tokens, step - f.output.num_steps))
            for f in outcome.finished
        )
        return outcome._replace(finished=finished)


class RemembersAnswers(Wrapped):
    """A cache by id that outlives the request."""

    def __init__(self, max_num_seqs):
        super().__init__(max_num_seqs)
        self.seen = {}

    def run(self, batch):
        outcome = super().run(batch)
        names = {row.slot: row.request.id for row in batch.rows}
        finished = []
        for one in outcome.finished:
            times = self.seen[names[one.slot]] = self.seen.get(names[one.slot], 0) + 1
            finished.append(one._replace(output=(one.output, times)))
        return outcome._replace(finished=tuple(finished))


class KeepsSlotsDirty(Wrapped):
    """A row that joins goes on from where the slot's last one stood, if that was cancelled."""

    def release(self, released):
        dirty = [
            (gone.slot, self._tenants[gone.slot])
            for gone in released
            if gone.reason is FinishReason.CANCELLED and self._tenants[gone.slot] is not None
        ]
        super().release(released)
        self.dirty = getattr(self, "dirty", {}) | dict(dirty)

    def _place(self, row):
        super()._place(row)
        old = getattr(self, "dirty", {}).pop(row.slot, None)
        if old is not None:
            self._tenants[row.slot].tokens = old.tokens[:1]


class GoesOnAfterARestart(Wrapped):
    def release(self, released):
        restarted = {
            gone.request: self._tenants[gone.slot]
            for gone in released
            if gone.reason is None and not gone.kept and self._tenants[gone.slot] is not None
        }
        super().release(released)
        self.restarted = getattr(self, "restarted", {}) | restarted

    def _place(self, row):
        super()._place(row)
        old = getattr(self, "restarted", {}).pop(row.request, None)
        if old is not None and not row.resumed:
            self._tenants[row.slot] = old


class ForgetsKeptProgress(Wrapped):
    def release(self, released):
        super().release([gone._replace(kept=False) for gone in released])


class ResumesFromNothing(Wrapped):
    """The tokens are right, but the row counts its steps anew: its noise would differ."""

    def _place(self, row):
        super()._place(row)
        if row.resumed:
            self._tenants[row.slot].done = 0


class ResumesWhereItWas(Wrapped):
    """What it keeps of a row stays in the slot: whoever resumes elsewhere gets a stranger's."""

    def __init__(self, max_num_seqs):
        super().__init__(max_num_seqs)
        self.left = {}

    def release(self, released):
        self.left |= {gone.slot: self._tenants[gone.slot] for gone in released if gone.kept}
        super().release(released)

    def _place(self, row):
        super()._place(row)
        if row.resumed and row.slot in self.left:
            self._tenants[row.slot].tokens = list(self.left[row.slot].tokens)


class AdvancesRowsThatSitOut(Wrapped):
    """A step counter for the whole engine, where each row has its own."""

    def run(self, batch):
        outcome = super().run(batch)
        running = {row.slot for row in batch.rows}
        for slot, tenant in enumerate(self._tenants):
            if slot not in running and tenant is not None and tenant.done < tenant.steps - 1:
                tenant.done += 1
        return outcome


class FailsNeighboursToo(Wrapped):
    def run(self, batch):
        outcome = super().run(batch)
        if not outcome.failed:
            return outcome
        return StepOutcome(failed=tuple(RowFailed(r.slot, ValueError("?")) for r in batch.rows))


class RaisesForABadRow(Wrapped):
    def run(self, batch):
        outcome = super().run(batch)
        if outcome.failed:
            raise outcome.failed[0].error
        return outcome


class ServesBadRows(Wrapped):
    def __init__(self, max_num_seqs):
        super().__init__(max_num_seqs)
        self._poison = {}


class NamesASlotItWasNotGiven(Wrapped):
    def run(self, batch):
        outcome = super().run(batch)
        if self.slots == 1:
            return outcome
        other = RowFinished(self.slots, FinishReason.EOS)
        return outcome._replace(finished=(*outcome.finished, other))


class TellsAFinishTwice(Wrapped):
    def run(self, batch):
        outcome = super().run(batch)
        return outcome._replace(finished=outcome.finished * 2)


class NeverFinishes(Wrapped):
    def run(self, batch):
        super().run(batch)
        return NOTHING


class ReportsBlocksBackward(Wrapped):
    def run(self, batch):
        outcome = super().run(batch)
        boundaries = tuple(b._replace(kv_tokens=10_000) for b in outcome.boundaries)
        return outcome._replace(boundaries=boundaries)


class RaisesWhenFull(Wrapped):
    def run(self, batch):
        if len(batch.rows) == 4:
            raise MemoryError("no room")
        return super().run(batch)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (SeesNeighbours, "neighbours"),
        (KnowsItsSlot, "neighbours"),
        (CountsStepsForAll, "neighbours"),
        (RaisesWhenFull, "neighbours"),
        (NamesASlotItWasNotGiven, "neighbours"),
        (KnowsItsNumberOfSlots, "batch size"),
        (RemembersAnswers, "used engine"),
        (KeepsSlotsDirty, "cancelled"),
        (GoesOnAfterARestart, "restarted"),
        (AdvancesRowsThatSitOut, "sitting out"),
        (ForgetsKeptProgress, "resumed"),
        (ResumesFromNothing, "resumed"),
        (FailsNeighboursToo, "failing row"),
        (RaisesForABadRow, "failing row"),
        (ServesBadRows, "failing row"),
        (TellsAFinishTwice, "alone"),
        (ReportsBlocksBackward, "alone"),
        (NeverFinishes, "alone"),
    ],
)
def test_a_broken_engine_is_caught_by_the_rule_it_breaks(broken, rule):
    with pytest.raises(EngineCheckError, match=f"rule '{rule}'"):
        check(broken, max_steps=300)


def test_two_rows_are_enough_to_trade_slots():
    """In larger trials somebody is moved under "resumed" already, by chance."""
    with pytest.raises(EngineCheckError, match="rule 'moved'"):
        check(ResumesWhereItWas, num_requests=2, max_num_seqs=2)


def test_the_message_shows_both_answers_and_the_request():
    with pytest.raises(EngineCheckError) as caught:
        check(KnowsItsSlot)
    text = str(caught.value)
    assert "request 'r1' answers differently" in text
    assert "alone: length after 6 steps: (FakeOutput(" in text
    assert "here:  length after 6 steps: (FakeOutput(" in text


def test_what_an_engine_cannot_do_is_not_asked_of_it():
    check(ForgetsKeptProgress, can_resume=False)
    check(AdvancesRowsThatSitOut, can_sit_out=False)


@pytest.mark.parametrize(
    ("broken", "option"),
    [(ForgetsKeptProgress, "can_resume=False"), (AdvancesRowsThatSitOut, "can_sit_out=False")],
)
def test_the_message_says_how_to_check_engines_that_cannot(broken, option):
    with pytest.raises(EngineCheckError, match=option):
        check(broken)


def test_output_says_what_must_be_equal():
    check(KnowsItsSlot, output=lambda pair: pair[0])


def test_too_little_to_check_is_refused():
    with pytest.raises(ConfigError, match="num_requests"):
        check(make_fake, num_requests=1)
    with pytest.raises(ConfigError, match="twice"):
        check_engine(make_fake, lambda index: make_request(0))
