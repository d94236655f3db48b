"""Each kind of change of an OpenAPI document, and whether a client stumbles over it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from app.local.openapi_compatible import breaks

OPTIONS = {"type": ["object", "null"], "properties": {"a": {"type": "string"}}}
IN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 100},
        "size": {"type": ["integer", "null"], "minimum": 1},
        "tier": {"type": "string", "enum": ["a", "b"]},
        "parts": {"type": "array", "items": {"$ref": "#/components/schemas/Part"}},
        "options": OPTIONS,
    },
    "required": ["name"],
    "additionalProperties": False,
}
PART: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "of": {"anyOf": [{"$ref": "#/components/schemas/Part"}, {"type": "null"}]},
    },
    "required": ["id"],
}
OUT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "state": {"type": "string", "enum": ["on", "off"]},
        "ended_at": {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]},
        "count": {"type": "number"},
        "part": {"$ref": "#/components/schemas/Part"},
    },
    "required": ["state", "count"],
}
BEFORE: dict[str, Any] = {
    "paths": {
        "/v1/things": {
            "post": {
                "operationId": "makeThing",
                "parameters": [
                    {"name": "dry", "in": "query", "schema": {"type": "boolean"}},
                ],
                "requestBody": {"required": True, "content": {"application/json": {"schema": IN}}},
                "responses": {
                    "201": {"content": {"application/json": {"schema": OUT}}},
                    "409": {"content": {"application/problem+json": {"schema": {}}}},
                },
            }
        },
        "/livez": {"get": {"operationId": "getLivez", "responses": {"200": {}}}},
    },
    "components": {"schemas": {"Part": PART}},
}


def changed(change) -> list[str]:
    after = copy.deepcopy(BEFORE)
    change(After(after))
    return breaks(BEFORE, after, under="/v1/")


class After:
    """The places of the document that the changes below are made at."""

    def __init__(self, document):
        self.paths, self.parts = document["paths"], document["components"]["schemas"]
        self.post = self.paths["/v1/things"]["post"]
        self.taken = self.post["requestBody"]["content"]["application/json"]["schema"]
        self.given = self.post["responses"]["201"]["content"]["application/json"]["schema"]

    def field(self, name):
        return (self.taken if name in IN["properties"] else self.given)["properties"][name]


def _optional(x):
    x.given["required"].remove("count")


BREAKS = {
    "it is gone": lambda x: x.paths.pop("/v1/things"),
    "its operationId was makeThing": lambda x: x.post.update(operationId="createThing"),
    "it asks who calls": lambda x: x.post.update(security=[{"key": []}]),
    "the query parameter dry is gone": lambda x: x.post["parameters"].clear(),
    "the query parameter dry is needed": lambda x: x.post["parameters"][0].update(required=True),
    "the query parameter dry: boolean was taken": lambda x: x.post["parameters"][0].update(
        schema={"type": "integer"}
    ),
    "the header parameter if-match is needed": lambda x: x.post["parameters"].append(
        {"name": "if-match", "in": "header", "required": True, "schema": {}}
    ),
    "it takes no body": lambda x: x.post.pop("requestBody"),
    "the body is never application/json": lambda x: x.post["requestBody"].update(
        content={"application/xml": {}}
    ),
    "the body/tier: it is gone": lambda x: x.taken["properties"].pop("tier"),
    "the body/tier: it is needed": lambda x: x.taken["required"].append("tier"),
    "the body/tier: 'b' is refused now": lambda x: x.field("tier").update(enum=["a"]),
    "the body/name: its maxLength is less generous": lambda x: x.field("name").update(maxLength=9),
    "the body/name: its minLength": lambda x: x.field("name").update(minLength=1),
    "the body/name: its pattern": lambda x: x.field("name").update(pattern="^a"),
    "the body/name: another word is refused": lambda x: x.field("name").update(enum=["a"]),
    "the body/size: its minimum is less generous": lambda x: x.field("size").update(minimum=2),
    "the body/size: null was taken": lambda x: x.field("size").update(type="integer"),
    "the body/parts/*/id: string was taken": lambda x: x.parts["Part"]["properties"].update(
        id={"type": "integer"}
    ),
    "it never answers 201": lambda x: (
        x.post["responses"].update({"200": {}}) or x.post["responses"].pop("201")
    ),
    "the 201 answer is never application/json": lambda x: x.post["responses"].update({"201": {}}),
    "the 201 answer/count: it is gone": lambda x: x.given["properties"].pop("count"),
    "the 201 answer/count: it may be missing": _optional,
    "the 201 answer/count: it may be null now": lambda x: x.field("count").update(
        type=["number", "null"]
    ),
    "the 201 answer/ended_at: it is gone": lambda x: x.given["properties"].pop("ended_at"),
    "the 201 answer/state: 'gone' may come now": lambda x: x.field("state").update(
        enum=["on", "off", "gone"]
    ),
    "the 201 answer/part/of: it is gone": lambda x: x.parts["Part"]["properties"].pop("of"),
}


@pytest.mark.parametrize("told", BREAKS)
def test_change_that_breaks_a_client_is_found(told):
    found = changed(BREAKS[told])
    assert any(line.startswith(f"POST /v1/things: {told}") for line in found), found


HARMLESS = {
    "nothing": lambda x: None,
    "a new operation": lambda x: x.paths.update({"/v1/more": {"get": {"responses": {}}}}),
    "what is not under the prefix": lambda x: x.paths.pop("/livez"),
    "a new parameter": lambda x: x.post["parameters"].append(
        {"name": "x", "in": "query", "schema": {}}
    ),
    "a new field that may be left out": lambda x: x.taken["properties"].update(more={}),
    "a field that need not be sent any more": lambda x: x.taken["required"].clear(),
    "more is taken": lambda x: x.field("tier").update(enum=["a", "b", "c"]),
    "a bound is wider": lambda x: x.field("name").update(maxLength=200),
    "a number in the place of an integer": lambda x: x.field("size").update(
        type=["number", "null"]
    ),
    "texts of a form in the place of none": lambda x: x.field("size").update(
        type=["number", "null", "string"], pattern="^[0-9]+GB$"
    ),
    "a list beside an object or null": lambda x: x.taken["properties"].update(
        options={"anyOf": [{**OPTIONS, "type": "object"}, {"type": "array"}, {"type": "null"}]}
    ),
    "more media types are taken": lambda x: x.post["requestBody"]["content"].update(
        {"application/yaml": {}}
    ),
    "a new field is given": lambda x: x.given["properties"].update(more={}),
    "what could be null never is": lambda x: x.given["properties"].update(
        ended_at={"type": "string", "format": "date-time"}
    ),
    "less is given": lambda x: x.field("state").update(enum=["on"]),
    "an integer in the place of a number": lambda x: x.field("count").update(type="integer"),
    "another error": lambda x: x.post["responses"].update({"404": {}}),
    "an error less": lambda x: x.post["responses"].pop("409"),
    "other words": lambda x: x.post.update(summary="Make it", description="At once"),
}


@pytest.mark.parametrize("what", HARMLESS)
def test_change_that_breaks_no_client_is_allowed(what):
    assert changed(HARMLESS[what]) == []
