"""Finds a CRIU that works on this machine for tests, or skips them with the reason."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from workers.criu import program

RIGHTS = Path(__file__).parent / "rights"
_SYS_RESOURCE = 24


def may_read_limits() -> bool:
    """Say whether this process has CAP_SYS_RESOURCE, without which CRIU cannot read limits."""
    status = Path("/proc/self/status").read_text()
    held = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(held.split()[1], 16) >> _SYS_RESOURCE & 1)


def with_limits_from_proc(prefix: Path, made: Path) -> Path:
    """Make a prefix whose loader stands in for CAP_SYS_RESOURCE."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("root lacks CAP_SYS_RESOURCE here, and there is no compiler for the stand-in")
    shutil.copytree(prefix, made)
    (loader,) = (made / "lib").glob("ld-linux*")
    loader.rename(made / "lib" / "loader.so")
    shared = ["-shared", "-fPIC", "-o", str(made / "lib" / "limits.so"), str(RIGHTS / "limits.c")]
    for words in (shared, ["-static", "-o", str(loader), str(RIGHTS / "loader.c")]):
        subprocess.run([compiler, "-O1", *words], check=True)
    return made


def prefix_that_works(factory: pytest.TempPathFactory) -> Path:
    """Return the prefix of a CRIU that can dump and restore here."""
    try:
        program.find()
    except program.NoProgram as error:
        pytest.skip(str(error))
    if may_read_limits():
        return program.PREFIX
    return with_limits_from_proc(program.PREFIX, factory.mktemp("criu") / "prefix")
