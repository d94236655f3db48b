"""The verb files: the files of a command while it runs."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from zipfile import BadZipFile, ZipFile

import typer

from app.cli import kept_files, names, root_command, wording
from app.cli.bundling import UnreadablePath
from app.cli.client import JSON, Client, DamagedDownload
from app.cli.root_command import DATA, NOT_FOUND, Format, Which, app
from app.cli.tables import Output, err, show, table


@app.command(rich_help_panel=DATA)
def files(
    ctx: typer.Context,
    given: Which,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="a file or folder of its working folder, such as out/model.pt"
        ),
    ] = "",
    to: Annotated[
        Path | None, typer.Option("--to", help="download the file, or the folder, into this folder")
    ] = None,
    output: Format = Output.table,
) -> None:
    """List the files of a command while it runs, and download them.

    Without PATH it is all of the working folder.  What a command leaves behind at its end is among
    its `outputs`.
    """
    path = path.rstrip("/")
    with root_command.connect(ctx) as client:
        task = names.one_task(client, given)
        address = f"/v1/tasks/{task['id']}/files"
        found = client.get(address, path=path or None)
        listed = found["files"]
        if to is not None and listed:
            _download(client, f"{address}/content", listed, path, to)
    show(found, output, lambda: table(listed, wording.RUNNING_FILES, empty="No files."))
    if found["is_cut"]:
        err().print(f"There are more than these {len(listed)} files; name a folder as PATH.")
    if not listed:
        raise typer.Exit(NOT_FOUND)


def _download(client: Client, address: str, listed: list[JSON], path: str, to: Path) -> None:
    """Write the file, or the files of the folder, below `to`, each with its path in the working
    folder.
    """
    try:
        if [each["path"] for each in listed] == [path]:
            file = to / path
            file.parent.mkdir(parents=True, exist_ok=True)
            size = client.download(address, file, path=path)
            err().print(f"{file}: {size} bytes")
            return
        folder = to / path
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=to, prefix=".roundhouse-") as draft:
            zipped = Path(draft, "folder.zip")
            client.download(address, zipped, path=path or None)
            _unpack(zipped, folder)
    except OSError as error:
        raise UnreadablePath(f"cannot write to {to}: {error.strerror or error}") from error


def _unpack(zipped: Path, folder: Path) -> None:
    try:
        with ZipFile(zipped) as archive:
            for info in kept_files.files_in(archive):
                kept_files.extract(archive, info, folder)
                err().print(f"{folder / info.filename}: {info.file_size} bytes")
    except BadZipFile as error:
        raise DamagedDownload(f"the folder did not come whole: {error}; try again") from error
