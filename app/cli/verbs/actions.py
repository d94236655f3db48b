"""Verbs that change work: cancel, pause, resume, retry, at-once, migrate, resize, checkpoint, keep,
delete.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer
from rich.text import Text

from app.cli import names, root_command, wording
from app.cli.client import JSON, ApiProblem, Client
from app.cli.root_command import WORK, Format, Several, Which, app
from app.cli.tables import Output, err, show


@app.command(rich_help_panel=WORK)
def cancel(ctx: typer.Context, ids: Several, output: Format = Output.table) -> None:
    """End a request or task at its next safe point; its progress is discarded."""
    _ask(ctx, "cancel", ids, {"requests": "cancel", "tasks": "cancel"}, output)


@app.command(rich_help_panel=WORK)
def pause(ctx: typer.Context, ids: Several, output: Format = Output.table) -> None:
    """Pause a request or task: it frees its device, loses no step, and waits for `resume`."""
    _ask(ctx, "pause", ids, {"requests": "hold", "tasks": "pause"}, output)


@app.command(rich_help_panel=WORK)
def resume(ctx: typer.Context, ids: Several, output: Format = Output.table) -> None:
    """Resume a paused request or task, after the last step that it finished."""
    _ask(ctx, "resume", ids, {"requests": "release", "tasks": "resume"}, output)


@app.command(rich_help_panel=WORK)
def retry(
    ctx: typer.Context,
    ids: Several,
    failed: Annotated[
        bool, typer.Option("--failed", help="those that failed; this is the default")
    ] = False,
    cancelled: Annotated[
        bool, typer.Option("--cancelled", help="those that were cancelled")
    ] = False,
    output: Format = Output.table,
) -> None:
    """Start the failed tasks of requests again, and of their lots the failed members."""
    asked = {"failed": failed or not cancelled, "cancelled": cancelled}
    states = [state for state, is_asked in asked.items() if is_asked]
    _each(
        ctx,
        "retry",
        ids,
        lambda client, path: client.post(f"{path}/retry", {"states": states}),
        output,
    )


@app.command("at-once", rich_help_panel=WORK)
def bound_members(
    ctx: typer.Context,
    id: Which,
    most: Annotated[int, typer.Argument(min=0, help="most members that are queued or run")],
    output: Format = Output.table,
) -> None:
    """Set how many members of a request's lots are queued or run at once; 0 starts no more."""
    _each(ctx, "at-once", [id], lambda client, path: client.patch(path, {"at_once": most}), output)


@app.command("keep-best", rich_help_panel=WORK)
def keep_best(
    ctx: typer.Context,
    id: Which,
    share: Annotated[float, typer.Argument(help="share of the members, such as 0.5")],
    output: Format = Output.table,
) -> None:
    """Set which share of a lot's members goes on past a rung; a higher one wakes paused ones."""
    _each(
        ctx,
        "keep-best",
        [id],
        lambda client, path: client.patch(path, {"keep_best": share}),
        output,
    )


@app.command(rich_help_panel=WORK)
def keep(
    ctx: typer.Context,
    ids: Several,
    release: Annotated[
        bool, typer.Option("--release", help="no longer keep them: their age counts again")
    ] = False,
    output: Format = Output.table,
) -> None:
    """Keep requests with their checkpoints, however old they are."""
    verb = "release" if release else "keep"
    _each(ctx, verb, ids, lambda client, path: client.patch(path, {"keep": not release}), output)


@app.command(rich_help_panel=WORK)
def delete(ctx: typer.Context, ids: Several, output: Format = Output.table) -> None:
    """Delete ended requests with their logs, outputs and checkpoints; they stay charged."""
    _each(ctx, "delete", ids, lambda client, path: client.delete(path), output)


@app.command(rich_help_panel=WORK)
def migrate(
    ctx: typer.Context,
    id: Which,
    to: Annotated[
        str | None, typer.Option("--to", help="target device; default: any free device")
    ] = None,
    output: Format = Output.table,
) -> None:
    """Move a task to another device while it runs; it loses no step."""
    with root_command.connect(ctx) as client:
        asked = [
            (task, client.post(f"/v1/tasks/{task['id']}/migrate", {"to": to}))
            for task in names.named_tasks(client, id)
        ]
        is_busy = to is not None and client.get(f"/v1/devices/{to}")["busy"]
    show_asked(
        asked, output, lambda _, now: wording.moving(wording.called(id), now, is_busy=is_busy)
    )


@app.command(rich_help_panel=WORK)
def resize(
    ctx: typer.Context,
    id: Which,
    most: Annotated[int, typer.Argument(min=1, help="the most devices that the task may hold")],
    output: Format = Output.table,
) -> None:
    """Set how many devices a task of several ranks may hold; its results stay bit-identical."""
    with root_command.connect(ctx) as client:
        asked = [
            (task, client.post(f"/v1/tasks/{task['id']}/resize", {"devices_max": most}))
            for task in names.named_tasks(client, id)
        ]
    show_asked(asked, output, partial(wording.resized, wording.called(id)))


@app.command(rich_help_panel=WORK)
def checkpoint(ctx: typer.Context, id: Which, output: Format = Output.table) -> None:
    """Write a durable checkpoint of a task at its next safe point; the task continues."""
    with root_command.connect(ctx) as client:
        asked = [
            (task, client.post(f"/v1/tasks/{task['id']}/checkpoint"))
            for task in names.named_tasks(client, id)
        ]
    show_asked(asked, output, lambda _, now: wording.saving(wording.called(id), now))


def show_asked(
    asked: list[tuple[JSON, JSON]], output: Output, told: Callable[[JSON, JSON], Text]
) -> None:
    """Show the effect of an action on each task; each is given as (the task before, the task
    now).
    """
    show(
        [now for _, now in asked],
        output,
        lambda: Text("\n").join(told(before, now) for before, now in asked),
    )


def _ask(
    ctx: typer.Context, verb: str, ids: list[str], paths: dict[str, str], output: Output
) -> None:
    def post(client: Client, given: str) -> JSON:
        kind, id = names.resolve(client, given)
        return client.post(f"/v1/{kind}/{id}/{paths[kind]}")

    _try_all(ctx, verb, ids, post, output)


def _each(
    ctx: typer.Context,
    verb: str,
    ids: list[str],
    act: Callable[[Client, str], JSON],
    output: Output,
) -> None:
    """Try the action on all these requests.

    Tasks are rejected, because the action exists only for requests.
    """

    def act_on(client: Client, given: str) -> JSON:
        kind, id = names.resolve(client, given)
        if kind == "tasks":
            raise typer.BadParameter(f"{given} is a task; {verb} its request")
        return act(client, f"/v1/requests/{id}")

    _try_all(ctx, verb, ids, act_on, output)


def _try_all(
    ctx: typer.Context,
    verb: str,
    ids: list[str],
    act: Callable[[Client, str], JSON],
    output: Output,
) -> None:
    """Try the action on all ids; the first problem decides the exit code."""
    done: list[tuple[str, JSON]] = []
    first = None
    with root_command.connect(ctx) as client:
        for given in ids:
            try:
                done.append((given, act(client, given)))
            except ApiProblem as problem:
                first = first or problem
                err().print(Text.assemble(f"{given}: ", wording.problem(problem)))
    if done:
        lines = [wording.asked(verb, given, now) for given, now in done]
        show([now for _, now in done], output, lambda: Text("\n").join(lines))
    if first is not None:
        raise typer.Exit(root_command.exit_code(first))
