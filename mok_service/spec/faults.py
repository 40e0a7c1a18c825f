"""What is wrong with a spec, said so that its author can mend it: field, value, problem, what is allowed, nearest key."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypedDict, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mok_service.errors import InvalidSpec
from mok_service.spec.schema import Rule

VALUE_LENGTH_MAX: Final = 80
MESSAGE_FAULTS_MAX: Final = 5
FAULTS_MAX: Final = 100

# What other trainers call our keys and words; difflib finds misspellings, not synonyms.
_ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "learning_rate": ("lr",), "max_lr": ("lr",), "min_lr": ("min_lr_ratio",), "adam_beta1": ("beta1",), "adam_beta2": ("beta2",),
    "betas": ("beta1",), "eps": ("epsilon", "norm_epsilon"), "adam_epsilon": ("epsilon",), "wd": ("weight_decay",),
    "warmup": ("warmup_steps",), "lr_scheduler_type": ("schedule",), "grad_clip": ("max_norm",), "max_grad_norm": ("max_norm",),
    "d_model": ("hidden_size",), "n_embd": ("hidden_size",), "num_layers": ("layers",), "n_layer": ("layers",),
    "num_hidden_layers": ("layers",), "n_head": ("heads",), "num_attention_heads": ("heads",),
    "num_key_value_heads": ("kv_heads",), "head_dim": ("head_size",), "num_experts": ("experts",),
    "num_local_experts": ("experts",), "num_experts_per_tok": ("top_k",),
    "intermediate_size": ("expert_intermediate_size",), "moe_intermediate_size": ("expert_intermediate_size",),
    "vocab_size": ("vocabulary_size",), "rope_theta": ("rope_base",), "rms_norm_eps": ("norm_epsilon",),
    "norm_topk_prob": ("renormalise_top_k",), "router_aux_loss_coef": ("aux_loss_coefficient",),
    "tie_word_embeddings": ("tie_embeddings",), "seq_len": ("sequence_length",), "seq_length": ("sequence_length",),
    "max_length": ("sequence_length",), "block_size": ("sequence_length",), "context_length": ("sequence_length",),
    "batch_size": ("sequences", "batch"), "max_steps": ("steps",), "num_steps": ("steps",), "iterations": ("steps",),
    "dtype": ("precision",), "random_seed": ("seed",), "dataset": ("data", "source"), "files": ("paths",),
    "gradient_accumulation_steps": ("micro_batches",), "gpus": ("count",), "num_gpus": ("count",), "devices": ("count",),
    "num_threads": ("threads",), "save_steps": ("checkpoint_interval",), "retries": ("max_attempts",),
    "gpu": ("cuda",), "float32": ("fp32",), "bfloat16": ("bf16",),
}

_NOTHING: Final = object()
_KINDS: Final[tuple[tuple[type, str], ...]] = (
    (bool, "a boolean"), (int, "a whole number"), (float, "a floating-point number"), (str, "a string"), (list, "a list"),
    (tuple, "a list"), (Mapping, "a mapping"),
)

Loc = tuple[int | str, ...]  # where something is, as pydantic says it: ("training", "data", "paths", 0)


class Fault(TypedDict):
    """One entry of `InvalidSpec.detail["errors"]`."""

    field: str           # dotted path from the root, list items as [0]; "" is the whole spec
    value: str | None    # as JSON, shortened; None where there is none
    problem: str
    allowed: str
    nearest: str | None  # a known key, or an allowed word, that was probably meant


def fault(field: str, problem: str, allowed: str, value: Any = _NOTHING, nearest: str | None = None) -> Fault:
    """One fault, its value (where there is one) shown as shortened JSON."""
    text = None if value is _NOTHING else shown(value)
    return Fault(field=field, value=text, problem=problem, allowed=allowed, nearest=nearest)


def invalid(faults: Sequence[Fault]) -> InvalidSpec:
    """The error to raise for at least one fault: all of them (at most FAULTS_MAX) in its detail, the first few in its message."""
    assert faults, "an error needs a fault"
    faults = faults[:FAULTS_MAX]
    more = len(faults) - MESSAGE_FAULTS_MAX
    lines = [sentence(item) for item in faults[:MESSAGE_FAULTS_MAX]] + ([f"and {more} more"] if more > 0 else [])
    return InvalidSpec("the job spec is invalid: " + "; ".join(lines), errors=[dict(item) for item in faults])


def sentence(item: Fault) -> str:
    """One fault in words, e.g. `training.steps = 0 is too small (allowed: a whole number from 1 to 100000000)`."""
    value = f" = {item['value']}" if item["field"] and item["value"] is not None else ""
    meant = "" if item["nearest"] is None else f", did you mean {item['nearest']}?"
    return f"{item['field'] or 'the spec'}{value} {item['problem']}{meant} (allowed: {item['allowed']})"


def shown(value: Any) -> str:
    """A value as JSON of at most VALUE_LENGTH_MAX characters; lone surrogates are escaped, so it can always be encoded."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"a whole number of {value.bit_length()} bits"
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError):  # keys that JSON can't have, cycles, numbers with thousands of digits further down
        text = f"a {type(value).__name__}"
    text = "".join(c if c.isprintable() or "\ud800" <= c <= "\udfff" else f"\\u{ord(c):04x}" for c in text[:VALUE_LENGTH_MAX + 1])
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= VALUE_LENGTH_MAX else text[: VALUE_LENGTH_MAX - 3] + "..."


def from_validation(error: ValidationError, root: type[BaseModel]) -> list[Fault]:
    """The faults in a pydantic error that came from validating `root`, in the order of its fields; at most about FAULTS_MAX."""
    details = error.errors(include_url=False)
    missing: dict[Loc, list[str]] = {}  # per model with presets
    for item in details:
        model = _model_at(item["loc"][:-1], root)
        if item["type"] == "missing" and model is not None and "preset" in model.model_fields:
            missing.setdefault(item["loc"][:-1], []).append(str(item["loc"][-1]))
    faults: list[Fault] = []
    for item in details[:FAULTS_MAX]:
        keys = missing.get(item["loc"][:-1], []) if item["type"] == "missing" else []
        if not keys:
            faults.extend(_translate(item, root))
        elif keys[0] == item["loc"][-1]:
            faults.extend(_no_shape((*item["loc"][:-1], "preset"), keys, root, {other["loc"] for other in details}))
    return faults


def _no_shape(loc: Loc, keys: Sequence[str], root: type[BaseModel], at_fault: set[Loc]) -> list[Fault]:
    """One fault for all keys that neither the spec nor a preset gives; none where the preset itself is at fault."""
    field = _field_at(loc, root)
    assert field is not None, "a model with presets has the field preset"
    return [] if loc in at_fault else [fault(dotted(loc), f"is required, or else {', '.join(keys)}", describe(field))]


def _translate(item: ErrorDetails, root: type[BaseModel]) -> list[Fault]:
    """One pydantic error as faults; a model's broken rules are several."""
    loc, value, kind, context = item["loc"], item["input"], item["type"], item.get("ctx", {})
    path = dotted(loc)
    if kind == "mok_rules":
        return [_rule_fault(rule, loc, value) for rule in context["rules"]]
    if kind == "mok_value":
        return [fault(path, context["problem"], context["allowed"], _NOTHING if context["secret"] else value)]
    if kind in ("extra_forbidden", "invalid_key"):
        return [_unknown_key(loc, value, root)]
    field = _field_at(loc, root)
    allowed = _mapping_of(root) if not loc else item["msg"] if field is None else describe(field, loc)
    if kind == "missing":
        return [fault(path, "is required", allowed)]
    return [fault(path, _problem(kind, value), allowed, value, nearest=_nearest_word(field, value))]


def _problem(kind: str, value: Any) -> str:
    if kind in ("greater_than_equal", "greater_than"):
        return "is too small"
    if kind in ("less_than_equal", "less_than"):
        return "is too large"
    if kind == "finite_number" or (isinstance(value, float) and value - value != 0.0):
        return "isn't finite"
    if kind in ("string_too_short", "string_too_long"):
        return f"has {len(value)} characters"
    if kind == "too_long":
        return f"has {len(value)} entries"
    if kind == "literal_error" and isinstance(value, str):
        return "isn't known"
    if kind == "float_type" and isinstance(value, int) and not isinstance(value, bool):
        return "is too large"
    if kind.endswith("_type") or kind == "literal_error":
        return "has no value" if value is None else f"is {kind_of(value)}"
    return "isn't allowed"


def kind_of(value: Any) -> str:
    """What a value is, in the words of YAML and JSON."""
    return next((words for type_, words in _KINDS if isinstance(value, type_)), f"a {type(value).__name__}")


def dotted(loc: Sequence[int | str]) -> str:
    """A pydantic location as a dotted path: ("data", "paths", 0) is data.paths[0]."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{shown(part)[1:-1]}" for part in loc)
    return text.removeprefix(".")


def _rule_fault(rule: Rule, loc: Loc, model: Any) -> Fault:
    """A broken rule of the model at `loc`; its value is read from the input, which may be a mapping or a model."""
    value = model
    for key in rule.field.split("."):
        value = value.get(key, _NOTHING) if isinstance(value, Mapping) else getattr(value, key, _NOTHING)
    return fault(dotted((*loc, *rule.field.split("."))), rule.problem, rule.allowed, value)


def _unknown_key(loc: Loc, value: Any, root: type[BaseModel]) -> Fault:
    model = _model_at(loc[:-1], root)
    known = list(model.model_fields) if model is not None else []
    return fault(dotted(loc), "is no known key", f"the keys {', '.join(known)}", value,
                 nearest=_nearest_key(str(loc[-1]), known, root))


def _nearest_key(key: str, known: Sequence[str], root: type[BaseModel]) -> str | None:
    """The key that was meant: of the same mapping if one is near, else the dotted path of one that lies elsewhere."""
    lowered = key.lower().replace("-", "_")
    candidates = _ALIASES.get(lowered, ())
    here = [name for name in (*candidates, *difflib.get_close_matches(lowered, known, n=1)) if name in known]
    if here:
        return here[0]
    elsewhere = list(_paths(root))
    return next((path for name in (lowered, *candidates) for path in elsewhere if path.rpartition(".")[2] == name), None)


def _paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted path of every key below `model`."""
    paths = []
    for name, info in model.model_fields.items():
        paths.append(prefix + name)
        inner = _inner_model(info.annotation)
        if inner is not None:
            paths.extend(_paths(inner, f"{prefix}{name}."))
    return paths


def _nearest_word(field: FieldInfo | None, value: Any) -> str | None:
    if field is None or not isinstance(value, str):
        return None
    words = [word for part in _union(field.annotation) if get_origin(part) is Literal for word in get_args(part)]
    meant = (*_ALIASES.get(value.lower(), ()), *difflib.get_close_matches(value.lower(), words, n=1))
    return next((word for word in meant if word in words), None)


def describe(field: FieldInfo, loc: Loc = ()) -> str:
    """What a field takes, from its type and limits, e.g. `a whole number from 1 to 512, or null`."""
    if loc and isinstance(loc[-1], int):
        entry = _inner_model(field.annotation)
        return "a string" if entry is None else f"a URL, or {_mapping_of(entry)}"
    parts = _union(field.annotation)
    words = [_describe_type(part, field.metadata) for part in parts if part is not type(None)]
    return " or ".join(words) + (", or null" if type(None) in parts else "")


def _describe_type(annotation: Any, metadata: Sequence[Any]) -> str:
    if get_origin(annotation) is Literal:
        words = [str(word) for word in get_args(annotation)]
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    if annotation is bool:
        return "true or false"
    if annotation is int:
        return "a whole number" + _range(metadata)
    if annotation is float:
        return "a number" + _range(metadata)
    if get_origin(annotation) is tuple:
        longest = next((m.max_length for m in metadata if isinstance(m, MaxLen)), None)
        entries = "strings" if _inner_model(annotation) is None else "URLs"
        return f"a list of {entries}" + (f", at most {longest} of them" if longest is not None else "")
    inner = _inner_model(annotation)
    if inner is not None:
        return _mapping_of(inner)
    lengths = [m.min_length if isinstance(m, MinLen) else m.max_length for m in metadata if isinstance(m, (MinLen, MaxLen))]
    return f"a string of {lengths[0]} to {lengths[1]} characters" if len(lengths) == 2 else "a string"


def _range(metadata: Sequence[Any]) -> str:
    low = next((f" from {_number(m.ge)}" for m in metadata if isinstance(m, Ge)), "")
    above = next((f" above {_number(m.gt)}" for m in metadata if isinstance(m, Gt)), "")
    high = next((_number(m.le) for m in metadata if isinstance(m, Le)), "")
    return (low or above) + (high and (f" to {high}" if low else f" and up to {high}"))


def _number(value: Any) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _mapping_of(model: type[BaseModel]) -> str:
    return f"a mapping with the keys {', '.join(model.model_fields)}"


def _union(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model of a field, or of its list's entries."""
    parts = get_args(annotation) if get_origin(annotation) is tuple else _union(annotation)
    return next((part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)), None)


def _field_at(loc: Loc, root: type[BaseModel]) -> FieldInfo | None:
    """The field that a location leads to (for a list's entry the list), or None where that is no field of a model."""
    names = tuple(part for part in loc if isinstance(part, str))
    model = _model_at(names[:-1], root) if names else None
    return model.model_fields.get(names[-1]) if model is not None else None


def _model_at(loc: Loc, root: type[BaseModel]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = root
    for part in loc:
        if isinstance(part, int):
            continue  # an entry of a list, whose model `_inner_model` gave
        field = model.model_fields.get(part) if model is not None else None
        model = _inner_model(field.annotation) if field is not None else None
    return model
