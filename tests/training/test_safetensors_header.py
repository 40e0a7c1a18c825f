"""Headers from outside are checked before a byte of the tensors is used, and nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mok_service.errors import InvalidSpec, Tampered
from mok_service.provenance.chain import StateDigests
from mok_service.provenance.digest import state_digest
from mok_service.provenance.safetensors import DTYPES, HEADER_BYTES_MAX, check_file, parse_header
from mok_service.training.checkpoint import CheckpointStore, State, cursor_digest, load_tensors, tensor_rows
from mok_service.training.hugging_face import read_weights

ROOT = Path(__file__).parents[2]


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def row(shape: Any = (2,), dtype: Any = "F32", offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_what_the_library_writes_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {
        "b": torch.zeros(2, 3), "a": torch.ones(4, dtype=torch.bfloat16), "none": torch.zeros(0, 5), "one": torch.tensor(1),
    }  # fmt: skip
    save_file(tensors, path, metadata={"format": "pt"})
    assert {e.name: (e.dtype, e.shape) for e in check_file(path)} == {
        "b": ("F32", (2, 3)), "a": ("BF16", (4,)), "none": ("F32", (0, 5)), "one": ("I64", ()),
    }
    loaded = load_tensors(path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(("content", "problem"), [
    (b"", "it has 0 bytes"), (b"1234567", "it has 7 bytes"),
    (struct.pack("<Q", 2**63), "its header would have 9223372036854775808 bytes"),
    (file_of({}, length=HEADER_BYTES_MAX + 1), "its header would have 100000001 bytes"),
    (file_of({}, length=3), "its header would have 3 bytes, and the file has 10"),
    (file_of(b"[]"), "is no JSON object"), (file_of(b"{]"), "can't be read"), (file_of(b"\xff\xfe{}"), "can't be read"),
    (file_of("{}".encode("utf-16-le")), "can't be read"), (file_of(b"[" * 100_000), "can't be read"),
    (file_of(b'{"a": {}, "a": {}}'), "a name comes twice"),
    (file_of(b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [], "data_offsets": [0, 4]}}', b"1234"), "a name comes twice"),
    (file_of({"__metadata__": {"a": 1}}), "holds more than strings"), (file_of({"__metadata__": []}), "holds more than strings"),
    (file_of({"a": 3}), "isn't described by"), (file_of({"a": row() | {"more": 1}}, b"\0" * 8), "isn't described by"),
    (file_of({"a": row(dtype="F99")}, b"\0" * 8), "the unknown dtype 'F99'"),
    (file_of({"a": row(dtype=[])}), "the unknown dtype"),
    (file_of({"a": row(shape=[-2])}, b"\0" * 8), "no usable shape"), (file_of({"a": row(shape=[2.0])}), "no usable shape"),
    (file_of({"a": row(shape=[True, 2])}), "no usable shape"), (file_of({"a": row(shape=[1] * 65)}), "no usable shape"),
    (file_of({"a": row(offsets=[8, 0])}), "no usable offsets"), (file_of({"a": row(offsets=[0])}), "no usable offsets"),
    (file_of({"a": row(offsets=[0, 8, 9])}), "no usable offsets"), (file_of({"a": row(offsets=["0", 8])}), "no usable offsets"),
    (file_of({"a": row(shape=[3])}, b"\0" * 8), "has 8 bytes; its dtype and shape need 12"),
    (file_of({"a": row(shape=[2**62, 4])}, b"\0" * 8), "its dtype and shape need"),
    (file_of({"a": row(), "b": row(offsets=[4, 12])}, b"\0" * 12), "'b' doesn't begin where the one before it ends"),
    (file_of({"a": row(), "b": row()}, b"\0" * 8), "'b' doesn't begin where the one before it ends"),
    (file_of({"a": row(), "b": row(offsets=[9, 17])}, b"\0" * 17), "'b' doesn't begin where the one before it ends"),
    (file_of({"a": row(offsets=[1, 9])}, b"\0" * 9), "'a' doesn't begin where the one before it ends"),
    (file_of({"a": row()}, b"\0" * 7), "the file has 76 bytes, and its header describes 77"),
    (file_of({"a": row()}, b"\0" * 9), "the file has 78 bytes, and its header describes 77"),
    (file_of(b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}', b"1234"), "NaN is no JSON"),
    (file_of(b'{"\\ud800": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}', b"1234"), "is no Unicode text"),
])  # fmt: skip
def test_a_malformed_header_is_refused_with_the_reason(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(problem)):
        check_file(path)
    with pytest.raises(InvalidSpec, match="is no usable safetensors file") as caught:
        read_weights(tmp_path)
    assert problem in caught.value.message and caught.value.detail["errors"][0]["field"] == "init_from.source"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3),
)
ROWS = st.fixed_dictionaries({
    "dtype": st.sampled_from(sorted(DTYPES)) | VALUES, "shape": st.lists(st.integers(0, 3), max_size=3) | VALUES,
    "data_offsets": st.tuples(st.integers(0, 40), st.integers(0, 40)).map(list) | VALUES,
})  # fmt: skip
HEADERS = st.dictionaries(st.text(max_size=3), ROWS | VALUES, max_size=3).map(lambda value: json.dumps(value).encode())


@settings(max_examples=200, deadline=None)
@given(header=HEADERS | st.binary(max_size=60), data=st.binary(max_size=48), length=st.none() | st.integers(0, 2**64 - 1))
def test_any_bytes_are_refused_or_describe_themselves_exactly(
    tmp_path_factory: pytest.TempPathFactory, header: bytes, data: bytes, length: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(file_of(header, data, length))
    try:
        entries = check_file(path)
    except ValueError:
        return
    assert sum(e.end - e.begin for e in entries) == len(data) if length is None else True
    assert [e.begin for e in entries] == [0, *(e.end for e in entries)][: len(entries)]


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_one_flipped_bit_never_reads_beyond(at: int, bit: int) -> None:
    header = bytearray(json.dumps({"a": row(), "b": row(offsets=[8, 16])}).encode())
    header[at % len(header)] ^= 1 << bit
    try:
        entries = parse_header(bytes(header))
    except ValueError:
        return
    assert entries[-1].end <= 16 and [e.begin for e in entries] == [0, 8]


def test_a_stored_checkpoint_with_such_a_header_is_tampered_with(tmp_path: Path) -> None:
    """Also where the checkpoint itself lists the file's digest, as one from elsewhere may."""
    state = State({"a": torch.zeros(2)}, {"first/a": torch.ones(2)})
    weights, optimizer = (state_digest(tensor_rows(tensors)) for tensors in (state.weights, state.optimizer))
    store = CheckpointStore(tmp_path)
    info = store.save(1, weights, state, StateDigests(weights, optimizer, cursor_digest(1)), {})
    path = tmp_path / info.folder / "model.safetensors"
    content = path.read_bytes() + b"more"
    path.write_bytes(content)
    told = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    files = tuple(replace(file, **told) if file.name == path.name else file for file in info.files)
    with pytest.raises(Tampered, match=r"step-00000001: the file has \d+ bytes, and its header describes \d+"):
        store.load(replace(info, files=files))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_a_pickle_is_refused_and_never_read(tmp_path: Path, name: str) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "exploded",)

    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InvalidSpec, match=rf"has no model\.safetensors: {re.escape(name)} is a pickle, which could run code"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InvalidSpec, match="which is no safetensors file of the folder"):
        read_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / name).rename(tmp_path / "model.safetensors")
    with pytest.raises(InvalidSpec, match="no usable safetensors file"):
        read_weights(tmp_path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("index", [
    "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": {}}}',
    '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": "/x.safetensors"}}',
])  # fmt: skip
def test_a_malformed_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InvalidSpec, match=r"has a model\.safetensors\.index\.json"):
        read_weights(tmp_path)


def test_links_stay_inside_the_root(tmp_path: Path) -> None:
    root, folder = tmp_path / "root", tmp_path / "root" / "model"
    folder.mkdir(parents=True)
    save_file({"a": torch.zeros(2)}, tmp_path / "outside.safetensors")
    save_file({"a": torch.ones(2)}, root / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(InvalidSpec, match="leads outside the data root"):
        read_weights(folder, root)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(root / "blob")
    assert read_weights(folder, root)["a"].tolist() == [1.0, 1.0]


def test_no_code_of_ours_unpickles() -> None:
    """Ray pickles its own messages; files and requests are never unpickled by us."""
    forbidden = re.compile(
        r"^\s*(import|from)\s+(pickle|cPickle|dill|cloudpickle|joblib|shelve|marshal)\b|\btorch\.(load|jit\.load|hub)\b"
        r"|\bpickle\.|allow_pickle\s*=\s*True|\byaml\.(load|unsafe_load)\(", re.MULTILINE,
    )  # fmt: skip
    for package in ("mok_service", "api/mok_api", "workers/mok_workers"):
        for path in (ROOT / package).rglob("*.py"):
            found = forbidden.search(path.read_text())
            assert found is None, f"{path}: {found[0]}"
