"""Weighted fair share: tenants get slots in proportion to their weights, whoever shouts louder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import attrs

from dllm_sched.errors import ConfigError
from dllm_sched.events import RequestFinished, RequestJoined, RequestSubmitted
from dllm_sched.policies._persistent import EMPTY, GONE, Levels, get, put
from dllm_sched.policies.base import Ordering
from dllm_sched.request import Request, RequestStatus, RequestView
from dllm_sched.theory._check import is_number, positive

__all__ = ["WeightedFairShare"]


_REMEMBERED = 4096  # submissions after which a tenant whose last request has run is forgotten


class _Tag(NamedTuple):
    """What an active request was given when it was submitted."""

    start: float
    tenant: str
    share: float  # its cost over its tenant's weight


class _Tenant(NamedTuple):
    finish: float  # the virtual finish of its last request
    last: str | None  # the id of that request while it waits
    serial: int  # of its last submission


class _State(NamedTuple):
    virtual: float  # the latest start among those who joined
    entry: float  # where a tenant starts that is not ahead of ``virtual``; never before it
    weight: float  # of the tenants whose last request waits
    num_submitted: int
    tenants: Levels  # name -> _Tenant, of those that would not start at ``virtual``
    tags: Levels  # request id -> _Tag


def _weights(weights: Mapping[str, float]) -> dict[str, float]:
    if not isinstance(weights, Mapping):
        raise ConfigError(
            f"WeightedFairShare: weights must map tenants to weights, got {weights!r}"
        )
    for tenant, weight in weights.items():
        if not isinstance(tenant, str):
            raise ConfigError(f"WeightedFairShare: a tenant is a str, got {tenant!r}")
        positive(**{f"WeightedFairShare: the weight of {tenant!r}": weight})
    return dict(weights)


def _weight(_instance: object, field: attrs.Attribute[float], value: object) -> None:
    positive(**{f"WeightedFairShare: {field.name}": value})


def _callable(_instance: object, field: attrs.Attribute[Any], value: object) -> None:
    if not callable(value):
        raise ConfigError(f"WeightedFairShare: {field.name} must be a callable, got {value!r}")


def _budget(request: Request) -> float:
    return request.max_blocks


@attrs.frozen
class WeightedFairShare(Ordering):
    """Start-time fair queueing among tenants (``Request.tenant``).

    A request starts, in virtual time, where its tenant's last one finishes, and finishes
    ``cost / weight`` later. The smallest start goes first; the latest start that was served is the
    virtual time. While two tenants both wait, what they were given (by cost, counted at the join),
    each over its weight, differs in no interval by more than one largest request of each over its
    weight (cancellations aside, which make room for later requests).

    A tenant whose last finish the virtual time has passed was idle, and starts at the entry: at
    the virtual time, or later by what was served since that moved, over the weight of all who
    wait. So it has no credit, waits for nobody's backlog, and even a stream of ever new tenants
    leaves nobody behind: every start is passed in time.

    A request that ends before it ever ran gives its share back. A preempted one keeps its place.
    After a swap to this ordering, who waited already comes first, by arrival.

    State: the active requests, and the tenants that are ahead of the virtual time. Of those, one
    whose last request has run is forgotten after 4,096 later submissions, and all of them whenever
    nobody is active; so the state does not grow with the number of tenants ever seen. O(log n)
    amortised, n being the entries it has.

    Args:
        weights: Tenant -> weight, > 0; twice the weight, twice the share.
        default_weight: Of tenants that ``weights`` does not name, > 0.
        cost: What a request takes, > 0 and finite; default: the blocks of its budget.

    Raises:
        ConfigError: If an argument is out of range.

    Source:
        Start-time fair queueing (Goyal, Vin and Cheng, 1997); the entry, the share given back and
        the pruning are our own derivation.
    """

    observes = (RequestSubmitted, RequestJoined, RequestFinished)

    weights: Mapping[str, float] = attrs.field(factory=dict, converter=_weights, hash=False)
    default_weight: float = attrs.field(default=1.0, validator=_weight)
    cost: Callable[[Request], float] = attrs.field(default=_budget, validator=_callable)

    def init(self) -> _State:
        """Start at virtual time 0, with nobody in it."""
        return _State(0.0, 0.0, 0.0, 0, EMPTY, EMPTY)

    def key(self, state: _State, rv: RequestView) -> tuple[float, ...]:
        """Return ``(virtual start,)``."""
        tag: _Tag | None = get(state.tags, rv.id)
        if tag is not None:
            return (tag.start,)
        if rv.status is RequestStatus.WAITING:
            self._share(rv.request)  # what is wrong with a cost is said now, not once it waits
            return (self._start(state, self._tenant(rv.request)),)
        return (state.virtual,)  # it ran before this ordering was in force

    def observe(self, state: _State, event: Any) -> _State:
        """Tag a submitted request, follow the joins, forget the finished."""
        if isinstance(event, RequestSubmitted):
            return self._submitted(state, event.request)
        tag: _Tag | None = get(state.tags, event.request_id)
        if tag is None:
            return state
        if isinstance(event, RequestJoined):
            return self._joined(state, event, tag)
        return self._finished(state, event, tag)

    def _joined(self, state: _State, event: RequestJoined, tag: _Tag) -> _State:
        virtual, entry, weight, num_submitted, tenants, tags = state
        own = self._weight(tag.tenant)
        virtual = max(virtual, tag.start)
        entry = max(virtual, entry) + tag.share * own / max(weight, own)
        known: _Tenant | None = get(tenants, tag.tenant)
        if known is None or known.last != event.request_id:
            return _State(virtual, entry, weight, num_submitted, tenants, tags)
        state = _State(virtual, entry, weight - own, num_submitted, tenants, tags)
        return self._put(state, tag.tenant, known._replace(last=None))

    def _finished(self, state: _State, event: RequestFinished, tag: _Tag) -> _State:
        virtual, entry, weight, num_submitted, tenants, tags = state
        tags = put(tags, event.request_id, GONE)
        if not tags:
            return self.init()  # nobody is there: nobody is ahead or behind
        known: _Tenant | None = get(tenants, tag.tenant)
        if known is None or event.admitted_at is not None:
            return _State(virtual, entry, weight, num_submitted, tenants, tags)
        last = known.last
        if last == event.request_id:
            weight, last = weight - self._weight(tag.tenant), None
        state = _State(virtual, entry, weight, num_submitted, tenants, tags)
        return self._put(state, tag.tenant, _Tenant(known.finish - tag.share, last, known.serial))

    def _tenant(self, request: Request) -> Any:
        """Whose share a request takes."""
        return request.tenant

    def _start(self, state: _State, tenant: str) -> float:
        known: _Tenant | None = get(state.tenants, tenant)
        return state.entry if known is None or known.finish <= state.virtual else known.finish

    def _submitted(self, state: _State, request: Request) -> _State:
        # Nothing that this ordering observes lies between the key of a submit and its event, so
        # the start is the one that the key said.
        name = self._tenant(request)
        start, share = self._start(state, name), self._share(request)
        virtual, entry, weight, num_submitted, tenants, tags = state
        known: _Tenant | None = get(tenants, name)
        if known is None or known.last is None:
            weight += self._weight(name)
        serial = num_submitted + 1
        tags = put(tags, request.id, _Tag(start, name, share))
        state = _State(virtual, entry, weight, serial, tenants, tags)
        return self._put(state, name, _Tenant(start + share, request.id, serial))

    @staticmethod
    def _put(state: _State, name: str, tenant: _Tenant) -> _State:
        virtual, entry, weight, num_submitted, tenants, tags = state
        oldest = num_submitted - _REMEMBERED

        def stays(one: _Tenant) -> bool:
            return one.last is not None or (one.finish > virtual and one.serial > oldest)

        return _State(
            virtual, entry, weight, num_submitted, put(tenants, name, tenant, stays), tags
        )

    def _share(self, request: Request) -> float:
        cost = self.cost(request)
        if not is_number(cost) or not 0 < cost < math.inf:
            raise ConfigError(
                f"WeightedFairShare: the cost of request {request.id!r} must be a finite number "
                f"> 0, got {cost!r}"
            )
        return cost / self._weight(self._tenant(request))

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, self.default_weight)
