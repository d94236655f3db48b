"""The manifest of a folder: equal folders have equal bytes, and nothing leads out of one."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.model.provisions.folder import (
    EMPTY,
    MAX_DEPTH,
    MAX_FILES,
    MAX_NAME,
    MAX_PATH,
    BadFolderManifest,
    FolderFile,
    FolderManifest,
    decoded,
    encoded,
    folder_of,
    is_inside,
)
from tests.thoroughness import examples


def file(path: str, body: bytes = b"x", *, executable: bool = False) -> FolderFile:
    digest = hashlib.sha256(body).hexdigest()
    return FolderFile(path=path, size_bytes=len(body), sha256=digest, executable=executable)


def test_folder_knows_its_size_and_each_different_file_once() -> None:
    folder = folder_of([file("b/y", b"12"), file("a", b"12"), file("empty", b""), file("c", b"3")])
    assert [one.path for one in folder.files] == ["a", "b/y", "c", "empty"]
    assert folder.size_bytes == 5
    assert folder.contents() == {file("a", b"12").sha256: 2, file("c", b"3").sha256: 1}


_NAMES = st.text("ab.\u00e4- ", min_size=1, max_size=6)
_PATHS = st.lists(_NAMES, min_size=1, max_size=4).map("/".join)


@given(st.lists(st.tuples(_PATHS, st.binary(max_size=2), st.booleans()), max_size=8), st.randoms())
@settings(max_examples=examples(300))
def test_manifest_is_read_back_and_depends_on_no_order(rows: Any, chance: Any) -> None:
    files = [file(path, body, executable=run) for path, body, run in rows]
    try:
        folder = folder_of(files)
    except BadFolderManifest:
        return
    chance.shuffle(files)
    assert encoded(folder_of(files)) == encoded(folder)
    assert decoded(encoded(folder)) == folder


@given(st.text("a./\\\x00\n ", max_size=9))
@settings(max_examples=examples(300))
def test_path_inside_joined_to_a_folder_stays_there(path: str) -> None:
    if is_inside(path):
        assert not {"", ".", ".."} & {*path.split("/")}
        assert path.isprintable()


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/etc/passwd", "..", "../x", "a/../b", "a//b", "a/", "./a", "a/.", "a\0b"),
        *("a\nb", "x" * (MAX_NAME + 1), "\ud800", "/".join("a" * (MAX_DEPTH + 1)), "a/" * MAX_PATH),
    ],
)
def test_path_that_leaves_the_folder_or_is_not_plain_is_refused(path: str) -> None:
    with pytest.raises(BadFolderManifest, match="not a plain path"):
        folder_of([file(path)])
    with pytest.raises(BadFolderManifest):
        decoded(encoded(FolderManifest((file(path),))) if path != "\ud800" else b"{}")


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ([], f"from 1 to {MAX_FILES} files; got 0"),
        ([file("a"), file("a", b"y")], "the path 'a' is used twice"),
        ([file("a/b"), file("a")], "'a' is a file and a folder"),
        ([file("a/b/c"), file("a")], "'a' is a file and a folder"),
        ([FolderFile(path="a", size_bytes=-1, sha256="0" * 64)], "not well formed"),
        ([FolderFile(path="a", size_bytes=1, sha256="0" * 63)], "not well formed"),
        ([FolderFile(path="a", size_bytes=1, sha256="../" * 21 + "a")], "not well formed"),
        ([FolderFile(path="a", size_bytes=3, sha256=EMPTY)], "by its size or by its hash"),
        ([FolderFile(path="a", size_bytes=0, sha256="0" * 64)], "by its size or by its hash"),
        (
            [file("a"), FolderFile(path="b", size_bytes=2, sha256=file("a").sha256)],
            "the hash of a file of another size",
        ),
        ([file(str(n)) for n in range(MAX_FILES + 1)], f"got {MAX_FILES + 1}"),
    ],
)
def test_folder_with_a_fault_is_refused(files: list[FolderFile], told: str) -> None:
    with pytest.raises(BadFolderManifest, match=told):
        folder_of(files)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"7",
        b"\xff",
        b'{"folder":1,"files":[]}',
        b'{"folder":1,"files":[["a",1]]}',
        b'{"folder":1,"files":7}',
        b'{"folder":2,"files":[["a",0,"%s",0]]}' % EMPTY.encode(),
        b'{"folder":1,"files":[["a",0,"%s",true]]}' % EMPTY.encode(),
        b'{"folder":1,"files":[["a",0,"%s",2]]}' % EMPTY.encode(),
        b'{"folder":1, "files":[["a",0,"%s",0]]}' % EMPTY.encode(),
        b'{"folder":1,"files":[["a",0,"%s",0]]}\n' % EMPTY.encode(),
        b"[" * 10_000,
    ],
)
def test_bytes_that_are_no_manifest_are_refused(body: bytes) -> None:
    with pytest.raises(BadFolderManifest):
        decoded(body)


def test_manifest_is_short_json() -> None:
    body = encoded(folder_of([file("\u00e4", b"x", executable=True)]))
    assert json.loads(body) == {"folder": 1, "files": [["\u00e4", 1, file("a").sha256, 1]]}
    assert b" " not in body
