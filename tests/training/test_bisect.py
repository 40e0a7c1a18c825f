"""A planted fault in one operation is found and named exactly: step, operation, tensor, element, both bit patterns."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mok_service.errors import InvalidSpec
from mok_service.kernels.native import NativeBackend
from mok_service.provenance.manifest import DataManifest
from mok_service.provenance.verify import Ending
from mok_service.spec import JobSpec, override_execution
from mok_service.training.bisect import Side, _held_findings, bisect, require_same_training
from mok_service.training.bisect_report import Report
from mok_service.training.loop import Trainer
from mok_service.training.parameters import LogicalTensor
from mok_service.training.trace import Held, TracingBackend
from tests.training.jobs import corpus_of, job
from tests.training.planted import Execution, Plant, PlantedBackend

TINY: dict[str, Any] = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_size": 8, "experts": 3, "top_k": 2,
                        "expert_intermediate_size": 8, "vocabulary_size": 259}  # fmt: skip
BATCH = {"sequences": 2, "group_sequences": 1, "shards": 2}
PLANTS = 50
# Where to read and write: a wrong one leads out of memory, and ends the process. One of them is in a test of its own.
PLACES = {"expert_index", "row_token", "row_slot", "slot_row", "expert_offsets"}


def tiny(precision: str = "fp32", **more: Any) -> JobSpec:
    training = {"steps": 5, "digest_interval": 2, "sequence_length": 12} | more
    model = TINY | training.pop("model", {})
    return job(model=model, batch=BATCH, precision=precision, execution={"checkpoint_interval": 2, "threads": 1}, **training)


def planted(plant: Plant | None) -> Callable[[], NativeBackend]:
    return lambda: PlantedBackend(BATCH["sequences"], plant)


def execution(spec: JobSpec, folder: Path, name: str, plant: Plant | None = None) -> Execution:
    return Execution(spec, corpus_of(spec), folder / name, planted(plant), name)


def compare(spec: JobSpec, first: Side, second: Side) -> Report:
    return bisect(spec.training, corpus_of(spec), first, second)


def draw(spec: JobSpec, dice: random.Random) -> tuple[Plant, str, tuple[int, ...]]:
    """A fault anywhere: in any operation of any step, at any element and bit; its operation, and the shape of the tensor."""
    backend = PlantedBackend(BATCH["sequences"])
    backend.watched = dice.randint(1, spec.training.steps)
    trainer = Trainer(spec, corpus_of(spec), backend)
    while trainer.step < backend.watched:
        trainer.advance()
    operations = backend.seen[backend.watched]
    where = [(i, name) for i, (_, outputs) in enumerate(operations) for name in outputs if name not in PLACES]
    number, argument = dice.choice(where)
    operation, outputs = operations[number]
    tensor = outputs[argument]
    plant = Plant(backend.watched, number, argument, dice.randrange(tensor.numel()), dice.randrange(8 * tensor.element_size()))
    return plant, operation, tuple(tensor.shape)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_planted_faults_are_named_exactly(precision: str, tmp_path: Path) -> None:
    """50 faults in all. A flip that no later bit depends on (in rows that nothing reads, in what rounding takes away) has to be
    reported as no difference; such draws don't count.
    """
    spec, dice = tiny(precision, model={"aux_loss_coefficient": 0.01} if precision == "bf16" else {}), random.Random(precision)
    clean = execution(spec, tmp_path, "A").side()
    found, silent = 0, 0
    for number in itertools.count():
        if found == PLANTS // 2:
            break
        plant, operation, shape = draw(spec, dice)
        faulty = execution(spec, tmp_path, f"B{number}", plant).side()
        report = compare(spec, clean, faulty)
        if [r.body() for r in faulty.records] == [r.body() for r in clean.records]:
            assert report.verdict == "REPRODUCED", (plant, report)
            silent += 1
            continue
        found += 1
        assert (report.verdict, report.step) == ("DIVERGED", plant.step), f"{plant} {operation}: {report.message}"
        at = report.operation
        assert at is not None and (at.number, at.operation, at.inputs) == (plant.number, operation, ()), (plant, operation, at)
        [tensor] = at.outputs
        assert (tensor.argument, tensor.differing) == (plant.argument, 1), (plant, at)
        bits = [int(b, 16) for b in (tensor.element.first_bits, tensor.element.second_bits)]
        assert bits[0] ^ bits[1] == 1 << plant.bit, (plant, at)
        if " of " not in tensor.name:  # else the index is that in the logical tensor
            assert tensor.element.index == plant.index(shape), (plant, at)
        assert at.place
    print(f"{precision}: {found} named of {found + silent} drawn, {silent} without effect")
    assert 0 < silent < found


def first_plant(spec: JobSpec, seed: str, step: int | None = None) -> tuple[Plant, str]:
    """A fault whose flip shows at once: in the gradient of the loss."""
    backend = PlantedBackend(BATCH["sequences"])
    backend.watched = step or 3
    trainer = Trainer(spec, corpus_of(spec), backend)
    while trainer.step < backend.watched:
        trainer.advance()
    seen = backend.seen[backend.watched]
    number = next(i for i, (name, _) in enumerate(seen) if name == "mok_cross_entropy")
    return Plant(backend.watched, number, "grad_logits", 5, 27), "mok_cross_entropy"


def test_a_replay_finds_what_one_run_had_on_record(tmp_path: Path) -> None:
    """One record is enough: the other side is computed, from the first step on."""
    spec = tiny()
    plant, operation = first_plant(spec, "replay")
    faulty = execution(spec, tmp_path, "A", plant).side()
    clean = Side("replay", dataclasses.replace(faulty.executor, name="clean", open=planted(None)))
    report = compare(spec, faulty, clean)
    assert (report.verdict, report.step) == ("DIVERGED", 3) and report.operation is not None
    assert (report.operation.number, report.operation.operation) == (plant.number, operation)
    assert report.operation.outputs[0].element.index == (0, 5)
    assert report.message == f"step 3, operation {plant.number} ({operation}): A and replay come apart"
    nothing_on_record = dataclasses.replace(faulty, records=(), ending=None, checkpoints={})
    assert compare(spec, nothing_on_record, clean).operation == report.operation, "two executors, and no record at all"
    same = compare(spec, execution(spec, tmp_path, "C").side(), clean)
    assert (same.verdict, same.message) == ("REPRODUCED", "equal through step 5, the last one.")
    assert same.counts.operation_digests == 0


def test_what_does_not_recur_is_not_reproducible(tmp_path: Path) -> None:
    """A bit that flipped once, in either run or in both; or in a replay."""
    spec = tiny()
    plant, _ = first_plant(spec, "transient")
    clean = execution(spec, tmp_path, "clean").side()
    once = execution(spec, tmp_path, "once", dataclasses.replace(plant, times=1)).side()
    report = compare(spec, once, clean)
    assert (report.verdict, report.step, report.operation) == ("INCONCLUSIVE", 3, None)
    assert report.message == "step 3 of once is not reproducible: replays agree with clean"
    assert compare(spec, clean, once).message == "step 3 of once is not reproducible: replays agree with clean"
    other = execution(spec, tmp_path, "other", dataclasses.replace(plant, times=1, bit=28)).side()
    assert "step 3 of once and of other is not reproducible: replays agree with each other" in compare(spec, once, other).message
    flipping = dataclasses.replace(plant, times=1)
    replayed = dataclasses.replace(once, executor=dataclasses.replace(once.executor, open=planted(flipping)))
    assert "the replays differed once" in compare(spec, replayed, clean).message


def test_a_difference_before_the_records_show_it(tmp_path: Path) -> None:
    """Between two digests of the state, nothing but the loss of later steps shows that weights differ."""
    spec = tiny(steps=6, digest_interval=6)
    plant, _ = first_plant(spec, "hidden", step=2)
    a, b = execution(spec, tmp_path, "A").side(), execution(spec, tmp_path, "B", plant).side()
    recorded = next(x.step for x, y in zip(a.records, b.records, strict=True) if x.head() != y.head())
    assert recorded > 0
    without = [dataclasses.replace(side, checkpoints={}) for side in (a, b)]
    report = compare(spec, *without)
    assert (report.verdict, report.step) == ("DIVERGED", 2) and report.operation is not None
    assert report.operation.number == plant.number
    assert report.state is not None and report.state.differing > 0


def test_the_count_of_digests_grows_with_the_logarithm_of_steps(tmp_path: Path) -> None:
    """Operations are digested in one step alone, and heads of the chain are compared by halves."""
    taken = []
    for steps in (6, 48):
        spec = tiny(steps=steps, digest_interval=1)
        plant, _ = first_plant(spec, "count", step=steps - 2)
        a, b = (execution(spec, tmp_path, f"{name}{steps}", p).side() for name, p in (("A", None), ("B", plant)))
        report = compare(spec, a, b)
        assert (report.verdict, report.step) == ("DIVERGED", steps - 2)
        assert report.counts.heads <= math.ceil(math.log2(steps + 1)) + 1
        assert report.counts.steps <= 2 * 2 + 2 * 2, "at most a checkpoint interval, the trace, and the operation again"
        taken.append(report.counts)
    assert taken[0].operation_digests == taken[1].operation_digests
    assert taken[0].prefixes == taken[1].prefixes <= 2 * math.ceil(math.log2(taken[0].operation_digests)), "set-up, and step"


def test_a_fault_while_the_model_is_set_up(tmp_path: Path) -> None:
    """Initial weights, and the table of the rotary embedding, are computed before the first step."""
    spec = tiny()
    for number, operation, argument in ((0, "mok_rope_table", "cos_sin"), (2, "mok_random_normal", "out")):
        plant = Plant(0, number, argument, 3, 9)
        a, b = execution(spec, tmp_path, f"A{number}").side(), execution(spec, tmp_path, f"B{number}", plant).side()
        report = compare(spec, a, b)
        assert (report.verdict, report.step) == ("DIVERGED", 0) and report.operation is not None
        assert (report.operation.operation, report.operation.inputs) == (operation, ())
        assert report.operation.outputs[0].element.index[-1] == 3


def test_a_wrong_row_is_named(tmp_path: Path) -> None:
    """A routing that sends a token to the row beside its own."""
    spec = tiny()
    backend = PlantedBackend(BATCH["sequences"])
    backend.watched = 2
    trainer = Trainer(spec, corpus_of(spec), backend)
    trainer.advance(), trainer.advance()
    plans = [(i, outputs) for i, (name, outputs) in enumerate(backend.seen[2]) if name == "mok_routing_plan"]
    number, outputs = plans[-1]
    position = int((outputs["slot_row"].reshape(-1) >= 0).nonzero()[0])
    plant = Plant(2, number, "slot_row", position, 0)
    report = compare(spec, execution(spec, tmp_path, "A").side(), execution(spec, tmp_path, "B", plant).side())
    assert report.operation is not None and report.operation.number == number
    [tensor] = report.operation.outputs
    assert (tensor.argument, tensor.name) == ("slot_row", "layer 0 routing slot_row")
    assert tensor.element.index == divmod(position, 2)
    assert abs(tensor.element.first - tensor.element.second) == 1


def test_a_changed_input_is_no_fault_of_the_operation(tmp_path: Path) -> None:
    """Memory that changes between two operations: the operation that reads it isn't blamed."""
    spec = tiny()

    class Memory(PlantedBackend):
        """Weights change between two steps, by no operation."""

        weights: torch.Tensor | None = None

        def call(self, operation: str, **fields: Any) -> Any:
            result = super().call(operation, **fields)
            if operation == "mok_adamw" and self.weights is None:
                self.weights = fields["weight"]
            if operation == "mok_permutation" and self.step == 2 and self.weights is not None:
                self.weights[:4096] += 1
            return result

    a = execution(spec, tmp_path, "A").side()
    b = Execution(spec, corpus_of(spec), tmp_path / "B", lambda: Memory(BATCH["sequences"]), "B").side()
    report = compare(spec, a, b)
    assert (report.verdict, report.step) == ("DIVERGED", 2)
    assert report.operation is not None and report.operation.operation == "mok_embedding_forward"
    [changed] = report.operation.inputs
    assert (changed.argument, changed.name) == ("table", "weight of model.embed_tokens.weight")
    assert report.message.endswith("table was changed before it, by no operation of this step")


def test_what_a_workspace_holds_from_before_does_not_show() -> None:
    """A trace of a step is the same after other steps, with garbage in every workspace, as in a fresh model."""
    spec = tiny("bf16", model={"shared_expert_intermediate_size": 8, "aux_loss_coefficient": 0.01, "qk_norm": "head"})
    traces = []
    for garbage in (False, True):
        backend = TracingBackend(PlantedBackend(BATCH["sequences"]))
        trainer = Trainer(spec, corpus_of(spec), backend)
        trainer.advance()
        if garbage:
            for _, buffer in trainer.model.workspace():
                if buffer.is_floating_point():
                    buffer.uniform_(-9, 9)
        with backend.tracing() as trace:
            trainer.advance()
        traces.append(trace)
    assert traces[0].digests > 100 and traces[0].operations == traces[1].operations


def test_reasons_to_conclude_nothing(tmp_path: Path) -> None:
    spec = tiny()
    plant, _ = first_plant(spec, "reasons")
    a, b = execution(spec, tmp_path, "A").side(), execution(spec, tmp_path, "B", plant).side()
    other = DataManifest("files", (), "bytes", 3)
    report = compare(spec, dataclasses.replace(a, manifest=other), b)
    assert report.verdict == "INCONCLUSIVE" and "the data had 0 files" in report.message
    older = spec.training.model_copy(update={"arithmetic": "mok-0"})
    report = bisect(older, corpus_of(spec), a, b)
    assert (report.verdict, report.message) == ("INCONCLUSIVE", "the job's arithmetic is mok-0, and that of the kernels mok-1")
    shorter = dataclasses.replace(a, records=a.records[:3], ending=Ending("cancelled", "user_cancelled", 2))
    report = compare(spec, a, shorter)
    assert report.verdict == "INCONCLUSIVE" and report.message.startswith("equal through step 2")
    training = {"seed": 1, "model": {"layers": 2}}
    with pytest.raises(InvalidSpec, match=r"training\.model\.layers is 2 in the first and 3 in the second"):
        require_same_training({"spec": {"training": training}}, {"spec": {"training": {"seed": 1, "model": {"layers": 3}}}})


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    spec = tiny()
    plant, _ = first_plant(spec, "damaged")
    a, b = execution(spec, tmp_path, "A").side(), execution(spec, tmp_path, "B", plant).side()
    for name in "AB":
        path = tmp_path / name / "step-00000002" / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    report = compare(spec, a, b)
    assert (report.verdict, report.step) == ("DIVERGED", 3)
    assert len(report.notes) == 2 and "tensor 'model.norm.weight': blake3 expected" in report.notes[0]


def test_other_micro_batches_name_the_state(tmp_path: Path) -> None:
    """They take a step apart in another way, so that operations don't correspond; the tensor of the state is named yet."""
    spec = tiny()
    plant, _ = first_plant(spec, "parts")
    other = override_execution(spec, {"micro_batches": 2})
    a = execution(other, tmp_path, "A").side()
    report = compare(spec, a, execution(spec, tmp_path, "B", plant).side())
    assert (report.verdict, report.step, report.operation) == ("DIVERGED", 3, None)
    assert report.state is not None and report.state.element.first_bits != report.state.element.second_bits
    assert "is another one on either side" in report.notes[-1]


def test_inputs_of_two_shapes_are_reported() -> None:
    """A routing that changed between two operations gives the next one other numbers of rows: their common part is compared."""
    part = {"a": [LogicalTensor("w", (2, 2), 0)]}
    held = [Held(0, inputs={"a": rows}, parts=part) for rows in (torch.zeros(4, 2), torch.ones(3, 2))]
    [found] = _held_findings(held, "inputs")
    assert (found.argument, found.differing, found.elements) == ("a", 6, 6)
