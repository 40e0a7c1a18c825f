"""A model card from a run's record: how the weights came about, and how to check it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from mok_service.errors import Conflict
from mok_service.exporters import digests_of, library
from mok_service.provenance.chain import float_from_bits

FILE: Final = "README.md"
_SHOWN: Final = ("hidden_size", "layers", "heads", "kv_heads", "head_size", "experts", "top_k", "expert_intermediate_size",
                 "shared_expert_intermediate_size", "vocabulary_size")


def write_card(record: Mapping[str, Any], to: str) -> dict[str, Any]:
    """Write the card into a new file; into a folder that is there, as README.md. Raises Conflict for a file that is there, and
    for a run that has not succeeded, which has no model."""
    made = card(record)
    path = Path(to) / FILE if Path(to).is_dir() else Path(to)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(made.content)
    except FileExistsError:
        raise Conflict(f"{path} is there already; choose another file", file=str(path)) from None
    return {"run": record["identity"]["run"], "format": "model-card", "to": str(path)}


def card(record: Mapping[str, Any]) -> Any:
    """The card, as Hugging Face's own ModelCard. It states no license and no use: those are its owner's to say."""
    identity = record["identity"]
    if record["final"] is None:
        raise Conflict(f"{identity['run']} is {identity['status']}: only a run that succeeded has a model", run=identity["run"],
                       status=identity["status"])
    hub, digests = library("huggingface_hub"), digests_of(record)
    data = hub.ModelCardData(
        library_name="mok-service", pipeline_tag="text-generation", tags=["mixture-of-experts", "moe", "deterministic-training"],
        mok={"run": identity["run"], "arithmetic": record["arithmetic"]["name"], "seed": record["seeds"]["seed"],
             **{f"{name}_digest": digest for name, digest in digests.items()}},
    )
    return hub.ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(_text(record, digests)) + "\n")


def _text(record: Mapping[str, Any], digests: Mapping[str, str]) -> Iterator[str]:
    identity, training = record["identity"], record["spec"]["training"]
    model, batch, optimizer, chain = training["model"], training["batch"], training["optimizer"], record["chain"]
    yield f"# {_cell(training['name'])}"
    yield ""
    yield (f"A decoder-only Mixture-of-Experts language model, trained by MoK service in {training['steps']} steps. "
           "Training it again from the same spec and data gives the same weights, bit for bit.")
    yield from _table("Model", [(name.replace("_", " "), model[name]) for name in _SHOWN if model[name] is not None])
    yield from _table("Training", [
        ("steps", training["steps"]), ("sequences in a step", batch["sequences"]),
        ("tokens in a sequence", training["sequence_length"]), ("precision", training["precision"]),
        ("learning rate", optimizer["lr"]), ("schedule", optimizer["schedule"]), ("weight decay", optimizer["weight_decay"]),
        ("seed", record["seeds"]["seed"]), ("arithmetic", record["arithmetic"]["name"]),
        ("started from", "random weights" if training["init_from"] is None else training["init_from"]["source"]),
        ("loss of the last step", _loss(chain["records"][-1]["body"]["loss"])),
    ])
    manifest = record["data"]["manifest"]
    yield from _table("Data", [("source", manifest["source"]), ("files", len(manifest["files"])), ("tokens", manifest["tokens"]),
                               ("tokenizer", manifest["tokenizer"]), ("order", manifest["order"])])
    yield from _table("What proves it", [
        ("run", identity["run"]), *digests.items(),
        *((f"verification by {v['level']}", v["verdict"] or "under way") for v in record["verifications"]),
    ])
    yield ("\nThe digest of the weights is that of the named tensors, whatever file holds them (docs/provenance.md of "
           "MoK service).")
    yield f"`mok verify {identity['run']}` checks the record, its signature and the checkpoints; `--level rerun` trains it again."
    yield "\n## Use, limits, license\n\nNothing is stated here: the record doesn't know."


def _table(title: str, rows: list[tuple[str, Any]]) -> Iterator[str]:
    yield f"\n## {title}\n\n| | |\n| --- | --- |"
    for name, value in rows:
        yield f"| {name} | {_cell(value)} |"


def _loss(bits: str | None) -> str:
    return "-" if bits is None else f"{float_from_bits(bits):.6g} (bits {bits})"


def _cell(value: Any) -> str:
    """Text from a spec in Markdown: it can end no cell, and is no markup."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>#|" else c for c in str(value))
