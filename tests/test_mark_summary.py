"""The closing lines of a run tell of each mark what ran, what was skipped, and why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_plain(): pass
@pytest.mark.slow
def test_ran(): pass
@pytest.mark.slow
def test_failed(): assert False
@pytest.mark.slow
@pytest.mark.browser
def test_skipped_in_its_body(): pytest.skip("there is no browser")
@pytest.mark.browser
@pytest.mark.skip(reason="there is no browser")
def test_skipped_by_a_mark(): pass
@pytest.mark.long
def test_left_out(): pass
@pytest.mark.slow
@pytest.mark.xfail(strict=False, reason="known")
def test_known_to_fail(): assert False
"""
EXPECTED = [
    "browser    0 ran, 2 skipped",
    "  2 skipped: there is no browser",
    "slow       3 ran, 1 skipped",
    "  1 skipped: there is no browser",
    "long       0 ran, 0 skipped, 1 not selected",
]


@pytest.mark.parametrize("spread", [[], ["-n", "2"]], ids=["one process", "two processes"])
@pytest.mark.slow
def test_run_ends_with_the_counts_of_each_mark(tmp_path: Path, spread: list[str]) -> None:
    (tmp_path / "conftest.py").write_text(
        "from tests.mark_summary import MarkSummary\n"
        "def pytest_configure(config): config.pluginmanager.register(MarkSummary())\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  browser\n  long\n")
    (tmp_path / "test_marks.py").write_text(TESTS)
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not long", *spread]
    ended = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": root, "PATH": ""}, capture_output=True, text=True
    )
    [told] = [part for part in ended.stdout.split("tests by mark")[1:] if "browser" in part]
    lines = told.splitlines()[1:]
    assert lines[: len(EXPECTED)] == EXPECTED, ended.stdout
