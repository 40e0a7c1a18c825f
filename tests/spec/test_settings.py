"""Settings come from the environment, are limited, and are all documented."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Ge, Le

from mok_service.errors import InvalidSpec
from mok_service.settings import PREFIX, Settings, load_settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def refusal(**given: Any) -> str:
    with pytest.raises(InvalidSpec) as caught:
        load_settings(**given)
    assert caught.value.exit_status == 2 and caught.value.detail["errors"]
    return caught.value.message


def test_an_empty_environment_gives_an_embedded_service_on_loopback(tmp_path: Path) -> None:
    settings = load_settings()
    assert settings.data_dir == tmp_path / ".mok"
    assert settings.database() == f"sqlite:///{tmp_path}/.mok/mok.sqlite3"
    assert (settings.host, settings.port, settings.data_roots) == ("127.0.0.1", 0, ())
    assert settings.hosts() == ("localhost", "127.0.0.1", "::1")


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOK_DATA_ROOTS", os.pathsep.join(["/data/a", "relative", ""]))
    monkeypatch.setenv("MOK_ALLOWED_HOSTS", "mok.example, Other")
    monkeypatch.setenv("MOK_PORT", "8080")
    monkeypatch.setenv("MOK_LEASE_SECONDS", "")  # an empty variable is an unset one
    settings = load_settings(host="0.0.0.0")
    assert settings.data_roots == (Path("/data/a"), tmp_path / "relative")
    assert settings.hosts() == ("localhost", "127.0.0.1", "::1", "0.0.0.0", "mok.example", "Other")
    assert (settings.port, settings.lease_seconds) == (8080, 30.0)
    assert load_settings(port=1, data_roots=[Path("/x")]).port == 1


def test_no_file_is_read(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MOK_PORT=8080\n")
    assert load_settings().port == 0


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().port = 3


@pytest.mark.parametrize(("variable", "value", "message"), [
    ("MOK_PORT", "65536", "MOK_PORT = 65536 is refused (allowed: less than or equal to 65535)"),
    ("MOK_PORT", "http", "MOK_PORT = http is refused (allowed: a valid integer, unable to parse string as an integer)"),
    ("MOK_LEASE_SECONDS", "0", "MOK_LEASE_SECONDS = 0 is refused (allowed: greater than or equal to 1)"),
    ("MOK_TICK_SECONDS", "nan", "MOK_TICK_SECONDS = nan is refused (allowed: a finite number)"),
    ("MOK_HEARTBEAT_SECONDS", "11",
     "they contradict each other (allowed: MOK_HEARTBEAT_SECONDS up to a third of MOK_LEASE_SECONDS; they are 11 and 30)"),
    ("MOK_DATABSE_URL", "postgresql://u:secret@h/d",
     "MOK_DATABSE_URL is no setting, did you mean MOK_DATABASE_URL? (allowed: the variables of docs/settings.md)"),
])  # fmt: skip
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str) -> None:
    monkeypatch.setenv(variable, value)
    assert refusal() == "the settings are invalid: " + message


def test_variables_of_other_parts_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOK_LIBRARY", "MOK_CUDA_LIBRARY", "MOK_IMAGE", "MOK_URL", "MOK_KEY", "MOK_ALLOW_STALE_LIBRARY"):
        monkeypatch.setenv(name, "x")
    load_settings()


def test_the_database_password_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_DATABASE_URL", "postgresql://user:hunter2@host/name")
    settings = load_settings()
    assert settings.database() == "postgresql://user:hunter2@host/name"
    assert "hunter2" not in repr(settings) and "hunter2" not in str(settings)
    assert "hunter2" not in refusal(database_url=["hunter2"]) and "hunter2" not in refusal(port=-1)


def test_every_setting_is_documented_with_its_default_and_limits() -> None:
    rows = dict(re.findall(r"^\| `(MOK_\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert list(rows) == [PREFIX + name.upper() for name in Settings.model_fields]
    for name, field in Settings.model_fields.items():
        default, allowed, meaning = rows[PREFIX + name.upper()].split(" | ")
        unset = field.default in (None, ())
        assert default == (
            "unset" if unset else f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"
        )
        limits = [m.ge for m in field.metadata if isinstance(m, Ge)] + [m.le for m in field.metadata if isinstance(m, Le)]
        assert allowed.startswith(" to ".join(f"{limit:.9g}" for limit in limits)), name
        assert field.description and meaning
