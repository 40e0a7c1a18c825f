"""Pieces of the OpenAPI description that routes share."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from mok_api.schemas.access import NewApiKey, NewWebhook
from mok_api.schemas.base import ErrorAnswer, Strict
from mok_api.schemas.runs import NewRun
from mok_api.schemas.verifications import NewVerification
from mok_service.spec import job_json_schema

Responses = dict[int | str, dict[str, Any]]

_MEANING = {
    401: "An API key is asked for, and this is none that is good.",
    403: "The request comes from a page of another site, or the API key doesn't allow it.",
    404: "There is no such thing here.",
    409: "The request contradicts the present state.",
    410: "It was here; its bytes are deleted, and its digests stay on record.",
    413: "The body is too large.",
    414: "Path and query are too long.",
    415: "The body isn't application/json.",
    421: "The Host header names another host.",
    422: "A value isn't allowed; the error names it, what is allowed and the nearest known key.",
    429: "Too many requests; Retry-After says how long to wait.",
    431: "The headers are too large.",
    503: "Not ready, or too many clients.",
}


def refusals(*statuses: int) -> Responses:
    """The documented errors of a route, all in the one format."""
    return {
        status: {"model": ErrorAnswer, "description": f"{HTTPStatus(status).phrase}: {_MEANING[status]}"}
        for status in statuses
    }


def created(location: str) -> Responses:
    """The answer to a request that creates something."""
    header = {"description": location, "schema": {"type": "string"}}
    return {201: {"description": f"Created. {location}", "headers": {"Location": header}}}


def accepted(location: str) -> Responses:
    """The answer to a request whose work is queued."""
    header = {"description": location, "schema": {"type": "string"}}
    return {202: {"description": f"Queued. {location}", "headers": {"Location": header}}}


def event_stream() -> Responses:
    """An answer that is JSON or a stream."""
    example = 'id: 7\nevent: step\ndata: {"run":"run_...","number":7,"type":"step","payload":{...},"at":"..."}\n\n'
    stream = {"schema": {"type": "string"}, "example": example}
    return {200: {"description": "Events, as JSON or as a stream.", "content": {"text/event-stream": stream}}}


def json_body(schema: str, example: dict[str, Any]) -> dict[str, Any]:
    """The request body of a route that reads its JSON by itself."""
    content = {"schema": {"$ref": f"#/components/schemas/{schema}"}, "example": example}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def errors_are_json(description: dict[str, Any]) -> None:
    """In the OpenAPI description: whatever a route answers with, its errors are JSON."""
    for item in description["paths"].values():
        for operation in item.values():
            for status, answer in operation["responses"].items():
                if not status.startswith("2") and "content" in answer:
                    answer["content"] = {"application/json": next(iter(answer["content"].values()))}


def request_schemas() -> dict[str, Any]:
    """The schemas that `json_body` refers to, with all that they refer to."""
    found: dict[str, Any] = {}
    ours = {model.__name__: _of(model) for model in (NewRun, NewVerification, NewApiKey, NewWebhook)}
    for name, schema in {"JobSpec": job_json_schema(), **ours}.items():
        found |= schema.pop("$defs", {})
        found[name] = schema
    return found


def _of(model: type[Strict]) -> dict[str, Any]:
    return model.model_json_schema(ref_template="#/components/schemas/{model}")
