"""The training data: files by name, a token stream, and batch(step) as a pure function of seed and step.

The stream is every file's tokens in manifest order, an end-of-text token after each. Sample i is the `length + 1` tokens from
`i * length` on (inputs and labels overlap by one); the last sample may be shorter: its missing positions have label -1 and
mask 0. docs/arithmetic.md, 14.4 and 15.1.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mok_service.errors import InvalidSpec, SourceDrift, TrainingFailed
from mok_service.provenance.digest import Digest, canonical_digest
from mok_service.provenance.manifest import DataManifest, ManifestFile
from mok_service.spec import DataSpec
from mok_service.training.sources import Sources
from mok_service.urls import allowed_words, unrunnable

END_OF_TEXT = 256  # of the bytes tokenizer
PADDING = 257
STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

# permutation(stream, n, first, count): where these positions go in a random permutation of [0, n).
Permutation = Callable[[str, int, int, int], Sequence[int]]


@dataclass(frozen=True)
class Batch:
    """One global batch of B sequences; padding sequences have sample id -1."""

    step: int
    ids: tuple[int, ...]
    inputs: NDArray[np.int32]  # [B, length]
    labels: NDArray[np.int32]  # [B, length], -1: does not count
    mask: NDArray[np.uint8]  # [B, length], 1: a real token

    @property
    def valid(self) -> int:
        """Labels that count: N of docs/arithmetic.md, 12.3."""
        return int((self.labels >= 0).sum())

    def digest(self) -> Digest:
        return canonical_digest({"type": "mok.batch/v1", "ids": [str(i) for i in self.ids]})


@dataclass(frozen=True)
class Corpus:
    """A token stream and the manifest of the files it came from."""

    tokens: NDArray[np.int32]
    manifest: DataManifest

    def samples(self, length: int) -> int:
        return max(0, -(-(len(self.tokens) - 1) // length))

    def batch(self, step: int, sequences: int, length: int, permutation: Permutation) -> Batch:
        """The global batch of a step (from 1). Epochs are permuted one by one; the last batch of an epoch is padded."""
        n = self.samples(length)
        if n == 0:
            raise TrainingFailed("the data has fewer than two tokens: nothing to train on", reason="bad_data")
        batches = -(-n // sequences)
        epoch, index = divmod(step - 1, batches)
        first = index * sequences
        ids = list(permutation(f"order/{epoch}", n, first, min(sequences, n - first)))
        ids += [-1] * (sequences - len(ids))
        inputs = np.zeros((sequences, length), np.int32)
        labels = np.full((sequences, length), -1, np.int32)
        mask = np.zeros((sequences, length), np.uint8)
        for row, sample in enumerate(ids):
            if sample >= 0:
                window = self.tokens[sample * length : (sample + 1) * length + 1]
                count = len(window) - 1
                inputs[row, :count], labels[row, :count], mask[row, :count] = window[:-1], window[1:], 1
        return Batch(step, tuple(ids), inputs, labels, mask)


def open_corpus(
    data: DataSpec, roots: Sequence[Path], vocabulary: int, expected: DataManifest | None = None, sources: Sources | None = None
) -> Corpus:
    """Read and tokenize the files that `data` names: paths under one of `roots`, and URLs by `sources` (None: no remote data).

    Raises InvalidSpec (nothing found, a path outside the roots, a token beyond the vocabulary) and, when `expected` is given,
    SourceDrift naming the first file whose name, size or digest is not the recorded one; for URLs what `Sources.read` raises.
    """
    encode, tokenizer_digest = _tokenizer(data.tokenizer, roots)
    files: list[ManifestFile] = []
    parts: list[NDArray[np.int32]] = []
    total = 0
    for name, read in _expand(data, roots, expected, sources):
        content = read()
        if data.max_bytes is not None and total + len(content) > data.max_bytes:
            break
        total += len(content)
        files.append(ManifestFile(name, len(content), hashlib.sha256(content).hexdigest()))
        parts.append(encode(content))
    if not files:
        raise InvalidSpec(
            f"data.source = {data.source!r}: no file was found (paths {list(data.paths)}, max_bytes {data.max_bytes})",
            errors=[{"field": "data", "value": data.source, "problem": "no file was found", "allowed": "at least one file"}],
        )
    tokens = np.concatenate(parts)
    manifest = DataManifest(data.source, tuple(files), tokenizer_digest, len(tokens))
    if expected is not None:
        check_manifest(expected, manifest)
    if int(tokens.max(initial=0)) >= vocabulary:
        raise InvalidSpec(
            f"model.vocabulary_size = {vocabulary}: the tokenizer gave token {int(tokens.max())}; allowed: more than that",
            errors=[
                {"field": "model.vocabulary_size", "value": vocabulary, "problem": "smaller than the tokenizer's vocabulary"}
            ],
        )
    return Corpus(tokens, manifest)


def check_manifest(expected: DataManifest, got: DataManifest) -> None:
    """Raises SourceDrift naming the first file (or the tokenizer) in which two manifests differ."""
    if expected == got:
        return
    for a, b in zip(expected.files, got.files, strict=False):
        if a != b:
            what = "changed" if a.name == b.name else f"was replaced by {b.name!r}"
            raise SourceDrift(
                f"data file {a.name!r} {what}: recorded {a.size} bytes sha256:{a.sha256}, found {b.size} bytes sha256:{b.sha256}",
                reason="source_drift",
                file=a.name,
            )
    if len(expected.files) != len(got.files):
        longer = max(expected.files, got.files, key=len)
        name = longer[min(len(expected.files), len(got.files))].name
        change = "gone" if longer is expected.files else "new"
        raise SourceDrift(
            f"the data had {len(expected.files)} files, now {len(got.files)}: {name!r} is {change}",
            reason="source_drift",
            file=name,
        )
    raise SourceDrift(
        f"the data is read another way: recorded tokenizer {expected.tokenizer} with {expected.tokens} tokens, "
        f"found {got.tokenizer} with {got.tokens}",
        reason="source_drift",
        file="tokenizer",
    )


def _expand(
    data: DataSpec, roots: Sequence[Path], expected: DataManifest | None, sources: Sources | None
) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(name, how to read it) of every input file, in reading order: by name, bytewise. A file at a URL has the URL as name."""
    readers: dict[str, Callable[[], bytes]] = {name: path.read_bytes for name, path in _paths(data, roots).items()}
    recorded = {file.name: file for file in expected.files} if expected is not None else {}
    for file in data.urls:
        if sources is None:
            raise unrunnable(file.url, "isn't allowed here", allowed_words(()))
        if expected is None or file.url in recorded:  # the record lacks it when max_bytes was reached before
            readers[file.url] = partial(sources.read, file, recorded.get(file.url))
    yield from sorted(readers.items(), key=lambda item: item[0].encode())


def _paths(data: DataSpec, roots: Sequence[Path]) -> dict[str, Path]:
    """The local input files by name."""
    if data.source == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return {path.relative_to(root).as_posix(): path for path in _modules(root)}
    found: dict[str, Path] = {}
    for pattern in data.paths:
        matched = False
        for root in roots:
            base = root.resolve()
            for path in base.glob(pattern):
                if path.is_file():
                    contained(path, base, pattern)
                    found.setdefault(path.relative_to(base).as_posix(), path)
                    matched = True
        if not matched:
            raise InvalidSpec(
                f"data.paths = {pattern!r}: no such file under the data roots",
                errors=[{"field": "data.paths", "value": pattern, "problem": "no such file under the data roots"}],
            )
    return found


def _modules(root: Path) -> Iterator[Path]:
    """The library's own source files. Folders left out aren't entered: what is installed there may be a hundred times as much."""
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in STDLIB_LEFT_OUT]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def contained(path: Path, base: Path, named: str, field: str = "data.paths") -> Path:
    """The resolved path, when it lies inside `base` (links followed); else InvalidSpec naming the field and its value."""
    resolved = path.resolve()
    if not resolved.is_relative_to(base.resolve()):
        raise InvalidSpec(
            f"{field} = {named!r}: {path.name!r} leads outside the data root",
            errors=[{"field": field, "value": named, "problem": "leads outside the data root"}],
        )
    return resolved


def _tokenizer(name: str, roots: Sequence[Path]) -> tuple[Callable[[bytes], NDArray[np.int32]], str]:
    """An encoder of one file's bytes and what the manifest records of it."""
    if name == "bytes":
        return _encode_bytes, "bytes"
    for root in roots:
        path = root.resolve() / name
        if path.is_file():
            return _tokenizer_file(contained(path, root, name, "data.tokenizer").read_bytes())
    raise InvalidSpec(
        f"data.tokenizer = {name!r}: no such file under the data roots; allowed: bytes, or a tokenizer.json under a data root",
        errors=[{"field": "data.tokenizer", "value": name, "problem": "no such file under the data roots"}],
    )


def _encode_bytes(content: bytes) -> NDArray[np.int32]:
    out = np.empty(len(content) + 1, np.int32)
    out[:-1], out[-1] = np.frombuffer(content, np.uint8), END_OF_TEXT
    return out


def _tokenizer_file(definition: bytes) -> tuple[Callable[[bytes], NDArray[np.int32]], str]:
    from tokenizers import Tokenizer, __version__

    tokenizer = Tokenizer.from_buffer(definition)
    ends = [i for text in ("<|endoftext|>", "</s>", "<eos>", "<|im_end|>") if (i := tokenizer.token_to_id(text)) is not None]

    def encode(content: bytes) -> NDArray[np.int32]:
        ids = tokenizer.encode(content.decode(errors="replace"), add_special_tokens=False).ids
        return np.asarray([*ids, *ends[:1]], np.int32)

    return encode, f"sha256:{hashlib.sha256(definition).hexdigest()} tokenizers {__version__}"
