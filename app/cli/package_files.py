"""Finds the file of a folder that names its packages, in the form that the service reads.

The service reads requirements and locks. The dependencies of a pyproject.toml, and what
environment.yml has for pip, are sent as requirements beside the code.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from app.cli.bundling import UnreadablePath

JSON = dict[str, Any]

#: The first of these that is there is offered.
USUAL = (
    "requirements.txt",
    "requirements/base.txt",
    "pyproject.toml",
    "environment.yml",
    "environment.yaml",
)


def find_usual(folder: Path) -> str:
    """Return the file of the folder that names packages; "" if none does."""
    return next((name for name in USUAL if _names_packages(folder / name)), "")


def _names_packages(path: Path) -> bool:
    """True if the file is there; a pyproject.toml, which has other uses, must list dependencies."""
    if path.name != "pyproject.toml":
        return path.is_file()
    try:
        return path.is_file() and bool(_dependencies(path))
    except UnreadablePath:
        return False  # no packages were asked for, so the code is sent as it is


def environment_of(folder: Path | None, path: str, python: str) -> tuple[JSON, dict[str, bytes]]:
    """Return the environment that a file describes, and files to send beside the code.

    Raises UnreadablePath.
    """
    name = path.rpartition("/")[2]
    given: JSON = {"python": python} if python else {}
    if name == "pyproject.toml":
        lines = _dependencies(_there(folder, path))
        if not lines:
            told = "it has no [project] dependencies; write a requirements.txt"
            raise UnreadablePath(f"{path}: {told}")
    elif name.endswith((".yml", ".yaml")):
        lines, version = _of_conda(_there(folder, path))
        given = given or ({"python": version} if version else {})
    else:
        sort = "lock" if path.endswith((".lock", ".toml")) else "requirements"
        return {sort: path, **given}, {}
    made = f"{name.rpartition('.')[0]}.requirements.txt"
    body = "".join(f"{line}\n" for line in lines).encode()
    return {"requirements": made, **given}, {made: body}


def _there(folder: Path | None, path: str) -> Path:
    if folder is None or not (folder / path).is_file():
        raise UnreadablePath(f"{path}: there is no such file in the folder of the code")
    return folder / path


def _dependencies(path: Path) -> list[str]:
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UnreadablePath(f"{path}: cannot be read: {error}") from error
    found = project.get("dependencies", []) if isinstance(project, dict) else []
    return [str(each) for each in found] if isinstance(found, list) else []


def _of_conda(path: Path) -> tuple[list[str], str]:
    """Return what a conda environment has for pip, and its version of Python.

    Packages of conda itself are refused, as their names differ from those of the index.
    """
    import yaml  # imported here because it is slow and seldom needed

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UnreadablePath(f"{path}: cannot be read: {error}") from error
    listed = found.get("dependencies") if isinstance(found, dict) else None
    lines, version, others = list[str](), "", list[str]()
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict):
            lines += [str(line) for line in each.get("pip") or ()]
            continue
        name, _, rest = str(each).replace(">", "=").partition("=")
        if name.strip() == "python":
            version = ".".join(rest.strip("=").split(".")[:2])
        elif name.strip() != "pip":
            others.append(str(each))
    if others or not lines:
        told = (
            f"packages of conda are not installed here: {', '.join(others[:5])}; " if others else ""
        )
        raise UnreadablePath(f"{path}: {told}name the packages for pip, or in a requirements.txt")
    return lines, version
