"""Verbs that look at work: ps, show, members, compare, why, logs, watch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Annotated

import typer

from app.cli import names, root_command, watching, wording
from app.cli.client import JSON, Client
from app.cli.root_command import LIVE, WORK, Format, Several, Which, app
from app.cli.tables import Output, err, out, show, show_line, table, words
from app.core.model import run_comparison
from app.core.model.run_comparison import RUNS_MOST, ComparedRun


@app.command(rich_help_panel=WORK)
def ps(
    ctx: typer.Context,
    all_: Annotated[bool, typer.Option("--all", "-a", help="also list ended requests")] = False,
    kept: Annotated[
        bool, typer.Option("--kept", help="list the requests that are kept, ended or not")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=200, help="print at most so many")
    ] = 50,
    output: Format = Output.table,
) -> None:
    """List requests, newest first."""
    phase = None if all_ or kept else LIVE
    with root_command.connect(ctx) as client:
        page = client.get("/v1/requests", phase=phase, keep=kept or None, limit=limit)
    if page["items"] or output in (Output.json, Output.yaml):
        show(page["items"], output, lambda: table(page["items"], wording.REQUESTS))
    if not page["items"] and kept:
        err().print("No request is kept.  `roundhouse keep NAME` keeps one.")
    elif not page["items"] and not all_:
        err().print(
            "Nothing is queued or running.  `roundhouse ps -a` also lists ended requests; "
            "`roundhouse submit --help` explains how to submit."
        )
    if page.get("next_cursor"):
        err().print(f"There are more than {limit}; use --limit to list more.")


@app.command("show", rich_help_panel=WORK)
def show_one(ctx: typer.Context, id: Which, output: Format = Output.table) -> None:
    """Show a request with its tasks, or one task with where it ran."""
    with root_command.connect(ctx) as client:
        kind, id = names.resolve(client, id)
        value = client.get(f"/v1/{kind}/{id}")
        if kind == "requests":
            show(value, output, lambda: wording.request(value))
            return
        stays = list(client.items(f"/v1/tasks/{id}/placements"))
    show({**value, "placements": stays}, output, lambda: wording.task(value, stays))


@app.command(rich_help_panel=WORK)
def members(
    ctx: typer.Context,
    id: Which,
    state: Annotated[
        str | None, typer.Option("--state", help="only members in this state, such as failed")
    ] = None,
    sort: Annotated[
        str | None, typer.Option("--sort", help="by this metric, the lowest first")
    ] = None,
    highest: Annotated[
        bool, typer.Option("--highest", help="with --sort: the highest first")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=200, help="print at most so many")
    ] = 50,
    output: Format = Output.table,
) -> None:
    """List members of a request's lots with their values, newest first or by a metric."""
    asked = {"phase": state, "limit": limit}
    if sort:
        asked["sort"] = f"{'-' if highest else ''}metric:{sort}"
    with root_command.connect(ctx) as client:
        lots = [task for task in names.named_tasks(client, id) if task["lot"]]
        found = [
            each
            for lot in lots
            for each in client.get("/v1/tasks", lot=lot["id"], **asked)["items"]
        ]
    none = "No members." if lots else "It has no lot."
    show(found, output, lambda: table(found, wording.MEMBERS, empty=none))


@app.command(rich_help_panel=WORK)
def compare(
    ctx: typer.Context,
    given: Several,
    alike: Annotated[
        bool, typer.Option("--alike", "-a", help="also fields that are the same in all")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="print CSV")] = False,
    output: Format = Output.table,
) -> None:
    """Compare up to 20 runs: what they were asked to do where it differs, and what came of it.

    A lot stands for its members.
    """
    with root_command.connect(ctx) as client:
        found = [each for name in given for each in _named_runs(client, name)]
        if not 2 <= len(found) <= RUNS_MOST:
            told = f"between 2 and {RUNS_MOST} runs can be compared, these are {len(found)}"
            hint = "`roundhouse members LOT --sort METRIC` finds the best"
            raise typer.BadParameter(f"{told}; {hint}")
        runs = [_run(client, heading, task) for heading, task in found]
    rows = run_comparison.compared(runs, alike=alike)
    if as_csv:
        for line in run_comparison.as_csv(runs, rows).removesuffix("\n").split("\n"):
            out().print(words(line), soft_wrap=True)
        return
    headings = [run.heading for run in runs]
    value = {"runs": [{"name": run.heading, "id": run.id} for run in runs], "fields": rows}
    show(value, output, lambda: table(rows, wording.compared(headings), empty="They are alike."))


def _named_runs(client: Client, given: str) -> list[tuple[str, JSON]]:
    """Return the named tasks, each with its heading; of a lot its members, up to one more than can
    be compared.
    """
    kind, id = names.resolve(client, given)
    if kind == "tasks":
        tasks = [client.get(f"/v1/tasks/{id}")]
    else:
        tasks = client.get(f"/v1/requests/{id}")["tasks"]
    found = list[tuple[str, JSON]]()
    for task in tasks:
        heading = given if len(tasks) == 1 else f"{given}/{task['name']}"
        if not task["lot"]:
            found.append((heading, task))
            continue
        members = client.get("/v1/tasks", lot=task["id"], limit=RUNS_MOST + 1)["items"]
        request = given.partition("/")[0]
        found += [(f"{request}/{each['name']}", each) for each in reversed(members)]
    return found


def _run(client: Client, heading: str, task: JSON) -> ComparedRun:
    asked = client.get(f"/v1/tasks/{task['id']}/descriptor")["descriptor"]
    return ComparedRun(
        id=task["id"],
        heading=heading,
        descriptor=asked,
        values=task["lot_values"] or {},
        phase=task["phase"],
        step=task["step"],
        held_us=wording.device_us(task),
        metrics=task["metrics"],
    )


@app.command(rich_help_panel=WORK)
def why(ctx: typer.Context, given: Which, output: Format = Output.table) -> None:
    """Explain why a request or task waits, and what would let it start."""
    with root_command.connect(ctx) as client:
        kind, id = names.resolve(client, given)
        tasks = [client.get(f"/v1/tasks/{id}")] if kind == "tasks" else names.open_tasks(client, id)
        told = [watching.explain(client, task) for task in tasks]
    failed = [task for task in tasks if task["state"] == "failed"]
    show(told, output, lambda: wording.explained(told, failed, wording.called(given)))


@app.command(rich_help_panel=WORK)
def logs(
    ctx: typer.Context,
    given: Which,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="follow until the task ends")
    ] = False,
    grep: Annotated[
        str | None, typer.Option("--grep", "-g", help="only lines that contain this text")
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=1, help="print only the last lines")
    ] = None,
    output: Format = Output.table,
) -> None:
    """Print what a request or task printed, on all devices and in all of its launches."""
    which = {"grep": grep, "tail": tail}
    with root_command.connect(ctx) as client:
        kind, id = names.resolve(client, given)
        request_id, task = id, ""
        if kind == "tasks":
            found = client.get(f"/v1/tasks/{id}")
            request_id, task = found["request_id"], found["name"]
            which["task"] = task
        waits = watching.WaitReasons(partial(root_command.connect, ctx), request_id, task)
        printed = False
        with waits if follow else nullcontext():
            for line in _lines(client, f"/v1/requests/{request_id}/logs", which, follow):
                waits.heard()
                show_line(line, output, partial(wording.log_line, line))
                printed = True
        if printed or grep:
            return
        value = client.get(f"/v1/{kind}/{id}")
        err().print(
            wording.silent(value)
            if value["state"] in wording.ENDED
            else wording.quiet(value, wording.called(given))
        )


def _lines(client: Client, path: str, which: JSON, follow: bool) -> Iterator[JSON]:
    given = {name: value for name, value in which.items() if value is not None}
    if not follow:
        yield from client.items(path, **{"limit": 200, **given})
        return
    client.be_patient(watching.tell_outage)
    for event in client.stream(path, **given):
        if event.type != "end":
            yield event.data


@app.command(rich_help_panel=WORK)
def watch(ctx: typer.Context, id: Which, output: Format = Output.table) -> None:
    """Print the events of a request until it ends; exit with 1 if it failed or was cancelled."""
    with root_command.connect(ctx) as client:
        kind, id = names.resolve(client, id)
        request_id = client.get(f"/v1/tasks/{id}")["request_id"] if kind == "tasks" else id
        watching.follow(ctx, client, request_id, output)
