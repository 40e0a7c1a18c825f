"""From text to a `JobSpec`. JSON without duplicate keys; YAML by the core schema of YAML 1.2, without anchors and tags.

YAML is read from the parser's events by rules of our own: in YAML 1.1, which most loaders speak, 1e-4 is a string, no is
false, 0123 is 83 and 1:30 is 90.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NoReturn

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, StringMark, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from mok_service.spec.faults import Fault, dotted, fault, from_validation, invalid
from mok_service.spec.schema import JobSpec

TEXT_BYTES_MAX: Final = 1_048_576
DEPTH_MAX: Final = 16
NODES_MAX: Final = 10_000
_DIGITS_MAX: Final = 4300  # a longer whole number, which takes quadratic time, is read as a float

# YAML 1.2.2, 10.3.2: the core schema's tag resolution.
_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE, _FALSE = re.compile(r"true|True|TRUE"), re.compile(r"false|False|FALSE")
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY, _NAN = re.compile(r"[-+]?\.(inf|Inf|INF)"), re.compile(r"\.(nan|NaN|NAN)")

Format = Literal["yaml", "json"]


def job_of_record(record: Mapping[str, Any]) -> JobSpec:
    """The resolved job of a run's record, with that run's execution spec. Raises InvalidSpec."""
    return parse_job({"training": record["spec"]["training"], "execution": record["spec"]["execution"]})


def load_job(text: str | bytes, format: Format) -> JobSpec:
    """The job that a YAML or JSON text describes (UTF-8).

    Raises InvalidSpec; `detail["errors"]` lists every fault, a syntax error by line and column.
    """
    return parse_job(read_json(text) if format == "json" else read_yaml(text))


def parse_job(obj: Any) -> JobSpec:
    """The job that a decoded mapping describes. Raises InvalidSpec; `detail["errors"]` lists every fault."""
    try:
        return JobSpec.model_validate(obj)
    except ValidationError as error:
        raise invalid(from_validation(error, JobSpec)) from None


def _text(text: str | bytes) -> str:
    size = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "surrogatepass"))
    if size > TEXT_BYTES_MAX:
        raise invalid([fault("", f"has {size} bytes", f"at most {TEXT_BYTES_MAX} bytes")])
    try:
        return text.decode("utf-8-sig") if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise invalid([fault("", f"isn't UTF-8 text (byte {error.start})", "UTF-8")]) from None


def _syntax(problem: str, line: int, column: int) -> NoReturn:
    raise invalid([fault("", f"isn't readable at line {line}, column {column}: {problem}", "well-formed YAML 1.2 or JSON")])


class _Object(dict[str, Any]):
    """A JSON object that remembers the keys which came twice."""

    repeated: tuple[str, ...] = ()


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text (UTF-8), its numbers exact. NaN and infinities are read, for a field's own check to refuse.

    Raises InvalidSpec: no JSON, a key that comes twice, more than TEXT_BYTES_MAX, DEPTH_MAX or NODES_MAX.
    """
    text = _text(text)
    try:
        tree = json.loads(text, object_pairs_hook=_object, parse_int=_whole)
    except json.JSONDecodeError as error:
        _syntax(error.msg, error.lineno, error.colno)
    except RecursionError:
        raise invalid([_too_deep()]) from None
    faults = _check(tree)
    if faults:
        raise invalid(faults)
    return tree


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    value = _Object(pairs)
    if len(value) < len(pairs):
        value.repeated = tuple(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    return value


def _check(tree: Any) -> list[Fault]:
    """The repeated keys in a JSON tree, and whether it's too deep or too large."""
    faults: list[Fault] = []
    waiting: list[tuple[tuple[int | str, ...], Any]] = [((), tree)]
    seen = 0
    while waiting:
        loc, value = waiting.pop()
        seen += 1
        if len(loc) > DEPTH_MAX or seen > NODES_MAX:
            return [_too_deep() if len(loc) > DEPTH_MAX else _too_many()]
        if isinstance(value, _Object):
            faults.extend(_repeated((*loc, key)) for key in value.repeated)
            waiting.extend(((*loc, key), child) for key, child in value.items())
        elif isinstance(value, list):
            waiting.extend(((*loc, index), child) for index, child in enumerate(value))
    return faults


def _repeated(loc: tuple[int | str, ...]) -> Fault:
    return fault(dotted(loc), "is given more than once", "each key once")


def _too_deep() -> Fault:
    return fault("", "is nested too deeply", f"at most {DEPTH_MAX} levels")


def _too_many() -> Fault:
    return fault("", "has too many values", f"at most {NODES_MAX} values")


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) <= _DIGITS_MAX else float(digits)


def read_yaml(text: str | bytes) -> Any:
    """The value of a YAML text (UTF-8, one document), in the types of JSON. Raises InvalidSpec where `read_json` does."""
    text = _text(text)
    try:
        events = YAML(typ="safe", pure=True).parse(text)
        for event in events:
            if isinstance(event, StreamEndEvent):
                return None
            if isinstance(event, DocumentStartEvent):
                break
        if event.version not in (None, (1, 2)):
            _at(event, f"YAML {'.'.join(map(str, event.version))} is declared; write YAML 1.2")
        tree = _Tree(events).node(next(events), ())
        for event in events:
            if isinstance(event, DocumentStartEvent):
                _at(event, "a second document begins here")
        return tree
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        _syntax(str(error.problem), mark.line + 1 if mark else 1, mark.column + 1 if mark else 1)
    except (ValueError, OverflowError):  # how the parser fails on "\\UFFFFFFFF"
        _syntax("an escape stands for no character", 1, 1)
    except YAMLError as error:
        _syntax(str(error).splitlines()[0], 1, 1)


def _at(event: Event, problem: str) -> NoReturn:
    mark: StringMark = event.start_mark
    _syntax(problem, mark.line + 1, mark.column + 1)


class _Tree:
    """Builds values from a parser's events."""

    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events
        self._nodes = 0

    def node(self, event: Event, loc: tuple[int | str, ...]) -> Any:
        """The value that begins with `event`, at `loc`."""
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise invalid([_too_many()])
        if len(loc) > DEPTH_MAX:
            raise invalid([_too_deep()])
        if isinstance(event, AliasEvent):
            _at(event, "aliases aren't allowed in a job spec")
        assert isinstance(event, ScalarEvent | SequenceStartEvent | MappingStartEvent), f"{event} begins no value"
        if event.anchor is not None:
            _at(event, "anchors aren't allowed in a job spec")
        if event.tag is not None:
            _at(event, f"tags such as {event.tag} aren't allowed in a job spec")
        if isinstance(event, ScalarEvent):
            return _joined(event.value) if event.style else _scalar(event.value)
        return self._sequence(loc) if isinstance(event, SequenceStartEvent) else self._mapping(loc)

    def _sequence(self, loc: tuple[int | str, ...]) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            values.append(self.node(event, (*loc, len(values))))
        return values

    def _mapping(self, loc: tuple[int | str, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            key = self.node(event, (*loc, "?"))
            if not isinstance(key, str):
                _at(event, f"the key {key!r:.40} isn't a string")
            if key in values:
                raise invalid([_repeated((*loc, key))])
            values[key] = self.node(next(self._events), (*loc, key))
        return values


def _joined(text: str) -> str:
    """JSON writes a character beyond U+FFFF as two escapes; in a quoted YAML scalar they arrive as two surrogates."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def _scalar(text: str) -> Any:
    """A plain scalar's value by the core schema."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text) or _FALSE.fullmatch(text):
        return text[0] in "tT"
    if _INTEGER.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else _whole(text)
    if _INFINITY.fullmatch(text):
        return float("-inf") if text[0] == "-" else float("inf")
    if _NAN.fullmatch(text):
        return float("nan")
    return float(text) if _FLOAT.fullmatch(text) else text
