"""What a worker says of itself: no secret gets in, and a changed source shows."""

from __future__ import annotations

import json
import os
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from mok_service import environment as env


def test_a_planted_secret_is_in_no_field(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "MOK_DATABASE_URL", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "MOK_SIGNING_KEY", "PGPASSWORD"):
        monkeypatch.setenv(name, "hunter2-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    report = env.environment()
    assert "hunter2-secret" not in json.dumps(report)
    assert report["variables"]["OMP_NUM_THREADS"] == "3"
    assert report["hardware"]["cpu"]["cores"] == len(os.sched_getaffinity(0))
    assert report["software"]["python"].startswith("3.")
    assert report["packages"]["torch"] == report["software"]["torch"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    def git(*arguments: str) -> None:
        options = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *options]
        subprocess.run([*command, *arguments], check=True, capture_output=True)

    (tmp_path / "kernel.cpp").write_text("int x = 1;\n")
    (tmp_path / ".gitignore").write_text("*.o\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return tmp_path


def test_an_edited_or_new_source_shows_and_going_back_is_clean(checkout: Path) -> None:
    clean = env.git(checkout)
    assert clean is not None and clean["dirty"] is False and clean["patch"] is None and len(clean["commit"]) == 40

    (checkout / "kernel.cpp").write_text("int x = 2;\n")
    edited = env.git(checkout)
    assert edited is not None and edited["dirty"] is True and edited["commit"] == clean["commit"]
    (checkout / "kernel.cpp").write_text("int x = 3;\n")
    other = env.git(checkout)
    assert other is not None and other["patch"] != edited["patch"]
    (checkout / "kernel.cpp").write_text("int x = 2;\n")
    assert env.git(checkout) == edited, "equal sources, equal digest"

    (checkout / "kernel.cpp").write_text("int x = 1;\n")
    (checkout / "built.o").write_text("ignored")
    assert env.git(checkout) == clean
    (checkout / "new.cpp").write_text("a")
    added = env.git(checkout)
    (checkout / "new.cpp").write_text("b")
    assert added is not None and added["dirty"] is True and env.git(checkout) != added


def test_a_folder_that_is_no_checkout_has_no_commit(tmp_path: Path) -> None:
    assert env.git(tmp_path) is None
    assert env.git(None) is None


def test_every_installed_package_is_listed_as_the_standard_library_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, text in {
        "new_One.dist-info/METADATA": "Metadata-Version: 2.1\nName: new_One\nVersion: 1.2 \n\nVersion: 9\n",
        "old.egg-info/PKG-INFO": "Name:old\nVersion:\t3\n", "nameless.dist-info/METADATA": "Version: 4\n",
    }.items():
        (tmp_path / folder).parent.mkdir()
        (tmp_path / folder).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = env.packages()
    assert (found["new-one"], found["old"]) == ("1.2", "3")
    for name in ("torch", "ray", "pydantic-core", "sqlalchemy"):
        assert found[name] == metadata.version(name)


@pytest.mark.parametrize(("wanted", "indexes"), [
    (None, [0, 1, 2]), ("", []), ("2,0", [2, 0]), ("GPU-b", [1]), ("1,9,0", [1]), ("GPU-", []), ("NoDevFiles", []),
])
def test_visible_devices_follow_cudas_rule(wanted: str | None, indexes: list[int]) -> None:
    found = [env.Gpu(i, "H200", f"GPU-{c}1", 1, "580", "13.0") for i, c in enumerate("abc")]
    assert [gpu.index for gpu in env._visible(found, wanted)] == indexes
