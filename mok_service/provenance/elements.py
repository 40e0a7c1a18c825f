"""Two checkpoints beside each other: which tensors differ, in how many elements, and the first of these with its bits.

Like measuring, it reads both files once, in pieces, and needs no torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from mok_service.errors import InvalidSpec
from mok_service.provenance.measure import Read, Stream, read_header
from mok_service.provenance.safetensors import Entry

BLOCK_BYTES: Final = 1 << 18
# Bytes of an element, and the code of an unsigned integer of that width.
_WIDTHS: Final[dict[int, Literal["B", "H", "I", "Q"]]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a tensor in two executions: bits as hex digits, most significant first, and the values."""

    index: tuple[int, ...]
    first_bits: str
    second_bits: str
    first: float | int
    second: float | int

    def as_dict(self) -> dict[str, Any]:
        return {
            "index": list(self.index), "first_bits": self.first_bits, "second_bits": self.second_bits,
            "first": shown(self.first), "second": shown(self.second),
        }  # fmt: skip

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        return f"element [{at}]: {self.first_bits} ({self.first!r}) and {self.second_bits} ({self.second!r})"


def element(dtype: str, shape: Sequence[int], position: int, first: bytes, second: bytes) -> Element:
    """The element at a row-major position, from its little-endian bytes in both executions."""
    index = []
    for size in reversed(shape):
        position, at = divmod(position, size)
        index.append(at)
    bits = [value[::-1].hex() for value in (first, second)]
    return Element(tuple(reversed(index)), bits[0], bits[1], _value(dtype, first), _value(dtype, second))


def _value(dtype: str, content: bytes) -> float | int:
    if dtype == "BF16":
        content, dtype = b"\0\0" + content, "F32"
    codes = {"F32": "<f", "F64": "<d", "F16": "<e"}
    if dtype in codes:
        value: float = struct.unpack(codes[dtype], content)[0]
        return value
    return int.from_bytes(content, "little", signed=dtype.startswith("I"))


def shown(value: float | int) -> float | int | str:
    """A number as JSON can hold it: what is not finite as text."""
    return value if math.isfinite(value) else str(value)


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that two checkpoints don't have in common."""

    file: str
    name: str
    problem: str | None       # where it isn't the same tensor at all: other dtype or shape, or only in one of them
    differing: int = 0        # elements
    elements: int = 0         # in all
    element: Element | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": self.file, "name": self.name, "problem": self.problem, "differing": self.differing, "elements": self.elements,
            "element": None if self.element is None else self.element.as_dict(),
        }  # fmt: skip

    def __str__(self) -> str:
        what = self.problem or f"{self.differing:,} of {self.elements:,} elements differ, first {self.element}"
        return f"{self.file}: tensor {self.name!r}: {what}"


def compare_checkpoints(
    step: int, first: Read, second: Read, files: Sequence[str] = ("model.safetensors", "optimizer.safetensors")
) -> Iterator[TensorDifference]:
    """The tensors in which two checkpoints of a step differ, in the order of their bytes; `Read` as `measure.measure` takes it.

    Raises NotFound for a file that isn't there, InvalidSpec for one that is no safetensors file, or whose tensors come in another
    order than the other's (which this program never writes).
    """
    for file in files:
        try:
            yield from _compare_files(file, Stream(first(step, file)), Stream(second(step, file)))
        except ValueError as error:
            raise InvalidSpec(f"{file} of the checkpoint of step {step} can't be compared: {error}", errors=[]) from None


def _compare_files(file: str, first: Stream, second: Stream) -> Iterator[TensorDifference]:
    left, right = read_header(first), read_header(second)
    ours, theirs = {e.name: e for e in left}, {e.name: e for e in right}
    if [e.name for e in left if e.name in theirs] != [e.name for e in right if e.name in ours]:
        raise ValueError("the two have their tensors in another order")
    rest = iter(right)
    for entry in left:
        other = theirs.get(entry.name)
        if other is None:
            _skip(first, entry)
            yield TensorDifference(file, entry.name, "only in the first")
            continue
        for skipped in rest:
            if skipped is other:
                break
            _skip(second, skipped)
            yield TensorDifference(file, skipped.name, "only in the second")
        if (entry.dtype, entry.shape) != (other.dtype, other.shape):
            _skip(first, entry)
            _skip(second, other)
            both = (f"{e.dtype} {list(e.shape)}" for e in (entry, other))
            yield TensorDifference(file, entry.name, " and ".join(both))
        elif (difference := _compare_tensor(file, entry, first, second)) is not None:
            yield difference
    for skipped in rest:
        yield TensorDifference(file, skipped.name, "only in the second")


def _skip(stream: Stream, entry: Entry) -> None:
    for _ in stream.take(entry.end - entry.begin):
        pass


def _compare_tensor(file: str, entry: Entry, first: Stream, second: Stream) -> TensorDifference | None:
    elements = math.prod(entry.shape)
    if elements == 0:
        return None
    width, rest = divmod(entry.end - entry.begin, elements)
    if rest or width not in _WIDTHS:
        raise ValueError(f"tensor {entry.name!r} has {entry.end - entry.begin} bytes for {elements} elements")
    count, at, found = 0, 0, None
    for remaining in range(entry.end - entry.begin, 0, -BLOCK_BYTES):
        a, b = (b"".join(stream.take(min(BLOCK_BYTES, remaining))) for stream in (first, second))
        if a != b:
            wrong = [i for i, (x, y) in enumerate(_integers(a, b, width)) if x != y]
            if found is None:
                place = slice(wrong[0] * width, (wrong[0] + 1) * width)
                found = element(entry.dtype, entry.shape, at + wrong[0], a[place], b[place])
            count += len(wrong)
        at += len(a) // width
    return None if found is None else TensorDifference(file, entry.name, None, count, elements, found)


def _integers(a: bytes, b: bytes, width: int) -> Iterator[tuple[int, int]]:
    views = (memoryview(content).cast(_WIDTHS[width]) for content in (a, b))
    yield from zip(*views, strict=True)
