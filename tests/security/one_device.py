"""Run a device worker's supervisor until it ends, and print the reports that its island got.

    python -m tests.security.one_device HOME MODE

Writes each report's facts as a line of JSON, then "ended".
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from pathlib import Path

from app.core.security.sandbox_layers import Mode
from tests.workers.conftest import Ground


def main(home: Path, mode: Mode) -> None:
    logging.basicConfig(level=logging.WARNING)
    ended = threading.Event()
    ground = Ground(home, sandbox=mode)
    ground.supervisor.on_fatal = ended.set
    ground.supervisor.start()
    ground.launch("t1", "jobs:Count", params={"steps": 3})
    ended.wait(20.0)
    ground.supervisor.join(10.0)
    for report in ground.reports:
        sys.stdout.write(json.dumps({**report.facts, "held": len(report.residents)}) + "\n")
    sys.stdout.write("ended\n" if ended.is_set() else "still serves\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])  # type: ignore[arg-type]
