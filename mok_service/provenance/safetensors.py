"""The header of a safetensors file, checked before anything in the file is used.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, data_offsets) and the bytes
of the tensors. What comes from outside may say anything; only a header that describes exactly the bytes of its file is believed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HEADER_BYTES_MAX: Final = 100_000_000  # the format's own limit
DIMENSIONS_MAX: Final = 64
METADATA: Final = "__metadata__"

# Bits of an element.
DTYPES: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a safetensors file has a tensor; offsets count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_length(prefix: bytes) -> int:
    """The header's length by the first 8 bytes of a file. Raises ValueError for what no header has."""
    if len(prefix) < 8:
        raise ValueError(f"no safetensors file: it has {len(prefix)} bytes")
    length = int.from_bytes(prefix[:8], "little")
    if not 2 <= length <= HEADER_BYTES_MAX:
        raise ValueError(f"no safetensors file: its header would have {length} bytes")
    return length


def parse_header(header: bytes) -> list[Entry]:
    """The tensors by the order of their bytes: known dtypes, sizes as dtype and shape say, no gap and no overlap.

    Raises ValueError naming the tensor, or what is no JSON object with each name once.
    """
    try:
        document = json.loads(header.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no safetensors file: its header can't be read: {error}") from None
    if not isinstance(document, dict):
        raise ValueError("no safetensors file: its header is no JSON object")
    metadata = document.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"no safetensors file: {METADATA} holds more than strings")
    entries = sorted((_entry(name, value) for name, value in document.items()), key=lambda entry: (entry.begin, entry.end))
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise ValueError(f"tensor {entry.name!r} doesn't begin where the one before it ends")
        position = entry.end
    return entries


def check_file(path: Path) -> list[Entry]:
    """The tensors of a file whose size is exactly what its header says. Raises ValueError for any other, OSError."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = header_length(file.read(8))
        if 8 + length > size:
            raise ValueError(f"no safetensors file: its header would have {length} bytes, and the file has {size}")
        entries = parse_header(file.read(length))
    expected = 8 + length + (entries[-1].end if entries else 0)
    if size != expected:
        raise ValueError(f"the file has {size} bytes, and its header describes {expected}")
    return entries


def _entry(name: str, value: Any) -> Entry:
    if any("\ud800" <= c <= "\udfff" for c in name):
        raise ValueError(f"the name {name!r} is no Unicode text")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} isn't described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r:.40}")
    if not _counts(shape) or len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"tensor {name!r} has no usable shape")
    if not _counts(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise ValueError(f"tensor {name!r} has no usable offsets")
    needed = math.prod(shape) * DTYPES[dtype] // 8
    if offsets[1] - offsets[0] != needed:
        raise ValueError(f"tensor {name!r} has {offsets[1] - offsets[0]} bytes; its dtype and shape need {needed}")
    return Entry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _counts(value: Any) -> bool:
    """Whether a value is a list of whole numbers from 0 to 2^63 - 1."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name comes twice")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")
