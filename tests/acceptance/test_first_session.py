"""The first session of the tutorial, word for word, on the whole system."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from app.cli import root_command
from app.settings import settings
from tests import command_line
from tests.acceptance.conftest import SETTLE_S

pytestmark = pytest.mark.acceptance

ROOT = Path(__file__).parents[2]
JOBS = Path(__file__).parent / "jobs"

OPS = """
import torch

def tokenize(ctx):
    return {"tokens": torch.arange(10)}
"""
TRAIN = """
class Train:
    def __init__(self, ctx, *, lr):
        self.tokens, self.lr = ctx.inputs["tokens"], lr

    def step(self, ctx):
        print("lr", self.lr)
        if ctx.step == 3:
            ctx.finish({"sum": int(self.tokens.sum())})
"""

Run = Callable[..., Result]


@pytest.fixture
def run(system: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run the command line as a user would who typed `make up` in another terminal."""
    for name in ("ROUNDHOUSE_URL", "ROUNDHOUSE_KEY", "ROUNDHOUSE_AS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROUNDHOUSE_HOME", str(system.handle.wanted.home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    settings.cache_clear()
    yield lambda *words, **more: command_line.invoke(words, **more)
    settings.cache_clear()


def shown(run: Run, id: str) -> dict[str, Any]:
    """Return the only task of a request."""
    request = json.loads(run("show", id, "-o", "json").stdout)
    return {**request["tasks"][0], "request_state": request["state"]}


def until(run: Run, id: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    until_s = time.monotonic() + SETTLE_S
    while not holds(task := shown(run, id)):
        assert time.monotonic() < until_s, task
        time.sleep(0.1)
    return task


def test_request_is_submitted_paused_explained_resumed_and_followed(run: Run, system: Any) -> None:
    with system.gate() as gate:
        words = (
            "submit",
            "--job",
            "train:Train",
            "--bundle",
            JOBS,
            "-p",
            "steps=150",
            "-o",
            "json",
        )
        slow = ("-p", "step_s=0.2", "-p", f"gate={gate.file}", "--mount", "/gates=gates")
        accepted = run(*words, *slow)
        assert accepted.exit_code == 0, accepted.output
        id = json.loads(accepted.stdout)["id"]
        until(run, id, lambda task: task["step"] > 5)

        assert run("pause", id).exit_code == 0
        paused = until(run, id, lambda task: task["state"] == "blocked")
        assert 5 < paused["step"] < 150
        assert "HELD_BY_USER" in run("why", id).stdout
        assert shown(run, id)["step"] == paused["step"]

    assert run("resume", id).exit_code == 0
    followed = run("logs", "-f", id)
    assert followed.exit_code == 0, followed.output
    steps = [int(n) for n in re.findall(r"^end \d+ \d+ (\d+)$", followed.stdout, re.MULTILINE)]
    assert steps == list(range(1, 151))
    ended = shown(run, id)
    assert (ended["request_state"], ended["lost_steps"], ended["attempts"]) == ("done", 0, 0)
    assert ended["pauses"] >= 1
    assert "alpha" in run("usage").stdout


def test_watching_a_failing_job_shows_its_traceback(run: Run) -> None:
    watched = run("submit", "--job", "train:Raises", "--bundle", JOBS, "--watch")
    assert watched.exit_code == 1, watched.output
    assert "ValueError: the third step is cursed" in watched.stderr
    assert "in step" in watched.stderr


def test_request_of_the_docs_runs(run: Run, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "descriptor.md").read_text()
    [text] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "request.yaml").write_text(text)
    code = tmp_path / "code"
    code.mkdir()
    (code / "ops.py").write_text(OPS)
    (code / "train.py").write_text(TRAIN)
    (code / "requirements.txt").write_text("towers\n")  # of the folder of wheels
    assert run("secret", "set", "HF_TOKEN", input="hf_of-the-first-session").exit_code == 0
    watched = run("submit", tmp_path / "request.yaml", "--watch")
    assert watched.exit_code == 0, watched.output
    request = json.loads(run("show", "sweep-7", "-o", "json").stdout)
    prep, train = request["tasks"]
    assert list(prep["outputs"]) == ["tokens"]
    assert train["result"] == {"sum": 45}
    assert run("logs", train["id"]).stdout == "lr 0.001\n" * 3


# --- every command of the tutorial and of some how-tos --------------------------------------------

PAGES = ("tutorial", "howto/run_ddp", "howto/run_a_graph", "howto/use_datablocks", "howto/simulate")
#: The file that the reader saves a page's Python as.
SAVED = {"tutorial": "mine/train.py", "howto/run_a_graph": "pairs.py"}
# commands that go on until Ctrl-C, and the option that ends them here
ENDLESS = {"top": ["--once"]}


def code_of(page: str, language: str) -> str:
    """Return the blocks of a language; those of commands and their answers have none."""
    text = (ROOT / ("" if page == "README" else "docs") / f"{page}.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return "".join(code for its_language, code in blocks if its_language == language)


def session_lines(page: str) -> list[str]:
    """Return the commands of a page; the answers that it shows begin with other words."""
    lines = code_of(page, "").splitlines()
    return [line for line in lines if line.startswith(("roundhouse ", "python "))]


def save_code(page: str, folder: Path) -> None:
    file = folder / SAVED[page]
    file.parent.mkdir(exist_ok=True)
    file.write_text(code_of(page, "python"))


@pytest.mark.long
def test_every_command_of_the_tutorial_works(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    lines = [line for page in PAGES for line in session_lines(page)]
    assert len(lines) > 40
    for page in SAVED:
        save_code(page, tmp_path)
    try:
        for line in lines:
            _do(run, line)
    finally:  # other tests need the devices
        for request in json.loads(run("ps", "-o", "json").stdout):
            run("cancel", request["id"])
    for left in ("got/*artifacts.zip", "digits.safetensors", "replay.svg"):
        [file] = tmp_path.glob(left)
        assert file.stat().st_size > 0, left


@pytest.mark.long
def test_first_session_of_the_readme_shows_a_wait_its_reason_and_a_move(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    seats = []
    try:
        for line in session_lines("README"):
            if line.startswith("roundhouse why script"):
                assert "[WAITING_FOR_DEVICE]" in run("why", "script").stdout
                seats.append(shown(run, "digits")["seat"])
            _do(run, line)
            if line.startswith("roundhouse migrate digits"):
                moved = until(run, "digits", lambda task: task["seat"] not in (None, *seats))
                assert moved["lost_steps"] == 0
    finally:  # other tests need the devices
        for request in json.loads(run("ps", "-o", "json").stdout):
            run("cancel", request["id"])
        run("--as", "beta", "cancel", "chars")
    assert seats


def _do(run: Run, line: str) -> None:
    if line.startswith("roundhouse "):
        return _works(run, shlex.split(line, comments=True)[1:])
    shell = line.replace("python ", f"{sys.executable} ", 1)
    subprocess.run(shell, shell=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def _works(run: Run, words: list[str]) -> None:
    """Run a command; retry while its task was just preempted or has no checkpoint yet."""
    words += next((more for verb, more in ENDLESS.items() if verb in words), [])
    until_s = time.monotonic() + SETTLE_S
    while (result := run(*words)).exit_code in (root_command.REFUSED, root_command.NOT_FOUND):
        assert time.monotonic() < until_s, (words, result.output)
        time.sleep(0.5)
    assert result.exit_code == root_command.OK, (words, result.output)
