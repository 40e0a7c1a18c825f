"""The loop: whatever may not change a bit doesn't. Bodies are compared whole, so a failing test shows the first field."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from mok_service.errors import InvalidSpec, KernelError, NonFinite, Tampered
from mok_service.kernels import load_backend
from mok_service.kernels.native import NativeBackend
from mok_service.provenance.chain import check_links, first_difference
from mok_service.training.checkpoint import CheckpointStore
from mok_service.training.loop import Trainer
from tests.training.jobs import bodies, corpus_of, job, run

PRECISIONS = ["fp32", "bf16"]
VARIANTS = {
    "plain": {},
    "shared expert, auxiliary and z-loss": {
        "model": {"shared_expert_intermediate_size": 20, "aux_loss_coefficient": 0.01, "z_loss_coefficient": 0.001}
    },
    "full norm, tied, not renormalised": {
        "model": {"qk_norm": "full", "tie_embeddings": True, "renormalise_top_k": False},
        "optimizer": {"clipping": "previous", "max_norm": 0.5},
    },
    "ragged": {
        "model": {"hidden_size": 37, "head_size": 10, "heads": 3, "kv_heads": 1, "expert_intermediate_size": 29,
                  "vocabulary_size": 263, "qk_norm": "none"},
        "sequence_length": 19,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def backend() -> NativeBackend:
    return load_backend("cpu", threads=2)


def available(isa: str) -> bool:
    """Whether this machine has an instruction set."""
    try:
        NativeBackend("cpu", threads=1, isa=isa)
    except KernelError:
        return False
    return True


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_and_instruction_sets_do_not_show(variant: str, precision: str, backend: NativeBackend) -> None:
    spec = job(precision=precision, **VARIANTS[variant])
    expected = bodies(run(spec, backend))
    others = [load_backend("cpu", threads=n) for n in (1, 3, 7)]
    others += [NativeBackend("cpu", threads=2, isa=isa) for isa in ("portable", "avx2", "avx512") if available(isa)]
    others.append(NativeBackend("cpu", threads=2, tile_limit=2))
    for other in others:
        assert bodies(run(spec, other)) == expected, other.info()["context"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_micro_batches_do_not_show(variant: str, precision: str, backend: NativeBackend) -> None:
    arguments = VARIANTS[variant] | {"precision": precision, "batch": {"sequences": 8, "group_sequences": 2, "shards": 2}}
    expected = bodies(run(job(**arguments), backend))
    for count in (2, 4):
        assert bodies(run(job(**arguments, execution={"micro_batches": count}), backend)) == expected


def test_shards_are_part_of_the_job(backend: NativeBackend) -> None:
    """The wave rule is real: another number of shards joins dense gradients in another order, so the bits may differ."""
    batch = {"sequences": 8, "group_sequences": 1}
    one, four = (list(run(job(batch=batch | {"shards": s}), backend)) for s in (1, 4))
    assert one[1].loss_bits == four[1].loss_bits
    assert one[-1].state != four[-1].state


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_resume_at_every_step(variant: str, precision: str, backend: NativeBackend, tmp_path: Path) -> None:
    """Cases 3, 4 and 7: stopped after any step (inside the warm-up too) and resumed, a run goes on with the same bits."""
    spec = job(precision=precision, **VARIANTS[variant])
    expected = bodies(run(spec, backend))
    for stop in range(spec.training.steps + 1):
        store = CheckpointStore(tmp_path / str(stop))
        before = bodies(itertools.islice(run(spec, backend, store), stop + 1))
        after = bodies(run(spec, backend, store))
        assert (before + after if stop else after) == expected


def test_resume_no_later_than_the_records_that_are_kept(backend: NativeBackend, tmp_path: Path) -> None:
    """A checkpoint may be ahead of the database: the run then resumes from an older one, so that no record is missing."""
    spec, store = job(), CheckpointStore(tmp_path)
    expected = bodies(run(spec, backend, store))
    assert bodies(run(spec, backend, store, resume_at_most=3)) == expected[4:]
    assert bodies(run(spec, backend, store, resume_at_most=0)) == expected


def test_the_chain_links(backend: NativeBackend) -> None:
    records = list(run(job(), backend))
    assert check_links(records, records[0].previous) == records[-1].head()
    assert [r.step for r in records if r.state] == [0, 2, 4, 6]
    broken = [*records[:3], *records[4:]]
    with pytest.raises(Tampered, match="step record 3 is missing"):
        check_links(broken, records[0].previous)
    forged = [*records[:3], dataclasses.replace(records[3], loss_bits="3f800000"), *records[4:]]
    with pytest.raises(Tampered, match="step record 4 links to"):
        check_links(forged, records[0].previous)


def test_another_seed_is_another_run(backend: NativeBackend) -> None:
    one, two = (list(run(job(seed=s), backend)) for s in (1, 2))
    difference = first_difference(one[0], two[0])
    assert difference is not None and difference[0] == "weights"


def test_the_loss_falls(backend: NativeBackend) -> None:
    losses = [r.loss for r in run(job(steps=60, batch={"sequences": 12, "group_sequences": 12}), backend) if r.loss is not None]
    assert losses[0] > 5.4 and losses[-1] < losses[0] - 1.5, (losses[0], losses[-1])


def test_the_denominator_is_the_global_batch(backend: NativeBackend) -> None:
    """Case 6: samples with few and with many labels, in one micro-batch or two: the same bits."""
    spec = job(batch={"sequences": 2, "group_sequences": 1}, sequence_length=100, steps=2)
    corpus = corpus_of(spec)
    short = dataclasses.replace(corpus, tokens=corpus.tokens[:104])  # 100 labels, then 3
    alone, split = (
        bodies(Trainer(job(batch={"sequences": 2, "group_sequences": 1}, sequence_length=100, steps=2,
                           execution={"micro_batches": n}), short, backend).records())
        for n in (1, 2)
    )  # fmt: skip
    assert alone == split
    assert alone[1]["tokens"] == "103"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_that_is_not_finite_fails(precision: str, backend: NativeBackend, tmp_path: Path) -> None:
    spec, store = job(precision=precision), CheckpointStore(tmp_path)
    trainer = Trainer(spec, corpus_of(spec), backend, store)
    records = trainer.records()
    list(itertools.islice(records, 3))
    trainer.model.parameters.weight["1.down"][0, 0, 0] = float("nan")
    trainer.model.parameters.refresh_operands()
    with pytest.raises(NonFinite, match="step 3: a logit or the loss is not finite") as raised:
        next(records)
    assert raised.value.detail == {"reason": "non_finite", "step": 3}
    assert [c.step for c in store.list()] == [1, 2]
    assert len(bodies(run(spec, backend, store))) == 4


def test_a_flipped_bit_in_a_checkpoint_is_named(backend: NativeBackend, tmp_path: Path) -> None:
    spec, store = job(), CheckpointStore(tmp_path)
    list(itertools.islice(run(spec, backend, store), 3))
    path = tmp_path / "step-00000002" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(Tampered, match=r"step-00000002/model\.safetensors has sha256:"):
        next(run(spec, backend, store))
    manifest = path.with_name("checkpoint.json")
    value = json.loads(manifest.read_bytes())
    value["files"] = [f for f in value["files"] if f["name"] != "model.safetensors"]
    manifest.write_text(json.dumps(value))
    with pytest.raises(Tampered, match="the weights have digest"):
        next(run(spec, backend, store))


def test_a_partial_checkpoint_is_never_listed(backend: NativeBackend, tmp_path: Path) -> None:
    """Case 19, in the process: an error at each write leaves the earlier checkpoints, and nothing half-written."""
    spec, store = job(), CheckpointStore(tmp_path)
    list(itertools.islice(run(spec, backend, store), 3))
    trainer = Trainer(spec, corpus_of(spec), backend, store)
    trainer.advance()
    real = Path.rename
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            trainer.save()
    assert Path.rename is real
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert [c.step for c in store.list()] == [1, 2]
    (tmp_path / "step-00000003").mkdir()  # as a crash before the rename of an older version would leave it
    assert [c.step for c in store.list()] == [1, 2]
    trainer.save()
    assert [c.step for c in store.list()] == [1, 2, 3]


def test_initial_weights(backend: NativeBackend, tmp_path: Path) -> None:
    spec, store = job(), CheckpointStore(tmp_path)
    list(run(spec, backend, store))
    final = store.list()[-1]
    weights = dict(store.load(final).weights)
    trainer = Trainer(spec, corpus_of(spec), backend, initial_weights=weights)
    assert trainer.record_zero is not None and trainer.record_zero.state is not None
    assert trainer.record_zero.state.weights == final.state.weights
    del weights["lm_head.weight"]
    with pytest.raises(InvalidSpec, match=r"initial weights: tensor 'lm_head\.weight' is missing"):
        Trainer(spec, corpus_of(spec), backend, initial_weights=weights)


def test_experts_of_ties_are_the_first(backend: NativeBackend) -> None:
    """Case 1: router weights all zero: experts 0 and 1 for every token."""
    spec = job(optimizer={"warmup_steps": 0}, execution={"micro_batches": 1})
    trainer = Trainer(spec, corpus_of(spec), backend)
    for layer in range(2):
        trainer.model.parameters.weight[f"{layer}.router"].zero_()
    trainer.model.parameters.refresh_operands()
    batch = trainer.corpus.batch(1, 6, 24, trainer._permutation)
    sums = trainer._gradients(batch, batch.valid)
    tokens = int(batch.mask.sum())
    assert sums.counts.sum(1).tolist() == [[tokens, tokens, 0, 0]] * 2
    assert np.isfinite(float(sums.loss))
