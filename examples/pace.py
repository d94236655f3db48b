"""Measure a step of a job on this machine, in milliseconds; the demo derives its length from it.

python -m examples.pace FOLDER PARAMS_AS_JSON
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any

import torch

WARM_STEPS = 20
TIMED_STEPS = 25
TIMES = 8  # the quickest counts, because other load only makes it slower


class Alone:
    """A minimal `ctx`, with all that these jobs use of it."""

    device = "cpu"

    def __init__(self) -> None:
        self.step = 0

    def finish(self, result: dict[str, Any]) -> None:
        raise AssertionError("the job has more steps than are timed")


def main(folder: str, params: str) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, folder)
    ctx = Alone()
    job = import_module("train").Train(ctx, **{**json.loads(params), "steps": 10**6})
    run(job, ctx, WARM_STEPS)
    print(1e3 * min(timed_s(job, ctx) for _ in range(TIMES)) / TIMED_STEPS)


def timed_s(job: Any, ctx: Alone) -> float:
    began_s = time.perf_counter()
    run(job, ctx, TIMED_STEPS)
    return time.perf_counter() - began_s


def run(job: Any, ctx: Alone, steps: int) -> None:
    for _ in range(steps):
        ctx.step += 1
        job.step(ctx)


if __name__ == "__main__":
    main(*sys.argv[1:])
