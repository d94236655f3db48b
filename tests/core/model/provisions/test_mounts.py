"""The mounts of a task: which targets and names are taken, and what each fault says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.model.descriptor import BadDescriptor, TaskDescriptor, from_json, parse, to_wire
from app.core.model.fields import Fault
from app.core.model.protocol.wellformed import MAX_PATH, is_path
from app.core.model.provisions.mounts import MAX_MOUNTS, digest, is_allowed
from tests.thoroughness import examples


def read(mounts: Any) -> TaskDescriptor:
    task = {"name": "a", "run": {"command": ["true"]}, "mounts": mounts}
    [found] = parse({"tasks": [task]}).tasks
    return found


def fault(mounts: Any) -> Fault:
    with pytest.raises(BadDescriptor) as refused:
        read(mounts)
    [found] = refused.value.faults
    return found


def test_mounts_are_read_and_needed_of_a_device() -> None:
    task = read({"/data": "imagenet", "/mnt/models/v2": "llama-2.0"})
    assert task.mounts == {"/data": "imagenet", "/mnt/models/v2": "llama-2.0"}
    assert task.devices.choice.needs == ("mount:imagenet", "mount:llama-2.0")
    assert from_json(to_wire(task)) == task


def test_task_without_mounts_needs_nothing_and_sends_nothing() -> None:
    task = read(None)
    assert task.devices.choice.needs == ()
    assert "mounts" not in to_wire(task)


@pytest.mark.parametrize(
    "target",
    [
        "data",
        "",
        "/",
        "/data/",
        "/data/../etc",
        "/data/.",
        "//data",
        "/da ta",
        "/data\n",
        "/d\u00e4ta",
        "/" + "a" * MAX_PATH,
        "/a/b\x7f",
        "/..",
        "~/data",
    ],
)
def test_target_that_is_no_plain_absolute_path_is_refused(target: str) -> None:
    assert "the target of a mount must be" in fault({target: "imagenet"}).detail


OF_EVERY_TASK = (
    "bin boot code dev environment etc inputs lib lib32 lib64 libx32 proc root run sbin scratch "
    "sys tmp usr var"
)


@pytest.mark.parametrize("first", OF_EVERY_TASK.split())
def test_target_in_what_every_task_has_is_refused(first: str) -> None:
    assert fault({f"/{first}/x": "a"}).detail.startswith(f"nothing can be shown in /{first}")
    assert fault({f"/{first}": "a"}).pointer == f"/tasks/0/mounts/~1{first}"


@pytest.mark.parametrize("name", ["", "A", "../x", "a/b", 7, None, ["a"]])
def test_name_of_another_form_is_refused(name: Any) -> None:
    assert "the name of a mount must be" in fault({"/data": name}).detail


def test_targets_that_overlap_are_refused() -> None:
    found = fault({"/data/a": "one", "/data": "two"})
    assert (found.code, found.pointer) == ("twice", "/tasks/0/mounts/~1data")
    read({"/data": "one", "/data2": "two"})


def test_too_many_mounts_are_refused() -> None:
    most = {f"/m/{n}": "a" for n in range(MAX_MOUNTS)}
    assert len(read(most).mounts) == MAX_MOUNTS
    assert fault({**most, "/more": "a"}).code == "range"


@given(st.text("/.ab", max_size=12))
@settings(max_examples=examples(300))
def test_path_is_one_that_names_no_other_folder(path: str) -> None:
    parts = path.split("/")[1:]
    is_plain = path[:1] == "/" and bool(parts) and not {"", ".", ".."} & {*parts}
    assert is_path(path) == is_plain


def test_digest_depends_on_names_and_paths_and_not_on_their_order() -> None:
    one = {"a": "/x", "b": "/y"}
    assert digest(one) == digest(dict(reversed(one.items())))
    assert len({digest(one), digest({}), digest({"a": "/y", "b": "/x"}), digest({"a": "/x"})}) == 4


def test_mount_is_for_the_tenants_that_it_names_and_those_below() -> None:
    assert is_allowed(None, ["child", "alpha", "root"])
    assert is_allowed(["alpha"], ["child", "alpha", "root"])
    assert not is_allowed(["child"], ["alpha", "root"])
    assert not is_allowed([], ["alpha", "root"])
