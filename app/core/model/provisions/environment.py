"""Reads the `environment` of a request: the packages of its tasks, from a file of its bundle.

`EnvironmentFile` is what a tenant writes.  A `TaskEnvironment` is what each task of the request
carries from then on: it is stored with the task, and travels to the device in the launch.  It names
its lock (`provisions.package_lock`) by its hash as soon as the packages are locked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from app.core.model.fields import Fields

JSON = dict[str, Any]

PYTHON = re.compile(r"3\.[0-9]{1,2}")
PYTHON_RULE = 'a version of Python, such as "3.12"'
SORTS = ("requirements", "lock")

_PATH = r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,127}/){0,8}"
_PART = "[A-Za-z0-9_.-]{0,64}"
_REQUIREMENTS = re.compile(
    rf"{_PATH}({_PART}requirements{_PART}|requirements/[A-Za-z0-9_]{_PART})\.(txt|in)"
)
_LOCK = re.compile(
    rf"{_PATH}(pylock(\.[A-Za-z0-9_-]{{1,64}})?\.toml|[A-Za-z0-9_]{_PART}\.lock"
    rf"|{_PART}(requirements|lock){_PART}\.txt)"
)
_SHA256_OR_NONE = re.compile(r"([0-9a-f]{64})?")

_REQUIREMENTS_RULE = (
    "the path of a file of the bundle that ends in .txt or .in, with `requirements` in its name or"
    " as its folder"
)
_LOCK_RULE = (
    "the path of a file of the bundle: uv.lock, pylock.toml, pylock.NAME.toml, or requirements "
    "with hashes in a file that ends in .lock or .txt"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFile:
    """Names the file of a bundle that says which packages a request brings.

    `sort` is one of SORTS.  `python` is the version of Python; "" stands for the platform's
    version.
    """

    sort: str
    path: str
    python: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnvironment:
    """Describes the environment of a task: `lock` is the SHA-256 of its locked packages, "" before
    they are locked.

    With `own_python` the task runs in an interpreter of its own, which only a command may;
    otherwise in the platform's interpreter.
    """

    python: str
    lock: str = ""
    own_python: bool = False

    @property
    def need(self) -> str:
        """The word for what the task needs of a host (`core.model.device_choice.NEED`)."""
        return f"{'python' if self.own_python else 'environment'}:{self.python}"

    def as_json(self) -> JSON:
        return {"python": self.python, "lock": self.lock, "own_python": self.own_python}


def may_hold(path: str) -> bool:
    """True if a request may name a file with this path as its environment."""
    return any(form.fullmatch(path) for form in (_REQUIREMENTS, _LOCK))


def read_environment(fields: Fields) -> EnvironmentFile | None:
    """Read the `environment` of a request; None if there is none, or if it is wrong."""
    if not fields.given:
        return None
    paths = {
        "requirements": fields.text("requirements", "", _REQUIREMENTS, _REQUIREMENTS_RULE),
        "lock": fields.text("lock", "", _LOCK, _LOCK_RULE),
    }
    python = fields.text("python", "", PYTHON, PYTHON_RULE)
    said = [sort for sort in SORTS if fields.body.get(sort) is not None]
    if len(said) != 1:
        told = " and ".join(said) or "none of them"
        fields.fault("", f"must have exactly one of {' and '.join(SORTS)}; got {told}")
    fields.close()
    if len(said) != 1 or not paths[said[0]]:
        return None
    return EnvironmentFile(sort=said[0], path=paths[said[0]], python=python)


def read_task_environment(fields: Fields) -> TaskEnvironment | None:
    """Read the environment of a stored task, as `TaskEnvironment.as_json` wrote it."""
    if not fields.given:
        return None
    found = TaskEnvironment(
        python=fields.text("python", "", PYTHON, PYTHON_RULE),
        lock=fields.text("lock", "", _SHA256_OR_NONE, "64 hexadecimal digits") or "",
        own_python=fields.flag("own_python", False),
    )
    fields.close()
    return found
