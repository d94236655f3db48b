"""A folder becomes the same bytes each time, and nothing in a descriptor is guessed."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from app.cli.bundling import UnreadablePath, bundle_folder
from app.cli.descriptor_file import parse_param, read_descriptor


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    (folder / "data").mkdir(parents=True)
    (folder / "train.py").write_text("class Train: ...\n")
    (folder / "data" / "words.txt").write_text("a b c\n")
    return folder


def names(body: bytes) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(body)).namelist()


def test_equal_files_make_equal_bytes_in_any_order(folder: Path, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    (twin / "data").mkdir(parents=True)
    (twin / "data" / "words.txt").write_text("a b c\n")
    (twin / "train.py").write_text("class Train: ...\n")
    os.utime(twin / "train.py", (1, 1))
    assert bundle_folder(folder).body == bundle_folder(twin).body


def test_other_bytes_or_names_make_another_bundle(folder: Path) -> None:
    before = bundle_folder(folder).sha256
    (folder / "train.py").write_text("class Train: pass\n")
    changed = bundle_folder(folder).sha256
    (folder / "train.py").rename(folder / "trains.py")
    assert len({before, changed, bundle_folder(folder).sha256}) == 3


def test_files_that_are_no_code_are_not_sent(folder: Path) -> None:
    for inside in (".git/config", "data/__pycache__/x.pyc", ".venv/bin/python", "old.pyc"):
        path = folder / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert names(bundle_folder(folder).body) == ["data/words.txt", "train.py"]


def test_a_file_that_may_be_secret_is_withheld_unless_the_ignore_file_names_it(
    folder: Path,
) -> None:
    for name in (".env", "data/key.pem", "data/id_rsa", ".ssh/config"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("secret")
    made = bundle_folder(folder)
    assert names(made.body) == ["data/words.txt", "train.py"]
    assert made.withheld == (".env", ".ssh", "data/id_rsa", "data/key.pem")
    (folder / ".roundhouseignore").write_text("!.env\ndata/id_rsa\n")
    made = bundle_folder(folder)
    assert names(made.body) == [".env", "data/words.txt", "train.py"]
    assert made.withheld == (".ssh", "data/key.pem")


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("*.txt", ["a/notes.md", "train.py"]),  # a name anywhere
        ("a/", ["data/words.txt", "train.py"]),  # a folder
        ("/a/*.md", ["data/words.txt", "train.py"]),  # a path from the top
        ("data/*.md", ["a/notes.md", "data/words.txt", "train.py"]),  # fits nothing
        ("# *.py", ["a/notes.md", "data/words.txt", "train.py"]),  # a comment
    ],
)
def test_the_ignore_file_is_obeyed(folder: Path, pattern: str, kept: list[str]) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "notes.md").write_text("x")
    (folder / ".roundhouseignore").write_text(f"\n{pattern}\n")
    assert names(bundle_folder(folder).body) == kept


def test_empty_folders_and_executable_files_are_sent_as_such(folder: Path) -> None:
    (folder / "out" / "deep").mkdir(parents=True)
    (folder / ".git" / "refs").mkdir(parents=True)
    (folder / "tool.sh").write_text("#!/bin/sh\n")
    (folder / "tool.sh").chmod(0o755)
    with zipfile.ZipFile(io.BytesIO(bundle_folder(folder).body)) as archive:
        modes = {one.filename: one.external_attr >> 16 for one in archive.infolist()}
    assert modes["tool.sh"] == 0o100755
    assert [name for name in modes if name.endswith("/")] == ["out/deep/"]


def test_link_inside_the_folder_is_sent_as_a_file(folder: Path) -> None:
    (folder / "again.py").symlink_to(folder / "train.py")
    with zipfile.ZipFile(io.BytesIO(bundle_folder(folder).body)) as archive:
        assert archive.read("again.py") == archive.read("train.py")


@pytest.mark.parametrize("target", ["/etc/passwd", "..", "nowhere", "data"])
def test_link_that_cannot_be_sent_is_refused_by_name(folder: Path, target: str) -> None:
    (folder / "sly").symlink_to(target)
    with pytest.raises(UnreadablePath, match=r"sly: a link to .*\.roundhouseignore"):
        bundle_folder(folder)


def test_an_empty_folder_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    with pytest.raises(UnreadablePath, match="no files to send"):
        bundle_folder(tmp_path / "empty")
    with pytest.raises(UnreadablePath, match="no such folder"):
        bundle_folder(tmp_path / "missing")


def test_largest_files_can_be_listed(folder: Path) -> None:
    (folder / "big.bin").write_bytes(b"x" * 5000)
    assert bundle_folder(folder).biggest(1) == [("big.bin", 5000)]


# --- descriptors ---


def read(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "request.yaml"
    path.write_text(text)
    return read_descriptor(path)


def test_yaml_is_read_like_json(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "{bytes: 8e9, lr: 1e-3, steps: 010, when: 2026-11-21T10:00:00Z, at: 12:30, on: [done],"
        " yes: no, hold: false, none: null, negative: -3}",
    )
    assert found == {
        "bytes": 8e9,
        "lr": 0.001,
        "steps": 10,
        "when": "2026-11-21T10:00:00Z",
        "at": "12:30",
        "on": ["done"],
        "yes": "no",
        "hold": False,
        "none": None,
        "negative": -3,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\na: 2", "duplicate key 'a'"),
        ("- a", "a descriptor must be a mapping; got a list"),
        ("a: [1", "not valid YAML or JSON"),
        ("a: 1e999", "the number 1e999 is too large"),
        ("a: !!python/object:os.system x", "not valid YAML or JSON"),
        ("a: &b [*b]", "not valid YAML or JSON"),
        ("a: !!set {x, y}", "not valid YAML or JSON"),
        ("[1]: 2", "must be a name"),
    ],
)
def test_file_that_is_no_descriptor_is_refused_with_its_place(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(UnreadablePath, match=r"request\.yaml") as caught:
        read(tmp_path, text)
    assert said in str(caught.value)


def test_folder_is_read_by_its_descriptor(folder: Path) -> None:
    with pytest.raises(UnreadablePath, match=r"no roundhouse\.yaml"):
        read_descriptor(folder)
    (folder / "roundhouse.json").write_text('{"name": "x"}')
    assert read_descriptor(folder) == {"name": "x"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("k=200", 200),
        ("k=1e-3", 0.001),
        ("k=true", True),
        ("k=[1, 2]", [1, 2]),
        ("k=adamw", "adamw"),
        ("k=a=b", "a=b"),
        ("k=NaN", "NaN"),  # JSON has no such number
        ("k=", ""),
    ],
)
def test_parameter_is_json_or_else_a_string(text: str, value: object) -> None:
    assert parse_param(text) == ("k", value)


def test_a_parameter_without_a_name_is_refused() -> None:
    for text in ("steps", "=3"):
        with pytest.raises(ValueError, match="must be name=value"):
            parse_param(text)
