"""Folders of residents are removed, whatever is in them."""

from __future__ import annotations

import subprocess

import pytest

from workers.transfer.tree_removal import remove_tree


def test_empty_folder_is_removed_without_a_process(tmp_path, monkeypatch):
    monkeypatch.delattr(subprocess, "run")
    (tmp_path / "empty").mkdir()
    remove_tree(tmp_path / "empty")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("sort", ["filled", "link", "nothing"])
def test_only_what_was_named_is_removed(tmp_path, sort):
    kept, folder = tmp_path / "kept", tmp_path / "folder"
    kept.mkdir()
    (kept / "file").touch()
    if sort == "filled":
        folder.mkdir()
        (folder / "file").touch()
    elif sort == "link":
        folder.symlink_to(kept)
    remove_tree(folder)
    assert [*tmp_path.iterdir()] == [kept]
    assert (kept / "file").exists()
