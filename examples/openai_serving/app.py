"""HTTP: who may come in, how much they may say, who has hung up, and which route is whose."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dllm_sched import ConfigError, DllmSchedError, Policy, presets
from openai_serving.monitor import Monitor
from openai_serving.service import Service
from openai_serving.wire import ApiError, read_ask

T = TypeVar("T")
Write = Callable[[Any], Awaitable[None]]
MakePolicy = Callable[..., Policy]
News = AsyncGenerator[dict[str, Any], None]
Endpoint = Callable[[Request], Awaitable[ASGIApp]]

BODY_S = 30.0  # for a request's body to come
HEALTH_S = 5.0  # a driver that has not answered until then is not well; its steps are shorter
MAX_WATCHERS = 16
GONE = 499  # nobody gets this answer: the client has hung up
_log = logging.getLogger("openai_server")


class ClientGoneError(Exception):
    """The client has hung up."""


# --- middleware ---------------------------------------------------------------------------------


class Gate:
    """Counts every response, and turns away who comes under a wrong name.

    Args:
        app: What is behind it.
        monitor: Counts.
        hosts: Names that the Host header may give, or None for all. A server on loopback has no
            other defence against a web page that reaches it under a name of its own.
        paths: Known paths; the others are counted as one.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        monitor: Monitor,
        hosts: Sequence[str] | None,
        paths: Sequence[str],
    ) -> None:
        self._app = app
        self._monitor = monitor
        self._hosts = hosts
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            given = Headers(scope=scope).get("host", "")
            host = given.rpartition(":")[0] or given
            if self._hosts is None or host in self._hosts:
                await self._app(scope, receive, note)
            else:
                error = ApiError(403, f"host {host!r} is not served here", None, "wrong_host")
                await error_response(error)(scope, receive, note)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._monitor.responses[path, GONE if scope.get("gone") else status] += 1


def guarded(endpoint: Endpoint, api_key: str | None) -> Endpoint:
    """Let in only who has the key, if there is one."""
    if api_key is None:
        return endpoint
    right = f"Bearer {api_key}".encode()

    async def check(request: Request) -> ASGIApp:
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, right):
            challenge = {"www-authenticate": "Bearer"}
            raise ApiError(401, "wrong or no API key", None, "invalid_api_key", challenge)
        return await endpoint(request)

    return check


def error_response(error: ApiError) -> Response:
    # In ASCII: what is wrong with a name may be that it is no text.
    return Response(json.dumps(error.body), error.status, error.headers, "application/json")


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(ApiError(error.status_code, message, headers=error.headers or {}))


async def _on_bug(_request: Request, _error: Exception) -> Response:
    return error_response(ApiError(500, "a bug of this server; its log says more"))


# --- requests and responses ---------------------------------------------------------------------


async def read_json(request: Request, limit: int) -> Any:
    """Read a body of at most ``limit`` bytes.

    Raises:
        ApiError: 413 beyond the limit, 408 after ``BODY_S``, 415 if it does not say that it is
            JSON, 400 if it is not.
        ClientDisconnect: If the client hung up.
    """
    # A page of another site can send forms and plain text unasked, but not this.
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise ApiError(415, "content-type must be application/json", None, "not_json")
    too_large = ApiError(413, f"the body is larger than {limit} bytes", None, "body_too_large")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S), aclosing(request.stream()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        message = f"the body has not come within {BODY_S} seconds"
        raise ApiError(408, message, None, "body_timeout") from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", None, "invalid_json") from None


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work; give it up when the client hangs up.

    Raises:
        ClientGoneError: If it did.
    """

    async def hung_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects them would undo the stream
]


class EventStream:
    """A response of server-sent events, in the order in which ``produce`` writes them.

    It begins with the first one: what goes wrong before that has a status of its own. What goes
    wrong later is an event.
    """

    def __init__(self, produce: Callable[[Write], Coroutine[Any, Any, None]], last: str) -> None:
        self._produce = produce
        self._last = last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        lock = asyncio.Lock()  # several choices write at once

        async def write(value: Any) -> None:
            nonlocal begun
            async with lock:
                if not begun:
                    begun = True
                    await send(
                        {"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS}
                    )
                data = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                body = f"data: {data}\n\n".encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})

        try:
            await while_there(receive, self._produce(write))
        except ApiError as error:
            if not begun:
                await error_response(error)(scope, receive, send)
                return
            await write(error.body)
        except ClientGoneError:
            scope["gone"] = True
            return
        await write(self._last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


# --- routes -------------------------------------------------------------------------------------


def file_route(path: Path) -> Route:
    """A file under its name; index.html at the root."""

    async def send(_: Request) -> Response:
        return FileResponse(path, headers={"cache-control": "no-cache"})

    return Route("/" if path.name == "index.html" else f"/{path.name}", send)


def by_name_alone(make_policy: MakePolicy) -> list[str]:
    """Return the presets that need no more than their name here."""

    def can_be(name: str) -> bool:
        try:
            make_policy(name)
        except ConfigError:
            return False
        return True

    return [name for name in sorted(presets.PRESETS) if can_be(name)]


def make_app(
    service: Service,
    monitor: Monitor,
    make_policy: MakePolicy,
    metrics: Callable[[], bytes],
    lifespan: Callable[[], AbstractAsyncContextManager[Any]],
    *,
    api_key: str | None = None,
    hosts: Sequence[str] | None = None,
    max_body: int = 2**18,
    page: Path | None = None,
) -> Starlette:
    """Put the server together.

    Args:
        service: Answers.
        monitor: Watches.
        make_policy: (name, **arguments) -> a policy, or ConfigError.
        metrics: Writes the page of ``/metrics``, in the text format of Prometheus.
        lifespan: Entered before the first request, left after the last one.
        api_key: What ``Authorization: Bearer`` must say, but for ``/health`` and the page; or None.
        hosts: As of ``Gate``.
        max_body: Bytes that a request's body may have.
        page: A folder of files to serve at ``/``.
    """
    watching: set[object] = set()
    offered = by_name_alone(make_policy)

    async def answer(request: Request, *, chat: bool) -> ASGIApp:
        try:
            body = await read_json(request, max_body)
            ask = read_ask(body, chat=chat, model=service.model)
            if ask.stream:
                return EventStream(lambda write: service.stream(ask, write), "[DONE]")
            return JSONResponse(await while_there(request.receive, service.answer(ask)))
        except (ClientGoneError, ClientDisconnect):
            request.scope["gone"] = True
            return Response(status_code=GONE)

    async def complete(request: Request) -> ASGIApp:
        return await answer(request, chat=False)

    async def chat(request: Request) -> ASGIApp:
        return await answer(request, chat=True)

    async def models(_: Request) -> Response:
        one = {"id": service.model, "object": "model", "created": 0, "owned_by": "dllm_sched"}
        return JSONResponse({"object": "list", "data": [one]})

    async def health(_: Request) -> Response:
        try:
            async with asyncio.timeout(HEALTH_S):
                await service.driver.ask(service.scheduler.counts)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not well
            _log.warning("not healthy: %r", error)
            return JSONResponse({"status": "down"}, 503)
        return JSONResponse({"status": "draining" if monitor.draining else "ok"})

    async def state(request: Request) -> Response:
        return JSONResponse(await monitor.state(request.query_params.get("show")))

    def watched(follow: Callable[[str | None], News], what: str | None) -> ASGIApp:
        if len(watching) >= MAX_WATCHERS:
            raise ApiError(429, f"{MAX_WATCHERS} are watching already", None, "too_many_watchers")

        async def watch(write: Write) -> None:
            watching.add(write)
            try:
                async with aclosing(follow(what)) as news:
                    async for one in news:
                        await write(one)
            except LookupError as error:
                raise ApiError(404, str(error), "id", "unknown_request") from None
            finally:
                watching.discard(write)

        return EventStream(watch, '{"over": true}')

    async def state_stream(request: Request) -> ASGIApp:
        return watched(monitor.frames, request.query_params.get("show"))

    async def answer_stream(request: Request) -> ASGIApp:
        return watched(monitor.answer, request.query_params.get("id"))

    async def set_policy(request: Request) -> Response:
        body = await read_json(request, max_body)
        if type(body) is not dict or type(body.get("name")) is not str:
            raise ApiError(400, "name: must be the name of a policy", "name", "invalid_value")
        arguments = {name: value for name, value in body.items() if name != "name"}
        if body["name"] not in presets.PRESETS:  # dotted names would import
            known = ", ".join(sorted(presets.PRESETS))
            raise ApiError(400, f"name: must be one of {known}", "name", "invalid_value")
        try:
            policy = make_policy(body["name"], **arguments)
            await service.driver.call(service.scheduler.set_policy, policy)
        except ConfigError as error:
            raise ApiError(400, str(error), "name", "invalid_value") from None
        except DllmSchedError as error:
            _log.error("policy: %r", error)
            raise ApiError(503, "the engine is down", None, "engine_down") from None
        return JSONResponse({"policy": policy.name})

    async def policies(_: Request) -> Response:
        now = service.scheduler.policy.name
        return JSONResponse({"policy": now, "policies": sorted({*offered, now})})

    async def show_metrics(_: Request) -> Response:
        return PlainTextResponse(metrics(), media_type="text/plain; version=0.0.4")

    table: list[tuple[str, str, Endpoint]] = [
        ("POST", "/v1/completions", complete),
        ("POST", "/v1/chat/completions", chat),
        ("GET", "/v1/models", models),
        ("GET", "/metrics", show_metrics),
        ("GET", "/state", state),
        ("GET", "/state/stream", state_stream),
        ("GET", "/state/answer", answer_stream),
        ("GET", "/policy", policies),
        ("POST", "/policy", set_policy),
    ]
    routes = [
        Route(path, guarded(endpoint, api_key), methods=[method])
        for method, path, endpoint in table
    ]
    routes.append(Route("/health", health))
    if page is not None:
        routes += map(file_route, sorted(page.iterdir()))
    paths = sorted({route.path for route in routes})

    @asynccontextmanager
    async def lives(_: Starlette) -> AsyncIterator[None]:
        async with lifespan():
            yield

    gate = Middleware(Gate, monitor=monitor, hosts=hosts, paths=paths)
    return Starlette(
        routes=routes,
        middleware=[gate],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
        lifespan=lives,
    )
