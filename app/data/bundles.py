"""Inspects uploaded code without running or unpacking it, and stores it under its SHA-256.

A bundle is a zip, a tar or a tar.gz of plain files. It is refused, naming the member, if a member
could end up outside its folder, is not a plain file, or collides with another name. It is also
refused if it unpacks to more than the limits, which count bytes as they are read and trust no
header.

Entry points are found by parsing. A top-level class with a `step` method (its own, or inherited
from a class in the bundle) can be a job; a top-level function can be a graph node.
"""

from __future__ import annotations

import ast
import gzip
import shutil
import struct
import tarfile
import tempfile
import unicodedata
import warnings
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from app.core.model.graphs.entry_signature import Signature, of_class
from app.core.model.provisions import environment, requirements
from app.errors import BadInput

MAX_UNPACKED_BYTES = 64 * 2**20
ENTRY_BYTES = 1024  # each file and folder counts as so many bytes more
MAX_DEPTH = 16
MAX_NAME_BYTES = 255  # per part of a path
MAX_SOURCE_BYTES = 2**18  # a larger .py file is stored, but not searched for entry points
MAX_SOURCES_BYTES = 2**23  # all parsed files together; files nearest to the top are parsed first
MAX_PACKAGE_FILES = 20  # most files of a bundle that a request may name as its environment
_MAX_DIRECTORY_BYTES = 16 * 2**20
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Holds what an inspection found. `unparsed` are the .py files that Python cannot parse, with
    the reason.

    `signatures` are the arguments with which job classes can be constructed, as far as the source
    shows them. `package_files` are the files, by path, that may be a request's environment.
    """

    files: int
    unpacked_bytes: int
    entry_points: dict[str, str]
    unparsed: dict[str, str]
    signatures: dict[str, Signature]
    package_files: dict[str, bytes]


def inspect(path: Path) -> Contents:
    """Inspect a bundle.  Raises BadInput, which names the member at fault."""
    size = path.stat().st_size
    look = _Look(limit=MAX_UNPACKED_BYTES)
    with path.open("rb") as file:
        head = file.read(4)
        file.seek(0)
        try:
            if head[:2] == b"PK":
                _read_zip(file, size, look)
            else:
                _read_tar(file, look, zipped=head[:2] == b"\x1f\x8b")
        except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError, zlib.error) as error:
            raise _refused(
                "", f"must be a complete zip, tar or tar.gz archive: {error}", "archive"
            ) from error
        except (NotImplementedError, RuntimeError, UnicodeError, ValueError, struct.error) as error:
            raise _refused("", f"cannot read this archive: {error}", "archive") from error
    if not look.files:
        raise _refused("", "the archive contains no file", "empty")
    entry_points, unparsed, signatures = _entry_points(look.sources)
    return Contents(
        files=len(look.files),
        unpacked_bytes=look.unpacked_bytes,
        entry_points=entry_points,
        unparsed=unparsed,
        signatures=signatures,
        package_files=look.package_files,
    )


def inspect_stored(stored: IO[bytes]) -> Contents:
    """Inspect a bundle that the store has; raises BadInput."""
    with tempfile.NamedTemporaryFile(prefix="roundhouse-bundle-") as file:
        shutil.copyfileobj(stored, file)
        file.flush()
        return inspect(Path(file.name))


def _refused(member: str, detail: str, code: str) -> BadInput:
    shown = member.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")[:300]
    pointer = "/" + shown.replace("~", "~0").replace("/", "~1") if shown else ""
    return BadInput.at(pointer, f"{shown}: {detail}" if shown else detail, code)


# --- the members --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Look:
    """The members seen so far.  `files` and `folders` hold case-folded paths."""

    limit: int
    unpacked_bytes: int = 0
    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    sources: dict[str, bytes] = field(default_factory=dict)
    package_files: dict[str, bytes] = field(default_factory=dict)

    def folder(self, name: str) -> None:
        folded = _checked(name.rstrip("/")).casefold()
        self._claim(name, folded)
        self.folders.add(folded)

    def file(self, name: str, body: IO[bytes]) -> None:
        folded = _checked(name).casefold()
        if folded in self.files or folded in self.folders:
            raise _refused(
                name, "this name, or one that differs only in case, occurs twice", "twice"
            )
        self._claim(name, folded)
        self.files.add(folded)
        self._must_fit(name)
        is_source, names_packages = name.endswith(".py"), environment.may_hold(name)
        kept = self._read(name, body, keep=is_source or names_packages)
        if is_source and len(kept) <= MAX_SOURCE_BYTES:
            self.sources[name] = kept
        fits = len(kept) <= requirements.MAX_BYTES and len(self.package_files) < MAX_PACKAGE_FILES
        if names_packages and fits:
            self.package_files[name] = kept

    def _claim(self, name: str, folded: str) -> None:
        for parent in PurePosixPath(folded).parents:
            if str(parent) in self.files:
                raise _refused(name, f"{parent} is both a file and a folder", "twice")
            self.folders.add(str(parent))
        if folded in self.files:
            raise _refused(name, "this is both a file and a folder", "twice")
        self._must_fit(name)

    def _must_fit(self, name: str) -> None:
        entries = len(self.files) + len(self.folders)
        if self.unpacked_bytes + ENTRY_BYTES * entries > self.limit:
            told = f"must be at most {self.limit} bytes when unpacked, {ENTRY_BYTES} for each file"
            raise _refused(name, told, "too-large")

    def _read(self, name: str, body: IO[bytes], *, keep: bool) -> bytes:
        pieces = []
        while piece := body.read(_PIECE):
            self.unpacked_bytes += len(piece)
            self._must_fit(name)
            if keep:
                pieces.append(piece)
        return b"".join(pieces)


def _checked(name: str) -> str:
    """Return the name if on every system it is a path inside the bundle; raises BadInput
    otherwise.
    """
    if "\x00" in name or "\\" in name or any(unicodedata.category(c) in "Cc Cs" for c in name):
        raise _refused(name, "a name must not contain a backslash or a control character", "name")
    parts = name.split("/")
    if name.startswith("/") or ":" in parts[0]:
        raise _refused(name, "must not be an absolute path", "escapes")
    if ".." in parts:
        raise _refused(name, "must not leave its folder", "escapes")
    if "" in parts or "." in parts:
        raise _refused(name, "must not have an empty part or `.` in its path", "name")
    if len(parts) > MAX_DEPTH or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise _refused(name, f"must be shorter, and at most {MAX_DEPTH} folders deep", "name")
    return unicodedata.normalize("NFC", name)


# --- zip ----------------------------------------------------------------------------------------


def _read_zip(file: IO[bytes], size: int, look: _Look) -> None:
    _check_directory(file, size)
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            name = entry.orig_filename
            mode = entry.external_attr >> 16
            kind = mode & 0o170000
            if entry.flag_bits & 0x1:
                raise _refused(name, "is encrypted", "encrypted")
            if kind == 0o040000 or name.endswith("/"):
                look.folder(name)
            elif kind not in (0, 0o100000):
                raise _refused(name, "must be a regular file; got a link or a device", "not-a-file")
            else:
                _checked(name)
                with archive.open(entry) as body:
                    look.file(name, body)


def _check_directory(file: IO[bytes], size: int) -> None:
    """Limit the list of members, because zipfile reads all of it into memory."""
    file.seek(max(0, size - 22 - 0xFFFF))
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < 22:
        raise _refused("", "the zip file is truncated", "archive")
    (directory_bytes,) = struct.unpack_from("<I", tail, at + 12)
    if directory_bytes > _MAX_DIRECTORY_BYTES:
        told = f"its list of files must have at most {_MAX_DIRECTORY_BYTES} bytes"
        raise _refused("", f"{told}; got {directory_bytes}", "too-large")
    file.seek(0)


# --- tar ----------------------------------------------------------------------------------------


class _LimitedStream:
    """A stream that fails after `limit` bytes, because sizes in tar headers are not trusted."""

    def __init__(self, source: IO[bytes], limit: int) -> None:
        self._source, self._left = source, limit

    def read(self, size: int) -> bytes:
        piece = self._source.read(size)
        self._left -= len(piece)
        if self._left < 0:
            raise _refused("", "exceeds the limit when unpacked", "too-large")
        return piece


def _read_tar(file: IO[bytes], look: _Look, *, zipped: bool) -> None:
    source: Any = gzip.GzipFile(fileobj=file) if zipped else file
    bounded: Any = _LimitedStream(source, 3 * look.limit)  # each entry has a header and padding
    with tarfile.open(fileobj=bounded, mode="r|") as archive:
        for member in archive:
            if member.isdir():
                if member.name not in (".", ""):
                    look.folder(member.name.removeprefix("./"))
            elif not member.isreg() or member.issparse():
                raise _refused(
                    member.name, "must be a regular file; got a link or a device", "not-a-file"
                )
            else:
                name = member.name.removeprefix("./")
                _checked(name)
                body = archive.extractfile(member)
                assert body is not None, "a regular member has a body"
                look.file(name, body)


# --- entry points -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Outline:
    """The classes and functions of one module; each is "module:Name".

    `derived` are (from, to) pairs along which a `step` is inherited: from a base to its class, and
    from a class to the name under which it is imported.
    """

    classes: set[str] = field(default_factory=set)
    steps: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    derived: list[tuple[str, str]] = field(default_factory=list)
    signatures: dict[str, Signature] = field(default_factory=dict)


def _entry_points(
    sources: dict[str, bytes],
) -> tuple[dict[str, str], dict[str, str], dict[str, Signature]]:
    outlines, unparsed, left = [], {}, MAX_SOURCES_BYTES
    for name in sorted(sources, key=lambda name: (name.count("/"), name)):
        module = _module_name(name)
        left -= len(sources[name])
        if module is None or left < 0:
            continue
        try:
            outlines.append(_outline(module, sources[name], file=name))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            unparsed[name] = f"{type(error).__name__}: {error}"
    found = {name: "class" for name in _with_step(outlines)}
    found |= {name: "function" for outline in outlines for name in outline.functions}
    seen = {name: told for outline in outlines for name, told in outline.signatures.items()}
    return dict(sorted(found.items())), unparsed, seen


def _module_name(path: str) -> str | None:
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts) if all(part.isidentifier() for part in parts) else None


def _outline(module: str, source: bytes, *, file: str) -> _Outline:
    package = file.endswith("__init__.py")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about tenants' code are not for our log
        tree = ast.parse(source, filename=file)
    outline = _Outline()
    known: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias, origin in _imported(module, node, package=package).items():
                known[alias] = f"{module}:{alias}"
                outline.derived.append((origin, known[alias]))
        elif isinstance(node, ast.FunctionDef):
            outline.functions.add(f"{module}:{node.name}")
        elif isinstance(node, ast.ClassDef):
            known[node.name] = f"{module}:{node.name}"
            _add_class(outline, node, known, file)
        elif not isinstance(node, ast.Import | ast.Expr):
            # Other top-level statements may rebind the name of a class.
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    outline.signatures.pop(f"{module}:{part.id}", None)
    return outline


def _add_class(outline: _Outline, node: ast.ClassDef, known: dict[str, str], file: str) -> None:
    name = known[node.name]
    outline.classes.add(name)
    outline.signatures.pop(name, None)
    if (signature := of_class(node, file)) is not None:
        outline.signatures[name] = signature
    if any(isinstance(part, ast.FunctionDef) and part.name == "step" for part in node.body):
        outline.steps.add(name)
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    outline.derived += [(known[base], name) for base in bases if base in known]


def _imported(module: str, node: ast.ImportFrom, *, package: bool) -> dict[str, str]:
    above = module.split(".") if package else module.split(".")[:-1]
    above = above[: len(above) - node.level + 1] if node.level else []
    source = ".".join([*above, *([node.module] if node.module else [])])
    return {alias.asname or alias.name: f"{source}:{alias.name}" for alias in node.names}


def _with_step(outlines: list[_Outline]) -> set[str]:
    """Return the classes with a `step` of their own, and the classes that inherit one."""
    heirs: dict[str, list[str]] = {}
    for outline in outlines:
        for base, name in outline.derived:
            heirs.setdefault(base, []).append(name)
    found = {name for outline in outlines for name in outline.steps}
    open_ = list(found)
    while open_:
        fresh = set(heirs.get(open_.pop(), ())) - found
        found |= fresh
        open_ += fresh
    return found & {name for outline in outlines for name in outline.classes}
