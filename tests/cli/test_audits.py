"""Audits and reruns by REST, by the command and offline: verdicts, exit status, signed outcomes, and one changed bit in each."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from mok_service import runs, verifying
from mok_service.cli.local import Local
from mok_service.client import Client
from mok_service.db import tables
from mok_service.errors import Conflict, NotFound, Unrunnable
from mok_service.export import write_export
from mok_service.provenance.attest import open_envelope
from mok_service.provenance.keys import SigningKey, public_keys, signing_key, write_public_keys
from mok_service.training import offline
from mok_workers import opening
from mok_workers.signing import Signer
from tests.api.conftest import hold_against_description
from tests.audits import CODE, STEPS, attested, copied, forge, opened, says_same_code, serving, train
from tests.cli.conftest import Mok
from tests.services import flip_a_bit
from tests.training.jobs import TEXT
from tests.workers.world import World


@pytest.fixture(scope="module", autouse=True)
def same_code() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        says_same_code(patch, opening, offline)
        yield


@pytest.fixture(scope="module")
def trained(same_code: None, migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, train(migrated_file, folder)


@pytest.fixture
def data_dir(trained: tuple[Path, str], tmp_path: Path) -> Path:
    return copied(trained[0], tmp_path)


@pytest.fixture
def world(data_dir: Path) -> Iterator[World]:
    with opened(data_dir) as world:
        yield world


@pytest.fixture
def run(trained: tuple[Path, str]) -> str:
    return trained[1]


@pytest.fixture
def exported(world: World, run: str, tmp_path: Path) -> Callable[[], tuple[Path, Path]]:
    """Signs and exports the run as it is: folder and key file."""
    def export() -> tuple[Path, Path]:
        key = signing_key(world.settings.key_file())
        attested(world, key)
        write_export(Local(world.db, world.settings), run, tmp_path / "export")
        write_public_keys(tmp_path / "trusted.pem", [key.public])
        return tmp_path / "export", tmp_path / "trusted.pem"

    return export


def audit(mok: Mok, folder: Path, key: Path, *more: str, level: str = "audit") -> Any:
    result = mok("verify", folder, "--level", level, "--key", key, "--data", TEXT, "--json", *more)
    return (result.status, result.json["verdict"], result.json["step"], result.json["field"])


def is_described(answer: httpx.Response) -> None:
    answer.read()
    hold_against_description(answer)


# ---- A service -------------------------------------------------------------------------------------------------------

def test_by_rest_and_by_the_command(mok: Mok, world: World, run: str) -> None:
    with serving(world) as service:
        (world.folder / "server.json").write_text(json.dumps({"url": service.url, "pid": os.getpid(), "boot": "b"}))
        with httpx.Client(base_url=service.url, event_hooks={"response": [is_described]}) as api:
            body = {"run": run, "level": "audit", "segments": 2, "seed": 7, "execution": {"threads": 2}}
            answers = [api.post("/v1/verifications", json=body, headers={"Idempotency-Key": "k"}) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [202, 202] and answers[0].json()["id"] == answers[1].json()["id"]
            asked = answers[0].json()
            assert answers[0].headers["Location"] == f"/v1/verifications/{asked['id']}"
            assert asked["plan"]["seed"] == "7" and asked["progress"]["of"] == 2 and asked["log_index"] is None
            assert api.post("/v1/verifications", json={**body, "seed": 8}, headers={"Idempotency-Key": "k"}).status_code == 409
            for wrong in ({"segments": 7}, {"seed": -1}, {"level": "check"}, {"level": "rerun"}, {"segments": 0}):
                assert api.post("/v1/verifications", json=body | wrong).status_code == 422, wrong
            found = mok("verify", run, "--level", "audit", "--seed", "7", "--segments", "2", "--threads", "1", "--json")
            assert (found.status, found.json["verdict"], found.json["run"]) == (0, "AUDITED", run)
            assert found.json["plan"] == asked["plan"], "the same seed draws the same segments"
            assert mok("show", "latest", "--json").json["run"]["id"] == run, "an audit isn't what people mean"
            told = mok("verify", run, "--level", "rerun")
            assert told.status == 0 and told.out.splitlines()[-1].startswith("REPRODUCED equal through step 6")
            listed = api.get(f"/v1/runs/{run}/verifications").json()["items"]
            assert [row["level"] for row in listed] == ["audit", "audit", "rerun"]
            assert {row["status"] for row in listed[1:]} == {"done"}
            assert api.post(f"/v1/verifications/{listed[1]['id']}/cancel").status_code == 409
            assert api.get(f"/v1/verifications/{listed[1]['id']}/attestation").status_code == 404, "not signed yet"
            Signer(world.db, signing_key(world.settings.key_file())).tick()
            signed = api.get(f"/v1/verifications/{listed[1]['id']}/attestation").json()
            assert (signed["run"], signed["verification"]) == (run, listed[1]["id"])
            found = mok("find", signed["digest"])
            assert found.out.split() == ["produced", "verdict-attestation", listed[1]["id"]]
            assert {entry["verification"] for entry in api.get("/v1/log/entries").json()["items"]} >= {listed[1]["id"], None}
            shown = mok("show", run).out
            assert f"(signed: entry {signed['log_index']} of the log)" in shown and "attested" in shown
            assert mok("verify", run, "--segments", "2").status == 2 and mok("verify", run, "--device", "cpu").status == 2
            assert mok("verify", "run_0198c0de5e1f7000800000000000c0de", "--level", "audit").status == 6
        (world.folder / "server.json").unlink()


def test_by_the_client(world: World, run: str) -> None:
    with serving(world) as service, Client(service.url) as client:
        asked = client.verify(run, "audit", segments=STEPS)
        for _ in client.events(asked["executed_by"]):
            pass
        found = client.verification(asked["id"])
        assert (found["status"], found["verdict"], found["progress"]) == ("done", "AUDITED", {"done": STEPS, "of": STEPS})
        with pytest.raises(Conflict, match="it is done"):
            client.cancel_verification(asked["id"])
        with pytest.raises(NotFound, match="soon after its verdict"):
            client.verdict_attestation(asked["id"])


@pytest.mark.parametrize(("change", "status", "verdict"), [
    (lambda world, run: flip_a_bit(world.settings.checkpoints(run) / "step-00000003" / "model.safetensors"), 4, "TAMPERED"),
    (lambda world, run: flip_a_bit(world.settings.checkpoints(run) / "step-00000003" / "optimizer.safetensors"), 4, "TAMPERED"),
    (lambda world, run: forge(world, run, 3), 3, "DIVERGED"),
])
def test_the_commands_exit_status_is_the_verdicts(
    mok: Mok, world: World, run: str, change: Any, status: int, verdict: str
) -> None:
    change(world, run)
    with serving(world) as service:
        result = mok("verify", run, "--level", "audit", "--segments", str(STEPS), "--url", service.url, "--json")
        assert (result.status, result.json["verdict"], result.json["step"]) == (status, verdict, 3)
        if verdict == "DIVERGED":
            assert mok("verify", run, "--level", "rerun", "--url", service.url).status == status


def test_a_rebuilt_library_excuses_a_difference(
    mok: Mok, world: World, run: str, exported: Callable[[], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By REST, by the command and offline; by the function in tests/workers."""
    forge(world, run, 3)
    folder, key = exported()
    code = {**CODE, "native": {"cpu": "sha256:" + "b" * 64}}
    for module in (opening, offline):
        monkeypatch.setattr(module, "environment", lambda: {"code": code})
    with serving(world) as service:
        for level, more in (("audit", ("--segments", str(STEPS))), ("rerun", ())):
            result = mok("verify", run, "--level", level, *more, "--url", service.url, "--json")
            assert (result.status, result.json["verdict"], result.json["step"]) == (5, "INCONCLUSIVE", 3)
            assert "cpu sha256:bbbb" in result.json["message"] and "this is source drift" in result.json["message"]
            shown = httpx.get(f"{service.url}/v1/verifications/{result.json['id']}").json()
            assert (shown["verdict"], shown["field"], shown["step"]) == ("INCONCLUSIVE", "weights", 3)
    assert audit(mok, folder, key, "--segments", str(STEPS)) == (5, "INCONCLUSIVE", 3, "weights")
    assert audit(mok, folder, key, level="rerun") == (5, "INCONCLUSIVE", 4, "weights"), "of step 3 there is no state on record"


# ---- Offline ---------------------------------------------------------------------------------------------------------

def test_an_exported_run_is_audited_anywhere(mok: Mok, exported: Callable[[], tuple[Path, Path]], tmp_path: Path) -> None:
    folder, key = exported()
    assert audit(mok, folder, key) == (0, "AUDITED", None, None)
    assert audit(mok, folder, key, level="rerun") == (0, "REPRODUCED", STEPS, None)
    drawing = ("--segments", "3", "--seed", "5", "--threads", "2")
    told = mok("verify", folder, "--level", "audit", "--key", key, "--data", TEXT, *drawing)
    assert "covered: 3 of 6 steps, 3 of 6 segments" in told.out and "50.00 % (1/2)" in told.out
    result = mok("verify", folder, "--level", "audit", "--data", TEXT)
    assert result.status == 5 and "gave the bits on record" in result.out
    assert "a key that isn't among the trusted ones" in result.out
    assert mok("verify", folder, "--level", "audit", "--key", key, "--data", tmp_path).status == 2, "no data"
    (tmp_path / "text").mkdir()
    for file in TEXT.iterdir():
        (tmp_path / "text" / file.name).write_bytes(file.read_bytes() + b".")
    assert mok("verify", folder, "--level", "audit", "--key", key, "--data", tmp_path / "text").status == 5, "other data"
    assert mok("verify", folder, "--level", "audit", "--key", key, "--data", TEXT, "--segments", "7").status == 2


def test_what_a_gpu_trained_is_audited_on_a_cpu(
    mok: Mok, world: World, run: str, exported: Callable[[], tuple[Path, Path]]
) -> None:
    """Where there is no GPU, and its library isn't known. The bits are a CPU's here; those of a GPU are held against it by
    tests/gpu."""
    execution = world.run(run).execution.model_dump(mode="json") | {"device": "cuda"}
    code = {**CODE, "native": {**CODE["native"], "cuda": "sha256:" + "b" * 64}}
    with world.db.write() as tx:
        tx.execute(update(tables.runs).where(tables.runs.c.id == run).values(execution=execution, device="cuda"))
        tx.execute(update(tables.attempts).where(tables.attempts.c.run_id == run).values(environment={"code": code}))
    world.tick()
    asked = verifying.verify(world.db, run, "audit", now=world.now)
    assert world.run(str(asked.executed_by)).execution.device == "cpu"
    assert world.ended(str(asked.executed_by)).verdict == "AUDITED"
    with pytest.raises(Unrunnable, match="the cluster has 0"):
        verifying.verify(world.db, run, "audit", execution={"device": "cuda"}, now=world.now)
    folder, key = exported()
    assert audit(mok, folder, key) == (0, "AUDITED", None, None)
    assert "code differs" not in str(runs.get_verification(world.db, asked.id).message), "both have the CPU's library"


def test_a_forger_who_signs_is_found_by_computing(
    mok: Mok, world: World, run: str, exported: Callable[[], tuple[Path, Path]]
) -> None:
    forge(world, run, 3)
    folder, key = exported()
    assert mok("verify", folder, "--key", key).status == 0, "signed by the right key, and nothing contradicts"
    assert audit(mok, folder, key, "--segments", str(STEPS)) == (3, "DIVERGED", 3, "weights")
    assert audit(mok, folder, key, level="rerun")[:2] == (3, "DIVERGED")


def negate_a_zero(folder: Path) -> None:
    rewrite(folder / "checkpoints/step-00000001/optimizer.safetensors", 0.0, 0x80000000)


def other_nan(folder: Path) -> None:
    rewrite(folder / "checkpoints/step-00000001/model.safetensors", None, 0x7FC00001)


def rewrite(path: Path, wanted: float | None, bits: int) -> None:
    """Other bits in the first float that is `wanted` (None: any) of a safetensors file."""
    content = bytearray(path.read_bytes())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    at = next(i for i in range(start, len(content), 4) if wanted is None or struct.unpack_from("<f", content, i)[0] == wanted)
    struct.pack_into("<I", content, at, bits)
    path.write_bytes(bytes(content))


def change_a_step(folder: Path) -> None:
    record = json.loads((folder / "record.json").read_text())
    record["chain"]["records"][2]["body"]["loss"] = "00000000"
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")


@pytest.mark.parametrize("change", [
    lambda folder: flip_a_bit(folder / "checkpoints/step-00000002/model.safetensors"),
    lambda folder: flip_a_bit(folder / "checkpoints/step-00000002/optimizer.safetensors"),
    negate_a_zero, other_nan, change_a_step,
])
def test_one_changed_bit_in_an_export(
    mok: Mok, exported: Callable[[], tuple[Path, Path]], change: Callable[[Path], None]
) -> None:
    folder, key = exported()
    change(folder)
    for level in ("audit", "rerun"):
        assert audit(mok, folder, key, level=level)[:2] == (4, "TAMPERED")


# ---- What is signed --------------------------------------------------------------------------------------------------

def verified(world: World, run: str) -> list[str]:
    """An audit and a rerun of the run that have ended; their ids."""
    asked = [verifying.verify(world.db, run, "audit", seed=1, now=world.now),
             verifying.verify(world.db, run, "rerun", now=world.now)]
    world.ended(*(str(one.executed_by) for one in asked))
    return [one.id for one in asked]


def test_verdicts_are_signed_logged_and_exported(
    mok: Mok, world: World, run: str, exported: Callable[[], tuple[Path, Path]]
) -> None:
    first, second = verified(world, run)
    folder, key = exported()
    assert runs.unattested(world.db) == []
    assert {entry.verification_id for entry in runs.log_entries(world.db)} == {None, first, second}
    envelope = json.loads((folder / "verifications" / first / "attestation.json").read_text())
    opened_envelope = open_envelope(envelope, public_keys(key))
    assert opened_envelope.signer is not None
    document = opened_envelope.document
    assert document["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert (document["predicate"]["result"], document["predicate"]["passedTests"]) == ("PASSED", [f"audit of {run}"])
    assert document["predicate"]["verification"]["report"] == runs.get_verification(world.db, first).report
    heads = {subject["name"]: subject["digest"] for subject in document["subject"]}
    assert heads["chain-head"] == {"sha256": str(world.run(run).head).removeprefix("sha256:")}
    told = mok("verify", folder, "--key", key)
    assert told.status == 0 and f"the audit {first} (AUDITED)" in told.out
    heads_of_log = {json.dumps(json.loads(path.read_text())["head"]) for path in folder.rglob("log.json")}
    assert len(list(folder.rglob("log.json"))) == 3 and len(heads_of_log) == 1, "proved under one head"
    assert audit(mok, folder, key) == (0, "AUDITED", None, None)


def swap(folder: Path, ids: list[str]) -> None:
    one, two = (folder / "verifications" / name for name in ids)
    for name in ("attestation.json", "log.json"):
        first, second = (one / name).read_bytes(), (two / name).read_bytes()
        (one / name).write_bytes(second)
        (two / name).write_bytes(first)


def better_verdict(folder: Path, ids: list[str]) -> None:
    record = json.loads((folder / "record.json").read_text())
    record["verifications"][0]["report"]["escape"][0]["percent"] = "00.01"
    (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")


@pytest.mark.parametrize("change", [
    swap, better_verdict,
    lambda folder, ids: (folder / "verifications" / ids[0] / "log.json").unlink(),
    lambda folder, ids: flip_a_bit(folder / "verifications" / ids[1] / "attestation.json", 40),
])
def test_a_changed_verdict_in_an_export(
    mok: Mok, world: World, run: str, exported: Callable[[], tuple[Path, Path]], change: Callable[[Path, list[str]], None]
) -> None:
    ids = verified(world, run)
    folder, key = exported()
    change(folder, ids)
    assert mok("verify", folder, "--key", key).status == 4
    assert audit(mok, folder, key)[:2] == (4, "TAMPERED")


def test_a_verdict_under_another_key_concludes_nothing(
    mok: Mok, world: World, run: str, exported: Callable[[], tuple[Path, Path]]
) -> None:
    attested(world, signing_key(world.settings.key_file()))
    verified(world, run)
    attested(world, SigningKey.generate())
    folder, key = exported()
    result = mok("verify", folder, "--key", key)
    assert result.status == 5 and "a key that isn't among the trusted ones" in result.out
