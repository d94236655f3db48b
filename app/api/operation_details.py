"""Says of each operation in the OpenAPI document what its routes cannot say: in words what a
success answers, which headers an answer has, which scope a key needs, and that `If-Match` is
needed.
"""

from __future__ import annotations

import re
from typing import Any

JSON = dict[str, Any]

_BY_FASTAPI = "Successful Response"  # the description of an answer without one of its own
_HEADERS = {
    "X-Request-ID": "Identifies the call in the service's log. A call may bring its own.",
    "RateLimit": "Calls that are left (`r`), and the seconds until all are (`t`), of the key and "
    "of its tenant, if calls are limited.",
    "RateLimit-Policy": "Calls (`q`) that are allowed in `w` seconds.",
    "ETag": "The version of the object, for `If-Match`.",
    "Location": "The address of the new object.",
    "Link": 'The address of the next page, with `rel="next"`, if there is one.',
    "Idempotency-Replayed": "`true` if the `Idempotency-Key` was known: nothing was done again.",
    "Retry-After": "Seconds after which to try again.",
    "WWW-Authenticate": "`Bearer`: send a key or a token.",
}
_OF_ERRORS = {"401": ("WWW-Authenticate",), "429": ("Retry-After",), "503": ("Retry-After",)}
_VERSIONED = {"TenantOut", "UserOut", "DeviceOut", "MountOut"}  # schemas of answers with an ETag
_LOCATED = {"RequestOut", "TenantOut", "UserOut", "KeyMade", "WebhookMade", "MountOut"}
_THINGS = {
    "Made": "",  # KeyMade: a key
    "Out": "",
    "Summary": "",
    "Stored": "",
    "WithLock": " with its lock",
}


def add(document: JSON) -> None:
    document["components"]["headers"] = {
        name: {"description": told, "schema": {"type": "string"}} for name, told in _HEADERS.items()
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _add_scope(operation)
            _need_version(operation)
            for status, answer in operation["responses"].items():
                if answer["description"] == _BY_FASTAPI:
                    answer["description"] = _told(method, status, _schema(answer), operation)
                if path.startswith("/v1/"):
                    _add_headers(answer, _headers(method, path, status, _schema(answer)))


def _add_scope(operation: JSON) -> None:
    if "x-scope" not in operation:
        return
    scope = operation["x-scope"]
    told = f"Needs the scope `{scope}`, or a key without scopes." if scope else "Any key will do."
    operation["description"] = "\n\n".join(filter(None, (operation.get("description"), told)))


def _need_version(operation: JSON) -> None:
    """Declare `If-Match` as needed: without it the answer is 428."""
    for parameter in operation.get("parameters", ()):
        if parameter["name"] == "if-match":
            [given, _] = parameter["schema"].pop("anyOf")
            parameter["required"] = True
            parameter["schema"] |= given
            # the API's page fills in this one, and calls nothing without a needed header
            parameter["example"] = parameter["schema"]["examples"][0]


def _schema(answer: JSON) -> str:
    schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _told(method: str, status: str, schema: str, operation: JSON) -> str:
    if status == "204":
        return "Done. The answer has no body."
    if not schema:
        return f"{operation['summary']}: yes, as the headers say."
    if schema.startswith("Page_"):
        return f"A page of the list: each item is one {_thing(schema[5:].rstrip('_'))}."
    thing = _thing(schema)
    if status == "201":
        return f"Created: the new {thing}."
    if status == "202":
        return f"Accepted: the {thing} as it is now. The service does what was asked soon."
    return f"The {thing}." if method == "get" else f"Done: the {thing} as it is now."


def _thing(schema: str) -> str:
    """Convert the name of a schema to words: `AuditEventOut` becomes *audit event*."""
    for end, words in _THINGS.items():
        if schema.endswith(end):
            schema, more = schema.removesuffix(end), words
            break
    else:
        more = ""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", schema).lower() + more


def _headers(method: str, path: str, status: str, schema: str) -> list[str]:
    named = ["X-Request-ID", "RateLimit", "RateLimit-Policy", *_OF_ERRORS.get(status, ())]
    if status.startswith("2"):
        is_new = status == "201" or path == "/v1/requests"
        named += ["Link"] * schema.startswith("Page_")
        named += ["ETag"] * (schema in _VERSIONED)
        has_place = (is_new and schema in _LOCATED) or path.endswith("/test")
        named += ["Location"] * (method == "post" and has_place)
        named += ["Idempotency-Replayed"] * (path == "/v1/requests" and method == "post")
    return named


def _add_headers(answer: JSON, names: list[str]) -> None:
    references = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    answer["headers"] = {**references, **answer.get("headers", {})}
