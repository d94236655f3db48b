"""Unpacks one container image, as a program, in the sandbox layers that work here.

It sees the registered folder or file at /image, read-only, and its own folder, into which it writes
`tree/root`; no store and no network. It prints the image's own description, as JSON. Without a
digest in its order it prints only the digest. If it refuses an image, it writes the reason to the
standard error and exits with REFUSED.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import resource
import stat
import sys
import tarfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from workers.process.isolation import cgroups, sandbox
from workers.process.isolation.host_mounts import HostMount
from workers.process.isolation.sandbox import Room
from workers.transfer.installs import image_source
from workers.transfer.installs.image_source import BadContainerImage, ImageSource, LayoutPart
from workers.transfer.installs.image_tree import ImageTree

JSON = dict[str, Any]

MEMORY_BYTES = 2**30  # a header of a tar file is read whole
MAX_LAYERS = 500
REFUSED = 3
TMP_BYTES = 2**20
_SOURCE = "/image"
_PLAIN = ("application/vnd.oci.image.layer.v1.tar",)
_GZIP = (
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
)
_CHANGED = "it has changed while it was unpacked"
_HOSTS = b"127.0.0.1 localhost job\n"


def main() -> NoReturn:
    order = begin()
    inside = enclose(_room(order, Path(order["making"])), without={"user"})
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (order["limit_s"], order["limit_s"]))
    source, made = Path(_SOURCE), inside / "tree"
    end(lambda: unpack(source, made, order) if order["digest"] else {"digest": digest_of(source)})


def begin() -> JSON:
    """Return this program's order, after joining its control groups."""
    sandbox.die_with_parent()
    order: JSON = json.loads(sys.argv[1])
    cgroups.join(order["groups"])
    return order


def enclose(room: Room, *, without: Collection[str]) -> Path:
    """Enter the sandbox layers that work here, `without` some; return the folder to write into.

    "user" is always among these: what the sandbox writes belongs to our user.
    """
    standing, missing = sandbox.try_out(room)
    walls = [name for name in standing if name not in without]
    if "files" not in walls:
        _refuse(f"the sandbox layer 'files' is missing: {missing.get('files', '')}")
    sandbox.separate(walls)
    if "processes" in walls and (inner := os.fork()):
        _end_like(inner)
    sandbox.die_with_parent()
    sandbox.enclose(room, walls)
    sandbox.die_with_parent()
    os.umask(0o022)
    _, inside = room.inside(walls)
    return inside


def end(work: Callable[[], JSON]) -> NoReturn:
    """Do the work, print what it returns as JSON, and end; the caller has entered the sandbox."""
    try:
        sys.stdout.write(json.dumps(work()))
        sys.stdout.flush()
    except BadContainerImage as error:
        _refuse(str(error))
    except MemoryError:
        _refuse("its headers take too much memory")
    os._exit(0)


def _end_like(inner: int) -> NoReturn:
    """Wait for the process that unpacks, and end with its status."""
    _, status = os.waitpid(inner, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _room(order: JSON, making: Path) -> Room:
    nothing = making / "nothing"
    nothing.mkdir()
    return Room(
        code=nothing,
        scratch=making,
        uid=os.geteuid(),
        mounts=(HostMount(order["root"], order["below"], _SOURCE, may_be_file=True),),
        tmp_bytes=TMP_BYTES,
    )


def _refuse(why: str) -> NoReturn:
    sys.stderr.write(why)
    sys.stderr.flush()
    os._exit(REFUSED)


def digest_of(source: Path) -> str:
    fd = os.open(source, os.O_PATH)
    try:
        with image_source.opened(fd) as found:
            return found.digest
    finally:
        os.close(fd)


def unpack(source: Path, made: Path, order: JSON) -> JSON:
    """Write the image's root below `made`; return its variables and what was left out."""
    root = made / "root"
    root.mkdir(parents=True)
    fds = [os.open(source, os.O_PATH), os.open(root, os.O_PATH | os.O_DIRECTORY)]
    tree = ImageTree(fds[1], order["limit_bytes"])
    variables: dict[str, str] = {}
    try:
        with image_source.opened(fds[0]) as found:
            if found.digest != order["digest"]:
                raise BadContainerImage(_CHANGED)
            if found.manifest is not None:
                variables = _unpack_layers(found, found.manifest, tree)
            elif found.is_tar:
                with source.open("rb") as file:
                    _unpack_tar(file, tree, "r|*")
            else:
                _copy_folder(fds[0], tree)
        # no digest of the parts shows whether they belong together, so compare the whole again
        if found.manifest is None:
            with image_source.opened(fds[0]) as again:
                if again.digest != order["digest"]:
                    raise BadContainerImage(_CHANGED)
    except image_source.BROKEN as error:
        raise BadContainerImage(image_source.told_of(error)) from error
    finally:
        for fd in fds:
            os.close(fd)
    _furnish(root)
    return {"variables": variables, "skipped": tree.skipped}


def _furnish(root: Path) -> None:
    """Let `localhost` have an address, as a container engine does."""
    etc, hosts = root / "etc", root / "etc" / "hosts"
    if etc.is_symlink() or (etc.exists() and not etc.is_dir()) or hosts.is_symlink():
        return
    etc.mkdir(exist_ok=True)
    if not hosts.exists() or (hosts.is_file() and not hosts.stat().st_size):
        hosts.unlink(missing_ok=True)
        hosts.write_bytes(_HOSTS)


# --- layers of an OCI layout ----------------------------------------------------------------------


def _unpack_layers(source: ImageSource, manifest: JSON, tree: ImageTree) -> dict[str, str]:
    assert source.blob is not None
    layers = layers_of(manifest)
    configured = image_source.document(source.blob, LayoutPart.of(manifest.get("config")))
    for named in layers:
        with source.blob(named.digest) as file:
            blob = _Hashed(file)
            with _plain(blob, is_gzip=named.media_type in _GZIP) as body:
                _unpack_tar(body, tree, "r|")
            blob.check(named)
    return _variables(configured)


def layers_of(manifest: JSON) -> list[LayoutPart]:
    """Return the layers of a manifest, the lowest first; raises BadContainerImage."""
    layers = manifest.get("layers")
    if not isinstance(layers, list) or len(layers) > MAX_LAYERS:
        raise BadContainerImage(f"its manifest lists no layers, or more than {MAX_LAYERS}")
    named = [LayoutPart.of(each) for each in layers]
    for layer in named:
        if layer.media_type not in (*_PLAIN, *_GZIP):
            raise BadContainerImage(
                f"its layer {layer.digest[:12]} is {layer.media_type!r:.100}; this host unpacks tar"
                " and gzip"
            )
    return named


class _Hashed:
    """Hashes a blob while it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._found, self._size_bytes = file, hashlib.sha256(), 0

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self._found.update(block)
        self._size_bytes += len(block)
        return block

    def check(self, named: LayoutPart) -> None:
        while self.read(2**20):
            pass
        if (self._found.hexdigest(), self._size_bytes) != (named.digest, named.size_bytes):
            raise BadContainerImage(f"its layer {named.digest[:12]} has another digest")


@contextmanager
def _plain(blob: _Hashed, *, is_gzip: bool) -> Iterator[IO[bytes]]:
    file = cast("IO[bytes]", blob)
    if not is_gzip:
        yield file
        return
    with gzip.GzipFile(fileobj=file, mode="rb") as plain:
        yield cast("IO[bytes]", plain)


def _unpack_tar(file: IO[bytes], tree: ImageTree, mode: str) -> None:
    tree.begin_layer()
    how: JSON = {"fileobj": file, "mode": mode, "tarinfo": image_source.BoundedHeader}
    opened: Any = tarfile.open(**how)  # noqa: SIM115  # it is closed below
    with opened as tar:
        for member in tar:
            _add(tree, tar, member)
            tar.members = []  # otherwise all headers would stay in memory


def _add(tree: ImageTree, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    if tree.is_whiteout(member.name):
        tree.charge_skipped(member.size)
    elif member.isdir():
        tree.add_folder(member.name)
    elif member.isreg():
        body = tar.extractfile(member)
        assert body is not None
        tree.add_file(member.name, body, is_executable=bool(member.mode & 0o111))
    elif member.issym():
        tree.add_symlink(member.name, member.linkname)
    elif member.islnk():
        tree.add_hard_link(member.name, member.linkname)
    else:
        tree.skip(member.name)
        tree.charge_skipped(member.size)


def _variables(configured: JSON) -> dict[str, str]:
    """Return the environment variables that the image sets."""
    said = configured.get("config")
    listed = said.get("Env") if isinstance(said, dict) else None
    pairs = [one.partition("=") for one in listed or [] if isinstance(one, str)]
    return {name: value for name, _, value in pairs}


# --- a root file system ---------------------------------------------------------------------------


def _copy_folder(fd: int, tree: ImageTree) -> None:
    """Copy a folder, except other file systems that are mounted below it."""
    device, names = os.fstat(fd).st_dev, dict[int, str]()
    for path, folders, files, at in os.fwalk(".", dir_fd=fd, follow_symlinks=False):
        for name in (*folders, *files):
            state = os.stat(name, dir_fd=at, follow_symlinks=False)
            if state.st_dev == device:
                _copy(tree, at, f"{path}/{name}", name, state, names)
        folders[:] = [
            name
            for name in folders
            if os.stat(name, dir_fd=at, follow_symlinks=False).st_dev == device
        ]


def _copy(
    tree: ImageTree, at: int, path: str, name: str, state: os.stat_result, names: dict[int, str]
) -> None:
    mode = state.st_mode
    if stat.S_ISDIR(mode):
        tree.add_folder(path)
    elif stat.S_ISLNK(mode):
        tree.add_symlink(path, os.readlink(name, dir_fd=at))
    elif not stat.S_ISREG(mode):
        tree.skip(path)
    elif state.st_ino in names:
        tree.add_hard_link(path, names[state.st_ino])
    else:
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=at)
        except PermissionError:  # the user of a task could not read the file either
            tree.skip(path)
            return
        with os.fdopen(fd, "rb") as file:
            tree.add_file(path, file, is_executable=bool(mode & 0o111))
        if state.st_nlink > 1:
            names[state.st_ino] = path
