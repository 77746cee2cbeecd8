"""Every preset, on a real model: the tokens are those that each request has alone."""

from __future__ import annotations

import math
import random
import runpy
from pathlib import Path

import pytest

from dllm_sched import Policy, Scheduler
from dllm_sched.policies import ConfidenceThreshold
from dllm_sched.policies.presets import PRESETS, by_name
from dllm_sched_hf.engine import D2FEngine

needed = runpy.run_path(str(Path(__file__).parents[1] / "needed.py"))["needed"]
OPTIONS = {
    "blockserve": {"tokens": 300},
    "congestion_stable": {"per_step": 0.5},
    "dllm_serve": {"max_num_batched_tokens": 400},
    "exclusive": {"count": 2},
    "fair_share": {"weights": {"tenant 1": 2.0}},
    "fixed_fill": {"timeout_s": 2.0},
    "sangam": {"tokens": 40},
    "sarathi": {"tokens": 500},
    "tediserve": {"grid": ((0.9, 1.0),)},  # the threshold of the record
}
"""Small ones, so that each has something to decide."""

NUM_REQUESTS = 6


def without_foreign_knobs(engine, batch):
    """An engine refuses knobs that it does not know, so a driver takes them out."""

    def own(knobs):
        return {name: knobs[name] for name in knobs if name in engine.decoder_type.knobs}

    def rows_of(rows):
        return tuple(row._replace(knobs=own(row.knobs)) for row in rows)

    return batch._replace(
        rows=rows_of(batch.rows), joined=rows_of(batch.joined), knobs=own(batch.knobs)
    )


def serve(engine, policy, requests, *, capacity=None):
    """Serve requests that come while others run; return the endings by id."""
    rng = random.Random(7)
    sched = Scheduler(policy=policy, capacity=engine.capacity() if capacity is None else capacity)
    coming, now, ended = list(reversed(requests)), 0.0, {}

    def deliver(update):
        engine.release(update.released)
        for end in update.finished:
            assert end.request.id not in ended
            ended[end.request.id] = end

    while coming or sched.has_work():
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            if coming:
                sched.submit(coming.pop(), now=now)
                if not coming:
                    deliver(sched.drain(now=now))
        update = sched.next_step(now=now)
        deliver(update)
        now += 0.25
        assert now < 1000.0
        if update.batch is not None:
            outcome = engine.run(without_foreign_knobs(engine, update.batch))
            deliver(sched.complete_step(update.batch, outcome, now=now))
        sched.check_invariants()
    return ended


@pytest.mark.parametrize("kind", ["d2f_gqa_train_b16", "fast_dllm_gqa_dual_thr08_b16"])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_tokens_are_those_of_the_record(
    name, kind, record, golden_request, golden_engine, assert_recorded
):
    stored = record(kind)
    entries = stored["requests"][:NUM_REQUESTS]
    engine = golden_engine(stored, 4, report_masked=True)
    policy = by_name(name, **needed(name, 3), **OPTIONS.get(name, {}))
    requests = [
        golden_request(stored, entry, tenant=f"tenant {index % 2}", deadline_at=900.0 + index)
        for index, entry in enumerate(entries)
    ]
    ended = serve(engine, policy, requests)
    assert len(ended) == NUM_REQUESTS
    for entry in entries:
        assert_recorded(ended[str(entry["id"])].output, entry)


def test_a_row_under_the_knob_decodes_as_alone_with_that_threshold(
    record, golden_request, model, loop
):
    stored = record("d2f_gqa_train_b16")
    entries = stored["requests"][:NUM_REQUESTS]
    hurried = {str(entry["id"]) for entry in entries[::2]}
    alone, drive = {}, loop(D2FEngine(model("tiny_gqa"), max_num_seqs=1, trace=True))
    for entry in entries[::2]:
        drive.join(0, golden_request(stored, entry, skip_threshold=0.5))
        drive.run()
        alone |= drive.outputs
    # no deadline but the last day's can be met at such a step: those rows get the lowest threshold
    control = ConfidenceThreshold(((0.5, 0.6), (0.9, 1.0)), step_s=1e6, demand=0.0)
    requests = [
        golden_request(stored, entry, deadline_at=1e5 if str(entry["id"]) in hurried else math.inf)
        for entry in entries
    ]
    engine = D2FEngine(model("tiny_gqa"), max_num_seqs=4, trace=True)
    ended = serve(engine, Policy(control=control), requests)
    fewer = 0
    for entry in entries:
        output = ended[str(entry["id"])].output
        if str(entry["id"]) in hurried:
            assert output == alone[str(entry["id"])]
            fewer += output.num_forwards < entry["n_forward"]
        else:
            assert list(output.tokens) == entry["output"]
            assert list(output.trace) == entry["trace"]
    assert fewer
