"""The job specification: what may change a bit (`TrainingSpec`) and what may not (`ExecutionSpec`).

The values are frozen, and strict: "7", 7.0 and true are no whole numbers, unknown keys are refused. A rule that joins
several fields is checked by the smallest model that holds them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from mok_service.spec.presets import PRESETS, Preset
from mok_service.urls import SCHEMES, URL_LENGTH_MAX, BadUrl, normal_url

SEED_MAX: Final = 2**63 - 1
INT32_MAX: Final = 2**31 - 1
GROUP_TOKENS: Final = 8192      # about how many tokens a group has when the spec doesn't say
BYTES_VOCABULARY_MIN: Final = 258  # 256 bytes, end of text, padding
PATH_LENGTH_MAX: Final = 1000

_RUN_AT_STEP = re.compile(r"run_[0-9a-f]{32}@(0|[1-9][0-9]{0,8})")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Rule(NamedTuple):
    """One broken rule that joins several fields."""

    field: str    # dotted, below the model that found it
    problem: str  # a phrase that follows the value
    allowed: str


def refuse(problem: str, allowed: str, secret: bool = False) -> PydanticCustomError:
    """The error that a field's own validator raises. A `secret` value isn't shown."""
    return PydanticCustomError("mok_value", "{problem}", {"problem": problem, "allowed": allowed, "secret": secret})


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*")
    @classmethod
    def _no_negative_zero(cls, value: Any) -> Any:
        """-0.0 and 0.0 mean the same, so they must have the same digest."""
        return value + 0.0 if isinstance(value, float) else value

    def _rules(self) -> Iterator[Rule]:
        """The broken rules that join several fields."""
        yield from ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = tuple(self._rules())
        if broken:
            raise PydanticCustomError("mok_rules", "{count} broken rules", {"count": len(broken), "rules": broken})
        return self


def _relative_path(value: str) -> str:
    allowed = (f"a relative path below a data root, 1 to {PATH_LENGTH_MAX} printable characters, "
               "with forward slashes and without empty, . or .. parts")
    if "://" in value:
        raise refuse("is a URL", allowed + "; URLs of data belong in data.urls", secret=True)
    if not 1 <= len(value) <= PATH_LENGTH_MAX or not value.isprintable():
        raise refuse("isn't a usable path", allowed)
    if value.startswith("/") or "\\" in value or re.match("[A-Za-z]:", value):
        raise refuse("isn't a relative path with forward slashes", allowed)
    if any(part in ("", ".", "..") for part in value.split("/")):
        raise refuse("has an empty, . or .. part", allowed)
    return value


RelativePath = Annotated[str, AfterValidator(_relative_path)]


def _preset_or_shape(schema: dict[str, Any]) -> None:
    """In JSON Schema: the keys without a default are required only where no preset is given."""
    shape = schema.pop("required")
    schema["anyOf"] = [{"required": ["preset"], "properties": {"preset": {"type": "string"}}}, {"required": shape}]


class ModelSpec(_Spec):
    """A decoder-only Mixture-of-Experts transformer. A preset is expanded while the spec is read: equal shapes are equal."""

    model_config = ConfigDict(json_schema_extra=_preset_or_shape)

    preset: Preset | None = None
    """Fills in every key that isn't given. Always null once the spec has been read."""
    hidden_size: int = Field(ge=1, le=65_536)
    """Width of the residual stream."""
    layers: int = Field(ge=1, le=512)
    """Transformer layers."""
    heads: int = Field(ge=1, le=1024)
    """Query heads."""
    kv_heads: int = Field(ge=1, le=1024)
    """Key and value heads; divides `heads`."""
    head_size: int = Field(ge=2, le=1024)
    """Width of a head; even."""
    experts: int = Field(ge=1, le=4096)
    """Routed experts in each layer."""
    top_k: int = Field(ge=1, le=256)
    """Experts that each token is routed to."""
    expert_intermediate_size: int = Field(ge=1, le=262_144)
    """Inner width of a routed expert."""
    shared_expert_intermediate_size: int | None = Field(default=None, ge=1, le=262_144)
    """Inner width of the ungated expert that sees every token; null for none."""
    vocabulary_size: int = Field(ge=2, le=16_777_216)
    """Rows of the embedding and of the output layer."""
    rope_base: float = Field(default=10_000.0, ge=2.0, le=1e12)
    """Base of the rotary frequencies."""
    norm_epsilon: float = Field(default=1e-6, ge=1e-12, le=0.1)
    """Added to the mean square in every RMSNorm."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys: none, each head by itself, or all heads together."""
    renormalise_top_k: bool = True
    """Whether the weights of a token's experts are scaled to sum to 1."""
    aux_loss_coefficient: float = Field(default=0.0, ge=0.0, le=100.0)
    """Weight of the load-balancing loss; 0 for none."""
    z_loss_coefficient: float = Field(default=0.0, ge=0.0, le=100.0)
    """Weight of the router's z-loss; 0 for none."""
    tie_embeddings: bool = False
    """Whether the output layer is the embedding."""
    initializer_range: float = Field(default=0.02, gt=0.0, le=10.0)
    """Standard deviation of the initial weights."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("preset"), str) and data["preset"] in PRESETS:
            return {**PRESETS[data["preset"]], **data, "preset": None}
        return data

    def _rules(self) -> Iterator[Rule]:
        if self.heads % self.kv_heads:
            yield Rule("kv_heads", f"doesn't divide the number of query heads, {self.heads}", f"a divisor of {self.heads}")
        if self.head_size % 2:
            yield Rule("head_size", "is odd, and rotary embedding needs pairs", "an even number")
        if self.top_k > self.experts:
            yield Rule("top_k", f"is more than the {self.experts} experts", f"at most {self.experts}")


def _url_or_file(schema: dict[str, Any]) -> None:
    """In JSON Schema: an entry may be a URL in place of the mapping that has only it."""
    schema["items"] = {"anyOf": [{"type": "string"}, schema["items"]]}


class RemoteFile(_Spec):
    """A file at a URL. The URL alone may stand for it."""

    url: str
    """https://, http:// or s3://bucket/key, below a prefix that the service allows; without user name, query and fragment."""
    sha256: str | None = None
    """What the file's bytes must have, as sha256sum prints it; null for whatever the first attempt finds."""
    size: int | None = Field(default=None, ge=0, le=2**40)
    """How many bytes the file must have; null for any number."""

    @model_validator(mode="before")
    @classmethod
    def _url_alone(cls, data: Any) -> Any:
        return {"url": data} if isinstance(data, str) else data

    @field_validator("url")
    @classmethod
    def _normal_url(cls, value: str) -> str:
        allowed = (f"a URL of a file that begins with {', '.join(f'{scheme}://' for scheme in SCHEMES)}, at most "
                   f"{URL_LENGTH_MAX} characters, without user name, query, fragment and dot segments")
        try:
            normal = normal_url(value)
        except BadUrl as bad:
            raise refuse(bad.problem, allowed, bad.secret) from None
        if normal != value:
            raise refuse("isn't in normal form", f"{normal}, which is the same")
        if value.endswith("/"):
            raise refuse("names no file", allowed)
        return value

    @field_validator("sha256")
    @classmethod
    def _hex(cls, value: str | None) -> str | None:
        if value is not None and _SHA256.fullmatch(value) is None:
            raise refuse("isn't a SHA-256", "64 lowercase hex digits, or null")
        return value


class DataSpec(_Spec):
    """Where the training text comes from."""

    source: Literal["python-stdlib", "files"]
    """python-stdlib: the source files of Python's standard library. files: `paths` below the service's data roots, and `urls`."""
    paths: tuple[RelativePath, ...] = Field(default=(), strict=False, max_length=1000)
    """Relative paths and glob patterns; for source files only."""
    urls: tuple[RemoteFile, ...] = Field(default=(), strict=False, max_length=1000, json_schema_extra=_url_or_file)
    """Files at URLs that the service allows (docs/data.md); for source files only. No key of the document when there are none."""
    tokenizer: str = "bytes"
    """bytes (one token a byte), or the relative path of a tokenizer.json below a data root."""
    max_bytes: int | None = Field(default=None, ge=1, le=2**40)
    """Text is read up to this many bytes; null for all of it."""

    @field_validator("tokenizer")
    @classmethod
    def _tokenizer_path(cls, value: str) -> str:
        if value != "bytes" and not value.endswith(".json"):
            raise refuse("is no known tokenizer", "bytes, or the relative path of a tokenizer.json below a data root")
        return _relative_path(value)

    def _rules(self) -> Iterator[Rule]:
        if self.source == "files" and not self.paths and not self.urls:
            yield Rule("paths", "is empty", "at least one path or URL when the source is files")
        for name in ("paths", "urls"):
            if self.source != "files" and getattr(self, name):
                yield Rule(name, f"has no meaning for the source {self.source}", "an empty list, or the source files")
        if len({file.url for file in self.urls}) < len(self.urls):
            yield Rule("urls", "has a URL more than once", "each URL once")

    @model_serializer(mode="wrap")
    def _without_empty_urls(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Jobs without URLs keep the document, and so the digest, that they had before there were any."""
        value: dict[str, Any] = handler(self)
        if not self.urls:
            value.pop("urls", None)
        return value


class OptimizerSpec(_Spec):
    """AdamW, its learning-rate schedule and clipping (docs/arithmetic.md, 13)."""

    lr: float = Field(default=3e-4, gt=0.0, le=10.0)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0.0, le=0.999999)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0.0, le=0.999999)
    """Decay of the second moment."""
    epsilon: float = Field(default=1e-8, ge=1e-20, le=1.0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0.0, le=10.0)
    """Decoupled decay of the matrices; one-dimensional tensors have none."""
    warmup_steps: int = Field(default=0, ge=0, le=100_000_000)
    """Steps in which the rate rises from lr/warmup_steps to lr."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What follows the warm-up."""
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    """Where the cosine ends, as a share of lr."""
    clipping: Literal["none", "global", "previous"] = "global"
    """Scale gradients by max_norm over their norm: never, by this step's norm, or by that of the step before."""
    max_norm: float = Field(default=1.0, gt=0.0, le=1e6)
    """The norm above which gradients are scaled down."""


class BatchSpec(_Spec):
    """One step's sequences and how their sums are grouped. The grouping shows in the bits (docs/arithmetic.md, 15)."""

    sequences: int = Field(ge=1, le=1_048_576)
    """Sequences in a step."""
    group_sequences: int = Field(default=0, ge=0, le=1_048_576)
    """Sequences whose gradients are summed in one chain; 0 chooses about 8192 tokens. Never 0 in a resolved spec."""
    shards: int = Field(default=1, ge=1, le=4096)
    """Groups that are summed as a tree; devices divide it. Divides the number of groups."""


class InitFrom(_Spec):
    """The weights to start from, in place of random ones."""

    source: str
    """A checkpoint of an earlier run, run_<id>@<step>, or the relative path of a checkpoint folder below a data root."""
    weights: str | None = None
    """The digest that those weights must have; null until the source has been looked up."""

    @field_validator("source")
    @classmethod
    def _known_source(cls, value: str) -> str:
        if value.startswith("run_") and "@" in value:
            if _RUN_AT_STEP.fullmatch(value) is None:
                raise refuse("isn't a run and a step", "run_, 32 hex digits, @ and a step")
            return value
        return _relative_path(value)

    @field_validator("weights")
    @classmethod
    def _digest(cls, value: str | None) -> str | None:
        if value is not None and _DIGEST.fullmatch(value) is None:
            raise refuse("isn't a digest", "sha256: and 64 lowercase hex digits, or null")
        return value


class TrainingSpec(_Spec):
    """All that may change a bit, or the content of the record. Its digest is the job's identity."""

    name: str = Field(min_length=1, max_length=100)
    """What people call the job."""
    seed: int | None = Field(default=None, ge=0, le=SEED_MAX)
    """Every random stream starts from it; null lets the service draw one. Never null in a resolved spec."""
    arithmetic: Literal["mok-1"] = "mok-1"
    """The definition of every bit (docs/arithmetic.md)."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """What matrix products read; sums, weights and moments are fp32 in both."""
    model: ModelSpec
    data: DataSpec
    sequence_length: int = Field(ge=2, le=1_048_576)
    """Tokens in a sequence."""
    optimizer: OptimizerSpec = OptimizerSpec()
    batch: BatchSpec
    steps: int = Field(ge=1, le=100_000_000)
    """Optimizer steps."""
    digest_interval: int = Field(default=10, ge=1, le=100_000_000)
    """State digests are recorded every so many steps, and always for the first and the last."""
    init_from: InitFrom | None = None
    """Start from stored weights; null for random ones."""

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable() or not value.strip():
            raise refuse("isn't printable text", "1 to 100 printable characters, not only spaces")
        return value

    @property
    def group_sequences(self) -> int:
        """`batch.group_sequences`, or where that is 0 the default: the largest size of at most about GROUP_TOKENS tokens
        for which the shards divide the number of groups (without regard to shards if there is none)."""
        if self.batch.group_sequences:
            return self.batch.group_sequences
        largest = min(max(1, GROUP_TOKENS // self.sequence_length), self.batch.sequences)
        sizes = range(largest, 0, -1)
        return next((size for size in sizes if -(-self.batch.sequences // size) % self.batch.shards == 0), largest)

    @property
    def groups(self) -> int:
        """Groups in a step; the last may have fewer sequences."""
        return -(-self.batch.sequences // self.group_sequences)

    @property
    def waves(self) -> int:
        """How many times `batch.shards` groups make up a step."""
        return self.groups // self.batch.shards

    def _rules(self) -> Iterator[Rule]:
        yield from self._batch_rules()
        if self.optimizer.warmup_steps > self.steps:
            yield Rule("optimizer.warmup_steps", f"is more than the {self.steps} steps", f"at most {self.steps}")
        if self.data.tokenizer == "bytes" and self.model.vocabulary_size < BYTES_VOCABULARY_MIN:
            yield Rule("model.vocabulary_size", "is too small for the tokenizer bytes",
                       f"at least {BYTES_VOCABULARY_MIN}: 256 bytes, end of text and padding")

    def _batch_rules(self) -> Iterator[Rule]:
        if self.group_sequences > self.batch.sequences:
            yield Rule("batch.group_sequences", f"is more than the {self.batch.sequences} sequences of a batch",
                       f"at most {self.batch.sequences}")
        elif self.groups % self.batch.shards:
            yield Rule("batch.shards", f"doesn't divide the number of groups, {self.groups} "
                       f"({self.batch.sequences} sequences in groups of {self.group_sequences})", f"a divisor of {self.groups}")
        # Every (expert, group) segment is padded to a multiple of 16 rows (docs/arithmetic.md, 10.3).
        padding = 15 * self.model.experts * self.groups
        rows = self.batch.sequences * self.sequence_length * self.model.top_k + padding
        if rows > INT32_MAX:
            yield Rule("batch.sequences", f"makes {rows} expert rows a step (sequences x sequence_length x top_k and padding)",
                       f"a batch of at most {INT32_MAX} rows, which are numbered in 32 bits")


class ExecutionSpec(_Spec):
    """All that may not change a bit. It belongs to a run, and each run of a job may have its own."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Kind of device."""
    count: int = Field(default=1, ge=1, le=4096)
    """Devices; divides batch.shards."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads; 0 for all that the worker may use."""
    micro_batches: int = Field(default=0, ge=0, le=1_048_576)
    """Parts a step is computed in, each a whole number of groups; 0 chooses one a wave. Never 0 in a resolved spec."""
    checkpoint_interval: int = Field(default=100, ge=0, le=100_000_000)
    """Steps between checkpoints; 0 writes only the last."""
    queue_deadline_seconds: int = Field(default=86_400, ge=1, le=2_592_000)
    """A run that hasn't started by then fails."""
    run_deadline_seconds: int = Field(default=604_800, ge=1, le=31_536_000)
    """A run that has been going on for longer fails."""
    max_attempts: int = Field(default=3, ge=1, le=100)
    """Attempts before a run that keeps crashing fails."""
    priority: int = Field(default=0, ge=-100, le=100)
    """Higher runs start first."""


class JobSpec(_Spec):
    """A job: what to train, and how to execute its first run."""

    training: TrainingSpec
    execution: ExecutionSpec = ExecutionSpec()

    @property
    def micro_batches(self) -> int:
        """`execution.micro_batches`, or where that is 0 the default: one micro-batch a wave."""
        return self.execution.micro_batches or self.training.waves

    def _rules(self) -> Iterator[Rule]:
        shards, groups = self.training.batch.shards, self.training.groups
        if shards % self.execution.count:
            yield Rule("execution.count", f"doesn't divide training.batch.shards, {shards}", f"a divisor of {shards}")
        if groups % self.micro_batches:
            yield Rule("execution.micro_batches", f"doesn't divide the number of groups, {groups}", f"a divisor of {groups}")
