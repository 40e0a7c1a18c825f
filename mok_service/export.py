"""A run as a folder of files that anyone can check without service and database.

    export.json          what the folder holds, with sizes and SHA-256
    record.json          the record (docs/provenance.md)
    attestation.json     the signed envelope
    log.json             where the log has it: index, size, inclusion proof, signed head
    key.pem              the public keys of the service. They prove nothing: get the key that you trust another way
    verifications/ID/    attestation.json and log.json of the verdict of each audit, rerun and bisect
    checkpoints/STEP/    the checkpoints' files
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from mok_service.errors import Conflict, InvalidSpec, NotFound, Tampered
from mok_service.provenance.attested import Evidence, check_attestation, check_verdict, worst
from mok_service.provenance.digest import sha256_file
from mok_service.provenance.keys import PublicKey
from mok_service.provenance.measure import Read, measure
from mok_service.provenance.tree import open_head
from mok_service.provenance.verify import Finding, check

EXPORT_TYPE: Final = "mok.export/v1"
MANIFEST, RECORD, ATTESTATION, LOG, KEYS, CHECKPOINTS, VERIFICATIONS = (
    "export.json", "record.json", "attestation.json", "log.json", "key.pem", "checkpoints", "verifications",
)
CHUNK_BYTES: Final = 1 << 20


class Source(Protocol):
    """Where a run is: a service's client, or a data folder."""

    def provenance(self, run_id: str) -> dict[str, Any]: ...
    def attestation(self, run_id: str) -> dict[str, Any]: ...
    def verdict_attestation(self, verification_id: str) -> dict[str, Any]: ...
    def log_head(self) -> dict[str, Any]: ...
    def log_proof(self, size: int, *, index: int | None = None, old_size: int | None = None) -> list[str]: ...
    def signing_keys(self) -> list[dict[str, Any]]: ...
    def checkpoint_file(self, run_id: str, step: int, name: str) -> Iterator[bytes]: ...


def evidence_of(source: Source, run_id: str) -> Evidence:
    """The run's attestation with its proof under the log's present head.

    Raises NotFound when it isn't attested, Tampered when the log can't prove it.
    """
    return _proven(source, {run_id: source.attestation(run_id)})[run_id]


def _proven(source: Source, attestations: Mapping[str, Mapping[str, Any]]) -> dict[str, Evidence]:
    """Attestations, by what they are of, each with its proof under one head: the present one, so that it has them all."""
    head = source.log_head()
    size, proven = open_head(head, {}).size, {}
    for what, attestation in attestations.items():
        try:
            proof = source.log_proof(size, index=attestation["log_index"])
        except InvalidSpec as error:
            raise Tampered(f"the log can't prove the attestation of {what}: {error.message}", field="log.proof") from None
        proven[what] = Evidence.of(attestation, head, size, proof)
    return proven


# ---- Writing ---------------------------------------------------------------------------------------------------------

def write_export(source: Source, run_id: str, folder: Path) -> dict[str, Any]:
    """Write a run that is attested into a folder that isn't there yet, or is empty; what it holds, as in `export.json`.

    The folder appears when it's complete. Raises Conflict for a folder with something in it, NotFound when the run isn't
    attested or a file of a checkpoint is gone.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Conflict(f"{folder} is there already and isn't empty; choose another folder", folder=str(folder))
    attestation, record = source.attestation(run_id), source.provenance(run_id)
    verdicts = {row["id"]: source.verdict_attestation(row["id"]) for row in signed_verdicts(record)}
    signed = _proven(source, {run_id: attestation, **verdicts})
    partial = folder.absolute().with_name(f".{folder.absolute().name}.{secrets.token_hex(8)}")
    partial.mkdir(parents=True)
    try:
        files = [
            _write(partial, RECORD, _json_bytes(record)),
            _write(partial, ATTESTATION, _json_bytes(signed[run_id].envelope)),
            _write(partial, LOG, _json_bytes(signed[run_id].log)),
            _write(partial, KEYS, ["".join(key["pem"] for key in source.signing_keys()).encode()]),
        ]
        for verification_id in verdicts:
            where, evidence = f"{VERIFICATIONS}/{verification_id}", signed[verification_id]
            files.append(_write(partial, f"{where}/{ATTESTATION}", _json_bytes(evidence.envelope)))
            files.append(_write(partial, f"{where}/{LOG}", _json_bytes(evidence.log)))
        for checkpoint, name in _checkpoint_files(record):
            where = f"{CHECKPOINTS}/{checkpoint['folder']}/{name}"
            files.append(_write(partial, where, source.checkpoint_file(run_id, checkpoint["step"], name)))
        manifest = {"type": EXPORT_TYPE, "run": run_id, "files": files}
        _write(partial, MANIFEST, _json_bytes(manifest))
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def signed_verdicts(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The verifications in a record whose verdicts on that very run are signed."""
    own = record["identity"]["run"]
    return [row for row in record["verifications"] if row.get("log_index") is not None and row["run"] == own]


def _checkpoint_files(record: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Every file of every checkpoint that isn't deleted."""
    for checkpoint in record["checkpoints"]:
        if not checkpoint["deleted_at"]:
            for file in checkpoint["files"]:
                yield checkpoint, file["name"]


def _json_bytes(value: Mapping[str, Any]) -> Iterator[bytes]:
    """ASCII, so that text which no encoding can hold is kept; integers exact."""
    yield (json.dumps(value, indent=1, allow_nan=False) + "\n").encode("ascii")


def _write(folder: Path, name: str, pieces: Iterable[bytes]) -> dict[str, Any]:
    path, size, digest = inside(folder, name), 0, hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = path.open("xb")
    except FileExistsError:
        raise Tampered(f"the record names the file {name!r:.200} twice", field="name", got=name[:200]) from None
    with file:
        for piece in pieces:
            file.write(piece)
            size += len(piece)
            digest.update(piece)
    return {"name": name, "size": size, "sha256": digest.hexdigest()}


def inside(folder: Path, name: str) -> Path:
    """The path of a file below a folder. Raises Tampered for a name that leads out of it."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise Tampered(f"the name {name!r:.200} leads out of the folder", field="name", got=name[:200])
    return folder.joinpath(*parts)


# ---- Verifying -------------------------------------------------------------------------------------------------------

def verify_export(folder: Path, trusted: Mapping[str, PublicKey]) -> Finding:
    """Check a folder by itself: the record and the checkpoints' bytes, the attestation and the log, the other files.

    INTACT only when a trusted key has signed it. Raises NotFound for a folder that holds no export.
    """
    if not (folder / MANIFEST).is_file():
        raise NotFound(f"{folder} holds no export: there is no {MANIFEST}", folder=str(folder))
    try:
        manifest = load_document(folder, MANIFEST)
        if manifest.get("type") != EXPORT_TYPE:
            return Finding("INCONCLUSIVE", f"this export can't be checked here: its type is {manifest.get('type')!r:.80}", "type",
                           expected=EXPORT_TYPE)
        record = load_document(folder, RECORD)
        evidence = Evidence(load_document(folder, ATTESTATION), load_document(folder, LOG))
    except Tampered as fault:
        return Finding.tampered(fault)
    return worst([
        _check_record(folder, record), check_attestation(record, evidence, trusted), _check_files(folder, manifest, record),
        *_check_verdicts(folder, record, trusted),
    ])


def _check_verdicts(folder: Path, record: Mapping[str, Any], trusted: Mapping[str, PublicKey]) -> list[Finding]:
    """Of each signed verdict: that it's the one in the record, and in the log. One that isn't signed proves nothing."""
    try:
        found = []
        for row in signed_verdicts(record):
            where = inside(folder, f"{VERIFICATIONS}/{row['id']}")
            evidence = Evidence(load_document(where, ATTESTATION), load_document(where, LOG))
            finding = check_verdict(record, row, evidence, trusted)
            told = f"the {row['level']} {row['id']} ({row['verdict']}): {finding.message}"
            found.append(replace(finding, message=told))
    except Tampered as fault:
        return [Finding.tampered(fault)]
    except (KeyError, TypeError, AttributeError) as error:
        return [Finding("TAMPERED", f"a verification isn't well-formed: {type(error).__name__}: {error}", "verifications")]
    return found


def _check_record(folder: Path, record: Mapping[str, Any]) -> Finding:
    try:
        return check(record, measure(record, checkpoint_reader(folder, record)))
    except Tampered as fault:
        return Finding.tampered(fault)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Finding("TAMPERED", f"the record isn't well-formed: {type(error).__name__}: {error}", "record")


def _check_files(folder: Path, manifest: Mapping[str, Any], record: Mapping[str, Any]) -> Finding:
    """The manifest against the files beside the checkpoints, and against the record for those of the checkpoints."""
    try:
        listed = {file["name"]: (file["size"], file["sha256"]) for file in manifest["files"]}
        expected = {name: _measured(folder, name) for name in (RECORD, ATTESTATION, LOG, KEYS)}
        for row in signed_verdicts(record):
            where = f"{VERIFICATIONS}/{row['id']}"
            expected |= {f"{where}/{name}": _measured(folder, f"{where}/{name}") for name in (ATTESTATION, LOG)}
        for checkpoint in record["checkpoints"]:
            if not checkpoint["deleted_at"]:
                place = f"{CHECKPOINTS}/{checkpoint['folder']}"
                expected |= {f"{place}/{file['name']}": (file["size"], file["sha256"]) for file in checkpoint["files"]}
        for name in sorted(listed.keys() | expected.keys()):
            if listed.get(name) != expected.get(name):
                raise Tampered(f"{name} isn't as {MANIFEST} lists it", field=name, expected=str(listed.get(name)),
                               got=str(expected.get(name)))
        if manifest["run"] != record["identity"]["run"] or manifest.keys() != {"type", "run", "files"}:
            raise Tampered(f"{MANIFEST} isn't that of {record['identity']['run']}", field=MANIFEST)
    except Tampered as fault:
        return Finding.tampered(fault)
    except (KeyError, TypeError, AttributeError) as error:
        return Finding("TAMPERED", f"{MANIFEST} isn't well-formed: {type(error).__name__}: {error}", MANIFEST)
    return Finding("INTACT", f"{len(listed)} files are those that were exported")


def _measured(folder: Path, name: str) -> tuple[int, str] | None:
    path = folder / name
    return (path.stat().st_size, sha256_file(path).hex) if path.is_file() else None


def checkpoint_reader(folder: Path, record: Mapping[str, Any]) -> Read:
    """What reads the files of an exported run's checkpoints, in pieces: by step and name. It raises NotFound where there is no
    such file, or a link, and Tampered for a name that leads out of the folder."""
    def read(step: int, name: str) -> Iterator[bytes]:
        where = next(checkpoint["folder"] for checkpoint in record["checkpoints"] if checkpoint["step"] == step)
        path = inside(folder, f"{CHECKPOINTS}/{where}/{name}")
        if path.is_symlink() or not path.is_file():
            raise NotFound(f"{where}/{name} isn't in {folder}", name=name)
        with path.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece

    return read


def load_document(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object. Raises Tampered for anything else, for a key that comes twice, and for NaN."""
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) != len({key for key, _ in pairs}):
            raise ValueError("a key comes twice")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads((folder / name).read_bytes(), object_pairs_hook=once, parse_constant=refuse)
    except (OSError, ValueError, RecursionError) as error:
        raise Tampered(f"{name} can't be read: {type(error).__name__}: {error}", field=name) from None
    if not isinstance(value, dict):
        raise Tampered(f"{name} is no JSON object", field=name)
    return value
