"""Packs a folder of code into a bundle, the zip that is sent to the service.

The same files always give the same bytes: names are sorted, and times and owners are left out. The
service identifies bundles by SHA-256, so each is sent only once. Nothing is guessed: a link that
leads out of the folder is an error that names the link. A file that may hold a secret, such as
`.env`, is not sent unless the ignore file asks for it.

This module sends nothing; `app.cli.client` does.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

IGNORE_FILE = ".roundhouseignore"
IGNORED = (
    ".git",
    ".hg",
    ".svn",
    "__pycache__",
    "*.pyc",
    ".venv",
    "venv",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".ipynb_checkpoints",
    ".DS_Store",
    IGNORE_FILE,
)
#: Names of files and folders that usually hold secrets.
SECRET = (
    ".env",
    ".env.*",
    ".netrc",
    ".pypirc",
    ".git-credentials",
    ".aws",
    ".ssh",
    ".kaggle",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "id_rsa",
    "id_dsa",
    "id_ecdsa",
    "id_ed25519",
)

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can store


class UnreadablePath(Exception):
    """Raised if a file or folder on this machine cannot be sent; says which one, why, and what to
    do.
    """


# --- a folder becomes a bundle --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBundle:
    """Describes a bundle. `files` are (name in the zip, size on disk in bytes).

    `withheld` are the files left out because they may hold a secret.
    """

    folder: Path
    body: bytes
    sha256: str
    files: tuple[tuple[str, int], ...]
    withheld: tuple[str, ...] = ()

    def biggest(self, count: int = 5) -> list[tuple[str, int]]:
        return sorted(self.files, key=lambda file: -file[1])[:count]


def bundle_folder(folder: Path, more: Mapping[str, bytes] | None = None) -> PackedBundle:
    """Zip all of the folder except ignored files and files that may be secret, and `more` files.

    Raises UnreadablePath.
    """
    if not folder.is_dir():
        raise UnreadablePath(f"{folder}: no such folder")
    withheld: list[str] = []
    wanted = _Wanted.of(folder)
    files = sorted(_files(folder, wanted, withheld))
    if not files:
        raise UnreadablePath(f"{folder}: no files to send (are all of them ignored?)")
    body = _zip(folder, files, _empty_folders(folder, wanted), more or {})
    return PackedBundle(
        folder=folder,
        body=body,
        sha256=hashlib.sha256(body).hexdigest(),
        files=tuple((name, (folder / name).stat().st_size) for name in files),
        withheld=tuple(sorted(withheld)),
    )


def bundle_file(path: Path) -> PackedBundle:
    """Return an existing archive as a bundle, unchanged; raises Unreadable."""
    try:
        body = path.read_bytes()
    except OSError as error:
        raise UnreadablePath(f"{path}: cannot be read: {error}") from error
    digest = hashlib.sha256(body).hexdigest()
    return PackedBundle(folder=path, body=body, sha256=digest, files=((path.name, len(body)),))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Holds patterns of files that are never sent, and of files that are sent despite a built-in
    pattern.
    """

    ignored: tuple[str, ...]
    named: tuple[str, ...]

    @classmethod
    def of(cls, folder: Path) -> _Wanted:
        path = folder / IGNORE_FILE
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = [line.strip() for line in text.splitlines()]
        said = [line for line in lines if line and not line.startswith("#")]
        named = tuple(line[1:] for line in said if line.startswith("!"))
        return cls(tuple(line for line in said if not line.startswith("!")), named)

    def ignores(self, path: Path) -> bool:
        built_in = _fits(path, IGNORED) and not _fits(path, self.named)
        return built_in or _fits(path, self.ignored)

    def withholds(self, path: Path) -> bool:
        return _fits(path, SECRET) and not _fits(path, self.named)


def _files(folder: Path, wanted: _Wanted, withheld: list[str]) -> Iterator[str]:
    """Yield the names of files to send; add files that may be secret to `withheld`."""
    root = folder.resolve()
    for here, folders, names in os.walk(folder):
        inside = Path(here).relative_to(folder)
        kept = [name for name in folders if not wanted.ignores(inside / name)]
        secret = {name for name in [*kept, *names] if wanted.withholds(inside / name)}
        folders[:] = [name for name in kept if name not in secret]
        links = [name for name in folders if (Path(here) / name).is_symlink()]
        for name in [*links, *names]:
            if wanted.ignores(inside / name) or name in secret:
                continue
            _must_lie_inside(Path(here) / name, root)
            yield (inside / name).as_posix()
        withheld += [
            (inside / name).as_posix() for name in secret if not wanted.ignores(inside / name)
        ]


def _empty_folders(folder: Path, wanted: _Wanted) -> list[str]:
    """Return the folders without any file, into which the code may write."""
    found = []
    for here, folders, names in os.walk(folder):
        inside = Path(here).relative_to(folder)
        if not folders and not names and here != str(folder):
            found.append(inside.as_posix())
        folders[:] = [
            name
            for name in folders
            if not wanted.ignores(inside / name) and not wanted.withholds(inside / name)
        ]
    return sorted(found)


def _fits(path: Path, patterns: tuple[str, ...]) -> bool:
    """True if a pattern matches: with a slash it is a path from the top, without one the name of
    any file.
    """
    for pattern in patterns:
        bare = pattern.strip("/")
        seen = path.as_posix() if "/" in pattern.rstrip("/") else path.name
        if fnmatch(seen, bare):
            return True
    return False


def _must_lie_inside(path: Path, root: Path) -> None:
    if path.is_symlink():
        target = path.resolve()
        if not target.is_relative_to(root) or not target.is_file():
            raise UnreadablePath(
                f"{path}: a link to {target}, which cannot be sent; copy the file here or list the "
                f"link in {IGNORE_FILE}"
            )
    elif not path.is_file():
        raise UnreadablePath(f"{path}: not a regular file; list it in {IGNORE_FILE}")


def _zip(folder: Path, names: list[str], empty: list[str], more: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # made on Unix, so that readers use the mode below
            entry.external_attr = (
                0o100755 if os.access(folder / name, os.X_OK) else 0o100644
            ) << 16
            archive.writestr(entry, (folder / name).read_bytes())
        for name in sorted(more.keys() - set(names)):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system, entry.external_attr = 3, 0o100644 << 16
            archive.writestr(entry, more[name])
        for name in empty:
            entry = zipfile.ZipInfo(f"{name}/", _EPOCH)
            entry.create_system, entry.external_attr = 3, 0o40755 << 16
            archive.writestr(entry, b"")
    return out.getvalue()
