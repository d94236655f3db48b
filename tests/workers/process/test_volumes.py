"""A scratch folder of fixed size, on this host's own kernel."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from workers.process import volumes


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template"
    why = volumes.make_template(path, volumes.LEAST_BYTES) or volumes.try_out(path, os.geteuid())
    if why:
        pytest.skip(f"no file system can be mounted here: {why}")
    return path


def test_a_volume_is_empty_and_belongs_to_its_user(template):
    mount = volumes.mounted(template, 4711)
    root = f"/proc/self/fd/{mount}"
    assert os.listdir(root) == []
    assert (os.stat(root).st_uid, os.stat(root).st_mode & 0o777) == (4711, 0o700)
    os.close(mount)


def test_content_of_one_volume_is_not_in_the_next(template):
    first, second = (volumes.mounted(template, 0) for _ in range(2))
    Path(f"/proc/self/fd/{first}/file").write_text("mine")
    assert os.listdir(f"/proc/self/fd/{second}") == []
    for mount in (first, second):
        os.close(mount)


@pytest.fixture
def spares(template: Path) -> Iterator[volumes.SpareImages]:
    kept = volumes.SpareImages()
    yield kept
    kept.close()


def test_spare_file_is_cleared_before_its_next_volume(template, spares):
    spares.prepare(template)
    (spare,) = spares.fds
    mount = volumes.mounted(template, 0, spares.fds)
    with open(f"/proc/self/fd/{mount}/file", "wb") as file:
        file.write(b"secret" * 2**16)
        os.fsync(file.fileno())
    assert b"secret" in _content(spare)
    os.close(mount)
    _await_free(spare)
    mount = volumes.mounted(template, 0, spares.fds)
    assert not _is_free(spare), "the second volume does not use the spare file"
    assert os.listdir(f"/proc/self/fd/{mount}") == []
    assert b"secret" not in _content(spare)
    assert os.fstat(spare).st_blocks * 512 >= volumes.LEAST_BYTES, "its space is not reserved"
    os.close(mount)


def test_spare_file_in_use_is_not_given_away(template, spares):
    spares.prepare(template)
    first, second = (volumes.mounted(template, 0, spares.fds) for _ in range(2))
    Path(f"/proc/self/fd/{first}/file").write_text("mine")
    assert os.listdir(f"/proc/self/fd/{second}") == []
    for mount in (first, second):
        os.close(mount)


def test_spare_files_of_another_size_are_closed(template, spares, tmp_path):
    for _ in range(volumes.SPARES + 1):
        spares.prepare(template)
    assert len(spares.fds) == volumes.SPARES
    other = tmp_path / "other"
    assert not volumes.make_template(other, 2 * volumes.LEAST_BYTES)
    spares.prepare(other)
    assert [os.fstat(fd).st_size for fd in spares.fds] == [2 * volumes.LEAST_BYTES]


def test_spare_file_is_not_grown_for_a_larger_template(template, spares):
    """The larger template would take more space than the disk has."""
    spares.prepare(template)
    (spare,) = spares.fds
    os.truncate(template, 2**43)
    with pytest.raises(OSError, match="reserving disk"):
        volumes.mounted(template, 0, spares.fds)
    assert os.fstat(spare).st_blocks * 512 < 2 * volumes.LEAST_BYTES


def _content(fd: int) -> bytes:
    return Path(f"/proc/self/fd/{fd}").read_bytes()


def _is_free(spare: int) -> bool:
    fd = os.open(f"/proc/self/fd/{spare}", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _await_free(spare: int) -> None:
    deadline_s = time.monotonic() + 60
    while not _is_free(spare):
        assert time.monotonic() < deadline_s, "its loop device still uses the file"
        time.sleep(0.01)


def test_full_volume_has_no_space_and_gives_all_back(template):
    """No file has a name there, and its loop device is free again."""
    mount = volumes.mounted(template, 0)
    assert _looped(template.parent)
    with pytest.raises(OSError, match="No space left on device"):
        _fill(Path(f"/proc/self/fd/{mount}/full"))
    assert os.listdir(template.parent) == [template.name]
    os.close(mount)
    deadline_s = time.monotonic() + 60
    while _looped(template.parent):
        assert time.monotonic() < deadline_s, "its loop device is still in use"
        time.sleep(0.01)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"1" * 2**20)


def _looped(folder: Path) -> list[str]:
    """Loop devices over a file in this folder."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):  # it may go at any moment
            found += [line for line in [backing.read_text()] if line.startswith(f"{folder}/")]
    return found


def test_a_volume_larger_than_the_disk_is_refused(template):
    with template.open("rb+") as file:
        free = os.statvfs(template.parent)
        file.truncate(2 * free.f_blocks * free.f_frsize)
    with pytest.raises(OSError, match="reserving disk"):
        volumes.mounted(template, 0)


def test_default_size_is_a_part_of_the_free_space(tmp_path):
    free = os.statvfs(tmp_path)
    size = volumes.usual_bytes(tmp_path)
    assert volumes.LEAST_BYTES <= size <= volumes.LARGEST_BYTES
    assert size <= max(volumes.LEAST_BYTES, free.f_bavail * free.f_frsize // 15)
