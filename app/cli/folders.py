"""Transfers folders of files: reads them for an upload, and writes them after a download.

Only files that the service lacks are sent, and only files that are not there yet are fetched.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from app.cli.bundling import UnreadablePath
from app.cli.client import JSON, ApiProblem, Client
from app.cli.tables import transfer
from app.core.model.provisions.folder import (
    SMALL_BYTES,
    SMALL_FILES,
    BadFolderManifest,
    FolderFile,
    FolderManifest,
    decoded,
    folder_of,
)

SMALL_FILE_BYTES = 64 * 1024  # a larger file has a call of its own
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
        sizes, sent_bytes = folder.contents(), 0
        while "missing" in (said := client.name_folder(name, [asdict(f) for f in folder.files])):
            lacking = {sha256: by_hash[sha256] for sha256 in said["missing"]}
            lacking_bytes = sum(sizes[sha256] for sha256 in lacking)
            with transfer(f"Sending {len(lacking):,} files", lacking_bytes) as sent:
                _put_all(client, lacking, sizes, sent)
            sent_bytes += lacking_bytes
    except OSError as error:
        raise UnreadablePath(f"cannot read {path}: {error.strerror or error}") from error
    return said, sent_bytes


def _put_all(
    client: Client, files: dict[str, Path], sizes: dict[str, int], sent: Callable[[int], None]
) -> None:
    """Send the files; small ones go many in a call."""
    together, size_bytes = dict[str, bytes](), 0
    for sha256, path in files.items():
        if sizes[sha256] > SMALL_FILE_BYTES:
            client.put_file(sha256, path, sent=sent)
            continue
        together[sha256] = path.read_bytes()
        size_bytes += sizes[sha256]
        if len(together) == SMALL_FILES or size_bytes > SMALL_BYTES - SMALL_FILE_BYTES:
            _put_together(client, together, sent)
            together, size_bytes = {}, 0
    if together:
        _put_together(client, together, sent)


def _put_together(client: Client, files: dict[str, bytes], sent: Callable[[int], None]) -> None:
    client.put_files(files)
    sent(sum(map(len, files.values())))


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
            download = f"`roundhouse cp datablock:{named} FILE` downloads it"
            told = f"{named} holds tensors, not files; {download}"
            raise ApiProblem(409, {"title": "Not a folder", "detail": told}) from error
        finally:
            listed.unlink()
        fetched_bytes = 0
        with transfer(f"Fetching {len(folder.files):,} files", folder.size_bytes) as passed:
            for file in folder.files:
                fetched_bytes += _get(client, named, file, into / file.path)
                passed(file.size_bytes)
        return named, fetched_bytes
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
