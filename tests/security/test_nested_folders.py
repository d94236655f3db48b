"""Files that a tenant leaves in its folder are removed, however deep it nests folders."""

from __future__ import annotations

import subprocess
import sys

import pytest

from workers.transfer.host_context import set_aside
from workers.transfer.tree_removal import remove_tree

pytestmark = pytest.mark.security

_NEST = """
import os
for _ in range(1_500):
    os.mkdir("d")
    os.chdir("d")
os.chmod(".", 0)
"""


def test_deeply_nested_folders_are_set_aside_at_once_and_removed(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    subprocess.run([sys.executable, "-c", _NEST], cwd=scratch, check=True)
    old = set_aside(scratch)
    assert not scratch.exists()
    remove_tree(old)
    assert not old.exists()
