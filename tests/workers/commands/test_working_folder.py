"""A command's working folder in a slab: what is copied again, and when it begins anew."""

from __future__ import annotations

import json
import os
import time

import pytest

from workers.commands import working_folder
from workers.commands.working_folder import BadFolder, FolderTooLarge, WorkingFolder, restore
from workers.process import slab
from workers.process.image_layout import Extent, Layout
from workers.process.slab import Slab


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "work"
    path.mkdir()
    return WorkingFolder(path, Slab(slab.made(2**20)))


def settled():
    time.sleep(0.15)  # a file changed more recently than this counts as changed


def back(folder, kept, into):
    into.mkdir()
    about = restore(folder.slab, kept.layout.as_json(), into)
    return about, {path.name: path.read_bytes() for path in into.iterdir()}


def test_unchanged_file_is_not_copied_again(folder, tmp_path):
    (folder.path / "large").write_bytes(b"l" * 100_000)
    (folder.path / "small").write_bytes(b"s" * 100)
    settled()
    assert folder.copy({}).moved_bytes == 100_100
    (folder.path / "small").write_bytes(b"t" * 200)
    kept = folder.copy({"restarts": 3})
    assert kept.moved_bytes == 200
    about, files = back(folder, kept, tmp_path / "there")
    assert about["restarts"] == 3
    assert files == {"large": b"l" * 100_000, "small": b"t" * 200}


def test_file_copied_ahead_is_not_copied_during_the_pause(folder):
    (folder.path / "large").write_bytes(b"l" * 100_000)
    settled()
    folder.ahead()
    assert folder.copy({}).moved_bytes == 0


def test_file_just_written_is_copied_even_if_it_looks_unchanged(folder, monkeypatch):
    """Two writes within one tick of the clock look alike."""
    monkeypatch.setattr(working_folder, "SETTLED_NS", 60 * 10**9)
    (folder.path / "young").write_bytes(b"a" * 10)
    assert folder.copy({}).moved_bytes == 10
    assert folder.copy({}).moved_bytes == 10


def test_memory_mapped_file_is_copied_each_time(folder):
    (folder.path / "mapped").write_bytes(b"m" * 10)
    settled()
    folder.copy({})
    assert folder.copy({}, {"mapped"}).moved_bytes == 10


def test_deleted_file_gives_its_space_back(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(working_folder, "WASTE_BYTES", 0)
    (folder.path / "stays").write_bytes(b"s" * 5000)
    for n in range(100):  # each of 100 kB, and only 1 MiB in all
        (folder.path / f"{n}").write_bytes(b"%d" % n * 50_000)
        folder.copy({})
        (folder.path / f"{n}").unlink()
    kept = folder.copy({})
    assert kept.layout.end < 20_000
    assert back(folder, kept, tmp_path / "there")[1] == {"stays": b"s" * 5000}


def test_folder_that_just_fits_the_memory_for_images_is_kept(folder, tmp_path):
    body = os.urandom(2**20 - 8192)
    (folder.path / "all").write_bytes(body)
    kept = folder.copy({})
    assert back(folder, kept, tmp_path / "there")[1] == {"all": body}
    (folder.path / "all").write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(FolderTooLarge, match="has 1048577 bytes in 1 files; at most 1048576 bytes"):
        folder.copy({})


@pytest.mark.parametrize(
    "entries",
    [
        [["../out", 0o600, 0, 0, None]],
        [["/tmp/out", 0o600, 0, 0, None]],
        [["link", 0o777, 0, None, "/tmp"], ["link/out", 0o600, 0, 0, None]],
        [[".roundhouse", 0o700, 0, None, None]],
        [["a/../../out", 0o600, 0, 0, None]],
    ],
)
def test_nothing_is_written_outside_the_folder(folder, tmp_path, entries):
    graph = json.dumps({"format": working_folder.FORMAT, "entries": entries}).encode()
    folder.slab.view(4096, len(graph))[:] = graph
    layout = Layout(
        graph=Extent(offset=4096, size=len(graph)), storages=(Extent(offset=0, size=1),)
    )
    (tmp_path / "there").mkdir()
    with pytest.raises(BadFolder, match="is outside"):
        restore(folder.slab, layout.as_json(), tmp_path / "there")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def beside(tmp_path):
    """A working folder with another folder beside it, which has a file, a link and a folder."""
    path, other = tmp_path / "work", tmp_path / "other"
    for made in (path, other, other / "deep"):
        made.mkdir()
    (path / "inside").write_bytes(b"i")
    (other / "deep" / "file").write_bytes(b"o" * 50)
    (other / "link").symlink_to("deep/file")
    return WorkingFolder(path, Slab(slab.made(2**20)), {".roundhouse/other": other})


def test_folder_beside_is_in_the_image_and_comes_back_where_both_are_asked_for(beside, tmp_path):
    kept = beside.copy({}, with_beside=True)
    into, there = tmp_path / "into", tmp_path / "there"
    for made in (into, there):
        made.mkdir()
    restore(beside.slab, kept.layout.as_json(), into, {".roundhouse/other": there})
    assert [path.name for path in into.iterdir()] == ["inside"]
    assert (there / "deep" / "file").read_bytes() == b"o" * 50
    assert (there / "link").readlink().as_posix() == "deep/file"


def test_folder_beside_is_left_out_where_it_is_not_asked_for(beside, tmp_path):
    _, files = back(beside, beside.copy({}, with_beside=True), tmp_path / "a")
    assert [*files] == ["inside"]
    into, there = tmp_path / "b", tmp_path / "there"
    there.mkdir()
    into.mkdir()
    kept = beside.copy({})
    restore(beside.slab, kept.layout.as_json(), into, {".roundhouse/other": there})
    assert not list(there.iterdir())


def test_file_beside_is_copied_each_time_as_a_mapping_of_it_changes_no_time(beside):
    settled()
    assert beside.copy({}, with_beside=True).moved_bytes == 51
    assert beside.copy({}, with_beside=True).moved_bytes == 50


@pytest.mark.parametrize("name", [".roundhouse/other/../x", ".roundhouse/else/x", ".roundhouse/x"])
def test_image_cannot_write_outside_the_folders_beside(beside, tmp_path, name):
    body = {"format": working_folder.FORMAT, "entries": [[name, 0o600, 0, None, "target"]]}
    graph = json.dumps(body).encode()
    beside.slab.view(0, len(graph))[:] = graph
    layout = Layout(graph=Extent(offset=0, size=len(graph)), storages=())
    (tmp_path / "there").mkdir()
    others = {".roundhouse/other": tmp_path / "there"}
    with pytest.raises(BadFolder, match="outside the working folder"):
        restore(beside.slab, layout.as_json(), tmp_path, others)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_what_the_sandbox_shows_beside_is_left_out(beside, tmp_path):
    (other,) = beside.beside.values()
    (other / "way").mkdir()
    (other / "way" / "shown").write_bytes(b"of the host")
    os.chown(other / "way", 1234, 1234)
    kept = beside.copy({}, with_beside=True)
    into, there = tmp_path / "into", tmp_path / "there"
    for made in (into, there):
        made.mkdir()
    restore(beside.slab, kept.layout.as_json(), into, {".roundhouse/other": there})
    assert sorted(path.name for path in there.iterdir()) == ["deep", "link"]
