"""Reading a request: its body as strict JSON, its Idempotency-Key, its place in an event stream."""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeVar

from fastapi import Depends, Header, Request
from pydantic import BaseModel, ValidationError

from mok_api.errors import BodyTooLarge, InvalidRequest, WrongMediaType, short
from mok_service import auditlog
from mok_service.idempotency import ROUTE_LENGTH_MAX, Idempotency
from mok_service.provenance.digest import sha256
from mok_service.spec.faults import from_validation, sentence
from mok_service.spec.reading import TEXT_BYTES_MAX, read_json

M = TypeVar("M", bound=BaseModel)

BODY_BYTES_MAX: Final = TEXT_BYTES_MAX
_JSON = re.compile(r"application/json(\s*;\s*charset=\"?utf-8\"?)?\s*", re.IGNORECASE)


async def json_text(request: Request) -> bytes:
    """The body's bytes, once they are known to be JSON by name and not too many."""
    body = await _bytes(request)
    media_type = request.headers.get("content-type", "")
    if not _JSON.fullmatch(media_type):
        raise WrongMediaType(f"the body is {short(media_type)}; allowed: application/json, in UTF-8", allowed="application/json")
    return body


async def nothing(request: Request) -> None:
    """For requests that say all in their path: no body, or an empty JSON object."""
    body = await _bytes(request)
    if body and not _JSON.fullmatch(request.headers.get("content-type", "")):
        raise WrongMediaType("this request needs no body; allowed: none, or {} as application/json", allowed="application/json")
    if body.strip() not in (b"", b"{}"):
        raise InvalidRequest("this request takes no values; allowed: no body, or {}", errors=[])


async def _bytes(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise BodyTooLarge(f"the body has more than {BODY_BYTES_MAX} bytes", allowed=BODY_BYTES_MAX)
    audited: auditlog.Request | None = getattr(request.state, "audited", None)
    if audited is not None and body:
        audited.body = sha256(body)
    return bytes(body)


def parse(text: bytes, model: type[M]) -> M:
    """The value that a body describes. Raises InvalidRequest; `detail["errors"]` lists every fault, as for a job spec."""
    try:
        return model.model_validate(read_json(text))
    except ValidationError as error:
        faults = from_validation(error, model)
    raise InvalidRequest("the request is invalid: " + "; ".join(map(sentence, faults)), errors=[dict(fault) for fault in faults])


def idempotency(request: Request, key: str | None, body: bytes) -> Idempotency | None:
    """The promise that a request with this key is carried out once. Raises InvalidSpec for a key that can't be one."""
    route = f"{request.method} {request.url.path}"[:ROUTE_LENGTH_MAX]  # a longer one names nothing that exists
    return None if key is None else Idempotency(route, key, sha256(body))


JsonText = Annotated[bytes, Depends(json_text)]
Nothing = Annotated[None, Depends(nothing)]
IdempotencyKey = Annotated[str | None, Header(
    description="A key of your choice. A request that comes again with the same key and body gets the first one's answer; "
                "with another body it is refused (409).",
    examples=["5f2b9a3e-0001"],
)]
