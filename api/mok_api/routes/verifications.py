"""Verifications: ask for one, follow it, cancel it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

from fastapi import APIRouter, Path, Request

from mok_api.access import Tenant
from mok_api.answer import Json
from mok_api.body import IdempotencyKey, JsonText, Nothing, idempotency, parse
from mok_api.docs import accepted, created, json_body, refusals
from mok_api.errors import InvalidRequest
from mok_api.parameters import Configured, Db
from mok_api.routes.checkpoints import open_file, pieces
from mok_api.schemas import verifications as schemas
from mok_api.schemas.log import Attestation
from mok_service import auditlog, runs, verifying

router = APIRouter(tags=["verifications"])

VerificationId = Annotated[str, Path(description="Id of a verification.", examples=["ver_0198c0de5e1f7000800000000000c0de"])]
# Which fields go with a level.
TAKES: Final[dict[str, tuple[str, ...]]] = {
    "check": (), "audit": ("segments", "seed", "execution"), "rerun": ("execution",),
    "bisect": ("against", "execution", "against_execution"),
}
LOCATION = "Location names the verification."


@router.post("/v1/verifications", status_code=201, response_model=schemas.Verification,
             openapi_extra=json_body("NewVerification", schemas.NEW_VERIFICATION_EXAMPLE),
             responses=created(LOCATION) | accepted(LOCATION) | refusals(404, 409, 413, 415))
def create_verification(request: Request, db: Db, tenant: Tenant, settings: Configured, body: JsonText,
                        idempotency_key: IdempotencyKey = None) -> Json:
    """Verify a run. A check reads every byte now and answers with its verdict (201). An audit, a rerun or a bisect is queued
    (202): the run that `executed_by` names computes it again, with logs and events, and can be paused and resumed."""
    wish, key = parse(body, schemas.NewVerification), idempotency(request, idempotency_key, body)
    _refuse_what_does_not_go_together(wish)
    if wish.level != "check":
        auditlog.succeeds_with(202)
        execution = None if wish.execution is None else wish.execution.model_dump(exclude_unset=True)
        if wish.level == "bisect":
            theirs = None if wish.against_execution is None else wish.against_execution.model_dump(exclude_unset=True)
            queued = verifying.bisect(db, wish.run, wish.against, execution=execution, against_execution=theirs, tenant=tenant,
                                      idempotency=key)
        else:
            queued = verifying.verify(db, wish.run, wish.level, segments=wish.segments, seed=wish.seed, execution=execution,
                                      tenant=tenant, idempotency=key)
        return Json(queued.as_dict(), 202, headers={"Location": f"/v1/verifications/{queued.id}"})
    known = {c.info.step: c for c in runs.checkpoints(db, wish.run, tenant)}

    def read(step: int, name: str) -> Iterator[bytes]:
        return pieces(open_file(settings, known[step], name))

    checked = verifying.check(db, wish.run, read, tenant=tenant, idempotency=key)
    return Json(checked.as_dict(), 201, headers={"Location": f"/v1/verifications/{checked.id}"})


@router.get("/v1/verifications/{verification}", response_model=schemas.Verification, responses=refusals(404))
def get_verification(db: Db, tenant: Tenant, verification: VerificationId) -> Json:
    """One verification: how far it is, and its verdict once it has ended."""
    return Json(runs.get_verification(db, verification, tenant).as_dict())


@router.post("/v1/verifications/{verification}/cancel", response_model=schemas.Verification,
             responses=refusals(404, 409, 413, 415))
def cancel_verification(db: Db, tenant: Tenant, verification: VerificationId, _: Nothing) -> Json:
    """End a verification without a verdict: the run that carries it out is cancelled. Again changes nothing."""
    return Json(verifying.cancel_verification(db, verification, tenant).as_dict())


@router.get("/v1/verifications/{verification}/attestation", response_model=Attestation, responses=refusals(404))
def get_attestation(db: Db, tenant: Tenant, verification: VerificationId) -> Json:
    """What the service signed about the verdict of an audit, a rerun or a bisect, and where its log has it."""
    return Json(runs.get_verdict_attestation(db, verification, tenant).as_dict())


def _refuse_what_does_not_go_together(wish: schemas.NewVerification) -> None:
    takes = TAKES[wish.level]
    given = (name for names in TAKES.values() for name in names if getattr(wish, name) is not None)
    wrong = [name for name in dict.fromkeys(given) if name not in takes]
    if wrong:
        raise InvalidRequest(
            f"{wrong[0]} doesn't go with level {wish.level}; allowed: {', '.join(takes) or 'none'}",
            errors=[{"field": name, "problem": f"doesn't go with level {wish.level}", "allowed": ", ".join(takes) or "none"}
                    for name in wrong],
        )
