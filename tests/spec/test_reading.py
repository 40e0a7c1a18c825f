"""Texts: YAML by the rules of YAML 1.2, JSON without duplicate keys, limits on everything, and never another exception."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mok_service.errors import InvalidSpec
from mok_service.spec import load_job
from mok_service.spec.reading import DEPTH_MAX, NODES_MAX, TEXT_BYTES_MAX, read_json, read_yaml

Format = Literal["yaml", "json"]


def refusal(text: str | bytes, format: Format) -> str:
    with pytest.raises(InvalidSpec) as caught:
        load_job(text, format)
    assert caught.value.detail["errors"]
    return caught.value.message.removeprefix("the job spec is invalid: ")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # Where YAML 1.1 and 1.2 differ:
        ("1e-4", 1e-4),
        ("1e3", 1000.0),
        ("1.5e3", 1500.0),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("Yes", "Yes"),
        ("y", "y"),
        ("0123", 123),
        ("0o17", 15),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("2026-12-01", "2026-12-01"),
        ("=", "="),
        # Where they don't:
        ("7", 7),
        ("-7", -7),
        ("+7", 7),
        ("0x1F", 31),
        ("7.0", 7.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-0.0", -0.0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ('"7"', "7"),
        ("'true'", "true"),
        ("tRue", "tRue"),
        ("1e", "1e"),
        (".", "."),
        ("- ", [None]),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("1e400", math.inf),
        ("9223372036854775808", 2**63),
        ("0x", "0x"),
        ("|\n  7", "7"),
        ("[1, a, {b: no}]", [1, "a", {"b": "no"}]),
        ("a: 1\nb:\n  - 2.5\n  - x: ~\n", {"a": 1, "b": [2.5, {"x": None}]}),
        ("<<: 1", {"<<": 1}),
        ("%YAML 1.2\n---\n3", 3),
        ("3\n...\n", 3),
        ("\ufeff3", 3),
        ("報告: 🚀", {"報告": "🚀"}),
        ("# only a comment", None),
    ],
)
def test_yaml_is_read_by_the_rules_of_1_2(text: str, value: Any) -> None:
    got = read_yaml(text)
    assert (type(got), got) == (type(value), value)
    if isinstance(value, float):
        assert math.copysign(1, got) == math.copysign(1, value)


def test_not_a_number_is_read_for_the_field_to_refuse() -> None:
    assert math.isnan(read_yaml(".nan")) and math.isnan(read_json("NaN"))
    texts: list[tuple[Format, str]] = [
        ("yaml", "training: {optimizer: {lr: .nan, beta1: -.inf, beta2: 1e400}}"),
        ("json", '{"training": {"optimizer": {"lr": NaN, "beta1": -Infinity, "beta2": 1e400}}}'),
    ]
    for format, text in texts:
        with pytest.raises(InvalidSpec) as caught:
            load_job(text, format)
        problems = {fault["field"]: (fault["value"], fault["problem"]) for fault in caught.value.detail["errors"]}
        assert problems["training.optimizer.lr"] == ("NaN", "isn't finite")
        assert problems["training.optimizer.beta1"] == ("-Infinity", "isn't finite")
        assert problems["training.optimizer.beta2"] == ("Infinity", "isn't finite")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "b.c is given more than once (allowed: each key once)"),
        ("a: &x 1\nb: *x\n", "the spec isn't readable at line 1, column 4: anchors aren't allowed in a job spec"),
        ("a: *x", "the spec isn't readable at line 1, column 4: aliases aren't allowed in a job spec"),
        ("a: !!int 3", "the spec isn't readable at line 1, column 4: tags such as tag:yaml.org,2002:int aren't allowed"),
        ("a: !!python/object:os.system x", "the spec isn't readable at line 1, column 4: tags such as"),
        ("? [a]\n: 1", "the spec isn't readable at line 1, column 3: the key ['a'] isn't a string"),
        ("1: 2", "the spec isn't readable at line 1, column 1: the key 1 isn't a string"),
        ("no: 1\nnull: 2", "the spec isn't readable at line 2, column 1: the key None isn't a string"),
        ("%YAML 1.1\n---\na: 1", "the spec isn't readable at line 2, column 1: YAML 1.1 is declared; write YAML 1.2"),
        ("a: 1\n---\nb: 2", "the spec isn't readable at line 2, column 1: a second document begins here"),
        ("a:\n\t- 1", "the spec isn't readable at line 2, column 1: found character '\\t' that cannot start any token"),
        ("a: [1", "the spec isn't readable at line 1, column 6:"),
        ("a: \x01", "the spec isn't readable at line 1, column 1: unacceptable character #x0001"),
        ("", "the spec has no value"),
        ("a", "the spec is a string"),
        ("- training", "the spec is a list"),
    ],
)
def test_yaml_that_is_refused(text: str, sentence: str) -> None:
    assert refusal(text, "yaml").startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"training": {"seed": 1, "seed": 1}}', "training.seed is given more than once (allowed: each key once)"),
        ('{"a": [{"b": {"c": 1, "d": 2, "c": 3}}]}', "a[0].b.c is given more than once"),
        (
            '{"training": 1, "training": 1, "x": {"y": 1, "y": 2}}',
            "training is given more than once (allowed: each key once); x.y is",
        ),
        ('{"a": 1,}', "the spec isn't readable at line 1, column "),
        ("{'a': 1}", "the spec isn't readable at line 1, column 2:"),
        ('{\n "a": 01}', "the spec isn't readable at line 2, column 8:"),
        ("", "the spec isn't readable at line 1, column 1:"),
        ("[]", "the spec is a list"),
        ("null", "the spec has no value"),
    ],
)
def test_json_that_is_refused(text: str, sentence: str) -> None:
    assert refusal(text, "json").startswith(sentence)


@pytest.mark.parametrize("format", ["yaml", "json"])
def test_size_depth_and_number_of_values_are_limited(format: Format) -> None:
    too_many_bytes = refusal(" " * (TEXT_BYTES_MAX + 1), format)
    assert too_many_bytes == f"the spec has {TEXT_BYTES_MAX + 1} bytes (allowed: at most {TEXT_BYTES_MAX} bytes)"
    assert refusal('"' + "é" * (TEXT_BYTES_MAX // 2) + '"', format).startswith(f"the spec has {TEXT_BYTES_MAX + 2} bytes")
    read = read_json if format == "json" else read_yaml
    assert read("[" * DEPTH_MAX + "1" + "]" * DEPTH_MAX)
    for depth in (DEPTH_MAX + 1, 100_000):
        too_deep = refusal("[" * depth + "1" + "]" * depth, format)
        assert too_deep == f"the spec is nested too deeply (allowed: at most {DEPTH_MAX} levels)"
    assert len(read("[" + ",".join("1" * (NODES_MAX - 1)) + "]")) == NODES_MAX - 1
    too_many = refusal("[" + ",".join("1" * NODES_MAX) + "]", format)
    assert too_many == f"the spec has too many values (allowed: at most {NODES_MAX} values)"


@pytest.mark.parametrize("format", ["yaml", "json"])
def test_numbers_with_very_many_digits_are_refused_quickly(format: Format) -> None:
    for digits in (64, 4300, 4301, 1_000_000):
        with pytest.raises(InvalidSpec) as caught:
            load_job('{"training": {"steps": ' + "9" * digits + "}}", format)
        [problem] = [fault["problem"] for fault in caught.value.detail["errors"] if fault["field"] == "training.steps"]
        assert problem == ("is too large" if digits <= 4300 else "isn't finite")


def test_bytes_must_be_utf8() -> None:
    assert refusal(b'{"a": "\xff"}', "json") == "the spec isn't UTF-8 text (byte 7) (allowed: UTF-8)"
    assert read_json(b"\xef\xbb\xbf3") == 3 and read_yaml("é: 1".encode()) == {"é": 1}


@given(st.text(max_size=200) | st.text("{}[]:,-?|>&*!%@`'\"#\n \t\\Ux0af~<=.ab\ufeff", max_size=60))
@example('"\\UFFFFFFFF"')
@example('"\\ud800"')
@example("\ud800")
@example("%YAML 9999999999999999999.1\n---\na")
@example("%TAG ! a\n---\n!x y")
@example("! a")
@example("a: !<x> b")
@example("\x85a: b\u2028")
@example("? ")
@example(": ")
@example("0x" + "f" * 100000)
@example("0o" + "7" * 100000)
@example("1e" + "9" * 1000)
def test_any_text_is_read_or_refused(text: str) -> None:
    for format in ("yaml", "json"):
        with pytest.raises(InvalidSpec) as caught:
            load_job(text, format)
        caught.value.message.encode()


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
        max_leaves=20,
    )
)
def test_json_is_yaml(value: Any) -> None:
    text = json.dumps(value, indent=1)
    assert repr(read_yaml(text)) == repr(read_json(text)) == repr(value)
