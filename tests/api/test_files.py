"""Downloading the files of checkpoints; case 27."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import httpx
import pytest

from mok_api.routes.checkpoints import disposition
from tests.api.conftest import shared_service
from tests.services import SPEC, Service, Worker, safetensors


@pytest.fixture(scope="module")
def service(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with shared_service(migrated_file, tmp_path_factory) as running:
        yield running


@pytest.fixture
def run(api: httpx.Client, worker: Worker) -> str:
    """A run with checkpoints."""
    api.post("/v1/jobs", json=SPEC)
    return worker.work()


@pytest.fixture
def folder(service: Service, run: str) -> Path:
    """That of step 1."""
    return service.settings.checkpoints(run) / "step-00000001"


def raw(service: Service, path: str) -> tuple[int, bytes]:
    """Status and body of a request whose path is sent as it's written."""
    connection = http.client.HTTPConnection(*service.address, timeout=10)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", "127.0.0.1")
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


@pytest.mark.parametrize("name", ["model.safetensors", "报告-🚀.txt"])
def test_a_file_is_downloaded(api: httpx.Client, run: str, folder: Path, name: str) -> None:
    answer = api.get(f"/v1/runs/{run}/checkpoints/1/files/{quote(name)}")
    content = (folder / name).read_bytes()
    assert answer.status_code == 200 and answer.content == content
    assert answer.headers["Content-Length"] == str(len(content))
    assert answer.headers["Repr-Digest"] == f"sha-256=:{b64encode(hashlib.sha256(content).digest()).decode()}:"
    assert answer.headers["Content-Type"] == "application/octet-stream"
    shown = answer.headers["Content-Disposition"]
    encoded = shown.partition("filename*=UTF-8''")[2]
    assert (unquote(encoded) if encoded else shown.partition('filename="')[2][:-1]) == name and shown.startswith("attachment")


@pytest.mark.parametrize("name", ["a.txt", "a b.txt", "报告-🚀", 'a";x="b', "a\r\nSet-Cookie: x", "%41", "\\"])
def test_the_name_in_the_header_is_safe(name: str) -> None:
    header = disposition(name)
    assert header.isascii() and header.isprintable() and header.count('"') == 2
    assert header.encode("latin-1")


@pytest.mark.parametrize("path", [
    "..%2fmodel.safetensors", "..%2f..%2f..%2fmok.db", "%2e%2e/model.safetensors", "%2e%2e%2f%2e%2e%2f%2e%2e%2fmok.db",
    "../../../../../../mok.db", "//etc/passwd", "/etc/passwd", "%2fetc%2fpasswd", "..%5c..%5cmok.db", "....//mok.db",
    ".", "..", "", "%00", "model.safetensors%00", "model.safetensors/", "./model.safetensors", "checkpoint.json", "%ff",
    "model.safetensors%2f..%2fx", "..%252f..%252fmok.db", "%c0%ae%c0%ae%c0%afmok.db",
])
def test_a_path_that_leads_elsewhere_is_not_found(service: Service, run: str, folder: Path, path: str) -> None:
    (folder / "checkpoint.json").write_text("{}")
    status, body = raw(service, f"/v1/runs/{run}/checkpoints/1/files/{path}")
    assert status == 404 and b"SQLite" not in body and b"root:" not in body


@pytest.mark.parametrize("path", ["..%2f1", "1%2f..", "-1", "1.0", "0x1", "1e0", "99", str(2**63), "9" * 5000, "%31%00"])
def test_a_step_that_is_none_is_refused(service: Service, run: str, path: str) -> None:
    status, _ = raw(service, f"/v1/runs/{run}/checkpoints/{path}/files/model.safetensors")
    assert status in (404, 422)


class TestLinks:
    """Whatever stands in the place of a file on record, only a regular file inside the run's folder is served."""

    @pytest.fixture
    def secret(self, tmp_path: Path) -> Iterator[Path]:
        path = tmp_path / "secret"
        path.write_bytes(safetensors({"w": b"\0" * 8}))
        yield path

    def status(self, service: Service, run: str) -> int:
        return raw(service, f"/v1/runs/{run}/checkpoints/1/files/model.safetensors")[0]

    def test_a_file_that_is_a_link(self, service: Service, run: str, folder: Path, secret: Path) -> None:
        assert self.status(service, run) == 200
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(secret)
        assert self.status(service, run) == 404

    def test_a_link_inside_the_folder(self, service: Service, run: str, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to("optimizer.safetensors")
        assert self.status(service, run) == 404

    def test_a_folder_that_is_a_link(self, service: Service, run: str, folder: Path, tmp_path: Path) -> None:
        shutil.move(folder, tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
        assert self.status(service, run) == 404

    def test_a_folder_and_a_pipe(self, service: Service, run: str, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        assert self.status(service, run) == 404
        (folder / "model.safetensors").mkdir()
        assert self.status(service, run) == 404
        (folder / "model.safetensors").rmdir()
        os.mkfifo(folder / "model.safetensors")
        assert self.status(service, run) == 404


def test_a_hundred_downloads_leave_no_file_open(service: Service, api: httpx.Client, run: str) -> None:
    path = f"/v1/runs/{run}/checkpoints/1/files/model.safetensors"
    for _ in range(3):
        api.get(path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        assert api.get(path).status_code == 200
    assert len(os.listdir("/proc/self/fd")) < before + 50
