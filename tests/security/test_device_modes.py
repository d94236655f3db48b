"""No other account of the machine can read what a deployment keeps on its disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.model.protocol.messages import Finished, Saved
from app.local import embedded_servers
from app.storage.backend import close_to_others
from app.storage.store import BLOBS, Store
from tests.workers.conftest import rigs  # noqa: F401  a fixture

pytestmark = pytest.mark.security

OF_OTHERS = 0o077


def _open_paths(root: Path) -> Iterator[str]:
    """Yield the paths that another account can reach and use, with their modes."""
    for path in sorted(root.iterdir()):
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.is_symlink() or not mode & OF_OTHERS:
            continue
        yield f"{mode:o} {path}"


def _all_modes(root: Path) -> dict[str, int]:
    return {
        str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode)
        for path in (root, *root.rglob("*"))
        if not path.is_symlink()
    }


def test_files_left_by_a_device_worker_are_private(rigs, tmp_path):  # noqa: F811
    umask = os.umask(0o022)  # a careless umask
    try:
        rig = rigs(sandbox="preferred")
        rig.launch("t1", "jobs:Count")
        rig.steps("t1", 3)
        rig.save("t1")
        rig.event(Saved, "t1")
        rig.launch("t2", "jobs:tokenize", params={"text": "abc"}, outputs=["tokens"])
        rig.paused_and_saved("t1", 1)  # nothing is written to the store any more
        rig.event(Finished, "t2")
    finally:
        os.umask(umask)
    home = rig.house.run.parent
    assert [*_open_paths(home / "run")] == []
    assert [*_open_paths(rig.house.folder)] == []
    store = _all_modes(home / "store")
    assert {name for name, mode in store.items() if mode not in (0o700, 0o400)} == set()
    assert len(store) > 5
    # A resident has a user of its own, and gets its code without access to these folders.
    code = _all_modes(rig.house.folder / "code")
    assert {name for name, mode in code.items() if mode & 0o022} == set()


def test_store_of_an_earlier_version_becomes_private_when_opened(tmp_path):
    place = tmp_path / "store"
    sha256, _ = Store.at(place).put([b"of a tenant"])
    for path in (place, *place.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o444)
    close_to_others.cache_clear()
    store = Store.at(place)
    assert {mode for mode in _all_modes(place).values() if mode & OF_OTHERS} == set()
    with store.open(sha256) as file:
        assert file.read() == b"of a tenant"


def test_foreign_folder_keeps_its_mode(tmp_path):
    (tmp_path / "theirs").mkdir(mode=0o755)
    (tmp_path / "theirs").chmod(0o755)
    close_to_others(tmp_path / "theirs", BLOBS)
    assert stat.S_IMODE((tmp_path / "theirs").stat().st_mode) == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs Postgres as another user")
def test_home_lets_only_postgres_pass(tmp_path):
    home = Path("/var/tmp") / f"roundhouse-test-{tmp_path.name}-{os.getpid()}"
    home.mkdir()
    home.chmod(0o711)  # as an earlier version made it
    try:
        embedded_servers.prepare(home)
        assert (stat.S_IMODE(home.stat().st_mode), home.stat().st_gid) == (0o710, 65534)
        assert embedded_servers.closed_to(home, embedded_servers.NOBODY) is None
        assert embedded_servers.closed_to(home, (200_001, 200_001)) == home
    finally:
        home.rmdir()
