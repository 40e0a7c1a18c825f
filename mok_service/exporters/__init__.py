"""A run in the forms of other tools, each through that tool's own library, which is an extra.

    mlflow       a run with parameters, metrics by step, and digests as tags
    openlineage  events: into a file, one JSON a line, or to a URL
    ro-crate     the exported folder, described as a Research Object Crate
    model-card   the front matter and text of a model card, from the record

Nothing here is signed. Each form names the record and the attestation, which are.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from mok_service.errors import InvalidSpec, MokError, NotFound
from mok_service.export import Source
from mok_service.provenance.attest import record_digest

EXTRAS: Final[Mapping[str, str]] = {"mlflow": "mlflow", "openlineage": "openlineage", "rocrate": "ro-crate",
                                    "huggingface_hub": "model-card"}  # library -> extra


class MissingExtra(MokError):
    """The library that an export needs isn't installed."""

    http_status: ClassVar[int] = 422
    exit_status: ClassVar[int] = 2
    code: ClassVar[str] = "missing_extra"


def library(name: str) -> Any:
    """A module of a library of `EXTRAS`. Raises MissingExtra, which names the command that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        extra = EXTRAS[name.partition(".")[0]]
        raise MissingExtra(f"this export needs the library {error.name}; pip install 'mok-service[{extra}]' installs it",
                           extra=extra, library=error.name) from None


def export_as(source: Source, run_id: str, form: str, to: str) -> dict[str, Any]:
    """Export a run; what was written where, as JSON values.

    `to` is a tracking URI (mlflow), a file or an http URL (openlineage), a folder (ro-crate), a file or folder (model-card).
    Raises MissingExtra; Conflict for what is there already, and for a run that hasn't come far enough.
    """
    if form == "mlflow":
        from mok_service.exporters.mlflow import write_mlflow

        return write_mlflow(described(source, run_id), to)
    if form == "openlineage":
        from mok_service.exporters.openlineage import write_events

        return write_events(described(source, run_id), to)
    if form == "ro-crate":
        from mok_service.exporters.ro_crate import write_crate

        return write_crate(source, run_id, to)
    if form == "model-card":
        from mok_service.exporters.model_card import write_card

        return write_card(described(source, run_id), to)
    raise InvalidSpec(f"format: {form!r} is unknown; allowed: mlflow, openlineage, ro-crate, model-card", field="format",
                      value=form)


def described(source: Source, run_id: str) -> dict[str, Any]:
    """The run's record, with `attestation`: digest and place in the log of what was signed about it, None before that."""
    record = source.provenance(run_id)
    try:
        attestation = source.attestation(run_id)
    except NotFound:
        return {**record, "attestation": None}
    return {**record, "attestation": {"digest": attestation["digest"], "log_index": attestation["log_index"]}}


def digests_of(record: Mapping[str, Any]) -> dict[str, str]:
    """The digests that tell what a run is: none that isn't known yet."""
    data, final, attestation = record["data"], record["final"] or {}, record.get("attestation") or {}
    found = {
        "record": str(record_digest(record)), "training": record["spec"]["training_digest"],
        "data": None if data is None else data["digest"], "head": record["chain"]["head"], "weights": final.get("weights"),
        "optimizer": final.get("optimizer"), "attestation": attestation.get("digest"),
    }
    return {name: digest for name, digest in found.items() if digest is not None}
