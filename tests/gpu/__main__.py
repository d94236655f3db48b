"""Run the suite of an accelerator: `make gpu`, or `make gpu SIM=1` on a simulated one.

    python -m tests.gpu [--kind cuda] [--results FOLDER] [STEP ...]

The steps come in the order of what one must know first.  Each has its time limit and a process
group of its own, so that a crash or a hang of one costs only its time.  `results.json` and
`results.md` in FOLDER are written after each step, so that a run which is cut short keeps what it
found.  Ends with 1 if a step went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.gpu import page
from tests.gpu.step import Step
from tests.gpu.steps import STEPS

ROOT = Path(__file__).parent.parent.parent
TOLD = 2000  # characters of a step's errors that the results keep

JSON = dict[str, Any]


def main() -> int:
    asked = _arguments()
    asked.results.mkdir(parents=True, exist_ok=True)
    steps = [step for step in STEPS if not asked.steps or step.name in asked.steps]
    write = page.Writer(asked.results, asked.kind, steps)
    results: list[JSON] = []
    with _environment(asked.kind) as environ:
        for step in steps:
            write(results, running=step.name)
            print(f"{step.name} (at most {step.limit_s} s): {step.about}", flush=True)  # noqa: T201
            results.append(_run(step, asked.kind, environ, results))
            print(f"    {page.told_of(results[-1])}", flush=True)  # noqa: T201
            if step.is_first and results[-1]["outcome"] != "right":
                break  # there is no device to try anything on
    write(results)
    print(f"The results are in {asked.results}/results.md", flush=True)  # noqa: T201
    return 0 if all(result["outcome"] in page.FINE for result in results) else 1


def _arguments() -> argparse.Namespace:
    default = Path(tempfile.gettempdir()) / "roundhouse-gpu"
    parser = argparse.ArgumentParser(prog="python -m tests.gpu")
    parser.add_argument("--kind", default="cuda")
    parser.add_argument("--results", type=Path, default=default)
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", help="these steps; all if none is named"
    )
    asked = parser.parse_args()
    if unknown := set(asked.steps) - {step.name for step in STEPS}:
        parser.error(f"there is no step {', '.join(sorted(unknown))}")
    return asked


@contextlib.contextmanager
def _environment(kind: str) -> Iterator[dict[str, str]]:
    """Give all steps one simulated device, if that is the kind."""
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as folder:
        home = Path(folder)
        home.chmod(0o755)
        more = {}
        if kind == "sim":
            (home / "budget").touch()
            (home / "budget").chmod(0o666)
            more = {"SIM_DEVICES": "1", "SIM_HOME": folder, "SIM_MEMORY_BYTES": str(512 * 2**20)}
        yield {**os.environ, **more}


def _run(step: Step, kind: str, environ: dict[str, str], before: list[JSON]) -> JSON:
    command = [sys.executable, "-m", "tests.gpu.step", step.name, "--kind", kind]
    return {"step": step.name, **bounded(command, step.limit_s, environ, json.dumps(before))}


def bounded(command: list[str], limit_s: float, environ: dict[str, str], given: str) -> JSON:
    """Run a command in a process group of its own; return what it said, or how it ended."""
    began_s = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(given, timeout=limit_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        out, errors = process.communicate()
        found: JSON = {"outcome": "out of time", "told": errors[-TOLD:]}
    else:
        found = _said(process.returncode, out, errors)
        _kill(process)  # what it left behind
    return {"seconds": round(time.monotonic() - began_s, 1), **found}


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _said(status: int, out: str, errors: str) -> JSON:
    last = next(reversed(out.splitlines()), "")
    if status == 0 and last.startswith("{"):
        found: JSON = json.loads(last)
        return found
    return {"outcome": "crashed", "told": f"exit status {status}\n{errors[-TOLD:]}"}


if __name__ == "__main__":
    sys.exit(main())
