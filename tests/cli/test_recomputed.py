"""docs/provenance.md is enough to recompute an export: with hashlib, blake3 and rfc8785, and nothing of ours."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from blake3 import blake3
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from mok_service import jobs
from mok_service.db.session import Database
from mok_service.spec import parse_job
from tests.cli.conftest import Mok
from tests.services import Worker, spec


def sha256_of(document: Any) -> str:
    return "sha256:" + hashlib.sha256(rfc8785.dumps(document)).hexdigest()


def plain(value: Any) -> Any:
    """Floats as bits, long integers as text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return struct.pack(">d", value).hex()
    return str(value) if type(value) is int and abs(value) >= 2**53 else value


def state_of(path: Path) -> str:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:8 + length]), content[8 + length:]
    tensors = [
        {"name": name, "dtype": value["dtype"], "shape": value["shape"],
         "blake3": blake3(data[slice(*value["data_offsets"])]).hexdigest()}
        for name, value in sorted(header.items(), key=lambda item: item[0].encode()) if name != "__metadata__"
    ]
    return sha256_of({"type": "mok.state/v1", "tensors": tensors})


@pytest.fixture
def folder(mok: Mok, database: Database, worker: Worker, tmp_path: Path) -> Path:
    for seed in (2**63 - 1, 5):
        jobs.submit(database, parse_job(spec(seed=seed)))
        worker.work()
    worker.sign()
    first = mok("runs", "--json").json["items"][-1]["id"]
    assert mok("export", first, "--to", tmp_path / "run").status == 0
    return tmp_path / "run"


def test_an_export_is_recomputed_from_the_page(folder: Path) -> None:
    record, envelope, log = (json.loads((folder / f"{name}.json").read_text()) for name in ("record", "attestation", "log"))
    part, chain = record["spec"], record["chain"]
    assert part["training_digest"] == sha256_of(part["training_document"])
    assert part["submitted_digest"] == sha256_of({"type": "mok.submitted/v1", "value": plain(part["submitted"])})
    assert part["execution_digest"] == sha256_of({"type": "mok.execution/v1", "value": plain(part["execution"])})
    assert record["data"]["digest"] == sha256_of(record["data"]["manifest"])
    previous = sha256_of({
        "type": "mok.chain/v1", "training": part["training_digest"], "manifest": record["data"]["digest"], "arithmetic": "mok-1",
        "initial_weights": chain["records"][0]["body"]["state"]["weights"],
    })
    for step in chain["records"]:
        assert step["body"]["previous"] == previous
        previous = step["head"]
        assert previous == sha256_of(step["body"])
    assert chain["head"] == previous
    for checkpoint in record["checkpoints"]:
        place = folder / "checkpoints" / checkpoint["folder"]
        for file in checkpoint["files"]:
            assert hashlib.sha256((place / file["name"]).read_bytes()).hexdigest() == file["sha256"]
        assert state_of(place / "model.safetensors") == checkpoint["state"]["weights"]
        assert state_of(place / "optimizer.safetensors") == checkpoint["state"]["optimizer"]
        assert sha256_of({"type": "mok.cursor/v1", "step": str(checkpoint["step"])}) == checkpoint["state"]["cursor"]
    listed = {file["name"]: file["sha256"] for file in json.loads((folder / "export.json").read_text())["files"]}
    for name in ("record.json", "attestation.json", "log.json", "key.pem"):
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == listed[name]

    statement = json.loads(base64.b64decode(envelope["payload"]))
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    attested = {key: value for key, value in record.items() if key != "verifications"}
    attested["checkpoints"] = [{k: v for k, v in row.items() if k != "deleted_at"} for row in record["checkpoints"]]
    assert "sha256:" + subjects["record"] == sha256_of({"type": "mok.attested-record/v1", "value": plain(attested)})
    assert "sha256:" + subjects["final-weights"] == record["final"]["weights"]
    assert statement["predicate"]["buildDefinition"]["externalParameters"]["training"] == part["training_document"]

    key = load_pem_public_key((folder / "key.pem").read_bytes())
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    for signed in (envelope, log["head"]):
        payload, kind = base64.b64decode(signed["payload"]), signed["payloadType"].encode()
        message = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
        key.verify(base64.b64decode(signed["signatures"][0]["sig"]), message)  # type: ignore[union-attr, call-arg, arg-type]
        assert signed["signatures"][0]["keyid"] == hashlib.sha256(der).hexdigest()

    head = json.loads(base64.b64decode(log["head"]["payload"]))
    leaf = hashlib.sha256(b"\0" + hashlib.sha256(rfc8785.dumps(envelope)).digest()).digest()
    assert (head["size"], log["index"], len(log["proof"])) == (2, 0, 1)
    assert hashlib.sha256(b"\1" + leaf + bytes.fromhex(log["proof"][0])).hexdigest() == head["root"]
