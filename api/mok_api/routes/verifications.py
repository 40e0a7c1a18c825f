"""Verifications: ask for one, look at one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Path

from mok_api import schemas
from mok_api.answer import Json
from mok_api.body import JsonText, parse
from mok_api.docs import created, json_body, refusals
from mok_api.parameters import Configured, Db
from mok_api.routes.checkpoints import open_file, pieces
from mok_service import runs

router = APIRouter(tags=["verifications"])

VerificationId = Annotated[str, Path(description="Id of a verification.", examples=["ver_0198c0de5e1f7000800000000000c0de"])]


@router.post("/v1/verifications", status_code=201, response_model=schemas.Verification,
             openapi_extra=json_body("NewVerification", schemas.NEW_VERIFICATION_EXAMPLE),
             responses=created("Location names the verification.") | refusals(404, 413, 415))
def create_verification(db: Db, settings: Configured, body: JsonText) -> Json:
    """Check a run's record and its checkpoints' bytes now, and store the verdict. Reads every byte, so it takes a while."""
    run = parse(body, schemas.NewVerification).run
    known = {c.info.step: c for c in runs.checkpoints(db, run)}

    def read(step: int, name: str) -> Iterator[bytes]:
        return pieces(open_file(settings, known[step], name))

    verification = runs.judge(db, run, read)
    return Json(verification.as_dict(), 201, headers={"Location": f"/v1/verifications/{verification.id}"})


@router.get("/v1/verifications/{verification}", response_model=schemas.Verification, responses=refusals(404))
def get_verification(db: Db, verification: VerificationId) -> Json:
    """One verdict."""
    return Json(runs.get_verification(db, verification).as_dict())
