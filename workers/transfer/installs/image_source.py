"""Reads a registered container image: an OCI layout or a root file system, each a folder or a tar
file.

Its digest names the unpacked files on a host. For an OCI layout it is that of the manifest, which
names every layer by a digest of its own. For a root file system in a folder it is a hash of what
this host lists: names, sizes, times and inodes, without the contents. So two trees never have the
same digest by chance, and whatever changes in a tree gives it another one.

Nothing here follows a symbolic link, and all that is read as a whole has a size limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Self

JSON = dict[str, Any]

MAX_DOCUMENT_BYTES = 4 * 2**20  # per index, manifest or configuration
MAX_NESTED = 4  # indexes in indexes
MAX_LISTED = 2_000_000  # entries of a root file system
MAX_DEPTH = 256  # most levels of folders; each folder is open while it is listed
MAX_HEADER_BYTES = 2**20  # limit in bytes for each part of a tar file that is read as a whole
# number of first members of a tar file among which the marks of a layout are sought
_LOOKED_AT = 10_000
_LAYOUT = "oci-layout"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)


#: Raised when the form of a container image is broken.
BROKEN = (
    OSError,
    EOFError,
    zlib.error,
    tarfile.TarError,
    ValueError,
    ArithmeticError,
    RecursionError,
)
_READ_WHOLE = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


class BadContainerImage(Exception):
    """Raised for a container image that cannot be used; the message is for the task's owner."""


class BoundedHeader(tarfile.TarInfo):
    """Reads a header of a tar file that is not trusted.

    Refuses a negative size: after it the same header would be read again, for ever.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type in _READ_WHOLE and found.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"one of its headers has more than {MAX_HEADER_BYTES} bytes")
        found.check_size()
        return found

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        found = super().fromtarfile(tarfile)
        found.check_size()  # an extended header may have given another size
        return found

    def check_size(self) -> None:
        if self.size < 0:
            raise tarfile.ReadError("one of its headers names a negative size")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPart:
    """Names a part of an OCI layout: a blob by its digest."""

    digest: str
    size_bytes: int
    media_type: str

    @classmethod
    def of(cls, said: Any) -> LayoutPart:
        match said:
            case {"digest": str(digest), "size": int(size)} if _DIGEST.fullmatch(digest):
                return cls(
                    digest=digest.removeprefix("sha256:"),
                    size_bytes=size,
                    media_type=str(said.get("mediaType", "")),
                )
        raise BadContainerImage("it names a part without a SHA-256 and a size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """Describes an open container image; `blob` opens a part of a layout by its digest.

    `manifest` is None for a root file system: a tar file (`is_tar`), or the folder itself.
    """

    digest: str
    is_tar: bool = False
    manifest: JSON | None = None
    blob: Callable[[str], IO[bytes]] | None = None


@contextmanager
def opened(fd: int) -> Iterator[ImageSource]:
    """Read which container image lies at a descriptor (O_PATH); raises BadContainerImage."""
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            yield _of_folder(fd)
        elif not stat.S_ISREG(mode):
            raise BadContainerImage("it is neither a folder nor a file")
        else:
            with open(f"/proc/self/fd/{fd}", "rb") as file, _of_file(file) as found:
                yield found
    except BROKEN as error:
        raise BadContainerImage(told_of(error)) from error


def told_of(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


# --- folders --------------------------------------------------------------------------------------


def _of_folder(fd: int) -> ImageSource:
    def blob(path: str) -> IO[bytes]:
        return os.fdopen(_open_below(fd, path), "rb")

    try:
        os.close(_open_below(fd, _LAYOUT))
    except FileNotFoundError:
        return ImageSource(digest=_listing(fd))
    return _of_layout(lambda path: blob(path))


def _open_below(fd: int, path: str) -> int:
    """Open a file by its path; no part of the path may be a symbolic link."""
    *folders, name = path.split("/")
    at = os.dup(fd)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise BadContainerImage(f"{path} must be a file")
    return found


def _listing(fd: int) -> str:
    """Return a hash of the listing of a root file system, in the order of names."""
    found, entries = hashlib.sha256(b"folder\n"), 0
    for path, folders, files, at in os.fwalk(".", dir_fd=fd, follow_symlinks=False):
        if path.count("/") > MAX_DEPTH:
            raise BadContainerImage(f"it has more than {MAX_DEPTH} folders in each other")
        folders.sort()
        for name in sorted((*folders, *files)):
            entries += 1
            if entries > MAX_LISTED:
                raise BadContainerImage(f"it has more than {MAX_LISTED} files")
            state = os.stat(name, dir_fd=at, follow_symlinks=False)
            found.update(_line(f"{path}/{name}", state))
    return found.hexdigest()


def _line(name: str, state: os.stat_result) -> bytes:
    said = (name, state.st_mode, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)
    return json.dumps([*said, state.st_dev]).encode() + b"\n"


# --- tar files ------------------------------------------------------------------------------------


@contextmanager
def _of_file(file: IO[bytes]) -> Iterator[ImageSource]:
    if (members := _members_of_layout(file)) is None:
        state = os.fstat(file.fileno())
        digest = hashlib.sha256(b"tar\n" + _line("", state)).hexdigest()
        yield ImageSource(digest=digest, is_tar=True)
        return
    tar, by_name = members

    def blob(path: str) -> IO[bytes]:
        if (member := by_name.get(path)) is None or (found := tar.extractfile(member)) is None:
            raise BadContainerImage(f"{path} is missing")
        return found

    with tar:
        yield _of_layout(blob)


def _members_of_layout(
    file: IO[bytes],
) -> tuple[tarfile.TarFile, Mapping[str, tarfile.TarInfo]] | None:
    """Return the files of an OCI layout by name; None if the file is not an uncompressed tar of
    one.
    """
    try:
        tar = tarfile.open(  # noqa: SIM115  # the caller closes it
            fileobj=file, mode="r:", tarinfo=BoundedHeader
        )
    except tarfile.ReadError:
        return None  # a compressed tar file can only be a root file system
    found: dict[str, tarfile.TarInfo] = {}
    for n, member in enumerate(tar):
        if n >= _LOOKED_AT:
            break
        if member.isreg():
            found[member.name.removeprefix("./")] = member
    return (tar, found) if _LAYOUT in found else None


# --- layouts --------------------------------------------------------------------------------------


def _of_layout(open_file: Callable[[str], IO[bytes]]) -> ImageSource:
    def blob(digest: str) -> IO[bytes]:
        try:
            return open_file(f"blobs/sha256/{digest}")
        except FileNotFoundError:
            raise BadContainerImage(f"its part {digest[:12]} is missing") from None

    with open_file("index.json") as file:
        index = _parsed(_read(file), "index.json")
    return followed(index, blob)


def followed(index: JSON, blob: Callable[[str], IO[bytes]]) -> ImageSource:
    """Return the image for this machine to which an index leads; each document is checked against
    its digest.
    """
    said = index
    for _ in range(MAX_NESTED):
        chosen = _chosen(said)
        said = document(blob, chosen)
        if chosen.media_type not in _INDEXES and "manifests" not in said:
            return ImageSource(digest=chosen.digest, manifest=said, blob=blob)
    raise BadContainerImage("its indexes name each other too deeply")


def document(blob: Callable[[str], IO[bytes]], named: LayoutPart) -> JSON:
    """Return a part that is JSON, after checking it against its digest."""
    with blob(named.digest) as file:
        body = _read(file)
    if hashlib.sha256(body).hexdigest() != named.digest:
        raise BadContainerImage(f"its part {named.digest[:12]} has another digest")
    return _parsed(body, f"its part {named.digest[:12]}")


def _chosen(index: JSON) -> LayoutPart:
    """Return the one manifest of an index that is for this machine."""
    listed = index.get("manifests")
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise BadContainerImage("its index lists no manifests")
    machine = _MACHINES.get(platform.machine(), platform.machine())
    here = {"os": "linux", "architecture": machine}
    fit = [one for one in listed if _is_for(one.get("platform"), here)]
    if len(fit) != 1:
        told = f"{len(fit)} of its {len(listed)} manifests are for linux/{machine}"
        raise BadContainerImage(f"{told}; register a layout with one")
    return LayoutPart.of(fit[0])


def _is_for(named: Any, here: Mapping[str, str]) -> bool:
    """True if a manifest is for this machine, or does not say for which it is."""
    return named is None or (
        isinstance(named, dict) and all(named.get(what) == here[what] for what in here)
    )


def _read(file: IO[bytes]) -> bytes:
    body = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(body) > MAX_DOCUMENT_BYTES:
        raise BadContainerImage(f"one of its documents has more than {MAX_DOCUMENT_BYTES} bytes")
    return body


def _parsed(body: bytes, called: str) -> JSON:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise BadContainerImage(f"{called} is no JSON object")
    return said
