"""User ids of residents: no two device workers of a host have one in common."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.workers.conftest import ROOT
from workers.process.isolation import uids

_HOLD = """
import sys
from pathlib import Path
from workers.process.isolation import uids
print(uids.reserve(sys.argv[1], [Path(sys.argv[2])]).first, flush=True)
sys.stdin.read()
"""


def _holder(name: str, folder: Path) -> subprocess.Popen[str]:
    run = [sys.executable, "-c", _HOLD, name, str(folder)]
    return subprocess.Popen(run, stdin=-1, stdout=-1, text=True, cwd=ROOT)


def _first(holder: subprocess.Popen[str]) -> int:
    assert holder.stdout is not None
    return int(holder.stdout.readline())


def _end(holder: subprocess.Popen[str], *, kill: bool = False) -> None:
    with holder:
        if kill:
            holder.kill()


def test_ranges_of_several_instances_never_overlap(tmp_path):
    """All have devices of one name, in several processes at once."""
    holders = [_holder("h.0", tmp_path) for _ in range(6)]
    firsts = sorted(map(_first, holders))
    for holder in holders:
        _end(holder)
    assert all(b - a >= uids.UIDS_PER_RANGE for a, b in pairwise(firsts))


def test_range_of_a_killed_instance_is_free_and_the_same_again(tmp_path):
    before = _holder("h.0", tmp_path)
    first = _first(before)
    _end(before, kill=True)
    after = _holder("h.0", tmp_path)
    assert _first(after) == first
    _end(after)


def test_range_of_another_name_is_another_range(tmp_path):
    held = [uids.reserve(f"h.{number}", [tmp_path]) for number in range(300)]
    assert len({one.first for one in held}) == 300
    for one in held:
        one.close()


def test_start_is_refused_when_all_ranges_are_held(tmp_path, monkeypatch):
    monkeypatch.setattr(uids, "RANGES", 2)
    held = [uids.reserve("h.0", [tmp_path]) for _ in range(2)]
    with pytest.raises(uids.NoUids, match="all 2 ranges"):
        uids.reserve("h.0", [tmp_path])
    for one in held:
        one.close()


def test_folder_that_cannot_be_written_is_skipped(tmp_path):
    (tmp_path / "file").write_text("")
    held = uids.reserve("h.0", [tmp_path / "file", tmp_path / "there"])
    assert list((tmp_path / "there").iterdir())
    held.close()
