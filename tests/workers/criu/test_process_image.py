from __future__ import annotations

import dataclasses
import json
import os

import pytest

from tests.workers.criu import made_image as made
from workers.criu import process_image
from workers.criu.process_image import (
    BadProcessImage,
    HostTraits,
    ProcessFacts,
    pack,
    read_facts,
    unpack,
    why_not_here,
)

TRAITS = HostTraits(criu="4.2.1", kernel="6.18", machine="x86_64", processor="ab", python="/venv")
FACTS = ProcessFacts(pid=1001, uid=made.UID, pipes={"stdout": "pipe:[7]"}, traits=TRAITS)
PAGES = os.urandom(4096) * 3
RUNS = ((0x100000, 1), (0x900000, 2))


@pytest.fixture
def folder(tmp_path):
    """What CRIU leaves in its folder."""
    for name, data in made.image().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "pages-1.img").write_bytes(PAGES)
    (tmp_path / "pagemap-1001.img").write_bytes(made.pagemap(*RUNS))
    for beside in ("criu.log", "stats-dump", "cgroup.img"):
        (tmp_path / beside).write_bytes(b"not of the image")
    return tmp_path


class Kept:
    """The parts of an image as a store gives them back: in another order, and in pieces."""

    def __init__(self, *parts):
        self.parts = [bytes(part) for part in parts]
        self.sizes = [len(part) for part in parts]

    def read(self, part):
        return self.parts[part]

    def read_into(self, write):
        for number, part in reversed([*enumerate(self.parts)]):
            for at in reversed(range(0, len(part), 1000)):
                write(number, at, memoryview(part)[at : at + 1000])


def test_image_is_unpacked_as_it_was_packed(folder, tmp_path_factory):
    (folder / "memfd.img").write_bytes(b"")
    (folder / "pages-2.img").write_bytes(b"")  # of a process that has no pages of its own
    (folder / "pagemap-1002.img").write_bytes(made.pagemap(pages=2))
    kept = Kept(*pack(folder, FACTS).parts)
    there = tmp_path_factory.mktemp("there")
    assert read_facts(kept) == FACTS
    unpack(kept, there)
    found = {path.name: path.read_bytes() for path in there.iterdir()}
    beside = {"criu.log", "stats-dump", "cgroup.img"}
    assert found == {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name not in beside
    }


def test_pages_are_parts_by_their_addresses(folder):
    sizes = [len(part) for part in pack(folder, FACTS).parts]
    assert [size for size in sizes if size in (4096, 8192)] == [4096, 8192]


def test_packed_image_stays_when_its_folder_has_gone(folder):
    packed = pack(folder, FACTS)
    for path in folder.iterdir():
        path.unlink()
    assert PAGES in b"".join(packed.parts)


def test_map_that_does_not_fit_its_pages_is_refused(folder):
    (folder / "pages-1.img").write_bytes(PAGES[:-1])
    with pytest.raises(BadProcessImage, match="tells of 12288 bytes of pages"):
        pack(folder, FACTS)


@pytest.mark.parametrize("graph", [b"", b"{}", b"[]", b'{"format": "other"}', b"\xff"])
def test_other_bytes_are_no_image(folder, graph):
    with pytest.raises(BadProcessImage):
        read_facts(Kept(graph, *pack(folder, FACTS).parts[1:]))


@pytest.mark.parametrize("name", ["", ".", "..", "../pages-1.img", "/etc/passwd"])
def test_file_outside_the_folder_is_refused(folder, tmp_path_factory, name):
    head, *parts = pack(folder, FACTS).parts
    told = json.loads(bytes(head))
    told["files"][0][0] = name
    there = tmp_path_factory.mktemp("there")
    with pytest.raises((BadProcessImage, IsADirectoryError, FileExistsError)):
        unpack(Kept(json.dumps(told).encode(), *parts), there)
    assert [*there.iterdir()] == []


def test_parts_that_are_not_those_of_the_files_are_refused(folder, tmp_path_factory):
    head, _, *fewer = pack(folder, FACTS).parts
    with pytest.raises(BadProcessImage, match="not those of its files"):
        unpack(Kept(head, *fewer), tmp_path_factory.mktemp("there"))


@pytest.mark.parametrize("name", ["criu", "kernel", "machine", "processor", "python"])
def test_each_trait_of_the_host_counts(name):
    assert why_not_here(TRAITS, TRAITS) == ""
    other = dataclasses.replace(TRAITS, **{name: "else"})
    assert why_not_here(other, TRAITS) == f"this host has another {name}"


def test_processor_is_known_by_its_features():
    first = "processor : 0\nflags\t\t: fpu sse avx\n\nprocessor : 1\nflags : fpu sse avx\n"
    same, other = first.replace("fpu sse", "sse fpu"), first.replace("avx", "avx512f")
    features = process_image._features
    assert features(first) == features(same) != features(other)


def test_image_whose_list_of_files_could_not_be_read_again_is_not_packed(folder, monkeypatch):
    monkeypatch.setattr(process_image, "_HEAD_BYTES", 100)
    with pytest.raises(BadProcessImage, match="lies in too many pieces, in "):
        pack(folder, FACTS)
