"""What takes minutes: the golden jobs by other compilers and optimisation levels, and twenty runs on a busy machine.

Run by `make exhaustive`; `make test` leaves them out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mok_service.kernels import load_backend
from mok_service.kernels.library import library_path
from tests.golden.jobs import JOBS, STORED, golden_job, summary

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[2]
GOLDEN = json.loads(STORED.read_bytes())["jobs"]
SMALL = [name for name in JOBS if name != "tiny"]


@pytest.mark.parametrize(("compiler", "build"), [("g++", "Debug"), ("clang++", "Release"), ("clang++", "Debug")])
def test_other_compilers(compiler: str, build: str, tmp_path: Path) -> None:
    """-O0 and -O3, gcc and clang: the stored digests."""
    if shutil.which(compiler) is None:
        pytest.skip(f"NOT CHECKED: {compiler} isn't on this machine")
    configure = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(tmp_path), "-G", "Ninja", "-DMOK_CUDA=OFF"]
    subprocess.run(
        [*configure, f"-DCMAKE_BUILD_TYPE={build}", f"-DCMAKE_CXX_COMPILER={compiler}"], check=True, capture_output=True
    )
    subprocess.run(["cmake", "--build", str(tmp_path)], check=True, capture_output=True)
    names = SMALL if build == "Debug" else list(JOBS)
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.jobs", *names], check=True, capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"MOK_LIBRARY": str(tmp_path / "libmok.so")},
    )  # fmt: skip
    got = json.loads(done.stdout)
    assert got["build"]["compiler"].startswith({"g++": "GNU", "clang++": "Clang"}[compiler])
    assert got["jobs"] == {key: GOLDEN[key] for key in got["jobs"]} and len(got["jobs"]) == 2 * len(names)


def test_arm64_gives_the_same_bits(tmp_path: Path) -> None:
    """The library built for ARM64 and run by an emulator prints the same checksums as the one of this machine."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("NOT CHECKED: needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)")
    configure = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(tmp_path), "-G", "Ninja", "-DMOK_CUDA=OFF"]
    arm = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={compiler}"]
    subprocess.run([*configure, *arm], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(tmp_path)], check=True, capture_output=True)
    here = checksums("c++", library_path("cpu"), tmp_path / "here", [])
    assert len(here) > 15
    assert checksums(compiler, tmp_path / "libmok.so", tmp_path / "there", [emulator, "-L", "/usr/aarch64-linux-gnu"]) == here


def checksums(compiler: str, library: Path, program: Path, run: list[str]) -> list[str]:
    """What csrc/tests/same_bits.cpp prints of a library."""
    source = str(ROOT / "csrc" / "tests" / "same_bits.cpp")
    flags = ["-std=c++20", "-O1", f"-I{ROOT / 'csrc' / 'include'}", f"-Wl,-rpath,{library.parent}", "-pthread"]
    subprocess.run([compiler, *flags, source, str(library), "-o", str(program)], check=True, capture_output=True)
    return subprocess.run([*run, str(program)], check=True, capture_output=True, text=True).stdout.splitlines()


def test_twenty_runs_on_a_busy_machine() -> None:
    """Case 2 as far as a CPU goes: other processes on every core, more threads than cores, one digest."""
    count = 2 * len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: sum(range(10000))"]) for _ in range(count)]
    try:
        for precision in ("fp32", "bf16"):
            name = "shared expert and auxiliary losses"
            for threads in [1, 2, 3, 4, 7] * 4:
                assert (
                    summary(golden_job(name, precision), load_backend("cpu", threads=threads)) == GOLDEN[f"{name}, {precision}"]
                )
    finally:
        for other in others:
            other.kill()
            other.wait()
