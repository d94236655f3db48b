"""Files that name packages are read with the line of each fault, and name nothing but packages."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.model.provisions.requirements import (
    MAX_BYTES,
    MAX_LISTED,
    BadFile,
    FileFault,
    PinnedPackage,
    normal,
    read_hashed,
    read_pylock,
    read_requirements,
    read_uv_lock,
    text_of,
)
from tests.thoroughness import examples

HASH = "sha256:" + "5" * 64

NAMES = st.from_regex(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,10}[A-Za-z0-9])?", fullmatch=True)
VERSIONS = st.from_regex(r"[0-9]{1,2}(\.[0-9]{1,2}){0,2}(\.dev1|rc2|\+cpu)?", fullmatch=True)


@pytest.mark.parametrize(
    "line",
    [
        "tqdm",
        "pandas==2.3.1",
        "transformers[torch] >= 4.50, <6",
        "numpy (>=1.26)",
        'colorama ; sys_platform == "win32"',
        "torch~=2.5  # the platform's",
        "a===1.0+local",
    ],
)
def test_requirement_of_the_index_is_taken(line: str) -> None:
    assert len(read_requirements(f"# what it needs\n\n{line}\n")) == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("./mine", "local path"),
        ("../other", "local path"),
        ("/etc/passwd", "local path"),
        ("~/mine", "local path"),
        ("sub/folder", "local path"),
        ("mine.whl", "names a file"),
        ("mine-1.0.tar.gz", "names a file"),
        ("https://example.org/a-1.0-py3-none-any.whl", "names an address"),
        ("a @ https://example.org/a-1.0-py3-none-any.whl", "names an address"),
        ("a@file:///etc/passwd", "names an address"),
        ("git+ssh://git@example.org/a.git", "names an address"),
        ("-e .", "local folder"),
        ("--editable=.", "local folder"),
        ("-r other.txt", "write the lines"),
        ("-c constraints.txt", "write the lines"),
        ("--index-url https://example.org", "administrator sets the index"),
        ("--extra-index-url=https://example.org", "administrator sets the index"),
        ("--find-links /", "administrator sets the index"),
        ("--trusted-host example.org", "option '--trusted-host'"),
        ("--pre", "option '--pre'"),
        ("--no-binary :all:", "option '--no-binary'"),
        ("${HOME}", "names a variable"),
        ("tqdm and pandas", "names no package"),
        ("tqdm>=", "names no package"),
        ("=1.0", "names no package"),
        (f"tqdm==4.67 --hash={HASH}", "as `lock`"),
        ("tqdm --config-settings=a=b", "names no package"),
        ("tqdm; python_version > '3' \\\n--pre", "names no package"),
    ],
)
def test_hostile_line_is_refused_with_its_line_number(line: str, told: str) -> None:
    with pytest.raises(BadFile) as bad:
        read_requirements(f"tqdm\n# a comment\n\n{line}\npandas\n")
    (fault,) = bad.value.faults
    assert fault.line == 4
    assert told in fault.detail


def test_line_that_goes_on_has_the_number_of_its_first_row() -> None:
    with pytest.raises(BadFile) as bad:
        read_requirements("tqdm\npandas \\\n  >=2, \\\n  <3\n./a\n")
    assert [fault.line for fault in bad.value.faults] == [5]
    assert read_requirements("pandas \\\n  >=2, \\\n  <3\n") == ["pandas >=2, <3"]


def test_many_faults_are_counted() -> None:
    with pytest.raises(BadFile) as bad:
        read_requirements("./a\n" * 50)
    assert len(bad.value.faults) == MAX_LISTED + 1
    assert "30 more" in bad.value.faults[-1].detail


@given(lines=st.lists(st.tuples(NAMES, VERSIONS), min_size=1, max_size=8))
@settings(max_examples=examples(100))
def test_hashed_requirements_are_read_as_they_were_written(lines: list[tuple[str, str]]) -> None:
    text = "".join(f"{name}=={version} \\\n    --hash={HASH}\n" for name, version in lines)
    found = read_hashed(text)
    assert [(one.name, one.version) for one in found] == [(normal(n), v) for n, v in lines]
    assert all(one.hashes == (HASH,) for one in found)


@given(line=st.text(max_size=60))
@settings(max_examples=examples(400))
def test_any_line_is_a_package_or_a_fault_with_its_line(line: str) -> None:
    faults = tuple[FileFault, ...]()
    found = list[str]()
    try:
        found = read_requirements(f"tqdm\n{line}")
    except BadFile as bad:
        faults = bad.faults
    assert all(fault.line >= 2 for fault in faults)
    for one in found:
        assert not one.startswith(("-", ".", "/"))
        assert not {"://", "\n", " -"} & {
            one[n : n + k] for n in range(len(one)) for k in (1, 2, 3)
        }


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("tqdm==4.67", "has no --hash"),
        (f"tqdm>=4 --hash={HASH}", "one version with =="),
        ("tqdm==4.67 --hash=md5:abc", "no SHA-256"),
        (f"./tqdm --hash={HASH}", "local path"),
        (f"a @ https://example.org/a.whl --hash={HASH}", "an address"),
        ("-r other.txt", "write the lines"),
    ],
)
def test_lock_without_hashes_is_refused_with_its_line_number(line: str, told: str) -> None:
    with pytest.raises(BadFile) as bad:
        read_hashed(f"pandas==2.3 --hash={HASH}\n{line}\n")
    (fault,) = bad.value.faults
    assert fault.line == 2
    assert told in fault.detail


PYLOCK = f"""
lock-version = "1.0"
created-by = "a tool"
[[packages]]
name = "Tqdm"
version = "4.67.1"
marker = "python_version >= '3.9'"
wheels = [{{url = "https://example.org/tqdm.whl", hashes = {{sha256 = "{"5" * 64}"}}}}]
"""


def test_pylock_names_its_wheels_by_hash_and_not_by_address() -> None:
    (found,) = read_pylock(PYLOCK)
    marker = "python_version >= '3.9'"
    assert found == PinnedPackage(name="tqdm", version="4.67.1", marker=marker, hashes=(HASH,))


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ('vcs = {type = "git", url = "https://example.org"}', "version control"),
        ('directory = {path = "."}', "a local folder"),
        ('archive = {path = "a.zip"}', "a file"),
        ('version = "1"\nsdist = {url = "https://example.org/a.tar.gz"}', "has no wheel"),
        ('version = "1"\nwheels = [{url = "https://example.org/a.whl"}]', "no SHA-256"),
        ('version = "1 --pre"', "no sound name"),
        ("version = 1", "no sound name"),
    ],
)
def test_pylock_with_another_source_is_refused_at_its_package(more: str, told: str) -> None:
    with pytest.raises(BadFile) as bad:
        read_pylock(f'{PYLOCK}[[packages]]\nname = "a"\n{more}\n')
    (fault,) = bad.value.faults
    assert fault.line == 10
    assert told in fault.detail


UV_LOCK = f"""
version = 1
requires-python = ">=3.11"
[[package]]
name = "mine"
version = "0.1.0"
source = {{ virtual = "." }}
dependencies = [{{ name = "tqdm" }}]
[package.metadata]
requires-dist = [
  {{ name = "tqdm", specifier = ">=4", marker = "python_version >= '3.9'" }},
  {{ name = "pandas", marker = "extra == 'more'" }},
]
[[package]]
name = "tqdm"
version = "4.67.1"
source = {{ registry = "https://example.org/simple" }}
wheels = [{{ url = "https://example.org/tqdm.whl", hash = "{HASH}" }}]
"""


def test_uv_lock_gives_the_project_that_it_is_of() -> None:
    project = tomllib.loads(read_uv_lock(UV_LOCK))
    assert project == {
        "project": {
            "name": "mine",
            "version": "0",
            "dependencies": ["tqdm>=4 ; python_version >= '3.9'"],
        }
    }


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ('source = { git = "https://example.org/a.git" }', "comes from git"),
        ('source = { path = "../a" }', "comes from path"),
        ('source = { url = "https://example.org/a.whl" }', "comes from url"),
        ('source = { editable = "../a" }', "comes from editable"),
        ('source = { registry = "https://example.org" }', "has no wheel"),
    ],
)
def test_uv_lock_with_another_source_is_refused_at_its_package(more: str, told: str) -> None:
    with pytest.raises(BadFile) as bad:
        read_uv_lock(f'{UV_LOCK}[[package]]\nname = "a"\nversion = "1"\n{more}\n')
    (fault,) = bad.value.faults
    assert fault.line == 20
    assert told in fault.detail


@pytest.mark.parametrize("read", [read_pylock, read_uv_lock])
@pytest.mark.parametrize("text", ["", "a = ", "[" * 5000, "[[package]]", "packages = 1"])
def test_broken_toml_is_a_fault(read: object, text: str) -> None:
    with pytest.raises(BadFile):
        read(text)  # type: ignore[operator]


def test_file_is_utf_8_and_bounded() -> None:
    assert text_of("﻿tqdm".encode()) == "tqdm"
    for body in (b"tqdm\n\xff", b"a\0", b"a" * (MAX_BYTES + 1)):
        with pytest.raises(BadFile):
            text_of(body)
