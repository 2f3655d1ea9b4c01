"""The routes of `verl serve`, and the server that answers them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import prometheus_client
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from verl.errors import ConfigError
from verl.serve.anthropic import MessagesServer
from verl.serve.completions import CompletionServer
from verl.serve.openai_chat import ChatServer
from verl.serve.openai_responses import ResponsesServer
from verl.serve.served_model import ServedModel
from verl.serve.wire import (
    ApiError,
    Door,
    ErrorForm,
    Fields,
    Handler,
    anthropic_error,
    error_response,
    openai_error,
)

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 1024
_STOP_S = 5
"""For answers under way when the server is stopped."""


@dataclass(frozen=True)
class Served:
    """An interface's route."""

    path: str
    handler: Handler[Any]
    form: ErrorForm = openai_error
    method: str = "POST"


async def _models(model: ServedModel, fields: Fields) -> dict[str, Any]:
    about = {"id": model.name, "object": "model", "created": model.created, "owned_by": "verl"}
    return {"object": "list", "data": [about | {"max_model_len": model.context}]}


INTERFACES = [
    Served("/v1/models", _models, method="GET"),
    Served("/v1/chat/completions", lambda model, fields: ChatServer(model).answer(fields)),
    Served("/v1/responses", lambda model, fields: ResponsesServer(model).answer(fields)),
    Served("/v1/completions", lambda model, fields: CompletionServer(model).answer(fields)),
    Served("/v1/messages", lambda model, fields: MessagesServer(model).answer(fields), anthropic_error),
    Served(
        "/v1/messages/count_tokens",
        lambda model, fields: MessagesServer(model).count(fields),
        anthropic_error,
    ),
    # lm-eval asks beside the address it was given, without /v1.
    *(
        Served(f"{prefix}/tokenize", lambda model, fields: CompletionServer(model).tokenize(fields))
        for prefix in ("", "/v1")
    ),
    *(
        Served(
            f"{prefix}/tokenizer_info",
            lambda model, fields: CompletionServer(model).tokenizer_info(fields),
            method="GET",
        )
        for prefix in ("", "/v1")
    ),
]


def build_app(door: Door[ServedModel]) -> Starlette:
    """The application of `verl serve`. /health and nothing else is answered without the key."""
    model = door.model
    metrics = ServerMetrics(model)

    async def health(request: Request) -> Response:
        return JSONResponse(
            {"status": "ok" if model.engine.alive else "lost"}, 200 if model.engine.alive else 503
        )

    async def exposed(request: Request) -> Response:
        try:
            door.check_key(request)
        except ApiError as error:
            return error_response(error, openai_error)
        return Response(metrics.text(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    return application(
        INTERFACES, door, metrics.counter, Route("/health", health), Route("/metrics", exposed)
    )


def application(
    served: Sequence[Served],
    door: Door[Any],
    counter: Callable[[str], Callable[[int], None]],
    *more: Route,
) -> Starlette:
    """Answers these routes, and says of any other which there are."""
    routes = [
        Route(each.path, door.endpoint(each.handler, each.form, counter(each.path)), methods=[each.method])
        for each in served
    ]

    def refused(status: int, why: str) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def answer(request: Request, error: Exception) -> Response:
            known = ", ".join(f"{each.method} {each.path}" for each in served)
            form = anthropic_error if request.url.path.startswith("/v1/messages") else openai_error
            return error_response(ApiError(status, f"{why}; there are: {known}"), form)

        return answer

    return Starlette(
        routes=[*routes, *more],
        exception_handlers={
            404: refused(404, "there is no such route"),
            405: refused(405, "another method is needed"),
        },
    )


class ServerMetrics:
    """What `/metrics` shows, for Prometheus."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._registry = prometheus_client.CollectorRegistry()
        self._requests = prometheus_client.Counter(
            "verl_serve_requests",
            "Requests by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        for name, about, read in (
            ("samples_in_flight", "Samples asked for that have not ended.", lambda: model.engine.in_flight),
            ("samples_running", "Samples being generated.", lambda: self._stats.running),
            ("samples_waiting", "Samples submitted and not yet started.", lambda: self._stats.waiting),
            ("kv_blocks_used", "Blocks of the KV cache in use.", lambda: self._stats.kv_blocks_used),
            ("kv_blocks", "Blocks of the KV cache.", lambda: self._stats.kv_blocks),
            ("generated_tokens", "Tokens of samples that ended.", lambda: self._stats.generated_tokens),
            ("prefilled_tokens", "Prompt tokens computed.", lambda: self._stats.prefilled_tokens),
        ):
            gauge = prometheus_client.Gauge(f"verl_serve_{name}", about, registry=self._registry)
            gauge.set_function(read)

    @property
    def _stats(self) -> Any:
        return self._model.engine.engine.stats()

    def counter(self, route: str) -> Callable[[int], None]:
        return lambda status: self._requests.labels(route, str(status)).inc()

    def text(self) -> bytes:
        return bytes(prometheus_client.generate_latest(self._registry))


def listen(host: str, port: int, named: str = "--host {} --port {}") -> socket.socket:
    """A socket that listens; ConfigError where that is not possible. `named`: how the user gives host and port."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=MOST_CONNECTIONS)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"{named.format(host, port)}: cannot listen: {error}") from error


def address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def build_server(app: Starlette, most_connections: int | None = MOST_CONNECTIONS) -> uvicorn.Server:
    """`run(sockets=[...])` serves until a signal or `should_exit`."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        limit_concurrency=most_connections,
        timeout_graceful_shutdown=_STOP_S,
        server_header=False,
    )
    return uvicorn.Server(config)
