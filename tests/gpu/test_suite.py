"""The suite of `make gpu` is bounded: a step that hangs or crashes costs only its time."""

from __future__ import annotations

import json
import os
import sys
import time

from tests.gpu import page
from tests.gpu.__main__ import bounded
from tests.gpu.steps import STEPS
from tests.processes import is_living

SAYS = 'import sys; print("a line"); print(sys.stdin.read())'
DIES = "import os; os.kill(os.getpid(), 11)"
HANGS = (
    "import subprocess, sys; child = subprocess.Popen(['sleep', '600']);"
    " print(child.pid, file=sys.stderr, flush=True); child.wait()"
)


def _bounded(code: str, given: str = "", limit_s: float = 60.0) -> dict[str, object]:
    return bounded([sys.executable, "-c", code], limit_s, dict(os.environ), given)


def test_all_steps_together_take_half_an_hour_at_most() -> None:
    assert sum(step.limit_s for step in STEPS) <= 30 * 60
    assert [step.is_first for step in STEPS] == [True] + [False] * (len(STEPS) - 1)
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_last_line_of_a_step_is_its_result() -> None:
    found = _bounded(SAYS, json.dumps({"outcome": "right", "figures": {"a": 1}}))
    assert (found["outcome"], found["figures"]) == ("right", {"a": 1})


def test_crash_of_a_step_is_told_with_its_signal() -> None:
    found = _bounded(DIES)
    assert found["outcome"] == "crashed"
    assert "exit status -11" in str(found["told"])


def test_step_that_hangs_is_ended_with_all_its_processes() -> None:
    found = _bounded(HANGS, limit_s=10.0)
    assert found["outcome"] == "out of time"
    child, until_s = int(str(found["told"])), time.monotonic() + 60
    while is_living(child):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_page_is_written_after_each_step(tmp_path) -> None:
    write = page.Writer(tmp_path, "sim", list(STEPS[:2]))
    done = {"step": STEPS[0].name, "seconds": 1.0, "outcome": "right", "figures": {"GB": 3}}
    write([done], running=STEPS[1].name)
    text = (tmp_path / "results.md").read_text()
    assert f"| {STEPS[0].name} | right | 1.0 |" in text
    assert f"| {STEPS[1].name} | running |" in text
    assert "| GB | 3 |" in text
    assert "No figure here is a GPU's" in text
    assert json.loads((tmp_path / "results.json").read_text())["results"] == [done]
