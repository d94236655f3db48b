"""What lies on this machine becomes what is sent: a folder a bundle, a file a descriptor.

The same files always make the same bytes, so that the service, which knows bundles by their
SHA-256, is sent each only once: names are sorted, and times and owners left out.  Nothing is
guessed: a link out of the folder or a doubled key in a descriptor is an error that says where.

Nothing is sent from here; `app.client` does that.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

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
#: What a folder may call its descriptor, the first found is read.
DESCRIPTOR_NAMES = ("roundhouse.yaml", "roundhouse.yml", "roundhouse.json")

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip knows


class Unreadable(Exception):
    """A file or folder here cannot be sent; the message says which, why and what to do."""


# --- a folder becomes a bundle --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """`files` are (name in the zip, size in bytes as it lies on disk)."""

    folder: Path
    body: bytes
    sha256: str
    files: tuple[tuple[str, int], ...]

    def biggest(self, count: int = 5) -> list[tuple[str, int]]:
        return sorted(self.files, key=lambda file: -file[1])[:count]


def bundle_folder(folder: Path) -> Bundle:
    """All of the folder but what is ignored, as a zip; raises Unreadable."""
    if not folder.is_dir():
        raise Unreadable(f"{folder}: no such folder, so there is no code to send")
    files = sorted(_files(folder, _patterns(folder)))
    if not files:
        raise Unreadable(f"{folder}: nothing in it to send (everything is ignored?)")
    body = _zip(folder, files)
    return Bundle(
        folder=folder,
        body=body,
        sha256=hashlib.sha256(body).hexdigest(),
        files=tuple((name, (folder / name).stat().st_size) for name in files),
    )


def bundle_file(path: Path) -> Bundle:
    """An archive that somebody else made, as it is; raises Unreadable."""
    try:
        body = path.read_bytes()
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read: {error}") from error
    digest = hashlib.sha256(body).hexdigest()
    return Bundle(folder=path, body=body, sha256=digest, files=((path.name, len(body)),))


def _patterns(folder: Path) -> tuple[str, ...]:
    path = folder / IGNORE_FILE
    if not path.exists():
        return IGNORED
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return IGNORED + tuple(line for line in lines if line and not line.startswith("#"))


def _files(folder: Path, patterns: tuple[str, ...]) -> Iterator[str]:
    root = folder.resolve()
    for here, folders, names in os.walk(folder):
        inside = Path(here).relative_to(folder)
        folders[:] = [n for n in folders if not _ignored(inside / n, patterns)]
        links = [n for n in folders if (Path(here) / n).is_symlink()]
        for name in [*links, *names]:
            if not _ignored(inside / name, patterns):
                _must_lie_inside(Path(here) / name, root)
                yield (inside / name).as_posix()


def _ignored(path: Path, patterns: tuple[str, ...]) -> bool:
    """A pattern with a slash means a path from the top; one without means a name anywhere."""
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
            raise Unreadable(
                f"{path}: a link to {target}, which cannot be sent along; "
                f"copy it here or name it in {IGNORE_FILE}"
            )
    elif not path.is_file():
        raise Unreadable(f"{path}: not a plain file; name it in {IGNORE_FILE}")


def _zip(folder: Path, names: list[str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, so that the rights below are read as such
            entry.external_attr = (
                0o100755 if os.access(folder / name, os.X_OK) else 0o100644
            ) << 16
            archive.writestr(entry, (folder / name).read_bytes())
    return out.getvalue()


# --- a file becomes a descriptor ------------------------------------------------------------------


def read_descriptor(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file, or in the descriptor of a folder; raises Unreadable."""
    if path.is_dir():
        path = _descriptor_in(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path}: cannot be read: {error}") from error
    try:
        found = yaml.load(text, _Loader)
        json.dumps(found)  # tags and anchors can say what JSON cannot
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise Unreadable(f"{path}: not YAML or JSON: {error}") from error
    if not isinstance(found, dict):
        raise Unreadable(f"{path}: a descriptor is a mapping, this is a {type(found).__name__}")
    return found


def parse_param(text: str) -> tuple[str, Any]:
    """`lr=1e-3` is ("lr", 0.001); what is not JSON is a string.  Raises ValueError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{text!r} is not name=value")
    try:
        return name, json.loads(value, parse_constant=_no_json)
    except ValueError:
        return name, value


def _no_json(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _descriptor_in(folder: Path) -> Path:
    for name in DESCRIPTOR_NAMES:
        if (folder / name).exists():
            return folder / name
    raise Unreadable(
        f"{folder}: holds no {DESCRIPTOR_NAMES[0]}, which says what to run. Write one, or say it:\n"
        f"  roundhouse submit {folder} --job module:Class\n"
        f"  roundhouse submit {folder} -- python script.py"
    )


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain words, which are JSON's: `8e9` is a number, `on` a word, a date a string."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _wrong(key, "a name is wanted here")
            if key.value in seen:
                raise _wrong(key, f"{key.value!r} is here twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _wrong(node: yaml.Node, what: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


def _int(_: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value)


def _float(_: _Loader, node: yaml.ScalarNode) -> float:
    if math.isinf(number := float(node.value)):
        raise _wrong(node, f"{node.value} is more than a number can hold")
    return number


_WORDS = {
    "null": (r"(?:~|null|)$", ["~", "n", ""]),
    "bool": (r"(?:true|false)$", ["t", "f"]),
    "int": (r"[-+]?[0-9]+$", list("-+0123456789")),
    "float": (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
}
for _name, (_pattern, _first) in _WORDS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
