"""Dockerfile and docker-compose.yml, as the real hadolint and the real Compose read them. Neither needs an engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GPU_NODES = ("gpu-worker", "cpu-worker", "ray-head")
OWN_IMAGES = ("api", "migrate", "scheduler", "backup", *GPU_NODES)


def program(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"{name} isn't installed, so nothing was checked by it (pip install 'mok-service[test]')")
    return found


@pytest.fixture(scope="module")
def services() -> Any:
    """The file with every profile, after Compose has resolved it."""
    command = [program("docker-compose"), "--file", "docker-compose.yml", "--profile", "*", "config", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False,
                          env={"PATH": os.defpath, "HOME": os.environ.get("HOME", "/")})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["services"]


def test_hadolint_has_nothing_to_say() -> None:
    command = [program("hadolint"), "--no-color", "Dockerfile"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_file_is_valid_without_any_setting(services: Any) -> None:
    assert {"postgres", "object-store", *OWN_IMAGES} == services.keys()


@pytest.mark.parametrize("name", GPU_NODES)
def test_the_database_and_the_signing_key_stay_away_from_nodes(services: Any, name: str) -> None:
    node = services[name]
    assert {secret["source"] for secret in node["secrets"]} == {"ray_token"}
    assert not {key for key in node["environment"] if "DATABASE" in key or "SIGNING" in key or "PASSWORD" in key}
    if name != "ray-head":
        assert node["networks"].keys() == {"cluster"} and services["postgres"]["networks"].keys() == {"database"}
    assert not [volume for volume in node["volumes"] if volume["target"] == "/var/lib/mok"], "the signing key's folder"


def test_what_is_published_is_published_on_loopback(services: Any) -> None:
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert len(published) == 2 and {port["host_ip"] for port in published} == {"127.0.0.1"}
    assert services["api"]["environment"]["MOK_REQUIRE_KEYS"] == "true"


def test_nothing_starts_before_the_migration(services: Any) -> None:
    for name in ("api", "scheduler"):
        assert services[name]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    assert services["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"


def test_all_share_the_checkpoints_at_one_path(services: Any) -> None:
    for name in ("api", "scheduler", *GPU_NODES):
        targets = {volume["source"]: volume["target"] for volume in services[name]["volumes"]}
        assert targets["checkpoints"] == "/var/lib/mok/checkpoints"


def test_no_service_of_ours_may_more_than_it_needs(services: Any) -> None:
    for name in OWN_IMAGES:
        service = services[name]
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert services["gpu-worker"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


def test_images_are_pinned_and_run_as_nobody_special() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    bases = [line.partition("=")[2] for line in lines if line.startswith("ARG ") and ":" in line]
    assert bases == ["ubuntu:24.04", "nvidia/cuda:13.0.1-devel-ubuntu24.04", "nvidia/cuda:13.0.1-base-ubuntu24.04"]
    assert lines.count("USER 10001:10001") == 3 == sum(line.startswith("HEALTHCHECK") for line in lines)
    assert sum("--require-hashes" in line for line in lines) == 3
