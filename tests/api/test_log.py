"""Attestations and their log over REST; and a public implementation, which isn't ours, verifies an envelope."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable

import httpx
import pytest
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import VerificationError
from securesystemslib.signer import SSlibKey  # type: ignore[attr-defined]  # it lists no exports
from sqlalchemy import select, update

from mok_service.client import Client
from mok_service.db.tables import attestations, log_entries, step_records
from mok_service.provenance import merkle, tree
from mok_service.provenance.digest import Digest
from mok_service.provenance.keys import SigningKey
from tests.services import Service, Worker, spec


def submit_and_work(api: httpx.Client, worker: Worker, count: int = 1) -> list[str]:
    done = []
    for _ in range(count):
        api.post("/v1/jobs", json=spec())
        done.append(worker.work())
    worker.sign()
    return done


def as_public_key(key: SigningKey) -> SSlibKey:
    return SSlibKey(key.public.id, "ed25519", "ed25519", {"public": key.public.key.public_bytes_raw().hex()})


def test_a_run_is_attested_once_it_has_ended(api: httpx.Client, worker: Worker) -> None:
    run = api.post("/v1/jobs", json=spec()).json()["run"]["id"]
    assert api.get(f"/v1/runs/{run}/attestation").json()["error"]["code"] == "not_found"
    assert api.get("/v1/runs/run_1/attestation").status_code == 404
    worker.work()
    worker.sign()
    found = api.get(f"/v1/runs/{run}/attestation").json()
    statement = json.loads(b64decode(found["envelope"]["payload"]))
    assert statement["predicate"]["runDetails"]["metadata"]["invocationId"] == run and found["log_index"] == 0
    assert [key["id"] for key in api.get("/v1/keys").json()["items"]] == [found["key"]] == [worker.key.public.id]


def test_a_public_implementation_verifies_the_envelopes(api: httpx.Client, worker: Worker) -> None:
    [run] = submit_and_work(api, worker)
    for envelope in (api.get(f"/v1/runs/{run}/attestation").json()["envelope"], api.get("/v1/log/head").json()):
        read = Envelope.from_dict(envelope)
        accepted = read.verify([as_public_key(worker.key)], 1)
        assert list(accepted) == [worker.key.public.id]
        with pytest.raises(VerificationError):
            read.verify([as_public_key(SigningKey.generate())], 1)
        changed = bytearray(read.payload)
        changed[10] ^= 1
        read.payload = bytes(changed)
        with pytest.raises(VerificationError):
            read.verify([as_public_key(worker.key)], 1)


def test_the_log_by_rest_and_client(api: httpx.Client, service: Service, worker: Worker) -> None:
    assert api.get("/v1/log/head").status_code == 404 and api.get("/v1/log/entries").json() == {"items": [], "next_after": -1}
    done = submit_and_work(api, worker, 5)
    trusted = {worker.key.public.id: worker.key.public}
    with Client(service.url) as client:
        head = tree.open_head(client.log_head(), trusted)
        entries = client.log_entries()
        assert head.size == 5 and [entry["run"] for entry in entries] == done
        assert [entry["index"] for entry in client.log_entries(after=2)] == [3, 4]
        leaves = [tree.leaf(Digest.parse(entry["entry"])) for entry in entries]
        assert merkle.root(leaves) == head.root and head.signer is not None
        included = [bytes.fromhex(node) for node in client.log_proof(5, index=3)]
        assert merkle.verify_inclusion(leaves[3], 3, 5, included, head.root)
        consistent = [bytes.fromhex(node) for node in client.log_proof(5, old_size=3)]
        assert merkle.verify_consistency(3, 5, consistent, merkle.root(leaves[:3]), head.root)
        assert client.attestation(done[2])["digest"] == entries[2]["entry"]
        assert [key["pem"] for key in client.signing_keys()] == [worker.key.public.pem]


@pytest.mark.parametrize("query", [
    "size=1", "size=1&index=0&old_size=0", "size=2&index=0", "size=1&index=1", "size=1&index=-1", "size=0&index=0",
    "size=1&old_size=2", "index=0", "size=9223372036854775807&index=0", "size=x&index=0", "size=1&idx=0",
])
def test_a_proof_of_what_is_not_there_is_refused(api: httpx.Client, worker: Worker, query: str) -> None:
    submit_and_work(api, worker)
    assert api.get(f"/v1/log/proof?{query}").status_code == 422
    assert api.get("/v1/log/proof?size=1&index=0").json()["proof"] == []


def swap_attestations(service: Service, run: str, other: str) -> None:
    with service.db.write() as tx:
        held = {row.run_id: row.envelope for row in tx.execute(select(attestations))}
        for name, envelope in ((run, held[other]), (other, held[run])):
            tx.execute(update(attestations).where(attestations.c.run_id == name).values(envelope=envelope))


def flip_signature(service: Service, run: str, other: str) -> None:
    with service.db.write() as tx:
        envelope = tx.execute(select(attestations.c.envelope).where(attestations.c.run_id == run)).scalar_one()
        text = envelope["signatures"][0]["sig"]
        envelope["signatures"][0]["sig"] = ("B" if text[0] == "A" else "A") + text[1:]
        tx.execute(update(attestations).where(attestations.c.run_id == run).values(envelope=envelope))


def change_a_duration(service: Service, run: str, other: str) -> None:
    with service.db.write() as tx:
        tx.execute(update(step_records).where(step_records.c.run_id == run, step_records.c.step == 1).values(seconds=7.0))


def change_the_other_entry(service: Service, run: str, other: str) -> None:
    with service.db.write() as tx:
        tx.execute(update(log_entries).where(log_entries.c.log_index == 1).values(entry=Digest("sha256", "0" * 64)))


@pytest.mark.parametrize(("harm", "field"), [
    (swap_attestations, "record"), (flip_signature, "signature"), (change_a_duration, "record"),
    (change_the_other_entry, "log.proof"),
])
def test_the_service_finds_what_was_changed_in_its_database(
    api: httpx.Client, service: Service, worker: Worker, harm: Callable[[Service, str, str], None], field: str
) -> None:
    run, other = submit_and_work(api, worker, 2)
    before = api.post("/v1/verifications", json={"run": run}).json()
    assert before["verdict"] == "INTACT" and "attested by key" in before["message"]
    harm(service, run, other)
    after = api.post("/v1/verifications", json={"run": run}).json()
    assert (after["verdict"], after["field"]) == ("TAMPERED", field)
    assert api.get(f"/v1/runs/{run}/verifications").json()["items"] == [before, after]
