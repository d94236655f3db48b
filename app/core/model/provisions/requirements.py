"""Reads files that name packages: requirements, requirements with hashes, pylock.toml and uv.lock.

What such a file may ask for is little: packages of the administrator's index, by name and version.
A local path, an address, a version control system or an option is a fault, with its line.  Nothing
here is a resolver: `uv` locks what is sound, and says which packages do not fit together.

Names and markers follow PEP 508, pylock.toml follows PEP 751.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.core.model.fields import near_name

JSON = dict[str, Any]

MAX_BYTES = 2**21  # per file
MAX_LINES = 20_000
MAX_LISTED = 20  # most faults listed for one file; further ones are counted

# Spaces are matched without backtracking (`*+`), so that a long run of them takes only linear time.
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?"
_EXTRAS = rf"(?:\s*+\[\s*+(?:{_NAME}(?:\s*+,\s*+{_NAME})*)?\s*+\])?"
_BOUND = r"(?:===|~=|==|!=|<=|>=|<|>)\s*+[A-Za-z0-9_.*+!-]{1,128}"
_BOUNDS = rf"(?:{_BOUND}(?:\s*+,\s*+{_BOUND})*)?"
_MARKER = r"(?:\s*+;\s*+(?P<marker>(?!.*--)[A-Za-z0-9_ .'\"()<>=!~,*+-]{1,1000}))?"
_REQUIREMENT = re.compile(
    rf"(?P<name>{_NAME}){_EXTRAS}\s*+(?:\(\s*+{_BOUNDS}\s*+\)|{_BOUNDS}){_MARKER}\s*+", re.ASCII
)
_PINNED = re.compile(
    rf"(?P<name>{_NAME}){_EXTRAS}\s*+==\s*+(?P<version>[A-Za-z0-9_.+!-]{{1,128}}){_MARKER}\s*+",
    re.ASCII,
)
_HASH = re.compile(r"\s--hash[= ](\S+)")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z-]*")
_SEPARATORS = re.compile(r"[-_.]+")

_INDEX_OPTIONS = ("-i", "--index-url", "--extra-index-url", "--find-links", "-f", "--no-index")
_FILE_OPTIONS = ("-r", "--requirement", "-c", "--constraint")


@dataclass(frozen=True, slots=True)
class FileFault:
    """Describes one fault of a file; `line` counts from 1, and is 0 if the whole file is at
    fault.
    """

    line: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPackage:
    """Describes one package of a lock, at one version; each of `hashes` ("sha256:<hex>") is the
    hash of a wheel.
    """

    name: str
    version: str
    marker: str = ""
    hashes: tuple[str, ...] = ()


class BadFile(Exception):
    """Raised for a file that is at fault; `faults` has at most MAX_LISTED of them."""

    def __init__(self, faults: tuple[FileFault, ...]) -> None:
        self.faults = faults
        super().__init__("; ".join(fault.detail for fault in faults))


def normal(name: str) -> str:
    """Return the name of a package in its normal form (PEP 503)."""
    return _SEPARATORS.sub("-", name).lower()


def text_of(body: bytes) -> str:
    """Decode a file; raises BadFile."""
    if len(body) > MAX_BYTES:
        raise _bad(0, f"must be at most {MAX_BYTES} bytes; got {len(body)}")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body[: error.start].count(b"\n") + 1
        raise _bad(line, "must be UTF-8 text") from error
    if "\0" in text:
        raise _bad(text[: text.index("\0")].count("\n") + 1, "contains a NUL character")
    return text


def check(sort: str, path: str, body: bytes) -> None:
    """Check a file that a request names; raises BadFile.  `sort` is one of environment.SORTS."""
    text = text_of(body)
    if sort == "requirements":
        read_requirements(text)
    elif path.rpartition("/")[2] == "uv.lock":
        read_uv_lock(text)
    else:
        read_pinned(path, text)


def read_pinned(path: str, text: str) -> list[PinnedPackage]:
    """Return the packages of a lock other than uv.lock; raises BadFile."""
    return read_pylock(text) if path.endswith(".toml") else read_hashed(text)


# --- requirements -------------------------------------------------------------------------------


def read_requirements(text: str) -> list[str]:
    """Return the requirements, one a line; raises BadFile."""
    found, faults = list[str](), list[FileFault]()
    for number, line in _lines(text):
        if why := _why_not(line):
            faults.append(FileFault(number, why))
        else:
            found.append(line)
    _raise_if(faults)
    if not found:
        raise _bad(0, "names no package")
    return found


def _why_not(line: str) -> str:
    """Return why the line may not be in a file of requirements; "" if it may."""
    if line.startswith("-"):
        return _option(line)
    if _HASH.search(f" {line}"):
        return "has a hash, as a lock does: name this file as `lock` instead of `requirements`"
    return _source(line) or ("" if _REQUIREMENT.fullmatch(line) else _no_requirement(line))


def _option(line: str) -> str:
    found = _OPTION.match(line)
    name = found[0] if found else line[:20]
    if name in _FILE_OPTIONS:
        return f"{name} is not read: write the lines of that file here"
    if name in ("-e", "--editable"):
        return "-e installs a local folder; put that code into the bundle, where it is imported"
    if name in _INDEX_OPTIONS:
        return f"{name} is not taken: the administrator sets the index of packages"
    return f"the option {name!r:.40} is not taken; a line names one package, such as tqdm>=4.66"


def _source(line: str) -> str:
    """Return why the line's source is refused (a path, an address, a variable); "" if it is the
    index.
    """
    before_marker = line.partition(";")[0]
    if "://" in line or "@" in before_marker or re.match(r"(git|hg|svn|bzr)\+", line):
        return "names an address; only packages of the administrator's index can be installed"
    if "$" in line:
        return "names a variable; variables are not replaced"
    if re.match(r"[./~\\]|[A-Za-z]:\\", line) or "/" in before_marker or "\\" in before_marker:
        return "names a local path; put code into the bundle, where it is imported"
    if re.search(r"\.(whl|zip|tar\.gz|tar\.bz2|tgz)$", before_marker.strip(), re.IGNORECASE):
        return "names a file; only packages of the administrator's index can be installed"
    return ""


def _no_requirement(line: str) -> str:
    return f"{line[:80]!r} names no package; a line is such as tqdm>=4.66 or pandas==2.3.1"


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number, logical line) without comments and empty lines; raises BadFile."""
    rows = text.splitlines()
    if len(rows) > MAX_LINES:
        raise _bad(0, f"must have at most {MAX_LINES} lines; got {len(rows)}")
    begun, parts = 0, list[str]()
    for number, row in enumerate(rows, 1):
        row = "" if row.lstrip().startswith("#") else re.split(r"\s#", row)[0]
        begun = begun or number
        goes_on = row.rstrip().endswith("\\")
        parts.append(row.rstrip()[:-1] if goes_on else row)
        if goes_on and number < len(rows):
            continue
        line = " ".join("".join(f"{part.strip()} " for part in parts).split())
        if line:
            yield begun, line
        begun, parts = 0, []


# --- requirements with hashes ---------------------------------------------------------------------


def read_hashed(text: str) -> list[PinnedPackage]:
    """Return the packages of requirements with hashes; raises BadFile."""
    found, faults = list[PinnedPackage](), list[FileFault]()
    for number, line in _lines(text):
        pinned = _hashed(line)
        if isinstance(pinned, PinnedPackage):
            found.append(pinned)
        else:
            faults.append(FileFault(number, pinned))
    _raise_if(faults)
    if not found:
        raise _bad(0, "names no package")
    return found


def _hashed(line: str) -> PinnedPackage | str:
    """Return the package of a line, or why it is refused."""
    if line.startswith("-"):
        return _option(line)
    hashes = _HASH.findall(line)
    bare = _HASH.sub("", line).strip()
    if why := _source(bare):
        return why
    pinned = _PINNED.fullmatch(bare)
    if pinned is None:
        is_sound = _REQUIREMENT.fullmatch(bare) is not None
        return "must name one version with ==" if is_sound else _no_requirement(bare)
    if not hashes:
        return f"{pinned['name']} has no --hash; a lock has the hash of each wheel"
    if wrong := [one for one in hashes if not _SHA256.fullmatch(one)]:
        return f"{wrong[0][:80]!r} is no SHA-256, as in --hash=sha256:…"
    return PinnedPackage(
        name=normal(pinned["name"]),
        version=pinned["version"],
        marker=(pinned["marker"] or "").strip(),
        hashes=tuple(dict.fromkeys(hashes)),
    )


# --- pylock.toml ----------------------------------------------------------------------------------


def read_pylock(text: str) -> list[PinnedPackage]:
    """Return the packages of a pylock.toml; raises BadFile."""
    body = _toml(text)
    packages = body.get("packages")
    if not isinstance(packages, list) or not packages:
        raise _bad(0, "has no [[packages]]; is it a pylock.toml?")
    found, faults = list[PinnedPackage](), list[FileFault]()
    for package in packages:
        pinned = _of_pylock(package)
        if isinstance(pinned, PinnedPackage):
            found.append(pinned)
        else:
            faults.append(FileFault(_line_of(text, package), pinned))
    _raise_if(faults)
    return found


def _of_pylock(package: object) -> PinnedPackage | str:
    if not isinstance(package, dict) or not isinstance(package.get("name"), str):
        return "a package has no name"
    name = package["name"]
    for sort, told in _FOREIGN.items():
        if sort in package:
            return f"{name} comes from {told}; only wheels of the index can be installed"
    version, marker = package.get("version"), package.get("marker", "")
    line = f"{name}=={version}" + (f" ; {marker}" if marker else "")
    if not isinstance(version, str) or not _PINNED.fullmatch(line):
        return f"{name!r:.80} has no sound name, version and marker"
    hashes = [_sha256(wheel) for wheel in package.get("wheels") or ()]
    if not hashes:
        return f"{name} {version} has no wheel, and no package is built from its source here"
    if "" in hashes:
        return f"a wheel of {name} {version} has no SHA-256"
    return PinnedPackage(name=normal(name), version=version, marker=marker, hashes=tuple(hashes))


_FOREIGN = {"vcs": "a version control system", "directory": "a local folder", "archive": "a file"}


def _sha256(wheel: object) -> str:
    hashes = wheel.get("hashes") if isinstance(wheel, dict) else None
    said = f"sha256:{hashes.get('sha256')}" if isinstance(hashes, dict) else ""
    return said if _SHA256.fullmatch(said) else ""


# --- uv.lock --------------------------------------------------------------------------------------


def read_uv_lock(text: str) -> str:
    """Return the pyproject.toml with which `uv export` reads this uv.lock; raises BadFile.

    The lock has a copy of what the project requires.  So the project's own pyproject.toml, which
    could name other files and an index, is not needed.
    """
    packages = _toml(text).get("package")
    if not isinstance(packages, list):
        raise _bad(0, "has no [[package]]; is it a uv.lock?")
    roots, faults = list[JSON](), list[FileFault]()
    for package in packages:
        if not isinstance(package, dict) or not isinstance(package.get("source"), dict):
            raise _bad(0, "a package has no source")
        if {"virtual", "editable"} & package["source"].keys() and _is_root(package["source"]):
            roots.append(package)
        elif why := _of_uv(package):
            faults.append(FileFault(_line_of(text, package), why))
    _raise_if(faults)
    if len(roots) != 1:
        raise _bad(0, f"must be the lock of one project; got {len(roots)}")
    return _project(roots[0])


def _is_root(source: JSON) -> bool:
    return "." in source.values()


def _of_uv(package: JSON) -> str:
    name, version = f"{package.get('name')!s:.80}", package.get("version")
    if "registry" not in package["source"]:
        sort = next(iter(package["source"]), "nowhere")
        return f"{name} comes from {sort!s:.40}; only wheels of the index can be installed"
    if not package.get("wheels"):
        return f"{name} {version!s:.40} has no wheel, and no package is built from its source here"
    return ""


def _project(root: JSON) -> str:
    metadata = root.get("metadata")
    requires = metadata.get("requires-dist", []) if isinstance(metadata, dict) else []
    lines = [_requirement_of(one) for one in requires if not _is_optional(one)]
    name = root.get("name")
    if not isinstance(name, str) or not re.fullmatch(_NAME, name, re.ASCII):
        raise _bad(0, "the project of the lock has no sound name")
    listed = "".join(f"    {_quoted(line)},\n" for line in lines)
    return f'[project]\nname = "{name}"\nversion = "0"\ndependencies = [\n{listed}]\n'


def _is_optional(one: object) -> bool:
    return isinstance(one, dict) and "extra ==" in str(one.get("marker", ""))


def _requirement_of(one: object) -> str:
    if not isinstance(one, dict) or not isinstance(one.get("name"), str):
        raise _bad(0, "a requirement of the project has no name")
    extras = ",".join(map(str, one.get("extras", ())))
    line = f"{one['name']}[{extras}]" if extras else str(one["name"])
    line += str(one.get("specifier", ""))
    line += f" ; {one['marker']}" if one.get("marker") else ""
    if not _REQUIREMENT.fullmatch(line):
        raise _bad(0, f"the project requires {line[:80]!r}, which names no package of an index")
    return line


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# --- helpers --------------------------------------------------------------------------------------


def _toml(text: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _bad(0, f"is no TOML: {error}") from error


def _line_of(text: str, package: object) -> int:
    """Return the line that names the package in a TOML file; 0 if it is not found."""
    name = package.get("name") if isinstance(package, dict) else None
    for number, line in enumerate(text.split("\n"), 1):
        key, _, value = line.partition("=")
        if key.strip() == "name" and value.strip().startswith(f'"{name}"'):
            return number
    return 0


def _raise_if(faults: list[FileFault]) -> None:
    if not faults:
        return
    listed = faults[:MAX_LISTED]
    if more := len(faults) - len(listed):
        listed.append(FileFault(0, f"{more} more faults are not listed"))
    raise BadFile(tuple(listed))


def _bad(line: int, detail: str) -> BadFile:
    return BadFile((FileFault(line, detail),))


def near_file(path: str, known: list[str]) -> str:
    """Return a hint for a file that the bundle does not have."""
    near = near_name(path, known)
    if near:
        return f"did you mean {near!r}?"
    return f"it has: {', '.join(known[:10])}" if known else "it has no such file"
