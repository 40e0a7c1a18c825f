"""Remote data: only allowed URLs and addresses, checked by digest, nothing half-written, drift named by URL."""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from mok_service.errors import InvalidSpec, MokError, SourceDrift, SourceUnavailable, Unrunnable
from mok_service.settings import load_settings
from mok_service.spec import DataSpec, RemoteFile
from mok_service.training import s3, sources
from mok_service.training.data import open_corpus
from mok_service.training.sources import Remote, Sources
from mok_service.urls import matches, normal_url
from mok_workers.attempt import Attempt
from mok_workers.messages import Devices, Payload, Seen
from mok_workers.opening import open_training
from tests.training.jobs import job

TEXT = b"All files are made of bytes.\n" * 40


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        answers = self.server.answers  # type: ignore[attr-defined]
        status, headers, body = answers[self.path.partition("?")[0]]
        if isinstance(status, list):
            status = status.pop(0)
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Web:
    """A server on this machine: path -> (status or statuses, headers, body)."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_port}"
        self.named = f"http://data.example:{server.server_port}"
        self.answers: dict[str, tuple[int | list[int], dict[str, str], bytes]] = {"/d/a.txt": (200, {}, TEXT)}
        self.asked: list[str] = []
        server.answers, server.asked = self.answers, self.asked  # type: ignore[attr-defined]


@pytest.fixture
def web() -> Iterator[Web]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Web(server)
        server.shutdown()
        thread.join()


@pytest.fixture
def remote(web: Web, tmp_path: Path) -> Remote:
    prefixes = (f"{web.url}/d/", f"{web.named}/d/", "https://data.example/d/", "s3://bucket/d/")
    return Remote(prefixes, ("127.0.0.1/32",), None, str(tmp_path / "cache"), 1 << 20, 1 << 16, 60.0)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def at_home(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


def files_in(remote: Remote) -> list[str]:
    """What the cache holds besides locks."""
    return sorted(p.name for p in Path(remote.cache).rglob("*") if p.is_file() and p.suffix != ".lock")


def fails(error: type[MokError], match: str, remote: Remote, url: str, **given: object) -> str:
    """The message with which reading a URL fails; nothing is left of it."""
    waits: list[float] = []
    with pytest.raises(error, match=match) as caught:
        Sources(remote, sleep=waits.append, resolve=at_home, **given).read(RemoteFile(url=url))  # type: ignore[arg-type]
    assert url in caught.value.message and files_in(remote) == []
    return caught.value.message


def test_a_file_is_fetched_once_and_found_by_its_digest(web: Web, remote: Remote) -> None:
    file, told = RemoteFile(url=f"{web.url}/d/a.txt"), list[str]()
    spec = DataSpec(source="files", urls=(file,))
    first = open_corpus(spec, [], 258, sources=Sources(remote, told.append))
    [recorded] = first.manifest.files
    assert (recorded.name, recorded.size, recorded.sha256) == (file.url, len(TEXT), sha256(TEXT))
    assert files_in(remote) == [sha256(TEXT)] and web.asked == ["/d/a.txt"] and len(told) == 2
    web.answers["/d/a.txt"] = (200, {}, TEXT + b"!")
    again = open_corpus(spec, [], 258, first.manifest, Sources(remote))
    assert again.manifest == first.manifest and web.asked == ["/d/a.txt"], "the cache has the recorded bytes"
    pinned = RemoteFile(url=file.url, sha256=sha256(TEXT), size=len(TEXT))
    assert Sources(remote).read(pinned) == TEXT and len(web.asked) == 1
    assert open_corpus(spec, [], 258, sources=Sources(remote)).manifest != first.manifest, "a new job asks the network"


def test_changed_bytes_are_source_drift_by_url(web: Web, remote: Remote, tmp_path: Path) -> None:
    url = f"{web.url}/d/a.txt"
    spec = DataSpec(source="files", urls=(RemoteFile(url=url),))
    recorded = open_corpus(spec, [], 258, sources=Sources(remote)).manifest
    web.answers["/d/a.txt"] = (200, {}, b"other")
    elsewhere = replace(remote, cache=str(tmp_path / "another"))
    with pytest.raises(SourceDrift) as caught:
        open_corpus(spec, [], 258, recorded, Sources(elsewhere))
    assert caught.value.detail["file"] == url and files_in(elsewhere) == []
    assert caught.value.message == (
        f"data file '{url}' isn't the one of the record: expected {len(TEXT)} bytes sha256:{sha256(TEXT)}, "
        f"got 5 bytes sha256:{sha256(b'other')}"
    )


@pytest.mark.parametrize(("wanted", "expected"), [
    ({"sha256": "0" * 64}, f"expected sha256:{'0' * 64}, got"), ({"size": 3}, "expected 3 bytes, got 1160 bytes"),
    ({"sha256": sha256(TEXT), "size": 3}, f"expected 3 bytes sha256:{sha256(TEXT)}, got 1160 bytes"),
])  # fmt: skip
def test_bytes_that_the_spec_does_not_name_are_refused(
    web: Web, remote: Remote, wanted: dict[str, object], expected: str
) -> None:
    with pytest.raises(SourceDrift, match=r"a\.txt' isn't the one of the spec: " + expected):
        Sources(remote).read(RemoteFile.model_validate({"url": f"{web.url}/d/a.txt"} | wanted))
    assert files_in(remote) == []


def test_a_damaged_cached_file_is_fetched_again(web: Web, remote: Remote) -> None:
    file = RemoteFile(url=f"{web.url}/d/a.txt", sha256=sha256(TEXT))
    Sources(remote).read(file)
    path = Path(remote.cache) / "sha256" / sha256(TEXT)
    path.write_bytes(TEXT[:-1] + b"?")
    assert Sources(remote).read(file) == TEXT and len(web.asked) == 2 and path.read_bytes() == TEXT


@pytest.mark.parametrize("target", [
    "http://127.0.0.1:1/d/a", "http://169.254.169.254/latest/meta-data", "http://10.0.0.1/d/a", "http://[::1]/d/a", "/secret",
    "../d/../secret", "//evil.example/d/a.txt", "file:///etc/passwd", "s3://bucket/d/a", "http://u:p@data.example/d/a", "",
    "http://data.example/d/%2e%2e/a", "http://[broken",
])  # fmt: skip
def test_a_redirect_to_what_is_not_allowed_is_refused(web: Web, remote: Remote, target: str) -> None:
    web.answers["/d/a.txt"] = (302, {"Location": target + ("?sig=hunter2" if target else "")}, b"")
    if target == "":
        assert "redirects" in fails(Unrunnable, "leads", remote, f"{web.url}/d/a.txt")
        return
    message = fails(Unrunnable, "leads ", remote, f"{web.url}/d/a.txt")
    assert web.asked == ["/d/a.txt"] and "hunter2" not in message


def test_a_redirect_never_leaves_encryption(web: Web, remote: Remote) -> None:
    made = Sources(remote)
    for target in (f"{web.url}/d/a.txt", "s3://bucket/d/a"):
        with pytest.raises(Unrunnable, match="leads from https to "):
            made._redirected("https://data.example/d/a", "https://data.example/d/a", target)
    assert made._redirected("http://data.example/d/a", f"{web.url}/d/a", "https://data.example/d/b?s=1") == (
        "https://data.example/d/b?s=1"
    )


def test_an_allowed_redirect_is_followed_and_its_query_shown_nowhere(
    web: Web, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")  # what the service logs at
    web.answers["/d/r"] = (307, {"Location": "a.txt?sig=hunter2"}, b"")
    told: list[str] = []
    assert Sources(remote, told.append).read(RemoteFile(url=f"{web.url}/d/r")) == TEXT
    assert web.asked == ["/d/r", "/d/a.txt?sig=hunter2"] and "hunter2" not in caplog.text + "".join(told)
    web.answers["/d/r"] = (302, {"Location": "r"}, b"")
    with pytest.raises(Unrunnable, match="more than 5 redirects"):
        Sources(remote).read(RemoteFile(url=f"{web.url}/d/r"))
    assert len(web.asked) == 8


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fd00::1", "::ffff:127.0.0.1"])
def test_a_name_with_an_inside_address_is_not_connected_to(web: Web, remote: Remote, address: str) -> None:
    url = f"{web.named}/d/a.txt"
    with pytest.raises(Unrunnable, match=r"isn't connected to: data\.example has the address"):
        Sources(replace(remote, networks=()), resolve=lambda *_: ["8.8.8.8", address]).read(RemoteFile(url=url))
    assert web.asked == []


def test_a_redirect_is_resolved_and_checked_too(web: Web, remote: Remote) -> None:
    """Both hosts are on the allow-list; the second one's name points inside."""
    web.answers["/d/a.txt"] = (302, {"Location": f"{web.named}/d/b.txt"}, b"")

    def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"] if host == "127.0.0.1" else ["169.254.169.254"]

    with pytest.raises(Unrunnable, match=r"169\.254\.169\.254"):
        Sources(remote, resolve=resolve).read(RemoteFile(url=f"{web.url}/d/a.txt"))
    assert web.asked == ["/d/a.txt"]


@pytest.mark.parametrize("url", [
    "https://data.example/other/a", "https://data.example/dd/a", "https://data.example.evil.example/d/a", "http://data.example/d/a",
    "https://data.example:8443/d/a", "s3://bucket/other", "s3://bucket-2/d/a",
])  # fmt: skip
def test_a_url_that_is_not_allowed_is_not_asked(remote: Remote, url: str) -> None:
    assert "MOK_DATA_URLS" in fails(Unrunnable, "isn't allowed here", remote, url)
    assert "MOK_DATA_URLS is unset" in fails(Unrunnable, "isn't allowed here", replace(remote, prefixes=()), url)
    with pytest.raises(Unrunnable, match="MOK_DATA_URLS is unset"):
        open_corpus(DataSpec(source="files", urls=(RemoteFile(url=url),)), [], 258)


def test_prefixes_end_at_a_slash() -> None:
    assert matches("https://h/data/a", ["https://h/data"]) and matches("https://h/data", ["https://h/data"])
    assert not matches("https://h/database", ["https://h/data"]) and matches("https://h/x", [normal_url("https://H:443")])


def test_failures_that_may_pass_are_tried_again(web: Web, remote: Remote) -> None:
    waits: list[float] = []
    web.answers["/d/a.txt"] = ([503, 429, 200], {}, TEXT)
    assert Sources(remote, sleep=waits.append).read(RemoteFile(url=f"{web.url}/d/a.txt")) == TEXT and waits == [1.0, 2.0]
    web.answers["/d/b"] = (503, {}, b"")
    fails_with = "the server answered 503 \\(3 tries\\)"
    with pytest.raises(SourceUnavailable, match=fails_with):
        Sources(remote, sleep=waits.append).read(RemoteFile(url=f"{web.url}/d/b"))


@pytest.mark.parametrize(("answer", "match", "tries"), [
    ((404, {}, b""), "the server answered 404", 1),
    ((200, {"Content-Length": "2000"}, TEXT), r"\(3 tries\)", 3),   # it ends too early
    ((200, {"Content-Encoding": "gzip"}, TEXT), "encoding 'gzip'", 1),
])  # fmt: skip
def test_what_is_not_the_whole_file_leaves_nothing(
    web: Web, remote: Remote, answer: tuple[int, dict[str, str], bytes], match: str, tries: int
) -> None:
    web.answers["/d/a.txt"] = answer
    fails(SourceUnavailable, match, remote, f"{web.url}/d/a.txt")
    assert len(web.asked) == tries


def test_a_server_that_is_not_there_is_named(remote: Remote, web: Web) -> None:
    def nowhere(host: str, port: int) -> list[str]:
        return []

    with pytest.raises(SourceUnavailable, match=r"data\.example.* has no address \(3 tries\)"):
        Sources(remote, sleep=lambda _: None, resolve=nowhere).read(RemoteFile(url=f"{web.named}/d/a.txt"))


def test_size_and_time_are_limited(web: Web, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    fails(Unrunnable, "has more than 1000 bytes", replace(remote, file_bytes_max=1000), f"{web.url}/d/a.txt")
    ticks = iter(range(0, 1000, 100))
    monkeypatch.setattr(sources.time, "monotonic", lambda: float(next(ticks)))
    fails(SourceUnavailable, "within 60 s, and it didn't end", remote, f"{web.url}/d/a.txt")


def test_the_cache_makes_room(web: Web, remote: Remote) -> None:
    small = replace(remote, cache_bytes_max=250, file_bytes_max=250)
    for index in range(4):
        web.answers[f"/d/{index}"] = (200, {}, bytes([index]) * 100)
        Sources(small).read(RemoteFile(url=f"{web.url}/d/{index}"))
    assert len(files_in(small)) == 2 and sha256(bytes([3]) * 100) in files_in(small)


def test_what_a_killed_process_left_is_not_used(web: Web, remote: Remote) -> None:
    url = f"{web.url}/d/a.txt"
    partial = Path(remote.cache) / "partial" / sha256(url.encode())
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * 5000)
    assert Sources(remote).read(RemoteFile(url=url)) == TEXT and not partial.exists()


# ---- S3 --------------------------------------------------------------------------------------------------------------

def memory(bucket: dict[str, bytes]) -> Callable[[str], Iterator[bytes]]:
    """The S3 reader over fsspec's file system in memory."""
    filesystem = fsspec.filesystem("memory", skip_instance_cache=True)
    filesystem.store = {}
    for name, content in bucket.items():
        filesystem.pipe_file(name, content)
    return lambda url: s3.pieces(filesystem, url)


def test_s3_by_a_file_system_of_fsspec(remote: Remote) -> None:
    store = memory({"/bucket/d/a b.txt": TEXT})
    assert Sources(remote, s3=store).read(RemoteFile(url="s3://bucket/d/a%20b.txt")) == TEXT  # type: ignore[arg-type]
    with pytest.raises(SourceUnavailable, match="s3://bucket/d/none: there is no such object"):
        Sources(remote, s3=store).read(RemoteFile(url="s3://bucket/d/none"))  # type: ignore[arg-type]


def test_without_the_extra_the_command_is_named(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(s3.importlib, "import_module", missing)
    with pytest.raises(Unrunnable, match=r"s3://bucket/d/a: S3 needs the package s3fs: pip install 'mok-service\[s3\]'"):
        Sources(remote).read(RemoteFile(url="s3://bucket/d/a"))


def test_a_store_that_speaks_s3(web: Web, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in s3.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Handler, "do_HEAD", Handler.do_GET, raising=False)
    web.answers["/bucket/d/a.txt"] = (200, {"ETag": '"1"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}, TEXT)
    own = replace(remote, networks=(), s3_endpoint=web.url)
    assert Sources(own).read(RemoteFile(url="s3://bucket/d/a.txt")) == TEXT
    with pytest.raises(Unrunnable, match=r"amazonaws\.com has the address 169\.254\.169\.254"):
        Sources(replace(own, s3_endpoint=None), resolve=lambda *_: ["169.254.169.254"]).read(RemoteFile(url="s3://bucket/d/b"))


def test_credentials_reach_workers_only_where_data_come_from_s3() -> None:
    assert s3.allowed_variables(load_settings(data_urls=("https://data.example/",))) == frozenset()
    assert s3.allowed_variables(load_settings(data_urls=("s3://bucket",))) == frozenset(s3.VARIABLES)


# ---- Settings and workers ----------------------------------------------------------------------------------------------

def test_prefixes_are_read_in_normal_form_and_never_shown() -> None:
    settings = load_settings(data_urls="https://Data.example:443, s3://bucket/d/,", data_s3_endpoint="http://minio.internal:9000/")
    assert settings.data_urls == ("https://data.example/", "s3://bucket/d/")
    made = Remote.of(settings)
    assert (made.s3_endpoint, made.cache) == ("http://minio.internal:9000", str(settings.data_dir / "cache"))
    assert pickle.loads(pickle.dumps(made)) == made
    for wrong in ("https://u:hunter2@data.example/", "https://data.example/?s=hunter2", "gs://bucket"):
        with pytest.raises(InvalidSpec, match=r"MOK_DATA_URLS = \(not shown\) is refused") as caught:
            load_settings(data_urls=wrong)
        assert "hunter2" not in caught.value.message


def test_a_worker_fetches_what_its_scheduler_allows(web: Web, remote: Remote, tmp_path: Path) -> None:
    url = f"{web.url}/d/a.txt"
    spec = job(data={"source": "files", "urls": [url]}, steps=2, execution={"threads": 1})
    document = {"training": spec.training.model_dump(mode="json"), "execution": spec.execution.model_dump(mode="json")}
    devices = Devices("cpu", 1, 0)
    payload = Payload("run-1", document, (), str(tmp_path / "run"), None, None, (), 60.0, "here", devices, remote=remote)
    attempt = Attempt(payload, open_training)
    attempt.start()
    assert attempt.join(60.0)
    reply = attempt.advance(Seen(), max_records=9)
    assert reply.status == "done" and reply.started is not None
    assert [file.name for file in reply.started.manifest.files] == [url]
    assert any(f"fetched {url}: 1,160 bytes" in line.message for line in reply.lines)
    inside = replace(remote, networks=(), cache=str(tmp_path / "empty"))
    refused = Attempt(replace(payload, remote=inside, checkpoints=str(tmp_path / "other")), open_training)
    refused.start()
    assert refused.join(60.0)
    failure = refused.advance(Seen()).failure
    assert failure is not None and failure.reason == "bad_data" and "127.0.0.1, which isn't public" in failure.message
