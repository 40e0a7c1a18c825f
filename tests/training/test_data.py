"""Data: batch(step) is a pure function; sources stay inside their roots; a changed file is named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from mok_service.errors import InvalidSpec, SourceDrift, TrainingFailed
from mok_service.kernels import load_backend
from mok_service.provenance.manifest import DataManifest
from mok_service.spec import DataSpec
from mok_service.training.data import Batch, Corpus, open_corpus

BACKEND = load_backend("cpu", threads=1)


def permutation(stream: str, n: int, first: int, count: int) -> list[int]:
    return BACKEND.permutation(11, stream, n, first, count)


def corpus(samples: int, length: int = 4, last: int | None = None) -> Corpus:
    """`samples` samples of `length` labels, the last one with `last` labels."""
    tokens = (samples - 1) * length + (length if last is None else last) + 1
    return Corpus(np.arange(tokens, dtype=np.int32), DataManifest("files", (), "bytes", tokens))


def batches(data: Corpus, steps: range, sequences: int) -> list[Batch]:
    return [data.batch(step, sequences, 4, permutation) for step in steps]


def test_ids_after_a_resume() -> None:
    """Case 4: ten samples, batches of four: the last batch of an epoch is padded, the next epoch is another order."""
    data = corpus(10)
    ids = [b.ids for b in batches(data, range(1, 7), 4)]
    assert [i[2:] == (-1, -1) for i in ids] == [False, False, True] * 2
    for epoch in (ids[:3], ids[3:]):
        assert sorted(i for batch in epoch for i in batch if i >= 0) == list(range(10))
    assert ids[:3] != ids[3:]
    assert [b.ids for b in batches(data, range(2, 7), 4)] == ids[1:]


def test_padding_does_not_count() -> None:
    padded = corpus(10).batch(3, 4, 4, permutation)
    assert padded.mask.sum(1).tolist() == [4, 4, 0, 0]
    assert padded.valid == 8
    short = corpus(2, last=1)
    both = short.batch(1, 2, 4, permutation)
    row = both.ids.index(1)
    assert both.labels[row].tolist() == [5, -1, -1, -1] and both.mask[row].tolist() == [1, 0, 0, 0]
    assert both.valid == 5


@pytest.mark.parametrize("world", [1, 2, 4])
def test_world_size_does_not_change_the_order(world: int) -> None:
    """Case 5: the batch is made for the whole world; a rank takes rows of it."""
    whole = corpus(64).batch(5, 8, 4, permutation)
    ranks = [whole.inputs[rank * 8 // world : (rank + 1) * 8 // world] for rank in range(world)]
    assert np.concatenate(ranks).tobytes() == whole.inputs.tobytes()
    assert whole.digest() == corpus(64).batch(5, 8, 4, permutation).digest()


def test_nothing_to_train_on() -> None:
    with pytest.raises(TrainingFailed, match="fewer than two tokens"):
        Corpus(np.zeros(1, np.int32), DataManifest("files", (), "bytes", 1)).batch(1, 2, 4, permutation)


def test_the_standard_library_is_a_source() -> None:
    spec = DataSpec(source="python-stdlib", max_bytes=800_000)
    data = open_corpus(spec, [], 258)
    names = [file.name for file in data.manifest.files]
    assert names == sorted(names, key=str.encode) and all(name.endswith(".py") for name in names)
    assert 400_000 < sum(file.size for file in data.manifest.files) <= 800_000
    assert data.manifest.tokens == len(data.tokens) == sum(f.size + 1 for f in data.manifest.files)
    assert DataManifest.from_document(data.manifest.document()) == data.manifest
    assert open_corpus(spec, [], 258, expected=data.manifest).manifest.digest() == data.manifest.digest()


def test_a_changed_file_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name * 10)
    spec = DataSpec(source="files", paths=("*.txt",))
    recorded = open_corpus(spec, [tmp_path], 258).manifest
    (tmp_path / "b.txt").write_text("b.tXt" * 10)
    with pytest.raises(SourceDrift, match=r"data file 'b\.txt' changed: recorded 50 bytes sha256:"):
        open_corpus(spec, [tmp_path], 258, expected=recorded)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(SourceDrift, match=r"the data had 2 files, now 1: 'b\.txt' is gone"):
        open_corpus(spec, [tmp_path], 258, expected=recorded)


def test_paths_stay_inside_the_roots(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "secret.txt"
    root.mkdir()
    outside.write_text("secret")
    (root / "link.txt").symlink_to(outside)
    with pytest.raises(InvalidSpec, match=r"'link\.txt' leads outside the data root"):
        open_corpus(DataSpec(source="files", paths=("*.txt",)), [root], 258)
    with pytest.raises(InvalidSpec, match="no such file under the data roots"):
        open_corpus(DataSpec(source="files", paths=("missing/*",)), [root], 258)
    os.unlink(root / "link.txt")
    (root / "own.txt").write_text("own")
    assert open_corpus(DataSpec(source="files", paths=("own.txt",)), [root], 258).manifest.files[0].name == "own.txt"


def test_a_vocabulary_that_is_too_small(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(InvalidSpec, match=r"model\.vocabulary_size = 256: the tokenizer gave token 256"):
        open_corpus(DataSpec(source="files", paths=("a.txt",)), [tmp_path], 256)
