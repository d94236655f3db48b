"""Transfers folders of files: reads them for an upload, and writes them after a download.

Only files that the service lacks are sent, and only files that are not there yet are fetched.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from app.cli.bundling import UnreadablePath
from app.cli.client import JSON, ApiProblem, Client
from app.core.model.provisions.folder import (
    BadFolderManifest,
    FolderFile,
    FolderManifest,
    decoded,
    folder_of,
)

_EXECUTABLE = stat.S_IXUSR


def read_folder(path: Path) -> tuple[FolderManifest, dict[str, Path]]:
    """Return the files below a folder (or one file, as a folder), and the path of each by its hash.

    Raises UnreadablePath for links and for what is no plain file.
    """
    found, by_hash = list[FolderFile](), dict[str, Path]()
    root = path if path.is_dir() else path.parent
    for file in _plain_files(path):
        one = _described(file, file.relative_to(root).as_posix())
        found.append(one)
        by_hash.setdefault(one.sha256, file)
    try:
        return folder_of(found), by_hash
    except BadFolderManifest as error:
        raise UnreadablePath(f"cannot upload {path}: {error}") from error


def _plain_files(path: Path) -> Iterator[Path]:
    if path.is_symlink() and not path.exists():
        raise UnreadablePath(f"{path} is a link that leads nowhere")
    if path.is_dir():
        for below in sorted(path.iterdir()):
            if below.is_symlink() and below.is_dir():
                raise UnreadablePath(f"{below} is a link to a folder; a folder has no links")
            yield from _plain_files(below)
    elif path.is_file():  # includes a link to a file: the content is uploaded
        yield path
    else:
        raise UnreadablePath(f"{path} is neither a file nor a folder")


def _described(file: Path, path: str) -> FolderFile:
    with file.open("rb") as body:
        sha256 = hashlib.file_digest(body, "sha256").hexdigest()
        about = os.fstat(body.fileno())
    return FolderFile(
        path=path,
        size_bytes=about.st_size,
        sha256=sha256,
        executable=bool(about.st_mode & _EXECUTABLE),
    )


def put_folder(client: Client, name: str, path: Path) -> tuple[JSON, int]:
    """Make the folder the newest version of a datablock; return it and the bytes that were sent."""
    try:
        folder, by_hash = read_folder(path)
        sent = list[int]()
        while "missing" in (said := client.name_folder(name, [asdict(f) for f in folder.files])):
            for sha256 in said["missing"]:
                client.put_file(sha256, by_hash[sha256], sent=sent.append)
    except OSError as error:
        raise UnreadablePath(f"cannot read {path}: {error.strerror or error}") from error
    return said, sum(sent)


def get_folder(client: Client, name: str, into: Path) -> tuple[str, int]:
    """Write the files of a folder; return NAME@VERSION and the number of bytes that were fetched.

    A file that is there with the right bytes is not fetched again. A transfer that broke continues
    where it was. Other files in the folder stay.
    """
    try:
        into.mkdir(parents=True, exist_ok=True)
        listed = into / ".roundhouse-folder"
        named = client.get_datablock(name, listed)
        try:
            folder = decoded(listed.read_bytes())
        except BadFolderManifest as error:
            told = f"{named} is no folder; `roundhouse cp datablock:{named} FILE` downloads it"
            raise ApiProblem(409, {"title": "Not a folder", "detail": told}) from error
        finally:
            listed.unlink()
        return named, sum(_get(client, named, file, into / file.path) for file in folder.files)
    except OSError as error:
        raise UnreadablePath(f"cannot write to {into}: {error.strerror or error}") from error


def _get(client: Client, named: str, file: FolderFile, to: Path) -> int:
    """Return the number of bytes that were fetched."""
    to.parent.mkdir(parents=True, exist_ok=True)
    fetched = 0
    if to.is_symlink() or not to.is_file() or _described(to, file.path).sha256 != file.sha256:
        if file.size_bytes:
            client.fetch(f"/v1/datablocks/{named}/files/{file.sha256}", to)
            fetched = file.size_bytes
        else:
            to.unlink(missing_ok=True)
            to.touch()
    to.chmod(0o755 if file.executable else 0o644)
    return fetched
