"""A flipped bit in a checkpoint is named by its tensor; two checkpoints are compared element by element."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mok_service.errors import InvalidSpec, Tampered
from mok_service.provenance.chain import StateDigests
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.digest import Digest, canonical_digest, sha256, sha256_file, state_digest
from mok_service.provenance.elements import compare_checkpoints
from mok_service.provenance.measure import measure
from mok_service.training.checkpoint import CheckpointStore, State, cursor_digest, tensor_rows

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(1000, 300), "c": torch.zeros(3, dtype=torch.bfloat16)}
OPTIMIZER = {"first/a": torch.zeros(2, 3), "previous_norm": torch.tensor(1.5)}


def save(root: Path, weights: dict[str, torch.Tensor] = WEIGHTS) -> CheckpointInfo:
    digests = StateDigests(state_digest(tensor_rows(weights)), state_digest(tensor_rows(OPTIMIZER)), cursor_digest(3))
    return CheckpointStore(root).save(3, canonical_digest({"type": "head"}), State(weights, OPTIMIZER), digests, {})


def reader(root: Path) -> Callable[[int, str], Iterator[bytes]]:
    def read(step: int, name: str) -> Iterator[bytes]:
        content = (root / f"step-{step:08d}" / name).read_bytes()
        for begin in range(0, len(content), 777):
            yield content[begin : begin + 777]

    return read


def row(info: CheckpointInfo) -> dict[str, Any]:
    return {**info.as_dict(), "deleted_at": None}


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def test_the_documents_are_the_digests(tmp_path: Path) -> None:
    """So that `sha256sum` of a file is the digest of the state on record."""
    info = save(tmp_path)
    for name, digest in (("weights.json", info.state.weights), ("optimizer.json", info.state.optimizer)):
        assert sha256_file(tmp_path / info.folder / name) == digest
        assert Digest("sha256", next(file.sha256 for file in info.files if file.name == name)) == digest


@pytest.mark.parametrize(("file", "tensor", "of"), [
    ("model.safetensors", "c", 6), ("model.safetensors", "b.weight", 1_200_000), ("model.safetensors", "a", 24),
    ("optimizer.safetensors", "previous_norm", 4), ("optimizer.safetensors", "first/a", 24),
])  # fmt: skip
def test_the_tensor_is_named(file: str, tensor: str, of: int, tmp_path: Path) -> None:
    info = save(tmp_path)
    path = tmp_path / info.folder / file
    assert measure({"checkpoints": [row(info)]}, reader(tmp_path))[3].faults == {}
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8 : 8 + length])[tensor]["data_offsets"]
    assert end - begin == of
    flip(path, 8 + length + end - 1)
    with pytest.raises(Tampered) as raised:
        CheckpointStore(tmp_path).load(info)
    found = measure({"checkpoints": [row(info)]}, reader(tmp_path))[3]
    assert (raised.value.detail["file"], raised.value.detail["tensor"]) == (file, tensor) and list(found.faults) == [file]
    was = next(row.blake3 for row in tensor_rows(WEIGHTS | OPTIMIZER) if row.name == tensor)
    for message in (raised.value.message, found.faults[file]):
        assert f"tensor {tensor!r}: blake3 expected {was}, got " in message


def test_a_checkpoint_without_documents_loads(tmp_path: Path) -> None:
    """Those that were written before there were documents."""
    info = save(tmp_path)
    for name in ("weights.json", "optimizer.json"):
        (tmp_path / info.folder / name).unlink()
    files = tuple(file for file in info.files if file.name not in ("weights.json", "optimizer.json"))
    older = dataclasses.replace(info, files=files)
    assert CheckpointStore(tmp_path).load(older).weights["a"].equal(WEIGHTS["a"])
    flip(tmp_path / info.folder / "model.safetensors", 400)
    with pytest.raises(Tampered, match=r"model\.safetensors has sha256:"):
        CheckpointStore(tmp_path).load(older)
    assert measure({"checkpoints": [row(older)]}, reader(tmp_path))[3].faults == {}


def test_a_changed_document_names_itself_alone(tmp_path: Path) -> None:
    info = save(tmp_path)
    flip(tmp_path / info.folder / "weights.json", 40)
    with pytest.raises(Tampered, match=r"weights\.json has sha256:"):
        CheckpointStore(tmp_path).load(info)
    found = measure({"checkpoints": [row(info)]}, reader(tmp_path))[3]
    assert found.faults == {} and found.files["weights.json"].sha256 != info.state.weights.hex


def test_what_is_saved_is_what_the_step_recorded(tmp_path: Path) -> None:
    digests = StateDigests(sha256(b"other"), state_digest(tensor_rows(OPTIMIZER)), cursor_digest(3))
    with pytest.raises(Tampered, match=r"weights\.json: the state to be saved has digest"):
        CheckpointStore(tmp_path).save(3, sha256(b""), State(WEIGHTS, OPTIMIZER), digests, {})
    assert CheckpointStore(tmp_path).list() == []


def test_two_checkpoints_are_compared_by_elements(tmp_path: Path) -> None:
    other = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    other["b.weight"][999, 7] = -1.0
    other["b.weight"][500, 0] = 2.0
    other["c"][1] = -0.0
    other["a"] = other["a"].reshape(3, 2)
    other["d"] = torch.zeros(1)
    save(tmp_path / "A"), save(tmp_path / "B", other)
    found = {d.name: d for d in compare_checkpoints(3, reader(tmp_path / "A"), reader(tmp_path / "B"))}
    assert found.keys() == {"a", "b.weight", "c", "d"}
    assert (found["a"].problem, found["d"].problem) == ("F32 [2, 3] and F32 [3, 2]", "only in the second")
    wide = found["b.weight"]
    assert (wide.differing, wide.elements) == (2, 300_000) and wide.element is not None
    assert (wide.element.index, wide.element.first_bits, wide.element.second_bits) == ((500, 0), "3f800000", "40000000")
    zero = found["c"].element
    assert zero is not None and (zero.index, zero.first_bits, zero.second_bits) == ((1,), "0000", "8000"), "the sign of zero"
    told = "tensor 'b.weight': 2 of 300,000 elements differ, first element [500, 0]: 3f800000 (1.0) and 40000000 (2.0)"
    assert str(wide) == f"model.safetensors: {told}"
    assert list(compare_checkpoints(3, reader(tmp_path / "A"), reader(tmp_path / "A"))) == []
    (tmp_path / "B" / "step-00000003" / "model.safetensors").write_bytes(b"12")
    with pytest.raises(InvalidSpec, match=r"model\.safetensors of the checkpoint of step 3 can't be compared"):
        list(compare_checkpoints(3, reader(tmp_path / "A"), reader(tmp_path / "B")))
