"""Values come back as they were; anything else is refused with its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from app.core.model import codec
from app.core.model.codec import BadValue, OwnForm, from_json, to_json, with_texts


@dataclass(frozen=True, slots=True)
class Inner:
    n: int
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Colour:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    inner: Inner
    listed: list[Inner] = field(default_factory=list)
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    maybe: Inner | None = None
    pair: tuple[float, str] = (0.0, "")
    plain: dict[str, Any] = field(default_factory=dict)
    flag: bool = False
    colour: Colour | None = None


codec.OWN_FORMS[Colour] = OwnForm(
    write=lambda colour: f"#{colour.name}", read=lambda body, _: Colour(body.removeprefix("#"))
)

FULL = Outer(
    name="x",
    inner=Inner(1, ("a", "b")),
    listed=[Inner(2), Inner(3)],
    by_name={"k": Inner(4)},
    maybe=Inner(5),
    pair=(1.5, "z"),
    plain={"any": [1, None, {"thing": True}]},
    flag=True,
    colour=Colour("red"),
)


@pytest.mark.parametrize("value", [FULL, Outer(name="y", inner=Inner(0))])
def test_a_value_comes_back_from_its_json(value: Outer) -> None:
    assert from_json(Outer, json.loads(json.dumps(to_json(value)))) == value


def test_fields_at_their_default_are_omitted() -> None:
    assert to_json(Outer(name="y", inner=Inner(0))) == {"name": "y", "inner": {"n": 0}}


def test_a_whole_value_has_all_its_fields() -> None:
    body = to_json(Outer(name="y", inner=Inner(0)), whole=True)
    assert body.keys() == {field.name for field in fields(Outer)}
    assert from_json(Outer, json.loads(json.dumps(body))) == Outer(name="y", inner=Inner(0))


@pytest.mark.parametrize("n", [2**53, 2**53 + 1, -(2**60), 10**40])
def test_a_large_number_may_be_a_text(n: int) -> None:
    body = with_texts(to_json(FULL) | {"inner": {"n": n}})
    assert isinstance(body["inner"]["n"], int if n == 2**53 else str)
    assert from_json(Outer, body).inner.n == n


def test_a_class_may_have_a_form_of_its_own() -> None:
    assert to_json(FULL)["colour"] == "#red"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"more": 1}, "/: Outer has no field 'more'"),
        ({"inner": {}}, "/inner: Inner lacks the field 'n'"),
        ({"inner": 7}, "/inner: must be an object; got 7"),
        ({"inner": {"n": True}}, "/inner/n: must be a whole number; got True"),
        ({"inner": {"n": 1.0}}, "/inner/n: must be a whole number; got 1.0"),
        ({"inner": {"n": "7"}}, "/inner/n: must be a whole number; got '7'"),
        ({"inner": {"n": "1" * 5000}}, "/inner/n: must be a whole number"),
        ({"name": None}, "/name: must be a text; got None"),
        ({"listed": [{"n": 1}, {"n": "2"}]}, "/listed/1/n: must be a whole number; got '2'"),
        ({"listed": {}}, "/listed: must be a list; got {}"),
        ({"by_name": {"k": {"n": 1, "words": "ab"}}}, "/by_name/k/words: must be a list"),
        ({"by_name": []}, "/by_name: must be an object"),
        ({"maybe": {"n": None}}, "/maybe/n: must be a whole number"),
        ({"pair": [1]}, "/pair: must be a list of 2"),
        ({"pair": ["1", "z"]}, "/pair/0: must be a number"),
        ({"flag": 1}, "/flag: must be true or false"),
    ],
)
def test_anything_else_is_refused_with_its_place(change: dict[str, Any], told: str) -> None:
    with pytest.raises(BadValue) as error:
        from_json(Outer, {**to_json(FULL), **change})
    assert str(error.value).startswith(told)
