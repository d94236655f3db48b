"""Completes the OpenAPI document that FastAPI makes from the routes.

It adds what a route cannot declare: the only media type of errors, the form of a list's page, and
an example for every part of a path. That is the example of the thing that the part names, unless
the part has its own example. `operation_details` adds what is said of each operation.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from app.api import operation_details, property_words
from app.api.access.rate_limiting import SESSION_COOKIE
from app.api.descriptor_schema import COMPONENTS
from app.api.schemas.base import Problem

JSON = dict[str, Any]

_REF = "#/components/schemas/"
_SECURITY = {
    "key": {
        "type": "http",
        "description": "An API key `rh_…`, created with POST /v1/keys, or a token of the identity "
        "provider.",
        "scheme": "bearer",
    },
    "session": {
        "type": "apiKey",
        "description": "A session of a signed-in browser.",
        "in": "cookie",
        "name": SESSION_COOKIE,
    },
}


def install(app: FastAPI) -> None:
    """Make `app.openapi()` return the completed document."""
    gather = app.openapi

    def openapi() -> JSON:
        if app.openapi_schema is None:
            app.openapi_schema = completed(gather())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def completed(document: JSON) -> JSON:
    """Add all that is missing to the document, in place."""
    schemas = document["components"]["schemas"]
    _add_problem(schemas)
    schemas.update(deepcopy(COMPONENTS))
    document["components"]["securitySchemes"] = deepcopy(_SECURITY)
    _put_nulls_back(document)
    operation_details.add(document)
    property_words.add(document)
    for name, schema in schemas.items():
        if name.startswith("Page_") and (item := _example(schemas, _items(schema))) is not None:
            schema["examples"] = [{"items": [item], "next_cursor": None}]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "path":
                    own = parameter["schema"].get("examples")
                    parameter["example"] = (
                        own[0] if own else _named(document, path, parameter["name"])
                    )
    return document


def _add_problem(schemas: JSON) -> None:
    found = TypeAdapter(Problem).json_schema(ref_template=_REF + "{model}")
    schemas.update(found.pop("$defs"))
    schemas["Problem"] = found


def _put_nulls_back(document: JSON) -> None:
    """Restore the nulls in examples, which FastAPI drops: if a required field is missing, it was
    null.
    """
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        for example in schema.get("examples", ()):
            _put_back(schemas, schema, example)
    for operations in document["paths"].values():
        for operation in operations.values():
            for answer in operation["responses"].values():
                for media in answer.get("content", {}).values():
                    _put_back(schemas, media.get("schema", {}), media.get("example"))


def _put_back(schemas: JSON, schema: JSON, example: Any) -> None:
    if "$ref" in schema:
        schema = schemas[schema["$ref"].removeprefix(_REF)]
    for alternative in schema.get("anyOf", ()):
        _put_back(schemas, alternative, example)
    if isinstance(example, list):
        for item in example:
            _put_back(schemas, schema.get("items", {}), item)
    elif isinstance(example, dict):
        for name in schema.get("required", ()):
            example.setdefault(name, None)
        for name, inner in schema.get("properties", {}).items():
            _put_back(schemas, inner, example.get(name))


def _items(page: JSON) -> JSON:
    found: JSON = page["properties"]["items"]["items"]
    return found


def _example(schemas: JSON, schema: JSON) -> Any:
    """Return the first example of a schema, or of the schema that it refers to."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].removeprefix(_REF)]
    return next(iter(schema.get("examples", ())), None)


def _named(document: JSON, path: str, parameter: str) -> Any:
    """Return the value of `{parameter}` in the example of the thing that it names.

    The thing is shown at the path up to the parameter, or listed at the path before it.
    """
    named = f"{{{parameter}}}"
    before = path.partition(named)[0]
    for shown in (before + named, before.rstrip("/")):
        for operation in document["paths"].get(shown, {}).values():
            example = _answered(document["components"]["schemas"], operation)
            if isinstance(example, dict) and parameter in example:
                return example[parameter]
    raise LookupError(f"{path}: nothing shows an example of {{{parameter}}}")


def _answered(schemas: JSON, operation: JSON) -> Any:
    """Return the example of an operation's answer, or of the items that it lists."""
    for status in ("200", "201"):
        answer = operation["responses"].get(status, {}).get("content", {})
        media = answer.get("application/json", {})
        example = media.get("example", _example(schemas, media.get("schema", {})))
        if example is not None:
            items = example.get("items")
            return items[0] if isinstance(items, list) and items else example
    return None
