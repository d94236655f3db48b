"""Gives tests a CRIU that works on this machine, and sandbox directories."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.conftest import DeviceRig
from tests.workers.criu.moving import hosts
from tests.workers.criu.prefixes import prefix_that_works
from workers.process.isolation import sandbox


@pytest.fixture(scope="session")
def criu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prefix_that_works(tmp_path_factory)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, criu: Path) -> Iterator[list[DeviceRig]]:
    """Two device workers with one store that play hosts."""
    with hosts(tmp_path_factory.mktemp("pair"), criu) as made:
        yield made


@pytest.fixture
def room(tmp_path: Path) -> sandbox.Room:
    """A sandbox directory, as a device worker that is root makes it."""
    for folder in (*reversed(tmp_path.parents), tmp_path):
        if folder.stat().st_uid == 0 and folder.is_relative_to("/tmp/pytest-of-root"):
            folder.chmod(0o711)
    code, scratch = tmp_path / "code", tmp_path / "scratch"
    code.mkdir(mode=0o755)
    scratch.mkdir(mode=0o700)
    shutil.chown(scratch, UID, UID)
    return sandbox.Room(code=code, scratch=scratch, uid=UID)


UID = 261_234
