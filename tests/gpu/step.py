"""Run one step of the suite: `python -m tests.gpu.step NAME --kind KIND`, for `tests.gpu`.

The results so far come on the standard input.  The last line on the standard output is one JSON
object: the outcome, figures, and what is to be told.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

JSON = dict[str, Any]


BEGAN_S = time.monotonic()
TELLS_S = 5  # before its limit, a step that still runs tells where it is


class CannotRun(Exception):
    """Raised by a step that this machine, or this kind of device, cannot run; it says why."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its name, what it finds out, its time limit and its function."""

    name: str
    about: str
    limit_s: int
    run: Callable[[Run], None]
    is_first: bool = False  # without it nothing else can run


@dataclass(slots=True)
class Run:
    """What a step is given, and what it has found."""

    kind: str
    before: list[JSON]
    figures: JSON = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def is_simulated(self) -> bool:
        return self.kind == "sim"

    def only_on_cuda(self, what: str) -> None:
        if self.kind != "cuda":
            raise CannotRun(f"{what}: only on CUDA")

    def must(self, is_right: bool, otherwise: str) -> None:
        """Note what went wrong, and go on: a step tells all that it can."""
        if not is_right:
            self.wrong.append(otherwise)

    def figure_of(self, step: str, name: str) -> Any:
        """Return a figure that an earlier step found; None if there is none."""
        found = next((result for result in self.before if result["step"] == step), {})
        return found.get("figures", {}).get(name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.step")
    parser.add_argument("name")
    parser.add_argument("--kind", required=True)
    asked = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries and jobs print is no answer
    steps = importlib.import_module("tests.gpu.steps").STEPS
    step = next(step for step in steps if step.name == asked.name)
    module = importlib.import_module("tests.gpu.step")  # not __main__, whose classes are others
    run = module.Run(asked.kind, json.loads(sys.stdin.read() or "[]"))
    told, outcome = "", "right"
    left_s = step.limit_s - TELLS_S - (time.monotonic() - BEGAN_S)
    faulthandler.dump_traceback_later(max(1.0, left_s))  # where it hangs, if it does
    try:
        step.run(run)
    except module.CannotRun as error:
        told, outcome = str(error), "cannot run"
    except Exception:
        told, outcome = traceback.format_exc()[-2000:], "wrong"
    if run.wrong:
        told, outcome = "\n".join([*run.wrong, told]).strip(), "wrong"
    print(json.dumps({"outcome": outcome, "told": told, "figures": run.figures}), file=answers)
    answers.flush()
    os._exit(0)  # threads of a driver may not end


if __name__ == "__main__":
    sys.exit(main())
