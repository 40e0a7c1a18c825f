"""Find, load and check the native library of a backend."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from mok_service.errors import LibraryUnusable
from mok_service.kernels import abi

FILES = {"cpu": "libmok.so", "cuda": "libmok_cuda.so"}


def library_path(backend: str) -> Path:
    """Where the library of `backend` ("cpu" or "cuda") lies.

    `MOK_LIBRARY` (or `MOK_CUDA_LIBRARY`) names another build. Raises LibraryUnusable when there is none, saying how to get it.
    """
    if backend not in FILES:
        raise LibraryUnusable(f"backend = {backend!r}: there is no such backend; allowed: {', '.join(FILES)}")
    named = os.environ.get("MOK_LIBRARY" if backend == "cpu" else "MOK_CUDA_LIBRARY")
    path = Path(named) if named else Path(str(resources.files("mok_service").joinpath("_native", FILES[backend])))
    if path.is_file():
        return path
    if backend == "cuda":
        raise LibraryUnusable(
            f"the CUDA backend was not built: {path} does not exist; it is built by the installation where nvcc 12.4 or later "
            "is found (set CUDACXX to name one), then run `make install` again"
        )
    raise LibraryUnusable(f"the native library {path} does not exist; run `make install`")


def load_library(backend: str, path: Path | None = None) -> ctypes.CDLL:
    """Load the library, bind every operation, and refuse one that doesn't fit this Python code.

    `path` names another build, of whatever sources: one that a bisect compares with. Raises
    LibraryUnusable: not found, not loadable, another ABI or arithmetic, or (in a checkout) built from other sources.
    """
    named = path is not None
    path = library_path(backend) if path is None else path.absolute()  # a bare name would be looked for elsewhere
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as error:
        raise LibraryUnusable(f"the native library {path} can't be loaded: {error}") from error
    for name in ("mok_arithmetic", "mok_backend", "mok_build_info", "mok_last_error", "mok_context_info"):
        getattr(library, name).restype = ctypes.c_char_p
    library.mok_context_info.argtypes = [ctypes.c_void_p]
    library.mok_context_create.argtypes = [ctypes.POINTER(abi.ContextOptions), ctypes.POINTER(ctypes.c_void_p)]
    library.mok_context_destroy.argtypes = [ctypes.c_void_p]
    library.mok_context_destroy.restype = None
    if (found := library.mok_abi_version()) != abi.ABI_VERSION:
        raise LibraryUnusable(f"{path} has ABI version {found}, this code needs {abi.ABI_VERSION}; run `make install`")
    arithmetic = library.mok_arithmetic().decode()
    if arithmetic != abi.ARITHMETIC:
        raise LibraryUnusable(f"{path} computes arithmetic {arithmetic!r}, this code needs {abi.ARITHMETIC!r}")
    operations = abi.OPERATIONS | (abi.CUDA_OPERATIONS if backend == "cuda" else {})
    for name, struct in operations.items():
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p, ctypes.POINTER(struct)]
        function.restype = ctypes.c_int
    if not named:
        _refuse_stale(path, backend, json.loads(library.mok_build_info()))
    return library


# What each library is built from below csrc/: folders with the endings that count, and single files. The rules are stated in
# csrc/cmake/build_info.cmake and csrc/cuda/build_info.cmake.
_SOURCES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "cpu": (("include", "common", "cpu", "cmake"), (".h", ".cpp", ".cmake"), ("CMakeLists.txt",)),
    "cuda": (
        ("include", "common", "cuda"),
        (".h", ".cuh", ".cu", ".cmake"),
        ("cuda/CMakeLists.txt", "cpu/checks.h", "cpu/error.h", "cpu/error.cpp", "cpu/floating.h"),
    ),
}


def source_digest(csrc: Path, backend: str = "cpu") -> str:
    """SHA-256 over the native sources of a checkout from which the library of `backend` is built."""
    folders, endings, single = _SOURCES[backend]
    files = [csrc / name for name in single]
    for folder in folders:
        files += [path for path in (csrc / folder).rglob("*") if path.suffix in endings]
    rows = sorted((path.relative_to(csrc).as_posix(), path) for path in files)
    lines = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in rows)
    return hashlib.sha256(lines.encode()).hexdigest()


def _refuse_stale(path: Path, backend: str, build: dict[str, Any]) -> None:
    csrc = Path(__file__).resolve().parents[2] / "csrc"
    if not (csrc / "include" / "mok.h").is_file() or os.environ.get("MOK_ALLOW_STALE_LIBRARY"):
        return
    expected, got = source_digest(csrc, backend), build.get("source_digest")
    if got != expected:
        raise LibraryUnusable(
            f"{path} was built from other sources (digest {got}) than those in {csrc.name}/ ({expected}); run `make install`"
        )
