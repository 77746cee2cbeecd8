"""Prove with one call that a policy keeps its contract.

``check_policy`` lives through small days of work (bursts, trickles, deadlines, cancels, failing
steps, tight memory) with a real ``Scheduler`` around the policy and an engine in virtual time. A
probe around each axis looks at every question and answer; then the same days are lived again with
other ids, another origin of time, a second scheduler beside, and axes joined with themselves.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import attrs

from dllm_sched.capacity import Capacity
from dllm_sched.errors import ConfigError
from dllm_sched.policies.base import Policy, Strategy
from dllm_sched.request import Request
from dllm_sched.testing._play import Play
from dllm_sched.testing._probes import POLICY_RULES, PolicyCheckError, Record, probed
from dllm_sched.testing._workloads import Workload, workloads

__all__ = ["POLICY_RULES", "PolicyCheckError", "check_policy"]

_MakesRequests = Callable[..., Request]

_SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_SHIFTS = (517.5, -100.375)  # seconds; exact in binary
_OPERATORS: tuple[tuple[str, str, Callable[[Any, Any], Any]], ...] = tuple(
    [
        (axis, sign, call)
        for axis in ("admission", "timeout", "composition", "eviction")
        for sign, call in (("&", operator.and_), ("|", operator.or_))
    ]
    + [(axis, ".then", lambda x, y: x.then(y)) for axis in ("ordering", "control")]
)


def check_policy(
    policy: Policy | Callable[[], Policy],
    *,
    capacity: Capacity | None = None,
    seed: int = 0,
    request: Callable[..., Request] = Request,
) -> None:
    """Check that a policy keeps its contract; return if it does.

    The rules are the keys of ``POLICY_RULES``. A strategy may compute an attribute of its own once
    (a cached property); whatever else it keeps on itself is found. Plain callables on an axis are
    checked as strategies are. What runs is deterministic: no clock, no random number, and the same
    for the same arguments.

    Args:
        policy: The policy, or a callable that makes a new one each time.
        capacity: What to check it within; with a memory model, within that one only, else also
            within tight models of memory. Default: the smallest number of slots that the policy
            accepts, 4 or more.
        seed: Of the workloads; another seed, other requests and instants.
        request: Makes a request of the fields of ``Request`` (its payload is not among them): for
            policies that look at more, in a subclass or in a payload. It must not look at the id.

    Raises:
        PolicyCheckError: If the policy breaks a rule; names the rule and the axis, and has every
            call that led there. It is an ``AssertionError``.
        ConfigError: If ``policy`` is or makes no Policy, or refuses ``capacity``.

    Complexity:
        A second or two of one core for a policy of 4 slots: some thousand steps, each question
        asked twice with a print of its arguments taken before and after.
    """
    fresh = _maker(policy)
    capacity = _capacity(fresh(), capacity)
    days = tuple(day for day in workloads(capacity, seed) if _takes(fresh(), day.capacity))
    logs = []
    for day in days:
        about = f"# check_policy(policy, seed={seed}): workload {day.name!r}"
        record = Record(about)
        checked = probed(fresh(), record)
        watched = Play(checked.policy, day, record=record, probes=checked, request=request)
        logs.append(_check_determinism(fresh, day, about, watched.to_end(), request))
    _check_sharing(fresh(), days, logs, seed, request)
    for day in days:
        _check_ids_and_origin(fresh, day, seed, request)
    _check_operators(fresh, days, logs, seed, request)


# --- what to check, and where -----------------------------------------------------------------


def _maker(policy: Policy | Callable[[], Policy]) -> Callable[[], Policy]:
    """What makes policies that have lived through nothing yet."""
    if isinstance(policy, Policy):
        try:
            untouched = copy.deepcopy(policy)
        except Exception:  # noqa: BLE001  # it cannot be copied: then always the same object
            return lambda: policy
        return lambda: copy.deepcopy(untouched)
    if not callable(policy):
        raise ConfigError(f"check_policy: expected a Policy or a callable, got {policy!r}")

    def make() -> Policy:
        made = policy()
        if not isinstance(made, Policy):
            raise ConfigError(f"check_policy: {policy!r} made {made!r}, not a Policy")
        return made

    return make


def _takes(policy: Policy, capacity: Capacity) -> bool:
    """Whether the policy accepts a capacity."""
    for axis in ("ordering", "admission", "timeout", "composition", "eviction", "control"):
        try:
            getattr(policy, axis).validate(capacity)
        except ConfigError:
            return False
        except Exception as error:
            raise Record(f"# policy.validate({capacity!r})").fail(
                "raises", axis, f"validate raised {error!r}; what it may raise is ConfigError"
            ) from error
    return True


def _capacity(policy: Policy, capacity: Capacity | None) -> Capacity:
    if capacity is not None:
        if not _takes(policy, capacity):
            policy.validate(capacity)
        return capacity
    for size in _SIZES:
        capacity = Capacity(max_num_seqs=size)
        if _takes(policy, capacity):
            return capacity
    why = ""
    try:
        policy.validate(Capacity(max_num_seqs=_SIZES[-1]))
    except ConfigError as error:
        why = f" ({error})"
    raise ConfigError(
        "check_policy: no capacity was given, and of its own, Capacity(max_num_seqs=n) with n = "
        f"{_SIZES[0]}, {_SIZES[1]}, ..., {_SIZES[-1]}, the policy accepts none{why}; pass one that "
        "it accepts: check_policy(policy, capacity=Capacity(max_num_seqs=...))"
    )


# --- the same again, otherwise ----------------------------------------------------------------


def _difference(left: Sequence[object], right: Sequence[object]) -> str | None:
    for number, (one, other) in enumerate(zip_longest(left, right)):
        if one != other:
            return f"entry {number} of the log is {one!r} in one run and {other!r} in the other"
    return None


def _again(policy: Policy, day: Workload, about: str, rule: str, axis: str, **how: Any) -> Play:
    """Live through a day without probes; an error is a breach of ``rule``: it was none before."""
    play = Play(policy, day, record=Record(about), **how)
    try:
        play.to_end()
    except PolicyCheckError as error:
        raise Record(error.reproduction).fail(rule, axis, f"only then: {error}") from error
    return play


def _check_determinism(
    fresh: Callable[[], Policy],
    day: Workload,
    about: str,
    watched: list[object],
    request: _MakesRequests,
) -> list[object]:
    first, second = (
        _again(fresh(), day, about, "deterministic", "policy", request=request) for _ in range(2)
    )
    difference = _difference(first.log, second.log)
    if difference is not None:
        raise first._record.fail("deterministic", "policy", difference)
    difference = _difference(watched, first.log)
    if difference is not None:
        raise first._record.fail(
            "repeatable", "policy", f"questions asked twice change the decisions: {difference}"
        )
    return first.log


def _check_sharing(
    policy: Policy,
    days: Sequence[Workload],
    logs: Sequence[list[object]],
    seed: int,
    request: _MakesRequests,
) -> None:
    """One object, two schedulers, their calls in turn; and each day after all those before."""
    for index, day in enumerate(days):
        other = (index + 3) % len(days)
        about = f"# seed={seed}: one policy object, {day.name!r} and {days[other].name!r} in turn"
        pair = [
            Play(policy, one, record=Record(about), request=request) for one in (day, days[other])
        ]
        going: list[Iterator[None]] = [play.calls() for play in pair]
        try:
            while going:
                going = [calls for calls in going if next(calls, calls) is not calls]
        except PolicyCheckError as error:
            raise Record(error.reproduction).fail(
                "shared-state", "policy", f"only with a second scheduler beside: {error}"
            ) from error
        for play, alone in zip(pair, (logs[index], logs[other]), strict=True):
            difference = _difference(alone, play.log)
            if difference is not None:
                raise play._record.fail(
                    "shared-state", "policy", f"a second scheduler beside changes: {difference}"
                )


def _check_ids_and_origin(
    fresh: Callable[[], Policy], day: Workload, seed: int, request: _MakesRequests
) -> None:
    submitted = [action.what["id"] for action in day.actions if action.call == "submit"]
    names = {id: f"{(37 * n + 11) % 10_007}-{id[::-1]}" for n, id in enumerate(submitted)}
    about = f"# seed={seed}: workload {day.name!r}"
    plain = _again(fresh(), day, about, "deterministic", "policy", coarse=True, request=request)
    others: list[tuple[str, dict[str, Any]]] = [("ids", {"names": names})]
    others.extend([("time-shift", {"shift": shift}) for shift in _SHIFTS])
    for rule, how in others:
        told = f"{about} with {how!r}"
        play = _again(fresh(), day, told, rule, "policy", coarse=True, request=request, **how)
        difference = _difference(plain.log, play.log)
        if difference is not None:
            raise play._record.fail(rule, "policy", difference)


def _check_operators(
    fresh: Callable[[], Policy],
    days: Sequence[Workload],
    logs: Sequence[list[object]],
    seed: int,
    request: _MakesRequests,
) -> None:
    for axis, sign, combine in _OPERATORS:
        policy = fresh()
        one: Strategy = getattr(policy, axis)
        if type(one).__module__ == Strategy.__module__ and not _answers(one):
            continue  # the default of its axis
        try:
            joined = attrs.evolve(policy, **{axis: combine(one, one)})
        except Exception as error:
            raise Record(f"# x {sign} x, x = {one!r}").fail(
                "operators", axis, f"raised {error!r}"
            ) from error
        for day, log in zip(days, logs, strict=True):
            if day.name in ("nobody", "one", "trickle"):
                continue
            about = f"# seed={seed}: workload {day.name!r}, x {sign} x for {axis}"
            play = _again(joined, day, about, "operators", axis, request=request)
            difference = _difference(log, play.log)
            if difference is not None:
                raise play._record.fail(
                    "operators", axis, f"x {sign} x is not x, x = {one!r}: {difference}"
                )


def _answers(strategy: Strategy) -> bool:
    hooks = (
        "key accept admit joined settle recheck due select limits victims knobs batch_knobs hints"
    )
    return any(strategy.asks(hook) for hook in hooks.split())
