"""Bundles are not believed: what must not be unpacked leaves no trace."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile

import pytest

from workers.transfer import code_unpack
from workers.transfer.code_unpack import BadBundle, unpacked


def zipped(path, names, *, mode=0o100644, text="x"):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            archive.writestr(entry, text)
    return path


def tarred(path, *entries):
    with tarfile.open(path, "w") as archive:
        for name, kind in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            entry.size = 1 if kind == tarfile.REGTYPE else 0
            archive.addfile(entry, io.BytesIO(b"x") if entry.size else None)
    return path


def test_a_zip_and_a_tar_become_the_same_read_only_folder(tmp_path):
    a = unpacked(zipped(tmp_path / "a.zip", ["m.py", "p/q.py"]), tmp_path / "a")
    b = unpacked(
        tarred(tmp_path / "b.tar", ("p", tarfile.DIRTYPE), ("m.py", b"0"), ("p/q.py", b"0")),
        tmp_path / "b",
    )
    for folder in (a, b):
        assert (folder / "p" / "q.py").read_text() == "x"
        assert os.stat(folder / "m.py").st_mode & 0o777 == 0o444


def test_executable_files_and_empty_folders_stay_what_they_are(tmp_path):
    a = unpacked(zipped(tmp_path / "a.zip", ["tool.sh"], mode=0o100755), tmp_path / "a")
    assert os.stat(a / "tool.sh").st_mode & 0o777 == 0o555
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as archive:
        archive.writestr("data.txt", "x")  # of a system without modes
        archive.writestr("out/deep/", "")
        archive.writestr("out/", "")
    b = unpacked(tmp_path / "b.zip", tmp_path / "b")
    assert os.stat(b / "data.txt").st_mode & 0o111 == 0
    assert [path.name for path in (b / "out").iterdir()] == ["deep"]
    with tarfile.open(tmp_path / "c.tar", "w") as archive:
        for name, kind, mode in (("t", tarfile.REGTYPE, 0o744), ("out", tarfile.DIRTYPE, 0o700)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = kind, mode
            archive.addfile(entry, io.BytesIO())
    c = unpacked(tmp_path / "c.tar", tmp_path / "c")
    assert os.stat(c / "t").st_mode & 0o777 == 0o555
    assert os.stat(c / "out").st_mode & 0o777 == 0o755


def test_folder_with_the_name_of_a_file_is_refused(tmp_path):
    with pytest.raises(BadBundle, match="two entries"):
        unpacked(zipped(tmp_path / "a.zip", ["a", "A/"]), tmp_path / "out" / "a")


@pytest.mark.parametrize(
    "names",
    [["../up"], ["/abs"], ["a/../../up"], ["a\\b"], ["a.py", "A.py"], ["d/" * 20 + "deep"]],
)
def test_names_that_leave_the_folder_or_collide_are_refused(tmp_path, names):
    with pytest.raises(BadBundle):
        unpacked(zipped(tmp_path / "a.zip", names), tmp_path / "out" / "a")
    assert list((tmp_path / "out").iterdir()) == []


def test_links_and_devices_are_refused(tmp_path):
    for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE)):
        with pytest.raises(BadBundle, match="only plain files"):
            unpacked(tarred(tmp_path / f"{number}.tar", ("a", kind)), tmp_path / "out" / "a")
    with pytest.raises(BadBundle, match="only plain files"):
        unpacked(zipped(tmp_path / "a.zip", ["a"], mode=0o120777), tmp_path / "out" / "a")


def test_zip_bomb_is_stopped_by_its_unpacked_size(tmp_path, monkeypatch):
    monkeypatch.setattr(code_unpack, "TOTAL_LIMIT_BYTES", 10_000)
    with pytest.raises(BadBundle, match="more than 10000 bytes"):
        unpacked(zipped(tmp_path / "a.zip", ["a", "b"], text="x" * 6_000), tmp_path / "out" / "a")


def test_file_that_is_no_archive_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"hello" * 1000)
    with pytest.raises(BadBundle, match="neither"):
        unpacked(tmp_path / "a", tmp_path / "out" / "a")
