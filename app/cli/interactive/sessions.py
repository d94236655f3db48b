"""The verb run --interactive: a terminal on a device, from nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from app.cli import names, package_files, root_command, wording
from app.cli.bundling import bundle_folder
from app.cli.client import JSON, Client, Unreachable
from app.cli.interactive import tunnels
from app.cli.root_command import WORK, app
from app.cli.tables import err
from app.cli.verbs import submit
from app.core.model.provisions.session import USUAL_IDLE_S

#: options of every verb that begins a session
BeginsWith = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="folder with which its working folder begins"),
]
DeviceKind = Annotated[str, typer.Option(help="kind of device")]
IdleS = Annotated[
    float, typer.Option(help="seconds without computing and input, after which the device is free")
]

#: A session's own command: its shells are what a person uses.
WAITS = ["sleep", "infinity"]


@app.command(rich_help_panel=WORK)
def run(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- WORDS", help="a program to run instead of the usual shell"),
    ] = None,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="open a terminal on a device")
    ] = False,
    folder: BeginsWith = None,
    kind: DeviceKind = "cpu",
    name: Annotated[str, typer.Option(help="name of the request")] = "session",
    idle: IdleS = USUAL_IDLE_S,
) -> None:
    """Open a terminal on a device.  It gives the device to others while it is idle.

    It comes back at the next keystroke, with everything where it was.  The session ends with its
    shell; Ctrl-] leaves it running, and `roundhouse shell` enters it again.
    """
    if not interactive:
        raise typer.BadParameter(
            "only sessions run in the foreground: add --interactive, or use `roundhouse submit`"
        )
    with root_command.connect(ctx) as client:
        task = submit_session(client, name, WAITS, kind=kind, idle_s=idle, folder=folder)
        with_it = asyncio.run(tunnels.run_shell(client, task["id"], words or []))
        end_unless_left(client, task, with_it)
        raise typer.Exit(tunnels.exit_code(with_it))


def submit_session(
    client: Client,
    name: str,
    argv: list[str],
    *,
    kind: str,
    idle_s: float,
    folder: Path | None,
    more: JSON | None = None,
    environment: str = "",
) -> JSON:
    """Submit a session, with `more` fields of its task; return the task."""
    task: JSON = {"name": name, "run": {"command": argv}, "session": {"idle_s": idle_s}}
    task |= more or {}
    if kind != "cpu":
        task["devices"] = {"kind": kind}
    body: JSON = {"name": name, "tasks": [task]}
    more_files: dict[str, bytes] = {}
    if environment:
        body["environment"], more_files = package_files.environment_of(folder, environment, "")
    if folder is not None:
        code = bundle_folder(folder, more_files)
        submit.upload(client, code)
        body["bundle"] = f"sha256:{code.sha256}"
    made = client.submit(body)
    found: JSON = made["tasks"][0]
    return found


def end_unless_left(client: Client, task: JSON, shown: tunnels.ShownShell) -> None:
    """End the session when its shell has ended.

    It stays if the user only left it, or if the connection was lost.
    """
    try:
        goes_on = names.is_unfinished(client.get(f"/v1/tasks/{task['id']}"))
    except Unreachable:
        if not shown.goes_on:
            raise
        goes_on = True
    if goes_on and shown.goes_on:
        err().print(wording.left_session(task["request_id"]))
    elif goes_on:
        client.post(f"/v1/tasks/{task['id']}/cancel")
        err().print(Text("The session has ended."))
