"""A device in a process of its own, so that it can be stopped and killed.

    python -m tests.workers.separate HOME [--nap S] [--sandbox off]

Says "running" once its job steps; without walls the job writes to HOME/steps when each began.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.workers.conftest import Ground


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("--nap", type=float, default=0.01)
    parser.add_argument("--sandbox", default="off")
    options = parser.parse_args()
    ground = Ground(
        options.home, lease_s=2.0, lease_margin_s=1.0, beat_s=0.2, sandbox=options.sandbox
    )
    ground.open()
    path = str(options.home / "steps") if options.sandbox == "off" else None
    params = {"nap_s": options.nap, "path": path}
    ground.launch("t1", "jobs:Stamp", params=params)
    ground.steps("t1", 3)
    sys.stdout.write("running\n")
    sys.stdout.flush()
    time.sleep(60)


if __name__ == "__main__":
    main()
