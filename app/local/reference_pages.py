"""Write the pages of docs/reference that are made of the code.

    python -m app.local.reference_pages

The pages are api.md, descriptor_fields.md, cli.md, errors.md and states.md.  `tests/test_docs.py`
compares them with the code, so a page that was edited by hand, or not written again, fails there.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from app import errors
from app.api import descriptor_schema
from app.api.problems import MEANINGS
from app.cli import main as cli
from app.core.device import device_machine, stay_state
from app.core.model import lifecycle
from app.core.model.fields import NAME_RULE
from app.core.model.phase import OF_STATE, Phase
from app.main import create_app

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
MADE = "*This page is made by `python -m app.local.reference_pages`: do not edit it.*"
WIDTH = 100  # columns of a page
UNUSUAL = ("help", "install_completion", "show_completion")  # options that every verb may have
VERBS = ("get", "head", "post", "put", "patch", "delete")


def _rows(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# --- the API --------------------------------------------------------------------------------------


def api() -> str:
    """List the operations of the API, by the tag that also groups them in /docs."""
    tags: dict[str, list[list[str]]] = {}
    for path, operations in create_app().openapi()["paths"].items():
        for verb in VERBS:
            if verb in operations:
                operation = operations[verb]
                tags.setdefault(operation["tags"][0], []).append(_operation(verb, path, operation))
    head = ["call", "does", "operation", "scope"]
    parts = [f"## {tag.capitalize()}\n\n{_rows(head, rows)}" for tag, rows in tags.items()]
    return "\n\n".join([API, *parts]) + "\n"


def _operation(verb: str, path: str, operation: dict[str, Any]) -> list[str]:
    scope = operation.get("x-scope")
    name = f"`{operation['operationId']}`"
    return [f"`{verb.upper()} {path}`", operation["summary"], name, f"`{scope}`" if scope else ""]


API = f"""# API

{MADE}

Every operation, with the scope that a key needs for it: see
[tenants, users and keys](../howto/tenants_and_keys.md). The document itself is
[openapi.json](../openapi.json). A running service has it at `/openapi.json`, and at `/docs` with a
form for each call.

* **Sign in** with `Authorization: Bearer KEY`. `GET /v1/me` says who you are.
* **Errors** are `application/problem+json`; [errors](errors.md) lists the types.
* **Submits** take an `Idempotency-Key`: the same call with the same key answers the first result.
* **Changes** of tenants, users and devices need the `ETag` that was read, as `If-Match`.
* **Lists** come in pages: `next_cursor` of an answer is the `cursor` of the next call.
* **Waiting** needs no polling: `?wait=20` answers at the next change, and the `.../stream`
  operations send events. A broken stream continues from its `Last-Event-ID`."""


# --- fields of a descriptor -----------------------------------------------------------------------


def fields() -> str:
    """List every field of a descriptor, from the schema that the API publishes."""
    head = ["field", "type", "default", "meaning"]
    rows = [*_fields(descriptor_schema.SCHEMA, "")]
    return "\n\n".join([FIELDS, _rows(head, rows)]) + "\n"


def _fields(schema: dict[str, Any], path: str) -> Iterator[list[str]]:
    shown = _resolved(schema)
    if path and not path.endswith("[]"):
        default = shown.get("default")
        told = "" if default is None else f"`{json.dumps(default)}`"
        yield [f"`{path}`", _type(shown), told, str(shown.get("description", ""))]
    for name, inner in shown.get("properties", {}).items():
        yield from _fields(inner, f"{path}.{name}" if path else name)
    if "properties" in _resolved(shown.get("items", {})):
        yield from _fields(shown["items"], f"{path}[]")


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """Follow references, and leave out that a field may be null."""
    if "$ref" in schema:
        return _resolved(descriptor_schema.COMPONENTS[schema["$ref"].rpartition("/")[2]])
    kept = [each for each in schema.get("anyOf", []) if each.get("type") != "null"]
    return _resolved({**schema, **kept[0], "anyOf": []}) if len(kept) == 1 else schema


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(schema["enum"])
    found = schema.get("type", "text or object")
    names = [found] if isinstance(found, str) else [name for name in found if name != "null"]
    return NAMES_OF_TYPES.get(names[0], names[0])


NAMES_OF_TYPES = {"string": "text", "array": "list", "integer": "whole number"}

FIELDS = f"""# Fields of a descriptor

{MADE}

`tasks[].devices.min` is the field `min` of `devices` of a task. Only `tasks`, `tasks[].name` and
`tasks[].run` must be there. An unknown field is refused, with a hint. [Jobs and
requests](descriptor.md) shows a whole descriptor; `roundhouse submit FILE --check` checks one. For
the command, `bundle` is a folder beside the file. A name has {NAME_RULE}."""


# --- the command ----------------------------------------------------------------------------------


def command() -> str:
    """List every verb of `roundhouse` with its arguments and options."""
    group: Any = typer.main.get_command(cli.app)
    panels: dict[str, list[str]] = {}
    for name, panel, each in _commands(group, "roundhouse"):
        panels.setdefault(panel, []).append(_verb(name, each))
    parts = [f"## {panel}\n\n" + "\n\n".join(verbs) for panel, verbs in panels.items()]
    return "\n\n".join([CLI, *parts]) + "\n"


def _commands(group: Any, prefix: str, panel: str = "") -> Iterator[tuple[str, str, Any]]:
    context = typer.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        its_panel = panel or str(getattr(found, "rich_help_panel", "") or "")
        if hasattr(found, "list_commands"):
            yield from _commands(found, f"{prefix} {name}", its_panel)
        else:
            yield f"{prefix} {name}", its_panel, found


def _verb(name: str, found: Any) -> str:
    arguments = [each for each in found.params if each.param_type_name == "argument"]
    options = [each for each in found.params if each.param_type_name == "option"]
    words = " ".join([name, *(_argument(each) for each in arguments)])
    lines = [f"### `{words}`", *_paragraphs(found.help or "")]
    rows = [[f"`{_option(each)}`", each.help or ""] for each in options if each.name not in UNUSUAL]
    if rows:
        lines.append(_rows(["option", "meaning"], rows))
    return "\n\n".join(lines)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a verb's help; lists of example commands become code."""
    for part in text.replace("\b", "").split("\n\n"):
        if part.strip().startswith("roundhouse "):
            yield f"```\n{part.strip()}\n```"
        elif part.strip():
            yield textwrap.fill(" ".join(part.split()), WIDTH)


def _argument(found: Any) -> str:
    shown = found.metavar or found.name.upper()
    return shown if found.required else f"[{shown}]"


def _option(found: Any) -> str:
    names = ", ".join([*found.opts, *found.secondary_opts])
    return names if found.is_flag else f"{names} {found.metavar or _value(found)}"


def _value(found: Any) -> str:
    kind = found.type_descriptor.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(each.value) for each in kind)
    return VALUES.get(kind, "TEXT")


VALUES = {int: "NUMBER", float: "NUMBER", Path: "FILE"}

CLI = f"""# The command

{MADE}

Every verb of `roundhouse`. `roundhouse VERB --help` shows the same. `--as TENANT[:ROLE]`, before
the verb, uses a key that `make up` made; `roundhouse login` stores the address and key of another
service.

* **Names.** A name stands for the newest request of that name, and `NAME/TASK` for one of its
  tasks. Ids work everywhere, and so do the last eight characters of an id.
* **Output.** `-o json` and `-o yaml` print what the API answered; `-o wide` adds columns. Data goes
  to stdout, everything else to stderr.
* **Exit codes.** 0 success, 1 the job failed, 2 usage, 3 no access, 4 refused, 5 not found,
  6 no answer, 130 interrupted."""


# --- errors ---------------------------------------------------------------------------------------


def problems() -> str:
    """List every problem type: what it means and what to do."""
    found = sorted(_problem_classes(errors.AppError), key=lambda each: (each.status, each.type))
    known = {each.type: each for each in found}
    head = ["type", "status", "means", "what to do"]
    rows = [[f"`{type_}`", str(each.status), *MEANINGS[type_]] for type_, each in known.items()]
    rest = [
        [f"`{type_}`", STATUS[type_], *MEANINGS[type_]] for type_ in MEANINGS if type_ not in known
    ]
    return "\n\n".join([ERRORS, _rows(head, sorted([*rows, *rest], key=lambda row: row[1]))]) + "\n"


def _problem_classes(base: type[errors.AppError]) -> Iterator[type[errors.AppError]]:
    yield base
    for each in base.__subclasses__():
        yield from _problem_classes(each)


#: The status of problem types that no class of `app.errors` has, as the framework itself raises
#: them.
STATUS = {"method-not-allowed": "405", "bad-request": "400"}

ERRORS = f"""# Errors

{MADE}

The API answers every error as `application/problem+json` (RFC 9457):

```json
{{
  "type": "/problems/not-found",
  "title": "Not found",
  "status": 404,
  "detail": "no request with id req_...",
  "instance": "/v1/requests/req_...",
  "request_id": "..."
}}
```

* `type` can be opened: `/problems/not-found` of a running service says what the row below says.
* `detail` says what was wrong with this call.
* `errors`, if present, names each fault: `pointer` is a JSON Pointer into the body, `?name` a query
  parameter, `name:` a header, `{{name}}` a part of the path.
* `request_id` identifies the line of the log.

A refused call changed nothing. Programs decide by `type`, never by the text."""


# --- states ---------------------------------------------------------------------------------------


def states() -> str:
    """Show the tables of a task's and a stay's states, and the word that people see for each."""
    shown = {state.value: phase.value for state, phase in OF_STATE.items()}
    for state in lifecycle.NOT_STARTED:
        shown[state.value] = "queued, preempted or paused"
    phases = _rows(
        ["state", "phase"], [[f"`{state}`", shown[state.value]] for state in lifecycle.State]
    )
    words = ", ".join(f"*{phase}*" for phase in Phase)
    return STATES.format(
        made=MADE,
        words=words,
        phases=phases,
        table=lifecycle.table(),
        stays=stay_state.stay_table(),
        silent=", ".join(f"`{reason}`" for reason in sorted(device_machine.SILENT_REASONS)),
    )


STATES = """# States

{made}

A task has a **state**, the scheduler's own word, and a **phase**, the word that people see. The
phases are {words}.

## Phases

{phases}

A task that is `blocked` or `waiting` is *paused* if a person holds it. It is *preempted* if it has
run and left its device without a failure. Otherwise it is *queued*. `app/core/model/phase.py`
decides it; API, pages and command show its word. A request has the phase of its most advanced task
that has not ended.

## The lifecycle table

Rows are states, columns are moves. The table holds every change of state that there is.
`app/core/model/lifecycle.py` refuses any other, and names the task, its state, the move and the
moves that it expected. `python -m app.core.model.lifecycle` prints the table.

{table}

* `Splice` gives a task of several ranks more devices, or takes some
  ([elastic splicing](../concepts/elastic_splicing.md)).
* `Share` tells a graph that others take turns with it on its device
  ([fair share](../internals/fair_share.md#graphs-that-share-a-device)).
* `Failed` goes back to the queue while `retry.max` allows; `GaveUp` is `Failed` with no attempt
  left. A pause never counts as an attempt.
* A move to another device is a pause and a launch, so no state stands for it.

## The table of a stay on a device

A **stay** is one epoch of a task on a device. `app/core/device/device_machine.py` decides about the
stays of a device: events in, instructions out, with the time as an argument. The supervisor of the
device (`workers/device/supervision`) carries the instructions out.
`python -m app.core.device.stay_state` prints the table.

{stays}

* A `seating` task has not had the slot yet. It takes the slot only while the device trusts its
  lease, and after the island confirmed the stay.
* A `running` task has the slot, or waits for its next slice.
* A stay that `ended` reported how. A `dropped` stay reports nothing: the island sees that it is
  gone.
* A paused task is launched again with the next epoch. If its process is still there, the old stay
  continues as the new one.
* A process has one kill reason. These reasons send no event: {silent}.
"""


PAGES: dict[str, Callable[[], str]] = {
    "api.md": api,
    "descriptor_fields.md": fields,
    "cli.md": command,
    "errors.md": problems,
    "states.md": states,
}


def main() -> int:
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
