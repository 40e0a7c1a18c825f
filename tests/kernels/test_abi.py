"""mok_service/kernels/abi.py mirrors csrc/include/mok.h: same structs, same fields, same order, same widths."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from mok_service.kernels import abi
from mok_service.kernels.library import load_library, source_digest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
HEADER = re.sub(r"/\*.*?\*/", "", (CSRC / "include" / "mok.h").read_text(), flags=re.DOTALL)
C_TYPES = {
    "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float, "double": ctypes.c_double,
}  # fmt: skip


def header_structs() -> dict[str, list[tuple[str, object]]]:
    structs = {}
    for body, name in re.findall(r"typedef struct\s*\{(.*?)\}\s*(\w+);", HEADER, flags=re.DOTALL):
        fields: list[tuple[str, object]] = []
        for declaration in filter(None, (" ".join(d.split()) for d in body.split(";"))):
            kind, names = declaration.removeprefix("const ").split(" ", 1)
            for field in (f.strip() for f in names.split(",")):
                array = re.fullmatch(r"(\w+)\[(\d+)\]", field)
                if field.startswith("*"):
                    fields.append(
                        (
                            field.removeprefix("*").removeprefix("const *").strip(),
                            ctypes.c_char_p if kind == "char" else ctypes.c_void_p,
                        )
                    )
                elif array:
                    fields.append((array[1], C_TYPES[kind] * int(array[2])))
                else:
                    fields.append((field, C_TYPES[kind]))
        structs[name] = fields
    return structs


STRUCTS = header_structs()


def test_every_operation_is_mirrored() -> None:
    declared = dict(re.findall(r"MOK_API mok_status (mok_\w+)\(mok_context \*, (?:const )?(\w+) \*\);", HEADER))
    assert declared.keys() == abi.OPERATIONS.keys()
    for operation, struct in declared.items():
        mirror = abi.OPERATIONS[operation]
        assert [(n, t) for n, t, *_ in mirror._fields_] == STRUCTS[struct], operation


def test_the_outputs_are_the_pointers_that_are_not_const() -> None:
    """So that a trace of a step misses nothing that an operation writes."""
    written: dict[str, tuple[str, ...]] = {}
    for body, name in re.findall(r"typedef struct\s*\{(.*?)\}\s*(\w+);", HEADER, flags=re.DOTALL):
        declarations = [" ".join(d.split()) for d in body.split(";")]
        names = [f for d in declarations if d and not d.startswith("const ") for f in d.split(" ", 1)[1].split(",")]
        written[name] = tuple(f.strip().removeprefix("*") for f in names if f.strip().startswith("*"))
    declared = dict(re.findall(r"MOK_API mok_status (mok_\w+)\(mok_context \*, (?:const )?(\w+) \*\);", HEADER))
    host = {"mok_permutation", "mok_philox", "mok_scalar"}
    assert {operation: written[struct] for operation, struct in declared.items() if operation not in host} == abi.OUTPUTS
    assert all(set(fields) <= set(abi.OUTPUTS[operation]) for operation, fields in abi.UPDATED.items())
    # A field that the header says is added to, or kept where nothing is wrong.
    header = (CSRC / "include" / "mok.h").read_text()
    for words in ("becomes row +", "becomes grad_weight +", "never cleared", "added to", "+= round"):
        assert words in header, words


def test_the_options_are_mirrored() -> None:
    assert [(n, t) for n, t, *_ in abi.ContextOptions._fields_] == STRUCTS["mok_context_options"]


@pytest.mark.parametrize(
    ("enum", "mirror"),
    [
        ("mok_status", {"OK": 0, "INVALID": 1, "OUT_OF_MEMORY": 2, "UNSUPPORTED": 3, "DEVICE": 4, "INTERNAL": 5}),
        ("mok_precision", {k.upper(): v for k, v in abi.PRECISIONS.items()}),
        ("mok_isa", {f"ISA_{k.upper()}": v for k, v in abi.ISAS.items()}),
        ("mok_qk_norm", {f"QK_NORM_{k.upper()}": v for k, v in abi.QK_NORMS.items()}),
    ],
)
def test_the_enums_are_mirrored(enum: str, mirror: dict[str, int]) -> None:
    body = re.search(r"typedef enum \{([^}]*)\} " + enum + ";", HEADER)
    assert body is not None
    declared = {n.removeprefix("MOK_"): int(v) for n, v in re.findall(r"(\w+)\s*=\s*(\d+)", body[1])}
    assert declared == mirror


def test_versions() -> None:
    assert f"#define MOK_ABI_VERSION {abi.ABI_VERSION}" in HEADER
    assert f'#define MOK_ARITHMETIC "{abi.ARITHMETIC}"' in HEADER
    library = load_library("cpu")
    assert library.mok_abi_version() == abi.ABI_VERSION
    assert library.mok_backend() == b"cpu"


def test_the_source_digest_is_a_function_of_the_sources(tmp_path: Path) -> None:
    """One changed byte in one source file makes another digest, so a stale library is refused."""
    (tmp_path / "common").mkdir()
    (tmp_path / "CMakeLists.txt").write_text("x")
    (tmp_path / "common" / "a.h").write_text("a")
    before = source_digest(tmp_path)
    (tmp_path / "common" / "a.h").write_text("b")
    assert source_digest(tmp_path) != before
    assert len(source_digest(CSRC)) == 64
