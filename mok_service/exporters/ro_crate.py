"""A run as a Research Object Crate: the exported folder (export.py) with a description of its files and of what made them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mok_service.export import (
    ATTESTATION,
    CHECKPOINTS,
    KEYS,
    LOG,
    MANIFEST,
    RECORD,
    VERIFICATIONS,
    Source,
    load_document,
    write_export,
)
from mok_service.exporters import digests_of, library

PROFILE: Final = "https://w3id.org/ro/wfrun/process/0.5"
_MEANING: Final = {
    RECORD: "The run's record", ATTESTATION: "What was signed about the run: in-toto in a DSSE envelope",
    LOG: "Proof that the append-only log has the attestation", KEYS: "Public keys of the service",
    MANIFEST: "The files that were exported, with sizes and SHA-256",
}
_STATUS: Final = {"succeeded": "CompletedActionStatus"}


def write_crate(source: Source, run_id: str, to: str) -> dict[str, Any]:
    """Export a run into a folder that isn't there yet or is empty, and describe it; `mok verify` still checks that folder.

    Raises what `write_export` raises: Conflict for a folder with something in it, NotFound for a run that isn't attested.
    """
    crates = library("rocrate.rocrate")
    folder = Path(to)
    manifest = write_export(source, run_id, folder)
    record = load_document(folder, RECORD)
    crate = crates.ROCrate()
    _describe(crate, record, [*manifest["files"], {"name": MANIFEST}])
    crate.metadata.write(folder)
    return {"run": run_id, "format": "ro-crate", "to": to, "files": len(manifest["files"]) + 1}


def _describe(crate: Any, record: Mapping[str, Any], files: list[dict[str, Any]]) -> None:
    identity, training = record["identity"], record["spec"]["training"]
    crate.name = f"Training run {identity['run']} of {training['name']}"
    crate.description = (f"A {identity['kind']} run of the job {record['spec']['training_digest']}, {identity['status']}: its "
                         "record, checkpoints and attestation. The same job gives the same bits.")
    crate.root_dataset["datePublished"] = identity["ended_at"]
    crate.root_dataset["license"] = "No license is stated"
    crate.root_dataset["identifier"] = identity["run"]
    written = {file["name"]: _file(crate, file) for file in files}
    data = [] if record["data"] is None else [_input(crate, file) for file in record["data"]["manifest"]["files"]]
    action = crate.add(library("rocrate.model.contextentity").ContextEntity(crate, f"#{identity['run']}", properties={
        "@type": "CreateAction", "name": f"{training['steps']} optimizer steps", "startTime": identity["started_at"],
        "endTime": identity["ended_at"],
        "actionStatus": f"http://schema.org/{_STATUS.get(identity['status'], 'FailedActionStatus')}",
        "identifier": [f"{name} {digest}" for name, digest in digests_of(record).items()],
    }))
    if identity["message"] is not None:
        action["error"] = identity["message"]
    action["instrument"] = _software(crate, record)
    action["object"] = data
    action["result"] = [entity for name, entity in written.items() if name.startswith(f"{CHECKPOINTS}/")]
    crate.root_dataset["mentions"] = [action]
    crate.root_dataset["conformsTo"] = {"@id": PROFILE}


def _file(crate: Any, file: Mapping[str, Any]) -> Any:
    name = file["name"]
    whole, _, last = name.rpartition("/")
    meaning = _MEANING.get(name) or f"Of a {'signed verdict' if whole.startswith(VERIFICATIONS) else 'checkpoint'}: {last}"
    facts: dict[str, Any] = {"name": meaning, "encodingFormat": _media_type(name)}
    if "size" in file:
        facts |= {"contentSize": str(file["size"]), "sha256": file["sha256"]}
    return crate.add_file(dest_path=name, properties=facts)


def _media_type(name: str) -> str:
    return {"json": "application/json", "pem": "application/x-pem-file"}.get(name.rpartition(".")[2], "application/octet-stream")


def _input(crate: Any, file: Mapping[str, Any]) -> Any:
    """A data file, which isn't in the crate: known by its digest."""
    return crate.add(library("rocrate.model.contextentity").ContextEntity(crate, f"urn:sha256:{file['sha256']}", properties={
        "@type": "CreativeWork", "name": file["name"], "sha256": file["sha256"], "size": f"{file['size']} bytes",
    }))


def _software(crate: Any, record: Mapping[str, Any]) -> Any:
    code = record["code"] or {}
    facts: dict[str, Any] = {"@type": "SoftwareApplication", "name": "MoK service", "version": str(code.get("version")),
             "softwareVersion": str((code.get("git") or {}).get("commit"))}
    native = sorted((code.get("native") or {}).items())
    if native:
        facts["identifier"] = [f"{name} {digest}" for name, digest in native]
    return crate.add(library("rocrate.model.contextentity").ContextEntity(crate, "#mok-service", properties=facts))
