"""Requests and answers on the wire: the key, size and time limits, parameters by name, errors, server-sent events."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from verl.errors import DataError, ModelError, RolloutError
from verl.json_input import parse_json
from verl.serve.draws import Overloaded

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
BODY_S = 30.0
"""For a body to arrive."""
RETRY_AFTER_S = 1


class ApiError(Exception):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.details = status, message, param, code, details


ErrorForm = Callable[[ApiError], dict[str, Any]]
_OPENAI_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_KINDS = {**_OPENAI_KINDS, 413: "request_too_large"}


def openai_error(error: ApiError) -> dict[str, Any]:
    kind = _OPENAI_KINDS.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = _ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    told: dict[str, Any] = {"type": kind, "message": error.message}
    return {"type": "error", "error": told | ({"details": dict(error.details)} if error.details else {})}


class Fields:
    """The parameters of a request. Each is read by its name; `done` refuses those that nobody read. Null is absent."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}

    def value(self, name: str) -> Any:
        return self._left.pop(name, None)

    def copies(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of the parameters that are given; they remain to be read."""
        return {name: self._left[name] for name in names if name in self._left}

    def _typed(self, name: str, kind: type | tuple[type, ...], text: str) -> Any:
        value = self.value(name)
        if value is not None and (
            not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
        ):
            raise ApiError(400, f"'{name}' must be {text}, got {value!r:.100}", param=name)
        return value

    def text(self, name: str) -> str | None:
        value: str | None = self._typed(name, str, "a text")
        return value

    def list_of(self, name: str) -> list[Any] | None:
        value: list[Any] | None = self._typed(name, list, "a list")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value: dict[str, Any] | None = self._typed(name, dict, "an object")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._typed(name, bool, "true or false")
        return default if value is None else bool(value)

    def integer(self, name: str, low: int, high: float = math.inf) -> int | None:
        value: int | None = self._typed(name, int, "a whole number")
        self._bounded(name, value, low, high)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._typed(name, (int, float), "a number")
        self._bounded(name, value, low, high)
        return default if value is None else float(value)

    @staticmethod
    def _bounded(name: str, value: float | None, low: float, high: float) -> None:
        if value is not None and not low <= value <= high:
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ApiError(400, f"'{name}' must be {allowed}, got {value}", param=name)

    def only(self, name: str, *allowed: Any) -> None:
        """A parameter that is supported only where it asks for nothing."""
        value = self.value(name)
        if value is not None and value not in allowed:
            raise unsupported(name, f"with the value {json.dumps(value)[:100]}")

    def done(self) -> None:
        for name in self._left:
            raise unsupported(name)


def unsupported(name: str, more: str = "") -> ApiError:
    message = f"the parameter '{name}' is not supported" + (f" {more}" if more else "")
    return ApiError(400, message, param=name, code="unsupported_parameter")


@dataclass(frozen=True)
class EventStream:
    """An answer in events, each as it goes over the wire."""

    chunks: AsyncIterator[str]


Model = TypeVar("Model")
Handler = Callable[[Model, Fields], Awaitable[dict[str, Any] | EventStream]]


def event(data: Any, name: str | None = None) -> str:
    written = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\n" if name else "") + f"data: {written}\n\n"


def given_key(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key") or ""


@dataclass
class Door(Generic[Model]):
    """What a request must pass before a handler sees it."""

    model: Model
    """What handlers answer with."""
    key: str
    most_bytes: int

    @contextmanager
    def admitted(self, request: Request) -> Iterator[Model]:
        """What answers this request."""
        self.check_key(request)
        yield self.model

    def check_key(self, request: Request) -> None:
        given = given_key(request)
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.key.encode()):
            raise ApiError(
                401,
                "the key is missing or wrong: send the one that `verl serve` was given or has printed, as "
                "'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
            )

    async def fields(self, request: Request) -> Fields:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(400, "Content-Type must be application/json")
        too_large = ApiError(413, f"the body is larger than {self.most_bytes} bytes (--max-body)")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self.most_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self.most_bytes:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
        try:
            value = parse_json(bytes(body))
        except ValueError as error:
            raise ApiError(400, f"the body is no JSON: {error}") from None
        if not isinstance(value, dict):
            raise ApiError(400, "the body must be a JSON object")
        return Fields(value)

    def endpoint(
        self, handler: Handler[Model], form: ErrorForm, count: Callable[[int], None]
    ) -> Callable[[Request], Awaitable[Response]]:
        """`count` is called with the status of every answer."""

        async def answer(request: Request) -> Response:
            try:
                with self.admitted(request) as model:
                    fields = await self.fields(request) if request.method == "POST" else Fields({})
                    response = await unless_gone(request, _begun(handler(model, fields), form))
            except ClientDisconnect:
                count(499)
                return Response(status_code=499)  # nobody reads it
            except Exception as error:
                response = error_response(error, form)
            count(response.status_code)
            return response

        return answer


async def _begun(work: Awaitable[dict[str, Any] | EventStream], form: ErrorForm) -> Response:
    """The headers of a stream go out with its first event: what goes wrong before has a status of its own."""
    answered = await work
    if not isinstance(answered, EventStream):
        return JSONResponse(answered)
    chunks = answered.chunks
    try:
        first = await anext(chunks)
    except BaseException:
        with suppress(Exception):
            await chunks.aclose()  # type: ignore[attr-defined]
        raise

    async def all_chunks() -> AsyncIterator[str]:
        try:
            yield first
            async for chunk in chunks:
                yield chunk
        except Exception as error:
            failed = as_api_error(error)
            yield event(form(failed), "error" if form is anthropic_error else None)
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]

    return StreamingResponse(
        all_chunks(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        return ApiError(429, f"too many requests are under way{error}; try again", code="overloaded")
    if isinstance(error, DataError | ModelError):
        return ApiError(400, str(error), param="messages")
    if isinstance(error, RolloutError):
        if error.__cause__ is None:  # the request was refused
            return ApiError(400, str(error))
        return ApiError(500, f"generation failed: {error}")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: a defect of the server; its log says more")


def error_response(error: Exception, form: ErrorForm) -> Response:
    failed = as_api_error(error)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if failed.status == 429 else {}
    if failed.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    return JSONResponse(form(failed), failed.status, headers)


def one_of(name: str, value: Any, allowed: Collection[str]) -> str:
    if value not in allowed:
        raise ApiError(400, f"'{name}' must be one of {', '.join(allowed)}, got {value!r:.100}", param=name)
    return str(value)
