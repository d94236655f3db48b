"""Verbs for the data of tasks: outputs, checkpoints, export, cp, datablocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from app.cli import kept_files, names, root_command, wording
from app.cli.bundling import UnreadablePath
from app.cli.client import JSON, Client
from app.cli.folders import get_folder, put_folder
from app.cli.root_command import DATA, NOT_FOUND, WORK, Format, Verbs, Which, app
from app.cli.tables import Output, err, show, table
from app.core.model.provisions.best_rule import OF_BEST


@app.command(rich_help_panel=WORK)
def outputs(
    ctx: typer.Context,
    id: Which,
    wanted: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE...",
            help="kept files or folders of a command, such as out/model.pt or 'out/*.csv'",
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", help="download outputs that are files into this folder")
    ] = None,
    list_files: Annotated[
        bool, typer.Option("--files", help="list the kept files of a command one by one")
    ] = False,
    output: Format = Output.table,
) -> None:
    """List outputs of a request or task, and the kept files of a command.

    With FILE or --files, the kept files are listed one by one, and --to downloads only these. Of a
    lot, --to gets the outputs of all members, unpacked, each in a folder of its own.
    """
    with root_command.connect(ctx) as client:
        kind, id = names.resolve(client, id)
        found = client.get(f"/v1/{kind}/{id}")
        tasks = found["tasks"] if kind == "requests" else [found]
        lots = [task for task in tasks if task["lot"]]
        members = [each for lot in lots for each in client.items("/v1/tasks", lot=lot["id"])]
        given = wording.outputs([*tasks, *sorted(members, key=lambda each: each["lot_index"])])
        if wanted or list_files:
            _show_kept_files(client, given, wanted or ["*"], to, output)
            return
        files = [each for each in given if each["file"]]
        if to is not None and files:
            _download(client, files, to, unpacked=bool(members))
    if given or output in (Output.json, Output.yaml):
        show(given, output, lambda: table(given, wording.OUTPUTS))
    if not given:
        err().print(wording.no_outputs(found))
    if to is not None and not files:
        err().print(f"No output is a file: nothing was downloaded, and {to} was not created.")
        raise typer.Exit(NOT_FOUND)


def _show_kept_files(
    client: Client, given: list[JSON], patterns: list[str], to: Path | None, output: Output
) -> None:
    """List the kept files that match a pattern, and download them into the folder `to`, if given.

    If several tasks have kept files, each has a folder of its own there.
    """
    zips = [each for each in given if each["name"] == wording.artifacts_name()]
    listed: list[JSON] = []
    for each in zips:
        folder = to / each["task"] if to is not None and len(zips) > 1 else to
        path = f"/v1/tasks/{each['task_id']}/outputs/{each['name']}"
        with kept_files.opened_zip(client, path) as archive:
            for info in kept_files.files_in(archive):
                if not kept_files.is_wanted(info.filename, patterns):
                    continue
                listed.append(
                    {"task": each["task"], "file": info.filename, "size_bytes": info.file_size}
                )
                if folder is not None:
                    file = kept_files.extract(archive, info, folder)
                    err().print(f"{file}: {info.file_size} bytes")
    if listed:
        show(listed, output, lambda: table(listed, wording.KEPT_FILES))
        return
    err().print(f"No kept file matches {' '.join(patterns)}." if zips else "No files were kept.")
    raise typer.Exit(NOT_FOUND)


def _download(client: Client, given: list[JSON], folder: Path, *, unpacked: bool) -> None:
    """Download outputs that are files into the folder; `unpacked`, into a folder for each task."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for each in given:
            path = f"/v1/tasks/{each['task_id']}/outputs/{each['name']}"
            if unpacked and each["name"] == wording.artifacts_name():
                _unpack(client, path, folder / each["task"])
                continue
            file = (folder / each["task"] if unpacked else folder) / each["file"]
            file.parent.mkdir(exist_ok=True)
            client.fetch(path, file)
            err().print(f"{file}: {each['size_bytes']} bytes")
    except OSError as error:
        raise UnreadablePath(f"cannot write to {folder}: {error.strerror or error}") from error


def _unpack(client: Client, path: str, folder: Path) -> None:
    with kept_files.opened_zip(client, path) as archive:
        for info in kept_files.files_in(archive):
            kept_files.extract(archive, info, folder)
    err().print(f"{folder}")


@app.command(rich_help_panel=WORK)
def checkpoints(ctx: typer.Context, id: Which, output: Format = Output.table) -> None:
    """List durable checkpoints, newest first; `from_checkpoint` in a descriptor begins from one.

    Of a lot, such as a sweep, list those of all its members, with the best of all.
    """
    with root_command.connect(ctx) as client:
        found = [
            each
            for task in names.named_tasks(client, id)
            for each in (_of_members(client, task) if task["lot"] else _of_task(client, task))
        ]
    none = f"No checkpoints yet.  `roundhouse checkpoint {id}` requests one."
    show(found, output, lambda: table(found, wording.CHECKPOINTS, empty=none))


def _of_task(client: Client, task: JSON) -> list[JSON]:
    listed = client.items(f"/v1/tasks/{task['id']}/checkpoints")
    return [{"task": task["name"], **each, "best_of_lot": False} for each in listed]


def _of_members(client: Client, lot: JSON) -> list[JSON]:
    """Return the checkpoints of a lot's members; `best_of_lot` is true of that of `NAME@best`."""
    listed = list(client.items(f"/v1/tasks/{lot['id']}/checkpoints"))
    if not listed:
        return []
    members = {each["id"]: each["name"] for each in client.items("/v1/tasks", lot=lot["id"])}
    states = {wording.checkpoint_state(each) for each in listed}
    best = _best(client, lot) if any("best" in state for state in states) else ""
    return [
        {"task": members[each["task_id"]], **each, "best_of_lot": each["id"] == best}
        for each in listed
    ]


def _best(client: Client, task: JSON) -> str:
    """Return the id of the best checkpoint of a task or lot."""
    path = f"/v1/requests/{task['request_id']}/best-checkpoint"
    return str(client.get(path, task=task["name"])["id"])


@app.command(rich_help_panel=WORK)
def export(
    ctx: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="NAME|CHECKPOINT",
            help="a task (its newest checkpoint), NAME@best, or a checkpoint id ckp_...",
        ),
    ],
    file: Annotated[Path, typer.Argument(help="file to write, such as model.safetensors")],
    name: Annotated[
        list[str] | None, typer.Option("--name", help="only this tensor; repeatable")
    ] = None,
) -> None:
    """Write a checkpoint's tensors into a safetensors file."""
    with root_command.connect(ctx) as client:
        id = _checkpoint(client, checkpoint)
        size = client.download(f"/v1/checkpoints/{id}/safetensors", file, names=name or None)
    err().print(f"{file}: {size} bytes")


_Checkpoints = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME|CHECKPOINT",
        help="a task (its newest checkpoint), NAME@best, or a checkpoint id ckp_...",
    ),
]


@app.command(rich_help_panel=WORK)
def pin(ctx: typer.Context, checkpoints: _Checkpoints, output: Format = Output.table) -> None:
    """Keep checkpoints, and their requests, however old they are."""
    _pin(ctx, "pin", checkpoints, output)


@app.command(rich_help_panel=WORK)
def unpin(ctx: typer.Context, checkpoints: _Checkpoints, output: Format = Output.table) -> None:
    """Let pinned checkpoints go: their age counts again."""
    _pin(ctx, "unpin", checkpoints, output)


def _pin(ctx: typer.Context, verb: str, given: list[str], output: Output) -> None:
    with root_command.connect(ctx) as client:
        ids = [_checkpoint(client, one) for one in given]
        found = [client.post(f"/v1/checkpoints/{id}/{verb}") for id in ids]
    show(found, output, lambda: table(found, wording.PINNED, empty=""))


def _checkpoint(client: Client, given: str) -> str:
    """Return the id of a checkpoint that is named by it, as NAME@best, or as the newest of NAME."""
    if given.startswith("ckp_"):
        return given
    if not given.endswith(OF_BEST):
        return _newest(client, given)
    kind, id = names.resolve(client, given.removesuffix(OF_BEST))
    if kind == "tasks":
        return _best(client, client.get(f"/v1/tasks/{id}"))
    return str(client.get(f"/v1/requests/{id}/best-checkpoint")["id"])


def _newest(client: Client, given: str) -> str:
    """Return the newest checkpoint, if only one of the tasks has any; raises ApiProblem
    otherwise.
    """
    tasks = names.named_tasks(client, given)
    if lot := next((task["name"] for task in tasks if task["lot"]), None):
        raise typer.BadParameter(
            f"{lot} is a lot; name one of its members, {given}{OF_BEST}, or a checkpoint id, which "
            f"`roundhouse checkpoints {given}` lists"
        )
    newest = [
        listed[0]["id"]
        for task in tasks
        if (listed := client.get(f"/v1/tasks/{task['id']}/checkpoints", limit=1)["items"])
    ]
    if len(newest) > 1:
        raise typer.BadParameter(
            f"several tasks of {given} have checkpoints; name one as {given}/TASK"
        )
    if not newest:
        raise names.not_found(
            f"{given} has no checkpoint; `roundhouse checkpoint {given}` requests one"
        )
    return str(newest[0])


BLOCK = "datablock:"


@app.command(rich_help_panel=DATA)
def cp(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help="a file, or datablock:NAME[@VERSION]")],
    target: Annotated[str, typer.Argument(help="datablock:NAME, or a file")],
    output: Format = Output.table,
) -> None:
    """Upload a file of tensors as the newest version of a datablock, or download one.

    An interrupted transfer continues where it was, also in the next call; no bytes are sent twice.
    """
    if source.startswith(BLOCK) == target.startswith(BLOCK):
        raise typer.BadParameter(
            "one of the two arguments must be datablock:NAME, the other a file"
        )
    with root_command.connect(ctx) as client:
        if source.startswith(BLOCK):
            named = client.get_datablock(source.removeprefix(BLOCK), Path(target))
            err().print(f"{target}: {named}, {Path(target).stat().st_size} bytes")
            return
        parts: list[int] = []
        row = _put(client, target.removeprefix(BLOCK), Path(source), parts.append)
    err().print(f"{sum(parts)} of {row['size_bytes']} bytes were sent.")
    show(row, output, lambda: wording.datablock(row))


def _put(client: Client, name: str, file: Path, sent: Callable[[int], None]) -> JSON:
    try:
        return client.put_datablock(name, file, sent=sent)
    except OSError as error:
        raise UnreadablePath(f"cannot read {file}: {error.strerror or error}") from error


@app.command(rich_help_panel=DATA)
def datablocks(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="list all versions of this datablock")] = None,
    all_: Annotated[bool, typer.Option("--all", "-a", help="also list older versions")] = False,
    output: Format = Output.table,
) -> None:
    """List datablocks, newest first: the newest version of each name, or all versions of
    one name.
    """
    latest = None if all_ or name else "true"
    with root_command.connect(ctx) as client:
        found = list(client.items("/v1/datablocks", name=name, latest=latest, limit=200))
    show(found, output, lambda: table(found, wording.DATABLOCKS))


datablock = typer.Typer(cls=Verbs, help="Folders of files as datablocks.", no_args_is_help=True)
app.add_typer(datablock, name="datablock", rich_help_panel=DATA)


@datablock.command("put")
def put_datablock(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the datablock")],
    path: Annotated[Path, typer.Argument(help="a folder, or one file of any kind")],
    output: Format = Output.table,
) -> None:
    """Upload a folder, or one file of any kind, as the newest version of a datablock.

    Only files that your tenant does not have yet are sent; an interrupted transfer continues.
    """
    with root_command.connect(ctx) as client:
        row, sent = put_folder(client, name, path)
    err().print(f"{sent} of {row['file_bytes']} bytes were sent.")
    show(row, output, lambda: wording.datablock(row))


@datablock.command("get")
def get_datablock(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME[@VERSION]")],
    folder: Annotated[Path, typer.Argument(help="the folder to write the files into")],
) -> None:
    """Download a folder; files that are there already are not fetched again."""
    with root_command.connect(ctx) as client:
        named, fetched = get_folder(client, name, folder)
    err().print(f"{folder}: {named}, {fetched} bytes were fetched.")
