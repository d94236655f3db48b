"""Verbs that change work: cancel, pause, resume, migrate, resize, checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer
from rich.text import Text

from app.cli import names, verbs, wording
from app.cli.client import JSON, ApiProblem
from app.cli.tables import Output, err, show
from app.cli.verbs import WORK, Format, Several, Which, app


@app.command(rich_help_panel=WORK)
def cancel(ctx: typer.Context, ids: Several, output: Format = Output.table) -> None:
    """End it at its next safe point; its progress is discarded."""
    _ask(ctx, "cancel", ids, {"requests": "cancel", "tasks": "cancel"}, output)


@app.command(rich_help_panel=WORK)
def pause(ctx: typer.Context, ids: Several, output: Format = Output.table) -> None:
    """Give its device to others; it loses no step and waits until it is resumed."""
    _ask(ctx, "pause", ids, {"requests": "hold", "tasks": "pause"}, output)


@app.command(rich_help_panel=WORK)
def resume(ctx: typer.Context, ids: Several, output: Format = Output.table) -> None:
    """Let it run again; it continues after the last step that it finished."""
    _ask(ctx, "resume", ids, {"requests": "release", "tasks": "resume"}, output)


@app.command(rich_help_panel=WORK)
def migrate(
    ctx: typer.Context,
    id: Which,
    to: Annotated[
        str | None, typer.Option("--to", help="target device; default: any free device")
    ] = None,
    output: Format = Output.table,
) -> None:
    """Move it to another device while it runs; it loses no step."""
    with verbs.connect(ctx) as client:
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
    """Let a task of several ranks hold fewer devices, or more; its results stay bit-identical."""
    with verbs.connect(ctx) as client:
        asked = [
            (task, client.post(f"/v1/tasks/{task['id']}/resize", {"devices_max": most}))
            for task in names.named_tasks(client, id)
        ]
    show_asked(asked, output, partial(wording.resized, wording.called(id)))


@app.command(rich_help_panel=WORK)
def checkpoint(ctx: typer.Context, id: Which, output: Format = Output.table) -> None:
    """Write a durable checkpoint at its next safe point; it continues to run."""
    with verbs.connect(ctx) as client:
        asked = [
            (task, client.post(f"/v1/tasks/{task['id']}/checkpoint"))
            for task in names.named_tasks(client, id)
        ]
    show_asked(asked, output, lambda _, now: wording.saving(wording.called(id), now))


def show_asked(
    asked: list[tuple[JSON, JSON]], output: Output, told: Callable[[JSON, JSON], Text]
) -> None:
    """Show what came of an action on each task, given as (the task before, the task now)."""
    show(
        [now for _, now in asked],
        output,
        lambda: Text("\n").join(told(before, now) for before, now in asked),
    )


def _ask(
    ctx: typer.Context, verb: str, ids: list[str], paths: dict[str, str], output: Output
) -> None:
    """Try the action on all ids; the exit code is that of the first problem."""
    done: list[tuple[str, JSON]] = []
    first = None
    with verbs.connect(ctx) as client:
        for given in ids:
            try:
                kind, id = names.resolve(client, given)
                done.append((given, client.post(f"/v1/{kind}/{id}/{paths[kind]}")))
            except ApiProblem as problem:
                first = first or problem
                err().print(Text.assemble(f"{given}: ", wording.problem(problem)))
    if done:
        lines = [wording.asked(verb, given, now) for given, now in done]
        show([now for _, now in done], output, lambda: Text("\n").join(lines))
    if first is not None:
        raise typer.Exit(verbs.exit_code(first))
