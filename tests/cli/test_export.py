"""An exported run is checked by its files and a trusted key alone; one changed bit anywhere is found and named."""

from __future__ import annotations

import json
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, update

from mok_service import runs
from mok_service.cli import proof
from mok_service.db.session import Database
from mok_service.db.tables import log_entries, step_records
from mok_service.export import verify_export, write_export
from mok_service.provenance.digest import sha256
from mok_service.provenance.keys import SigningKey, public_keys, write_public_keys
from tests.cli.conftest import Mok
from tests.services import Service, Worker, flip_a_bit, spec


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))


@pytest.fixture
def ended(database: Database, worker: Worker) -> list[str]:
    """Three runs that are attested, without a service."""
    from mok_service import jobs
    from mok_service.spec import parse_job

    done = []
    for seed in (1, 2, 3):
        jobs.submit(database, parse_job(spec(seed=seed)))
        done.append(worker.work())
    worker.sign()
    return done


@pytest.fixture
def folder(mok: Mok, ended: list[str], tmp_path: Path) -> Path:
    """The second of them, exported."""
    assert mok("export", ended[1], "--to", tmp_path / "run").status == 0
    return tmp_path / "run"


@pytest.fixture
def key(mok: Mok, ended: list[str], tmp_path: Path) -> Path:
    assert mok("keys", "export", tmp_path / "trusted.pem").status == 0
    return tmp_path / "trusted.pem"


def document(path: Path) -> Any:
    return json.loads(path.read_text())


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON file, and what the export's list says of it, as a careful forger does."""
    value = document(path)
    change(value)
    content = (json.dumps(value, indent=1) + "\n").encode()
    path.write_bytes(content)
    if path.name != "export.json":
        listed = document(path.parent / "export.json")
        for file in listed["files"]:
            if file["name"] == path.name:
                file.update(size=len(content), sha256=sha256(content).hex)
        (path.parent / "export.json").write_text(json.dumps(listed))


def test_an_export_needs_neither_service_nor_database(mok: Mok, folder: Path, key: Path, data_dir: Path) -> None:
    shutil.rmtree(data_dir)
    result = mok("verify", folder, "--key", key)
    assert result.status == 0 and result.out.startswith("INTACT"), result
    assert "attested by key" in result.out and "entry 1 of the log's 3" in result.out
    names = sorted(file["name"] for file in document(folder / "export.json")["files"])
    assert names[:4] == ["attestation.json", "checkpoints/step-00000000/model.safetensors",
                         "checkpoints/step-00000000/optimizer.safetensors", "checkpoints/step-00000000/报告-🚀.txt"]
    assert names[-3:] == ["key.pem", "log.json", "record.json"] and len(names) == 16


def test_a_service_and_its_folder_export_the_same(mok: Mok, service: Service, ended: list[str], tmp_path: Path) -> None:
    assert mok("export", ended[1], "--to", tmp_path / "by-service", "--json").json["run"] == ended[1]
    (service.settings.data_dir / "server.json").rename(tmp_path / "server.json")
    assert mok("export", ended[1], "--to", tmp_path / "by-folder").status == 0
    (tmp_path / "server.json").rename(service.settings.data_dir / "server.json")
    for name in ("record.json", "attestation.json", "log.json", "key.pem", "export.json"):
        assert (tmp_path / "by-service" / name).read_bytes() == (tmp_path / "by-folder" / name).read_bytes()


def test_nothing_is_concluded_without_a_key_that_signed(mok: Mok, folder: Path, tmp_path: Path) -> None:
    result = mok("verify", folder)
    assert result.status == 5 and "a key that isn't among the trusted ones" in result.out
    write_public_keys(tmp_path / "other.pem", [SigningKey.generate().public])
    assert mok("verify", folder, "--key", tmp_path / "other.pem", "--json").json["field"] == "key"
    assert mok("verify", folder, "--key", folder / "record.json").status == 2
    assert mok("verify", folder, "--key", tmp_path / "nothing.pem").status == 2
    assert mok("verify", folder, "--level", "rerun").status == 5, "other data than the record's"
    assert mok("verify", tmp_path).status == 6, "no export"


# ---- One bit ---------------------------------------------------------------------------------------------------------

FILES = [
    ("checkpoints/step-00000002/model.safetensors", "model.safetensors"),
    ("checkpoints/step-00000000/optimizer.safetensors", "optimizer.safetensors"),
    ("checkpoints/step-00000003/报告-🚀.txt", "报告-🚀.txt"),
    ("key.pem", "key.pem"),
]


@pytest.mark.parametrize(("name", "field"), FILES)
def test_one_bit_of_a_file(mok: Mok, folder: Path, key: Path, name: str, field: str) -> None:
    flip_a_bit(folder / name)
    result = mok("verify", folder, "--key", key, "--json")
    assert (result.status, result.json["verdict"], result.json["field"]) == (4, "TAMPERED", field)


@pytest.mark.parametrize("name", ["record.json", "attestation.json", "log.json", "export.json"])
def test_one_bit_anywhere_in_a_document(folder: Path, key: Path, name: str) -> None:
    """Each byte in turn, one of its bits; a long file by samples."""
    trusted, path = public_keys(key), folder / name
    whole = path.read_bytes()
    for offset in range(0, len(whole), max(1, len(whole) // 150)):
        changed = bytearray(whole)
        changed[offset] ^= 1 << offset % 8
        path.write_bytes(changed)
        finding = verify_export(folder, trusted)
        of_type = name == "export.json" and b'"type"' in whole[max(0, offset - 30):offset + 30]
        assert finding.verdict == "TAMPERED" or (of_type and finding.verdict == "INCONCLUSIVE"), (offset, finding)
    path.write_bytes(whole)
    assert verify_export(folder, trusted).verdict == "INTACT"


def set_step(record: Any) -> None:
    record["chain"]["records"][2]["body"]["loss"] = "40000001"


def set_host(record: Any) -> None:
    record["environment"]["hardware"]["host"] = "i"


def cut_chain(record: Any) -> None:
    """Still a chain, of a run that seems to have been shorter."""
    chain = record["chain"]
    del chain["records"][-1]
    chain["length"] -= 1
    chain["head"] = chain["records"][-1]["head"]


def cut_failed(record: Any) -> None:
    """Nothing in the record contradicts it: only the attestation does."""
    cut_chain(record)
    record["checkpoints"].pop()
    record["final"] = record["identity"]["weights"] = None
    record["identity"].update(status="failed", stop_reason="internal")


def flip_payload(envelope: Any) -> None:
    payload = bytearray(b64decode(envelope["payload"]))
    payload[payload.index(b"succeeded")] ^= 1
    envelope["payload"] = b64encode(payload).decode()


def flip_signature(envelope: Any) -> None:
    signature = bytearray(b64decode(envelope["signatures"][0]["sig"]))
    signature[40] ^= 1
    envelope["signatures"][0]["sig"] = b64encode(signature).decode()


def flip_unused_bit(envelope: Any) -> None:
    """The last digit of base64 before the padding has bits that mean nothing."""
    text = envelope["signatures"][0]["sig"]
    assert text.endswith("==")
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    envelope["signatures"][0]["sig"] = text[:-3] + digits[digits.index(text[-3]) ^ 1] + "=="


def other_key_id(envelope: Any) -> None:
    envelope["signatures"][0]["keyid"] = "0" * 64


def flip_proof(log: Any) -> None:
    log["proof"][1] = f"{int(log['proof'][1], 16) ^ 1:064x}"


def flip_root(log: Any) -> None:
    head = json.loads(b64decode(log["head"]["payload"]))
    head["root"] = f"{int(head['root'], 16) ^ 1:064x}"
    log["head"]["payload"] = b64encode(json.dumps(head).encode()).decode()


def other_index(log: Any) -> None:
    log["index"] = 0


def other_size(log: Any) -> None:
    log["size"] = 4


def shorter_proof(log: Any) -> None:
    del log["proof"][-1]


@pytest.mark.parametrize(("name", "change", "field"), [
    ("record.json", set_step, "chain"), ("record.json", set_host, "record"), ("record.json", cut_chain, "checkpoint"),
    ("record.json", cut_failed, "record"), ("attestation.json", flip_payload, "signature"),
    ("attestation.json", flip_signature, "signature"), ("attestation.json", flip_unused_bit, "envelope"),
    ("attestation.json", other_key_id, "log.proof"), ("log.json", flip_proof, "log.proof"), ("log.json", flip_root, "log.head"),
    ("log.json", other_index, "log.proof"), ("log.json", other_size, "log.size"), ("log.json", shorter_proof, "log.proof"),
])
def test_a_careful_forgery_is_named(
    mok: Mok, folder: Path, key: Path, name: str, change: Callable[[Any], None], field: str
) -> None:
    edit(folder / name, change)
    result = mok("verify", folder, "--key", key, "--json")
    assert (result.status, result.json["verdict"]) == (4, "TAMPERED") and result.json["field"].startswith(field), result.json


def test_swapped_attestations(mok: Mok, ended: list[str], key: Path, tmp_path: Path) -> None:
    """Each is rightly signed, and in the log."""
    for run in ended[:2]:
        mok("export", run, "--to", tmp_path / run)
    for name in ("attestation.json", "log.json"):
        a, b = (document(tmp_path / run / name) for run in ended[:2])
        edit(tmp_path / ended[0] / name, lambda value, other=b: (value.clear(), value.update(other)))
        edit(tmp_path / ended[1] / name, lambda value, other=a: (value.clear(), value.update(other)))
    for run in ended[:2]:
        result = mok("verify", tmp_path / run, "--key", key, "--json")
        assert (result.status, result.json["verdict"], result.json["field"]) == (4, "TAMPERED", "record")


def test_a_whole_forgery_under_another_key_is_not_believed(mok: Mok, worker: Worker, key: Path, tmp_path: Path) -> None:
    """Somebody else's service, somebody else's signature, and its key in the folder: good for those who trust that key."""
    other = tmp_path / "other.pem"
    write_public_keys(other, [SigningKey.generate().public])
    mok("export", "latest", "--to", tmp_path / "run")
    assert mok("verify", tmp_path / "run", "--key", other).status == 5
    other.write_text(other.read_text() + key.read_text())
    assert mok("verify", tmp_path / "run", "--key", other).status == 0


# ---- Exports that can't be made, or that would do harm -----------------------------------------------------------------

def test_what_is_there_is_not_overwritten(mok: Mok, folder: Path, key: Path, ended: list[str]) -> None:
    before = (folder / "record.json").read_bytes()
    assert mok("export", ended[0], "--to", folder).status == 1
    assert mok("keys", "export", key).status == 1
    assert (folder / "record.json").read_bytes() == before


def test_a_run_that_is_not_attested_is_not_exported(mok: Mok, service: Service, spec_file: Path, tmp_path: Path) -> None:
    mok("submit", spec_file)
    assert mok("export", "latest", "--to", tmp_path / "x" / "y").status == 6 and not (tmp_path / "x").exists()
    assert mok("keys", "export", tmp_path / "k").status == 6


def test_a_run_that_has_just_ended_is_exported_once_it_is_signed(
    mok: Mok, service: Service, worker: Worker, spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mok("submit", spec_file)
    worker.work()
    monkeypatch.setattr(proof.time, "sleep", lambda seconds: None)
    assert mok("export", "latest", "--to", tmp_path / "run").status == 6, "nobody signs it"
    monkeypatch.setattr(proof.time, "sleep", lambda seconds: worker.sign())
    assert mok("export", "latest", "--to", tmp_path / "run").status == 0


def test_a_missing_file_leaves_no_export(mok: Mok, ended: list[str], worker: Worker, tmp_path: Path) -> None:
    (worker.settings.checkpoints(ended[0]) / "step-00000001" / "model.safetensors").unlink()
    result = mok("export", ended[0], "--to", tmp_path / "run")
    assert result.status == 6 and "step 1" in result.err
    assert [path.name for path in tmp_path.iterdir() if "run" in path.name] == []


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "", "a//b", "optimizer.safetensors"])
def test_a_name_that_leads_out_is_refused(ended: list[str], worker: Worker, tmp_path: Path, name: str) -> None:
    from mok_service.cli.local import Local
    from mok_service.errors import Tampered

    class Evil(Local):
        def provenance(self, run_id: str) -> dict[str, Any]:
            record = super().provenance(run_id)
            record["checkpoints"][0]["files"][0]["name"] = name
            return record

        def checkpoint_file(self, run_id: str, step: int, name: str) -> Any:
            return iter([b"evil"])

    with pytest.raises(Tampered, match=r"leads out|twice"):
        write_export(Evil(worker.db, worker.settings), ended[0], tmp_path / "deep" / "run")
    assert not list(tmp_path.rglob("*evil*"))


# ---- Runs and the log in a service -----------------------------------------------------------------------------------

@pytest.mark.parametrize("where", ["service", "folder"])
def test_a_run_is_verified_with_its_attestation(
    mok: Mok, request: pytest.FixtureRequest, database: Database, ended: list[str], key: Path, where: str, tmp_path: Path
) -> None:
    if where == "service":
        request.getfixturevalue("service")
    for more in ([], ["--key", key]):
        result = mok("verify", ended[0], *more)
        assert result.status == 0 and "attested by key" in result.out
    write_public_keys(tmp_path / "other.pem", [SigningKey.generate().public])
    assert mok("verify", ended[0], "--key", tmp_path / "other.pem").status == 5
    with database.write() as tx:  # what the chain doesn't cover: how long a step took
        tx.execute(update(step_records).where(step_records.c.step == 2, step_records.c.run_id == ended[0]).values(seconds=9.0))
    result = mok("verify", ended[0], "--json")
    assert (result.status, result.json["verdict"], result.json["field"]) == (4, "TAMPERED", "record")
    assert runs.judge(database, ended[0], lambda step, name: iter([b""])).verdict == "TAMPERED"


def test_a_run_that_is_not_attested_yet(mok: Mok, service: Service, spec_file: Path, worker: Worker, tmp_path: Path) -> None:
    mok("submit", spec_file)
    worker.work()
    assert mok("verify", "latest").status == 0
    write_public_keys(tmp_path / "own.pem", [worker.key.public])
    result = mok("verify", "latest", "--key", tmp_path / "own.pem")
    assert result.status == 5 and "has no attestation" in result.out


def test_the_log_is_remembered(mok: Mok, service: Service, worker: Worker, spec_file: Path, ended: list[str], key: Path) -> None:
    assert "3 entries" in mok("log", "verify").out
    mok("submit", spec_file)
    worker.work()
    worker.sign()
    result = mok("log", "verify", "--key", key)
    assert result.status == 0 and "4 entries" in result.out and "3 were seen before" in result.out
    assert [item["id"] for item in mok("keys", "show", "--json").json["items"]] == [worker.key.public.id]
    assert worker.key.public.id in mok("keys", "show").out


def forget_the_last(database: Database, worker: Worker) -> None:
    from mok_service.db.tables import attestations
    with database.write() as tx:
        tx.execute(delete(attestations).where(attestations.c.log_index == 2))
        tx.execute(delete(log_entries).where(log_entries.c.log_index == 2))


def forget_all_and_sign_again(database: Database, worker: Worker) -> None:
    """The owner of the key makes a new history, consistent in itself."""
    from mok_service.db.tables import attestations
    from mok_service.db.tables import runs as runs_table
    with database.write() as tx:
        tx.execute(delete(attestations))
        tx.execute(delete(log_entries))
        tx.execute(update(runs_table).values(log_index=None))
        tx.execute(update(step_records).values(seconds=2.0))
    worker.sign()


def change_an_entry(database: Database, worker: Worker) -> None:
    with database.write() as tx:
        tx.execute(update(log_entries).where(log_entries.c.log_index == 1).values(entry=sha256(b"other")))


def swap_two_entries(database: Database, worker: Worker) -> None:
    a, b = (entry.entry for entry in runs.log_entries(database)[:2])
    with database.write() as tx:
        tx.execute(update(log_entries).where(log_entries.c.log_index == 0).values(entry=b))
        tx.execute(update(log_entries).where(log_entries.c.log_index == 1).values(entry=a))


@pytest.mark.parametrize(("harm", "field"), [
    (forget_the_last, "log.size"), (forget_all_and_sign_again, "log.consistency"), (change_an_entry, "log.entries"),
    (swap_two_entries, "log.entries"),
])
def test_a_log_that_did_not_only_grow(
    mok: Mok, database: Database, worker: Worker, ended: list[str], key: Path, harm: Callable[..., None], field: str
) -> None:
    assert mok("log", "verify").status == 0
    harm(database, worker)
    for more in ([], ["--key", key]):  # it stays found: a bad head isn't remembered
        result = mok("log", "verify", "--json", *more)
        assert (result.status, result.json["verdict"], result.json["field"]) == (4, "TAMPERED", field)
    if field == "log.entries":
        assert mok("verify", ended[0]).status == 4, "nor does the log prove its neighbour any more"


def test_an_empty_log(mok: Mok, database: Database) -> None:
    assert mok("log", "verify").status == 6
