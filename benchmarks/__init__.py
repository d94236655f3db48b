"""Measure what Roundhouse promises: one program per section of docs/benchmarks.md.

    python -m benchmarks.NAME [--quick]

Each program measures its peers in the same run, and prints one JSON object as the last line on
stdout. Without --quick it also writes the object to benchmarks/results/NAME.json.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Bounds a measured value: it is `met` if `value` `op` `bound`; `op` is "<=" or ">="."""

    name: str
    value: float
    unit: str
    op: str
    bound: float

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.op == "<=" else self.value >= self.bound


def quick() -> bool:
    """Return whether the short form is asked for; with --help, print the benchmark's text and end.

    Every benchmark calls this before it starts anything.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.stdout.write(f"{sys.modules['__main__'].__doc__}\n")
        raise SystemExit(0)
    return "--quick" in sys.argv[1:]


def report(name: str, targets: list[Target], peers: dict[str, Any]) -> int:
    """Print the result and store it unless `quick()`; returns the exit status."""
    result = {
        "benchmark": name,
        "targets": [{**asdict(target), "met": target.met} for target in targets],
        "peers": peers,
        "machine": machine(),
    }
    if not quick():
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if all(target.met for target in targets) else 1


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
    }
