"""Checks whether clients of an older OpenAPI document can still use the service of a newer one.

A client sends what the older one allowed and reads what it promised. So inputs may only allow more,
outputs may only promise more, and nothing with a name may be removed. An error may come or go: a
client must be able to read any of them.

Documents are those that FastAPI writes: OpenAPI 3.1, references into components only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

Schema = Mapping[str, Any]
_Seen = frozenset[tuple[int, int]]

#: keyword -> 1 if a larger value allows more, -1 if a smaller one does
_BOUNDS = {
    "maximum": 1, "exclusiveMaximum": 1, "maxLength": 1, "maxItems": 1, "maxProperties": 1,
    "minimum": -1, "exclusiveMinimum": -1, "minLength": -1, "minItems": -1, "minProperties": -1,
}  # fmt: skip
_SAME = ("pattern", "format", "const", "propertyNames")
_OF_TEXTS = ("pattern", "format")  # say nothing of other values
_OF_OBJECTS = ("properties", "required", "additionalProperties")  # nor do these


def breaks(before: Schema, after: Schema, *, under: str) -> list[str]:
    """Return what breaks clients of `before` in `after`, at paths that begin with `under`."""
    return [
        f"{method.upper()} {path}: {told}"
        for path, operations in before["paths"].items()
        if path.startswith(under)
        for method, operation in operations.items()
        for told in _operation(before, operation, after, _at(after, path, method))
    ]


def _at(document: Schema, path: str, method: str) -> Schema | None:
    found: Schema | None = document["paths"].get(path, {}).get(method)
    return found


def _operation(before: Schema, old: Schema, after: Schema, new: Schema | None) -> Iterator[str]:
    if new is None:
        yield "it is gone"
        return
    if old.get("operationId") != new.get("operationId"):
        yield f"its operationId was {old.get('operationId')}, and is {new.get('operationId')}"
    if new.get("security") and not old.get("security"):
        yield "it asks who calls, and did not before"
    sent = _Fits(before, after, old_is_inner=True)
    yield from _parameters(sent, old, new)
    yield from _body(sent, old.get("requestBody"), new.get("requestBody"))
    yield from _answers(
        _Fits(after, before, old_is_inner=False), old["responses"], new["responses"]
    )


def _parameters(sent: _Fits, old: Schema, new: Schema) -> Iterator[str]:
    known = {(p["in"], p["name"]): p for p in old.get("parameters", ())}
    now = {(p["in"], p["name"]): p for p in new.get("parameters", ())}
    for (where, name), parameter in now.items():
        was = known.get((where, name), {})
        if parameter.get("required") and not was.get("required"):
            yield f"the {where} parameter {name} is needed, and was not before"
    for (where, name), parameter in known.items():
        if (where, name) not in now:
            yield f"the {where} parameter {name} is gone"
        else:
            told = sent.faults(parameter["schema"], now[where, name]["schema"], "")
            yield from (f"the {where} parameter {name}{fault}" for fault in told)


def _body(sent: _Fits, old: Schema | None, new: Schema | None) -> Iterator[str]:
    if new is None:
        if old is not None:
            yield "it takes no body any more"
        return
    if new.get("required") and not (old or {}).get("required"):
        yield "it needs a body, and did not before"
    yield from _media(sent, (old or {}).get("content", {}), new["content"], "the body")


def _answers(given: _Fits, old: Schema, new: Schema) -> Iterator[str]:
    for status, answer in old.items():
        if status in new:
            content = new[status].get("content", {})
            yield from _media(given, answer.get("content", {}), content, f"the {status} answer")
        elif status.startswith("2"):
            yield f"it never answers {status} any more"


def _media(fits: _Fits, old: Schema, new: Schema, what: str) -> Iterator[str]:
    for kind, media in old.items():
        if kind not in new:
            yield f"{what} is never {kind} any more"
            continue
        schemas = media.get("schema", {}), new[kind].get("schema", {})
        inner, outer = schemas if fits.old_is_inner else schemas[::-1]
        yield from (f"{what}{fault}" for fault in fits.faults(inner, outer, ""))


# --- schemas ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fits:
    """Tells whether everything that fits an inner schema fits an outer one.

    For inputs the older schema is the inner one; for answers it is the outer one.
    """

    inner: Schema
    outer: Schema
    old_is_inner: bool

    def faults(
        self, inner: Schema, outer: Schema, where: str, seen: _Seen = frozenset()
    ) -> Iterator[str]:
        """Yield what does not fit at `where`, such as "/name"; `seen` has the pairs that were
        already compared.
        """
        if (id(inner), id(outer)) in seen:
            return
        seen |= {(id(inner), id(outer))}
        wide = [*_alternatives(self.outer, outer)]
        for alternative in _alternatives(self.inner, inner):
            told = [
                [*self._misfits(alternative, one, where, seen)] for one in _alike(alternative, wide)
            ]
            yield from min(told, key=len, default=[f"{where}: {self._may_be(alternative)}"])

    def _may_be(self, inner: Schema) -> str:
        kind = inner.get("type", "anything")
        return f"{kind} was taken, and is not" if self.old_is_inner else f"it may be {kind} now"

    def _misfits(self, inner: Schema, outer: Schema, where: str, seen: _Seen) -> Iterator[str]:
        yield from (f"{where}: {told}" for told in self._values(inner, outer))
        yield from self._properties(inner, outer, where, seen)
        for keyword, step in (("items", "/*"), ("additionalProperties", "/*")):
            within, around = inner.get(keyword, {}), outer.get(keyword, {})
            if isinstance(within, Mapping) and isinstance(around, Mapping) and around:
                yield from self.faults(within, around, where + step, seen)
        open_ = inner.get("type") == "object" and inner.get("additionalProperties") is not False
        if open_ and outer.get("additionalProperties") is False:
            yield f"{where}: {self._verb('a field of another name')}"

    def _values(self, inner: Schema, outer: Schema) -> Iterator[str]:
        if "enum" in outer:
            more = [repr(value) for value in inner.get("enum", ()) if value not in outer["enum"]]
            yield from (self._verb(value) for value in more)
            if "enum" not in inner:
                yield self._verb("another word")
        for keyword in _SAME:
            if keyword in outer and inner.get(keyword) != outer[keyword]:
                yield f"its {keyword} is another"
        for keyword, sign in _BOUNDS.items():
            bound = inner.get(keyword, sign * inf)
            if keyword in outer and sign * outer[keyword] < sign * bound:
                yield f"its {keyword} is {'less' if self.old_is_inner else 'more'} generous"

    def _properties(self, inner: Schema, outer: Schema, where: str, seen: _Seen) -> Iterator[str]:
        within, around = inner.get("properties", {}), outer.get("properties", {})
        old, new = (within, around) if self.old_is_inner else (around, within)
        yield from (f"{where}/{name}: it is gone" for name in old if name not in new)
        for name in sorted(set(outer.get("required", ())) - set(inner.get("required", ()))):
            if name in new:
                told = "it is needed" if self.old_is_inner else "it may be missing"
                yield f"{where}/{name}: {told}, and was not before"
        for name in within.keys() & around.keys():
            yield from self.faults(within[name], around[name], f"{where}/{name}", seen)

    def _verb(self, what: str) -> str:
        return f"{what} is refused now" if self.old_is_inner else f"{what} may come now"


def _alternatives(document: Schema, schema: Schema) -> Iterator[Schema]:
    """The schema without its references, unions and lists of types."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        yield from _alternatives(document, document["components"]["schemas"][name])
    elif union := schema.get("anyOf", schema.get("oneOf")):
        for one in union:
            yield from _alternatives(document, one)
    elif isinstance(schema.get("type"), list):
        for kind in schema["type"]:
            of_others = {*_OF_TEXTS} if kind != "string" else set[str]()
            of_others |= {*_OF_OBJECTS} if kind != "object" else set()
            said = {name: value for name, value in schema.items() if name not in of_others}
            yield {**said, "type": kind}
    else:
        yield schema


def _alike(inner: Schema, outer: list[Schema]) -> list[Schema]:
    """Return the schemas that take values of that type."""
    kind = inner.get("type")
    taken = {kind, "number"} if kind == "integer" else {kind}
    return [one for one in outer if "type" not in one or one["type"] in taken]
