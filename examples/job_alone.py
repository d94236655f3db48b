"""Run one job alone, without interruptions: Roundhouse must give the same result, bit for bit.

    python -m examples.job_alone FOLDER module:Class [--params JSON] [--preset JSON]
    python -m examples.job_alone FOLDER GRAPH.json ...

It uses the same code, preset and environment as a resident, but no supervisor, no orders and no
sandbox.  Prints one JSON object: {"steps", "result", "metrics", "preset"}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from workers.hardware import preset
from workers.hardware.accelerator import Accelerator
from workers.process.isolation.sandbox import ENVIRONMENT
from workers.residents.context import Context
from workers.residents.entry import call, load_entry, load_graph, plain, seed, take_step

JSON = dict[str, Any]


def run_alone(
    folder: Path, entry: str, *, params: JSON, settings: JSON, kind: str = "cpu", steps: int = 0
) -> JSON:
    """Run the job in this process, to its end or for `steps` steps.

    The process must be new, as presets cannot be undone. `entry` is "module:Class",
    "module:function", or the path of a graph without inputs.
    """
    taken = preset.configure(settings)
    accelerator = Accelerator(kind)
    ctx = Context(device=accelerator.device, rank=0, world_size=1, params=params)
    seed(accelerator)
    if entry.endswith(".json"):
        body = json.loads(Path(entry).read_text(encoding="utf-8"))
        job: Any = load_graph(folder.resolve(), body, accelerator).begin({})
    else:
        built = load_entry(folder.resolve(), entry)
        if not isinstance(built, type):
            return {
                "steps": 1,
                "result": _json(call(built, ctx)),
                "metrics": {},
                "preset": taken,
            }
        job = built(ctx, **params)
    done, metrics = 0, {}
    while ctx.result is None and (not steps or done < steps):
        metrics = take_step(job, ctx, done + 1)
        done += 1
    return {
        "steps": done,
        "result": _json(ctx.result or {}),
        "metrics": metrics,
        "preset": taken,
    }


def _json(result: JSON) -> JSON:
    """Return the result. A value that JSON cannot hold, such as an output, is replaced by its
    type's name.
    """
    said = {}
    for name, value in result.items():
        try:
            said[name] = plain(value, name)
        except TypeError:
            said[name] = f"<{type(value).__name__}>"
    return said


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.job_alone", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("entry", help="module:Class, module:function or GRAPH.json")
    parser.add_argument("--params", type=json.loads, default={})
    parser.add_argument("--preset", type=json.loads, default={})
    parser.add_argument("--kind", default="cpu")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many; 0: at the end")
    options = parser.parse_args(argv)
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        # Python reads some of these variables only at its start.
        again = [
            sys.executable,
            "-m",
            "examples.job_alone",
            *(sys.argv[1:] if argv is None else argv),
        ]
        os.execve(sys.executable, again, {**os.environ, **ENVIRONMENT})
    answer = run_alone(
        options.folder,
        options.entry,
        params=options.params,
        settings=options.preset,
        kind=options.kind,
        steps=options.steps,
    )
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
