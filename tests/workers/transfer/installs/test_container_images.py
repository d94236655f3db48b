"""Container images on a host: what is unpacked of a layout and a root file system, what is refused,
and that each is unpacked once.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import is_living
from tests.workers.image_files import (
    entry,
    oci_layout,
    tar_of,
    tar_of_folder,
)
from workers.process.isolation.host_mounts import HostMount
from workers.transfer.installs import image_source, image_unpacker
from workers.transfer.installs.container_images import ROOT, ContainerImages, NotUnpacked
from workers.transfer.installs.image_source import BadContainerImage
from workers.transfer.installs.kept_trees import make_read_only

MIB = 2**20


def unpacked(source: Path, made: Path, limit_bytes: int = 8 * MIB) -> Path:
    """Unpack an image in this process, and return its root."""
    fd = os.open(source, os.O_PATH)
    try:
        with image_source.opened(fd) as found:
            digest = found.digest
    finally:
        os.close(fd)
    order = {"digest": digest, "limit_bytes": limit_bytes}
    said = image_unpacker.unpack(source, made, order)
    (made / "said.json").write_text(json.dumps(said))
    return made / "root"


@pytest.fixture
def image(tmp_path: Path) -> Any:
    """Unpack an OCI layout of these layers; returns its root."""

    def layers(*members: list[Any], **more: Any) -> Path:
        layout = oci_layout(tmp_path / "layout", *(tar_of(*each) for each in members))
        return unpacked(layout, tmp_path / "made", **more)

    return layers


def listed(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


# --- what is unpacked -----------------------------------------------------------------------------


def test_layers_are_laid_over_each_other_and_whiteouts_hide_what_is_below(image: Any) -> None:
    root = image(
        [entry("a/x", b"1"), entry("a/y", b"2"), entry("b/z", b"3"), entry("c", b"4")],
        [
            entry("a/.wh.x"),
            entry("b/new", b"5"),
            entry("b/.wh..wh..opq"),
            entry("c", b"6"),
            entry("d", b"7"),
            entry(".wh.d"),  # hides only what is below this layer
        ],
    )
    assert listed(root) == ["a", "a/y", "b", "b/new", "c", "d", "etc", "etc/hosts"]
    assert ((root / "c").read_bytes(), (root / "d").read_bytes()) == (b"6", b"7")
    assert "localhost" in (root / "etc" / "hosts").read_text()


def test_links_stay_what_they_are_and_hard_links_share_a_file(image: Any) -> None:
    root = image(
        [
            entry("usr/lib/a.so", b"1"),
            entry("lib", kind=tarfile.SYMTYPE, to="usr/lib"),
            entry("lib/b.so", b"2"),  # a layer may write through a link of its own image
            entry("hard", kind=tarfile.LNKTYPE, to="usr/lib/a.so"),
            entry("away", kind=tarfile.SYMTYPE, to="/etc/passwd"),
        ]
    )
    assert (root / "usr/lib/b.so").read_bytes() == b"2"
    assert (root / "hard").stat().st_ino == (root / "usr/lib/a.so").stat().st_ino
    assert os.readlink(root / "away") == "/etc/passwd"


def test_tar_of_a_layout_is_the_same_image_as_its_folder(tmp_path: Path) -> None:
    layout = oci_layout(tmp_path / "layout", tar_of(entry("a", b"1")), variables={"LANG": "C"})
    file = tmp_path / "layout.tar"
    file.write_bytes(tar_of_folder(layout))
    one, other = unpacked(layout, tmp_path / "one"), unpacked(file, tmp_path / "other")
    assert listed(one) == listed(other)
    said = json.loads((other.parent / "said.json").read_text())
    assert said == {"variables": {"LANG": "C"}, "skipped": 0}


@pytest.mark.parametrize("form", ["folder", "tar", "tar.gz"])
def test_root_file_system_is_copied_without_devices_and_ids(tmp_path: Path, form: str) -> None:
    source = tmp_path / "root"
    (source / "bin").mkdir(parents=True)
    (source / "bin" / "su").write_text("x")
    (source / "bin" / "su").chmod(0o6755)
    os.link(source / "bin" / "su", source / "bin" / "sudo")
    (source / "link").symlink_to("/bin/su")
    os.mkfifo(source / "pipe")
    if form != "folder":
        file = tmp_path / form
        with tarfile.open(file, "w:gz" if form == "tar.gz" else "w") as tar:
            tar.add(source, arcname=".")
        source = file
    root = unpacked(source, tmp_path / "made")
    assert listed(root) == ["bin", "bin/su", "bin/sudo", "etc", "etc/hosts", "link"]
    assert stat.S_IMODE((root / "bin" / "su").stat().st_mode) == 0o755
    assert (root / "bin" / "su").stat().st_ino == (root / "bin" / "sudo").stat().st_ino
    assert json.loads((root.parent / "said.json").read_text())["skipped"] == 1


def test_digest_changes_with_the_registered_tree(tmp_path: Path) -> None:
    def digest() -> str:
        fd = os.open(tmp_path, os.O_PATH)
        with image_source.opened(fd) as found:
            os.close(fd)
            return found.digest

    (tmp_path / "a").write_text("1")
    before = digest()
    assert digest() == before
    (tmp_path / "a").write_text("2")
    os.utime(tmp_path / "a", ns=(1, 1))
    (tmp_path / "b").write_text("")
    assert digest() != before


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ([entry("../out", b"x")], "leaves the root"),
        ([entry("a/../../out", b"x")], "leaves the root"),
        ([entry("a/.wh...", b"")], "hides no name"),
        ([entry("a", kind=tarfile.LNKTYPE, to="../../etc/passwd")], "leaves the root"),
        ([entry("a", kind=tarfile.LNKTYPE, to="/etc/passwd")], "cannot be made"),
        ([entry("a", b"1"), entry("a/b", b"2")], "lies in no folder"),
        ([entry("/".join("a" * 300), b"")], "too long"),
        ([entry(".", b"x")], "in place of its root"),
        (
            [entry("l", kind=tarfile.SYMTYPE, to="l"), entry("l/x", b"")],
            "lies in no folder",
        ),
    ],
)
def test_layer_that_leaves_its_root_is_refused(image: Any, members: Any, told: str) -> None:
    with pytest.raises(BadContainerImage, match=told):
        image(members)


def test_file_behind_a_link_out_of_the_root_is_written_inside_it(
    image: Any, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root = image(
        [
            entry("abs", kind=tarfile.SYMTYPE, to=str(outside)),
            entry("up", kind=tarfile.SYMTYPE, to="../../../../.."),
            entry("abs/one", b"1"),
            entry("up/two", b"2"),
            entry("up/.wh.two"),
        ],
        [entry("up/.wh.etc"), entry("abs/.wh.one"), entry("up/.wh..wh..opq")],
    )
    assert list(outside.iterdir()) == []
    assert Path("/etc").is_dir()
    assert (root / "two").exists() is False  # the second layer hid all of the root


def test_device_nodes_are_left_out(image: Any, tmp_path: Path) -> None:
    device = entry("dev/sda", kind=tarfile.BLKTYPE)
    device[0].devmajor, device[0].devminor = 8, 0
    root = image(
        [device, entry("dev/null", kind=tarfile.CHRTYPE), entry("p", kind=tarfile.FIFOTYPE)]
    )
    assert listed(root) == ["dev", "etc", "etc/hosts"]
    assert json.loads((root.parent / "said.json").read_text())["skipped"] == 3


@pytest.mark.parametrize(
    "members",
    [
        [entry("zeros", bytes(9 * MIB))],
        [entry(f"{n}", b"") for n in range(2100)],
        [entry("a/.wh.b", bytes(9 * MIB))],
        [entry("what", bytes(9 * MIB), kind=b"Z")],
        [*(entry(f"a/{n}") for n in range(600)), *5 * [entry("a/.wh..wh..opq")]],
    ],
    ids=["bytes", "entries", "whiteout", "unknown", "listed"],
)
def test_layer_that_grows_beyond_the_limit_is_refused(image: Any, members: Any) -> None:
    with pytest.raises(BadContainerImage, match="larger than this host allows"):
        image(members)


def test_folder_that_no_path_of_the_host_could_name_is_refused(image: Any) -> None:
    name = "n" * 200
    deep = "/".join([name] * 10)
    members = [entry(f"{deep}/end")]
    for n in range(3):  # each link leads 2000 bytes deeper
        above = f"l{n - 1}/" if n else ""
        members += [
            entry(f"{above}{deep}/x"),
            entry(f"l{n}", kind=tarfile.SYMTYPE, to=f"{above}{deep}"),
        ]
    with pytest.raises(BadContainerImage, match="more than 3000 bytes"):
        image(members)


def test_layer_whose_digest_differs_is_refused(tmp_path: Path) -> None:
    layout = oci_layout(tmp_path / "layout", tar_of(entry("a", b"1")), tar_of(entry("b", b"2")))
    for blob in (layout / "blobs" / "sha256").iterdir():
        if tarfile.is_tarfile(blob):
            with tarfile.open(blob) as tar:
                is_second = "b" in tar.getnames()
            if is_second:
                blob.write_bytes(tar_of(entry("b", b"3")))
    with pytest.raises(BadContainerImage, match="has another digest"):
        unpacked(layout, tmp_path / "made")


def test_manifest_whose_digest_differs_is_refused(tmp_path: Path) -> None:
    layout = oci_layout(tmp_path / "layout", tar_of(entry("a", b"1")))
    index = json.loads((layout / "index.json").read_text())
    name = index["manifests"][0]["digest"].removeprefix("sha256:")
    path = layout / "blobs" / "sha256" / name
    path.write_text(path.read_text().replace('"layers"', '"Layers"'))
    with pytest.raises(BadContainerImage, match="has another digest"):
        unpacked(layout, tmp_path / "made")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layers": None}, "lists no layers"),
        ({"layers": [{"digest": "sha256:../../x", "size": 1}]}, "without a SHA-256"),
        ({"layers": [{"digest": "md5:0", "size": 1}]}, "without a SHA-256"),
        ({"config": {"digest": f"sha256:{'0' * 64}", "size": 2}}, "is missing"),
        (
            {"layers": [{"digest": f"sha256:{'0' * 64}", "size": 2, "mediaType": "x+zstd"}]},
            "this host unpacks tar and gzip",
        ),
    ],
)
def test_manifest_of_another_form_is_refused(tmp_path: Path, change: Any, told: str) -> None:
    layout = oci_layout(tmp_path / "layout", tar_of(entry("a", b"1")), **change)
    with pytest.raises(BadContainerImage, match=told):
        unpacked(layout, tmp_path / "made")


def test_index_without_a_manifest_for_this_machine_is_refused(tmp_path: Path) -> None:
    layout = oci_layout(tmp_path / "layout", tar_of(entry("a", b"1")))
    index = json.loads((layout / "index.json").read_text())
    index["manifests"][0]["platform"] = {"os": "linux", "architecture": "s390x"}
    (layout / "index.json").write_text(json.dumps(index))
    with pytest.raises(BadContainerImage, match="0 of its 1 manifests are for linux/"):
        unpacked(layout, tmp_path / "made")
    (layout / "index.json").unlink()
    (layout / "index.json").symlink_to("/etc/passwd")
    with pytest.raises(BadContainerImage):
        unpacked(layout, tmp_path / "again")


def test_truncated_layer_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "root.tar"
    source.write_bytes(tar_of(entry("a", b"1" * 5000))[:2000])
    with pytest.raises(BadContainerImage):
        unpacked(source, tmp_path / "made")


def header(kind: bytes = tarfile.REGTYPE, size: int = 0) -> bytes:
    member = tarfile.TarInfo("x")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def pax(size: int) -> bytes:
    """Return an extended header that gives the next file this size, and that file."""
    line = f" size={size}\n"
    line = f"{len(line) + 2}{line}"
    return header(tarfile.XHDTYPE, len(line)) + line.encode().ljust(512, b"\0") + header()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (header(size=-512), "negative size"),
        (pax(-1024), "negative size"),
        (header(tarfile.GNUTYPE_LONGNAME, 2**40), "more than 1048576 bytes"),
        (header(tarfile.XHDTYPE, 2**40), "more than 1048576 bytes"),
    ],
)
def test_tar_file_with_a_header_of_such_size_is_refused(
    tmp_path: Path, body: bytes, told: str
) -> None:
    source = tmp_path / "root.tar"
    source.write_bytes(tar_of(entry("a", b"1"))[:1024] + body + bytes(2**20))
    with pytest.raises(BadContainerImage, match=told):
        unpacked(source, tmp_path / "made")


def test_neither_a_deep_tree_nor_a_pipe_holds_up_the_reader(tmp_path: Path) -> None:
    (tmp_path / "deep").joinpath(*("d" * 300)).mkdir(parents=True)
    with pytest.raises(BadContainerImage, match="more than 256 folders in each other"):
        image_unpacker.digest_of(tmp_path / "deep")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadContainerImage, match="neither a folder nor a file"):
        image_unpacker.digest_of(tmp_path / "pipe")


def test_only_the_first_members_of_a_tar_file_are_looked_at_for_a_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "root.tar"
    source.write_bytes(
        tar_of(*(entry(f"{n}", kind=tarfile.DIRTYPE) for n in range(9))) + header(size=-512)
    )
    seen = list[str]()

    class Noted(image_source.BoundedHeader):
        @classmethod
        def fromtarfile(cls, tarfile: tarfile.TarFile) -> Noted:
            found = super().fromtarfile(tarfile)
            seen.append(found.name)
            return found

    monkeypatch.setattr(image_source, "BoundedHeader", Noted)
    monkeypatch.setattr(image_source, "_LOOKED_AT", 3)
    image_unpacker.digest_of(source)
    assert len(seen) <= 4


def test_root_file_system_that_changes_while_it_is_copied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "root"
    source.mkdir()
    (source / "a").write_text("1")
    copy = image_unpacker._copy_folder

    def and_change(*about: Any) -> None:
        copy(*about)
        (source / "b").write_text("2")

    monkeypatch.setattr(image_unpacker, "_copy_folder", and_change)
    with pytest.raises(BadContainerImage, match="changed while it was unpacked"):
        unpacked(source, tmp_path / "made")


# --- on a host ------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path: Path) -> ContainerImages:
    return ContainerImages(folder=tmp_path / "images", limit_bytes=8 * MIB)


@pytest.fixture
def place(tmp_path: Path) -> HostMount:
    oci_layout(
        tmp_path / "host" / "small", tar_of(entry("a", b"1")), variables={"A": "b", "no name": "x"}
    )
    return HostMount(str(tmp_path / "host"), "small", may_be_file=True)


def test_devices_that_ask_at_once_unpack_once_and_share(
    kept: ContainerImages, place: HostMount
) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda _: kept.opened("small", place), range(4))]
    assert [one.is_new for one in found].count(True) == 1
    assert len({one.root for one in found}) == 1
    [first, *_] = found
    assert (first.root / "a").read_bytes() == b"1"
    assert stat.S_IMODE((first.root / "a").stat().st_mode) == 0o444
    assert stat.S_IMODE(first.root.stat().st_mode) == 0o555
    assert first.variables == {"A": "b"}
    [(name, shown)] = kept.shown().items()
    assert (name, shown["digest"]) == ("small", first.digest)
    assert shown["took_us"] == first.took_us > 0
    assert [*kept.work.iterdir()] == []
    for one in found:
        os.close(one.fd)


def test_file_of_several_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_bytes(os.urandom(MIB))
    for n in range(4):
        os.link(tmp_path / "tree" / "a", tmp_path / "tree" / f"{n}")
    assert MIB <= make_read_only(tmp_path / "tree") < 2 * MIB


def test_unpacker_ends_with_the_device_worker_that_started_it(tmp_path: Path) -> None:
    zeros = tarfile.TarInfo("zeros")
    zeros.size = 2**36
    with open(tmp_path / "root.tar", "wb") as file:
        file.write(zeros.tobuf(tarfile.GNU_FORMAT))
        file.truncate(zeros.size + MIB)
    making = tmp_path / "making"
    making.mkdir()
    tree = making / "tree" / "root"
    order = {
        "root": str(tmp_path), "below": "root.tar", "making": str(making), "limit_bytes": 2**40,
        "limit_s": 77, "groups": [], "digest": image_unpacker.digest_of(tmp_path / "root.tar"),
    }  # fmt: skip
    boot = "from workers.transfer.installs.image_unpacker import main; main()"
    outer = psutil.Popen([sys.executable, "-B", "-c", boot, json.dumps(order)], cwd=ROOT)
    try:
        while not tree.exists():
            assert outer.poll() is None
            time.sleep(0.001)
        inner = [*outer.children(), outer][0]
        inner.suspend()
        assert inner.rlimit(psutil.RLIMIT_CPU) == (77, 77)
    finally:
        outer.kill()
        outer.wait()
    until_s = time.monotonic() + 60
    while is_living(inner):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_image_whose_variables_no_message_could_carry_is_refused(
    kept: ContainerImages, tmp_path: Path
) -> None:
    many = {f"V{n}": "x" * 2**14 for n in range(5)}
    oci_layout(tmp_path / "host" / "many", tar_of(entry("a", b"1")), variables=many)
    with pytest.raises(NotUnpacked, match="5 variables of 81930 bytes"):
        kept.opened("many", HostMount(str(tmp_path / "host"), "many", may_be_file=True))


def test_image_in_use_stays_and_another_makes_room(
    kept: ContainerImages, place: HostMount, tmp_path: Path
) -> None:
    used = kept.opened("small", place)
    for name in ("big", "other"):
        oci_layout(tmp_path / "host" / name, tar_of(entry(name, b"x" * (5 * MIB))))
        os.close(kept.opened(name, HostMount(place.root, name, may_be_file=True)).fd)
    assert (used.root / "a").exists()
    assert {*kept.shown()} == {"small", "other"}
    os.close(used.fd)


def test_digest_of_a_file_is_read_once_and_in_the_sandbox(
    kept: ContainerImages, place: HostMount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "host" / "small.tar"
    file.write_bytes(tar_of_folder(tmp_path / "host" / "small"))
    tar = HostMount(place.root, "small.tar", may_be_file=True)

    def unread(*_: Any, **__: Any) -> Any:
        raise AssertionError("the device worker itself reads a tar file")

    monkeypatch.setattr(tarfile, "open", unread)
    first, folder = kept.opened("tar", tar), kept.opened("small", place)
    assert first.digest == folder.digest
    monkeypatch.setattr(ContainerImages, "_run", unread)
    again = kept.opened("tar", tar)
    assert again.digest == first.digest
    for one in (first, folder, again):
        os.close(one.fd)


def test_hostile_image_is_refused_by_the_unpacker_in_its_sandbox(
    kept: ContainerImages, tmp_path: Path
) -> None:
    oci_layout(tmp_path / "host" / "bad", tar_of(entry("../../x", b"1")))
    with pytest.raises(NotUnpacked, match="leaves the root"):
        kept.opened("bad", HostMount(str(tmp_path / "host"), "bad", may_be_file=True))
    with pytest.raises(NotUnpacked, match="cannot be opened"):
        kept.opened("none", HostMount(str(tmp_path / "host"), "none", may_be_file=True))
    assert not kept.shown()
