"""Reads the mounts of a task: folders of its host that an administrator named, each at a target.

A mount of the sort "image" is a container image instead, the root of a command
(`provisions.container_image`).

`mounts: {"/data": "imagenet"}` shows the folder that is registered as `imagenet` at `/data`,
read-only. A target is an absolute path that hides no path of the sandbox. Postgres knows the names
(`app.data.mounts`); the hosts know the folders (`workers.process.isolation.host_mounts`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping

from app.core.model.fields import NAME, NAME_RULE, Fields, escaped
from app.core.model.protocol.wellformed import is_path
from app.core.model.provisions.container_image import need_of_image

MAX_MOUNTS = 16  # per task
MAX_KNOWN = 100  # per Roundhouse, of all sorts: each device knows all of them
SORTS = FOLDER, IMAGE = "folder", "image"

#: First parts of paths that every sandbox has, or that programs take to be the system's own.
RESERVED = frozenset(
    {
        "bin",
        "boot",
        "code",
        "dev",
        "environment",
        "etc",
        "inputs",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "proc",
        "root",
        "run",
        "sbin",
        "scratch",
        "sys",
        "tmp",
        "usr",
        "var",
    }
)

_PART = re.compile(r"[A-Za-z0-9_@%+=:,.-]{1,127}")
_TARGET_RULE = 'an absolute path such as "/data", of letters, digits and _@%+=:,.-'


def read_mounts(fields: Fields) -> dict[str, str]:
    """Return the name of the mount by its target, and report what is wrong with them."""
    said, mounts = fields.mapping("mounts"), dict[str, str]()
    if len(said) > MAX_MOUNTS:
        fields.fault("mounts", f"must be at most {MAX_MOUNTS} mounts; got {len(said)}", "range")
        return {}
    for target, name in said.items():
        where = f"mounts/{escaped(target)}"
        if told := _trouble_with_target(target):
            fields.fault(where, told)
        elif not isinstance(name, str) or not NAME.fullmatch(name):
            fields.fault(where, f"the name of a mount must be {NAME_RULE}")
        elif over := next((each for each in mounts if _overlap(each, target)), ""):
            told = f"{target} and {over} overlap; give each mount a folder of its own"
            fields.fault(where, told, "twice")
        else:
            mounts[target] = name
    return mounts


def need_of(name: str) -> str:
    """Return the offer that a device must make so that a task can use the mount."""
    return f"mount:{name}"


def offer_of(name: str, sort: str) -> str:
    """Return the offer of a device that can show a mount of this sort."""
    return need_of_image(name) if sort == IMAGE else need_of(name)


def digest(paths: Mapping[str, str]) -> str:
    """Return a hash of all mounts of a sort.

    By this hash a device says which mounts it knows.
    """
    said = json.dumps(sorted(paths.items()), ensure_ascii=False)
    return hashlib.sha256(said.encode()).hexdigest()


def is_allowed(tenants: Iterable[str] | None, path: Iterable[str]) -> bool:
    """True if the tenant with this `path` may use a mount: `tenants` has the tenant, or one above
    it.

    None stands for all tenants.
    """
    return tenants is None or not {*tenants}.isdisjoint(path)


def _trouble_with_target(target: str) -> str:
    """Return why nothing can be shown at the target; "" if it can."""
    parts = target[1:].split("/") if is_path(target) else []
    if not parts or not all(map(_PART.fullmatch, parts)):
        return f"the target of a mount must be {_TARGET_RULE}, without '.' and '..' as a name"
    if parts[0] in RESERVED:
        return f"nothing can be shown in /{parts[0]}, which every task has; use /data or /mnt"
    return ""


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
