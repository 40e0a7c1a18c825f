"""One error format for every answer that isn't a success: `{"error": {"code", "message", "detail"}}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mok_api.answer import Json
from mok_service import logs
from mok_service.errors import MokError, TooManyRequests, Unauthenticated

logger = logging.getLogger("mok.api")

VALUE_LENGTH_MAX = 200  # of a refused value that a message repeats


class InvalidRequest(MokError):
    """A wrong query parameter, or a wrong key or value in a body."""

    http_status, exit_status, code = 422, 2, "invalid_request"


class CrossOrigin(MokError):
    """A request that a page of another site has sent."""

    http_status, exit_status, code = 403, 2, "cross_origin"


class BodyTooLarge(MokError):
    http_status, exit_status, code = 413, 2, "body_too_large"


class WrongMediaType(MokError):
    http_status, exit_status, code = 415, 2, "wrong_media_type"


class UriTooLong(MokError):
    http_status, exit_status, code = 414, 2, "uri_too_long"


class HeadersTooLarge(MokError):
    http_status, exit_status, code = 431, 2, "headers_too_large"


class Misdirected(MokError):
    """The Host header names a host that this service doesn't answer for."""

    http_status, exit_status, code = 421, 2, "wrong_host"


class Gone(MokError):
    """It was here; its bytes are deleted."""

    http_status, exit_status, code = 410, 6, "gone"


class NotReady(MokError):
    """Something that the service needs isn't there."""

    http_status, exit_status, code = 503, 7, "not_ready"


class Busy(MokError):
    """As many clients as this process serves at a time are here already."""

    http_status, exit_status, code = 503, 7, "busy"


def error_answer(status: int, code: str, message: str, detail: Mapping[str, Any] | None = None,
                 headers: Mapping[str, str] | None = None) -> Json:
    """An answer in the one error format."""
    body = {"error": {"code": code, "message": message, "request": logs.request_id.get(), "detail": dict(detail or {})}}
    return Json(body, status, headers=dict(headers or {}))


def answer_for(error: MokError) -> Json:
    """What a `MokError` looks like over HTTP."""
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthenticated) else {}
    if isinstance(error, TooManyRequests):
        headers["Retry-After"] = str(error.detail["retry_after"])
    return error_answer(error.http_status, error.code, error.message, error.detail, headers)


def install(app: FastAPI) -> None:
    """Answer what is raised on purpose in the one format; for the rest see observe.py."""
    app.add_exception_handler(MokError, _mok_error)
    app.add_exception_handler(RequestValidationError, _parameters)
    app.add_exception_handler(HTTPException, _http)


def short(value: Any) -> str:
    """A refused value as a message repeats it."""
    text = repr(value)
    return text if len(text) <= VALUE_LENGTH_MAX else text[:VALUE_LENGTH_MAX] + "..."


async def _mok_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MokError)
    if error.http_status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("%s %s: %s", request.method, request.url.path, error.message)
    return answer_for(error)


async def _parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = [_parameter(fault) for fault in error.errors()]
    first = errors[0]
    message = f"{first['field']} = {first['value']}: {first['problem']}"
    if len(errors) > 1:
        message += f" (and {len(errors) - 1} more)"
    return error_answer(422, InvalidRequest.code, message, {"errors": errors})


def _parameter(fault: Mapping[str, Any]) -> dict[str, str]:
    location: Sequence[Any] = fault["loc"]
    return {"field": str(location[-1]), "value": short(fault.get("input")), "problem": str(fault["msg"])}


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).name.lower()
    what = {404: f"there is nothing at {request.url.path}", 405: f"{request.url.path} takes no {request.method}"}
    return error_answer(error.status_code, code, what.get(error.status_code, str(error.detail)), headers=error.headers)
