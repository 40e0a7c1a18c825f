"""API keys: make, list, revoke."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from mok_api.access import Who
from mok_api.answer import Json
from mok_api.body import JsonText, Nothing, parse
from mok_api.docs import created, json_body, refusals
from mok_api.parameters import Cursor, Db, PageLimit
from mok_api.schemas import access as schemas
from mok_service import access

router = APIRouter(tags=["access"])

KeyId = Annotated[str, Path(description="Id of an API key.", examples=["key_0198c0de5e1f7000800000000000c0de"])]


@router.post("/v1/api-keys", status_code=201, response_model=schemas.NewApiKeyAnswer,
             openapi_extra=json_body("NewApiKey", schemas.NEW_API_KEY_EXAMPLE),
             responses=created("Location names the key.") | refusals(413, 415))
def create_key(db: Db, who: Who, body: JsonText) -> Json:
    """Make an API key of this tenant, for no more than the asking key may do. Its text is in this answer and nowhere else; so
    a lost answer isn't given again: revoke that key, and make another one."""
    wish = parse(body, schemas.NewApiKey)
    made, text = access.create_key(db, who, name=wish.name, role=wish.role, scopes=wish.scopes, expires_at=wish.expiry())
    return Json({**made.as_dict(), "key": text}, 201, headers={"Location": f"/v1/api-keys/{made.id}"})


@router.get("/v1/api-keys", response_model=schemas.ApiKeyPage)
def list_keys(db: Db, who: Who, cursor: Cursor = None, limit: PageLimit = 50) -> Json:
    """The tenant's keys, newest first, without their texts. Operators' keys are shown to operators."""
    page = access.list_keys(db, who, cursor, limit)
    return Json({"items": [key.as_dict() for key in page.items], "next_cursor": page.next_cursor})


@router.get("/v1/api-keys/{key}", response_model=schemas.ApiKey, responses=refusals(404))
def get_key(db: Db, who: Who, key: KeyId) -> Json:
    """One key, without its text."""
    return Json(access.get_key(db, who, key).as_dict())


@router.post("/v1/api-keys/{key}/revoke", response_model=schemas.ApiKey, responses=refusals(404, 413, 415))
def revoke_key(db: Db, who: Who, key: KeyId, _: Nothing) -> Json:
    """End a key at once. Again changes nothing."""
    return Json(access.revoke_key(db, who, key).as_dict())
