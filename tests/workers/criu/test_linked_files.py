"""Open files that lost their first name get the name that they have."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tests.workers.criu.made_image import NO_OWNER, file
from workers.criu import linked_files
from workers.criu.image_check import FILES
from workers.criu.image_records import ImageFile
from workers.criu.linked_files import LIST, REMAP_MAGIC, REMAPS, NoName

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may read map_files")
ROOT = Path("/")


@pytest.fixture
def linked(tmp_path, monkeypatch):
    """A folder with a file that this process has open by a removed name, and its image."""
    folder, images = tmp_path / "folder", tmp_path / "images"
    images.mkdir()
    (folder / "inside").mkdir(parents=True)
    monkeypatch.setattr(linked_files, "_FOLDERS", (str(folder).lstrip("/"),))
    first, now = folder / "first", folder / "inside" / "now"
    first.write_bytes(b"x" * 4096)
    now.hardlink_to(first)
    (folder / "another").write_bytes(b"")
    paths = (first, folder / "link_remap.1", folder / "another")
    entries = [
        {1: 1, 2: number, 3: {1: number, 2: 0, 3: 0, 5: NO_OWNER, 6: str(path)}}
        for number, path in enumerate(paths, 1)
    ]
    (images / LIST).write_bytes(file(FILES, *entries))
    (images / REMAPS).write_bytes(file(REMAP_MAGIC, {1: 1, 2: 2, 3: 0}, {1: 9, 2: 9, 3: 1}))
    return images, first, now


def paths_in(images):
    records = ImageFile.read((images / LIST).read_bytes(), FILES).records
    return [record.message(3).text(6).decode() for record in records]


@pytest.mark.parametrize("is_mapped", [True, False])
def test_open_file_gets_the_name_that_it_has(linked, is_mapped):
    images, first, now = linked
    with first.open("r+b") as opened:
        held = mmap.mmap(opened.fileno(), 4096) if is_mapped else os.fdopen(os.dup(opened.fileno()))
    first.unlink()
    with held:
        linked_files.name(images, ROOT, [os.getpid()])
    assert paths_in(images) == [str(now), str(first.with_name("another"))]
    (other,) = ImageFile.read((images / REMAPS).read_bytes(), REMAP_MAGIC).records
    assert other.number(3) == 1


def test_open_file_without_another_name_in_the_image_is_refused(linked, tmp_path):
    images, first, now = linked
    with first.open("r+b"):
        first.unlink()
        now.rename(tmp_path / "outside")
        with pytest.raises(NoName, match="its other name is in no folder of the image"):
            linked_files.name(images, ROOT, [os.getpid()])
    with pytest.raises(NoName, match="0 open files had that name"):
        linked_files.name(images, ROOT, [os.getpid()])


def test_image_without_such_files_stays_as_it_is(linked):
    images, _, _ = linked
    (images / REMAPS).write_bytes(file(REMAP_MAGIC, {1: 9, 2: 9, 3: 1}))
    before = {path.name: path.read_bytes() for path in images.iterdir()}
    linked_files.name(images, ROOT, [os.getpid()])
    assert {path.name: path.read_bytes() for path in images.iterdir()} == before
