"""Tests are repeated beside busy processes, which end with the program that repeats them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import processes, repeat

ROOT = Path(__file__).parents[1]
#: It fails in every second run.
FLAKY = """
from pathlib import Path
def test_flaky():
    runs = Path(__file__).with_suffix(".runs")
    count = len(runs.read_text()) if runs.exists() else 0
    runs.write_text("x" * (count + 1))
    assert count % 2 == 0
"""


def _started(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.repeat", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_obey_ctrl_c,
    )


def _obey_ctrl_c() -> None:
    """Obey SIGINT as in a terminal: what a shell starts in the background ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_run_that_fails_is_named_and_the_others_follow(tmp_path):
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  long\n")
    running = _started(["3", str(tmp_path / "test_flaky.py")])
    told, _ = running.communicate()
    assert running.returncode == 1
    assert told.splitlines()[-1] == "--- 3 runs, failed: 2"


@pytest.mark.parametrize("words", [[], ["5"], ["many", "tests"], ["5", "tests/not_there.py"]])
def test_words_that_name_no_tests_are_refused(words, capsys):
    assert repeat.main(words) == 2
    assert "REPEAT=5 ONLY=path" in capsys.readouterr().err


def test_busy_processes_end_with_the_runs():
    with repeat.busy(2) as ids:
        assert all(processes.is_living(id) for id in ids)
    assert not any(processes.is_living(id) for id in ids)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.slow
def test_busy_processes_end_when_the_program_is_interrupted(tmp_path, end):
    (tmp_path / "test_hangs.py").write_text("import time\ndef test_hangs(): time.sleep(600)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  long\n")
    running = _started(["2", str(tmp_path / "test_hangs.py")])
    assert running.stdout is not None
    assert running.stdout.readline().startswith("--- run 1 of 2")
    started = psutil.Process(running.pid).children()
    os.kill(running.pid, end)
    running.wait()
    loops = [process for process in started if "getppid" in " ".join(processes.words_of(process))]
    psutil.wait_procs(loops)
    assert not any(processes.is_living(loop) for loop in loops)
    for process in started:  # pytest itself, which a killed program cannot end
        if processes.is_living(process):
            process.kill()
    running.stdout.close()
