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
    time.sleep(0.15)  # so long a file must have been left alone to be believed


def back(folder, kept, into):
    into.mkdir()
    about = restore(folder.slab, kept.layout.as_json(), into)
    return about, {path.name: path.read_bytes() for path in into.iterdir()}


def test_what_did_not_change_is_not_copied_again(folder, tmp_path):
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


def test_what_was_copied_ahead_need_not_be_copied_while_it_stands_still(folder):
    (folder.path / "large").write_bytes(b"l" * 100_000)
    settled()
    folder.ahead()
    assert folder.copy({}).moved_bytes == 0


def test_a_file_that_was_just_written_is_not_believed_to_be_the_same(folder):
    """Two writes within one tick of the clock look alike."""
    (folder.path / "young").write_bytes(b"a" * 10)
    assert folder.copy({}).moved_bytes == 10
    assert folder.copy({}).moved_bytes == 10


def test_a_file_that_somebody_has_mapped_is_copied_each_time(folder):
    (folder.path / "mapped").write_bytes(b"m" * 10)
    settled()
    folder.copy({})
    assert folder.copy({}, {"mapped"}).moved_bytes == 10


def test_what_has_gone_gives_its_place_back(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(working_folder, "WASTE_BYTES", 0)
    (folder.path / "stays").write_bytes(b"s" * 5000)
    for n in range(100):  # each of 100 kB, and only 1 MiB in all
        (folder.path / f"{n}").write_bytes(b"%d" % n * 50_000)
        folder.copy({})
        (folder.path / f"{n}").unlink()
    kept = folder.copy({})
    assert kept.layout.end < 20_000
    assert back(folder, kept, tmp_path / "there")[1] == {"stays": b"s" * 5000}


def test_a_folder_that_fills_the_memory_for_images_to_the_brim_is_kept(folder, tmp_path):
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
