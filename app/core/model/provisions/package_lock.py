"""Writes and reads the lock of an environment: exactly which wheels it consists of.

A lock is a short text, addressed by its SHA-256: a head, then one line for each package with its
hashes, sorted. Equal environments have equal texts, also those of different tenants. `uv` reads it
as requirements with hashes.

A lock that lies *over* the platform names the versions of PLATFORM: packages that every process of
a job has imported before its code begins, so they cannot be replaced. The lock does not contain
them. A lock that is *alone* contains everything that it needs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from app.core.model.provisions.requirements import (
    BadFile,
    FileFault,
    PinnedPackage,
    read_hashed,
)

#: Packages that a process of a job has imported before the job's code begins (`workers.zygote`).
PLATFORM = (
    "cloudpickle",
    "mpmath",
    "numpy",
    "sympy",
    "torch",
    "typing-extensions",
    "xxhash",
)

_HEAD = re.compile(
    r"# Roundhouse lock 1\n# python (?P<python>3\.\d{1,2})\n"
    r"# (?P<how>alone|over(?P<over>( [a-z0-9-]+==[A-Za-z0-9_.!-]+)*))\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageLock:
    """Lists the packages of an environment; `over` has the platform's versions if it is not
    `alone`.
    """

    python: str
    packages: tuple[PinnedPackage, ...]
    over: Mapping[str, str] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        return not self.over

    @property
    def text(self) -> str:
        pins = "".join(f" {name}=={self.over[name]}" for name in sorted(self.over))
        how = "alone" if self.alone else f"over{pins}"
        lines = [_line(one) for one in sorted(self.packages, key=_key)]
        return f"# Roundhouse lock 1\n# python {self.python}\n# {how}\n" + "".join(lines)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_lock(text: str) -> PackageLock:
    """Read what `PackageLock.text` wrote; raises BadFile."""
    head = _HEAD.match(text)
    if head is None:
        raise BadFile((FileFault(1, "expected the first line of a lock"),))
    pins = (pin.split("==") for pin in (head["over"] or "").split())
    rest = text[head.end() :]
    return PackageLock(
        python=head["python"],
        packages=tuple(read_hashed(rest)) if rest else (),
        over={name: version for name, version in pins},
    )


def over_platform(
    pinned: Sequence[PinnedPackage], installed: Mapping[str, str]
) -> tuple[list[PinnedPackage], list[str]]:
    """Remove the platform's packages from a lock; return the rest, and those of another version.

    `installed` are the platform's versions, without their local parts.
    """
    rest, unfit = list[PinnedPackage](), list[str]()
    for one in pinned:
        has = installed.get(one.name)
        if has is None:
            rest.append(one)
        elif public(one.version) != has:
            unfit.append(f"{one.name} {one.version} instead of the platform's {has}")
    return rest, unfit


def public(version: str) -> str:
    """Return a version without its local part: 2.13.0 for 2.13.0+cpu."""
    return version.partition("+")[0]


def stand_ins(installed: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    """Yield (name, version) of the empty packages that replace the platform's while `uv` locks.

    Their versions have a local part, so the index has none of them.
    """
    return ((name, f"{version}+platform") for name, version in sorted(installed.items()))


def _key(one: PinnedPackage) -> tuple[str, str, str]:
    return one.name, one.version, one.marker


def _line(one: PinnedPackage) -> str:
    marker = f" ; {one.marker}" if one.marker else ""
    hashes = "".join(f" \\\n    --hash={each}" for each in sorted(one.hashes))
    return f"{one.name}=={one.version}{marker}{hashes}\n"
