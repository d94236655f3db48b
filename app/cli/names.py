"""Find the request or task that a user named."""

from __future__ import annotations

import re

import typer

from app.cli import wording
from app.cli.client import JSON, ApiProblem, Client
from app.cli.tables import short

NOTHING = "Not found"


def open_tasks(client: Client, request_id: str) -> list[JSON]:
    tasks = client.get(f"/v1/requests/{request_id}")["tasks"]
    return [task for task in tasks if task["state"] not in wording.ENDED] or tasks


def is_unfinished(task: JSON) -> bool:
    return task["state"] not in wording.ENDED


def resolve(client: Client, given: str) -> tuple[str, str]:
    """Return ("requests" or "tasks", id) of the named thing; raises ApiProblem if there is none.

    A name means the newest request of that name; any other text may be the end of an id.  `/TASK`
    after either, or after a whole id, means that task of the request.
    """
    request, slash, task = given.partition("/")
    if slash:
        return "tasks", _task_named(client, _request(client, request), task)
    if given.startswith("tsk_"):
        return "tasks", given
    return "requests", _request(client, given)


def _request(client: Client, given: str) -> str:
    if given.startswith("req_"):
        return given
    found = client.get("/v1/requests", name=given, limit=1)["items"]
    if not found and re.fullmatch("[0-9a-f]{8,32}", given):
        found = client.get("/v1/requests", id_ends=given, limit=2)["items"]
    if len(found) > 1:
        ids = ", ".join(each["id"] for each in found)
        raise typer.BadParameter(f"several ids end in {given}, such as {ids}; give more digits")
    if not found:
        raise not_found(f"no request has the name {given!r} or an id with this end")
    return str(found[0]["id"])


def _task_named(client: Client, request_id: str, name: str) -> str:
    tasks = client.get(f"/v1/requests/{request_id}")["tasks"]
    for task in tasks:
        if task["name"] == name:
            return str(task["id"])
    if any(task["lot"] for task in tasks):
        members = client.get("/v1/tasks", request_id=request_id, name=name)["items"]
        if members:
            return str(members[0]["id"])
    known = ", ".join(task["name"] for task in tasks)
    raise not_found(f"the request has no task {name!r}; its tasks are {known}")


def named_tasks(client: Client, given: str) -> list[JSON]:
    """Return the named task.

    For a request, return its tasks that have not ended, or all tasks if all have ended.
    """
    kind, id = resolve(client, given)
    return [client.get(f"/v1/tasks/{id}")] if kind == "tasks" else open_tasks(client, id)


def one_task(client: Client, given: str) -> JSON:
    """Return the one unfinished task that was named."""
    tasks = named_tasks(client, given)
    if len(tasks) > 1:
        known = ", ".join(f"{given}/{task['name']}" for task in tasks[:8])
        raise typer.BadParameter(f"{given} has several tasks; name one of {known}")
    return tasks[0]


def not_found(told: str) -> ApiProblem:
    return ApiProblem(404, {"type": "not-found", "title": NOTHING, "detail": told})


def find_named(client: Client, kind: str, which: str) -> JSON:
    """Return the tenant or user of this id or name; if the name is ambiguous, the error lists the
    ids.
    """
    listed = list(client.items(f"/v1/{kind}s"))
    found = [item for item in listed if which in (item["id"], item["name"], short(item["id"]))]
    if len(found) > 1:
        raise typer.BadParameter(
            f"{which} is ambiguous: {', '.join(item['id'] for item in found)}; give an id"
        )
    if not found:
        told = f"no visible {kind} has the name or id {which!r}"
        raise not_found(told)
    return found[0]


def names_that_begin(client: Client, incomplete: str) -> list[str]:
    """Return names of the newest requests, or NAME/TASK, that begin like this."""
    request, slash, _ = incomplete.partition("/")
    if slash:
        tasks = client.get(f"/v1/requests/{_request(client, request)}")["tasks"]
        known = [f"{request}/{task['name']}" for task in tasks]
    else:
        known = [each["name"] for each in client.get("/v1/requests", limit=200)["items"]]
    return [name for name in dict.fromkeys(known) if name.startswith(incomplete)]
