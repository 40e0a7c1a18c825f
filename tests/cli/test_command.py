"""The command as a whole: help, usage errors, exit statuses, what it imports, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from mok_service import cli
from mok_service.errors import MokError, ServiceUnreachable
from mok_service.provenance.verify import Finding
from tests.cli.conftest import Mok
from tests.services import Service

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "fastapi", "uvicorn", "sqlalchemy", "numpy", "pydantic", "httpx", "rich", "matplotlib")
VERBS = (
    "demo", "serve", "api", "worker", "submit", "jobs", "rerun", "runs", "find", "lineage", "show", "logs", "watch", "diff",
    "cancel", "pause", "resume", "verify", "bisect", "provenance", "train", "export", "keys show", "keys export", "log verify",
    "db upgrade", "db check", "db current", "db backup", "db restore", "apikey create", "apikey list", "apikey revoke",
    "audit-log list", "audit-log verify", "quota show", "quota set", "checkpoints list", "checkpoints rm",
)
WITHOUT_JSON = ("demo", "serve", "api", "worker")  # they run, and print as they go


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "api", ROOT / "workers")))}


def all_verbs() -> list[str]:
    found = []
    for name, command in get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found += [f"{name} {verb}" for verb in inner] if inner else [name]
    return found


def test_there_are_exactly_the_documented_verbs() -> None:
    assert sorted(all_verbs()) == sorted(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example_that_names_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*verb.split(), "--help"]) == 0
    text = capsys.readouterr().out
    example = text.partition("Example: ")[2]
    assert f"mok {verb}" in " ".join(example.split())
    assert ("--json" in text) == (verb not in WITHOUT_JSON)


def test_the_help_imports_nothing_heavy() -> None:
    code = f"import sys; from mok_service import cli; cli.run(['--help']); print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [
    ["nothing"], ["runs", "--nothing"], ["runs", "--limit", "0"], ["runs", "--limit", "x"], ["runs", "--status", "no"], ["show"],
    ["verify", "x", "--level", "no"], ["diff", "x"], ["submit"], ["serve", "--port", "99999"], ["serve", "--host", "0.0.0.0"],
    ["api", "--host", "192.0.2.1"], ["train", "--threads", "-1", "x"],
])
def test_a_wrong_command_line_exits_2(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(arguments) == 2
    assert list(tmp_path.iterdir()) == []


def test_without_a_verb_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 2
    assert "Commands:" in "".join(capsys.readouterr())


@pytest.mark.parametrize(("verdict", "status"), [
    ("INTACT", 0), ("AUDITED", 0), ("REPRODUCED", 0), ("DIVERGED", 3), ("TAMPERED", 4), ("INCONCLUSIVE", 5),
])
def test_each_verdict_has_its_status(verdict: str, status: int) -> None:
    from mok_service.cli.following import tell_verdict

    with pytest.raises(typer.Exit) as leaving:
        tell_verdict(Finding(verdict, "why").as_dict(), as_json=False)  # type: ignore[arg-type]
    assert leaving.value.exit_code == status


def test_every_error_that_can_reach_a_user_has_a_documented_status() -> None:
    def kinds(root: type[MokError]) -> list[type[MokError]]:
        return [root, *(kind for sub in root.__subclasses__() for kind in kinds(sub))]

    assert {kind.exit_status for kind in kinds(MokError)} <= {1, 2, 3, 4, 5, 6, 7}
    assert ServiceUnreachable.exit_status == 7


def test_settings_that_are_wrong_are_a_usage_error(mok: Mok, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_LEASE_SECONDS", "no")
    result = mok("runs")
    assert result.status == 2 and "MOK_LEASE_SECONDS" in result.err


def test_output_that_nobody_reads_is_no_failure(mok: Mok, service: Service) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mok_service.cli", "provenance", "--help"], cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(30) in (0, 1) and b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_exits_130(mok: Mok, service: Service, spec_file: Path, data_dir: Path, number: signal.Signals) -> None:
    mok("submit", spec_file)
    process = subprocess.Popen(
        [sys.executable, "-m", "mok_service.cli", "watch", "latest", "--data-dir", str(data_dir)], cwd=ROOT, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    while service.app.state.streams.open == 0:  # it watches
        assert process.poll() is None
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in err
