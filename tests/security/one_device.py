"""Run a device worker's supervisor until it or its task ends, and print the reports of that time.

    python -m tests.security.one_device HOME MODE

Writes each report's facts as a line of JSON, then "ended".
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from pathlib import Path

from app.core.model.protocol.messages import Finished
from app.core.security.sandbox_layers import Mode
from tests.workers.conftest import PATIENCE_S, DeviceRig


def main(home: Path, mode: Mode) -> None:
    logging.basicConfig(level=logging.WARNING)
    ended = threading.Event()
    rig = DeviceRig(home, sandbox=mode)

    def end() -> None:
        ended.set()
        with rig.changed:
            rig.changed.notify_all()

    rig.supervisor.on_fatal = end
    rig.supervisor.start()
    rig.launch("t1", "jobs:Count", params={"steps": 3})
    rig.until(lambda: ended.is_set() or rig.all(Finished, "t1"))
    rig.supervisor.join(PATIENCE_S if ended.is_set() else 0.0)
    for report in rig.reports:
        sys.stdout.write(json.dumps({**report.facts, "held": len(report.residents)}) + "\n")
    sys.stdout.write("ended\n" if ended.is_set() else "still serves\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])  # type: ignore[arg-type]
