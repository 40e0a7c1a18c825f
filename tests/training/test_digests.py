"""Digests beside the training: records, checkpoints and errors are those of a training that waits for each."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from mok_service.errors import NonFinite
from mok_service.kernels import load_backend
from mok_service.kernels.native import NativeBackend
from mok_service.provenance.digest import StateForm, TensorDigest, state_digest
from mok_service.training import digests
from mok_service.training.checkpoint import CheckpointStore
from mok_service.training.loop import Trainer
from tests.training.jobs import bodies, corpus_of, job


@pytest.fixture(scope="module")
def backend() -> NativeBackend:
    return load_backend("cpu", threads=2)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the state is."""
    monkeypatch.setattr(digests, "BESIDE_BYTES_MIN", 0)


def waiting(spec: Any, backend: NativeBackend) -> list[dict[str, Any]]:
    trainer = Trainer(spec, corpus_of(spec), backend)
    assert trainer.record_zero is not None and not trainer._hashing.beside
    return bodies([trainer.record_zero, *(trainer.advance() for _ in range(spec.training.steps))])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_the_records_are_the_same(
    precision: str, interval: int, backend: NativeBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = job(precision=precision, digest_interval=interval, model={"aux_loss_coefficient": 0.01, "z_loss_coefficient": 0.001})
    expected = waiting(spec, backend)
    monkeypatch.setattr(digests, "BESIDE_BYTES_MIN", 0)
    trainer = Trainer(spec, corpus_of(spec), backend, CheckpointStore(tmp_path))
    assert trainer._hashing.beside
    got = []
    for record in trainer.records():
        got.append(record)
        assert trainer.step == record.step and trainer.head == record.head()
        if record.state is not None:
            assert trainer.state_digests() == record.state, "the state is that of the record while somebody looks at it"
    assert bodies(got) == expected
    assert all(record.seconds > 0 for record in got[1:])


@pytest.mark.usefixtures("beside")
def test_a_training_that_stops_anywhere_goes_on(backend: NativeBackend, tmp_path: Path) -> None:
    spec = job(digest_interval=1, execution={"checkpoint_interval": 0})
    whole = bodies(Trainer(spec, corpus_of(spec), backend).records())
    for stop in range(1, spec.training.steps):
        store = CheckpointStore(tmp_path / str(stop))
        trainer = Trainer(spec, corpus_of(spec), backend, store)
        first = bodies(itertools.islice(trainer.records(), stop + 1))
        trainer.save()
        assert first + bodies(Trainer(spec, corpus_of(spec), backend, store).records()) == whole


@pytest.mark.usefixtures("beside")
def test_an_error_of_the_next_step_comes_after_the_record(backend: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job(digest_interval=1)
    trainer = Trainer(spec, corpus_of(spec), backend)
    real = trainer._gradients

    def not_finite(batch: Any, valid: int) -> Any:
        sums = real(batch, valid)
        if trainer.step == 2:
            sums.status.fill_(1)
        return sums

    monkeypatch.setattr(trainer, "_gradients", not_finite)
    records = trainer.records()
    assert [record.step for record in itertools.islice(records, 3)] == [0, 1, 2]
    with pytest.raises(NonFinite, match="step 3: a logit or the loss is not finite"):
        next(records)


def test_a_form_gives_the_digest_of_the_document() -> None:
    hashes = [f"{index:064x}" for index in range(4)]
    what = [("b", "F32", (2, 3)), ("a\"\\\n\u2028é\U0001f600", "BF16", ()), ("first/b", "I64", (1 << 40,)), ("", "F32", (0,))]
    for order in itertools.permutations(range(4)):
        form = StateForm([what[index] for index in order])
        for shift in (0, 1):
            given = [hashes[(index + shift) % 4] for index in order]
            tensors = [TensorDigest(*what[index], digest) for index, digest in zip(order, given, strict=True)]
            assert form.digest(given) == state_digest(tensors)
    assert StateForm([]).digest([]) == state_digest([])
    with pytest.raises(ValueError, match="two tensors of one state are called 'b'"):
        StateForm([what[0], what[0]])
