"""Writes frozen dataclasses as JSON and reads them back: one codec for values that travel.

`to_json` omits fields at their default, so that a process of an older version can read a value
whose new fields are unused.  `with_texts` turns whole numbers beyond 2^53 into text, for readers in
other languages, which would round them; `from_json` reads both.

`from_json` fails closed: an unknown field, a missing field or a wrong type raises BadValue with a
JSON Pointer.  It reads texts, numbers, dataclasses, tuples, lists, mappings from texts, and
optional values of all these types.

A class whose JSON does not follow its fields registers its `OwnForm`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any, str], Any]  # reads a JSON value that stands at a JSON Pointer

_LARGE = re.compile("-?[1-9][0-9]{15,4000}")
_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
_PLAIN = frozenset({str, int, float, bool, NoneType})  # values that are JSON already
_REQUIRED = object()
EXACT = 2**53  # readers of JSON hold whole numbers up to this number exactly


class BadValue(Exception):
    """Raised for JSON that is not a value of the expected type; `pointer` is the place of the
    fault.
    """

    def __init__(self, pointer: str, detail: str) -> None:
        self.pointer, self.detail = pointer, detail
        super().__init__(f"{pointer or '/'}: {detail}")


@dataclass(frozen=True, slots=True)
class OwnForm:
    """Holds the functions that write and read a class with its own JSON form; `read` raises
    BadValue.
    """

    write: Callable[[Any], Any]
    read: Reader


#: The classes with an OwnForm.
OWN_FORMS: dict[type, OwnForm] = {}


# --- to JSON --------------------------------------------------------------------------------------


def to_json(value: Any, *, whole: bool = False) -> Any:
    """Return the JSON of a value. JSON values stay as they are.

    `whole` also writes fields at their default, for readers that do not use this codec.
    """
    if type(value) in _PLAIN:
        return value
    if is_dataclass(value):
        kind: Any = type(value)
        if (own := OWN_FORMS.get(kind)) is not None:
            return own.write(value)
        return {
            name: it if type(it) in _PLAIN else to_json(it, whole=whole)
            for name, usual in usual_values(kind)
            if ((it := getattr(value, name)) is not usual and it != usual) or whole
        }
    if isinstance(value, tuple | list):
        return [to_json(item, whole=whole) for item in value]
    if isinstance(value, Mapping):
        return {key: to_json(item, whole=whole) for key, item in value.items()}
    return value


def with_texts(body: Any) -> Any:
    """Return JSON with whole numbers beyond 2^53 as text."""
    if isinstance(body, dict):
        return {key: with_texts(item) for key, item in body.items()}
    if isinstance(body, list):
        return [with_texts(item) for item in body]
    return str(body) if type(body) is int and abs(body) > EXACT else body


@cache
def usual_values(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a dataclass, each with its default.

    A field without a default gets a mark that equals no value.
    """
    return tuple((one.name, _usual(one)) for one in fields(kind))


def _usual(one: Any) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return _REQUIRED if one.default is MISSING else one.default


# --- from JSON ------------------------------------------------------------------------------------


def from_json(kind: type[T], body: Any, pointer: str = "") -> T:
    """Return the value from which `to_json` made `body`; raises BadValue."""
    any_kind: Any = kind
    value: T = _reader(any_kind)(body, pointer)
    return value


@cache
def _reader(kind: Any) -> Reader:
    if kind in OWN_FORMS:
        return OWN_FORMS[kind].read
    if kind is Any:
        return lambda value, _: value
    if kind in _WORDS:
        return _scalar(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (one,) = (each for each in inner if each is not NoneType)
        read = _reader(one)
        return lambda value, where: None if value is None else read(value, where)
    if origin in (tuple, list):
        return _sequence(origin, inner)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_reader(inner[1]))
    return _dataclass(kind)


def _scalar(kind: type) -> Reader:
    def read(value: Any, where: str) -> Any:
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        if kind is float and type(value) is int:
            return float(value)
        if kind is int and type(value) is str and _LARGE.fullmatch(value) is not None:
            return int(value)
        raise BadValue(where, f"must be {_WORDS[kind]}; got {value!r:.80}")

    return read


def _sequence(origin: Any, inner: tuple[Any, ...]) -> Reader:
    """Return the reader of `list[X]`, `tuple[X, ...]`, or of a tuple of one length."""
    is_open = origin is list or inner[-1] is Ellipsis
    readers = [_reader(each) for each in inner if each is not Ellipsis]

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, list) or not (is_open or len(value) == len(readers)):
            wanted = "a list" if is_open else f"a list of {len(readers)}"
            raise BadValue(where, f"must be {wanted}; got {value!r:.80}")
        all_of_it = readers * len(value) if is_open else readers
        pairs = enumerate(zip(all_of_it, value, strict=True))
        return origin(one(item, f"{where}/{n}") for n, (one, item) in pairs)

    return read


def _mapping(read_item: Reader) -> Reader:
    def read(value: Any, where: str) -> Any:
        _must_be_object(value, where)
        return {key: read_item(item, f"{where}/{key:.80}") for key, item in value.items()}

    return read


def _dataclass(kind: Any) -> Reader:
    hints, usual = get_type_hints(kind), dict(usual_values(kind))
    needed = {name for name, value in usual.items() if value is _REQUIRED}
    readers: dict[str, Reader] = {}

    def read(value: Any, where: str) -> Any:
        _must_be_object(value, where)
        # the reader is made when it is first used, as a class may contain values of its own type
        if not readers:
            readers.update({name: _reader(hints[name]) for name in usual})
        if unknown := sorted(value.keys() - readers.keys()):
            raise BadValue(where, f"{kind.__name__} has no field {unknown[0]!r:.80}")
        if missing := sorted(needed - value.keys()):
            raise BadValue(where, f"{kind.__name__} lacks the field {missing[0]!r}")
        read_all = ((name, readers[name](item, f"{where}/{name}")) for name, item in value.items())
        return kind(**dict(read_all))

    return read


def _must_be_object(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise BadValue(where, f"must be an object; got {value!r:.80}")
