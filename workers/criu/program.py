"""Finds CRIU: the prefix that `make criu` makes, or what ROUNDHOUSE_CRIU names."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON = dict[str, Any]

#: Older versions cannot dump sockets on kernels from 6.16 on, and have CVE-2026-18107: a process
#: could run its restartable sequences while it is dumped.
OLDEST = (4, 2, 1)
PREFIX = Path(__file__).resolve().parents[2] / ".criu"
_VERSION_S = 5.0


class NoProgram(Exception):
    """Raised when there is no usable CRIU; says why and what to do."""


@dataclass(frozen=True, slots=True)
class CriuProgram:
    """Describes a CRIU that runs here.

    If it lies in a prefix, it has a loader and libraries of its own; else it uses the host's.
    """

    binary: Path
    version: str
    loader: Path | None = None

    def as_json(self) -> JSON:
        loader = None if self.loader is None else str(self.loader)
        return {"binary": str(self.binary), "version": self.version, "loader": loader}

    @classmethod
    def from_json(cls, body: JSON) -> CriuProgram:
        loader = None if body["loader"] is None else Path(body["loader"])
        return cls(Path(body["binary"]), body["version"], loader)

    @property
    def argv(self) -> list[str]:
        if self.loader is None:
            return [str(self.binary)]
        libraries = str(self.loader.parent)
        return [str(self.loader), "--library-path", libraries, str(self.binary)]


def find(named: str = "") -> CriuProgram:
    """Return the CRIU of a prefix or a path; raises NoProgram."""
    place = Path(named) if named else PREFIX
    if place.is_dir():
        binary, loaders = place / "bin" / "criu", sorted((place / "lib").glob("ld-linux*"))
        loader = loaders[0] if loaders else None
    else:
        binary, loader = place, None
    if not os.access(binary, os.X_OK):
        raise NoProgram(f"there is no CRIU at {place}: run `make criu`, or set ROUNDHOUSE_CRIU")
    version = _version_of(CriuProgram(binary, "", loader))
    if tuple(map(int, version.split("."))) < OLDEST:
        told = ".".join(map(str, OLDEST))
        raise NoProgram(f"{binary} is CRIU {version}; {told} or newer is needed: run `make criu`")
    return CriuProgram(binary, version, loader)


def _version_of(program: CriuProgram) -> str:
    try:
        done = subprocess.run(
            [*program.argv, "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoProgram(f"{program.binary} cannot be run: {error}") from error
    said = re.search(r"^Version: (\d+(?:\.\d+)*)", done.stdout, re.MULTILINE)
    if said is None:
        raise NoProgram(f"{program.binary} does not say its version: is it CRIU?")
    return said[1]
