"""What the command reads of an answer is a field of the schema of the operation that answers.

Each answer is made from the published schema, once with all that may be null and once without. It
knows its fields: to read another one, even with `get`, is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from app.cli import wording
from app.cli.tables import Column, table

JSON = dict[str, Any]
OPENAPI = json.loads((Path(__file__).parents[3] / "docs" / "openapi.json").read_text())
AT = "2026-11-21T12:00:00Z"


class Answered(dict[str, Any]):
    """An object of an answer; it refuses fields that its schema does not have."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        super().__init__(values)
        self.where = where

    def _check(self, name: object) -> None:
        assert dict.__contains__(self, name), f"{self.where} has no field {name!r}"

    def __getitem__(self, name: str) -> Any:
        self._check(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._check(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self._check(name)
        return True


def made(schema: JSON, *, filled: bool, where: str) -> Any:
    """Return a value of the schema; `filled`: with all that may be null."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return made(OPENAPI["components"]["schemas"][name], filled=filled, where=name)
    if "anyOf" in schema:
        kinds = sorted(schema["anyOf"], key=lambda one: (one.get("type") == "null") is filled)
        return made(kinds[0], filled=filled, where=where)
    if "enum" in schema or "const" in schema:
        return schema["enum"][0] if "enum" in schema else schema["const"]
    match schema.get("type"):
        case "object" if "properties" in schema:
            fields = {
                name: made(field, filled=filled, where=f"{where}.{name}")
                for name, field in schema["properties"].items()
            }
            return Answered(fields, where)
        case "object":
            inner = schema.get("additionalProperties")
            is_open = filled and isinstance(inner, dict) and inner
            return {"x": made(inner, filled=filled, where=where)} if is_open else {}
        case "array":
            has_items = filled or where == "RequestOut.tasks"  # a request has a task
            return [made(schema["items"], filled=filled, where=where)] if has_items else []
        case kind:
            usual = {"integer": 2, "number": 2.0, "boolean": filled, "null": None}
            text = AT if schema.get("format") == "date-time" else "x" if filled else ""
            return usual.get(str(kind), text)


def answer(operation: str, *, filled: bool) -> Any:
    """Return an answer of "METHOD /path"; of a list, one of its items."""
    method, _, path = operation.partition(" ")
    told = OPENAPI["paths"][f"/v1{path}"][method.lower()]["responses"]
    good = next(told[status] for status in ("200", "201", "202") if status in told)
    schema = good["content"]["application/json"]["schema"]
    if "/Page_" in schema.get("$ref", ""):
        page = OPENAPI["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        schema = page["properties"]["items"]["items"]
    return made(schema, filled=filled, where=operation)


#: Columns -> the operations whose answers they show, and what the command itself adds.
TABLES: dict[str, tuple[list[str], JSON]] = {
    "REQUESTS": (["GET /requests", "GET /requests/{id}"], {}),
    "TASKS": (["GET /tasks", "GET /tasks/{id}"], {}),
    "MEMBERS": (["GET /tasks"], {}),
    "CHECKPOINTS": (["GET /tasks/{id}/checkpoints"], {"task": "a", "best_of_lot": True}),
    "PINNED": (["POST /checkpoints/{id}/pin", "POST /checkpoints/{id}/unpin"], {}),
    "DATABLOCKS": (["GET /datablocks"], {}),
    "PLACEMENTS": (["GET /tasks/{id}/placements"], {}),
    "DEVICES": (["GET /devices", "GET /devices/{id}"], {"task": "a"}),
    "ENROLMENTS": (["GET /enrolments"], {}),
    "PRESETS": (["GET /presets"], {}),
    "ENVIRONMENTS": (["GET /environments"], {}),
    "MOUNTS": (["GET /mounts"], {}),
    "IMAGES": (["GET /mounts"], {}),
    "WEBHOOKS": (["GET /webhooks"], {}),
    "DELIVERIES": (["GET /webhooks/{id}/deliveries", "POST /deliveries/{id}/redeliver"], {}),
    "CHANNELS": (["GET /channels"], {}),
    "RESERVATIONS": (["GET /reservations"], {}),
    "SECRETS": (["GET /secrets"], {}),
    "KEYS": (["GET /keys"], {"user": "a"}),
    "USERS": (["GET /users"], {"tenant": "a"}),
    "ACCOUNTS": (["GET /users"], {"tenant": "a"}),
    "TENANTS": (["GET /tenants"], {"depth": 1}),
    "BUDGET": (["GET /tenants/{id}/budget"], {}),
    "VALIDATED": (["POST /requests:validate"], {}),
    "_SHARES": (["GET /fair-share"], {}),
}
#: Columns of rows that the command makes itself, or that lie inside an answer
#: (`test_running_files` shows these).
OWN = {"CHECKS", "FREE_TIMES", "KEPT_FILES", "OUTPUTS", "RUNNING_FILES", "USUAL_CHANNELS"}


def _columns() -> dict[str, list[Column]]:
    return {
        name: value
        for name, value in vars(wording).items()
        if isinstance(value, list) and value and all(isinstance(one, Column) for one in value)
    }


def test_every_list_of_columns_is_compared_with_an_operation():
    assert _columns().keys() == TABLES.keys() | OWN


@pytest.mark.parametrize("filled", [True, False], ids=["filled", "null"])
@pytest.mark.parametrize("name", TABLES)
def test_columns_read_fields_of_the_schema(name, filled):
    operations, added = TABLES[name]
    for operation in operations:
        row = answer(operation, filled=filled)
        within = {"VALIDATED": "tasks", "_SHARES": "tenants", "BUDGET": "kinds"}.get(name)
        if within is not None and not filled:
            continue
        row = row[within][0] if within else row
        of_row = Answered({**row, **added}, row.where)
        shown(table([of_row], _columns()[name]))


def of_task(value: JSON) -> RenderableType:
    return wording.task(value, [answer("GET /tasks/{id}/placements", filled=True)])


def of_explained(value: JSON) -> RenderableType:
    told = Answered({**value, "task": "a"}, value.where)
    wording.waits(told)
    return wording.explained([told], [], "a")


def of_outputs(value: JSON) -> RenderableType:
    return table(wording.outputs([value]), wording.OUTPUTS)


def of_failed(value: JSON) -> RenderableType:
    return wording.failure(value)


def of_usage(value: JSON) -> RenderableType:
    rows = [Answered({**row, "tenant": "a"}, row.where) for row in value["items"]]
    return table(rows, wording.usage_columns(["tenant"]))


ANSWERS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "request": ("GET /requests/{id}", wording.request),
    "accepted": ("POST /requests", wording.accepted),
    "ended": ("GET /requests/{id}", wording.ended),
    "validated": ("POST /requests:validate", wording.validated),
    "task": ("GET /tasks/{id}", of_task),
    "failure": ("GET /tasks/{id}", of_failed),
    "saving": ("GET /tasks/{id}", lambda value: wording.saving("a", value)),
    "moving": ("GET /tasks/{id}", lambda value: wording.moving("a", value, is_busy=True)),
    "resized": ("GET /tasks/{id}", lambda value: wording.resized("a", value, value)),
    "paused": ("GET /requests/{id}", lambda value: wording.asked("pause", "a", value)),
    "cancelled": ("GET /requests/{id}", lambda value: wording.asked("cancel", "a", value)),
    "outputs": ("GET /tasks/{id}", of_outputs),
    "no outputs": ("GET /tasks/{id}", wording.no_outputs),
    "silent": ("GET /requests/{id}", wording.silent),
    "quiet": ("GET /requests/{id}", lambda value: wording.quiet(value, "a")),
    "explained": ("GET /tasks/{id}/explain", of_explained),
    "datablock": ("GET /datablocks", wording.datablock),
    "shares": ("GET /fair-share", wording.shares),
    "device": ("GET /devices/{id}", lambda value: wording.one_device(value, {})),
    "served": ("GET /devices/{id}", lambda value: wording.served("drain", [value], {})),
    "usage": ("GET /usage", of_usage),
    "webhook": ("POST /webhooks", wording.webhook),
    "channel": ("POST /channels", wording.channel),
    "reservation": ("POST /reservations", wording.reservation),
    "key": ("POST /keys", wording.key),
    "work": ("POST /tenants/{id}/hold", lambda value: wording.work_taken("a", value, "pause")),
    "keys revoked": ("DELETE /users/{id}/keys", lambda value: wording.keys_revoked("a", value)),
    "tenant": ("GET /tenants/{id}", wording.tenant),
    "tenants": ("GET /tenants", lambda value: wording.as_tree([value])),
    "user": ("GET /users/{id}", wording.user),
    "budget": ("GET /users/{id}/budget", wording.budget),
    "me": ("GET /me", wording.me),
    "bundle": ("PUT /bundles/{sha256}", wording.unparsed),
}


@pytest.mark.parametrize("filled", [True, False], ids=["filled", "null"])
@pytest.mark.parametrize("name", ANSWERS)
def test_words_read_fields_of_the_schema(name, filled):
    operation, told = ANSWERS[name]
    shown(told(answer(operation, filled=filled)))


def test_columns_of_devices_show_what_a_device_says_of_itself():
    said = {
        "model": "H100",
        "compute_capability": "9.0",
        "rack": "r7",
        "location": ["0", "3"],
        "labels": ["spot"],
    }
    columns = {column.heading: column for column in wording.DEVICES}
    told = {
        "MODEL": "H100",
        "CAPABILITY": "9.0",
        "LOCATION": "r7/0/3",
        "LABELS": "spot",
    }
    assert {name: columns[name].of({"facts": said}) for name in told} == told


@cache
def _console() -> Console:
    return Console(width=200, quiet=True)


def shown(value: object) -> None:
    """Render it, since a cell is made when its table is drawn."""
    _console().print(value)
