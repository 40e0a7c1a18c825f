"""What a worker runs on, for the record: code, software, hardware and the variables that bear on numerics.

Everything here is reported by the worker about itself. Variables are taken from an allow-list, so a secret in the
environment never reaches a record. Nothing is imported that isn't imported already: versions come from metadata.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from mok_service.errors import KernelError
from mok_service.kernels.library import FILES, library_path
from mok_service.provenance.digest import sha256

VARIABLES: Final = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES",
    "DNNL_MAX_CPU_ISA", "GLIBC_TUNABLES", "KMP_AFFINITY", "LD_PRELOAD", "MALLOC_ARENA_MAX", "MKL_CBWR", "MKL_NUM_THREADS",
    "MOK_IMAGE", "NCCL_ALGO", "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
    "OMP_PROC_BIND", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
GIT_SECONDS_MAX: Final = 20.0
UNTRACKED_BYTES_MAX: Final = 16 << 20  # larger untracked files enter the patch digest by name and size only


def environment() -> dict[str, Any]:
    """The environment of this process, as plain JSON values: keys `code`, `software`, `hardware`, `variables`, `packages`."""
    return {
        "code": code(),
        "software": {
            "python": platform.python_version(),
            "implementation": platform.python_implementation(),
            "torch": _version("torch"),
            "ray": _version("ray"),
            "safetensors": _version("safetensors"),
            "os": platform.system(),
            "kernel": platform.release(),
            "libc": " ".join(platform.libc_ver()).strip(),
            "image": os.environ.get("MOK_IMAGE"),
        },
        "hardware": hardware(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "packages": packages(),
    }


def hardware() -> dict[str, Any]:
    """Host name, CPU model, flags and usable cores, memory in bytes, GPUs (index, name, UUID, memory, driver)."""
    model, flags = _cpu()
    return {
        "host": socket.gethostname(),
        "architecture": platform.machine(),
        "cpu": {"model": model, "flags": flags, "cores": usable_cores()},
        "memory_bytes": memory_bytes(),
        "gpus": [asdict(gpu) for gpu in gpus()],
    }


# ---- Code ------------------------------------------------------------------------------------------------------------

def code() -> dict[str, Any]:
    """Package version, digests of the native libraries, and, in a checkout, the commit, what differs, and the lock file."""
    checkout = _checkout()
    lock = None if checkout is None else checkout / "requirements" / "lock.txt"
    return {
        "version": _version("mok-service"),
        "native": native_libraries(),
        "git": git(checkout),
        "lock": str(sha256(lock.read_bytes())) if lock is not None and lock.is_file() else None,
    }


def native_libraries() -> dict[str, str]:
    """Backend -> `sha256:...` of the file that its kernels are loaded from; a backend that isn't built is left out."""
    found: dict[str, str] = {}
    for backend in FILES:
        with suppress(KernelError):
            found[backend] = str(sha256(library_path(backend).read_bytes()))
    return found


def git(checkout: Path | None) -> dict[str, Any] | None:
    """Commit, dirty flag and the digest of the patch (tracked changes and untracked files); None outside a checkout.

    `patch` is null when the work tree equals the commit, so that equal sources have equal values.
    """
    if checkout is None:
        return None
    try:
        commit = _git(checkout, "rev-parse", "--verify", "HEAD").decode().strip()
        changes = _git(checkout, "diff", "--binary", "--no-ext-diff", "--no-textconv", "HEAD", "--")
        names = _git(checkout, "ls-files", "-z", "--others", "--exclude-standard").split(b"\0")
    except (OSError, subprocess.SubprocessError):
        return None
    untracked = sorted(name for name in names if name)
    if not changes and not untracked:
        return {"commit": commit, "dirty": False, "patch": None}
    patch = hashlib.sha256(changes)
    for name in untracked:
        patch.update(b"\0" + name + b"\0" + _content_digest(checkout / os.fsdecode(name)))
    return {"commit": commit, "dirty": True, "patch": f"sha256:{patch.hexdigest()}"}


def _content_digest(path: Path) -> bytes:
    try:
        size = path.lstat().st_size
        if path.is_symlink() or not path.is_file() or size > UNTRACKED_BYTES_MAX:
            return str(size).encode()
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:  # it went away, or can't be read: its name alone makes the tree dirty
        return b"unreadable"


def _checkout() -> Path | None:
    """The work tree that holds this very package, or None for an installed wheel."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / ".git").exists() and (root / "pyproject.toml").is_file() else None


def _git(checkout: Path, *arguments: str) -> bytes:
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "HOME": os.devnull}
    command = ["git", "-c", f"safe.directory={checkout}", "-c", "core.fsmonitor=false", "-C", str(checkout), *arguments]
    return subprocess.run(
        command, env=environment, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_SECONDS_MAX
    ).stdout


def packages() -> dict[str, str]:
    """Name -> version of every installed distribution that this process could import, sorted by name."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        # Only these two headers: to have the standard library read all of them takes five times as long, at every run.
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or distribution.read_text("") or ""
        headers = dict(re.findall(r"^(Name|Version):[ \t]*(.+?)\s*$", text.partition("\n\n")[0], re.MULTILINE))
        if headers.keys() == {"Name", "Version"}:
            found.setdefault(re.sub(r"[-_.]+", "-", headers["Name"]).lower(), headers["Version"])
    return dict(sorted(found.items()))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# ---- Hardware --------------------------------------------------------------------------------------------------------

def usable_cores() -> int:
    """How many cores this process may use: its affinity mask, not what the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory, or the control group's limit when that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            physical = min(physical, int(text))
    return physical


def _cpu() -> tuple[str, list[str]]:
    model, flags = platform.processor() or platform.machine(), list[str]()
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return model, flags
    fields = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    model = fields.get("model name") or fields.get("hardware") or model
    return model, sorted((fields.get("flags") or fields.get("features") or "").split())


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int  # NVML's: by PCI bus
    name: str
    uuid: str
    memory_bytes: int
    driver: str
    cuda: str   # the newest CUDA version that the driver supports


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _NvmlError(Exception):
    pass


def gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine by NVML, narrowed to CUDA_VISIBLE_DEVICES; empty where there is no driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1" if sys.platform != "win32" else "nvml.dll")
    except OSError:
        return ()
    try:
        _nvml(nvml.nvmlInit_v2)
    except (_NvmlError, AttributeError):
        return ()
    try:
        count = ctypes.c_uint()
        _nvml(nvml.nvmlDeviceGetCount_v2, ctypes.byref(count))
        found = [_gpu(nvml, index) for index in range(count.value)]
    except _NvmlError:
        return ()
    finally:
        nvml.nvmlShutdown()
    return _visible(found, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _visible(found: list[Gpu], wanted: str | None) -> tuple[Gpu, ...]:
    """CUDA's rule: names in order, up to the first one that names nothing."""
    if wanted is None:
        return tuple(found)
    chosen: list[Gpu] = []
    for word in filter(None, (part.strip() for part in wanted.split(","))):
        match = [g for g in found if word == str(g.index) or (word.startswith("GPU-") and g.uuid.startswith(word))]
        if len(match) != 1:
            break
        chosen += match
    return tuple(chosen)


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    device, memory = ctypes.c_void_p(), _NvmlMemory()
    _nvml(nvml.nvmlDeviceGetHandleByIndex_v2, ctypes.c_uint(index), ctypes.byref(device))
    _nvml(nvml.nvmlDeviceGetMemoryInfo, device, ctypes.byref(memory))
    version = ctypes.c_int()
    _nvml(nvml.nvmlSystemGetCudaDriverVersion_v2, ctypes.byref(version))
    return Gpu(
        index, _nvml_text(nvml.nvmlDeviceGetName, device), _nvml_text(nvml.nvmlDeviceGetUUID, device),
        int(memory.total), _nvml_text(nvml.nvmlSystemGetDriverVersion), f"{version.value // 1000}.{version.value % 1000 // 10}",
    )


def _nvml_text(function: Any, *arguments: Any) -> str:
    text = ctypes.create_string_buffer(128)
    _nvml(function, *arguments, text, ctypes.c_uint(len(text)))
    return text.value.decode("utf-8", "replace")


def _nvml(function: Any, *arguments: Any) -> None:
    status = function(*arguments)
    if status != 0:
        raise _NvmlError(f"NVML returned {status}")
