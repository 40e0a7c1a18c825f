"""Every way in which a spec can be wrong is refused by the field's name, with what is allowed; cases 21 and 22."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mok_service.errors import InvalidSpec
from mok_service.spec import JobSpec, load_job, parse_job
from mok_service.spec.faults import FAULTS_MAX, VALUE_LENGTH_MAX
from mok_service.spec.schema import ExecutionSpec, OptimizerSpec
from tests.spec.examples import SMALL, faults_of, message_of, small

SEEDS = "a whole number from 0 to 9223372036854775807, or null"


@pytest.mark.parametrize("seed", [0, 2**53 + 1, 2**63 - 1])
def test_a_seed_is_kept_exactly(seed: int) -> None:
    assert parse_job(small(training__seed=seed)).training.seed == seed
    text = json.dumps(small(training__seed=seed))
    for spec in (load_job(text, "json"), load_job(text, "yaml")):
        assert spec.training.seed == seed
        assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("seed", "sentence"),
    [
        (2**63, f"training.seed = 9223372036854775808 is too large (allowed: {SEEDS})"),
        (-1, f"training.seed = -1 is too small (allowed: {SEEDS})"),
        ("7", f'training.seed = "7" is a string (allowed: {SEEDS})'),
        (7.0, f"training.seed = 7.0 is a floating-point number (allowed: {SEEDS})"),
        (True, f"training.seed = true is a boolean (allowed: {SEEDS})"),
        (2**2000, f"training.seed = a whole number of 2001 bits is too large (allowed: {SEEDS})"),
        (math.inf, f"training.seed = Infinity isn't finite (allowed: {SEEDS})"),
        ([7], f"training.seed = [7] is a list (allowed: {SEEDS})"),
    ],
)
def test_what_is_no_seed_is_refused(seed: object, sentence: str) -> None:
    assert message_of(small(training__seed=seed)) == sentence


@pytest.mark.parametrize(
    ("where", "key", "nearest"),
    [
        ("training__optimizer", "learning_rate", "lr"),
        ("training__optimizer", "weight-decay", "weight_decay"),
        ("training__optimizer", "eps", "epsilon"),
        ("training__model", "eps", "norm_epsilon"),
        ("training__model", "num_experts", "experts"),
        ("training__model", "hiden_size", "hidden_size"),
        ("training__model", "rope_theta", "rope_base"),
        ("training__batch", "batch_size", "sequences"),
        ("training", "batch_size", "batch"),
        ("training", "Steps", "steps"),
        ("training", "lr", "training.optimizer.lr"),
        ("training", "max_length", "sequence_length"),
        ("training", "threads", "execution.threads"),
        ("training__data", "path", "paths"),
        ("execution", "gpus", "count"),
        ("execution", "seed", "training.seed"),
        ("execution", "qqq", None),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(where: str, key: str, nearest: str | None) -> None:
    [fault] = faults_of(small(**{f"{where}__{key}": 1}))
    assert fault["field"] == f"{where.replace('__', '.')}.{key}"
    assert (fault["problem"], fault["value"], fault["nearest"]) == ("is no known key", "1", nearest)


def test_the_sentence_for_an_unknown_key_reads_well() -> None:
    assert message_of(small(training__optimizer__learning_rate=0.001)) == (
        "training.optimizer.learning_rate = 0.001 is no known key, did you mean lr? (allowed: the keys lr, beta1, beta2, "
        "epsilon, weight_decay, warmup_steps, schedule, min_lr_ratio, clipping, max_norm)"
    )
    assert message_of(SMALL | {"trainnig": 1}) == (
        "trainnig = 1 is no known key, did you mean training? (allowed: the keys training, execution)"
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"training__steps": 0}, "training.steps = 0 is too small (allowed: a whole number from 1 to 100000000)"),
        ({"training__steps": None}, "training.steps = null has no value (allowed: a whole number from 1 to 100000000)"),
        ({"training__name": ""}, 'training.name = "" has 0 characters (allowed: a string of 1 to 100 characters)'),
        (
            {"training__name": "a\nb"},
            r'training.name = "a\nb" isn' "'t printable text (allowed: 1 to 100 printable characters, not only spaces)",
        ),
        ({"training__precision": "fp16"}, 'training.precision = "fp16" isn\'t known, did you mean bf16? (allowed: fp32 or bf16)'),
        ({"training__arithmetic": "mok-2"}, 'training.arithmetic = "mok-2" isn\'t known, did you mean mok-1? (allowed: mok-1)'),
        ({"training__model__tie_embeddings": 1}, "training.model.tie_embeddings = 1 is a whole number (allowed: true or false)"),
        (
            {"training__model__rope_base": 1.5},
            "training.model.rope_base = 1.5 is too small (allowed: a number from 2 to 1000000000000)",
        ),
        ({"training__optimizer__lr": 0}, "training.optimizer.lr = 0 is too small (allowed: a number above 0 and up to 10)"),
        (
            {"training__optimizer__lr": math.nan},
            "training.optimizer.lr = NaN isn't finite (allowed: a number above 0 and up to 10)",
        ),
        (
            {"training__optimizer__lr": 10**400},
            "training.optimizer.lr = a whole number of 1329 bits is too large (allowed: a number above 0 and up to 10)",
        ),
        (
            {"training__optimizer__lr": "1e-4"},
            'training.optimizer.lr = "1e-4" is a string (allowed: a number above 0 and up to 10)',
        ),
        (
            {"training__model__shared_expert_intermediate_size": 0},
            "training.model.shared_expert_intermediate_size = 0 is too small (allowed: a whole number from 1 to 262144, or null)",
        ),
        (
            {"training__data": "stdlib"},
            'training.data = "stdlib" is a string (allowed: a mapping with the keys source, paths, urls, tokenizer, '
            "max_bytes)",
        ),
        (
            {"training__data__paths": "a.txt"},
            'training.data.paths = "a.txt" is a string (allowed: a list of strings, at most 1000 of them)',
        ),
        (
            {"training__data__source": "files", "training__data__paths": ["a", 1]},
            "training.data.paths[1] = 1 is a whole number (allowed: a string)",
        ),
        (
            {"training__init_from": "run_1@2"},
            'training.init_from = "run_1@2" is a string (allowed: a mapping with the keys source, weights, or null)',
        ),
        (
            {"execution": None},
            "execution = null has no value (allowed: a mapping with the keys device, count, threads, micro_batches, "
            "checkpoint_interval, queue_deadline_seconds, run_deadline_seconds, max_attempts, priority)",
        ),
        ({"execution__device": "gpu"}, 'execution.device = "gpu" isn\'t known, did you mean cuda? (allowed: cpu or cuda)'),
    ],
)
def test_a_wrong_value_is_refused(changes: dict[str, Any], sentence: str) -> None:
    assert message_of(small(**changes)) == sentence


@pytest.mark.parametrize(
    ("changes", "field", "problem", "allowed"),
    [
        (
            {"training__model__kv_heads": 3},
            "training.model.kv_heads",
            "doesn't divide the number of query heads, 8",
            "a divisor of 8",
        ),
        (
            {"training__model__head_size": 31},
            "training.model.head_size",
            "is odd, and rotary embedding needs pairs",
            "an even number",
        ),
        ({"training__model__top_k": 9}, "training.model.top_k", "is more than the 8 experts", "at most 8"),
        (
            {"training__batch__shards": 5},
            "training.batch.shards",
            "doesn't divide the number of groups, 1 (8 sequences in groups of 8)",
            "a divisor of 1",
        ),
        (
            {"training__batch__shards": 2, "training__batch__group_sequences": 3},
            "training.batch.shards",
            "doesn't divide the number of groups, 3 (8 sequences in groups of 3)",
            "a divisor of 3",
        ),
        (
            {"training__batch__group_sequences": 9},
            "training.batch.group_sequences",
            "is more than the 8 sequences of a batch",
            "at most 8",
        ),
        (
            {"training__batch__sequences": 2**20, "training__sequence_length": 1024},
            "training.batch.sequences",
            "makes 2163212288 expert rows a step (sequences x sequence_length x top_k and padding)",
            "a batch of at most 2147483647 rows, which are numbered in 32 bits",
        ),
        ({"training__optimizer__warmup_steps": 61}, "training.optimizer.warmup_steps", "is more than the 60 steps", "at most 60"),
        (
            {"training__model__vocabulary_size": 257},
            "training.model.vocabulary_size",
            "is too small for the tokenizer bytes",
            "at least 258: 256 bytes, end of text and padding",
        ),
        (
            {"training__data__source": "files"},
            "training.data.paths",
            "is empty",
            "at least one path or URL when the source is files",
        ),
        (
            {"training__data__paths": ["a"]},
            "training.data.paths",
            "has no meaning for the source python-stdlib",
            "an empty list, or the source files",
        ),
        ({"execution__count": 2}, "execution.count", "doesn't divide training.batch.shards, 1", "a divisor of 1"),
        (
            {"training__batch__group_sequences": 2, "execution__micro_batches": 3},
            "execution.micro_batches",
            "doesn't divide the number of groups, 4",
            "a divisor of 4",
        ),
    ],
)
def test_a_rule_that_joins_fields_is_checked(changes: dict[str, Any], field: str, problem: str, allowed: str) -> None:
    [fault] = faults_of(small(**changes))
    assert (fault["field"], fault["problem"], fault["allowed"]) == (field, problem, allowed)


def test_the_limits_themselves_are_allowed() -> None:
    spec = small(
        training__model__vocabulary_size=258,
        training__model__top_k=8,
        training__optimizer__warmup_steps=60,
        training__batch__shards=4,
        training__batch__group_sequences=2,
        execution__count=4,
        execution__micro_batches=4,
    )
    assert parse_job(spec).training.model.top_k == 8


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../a", "a/../b", "a//b", "./a", "a/", "a\\b", "C:/a", "a\0b", "a\nb", "\ud800", "x" * 1001]
)
def test_a_path_that_could_leave_its_root_is_refused(path: str) -> None:
    [fault] = faults_of(small(training__data__source="files", training__data__paths=["ok.txt", path]))
    assert fault["field"] == "training.data.paths[1]" and "relative path below a data root" in fault["allowed"]
    if path:
        assert [f["field"] for f in faults_of(small(training__data__tokenizer=path + "/t.json"))] == [
            "training.data.tokenizer"
        ] or path in ("a/", "x" * 1001)
        assert [f["field"] for f in faults_of(small(training__init_from={"source": path}))] == ["training.init_from.source"]


@pytest.mark.parametrize(
    ("source", "weights", "ok"),
    [
        ("run_0198c0de5e1f7000800000000000c0de@40", None, True),
        ("run_0198c0de5e1f7000800000000000c0de@0", "sha256:" + "0" * 64, True),
        ("checkpoints/step-40", None, True),
        ("run_0198c0de5e1f7000800000000000c0de@040", None, False),
        ("run_0198@40", None, False),
        ("checkpoints/step-40", "sha256:" + "0" * 63, False),
        ("checkpoints/step-40", "blake3:" + "0" * 64, False),
    ],
)
def test_where_weights_may_come_from(source: str, weights: str | None, ok: bool) -> None:
    spec = small(training__init_from={"source": source, "weights": weights})
    if ok:
        assert parse_job(spec).training.init_from is not None
    else:
        assert len(faults_of(spec)) == 1


def test_all_faults_are_collected() -> None:
    spec = small(
        training__seed="7", training__model__head_size=31, training__optimizer={"learning_rate": 1, "beta1": 1}, execution=[]
    )
    del spec["training"]["steps"]
    assert [fault["field"] for fault in faults_of(spec)] == [
        "training.seed",
        "training.model.head_size",
        "training.optimizer.beta1",
        "training.optimizer.learning_rate",
        "training.steps",
        "execution",
    ]


def test_a_missing_model_shape_is_one_fault() -> None:
    [fault] = faults_of(small(training__model={"top_k": 2}))
    assert fault["field"] == "training.model.preset"
    assert fault["problem"] == (
        "is required, or else hidden_size, layers, heads, kv_heads, head_size, experts, expert_intermediate_size, vocabulary_size"
    )
    [fault] = faults_of(small(training__model={"preset": "olmoe"}))
    assert (fault["field"], fault["nearest"]) == ("training.model.preset", "olmoe-1b-7b")


@pytest.mark.parametrize(
    "spec", [None, [], "training", 3, True, {}, {"training": {}}, {3: 4}, {"": {}}, {"training": {"a.b": {"c": 1}}}]
)
def test_what_is_no_job_at_all_is_refused(spec: object) -> None:
    faults_of(spec)


def test_a_fault_is_short_and_can_be_written_as_utf8() -> None:
    faults = faults_of({"training": {"name": "\ud800" * 500, "k\ud800\x1b": 1, "x" * 5000: "y" * 5000}, "報告": [1] * 1000})
    for fault in faults:
        for text in fault.values():
            assert text is None or (text.encode() and "\x1b" not in text)
        assert len(fault["value"] or "") <= VALUE_LENGTH_MAX and len(fault["field"]) <= 200
    assert any(fault["field"] == "報告" for fault in faults)


def test_so_many_faults_are_counted_not_listed() -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_job({"training": {f"key{i}": i for i in range(5000)}})
    assert len(caught.value.detail["errors"]) == FAULTS_MAX
    assert caught.value.message.endswith("and 95 more")
    assert (caught.value.http_status, caught.value.exit_status) == (422, 2)


def test_models_are_frozen_and_hashable() -> None:
    spec = parse_job(SMALL)
    assert hash(spec) == hash(parse_job(SMALL))
    with pytest.raises(ValueError, match="frozen"):
        spec.training.optimizer.lr = 1.0


def test_defaults_are_within_their_limits() -> None:
    for model in (OptimizerSpec, ExecutionSpec):
        assert model.model_validate(model().model_dump()) == model()


HTTPS = "https://data.example/a.txt"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("a.txt", "isn't a URL"),
        ("gs://bucket/a.txt", "has the scheme gs"),
        ("file:///etc/passwd", "has the scheme file"),
        ("memory://a/b", "has the scheme memory"),
        ("simplecache::s3://bucket/a", "isn't a URL"),
        ("https://u:hunter2@data.example/a", "holds a user name or a password"),
        ("https://data.example/a?token=hunter2", "has a query string, which may hold a secret and would be kept on record"),
        ("https://data.example/a#x", "has a fragment"),
        ("https://data.example/a/../b", "has a . or .. part"),
        ("https://data.example/a/%2E%2e/b", "has an encoded slash, backslash, dot, percent sign or NUL, or a percent sign that "
                                            "encodes nothing"),
        ("https://data.example/a%252fb", "has an encoded slash, backslash, dot, percent sign or NUL, or a percent sign that "
                                         "encodes nothing"),
        ("https://data.example/a%", "has an encoded slash, backslash, dot, percent sign or NUL, or a percent sign that "
                                    "encodes nothing"),
        ("https://data.example\\@evil.example/a", "isn't 1 to 2000 printable ASCII characters without spaces and backslashes"),
        ("https://data.example/a b", "isn't 1 to 2000 printable ASCII characters without spaces and backslashes"),
        ("https://dätä.example/a", "isn't 1 to 2000 printable ASCII characters without spaces and backslashes"),
        ("https:///a", "has no usable host"),
        ("https://data.example:65536/a", "has no usable host"),
        ("https://data.example:0443/a", "has no usable host"),
        ("s3://bucket:9000/a", "has no usable bucket"),
        ("s3://b/a", "has no usable bucket"),
        ("HTTPS://Data.example:443/a", "isn't in normal form"),
        ("https://data.example", "isn't in normal form"),
        ("s3://bucket/", "names no file"),
    ],
)  # fmt: skip
def test_a_url_that_could_be_read_in_two_ways_is_refused(url: str, problem: str) -> None:
    [fault] = faults_of(small(training__data={"source": "files", "urls": [HTTPS, url]}))
    assert (fault["field"], fault["problem"]) == ("training.data.urls[1].url", problem)
    assert "hunter2" not in json.dumps(fault)
    if problem == "isn't in normal form":
        assert fault["allowed"] in ("https://data.example/a, which is the same", "https://data.example/, which is the same")


@pytest.mark.parametrize(
    ("urls", "sentence"),
    [
        ([3], "training.data.urls[0] = 3 is a whole number (allowed: a URL, or a mapping with the keys url, sha256, size)"),
        ([{}], "training.data.urls[0].url is required (allowed: a string)"),
        (HTTPS, f'training.data.urls = "{HTTPS}" is a string (allowed: a list of URLs, at most 1000 of them)'),
        ([{"url": HTTPS, "sha": "0"}], 'training.data.urls[0].sha = "0" is no known key, did you mean sha256? (allowed: the keys '
                                       "url, sha256, size)"),
        ([{"url": HTTPS, "sha256": "A" * 64}], f'training.data.urls[0].sha256 = "{"A" * 64}" isn\'t a SHA-256 (allowed: 64 '
                                               "lowercase hex digits, or null)"),
        ([HTTPS, HTTPS], f'training.data.urls = ["{HTTPS}", "{HTTPS}"] has a URL more than once (allowed: each URL once)'),
    ],
)  # fmt: skip
def test_what_is_no_remote_file_is_refused(urls: object, sentence: str) -> None:
    assert message_of(small(training__data={"source": "files", "urls": urls})) == sentence


def test_a_url_among_paths_is_told_where_it_belongs() -> None:
    message = message_of(small(training__data={"source": "files", "paths": ["https://u:hunter2@data.example/a"]}))
    assert "training.data.paths[0] is a URL" in message and "data.urls" in message and "hunter2" not in message
