"""Canonical JSON: the bytes of RFC 8785 for what has them, an error with the place for what hasn't."""

from __future__ import annotations

import json
import math
import struct
from types import MappingProxyType
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from mok_service.provenance.canonical import INTEGER_MAX, canonical_bytes, decimal_text, float64_bits, float64_from_bits

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-INTEGER_MAX, INTEGER_MAX) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def test_the_example_of_the_rfc() -> None:
    """RFC 8785, 3.2.3: keys are sorted by UTF-16 units."""
    value = {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\u0080": 6, "\u00f6": 7}
    keys = [key for key, _ in json.loads(canonical_bytes(value), object_pairs_hook=list)]
    assert keys == ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


def test_text_is_escaped_as_little_as_possible() -> None:
    assert canonical_bytes('\u20ac$\u000f\nA\'B"\\\\"/\x7f') == '"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/\x7f"'.encode()


@given(VALUES)
def test_the_bytes_are_those_of_another_implementation(value: Any) -> None:
    assert canonical_bytes(value) == rfc8785.dumps(value)


@given(VALUES)
def test_equal_values_have_equal_bytes_that_read_back(value: Any) -> None:
    data = canonical_bytes(value)
    again = json.loads(data)
    assert again == value and canonical_bytes(again) == data
    if isinstance(value, dict):
        assert canonical_bytes(dict(reversed(value.items()))) == data


def test_tuples_and_mappings_are_lists_and_objects() -> None:
    assert canonical_bytes(MappingProxyType({"b": (1, 2), "a": None})) == b'{"a":null,"b":[1,2]}'


@pytest.mark.parametrize(("value", "message"), [
    ({"a": [1.0]}, r"\$\.a\[0\]: canonical JSON takes no float, got 1\.0; write its bits"),
    (math.nan, r"\$: canonical JSON takes no float"),
    ({"seed": 2**53}, r"\$\.seed: canonical JSON can't hold 9007199254740992 exactly; write it as a decimal string"),
    ([-(2**53)], r"\$\[0\]: canonical JSON can't hold -9007199254740992"),
    ({"a": {1: 2}}, r"\$\.a: the key 1 isn't a string"),
    ("\ud800", r"\$: '\\ud800' isn't valid Unicode text"),
    ({"\ud800": 1}, r"\$: '\\ud800' isn't valid Unicode text"),
    ({"a": b"x"}, r"\$\.a: canonical JSON takes no bytes"),
    ({1, 2}, r"\$: canonical JSON takes no set"),
])  # fmt: skip
def test_what_has_no_canonical_bytes_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        canonical_bytes(value)


@given(st.floats(allow_nan=True))
def test_bits_of_a_float_go_there_and_back(value: float) -> None:
    assert struct.pack(">d", float64_from_bits(float64_bits(value))) == struct.pack(">d", value)


def test_bits_are_hex_most_significant_first() -> None:
    assert [float64_bits(x) for x in (1.0, -0.0, 0.1)] == ["3ff0000000000000", "8000000000000000", "3fb999999999999a"]
    assert decimal_text(2**63 - 1) == "9223372036854775807"


@pytest.mark.parametrize("bits", ["", "3ff", "3FF0000000000000", "3f f0 00 00 00 0", "g" * 16, "0" * 17])
def test_what_are_no_bits_is_refused(bits: str) -> None:
    with pytest.raises(ValueError, match="allowed: 16 lowercase hex digits"):
        float64_from_bits(bits)
